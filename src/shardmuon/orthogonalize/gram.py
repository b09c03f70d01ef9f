"""Newton-Schulz on the Gram matrix: the same steps with most products on the short side. Not in bf16.

With R = X X^T (m x m), one step X <- (a I + b R + c R^2) X leaves X = Q X_0 for a polynomial Q of R_0. So iterate Q
and R on m x m matrices and multiply once at the end (Dao-AILab, Gram Newton-Schulz, 2026). For k steps that is one
m x m x n product for R_0, one for Q X_0, and 4 k - 3 symmetric m x m x m ones, against 2 k and k of the standard form.

[Note: restarts]
    Rounding leaves R with small spurious negative eigenvalues -d. A step multiplies them by (a + |b| d + ..)^2, a
    schedule by the square of its slope: 485^2 for torch's five steps, 6363^2 for eight of Polar Express. The update
    itself loses as much, and with some polynomials 10 to 100 times more: [Note: amplification] in gram_error.py. A
    restart makes R anew, so that only the slope since then counts. `plan_restarts` takes the fewest restarts that keep
    d small and the amplification of rounding within some times the standard form's (or its effect below 1e-3), and
    among those the positions with the best-conditioned Q. Two ways to restart:
    from X     X <- Q X, R <- X X^T: 3 m^2 n (symmetric products counted half);
    locally    R <- Q R_0 Q with R_0 kept in fp32: 6 m^3 in split half precision, so cheaper from n = 7/3 m on. It
               needs no X, hence no communication where columns are spread over ranks. Taken in fp16 and for a single
               restart: each adds a rounding of the product of the Q's (eight steps of Polar Express, log-spaced
               values, error .018 by X, .023 locally). In fp32 it would bring back R_0's own rounding and gain nothing.
    bf16 is refused: 8 bits leave d so large that even restarts do not help (errors of 0.2 to 2, 1e5 on a power law
    without), where the standard form in bf16 stays within 0.02 to 0.1.
"""

from __future__ import annotations

import itertools
import math
from functools import cache, lru_cache, partial

import numpy as np
import torch
from torch import Tensor

from shardmuon.orthogonalize.gram_error import amplification
from shardmuon.orthogonalize.products import Products
from shardmuon.orthogonalize.schedules import Triples
from shardmuon.orthogonalize.sharded import factor_of

# dtype -> most negative eigenvalue that rounding leaves in R (4e-4 seen by Dao-AILab in fp16; the others have the
# same error in units of their own epsilon), and how large it may grow.
_NOISE: dict[torch.dtype, tuple[float, float]] = {
    torch.float16: (4e-4, 1.0),
    torch.float32: (4e-4 * 2.0**-13, 1e-3),
    torch.float64: (4e-4 * 2.0**-42, 1e-3),
}
# How many times what rounding costs the standard form it may cost here, by the bound. In fp16 the bound is above 1 for
# both forms on inputs of low rank; up to 18 times, the errors seen are at most 4.4 times the standard form's.
_EXCESS = {torch.float16: 18.0, torch.float32: 12.0, torch.float64: 12.0}
_NEGLIGIBLE = 1e-3  # of the update: a tenth of what products in bf16 cost
_LOCAL_ASPECT = 7 / 3  # n/m from which a local restart is less work
_MAX_PLANS = 2000  # restart positions tried for the best condition
_HUGE = 1e30
# Of R's rounding, after all steps. Five of torch's steps reach 0.0115 in fp32; as only R is rounded to fp32, the update
# of matrices of any rank from 1 on, of four shapes and four spectra, is within 2e-4 of the dense one.
_LARGEST_SPURIOUS = 0.012


def check_gram_dtype(dtype: torch.dtype) -> None:
    """Raise ValueError for dtypes in which the Gram form is not safe."""
    if dtype not in _NOISE:
        raise ValueError(
            f"method='gram' needs products in torch.float16, torch.float32 or torch.float64, found {dtype}: "
            "rounding errors grow too large there. Use method='standard'"
        )


def restarts_locally(m: int, n: int, coefficients: Triples, dtype: torch.dtype) -> bool:
    """True if an m x n matrix (m <= n) restarts by R <- Q R_0 Q, see [Note: restarts]."""
    return dtype == torch.float16 and n > _LOCAL_ASPECT * m and len(plan_restarts(coefficients, dtype)) == 1


@lru_cache(maxsize=256)
def plan_restarts(coefficients: Triples, dtype: torch.dtype) -> tuple[int, ...]:
    """Steps (1 .. k-1) before which the iteration must restart, see [Note: restarts]."""
    check_gram_dtype(dtype)
    noise, limit = _NOISE[dtype]
    cost = cache(partial(amplification, coefficients))  # of the steps [start, stop), asked for again and again
    standard = sum(cost(step, step + 1) for step in range(len(coefficients)))  # every step is a segment of its own
    allowed = max(_EXCESS[dtype] * standard, _NEGLIGIBLE / (torch.finfo(dtype).eps / 2))

    def is_bearable(start: int, stop: int) -> bool:
        """True if these steps may run without a restart between them."""
        if stop - start == 1:
            return True
        return _growth(coefficients[start:stop], noise) <= limit and cost(start, stop) <= allowed

    # Go on until the next step would pass a limit: no plan has fewer restarts.
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


def schedule_fault(coefficients: Triples, dtype: torch.dtype) -> str:
    """The reason why these steps cannot run on a Gram matrix that was reduced once in `dtype` (fp32 or fp64), or ""."""
    if _growth(coefficients, _NOISE[dtype][0]) <= _LARGEST_SPURIOUS:
        return ""
    slope = math.prod(a for a, _, _ in coefficients)
    return (
        f"its schedule of {len(coefficients)} steps multiplies small singular values by {slope:.0f}, and the rounding "
        f"errors of a Gram matrix in {str(dtype).removeprefix('torch.')} by the square of that"
    )


def _ends(coefficients: Triples, restarts: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(itertools.pairwise((0, *restarts, len(coefficients))))


def _segments(coefficients: Triples, restarts: tuple[int, ...]) -> list[Triples]:
    return [coefficients[i:j] for i, j in _ends(coefficients, restarts)]


def _growth(segment: Triples, noise: float) -> float:
    """Final size of the spurious eigenvalue."""
    r = -noise
    for a, b, c in segment:
        z = a + r * (b + r * c)
        r *= z * z
        if not abs(r) < _HUGE:
            return math.inf
    return abs(r)


def _condition(coefficients: Triples, restarts: tuple[int, ...], noise: float) -> float:
    """The worst ratio of Q's largest to its smallest eigenvalue."""
    worst = 0.0
    s = np.geomspace(1e-6, 1.0, 512)  # singular values as they stand at the segment's start
    for segment in _segments(coefficients, restarts):
        r = np.append(s * s, -noise)
        q = np.ones_like(r)
        for a, b, c in segment:
            z = a + r * (b + r * c)
            q, r = q * z, r * z * z
        s = s * q[:-1]
        worst = max(worst, float(abs(q).max() / abs(q).min()))
    return worst


def gram_newton_schulz(
    y: Tensor,  # (B, m, n) in slots, or (m, n): norm 1, operands of `products`
    coefficients: Triples,
    products: Products,
) -> Tensor:  # of its shape, operands
    """The steps of `newton_schulz`, iterated on the Gram matrix of the short side.

    Raises:
        ValueError: Products in bf16.
    """
    short, long = sorted(y.shape[-2:])
    tall = y.shape[-2] > y.shape[-1]
    first, *others = _segments(coefficients, plan_restarts(coefficients, products.dtype))
    if restarts_locally(short, long, coefficients, products.dtype):
        wide = products.gram_fp32(y)
        before = factor_of(products.operand(wide), first, products)
        after = factor_of(products.sandwich(before, wide), others[0], products)
        factor = products.multiply(None, after, before)
        # the product of two Q is symmetric but for rounding: the tall form takes its transpose, as (Q X)^T = X^T Q^T
        return products.multiply(None, y, factor.mT) if tall else products.multiply(None, factor, y)
    for segment in (first, *others):
        factor = factor_of(products.gram(y), segment, products)
        y = products.multiply(None, y, factor) if tall else products.multiply(None, factor, y)
    return y
