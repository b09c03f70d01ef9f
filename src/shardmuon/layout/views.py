"""Views, which describe the matrices in a tensor as boxes of the tensor's index space. Pure integer arithmetic.

[Note: the fine index space]
    A plain weight holds one matrix, a stack of experts holds many, a fused projection holds several blocks of rows or
    columns, and a convolution kernel is flattened to one matrix. Any of these can also be stored transposed. One
    representation covers all cases: at most one dim of the tensor is split into two dims, (index of the repeat, index
    within the repeat). In this fine index space, every matrix is a box, and each dim has one stride in the row-major
    matrix. So the part of a matrix that a rank stores also consists of boxes, each of which has strides in the storage
    and strides in the matrix that can be passed to `Tensor.as_strided`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Ints = tuple[int, ...]
_ViewKind = Literal["auto", "stack", "flatten"]


def row_major(sizes: Sequence[int]) -> Ints:
    """Compute the strides, in elements, of a contiguous tensor with the given sizes."""
    products = itertools.accumulate(reversed(sizes), lambda before, size: before * size, initial=1)
    return tuple(products)[-2::-1] if sizes else ()


class _Matrix(NamedTuple):
    """Part of a tensor that is orthogonalized as one matrix. The part is a box of the fine index space, that is, of the
    tensor's index space with at most one dim split in two.

    Attributes:
        rows, cols: Shape of the matrix.
        start, sizes: First index and sizes of the box.
        strides: Stride of each dim of the fine index space in the row-major matrix, in elements.
    """

    rows: int
    cols: int
    start: Ints
    sizes: Ints
    strides: Ints


@dataclass(frozen=True)
class MatrixView:
    """The matrices of a tensor, which together cover each element exactly once.

    Attributes:
        shape: Shape of the whole tensor.
        fine: Sizes of the dims after the split ([Note: the fine index space]).
        split_dim: Dim of `shape` that is split in two in `fine`; -1: no dim is split, and `fine` equals `shape`.
        matrices: The matrices of the tensor. A matrix is identified by its index in this tuple.
        num_row_dims: Number of leading dims of `shape` that index stored rows: 2 for a stack, else 1.
    """

    shape: Ints
    fine: Ints
    split_dim: int
    matrices: tuple[_Matrix, ...]
    num_row_dims: int

    @property
    def longest_row(self) -> int:
        """Number of columns of the widest matrix."""
        return max(matrix.cols for matrix in self.matrices)

    def refined(self, strides: Sequence[int]) -> Ints:
        """Convert the strides of a tensor to strides for the dims of `fine`, in which one dim of the tensor may be
        split in two."""
        if self.split_dim < 0:
            return tuple(strides)
        d, period = self.split_dim, self.fine[self.split_dim + 1]
        return (*strides[:d], period * strides[d], *strides[d:])

    def kept(self, sizes: Sequence[int]) -> MatrixView:
        """Make the view of a state tensor that holds `sizes[i]` values for matrix i. For a stack, the state tensor has
        one row per index of dim 0; for any other tensor, it has a single row. A row contains the values of its
        matrices, one matrix after the other."""
        num_stacked = self.shape[0] if self.num_row_dims == 2 else 1
        of_row = sizes[: len(sizes) // num_stacked]
        starts = list(itertools.accumulate(of_row, initial=0))
        shape = (num_stacked, starts[-1])
        matrices = [
            _Matrix(1, size, (row, start), (1, size), (size, 1))
            for row in range(num_stacked)
            for start, size in zip(starts, of_row, strict=False)
        ]
        return MatrixView(shape, shape, -1, tuple(matrices), 1)


def matrix_view(
    shape: Sequence[int],
    *,
    view: _ViewKind = "auto",
    split_sizes: Sequence[int] | int | None = None,
    split_groups: int = 1,
    transposed: bool = False,
) -> MatrixView:
    """Compute the matrices that a tensor of this global shape contains.

    Args:
        shape: Global shape of the tensor.
        view: "auto" reads a 2-D tensor as one matrix and flattens 4-D and 5-D convolution kernels to (out, in*k...).
            "stack" reads a 3-D (E, M, N) tensor as E matrices of M x N (experts). "flatten" reads any tensor of two or
            more dims as one (shape[0], rest) matrix. A 3-D tensor needs "stack" or "flatten", because its shape does
            not distinguish a stack of experts from the kernel of a 1-D convolution.
        split_sizes: Row counts of blocks that are separate matrices (fused q, k, v; gate and up). In a stack, each
            matrix is split in this way. An int is the number of equal blocks (for example one per head).
        split_groups: Number of repeats of `split_sizes` along the rows; the j-th blocks of all repeats together form
            one matrix. For grouped-query attention that is stored as query groups of (q, k, v) rows, set `split_groups`
            to the number of query groups and `split_sizes` to the numbers of q, k and v rows of a group.
        transposed: True if the tensor stores the transpose (inputs first, as in `x @ W`). Matrices are then transposed
            when read, and `split_sizes` and `split_groups` split stored columns instead of stored rows.

    Returns:
        The view, with matrices that cover every element exactly once.

    Raises:
        ValueError: The options do not fit the shape.

    Examples:
        >>> [(m.rows, m.cols) for m in matrix_view((12, 4), split_sizes=(8, 2, 2)).matrices]
        [(8, 4), (2, 4), (2, 4)]
    """
    if isinstance(split_sizes, (bool, set, frozenset)):
        raise ValueError(
            f"split_sizes={split_sizes} is no number of blocks and has no order. Write how many blocks there are, or a "
            "tuple of the rows of each"
        )
    dims = tuple(int(size) for size in shape)
    # `split_dim` is 1 if `split_sizes` splits the columns of the stored tensor, and 0 if it splits the rows
    split_dim = 1 if transposed and split_sizes is not None else 0
    of_rows = _row_dim(dims, view, split_dim)
    height, cols = dims[of_rows], math.prod(dims[of_rows + 1 :])
    blocks, groups = _blocks_of((height, cols), split_dim, split_sizes, split_groups)
    # If each repeat of `split_sizes` is one block, the blocks of all repeats are adjacent and form one large block.
    if len(blocks) == 1:
        blocks, groups = (blocks[0] * groups,), 1
    d = of_rows + split_dim
    matrices = []
    for expert in range(dims[0] if of_rows else 1):
        for first, size in zip(itertools.accumulate(blocks, initial=0), blocks, strict=False):
            matrices.append(_block(dims, of_rows, split_dim, (expert, first, size), groups, bool(transposed)))
    fine = dims if groups == 1 else (*dims[:d], groups, sum(blocks), *dims[d + 1 :])
    return MatrixView(dims, fine, d if groups > 1 else -1, tuple(matrices), of_rows + 1)


def _row_dim(dims: Ints, view: _ViewKind, split_dim: int) -> int:
    """Check that the options of `matrix_view` fit the shape. Return the dim that indexes stored rows: 1 for a stack,
    where dim 0 indexes matrices, otherwise 0."""
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
) -> _Matrix:
    """Make the `_Matrix` for one block of a tensor's rows or columns. `block`: (index of the matrix in a stack, first
    index of the block within a repeat of `split_sizes`, size of the block)."""
    expert, first, size = block
    sides = [dims[of_rows], math.prod(dims[of_rows + 1 :])]  # numbers of rows and columns of the stored block
    sides[split_dim] = size * groups
    # Distances in the row-major matrix, in elements, between neighboring rows and between neighboring columns of the
    # stored tensor.
    steps = (1, sides[0]) if transposed else (sides[1], 1)
    # Position of the block, as a tuple (first index, size, stride in the matrix) for each dim of the fine index space
    # ([Note: the fine index space]).
    ranges = [(0, dims[of_rows], steps[0])]
    inner = row_major(dims[of_rows + 1 :])
    ranges += [(0, n, stride * steps[1]) for n, stride in zip(dims[of_rows + 1 :], inner, strict=True)]
    ranges[split_dim] = (first, size, steps[split_dim])
    if groups > 1:
        ranges.insert(split_dim, (0, groups, size * steps[split_dim]))
    if of_rows:
        ranges.insert(0, (expert, 1, 0))
    start, sizes, strides = (tuple(column) for column in zip(*ranges, strict=True))
    rows, cols = reversed(sides) if transposed else sides
    return _Matrix(rows, cols, start, sizes, strides)


def _blocks_of(
    size_of: tuple[int, int],  # numbers of rows and columns of the stored tensor (of one matrix, if it is a stack)
    split_dim: int,
    given: Sequence[int] | int | None,
    split_groups: int,
) -> tuple[Ints, int]:
    """Check that `split_sizes` and `split_groups` fit the shape. Return the sizes of the blocks in one repeat of
    `split_sizes`, and the number of repeats."""
    height, what = size_of[split_dim], ("row", "column")[split_dim]
    if split_groups < 1:
        raise ValueError(f"split_groups={split_groups} must be at least 1")
    if given is None or isinstance(given, int):
        num = 1 if given is None else given
        if split_groups != 1:
            raise ValueError(
                f"split_groups={split_groups} needs split_sizes, the {what} counts of one repeat, found "
                f"split_sizes={given}"
            )
        if num < 1 or height % num:
            raise ValueError(f"split_sizes={num} does not divide the {height} {what}s")
        return (height // num,) * num, 1
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
