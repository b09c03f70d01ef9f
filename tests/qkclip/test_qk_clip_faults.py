"""Tests of QK-clip on overlapping sets of ranks, and of exceptions on one rank: either all ranks raise an error, or all
ranks continue with the same results."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
import torch.distributed as dist
from injection import KINDS, MARK, STAYS, join, known_places, plant, raising
from jobs import Spec, as_in, unlike
from spectra import normal
from torch import Tensor, nn

from shardmuon._torch import local_if_any
from shardmuon.errors import ExchangeError, Refused
from shardmuon.testing import RankPool
from shardmuon_qkclip.layers import Attention, Rows
from shardmuon_qkclip.scaling import Scaler

pytestmark = pytest.mark.ranks

# Disjoint sets of ranks. The ranks of a set share one weight, and a rank that is in no set has a weight of its own.
Sets = list[tuple[int, ...]]
Family = dict[str, Sets]  # keys: weight names, which end with the layer index

FAMILIES: dict[str, Family] = {
    "rows and columns": {"q0": [(0, 1), (2, 3)], "k0": [(0, 2), (1, 3)], "q1": [(0, 1, 2, 3)], "k1": [(0, 1, 2, 3)]},
    "chain": {"q0": [(0, 1), (2, 3)], "k0": [(1, 2)], "q1": [(2, 3)], "k1": [(0, 1), (2, 3)]},
    "within another": {"q0": [(0, 1)], "k0": [(1, 2)], "q1": [(0, 1, 2), (3,)], "k1": [(0, 1, 2)]},
    "alone": {"q0": [], "k0": [], "q1": [], "k1": []},
}
CONNECTED: dict[str, dict[str, Sets]] = {
    "rows and columns": {"0": [(0, 1, 2, 3)], "1": [(0, 1, 2, 3)]},
    "chain": {"0": [(0, 1, 2, 3)], "1": [(0, 1), (2, 3)]},
    "within another": {"0": [(0, 1, 2), (3,)], "1": [(0, 1, 2), (3,)]},
}
TAU = 0.5


def _own(sets: Sets) -> tuple[int, ...]:
    return next((ranks for ranks in sets if dist.get_rank() in ranks), (dist.get_rank(),))


def _maxima(layers: Iterable[str], rank: int, seed: int) -> dict[str, Tensor]:
    """Return the largest logit of each head over one rank's batches. On ranks 1 and 2, the logit of one head is NaN."""
    found = {name: normal(4, seed=1000 * seed + 10 * rank + int(name)).abs() for name in layers}
    for maxima in found.values() if rank in (1, 2) else ():
        maxima[rank] = math.nan
    return found


class Job(jobs.Job):
    """A job with one query weight and one key weight per layer. Each weight has 4 heads of 3 rows. The constructor
    takes one step, so that momentum exists.

    Args:
        kind: "plain", "fsdp2" or a key of FAMILIES. With "plain" and "fsdp2", the job has a single layer, which all
            ranks store. Otherwise, FAMILIES lists the ranks that store each weight.
    """

    def __init__(self, kind: str) -> None:
        everyone, sharded = tuple(range(dist.get_world_size())), kind == "fsdp2"
        family = FAMILIES.get(kind, {"q0": [everyone], "k0": [everyone]})
        specs = {name: Spec(name, (12, 5), as_in(kind) if sharded else torch.clone) for name in family}
        places = {name: {} if sharded else {"process_group": _own(sets)} for name, sets in family.items()}
        super().__init__([{"params": [spec], **places[name]} for name, spec in specs.items()])
        self.layers = tuple(
            Attention(at, 4, 4, (Rows(f"q{at}", (("q", 12),)), Rows(f"k{at}", (("k", 12),))))
            for at in sorted({name[-1] for name in family})
        )
        self.scaler: Scaler | None = None
        self.step(0)

    def reduce(self, seed: int, logits: Any = None, **changes: Any) -> Scaler:
        """Reduce the maximum logits over ranks, and return the job's `Scaler`. If there is none yet, or if `changes`
        contains constructor arguments, create a new one first."""
        if self.scaler is None or changes:
            self.scaler = Scaler(self.optimizer, **{"layers": self.layers, "tau": TAU, **changes})
        with Refused.made_public():
            self.scaler.reduce(logits or (lambda: _maxima([x.name for x in self.layers], dist.get_rank(), seed)))
        return self.scaler

    def clip(self, seed: int, logits: Any = None, **changes: Any) -> None:
        self.reduce(seed, logits, **changes).apply_()


def _both_clip(job: Job, twin: Job, seed: int, **given: Any) -> None:
    for one in (job, twin):
        one.clip(seed, **given)
    assert unlike(job.held(), twin.held()) == []


# ------------------------------------------------------------------------------------------------------ many sets


def _scaled(name: str) -> list[str]:
    """Clip twice, and return the names of all weights with wrong values. Each layer must be scaled based on the maximum
    logits over all ranks that its weights connect, directly or through other ranks."""
    job = Job(name)
    wanted = {spec.name: p.detach().clone() for p, spec in job.specs.items()}
    for seed in range(2):
        job.clip(seed)
        for at, sets in CONNECTED[name].items():
            most = torch.stack([_maxima(at, rank, seed)[at] for rank in _own(sets)]).amax(0)
            gain = torch.where(most > TAU, torch.full_like(most, TAU) / most, torch.ones_like(most))
            for weight in (f"q{at}", f"k{at}"):
                wanted[weight].mul_(gain.pow(0.5).repeat_interleave(3)[:, None])
    return [spec.name for p, spec in job.specs.items() if not torch.equal(p, wanted[spec.name])]


@pytest.mark.parametrize("name", CONNECTED)
def test_a_layer_is_scaled_by_the_maxima_of_all_ranks_that_its_weights_connect(name: str, world4: RankPool) -> None:
    assert world4.run(_scaled, name) == [[]] * 4


# ----------------------------------------------------------------------------------------------------- differences


DIFFERENT: dict[str, dict[str, Any]] = {
    "tau": {"tau": 7},
    "alpha": {"alpha": 0.25},
    "logits": {"logits": lambda: {"0": torch.ones(3)}},
    "function": {"logits": lambda: 1 / 0},
    "layers": {"layers": [Attention("0", 4, 4, (Rows("q0", (("q", 12),)), Rows("k0", (("k", 12),))))], "logits": dict},
}
DIFFERENT["layers of a group"] = DIFFERENT["layers"]
_SHORT = Attention("0", 4, 4, (Rows("q0", (("q", 8),)), Rows("k0", (("k", 12),))))
DIFFERENT["rows on all ranks"] = {"layers": [_SHORT], "logits": dict}


def _differing(what: str) -> list[str]:
    """Clip twice in the case `what`: with different arguments or a lost `Scaler` (QK-clip's object that scales weights)
    on rank 2, with a replaced weight, or with wrong arguments on all ranks. Return this rank's error messages.
    Afterwards, a call with equal arguments on all ranks must succeed."""
    beyond = {"process_group": dist.group.WORLD} if what == "layers of a group" else {}
    job, twin = (Job("alone" if beyond else "rows and columns") for _ in range(2))
    _both_clip(job, twin, 0, **beyond)
    odd, said = dist.get_rank() == 2 or what == "rows on all ranks", list[str]()
    if odd and what == "no table":
        job.scaler = None
    # Ranks 2 and 3 share the first weight, so both replace it with a weight of a different shape.
    elif what == "replaced" and dist.get_rank() in (2, 3):
        for one in (job, twin):
            one.groups[0]["params"][0] = nn.Parameter(normal(12, 7, seed=5))
        twin.scaler = None
    before = job.held()
    for _ in range(2):
        try:
            job.clip(1, **beyond, **(DIFFERENT.get(what, {}) if odd else {}))
        except ValueError as error:
            said.append(str(error))
            assert unlike(before, job.held()) == []
    if said:
        job.scaler = None
    else:
        twin.clip(1)
        twin.clip(1)
    _both_clip(job, twin, 1, **beyond)
    return said


@pytest.mark.parametrize(
    ("what", "found"),
    [
        ("tau", r"ranks \(0, 2\) scale queries and keys together but differ: .*'tau=0.5 .*tau=7.0.*the same tau and"),
        ("alpha", r"differ: rank 0 has 'tau=0.5 alpha=0.5', rank 2 has 'tau=0.5 alpha=0.25'"),
        ("logits", r"rank 2: logits of '0': found torch.Size\(\[3\]\)"),
        ("function", "rank 2: .*ZeroDivisionError"),
        ("layers", "lists"),
        ("layers of a group", "differ: rank 0 has '2 attention layers', rank 2 has '1 attention layers'"),
        ("rows on all ranks", "0: q0 has 12 rows, and its parts"),
        ("no table", ""),
        ("replaced", ""),
    ],
)
def test_ranks_that_differ_all_raise_and_the_next_call_goes_on(what: str, found: str, world4: RankPool) -> None:
    everyone = world4.run(_differing, what)
    assert all(said == everyone[0] for said in everyone)
    assert [bool(re.search(found, said)) for said in everyone[0]] == [True] * 2 * bool(found), everyone[0]


# ----------------------------------------------------------------------------------------- exceptions in any function


def _in_any_function(store: str, kind: str, first: bool) -> tuple[list[str], int]:
    """Call `reduce` once for each function that runs before the vote on the maximum logits, and raise an exception in
    that function on one rank. If `first` is True, delete the cached layout table before each call. Return descriptions
    of the exceptions that went unnoticed, and the number of exceptions that caused an error on all ranks."""
    join(store)
    job, twin = Job(kind), Job(kind)
    _both_clip(job, twin, 0)

    def call() -> None:
        assert job.scaler is not None
        job.scaler._bound = None if first else job.scaler._bound
        job.reduce(1)

    # With two ranks, exceptions are raised in every function that `reduce` enters. With more ranks, they are raised
    # only in every sixth function, to save time.
    known = known_places(call, "reduce", "_none")[:: 1 if dist.get_world_size() == 2 else 6]
    found = plant(call, known, "reduce", job.held, again=first)
    _both_clip(job, twin, 2)
    return found


@pytest.fixture(scope="module", params=[1, 2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    with RankPool(request.param, timeout=300.0) as pool:
        yield pool


@pytest.mark.parametrize("ranks", [2, 4], indirect=True)
@pytest.mark.parametrize("first", [False, True], ids=["kept", "first"])
def test_whatever_is_raised_on_one_rank_before_the_vote_is_raised_by_all(
    first: bool, ranks: RankPool, tmp_path: Path
) -> None:
    for kind in ("fsdp2", "plain" if ranks.world_size == 2 else "rows and columns"):
        for passed, raised in ranks.run(_in_any_function, str(tmp_path / kind), kind, first):
            assert passed == [], passed
            assert raised * (1 if ranks.world_size == 2 else 5) > (60 if first else 15), raised


def _after_the_vote(store: str, kind: str) -> list[tuple[str, str, bool]]:
    """Raise an exception on one rank in each function that QK-clip runs after the ranks' vote, and return the resulting
    errors. After each error, no rank may take a step until it has loaded a state dict. After loading, all ranks must be
    able to continue."""
    join(store)
    job, twin = Job(kind), Job(kind)
    _both_clip(job, twin, 0)
    held = [local_if_any(p).detach().clone() for p in job.specs]
    state = copy.deepcopy(job.optimizer.state_dict())
    # A single-rank job has no vote, so its exceptions are raised in the functions that `apply_` calls.
    begin = "reduce" if dist.get_world_size() > 1 else "apply_"
    before = known_places(lambda: job.clip(1), begin, "_scale")
    after = [place for place in known_places(lambda: job.clip(1), begin, "<end>") if place not in before]
    said = []
    for at, place in enumerate(after):
        error = KINDS[at % len(KINDS)]
        with (
            raising(place if dist.get_rank() == 1 % dist.get_world_size() else None, error, 1, begin),
            pytest.raises((ExchangeError, *STAYS), match=f"broken off|{MARK}") as caught,
        ):
            job.clip(1)
        assert caught.value.__cause__ is not caught.value
        said.append((place.name, f"{caught.typename}: {caught.value}", isinstance(error, STAYS)))
        with pytest.raises(ExchangeError, match="QK-clip was broken off"):
            job.optimizer.step()
        for p, weight in zip(job.specs, held, strict=True):
            local_if_any(p).data.copy_(weight)
        job.optimizer.load_state_dict(copy.deepcopy(state))
    _both_clip(job, twin, 2)
    return said


@pytest.mark.parametrize("kind", ["fsdp2", "plain"])
def test_whatever_is_raised_after_the_vote_breaks_the_step_of_all(kind: str, ranks: RankPool, tmp_path: Path) -> None:
    """If one rank fails after all ranks have agreed to clip, all ranks must raise an error instead of waiting for the
    failed rank, even if that rank had not begun to scale weights."""
    everyone = ranks.run(_after_the_vote, str(tmp_path / "store"), kind)
    victim = 1 % ranks.world_size
    who = f"rank {victim}: " if ranks.world_size > 1 else ""
    assert {"_gains", "_factors", "_scale", "_views"} <= {name for name, *_ in everyone[victim]}
    for rank, of_rank in enumerate(everyone):
        for name, text, stays in of_rank:
            if stays and rank == victim:
                assert MARK in text and "ExchangeError" not in text, (name, text)
            else:
                assert text.startswith(f"ExchangeError: QK-clip was broken off: {who}"), (name, text)
