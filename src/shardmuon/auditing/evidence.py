"""One matrix around a step, and its update beside the same arithmetic run densely: what is judged and what names it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from shardmuon.auditing import same
from shardmuon.auditing.dense import MatrixPieces
from shardmuon.auditing.noise import Noise, noise_of
from shardmuon.auditing.norm_rules import finished
from shardmuon.auditing.reference import Reference, recovered_update
from shardmuon.auditing.same import Arithmetic
from shardmuon.momentum.rounding import Stream
from shardmuon.step.options import Settings


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
    rounding: tuple[Stream, int] | None = None  # see `same.stepped`
    kept: Mapping[str, Tensor] = field(default_factory=dict)  # by stages of its variant, before; fp64, 1-D
    kept_after: Mapping[str, Tensor] = field(default_factory=dict)
    fresh: tuple[str, ...] = ()  # keys of what had just been made or loaded
    factor: Tensor | None = None  # of stages after the orthogonalizer: see [Note: an update with its stages undone]
    on_weights: float = 1.0  # of stages on weights: see [Note: a step with its norm control undone] in norms.py

    def orthogonalized(self, value: Tensor, *, nudged: bool = False) -> Tensor:  # (rows, cols) fp64
        """A matrix in the live arithmetic. `nudged`: see `same.run`."""
        return same.run(value, self.arithmetic, self.settings, nudged=nudged).to(torch.float64)

    def arrives(self, update: Tensor) -> Tensor:  # (rows, cols) fp64
        """What would be recovered from the weights if this were the update: rounding of the weights included."""
        staged = self.staged(update)
        after, _ = finished(self.updated(staged), self.settings.stages, self.kept)
        return self.recovered(after, staged)

    def updated(self, staged: Tensor) -> Tensor:  # (rows, cols), the weights' dtype
        """The weights with this update, before stages on weights."""
        return same.stepped(self.before, staged, self.scale, self.arithmetic, self.settings, self.rounding)

    def recovered(self, after: Tensor, expected: Tensor) -> Tensor:  # (rows, cols) fp64
        """The update that led to these weights, without its stages. `expected`: with them, see `recovered_update`."""
        left = after.to(torch.float64)
        if self.on_weights != 1.0:
            left = left / self.on_weights
        return self.undone(recovered_update(self.before, left, self.settings, self.scale, expected))

    def staged(self, update: Tensor) -> Tensor:
        """An update as stages after the orthogonalizer make it, rounded as it travels."""
        return update if self.factor is None else (update * self.factor).to(self.arithmetic.wire_dtype).to(update.dtype)

    def undone(self, update: Tensor) -> Tensor:
        """An update without these stages."""
        return update if self.factor is None else update / self.factor


@dataclass(frozen=True)
class Compared:
    """The update of one matrix beside the same arithmetic run densely, and that beside the exact one.

    Attributes:
        update: As it was applied.
        fed: What should have been orthogonalized, as the orthogonalizer takes it.
        dense: The same arithmetic's result.
        arrived: What of it the weights can hold.
        order, extra: Norm of each error that another order of sums makes, and of what rounding the result (to the wire,
            into the weights) may add to them.
        exact, coarse: The same beside exact arithmetic.
        dtype: Of the products.
    """

    update: Tensor  # (rows, cols), all fp64
    fed: Tensor
    dense: Tensor
    arrived: Tensor
    reference: Reference
    noise: Noise
    order: float
    extra: float
    exact: float
    coarse: float
    dtype: torch.dtype
    by_gram: bool

    @property
    def half(self) -> bool:
        """Whether products were in half precision."""
        return torch.finfo(self.dtype).bits == 16

    @property
    def seen_in(self) -> torch.dtype:
        """What differences are looked at in. The product with the singular vectors then has errors of its own, as large
        as those of the products that are judged: `coarse` has them."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @cached_property
    def beyond(self) -> Compared:
        """With all that [Note: beyond the first order] derives: for what the first order does not explain."""
        return replace(self, noise=noise_of(self.reference, self.dtype, self.by_gram, beyond=True))

    @cached_property
    def coords(self) -> Tensor:  # (m, n)
        """The dense result as `Reference.seen` sees it."""
        return self.reference.seen(self.dense.to(self.seen_in))

    def distance(self, expected: Tensor) -> float:
        """Of the applied update to another, in the norm of the noise; comparable with `allowed`."""
        coords = self.reference.seen((self.update - expected).to(self.seen_in))
        return self.noise.measure(coords, self.order, self.extra) / self.noise.size(self.order, self.extra)

    @cached_property
    def error(self) -> Tensor:  # (m, n)
        """Of the dense result beside the exact one, as `Reference.seen` sees it."""
        ratios = self.reference.ratios.to(self.reference.coords.dtype)
        return (self.reference.coords * -ratios.unsqueeze(1)).add_(self.coords).to(self.seen_in)

    @cached_property
    def inexact(self) -> float:
        """How far the dense result is from the exact one, in the norm of the noise."""
        return self.noise.measure(self.error, self.exact, self.coarse) / self.noise.size(self.exact, self.coarse)

    @cached_property
    def rounding(self) -> float:
        """How far rounding may take the dense result from the exact one."""
        return math.sqrt(self.noise.num_sources + 1) / self.noise.size(self.exact, self.coarse)

    @cached_property
    def allowed(self) -> float:
        """Of `distance` to `arrived`."""
        return math.sqrt(self.noise.num_sources + 1) / self.noise.size(self.order, self.extra)

    def within(self, expected: Tensor) -> float:
        """An upper bound of `distance` that needs no singular vectors: all of the difference where least is allowed."""
        bound = float((self.update - expected).norm()) / self.noise.least(self.order, self.extra)
        return bound / self.noise.size(self.order, self.extra)

    @cached_property
    def near(self) -> float:
        """Sine of the angle that a right explanation may leave."""
        spread = self.noise.frobenius(self.order, self.extra)
        return max(0.1, min(0.3, 2 * spread / max(float(self.dense.norm()), 1e-300)))
