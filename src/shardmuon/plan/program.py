"""The program of one rank for one bucket: copy lists between local storage, wires and batches. Pure.

[Note: places]
    Each tile that a rank stores has one place in a buffer. Tiles of matrices that the rank owns are in its batches,
    where they are orthogonalized, and are never sent. All other tiles are on a wire, ordered by the rank at the other
    end, then by item, then by their order in storage. The scatter returns results to the places that the gather sent
    from. A single rank owns everything, and its wires are empty.

[Note: results in two stages]
    An owner communicates with one rank per piece, in its own replica if it belongs to one. That rank sends the results
    to the other ranks with the same piece in a second exchange among the bucket's ranks, the relay; there is none if
    each replica has an owner. Stage state takes the same routes, behind the tiles for each rank. A rank that stores
    some of the matrix receives the state from the sender of its first tile, the owner or a relaying rank; a rank that
    stores nothing of the matrix receives it from the owner.
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

_ALIGNMENT = 64  # bytes: if every matrix of a batch begins at a multiple, its result does not depend on its slot


def aligned(numel: int, itemsize: int) -> int:
    """Round a number of elements up to the next multiple of the alignment."""
    per_line = _ALIGNMENT // itemsize
    return -(-numel // per_line) * per_line


class BufferPlace(NamedTuple):
    """Place of a block in a buffer: offset of its first element, and the stride of each dim."""

    start: int
    strides: Ints


class Copy(NamedTuple):
    """Copy of a block between two buffers, in either direction. No stride is 0: no two elements share a place."""

    sizes: Ints
    here: BufferPlace
    there: BufferPlace


class Load(NamedTuple):
    """A tile that this rank stores, and its place in a buffer."""

    param: int
    tile: Tile
    place: BufferPlace


class KeptLoad(NamedTuple):
    """Stage state of a matrix, and its place on a wire.

    Attributes:
        param, number: Index of the parameter, and index into its `Spec.kept`.
        tile: Tile of the state in this rank's state tensor.
        start, size: Place on the wire, in elements of the wire.
    """

    param: int
    number: int
    tile: Tile
    start: int = 0
    size: int = 0


class Batch(NamedTuple):
    """Matrices of one shape that are orthogonalized in one call.

    Attributes:
        items: Indices of the plan's items, one for each slot.
        shape: (B, rows, cols).
        start, stride: Slot k begins at element start + k * stride of the buffer of batches.
    """

    items: tuple[int, ...]
    shape: Ints
    start: int
    stride: int


class Wire(NamedTuple):
    """One exchange, as seen by one rank.

    Attributes:
        sent, came: Number of elements sent to each rank of the bucket, and received from each.
        tiles: Tiles of this rank's storage that are sent (gather) or received (scatter, relay).
        copies: Copies between the wire (`here`) and the batches (`there`), for matrices that this rank owns.
        passed: Copies from the scatter's receive buffer (`here`) to the relay's send buffer (`there`).
        told, heard: Stage state in the send buffer and in the receive buffer.
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
    """All copies and exchanges of one rank for one bucket.

    Attributes:
        bucket, rank: The bucket, and the rank that executes the program.
        batches, batch_numel: Batches of the matrices that this rank owns, and number of elements of their buffer.
        own: This rank's tiles of matrices that it owns, with their places in the buffer of batches.
        gather, scatter, relay: The exchanges; `relay` is None if no matrix of the bucket needs one.
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
        """Number of matrices that this rank orthogonalizes."""
        return sum(len(batch.items) for batch in self.batches)


_Part = tuple[int, Tile, int]  # parameter, tile, index into its `Spec.kept` (-1: a tile of the parameter itself)
_Phase = Literal["scatter", "relay"]
# (phase, True if sent or False if received, rank at the other end) -> result parts of one rank.
_Ways = defaultdict[tuple[_Phase, bool, int], list[_Part]]


def make_program(plan: Plan, bucket: Bucket, rank: int, missing: Collection[int] = ()) -> Program:
    """Make the program of one rank for a bucket. `missing`: parameters without a gradient in this step, left out."""
    numbers = [n for n in bucket.items if plan.items[n].param not in missing]
    numbers.sort(key=lambda n: _batch_key(plan, n))  # equal shapes side by side, so that copies can be merged
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
        """Place of a tile of an owned matrix in the buffer of batches."""
        offset, strides = tile.in_matrix(plan.specs[param].layout.view)
        return BufferPlace(slots[param, tile.matrix] + offset, strides)

    def wire(phase: _Phase, before: Sequence[Load] = (), kept: bool = True) -> Wire:
        """Make an exchange of results. `before`: tiles received in the previous exchange, to be passed on."""
        sent, out, told = _packed(ways, phase, True, bucket, kept)
        came, tiles, heard = _packed(ways, phase, False, bucket, kept)
        owned = [load for load in out if (load.param, load.tile.matrix) in slots]
        copies = _joined(Copy(one.tile.sizes, one.place, in_batches(one.param, one.tile)) for one in owned)
        return Wire(sent, came, tiles, copies, _passed(before, out), told, heard)

    back, scatter = wire("scatter", kept=False), wire("scatter")
    # a matrix with one owner and several replicas needs a relay
    relayed = any(bucket.exchange and len(i.owners) == 1 and plan.specs[i.param].layout.has_replicas for i in items)
    return Program(
        bucket=bucket,
        rank=rank,
        batches=tuple(batches),
        batch_numel=end,
        own=tuple(Load(param, tile, in_batches(param, tile)) for param, tile, _ in own),
        gather=back._replace(sent=back.came, came=back.sent),
        scatter=scatter,
        relay=wire("relay", scatter.tiles) if relayed else None,
    )


def _batch_key(plan: Plan, number: int) -> tuple[int, int, str, str, int]:
    """Sort key of a bucket's items, for batches and wires."""
    item = plan.items[number]
    return item.rows, item.cols, item.how, plan.specs[item.param].batch, number


def _batches(plan: Plan, owned: Sequence[int], itemsize: int) -> tuple[list[Batch], dict[Key, int], int]:
    """Lay out the owned matrices, sorted by batch key, in one buffer. Returns the batches, the offset of each matrix,
    and the buffer's size in elements."""
    found, slots, end = list[Batch](), dict[Key, int](), 0
    for (rows, cols, *_), group in itertools.groupby(owned, key=lambda n: _batch_key(plan, n)[:-1]):
        alike, stride = tuple(group), aligned(rows * cols, itemsize)
        found.append(Batch(alike, (len(alike), rows, cols), end, stride))
        for number in alike:
            slots[plan.items[number].key] = end
            end += stride
    return found, slots, end


def _results(plan: Plan, item: Item, rank: int) -> Iterator[tuple[_Phase, int, int, _Part]]:
    """Yield at least all parts of a matrix's result that a rank sends or receives, as (phase, sender, receiver, part).
    An owner "sends" the parts that it stores to itself."""
    spec = plan.specs[item.param]
    layout, tiles = spec.layout, spec.layout.tiles[item.matrix]
    holders: Collection[int] = tiles
    if rank != item.owner_for(layout, rank):  # it communicates with its owner and with ranks that store the same pieces
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
            # state comes from the sender of the keeper's first tile, or from the owner if it stores no tile
            owner, stored = item.owner_for(layout, keeper), tiles.get(keeper, ())
            sources = [layout.source(tile.held.piece, owner) for tile in stored]
            mate = owner if keeper in sources else next(iter(sources), owner)
            if keeper != owner:
                part = item.param, keepers[rank][0], number
                yield "scatter" if mate == owner else "relay", mate, keeper, part


def _packed(
    ways: _Ways, phase: _Phase, sends: bool, bucket: Bucket, kept: bool
) -> tuple[Ints, tuple[Load, ...], tuple[KeptLoad, ...]]:
    """Lay out the parts that a rank sends or receives on a wire, by the rank at the other end, tiles before stage state
    (left out unless `kept`). Returns the number of elements for each rank, the tiles, and the stage state."""
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
    """Copies of received tiles to their places in the send buffer of the next exchange."""
    places = {(load.param, load.tile.key): load.place for load in came}
    found = ((to, places.get((to.param, to.tile.key))) for to in sent)
    return _joined(Copy(to.tile.sizes, place, to.place) for to, place in found if place is not None)


# ------------------------------------------------------------------------------------------------ copies, few of them


def _joined(copies: Iterable[Copy]) -> tuple[Copy, ...]:
    """Merge copies into fewer ones with fewer dims.

    Blocks of equal sizes and strides at equal distances on both sides become one block with a leading dim. Done twice:
    first for the tiles of each sender, then across senders, each of which may send matrices of several shapes.
    """
    return tuple(_rows(_rows([_merged(copy) for copy in copies])))


def _merged(copy: Copy) -> Copy:
    """Simplify a copy: drop dims of size 1, and merge neighbouring dims that are contiguous on both sides."""
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
    """Merge copies of equal sizes and strides that are at equal distances into one copy each."""
    forms = defaultdict[object, list[Copy]](list)
    for copy in copies:
        forms[copy.sizes, copy.here.strides, copy.there.strides].append(copy)
    return [run for alike in forms.values() for run in _runs(alike)]


def _runs(alike: Sequence[Copy]) -> Iterator[Copy]:
    """Merge runs of copies of equal sizes and strides. Both offsets must increase within a run, so that no stride is
    0."""
    steps = [(b.here.start - a.here.start, b.there.start - a.there.start) for a, b in itertools.pairwise(alike)]
    first = 0
    while first < len(alike):
        after = first  # index of the last copy in this run
        while after < len(steps) and min(steps[first]) > 0 and steps[after] == steps[first]:
            after += 1
        sizes, *places = alike[first]
        if after > first:
            sizes = (after - first + 1, *sizes)
            pairs = zip(places, steps[first], strict=True)
            places = [BufferPlace(place.start, (step, *place.strides)) for place, step in pairs]
        yield _merged(Copy(sizes, *places))
        first = after + 1
