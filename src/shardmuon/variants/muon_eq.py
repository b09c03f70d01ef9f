"""MuonEq: rows of one norm before orthogonalizing."""

from __future__ import annotations

import torch
from torch import Tensor

from shardmuon.variants.base import BeforeStage
from shardmuon.variants.norms import aligned_rows, line_norms

# Rows of norms between these are summed in fp32 without loss: squares that underflow are below 2^-126 each, so 2^20 of
# them are below 2^-26 of a squared norm above 2^-80; 2^80 is far from where sums overflow.
_LOW, _HIGH = 2.0**-40, 2.0**40


class MuonEq(BeforeStage):
    """MuonEq's scaling of rows to one norm before orthogonalizing. For N (m x n), what momentum makes of the gradient,
    and each of its rows N_i:

        N_i <- N_i / (||N_i|| sqrt(m))    with m of the rows that are not zeros

    Source: https://arxiv.org/abs/2603.28254, its default form R, as nanochat has it (nanochat/optim.py). There rows
    keep their mean norm; the result of orthogonalizing hangs on their ratios alone. nanochat clamps the rows' norms at
    1e-6, which small gradients fall below; here only rows of zeros stay as they are.
    """

    def run_(self, x: Tensor) -> None:
        if x.device.type == "cpu":  # without this form a step of d=384 takes 3% longer with fp32 products, 6% with bf16
            norms = line_norms(x, -1)  # (1, m)
            low, high = torch.aminmax(norms)
            if float(low) > _LOW and float(high) < _HIGH:  # NaN: false; 0 does not tell zeros from small numbers
                x.mul_(norms.mul_(x.shape[-2] ** 0.5).reciprocal_().unsqueeze(-1))
                return
        unit_anyway_(x)


def unit_anyway_(x: Tensor) -> None:  # (B, m, n)
    """Divide rows by their norms, and all by the root of the number of rows that are not zeros, at any scale and
    without a look at the numbers: rows are first divided by powers of two, which rounds nothing, so that they are 0 or
    between 2^-23 (2^-52 in fp64), where they held no normal number, and 2 in size.

    Two reads and two passes over x in its own dtype, where sums in fp64 would first make a copy of it in fp64. Each
    matrix is summed by itself, so that its bits hang on no other; what does not sum takes all of them together.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    x.div_(_power_of_two(torch.linalg.vector_norm(x, torch.inf, dim=-1, keepdim=True, dtype=wide)))
    # From addresses of 64 bytes on, as norms are summed in turn; what lies between means nothing.
    count, rows = x.shape[:2]
    room = aligned_rows(count, rows, x).unsqueeze(-1)
    norms = room.narrow(1, 0, rows)  # (B, m, 1): 0 of zeros alone
    _norms_into(norms, x, -1)
    # The root of their number is the norm of a vector that has one and the same number for each; NaN if any norm is.
    least = torch.finfo(wide).eps
    root = torch.empty(count, 1, 1, dtype=wide, device=x.device)
    _norms_into(root, room.clamp(max=least).narrow(1, 0, rows), -2)
    x.div_((norms * root.mul_(1 / least)).clamp_(min=least))


def _norms_into(
    out: Tensor,  # (B, m, 1) or (B, 1, 1), written
    x: Tensor,  # (B, m, n)
    dim: int,
) -> None:
    """Euclidean norms of each matrix by itself."""
    for found, matrix in zip(out.split(1), x.split(1), strict=True):
        torch.linalg.vector_norm(matrix, dim=dim, keepdim=True, dtype=out.dtype, out=found)


def _power_of_two(size: Tensor) -> Tensor:  # fp32 or fp64, not negative; written to
    """The power of two at or below each number, by its bits; the least normal one below that. Infinity stays, and is
    what becomes of NaN: divided by it, a row of numbers that are not all finite has NaN."""
    bits, mask = (torch.int64, 0x7FF << 52) if size.dtype == torch.float64 else (torch.int32, 0xFF << 23)
    size.view(bits).bitwise_and_(mask)
    return size.clamp_(min=torch.finfo(size.dtype).tiny)
