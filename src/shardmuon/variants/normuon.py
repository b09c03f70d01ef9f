"""NorMuon, a variant of Muon that divides each row (or column) of the orthogonalized matrix by its running root mean
square.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from shardmuon.variants.base import AfterStage, over
from shardmuon.variants.norms import Norms

_LEAST = 1e-10  # lower bound of the running mean square, as in nanochat


class NorMuon(AfterStage):
    """NorMuon's scaling of the rows (or columns) of an orthogonalized matrix O (m x n), with v starting at zero:

        v   <- beta2 v + (1 - beta2) mean(O^2)    along columns (m numbers) where m >= n, else along rows (n numbers)
        O'  =  O / sqrt(max(v, 1e-10))
        O'' =  O' ||O||_F / ||O'||_F

    Source: Li et al. 2025, https://arxiv.org/abs/2510.05491, in the form of nanochat (nanochat/optim.py,
    `muon_step_fused`), which takes means over the shorter dim. The reason is that orthogonalization gives equal norms
    to the columns of a tall matrix but not to its rows, and the reverse for a wide matrix. dion (dion/normuon.py)
    always takes the mean along columns, divides by sqrt(v) + 1e-8, and restores the norm of each shard of a sharded
    matrix. v needs no bias correction, because the norm is restored.

    Attributes:
        beta2: Weight of the previous value in the running average v, as in nanochat and the paper.
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
        # ||O||^2 and ||O'||^2 are proportional, by the same factor, to the sums of the lines' mean squares
        restored = over(*norms.sums(means, means / floored))
        return (restored / floored).sqrt_()
