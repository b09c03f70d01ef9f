"""Which rows and columns of a logical tensor form a matrix. Integers only; the vocabulary is planning/layout.py's.

[Note: stored the other way round]
    A module may store the transpose of its map (`x @ W`), or fuse parts along columns. Both are data here: a `Matrix`
    takes rows [a, b) of the row view, of these all columns or some `Runs`, and is what that rectangle holds or its
    transpose. Fragments have the coordinates of the matrix, so whoever gathers, orthogonalizes, rounds or applies sees
    the same numbers in the same places as if the module had stored the matrix itself: the bits are equal.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from shardmuon.layout.views import ViewKind, blocks_of, row_dim

Shape = tuple[int, ...]
Ranks = tuple[int, ...]  # global, ascending


class Runs(NamedTuple):
    """Columns of the row view: `num` runs of `size`, the first at `start`, each `period` after the one before."""

    start: int
    size: int
    period: int
    num: int

    @property
    def total(self) -> int:
        """How many columns these are."""
        return self.size * self.num

    def within(self, first: int, last: int) -> Iterator[tuple[int, int, int, int]]:
        """Those in [first, last), as (number in the runs, start, stop, step) of pieces in which columns are `step`
        apart: one if the runs are single columns, else one for each run."""
        if self.size == 1:
            begin = max(0, -(-(first - self.start) // self.period))
            end = min(self.num, -(-(last - self.start) // self.period))
            if begin < end:
                yield begin, self.start + begin * self.period, self.start + (end - 1) * self.period + 1, self.period
            return
        for at in range(max(0, (first - self.start) // self.period), self.num):
            start = self.start + at * self.period
            if start >= last:
                return
            low, high = max(start, first), min(start + self.size, last)
            if low < high:
                yield at * self.size + low - start, low, high, 1


@dataclass(frozen=True, slots=True)
class Matrix:
    """A logical matrix of `rows` x `cols`.

    Attributes:
        intervals: `[start, stop)` of the rows of the row view that hold it, in this order.
        columns: Which of their columns; None: all.
        transposed: Whether it is the transpose of what they hold.
    """

    rows: int
    cols: int
    intervals: tuple[tuple[int, int], ...]
    columns: Runs | None = None
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class MatrixView:
    """How a logical tensor reads as matrices. Its first `num_row_dims` dims form the rows of the row view."""

    shape: Shape
    num_row_dims: int
    matrices: tuple[Matrix, ...]

    @property
    def num_cols(self) -> int:
        """Columns of the row view."""
        return math.prod(self.shape[self.num_row_dims :])

    @property
    def longest_row(self) -> int:
        """Columns of the matrix that has most."""
        return max((matrix.cols for matrix in self.matrices), default=self.num_cols)


def matrix_view(
    shape: Sequence[int],
    *,
    view: ViewKind = "auto",
    split_sizes: Sequence[int] | None = None,
    split_groups: int = 1,
    num_heads: int | None = None,
    split_dim: int = 0,
    transposed: bool = False,
) -> MatrixView:
    """Say which matrices a tensor of this global shape holds.

    Args:
        shape: Global shape of the logical tensor.
        view: "auto" takes a 2-D tensor whole and flattens 4-D and 5-D convolution kernels to (out, in*k...).
            "stack" reads a 3-D (E, M, N) tensor as E matrices of M x N (experts). "flatten" reads any tensor of two
            or more dims as one (shape[0], rest) matrix. A 3-D tensor must say which: experts and a 1-D convolution's
            kernel look alike.
        split_sizes: Row counts of blocks that are matrices of their own (fused q, k, v; gate and up). In a stack the
            split is made inside each expert. With `split_dim=1` column counts, and so for the two below.
        split_groups: The rows are this many repeats of `split_sizes`; block j of all repeats together forms one
            matrix. Grouped-query attention stored as query groups of (q, k, v) rows is
            `split_sizes=(q_rows, k_rows, v_rows), split_groups=num_query_groups`.
        num_heads: Equal row blocks, each a matrix of its own (one per head).
        split_dim: What is split: 0 the rows as they are stored, 1 the columns.
        transposed: Each block, split as it is stored, is the transpose of the map (inputs first, as in `x @ W`): its
            matrix is the block turned round. See [Note: stored the other way round].

    Returns:
        The view; its matrices cover every element exactly once.

    Raises:
        ValueError: The options do not fit the shape; the message says what was found and what to write.

    Examples:
        >>> [(m.rows, m.cols) for m in matrix_view((12, 4), split_sizes=(8, 2, 2)).matrices]
        [(8, 4), (2, 4), (2, 4)]
    """
    dims = tuple(int(size) for size in shape)
    if isinstance(split_sizes, (set, frozenset)):
        raise ValueError(f"split_sizes={split_sizes} has no order, and blocks lie one after the other. Write a tuple")
    sizes = None if split_sizes is None else tuple(int(size) for size in split_sizes)
    return _matrix_view(dims, view, sizes, split_groups, num_heads, split_dim, bool(transposed))


@lru_cache(maxsize=4096)  # layers are alike, and a stack of experts has hundreds of matrices
def _matrix_view(
    dims: Shape,
    view: ViewKind,
    split_sizes: tuple[int, ...] | None,
    split_groups: int,
    num_heads: int | None,
    split_dim: int,
    transposed: bool,
) -> MatrixView:
    """See `matrix_view`."""
    num_row_dims = row_dim(dims, view, split_dim) + 1
    num_stacked, height = (dims[0], dims[1]) if num_row_dims == 2 else (1, dims[0])
    cols = math.prod(dims[num_row_dims:])
    sizes, groups = blocks_of((height, cols), split_dim, split_sizes, split_groups, num_heads)
    period = sum(sizes)
    matrices = []
    for stacked in range(num_stacked):
        first = stacked * height
        for start, size in zip(itertools.accumulate(sizes, initial=0), sizes, strict=False):
            intervals = tuple((first + start + g * period, first + start + g * period + size) for g in range(groups))
            columns = None
            if split_dim:
                intervals = ((first, first + height),)
                if size * groups != cols:
                    columns = Runs(start, size, period, groups)
            num_rows, num_cols = (height, size * groups) if split_dim else (size * groups, cols)
            turned = (num_cols, num_rows) if transposed else (num_rows, num_cols)
            matrices.append(Matrix(*turned, intervals, columns, transposed))
    return MatrixView(dims, num_row_dims, tuple(matrices))
