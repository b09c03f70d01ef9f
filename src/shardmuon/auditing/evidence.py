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

import torch
from torch import Tensor

from shardmuon.auditing import same
from shardmuon.auditing.dense import MatrixPieces
from shardmuon.auditing.reference import Reference, recovered_update
from shardmuon.auditing.same import Arithmetic
from shardmuon.auditing.stages import Applied
from shardmuon.momentum.rounding import Stream
from shardmuon.step.options import Settings

Block = tuple[slice, slice]
Measure = Callable[[Tensor], float]
FIRST, ALL = 4, 16  # shaken runs: those that are always made, and those before anything is called a fault
TIMES = 3.0  # how many times the largest of the shaken differences is allowed
_FEW = 4  # elements that another order of sums may take to the next value where that weighs most
_LONGER = 1 / 16  # by how much the norm is enlarged at most
_OWN = 1e-9  # error of the reference, of its largest direction: its Gram matrix squares what is small


@dataclass(frozen=True)
class Evidence:
    """One whole matrix around a step, in fp64, and how it was meant to be stepped.

    Attributes:
        scale: Factor on lr by the global shape.
        scales: (rows, cols) that a rank stores -> the scale that it would give, and that must not be used.
        rounding: See `same.stepped`.
        kept, kept_after: By stages of its variant, before and after the step; fp64, 1-D.
        fresh: Keys of what had just been made or loaded.
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
    rounding: tuple[Stream, int] | None = None
    kept: Mapping[str, Tensor] = field(default_factory=dict)
    kept_after: Mapping[str, Tensor] = field(default_factory=dict)
    fresh: tuple[str, ...] = ()

    @cached_property
    def parts(self) -> dict[str, list[Block]]:
        """Shards and halves of the matrix, of which somebody may have taken one for the whole. At least two of each."""
        rows, cols = self.before.shape
        cuts = {
            "shards": self.pieces.blocks(),
            "halves of its rows": [(slice(0, rows // 2), slice(0, cols)), (slice(rows // 2, rows), slice(0, cols))],
            "halves of its columns": [(slice(0, rows), slice(0, cols // 2)), (slice(0, rows), slice(cols // 2, cols))],
        }
        return {
            what: blocks
            for what, blocks in cuts.items()
            if len(blocks) > 1 and all(side.stop > side.start for block in blocks for side in block)
        }

    def orthogonalized(self, value: Tensor, *, nudged: bool = False) -> Tensor:  # (rows, cols) fp64
        """A matrix in the live arithmetic. `nudged`: see `same.run`."""
        return same.run(value, self.arithmetic, self.settings, nudged=nudged).to(torch.float64)

    def shaken(self, fed: Tensor, reference: Reference | None, seed: int) -> Tensor:  # (rows, cols) fp64
        """The result of another version of the same input: [Note: the shake].

        Args:
            fed: The input.
            reference: Its exact result, for a shake of all elements and of the norm. None: of the order and `_FEW`.
            seed: Of the shake.
        """
        generator = torch.Generator().manual_seed(seed)
        rows, cols = (torch.randperm(n, generator=generator).to(fed.device) for n in fed.shape)
        nudges = torch.rand(fed.shape, generator=generator, dtype=torch.float64).mul_(2).sub_(1)
        longer = 1 + _LONGER * float(torch.rand(1, generator=generator))
        if reference is None:
            nudges.view(-1)[torch.randperm(fed.numel(), generator=generator)[_FEW:]] = 0.0
            nudges, longer = nudges.sign(), 1.0
        x = fed.to(torch.float64) * (1 + torch.finfo(self.arithmetic.products).eps * nudges.to(fed.device))
        bordered = torch.nn.functional.pad(x[rows][:, cols], (0, 1, 0, 1))
        norm = float(x.norm())
        bordered[-1, -1] = norm * math.sqrt(longer**2 - 1)
        found = torch.zeros_like(x)
        if reference is not None:
            least = self.settings.eps if self.arithmetic.method == "torch" else 0.0
            found = reference.update() - reference.update(max(longer * norm, least) / max(norm, least))
        found[rows.unsqueeze(1), cols] += self.orthogonalized(bordered, nudged=True)[:-1, :-1]
        return found

    def stepped(
        self,
        result: Tensor,  # (rows, cols) fp64, of the orthogonalizer
        factor: Tensor | None = None,  # of the stages after the orthogonalizer; default: by their formulas
    ) -> Stepped:
        """What the step makes of a result: stages, weights, rounding."""
        applied = Applied(self.settings.stages, self.kept, factor)
        staged = applied.to_result(result) if factor is None else result * factor
        if applied.factor is not None:
            staged = staged.to(self.arithmetic.wire_dtype).to(torch.float64)
        updated = same.stepped(self.before, staged, self.scale, self.arithmetic, self.settings, self.rounding)
        return Stepped(staged, updated, applied.to_weights(updated).to(torch.float64), applied)


@dataclass(frozen=True)
class Stepped:
    """A step of one matrix: its update after all stages, the weights before those on weights, and after them."""

    staged: Tensor  # (rows, cols) fp64
    updated: Tensor  # the weights' dtype
    after: Tensor  # fp64
    applied: Applied


@dataclass
class Compared:
    """The update of one matrix beside the same arithmetic run densely, and that beside the exact one.

    Attributes:
        fed: What should have been orthogonalized, as the orthogonalizer takes it.
        dense: The same arithmetic's result.
        step: What the weights become with it.
    """

    evidence: Evidence
    fed: Tensor
    dense: Tensor
    step: Stepped
    reference: Reference
    runs: dict[bool, list[Tensor]] = field(default_factory=dict)  # shaken results, by whether of the order alone

    def recovered(self, after: Tensor) -> Tensor:  # (rows, cols) fp64
        """The result of the orthogonalizer that led to these weights, if the stages did what they should."""
        e, applied = self.evidence, self.step.applied
        update = recovered_update(e.before, applied.undone(after), e.settings, e.scale, self.step.staged)
        return update if applied.factor is None else update / applied.factor

    @cached_property
    def update(self) -> Tensor:
        """As it was applied."""
        return self.recovered(self.evidence.after)

    @cached_property
    def arrived(self) -> Tensor:
        """What of the dense result the weights can hold."""
        return self.recovered(self.step.after)

    def arrives(self, result: Tensor) -> Tensor:
        """What would be recovered if this were the result, multiplied with what the dense one is: rounding included."""
        return self.recovered(self.evidence.stepped(result, self.step.applied.factor).after)

    def shaken(self, count: int, *, of_order: bool = True) -> list[Tensor]:
        """So many shaken results."""
        runs = self.runs.setdefault(of_order, [])
        while len(runs) < count:
            runs.append(self.evidence.shaken(self.fed, None if of_order else self.reference, len(runs)))
        return runs[:count]

    @cached_property
    def steps(self) -> list[Stepped]:
        """Of all shaken results."""
        return [self.evidence.stepped(result) for result in self.shaken(ALL)]

    def spread(self, count: int) -> tuple[Measure, float]:
        """`_beside` the updates of so many steps in another order."""
        after = [self.evidence.stepped(result).after for result in self.shaken(count)]
        return self._beside([self.recovered(weights) - self.arrived for weights in after], self.arrived, self._spacing)

    @property
    def _spacing(self) -> float:
        """What one weight, the largest, taken to its next value makes of the update."""
        e, factor = self.evidence, self.step.applied.factor
        spacing = torch.finfo(e.arithmetic.weight_dtype).eps * float(self.step.after.abs().amax())
        return spacing / abs(e.settings.lr * e.scale) / (1.0 if factor is None else float(factor.abs().amin()))

    def orthogonalizer(self, count: int) -> tuple[Measure, float]:
        """`_beside` so many shaken results."""
        runs = self.shaken(count, of_order=False)
        return self._beside([result - self.dense for result in runs], self.reference.update())

    def _beside(self, differences: Sequence[Tensor], expected: Tensor, least: float = 0.0) -> tuple[Measure, float]:
        """How a difference is measured beside those that rounding makes, and what is allowed: [Note: the shake].

        Args:
            differences: Of shaken runs.
            expected: What all these are differences from.
            least: What no direction is settled better than.
        """
        eps = torch.finfo(self.evidence.arithmetic.products).eps
        wide = torch.float64 if self.evidence.arithmetic.products == torch.float64 else torch.float32

        def lengths(matrix: Tensor) -> Tensor:  # (m,)
            found: Tensor = torch.linalg.vector_norm(self.reference.seen(matrix.to(wide)), dim=1)
            return found.double()

        own, shaken = lengths(expected), torch.stack([lengths(difference) for difference in differences])
        floor = (eps * own).square() + (_OWN * own.amax()).square() + least**2 + 1e-300
        noise = (shaken.square().mean(0) + floor).sqrt()
        unit = 1 / max(float((own / noise).amax()), 1e-300)
        allowed = TIMES * unit * max(1.0, float((shaken / noise).amax()))
        return lambda difference: unit * float((lengths(difference) / noise).amax()), allowed
