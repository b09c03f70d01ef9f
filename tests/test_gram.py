"""Newton-Schulz on the Gram matrix gives the standard form's result, and symmetric products what full ones give."""

from __future__ import annotations

import pytest
import torch

from shardmuon import Muon
from shardmuon.orthogonalize import orthogonalize
from shardmuon.orthogonalize.symmetric import addmm, symmetric_addmm

Coefficients = tuple[tuple[float, float, float], ...]
KELLER: Coefficients = ((3.4445, -4.7750, 2.0315),) * 5
# Amsel et al. 2025, arXiv 2505.16932, first five triples, divided by the safety factor 1.01
_RAW = (
    (8.2872, -23.5959, 17.3004),
    (4.1071, -2.9478, 0.5448),
    (3.9487, -2.9089, 0.5518),
    (3.3184, -2.4885, 0.5100),
    (2.3007, -1.6689, 0.4188),
)
POLAR_EXPRESS: Coefficients = tuple((a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in _RAW)


def spectrum(kind: str, rows: int, cols: int) -> torch.Tensor:
    """A matrix with the named singular values, fp64."""
    generator = torch.Generator().manual_seed(0)
    if kind == "gauss":
        return torch.randn(rows, cols, generator=generator, dtype=torch.float64)
    u, _ = torch.linalg.qr(torch.randn(rows, rows, generator=generator, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(cols, rows, generator=generator, dtype=torch.float64))
    index = torch.arange(rows, dtype=torch.float64)
    values = {"log": 10 ** (-3 * index / rows), "power": 1 / (1 + index), "rank 16": (index < 16).double()}[kind]
    return (u * values) @ v.T


def exact_steps(x: torch.Tensor, coefficients: Coefficients = KELLER) -> torch.Tensor:
    """The steps in fp64, written out."""
    y = x / x.norm()
    for a, b, c in coefficients:
        gram = y @ y.T
        y = a * y + (b * gram + c * gram @ gram) @ y
    return y


@pytest.mark.parametrize("kind", ["gauss", "log", "power", "rank 16"])
@pytest.mark.parametrize("shape", [(192, 384), (256, 1024), (384, 160)])
def test_gram_form_stays_near_the_exact_steps(kind: str, shape: tuple[int, int]) -> None:
    x = spectrum(kind, min(shape), max(shape))
    x = x.T if shape[0] > shape[1] else x
    exact = exact_steps(x if shape[0] <= shape[1] else x.T)
    exact = exact if shape[0] <= shape[1] else exact.T
    found = orthogonalize(x.float().unsqueeze(0), KELLER, method="gram")[0]
    assert found.dtype == torch.float32
    assert float((found - exact).norm() / exact.norm()) < 5e-3
    precise = orthogonalize(x.unsqueeze(0), KELLER, method="gram", dtype=torch.float64)[0]
    assert float((precise - exact).norm() / exact.norm()) < 1e-10


@pytest.mark.parametrize("kind", ["gauss", "log", "power", "rank 16"])
def test_longer_schedules_restart_before_noise_grows(kind: str) -> None:
    # Slopes: Polar Express 976, ten steps of torch's triple 2e5. Without restarts the noise in fp32 would be 0.1.
    x = spectrum(kind, 128, 512)
    for coefficients, bound in ((POLAR_EXPRESS, 5e-3), (KELLER * 2, 5e-2)):
        exact = exact_steps(x, coefficients)
        found = orthogonalize(x.float().unsqueeze(0), coefficients, method="gram")[0]
        standard = orthogonalize(x.float().unsqueeze(0), coefficients, dtype=torch.float32)[0]
        allowed = max(bound, 3 * float((standard - exact).norm() / exact.norm()))
        assert float((found - exact).norm() / exact.norm()) < allowed


def test_batched_gram_form_is_the_single_one() -> None:
    x = torch.randn(3, 100, 250, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    together = orthogonalize(x, KELLER, method="gram", dtype=torch.float64)
    alone = torch.stack([orthogonalize(m.unsqueeze(0), KELLER, method="gram", dtype=torch.float64)[0] for m in x])
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-12)


def test_gram_in_bf16_is_refused() -> None:
    message = r"ns_method='gram' needs ns_dtype=torch.float16, torch.float32 or torch.float64, found torch.bfloat16"
    with pytest.raises(ValueError, match=message):
        orthogonalize(torch.ones(1, 4, 8), KELLER, method="gram", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=message):
        Muon([torch.nn.Parameter(torch.ones(4, 8))], ns_method="gram", ns_dtype=torch.bfloat16)


@pytest.mark.parametrize("num_rows", [50, 191, 192, 300, 384, 500])
@pytest.mark.parametrize("num", [1, 3])
def test_symmetric_products_equal_full_ones_and_are_symmetric(num_rows: int, num: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num, num_rows, 130, generator=generator, dtype=torch.float64)
    gram = symmetric_addmm(None, x, x.mT)
    torch.testing.assert_close(gram, x @ x.mT, rtol=1e-12, atol=1e-12)
    if num_rows in (192, 384):  # two and four blocks: those off the diagonal are mirrored, not computed twice
        half = num_rows // 2
        assert torch.equal(gram[:, :half, half:], gram[:, half:, :half].mT)
    poly = symmetric_addmm(gram, gram, gram, -4.775, 2.0315)
    torch.testing.assert_close(poly, -4.775 * gram + 2.0315 * gram @ gram, rtol=1e-11, atol=1e-9)
    torch.testing.assert_close(addmm(x, poly, x, 3.4445), 3.4445 * x + poly @ x, rtol=1e-11, atol=1e-7)
