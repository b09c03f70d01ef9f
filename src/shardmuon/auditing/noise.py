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
    grows to 1 and is then rounded, too: the norms of later errors are taken of `lifted` singular values. (2) Rounding
    turns a pair of directions by about its spectral norm over s_i + s_j: by that part, `tilt`, the symmetric half of an
    error moves as the antisymmetric one does. (3) Grown noise N maps what is turned out of direction j: N E / s_j,
    with N at most what the steps make of rounding noise alone, `drowned`.

    (4) The result is off by the sum over steps of R_t(y + e_t) - R_t(y), R_t the steps that are left and y where the
    errors before have led. So the gains are to be taken where the singular values are by then, not where they would be
    in exact arithmetic. That matters where a gain vanishes: at a maximum of p its slope is 0, and all of the difference
    is of second order. A value that is off by d_i moves the divided difference of a pair by
    d_i (p'_i - g_ij) / (s_i - s_j), on the diagonal by p'' d_i, and r_i by d_i (p'_i - r_i) / s_i. An error E of a step
    moves s_i by v_i' E w_i: with no direction, by e / sqrt(N) for N elements, of which we allow four; where one
    direction makes up the matrix all elements may be rounded alike, so e times its share of the energy if that is more,
    and never more than e. The next step takes d_i on by f' d_i + f'' d_i^2 / 2.
    (5) In the Gram form errors of the factor bring grown noise to where there was none: gains.py,
    [Note: errors of the Gram form].

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

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from shardmuon.auditing.gains import Gains, Way, gram_sources, lifted, spectral, standard_sources
from shardmuon.auditing.reference import Reference

# Below this part of the largest singular value, right singular vectors from fp64 products (x' v / s, orthogonal to
# 1e-16 / 1e-10) are not used: such a direction counts as one without a right singular vector. Its gain is its own.
_BASIS = 1e-5
FEW = 4  # elements that may fall where they weigh most
OWN_ERROR = 1e-9  # of the reference, relative: its Gram matrix squares what is small


@dataclass(frozen=True)
class Noise:
    """Squared gains of unit errors, summed over all sources, see [Note: what rounding may do to an update].

    Attributes:
        num_sources: Errors that were summed: of the input and of each step.
        symmetric, opposite: (k, k) between the k directions with both singular vectors.
        across: (k,) from a direction without a right singular vector to right singular vector j.
        outside: (m,) from direction i to what no right singular vector spans.
        reference: Of the matrix.
        results: (k,) what the steps make of these directions.
        num_elements: Of the matrix.
    """

    num_sources: int
    symmetric: Tensor
    opposite: Tensor
    across: Tensor
    outside: Tensor
    reference: Reference
    results: Tensor
    num_elements: int

    @cached_property
    def right(self) -> Tensor:  # (k, n)
        """Right singular vectors."""
        k, coords, sigmas = len(self.across), self.reference.coords, self.reference.sigmas
        return coords[-k:] / sigmas[-k:].unsqueeze(1).to(coords.dtype)

    def measure(
        self,
        coords: Tensor,  # (m, n): a difference, as `Reference.seen` sees it; fp32 does beside errors of half precision
        unit: float,  # norm of each error
        extra: float = 0.0,  # norm of one more error, of the result itself
    ) -> float:
        """|D / G|: how large the errors must be, in these units, to explain a difference."""
        if not bool(coords.any()):
            return 0.0
        k = len(self.across)
        split = len(coords) - k
        inside = (coords @ self.right.T.to(coords.dtype)).to(torch.float64)
        energy = torch.linalg.vector_norm(coords, dim=1, dtype=torch.float64).square()
        outside = (energy - inside.square().sum(1)).clamp(min=0.0)
        square, floor = unit**2, extra**2 + 1e-300
        both = inside[split:]
        half = (both + both.T).div_(2)
        total = (both - half).square_().div_((self.opposite * square).add_(floor)).sum()
        total += half.square_().div_((self.symmetric * square).add_(floor)).sum()
        total += (inside[:split].square() / (self.across * square + floor)).sum()
        if coords.shape[1] > k:
            total += (outside / (self.outside * square + floor)).sum()
        return float(total.sqrt())

    def least(self, unit: float, extra: float = 0.0) -> float:
        """What one unit of `measure` is at least, in Frobenius' norm."""
        off = self.opposite.clone().fill_diagonal_(math.inf)  # no such part of a diagonal
        parts = (self.symmetric, off, self.across, self.outside)
        gain = min(float(part.amin()) for part in parts if part.numel())
        return math.sqrt(gain * unit**2 + extra**2 + 1e-300)

    def size(self, unit: float, extra: float = 0.0) -> float:
        """|U / G| of the exact result."""
        gains = self.symmetric.diagonal() * unit**2 + extra**2 + 1e-300
        return float((self.results.square() / gains).sum().sqrt())

    def frobenius(self, unit: float, extra: float = 0.0) -> float:
        """Norm of the difference that white errors make on average."""
        k, (m, n) = len(self.across), (len(self.outside), self.num_elements // len(self.outside))
        energy = (self.symmetric.sum() + self.opposite.sum()) / 2
        energy += (m - k) * self.across.sum() + (n - k) * self.outside.sum()
        return math.hypot(unit * float((energy / self.num_elements).sqrt()), extra)


def noise_of(reference: Reference, dtype: torch.dtype, by_gram: bool = False, beyond: bool = False) -> Noise:
    """The gains for the steps and the method of a reference.

    Args:
        reference: Of the matrix.
        dtype: Of the products.
        by_gram: The Gram matrix is rounded once in fp32, its factor once more, and all between is exact.
        beyond: With all of [Note: beyond the first order]; without, (4) and (5) are left out, at half the cost.
    """
    sigmas = reference.sigmas
    k = int((sigmas > _BASIS * sigmas.amax()).sum())
    drowned = 0.0
    if reference.method != "reference":
        noise = Way(lifted(sigmas.new_zeros(1), dtype, len(sigmas)), reference.coefficients)
        drowned = float(noise.at(len(reference.coefficients)))
    gains = Gains.none(sigmas, k, drowned)
    if reference.method == "reference":
        gains.add(sigmas, reference.ratios, torch.zeros_like(sigmas), float(sigmas.norm()))
        one = torch.ones_like(sigmas)
        gains.add(reference.results, one, one, float(reference.results.norm()))
    elif by_gram or reference.method.startswith("gram"):
        gram_sources(gains, reference, dtype, by_gram, beyond)
    else:
        standard_sources(gains, reference, dtype, beyond)
    gains.finish(_tilt(sigmas[-k:], dtype))
    return Noise(
        gains.num_sources,
        gains.symmetric,
        gains.opposite,
        gains.across,
        gains.outside,
        reference,
        reference.results[len(sigmas) - k :],
        reference.coords.numel(),
    )


def _tilt(s: Tensor, dtype: torch.dtype) -> Tensor:  # (k, k)
    """Squared angle by which rounding turns a pair of singular directions: the spectral norm of the error over s."""
    angles: Tensor = spectral(dtype, len(s)) / (s.unsqueeze(1) + s)
    return angles.square_().clamp_(max=1.0)


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
    few = min(most, FEW)
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
