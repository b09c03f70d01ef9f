"""Variants that control the norms of weights: Hyperball, which keeps the norm of each weight matrix constant.

State: one fp32 number per matrix, its norm before the first step. 0 means that the norm is not known yet. This is so if
torch's checkpointing created the state before any step: the next step then measures the norm before it updates weights.
It is also so for a matrix of zeros: its next step is one of plain Muon, and the norm is measured after that step.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from shardmuon.variants.base import AfterStage, WeightStage, over
from shardmuon.variants.norms import Norms

RADIUS = "weight_radius"


class HyperballUpdate(AfterStage):
    """Scaling of the update O to R, the norm at which `HyperballWeight` keeps the weights: O <- R O / ||O||_F."""

    key: ClassVar[str] = RADIUS
    travels: ClassVar[bool] = False

    def num_kept(self, rows: int, cols: int) -> int:
        return 1

    def factor(self, norms: Norms, kept: Tensor) -> Tensor:
        radius = kept.to(norms.whole.dtype)
        return over(torch.where(radius > 0, radius, norms.whole), norms.whole)


class HyperballWeight(WeightStage):
    """Hyperball, which keeps the norm of each weight matrix constant. With R = ||W_0||_F:

        W <- R (W - lr R O / ||O||_F) / || same ||_F

    Source: https://arxiv.org/abs/2606.16899, in the form of Emerging-Optimizers (weight_update_hooks/hyperball.py). In
    that library, the user sets one R for all matrices, each matrix is first scaled to this norm, and a matrix whose
    norm is nearly 0 becomes 0. In this class, R is the matrix's own norm. A matrix of zeros takes one step of plain
    Muon, and its R is the norm after this step.
    """

    key: ClassVar[str] = RADIUS

    def factor(self, norm: Tensor, kept: Tensor) -> Tensor:
        radius = kept[:, 0].double()
        radius = torch.where(radius > 0, radius, norm)
        kept[:, 0] = radius
        return over(radius, norm)
