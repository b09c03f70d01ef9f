"""Distance of the Gram form from the steps it stands for, by rounding: a first-order bound, computed from the schedule.

[Note: amplification]
    In the singular basis of X, rounding adds to R, and to every product, a matrix whose entries are at most u (the unit
    roundoff) times the largest entry there can be. To first order each such entry (i, j) then goes its own way,
    whatever the others do: a step multiplies it by divided differences of the step's polynomial at the two eigenvalues,
    which are all known. So one pass over a grid of pairs of singular values, 0 among them, gives the worst factor from
    any rounding of a segment (the steps between two restarts) to the final update: its amplification. u times that is
    the segment's share of the error.

    The worst pair is nearly always (0, large): a direction that the gradient does not have, beside one that it has. An
    entry e of R there reaches Q as (slope so far) * b * e * (slope to come), and at once is multiplied by a large
    singular value: slope**2 * u of the update. That is why gradients of rank 1 to 3 are the worst, and why the growth
    of spurious eigenvalues alone is not enough to plan by: polynomials that first raise large values and then crush
    them ("cans", "quintic", long "polar_express") lose another factor of 10 to 100 in the size of what they keep.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardmuon.orthogonalize.schedules import Triples

Array = npt.NDArray[np.float64]

# Singular values as fractions of the norm. Denser grids change no bound by more than a few percent.
_GRID: Array = np.unique(np.concatenate([[0.0], np.geomspace(1e-5, 1.0, 32), np.linspace(0.05, 1.0, 20)]))


def amplification(coefficients: Triples, start: int, stop: int) -> float:
    """Amplification of the segment of steps [start, stop), see [Note: amplification]."""
    sigmas = _GRID
    for a, b, c in coefficients[:start]:
        sigmas = np.abs(sigmas * (a + sigmas**2 * (b + c * sigmas**2)))
    factor, errors = _after(coefficients[start:stop], sigmas**2)
    results = np.abs(factor * sigmas)
    last = np.full((len(sigmas), len(sigmas)), results.max())  # rounding of Q X itself
    local: Array = sum((np.abs(e) * sigmas for e in errors), start=last)
    return float((local * _to_come(results, coefficients[stop:])).max())


def _after(segment: Triples, eigenvalues: Array) -> tuple[Array, list[Array]]:
    """Eigenvalues of Q after these steps, and what each rounding made of Q's entries, in units of u."""
    ones = np.ones((len(eigenvalues), len(eigenvalues)))
    r, q = eigenvalues, np.ones_like(eigenvalues)
    in_gram: list[Array] = [ones * r.max()]  # one array for each rounding; R's and Q's lists go in step
    in_factor: list[Array] = [0 * ones]
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


def _to_come(sigmas: Array, rest: Triples) -> Array:
    """The largest factor of the steps to come on an entry (i, j) in the basis of these singular values.

    They are an odd function h: the symmetric part of an entry is multiplied by (h_i - h_j) / (s_i - s_j), the other by
    (h_i + h_j) / (s_i + s_j), and one that leaves the rows' space by h_i / s_i.
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
    worst: Array = np.maximum(np.maximum(np.abs(symmetric), np.abs(other)), np.abs(ratio)[:, None])
    return worst
