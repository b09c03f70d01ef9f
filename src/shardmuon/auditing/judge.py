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
    spacing, and all of them together by a few of fp32: a live stage divides once by norms where the dense one does it
    twice, and elements that are all alike (a matrix of ones) are rounded all alike. Each result is put into the
    weights as the step would, so what stages of a variant and coarse weights add is in the spread, too.

    Beside exact arithmetic: each element off by up to a spacing, so that every product is rounded anew, and one more
    row and column that are zero but for their corner. That enlarges the norm by up to `_LONGER`, so that elements
    which are all alike (a matrix of ones) are rounded anew together; what exact arithmetic makes of the larger norm is
    known, and only the error beside that is taken.

    The steps enlarge rounding where a singular value is nearly zero, so results may differ there by all of their
    length, and hardly at all in other directions. A difference is therefore looked at direction by direction, those of
    the left singular vectors of the reference: its length in each over the root mean square of the shaken ones. The
    largest of these counts, in units of what the result itself has there at most. No direction counts as settled
    better than to a spacing of its own result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from shardmuon.auditing.dense import Block, block_of
from shardmuon.auditing.reference import (
    Arithmetic,
    KeptNumbers,
    Reference,
    momentum_of,
    norm_of,
    orthogonalized,
    prepared,
    recovered_update,
    reference_of,
    relative_difference,
    restored,
    staged,
    weight_stages,
    weights_after,
)
from shardmuon.auditing.report import Finding, MatrixRow
from shardmuon.layout.pieces import Box
from shardmuon.layout.table import ParamLayout
from shardmuon.momentum.stores import Stream
from shardmuon.options import lr_scale
from shardmuon.orthogonalize import TORCH_EPS
from shardmuon.step.options import Settings

_Measure = Callable[[Tensor], float]
_FIRST, ALL = 2, 16  # shaken runs: those that are always made, and those before anything is called a fault
_TIMES = 3.0  # how many times the largest of the shaken differences is allowed
_HARDLY = 0.1  # of a wrong norm may be left over by its explanation: the update is rounded otherwise
_BLIND = 0.5  # an allowed difference above this cannot tell an update from a wrong one
_FEW = 4  # elements that another order of sums may take to the next value, and spacings that all of them may move
_LONGER = 1 / 16  # by how much the norm is enlarged at most
_TOGETHER = 1 << 22  # elements of shaken runs in one call
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
        factor, on_weights: Factors of the stages on the result (None: no such stage) and on the weights.
        kept: What stages keep then.
    """

    staged: Tensor
    updated: Tensor
    after: Tensor
    factor: Tensor | None
    on_weights: float
    kept: KeptNumbers


class Guess(NamedTuple):
    """An explanation: name of the fault, what is found then, and the weights (rows, cols) fp64 that it leads to."""

    name: str
    found: str
    after: Tensor


class _Shaken(NamedTuple):
    """A step of a shaken result: lengths (m,) of its update beside the dense one's in each direction, the norm of the
    weights after it, and what stages keep then."""

    lengths: Tensor
    norm: float
    kept: KeptNumbers


@dataclass
class Evidence:
    """One whole matrix around a step, how it was meant to be stepped, and what its own arithmetic makes of it.

    Attributes:
        row: The report's line for it; `judge` fills it in.
        places: Places in the matrix of the elements that each rank sent, one tensor a rank.
        before, buffer, grad: (rows, cols) fp64 weights, momentum and gradient before the step.
        after, buffer_after: Weights and momentum after it.
        rounding: See `weights_after`.
        kept, kept_after: Numbers that stages of its variant keep, before and after the step; fp64, 1-D.
        fresh: Keys of what had just been made or loaded: norms that were not known are those of the weights.
        findings: Faults that have been found.
        differs: True if the update is not the dense one, for a reason still to be named.
    """

    row: MatrixRow
    arithmetic: Arithmetic
    settings: Settings
    layout: ParamLayout
    places: list[Tensor]
    before: Tensor
    buffer: Tensor
    grad: Tensor
    after: Tensor
    buffer_after: Tensor
    rounding: tuple[Stream, int] | None
    kept: KeptNumbers
    kept_after: KeptNumbers
    fresh: Sequence[str]
    findings: list[Finding] = field(default_factory=list)
    differs: bool = False
    _orders: list[_Shaken] = field(default_factory=list)
    _errors: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        unknown = [s.key for s in weight_stages(self.settings.stages) if s.key in self.fresh and not self.kept[s.key]]
        self.kept = {**self.kept, **dict.fromkeys(unknown, norm_of(self.before))}

    def say(self, name: str, found: str, allowed: str) -> None:
        """Note a fault of this matrix."""
        self.findings.append(Finding.of(name, self.row.name, found, allowed))

    # ------------------------------------------------------------------------------------------ its shape and shards

    def _scale(self, rows: int, cols: int) -> float:
        return lr_scale(self.settings.adjust_lr_fn, rows, cols)

    @cached_property
    def scale(self) -> float:
        """The factor on lr by the global shape."""
        return self._scale(*self.before.shape)

    @cached_property
    def scales(self) -> dict[tuple[int, int], float]:
        """(rows, cols) that a rank stores -> the scale that it would give, and that must not be used."""
        shards = [(rows.stop - rows.start, cols.stop - cols.start) for rows, cols in self.blocks]
        boxes = [held.piece.size for of_rank in self.layout.held for held in of_rank if isinstance(held.piece, Box)]
        shards += [(size[0], math.prod(size[1:])) for size in boxes if len(size) > 1 and 0 not in size]
        found = {}
        for shape in dict.fromkeys(shards):
            if shape != self.before.shape:
                try:
                    found[shape] = self._scale(*shape)
                except Exception:  # the caller's own scale need not know shapes of shards
                    continue
        return found

    @cached_property
    def blocks(self) -> list[Block]:
        """Rectangles of the matrix that lie on one rank; other shapes (kernels cut inside) are left out."""
        found = [block_of(places, self.before.shape[1]) for places in self.places]
        return [block for block in found if block is not None]

    @cached_property
    def parts(self) -> dict[str, list[Block]]:
        """Shards and halves of the matrix, of which somebody may have taken one for the whole. At least two of each."""
        rows, cols = self.before.shape
        cuts = {
            "shards": self.blocks,
            "halves of its rows": [(slice(0, rows // 2), slice(0, cols)), (slice(rows // 2, rows), slice(0, cols))],
            "halves of its columns": [(slice(0, rows), slice(0, cols // 2)), (slice(0, rows), slice(cols // 2, cols))],
        }
        return {
            what: blocks
            for what, blocks in cuts.items()
            if len(blocks) > 1 and all(side.stop > side.start for block in blocks for side in block)
        }

    # --------------------------------------------------------------------------------------------- its dense step

    @cached_property
    def momentum(self) -> tuple[Tensor, Tensor]:
        """The momentum after the step, and the orthogonalizer's input before stages, as the step computes them."""
        return momentum_of(self.buffer, self.grad, self.before, self.arithmetic, self.settings)

    @cached_property
    def fed(self) -> Tensor:
        """The orthogonalizer's input."""
        return prepared(self.momentum[1], self.settings.stages)[0]

    @cached_property
    def reference(self) -> Reference:
        """The result of exact arithmetic."""
        method = "gram" if self.arithmetic.by_gram else self.arithmetic.method
        return reference_of(self.fed, self.settings.coefficients, method=method)

    @cached_property
    def dense(self) -> Tensor:
        """The result of the same arithmetic, run densely."""
        return self.orthogonalized(self.fed)

    @cached_property
    def step(self) -> _StepWith:
        """The step that the weights take with it."""
        return self.stepped(self.dense)

    @cached_property
    def update(self) -> Tensor:
        """The update that the step applied."""
        return self.recovered(self.after)

    @cached_property
    def arrived(self) -> Tensor:
        """The part of the dense result that the weights can hold."""
        return self.recovered(self.step.after)

    @cached_property
    def exact(self) -> Tensor:  # (m, n) fp64
        """The exact result in the reference's coordinates."""
        return self.reference.ratios().unsqueeze(1) * self.reference.coords

    def orthogonalized(self, values: Tensor, *, nudged: bool = False) -> Tensor:  # (..., rows, cols), fp64 out
        """Orthogonalize matrices in the live arithmetic. `nudged`: see `reference.orthogonalized`."""
        batch = values.view(-1, *values.shape[-2:])
        return orthogonalized(batch, self.arithmetic, self.settings, nudged=nudged).double().view(values.shape)

    def stepped(self, result: Tensor, factor: Tensor | None = None) -> _StepWith:
        """Step the weights with a result of the orthogonalizer, (rows, cols) fp64: stages, decay, rounding. `factor`:
        that of the stages on the result; default: by their formulas."""
        a, s, kept = self.arithmetic, self.settings, self.kept
        if factor is None:
            factor, kept = staged(result, s.stages, kept)
        if factor is not None:
            result = (result * factor).to(a.wire_dtype).double()
        updated = weights_after(self.before, result, self.scale, a, s, self.rounding)
        after, on_weights, kept = restored(updated, s.stages, kept)
        return _StepWith(result, updated, after.double(), factor, on_weights, kept)

    def recovered(self, after: Tensor) -> Tensor:  # (rows, cols) fp64
        """The result of the orthogonalizer that led to these weights, if the stages did what they should."""
        step = self.step
        update = recovered_update(self.before, after / step.on_weights, self.settings, self.scale, step.staged)
        return update if step.factor is None else update / step.factor

    # ------------------------------------------------------------------------------------------------- the shake

    def seen(self, matrix: Tensor) -> Tensor:  # (rows, cols) -> (m, n)
        """A matrix in the reference's coordinates, in the precision that its arithmetic needs."""
        return self.reference.seen(matrix.to(self._wide))

    def in_other_orders(self, count: int) -> list[_Shaken]:
        """The first `count` steps that the same arithmetic makes with rows and columns in another order and a few
        elements nudged: see [Note: the shake]."""
        for seeds in self._batches(len(self._orders), count):
            made, orders = [], []
            for seed in seeds:
                generator, x = torch.Generator().manual_seed(seed), self.fed.to(torch.float64, copy=True)
                few = torch.randint(x.numel(), (_FEW,), generator=generator)
                signs = torch.randint(2, (_FEW,), generator=generator) * 2 - 1
                x.view(-1)[few.to(x.device)] *= (1 + self._eps * signs).to(x.device, x.dtype)
                together = int(torch.randint(-_FEW, _FEW + 1, (), generator=generator))
                x *= 1 + together * torch.finfo(self._wide).eps
                orders.append([torch.randperm(n, generator=generator).to(x.device) for n in x.shape])
                made.append(x[orders[-1][0]][:, orders[-1][1]])
            results = self.orthogonalized(torch.stack(made), nudged=True)
            for result, (rows, cols) in zip(results, orders, strict=True):
                step = self.stepped(result[rows.argsort()][:, cols.argsort()])
                lengths = _lengths(self.seen(self.recovered(step.after) - self.arrived))
                self._orders.append(_Shaken(lengths, float(step.after.norm()), step.kept))
        return self._orders[:count]

    def nudged(self, count: int) -> list[Tensor]:  # (m,) each
        """Lengths of so many shaken errors beside exact arithmetic, as differences from the dense result's: [Note: the
        shake]."""
        reference, least = self.reference, TORCH_EPS if self.arithmetic.method == "torch" else 0.0
        for seeds in self._batches(len(self._errors), count):
            made, longers = [], []
            for seed in seeds:
                generator = torch.Generator().manual_seed(seed)
                nudges = torch.rand(self.fed.shape, generator=generator, dtype=self._wide).mul_(2).sub_(1)
                x = nudges.to(self.fed.device).mul_(self._eps).add_(1).mul_(self.fed)
                norm = float(torch.linalg.vector_norm(x, dtype=torch.float64))
                longer = 1 + _LONGER * float(torch.rand(1, generator=generator))
                made.append(torch.nn.functional.pad(x, (0, 1, 0, 1)))
                made[-1][-1, -1] = norm * math.sqrt(longer**2 - 1)
                longers.append(max(longer * norm, least) / max(norm, least))
            results = self.orthogonalized(torch.stack(made), nudged=True)[:, :-1, :-1]
            for result, longer in zip(results, longers, strict=True):
                less = (reference.ratios() - reference.ratios(longer)).unsqueeze(1) * reference.coords
                difference = self.seen(result - self.dense)
                self._errors.append(_lengths(difference + less.to(difference)))
        return self._errors[:count]

    def _batches(self, done: int, count: int) -> list[range]:
        """Seeds of the shaken runs that are still to be made, as many together as memory allows."""
        together = max(1, _TOGETHER // self.fed.numel())
        return [range(at, min(at + together, count)) for at in range(done, count, together)]

    @property
    def _wide(self) -> torch.dtype:
        return torch.promote_types(self.arithmetic.products, torch.float32)

    @property
    def _eps(self) -> float:
        return torch.finfo(self.arithmetic.products).eps

    def spread(self, count: int) -> tuple[_Measure, float]:
        """`_beside` the updates of so many steps in another order. No direction is settled better than the largest
        weight, to its next value, nor than numbers that stages keep in fp32, whatever the products are: each is rounded
        four times, and scales a line of the result by its root, so by an eps."""
        spacing = torch.finfo(self.arithmetic.weight_dtype).eps * float(self.step.after.abs().amax())
        factor = 1.0 if self.step.factor is None else float(self.step.factor.abs().amin())
        expected, least = self.seen(self.arrived), spacing / abs(self.settings.lr * self.scale) / factor
        if self.step.kept:
            least = max(least, _EPS * float(_lengths(expected).amax()))
        return self._beside([step.lengths for step in self.in_other_orders(count)], expected, least)

    def orthogonalizer(self, count: int) -> tuple[_Measure, float]:
        """`_beside` so many shaken errors."""
        return self._beside(self.nudged(count), self.exact)

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
    lengths: Tensor = torch.linalg.vector_norm(coords, dim=1)
    return lengths.double()


# --------------------------------------------------------------------------------------------------------- judging


def judge(e: Evidence) -> None:
    """Compare a step of one matrix with the reference. Names no causes of a wrong update: `naming.name_fault` does."""
    tensors = {"weights": e.before, "momentum": e.buffer, "gradient": e.grad, "updated weights": e.after}
    bad = [name for name, value in tensors.items() if not bool(value.isfinite().all())]
    e.row = replace(e.row, status="fault", expected_scale=e.scale)
    if bad:
        e.say("not_finite", f"NaN or infinity in {', '.join(bad)}", "finite numbers")
        return
    _judge_momentum(e)
    _judge_norm_before(e)
    frozen = e.settings.lr * e.scale == 0.0
    if frozen or not bool(e.momentum[1].any()):
        e.row = replace(e.row, status="lr is 0" if frozen else "zero")
        _judge_still(e)
        return
    _judge_prepared(e)
    named = _judge_norm_after(e)
    _judge_dense(e)
    _judge_kept(e)
    _judge_update(e)
    e.differs = e.row.status == "fault" and not named


def _judge_momentum(e: Evidence) -> None:
    expected, fed = (value.double() for value in e.momentum)
    size, stored = float(expected.norm()), e.arithmetic.stored_dtype
    # Storing rounds each element once, by at most an eps. 8-bit codes ([Note: 8-bit codes] in momentum/stores.py) step
    # by 2 sqrt(|x| s) / 127 at x in a block of scale s: over a block of 128 with one large element at most 2 / 127 *
    # sqrt(6.2) of its norm. The gradient is rounded to the momentum's dtype, and so are the two terms of its update.
    rounded = _CODE_STEP if stored == torch.int8 else torch.finfo(stored).eps
    terms = max(float(e.buffer.norm()), float(e.grad.norm()), size)
    allowed = 2 * rounded * (terms / size if size else 1.0) + 1e-12
    norm = float(e.buffer_after.norm())
    difference = relative_difference(e.buffer_after, expected) if size else norm
    e.row = replace(e.row, momentum_difference=difference, momentum_allowed=allowed)
    if difference <= allowed:
        return
    name, what = "momentum_wrong", f"it differs from B + (1 - mu) (G - B) by {difference:.1e} of its norm"
    close_to = e.orthogonalized(fed) if bool(fed.any()) else fed
    normalized = abs(norm - 1.0) < 0.1 and min(sine(e.buffer_after, value) for value in (expected, fed)) < 0.05
    if torch.equal(e.buffer_after, e.buffer):
        what = "it did not change"
    elif normalized or sine(e.buffer_after, close_to) < 0.1:
        name = "momentum_written_in_place"
        what = f"its norm went from {size:.3g} to {norm:.3g}: it holds a result of the orthogonalizer"
    e.say(name, f"momentum after the step: {what}", f"a difference of {allowed:.1e}")


def _judge_norm_before(e: Evidence) -> None:
    """Kept norms beside those of the weights before the step. Half-precision weights can undo a factor near 1
    altogether, so up to half a spacing of each element, all the same way, and half a spacing more for the update."""
    norm = float(e.before.norm())
    share = torch.finfo(e.arithmetic.weight_dtype).eps + _ROUNDINGS * _EPS
    for stage in weight_stages(e.settings.stages):
        kept = float(e.kept[stage.key])
        if kept and abs(kept - norm) > share * norm:  # 0: not known, of a matrix of zeros
            text = f"its {stage.key} is {kept:.7g}, the norm of its weights before the step {norm:.7g}"
            e.say("norm_stale", text, f"{share:.1e} of it")


def _judge_still(e: Evidence) -> None:
    """Check a step that applies nothing: the weights may decay and no more."""
    step = e.stepped(torch.zeros_like(e.before), torch.ones(()))
    left = float((e.after - step.after).norm())
    roundings = torch.finfo(e.arithmetic.weight_dtype).eps + (2 * _EPS if weight_stages(e.settings.stages) else 0.0)
    allowed = roundings * (float(e.before.norm()) + float(e.after.norm())) + 1e-12
    if left > allowed:
        text = f"nothing was to be applied, but the weights differ by {left:.1e} from decayed ones"
        e.say("update_differs", text, f"{allowed:.1e}")


def _judge_prepared(e: Evidence) -> None:
    """The live stages' input of the orthogonalizer beside the formulas'."""
    live, exact = prepared(e.momentum[1], e.settings.stages)
    difference = relative_difference(live.double(), exact)
    # each element: the factor and the product, rounded once for each stage
    allowed = 2 * torch.finfo(live.dtype).eps * len(e.settings.stages) + 2.0**-45
    if difference > allowed:
        text = f"what its variant feeds to the orthogonalizer differs by {difference:.2g} from the formula in fp64"
        e.say("variant_wrong", text, f"{allowed:.1e}")


def _judge_norm_after(e: Evidence) -> bool:
    """The norm after the step beside that of the dense one. True if it is wrong, and the fault named."""
    size, target = float(e.after.norm()), float(e.step.after.norm())
    allowed = _ROUNDINGS * _EPS * target
    if weight_stages(e.settings.stages) and abs(size - target) > allowed:
        allowed += _TIMES * max(abs(run.norm - target) for run in e.in_other_orders(ALL))
    if not weight_stages(e.settings.stages) or abs(size - target) <= allowed:
        return False
    times = size / max(target, 1e-300)
    text = f"the norm of its weights after the step is {size:.7g}, {times:.4g} times that of the rule"
    left = max(allowed, _HARDLY * abs(size - target))  # by a guess that fits
    fitting = (guess for guess in other_norms(e) if abs(float(guess.after.norm()) - size) <= left)
    guess = next(fitting, Guess("norm_wrong", "nothing known leads to that", e.after))
    e.say(guess.name, f"{text}: {guess.found}", f"{allowed:.1e}")
    return True


def other_norms(e: Evidence) -> Iterator[Guess]:
    """Guesses at stages on weights that went wrong: the norms of parts of the matrix taken for each part, and maybe
    kept, too; and no such stage."""
    if not weight_stages(e.settings.stages):
        return
    for what, blocks in e.parts.items():
        for own in (True, False):
            after = e.step.updated.clone()
            for block in blocks:
                kept = {**e.kept, **kept_of(e, block)} if own else e.kept
                after[block] = restored(after[block], e.settings.stages, kept)[0]
            yield Guess("norm_of_shard", f"norms of its {what} lead to that", after.double())
    yield Guess("norm_not_restored", "the update alone leads to that", e.step.updated.double())


def kept_of(e: Evidence, block: Block) -> KeptNumbers:
    """Kept norms as if this block were the matrix."""
    return {stage.key: norm_of(e.before[block]) for stage in weight_stages(e.settings.stages)}


def _judge_dense(e: Evidence) -> None:
    """Compare the same arithmetic's result with the exact one. Where the largest singular value settles its direction,
    a result that is off by all of it is wrong, even if its shaken runs are, too, each in another way."""
    error = e.reference.seen(e.dense) - e.exact
    found, allowed = _asked(e.orthogonalizer, error)
    if allowed > _BLIND:
        if not e.reference.settles(torch.finfo(e.arithmetic.products).eps):
            return
        found, allowed = float(error[-1].norm() / e.exact[-1].norm().clamp(min=1e-30)), 1.0
    if found > allowed:
        e.say(
            "orthogonalizer_wrong",
            f"{e.arithmetic} run by itself on the whole matrix differs from exact arithmetic by {found:.2g} in the "
            "directions that rounding leaves settled",
            f"{allowed:.1e} ({e.arithmetic}, this very matrix shaken)",
        )


def _asked(spread: Callable[[int], tuple[_Measure, float]], difference: Tensor) -> tuple[float, float]:
    """A difference and what is allowed: by few shaken runs if these explain it, else by all."""
    found = allowed = 0.0
    for count in (_FIRST, ALL):
        measure, allowed = spread(count)
        found = measure(difference)
        if found <= allowed:
            break
    return found, allowed


def _judge_kept(e: Evidence) -> None:
    """Compare the numbers that stages keep after the step with the formulas'."""
    for key, expected in e.step.kept.items():
        found, size = e.kept_after[key], max(float(expected.abs().sum()), 1e-300)
        difference = float((found - expected).abs().sum())
        # a mean of squares and the average, in fp32
        allowed = (math.sqrt(max(e.before.shape) / 6) + 2 * _ROUNDINGS) * _EPS * size
        if difference > allowed:
            allowed += _TIMES * max(float((run.kept[key] - expected).abs().sum()) for run in e.in_other_orders(ALL))
        if difference > allowed:
            unchanged = ": it is that of before the step" if torch.equal(found, e.kept[key]) else ""
            text = f"its {key} after the step differs by {difference / size:.2g} from the formula in fp64{unchanged}"
            e.say("kept_wrong", text, f"{allowed / size:.1e}")


def _judge_update(e: Evidence) -> None:
    """The applied update beside the dense one; of equal bits what is allowed beside exact arithmetic is shown."""
    if torch.equal(e.after, e.step.after):
        status, difference, allowed = "ok", 0.0, e.orthogonalizer(_FIRST)[1]
    else:
        difference, allowed = _asked(e.spread, e.seen(e.update - e.arrived))
        status = "inconclusive" if allowed > _BLIND else "ok" if difference <= allowed else "fault"
    results = (e.reference.sigmas * e.reference.ratios()).abs()
    short = e.update.T if e.update.shape[0] > e.update.shape[1] else e.update
    applied = torch.linalg.eigvalsh(short @ short.T).clamp(min=0.0).sqrt()  # good to the square root of eps
    arrived = along(e.arrived, e.dense)
    if arrived < 1 - _BLIND:
        text = (
            f"{100 * max(0.0, arrived):.0f}% of the update arrived: {e.arithmetic.weight_dtype} weights are too coarse"
        )
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
        band=(float(results.amin()), float(results.amax())),
    )


def along(update: Tensor, expected: Tensor) -> float:
    """Length of an update along the expected one, relative; rounding, which has no direction, hardly moves it."""
    energy = float(expected.square().sum())
    return float((update * expected).sum()) / energy if energy else 1.0


def sine(first: Tensor, second: Tensor) -> float:
    """Sine of the angle between two tensors, 1 if one of them is zero; opposite ones are far apart, too."""
    lengths = float(first.norm()), float(second.norm())
    if not all(lengths):
        return 1.0
    unit, other = first / lengths[0], second / lengths[1]
    along = float((unit * other).sum())
    return float((unit - other * along).norm()) if along > 0 else 1.0
