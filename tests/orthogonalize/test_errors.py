"""Tests of the error of each schedule (the distance of its result from the polar factor) on five spectra, and of the
rounding error that each method and dtype adds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import pytest
import torch
from schedule_cases import CASES
from spectra import SPECTRA, polar_factor, spectrum
from tolerances import (
    assert_near,
    assert_same_orthogonalization,
    orthogonalization_bound,
    polar_bound,
)
from torch import Tensor

from shardmuon.orthogonalize import orthogonalize
from shardmuon.orthogonalize.schedules import schedule

FP64, FP32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16

SPECTRA_AND_RANK_1 = (*SPECTRA, ("rank 1", 40, 120))


def _where(spectra: Sequence[tuple[str, int, int]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("at", range(len(spectra)), ids=[f"{kind} {m}x{n}" for kind, m, n in spectra])


@lru_cache
def _decomposed(at: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return an fp32 matrix with one of the tested spectra, and its singular value decomposition in fp64."""
    x = spectrum(*SPECTRA_AND_RANK_1[at]).float()
    return x, *torch.linalg.svd(x.double(), full_matrices=False)


@lru_cache
def _with_polar(at: int) -> tuple[Tensor, Tensor, float]:
    """Return an fp64 matrix with one of the tested spectra, its polar factor, and a bound on the error of the computed
    polar factor. To save time, matrices of the kinds "log" and "power" are square: their singular values do not depend
    on the number of columns."""
    kind, rows, cols = SPECTRA[at]
    x = spectrum(kind, rows, rows if kind in ("log", "power") else cols)
    return x, polar_factor(x), polar_bound(x, 16 if kind == "rank 16" else None)


@pytest.mark.parametrize(("name", "steps"), CASES, ids=str)
@_where(SPECTRA)
def test_schedules_leave_the_error_that_is_known_of_them(at: int, name: str, steps: int) -> None:
    coefficients, (x, polar, off) = schedule(name, steps).triples, _with_polar(at)
    found = orthogonalize(x[None], coefficients, dtype=FP64)[0]
    rounding = orthogonalization_bound(coefficients, FP64, x) + off
    assert_near(found, polar, CASES[name, steps].errors[at] + rounding / float(polar.norm()), f"{name} {steps}")


# The tested combinations of method and dtype exclude the Gram form in bf16, which is not supported (see test_gram.py).
PRODUCTS = [("standard", FP32), ("gram", FP32), ("standard", BF16), ("standard", FP16), ("gram", FP16)]


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{name}-{steps}" for name, steps in CASES])
@_where(SPECTRA_AND_RANK_1)
def test_rounding_adds_what_it_may_in_every_dtype(at: int, number: int) -> None:
    """The result must match the exact result within rounding. Rounding errors are largest for low-rank matrices,
    because rounding noise in their null space is orthogonalized as well. Rank-1 matrices are tested because their only
    nonzero singular value is 1 after normalization, and one published schedule flips the sign of values slightly above
    1.

    Each case runs two combinations of method and dtype, so that every combination runs on every spectrum and every
    schedule at least twice.
    """
    chosen = schedule(*list(CASES)[number])
    x, u, s, vh = _decomposed(at)
    exact = (u * chosen(s / s.norm())) @ vh
    for turn in (0, 2):
        method, dtype = PRODUCTS[(at + number + turn) % len(PRODUCTS)]
        found = orthogonalize(x[None], chosen.triples, method=method, dtype=dtype)[0]
        assert found.dtype == dtype
        options: Any = {"matrix": x, "gram": method == "gram", "exact": True, "what": f"{method} {dtype}"}
        assert_same_orthogonalization(found, exact, dtype=dtype, coefficients=chosen.triples, **options)
