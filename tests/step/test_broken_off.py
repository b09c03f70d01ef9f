"""A rank that raises or dies after all have agreed: the others end with words that say what to do, and none waits on.

Each case runs in ranks of its own with a short time-out, since their process groups are of no use afterwards.
"""

from __future__ import annotations

import os
import pickle
import re
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import shardmuon.core
import shardmuon.step.bucket
from shardmuon import Muon
from shardmuon.testing import RankError, RankPool

pytestmark = [pytest.mark.ranks, pytest.mark.apart]

FAMILIES = {"chain": [(0, 1), (1, 2), (2, 3)], "all": [(0, 1, 2, 3)], "nested": [(0, 1, 2, 3), (0, 1), (2, 3)]}
TIMEOUT, VICTIM = 3.0, 1  # seconds


def _optimizer(family: str) -> Muon:
    groups: list[dict[str, Any]] = []
    for ranks in FAMILIES[family]:
        if dist.get_rank() in ranks:
            named = [(f"{kind}{ranks}", torch.nn.Parameter(torch.full((6, 8), 0.5))) for kind in "abcd"]
            groups.append({"params": named, "process_group": ranks})
    groups.append({"params": [("bias", torch.nn.Parameter(torch.ones(5)))], "use_muon": False})
    return Muon(groups, lr=0.1)


def _step(optimizer: Muon, seed: int) -> None:
    torch.manual_seed(seed)
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.randn(*p.shape)
    optimizer.step()


def _fail(how: str, place: str) -> None:
    """Make the next call of a function of the step fail on this rank."""
    holder: Any = shardmuon.step.bucket if place != "step_adamw" else shardmuon.core

    def failing(*args: Any, **kwargs: Any) -> None:
        if how == "die":
            os._exit(3)
        raise {"raise": RuntimeError("it broke"), "interrupt": KeyboardInterrupt("stop")}[how]

    setattr(holder, place, failing)


def _broken_off(family: str, how: str, place: str, store: str) -> None:
    """Two steps, in the second of which something happens on one rank, and a third. Each rank writes what it saw."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, 4), rank=rank, world_size=4, timeout=timedelta(seconds=TIMEOUT)
    )
    optimizer = _optimizer(family)
    _step(optimizer, 0)
    if rank == VICTIM:
        _fail(how, place)
    lines = []
    for seed in (1, 2):
        begun = time.monotonic()
        try:
            _step(optimizer, seed)
            text = "nothing"
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        lines.append((time.monotonic() - begun, text, optimizer.broken))
    Path(f"{store}.{rank}").write_bytes(pickle.dumps(lines))


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(4, timeout=60.0) as pool:
        yield pool


class Seen(NamedTuple):
    """Seconds and what was raised on one rank, in the fatal step and in the next one; why the optimizer is broken."""

    seconds: tuple[float, float]
    raised: tuple[str, str]
    broken: str


def _seen(ranks: RankPool, store: Path, family: str, how: str, place: str) -> list[Seen]:
    """Findings by rank, without one that has died."""
    if how == "die":
        with pytest.raises(RankError, match=f"rank {VICTIM}: ChildProcessError"):
            ranks.run(_broken_off, family, how, place, str(store))
    else:
        ranks.run(_broken_off, family, how, place, str(store))
    ranks.close()  # their process groups are of no use
    found = []
    for rank in range(4):
        path = Path(f"{store}.{rank}")
        if path.exists():
            (fatal, first, _), (after, second, broken) = pickle.loads(path.read_bytes())
            found.append(Seen((fatal, after), (first, second), broken))
    return found


HALF = "Weights and momentum may be half updated. Start the ranks again from the last checkpoint"


@pytest.mark.parametrize(
    ("family", "how", "place"),
    [
        ("chain", "raise", "_orthogonalize"),
        ("nested", "interrupt", "apply_results"),
        ("all", "die", "update_momentum"),
        ("chain", "die", "_orthogonalize"),
    ],
)
def test_a_rank_that_fails_in_a_bucket_ends_the_others(
    ranks: RankPool, tmp_path: Path, family: str, how: str, place: str
) -> None:
    """The others end at once where a process has ended, after the time-out of the group where it lives on. A rank that
    exchanges nothing with it may have all results: it completes the step, and the next vote says whom it misses."""
    seen = _seen(ranks, tmp_path / "store", family, how, place)
    assert len(seen) == (3 if how == "die" else 4)
    for number, one in enumerate(seen, start=4 - len(seen)):
        first, second = one.raised
        assert max(one.seconds) < 3 * TIMEOUT
        if first == "nothing":
            assert family == "chain" and number == 3
            assert second.startswith("ExchangeError: a vote (STEP): rank 2 does not answer: ")
            assert "This step has changed nothing on this rank" in second
            continue
        assert first.startswith(("ExchangeError: bucket ", "KeyboardInterrupt: stop"))
        assert one.broken.endswith(HALF)
        assert one.broken.count(HALF) == 1
        assert second == f"ExchangeError: an earlier step was broken off: {one.broken}"
    if family == "all":
        assert all(one.seconds[0] < TIMEOUT / 2 for one in seen)


@pytest.mark.parametrize("how", ["raise", "die"])
def test_a_rank_that_fails_when_nobody_waits_is_named_at_once_in_the_next_step(
    ranks: RankPool, tmp_path: Path, how: str
) -> None:
    seen = _seen(ranks, tmp_path / "store", "chain", how, "step_adamw")
    others = [one for one in seen if one.raised[0] == "nothing"]
    assert len(others) == 3
    for one in others:
        assert one.seconds[1] < TIMEOUT / 2
        assert re.search(r"a vote \(STEP\): (rank 1|one of ranks 0,1) does not answer", one.raised[1])
        assert "This step has changed nothing on this rank, but the ranks are out of step" in one.raised[1]
    if how == "raise":
        assert seen[VICTIM].raised[0] == "RuntimeError: it broke"
        assert seen[VICTIM].broken == f"RuntimeError: it broke. {HALF}"
