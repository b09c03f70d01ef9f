"""What a step should have done to one dense matrix, in fp64: no plan, no buckets, none of the orthogonalizers.

[Note: the steps as a function of singular values]
    A Newton-Schulz step X <- (a I + b X X^T + c (X X^T)^2) X keeps singular vectors and maps each singular value s to
    a s + b s^3 + c s^5. So all steps together are one odd function p of the singular values of X / ||X||_F, and
    p(X) = V r(L) V^T X with X X^T = V L V^T and r = p(s) / s, which is a product and needs no division. One symmetric
    eigenproblem of the short side gives the update, its band of singular values, the polar factor and the sensitivity.

[Note: how much rounding may change an update]
    Rounding the input by a relative eps adds noise E of norm eps. To first order, p moves the part of E between the
    singular directions i and j by the divided differences of p there (their symmetric and antisymmetric halves by
    (p_i - p_j) / (s_i - s_j) and (p_i + p_j) / (s_i + s_j)), and the part outside the row space by r_i. Every
    later step adds noise of the size of its terms a s, b s^3 and c s^5, which cancel, and the steps after it enlarge
    that in the same way. The root mean square of it all over ||p(X)|| is the matrix's own sensitivity: a few units for
    a Gaussian matrix, hundreds for one of low rank, where the steps amplify what is nearly zero by the product of their
    a's. An error is judged as a multiple of eps times sensitivity, so one number per arithmetic fits every spectrum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shardmuon.pipeline import Settings

Coefficients = Sequence[tuple[float, float, float]]

# Units of eps * sensitivity that an update may differ by. Largest measured over 14 shapes (1x24 to 512x512), 7 spectra
# (Gaussian, power law, six decades, low rank, low rank with noise, orthogonal, spiked) and two schedules: "standard"
# 1.5 in fp32 and 0.35 in half precision (whose rounding errors are many and average out), "torch" 0.35, "gram" 10.8 in
# fp32. The numbers allow about three times that; tests/test_audit_reference.py measures again.
_UNITS = {"standard": 5.0, "gram": 33.0, "torch": 1.2, "reference": 5.0}
_UNITS_HALF = 1.2
_OWN_ERROR = 1e-9  # of this module in fp64 (measured: below 1e-11)
_FLAT = 1e-7  # of the largest singular value: below, the Gram matrix in fp64 cannot tell a value from zero
_FLAT_EXACT = 1e-12  # the same for a singular value decomposition, as in orthogonalize/reference.py


def tolerance(method: str, dtype: torch.dtype) -> float:
    """Relative difference (Frobenius) that orthogonalizing with products of this dtype may make at sensitivity 1."""
    info = torch.finfo(dtype)
    return (_UNITS_HALF if info.bits == 16 else _UNITS.get(method, max(_UNITS.values()))) * info.eps + _OWN_ERROR


@dataclass(frozen=True, slots=True)
class Reference:
    """What the steps make of one matrix.

    Attributes:
        update: The result in exact arithmetic.
        polar: The exact polar factor; directions without a singular value stay zero.
        sigmas: Singular values of the input over its Frobenius norm, ascending.
        results: What the steps make of each of them (not sorted: p is not monotonic).
        sensitivity: See [Note: how much rounding may change an update].
    """

    update: Tensor  # (rows, cols) fp64
    polar: Tensor  # (rows, cols) fp64
    sigmas: Tensor  # (min(rows, cols),) fp64
    results: Tensor  # (min(rows, cols),) fp64
    sensitivity: float


def reference_of(
    matrix: Tensor,  # (rows, cols), finite
    coefficients: Coefficients,
    *,
    method: str = "standard",
    eps: float = 1e-7,
) -> Reference:
    """Apply the steps to a whole matrix; "reference" gives the polar factor, "torch" clamps the norm at eps."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = _normalized(matrix.T if tall else matrix, eps if method == "torch" else 0.0)
    sigmas, vectors, coords = _decomposed(x, exact=method == "reference")
    present = sigmas > (_FLAT_EXACT if method == "reference" else _FLAT) * sigmas.amax()
    inverse = torch.where(present, 1.0 / torch.where(present, sigmas, 1.0), 0.0)
    polar = vectors @ (inverse.unsqueeze(1) * coords)
    if method == "reference":
        ratios, update = inverse, polar
        noise = _gain(sigmas, sigmas * inverse, inverse, torch.zeros_like(sigmas), x.shape[1])
    else:
        ratios = _follow(sigmas, coefficients).ratios
        update = vectors @ (ratios.unsqueeze(1) * coords)
        noise = _noise(sigmas, coefficients, x.shape[1])
    if method == "gram":
        noise = math.hypot(noise, _gram_noise(sigmas, ratios))
    results = sigmas * ratios
    norm = float(results.norm())
    sensitivity = max(1.0, noise / norm) if norm else 1.0
    return Reference(update.T if tall else update, polar.T if tall else polar, sigmas, results, sensitivity)


def _decomposed(x: Tensor, exact: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Singular values, ascending, left singular vectors, and the matrix in their coordinates."""
    if exact:  # the Gram matrix squares what is small, and the polar factor enlarges it to 1
        vectors, sigmas, right = torch.linalg.svd(x, full_matrices=False)
        return sigmas.flip(0), vectors.flip(1), sigmas.flip(0).unsqueeze(1) * right.flip(0)
    values, vectors = torch.linalg.eigh(x @ x.T)
    return values.clamp(min=0.0).sqrt(), vectors, vectors.T @ x


def _normalized(x: Tensor, eps: float) -> Tensor:
    x = x.to(torch.float64)
    peak = x.abs().amax().clamp(min=torch.finfo(torch.float64).tiny)
    x = x / peak  # squares of tiny or huge entries would leave the range of fp64
    norm = torch.linalg.vector_norm(x)
    return x / torch.maximum(norm, eps / peak).clamp(min=torch.finfo(torch.float64).tiny)


class _Followed(NamedTuple):
    """What some steps make of singular values: p(s) / s, p'(s), and the norm of the terms of the last step."""

    ratios: Tensor
    slopes: Tensor
    terms: float


def _follow(sigmas: Tensor, coefficients: Coefficients) -> _Followed:
    ratios, slopes, terms = torch.ones_like(sigmas), torch.ones_like(sigmas), 0.0
    for a, b, c in coefficients:
        values = sigmas * ratios
        square = values**2
        terms = float((values * (abs(a) + abs(b) * square + abs(c) * square**2)).norm())
        slopes = slopes * (a + 3 * b * square + 5 * c * square**2)
        ratios = ratios * (a + b * square + c * square**2)
    return _Followed(ratios, slopes, terms)


def _noise(sigmas: Tensor, coefficients: Coefficients, num_cols: int) -> float:
    """Norm of the result's error for a rounding error of 1 (relative) of the input and of every step's terms."""
    total, injected = 0.0, float(sigmas.norm())
    for done in range(len(coefficients) + 1):
        here = sigmas * _follow(sigmas, coefficients[:done]).ratios
        rest = _follow(here, coefficients[done:])
        total = math.hypot(total, injected * _gain(here, here * rest.ratios, rest.ratios, rest.slopes, num_cols))
        if done < len(coefficients):
            injected = _follow(here, coefficients[done : done + 1]).terms
    return total


def _gain(sigmas: Tensor, results: Tensor, ratios: Tensor, slopes: Tensor, num_cols: int) -> float:
    """Root mean square factor by which the steps enlarge white noise."""
    rows = len(sigmas)
    apart = sigmas.unsqueeze(1) - sigmas
    close = apart.abs() < 1e-9 * sigmas.amax()
    symmetric = torch.where(close, slopes, (results.unsqueeze(1) - results) / torch.where(close, 1.0, apart))
    total = sigmas.unsqueeze(1) + sigmas
    tiny = total < _FLAT * sigmas.amax()
    other = torch.where(tiny, ratios, (results.unsqueeze(1) + results) / torch.where(tiny, 1.0, total))
    energy = (symmetric.square().sum() + other.square().sum()) / 2 + (num_cols - rows) * ratios.square().sum()
    return float((energy / (rows * num_cols)).sqrt())


def _gram_noise(sigmas: Tensor, ratios: Tensor) -> float:
    """The same for noise in the Gram matrix, from which ns_method="gram" iterates."""
    values = sigmas.square()
    apart = values.unsqueeze(1) - values
    close = apart.abs() < 1e-12 * values.amax()
    between = torch.where(close, 0.0, (ratios.unsqueeze(1) - ratios) / torch.where(close, 1.0, apart))
    scale = values.norm() / len(sigmas)
    return float((between * sigmas).norm() * scale)


def momentum_of(
    buffer: Tensor,  # (rows, cols) fp64, before the step
    grad: Tensor,  # (rows, cols) fp64
    weight: Tensor,  # (rows, cols) fp64, before the step
    settings: Settings,
) -> tuple[Tensor, Tensor]:
    """The momentum after the step, and what is orthogonalized."""
    mu = settings.momentum
    if settings.weight_decay_mode == "l2":
        grad = grad + settings.weight_decay * weight
    after = buffer + (1 - mu) * (grad - buffer)
    return after, mu * after + (1 - mu) * grad if settings.nesterov else after


def recovered_update(
    before: Tensor,  # (rows, cols) fp64
    after: Tensor,  # (rows, cols) fp64
    settings: Settings,
    scale: float,
    expected: Tensor | None = None,  # (rows, cols) fp64: settles the few cautious elements that rounding leaves open
) -> Tensor:
    """The update that a step applied, from the weights around it: (decayed before - after) / (lr * scale)."""
    alpha = settings.lr * scale
    factor = {
        "l2": 1.0,
        "independent": 1 - settings.weight_decay,
        "decoupled": 1 - settings.lr * settings.weight_decay,
        "cautious": 1 - settings.lr * settings.weight_decay,
    }[settings.weight_decay_mode]
    decayed = (before * factor - after) / alpha
    if settings.weight_decay_mode != "cautious":
        return decayed
    # An element decays where update and weight agree in sign. At most one of the two readings is consistent with that.
    kept = (before - after) / alpha
    found = torch.where(decayed * before > 0, decayed, kept)
    if expected is not None:
        open_ = (decayed * before <= 0) & (kept * before > 0)
        nearer = (decayed - expected).abs() < (kept - expected).abs()
        found = torch.where(open_ & nearer, decayed, found)
    return found


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """||found - expected|| / ||expected||; 0 for empty tensors."""
    if not expected.numel():
        return 0.0
    scale = torch.linalg.vector_norm(expected)
    return float(torch.linalg.vector_norm(found - expected) / scale.clamp(min=1e-30))
