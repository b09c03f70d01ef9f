"""Control of the norm of weights: Hyperball keeps it, the radial brake slows its growth, the update floor scales up
updates that are small beside it.

What each keeps is one number of a matrix, its norm (fp32), found before the first step. 0 says that it is not known: of
a matrix of zeros, and where torch's checkpoints made state before any step. Then a step is one of plain Muon, and the
norm is taken after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shardmuon.variants.base import AfterStage, WeightStage, over
from shardmuon.variants.norms import Norms

RADIUS, NORM, BRAKED = "weight_radius", "weight_norm", "weight_norm_braked"


@dataclass(frozen=True)
class HyperballUpdate(AfterStage):
    """The update on the sphere's scale: O <- R O / ||O||_F. See `HyperballWeight`."""

    key: ClassVar[str] = RADIUS
    travels: ClassVar[bool] = False

    def num_kept(self, rows: int, cols: int) -> int:
        return 1

    def factor(self, norms: Norms, kept: Tensor) -> Tensor:
        radius = kept[:, 0].to(norms.whole.dtype)
        return over(torch.where(radius > 0, radius, norms.whole), norms.whole)


@dataclass(frozen=True)
class HyperballWeight(WeightStage):
    """With R = ||W_0||_F:

        W <- R (W - lr R O / ||O||_F) / || same ||_F

    Source: https://arxiv.org/abs/2606.16899, as the hook of Emerging-Optimizers (weight_update_hooks/hyperball.py) does
    it. There R is a number that the user gives, and every matrix is set to it first; a matrix whose norm is nearly 0
    becomes 0. Here R is each matrix's own, and one of zeros takes a step of plain Muon, whose norm it keeps from then
    on.
    """

    key: ClassVar[str] = RADIUS

    def num_kept(self, rows: int, cols: int) -> int:
        return 1

    def factor(self, norm: Tensor, kept: Tensor) -> Tensor:
        radius = kept[:, 0].double()
        radius = torch.where(radius > 0, radius, norm)
        kept[:, 0] = radius
        return over(radius, norm)


@dataclass(frozen=True)
class UpdateFloor(AfterStage):
    """An update is no less than `floor` of the weight it changes: O <- O max(1, floor ||W||_F / ||O||_F).

    W before the step; O before the learning rate and its scale by the shape. Source: track 3 of
    https://github.com/KellerJordan/modded-nanogpt (u/w floor, 0.35), used there instead of weight decay.

    Attributes:
        floor: Smallest ratio of the norms.
    """

    floor: float = 0.35
    key: ClassVar[str] = NORM
    travels: ClassVar[bool] = False

    def num_kept(self, rows: int, cols: int) -> int:
        return 1

    def factor(self, norms: Norms, kept: Tensor) -> Tensor:
        least = kept[:, 0].to(norms.whole.dtype) * self.floor
        return over(least, norms.whole).clamp_(min=1.0)


@dataclass(frozen=True)
class WeightNorm(WeightStage):
    """Keeps the norm that the step leaves to each matrix, for the update floor of the next; changes no weight."""

    scales: ClassVar[bool] = False
    key: ClassVar[str] = NORM
    last: ClassVar[bool] = True

    def num_kept(self, rows: int, cols: int) -> int:
        return 1

    def factor(self, norm: Tensor, kept: Tensor) -> Tensor:
        kept[:, 0] = norm
        return torch.ones_like(norm)


@dataclass(frozen=True)
class RadialBrake(WeightStage):
    """Of a change of the norm only a part is let through: with r before the step and r' after it,

        W <- W (r + f (r' - r)) / r',    f = outward where r' > r, else inward

    Source: the hook of Emerging-Optimizers (weight_update_hooks/radial_brake.py). A matrix that was 0 before the step
    is let go; there its first update is halved.

    Attributes:
        outward: f of growth.
        inward: f of shrinking.
    """

    outward: float = 0.5
    inward: float = 1.0
    key: ClassVar[str] = BRAKED

    def num_kept(self, rows: int, cols: int) -> int:
        return 1

    def factor(self, norm: Tensor, kept: Tensor) -> Tensor:
        before = kept[:, 0].double()
        # Of growth the smaller of two parts gives the smaller norm, of shrinking the larger one.
        either = torch.minimum if self.outward <= self.inward else torch.maximum
        target = either(before.lerp(norm, self.outward), before.lerp(norm, self.inward))
        target = torch.where(before > 0, target, norm)
        kept[:, 0] = target
        return over(target, norm)


__all__ = ["HyperballUpdate", "HyperballWeight", "RadialBrake", "UpdateFloor", "WeightNorm"]
