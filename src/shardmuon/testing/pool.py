"""A pool of persistent ranks: real processes in one process group, which start once and serve many calls.

The pool is independent of optimizers and layouts. A *rank* is one process of the pool. A *call* runs one module-level
function on every rank. A rank *returns* from a call with a result or an exception. If it hangs or dies instead, it is
*lost*, and the pool kills all ranks.

[Note: what the parent waits for]
    Each rank has one pipe to the parent, which a separate thread of the rank reads. This thread hands calls to the main
    thread. It answers an empty message with the main thread's stack, so that the parent can show where a rank hangs.
    End of file on the pipe means that the parent is gone, and the rank exits at once, even from inside a collective.
    Only the parent has time-outs. When one expires, the parent kills the ranks, which also ends every wait inside them.

[Note: one gloo device]
    torch gives every gloo group a separate device, whose thread wakes up 100 times a second until the process ends. A
    rank has dozens of groups, which are cached for later calls, and the idle ranks of a few pools together used a third
    of two cores. So all groups of a rank share one device.

[Note: what ranks are forked from]
    When the parent starts its first rank, multiprocessing starts a fork server, from which all ranks are forked. The
    server imports once what every rank needs: torch, the modules given to `preload`, and the shardmuon modules that the
    parent has imported by then. It uses the parent's `sys.path`, which Python passes on since 3.12.3; for older
    versions, the pool passes it in PYTHONPATH, also to the ranks. Ranks exclude the imported objects from garbage
    collection, because some libraries run a collection in every call, and torch alone has half a million objects.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, cast
from unittest import mock

import torch
import torch.distributed as dist

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Rank = tuple[BaseProcess, Connection]  # a rank's process, and the parent's end of the pipe to it

_PRELOADED = [  # modules that cannot be imported are skipped
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "numpy",
    "pytest",
    "hypothesis",
]
_GRACE = 5.0  # seconds to wait for further failures after the first, so that the error names all failed ranks
_MAX_OPEN_FILES = 400  # per rank; torch frees the files and the 2 threads of a group only when the process ends


@dataclass(frozen=True)
class RankException:
    """The exception that a call raised on one rank, as text, because not every exception can be pickled.

    Attributes:
        rank: The rank that raised it.
        type_name: Name of the exception's class; "TimeoutError" for a hang, "ChildProcessError" for a dead rank.
        message: `str(exception)`.
        traceback: Traceback on the rank; for a hang, the rank's stack when the time-out expired.
        returned: True if the rank can serve further calls. False if it hung or died, and the pool killed all ranks.
    """

    rank: int
    type_name: str
    message: str
    traceback: str
    returned: bool = True

    def __str__(self) -> str:
        """Format the exception: rank, type and message on one line, followed by the traceback."""
        return f"--- rank {self.rank}: {self.type_name}: {self.message}\n{self.traceback}".rstrip()


class RankError(RuntimeError):
    """Raised if a call fails on at least one rank. `failures` has a RankException for each such rank, in rank order."""

    def __init__(self, what: str, world_size: int, failures: tuple[RankException, ...]) -> None:
        self.failures = failures
        lines = [f"{len(failures)} of {world_size} ranks failed in {what}", *map(str, failures)]
        super().__init__("\n".join(lines))


class RankPool(contextlib.AbstractContextManager["RankPool"]):
    """A pool of `world_size` processes in one process group, which run functions until the pool is closed.

    The ranks start at the first call, and again at the first call after a failure, a time-out or `close()`. State that
    a function leaves behind on a rank (process groups, globals) speeds up later calls, but must not be relied on: the
    pool may restart its ranks between any two calls, and does so when they run short of file descriptors.

    Every call starts with `torch.manual_seed(0)` and the parent's current warning filters. So results do not depend on
    the order of calls, and `-W error` also applies on the ranks. Ranks have the environment variables that the parent
    had when its first pool started. As always with a fork server, a script needs an `if __name__ == "__main__":` guard.
    A pool must be used from one thread only.

    Args:
        world_size: Number of ranks, at least 1.
        backend: Backend of the default process group. With nccl, rank r uses CUDA device r.
        timeout: Time limit of one call, in seconds.

    Examples:
        >>> import torch.distributed as dist
        >>> with RankPool(2) as pool:
        ...     pool.run(dist.get_rank)
        [0, 1]
    """

    def __init__(self, world_size: int, backend: str = "gloo", timeout: float = 60.0) -> None:
        if world_size < 1:
            raise ValueError(f"world_size={world_size}: a pool has at least 1 rank")
        self.world_size = world_size
        self.backend = backend
        self.timeout = timeout
        self._ranks: list[_Rank] = []
        self._store: dist.Store | None = None
        weakref.finalize(self, _kill, self._ranks)  # runs at exit, or when the pool is garbage-collected

    def run(self, fn: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> list[_T]:
        """Call `fn(*args, **kwargs)` on every rank and return the results in rank order.

        Args:
            fn: A function that can be imported by its module and name. It gets the rank from
                `torch.distributed.get_rank()`.
            args: Positional arguments, which must be picklable. Tensors in arguments and results are sent by value.
            kwargs: Keyword arguments, likewise.

        Raises:
            RankError: On some rank, `fn` raised an exception or hung, or the process died. All ranks are killed,
                because the others may be stuck in a collective, and the next call starts new ones.
            TypeError: `fn` or an argument cannot be pickled.
        """
        return cast("list[_T]", self._call(_GRACE, False, fn, args, kwargs))

    def run_catching(self, fn: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> list[_T | RankException]:
        """Run a function like `run`, but return a rank's exception as its result, and keep the ranks alive.

        This can test that every rank raises an exception and no rank hangs. The call waits for slow ranks up to the
        pool's time-out, even if another rank has already raised. The process group can still be used afterwards, unless
        some ranks have left a collective that others are still in.

        Raises:
            RankError: A rank hung or died. All ranks are killed, and the next call starts new ones.
            TypeError: `fn` or an argument cannot be pickled.
        """
        return cast("list[_T | RankException]", self._call(self.timeout, True, fn, args, kwargs))

    @staticmethod
    def preload(module: str) -> None:
        """Import one more module before ranks are forked. This has no effect once a pool of this process has started. A
        module that raises ImportError is skipped."""
        _PRELOADED.append(module)

    def close(self) -> None:
        """Kill the ranks, if any. A later call starts new ones."""
        _kill(self._ranks)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, grace: float, catching: bool, fn: Callable[..., Any], args: Any, kwargs: Any) -> list[object]:
        name = f"{getattr(fn, '__module__', 'builtins')}.{getattr(fn, '__qualname__', repr(fn))}"
        try:
            call = pickle.dumps((fn, args, kwargs, list(warnings.filters)))
        except Exception as error:  # PicklingError, AttributeError, TypeError, or anything from __reduce__
            raise TypeError(
                f"{name}: cannot be sent to the ranks ({error}). Pass a function defined at the top of an"
                " importable module, and picklable arguments"
            ) from error
        try:
            if not self._ranks:
                self._start()
                started = f"the start of {self.world_size} {self.backend} ranks"
                self._receive(started, 180.0, _GRACE, catching=False)  # the first imports torch
            message = pickle.dumps((list(sys.path), call))
            for _, pipe in self._ranks:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # dead: `_receive` reports it
                    pipe.send_bytes(message)
            replies, num_open_files = self._receive(name, self.timeout, grace, catching)
        except BaseException:  # after e.g. Ctrl-C, late replies would be taken for those of the next call
            self.close()
            raise
        if num_open_files > _MAX_OPEN_FILES:
            self.close()
        return replies

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*_PRELOADED, *(n for n in sys.modules if n.split(".")[0] == "shardmuon")])
        # The parent serves the rendezvous. With port 0, the system picks a free port, so that no other process can take
        # it first; and new groups form 2 to 4 times faster than with a FileStore.
        self._store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
            for rank in range(self.world_size):
                pipe, rank_pipe = context.Pipe()
                process = context.Process(
                    target=_rank_main,
                    args=(rank, self.world_size, self.backend, self._store.port, rank_pipe),
                    name=f"rank {rank} of {self.world_size}",
                    daemon=True,
                )
                process.start()
                self._ranks.append((process, pipe))
                rank_pipe.close()

    def _receive(self, what: str, timeout: float, grace: float, catching: bool) -> tuple[list[object], int]:
        """Receive one reply from each rank. Returns the replies in rank order, and the largest number of files that a
        rank has open.

        Waits at most `timeout` seconds, and at most `grace` seconds after the first failure. Raises RankError if a rank
        hung or died or, unless `catching` is True, raised an exception.
        """
        deadline = time.monotonic() + timeout
        why = f"still running after {timeout:g} s"
        pending = {pipe: number for number, (_, pipe) in enumerate(self._ranks)}
        replies: dict[int, object] = {}
        most_open_files = 0
        while pending:
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in cast("list[Connection]", ready):
                number = pending.pop(pipe)
                try:
                    reply, num_open_files = pickle.loads(pipe.recv_bytes())
                    most_open_files = max(most_open_files, num_open_files)
                except (EOFError, ConnectionResetError):
                    process = self._ranks[number][0]
                    process.join(1.0)
                    how = f"the process ended, exit code {process.exitcode}"
                    reply = RankException(number, "ChildProcessError", how, "", returned=False)
                replies[number] = reply
                if isinstance(reply, RankException) and time.monotonic() + grace < deadline:
                    deadline = time.monotonic() + grace
                    why = f"still running {grace:g} s after rank {number} failed"
        for pipe, number in pending.items():
            replies[number] = RankException(number, "TimeoutError", why, _where(pipe), returned=False)
        ordered = [replies[number] for number in range(self.world_size)]
        failures = tuple(r for r in ordered if isinstance(r, RankException))
        if not all(catching and failure.returned for failure in failures):
            raise RankError(what, self.world_size, failures)
        return ordered, most_open_files


@lru_cache(maxsize=3)  # only a few pools, because a rank takes up to 300 MB of memory
def get_pool(world_size: int) -> RankPool:
    """Return this process's gloo pool with `world_size` ranks. The pools of the 3 sizes used last are cached. The ranks
    of any other pool end as soon as nothing refers to the pool."""
    return RankPool(world_size, timeout=120.0)  # long, because other processes may use the same cores


def _where(pipe: Connection) -> str:
    """Return the current stack of a rank's main thread, or a text that says why it is not known."""
    with contextlib.suppress(OSError, EOFError):
        pipe.send_bytes(b"")
        if pipe.poll(1.0):
            answer = pipe.recv_bytes()
            return answer.decode() if answer.startswith(b"Stack") else "(it returns just now)\n"
    return "(the process does not answer)\n"


def _kill(ranks: list[_Rank]) -> None:
    """Kill all ranks of a pool. A single rank is never restarted alone."""
    for process, _ in ranks:
        process.kill()
    for process, pipe in ranks:
        process.join(10.0)
        pipe.close()
    ranks.clear()


def _rank_main(rank: int, world_size: int, backend: str, port: int, pipe: Connection) -> None:
    gc.freeze()
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in numbers.items()})
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to all processes; the parent handles it
    calls: SimpleQueue[bytes] = SimpleQueue()
    sending = threading.Lock()
    threading.Thread(target=_listen, args=(pipe, calls, sending, threading.get_ident()), daemon=True).start()
    reply = _reply(rank, _join_group, rank, world_size, backend, port)
    while True:
        with sending:
            pipe.send_bytes(reply)
        reply = _reply(rank, _run_call, calls.get())


def _listen(pipe: Connection, calls: SimpleQueue[bytes], sending: threading.Lock, main_thread: int) -> None:
    # Runs in a separate thread of a rank, see [Note: what the parent waits for].
    try:
        while True:
            call = pipe.recv_bytes()
            if call:
                calls.put(call)
                continue
            stack = "".join(traceback.format_stack(sys._current_frames()[main_thread]))
            with sending:
                pipe.send_bytes(f"Stack (most recent call last):\n{stack}".encode())
    finally:  # the parent has closed the pipe or has ended
        os._exit(0)  # skip interpreter teardown, which waits for gloo's threads


def _join_group(rank: int, world_size: int, backend: str, port: int) -> None:
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # otherwise gloo looks up the host name, which may fail
    if "nccl" in backend:
        torch.cuda.set_device(rank)
    if "gloo" in backend:
        _share_gloo_device()
    store = dist.TCPStore("127.0.0.1", port, None, False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)


def _share_gloo_device() -> None:
    # Make all gloo groups of this rank share one device, see [Note: one gloo device].
    gloo: Any = dist.ProcessGroupGloo
    make, device = gloo.__init__, gloo.create_default_device()

    def make_with_device(self: dist.ProcessGroupGloo, store: dist.Store, rank: int, size: int, timeout: Any) -> None:
        if isinstance(timeout, timedelta):  # otherwise it is an options object, which has its own device
            options = gloo._Options()
            options._devices, options._timeout = [device], timeout
            timeout = options
        make(self, store, rank, size, timeout)

    gloo.__init__ = make_with_device


def _run_call(message: bytes) -> object:
    sys.path[:], call = pickle.loads(message)  # before the call is loaded, which imports modules
    fn, args, kwargs, filters = pickle.loads(call)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.resetwarnings()
        cast("list[Any]", warnings.filters).extend(filters)
        return fn(*args, **kwargs)


def _reply(rank: int, fn: Callable[..., object], *args: Any) -> bytes:
    """Call `fn`, and pickle its result (or a RankException) with the number of files that this rank has open. Plain
    pickle sends tensors by value, not in shared memory."""
    try:
        return pickle.dumps((fn(*args), _num_open_files()))
    except BaseException as error:  # SystemExit and pytest's outcomes, too, must not end the rank
        failed = RankException(rank, type(error).__name__, str(error), traceback.format_exc())
        return pickle.dumps((failed, _num_open_files()))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _num_open_files() -> int:
    return len(os.listdir("/dev/fd"))
