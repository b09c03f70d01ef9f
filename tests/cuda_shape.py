"""A simulated CUDA device. Its tensors report the device cuda:0, but all operations run on the CPU.

The mode `CudaShape` raises an error for every operation that CUDA or NCCL would reject. It records kernel launches,
host synchronizations and copies to the device. Streams are not simulated, so missing synchronization between streams is
not detected.
"""

from __future__ import annotations

import contextlib
import ctypes
import pickle
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from shardmuon.comm import vote
from shardmuon.comm.groups import Lane, Ranks, my_rank
from shardmuon.layout.engines.base import Ties

CUDA = torch.device("cuda:0")
_C10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
_PROPERTIES = SimpleNamespace(name="a stand-in", major=9, minor=0, multi_processor_count=132)
# The operations in _FREE launch no kernel on a GPU. Most of them create an empty tensor or a view.
_FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias", "lift_fresh"}
_FREE |= {"_unsafe_view", "is_pinned", "set_"}
_READS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "_linalg_svd", "_linalg_eigh", "masked_select"}
_COPIES = {"copy_", "_to_copy", "_foreach_copy_"}  # The operations in _COPIES accept tensors on different devices.
# The functions of a step for which `CudaShape` counts kernel launches separately.
_PHASES = {"validate", "vote", "update_momentum", "start", "orthogonalize", "apply_results", "step_adamw"}


class Refused(RuntimeError):
    """Raised for an operation that CUDA or NCCL would reject, and for an operation that copies a matrix to a wider
    dtype. Also raised for an operation that blocks the host while a graph is captured or while torch's synchronization
    debug mode is "error"."""


def launches_of(name: str, args: Sequence[Any]) -> int:
    """Return the number of kernels that an operation launches.

    A foreach operation is a single launch if all tensors are dense and have the same dtype, and tensors at the same
    index of the lists have equal sizes and strides. For a foreach copy, the dtypes of source and destination may
    differ. If any condition fails, torch launches one kernel per tensor. torch may split a long list into several
    launches, but this function counts them as one.
    """
    lists = [a for a in args if isinstance(a, (list, tuple)) and a and isinstance(a[0], Tensor)]
    if not name.startswith("_foreach") or not lists:
        return 1
    dtypes = [{t.dtype for t in row} for row in lists]
    one_dtype = all(len(found) == 1 for found in dtypes) if name == "_foreach_copy_" else len(set().union(*dtypes)) == 1
    alike = all(len({(t.shape, t.stride()) for t in partners}) == 1 for partners in zip(*lists, strict=True))
    dense = all(torch.ops.aten.is_non_overlapping_and_dense(t) for row in lists for t in row)
    return 1 if one_dtype and alike and dense else len(lists[0])


class OnDevice(Tensor):
    """A tensor that reports the device cuda:0 but stores its values on the CPU."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnDevice:
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=CUDA, **layout)
        made.inner = inner
        return made

    # torch compares storage addresses to find out whether two views share memory, so `OnDevice` must report the storage
    # of its inner tensor.
    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} on a CUDA tensor outside of the mode that stands in for CUDA")


class CudaShape(TorchDispatchMode):
    """A dispatch mode that simulates a CUDA device. Enter the mode, move tensors with `.to("cuda:0")`, and step the
    optimizer.

    Attributes:
        launches: Number of kernel launches, keyed by the function of the step that launched them (see `_PHASES`).
        waits: For each host synchronization, the operation that blocked the host, and the line of code that called it.
        uploads: Lines of code that copied data from the CPU to the device.
    """

    def __init__(self, *, ranks: int = 1, values: bool = True) -> None:
        """Configure the mode, which takes effect when it is entered.

        Args:
            ranks: Size of a simulated process group in which this process is rank 0. The other ranks do not exist, but
                appear to agree with this rank in every vote and to send no data.
            values: If False, tensors created on the device have shapes but no values, so that launches can be counted
                for models of realistic size. Tensors that are copied to the device keep their values.
        """
        super().__init__()
        self._ranks, self._values = ranks, values
        self.launches: Counter[str] = Counter()
        self.waits: list[str] = []
        self.uploads: list[str] = []
        self._pinned: set[int] = set()
        # Operations that make the host wait raise an error if `_sync_mode` is "error" (set by
        # torch.cuda.set_sync_debug_mode) or "capture" (while a graph is captured).
        self._sync_mode = "default"
        self._patches = contextlib.ExitStack()

    def clear(self) -> None:
        for record in (self.launches, self.waits, self.uploads):
            record.clear()

    # ------------------------------------------------------------------------------------------- what is replaced

    def __enter__(self) -> CudaShape:
        # A CPU build of torch has no device guard for CUDA, so C++ code that sets the device would fail. The guard of
        # the meta device, which does nothing, takes its place.
        guards = (ctypes.c_void_p * 22).in_dll(_C10, "_ZN3c104impl26device_guard_impl_registryE")
        # In c10::DeviceType, 1 is CUDA and 14 is meta.
        self._patches.callback(guards.__setitem__, 1, guards[1])
        guards[1] = guards[1] or guards[14]
        enter = self._patches.enter_context
        cuda: dict[str, Any] = {
            "_lazy_init": mock.Mock(),
            "is_initialized": lambda: True,
            "is_available": lambda: True,
            "current_device": lambda: 0,
            "set_device": mock.Mock(),
            "device_count": lambda: 1,
            "get_device_capability": lambda *args: (9, 0),
            "get_device_properties": lambda *args: _PROPERTIES,
            "is_current_stream_capturing": lambda: self._sync_mode == "capture",
            "synchronize": lambda *args: self._wait("synchronize"),
            "Event": lambda **options: mock.Mock(spec=["record", "query"], query=self._query),
            "current_stream": lambda *args: None,
            # A simulated CUDA graph can be captured, but not replayed.
            "CUDAGraph": mock.Mock,
            "graph": self._capture,
            "set_sync_debug_mode": lambda mode: setattr(self, "_sync_mode", mode),
        }
        enter(mock.patch.multiple(torch.cuda, **cuda))
        enter(mock.patch.object(torch.accelerator, "synchronize", cuda["synchronize"]))
        enter(mock.patch.object(torch.accelerator, "current_accelerator", return_value=CUDA))
        enter(mock.patch.object(torch.accelerator, "current_device_index", return_value=0))
        enter(mock.patch.object(torch.cuda.tunable, "is_enabled", return_value=False))
        enter(mock.patch.object(dist, "get_backend_config", return_value="cuda:nccl"))
        if self._ranks > 1:
            enter(mock.patch.object(Lane, "over", _Mirror))
            dist.init_process_group("fake", rank=0, world_size=self._ranks, store=FakeStore())
            self._patches.callback(dist.destroy_process_group)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    @contextlib.contextmanager
    def _capture(self, graph: Any, **options: Any) -> Iterator[None]:
        self._sync_mode = "capture"
        try:
            yield
        finally:
            self._sync_mode = "default"

    def _query(self) -> bool:
        """Stand in for `torch.cuda.Event.query`. Return True, because the simulated device completes all work
        immediately. While a graph is captured, raise `Refused`."""
        if self._sync_mode == "capture":
            raise Refused("an event is asked while a graph is captured: CUDA ends the capture with an error")
        return True

    # ------------------------------------------------------------------------------------------------- operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            # DTensor's own dispatch handles an operation on DTensors, and then calls this mode again with local
            # tensors.
            return NotImplemented
        name, kwargs = func.overloadpacket.__name__, dict(kwargs or {})
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        # torch runs operations on fake tensors only to infer shapes, so these operations are not recorded.
        if any(issubclass(t, FakeTensor) for t in types):
            return func(*args, **kwargs)
        if func.namespace == "c10d":
            return self._collective(func, tensors, args, kwargs)
        given = {id(t.inner): t for t in tensors if isinstance(t, OnDevice)}
        pinned, wanted = kwargs.pop("pin_memory", False), kwargs.get("device")
        on_device = bool(given) if wanted is None else torch.device(wanted).type == "cuda"
        if func._schema.is_mutable:
            on_device = isinstance(tensors[0], OnDevice)
        if not given and not on_device:
            out = func(*args, **kwargs)
            if pinned:
                self._pinned.add(_address(out))
            return out
        self._refuse(func, name, tensors, kwargs)
        self._record(func, name, tensors, args, kwargs, on_device)
        out = self._carried_out(func, name, args, kwargs, on_device)
        return tree_map(lambda x: _wrapped(x, given), out) if on_device else out

    def _carried_out(self, func: Any, name: str, args: Any, kwargs: dict[str, Any], on_device: bool) -> Any:
        """Run an operation on the CPU tensors inside the simulated device tensors. If one of these has no values, run
        the operation on meta tensors instead."""
        found = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        empty = any(isinstance(t, OnDevice) and t.inner.is_meta for t in found)
        if empty and name == "_local_scalar_dense":
            return torch.ones((), dtype=args[0].dtype).item()
        # A device tensor without values is copied to the CPU as zeros.
        if empty and not on_device:
            return args[0].zero_() if func._schema.is_mutable else torch.zeros(args[0].shape, dtype=kwargs.get("dtype"))
        if "device" in kwargs:
            kwargs["device"] = "meta" if empty or not (self._values or found) else "cpu"
        inner_args, inner_kwargs = tree_map(lambda x: _opened(x, empty), (args, kwargs))
        # CPU matmuls have no `out_dtype` argument, so the operands are converted to that dtype first.
        if name in ("bmm", "mm") and isinstance(args[-1], torch.dtype):
            return func.overloadpacket(*(t.to(args[-1]) for t in inner_args[:2]))
        if empty and name == "copy_" and not isinstance(args[1], OnDevice):
            # Skip the copy from the CPU to a device tensor without values.
            return inner_args[0]
        out = func(*inner_args, **inner_kwargs)
        return out.clone() if name == "_to_copy" and any(out is t for t in inner_args) else out

    def _refuse(self, func: Any, name: str, tensors: Sequence[Tensor], kwargs: dict[str, Any]) -> None:
        # CUDA kernels accept 0-dim CPU tensors as arguments, so only CPU tensors with at least one dim are refused.
        strangers = [t for t in tensors if not isinstance(t, OnDevice) and t.dim() > 0]
        if name not in _COPIES and 0 < len(strangers) < len(tensors):
            raise Refused(f"{func}: tensors on cuda:0 and on the CPU, at {_where()}")
        if name == "linalg_vector_norm" and not _where().startswith("auditing/"):
            x, dtype = tensors[0], kwargs.get("dtype") or tensors[0].dtype
            # CUDA's norm kernel can read fp16 or bf16 and accumulate in fp32. For any other wider accumulation dtype,
            # such as fp64 for an fp32 input, torch first makes a wider copy of the input. Raise an error if this would
            # be a copy of a whole matrix.
            sums = dtype == x.dtype or (dtype, x.dtype.itemsize) == (torch.float32, 2)
            if not sums and x.dim() > 1 and min(x.shape[-2:]) > 1:
                raise Refused(f"{func}: a copy of {x.dtype} {tuple(x.shape)} in {dtype}, at {_where()}")

    def _record(
        self, func: Any, name: str, tensors: Sequence[Tensor], args: Any, kwargs: dict[str, Any], on_device: bool
    ) -> None:
        non_blocking = kwargs.get("non_blocking") or (name in ("copy_", "_foreach_copy_") and args[2:] == (True,))
        if name in _READS:
            self._wait(name)
        elif name in ("index", "index_put_") and any(getattr(t, "dtype", None) == torch.bool for t in args[1]):
            self._wait("index by a mask")
        elif name in _COPIES and on_device and not all(isinstance(t, OnDevice) for t in tensors):
            self.uploads.append(_where())
            if not non_blocking:
                # A copy with non_blocking=False makes the host wait until the copy is complete.
                self._wait("upload")
        elif name in _COPIES and not on_device and not (non_blocking and _address(tensors[0]) in self._pinned):
            self._wait("copy to the CPU")
        if not (func.is_view or name in _FREE):
            self.launches[_phase()] += launches_of(name, args)

    def _wait(self, what: str) -> None:
        if self._sync_mode != "default":
            raise Refused(f"{what}: waits for the device, at {_where()}")
        self.waits.append(f"{what} at {_where()}")

    def _collective(self, func: Any, tensors: Sequence[Tensor], args: Any, kwargs: Any) -> Any:
        for t in tensors:
            if not isinstance(t, OnDevice):
                raise Refused(f"{func}: NCCL takes no CPU tensors, at {_where()}")
            if not t.is_contiguous():
                raise Refused(f"{func}: NCCL takes contiguous tensors only, at {_where()}")
        self.launches[_phase()] += 1
        inner_args, inner_kwargs = tree_map(lambda x: _opened(x, False), (args, kwargs))
        if self._ranks > 1 and func.overloadpacket.__name__ == "alltoall_base_":
            # torch's fake process group rejects an all-to-all in which this rank sends nothing to some ranks, so an
            # empty all-to-all is run instead.
            nothing = inner_args[0][:0]
            return func(nothing, nothing, inner_args[2], [], [])
        out = func(*inner_args, **inner_kwargs)
        return tree_map(lambda x: next((t for t in tensors if getattr(t, "inner", t) is x), x), out)


class _Mirror:
    """A simulated vote in which every other rank sends the same message as this rank, except for its rank number.
    Tensor-parallel parameters are not supported."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.me = ranks, ranks.index(my_rank())

    def merge(self, message: vote._Message, merged: Any, what: str) -> vote._Message:
        """Return the message merged over all ranks. Its sum of digests is 0, because all ranks have equal digests (see
        [Note: the message] in comm/vote.py)."""
        phase, flags, _, presence = message
        return phase, flags, 0, presence

    def share(self, value: bytes, what: str) -> list[Any]:
        return [_said_by(rank, pickle.loads(value)) for rank in self.ranks]


def _said_by(rank: int, said: Any) -> Any:
    if isinstance(said, dict) and all(isinstance(entry, vote._Entry) for entry in said.values()):
        return {rank: _said_by(rank, said[my_rank()])}
    if isinstance(said, vote._Entry):
        ties, *others = said.facts
        return said._replace(facts=(tuple(Ties((rank,), tie.mates) for tie in ties), *others))
    return said


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _opened(x: Any, empty: bool) -> Any:
    """Return the CPU or meta tensor inside an `OnDevice` tensor, and any other value unchanged. If `empty` is True,
    convert all tensors to meta tensors, because another argument of the same operation has no values."""
    x = x.inner if isinstance(x, OnDevice) else x
    return x.to("meta") if empty and isinstance(x, Tensor) else x


def _wrapped(x: Any, given: dict[int, OnDevice]) -> Any:
    if not isinstance(x, Tensor) or isinstance(x, FakeTensor):
        return x
    return given[id(x)] if id(x) in given else OnDevice(x)


def _callers() -> Iterator[tuple[str, str]]:
    """Yield the name and the current line of every shardmuon function on the call stack, innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        _, package, file = frame.f_code.co_filename.rpartition("/shardmuon/")
        if package:
            yield frame.f_code.co_name, f"{file}:{frame.f_lineno}"
        frame = frame.f_back


def _where() -> str:
    return next((line for _, line in _callers()), "elsewhere")


def _phase() -> str:
    return next((name for name, _ in _callers() if name in _PHASES), "-")
