"""Muon+: the norm of an orthogonalized matrix set to what it would be were it exactly orthogonal."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shardmuon.variants.base import AfterStage
from shardmuon.variants.norms import Norms


@dataclass(frozen=True)
class MuonPlus(AfterStage):
    """For an orthogonalized O (m x n):

        O <- O sqrt(min(m, n)) / ||O||_F

    Newton-Schulz steps leave singular values between 0.7 and 1.2; an exact polar factor has norm sqrt(min(m, n)).
    Source: nanochat (nanochat/optim.py), which calls it Muon+. The paper of that name (https://arxiv.org/abs/2602.21545)
    normalizes rows or columns after orthogonalizing, which this does not. A zero matrix stays zero.
    """

    def factor(self, norms: Norms, kept: Tensor) -> Tensor:
        target = [side**0.5 for side in norms.cut.sides]
        return norms.cut.times_(norms.whole.reciprocal(), target).nan_to_num_(nan=1.0, posinf=1.0)
