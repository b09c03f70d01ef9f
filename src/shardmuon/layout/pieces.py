"""Layouts of parameters. A layout states which pieces of a tensor each rank stores. A piece is divided into tiles, each
of which belongs to a single matrix. All functions are pure index arithmetic.

[Note: two addresses]
    A tile is a box of indices of the tensor. (A dim along which the blocks of a fused projection repeat is first
    unflattened into two dims, see [Note: the fine index space] in views.py.) Such a box can be addressed by strides,
    both in the storage of its rank and in its matrix. A single copy between two strided views therefore moves a tile
    from one to the other.

    All ranks know the boxes of all tiles. Only the rank that stores a tile knows the strides of its own storage. These
    strides can change from step to step, so they are read at each access.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import NamedTuple

import numpy as np

from shardmuon.comm.groups import Ranks
from shardmuon.comm.vote import digest_of
from shardmuon.layout.views import Ints, MatrixView, row_major

_Span = tuple[Ints, Ints]  # (first index, sizes) of a box of tensor indices


class Box(NamedTuple):
    """A box of a tensor's elements: `offset[d] <= index[d] < offset[d] + size[d]` for every dim d."""

    offset: Ints
    size: Ints

    @property
    def numel(self) -> int:
        return math.prod(self.size)


class FlatRange(NamedTuple):
    """Elements [start, stop) of a tensor in row-major order or, if `box` is given, of this box of the tensor."""

    start: int
    stop: int
    box: Box | None = None

    @property
    def numel(self) -> int:
        return self.stop - self.start


Piece = Box | FlatRange


class Held(NamedTuple):
    """A piece of a tensor and its location in a rank's storage. A piece has no gaps. For example, if rows are
    distributed round-robin, each row is a separate piece.

    Attributes:
        piece: Elements of the tensor.
        local: Index of the piece's first element in the storage: one number per dim for a `Box`, a single flat index
            for a `FlatRange`.
    """

    piece: Piece
    local: Ints

    @classmethod
    def whole(cls, shape: Ints) -> Held:
        """Make the piece that covers a whole tensor, for a rank whose storage has the tensor's shape."""
        zeros = (0,) * len(shape)
        return cls(Box(zeros, shape), zeros)


class Patch(NamedTuple):
    """Elements of one matrix, arranged as an N-D view. Each dim of the view steps through either rows or columns of the
    matrix.

    Attributes:
        matrix: Index of the matrix in its parameter.
        sizes: Shape of the view.
        row, col: Row and column of the first element.
        rows, cols: Step along each dim of the view, in matrix rows (`rows`) and in matrix columns (`cols`). One of the
            two is 0 for each dim.
    """

    matrix: int
    sizes: Ints
    row: int
    col: int
    rows: Ints
    cols: Ints

    @classmethod
    def rectangle(cls, matrix: int, row: int, col: int, num_rows: int, num_cols: int) -> Patch:
        """Make the patch that covers a contiguous range of rows and columns of a matrix."""
        return cls(matrix, (num_rows, num_cols), row, col, (1, 0), (0, 1))

    def address(self, of_row: int, of_col: int) -> tuple[int, Ints]:
        """Compute the offset of the patch's first element and the stride of each dim of the patch, in a matrix with the
        given row and column strides."""
        strides = tuple(a * of_row + b * of_col for a, b in zip(self.rows, self.cols, strict=True))
        return self.row * of_row + self.col * of_col, strides

    def slabs(self, limit: int, num_dims: int) -> Iterator[tuple[tuple[int, int, int], Patch]]:
        """Split the patch into slabs along one dim: the first dim with a size above 1 among the first `num_dims` dims.
        A slab has at most `limit` elements, unless a single index of the dim already has more. Yield ((dim, start,
        size), slab), where `Tensor.narrow(dim, start, size)` selects the slab."""
        dim = next((d for d, size in enumerate(self.sizes[:num_dims]) if size > 1), 0)
        size = self.sizes[dim]
        step = max(1, limit * size // max(1, math.prod(self.sizes)))
        for first in range(0, size, step):
            num = min(step, size - first)
            sizes = (*self.sizes[:dim], num, *self.sizes[dim + 1 :])
            row, col = self.row + first * self.rows[dim], self.col + first * self.cols[dim]
            yield (dim, first, num), Patch(self.matrix, sizes, row, col, self.rows, self.cols)


class Tile(NamedTuple):
    """Part of one matrix within one stored piece of a tensor. The part is a box of indices of the tensor, in the fine
    index space ([Note: the fine index space] in views.py).

    Attributes:
        matrix: Index of the matrix in the tensor's `MatrixView`.
        start, sizes: First index and sizes of the box.
        held: The piece that contains the tile.
    """

    matrix: int
    start: Ints
    sizes: Ints
    held: Held

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def in_matrix(self, view: MatrixView) -> tuple[int, Ints]:
        """Compute the offset of the tile's first element, and the stride of each dim of the tile's box, in the
        row-major matrix that contains the tile."""
        matrix = view.matrices[self.matrix]
        return _dot([a - b for a, b in zip(self.start, matrix.start, strict=True)], matrix.strides), matrix.strides

    def patch(self, view: MatrixView) -> Patch:
        """Convert the tile to a patch, which addresses the same elements by rows and columns of the matrix."""
        offset, strides = self.in_matrix(view)
        num_cols = view.matrices[self.matrix].cols
        rows, cols = zip(*(divmod(stride, num_cols) for stride in strides), strict=True)
        return Patch(self.matrix, self.sizes, *divmod(offset, num_cols), rows, cols)

    def in_storage(self, view: MatrixView, strides: Sequence[int]) -> tuple[int, Ints]:
        """Compute the offset of the tile's first element, and the stride of each dim of the tile's box, in a storage
        with the given strides (a single stride if the piece is a `FlatRange`)."""
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


def _tiles_of(held: Held, view: MatrixView) -> tuple[Tile, ...]:
    """Split a piece into tiles, each of which belongs to one matrix. The tiles are sorted by matrix, and within a
    matrix by their position in storage."""
    spans = [fine for coarse in _spans_of(held.piece, view.shape) for fine in _refined(coarse, view)]
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


def _spans_of(piece: Piece, shape: Ints) -> Iterator[_Span]:
    """Yield, in storage order, the nonempty boxes of tensor indices that make up a piece."""
    if isinstance(piece, Box):
        if piece.numel:
            yield piece.offset, piece.size
        return
    box = piece.box or Box((0,) * len(shape), shape)
    for start, sizes in _range_spans(piece.start, piece.stop, box.size):
        yield tuple(a + b for a, b in zip(start, box.offset, strict=True)), sizes


def _range_spans(start: int, stop: int, sizes: Ints) -> Iterator[_Span]:
    """Yield boxes that cover elements [start, stop) of a row-major tensor of shape `sizes`: the end of the first row,
    then all complete rows, then the start of the last row. A row is the slice at one index of the first
    dim."""
    if start >= stop:
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
    """Yield boxes in the fine index space that together cover a box of tensor indices ([Note: the fine index space] in
    views.py). The fine index space has two dims in place of the dim along which the blocks of a fused projection
    repeat. If there is no such dim, yield the box unchanged."""
    d = view.split_dim
    if d < 0:
        yield span
        return
    start, sizes = span
    for inner, of_inner in _range_spans(start[d], start[d] + sizes[d], view.fine[d : d + 2]):
        yield (*start[:d], *inner, *start[d + 1 :]), (*sizes[:d], *of_inner, *sizes[d + 1 :])


def _check_partition(shape: Ints, pieces: Iterable[Piece]) -> None:
    """Raise ValueError if the pieces leave a gap in the tensor, overlap, or extend beyond the tensor's bounds. Equal
    pieces are replicas and do not count as overlap.

    The edges of all boxes divide the tensor into cells, and exactly one box must cover each cell. Checking only the
    total size of the boxes would miss a gap and an overlap of equal size.
    """
    distinct = {piece for piece in pieces if piece.numel}
    space, words = shape, f"shape {shape}"
    if all(isinstance(piece, FlatRange) and piece.box is None for piece in distinct):
        space = (math.prod(shape),)
        words = f"{space[0]} elements of shape {shape}"
    spans = [span for piece in distinct for span in _spans_of(piece, space)]
    for start, sizes in spans:
        if len(start) != len(space) or any(
            a < 0 or a + n > whole for a, n, whole in zip(start, sizes, space, strict=False)
        ):
            raise ValueError(f"a piece of offset {start} and size {sizes} is out of bounds of {words}")
    edges = [
        sorted({0, whole, *itertools.chain.from_iterable((start[d], start[d] + sizes[d]) for start, sizes in spans)})
        for d, whole in enumerate(space)
    ]
    count = np.zeros([len(e) - 1 for e in edges], dtype=np.int32)
    for start, sizes in spans:
        cells = zip(edges, start, sizes, strict=True)
        count[tuple(slice(bisect_left(e, a), bisect_left(e, a + n)) for e, a, n in cells)] += 1
    for fault, wrong in (("leave a gap", count == 0), ("overlap", count > 1)):
        if wrong.any():
            cell = np.argwhere(wrong)[0]
            at = ", ".join(f"[{e[i]}, {e[i + 1]})" for e, i in zip(edges, cell, strict=True))
            raise ValueError(f"pieces {fault} at ({at}) of {words}")


# -------------------------------------------------------------------------------------------------- who stores what


@dataclass(frozen=True, eq=False)
class ParamLayout:
    """The pieces of one tensor that each rank stores. All ranks that share the tensor compute the same layout. Tensors
    with equal layouts share one object.

    Attributes:
        view: The tensor's global shape and matrices.
        ranks: All ranks that share the tensor, including ranks that store no part of it.
        held: For each rank in `ranks`, the pieces that the rank stores.

    Raises:
        ValueError: The pieces are out of bounds, overlap or leave a gap. (Equal pieces are replicas and do not count as
            overlap.)
    """

    view: MatrixView
    ranks: Ranks
    held: tuple[tuple[Held, ...], ...]

    @classmethod
    def replicated(cls, view: MatrixView, ranks: Ranks) -> ParamLayout:
        """Make the layout of a tensor that is replicated on all of `ranks`."""
        return cls(view, ranks, ((Held.whole(view.shape),),) * len(ranks))

    def __post_init__(self) -> None:
        _check_partition(self.view.shape, (one.piece for of_rank in self.held for one in of_rank))

    @cached_property
    def digest(self) -> bytes:
        """16-byte hash of the layout. Equal layouts have equal hashes on all ranks."""
        return digest_of((self.view, self.ranks, self.held))

    @cached_property
    def tiles(self) -> tuple[dict[int, tuple[Tile, ...]], ...]:
        """One dict per matrix, from each rank that stores part of the matrix to the rank's tiles. Ranks are in
        ascending order, and tiles in storage order."""
        # Tiles are computed once for each distinct piece, because replicas of a piece have equal tiles.
        of_held = cache(partial(_tiles_of, view=self.view))
        found: list[dict[int, list[Tile]]] = [{} for _ in self.view.matrices]
        for rank, of_rank in zip(self.ranks, self.held, strict=True):
            for tile in itertools.chain.from_iterable(map(of_held, of_rank)):
                found[tile.matrix].setdefault(rank, []).append(tile)
        return tuple({rank: tuple(tiles) for rank, tiles in of_matrix.items()} for of_matrix in found)

    def of_rank(self, rank: int) -> tuple[Held, ...]:
        """Return the pieces of the tensor that a rank stores."""
        return self.held[self.ranks.index(rank)]

    def spans(self, rank: int, strides: Sequence[int]) -> Iterator[tuple[Ints, Ints, Ints, int]]:
        """Yield (start, sizes, strides, offset) for each box of the tensor that a rank stores. `start` is the first
        index of the box in the tensor. The yielded strides and offset locate the box in the rank's storage. The
        argument `strides` contains the strides of this storage."""
        for held in self.of_rank(rank):
            for start, sizes in _spans_of(held.piece, self.view.shape):
                offset, steps = Tile(0, start, sizes, held).in_storage(self.view, strides)
                yield start, sizes, steps, offset

    @cached_property
    def pieces(self) -> dict[int, tuple[Piece, ...]]:
        """Dict from each rank to the nonempty pieces of the tensor that the rank stores."""
        held = zip(self.ranks, self.held, strict=True)
        return {rank: tuple(one.piece for one in of_rank if one.piece.numel) for rank, of_rank in held}

    @cached_property
    def keepers(self) -> dict[Piece, Ranks]:
        """Dict from each piece to the ranks that store a replica of the piece, in ascending order."""
        found: dict[Piece, Ranks] = {}
        for rank, pieces in self.pieces.items():
            for piece in pieces:
                found[piece] = (*found.get(piece, ()), rank)
        return found

    @cached_property
    def replica_of(self) -> dict[int, int]:
        """Dict from each rank to the index of its replica: the position of the rank among all ranks that store the
        rank's first piece. The index is 0 for a rank that stores nothing. On a hybrid-sharded mesh, the index is the
        rank's coordinate on the replica axis.
        """
        return {rank: self.keepers[pieces[0]].index(rank) if pieces else 0 for rank, pieces in self.pieces.items()}

    @cached_property
    def replicas(self) -> tuple[Ranks, ...]:
        """The ranks of each replica, ordered by replica index (`replica_of`). The tuple is empty if some pieces have
        more copies than others, or if a rank would belong to several replicas."""
        num = {len(ranks) for ranks in self.keepers.values()}
        # for each piece, replica i contains the i-th rank that stores it
        found = [tuple(sorted(set(ranks))) for ranks in zip(*self.keepers.values(), strict=False)]
        are_disjoint = sum(map(len, found)) == len(set().union(*found))
        return tuple(found) if len(num) == 1 and are_disjoint else ()

    @cached_property
    def has_replicas(self) -> bool:
        """True if several ranks store the same piece of the tensor."""
        return any(len(ranks) > 1 for ranks in self.keepers.values())

    def source(self, piece: Piece, owner: int) -> int:
        """Choose the rank that sends a piece to `owner` (the rank that orthogonalizes the matrix) and receives the
        result: the owner itself if it stores the piece, else the rank in the owner's replica that stores the piece."""
        ranks = self.keepers[piece]
        return owner if owner in ranks else ranks[self.replica_of.get(owner, 0) % len(ranks)]

    @cached_property
    def whole_on(self) -> tuple[Ranks, ...]:
        """Tuple with one entry per matrix of the tensor: the ranks that store the whole matrix."""
        return tuple(
            tuple(rank for rank, tiles in of_matrix.items() if sum(t.numel for t in tiles) == m.rows * m.cols)
            for m, of_matrix in zip(self.view.matrices, self.tiles, strict=True)
        )
