"""How far errors of a given size move the result of the steps, summed over all places where they enter.

Notes are in noise.py. Here everything is in the coordinates of the singular vectors: a pair (i, j) is a left direction
and a right one; the last k have both.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from shardmuon.auditing.reference import Coefficients, Reference
from shardmuon.orthogonalize.gram import plan_restarts, restarts_locally

_CLOSE = 1e-9  # of the largest: singular values nearer than this take the limit of the divided difference
_FAR = 4.0  # standard deviations: a normal variable passes them once in 16,000
_TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class Way:
    """Singular values on their way through the steps; counted from 0 (the input) to the number of steps."""

    sigmas: Tensor  # (m,) fp64
    coefficients: Coefficients

    @cached_property
    def _steps(self) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
        """Values, and of each step s f(s) / s, f'(s) and f''(s) there."""
        here, ratios, slopes, bends = [self.sigmas], [], [], []
        for a, b, c in self.coefficients:
            s = here[-1]
            square = s.square()
            ratios.append(a + square * (b + c * square))
            slopes.append(a + square * (3 * b + 5 * c * square))
            bends.append(s * (6 * b + 20 * c * square))
            here.append(s * ratios[-1])
        return here, ratios, slopes, bends

    def at(self, done: int) -> Tensor:
        """The values after so many steps."""
        return self._steps[0][done]

    def ratios(self, first: int, stop: int) -> Tensor:
        """By how much the steps [first, stop) lengthen each: p(s) / s."""
        return _product(self._steps[1][first:stop], self.sigmas)

    def slopes(self, first: int, stop: int) -> Tensor:
        """p'(s) of these steps."""
        return _product(self._steps[2][first:stop], self.sigmas)

    def bends(self, first: int, stop: int) -> Tensor:
        """p''(s) of these steps."""
        slope, bend = torch.ones_like(self.sigmas), torch.zeros_like(self.sigmas)
        for f, g in zip(self._steps[2][first:stop], self._steps[3][first:stop], strict=True):
            slope, bend = f * slope, g * slope.square() + f * bend
        return bend

    def terms(self, step: int) -> Tensor:
        """a s, b s^3 and c s^5 of a step, added up without their signs."""
        return self.at(step) * self.sizes(step)

    def sizes(self, step: int) -> Tensor:
        """The same of a I + P: |a| + |b| s^2 + |c| s^4."""
        a, b, c = self.coefficients[step]
        square = self.at(step).square()
        return abs(a) + square * (abs(b) + abs(c) * square)


def _product(factors: Sequence[Tensor], like: Tensor) -> Tensor:
    out = torch.ones_like(like)
    for factor in factors:
        out = out * factor
    return out


@dataclass
class Gains:
    """What `noise.Noise` holds, being summed up.

    Attributes:
        k: Directions with both singular vectors.
        symmetric, opposite, across, outside: See `noise.Noise`.
        turned: (k, k) the part of `opposite` that `tilt` has yet to bring into `symmetric`: `settle` does.
        drowned: What the steps make of rounding noise alone.
        num_sources: Errors that were added.
    """

    k: int
    symmetric: Tensor
    opposite: Tensor
    across: Tensor
    outside: Tensor
    turned: Tensor
    drowned: float
    num_sources: int = 0

    @classmethod
    def none(cls, sigmas: Tensor, k: int, drowned: float) -> Gains:
        """Before any source."""
        symmetric, opposite, turned = (sigmas.new_zeros(k, k) for _ in range(3))
        return cls(k, symmetric, opposite, sigmas.new_zeros(k), torch.zeros_like(sigmas), turned, drowned)

    def finish(self, tilt: Tensor) -> None:
        """After the last source. `tilt` (k, k): squared angle by which rounding turns a pair of directions."""
        self.symmetric.addcmul_(tilt, self.turned)
        self.opposite += self.turned

    def add(
        self,
        here: Tensor,  # (m,) the singular values where the error enters
        ratios: Tensor,  # (m,) they are to become `here * ratios`
        slopes: Tensor,  # (m,) p'
        injected: float,  # norm of the error
        moved: tuple[Tensor, Tensor] | None = None,  # (m,) p'' and how far each value may be off by then
    ) -> None:
        """An error of the whole matrix."""
        k, energy = self.k, injected**2
        s, r, d = here[-k:], ratios[-k:], slopes[-k:]
        p = s * r
        symmetric, total = divided(s, p, d), (s.unsqueeze(1) + s).clamp_(min=_TINY)
        opposite = (p.unsqueeze(1) + p).div_(total)
        if moved is not None:
            symmetric, opposite, r = _bent(s, d, moved[0][-k:], moved[1][-k:], symmetric, opposite, r)
        self.num_sources += 1
        mixed = energy * (self.drowned / s.abs().clamp(min=_TINY)).square()
        self.symmetric.addcmul_(symmetric, symmetric, value=energy)
        self.turned.addcmul_(opposite, opposite, value=energy)
        self.across += energy * r.square() + mixed
        self.outside[:-k] += energy * ratios[:-k].square()
        self.outside[-k:] += energy * r.square() + mixed

    def add_left(
        self,
        pairs: Tensor,  # (k, k) error of a pair (i, j) of the Gram matrix or the factor, where it enters; is written to
        null: Tensor,  # (k,) the same between settled direction j and one that is nothing
        start: Tensor,  # (k,) singular values of the X that it multiplies
        after: After,
        noise: float,  # spectral norm of what rounding put into this X; 0: first order
    ) -> None:
        """An error that multiplies X from the left, see [Note: errors of the Gram form]. `add_after` counts it."""
        self.num_sources += 1
        if noise:
            brought = (noise * torch.maximum(pairs.abs().amax(1), null.abs())).square()
            after.both.add_(brought.unsqueeze(1))
            self.outside[-self.k :] += brought * after.ratios.square()
        pairs.mul_(start)
        after.both.addcmul_(pairs, pairs)
        self.across += (null * start * after.ratios).square()

    def add_after(self, after: After) -> None:
        """All errors of a segment that multiply X from the left."""
        both = (after.both + after.both.T).div_(2)  # a bound for either part
        self.symmetric.addcmul_(both, after.symmetric.square())
        self.opposite.addcmul_(both, after.opposite.square())


@dataclass(frozen=True)
class After:
    """Gains of the steps after a segment: (k, k) symmetric and antisymmetric, and (k,) p(s) / s.

    Attributes:
        both: (k, k) squared errors of the segment's result, being summed up; not yet the mean of (i, j) and (j, i).
    """

    symmetric: Tensor
    opposite: Tensor
    ratios: Tensor
    both: Tensor


def divided(s: Tensor, p: Tensor, slopes: Tensor) -> Tensor:  # (k,) each -> (k, k)
    """(p_i - p_j) / (s_i - s_j), and the slope where they are the same."""
    apart, limit = s.unsqueeze(1) - s, _CLOSE * s.amax()
    out = (p.unsqueeze(1) - p).div_(apart)
    if not bool((s.sort().values.diff() < limit).any()):  # none but each with itself
        out.diagonal().copy_(slopes)
        return out
    return torch.where(apart.abs_() < limit, (slopes.unsqueeze(1) + slopes).div_(2), out)


def _bent(
    s: Tensor, slopes: Tensor, bends: Tensor, off: Tensor, symmetric: Tensor, opposite: Tensor, ratios: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gains where singular values are off by `off`, to first order: see (4) of [Note: beyond the first order]."""
    apart = (s.unsqueeze(1) - s).abs()
    close = apart < _CLOSE * s.amax()
    column = slopes.unsqueeze(1)
    by_rows = off.unsqueeze(1) * (column - symmetric).abs() + off * (slopes - symmetric).abs()
    limit = bends.abs() * off
    change = torch.where(close, (limit.unsqueeze(1) + limit) / 2, by_rows / torch.where(close, 1.0, apart))
    total = (s.unsqueeze(1) + s).clamp(min=_TINY)
    turned = (off.unsqueeze(1) * (column - opposite).abs() + off * (slopes - opposite).abs()) / total
    longer = off * (slopes - ratios).abs() / s.abs().clamp(min=_TINY)
    return symmetric.abs() + change, opposite.abs() + turned, ratios.abs() + longer


def lifted(sigmas: Tensor, dtype: torch.dtype, count: int | None = None) -> Tensor:
    """Singular values of a rounded matrix: rounding spreads over all directions, and the steps enlarge it to 1."""
    return (sigmas.square() + (torch.finfo(dtype).eps / 2) ** 2 / (count or len(sigmas))).sqrt()


def spectral(dtype: torch.dtype, count: int) -> float:
    """Spectral norm of a rounding error of size 1 (at most eps / 2 in Frobenius' norm) with no direction."""
    return torch.finfo(dtype).eps / math.sqrt(count)


def errors_off(way: Way, real: Way, first: float, dtype: torch.dtype, num_elements: int) -> list[Tensor]:
    """How far each singular value may be off after so many steps: (4) of [Note: beyond the first order].

    Args:
        way: The exact values.
        real: With what rounding adds.
        first: Norm of the error of the input.
        num_elements: Of the matrix.
    """

    def own(values: Tensor, norm: float) -> Tensor:
        shared = values.square() / max(norm, _TINY)
        return (torch.finfo(dtype).eps / 2) * shared.clamp(min=norm * _FAR / math.sqrt(num_elements), max=norm)

    off = [own(way.sigmas, first)]
    for step in range(len(way.coefficients)):
        terms = real.terms(step)
        slope, bend = way.slopes(step, step + 1).abs(), way.bends(step, step + 1).abs()
        off.append(torch.hypot(slope * off[-1] + bend * off[-1].square() / 2, own(terms, float(terms.norm()))))
    return off


def input_error(reference: Reference, dtype: torch.dtype) -> float:
    """Of the normalized input, in units. Its norm is a sum over all elements, in vector units of 8 lanes at least; a
    relative error of the sum is half of that in the norm: eps sqrt(N / 8) / 4."""
    wider = 1.0 if torch.finfo(dtype).bits == 16 else (len(reference.sigmas) / 32) ** 0.5
    return float(reference.sigmas.norm()) * max(1.0, wider)


def standard_sources(gains: Gains, reference: Reference, dtype: torch.dtype, beyond: bool) -> None:
    """The input, and the terms of each step."""
    steps = len(reference.coefficients)
    way, real = _ways(reference, dtype)
    injected = input_error(reference, dtype)
    off = errors_off(way, real, injected, dtype, reference.coords.numel()) if beyond else []
    for done in range(steps + 1):
        size = injected if done == 0 else float(real.terms(done - 1).norm())
        moved = (way.bends(done, steps), off[done]) if beyond else None
        gains.add(way.at(done), way.ratios(done, steps), way.slopes(done, steps), size, moved)


def _ways(reference: Reference, dtype: torch.dtype) -> tuple[Way, Way]:
    return Way(reference.sigmas, reference.coefficients), Way(lifted(reference.sigmas, dtype), reference.coefficients)


@dataclass
class _GramForm:
    """The sources of one segment between restarts, [Note: errors of the Gram form]."""

    gains: Gains
    way: Way
    real: Way
    begun: int  # the step at which the factor began: it goes on over local restarts
    first: int
    stop: int
    noise: float
    after: After = field(init=False)

    def __post_init__(self) -> None:
        way, k, steps = self.way, self.gains.k, len(self.way.coefficients)
        s, r = way.at(self.stop)[-k:], way.ratios(self.stop, steps)[-k:]
        p = s * r
        total = (s.unsqueeze(1) + s).clamp_(min=_TINY)
        symmetric = divided(s, p, way.slopes(self.stop, steps)[-k:])
        self.after = After(symmetric, (p.unsqueeze(1) + p).div_(total), r, torch.zeros_like(total))

    @property
    def start(self) -> Tensor:  # (k,)
        return self.way.at(self.begun)[-self.gains.k :]

    def gram(self, done: int) -> None:
        """An error of the Gram matrix after `done` steps."""
        if done == self.stop:
            return
        way, real, k = self.way, self.real, self.gains.k
        if done == self.first:
            size = float(real.at(done).square().norm())
        else:  # of R <- (a I + P) R (a I + P)
            size = float((real.at(done - 1).square() * real.sizes(done - 1).square()).norm())
        s, ratios = way.at(done)[-k:], way.ratios(done, self.stop)
        r, values = ratios[-k:], s.square()
        slope = (way.slopes(done, self.stop)[-k:] - r) / (2 * values.clamp(min=_TINY))  # dr / d(s^2)
        factor = way.ratios(self.begun, done).abs()
        larger = torch.maximum(factor[-k:].unsqueeze(1), factor[-k:])
        null = (ratios[0] - r) / values.clamp(min=_TINY) * torch.maximum(factor[0], factor[-k:])
        pairs = divided(values, r, slope).mul_(larger.mul_(size))
        self.gains.add_left(pairs, null * size, self.start, self.after, self.noise)

    def factor(self, done: int) -> None:
        """An error of the factor after `done` steps: of Q <- Q (a I + P)."""
        way, k = self.way, self.gains.k
        size = float((way.ratios(self.begun, done - 1) * self.real.sizes(done - 1)).norm())
        left = way.ratios(done, self.stop).abs()
        pairs = torch.maximum(left[-k:].unsqueeze(1), left[-k:]) * size
        null = torch.maximum(left[0], left[-k:]) * size
        self.gains.add_left(pairs, null, self.start, self.after, self.noise)


def gram_sources(gains: Gains, reference: Reference, dtype: torch.dtype, by_gram: bool, beyond: bool) -> None:
    """[Note: errors of the Gram form]
    From X at a restart, the steps until the next one are a factor Q, iterated together with the Gram matrix R. An error
    of R of norm e moves what is left of the factor by its divided differences over the eigenvalues, and the result by
    that times s_j; one of Q moves it by e s_j. Q is large where X is nothing: its errors, a share of that size, reach
    every direction. So a matrix of low rank has larger errors than in the standard form.

    Beyond the first order: where X is nothing it holds the noise N of its rounding, which the steps before the restart
    have enlarged. An error q_ij of the factor between a settled direction i and any other brings row j of N to row i:
    sum_j q_ij N_jl, of which the norm over l is at most |N| |q_i|. To first order nothing outside of the row space
    reaches a settled direction but by its own r_i, a few units; in fp16, on a matrix of rank one with three restarts,
    this is a hundred times as much.
    """
    steps = len(reference.coefficients)
    cuts = () if by_gram else plan_restarts(tuple(reference.coefficients), dtype)
    m, n = reference.coords.shape
    local = not by_gram and restarts_locally(m, n, tuple(reference.coefficients), dtype)
    way, real = _ways(reference, dtype)
    noise = Way(reference.sigmas.new_tensor([spectral(dtype, m)]), reference.coefficients)
    injected = input_error(reference, dtype)
    off = errors_off(way, real, injected, dtype, reference.coords.numel()) if beyond else []

    def source(done: int, size: float) -> None:
        moved = (way.bends(done, steps), off[done]) if beyond else None
        gains.add(way.at(done), way.ratios(done, steps), way.slopes(done, steps), size, moved)

    source(0, injected)
    for first, stop in itertools.pairwise((0, *cuts, steps)):
        begun = 0 if local else first
        form = _GramForm(gains, way, real, begun, first, stop, abs(float(noise.at(begun))) if beyond else 0.0)
        for done in range(first, stop + 1):
            if not by_gram or done == first:
                form.gram(done)
            if done > first and (not by_gram or done == stop):
                form.factor(done)
        gains.add_after(form.after)
        if stop == steps or not local:  # the product Q X
            sums = float(way.ratios(begun, stop).abs().amax()) * float(real.at(begun).norm())  # its terms, which cancel
            sums *= torch.finfo(torch.promote_types(dtype, torch.float32)).eps / torch.finfo(dtype).eps
            source(stop, float(real.at(stop).norm()) + sums)
    gains.outside[: -gains.k] *= _spurious(reference.coefficients, cuts, dtype) ** 2


def _spurious(coefficients: Coefficients, cuts: Sequence[int], dtype: torch.dtype) -> float:
    """How much more than by their slope the steps enlarge what is nothing: rounding leaves R an eigenvalue of -eps / 2
    there, which grows until the next restart, and a I + P with it."""
    grown, r = 1.0, 0.0
    for step, (a, b, c) in enumerate(coefficients):
        if step == 0 or step in cuts:
            r = -torch.finfo(dtype).eps / 2
        z = a + r * (b + r * c)
        grown, r = grown * max(1.0, abs(z / a)), max(r * z * z, -1.0)
    return grown
