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
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

from shardmuon.layout.pieces import Tile
from shardmuon.layout.views import Ints, row_major
from shardmuon.plan.copies import BufferPlace, Copy, joined
from shardmuon.plan.plan import Bucket, Item, Plan
from shardmuon.plan.types import Batch, KeptLoad, Load, Mates, Program, Relay, Wire, aligned

__all__ = ["Batch", "KeptLoad", "Load", "Program", "Relay", "Wire", "make_program"]


class _Part(NamedTuple):
    """A tile or kept numbers on their way: `number` is that of `Spec.kept`, -1 for a tile."""

    item: Item
    tile: Tile
    number: int = -1


_Side = Literal["own", "held", "owned", "relayed", "idle"]
# All parts that one rank sends or gets in a bucket, by the rank at the other end: tiles that stay; what is on the
# holder's and on the owner's side of both wires, kept numbers of the scatter's only; to other replicas, from another.
_Ways = defaultdict[tuple[_Side, int], list[_Part]]
_WIRE: tuple[_Side, _Side] = ("held", "owned")
_RELAY: tuple[_Side, _Side] = ("relayed", "idle")


def make_program(plan: Plan, bucket: Bucket, rank: int, missing: Collection[int] = ()) -> Program:
    """The program of a rank of the bucket, without parameters that have no gradient in this step (`missing`)."""
    numbers = [n for n in bucket.items if plan.items[n].param not in missing]
    numbers.sort(key=lambda n: _batch_key(plan, n))  # equal ones side by side, so that copies join
    batches, slots = _batches(plan, [n for n in numbers if rank in plan.items[n].owners], bucket.itemsize)
    ways, relays = _Ways(list), False
    for number in numbers:
        relays |= _route(plan, plan.items[number], rank, ways)

    def in_batch(item: Item, tile: Tile) -> BufferPlace:
        """Place of a tile of an owned matrix among the batches."""
        box = item.box(plan.specs[item.param])
        steps = zip(tile.start, box.start, box.strides, strict=True)
        return BufferPlace(slots[item] + sum((at - first) * stride for at, first, stride in steps), box.strides)

    def wire(kept: bool) -> tuple[Wire, tuple[Load, ...]]:
        """A wire, with kept numbers or without; and the tiles on the holder's side."""
        held, owned = (_packed(ways, side, bucket, kept) for side in _WIRE)
        copies = joined(Copy(load.tile.sizes, load.place, in_batch(item, load.tile)) for item, load in owned.tiles)
        return Wire(held.splits, owned.splits, copies, owned.kept, held.kept), held.loads

    own = tuple(Load(part.item.param, part.tile, in_batch(part.item, part.tile)) for part in ways["own", rank])
    gather, foreign = scatter, returned = wire(kept=False)
    if any(kept.travels for n in numbers for kept in plan.specs[plan.items[n].param].kept):
        scatter, returned = wire(kept=True)
    sums, mates = _sums(plan, numbers, rank)
    relayed, idle = _packed(ways, "relayed", bucket), _packed(ways, "idle", bucket)
    return Program(
        bucket=bucket,
        rank=rank,
        batches=tuple(batches),
        batch_numel=batches[-1].start + batches[-1].shape[0] * batches[-1].stride if batches else 0,
        own=own,
        foreign=foreign,
        returned=returned,
        idle=idle.loads,
        gather=gather,
        scatter=scatter,
        relay=_relay(relayed, idle, returned, own) if relays else None,
        sums=sums,
        mates=mates,
    )


def _sums(plan: Plan, numbers: Sequence[int], rank: int) -> tuple[int, tuple[Mates, ...]]:
    """`Program.sums` and `Program.mates` of a bucket with these items."""
    most, found = 0, list[Mates]()
    for number in sorted(numbers):
        item = plan.items[number]
        slicing = plan.specs[item.param].slicings[item.matrix] if item.parts > 1 else None
        if slicing is not None:
            most = max(most, 1 + slicing.sums)
            if rank in item.owners:
                replica, mates = item.owners.index(rank), plan.items[number - item.part :][: item.parts]
                found.append(Mates(number, tuple(mate.owners[replica] for mate in mates)))
    return most, tuple(found)


def _batch_key(plan: Plan, number: int) -> tuple[int, int, str, int, str, int]:
    """Sort key of a bucket's items, in batches and on wires."""
    item = plan.items[number]
    return *item.shape, item.how, item.parts, plan.specs[item.param].batch, number


def _batches(plan: Plan, owned: Sequence[int], itemsize: int) -> tuple[list[Batch], dict[Item, int]]:
    """Batches of the owned matrices, which stand in order, and where each begins."""
    found: list[Batch] = []
    slots: dict[Item, int] = {}
    start = 0
    for key, group in itertools.groupby(owned, key=lambda n: _batch_key(plan, n)[:-1]):
        alike = tuple(group)
        stride = aligned(key[0] * key[1], itemsize)
        found.append(Batch(alike, (len(alike), *key[:2]), start, stride))
        slots.update((plan.items[n], start + k * stride) for k, n in enumerate(alike))
        start += len(alike) * stride
    return found, slots


def _route(plan: Plan, item: Item, rank: int, ways: _Ways) -> bool:
    """Note what a rank sends and gets of a matrix. Returns True if its bucket needs the relay."""
    layout, tiles = plan.specs[item.param].layout, plan.tiles_of(item)
    if item.route == "local":
        ways["own", rank] += [_Part(item, tile) for tile in _in_order(tiles.get(rank, ()))]
        return False
    holders: Collection[int] = tiles
    if rank != item.owner_for(layout, rank):  # it talks with its own owner and with those who store the same
        mates = (layout.keepers[tile.held.piece] for tile in tiles.get(rank, ()))
        holders = tiles.keys() & {rank}.union(*mates)
    for holder in holders:
        owner = item.owner_for(layout, holder)
        for tile in _in_order(tiles[holder]):
            part, source = _Part(item, tile), layout.source(tile.held.piece, owner)
            if holder != owner:
                _note(ways, rank, holder, owner if source == holder else source, source == holder, part)
            elif rank == owner:
                ways["own", rank].append(part)
    for number, kept in enumerate(plan.specs[item.param].kept):
        keepers = kept.layout.tiles[item.matrix]
        for keeper in keepers if kept.travels and rank in keepers else ():
            # it hears from where its first tile comes from, or from the owner of all that it stores nothing of
            owner, stored = item.owner_for(layout, keeper), _in_order(layout.tiles[item.matrix].get(keeper, ()))
            sources = [layout.source(tile.held.piece, owner) for tile in stored]
            mate = owner if keeper in sources else next(iter(sources), owner)
            if keeper != owner:
                _note(ways, rank, keeper, mate, mate == owner, _Part(item, keepers[rank][0], number))
    return len(item.owners) == 1 and layout.has_replicas


def _note(ways: _Ways, rank: int, holder: int, mate: int, scattered: bool, part: _Part) -> None:
    """Note a part that comes back to a holder from its mate, by the scatter or by the relay, if `rank` is one of
    both."""
    sent, got = _WIRE[::-1] if scattered else _RELAY
    if rank in (mate, holder):
        ways[(sent, holder) if rank == mate else (got, mate)].append(part)


def _in_order(tiles: Sequence[Tile]) -> list[Tile]:
    """Tiles in the order of their matrix, in which the cost model counts them, too; not as their rank stores them."""
    return sorted(tiles, key=lambda tile: tile.key)


class _Packed(NamedTuple):
    """Parts side by side on one side of a wire.

    Attributes:
        splits: Number of elements for each rank.
        tiles: Tiles with their matrices.
        kept: Kept numbers, behind the tiles of their rank.
    """

    splits: Ints
    tiles: list[tuple[Item, Load]]
    kept: tuple[KeptLoad, ...]

    @property
    def loads(self) -> tuple[Load, ...]:
        return tuple(load for _, load in self.tiles)


def _packed(ways: _Ways, side: _Side, bucket: Bucket, kept: bool = True) -> _Packed:
    """Pack the parts of a side by rank, tiles before kept numbers, as they were noted."""
    at, splits, tiles, numbers = 0, list[int](), list[tuple[Item, Load]](), list[KeptLoad]()
    for rank in bucket.ranks:
        first = at
        for item, tile, number in sorted(ways[side, rank], key=lambda part: part.number >= 0):
            if number < 0:
                tiles.append((item, Load(item.param, tile, BufferPlace(at, row_major(tile.sizes)))))
                at += tile.numel
            elif kept:
                numbers.append(KeptLoad(item.param, number, tile, at, -(-tile.numel * 4 // bucket.itemsize)))
                at += numbers[-1].size
        splits.append(at - first)
    return _Packed(tuple(splits), tiles, tuple(numbers))


def _relay(relayed: _Packed, idle: _Packed, returned: Sequence[Load], own: Sequence[Load]) -> Relay:
    def passed_on(loads: Sequence[Load]) -> tuple[Copy, ...]:
        """Copies of those of these tiles that are relayed, to its buffer."""
        places = {(load.param, load.tile.key): load.place for load in loads}
        found = ((to, places.get((to.param, to.tile.key))) for to in relayed.loads)
        return joined(Copy(to.tile.sizes, place, to.place) for to, place in found if place is not None)

    return Relay(relayed.splits, idle.splits, passed_on(returned), passed_on(own), relayed.kept, idle.kept)
