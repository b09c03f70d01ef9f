"""Divide matrices into buckets, groups that are processed together, so that a step takes the least time. If possible,
each bucket has work for every owner, that is, every rank that orthogonalizes some of the matrices. All functions are
pure.

[Note: the price of buckets]
    The price of a choice is the estimated time of a step. To find it, `price.clock` simulates the loop that executes
    the buckets, on every rank that has the most to compute in some bucket. An exchange takes as long as it takes the
    rank that sends or receives the most. Half of each exchange is assumed to overlap with computation, for lack of a
    better estimate. Prices are integers (nanoseconds), so that all ranks get the same results.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from shardmuon.comm.groups import Ranks
from shardmuon.errors import ranks_text
from shardmuon.layout.pieces import ParamLayout
from shardmuon.plan.items import Bucket, Item, Key, Policy, Spec
from shardmuon.plan.turns import turns
from shardmuon.price.machines import Machine
from shardmuon.price.timing import Priced, Spread, products_of, step_ns, timed

_NUMS = (*range(1, 21), 24, 32)  # numbers of buckets to try
_TAILS = (1, 2, 4)
_LEAST_BYTES = 32 * 2**20
_IN_CACHE = 4 * 2**20  # largest bucket on a CPU, in bytes, whose temporaries stay in the cache
_OF_MOMENTUM = 32  # a bucket that is not exchanged may have at most 1/32 of the bytes of its rank's fp32 momentum
_NO_DEARER = 102  # a choice that needs less memory may take up to this percentage of the shortest time

_Share = list[Item]  # the matrices of a bucket


class Way(NamedTuple):
    """One choice of owners and buckets for the matrices that a set of ranks shares.

    Attributes:
        items: The matrices with their owners.
        moving: Buckets of matrices that are sent between ranks, grouped by common properties. A key is a bucket without
            items that holds the properties; its value lists the matrices of each bucket with these properties.
        ns: Estimated time of a step in nanoseconds, without matrices that a single rank stores and orthogonalizes.
        notes: Lines for the printed plan that explain the choice.
    """

    items: Sequence[Item]
    moving: Mapping[Bucket, list[_Share]]
    ns: int
    notes: tuple[str, ...]


def cheapest(specs: Sequence[Spec], items: Sequence[Item], policy: Policy) -> Way:
    """Choose the buckets with the least estimated time for the matrices that a set of ranks shares. The ranks that
    orthogonalize the matrices (owners) are already chosen."""
    total, moving, notes = 0, dict[Bucket, list[_Share]](), list[str]()
    prices = _prices(specs, items, policy.machine)
    for alike, share in _together(specs, items).items():
        if alike.exchange:
            moving[alike], ns, note = _by_price(alike, share, prices, policy)
            notes.append(note)
            total += ns
        elif len(alike.ranks) > 1:
            total += max(timed([prices[item.key] for item in share], alike.itemsize, policy.machine).computed.values())
    return Way(items, moving, total, tuple(notes))


def in_order(specs: Sequence[Spec], items: Sequence[Item], ways: Sequence[Way], policy: Policy) -> list[Bucket]:
    """List all buckets of a plan in the order of their execution.

    Half of a rank's local buckets (matrices that are not exchanged) come before all exchanged buckets and half after
    them, so that they overlap with gathers and scatters. No local bucket comes between exchanged buckets: ranks with
    local buckets would then post their exchanges in another order than ranks without.
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
    """Group matrices that may be in the same bucket. The keys are buckets without items, which hold the properties that
    the matrices have in common."""
    found: dict[Bucket, _Share] = {}
    for item in items:
        spec = specs[item.param]
        ranks = item.owners if item.route == "local" else spec.layout.ranks
        alike = Bucket(ranks, item.route, len(item.owners), spec.kind, spec.itemsizes[item.matrix])
        found.setdefault(alike, []).append(item)
    return found


def _local(alike: Bucket, share: _Share, policy: Policy) -> list[_Share]:
    """Divide matrices that are not exchanged into buckets. There are as few buckets as memory allows, but on a CPU,
    each bucket is small enough for the cache."""
    of_momentum = 4 * sum(item.numel for item in share) // _OF_MOMENTUM
    least = _IN_CACHE if alike.kind == "cpu" else max(_LEAST_BYTES, of_momentum)
    most = (policy.bucket_bytes or least) // alike.itemsize
    return _shares_of(_lines(share), max(1, most), 1)[::-1]


def _by_price(
    alike: Bucket, items: _Share, prices: Mapping[Key, Priced], policy: Policy
) -> tuple[list[_Share], int, str]:
    """Split exchanged matrices into buckets. Among the splits whose estimated time is close to the lowest, the split
    that needs the least memory is chosen. Returns the buckets, their time in nanoseconds, and a line for the printed
    plan."""
    # By (largest number of elements on any rank, number of buckets, nanoseconds)
    found = dict[tuple[int, int, int], list[_Share]]()
    for shares in _cuts(alike, items, prices, policy):
        buckets = [timed([prices[i.key] for i in share], alike.itemsize, policy.machine) for share in shares]
        taken = max(bucket.taken for bucket in buckets)
        for step in (1, -1)[: len(shares)]:  # try both orders of the buckets
            found.setdefault((taken, len(shares), step_ns(buckets[::step], turns)), shares[::step])
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


def _cuts(alike: Bucket, items: _Share, prices: Mapping[Key, Priced], policy: Policy) -> Iterator[list[_Share]]:
    """Yield the ways to divide matrices into buckets that are to be compared. The matrices are first divided into
    waves, each with matrices of all owners, for several numbers of waves. Then each wave becomes one bucket, or is
    divided further by owners."""
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
    """Return True if a matrix needs a gather and a scatter. Return False if the rank that orthogonalizes it stores the
    whole matrix and has no stage state to send."""
    stored = spec.layout.tiles[item.matrix].get(item.owners[0], ())
    return sum(tile.numel for tile in stored) < item.numel or any(kept.travels for kept in spec.kept)


# ------------------------------------------------------------------------------------------------ splitting into shares


def _lines(items: Iterable[Item]) -> list[_Share]:
    """List the matrices of each owner, costliest first."""
    lines: dict[Ranks, _Share] = {}
    for item in sorted(items, key=lambda item: (-item.cost, item.rows, item.cols, item.key)):
        lines.setdefault(item.owners, []).append(item)
    return list(lines.values())


def _narrowed(waves: Sequence[_Share], tail: int, prices: Mapping[Key, Priced]) -> list[_Share]:
    """Split waves (buckets with matrices of all owners) into parts with different owners. The last wave gets `tail`
    parts and the other waves get half as many, so that relays of results to other replicas begin early and the last
    relay is short. The owners of each replica are spread evenly over the parts, to balance the relays."""
    found: list[_Share] = []
    for wave in waves:
        lines: dict[tuple[int, int], _Share] = {}  # by (replica, owner)
        for item in wave:
            one = prices[item.key]
            lines.setdefault((one.replica, one.owner), []).append(item)
        shares: list[_Share] = [[] for _ in range(tail if wave is waves[-1] else max(1, tail // 2))]
        dealt = Counter[int]()  # replica -> number of its owners assigned so far
        for at in sorted(lines, key=lambda at: (-sum(item.cost for item in lines[at]), at)):
            shares[dealt[at[0]] % len(shares)] += lines[at]
            dealt[at[0]] += 1
        found += filter(None, shares)
    return found


def _shares_of(lines: Sequence[_Share], most: int, least: int) -> list[_Share]:
    """Split the matrices of all owners into as few shares (buckets) as possible, but at least `least` if there are
    enough matrices. In each share, an owner has at most `most` elements, or a single larger matrix. Within these
    limits, the work of each owner is spread evenly over the shares."""
    needed = [_needed([item.numel for item in line], most) for line in lines]
    num = max(least, *(of_line[0] for of_line in needed))
    cut = [_cut(line, of_line, most, num) for line, of_line in zip(lines, needed, strict=True)]
    shares = [[item for part in parts for item in part] for parts in zip(*cut, strict=True)]
    return [share for share in shares if share]


def _needed(sizes: Sequence[int], most: int) -> list[int]:
    """For each position in a list of matrix sizes, count how many shares of at most `most` elements the rest of the
    list needs. The last entry, at the end of the list, is 0."""
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
    """Split one owner's matrices, without changing their order, into `num` shares of about equal work, with as few
    empty shares as possible."""
    parts: list[_Share] = [[] for _ in range(num)]
    left, share, work, filled = sum(item.cost for item in line), 0, 0, 0
    for place, item in enumerate(line):
        behind = num - share - 1  # number of shares after the current share
        if parts[share] and behind and needed[place] <= behind:
            enough = work * (behind + 1) >= left
            if enough or filled + item.numel > most or len(line) - place <= behind:
                left, share, work, filled = left - work, share + 1, 0, 0
        parts[share].append(item)
        work += item.cost
        filled += item.numel
    return parts


# ------------------------------------------------------------------------------------------------------ estimated time


def _prices(specs: Sequence[Spec], items: Iterable[Item], machine: Machine) -> dict[Key, Priced]:
    spreads, found = dict[ParamLayout, Spread](), dict[Key, Priced]()
    for item in items:
        layout, owner = specs[item.param].layout, item.owners[0]
        if layout not in spreads:
            spreads[layout] = _spread_of(layout, machine.per_node)
        spread = spreads[layout]._replace(replicas=1, near=1) if len(item.owners) > 1 else spreads[layout]
        batch = products_of(item.short, item.how, item.cost, machine)
        found[item.key] = Priced(owner, layout.replica_of[owner], item.numel, *batch, spread)
    return found


def _spread_of(layout: ParamLayout, per_node: int) -> Spread:
    """Count the ranks of a layout in total and per node, with `per_node` ranks on a node. The first replica and the
    ranks that store the first piece are taken as typical of the others."""
    first = next(iter(layout.keepers.values()), layout.ranks[:1])
    replica = [rank for rank in layout.ranks if layout.pieces[rank] and layout.replica_of[rank] == 0]
    on_nodes = (Counter(rank // per_node for rank in ranks).values() for ranks in (replica, first))
    inside, near = (max(counts, default=1) for counts in on_nodes)
    return Spread(len(replica), inside, len(first), near)
