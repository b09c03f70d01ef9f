"""Control of weight norms: Hyperball, which holds the norm of each weight matrix constant.

State: one fp32 number per matrix, its norm before the first step. 0 means unknown: the matrix was zeros, or torch's
checkpointing created the state before any step. The next step is then plain Muon's, and the norm is measured after it.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from shardmuon.variants.base import AfterStage, WeightStage, over
from shardmuon.variants.norms import Norms

RADIUS = "weight_radius"


class HyperballUpdate(AfterStage):
    """Scaling of the update to the constant norm R of the weights: O <- R O / ||O||_F. See `HyperballWeight`."""

    key: ClassVar[str] = RADIUS
    travels: ClassVar[bool] = False

    def num_kept(self, rows: int, cols: int) -> int:
        return 1

    def factor(self, norms: Norms, kept: Tensor) -> Tensor:
        radius = kept.to(norms.whole.dtype)
        return over(torch.where(radius > 0, radius, norms.whole), norms.whole)


class HyperballWeight(WeightStage):
    """Hyperball, which holds the norm of each weight matrix constant. With R = ||W_0||_F:

        W <- R (W - lr R O / ||O||_F) / || same ||_F

    Source: https://arxiv.org/abs/2606.16899, in the form of Emerging-Optimizers (weight_update_hooks/hyperball.py).
    There the user gives one R, every matrix is first scaled to that norm, and a matrix whose norm is nearly 0 becomes
    0. Here R is the matrix's own norm; a matrix of zeros takes one step of plain Muon and has R from then on.
    """

    key: ClassVar[str] = RADIUS

    def factor(self, norm: Tensor, kept: Tensor) -> Tensor:
        radius = kept[:, 0].double()
        radius = torch.where(radius > 0, radius, norm)
        kept[:, 0] = radius
        return over(radius, norm)
