"""MuonEq, a variant of Muon that scales all rows of a matrix to the same norm before the orthogonalization."""

from __future__ import annotations

import torch
from torch import Tensor

from shardmuon.variants.base import BeforeStage
from shardmuon.variants.norms import aligned_rows, line_norms

# Between these bounds, fp32 computes the norm of a row accurately. A square that underflows is below 2^-126, so 2^20
# such squares add up to less than 2^-26 of a squared norm, which is above 2^-80. At the upper end, 2^80 is far from
# overflow.
_LOW, _HIGH = 2.0**-40, 2.0**40


class MuonEq(BeforeStage):
    """MuonEq's scaling of all rows to the same norm before the orthogonalization. For each row N_i of the matrix N to
    be orthogonalized (the momentum):

        N_i <- N_i / (||N_i|| sqrt(m))    with m the number of nonzero rows

    Source: https://arxiv.org/abs/2603.28254, its default form R, as in nanochat (nanochat/optim.py). nanochat preserves
    the mean norm of the rows, which makes no difference: the result of the orthogonalization depends only on the ratios
    of the norms. nanochat clamps row norms at 1e-6, although rows of small gradients have smaller norms; this class
    leaves only rows of zeros unscaled.
    """

    def run_(self, x: Tensor) -> None:
        if x.device.type == "cpu":  # this fast path saves 3% of a step at d=384 with fp32 products, 6% with bf16
            norms = line_norms(x, -1)  # (1, m)
            low, high = torch.aminmax(norms)
            if float(low) > _LOW and float(high) < _HIGH:  # False if any norm is NaN or 0 (zeros or underflow)
                x.mul_(norms.mul_(x.shape[-2] ** 0.5).reciprocal_().unsqueeze(-1))
                return
        unit_anyway_(x)


def unit_anyway_(x: Tensor) -> None:  # (B, m, n)
    """Divide each row by its norm and by the square root of the number of nonzero rows, in place. Works for values of
    any magnitude, and without a host-device sync.

    Each row is first divided by a power of two, which is exact: its largest magnitude is then 0 or between 1 and 2 (for
    rows of subnormal numbers, at least 2^-23, or 2^-52 in fp64). This takes two reads of x and two passes that rewrite
    it, all in x's own dtype; summing in fp64 would need an fp64 copy of x. Each matrix is summed separately, so that
    its bits do not depend on the rest of the batch; elementwise operations process the whole batch.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    x.div_(_power_of_two(torch.linalg.vector_norm(x, torch.inf, dim=-1, keepdim=True, dtype=wide)))
    # The norms of each matrix start at a multiple of 64 bytes, because they are summed below, and kernels sum in
    # another order where memory is not aligned. The padding is uninitialized.
    count, rows = x.shape[:2]
    room = aligned_rows(count, rows, x).unsqueeze(-1)
    norms = room.narrow(1, 0, rows)  # (B, m, 1): 0 only for rows of zeros
    _norms_into(norms, x, -1)
    # The square root of the number of nonzero rows is the norm of a vector with the value `least` for each such row,
    # divided by `least`. It is NaN if any norm is NaN.
    least = torch.finfo(wide).eps
    root = torch.empty(count, 1, 1, dtype=wide, device=x.device)
    _norms_into(root, room.clamp(max=least).narrow(1, 0, rows), -2)
    x.div_((norms * root.mul_(1 / least)).clamp_(min=least))


def _norms_into(
    out: Tensor,  # (B, m, 1) or (B, 1, 1), overwritten
    x: Tensor,  # (B, m, n)
    dim: int,
) -> None:
    """Write the Euclidean norms along a dim to `out`, one matrix at a time."""
    for found, matrix in zip(out.split(1), x.split(1), strict=True):
        torch.linalg.vector_norm(matrix, dim=dim, keepdim=True, dtype=out.dtype, out=found)


def _power_of_two(size: Tensor) -> Tensor:  # fp32 or fp64, not negative; overwritten
    """Round each number down to a power of two by masking its mantissa bits, but at least to the smallest normal
    number. Infinity and NaN become infinity, so that dividing a row by the result leaves a NaN in rows with either of
    them."""
    bits, mask = (torch.int64, 0x7FF << 52) if size.dtype == torch.float64 else (torch.int32, 0xFF << 23)
    size.view(bits).bitwise_and_(mask)
    return size.clamp_(min=torch.finfo(size.dtype).tiny)
