"""Estimate the times of a bucket's phases on a machine, from counts of matrices, elements and ranks. All functions are
pure and compute in integer nanoseconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import isqrt
from typing import NamedTuple

from shardmuon.price import clock
from shardmuon.price.machines import SIDES, Machine

_FULL = 3 << 20  # maximum number of elements in the Gram matrices of one batch, see `orthogonalize.slots`
_LAUNCHES = 30  # kernel launches of five Newton-Schulz steps
_PACKS, _APPLIES, _FILLS = 30, 26, 12  # memory traffic of these phases in bytes per element, see `foresight.hardware`


class Spread(NamedTuple):
    """Counts of the ranks that store the matrices of a layout.

    Attributes:
        holders: Number of ranks in one replica.
        inside: Largest number of ranks of one replica on the same node.
        replicas: Number of replicas.
        near: Largest number of replicas on the same node.
    """

    holders: int
    inside: int
    replicas: int
    near: int


class Priced(NamedTuple):
    """Properties of a matrix on which the time to exchange and orthogonalize it depends.

    Attributes:
        owner, replica: Rank that orthogonalizes the matrix (the first, if each replica has one), and the index of this
            rank's replica.
        numel: Number of elements.
        batch, ns: Number of equal matrices in a full batch, and nanoseconds per batch. A partly filled batch takes as
            long as a full one.
        spread: Counts of the ranks that store the matrix.
    """

    owner: int
    replica: int
    numel: int
    batch: int
    ns: int
    spread: Spread


def products_of(short: int, how: str, flops: int, machine: Machine) -> tuple[int, int]:
    """Estimate the batch size for matrices with this short side, and the nanoseconds to orthogonalize a batch. `how`:
    text that names the compute dtype. `flops`: floating point operations for one matrix."""
    words = how.split()
    rate = machine.double if "float64" in words else machine.single if "float32" in words else machine.half
    size = 1 if not machine.launch else min(max(_FULL // short**2, 1), 64)
    size = 1 << (size.bit_length() - 1)
    # a batch is faster than one matrix but slower than a single product of the batch's total size: take the geometric
    # mean of the shares of the peak that the two reach
    share = isqrt(_share(short**3, machine) * _share(size * short**3, machine))
    return size, max(size * flops * 1000 // (rate * share), _LAUNCHES * machine.launch)


def _share(volume: int, machine: Machine) -> int:
    """Return the fraction of the peak, in thousandths, that a product of square matrices reaches. `volume`: side**3."""
    found = (share for side, share in zip(SIDES, machine.shares, strict=True) if volume <= side**3)
    return next(found, machine.shares[-1])


class Timed(NamedTuple):
    """Times and memory of a bucket.

    Attributes:
        work: Times of the bucket's phases without orthogonalization, on the rank that orthogonalizes the fewest
            elements.
        computed: Rank that orthogonalizes matrices (owner) -> time of its matrix products and of the copies around
            them.
        taken: Largest number of elements that any rank holds in buffers: the matrices that it orthogonalizes, and the
            results that it receives in the relay.
    """

    work: clock.BucketTimes
    computed: Mapping[int, int]
    taken: int


def timed(matrices: Sequence[Priced], itemsize: int, machine: Machine) -> Timed:
    """Estimate times and memory of a bucket of matrices. `itemsize`: bytes per element as sent."""
    computed, came, kept, passed_on = (Counter[int]() for _ in range(4))  # passed_on: by replica, others: by owner
    for (owner, size, ns), count in Counter((one.owner, one.batch, one.ns) for one in matrices).items():
        computed[owner] += -(-count // size) * ns
    sent = relayed = 0  # elements that each rank sends in the gather, and receives in the relay
    for owner, replica, numel, _, _, (holders, _, replicas, _) in matrices:
        came[owner] += numel - numel // holders
        kept[owner] += numel // holders
        passed_on[replica] += numel * (replicas - 1) // holders
        sent += numel // (holders * replicas)
        relayed += (numel - numel // replicas) // holders
    for owner, elements in came.items():
        computed[owner] += 4 * itemsize * elements * 1000 // machine.memory
    most = max(one.spread for one in matrices)
    if len(kept) >= most.holders * most.replicas:  # every rank owns a matrix and keeps its own part of it
        sent -= min(sent, min(kept.values()))
    gather = relay = None
    copied = 0  # nanoseconds to copy into the relay's send buffer
    if most.holders > 1:
        gather = _exchange_ns(itemsize * max(sent, *came.values()), most.holders, most.inside, machine)
    if most.replicas > 1:
        replicas, near = max(one.spread[2:] for one in matrices)
        size = itemsize * max(relayed, *passed_on.values())
        relay, copied = _exchange_ns(size, replicas, near, machine), 2 * size * 1000 // machine.memory
    held = 1 + kept.total()
    idle, own, half = relayed, max(0, held - sent - relayed), machine.bucket // 2

    def passed(each: int, elements: int) -> int:  # nanoseconds: memory traffic and host
        return each * elements * 1000 // machine.memory + machine.matrix * len(matrices) * elements // (2 * held)

    work = clock.BucketTimes(
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
    """Estimate the nanoseconds of an exchange in which each rank sends `size` bytes, divided evenly among `ranks`
    ranks, of which `inside` are on the same node."""
    others = max(1, ranks - 1)
    near, far = size * (inside - 1) // others, size * (ranks - inside) // others
    latency = (machine.across if ranks > inside else machine.inside) + machine.peer * (ranks - 1)
    return latency + max(near * 1000 // machine.link, far * 1000 // machine.network)


def step_ns(buckets: Sequence[Timed], order: clock.Order) -> int:
    """Estimate the nanoseconds of a step with these buckets, in this order: see [Note: the price of buckets]."""
    slowest = [max(one.computed, key=lambda rank: (one.computed[rank], rank)) for one in buckets]
    ranks = [
        [one.work._replace(key=at, orthogonalize=one.computed.get(rank, 0)) for at, one in enumerate(buckets)]
        for rank in dict.fromkeys(slowest)
    ]
    return int(max(course.end for course in clock.run(ranks, 0, [0] * len(ranks), 0.5, order)))
