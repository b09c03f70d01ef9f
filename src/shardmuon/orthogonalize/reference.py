"""The exact polar factor, for tests and audits."""

from __future__ import annotations

import torch
from torch import Tensor


def polar_factor(
    x: Tensor,  # (B, m, n)
) -> Tensor:  # (B, m, n), fp64
    """U V^T of the singular value decomposition, in fp64. Directions without a singular value stay zero."""
    # one at a time: torch's batched products round otherwise than those of a matrix alone
    return torch.stack([_one(matrix) for matrix in x.double()])


def _one(matrix: Tensor) -> Tensor:
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    floor = s.amax() * 1e-12
    factor: Tensor = (u * (s > floor).to(u.dtype)) @ vh
    return factor
