"""NorMuon: the rows (or columns) of an orthogonalized matrix on one scale, by the mean of their squares over time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shardmuon.variants.base import AfterStage

_LEAST = 1e-10  # nanochat's, below which a mean of squares is not followed


@dataclass(frozen=True)
class NorMuon(AfterStage):
    """For an orthogonalized O (m x n), v from zero:

        v   <- beta2 v + (1 - beta2) mean(O^2)    along columns (m numbers) where m >= n, else along rows (n numbers)
        O'  =  O / sqrt(max(v, 1e-10))
        O'' =  O' ||O||_F / ||O'||_F

    Source: Li et al. 2025, https://arxiv.org/abs/2510.05491, in the form of nanochat (nanochat/optim.py,
    `muon_step_fused`), which takes the mean along the shorter dim: what lies along the longer one is what
    orthogonalization leaves uneven. dion (dion/normuon.py) always takes it along columns, divides by sqrt(v) + 1e-8,
    and where a matrix is sharded restores the norms of its shards. v needs no bias correction: the norm is restored.

    Attributes:
        beta2: Of the average.
    """

    beta2: float = 0.95
    key: ClassVar[str] = "second_moment"

    def num_kept(self, rows: int, cols: int) -> int:
        return max(rows, cols)

    def run(self, x: Tensor, kept: Tensor) -> Tensor:
        dim = -1 if x.shape[-2] >= x.shape[-1] else -2
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        x = x.to(wide)  # at once: operations on two dtypes are slow on CPUs
        # One pass over the matrix for all sums: the norm before and after follow from the means of its rows.
        # (torch's norms along a dim that is not the last in memory take eight times as long as its sums.)
        mean = x.square().mean(dim)  # (B, num_kept)
        kept.lerp_(mean.to(kept.dtype), 1 - self.beta2)
        scale = kept.to(wide).clamp(min=_LEAST).rsqrt_()
        before, after = mean.sum(-1, keepdim=True), (mean * scale.square()).sum(-1, keepdim=True)
        scale = scale * torch.where(after > 0, before / after, 0.0).sqrt_()
        return x.mul_(scale.unsqueeze(dim))
