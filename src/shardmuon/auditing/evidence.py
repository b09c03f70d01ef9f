"""One matrix around a step, what the same arithmetic makes of it, and how far rounding may take that.

[Note: the shake]
    The same arithmetic runs on other versions of the same input, and how far the results lie apart is what rounding
    explains of this very matrix. No theory of dtype, method, schedule or spectrum is needed.

    Beside the live step: rows and columns in another order, which is that of the sums, and a few elements off by a
    spacing. Each result is put into the weights as the step would, so what stages of a variant and coarse weights add
    is in the spread, too.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from shardmuon.auditing import same
from shardmuon.auditing.dense import Block, block_of
from shardmuon.auditing.reference import Reference, recovered_update
from shardmuon.auditing.samples import Sample
from shardmuon.auditing.stages import Applied
from shardmuon.momentum.stores import Stream
from shardmuon.momentum.update import lr_scale

Measure = Callable[[Tensor], float]
FIRST, ALL = 2, 16  # shaken runs: those that are always made, and those before anything is called a fault
TIMES = 3.0  # how many times the largest of the shaken differences is allowed
_FEW = 4  # elements that another order of sums may take to the next value where that weighs most
_LONGER = 1 / 16  # by how much the norm is enlarged at most
_TOGETHER = 1 << 22  # elements of shaken runs in one call
_OWN = 1e-9  # error of the reference, of its largest direction: its Gram matrix squares what is small


@dataclass(frozen=True)
class Evidence:
    """One whole matrix around a step, in fp64, and how it was meant to be stepped.

    Attributes:
        places: Places in the matrix of the elements that each rank sent, one tensor a rank.
        rounding: See `same.stepped`.
        kept, kept_after: Numbers that stages of its variant keep, before and after the step; fp64, 1-D.
        fresh: Keys of what had just been made or loaded.
    """

    sample: Sample
    places: list[Tensor]
    before: Tensor  # weights
    buffer: Tensor  # momentum before
    grad: Tensor
    after: Tensor  # weights
    buffer_after: Tensor
    rounding: tuple[Stream, int] | None = None
    kept: Mapping[str, Tensor] = field(default_factory=dict)
    kept_after: Mapping[str, Tensor] = field(default_factory=dict)
    fresh: tuple[str, ...] = ()

    def _scale(self, rows: int, cols: int) -> float:
        s = self.sample.settings
        return lr_scale(s.adjust_lr_fn, rows, cols, s.extra_scale_factor)

    @cached_property
    def scale(self) -> float:
        """The factor on lr by the global shape."""
        return self._scale(*self.before.shape)

    @cached_property
    def scales(self) -> dict[tuple[int, int], float]:
        """(rows, cols) that a rank stores -> the scale that it would give, and that must not be used."""
        shards = [(rows.stop - rows.start, cols.stop - cols.start) for rows, cols in self.blocks]
        shards += [(s[0], math.prod(s[1:])) for s in self.sample.shapes if len(s) > 1 and 0 not in s]
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

    def orthogonalized(self, values: Tensor, *, nudged: bool = False) -> Tensor:  # (..., rows, cols), fp64 out
        """Orthogonalize matrices in the live arithmetic. `nudged`: see `same.run`."""
        batch = values.view(-1, *values.shape[-2:])
        found = same.run(batch, self.sample.arithmetic, self.sample.settings, nudged=nudged)
        return found.to(torch.float64).view(values.shape)

    def stepped(
        self,
        result: Tensor,  # (rows, cols) fp64, of the orthogonalizer
        factor: Tensor | None = None,  # of the stages after the orthogonalizer; default: by their formulas
    ) -> Stepped:
        """Step the weights with a result: stages, decay, rounding."""
        arithmetic, settings = self.sample.arithmetic, self.sample.settings
        applied = Applied(settings.stages, self.kept, factor)
        staged = applied.to_result(result) if factor is None else result * factor
        if applied.factor is not None:
            staged = staged.to(arithmetic.wire_dtype).to(torch.float64)
        updated = same.stepped(self.before, staged, self.scale, arithmetic, settings, self.rounding)
        return Stepped(staged, updated, applied.to_weights(updated).to(torch.float64), applied)


@dataclass(frozen=True)
class Stepped:
    """A step of one matrix: its update after all stages, the weights before those on weights, and after them."""

    staged: Tensor  # (rows, cols) fp64
    updated: Tensor  # the weights' dtype
    after: Tensor  # fp64
    applied: Applied


class Shaken(NamedTuple):
    """A step of a shaken result.

    Attributes:
        lengths: (m,) of its update beside the dense one's, in each direction.
        norm: Norm of the weights after it.
        kept: Numbers that stages keep after it.
    """

    lengths: Tensor
    norm: float
    kept: Mapping[str, Tensor]


@dataclass
class Compared:
    """The update of one matrix beside the same arithmetic run densely, and that beside the exact one.

    Attributes:
        fed: What should have been orthogonalized, as the orthogonalizer takes it.
        dense: Result of the same arithmetic, run densely.
        step: The step that the weights take with it.
        orders: Results of `in_other_orders` so far.
        errors: Results of `nudged` so far.
    """

    evidence: Evidence
    fed: Tensor
    dense: Tensor
    step: Stepped
    reference: Reference
    orders: list[Shaken] = field(default_factory=list)
    errors: list[Tensor] = field(default_factory=list)

    def recovered(self, after: Tensor) -> Tensor:  # (rows, cols) fp64
        """The result of the orthogonalizer that led to these weights, if the stages did what they should."""
        e, applied = self.evidence, self.step.applied
        update = recovered_update(e.before, applied.undone(after), e.sample.settings, e.scale, self.step.staged)
        return update if applied.factor is None else update / applied.factor

    @cached_property
    def update(self) -> Tensor:
        """The update that the step applied."""
        return self.recovered(self.evidence.after)

    @cached_property
    def arrived(self) -> Tensor:
        """The part of the dense result that the weights can hold."""
        return self.recovered(self.step.after)

    def arrives(self, result: Tensor) -> Tensor:
        """Recover this result from weights stepped with it and with the dense result's factors: rounding included."""
        return self.recovered(self.evidence.stepped(result, self.step.applied.factor).after)

    def seen(self, matrix: Tensor) -> Tensor:  # (rows, cols) -> (m, n)
        """A matrix in the reference's coordinates, in the precision that its arithmetic needs."""
        return self.reference.seen(matrix.to(self._wide))

    @cached_property
    def exact(self) -> Tensor:  # (m, n) fp64
        """The exact result in the reference's coordinates."""
        return self.reference.ratios().unsqueeze(1) * self.reference.coords

    @cached_property
    def error(self) -> Tensor:  # (m, n) fp64
        """The dense result beside exact arithmetic, in the reference's coordinates."""
        return self.reference.seen(self.dense) - self.exact

    def in_other_orders(self, count: int) -> list[Shaken]:
        """The first `count` steps that the same arithmetic makes with rows and columns in another order and a few
        elements nudged: see [Note: the shake]."""
        for seeds in self._batches(len(self.orders), count):
            made, orders = [], []
            for seed in seeds:
                generator, x = torch.Generator().manual_seed(seed), self.fed.to(torch.float64, copy=True)
                few = torch.randint(x.numel(), (_FEW,), generator=generator)
                signs = torch.randint(2, (_FEW,), generator=generator) * 2 - 1
                x.view(-1)[few.to(x.device)] *= (1 + self._eps * signs).to(x.device, x.dtype)
                orders.append([torch.randperm(n, generator=generator).to(x.device) for n in x.shape])
                made.append(x[orders[-1][0]][:, orders[-1][1]])
            results = self.evidence.orthogonalized(torch.stack(made), nudged=True)
            for result, (rows, cols) in zip(results, orders, strict=True):
                step = self.evidence.stepped(result[rows.argsort()][:, cols.argsort()])
                lengths = _lengths(self.seen(self.recovered(step.after) - self.arrived))
                self.orders.append(Shaken(lengths, float(step.after.norm()), step.applied.kept))
        return self.orders[:count]

    def nudged(self, count: int) -> list[Tensor]:  # (m,) each
        """Lengths of so many shaken errors beside exact arithmetic, as differences from the dense result's: [Note: the
        shake]."""
        reference, a, s = self.reference, self.evidence.sample.arithmetic, self.evidence.sample.settings
        for seeds in self._batches(len(self.errors), count):
            made, longers = [], []
            for seed in seeds:
                generator = torch.Generator().manual_seed(seed)
                nudges = torch.rand(self.fed.shape, generator=generator, dtype=self._wide).mul_(2).sub_(1)
                x = nudges.to(self.fed.device).mul_(self._eps).add_(1).mul_(self.fed)
                norm = float(torch.linalg.vector_norm(x, dtype=torch.float64))
                longer = 1 + _LONGER * float(torch.rand(1, generator=generator))
                made.append(torch.nn.functional.pad(x, (0, 1, 0, 1)))
                made[-1][-1, -1] = norm * math.sqrt(longer**2 - 1)
                least = s.eps if a.method == "torch" else 0.0
                longers.append(max(longer * norm, least) / max(norm, least))
            results = self.evidence.orthogonalized(torch.stack(made), nudged=True)[:, :-1, :-1]
            for result, longer in zip(results, longers, strict=True):
                less = (reference.ratios() - reference.ratios(longer)).unsqueeze(1) * reference.coords
                self.errors.append(_lengths(self.seen(result - self.dense) + less.to(self._wide)))
        return self.errors[:count]

    def _batches(self, done: int, count: int) -> list[range]:
        """Seeds of the shaken runs that are still to be made, as many together as memory allows."""
        together = max(1, _TOGETHER // self.fed.numel())
        return [range(at, min(at + together, count)) for at in range(done, count, together)]

    @property
    def _eps(self) -> float:
        return torch.finfo(self.evidence.sample.arithmetic.products).eps

    @property
    def _wide(self) -> torch.dtype:
        return torch.float64 if self.evidence.sample.arithmetic.products == torch.float64 else torch.float32

    def spread(self, count: int) -> tuple[Measure, float]:
        """`_beside` the updates of so many steps in another order."""
        shaken = [step.lengths for step in self.in_other_orders(count)]
        return self._beside(shaken, self.seen(self.arrived), self._spacing)

    @property
    def _spacing(self) -> float:
        """Change of the update when the largest weight goes to its next value."""
        sample, scale, factor = self.evidence.sample, self.evidence.scale, self.step.applied.factor
        spacing = torch.finfo(sample.arithmetic.weight_dtype).eps * float(self.step.after.abs().amax())
        return spacing / abs(sample.settings.lr * scale) / (1.0 if factor is None else float(factor.abs().amin()))

    def orthogonalizer(self, count: int) -> tuple[Measure, float]:
        """`_beside` so many shaken errors."""
        return self._beside(self.nudged(count), self.exact)

    def _beside(self, lengths: Sequence[Tensor], expected: Tensor, least: float = 0.0) -> tuple[Measure, float]:
        """A measure of differences beside those that rounding makes, and the largest allowed: [Note: the shake].

        Args:
            lengths: Lengths of shaken differences.
            expected: What all these are differences from, in the reference's coordinates, as is what is measured.
            least: What no direction is settled better than.
        """
        own, shaken = _lengths(expected), torch.stack(list(lengths))
        floor = (self._eps * own).square() + (_OWN * own.amax()).square() + least**2 + 1e-300
        noise = (shaken.square().mean(0) + floor).sqrt()
        unit = 1 / max(float((own / noise).amax()), 1e-300)
        allowed = TIMES * unit * max(1.0, float((shaken / noise).amax()))
        return lambda difference: unit * float((_lengths(difference) / noise).amax()), allowed


def _lengths(coords: Tensor) -> Tensor:  # (m, n) -> (m,) fp64
    found: Tensor = torch.linalg.vector_norm(coords, dim=1)
    return found.double()
