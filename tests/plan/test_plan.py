"""Tests that work is balanced across ranks, that all ranks compute equal plans, and that planning for a thousand ranks
is fast."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from simulated import sharded, spec

from shardmuon.errors import ranks_text
from shardmuon.layout.views import matrix_view
from shardmuon.orthogonalize.choice import Choice
from shardmuon.plan.plan import Policy, Spec
from shardmuon.plan.planner import make_plan
from shardmuon.plan.program import Program

Made = TypeVar("Made")


def transformer(ranks: int, layers: int, d: int, itemsize: int = 2) -> list[Spec]:
    shapes = {"qkv": (3 * d, d), "o": (d, d), "up": (4 * d, d), "down": (d, 4 * d)}
    layouts = {name: sharded(matrix_view(shape), [range(ranks)], 0) for name, shape in shapes.items()}
    of_layer = [spec(name, layout, itemsize=itemsize) for name, layout in layouts.items()]
    return [one._replace(name=f"{i}.{one.name}") for i in range(layers) for one in of_layer]


EXPERTS = [spec("experts", sharded(matrix_view((64, 32, 48), view="stack"), [range(8)], 1))]
LOADED = {
    **{f"{ranks} ranks": (transformer(ranks, 12, 384), 1.05) for ranks in (2, 3, 4, 6, 8, 12)},
    # Each of 16 ranks gets three of 48 matrices with relative costs 1, 3, 4 and 4, so the mean cost per rank is 9.
    # Assigning matrices in descending order of cost gives one rank a cost of 10.
    "16 ranks": (transformer(16, 12, 384), 10 / 9),
    # Each of 24 ranks gets two of 48 matrices with relative costs 1, 3, 4 and 4, so the mean cost per rank is 6. Even
    # in the best assignment, the most loaded rank has a cost of 4 + 3, which is 7 / 6 of the mean.
    "24 ranks": (transformer(24, 12, 384), 7 / 6),
    "experts, one by one": (EXPERTS, 1.0),
}


@pytest.mark.parametrize("job", LOADED)
def test_the_most_loaded_rank_is_near_the_mean_or_the_largest_matrix(job: str) -> None:
    specs, most = LOADED[job]
    plan = make_plan(specs, Policy())
    loads = plan.loads().values()
    largest = 0 if specs is EXPERTS else max(item.cost for item in plan.items)
    assert max(loads) <= max(most * sum(loads) / len(loads), largest)


def _timed(make: Callable[[], Made]) -> tuple[Made, float]:
    """Return the result of `make`, and the time in seconds that `make` would take on a core that counts to a million in
    25 ms.

    A loop just before and just after `make` measures the current speed of this machine, which other jobs may slow down.
    """

    def loop() -> float:
        start = time.process_time()
        for _ in range(1_000_000):
            pass
        return time.process_time() - start

    gc.collect()
    gc.disable()  # Disable garbage collection, so that objects of earlier tests do not affect the measured time.
    try:
        before, start = loop(), time.process_time()
        made = make()
        took = time.process_time() - start
    finally:
        gc.enable()
    return made, took * 0.025 / max(before, loop())


@pytest.mark.parametrize("replicas", [1, 8, 128])
def test_choosing_for_400_matrices_on_1024_ranks_takes_half_a_second_and_programs_of_a_rank_another(
    replicas: int,
) -> None:
    shapes, shards = ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)), 1024 // replicas
    grid = [range(first, first + shards) for first in range(0, 1024, shards)]
    specs = [spec(f"{j}", sharded(matrix_view(shape), grid, 0), itemsize=2) for j, shape in enumerate(shapes)]
    took = []
    for _ in range(2):
        plan, of_plan = _timed(lambda: make_plan(specs * 100, Policy()))
        programs, of_programs = _timed(
            lambda plan=plan: [Program.of(plan, bucket, 777) for bucket in plan.buckets if 777 in bucket.ranks]
        )
        took.append((of_plan, of_programs))
    assert min(of_plan for of_plan, _ in took) < 0.5
    assert min(of_programs for _, of_programs in took) < 0.5 + 1.0 * (replicas > 1)
    assert [len(digest) for digest in plan.digests.values()] == [16]
    mean = 2 * sum(item.rows * item.cols for item in plan.items) * (shards - 1) / shards**2 / replicas
    sent = sum(sum(p.gather.sent) + sum(p.scatter.sent) for p in programs)
    # A rank sends the whole result of each matrix that it orthogonalizes. With 1024 ranks, a single 4096 x 4096 matrix
    # is already 60% of what a rank sends on average, so some ranks may send far more than the mean.
    assert 0 < sent < 20 * mean


@pytest.mark.parametrize(("ranks", "buckets"), [(32, 5), (256, 1)])
def test_every_owner_works_in_each_bucket_where_ranks_have_few_matrices(ranks: int, buckets: int) -> None:
    """A step is split into several buckets so that communication overlaps with orthogonalization. If the ranks have few
    matrices to orthogonalize, there must be fewer buckets, because a rank without a matrix in a bucket would idle."""
    d, inner = 4096, 11008
    kinds = [
        spec(str(shape), sharded(matrix_view(shape), [range(ranks)], 0), itemsize=2)
        for shape in ((d, d), (inner, d), (d, inner))
    ]
    of_layer = [kinds[0]] * 4 + [kinds[1]] * 2 + [kinds[2]]
    plan = make_plan([kind for _ in range(32) for kind in of_layer], Policy(bucket_bytes=2 * 8 * d * inner))
    owners = [len({plan.items[n].owners for n in bucket.items}) for bucket in plan.buckets]
    assert owners == [min(ranks, 7 * 32)] * buckets
    costs = [max(plan.items[n].cost for n in b.items) for b in plan.buckets]
    # Buckets must be sorted by the cost of their most expensive matrix, in ascending or descending order.
    assert costs in (sorted(costs), sorted(costs, reverse=True))


def test_a_plan_says_who_does_what() -> None:
    """If the methods of many matrices were chosen for the same reason, the printed plan must state the reason only
    once. Reasons and names of parameters must not change the digests of a plan."""
    named = [one._replace(choices=(Choice("standard", torch.float32, "measured"),)) for one in transformer(2, 2, 8)]
    plan, other = (
        make_plan(named, Policy()),
        make_plan([one._replace(name="") for one in transformer(2, 2, 8)], Policy()),
    )
    assert all(text in str(plan) for text in ("0.qkv", "24x8", "owner", "most loaded rank"))
    assert str(plan).count("24x8: standard float32, measured") == 1
    assert plan.digests == other.digests and plan.buckets == other.buckets
    texts = {(0, 1, 3): "0,1,3", tuple(range(8)): "0-7", (0, 1, 2, 3, 9, 12, 13, 14): "0-3,9,12-14"}
    assert {ranks: ranks_text(ranks) for ranks in texts} == texts
