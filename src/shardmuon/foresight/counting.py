"""Count what every rank does with a plan, without ranks: bytes, peers, matrices, operations.

The rules are those of plan/program.py ([Note: results in two stages]) and plan/cuts.py ([Note: the Gram route]),
applied to all ranks at once: a table of tiles for each different matrix of each different layout, in arrays. A thousand
ranks cost little more than one, and ranks that do the same are found as equal rows.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from shardmuon.foresight.types import BucketCount, Matrices, Sent
from shardmuon.layout.table import ParamLayout, Ranks
from shardmuon.plan.gram import message_size
from shardmuon.plan.plan import Bucket, Item, Kept, Plan, Tiles
from shardmuon.plan.types import aligned
from shardmuon.step.update import PORTION, PORTION_ELSEWHERE

Ints = np.ndarray[Any, np.dtype[np.int64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]
NodeOf = Callable[[int], int]  # rank -> number of its node
Owners = tuple[int, ...]
_Owned = tuple[int, int, str, int, int]  # rows, columns, how, cost, owners
_FIELDS = attrgetter(*(f.name for f in fields(BucketCount)))
_WIRES = {2: "bfloat16", 4: "float32", 8: "float64"}  # itemsize -> dtype


class _Flow(NamedTuple):
    """Messages of one exchange: sender, receiver (positions among the ranks), elements."""

    source: Ints
    target: Ints
    numel: Ints


class _TileSources(NamedTuple):
    """The tiles of a matrix, given its owner, or its owner in each replica.

    Attributes:
        owners: Position of the owner of each tile.
        sources: Position of the one keeper that talks with the owner about each tile; the owner's where it has it.
        own, foreign, idle: Tiles that the owner stores; that are sent to it; that are sent by another replica, which
            also passes their results on.
    """

    owners: Ints
    sources: Ints
    own: Bools
    foreign: Bools
    idle: Bools


class _Table:
    """The tiles of one matrix, or slice, of one layout. Each rank's follow each other in the order of programs."""

    def __init__(self, layout: ParamLayout, tiles: Tiles) -> None:
        self._layout = layout
        self.position = {rank: i for i, rank in enumerate(layout.ranks)}
        of_ranks = ((self.position[rank], sorted(of_rank, key=lambda t: t.key)) for rank, of_rank in tiles.items())
        found = [(at, tile) for at, of_rank in of_ranks for tile in of_rank]
        self.at: Ints = np.array([at for at, _ in found], dtype=np.int64)
        self.numel: Ints = np.array([tile.numel for _, tile in found], dtype=np.int64)
        self._pieces = [tile.held.piece for _, tile in found]
        self._ways: dict[Ranks, _TileSources] = {}

    @cached_property
    def _keepers(self) -> tuple[Ints, Ints, Ints, Ints]:
        """The number of each tile's piece; positions of all keepers, piece by piece; where those of each piece begin,
        and how many they are."""
        numbers = {piece: i for i, piece in enumerate(dict.fromkeys(self._pieces))}
        keepers = [self._layout.keepers[piece] for piece in numbers]
        many = np.array([len(ranks) for ranks in keepers], dtype=np.int64)
        everyone = np.array([self.position[rank] for ranks in keepers for rank in ranks], dtype=np.int64)
        return np.array([numbers[p] for p in self._pieces], dtype=np.int64), everyone, np.cumsum(many) - many, many

    def owners(self, item: Item) -> Ints:
        """Position of the owner for each rank."""
        ranks = self._layout.ranks
        if len(item.owners) == 1:
            return np.full(len(ranks), self.position[item.owners[0]], dtype=np.int64)
        return np.array([self.position[item.owner_for(self._layout, rank)] for rank in ranks], dtype=np.int64)

    def ways(self, item: Item) -> _TileSources:
        """The tiles by what owners do with them."""
        if item.owners not in self._ways:
            owners = self.owners(item)[self.at]
            own, sources = self.at == owners, self.at
            if self._layout.has_replicas and len(item.owners) == 1:
                pieces, everyone, first, many = self._keepers
                replica = self._layout.replica_of[item.owners[0]]
                of_piece = everyone[first + replica % many]
                of_piece[pieces[own]] = self.position[item.owners[0]]
                sources = of_piece[pieces]
            foreign = ~own & (sources == self.at)
            self._ways[item.owners] = _TileSources(owners, sources, own, foreign, ~own & ~foreign)
        return self._ways[item.owners]

    @cached_property
    def holders(self) -> Ints:
        """Positions that store any of it, each once."""
        return np.unique(self.at)

    def added_up(self, which: Bools) -> Ints:
        """Elements of these tiles on each of `holders`."""
        at = np.searchsorted(self.holders, self.at[which])
        return np.bincount(at, self.numel[which], len(self.holders)).astype(np.int64)

    def mates(self, item: Item) -> Ints:
        """The position from which each rank hears what stages keep."""
        found = self.owners(item)
        if len(self.at):
            ways = self.ways(item)
            _, first = np.unique(self.at, return_index=True)
            found[self.holders] = ways.sources[first]
            at_home = ways.sources == self.at
            found[self.at[at_home]] = ways.owners[at_home]
        return found


class _Stepped:
    """Elements that each rank steps of one side of a bucket, and of its largest tile (see `step.update`)."""

    def __init__(self, num: int, limit: int) -> None:
        self._limit = limit
        self.all, self._largest = np.zeros((2, num), dtype=np.int64)

    def add(self, at: Ints, numel: Ints) -> None:
        """Tiles of these ranks."""
        np.add.at(self.all, at, numel)
        np.maximum.at(self._largest, at, numel)

    @property
    def most(self) -> Ints:
        """Elements that are stepped together at most: a portion is filled to the limit, or has one larger tile."""
        return np.minimum(self.all, np.maximum(self._limit, self._largest))


# columns of the numbers that tell ranks apart: seven sides of exchanges, as the fields of `Sent`, then others
_SIDES = tuple(slice(4 * side, 4 * side + 4) for side in range(7))
_BATCHES, _LOCAL, _OWN, _FOREIGN, _IDLE, _PACKED, _FILLED, _COLUMNS = (*range(28, 35), 37)
_APPLIED = slice(35, 37)


class _CountedBucket(NamedTuple):
    """One bucket on all its ranks."""

    bucket: Bucket
    relays: bool
    sums: int
    numbers: Ints  # (ranks, _COLUMNS)
    matrices: list[tuple[tuple[Matrices, ...], Owners]]  # by kind, and how many own each
    kinds: Ints  # (ranks,): which of `matrices`


class PlanCounts:
    """A plan, counted.

    Attributes:
        ranks: All that take part in it.
        classes: The buckets of the ranks of each class.
        class_of: Position in `ranks` -> number of its class.
        votes: Position in `ranks` -> how often it votes before a step: once, if it shares anything.
    """

    def __init__(self, plan: Plan, node_of: NodeOf) -> None:
        self._plan, self._node_of = plan, node_of
        self._tables: dict[tuple[int, ...], _Table] = {}
        sets = {id(spec.layout.ranks): spec.layout.ranks for spec in plan.specs}.values()  # hashing them takes long
        self.ranks: Ranks = tuple(sorted({rank for ranks in sets for rank in ranks}))
        sharing = {rank for ranks in sets if len(ranks) > 1 for rank in ranks}
        self.votes: list[int] = [int(rank in sharing) for rank in self.ranks]
        position = {rank: i for i, rank in enumerate(self.ranks)}
        kinds: list[BucketCount] = []  # of buckets as a rank carries them out, no two alike
        numbers: dict[tuple[Any, ...], int] = {}
        lists: list[list[int]] = [[] for _ in self.ranks]  # of each rank: which of `kinds` it carries out
        alone: dict[tuple[Any, ...], int] = {}  # a bucket of one rank, see `_alone` -> which of `kinds`
        for number, bucket in enumerate(plan.buckets):
            as_before = self._alone(bucket)
            if as_before in alone:
                lists[position[bucket.ranks[0]]].append(alone[as_before])
                continue
            one = self._count(bucket)
            first, which = _alike(np.column_stack((one.numbers, one.kinds)))
            own = []
            for row in first:
                made = self._bucket_of(number if bucket.exchange else -1, one, row)
                key = _FIELDS(made)
                if key not in numbers:
                    numbers[key] = len(kinds)
                    kinds.append(made)
                own.append(numbers[key])
            for rank, kind in zip(bucket.ranks, which.tolist(), strict=True):
                lists[position[rank]].append(own[kind])
            if as_before is not None:
                (alone[as_before],) = own
        known: dict[tuple[int, ...], int] = {}
        self.class_of: Ints = np.array([known.setdefault(tuple(line), len(known)) for line in lists], dtype=np.int64)
        self.classes = [tuple(kinds[kind] for kind in line) for line in known]

    def buckets_of(self, rank: int) -> tuple[BucketCount, ...]:
        """The buckets of one rank."""
        return self.classes[int(self.class_of[self.ranks.index(rank)])]

    def _alone(self, bucket: Bucket) -> tuple[Any, ...] | None:
        """A key that buckets of equal counts share, if a bucket is one rank's and nothing moves; else None. Experts are
        many, and most are alike."""
        if bucket.exchange or len(bucket.ranks) > 1:
            return None
        found: list[Any] = [bucket.kind, bucket.itemsize]
        for index in bucket.items:
            item = self._plan.items[index]
            held = self._plan.specs[item.param].layout.tiles[item.matrix].values()
            sizes = tuple(tile.numel for tiles in held for tile in tiles)
            found.append((item.rows, item.cols, item.how, item.cost, sizes))
        return tuple(found)

    def _bucket_of(self, number: int, one: _CountedBucket, row: int) -> BucketCount:
        bucket, n = one.bucket, one.numbers[row].tolist()
        matrices, owners = one.matrices[int(one.kinds[row])]
        ranks = bucket.ranks[:1]
        if bucket.exchange:  # each replica exchanges by itself if each has owners
            first = self._plan.items[bucket.items[0]]
            ranks = self._plan.specs[first.param].layout.replicas[0] if len(first.owners) > 1 else bucket.ranks
        sides = (Sent(*n[at]) for at in _SIDES)
        gather, gather_received, scatter, scatter_received, relay, relay_received, summed = sides
        return BucketCount(
            number=number,
            route=bucket.route,
            num_ranks=len(ranks),
            num_nodes=len(set(map(self._node_of, ranks))),
            wire=_WIRES[bucket.itemsize],
            matrices=matrices,
            held=n[_OWN] + n[_FOREIGN] + n[_IDLE],
            gather=gather,
            gather_received=gather_received,
            scatter=scatter,
            scatter_received=scatter_received,
            relay=relay,
            relay_received=relay_received,
            gathers=bucket.gathers,
            relays=one.relays,
            foreign=n[_FOREIGN],
            idle=n[_IDLE],
            batches=n[_BATCHES],
            stepped=(n[_PACKED], n[_FILLED]),
            applied=tuple(n[_APPLIED]),
            local_flops=n[_LOCAL],
            owners=owners,
            sums=one.sums,
            summed=summed,
        )

    def _table(self, item: Item) -> _Table:
        layout = self._plan.specs[item.param].layout
        key = id(layout), item.matrix, item.part, item.parts
        if key not in self._tables:
            self._tables[key] = _Table(layout, self._plan.tiles_of(item))
        return self._tables[key]

    def _count(self, bucket: Bucket) -> _CountedBucket:
        plan, position = self._plan, {rank: i for i, rank in enumerate(bucket.ranks)}
        numbers = np.zeros((len(position), _COLUMNS), dtype=np.int64)
        limit = PORTION if bucket.kind == "cpu" else PORTION_ELSEWHERE
        own, foreign, idle = (_Stepped(len(position), limit) for _ in range(3))
        gathers, scatters, relays = list[_Flow](), list[_Flow](), list[_Flow]()
        returned: list[tuple[Ints, Ints]] = []  # foreign tiles: of which ranks, and their elements
        owned: dict[int, Counter[_Owned]] = {}
        for number in bucket.items:
            item = plan.items[number]
            layout = plan.specs[item.param].layout
            table = self._table(item)
            size = 0 if bucket.route == "gram" else bucket.itemsize * aligned(item.numel, bucket.itemsize)
            for rank in item.owners:
                of_rank = owned.setdefault(position[rank], Counter())
                of_rank[item.rows, item.cols, item.how, item.cost, item.parts] += 1
                numbers[position[rank], _BATCHES] += size
            if bucket.route == "local":
                ours = np.array([position[layout.ranks[at]] for at in table.at.tolist()], dtype=np.int64)
                own.add(ours, table.numel)
                continue
            if bucket.route == "gram":
                sides = _count_gram(table, item, bucket.itemsize, numbers, gathers, scatters)
            else:
                sides = table.ways(item)[2:]
                self._count_moved(table, item, bucket.itemsize, gathers, scatters, relays)
            for side, stepped in zip(sides, (own, foreign, idle), strict=True):
                stepped.add(table.at[side], table.numel[side])
                if stepped is foreign:
                    returned.append((table.at[side], table.numel[side]))
        added_up = self._added_up(bucket, position)
        numbers[:, _OWN], numbers[:, _FOREIGN], numbers[:, _IDLE] = own.all, foreign.all, idle.all
        numbers[:, _PACKED], numbers[:, _FILLED] = foreign.most, own.most
        for holders, numel in returned:  # applied behind a rank's own tiles, in the same calls
            own.add(holders, numel)
        numbers[:, _APPLIED] = np.stack([own.most, idle.most], 1)
        if bucket.exchange:
            nodes = np.array([self._node_of(rank) for rank in bucket.ranks], dtype=np.int64)
            for at, flows in enumerate((gathers, scatters, relays)):
                sides_of = _SIDES[2 * at : 2 * at + 2]
                for columns, sums in zip(sides_of, _sums(_together(flows), nodes, bucket.itemsize), strict=True):
                    numbers[:, columns] = sums
            for flows in added_up:
                numbers[:, _SIDES[6]] += _sums(_together(flows), nodes, 1)[0]
        passes_on = bucket.route == "owner" and any(
            plan.specs[plan.items[n].param].layout.has_replicas and len(plan.items[n].owners) == 1 for n in bucket.items
        )
        return _CountedBucket(bucket, passes_on, len(added_up), numbers, *_kinds(owned, len(position)))

    def _added_up(self, bucket: Bucket, position: Mapping[int, int]) -> list[list[_Flow]]:
        """Messages, in bytes, of each exchange in which slices are added up: norms, then Gram matrices."""
        found: list[list[_Flow]] = []
        for number in bucket.items:
            item = self._plan.items[number]
            slicing = self._plan.specs[item.param].slicings[item.matrix] if item.parts > 1 else None
            if slicing is None or item.part:
                continue
            alike = [self._plan.items[number + part] for part in range(item.parts)]
            owners = [[position[rank] for rank in ranks] for ranks in zip(*(one.owners for one in alike), strict=True)]
            pairs = [pair for mates in owners for pair in itertools.permutations(mates, 2)]
            source, target = np.array(pairs, dtype=np.int64).T
            for at, size in enumerate([8, *[slicing.itemsize * item.short**2] * slicing.sums]):
                if at == len(found):
                    found.append([])
                found[at].append(_Flow(source, target, np.full(len(pairs), aligned(size, 1), dtype=np.int64)))
        return found

    def _count_moved(
        self,
        table: _Table,
        item: Item,
        itemsize: int,
        gathers: list[_Flow],  # these three are changed
        scatters: list[_Flow],
        relays: list[_Flow],
    ) -> None:
        """Add the messages of a matrix of the owner route."""
        ways = table.ways(item)
        holders, numel, owners = (of_tile[ways.foreign] for of_tile in (table.at, table.numel, ways.owners))
        gathers.append(_Flow(holders, owners, numel))
        scatters.append(_Flow(owners, holders, numel))
        relays.append(_Flow(ways.sources[ways.idle], table.at[ways.idle], table.numel[ways.idle]))
        for kept in self._plan.specs[item.param].kept:
            if kept.travels:
                told = _told(kept, item, table, itemsize)
                late = told.source != table.owners(item)[told.target]
                scatters.append(_Flow(*(column[~late] for column in told)))
                relays.append(_Flow(*(column[late] for column in told)))


def _told(kept: Kept, item: Item, table: _Table, itemsize: int) -> _Flow:
    """Messages with what a stage keeps of a matrix."""
    tiles = kept.layout.tiles[item.matrix]
    keepers = np.array([table.position[rank] for rank in tiles], dtype=np.int64)
    words = np.array([-(-of_rank[0].numel * 4 // itemsize) for of_rank in tiles.values()], dtype=np.int64)
    others = keepers != table.owners(item)[keepers]
    return _Flow(table.mates(item)[keepers[others]], keepers[others], words[others])


def _count_gram(
    table: _Table,
    item: Item,
    itemsize: int,
    numbers: Ints,  # these three are changed
    gathers: list[_Flow],
    scatters: list[_Flow],
) -> tuple[Bools, Bools, Bools]:
    """Add a matrix of the Gram route. Returns its tiles by sides as programs have them: no relay brings any."""
    owner, sources = table.position[item.owners[0]], table.ways(item).sources
    holders, added = table.holders, table.added_up(sources == table.at)
    adders = holders[added > 0]
    size = message_size(item.short, itemsize)
    for into, who in ((gathers, adders), (scatters, holders)):
        others = who[who != owner]
        owners, sizes = (np.full(len(others), value, dtype=np.int64) for value in (owner, size))
        into.append(_Flow(others, owners, sizes) if into is gathers else _Flow(owners, others, sizes))
    held = table.added_up(np.ones(len(table.at), dtype=bool))
    numbers[holders, _LOCAL] += 2 * item.short * (added + held)
    numbers[holders, _BATCHES] += [itemsize * aligned(numel, itemsize) for numel in held.tolist()]
    foreign = np.isin(table.at, adders[adders != owner])
    return ~foreign, foreign, np.zeros(len(foreign), dtype=bool)


def _together(flows: Sequence[_Flow]) -> _Flow:
    if not flows:
        empty: Ints = np.zeros(0, dtype=np.int64)
        return _Flow(empty, empty, empty)
    return _Flow(*(np.concatenate(columns) for columns in zip(*flows, strict=True)))


def _sums(flow: _Flow, nodes: Ints, itemsize: int) -> tuple[Ints, Ints]:
    """(sent, received) of every rank, as the fields of `Sent`."""
    num = len(nodes)
    across = nodes[flow.source] != nodes[flow.target]
    seen = np.zeros(num * num, dtype=bool)
    seen[flow.source * num + flow.target] = True
    pairs = np.flatnonzero(seen)
    first, second = pairs // num, pairs % num
    apart = nodes[first] != nodes[second]
    found = []
    for here, one in ((flow.source, first), (flow.target, second)):
        columns = [np.bincount(here, flow.numel * which, num) * itemsize for which in (~across, across)]
        columns += [np.bincount(one[which], minlength=num) for which in (~apart, apart)]
        found.append(np.stack(columns, 1).astype(np.int64))
    return found[0], found[1]


def _kinds(
    owned: Mapping[int, Mapping[_Owned, int]], num: int
) -> tuple[list[tuple[tuple[Matrices, ...], Owners]], Ints]:
    """The different sets of matrices that ranks own, with how many own each, and which each rank owns."""
    numbers: dict[tuple[tuple[Matrices, ...], Owners], int] = {((), ()): 0}
    kinds = np.zeros(num, dtype=np.int64)
    for at, counter in owned.items():
        alike = sorted(counter.items())
        found = tuple(Matrices(rows, cols, how, count, cost) for (rows, cols, how, cost, _), count in alike)
        owners = tuple(several for (*_, several), _ in alike)
        kinds[at] = numbers.setdefault((found, owners if max(owners) > 1 else ()), len(numbers))
    return list(numbers), kinds


def _alike(rows: Ints) -> tuple[list[int], Ints]:
    """The first row of each kind, and each row's kind, in the order of first rows."""
    if len(rows) == 1:
        return [0], np.zeros(1, dtype=np.int64)
    rows = np.ascontiguousarray(rows)
    _, first, kinds = np.unique(
        rows.view(np.dtype((np.void, rows.dtype.itemsize * rows.shape[1]))).ravel(),
        return_index=True,
        return_inverse=True,
    )
    order = np.argsort(first)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return first[order].tolist(), place[kinds]
