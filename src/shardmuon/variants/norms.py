"""Norms of the orthogonalized matrices of a batch and of their lines, computed from one read of each matrix.

Lines are the rows of a matrix with rows >= cols, else its columns. A tensor of such norms has one number per matrix,
(B, 1), or one per line, (B, P). P is the number of lines, padded so that the numbers of each matrix start at a multiple
of 64 bytes: kernels sum in another order where memory is not aligned. The padding is uninitialized. All other
operations on these numbers are elementwise and round in the same way at any position in a vector.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardmuon._torch import foreach_copy_, foreach_norm

_ALIGNED = 16  # fp32 elements in 64 bytes


def aligned_rows(count: int, size: int, like: Tensor) -> Tensor:  # (count, size or more)
    """Allocate rows of uninitialized numbers in at least fp32. Each row starts at a multiple of 64 bytes."""
    wide = torch.promote_types(like.dtype, torch.float32)
    return torch.empty(count, -(-size // _ALIGNED) * _ALIGNED, dtype=wide, device=like.device)


class Norms:
    """Norms of the matrices of a batch, in at least fp32.

    Args:
        x: (B, rows, cols), not written to. Each matrix is summed separately, so that its bits do not depend on the rest
            of the batch.
        of_lines: True to compute `means` as well.

    Attributes:
        means: (B, P), the mean square of the elements of each line; None without `of_lines`.
        shape: (B, rows, cols).
        num_lines: Number of lines per matrix.
    """

    def __init__(self, x: Tensor, of_lines: bool) -> None:
        count, rows, cols = self.shape = x.shape
        self.num_lines, self._side = max(rows, cols), min(rows, cols)
        self._whole: Tensor | None = None
        self.means: Tensor | None = None
        if not of_lines:
            wide = torch.promote_types(x.dtype, torch.float32)
            self._whole = torch.stack(foreach_norm(list(map(_aligned, x.unbind(0))), 2, wide)).unsqueeze(1)
            return
        means = aligned_rows(count, self.num_lines, x)
        for matrix, target in zip(x.split(1), means.narrow(1, 0, self.num_lines).split(1), strict=True):
            line_norms(_aligned(matrix), -1 if rows >= cols else -2, target)
        self.means = means.square_().mul_(1 / self._side)

    @property
    def whole(self) -> Tensor:  # (B, 1)
        """The Frobenius norm of each matrix (not squared)."""
        if self._whole is None:
            assert self.means is not None, "one of the two is known"
            self._whole = self.sums(self.means)[0].mul_(self._side).sqrt_()
        return self._whole

    def sums(self, *several: Tensor) -> Sequence[Tensor]:  # (B, P) each, not negative -> (B, 1) each
        """Sum over the lines of each matrix, separately for each of several tensors that have one number per line."""
        lines = [row for one in several for row in one.narrow(1, 0, self.num_lines).unbind(0)]
        found: Sequence[Tensor] = torch.stack(foreach_norm(lines, 1, several[0].dtype)).unsqueeze(1).chunk(len(several))
        return found

    def scale_(self, factor: Tensor) -> None:  # (B, 1) or (B, P)
        """Multiply these norms by the factor by which the matrices, or their lines, are multiplied."""
        if self.means is not None:
            self.means = factor.square() * self.means
        of_lines = factor.shape[1] > 1
        self._whole = None if of_lines or self._whole is None else self._whole * factor

    def gathered(self, rows: Sequence[Tensor], of_lines: bool) -> Tensor:
        """Stack the state tensors of all matrices into one tensor: (B, num_kept), or (B, P) if `of_lines`."""
        if not of_lines:
            return torch.stack(list(rows))
        found = aligned_rows(len(rows), self.num_lines, rows[0])
        foreach_copy_(found.narrow(1, 0, self.num_lines).unbind(0), rows)
        return found


def _aligned(x: Tensor) -> Tensor:
    """Return the tensor itself if its memory starts at a multiple of 64 bytes, else a copy whose memory does."""
    return x if x.data_ptr() % 64 == 0 else x.clone()


def line_norms(
    x: Tensor,  # (B, m, n), not written to
    dim: int,  # -1: norms of rows; -2: norms of columns
    out: Tensor | None = None,
) -> Tensor:  # (B, m) or (B, n), at least fp32
    """Euclidean norms of rows or columns, accumulated in at least fp32.

    On CPUs, `vector_norm` along a dim that is not the last one in memory takes five to ten times as long as a sum. In
    this case, the norm is computed from a sum of squares.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    last_in_memory = -1 if x.is_contiguous() else -2
    if dim == last_in_memory or x.device.type != "cpu":
        norms: Tensor = torch.linalg.vector_norm(x, dim=dim, dtype=wide, out=out)
        return norms
    return torch.sum(x.to(wide).square(), dim, out=out).sqrt_()
