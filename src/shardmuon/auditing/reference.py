"""Compute the step of one whole (unsharded) matrix, once in the arithmetic of the audited step and once in exact
arithmetic.

The step of the whole matrix is called the dense step. In the arithmetic of the audited step, it can differ from a
correct audited step only by rounding, because products can be rounded differently at different positions in a batch
(see [Note: equal bits in batches] in orthogonalize/__init__.py). Both steps use the same orthogonalizer, so only a
comparison with exact arithmetic (`Reference`) can find a fault in the orthogonalizer.

This module does not use the code that plans a step, fills buckets, exchanges tensors or updates the momentum and the
weights. Variants such as NorMuon add operations, called stages, to a step. This module's formulas for the stages come
from the papers, not from the code of the stages.

[Note: the steps as a function of singular values]
    A Newton-Schulz step X <- (a I + b X X^T + c (X X^T)^2) X preserves singular vectors and maps each singular value s
    to a s + b s^3 + c s^5. All steps together therefore apply one odd polynomial p to the singular values of the
    normalized matrix X. Let X X^T = V S^2 V^T be an eigendecomposition, where S is the diagonal matrix of the singular
    values of X, and let r(s) = p(s) / s. Then the result is V r(S) V^T X. The ratio r is computed as a product with one
    factor per step, without a division. One eigendecomposition of X X^T (or of X^T X, if that is smaller) thus gives
    the update and the range of its singular values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardmuon.layout.pieces import Patch
from shardmuon.momentum.stores import Stream
from shardmuon.options import Settings
from shardmuon.orthogonalize import TORCH_EPS, orthogonalize
from shardmuon.orthogonalize.choice import Choice
from shardmuon.variants import (
    AfterStage,
    BeforeStage,
    HyperballUpdate,
    HyperballWeight,
    MuonEq,
    NorMuon,
    Stage,
    WeightStage,
)

# The 1-D fp64 values that each stage stores, keyed by stage. A stage is an operation that a Muon variant adds to the
# step.
_Kept = Mapping[str, Tensor]


# ------------------------------------------------------------------------------------------------ the live arithmetic


@dataclass(frozen=True)
class Arithmetic:
    """Options, dtypes and device that determine the bits of one matrix's step. The methods compute parts of the step.

    Attributes:
        settings: Options of the matrix's parameter group.
        choice: Orthogonalization method and its options.
        products: Dtype to which matrix products are rounded.
        wire: Dtype in which ranks send the orthogonalizer's input and result to each other.
        weights, gradient: Dtypes of the parameter and of its gradient.
        momentum: Dtype in which the momentum is computed.
        stored: Dtype of the stored momentum; int8 if momentum is stored as 8-bit codes.
        device: Device that orthogonalizes the matrix; None for the device that stores the matrix.
        rounding: If half-precision weights are rounded stochastically, a tuple with the stream of random bits and the
            index of the matrix in its parameter. If weights are rounded to nearest, None.
    """

    settings: Settings
    choice: Choice
    products: torch.dtype
    wire: torch.dtype
    weights: torch.dtype
    gradient: torch.dtype
    momentum: torch.dtype
    stored: torch.dtype
    device: torch.device | None = None
    rounding: tuple[Stream, int] | None = None

    def __str__(self) -> str:
        return f"{self.choice.method} {str(self.products).removeprefix('torch.')}"

    @property
    def unchecked(self) -> list[str]:
        """Names of the Muon variant's stages (operations added to the step) for which this module has no formula."""
        return [type(stage).__name__ for stage in self.settings.stages if type(stage) not in _FORMULAS]

    @property
    def weight_stages(self) -> list[WeightStage]:
        """The Muon variant's stages (operations added to the step) that run on the weights, in order."""
        return [stage for stage in self.settings.stages if isinstance(stage, WeightStage)]

    @property
    def _decay_factor(self) -> float:
        return 1 - self.settings.lr * self.settings.weight_decay

    def momentum_after(
        self,
        buffer: Tensor,  # (rows, cols) momentum before the step, in a dtype at least as wide as in the audited step
        grad: Tensor,  # (rows, cols) gradient, in a dtype at least as wide as in the audited step
    ) -> tuple[Tensor, Tensor]:  # two (rows, cols) tensors, in the dtypes `momentum` and `wire`
        """Compute the new momentum, not yet rounded for storage, and the orthogonalizer's input, not yet changed by
        operations that a Muon variant adds to the step.

        Both are bitwise equal to the values in the audited step, because the elementwise operation `lerp` does not
        depend on the sharding.
        """
        s, grad = self.settings, grad.to(self.gradient).to(self.momentum)
        after = torch.lerp(buffer.to(self.momentum), grad, 1 - s.momentum)
        return after, (torch.lerp(grad, after, s.momentum) if s.nesterov else after).to(self.wire)

    def prepared(self, fed: Tensor) -> Tensor:  # (rows, cols)
        """Apply the operations that the Muon variant (such as MuonEq) runs before the orthogonalizer, with the same
        code as the audited step."""
        before = [stage for stage in self.settings.stages if isinstance(stage, BeforeStage)]
        if before:
            fed = fed.to(torch.promote_types(fed.dtype, torch.float32), copy=True)
        for stage in before:
            stage.run_(fed.unsqueeze(0))
        return fed

    def orthogonalized(
        self,
        matrices: Tensor,  # (B, rows, cols), any dtype
        *,
        # True if the matrices were slightly perturbed. They are then kept in at least fp32, because rounding to the
        # dtype `wire` would undo the perturbation.
        nudged: bool = False,
    ) -> Tensor:  # (B, rows, cols) fp64
        """Orthogonalize whole matrices in the arithmetic of the audited step. The result is rounded to the dtype
        `wire`, unless the Muon variant adds an operation that runs on the result before ranks send it.

        A batch takes hardly longer than a single matrix, which would be padded to a batch, and each matrix has the same
        bits in both."""
        s, c = self.settings, self.choice
        # Ranks send the orthogonalizer's input in the dtype `wire`. Operations that a Muon variant runs before the
        # orthogonalizer are applied after this exchange, so their results are not rounded to `wire`.
        wide = nudged or any(isinstance(stage, BeforeStage) for stage in s.stages)
        x = matrices.to(
            self.device or matrices.device, torch.promote_types(self.wire, torch.float32) if wide else self.wire
        )
        out: Tensor = orthogonalize(x.contiguous(), s.coefficients, method=c.method, dtype=c.dtype)
        # Ranks send the orthogonalizer's result in the dtype `wire`. Operations that a Muon variant runs after the
        # orthogonalizer are applied before this exchange, so their input is not rounded to `wire`.
        after = any(isinstance(stage, AfterStage) for stage in s.stages)
        return (out if after else out.to(self.wire)).to(matrices.device, torch.float64)

    def staged(
        self,
        place: type[Stage],  # class of the stages to apply: BeforeStage, AfterStage or WeightStage
        matrix: Tensor,  # (rows, cols)
        kept: _Kept,
        without: Stage | None = None,  # stage of the Muon variant to skip; None to run all stages
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Apply the formulas of some of the stages, the operations that a Muon variant adds to the step. `place`
        selects the stages that run before the orthogonalizer, after it, or on the weights.

        Returns:
            A tuple (factor, matrix, kept). `factor` is the product of the stages' factors, in fp64. `matrix` is the
            resulting (rows, cols) matrix, rounded after each stage as in the audited step. `kept` is a copy of the
            argument `kept`, updated with the new values that the stages store.
        """
        factor, kept = matrix.new_ones((), dtype=torch.float64), dict(kept)
        wide = torch.promote_types(matrix.dtype, torch.float32)
        for stage in self.settings.stages:
            if isinstance(stage, place) and stage is not without:
                own, numbers = _FORMULAS[type(stage)](stage, matrix, kept.get(stage.key, matrix))
                if stage.key:
                    kept[stage.key] = numbers
                factor = factor * own
                matrix = (matrix.to(wide) * own.to(wide)).to(matrix.dtype)
        return factor, matrix, kept

    def norms(self, weights: Tensor) -> dict[str, Tensor]:
        """Compute the norm of the given weights, which each of `weight_stages` stores in its first step. Return a dict
        from the key of each stage to the norm, a (1,) fp64 tensor."""
        return {stage.key: _norm_of(weights) for stage in self.weight_stages}

    def weights_after(
        self,
        before: Tensor,  # (rows, cols) weights
        update: Tensor,  # (rows, cols) update, rounded to the dtype `wire`
        scale: float,
    ) -> Tensor:  # (rows, cols), in the weights' dtype
        """Compute the weights after an update, with the same weight decay and rounding as in the audited step."""
        s, weights = self.settings, before.to(self.weights)
        if self.choice.method == "torch" and self.rounding is None and not s.cautious:
            update = update.to(weights.device, self.wire)
            # Half-precision results depend on the strides of the update, so use the same strides as torch.optim.Muon.
            if update.shape[0] > update.shape[1]:
                update = update.mT.contiguous().mT
            return weights.mul(self._decay_factor).add_(update, alpha=-s.lr * scale)
        wide = weights.to(torch.promote_types(self.weights, torch.float32))
        update = update.to(wide.device, wide.dtype)
        if s.weight_decay:
            decayed = wide * self._decay_factor
            wide = torch.where(update * wide > 0, decayed, wide) if s.cautious else decayed
        wide = wide.add(update, alpha=-s.lr * scale)
        if self.rounding is None:
            return wide.to(self.weights)
        stream, matrix = self.rounding
        return stream.round(Patch.rectangle(matrix, 0, 0, *wide.shape), wide)

    def recovered_update(
        self,
        before: Tensor,  # (rows, cols) fp64
        after: Tensor,  # (rows, cols) fp64
        scale: float,
        # (rows, cols) fp64 expected update, used where rounding hides whether an element decayed
        expected: Tensor,
    ) -> Tensor:
        """Recover a step's update from the weights before and after it: (decay * before - after) / (lr * scale)."""
        alpha = self.settings.lr * scale
        decayed = (before * self._decay_factor).sub_(after).div_(alpha)
        if not self.settings.cautious:
            return decayed
        # Cautious decay applies only to elements whose update and weight have the same sign. Of the two candidates for
        # an element's update, with and without decay, at most one is consistent with this rule.
        kept = (before - after).div_(alpha)
        found = torch.where(decayed * before > 0, decayed, kept)
        open_ = (decayed * before <= 0) & (kept * before > 0)
        return torch.where(open_ & ((decayed - expected).abs() < (kept - expected).abs()), decayed, found)


# ------------------------------------------------------------------------------------------------ stages of variants

# Formulas of stages, the operations that Muon variants add to a step. Each formula is a function that takes a stage, a
# matrix, and the values that the stage has stored for the matrix. It returns two fp64 tensors: the factor by which the
# stage multiplies the matrix, broadcastable to the matrix's shape, and the new values that the stage stores.


def _equal_rows(stage: Stage, n: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    norms = n.norm(dim=1, keepdim=True)
    return torch.where(norms > 0, 1 / (norms * (norms > 0).sum(dtype=n.dtype).sqrt()), 1.0), kept


def _normuon(stage: Any, o: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    along = 1 if o.shape[0] >= o.shape[1] else 0
    v = stage.beta2 * kept + (1 - stage.beta2) * o.pow(2).mean(along)
    factor = v.clamp(min=1e-10).pow(-0.5).unsqueeze(along)
    return factor * (o.norm() / (o * factor).norm()), v


def _on_sphere(stage: Stage, o: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(radius > 0, radius / o.norm(), 1.0), radius


def _norm_restored(stage: Stage, weights: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    norm = _norm_of(weights)
    radius = torch.where(radius > 0, radius, norm)
    return torch.where(norm > 0, radius / norm, 1.0), radius


_FORMULAS: dict[type[Stage], Callable[[Stage, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    MuonEq: _equal_rows,
    NorMuon: _normuon,
    HyperballUpdate: _on_sphere,
    HyperballWeight: _norm_restored,
}


def _norm_of(matrix: Tensor) -> Tensor:  # (1,)
    """Compute the Frobenius norm in fp64 and round it to fp32, as an optimizer step does (see [Note: norms of whole
    matrices] in step/stages.py). The result is an fp64 tensor."""
    norm: Tensor = torch.linalg.vector_norm(matrix, dtype=torch.float64)
    return norm.float().double().view(1)


# ------------------------------------------------------------------------------------------------- exact arithmetic


class Reference:
    """Result of the Newton-Schulz iteration on one whole (unsharded) matrix. It is computed in fp64 and serves as the
    result in exact arithmetic.

    Args:
        matrix: (rows, cols) matrix of finite elements.
        coefficients: Coefficients (a, b, c) of each Newton-Schulz step.
        method: Orthogonalization method. It matters only for a matrix whose norm is smaller than TORCH_EPS: the method
            "torch" divides such a matrix by TORCH_EPS instead of its norm.

    Attributes:
        tall: True if the matrix has more rows than columns. In this case, the other attributes describe its transpose.
        vectors: (m, m) left singular vectors, one per column.
        sigmas: (m,) singular values of the normalized matrix, ascending.
        coords: (m, n) normalized matrix in the basis of the left singular vectors.
    """

    def __init__(
        self, matrix: Tensor, coefficients: Sequence[tuple[float, float, float]], method: str = "standard"
    ) -> None:
        self.coefficients, self.tall = coefficients, matrix.shape[0] > matrix.shape[1]
        x = (matrix.T if self.tall else matrix).to(torch.float64)
        tiny = torch.finfo(torch.float64).tiny
        peak = x.abs().amax().clamp(min=tiny)
        x = x / peak  # Without the division by `peak`, squares of tiny or huge elements could underflow or overflow.
        least = TORCH_EPS / peak if method == "torch" else torch.zeros_like(peak)
        x.div_(torch.maximum(torch.linalg.vector_norm(x), least).clamp(min=tiny))
        values, self.vectors = torch.linalg.eigh(x @ x.T)
        self.sigmas, self.coords = values.clamp(min=0.0).sqrt(), self.vectors.T @ x

    def seen(self, matrix: Tensor) -> Tensor:  # (rows, cols) -> (m, n)
        """Express a matrix, or its transpose if `tall` is True, in the basis `vectors`: the left singular vectors of
        the matrix for which this object was made. The result has the dtype of `matrix`."""
        return self.vectors.T.to(matrix.dtype) @ (matrix.T if self.tall else matrix)  # type: ignore[no-any-return]

    def ratios(self, longer: float = 1.0) -> Tensor:  # (m,)
        """Compute the factor by which the Newton-Schulz steps together multiply each singular value in `sigmas`. If
        `longer` is not 1, the normalized matrix is first divided by `longer`, and the factor includes this division."""
        ratios = torch.ones_like(self.sigmas)
        for a, b, c in self.coefficients:
            square = (self.sigmas / longer * ratios).square()
            ratios = ratios * (a + b * square + c * square.square())
        return ratios / longer


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Compute ||found - expected|| / ||expected|| in fp64. Return 0 for equal tensors, even if both are zero."""
    if torch.equal(found, expected):
        return 0.0
    exact = expected.double()
    # The relative error is infinite if `expected` is zero, because `found` then differs from zero.
    return float((found.double() - exact).norm() / exact.norm())
