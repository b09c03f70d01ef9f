"""Pieces from what ranks really store, where placements do not tell: parts of any size, one after the other. Pure.

An *extent* is what one rank stores of a tensor; ranks exchange theirs when a plan is made, and each derives the same
pieces from all of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from shardmuon.layout.pieces import Box, FlatRange, Held
from shardmuon.layout.shards import Cut, parts_of
from shardmuon.layout.views import Ints

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
        tensor_parallel: Whether its parts are tensor-parallel shards, within which the data-parallel axes cut.
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
