"""The program of one rank for one bucket of matrices. A program lists copies between local storage, batches of
matrices, and wires. A wire is the send or receive buffer of an exchange. All functions are pure.

[Note: places]
    A tile is a part of a matrix that a rank stores. Each tile has one place in a buffer. If the rank orthogonalizes the
    matrix, the tile's place is in the buffer of batches, and the tile is not sent. Otherwise, the tile's place is on a
    wire. Tiles on a wire are ordered by the rank at the other end, then by matrix, then by their order in storage. The
    scatter returns the results in the order in which the gather sent the tiles. If a bucket has a single rank, this
    rank orthogonalizes all matrices, and the wires are empty.

[Note: results in two stages]
    The owner of a matrix is the rank that orthogonalizes it. If several ranks store the same tile, the owner exchanges
    the tile with only one of them, if possible a rank of the owner's replica. In a second exchange, the relay, this
    rank sends the result to the others. If each replica has its own owner of the matrix, no relay is needed.

    State tensors with values per matrix are sent in the same exchanges. In a rank's section of the wire, state values
    follow the tiles. A rank receives a matrix's state values together with its first tile of the matrix, either from
    the owner or in the relay. A rank without a tile of the matrix receives the state values from the owner.
"""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from shardmuon.layout.pieces import Tile
from shardmuon.layout.views import Ints, row_major
from shardmuon.plan.plan import Bucket, Item, Plan

# Alignment in bytes of each matrix in a batch. Because of the alignment, the bits of a result do not depend on the
# matrix's place in the batch.
_ALIGNMENT = 64


def aligned(numel: int, itemsize: int) -> int:
    """Round up a number of elements so that their total size, at `itemsize` bytes per element, is a multiple of
    `_ALIGNMENT` bytes."""
    per_line = _ALIGNMENT // itemsize
    return -(-numel // per_line) * per_line


class BufferPlace(NamedTuple):
    """Place of a block in a buffer, given by the offset of the block's first element and the stride of each dim, in
    elements."""

    start: int
    strides: Ints


class Copy(NamedTuple):
    """Instruction to copy a block of elements between two buffers, in either direction. All strides are nonzero, so
    each dim steps through different elements of both buffers."""

    sizes: Ints
    here: BufferPlace
    there: BufferPlace


class Load(NamedTuple):
    """A tile that this rank stores, and its place in a buffer. The tile is a part of a parameter, or of a state tensor
    with values per matrix (such as NorMuon's second moments).

    Attributes:
        param: Index of the parameter.
        tile: Location of the tile's elements in this rank's storage.
        place: Place in the buffer. The default means that the tile has no place yet. State values are sent as fp32, so
            each takes up two elements of a 16-bit buffer.
        number: Index of the state tensor in the parameter's `Spec.kept`; -1 if the tile is part of the parameter.
    """

    param: int
    tile: Tile
    place: BufferPlace = BufferPlace(0, ())
    number: int = -1


class _Batch(NamedTuple):
    """Matrices of equal shape that are orthogonalized in one call.

    Attributes:
        items: Indices of the matrices in `Plan.items`.
        shape: (number of matrices, rows, cols).
        start, stride: Matrix k of this batch begins at element start + k * stride of the buffer that contains all
            batches.
    """

    items: tuple[int, ...]
    shape: Ints
    start: int
    stride: int


class Wire(NamedTuple):
    """One rank's part in an exchange of matrices.

    Attributes:
        sent, came: For each rank of the bucket, the number of elements that are sent to that rank (`sent`) and received
            from it (`came`).
        tiles: Parts of matrices in this rank's storage. They are sent in a gather, and received in a scatter or relay.
        copies: Copies between the exchange's buffer (`here`) and the batches of matrices that this rank orthogonalizes
            (`there`).
        passed: Copies from the scatter's receive buffer (`here`) to the send buffer of the relay (`there`).
        told, heard: State values of the Muon variant that this rank sends (`told`) or receives (`heard`), with their
            places in the buffers.
    """

    sent: Ints
    came: Ints
    tiles: tuple[Load, ...]
    copies: tuple[Copy, ...]
    passed: tuple[Copy, ...] = ()
    told: tuple[Load, ...] = ()
    heard: tuple[Load, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Program:
    """All copies and exchanges that one rank executes for one bucket. A bucket is a set of matrices that are exchanged
    together.

    Attributes:
        bucket, rank: The bucket, and the rank that executes the program.
        batches: Batches of the matrices that this rank orthogonalizes.
        batch_numel: Size of the buffer that contains all batches, in elements.
        own: Stored parts of the matrices that this rank orthogonalizes, with their places in the buffer of batches.
        gather: Exchange that collects the parts of each matrix on the rank that orthogonalizes it.
        scatter: Exchange that returns the results to ranks that store parts of the matrices.
        relay: Exchange that forwards the results to other replicas; None if no matrix of the bucket needs it.
    """

    bucket: Bucket
    rank: int
    batches: tuple[_Batch, ...]
    batch_numel: int
    own: tuple[Load, ...]
    gather: Wire
    scatter: Wire
    relay: Wire | None

    @classmethod
    def of(cls, plan: Plan, bucket: Bucket, rank: int, missing: Collection[int] = ()) -> Program:
        """Make one rank's program, the list of its copies and exchanges for a bucket of matrices. `missing` contains
        the indices of parameters that are left out because they have no gradient in this step."""
        numbers = [n for n in bucket.items if plan.items[n].param not in missing]
        # sort matrices of equal shapes next to each other, so that copies can be merged
        numbers.sort(key=lambda n: _batch_key(plan, n))
        items = [plan.items[n] for n in numbers]
        batches, slots, end = _batches(plan, [n for n in numbers if rank in plan.items[n].owners], bucket.itemsize)
        own, ways = list[Load](), _Ways(list)
        for item in items:
            for phase, sender, receiver, load in _results(plan, item, rank):
                if sender == receiver == rank:
                    own.append(load)
                elif rank in (sender, receiver):
                    ways[phase, rank == sender, receiver if rank == sender else sender].append(load)

        def in_batches(load: Load) -> BufferPlace:
            """Return a tile's place in the buffer of batches. The tile must be part of a matrix that this rank owns
            (orthogonalizes)."""
            offset, strides = load.tile.in_matrix(plan.specs[load.param].layout.view)
            return BufferPlace(slots[load.param, load.tile.matrix] + offset, strides)

        def wire(phase: _Phase, before: Sequence[Load] = (), kept: bool = True) -> Wire:
            """Describe an exchange (scatter or relay) as a `Wire`. `before` contains the parts of matrices that this
            rank receives in the previous exchange, some of which it forwards in this one. If `kept` is True, the
            exchange includes the state values of the Muon variant."""
            sent, out, told = _packed(ways, phase, True, bucket, kept)
            came, tiles, heard = _packed(ways, phase, False, bucket, kept)
            owned = [load for load in out if (load.param, load.tile.matrix) in slots]
            copies = _joined(Copy(load.tile.sizes, load.place, in_batches(load)) for load in owned)
            return Wire(sent, came, tiles, copies, _passed(before, out), told, heard)

        back, scatter = wire("scatter", kept=False), wire("scatter")
        # If a matrix has replicas but only one owner (the rank that orthogonalizes it), a relay must forward the result
        # to the other replicas.
        relayed = any(bucket.exchange and len(i.owners) == 1 and plan.specs[i.param].layout.has_replicas for i in items)
        return cls(
            bucket=bucket,
            rank=rank,
            batches=tuple(batches),
            batch_numel=end,
            own=tuple(load._replace(place=in_batches(load)) for load in own),
            gather=back._replace(sent=back.came, came=back.sent),
            scatter=scatter,
            relay=wire("relay", scatter.tiles) if relayed else None,
        )


_Phase = Literal["scatter", "relay"]
# Maps (phase, is_send, peer rank) to the parts of results that a rank sends to the peer or receives from it.
_Ways = defaultdict[tuple[_Phase, bool, int], list[Load]]


def _batch_key(plan: Plan, number: int) -> tuple[int, int, str, str, int]:
    """Return the sort key of a matrix in a bucket (a group of matrices that are exchanged together). Matrices that can
    be orthogonalized in one batch have keys that differ only in the last entry, the index of the matrix."""
    item = plan.items[number]
    return item.rows, item.cols, str(item.choice), plan.specs[item.param].batch, number


def _batches(plan: Plan, owned: Sequence[int], itemsize: int) -> tuple[list[_Batch], dict[tuple[int, int], int], int]:
    """Assign places in one buffer to the matrices that this rank owns (orthogonalizes), which are sorted by
    `_batch_key`. Return the batches, the offset of each matrix in the buffer, and the buffer's size in elements."""
    found, slots, end = list[_Batch](), dict[tuple[int, int], int](), 0
    for (rows, cols, *_), group in itertools.groupby(owned, key=lambda n: _batch_key(plan, n)[:-1]):
        alike, stride = tuple(group), aligned(rows * cols, itemsize)
        found.append(_Batch(alike, (len(alike), rows, cols), end, stride))
        for number in alike:
            slots[plan.items[number].key] = end
            end += stride
    return found, slots, end


def _results(plan: Plan, item: Item, rank: int) -> Iterator[tuple[_Phase, int, int, Load]]:
    """Yield (phase, sender, receiver, part) for each part of an orthogonalized matrix that `rank` sends or receives.
    Other parts may be yielded as well; the caller must skip them. A part is a `Load` without a place. A rank that
    orthogonalizes the matrix is both sender and receiver of the parts that it stores."""
    spec = plan.specs[item.param]
    layout, tiles = spec.layout, spec.layout.tiles[item.matrix]
    holders: Collection[int] = tiles
    # A rank that does not orthogonalize the matrix sends results only in the relay, the second exchange, which forwards
    # results to the other ranks that store the same pieces.
    if rank != item.owner_for(layout, rank):
        mates = (layout.keepers[tile.held.piece] for tile in tiles.get(rank, ()))
        holders = tiles.keys() & {rank}.union(*mates)
    for holder in holders:
        owner = item.owner_for(layout, holder)
        for tile in tiles[holder]:
            source, load = layout.source(tile.held.piece, owner), Load(item.param, tile)
            yield ("scatter", owner, holder, load) if source == holder else ("relay", source, holder, load)
    for number, kept in enumerate(spec.kept):
        keepers = kept.layout.tiles[item.matrix]
        for keeper in keepers if kept.travels and rank in keepers else ():
            # A rank receives a matrix's state from the sender of its first tile (part of the matrix). A rank without a
            # tile receives the state from the owner (the rank that orthogonalizes the matrix).
            owner, stored = item.owner_for(layout, keeper), tiles.get(keeper, ())
            sources = [layout.source(tile.held.piece, owner) for tile in stored]
            mate = owner if keeper in sources else next(iter(sources), owner)
            if keeper != owner:
                load = Load(item.param, keepers[rank][0], number=number)
                yield "scatter" if mate == owner else "relay", mate, keeper, load


def _packed(
    ways: _Ways, phase: _Phase, sends: bool, bucket: Bucket, kept: bool
) -> tuple[Ints, tuple[Load, ...], tuple[Load, ...]]:
    """Lay out the buffer that a rank sends or receives in an exchange. The buffer has one section for each rank at the
    other end. A section contains tiles (parts of matrices), followed by state values if `kept` is True. Return the
    number of elements in each section, the tiles with their places, and the state values with their places."""
    at, splits, loads = 0, list[int](), list[Load]()
    for other in bucket.ranks:
        first, parts = at, (load for load in ways[phase, sends, other] if kept or load.number < 0)
        for load in sorted(parts, key=lambda load: load.number >= 0):
            loads.append(load._replace(place=BufferPlace(at, row_major(load.tile.sizes))))
            at += load.tile.numel if load.number < 0 else -(-load.tile.numel * 4 // bucket.itemsize)
        splits.append(at - first)
    tiles, values = (tuple(load for load in loads if (load.number >= 0) == is_state) for is_state in (False, True))
    return tuple(splits), tiles, values


def _passed(came: Sequence[Load], sent: Sequence[Load]) -> tuple[Copy, ...]:
    """List the copies that move received tiles (parts of matrices) from one exchange's receive buffer to the next
    exchange's send buffer."""
    # The first three fields of a tile (matrix, start and sizes) identify the tile. Its field `held`, the location in
    # storage, differs between replicas.
    places = {(load.param, load.tile[:3]): load.place for load in came}
    found = ((to, places.get((to.param, to.tile[:3]))) for to in sent)
    return _joined(Copy(to.tile.sizes, place, to.place) for to, place in found if place is not None)


# ------------------------------------------------------------------------------------------------------ merging copies


def _joined(copies: Iterable[Copy]) -> tuple[Copy, ...]:
    """Merge copies between the same two buffers into fewer copies.

    Copies of blocks with equal sizes and strides are merged if the blocks are equally spaced in both buffers. The
    merged copy has an additional leading dim. Merging runs twice: first for the tiles of each sender, then across
    senders.
    """
    found = [_merged(copy) for copy in copies]
    for _ in range(2):
        forms = defaultdict[object, list[Copy]](list)
        for copy in found:
            forms[copy.sizes, copy.here.strides, copy.there.strides].append(copy)
        found = [run for alike in forms.values() for run in _runs(alike)]
    return tuple(found)


def _merged(copy: Copy) -> Copy:
    """Simplify a copy: drop dims of size 1, and merge neighboring dims that are contiguous in both buffers."""
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


def _runs(alike: Sequence[Copy]) -> Iterator[Copy]:
    """Merge each run of equally spaced copies between the same two buffers, and yield the merged copies. All copies in
    `alike` must have equal sizes and strides. No stride of a merged copy is 0."""
    for first, count, steps in evenly_spaced([(copy.here.start, copy.there.start) for copy in alike]):
        sizes, *places = alike[first]
        pairs = zip(places, steps, strict=True)
        here, there = (BufferPlace(place.start, (step, *place.strides)) for place, step in pairs)
        yield _merged(Copy((count, *sizes), here, there))


def evenly_spaced(places: Sequence[Ints]) -> Iterator[tuple[int, int, Ints]]:
    """Divide a list of positions into runs of equally spaced positions. A position is a tuple of offsets. For each run,
    yield the index of the first position, the number of positions, and the tuple of differences between neighboring
    positions. All differences are positive, except in a run of a single position, where they are 0."""
    steps = [tuple(map(operator.sub, after, before)) for before, after in itertools.pairwise(places)]
    first = 0
    while first < len(places):
        last = first
        while last < len(steps) and min(steps[first]) > 0 and steps[last] == steps[first]:
            last += 1
        yield first, last - first + 1, steps[first] if last > first else (0,) * len(places[first])
        first = last + 1
