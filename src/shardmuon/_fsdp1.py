"""Every private name of torch's FSDP1 (`FullyShardedDataParallel`) that this package reads, as torch 2.13 has it.

[Note: what FSDP1 keeps]
    A unit (a wrapped module) flattens its parameters into one 1-D *flat parameter*, with padding, and keeps an equal
    part of it on each rank. With `use_orig_params=True` the original parameters stay in their modules: outside of
    forward and backward each is a 1-D view of what this rank stores of it, or empty. (With False the flat parameter
    takes their place, which is refused.) Whose elements are where never changes once the unit is made. With NO_SHARD
    every rank keeps all of it, and original parameters keep their shapes.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_SEEN: weakref.WeakKeyDictionary[nn.Module, Unit] = weakref.WeakKeyDictionary()


class Piece(NamedTuple):
    """One of the tensors that a flat parameter is made of, and what this rank stores of it.

    Attributes:
        shape: The whole tensor's.
        start: The first of its elements that this rank stores.
        numel: How many are stored here; 0: none.
        fault: Why elements do not lie in row-major order, or cannot be told; None: they do.
    """

    shape: tuple[int, ...]
    start: int
    numel: int
    fault: str | None


class Unit:
    """A wrapped module with its original parameters. Does not keep the module alive.

    Attributes:
        pieces: What its flat parameter is made of, in its order.
        is_sharded: Whether each rank keeps a part only.
        home: The device that it is computed on, if it is kept on the CPU.
    """

    def __init__(self, module: nn.Module) -> None:
        handle: Any = module._handle
        self._module = weakref.ref(module)
        self.is_sharded = bool(handle.uses_sharded_strategy)
        offloaded = handle._offload_params and handle.device.type != "cpu"
        self.home: torch.device | None = handle.device if offloaded else None
        self.pieces = _pieces(handle.flat_param)

    @property
    def is_alive(self) -> bool:
        """Whether the model is still there."""
        return self._module() is not None

    def original(self, number: int) -> Tensor:
        """The original parameter of a piece."""
        found: Tensor = self._handle.flat_param._params[number]
        return found

    def holds(self, param: Tensor) -> bool:
        """Whether it is one of the original parameters."""
        return any(self.original(number) is param for number in range(len(self.pieces)))

    @property
    def group(self) -> Any:
        """The process group that shares the flat parameter out."""
        return self._handle.process_group

    @property
    def replicas(self) -> Any:
        """The process group of the ranks that keep the same part (HYBRID_SHARD), or None."""
        return getattr(self._module(), "_inter_node_pg", None)

    @property
    def _handle(self) -> Any:
        module: Any = self._module()
        if module is None:
            raise ValueError("its FSDP1 model is gone. Keep the model while the optimizer is used")
        return module._handle


FLATTENED = "_fsdp_flattened"  # an attribute: FSDP1 has put the parameter into a flat one, or it is one


def is_flattened(param: Tensor) -> bool:
    """Whether FSDP1 has put it into a flat parameter, or it is one."""
    return bool(getattr(param, FLATTENED, False))


def is_flat(param: Tensor) -> bool:
    """Whether it is a flat parameter."""
    return bool(getattr(param, "_is_flat_param", False))


def units_in(modules: Iterable[nn.Module]) -> list[Unit]:
    """The units with original parameters among these modules."""
    kinds = _kinds()
    return [unit for unit in map(_unit, [m for m in modules if type(m) in kinds]) if unit is not None]


def all_units() -> list[Unit]:
    """Every such unit of this process. Looks through all of Python's objects: a parameter does not know its unit."""
    kinds = _kinds()
    return units_in([o for o in gc.get_objects() if type(o) in kinds]) if kinds else []


def _kinds() -> set[type]:
    module: Any = sys.modules.get("torch.distributed.fsdp")
    found = [] if module is None else [module.FullyShardedDataParallel]
    for kind in found:  # grows
        found += kind.__subclasses__()
    return set(found)


def _unit(module: nn.Module) -> Unit | None:
    handle: Any = getattr(module, "_handle", None)  # None: nothing was left for it to flatten, or it is being made
    if handle is None or not handle._use_orig_params:
        return None
    if module not in _SEEN:
        _SEEN[module] = Unit(module)
    return _SEEN[module]


def _pieces(flat: Any) -> tuple[Piece, ...]:
    pieces = []
    columns = flat._shard_param_infos, flat._shapes, flat._contiguities, flat._param_extensions
    for here, shape, contiguous, extension in zip(*columns, strict=True):
        fault = None if contiguous else "FSDP1 has flattened it in the order of its memory, which was not contiguous"
        if extension is not None:
            fault = "it is a DTensor (tensor parallelism) inside FSDP1"
        start, numel = int(here.intra_param_start_idx or 0), int(here.numel_in_shard or 0)
        pieces.append(Piece(tuple(shape), start, numel, fault))
    return tuple(pieces)
