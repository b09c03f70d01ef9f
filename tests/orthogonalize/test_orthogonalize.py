"""Tests of the orthogonalizers: their results must match those of torch, and the singular values must follow the
schedule's polynomials."""

from __future__ import annotations

import importlib
import math

import pytest
import torch
from spectra import normal, spectrum
from tolerances import KELLER, Coefficients, assert_same_orthogonalization, steps_written_out
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

from shardmuon.orthogonalize import orthogonalize

# Iterating this quintic, (15 x - 10 x^3 + 3 x^5) / 8, drives nonzero singular values to 1.
CLASSIC: Coefficients = ((1.875, -1.25, 0.375),) * 8
MIXED: Coefficients = (*KELLER[:3], (3.0, -3.2, 1.2), (2.0, -1.5, 0.5))
OTHER = (3.0, -3.2, 1.2)
SHAPES = [(4, 4), (3, 8), (8, 3), (1, 6), (6, 1), (1, 1), (17, 33), (33, 17), (64, 128), (96, 200), (250, 96)]
FP64, FP32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
METHODS = ("standard", "gram", "torch")


@pytest.mark.parametrize(
    ("shape", "dtype", "size", "coefficients"),
    [
        *((shape, dtype, 0.01, KELLER) for shape in SHAPES for dtype in (FP32, BF16, FP64)),
        # The smallest of these matrices have a norm so small that torch clamps it before dividing by it.
        *(((9, 20), FP32, size, (OTHER,) * steps) for size in (1.0, 1e-8, 1e-12) for steps in (1, 3, 9)),
    ],
    ids=str,
)
def test_torch_has_torchs_bits(
    shape: tuple[int, int], dtype: torch.dtype, size: float, coefficients: Coefficients
) -> None:
    batch = size * torch.stack([normal(*shape, seed=s, dtype=dtype) for s in range(3)])
    for x, out in zip(batch, orthogonalize(batch, coefficients, method="torch"), strict=True):
        wanted = _zeropower_via_newtonschulz(x.clone(), coefficients[0], len(coefficients), 1e-7)
        assert out.dtype == wanted.dtype == BF16 and torch.equal(out, wanted)


@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("coefficients", [KELLER, CLASSIC, MIXED], ids=["keller", "classic", "mixed"])
@pytest.mark.parametrize(
    ("kind", "shape"), [*(("gauss", shape) for shape in SHAPES), ("log", (24, 60)), ("power", (24, 60))], ids=str
)
def test_singular_vectors_stay_and_values_go_through_the_polynomial(
    kind: str, shape: tuple[int, int], coefficients: Coefficients, method: str
) -> None:
    x = spectrum(kind, *shape)
    for dtype in (FP64, FP32):
        u, s, vh = torch.linalg.svd(x.to(dtype).double(), full_matrices=False)
        s = s / s.norm()
        for a, b, c in coefficients:
            s = a * s + b * s**3 + c * s**5
        found = orthogonalize(x[None].to(dtype), coefficients, method=method, dtype=dtype)[0]
        assert (found.dtype, found.shape) == (dtype, shape)
        how = {"dtype": dtype, "coefficients": coefficients, "gram": method == "gram", "exact": dtype == FP32}
        assert_same_orthogonalization(found, (u * s) @ vh, matrix=x, **how)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_emulated_half_precision_is_near_the_real_one(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matmuls on CPUs without half-precision instructions run in fp32 and round wherever these instructions would
    round. The result must match real half-precision matmuls within rounding."""
    x = normal(24, 60)
    monkeypatch.setattr(importlib.import_module("shardmuon.orthogonalize"), "cpu_has_bf16_matmul", lambda: False)
    emulated = orthogonalize(x[None], KELLER, dtype=dtype)[0]
    y = (x / x.norm()).to(dtype)
    for a, b, c in KELLER:
        gram = y @ y.T
        y = torch.addmm(y, torch.addmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    assert emulated.dtype == y.dtype
    for wanted, exact in ((y, False), (steps_written_out(x, KELLER), True)):
        assert_same_orthogonalization(emulated, wanted, dtype=dtype, coefficients=KELLER, matrix=x, exact=exact)


# ------------------------------------------------------------------------------------------------------- invariance


def _batch(shape: tuple[int, int], dtype: torch.dtype = FP32, count: int = 4) -> Tensor:
    return torch.stack([normal(*shape, seed=s, dtype=dtype) * 10.0 ** (s % 4 - 2) for s in range(count)])


@pytest.mark.numeric
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [FP32, BF16, FP64])
@pytest.mark.parametrize("lay", ["contiguous", "transposed", "strided", "expanded"])
def test_the_input_is_not_written(lay: str, dtype: torch.dtype, method: str) -> None:
    """The input must not be written to, even where a cast returns the input itself, as `.bfloat16()` does for a bf16
    tensor."""
    x = _batch((6, 11), dtype)
    x = {
        "contiguous": x,
        "transposed": x.mT,
        "strided": torch.stack([x, x], dim=-1)[..., 0],
        "expanded": x[:1].expand(4, 6, 11),
    }[lay]
    before = x.clone()
    for products in (None, None if method == "gram" and dtype == BF16 else dtype):
        found = orthogonalize(x, KELLER, method=method, dtype=products)
        assert torch.equal(x, before)
        found.add_(1.0)
        assert torch.equal(x, before), "the result shares memory with the input"


@pytest.mark.numeric
@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("power", [-110, -40, 40, 110])
def test_powers_of_two_change_no_bit(power: int, dtype: torch.dtype, method: str) -> None:
    """Scaling the input by a power of two must not change the result. Without normalization, products of values near
    2^110 (1.3e33) would overflow in fp32, and products of values near 2^-110 would underflow."""
    x = _batch((6, 11), dtype, count=2)
    assert torch.equal(orthogonalize(x * 2.0**power, KELLER, method=method), orthogonalize(x, KELLER, method=method))


@pytest.mark.numeric
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("shape", [(6, 11), (11, 6), (100, 240)], ids=str)
def test_zeros_stay_zeros_and_a_bad_element_spoils_its_own_matrix_only(
    shape: tuple[int, int], bad: float, method: str
) -> None:
    x = _batch(shape, count=3)
    wanted = orthogonalize(x, KELLER, method=method)
    x[1, 2, 3] = bad
    if not bad:
        x[1] = 0.0
    found = orthogonalize(x, KELLER, method=method)
    assert not (found[1].isfinite() if bad else found[1]).any(), "a bad gradient must not look like a good one"
    assert torch.equal(found[[0, 2]], wanted[[0, 2]])
