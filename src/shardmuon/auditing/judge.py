"""Check the optimizer step of one matrix: its new weights, its new momentum, and the values that stages store. A stage
is an operation that a Muon variant (such as NorMuon) adds to the step.

[Note: two comparisons]
    First, the applied update is compared with the dense update, which is computed on the whole matrix with the same
    arithmetic. In a correct step, the two can differ only in the order of summation, so they are nearly always bitwise
    equal. This comparison finds faults in the inputs, the communication, the scale and the update of the weights.
    Second, the orthogonalizer's result for the whole matrix is compared with the result in exact arithmetic. This
    comparison finds a faulty orthogonalizer. For both comparisons, the audit measures how large a difference rounding
    can cause (see [Note: the shake]).

[Note: the shake]
    To measure how large a difference rounding can cause, the audit repeats the computation on several slightly
    perturbed ("shaken") copies of the matrix and compares the results. So no error analysis is needed for each dtype,
    method, coefficient schedule and spectrum. In this note, a spacing is the distance between neighboring
    floating-point numbers.

    For the comparison with the audited step, each run permutes rows and columns, which changes the order of summation.
    It also moves a few elements by one spacing, and multiplies all elements by a common factor that moves each of them
    by at most `_TOGETHER` fp32 spacings. The factor is needed in two cases. First, a stage in the audited step can
    divide by norms once where the formula in the dense step divides twice. Second, if all elements are equal (as in a
    matrix of ones), a permutation changes no sum, but the audited step can split its batched sums differently and get a
    different result. Each run also applies its result to the weights as the step does. The differences between runs
    therefore include rounding in the stages and in low-precision weights.

    For the comparison with exact arithmetic, each run moves every element by up to one spacing, so that every product
    is rounded differently. Each run also adds a row or column of zeros on every side of the matrix, and sets two
    opposite corners of this border to a nonzero number. This number increases the norm by a relative amount of up to
    `_LONGER`, so that elements are rounded differently even if all of them are equal. The effect of the larger norm is
    computed in exact arithmetic and subtracted. The zeros are added on every side, not only on one, so that the result
    of an orthogonalizer that mirrors the matrix by mistake is mirrored but not shifted.

    The Newton-Schulz iteration amplifies rounding errors along singular vectors whose singular values are nearly zero.
    Along such vectors, results can differ completely, and along other vectors hardly at all. So a difference is
    measured separately along each left singular vector of the reference. Along each vector, the rounding error is
    estimated as the root mean square of the differences that perturbations cause, or as one spacing of the result if
    that is larger. The relative difference is the largest ratio of the difference to this error, divided by the largest
    ratio of the result to this error.

[Note: naming a fault]
    The audit simulates known faults. A simulated fault, called a guess, consists of the fault's name, a description,
    and the (rows, cols) fp64 weights after a step with this fault. The guess is compared with the update in which the
    audit found a fault (the wrong update). It is accepted if its update is close to the wrong update, relative to both
    the wrong update and the wrong update's difference from the dense reference. All sizes are measured along singular
    vectors, as in [Note: the shake]. The fault gets the name of the first guess that matches almost exactly. If there
    is none, it gets the name of the accepted guess that matches best.
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
from shardmuon.orthogonalize import TORCH_EPS, batch_size
from shardmuon.variants import AfterStage, BeforeStage, WeightStage, keeping

_T = TypeVar("_T")
_Block = tuple[slice, slice]
# Values that each stage stores, keyed by stage. A stage is an operation that a Muon variant adds to the step.
_Kept = Mapping[str, Tensor]
_Measure = Callable[[Tensor], float]
# A perturbed run: the orthogonalizer's input, and a function that maps the orthogonalizer's result to the run's result
_Run = tuple[Tensor, Callable[[Tensor], _T]]
_MATRICES = ("weights", "momentum", "gradient")
_NORM = "norm"  # key of the weight norm in dicts that are otherwise keyed by the stages of a Muon variant
_FIRST, _ALL = 2, 16  # numbers of runs on perturbed input: 2 at first, and 16 in total before a fault is reported
# allowed difference between two results, as a multiple of the largest difference caused by perturbed inputs
_TIMES = 3.0
# Largest relative difference that can be allowed between an update and the reference. With a higher limit, a correct
# update could not be distinguished from a wrong one.
_BLIND = 0.5
# Distance by which the singular values of an update may lie outside the range that the reference predicts. Rounding
# changes singular values, and increases the smallest ones most.
_SLACK = 0.2
# number of input elements that a perturbed run of the step moves to a neighboring floating-point number, to imitate a
# different order of summation
_FEW = 4
# Largest change of an element, in fp32 spacings, when a perturbed run of the step scales its input. With a limit of
# only 4, many runs would be rounded like the run without scaling.
_TOGETHER = 64
_LONGER = 1 / 16  # largest relative increase of the input matrix's norm in a perturbed run of the orthogonalizer
# Relative error of the "exact" reference, which is computed in fp64 from a Gram matrix. The Gram matrix squares
# singular values, so the reference is inaccurate for small ones.
_OWN = 1e-9
# largest relative error of momentum in 8-bit codes, halved because `_judge_momentum` doubles it
_CODE_STEP = 2 / 127 * 6.2**0.5 / 2
_EPS = torch.finfo(torch.float32).eps
# Number of roundings when a stage of a Muon variant scales a matrix by a norm. The norm, the stored norm, the factor
# computed from the norm, and the product of the factor and an element are rounded.
_ROUNDINGS = 4
_Guess = tuple[str, str, Tensor]


class _StepWith(NamedTuple):
    """Step of one matrix, computed from a given result of the orthogonalizer. A Muon variant can add operations, called
    stages, to the step.

    Attributes:
        staged: (rows, cols) fp64 update after the stages that change the update.
        updated: (rows, cols) weights after the update and before the stages that change weights, in the weights' dtype.
        after: (rows, cols) fp64 weights after the stages that change weights.
        factor: Factor by which the stages that change the update scale it.
        on_weights: Factor by which the stages that change weights scale them.
        numbers: Dict of the values that the stages store. If a stage controls the norm of the weights, it also contains
            their norm after the step.
    """

    staged: Tensor
    updated: Tensor
    after: Tensor
    factor: Tensor
    on_weights: Tensor
    numbers: _Kept


class _Evidence:
    """One whole matrix before and after the audited step, the arithmetic of that step, and the dense reference step. A
    Muon variant can add operations, called stages, to a step.

    Args:
        row: The matrix's row in the report; `judge` fills in the results.
        arithmetic: Options, dtypes and device that determine the matrix's step.
        blocks: Rectangular parts of the matrix, each stored on one rank.
        whole: Dict from quantity to a (2, n) fp64 tensor with the quantity's values before and after the step. The
            quantities are "weights", "momentum", "gradient", and the values that stages store.

    Attributes:
        before, after: The quantities before and after the step. Weights, momentum and gradient have the shape (rows,
            cols), and values that stages store have the shape (n,).
        findings: Faults found so far.
        wrong: Faults whose causes are still unknown.
        momentum: Expected momentum after the step, (rows, cols).
        given: Input of the stages that run before the orthogonalizer, (rows, cols).
        fed: The orthogonalizer's input, after these stages, (rows, cols).
        reference: `Reference` for the orthogonalizer's result in exact arithmetic.
        exact: The orthogonalizer's result in exact arithmetic, (m, n) fp64, in the basis of the left singular vectors
            of `reference`. m is the length of the matrix's shorter side, and n the length of its longer side.
        dense: The orthogonalizer's result in the arithmetic of the audited step.
        step: The dense reference step, computed from `dense`.
        update: The orthogonalizer's result, recovered from the weights before and after the audited step.
        arrived: The orthogonalizer's result, recovered from the weights before and after the dense reference step. It
            equals `dense` up to the precision of the weights.
    """

    def __init__(self, row: MatrixRow, arithmetic: Arithmetic, blocks: list[_Block], whole: dict[str, Tensor]) -> None:
        self.arithmetic, self.settings, self.blocks = arithmetic, arithmetic.settings, blocks
        self.shape = row.rows, row.cols
        self.before, self.after = (
            {what: both[at].view(self.shape) if what in _MATRICES else both[at] for what, both in whole.items()}
            for at in (0, 1)
        )
        for key, norm in arithmetic.norms(self.before["weights"]).items():
            # If the Muon variant has not stored a norm of the weights yet, or the stored norm is 0, the step uses the
            # norm of the current weights.
            if not self.before[key]:
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
        """Record a fault if `number`, the size of a difference, exceeds `allowed` or is NaN."""
        if not number <= allowed:
            self.say(name, found, f"{allowed:.1e}")

    def suspect(self, name: str, found: str, allowed: float) -> None:
        """Record a fault whose cause is still unknown: the update, or the norm of the weights after the update, differs
        from that of the dense reference step. `find_cause` later determines the cause."""
        text = f"{allowed:.1e} ({self.row.arithmetic}, this matrix shaken)"
        self.wrong.append(Finding.of(name, self.row.name, found, text))

    # --------------------------------------------------------------------------------------------- the dense step

    def run(self) -> None:
        """Compute and store the dense reference step, in the arithmetic of the audited step, and the orthogonalizer's
        result in exact arithmetic."""
        self.reference = Reference(self.fed, self.settings.coefficients, self.arithmetic.choice.method)
        self.exact = self.reference.ratios().unsqueeze(1) * self.reference.coords
        (self.dense,) = self.arithmetic.orthogonalized(self.fed[None])
        self.step = self.stepped(self.dense)
        self.update, self.arrived = self.recovered(self.after["weights"]), self.recovered(self.step.after)

    def stepped(self, result: Tensor, factor: Tensor | None = None) -> _StepWith:
        """Compute the step from a given result of the orthogonalizer, including weight decay, rounding, and the stages
        (operations) that a Muon variant runs after the orthogonalizer.

        Args:
            result: The orthogonalizer's result, (rows, cols) fp64.
            factor: Factor by which the variant scales the orthogonalizer's result. By default, it is computed from the
                variant's formulas.
        """
        a, kept = self.arithmetic, self.before
        if factor is None:
            factor, _, kept = a.staged(AfterStage, result, kept)
        result = (result * factor).to(a.wire).double()
        updated = a.weights_after(self.before["weights"], result, self.scale)
        on_weights, weights, kept = a.staged(WeightStage, updated, kept)
        after = weights.double()
        return _StepWith(result, updated, after, factor, on_weights, self.numbers({**kept, "weights": after}))

    def numbers(self, values: Mapping[str, Tensor]) -> _Kept:
        """Return a dict with the values that the Muon variant's stages store (such as NorMuon's second moments) and, if
        a stage controls the norm of the weights, this norm. `values` contains the weights and all stored values."""
        found = {stage.key: values[stage.key] for stage in keeping(self.settings.stages)}
        return {**found, _NORM: values["weights"].norm()} if self.arithmetic.weight_stages else found

    def recovered(self, after: Tensor) -> Tensor:  # (rows, cols) fp64
        """Recover the orthogonalizer's result from the weights after a step, assuming that all stages (operations) that
        a Muon variant adds to the step ran correctly."""
        step, before = self.step, self.before["weights"]
        found = self.arithmetic.recovered_update(before, after / step.on_weights, self.scale, step.staged)
        return found / step.factor

    # ------------------------------------------------------------------------------------------------- the shake

    def shaken(self, shake: Callable[[Generator], _Run[_T]], count: int) -> list[_T]:
        """Return the results of `count` perturbed runs (see [Note: the shake]). The function `shake` prepares one run
        with a seeded generator. Results are cached, so only new runs are computed. Only one batch of runs is prepared
        and orthogonalized at a time, so that copies of a large matrix do not fill the memory."""
        runs: list[_T] = self._runs[shake.__name__]
        size = batch_size(*self.shape, self.arithmetic.device or self.fed.device)
        for start in range(len(runs), count, size):
            made = [shake(Generator().manual_seed(seed)) for seed in range(start, min(start + size, count))]
            results = self.arithmetic.orthogonalized(torch.stack([given for given, _ in made]), nudged=True)
            runs += [finish(result) for (_, finish), result in zip(made, results, strict=True)]
        return runs[:count]

    def reordered(self, generator: Generator) -> _Run[tuple[Tensor, _Kept]]:
        """Prepare a run of the dense step with permuted rows and columns and with perturbed elements (see [Note: the
        shake]).

        Returns:
            A tuple (given, finish). `given` is the orthogonalizer's input, (rows, cols). `finish` computes a tuple
            (lengths, numbers) from the orthogonalizer's result. `lengths`, of shape (m,), contains the length of the
            difference between this run's update and the dense update along each left singular vector of the reference.
            `numbers` is a dict with the values that the Muon variant stores after the step.
        """
        x = self.fed.to(torch.float64, copy=True)
        few = torch.randint(x.numel(), (_FEW,), generator=generator)
        signs = torch.randint(2, (_FEW,), generator=generator) * 2 - 1
        x.view(-1)[few.to(x.device)] *= (1 + self._eps * signs).to(x.device, x.dtype)
        x *= 1 + int(torch.randint(-_TOGETHER, _TOGETHER + 1, (), generator=generator)) * torch.finfo(self._wide).eps
        rows, cols = (torch.randperm(n, generator=generator).to(x.device) for n in x.shape)

        def finish(result: Tensor) -> tuple[Tensor, _Kept]:
            step = self.stepped(result[rows.argsort()][:, cols.argsort()])
            return _lengths(self.seen(self.recovered(step.after) - self.arrived)), step.numbers

        return x[rows][:, cols], finish

    def enlarged(self, generator: Generator) -> _Run[Tensor]:
        """Prepare a run of the orthogonalizer on a perturbed copy of the matrix: its norm is larger, and its elements
        are moved by up to one spacing (see [Note: the shake]).

        Returns:
            A tuple (given, finish). `given` is the orthogonalizer's input, (rows + 2, cols + 2). `finish` compares the
            error of the orthogonalizer's result (its deviation from exact arithmetic) with the error on the original
            matrix. It returns the length of the difference along each left singular vector of the reference, (m,).
        """
        nudges = torch.rand(self.fed.shape, generator=generator, dtype=self._wide).mul_(2).sub_(1)
        x = nudges.to(self.fed.device).mul_(self._eps).add_(1).mul_(self.fed)
        norm = float(torch.linalg.vector_norm(x, dtype=torch.float64))
        longer = 1 + _LONGER * float(torch.rand(1, generator=generator))
        bordered = torch.nn.functional.pad(x, (1, 1, 1, 1))
        bordered[0, 0] = bordered[-1, -1] = norm * math.sqrt((longer**2 - 1) / 2)
        # The method "torch" divides the matrix by its norm or by TORCH_EPS, whichever is larger.
        least = TORCH_EPS if self.arithmetic.choice.method == "torch" else 0.0
        shorter = self.reference.ratios(max(longer * norm, least) / max(norm, least))
        less = (self.reference.ratios() - shorter).unsqueeze(1) * self.reference.coords
        return bordered, lambda result: _lengths(self.seen(result[1:-1, 1:-1] - self.dense) + less.to(self._wide))

    def seen(self, matrix: Tensor) -> Tensor:
        """Express a (rows, cols) matrix in the basis of the reference's left singular vectors. The result has the shape
        (min(rows, cols), max(rows, cols)) and the dtype of the matrix products, but at least fp32."""
        return self.reference.seen(matrix.to(self._wide))

    def spread(self, count: int) -> tuple[_Measure, float]:
        """Measure how much the update varies over `count` perturbed runs of the dense step (see [Note: the shake]).
        Return a tuple (measure, allowed): a function that measures a difference relative to this variation, and the
        largest value of the function that rounding can explain.

        Along every singular vector, the rounding error is assumed to be at least one spacing of the largest weight. If
        the Muon variant stores fp32 values, it is also assumed to be at least one fp32 eps times the largest length of
        the result along a singular vector: up to four roundings change a stored value by up to two eps, and its square
        root, which scales a row or column of the result, by up to one eps.
        """
        spacing = torch.finfo(self.arithmetic.weights).eps * float(self.step.after.abs().amax())
        expected = self.seen(self.arrived)
        least = spacing / abs(self.settings.lr * self.scale) / float(self.step.factor.abs().amin())
        if self.step.numbers:
            least = max(least, _EPS * float(_lengths(expected).amax()))
        return self._beside([lengths for lengths, _ in self.shaken(self.reordered, count)], expected, least)

    def orthogonalizer(self, count: int) -> tuple[_Measure, float]:
        """Measure how much the orthogonalizer's error varies over `count` perturbed runs (see [Note: the shake]).
        Return a tuple (measure, allowed): a function that measures a difference relative to this variation, and the
        largest value of the function that rounding can explain."""
        return self._beside(self.shaken(self.enlarged, count), self.exact)

    def _beside(self, lengths: Sequence[Tensor], expected: Tensor, least: float = 0.0) -> tuple[_Measure, float]:
        """Make a function that measures a difference relative to the rounding error, which is estimated from perturbed
        runs (see [Note: the shake]).

        Args:
            lengths: For each perturbed run, a tensor of shape (m,): the length of the difference from the unperturbed
                run along each left singular vector of the reference.
            expected: The result without perturbations, in the basis of the left singular vectors.
            least: Smallest rounding error to assume along each left singular vector.

        Returns:
            A tuple (measure, allowed). `measure` is the function. `allowed` is the largest value of `measure` that
            rounding can explain.
        """
        own, shaken = _lengths(expected), torch.stack(list(lengths))
        floor = (self._eps * own).square() + (_OWN * own.amax()).square() + least**2 + 1e-300
        noise = (shaken.square().mean(0) + floor).sqrt()
        unit = 1 / max(float((own / noise).amax()), 1e-300)
        allowed = _TIMES * unit * max(1.0, float((shaken / noise).amax()))
        return lambda difference: unit * float((_lengths(difference) / noise).amax()), allowed

    # ------------------------------------------------------------------------------------------- naming a fault

    def find_cause(self, others: Sequence[_Evidence]) -> None:
        """Find out why the update, or the norm of the weights, differs from the dense reference step. Record the fault
        (see [Note: naming a fault]).

        Args:
            others: Audited matrices of the same shape. This matrix may have received the result of one of them by
                mistake.
        """
        measure, allowed = self.spread(_ALL)
        # `whole` is the size of the wrong update or of its difference from the dense update, whichever is smaller. If
        # the wrong update is far too short, this difference is much larger than the update itself. With the difference
        # as the scale, every simulated fault with a short update would seem to match the wrong update.
        whole = min(measure(self.seen(self.update - self.arrived)), measure(self.seen(self.update)))
        # Accept a guess (a simulated fault) only if the part of the wrong update that it leaves unexplained is smaller
        # than `least`.
        wrong, least = self.wrong[0], max(allowed, 0.35 * whole)
        name, found, norm = wrong.name, "it fits no known fault", self.after["weights"].norm()
        # If the norm of the weights is wrong, a simulated fault must also explain at least half of the norm's error.
        most = 0.5 * (self.step.after.norm() - norm).abs() if name == "norm_wrong" else torch.inf
        frozen = "frozen", "no weight changed, with a gradient and a learning rate", self.before["weights"]
        of_results = itertools.chain(_of_lengths(self), _of_blocks(self), _of_others(self, others))
        stepped = ((guess, text, self.stepped(result, self.step.factor).after) for guess, text, result in of_results)
        for guess, text, after in itertools.chain([frozen], _of_stages(self), stepped):
            # An unexplained part below 3% counts as 3%. So if several simulated faults leave less than 3% of the wrong
            # update unexplained, the first of them wins.
            left = max(measure(self.seen(self.update - self.recovered(after))), 0.03 * whole)
            if left < least and (after.norm() - norm).abs() <= most:
                least, name, found = left, guess, text
        self.findings.append(Finding.of(name, wrong.where, f"{wrong.found}: {found}", wrong.allowed))


def _lengths(coords: Tensor) -> Tensor:  # (m, n) -> (m,) fp64
    return torch.linalg.vector_norm(coords, dim=1).double()  # type: ignore[no-any-return]


# --------------------------------------------------------------------------------------------------------- judging


def judge(row: MatrixRow, arithmetic: Arithmetic, blocks: list[_Block], whole: dict[str, Tensor]) -> _Evidence:
    """Compare the step of one matrix with the reference.

    The arguments are those of `_Evidence`. If the update is wrong, call the result's method `find_cause` to name the
    fault.
    """
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
    # Storing the momentum rounds each element once, with a relative error of at most one eps. 8-bit codes ([Note: 8-bit
    # codes] in momentum/stores.py) have a spacing of 2 sqrt(|x| s) / 127 at the value x in a block with scale s. The
    # norm of a block's spacings is at most 2 / 127 * sqrt(6.2) times the norm of the block, because the sum of |x| s
    # over 128 elements is at most 6.2 times the sum of x^2. In addition, the gradient and the two terms of the
    # momentum's update are rounded to the momentum's dtype.
    rounded = _CODE_STEP if stored == torch.int8 else torch.finfo(stored).eps
    terms = max(float(value.norm()) for value in (before, e.before["gradient"], expected))
    allowed = 2 * rounded * terms + 1e-12 * float(expected.norm())
    difference = float((found - expected).norm())
    what = "did not change" if torch.equal(found, before) else f"is off by {difference:.1e} from B + (1 - mu) (G - B)"
    e.check(difference, allowed, "momentum_wrong", f"the momentum after the step {what}")


def _judge_norm_before(e: _Evidence) -> None:
    """Compare the norms that a Muon variant has stored with the norm of the weights before the step.

    If the variant multiplies half-precision weights by a factor near 1 to restore their norm, rounding can undo the
    multiplication. So the check allows an error of one spacing of floating-point numbers for each weight: half a
    spacing from rounding this product, and half a spacing from rounding the update.
    """
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
    """Check a step that applies no update: only weight decay, and operations that a Muon variant runs on the weights,
    may change the weights."""
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
    """Compare two versions of the orthogonalizer's input: one from the code of the stages (operations) that a Muon
    variant runs before the orthogonalizer, and one from the formulas of these stages."""
    _, exact, _ = e.arithmetic.staged(BeforeStage, e.given.double(), {})
    difference = relative_error(e.fed, exact)
    # Each stage of a Muon variant rounds twice: it rounds its factor and the product of the factor and an element.
    allowed = 2 * torch.finfo(e.fed.dtype).eps * len(e.settings.stages) + 2.0**-45
    e.check(
        difference,
        allowed,
        "variant_wrong",
        f"what its variant feeds to the orthogonalizer differs by {difference:.2g} from the formula in fp64",
    )


def _judge_dense(e: _Evidence) -> None:
    """Compare the orthogonalizer's result for the whole matrix with the result in exact arithmetic, unless rounding
    alone could explain even a completely wrong result."""
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
    """Measure a difference between two results, and use perturbed runs to find the largest difference that rounding can
    explain. To save time, do all perturbed runs only if the first few do not explain the difference. Return the
    measured and the allowed difference."""
    found = allowed = 0.0
    for count in (_FIRST, _ALL):
        measure, allowed = spread(count)
        found = measure(difference)
        if found <= allowed:
            break
    return found, allowed


def _judge_numbers(e: _Evidence) -> None:
    """Check the values that the Muon variant's stages store after the step (such as NorMuon's second moments) against
    the stages' formulas. If a stage controls the norm of the weights, check this norm against the norm after the dense
    step."""
    live = e.numbers(e.after)
    for key, expected in e.step.numbers.items():
        difference = float((live[key] - expected).abs().sum())
        size = max(float(expected.abs().sum()), 1e-300)
        # `allowed` covers the fp32 rounding of the stored value: a norm, or a running average of mean squares.
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
    """Compare the applied update with the dense update, and fill in the matrix's row of the report. If the weights are
    bitwise equal, the row's difference is 0, and its allowed difference is that of the comparison with exact
    arithmetic."""
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
        # Singular values computed from a Gram matrix are accurate only to about sqrt(eps), which is sufficient for this
        # check.
        applied = torch.linalg.eigvalsh(short @ short.T).clamp(min=0.0).sqrt()
        lowest, highest = map(float, applied.aminmax())
        text = f"the applied update differs from the same arithmetic run densely by {difference:.2g}"
        fits = least - _SLACK <= lowest and highest <= most + _SLACK
        e.suspect("wrong_matrix" if fits else "update_differs", text, allowed)


def _along(update: Tensor, expected: Tensor) -> float:
    """Return the factor r for which r * `expected` is the projection of `update` onto `expected`, or 1 if `expected` is
    zero. Rounding errors have no common direction, so they hardly change r."""
    energy = float(expected.square().sum())
    return float((update * expected).sum()) / energy if energy else 1.0


# ---------------------------------------------------------------------------------------------- naming a fault


def _parts(e: _Evidence) -> dict[str, list[_Block]]:
    """List the parts of the matrix that a faulty step may have mistaken for the whole matrix: its shards, the halves of
    its rows, and the halves of its columns. Each of these three lists is omitted if fewer than two of its parts have
    elements."""
    rows, cols = e.shape
    cuts = {
        "shards": e.blocks,
        "halves of its rows": [(slice(0, rows // 2), slice(0, cols)), (slice(rows // 2, rows), slice(0, cols))],
        "halves of its columns": [(slice(0, rows), slice(0, cols // 2)), (slice(0, rows), slice(cols // 2, cols))],
    }
    held = {what: [block for block in blocks if e.before["weights"][block].numel()] for what, blocks in cuts.items()}
    return {what: blocks for what, blocks in held.items() if len(blocks) > 1}


def _of_stages(e: _Evidence) -> Iterator[_Guess]:
    """Yield simulated faults in the operations with which a Muon variant preserves the norm of the weights. Either an
    operation did not run, or it used the norm of a part of the matrix (a shard, or half of the rows or columns) instead
    of the norm of the whole matrix. In the second case, the norm of the part may also have been stored."""
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
    """Yield guesses (simulated faults) in which the update has the right direction but the wrong length, or in which
    its elements are clamped."""
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
    """Yield guesses (simulated faults) in which parts of the matrix were orthogonalized separately or swapped with each
    other."""
    for what, blocks in _parts(e).items():
        result = torch.zeros_like(e.dense)
        for shape in {e.fed[block].shape for block in blocks}:
            same = [block for block in blocks if e.fed[block].shape == shape]
            results = e.arithmetic.orthogonalized(torch.stack([e.fed[block] for block in same]))
            for block, own in zip(same, results, strict=True):
                # Rescale each simulated block to fit the actual update, because a faulty step may compute the scale
                # from the block's shape.
                result[block] = _along(e.update[block], own) * own
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
    """Yield guesses (simulated faults) in which the matrix received the result of another matrix, the transpose of its
    own result, or the result for a wrong input, or in which the matrix was not orthogonalized."""
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
    results = e.arithmetic.orthogonalized(torch.stack([*inputs.values()]))
    for (what, value), own in zip(inputs.items(), results, strict=True):
        for how, plain in (("parallel to", value), ("the sign of", value.sign())):
            text = f"it is {how} {what}, as in plain SGD; Newton-Schulz did not run on it"
            yield "not_orthogonalized", text, _along(e.update, plain) * plain
        if bool(value.any()):
            yield "wrong_input", f"it is the orthogonalized form of {what}", own
