"""Norms of the orthogonalized matrices of a batch and of their lines, found from one read of each matrix.

Lines run along the shorter dim: rows where rows >= cols, else columns. A batch has one number of each matrix, (B, 1),
or one of each line, (B, P): those of a matrix begin at an address of 64 bytes, for kernels sum in another order where
memory is not aligned, and what lies behind its last line means nothing. Beside sums such numbers are only multiplied,
divided, compared and interpolated, which rounds alike anywhere in a vector.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardmuon._torch import foreach_copy_, foreach_norm

_ALIGNED = 16  # elements of fp32


def aligned_rows(count: int, size: int, like: Tensor) -> Tensor:  # (count, size or more)
    """Memory for rows of numbers in at least fp32, each from an address of 64 bytes on; not initialized."""
    wide = torch.promote_types(like.dtype, torch.float32)
    return torch.empty(count, -(-size // _ALIGNED) * _ALIGNED, dtype=wide, device=like.device)


class Norms:
    """Norms of the matrices of a batch, in at least fp32.

    Args:
        x: (B, rows, cols), not written to. Each matrix is summed by itself, so that its bits hang on no other.
        of_lines: Lines are asked for.

    Attributes:
        means: (B, P) the mean square of each line's elements; None: not asked for.
        shape: (B, rows, cols).
        num_lines: Lines of a matrix.
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
        """The Frobenius norm of each matrix."""
        if self._whole is None:
            assert self.means is not None, "one of the two is known"
            self._whole = self.sums(self.means)[0].mul_(self._side).sqrt_()
        return self._whole

    def sums(self, *several: Tensor) -> Sequence[Tensor]:  # (B, P) each, not negative -> (B, 1) each
        """Sum numbers of lines over each matrix."""
        lines = [row for one in several for row in one.narrow(1, 0, self.num_lines).unbind(0)]
        found: Sequence[Tensor] = torch.stack(foreach_norm(lines, 1, several[0].dtype)).unsqueeze(1).chunk(len(several))
        return found

    def scale_(self, factor: Tensor) -> None:  # (B, 1) or (B, P)
        """Change them to those of the matrices times this factor."""
        if self.means is not None:
            self.means = factor.square() * self.means
        of_lines = factor.shape[1] > 1
        self._whole = None if of_lines or self._whole is None else self._whole * factor

    def gathered(self, rows: Sequence[Tensor], of_lines: bool) -> Tensor:
        """Kept numbers of each matrix, in one tensor: (B, num_kept), or (B, P) of lines."""
        if not of_lines:
            return torch.stack(list(rows))
        found = aligned_rows(len(rows), self.num_lines, rows[0])
        foreach_copy_(found.narrow(1, 0, self.num_lines).unbind(0), rows)
        return found


def _aligned(x: Tensor) -> Tensor:
    """The tensor itself, or an aligned copy, as matrices of a batch may need."""
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
