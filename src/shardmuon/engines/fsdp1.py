"""FSDP1 (`FullyShardedDataParallel`): pieces of flat parameters, cut at any element.

With `use_orig_params=True` the original parameters are described as they are, whenever the optimizer was made. With
False a flat parameter holds matrices and vectors together; `parts_of` makes a leaf for each of its tensors, which
share its memory, and frameworks/fsdp1 steps those.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from shardmuon._fsdp1 import FLATTENED, Piece, Unit, all_units, is_flat, is_flattened, known_units, units_in
from shardmuon.engines.base import Description
from shardmuon.engines.flat import FlatEngine, FlatShard, mark_flat
from shardmuon.engines.local import is_marked
from shardmuon.planning.views import MatrixView, Shape
from shardmuon.ranks.exchange import GroupRef

KIND = "FSDP1 flat parameters"
WHAT_TO_WRITE = (
    "Give the wrapped model, Muon(model, ...) or Muon(shardmuon.param_groups(model, ...)), so that it is known which "
    "of them are matrices"
)


class Place(NamedTuple):
    """Where a parameter is in FSDP1's units.

    Attributes:
        unit: Its unit.
        number: Which of the unit's pieces; -1 for the flat parameter itself.
        info: What its storage is a part of.
    """

    unit: Unit
    number: int
    info: FlatShard

    @property
    def piece(self) -> Piece | None:
        """None: it is the flat parameter itself."""
        return None if self.number < 0 else self.unit.pieces[self.number]

    def holds(self, param: Tensor) -> bool:
        """Whether the unit still has the parameter there."""
        return self.unit.is_alive and self.unit.has(param, self.number)


_PLACES: Any = WeakTensorKeyDictionary()  # parameter -> Place
_MISSED: Any = WeakTensorKeyDictionary()  # parameter -> when its model was looked for in vain
_PATIENCE = 5.0  # seconds until it is looked for again: a search takes 0.1 s


def know(modules: Iterable[nn.Module]) -> list[Unit]:
    """Remember whose pieces the parameters of these modules' units are. Returns the units."""
    units = units_in(modules)
    for unit in units:
        _note(unit)
    return units


def _note(unit: Unit) -> None:
    for index, original in enumerate(unit.originals):
        _PLACES[original] = Place(unit, index, _info_of(unit, unit.pieces[index]))
        if unit.home is not None:
            original._shardmuon_home = unit.home  # type: ignore[attr-defined]
    shape, rank = (unit.numel,), 0
    if unit.is_sharded:
        group = GroupRef.of(unit.group)
        assert group is not None
        rank, shape = unit.group.rank(), (unit.numel * len(group.ranks),)
    _PLACES[unit.flat] = Place(unit, -1, _shard(unit, shape, rank * unit.numel))


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
        _note(unit)
    found = _PLACES.get(param)
    if found is not None and found.holds(param):
        return found
    _MISSED[param] = time.monotonic()
    return None


def shape_of(param: Tensor) -> Shape | None:
    """The whole shape of a tensor that FSDP1 has cut; None: it is none.

    Raises:
        ValueError: It cannot be known; the message lacks the name.
    """
    info: FlatShard | None = getattr(param, "_shardmuon_flat", None)
    if info is not None:
        return info.shape
    if not is_flattened(param):
        return None
    place = place_of(param)
    if place is None:
        raise ValueError(_UNKNOWN)
    return place.info.shape if place.unit.is_sharded else tuple(param.shape)


_UNKNOWN = (
    "FSDP1 has put it into a flat parameter, and its wrapped model cannot be found. Keep the model, and make the "
    "optimizer after wrapping: Muon(model, ...)"
)


def lies_elsewhere(param: Tensor) -> bool:
    """Whether FSDP1 keeps nothing of it on this rank. It then has no state here."""
    place = place_of(param)
    return place is not None and place.piece is not None and place.piece.numel == 0


class FSDP1Engine(FlatEngine):
    """Original parameters (`use_orig_params=True`), and flat parameters in groups with use_muon=False."""

    def recognizes(self, param: Tensor) -> bool:
        if not getattr(param, FLATTENED, False):  # asked of every parameter
            return False
        place = place_of(param)
        return place is None or place.unit.is_sharded  # NO_SHARD: whole where it is

    def info(self, param: Tensor) -> FlatShard:
        place = place_of(param)
        if place is None:
            raise ValueError(_UNKNOWN)
        return place.info

    def describe(self, param: Tensor, view: MatrixView, group: Any) -> Description:
        place = place_of(param)
        if place is None:
            raise ValueError(_UNKNOWN)
        stored = place.unit.numel if place.piece is None else place.piece.numel
        if param.numel() != stored or param.dim() != 1:
            raise ValueError(
                f"FSDP1 has gathered it: shape {tuple(param.shape)} is here, where this rank keeps {stored} elements. "
                "Step after backward(), and outside of summon_full_params()"
            )
        if view.matrices:
            refuse_piece(param, place.piece)
        return replace(super().describe(param, view, group), empty_lacks_gradient=True)


def refuse_piece(param: Tensor, piece: Piece | None) -> None:
    """Raise ValueError if FSDP1 does not keep it as a run of a matrix in row-major order."""
    if piece is None:
        raise ValueError(flat_fault(param))
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


def flat_fault(param: Tensor) -> str:
    """Why a flat parameter cannot be Muon's."""
    place = place_of(param)
    held = "several tensors" if place is None else f"{len(place.unit.pieces)} tensors"
    return f"it is a flat parameter of FSDP1 (use_orig_params=False), which holds {held}. {WHAT_TO_WRITE}"


# ------------------------------------------------------------------------------- flat parameters, tensor by tensor


class Part(NamedTuple):
    """Which tensor of a flat parameter a leaf stands for."""

    unit: Unit
    number: int

    @property
    def piece(self) -> Piece:
        """What this rank stores of it."""
        return self.unit.pieces[self.number]


def part_of(param: Tensor) -> Part | None:
    """What `parts_of` made it for."""
    found: Part | None = getattr(param, "_shardmuon_part", None)
    return found


_PARTS: weakref.WeakKeyDictionary[Unit, list[weakref.ref[Tensor]]] = weakref.WeakKeyDictionary()


def parts_of(unit: Unit) -> list[Tensor]:
    """A leaf for each tensor of a flat parameter (`use_orig_params=False`), sharing its memory. The same ones as long
    as they are used."""
    known = [ref() for ref in _PARTS.get(unit, ())]
    if known and all(part is not None for part in known):
        return [part for part in known if part is not None]
    parts = []
    for index, piece in enumerate(unit.pieces):
        part: Tensor = nn.Parameter(window(unit, unit.flat.detach(), piece), requires_grad=unit.flat.requires_grad)
        if unit.is_sharded:
            mark_flat(part, _info_of(unit, piece))
        part._shardmuon_part = Part(unit, index)  # type: ignore[attr-defined]
        parts.append(part)
    _PARTS[unit] = [weakref.ref(part) for part in parts]
    return parts


def window(unit: Unit, flat: Tensor, piece: Piece) -> Tensor:
    """What a tensor as long as the flat parameter has of a piece."""
    found = flat.narrow(0, piece.offset, piece.numel)
    return found if unit.is_sharded else found.view(piece.shape)


def members(modules: Iterable[nn.Module]) -> dict[int, dict[str, Tensor | None]]:
    """id(module) -> its parameters by name, of modules whose parameters FSDP1 has put into a flat one."""
    modules = list(modules)
    found: dict[int, dict[str, Tensor | None]] = {}
    for module in modules:
        if any(p is not None and is_flat(p) for p in module._parameters.values()):
            found[id(module)] = {k: p for k, p in module._parameters.items() if p is None or not is_flat(p)}
    for unit in know(modules):
        for part, piece in _with_pieces(unit):
            for module, leaf in piece.places:
                found.setdefault(id(module), dict(module._parameters))[leaf] = part
    return found


def parameters_of(module: nn.Module) -> list[Tensor]:
    """All parameters of a module, which may be in flat parameters of units around it that are known already."""
    inside = {id(m) for m in module.modules()}
    found: list[Tensor] = [p for p in module.parameters() if not is_flat(p)]
    for unit in known_units():
        found += [part for part, piece in _with_pieces(unit) if any(id(m) in inside for m, _ in piece.places)]
    return found


def standing_for(tensor: Tensor) -> Tensor:
    """What is optimized where a module has this tensor, which may be what FSDP1 has left in a parameter's place."""
    if not isinstance(tensor, nn.Parameter):
        for unit in known_units():
            for part, piece in _with_pieces(unit):
                if any(getattr(module, leaf, None) is tensor for module, leaf in piece.places):
                    return part
    return tensor


def _with_pieces(unit: Unit) -> list[tuple[Tensor, Piece]]:
    return [] if unit.keeps_originals else list(zip(parts_of(unit), unit.pieces, strict=True))


def _info_of(unit: Unit, piece: Piece) -> FlatShard:
    return _shard(unit, piece.shape, piece.start)


def _shard(unit: Unit, shape: Shape, start: int) -> FlatShard:
    copies = GroupRef.of(unit.replicas) if unit.is_sharded else None
    return FlatShard(shape, start, GroupRef.of(unit.group), KIND, copies, None, unit.home, copies is not None)
