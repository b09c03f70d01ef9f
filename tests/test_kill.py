"""A rank that dies or hangs in the middle of a step ends the others with an error; the checkpoint brings all back.

Each case runs in ranks of its own (a `RankPool` that no other test uses) whose process group has a short time-out.
"""

from __future__ import annotations

import copy
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardmuon.layout.bind
import shardmuon.step.bucket
from shardmuon import Exchange, ExchangeError, Muon
from shardmuon.plan.pipeline import turns
from shardmuon.step import bucket
from shardmuon.step.stages import WeightSet
from shardmuon.testing import RankError, RankPool
from shardmuon.testing.layouts import LAYOUTS

pytestmark = [pytest.mark.ranks, pytest.mark.apart]

SHAPES = {f"w{i}": (10, 8) for i in range(16)} | {"norm": (9,)}
NUM_BUCKETS = 4  # sixteen matrices, four owners, one matrix of each owner in a bucket
STEPS, FATAL_STEP, VICTIM = 5, 3, 2
GROUP_TIMEOUT = 5.0  # seconds
DEADLINE = 30.0  # seconds for one call: more than all steps and a time-out, far less than torch's own 30 minutes

# What every rank does in one step, in this order, and the start of the next step.
ORDER = {
    layout: [(None, "vote"), *((at, turn) for turn, at in turns([relays] * NUM_BUCKETS)), (None, "vote")]
    for layout, relays in (("fsdp2", False), ("hsdp", True))
}


def _normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _join(store: str, timeout: float = GROUP_TIMEOUT) -> None:
    """A default group of our own, with a short time-out, instead of the one there is."""
    rank, limit = dist.get_rank(), timedelta(seconds=timeout)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(store, 4), rank=rank, world_size=4, timeout=limit)


class Training:
    """FSDP2 or HSDP on four ranks, a checkpoint of each rank's own tensors after every step."""

    def __init__(self, folder: str, layout: str) -> None:
        self.layout = layout
        full = {name: _normal(*shape, seed=i) for i, (name, shape) in enumerate(SHAPES.items())}
        self.params = {n: nn.Parameter(t) for n, t in self._cut(full).items()}
        matrices = [(n, p) for n, p in self.params.items() if p.ndim == 2]
        vectors = [(n, p) for n, p in self.params.items() if p.ndim == 1]
        groups = [{"params": matrices, "lr": 0.1}, {"params": vectors, "lr": 0.01, "use_muon": False}]
        self.optimizer = Muon(groups, lr=1e-3, exchange=Exchange(bucket_bytes=1))
        self.folder = Path(folder)

    def _cut(self, full: dict[str, Tensor]) -> dict[str, Tensor]:
        return LAYOUTS[self.layout].build(full, LAYOUTS[self.layout].mesh(4))

    def step(self, number: int) -> None:
        full = {name: _normal(*shape, seed=100 * number + i) for i, (name, shape) in enumerate(SHAPES.items())}
        for name, grad in self._cut(full).items():
            self.params[name].grad = grad
        self.optimizer.step()

    def save(self, number: int) -> None:
        state = {"params": {n: p.detach() for n, p in self.params.items()}, "optimizer": self.optimizer.state_dict()}
        torch.save(state, self.folder / f"step{number}.rank{dist.get_rank()}.pt")

    def load(self, number: int) -> None:
        state = torch.load(self.folder / f"step{number}.rank{dist.get_rank()}.pt", weights_only=False)
        with torch.no_grad():
            for n, p in self.params.items():
                p.copy_(state["params"][n])
        self.optimizer.load_state_dict(state["optimizer"])

    def local(self) -> dict[str, Tensor]:
        out = {n: p.detach().to_local() for n, p in self.params.items()}
        for n, p in self.params.items():
            for key, value in self.optimizer.state[p].items():
                out[f"{n}.{key}"] = value.to_local() if hasattr(value, "to_local") else value
        return out


# ------------------------------------------------------------------------------------------------- how a rank ends


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hang() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _after(owner: Any, name: str, count: int, end: Callable[[], None]) -> None:
    """End this rank when it has called `owner.name` for the `count`-th time from now."""
    original, calls = getattr(owner, name), [0]

    def call(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        calls[0] += 1
        if calls[0] == count:
            end()
        return result

    setattr(owner, name, call)


def _before_vote(end: Callable[[], None]) -> None:
    def call(*args: Any) -> None:
        end()

    shardmuon.layout.bind.vote = call  # type: ignore[assignment]


# Where the rank ends, in the second bucket -> on which layout, how to arrange that, and from where to where in ORDER a
# survivor may notice: from the oldest exchange that the dead rank may have left half sent, or the first that a survivor
# starts after its death, to the wait for the first that it never started. "relay": it has its own results and has begun
# to pass none on to the other replica.
PHASES: dict[str, tuple[str, Callable[[Callable[[], None]], None], int, int]] = {
    "vote": ("fsdp2", _before_vote, 0, 0),
    "pack": ("fsdp2", lambda end: _after(bucket, "_momenta", 2, end), 2, 5),
    "gather": ("fsdp2", lambda end: _after(shardmuon.step.bucket, "start", 2, end), 2, 6),
    "orthogonalize": ("fsdp2", lambda end: _after(bucket, "_results", 2, end), 3, 9),
    "scatter": ("fsdp2", lambda end: _after(shardmuon.step.bucket, "start", 5, end), 3, 10),
    "apply": ("fsdp2", lambda end: _after(bucket, "apply_results", 2, end), 5, 12),
    "relay": ("hsdp", lambda end: _after(bucket, "apply_results", 2, end), 6, 13),
}


def _check_broken(optimizer: Muon, error: ExchangeError) -> None:
    """The original error is kept, and neither the optimizer nor a copy of it waits for peers again."""
    assert isinstance(error.__cause__, RuntimeError)
    assert str(error.__cause__).rstrip(". \n") in str(error)
    began = time.monotonic()
    for again in (optimizer, copy.deepcopy(optimizer)):
        with pytest.raises(ExchangeError, match="an earlier step was broken off: "):
            again.step()
    assert time.monotonic() - began < GROUP_TIMEOUT


def _train_until_killed(store: str, folder: str, phase: str, end: Callable[[], None]) -> None:
    _join(store)
    layout, arrange, _, _ = PHASES[phase]
    training = Training(folder, layout)
    for number in range(STEPS):
        if number == FATAL_STEP and dist.get_rank() == VICTIM:
            arrange(end)
        try:
            training.step(number)
        except ExchangeError as error:
            _check_broken(training.optimizer, error)
            raise
        training.save(number + 1)
    raise AssertionError("this rank did not notice")


def _resume(store: str, folder: str, start: int, layout: str) -> dict[str, Tensor]:
    _join(store)
    training = Training(folder, layout)
    if start:
        training.load(start)
    for number in range(start, STEPS):
        training.step(number)
    assert len(training.optimizer.plan.buckets) == NUM_BUCKETS
    return training.local()


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(4, timeout=DEADLINE) as pool:
        yield pool


@pytest.fixture(scope="module")
def uninterrupted(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Tensor]]]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    return {layout: ranks.run(_resume, str(folder / layout), str(folder), 0, layout) for layout in ORDER}


def _place(message: str) -> tuple[int | None, str]:
    """(bucket, phase) that an ExchangeError names."""
    if re.match(r"a vote \(STEP\): (rank 2|one of ranks [0-3,]+) does not answer: ", message):
        assert "This step has changed nothing on this rank" in message
        return None, "vote"
    found = re.match(rf"bucket (\d) of {NUM_BUCKETS} \(ranks 0,1,2,3: (w\d+ \d+x8, ){{3}}1 more\), (\w+): ", message)
    assert found, message
    assert "Weights and momentum may be half updated" in message
    return int(found[1]), found[3]


def _fail(ranks: RankPool, folder: Path, phase: str, end: Callable[[], None]) -> dict[int, Any]:
    with pytest.raises(RankError) as failed:
        ranks.run_catching(_train_until_killed, str(folder / "store"), str(folder), phase, end)
    return {failure.rank: failure for failure in failed.value.failures}


def _check_survivors(failures: dict[int, Any], phase: str) -> None:
    assert sorted(failures) == [0, 1, 2, 3], "every rank ends with an error"
    layout, _, first, last = PHASES[phase]
    for rank in {0, 1, 3}:
        assert failures[rank].type_name == "ExchangeError", failures[rank]
        message = failures[rank].message
        assert _place(message) in ORDER[layout][first : last + 1], message
        assert message.endswith("Start the ranks again from the last checkpoint")


@pytest.mark.parametrize("phase", PHASES)
def test_a_killed_rank_ends_the_others_and_the_checkpoint_gives_the_same_weights(
    phase: str, ranks: RankPool, uninterrupted: dict[str, list[dict[str, Tensor]]], tmp_path: Path
) -> None:
    failures = _fail(ranks, tmp_path, phase, _die)
    assert "exit code -9" in failures[VICTIM].message
    _check_survivors(failures, phase)
    layout = PHASES[phase][0]
    resumed = ranks.run(_resume, str(tmp_path / "second store"), str(tmp_path), FATAL_STEP, layout)
    for mine, theirs in zip(resumed, uninterrupted[layout], strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            assert torch.equal(mine[name], value), name


def test_a_rank_that_hangs_ends_the_others_after_the_time_out(
    ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "timeout", 20.0)  # the hung rank itself never answers
    failures = _fail(ranks, tmp_path, "gather", _hang)
    assert failures[VICTIM].type_name == "TimeoutError"
    _check_survivors(failures, "gather")
    # The first to time out closes its connections; who came to the exchange later may hear of that before its own time
    # is up.
    timed_out = {rank for rank in (0, 1, 3) if "Timed out waiting 5000ms" in failures[rank].message}
    assert timed_out
    for rank in {0, 1, 3} - timed_out:
        assert re.search("timeout caused pair closure|closed by peer", failures[rank].message), failures[rank]


def _slow(store: str, folder: str, delays: list[tuple[int, int, str]]) -> dict[str, Tensor]:
    _join(store, timeout=25.0)
    training = Training(folder, "fsdp2")
    for number in range(STEPS):
        for step, rank, phase in delays:
            if (step, rank) == (number, dist.get_rank()):
                PHASES[phase][1](lambda: time.sleep(3.0))
        training.step(number)
    return training.local()


def test_a_rank_that_is_seconds_late_changes_nothing(
    ranks: RankPool, uninterrupted: dict[str, list[dict[str, Tensor]]], tmp_path: Path
) -> None:
    draw = random.Random(0)
    late = sorted(set(PHASES) - {"vote", "relay"})
    delays = [(1, rank, draw.choice(late)) for rank in draw.sample(range(4), 2)]
    found = ranks.run(_slow, str(tmp_path / "store"), str(tmp_path), delays)
    for mine, theirs in zip(found, uninterrupted["fsdp2"], strict=True):
        assert all(torch.equal(mine[name], value) for name, value in theirs.items())


ERRORS: tuple[type[BaseException], ...] = (torch.OutOfMemoryError, KeyboardInterrupt)


def _broken_off(store: str) -> list[list[str]]:
    """One rank alone fails between two exchanges and lives; all load their state in a new process group."""
    _join(store)
    rank, texts = dist.get_rank(), []
    whole, dense = (nn.Parameter(_normal(8, 6, seed=1)) for _ in range(2))
    optimizer = Muon([("whole", whole)], lr=0.1, process_group=dist.group.WORLD)
    reference = Muon([dense], lr=0.1)

    def step(seed: int) -> None:
        whole.grad = dense.grad = _normal(8, 6, seed=seed)
        optimizer.step()

    for number, error in enumerate(ERRORS):
        step(number)
        reference.step()
        saved, weights = copy.deepcopy(optimizer.state_dict()), whole.detach().clone()
        with pytest.MonkeyPatch.context() as patched:
            if rank == 1:
                patched.setattr(bucket, "_orthogonalize", _fail_with(error))
            with pytest.raises((ExchangeError, error)) as broken:
                step(10)
        with pytest.raises(ExchangeError) as refused:
            step(11)
        texts.append([f"{broken.typename}: {broken.value}", str(refused.value)])
        _join(f"{store} after {error.__name__}")
        optimizer.load_state_dict(saved)
        with torch.no_grad():
            whole.copy_(weights)
        step(20 + number)
        reference.step()
        assert torch.equal(whole, dense)
    return texts


def _fail_with(error: type[BaseException]) -> Callable[..., None]:
    def fail(*args: Any) -> None:
        raise error("no more")

    return fail


def test_a_step_broken_off_on_one_rank_is_named_and_state_may_be_loaded_into_a_new_group(
    ranks: RankPool, tmp_path: Path
) -> None:
    everyone = ranks.run(_broken_off, str(tmp_path / "store"))
    bucket = "bucket 0 of 1 (ranks 0,1,2,3: whole 8x6)"
    own = [
        f"ExchangeError: {bucket}, compute: OutOfMemoryError: no more. Weights and",
        "KeyboardInterrupt: no more",
    ]
    for rank, texts in enumerate(everyone):
        for (broken, refused), mine in zip(texts, own, strict=True):
            others = re.escape(f"ExchangeError: {bucket}, ") + "(compute|apply|finish): RuntimeError: "
            assert re.match(re.escape(mine) if rank == 1 else others, broken), broken
            what = broken.removeprefix("ExchangeError: ")
            assert refused.startswith(f"an earlier step was broken off: {what}")


def _norm_control(params: int = 4) -> tuple[Muon, Callable[[int], None]]:
    """Hyperball on matrices that FSDP2 shards."""
    full = {f"w{i}": _normal(10, 8, seed=i) for i in range(params)}
    sharded = {n: nn.Parameter(t) for n, t in LAYOUTS["fsdp2"].build(full, (4,)).items()}
    optimizer = Muon(list(sharded.items()), lr=0.1, weight_decay=0.0, variant="hyperball")

    def step(number: int) -> None:
        grads = {n: _normal(10, 8, seed=100 * number + i) for i, n in enumerate(full)}
        for name, grad in LAYOUTS["fsdp2"].build(grads, (4,)).items():
            sharded[name].grad = grad
        optimizer.step()

    return optimizer, step


def _killed_among_norms(store: str) -> None:
    _join(store)
    optimizer, step = _norm_control()
    step(0)
    if dist.get_rank() == VICTIM:
        WeightSet.squares = lambda *args: _die()  # type: ignore[assignment,return-value,method-assign]
    try:
        step(1)
    except ExchangeError as error:
        _check_broken(optimizer, error)
        raise
    raise AssertionError("this rank did not notice")


def test_a_rank_killed_while_norms_are_added_up_ends_the_others(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankError) as failed:
        ranks.run_catching(_killed_among_norms, str(tmp_path / "store"))
    failures = {failure.rank: failure for failure in failed.value.failures}
    assert sorted(failures) == [0, 1, 2, 3]
    assert "exit code -9" in failures[VICTIM].message
    for rank in {0, 1, 3}:
        assert failures[rank].type_name == "ExchangeError", failures[rank]
        message = failures[rank].message
        assert message.startswith("norms of weights after the update (ranks 0,1,2,3: w0, w1, w2, 1 more): ")
        assert message.endswith(
            "Weights and momentum may be half updated. Start the ranks again from the last checkpoint"
        )


def _norms_broken_off(store: str) -> str:
    """One rank alone fails at the norms before the first update, and lives."""
    _join(store, timeout=2.0)
    _, step = _norm_control(1)
    with pytest.MonkeyPatch.context() as patched:
        if dist.get_rank() == 1:
            patched.setattr(WeightSet, "squares", _fail_with(torch.OutOfMemoryError))
        with pytest.raises(ExchangeError) as broken:
            step(0)
    with pytest.raises(ExchangeError, match="an earlier step was broken off"):
        step(1)
    _join(f"{store} over")
    return str(broken.value)


def test_an_error_on_one_rank_at_norms_is_named_on_all(ranks: RankPool, tmp_path: Path) -> None:
    where = "norms of weights before the update (ranks 0,1,2,3: w0): "
    for rank, text in enumerate(ranks.run(_norms_broken_off, str(tmp_path / "store"))):
        assert text.startswith(where + ("OutOfMemoryError: no more" if rank == 1 else "RuntimeError: ")), text
        assert "This step has changed nothing on this rank, but the ranks are out of step" in text


def _destroyed(store: str) -> str:
    _join(store)
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    p = nn.Parameter(_normal(8, 6, seed=1))
    optimizer = Muon([p], lr=0.1, process_group=halves[dist.get_rank() // 2])
    p.grad = _normal(8, 6, seed=2)
    optimizer.step()
    _join(store + " again")
    with pytest.raises(ValueError, match=r"has been destroyed") as dead:
        optimizer.prepare()
    return str(dead.value)


def test_a_process_group_that_has_been_destroyed_is_named(ranks: RankPool, tmp_path: Path) -> None:
    for rank, text in enumerate(ranks.run(_destroyed, str(tmp_path / "store"))):
        assert text == (
            f"ranks {'0,1' if rank < 2 else '2,3'}: RuntimeError: the process group that parameters or the optimizer "
            "were made with has been destroyed. Make a new group, and parameters and optimizer with it"
        )
