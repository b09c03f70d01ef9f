"""The geometry of the Gram route: matrices that are cut along their long side only, and how shards of them lie. Pure.

[Note: the Gram route]
    A matrix that is cut along its long side only, X = [X_1 .. X_p] with m short rows each, needs no rank to hold it
    whole: R = sum_r X_r X_r^T is m x m, Newton-Schulz makes of it a factor Q (`orthogonalize.factor_of`), and Q X_r
    is rank r's part of the result. Each rank sends its part of R to the matrix's owner, which adds them up and
    iterates; Q goes back to every holder. One reduction and one broadcast for all matrices of a bucket together, every
    matrix iterated once. A part is scaled by its own norm, which travels with it, so nothing can overflow; both R and Q
    are symmetric, so their upper triangles are enough.

    A product's bits hang on the width of a shard, and a shard is divided by its own norm. So ranks that store one piece
    of a matrix must store the same pieces of it, in one order: replicas whose shards differ would drift apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from shardmuon.layout.pieces import Tile
from shardmuon.layout.table import ParamLayout
from shardmuon.layout.views import Ints, Matrix, MatrixView


def cut_faults(layout: ParamLayout) -> tuple[str, ...]:
    """The reason why the Gram route cannot serve a matrix, or "", for each matrix."""
    return tuple(_cut_fault(layout, number) or _replica_fault(of_ranks) for number, of_ranks in enumerate(layout.tiles))


def _cut_fault(layout: ParamLayout, number: int) -> str:
    matrix, of_ranks = layout.view.matrices[number], layout.tiles[number]
    held = [(rank, _rectangle(layout.view, tile)) for rank, tiles in of_ranks.items() for tile in tiles]
    short = 0 if matrix.rows <= matrix.cols else 1
    cut = [(rank, shape) for rank, shape in held if shape[short] != matrix[short]]
    if not cut or (matrix.rows == matrix.cols and all(shape[1] == matrix.cols for _, shape in held)):
        return ""
    rank, (rows, cols) = cut[0]
    return f"rank {rank} holds {rows}x{cols} of it: it is cut along its short dim, of which the Gram matrix needs all"


def _replica_fault(of_ranks: Mapping[int, Sequence[Tile]]) -> str:
    first: dict[object, tuple[int, list[object]]] = {}  # tile -> the first rank that stores it, and that one's shard
    for rank, tiles in of_ranks.items():
        shard: list[object] = [tile.key for tile in tiles]
        for key in shard:
            other, known = first.setdefault(key, (rank, shard))
            if known != shard:
                return (
                    f"ranks {other} and {rank} share a piece of it, but not all of their pieces in one order: on the "
                    "Gram route their copies would round apart"
                )
    return ""


def _rectangle(view: MatrixView, tile: Tile) -> tuple[int, int]:
    """Rows and columns of a tile; of one of its repeats, as each is a rectangle by itself, unless they are columns
    that lie one by one or side by side."""
    matrix, sizes, d = view.matrices[tile.matrix], list(tile.sizes), view.split_dim
    columns = d == len(view.shape) - 1
    if d >= 0 and not (columns and matrix.sizes[d + 1] in (1, view.fine[d + 1])):
        sizes[d] = 1
    return _extent(matrix, sizes)


def _extent(matrix: Matrix, sizes: Sequence[int]) -> tuple[int, int]:
    rows = math.prod(n for n, stride in zip(sizes, matrix.strides, strict=True) if stride % matrix.cols == 0)
    return rows, math.prod(sizes) // rows


def turned(view: MatrixView, tile: Tile) -> tuple[bool, int]:
    """True if a tile's matrix is cut along its rows, so that shards are turned for the short side to come first; and
    how much of the long side the tile has."""
    matrix = view.matrices[tile.matrix]
    rows, cols = _extent(matrix, tile.sizes)
    return (True, rows) if rows < matrix.rows else (False, cols)


def strides_in(
    view: MatrixView,
    tile: Tile,
    width: int,  # of the shard: columns of all its tiles
) -> Ints:
    """Strides of a tile's dims in a row-major (short side, columns) shard, in which its columns lie side by side."""
    matrix, (by_rows, _) = view.matrices[tile.matrix], turned(view, tile)
    found, column = [], 1
    for size, stride in zip(reversed(tile.sizes), reversed(matrix.strides), strict=True):
        along_rows = stride % matrix.cols == 0
        if along_rows == by_rows:
            found.append(column)
            column *= size
        else:
            found.append(width * (stride // matrix.cols if along_rows else stride))
    return tuple(reversed(found))
