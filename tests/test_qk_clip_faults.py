"""QK-clip on sets of ranks that overlap, and whatever is raised on one rank: all ranks raise it, or all go on alike."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from injection import KINDS, MARK, STAYS, check_all_raise, join, known_places, raising
from torch import Tensor, nn

from shardmuon import Muon
from shardmuon._torch import local_if_any
from shardmuon.errors import made_public
from shardmuon.testing import RankPool
from shardmuon.testing.layouts import LAYOUTS, parameters
from shardmuon_qkclip import clip, qk_clip
from shardmuon_qkclip.layers import Attention, Rows

pytestmark = pytest.mark.ranks

Sets = list[tuple[int, ...]]  # of one weight; a rank that is in none has it alone
Family = dict[str, Sets]  # weight -> its sets. Layers are named by the last character of their weights

FAMILIES: dict[str, Family] = {
    "rows and columns": {"q0": [(0, 1), (2, 3)], "k0": [(0, 2), (1, 3)], "q1": [(0, 1, 2, 3)], "k1": [(0, 1, 2, 3)]},
    "chain": {"q0": [(0, 1), (2, 3)], "k0": [(1, 2)], "q1": [(2, 3)], "k1": [(0, 1), (2, 3)]},
    "within another": {"q0": [(0, 1)], "k0": [(1, 2)], "q1": [(0, 1, 2), (3,)], "k1": [(0, 1, 2)]},
    "shared weight": {"q0": [(0, 1), (2, 3)], "k0": [(0, 2), (1, 3)], "q1": [(0, 1), (2, 3)], "k1": [(0, 1), (2, 3)]},
}
TAU = 0.5


def _normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Job:
    """Weights of 4 heads of 3 rows, and layers that have one for queries and one for keys."""

    def __init__(self, family: Family, shared: bool = False, variant: str | None = None) -> None:
        self.rank, self.family = dist.get_rank(), family
        self.params = {n: nn.Parameter(_normal(12, 5, seed=self._seed(n))) for n in family}
        if shared:  # both layers have the first one's queries
            del self.params["q1"]
        groups = [
            {"params": [(name, p)], "process_group": self.set_of(name, self.rank), "adjust_lr_fn": None}
            for name, p in self.params.items()
        ]
        options = {} if variant is None else {"variant": variant, "weight_decay": 0.0}
        self.optimizer = Muon(groups, lr=0.02, **options)  # type: ignore[arg-type]
        self.layers = tuple(
            Attention(at, 4, 4, (Rows("q0" if shared else f"q{at}", (("q", 12),)), Rows(f"k{at}", (("k", 12),))))
            for at in sorted({name[-1] for name in family})
        )

    def _seed(self, name: str) -> int:
        return 100 * list(self.family).index(name) + self.set_of(name, self.rank)[0]

    def set_of(self, name: str, rank: int) -> tuple[int, ...]:
        return next((ranks for ranks in self.family[name] if rank in ranks), (rank,))

    def maxima(self, rank: int, seed: int) -> dict[str, Tensor]:
        return {x.name: _normal(4, seed=1000 * seed + 10 * rank + int(x.name)).abs() for x in self.layers}

    def clip(self, seed: int, **changes: Any) -> None:
        given = {"layers": self.layers, "tau": TAU, **changes}
        qk_clip(self.optimizer, given.pop("logits", self.maxima(self.rank, seed)), **given)

    def held(self) -> dict[str, Tensor]:
        kept = {f"{name} {key}": v for name, p in self.params.items() for key, v in self.optimizer.state[p].items()}
        tensors = {n: local_if_any(t) for n, t in {**self.params, **kept}.items() if isinstance(t, Tensor)}
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}

    def connected(self, layers: Sequence[str]) -> list[int]:
        """All ranks that the sets of these layers' weights connect with this one."""
        sets = [ranks for name, of_name in self.family.items() if name[-1] in layers for ranks in of_name]
        found = {self.rank}
        for _ in range(dist.get_world_size()):
            found |= {rank for ranks in sets if not found.isdisjoint(ranks) for rank in ranks}
        return sorted(found)


def _alike(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ------------------------------------------------------------------------------------------------------ many sets


def _scaled(name: str) -> list[str]:
    """Names of weights that are not what the rule makes of the maxima of all ranks that their sets connect."""
    shared = name == "shared weight"
    job = Job(FAMILIES[name], shared)
    wanted = {n: p.detach().clone() for n, p in job.params.items()}
    for seed in range(2):
        job.clip(seed)
        families = [["0", "1"]] * 2 if shared else [["0"], ["1"]]
        for at, family in zip("01", families, strict=True):
            everyone = [job.maxima(rank, seed)[layer] for rank in job.connected(family) for layer in family]
            most = torch.stack(everyone).amax(0)
            gain = torch.where(most > TAU, torch.full_like(most, TAU) / most, torch.ones_like(most))
            rows = gain.pow(0.5).repeat_interleave(3)[:, None]
            for weight in {f"q{at}", f"k{at}"} & wanted.keys():
                wanted[weight].mul_(rows)
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
    "logits": {"logits": {"0": torch.ones(3)}},
    "function": {"logits": lambda: 1 / 0},
}


def _differing(what: str) -> list[str]:
    """Errors of a call in which rank 2 differs, or has no table, or another weight; the next one goes on."""
    job, twin = Job(FAMILIES["rows and columns"]), Job(FAMILIES["rows and columns"])
    for one in (job, twin):
        one.clip(0)
    odd, said = job.rank == 2, list[str]()
    changes = DIFFERENT.get(what, {}) if odd else {}
    if odd and what == "layers":
        changes = {"layers": job.layers[:1], "logits": {"0": torch.ones(4)}}
    elif odd and what == "no table":
        clip._KNOWN.pop(job.optimizer)
    elif odd and what == "replaced":
        job.params["q0"] = nn.Parameter(job.params["q0"].detach().clone())
        job.optimizer.param_groups[0]["params"][0] = job.params["q0"]
    before = job.held()
    try:
        job.clip(1, **changes)
    except ValueError as error:
        said.append(str(error))
        assert _alike(before, job.held())
        job.clip(1)
    twin.clip(1)
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
        ("no table", ""),
        ("replaced", ""),
    ],
)
def test_ranks_that_differ_all_raise_and_the_next_call_goes_on(what: str, found: str, world4: RankPool) -> None:
    everyone = world4.run(_differing, what)
    assert all(said == everyone[0] for said in everyone)
    assert [bool(re.search(found, said)) for said in everyone[0]] == [True] * bool(found), everyone[0]


def _unlike_layers() -> str:
    rank = dist.get_rank()
    layers = [Attention(str(at), 4, 4, (Rows(f"q{at}", (("q", 12),)), Rows(f"k{at}", (("k", 12),)))) for at in range(2)]
    named = [(f"{kind}{at}", nn.Parameter(_normal(12, 5, seed=at))) for at in range(2) for kind in "qk"]
    optimizer = Muon([{"params": named, "process_group": (rank,)}], lr=0.02)
    before = [p.detach().clone() for _, p in named]
    with pytest.raises(ValueError, match="attention layers") as caught:
        qk_clip(optimizer, {}, layers=layers[: 1 if rank == 1 else 2], process_group=dist.group.WORLD)
    assert all(torch.equal(p, old) for (_, p), old in zip(named, before, strict=True))
    return str(caught.value)


def test_ranks_of_a_process_group_that_list_other_layers_all_raise(world3: RankPool) -> None:
    everyone = world3.run(_unlike_layers)
    assert len(set(everyone)) == 1
    assert "differ: rank 0 has '2 attention layers', rank 1 has '1 attention layers'" in everyone[0]


# ----------------------------------------------------------------------------------------- exceptions in any function


def _job(kind: str) -> Job:
    """A job after a step, so that norms of the weights are kept. `kind`: "fsdp2", or a family."""
    everyone = tuple(range(dist.get_world_size()))
    job = Job(FAMILIES.get(kind, {"q0": [everyone], "k0": [everyone]}), variant="hyperball")
    if kind == "fsdp2":
        whole = {name: p.detach() for name, p in job.params.items()}
        job.params = parameters(LAYOUTS[kind].build(whole, (len(everyone),)))
        job.optimizer = Muon(list(job.params.items()), lr=0.02, weight_decay=0.0, variant="hyperball")
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
        scaler = clip._KNOWN[job.optimizer]
        if first:
            scaler._bound = None
        with made_public():
            scaler.reduce(lambda: job.maxima(job.rank, 1), TAU, 0.5)

    for one in (job, twin):
        one.clip(0)
    known = known_places(call, "reduce", "_none")[:: 1 if dist.get_world_size() == 2 else 6]  # in each on two ranks
    for number, (at, place) in itertools.product((1, 3) if first else (1,), enumerate(known, start=1)):
        for kind_of in {at % len(KINDS), (at + 3) % len(KINDS)}:
            before, victim = job.held(), (at + kind_of) % dist.get_world_size()
            found = check_all_raise(call, place, KINDS[kind_of], victim, number, "reduce")
            raised += bool(found)
            if found:
                assert _alike(before, job.held()), f"{place} changed something"
            elif number == 1:
                passed.append(f"{place} {type(KINDS[kind_of]).__name__}")
    for one in (job, twin):
        one.clip(2)
    assert _alike(job.held(), twin.held())
    return passed, raised


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    with RankPool(request.param, timeout=300.0) as pool:
        yield pool


@pytest.mark.parametrize("first", [False, True], ids=["kept", "first"])
def test_whatever_is_raised_on_one_rank_before_the_vote_is_raised_by_all(
    first: bool, ranks: RankPool, tmp_path: Path
) -> None:
    for kind in ("fsdp2", "plain" if ranks.world_size == 2 else "rows and columns"):
        for passed, raised in ranks.run(_in_any_function, str(tmp_path / kind), kind, first):
            assert passed == [], passed
            assert raised * (1 if ranks.world_size == 2 else 5) > (120 if first else 40), raised


def _after_the_vote(store: str, kind: str) -> list[tuple[str, str, bool, bool]]:
    """Errors of a call with an exception on rank 1 after the vote, and whether the optimizer is broken."""
    join(store)
    job = _job(kind)
    job.clip(0)

    def call() -> None:
        job.clip(1)

    before = known_places(call, "reduce", "_scale")
    after = [place for place in known_places(call, "reduce", "<end>") if place not in before]
    said = []
    for at, place in enumerate(after):
        held, error = job.held(), KINDS[at % len(KINDS)]
        text = ""
        try:
            with raising(place if dist.get_rank() == 1 else None, error, 1, "reduce"):
                call()
        except BaseException as wrong:
            text = f"{type(wrong).__name__}: {wrong}"
        said.append((place.name, text, isinstance(error, STAYS), job.optimizer.broken is not None))
        job.optimizer.broken = None
        with torch.no_grad():
            for name, p in job.params.items():
                local_if_any(p).copy_(held[name])
    call()
    return said


@pytest.mark.parametrize("kind", ["fsdp2", "plain"])
def test_whatever_is_raised_after_the_vote_breaks_the_step_of_all(kind: str, ranks: RankPool, tmp_path: Path) -> None:
    """Nobody waits for a rank that cannot go on, also where it has not begun to scale."""
    everyone = ranks.run(_after_the_vote, str(tmp_path / "store"), kind)
    assert {"gains", "_factors", "_scale", "_views", "forget_norms"} <= {name for name, *_ in everyone[1]}
    for rank, of_rank in enumerate(everyone):
        for name, text, stays, broken in of_rank:
            assert broken, (name, text)
            if stays and rank == 1:
                assert MARK in text and "ExchangeError" not in text, (name, text)
            else:
                assert text.startswith("ExchangeError: QK-clip was broken off: rank 1: "), (name, text)
