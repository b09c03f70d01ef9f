"""Muon's step of one dense matrix in fp64: no plan, no buckets, none of the orthogonalizers.

[Note: the steps as a function of singular values]
    A Newton-Schulz step X <- (a I + b X X^T + c (X X^T)^2) X keeps singular vectors and maps each singular value s to
    a s + b s^3 + c s^5. So all steps together are one odd function p of the singular values of X / ||X||_F, and
    p(X) = V r(L) V^T X with X X^T = V L V^T and r = p(s) / s, which is a product and needs no division. One symmetric
    eigenproblem of the short side gives the update, its band of singular values and the polar factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardmuon.step.options import Settings

Coefficients = Sequence[tuple[float, float, float]]

_FLAT = 1e-7  # of the largest singular value: below, the Gram matrix in fp64 cannot tell a value from zero
_FLAT_EXACT = 1e-12  # the same for a singular value decomposition, as in `polar_factor`


@dataclass(frozen=True)
class Reference:
    """One matrix after all steps in exact arithmetic.

    Attributes:
        tall: True if the left singular vectors are those of its transpose: of the short side.
        vectors: (m, m) left singular vectors, one a column.
        sigmas: (m,) singular values of the normalized matrix, ascending.
        coords: (m, n) that matrix in the coordinates of the vectors.
        inverse: (m,) 1 / s, and 0 where there is no singular value.
        coefficients: Those of the steps; None: the result is the polar factor.
    """

    tall: bool
    vectors: Tensor
    sigmas: Tensor
    coords: Tensor
    inverse: Tensor
    coefficients: Coefficients | None

    def seen(self, matrix: Tensor) -> Tensor:  # (rows, cols) -> (m, n)
        """A matrix in the coordinates of the left singular vectors, in its own dtype."""
        return self.vectors.T.to(matrix.dtype) @ (matrix.T if self.tall else matrix)

    def ratios(self, longer: float = 1.0) -> Tensor:  # (m,)
        """Factor of each direction after all steps."""
        return (
            self.inverse if self.coefficients is None else _followed(self.sigmas / longer, self.coefficients) / longer
        )

    def update(self, longer: float = 1.0) -> Tensor:  # (rows, cols)
        """The result of all steps; with `longer` that of a matrix that was divided by so many times its norm."""
        return self._whole(self.ratios(longer))

    def settles(self, eps: float) -> bool:
        """True if rounding leaves at least half of the largest singular value's result: each step may move that value
        by two spacings of the step's largest. Some schedules nearly cancel large values at first."""
        exact = self.sigmas[-1] * self.ratios()[-1]
        for off in (2 * eps, -2 * eps):
            values = self.sigmas.clone()
            for a, b, c in self.coefficients or ():
                values = values * (a + values.square() * (b + c * values.square()))
                values[-1] += off * values.abs().amax()
            if self.coefficients is not None and float((values[-1] / exact - 1).abs()) > 0.5:
                return False
        return True

    @property
    def polar(self) -> Tensor:  # (rows, cols)
        """The polar factor; directions without a singular value stay zero."""
        return self._whole(self.inverse)

    def _whole(self, ratios: Tensor) -> Tensor:
        out = self.vectors @ (ratios.unsqueeze(1) * self.coords)
        return out.T if self.tall else out


def reference_of(
    matrix: Tensor,  # (rows, cols), finite
    coefficients: Coefficients,
    *,
    method: str = "standard",
    eps: float = 1e-7,
) -> Reference:
    """Apply the steps to a whole matrix; "reference" gives the polar factor, "torch" clamps the norm at eps."""
    tall, polar = matrix.shape[0] > matrix.shape[1], method == "reference"
    x = _normalized(matrix.T if tall else matrix, eps if method == "torch" else 0.0)
    if polar:  # the Gram matrix squares what is small, and the polar factor enlarges it to 1
        vectors, sigmas, _ = torch.linalg.svd(x, full_matrices=False)
        vectors, sigmas = vectors.flip(1), sigmas.flip(0)
    else:
        values, vectors = torch.linalg.eigh(x @ x.T)
        sigmas = values.clamp(min=0.0).sqrt()
    present = sigmas > (_FLAT_EXACT if polar else _FLAT) * sigmas.amax()
    inverse = torch.where(present, 1.0 / torch.where(present, sigmas, 1.0), 0.0)
    return Reference(tall, vectors, sigmas, vectors.T @ x, inverse, None if polar else coefficients)


def singular_values(matrix: Tensor) -> Tensor:  # (rows, cols) -> (min(rows, cols),)
    """Singular values by the Gram matrix of the short side, ascending: good to the square root of eps."""
    short = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    squares: Tensor = torch.linalg.eigvalsh(short @ short.T)
    return squares.clamp(min=0.0).sqrt()


def _normalized(x: Tensor, eps: float) -> Tensor:
    x = x.to(torch.float64)
    peak = x.abs().amax().clamp(min=torch.finfo(torch.float64).tiny)
    x = x / peak  # squares of tiny or huge entries would leave the range of fp64
    norm = torch.linalg.vector_norm(x)
    return x.div_(torch.maximum(norm, eps / peak).clamp(min=torch.finfo(torch.float64).tiny))


def _followed(sigmas: Tensor, coefficients: Coefficients) -> Tensor:
    """The ratio p(s) / s that these steps give singular values s."""
    ratios = torch.ones_like(sigmas)
    for a, b, c in coefficients:
        square = (sigmas * ratios).square()
        ratios = ratios * (a + b * square + c * square.square())
    return ratios


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
    after = torch.lerp(buffer, grad, 1 - mu)
    return after, torch.lerp(grad, after, mu) if settings.nesterov else after


def decay_factor(settings: Settings) -> float:
    """The factor that weight decay takes to weights. KeyError for a mode that the audit does not know."""
    return {
        "l2": 1.0,
        "independent": 1 - settings.weight_decay,
        "decoupled": 1 - settings.lr * settings.weight_decay,
        "cautious": 1 - settings.lr * settings.weight_decay,
    }[settings.weight_decay_mode]


def recovered_update(
    before: Tensor,  # (rows, cols) fp64
    after: Tensor,  # (rows, cols) fp64
    settings: Settings,
    scale: float,
    expected: Tensor | None = None,  # (rows, cols) fp64: settles the few cautious elements that rounding leaves open
) -> Tensor:
    """The update that a step applied, from the weights around it: (decayed before - after) / (lr * scale)."""
    alpha = settings.lr * scale
    decayed = (before * decay_factor(settings)).sub_(after).div_(alpha)
    if settings.weight_decay_mode != "cautious":
        return decayed
    # An element decays where update and weight agree in sign. At most one of the two readings is consistent with that.
    kept = (before - after).div_(alpha)
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
