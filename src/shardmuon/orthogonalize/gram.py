"""The Gram form of Newton-Schulz: the choice of restarts, by a bound on rounding errors, and a check of the results.

With R = X X^T (m x m), one step X <- (a I + b R + c R^2) X gives X = Q X_0 for a polynomial Q of R_0. So the Gram form
iterates Q and R as m x m matrices and multiplies once at the end (Dao-AILab, Gram Newton-Schulz, 2026). For k steps, it
needs one m x m x n product for R_0, one for Q X_0, and 4 k - 3 symmetric m x m x m products. The standard form needs
2 k m x m x n products and k symmetric m x m x m products.

[Note: restarts]
    Rounding leaves R with small spurious negative eigenvalues -d. A step multiplies them by (a + |b| d + ..)^2, and a
    schedule by the square of its slope: 485^2 for torch's five steps, 6363^2 for eight of Polar Express. The update
    itself loses as much accuracy, and with some polynomials 10 to 100 times more ([Note: amplification]). A restart
    recomputes R, so that only the slope since the restart counts. `plan_restarts` chooses the fewest restarts that keep
    d small and the amplification of rounding within a constant factor of the standard form's (or its effect below
    1e-3). Among plans with equally few restarts, it chooses in fp16 the plan with the best-conditioned Q, and in other
    dtypes the plan with the smallest amplification. There are two ways to restart:
    from X     X <- Q X, R <- X X^T: 3 m^2 n (symmetric products counted half);
    locally    R <- Q R_0 Q with R_0 stored in fp32: 6 m^3 in split half precision, so cheaper from n = 7/3 m on. It
               does not need X, hence no communication if columns are spread over ranks. Used only in fp16 and for a
               single restart, because each adds a rounding of the product of the Q's (eight steps of Polar Express,
               log-spaced values: error .018 from X, .023 locally). In fp32 it would bring back R_0's own rounding and
               gain nothing.
    bf16 is not allowed: with 8 bits, d is so large that even restarts do not help (errors of 0.2 to 2 with restarts,
    1e5 on a power law without). The standard form in bf16 stays within 0.02 to 0.1.

[Note: amplification]
    In the singular basis of X, rounding adds to R, and to every product, a matrix whose entries are at most u (the unit
    roundoff) times the largest possible entry. To first order, each entry (i, j) of this error evolves independently of
    the other entries: a step multiplies it by divided differences of the step's polynomial at the two eigenvalues,
    which are all known. So one pass over a grid of pairs of singular values, 0 included, gives the largest factor by
    which any rounding in a segment (the steps between two restarts) can grow until the final update. This factor is the
    segment's amplification; the segment contributes u times its amplification to the error.

    The worst pair is nearly always (0, large): a direction that is absent from the gradient, paired with a direction
    that is present. An error e in this entry of R reaches Q as (slope so far) * b * e * (slope to come), and is then
    multiplied by a large singular value, which makes slope**2 * u of the update. This explains why gradients of rank 1
    to 3 are the worst, and why it is not enough to limit the growth of spurious eigenvalues: polynomials that first
    raise large values and then shrink them ("cans", "quintic", long "polar_express") lose another factor of 10 to 100
    relative to what remains.

[Note: results that are not finite]
    If a finite matrix gives a non-finite result, the result is replaced by zeros: the weights decay but get no update
    in this step. This has never been observed. To report it without waiting for the device, the counts are copied to
    the host asynchronously, and a later step warns. The result for a matrix with NaN or Inf becomes NaN.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections import deque
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardmuon._torch import Later, arrived, is_capturing
from shardmuon.orthogonalize.schedules import Triples

_Array = np.ndarray[Any, np.dtype[np.float64]]

# dtype -> (size of the most negative eigenvalue that rounding leaves in R, limit to which it may grow). Dao-AILab found
# 4e-4 in fp16; the other dtypes are assumed to have the same error in units of their epsilon.
_NOISE: dict[torch.dtype, tuple[float, float]] = {
    torch.float16: (4e-4, 1.0),
    torch.float32: (4e-4 * 2.0**-13, 1e-3),
    torch.float64: (4e-4 * 2.0**-42, 1e-3),
}
# Largest allowed ratio of the Gram form's error bound to the standard form's. In fp16, both bounds are above 1 on
# inputs of low rank. With ratios of bounds up to 18, measured errors are at most 4.4 times the standard form's.
_EXCESS = {torch.float16: 18.0, torch.float32: 12.0, torch.float64: 12.0}
_NEGLIGIBLE = 1e-3  # error relative to the update: a tenth of the error of bf16 products
_LOCAL_ASPECT = 7 / 3  # aspect ratio n/m above which a restart by R <- Q R_0 Q takes less work than a restart from X
_MAX_PLANS = 2000  # if there are more candidate plans, use the plan with the latest restarts without a search


def check_gram_dtype(dtype: torch.dtype) -> None:
    """Raise ValueError for dtypes in which the Gram form is not safe."""
    if dtype not in _NOISE:
        raise ValueError(
            f"method='gram' needs products in torch.float16, torch.float32 or torch.float64, found {dtype}: "
            "rounding errors grow too large there. Use method='standard'"
        )


def restarts_locally(m: int, n: int, coefficients: Triples, dtype: torch.dtype) -> bool:
    """True if, for an m x n matrix (m <= n), the Gram form restarts by R <- Q R_0 Q, without X: see [Note:
    restarts]."""
    return dtype == torch.float16 and n > _LOCAL_ASPECT * m and len(plan_restarts(coefficients, dtype)) == 1


@lru_cache(maxsize=256)
def plan_restarts(coefficients: Triples, dtype: torch.dtype) -> tuple[int, ...]:
    """Choose the steps (indices 1 .. k-1) before which the Gram form recomputes R, to limit rounding errors: see
    [Note: restarts]."""
    check_gram_dtype(dtype)
    noise, limit = _NOISE[dtype]
    cost = cache(partial(_amplification, coefficients))  # cost(start, stop): bound for the steps [start, stop)
    standard = sum(cost(step, step + 1) for step in range(len(coefficients)))  # each step alone
    allowed = max(_EXCESS[dtype] * standard, _NEGLIGIBLE / (torch.finfo(dtype).eps / 2))

    def is_bearable(start: int, stop: int) -> bool:
        """True if the steps [start, stop) may run without a restart between them."""
        if stop - start == 1:
            return True
        return _growth(coefficients[start:stop], noise) <= limit and cost(start, stop) <= allowed

    # Greedy search: restart only when the next step would exceed a limit. No other plan has fewer restarts.
    latest, start = list[int](), 0
    for stop in range(1, len(coefficients) + 1):
        if not is_bearable(start, stop):
            start = stop - 1
            latest.append(start)
    steps = range(1, len(coefficients))
    if not latest or math.comb(len(steps), len(latest)) > _MAX_PLANS:
        return tuple(latest)
    plans = itertools.combinations(steps, len(latest))
    bearable = [plan for plan in plans if all(is_bearable(*ends) for ends in _ends(coefficients, plan))]
    if dtype != torch.float16:
        return min(bearable, key=lambda plan: sum(cost(*ends) for ends in _ends(coefficients, plan)))
    return min(bearable, key=lambda plan: _condition(coefficients, plan, noise))


def segments(coefficients: Triples, dtype: torch.dtype) -> list[Triples]:
    """Split the schedule into the segments between restarts."""
    return [coefficients[start:stop] for start, stop in _ends(coefficients, plan_restarts(coefficients, dtype))]


def _ends(coefficients: Triples, restarts: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(itertools.pairwise((0, *restarts, len(coefficients))))


def _growth(segment: Triples, noise: float) -> float:
    """Compute the size to which the steps of a segment amplify an eigenvalue -noise of R that comes from rounding.
    Infinite or NaN if it diverges."""
    r = -noise
    for a, b, c in segment:
        z = a + r * (b + r * c)
        r *= z * z
    return abs(r)


def _condition(coefficients: Triples, restarts: tuple[int, ...], noise: float) -> float:
    """Compute the largest condition number of Q over all segments between restarts."""
    worst = 0.0
    s = np.geomspace(1e-6, 1.0, 512)  # singular values at the segment's start
    for start, stop in _ends(coefficients, restarts):
        r = np.append(s * s, -noise)
        q = np.ones_like(r)
        for a, b, c in coefficients[start:stop]:
            z = a + r * (b + r * c)
            q, r = q * z, r * z * z
        s = s * q[:-1]
        worst = max(worst, float(abs(q).max() / abs(q).min()))
    return worst


# ------------------------------------------------------------------------------------------------------- amplification

# Singular values as fractions of the norm. Denser grids change no bound by more than a few percent.
_GRID: _Array = np.array(sorted({0.0, *np.geomspace(1e-5, 1.0, 32), *np.linspace(0.05, 1.0, 20)}))


def _amplification(coefficients: Triples, start: int, stop: int) -> float:
    """Compute the largest factor by which a rounding error in steps [start, stop), which run without a restart, can
    grow until the final update: see [Note: amplification]."""
    sigmas = _GRID
    for a, b, c in coefficients[:start]:
        sigmas = np.abs(sigmas * (a + sigmas**2 * (b + c * sigmas**2)))
    factor, errors = _after(coefficients[start:stop], sigmas**2)
    results = np.abs(factor * sigmas)
    last = np.full((len(sigmas), len(sigmas)), results.max())  # error from rounding the product Q X
    local: _Array = sum((np.abs(e) * sigmas for e in errors), start=last)
    return float((local * _to_come(results, coefficients[stop:])).max())


def _after(segment: Triples, eigenvalues: _Array) -> tuple[_Array, list[_Array]]:
    """Compute the eigenvalues of Q after the steps of a segment, and the error in the entries of Q from each rounding,
    in units of the unit roundoff."""
    ones = np.ones((len(eigenvalues), len(eigenvalues)))
    r, q = eigenvalues, np.ones_like(eigenvalues)
    in_gram: list[_Array] = [ones * r.max()]  # one array per rounding, in the order of `in_factor`
    in_factor: list[_Array] = [0 * ones]
    for a, b, c in segment:
        poly, size = b * r + c * r * r, np.abs(b) * r + np.abs(c) * r * r
        z = a + poly
        in_poly = [(b + c * (r[:, None] + r)) * e for e in in_gram] + [ones * size.max()]
        in_gram.append(0 * ones)
        in_factor.append(0 * ones)
        # Q' = Q Z
        in_factor = [d * z + q[:, None] * p for d, p in zip(in_factor, in_poly, strict=True)]
        in_factor.append(ones * np.max(a * np.abs(q) + np.abs(q * poly)))
        # R' = Z R Z, in two products
        in_gram = [
            z[:, None] * e * z + p * (r * z) + (z * r)[:, None] * p for e, p in zip(in_gram, in_poly, strict=True)
        ]
        half = np.abs(r * z)
        first, second = np.max(a * r + r * np.abs(poly)), np.max(a * half + np.abs(poly) * half)
        in_gram.append(ones * (first * np.abs(z).max() + second))
        r, q = r * z * z, q * z
    return q, in_factor


def _to_come(sigmas: _Array, rest: Triples) -> _Array:
    """Compute the largest factor by which the remaining steps multiply an error in entry (i, j) of X, in the singular
    basis of X.

    The remaining steps are an odd function h of the singular values s. They multiply the symmetric part of an error by
    (h_i - h_j) / (s_i - s_j), the antisymmetric part by (h_i + h_j) / (s_i + s_j), and a part outside the row space by
    h_i / s_i.
    """
    h, slope, ratio = sigmas, np.ones_like(sigmas), np.ones_like(sigmas)
    for a, b, c in rest:
        square = h * h
        slope = slope * (a + square * (3 * b + 5 * c * square))
        z = a + square * (b + c * square)
        ratio, h = ratio * z, h * z
    difference, total = sigmas[:, None] - sigmas, sigmas[:, None] + sigmas
    near, none = np.abs(difference) < 1e-7 * (1 + total), total < 1e-12
    symmetric = np.where(near, slope[:, None], (h[:, None] - h) / np.where(near, 1.0, difference))
    other = np.where(none, ratio[:, None], (h[:, None] + h) / np.where(none, 1.0, total))
    worst: _Array = np.maximum(np.maximum(np.abs(symmetric), np.abs(other)), np.abs(ratio)[:, None])
    return worst


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
