"""Comparisons of optimizer steps with reference runs, and figures from step plans, for every layout. Each result is
computed once and shared by all tests that use it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from simulated import SHARING, by_rates, quick_plans
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

# Settings for comparisons with a single-process run: optimizer options, and the machine whose speed the planner assumes
# (None for the actual machine). EXCHANGES is keyed by number of ranks. For numbers of ranks that are not in EXCHANGES,
# MANY_BUCKETS is used. With the machine SHARING, the planner lets one replica orthogonalize each matrix and send the
# result to the other replicas in an additional exchange.
MANY_BUCKETS = {"bucket_bytes": 3000}, SHARING
EXCHANGES: dict[int, tuple[dict[str, int], Machine | None]] = {8: MANY_BUCKETS, 3: ({}, None)}

STEPS = {8: 1, 3: 2, 2: 3, 4: 2}  # number of steps in comparisons with a single-process run, keyed by number of ranks

# Layouts to compare, keyed by number of ranks. The layouts on 8 ranks use meshes of 2 x 2 x 2 and 4 x 2. On 3 ranks,
# most tensor sizes do not divide evenly.
ROWS = {
    8: ("hsdp+tp", "fsdp2+tp", "mixed meshes", "megatron-fsdp hfsdp", "mcore buffers+tp"),
    # On 3 ranks, a third of the layouts is enough here, because test_golden.py runs all layouts on 3 ranks.
    3: [*LAYOUTS, *Fsdp1Run.ROWS][1::3],
    2: [*LAYOUTS, *Fsdp1Run.ROWS][::2],
    4: [*LAYOUTS, *Fsdp1Run.ROWS],
}


@dataclass(frozen=True, slots=True)
class Planned:
    """Figures from the step plan of one rank.

    Attributes:
        counted: Numbers of exchanges, of bytes sent and of orthogonalized matrices, as counted by
            `BucketCount.of_plan`.
        sides: Bytes sent and bytes received, each as a pair (within a node, between nodes). Each node is assumed to
            have half of the ranks, rounded down.
        messages: Number of messages that this rank sends to other ranks in all exchanges.
        digests: Digests of the plan in hex, keyed by the set of ranks that share the digest.
    """

    counted: tuple[int, int, int]
    sides: tuple[Sequence[int], Sequence[int]]
    messages: int
    digests: dict[Ranks, str]


def planned(optimizer: Muon) -> Planned:
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
    """Return the plan's digests in hex, keyed by the set of ranks that share the digest. Sets of a single rank are left
    out, and smaller sets come first."""
    ordered = sorted(plan.digests, key=lambda ranks: (len(ranks), ranks))
    return {ranks: plan.digests[ranks].hex() for ranks in ordered if len(ranks) > 1}


def assert_counted(traffics: Sequence[Traffic], plans: Sequence[Planned]) -> None:
    for traffic, plan in zip(traffics, plans, strict=True):
        assert plan.counted == (traffic.exchanges, traffic.bytes_sent, traffic.orthogonalized)
    sent, received = ([sum(plan.sides[which][at] for plan in plans) for at in (0, 1)] for which in (0, 1))
    # Summed over all ranks, bytes received must equal bytes sent, both within nodes and between nodes.
    assert sent == received


@cache
def compared(layout: str, world: int) -> list[dict[str, Comparison]]:
    """Compare a layout with the reference runs. Return one dict per rank, which maps the name of each reference to the
    result of the comparison.

    The reference "dense" is `Muon` in a single process. The attribute `about` of its result is a pair: figures from the
    rank's plan, and the number of messages that the rank sends per step. On 4 ranks, and for every third layout on 2
    ranks, torch.optim.Muon is a second reference.
    """
    return RankPool.cached(world).run(_comparisons, layout)


@quick_plans()
def _comparisons(layout: str) -> dict[str, Comparison]:
    """Compare a layout with reference runs, and return a dict from the name of each reference to the comparison. Every
    layout is compared with a single-process run. On 4 ranks, every layout is also compared with torch.optim.Muon in
    fp32. On 2 ranks, every third layout is compared with torch.optim.Muon in bf16.

    More combinations would test nothing new: the plan does not depend on the reference, and the dtype only changes the
    plan's byte counts.
    """
    # Each rank caches reference runs by their arguments, which are equal for all layouts, so each reference is computed
    # only once.
    once: dict[str, Any] = {"lr": 0.02}
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
    # Apart from byte counts, the plans of bf16 weights equal those of fp32 weights, so it is enough to compare every
    # third layout in bf16.
    elif world == 2 and [*LAYOUTS, *Fsdp1Run.ROWS].index(layout) % 3 == 0:
        found["torch bf16"] = Comparison.with_torch(layout, dtype=torch.bfloat16, steps=2, **once)
    return found
