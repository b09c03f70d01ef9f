"""The quintic Newton-Schulz iteration on batches, normalized in fp32 before any rounding to a lower precision."""

from __future__ import annotations

import torch
from torch import Tensor

from shardmuon.orthogonalize.products import Products
from shardmuon.orthogonalize.schedules import Triples


def normalize(
    x: Tensor,  # (B, m, n), any float dtype
) -> Tensor:  # (B, m, n), fp32 or fp64; a new tensor
    """Divide each matrix by its Frobenius norm. Exact at any scale that the dtype can hold; zeros stay zeros.

    The norm is taken of the matrix divided by its largest entry: squares of entries near 1e-30 or 1e30 would
    underflow or overflow fp32 (and casting to fp16 first, as one peer does, loses entries below 1e-7 altogether).
    """
    x = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    peak = x.abs().amax(dim=(-2, -1), keepdim=True)
    x = x / torch.where(peak > 0, peak, 1.0)
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    return x.div_(norm.clamp(min=1.0))  # the largest entry is 1, so the norm of a nonzero matrix is at least 1


def newton_schulz(
    x: Tensor,  # (B, m, n), m <= n
    coefficients: Triples,
    products: Products,
    *,
    eps: float,
) -> Tensor:  # (B, m, n), the products' dtype
    """X <- a X + (b A + c A A) X with A = X X^T, once per (a, b, c), from X / ||X||_F.

    The iteration of torch.optim.Muon and of Keller Jordan's Muon (https://kellerjordan.github.io/posts/muon/), except
    that the norm is exact (fp32, any scale) where they cast to bf16 first and clamp the norm at eps. `eps` is unused.
    """
    del eps
    y = products.round(normalize(x))
    for a, b, c in coefficients:
        gram = products.symmetric(None, y, y.mT)
        if c == 0.0:  # a cubic step: A A is not needed
            y = products.general(y, gram, y, a, b)
        else:
            poly = products.symmetric(gram, gram, gram, b, c)
            y = products.general(y, poly, y, a)
    return y.to(products.dtype)
