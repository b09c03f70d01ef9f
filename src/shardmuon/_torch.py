"""Every private or renamed torch symbol this package uses, in one place, with the versions it changes in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DeviceMesh, DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta  # private in 2.11 .. 2.13
from torch.distributed.tensor.placement_types import Placement
from torch.distributed.tensor.placement_types import (
    _StridedShard as StridedShard,  # private in 2.11 .. 2.13; a subclass of Shard until 2.12, of Placement from 2.13
)
from torch.optim.adamw import adamw as functional_adamw

__all__ = [
    "StridedShard",
    "all_gather_tensor",
    "cpu_has_bf16_matmul",
    "dtensor_around",
    "foreach_copy_",
    "foreach_lerp",
    "foreach_lerp_",
    "functional_adamw",
]


def all_gather_tensor(out: Tensor, value: Tensor, group: dist.ProcessGroup) -> None:
    """`all_gather_into_tensor`, which torch 2.13 renames to `all_gather_single` and deprecates under its old name."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, value, group=group)


def cpu_has_bf16_matmul() -> bool:
    """Whether this CPU multiplies bf16 matrices in hardware (AVX512-BF16, AMX, Arm bf16).

    Elsewhere torch emulates bf16 products at 1/10 to 1/80 of the fp32 rate.
    """
    probe = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    if probe is not None and probe():
        return True
    probe = getattr(torch.cpu, "_is_arm_bf16_supported", None)
    return bool(probe is not None and probe())


def foreach_lerp(start: Sequence[Tensor], end: Sequence[Tensor], weight: float) -> tuple[Tensor, ...]:
    """`start + weight * (end - start)` for each pair, as `torch.lerp` computes it."""
    return cast("tuple[Tensor, ...]", tuple(torch._foreach_lerp(list(start), list(end), weight)))


def foreach_lerp_(start: Sequence[Tensor], end: Sequence[Tensor], weight: float) -> None:
    """`Tensor.lerp_` for each pair; changes `start`."""
    torch._foreach_lerp_(list(start), list(end), weight)


def foreach_copy_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """`Tensor.copy_` for each pair (dtypes may differ); changes `targets`."""
    torch._foreach_copy_(list(targets), list(sources))


def dtensor_around(
    storage: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, stride: Sequence[int]
) -> DTensor:
    """`DTensor.from_local` without a move to the mesh's device: offloaded state stays on the CPU."""
    spec = DTensorSpec(mesh, tuple(placements), TensorMeta(shape, tuple(stride), storage.dtype))
    return DTensor(storage, spec, requires_grad=False)


def default_group() -> Any:
    """The default process group, or None when torch.distributed is not initialized."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
