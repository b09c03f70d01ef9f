"""Views: the matrices that a tensor holds, as boxes of its index space. Integers only.

[Note: the fine index space]
    A weight is read as one matrix, a stack of experts as many, a fused projection as blocks of rows or columns, a
    convolution's kernel as one flattened matrix, and any of them turned round where the module stores the transpose.
    One form covers all: take the tensor's dims, refine at most one of them into (repeat, place in the repeat), and
    every matrix is a box of that space. Each dim of the space has one stride in the matrix, as row-major memory would
    have it. So the part of a matrix that a rank stores is a box as well, with strides in storage and in the matrix:
    what `Tensor.as_strided` takes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Ints = tuple[int, ...]
_ViewKind = Literal["auto", "stack", "flatten"]


def row_major(sizes: Sequence[int]) -> Ints:
    """Strides, in elements, of contiguous memory of these sizes."""
    products = itertools.accumulate(reversed(sizes), lambda before, size: before * size, initial=1)
    return tuple(products)[-2::-1] if sizes else ()


class Matrix(NamedTuple):
    """A box of the fine index space, orthogonalized as one rows x cols matrix.

    Attributes:
        rows, cols: Its shape.
        start, sizes: The box.
        strides: Stride of each fine dim in the row-major matrix, in elements.
    """

    rows: int
    cols: int
    start: Ints
    sizes: Ints
    strides: Ints


@dataclass(frozen=True)
class MatrixView:
    """The matrices of a tensor. They cover each of its elements once.

    Attributes:
        shape: Shape of the whole tensor.
        fine: The sizes of the fine index space.
        split_dim: The dim of `shape` that is refined in two; -1: none, and `fine` is `shape`.
        matrices: The matrices in the order of their numbers.
        num_row_dims: The first dims of `shape`, those that count rows as they are stored: of a stack two, else one.
    """

    shape: Ints
    fine: Ints
    split_dim: int
    matrices: tuple[Matrix, ...]
    num_row_dims: int

    @property
    def longest_row(self) -> int:
        """Columns of the matrix that has most."""
        return max(matrix.cols for matrix in self.matrices)

    @property
    def num_stacked(self) -> int:
        """Number of matrices, or of blocks that are split alike, along the first dim of a stack; 1 for other
        tensors."""
        return self.shape[0] if self.num_row_dims == 2 else 1

    def refined(self, strides: Sequence[int]) -> Ints:
        """Strides of the fine dims, given those of the tensor's dims."""
        if self.split_dim < 0:
            return tuple(strides)
        d, period = self.split_dim, self.fine[self.split_dim + 1]
        return (*strides[:d], period * strides[d], *strides[d:])


def matrix_view(
    shape: Sequence[int],
    *,
    view: _ViewKind = "auto",
    split_sizes: Sequence[int] | int | None = None,
    split_groups: int = 1,
    transposed: bool = False,
) -> MatrixView:
    """Say which matrices a tensor of this global shape holds.

    Args:
        shape: Global shape of the tensor.
        view: "auto" takes a 2-D tensor whole and flattens 4-D and 5-D convolution kernels to (out, in*k...).
            "stack" reads a 3-D (E, M, N) tensor as E matrices of M x N (experts). "flatten" reads any tensor of two
            or more dims as one (shape[0], rest) matrix. A 3-D tensor must say which: experts and a 1-D convolution's
            kernel look alike.
        split_sizes: Row counts of blocks that are matrices of their own (fused q, k, v; gate and up). In a stack the
            split is made inside each expert. A whole number: so many equal blocks (one per head).
        split_groups: The rows are this many repeats of `split_sizes`; block j of all repeats together forms one
            matrix. Grouped-query attention stored as query groups of (q, k, v) rows is
            `split_sizes=(q_rows, k_rows, v_rows), split_groups=num_query_groups`.
        transposed: The transpose of the map is stored (inputs first, as in `x @ W`): matrices are read turned round,
            and the rows that the options above split are columns as they are stored.

    Returns:
        The view; its matrices cover every element exactly once.

    Raises:
        ValueError: The options do not fit the shape; the message says what was found and what to write.

    Examples:
        >>> [(m.rows, m.cols) for m in matrix_view((12, 4), split_sizes=(8, 2, 2)).matrices]
        [(8, 4), (2, 4), (2, 4)]
    """
    if isinstance(split_sizes, (set, frozenset)):
        raise ValueError(f"split_sizes={split_sizes} has no order, and blocks lie one after the other. Write a tuple")
    if isinstance(split_sizes, bool):
        raise ValueError(f"split_sizes={split_sizes} is no number of blocks. Write how many, or the rows of each")
    dims = tuple(int(size) for size in shape)
    split_dim = 1 if transposed and split_sizes is not None else 0  # of a matrix as it is stored
    of_rows = _row_dim(dims, view, split_dim)
    height, cols = dims[of_rows], math.prod(dims[of_rows + 1 :])
    blocks, groups = _blocks_of((height, cols), split_dim, split_sizes, split_groups)
    if len(blocks) == 1:  # repeats of one block are that side as it is
        blocks, groups = (blocks[0] * groups,), 1
    refined_dim = of_rows + split_dim if groups > 1 else -1
    matrices = []
    for expert in range(dims[0] if of_rows else 1):
        for first, size in zip(itertools.accumulate(blocks, initial=0), blocks, strict=False):
            matrices.append(_block(dims, of_rows, split_dim, (expert, first, size), groups, bool(transposed)))
    fine = dims
    if refined_dim >= 0:
        fine = (*dims[:refined_dim], groups, sum(blocks), *dims[refined_dim + 1 :])
    return MatrixView(dims, fine, refined_dim, tuple(matrices), of_rows + 1)


def view_of(shape: Ints, options: Mapping[str, Any] | None) -> MatrixView:
    """The view by these arguments of `matrix_view`. None: the tensor holds no matrices."""
    return MatrixView(shape, shape, -1, (), 1) if options is None else matrix_view(shape, **options)


def kept_view(view: MatrixView, sizes: Sequence[int]) -> MatrixView:
    """The tensor that holds `sizes[i]` numbers of matrix i of a view: a row for each of a stack, in which those of its
    blocks follow each other."""
    of_row = sizes[: len(sizes) // view.num_stacked]
    starts = list(itertools.accumulate(of_row, initial=0))
    shape = (view.num_stacked, starts[-1])
    matrices = [
        Matrix(1, size, (row, start), (1, size), (size, 1))
        for row in range(view.num_stacked)
        for start, size in zip(starts, of_row, strict=False)
    ]
    return MatrixView(shape, shape, -1, tuple(matrices), 1)


def _row_dim(dims: Ints, view: _ViewKind, split_dim: int) -> int:
    """The dim that holds the rows of a matrix; the one before it, if there is one, counts the matrices of a stack."""
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
    of_rows = 1 if view == "stack" else 0
    if split_dim and len(dims) != of_rows + 2:
        raise ValueError(
            f"a transposed tensor can be split where its columns are one dim, found shape {dims} read as {view!r}. "
            "Leave the splits or transposed=True out"
        )
    return of_rows


def _block(
    dims: Ints, of_rows: int, split_dim: int, block: tuple[int, int, int], groups: int, transposed: bool
) -> Matrix:
    """The matrix of one block: (expert, first index in the period of the split side, its size)."""
    expert, first, size = block
    sides = [dims[of_rows], math.prod(dims[of_rows + 1 :])]  # rows and columns as they are stored
    sides[split_dim] = size * groups
    steps = (1, sides[0]) if transposed else (sides[1], 1)  # of a stored row and of a stored column
    ranges = [(0, dims[of_rows], steps[0])]  # (first, size, stride) of each fine dim
    inner = row_major(dims[of_rows + 1 :])
    ranges += [(0, n, stride * steps[1]) for n, stride in zip(dims[of_rows + 1 :], inner, strict=True)]
    ranges[split_dim] = (first, size, steps[split_dim])
    if groups > 1:
        ranges.insert(split_dim, (0, groups, size * steps[split_dim]))
    if of_rows:
        ranges.insert(0, (expert, 1, 0))
    start, sizes, strides = (tuple(column) for column in zip(*ranges, strict=True))
    rows, cols = reversed(sides) if transposed else sides
    return Matrix(rows, cols, start, sizes, strides)


def _blocks_of(
    size_of: tuple[int, int],  # rows and columns, as they are stored
    split_dim: int,
    given: Sequence[int] | int | None,
    split_groups: int,
) -> tuple[Ints, int]:
    """Sizes of the blocks of one repeat, and the number of repeats."""
    height, what = size_of[split_dim], ("row", "column")[split_dim]
    if split_groups < 1:
        raise ValueError(f"split_groups={split_groups} must be at least 1")
    if isinstance(given, int):
        if split_groups != 1:
            raise ValueError(f"split_sizes={given} means equal blocks, which split_groups={split_groups} cannot repeat")
        if given < 1 or height % given:
            raise ValueError(f"split_sizes={given} does not divide the {height} {what}s")
        return (height // given,) * given, 1
    if given is None:
        if split_groups != 1:
            raise ValueError(f"split_groups={split_groups} needs split_sizes, the {what} counts of one repeat")
        return (height,), 1
    split_sizes = tuple(int(size) for size in given)
    if not split_sizes or min(split_sizes) < 1:
        raise ValueError(f"split_sizes={split_sizes} must be positive {what} counts")
    if sum(split_sizes) * split_groups != height:
        times = f" times split_groups={split_groups}" if split_groups != 1 else ""
        fits = sum(split_sizes) * split_groups == size_of[1 - split_dim]
        first = ("inputs", "outputs")[split_dim]
        other = f". If its {first} come first, write transposed={split_dim == 0}" if fits else ""
        raise ValueError(
            f"split_sizes={split_sizes} sum to {sum(split_sizes)}{times}, but there are {height} {what}s{other}"
        )
    return split_sizes, split_groups
