"""Buckets: matrices that move, or stay, together, cut so that every owner has work in each; the cheapest cut. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from shardmuon.layout.table import ParamLayout, Ranks
from shardmuon.plan.items import Item, Key, Policy, Route, Spec
from shardmuon.plan.price import Priced, Spread, priced, spread_of, step_ns, timed

_NUMS = (*range(1, 21), 24, 32)  # of buckets, that are tried
_TAILS = (1, 2, 4)
_LEAST_BYTES = 32 * 2**20
_IN_CACHE = 4 * 2**20  # bytes of a bucket on a CPU that moves nowhere: what is made for it stays in a cache
_OF_MOMENTUM = 32  # a bucket of what moves nowhere may have one part of so many
_NO_DEARER = 102  # percent of the cheapest that a plan which takes less memory may cost

Share = list[Item]  # the matrices of a bucket


class Alike(NamedTuple):
    """All that matrices of one bucket share, see `Bucket`. Plans have their buckets in this order."""

    ranks: Ranks
    route: Route
    num_owners: int
    kind: str
    itemsize: int


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
        ns: Nanoseconds of a step of all of them, without what lies on one rank alone, see price.py.
        choices: What was chosen.
    """

    items: Sequence[Item]
    moving: Mapping[Alike, list[Share]]
    ns: int
    choices: tuple[Chosen, ...]


class Cutter:
    """Cuts the matrices of a plan into buckets."""

    def __init__(self, specs: Sequence[Spec], policy: Policy) -> None:
        self._specs, self._policy = specs, policy
        self._spreads: dict[ParamLayout, Spread] = {}

    def together(self, items: Iterable[Item]) -> dict[Alike, Share]:
        """Matrices that may be in one bucket."""
        found: dict[Alike, Share] = {}
        for item in items:
            spec = self._specs[item.param]
            itemsize = spec.itemsizes[item.matrix] if spec.itemsizes else 4
            ranks = item.owners if item.route == "local" else spec.layout.ranks
            found.setdefault(Alike(ranks, item.route, len(item.owners), spec.kind, itemsize), []).append(item)
        return found

    def way(self, items: Sequence[Item]) -> Way:
        """The cheapest buckets of a set."""
        total, moving, choices = 0, dict[Alike, list[Share]](), list[Chosen]()
        for alike, share in self.together(items).items():
            prices = {item.key: self.priced(item) for item in share}
            if alike.route != "local":
                moving[alike], choice = self.cheapest(alike, share, prices)
                choices.append(choice)
                total += choice.ns
            elif len(alike.ranks) > 1:
                total += max(timed(list(prices.values()), alike.itemsize, self._policy.machine).computed.values())
        return Way(items, moving, total, tuple(choices))

    def local(self, alike: Alike, share: Share) -> list[Share]:
        """The buckets of what moves nowhere: as few as memory allows, and small ones on a CPU."""
        of_momentum = 4 * sum(item.numel for item in share) // _OF_MOMENTUM
        least = _IN_CACHE if alike.kind == "cpu" else max(_LEAST_BYTES, of_momentum)
        most = (self._policy.bucket_bytes or least) // alike.itemsize
        return shares_of(_lines(share), max(1, most), 1)[::-1]

    def cheapest(self, alike: Alike, items: Share, prices: Mapping[Key, Priced]) -> tuple[list[Share], Chosen]:
        """The buckets of what moves: of those that are hardly dearer than the cheapest, what takes least memory."""
        machine, found = self._policy.machine, dict[tuple[int, int, int], list[Share]]()
        busiest = list[int]()  # slices that stay together are not dealt out evenly
        if any(item.parts > 1 for item in items):
            work = Counter[int]()
            for one in prices.values():
                work[one.owner] += one.ns
            busiest.append(max(work, key=lambda rank: (work[rank], rank)))
        for shares in self._cuts(alike, items, prices):
            buckets = [timed([prices[item.key] for item in share], alike.itemsize, machine) for share in shares]
            taken = alike.itemsize * max(bucket.taken for bucket in buckets)
            for step in (1, -1)[: len(shares)]:  # those with least first, or last
                found.setdefault((taken, len(shares), step_ns(buckets[::step], busiest)), shares[::step])
        limit = min(ns for *_, ns in found) * _NO_DEARER
        best = min(option for option in found if option[2] * 100 <= limit)
        text = f"{best[1]} buckets by price ({machine.name}), of {best[0] / 2**20:.3g} MiB a rank at most; "
        beside = "there are no others"
        if len(found) > 1:
            most, num, ns = min((option for option in found if option != best), key=lambda option: option[2])
            beside = f"next best {num}, {ns / best[2]:.3g}x as long, {most / 2**20:.3g} MiB"
        return found[best], Chosen(alike.ranks, best[2], text + beside)

    def _cuts(self, alike: Alike, items: Share, prices: Mapping[Key, Priced]) -> Iterator[list[Share]]:
        """The cuts that are tried: in so many waves, and these whole or cut by owners."""
        most = sum(item.numel for item in items)
        if self._policy.bucket_bytes:
            most = max(1, self._policy.bucket_bytes // alike.itemsize)
        lines, known = _lines(items), 0
        for least in _NUMS:
            waves = shares_of(lines, most, least)[::-1]
            if len(waves) > known:
                for tail in _TAILS if any(one.spread.replicas > 1 for one in prices.values()) else (1,):
                    yield _with_slices(_narrowed(waves, tail, prices))
            known = len(waves)
            if known == max(map(len, lines)):
                break

    def priced(self, item: Item) -> Priced:
        spec, machine = self._specs[item.param], self._policy.machine
        if spec.layout not in self._spreads:
            self._spreads[spec.layout] = spread_of(spec.layout, machine.per_node)
        return priced(item, spec, self._spreads[spec.layout], machine)


def _lines(items: Iterable[Item]) -> list[Share]:
    """The matrices of each owner, the costliest first."""
    lines: dict[Ranks, Share] = {}
    for item in sorted(items, key=lambda item: (-item.cost, item.rows, item.cols, item.key)):
        lines.setdefault(item.owners, []).append(item)
    return list(lines.values())


def _narrowed(waves: Sequence[Share], tail: int, prices: Mapping[Key, Priced]) -> list[Share]:
    """The waves cut by owners, the last one in `tail` parts, others in half as many, so that relays begin early and the
    last of them is short. Owners of each replica are dealt out alike, since it relays what they own."""
    found: list[Share] = []
    for wave in waves:
        lines: dict[tuple[int, int], Share] = {}  # of replica and owner
        for item in wave:
            one = prices[item.key]
            lines.setdefault((one.replica, one.owner), []).append(item)
        shares: list[Share] = [[] for _ in range(tail if wave is waves[-1] else max(1, tail // 2))]
        dealt = Counter[int]()  # of each replica
        for at in sorted(lines, key=lambda at: (-sum(item.cost for item in lines[at]), at)):
            shares[dealt[at[0]] % len(shares)] += lines[at]
            dealt[at[0]] += 1
        found += filter(None, shares)
    return found


def _with_slices(shares: list[Share]) -> list[Share]:
    """The shares, with all slices of a matrix in the first that has one of them."""
    first, found = dict[tuple[int, int], Share](), [Share() for _ in shares]
    for share, of_share in zip(shares, found, strict=True):
        for item in share:
            (first.setdefault(item[:2], of_share) if item.parts > 1 else of_share).append(item)
    return [share for share in found if share]


def shares_of(lines: Sequence[Share], most: int, least: int) -> list[Share]:
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


def _cut(line: Share, needed: Sequence[int], most: int, num: int) -> list[Share]:
    """One owner's matrices, in order, in `num` shares of equal work; none is empty that need not be."""
    parts: list[Share] = [[] for _ in range(num)]
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
