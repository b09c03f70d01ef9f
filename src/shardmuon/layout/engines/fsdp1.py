"""FSDP1 (`FullyShardedDataParallel(..., use_orig_params=True)`): pieces of flat parameters, cut at any element.

The original parameters are described as they are, whenever the optimizer was made. Flat parameters themselves, which
modules have with `use_orig_params=False`, hold matrices and vectors together and are refused.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from shardmuon._fsdp1 import FLATTENED, Piece, Unit, all_units, is_flat, is_flattened, units_in
from shardmuon._torch import is_alive
from shardmuon.comm.groups import GroupRef
from shardmuon.layout.engines.base import Claim, Group, is_marked
from shardmuon.layout.engines.flat import FlatEngine, FlatShard
from shardmuon.layout.views import Ints

KIND = "FSDP1 flat parameters"


class Place(NamedTuple):
    """Where a parameter is in FSDP1's units.

    Attributes:
        unit: Its unit.
        number: Which of the unit's pieces.
        info: What its storage is a part of.
    """

    unit: Unit
    number: int
    info: FlatShard

    @property
    def piece(self) -> Piece:
        """What this rank stores of it."""
        return self.unit.pieces[self.number]

    def holds(self, param: Tensor) -> bool:
        """Whether the unit still has the parameter there."""
        return self.unit.is_alive and self.unit.original(self.number) is param


_PLACES: Any = WeakTensorKeyDictionary()  # parameter -> Place
_MISSED: Any = WeakTensorKeyDictionary()  # parameter -> when its model was looked for in vain
_PATIENCE = 5.0  # seconds until it is looked for again: a search takes 0.1 s


def know(modules: Iterable[nn.Module]) -> None:
    """Remember whose pieces the parameters of these modules' units are."""
    for unit in units_in(modules):
        _note(unit)


def _note(unit: Unit) -> None:
    copies = GroupRef.of(unit.replicas) if unit.is_sharded else None
    group = GroupRef.of(unit.group)
    for index, piece in enumerate(unit.pieces):
        original = unit.original(index)
        info = FlatShard(piece.shape, piece.start, group, KIND, copies, None, unit.home, copies is not None)
        _PLACES[original] = Place(unit, index, info)
        if unit.home is not None:
            original._shardmuon_home = unit.home  # type: ignore[attr-defined]


def place_of(param: Tensor) -> Place | None:
    """Where FSDP1 keeps a parameter; None: it is not FSDP1's, or its model cannot be found."""
    if not is_flattened(param):
        return None
    found: Place | None = _PLACES.get(param)
    if found is not None and found.holds(param):
        return found
    if time.monotonic() < _MISSED.get(param, 0.0) + _PATIENCE:
        return None
    for unit in all_units():
        if is_alive(unit.group) or unit.holds(param):  # a model of a destroyed group is no matter of this parameter's
            _note(unit)
    found = _PLACES.get(param)
    if found is not None and found.holds(param):
        return found
    _MISSED[param] = time.monotonic()
    return None


def shape_of(param: Tensor) -> Ints | None:
    """The whole shape of a tensor that FSDP1 has cut; None: it is none.

    Raises:
        ValueError: It cannot be known; the message lacks the name.
    """
    info: FlatShard | None = getattr(param, "_shardmuon_flat", None)
    if info is not None:
        return info.shape
    if not is_flattened(param):
        return None
    place = _found(param)
    return place.info.shape if place.unit.is_sharded else tuple(param.shape)


def _found(param: Tensor) -> Place:
    refuse_flat(param)
    place = place_of(param)
    if place is None:
        raise ValueError(
            "FSDP1 has put it into a flat parameter, and its wrapped model cannot be found. Keep the model, and make "
            "the optimizer after wrapping: Muon(model, ...)"
        )
    return place


def refuse_flat(param: Tensor) -> None:
    """Raise ValueError (without the name) for a flat parameter."""
    if is_flat(param):
        raise ValueError(
            "it is a flat parameter of FSDP1 (use_orig_params=False), the tensors of a unit in one: write "
            "FullyShardedDataParallel(..., use_orig_params=True)"
        )


def lies_elsewhere(param: Tensor) -> bool:
    """Whether FSDP1 keeps nothing of it on this rank. It then has no state here."""
    place = place_of(param)
    return place is not None and place.piece.numel == 0


class FSDP1Engine(FlatEngine):
    """Original parameters."""

    def recognizes(self, param: Tensor) -> bool:
        if not getattr(param, FLATTENED, False):  # asked of every parameter
            return False
        place = None if is_flat(param) else place_of(param)
        return place is None or place.unit.is_sharded  # NO_SHARD: whole where it is

    def info(self, param: Tensor) -> FlatShard:
        return _found(param).info

    def claim(self, param: Tensor, group: Group) -> Claim:
        piece = _found(param).piece
        if param.numel() != piece.numel or param.dim() != 1:
            raise ValueError(_gathered(param, piece))
        if group["use_muon"]:
            _refuse_piece(param, piece)
        return super().claim(param, group)._replace(empty_lacks_gradient=True)


def _gathered(param: Tensor, piece: Piece) -> str:
    return (
        f"FSDP1 has gathered it: shape {tuple(param.shape)} is here, where this rank keeps {piece.numel} elements. "
        "Step after backward(), and outside of summon_full_params()"
    )


def _refuse_piece(param: Tensor, piece: Piece) -> None:
    """Raise ValueError if FSDP1 does not keep it as a run of a matrix in row-major order."""
    if piece.fault is not None:
        raise ValueError(
            f"{piece.fault}. Make it contiguous before wrapping, shard with fully_shard (FSDP2), or put it in a group "
            "with use_muon=False"
        )
    if is_marked(param):
        raise ValueError(
            "it is marked as a tensor-parallel shard (tensor_model_parallel, partition_dim), and FSDP1 has flattened "
            "it. Tensor parallelism goes with fully_shard (FSDP2); or put it in a group with use_muon=False"
        )
