"""Muon+: the norm of an orthogonalized matrix set to what it would be were it exactly orthogonal."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardmuon.variants.base import AfterStage


@dataclass(frozen=True)
class MuonPlus(AfterStage):
    """For an orthogonalized O (m x n):

        O <- O sqrt(min(m, n)) / ||O||_F

    Newton-Schulz steps leave singular values between 0.7 and 1.2; an exact polar factor has norm sqrt(min(m, n)).
    Source: nanochat (nanochat/optim.py), which calls it Muon+. The paper of that name (https://arxiv.org/abs/2602.21545)
    normalizes rows or columns after orthogonalizing, which this does not. A zero matrix stays zero.
    """

    def run(self, x: Tensor, kept: Tensor) -> Tensor:
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        x = x.to(wide)  # at once: operations on two dtypes are slow on CPUs
        norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
        target = float(min(x.shape[-2:])) ** 0.5
        return x.mul_(torch.where(norm > 0, target / norm, 0.0))
