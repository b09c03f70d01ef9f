"""The program of one rank for one bucket of matrices. It lists the copies between local storage, batches of matrices
and wires, where a wire is the send or receive buffer of an exchange. All functions are pure.

[Note: places]
    Each tile (part of a matrix) that a rank stores has one place in a buffer. Tiles of matrices that the rank owns are
    in batches, where they are orthogonalized, and are never sent. All other tiles are on a wire, ordered by the rank at
    the other end, then by matrix, then by their order in storage. The scatter delivers the result for a tile to the
    same place on the wire from which the gather sent the tile. If a bucket has a single rank, this rank owns all
    matrices, and its wires are empty.

[Note: results in two stages]
    For each piece of a matrix, the owner communicates with a single rank that stores the piece, if possible a rank of
    the owner's replica. This rank then sends the results to all other ranks that store the same piece, in a second
    exchange called the relay. If each replica has an owner, there is no relay. State tensors with values per matrix are
    sent in the same exchanges. In the part of the wire for each rank, state values follow the tiles. A rank that stores
    part of the matrix receives its state values together with its first tile, either from the owner or in the relay. A
    rank that stores no part of the matrix receives the state values from the owner.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from shardmuon.layout.pieces import Tile
from shardmuon.layout.views import Ints, row_major
from shardmuon.plan.plan import Bucket, Item, Plan

_ALIGNMENT = 64  # in bytes; with equal alignment, a result does not depend on the matrix's place in the batch


def aligned(numel: int, itemsize: int) -> int:
    """Round a number of elements up so that their size is a multiple of `_ALIGNMENT` bytes."""
    per_line = _ALIGNMENT // itemsize
    return -(-numel // per_line) * per_line


class BufferPlace(NamedTuple):
    """Place of a block in a buffer, given by the offset of the block's first element and the stride of each dim, in
    elements."""

    start: int
    strides: Ints


class Copy(NamedTuple):
    """A copy of a block of elements between two buffers, in either direction. All strides are nonzero, so that no two
    elements of the block share a place."""

    sizes: Ints
    here: BufferPlace
    there: BufferPlace


class Load(NamedTuple):
    """A tile that this rank stores, and its place in a buffer."""

    param: int
    tile: Tile
    place: BufferPlace


class KeptLoad(NamedTuple):
    """State values of one matrix, for example NorMuon's second moments, and their place in the buffer of an exchange.

    Attributes:
        param, number: Index of the parameter, and index into the parameter's `Spec.kept`.
        tile: Location of the values in this rank's state tensor.
        start, size: Offset and size in the buffer, in elements of the buffer's dtype.
    """

    param: int
    number: int
    tile: Tile
    start: int = 0
    size: int = 0


class _Batch(NamedTuple):
    """Matrices of one shape that are orthogonalized in one call.

    Attributes:
        items: Indices of the matrices in the plan's items.
        shape: (number of matrices, rows, cols).
        start, stride: Matrix k of the batch begins at element start + k * stride of the buffer that contains all
            batches.
    """

    items: tuple[int, ...]
    shape: Ints
    start: int
    stride: int


class Wire(NamedTuple):
    """One exchange, as seen by one rank.

    Attributes:
        sent, came: For each rank of the bucket, the number of elements that are sent to it, and the number received
            from it.
        tiles: Tiles of this rank's storage that are sent (gather) or received (scatter, relay).
        copies: Copies between the exchange's buffer (`here`) and the batches (`there`), for matrices that this rank
            owns.
        passed: Copies from the scatter's receive buffer (`here`) to the relay's send buffer (`there`).
        told, heard: State values of matrices that are sent (`told`) or received (`heard`), with their places in the
            buffers.
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
        batches, batch_numel: Batches of the matrices that this rank owns, and the size of their buffer in elements.
        own: This rank's tiles of matrices that it owns, with their places in the buffer of batches.
        gather, scatter, relay: The exchanges; `relay` is None if no matrix of the bucket needs one.
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
        """Make the program of one rank for a bucket. `missing` contains the indices of parameters that are left out
        because they have no gradient in this step."""
        numbers = [n for n in bucket.items if plan.items[n].param not in missing]
        numbers.sort(key=lambda n: _batch_key(plan, n))  # make equal shapes adjacent, so that copies can be merged
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
            """Return the place, in the buffer of batches, of a tile of an owned matrix."""
            offset, strides = tile.in_matrix(plan.specs[param].layout.view)
            return BufferPlace(slots[param, tile.matrix] + offset, strides)

        def wire(phase: _Phase, before: Sequence[Load] = (), kept: bool = True) -> Wire:
            """Make the `Wire` of a phase (scatter or relay) in which results are exchanged. `before` contains the tiles
            that the previous exchange received, some of which must be forwarded in this exchange. If `kept` is True,
            state values of matrices are included."""
            sent, out, told = _packed(ways, phase, True, bucket, kept)
            came, tiles, heard = _packed(ways, phase, False, bucket, kept)
            owned = [load for load in out if (load.param, load.tile.matrix) in slots]
            copies = _joined(Copy(one.tile.sizes, one.place, in_batches(one.param, one.tile)) for one in owned)
            return Wire(sent, came, tiles, copies, _passed(before, out), told, heard)

        back, scatter = wire("scatter", kept=False), wire("scatter")
        # A relay is needed if a matrix has one owner and several replicas.
        relayed = any(bucket.exchange and len(i.owners) == 1 and plan.specs[i.param].layout.has_replicas for i in items)
        return cls(
            bucket=bucket,
            rank=rank,
            batches=tuple(batches),
            batch_numel=end,
            own=tuple(Load(param, tile, in_batches(param, tile)) for param, tile, _ in own),
            gather=back._replace(sent=back.came, came=back.sent),
            scatter=scatter,
            relay=wire("relay", scatter.tiles) if relayed else None,
        )

    @property
    def num_owned(self) -> int:
        """Number of matrices that this rank orthogonalizes."""
        return sum(len(batch.items) for batch in self.batches)


_Part = tuple[int, Tile, int]  # (index of a parameter, tile, index of a state tensor in `Spec.kept` or -1)
_Phase = Literal["scatter", "relay"]
# Parts of results that a rank sends or receives. The keys are tuples (phase, True for sending or False for receiving,
# rank at the other end).
_Ways = defaultdict[tuple[_Phase, bool, int], list[_Part]]


def _batch_key(plan: Plan, number: int) -> tuple[int, int, str, str, int]:
    """Return the sort key of one of a bucket's matrices. Matrices that can be orthogonalized in one batch have keys
    that differ only in the last entry, the index of the matrix."""
    item = plan.items[number]
    return item.rows, item.cols, item.how, plan.specs[item.param].batch, number


def _batches(plan: Plan, owned: Sequence[int], itemsize: int) -> tuple[list[_Batch], dict[tuple[int, int], int], int]:
    """Assign places in one buffer to the matrices that this rank owns, which are sorted by `_batch_key`. Return the
    batches, the offset of each matrix, and the buffer's size in elements."""
    found, slots, end = list[_Batch](), dict[tuple[int, int], int](), 0
    for (rows, cols, *_), group in itertools.groupby(owned, key=lambda n: _batch_key(plan, n)[:-1]):
        alike, stride = tuple(group), aligned(rows * cols, itemsize)
        found.append(_Batch(alike, (len(alike), rows, cols), end, stride))
        for number in alike:
            slots[plan.items[number].key] = end
            end += stride
    return found, slots, end


def _results(plan: Plan, item: Item, rank: int) -> Iterator[tuple[_Phase, int, int, _Part]]:
    """Yield all parts of a matrix's result that `rank` sends or receives, as (phase, sender, receiver, part). For parts
    that the owner itself stores, the owner is both sender and receiver. Some of the yielded parts can be exchanged
    between two other ranks; the caller skips them."""
    spec = plan.specs[item.param]
    layout, tiles = spec.layout, spec.layout.tiles[item.matrix]
    holders: Collection[int] = tiles
    # A rank that is not the owner relays results only to ranks that store the same pieces.
    if rank != item.owner_for(layout, rank):
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
            # A rank receives the state from the rank that sends its first tile, or from the owner if it stores no tile.
            owner, stored = item.owner_for(layout, keeper), tiles.get(keeper, ())
            sources = [layout.source(tile.held.piece, owner) for tile in stored]
            mate = owner if keeper in sources else next(iter(sources), owner)
            if keeper != owner:
                part = item.param, keepers[rank][0], number
                yield "scatter" if mate == owner else "relay", mate, keeper, part


def _packed(
    ways: _Ways, phase: _Phase, sends: bool, bucket: Bucket, kept: bool
) -> tuple[Ints, tuple[Load, ...], tuple[KeptLoad, ...]]:
    """Assign places in the buffer of an exchange to the parts that a rank sends or receives. Parts are ordered by the
    rank at the other end; for each such rank, tiles come before state values. State values are left out unless `kept`
    is True. Return the number of elements for each rank, the tiles with their places, and the state values with their
    places."""
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
    """List the copies that move received tiles to their places in the send buffer of the next exchange."""
    # Matrix, start and sizes identify a tile. `Tile.held`, the location in storage, differs between replicas.
    places = {(load.param, load.tile[:3]): load.place for load in came}
    found = ((to, places.get((to.param, to.tile[:3]))) for to in sent)
    return _joined(Copy(to.tile.sizes, place, to.place) for to, place in found if place is not None)


# ------------------------------------------------------------------------------------------------------ merging copies


def _joined(copies: Iterable[Copy]) -> tuple[Copy, ...]:
    """Merge copies into fewer copies with fewer dims.

    Blocks of equal sizes and strides at equal distances in both buffers become one block with an additional leading
    dim. Merging runs twice: first for the tiles of each sender, then across senders, each of which may send matrices of
    several shapes.
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
    """Merge runs of equally spaced copies. All copies have equal sizes and strides. Within a run, the offsets in both
    buffers must increase, so that no stride of the merged copy is 0."""
    steps = [(b.here.start - a.here.start, b.there.start - a.there.start) for a, b in itertools.pairwise(alike)]
    first = 0
    while first < len(alike):
        after = first  # index of the last copy in the run that begins at `first`
        while after < len(steps) and min(steps[first]) > 0 and steps[after] == steps[first]:
            after += 1
        sizes, *places = alike[first]
        if after > first:
            sizes = (after - first + 1, *sizes)
            pairs = zip(places, steps[first], strict=True)
            places = [BufferPlace(place.start, (step, *place.strides)) for place, step in pairs]
        yield _merged(Copy(sizes, *places))
        first = after + 1
