"""Norms of orthogonalized matrices, and where numbers of each matrix or of each of its lines lie.

[Note: matrices together]
    A launch on an accelerator costs more than its arithmetic, so what can be done for all matrices of a bucket that
    have the same stages is done for all at once. Numbers of lines lie behind each other, those of each matrix from an
    address of 64 bytes on: kernels sum in another order where memory is not aligned. Beside those sums numbers are only
    multiplied, divided, compared and interpolated, which rounds alike anywhere in a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardmuon._torch import foreach_mul_, foreach_norm

_ALIGNED = 16  # elements of fp32
Shapes = tuple[tuple[int, int, int], ...]  # (B, rows, cols) of each batch


class NumberLayout:
    """Places of numbers of N matrices in one tensor: one of each matrix (N,), or one of each line (L,), L > N.

    Lines run along the shorter dim: rows where rows >= cols, else columns.

    Attributes:
        shapes: (B, rows, cols) of each batch.
        sides: min(rows, cols) of each batch.
        size: L. What lies between two matrices means nothing.
    """

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes
        self.sides = [min(rows, cols) for _, rows, cols in shapes]
        self._lines = [max(rows, cols) for _, rows, cols in shapes]
        self._counts = [count for count, _, _ in shapes]
        self._sizes = [count * -(-max(shape) // _ALIGNED) * _ALIGNED for count, *shape in shapes]
        self.size = sum(self._sizes)

    def _of_batches(self, numbers: Tensor) -> Sequence[Tensor]:  # (N,) or (L,) -> 1-D each, dense
        sizes = self._sizes if len(numbers) == self.size else self._counts
        found: Sequence[Tensor] = numbers.split(sizes)
        return found

    def batches(self, numbers: Tensor) -> list[Tensor]:  # (N,) -> (B, 1) each; (L,) -> (B, lines of one) each; views
        """Split numbers by batch."""
        parts = zip(self._of_batches(numbers), self._counts, self._lines, strict=True)
        return [part.view(count, -1)[:, :lines] for part, count, lines in parts]

    def matrices(self, lines: Tensor) -> list[Tensor]:  # (L,) -> (lines of one,) each, views
        """Split numbers of lines by matrix."""
        return [row for batch in self.batches(lines) for row in batch.unbind(0)]

    def times_(self, numbers: Tensor, factors: Sequence[float]) -> Tensor:  # (N,) or (L,); of each batch
        """Multiply the numbers of each batch with one factor, in place."""
        foreach_mul_(self._of_batches(numbers), factors)
        return numbers

    def sums(self, *several: Tensor) -> Sequence[Tensor]:  # (L,) each, not negative -> (N,) each
        """Sum numbers of lines over each matrix."""
        found = foreach_norm([part for lines in several for part in self.matrices(lines)], 1, several[0].dtype)
        sums: Sequence[Tensor] = torch.stack(found).split(len(found) // len(several))
        return sums

    def combined(self, operation: Callable[..., Tensor], numbers: Tensor, others: Tensor) -> Tensor:
        """An operation on numbers and others, (N,) or (L,): a matrix's own number stands for each of its lines."""
        if len(numbers) == len(others):
            return operation(numbers, others)
        out = torch.empty_like(max(numbers, others, key=len))
        for one, other, target in zip(*map(self.batches, (numbers, others, out)), strict=True):
            operation(one, other, out=target)
        return out

    def shaped(self, factor: Tensor) -> list[Tensor]:  # (N,) or (L,) -> (B, m or 1, n or 1) each
        """Split a factor by batch, in a shape that broadcasts with the batch's matrices."""
        parts = zip(self.batches(factor), self.shapes, strict=True)
        return [part.unsqueeze(-1 if rows >= cols else -2) for part, (_, rows, cols) in parts]


class Norms:
    """Norms of matrices for stages: all in at least fp32, and found from one read of each matrix.

    Attributes:
        cut: Places of the numbers.
        means: (L,) the mean square of each line's elements; None: no stage asks for lines.
    """

    def __init__(self, cut: NumberLayout, whole: Tensor | None, means: Tensor | None) -> None:
        self.cut, self._whole, self.means = cut, whole, means

    @property
    def whole(self) -> Tensor:  # (N,)
        """The Frobenius norm of each matrix."""
        if self._whole is None:
            assert self.means is not None, "one of the two is known"
            self._whole = self.cut.times_(self.cut.sums(self.means)[0], self.cut.sides).sqrt_()
        return self._whole

    def scaled(self, factor: Tensor) -> Norms:  # (N,) or (L,)
        """Norms of the matrices after they are multiplied by this factor."""
        of_lines = len(factor) == self.cut.size
        whole = None if of_lines or self._whole is None else self._whole * factor
        means = None if self.means is None else self.cut.combined(torch.mul, factor.square(), self.means)
        return Norms(self.cut, whole, means)


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
    return Norms(cut, None, cut.times_(means.square_(), [1 / side for side in cut.sides]))


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
