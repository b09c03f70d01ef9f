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
from shardmuon.plan.items import Item, Spec
from shardmuon.plan.machines import SIDES, Machine

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
    storing = {rank for ranks in layout.keepers.values() for rank in ranks}
    replica = [rank for rank in layout.ranks if rank in storing and layout.replica_of[rank] == 0]
    return Spread(len(replica), _on_one_node(replica, per_node), len(first), _on_one_node(first, per_node))


def _on_one_node(ranks: Sequence[int], per_node: int) -> int:
    return max(Counter(rank // per_node for rank in ranks).values(), default=1)


class Priced(NamedTuple):
    """A matrix as its price sees it.

    Attributes:
        owner, replica: The rank that orthogonalizes it, and the number of its replica.
        numel: Its elements.
        batch, ns: How many like it run together, the last batch filled up, and the nanoseconds of a batch.
        spread: Numbers of ranks on which it lies.
    """

    owner: int
    replica: int
    numel: int
    batch: int
    ns: int
    spread: Spread


def priced(item: Item, spec: Spec, spread: Spread, machine: Machine) -> Priced:
    """A matrix or a slice with its owner, or its first one. `spread`: of its layout."""
    if len(item.owners) > 1:
        spread = spread._replace(replicas=1, near=1)
    size, ns = products_of(item.short, item.how, item.cost, machine)
    if item.parts > 1:
        size, ns = 1, ns + _sums_ns(item, spec, machine)
    return Priced(item.owners[0], spec.layout.replica_of[item.owners[0]], item.numel, size, ns, spread)


def products_of(short: int, how: str, flops: int, machine: Machine) -> tuple[int, int]:
    """Size of a batch of matrices with this short side, each of so many floating point operations, and its
    nanoseconds."""
    words = how.split()
    rate = machine.double if "float64" in words else machine.single if "float32" in words else machine.half
    size = 1 if "alone" in words or not machine.launch else min(max(_FULL // short**2, 1), 64)
    size = 1 << (size.bit_length() - 1)
    share = isqrt(_share(short**3, machine) * _share(size * short**3, machine))  # of one, and as large as all together
    return size, max(size * flops * 1000 // (rate * share), _LAUNCHES * machine.launch)


def _share(volume: int, machine: Machine) -> int:
    """The share of the peak that a cubic product of this volume reaches."""
    found = (share for side, share in zip(SIDES, machine.shares, strict=True) if volume <= side**3)
    return next(found, machine.shares[-1])


def _sums_ns(item: Item, spec: Spec, machine: Machine) -> int:
    """Nanoseconds in which the owners of a matrix's slices, ranks of one node, exchange what they add up."""
    slicing, others = spec.slicings[item.matrix], item.parts - 1
    assert slicing is not None, "of a slice"
    latency = (1 + slicing.sums) * (machine.inside + machine.peer * others)
    return latency + slicing.sums * slicing.itemsize * item.short**2 * others * 1000 // machine.link


class Timed(NamedTuple):
    """A bucket with its times.

    Attributes:
        work: Times of a rank that owns least of it.
        computed: Time of products and copies on each of its owners.
        taken: Elements that a rank has of it at most: matrices of its own, and what a relay brings.
    """

    work: pipeline.BucketTimes
    computed: Mapping[int, int]
    taken: int


def timed(matrices: Sequence[Priced], itemsize: int, machine: Machine) -> Timed:
    """The matrices that move in one bucket of the owner route, timed. `itemsize`: bytes of an element on the wire."""
    computed, came, kept, passed_on = (Counter[int]() for _ in range(4))  # the last by replica, the others by owner
    for (owner, size, ns), count in Counter((one.owner, one.batch, one.ns) for one in matrices).items():
        computed[owner] += -(-count // size) * ns
    sent = relayed = 0  # elements of one rank
    for owner, replica, numel, _, _, (holders, _, replicas, _) in matrices:
        came[owner] += numel - numel // holders
        kept[owner] += numel // holders
        passed_on[replica] += numel * (replicas - 1) // holders
        sent += numel // (holders * replicas)
        relayed += (numel - numel // replicas) // holders
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
    held = 1 + kept.total()
    idle, own, half = relayed, max(0, held - sent - relayed), machine.bucket // 2

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
    return Timed(work, computed, max(came[owner] + kept[owner] for owner in kept) + relayed)


def _exchange_ns(size: int, ranks: int, inside: int, machine: Machine) -> int:
    """An exchange in which a rank moves so many bytes, alike to all of so many ranks, some of them in its node."""
    others = max(1, ranks - 1)
    near, far = size * (inside - 1) // others, size * (ranks - inside) // others
    latency = (machine.across if ranks > inside else machine.inside) + machine.peer * (ranks - 1)
    return latency + max(near * 1000 // machine.link, far * 1000 // machine.network)


def step_ns(buckets: Sequence[Timed], also: Iterable[int] = ()) -> int:
    """A step of these buckets, in their order, see [Note: the price of buckets]; timed on some ranks more (`also`)."""
    ranks = [
        [one.work._replace(key=at, orthogonalize=one.computed.get(rank, 0)) for at, one in enumerate(buckets)]
        for rank in dict.fromkeys([*_slowest(buckets), *also])
    ]
    return int(max(course.end for course in pipeline.run(ranks, 0, [0] * len(ranks), 0.5)))


def _slowest(buckets: Sequence[Timed]) -> list[int]:
    """The rank of each bucket that computes longest."""
    return [max(one.computed, key=lambda rank: (one.computed[rank], rank)) for one in buckets]
