"""Private and renamed torch APIs that this package uses, with the torch versions to which each remark applies. Private
APIs of DTensor and FSDP1 are in layout/engines/."""

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

_F = TypeVar("_F", bound=Callable[..., Any])
_T = TypeVar("_T")


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Return `isinstance(value, DTensor)`, without importing torch.distributed.tensor (1 s) if it is not imported
    yet."""
    if type(value) in (Tensor, torch.nn.Parameter):  # exact types of plain tensors
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def strided_shard() -> Any:
    """Return the class `_StridedShard`, which is private in torch 2.11 .. 2.13. It is a subclass of `Shard` until 2.12,
    of `Placement` from 2.13."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard


@lru_cache(maxsize=1)
def cpu_has_bf16_matmul() -> bool:
    """True if this CPU multiplies bf16 matrices in hardware (AVX512-BF16, AMX).

    Elsewhere torch emulates bf16 products at 1/10 to 1/80 of the fp32 rate. Tests override the detection by the
    environment variable SHARDMUON_CPU_BF16, which is read once.

    Raises:
        ValueError: The variable is set to neither "0" nor "1".
    """
    told = os.environ.get("SHARDMUON_CPU_BF16") or str(int(torch.cpu._is_avx512_bf16_supported()))
    if told not in ("0", "1"):
        raise ValueError(f"SHARDMUON_CPU_BF16={told!r} must be 0 (no bf16 products on this CPU), 1 (bf16) or unset")
    return told == "1"


def cpu_has_amx() -> bool:
    """True if this CPU multiplies bf16 matrices in tiles (AMX), several times as fast as AVX512-BF16 does."""
    return cpu_has_bf16_matmul() and torch.cpu._is_amx_tile_supported()


_mkldnn: Any = torch.backends.mkldnn  # its attributes are unknown to type checkers
_EXACT: dict[str, tuple[Any, dict[str, Any]]] = {  # device type -> its matmul backend, and flags of it
    "cpu": (_mkldnn.matmul, {"fp32_precision": "ieee"}),
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
    """Read the process's settings on which the bits of matrix products on this kind of device depend."""
    matmul, flags = _EXACT.get(device.type, (None, {}))
    return {name: getattr(matmul, name) for name in flags}


@contextmanager
def exact_products(device: torch.device, flags: bool = True) -> Iterator[None]:
    """Make matrix products independent of the process's settings: no TF32, no bf16 passes, sums in fp32, and no
    autocast, which would change the dtype of products.

    The flags are global and restored at the end. If `flags` is False, only autocast is disabled.
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


def foreach(name: str, *columns: Sequence[Tensor], **others: Any) -> Sequence[Tensor]:
    """Apply an element-wise operation to lists of tensors: "lerp" is `torch.lerp`, which makes new tensors, "lerp_" is
    `Tensor.lerp_`, which changes the first list. Returns the results, or nothing if the operation works in place.

    On accelerators, torch launches one kernel for whole lists if all tensors are dense, each list has a single dtype,
    and tensors at the same index have equal sizes and strides. Otherwise it launches one kernel per tensor
    (`can_use_fast_route` in ForeachUtils.h, 2.11 .. 2.13). So lists that break these conditions are split into several
    calls.
    """
    operation = getattr(torch, f"_foreach_{name}")
    if not columns[0]:
        return ()
    if columns[0][0].device.type == "cpu" or _go_together(columns):  # a CPU processes lists tensor by tensor anyway
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
    """Check quickly if torch can process these lists with one kernel. False means that the tensors must be checked
    index by index, which takes much longer but is rarely needed. Contiguous tensors of one shape have equal strides,
    except in dims of size 1, so lists with dims of size 1 return False."""
    shapes = list(map(_shape_of, columns[0]))
    return (
        all(all(map(Tensor.is_contiguous, column)) and len(set(map(_dtype_of, column))) == 1 for column in columns)
        and all(list(map(_shape_of, column)) == shapes for column in columns[1:])
        and not any(1 in shape for shape in set(shapes))
    )


def is_dense(t: Tensor) -> bool:
    """True if the tensor's elements fill a range of memory without gaps, in any order of dims. Assumes that elements do
    not overlap."""
    extent = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.is_contiguous() or extent + 1 == t.numel()


foreach_copy_ = partial(foreach, "copy_")  # (targets, sources), whose dtypes may differ


def foreach_scale_(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply each tensor by a number, in place. The tensors must be all fp32 or all fp64."""
    if tensors[0].device.type == "cpu":  # convert the number once: torch would do so for each tensor
        torch._foreach_mul_(list(tensors), torch.tensor(factor, dtype=tensors[0].dtype, device="cpu"))
        return
    foreach("mul_", tensors, scalar=factor)


def foreach_to(tensors: Sequence[Tensor], like: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """Convert each tensor to `dtype`, by default to the dtype of its partner in `like`. A converted tensor gets its
    partner's strides, so that fast list operations can take both. A tensor that needs no conversion is returned as it
    is."""
    found = list(tensors)
    others = [i for i, t in enumerate(tensors) if t.dtype != (dtype or like[i].dtype)]
    for i in others:
        found[i] = torch.empty_like(like[i], dtype=dtype)
    foreach_copy_([found[i] for i in others], [tensors[i] for i in others])
    return found


def never_compiled(function: _F) -> _F:
    """Decorate a function so that `torch.compile` does not compile it; a compiled step would be recompiled for every
    matrix shape.

    `torch.compiler.disable` does the same but imports the compiler immediately, which takes seconds.
    """
    return cast("_F", torch._disable_dynamo(function))


def foreach_norm(
    tensors: Sequence[Tensor], order: float, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, ...]:  # 0-dim each
    """Compute `torch.linalg.vector_norm` of each tensor, accumulated and returned in `dtype`."""
    return cast("tuple[Tensor, ...]", tuple(torch._foreach_norm(list(tensors), order, dtype=dtype)))


def flattened(tensors: Sequence[Tensor]) -> Tensor:
    """Make one new 1-D tensor with all elements of these tensors, which must have the same device and dtype."""
    return torch._C._nn.flatten_dense_tensors(list(tensors))


def local_if_any(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor. Any other tensor is returned as it is."""
    return cast(Tensor, getattr(tensor, "_local_tensor", tensor))


def foreach_mul_(tensors: Sequence[Tensor], factors: Tensor | Sequence[Tensor] | Sequence[float]) -> None:
    """Multiply tensors in place, either all by one 0-dim tensor, or each by its entry in a list of tensors or numbers.

    A single Python number is not accepted, because CPUs would first round it to the dtype of the tensors.
    """
    torch._foreach_mul_(list(tensors), factors if isinstance(factors, Tensor) else list(factors))  # type: ignore[arg-type]


def names_in(model: torch.nn.Module) -> dict[int, str]:
    """Map the id of each parameter to its name in torch's state dicts, which has no prefixes of wrappers (uses the
    private `_get_fqns`)."""
    from torch.distributed.checkpoint.state_dict import _get_fqns

    return {id(p): next(iter(_get_fqns(model, name))) for name, p in model.named_parameters()}


def is_capturing(device: torch.device) -> bool:
    """True while a CUDA graph is captured on the current stream. Calls are then recorded but not run, and no value can
    be read."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Coming(deque[tuple[_T, Tensor, torch.device, Any]]):
    """Queue of tensors on their way to the host: the object that each was sent with, the copy on the host, the device
    that it comes from, and the event after which the copy is valid. The event is None, and the copy synchronous, on
    CPUs and on devices without events in torch (MPS)."""

    def send(self, about: _T, value: Tensor) -> None:
        """Start to copy a tensor to the host."""
        module: Any = torch.get_device_module(value.device)
        make: Any = None if value.device.type == "cpu" else getattr(module, "Event", None)
        if make is None:
            self.append((about, value.cpu(), value.device, None))
            return
        host = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=True)
        host.copy_(value, non_blocking=True)
        event = make()
        event.record(module.current_stream(value.device))
        self.append((about, host, value.device, event))

    def arrived(self) -> Iterator[tuple[_T, Tensor]]:
        """Remove the copies that have arrived from the front of the queue, without waiting. Yields each of them after
        the object that it was sent with. None arrives while a CUDA graph is captured: events cannot be queried then."""
        while self and (self[0][3] is None or (not is_capturing(self[0][2]) and self[0][3].query())):
            yield self.popleft()[:2]


def default_group() -> Any:
    """Return the default process group; None if torch.distributed is not initialized."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def is_alive(group: Any) -> bool:
    """True if a process group has not been destroyed. torch 2.11 .. 2.13 have no public function for this."""
    return group in dist.distributed_c10d._world.pg_group_ranks


def before_loading(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Run the hooks of `register_load_state_dict_pre_hook` and return the resulting state dict."""
    state_dict = state_dict.copy() if isinstance(state_dict, dict) else state_dict
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        changed = hook(optimizer, state_dict)
        state_dict = state_dict if changed is None else changed
    return state_dict


def after_loading(optimizer: torch.optim.Optimizer) -> None:
    """Run the hooks of `register_load_state_dict_post_hook`."""
    for hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        hook(optimizer)


def new_group_among(ranks: Sequence[int], number: int, parent: Any = None) -> Any:
    """Run `new_group(ranks, use_local_synchronization=True)`, which only these ranks call, even if they have made
    different numbers of groups before.

    torch names such a group after the number of groups that the calling rank has, so ranks that have made different
    numbers of groups would deadlock (2.11 .. 2.13). This function makes the name from `ranks` and from `number`, which
    counts the groups of exactly these ranks.

    The group gets the time-out of `parent`, by default of the default group; torch would use a constant (2.11 .. 2.13).

    While the default group is bound to a device (`init_process_group(device_id=...)`), torch makes every NCCL subgroup
    by splitting the default group's communicator, for which *all* ranks of the default group must call (2.11 .. 2.13,
    `_new_process_group_helper`). As only the members call this function, the binding is removed during the call, so
    that the group makes its own connections.
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
    """Return the time-out of a process group, the longest if its backends have different time-outs; None if no backend
    has a time-out (MPI, fake).

    torch has no public getter, but the options of the gloo and NCCL backends contain the time-out (2.11 .. 2.13).
    """
    found = list[timedelta]()
    for device in group._device_types:
        with suppress(RuntimeError, AttributeError):  # no backend for this device type, or no time-out
            found.append(group._get_backend(device).options._timeout)
    return max(found, default=None)
