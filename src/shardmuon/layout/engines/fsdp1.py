"""Engine for FSDP1 (`FullyShardedDataParallel(..., use_orig_params=True)`), which cuts flat parameters at arbitrary
elements.

The engine inspects the current state of each parameter, so the optimizer can be made before or after wrapping the
model. Only this file uses private names of torch's FSDP1, as defined in torch 2.13.

[Note: storage of FSDP1]
    A unit (a wrapped module) concatenates its flattened parameters, with padding, into one 1-D *flat parameter*. Each
    rank stores an equal part of it. The assignment of elements to ranks never changes once the unit is made.

    With `use_orig_params=True`, the original parameters remain in their modules. Outside of the forward and backward
    passes, each original parameter is a 1-D view of the elements that this rank stores, and is empty if this rank
    stores none. With NO_SHARD, every rank stores the whole flat parameter, and the original parameters keep their
    shapes.

    With `use_orig_params=False`, the flat parameter replaces the original parameters. This package rejects such a flat
    parameter with an error, because it mixes matrices and vectors.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from shardmuon._torch import is_alive
from shardmuon.comm.groups import GroupRef
from shardmuon.layout.engines.base import Claim, Group, is_marked
from shardmuon.layout.engines.flat import FlatEngine, FlatShard


class UnitPlace(NamedTuple):
    """The location of a parameter in an FSDP1 unit (a wrapped module).

    Attributes:
        unit: Weak reference to the unit that contains the parameter.
        number: Index of the parameter among the original parameters of the unit's flat parameter.
        info: Description of this rank's shard of the parameter.
        numel: Number of elements of the parameter that this rank stores.
        fault: Error message if Muon cannot update the parameter, because FSDP1 did not flatten it in row-major order or
            because it is a DTensor; else None.
        is_sharded: True if the unit shards its parameters, False for NO_SHARD.
    """

    unit: weakref.ref[Any]
    number: int
    info: FlatShard
    numel: int
    fault: str | None
    is_sharded: bool

    def holds(self, param: Tensor) -> bool:
        """True if the FSDP1 unit still exists and still contains the parameter."""
        unit = self.unit()
        return unit is not None and unit._handle.flat_param._params[self.number] is param

    @staticmethod
    def of(param: Tensor) -> UnitPlace | None:
        """Find a parameter's location in the FSDP1 units. Return None if FSDP1 does not manage the parameter, or if the
        parameter's model cannot be found."""
        # torch sets `_fsdp_flattened` on original and on flat parameters
        if not getattr(param, "_fsdp_flattened", False):
            return None
        found: UnitPlace | None = _PLACES.get(param)
        if found is None or not found.holds(param):
            _PLACES.pop(param, None)
            # All Python objects are searched for FSDP1 units, because a parameter has no reference to its unit.
            UnitPlace.learn(gc.get_objects())
            found = _PLACES.get(param)
        return found

    @staticmethod
    def refuse_flat(param: Tensor) -> None:
        """Raise ValueError if the tensor is an FSDP1 flat parameter. The message does not contain the parameter's
        name."""
        if getattr(param, "_is_flat_param", False):
            raise ValueError(
                "it is a flat parameter of FSDP1 (use_orig_params=False), the tensors of a unit in one: write "
                "FullyShardedDataParallel(..., use_orig_params=True)"
            )

    @staticmethod
    def is_elsewhere(param: Tensor) -> bool:
        """True if FSDP1 stores all elements of the parameter on other ranks, so that this rank needs no momentum for
        the parameter."""
        place = UnitPlace.of(param)
        return place is not None and place.numel == 0

    @staticmethod
    def learn(objects: Iterable[Any]) -> None:
        """Find the FSDP1 units among `objects`, and record the location of every parameter of these units. Units whose
        process group has been destroyed are skipped."""
        # If torch.distributed.fsdp is not imported, `kind` is the empty tuple, and `issubclass` is always False.
        kind: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
        for unit in [one for one in objects if issubclass(type(one), kind)]:
            # `_handle` is missing or None if the FSDP1 unit manages no parameters or is not built yet.
            handle: Any = getattr(unit, "_handle", None)
            if handle is not None and handle._use_orig_params and is_alive(handle.process_group):
                _note(unit, handle, handle.flat_param)


_MEMORY_ORDER = (
    "FSDP1 has flattened it in the order of its memory, which was not contiguous (make it contiguous before wrapping)"
)
_PLACES: Any = WeakTensorKeyDictionary()  # dict from each parameter to its location in an FSDP1 unit


def _note(unit: nn.Module, handle: Any, flat: Any) -> None:
    is_sharded = bool(handle.uses_sharded_strategy)
    group = GroupRef.of(handle.process_group)
    # With FSDP1's HYBRID_SHARD, the ranks of the process group `copies` store replicas of this rank's shard.
    copies = GroupRef.of(getattr(unit, "_inter_node_pg", None)) if is_sharded else None
    home = handle.device if handle._offload_params and handle.device.type != "cpu" else None
    columns = flat._params, flat._shard_param_infos, flat._shapes, flat._contiguities, flat._param_extensions
    for number, (param, here, shape, contiguous, extension) in enumerate(zip(*columns, strict=True)):
        fault = None if contiguous else _MEMORY_ORDER
        if extension is not None:
            fault = "it is a DTensor (tensor parallelism) inside FSDP1"
        start, numel = int(here.intra_param_start_idx or 0), int(here.numel_in_shard or 0)
        info = FlatShard(tuple(shape), start, group, "FSDP1 flat parameters", copies, home=home)
        _PLACES[param] = UnitPlace(weakref.ref(unit), number, info, numel, fault, is_sharded)
        param._shardmuon_home = home


def _found(param: Tensor) -> UnitPlace:
    UnitPlace.refuse_flat(param)
    place = UnitPlace.of(param)
    if place is None:
        raise ValueError(
            "FSDP1 has put it into a flat parameter, and its wrapped model cannot be found. Keep the model, and make "
            "the optimizer after wrapping: Muon(model, ...)"
        )
    return place


class FSDP1Engine(FlatEngine):
    """Engine (storage adapter) for the original parameters that FSDP1 shards with `use_orig_params=True`."""

    def recognizes(self, param: Tensor) -> bool:
        place = UnitPlace.of(param)
        # With FSDP1's NO_SHARD, a parameter is a plain tensor, which the base engine handles.
        return bool(getattr(param, "_fsdp_flattened", False)) if place is None else place.is_sharded

    def info(self, param: Tensor) -> FlatShard:
        return _found(param).info

    def claim(self, param: Tensor, group: Group) -> Claim:
        place = _found(param)
        if param.numel() != place.numel or param.dim() != 1:
            raise ValueError(
                f"FSDP1 has gathered it: shape {tuple(param.shape)} is here, where this rank keeps {place.numel} "
                "elements. Step after backward(), and outside of summon_full_params()"
            )
        if group["use_muon"] and place.fault is not None:
            raise ValueError(f"{place.fault}. Shard with fully_shard (FSDP2), or put it in a group with use_muon=False")
        if group["use_muon"] and is_marked(param):
            raise ValueError(
                "it is marked as a tensor-parallel shard (tensor_model_parallel, partition_dim), and FSDP1 has "
                "flattened it. Tensor parallelism goes with fully_shard (FSDP2); or put it in a group with "
                "use_muon=False"
            )
        return super().claim(param, group)
