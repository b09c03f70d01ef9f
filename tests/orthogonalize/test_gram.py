"""Tests that Newton-Schulz on the Gram matrix equals the standard form within rounding, and that symmetric matmuls
equal full ones."""

from __future__ import annotations

import importlib
from functools import cache, partial
from typing import Any

import pytest
import torch
from live_bytes import LiveBytes
from schedule_cases import CASES
from spectra import normal, spectrum
from tolerances import KELLER, assert_rounded, assert_same_orthogonalization, steps_written_out

from shardmuon import schedule
from shardmuon.orthogonalize import Products, _plan_restarts, _row_blocks, orthogonalize

Coefficients = tuple[tuple[float, float, float], ...]
module = importlib.import_module("shardmuon.orthogonalize")


def test_gram_in_bf16_is_refused() -> None:
    message = r"method='gram' needs products in torch.float16, torch.float32 or torch.float64, found torch.bfloat16"
    with pytest.raises(ValueError, match=message):
        orthogonalize(torch.ones(1, 4, 8), KELLER, method="gram", dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "steps", "fp16", "fp32"),
    [("keller", 3, 0, 0), *((*of, *case.restarts) for of, case in CASES.items())],
)
def test_restarts_are_as_many_as_the_dtype_needs(name: str, steps: int, fp16: int | tuple[int, ...], fp32: int) -> None:
    found = [_plan_restarts(schedule(name, steps).triples, d) for d in (torch.float16, torch.float32, torch.float64)]
    assert fp16 in (found[0], len(found[0]))
    assert [len(restarts) for restarts in found[1:]] == [fp32, 0]


@pytest.mark.parametrize("kind", ["gauss", "log", "power", "rank 16"])
def test_a_local_restart_is_as_good_as_one_from_x(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one restart of the Gram form (Polar Express, fp16, n = 4 m), the result must be within the error bound
    whether the restart is local or recomputes the Gram matrix from X. The local restart must also need less memory."""
    x, coefficients = spectrum(kind, 256, 1024).float(), schedule("polar_express").triples
    exact = steps_written_out(x.double(), coefficients)
    for aspect in (5 / 2, 1e9):
        monkeypatch.setattr(module, "_LOCAL_ASPECT", aspect)
        assert module._restarts_locally(256, 1024, coefficients, torch.float16) == (aspect < 4)
        with LiveBytes() as live:
            found = orthogonalize(x[None], coefficients, method="gram", dtype=torch.float16)[0]
        assert live.peak <= (12 if aspect < 4 else 16) * x.numel()
        bounds: Any = {"matrix": x, "coefficients": coefficients, "dtype": torch.float16}
        assert_same_orthogonalization(found, exact, exact=True, gram=True, **bounds)


@pytest.mark.parametrize("num_rows", [50, 191, 192, 300, 384, 500])
def test_symmetric_products_equal_full_ones_and_are_symmetric(num_rows: int) -> None:
    x = torch.randn(num_rows, 130, generator=torch.Generator().manual_seed(num_rows), dtype=torch.float64)
    products = Products((num_rows, num_rows), x.device, x.dtype)
    gram = products.symmetric_mm(x, x.mT, out=x.new_empty(num_rows, num_rows))
    near_product(gram, x @ x.mT, x.abs() @ x.mT.abs(), x.shape[-1])
    count = _row_blocks(num_rows, 130, torch.float64)
    assert (count > 1) == (num_rows > 192)
    last = num_rows * (count - 1) // count
    # Off-diagonal blocks of the result are copied from their transposes, not computed twice, so they must be equal
    # bitwise.
    assert torch.equal(gram[:last, last:], gram[last:, :last].mT)
    poly = products.symmetric_addmm(gram, gram, gram, beta=-4.775, alpha=2.0315, out=torch.empty_like(gram))
    sizes = 4.775 * gram.abs() + 2.0315 * gram.abs() @ gram.abs()
    near_product(poly, -4.775 * gram + 2.0315 * gram @ gram, sizes, num_rows)
    sizes = 3.4445 * x.abs() + poly.abs() @ x.abs()
    found = products.addmm(x, poly, x, beta=3.4445, out=torch.empty_like(x))
    near_product(found, 3.4445 * x + poly @ x, sizes, num_rows)


def near_product(found: torch.Tensor, wanted: torch.Tensor, sizes: torch.Tensor, num_terms: int) -> None:
    """Assert that two matrix products are equal within rounding. Each element is a sum of `num_terms` terms, whose
    magnitudes add up to `sizes`. Each of the two computations rounds a term at most `num_terms` times, then in two
    scalings and in the sum of two matrices."""
    assert_rounded(found, wanted, roundings=2 * (num_terms + 3), scale=sizes)


# ------------------------------------------------------------------------------- every schedule, every rank of input

SHAPES = [(17, 16), (32, 384), (64, 64), (5, 300)]
# In the schedule FLAT_FIRST, the polynomial of the first step has slope 0 at zero, which must not delay the restarts of
# the Gram form.
FLAT_FIRST = ((0.0, 1.0, 0.0), *KELLER, *KELLER[:1])
ALL = [("keller", 3), ("keller", 8), ("polar_express", 3), (FLAT_FIRST, 6), *CASES]


# `of_rank` returns an fp32 matrix of shape (rows, cols) with `rank` nonzero singular values.
def of_rank(rank: int, rows: int, cols: int, kind: str) -> torch.Tensor:
    index = torch.arange(rank, dtype=torch.float64)
    values = {"flat": index * 0 + 1, "power": 1 / (1 + index), "log": 10 ** (-3 * index / max(rank - 1, 1))}[kind]
    left, right = (torch.linalg.qr(normal(size, rank, seed=rank, dtype=torch.float64))[0] for size in (rows, cols))
    return ((left * values) @ right.T).float()


@cache
def low_and_full_ranks() -> list[torch.Tensor]:
    """Return fp32 matrices for combinations of shape, rank (from 1 to full) and spectrum. Low-rank matrices are the
    hardest cases, because rounding errors are amplified most in the null space."""
    return [
        of_rank(rank, *shape, kind)
        for shape in SHAPES
        for rank in sorted({1, 2, min(shape) // 2, min(shape)})
        for kind in (("flat", "power", "log") if rank > 1 else ("flat",))
    ]


@cache
def exact_results(coefficients: Coefficients) -> list[torch.Tensor]:
    return [steps_written_out(x.double(), coefficients) for x in low_and_full_ranks()]


@cache
def worst_error(coefficients: Coefficients, dtype: torch.dtype, method: str) -> float:
    worst = 0.0
    for x, exact in zip(low_and_full_ranks(), exact_results(coefficients), strict=True):
        found = orthogonalize(x[None], coefficients, method=method, dtype=dtype)[0].double()
        worst = max(worst, float((found - exact).norm() / exact.norm()))
    return worst


@pytest.mark.parametrize(
    ("dtype", "beside", "factor"),
    [
        # The errors of the Gram form may be up to 8 times (3 bits) as large as those of the standard form. Without
        # restarts, they would be more than 16 times as large.
        (torch.float32, torch.float32, 8),
        (torch.float16, torch.float16, 8),
        # The method "auto" may choose the Gram form in fp16 over the standard form in bf16, so the Gram form must be at
        # least as accurate, even for low-rank matrices, where both amplify rounding noise in the null space.
        (torch.float16, torch.bfloat16, 1),
    ],
)
@pytest.mark.parametrize(("name", "steps"), ALL)
def test_the_gram_form_is_nearly_as_good_as_the_standard_one_on_every_rank(
    name: str | Coefficients, steps: int, dtype: torch.dtype, beside: torch.dtype, factor: float
) -> None:
    coefficients = schedule(name, steps).triples
    assert worst_error(coefficients, dtype, "gram") <= factor * worst_error(coefficients, beside, "standard")


@pytest.mark.parametrize("name", ["quintic", "cans"])
def test_without_its_restarts_the_gram_form_fails_on_low_ranks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_plan_restarts", lambda *_: ())
    of = partial(worst_error.__wrapped__, schedule(name).triples, torch.float32)
    assert of("gram") > 16 * of("standard")
