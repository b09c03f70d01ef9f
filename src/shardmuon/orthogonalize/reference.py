"""The exact polar factor, for tests and audits."""

from __future__ import annotations

import torch
from torch import Tensor


def polar_factor(
    x: Tensor,  # (B, m, n)
) -> Tensor:  # (B, m, n), fp64
    """U V^T of the singular value decomposition, in fp64. Directions without a singular value stay zero."""
    u, s, vh = torch.linalg.svd(x.double(), full_matrices=False)
    floor = s.amax(dim=-1, keepdim=True) * 1e-12
    factor: Tensor = (u * (s > floor).to(u.dtype).unsqueeze(-2)) @ vh
    return factor
