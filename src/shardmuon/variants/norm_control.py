"""Control of the norm of weights: Hyperball, which keeps it.

What is kept is one number of a matrix, its norm (fp32), found before the first step. 0 says that it is not known: of
a matrix of zeros, and where torch's checkpoints made state before any step. Then a step is one of plain Muon, and the
norm is taken after it.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from shardmuon.variants.base import AfterStage, WeightStage, over
from shardmuon.variants.norms import Norms

RADIUS = "weight_radius"


class HyperballUpdate(AfterStage):
    """Scaling of the update to the norm that the weights keep: O <- R O / ||O||_F. See `HyperballWeight`."""

    key: ClassVar[str] = RADIUS
    travels: ClassVar[bool] = False

    def num_kept(self, rows: int, cols: int) -> int:
        return 1

    def factor(self, norms: Norms, kept: Tensor) -> Tensor:
        radius = kept.to(norms.whole.dtype)
        return over(torch.where(radius > 0, radius, norms.whole), norms.whole)


class HyperballWeight(WeightStage):
    """Hyperball, which keeps the norm of each weight matrix. With R = ||W_0||_F:

        W <- R (W - lr R O / ||O||_F) / || same ||_F

    Source: https://arxiv.org/abs/2606.16899, as the hook of Emerging-Optimizers (weight_update_hooks/hyperball.py) does
    it. There R is a number that the user gives, and every matrix is set to it first; a matrix whose norm is nearly 0
    becomes 0. Here R is each matrix's own, and one of zeros takes a step of plain Muon, whose norm it keeps from then
    on.
    """

    key: ClassVar[str] = RADIUS

    def factor(self, norm: Tensor, kept: Tensor) -> Tensor:
        radius = kept[:, 0].double()
        radius = torch.where(radius > 0, radius, norm)
        kept[:, 0] = radius
        return over(radius, norm)
