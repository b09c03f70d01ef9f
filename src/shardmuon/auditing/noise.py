"""How far rounding may move the result of the steps, direction by direction.

[Note: what rounding may do to an update]
    Let v_i and w_j be the singular vectors of the input. To first order, an error E of the input moves the result by
    v_i' D w_j = g_ij v_i' E w_j, with g the divided differences of p: for the symmetric part of a pair (i, j) it is
    (p_i - p_j) / (s_i - s_j), for the antisymmetric part (p_i + p_j) / (s_i + s_j), and r_i = p_i / s_i outside of the
    row space. Each step t adds an error of the size of its terms a s, b s^3 and c s^5, which the steps after it enlarge
    in the same way. With the norm e_t of these errors put aside, G_ij^2 = sum_t (e_t g_t,ij)^2, and by Cauchy and
    Schwarz, whatever directions the errors have,

        sum_ij (D_ij / G_ij)^2 <= number of sources.

    So a difference is measured in the norm |D / G|: as the smallest relative errors of the input and of the steps that
    explain it. What is nearly zero in the input, and what the steps enlarge by their slope (485 for Jordan's), may
    differ by much; the directions that the input does settle may not, be there few or many of them. Frobenius' norm
    would let the former hide the latter, which is what makes it blind to a matrix of low rank in bf16.

[Note: beyond the first order]
    In half precision errors are not small beside small singular values. (1) What rounding puts into empty directions
    grows to 1 and is then rounded, too: the norms of later errors are taken of `_lifted` singular values. (2) Rounding
    turns a pair of directions by about its spectral norm over s_i + s_j: by that part, `tilt`, the symmetric half of an
    error moves as the antisymmetric one does. (3) Grown noise N maps what is turned out of direction j: N E / s_j,
    with N at most what the steps make of rounding noise alone, `drowned`.

[Note: the errors themselves]
    Against exact arithmetic each product is rounded to its dtype: e = eps. Against the same arithmetic in another order
    of sums, a sum of n terms in fp32 differs by a random walk, d = eps_32 sqrt(n) / 2 of its terms (rounding errors of
    eps_32 / sqrt(12) at each partial sum, which is at most the whole; in fp64 likewise). Products in fp32 (fp64) differ
    by just that. Half precision rounds both sums, mostly alike: an element comes out one spacing (at most eps) apart
    with the probability d / eps. Of all N elements of all sources a Poisson variable of that mean do; its bound at one
    in a million is K. At most 4 of them (that many differ by chance where few do) may fall on the diagonal of a Gram
    matrix, where each is a share 1/m of the energy; the others are a share 1/N. So the squared norm of all errors
    together is eps^2 (4 / m + (K - 4) / N).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardmuon.auditing.reference import Coefficients, Reference, follow
from shardmuon.orthogonalize.gram import plan_restarts, restarts_locally

# Below this part of the largest singular value, right singular vectors from fp64 products (x' v / s, orthogonal to
# 1e-16 / 1e-10) are not used: such a direction counts as one without a right singular vector. Its gain is its own.
_BASIS = 1e-5
_FEW = 4  # elements that may fall where they weigh most
OWN_ERROR = 1e-9  # of the reference, relative: its Gram matrix squares what is small


@dataclass(frozen=True)
class Noise:
    """Squared gains of unit errors, summed over all sources, see [Note: what rounding may do to an update].

    Attributes:
        num_sources: Errors that were summed: of the input and of each step.
        symmetric, opposite: (k, k) between the k directions with both singular vectors.
        across: (k,) from a direction without a right singular vector to right singular vector j.
        outside: (m,) from direction i to what no right singular vector spans.
        right: (k, n) right singular vectors.
        results: (k,) what the steps make of these directions.
        num_elements: Of the matrix.
    """

    num_sources: int
    symmetric: Tensor
    opposite: Tensor
    across: Tensor
    outside: Tensor
    right: Tensor
    results: Tensor
    num_elements: int

    def measure(
        self,
        coords: Tensor,  # (m, n): a difference, as `Reference.seen` sees it; fp32 does beside errors of half precision
        unit: float,  # norm of each error
        extra: float = 0.0,  # norm of one more error, of the result itself
    ) -> float:
        """|D / G|: how large the errors must be, in these units, to explain a difference."""
        if not bool(coords.any()):
            return 0.0
        k = len(self.right)
        split = len(coords) - k
        inside = (coords @ self.right.T.to(coords.dtype)).to(torch.float64)
        outside = (coords.square().sum(1, dtype=torch.float64) - inside.square().sum(1)).clamp(min=0.0)
        square, floor = unit**2, extra**2 + 1e-300
        both = inside[split:]
        half = (both + both.T) / 2
        total = (half.square() / (self.symmetric * square + floor)).sum()
        total += ((both - half).square() / (self.opposite * square + floor)).sum()
        total += (inside[:split].square() / (self.across * square + floor)).sum()
        if coords.shape[1] > k:
            total += (outside / (self.outside * square + floor)).sum()
        return float(total.sqrt())

    def size(self, unit: float, extra: float = 0.0) -> float:
        """|U / G| of the exact result."""
        gains = self.symmetric.diagonal() * unit**2 + extra**2 + 1e-300
        return float((self.results.square() / gains).sum().sqrt())

    def ratio_error(self, unit: float, extra: float = 0.0) -> float:
        """How far unit errors may move the length of the result along itself, relative."""
        gains = self.symmetric.diagonal() * unit**2 + extra**2
        energy = self.results.square()
        return float((gains * energy).sum().sqrt() / energy.sum())

    def frobenius(self, unit: float, extra: float = 0.0) -> float:
        """Norm of the difference that white errors make on average."""
        k, (m, n) = len(self.right), (len(self.outside), self.num_elements // len(self.outside))
        energy = (self.symmetric.sum() + self.opposite.sum()) / 2
        energy += (m - k) * self.across.sum() + (n - k) * self.outside.sum()
        return math.hypot(unit * float((energy / self.num_elements).sqrt()), extra)


def noise_of(reference: Reference, dtype: torch.dtype, by_gram: bool = False) -> Noise:
    """The gains for the steps and the method of a reference.

    Args:
        reference: Of the matrix.
        dtype: Of the products.
        by_gram: The Gram matrix is rounded once in fp32, its factor once more, and all between is exact.
    """
    sigmas = reference.sigmas
    k = int((sigmas > _BASIS * sigmas.amax()).sum())
    zeros = sigmas.new_zeros(k, k)
    drowned = float(
        (_lifted(sigmas[:1] * 0, dtype, len(sigmas)) if reference.method != "reference" else sigmas[:0]).sum()
    )
    drowned *= float(follow(sigmas.new_tensor([drowned]), reference.coefficients).ratios)
    gains = _Gains(
        0, zeros, zeros.clone(), sigmas.new_zeros(k), torch.zeros_like(sigmas), _tilt(sigmas[-k:], dtype), drowned
    )
    if reference.method == "reference":
        gains.add(sigmas, reference.ratios, torch.zeros_like(sigmas), float(sigmas.norm()))
        one = torch.ones_like(sigmas)
        gains.add(reference.results, one, one, float(reference.results.norm()))
    elif by_gram or reference.method.startswith("gram"):
        _gram_sources(gains, reference, dtype, by_gram)
    else:
        lifted = _lifted(sigmas, dtype)
        injected = _input_error(reference, dtype)
        for done in range(len(reference.coefficients) + 1):
            _source(gains, reference, done, injected)
            if done < len(reference.coefficients):
                actual = lifted * follow(lifted, reference.coefficients[:done]).ratios
                injected = follow(actual, reference.coefficients[done : done + 1]).terms
    return Noise(
        gains.num_sources,
        gains.symmetric,
        gains.opposite,
        gains.across,
        gains.outside,
        reference.coords[len(sigmas) - k :] / sigmas[len(sigmas) - k :].unsqueeze(1),
        reference.results[len(sigmas) - k :],
        reference.coords.numel(),
    )


def _input_error(reference: Reference, dtype: torch.dtype) -> float:
    """Of the normalized input, in units. Its norm is a sum over all elements, in vector units of 8 lanes at least; a
    relative error of the sum is half of that in the norm: eps sqrt(N / 8) / 4."""
    wider = 1.0 if torch.finfo(dtype).bits == 16 else (len(reference.sigmas) / 32) ** 0.5
    return float(reference.sigmas.norm()) * max(1.0, wider)


def _lifted(sigmas: Tensor, dtype: torch.dtype, count: int | None = None) -> Tensor:
    """Singular values of a rounded matrix: rounding spreads over all directions, and the steps enlarge it to 1."""
    return (sigmas.square() + (torch.finfo(dtype).eps / 2) ** 2 / (count or len(sigmas))).sqrt()


def _tilt(s: Tensor, dtype: torch.dtype) -> Tensor:  # (k, k)
    """Squared angle by which rounding turns a pair of singular directions: the spectral norm of the error over s."""
    error = torch.finfo(dtype).eps / len(s) ** 0.5
    angles: Tensor = error / (s.unsqueeze(1) + s)
    return angles.square().clamp(max=1.0)


@dataclass
class _Gains:
    """What `Noise` holds, being summed up."""

    num_sources: int
    symmetric: Tensor
    opposite: Tensor
    across: Tensor
    outside: Tensor
    tilt: Tensor  # (k, k), see [Note: beyond the first order]
    drowned: float

    def add(self, here: Tensor, ratios: Tensor, slopes: Tensor, injected: float) -> None:
        """An error of norm `injected` where the singular values are `here` and are to become `here * ratios`."""
        k, energy = len(self.across), injected**2
        symmetric, opposite = _divided(here[-k:], ratios[-k:], slopes[-k:])
        self.num_sources += 1
        mixed = self.drowned / here[-k:].abs().clamp(min=torch.finfo(here.dtype).tiny)
        self.symmetric += energy * (symmetric.square() + self.tilt * opposite.square())
        self.opposite += energy * opposite.square()
        self.across += energy * (ratios[-k:].square() + mixed.square())
        self.outside += energy * ratios.square()
        self.outside[-k:] += energy * mixed.square()

    def add_left(self, moved: Tensor, null: Tensor, slopes: tuple[Tensor, Tensor]) -> None:
        """An error that enters from the left, as those of a Gram matrix or a factor do.

        Args:
            moved: (k, k) squared size of the error of a pair (i, j) where it enters.
            null: (k,) the same from a direction without a right singular vector.
            slopes: (k, k) gains of the steps that follow, for the symmetric and the antisymmetric part.
        """
        both = (moved + moved.T) / 2  # a bound for either part
        self.num_sources += 1
        self.symmetric += both * slopes[0].square()
        self.opposite += both * slopes[1].square()
        self.across += null


def _divided(s: Tensor, ratios: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """Divided differences of p, for the symmetric and the antisymmetric part of a pair."""
    p = s * ratios
    apart = s.unsqueeze(1) - s
    close = apart.abs() < 1e-9 * s.amax()
    limit = (slopes.unsqueeze(1) + slopes) / 2
    symmetric = torch.where(close, limit, (p.unsqueeze(1) - p) / torch.where(close, 1.0, apart))
    total = (s.unsqueeze(1) + s).clamp(min=torch.finfo(s.dtype).tiny)
    return symmetric, (p.unsqueeze(1) + p) / total


def _source(gains: _Gains, reference: Reference, done: int, injected: float) -> None:
    """An error of the matrix after so many steps."""
    here = reference.sigmas * follow(reference.sigmas, reference.coefficients[:done]).ratios
    rest = follow(here, reference.coefficients[done:])
    gains.add(here, rest.ratios, rest.slopes, injected)


def _gram_sources(gains: _Gains, reference: Reference, dtype: torch.dtype, by_gram: bool) -> None:
    """[Note: errors of the Gram form]
    From X at a restart, the steps until the next one are a factor Q, iterated together with the Gram matrix R. An error
    of R of norm e moves what is left of the factor by its divided differences over the eigenvalues, and the result by
    that times s_j; one of Q moves it by e s_j. Q is large where X is nothing: its errors, a share of that size, reach
    every direction. So a matrix of low rank has larger errors than in the standard form.
    """
    steps = len(reference.coefficients)
    cuts = () if by_gram else plan_restarts(tuple(reference.coefficients), dtype)
    local = not by_gram and restarts_locally(*_sides(reference), tuple(reference.coefficients), dtype)
    lifted = _lifted(reference.sigmas, dtype)
    _source(gains, reference, 0, _input_error(reference, dtype))
    grown = _spurious(reference.coefficients, cuts, dtype) ** 2
    for first, stop in itertools.pairwise((0, *cuts, steps)):
        begun = 0 if local else first  # the factor goes on over local restarts
        after = _after(reference, stop, len(gains.across))
        for done in range(first, stop + 1):
            if not by_gram or done == first:
                _gram_source(gains, reference, lifted, begun, first, done, stop, after)
            if done > first and (not by_gram or done == stop):
                _factor_source(gains, reference, lifted, begun, done, stop, after)
        if stop == steps or not local:  # the product Q X
            start = reference.sigmas * follow(reference.sigmas, reference.coefficients[:begun]).ratios
            factor = follow(start, reference.coefficients[begun:stop]).ratios
            start, result = (lifted * follow(lifted, reference.coefficients[:done]).ratios for done in (begun, stop))
            sums = float(factor.abs().amax()) * float(start.norm())  # its terms, which cancel
            sums *= torch.finfo(torch.promote_types(dtype, torch.float32)).eps / torch.finfo(dtype).eps
            _source(gains, reference, stop, float(result.norm()) + sums)
    gains.outside[: len(gains.outside) - len(gains.across)] *= grown


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


def _sides(reference: Reference) -> tuple[int, int]:
    m, n = reference.coords.shape
    return m, n


def _gram_source(
    gains: _Gains,
    reference: Reference,
    lifted: Tensor,
    begun: int,
    first: int,
    done: int,
    stop: int,
    after: tuple[Tensor, Tensor, Tensor],
) -> None:
    """An error of the Gram matrix after `done` steps."""
    if done == stop:
        return
    here = reference.sigmas * follow(reference.sigmas, reference.coefficients[:done]).ratios
    actual = lifted * follow(lifted, reference.coefficients[:done]).ratios
    if done == first:
        energy = float(actual.square().norm()) ** 2
    else:  # of R <- (a I + P) R (a I + P)
        before = lifted * follow(lifted, reference.coefficients[: done - 1]).ratios
        energy = float((before.square() * _absolute(before, reference.coefficients[done - 1]).square()).norm()) ** 2
    left = follow(here, reference.coefficients[done:stop])
    k = len(gains.across)
    s, r, slopes = here[-k:], left.ratios[-k:], left.slopes[-k:]
    values = s.square()
    apart = values.unsqueeze(1) - values
    close = apart.abs() < 1e-9 * values.amax()
    slope = (slopes - r) / (2 * values.clamp(min=torch.finfo(s.dtype).tiny))  # dr / d(s^2)
    limit = (slope.unsqueeze(1) + slope) / 2
    between = torch.where(close, limit, (r.unsqueeze(1) - r) / torch.where(close, 1.0, apart))
    start = reference.sigmas * follow(reference.sigmas, reference.coefficients[:begun]).ratios
    factor = follow(start, reference.coefficients[begun:done]).ratios.abs()
    start = start[-k:]
    flat = left.ratios[0]  # of a direction that is nothing
    across = (flat - r) / values.clamp(min=torch.finfo(s.dtype).tiny) * start * torch.maximum(factor[0], factor[-k:])
    larger = torch.maximum(factor[-k:].unsqueeze(1), factor[-k:])
    gains.add_left(
        (between * larger * start).square() * energy, across.square() * energy * after[2].square(), after[:2]
    )


def _factor_source(
    gains: _Gains,
    reference: Reference,
    lifted: Tensor,
    first: int,
    done: int,
    stop: int,
    after: tuple[Tensor, Tensor, Tensor],
) -> None:
    """An error of the factor that has taken the steps from `first` on, after `done` steps."""
    start = reference.sigmas * follow(reference.sigmas, reference.coefficients[:first]).ratios
    factor = follow(start, reference.coefficients[first : done - 1]).ratios
    before = lifted * follow(lifted, reference.coefficients[: done - 1]).ratios
    energy = float((factor * _absolute(before, reference.coefficients[done - 1])).norm()) ** 2  # of Q <- Q (a I + P)
    here = reference.sigmas * follow(reference.sigmas, reference.coefficients[:done]).ratios
    left = follow(here, reference.coefficients[done:stop]).ratios
    k = len(gains.across)
    larger = torch.maximum(left[-k:].unsqueeze(1).abs(), left[-k:].abs())
    across = torch.maximum(left[0].abs(), left[-k:].abs()) * start[-k:]
    gains.add_left((larger * start[-k:]).square() * energy, (across * after[2]).square() * energy, after[:2])


def _absolute(values: Tensor, triple: tuple[float, float, float]) -> Tensor:
    """|a| + |b| s^2 + |c| s^4: the terms of a I + P."""
    a, b, c = triple
    return abs(a) + abs(b) * values.square() + abs(c) * values.square().square()


def _after(reference: Reference, stop: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Gains of the steps after a segment: (k, k) symmetric and antisymmetric, (k,) from a null direction."""
    here = reference.sigmas * follow(reference.sigmas, reference.coefficients[:stop]).ratios
    rest = follow(here, reference.coefficients[stop:])
    return *_divided(here[-k:], rest.ratios[-k:], rest.slopes[-k:]), rest.ratios[-k:]


def order_units(dtype: torch.dtype, rows: int, cols: int, num_sources: int, method: str = "standard") -> float:
    """Norm of all the errors together that another order of sums makes, see [Note: the errors themselves]."""
    eps = torch.finfo(dtype).eps
    short, long = min(rows, cols), max(rows, cols)
    if method == "reference":  # a singular value decomposition: backward error of order n eps
        return long * eps * math.sqrt(num_sources)
    walk = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps * math.sqrt(long) / 2
    if torch.finfo(dtype).bits > 16:
        return walk * math.sqrt(num_sources)
    size = rows * cols
    count = num_sources * size * min(1.0, walk / eps)
    most = at_most(count)
    few = min(most, _FEW)
    return eps * math.sqrt(min(float(num_sources), few / short + (most - few) / size))


def rounding_units(dtype: torch.dtype, rows: int, cols: int, num_sources: int, method: str = "standard") -> float:
    """The same beside exact arithmetic: each rounding is off by at most half a spacing, eps / 2."""
    walk = 0.0 if torch.finfo(dtype).bits == 16 else order_units(dtype, rows, cols, num_sources, method)
    return torch.finfo(dtype).eps / 2 * math.sqrt(num_sources) + walk + OWN_ERROR


def at_most(mean: float) -> float:
    """What a Poisson variable with this mean exceeds less than once in a million."""
    if mean > 100:
        return mean + 5 * math.sqrt(mean)
    term = total = math.exp(-mean)
    count = 0
    while total < 1 - 1e-6:
        count += 1
        term *= mean / count
        total += term
    return float(max(count, 1))
