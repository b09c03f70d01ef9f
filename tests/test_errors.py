"""Error to the exact polar factor of every schedule, method and dtype on five spectra, within the published tables."""

from __future__ import annotations

import pytest
import torch
from spectra import SPECTRA, spectrum
from torch import Tensor

from shardmuon.orthogonalize import orthogonalize
from shardmuon.orthogonalize.schedules import schedule

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16

# (schedule, steps) -> for each of SPECTRA the largest relative Frobenius error to the polar factor in fp32, bf16, fp16.
# The polynomial makes nearly all of it; rounding adds to it in bf16, and in the null space (rank 16) noise of every
# dtype is orthogonalized too. Measured here with 2% to spare; Gaussian, log-spaced and power-law values are those
# known for these schedules in emulated tensor-core arithmetic, but for the square Gaussian, which hangs on the seed.
BOUNDS: dict[tuple[str, int], tuple[tuple[float, float, float], ...]] = {
    ("keller", 5): ((0.154,) * 3, (0.208,) * 3, (0.401, 0.404, 0.401), (0.185, 0.187, 0.185), (0.251, 0.371, 0.253)),
    ("quintic", 5): (
        (0.017, 0.018, 0.017),
        (0.082,) * 3,
        (0.372, 0.374, 0.372),
        (0.086, 0.09, 0.086),
        (0.016, 0.27, 0.038),
    ),
    ("polar_express", 5): (
        (0.087,) * 3,
        (0.103,) * 3,
        (0.271, 0.281, 0.271),
        (0.089, 0.091, 0.089),
        (0.097, 0.52, 0.116),
    ),
    ("polar_express", 6): (
        (0.0011, 0.0065, 0.0025),
        (0.023, 0.024, 0.023),
        (0.156, 0.189, 0.156),
        (0.0013, 0.0215, 0.0031),
        (0.0014, 0.94, 0.12),
    ),
    ("polar_express", 8): (
        (1e-5, 0.0067, 0.0013),
        (3e-4, 0.0084, 0.0049),
        (0.009, 0.149, 0.0216),
        (2e-5, 0.0216, 0.0031),
        (0.0011, 2.7, 0.42),
    ),
    ("cans", 5): ((0.081,) * 3, (0.098,) * 3, (0.268, 0.277, 0.268), (0.084, 0.087, 0.084), (0.086, 0.53, 0.107)),
    ("cubic", 5): ((0.191,) * 3, (0.252,) * 3, (0.593,) * 3, (0.418,) * 3, (0.175, 0.188, 0.176)),
    ("deepseek_v4", 10): (
        (3.1e-4, 0.006, 0.0011),
        (3.1e-4, 0.0071, 0.0018),
        (3.1e-4, 0.162, 0.0216),
        (3.1e-4, 0.0235, 0.0031),
        (0.0022, 4.0, 3.5),
    ),
}
# Eight of Keller's steps promote even fp32's rounding in the null space, most in the Gram form.
GRAM_FP32_RANK_16 = {("deepseek_v4", 10): 0.03}


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(("name", "steps"), BOUNDS, ids=str)
@pytest.mark.parametrize("at", range(len(SPECTRA)), ids=[f"{kind} {m}x{n}" for kind, m, n in SPECTRA])
def test_errors_stay_within_the_table(at: int, name: str, steps: int) -> None:
    coefficients = schedule(name, steps).triples
    x = spectrum(*SPECTRA[at])
    polar = orthogonalize(x[None], coefficients, method="reference")[0]
    for dtype, bound in zip((FP32, BF16, FP16), BOUNDS[name, steps][at], strict=True):
        for method in ("standard", "gram"):
            if method == "gram" and dtype == BF16:
                continue  # refused, see test_gram
            if method == "gram" and dtype == FP32 and at == 4:
                bound = GRAM_FP32_RANK_16.get((name, steps), bound)
            found = orthogonalize(x[None].float(), coefficients, method=method, dtype=dtype)[0]
            assert found.dtype == dtype
            error = relative(found, polar)
            assert error < bound, f"{method} {dtype}: {error:.4f}"


@pytest.mark.parametrize(("name", "steps"), BOUNDS, ids=str)
@pytest.mark.parametrize("method", ["standard", "gram"])
def test_singular_values_lie_in_the_schedules_band(method: str, name: str, steps: int) -> None:
    chosen = schedule(name, steps)
    for kind in ("gauss", "log", "power"):
        x = spectrum(kind, 128, 512)
        inputs = torch.linalg.svdvals(x / x.norm())
        low, high = chosen.band(float(inputs.min()))
        out = orthogonalize(x[None].float(), chosen.triples, method=method, dtype=FP32)[0]
        values = torch.linalg.svdvals(out)
        assert low - 2e-3 < float(values.min())
        assert float(values.max()) < high + 2e-3


@pytest.mark.parametrize("dtype", [FP32, FP16])
@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize(("name", "steps"), BOUNDS, ids=str)
def test_a_rank_one_matrix_keeps_its_sign(name: str, steps: int, method: str, dtype: torch.dtype) -> None:
    """Its singular value is 1, where some published sets flip the sign or diverge."""
    u, v = torch.linspace(-1, 1, 40), torch.linspace(0.5, 2, 120)
    x = torch.outer(u, v)
    found = orthogonalize(x[None], schedule(name, steps).triples, method=method, dtype=dtype)[0].double()
    gain = float((found * x).sum() / x.double().norm())
    low, high = schedule(name, steps).band(0.97)
    slack = 0.05 if dtype == FP16 else 0.001  # near 1 the terms of a step cancel
    assert low - slack < gain < high + slack
