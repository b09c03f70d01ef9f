"""The Triton kernel for symmetric products: right, exactly symmetric, accepted by the compiler, refused in plain words.

Triton's interpreter runs it on CPU tensors in a process of its own, since TRITON_INTERPRET counts when Triton is
imported. Bounds on errors are those of the arithmetic, element by element: sums of k products in fp32, one rounding.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from spectra import normal, spectrum
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import shardmuon.orthogonalize as package
from shardmuon import Muon, Orthogonalizer, schedule
from shardmuon.orthogonalize import Products, orthogonalize, polar_factor, triton_symmetric
from shardmuon.orthogonalize import choice as choice_module
from shardmuon.orthogonalize.choice import Choice, Task, candidates, fastest, work
from shardmuon.orthogonalize.stamp import machine_stamp
from shardmuon.orthogonalize.tuning import FORMAT
from shardmuon.testing import RankPool
from shardmuon.testing.tolerances import orthogonalization_bound, roundoff

CPU = torch.device("cpu")
KELLER = schedule("keller").triples
POLAR = schedule("polar_express").triples
HALF, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
DTYPES = (HALF, BF16, FP32)
# (matrices, m, k, storage): below a tile, one, several; odd in rows and in columns
CASES = (
    (3, 1, 1, "contiguous"),
    (3, 31, 5, "contiguous"),
    (1, 33, 100, "contiguous"),
    (3, 100, 33, "contiguous"),
    (1, 130, 70, "contiguous"),
    (3, 33, 40, "transposed"),
    (1, 70, 33, "sliced"),
)
ROUNDOFF = {HALF: 2.0**-11, BF16: 2.0**-8, FP32: 2.0**-24}

installed = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
on_gpu = pytest.mark.skipif(
    not (torch.cuda.is_available() and importlib.util.find_spec("triton")), reason="needs a CUDA device and Triton"
)
Run = Callable[..., Any]


# ------------------------------------------------------------------------------------------- processes with Triton


@contextmanager
def _process(**variables: str) -> Iterator[Run]:
    """Calls functions of this module in another process, which sees these environment variables."""
    before = {name: os.environ.get(name) for name in ("TRITON_INTERPRET", *variables)}
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.update(variables)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        try:
            pool.submit(os.getpid).result()
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
        yield lambda function, *args: pool.submit(function, *args).result()


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Run]:
    with _process(TRITON_INTERPRET="1") as run:
        hindrance = run(_interpreter_fault)
        if hindrance:
            pytest.skip(hindrance)
        yield run


def _interpreter_fault() -> str:
    """Triton 3.6's interpreter turns arrays of one element into numbers, which numpy 2.5 refuses."""
    x = torch.ones(1, 4, 4)
    try:
        symmetric_addmm(None, x, x.mT)
    except RuntimeError as error:
        if "only 0-dimensional arrays can be converted" in str(error):
            return "Triton's interpreter does not run with this numpy: " + str(error)
    return ""


def interpreted(check: Callable[..., None]) -> Callable[..., None]:
    """Have a test run in the process of the interpreter."""

    @functools.wraps(check)
    def test(interpreter: Run, **given: Any) -> None:
        interpreter(_run_here, check.__name__, given)

    own, fixture = inspect.signature(check), inspect.Parameter("interpreter", inspect.Parameter.KEYWORD_ONLY)
    test.__signature__ = own.replace(parameters=[*own.parameters.values(), fixture])  # type: ignore[attr-defined]
    return installed(test)


def _run_here(name: str, given: dict[str, Any]) -> None:
    globals()[name].__wrapped__(**given)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with _process(TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("triton"))) as run:
        yield run


def symmetric_addmm(
    base: Tensor | None,
    left: Tensor,
    right: Tensor,
    beta: float = 1.0,
    alpha: float = 1.0,
    dtype: torch.dtype | None = None,  # default: left's
) -> Tensor:
    """The kernel's product in new memory."""
    out = torch.empty(len(left), left.shape[1], left.shape[1], dtype=dtype or left.dtype, device=left.device)
    return triton_symmetric.symmetric_addmm(base, left, right, beta=beta, alpha=alpha, out=out)


# ------------------------------------------------------------------------------------------------ order of the tiles


@installed
def test_tiles_are_the_rows_of_the_triangle_two_by_two() -> None:
    from shardmuon.orthogonalize.triton_kernel import tile_position

    for side in range(1, 61):
        rows = list(range(side - 1, -1, -1))
        pairs = [(side - 1, None)] if side % 2 else []
        long = rows[side % 2 : side % 2 + side // 2]
        pairs += list(zip(long, sorted(set(rows) - set(long) - {p[0] for p in pairs}), strict=True))
        wanted = [(row, column) for pair in pairs for row in pair if row is not None for column in range(row + 1)]
        assert [tile_position.fn(i, side) for i in range(side * (side + 1) // 2)] == wanted
        assert len(set(wanted)) == side * (side + 1) // 2


# ------------------------------------------------------------------------------------------------------- the numbers


def _wanted(base: Tensor | None, left: Tensor, right: Tensor, beta: float, alpha: float) -> tuple[Tensor, Tensor]:
    """The result in fp64, and the sum of the magnitudes of what is added up."""
    a, b = left.double(), right.double()
    plus = torch.zeros(()) if base is None else beta * base.double()
    return plus + alpha * (a @ b), plus.abs() + abs(alpha) * (a.abs() @ b.abs())


def _within(found: Tensor, wanted: Tensor, sizes: Tensor, k: int) -> bool:
    bound = (k + 4) * 2.0**-24 * sizes + ROUNDOFF[found.dtype] * wanted.abs() + 2.0**-25
    return bool(((found.double() - wanted).abs() <= bound).all())


def _strided(kind: str, num: int, m: int, k: int, dtype: torch.dtype) -> Tensor:  # (num, m, k)
    if kind == "contiguous":
        return normal(num, m, k, seed=m).to(dtype)
    if kind == "transposed":
        return normal(num, k, m, seed=m).to(dtype).mT
    return normal(num + 1, 2 * m, 3 * k, seed=m).to(dtype)[1:, ::2, 1::3]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@interpreted
def test_products_are_those_of_fp64_and_exactly_symmetric(dtype: torch.dtype) -> None:
    for num, m, k, kind in CASES:
        x = _strided(kind, num, m, k, dtype)
        base = normal(num, m, m + 3, seed=1).to(dtype)[:, :, 3:]
        base = base + base.mT
        for plus, beta, alpha, out_dtype in (
            (None, 1.0, 1.0, None),
            (base, -4.775, 2.0315, None),
            (base.float(), 0.5, 1.0, FP32),
        ):
            untouched, case = x.clone(), f"{kind} {m}x{k} beta={beta}"
            found = symmetric_addmm(plus, x, x.mT, beta, alpha, out_dtype)
            assert found.dtype == (out_dtype or dtype) and found.is_contiguous(), case
            assert _within(found, *_wanted(plus, x, x.mT, beta, alpha), k), case
            assert torch.equal(found, found.mT), case
            assert torch.equal(x, untouched), f"{case} wrote to its operand"
    none, thin = torch.zeros(0, 40, 7), torch.zeros(2, 33, 0)
    assert symmetric_addmm(None, none, none.mT).shape == (0, 40, 40)
    assert not symmetric_addmm(None, thin, thin.mT).any()


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@interpreted
def test_a_result_is_rounded_once_to_the_dtype_asked_for(out_dtype: torch.dtype) -> None:
    x = normal(1, 33, 40).half()
    found, wide = (symmetric_addmm(None, x, x.mT, dtype=dtype) for dtype in (out_dtype, FP32))
    assert found.dtype == out_dtype and torch.equal(found, wide.to(out_dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@interpreted
def test_of_products_that_rounding_keeps_from_symmetry_the_lower_half_counts(dtype: torch.dtype) -> None:
    """Products of different matrices, whose product is symmetric only up to rounding."""
    x = (normal(2, 70, 90) / 30).to(dtype)
    gram = symmetric_addmm(None, x, x.mT)
    poly = symmetric_addmm(gram, gram, gram, -4.775, 2.0315)
    found = symmetric_addmm(poly, gram, poly, 3.4445)
    lower, sizes = _wanted(poly, gram, poly, 3.4445, 1.0)
    wanted = lower.tril() + lower.tril(-1).mT
    assert torch.equal(found, found.mT) and _within(found, wanted, torch.maximum(sizes, sizes.mT), 70)


@interpreted
def test_nan_counts_only_where_it_is_read() -> None:
    x, base, nan = normal(3, 70, 33), normal(3, 70, 70, seed=1), torch.full((3, 70, 70), float("nan"))
    total = symmetric_addmm(base.tril() + base.tril(-1).mT, x, x.mT, 1.0)
    above = torch.where(nan.isnan().triu(1), nan, base)
    assert torch.equal(symmetric_addmm(above, x, x.mT, 1.0), total), "above the diagonal"
    around = torch.full((3, 72, 40), float("nan"))
    around[:, :70, :33] = x
    inside = around[:, :70, :33]
    assert torch.equal(symmetric_addmm(base, inside, inside.mT, 1.0), total), "beside the operand"
    spoiled = x.clone()
    spoiled[1, 2, 3] = float("nan")
    found = symmetric_addmm(base, spoiled, spoiled.mT, 1.0)
    assert torch.equal(found[[0, 2]], total[[0, 2]]), "in a neighbour"
    assert found[1, 2].isnan().all() and found[1, :, 2].isnan().all() and found[1].isnan().sum() == 2 * 70 - 1


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@interpreted
def test_a_matrix_has_the_same_bits_alone_and_anywhere_in_a_batch(dtype: torch.dtype) -> None:
    _check_bits_in_batches(normal(3, 70, 100).to(dtype))


def _check_bits_in_batches(x: Tensor) -> None:
    base = symmetric_addmm(None, x, x.mT)
    together = symmetric_addmm(base, x, x.mT, 0.5, 2.0)
    for part in (slice(0, 1), slice(1, 2), slice(2, 3), slice(0, 2), slice(1, 3)):
        assert torch.equal(symmetric_addmm(base[part], x[part], x[part].mT, 0.5, 2.0), together[part])


@interpreted
def test_each_element_is_written_once() -> None:
    """Two programs, or two stores of one, that write an element could leave either value on a GPU. The upper tiles of a
    launch, or one more tile, would write some twice, or elsewhere."""
    from triton.runtime.interpreter import interpreter_builder as builder

    seen: Counter[int] = Counter()
    store = builder.create_masked_store

    def noting(pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        seen.update(pointers.data[mask.data].tolist())
        return store(pointers, value, mask, *rest)

    x = normal(2, 100, 8)
    with mock.patch.object(builder, "create_masked_store", noting):
        out = symmetric_addmm(x @ x.mT, x, x.mT, 1.0)
    assert seen == Counter(out.data_ptr() + 4 * i for i in range(out.numel()))


@interpreted
def test_errors_say_what_was_found_and_what_to_write() -> None:
    x = normal(2, 4, 3)
    both = "must be fp16, bf16 or fp32"
    with pytest.raises(ValueError, match=f"left: found torch.float32 for a result in torch.float64; both {both}"):
        symmetric_addmm(None, x, x.mT, dtype=torch.float64)
    many = mock.patch.object(triton_symmetric, "_MAX_PROGRAMS", 1)
    with many, pytest.raises(ValueError, match="left: 2 matrices of 4 rows are 2 tiles; a launch has 1: split"):
        symmetric_addmm(None, x, x.mT)
    failing = mock.patch.object(triton_symmetric._kernels(), "symmetric_addmm_kernel", {})
    with failing, pytest.raises(RuntimeError, match=r"the Triton kernel failed .* Leave out Orthogonalizer.tuning, or"):
        symmetric_addmm(None, x, x.mT)


# -------------------------------------------------------------------------------------------- whole orthogonalizations


def _distances(kind: str, method: str, dtype: torch.dtype, native: bool) -> list[float]:
    """Distance to the exact polar factor with torch's products and with the kernel's."""
    x = spectrum(kind, 48, 130)
    exact, coefficients = polar_factor(x), POLAR if method == "gram" else KELLER
    # as on a device that multiplies half precision itself: half operands reach the kernel
    with mock.patch.object(package, "_EMULATED", () if native else package._EMULATED):
        options: dict[str, Any] = {"method": method, "dtype": dtype}
        found = [orthogonalize(x[None].float(), coefficients, kernel=k, **options) for k in ("torch", "triton")]
    return [float((one[0].double() - exact).norm() / exact.norm()) for one in found]


@pytest.mark.parametrize("kind", ["gauss", "power"])
@pytest.mark.parametrize(
    ("method", "dtype", "native"),
    [
        ("standard", FP32, False),
        ("gram", FP32, False),
        ("standard", BF16, True),
        ("standard", HALF, False),
        ("gram", HALF, True),  # a restart in split half precision, from a Gram matrix kept in fp32
    ],
)
@interpreted
def test_results_are_as_near_to_the_polar_factor_as_with_torchs_products(
    kind: str, method: str, dtype: torch.dtype, native: bool
) -> None:
    of_torch, of_triton = _distances(kind, method, dtype, native)
    # each is off the exact steps by its rounding, so they differ by twice the bound
    steps = schedule("polar_express" if method == "gram" else "keller")
    x = spectrum(kind, 48, 130).float()
    bound = orthogonalization_bound(steps.triples, dtype, x, gram=method == "gram") / 48**0.5  # the polar factor's norm
    assert abs(of_triton - of_torch) <= 2 * bound
    values = torch.linalg.svdvals(x.double())
    left = float((steps(values / values.norm()) - 1).norm()) / 48**0.5  # what exact steps leave
    assert abs(of_torch - left) <= bound + roundoff(dtype)


@interpreted
def test_split_products_keep_fp32_until_the_one_rounding_at_the_end() -> None:
    """R <- Q R Q in split fp16, whose two halves are not symmetric by themselves."""
    q, r = normal(1, 70, 70), normal(1, 70, 90) / 9
    r = r @ r.mT
    with mock.patch.object(package, "_EMULATED", ()):
        products = Products((1, 70, 70), CPU, HALF, "triton")
        q = products.operand((q + q.mT) / 20)
        found = products.sandwich(q, r)
    exact = q.double() @ r.double() @ q.double().mT
    assert torch.equal(found, found.mT)
    assert float((found.double() - exact).abs().max() / exact.abs().max()) <= 2.0**-11


def _file(path: Path, how: str = "gram float32 triton", shape: str = "40x100, 5 steps") -> str:
    """A file of measurements in which this is the fastest on this machine."""
    times = {"standard float32": 1.0, "gram float32": 2.0, "gram float32 triton": 3.0, how: 0.1}
    rows = {machine_stamp(CPU): {"times": {shape: times}}}
    path.write_text(json.dumps({"format": FORMAT, "machines": rows}))
    return str(path)


def _step(**asked: Any) -> tuple[Tensor, list[str]]:
    param = nn.Parameter(normal(40, 100))
    optimizer = Muon([("w", param)], lr=0.1, orthogonalizer=Orthogonalizer(dtype=torch.float32, **asked))
    param.grad = normal(40, 100, seed=1)
    optimizer.step()
    return param.detach(), [item.how for item in optimizer.plan.items]


@interpreted
def test_a_step_takes_the_kernel_that_was_measured_fastest(tmp_path: Path) -> None:
    assert triton_symmetric.why_not(CPU) is None
    assert choice_module.kernels(CPU) == ("torch",), "an interpreter is never measured"
    plain, _ = _step(method="gram")
    with mock.patch.object(choice_module, "kernels", return_value=("torch", "triton")):
        found, hows = _step(method="auto", tuning=_file(tmp_path / "t.json"))
    assert hows == ["gram float32 triton"]
    assert not torch.equal(found, plain)
    # the first gradient alone: momentum scales it, which orthogonalizing does not see
    bound = orthogonalization_bound(KELLER, FP32, normal(40, 100, seed=1), gram=True)
    stored = 2 * roundoff(FP32) * float(plain.norm()) / 0.1  # decay and difference
    assert float((found - plain).norm()) / 0.1 <= 2 * (bound + stored)


# ----------------------------------------------------------------------------------- refusals, choices, measurements


def test_a_cpu_and_products_that_are_not_the_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert triton_symmetric.why_not(CPU) is not None
    message = r"left is on cpu: Triton has no CPU kernels .* Use torch.baddbmm there"
    with pytest.raises(ValueError, match=message):
        orthogonalize(normal(1, 4, 8), KELLER, kernel="triton")
    message = r"left: found torch.float64 for a result in torch.float64; both must be fp16, bf16 or fp32"
    with pytest.raises(ValueError, match=message):
        orthogonalize(normal(1, 4, 8), KELLER, kernel="triton", dtype=torch.float64)


@pytest.mark.parametrize(
    ("device", "capability", "wanted"),
    [
        ("cuda", None, "Triton cannot be imported: pip install 'shardmuon[triton]'"),
        ("cuda", (7, 5), "Triton needs compute capability 8.0, found 7.5"),
        ("cuda", (9, 0), None),
        ("mps", (9, 0), "Triton has no kernels for mps"),
        ("xpu", (9, 0), None),
    ],
)
def test_what_keeps_the_kernel_from_a_device(
    device: str, capability: tuple[int, int] | None, wanted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_symmetric, "_kernels", lambda: capability and torch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert triton_symmetric.obstacle(torch.device(device)) == wanted


def test_a_triton_that_fails_or_is_wrong_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing_gcc(*args: Any, **options: Any) -> Any:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(triton_symmetric, "obstacle", lambda device: None)
    for multiply, wanted in (
        (missing_gcc, "a trial failed: Failed to find C compiler"),
        (lambda base, left, right, out: left @ right + 1, "a trial gave wrong numbers"),
        (lambda base, left, right, out: left @ right, None),
    ):
        triton_symmetric._trial.cache_clear()
        monkeypatch.setattr(triton_symmetric, "symmetric_addmm", multiply)
        assert triton_symmetric.why_not(CPU) == wanted
    triton_symmetric._trial.cache_clear()


def test_a_measurement_has_the_kernel_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A made-up device with made-up times has the kernel among what is measured."""
    cuda, seen = torch.device("cuda"), []

    def times(x: Tensor, coefficients: Any, options: Any) -> dict[str, float]:
        seen.append([str(option) for option in options])
        return {str(option): 0.5 if "triton" in str(option) else 1.0 for option in options}

    monkeypatch.setattr(choice_module, "why_not", lambda device: None)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *args: self)
    monkeypatch.setattr(choice_module, "_time", times)
    text, found = choice_module.measure(Task(12, 48, KELLER, cuda), HALF)
    assert text == "12x48, 5 steps"
    assert seen == [["standard float16", "standard float16 triton", "gram float16", "gram float16 triton"]]
    assert str(fastest(found, candidates(cuda, HALF, ("torch", "triton")))) == "standard float16 triton"
    choice_module.measure(Task(12, 48, KELLER, cuda), torch.float64)
    assert seen[1] == ["standard float64", "gram float64"]


def test_work_counts_half_of_a_symmetric_product_for_the_kernel() -> None:
    cuda = torch.device("cuda")
    full = work(Choice("standard", HALF), 4096, 4096, KELLER, cuda)
    half = work(Choice("standard", HALF, "triton"), 4096, 4096, KELLER, cuda)
    tiles = 4096 // 128
    assert half == full - 5 * 2 * (2 * 4096**3) * (tiles - 1) // (2 * tiles)


def _measured_where_one_has_none(path: str) -> None:
    """One file says that Triton is fastest; only rank 0 has it."""
    rank = torch.distributed.get_rank()
    why = mock.patch.object(choice_module, "why_not", return_value="Triton cannot be imported" if rank else None)
    kernels = mock.patch.object(choice_module, "kernels", return_value=("torch", "triton"))
    with why, kernels:
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        param = nn.Parameter(distribute_tensor(normal(40, 100), mesh, [Shard(0)]))
        how = Orthogonalizer(dtype=torch.float32, tuning=path)
        with pytest.raises(ValueError, match=r"rank 1: the Triton kernel cannot run on cpu: Triton cannot be imported"):
            Muon([("w", param)], lr=1e-3, orthogonalizer=how).prepare()


def test_one_rank_without_triton_stops_all_of_them(world2: RankPool, tmp_path: Path) -> None:
    world2.run(_measured_where_one_has_none, _file(tmp_path / "t.json"))


# ------------------------------------------------------------------------------------------------- the real compiler


def _compile(
    backend: str, arch: Any, dtype: torch.dtype, base: torch.dtype | None, m: int, strides: dict[str, int]
) -> Any:
    """Compile for a GPU that is not there: assembly and bytes of shared memory."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    texts = {HALF: "*fp16", BF16: "*bf16", FP32: "*fp32"}
    from shardmuon.orthogonalize.triton_kernel import symmetric_addmm_kernel as kernel

    names = kernel.arg_names
    block, block_k, num_warps = triton_symmetric._tile_sizes(m, dtype)
    constants = {"HAS_BASE": base is not None, "BLOCK": block, "BLOCK_K": block_k, **strides}
    pointers = {"base": texts[base or dtype], "left": texts[dtype], "right": texts[dtype], "out": texts[base or FP32]}
    numbers = dict.fromkeys(("beta", "alpha"), "fp32")
    signature = {name: "constexpr" if name in constants else (pointers | numbers).get(name, "i32") for name in names}
    aligned = [i for i, name in enumerate(names) if name not in constants and name not in numbers]
    made = triton.compile(
        ASTSource(
            kernel,
            signature,
            {(names.index(name),): value for name, value in constants.items()},
            {(i,): [["tt.divisibility", 16]] for i in aligned},
        ),
        target=GPUTarget(backend, arch, 64 if backend == "hip" else 32),
        options={"num_warps": num_warps, "num_stages": 3, "enable_fp_fusion": True},
    )
    return made.asm["amdgcn" if backend == "hip" else "ptx"], made.metadata.shared


GRAM = {"left_column": 1, "right_row": 1, "base_column": 1}  # X X^T
POLY = {"left_column": 1, "right_column": 1, "base_column": 1}  # b R + c R R
TINY = {"m": 1, "k": 1, **GRAM, "left_row": 1, "right_column": 1, "left_batch": 1, "right_batch": 1, "base_row": 1}
COMPILED = [
    ("cuda", 80, HALF, None, 4096, GRAM, "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"),
    ("cuda", 80, BF16, BF16, 256, POLY, "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"),
    ("cuda", 80, FP32, FP32, 4096, POLY, "fma.rn.f32"),
    ("cuda", 90, HALF, HALF, 4096, POLY, "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16"),
    ("cuda", 90, BF16, None, 4096, GRAM, "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16"),
    ("cuda", 90, FP32, None, 32, GRAM, "fma.rn.f32"),
    ("cuda", 90, FP32, FP32, 1, TINY, "fma.rn.f32"),
    ("hip", "gfx942", HALF, HALF, 4096, POLY, "v_mfma_f32_32x32x8_f16"),
    ("hip", "gfx942", BF16, None, 32, GRAM, "v_mfma_f32_"),
    ("hip", "gfx942", FP32, FP32, 4096, POLY, "v_mfma_f32_32x32x2_f32"),
]


@installed
@pytest.mark.parametrize(
    ("backend", "arch", "dtype", "base", "m", "strides", "instruction"),
    COMPILED,
    ids=[f"{arch}-{str(dtype)[6:]}-{'base' if base else 'no_base'}-{m}" for _, arch, dtype, base, m, _, _ in COMPILED],
)
def test_the_compiler_makes_plain_fp32_sums_of_it(
    backend: str,
    arch: Any,
    dtype: torch.dtype,
    base: torch.dtype | None,
    m: int,
    strides: dict[str, int],
    instruction: str,
    compiled: Run,
) -> None:
    assembly, shared = compiled(_compile, backend, arch, dtype, base, m, strides)
    assert instruction in assembly
    assert "tf32" not in assembly and "xf32" not in assembly, "fp32 must stay fp32"
    assert ".ftz" not in assembly, "small numbers must not become zeros"
    if (backend, base) == ("cuda", BF16):
        assert "cvt.rn.bf16" in assembly, "results must be rounded to nearest"
    assert shared <= (64 if backend == "hip" else 99) * 1024, "more shared memory than the smallest such GPU has"


# --------------------------------------------------------------------------------------------------- on a GPU alone


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gpu_products_at_4096_are_those_of_fp64(dtype: torch.dtype) -> None:
    x = (normal(1, 4096, 4096) / 64).to(dtype).cuda()
    base = symmetric_addmm(None, x, x.mT)
    assert torch.equal(base, base.mT)
    found = symmetric_addmm(base, x, x.mT, -4.775, 2.0315, FP32)
    wanted = -4.775 * base.double() + 2.0315 * (x.double() @ x.double().mT)
    sizes = 4.775 * base.double().abs() + 2.0315 * (x.double().abs() @ x.double().abs().mT)
    assert torch.equal(found, found.mT)
    assert _within(found, wanted, sizes, 4096)


@on_gpu
@pytest.mark.parametrize("shape", [(4096, 4096), (130, 70), (31, 33)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gpu_bits_are_the_same_alone_and_in_a_batch(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    _check_bits_in_batches((normal(3, *shape) / 64).to(dtype).cuda())


@on_gpu
@pytest.mark.parametrize(("method", "dtype"), [("standard", BF16), ("gram", HALF), ("gram", FP32)])
def test_gpu_results_are_as_near_to_the_polar_factor_as_with_torchs_products(method: str, dtype: torch.dtype) -> None:
    x = spectrum("gauss", 1024, 4096).cuda()
    exact = polar_factor(x)
    of_torch, of_triton = (
        float((orthogonalize(x[None].float(), POLAR, method=method, dtype=dtype, kernel=kernel)[0] - exact).norm())
        for kernel in ("torch", "triton")
    )
    assert abs(of_triton - of_torch) <= 2 * orthogonalization_bound(POLAR, dtype, x.float(), gram=method == "gram")
