"""Tests of the pool of ranks: its results and errors are correct, and no failure hangs or leaves a process behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tolerances import assert_bitwise
from torch import Tensor

from shardmuon.testing import RankError, RankException, RankPool
from shardmuon.testing import pool as pool_module

pytestmark = [pytest.mark.ranks, pytest.mark.apart]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(3, timeout=30.0) as pool:
        yield pool


def echo(*args: object, **kwargs: object) -> tuple[int, tuple[object, ...], dict[str, object]]:
    return dist.get_rank(), args, kwargs


def sum_of_ranks() -> Tensor:
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return total


def fail_on(ranks: tuple[int, ...], then: str = "return", how: str = "raise") -> int:
    """Perform the action `how` (such as raising an error) on the given ranks, and the action `then` on all other ranks.
    Return this rank's number."""
    rank = dist.get_rank()
    match how if rank in ranks else then:
        case "raise":
            raise ValueError(f"planted on rank {rank}")
        case "collective":
            dist.barrier()
        case "sleep":
            time.sleep(600)
        case "exit":
            sys.exit(3)
        case "die":
            os._exit(3)
    return rank


def awkward_tensors() -> dict[str, Tensor]:
    """Return tensors that are hard to send between processes. They are equal on all ranks, because each call starts
    from the same seed."""
    whole = torch.randn(5, 7)
    return {
        "float32": whole,
        "view": whole[1:4, ::2],
        "transposed": whole.mT,
        "bfloat16": whole.bfloat16(),
        "special": torch.tensor([float("nan"), float("inf"), -0.0]),
        "empty": torch.empty(0, 4),
        "parameter": torch.nn.Parameter(whole),
    }


def is_running(pid: int) -> bool:
    """Return whether a process is running. A process that ends between the first check (signal 0) and the second
    (/proc) counts as ended. Without /proc, a zombie counts as running."""
    try:
        os.kill(pid, 0)
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except FileNotFoundError:
            os.kill(pid, 0)
            return True
    except ProcessLookupError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


PLANTED = 'raise ValueError(f"planted on rank {rank}")'


def wait_until(claim: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not claim() and time.monotonic() < deadline:
        time.sleep(0.02)
    return claim()


def test_a_call_runs_on_all_ranks_of_one_group_with_copies_of_its_arguments(pool: RankPool) -> None:
    assert pool.run(echo, 1, key="x") == [(rank, (1,), {"key": "x"}) for rank in range(3)]
    assert [t.item() for t in pool.run(sum_of_ranks)] == [3.0, 3.0, 3.0]
    assert pool.run(os.getpid) == pool.run(os.getpid)
    pool.run(torch.Tensor.zero_, x := torch.ones(3))
    assert x.tolist() == [1.0, 1.0, 1.0]
    draws = [*pool.run(torch.randn, 4), *pool.run(torch.randn, 4)]
    assert all(torch.equal(draws[0], draw) for draw in draws)


def test_tensors_come_back_bit_for_bit_and_outlive_the_ranks() -> None:
    with RankPool(2) as pool:
        results, pids = pool.run(awkward_tensors), pool.run(os.getpid)
        assert all(map(is_running, pids))
    assert not any(map(is_running, pids)), "closing leaves a process"
    torch.manual_seed(0)
    assert_bitwise(results, [awkward_tensors()] * 2)


def test_warning_filters_hold_in_the_ranks(pool: RankPool) -> None:
    raised = pool.run_catching(warnings.warn, "careful")
    assert all(isinstance(r, RankException) and r.type_name == "UserWarning" for r in raised)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert pool.run(warnings.warn, "careful") == [None, None, None]


RAISED, HUNG, DIED = ("ValueError", True), ("TimeoutError", False), ("ChildProcessError", False)
# Each case gives a function, its arguments, whether to call `run_catching` instead of `run`, the expected failures by
# rank (error class, and True if the rank raised an exception), and parts of the error message.
FATAL: list[tuple[Callable[..., object], tuple[Any, ...], bool, dict[int, tuple[str, bool]], list[str]]] = [
    (fail_on, ((0, 2),), False, {0: RAISED, 2: RAISED}, ["2 of 3 ranks failed in test_pool.fail_on", PLANTED]),
    (fail_on, ((1,), "collective"), False, {0: HUNG, 1: RAISED, 2: HUNG}, ["after rank 1 failed", "dist.barrier()"]),
    (fail_on, ((1,), "return", "sleep"), False, {1: HUNG}, ["still running after 1 s", "time.sleep(600)"]),
    (fail_on, ((0,), "sleep"), True, {0: RAISED, 1: HUNG, 2: HUNG}, ["still running after 1 s"]),
    (fail_on, ((1,), "return", "die"), True, {1: DIED}, ["the process ended, exit code 3"]),
    (threading.Lock, (), False, dict.fromkeys(range(3), ("TypeError", True)), ["cannot pickle"]),
]


@pytest.mark.parametrize(("fn", "args", "catching", "kinds", "says"), FATAL, ids=[row[-1][0] for row in FATAL])
def test_a_failure_names_its_ranks_shows_where_they_stand_and_is_followed_by_new_ranks(
    fn: Callable[..., object],
    args: tuple[Any, ...],
    catching: bool,
    kinds: dict[int, tuple[str, bool]],
    says: list[str],
    pool: RankPool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = pool.run(os.getpid)
    if "after 1 s" in says[0]:
        monkeypatch.setattr(pool, "timeout", 1.0)
    with pytest.raises(RankError) as caught:
        (pool.run_catching if catching else pool.run)(fn, *args)
    assert {f.rank: (f.type_name, f.returned) for f in caught.value.failures} == kinds
    assert all(words in str(caught.value) for words in says) and not pool._ranks
    monkeypatch.undo()
    assert set(before).isdisjoint(pool.run(os.getpid))
    assert not any(map(is_running, before))


@pytest.mark.parametrize(
    ("fn", "args", "results"),
    [
        (fail_on, ((0, 1, 2),), [f"ValueError: planted on rank {rank}" for rank in range(3)]),
        (fail_on, ((1,),), [0, "ValueError: planted on rank 1", 2]),
        (fail_on, ((1,), "return", "exit"), [0, "SystemExit: 3", 2]),
    ],
    ids=["all", "one", "exit"],
)
def test_ranks_may_raise_and_the_pool_stays(
    fn: Callable[..., object], args: tuple[Any, ...], results: list[object], pool: RankPool
) -> None:
    before = pool.run(os.getpid)
    found = pool.run_catching(fn, *args)
    assert [f"{r.type_name}: {r.message}" if isinstance(r, RankException) else r for r in found] == results
    assert pool.run(os.getpid) == before
    assert [t.item() for t in pool.run(sum_of_ranks)] == [3.0, 3.0, 3.0]


def test_what_cannot_be_sent_is_refused_before_any_rank_sees_it(pool: RankPool) -> None:
    before = pool.run(os.getpid)
    with pytest.raises(TypeError, match="Pass a function defined at the top"):
        pool.run(lambda: 1)
    assert pool.run(os.getpid) == before


def test_an_interrupted_call_leaves_no_reply_behind(pool: RankPool) -> None:
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    pool.run(os.getpid)
    previous = signal.signal(signal.SIGUSR1, interrupt)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1))
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            pool.run(fail_on, (2,), how="sleep")
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, previous)
    assert pool.run(dist.get_rank) == [0, 1, 2]


def test_ranks_restart_before_they_run_out_of_files(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    before = pool.run(os.getpid)
    monkeypatch.setattr(pool_module, "_MAX_OPEN_FILES", 2)
    assert pool.run(os.getpid) == before
    assert set(before).isdisjoint(pool.run(os.getpid))


def test_a_forgotten_pool_leaves_no_process() -> None:
    pids = RankPool(2).run(os.getpid)
    assert wait_until(lambda: not any(map(is_running, pids)))


def test_ranks_end_with_a_killed_parent_even_inside_a_collective(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import os\n"
        "from shardmuon.testing import RankPool\n"
        "from test_pool import fail_on\n"
        "if __name__ == '__main__':\n"
        "    pool = RankPool(2, timeout=600.0)\n"
        "    print(*pool.run(os.getpid), flush=True)\n"
        "    pool.run_catching(fail_on, (0,), then='collective')\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        time.sleep(0.5)  # The pause gives rank 0 time to raise an error and rank 1 time to reach the barrier.
        running = [is_running(pid) for pid in pids]
        parent.kill()
    assert running == [True, True] and wait_until(lambda: not any(map(is_running, pids)))


def test_the_three_shared_pools_that_were_used_last_are_kept() -> None:
    pids = {size: RankPool.cached(size).run(os.getpid) for size in (1, 2)}
    for size in (5, 1, 6, 7):  # Requesting a pool is cheap: its ranks start only when it runs a function.
        RankPool.cached(size)
    assert RankPool.cached(1).run(os.getpid) == pids[1]
    # Mocks in earlier tests may have put the pool into reference cycles, which only garbage collection frees.
    gc.collect()
    assert wait_until(lambda: not any(map(is_running, pids[2])))


def _begun() -> tuple[str, bool]:
    package = sys.modules["shardmuon"].__file__
    assert package is not None
    return package, gc.get_freeze_count() > 100_000


def test_ranks_are_forked_with_the_parents_package(pool: RankPool) -> None:
    """Ranks must import shardmuon from the same file as the parent process. Objects created before the fork must be
    frozen (gc.freeze), so that garbage collection on a rank skips them."""
    before = os.environ.get("PYTHONPATH")
    found = pool.run(_begun)
    assert os.environ.get("PYTHONPATH") == before
    assert set(found) == {(sys.modules["shardmuon"].__file__, True)}


def test_a_pool_has_at_least_one_rank() -> None:
    with pytest.raises(ValueError, match="world_size=0"):
        RankPool(0)
