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
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from shardmuon.layout.pieces import Tile
from shardmuon.layout.views import Ints, row_major
from shardmuon.plan.items import Bucket, Item, Key
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


_Part = tuple[int, Tile, int]  # parameter, a tile, and of which of its `Spec.kept`; -1: of the parameter itself
_Phase = Literal["scatter", "relay"]
# What a rank sends (True) or gets (False) as results in a phase, by the rank at the other end.
_Ways = defaultdict[tuple[_Phase, bool, int], list[_Part]]


def make_program(plan: Plan, bucket: Bucket, rank: int, missing: Collection[int] = ()) -> Program:
    """The program of a rank of the bucket, without parameters that have no gradient in this step (`missing`)."""
    numbers = [n for n in bucket.items if plan.items[n].param not in missing]
    numbers.sort(key=lambda n: _batch_key(plan, n))  # equal ones side by side, so that copies join
    items = [plan.items[n] for n in numbers]
    batches, slots, end = _batches(plan, [n for n in numbers if rank in plan.items[n].owners], bucket.itemsize)
    own, ways = list[_Part](), _Ways(list)
    for item in items:
        for phase, sender, receiver, part in _results(plan, item, rank):
            if sender == receiver == rank:
                own.append(part)
            elif rank in (sender, receiver):
                ways[phase, rank == sender, receiver if rank == sender else sender].append(part)

    def in_batches(param: int, tile: Tile) -> BufferPlace:
        """Place of a tile of an owned matrix."""
        offset, strides = tile.in_matrix(plan.specs[param].layout.view)
        return BufferPlace(slots[param, tile.matrix] + offset, strides)

    def wire(phase: _Phase, before: Sequence[Load] = (), kept: bool = True) -> Wire:
        """An exchange of results. `before`: tiles that came by the one before it, to be passed on."""
        sent, out, told = _packed(ways, phase, True, bucket, kept)
        came, tiles, heard = _packed(ways, phase, False, bucket, kept)
        owned = [load for load in out if (load.param, load.tile.matrix) in slots]
        copies = _joined(Copy(one.tile.sizes, one.place, in_batches(one.param, one.tile)) for one in owned)
        return Wire(sent, came, tiles, copies, _passed(before, out), told, heard)

    back, scatter = wire("scatter", kept=False), wire("scatter")
    return Program(
        bucket=bucket,
        rank=rank,
        batches=tuple(batches),
        batch_numel=end,
        own=tuple(Load(param, tile, in_batches(param, tile)) for param, tile, _ in own),
        gather=back._replace(sent=back.came, came=back.sent),
        scatter=scatter,
        relay=wire("relay", scatter.tiles) if any(_is_relayed(plan, item) for item in items) else None,
    )


def _batch_key(plan: Plan, number: int) -> tuple[int, int, str, str, int]:
    """Sort key of a bucket's items, in batches and on wires."""
    item = plan.items[number]
    return item.rows, item.cols, item.how, plan.specs[item.param].batch, number


def _batches(plan: Plan, owned: Sequence[int], itemsize: int) -> tuple[list[Batch], dict[Key, int], int]:
    """Batches of the owned matrices, which stand in order, where each matrix begins, and where all end."""
    found, slots, end = list[Batch](), dict[Key, int](), 0
    for (rows, cols, *_), group in itertools.groupby(owned, key=lambda n: _batch_key(plan, n)[:-1]):
        alike, stride = tuple(group), aligned(rows * cols, itemsize)
        found.append(Batch(alike, (len(alike), rows, cols), end, stride))
        for number in alike:
            slots[plan.items[number].key] = end
            end += stride
    return found, slots, end


def _is_relayed(plan: Plan, item: Item) -> bool:
    """True if a matrix needs its bucket's relay."""
    return item.route == "owner" and len(item.owners) == 1 and plan.specs[item.param].layout.has_replicas


def _results(plan: Plan, item: Item, rank: int) -> Iterator[tuple[_Phase, int, int, _Part]]:
    """All parts of a matrix's result that concern a rank, with their phase, sender and receiver; others may be among
    them. What an owner stores itself it "sends" to itself."""
    spec = plan.specs[item.param]
    layout, tiles = spec.layout, spec.layout.tiles[item.matrix]
    holders: Collection[int] = tiles
    if rank != item.owner_for(layout, rank):  # it talks with its own owner and with those who store the same
        mates = (layout.keepers[tile.held.piece] for tile in tiles.get(rank, ()))
        holders = tiles.keys() & {rank}.union(*mates)
    for holder in holders:
        owner = item.owner_for(layout, holder)
        for tile in tiles[holder]:
            source, part = layout.source(tile.held.piece, owner), (item.param, tile, -1)
            yield ("scatter", owner, holder, part) if source == holder else ("relay", source, holder, part)
    for number, kept in enumerate(spec.kept):
        keepers = kept.layout.tiles[item.matrix]
        for keeper in keepers if kept.travels and rank in keepers else ():
            # it hears from where its first tile comes from, or from the owner of all that it stores nothing of
            owner, stored = item.owner_for(layout, keeper), tiles.get(keeper, ())
            sources = [layout.source(tile.held.piece, owner) for tile in stored]
            mate = owner if keeper in sources else next(iter(sources), owner)
            if keeper != owner:
                part = item.param, keepers[rank][0], number
                yield "scatter" if mate == owner else "relay", mate, keeper, part


def _packed(
    ways: _Ways, phase: _Phase, sends: bool, bucket: Bucket, kept: bool
) -> tuple[Ints, tuple[Load, ...], tuple[KeptLoad, ...]]:
    """The parts that a rank sends or gets, side by side on a wire by the rank at its other end, tiles before what is
    `kept`, as they were noted. Returns elements for each rank, the tiles, and kept numbers."""
    at, splits, loads, numbers = 0, list[int](), list[Load](), list[KeptLoad]()
    for other in bucket.ranks:
        first = at
        for param, tile, number in sorted(ways[phase, sends, other], key=lambda part: part[2] >= 0):
            if number < 0:
                loads.append(Load(param, tile, BufferPlace(at, row_major(tile.sizes))))
                at += tile.numel
            elif kept:
                numbers.append(KeptLoad(param, number, tile, at, -(-tile.numel * 4 // bucket.itemsize)))
                at += numbers[-1].size
        splits.append(at - first)
    return tuple(splits), tuple(loads), tuple(numbers)


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
    forms = defaultdict[object, list[Copy]](list)
    for copy in copies:
        forms[copy.sizes, copy.here.strides, copy.there.strides].append(copy)
    return [run for alike in forms.values() for run in _runs(alike)]


def _runs(alike: Sequence[Copy]) -> Iterator[Copy]:
    """The runs of copies of one form. Both places go forward in one: no stride is 0."""
    steps = [(b.here.start - a.here.start, b.there.start - a.there.start) for a, b in itertools.pairwise(alike)]
    first = 0
    while first < len(alike):
        after = first  # number of the last one in this run
        while after < len(steps) and min(steps[first]) > 0 and steps[after] == steps[first]:
            after += 1
        sizes, *places = alike[first]
        if after > first:
            sizes = (after - first + 1, *sizes)
            pairs = zip(places, steps[first], strict=True)
            places = [BufferPlace(place.start, (step, *place.strides)) for place, step in pairs]
        yield _merged(Copy(sizes, *places))
        first = after + 1
