"""Slices of a matrix, each of which may have an owner of its own; see `orthogonalize`, [Note: slices of the long side].
Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from shardmuon.layout.pieces import Tile
from shardmuon.layout.views import Matrix


class Slicing(NamedTuple):
    """The cost of giving slices of a matrix to owners of their own.

    Attributes:
        sums: Exchanges of Gram matrices in the middle of its iteration; of norms there is one before them.
        itemsize: Bytes of an element of these.
        each: Floating point operations of small products, which each owner repeats.
    """

    sums: int
    itemsize: int
    each: int


def slice_of(matrix: Matrix, part: int, parts: int) -> Matrix | None:
    """A slice of a matrix's long side, itself row-major; None if no equal boxes of indexes have the slices."""
    rows, cols = matrix[:2]
    tall = rows > cols
    end = rows * cols if tall else cols  # the outermost dim of the long side reaches so far
    dims = enumerate(zip(matrix.sizes, matrix.strides, strict=True))
    d = next((d for d, (size, stride) in dims if size > 1 and size * stride == end), None)
    if d is None or matrix.sizes[d] % parts:
        return None
    size = matrix.sizes[d] // parts
    start = (*matrix.start[:d], matrix.start[d] + part * size, *matrix.start[d + 1 :])
    sizes = (*matrix.sizes[:d], size, *matrix.sizes[d + 1 :])
    if tall:
        return Matrix(rows // parts, cols, start, sizes, matrix.strides)
    strides = tuple(stride if stride < cols else stride // parts for stride in matrix.strides)
    return Matrix(rows, cols // parts, start, sizes, strides)


def clipped(tiles: Iterable[Tile], box: Matrix) -> tuple[Tile, ...]:
    """The parts of these tiles that lie in a slice of their matrix."""
    found = []
    for tile in tiles:
        start = tuple(map(max, tile.start, box.start))
        ends = zip(tile.start, tile.sizes, box.start, box.sizes, strict=True)
        sizes = tuple(min(a + n, b + m) - at for at, (a, n, b, m) in zip(start, ends, strict=True))
        if min(sizes) > 0:
            found.append(tile._replace(start=start, sizes=sizes))
    return tuple(found)
