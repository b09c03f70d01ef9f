"""Buckets: split matrices into groups that are processed together, with work for every owner in each, at the lowest
price. Pure.

[Note: the price of buckets]
    A step is timed by simulating the loop that executes its buckets (pipeline.py), on the ranks that have most to
    compute in any bucket. An exchange takes the time of the rank that sends or receives most. Half of an exchange is
    assumed to overlap with computation, for want of a better estimate. Prices are integer nanoseconds on a machine, so
    that all ranks get the same results.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isqrt
from typing import NamedTuple

from shardmuon.errors import ranks_text
from shardmuon.layout.table import ParamLayout, Ranks
from shardmuon.plan import pipeline
from shardmuon.plan.items import Bucket, Item, Key, Policy, Spec
from shardmuon.plan.machines import SIDES, Machine

_NUMS = (*range(1, 21), 24, 32)  # numbers of buckets to try
_TAILS = (1, 2, 4)
_LEAST_BYTES = 32 * 2**20
_IN_CACHE = 4 * 2**20  # bytes of a local bucket on a CPU, so that its temporaries stay in the cache
_OF_MOMENTUM = 32  # a local bucket may have as many bytes as momentum in fp32 divided by this
_NO_DEARER = 102  # most percent of the cheapest price that a choice with less memory may cost

_Share = list[Item]  # the matrices of a bucket


class Way(NamedTuple):
    """One choice of owners and buckets for the matrices of a set.

    Attributes:
        items: The matrices with their owners.
        moving: The buckets of the matrices that move.
        ns: Price of a step in nanoseconds, without matrices on one rank alone, see [Note: the price of buckets].
        notes: Lines for the printed plan on the choice and its alternatives.
    """

    items: Sequence[Item]
    moving: Mapping[Bucket, list[_Share]]
    ns: int
    notes: tuple[str, ...]


def cheapest(specs: Sequence[Spec], items: Sequence[Item], policy: Policy) -> Way:
    """Choose the cheapest buckets for the matrices of a set with these owners."""
    total, moving, notes = 0, dict[Bucket, list[_Share]](), list[str]()
    prices = _prices(specs, items, policy.machine)
    for alike, share in _together(specs, items).items():
        if alike.exchange:
            moving[alike], ns, note = _by_price(alike, share, prices, policy)
            notes.append(note)
            total += ns
        elif len(alike.ranks) > 1:
            total += max(_timed([prices[item.key] for item in share], alike.itemsize, policy.machine).computed.values())
    return Way(items, moving, total, tuple(notes))


def in_order(specs: Sequence[Spec], items: Sequence[Item], ways: Sequence[Way], policy: Policy) -> list[Bucket]:
    """All buckets of a plan with these items.

    Half of a rank's local buckets come before all buckets that move and half after them, to overlap with gathers and
    scatters. None come in between: ranks without local buckets there would post the exchanges of a set in another
    order.
    """
    number = {item.key: n for n, item in enumerate(items)}

    def made(alike: Bucket, shares: Iterable[_Share]) -> list[Bucket]:
        return [
            alike._replace(
                items=tuple(sorted(number[item.key] for item in share)),
                gathers=alike.exchange and any(_gathered(specs[item.param], item) for item in share),
            )
            for share in shares
        ]

    before, between, behind = list[Bucket](), list[Bucket](), list[Bucket]()
    for alike, share in sorted(_together(specs, (item for item in items if item.route == "local")).items()):
        of_rank = made(alike, _local(alike, share, policy))
        before += of_rank[: (len(of_rank) + 1) // 2]
        behind += of_rank[(len(of_rank) + 1) // 2 :]
    moving = {alike: shares for way in ways for alike, shares in way.moving.items()}
    for alike in sorted(moving):
        between += made(alike, moving[alike])
    return [*before, *between, *behind]


def _together(specs: Sequence[Spec], items: Iterable[Item]) -> dict[Bucket, _Share]:
    """Group matrices that may share a bucket, by the bucket's common properties."""
    found: dict[Bucket, _Share] = {}
    for item in items:
        spec = specs[item.param]
        ranks = item.owners if item.route == "local" else spec.layout.ranks
        alike = Bucket(ranks, item.route, len(item.owners), spec.kind, spec.itemsizes[item.matrix])
        found.setdefault(alike, []).append(item)
    return found


def _local(alike: Bucket, share: _Share, policy: Policy) -> list[_Share]:
    """Split local matrices into buckets: as few as memory allows, and small ones on a CPU."""
    of_momentum = 4 * sum(item.numel for item in share) // _OF_MOMENTUM
    least = _IN_CACHE if alike.kind == "cpu" else max(_LEAST_BYTES, of_momentum)
    most = (policy.bucket_bytes or least) // alike.itemsize
    return _shares_of(_lines(share), max(1, most), 1)[::-1]


def _by_price(
    alike: Bucket, items: _Share, prices: Mapping[Key, _Priced], policy: Policy
) -> tuple[list[_Share], int, str]:
    """Split moving matrices into buckets: the split with the least memory among those that are hardly dearer than the
    cheapest. Returns the buckets, their price in nanoseconds, and a line for the printed plan."""
    # keys: most elements on a rank, number of buckets, nanoseconds
    found = dict[tuple[int, int, int], list[_Share]]()
    for shares in _cuts(alike, items, prices, policy):
        buckets = [_timed([prices[i.key] for i in share], alike.itemsize, policy.machine) for share in shares]
        taken = max(bucket.taken for bucket in buckets)
        for step in (1, -1)[: len(shares)]:  # smallest buckets first, or last
            found.setdefault((taken, len(shares), _step_ns(buckets[::step])), shares[::step])
    limit = min(ns for *_, ns in found) * _NO_DEARER
    best = min(option for option in found if option[2] * 100 <= limit)
    taken, num, ns = best
    return (
        found[best],
        ns,
        (
            f"ranks {ranks_text(alike.ranks)}: {num} buckets by price ({policy.machine.name}), "
            f"of {alike.itemsize * taken / 2**20:.3g} MiB a rank at most"
        ),
    )


def _cuts(alike: Bucket, items: _Share, prices: Mapping[Key, _Priced], policy: Policy) -> Iterator[list[_Share]]:
    """The splits to try: different numbers of waves, each wave whole or split by owners."""
    most = sum(item.numel for item in items)
    if policy.bucket_bytes:
        most = max(1, policy.bucket_bytes // alike.itemsize)
    tails = _TAILS if any(prices[item.key].spread.replicas > 1 for item in items) else (1,)
    lines, known = _lines(items), 0
    for least in _NUMS:
        waves = _shares_of(lines, most, least)[::-1]
        if len(waves) > known:
            yield from (_narrowed(waves, tail, prices) for tail in tails)
        known = len(waves)
        if known == max(map(len, lines)):
            break


def _gathered(spec: Spec, item: Item) -> bool:
    """True if a matrix needs a gather and a scatter; False if its owner stores it whole and no stage state is sent."""
    stored = spec.layout.tiles[item.matrix].get(item.owners[0], ())
    return sum(tile.numel for tile in stored) < item.numel or any(kept.travels for kept in spec.kept)


# ---------------------------------------------------------------------------------------------------------- the shares


def _lines(items: Iterable[Item]) -> list[_Share]:
    """The matrices of each owner, costliest first."""
    lines: dict[Ranks, _Share] = {}
    for item in sorted(items, key=lambda item: (-item.cost, item.rows, item.cols, item.key)):
        lines.setdefault(item.owners, []).append(item)
    return list(lines.values())


def _narrowed(waves: Sequence[_Share], tail: int, prices: Mapping[Key, _Priced]) -> list[_Share]:
    """Split waves by owners, the last wave into `tail` parts and the others into half as many, so that relays begin
    early and the last relay is short. The owners of each replica are spread evenly over the parts, since the replica
    relays the results of its owners."""
    found: list[_Share] = []
    for wave in waves:
        lines: dict[tuple[int, int], _Share] = {}  # by (replica, owner)
        for item in wave:
            one = prices[item.key]
            lines.setdefault((one.replica, one.owner), []).append(item)
        shares: list[_Share] = [[] for _ in range(tail if wave is waves[-1] else max(1, tail // 2))]
        dealt = Counter[int]()  # owners placed so far, by replica
        for at in sorted(lines, key=lambda at: (-sum(item.cost for item in lines[at]), at)):
            shares[dealt[at[0]] % len(shares)] += lines[at]
            dealt[at[0]] += 1
        found += filter(None, shares)
    return found


def _shares_of(lines: Sequence[_Share], most: int, least: int) -> list[_Share]:
    """Split the matrices of all owners into as few shares as possible, but at least `least` if there are enough
    matrices, so that no owner has more than `most` elements in a share, unless it is a single matrix. Within these
    limits each owner has equal work in all shares."""
    needed = [_needed([item.numel for item in line], most) for line in lines]
    num = max(least, *(of_line[0] for of_line in needed))
    cut = [_cut(line, of_line, most, num) for line, of_line in zip(lines, needed, strict=True)]
    shares = [[item for part in parts for item in part] for parts in zip(*cut, strict=True)]
    return [share for share in shares if share]


def _needed(sizes: Sequence[int], most: int) -> list[int]:
    """For each position in a list of sizes, the fewest shares of at most `most` elements that cover the rest of the
    list; 0 at the end."""
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
    """Split one owner's matrices, in order, into `num` shares of about equal work, with as few empty shares as
    possible."""
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

_FULL = 3 << 20  # elements of the Gram matrices of one batch, see `orthogonalize.slots`
_LAUNCHES = 30  # kernel launches of five Newton-Schulz steps
_PACKS, _APPLIES, _FILLS = 30, 26, 12  # bytes of memory traffic per element, see `foresight.hardware`


class _Spread(NamedTuple):
    """Counts of the ranks that store the matrices of a layout.

    Attributes:
        holders: Number of ranks of one replica.
        inside: Most ranks of one replica on one node.
        replicas: Number of replicas.
        near: Most replicas on one node.
    """

    holders: int
    inside: int
    replicas: int
    near: int


class _Priced(NamedTuple):
    """Properties of a matrix that its price depends on.

    Attributes:
        owner, replica: The owner (the first, if each replica has one), and the index of the owner's replica.
        numel: Number of elements.
        batch, ns: Number of such matrices in one batch, and nanoseconds per batch, also for a partly filled one.
        spread: Counts of the ranks that store the matrix.
    """

    owner: int
    replica: int
    numel: int
    batch: int
    ns: int
    spread: _Spread


def _prices(specs: Sequence[Spec], items: Iterable[Item], machine: Machine) -> dict[Key, _Priced]:
    spreads, found = dict[ParamLayout, _Spread](), dict[Key, _Priced]()
    for item in items:
        layout, owner = specs[item.param].layout, item.owners[0]
        if layout not in spreads:
            spreads[layout] = _spread_of(layout, machine.per_node)
        spread = spreads[layout]._replace(replicas=1, near=1) if len(item.owners) > 1 else spreads[layout]
        batch = _products_of(item.short, item.how, item.cost, machine)
        found[item.key] = _Priced(owner, layout.replica_of[owner], item.numel, *batch, spread)
    return found


def _spread_of(layout: ParamLayout, per_node: int) -> _Spread:
    """Count the ranks of a layout, on nodes of `per_node` ranks: the ranks of its first replica, and the ranks that
    store its first piece."""
    first = next(iter(layout.keepers.values()), layout.ranks[:1])
    replica = [rank for rank in layout.ranks if layout.pieces[rank] and layout.replica_of[rank] == 0]
    on_nodes = (Counter(rank // per_node for rank in ranks).values() for ranks in (replica, first))
    inside, near = (max(counts, default=1) for counts in on_nodes)
    return _Spread(len(replica), inside, len(first), near)


def _products_of(short: int, how: str, flops: int, machine: Machine) -> tuple[int, int]:
    """Batch size for matrices with this short side, and nanoseconds of a batch. `flops`: floating point operations of
    one matrix."""
    words = how.split()
    rate = machine.double if "float64" in words else machine.single if "float32" in words else machine.half
    size = 1 if not machine.launch else min(max(_FULL // short**2, 1), 64)
    size = 1 << (size.bit_length() - 1)
    # geometric mean of the shares for one matrix and for a product as large as the whole batch
    share = isqrt(_share(short**3, machine) * _share(size * short**3, machine))
    return size, max(size * flops * 1000 // (rate * share), _LAUNCHES * machine.launch)


def _share(volume: int, machine: Machine) -> int:
    """Thousandths of the peak reached by products of square matrices with this volume (side**3)."""
    found = (share for side, share in zip(SIDES, machine.shares, strict=True) if volume <= side**3)
    return next(found, machine.shares[-1])


class _Timed(NamedTuple):
    """Times and memory of a bucket.

    Attributes:
        work: Times of its phases, without orthogonalization, on the rank that owns least of it.
        computed: Owner -> time of its products and of the copies around them.
        taken: Most elements on a rank: its own matrices, and results received by the relay.
    """

    work: pipeline.BucketTimes
    computed: Mapping[int, int]
    taken: int


def _timed(matrices: Sequence[_Priced], itemsize: int, machine: Machine) -> _Timed:
    """Estimate times and memory of a bucket of matrices. `itemsize`: bytes per element on the wire."""
    computed, came, kept, passed_on = (Counter[int]() for _ in range(4))  # passed_on by replica, the rest by owner
    for (owner, size, ns), count in Counter((one.owner, one.batch, one.ns) for one in matrices).items():
        computed[owner] += -(-count // size) * ns
    sent = relayed = 0  # elements per rank
    for owner, replica, numel, _, _, (holders, _, replicas, _) in matrices:
        came[owner] += numel - numel // holders
        kept[owner] += numel // holders
        passed_on[replica] += numel * (replicas - 1) // holders
        sent += numel // (holders * replicas)
        relayed += (numel - numel // replicas) // holders
    for owner, elements in came.items():
        computed[owner] += 4 * itemsize * elements * 1000 // machine.memory
    most = max(one.spread for one in matrices)
    if len(kept) >= most.holders * most.replicas:  # every rank owns some matrix
        sent -= min(sent, min(kept.values()))
    gather = relay = None
    copied = 0  # nanoseconds of copying to the relay's send buffer
    if most.holders > 1:
        gather = _exchange_ns(itemsize * max(sent, *came.values()), most.holders, most.inside, machine)
    if most.replicas > 1:
        replicas, near = max(one.spread[2:] for one in matrices)
        size = itemsize * max(relayed, *passed_on.values())
        relay, copied = _exchange_ns(size, replicas, near, machine), 2 * size * 1000 // machine.memory
    held = 1 + kept.total()
    idle, own, half = relayed, max(0, held - sent - relayed), machine.bucket // 2

    def passed(each: int, elements: int) -> int:  # time of `each` bytes per element, and of the host's share of work
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
    """Nanoseconds of an exchange of `size` bytes per rank, spread evenly over `ranks` ranks, `inside` of them on one
    node."""
    others = max(1, ranks - 1)
    near, far = size * (inside - 1) // others, size * (ranks - inside) // others
    latency = (machine.across if ranks > inside else machine.inside) + machine.peer * (ranks - 1)
    return latency + max(near * 1000 // machine.link, far * 1000 // machine.network)


def _step_ns(buckets: Sequence[_Timed]) -> int:
    """Nanoseconds of a step of these buckets, in this order, see [Note: the price of buckets]."""
    slowest = [max(one.computed, key=lambda rank: (one.computed[rank], rank)) for one in buckets]
    ranks = [
        [one.work._replace(key=at, orthogonalize=one.computed.get(rank, 0)) for at, one in enumerate(buckets)]
        for rank in dict.fromkeys(slowest)
    ]
    return int(max(course.end for course in pipeline.run(ranks, 0, [0] * len(ranks), 0.5)))
