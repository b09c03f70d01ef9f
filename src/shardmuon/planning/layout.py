"""Layout is data: which rank holds which piece of which tensor, and which rows of it form a matrix.

Pure index arithmetic on integers. Knows nothing of torch tensors, process groups, momentum or costs, so the same
code describes eight real ranks and a thousand simulated ones.

[Note: vocabulary]
    logical tensor   the parameter as the user wrote it, before any engine cut it up
    row view         the logical tensor read as 2-D, row-major: (R, C). A 2-D weight is its own row view; a stack of
                     experts (E, M, N) is (E*M, N); a conv kernel (out, in, kh, kw) is (out, in*kh*kw)
    matrix           rows of the row view, all columns or some, orthogonalized as a unit; or the transpose of that
    piece            a part of the logical tensor: `Box`, `FlatRange` or `FlatBox`
    holder           (rank, piece, local): that rank keeps the piece at `local` of its own storage
    fragment         the intersection of one holder's piece with one matrix: a rectangle of the matrix and the slices
                     of local storage that hold it. Both enumerate their elements in the same (row-major) order, so
                     moving a fragment is one `copy_` each way.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardmuon.layout import pieces
from shardmuon.planning.views import Matrix, MatrixView, Shape

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of the logical tensor: `offset[d] <= index[d] < offset[d] + size[d]` for every dim."""

    offset: Shape
    size: Shape

    @property
    def numel(self) -> int:
        return math.prod(self.size)


@dataclass(frozen=True, slots=True)
class FlatRange:
    """Elements `start` (included) to `stop` (excluded) of the logical tensor in row-major order."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class FlatBox:
    """Elements `start` to `stop` of a rectangle of a 2-D tensor in the rectangle's row-major order: a flat range of
    a tensor-parallel shard."""

    box: Box
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


Piece = Box | FlatRange | FlatBox


def same_storage(first: Sequence[int], second: Sequence[int]) -> bool:
    """Whether two storage shapes correspond. Empty ones do, whatever their shape: engines differ in what they keep of
    nothing (`fully_shard` over an empty tensor-parallel shard of (12, 0) stores (0, 0))."""
    return tuple(first) == tuple(second) or math.prod(first) == math.prod(second) == 0


@dataclass(frozen=True, slots=True)
class Holder:
    """Rank `rank` keeps `piece` at `local` of its storage: an offset per dim (`Box`) or one offset (flat ones)."""

    rank: int
    piece: Piece
    local: Shape


class Part(NamedTuple):
    """Which part of the slices of storage a fragment is, where it is not all of them as they lie.

    Attributes:
        width: Flat storage: the slice holds rows of so many columns. 0: it has dims of its own.
        columns: Start, stop and step of the fragment's columns among those; None: all.
        row_dim: The fragment is the transpose: this dim of the slices becomes its columns. -1: it is not.
    """

    width: int
    columns: tuple[int, int, int] | None
    row_dim: int

    def of(self, slices: Tensor) -> Tensor:
        """The part, a view."""
        rows = slices.unflatten(0, (-1, self.width)) if self.width else slices
        if self.columns is not None:
            rows = rows[..., slice(*self.columns)]
        return rows if self.row_dim < 0 else rows.movedim(self.row_dim, -1)


@dataclass(frozen=True, slots=True)
class Fragment:
    """A rectangle of one matrix and the slices of one rank's storage that hold it."""

    matrix: int
    row: int
    col: int
    num_rows: int
    num_cols: int
    local: tuple[tuple[int, int], ...]  # [start, stop) per dim of local storage
    part: Part | None = None  # of these slices; None: all as they lie

    @property
    def numel(self) -> int:
        return self.num_rows * self.num_cols

    @property
    def rect(self) -> tuple[int, int, int, int]:
        return (self.row, self.col, self.num_rows, self.num_cols)

    def select_local(self, storage: Tensor) -> Tensor:
        """The fragment as a view of local storage (a parameter, its gradient or its momentum)."""
        for dim, (start, stop) in enumerate(self.local):
            if stop - start != storage.shape[dim]:
                storage = storage.narrow(dim, start, stop - start)
        return storage if self.part is None else self.part.of(storage)

    @property
    def patch(self) -> pieces.Patch:
        """Its rows and columns."""
        return pieces.Patch.rectangle(self.matrix, self.row, self.col, self.num_rows, self.num_cols)

    @property
    def turned(self) -> bool:
        """Whether it is the transpose of what is stored."""
        return self.part is not None and self.part.row_dim >= 0

    def as_stored(self) -> Fragment:
        """The same elements as rows and columns of what is stored; itself if it is no transpose."""
        if self.part is None or self.part.row_dim < 0:
            return self
        width, columns, _ = self.part
        part = None if columns is None and not width else Part(width, columns, -1)
        return Fragment(self.matrix, self.col, self.row, self.num_cols, self.num_rows, self.local, part)

    def select_matrix(
        self,
        matrix: Tensor,  # (rows, cols)
    ) -> Tensor:  # (num_rows, num_cols), a view
        """The fragment as a view of the whole matrix."""
        if (self.num_rows, self.num_cols) == matrix.shape:
            return matrix
        return matrix.narrow(0, self.row, self.num_rows).narrow(1, self.col, self.num_cols)


@dataclass(frozen=True, slots=True)
class Rect:
    """A rectangle of the row view with its local slices; `row_dim` is the local dim that its rows run along."""

    row: int
    num_rows: int
    col: int
    num_cols: int
    local: tuple[tuple[int, int], ...]
    row_dim: int
    row_stride: int  # elements of local dim `row_dim` per row: 1 for boxes, num_cols for flat storage

    def rows(self, start: int, stop: int) -> tuple[tuple[int, int], ...]:
        """Local slices of rows [start, stop) of the row view."""
        if (start, stop) == (self.row, self.row + self.num_rows):
            return self.local
        first = self.local[self.row_dim][0] + (start - self.row) * self.row_stride
        narrowed = (first, first + (stop - start) * self.row_stride)
        return (*self.local[: self.row_dim], narrowed, *self.local[self.row_dim + 1 :])

    def fragment(
        self, index: int, matrix: Matrix, rows: tuple[int, int], to_row: int, columns: tuple[int, int, int, int]
    ) -> Fragment:
        """Rows [start, stop) of the row view and these columns (see `Runs.within`) as a part of a matrix, of whose
        rows as they are stored `to_row` is the first of them."""
        to_col, left, right, step = columns
        local, num_rows, num_cols = self.rows(*rows), rows[1] - rows[0], -(-(right - left) // step)
        among: tuple[int, int, int] | None = (left - self.col, right - self.col, step)
        width = self.num_cols if len(local) == 1 else 0
        if num_cols == self.num_cols:
            among = None
        elif not width and step == 1:
            begin = local[-1][0] + left - self.col
            local, among = (*local[:-1], (begin, begin + num_cols)), None
        if among is None and not matrix.transposed:
            return Fragment(index, to_row, to_col, num_rows, num_cols, local)
        part = Part(width, among, self.row_dim if matrix.transposed else -1)
        if matrix.transposed:
            return Fragment(index, to_col, to_row, num_cols, num_rows, local, part)
        return Fragment(index, to_row, to_col, num_rows, num_cols, local, part)


def flat_rects(
    piece: FlatRange | FlatBox, local: int, num_cols: int, corner: tuple[int, ...] = (0, 0)
) -> Iterator[Rect]:
    """A flat range is at most three rectangles: the end of a row, whole rows, the start of a row.

    `num_cols`: of the rectangle that it is a range of, whose first element is at `corner`.
    """
    at = piece.start
    while at < piece.stop:
        row, col = divmod(at, num_cols)
        num_rows = (piece.stop - at) // num_cols if col == 0 else 0
        take = num_rows * num_cols or min(num_cols - col, piece.stop - at)
        cols = num_cols if num_rows else take
        first = local + at - piece.start
        yield Rect(corner[0] + row, num_rows or 1, corner[1] + col, cols, ((first, first + take),), 0, num_cols)
        at += take


def _box_rects(piece: Box, local: Shape, view: MatrixView) -> Iterator[Rect]:
    """A box of the logical tensor as rectangles of the row view, one per index of its outer dims."""
    if piece.numel == 0:
        return
    shape, rows = view.shape, view.num_row_dims
    # Trailing dims flatten into one run of columns as long as every dim after the first cut one is whole.
    inner = len(shape) - 1
    while inner > rows and piece.size[inner] == shape[inner]:
        inner -= 1
    outer_dims = (*range(rows - 1), *range(rows, inner))
    strides = [math.prod(shape[rows:][d + 1 :]) for d in range(len(shape) - rows)]
    for index in itertools.product(*(range(piece.size[d]) for d in outer_dims)):
        at = dict(zip(outer_dims, index, strict=True))
        row = piece.offset[rows - 1]
        if rows == 2:
            row += (piece.offset[0] + at[0]) * shape[1]
        col = sum((piece.offset[d] + at.get(d, 0)) * strides[d - rows] for d in range(rows, len(shape)))
        slices = tuple(
            (local[d] + at[d], local[d] + at[d] + 1) if d in at else (local[d], local[d] + piece.size[d])
            for d in range(len(shape))
        )
        num_cols = piece.size[inner] * strides[inner - rows]
        yield Rect(row, piece.size[rows - 1], col, num_cols, slices, rows - 1, 1)


@dataclass(frozen=True, eq=False)
class ParamLayout:
    """Who holds what of one logical tensor. Identical on every rank; parameters of equal geometry share one object.

    Attributes:
        view: The matrices of the tensor (and its global shape).
        ranks: Every rank of the tensor's mesh, ascending, also those that hold nothing of it.
        holders: Who stores which piece. Several ranks may hold the same piece (replicas).

    Raises:
        ValueError: The distinct pieces are out of bounds, overlap or leave a gap.
    """

    view: MatrixView
    ranks: tuple[int, ...]
    holders: tuple[Holder, ...]

    def __post_init__(self) -> None:
        _check_partition(self.view.shape, self.holders)
        strangers = {h.rank for h in self.holders} - set(self.ranks)
        if strangers:
            raise ValueError(f"ranks {sorted(strangers)} hold pieces but are not among the layout's ranks {self.ranks}")

    @property
    def shape(self) -> Shape:
        return self.view.shape

    @cached_property
    def _by_rank(self) -> dict[int, tuple[Holder, ...]]:
        table: dict[int, list[Holder]] = {}
        for holder in self.holders:
            table.setdefault(holder.rank, []).append(holder)
        return {rank: tuple(holders) for rank, holders in table.items()}

    def holders_of(self, rank: int) -> tuple[Holder, ...]:
        """What one rank stores."""
        return self._by_rank.get(rank, ())

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that are equal for equal layouts on any rank."""
        text = repr((self.view, self.ranks, self.holders))
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    @cached_property
    def fragments(self) -> tuple[dict[int, tuple[Fragment, ...]], ...]:
        """Per matrix: rank -> that rank's fragments of it, in storage order. Ranks ascend."""
        bands = self._bands()
        keys = [start for start, _ in bands]
        table: list[dict[int, list[Fragment]]] = [{} for _ in self.view.matrices]
        for holder in sorted(self.holders, key=lambda h: h.rank):
            for rect in self._rects(holder):
                at, end = max(bisect_right(keys, (rect.row, math.inf)) - 1, 0), rect.row + rect.num_rows
                while at < len(bands) and keys[at][0] < end:
                    (start, stop), members = bands[at]
                    rows = max(start, rect.row), min(stop, end)
                    for index, offset in members if rows[0] < rows[1] else ():
                        matrix, right = self.view.matrices[index], rect.col + rect.num_cols
                        found = [(rect.col, rect.col, right, 1)]
                        if matrix.columns is not None:
                            found = list(matrix.columns.within(rect.col, right))
                        table[index].setdefault(holder.rank, []).extend(
                            rect.fragment(index, matrix, rows, offset + rows[0] - start, columns) for columns in found
                        )
                    at += 1
        return tuple({rank: tuple(frags) for rank, frags in row.items() if frags} for row in table)

    def _bands(self) -> list[tuple[tuple[int, int], list[tuple[int, int]]]]:
        """Rows [start, stop) of the row view, ascending, and the matrices that they are a part of: (index, which of the
        matrix's rows as they are stored comes first). Several matrices share rows where columns are split."""
        found: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for index, matrix in enumerate(self.view.matrices):
            offset = 0
            for start, stop in matrix.intervals:
                found.setdefault((start, stop), []).append((index, offset))
                offset += stop - start
        return sorted(found.items())

    def _rects(self, holder: Holder) -> Iterator[Rect]:
        if isinstance(holder.piece, FlatRange):
            return flat_rects(holder.piece, holder.local[0], self.view.num_cols)
        if isinstance(holder.piece, FlatBox):
            return flat_rects(holder.piece, holder.local[0], holder.piece.box.size[1], holder.piece.box.offset)
        return _box_rects(holder.piece, holder.local, self.view)

    @cached_property
    def _keepers(self) -> tuple[dict[tuple[int, int, int, int], tuple[int, ...]], ...]:
        """Per matrix: rectangle -> the ranks that hold exactly it, ascending."""
        tables = []
        for by_rank in self.fragments:
            keepers: dict[tuple[int, int, int, int], list[int]] = {}
            for rank, frags in by_rank.items():
                for frag in frags:
                    keepers.setdefault(frag.rect, []).append(rank)
            tables.append({rect: tuple(ranks) for rect, ranks in keepers.items()})
        return tuple(tables)

    @cached_property
    def replica_index(self) -> dict[int, int]:
        """rank -> which copy of its (first) piece it keeps: 0 for the first holder in rank order, then 1, ...

        On a hybrid-sharded mesh this is the rank's replica coordinate, so an owner and its sources share a replica.
        """
        seen: dict[Piece, int] = {}
        index: dict[int, int] = {}
        for holder in sorted(self.holders, key=lambda h: h.rank):
            if holder.rank not in index:
                index[holder.rank] = seen.get(holder.piece, 0)
            seen[holder.piece] = seen.get(holder.piece, 0) + 1
        return index

    @cached_property
    def has_replicas(self) -> bool:
        """Whether some piece is kept by more than one rank."""
        return len({h.piece for h in self.holders if h.piece.numel}) < sum(1 for h in self.holders if h.piece.numel)

    def source(self, fragment: Fragment, owner: int) -> int:
        """The one rank that sends this fragment to `owner`: the owner itself, or its own replica's keeper."""
        keepers = self._keepers[fragment.matrix][fragment.rect]
        if owner in keepers:
            return owner
        return keepers[self.replica_index.get(owner, 0) % len(keepers)]

    def first_keeper(self, fragment: Fragment) -> int:
        """Of the ranks that hold exactly this rectangle the first: it counts where each element counts once."""
        return self._keepers[fragment.matrix][fragment.rect][0]

    def whole_on(self, matrix: int) -> tuple[int, ...]:
        """Ranks that hold every element of the matrix."""
        return self._whole[matrix]

    @cached_property
    def _whole(self) -> tuple[tuple[int, ...], ...]:
        found = []
        for matrix, by_rank in zip(self.view.matrices, self.fragments, strict=True):
            numel = matrix.rows * matrix.cols
            found.append(tuple(r for r, frags in by_rank.items() if sum(f.numel for f in frags) == numel))
        return tuple(found)


def layout_of(view: MatrixView, ranks: Sequence[int], held_by: Sequence[Sequence[pieces.Held]]) -> ParamLayout:
    """The pieces of `ranks`, in any order of them, in this planner's types."""
    holders = [
        Holder(rank, _own_type(held.piece), held.local)
        for rank, of_rank in sorted(zip(ranks, held_by, strict=True))
        for held in of_rank
    ]
    return ParamLayout(view, tuple(sorted(ranks)), tuple(holders))


def _own_type(piece: pieces.Piece) -> Piece:
    if isinstance(piece, pieces.Box):
        return Box(*piece)
    if piece.box is None:
        return FlatRange(piece.start, piece.stop)
    return FlatBox(Box(*piece.box), piece.start, piece.stop)


def _check_partition(shape: Shape, holders: Sequence[Holder]) -> None:
    """Distinct pieces must be in bounds, disjoint and covering. A sum of sizes alone passes wrong layouts."""
    pieces = {h.piece for h in holders if h.piece.numel}
    flat = sorted((p.start, p.stop) for p in pieces if isinstance(p, FlatRange))
    boxes = [box for p in pieces for box in _boxes_of(p)]
    if flat and boxes:
        raise ValueError("a layout is all boxes or all flat ranges, found both")
    if flat:
        _check_flat_partition(shape, flat)
    else:
        _check_box_partition(shape, boxes)


def _boxes_of(piece: Piece) -> list[Box]:
    if isinstance(piece, FlatBox):
        rects = flat_rects(piece, 0, piece.box.size[1], piece.box.offset)
        return [Box((rect.row, rect.col), (rect.num_rows, rect.num_cols)) for rect in rects]
    return [piece] if isinstance(piece, Box) else []


def _check_flat_partition(shape: Shape, ranges: Sequence[tuple[int, int]]) -> None:
    numel, at = math.prod(shape), 0
    for start, stop in ranges:
        if start > at:
            raise ValueError(f"pieces leave a gap: no rank holds elements [{at}, {start}) of {numel} of shape {shape}")
        if start < at:
            raise ValueError(
                f"pieces overlap: elements [{start}, {min(at, stop)}) of shape {shape} are held by two pieces"
            )
        at = stop
    if at < numel:
        raise ValueError(f"pieces leave a gap: no rank holds elements [{at}, {numel}) of {numel} of shape {shape}")
    if at > numel:
        raise ValueError(f"pieces reach element {at}, but shape {shape} has only {numel}")


def _check_box_partition(shape: Shape, boxes: Sequence[Box]) -> None:
    for box in boxes:
        if len(box.offset) != len(shape) or any(
            o < 0 or o + s > n for o, s, n in zip(box.offset, box.size, shape, strict=False)
        ):
            raise ValueError(f"{box} is out of bounds of shape {shape}")
    # Paint every box on the grid of all box edges: each cell must be painted exactly once.
    edges = [
        np.unique([0, n, *(b.offset[d] for b in boxes), *(b.offset[d] + b.size[d] for b in boxes)])
        for d, n in enumerate(shape)
    ]
    painted = np.zeros([len(e) - 1 for e in edges], dtype=np.int32)
    for box in boxes:
        painted[
            tuple(
                slice(np.searchsorted(e, o), np.searchsorted(e, o + s))
                for e, o, s in zip(edges, box.offset, box.size, strict=True)
            )
        ] += 1
    for fault, cells in (("leave a gap", painted == 0), ("overlap", painted > 1)):
        if cells.any():
            cell = np.argwhere(cells)[0]
            span = ", ".join(f"[{e[i]}, {e[i + 1]})" for e, i in zip(edges, cell, strict=True))
            raise ValueError(f"pieces {fault} at ({span}) of shape {shape}")
