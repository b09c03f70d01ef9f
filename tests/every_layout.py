"""Updates and plans on all layouts of the table, made once for all tests that ask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from simulated import SHARING, by_rates
from torch import Tensor

from shardmuon import Muon
from shardmuon.comm.groups import Pending, Ranks, Traffic
from shardmuon.foresight.counting import BucketCount
from shardmuon.plan.plan import Plan
from shardmuon.price.machines import Machine
from shardmuon.testing.compare import Comparison
from shardmuon.testing.frameworks import Fsdp1Run
from shardmuon.testing.layouts import LAYOUTS
from shardmuon.testing.pool import RankPool

# With one process, by number of ranks: options, and by whose rates. Results go in two stages if there are replicas.
MANY_BUCKETS = {"bucket_bytes": 3000}, SHARING
EXCHANGES: dict[int, tuple[dict[str, int], Machine | None]] = {8: MANY_BUCKETS, 3: ({}, None)}

STEPS = {8: 1, 3: 2, 2: 3, 4: 2}  # with one process

# Numbers of ranks -> layouts: meshes of 2 x 2 x 2 and 4 x 2; sizes that do not divide.
ROWS = {
    8: ("hsdp+tp", "fsdp2+tp", "mixed meshes", "megatron-fsdp hfsdp", "mcore buffers+tp"),
    3: [*LAYOUTS, *Fsdp1Run.ROWS][1::3],  # all on 3: test_golden.py
    2: [*LAYOUTS, *Fsdp1Run.ROWS][::2],
    4: [*LAYOUTS, *Fsdp1Run.ROWS],
}


@dataclass(frozen=True, slots=True)
class Planned:
    """A rank's plan of a step.

    Attributes:
        counted: Exchanges, bytes sent and matrices by `BucketCount.of_plan`.
        sides: Bytes inside and across nodes, half of the ranks each, that it counts as sent, and as received.
        messages: To other ranks, of all exchanges.
        digests: Of the plan, by set of ranks, in hex.
    """

    counted: tuple[int, int, int]
    sides: tuple[Sequence[int], Sequence[int]]
    messages: int
    digests: dict[Ranks, str]


def planned(optimizer: Muon) -> Planned:
    """Return the plan of an optimizer."""
    plan, rank, node = optimizer.plan, dist.get_rank(), max(1, dist.get_world_size() // 2)
    assert plan is not None
    buckets = BucketCount.of_plan(plan, lambda other: other // node)[rank]
    sent, received = (
        [sum(getattr(side, key) for b in buckets for side in getattr(b, way)) for key in ("inside", "across")]
        for way in ("sent", "received")
    )
    counted = (
        sum(bucket.exchanges for bucket in buckets),
        sum(sent),
        sum(m.num for bucket in buckets for m in bucket.matrices),
    )
    messages = sum(side.peers for b in buckets for side in b.sent)
    return Planned(counted, (sent, received), messages, digests_of(plan))


def digests_of(plan: Plan) -> dict[Ranks, str]:
    """Digests of sets of several ranks, in hex; small ones first."""
    ordered = sorted(plan.digests, key=lambda ranks: (len(ranks), ranks))
    return {ranks: plan.digests[ranks].hex() for ranks in ordered if len(ranks) > 1}


def assert_counted(traffics: Sequence[Traffic], plans: Sequence[Planned]) -> None:
    """Assert that each rank did in a step what its plan says."""
    for traffic, plan in zip(traffics, plans, strict=True):
        assert plan.counted == (traffic.exchanges, traffic.bytes_sent, traffic.orthogonalized)
    sent, received = ([sum(plan.sides[which][at] for plan in plans) for at in (0, 1)] for which in (0, 1))
    assert sent == received  # what is sent inside and between nodes arrives there


@cache
def compared(layout: str, world: int) -> list[dict[str, Comparison]]:
    """Comparisons by rank and reference: "dense", whose `about` is what was planned and how many messages to other
    ranks there were in a step, and torch's Muon: at 4 ranks, and for every third layout at 2."""
    return RankPool.cached(world).run(_comparisons, layout)


def _comparisons(layout: str) -> dict[str, Comparison]:
    """Compare with one process at every number of ranks, with torch's on fp32 weights at 4 and bf16 ones at 2 ranks.

    Plan and exchange know neither the reference nor, but for sizes in bytes, the dtype. So layouts meet every number of
    ranks and every reference, and not all three meet. A second step has momentum and a plan that is kept; a
    third, at 2 ranks, finds what the second leaves.
    """
    once: dict[str, Any] = {"lr": 0.02}  # each rank computes the references for the first layout only
    world = dist.get_world_size()
    steps, (exchange, rates), sent = STEPS[world], EXCHANGES.get(world, MANY_BUCKETS), list[int]()
    start_exchange = Traffic.start

    def start(traffic: Traffic, group: Any, send: Tensor, splits: tuple[int, ...], came: tuple[int, ...]) -> Pending:
        own = dist.get_group_rank(group, dist.get_rank())
        sent.append(sum(size > 0 for to, size in enumerate(splits) if to != own))
        return start_exchange(traffic, group, send, splits, came)

    def about(optimizer: Muon) -> tuple[Planned, float]:
        return planned(optimizer), sum(sent) / steps

    with mock.patch.object(Traffic, "start", start), by_rates(rates):
        dense = Comparison.with_dense(layout, weight_decay=0.1, steps=steps, **exchange, about=about, **once)
    found = {"dense": dense}
    if world == 4:
        found["torch fp32"] = Comparison.with_torch(layout, adjust_lr_fn="match_rms_adamw", steps=2, **once)
    elif world == 2 and [*LAYOUTS, *Fsdp1Run.ROWS].index(layout) % 3 == 0:  # bf16 weights have the plans of fp32 ones
        found["torch bf16"] = Comparison.with_torch(layout, dtype=torch.bfloat16, steps=2, **once)
    return found
