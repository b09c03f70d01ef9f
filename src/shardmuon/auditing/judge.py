"""Judge the step of one matrix: the update of its weights, its momentum, and the values that a variant's stages store.

[Note: two comparisons]
    First, the applied update is compared with the dense result: the same arithmetic, run on the whole matrix. Only the
    order of sums may differ, so the two are nearly always bitwise equal. This finds faults in the inputs, the
    communication, the scale and the update of the weights. Second, the dense result is compared with exact arithmetic,
    which finds a faulty orthogonalizer. How much rounding may change either result is measured on the matrix itself
    ([Note: the shake]).

[Note: the shake]
    The same arithmetic runs on several slightly perturbed ("shaken") versions of the input. The spread of the results
    shows how large a difference rounding can explain for this matrix. No theory of dtypes, methods, schedules or
    spectra is needed. A spacing is the distance between neighboring floating point numbers.

    Perturbations for the live step: rows and columns are permuted, which reorders the sums; a few elements move by one
    spacing; and all elements are scaled together by a few spacings of fp32 (at most `_TOGETHER`). The scaling is needed
    in two cases. A live stage may divide by norms once where the dense stage divides twice. And if all elements are
    equal (a matrix of ones), they round alike, so that a permutation changes nothing, although batched sums, which are
    split differently, do change. Each result is applied to the weights as in the step, so the spread includes the
    rounding in a variant's stages and in low-precision weights.

    Perturbations for the comparison with exact arithmetic: each element moves by up to a spacing, so that every product
    rounds differently, and the matrix gets a border that is zero except for two corners. The border enlarges the norm
    by up to `_LONGER`, so that elements round differently even if all are equal (a matrix of ones). The effect of the
    larger norm is known from exact arithmetic, and only the remaining error counts. (The border is on all sides. So an
    orthogonalizer that mirrors its result is compared with the same mirrored result, not with a shifted one.)

    The Newton-Schulz steps amplify rounding where a singular value is nearly zero: results may differ completely in
    that direction and hardly at all in others. So a difference is measured along each left singular vector of the
    reference. Its length in that direction is divided by the root mean square of the lengths of the differences that
    shaking causes. The largest of these ratios counts, relative to the largest such ratio for the result itself. In
    each direction, an error of at least one spacing of the result is assumed.

[Note: naming a fault]
    Known faults are simulated. A guess is the name of a fault, a description, and the (rows, cols) fp64 weights that a
    step with this fault would produce. It explains the wrong update if only a small fraction remains unexplained, both
    of the update and of its difference from the dense reference, measured by direction as in [Note: the shake]. The
    first guess that leaves almost nothing unexplained names the fault. If there is none, the guess that leaves the
    least does.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Generator, Tensor

from shardmuon.auditing.reference import Arithmetic, Reference, relative_error
from shardmuon.auditing.report import Finding, MatrixRow
from shardmuon.options import lr_scale
from shardmuon.orthogonalize import TORCH_EPS
from shardmuon.variants import AfterStage, BeforeStage, WeightStage, keeping

_T = TypeVar("_T")
_Block = tuple[slice, slice]
_Kept = Mapping[str, Tensor]  # key of a stage -> values that it stores
_Measure = Callable[[Tensor], float]
_MATRICES = ("weights", "momentum", "gradient")
_NORM = "norm"  # dict key for the norm of the weights; other keys belong to stages that store values
_FIRST, _ALL = 2, 16  # numbers of perturbed runs: at first, and before a fault is reported
_TIMES = 3.0  # allowed difference, as a multiple of the largest difference that perturbations cause
_BLIND = 0.5  # if the allowed difference is larger, a correct update cannot be distinguished from a wrong one
_SLACK = 0.2  # tolerance for singular values, because rounding changes them, and raises the smallest ones most
_FEW = 4  # number of elements that move by one spacing, as they would if sums had another order
_TOGETHER = 64  # maximum number of spacings by which all elements move together; with only 4, many runs round equally
_LONGER = 1 / 16  # largest relative increase of the norm in a perturbed run
_OWN = 1e-9  # relative error of the reference itself, which loses small values by squaring them in a Gram matrix
_CODE_STEP = 2 / 127 * 6.2**0.5 / 2  # half of the bound derived in `_judge_momentum`, which allows two of these
_EPS = torch.finfo(torch.float32).eps
_ROUNDINGS = 4  # roundings of a norm: the norm, the stored value, the factor, and its product with an element
_Guess = tuple[str, str, Tensor]


class _StepWith(NamedTuple):
    """The step of one matrix, computed from a given result of the orthogonalizer.

    Attributes:
        staged: (rows, cols) fp64 update, after all stages that change it.
        updated: Weights before the stages that change weights, in the weights' dtype.
        after: Weights after these stages, in fp64.
        factor, on_weights: Factors by which the stages after the orthogonalizer scale the update, and by which the
            weight stages scale the weights.
        numbers: Values that stages store after the step, and the norm of the weights if a stage controls it.
    """

    staged: Tensor
    updated: Tensor
    after: Tensor
    factor: Tensor
    on_weights: Tensor
    numbers: _Kept


class _Evidence:
    """One whole matrix before and after a step, the arithmetic of that step, and the dense step computed from them.

    Args:
        row: The matrix's row of the report; `judge` fills it in.
        arithmetic: The arithmetic of the matrix's step.
        blocks: Rectangles of the matrix that are each stored on one rank.
        whole: Quantity -> (2, n) fp64 values before and after the step. Quantities are "weights", "momentum",
            "gradient", and the key of each stage that stores values.

    Attributes:
        before, after: The quantities before and after the step: matrices as (rows, cols), values of stages as (n,).
        findings: Faults found so far.
        wrong: Faults whose causes are still unknown. Their names are those that apply if no known cause is found.
        momentum, given: Expected momentum after the step, and the orthogonalizer's input before any stage.
        fed: The orthogonalizer's input after the stages that precede it.
        reference: The reference in exact arithmetic.
        exact: The reference's result, (m, n) fp64, in the basis of the reference's left singular vectors.
        dense: The orthogonalizer's result for the whole matrix, in the arithmetic of the live step.
        step: The step of the weights computed from `dense`.
        update: The orthogonalizer's result, recovered from the live weights before and after the step.
        arrived: The orthogonalizer's result, recovered in the same way from the weights of `step`. It is `dense` with
            the precision that the weights can represent.
    """

    def __init__(self, row: MatrixRow, arithmetic: Arithmetic, blocks: list[_Block], whole: dict[str, Tensor]) -> None:
        self.arithmetic, self.settings, self.blocks = arithmetic, arithmetic.settings, blocks
        self.shape = row.rows, row.cols
        self.before, self.after = (
            {what: both[at].view(self.shape) if what in _MATRICES else both[at] for what, both in whole.items()}
            for at in (0, 1)
        )
        for key, norm in arithmetic.norms(self.before["weights"]).items():
            if not self.before[key]:  # not stored yet, or 0: the step uses the norm of the weights
                self.before[key] = norm
        self.scale = lr_scale(self.settings.adjust_lr_fn, *self.shape)
        self.row = replace(row, status="fault")
        self.findings, self.wrong = list[Finding](), list[Finding]()
        self._eps = torch.finfo(arithmetic.products).eps
        self._wide = torch.promote_types(arithmetic.products, torch.float32)
        self._runs = defaultdict[str, list[Any]](list)
        self.momentum, self.given = arithmetic.momentum_after(self.before["momentum"], self.before["gradient"])
        self.fed = arithmetic.prepared(self.given)

    def say(self, name: str, found: str, allowed: str) -> None:
        """Record a fault found in this matrix."""
        self.findings.append(Finding.of(name, self.row.name, found, allowed))

    def check(self, number: float, allowed: float, name: str, found: str) -> None:
        """Record a fault if `number` exceeds `allowed` or is NaN."""
        if not number <= allowed:
            self.say(name, found, f"{allowed:.1e}")

    def suspect(self, name: str, found: str, allowed: float) -> None:
        """Record that the update, or its effect, differs from the dense result. The cause is determined later."""
        text = f"{allowed:.1e} ({self.row.arithmetic}, this matrix shaken)"
        self.wrong.append(Finding.of(name, self.row.name, found, text))

    # --------------------------------------------------------------------------------------------- the dense step

    def run(self) -> None:
        """Compute the dense reference step twice: in the arithmetic of the live step, and in exact arithmetic."""
        self.reference = Reference(self.fed, self.settings.coefficients, self.arithmetic.choice.method)
        self.exact = self.reference.ratios().unsqueeze(1) * self.reference.coords
        self.dense = self.arithmetic.orthogonalized(self.fed)
        self.step = self.stepped(self.dense)
        self.update, self.arrived = self.recovered(self.after["weights"]), self.recovered(self.step.after)

    def stepped(self, result: Tensor, factor: Tensor | None = None) -> _StepWith:
        """Step the weights with a result of the orthogonalizer, (rows, cols) fp64, including stages, weight decay and
        rounding. `factor` replaces the factor that the stages after the orthogonalizer would compute."""
        a, kept = self.arithmetic, self.before
        if factor is None:
            factor, _, kept = a.staged(AfterStage, result, kept)
        result = (result * factor).to(a.wire).double()
        updated = a.weights_after(self.before["weights"], result, self.scale)
        on_weights, weights, kept = a.staged(WeightStage, updated, kept)
        after = weights.double()
        return _StepWith(result, updated, after, factor, on_weights, self.numbers({**kept, "weights": after}))

    def numbers(self, values: Mapping[str, Tensor]) -> _Kept:
        """Return the values that stages store, and the norm of the weights if a stage controls it."""
        found = {stage.key: values[stage.key] for stage in keeping(self.settings.stages)}
        return {**found, _NORM: values["weights"].norm()} if self.arithmetic.weight_stages else found

    def recovered(self, after: Tensor) -> Tensor:  # (rows, cols) fp64
        """Recover the orthogonalizer's result from the weights after a step, assuming that all stages were correct."""
        step, before = self.step, self.before["weights"]
        found = self.arithmetic.recovered_update(before, after / step.on_weights, self.scale, step.staged)
        return found / step.factor

    # ------------------------------------------------------------------------------------------------- the shake

    def shaken(self, shake: Callable[[Generator], _T], count: int) -> list[_T]:
        """Return the results of the first `count` runs with a kind of perturbation, cached. See [Note: the shake]."""
        runs: list[_T] = self._runs[shake.__name__]
        runs += [shake(Generator().manual_seed(seed)) for seed in range(len(runs), count)]
        return runs[:count]

    def reordered(self, generator: Generator) -> tuple[Tensor, _Kept]:
        """Run the step with permuted rows and columns and perturbed elements. Returns the length in each direction,
        (m,), of the difference between the update and the dense update, and the values that stages store after the
        step."""
        x = self.fed.to(torch.float64, copy=True)
        few = torch.randint(x.numel(), (_FEW,), generator=generator)
        signs = torch.randint(2, (_FEW,), generator=generator) * 2 - 1
        x.view(-1)[few.to(x.device)] *= (1 + self._eps * signs).to(x.device, x.dtype)
        x *= 1 + int(torch.randint(-_TOGETHER, _TOGETHER + 1, (), generator=generator)) * torch.finfo(self._wide).eps
        rows, cols = (torch.randperm(n, generator=generator).to(x.device) for n in x.shape)
        result = self.arithmetic.orthogonalized(x[rows][:, cols], nudged=True)
        step = self.stepped(result[rows.argsort()][:, cols.argsort()])
        return _lengths(self.seen(self.recovered(step.after) - self.arrived)), step.numbers

    def enlarged(self, generator: Generator) -> Tensor:
        """Run the orthogonalizer with each element moved by up to a spacing, and with a larger norm. Both this run and
        the dense result have an error against exact arithmetic. Returns the length in each direction, (m,), of the
        difference between the two errors."""
        nudges = torch.rand(self.fed.shape, generator=generator, dtype=self._wide).mul_(2).sub_(1)
        x = nudges.to(self.fed.device).mul_(self._eps).add_(1).mul_(self.fed)
        norm = float(torch.linalg.vector_norm(x, dtype=torch.float64))
        longer = 1 + _LONGER * float(torch.rand(1, generator=generator))
        bordered = torch.nn.functional.pad(x, (1, 1, 1, 1))
        bordered[0, 0] = bordered[-1, -1] = norm * math.sqrt((longer**2 - 1) / 2)
        least = TORCH_EPS if self.arithmetic.choice.method == "torch" else 0.0  # the least divisor with "torch"
        shorter = self.reference.ratios(max(longer * norm, least) / max(norm, least))
        less = (self.reference.ratios() - shorter).unsqueeze(1) * self.reference.coords
        result = self.arithmetic.orthogonalized(bordered, nudged=True)[1:-1, 1:-1]
        difference = self.seen(result - self.dense)
        return _lengths(difference + less.to(difference))

    def seen(self, matrix: Tensor) -> Tensor:  # (rows, cols) -> (m, n)
        """Express a matrix in the basis of the reference's left singular vectors, in the dtype of products, or in fp32
        if that is wider."""
        return self.reference.seen(matrix.to(self._wide))

    def spread(self, count: int) -> tuple[_Measure, float]:
        """Measure how much updates vary over `count` reordered runs (`_beside`).

        In every direction, an error of at least one spacing of the largest weight is assumed, and, if stages store
        values in fp32, an error of one fp32 eps of the result: a stored value is rounded up to four times, which may
        change it by two eps, and its root scales a row or column of the result.
        """
        spacing = torch.finfo(self.arithmetic.weights).eps * float(self.step.after.abs().amax())
        expected = self.seen(self.arrived)
        least = spacing / abs(self.settings.lr * self.scale) / float(self.step.factor.abs().amin())
        if self.step.numbers:
            least = max(least, _EPS * float(_lengths(expected).amax()))
        return self._beside([lengths for lengths, _ in self.shaken(self.reordered, count)], expected, least)

    def orthogonalizer(self, count: int) -> tuple[_Measure, float]:
        """Measure how much the orthogonalizer's error varies over `count` runs with a larger norm (`_beside`)."""
        return self._beside(self.shaken(self.enlarged, count), self.exact)

    def _beside(self, lengths: Sequence[Tensor], expected: Tensor, least: float = 0.0) -> tuple[_Measure, float]:
        """Make a function that measures a difference relative to the differences that rounding causes, and compute the
        largest measure that is allowed. See [Note: the shake].

        Args:
            lengths: For each perturbed run, the lengths (m,) of its difference in each direction.
            expected: The result without perturbation, in the basis of the reference's left singular vectors.
            least: Smallest rounding error to assume in any direction.
        """
        own, shaken = _lengths(expected), torch.stack(list(lengths))
        floor = (self._eps * own).square() + (_OWN * own.amax()).square() + least**2 + 1e-300
        noise = (shaken.square().mean(0) + floor).sqrt()
        unit = 1 / max(float((own / noise).amax()), 1e-300)
        allowed = _TIMES * unit * max(1.0, float((shaken / noise).amax()))
        return lambda difference: unit * float((_lengths(difference) / noise).amax()), allowed

    # ------------------------------------------------------------------------------------------- naming a fault

    def find_cause(self, others: Sequence[_Evidence]) -> None:
        """Find out why the update, or the norm of the weights, differs from the dense reference step, and record the
        fault ([Note: naming a fault]).

        Args:
            others: Judged matrices of the same shape, with which it may have been swapped.
        """
        measure, allowed = self.spread(_ALL)
        # An update that is far too short differs from the dense update by about the whole dense update. It is compared
        # with its own size instead, or else any guess would explain it.
        whole = min(measure(self.seen(self.update - self.arrived)), measure(self.seen(self.update)))
        wrong, least = self.wrong[0], max(allowed, 0.35 * whole)  # what a guess may leave unexplained
        name, found, norm = wrong.name, "it fits no known fault", self.after["weights"].norm()
        # if the weights' norm is wrong, a guess may leave half of its error
        most = 0.5 * (self.step.after.norm() - norm).abs() if name == "norm_wrong" else torch.inf
        frozen = "frozen", "no weight changed, with a gradient and a learning rate", self.before["weights"]
        of_results = itertools.chain(_of_lengths(self), _of_blocks(self), _of_others(self, others))
        stepped = ((guess, text, self.stepped(result, self.step.factor).after) for guess, text, result in of_results)
        for guess, text, after in itertools.chain([frozen], _of_stages(self), stepped):
            left = max(measure(self.seen(self.update - self.recovered(after))), 0.03 * whole)  # less is almost nothing
            if left < least and (after.norm() - norm).abs() <= most:
                least, name, found = left, guess, text
        self.findings.append(Finding.of(name, wrong.where, f"{wrong.found}: {found}", wrong.allowed))


def _lengths(coords: Tensor) -> Tensor:  # (m, n) -> (m,) fp64
    return torch.linalg.vector_norm(coords, dim=1).double()  # type: ignore[no-any-return]


# --------------------------------------------------------------------------------------------------------- judging


def judge(row: MatrixRow, arithmetic: Arithmetic, blocks: list[_Block], whole: dict[str, Tensor]) -> _Evidence:
    """Compare the step of one matrix with the reference. `find_cause` later names a wrong update.
    The arguments are the same as for `_Evidence`."""
    e = _Evidence(row, arithmetic, blocks, whole)
    values = {what: e.before[what] for what in _MATRICES}
    values["updated weights"] = e.after["weights"]
    if bad := [what for what, value in values.items() if not bool(value.isfinite().all())]:
        e.say("not_finite", f"NaN or infinity in {', '.join(bad)}", "finite numbers")
        return e
    if not torch.equal(e.before["gradient"], e.after["gradient"]):
        e.say("gradient_written", "the step changed the gradient", "no change")
    _judge_momentum(e)
    _judge_norm_before(e)
    frozen = e.settings.lr * e.scale == 0.0
    if frozen or not bool(e.given.any()):
        e.row = replace(e.row, status="lr is 0" if frozen else "zero")
        _judge_still(e)
        return e
    _judge_prepared(e)
    e.run()
    _judge_dense(e)
    _judge_numbers(e)
    _judge_update(e)
    return e


def _judge_momentum(e: _Evidence) -> None:
    expected, before, found = e.momentum.double(), e.before["momentum"], e.after["momentum"]
    stored = e.arithmetic.stored
    # Storing the momentum rounds each element once, by at most one eps. 8-bit codes ([Note: 8-bit codes] in
    # momentum/stores.py) have a spacing of 2 sqrt(|x| s) / 127 at the value x in a block with scale s. For a block of
    # 128 elements, of which one is large, that is at most 2 / 127 * sqrt(6.2) of the block's norm. In addition, the
    # gradient and the two terms of the momentum's update are rounded to the momentum's dtype.
    rounded = _CODE_STEP if stored == torch.int8 else torch.finfo(stored).eps
    terms = max(float(value.norm()) for value in (before, e.before["gradient"], expected))
    allowed = 2 * rounded * terms + 1e-12 * float(expected.norm())
    difference = float((found - expected).norm())
    what = "did not change" if torch.equal(found, before) else f"is off by {difference:.1e} from B + (1 - mu) (G - B)"
    e.check(difference, allowed, "momentum_wrong", f"the momentum after the step {what}")


def _judge_norm_before(e: _Evidence) -> None:
    """Compare stored norms with the norms of the weights before the step. Multiplying half-precision weights by a
    factor near 1 may have no effect, because of rounding. So the norms may differ as if each element were off by half a
    spacing, all in the same direction, and by half a spacing more because the update is rounded, too."""
    norm = float(e.before["weights"].norm())
    share = torch.finfo(e.arithmetic.weights).eps + _ROUNDINGS * _EPS
    for stage in e.arithmetic.weight_stages:
        kept = float(e.before[stage.key])
        e.check(
            abs(kept - norm),
            share * norm,
            "norm_stale",
            f"its {stage.key} is {kept:.7g}, the norm of its weights before the step {norm:.7g}",
        )


def _judge_still(e: _Evidence) -> None:
    """Check a step that applies no update: weights may decay, but must not change otherwise."""
    before, after = e.before["weights"], e.after["weights"]
    left = float((after - e.stepped(torch.zeros_like(before), torch.ones(())).after).norm())
    roundings = torch.finfo(e.arithmetic.weights).eps + (2 * _EPS if e.arithmetic.weight_stages else 0.0)
    allowed = roundings * (float(before.norm()) + float(after.norm())) + 1e-12
    e.check(
        left,
        allowed,
        "update_differs",
        f"nothing was to be applied, but the weights differ by {left:.1e} from decayed ones",
    )


def _judge_prepared(e: _Evidence) -> None:
    """Compare the orthogonalizer's input that the code of the live stages computes with the stages' formulas."""
    _, exact, _ = e.arithmetic.staged(BeforeStage, e.given.double(), {})
    difference = relative_error(e.fed, exact)
    # each stage rounds its factor once, and the product of the factor with an element once
    allowed = 2 * torch.finfo(e.fed.dtype).eps * len(e.settings.stages) + 2.0**-45
    e.check(
        difference,
        allowed,
        "variant_wrong",
        f"what its variant feeds to the orthogonalizer differs by {difference:.2g} from the formula in fp64",
    )


def _judge_dense(e: _Evidence) -> None:
    """Compare the dense result with exact arithmetic, unless rounding could explain any result."""
    found, allowed = _asked(e.orthogonalizer, e.reference.seen(e.dense) - e.exact)
    if allowed <= _BLIND:
        e.check(
            found,
            allowed,
            "orthogonalizer_wrong",
            f"{e.arithmetic} run by itself on the whole matrix differs from exact arithmetic by {found:.2g} in the "
            "directions that rounding leaves settled",
        )


def _asked(spread: Callable[[int], tuple[_Measure, float]], difference: Tensor) -> tuple[float, float]:
    """Return the measured and the allowed difference. Only a few perturbed runs are used if they explain the difference
    already; otherwise all are."""
    found = allowed = 0.0
    for count in (_FIRST, _ALL):
        measure, allowed = spread(count)
        found = measure(difference)
        if found <= allowed:
            break
    return found, allowed


def _judge_numbers(e: _Evidence) -> None:
    """Compare the values that stages store after the step with the stages' formulas and, if a stage controls the norm
    of the weights, compare the norm with that of the dense step."""
    live = e.numbers(e.after)
    for key, expected in e.step.numbers.items():
        difference = float((live[key] - expected).abs().sum())
        size = max(float(expected.abs().sum()), 1e-300)
        # error from rounding a mean of squares and its running average, or a norm, to fp32
        allowed = (math.sqrt(max(e.shape) / 6) + 2 * _ROUNDINGS) * _EPS * size
        if difference > allowed:
            runs = e.shaken(e.reordered, _ALL)
            allowed += _TIMES * max(float((numbers[key] - expected).abs().sum()) for _, numbers in runs)
        if difference > allowed and key == _NORM:
            e.suspect(
                "norm_wrong",
                f"the norm of its weights after the step is {float(live[key]) / size:.7g} times that of the rule",
                allowed / size,
            )
        elif difference > allowed:
            e.say(
                "kept_wrong",
                f"its {key} after the step differs by {difference / size:.2g} from the formula in fp64",
                f"{allowed / size:.1e}",
            )


def _judge_update(e: _Evidence) -> None:
    """Compare the applied update with the dense update. If the weights are bitwise equal, the report's row has a
    difference of 0, and the limit from the comparison with exact arithmetic."""
    if torch.equal(e.after["weights"], e.step.after):
        status, difference, allowed = "ok", 0.0, e.orthogonalizer(_FIRST)[1]
    else:
        difference, allowed = _asked(e.spread, e.seen(e.update - e.arrived))
        status = "inconclusive" if allowed > _BLIND else "ok" if difference <= allowed else "fault"
    e.row = replace(e.row, status=status, compared=True, difference=difference, allowed=allowed)
    arrived = _along(e.arrived, e.dense)
    if arrived < 1 - _BLIND:
        e.say(
            "update_lost_to_rounding",
            f"{100 * max(0.0, arrived):.0f}% of the update arrived: {e.arithmetic.weights} weights are too coarse for "
            f"lr={e.settings.lr:g}",
            "at least half of it",
        )
    if status == "fault":
        least, most = map(float, (e.reference.sigmas * e.reference.ratios()).abs().aminmax())
        short = e.update.T if e.shape[0] > e.shape[1] else e.update
        applied = torch.linalg.eigvalsh(short @ short.T).clamp(min=0.0).sqrt()  # accurate to the square root of eps
        lowest, highest = map(float, applied.aminmax())
        text = f"the applied update differs from the same arithmetic run densely by {difference:.2g}"
        fits = least - _SLACK <= lowest and highest <= most + _SLACK
        e.suspect("wrong_matrix" if fits else "update_differs", text, allowed)


def _along(update: Tensor, expected: Tensor) -> float:
    """Compute the length of `update` in the direction of `expected`, relative to the length of `expected`. Rounding
    errors have no common direction, so they hardly change it."""
    energy = float(expected.square().sum())
    return float((update * expected).sum()) / energy if energy else 1.0


# ---------------------------------------------------------------------------------------------- naming a fault


def _parts(e: _Evidence) -> dict[str, list[_Block]]:
    """List parts of the matrix that a faulty step may have mistaken for the whole: its shards and its halves. A kind of
    part is listed only if there are at least two."""
    rows, cols = e.shape
    cuts = {
        "shards": e.blocks,
        "halves of its rows": [(slice(0, rows // 2), slice(0, cols)), (slice(rows // 2, rows), slice(0, cols))],
        "halves of its columns": [(slice(0, rows), slice(0, cols // 2)), (slice(0, rows), slice(cols // 2, cols))],
    }
    held = {what: [block for block in blocks if e.before["weights"][block].numel()] for what, blocks in cuts.items()}
    return {what: blocks for what, blocks in held.items() if len(blocks) > 1}


def _of_stages(e: _Evidence) -> Iterator[_Guess]:
    """Yield guesses about stages that preserve the norm of the weights: the norm of a shard or half was used, and
    perhaps stored, instead of the norm of the whole matrix; or a stage did not run."""
    a, keys = e.arithmetic, {stage.key for stage in e.arithmetic.weight_stages}
    parts = [(what, blocks) for what, blocks in _parts(e).items() if keys]
    for what, blocks in parts:
        for kept_too in (True, False):
            after = e.step.updated.clone()
            for block in blocks:
                kept = {**e.before, **(a.norms(e.before["weights"][block]) if kept_too else {})}
                after[block] = a.staged(WeightStage, after[block], kept)[1]
            yield "norm_of_shard", f"norms of its {what} on its weights lead to that", after.double()
    if keys:
        yield "norm_wrong", "its stages on weights did not run", e.step.updated.double()
    for stage in (s for s in e.settings.stages if isinstance(s, AfterStage) and s.key in keys):
        own, factor = type(stage).__name__, a.staged(AfterStage, e.dense, e.before, without=stage)[0]
        yield "variant_wrong", f"it is an update without {own}", e.stepped(e.dense, factor).after
        for what, block in ((what, block) for what, blocks in parts for block in blocks):
            kept = {**e.before, **a.norms(e.before["weights"][block])}
            factor = a.staged(AfterStage, e.dense, kept)[0]
            text = f"its length is what {own} makes of the norm of one of its {what}"
            yield "norm_of_shard", text, e.stepped(e.dense, factor).after


def _of_lengths(e: _Evidence) -> Iterator[_Guess]:
    """Yield guesses in which the update has the right direction but a wrong length."""
    rows, cols = e.shape
    for m, n in {e.dense[block].shape for block in e.blocks} - {e.shape}:
        scale = lr_scale(e.settings.adjust_lr_fn, m, n)
        text = f"its scale is {scale:.4g}, that of a {m}x{n} shard, not {e.scale:.4g} of the whole {rows}x{cols} one"
        yield "scale_from_shard_shape", text, scale / e.scale * e.dense
    ratio = _along(e.update, e.arrived)
    if ratio > 0:
        name, times = ("clipped_update", "of") if ratio < 1 else ("scale_wrong", "times")
        yield name, f"it is the right direction at {ratio:.3g} {times} its length", ratio * e.dense
    limit = float(e.update.abs().amax())
    yield "clipped_update", f"elements are clamped at {limit:.3g}", e.dense.clamp(-limit, limit)


def _of_blocks(e: _Evidence) -> Iterator[_Guess]:
    """Yield guesses in which parts of the matrix were orthogonalized separately, or swapped."""
    for what, blocks in _parts(e).items():
        result = torch.zeros_like(e.dense)
        for block in blocks:
            own = e.arithmetic.orthogonalized(e.fed[block])
            result[block] = _along(e.update[block], own) * own  # the scale may come from the block's own shape
        yield "orthogonalized_by_shard", f"its {what} were orthogonalized by themselves", result
    result, text = e.dense.clone(), ""
    for i, at in enumerate(e.blocks):
        alike = [(j, block) for j, block in enumerate(e.blocks) if e.dense[block].shape == e.dense[at].shape]
        j, nearest = min(alike, key=lambda one: float((e.update[at] - e.dense[one[1]]).norm()))
        result[at] = e.dense[nearest]
        if i != j:
            text = text or f"block {i} of its {len(e.blocks)} blocks received the update of block {j}"
    if text:
        yield "fragments_swapped", text, result


def _of_others(e: _Evidence, others: Sequence[_Evidence]) -> Iterator[_Guess]:
    """Yield guesses in which the matrix got another matrix's result, was transposed, had a wrong input, or was not
    orthogonalized."""
    for other in others:
        if other is not e and other.row.compared:
            yield "results_swapped", f"it is the update of {other.row.name}", other.dense
    if e.shape[0] == e.shape[1]:
        yield "transposed", "it is the transpose of the right update", e.dense.T
    inputs = {
        "the momentum": e.fed.double(),
        "the gradient alone": e.before["gradient"],
        "the momentum before the step": e.before["momentum"],
        "the momentum without Nesterov's term": e.after["momentum"],
    }
    for what, value in inputs.items():
        for how, plain in (("parallel to", value), ("the sign of", value.sign())):
            text = f"it is {how} {what}, as in plain SGD; Newton-Schulz did not run on it"
            yield "not_orthogonalized", text, _along(e.update, plain) * plain
        if bool(value.any()):
            yield "wrong_input", f"it is the orthogonalized form of {what}", e.arithmetic.orthogonalized(value)
