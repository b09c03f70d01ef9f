"""Judge one matrix of a step: what the weights and the momentum did.

[Note: two comparisons]
    The applied update is compared with the same arithmetic run densely (same.py): only the order of sums may differ, so
    this one is tight in any dtype, and finds whatever is wrong with what was fed in, with the way there and back, with
    scale and weights. That dense result is compared with exact arithmetic (reference.py): here the dtype and the
    schedule have their band, and this one finds an orthogonalizer that is wrong in itself. Both use noise.py's norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shardmuon.auditing import norm_rules, norms, same, variants
from shardmuon.auditing.evidence import Compared, Evidence
from shardmuon.auditing.noise import FEW, noise_of, order_units, rounding_units
from shardmuon.auditing.reference import (
    momentum_of,
    reference_of,
    relative_difference,
    singular_values,
)
from shardmuon.auditing.report import Finding, MatrixRow

BLIND = 0.5  # an allowed difference above this cannot tell an update from a wrong one
_SHAKEN = 4  # runs in another order; and how many times the largest difference among them is allowed
_NUM_SHOWN = 128
LAST_DIGIT = 1e-3  # of a singular value in a printed report
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
        """Whether the update is not the dense one, for a reason still to be named."""
        named = any(finding.name == "norm_of_shard" for finding in self.findings)
        return self.row.status == "fault" and self.compared is not None and not named


def judge(e: Evidence) -> Judged:
    """Compare a step of one matrix with the reference. Names no causes: `naming.name_fault` does."""
    tensors = {"weights": e.before, "momentum": e.buffer, "gradient": e.grad, "updated weights": e.after}
    bad = [name for name, value in tensors.items() if not _is_finite(value)]
    if bad:
        finding = Finding(
            "not_finite",
            e.name,
            f"NaN or infinity in {', '.join(bad)}",
            "finite numbers",
            "Skip steps whose gradients are not finite, and return to a checkpoint from before the first one",
        )
        return Judged(e, _row(e, "fault"), [finding])
    e = norms.started(e)
    expected, fed = momentum_of(e.buffer, e.grad, e.before, e.settings)
    findings, momentum = _judge_momentum(e, expected, fed)
    frozen = e.settings.lr * e.scale == 0.0
    if frozen or not bool(fed.any()):
        wrong, on_weights = norms.judge_norms(e, e.updated(torch.zeros_like(e.before)), 0.0, 0.0)
        e = replace(e, on_weights=on_weights)
        wrong += [] if frozen else _judge_zero(e)
        return Judged(e, _row(e, "lr is 0" if frozen else "zero", **momentum), findings + wrong)
    e, compared, faulty = _compared(e)
    return _verdict(e, compared, findings + faulty, momentum)


def _is_finite(value: Tensor) -> bool:
    """A sum that is finite says so of all its terms; one that is not may have left the range."""
    return math.isfinite(float(value.sum())) or bool(value.isfinite().all())


def _compared(e: Evidence) -> tuple[Evidence, Compared, list[Finding]]:
    a, s = e.arithmetic, e.settings
    travelled = same.fed(e.buffer, e.grad, e.before, a, s)
    fed = variants.prepared(travelled, s.stages)
    findings = variants.judge_before(e.name, travelled, fed, s.stages) if fed is not travelled else []
    method = "gram" if a.by_gram else a.method
    dtype = fed.dtype if a.by_gram else a.ns_dtype
    half = torch.finfo(dtype).bits == 16
    reference = reference_of(fed, s.coefficients, method=method, eps=s.eps, coords=torch.float32 if half else None)
    noise = noise_of(reference, dtype, a.by_gram)
    dense = same.run(fed, a, s)
    wide = dense.to(torch.float64)
    rows, cols = fed.shape
    sources = noise.num_sources
    order = order_units(dtype, rows, cols, sources, method) / math.sqrt(sources)
    eps, wire_eps = torch.finfo(dtype).eps, torch.finfo(dense.dtype).eps
    size = float(wide.norm())
    rounded = order_units(dense.dtype, rows, cols, 1) * size if wire_eps > eps else 0.0
    spread = noise.frobenius(order, rounded) / math.sqrt(fed.numel())
    factor, kept = variants.after_stages(wide, s.stages, e.kept)
    e = replace(e, factor=factor)
    moved = variants.along_rows(noise.frobenius(order, rounded), fed.shape)
    findings += variants.judge_kept(e.name, kept, e.kept_after, moved / size)
    staged = e.staged(wide)
    updated = e.updated(dense if factor is None else staged)
    longer = float(staged.norm()) / size
    off = abs(s.lr * e.scale) * moved * longer  # of the norm of `updated`
    wrong, on_weights = norms.judge_norms(e, updated, off, _weights_off(e, spread * longer, 0.0, lambda value: value))
    e, findings = replace(e, on_weights=on_weights), findings + wrong
    after = norm_rules.scaled(updated, on_weights) if norm_rules.of_weights(s.stages) else updated
    extra = math.hypot(rounded, _weight_noise(e, spread, off), 0.0 if factor is None else moved)
    update = e.recovered(e.after, staged)
    alike = torch.equal(after.to(torch.float64), e.after)  # as nearly always in half precision
    arrived = update if alike else e.recovered(after, staged)
    exact = rounding_units(dtype, rows, cols, sources, method) / math.sqrt(sources)
    coarse = wire_eps / 2 * size if wire_eps > eps else 0.0
    if dtype == torch.float32:  # see `Compared.seen_in`
        coarse = math.hypot(coarse, order_units(dtype, min(rows, cols), min(rows, cols), 1) * size)
    found = Compared(
        update,
        fed.to(torch.float64),
        wide,
        arrived,
        reference,
        noise,
        order,
        extra,
        exact,
        coarse,
        dtype,
        a.by_gram,
    )
    return e, found, findings + _judge_dense(e, found)


def _judge_dense(e: Evidence, c: Compared) -> list[Finding]:
    """The same arithmetic's result beside the exact one."""
    if c.rounding > BLIND:  # errors are no small perturbation: other matrices tell
        return []
    least = c.noise.least(c.exact, c.coarse) * c.noise.size(c.exact, c.coarse)
    if float(c.error.norm()) <= least * c.rounding or c.inexact <= c.rounding:  # the first bounds the second, at less
        return []
    allowed = _shaken(e, c, c.exact, c.coarse, c.fed.numel()) if c.half else c.rounding
    allowed = min(c.beyond.rounding, allowed)
    if c.beyond.inexact <= allowed:
        return []
    return [
        Finding(
            "orthogonalizer_wrong",
            e.name,
            f"{e.arithmetic} run by itself on the whole matrix differs from exact arithmetic by "
            f"{c.beyond.inexact:.2g} in the directions that rounding leaves settled",
            f"{allowed:.1e} ({e.arithmetic}, this matrix's spectrum)",
            "The orthogonalizer itself is wrong, or what it calls: run `shardmuon verify`, try another "
            "`Orthogonalizer.method`, and look for what replaces torch's products",
        )
    ]


def _dealt(e: Evidence, c: Compared, seed: int, nudged: int = 0) -> Tensor:  # (rows, cols) fp64
    """The dense result with rows and columns in another order, which is that of the sums.

    Args:
        nudged: So many elements of the input are taken to a next value.
    """
    generator = torch.Generator().manual_seed(seed)
    rows, cols = (torch.randperm(n, generator=generator).to(c.fed.device) for n in c.fed.shape)
    fed = c.fed[rows][:, cols].contiguous()
    if nudged:
        at = torch.randperm(fed.numel(), generator=generator)[:nudged]
        by = torch.finfo(c.dtype).eps * (torch.rand(len(at), generator=generator, dtype=fed.dtype) - 0.5).sign()
        fed.view(-1)[at.to(fed.device)] *= 1 + by.to(fed.device)
    found = torch.empty_like(c.dense)
    found[rows.unsqueeze(1), cols] = e.orthogonalized(fed, nudged=nudged > 0)  # products may be finer than the wire
    return found


def _shaken(e: Evidence, c: Compared, unit: float, extra: float, nudged: int) -> float:
    """What is allowed by what rounding does to this very matrix, in half precision.

    [Note: the matrix is asked]
        The bounds beyond the first order are for the worst that rounding may have done on the way, and looser than
        those of the first order. So where these do not explain a difference, both are asked: the bound, and the matrix
        itself. It goes through the same arithmetic four times, with rows and columns in other orders and with elements
        of its input moved to a next value: those few that another order moves (noise.py) for the first comparison, all
        of them for the second, so that everything after is rounded anew. What is judged is one more run of that kind.
        If it differs by more than four times the largest of those four differences, rounding is not what made it.
    """
    size, largest = c.beyond.noise.size(unit, extra), 0.0
    for seed in range(_SHAKEN):
        moved = c.reference.seen(_dealt(e, c, seed, nudged) - c.dense)
        largest = max(largest, c.beyond.noise.measure(moved, unit, extra) / size)
    return min(_SHAKEN * largest, BLIND)


def _status(e: Evidence, c: Compared) -> tuple[str, float, float]:
    """The verdict with the difference and what is allowed."""
    if c.update is c.arrived or torch.equal(c.update, c.arrived):
        return "ok", 0.0, c.allowed
    difference, allowed = c.within(c.arrived), c.allowed
    if difference <= allowed / 2 and allowed <= BLIND:  # as nearly always in fp32
        return "ok", difference, allowed
    difference = c.distance(c.arrived)
    if allowed > BLIND:  # the bound says nothing: look at what order does to this matrix
        difference = relative_difference(c.update, c.arrived)
        allowed = max(BLIND, 4 * relative_difference(_dealt(e, c, 0), c.dense))
        if allowed > BLIND:
            return "blind", difference, allowed
    if difference > allowed and c.half and c.allowed <= BLIND:
        again = c.beyond.distance(c.arrived)
        bound = min(c.beyond.allowed, _shaken(e, c, c.order, c.extra, FEW))
        if again <= bound:
            return "ok", again, bound
    return ("ok" if difference <= allowed else "fault"), difference, allowed


def _verdict(e: Evidence, c: Compared, findings: list[Finding], momentum: dict[str, float]) -> Judged:
    status, difference, allowed = _status(e, c)
    results = c.reference.results.sort().values
    applied = _applied(e, c)
    ratio = 1.0 if c.update is c.arrived else along(c.update, c.arrived)
    arrived = along(c.arrived, c.dense)
    if arrived < 1 - BLIND:
        findings = [*findings, _swallowed(e, arrived)]
    present = c.reference.present.double().sum()
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
        polar_distance=_to_polar(c, applied, c.reference.seen(c.update) if status == "fault" else c.coords),
        expected_polar_distance=float(((results - 1) * (results != 0)).norm() / present.sqrt()),
        sigmas=_shown(c.reference.sigmas),
        results=_shown(c.reference.results),
        applied=_shown(applied),
        **momentum,
    )
    return Judged(e, row, findings, c)


def _applied(e: Evidence, c: Compared) -> Tensor:
    """Singular values of the applied update, ascending, for the report; to its last digit.

    Row i of the dense result, as seen, is p_i times a right singular vector plus row i of its error. So its length is
    |p_i| but for that row, and by Weyl the singular values are the |p_i| but for all of the error, and those of the
    update but for how far it is from the dense result. Where all of that is less than a digit, lengths will do.
    """
    if 2 * float(c.error.norm()) + float((c.update - c.dense).norm()) <= LAST_DIGIT:
        lengths: Tensor = torch.linalg.vector_norm(c.coords, dim=1, dtype=torch.float64)
        return lengths.sort().values
    return singular_values(c.update.to(_shown_dtype(e))).double()


def _shown_dtype(e: Evidence) -> torch.dtype:
    """Of the singular values that are shown and no verdict depends on."""
    return torch.float64 if e.arithmetic.ns_dtype == torch.float64 else torch.float32


def _to_polar(c: Compared, applied: Tensor, seen: Tensor) -> float:
    """Relative distance of the applied update to the polar factor, from their product."""
    count = float(c.reference.present.sum())
    common = float(((seen * c.reference.coords).sum(1) * c.reference.inverse).sum())
    return math.sqrt(max(0.0, float(applied.square().sum()) - 2 * common + count) / max(count, 1.0))


def along(update: Tensor, expected: Tensor) -> float:
    """Length of an update along the expected one, relative; rounding, which has no direction, hardly moves it."""
    energy = float(expected.square().sum())
    return float((update * expected).sum()) / energy if energy else 1.0


def momentum_tolerance(stored: torch.dtype) -> float:
    """Relative difference that storing a momentum in this dtype makes: one rounding of each element, at most an eps.

    8-bit codes ([Note: 8-bit codes] in momentum/stores.py) step by 2 sqrt(|x| s) / 127 at x in a block of scale s. Over
    a block of 128 with one large element that is at most 2 / 127 * sqrt(6.2) of its norm.
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
    close_to = e.orthogonalized(fed) if bool(fed.any()) else fed
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
    left = e.recovered(e.after, torch.zeros_like(e.before))
    size = float(e.before.norm()) + float(e.after.norm())  # at most doubled by rounding to the dtype, and by a factor's
    roundings = torch.finfo(e.arithmetic.weight_dtype).eps
    roundings += 2 * torch.finfo(torch.float32).eps if norm_rules.of_weights(e.settings.stages) else 0.0
    noise = roundings * size / (e.settings.lr * e.scale)
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


def _weight_noise(e: Evidence, spread: float, off: float = 0.0) -> float:
    """Norm of what rounding the weights may add to the update, if an element of that may differ by `spread`.

    The dense result is put into the weights as the step does it, so half-precision weights come out alike but for
    elements that a difference takes to the next value: one spacing apart with the probability difference / spacing.
    Their sum of squares has that mean; twice its root and one largest spacing are a bound. In fp32 and fp64, whose
    spacings hardly count, every element may differ by one.

    Stages on weights round a second time, and their factor may be another one: three roundings to fp32, and `off`, by
    how much the norm of the updated weights may differ.
    """
    return _weights_off(e, spread, off, lambda value: e.undone(value)) / abs(e.settings.lr * e.scale)


def _weights_off(e: Evidence, spread: float, off: float, unit: Callable[[Tensor], Tensor]) -> float:
    """The same of the weights times lr and scale, in other units: `unit` takes an element of the weights to them."""
    largest = torch.maximum(e.before.abs(), e.after.abs())
    held, dtype = bool(norm_rules.of_weights(e.settings.stages)), e.arithmetic.weight_dtype
    share = 3 * torch.finfo(torch.float32).eps + off / max(float(largest.norm()), 1e-300) if held else 0.0
    spacing, by_factor = unit(largest * torch.finfo(dtype).eps), unit(largest * share)
    if torch.finfo(dtype).bits > 16:
        return (1 + held) * float(spacing.norm()) + float(by_factor.norm())
    known = e.rounding is not None or not e.arithmetic.random_weights
    moved = torch.minimum(spacing, by_factor + abs(e.settings.lr * e.scale) * spread) if known else spacing
    return (1 + held) * (2 * float((spacing * moved).sum().sqrt()) + float(spacing.amax()))


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
