"""The price of buckets: nanoseconds of a step on a machine, in whole numbers, so that all ranks find the same. Pure.

[Note: the price of buckets]
    A step of buckets is timed by the loop that carries them out (pipeline.py), on those ranks that have most to compute
    in any of them. Exchanges move what the rank moves that sends or gets most. Half of an exchange passes beside
    products, which nobody knows better.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import isqrt
from typing import NamedTuple

from shardmuon.layout.table import ParamLayout
from shardmuon.plan import pipeline
from shardmuon.plan.machines import SIDES, Machine
from shardmuon.plan.slices import Slicing

_FULL = 3 << 20  # elements of Gram matrices that run together, see `orthogonalize.slots`
_LAUNCHES = 30  # of five steps
_PACKS, _APPLIES, _FILLS = 30, 26, 12  # bytes that pass through memory for an element, see `foresight.hardware`


class Spread(NamedTuple):
    """Numbers of ranks on which the matrices of a layout lie.

    Attributes:
        holders: Number of ranks of one replica.
        inside: Most of them on one node.
        replicas: Number of replicas.
        near: Most replicas on one node.
    """

    holders: int
    inside: int
    replicas: int
    near: int


def spread_of(layout: ParamLayout, per_node: int) -> Spread:
    """Count the ranks of a layout on nodes of `per_node` ranks each: those of its first replica, and the keepers of its
    first piece."""
    first = next(iter(layout.keepers.values()), layout.ranks[:1])
    mates = [
        rank for rank, of_rank in zip(layout.ranks, layout.held, strict=True) if any(h.piece.numel for h in of_rank)
    ]
    replica = [rank for rank in mates if layout.replica_of[rank] == 0]
    return Spread(len(replica), _on_one_node(replica, per_node), len(first), _on_one_node(first, per_node))


def _on_one_node(ranks: Sequence[int], per_node: int) -> int:
    return max(Counter(rank // per_node for rank in ranks).values(), default=1)


class BatchPrice(NamedTuple):
    """Size and time of a batch of equal matrices, which run in batches of a fixed size, the last one filled up. `ns`:
    nanoseconds of a batch."""

    size: int
    ns: int


class Priced(NamedTuple):
    """A matrix as its price sees it.

    Attributes:
        owner, replica: The rank that orthogonalizes it, and the number of its replica.
        numel: Its elements.
        products: Batches of matrices like it.
        spread: Numbers of ranks on which it lies.
    """

    owner: int
    replica: int
    numel: int
    products: BatchPrice
    spread: Spread


def products_of(short: int, how: str, flops: int, machine: Machine) -> BatchPrice:
    """Batches of matrices with this short side, each of so many floating point operations."""
    words = how.split()
    rate = machine.double if "float64" in words else machine.single if "float32" in words else machine.half
    size = 1 if "alone" in words or not machine.launch else min(max(_FULL // short**2, 1), 64)
    size = 1 << (size.bit_length() - 1)
    filled = next(side for side in range(short, 5 * short) if side**3 >= size * short**3)  # as large as all together
    share = isqrt(_share(short, machine) * _share(filled, machine))
    return BatchPrice(size, max(size * flops * 1000 // (rate * share), _LAUNCHES * machine.launch))


def _share(short: int, machine: Machine) -> int:
    return next((share for side, share in zip(SIDES, machine.shares, strict=True) if short <= side), machine.shares[-1])


def sums_ns(short: int, parts: int, slicing: Slicing, machine: Machine) -> int:
    """Nanoseconds in which the owners of a matrix's slices, ranks of one node, exchange what they add up."""
    latency = (1 + slicing.sums) * (machine.inside + machine.peer * (parts - 1))
    return latency + slicing.sums * slicing.itemsize * short**2 * (parts - 1) * 1000 // machine.link


def bucket_times(
    matrices: Sequence[Priced], itemsize: int, machine: Machine
) -> tuple[pipeline.BucketTimes, Mapping[int, int]]:
    """A bucket of the owner route on a rank that owns least of it, and what products and copies take on its owners.

    Args:
        matrices: The matrices that move in it.
        itemsize: Bytes of an element on the wire.
        machine: The machine by whose rates it is priced.
    """
    alike = Counter((one.owner, one.products) for one in matrices)
    computed, came = Counter[int](), Counter[int]()  # by owner
    for (owner, of_batch), count in alike.items():
        computed[owner] += -(-count // of_batch.size) * of_batch.ns
    kept, passed_on = Counter[int](), Counter[int]()  # what owners store of their own; what ranks of a replica pass on
    sent = relayed = 0  # elements of one rank
    held = 1
    for owner, replica, numel, _, spread in matrices:
        came[owner] += numel - numel // spread.holders
        kept[owner] += numel // spread.holders
        passed_on[replica] += numel * (spread.replicas - 1) // spread.holders
        held += numel // spread.holders
        sent += numel // (spread.holders * spread.replicas)
        relayed += (numel - numel // spread.replicas) // spread.holders
    for owner, elements in came.items():
        computed[owner] += 4 * itemsize * elements * 1000 // machine.memory
    most = max(one.spread for one in matrices)
    if len(kept) >= most.holders * most.replicas:  # nobody owns nothing
        sent -= min(sent, min(kept.values()))
    gather = relay = None
    copied = 0  # nanoseconds, to what the relay sends
    if most.holders > 1:
        gather = _exchange_ns(itemsize * max(sent, *came.values()), most.holders, most.inside, machine)
    if most.replicas > 1:
        replicas, near = max(one.spread[2:] for one in matrices)
        size = itemsize * max(relayed, *passed_on.values())
        relay, copied = _exchange_ns(size, replicas, near, machine), 2 * size * 1000 // machine.memory
    idle, own = relayed, max(0, held - sent - relayed)
    half = machine.bucket // 2

    def passed(each: int, elements: int) -> int:  # bytes for each of them; and its share of the host's work
        return each * elements * 1000 // machine.memory + machine.matrix * len(matrices) * elements // (2 * held)

    work = pipeline.BucketTimes(
        key=0,
        pack=half + passed(_PACKS, sent),
        gather=gather,
        orthogonalize=0,
        scatter=gather,
        apply=half + passed(_APPLIES, held - idle) + copied,
        fill=passed(_PACKS, own) + passed(_FILLS, idle),
        relay=relay,
        finish=0 if relay is None else half + passed(_APPLIES, idle),
    )
    return work, computed


def taken_by(matrices: Sequence[Priced]) -> int:
    """Elements that a rank has of a bucket at most: matrices of its own, and what a relay brings."""
    owned = Counter[int]()
    for one in matrices:
        owned[one.owner] += one.numel
    return max(owned.values()) + sum(
        (one.numel - one.numel // one.spread.replicas) // one.spread.holders for one in matrices
    )


def _exchange_ns(size: int, ranks: int, inside: int, machine: Machine) -> int:
    """An exchange in which a rank moves so many bytes, alike to all of so many ranks, some of them in its node."""
    others = max(1, ranks - 1)
    near, far = size * (inside - 1) // others, size * (ranks - inside) // others
    latency = (machine.across if ranks > inside else machine.inside) + machine.peer * (ranks - 1)
    return latency + max(near * 1000 // machine.link, far * 1000 // machine.network)


def least_ns(buckets: Sequence[tuple[pipeline.BucketTimes, Mapping[int, int]]]) -> int:
    """A bound of `step_ns` in any order: the work of the busiest rank, or all exchanges one after the other."""
    works = [work for work, _ in buckets]
    busiest = max(sum(computed.get(rank, 0) for _, computed in buckets) for rank in _slowest(buckets))
    own = busiest + sum(work.pack + work.fill + work.apply + work.finish for work in works)
    return int(max(own, sum((work.gather or 0) + (work.scatter or 0) + (work.relay or 0) for work in works)))


def step_ns(buckets: Sequence[tuple[pipeline.BucketTimes, Mapping[int, int]]], also: Iterable[int] = ()) -> int:
    """A step of these buckets, in their order, see [Note: the price of buckets]; timed on some ranks more (`also`)."""
    ranks = [
        [
            work._replace(key=number, orthogonalize=computed.get(rank, 0))
            for number, (work, computed) in enumerate(buckets)
        ]
        for rank in {**_slowest(buckets), **dict.fromkeys(also)}
    ]
    return int(max(course.end for course in pipeline.run(ranks, 0, [0] * len(ranks), 0.5)))


def _slowest(buckets: Sequence[tuple[pipeline.BucketTimes, Mapping[int, int]]]) -> dict[int, None]:
    """The rank of each bucket that computes longest."""
    return dict.fromkeys(max(computed, key=lambda rank: (computed[rank], rank)) for _, computed in buckets)
