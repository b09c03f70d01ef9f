"""Random families of overlapping groups: a rank that fails anywhere while a plan is made, or a step begins, stops all.

Which groups there are, what each holds, the order in which a rank lists them, who fails, where and when are drawn.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from injection import KINDS, check_all_raise, join, places_by_rank
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from shardmuon import Audit, Exchange, Muon, Orthogonalizer
from shardmuon.testing import RankPool

pytestmark = [pytest.mark.ranks, pytest.mark.apart]

WORLD = 4
SUBSETS = [ranks for size in (2, 3, 4) for ranks in itertools.combinations(range(WORLD), size)]
SEEDS = [int(seed) for seed in os.environ.get("COUNCIL_SEEDS", "0 7").split()]
PLANTS = 8  # in each family


def _normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Family:
    """A random optimizer over random groups of ranks; the same draws on every rank, but for the order of groups."""

    def __init__(self, seed: int, known: dict[tuple[int, ...], tuple[Any, DeviceMesh]]) -> None:
        draw, rank = random.Random(seed), dist.get_rank()
        self.grads: list[tuple[nn.Parameter, tuple[int, ...], Any]] = []
        groups: list[dict[str, Any]] = []
        family = draw.sample(SUBSETS, draw.randint(2, 5))
        for number, ranks in enumerate(family):
            kinds = [draw.choice(["replica", "shard"]) for _ in range(draw.randint(1, 2))]
            shapes = [(draw.randint(1, 9), draw.randint(1, 9)) for _ in kinds]
            if rank not in ranks:
                continue
            group, mesh = known[ranks]
            for place, (kind, shape) in enumerate(zip(kinds, shapes, strict=True)):
                where = mesh if kind == "shard" else None
                p = nn.Parameter(self._build(_normal(*shape, seed=number * 10 + place), where))
                self.grads.append((p, shape, where))
                groups.append({"params": [(f"{number}.{place}", p)], "process_group": group})
        own = nn.Parameter(_normal(3, 4, seed=rank))
        self.grads.append((own, (3, 4), None))
        groups.append({"params": [(f"own{rank}", own)], "rank_local": True})
        self._shuffle(groups, seed * WORLD + rank)
        options: dict[str, Any] = {"exchange": Exchange(route="owner")} if draw.random() < 0.25 else {}
        if draw.random() < 0.3:
            options["audit"] = Audit(every=1)
        self.optimizer = Muon(groups, lr=0.1, orthogonalizer=Orthogonalizer(method="standard"), **options)
        self.sets = family
        self.text = f"seed {seed}: {family} {options}"

    def _shuffle(self, groups: list[dict[str, Any]], seed: int) -> None:
        """Each set of ranks keeps its order; sets are interleaved at random on each rank."""
        draw = random.Random(seed)
        by_set: dict[str, list[dict[str, Any]]] = {}
        for group in groups:
            by_set.setdefault(group["params"][0][0].split(".")[0], []).append(group)
        groups.clear()
        while by_set:
            key = draw.choice(sorted(by_set))
            groups.append(by_set[key].pop(0))
            if not by_set[key]:
                del by_set[key]

    def _build(self, full: Tensor, mesh: DeviceMesh | None) -> Tensor:
        return full if mesh is None else distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)

    def set_gradients(self, seed: int) -> None:
        for p, shape, mesh in self.grads:
            p.grad = self._build(_normal(*shape, seed=1000 * seed + sum(shape)), mesh)


def _run(store: str, seeds: list[int]) -> list[str]:
    join(store)
    known: dict[tuple[int, ...], tuple[Any, DeviceMesh]] = {}
    for ranks in SUBSETS:
        group = dist.new_group(list(ranks))
        if dist.get_rank() in ranks:
            known[ranks] = group, DeviceMesh.from_group(group, "cpu")
    told = []
    for seed in seeds:
        family, draw, now = Family(seed, known), random.Random(seed), ""
        try:
            family.set_gradients(0)
            family.optimizer.prepare()
            places = places_by_rank(family.optimizer.prepare, "_bind", "_none")
            family.optimizer.step()
            family.set_gradients(1)
            steps = places_by_rank(family.optimizer.step, "step")
            for turn in range(PLANTS):
                family.set_gradients(2 + turn)
                begin, call, those = draw.choice(
                    [("_bind", family.optimizer.prepare, places), ("step", family.optimizer.step, steps)]
                )
                error, victim, number = (
                    draw.choice(KINDS),
                    draw.choice(sorted(set().union(*family.sets))),
                    draw.choice([1, 1, 2, 3, 5, 8]),
                )
                number = 1 if begin == "step" else number  # later calls may come after the agreement
                among = _connected(family.sets, victim)
                place = draw.choice(those[victim])
                now = f"{begin} {place} {error!r} on rank {victim}, call {number}"
                found = check_all_raise(call, place, error, victim, number, begin, among)
                told.append(f"{found}")
                family.optimizer.step()
        except BaseException as wrong:
            raise AssertionError(f"{family.text} {now}: {wrong}") from wrong
    return told


def _connected(family: list[tuple[int, ...]], rank: int) -> set[int]:
    """The ranks that hear of what happens on this one."""
    found = {rank}
    for _ in range(WORLD):
        for ranks in family:
            if found & set(ranks):
                found |= set(ranks)
    return found


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(WORLD, timeout=400.0) as pool:
        yield pool


def test_no_failure_in_a_random_family_of_groups_leaves_a_rank_waiting(ranks: RankPool, tmp_path: Path) -> None:
    """All ranks that are connected through groups raise, at once; the others step."""
    found = ranks.run(_run, str(tmp_path / "store"), SEEDS)
    assert all(told == found[0] for told in found)
    assert found[0].count("True") >= len(SEEDS)
