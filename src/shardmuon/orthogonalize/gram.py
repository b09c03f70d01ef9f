"""Newton-Schulz on the Gram matrix: the same steps with most products on the short side. fp32 and fp64 only.

With R = X X^T (m x m), one step X <- (a I + b R + c R^2) X leaves X = Q X_0 for a polynomial Q of R_0. So iterate Q
and R on m x m matrices and multiply once at the end (Dao-AILab, Gram Newton-Schulz, 2026). For k steps that is one
m x m x n product for R_0, one for Q X_0, and 4 k - 3 symmetric m x m x m ones, against 2 k and k of the standard form.

Rounding in R is amplified by up to the square of the slope of Q's polynomial at zero, the product of the a's so far.
Where that would exceed `_MAX_NOISE`, the iteration restarts: X <- Q X, R <- X X^T. torch's five steps need no restart
in fp32 and stay within 3e-3 of the exact steps on spectra from Gaussian to rank 16 (5e-3 is what the tests allow; bf16
products in the standard form are off by 2e-2 to 0.5 there). In bf16 the Gram form fails (errors up to 1e5 on a power
law), so half precision is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardmuon.orthogonalize.newton_schulz import newton_schulz, normalize
from shardmuon.orthogonalize.symmetric import addmm, symmetric_addmm

_MAX_NOISE = 0.03  # eps * slope^2: 0.028 for torch's five steps in fp32
_MIN_ASPECT = 1.5  # n/m below which the standard form is less work: 5 (3 n/m + 1) against 3 n/m + 17 units of m^3


def gram_newton_schulz(
    x: Tensor,  # (B, m, n), m <= n
    coefficients: Sequence[tuple[float, float, float]],
    *,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:  # (B, m, n), dtype
    """The steps of `newton_schulz`, iterated on the Gram matrix where that is less work.

    Raises:
        ValueError: dtype is neither fp32 nor fp64.
    """
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"ns_method='gram' needs ns_dtype=torch.float32 or torch.float64, found {dtype}")
    if x.shape[-1] < _MIN_ASPECT * x.shape[-2]:
        return newton_schulz(x, coefficients, eps=eps, dtype=dtype)
    y = normalize(x).to(dtype)
    gram = symmetric_addmm(None, y, y.mT)
    factor: Tensor | None = None
    slope = 1.0
    for step, (a, b, c) in enumerate(coefficients):
        slope *= a
        if factor is not None and slope**2 * torch.finfo(dtype).eps > _MAX_NOISE:
            y = addmm(None, factor, y)
            gram, factor, slope = symmetric_addmm(None, y, y.mT), None, a
        poly = symmetric_addmm(gram, gram, gram, b, c)
        poly.diagonal(dim1=-2, dim2=-1).add_(a)
        factor = poly if factor is None else symmetric_addmm(None, factor, poly)
        if step + 1 < len(coefficients):
            gram = symmetric_addmm(None, poly, symmetric_addmm(None, gram, poly))
    return y if factor is None else addmm(None, factor, y)
