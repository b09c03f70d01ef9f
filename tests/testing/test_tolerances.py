"""Tests of tests/tolerances.py: each tolerance accepts the rounding errors of every dtype, and rejects errors that are
ten times larger."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from spectra import normal, spectrum
from tolerances import (
    KELLER,
    assert_bitwise,
    assert_near,
    assert_rounded,
    assert_same_orthogonalization,
    assert_same_update,
    orthogonalization_bound,
    roundoff,
    sum_roundoff,
)
from torch import Tensor

from shardmuon import schedule
from shardmuon.orthogonalize import orthogonalize

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
MATRICES = {
    "square": normal(16, 16),
    "tall": normal(65, 33),
    "one row": normal(1, 24),
    "rank 1": normal(40, 1) @ normal(1, 96, seed=1),
    **{kind: spectrum(kind, 64, 192).float() for kind in ("gauss", "log", "power", "rank 16")},
}


def exact(matrix: Tensor, name: str) -> Tensor:
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    return (u * schedule(name)(s / s.norm())) @ vh


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["keller", "polar_express", "cubic"])
def test_every_spectrum_stays_within_a_bound_that_is_near_what_is_found(name: str, dtype: torch.dtype) -> None:
    """The error of each orthogonalized matrix must be within its bound, and at least one error must exceed a tenth of
    its bound."""
    triples = schedule(name).triples
    shares = []
    for what, matrix in MATRICES.items():
        given = matrix.to(dtype) if dtype == torch.float64 else matrix
        found = orthogonalize(given[None], triples, dtype=dtype)[0]
        options = {"dtype": dtype, "coefficients": triples, "what": what, "exact": dtype != torch.float64}
        assert_same_orthogonalization(found, exact(given, name), matrix=given, **options)
        bound = orthogonalization_bound(triples, dtype, given)
        assert bound <= orthogonalization_bound(triples, dtype) * given.norm().clamp(min=1)
        shares.append(float((found.double() - exact(given, name)).norm()) / bound)
    assert max(shares) > 0.1


@pytest.mark.parametrize("dtype", [pytest.param(torch.bfloat16, marks=pytest.mark.numeric), torch.float32], ids=str)
@pytest.mark.parametrize("fault", ["half", "scale", "swap", "steps", "schedule"])
def test_a_wrong_update_is_refused(fault: str, dtype: torch.dtype) -> None:
    grad = normal(32, 48)
    right = orthogonalize(grad[None], KELLER, dtype=dtype)[0].float()
    before, lr = normal(32, 48, seed=1), 0.02
    wrong = {
        "half": torch.cat([orthogonalize(half[None], KELLER, dtype=dtype)[0].float() for half in grad.chunk(2)]),
        "scale": 1.5 * right,
        "swap": right.roll(1, dims=0),
        "steps": orthogonalize(grad[None], KELLER[:4], dtype=dtype)[0].float(),
        "schedule": orthogonalize(grad[None], schedule("polar_express").triples, dtype=dtype)[0].float(),
    }[fault]
    options = {"before": before, "lr": lr, "weight_decay": 0.1, "dtype": dtype, "matrix": grad}
    decayed = before * (1 - lr * 0.1)
    assert_same_update(decayed - lr * right, decayed - lr * exact(grad, "keller").float(), exact=True, **options)
    with pytest.raises(AssertionError, match="rounding explains"):
        assert_same_update(decayed - lr * wrong, decayed - lr * right, **options)
    # With a small lr, a wrong update must still fail the comparison of weights.
    options |= {"before": torch.zeros(32, 48), "lr": 1e-9}
    with pytest.raises(AssertionError, match="rounding explains"):
        assert_same_update(-1e-9 * wrong, -1e-9 * right, **options)


def test_bits_are_compared_not_values() -> None:
    zero, nan = torch.tensor([0.0]), torch.tensor([float("nan")])
    assert_bitwise({"a": [nan, zero]}, {"a": [nan.clone(), zero.clone()]})
    for other in (torch.tensor([-0.0]), torch.tensor([0.0], dtype=torch.float64), torch.zeros(1, 1), 0.0):
        with pytest.raises(AssertionError, match="value"):
            assert_bitwise(other, zero)
    with pytest.raises(AssertionError, match=r"w\[1\]: 1 of 3 elements"):
        assert_bitwise([zero, torch.tensor([1.0, 2.0, 3.0])], [zero, torch.tensor([1.0, 2.0, 3.5])], "w")


ONE = torch.ones(4)
# ABOVE exceeds 1 by eps. This is the error of two roundings, because eps is twice the unit roundoff.
ABOVE = torch.nextafter(ONE, ONE + 1)
# Each case gives the actual value, the expected value, keyword arguments of the assertion, and the expected error text
# ("" if no error is expected).
ROUNDED: list[tuple[Any, Any, dict[str, float], str]] = [
    (ABOVE, ONE, {"roundings": 2}, ""),
    (ABOVE, ONE, {"roundings": 1}, "allowed 1"),
    *((value, value, {"roundings": 1}, "") for value in (math.inf, math.nan)),
    *((value, 1.0, {"roundings": 100}, "off") for value in (math.inf, math.nan, 0.0)),
    (ONE[:1], ONE, {"roundings": 1}, "shape"),
    (torch.tensor(1e-8), torch.tensor(0.0), {"roundings": 1, "scale": 1.0}, ""),
    (torch.tensor(1e-6), torch.tensor(0.0), {"roundings": 1, "scale": 1.0}, "off"),
    (ABOVE, ONE, {"bound": 2 * roundoff(torch.float32)}, ""),
    (ABOVE, torch.zeros(4), {"bound": 1.0}, "of its norm"),
]


@pytest.mark.parametrize(("found", "expected", "options", "says"), ROUNDED, ids=str)
def test_roundings_are_counted(found: Any, expected: Any, options: dict[str, float], says: str) -> None:
    check: Any = assert_near if "bound" in options else assert_rounded
    with pytest.raises(AssertionError, match=says) if says else nullcontext():
        check(found, expected, **options)


def test_sums_of_many_terms_stay_within_their_root_mean_square() -> None:
    """The rounding error of a sum in fp16 must be within its bound, and above a fifth of it. Terms of mixed signs are
    tested first, then positive terms. The number of terms n is small, because the bound is valid only if n times the
    unit roundoff is small."""
    for num_terms in (30, 300):
        terms = normal(2000, num_terms).half()
        for values in (terms, terms.abs()):
            total = torch.zeros(2000, dtype=torch.float16)
            for column in values.T:
                total = total + column
            exact_sums = values.double().sum(dim=1)
            found = float((total.double() - exact_sums).norm() / exact_sums.norm())
            assert 0.2 < found / sum_roundoff(torch.float16, num_terms) < 1.0
