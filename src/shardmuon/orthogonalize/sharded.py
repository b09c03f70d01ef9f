"""Newton-Schulz on a Gram matrix alone: R in, the factor Q out; for gram.py, and for matrices that no rank holds whole.

Those have no restarts: one from X would need X, and one from R_0 brings back R_0's own rounding. They are iterated in
fp64, so that R_0's is the only one (random 40 x 40 matrices, five of Jordan's steps, worst of 20: error 4e-6; 3e-5 in
fp32, more over several steps); a schedule for which R_0's rounding is too much is refused (`gram.schedule_fault`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardmuon.orthogonalize.products import Products
from shardmuon.orthogonalize.schedules import Triples
from shardmuon.orthogonalize.slots import copied, empty_batch


def factor_of(
    gram: Tensor,  # (B, m, m) symmetric, trace 1 or 0
    coefficients: Triples,
    products: Products,
) -> Tensor:  # (B, m, m)
    """Q such that Q X is X after all steps, for X X^T = gram."""
    factor: Tensor | None = None
    for step, (a, b, c) in enumerate(coefficients):
        # a is kept out of the polynomial: the sum would be rounded at the size of a, not of what is added to it.
        if c == 0.0:
            poly = products.operand(torch.mul(gram, b, out=empty_batch(gram.shape, gram.dtype, gram.device)))
        else:
            poly = products.multiply(gram, gram, gram, b, c, symmetric=True)
        if step + 1 < len(coefficients):
            gram = _next_gram(products, gram, poly, a)
        if factor is None:
            factor = copied(poly, poly.dtype)
            factor.diagonal(dim1=-2, dim2=-1).add_(a)
            factor = products.rounded_(factor)
        else:
            factor = products.multiply(factor, factor, poly, a, symmetric=True)
    assert factor is not None, "a schedule has at least one step"
    return factor


def _next_gram(products: Products, gram: Tensor, poly: Tensor, a: float) -> Tensor:
    """(a I + poly) gram (a I + poly)."""
    half = products.multiply(gram, gram, poly, a, symmetric=True)
    return products.multiply(half, poly, half, a, symmetric=True)


def factor_flops(short: int, coefficients: Triples, symmetric_share: float) -> int:
    """Floating point operations of `factor_of` for one matrix."""
    squares = sum(c != 0.0 for _, _, c in coefficients)
    return round((squares + 3 * (len(coefficients) - 1)) * 2 * short**3 * symmetric_share)


def pack_symmetric(
    matrix: Tensor,  # (m, m)
    out: Tensor,  # 1-D, m (m + 1) / 2 elements, written to
) -> None:
    """Write the upper triangle of a symmetric matrix to `out`, row by row."""
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
