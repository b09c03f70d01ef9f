"""Tests of the cost model's counts, such as the number of bytes that each rank sends. The counts are computed for all
ranks at once, and must equal those obtained from the programs of the individual ranks."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from simulated import EACH, LAYOUTS, VIEWS, spec

from shardmuon.foresight.counting import BucketCount
from shardmuon.plan.plan import Plan, Policy
from shardmuon.plan.planner import make_plan
from shardmuon.plan.program import Load, Program


@pytest.mark.parametrize("seed", range(24))
def test_layouts_are_counted_as_their_programs_run(seed: int) -> None:
    draw = random.Random(seed)
    specs = []
    for number in range(draw.randrange(1, 12)):
        layout = LAYOUTS[draw.choice(list(LAYOUTS))](draw.choice(list(VIEWS.values()))())
        specs.append(spec(f"p{number}", layout, draw.randrange(3), draw.choice([2, 4]), draw.random() < 0.5))
    check(make_plan(specs, Policy(bucket_bytes=draw.choice([100, 2000, 1 << 25]))))
    check(make_plan(specs, EACH))


def check(plan: Plan) -> None:
    counts = BucketCount.of_plan(plan, _node_of)
    assert list(counts) == sorted({rank for s in plan.specs for rank in s.layout.ranks})
    for rank, counted in counts.items():
        for one, bucket in zip(counted, [bucket for bucket in plan.buckets if rank in bucket.ranks], strict=True):
            program = Program.of(plan, bucket, rank)
            late = program.relay.tiles if program.relay else ()
            own, foreign, idle = (_numel(side) for side in (program.own, program.gather.tiles, late))
            assert one.number == (plan.buckets.index(bucket) if bucket.exchange else -1)
            assert (one.held, one.foreign, one.idle) == (own + foreign + idle, foreign, idle)
            owned = [(i.rows, i.cols, str(i.choice)) for i in (plan.items[n] for n in bucket.items) if rank in i.owners]
            assert sorted(m[:3] for m in one.matrices for _ in range(m.num)) == sorted(owned)
            if bucket.exchange:
                gather, scatter, relay = program.gather, program.scatter, program.relay
                sent = [gather.sent, scatter.sent, relay.sent if relay else ()]
                received = [gather.came, scatter.came, relay.came if relay else ()]
                assert one.sent == tuple(_side(program, side) for side in sent)
                assert one.received == tuple(_side(program, side) for side in received)
                assert one.exchanges == 2 * bucket.gathers + (relay is not None)
                assert one.batches == program.batch_numel * bucket.itemsize
    for bucket in plan.buckets:
        programs = [Program.of(plan, bucket, rank) for rank in bucket.ranks]
        wires = [wire for program in programs for wire in (program.gather, program.scatter)]
        assert bucket.gathers == any(any(w.sent) or any(w.came) for w in wires), "none carries nothing"


def _node_of(rank: int) -> int:
    return rank // 2


def _side(program: Program, splits: Sequence[int]) -> tuple[int, ...]:
    """Return a tuple: the number of bytes that a rank exchanges within its node, the number of bytes that it exchanges
    with other nodes, and the number of ranks with which it exchanges data. `splits` lists the number of elements
    exchanged with each rank of the bucket."""
    sums = [0, 0, 0]
    for other, elements in zip(program.bucket.ranks, splits, strict=bool(splits)):
        across = _node_of(other) != _node_of(program.rank)
        sums[across] += elements * program.bucket.itemsize
        sums[2] += elements > 0
    return tuple(sums)


def _numel(loads: Sequence[Load]) -> int:
    return sum(load.tile.numel for load in loads)
