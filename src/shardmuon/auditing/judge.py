"""Judge one matrix of a step: what the weights and the momentum did, against the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardmuon.auditing.dense import MatrixPieces
from shardmuon.auditing.reference import (
    Reference,
    momentum_of,
    recovered_update,
    reference_of,
    relative_difference,
    tolerance,
)
from shardmuon.auditing.report import Finding, MatrixRow
from shardmuon.pipeline import Settings

BLIND = 0.5  # an allowed difference above this cannot tell an update from a wrong one: coarser checks are left
_NUM_SHOWN = 128
_CODE_STEP = 2 / 127 * 6.2**0.5 / 2  # half of the bound: `_judge_momentum` allows two


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How a matrix was orthogonalized, and in what it is stored.

    Attributes:
        method, ns_dtype: The orthogonalizer and the dtype of its products.
        wire_dtype: What travels between ranks.
        weight_dtype: Of the parameter.
        momentum_dtype: In which the momentum is computed; what is orthogonalized was rounded to it.
        stored_dtype: In which the momentum is stored; int8 stands for 8-bit codes.
    """

    method: str
    ns_dtype: torch.dtype
    wire_dtype: torch.dtype
    weight_dtype: torch.dtype
    momentum_dtype: torch.dtype
    stored_dtype: torch.dtype

    @property
    def coarsest(self) -> torch.dtype:
        """The dtype whose rounding dominates. The input was rounded to the momentum's and to the wire's."""
        return max(self.ns_dtype, self.wire_dtype, self.momentum_dtype, key=lambda d: torch.finfo(d).eps)

    def __str__(self) -> str:
        return f"{self.method} {str(self.ns_dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class Evidence:
    """One whole matrix around a step, in fp64, and how it was meant to be stepped.

    Attributes:
        scale: Factor on lr by the global shape.
        scales: (rows, cols) that a rank stores -> the scale that it would give, and that must not be used.
    """

    name: str
    order: tuple[int, int]
    owners: tuple[int, ...]
    route: str
    arithmetic: Arithmetic
    settings: Settings
    scale: float
    scales: dict[tuple[int, int], float]
    pieces: MatrixPieces
    before: Tensor  # weights
    buffer: Tensor  # momentum before
    grad: Tensor
    after: Tensor  # weights
    buffer_after: Tensor


@dataclass
class Judged:
    """A matrix with its verdict; `update` and `reference` are None where there was nothing to compare."""

    evidence: Evidence
    row: MatrixRow
    findings: list[Finding] = field(default_factory=list)
    update: Tensor | None = None
    reference: Reference | None = None
    fed: Tensor | None = None  # what should have been orthogonalized

    @property
    def differs(self) -> bool:
        """Whether the update is not the reference's, for a reason still to be named."""
        return self.row.status == "fault" and self.update is not None


def judge(e: Evidence) -> Judged:
    """Compare a step of one matrix with the reference. Names no causes: `naming.name_fault` does."""
    tensors = {"weights": e.before, "momentum": e.buffer, "gradient": e.grad, "updated weights": e.after}
    bad = [name for name, value in tensors.items() if not bool(value.isfinite().all())]
    if bad:
        finding = Finding(
            "not_finite",
            e.name,
            f"NaN or infinity in {', '.join(bad)}",
            "finite numbers",
            "Skip steps whose gradients are not finite, and return to a checkpoint from before the first one",
        )
        return Judged(e, _row(e, "fault"), [finding])
    expected, fed = momentum_of(e.buffer, e.grad, e.before, e.settings)
    findings, momentum = _judge_momentum(e, expected, fed)
    if e.settings.lr * e.scale == 0.0:
        return Judged(e, _row(e, "lr is 0", **momentum), findings)
    if not bool(fed.any()):
        return Judged(e, _row(e, "zero", **momentum), findings + _judge_zero(e))
    reference = reference_of(fed, e.settings.coefficients, method=e.arithmetic.method, eps=e.settings.eps)
    update = recovered_update(e.before, e.after, e.settings, e.scale, reference.update)
    return _compare(e, reference, update, fed, findings, momentum)


def _compare(
    e: Evidence, reference: Reference, update: Tensor, fed: Tensor, findings: list[Finding], momentum: dict[str, float]
) -> Judged:
    results = reference.results.sort().values
    short = update.T if update.shape[0] > update.shape[1] else update
    applied = torch.linalg.eigvalsh(short @ short.T).clamp(min=0.0).sqrt()
    lost = _weight_noise(e, reference.update)
    allowed = tolerance(e.arithmetic.method, e.arithmetic.coarsest) * reference.sensitivity + lost
    difference = relative_difference(update, reference.update)
    energy = float(reference.update.square().sum())
    ratio = float((update * reference.update).sum()) / energy if energy else 1.0
    status = "ok" if difference <= allowed else "fault"
    if status == "ok" and allowed > BLIND:
        slack = (
            2 * lost * float(reference.update.norm()) / len(applied) ** 0.5
        )  # rounding is noise: it has no direction
        fits = abs(ratio - 1) <= BLIND and float(applied[-1]) <= (1 + BLIND) * max(1.0, float(results[-1])) + slack
        swallowed = lost > BLIND and ratio < 1 - BLIND
        status = "blind" if fits or swallowed else "fault"
        findings = findings + ([_swallowed(e, ratio)] if swallowed else [])
    polar = float(reference.polar.norm())
    row = _row(
        e,
        status,
        compared=True,
        difference=difference,
        allowed=allowed,
        scale=ratio * e.scale,
        sigma_min=float(applied[0]),
        sigma_max=float(applied[-1]),
        band=(float(results.abs().min()), float(results.abs().max())),
        orthogonality=_orthogonality(applied),
        expected_orthogonality=_orthogonality(results),
        polar_distance=relative_difference(update, reference.polar) if polar else 0.0,
        expected_polar_distance=relative_difference(reference.update, reference.polar) if polar else 0.0,
        sigmas=_shown(reference.sigmas),
        results=_shown(reference.results),
        applied=_shown(applied),
        **momentum,
    )
    return Judged(e, row, findings, update, reference, fed)


def momentum_tolerance(stored: torch.dtype) -> float:
    """Relative difference that storing a momentum in this dtype makes: one rounding of each element, at most an eps.

    8-bit codes (momentum.py, [Note: 8-bit codes]) step by 2 sqrt(|x| s) / 127 at x in a block of scale s. Over a block
    of 128 with one large element that is at most 2 / 127 * sqrt(6.2) of its norm.
    """
    return _CODE_STEP if stored == torch.int8 else torch.finfo(stored).eps


def _judge_momentum(e: Evidence, expected: Tensor, fed: Tensor) -> tuple[list[Finding], dict[str, float]]:
    size = float(expected.norm())
    # The gradient is rounded to the momentum's dtype, and so are the two terms of its update.
    terms = max(float(e.buffer.norm()), float(e.grad.norm()), size)
    allowed = 2 * momentum_tolerance(e.arithmetic.stored_dtype) * (terms / size if size else 1.0) + 1e-12
    difference = relative_difference(e.buffer_after, expected) if size else float(e.buffer_after.norm())
    numbers = {"momentum_difference": difference, "momentum_allowed": allowed}
    if difference <= allowed:
        return [], numbers
    norm = float(e.buffer_after.norm())
    normalized = sine(e.buffer_after, expected) < 0.05 or sine(e.buffer_after, fed) < 0.05
    close_to = reference_of(fed, e.settings.coefficients, method=e.arithmetic.method).update if bool(fed.any()) else fed
    name, what = "momentum_wrong", f"it differs from B + (1 - mu) (G - B) by {difference:.1e} of its norm"
    if torch.equal(e.buffer_after, e.buffer):
        what = "it did not change"
    elif (normalized and abs(norm - 1.0) < 0.1) or sine(e.buffer_after, close_to) < 0.1:
        name = "momentum_written_in_place"
        what = f"its norm went from {size:.3g} to {norm:.3g}: it holds a result of the orthogonalizer"
    remedy = "The orthogonalizer must not write to its input; nothing but the step may write to the momentum"
    return [
        Finding(name, e.name, f"momentum after the step: {what}", f"a difference of {allowed:.1e}", remedy)
    ], numbers


def _judge_zero(e: Evidence) -> list[Finding]:
    """Nothing to orthogonalize: the weights may decay and no more."""
    left = recovered_update(e.before, e.after, e.settings, e.scale, torch.zeros_like(e.before))
    noise = 2 * torch.finfo(e.arithmetic.weight_dtype).eps * float(e.before.norm()) / (e.settings.lr * e.scale)
    if float(left.norm()) <= noise + 1e-12:
        return []
    return [
        Finding(
            "update_differs",
            e.name,
            f"gradient and momentum are zero but an update of norm {float(left.norm()):.1e} was applied",
            "none",
            "Something else writes to these weights between the beginning and the end of step()",
        )
    ]


def _weight_noise(e: Evidence, update: Tensor) -> float:
    """Relative error of a recovered update: weights are rounded when they are decayed and when the update is added."""
    size = torch.maximum(e.before.abs(), e.after.abs()).norm()
    alpha = abs(e.settings.lr * e.scale)
    return float(torch.finfo(e.arithmetic.weight_dtype).eps * size / (alpha * update.norm()).clamp(min=1e-300))


def _swallowed(e: Evidence, ratio: float) -> Finding:
    return Finding(
        "update_lost_to_rounding",
        e.name,
        f"{100 * max(0.0, ratio):.0f}% of the update arrived: {e.arithmetic.weight_dtype} weights are too coarse for "
        f"lr={e.settings.lr:g}",
        "at least half of it",
        "Keep the weights in float32 or raise the learning rate",
        "warning",
    )


def _row(e: Evidence, status: str, **found: object) -> MatrixRow:
    return MatrixRow(
        e.name,
        e.order,
        e.pieces.rows,
        e.pieces.cols,
        e.owners,
        e.route,
        str(e.arithmetic),
        status,
        expected_scale=e.scale,
        momentum_dtype=str(e.arithmetic.stored_dtype).removeprefix("torch."),
        **found,  # type: ignore[arg-type]
    )


def _orthogonality(sigmas: Tensor) -> float:
    return float((sigmas.square() - 1).square().mean().sqrt())


def _shown(values: Tensor) -> tuple[float, ...]:
    if len(values) > _NUM_SHOWN:
        values = values[torch.linspace(0, len(values) - 1, _NUM_SHOWN, device=values.device).round().long()]
    found: Sequence[float] = values.tolist()
    return tuple(found)


def sine(first: Tensor, second: Tensor) -> float:
    """Sine of the angle between two tensors, 1 if one of them is zero; opposite ones are far apart, too."""
    norms = float(first.norm()) * float(second.norm())
    if not norms:
        return 1.0
    unit, other = first / first.norm(), second / second.norm()
    return float((unit - other * (unit * other).sum()).norm()) if float((unit * other).sum()) > 0 else 1.0
