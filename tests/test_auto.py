"""Which orthogonalizer a matrix gets: by rule or by measurement, the same on every rank, and the plan says why."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from spectra import normal, spectrum
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.flop_counter import FlopCounterMode

import shardmuon.orthogonalize as package
from shardmuon import Muon, Orthogonalizer, schedule
from shardmuon.commands.main import main
from shardmuon.orthogonalize import BACKENDS, Method, Products, default_dtype, orthogonalize
from shardmuon.orthogonalize import tuning as tuning_module
from shardmuon.orthogonalize.choice import Choice, candidates, fastest, flops, rule
from shardmuon.orthogonalize.gram import plan_restarts
from shardmuon.orthogonalize.graphs import GraphCache
from shardmuon.orthogonalize.tuning import cache_file, choose, device_key
from shardmuon.testing import RankPool
from shardmuon.testing.tolerances import assert_same_orthogonalization

CPU = torch.device("cpu")
KELLER = schedule("keller").triples


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "deep" / "tuning.json"
    monkeypatch.setenv("SHARDMUON_CACHE", str(path))
    return path


def pretend(path: Path, standard: float, gram: float, shape: str = "12x48, 5 steps") -> None:
    """A cache in which this device has been measured."""
    times = {"standard float32": standard, "gram float32": gram}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({device_key(CPU): {shape: times}}))


# ------------------------------------------------------------------------------------------------------------- FLOPs


@pytest.mark.parametrize("name", ["keller", "polar_express", "cubic", "deepseek_v4"])
@pytest.mark.parametrize(("m", "n"), [(96, 96), (96, 336), (96, 384), (96, 768)])
@pytest.mark.parametrize(
    ("method", "dtype"), [("standard", torch.float32), ("gram", torch.float32), ("gram", torch.float16)]
)
def test_flops_are_the_formulas(method: str, dtype: torch.dtype, m: int, n: int, name: str) -> None:
    coefficients = schedule(name).triples
    with FlopCounterMode(display=False) as counter:
        orthogonalize(normal(1, m, n), coefficients, method=method, dtype=dtype)
    counted = flops(method, m, n, coefficients, dtype)
    if method == "gram" and dtype == torch.float16:  # a restart in emulated fp16 takes whole products, not split ones
        assert counted >= counter.get_total_flops() >= 0.75 * counted
    else:
        assert 0.98 < counter.get_total_flops() / counted < 1.02  # rows of blocks do not divide evenly


def test_flops_of_five_quintic_steps_are_the_published_counts() -> None:
    m, n = 128, 512
    # in fp64, where no restart is needed
    for method, dtype, share, wanted in (
        ("standard", torch.float64, 1.0, 20 * m * m * n + 10 * m**3),
        ("standard", torch.float64, 0.5, 15 * m * m * n + 5 * m**3),
        ("gram", torch.float64, 1.0, 4 * m * m * n + 34 * m**3),
        ("gram", torch.float64, 0.5, 3 * m * m * n + 17 * m**3),
    ):
        assert flops(method, m, n, KELLER, dtype, share) == wanted
    polar = schedule("polar_express").triples  # one restart in fp32: from X
    assert flops("gram", m, n, polar, torch.float32) == 8 * m * m * n + 28 * m**3
    assert flops("gram", m, n, polar, torch.float32, 0.5) == 6 * m * m * n + 14 * m**3
    # in fp16 and above n/m = 7/3 it is local: 3 m^2 n + 14 m^3, split products 6 m^3, merging the Q's 2 m^3
    assert flops("gram", m, n, polar, torch.float16, 0.5) == 3 * m * m * n + 22 * m**3
    assert flops("gram", m, m, polar, torch.float16, 0.5) == 6 * m**3 + 14 * m**3


@pytest.mark.parametrize(("m", "n"), [(384, 1536), (512, 512)])
@pytest.mark.parametrize("method", ["standard", "gram"])
def test_symmetric_products_take_ten_of_sixteen_tiles_on_a_cpu(method: str, m: int, n: int) -> None:
    with FlopCounterMode(display=False) as counter:
        orthogonalize(normal(1, m, n), KELLER, method=method, dtype=torch.float32)
    assert 0.98 < counter.get_total_flops() / flops(method, m, n, KELLER, torch.float32, 0.625) < 1.02


# -------------------------------------------------------------------------------------------------------- the choice


def test_the_rule_takes_the_gram_form_for_long_matrices() -> None:
    for rows, cols, wanted in ((64, 64, "standard"), (64, 80, "standard"), (64, 256, "gram"), (256, 64, "gram")):
        found = rule(rows, cols, KELLER, CPU, torch.float32)
        assert found == Choice(wanted, torch.float32)
        assert "by rule: at n/m" in found.reason
    assert rule(64, 256, KELLER, torch.device("cuda"), None) == Choice("gram", torch.float16)
    assert rule(64, 64, KELLER, torch.device("cuda"), None) == Choice("standard", torch.bfloat16)
    assert rule(64, 256, KELLER, CPU, torch.bfloat16) == Choice("standard", torch.bfloat16)
    assert "not safe in torch.bfloat16" in rule(64, 256, KELLER, CPU, torch.bfloat16).reason


def test_candidates_never_hold_the_gram_form_in_bf16() -> None:
    for device in (CPU, torch.device("cuda")):
        for dtype in (None, torch.bfloat16, torch.float16, torch.float32, torch.float64):
            found = candidates(device, dtype, ("torch", "triton"))
            assert found[0].method == "standard"
            assert not any(c.method == "gram" and c.dtype == torch.bfloat16 for c in found)
            assert not any(c.kernel == "triton" and c.dtype == torch.float64 for c in found)
            assert len(set(found)) == len(found)


def test_a_choice_is_its_text() -> None:
    for choice in (
        *candidates(CPU, torch.float16, ("torch", "triton")),
        Choice(),
        Choice("torch"),
        Choice("reference"),
    ):
        assert Choice.of(str(choice)) == choice


def test_small_gains_leave_the_standard_form() -> None:
    options = candidates(CPU, torch.float32, ("torch",))
    assert fastest({"standard float32": 1.0, "gram float32": 0.97}, options).method == "standard"
    taken = fastest({"standard float32": 1.0, "gram float32": 0.5}, options)
    assert taken.method == "gram"
    assert taken.reason == "measured 500 ms; standard float32 1e+03 ms"


def test_a_shape_is_measured_once_and_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = choose(12, 48, KELLER, CPU, torch.float32)
    table = json.loads(cache.read_text())
    times = table[device_key(CPU)]["12x48, 5 steps"]
    assert set(times) == {"standard float32", "gram float32"}
    assert all(0 < t < 1 for t in times.values())

    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("measured again")

    monkeypatch.setattr(tuning_module, "_time", never)
    assert choose(48, 12, KELLER, CPU, torch.float32) == first  # the other orientation is the same work
    with pytest.raises(AssertionError, match="measured again"):
        choose(12, 48, KELLER, CPU, torch.float32, fresh=True)
    with pytest.raises(AssertionError, match="measured again"):
        choose(12, 48, KELLER[:3], CPU, torch.float32)


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", '{"%s": 3}', '{"%s": {"12x48, 5 steps": {"standard float32": "fast"}}}']
)
def test_a_broken_cache_is_measured_over(text: str, cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text(text % device_key(CPU) if "%s" in text else text)
    choose(12, 48, KELLER, CPU, torch.float32)
    times = json.loads(cache.read_text())[device_key(CPU)]["12x48, 5 steps"]
    assert set(times) == {"standard float32", "gram float32"}


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SHARDMUON_CACHE", str(tmp_path / "file" / "below" / "tuning.json"))
    assert choose(12, 48, KELLER, CPU, torch.float32).method in ("standard", "gram")


def test_large_matrices_are_measured_on_smaller_ones_of_their_aspect(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, ...]] = []

    def fake(x: Tensor, coefficients: Any, options: Any) -> dict[str, float]:
        seen.append(tuple(x.shape))
        return {str(option): float(i + 1) for i, option in enumerate(options)}

    monkeypatch.setattr(tuning_module, "_time", fake)
    found = choose(14336, 4096, KELLER, CPU, torch.float32)
    assert seen == [(1, 256, 896)]
    assert found.reason.endswith("(at 256x896)")


def test_the_cache_lies_where_the_user_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SHARDMUON_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_file() == tmp_path / "shardmuon" / "tuning.json"
    monkeypatch.setenv("SHARDMUON_CACHE", str(tmp_path / "x.json"))
    assert cache_file() == tmp_path / "x.json"


# ----------------------------------------------------------------------------------------------------- the optimizer


def optimizer_of(**options: Any) -> Muon:
    return Muon([("w", nn.Parameter(normal(12, 48)))], lr=1e-3, **options)


@pytest.mark.parametrize(("standard", "gram", "wanted"), [(1.0, 0.5, "gram float32"), (0.5, 1.0, "standard float32")])
def test_auto_takes_what_was_measured_and_says_why(standard: float, gram: float, wanted: str, cache: Path) -> None:
    pretend(cache, standard, gram)
    optimizer = optimizer_of(orthogonalizer=Orthogonalizer(dtype="float32"))
    (item,) = optimizer.prepare().items
    assert item.how == wanted
    assert f"12x48: {wanted}, measured 500 ms" in str(optimizer.plan)


def test_a_deterministic_choice_hangs_on_no_measurement(cache: Path) -> None:
    for gram in (0.1, 10.0):
        pretend(cache, 1.0, gram)
        (item,) = optimizer_of(orthogonalizer=Orthogonalizer(dtype="float32")).prepare().items
        assert item.how == "gram float32"
        assert "by rule" in item.reason


@pytest.mark.parametrize("method", ["standard", "gram"])
def test_a_forced_method_is_taken(method: str, cache: Path) -> None:
    pretend(cache, 0.1 if method == "gram" else 10.0, 1.0)
    (item,) = optimizer_of(orthogonalizer=Orthogonalizer(method=method, dtype="float32")).prepare().items
    assert item.how == f"{method} float32"
    assert not cache.with_name("other").exists()


def test_a_measurement_that_fails_falls_back_to_the_rule(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(tuning_module, "_time", fail)
    with pytest.warns(UserWarning, match=r"measuring 12x48 failed, method='auto' goes by rule: out of memory"):
        (item,) = optimizer_of(orthogonalizer=Orthogonalizer(dtype="float32")).prepare().items
    assert item.how == "gram float32"


def _auto_on_ranks(folder: str, layout: str) -> tuple[list[str], str, Tensor]:
    """Each rank has a cache of its own that says something else."""
    rank, world = dist.get_rank(), dist.get_world_size()
    path = Path(folder) / f"{rank}.json"
    pretend(path, *((1.0, 0.5) if rank else (0.5, 1.0)))
    before = os.environ["SHARDMUON_CACHE"]
    os.environ["SHARDMUON_CACHE"] = str(path)
    try:
        full = normal(12, 48)
        mesh = init_device_mesh("cpu", (world,))
        tensor = distribute_tensor(full, mesh, [Shard(0)]) if layout == "fsdp" else full.clone()
        p = nn.Parameter(tensor)
        group = dist.group.WORLD if layout == "shared" else None
        optimizer = Muon([("w", p)], orthogonalizer=Orthogonalizer(dtype="float32"), lr=0.1, process_group=group)
        grad = normal(12, 48, seed=3)
        p.grad = distribute_tensor(grad, mesh, [Shard(0)]) if layout == "fsdp" else grad
        optimizer.step()
        out = p.full_tensor() if layout == "fsdp" else p  # type: ignore[attr-defined]
        return [item.how for item in optimizer.plan.items], str(optimizer.plan), out.detach().clone()
    finally:
        os.environ["SHARDMUON_CACHE"] = before  # the tests' own: later ones must not touch the user's cache


@pytest.mark.parametrize(("layout", "wanted"), [("fsdp", "standard"), ("shared", "standard"), ("alone", "gram")])
def test_ranks_take_the_first_ones_measurement_or_the_rule(
    layout: str, wanted: str, world2: RankPool, tmp_path: Path
) -> None:
    """Replicas that share no group cannot be told, so they must not look at what their own device measured."""
    found = world2.run(_auto_on_ranks, str(tmp_path), layout)
    assert [hows for hows, _, _ in found] == [[f"{wanted} float32"]] * 2
    assert torch.equal(found[0][2], found[1][2])
    assert ("by rule" in found[0][1]) == (layout == "alone")


def test_the_command_measures_anew_and_keeps_it(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pretend(cache, 1e9, 2e9)
    assert main(["tune", "12x48", "8X8", "--dtype", "float32", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "12x48: " in printed
    assert "8x8: " in printed
    assert str(cache) in printed
    assert json.loads(cache.read_text())[device_key(CPU)]["12x48, 5 steps"]["standard float32"] < 1.0
    with pytest.raises(SystemExit):
        main(["tune", "8x8", "--coefficients", "nonsense"])
    assert "invalid choice: 'nonsense'" in capsys.readouterr().err
    assert main(["tune", "8x8", "--coefficients", "quintic", "--steps", "7"]) == 2
    assert "exactly 5 steps" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["tune", "8by8"])
    assert "is not a shape: write rows and columns as 1024x4096" in capsys.readouterr().err


def test_ns_dtype_takes_names() -> None:
    assert (
        optimizer_of(orthogonalizer=Orthogonalizer(method="gram", dtype="float16")).prepare().items[0].how
        == "gram float16"
    )
    assert (
        optimizer_of(orthogonalizer=Orthogonalizer(method="standard", dtype="auto")).prepare().items[0].how
        == "standard"
    )
    with pytest.raises(ValueError, match=r"Orthogonalizer.dtype='float8' is not one of 'auto', 'bfloat16', 'float16'"):
        optimizer_of(orthogonalizer=Orthogonalizer(dtype="float8"))


def test_default_dtypes() -> None:
    cuda = torch.device("cuda")
    assert default_dtype("standard", cuda) == default_dtype("torch", CPU) == torch.bfloat16
    assert default_dtype("gram", cuda) == default_dtype("gram-newton-schulz", CPU) == torch.float16
    assert default_dtype("gram", CPU) == torch.float32
    assert default_dtype("reference", cuda) == torch.float64


# ------------------------------------------------------------------------------------------------ never a bad number


def _with_fast_backend(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Tensor], Tensor]) -> None:
    real = BACKENDS["gram"].backend

    def backend(x: Tensor, coefficients: Any, products: Products, *, eps: float) -> Tensor:
        return spoil(real(x, coefficients, products, eps=eps))

    monkeypatch.setitem(package.BACKENDS, "gram", Method(backend, wide=True, fast=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_non_finite_fast_result_is_repeated_with_the_standard_form(
    bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(out: Tensor) -> Tensor:
        out[1, 2, 3] = bad
        return out

    x = normal(3, 8, 40)
    sound = orthogonalize(x, KELLER, method="gram")
    _with_fast_backend(monkeypatch, spoil)
    with pytest.warns(
        UserWarning, match="'gram' gave a non-finite result for 1 of 3 finite matrices of 8x40; repeated"
    ):
        found = orthogonalize(x, KELLER, method="gram")
    assert torch.equal(found[0], sound[0])
    assert torch.equal(found[2], sound[2])
    assert torch.equal(found[1], orthogonalize(x[1:2], KELLER, method="standard", dtype=torch.float32)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        products = Products(x.device, torch.float32)
        assert not BACKENDS["gram"].backend(x, KELLER, products, eps=0.0)[1].isfinite().all(), "nothing was spoiled"


def test_a_non_finite_input_is_not_made_to_look_sound() -> None:
    x = normal(3, 8, 40)
    x[1, 0, 0] = float("nan")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = orthogonalize(x, KELLER, method="gram")
    assert not found[1].isfinite().any()
    assert found[0].isfinite().all()


@pytest.mark.parametrize(("name", "steps"), [("keller", 30), ("deepseek_v4", 10), ("polar_express", 12)])
def test_long_schedules_do_not_break_down_in_fp16(name: str, steps: int) -> None:
    """Without restarts noise in the null space would overflow; with them no fallback is needed."""
    x = spectrum("rank 16", 128, 512)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = orthogonalize(x[None].float(), schedule(name, steps).triples, method="gram", dtype=torch.float16)[0]
    values = torch.linalg.svdvals(found.double())
    assert float(values[:16].min()) > 0.65
    assert float(values.max()) < 1.25


@pytest.mark.parametrize("rms", [1e-30, 1e-7, 1.0, 1e5, 1e30])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("method", ["standard", "gram"])
def test_gradients_of_any_size_have_one_direction(method: str, dtype: torch.dtype, rms: float) -> None:
    if method == "gram" and dtype == torch.bfloat16:
        return  # refused, see test_gram
    x = normal(1, 16, 48)
    wanted = orthogonalize(x, KELLER, method=method, dtype=dtype)
    found = orthogonalize(x * rms, KELLER, method=method, dtype=dtype)
    restarts = plan_restarts(KELLER, dtype) if method == "gram" else None
    assert_same_orthogonalization(found[0], wanted[0], dtype=dtype, matrix=x[0], restarts=restarts)


def test_global_precision_flags_change_nothing() -> None:
    x = normal(2, 40, 130)
    before = torch.backends.mkldnn.matmul.fp32_precision
    wanted = [orthogonalize(x, KELLER, method=m, dtype=torch.float32) for m in ("standard", "gram")]
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        found = [orthogonalize(x, KELLER, method=m, dtype=torch.float32) for m in ("standard", "gram")]
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16", "the caller's flag was not put back"
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


# ---------------------------------------------------------------------------------------- graphs, compile, backends


def test_graphs_are_captured_for_shapes_that_repeat() -> None:
    captured: list[tuple[int, ...]] = []

    def capture(function: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[Tensor], Tensor]:
        captured.append(tuple(x.shape))
        return function

    cache = GraphCache(capture)
    batches = [normal(2, 4, 9, seed=s) for s in range(6)]
    for x in batches:
        assert torch.equal(cache.run(lambda t: 2 * t, x, "double"), 2 * x)
    assert captured == [(2, 4, 9)]
    for x in batches[:2]:
        assert torch.equal(cache.run(lambda t: 3 * t, x, "triple"), 3 * x)  # another key: not the captured function
    assert torch.equal(cache.run(lambda t: 2 * t, batches[0][:1], "double"), 2 * batches[0][:1])
    assert len(cache) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_graphs_have_the_functions_bits() -> None:
    cache = GraphCache()
    for seed in range(5):
        x = normal(2, 256, 1024, seed=seed).cuda()
        for method, dtype in (("standard", torch.bfloat16), ("gram", torch.float16)):
            found = orthogonalize(x, KELLER, method=method, dtype=dtype, graphs=cache)
            assert torch.equal(found, orthogonalize(x, KELLER, method=method, dtype=dtype))
    assert len(cache) == 2


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch 2.11 of its own module
def test_a_compiled_step_is_not_traced() -> None:
    import torch._dynamo

    def build() -> tuple[list[nn.Parameter], Muon]:
        params = [nn.Parameter(normal(4 + i, 9 + 2 * i, seed=i)) for i in range(12)]
        for i, p in enumerate(params):
            p.grad = normal(*p.shape, seed=50 + i)
        return params, Muon(params, lr=0.1, orthogonalizer=Orthogonalizer(method="standard"))

    (plain, eager), (others, compiled) = build(), build()
    torch._dynamo.reset()
    step = torch.compile(compiled.step, backend="eager")
    torch._dynamo.utils.counters.clear()
    for _ in range(3):
        eager.step()
        step()
    assert all(torch.equal(a, b) for a, b in zip(plain, others, strict=True))
    assert torch._dynamo.utils.counters["frames"]["total"] < 10
    torch._dynamo.reset()


class FakeGram:
    """What gram-newton-schulz 0.1.6 does: normalizes in place, eps 0, its own restarts."""

    made: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, **options: Any) -> None:
        self.made.append(options)
        self.coefficients = tuple(tuple(t) for t in options["ns_coefficients"])

    def __call__(self, x: Tensor) -> Tensor:
        x /= x.norm(dim=(-2, -1), keepdim=True)
        return orthogonalize(x.nan_to_num(), self.coefficients, dtype=torch.float32).to(torch.float16)


def test_the_gram_newton_schulz_package_gets_our_coefficients_and_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardmuon.orthogonalize import dao

    with monkeypatch.context() as absent:
        absent.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ValueError, match="pip install gram-newton-schulz, or use 'gram'"):
            optimizer_of(orthogonalizer=Orthogonalizer(method="gram-newton-schulz"))
    fake = types.ModuleType("gram_newton_schulz")
    fake.GramNewtonSchulz = FakeGram  # type: ignore[attr-defined]
    fake.__spec__ = __import__("importlib.machinery").machinery.ModuleSpec("gram_newton_schulz", None)
    monkeypatch.setitem(sys.modules, "gram_newton_schulz", fake)
    dao._runner.cache_clear()
    polar = schedule("polar_express").triples
    x = torch.stack([normal(8, 40), torch.zeros(8, 40)])
    before = x.clone()
    found = orthogonalize(x, polar, method="gram-newton-schulz")
    assert torch.equal(x, before)
    assert found.dtype == torch.float16
    plain = orthogonalize(x[:1], polar, dtype=torch.float32)[0]  # the stand-in's own, whose result is then rounded
    assert_same_orthogonalization(found[0], plain, dtype=torch.float32, coefficients=polar, matrix=x[0])
    assert not found[1].any()
    assert FakeGram.made[-1]["gram_newton_schulz_reset_iterations"] == [2]
    assert FakeGram.made[-1]["compile_kwargs"] is None
    with pytest.raises(ValueError, match=r"computes in torch.float16, found dtype=torch.float32"):
        optimizer_of(orthogonalizer=Orthogonalizer(method="gram-newton-schulz", dtype="float32"))
    dao._runner.cache_clear()


# --------------------------------------------------------------------------------- whatever torch's defaults are


@pytest.mark.parametrize("default", ["meta", "float64", "bfloat16"])
def test_a_measurement_looks_at_no_default(default: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    real = tuning_module._time

    def watched(x: Tensor, *args: Any) -> dict[str, float]:
        seen.append(x)
        return real(x, *args)

    monkeypatch.setattr(tuning_module, "_time", watched)
    if default == "meta":
        with torch.device("meta"):
            (item,) = optimizer_of_cpu().prepare().items
    else:
        torch.set_default_dtype(getattr(torch, default))
        try:
            (item,) = optimizer_of_cpu().prepare().items
        finally:
            torch.set_default_dtype(torch.float32)
    assert [(x.device.type, x.dtype) for x in seen] == [("cpu", torch.float32)]
    assert item.reason.startswith("measured ")
    times = json.loads(cache.read_text())[device_key(CPU)]["12x48, 5 steps"]
    assert set(times) == {"standard float32", "gram float32"}


def optimizer_of_cpu() -> Muon:
    x = torch.randn(12, 48, generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float32, device="cpu")
    return Muon([("w", nn.Parameter(x))], lr=1e-3, orthogonalizer=Orthogonalizer(dtype="float32"))


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps"])
def test_a_measurement_waits_for_any_accelerator(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the launches would be timed and not the work."""
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    tuning_module._finished(torch.device(kind))()
    tuning_module._finished(CPU)()
    assert waited == [torch.device(kind)]


# ---------------------------------------------------------------------------------------- the plan says the dtype


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"orthogonalizer": Orthogonalizer(method="standard")},
            "products in (bfloat16, for this CPU multiplies|float32, for this CPU has no)",
        ),
        ({"orthogonalizer": Orthogonalizer(method="gram")}, "gram, products in float32, the default of 'gram' on CPUs"),
        (
            {"orthogonalizer": Orthogonalizer(method="gram", dtype="float16")},
            "gram float16, products in float16, by Orthogonalizer.dtype",
        ),
        ({"orthogonalizer": Orthogonalizer(method="torch")}, "torch, products in bfloat16, as in torch.optim.Muon"),
        ({"orthogonalizer": Orthogonalizer(method="reference")}, "reference, products in float64, always"),
        ({}, "by rule: .*; products in (bfloat16|float32), (for this CPU|the default of 'gram')"),
        ({}, "measured .*; products in (bfloat16|float32), (for this CPU|the default of 'gram')"),
    ],
    ids=str,
)
def test_the_plan_says_what_the_products_are_and_why(options: dict[str, Any], says: str, cache: Path) -> None:
    assert re.search(says, str(optimizer_of(**options).prepare()))
