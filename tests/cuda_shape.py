"""A CUDA device that computes on the CPU: tensors say cuda:0, their data lies on the CPU, so values are right.

`CudaShape` is the mode that carries every operation out. It refuses what CUDA or NCCL would refuse, and counts what
costs time there: kernel launches, waits of the host for the device, copies to the device, bytes in use. Counts go by
phase and by the line of shardmuon that asked. It knows nothing of streams: what runs in the wrong order on a real
device runs in the right one here.

[Note: launches]
    An operation is one launch. One on lists (`_foreach_*`) is what torch's CUDA code makes of it
    (MultiTensorApply.cuh): at most so many tensors, or 320 chunks of 65536 elements, a launch. It takes that way only
    if all tensors are dense, of one dtype in a list (in all lists, copies aside), and each has the sizes and strides of
    its partners in the other lists. Else torch falls back to one launch a tensor.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import pickle
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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

from shardmuon.comm.vote import Entry

CUDA, CPU, META = torch.device("cuda:0"), torch.device("cpu"), torch.device("meta")
_TENSORS_A_LAUNCH = (110, 64, 48, 36, 30)  # by the number of lists
_BLOCKS_A_LAUNCH, _CHUNK = 320, 65536
# They make a tensor or a view and run nothing.
_FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias", "lift_fresh"}
_FREE |= {"_unsafe_view", "is_pinned", "set_"}
_READS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "_linalg_svd", "_linalg_eigh", "masked_select"}
_COPIES = {"copy_", "_to_copy", "_foreach_copy_"}  # may have tensors of two devices
_ACCEPTS_CPU_SCALARS = 0  # dims of a CPU tensor that kernels take beside CUDA's

_PROPERTIES = SimpleNamespace(name="a stand-in", major=9, minor=0, multi_processor_count=132)

_NCCL = "cuda:nccl"  # what every group says of itself that was not made with a backend of its own
_OWN_BACKENDS: dict[str, str] = {}  # name of one that was -> its configuration


def launches_of(name: str, args: Sequence[Any]) -> int:
    """See [Note: launches]."""
    if not name.startswith("_foreach"):
        return 1
    lists = [a for a in args if isinstance(a, (list, tuple)) and a and isinstance(a[0], Tensor)]
    if not lists:
        return 1
    pairs = [pair for row in lists[1:] for pair in zip(lists[0], row, strict=True)]
    alike = all(a.shape == b.shape and a.stride() == b.stride() for a, b in pairs)
    dtypes = [{t.dtype for t in row} for row in lists]
    one_dtype = all(len(found) == 1 for found in dtypes) if name == "_foreach_copy_" else len(set().union(*dtypes)) == 1
    if not (alike and one_dtype and all(torch.ops.aten.is_non_overlapping_and_dense(t) for row in lists for t in row)):
        return len(lists[0])
    depth = len(lists) + (not name.endswith("_"))
    most = _TENSORS_A_LAUNCH[min(depth, len(_TENSORS_A_LAUNCH)) - 1]
    blocks = sum(-(-t.numel() // _CHUNK) for t in lists[0])
    return max(-(-sum(t.numel() > 0 for t in lists[0]) // most), -(-blocks // _BLOCKS_A_LAUNCH))


class OnDevice(Tensor):
    """A tensor that says cuda:0."""

    inner: Tensor  # where its values are

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnDevice:
        made = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=CUDA,
            requires_grad=False,
        )
        made.inner = inner
        return made

    def __init__(self, inner: Tensor) -> None:
        del inner

    def untyped_storage(self) -> Any:  # its address tells views of one memory
        return self.inner.untyped_storage()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} on a CUDA tensor outside of the mode that stands in for CUDA")


@contextlib.contextmanager
def _device_guard() -> Iterator[None]:
    """A CPU build has no guard for CUDA devices, so C++ code that sets the device fails. It gets meta's, which does
    nothing, for a while."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    registry = (ctypes.c_void_p * 22).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    cuda, meta = 1, 14  # c10::DeviceType
    before = registry[cuda]
    registry[cuda] = before or registry[meta]
    try:
        yield
    finally:
        registry[cuda] = before


class _Event:
    """A CUDA event's stand-in. Everything is done at once here, so it is always over."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, *args: Any) -> None:
        pass

    def query(self) -> bool:
        if torch.cuda.is_current_stream_capturing():
            raise Refused("an event is asked while a graph is captured: CUDA ends the capture with an error")
        return True


class Refused(RuntimeError):
    """CUDA or NCCL would refuse this."""


class _Stream:
    """Everything runs in order here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass


class Graph:
    """A graph of which only the capture is real: what waits is refused in it. Nothing is replayed."""


class _Done:
    """A message that has come."""

    def wait(self, *args: Any) -> None:
        pass


class _MirroredGloo:
    """gloo to ranks that do not exist: each says of itself what this one does, and is of one mind with it in votes."""

    def __init__(self, store: Any, me: int, num: int, options: Any) -> None:
        self._me, self._sent = me, torch.empty(0, dtype=torch.uint8)

    _Options = SimpleNamespace
    create_default_device = staticmethod(lambda **options: None)

    def send(self, tensors: list[Tensor], to: int, tag: int) -> _Done:
        self._sent = tensors[0]
        return _Done()

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> _Done:
        *mine, total, presence = pickle.loads(self._sent.numpy())
        said = pickle.dumps((*mine, -total, presence))  # equal digests cancel
        tensors[0][: len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        return _Done()

    def allgather(self, rows: list[list[Tensor]], mine: list[Tensor]) -> _Done:
        for rank, row in enumerate(rows[0]):
            row.copy_(mine[0])
            if mine[0].dtype == torch.uint8:
                said = pickle.dumps(_said_by(rank, self._me, pickle.loads(mine[0].numpy().tobytes())))
                row[: len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        return _Done()


def _said_by(rank: int, me: int, value: Any) -> Any:
    """Return another rank's word where this one says `value`: the same, and who it is where ranks find each other."""
    if not isinstance(value, dict) or not isinstance(value.get(me), Entry):
        return value
    ties = tuple(tie._replace(parts=(rank,)) if tie.parts == (me,) else tie for tie in value[me].facts.ties)
    return {rank: value[me]._replace(facts=value[me].facts._replace(ties=ties))}


class CudaShape(TorchDispatchMode):
    """The mode. Enter it, move tensors with `.to("cuda:0")`, step.

    Attributes:
        launches: (phase, operation) -> launches.
        waits: (phase, what and where) -> times the host waited for the device.
        uploads: (phase, where) -> copies from the CPU's memory.
        phase: What is counted now.
        bytes, peak: On the device, now and at most since `clear`.
    """

    def __init__(self, *, mirror: bool = False, values: bool = True) -> None:
        """
        Args:
            mirror: For fake ranks: what a rank receives in an exchange of equal parts is what it sends, and they agree
                to all that it says.
            values: False: what is made on the device has a shape and no values, where counts alone are asked for and
                sizes are real. What is copied there keeps its values: handshakes must still be understood.
        """
        super().__init__()
        self.mirror, self.values, self.phase = mirror, values, "-"
        self.launches: Counter[tuple[str, str]] = Counter()
        self.waits: Counter[tuple[str, str]] = Counter()
        self.uploads: Counter[tuple[str, str]] = Counter()
        self.bytes = self.peak = 0
        self._users: Counter[int] = Counter()  # storage -> tensors on it
        self._pinned: set[int] = set()
        self._pickling = False
        self._graph: Graph | None = None
        self._waits_are_errors = False
        self._entered: list[contextlib.ExitStack] = []

    def clear(self) -> None:
        """Count from here."""
        for counter in (self.launches, self.waits, self.uploads):
            counter.clear()
        self.peak = self.bytes

    def by_phase(self, counter: Counter[tuple[str, str]]) -> dict[str, int]:
        found: Counter[str] = Counter()
        for (phase, _), count in counter.items():
            found[phase] += count
        return dict(found)

    # ------------------------------------------------------------------------------------------- what is replaced

    def __enter__(self) -> CudaShape:
        stack = contextlib.ExitStack()
        stack.enter_context(_device_guard())
        functions: dict[str, Any] = {
            "_lazy_init": lambda: None,
            "is_initialized": lambda: True,
            "is_available": lambda: True,
            "current_device": lambda: 0,
            "set_device": lambda *args: None,
            "device_count": lambda: 1,
            "get_device_capability": lambda *args: (9, 0),
            "get_device_properties": lambda *args: _PROPERTIES,
            "is_current_stream_capturing": lambda: self._graph is not None,
            "synchronize": lambda *args: self._wait("synchronize"),
            "Event": _Event,
            "Stream": _Stream,
            "current_stream": _Stream,
            "stream": contextlib.nullcontext,
            "CUDAGraph": Graph,
            "graph": self._capture,
            "set_sync_debug_mode": self._set_sync_debug_mode,
            "memory_allocated": lambda *args: self.bytes,
            "max_memory_allocated": lambda *args: self.peak,
            "reset_peak_memory_stats": lambda *args: setattr(self, "peak", self.bytes),
        }
        for name, value in functions.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        accelerator = {
            "current_accelerator": lambda check_available=False: CUDA,
            "current_device_index": lambda: 0,
            "synchronize": lambda *args: self._wait("synchronize"),
        }
        for name, value in accelerator.items():
            stack.enter_context(mock.patch.object(torch.accelerator, name, value))
        stack.enter_context(mock.patch.object(torch.cuda.tunable, "is_enabled", return_value=False))
        real_group, real_objects = dist.new_group, dist.all_gather_object

        def config(group: Any = None) -> str:
            return _OWN_BACKENDS.get(getattr(group, "group_name", ""), _NCCL)

        def new_group(*args: Any, **kwargs: Any) -> Any:
            backend = kwargs.get("backend")
            if backend is not None and dist.get_backend() == "fake":
                kwargs["backend"] = "fake"
            group = real_group(*args, **kwargs)
            if backend is not None and hasattr(group, "group_name"):
                _OWN_BACKENDS[group.group_name] = f"cpu:{backend}" if ":" not in backend else backend
            return group

        def all_gather_object(values: Any, value: Any, group: Any = None) -> None:
            # torch chooses where the pickled bytes travel by the group's true backend, and resizes them.
            self._pickling = True
            try:
                real_objects(values, value, group=group)
            finally:
                self._pickling = False

        stack.enter_context(mock.patch.object(dist, "get_backend_config", config))
        stack.enter_context(mock.patch.object(dist, "new_group", new_group))
        stack.enter_context(mock.patch.object(dist, "all_gather_object", all_gather_object))
        if self.mirror:
            stack.enter_context(mock.patch.object(dist, "ProcessGroupGloo", _MirroredGloo))
        self._entered.append(stack)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._entered.pop().close()

    @contextlib.contextmanager
    def phases(self, table: dict[str, tuple[Any, str]]) -> Iterator[None]:
        """Count what these functions do under a name of their own: phase -> (owner, name of the function)."""
        with contextlib.ExitStack() as stack:
            for phase, (owner, name) in table.items():
                stack.enter_context(mock.patch.object(owner, name, self._in_phase(phase, getattr(owner, name))))
            yield

    def _in_phase(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            before, self.phase = self.phase, phase
            try:
                return function(*args, **kwargs)
            finally:
                self.phase = before

        return call

    # ------------------------------------------------------------------------------------------------- operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # it comes back with its local tensors
        kwargs = dict(kwargs or {})
        if any(issubclass(t, FakeTensor) for t in types):  # torch asks for shapes alone
            return func(*args, **kwargs)
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if func.namespace == "c10d":
            return self._collective(func, tensors, args, kwargs)
        name = func.overloadpacket.__name__
        wanted = kwargs.get("device")
        wanted = None if wanted is None else torch.device(wanted)
        here = [t for t in tensors if isinstance(t, OnDevice)]
        pinned = bool(kwargs.pop("pin_memory", False))
        on_device = bool(here) if wanted is None else wanted.type == "cuda"
        if func._schema.is_mutable and isinstance(args[0], Tensor):
            on_device = isinstance(args[0], OnDevice)
        if not here and not on_device:
            out = func(*args, **kwargs)
            if pinned:
                self._pinned.add(out.untyped_storage().data_ptr())
            return out
        self._check(func, name, tensors)
        self._count(func, name, args, kwargs, tensors, on_device)
        inners = [t.inner for t in here]
        empty = any(t.device.type == "meta" for t in inners)
        if empty and name == "_local_scalar_dense":
            return torch.ones((), dtype=args[0].dtype).item()
        if empty and not on_device:
            return args[0].zero_() if func._schema.is_mutable else torch.zeros(args[0].shape, dtype=kwargs.get("dtype"))
        if wanted is not None:
            kwargs["device"] = META if empty or not (self.values or tensors) else CPU
        given: dict[int, Tensor] = {id(t.inner): t for t in here}
        inner_args, inner_kwargs = tree_map(lambda x: _open(x, empty), (args, kwargs))
        call = func
        if name in ("bmm", "mm") and isinstance(args[-1], torch.dtype):
            call = functools.partial(_widened, func.overloadpacket)
        elif empty and name == "copy_" and not isinstance(args[1], OnDevice):
            call = _first  # a shape takes no values
        out = call(*inner_args, **inner_kwargs)
        if name == "_to_copy" and any(out is t for t in inner_args):
            out = out.clone()
        if not on_device and not func._schema.is_mutable:
            return out
        return tree_map(lambda x: self._wrapped(x, given) if isinstance(x, Tensor) else x, out)

    def _wrapped(self, inner: Tensor, given: dict[int, Tensor]) -> Tensor:
        if id(inner) in given:
            return given[id(inner)]
        if isinstance(inner, FakeTensor):
            return inner
        made = OnDevice(inner)
        storage = inner.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if size:
            if not self._users[key]:
                self.bytes += size
                self.peak = max(self.peak, self.bytes)
            self._users[key] += 1
            weakref.finalize(made, self._freed, key, size)
        return made

    def _freed(self, key: int, size: int) -> None:
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]
            self.bytes -= size

    def _check(self, func: Any, name: str, tensors: Sequence[Tensor]) -> None:
        strangers = [t for t in tensors if not isinstance(t, OnDevice) and t.dim() > _ACCEPTS_CPU_SCALARS]
        if strangers and len(strangers) < len(tensors) and name not in _COPIES:
            raise Refused(f"{func}: tensors on cuda:0 and on the CPU, at {_where()}")

    def _count(self, func: Any, name: str, args: Any, kwargs: Any, tensors: Sequence[Tensor], on_device: bool) -> None:
        mixed = any(not isinstance(t, OnDevice) for t in tensors)
        if name in _READS:
            self._wait(name)
        elif name == "_to_copy" and not on_device:
            self._wait("copy to the CPU")
        elif name in _COPIES and mixed and (name == "_to_copy" or isinstance(tensors[0], OnDevice)):
            self.uploads[self.phase, f"{name} {_where()}"] += 1
            if not _is_non_blocking(name, args, kwargs):
                self._wait("upload")  # torch lets the host wait for its end
        elif name in _COPIES and mixed:
            pinned = tensors[0].untyped_storage().data_ptr() in self._pinned
            if not (pinned and _is_non_blocking(name, args, kwargs)):
                self._wait("copy to the CPU")
        elif name in ("index", "index_put_") and any(
            isinstance(t, Tensor) and t.dtype == torch.bool for t in tree_leaves(args[1])
        ):
            self._wait("index by a mask")
        if not (func.is_view or name in _FREE):
            self.launches[self.phase, name] += launches_of(name, args)

    def _set_sync_debug_mode(self, mode: str) -> None:
        self._waits_are_errors = mode == "error"

    @contextlib.contextmanager
    def _capture(self, graph: Graph, **options: Any) -> Iterator[None]:
        self._graph = graph
        try:
            yield
        finally:
            self._graph = None

    def _wait(self, what: str) -> None:
        if what != "synchronize" and (self._graph is not None or self._waits_are_errors):
            raise Refused(f"{what}: waits for the device, at {_where()}")
        self.waits[self.phase, f"{what} {_where()}"] += 1

    # ------------------------------------------------------------------------------------------------ collectives

    def _collective(self, func: Any, tensors: Sequence[Tensor], args: Any, kwargs: Any) -> Any:
        kinds = self._kinds(args)
        for t in tensors if not self._pickling else ():
            kind = "cuda" if isinstance(t, OnDevice) else "cpu"
            if kind not in kinds:
                raise Refused(f"{func}: no backend for {kind} tensors in a group of {kinds}, at {_where()}")
            if kinds[kind] == "nccl" and not t.is_contiguous():
                raise Refused(f"{func}: NCCL takes contiguous tensors only, at {_where()}")
        if any(isinstance(t, OnDevice) for t in tensors):
            self.launches[self.phase, func.overloadpacket.__name__] += 1
        inner_args, inner_kwargs = tree_map(lambda x: _open(x, False), (args, kwargs))
        if self.mirror and func.overloadpacket.__name__ == "alltoall_base_":
            arriving, sent, group, splits = inner_args[:4]
            if splits:
                arriving.zero_()
            else:
                arriving.copy_(sent)
            return func(
                arriving[:0], arriving[:0], group, [], []
            )  # torch's fake group refuses a rank that sends nothing
        out = func(*inner_args, **inner_kwargs)
        return tree_map(lambda x: next((t for t in tensors if getattr(t, "inner", t) is x), x), out)

    def _kinds(self, args: Sequence[Any]) -> dict[str, str]:
        """Device -> backend of the group that a collective was given."""
        for arg in args:
            with contextlib.suppress(Exception):
                group = dist.ProcessGroup.unbox(arg)
                return dict(part.split(":") for part in dist.get_backend_config(group).split(","))
        return dict([_NCCL.split(":")])


@contextlib.contextmanager
def fake_ranks(size: int) -> Iterator[None]:
    """Make this process rank 0 of so many that do not exist."""
    if size > 1:
        dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        if size > 1:
            dist.destroy_process_group()


def _widened(product: Any, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """A product with `out_dtype`, which CUDA alone has."""
    out: Tensor = product(left.to(dtype), right.to(dtype))
    return out


def _first(x: Any, *rest: Any) -> Any:
    return x


def _open(x: Any, empty: bool) -> Any:
    """Return the stand-in for an argument; without its values if another has none."""
    x = x.inner if isinstance(x, OnDevice) else x
    return x.to("meta") if empty and isinstance(x, Tensor) and x.device.type != "meta" else x


def _is_non_blocking(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    position = 2 if name in ("copy_", "_foreach_copy_") else 99
    return bool(kwargs.get("non_blocking", args[position] if len(args) > position else False))


def _where() -> str:
    """The line of shardmuon (of torch's optimizers, where there is none) that asked."""
    frame, found = sys._getframe(1), ""
    while frame is not None:
        file = frame.f_code.co_filename
        if "/shardmuon/" in file and "_torch.py" not in file:
            return f"{file.split('/shardmuon/')[-1]}:{frame.f_lineno}"
        if "/torch/optim/" in file and not found:
            found = f"torch/optim/{file.split('/torch/optim/')[-1]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return found or "elsewhere"
