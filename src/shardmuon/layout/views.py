"""Matrix views, which describe each matrix in a tensor as a box of indices. All functions are pure integer arithmetic.

[Note: the fine index space]
    A plain weight contains one matrix, and a stack of experts contains many. A fused projection contains several blocks
    of rows or columns. A convolution kernel is flattened to one matrix. Any of these tensors can also be stored
    transposed.

    One representation covers all cases. If the blocks of a fused projection repeat along a dim, this dim of size a * b
    is replaced with two dims of sizes a and b, as by `Tensor.unflatten`. The first of them is the index of the repeat,
    and the second is the index within the repeat. The other dims stay unchanged. The indices of the resulting dims are
    called the fine index space. In this space, every matrix is a box, and each dim has one stride in the row-major
    matrix.

    So the part of a matrix that a rank stores also consists of boxes. Each of them has strides in the storage and
    strides in the matrix, both of which can be passed to `Tensor.as_strided`.
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
    """Part of a tensor that is orthogonalized as one matrix. This part is a box of tensor indices. (A dim along which
    the blocks of a fused projection repeat is first unflattened into two dims, see [Note: the fine index space].)

    Attributes:
        rows, cols: Shape of the matrix.
        start, sizes: First index and sizes of the box.
        strides: Stride of each dim of the box in the row-major matrix, in elements.
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
        fine: Shape of the tensor after dim `split_dim`, of size a * b, has been replaced with two dims of sizes a and
            b, as by `Tensor.unflatten` ([Note: the fine index space]).
        split_dim: Dim of `shape` that is replaced with two dims in `fine`; -1 if `fine` equals `shape`.
        matrices: The matrices of the tensor. A matrix is identified by its index in this tuple.
        num_row_dims: Number of leading dims of `shape` that index rows of the stored tensor: 2 for a stack of matrices,
            else 1.
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
        """Convert the strides of a tensor to the strides of its view with shape `fine`, in which dim `split_dim` may be
        split into two dims."""
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
        view: How the tensor is divided into matrices. "auto": a 2-D tensor is one matrix, and a 4-D or 5-D convolution
            kernel is flattened to (out, in*k...). "stack": a 3-D tensor (E, M, N) contains E matrices of M x N
            (experts). "flatten": a tensor with two or more dims is flattened to one matrix (shape[0], rest). A 3-D
            tensor needs "stack" or "flatten", because its shape does not show whether it is a stack of experts or the
            kernel of a 1-D convolution.
        split_sizes: Row counts of blocks that are separate matrices, such as fused q, k, v or gate and up. In a stack,
            each matrix is split in this way. An int is the number of equal blocks, for example one per head.
        split_groups: Number of times that the blocks of `split_sizes` repeat along the rows. The j-th blocks of all
            repeats together form one matrix. Example: grouped-query attention stores q, k and v rows for each query
            group. Then `split_groups` is the number of query groups, and `split_sizes` contains the numbers of q, k and
            v rows of one group.
        transposed: True if the tensor stores the transposed matrix, with inputs first, as in `x @ W`. Matrices are then
            transposed when they are read, and `split_sizes` and `split_groups` refer to stored columns instead of rows.

    Returns:
        The view. Its matrices together cover every element exactly once.

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
    # The repeats of a single block are adjacent, so they form one large block.
    if len(blocks) == 1:
        blocks, groups = (blocks[0] * groups,), 1
    d = of_rows + split_dim
    fine = dims if groups == 1 else (*dims[:d], groups, sum(blocks), *dims[d + 1 :])
    # Intervals (first index, size) into which the matrices divide each dim of `fine`. Each combination of one interval
    # per dim is the box of one matrix.
    cuts = [[(0, size)] for size in fine]
    if of_rows:
        cuts[0] = [(expert, 1) for expert in range(dims[0])]
    cuts[d + (groups > 1)] = list(zip(itertools.accumulate(blocks, initial=0), blocks, strict=False))
    num_row_dims = of_rows + 1 + (groups > 1 and split_dim == 0)
    boxes = (zip(*box, strict=True) for box in itertools.product(*cuts))
    matrices = tuple(_matrix(start, sizes, num_row_dims, transposed) for start, sizes in boxes)
    return MatrixView(dims, fine, d if groups > 1 else -1, matrices, of_rows + 1)


def _row_dim(dims: Ints, view: _ViewKind, split_dim: int) -> int:
    """Check that the options of `matrix_view` fit the shape. Return the dim that indexes stored rows: 1 for a stack of
    matrices, whose dim 0 indexes the matrices, otherwise 0."""
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


def _matrix(start: Ints, sizes: Ints, num_row_dims: int, transposed: bool) -> _Matrix:
    """Make the `_Matrix` that consists of one box of tensor indices. The first `num_row_dims` dims of the box
    index rows of the stored tensor, and the other dims index columns. If `transposed` is True, the columns of the
    stored tensor are the rows of the matrix."""
    rows, cols = sizes[:num_row_dims], sizes[num_row_dims:]
    if not transposed:
        return _Matrix(math.prod(rows), math.prod(cols), start, sizes, row_major(sizes))
    strides = row_major((*cols, *rows))
    return _Matrix(math.prod(cols), math.prod(rows), start, sizes, (*strides[len(cols) :], *strides[: len(cols)]))


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
