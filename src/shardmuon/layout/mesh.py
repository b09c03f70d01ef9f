"""Pieces of a tensor that ranks cut: by a mesh's placements, by a tensor-parallel group, or as found in storage. Pure.

[Note: order of cuts]
    Placements are listed by mesh axis, but a tensor dim that several axes cut is cut in an order of its own. Plain
    shards cut in axis order. A strided shard with split factor s says that s shards existed before its axis cut:
    `fully_shard` on top of tensor parallelism gives mesh (dp, tp), placements (_StridedShard(0, 2), Shard(0)), where tp
    cuts first and dp cuts inside. On sizes that do not divide, reading such placements from left to right (as torch's
    own offset helper and `distribute_tensor` do) names other rows than `fully_shard` stores. Here they are read as
    `fully_shard` means them, and refused where ranks store other shapes.

[Note: lone strided shard]
    When the axis that had cut first is gathered away, a strided shard stands alone: the dim is cut in s, each part is
    cut by the axis, and a rank keeps its share of all of them: of 8 rows in 2 parts on 2 ranks {0, 1, 4, 5}, not 0 to
    3. A rank then stores several pieces, one after the other.

[Note: stride]
    A stride of s says that the dim is cut in s equal blocks first (gate and up, fused in one weight), and each part has
    its share of every block, one after the other. Megatron and TransformerEngine call it `partition_stride`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shardmuon.layout.pieces import Box, FlatRange, Held
from shardmuon.layout.views import Ints

_Ranges = tuple[tuple[int, int], ...]  # [start, stop) intervals of one tensor dim, in storage order
OfRank = tuple[tuple[Held, ...], Ints]  # the pieces that a rank stores, and the shape of its storage


class Shard(NamedTuple):
    """A mesh axis cuts a tensor dim. With `factor` > 1 so many shards existed before, see [Note: order of cuts]."""

    dim: int
    factor: int = 1


Placements = tuple[Shard | None, ...]  # of each mesh axis; None: replicated


class OnMesh(NamedTuple):
    """Placement of a tensor on a mesh of ranks.

    Attributes:
        mesh: Size of each mesh axis.
        ranks: Global ranks, in row-major order.
        placements: One for each mesh axis.
    """

    mesh: Ints
    ranks: Ints
    placements: Placements

    @property
    def of_stack(self) -> Placements:
        """Placements of what is kept of each matrix of a stack: those that cut its matrices, replicated elsewhere."""
        return tuple(p if p is not None and p.dim == 0 else None for p in self.placements)


_Cuts = tuple[tuple[int, int], ...]  # the mesh axes that cut a dim, first cut first, each with its factor


def reading(shape: Ints, mesh: Ints, placements: Placements) -> tuple[OfRank, ...]:
    """The pieces of a tensor and the shape of storage of each place of a mesh, in row-major order of places.

    Args:
        shape: Shape of the tensor.
        mesh: Size of each mesh axis.
        placements: One for each mesh axis.
    """
    cuts = [
        _nested([(axis, p.factor) for axis, p in enumerate(placements) if p and p.dim == dim], mesh)
        for dim in range(len(shape))
    ]
    places = itertools.product(*map(range, mesh))
    return tuple(
        _stored([_ranges(n, of_dim, mesh, at) for n, of_dim in zip(shape, cuts, strict=True)]) for at in places
    )


def _nested(listed: Sequence[tuple[int, int]], mesh: Ints) -> _Cuts:
    """The order in which a dim was cut, by factors that count the shards of axes listed later; with each axis what of
    its factor no listed one accounts for."""
    ordered: list[tuple[int, int]] = []
    for axis, factor in reversed(listed):
        before, position = 1, 0
        while before < factor and position < len(ordered):
            before *= mesh[ordered[position][0]]
            position += 1
        if factor % before:
            return tuple(listed)
        ordered.insert(position, (axis, factor // before))
    return tuple(ordered)


def _ranges(size: int, cuts: _Cuts, mesh: Ints, place: Ints) -> _Ranges:
    """The indices of a dim that a place of the mesh stores. Each cut is made in `factor` parts first, then each of
    those is cut by the axis; a place has its shares in all of them."""
    ranges: _Ranges = ((0, size),)
    for axis, factor in cuts:
        parts = (_chunk(ranges, factor, part) for part in range(factor))
        ranges = tuple(itertools.chain.from_iterable(_chunk(part, mesh[axis], place[axis]) for part in parts))
    return ranges


def _chunk(ranges: _Ranges, num_parts: int, part: int) -> _Ranges:
    """Part `part` of `torch.chunk(num_parts)` over the indices of `ranges` put one after the other."""
    step = -(-sum(stop - start for start, stop in ranges) // num_parts)
    return _narrow(ranges, part * step, step)


def _narrow(ranges: _Ranges, first: int, num: int) -> _Ranges:
    """So many of the indices of `ranges` put one after the other, from this one on."""
    found, at = [], 0
    for start, stop in ranges:
        a, b = max(first, at), min(first + num, at + stop - start)
        if a < b:
            found.append((start + a - at, start + b - at))
        at += stop - start
    return tuple(found)


def _stored(ranges: Sequence[_Ranges]) -> OfRank:
    """The boxes that ranges of each dim make, one after the other in a storage of this shape."""
    starts = [list(itertools.accumulate((b - a for a, b in dim), initial=0)) for dim in ranges]
    held = []
    for pick in itertools.product(*(zip(dim, at, strict=False) for dim, at in zip(ranges, starts, strict=True))):
        box = Box(tuple(start for (start, _), _ in pick), tuple(stop - start for (start, stop), _ in pick))
        held.append(Held(box, tuple(at for _, at in pick)))
    return tuple(held), tuple(of_dim[-1] for of_dim in starts)


def believed(shape: Ints, mesh: Ints, placements: Placements, stored: Sequence[Ints]) -> tuple[tuple[Held, ...], ...]:
    """The pieces of each place of a mesh, if all storages are what placements say.

    Args:
        shape, mesh, placements: See `reading`.
        stored: Shapes of storage, in row-major order of places.

    Raises:
        ValueError: Some storage is not; the message lacks the name.
    """
    found = reading(shape, mesh, placements)
    if not all(same_storage(implied, other) for (_, implied), other in zip(found, stored, strict=True)):
        raise ValueError(
            f"cannot tell which elements a rank holds when its storage differs from its placements, which say "
            f"{[implied for _, implied in found]}. Place it by fully_shard, parallelize_module or distribute_tensor"
        )
    return tuple(held for held, _ in found)


def same_storage(first: Ints, second: Ints) -> bool:
    """True if two shapes of storage are equal, or both are empty. Engines differ in what they keep of nothing:
    `fully_shard` over an empty shard of (12, 0) stores (0, 0)."""
    return first == tuple(second) or (0 in first and 0 in second)


# ------------------------------------------------------------------------------------------------- parts along one dim


class Cut(NamedTuple):
    """Dim and stride by which a tensor is cut over its tensor-parallel group: see [Note: stride]."""

    dim: int
    stride: int


def parts_of(shape: Ints, cut: Cut, sizes: Ints) -> tuple[tuple[Held, ...], ...]:
    """The pieces of each part, whose sizes along the cut dim may differ.

    Raises:
        ValueError: A part does not divide in `cut.stride` blocks; the message lacks the name.
    """
    return tuple(_stored(part)[0] for part in _parts(shape, cut, sizes))


def _parts(shape: Ints, cut: Cut, sizes: Ints) -> Iterator[list[_Ranges]]:
    """Ranges of each dim, of each part."""
    if any(size % cut.stride for size in sizes):
        raise ValueError(
            f"partition_stride={cut.stride} says that each shard holds {cut.stride} parts of one size, but the shards "
            f"have {sizes} indices along dim {cut.dim}. Set partition_stride=1 if they are cut in one piece each"
        )
    blocks, start = range(0, sum(sizes), max(1, sum(sizes) // cut.stride)), 0
    for size in sizes:
        share = size // cut.stride
        ranges: list[_Ranges] = [((0, n),) for n in shape]
        ranges[cut.dim] = tuple((block + start, block + start + share) for block in blocks)
        yield ranges
        start += share


def at_dim(numbers: Ints, dim: int, value: int) -> Ints:
    """The same numbers with another one at this dim."""
    return (*numbers[:dim], value, *numbers[dim + 1 :])


def flat_part(shape: Ints, cut: Cut | None, part: int, num_parts: int, start: int, stop: int) -> tuple[Held, ...]:
    """The pieces that elements [start, stop) of one of the equal parts are, in their order.

    Args:
        cut: Along dim 0, or with stride 1: else parts are no boxes one after the other. None: the tensor is not cut,
            and the elements are its own.
    """
    if start >= stop:
        return ()
    if cut is None:
        return (Held(FlatRange(start, stop), (0,)),)
    found, at = [], 0
    for box, _ in parts_of(shape, cut, (shape[cut.dim] // num_parts,) * num_parts)[part]:
        low, high = max(start, at), min(stop, at + box.numel)
        if low < high:
            assert isinstance(box, Box), "parts are boxes"
            found.append(Held(FlatRange(low - at, high - at, box), (low - start,)))
        at += box.numel
    return tuple(found)


def rows_of_part(shape: Ints, cut: Cut, part: int, num_parts: int, rows: range) -> OfRank:
    """The pieces that some rows of a tensor-parallel part are, and the shape of their storage.

    Args:
        shape: Shape of the tensor.
        cut: How it is cut in parts.
        part, num_parts: Number of the part, and how many there are, of the sizes of `torch.chunk`.
        rows: Indices of dim 0 of the part.

    Raises:
        ValueError: See `parts_of`.
    """
    num = shape[cut.dim]
    step = -(-num // num_parts)
    sizes = tuple(max(0, min(step, num - at * step)) for at in range(num_parts))
    ranges = list(_parts(shape, cut, sizes))[part]
    return _stored([_narrow(ranges[0], rows.start, len(rows)), *ranges[1:]])


class Extent(NamedTuple):
    """The storage that one rank has of a tensor.

    Attributes:
        shape: Shape of the storage.
        held: The pieces in it, where no other rank can tell them.
    """

    shape: Ints
    held: tuple[Held, ...] = ()
