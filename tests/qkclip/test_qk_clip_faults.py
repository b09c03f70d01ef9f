"""QK-clip on sets of ranks that overlap, and whatever is raised on one rank: all ranks raise it, or all go on alike."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from injection import KINDS, MARK, STAYS, check_all_raise, join, known_places, raising
from torch import Tensor, nn

from shardmuon import Muon
from shardmuon._torch import local_if_any
from shardmuon.errors import ExchangeError, made_public
from shardmuon.testing import RankPool
from shardmuon.testing.layouts import LAYOUTS, parameters
from shardmuon_qkclip.layers import Attention, Rows
from shardmuon_qkclip.scaling import Scaler

pytestmark = pytest.mark.ranks

Sets = list[tuple[int, ...]]  # of one weight; a rank that is in none has it alone
Family = dict[str, Sets]  # weight -> its sets. Layers are named by the last character of their weights

FAMILIES: dict[str, Family] = {
    "rows and columns": {"q0": [(0, 1), (2, 3)], "k0": [(0, 2), (1, 3)], "q1": [(0, 1, 2, 3)], "k1": [(0, 1, 2, 3)]},
    "chain": {"q0": [(0, 1), (2, 3)], "k0": [(1, 2)], "q1": [(2, 3)], "k1": [(0, 1), (2, 3)]},
    "within another": {"q0": [(0, 1)], "k0": [(1, 2)], "q1": [(0, 1, 2), (3,)], "k1": [(0, 1, 2)]},
}
TAU = 0.5


def _normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Job:
    """Weights of 4 heads of 3 rows, and layers that have one for queries and one for keys."""

    def __init__(self, family: Family) -> None:
        self.rank, self.family = dist.get_rank(), family
        self.scaler: Scaler | None = None
        self.params = {n: nn.Parameter(_normal(12, 5, seed=self._seed(n))) for n in family}
        groups = [
            {"params": [(name, p)], "process_group": self.set_of(name, self.rank)} for name, p in self.params.items()
        ]
        self.optimizer = Muon(groups, lr=0.02)
        self.layers = tuple(
            Attention(at, 4, 4, (Rows(f"q{at}", (("q", 12),)), Rows(f"k{at}", (("k", 12),))))
            for at in sorted({name[-1] for name in family})
        )

    def _seed(self, name: str) -> int:
        return 100 * list(self.family).index(name) + self.set_of(name, self.rank)[0]

    def set_of(self, name: str, rank: int) -> tuple[int, ...]:
        return next((ranks for ranks in self.family[name] if rank in ranks), (rank,))

    def maxima(self, rank: int, seed: int) -> dict[str, Tensor]:
        return {x.name: _normal(4, seed=1000 * seed + 10 * rank + int(x.name)).abs() for x in self.layers}

    def clip(self, seed: int, logits: Any = None, **changes: Any) -> None:
        """Scale by maxima; with a scaler of its own, which knows no table, if its arguments are others."""
        given = {"layers": self.layers, "tau": TAU, **changes}
        if self.scaler is None or changes:
            self.scaler = Scaler(self.optimizer, **given)
        with made_public():
            self.scaler.reduce(logits or (lambda: self.maxima(self.rank, seed)))
        self.scaler.apply_()

    def held(self) -> list[Tensor]:
        """Copies of weights, then of what the optimizer keeps."""
        kept = [v for p in self.params.values() for v in self.optimizer.state[p].values()]
        return [local_if_any(t).detach().clone() for t in (*self.params.values(), *kept)]

    def connected(self, layer: str) -> list[int]:
        """All ranks that the sets of a layer's weights connect with this one."""
        sets = [ranks for name, of_name in self.family.items() if name[-1] == layer for ranks in of_name]
        found = {self.rank}
        for _ in range(dist.get_world_size()):
            found |= {rank for ranks in sets if not found.isdisjoint(ranks) for rank in ranks}
        return sorted(found)


def _alike(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


# ------------------------------------------------------------------------------------------------------ many sets


def _scaled(name: str) -> list[str]:
    """Names of weights that are not what the rule makes of the maxima of all ranks that their sets connect."""
    job = Job(FAMILIES[name])
    wanted = {n: p.detach().clone() for n, p in job.params.items()}
    for seed in range(2):
        job.clip(seed)
        for at in "01":
            most = torch.stack([job.maxima(rank, seed)[at] for rank in job.connected(at)]).amax(0)
            gain = torch.where(most > TAU, torch.full_like(most, TAU) / most, torch.ones_like(most))
            for weight in (f"q{at}", f"k{at}"):
                wanted[weight].mul_(gain.pow(0.5).repeat_interleave(3)[:, None])
    return [n for n, p in job.params.items() if not torch.equal(p, wanted[n])]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_layer_is_scaled_by_the_maxima_of_all_ranks_that_its_weights_connect(name: str, world4: RankPool) -> None:
    """One round in `within another` over the layer's sets, small ones first, is not enough, though a larger set has all
    of their ranks."""
    assert world4.run(_scaled, name) == [[]] * 4


# ----------------------------------------------------------------------------------------------------- differences


DIFFERENT: dict[str, dict[str, Any]] = {  # what rank 2 gives
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
    """Errors of a call in which rank 2 differs, or has no table, or another weight; the next one goes on."""
    beyond = {"process_group": dist.group.WORLD} if what == "layers of a group" else {}
    family: Family = {name: [] for name in FAMILIES["chain"]} if beyond else FAMILIES["rows and columns"]
    job, twin = Job(family), Job(family)
    for one in (job, twin):
        one.clip(0, **beyond)
    odd, said = job.rank == 2 or what == "rows on all ranks", list[str]()
    if odd and what == "no table":
        job.scaler = None
    elif odd and what == "replaced":
        job.params["q0"] = nn.Parameter(job.params["q0"].detach().clone())
        job.optimizer.param_groups[0]["params"][0] = job.params["q0"]
    before = job.held()
    for _ in range(2):
        try:
            job.clip(1, **beyond, **(DIFFERENT.get(what, {}) if odd else {}))
        except ValueError as error:
            said.append(str(error))
            assert _alike(before, job.held())
    job.scaler = job.scaler if not said else None  # one with the arguments of all
    for one in (job, twin) if said else (twin, twin):
        one.clip(1, **beyond)
    assert _alike(job.held(), twin.held())
    return said


@pytest.mark.parametrize(
    ("what", "found"),
    [
        ("tau", r"ranks \(0, 2\) scale queries and keys together but differ: .*'tau=0.5 .*tau=7.0.*the same tau and"),
        ("alpha", r"differ: rank 0 has 'tau=0.5 alpha=0.5', rank 2 has 'tau=0.5 alpha=0.25'"),
        ("logits", r"rank 2: logits of '0': found \(3,\)"),
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


def _job(kind: str) -> Job:
    """A job after a step, so that there is momentum. `kind`: "fsdp2", or a family."""
    everyone = tuple(range(dist.get_world_size()))
    job = Job(FAMILIES.get(kind, {"q0": [everyone], "k0": [everyone]}))
    if kind == "fsdp2":
        job.params = parameters(LAYOUTS[kind].build({n: p.detach() for n, p in job.params.items()}, (len(everyone),)))
        job.optimizer = Muon(list(job.params.items()), lr=0.02)
    for p in job.params.values():
        p.grad = torch.ones_like(p)
    job.optimizer.step()
    return job


def _in_any_function(store: str, kind: str, first: bool) -> tuple[list[str], int]:
    """Exceptions in each function that runs before the ranks have voted: where they passed unnoticed, how many were
    raised by all. `first`: in calls that make the table anew."""
    join(store)
    job, twin, passed, raised = _job(kind), _job(kind), list[str](), 0

    def call() -> None:
        assert job.scaler is not None
        if first:
            job.scaler._bound = None
        with made_public():
            job.scaler.reduce(lambda: job.maxima(job.rank, 1))

    for one in (job, twin):
        one.clip(0)
    known = known_places(call, "reduce", "_none")[:: 1 if dist.get_world_size() == 2 else 6]  # in each on two ranks
    for at, place in enumerate(known, start=1):
        kind, number = at % len(KINDS), 3 if first and at % 4 == 0 else 1
        before, victim = job.held(), (at // 2) % dist.get_world_size()
        found = check_all_raise(call, place, KINDS[kind], victim, number, "reduce")
        raised += bool(found)
        if found:
            assert _alike(before, job.held()), f"{place} changed something"
        elif number == 1:
            passed.append(f"{place} {type(KINDS[kind]).__name__}")
    for one in (job, twin):
        one.clip(2)
    assert _alike(job.held(), twin.held())
    return passed, raised


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


def _victim(world: int) -> int:
    return min(1, world - 1)


def _after_the_vote(store: str, kind: str) -> list[tuple[str, str, bool]]:
    """Errors of a call with an exception on one rank after the vote. No rank steps until state is loaded; then all go
    on."""
    join(store)
    job, twin = _job(kind), _job(kind)
    for one in (job, twin):
        one.clip(0)

    def call() -> None:
        job.clip(1)

    held, state = job.held(), copy.deepcopy(job.optimizer.state_dict())
    begin = "reduce" if dist.get_world_size() > 1 else "apply_"  # one rank votes with nobody
    before = known_places(call, begin, "_scale")
    after = [place for place in known_places(call, begin, "<end>") if place not in before]
    said = []
    for at, place in enumerate(after):
        error = KINDS[at % len(KINDS)]
        with (
            raising(place if dist.get_rank() == _victim(dist.get_world_size()) else None, error, 1, begin),
            pytest.raises((ExchangeError, *STAYS), match=f"broken off|{MARK}") as caught,
        ):
            call()
        said.append((place.name, f"{caught.typename}: {caught.value}", isinstance(error, STAYS)))
        with pytest.raises(ExchangeError, match="QK-clip was broken off"):
            job.optimizer.step()
        for p, weight in zip(job.params.values(), held, strict=False):
            local_if_any(p).data.copy_(weight)
        job.optimizer.load_state_dict(copy.deepcopy(state))
    for one in (job, twin):
        one.clip(2)
    assert _alike(job.held(), twin.held())
    return said


@pytest.mark.parametrize("kind", ["fsdp2", "plain"])
def test_whatever_is_raised_after_the_vote_breaks_the_step_of_all(kind: str, ranks: RankPool, tmp_path: Path) -> None:
    """Nobody waits for a rank that cannot go on, also where it has not begun to scale."""
    everyone = ranks.run(_after_the_vote, str(tmp_path / "store"), kind)
    victim = _victim(ranks.world_size)
    who = f"rank {victim}: " if ranks.world_size > 1 else ""
    assert {"_gains", "_factors", "_scale", "_views"} <= {name for name, *_ in everyone[victim]}
    for rank, of_rank in enumerate(everyone):
        for name, text, stays in of_rank:
            if stays and rank == victim:
                assert MARK in text and "ExchangeError" not in text, (name, text)
            else:
                assert text.startswith(f"ExchangeError: QK-clip was broken off: {who}"), (name, text)
