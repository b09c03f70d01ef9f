"""NorMuon: the rows (or columns) of an orthogonalized matrix on one scale, by the mean of their squares over time."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from shardmuon.variants.base import AfterStage, over
from shardmuon.variants.norms import Norms

_LEAST = 1e-10  # nanochat's, below which a mean of squares is not followed


class NorMuon(AfterStage):
    """NorMuon's scaling of the rows (or columns) of an orthogonalized matrix. For O (m x n), v from zero:

        v   <- beta2 v + (1 - beta2) mean(O^2)    along columns (m numbers) where m >= n, else along rows (n numbers)
        O'  =  O / sqrt(max(v, 1e-10))
        O'' =  O' ||O||_F / ||O'||_F

    Source: Li et al. 2025, https://arxiv.org/abs/2510.05491, in the form of nanochat (nanochat/optim.py,
    `muon_step_fused`), which takes the mean along the shorter dim: what lies along the longer one is what
    orthogonalization leaves uneven. dion (dion/normuon.py) always takes it along columns, divides by sqrt(v) + 1e-8,
    and where a matrix is sharded restores the norms of its shards. v needs no bias correction: the norm is restored.

    Attributes:
        beta2: Weight of the earlier average, nanochat's and the paper's.
    """

    beta2: ClassVar[float] = 0.95
    key: ClassVar[str] = "second_moment"
    of_lines: ClassVar[bool] = True

    def num_kept(self, rows: int, cols: int) -> int:
        return max(rows, cols)

    def factor(self, norms: Norms, kept: Tensor) -> Tensor:
        means = norms.means
        assert means is not None, "for `of_lines`"
        kept.lerp_(means.to(kept.dtype), 1 - self.beta2)
        floored = kept.to(means.dtype).clamp(min=_LEAST)
        # The squared norm before and after follows from the means.
        restored = over(*norms.sums(means, means / floored))
        return (restored / floored).sqrt_()
