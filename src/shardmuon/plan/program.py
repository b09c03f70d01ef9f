"""The program of one rank for one bucket: copy lists between its storages, wires and the batches. Pure.

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
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from shardmuon.layout.pieces import Tile
from shardmuon.layout.views import Ints, row_major
from shardmuon.plan.items import Bucket, Item
from shardmuon.plan.plan import Plan

_ALIGNMENT = 64  # bytes: where every matrix of a batch begins at a multiple, its bits depend on no slot


def aligned(numel: int, itemsize: int) -> int:
    """Elements up to the next multiple of the alignment."""
    per_line = _ALIGNMENT // itemsize
    return -(-numel // per_line) * per_line


class BufferPlace(NamedTuple):
    """Place of a block in a buffer: its first element, and the stride of each dim."""

    start: int
    strides: Ints


class Copy(NamedTuple):
    """A block in two buffers, to be copied one way or the other. No stride is 0: places differ."""

    sizes: Ints
    here: BufferPlace
    there: BufferPlace


class Load(NamedTuple):
    """A tile that this rank stores, and its place in a buffer."""

    param: int
    tile: Tile
    place: BufferPlace


class KeptLoad(NamedTuple):
    """Numbers that a stage keeps of a matrix, and where their bits stand on a wire.

    Attributes:
        param, number: Number of the parameter, and which of its `Spec.kept`.
        tile: Their tile in this rank's storage.
        start, size: On the wire, in its elements.
    """

    param: int
    number: int
    tile: Tile
    start: int = 0
    size: int = 0


class Batch(NamedTuple):
    """Matrices of one shape that are orthogonalized alike.

    Attributes:
        items: Numbers of the plan's items, one for each slot.
        shape: (B, rows, cols).
        start, stride: Slot k begins at start + k * stride in the batches' buffer, in elements.
    """

    items: tuple[int, ...]
    shape: Ints
    start: int
    stride: int


class Wire(NamedTuple):
    """One exchange, as a rank sees both of its ends.

    Attributes:
        sent, came: Elements for each rank of the bucket, and from each.
        tiles: Of this rank's storage: what it sends by the gather, what the others bring it.
        copies: Between the other end (`here`) and the batches (`there`).
        passed: Copies of what the scatter brought (`here`) to what the relay sends (`there`).
        told, heard: What stages keep, on what is sent and on what comes.
    """

    sent: Ints
    came: Ints
    tiles: tuple[Load, ...]
    copies: tuple[Copy, ...]
    passed: tuple[Copy, ...] = ()
    told: tuple[KeptLoad, ...] = ()
    heard: tuple[KeptLoad, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Program:
    """One bucket on one rank.

    Attributes:
        bucket, rank: The bucket, and the rank that carries it out.
        batches, batch_numel: What this rank owns, and the elements of the buffer that holds it.
        own: Tiles of what it owns, in that buffer.
        gather, scatter, relay: The exchanges; no relay if nobody in the bucket needs one.
    """

    bucket: Bucket
    rank: int
    batches: tuple[Batch, ...]
    batch_numel: int
    own: tuple[Load, ...]
    gather: Wire
    scatter: Wire
    relay: Wire | None

    @property
    def num_owned(self) -> int:
        """Matrices that are orthogonalized here."""
        return sum(len(batch.items) for batch in self.batches)


class _Part(NamedTuple):
    """A tile or kept numbers on their way: `number` is that of `Spec.kept`, -1 for a tile."""

    item: Item
    tile: Tile
    number: int = -1


_Side = Literal["own", "held", "owned", "relayed", "idle"]
# All parts that one rank sends or gets in a bucket, by the rank at the other end: tiles that stay; what is on the
# holder's and on the owner's side of both wires, kept numbers of the scatter's only; to other replicas, from another.
_Ways = defaultdict[tuple[_Side, int], list[_Part]]


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
        offset, strides = tile.in_matrix(plan.specs[item.param].layout.view)
        return BufferPlace(slots[item] + offset, strides)

    def copies(parts: _Packed) -> tuple[Copy, ...]:
        """Copies between a wire and the batches."""
        owned = [(load, item) for load, item in zip(parts.loads, parts.items, strict=True) if item in slots]
        return _joined(Copy(load.tile.sizes, load.place, in_batch(item, load.tile)) for load, item in owned)

    held, owned = (_packed(ways, side, bucket, kept=False) for side in ("held", "owned"))
    gather = Wire(held.splits, owned.splits, held.loads, copies(owned))
    scatter = Wire(gather.came, gather.sent, gather.tiles, gather.copies)
    if any(kept.travels for n in numbers for kept in plan.specs[plan.items[n].param].kept):
        held, owned = (_packed(ways, side, bucket) for side in ("held", "owned"))
        scatter = Wire(owned.splits, held.splits, held.loads, copies(owned), told=owned.kept, heard=held.kept)
    relay: Wire | None = None
    if relays:
        out, back = (_packed(ways, side, bucket) for side in ("relayed", "idle"))
        passed = _passed(scatter.tiles, out.loads)
        relay = Wire(out.splits, back.splits, back.loads, copies(out), passed, out.kept, back.kept)
    return Program(
        bucket=bucket,
        rank=rank,
        batches=tuple(batches),
        batch_numel=batches[-1].start + batches[-1].shape[0] * batches[-1].stride if batches else 0,
        own=tuple(Load(part.item.param, part.tile, in_batch(part.item, part.tile)) for part in ways["own", rank]),
        gather=gather,
        scatter=scatter,
        relay=relay,
    )


def _batch_key(plan: Plan, number: int) -> tuple[int, int, str, str, int]:
    """Sort key of a bucket's items, in batches and on wires."""
    item = plan.items[number]
    return item.rows, item.cols, item.how, plan.specs[item.param].batch, number


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
    layout = plan.specs[item.param].layout
    tiles = layout.tiles[item.matrix]
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
    if rank == mate:
        ways["owned" if scattered else "relayed", holder].append(part)
    elif rank == holder:
        ways["held" if scattered else "idle", mate].append(part)


def _in_order(tiles: Sequence[Tile]) -> list[Tile]:
    """Tiles in the order of their matrix, in which the cost model counts them, too; not as their rank stores them."""
    return sorted(tiles, key=lambda tile: tile.key)


class _Packed(NamedTuple):
    """Parts side by side on one side of a wire: elements for each rank, tiles and their matrices, kept numbers."""

    splits: Ints
    loads: tuple[Load, ...]
    items: list[Item]
    kept: tuple[KeptLoad, ...]


def _packed(ways: _Ways, side: _Side, bucket: Bucket, kept: bool = True) -> _Packed:
    """Pack the parts of a side by rank, tiles before kept numbers, as they were noted."""
    at, splits, loads, items, numbers = 0, list[int](), list[Load](), list[Item](), list[KeptLoad]()
    for rank in bucket.ranks:
        first = at
        for item, tile, number in sorted(ways[side, rank], key=lambda part: part.number >= 0):
            if number < 0:
                loads.append(Load(item.param, tile, BufferPlace(at, row_major(tile.sizes))))
                items.append(item)
                at += tile.numel
            elif kept:
                numbers.append(KeptLoad(item.param, number, tile, at, -(-tile.numel * 4 // bucket.itemsize)))
                at += numbers[-1].size
        splits.append(at - first)
    return _Packed(tuple(splits), tuple(loads), items, tuple(numbers))


def _passed(came: Sequence[Load], sent: Sequence[Load]) -> tuple[Copy, ...]:
    """Copies of tiles that came to where they are sent on."""
    places = {(load.param, load.tile.key): load.place for load in came}
    found = ((to, places.get((to.param, to.tile.key))) for to in sent)
    return _joined(Copy(to.tile.sizes, place, to.place) for to, place in found if place is not None)


# ------------------------------------------------------------------------------------------------ copies, few of them


def _joined(copies: Iterable[Copy]) -> tuple[Copy, ...]:
    """The same copies with fewer blocks and dims.

    Blocks of one form at equal distances on both sides become one with a dim more. Done twice: the tiles of one sender
    join, and then the senders, each of which sends matrices of several shapes.
    """
    return tuple(_rows(_rows([_merged(copy) for copy in copies])))


def _merged(copy: Copy) -> Copy:
    """The same copy without dims of size 1, and with neighbouring dims taken as one if they follow on without gaps on
    both sides."""
    dims: list[tuple[int, int, int]] = []
    for size, here, there in zip(copy.sizes, copy.here.strides, copy.there.strides, strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1:] == (size * here, size * there):
            dims[-1] = (dims[-1][0] * size, here, there)
        else:
            dims.append((size, here, there))
    sizes, here_strides, there_strides = zip(*(dims or [(1, 1, 1)]), strict=True)
    return Copy(sizes, BufferPlace(copy.here.start, here_strides), BufferPlace(copy.there.start, there_strides))


def _rows(copies: Iterable[Copy]) -> list[Copy]:
    """Runs of copies of one form that lie at equal distances, each as one."""
    forms: dict[object, list[list[Copy]]] = {}
    for copy in copies:
        runs = forms.setdefault((copy.sizes, copy.here.strides, copy.there.strides), [[]])
        if not _goes_on(runs[-1], copy):
            runs.append([])
        runs[-1].append(copy)
    return [_as_one(run) for runs in forms.values() for run in runs]


def _apart(first: Copy, other: Copy) -> tuple[int, int]:
    return other.here.start - first.here.start, other.there.start - first.there.start


def _goes_on(run: Sequence[Copy], copy: Copy) -> bool:
    """True if a copy lies as far behind the last one of a run as that behind the one before."""
    if not run:
        return True
    steps = _apart(run[-1], copy)
    return min(steps) > 0 and (len(run) == 1 or steps == _apart(run[-2], run[-1]))


def _as_one(run: Sequence[Copy]) -> Copy:
    sizes, *places = run[0]
    if len(run) == 1:
        return run[0]
    here, there = (
        BufferPlace(place.start, (step, *place.strides)) for place, step in zip(places, _apart(*run[:2]), strict=True)
    )
    return _merged(Copy((len(run), *sizes), here, there))
