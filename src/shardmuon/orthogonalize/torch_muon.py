"""torch.optim.Muon's orthogonalization, operation for operation: cast to bf16, then normalize."""

from __future__ import annotations

import torch
from torch import Tensor

from shardmuon.orthogonalize.schedules import Triples


def torch_muon(
    x: Tensor,  # (B, rows, cols), any orientation
    coefficients: Triples,
    eps: float,
) -> Tensor:  # (B, rows, cols), bf16
    """The arithmetic of `torch.optim.Muon` (torch 2.9 .. 2.13), one matrix at a time, always in bf16.

    Differs in one point: torch normalizes the momentum buffer itself in place when parameters are bf16 and nesterov is
    False (`.bfloat16()` of a bf16 tensor is the same tensor). Here nothing is written into `x`.
    """
    return torch.stack([_one(matrix, coefficients, eps) for matrix in x])


def _one(matrix: Tensor, coefficients: Triples, eps: float) -> Tensor:
    y = matrix.to(torch.bfloat16, copy=True, memory_format=torch.contiguous_format)
    tall = y.size(0) > y.size(1)
    y = y.T if tall else y
    y.div_(y.norm().clamp(min=eps))
    for a, b, c in coefficients:
        gram = y @ y.T
        poly = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        y = torch.addmm(y, poly, y, beta=a)
    return y.T if tall else y
