"""The orthogonalizers against torch's own, an independent fp64 iteration, and what a polar factor must satisfy."""

from __future__ import annotations

import importlib
import math

import pytest
import torch
from spectra import exact_steps, normal, spectrum
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

from shardmuon.orthogonalize import BACKENDS, batch_size, orthogonalize
from shardmuon.testing.tolerances import (
    assert_bitwise,
    assert_near,
    assert_same_orthogonalization,
    polar_bound,
    relative_bound,
    roundoff,
)

Coefficients = tuple[tuple[float, float, float], ...]
KELLER: Coefficients = ((3.4445, -4.7750, 2.0315),) * 5
CLASSIC: Coefficients = ((1.875, -1.25, 0.375),) * 8  # (15, -10, 3) / 8: the Taylor series, converges to 1
MIXED: Coefficients = (*KELLER[:3], (3.0, -3.2, 1.2), (2.0, -1.5, 0.5))  # a triple of its own per step
SHAPES = [(4, 4), (3, 8), (8, 3), (1, 6), (6, 1), (1, 1), (17, 33), (33, 17), (64, 128), (96, 200), (250, 96)]


def scalar(s: Tensor, coefficients: Coefficients) -> Tensor:
    """The iteration of one singular value."""
    for a, b, c in coefficients:
        s = a * s + b * s**3 + c * s**5
    return s


def near(
    found: Tensor,  # (rows, cols)
    wanted: Tensor,  # (rows, cols)
    matrix: Tensor,  # (rows, cols): what was orthogonalized
    method: str,
    dtype: torch.dtype,
    coefficients: Coefficients = KELLER,
    exact: bool = False,
) -> None:
    """Tolerance of rounding, by the bounds of the method."""
    if method == "reference":
        assert_near(found, wanted, reference_bound(matrix, found.dtype))
        return
    options = {"dtype": dtype, "coefficients": coefficients, "matrix": matrix, "exact": exact}
    assert_same_orthogonalization(found, wanted, gram=method == "gram", **options)  # type: ignore[arg-type]


def reference_bound(matrix: Tensor, dtype: torch.dtype) -> float:
    """Bound for two polar factors, each computed in fp64 and stored in `dtype`, relative to their norm."""
    return 2 * (polar_bound(matrix) / min(matrix.shape) ** 0.5 + roundoff(dtype))


# ----------------------------------------------------------------------------------------------- torch.optim.Muon's


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_torch_backend_has_torchs_bits(shape: tuple[int, int], dtype: torch.dtype) -> None:
    batch = torch.stack([normal(*shape, seed=s, dtype=dtype) for s in range(3)]) * 0.01
    found = orthogonalize(batch, KELLER, method="torch")
    for x, out in zip(batch, found, strict=True):
        wanted = _zeropower_via_newtonschulz(x.clone(), KELLER[0], 5, 1e-7)
        assert out.dtype == wanted.dtype == torch.bfloat16
        assert torch.equal(out, wanted)


@pytest.mark.parametrize("steps", [1, 3, 9])
@pytest.mark.parametrize("size", [1.0, 1e-8, 1e-12])
def test_torch_backend_takes_torchs_steps_and_clamps_small_norms(size: float, steps: int) -> None:
    x, one = size * normal(9, 20), (3.0, -3.2, 1.2)
    wanted = _zeropower_via_newtonschulz(x.clone(), one, steps, 1e-7)
    assert torch.equal(orthogonalize(x[None], (one,) * steps, method="torch")[0], wanted)


# --------------------------------------------------------------------------------------------- the iteration itself


@pytest.mark.parametrize("coefficients", [KELLER, CLASSIC, MIXED], ids=["keller", "classic", "mixed"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_standard_is_the_formula(dtype: torch.dtype, shape: tuple[int, int], coefficients: Coefficients) -> None:
    x = normal(*shape, dtype=dtype)
    found = orthogonalize(x[None], coefficients, dtype=dtype)[0]
    assert found.dtype == dtype
    assert found.shape == shape
    near(found, exact_steps(x, coefficients), x, "standard", dtype, coefficients, exact=dtype == torch.float32)


@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("coefficients", [KELLER, CLASSIC, MIXED], ids=["keller", "classic", "mixed"])
@pytest.mark.parametrize("kind", ["gauss", "log", "power"])
def test_singular_values_are_the_polynomials(kind: str, coefficients: Coefficients, method: str) -> None:
    """Singular vectors stay, values go through the polynomial: hence the band that the polynomial allows."""
    x = spectrum(kind, 24, 60)
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    found = orthogonalize(x[None], coefficients, method=method, dtype=torch.float64)[0]
    near(found, (u * scalar(s / s.norm(), coefficients)) @ vh, x, method, torch.float64, coefficients)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_emulated_half_precision_is_near_the_real_one(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPUs without such instructions round fp32 products at the same places."""
    x = normal(24, 60)
    module = importlib.import_module("shardmuon.orthogonalize")
    monkeypatch.setattr(module, "cpu_has_bf16_matmul", lambda: False)
    emulated = orthogonalize(x[None], KELLER, dtype=dtype)[0]
    y = (x / x.norm()).to(dtype)
    for a, b, c in KELLER:
        gram = y @ y.T
        y = torch.addmm(y, torch.addmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    assert emulated.dtype == y.dtype
    near(emulated, y, x, "standard", dtype)
    near(emulated, exact_steps(x, KELLER), x, "standard", dtype, exact=True)


# ------------------------------------------------------------------------------------------------------- invariance

METHODS = ("standard", "gram", "torch", "reference")


def _batch(shape: tuple[int, int], dtype: torch.dtype = torch.float32, count: int = 4) -> Tensor:
    return torch.stack([normal(*shape, seed=s, dtype=dtype) * 10.0 ** (s % 4 - 2) for s in range(count)])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (1, 7), (96, 200), (200, 400)], ids=str)
def test_a_batch_is_its_matrices(shape: tuple[int, int], method: str) -> None:
    """Bit for bit, in as many batches as it takes. With `alone` the products are of matrices, not of batches: in fp32
    they may add up in another order ("torch" and "reference" run one matrix at a time anyway)."""
    count = 2 * batch_size(*shape, torch.device("cpu")) + 4  # two full batches and the last one's beginning
    x, dtype = _batch(shape, count=count), torch.float32
    together = orthogonalize(x, KELLER, method=method, dtype=dtype)
    one_by_one = orthogonalize(x, KELLER, method=method, dtype=dtype, alone=True)
    for i in {0, 1, 2, 3, count // 2 - 2, count // 2, count - 1}:
        assert_bitwise(together[i], orthogonalize(x[i : i + 1], KELLER, method=method, dtype=dtype)[0])
        assert_bitwise(one_by_one[i], orthogonalize(x[i : i + 1], KELLER, method=method, dtype=dtype, alone=True)[0])
        if method in ("torch", "reference") or batch_size(*shape, x.device) == 1:
            assert_bitwise(one_by_one[i], together[i])
        else:
            near(one_by_one[i], together[i], x[i], method, dtype)


@pytest.mark.numeric
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("lay", ["contiguous", "transposed", "strided", "expanded"])
def test_the_input_is_not_written(lay: str, dtype: torch.dtype, method: str) -> None:
    """`.bfloat16()` of a bf16 tensor is the same tensor, `.float()` of an fp32 one too."""
    x = _batch((6, 11), dtype)
    x = {
        "contiguous": x,
        "transposed": x.mT,
        "strided": torch.stack([x, x], dim=-1)[..., 0],
        "expanded": x[:1].expand(4, 6, 11),
    }[lay]
    before = x.clone()
    for ns_dtype in (None, dtype if method not in ("gram",) or dtype != torch.bfloat16 else None):
        found = orthogonalize(x, KELLER, method=method, dtype=ns_dtype)
        assert torch.equal(x, before)
        found.add_(1.0)
        assert torch.equal(x, before), "the result shares memory with the input"


@pytest.mark.parametrize("method", METHODS)
def test_strides_of_the_input_change_nothing(method: str) -> None:
    """Products of other strides may add up in another order."""
    x = _batch((6, 11))
    dtype = torch.bfloat16 if method == "torch" else torch.float32
    plain = orthogonalize(x, KELLER, method=method, dtype=dtype)
    for same in (
        x.mT.contiguous().mT,
        torch.stack([x, -x], dim=-1)[..., 0],
        x.permute(1, 0, 2).contiguous().permute(1, 0, 2),
    ):
        for m, a, b in zip(x, orthogonalize(same, KELLER, method=method, dtype=dtype), plain, strict=True):
            near(a, b, m, method, dtype)


@pytest.mark.numeric
@pytest.mark.parametrize("method", ["standard", "gram", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [1e-36, 1e-30, 1e-12, 1e12, 1e30, 1e36])
def test_scale_does_not_matter(factor: float, dtype: torch.dtype, method: str) -> None:
    """The input itself is rounded anew, too: no more than what is multiplied is."""
    x = _batch((6, 11), torch.float64, count=2)
    products = torch.float32 if method == "gram" else dtype  # the Gram form is not for bf16
    plain = orthogonalize(x.to(dtype), KELLER, method=method, dtype=products)
    scaled = orthogonalize((x * factor).to(dtype), KELLER, method=method, dtype=products)
    for matrix, a, b in zip(x, scaled, plain, strict=True):
        if method == "reference":
            # rounding each side's input moves the polar factor by u times the condition, see [Note: polar factors]
            values = torch.linalg.svdvals(matrix)
            moved = 2 * roundoff(dtype) * float(values.norm() / values[-1]) / len(values) ** 0.5
            assert_near(a, b, moved + reference_bound(matrix, a.dtype))
        elif products == dtype:
            near(a, b, matrix, method, dtype)
        else:  # an input in bf16 is rounded no more than the standard form rounds its own
            rounded = relative_bound(KELLER, dtype, matrix)
            assert_near(a, b, 2 * rounded + 2 * relative_bound(KELLER, products, matrix, gram=True))


@pytest.mark.numeric
@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("power", [-100, -50, 50, 100])
def test_powers_of_two_change_no_bit(power: int, method: str) -> None:
    x = _batch((6, 11), count=2)
    assert torch.equal(orthogonalize(x * 2.0**power, KELLER, method=method), orthogonalize(x, KELLER, method=method))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(6, 11), (11, 6), (1, 4), (100, 240)], ids=str)
def test_zeros_stay_zeros_and_leave_their_neighbours_alone(shape: tuple[int, int], method: str) -> None:
    x = _batch(shape, count=3)
    x[1] = 0.0
    dtype = torch.bfloat16 if method == "torch" else torch.float32
    found = orthogonalize(x, KELLER, method=method, dtype=dtype)
    assert not found[1].any()
    assert found.isfinite().all()
    for i in (0, 2):
        near(found[i], orthogonalize(x[i : i + 1], KELLER, method=method, dtype=dtype)[0], x[i], method, dtype)


@pytest.mark.numeric
@pytest.mark.parametrize("method", ["standard", "gram", "torch"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("shape", [(6, 11), (100, 240)], ids=str)
def test_a_bad_element_spoils_its_own_matrix_only(shape: tuple[int, int], bad: float, method: str) -> None:
    x = _batch(shape, count=3)
    wanted = orthogonalize(x, KELLER, method=method)
    x[1, 2, 3] = bad
    found = orthogonalize(x, KELLER, method=method)
    assert not found[1].isfinite().any(), "a bad gradient must not look like a good one"
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[2], wanted[2])


@pytest.mark.parametrize("method", ["standard", "gram", "reference"])
def test_transposing_and_rotating_commute_with_it(method: str) -> None:
    x = normal(7, 12, dtype=torch.float64)
    left, _ = torch.linalg.qr(normal(7, 7, seed=1, dtype=torch.float64))
    right, _ = torch.linalg.qr(normal(12, 12, seed=2, dtype=torch.float64))

    def f(t: Tensor) -> Tensor:
        return orthogonalize(t[None], KELLER, method=method, dtype=torch.float64)[0]

    near(f(x.T), f(x).T, x.T, method, torch.float64)
    near(f(-x), -f(x), x, method, torch.float64)
    # rotating rounds as much as six more products of 7 or 12 terms: of the input and of the result, and the QRs
    bound = (
        reference_bound(x, torch.float64)
        if method == "reference"
        else 2 * relative_bound(KELLER, torch.float64, x, gram=method == "gram")
    )
    assert_near(f(left @ x @ right), left @ f(x) @ right, (1 + 6 * 12) * bound)


# --------------------------------------------------------------------------------------------------- the reference


@pytest.mark.parametrize("kind", ["gauss", "log", "power"])
@pytest.mark.parametrize("shape", [(20, 20), (20, 33), (33, 20), (1, 9)], ids=str)
def test_reference_is_the_polar_factor(kind: str, shape: tuple[int, int]) -> None:
    """X = U H with U orthonormal on the short side and H symmetric positive semidefinite: that is its definition."""
    rows, cols = min(shape), max(shape)
    if rows == 1 and kind == "log":
        kind = "power"
    x = spectrum(kind, rows, cols)
    x = x if shape[0] <= shape[1] else x.T
    u = orthogonalize(x[None], KELLER, method="reference")[0]
    assert u.dtype == torch.float64
    short = u @ u.T if shape[0] <= shape[1] else u.T @ u
    # off the polar factor by the bound, U moves U U^T by twice that, and H = U^T X by that times ||X||
    off = polar_bound(x) + polar_bound(u)
    eye = torch.eye(rows, dtype=torch.float64)
    assert_near(short, eye, 2 * off / float(eye.norm()))
    h, largest = u.T @ x, float(x.norm())
    assert float((h - h.T).norm()) <= 2 * off * largest
    assert float(torch.linalg.eigvalsh((h + h.T) / 2).min()) >= -off * largest
    assert_near(u @ h, x, 2 * off)
    assert_near(orthogonalize(u[None], KELLER, method="reference")[0], u, off)


def test_reference_leaves_the_null_space_alone() -> None:
    x = spectrum("rank 16", 40, 60)
    u = orthogonalize(x[None], KELLER, method="reference")[0]
    values = torch.linalg.svdvals(u)
    off = polar_bound(x, rank=16)
    assert_near(values[:16], torch.ones(16, dtype=torch.float64), off)
    assert float(values[16:].max()) <= off
    _, _, vh = torch.linalg.svd(x)
    assert float((u @ vh[16:].T).norm()) <= 2 * off  # of the polar factor, and of these vectors


def test_unknown_methods_are_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"method='cubic' is not one of 'standard', 'gram', 'torch', 'reference'",
    ):
        orthogonalize(normal(1, 2, 2), KELLER, method="cubic")
    assert tuple(BACKENDS) == METHODS
