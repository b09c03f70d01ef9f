"""Pieces of a tensor on a mesh of ranks, from placements and from what ranks store. Pure: imports no DTensor.

[Note: order of cuts]
    Placements are listed by mesh axis, but a tensor dim that several axes cut is cut in an order of its own. Plain
    shards cut in axis order. A strided shard with split factor s says that s shards existed before its axis cut:
    `fully_shard` on top of tensor parallelism gives mesh (dp, tp), placements (_StridedShard(0, 2), Shard(0)), where tp
    cuts first and dp cuts inside. On sizes that do not divide, reading such placements from left to right (as torch's
    own offset helper and `distribute_tensor` do) names other rows than `fully_shard` stores. So there are two readings,
    nested (what `fully_shard` does) and left to right, and the shapes that ranks store decide.

[Note: lone strided shard]
    When the axis that had cut first is gathered away, a strided shard stands alone: the dim is cut in s, each part is
    cut by the axis, and a rank keeps its share of all of them: of 8 rows in 2 parts on 2 ranks {0, 1, 4, 5}, not 0 to
    3. A rank then stores several pieces, one after the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from shardmuon.layout.extents import AxisCut, Extent, pieces_of_extents
from shardmuon.layout.pieces import Box, Held
from shardmuon.layout.views import Ints

Ranges = tuple[tuple[int, int], ...]  # [start, stop) intervals of one tensor dim, in storage order
OfRank = tuple[tuple[Held, ...], Ints]  # the pieces that a rank stores, and the shape of its storage


class Shard(NamedTuple):
    """A mesh axis cuts a tensor dim. With `factor` > 1 so many shards existed before, see [Note: order of cuts]."""

    dim: int
    factor: int = 1


Placements = tuple[Shard | None, ...]  # of each mesh axis; None: replicated


class _Cut(NamedTuple):
    axis: int
    num_parts: int
    factor: int


def readings(shape: Ints, mesh: Ints, placements: Placements) -> tuple[tuple[OfRank, ...], ...]:
    """All readings of a tensor's placements: for each, what each place of the mesh stores, in row-major order of
    places. The likeliest comes first.

    Args:
        shape: Shape of the tensor.
        mesh: Size of each mesh axis.
        placements: One for each mesh axis.
    """
    cuts = [
        [_Cut(axis, mesh[axis], p.factor) for axis, p in enumerate(placements) if p is not None and p.dim == dim]
        for dim in range(len(shape))
    ]
    ways: list[Callable[[int, Sequence[_Cut], Ints], Ranges]] = [_nested]
    if any(cut.factor > 1 for of_dim in cuts for cut in of_dim):
        ways.append(_left_to_right)
    places = list(itertools.product(*map(range, mesh)))
    found = [
        tuple(_stored([way(size, of_dim, place) for size, of_dim in zip(shape, cuts, strict=True)]) for place in places)
        for way in ways
    ]
    return tuple(dict.fromkeys(found))


def believed(shape: Ints, mesh: Ints, placements: Placements, stored: Sequence[Ints]) -> tuple[tuple[Held, ...], ...]:
    """The pieces of each place of a mesh, by the first reading of placements that all storages fit.

    Args:
        shape, mesh, placements: See `readings`.
        stored: Shapes of storage, in row-major order of places.

    Raises:
        ValueError: None fits; the message lacks the name.
    """
    for reading in readings(shape, mesh, placements):
        if all(same_storage(implied, found) for (_, implied), found in zip(reading, stored, strict=True)):
            return tuple(held for held, _ in reading)
    cuts = [(axis, p) for axis, p in enumerate(placements) if p is not None]
    if len(cuts) != 1 or cuts[0][1].factor > 1:
        raise ValueError("cannot tell which elements a rank holds when its storage differs from its placements")
    axis, (dim, _) = cuts[0]  # in shares of any size (Megatron-FSDP), one after the other
    extents = tuple(Extent(tuple(found)) for found in stored)
    return pieces_of_extents(shape, mesh, tuple(range(len(stored))), (AxisCut(axis, dim, dim > 0),), extents)


def same_storage(first: Ints, second: Ints) -> bool:
    """True if two shapes of storage are equal, or both are empty. Engines differ in what they keep of nothing:
    `fully_shard` over an empty shard of (12, 0) stores (0, 0)."""
    return first == tuple(second) or (0 in first and 0 in second)


def _stored(ranges: Sequence[Ranges]) -> OfRank:
    """The boxes that ranges of each dim make, one after the other in a storage of this shape."""
    starts = [list(itertools.accumulate((b - a for a, b in dim), initial=0)) for dim in ranges]
    held = []
    for pick in itertools.product(*(range(len(dim)) for dim in ranges)):
        of_pick = [dim[i] for dim, i in zip(ranges, pick, strict=True)]
        box = Box(tuple(a for a, _ in of_pick), tuple(b - a for a, b in of_pick))
        held.append(Held(box, tuple(of_dim[i] for of_dim, i in zip(starts, pick, strict=True))))
    return tuple(held), tuple(of_dim[-1] for of_dim in starts)


def _chunk(ranges: Ranges, num_parts: int, part: int) -> Ranges:
    """Part `part` of `torch.chunk(num_parts)` over the indices of `ranges` put one after the other."""
    total = sum(stop - start for start, stop in ranges)
    step = -(-total // num_parts)
    first, last = min(total, part * step), min(total, (part + 1) * step)
    found, at = [], 0
    for start, stop in ranges:
        a, b = max(first, at), min(last, at + stop - start)
        if a < b:
            found.append((start + a - at, start + b - at))
        at += stop - start
    return tuple(found)


def _strided(ranges: Ranges, cut: _Cut, factor: int, place: Ints) -> Ranges:
    """Cut in `factor` parts, then each of those by the axis; the shares of a place in all of them."""
    parts = (_chunk(ranges, factor, part) for part in range(factor))
    return tuple(itertools.chain.from_iterable(_chunk(part, cut.num_parts, place[cut.axis]) for part in parts))


def _left_to_right(size: int, cuts: Sequence[_Cut], place: Ints) -> Ranges:
    ranges: Ranges = ((0, size),)
    for cut in cuts:
        ranges = _strided(ranges, cut, cut.factor, place)
    return ranges


def _nested(size: int, cuts: Sequence[_Cut], place: Ints) -> Ranges:
    ordered: list[tuple[_Cut, int]] = []  # (cut, what of its factor no listed axis accounts for), first cut first
    for cut in reversed(cuts):
        before, position = 1, 0
        while before < cut.factor and position < len(ordered):
            before *= ordered[position][0].num_parts
            position += 1
        if cut.factor % before:
            return _left_to_right(size, cuts, place)
        ordered.insert(position, (cut, cut.factor // before))
    ranges: Ranges = ((0, size),)
    for cut, factor in ordered:
        ranges = _strided(ranges, cut, factor, place)
    return ranges
