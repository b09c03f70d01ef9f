"""Pieces of a tensor, each stored by a rank, and tiles, the parts of matrices in these pieces. Pure index arithmetic.

[Note: two addresses]
    A tile is a box of the tensor's index space (in which one dim may be split in two, see views.py). So a tile has
    strides both in its rank's storage and in its matrix, and a single copy between two strided views moves it. All
    ranks know the box. The strides of the storage are known only to its rank and may change from step to step, so they
    are read at each access.
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
    """Elements [start, stop) of the flattened tensor, or of the flattened `box` if given, in row-major order."""

    start: int
    stop: int
    box: Box | None = None

    @property
    def numel(self) -> int:
        return self.stop - self.start


Piece = Box | FlatRange


class Held(NamedTuple):
    """A piece of a tensor and its location in a rank's storage. Pieces have no holes: if rows are distributed
    round-robin, each row is a separate piece and needs a separate copy.

    Attributes:
        piece: Elements of the tensor.
        local: Index in the storage of the piece's first element: one number per dim for a `Box`, a single flat index
            for a `FlatRange`.
    """

    piece: Piece
    local: Ints


def whole(shape: Ints) -> tuple[Held]:
    """Make the single piece that covers a whole tensor, in storage of the same shape."""
    zeros = (0,) * len(shape)
    return (Held(Box(zeros, shape), zeros),)


class Patch(NamedTuple):
    """Elements of one matrix, as an N-D view of which each dim steps through either rows or columns of the matrix.

    Attributes:
        matrix: Index of the matrix in its parameter.
        sizes: Sizes of the view.
        row, col: Row and column of the first element.
        rows, cols: For each dim of the view, the number of matrix rows and of matrix columns between neighboring
            elements; one of the two is 0.
    """

    matrix: int
    sizes: Ints
    row: int
    col: int
    rows: Ints
    cols: Ints

    @classmethod
    def rectangle(cls, matrix: int, row: int, col: int, num_rows: int, num_cols: int) -> Patch:
        """Make the patch of a contiguous range of rows and columns."""
        return cls(matrix, (num_rows, num_cols), row, col, (1, 0), (0, 1))

    def address(self, of_row: int, of_col: int) -> tuple[int, Ints]:
        """Compute the offset of the first element and the stride of each dim, in a matrix with the given row and column
        strides."""
        strides = tuple(a * of_row + b * of_col for a, b in zip(self.rows, self.cols, strict=True))
        return self.row * of_row + self.col * of_col, strides

    def slabs(self, limit: int, num_dims: int) -> Iterator[tuple[tuple[int, int, int], Patch]]:
        """Split the patch into slabs of at most `limit` elements, but at least one index, along the first dim with a
        size above 1 (only the first `num_dims` dims are considered). Yields ((dim, start, size), slab); the first item
        holds the arguments with which `Tensor.narrow` selects the slab."""
        dim = next((d for d, size in enumerate(self.sizes[:num_dims]) if size > 1), 0)
        size = self.sizes[dim]
        step = max(1, limit * size // max(1, math.prod(self.sizes)))
        for first in range(0, size, step):
            num = min(step, size - first)
            sizes = (*self.sizes[:dim], num, *self.sizes[dim + 1 :])
            row, col = self.row + first * self.rows[dim], self.col + first * self.cols[dim]
            yield (dim, first, num), Patch(self.matrix, sizes, row, col, self.rows, self.cols)


class Tile(NamedTuple):
    """Elements that one matrix and one rank's piece of a tensor have in common. They form a box of the fine index space
    (the tensor's index space, in which one dim may be split in two).

    Attributes:
        matrix: Index of the matrix in its view.
        start, sizes: The box.
        held: The piece that contains the tile.
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
        """Matrix and box of the tile, without its location in storage: equal for all replicas of the tile."""
        return self.matrix, self.start, self.sizes

    def in_matrix(self, view: MatrixView) -> tuple[int, Ints]:
        """Compute the offset of the tile's first element and the stride of each dim of its box, in the row-major
        matrix."""
        matrix = view.matrices[self.matrix]
        return _dot([a - b for a, b in zip(self.start, matrix.start, strict=True)], matrix.strides), matrix.strides

    def patch(self, view: MatrixView) -> Patch:
        """Convert the tile to a patch, which addresses the same elements by rows and columns of the matrix."""
        offset, strides = self.in_matrix(view)
        num_cols = view.matrices[self.matrix].cols
        rows, cols = zip(*(divmod(stride, num_cols) for stride in strides), strict=True)
        return Patch(self.matrix, self.sizes, *divmod(offset, num_cols), rows, cols)

    def in_storage(self, view: MatrixView, strides: Sequence[int]) -> tuple[int, Ints]:
        """Compute the offset of the tile's first element and the stride of each dim of its box, in a storage with the
        given strides (a single stride if the piece is a `FlatRange`)."""
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
    """Split a piece into tiles, each of which belongs to one matrix. Tiles are ordered by matrix, then by their place
    in storage."""
    spans = [fine for coarse in spans_of(held.piece, view.shape) for fine in _refined(coarse, view)]
    found = []
    for number, matrix in enumerate(view.matrices):
        for span in spans:
            start, sizes = _common(span, (matrix.start, matrix.sizes))
            if min(sizes) > 0:
                found.append(Tile(number, start, sizes, held))
    return tuple(found)


def _common(a: _Span, b: _Span) -> _Span:
    """Intersect two boxes. If the intersection is empty, at least one returned size is 0 or negative."""
    start = tuple(map(max, a[0], b[0]))
    return start, tuple(min(i + n, j + k) - low for i, n, j, k, low in zip(a[0], a[1], b[0], b[1], start, strict=True))


def spans_of(piece: Piece, shape: Ints) -> Iterator[_Span]:
    """Yield the nonempty boxes of the tensor that make up a piece, in storage order."""
    if isinstance(piece, Box):
        if piece.numel:
            yield piece.offset, piece.size
        return
    box = piece.box or Box((0,) * len(shape), shape)
    for start, sizes in _range_spans(piece.start, piece.stop, box.size):
        yield tuple(a + b for a, b in zip(start, box.offset, strict=True)), sizes


def _range_spans(start: int, stop: int, sizes: Ints) -> Iterator[_Span]:
    """Yield boxes that cover elements [start, stop) of a row-major tensor: the end of the first row, then whole rows,
    then the start of the last row."""
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
    """Convert a box of the tensor to boxes of the view's fine index space, in which one tensor dim may be split in
    two."""
    d = view.split_dim
    if d < 0:
        yield span
        return
    start, sizes = span
    for inner, of_inner in _range_spans(start[d], start[d] + sizes[d], view.fine[d : d + 2]):
        yield (*start[:d], *inner, *start[d + 1 :]), (*sizes[:d], *of_inner, *sizes[d + 1 :])


def partition_fault(shape: Ints, pieces: Iterable[Piece]) -> str | None:
    """Describe the first piece that is out of bounds, else the first gap or overlap. Replicas do not count as overlap.
    Returns None if the pieces cover every element exactly once."""
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
    """Describe the first gap or overlap of these boxes, or return None. All box edges together divide the tensor into
    cells, and each cell must be covered by exactly one box. Comparing only the total size of the boxes with the size of
    the tensor would miss a gap and an overlap of equal size."""
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
