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

Pair = tuple[int, int]  # the rank at the other end, and an item

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


@dataclass(frozen=True)
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
    shards: list[GramShard] = []
    own: list[Load] = []
    foreign: list[Load] = []
    parts: list[Pair] = []  # to the owner of each item: a part of its Gram matrix
    factors: list[Pair] = []  # from the owner: its factor
    at = 0
    for number in numbers:
        item = plan.items[number]
        if rank in _layout(plan, item).tiles[item.matrix]:
            shard, loads = _shard(plan, number, rank, at)
            shards.append(shard)
            at += aligned(shard.shape[0] * shard.shape[1], bucket.itemsize)
            sent = shard.added and number not in owned
            (foreign if sent else own).extend(loads)
            parts += [(item.owners[0], number)] * sent
            factors += [(item.owners[0], number)] * (number not in owned)
    came, held = _of_others(plan, owned, rank)
    parts_sent, gather_out = _on_wire(plan, bucket, parts)
    parts_came, gather_in = _on_wire(plan, bucket, came)
    factors_sent, scatter_out = _on_wire(plan, bucket, held)
    factors_came, scatter_in = _on_wire(plan, bucket, factors)
    return GramProgram(
        bucket=bucket,
        rank=rank,
        batches=(),
        batch_numel=at,
        own=tuple(own),
        foreign=tuple(foreign),
        returned=tuple(foreign),
        idle=(),
        gather=Wire(gather_out, gather_in, ()),
        scatter=Wire(scatter_in, scatter_out, ()),
        relay=None,
        sums=0,
        mates=(),
        shards=tuple(shards),
        iterated=tuple(tuple(alike) for _, alike in itertools.groupby(owned, lambda n: _key(plan, n)[:-1])),
        parts_sent=parts_sent,
        parts_came=parts_came,
        factors_sent=factors_sent,
        factors_came=factors_came,
    )


def _key(plan: Plan, number: int) -> tuple[int, str, int]:
    item = plan.items[number]
    return item.short, plan.specs[item.param].batch, number


def _layout(plan: Plan, item: Item) -> ParamLayout:
    return plan.specs[item.param].layout


def _shard(plan: Plan, number: int, rank: int, start: int) -> tuple[GramShard, list[Load]]:
    """One rank's shard of a matrix, placed in the buffer from `start` on, with loads for its tiles, as they are
    stored."""
    item = plan.items[number]
    layout = _layout(plan, item)
    tiles = layout.tiles[item.matrix][rank]
    sizes = [turned(layout.view, tile)[1] for tile in tiles]
    loads, column = [], 0
    for tile, size in zip(tiles, sizes, strict=True):
        loads.append(Load(item.param, tile, BufferPlace(start + column, strides_in(layout.view, tile, sum(sizes)))))
        column += size
    return GramShard(number, start, (item.short, column), _adds(layout, tiles, item.owners[0], rank)), loads


def _adds(layout: ParamLayout, tiles: Sequence[Tile], owner: int, rank: int) -> bool:
    """True if a rank adds to the owner's Gram matrix; replicas of a shard have all of it, so one piece tells."""
    return layout.source(tiles[0].held.piece, owner) == rank


def _of_others(plan: Plan, owned: Sequence[int], rank: int) -> tuple[list[Pair], list[Pair]]:
    """Other ranks that add to the matrices owned here, and other ranks that hold them."""
    adding, holding = [], []
    for number in owned:
        item = plan.items[number]
        layout = _layout(plan, item)
        for other, tiles in layout.tiles[item.matrix].items():
            if other != rank:
                holding.append((other, number))
                if _adds(layout, tiles, rank, other):
                    adding.append((other, number))
    return adding, holding


def message_size(short: int, itemsize: int) -> int:
    """Elements that a symmetric short x short matrix and a norm take on the wire."""
    return short * (short + 1) // 2 + _NORM_BYTES // itemsize


def _on_wire(plan: Plan, bucket: Bucket, pairs: Iterable[Pair]) -> tuple[tuple[Message, ...], Ints]:
    """Messages by the rank at the other end, then by item; and the elements for each rank."""
    found, splits, at = [], dict.fromkeys(bucket.ranks, 0), 0
    for other, number in sorted(pairs):
        size = message_size(plan.items[number].short, bucket.itemsize)
        found.append(Message(number, at, size))
        splits[other] += size
        at += size
    return tuple(found), tuple(splits.values())
