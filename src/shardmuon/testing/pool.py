"""A pool of persistent ranks: processes in one process group that start once and run many functions.

The pool does not depend on optimizers or layouts. A *rank* is one process of the pool. The *parent* is the process that
uses the pool. A *call* runs one function on every rank. Each rank replies to a call with the function's result or with
an exception. If a rank hangs or dies instead, the pool kills all ranks.

[Note: what the parent waits for]
    A pipe connects the parent to each rank. On the rank, a separate thread reads calls from the pipe and passes them to
    the main thread. If the thread reads an empty message, it replies with the stack of the main thread, so that the
    parent can show where the rank hangs. If the parent ends, the thread reaches the end of the pipe and terminates the
    rank at once, even inside a collective. Only the parent has timeouts. When a timeout expires, the parent kills all
    ranks.

[Note: one gloo device]
    By default, torch creates a separate device for every gloo group. Each device has a thread that wakes up 100 times
    per second until the process ends. A rank has dozens of groups, because it caches groups for later calls. With
    separate devices, the idle ranks of a few pools used a third of two CPU cores. Therefore all groups of a rank share
    one device.

[Note: what ranks are forked from]
    When the parent starts its first rank, multiprocessing starts a fork server, from which all ranks are forked. The
    server imports the modules that ranks need: torch, the modules passed to `preload`, and all shardmuon modules that
    the parent has imported so far. Since Python 3.12.3, multiprocessing passes the parent's `sys.path` to the server.
    For older versions, the pool sets the environment variable PYTHONPATH.

    Ranks exclude the imported objects from garbage collection. Otherwise, each collection would visit half a million
    objects from torch alone, and some libraries run a collection in every call.
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

_PRELOADED = [  # modules that the fork server imports if they are installed
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "numpy",
    "numpy.ma",
    "pytest",
    "hypothesis",
]
# After one rank fails, the pool waits this many seconds for other ranks to fail too, so that the error names all failed
# ranks.
_GRACE = 5.0
# If any rank has more open files than this number, the pool restarts its ranks. torch does not close the files of a
# process group or stop the group's 2 threads until the process ends.
_MAX_OPEN_FILES = 400


@dataclass(frozen=True)
class RankException:
    """A failure on one rank: an exception, a hang or the death of the process. An exception is stored as strings,
    because some exceptions cannot be pickled.

    Attributes:
        rank: The rank that failed.
        type_name: Name of the exception's class; "TimeoutError" for a hang, "ChildProcessError" for a dead rank.
        message: Message of the exception, or a description of the hang or death.
        traceback: Traceback of the exception. For a hang, the rank's stack when the timeout expired. For a dead rank,
            an empty string.
        returned: True if the rank raised an exception. False if the rank hung or died.
    """

    rank: int
    type_name: str
    message: str
    traceback: str
    returned: bool = True

    def __str__(self) -> str:
        """Format the failure as a line with the rank, type and message, followed by the traceback."""
        return f"--- rank {self.rank}: {self.type_name}: {self.message}\n{self.traceback}".rstrip()


class RankError(RuntimeError):
    """Error raised when a call fails on at least one rank.

    Attributes:
        failures: One RankException for each failed rank, in rank order.
    """

    def __init__(self, what: str, world_size: int, failures: tuple[RankException, ...]) -> None:
        self.failures = failures
        lines = [f"{len(failures)} of {world_size} ranks failed in {what}", *map(str, failures)]
        super().__init__("\n".join(lines))


class RankPool(contextlib.AbstractContextManager["RankPool"]):
    """A pool of `world_size` processes in one process group, which run functions until the pool is closed.

    The ranks start at the first call. If a failure, a timeout or `close()` ends the ranks, the next call starts new
    ranks. To speed up later calls, a function can leave state on a rank, such as process groups and globals. But
    functions must not rely on this state, because the pool can restart its ranks between any two calls, for example if
    ranks have too many open files.

    Every call starts with `torch.manual_seed(0)` and the parent's current warning filters. So random numbers do not
    depend on earlier calls, and Python's option `-W error` takes effect on the ranks. Ranks have the environment
    variables that the parent had when its first pool started. A script that uses a pool needs an
    `if __name__ == "__main__":` guard, because the pool starts processes with a fork server. Use a pool from a single
    thread only.

    Args:
        world_size: Number of ranks, at least 1.
        backend: Backend of the default process group. With nccl, rank r uses CUDA device r.
        timeout: Time limit for each call, in seconds.

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
        weakref.finalize(self, _kill, self._ranks)  # kill the ranks at exit, or when the pool is deleted

    def run(self, fn: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> list[_T]:
        """Call `fn(*args, **kwargs)` on every rank and return the results in rank order.

        Args:
            fn: A function defined at the top level of an importable module. It can call `torch.distributed.get_rank()`
                to find its rank.
            args: Positional arguments for `fn`. They must be picklable. Tensors in arguments and results are copied.
            kwargs: Keyword arguments for `fn`. They must be picklable.

        Raises:
            RankError: On at least one rank, `fn` raised an exception or hung, or the rank died. The pool kills all
                ranks, because the other ranks may be stuck in a collective. The next call starts new ranks.
            TypeError: `fn` or an argument cannot be pickled.
        """
        return cast("list[_T]", self._call(_GRACE, False, fn, args, kwargs))

    def run_catching(self, fn: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> list[_T | RankException]:
        """Call `fn(*args, **kwargs)` on every rank and return the results in rank order. If `fn` raises an exception on
        a rank, the result of this rank is a RankException, and all ranks stay alive.

        Tests can use this method to check that every rank raises an exception and that no rank hangs. After an
        exception on one rank, the method waits for the other ranks until the pool's timeout expires. Later calls can
        use the process group, unless exceptions have left a collective unfinished on some ranks.

        Raises:
            RankError: A rank hung or died. The pool kills all ranks, and the next call starts new ranks.
            TypeError: `fn` or an argument cannot be pickled.
        """
        return cast("list[_T | RankException]", self._call(self.timeout, True, fn, args, kwargs))

    @staticmethod
    def preload(module: str) -> None:
        """Add a module to the modules that are imported before ranks are forked. Call this method before the first pool
        of this process starts, because later calls have no effect. A module that raises ImportError is skipped."""
        _PRELOADED.append(module)

    @staticmethod
    @lru_cache(maxsize=3)  # cache only a few pools, because each rank uses up to 300 MB of memory
    def cached(world_size: int) -> RankPool:
        """Return a gloo pool with `world_size` ranks, which is shared within this process. The pools of the 3 most
        recently used sizes are cached. The ranks of any other pool end as soon as no references to the pool remain."""
        return RankPool(world_size, timeout=120.0)  # a long time limit, because ranks are slow on busy cores

    def close(self) -> None:
        """Kill all ranks. If `run` or `run_catching` is called later, new ranks start."""
        _kill(self._ranks)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, grace: float, catching: bool, fn: Callable[..., Any], args: Any, kwargs: Any) -> list[object]:
        name = f"{getattr(fn, '__module__', 'builtins')}.{getattr(fn, '__qualname__', repr(fn))}"
        try:
            call = pickle.dumps((fn, args, kwargs, list(warnings.filters)))
        except Exception as error:  # pickling runs methods of the arguments, which can raise any exception
            raise TypeError(
                f"{name}: cannot be sent to the ranks ({error}). Pass a function defined at the top of an"
                " importable module, and picklable arguments"
            ) from error
        try:
            if not self._ranks:
                self._start()
                started = f"the start of {self.world_size} {self.backend} ranks"
                # a long time limit, because the fork server imports torch before it forks the ranks
                self._receive(started, 180.0, _GRACE, catching=False)
            message = pickle.dumps((list(sys.path), call))
            for _, pipe in self._ranks:
                # if the pipe is broken, the rank is dead, which `_receive` reports
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    pipe.send_bytes(message)
            replies, num_open_files = self._receive(name, self.timeout, grace, catching)
        # Close the pool even after Ctrl-C. Otherwise, the next call would receive late replies to this call.
        except BaseException:
            self.close()
            raise
        if num_open_files > _MAX_OPEN_FILES:
            self.close()
        return replies

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*_PRELOADED, *(n for n in sys.modules if n.split(".")[0] == "shardmuon")])
        # The parent runs the store through which ranks find each other. With port 0, the system picks a free port, so
        # that no other process can take the port first. Process groups start 2 to 4 times faster than with a FileStore.
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
        """Receive one reply from each rank.

        Args:
            what: Description of the call, for error messages.
            timeout: Time limit for all replies, in seconds.
            grace: Time limit for the remaining replies after the first failure, in seconds.
            catching: True to return the exceptions of ranks as replies. False to raise RankError for them.

        Returns:
            The replies in rank order, and the largest number of open files on any rank.

        Raises:
            RankError: A rank hung or died, or a rank raised an exception and `catching` is False.
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


def _where(pipe: Connection) -> str:
    """Return the current stack of a rank's main thread, or the reason why the rank did not send it."""
    with contextlib.suppress(OSError, EOFError):
        pipe.send_bytes(b"")
        if pipe.poll(1.0):
            answer = pipe.recv_bytes()
            return answer.decode() if answer.startswith(b"Stack") else "(it returns just now)\n"
    return "(the process does not answer)\n"


def _kill(ranks: list[_Rank]) -> None:
    """Kill all ranks of a pool, and close the pipes to these ranks."""
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
    # A terminal sends Ctrl-C to all processes, but only the parent should handle it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    calls: SimpleQueue[bytes] = SimpleQueue()
    sending = threading.Lock()
    threading.Thread(target=_listen, args=(pipe, calls, sending, threading.get_ident()), daemon=True).start()
    reply = _reply(rank, _join_group, rank, world_size, backend, port)
    while True:
        with sending:
            pipe.send_bytes(reply)
        reply = _reply(rank, _run_call, calls.get())


def _listen(pipe: Connection, calls: SimpleQueue[bytes], sending: threading.Lock, main_thread: int) -> None:
    # This function runs in a separate thread of a rank (see [Note: what the parent waits for]).
    try:
        while True:
            call = pipe.recv_bytes()
            if call:
                calls.put(call)
                continue
            stack = "".join(traceback.format_stack(sys._current_frames()[main_thread]))
            with sending:
                pipe.send_bytes(f"Stack (most recent call last):\n{stack}".encode())
    finally:  # this block runs when the parent has ended or has closed the pipe
        os._exit(0)  # don't let the interpreter's shutdown wait for gloo's threads


def _join_group(rank: int, world_size: int, backend: str, port: int) -> None:
    torch.set_num_threads(1)
    if sys.platform == "linux":
        # let gloo use the loopback interface, because by default it looks up the host name, which can fail
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if "nccl" in backend:
        torch.cuda.set_device(rank)
    if "gloo" in backend:
        _share_gloo_device()
    store = dist.TCPStore("127.0.0.1", port, None, False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)


def _share_gloo_device() -> None:
    # Make all gloo groups of this rank share one device, even groups that request a device (see [Note: one gloo
    # device]).
    gloo: Any = dist.ProcessGroupGloo
    make, device = gloo.__init__, gloo.create_default_device()

    def make_with_device(self: dist.ProcessGroupGloo, store: dist.Store, rank: int, size: int, timeout: Any) -> None:
        # A caller that has chosen a device passes gloo options in place of the timeout.
        if isinstance(timeout, timedelta):
            options = gloo._Options()
            options._devices, options._timeout, timeout = [device], timeout, options
        make(self, store, rank, size, timeout)

    gloo.__init__, gloo.create_default_device = make_with_device, lambda **_: device


def _run_call(message: bytes) -> object:
    sys.path[:], call = pickle.loads(message)  # set `sys.path` first, because unpickling `call` imports modules
    fn, args, kwargs, filters = pickle.loads(call)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.resetwarnings()
        cast("list[Any]", warnings.filters).extend(filters)
        return fn(*args, **kwargs)


def _reply(rank: int, fn: Callable[..., object], *args: Any) -> bytes:
    """Call `fn`, and pickle the reply to the parent: the result or a RankException, and the number of open files of
    this rank. `pickle` copies tensors, whereas torch.multiprocessing would put them in shared memory."""
    try:
        return pickle.dumps((fn(*args), _num_open_files()))
    except BaseException as error:  # also catch SystemExit and pytest's exceptions, which must not end the rank
        failed = RankException(rank, type(error).__name__, str(error), traceback.format_exc())
        return pickle.dumps((failed, _num_open_files()))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _num_open_files() -> int:
    return len(os.listdir("/dev/fd"))
