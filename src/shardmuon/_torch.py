"""Every private or renamed torch symbol this package uses, in one place, with the versions it changes in."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.placement_types import (
    _StridedShard as StridedShard,  # private in 2.11 .. 2.13; a subclass of Shard until 2.12, of Placement from 2.13
)
from torch.optim.adamw import adamw as functional_adamw

__all__ = [
    "StridedShard",
    "after_loading",
    "all_gather_tensor",
    "before_loading",
    "cpu_has_bf16_matmul",
    "creates_state_only",
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


def default_group() -> Any:
    """The default process group, or None when torch.distributed is not initialized."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def before_loading(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Run the hooks of `register_load_state_dict_pre_hook`; returns what they make of the state dict."""
    state_dict = state_dict.copy() if isinstance(state_dict, dict) else state_dict
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        changed = hook(optimizer, state_dict)
        state_dict = state_dict if changed is None else changed
    return state_dict


def after_loading(optimizer: torch.optim.Optimizer) -> None:
    """Run the hooks of `register_load_state_dict_post_hook`."""
    for hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        hook(optimizer)


def creates_state_only() -> bool:
    """Whether torch.distributed.checkpoint steps only to have state to load into: `_init_optim_state` is on the stack.

    It sets every gradient to zero and lr to 0. Data cannot tell, on every rank alike: some rank's shards may hold zeros
    while lr warms up from 0.
    """
    module = sys.modules.get("torch.distributed.checkpoint.state_dict")
    init = getattr(module, "_init_optim_state", None)
    frame = sys._getframe(1)
    while init is not None and frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is init.__code__:
            return True
    return False
