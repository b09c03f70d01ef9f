"""Where numbers lie that a stage of a variant keeps of each matrix: see [Note: what a stage keeps] in variants/base.py.

They are a tensor (stacked matrices or 1, numbers of one). Every rank of the parameter's mesh has all of it, also a rank
that stores nothing of the parameter: torch's checkpoints take what is replicated from any rank. Only of a stack that a
DTensor cuts by its matrices (experts) each rank has those of its own matrices, placed as the parameter is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardmuon._torch import dtensor_around, is_dtensor, placement_spec
from shardmuon.engines.base import Engine
from shardmuon.layout.mesh import same_storage
from shardmuon.layout.views import Ints

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


def kept_shape(engine: Engine, param: Tensor, shape: Ints, *, stacked: bool) -> Ints:
    """What this rank stores of it."""
    placements = _placements(engine, param, stacked)
    if placements is None or not any(map(_cuts, placements)):
        return shape
    stored = engine.storage(param).shape
    return (stored[0] if len(stored) else 0, shape[1])


def wrap_kept(engine: Engine, storage: Tensor, param: Tensor, shape: Ints, *, stacked: bool) -> Tensor:
    """The state tensor of this global shape around what this rank stores: a DTensor for a DTensor."""
    placements = _placements(engine, param, stacked)
    if placements is None:
        return storage
    return dtensor_around(storage, placement_spec(param).mesh, placements, torch.Size(shape), (shape[1], 1))  # type: ignore[arg-type]


def kept_storage(engine: Engine, value: object, param: Tensor, shape: Ints, *, stacked: bool) -> Tensor | str:
    """What this rank stores of a state tensor, or in words what is wrong with it."""
    expected = kept_shape(engine, param, shape, stacked=stacked)
    placements = _placements(engine, param, stacked)
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return f"a {type(value).__name__}, not a floating-point tensor of shape {shape}"
    if placements is None:
        if is_dtensor(value) or not same_storage(tuple(value.shape), expected):
            return f"a {type(value).__name__} of shape {tuple(value.shape)}, not a tensor of shape {expected}"
        return value.detach()
    if not is_dtensor(value):
        return f"a plain tensor of shape {tuple(value.shape)}, not a DTensor of shape {shape} placed {placements}"
    spec, local = placement_spec(value), value.to_local()
    assert is_dtensor(param), "it has placements"
    if tuple(value.shape) != shape or tuple(spec.placements) != placements or spec.mesh != placement_spec(param).mesh:
        return (
            f"a DTensor of shape {tuple(value.shape)} placed {tuple(spec.placements)}, not of shape {shape} placed "
            f"{placements} on the parameter's mesh"
        )
    if not same_storage(tuple(local.shape), expected):
        return f"a DTensor that stores shape {tuple(local.shape)} here, not {expected}"
    return local.detach()


def _placements(engine: Engine, param: Tensor, stacked: bool) -> tuple[Placement, ...] | None:
    """Of the state tensor, or None if it is a plain one."""
    if not is_dtensor(param):
        return None
    from torch.distributed.tensor import Replicate

    whole: Any = Replicate()
    placed = placement_spec(param).placements
    if not stacked or not getattr(engine, "cuts_stacks_by_placements", False):
        return tuple(whole for _ in placed)
    return tuple(p if _cuts(p) else whole for p in placed)


def _cuts(placement: Any) -> bool:
    """Whether it cuts the first dim."""
    return getattr(placement, "dim", None) == 0
