"""Buckets: matrices that move, or stay, together, cut so that every owner has work in each; the cheapest cut. Pure.

[Note: the price of buckets]
    A step of buckets is timed by the loop that carries them out (pipeline.py), on those ranks that have most to compute
    in any of them. Exchanges move what the rank moves that sends or gets most. Half of an exchange passes beside
    products, which nobody knows better. Prices are nanoseconds on a machine, in whole numbers, so that all ranks find
    the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isqrt
from typing import NamedTuple

from shardmuon.layout.table import ParamLayout, Ranks
from shardmuon.plan import pipeline
from shardmuon.plan.items import Bucket, Item, Key, Policy, Spec
from shardmuon.plan.machines import SIDES, Machine

_NUMS = (*range(1, 21), 24, 32)  # of buckets, that are tried
_TAILS = (1, 2, 4)
_LEAST_BYTES = 32 * 2**20
_IN_CACHE = 4 * 2**20  # bytes of a bucket on a CPU that moves nowhere: what is made for it stays in a cache
_OF_MOMENTUM = 32  # a bucket of what moves nowhere may have one part of so many
_NO_DEARER = 102  # percent of the cheapest that a plan which takes less memory may cost

_Share = list[Item]  # the matrices of a bucket


class Chosen(NamedTuple):
    """A choice by price, the nanoseconds of a step of what was chosen, and a line about it and what else there was."""

    ranks: Ranks
    ns: int
    text: str


class Way(NamedTuple):
    """The matrices of a set with their owners.

    Attributes:
        items: The matrices.
        moving: The buckets of those that move.
        ns: Nanoseconds of a step of all of them, without what lies on one rank alone, see [Note: the price of buckets].
        choices: What was chosen.
    """

    items: Sequence[Item]
    moving: Mapping[Bucket, list[_Share]]
    ns: int
    choices: tuple[Chosen, ...]


class Cutter:
    """Cuts the matrices of a plan into buckets."""

    def __init__(self, specs: Sequence[Spec], policy: Policy) -> None:
        self._specs, self._policy = specs, policy
        self._spreads: dict[ParamLayout, _Spread] = {}

    def way(self, items: Sequence[Item]) -> Way:
        """The cheapest buckets of a set."""
        total, moving, choices = 0, dict[Bucket, list[_Share]](), list[Chosen]()
        for alike, share in self._together(items).items():
            prices = {item.key: self.priced(item) for item in share}
            if alike.exchange:
                moving[alike], choice = self._cheapest(alike, share, prices)
                choices.append(choice)
                total += choice.ns
            elif len(alike.ranks) > 1:
                total += max(_timed(list(prices.values()), alike.itemsize, self._policy.machine).computed.values())
        return Way(items, moving, total, tuple(choices))

    def in_order(self, items: Sequence[Item], ways: Sequence[Way]) -> list[Bucket]:
        """All buckets of a plan with these items.

        Half of what a rank orthogonalizes where it lies comes before all that moves, and half behind it, for gathers
        and scatters to pass by. Nothing of it comes in between: ranks that have nothing there would post the exchanges
        of a set in another order.
        """
        number: dict[Key, int] = {item.key: n for n, item in enumerate(items)}

        def made(alike: Bucket, share: _Share) -> Bucket:
            gathers = alike.exchange and any(_gathered(self._specs[item.param], item) for item in share)
            return alike._replace(items=tuple(sorted(number[item.key] for item in share)), gathers=gathers)

        before, behind = list[Bucket](), list[Bucket]()
        for alike, share in sorted(self._together(item for item in items if item.route == "local").items()):
            of_rank = [made(alike, one) for one in self._local(alike, share)]
            before += of_rank[: (len(of_rank) + 1) // 2]
            behind += of_rank[(len(of_rank) + 1) // 2 :]
        moving = [of_set for way in ways for of_set in way.moving.items()]
        between = [made(alike, share) for alike, shares in sorted(moving, key=lambda one: one[0]) for share in shares]
        return [*before, *between, *behind]

    def _together(self, items: Iterable[Item]) -> dict[Bucket, _Share]:
        """Matrices that may be in one bucket, by what they share of it."""
        found: dict[Bucket, _Share] = {}
        for item in items:
            spec = self._specs[item.param]
            itemsize = spec.itemsizes[item.matrix] if spec.itemsizes else 4
            ranks = item.owners if item.route == "local" else spec.layout.ranks
            found.setdefault(Bucket(ranks, item.route, len(item.owners), spec.kind, itemsize), []).append(item)
        return found

    def _local(self, alike: Bucket, share: _Share) -> list[_Share]:
        """The buckets of what moves nowhere: as few as memory allows, and small ones on a CPU."""
        of_momentum = 4 * sum(item.numel for item in share) // _OF_MOMENTUM
        least = _IN_CACHE if alike.kind == "cpu" else max(_LEAST_BYTES, of_momentum)
        most = (self._policy.bucket_bytes or least) // alike.itemsize
        return _shares_of(_lines(share), max(1, most), 1)[::-1]

    def _cheapest(self, alike: Bucket, items: _Share, prices: Mapping[Key, _Priced]) -> tuple[list[_Share], Chosen]:
        """The buckets of what moves: of those that are hardly dearer than the cheapest, what takes least memory."""
        machine, found = self._policy.machine, dict[tuple[int, int, int], list[_Share]]()
        for shares in self._cuts(alike, items, prices):
            buckets = [_timed([prices[item.key] for item in share], alike.itemsize, machine) for share in shares]
            taken = alike.itemsize * max(bucket.taken for bucket in buckets)
            for step in (1, -1)[: len(shares)]:  # those with least first, or last
                found.setdefault((taken, len(shares), _step_ns(buckets[::step])), shares[::step])
        limit = min(ns for *_, ns in found) * _NO_DEARER
        best = min(option for option in found if option[2] * 100 <= limit)
        text = f"{best[1]} buckets by price ({machine.name}), of {best[0] / 2**20:.3g} MiB a rank at most; "
        beside = "there are no others"
        if len(found) > 1:
            most, num, ns = min((option for option in found if option != best), key=lambda option: option[2])
            beside = f"next best {num}, {ns / best[2]:.3g}x as long, {most / 2**20:.3g} MiB"
        return found[best], Chosen(alike.ranks, best[2], text + beside)

    def _cuts(self, alike: Bucket, items: _Share, prices: Mapping[Key, _Priced]) -> Iterator[list[_Share]]:
        """The cuts that are tried: in so many waves, and these whole or cut by owners."""
        most = sum(item.numel for item in items)
        if self._policy.bucket_bytes:
            most = max(1, self._policy.bucket_bytes // alike.itemsize)
        lines, known = _lines(items), 0
        for least in _NUMS:
            waves = _shares_of(lines, most, least)[::-1]
            if len(waves) > known:
                for tail in _TAILS if any(one.spread.replicas > 1 for one in prices.values()) else (1,):
                    yield _narrowed(waves, tail, prices)
            known = len(waves)
            if known == max(map(len, lines)):
                break

    def priced(self, item: Item) -> _Priced:
        """A matrix with its owner, or its first one, as its price sees it."""
        spec, machine = self._specs[item.param], self._policy.machine
        if spec.layout not in self._spreads:
            self._spreads[spec.layout] = _spread_of(spec.layout, machine.per_node)
        spread = self._spreads[spec.layout]
        if len(item.owners) > 1:
            spread = spread._replace(replicas=1, near=1)
        size, ns = _products_of(item.short, item.how, item.cost, machine)
        return _Priced(item.owners[0], spec.layout.replica_of[item.owners[0]], item.numel, size, ns, spread)


def _gathered(spec: Spec, item: Item) -> bool:
    """False if the owner has all that it needs, and nobody else in its replica awaits a result."""
    stored = spec.layout.tiles[item.matrix].get(item.owners[0], ())
    return sum(tile.numel for tile in stored) < item.numel or any(kept.travels for kept in spec.kept)


# ---------------------------------------------------------------------------------------------------------- the shares


def _lines(items: Iterable[Item]) -> list[_Share]:
    """The matrices of each owner, the costliest first."""
    lines: dict[Ranks, _Share] = {}
    for item in sorted(items, key=lambda item: (-item.cost, item.rows, item.cols, item.key)):
        lines.setdefault(item.owners, []).append(item)
    return list(lines.values())


def _narrowed(waves: Sequence[_Share], tail: int, prices: Mapping[Key, _Priced]) -> list[_Share]:
    """The waves cut by owners, the last one in `tail` parts, others in half as many, so that relays begin early and the
    last of them is short. Owners of each replica are dealt out alike, since it relays what they own."""
    found: list[_Share] = []
    for wave in waves:
        lines: dict[tuple[int, int], _Share] = {}  # of replica and owner
        for item in wave:
            one = prices[item.key]
            lines.setdefault((one.replica, one.owner), []).append(item)
        shares: list[_Share] = [[] for _ in range(tail if wave is waves[-1] else max(1, tail // 2))]
        dealt = Counter[int]()  # of each replica
        for at in sorted(lines, key=lambda at: (-sum(item.cost for item in lines[at]), at)):
            shares[dealt[at[0]] % len(shares)] += lines[at]
            dealt[at[0]] += 1
        found += filter(None, shares)
    return found


def _shares_of(lines: Sequence[_Share], most: int, least: int) -> list[_Share]:
    """Cut the lines of all owners into so few shares, `least` if there are matrices for them, that no owner has more
    than `most` elements in one, unless that is a single matrix. Every owner has equal work in each, as far as that and
    its matrices allow."""
    needed = [_needed([item.numel for item in line], most) for line in lines]
    num = max(least, *(of_line[0] for of_line in needed))
    cut = [_cut(line, of_line, most, num) for line, of_line in zip(lines, needed, strict=True)]
    shares = [[item for part in parts for item in part] for parts in zip(*cut, strict=True)]
    return [share for share in shares if share]


def _needed(sizes: Sequence[int], most: int) -> list[int]:
    """The fewest shares of at most `most` elements each that cover a line of sizes to its end, from each position in
    it; 0 at the end."""
    found = [0] * (len(sizes) + 1)
    end, filled = len(sizes), 0
    for start in range(len(sizes) - 1, -1, -1):
        filled += sizes[start]
        while filled > most and end > start + 1:
            end -= 1
            filled -= sizes[end]
        found[start] = 1 + found[end]
    return found


def _cut(line: _Share, needed: Sequence[int], most: int, num: int) -> list[_Share]:
    """One owner's matrices, in order, in `num` shares of equal work; none is empty that need not be."""
    parts: list[_Share] = [[] for _ in range(num)]
    left, share, work, filled = sum(item.cost for item in line), 0, 0, 0
    for place, item in enumerate(line):
        behind = num - share - 1  # shares that follow this one
        if parts[share] and behind and needed[place] <= behind:
            enough = work * (behind + 1) >= left
            if enough or filled + item.numel > most or len(line) - place <= behind:
                left, share, work, filled = left - work, share + 1, 0, 0
        parts[share].append(item)
        work += item.cost
        filled += item.numel
    return parts


# ---------------------------------------------------------------------------------------------------------- the price

_FULL = 3 << 20  # elements of Gram matrices that run together, see `orthogonalize.slots`
_LAUNCHES = 30  # of five steps
_PACKS, _APPLIES, _FILLS = 30, 26, 12  # bytes that pass through memory for an element, see `foresight.hardware`


class _Spread(NamedTuple):
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


def _spread_of(layout: ParamLayout, per_node: int) -> _Spread:
    """Count the ranks of a layout on nodes of `per_node` ranks each: those of its first replica, and the keepers of its
    first piece."""
    first = next(iter(layout.keepers.values()), layout.ranks[:1])
    storing = {rank for ranks in layout.keepers.values() for rank in ranks}
    replica = [rank for rank in layout.ranks if rank in storing and layout.replica_of[rank] == 0]
    return _Spread(len(replica), _on_one_node(replica, per_node), len(first), _on_one_node(first, per_node))


def _on_one_node(ranks: Sequence[int], per_node: int) -> int:
    return max(Counter(rank // per_node for rank in ranks).values(), default=1)


class _Priced(NamedTuple):
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
    spread: _Spread


def _products_of(short: int, how: str, flops: int, machine: Machine) -> tuple[int, int]:
    """Size of a batch of matrices with this short side, each of so many floating point operations, and its
    nanoseconds."""
    words = how.split()
    rate = machine.double if "float64" in words else machine.single if "float32" in words else machine.half
    size = 1 if not machine.launch else min(max(_FULL // short**2, 1), 64)
    size = 1 << (size.bit_length() - 1)
    share = isqrt(_share(short**3, machine) * _share(size * short**3, machine))  # of one, and as large as all together
    return size, max(size * flops * 1000 // (rate * share), _LAUNCHES * machine.launch)


def _share(volume: int, machine: Machine) -> int:
    """The share of the peak that a cubic product of this volume reaches."""
    found = (share for side, share in zip(SIDES, machine.shares, strict=True) if volume <= side**3)
    return next(found, machine.shares[-1])


class _Timed(NamedTuple):
    """A bucket with its times.

    Attributes:
        work: Times of a rank that owns least of it.
        computed: Time of products and copies on each of its owners.
        taken: Elements that a rank has of it at most: matrices of its own, and what a relay brings.
    """

    work: pipeline.BucketTimes
    computed: Mapping[int, int]
    taken: int


def _timed(matrices: Sequence[_Priced], itemsize: int, machine: Machine) -> _Timed:
    """The matrices that move in one bucket, timed. `itemsize`: bytes of an element on the wire."""
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
    return _Timed(work, computed, max(came[owner] + kept[owner] for owner in kept) + relayed)


def _exchange_ns(size: int, ranks: int, inside: int, machine: Machine) -> int:
    """An exchange in which a rank moves so many bytes, alike to all of so many ranks, some of them in its node."""
    others = max(1, ranks - 1)
    near, far = size * (inside - 1) // others, size * (ranks - inside) // others
    latency = (machine.across if ranks > inside else machine.inside) + machine.peer * (ranks - 1)
    return latency + max(near * 1000 // machine.link, far * 1000 // machine.network)


def _step_ns(buckets: Sequence[_Timed]) -> int:
    """A step of these buckets, in their order, see [Note: the price of buckets]."""
    slowest = [max(one.computed, key=lambda rank: (one.computed[rank], rank)) for one in buckets]
    ranks = [
        [one.work._replace(key=at, orthogonalize=one.computed.get(rank, 0)) for at, one in enumerate(buckets)]
        for rank in dict.fromkeys(slowest)
    ]
    return int(max(course.end for course in pipeline.run(ranks, 0, [0] * len(ranks), 0.5)))
