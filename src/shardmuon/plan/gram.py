"""The program of one rank for one bucket of the Gram route: shards, and the triangles that travel. Pure.

See cuts.py, [Note: the Gram route]. Parts and factors go straight between an owner and all who hold its matrix,
replicas included: they are too small for a relay to pay.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardmuon.layout.pieces import Tile
from shardmuon.layout.table import ParamLayout
from shardmuon.layout.views import Ints
from shardmuon.plan.copies import BufferPlace
from shardmuon.plan.cuts import strides_in, turned
from shardmuon.plan.plan import Bucket, Item, Plan
from shardmuon.plan.types import Load, Program, Wire, aligned

_Pair = tuple[int, int]  # the rank at the other end, and an item

_NORM_BYTES = 8  # a part's norm travels as fp64


class GramShard(NamedTuple):
    """All that this rank stores of a matrix, as the columns of a row-major (short side, columns) matrix.

    Attributes:
        item: Number of the plan's item.
        start, shape: Where it stands in the buffer of shards.
        added: True if its part of the Gram matrix is this rank's to add; replicas add it once.
    """

    item: int
    start: int
    shape: tuple[int, int]
    added: bool


class Message(NamedTuple):
    """A symmetric matrix on a wire, as its upper triangle and then its norm.

    Attributes:
        item: Number of the plan's item.
        start, size: On the wire, in its elements.
    """

    item: int
    start: int
    size: int


@dataclass(frozen=True, kw_only=True)
class GramProgram(Program):
    """One bucket of the Gram route on one rank. Its `own` and `foreign` tiles, those whose part is sent away, stand
    in the buffer of shards, of `batch_numel` elements; it has no `batches`, and the copies of its wires are messages.

    Attributes:
        shards: What this rank stores of each matrix.
        iterated: Items owned here whose Gram matrices are iterated together.
        parts_sent, parts_came: On the holder's and on the owner's side of the gather. What came ascends by ranks.
        factors_sent, factors_came: On the owner's and on the holder's side of the scatter.
    """

    shards: tuple[GramShard, ...]
    iterated: tuple[Ints, ...]
    parts_sent: tuple[Message, ...]
    parts_came: tuple[Message, ...]
    factors_sent: tuple[Message, ...]
    factors_came: tuple[Message, ...]

    @property
    def num_owned(self) -> int:
        """Matrices whose Gram matrices are iterated here."""
        return sum(map(len, self.iterated))


def make_gram_program(plan: Plan, bucket: Bucket, rank: int, missing: Collection[int] = ()) -> GramProgram:
    """The program of a rank of the bucket, without parameters that have no gradient in this step (`missing`)."""
    numbers = sorted((n for n in bucket.items if plan.items[n].param not in missing), key=lambda n: _key(plan, n))
    owned = [n for n in numbers if plan.items[n].owners == (rank,)]
    shards, own, foreign = list[GramShard](), list[Load](), list[Load]()
    parts_sent, parts_came, factors_sent, factors_came = (list[_Pair]() for _ in range(4))
    at = 0
    for number in numbers:
        item = plan.items[number]
        layout, (owner,) = plan.specs[item.param].layout, item.owners
        of_ranks = layout.tiles[item.matrix]
        for holder in of_ranks if rank == owner else of_ranks.keys() & {rank}:
            # replicas of a shard have all of it, so one piece tells which of them adds it
            adds = layout.source(of_ranks[holder][0].held.piece, owner) == holder
            if holder == rank:
                loads, width = _loads(item, layout, of_ranks[rank], at)
                shards.append(GramShard(number, at, (item.short, width), adds))
                at += aligned(item.short * width, bucket.itemsize)
                (foreign if adds and rank != owner else own).extend(loads)
            if holder != owner:
                other, parts, factors = (owner, parts_sent, factors_came)
                if rank == owner:
                    other, parts, factors = (holder, parts_came, factors_sent)
                factors.append((other, number))
                if adds:
                    parts.append((other, number))
    wires = (_on_wire(plan, bucket, pairs) for pairs in (parts_sent, parts_came, factors_came, factors_sent))
    (sent, gather_out), (came, gather_in), (heard, scatter_in), (told, scatter_out) = wires
    return GramProgram(
        bucket=bucket,
        rank=rank,
        batch_numel=at,
        own=tuple(own),
        foreign=tuple(foreign),
        returned=tuple(foreign),
        gather=Wire(gather_out, gather_in, ()),
        scatter=Wire(scatter_in, scatter_out, ()),
        shards=tuple(shards),
        iterated=tuple(tuple(alike) for _, alike in itertools.groupby(owned, lambda n: _key(plan, n)[:-1])),
        parts_sent=sent,
        parts_came=came,
        factors_sent=told,
        factors_came=heard,
    )


def _key(plan: Plan, number: int) -> tuple[int, str, int]:
    item = plan.items[number]
    return item.short, plan.specs[item.param].batch, number


def _loads(item: Item, layout: ParamLayout, tiles: Sequence[Tile], start: int) -> tuple[list[Load], int]:
    """Loads of one rank's tiles, as they are stored, into a shard that begins at `start`; and its columns."""
    sizes = [turned(layout.view, tile)[1] for tile in tiles]
    columns = itertools.accumulate(sizes, initial=start)
    places = (
        BufferPlace(column, strides_in(layout.view, tile, sum(sizes)))
        for tile, column in zip(tiles, columns, strict=False)
    )
    return [Load(item.param, tile, place) for tile, place in zip(tiles, places, strict=True)], sum(sizes)


def message_size(short: int, itemsize: int) -> int:
    """Elements that a symmetric short x short matrix and a norm take on the wire."""
    return short * (short + 1) // 2 + _NORM_BYTES // itemsize


def _on_wire(plan: Plan, bucket: Bucket, pairs: Iterable[_Pair]) -> tuple[tuple[Message, ...], Ints]:
    """Messages by the rank at the other end, then by item; and the elements for each rank."""
    found, splits, at = [], dict.fromkeys(bucket.ranks, 0), 0
    for other, number in sorted(pairs):
        size = message_size(plan.items[number].short, bucket.itemsize)
        found.append(Message(number, at, size))
        splits[other] += size
        at += size
    return tuple(found), tuple(splits.values())
