"""Pieces of a tensor that ranks store, and the tiles that they make of its matrices. Pure index arithmetic.

[Note: two addresses]
    A tile is a box of the fine index space (see views.py), so it has strides in the storage of its rank and in its
    matrix, and moving it is one copy between two strided views. The box is agreed and equal on all ranks. The strides
    of a storage are its rank's own and may change from step to step: they are asked for whenever it is touched.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from shardmuon.layout.views import Ints, MatrixView, row_major

_Span = tuple[Ints, Ints]  # start and sizes of a box


class Box(NamedTuple):
    """A rectangle of the tensor: `offset[d] <= index[d] < offset[d] + size[d]` for every dim."""

    offset: Ints
    size: Ints

    @property
    def numel(self) -> int:
        return math.prod(self.size)


class FlatRange(NamedTuple):
    """Elements `start` (included) to `stop` (excluded) in row-major order: of the tensor, or of a box of it."""

    start: int
    stop: int
    box: Box | None = None

    @property
    def numel(self) -> int:
        return self.stop - self.start


Piece = Box | FlatRange


class Held(NamedTuple):
    """A piece, and where a rank keeps it. Pieces are dense: rows dealt out one by one are a piece, and a copy, each.

    Attributes:
        piece: The piece.
        local: Place of its first element in the rank's storage: an index for each dim (`Box`), or one (`FlatRange`).
    """

    piece: Piece
    local: Ints


def whole(shape: Ints) -> tuple[Held]:
    """The piece that is all of a tensor, in storage like it."""
    zeros = (0,) * len(shape)
    return (Held(Box(zeros, shape), zeros),)


class Patch(NamedTuple):
    """Elements of one matrix, in the order of a view of them whose dims run along rows or along columns.

    Attributes:
        matrix: Number of the matrix in its parameter.
        sizes: Sizes of the view.
        row, col: Place of the first element.
        rows, cols: How many rows and columns the next element along each dim is away; one of both is 0.
    """

    matrix: int
    sizes: Ints
    row: int
    col: int
    rows: Ints
    cols: Ints

    @classmethod
    def rectangle(cls, matrix: int, row: int, col: int, num_rows: int, num_cols: int) -> Patch:
        """Neighbouring rows and columns."""
        return cls(matrix, (num_rows, num_cols), row, col, (1, 0), (0, 1))

    def turned(self) -> Patch:
        """The same elements, seen with the dims in the opposite order."""
        return Patch(self.matrix, self.sizes[::-1], self.row, self.col, self.rows[::-1], self.cols[::-1])

    def address(self, of_row: int, of_col: int) -> tuple[int, Ints]:
        """Offset of its first element, and strides of its dims, in a matrix with these two strides."""
        strides = tuple(a * of_row + b * of_col for a, b in zip(self.rows, self.cols, strict=True))
        return self.row * of_row + self.col * of_col, strides

    def slabs(self, limit: int, num_dims: int) -> Iterator[tuple[tuple[int, int, int], Patch]]:
        """Parts of at most so many elements (or one index), and the dim, start and size by which a view is narrowed to
        each: they are cut along the first dim of more than one index among the first `num_dims`."""
        dim = next((d for d, size in enumerate(self.sizes[:num_dims]) if size > 1), 0)
        size = self.sizes[dim]
        step = max(1, limit * size // max(1, math.prod(self.sizes)))
        for first in range(0, size, step):
            num = min(step, size - first)
            sizes = (*self.sizes[:dim], num, *self.sizes[dim + 1 :])
            row, col = self.row + first * self.rows[dim], self.col + first * self.cols[dim]
            yield (dim, first, num), Patch(self.matrix, sizes, row, col, self.rows, self.cols)


class Tile(NamedTuple):
    """The part of one matrix that lies in one piece: a box of the fine index space, stored by one rank.

    Attributes:
        matrix: Number of the matrix in its view.
        start, sizes: The box.
        held: The piece that it is a part of.
    """

    matrix: int
    start: Ints
    sizes: Ints
    held: Held

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def key(self) -> tuple[int, Ints, Ints]:
        """Key that is equal for copies of the tile on other ranks, wherever those keep them."""
        return self.matrix, self.start, self.sizes

    def in_matrix(self, view: MatrixView) -> tuple[int, Ints]:
        """Offset of its first element, and strides of its dims, in the row-major matrix."""
        matrix = view.matrices[self.matrix]
        return _dot([a - b for a, b in zip(self.start, matrix.start, strict=True)], matrix.strides), matrix.strides

    def patch(self, view: MatrixView) -> Patch:
        """The tile's elements, by their rows and columns in the matrix."""
        offset, strides = self.in_matrix(view)
        num_cols = view.matrices[self.matrix].cols
        rows, cols = zip(*(divmod(stride, num_cols) for stride in strides), strict=True)
        return Patch(self.matrix, self.sizes, *divmod(offset, num_cols), rows, cols)

    def in_storage(self, view: MatrixView, strides: Sequence[int]) -> tuple[int, Ints]:
        """Offset of its first element, and strides of its dims, in a storage with these strides, of which there is one
        if the piece is flat."""
        piece, local = self.held
        if isinstance(piece, FlatRange):
            box = piece.box or Box((0,) * len(view.shape), view.shape)
            origin, first = box.offset, (local[0] - piece.start) * strides[0]
            strides = [step * strides[0] for step in row_major(box.size)]
        else:
            origin, first = piece.offset, _dot(local, strides)
        fine = view.refined(strides)
        return first + _dot(self.start, fine) - _dot(origin, strides), fine


def _dot(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(x * y for x, y in zip(a, b, strict=True))


def tiles_of(held: Held, view: MatrixView) -> tuple[Tile, ...]:
    """The tiles that a piece makes of each matrix, in order of matrices and, within one, of elements stored."""
    spans = [fine for coarse in spans_of(held.piece, view.shape) for fine in _refined(coarse, view)]
    found = []
    for number, matrix in enumerate(view.matrices):
        for span in spans:
            start, sizes = _common(span, (matrix.start, matrix.sizes))
            if min(sizes) > 0:
                found.append(Tile(number, start, sizes, held))
    return tuple(found)


def _common(a: _Span, b: _Span) -> _Span:
    """The box that two boxes share; some size is 0 or less if there is none."""
    start = tuple(map(max, a[0], b[0]))
    return start, tuple(min(i + n, j + k) - low for i, n, j, k, low in zip(a[0], a[1], b[0], b[1], start, strict=True))


def spans_of(piece: Piece, shape: Ints) -> Iterator[_Span]:
    """The boxes of the tensor that hold a piece's elements, in the order in which they are stored; no empty ones."""
    if isinstance(piece, Box):
        if piece.numel:
            yield piece.offset, piece.size
        return
    box = piece.box or Box((0,) * len(shape), shape)
    for start, sizes in _range_spans(piece.start, piece.stop, box.size):
        yield tuple(a + b for a, b in zip(start, box.offset, strict=True)), sizes


def _range_spans(start: int, stop: int, sizes: Ints) -> Iterator[_Span]:
    """Boxes that hold elements [start, stop) of a row-major tensor: the end of a row, whole rows, the start of one."""
    if start >= stop:
        return
    if len(sizes) == 1:
        yield (start,), (stop - start,)
        return
    row = math.prod(sizes[1:])
    index, inside = divmod(start, row)
    num = 0 if inside else (stop - start) // row
    if num:
        yield (index, *(0 for _ in sizes[1:])), (num, *sizes[1:])
    for rest, of_rest in _range_spans(inside, min(row, inside + stop - start), sizes[1:]) if not num else ():
        yield (index, *rest), (1, *of_rest)
    yield from _range_spans(start + num * row if num else (index + 1) * row, stop, sizes)


def _refined(span: _Span, view: MatrixView) -> Iterator[_Span]:
    """A box of the tensor as boxes of the fine index space."""
    d = view.split_dim
    if d < 0:
        yield span
        return
    start, sizes = span
    for inner, of_inner in _range_spans(start[d], start[d] + sizes[d], view.fine[d : d + 2]):
        yield (*start[:d], *inner, *start[d + 1 :]), (*sizes[:d], *of_inner, *sizes[d + 1 :])


def partition_fault(shape: Ints, pieces: Iterable[Piece]) -> str | None:
    """The first gap or overlap that distinct pieces leave, in words; None if they cover the tensor once."""
    distinct = {piece for piece in pieces if piece.numel}
    numel, space, words = math.prod(shape), shape, f"shape {shape}"
    if not distinct and not numel:
        return None
    if all(isinstance(piece, FlatRange) and piece.box is None for piece in distinct):
        space, words = (numel,), f"{numel} elements of shape {shape}"
    spans = [span for piece in distinct for span in spans_of(piece, space)]
    for start, sizes in spans:
        if len(start) != len(space) or any(
            a < 0 or a + n > whole for a, n, whole in zip(start, sizes, space, strict=False)
        ):
            return f"a piece of offset {start} and size {sizes} is out of bounds of {words}"
    found = _grid_fault(space, spans)
    return None if found is None else f"pieces {found} of {words}"


def _grid_fault(shape: Ints, spans: Sequence[_Span]) -> str | None:
    """Count how many boxes hold each cell of the grid of all edges. A sum of sizes would pass wrong layouts."""
    edges = [
        np.unique([0, whole, *itertools.chain.from_iterable((start[d], start[d] + sizes[d]) for start, sizes in spans)])
        for d, whole in enumerate(shape)
    ]
    count = np.zeros([len(e) - 1 for e in edges], dtype=np.int32)
    for start, sizes in spans:
        cells = zip(edges, start, sizes, strict=True)
        count[tuple(slice(np.searchsorted(e, a), np.searchsorted(e, a + n)) for e, a, n in cells)] += 1
    for fault, wrong in (("leave a gap", count == 0), ("overlap", count > 1)):
        if wrong.any():
            cell = np.argwhere(wrong)[0]
            at = ", ".join(f"[{e[i]}, {e[i + 1]})" for e, i in zip(edges, cell, strict=True))
            return f"{fault} at ({at})"
    return None
