"""Every private or renamed torch symbol this package uses, in one place, with the versions it changes in."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from typing import Any, TypeVar, cast

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

_F = TypeVar("_F", bound=Callable[..., Any])

__all__ = [
    "StridedShard",
    "after_loading",
    "all_gather_tensor",
    "before_loading",
    "cpu_has_amx",
    "cpu_has_bf16_matmul",
    "creates_state_only",
    "dtensor_around",
    "foreach_add_",
    "foreach_copy_",
    "foreach_lerp",
    "foreach_lerp_",
    "foreach_mul_",
    "foreach_norm",
    "foreach_scale_",
    "functional_adamw",
    "ieee_products",
    "mm_to_fp32",
    "never_compiled",
    "new_group_among",
    "timeout_of",
    "unscale_and_check_",
]


def all_gather_tensor(out: Tensor, value: Tensor, group: dist.ProcessGroup) -> None:
    """`all_gather_into_tensor`, which torch 2.13 renames to `all_gather_single` and deprecates under its old name."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, value, group=group)


CPU_BF16 = "SHARDMUON_CPU_BF16"  # "0" or "1": what the tests make of this CPU, whatever it is; see CONTRIBUTING.md


@lru_cache(maxsize=1)
def cpu_has_bf16_matmul() -> bool:
    """Whether this CPU multiplies bf16 matrices in hardware (AVX512-BF16, AMX, Arm bf16).

    Elsewhere torch emulates bf16 products at 1/10 to 1/80 of the fp32 rate. The environment variable `CPU_BF16` makes
    the package believe otherwise; it is read once.

    Raises:
        ValueError: The variable is neither "0" nor "1".
    """
    told = os.environ.get(CPU_BF16, "")
    if told:
        if told not in ("0", "1"):
            raise ValueError(
                f"{CPU_BF16}={told!r} must be 0 (no bf16 products on this CPU) or 1 (bf16 products), or unset"
            )
        return told == "1"
    probe = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    if probe is not None and probe():
        return True
    probe = getattr(torch.cpu, "_is_arm_bf16_supported", None)
    return bool(probe is not None and probe())


@lru_cache(maxsize=1)
def cpu_has_amx() -> bool:
    """Whether this CPU multiplies bf16 matrices in tiles (AMX), several times as fast as AVX512-BF16 does."""
    probe = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return cpu_has_bf16_matmul() and bool(probe is not None and probe())


def mm_to_fp32(left: Tensor, right: Tensor) -> Tensor:
    """left @ right of half batches with the fp32 sums kept. torch has `out_dtype` on CUDA only (2.8 .. 2.13)."""
    if left.is_cuda:
        return torch.bmm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


@contextmanager
def ieee_products(device: torch.device) -> Iterator[None]:
    """Matrix products with the same bits whatever the process has set: no TF32, no bf16 passes, sums in fp32.

    The flags are global; they are put back at the end.
    """
    holders: list[tuple[Any, str, Any]]
    if device.type == "cuda":
        flags = torch.backends.cuda.matmul
        holders = [
            (flags, "fp32_precision", "ieee"),
            (flags, "allow_fp16_reduced_precision_reduction", False),
            (flags, "allow_bf16_reduced_precision_reduction", False),
            (flags, "allow_fp16_accumulation", False),
        ]
    elif device.type == "cpu":
        mkldnn: Any = torch.backends.mkldnn
        holders = [(mkldnn.matmul, "fp32_precision", "ieee")]
    else:
        holders = []
    before = [(where, name, getattr(where, name)) for where, name, _ in holders]
    try:
        for where, name, value in holders:
            setattr(where, name, value)
        yield
    finally:
        for where, name, value in before:
            setattr(where, name, value)


def foreach_lerp(start: Sequence[Tensor], end: Sequence[Tensor], weight: float) -> tuple[Tensor, ...]:
    """`start + weight * (end - start)` for each pair, as `torch.lerp` computes it."""
    return cast("tuple[Tensor, ...]", tuple(torch._foreach_lerp(list(start), list(end), weight)))


def foreach_lerp_(start: Sequence[Tensor], end: Sequence[Tensor], weight: float) -> None:
    """`Tensor.lerp_` for each pair; changes `start`."""
    torch._foreach_lerp_(list(start), list(end), weight)


def foreach_scale_(tensors: Sequence[Tensor], factor: float) -> None:
    """`Tensor.mul_` of each tensor with a number."""
    torch._foreach_mul_(list(tensors), factor)


def foreach_add_(tensors: Sequence[Tensor], others: Sequence[Tensor], alpha: float) -> None:
    """`Tensor.add_` for each pair; changes `tensors`."""
    torch._foreach_add_(list(tensors), list(others), alpha=alpha)


def foreach_copy_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """`Tensor.copy_` for each pair (dtypes may differ); changes `targets`."""
    torch._foreach_copy_(list(targets), list(sources))


def never_compiled(function: _F) -> _F:
    """Run as it is inside `torch.compile`: tracing a step would recompile for every shape of matrix it meets.

    `torch.compiler.disable` does the same but imports the compiler at once, which takes seconds.
    """
    return cast("_F", torch._disable_dynamo(function))


def foreach_norm(tensors: Sequence[Tensor], order: float) -> tuple[Tensor, ...]:
    """`torch.linalg.vector_norm` of each tensor, accumulated and returned in fp64."""
    return cast("tuple[Tensor, ...]", tuple(torch._foreach_norm(list(tensors), order, dtype=torch.float64)))


def flattened(tensors: Sequence[Tensor]) -> Tensor:
    """All their elements in one new 1-D tensor; of one device and dtype."""
    return torch._C._nn.flatten_dense_tensors(list(tensors))


def local_tensor(tensor: DTensor) -> Tensor:
    """`tensor.to_local()` without autograd, and without the view that it makes of a Parameter's (2.11 .. 2.13)."""
    return tensor._local_tensor


def foreach_mul_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """`Tensor.mul_` of each tensor with a 0-dim tensor.

    A Python number would not do: CPUs then round it to the tensor's dtype first.
    """
    torch._foreach_mul_(list(tensors), factor)


def unscale_and_check_(grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Multiply each gradient by `inv_scale`; set `found_inf` to 1 if an element is not finite. One device and dtype."""
    torch._amp_foreach_non_finite_check_and_unscale_(list(grads), found_inf, inv_scale)


def dtensor_around(
    storage: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, stride: Sequence[int]
) -> DTensor:
    """`DTensor.from_local` without a move to the mesh's device: offloaded state stays on the CPU."""
    spec = DTensorSpec(mesh, tuple(placements), TensorMeta(shape, tuple(stride), storage.dtype))
    return DTensor(storage, spec, requires_grad=False)


def default_group() -> Any:
    """The default process group, or None when torch.distributed is not initialized."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def new_group_among(ranks: Sequence[int], number: int, parent: Any = None) -> Any:
    """`new_group(ranks, use_local_synchronization=True)`, called by these ranks only, whatever groups each made before.

    torch names such a group after the number of groups that the calling rank has, so ranks that have made different
    numbers of groups wait for each other for ever (2.11 .. 2.13). `number`: of this group among those of these ranks.

    The group has the time-out of `parent`, by default of the default group: torch would take its own (2.11 .. 2.13).

    While a default group is bound to a device (`init_process_group(device_id=...)`), torch makes every NCCL subgroup
    by splitting the default group's communicator, for which *all* its ranks must call (2.11 .. 2.13, `_new_process_
    group_helper`). Only members call here, so the binding is taken off meanwhile: the group then connects by itself.
    """
    c10d: Any = dist.distributed_c10d
    world: Any = c10d._get_default_group()
    named_by_torch = c10d._hash_ranks_to_str
    bound = getattr(world, "bound_device_id", None)
    c10d._hash_ranks_to_str = lambda ranks: f"shardmuon {'_'.join(map(str, ranks))} {number}"
    if bound is not None:
        world.bound_device_id = None
    try:
        timeout = timeout_of(world if parent is None else parent)
        return dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
    finally:
        c10d._hash_ranks_to_str = named_by_torch
        if bound is not None:
            world.bound_device_id = bound


def timeout_of(group: Any) -> timedelta | None:
    """The time-out of a process group, the longest one if its backends differ; None if no backend tells (MPI, fake).

    torch has no public question for it; the options of gloo's and NCCL's backends know (2.11 .. 2.13).
    """
    found = []
    for device in group._device_types:
        try:
            backend = group._get_backend(device)
        except RuntimeError:  # none for this kind of device
            continue
        timeout = getattr(getattr(backend, "options", None), "_timeout", None)
        if isinstance(timeout, timedelta):
            found.append(timeout)
    return max(found, default=None)


def is_alive(group: Any) -> bool:
    """Whether a process group has not been destroyed. torch has no public question for it in 2.11 .. 2.13."""
    try:
        return bool(dist.get_process_group_ranks(group))
    except KeyError:
        return False


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
