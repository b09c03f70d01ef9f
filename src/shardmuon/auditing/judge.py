"""Judge one matrix of a step: the update that its weights took, its momentum, and what stages keep of it.

[Note: two comparisons]
    The applied update is compared with the same arithmetic run densely: only the order of sums may differ, so nearly
    always the bits are the same. It finds whatever is wrong with what was fed in, with the way there and back, with
    scale and weights. That dense result is compared with exact arithmetic, which finds an orthogonalizer that is wrong
    in itself. How far rounding may lead either apart, the matrix itself says.

[Note: the shake]
    The same arithmetic runs on other versions of the same input, and how far the results lie apart is what rounding
    explains of this very matrix. No theory of dtype, method, schedule or spectrum is needed.

    Beside the live step: rows and columns in another order, which is that of the sums, a few elements off by a
    spacing, and all of them together by some of fp32: a live stage divides once by norms where the dense one does it
    twice, and elements that are all alike (a matrix of ones) are rounded all alike, so that another order of equal
    numbers changes nothing, and sums in a batch, which are cut otherwise, do. Each result is put into the weights as
    the step would, so what stages of a variant and coarse weights add is in the spread, too.

    Beside exact arithmetic: each element off by up to a spacing, so that every product is rounded anew, and a border
    that is zero but for two corners. That enlarges the norm by up to `_LONGER`, so that elements which are all alike (a
    matrix of ones) are rounded anew together; what exact arithmetic makes of the larger norm is known, and only the
    error beside that is taken. (A border on all sides: a result that came back mirrored would be compared with itself.)

    The steps enlarge rounding where a singular value is nearly zero, so results may differ there by all of their
    length, and hardly at all in other directions. A difference is therefore looked at direction by direction, those of
    the left singular vectors of the reference: its length in each over the root mean square of the shaken ones. The
    largest of these counts, in units of what the result itself has there at most. No direction counts as settled
    better than to a spacing of its own result.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Generator, Tensor

from shardmuon.auditing.dense import Block
from shardmuon.auditing.reference import (
    Arithmetic,
    KeptNumbers,
    momentum_of,
    norm_of,
    orthogonalized,
    prepared,
    recovered_update,
    reference_of,
    relative_error,
    staged,
    weight_stages,
    weights_after,
)
from shardmuon.auditing.report import Finding, MatrixRow
from shardmuon.options import lr_scale
from shardmuon.orthogonalize import TORCH_EPS
from shardmuon.variants import AfterStage, BeforeStage, WeightStage, keeping

_T = TypeVar("_T")
_Measure = Callable[[Tensor], float]
_MATRICES = ("weights", "momentum", "gradient")
_NORM = "norm"  # of the weights, beside the numbers that stages keep
_FIRST, ALL = 2, 16  # shaken runs: those that are always made, and those before anything is called a fault
_TIMES = 3.0  # how many times the largest of the shaken differences is allowed
_BLIND = 0.5  # an allowed difference above this cannot tell an update from a wrong one
_SLACK = 0.2  # of singular values, for the rounding of the result, which lifts the smallest most
_FEW = 4  # elements that another order of sums may take to the next value
_TOGETHER = 64  # spacings that all elements may move together; of so few as 4, many runs round alike
_LONGER = 1 / 16  # by how much the norm is enlarged at most
_OWN = 1e-9  # error of the reference, of its largest direction: its Gram matrix squares what is small
_CODE_STEP = 2 / 127 * 6.2**0.5 / 2  # half of the bound: `_judge_momentum` allows two
_EPS = torch.finfo(torch.float32).eps
_ROUNDINGS = 4  # of a norm: of the norm, of what is kept, of the factor, and of its product with an element


class _StepWith(NamedTuple):
    """A step of one matrix with some result of the orthogonalizer.

    Attributes:
        staged: (rows, cols) fp64 update after all stages.
        updated: Weights before the stages on weights, in their dtype.
        after: Weights after them, fp64.
        factor, on_weights: Factors of the stages on the result and on the weights.
        numbers: What stages keep then, and the norm of the weights if a stage controls it.
    """

    staged: Tensor
    updated: Tensor
    after: Tensor
    factor: Tensor
    on_weights: Tensor
    numbers: KeptNumbers


class Evidence:
    """One whole matrix around a step, how it was meant to be stepped, and what its own arithmetic makes of it.

    Args:
        row: The report's line for it; `judge` fills it in.
        arithmetic: How it is stepped.
        blocks: Rectangles of the matrix that lie on one rank.
        whole: The elements of "weights", "momentum" and "gradient", and by its key of what each stage of its variant
            keeps, (2, n) fp64: before and after the step.

    Attributes:
        before, after: Those quantities, matrices as (rows, cols), what is kept as (n,).
        findings: Faults that have been found.
        wrong: What is still to be named: what it is called if no known cause explains it.
        momentum, given: After the step, and the orthogonalizer's input before stages, as the step computes them.
        fed: The orthogonalizer's input.
        reference, exact: The result of exact arithmetic; (m, n) fp64 in the reference's coordinates.
        dense: The result of the same arithmetic, run densely.
        step: The step that the weights take with it.
        update, arrived: The update that the step applied, and the part of the dense one that the weights can hold.
    """

    def __init__(self, row: MatrixRow, arithmetic: Arithmetic, blocks: list[Block], whole: dict[str, Tensor]) -> None:
        self.arithmetic, self.settings, self.blocks = arithmetic, arithmetic.settings, blocks
        self.shape = row.rows, row.cols
        self.before, self.after = (
            {what: both[at].view(self.shape) if what in _MATRICES else both[at] for what, both in whole.items()}
            for at in (0, 1)
        )
        for stage in weight_stages(self.settings.stages):
            if not self.before[stage.key]:  # not known, or of a matrix of zeros: the step takes that of the weights
                self.before[stage.key] = norm_of(self.before["weights"])
        self.scale = lr_scale(self.settings.adjust_lr_fn, *self.shape)
        self.row = replace(row, status="fault", expected_scale=self.scale)
        self.findings, self.wrong = list[Finding](), list[Finding]()
        self._eps = torch.finfo(arithmetic.products).eps
        self._wide = torch.promote_types(arithmetic.products, torch.float32)
        self._runs = defaultdict[str, list[Any]](list)
        self.momentum, self.given = momentum_of(self.before["momentum"], self.before["gradient"], arithmetic)
        self.fed = prepared(self.given, self.settings.stages)

    def say(self, name: str, found: str, allowed: str) -> None:
        """Note a fault of this matrix."""
        self.findings.append(Finding.of(name, self.row.name, found, allowed))

    def check(self, number: float, allowed: float, name: str, found: str) -> None:
        """Note a fault if a number is larger than what is allowed, or none at all."""
        if not number <= allowed:
            self.say(name, found, f"{allowed:.1e}")

    def suspect(self, name: str, found: str, allowed: float) -> None:
        """Note that the update, or what it led to, is not the dense one, for a reason still to be named."""
        text = f"{allowed:.1e} ({self.row.arithmetic}, this matrix shaken)"
        self.wrong.append(Finding.of(name, self.row.name, found, text))

    # --------------------------------------------------------------------------------------------- its dense step

    def run(self) -> None:
        """Take the step densely, and in exact arithmetic."""
        self.reference = reference_of(self.fed, self.settings.coefficients, method=self.arithmetic.choice.method)
        self.exact = self.reference.ratios().unsqueeze(1) * self.reference.coords
        self.dense = orthogonalized(self.fed, self.arithmetic)
        self.step = self.stepped(self.dense)
        self.update, self.arrived = self.recovered(self.after["weights"]), self.recovered(self.step.after)

    def stepped(self, result: Tensor, factor: Tensor | None = None) -> _StepWith:
        """Step the weights with a result of the orthogonalizer, (rows, cols) fp64: stages, decay, rounding. `factor`:
        that of the stages on the result; default: by their formulas."""
        a, stages = self.arithmetic, self.settings.stages
        kept: KeptNumbers = self.before
        if factor is None:
            factor, _, kept = staged(AfterStage, stages, result, kept)
        result = (result * factor).to(a.wire).double()
        updated = weights_after(self.before["weights"], result, self.scale, a)
        on_weights, weights, kept = staged(WeightStage, stages, updated, kept)
        after = weights.double()
        return _StepWith(result, updated, after, factor, on_weights, self.numbers({**kept, "weights": after}))

    def numbers(self, values: Mapping[str, Tensor]) -> KeptNumbers:
        """Numbers that stages keep, and the norm of the weights if a stage controls it."""
        found = {stage.key: values[stage.key] for stage in keeping(self.settings.stages)}
        return {**found, _NORM: values["weights"].norm()} if weight_stages(self.settings.stages) else found

    def recovered(self, after: Tensor) -> Tensor:  # (rows, cols) fp64
        """The result of the orthogonalizer that led to these weights, if the stages did what they should."""
        step, before = self.step, self.before["weights"]
        return recovered_update(before, after / step.on_weights, self.settings, self.scale, step.staged) / step.factor

    # ------------------------------------------------------------------------------------------------- the shake

    def shaken(self, shake: Callable[[Generator], _T], count: int) -> list[_T]:
        """The first `count` runs of a shake: [Note: the shake]."""
        runs: list[_T] = self._runs[shake.__name__]
        runs += [shake(Generator().manual_seed(seed)) for seed in range(len(runs), count)]
        return runs[:count]

    def reordered(self, generator: Generator) -> tuple[Tensor, KeptNumbers]:
        """A run with rows and columns in another order, and elements nudged: lengths (m,) of the update beside the
        dense one's in each direction, and the numbers after the step."""
        x = self.fed.to(torch.float64, copy=True)
        few = torch.randint(x.numel(), (_FEW,), generator=generator)
        signs = torch.randint(2, (_FEW,), generator=generator) * 2 - 1
        x.view(-1)[few.to(x.device)] *= (1 + self._eps * signs).to(x.device, x.dtype)
        x *= 1 + int(torch.randint(-_TOGETHER, _TOGETHER + 1, (), generator=generator)) * torch.finfo(self._wide).eps
        rows, cols = (torch.randperm(n, generator=generator).to(x.device) for n in x.shape)
        result = orthogonalized(x[rows][:, cols], self.arithmetic, nudged=True)
        step = self.stepped(result[rows.argsort()][:, cols.argsort()])
        return _lengths(self.seen(self.recovered(step.after) - self.arrived)), step.numbers

    def enlarged(self, generator: Generator) -> Tensor:
        """A run with each element off by up to a spacing, and a larger norm: lengths (m,) of the difference of its
        error beside exact arithmetic from the dense result's."""
        nudges = torch.rand(self.fed.shape, generator=generator, dtype=self._wide).mul_(2).sub_(1)
        x = nudges.to(self.fed.device).mul_(self._eps).add_(1).mul_(self.fed)
        norm = float(torch.linalg.vector_norm(x, dtype=torch.float64))
        longer = 1 + _LONGER * float(torch.rand(1, generator=generator))
        bordered = torch.nn.functional.pad(x, (1, 1, 1, 1))
        bordered[0, 0] = bordered[-1, -1] = norm * math.sqrt((longer**2 - 1) / 2)
        least = TORCH_EPS if self.arithmetic.choice.method == "torch" else 0.0  # which it divides by
        shorter = self.reference.ratios(max(longer * norm, least) / max(norm, least))
        less = (self.reference.ratios() - shorter).unsqueeze(1) * self.reference.coords
        result = orthogonalized(bordered, self.arithmetic, nudged=True)[1:-1, 1:-1]
        difference = self.seen(result - self.dense)
        return _lengths(difference + less.to(difference))

    def seen(self, matrix: Tensor) -> Tensor:  # (rows, cols) -> (m, n)
        """A matrix in the reference's coordinates, in the precision that its arithmetic needs."""
        return self.reference.seen(matrix.to(self._wide))

    def spread(self, count: int) -> tuple[_Measure, float]:
        """`_beside` the updates of so many steps in another order. No direction is settled better than the largest
        weight, to its next value, nor than numbers that stages keep in fp32, whatever the products are: each is rounded
        four times, and scales a line of the result by its root, so by an eps."""
        spacing = torch.finfo(self.arithmetic.weights).eps * float(self.step.after.abs().amax())
        expected = self.seen(self.arrived)
        least = spacing / abs(self.settings.lr * self.scale) / float(self.step.factor.abs().amin())
        if self.step.numbers:
            least = max(least, _EPS * float(_lengths(expected).amax()))
        return self._beside([lengths for lengths, _ in self.shaken(self.reordered, count)], expected, least)

    def orthogonalizer(self, count: int) -> tuple[_Measure, float]:
        """`_beside` so many shaken errors."""
        return self._beside(self.shaken(self.enlarged, count), self.exact)

    def _beside(self, lengths: Sequence[Tensor], expected: Tensor, least: float = 0.0) -> tuple[_Measure, float]:
        """A measure of differences beside those that rounding makes, and the largest allowed: [Note: the shake].

        Args:
            lengths: Lengths of shaken differences.
            expected: The result beside which all differences are taken, in the reference's coordinates.
            least: No direction is settled better than to this.
        """
        own, shaken = _lengths(expected), torch.stack(list(lengths))
        floor = (self._eps * own).square() + (_OWN * own.amax()).square() + least**2 + 1e-300
        noise = (shaken.square().mean(0) + floor).sqrt()
        unit = 1 / max(float((own / noise).amax()), 1e-300)
        allowed = _TIMES * unit * max(1.0, float((shaken / noise).amax()))
        return lambda difference: unit * float((_lengths(difference) / noise).amax()), allowed


def _lengths(coords: Tensor) -> Tensor:  # (m, n) -> (m,) fp64
    return torch.linalg.vector_norm(coords, dim=1).double()  # type: ignore[no-any-return]


# --------------------------------------------------------------------------------------------------------- judging


def judge(row: MatrixRow, arithmetic: Arithmetic, blocks: list[Block], whole: dict[str, Tensor]) -> Evidence:
    """Compare a step of one matrix with the reference. Names no causes of a wrong update: `naming.name_fault` does.
    Arguments as of `Evidence`."""
    e = Evidence(row, arithmetic, blocks, whole)
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


def _judge_momentum(e: Evidence) -> None:
    expected, before, found = e.momentum.double(), e.before["momentum"], e.after["momentum"]
    stored = e.arithmetic.stored
    # Storing rounds each element once, by at most an eps. 8-bit codes ([Note: 8-bit codes] in momentum/stores.py) step
    # by 2 sqrt(|x| s) / 127 at x in a block of scale s: over a block of 128 with one large element at most 2 / 127 *
    # sqrt(6.2) of its norm. The gradient is rounded to the momentum's dtype, and so are the two terms of its update.
    rounded = _CODE_STEP if stored == torch.int8 else torch.finfo(stored).eps
    terms = max(float(value.norm()) for value in (before, e.before["gradient"], expected))
    allowed = 2 * rounded * terms + 1e-12 * float(expected.norm())
    difference = float((found - expected).norm())
    what = "did not change" if torch.equal(found, before) else f"is off by {difference:.1e} from B + (1 - mu) (G - B)"
    e.check(difference, allowed, "momentum_wrong", f"the momentum after the step {what}")


def _judge_norm_before(e: Evidence) -> None:
    """Kept norms beside those of the weights before the step. Half-precision weights can undo a factor near 1
    altogether, so up to half a spacing of each element, all the same way, and half a spacing more for the update."""
    norm = float(e.before["weights"].norm())
    share = torch.finfo(e.arithmetic.weights).eps + _ROUNDINGS * _EPS
    for stage in weight_stages(e.settings.stages):
        kept = float(e.before[stage.key])
        text = f"its {stage.key} is {kept:.7g}, the norm of its weights before the step {norm:.7g}"
        e.check(abs(kept - norm), share * norm, "norm_stale", text)


def _judge_still(e: Evidence) -> None:
    """Check a step that applies nothing: the weights may decay and no more."""
    before, after = e.before["weights"], e.after["weights"]
    left = float((after - e.stepped(torch.zeros_like(before), torch.ones(())).after).norm())
    roundings = torch.finfo(e.arithmetic.weights).eps + (2 * _EPS if weight_stages(e.settings.stages) else 0.0)
    allowed = roundings * (float(before.norm()) + float(after.norm())) + 1e-12
    text = f"nothing was to be applied, but the weights differ by {left:.1e} from decayed ones"
    e.check(left, allowed, "update_differs", text)


def _judge_prepared(e: Evidence) -> None:
    """The live stages' input of the orthogonalizer beside the formulas'."""
    _, exact, _ = staged(BeforeStage, e.settings.stages, e.given.double(), {})
    difference = relative_error(e.fed, exact)
    # each element: the factor and the product, rounded once for each stage
    allowed = 2 * torch.finfo(e.fed.dtype).eps * len(e.settings.stages) + 2.0**-45
    text = f"what its variant feeds to the orthogonalizer differs by {difference:.2g} from the formula in fp64"
    e.check(difference, allowed, "variant_wrong", text)


def _judge_dense(e: Evidence) -> None:
    """Compare the same arithmetic's result with the exact one, unless rounding explains any result."""
    found, allowed = _asked(e.orthogonalizer, e.reference.seen(e.dense) - e.exact)
    if allowed <= _BLIND:
        text = f"{e.arithmetic} run by itself on the whole matrix differs from exact arithmetic by {found:.2g} in the"
        e.check(found, allowed, "orthogonalizer_wrong", f"{text} directions that rounding leaves settled")


def _asked(spread: Callable[[int], tuple[_Measure, float]], difference: Tensor) -> tuple[float, float]:
    """A difference and what is allowed: by few shaken runs if these explain it, else by all."""
    found = allowed = 0.0
    for count in (_FIRST, ALL):
        measure, allowed = spread(count)
        found = measure(difference)
        if found <= allowed:
            break
    return found, allowed


def _judge_numbers(e: Evidence) -> None:
    """Compare the numbers that stages keep after the step with the formulas', and the norm of the weights, if one
    controls it, with the dense step's."""
    live = e.numbers(e.after)
    for key, expected in e.step.numbers.items():
        difference = float((live[key] - expected).abs().sum())
        size = max(float(expected.abs().sum()), 1e-300)
        # a mean of squares and the average, or a norm, in fp32
        allowed = (math.sqrt(max(e.shape) / 6) + 2 * _ROUNDINGS) * _EPS * size
        if difference > allowed:
            runs = e.shaken(e.reordered, ALL)
            allowed += _TIMES * max(float((numbers[key] - expected).abs().sum()) for _, numbers in runs)
        if difference > allowed and key == _NORM:
            text = f"the norm of its weights after the step is {float(live[key]) / size:.7g} times that of the rule"
            e.suspect("norm_wrong", text, allowed / size)
        elif difference > allowed:
            text = f"its {key} after the step differs by {difference / size:.2g} from the formula in fp64"
            e.say("kept_wrong", text, f"{allowed / size:.1e}")


def _judge_update(e: Evidence) -> None:
    """The applied update beside the dense one; of equal bits what is allowed beside exact arithmetic is shown."""
    if torch.equal(e.after["weights"], e.step.after):
        status, difference, allowed = "ok", 0.0, e.orthogonalizer(_FIRST)[1]
    else:
        difference, allowed = _asked(e.spread, e.seen(e.update - e.arrived))
        status = "inconclusive" if allowed > _BLIND else "ok" if difference <= allowed else "fault"
    results = (e.reference.sigmas * e.reference.ratios()).abs()
    least, most = float(results.amin()), float(results.amax())
    short = e.update.T if e.shape[0] > e.shape[1] else e.update
    applied = torch.linalg.eigvalsh(short @ short.T).clamp(min=0.0).sqrt()  # good to the square root of eps
    arrived = along(e.arrived, e.dense)
    if arrived < 1 - _BLIND:
        text = f"{100 * max(0.0, arrived):.0f}% of the update arrived: {e.arithmetic.weights} weights are too coarse"
        e.say("update_lost_to_rounding", f"{text} for lr={e.settings.lr:g}", "at least half of it")
    e.row = replace(
        e.row,
        status=status,
        compared=True,
        difference=difference,
        allowed=allowed,
        scale=along(e.update, e.arrived) * e.scale,
        sigma_min=float(applied[0]),
        sigma_max=float(applied[-1]),
        band=(least, most),
    )
    if status == "fault":
        text = f"the applied update differs from the same arithmetic run densely by {difference:.2g}"
        fits = least - _SLACK <= e.row.sigma_min and e.row.sigma_max <= most + _SLACK
        e.suspect("wrong_matrix" if fits else "update_differs", text, allowed)


def along(update: Tensor, expected: Tensor) -> float:
    """Length of an update along the expected one, relative; rounding, which has no direction, hardly moves it."""
    energy = float(expected.square().sum())
    return float((update * expected).sum()) / energy if energy else 1.0
