"""Tests of steps in which one rank fails after all ranks have agreed on the step. The other ranks must raise an error
that says what to do.

Each case runs in new processes. The timeout is long, so that a step does not time out on a slow machine. If the other
ranks have to wait for the timeout, it is shortened after the first step.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import pickle
import re
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from jobs import FAMILIES, Job, Spec, as_in, replicas, unlike
from processes import run_to_the_end
from torch import Tensor

import shardmuon.comm.vote
import shardmuon.muon
from shardmuon import ExchangeError, GradScaler, Muon
from shardmuon.comm.groups import _MADE, Lane, Traffic
from shardmuon.comm.vote import Ballot, Flag, Phase
from shardmuon.price.clock import turns
from shardmuon.step import adamw, bucket
from shardmuon.step.stages import WeightSet
from shardmuon.step.update import Side
from shardmuon.testing import RankPool

# Each of four ranks orthogonalizes four of 16 matrices. Each bucket has one matrix for each rank, so there are four
# buckets.
NUM_BUCKETS = 4
PATIENT, SHORT, VICTIM = 40.0, 4.0, 1  # PATIENT and SHORT are timeouts in seconds. VICTIM is the rank that fails.


def _job(layout: str) -> Job:
    vector = {"params": [Spec("bias", (9,))], "use_muon": False}
    if layout == "hyperball":
        groups = [{"params": [Spec(f"w{i}", (10, 8), as_in("fsdp2")) for i in range(4)]}]
        return Job(groups, weight_decay=0.0, variant="hyperball")
    if layout in FAMILIES:
        return Job([*replicas(FAMILIES[layout], frozen=False), vector])
    matrices = [Spec(f"w{i}", (10, 8), as_in(layout)) for i in range(16)]
    return Job([{"params": matrices}, vector], bucket_bytes=1)


# ---------------------------------------------------------------------------------------------------------- the ranks


def _wait_for_all(store: str, but: int | None = None) -> None:
    """Wait until every rank except `but` has written its result file."""
    while not all(Path(f"{store}.{rank}").exists() for rank in range(4) if rank != but):
        time.sleep(0.02)


HOW: dict[str, Callable[[str], object]] = {
    "dies": lambda store: os._exit(3),
    "hangs": lambda store: (_wait_for_all(store, VICTIM), os._exit(3)),
    "is late": lambda store: time.sleep(1),
    "has no memory": mock.Mock(side_effect=torch.OutOfMemoryError("no more")),
    "is interrupted": mock.Mock(side_effect=KeyboardInterrupt("stop")),
}


class Case(NamedTuple):
    """A way in which one rank fails during a step.

    Attributes:
        layout: The layout of the job's parameters on the ranks.
        how: How the rank fails, as a key of `HOW`.
        holder, name, calls: The rank fails after `calls` calls to the function `holder.name`, or instead of the first
            call if `calls` is 0.
        says: A pattern for the errors of the other ranks.
        own: A pattern for the error of the failing rank itself, if its process survives.
    """

    layout: str
    how: str
    holder: Any
    name: str
    calls: int
    says: str
    own: str = ""

    @property
    def timeout(self) -> float:
        """The timeout of the second step, in seconds. It is short only if the failing process stays alive, because
        only then do the other ranks have to wait for the timeout."""
        return SHORT if self.how == "hangs" or self.own.startswith(("E", "K")) else PATIENT


HALF = r"Weights and momentum may be half updated\. Start the ranks again from the last checkpoint"
NOTHING = rf"{ExchangeError.UNCHANGED}\. Start the ranks again from the last checkpoint"
_SMALL = rf"bucket \d of \d \(ranks [\d,]+: (a|b)\d+ .*\), (gather|compute|apply|finish): .*{HALF}"
_VOTE = rf"a vote \(STEP\): rank \d, or one that it waits for, does not answer: .*{NOTHING}"
_NO_MEMORY = "ExchangeError: bucket .* compute: OutOfMemoryError: no more"


def _in_turns(first: int, last: int, relays: bool = False) -> str:
    """Return a regular expression for the error message of a step interrupted in one of the operations `first` to
    `last`, indices into the operations that `turns` yields. If `relays` is True, each bucket has a relay, which passes
    results on to the other replica."""
    whose = rf"of {NUM_BUCKETS} \(ranks 0,1,2,3: (w\d+ \d+x8, ){{3}}1 more\)"
    places = [f"{at} {whose}, {turn}" for turn, at in turns([relays] * NUM_BUCKETS)][first : last + 1]
    return rf"bucket ({'|'.join(places)}): .*{HALF}"


# In the cases that use `_in_turns`, the rank fails in its second bucket. The arguments of `_in_turns` are the first and
# the last operation in which another rank may notice this. The last operation waits for an exchange that the failed
# rank never started. In the case "relay", the rank dies after receiving its results but before passing any of them on.
CASES = {
    "vote": Case("fsdp2", "dies", shardmuon.comm.vote, "vote", 0, _VOTE),
    "gather": Case("fsdp2", "dies", Traffic, "start", 2, _in_turns(1, 5)),
    "scatter": Case("fsdp2", "dies", Traffic, "start", 5, _in_turns(2, 9)),
    "apply": Case("fsdp2", "dies", Side, "apply_results", 2, _in_turns(4, 11)),
    "relay": Case("hsdp", "dies", Side, "apply_results", 2, _in_turns(5, 12, relays=True)),
    "hangs": Case("fsdp2", "hangs", Traffic, "start", 2, _in_turns(1, 5)),
    "is late": Case("fsdp2", "is late", bucket, "_results", 1, "nothing", "nothing"),
    "no memory": Case("all", "has no memory", bucket, "_orthogonalize", 0, _SMALL, _NO_MEMORY),
    "interrupted": Case("nested", "is interrupted", Side, "apply_results", 0, _SMALL, "KeyboardInterrupt: stop"),
    "far away": Case("chain", "dies", bucket, "_orthogonalize", 0, f"nothing|{_SMALL}"),
    "far away, lives": Case("chain", "has no memory", bucket, "_orthogonalize", 0, f"nothing|{_SMALL}", _NO_MEMORY),
    "nobody waits": Case("chain", "dies", shardmuon.muon, "step_adamw", 0, "nothing"),
    "nobody waits, lives": Case(
        "chain", "has no memory", shardmuon.muon, "step_adamw", 0, "nothing", "OutOfMemoryError: no more"
    ),
    "norms": Case(
        "hyperball", "dies", WeightSet, "squares", 0,
        rf"norms of weights after the update \(ranks 0,1,2,3: w0, w1, w2, 1 more\): .*{HALF}",
    ),
    "norms, lives": Case(
        "hyperball", "has no memory", WeightSet, "squares", 0,
        rf"norms of weights before the update \(ranks 0,1,2,3: w0, .*\): .*{NOTHING}",
        rf"ExchangeError: norms of weights before .*: OutOfMemoryError: no more\. {NOTHING}",
    ),
}  # fmt: skip


def _arrange(case: Case, store: str) -> None:
    original, calls = getattr(case.holder, case.name), itertools.count(1)

    def call(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs) if case.calls else None
        if next(calls) == max(case.calls, 1):
            HOW[case.how](store)
        return result

    setattr(case.holder, case.name, call)


def _join(store: str, rank: int) -> None:
    limit = timedelta(seconds=PATIENT)
    dist.init_process_group("gloo", store=dist.FileStore(store, 4), rank=rank, world_size=4, timeout=limit)


def _set_timeout(seconds: float) -> None:
    """Set the timeout of every process group and every communication channel of this rank."""
    limit = timedelta(seconds=seconds)
    c10d: Any = dist.distributed_c10d
    for group, ranks in c10d._world.pg_group_ranks.items():
        if dist.get_rank() in ranks:
            c10d._set_pg_timeout(limit, group)
    for lane in _MADE[dist.group.WORLD].lanes.values():
        lane._limit = limit


def _weights(job: Job) -> list[Tensor]:
    return [p.detach().clone() for p in job.specs]


def _restored(job: Job, weights: list[Tensor], state: dict[str, Any]) -> None:
    with torch.no_grad():
        for p, weight in zip(job.specs, weights, strict=True):
            p.copy_(weight)
    job.optimizer.load_state_dict(state)


def _try(optimizer: Muon) -> tuple[float, str]:
    began, text = time.monotonic(), "nothing"
    try:
        optimizer.step()
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
    return time.monotonic() - began, text


def main(rank: int, name: str, store: str) -> None:
    """Run three steps. During the second, the rank VICTIM fails or is late, as the case `name` says.

    If the rank is only late, the job must match an undisturbed job bitwise. In the cases "no memory" and "interrupted",
    the last two steps are repeated from the restored state in a new process group, and must give the same match.
    """
    torch.set_num_threads(1)
    _join(store, rank)
    case, job = CASES[name], _job(CASES[name].layout)
    job.step(0)
    weights, state = _weights(job), copy.deepcopy(job.optimizer.state_dict())
    _set_timeout(case.timeout)
    if name == "norms, lives":
        # After the optimizer state is cleared, the step sums the norms of weights over ranks before the update. Rank
        # VICTIM fails in this sum.
        job.state.clear()
    if rank == VICTIM:
        _arrange(case, store)
    job.set_gradients(1)
    seen = [_try(job.optimizer)]
    job.set_gradients(2)
    seen.append(_try(job.optimizer))
    if job.optimizer.broken:
        seen.append(_try(copy.deepcopy(job.optimizer)))
    Path(f"{store}.{rank}.part").write_bytes(pickle.dumps((seen, job.optimizer.broken)))
    Path(f"{store}.{rank}.part").rename(f"{store}.{rank}")
    if case.own:
        # A surviving process must keep its connections open, so that the other ranks time out instead of seeing the
        # connections close.
        _wait_for_all(store)
    if name == "is late":
        twin = _job(case.layout)
        for seed in range(3):
            twin.step(seed)
        assert unlike(job.held(), twin.held()) == []
    if name in ("no memory", "interrupted"):
        for at, real in REAL.items():
            setattr(*at, real)
        dist.destroy_process_group()
        _join(f"{store} again", rank)
        _restored(job, weights, state)
        twin = _job(case.layout)
        for seed in range(3):
            twin.step(seed)
            job.step(seed) if seed else None
        assert unlike(job.held(), twin.held()) == []
    # Exit at once, because a normal exit would wait for the threads of gloo.
    os._exit(0)


REAL = {at: getattr(*at) for at in ((bucket, "_orthogonalize"), (Side, "apply_results"))}
_SCRIPT = "import sys\nfrom test_broken_off import main\nmain(int(sys.argv[1]), *sys.argv[2:])"


@pytest.mark.ranks
@pytest.mark.apart
@pytest.mark.parametrize("name", CASES)
def test_a_rank_that_ends_a_step_ends_the_others_with_what_to_do(name: str, tmp_path: Path) -> None:
    """Check how soon the other ranks raise an error after one rank has failed.

    - If the process of the failed rank died, the others fail at once. If it died in the middle of an exchange, gloo may
      delay the error on some ranks until the timeout.
    - If the process of the failed rank survives, the others fail after the timeout of the process group.
    - A rank that exchanges nothing with the failed rank completes the step. The vote before its next step reports the
      missing rank.
    """
    case, store = CASES[name], str(tmp_path / "store")
    ended, gone = run_to_the_end(_SCRIPT, 4, tmp_path, name, store), case.how in ("dies", "hangs")
    assert all(err == "" or code for code, _, err in ended), ended
    assert [code for code, *_ in ended] == [3 if rank == VICTIM and gone else 0 for rank in range(4)]
    took: list[float] = []  # `took` lists the time in seconds until each failing rank raised its error.
    for rank in range(4):
        if rank == VICTIM and gone:
            continue
        ((seconds, first), (later, second), *copied), broken = pickle.loads(Path(f"{store}.{rank}").read_bytes())
        pattern = case.own if rank == VICTIM else case.says
        assert re.match(f"nothing|ExchangeError: ({pattern})|{pattern}", first), first
        assert first != "nothing" or "nothing" in pattern, first
        if first == "nothing":
            assert case.how == "is late" or re.match(f"ExchangeError: a vote .*{NOTHING}", second), second
            assert later < PATIENT / 2
            continue
        assert seconds < PATIENT or case.timeout == PATIENT
        took.append(seconds)
        assert second == f"ExchangeError: an earlier step was broken off: {broken}"
        assert broken in (first.removeprefix("ExchangeError: "), f"{first}. {broken.partition('. ')[2]}")
        assert re.search(f"({HALF}|{NOTHING})$", broken) and later < PATIENT / 2
        assert copied[0][1] == second
    if case.how == "dies" and case.layout != "chain":
        assert (max if name == "vote" else min)(took) < PATIENT / 2


# --------------------------------------------------------------------------------------------------------- one process


def _scaled(optimizer: Muon) -> None:
    scaler = GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)


@pytest.mark.parametrize(
    ("loop", "where", "error", "named"),
    [
        (Muon.step, (bucket, "orthogonalize"), torch.OutOfMemoryError("no more"), "OutOfMemoryError: no more. "),
        (_scaled, (bucket, "orthogonalize"), torch.OutOfMemoryError("no more"), "OutOfMemoryError: no more. "),
        (Muon.step, (bucket, "orthogonalize"), KeyboardInterrupt(), "KeyboardInterrupt. "),
        (Muon.step, (adamw, "functional_adamw"), ValueError("late"), "ValueError: late. "),
    ],
)
def test_a_loop_that_goes_on_after_half_a_step_is_told_what_happened_and_what_to_do(
    loop: Callable[[Muon], None], where: tuple[Any, str], error: BaseException, named: str
) -> None:
    """A retry after an interrupted step must raise an error, because the retry would update the momentum a second
    time."""
    job, twin = (Job([{"params": [Spec("a", (6, 8))]}, {"params": [Spec("v", (4,))], "use_muon": False}]) for _ in "12")
    for one in (job, twin):
        one.step(0)
        one.set_gradients(1)
    weights, state = _weights(job), copy.deepcopy(job.optimizer.state_dict())
    for accepted in (False, True):
        with mock.patch.object(*where, side_effect=error), contextlib.suppress(type(error)):
            loop(job.optimizer)
        held = job.held()
        assert not torch.equal(job.state[job.first]["momentum_buffer"], state["state"][0]["momentum_buffer"])
        for _ in range(2):
            with pytest.raises(ExchangeError) as refused:
                loop(job.optimizer)
            assert f"broken off: {named}Weights and momentum may be half updated" in str(refused.value)
            assert "accept them as they are: optimizer.broken = None" in str(refused.value)
        assert unlike(held, job.held()) == []
        if accepted:
            job.optimizer.broken = None
            job.step()
        else:
            _restored(job, weights, copy.deepcopy(state))
            for one in (job, twin):
                one.step()
            assert unlike(job.held(), twin.held()) == []


# ----------------------------------------------------------------------------------------- a step in another process


def _first_vote_fails(optimizer: Muon) -> None:
    """Take a step that rank 1 leaves after one vote. On rank 0, the step must fail and be recorded as interrupted."""
    group, ranks = optimizer.param_groups[0], (0, 1)
    group["process_group"] = dist.group.WORLD
    group["params"][0].grad = torch.ones(4, 3)
    if dist.get_rank() == 1:
        shardmuon.comm.vote.vote(Ballot(Phase.DISCOVER, Flag.STALE), ranks)
        Lane.close_over(ranks)
        return
    with pytest.raises(ExchangeError, match="does not answer"):
        optimizer.step()
    assert optimizer.broken is not None and optimizer.broken.endswith(ExchangeError.REMEDY)


def test_an_optimizer_that_stepped_alone_notes_that_its_first_vote_with_others_was_broken_off(world2: RankPool) -> None:
    """An optimizer that has stepped in a single process is pickled with (0,) as the ranks of its last vote. In other
    processes, these ranks mean nothing. The optimizer must still record that its first vote there was interrupted."""
    optimizer = Muon([torch.nn.Parameter(torch.ones(4, 3))], lr=0.1)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(4, 3)
    optimizer.step()
    assert optimizer.component == (0,)
    world2.run(_first_vote_fails, optimizer)
