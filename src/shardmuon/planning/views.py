"""Which rows of a logical tensor form a matrix. Integers only; the vocabulary is that of planning/layout.py."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Shape = tuple[int, ...]
Ranks = tuple[int, ...]  # global, ascending
ViewKind = Literal["auto", "stack", "flatten"]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A logical matrix of `rows` x `cols`: the row intervals `[start, stop)` of the row view, in this order."""

    rows: int
    cols: int
    intervals: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class MatrixView:
    """How a logical tensor reads as matrices. Its first `num_row_dims` dims form the rows of the row view."""

    shape: Shape
    num_row_dims: int
    matrices: tuple[Matrix, ...]

    @property
    def num_cols(self) -> int:
        return math.prod(self.shape[self.num_row_dims :])


def matrix_view(
    shape: Sequence[int],
    *,
    view: ViewKind = "auto",
    split_sizes: Sequence[int] | None = None,
    split_groups: int = 1,
    num_heads: int | None = None,
) -> MatrixView:
    """Say which matrices a tensor of this global shape holds.

    Args:
        shape: Global shape of the logical tensor.
        view: "auto" takes a 2-D tensor whole and flattens 4-D and 5-D convolution kernels to (out, in*k...).
            "stack" reads a 3-D (E, M, N) tensor as E matrices of M x N (experts). "flatten" reads any tensor of two
            or more dims as one (shape[0], rest) matrix. A 3-D tensor must say which: experts and a 1-D convolution's
            kernel look alike.
        split_sizes: Row counts of blocks that are matrices of their own (fused q, k, v; gate and up). In a stack the
            split is made inside each expert.
        split_groups: The rows are this many repeats of `split_sizes`; block j of all repeats together forms one
            matrix. Grouped-query attention stored as query groups of (q, k, v) rows is
            `split_sizes=(q_rows, k_rows, v_rows), split_groups=num_query_groups`.
        num_heads: Equal row blocks, each a matrix of its own (one per head).

    Returns:
        The view; its matrices cover every row exactly once.

    Raises:
        ValueError: The options do not fit the shape; the message says what was found and what to write.

    Examples:
        >>> [(m.rows, m.cols) for m in matrix_view((12, 4), split_sizes=(8, 2, 2)).matrices]
        [(8, 4), (2, 4), (2, 4)]
    """
    dims = tuple(int(size) for size in shape)
    if len(dims) < 2:
        raise ValueError(
            f"shape {dims} has {len(dims)} dim(s) and cannot be a matrix. Put it in a group with use_muon=False (AdamW)"
        )
    if 0 in dims:
        raise ValueError(f"shape {dims} has no elements, so there is nothing to orthogonalize. Use use_muon=False")
    if view not in ("auto", "stack", "flatten"):
        raise ValueError(f"view={view!r} is not one of 'auto', 'stack', 'flatten'")
    if view == "auto" and len(dims) == 3:
        raise ValueError(
            f"shape {dims} is 3-D: write view='stack' if it holds {dims[0]} matrices of {dims[1]}x{dims[2]} (experts), "
            f"or view='flatten' if it is one {dims[0]}x{dims[1] * dims[2]} matrix (a 1-D convolution's kernel)"
        )
    if view == "stack" and len(dims) != 3:
        raise ValueError(f"view='stack' needs a 3-D (E, M, N) tensor, found shape {dims}")
    num_row_dims = 2 if view == "stack" else 1
    num_stacked, height = (dims[0], dims[1]) if num_row_dims == 2 else (1, dims[0])
    sizes, groups = _row_blocks(height, split_sizes, split_groups, num_heads)
    cols = math.prod(dims[num_row_dims:])
    starts = list(itertools.accumulate(sizes, initial=0))
    matrices = []
    for stacked in range(num_stacked):
        for start, size in zip(starts, sizes, strict=False):
            first = stacked * height + start
            intervals = tuple((first + g * starts[-1], first + g * starts[-1] + size) for g in range(groups))
            matrices.append(Matrix(size * groups, cols, intervals))
    return MatrixView(dims, num_row_dims, tuple(matrices))


def _row_blocks(
    height: int, split_sizes: Sequence[int] | None, split_groups: int, num_heads: int | None
) -> tuple[tuple[int, ...], int]:
    """Row counts of the blocks of one repeat, and the number of repeats."""
    if num_heads is not None:
        if split_sizes is not None or split_groups != 1:
            raise ValueError("num_heads and split_sizes exclude each other: write one of them")
        if num_heads < 1 or height % num_heads:
            raise ValueError(f"num_heads={num_heads} does not divide the {height} rows")
        return (height // num_heads,) * num_heads, 1
    if split_groups < 1:
        raise ValueError(f"split_groups={split_groups} must be at least 1")
    if split_sizes is None:
        if split_groups != 1:
            raise ValueError(f"split_groups={split_groups} needs split_sizes, the row counts of one repeat")
        return (height,), 1
    sizes = tuple(int(size) for size in split_sizes)
    if not sizes or min(sizes) < 1:
        raise ValueError(f"split_sizes={sizes} must be positive row counts")
    if sum(sizes) * split_groups != height:
        times = f" times split_groups={split_groups}" if split_groups != 1 else ""
        raise ValueError(f"split_sizes={sizes} sum to {sum(sizes)}{times}, but there are {height} rows")
    return sizes, split_groups
