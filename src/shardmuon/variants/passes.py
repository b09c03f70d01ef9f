"""Passes over a matrix that stages make: one that reads sums of squares, one that scales. None copies a matrix whole.

[Note: half precision on CPUs]
    There an operation on a half-precision matrix and an fp32 vector first makes an fp32 copy of the matrix. Two of
    torch's operations do not: a product with a 0-dim tensor, and batch normalization, whose statistics and weights are
    fp32 beside half-precision input. With mean 0, variance 1, eps 0 and a factor for each channel it multiplies in fp32
    and rounds once; its statistics of a channel (mean and variance) give the channel's sum of squares, in one read and
    in fp32. Each element is multiplied by itself, and each matrix is summed by itself: no bit hangs on a neighbour.
"""

from __future__ import annotations

import torch
from torch import Tensor


def wide_of(dtype: torch.dtype) -> torch.dtype:
    """What stages compute in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def squares(
    x: Tensor,  # (B, m, n), not written to; B = 1 on CPUs
    dim: int | None,  # -1: of each row; -2: of each column; None: of all
) -> Tensor:  # (B, m), (B, n) or (B, 1), at least fp32
    """Sums of squares, in one read."""
    wide = wide_of(x.dtype)
    if dim is None:
        whole: Tensor = torch.linalg.vector_norm(x, dim=(-2, -1), dtype=wide)
        return whole.square_().unsqueeze(-1)
    if not x.is_contiguous() and x.mT.is_contiguous():
        x, dim = x.mT, -3 - dim
    if dim == -2 and x.device.type == "cpu" and wide == torch.float32 and x.is_contiguous():
        return _means_of_columns(x).mul_(x.shape[-2]).unsqueeze(0)
    # Along the last dim in memory a norm reads once; along another it takes CPUs eight times as long as a sum.
    if dim == -1 or x.device.type != "cpu":
        lines: Tensor = torch.linalg.vector_norm(x, dim=dim, dtype=wide)
        return lines.square_()
    return x.to(wide).square().sum(dim)


def mean_squares(
    x: Tensor,  # (1, m, n) on a CPU, not written to
    dim: int,  # -1: of each row; -2: of each column
) -> Tensor:  # (m,) or (n,), at least fp32
    """Means of squares, in one read."""
    if dim == -2 and x.is_contiguous() and x.dtype != torch.float64:
        return _means_of_columns(x)
    return squares(x, dim).view(-1).mul_(1 / x.shape[dim])


def _means_of_columns(x: Tensor) -> Tensor:  # (1, m, n) -> (n,), fp32
    rows, cols = x.shape[-2:]
    # Says that statistics are fp32; with momentum 0 it stays as it is.
    kind = torch.zeros(cols, dtype=torch.float32, device=x.device)
    mean, variance = torch.batch_norm_update_stats(x.view(rows, cols), kind, kind, 0.0)
    found: Tensor = variance.addcmul_(mean, mean)
    return found


def scale_(
    x: Tensor,  # (B, m, n), written to; B = 1 on CPUs
    factor: Tensor,  # (B, m, 1), (B, 1, n) or (B, 1, 1), at least fp32
) -> Tensor:  # x
    """x * factor, computed in at least fp32 and rounded once."""
    if x.device.type != "cpu":
        return x.mul_(factor)
    if factor.numel() == 1:
        return x.mul_(factor.view(()))  # a 0-dim factor stays fp32 beside half precision
    if x.dtype == factor.dtype:
        return x.mul_(factor)
    whole = x if x.is_contiguous() else x.mT
    if not whole.is_contiguous():
        return x.copy_(x.to(factor.dtype).mul_(factor))
    by_row = (factor.shape[-1] == 1) == (whole is x)
    shaped = whole if by_row else whole.view(whole.shape[-2:])  # channels are dim 1
    factor = factor.reshape(-1)
    none = factor.new_empty(0)
    mean, variance = torch.zeros_like(factor), torch.ones_like(factor)
    torch.native_batch_norm(shaped, factor, None, mean, variance, False, 0.0, 0.0, out=(shaped, none, none.clone()))
    return x
