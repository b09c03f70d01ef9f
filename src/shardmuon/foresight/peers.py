"""What others would take on the same mesh: AdamW, and how other Muons deal with matrices that are cut up.

Their counts are derived from the plan's (the formulas stand in docs/foresight.md), not measured; their matrices are
multiplied as ours are, so rows differ by what is repeated and what moves, not by kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from shardmuon.foresight.hardware import (
    Hardware,
    Uses,
    exchange_seconds,
    pass_seconds,
    product_seconds,
)
from shardmuon.foresight.pricing import Price, identity
from shardmuon.foresight.times import NOTHING, Time
from shardmuon.foresight.types import BucketCount, Exact, RankClass
from shardmuon.orthogonalize.choice import flops as flops_of
from shardmuon.orthogonalize.schedules import schedule


@dataclass(frozen=True, slots=True)
class Peer:
    """One way of doing a step, on the rank that it takes longest.

    Attributes:
        name: Whose.
        how: What it does with matrices.
        state: Bytes of optimizer state that a rank keeps.
        wire: Bytes that a rank receives in a step.
        flops: Of orthogonalizing, of one rank.
        workspace: Bytes of whole matrices that a rank needs beside its state, at least.
        step: Seconds.
        same_update: Whether it is Muon's update of whole matrices.
    """

    name: str
    how: str
    state: int
    wire: int
    flops: int
    workspace: int
    step: Time
    same_update: bool


class _Kind(NamedTuple):
    """Matrices alike of one group's bucket: `num` of them on all of its ranks together."""

    rows: int
    cols: int
    how: str
    num: float
    flops: int


class _Group(NamedTuple):
    """One bucket of one group, all ranks together, and what one of its ranks is told of it."""

    bucket: BucketCount
    kinds: tuple[_Kind, ...]

    @property
    def elements(self) -> float:
        return sum(k.num * k.rows * k.cols for k in self.kinds)

    @property
    def largest(self) -> int:
        return max((k.rows * k.cols for k in self.kinds), default=0)


def peers(exact: Exact, hardware: Hardware, price: Price) -> tuple[Peer, ...]:
    """Ours and others, ours first."""
    rank = max(exact.classes, key=lambda c: (c.muon_elements + c.adamw_elements, -c.example))
    uses = Uses()
    groups = _groups(exact, rank)
    ours = Peer(
        "shardmuon",
        "each matrix once, on one rank",
        max(c.stored.momentum + c.stored.moments for c in exact.classes),
        max(c.sent for c in exact.classes),
        exact.heaviest.flops,
        max(c.peak for c in exact.classes),
        price.step,
        True,
    )
    first = hardware.facts["host_step"].time
    found = [ours, _adamw(rank, hardware, first, uses), _gather_and_repeat(exact, rank, groups, hardware, first, uses)]
    if exact.mesh.tp > 1:
        found.append(_tp_duplicated(exact, rank, groups, hardware, first, uses))
    if any(group.bucket.exchange for group in groups):
        found.append(_blockwise(rank, groups, hardware, first, uses))
    return tuple(found)


def adamw_step(exact: Exact, hardware: Hardware, uses: Uses) -> Time:
    """Seconds of AdamW on all parameters, of the rank that holds most."""
    rank = max(exact.classes, key=lambda c: (c.muon_elements + c.adamw_elements, -c.example))
    return _adamw(rank, hardware, hardware.facts["host_step"].time, uses).step


def _groups(exact: Exact, rank: RankClass) -> list[_Group]:
    """The buckets of one rank with all matrices of their groups, not only those that it owns itself."""
    found = []
    for bucket in rank.buckets:
        key = identity(rank, bucket)
        same = [(c, b) for c in exact.classes for b in c.buckets if identity(c, b) == key]
        copies = max(1.0, sum(c.count for c, _ in same) / bucket.num_ranks)
        kinds: dict[tuple[int, int, str, int], float] = {}
        for c, b in same:
            for m in b.matrices:
                kind = (m.rows, m.cols, m.how, m.flops)
                kinds[kind] = kinds.get(kind, 0.0) + c.count * m.num / copies
        found.append(_Group(bucket, tuple(_Kind(r, c, how, num, f) for (r, c, how, f), num in kinds.items())))
    return found


def _adamw(rank: RankClass, hardware: Hardware, first: Time, uses: Uses) -> Peer:
    elements = rank.muon_elements + rank.adamw_elements
    step = first.plus(pass_seconds(hardware, "adamw", elements, max(1, elements / 64), 4, uses))
    return Peer("AdamW", "every parameter on its shards, fused", 8 * elements, 0, 0, 0, step, False)


def _elementwise(rank: RankClass, hardware: Hardware, uses: Uses) -> Time:
    """Momentum, weights and AdamW, as for ours."""
    found = NOTHING
    for what, elements in (("pack", rank.muon_elements), ("apply", rank.muon_elements), ("adamw", rank.adamw_elements)):
        found = found.plus(pass_seconds(hardware, what, elements, max(1, elements / 64), 4, uses))
    return found


def _products(
    kinds: tuple[_Kind, ...], part: Callable[[float], float], hardware: Hardware, uses: Uses
) -> tuple[float, Time]:
    """(FLOPs, seconds) of so many of each kind, one after the other as those Muons do."""
    flops, seconds = 0.0, NOTHING
    for kind in kinds:
        num = part(kind.num)
        # On the Gram route `flops` are of the iteration alone: others orthogonalize the matrix itself.
        each = kind.flops if kind.flops >= _standard(kind) // 2 else _standard(kind)
        flops += num * each
        one = product_seconds(hardware, kind.rows, kind.cols, kind.how, 1, each, uses)
        seconds = seconds.plus(one.times(num))
    return flops, seconds


def _standard(kind: _Kind) -> int:
    return flops_of("standard", kind.rows, kind.cols, schedule("keller", None).triples, torch.bfloat16)


def _gather(size: float, num: float, ranks: int, nodes: int, hardware: Hardware, uses: Uses) -> Time:
    """Seconds of gathering, one collective a matrix: a rank receives `size` bytes in all."""
    across = size * (nodes - 1) / nodes if nodes > 1 else 0.0
    latency, wire = exchange_seconds(
        hardware, ranks, round((size - across) / max(num, 1)), round(across / max(num, 1)), 1, nodes > 1, uses
    )
    return latency.plus(wire).times(num)


def _gather_and_repeat(
    exact: Exact, rank: RankClass, groups: list[_Group], hardware: Hardware, first: Time, uses: Uses
) -> Peer:
    """All-gather each matrix in fp32 to every rank, which orthogonalizes all of them (torch.optim.Muon on DTensors)."""
    wire, flops, seconds = 0.0, 0.0, first.plus(_elementwise(rank, hardware, uses))
    for group in groups:
        bucket, ranks = group.bucket, group.bucket.num_ranks
        part = _all if bucket.exchange else _mine(bucket, group)
        more, time = _products(group.kinds, part, hardware, uses)
        flops += more
        seconds = seconds.plus(time)
        if bucket.exchange:
            size = 4 * group.elements - 4 * bucket.held
            wire += size
            seconds = seconds.plus(
                _gather(size, sum(k.num for k in group.kinds), ranks, bucket.num_nodes, hardware, uses)
            )
    return Peer(
        "torch.optim.Muon",
        "gathers every matrix on every rank, and repeats it there",
        rank.stored.momentum + rank.stored.moments,
        round(wire),
        round(flops),
        round(10 * max((g.largest for g in groups), default=0)),
        seconds,
        True,
    )


def _tp_duplicated(
    exact: Exact, rank: RankClass, groups: list[_Group], hardware: Hardware, first: Time, uses: Uses
) -> Peer:
    """Matrices are shared out over data-parallel ranks; tensor-parallel ones gather each in bf16 and all repeat it."""
    tp = exact.mesh.tp
    wire, flops, seconds = 0.0, 0.0, first.plus(_elementwise(rank, hardware, uses))
    for group in groups:
        bucket = group.bucket
        share = min(1.0, tp / bucket.num_ranks) if bucket.exchange else 1.0
        part = _share(share) if bucket.exchange else _mine(bucket, group)
        more, time = _products(group.kinds, part, hardware, uses)
        flops += more
        seconds = seconds.plus(time)
        if bucket.exchange:
            size = 2 * group.elements * share * (tp - 1) / tp
            nodes = -(-tp // exact.mesh.gpus_per_node)
            wire += size
            num = sum(k.num for k in group.kinds) * share
            seconds = seconds.plus(_gather(size, num, tp, nodes, hardware, uses))
    return Peer(
        "TP-duplicated",
        "shares out over data-parallel ranks; tensor-parallel ones gather and all repeat (Megatron's default)",
        rank.stored.momentum + rank.stored.moments,
        round(wire),
        round(flops),
        round(6 * max((g.largest for g in groups), default=0)),
        seconds,
        True,
    )


def _blockwise(rank: RankClass, groups: list[_Group], hardware: Hardware, first: Time, uses: Uses) -> Peer:
    """Each rank orthogonalizes its own shard: nothing moves, and it is another update."""
    flops, seconds = 0.0, first.plus(_elementwise(rank, hardware, uses))
    coefficients = schedule("keller", None).triples
    for group in groups:
        bucket = group.bucket
        for kind in group.kinds:
            num = kind.num if bucket.exchange else _mine(bucket, group)(kind.num)
            rows = max(1, round(kind.rows * min(1.0, bucket.held / group.elements))) if bucket.exchange else kind.rows
            each = flops_of("standard", rows, kind.cols, coefficients, torch.bfloat16)
            flops += num * each
            seconds = seconds.plus(product_seconds(hardware, rows, kind.cols, kind.how, 1, each, uses).times(num))
    return Peer(
        "block-wise",
        "each rank its own block of rows, as if that were the matrix: nothing moves, another update",
        rank.stored.momentum + rank.stored.moments,
        0,
        round(flops),
        0,
        seconds,
        False,
    )


def _all(num: float) -> float:
    return num


def _share(share: float) -> Callable[[float], float]:
    return lambda num: num * share


def _mine(bucket: BucketCount, group: _Group) -> Callable[[float], float]:
    """Of a bucket that moves nothing: as many as this rank orthogonalizes."""
    total = sum(kind.num for kind in group.kinds)
    own = sum(m.num for m in bucket.matrices)
    return _share(own / total if total else 0.0)


__all__ = ["Peer", "adamw_step", "peers"]
