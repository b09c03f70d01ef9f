"""Judge one matrix of a step: what the weights and the momentum did.

[Note: two comparisons]
    The applied update is compared with the same arithmetic run densely (same.py): only the order of sums may differ, so
    nearly always the bits are the same. It finds whatever is wrong with what was fed in, with the way there and back,
    with scale and weights. That dense result is compared with exact arithmetic (reference.py), which finds an
    orthogonalizer that is wrong in itself. How far rounding may lead either apart, the matrix itself says: evidence.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shardmuon.auditing import norms, same, stages
from shardmuon.auditing.evidence import ALL, FIRST, TIMES, Compared, Evidence, Measure
from shardmuon.auditing.reference import momentum_of, reference_of, relative_difference, singular_values
from shardmuon.auditing.report import Finding, MatrixRow

BLIND = 0.5  # an allowed difference above this cannot tell an update from a wrong one
_CODE_STEP = 2 / 127 * 6.2**0.5 / 2  # half of the bound: `_judge_momentum` allows two


@dataclass
class Judged:
    """A matrix with its verdict; `compared` is None where there was nothing to compare."""

    evidence: Evidence
    row: MatrixRow
    findings: list[Finding] = field(default_factory=list)
    compared: Compared | None = None

    @property
    def differs(self) -> bool:
        """True if the update is not the dense one, for a reason still to be named."""
        return self.row.status == "fault" and self.compared is not None


def judge(e: Evidence) -> Judged:
    """Compare a step of one matrix with the reference. Names no causes: `naming.name_fault` does."""
    tensors = {"weights": e.before, "momentum": e.buffer, "gradient": e.grad, "updated weights": e.after}
    bad = [
        name for name, value in tensors.items() if not math.isfinite(float(torch.linalg.vector_norm(value, math.inf)))
    ]
    if bad:
        finding = Finding(
            "not_finite",
            e.sample.name,
            f"NaN or infinity in {', '.join(bad)}",
            "finite numbers",
            "Skip steps whose gradients are not finite, and return to a checkpoint from before the first one",
        )
        return Judged(e, e.sample.row("fault", expected_scale=e.scale), [finding])
    e = replace(e, kept={**e.kept, **norms.started(e)})
    expected, fed = momentum_of(e.buffer, e.grad, e.before, e.sample.settings)
    findings, momentum = _judge_momentum(e, expected, fed)
    findings += norms.judge_before(e)
    frozen = e.sample.settings.lr * e.scale == 0.0
    if frozen or not bool(fed.any()):
        status = "lr is 0" if frozen else "zero"
        return Judged(e, e.sample.row(status, expected_scale=e.scale, **momentum), findings + _judge_still(e))
    travelled = same.fed(e.buffer, e.grad, e.before, e.sample.arithmetic, e.sample.settings)
    live = stages.prepared(travelled, e.sample.settings.stages)
    if live is not travelled:
        findings += _judge_prepared(e, travelled, live)
    return _verdict(e, _compared(e, live), findings, momentum)


def _compared(e: Evidence, live: Tensor) -> Compared:
    a, s = e.sample.arithmetic, e.sample.settings
    reference = reference_of(live, s.coefficients, method="gram" if a.by_gram else a.method, eps=s.eps)
    dense = e.orthogonalized(live)
    return Compared(e, live, dense, e.stepped(dense), reference)


def _judge_still(e: Evidence) -> list[Finding]:
    """Check a step that applies nothing: the weights may decay and no more."""
    step, eps = e.stepped(torch.zeros_like(e.before), torch.ones(())), torch.finfo(e.sample.arithmetic.weight_dtype).eps
    left = float((e.after - step.after).norm())
    roundings = eps + (2 * norms.EPS if step.applied.on_weights is not None else 0.0)
    allowed = roundings * (float(e.before.norm()) + float(e.after.norm()))
    if left <= allowed + 1e-12:
        return []
    return [
        Finding(
            "update_differs",
            e.sample.name,
            f"nothing was to be applied, but the weights differ by {left:.1e} from decayed ones",
            f"{allowed:.1e}",
            "Something else writes to these weights between the beginning and the end of step()",
        )
    ]


def _judge_prepared(e: Evidence, fed: Tensor, live: Tensor) -> list[Finding]:
    """The live stages' input of the orthogonalizer beside the formulas'."""
    difference = relative_difference(live.double(), stages.by_formula(fed, e.sample.settings.stages))
    # each element: the factor and the product, rounded once for each stage
    allowed = 2 * torch.finfo(live.dtype).eps * len(e.sample.settings.stages) + 2.0**-45
    if difference <= allowed:
        return []
    text = f"what its variant feeds to the orthogonalizer differs by {difference:.2g} from the formula in fp64"
    return [Finding("variant_wrong", e.sample.name, text, f"{allowed:.1e}", norms.STAGE)]


def _judge_kept(c: Compared) -> list[Finding]:
    """Compare the numbers that stages keep after the step with the formulas'."""
    e, findings = c.evidence, []
    for key, expected in c.step.applied.kept.items():
        found, size = e.kept_after[key], max(float(expected.abs().sum()), 1e-300)
        difference = float((found - expected).abs().sum())
        # a mean of squares and the average, in fp32
        allowed = (math.sqrt(max(e.before.shape) / 6) + 2 * norms.ROUNDINGS) * norms.EPS * size
        if difference > allowed:
            allowed += TIMES * max(float((run.kept[key] - expected).abs().sum()) for run in c.in_other_orders(ALL))
        if difference > allowed:
            unchanged = ": it is that of before the step" if torch.equal(found, e.kept[key]) else ""
            text = f"its {key} after the step differs by {difference / size:.2g} from the formula in fp64{unchanged}"
            findings.append(Finding("kept_wrong", e.sample.name, text, f"{allowed / size:.1e}", norms.STAGE))
    return findings


def _asked(spread: Callable[[int], tuple[Measure, float]], difference: Tensor) -> tuple[float, float]:
    """A difference and what is allowed: by few shaken runs if these explain it, else by all."""
    found = allowed = 0.0
    for count in (FIRST, ALL):
        measure, allowed = spread(count)
        found = measure(difference)
        if found <= allowed:
            break
    return found, allowed


def _judge_dense(c: Compared) -> list[Finding]:
    """Compare the same arithmetic's result with the exact one. Where the largest singular value settles its direction,
    a result that is off by all of it is wrong, even if its shaken runs are, too, each in another way."""
    e = c.evidence
    found, allowed = _asked(c.orthogonalizer, c.error)
    if allowed > BLIND:
        if not c.reference.settles(torch.finfo(e.sample.arithmetic.products).eps):
            return []
        found, allowed = float(c.error[-1].norm() / c.exact[-1].norm().clamp(min=1e-30)), 1.0
    if found <= allowed:
        return []
    return [
        Finding(
            "orthogonalizer_wrong",
            e.sample.name,
            f"{e.sample.arithmetic} run by itself on the whole matrix differs from exact arithmetic by {found:.2g} in "
            "the directions that rounding leaves settled",
            f"{allowed:.1e} ({e.sample.arithmetic}, this very matrix shaken)",
            "The orthogonalizer itself is wrong, or what it calls: run `shardmuon verify`, try another "
            "`Orthogonalizer.method`, and look for what replaces torch's products",
        )
    ]


def _status(c: Compared) -> tuple[str, float, float]:
    """The verdict with the difference and what is allowed; of equal bits what is allowed beside exact arithmetic."""
    if torch.equal(c.evidence.after, c.step.after):
        return "ok", 0.0, c.orthogonalizer(FIRST)[1]
    difference, allowed = _asked(c.spread, c.seen(c.update - c.arrived))
    if allowed > BLIND:
        return "inconclusive", difference, allowed
    return ("ok" if difference <= allowed else "fault"), difference, allowed


def _verdict(e: Evidence, c: Compared, findings: list[Finding], momentum: dict[str, float]) -> Judged:
    status, difference, allowed = _status(c)
    of_norm = norms.judge_after(c)
    findings = [*findings, *of_norm, *_judge_dense(c), *_judge_kept(c)]
    results, applied = (c.reference.sigmas * c.reference.ratios()).abs(), singular_values(c.update)
    arrived = along(c.arrived, c.dense)
    if arrived < 1 - BLIND:
        findings.append(_swallowed(e, arrived))
    row = e.sample.row(
        status,
        compared=True,
        difference=difference,
        allowed=allowed,
        scale=along(c.update, c.arrived) * e.scale,
        expected_scale=e.scale,
        sigma_min=float(applied[0]),
        sigma_max=float(applied[-1]),
        band=(float(results.amin()), float(results.amax())),
        **momentum,
    )
    return Judged(e, row, findings, None if of_norm else c)  # what is named needs no other name


def along(update: Tensor, expected: Tensor) -> float:
    """Length of an update along the expected one, relative; rounding, which has no direction, hardly moves it."""
    energy = float(expected.square().sum())
    return float((update * expected).sum()) / energy if energy else 1.0


def _judge_momentum(e: Evidence, expected: Tensor, fed: Tensor) -> tuple[list[Finding], dict[str, float]]:
    size, stored = float(expected.norm()), e.sample.arithmetic.stored_dtype
    # Storing rounds each element once, by at most an eps. 8-bit codes ([Note: 8-bit codes] in momentum/stores.py) step
    # by 2 sqrt(|x| s) / 127 at x in a block of scale s: over a block of 128 with one large element at most 2 / 127 *
    # sqrt(6.2) of its norm. The gradient is rounded to the momentum's dtype, and so are the two terms of its update.
    rounded = _CODE_STEP if stored == torch.int8 else torch.finfo(stored).eps
    terms = max(float(e.buffer.norm()), float(e.grad.norm()), size)
    allowed = 2 * rounded * (terms / size if size else 1.0) + 1e-12
    difference = relative_difference(e.buffer_after, expected) if size else float(e.buffer_after.norm())
    numbers = {"momentum_difference": difference, "momentum_allowed": allowed}
    if difference <= allowed:
        return [], numbers
    norm = float(e.buffer_after.norm())
    normalized = sine(e.buffer_after, expected) < 0.05 or sine(e.buffer_after, fed) < 0.05
    close_to = e.orthogonalized(fed) if bool(fed.any()) else fed
    name, what = "momentum_wrong", f"it differs from B + (1 - mu) (G - B) by {difference:.1e} of its norm"
    if torch.equal(e.buffer_after, e.buffer):
        what = "it did not change"
    elif (normalized and abs(norm - 1.0) < 0.1) or sine(e.buffer_after, close_to) < 0.1:
        name = "momentum_written_in_place"
        what = f"its norm went from {size:.3g} to {norm:.3g}: it holds a result of the orthogonalizer"
    remedy = "The orthogonalizer must not write to its input; nothing but the step may write to the momentum"
    return [
        Finding(name, e.sample.name, f"momentum after the step: {what}", f"a difference of {allowed:.1e}", remedy)
    ], numbers


def _swallowed(e: Evidence, ratio: float) -> Finding:
    return Finding(
        "update_lost_to_rounding",
        e.sample.name,
        f"{100 * max(0.0, ratio):.0f}% of the update arrived: {e.sample.arithmetic.weight_dtype} weights are too "
        f"coarse for lr={e.sample.settings.lr:g}",
        "at least half of it",
        "Keep the weights in float32 or raise the learning rate",
        "warning",
    )


def sine(first: Tensor, second: Tensor) -> float:
    """Sine of the angle between two tensors, 1 if one of them is zero; opposite ones are far apart, too."""
    norms = float(first.norm()) * float(second.norm())
    if not norms:
        return 1.0
    unit, other = first / first.norm(), second / second.norm()
    return float((unit - other * (unit * other).sum()).norm()) if float((unit * other).sum()) > 0 else 1.0
