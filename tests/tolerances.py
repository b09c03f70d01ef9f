"""Tolerances for tests. A tolerance is a number of roundings, or the measured rounding error of the Newton-Schulz
iteration in a dtype.

[Note: one rounding]
    Rounding to a dtype causes a relative error of at most u = eps / 2, the unit roundoff. To first order, the relative
    error of a result of k rounded multiplications and divisions is therefore at most k u. Fused operations round less
    often, so the bound is valid on every machine. A sequential sum of n terms has an error of at most (n - 1) u
    relative to the sum of absolute values.

    In a sum of many terms, the rounding errors partly cancel. If the terms have random signs, the i-th partial sum is
    about sqrt(i) times as large as a term. The root mean square (RMS) of its rounding error is u / sqrt(3) times the
    partial sum. Relative to the whole sum, the RMS error is therefore u sqrt(n / 6). For positive terms, the RMS error
    is u sqrt(n) / 3. As long as n u is small, u sqrt(n / 6) covers both cases.

[Note: rounding of the steps]
    A matrix is orthogonalized by the Newton-Schulz iteration, whose steps are X <- (a I + b X X^T + c (X X^T)^2) X. The
    effect of rounding on the result depends on the matrix, so it is measured. A few copies of the matrix get random
    errors of up to one rounding. For each copy, the steps are computed with every matmul rounded to the dtype (with
    fp32 sums for half precision), and the result is compared with that of steps in fp64. The tolerance is three times
    the largest error, but at least three roundings of the result for each step. fp64 has no wider reference, so its
    tolerance is scaled down from that of fp32.

    The standard form of the iteration computes each step from X. The Gram form instead iterates on the smaller Gram
    matrix X X^T, and loses more accuracy on some spectra, so its tolerance is 64 times as large. (`test_gram.py` limits
    the worst error of the Gram form to 8 times that of the standard form.)

[Note: polar factors]
    An SVD routine returns the exact SVD of a slightly different matrix. The norm of the difference is a small multiple
    of u ||X||. LAPACK's documentation only says that this multiple is a modest function of the shape. The bound uses
    the larger side of the matrix, which exceeds the multiples seen in practice. A change of norm e in the matrix
    changes the polar factor by at most e divided by the smallest nonzero singular value. (Between two singular
    directions i and j, the change is 2 e / (s_i + s_j).) Computed singular vectors are orthogonal up to the same
    multiple of u.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardmuon.auditing.reference import relative_error

Coefficients = Sequence[tuple[float, float, float]]

# The coefficients of the default schedule are repeated here, so that the tolerances do not depend on the package.
KELLER: Coefficients = ((3.4445, -4.7750, 2.0315),) * 5


def roundoff(dtype: torch.dtype) -> float:
    """Return the unit roundoff u of a dtype, which is the largest relative error of one rounding."""
    return torch.finfo(dtype).eps / 2


def sum_roundoff(
    dtype: torch.dtype,  # dtype in which the terms of the sum are accumulated
    num_terms: int,
) -> float:
    """Return the expected rounding error of a sum of `num_terms` terms, relative to the sum: the unit roundoff times
    sqrt(num_terms / 6) ([Note: one rounding])."""
    return roundoff(dtype) * math.sqrt(num_terms / 6)


# ----------------------------------------------------------------------------------------------------- exact, rounded


def assert_bitwise(found: Any, expected: Any, what: str = "value") -> None:
    """Assert that tensors, or lists and dicts of tensors, are bitwise equal and have equal dtypes and shapes. Signs of
    zeros and NaN payloads count, too. Use this function for results of the same arithmetic on different layouts, where
    no bit may differ."""
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


def _bytes(tensor: Tensor) -> Tensor:  # returns a uint8 tensor of shape (number of elements, bytes per element)
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).view(flat.numel(), flat.element_size())


def assert_rounded(
    found: Any,
    expected: Any,
    *,
    roundings: float,
    dtype: torch.dtype | None = None,
    scale: Any = None,
    what: str = "value",
) -> None:
    """Assert that each element equals the expected one up to a number of roundings in `dtype`.

    Args:
        found: A tensor or a number.
        expected: The expected value.
        roundings: Total number of rounded operations in `found` and `expected`, preferably as the expression from which
            the number is derived. A sum of n terms counts as n - 1, or as sqrt(n / 6) if its errors can be treated as
            random.
        dtype: Dtype of the roundings. Default: the dtype of `found`, or fp64 for a number.
        scale: Magnitude relative to which roundings are measured. For a sum whose terms cancel, pass the sum of the
            terms' absolute values. Default: the expected value.
        what: Name of the value in the error message.
    """
    dtype = dtype or (found.dtype if isinstance(found, Tensor) else torch.float64)
    a, b = _double(found), _double(expected)
    assert a.shape == b.shape, f"{what}: found shape {tuple(a.shape)}, expected {tuple(b.shape)}"
    # Equal infinities are accepted here, because their difference is NaN.
    same = (a == b) | (a.isnan() & b.isnan())
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
    """Assert that ||found - expected|| is at most `bound` * ||expected||. Other functions in this module compute
    suitable bounds."""
    assert found.shape == expected.shape, f"{what}: found shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    difference = relative_error(_double(found), _double(expected))
    assert difference <= bound, f"{what}: off by {difference:.3g} of its norm, allowed {bound:.3g}"


def _double(value: Any) -> Tensor:
    tensor = value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
    return tensor.cpu().double()


# ------------------------------------------------------------------------------------------------------------ updates


def steps_written_out(
    matrix: Tensor,  # (rows, cols): normalized before the first step
    coefficients: Coefficients,
    dtype: torch.dtype = torch.float64,
) -> Tensor:  # returns a tensor of shape (rows, cols) in fp64
    """Return the result of the Newton-Schulz steps, computed directly from the formula with every matmul rounded to
    `dtype`."""
    wide = torch.promote_types(dtype, torch.float32)

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).to(wide)

    y = _double(matrix)
    y = rounded(y / y.norm().clamp(min=torch.finfo(torch.float64).tiny))
    y = y.T if y.shape[0] > y.shape[1] else y
    for a, b, c in coefficients:
        gram = rounded(y @ y.T)
        y = rounded(a * y + rounded(b * gram + c * gram @ gram) @ y)
    return (y if y.shape == matrix.shape else y.T).double()


def orthogonalization_bound(
    coefficients: Coefficients,
    dtype: torch.dtype,
    matrix: Tensor | None = None,  # (rows, cols): the input of the orthogonalization, up to a constant factor
    *,
    gram: bool = False,
) -> float:
    """Return an upper bound on the absolute error, in the Frobenius norm, of an orthogonalization with matmuls in
    `dtype`.

    The bound is measured on a few copies of the matrix with random errors ([Note: rounding of the steps]). Without a
    matrix, the bound is one rounding for every matmul of every step, multiplied by the slope of the iteration at zero.
    `gram` is True for the Gram form.
    """
    unit = roundoff(dtype)
    if matrix is None:
        return 3 * len(coefficients) * math.prod(a for a, _, _ in coefficients) * unit
    low = torch.float32 if dtype == torch.float64 else dtype
    exact, error = steps_written_out(matrix, coefficients), 0.0
    # Small matrices get more random trials, because their errors vary more and each trial costs little.
    for seed in range(2 if matrix.numel() > 10_000 else 8):
        nudges = torch.rand(matrix.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2 - 1
        found = steps_written_out(_double(matrix) * (1 + roundoff(low) * nudges), coefficients, low)
        error = max(error, 3 * float((found - exact).norm()) * unit / roundoff(low))
    return max(error, 3 * len(coefficients) * unit * float(exact.norm())) * (64 if gram else 1)


def polar_bound(
    matrix: Tensor,  # (rows, cols): the matrix whose polar factor is computed
    rank: int | None = None,
) -> float:
    """Return an upper bound on the error, in the Frobenius norm, of a polar factor computed from an SVD in fp64. The
    bound is proportional to 1 plus the condition number of the matrix ([Note: polar factors]).

    `rank` is the number of nonzero singular values, by default all of them.
    """
    values = torch.linalg.svdvals(_double(matrix))[:rank]
    condition = float(values[0] / values[-1])
    return max(matrix.shape) * roundoff(torch.float64) * (condition + 1) * math.sqrt(len(values))


def assert_same_orthogonalization(
    found: Tensor,  # (rows, cols): result with matmuls in `dtype`
    expected: Tensor,  # (rows, cols): expected result
    *,
    dtype: torch.dtype,
    coefficients: Coefficients = KELLER,
    matrix: Tensor,  # (rows, cols): the input of the orthogonalization
    gram: bool = False,
    exact: bool = False,
    what: str = "result",
) -> None:
    """Assert that two results of the same Newton-Schulz steps agree up to the rounding of their matmuls.

    Args:
        found: Result with matmuls in `dtype`.
        expected: Another such result or, if `exact` is True, a result that was computed in fp64 by a different method.
        dtype: Dtype of the matmuls.
        coefficients: Coefficients of each step.
        matrix: The input of the orthogonalization.
        gram: True for the Gram form.
        exact: True if the rounding of `expected` is negligible.
        what: Name of the result in the error message.
    """
    sides = 1 if exact else 2
    bound = sides * orthogonalization_bound(coefficients, dtype, matrix, gram=gram)
    bound += roundoff(found.dtype) * float(_double(expected).norm())
    difference = float((_double(found) - _double(expected)).norm())
    assert difference <= bound, f"{what}: the difference has norm {difference:.3g}, rounding explains {bound:.3g}"


def assert_same_update(
    found: Tensor,  # (rows, cols): weights after the step
    expected: Tensor,  # (rows, cols): weights after the correct step
    *,
    before: Tensor,  # (rows, cols): weights that both steps start from
    lr: float,
    weight_decay: float = 0.0,
    scale: float = 1.0,
    dtype: torch.dtype,
    coefficients: Coefficients = KELLER,
    matrix: Tensor | None = None,  # (rows, cols): the input of the orthogonalization
    exact: bool = False,
    what: str = "update",
) -> None:
    """Assert that two steps applied the same update.

    The compared updates are (before * decay - after) / lr, so that a small lr does not hide differences. The bound is
    that of `assert_same_orthogonalization` times `scale`, plus the rounding of stored weights. Each step rounds the
    decayed weight once and the updated weight once, so each recovered update is off by at most 2 u ||weights|| / lr.

    Args:
        found: Weights after the step.
        expected: Weights after the correct step.
        before: Weights that both steps start from.
        lr: Learning rate.
        weight_decay: Decoupled weight decay. A step multiplies weights by 1 - lr * weight_decay.
        scale: Learning-rate scale of the matrix, such as that of "match_rms_adamw".
        dtype: Dtype of the matmuls.
        coefficients: Coefficients of each step.
        matrix: The input of the orthogonalization. Without a matrix, the bound is valid for any matrix, but is hundreds
            of times larger.
        exact: True if the only rounding in `expected` is that of the weights to their dtype.
        what: Name of the update in the error message.
    """
    decayed = _double(before) * (1 - lr * weight_decay)
    one, other = ((decayed - _double(after)) / lr for after in (found, expected))
    products = orthogonalization_bound(coefficients, dtype, matrix)
    largest = max(float(_double(t).norm()) for t in (before, found, expected))
    stored = 2 * (roundoff(found.dtype) + roundoff(expected.dtype)) * largest / lr
    bound = (1 if exact else 2) * scale * products + stored
    difference = float((one - other).norm())
    assert difference <= bound, f"{what}: the difference has norm {difference:.3g}, rounding explains {bound:.3g}"
