"""How far rounding moves the result of Newton-Schulz steps: the model behind the bounds of `tolerances`.

[Note: how far rounding moves an update]
    A Newton-Schulz step makes Y' = a Y + (b A + c A A) Y from Y, with A = Y Y^T: three products, each stored once in
    the dtype. Take A's singular directions as coordinates, with s the singular values of Y.
    - Storing A adds E of norm u ||s^2||, which moves Y' by E_ij (b + c s_i^2 + c s_j^2) s_j.
    - Storing b A + c A A adds F of norm u ||b s^2 + c s^4||, which moves Y' by F_ij s_j.
    - Storing Y' moves it by u ||a s + b s^3 + c s^5||.
    The sums inside the products (kept in fp32 for half precision, else in the dtype) have n terms and add
    u_sum sqrt(n / 6) of the same with every sign positive, since a sum is rounded before it cancels. Before the first
    step, rounding the normalized input moves it by u, and the norm, a sum over all mn elements, scales it by
    1 + u_sum sqrt(m n / 6). The steps that follow enlarge all this. They keep singular vectors and map s to f(s), so to
    first order they multiply the part of an error between the singular directions i and j by the divided differences
    (f_i - f_j) / (s_i - s_j) and (f_i + f_j) / (s_i + s_j), and the part outside the row space by f_i / s_i; a wrong
    scale moves each f by s f'(s).
    - If the matrix is known, so are its singular values, and the errors of many elements count as white noise: the gain
      is the root mean square of these factors, and independent errors add in quadrature. u is the largest error of a
      rounding and sqrt(1/3) u the usual one, so white noise stays below the bound by sqrt(3).
    - If not, every factor is at most the largest slope of f, which is its slope at zero, the product of the remaining
      a's, for the published schedules. Errors then simply add up: safe for any matrix, and hundreds of u.
    Two results that are both rounded differ by at most twice as much as one differs from the exact one.

[Note: the Gram form]
    It makes R = Y Y^T once and iterates R and Q on m x m matrices until a restart multiplies Y by Q and makes R anew.
    In the same directions let r and q be their eigenvalues, p = b r + c r^2 and z = a + p. Stored are R, and in each
    step p, r z and z r z (the next R, in two products) and q z. White noise of norm u ||r|| has u ||r|| / m in every
    entry, which then goes its own way. A step turns an entry e of R into p_ij = (b + c (r_i + r_j)) e of p, both into
    z_i e z_j + p_ij r_j z_j + z_i r_i p_ij of the next R, p_ij into q_i p_ij of Q, and an entry d of Q into d z_j. At
    the end of the segment d_ij s_j is what Y has of it, beside its own rounding, and the steps that follow treat that
    as above. The sums of the product Q Y cancel: Q is large where Y is not, so they are ||q|| ||s|| / sqrt(m) large,
    though the result may be smaller. Where Q's are multiplied before Y is, that is rounded, too: each counts twice.
    Small singular values are the worst: an entry between a missing direction and a large one is multiplied by the
    slope twice. An element is rounded in proportion to itself. If few singular vectors make R, its large elements, and
    so their noise, lie in those vectors' own directions: m sum(v_i^4) above the mean in square, 3 for normal vectors.
    So errors in a segment count sqrt(3) times. All this is computed for a given matrix; without it there is no bound.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

Triple = tuple[float, float, float]
Coefficients = Sequence[Triple]

_KURTOSIS = 3.0  # of normal numbers, see [Note: the Gram form]
_SCALES = torch.linspace(0.0, 1.01, 20_001, dtype=torch.float64)  # singular values of any normalized matrix


def relative_sigmas(matrix: Tensor) -> Tensor:
    """Singular values over the Frobenius norm, of the last few matrices remembered by their bits."""
    exact = matrix.detach().to("cpu", torch.float64).contiguous()
    return _sigmas_of(exact.numpy().tobytes(), *exact.shape)


@lru_cache(maxsize=8)
def _sigmas_of(bits: bytes, rows: int, cols: int) -> Tensor:
    values = torch.linalg.svdvals(torch.frombuffer(bytearray(bits), dtype=torch.float64).view(rows, cols))
    fractions: Tensor = values / values.norm().clamp(min=torch.finfo(torch.float64).tiny)
    return fractions


def follow(start: Tensor, coefficients: Coefficients) -> tuple[Tensor, Tensor, Tensor]:
    """What the steps make of singular values: f(s), f(s) / s and f'(s)."""
    values, ratios, slopes = start, torch.ones_like(start), torch.ones_like(start)
    for a, b, c in coefficients:
        square = values**2
        slopes = slopes * (a + 3 * b * square + 5 * c * square**2)
        ratios = ratios * (a + b * square + c * square**2)
        values = values * (a + b * square + c * square**2)
    return values, ratios, slopes


class Units(NamedTuple):
    """Relative errors of storing a number, of a sum inside a product, and of the norm."""

    stored: float
    summed: float
    norm: float


def _injected(values: Tensor, triple: Triple, units: Units) -> float:
    """Norm of what one step adds, if the errors of elements are independent."""
    a, b, c = triple
    square = values**2
    mean = float(values.norm()) / math.sqrt(len(values))  # root mean square
    between = (b + c * (square.unsqueeze(1) + square)) * values
    gram = (units.stored + units.summed) * float(square.norm()) * float(between.norm()) / len(values)
    fourth = square**2
    stored, summed = (b * square + c * fourth).norm(), (abs(b) * square + abs(c) * fourth).norm()
    poly = (units.stored * float(stored) + units.summed * float(summed)) * mean
    stored = (values * (a + b * square + c * fourth)).norm()
    summed = (values * (abs(a) + abs(b) * square + abs(c) * fourth)).norm()
    return math.hypot(gram, poly, units.stored * float(stored) + units.summed * float(summed))


def _largest_injected(largest: float, triple: Triple, units: Units) -> float:
    """The same for any matrix, as a fraction of its norm."""
    a, b, c = (abs(number) for number in triple)
    third, fifth = b * largest**2, c * largest**4
    return (units.stored + units.summed) * (a + 3 * third + 4 * fifth)


def white_noise(coefficients: Coefficients, units: Units, sigmas: Tensor, num_cols: int) -> float:
    """Norm of the error of the result, if the errors of elements are independent."""
    scaled = units.norm * float((sigmas * follow(sigmas, coefficients)[2]).norm())
    noise, injected = 0.0, units.stored * float(sigmas.norm())
    for done in range(len(coefficients) + 1):
        here = follow(sigmas, coefficients[:done])[0]
        noise = math.hypot(noise, injected * _gain(here, coefficients[done:], num_cols))
        if done < len(coefficients):
            injected = _injected(here, coefficients[done], units)
    return scaled + noise


def _gain(values: Tensor, rest: Coefficients, num_cols: int) -> float:
    """Root mean square factor by which these steps enlarge white noise on a matrix of these singular values."""
    minus, plus, ratios = _factors(values, rest)
    energy = (minus.square().sum() + plus.square().sum()) / 2 + (num_cols - len(values)) * ratios.square().sum()
    return float((energy / (len(values) * num_cols)).sqrt())


def _factors(values: Tensor, rest: Coefficients) -> tuple[Tensor, Tensor, Tensor]:
    """By which these steps multiply an entry's symmetric part, the other, and what is outside the row space."""
    results, ratios, slopes = follow(values, rest)
    apart, total = values.unsqueeze(1) - values, values.unsqueeze(1) + values
    close = apart.abs() <= 1e-9 * values.amax()  # the difference quotient of equal values is the slope
    zero = total <= 1e-9 * values.amax()
    minus = torch.where(close, slopes, (results.unsqueeze(1) - results) / torch.where(close, 1.0, apart))
    plus = torch.where(zero, ratios, (results.unsqueeze(1) + results) / torch.where(zero, 1.0, total))
    return minus, plus, ratios


def gram_noise(
    coefficients: Coefficients, units: Units, sigmas: Tensor, num_cols: int, restarts: Sequence[int]
) -> float:
    """`white_noise` of the Gram form, see [Note: the Gram form]."""
    scaled = units.norm * float((sigmas * follow(sigmas, coefficients)[2]).norm())
    noise = units.stored * float(sigmas.norm()) * _gain(sigmas, coefficients, num_cols)
    ends = [0, *restarts, len(coefficients)]
    for start, stop in itertools.pairwise(ends):
        here = follow(sigmas, coefficients[:start])[0]
        factor = follow(here, coefficients[start:stop])[1]
        after, rest = follow(sigmas, coefficients[:stop])[0], coefficients[stop:]
        minus, plus, _ = _factors(after, rest)
        largest = torch.maximum(minus.abs(), plus.abs())
        for entries in _noise_in_factor(coefficients[start:stop], units, here):
            noise = math.hypot(noise, float((largest * entries * here).norm()))
        cancelled = float(factor.norm()) * float(here.norm()) / math.sqrt(len(here))
        stored = units.stored * float(after.norm()) + units.summed * max(float(after.norm()), cancelled)
        noise = math.hypot(noise, stored * _gain(after, rest, num_cols))
    return scaled + noise


def _noise_in_factor(segment: Coefficients, units: Units, values: Tensor) -> list[Tensor]:
    """What each rounding has made of the entries of Q at the end of a segment that begins at these singular values."""

    def white(stored: Tensor, summed: Tensor) -> Tensor:  # every entry; given the result and the sum without signs
        norm = units.stored * float(stored.norm()) + units.summed * float(summed.norm())
        entry = math.sqrt(_KURTOSIS) * norm / len(values)
        return torch.full((len(values), len(values)), entry, dtype=torch.float64)

    r, q = values**2, torch.ones_like(values)
    in_gram, in_factor = [white(r, r)], [torch.zeros(len(values), len(values), dtype=torch.float64)]
    for a, b, c in segment:
        poly, size = b * r + c * r**2, abs(b) * r + abs(c) * r**2
        z, z_size = a + poly, abs(a) + size
        in_poly = [(b + c * (r.unsqueeze(1) + r)) * e for e in in_gram] + [white(poly, size)]
        zero = torch.zeros_like(in_poly[0])
        in_gram, in_factor = [*in_gram, zero], [*in_factor, zero]
        in_factor = [d * z + q.unsqueeze(1) * p for d, p in zip(in_factor, in_poly, strict=True)]
        left, right = z.unsqueeze(1), r * z
        in_gram = [left * e * z + p * right + right.unsqueeze(1) * p for e, p in zip(in_gram, in_poly, strict=True)]
        in_factor += [white(q * z, q.abs() * z_size), zero, zero]  # of Q itself; of r z and r z^2 nothing yet
        in_gram += [zero, left * white(right, r * z_size), white(right * z, right.abs() * z_size)]
        r, q = r * z**2, q * z
    return [*in_factor, in_factor[-3]]


def worst_noise(coefficients: Coefficients, units: Units, num_rows: int) -> float:
    """The same for any matrix: errors add up, each enlarged by the largest slope of the steps that follow."""
    total, injected = 0.0, units.stored + units.norm
    for done in range(len(coefficients) + 1):
        here, _, slopes = follow(_SCALES, coefficients[:done])
        largest = here.amax()
        reachable = largest * _SCALES / _SCALES[-1]
        total += injected * float(follow(reachable, coefficients[done:])[2].abs().amax())
        if done < len(coefficients):
            # the slopes and the number of rows both limit the norm
            norm = min(float(slopes.abs().amax()), math.sqrt(num_rows) * float(largest))
            injected = norm * _largest_injected(float(largest), coefficients[done], units)
    return total
