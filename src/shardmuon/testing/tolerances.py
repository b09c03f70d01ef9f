"""The tolerances of the tests: each bound is computed from what was rounded how often, none is tuned.

[Note: one rounding]
    A number stored in a dtype is off by at most u = eps / 2 of itself, the unit roundoff. So k operations, each rounded
    once, leave a relative error of at most k u (to first order). That holds for every element, on every machine: fused
    operations round less often. A sum of n terms, added one after the other, has the error (n - 1) u relative to the
    sum of their absolute values. Errors of many terms partly cancel: the root mean square is u sqrt(n / 6) relative to
    the result for terms of either sign (the i-th partial sum is sqrt(i) terms large and is rounded by u / sqrt(3)), and
    u sqrt(n) / 3 for positive ones. sqrt(n / 6) covers both, as long as n u is small.

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

[Note: polar factors]
    A library's SVD is exact for a matrix that is off by a small multiple of u ||X||; LAPACK calls the factor a modest
    function of the shape, and the larger side is above what is seen. An error of norm e moves the polar factor by e
    over the smallest singular value that counts at most (by 2 e / (s_i + s_j) between two directions), and the singular
    vectors are orthogonal to the same multiple of u.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

Triple = tuple[float, float, float]
Coefficients = Sequence[Triple]

KELLER: Coefficients = ((3.4445, -4.7750, 2.0315),) * 5  # the default schedule, typed in: a second source
_KURTOSIS = 3.0  # of normal numbers, see [Note: the Gram form]
_SCALES = torch.linspace(0.0, 1.01, 20_001, dtype=torch.float64)  # singular values of any normalized matrix


def roundoff(dtype: torch.dtype) -> float:
    """u: the largest relative error of one rounding."""
    return torch.finfo(dtype).eps / 2


def sum_roundoff(
    dtype: torch.dtype,  # in which the sum is kept
    num_terms: int,
) -> float:
    """Error of a sum in terms of its own size, see [Note: one rounding]."""
    return roundoff(dtype) * math.sqrt(num_terms / 6)


# ----------------------------------------------------------------------------------------------------- exact, rounded


def assert_bitwise(found: Any, expected: Any, what: str = "value") -> None:
    """Every bit is the same: dtype, shape, signs of zeros, payloads of NaN. Takes tensors, and lists and dicts of them.

    For the same arithmetic on another layout, which must not change anything.
    """
    if isinstance(expected, Mapping):
        assert list(found) == list(expected), f"{what}: found {list(found)}, expected {list(expected)}"
        for key in expected:
            assert_bitwise(found[key], expected[key], f"{what}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), f"{what}: found {len(found)} values, expected {len(expected)}"
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert_bitwise(a, b, f"{what}[{i}]")
    elif isinstance(expected, Tensor):
        assert isinstance(found, Tensor), f"{what}: found {type(found).__name__}, expected a tensor"
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), (
            f"{what}: found {found.dtype} {tuple(found.shape)}, expected {expected.dtype} {tuple(expected.shape)}"
        )
        differ = (_bytes(found) != _bytes(expected)).any(dim=-1)
        assert not differ.any(), f"{what}: {int(differ.sum())} of {differ.numel()} elements differ in some bit"
    else:
        assert found == expected, f"{what}: found {found!r}, expected {expected!r}"


def _bytes(tensor: Tensor) -> Tensor:  # (elements, bytes)
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).view(flat.numel(), flat.element_size())


def assert_rounded(
    found: Any,  # a tensor or a number
    expected: Any,  # the same in exact arithmetic, or rounded as often
    *,
    roundings: float,
    dtype: torch.dtype | None = None,
    scale: Any = None,
    what: str = "value",
) -> None:
    """Each element is within `roundings` roundings of `dtype` of the expected one.

    Args:
        found: A tensor or a number.
        expected: What it should be.
        roundings: How many operations were rounded on the way, those of both sides together; write the count as it
            comes about. Sums of n terms count n - 1, or sqrt(n / 6) where errors may be taken as random.
        dtype: In which they were rounded. Default: that of `found`, fp64 for numbers.
        scale: What the roundings are relative to, where terms cancel: the sum of the terms' absolute values. Default:
            the expected value.
        what: For the message.
    """
    dtype = dtype or (found.dtype if isinstance(found, Tensor) else torch.float64)
    a, b = _double(found), _double(expected)
    assert a.shape == b.shape, f"{what}: found shape {tuple(a.shape)}, expected {tuple(b.shape)}"
    same = (a == b) | (a.isnan() & b.isnan())  # infinities, too
    size = (b if scale is None else _double(scale)).abs()
    allowed = roundings * (roundoff(dtype) * size + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps)
    wrong = ~(same | ((a - b).abs() <= allowed))
    if wrong.any():
        ratio = ((a - b).abs() / (roundoff(dtype) * size).clamp(min=torch.finfo(torch.float64).tiny))[wrong].max()
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} elements are off, the worst by {float(ratio):.3g} "
            f"roundings of {dtype}, allowed {roundings:g}"
        )


def assert_near(found: Tensor, expected: Tensor, bound: float, what: str = "value") -> None:
    """||found - expected|| is at most `bound` of ||expected||. The bound comes from a function of this module."""
    difference = relative_error(found, expected)
    assert difference <= bound, f"{what}: off by {difference:.3g} of its norm, allowed {bound:.3g}"


def relative_error(found: Tensor, expected: Tensor) -> float:
    """||found - expected|| / ||expected|| in fp64; 0 for equal tensors, whatever their norm."""
    a, b = _double(found), _double(expected)
    assert a.shape == b.shape, f"found shape {tuple(a.shape)}, expected {tuple(b.shape)}"
    if torch.equal(a, b):
        return 0.0
    return float((a - b).norm() / b.norm())  # infinite beside an expected zero: nothing is near it


def _double(value: Any) -> Tensor:
    tensor = value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
    return tensor.cpu().double()


# ------------------------------------------------------------------------------------------------------------ updates


def orthogonalization_bound(
    coefficients: Coefficients,
    dtype: torch.dtype,
    matrix: Tensor | None = None,  # (rows, cols): what is orthogonalized; any scale
    *,
    shape: tuple[int, int] | None = None,
    restarts: Sequence[int] | None = None,
) -> float:
    """Largest error (Frobenius norm, not relative) of a matrix orthogonalized with products of `dtype`.

    See [Note: how far rounding moves an update]. With the matrix the bound is for it, else for any of `shape`. With
    `restarts` (steps before which the Gram matrix is made anew, maybe none) it is that of [Note: the Gram form].
    """
    rows, cols = sorted(shape if matrix is None else matrix.shape)  # type: ignore[arg-type]
    wide = dtype if torch.finfo(dtype).bits > 16 else torch.float32  # of the sums, and of the norm
    units = _Units(roundoff(dtype), sum_roundoff(wide, cols), sum_roundoff(wide, rows * cols))
    if matrix is None:
        assert restarts is None, "the Gram form's bound needs the matrix"
        return _worst_noise(coefficients, units, rows)
    if restarts is not None:
        return _gram_noise(coefficients, units, _sigmas(matrix), cols, restarts)
    return _white_noise(coefficients, units, _sigmas(matrix), cols)


def relative_bound(
    coefficients: Coefficients,
    dtype: torch.dtype,
    matrix: Tensor,  # (rows, cols): what is orthogonalized; any scale
    *,
    restarts: Sequence[int] | None = None,
) -> float:
    """`orthogonalization_bound` as a fraction of the norm of the exact result."""
    result = float(_follow(_sigmas(matrix), coefficients)[0].norm())
    return orthogonalization_bound(coefficients, dtype, matrix, restarts=restarts) / result if result else 0.0


def polar_bound(
    matrix: Tensor,  # (rows, cols)
    rank: int | None = None,
) -> float:
    """Largest error (Frobenius norm) of a polar factor by an SVD in fp64, see [Note: polar factors].

    `rank`: how many singular values are not zero. Default: all.
    """
    values = torch.linalg.svdvals(_double(matrix))[:rank]
    condition = float(values[0] / values[-1])
    return max(matrix.shape) * roundoff(torch.float64) * (condition + 1) * math.sqrt(len(values))


def assert_same_orthogonalization(
    found: Tensor,  # (rows, cols)
    expected: Tensor,  # (rows, cols)
    *,
    dtype: torch.dtype,
    coefficients: Coefficients = KELLER,
    matrix: Tensor | None = None,  # (rows, cols): what was orthogonalized
    restarts: Sequence[int] | None = None,
    exact: bool = False,
    what: str = "result",
) -> None:
    """Two results of the same steps agree within the rounding of their products.

    Args:
        found: Computed with products of `dtype`.
        expected: So too, or with `exact` in fp64 by another way.
        dtype: Of the products.
        coefficients: Of each step.
        matrix: What was orthogonalized. Without it the bound holds for any matrix, and is hundreds of times wider.
        restarts: Of the Gram form, maybe none. Default: the standard form.
        exact: Whether the rounding of `expected` may be left out.
        what: For the message.
    """
    shape = (expected.shape[-2], expected.shape[-1])
    bound = orthogonalization_bound(coefficients, dtype, matrix, shape=shape, restarts=restarts)
    sides = 1 if exact else 2
    bound = sides * bound + roundoff(found.dtype) * float(_double(expected).norm())
    difference = float((_double(found) - _double(expected)).norm())
    assert difference <= bound, f"{what}: the difference has norm {difference:.3g}, rounding explains {bound:.3g}"


def assert_same_update(
    found: Tensor,  # (rows, cols): the weights after the step
    expected: Tensor,  # (rows, cols): the same, of the run it is compared with
    *,
    before: Tensor,  # (rows, cols): the weights before it
    lr: float,
    weight_decay: float = 0.0,
    scale: float = 1.0,
    dtype: torch.dtype,
    coefficients: Coefficients = KELLER,
    matrix: Tensor | None = None,  # (rows, cols): what was orthogonalized
    exact: bool = False,
    what: str = "update",
) -> None:
    """Two steps applied the same update: (before * decay - after) / lr is compared, which a small lr cannot hide.

    The bound is that of `assert_same_orthogonalization`, times `scale`, and what storing weights adds: the decayed
    weight and the difference are each rounded once, so each side's recovered update is off by at most
    2 u ||weights|| / lr.

    Args:
        found: Weights after the step.
        expected: Weights after the step that is right.
        before: Weights before both.
        lr: Learning rate.
        weight_decay: Decoupled, times lr.
        scale: By which the orthogonalized matrix is multiplied beside lr ("match_rms_adamw", ...).
        dtype: Of the products.
        coefficients: Of each step.
        matrix: What was orthogonalized; see `assert_same_orthogonalization`.
        exact: Whether `expected` was computed in exact arithmetic (weights are still stored in its dtype).
        what: For the message.
    """
    decay = 1 - lr * weight_decay
    one, other = ((_double(before) * decay - _double(after)) / lr for after in (found, expected))
    products = orthogonalization_bound(coefficients, dtype, matrix, shape=(expected.shape[-2], expected.shape[-1]))
    largest = max(float(_double(t).norm()) for t in (before, found, expected))
    stored = 2 * (roundoff(found.dtype) + roundoff(expected.dtype)) * largest / lr
    bound = (1 if exact else 2) * scale * products + stored
    difference = float((one - other).norm())
    assert difference <= bound, f"{what}: the difference has norm {difference:.3g}, rounding explains {bound:.3g}"


def assert_orthogonal_band(
    found: Tensor,  # (rows, cols)
    *,
    dtype: torch.dtype,
    coefficients: Coefficients = KELLER,
    matrix: Tensor | None = None,  # (rows, cols): what was orthogonalized
    s_min: float = 0.01,
    restarts: Sequence[int] | None = None,
    what: str = "result",
) -> None:
    """Every singular value lies where the schedule puts it, widened by what the products' rounding moves it.

    A singular value moves by no more than the norm of the error (Weyl), and that is at most its Frobenius norm.

    Args:
        found: The orthogonalized matrix.
        dtype: Of the products.
        coefficients: Of each step.
        matrix: What was orthogonalized: the band is then that of its own singular values. Without it: of all from
            `s_min` of the Frobenius norm on; the bound then holds for any matrix.
        s_min: See `matrix`.
        restarts: Of the Gram form, maybe none. Default: the standard form.
        what: For the message.
    """
    inputs = torch.linspace(s_min, 1.0, 20_001, dtype=torch.float64) if matrix is None else _sigmas(matrix)
    exact = _follow(inputs, coefficients)[0]
    shape = (found.shape[-2], found.shape[-1])
    error = orthogonalization_bound(coefficients, dtype, matrix, shape=shape, restarts=restarts)
    error += roundoff(found.dtype) * float(_double(found).norm())
    low, high = float(exact.min()) - error, float(exact.max()) + error
    values = torch.linalg.svdvals(_double(found))
    assert low <= float(values.min()) and float(values.max()) <= high, (
        f"{what}: singular values {float(values.min()):.4f}..{float(values.max()):.4f}, "
        f"the schedule allows {low:.4f}..{high:.4f}"
    )


def _sigmas(matrix: Tensor) -> Tensor:
    """Singular values over the Frobenius norm, of the last few matrices remembered by their bits."""
    exact = _double(matrix).contiguous()
    return _sigmas_of(exact.numpy().tobytes(), *exact.shape)


@lru_cache(maxsize=8)
def _sigmas_of(bits: bytes, rows: int, cols: int) -> Tensor:
    values = torch.linalg.svdvals(torch.frombuffer(bytearray(bits), dtype=torch.float64).view(rows, cols))
    fractions: Tensor = values / values.norm().clamp(min=torch.finfo(torch.float64).tiny)
    return fractions


def _follow(start: Tensor, coefficients: Coefficients) -> tuple[Tensor, Tensor, Tensor]:
    """What the steps make of singular values: f(s), f(s) / s and f'(s)."""
    values, ratios, slopes = start, torch.ones_like(start), torch.ones_like(start)
    for a, b, c in coefficients:
        square = values**2
        slopes = slopes * (a + 3 * b * square + 5 * c * square**2)
        ratios = ratios * (a + b * square + c * square**2)
        values = values * (a + b * square + c * square**2)
    return values, ratios, slopes


class _Units(NamedTuple):
    """Relative errors of storing a number, of a sum inside a product, and of the norm."""

    stored: float
    summed: float
    norm: float


def _injected(values: Tensor, triple: Triple, units: _Units) -> float:
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


def _largest_injected(largest: float, triple: Triple, units: _Units) -> float:
    """The same for any matrix, as a fraction of its norm."""
    a, b, c = (abs(number) for number in triple)
    third, fifth = b * largest**2, c * largest**4
    return (units.stored + units.summed) * (a + 3 * third + 4 * fifth)


def _white_noise(coefficients: Coefficients, units: _Units, sigmas: Tensor, num_cols: int) -> float:
    """Norm of the error of the result, if the errors of elements are independent."""
    scaled = units.norm * float((sigmas * _follow(sigmas, coefficients)[2]).norm())
    noise, injected = 0.0, units.stored * float(sigmas.norm())
    for done in range(len(coefficients) + 1):
        here = _follow(sigmas, coefficients[:done])[0]
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
    results, ratios, slopes = _follow(values, rest)
    apart, total = values.unsqueeze(1) - values, values.unsqueeze(1) + values
    close = apart.abs() <= 1e-9 * values.amax()  # the difference quotient of equal values is the slope
    zero = total <= 1e-9 * values.amax()
    minus = torch.where(close, slopes, (results.unsqueeze(1) - results) / torch.where(close, 1.0, apart))
    plus = torch.where(zero, ratios, (results.unsqueeze(1) + results) / torch.where(zero, 1.0, total))
    return minus, plus, ratios


def _gram_noise(
    coefficients: Coefficients, units: _Units, sigmas: Tensor, num_cols: int, restarts: Sequence[int]
) -> float:
    """`_white_noise` of the Gram form, see [Note: the Gram form]."""
    scaled = units.norm * float((sigmas * _follow(sigmas, coefficients)[2]).norm())
    noise = units.stored * float(sigmas.norm()) * _gain(sigmas, coefficients, num_cols)
    ends = [0, *restarts, len(coefficients)]
    for start, stop in itertools.pairwise(ends):
        here = _follow(sigmas, coefficients[:start])[0]
        factor = _follow(here, coefficients[start:stop])[1]
        after, rest = _follow(sigmas, coefficients[:stop])[0], coefficients[stop:]
        minus, plus, _ = _factors(after, rest)
        largest = torch.maximum(minus.abs(), plus.abs())
        for entries in _noise_in_factor(coefficients[start:stop], units, here):
            noise = math.hypot(noise, float((largest * entries * here).norm()))
        cancelled = float(factor.norm()) * float(here.norm()) / math.sqrt(len(here))
        stored = units.stored * float(after.norm()) + units.summed * max(float(after.norm()), cancelled)
        noise = math.hypot(noise, stored * _gain(after, rest, num_cols))
    return scaled + noise


def _noise_in_factor(segment: Coefficients, units: _Units, values: Tensor) -> list[Tensor]:
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


def _worst_noise(coefficients: Coefficients, units: _Units, num_rows: int) -> float:
    """The same for any matrix: errors add up, each enlarged by the largest slope of the steps that follow."""
    total, injected = 0.0, units.stored + units.norm
    for done in range(len(coefficients) + 1):
        here, _, slopes = _follow(_SCALES, coefficients[:done])
        largest = here.amax()
        reachable = largest * _SCALES / _SCALES[-1]
        total += injected * float(_follow(reachable, coefficients[done:])[2].abs().amax())
        if done < len(coefficients):
            # the slopes and the number of rows both limit the norm
            norm = min(float(slopes.abs().amax()), math.sqrt(num_rows) * float(largest))
            injected = norm * _largest_injected(float(largest), coefficients[done], units)
    return total
