"""The program of one rank for one bucket: copy lists between its storages, two wires and the batches. Pure.

[Note: places]
    A tile that a rank stores has one place outside of its storage. Tiles of matrices that the rank owns stand in its
    batches, where they are orthogonalized, and never travel. The others stand on a wire, ordered by the rank at its
    other end, then by item, then as they are stored. The scatter brings results back to where the gather took them
    from. Alone, a rank owns everything, and its wires are empty.

[Note: results in two stages]
    An owner talks with one keeper of each piece, in its own replica if it is in one. That keeper sends the results on
    to the others by a second exchange on the same ranks, the relay; there is none if each replica has an owner. What
    stages keep goes the same ways, behind the tiles of each rank: from the owner to all whose first tile comes from it
    and to ranks that store nothing of the matrix, to others from where their first tile comes.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardmuon.layout.pieces import Tile
from shardmuon.layout.table import ParamLayout, Ranks
from shardmuon.layout.views import Ints, row_major
from shardmuon.plan.copies import BufferPlace, Copy, joined
from shardmuon.plan.gram import make_gram_program
from shardmuon.plan.plan import Bucket, Item, Plan
from shardmuon.plan.types import Batch, KeptLoad, Load, Mates, Program, Relay, Wire, aligned


class _Part(NamedTuple):
    """A tile or kept numbers on their way: `number` is that of `Spec.kept`, -1 for a tile."""

    item: Item
    tile: Tile
    number: int = -1


Parts = dict[int, list[_Part]]  # by the rank at the other end


@dataclass
class _Ways:
    """All parts that one rank sends or gets in a bucket, by the rank at the other end."""

    own: list[_Part] = field(default_factory=list)
    outgoing: Parts = field(default_factory=dict)  # tiles, to their owners
    incoming: Parts = field(default_factory=dict)  # tiles that owners here get
    heard: Parts = field(default_factory=dict)  # kept numbers, from owners
    told: Parts = field(default_factory=dict)  # kept numbers that owners here tell
    relayed: Parts = field(default_factory=dict)  # to other replicas
    idle: Parts = field(default_factory=dict)  # from another replica


def make_program(plan: Plan, bucket: Bucket, rank: int, missing: Collection[int] = ()) -> Program:
    """The program of a rank of the bucket, without parameters that have no gradient in this step (`missing`)."""
    if bucket.route == "gram":
        return make_gram_program(plan, bucket, rank, missing)
    numbers = [n for n in bucket.items if plan.items[n].param not in missing]
    numbers.sort(key=lambda n: batch_key(plan, n))  # equal ones side by side, so that copies join
    batches, slots = _batches(plan, [n for n in numbers if rank in plan.items[n].owners], bucket.itemsize)
    ways = _Ways()
    relays = False
    for number in numbers:
        relays |= _route(plan, plan.items[number], rank, ways)
    wire = _Wired(plan, bucket, slots)
    own = tuple(Load(p.item.param, p.tile, wire.in_batch(p)) for p in ways.own)
    foreign = tuple(wire.loads(ways.outgoing))
    gather = Wire(wire.splits(ways.outgoing), wire.splits(ways.incoming), wire.copies(ways.incoming))
    scatter, returned = gather, foreign
    if any(kept.travels for n in numbers for kept in plan.specs[plan.items[n].param].kept):
        back, out = _merged(ways.outgoing, ways.heard), _merged(ways.incoming, ways.told)
        heard, told = tuple(wire.kept_loads(back)), tuple(wire.kept_loads(out))
        scatter = Wire(wire.splits(back), wire.splits(out), wire.copies(out), told, heard)
        returned = tuple(wire.loads(back))
    return Program(
        bucket,
        rank,
        tuple(batches),
        batches[-1].start + batches[-1].shape[0] * batches[-1].stride if batches else 0,
        own,
        foreign,
        returned,
        tuple(wire.loads(ways.idle)),
        gather,
        scatter,
        _relay(wire, ways, returned) if relays else None,
        *_sums(plan, numbers, rank),
    )


def _sums(plan: Plan, numbers: Sequence[int], rank: int) -> tuple[int, tuple[Mates, ...]]:
    """`Program.sums` and `Program.mates` of a bucket with these items."""
    slices = sorted(n for n in numbers if plan.items[n].parts > 1)
    most, found = 0, list[Mates]()
    for number in slices:
        item = plan.items[number]
        slicing = plan.specs[item.param].slicings[item.matrix]
        assert slicing is not None, "of a slice"
        most = max(most, 1 + slicing.sums)
        if rank in item.owners:
            replica, first = item.owners.index(rank), number - item.part
            owners = (plan.items[n].owners[replica] for n in range(first, first + item.parts))
            found.append(Mates(number, tuple(owners)))
    return most, tuple(found)


def batch_key(plan: Plan, number: int) -> tuple[int, int, str, int, str, int]:
    """Sort key of a bucket's items, in batches and on wires."""
    item = plan.items[number]
    return *item.shape, item.how, item.parts, plan.specs[item.param].batch, number


def _batches(plan: Plan, owned: Sequence[int], itemsize: int) -> tuple[list[Batch], dict[Item, int]]:
    """Batches of the owned matrices, which stand in order, and where each begins."""
    found: list[Batch] = []
    slots: dict[Item, int] = {}
    start = 0
    for key, group in itertools.groupby(owned, key=lambda n: batch_key(plan, n)[:-1]):
        alike = tuple(group)
        stride = aligned(key[0] * key[1], itemsize)
        found.append(Batch(alike, (len(alike), *key[:2]), start, stride))
        slots.update((plan.items[n], start + k * stride) for k, n in enumerate(alike))
        start += len(alike) * stride
    return found, slots


def _route(plan: Plan, item: Item, rank: int, ways: _Ways) -> bool:
    """Note what a rank sends and gets of a matrix. Returns True if its bucket needs the relay."""
    layout, tiles = plan.specs[item.param].layout, plan.tiles_of(item)
    mine = _in_order(tiles.get(rank, ()))
    if item.route == "local":
        ways.own += [_Part(item, tile) for tile in mine]
        return False
    owner = item.owner_for(layout, rank)
    shared = len(item.owners) == 1
    for tile in mine:
        part, source = _Part(item, tile), layout.source(tile.held.piece, owner)
        if rank == owner:
            ways.own.append(part)
        elif source == rank:
            ways.outgoing.setdefault(owner, []).append(part)
        else:
            ways.idle.setdefault(source, []).append(part)
        for other in layout.keepers[tile.held.piece] if shared and source == rank else ():
            if other != rank:
                ways.relayed.setdefault(other, []).append(part)
    for holder, of_holder in tiles.items() if rank == owner else ():
        if holder != owner and item.owner_for(layout, holder) == owner:
            came = [tile for tile in _in_order(of_holder) if layout.source(tile.held.piece, owner) == holder]
            ways.incoming.setdefault(holder, []).extend(_Part(item, tile) for tile in came)
    for number, kept in enumerate(plan.specs[item.param].kept):
        if kept.travels:
            _route_kept(layout, item, number, kept.layout.tiles[item.matrix], rank, ways)
    return shared and layout.has_replicas


def _in_order(tiles: Sequence[Tile]) -> list[Tile]:
    """Tiles in an order that does not depend on how their rank stores them: whoever talks about them sorts alike."""
    return sorted(tiles, key=lambda tile: tile.key)


def _mate(layout: ParamLayout, item: Item, keeper: int) -> int:
    """The rank from which a rank hears what stages keep of a matrix: that which its first tile comes from, or the owner
    of all that it stores nothing of."""
    owner = item.owner_for(layout, keeper)
    sources = [layout.source(tile.held.piece, owner) for tile in _in_order(layout.tiles[item.matrix].get(keeper, ()))]
    return owner if keeper in sources else next(iter(sources), owner)


def _route_kept(
    layout: ParamLayout, item: Item, number: int, tiles: Mapping[int, tuple[Tile, ...]], rank: int, ways: _Ways
) -> None:
    for keeper in tiles:
        owner, mate = item.owner_for(layout, keeper), _mate(layout, item, keeper)
        sent, got = (ways.told, ways.heard) if mate == owner else (ways.relayed, ways.idle)
        if keeper != owner and rank in (mate, keeper):
            parts, other = (sent, keeper) if rank == mate else (got, mate)
            parts.setdefault(other, []).append(_Part(item, tiles[rank][0], number))


def _merged(first: Parts, second: Parts) -> Parts:
    """Parts of both by rank: those of the first, followed by those of the second."""
    return {rank: [*first.get(rank, ()), *second.get(rank, ())] for rank in {**first, **second}}


class _Wired:
    """Places on the wires of a bucket."""

    def __init__(self, plan: Plan, bucket: Bucket, slots: Mapping[Item, int]) -> None:
        self._plan, self._ranks, self._itemsize, self._slots = plan, bucket.ranks, bucket.itemsize, slots

    def _ordered(self, parts: Parts) -> Iterator[tuple[_Part, int]]:
        """Each part with its start: by rank, tiles before kept numbers, as they were noted."""
        at = 0
        for rank in self._ranks:
            for part in sorted(parts.get(rank, ()), key=lambda part: part.number >= 0):
                yield part, at
                at += self._size(part)

    def _size(self, part: _Part) -> int:
        return part.tile.numel if part.number < 0 else -(-part.tile.numel * 4 // self._itemsize)

    def splits(self, parts: Parts) -> Ints:
        """Number of elements for each rank."""
        return tuple(sum(map(self._size, parts.get(rank, ()))) for rank in self._ranks)

    def loads(self, parts: Parts) -> Iterator[Load]:
        """Loads of the tiles, packed side by side."""
        for part, at in self._ordered(parts):
            if part.number < 0:
                yield Load(part.item.param, part.tile, BufferPlace(at, row_major(part.tile.sizes)))

    def kept_loads(self, parts: Parts) -> Iterator[KeptLoad]:
        """Loads of the kept numbers, behind the tiles of their rank."""
        for part, at in self._ordered(parts):
            if part.number >= 0:
                yield KeptLoad(part.item.param, part.number, part.tile, at, self._size(part))

    def in_batch(self, part: _Part) -> BufferPlace:
        """Place of a tile of an owned matrix among the batches."""
        box = part.item.box(self._plan.specs[part.item.param])
        steps = zip(part.tile.start, box.start, box.strides, strict=True)
        offset = sum((at - first) * stride for at, first, stride in steps)
        return BufferPlace(self._slots[part.item] + offset, box.strides)

    def copies(self, parts: Parts) -> tuple[Copy, ...]:
        """Copies of packed tiles from the wire to the batches."""
        return joined(
            Copy(part.tile.sizes, BufferPlace(at, row_major(part.tile.sizes)), self.in_batch(part))
            for part, at in self._ordered(parts)
            if part.number < 0
        )

    def passed_on(self, parts: Parts, places: Mapping[tuple[int, Tile], BufferPlace]) -> tuple[Copy, ...]:
        """Copies from these places to the relay's buffer, for those of the tiles that have a place."""
        return joined(
            Copy(part.tile.sizes, places[part.item.param, part.tile], BufferPlace(at, row_major(part.tile.sizes)))
            for part, at in self._ordered(parts)
            if part.number < 0 and (part.item.param, part.tile) in places
        )


def _relay(wire: _Wired, ways: _Ways, returned: Iterable[Load]) -> Relay:
    on_wire = {(load.param, load.tile): load.place for load in returned}
    in_batch = {(part.item.param, part.tile): wire.in_batch(part) for part in ways.own}
    return Relay(
        wire.splits(ways.relayed),
        wire.splits(ways.idle),
        wire.passed_on(ways.relayed, on_wire),
        wire.passed_on(ways.relayed, in_batch),
        tuple(wire.kept_loads(ways.relayed)),
        tuple(wire.kept_loads(ways.idle)),
    )


__all__ = ["Batch", "KeptLoad", "Load", "Program", "Ranks", "Relay", "Wire", "make_program"]
