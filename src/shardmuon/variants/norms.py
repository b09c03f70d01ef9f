"""Norms of orthogonalized matrices, and where numbers of each matrix or of each of its lines lie.

[Note: matrices together]
    A launch on an accelerator costs more than its arithmetic, so what can be done for all matrices of a bucket that
    have the same stages is done for all at once. Numbers of lines lie behind each other, those of each matrix from an
    address of 64 bytes on: kernels sum in another order where memory is not aligned. Beside those sums numbers are only
    multiplied, divided, compared and interpolated, which rounds alike anywhere in a vector.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardmuon._torch import foreach_mul_, foreach_norm

_ALIGNED = 16  # elements of fp32
Shapes = tuple[tuple[int, int, int], ...]  # (B, rows, cols) of each batch


class NumberLayout:
    """Places of numbers of N matrices in one tensor: one of each matrix (N,), or one of each line (L,).

    Lines run along the shorter dim: rows where rows >= cols, else columns.

    Attributes:
        shapes: (B, rows, cols) of each batch.
        sides: min(rows, cols) of each batch.
        size: L. What lies between two matrices means nothing.
    """

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes
        self.sides = [min(rows, cols) for _, rows, cols in shapes]
        self._counts = [count for count, _, _ in shapes]
        lines = [max(rows, cols) for _, rows, cols in shapes]
        steps = [-(-n // _ALIGNED) * _ALIGNED for n in lines]
        self._sizes = [count * step for count, step in zip(self._counts, steps, strict=True)]
        self.size = sum(self._sizes)
        starts = itertools.accumulate(self._sizes, initial=0)
        self._cuts = [
            ((count, n), (step, 1), start)
            for count, n, step, start in zip(self._counts, lines, steps, starts, strict=False)
        ]
        # of each matrix its lines, and the gap behind
        self._pieces = [
            size for count, n, step in zip(self._counts, lines, steps, strict=True) for size in (n, step - n) * count
        ]

    def batches(self, lines: Tensor) -> list[Tensor]:  # (L,), memory of its own -> (B, lines of one) each, views
        """Split numbers of lines by batch."""
        return [lines.as_strided(*cut) for cut in self._cuts]

    def matrices(self, lines: Tensor) -> Sequence[Tensor]:  # (L,) -> (lines of one,) each, views
        """Split numbers of lines by matrix."""
        found: Sequence[Tensor] = lines.split(self._pieces)[::2]
        return found

    def times_(self, numbers: Tensor, factors: Sequence[float]) -> Tensor:  # (N,); of each batch
        """Multiply the numbers of each batch's matrices with one factor, in place."""
        return _times_(numbers, self._counts, factors)

    def lines_times_(self, lines: Tensor, factors: Sequence[float]) -> Tensor:  # (L,); of each batch
        """Multiply the numbers of each batch's lines with one factor, in place."""
        return _times_(lines, self._sizes, factors)

    def sums(self, *several: Tensor) -> Sequence[Tensor]:  # (L,) each, not negative -> (N,) each
        """Sum numbers of lines over each matrix."""
        found = foreach_norm([part for lines in several for part in self.matrices(lines)], 1, several[0].dtype)
        sums: Sequence[Tensor] = torch.stack(found).split(len(found) // len(several))
        return sums

    def over(self, numbers: Tensor, lines: Tensor) -> Tensor:  # (N,), (L,) -> (L,)
        """Divide the number of a matrix by that of each of its lines."""
        return self._beside(torch.div, numbers, lines)

    def times(self, numbers: Tensor, lines: Tensor) -> Tensor:  # (N,), (L,) -> (L,)
        """Multiply the number of a matrix with that of each of its lines."""
        return self._beside(torch.mul, numbers, lines)

    def _beside(self, operation: Callable[..., Tensor], numbers: Tensor, lines: Tensor) -> Tensor:
        out = torch.empty_like(lines)
        of_batches = zip(numbers.split(self._counts), self.batches(lines), self.batches(out), strict=True)
        for of_matrix, of_lines, target in of_batches:
            operation(of_matrix.unsqueeze(-1), of_lines, out=target)
        return out

    def shaped(self, factor: Tensor, of_lines: bool) -> list[Tensor]:  # (N,) or (L,) -> (B, m or 1, n or 1) each
        """Split a factor by batch, in a shape that broadcasts with the batch's matrices."""
        if not of_lines:
            return [part.view(-1, 1, 1) for part in factor.split(self._counts)]
        parts = zip(self.batches(factor), self.shapes, strict=True)
        return [part.unsqueeze(-1 if rows >= cols else -2) for part, (_, rows, cols) in parts]


def _times_(numbers: Tensor, sizes: Sequence[int], factors: Sequence[float]) -> Tensor:
    if len(sizes) == 1:  # the same product
        return numbers.mul_(factors[0])
    foreach_mul_(numbers.split(sizes), factors)
    return numbers


class Norms:
    """Norms of matrices for stages: all in at least fp32, and found from one read of each matrix.

    Attributes:
        cut: Places of the numbers.
        means: (L,) the mean square of each line's elements; only if a stage asks for lines.
    """

    def __init__(self, cut: NumberLayout, whole: Tensor | None, means: Tensor | None) -> None:
        self.cut, self._whole, self._means = cut, whole, means

    @property
    def whole(self) -> Tensor:  # (N,)
        """The Frobenius norm of each matrix."""
        if self._whole is None:
            self._whole = self.cut.times_(self.cut.sums(self.means)[0], self.cut.sides).sqrt_()
        return self._whole

    @property
    def means(self) -> Tensor:
        assert self._means is not None, "a stage that needs them says `of_lines`"
        return self._means

    def scaled(self, factor: Tensor, of_lines: bool) -> Norms:  # (N,) or (L,)
        """Norms of the matrices after they are multiplied by this factor."""
        if of_lines:
            return Norms(self.cut, None, self.means * factor.square())
        whole = None if self._whole is None else self._whole * factor
        return Norms(self.cut, whole, None if self._means is None else self.cut.times(factor.square(), self._means))


def measured(
    xs: Sequence[Tensor],  # (B, rows, cols) each, not written to
    cut: NumberLayout,
    lines: bool,  # whether a stage asks for lines
) -> Norms:
    """Norms in one read of each matrix. Each is summed by itself, so that its bits hang on no other."""
    wide = torch.promote_types(xs[0].dtype, torch.float32)
    if not lines:
        matrices = [_aligned(matrix) for x in xs for matrix in x.unbind(0)]
        return Norms(cut, torch.stack(foreach_norm(matrices, 2, wide)), None)
    means = torch.empty(cut.size, dtype=wide, device=xs[0].device)
    for x, target in zip(xs, cut.batches(means), strict=True):
        for matrix, of_matrix in zip(x.split(1), target.split(1), strict=True):
            line_norms(_aligned(matrix), -1 if x.shape[-2] >= x.shape[-1] else -2, of_matrix)
    return Norms(cut, None, cut.lines_times_(means.square_(), [1 / side for side in cut.sides]))


def _aligned(x: Tensor) -> Tensor:
    """The tensor itself, or an aligned copy: kernels sum in another order where memory is not aligned, as matrices of a
    batch may be."""
    return x if x.data_ptr() % 64 == 0 else x.clone()


def line_norms(
    x: Tensor,  # (B, m, n), not written to
    dim: int,  # -1: of each row; -2: of each column
    out: Tensor | None = None,
) -> Tensor:  # (B, m) or (B, n), at least fp32
    """Euclidean norms, accumulated in at least fp32.

    Along a dim that is not the last one in memory `vector_norm` takes CPUs five to ten times as long as a sum, so there
    it is a sum of squares.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    last_in_memory = -1 if x.is_contiguous() else -2
    if dim == last_in_memory or x.device.type != "cpu":
        norms: Tensor = torch.linalg.vector_norm(x, dim=dim, dtype=wide, out=out)
        return norms
    return torch.sum(x.to(wide).square(), dim, out=out).sqrt_()
