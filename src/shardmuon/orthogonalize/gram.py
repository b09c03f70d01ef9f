"""The Gram form of Newton-Schulz: the steps before which it restarts, and a check of its results.

With R = X X^T (m x m), one step X <- (a I + b R + c R^2) X gives X = Q X_0 for a polynomial Q of R_0. So the Gram form
iterates Q and R as m x m matrices and multiplies once at the end (Dao-AILab, Gram Newton-Schulz, 2026). For k steps, it
needs one m x m x n product for R_0, one for Q X_0, and 4 k - 3 symmetric m x m x m products. The standard form needs
2 k m x m x n products and k symmetric m x m x m products.

[Note: restarts]
    Rounding leaves R with small spurious negative eigenvalues. A step multiplies them by at least a^2, and a schedule
    by the square of its slope, the product of the a's: 485^2 for torch's five steps, 6363^2 for eight of Polar Express.
    A restart recomputes R, so that only the slope since the restart counts. The iteration restarts before a step that
    would raise this slope above `_MOST_SLOPE`, which keeps errors close to those of the standard form
    (docs/adr/0043-restarts-by-slope.md). There are two ways to restart:
    from X     X <- Q X, R <- X X^T: 3 m^2 n (symmetric products counted half);
    locally    R <- Q R_0 Q with R_0 stored in fp32: 6 m^3 in split half precision, so cheaper from n = 7/3 m on. It
               does not need X, hence no communication if columns are spread over ranks. Used only in fp16 and for a
               single restart, because each adds a rounding of the product of the Q's (eight steps of Polar Express,
               log-spaced values: error .018 from X, .023 locally). In fp32 it would bring back R_0's own rounding and
               gain nothing.
    bf16 is not allowed: with 8 bits, even restarts do not help (errors of 0.2 to 2 with restarts, 1e5 on a power law
    without). The standard form in bf16 stays within 0.02 to 0.1.

[Note: results that are not finite]
    If a finite matrix gives a non-finite result, the result is replaced by zeros: the weights decay but get no update
    in this step. This has never been observed. To report it without waiting for the device, the counts are copied to
    the host asynchronously, and a later step warns. The result for a matrix with NaN or Inf becomes NaN.
"""

from __future__ import annotations

import itertools
import warnings
from collections import deque

import torch
from torch import Tensor

from shardmuon._torch import Later, arrived, is_capturing
from shardmuon.orthogonalize.schedules import Triples

# Dtype -> largest product of the a's between two restarts. 42 allows three of Jordan's steps, or two of Polar Express.
_MOST_SLOPE = {torch.float16: 42.0, torch.float32: 42.0, torch.float64: 1e6}
_LOCAL_ASPECT = 7 / 3  # aspect ratio n/m above which a restart by R <- Q R_0 Q takes less work than a restart from X


def check_gram_dtype(dtype: torch.dtype) -> None:
    """Raise ValueError for dtypes in which the Gram form is not safe."""
    if dtype not in _MOST_SLOPE:
        raise ValueError(
            f"method='gram' needs products in torch.float16, torch.float32 or torch.float64, found {dtype}: "
            "rounding errors grow too large there. Use method='standard'"
        )


def restarts_locally(m: int, n: int, coefficients: Triples, dtype: torch.dtype) -> bool:
    """True if, for an m x n matrix (m <= n), the Gram form restarts by R <- Q R_0 Q, without X: see [Note:
    restarts]."""
    return dtype == torch.float16 and n > _LOCAL_ASPECT * m and len(plan_restarts(coefficients, dtype)) == 1


def plan_restarts(coefficients: Triples, dtype: torch.dtype) -> tuple[int, ...]:
    """Choose the steps (indices 1 .. k-1) before which the Gram form recomputes R, to limit rounding errors: see
    [Note: restarts]."""
    check_gram_dtype(dtype)
    found, slope = list[int](), 1.0
    for step, (a, _, _) in enumerate(coefficients):
        slope = max(slope, 1.0) * abs(a)  # each step rounds anew, so a step that shrinks does not offset later ones
        if step and slope > _MOST_SLOPE[dtype]:
            found.append(step)
            slope = abs(a)
    return tuple(found)


def segments(coefficients: Triples, dtype: torch.dtype) -> list[Triples]:
    """Split the schedule into the segments between restarts."""
    ends = itertools.pairwise((0, *plan_restarts(coefficients, dtype), len(coefficients)))
    return [coefficients[start:stop] for start, stop in ends]


# ------------------------------------------------------------------------------------------------------------- results


class FiniteWatch:
    """Replaces non-finite results by zeros, and warns one or more steps later. Each optimizer has one instance."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Tensor, Tensor]] = []  # this step's text, and flags (0 or NaN) of results and inputs
        self.coming: deque[tuple[list[tuple[str, int]], Later]] = deque()

    def keep_finite(
        self,
        out: Tensor,  # (B, m, n), the results, written to
        x: Tensor,  # (B, m, n), the matrices from which `out` was computed
        text: str,  # method and shape, for the warning
    ) -> Tensor:  # (B, m, n), `out`
        """Replace each non-finite result of a finite matrix by zeros, in place, without waiting for an accelerator."""
        spoiled = _zero_or_nan(out.sum(dim=(-2, -1), keepdim=True, dtype=torch.float32))
        if x.device.type == "cpu" and not bool(spoiled.isnan().any()):  # on a CPU the check costs no sync
            return out
        given = _zero_or_nan(torch.linalg.vector_norm(x, torch.inf, dim=(-2, -1), keepdim=True))
        self.seen.append((text, spoiled, given))
        return torch.where(spoiled == 0, out, given.to(out.dtype), out=out)

    def send(self) -> None:
        """Start to copy the flags of this step's replaced results to the host. Call at the end of a step."""
        seen, self.seen = self.seen, []
        if not seen or is_capturing(seen[0][1].device):  # replays of a CUDA graph skip this code
            return
        spoiled = torch.cat([s.flatten() for _, s, _ in seen])
        given = torch.cat([g.flatten() for _, _, g in seen])
        replaced = spoiled.isnan().logical_and_(given == 0)
        self.coming.append(([(text, len(s)) for text, s, _ in seen], Later(replaced)))

    def report(self) -> None:
        """Warn of replaced results in earlier steps whose flags have arrived at the host by now."""
        for seen, replaced in arrived(self.coming):
            for (text, count), flags in zip(seen, replaced.split([n for _, n in seen]), strict=True):
                if flags.any():
                    warnings.warn(
                        f"{text} gave a non-finite result for {int(flags.sum())} of {count} finite matrices in an "
                        "earlier step; they took no update in it",
                        stacklevel=2,
                    )


def _zero_or_nan(x: Tensor) -> Tensor:
    """Return 0 for each finite element, otherwise NaN."""
    return x - x
