"""The quintic Newton-Schulz iteration on batches, normalized in fp32 before any rounding to a lower precision."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardmuon._torch import cpu_has_bf16_matmul
from shardmuon.orthogonalize.symmetric import addmm, symmetric_addmm


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
    coefficients: Sequence[tuple[float, float, float]],
    *,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:  # (B, m, n), dtype
    """X <- a X + (b A + c A A) X with A = X X^T, once per (a, b, c), from X / ||X||_F.

    The iteration of torch.optim.Muon and of Keller Jordan's Muon (https://kellerjordan.github.io/posts/muon/), except
    that the norm is exact (fp32, any scale) where they cast to bf16 first and clamp the norm at eps. `eps` is unused.

    On a CPU without bf16 (fp16) instructions the products run in fp32 on operands that are rounded to `dtype` after
    every step: the rounding points of the real thing at the speed of fp32.
    """
    del eps
    y = normalize(x)
    emulate = y.device.type == "cpu" and (
        dtype == torch.float16 or (dtype == torch.bfloat16 and not cpu_has_bf16_matmul())
    )
    compute = torch.float32 if emulate else dtype

    def rounded(t: Tensor) -> Tensor:
        return t.to(dtype).to(compute) if emulate else t

    y = y.to(dtype).to(compute)
    for a, b, c in coefficients:
        gram = rounded(symmetric_addmm(None, y, y.mT))
        poly = rounded(symmetric_addmm(gram, gram, gram, b, c))
        y = rounded(addmm(y, poly, y, a, 1.0))
    return y.to(dtype)
