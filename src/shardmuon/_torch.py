"""Wrappers around private and renamed torch APIs, and small tensor functions that several packages share. Comments on
torch's behavior state which torch versions they apply to. Wrappers around the private APIs of DTensor and FSDP1 are in
layout/engines/."""

from __future__ import annotations

import operator
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
from datetime import timedelta

_T = TypeVar("_T")


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Return `isinstance(value, DTensor)` without importing torch.distributed.tensor, which would take 1 s. No DTensor
    can exist before that module is imported."""
    # The exact type is compared, because `isinstance(value, Tensor)` is also True for DTensors.
    if type(value) in (Tensor, torch.nn.Parameter):
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def strided_shard() -> Any:
    """Return torch's class `_StridedShard`, which is private in torch 2.11 .. 2.13. The class is a subclass of `Shard`
    up to torch 2.12, and of `Placement` from torch 2.13."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard


@lru_cache(maxsize=1)
def cpu_has_bf16_matmul() -> bool:
    """True if this CPU multiplies bf16 matrices in hardware (AVX512-BF16, AMX).

    On other CPUs, torch emulates bf16 products, which takes 10 to 80 times as long as fp32 products. Tests override the
    detection with the environment variable SHARDMUON_CPU_BF16, which is read once per process.

    Raises:
        ValueError: SHARDMUON_CPU_BF16 has a value other than "0" or "1".
    """
    told = os.environ.get("SHARDMUON_CPU_BF16") or str(int(torch.cpu._is_avx512_bf16_supported()))
    if told not in ("0", "1"):
        raise ValueError(f"SHARDMUON_CPU_BF16={told!r} must be 0 (no bf16 products on this CPU), 1 (bf16) or unset")
    return told == "1"


def cpu_has_amx() -> bool:
    """True if this CPU has AMX instructions, which multiply bf16 matrices several times as fast as AVX512-BF16
    instructions do."""
    return cpu_has_bf16_matmul() and torch.cpu._is_amx_tile_supported()


# For each device type, the torch object with the settings for matrix products, and the values of these settings that
# disable reduced precision.
_EXACT: dict[str, tuple[Any, dict[str, Any]]] = {
    # type checkers do not know the attributes of torch.backends.mkldnn
    "cpu": (cast(Any, torch.backends.mkldnn).matmul, {"fp32_precision": "ieee"}),
    "cuda": (
        torch.backends.cuda.matmul,
        {
            "fp32_precision": "ieee",
            "allow_fp16_reduced_precision_reduction": False,
            "allow_bf16_reduced_precision_reduction": False,
            "allow_fp16_accumulation": False,
        },
    ),
}


def precision_flags(device: torch.device) -> dict[str, Any]:
    """Return a dict with torch's global settings that affect the bits of matrix products on devices of this type."""
    matmul, flags = _EXACT.get(device.type, (None, {}))
    return {name: getattr(matmul, name) for name in flags}


@contextmanager
def exact_products(device: torch.device, flags: bool = True) -> Iterator[None]:
    """Make matrix products inside the `with` block independent of torch's global settings. Inside the block, torch uses
    neither TF32 nor bf16 for fp32 products, does not accumulate in half precision, and does not change dtypes by
    autocast.

    The previous settings are restored at the end of the block. If `flags` is False, only autocast is disabled.
    """
    matmul, wanted = _EXACT[device.type] if flags and device.type in _EXACT else (None, {})
    before = {name: getattr(matmul, name) for name in wanted}
    autocast = torch.is_autocast_enabled(device.type)
    try:
        for name, value in wanted.items():
            setattr(matmul, name, value)
        with torch.autocast(device.type, enabled=False) if autocast else nullcontext():
            yield
    finally:
        for name, value in before.items():
            setattr(matmul, name, value)


# A context manager in which no operation converts its inputs by autocast, on any device. Autocast affects even `cat`,
# which fails for bf16 tensors under autocast to fp16, the default on CUDA. The class is private in torch 2.11 .. 2.13.
without_autocast: Any = torch._C._DisableAutocast


def foreach(name: str, *columns: Sequence[Tensor], **others: Any) -> Sequence[Tensor]:
    """Apply the elementwise operation `name` to lists of tensors. For example, "lerp" returns new tensors, and "lerp_"
    changes the tensors of the first list in place and returns an empty sequence.

    On accelerators, torch processes whole lists with one kernel only if all tensors are dense, each list has a single
    dtype, and tensors at the same index have equal sizes and strides. Otherwise, torch launches one kernel per tensor
    (torch 2.11 .. 2.13, `can_use_fast_route` in ForeachUtils.h). This function therefore splits lists that do not meet
    these conditions into lists that do.
    """
    operation = getattr(torch, f"_foreach_{name}")
    if not columns[0]:
        return ()
    # torch always processes CPU tensors one by one, so lists of CPU tensors are not split
    if columns[0][0].device.type == "cpu" or _go_together(columns):
        made: Sequence[Tensor] | None = operation(*map(list, columns), **others)
        return made or ()
    alike: dict[tuple[object, ...], list[int]] = {}
    for i, row in enumerate(zip(*columns, strict=True)):
        dense = is_dense(row[0]) and all(t.stride() == row[0].stride() and t.shape == row[0].shape for t in row)
        alike.setdefault((dense, *(t.dtype for t in row)), []).append(i)
    found: dict[int, Tensor] = {}
    for rows in alike.values():
        results = operation(*([column[i] for i in rows] for column in columns), **others)
        found.update(zip(rows, results or (), strict=False))
    return [found[i] for i in sorted(found)]


_shape_of, _dtype_of = operator.attrgetter("shape"), operator.attrgetter("dtype")


def _go_together(columns: Sequence[Sequence[Tensor]]) -> bool:
    """Check quickly whether torch can process several lists of tensors with one kernel. The answer False may be wrong,
    for example if a dim has size 1, where the strides of contiguous tensors can differ. The caller then compares the
    tensors index by index."""
    shapes = list(map(_shape_of, columns[0]))
    return (
        all(all(map(Tensor.is_contiguous, column)) and len(set(map(_dtype_of, column))) == 1 for column in columns)
        and all(list(map(_shape_of, column)) == shapes for column in columns[1:])
        and not any(1 in shape for shape in set(shapes))
    )


def is_dense(t: Tensor) -> bool:
    """True if the tensor's elements fill a range of memory without gaps, in any order of dims. The caller guarantees
    that no two elements share memory."""
    extent = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.is_contiguous() or extent + 1 == t.numel()


# `foreach_copy_(targets, sources)` copies each source to the target at the same index, and converts dtypes if
# necessary.
foreach_copy_ = partial(foreach, "copy_")


def foreach_norm(tensors: Sequence[Tensor], order: float, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Compute `torch.linalg.vector_norm` of each tensor, accumulated in `dtype`. Return one 0-dim tensor of this dtype
    per tensor."""
    return cast("tuple[Tensor, ...]", tuple(torch._foreach_norm(list(tensors), order, dtype=dtype)))


def power_of_two(size: Tensor) -> Tensor:  # nonnegative fp32 or fp64 tensor; overwritten
    """Round each number down to a power of two by masking its mantissa bits. Numbers below the smallest normal number
    become the smallest normal number. Infinity and NaN become infinity, so dividing an infinite or NaN element by the
    result gives NaN."""
    bits, mask = (torch.int64, 0x7FF << 52) if size.dtype == torch.float64 else (torch.int32, 0xFF << 23)
    size.view(bits).bitwise_and_(mask)
    return size.clamp_(min=torch.finfo(size.dtype).tiny)


# `flattened(tensors)` concatenates the elements of tensors with the same device and dtype into a new 1-D tensor.
# `unflattened(flat, like)` splits the 1-D tensor `flat` into consecutive views with the shapes of the tensors in
# `like`, and ignores any remaining elements of `flat`.
flattened: Callable[[Sequence[Tensor]], Tensor] = torch._utils._flatten_dense_tensors
unflattened: Callable[[Tensor, Sequence[Tensor]], tuple[Tensor, ...]] = torch._utils._unflatten_dense_tensors


def local_if_any(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, or the tensor itself if it is not a DTensor."""
    return cast(Tensor, getattr(tensor, "_local_tensor", tensor))


def names_in(model: torch.nn.Module) -> dict[int, str]:
    """Return a dict from the `id` of each parameter to its name in the state dicts of torch.distributed.checkpoint,
    which omit the prefixes that wrappers add. The names come from torch's private function `_get_fqns`."""
    from torch.distributed.checkpoint.state_dict import _get_fqns

    return {id(p): next(iter(_get_fqns(model, name))) for name, p in model.named_parameters()}


def is_capturing(device: torch.device) -> bool:
    """True while a CUDA graph is being captured on the current stream. During a capture, CUDA records kernels without
    running them, so the CPU cannot read any results."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Coming(deque[tuple[_T, Tensor, torch.device, Any]]):
    """Queue of tensors that are being copied to the CPU. Each entry has the object that the caller passed with the
    tensor, the copy on the CPU, the tensor's device, and the event after which the copy is valid."""

    def send(self, about: _T, value: Tensor) -> None:
        """Start copying a tensor to the CPU. `about` is the object that `arrived` returns with the copy."""
        module: Any = torch.get_device_module(value.device)  # torch.cpu has events that do nothing
        host = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=value.device.type != "cpu")
        host.copy_(value, non_blocking=True)
        event = module.Event()
        event.record(module.current_stream(value.device))
        self.append((about, host, value.device, event))

    def arrived(self) -> Iterator[tuple[_T, Tensor]]:
        """Remove completed copies from the front of the queue, without waiting for unfinished copies. For each copy,
        yield a pair of the object that was passed to `send` and the copy. Events cannot be queried while a CUDA graph
        is being captured, so copies from a device that captures a graph stay in the queue."""
        while self and not is_capturing(self[0][2]) and self[0][3].query():
            yield self.popleft()[:2]


def default_group() -> Any:
    """Return the default process group, or None if torch.distributed is not initialized."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def is_alive(group: Any) -> bool:
    """True if a process group has not been destroyed. torch 2.11 .. 2.13 have no public API for this check."""
    return group in dist.distributed_c10d._world.pg_group_ranks


def group_named(name: str) -> Any:
    """Return the process group that has this name in torch, or None if there is none."""
    # A key of torch's dict of process groups can be -100, the placeholder for a group that does not contain this rank.
    # This number has no attribute `group_name`.
    known = dist.distributed_c10d._world.pg_group_ranks if name else ()
    return next((group for group in known if getattr(group, "group_name", "") == name), None)


def new_group_among(ranks: Sequence[int], number: int, parent: Any = None) -> Any:
    """Create a process group with `new_group(ranks, use_local_synchronization=True)`. Collective over `ranks` only.
    These ranks may have created different numbers of groups before.

    torch derives the name of such a group from the number of groups that the calling rank has created. Ranks with
    different numbers would choose different names and deadlock (torch 2.11 .. 2.13). This function instead derives the
    name from `ranks` and `number`, the number of groups that have been created over exactly these ranks.

    The group gets the timeout of `parent`, or of the default group if `parent` is None. Without an explicit timeout,
    torch would use a constant instead (torch 2.11 .. 2.13).

    If the default group is bound to a device (`init_process_group(device_id=...)`), torch creates every NCCL subgroup
    by splitting the default group's communicator, and *all* ranks of the default group must take part in the split
    (torch 2.11 .. 2.13, `_new_process_group_helper`). This function therefore unbinds the default group from the device
    while it creates the new group, which then opens its own connections.
    """
    c10d: Any = dist.distributed_c10d
    world: Any = c10d._get_default_group()
    named_by_torch = c10d._hash_ranks_to_str
    bound = world.bound_device_id
    c10d._hash_ranks_to_str = lambda ranks: f"shardmuon {'_'.join(map(str, ranks))} {number}"
    world.bound_device_id = None
    try:
        timeout = timeout_of(world if parent is None else parent)
        return dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
    finally:
        c10d._hash_ranks_to_str = named_by_torch
        world.bound_device_id = bound


def timeout_of(group: Any) -> timedelta | None:
    """Return the timeout of a process group. If its backends have different timeouts, return the longest. If no backend
    has a timeout (as with MPI), return None.

    torch has no public function for this, but the options of the gloo and NCCL backends contain the timeout (torch 2.11
    .. 2.13).
    """
    found = list[timedelta]()
    for device in group._device_types:
        # the group may not have a backend for this device type, and a backend may not have a timeout
        with suppress(RuntimeError, AttributeError):
            found.append(group._get_backend(device).options._timeout)
    return max(found, default=None)
