"""Pieces of a tensor that ranks cut: by a mesh's placements, by a tensor-parallel group, or as found in storage. Pure.

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

[Note: stride]
    A stride of s says that the dim is cut in s equal blocks first (gate and up, fused in one weight), and each part has
    its share of every block, one after the other. Megatron and TransformerEngine call it `partition_stride`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
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


class _Split(NamedTuple):
    axis: int
    num_parts: int
    factor: int


_Order = list[tuple[_Split, int]]  # first cut first, each with what of its factor no listed axis accounts for


def readings(shape: Ints, mesh: Ints, placements: Placements) -> tuple[tuple[OfRank, ...], ...]:
    """All readings of a tensor's placements: for each, what each place of the mesh stores, in row-major order of
    places. The likeliest comes first.

    Args:
        shape: Shape of the tensor.
        mesh: Size of each mesh axis.
        placements: One for each mesh axis.
    """
    cuts = [
        [_Split(axis, mesh[axis], p.factor) for axis, p in enumerate(placements) if p is not None and p.dim == dim]
        for dim in range(len(shape))
    ]
    orders = [[_nested(of_dim) for of_dim in cuts]]
    if any(cut.factor > 1 for of_dim in cuts for cut in of_dim):
        orders.append([_left_to_right(of_dim) for of_dim in cuts])
    places = list(itertools.product(*map(range, mesh)))
    found = [
        tuple(_stored([_ranges(n, of_dim, place) for n, of_dim in zip(shape, order, strict=True)]) for place in places)
        for order in orders
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


def _stored(ranges: Sequence[_Ranges]) -> OfRank:
    """The boxes that ranges of each dim make, one after the other in a storage of this shape."""
    starts = [list(itertools.accumulate((b - a for a, b in dim), initial=0)) for dim in ranges]
    held = []
    for pick in itertools.product(*(range(len(dim)) for dim in ranges)):
        of_pick = [dim[i] for dim, i in zip(ranges, pick, strict=True)]
        box = Box(tuple(a for a, _ in of_pick), tuple(b - a for a, b in of_pick))
        held.append(Held(box, tuple(of_dim[i] for of_dim, i in zip(starts, pick, strict=True))))
    return tuple(held), tuple(of_dim[-1] for of_dim in starts)


def _chunk(ranges: _Ranges, num_parts: int, part: int) -> _Ranges:
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


def _ranges(size: int, order: _Order, place: Ints) -> _Ranges:
    """The indices of a dim that a place of the mesh stores. Each cut is made in `factor` parts first, then each of
    those is cut by the axis; a place has its shares in all of them."""
    ranges: _Ranges = ((0, size),)
    for cut, factor in order:
        parts = (_chunk(ranges, factor, part) for part in range(factor))
        shares = (_chunk(part, cut.num_parts, place[cut.axis]) for part in parts)
        ranges = tuple(itertools.chain.from_iterable(shares))
    return ranges


def _left_to_right(cuts: Sequence[_Split]) -> _Order:
    return [(cut, cut.factor) for cut in cuts]


def _nested(cuts: Sequence[_Split]) -> _Order:
    ordered: _Order = []
    for cut in reversed(cuts):
        before, position = 1, 0
        while before < cut.factor and position < len(ordered):
            before *= ordered[position][0].num_parts
            position += 1
        if cut.factor % before:
            return _left_to_right(cuts)
        ordered.insert(position, (cut, cut.factor // before))
    return ordered


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
    if any(size % cut.stride for size in sizes):
        raise ValueError(
            f"partition_stride={cut.stride} says that each shard holds {cut.stride} parts of one size, but the shards "
            f"have {sizes} indices along dim {cut.dim}. Set partition_stride=1 if they are cut in one piece each"
        )
    block, start, found = sum(sizes) // cut.stride, 0, []
    zeros = (0,) * len(shape)
    for size in sizes:
        share = size // cut.stride
        found.append(
            tuple(
                Held(
                    Box(at_dim(zeros, cut.dim, number * block + start), at_dim(shape, cut.dim, share)),
                    at_dim(zeros, cut.dim, number * share),
                )
                for number in range(cut.stride)
            )
        )
        start += share
    return tuple(found)


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


# ------------------------------------------------------------------------------------------------- what storage tells

UNKNOWN = -1


class Extent(NamedTuple):
    """The storage that one rank has of a tensor.

    Attributes:
        shape: Shape of the storage: that of the tensor with dim 0 cut anywhere, or 1-D for a run of elements.
        start: Number of its first element in the tensor-parallel part, as the engine says, or UNKNOWN.
    """

    shape: Ints
    start: int = UNKNOWN


class AxisCut(NamedTuple):
    """A mesh axis that cuts a tensor dim in parts of any size: dim 0, or any dim for tensor parallelism.

    Attributes:
        axis: The mesh axis.
        dim: The tensor's dim.
        tensor_parallel: True if its parts are tensor-parallel shards, within which the data-parallel axes cut.
        stride: Each tensor-parallel shard has a share of that many equal blocks of the dim (Megatron's
            `partition_stride`: 2 for fused gate and up).
    """

    axis: int
    dim: int
    tensor_parallel: bool = False
    stride: int = 1


def pieces_of_extents(
    shape: Ints, mesh: Ints, mesh_ranks: Ints, cuts: tuple[AxisCut, ...], extents: tuple[Extent, ...]
) -> tuple[tuple[Held, ...], ...]:
    """The pieces of each place of a mesh: the ranks' parts one after the other.

    Args:
        shape: Shape of the tensor.
        mesh: Size of each axis.
        mesh_ranks: Global ranks in row-major order.
        cuts: The axes that cut the tensor; the one that cuts first comes first.
        extents: What each of `mesh_ranks` stores.

    Raises:
        ValueError: The parts do not fit together, or a rank says that its part begins elsewhere. The message lacks the
            name.
    """
    stored = [extent.shape if math.prod(extent.shape) else () for extent in extents]  # (): nothing
    rows = [rank for rank, one in zip(mesh_ranks, stored, strict=True) if one and len(one) == len(shape)]
    runs = [rank for rank, one in zip(mesh_ranks, stored, strict=True) if one and len(one) != len(shape)]
    if rows and runs:
        raise ValueError(f"ranks {rows} store whole rows of it, ranks {runs} 1-D runs of elements")
    if runs and any(cut.dim > 0 or cut.stride > 1 for cut in cuts):
        raise ValueError(
            f"ranks {runs} store 1-D runs of elements of a tensor that tensor parallelism cuts along another dim than "
            "0, or in strides: which elements these are cannot be told"
        )
    dims = (math.prod(shape),) if runs else shape
    parallel = next((cut for cut in cuts if cut.tensor_parallel), AxisCut(-1, 0))
    found: dict[int, tuple[Held, ...]] = {}
    for line in _lines(mesh, cuts, parallel.axis):
        sizes = tuple(_size([stored[number] for number in of_part if stored[number]], parallel.dim) for of_part in line)
        parts = parts_of(dims, Cut(parallel.dim, parallel.stride), sizes)
        for of_part, part in zip(line, parts, strict=True):
            start = 0
            for number in of_part:
                one = stored[number]
                found[number] = _share(part, start, extents[number], mesh_ranks[number]) if one else ()
                start += one[0] if one else 0
    held = (found[number] for number in range(len(extents)))
    return tuple(tuple(map(_as_range, of_rank)) for of_rank in held) if runs else tuple(held)


def _lines(mesh: Ints, cuts: Sequence[AxisCut], parallel: int) -> list[list[list[int]]]:
    """Numbers of mesh places, for each replica and each tensor-parallel part in it, in the order in which the places'
    shares follow each other."""
    places = list(itertools.product(*map(range, mesh)))
    axes = [cut.axis for cut in cuts]
    lines: dict[Ints, dict[int, list[int]]] = {}
    for number in sorted(range(len(places)), key=lambda number: [places[number][axis] for axis in axes]):
        at = places[number]
        line = lines.setdefault(tuple(c for axis, c in enumerate(at) if axis not in axes), {})
        line.setdefault(at[parallel] if parallel >= 0 else 0, []).append(number)
    return [list(line.values()) for line in lines.values()]


def _size(shapes: Sequence[Ints], dim: int) -> int:
    """Size of a tensor-parallel part along the dim that is cut, found from what ranks store of it."""
    sizes = [shape[dim] for shape in shapes]
    return sum(sizes) if dim == 0 else max(sizes, default=0)


def _share(part: Sequence[Held], start: int, extent: Extent, rank: int) -> tuple[Held, ...]:
    """The pieces of a part that a rank stores whose storage begins at this index of dim 0."""
    begins = start * math.prod(extent.shape[1:])
    if extent.start not in (UNKNOWN, begins):
        raise ValueError(
            f"rank {rank} says that its part begins at element {extent.start}, but the ranks before it store {begins} "
            "elements"
        )
    found = []
    for box, at in part:
        assert isinstance(box, Box), "parts are boxes"
        low, high = max(start, at[0]), min(start + extent.shape[0], at[0] + box.size[0])
        if low < high:
            mine = Box((box.offset[0] + low - at[0], *box.offset[1:]), (high - low, *box.size[1:]))
            found.append(Held(mine, (low - start, *at[1:])))
    if sum(one.piece.numel for one in found) != math.prod(extent.shape):
        raise ValueError(f"rank {rank} stores shape {extent.shape}, which is not as wide as the tensor")
    return tuple(found)


def _as_range(held: Held) -> Held:
    """A 1-D piece as a range of the flattened tensor."""
    box = held.piece
    assert isinstance(box, Box), "parts are boxes"
    return Held(FlatRange(box.offset[0], box.offset[0] + box.size[0]), held.local)
