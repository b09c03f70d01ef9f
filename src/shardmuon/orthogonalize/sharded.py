"""Newton-Schulz on a Gram matrix alone, for matrices that no rank holds whole: R in, the factor Q out.

The steps are those of gram.py without restarts: a restart from X would need X, and one from R_0 brings back R_0's own
rounding. Iterate in fp64, so that R_0's is the only one (random 40 x 40 matrices, five of Jordan's steps, worst of 20:
error 4e-6; 3e-5 in fp32, more over several steps); a schedule for which R_0's rounding is too much is refused.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardmuon.orthogonalize.gram import next_gram, plus_identity, spurious_after, times
from shardmuon.orthogonalize.products import Products
from shardmuon.orthogonalize.schedules import Triples

# Of R's rounding, after all steps. Five of torch's steps reach 0.0115 in fp32; as only R is rounded to fp32, the update
# of matrices of any rank from 1 on, of four shapes and four spectra, is within 2e-4 of the dense one.
_LARGEST_SPURIOUS = 0.012


def schedule_fault(coefficients: Triples, dtype: torch.dtype) -> str:
    """Why these steps cannot run on a Gram matrix that was reduced once in `dtype` (fp32 or fp64), or ""."""
    if spurious_after(coefficients, dtype) <= _LARGEST_SPURIOUS:
        return ""
    slope = 1.0
    for a, _, _ in coefficients:
        slope *= a
    return (
        f"its schedule of {len(coefficients)} steps multiplies small singular values by {slope:.0f}, and the rounding "
        f"errors of a Gram matrix in {str(dtype).removeprefix('torch.')} by the square of that"
    )


def factor_of(
    gram: Tensor,  # (B, m, m) symmetric, trace 1 or 0
    coefficients: Triples,
    products: Products,  # in fp64, see above
) -> Tensor:  # (B, m, m)
    """Q such that Q X is X after all steps, for X X^T = gram."""
    factor: Tensor | None = None
    for step, (a, b, c) in enumerate(coefficients):
        poly = (
            products.operand(times(gram, b)) if c == 0.0 else products.multiply(gram, gram, gram, b, c, symmetric=True)
        )
        if step + 1 < len(coefficients):
            gram = next_gram(products, gram, poly, a)
        factor = (
            plus_identity(products, poly, a)
            if factor is None
            else products.multiply(factor, factor, poly, a, symmetric=True)
        )
    assert factor is not None, "a schedule has at least one step"
    return factor


def factor_flops(short: int, coefficients: Triples, symmetric_share: float) -> int:
    """Floating point operations of `factor_of` for one matrix."""
    squares = sum(c != 0.0 for _, _, c in coefficients)
    return round((squares + 3 * (len(coefficients) - 1)) * 2 * short**3 * symmetric_share)


def pack_symmetric(
    matrix: Tensor,  # (m, m)
    out: Tensor,  # 1-D, m (m + 1) / 2 elements, written to
) -> None:
    """Its upper triangle, row by row."""
    rows, cols = torch.triu_indices(*matrix.shape, device=matrix.device)
    out.copy_(matrix[rows, cols])


def unpack_symmetric(
    packed: Tensor,  # 1-D, m (m + 1) / 2 elements
    size: int,
) -> Tensor:  # (m, m)
    """The symmetric matrix with this upper triangle."""
    rows, cols = torch.triu_indices(size, size, device=packed.device)
    out = packed.new_empty(size, size)
    out[rows, cols] = packed
    out[cols, rows] = packed
    return out
