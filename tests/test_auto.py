"""Choice of the orthogonalizer: by rule or by measurement, the same on every rank, and the plan says why."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from spectra import normal, spectrum
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.flop_counter import FlopCounterMode

import shardmuon.orthogonalize as package
from shardmuon import Exchange, Muon, Orthogonalizer, schedule
from shardmuon.commands.main import main
from shardmuon.orthogonalize import BACKENDS, NS_METHODS, Method, default_dtype, orthogonalize
from shardmuon.orthogonalize import choice as choice_module
from shardmuon.orthogonalize.choice import Choice, Task, candidates, fastest, flops, from_file, measure, rule
from shardmuon.orthogonalize.gram import FiniteWatch
from shardmuon.orthogonalize.graphs import GraphCache
from shardmuon.orthogonalize.stamp import machine_stamp
from shardmuon.orthogonalize.tuning import FORMAT, add, load
from shardmuon.step import binding as binding_module
from shardmuon.testing import RankPool

CPU = torch.device("cpu")
KELLER = schedule("keller").triples


def add_times(path: Path, standard: float, gram: float, stamp: str | None = None, shape: str = "12x48, 5 steps") -> str:
    """A file in which this machine, or one of another stamp, has been measured."""
    times = {"standard float32": standard, "gram float32": gram}
    rows = {"times": {shape: times}}
    path.write_text(json.dumps({"format": FORMAT, "machines": {stamp or machine_stamp(CPU): rows}}))
    return str(path)


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


def test_large_matrices_are_measured_on_smaller_ones_of_their_aspect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, ...]] = []

    def fake(x: Tensor, coefficients: Any, options: Any) -> dict[str, float]:
        seen.append(tuple(x.shape))
        return {str(option): float(i + 1) for i, option in enumerate(options)}

    monkeypatch.setattr(choice_module, "_time", fake)
    task, path = Task(14336, 4096, KELLER, CPU), tmp_path / "t.json"
    text, times = measure(task, torch.float32)
    assert seen == [(1, 256, 896)]
    add(path, CPU, "times", {text: times})
    found = from_file(load(str(path)), task, torch.float32)
    assert found is not None
    assert f" at 256x896 ({path})" in found.reason


def test_adding_keeps_other_machines_and_other_rows(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    add_times(path, 1.0, 2.0, stamp="another machine")
    others = json.loads(path.read_text())["machines"]["another machine"]
    add(path, CPU, "times", {"8x8, 5 steps": {"standard float32": 3.0}})
    add(path, CPU, "slots", {"searched": 5, "unequal": {}})
    add(path, CPU, "times", {"8x9, 5 steps": {"standard float32": 4.0}})
    found = json.loads(path.read_text())["machines"]
    assert found.pop("another machine") == others
    assert found == {
        machine_stamp(CPU): {
            "times": {"8x8, 5 steps": {"standard float32": 3.0}, "8x9, 5 steps": {"standard float32": 4.0}},
            "slots": {"searched": 5, "unequal": {}},
        }
    }
    assert list(tmp_path.iterdir()) == [path], "nothing temporary stays"


# ----------------------------------------------------------------------------------------------------- the optimizer


def optimizer_of(**options: Any) -> Muon:
    return Muon([("w", nn.Parameter(normal(12, 48)))], lr=1e-3, **options)


@pytest.mark.parametrize(("standard", "gram", "wanted"), [(1.0, 0.5, "gram float32"), (0.5, 1.0, "standard float32")])
def test_auto_takes_what_was_measured_and_says_why(standard: float, gram: float, wanted: str, tmp_path: Path) -> None:
    path = add_times(tmp_path / "t.json", standard, gram)
    optimizer = optimizer_of(orthogonalizer=Orthogonalizer(dtype="float32", tuning=path))
    (item,) = optimizer.prepare().items
    assert item.how == wanted
    assert f"12x48: {wanted}, measured 500 ms" in str(optimizer.plan)
    assert f"slots of batches: {path} has no search on this machine" in str(optimizer.plan)


def test_another_machines_rows_other_shapes_and_a_named_method_leave_the_rule(tmp_path: Path) -> None:
    path = add_times(tmp_path / "t.json", 0.1, 10.0, stamp="another machine")
    (item,) = optimizer_of(orthogonalizer=Orthogonalizer(dtype="float32", tuning=path)).prepare().items
    assert item.how == "gram float32"
    assert "by rule" in item.reason
    other = add_times(tmp_path / "u.json", 0.1, 10.0, shape="12x49, 5 steps")
    assert optimizer_of(orthogonalizer=Orthogonalizer(dtype="float32", tuning=other)).prepare().items[0].how == item.how
    named = add_times(tmp_path / "v.json", 0.1, 10.0)
    forced = Orthogonalizer(method="gram", dtype="float32", tuning=named)
    assert optimizer_of(orthogonalizer=forced).prepare().items[0].how == "gram float32"


def test_slots_found_unequal_run_alone_and_the_plan_says_so(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    add(path, CPU, "slots", {"searched": 7, "unequal": {"12x48": {"gram float32": 2}, "9x9": {"standard float32": 1}}})
    optimizer = optimizer_of(orthogonalizer=Orthogonalizer(dtype="float32", tuning=str(path)))
    (item,) = optimizer.prepare().items
    assert item.how == "gram float32 alone"
    said = f"slots of batches: 7 products compared on this machine ({path}): shapes 12x48, 9x9 differ and run alone"
    assert said in str(optimizer.plan)
    add(path, CPU, "slots", {"searched": 9, "unequal": {}})
    again = optimizer_of(orthogonalizer=Orthogonalizer(dtype="float32", tuning=str(path)))
    assert again.prepare().items[0].how == "gram float32"
    assert "9 products compared on this machine" in str(again.plan)
    assert "none differ" in str(again.plan)


@pytest.mark.parametrize(
    "text", [None, "", "{", "[1]", "{}", '{"format": 0, "machines": {}}', '{"format": 1, "machines": {"m": 3}}']
)
def test_files_of_another_kind_are_refused_by_name(
    text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(f"tuning={str(path)!r} must be a file that `shardmuon tune")):
        Orthogonalizer(tuning=str(path))
    if text is not None:
        assert main(["tune", "4x4", "--out", str(path), "--device", "cpu"]) == 2
        assert f"tuning={str(path)!r} must be a file" in capsys.readouterr().err
        assert path.read_text() == text, "somebody else's file was overwritten"


def test_the_command_measures_and_muon_takes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.json"
    add_times(path, 1e9, 2e9)
    arguments = ["--dtype", "float32", "--device", "cpu", "--out", str(path)]
    assert main(["tune", "48x12", "8X8", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "48x12: " in printed and "8x8: " in printed and f"Orthogonalizer(tuning={str(path)!r})" in printed
    times = json.loads(path.read_text())["machines"][machine_stamp(CPU)]["times"]
    assert set(times) == {"12x48, 5 steps", "8x8, 5 steps"}
    assert all(0 < t < 1 for row in times.values() for t in row.values())
    optimizer = optimizer_of(orthogonalizer=Orthogonalizer(dtype="float32", tuning=str(path)))
    fast = fastest(times["12x48, 5 steps"], candidates(CPU, torch.float32))
    assert optimizer.prepare().items[0].how == str(fast)
    with pytest.raises(SystemExit):
        main(["tune", "8x8", "--coefficients", "nonsense", *arguments])
    assert "invalid choice: 'nonsense'" in capsys.readouterr().err
    assert main(["tune", "8x8", "--coefficients", "quintic", "--steps", "7", *arguments]) == 2
    assert "exactly 5 steps" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["tune", "8by8", *arguments])
    assert "is not a shape: write rows and columns as 1024x4096" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["tune", "8x8"])
    assert "--out" in capsys.readouterr().err
    assert main(["tune", "8x8", "--device", "cpu", "--out", str(tmp_path / "none" / "t.json")]) == 2
    assert "No such file or directory" in capsys.readouterr().err


def test_nothing_is_read_or_written_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "home"
    folder.mkdir(mode=0o500)
    for name in ("HOME", "XDG_CACHE_HOME", "TMPDIR"):
        monkeypatch.setenv(name, str(folder))
    seen: list[str] = []
    real_open, real_read = Path.open, Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda self: seen.append(str(self)) or real_read(self))
    monkeypatch.setattr(Path, "open", lambda self, *a, **k: seen.append(str(self)) or real_open(self, *a, **k))
    monkeypatch.setattr(choice_module, "_time", lambda *a: pytest.fail("measured"))
    for method in NS_METHODS:
        optimizer = optimizer_of(orthogonalizer=Orthogonalizer(method=method))
        for p in optimizer.param_groups[0]["params"]:
            p.grad = normal(*p.shape)
        optimizer.step()
    assert [path for path in seen if not path.startswith("/proc/")] == []
    assert list(folder.iterdir()) == []


def _refused_unlike_files(folder: str) -> tuple[str, bool]:
    """Each rank names a file of its own, whose measurements differ."""
    rank, world = dist.get_rank(), dist.get_world_size()
    path = add_times(Path(folder) / f"{rank}.json", *((1.0, 0.5) if rank else (0.5, 1.0)))
    mesh = init_device_mesh("cpu", (world,))
    p = nn.Parameter(distribute_tensor(normal(12, 48), mesh, [Shard(0)]))
    p.grad = distribute_tensor(normal(12, 48, seed=3), mesh, [Shard(0)])
    before = p.detach().to_local().clone()  # type: ignore[attr-defined]
    optimizer = Muon([("w", p)], orthogonalizer=Orthogonalizer(dtype="float32", tuning=path), lr=0.1)
    with pytest.raises(ValueError, match="ranks") as caught:
        optimizer.step()
    return str(caught.value), torch.equal(p.detach().to_local(), before) and not optimizer.state  # type: ignore[attr-defined]


def test_unlike_files_are_refused_on_every_rank(world2: RankPool, tmp_path: Path) -> None:
    for message, unchanged in world2.run(_refused_unlike_files, str(tmp_path)):
        assert re.search(r"rank 0 lists tuning=\w+, rank 1 lists tuning=\w+", message)
        assert unchanged


def _unlike_machines(route: str) -> tuple[str, list[str], bool]:
    """Rank 1 says that it is another machine."""
    rank, real = dist.get_rank(), binding_module.machine_stamp
    with mock.patch.object(binding_module, "machine_stamp", lambda device: "other chip" if rank else real(device)):
        p = nn.Parameter(normal(12, 48))
        p.grad, before = normal(12, 48, seed=3), p.detach().clone()
        exchange = Exchange(route=route)  # type: ignore[arg-type]
        optimizer = Muon([("w", p)], lr=0.1, process_group=dist.group.WORLD, exchange=exchange)
        try:
            optimizer.step()
        except ValueError as refused:
            return str(refused), [], torch.equal(p, before) and not optimizer.state
        return str(optimizer.plan), [item.how for item in optimizer.plan.items], torch.equal(p, before)


def test_unlike_machines_are_said_and_choose_alike(world2: RankPool) -> None:
    plans = world2.run(_unlike_machines, "auto")
    assert plans[0][1] == plans[1][1]
    for text, _, unchanged in plans:
        assert not unchanged
        assert f"machines differ: ranks 0 have {machine_stamp(CPU)}; ranks 1 have other chip" in text


def _unlike_flags(method: Any) -> str:
    flags: Any = torch.backends.mkldnn
    before = flags.matmul.fp32_precision
    try:
        flags.matmul.fp32_precision = "bf16" if dist.get_rank() else "ieee"
        params = [("w", nn.Parameter(torch.ones(6, 8)))]
        optimizer = Muon(params, lr=0.1, process_group=dist.group.WORLD, orthogonalizer=Orthogonalizer(method))
        return str(optimizer.prepare())
    finally:
        flags.matmul.fp32_precision = before


def test_unlike_precision_flags_are_said_where_they_count(world2: RankPool) -> None:
    """Method "torch" leaves them as the process has them; the others set their own."""
    assert all("machines differ" in text and "fp32_precision" in text for text in world2.run(_unlike_flags, "torch"))
    assert not any("machines differ" in text for text in world2.run(_unlike_flags, "standard"))


def test_unlike_machines_refuse_to_repeat_each_others_work(world2: RankPool) -> None:
    for text, _, unchanged in world2.run(_unlike_machines, "local"):
        assert "route='local' needs equal machines" in text and "other chip" in text
        assert "Use Exchange(route='auto')" in text
        assert unchanged


def test_ns_dtype_takes_names() -> None:
    assert (
        optimizer_of(orthogonalizer=Orthogonalizer(method="gram", dtype="float16")).prepare().items[0].how
        == "gram float16"
    )
    assert (
        optimizer_of(orthogonalizer=Orthogonalizer(method="standard", dtype="auto")).prepare().items[0].how
        == f"standard {str(default_dtype('standard', CPU)).removeprefix('torch.')}"
    )
    with pytest.raises(ValueError, match=r"Orthogonalizer.dtype='float8' is not one of 'auto', 'bfloat16', 'float16'"):
        optimizer_of(orthogonalizer=Orthogonalizer(dtype="float8"))


def test_default_dtypes() -> None:
    cuda = torch.device("cuda")
    assert default_dtype("standard", cuda) == default_dtype("torch", CPU) == torch.bfloat16
    assert default_dtype("gram", cuda) == torch.float16
    assert default_dtype("gram", CPU) == torch.float32
    assert default_dtype("reference", cuda) == torch.float64


# ------------------------------------------------------------------------------------------------ never a bad number


def _with_fast_backend(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Tensor], Tensor]) -> None:
    real = BACKENDS["gram"].iteration
    assert real is not None
    monkeypatch.setitem(package.BACKENDS, "gram", Method(lambda y, **kw: spoil(real(y, **kw)), fast=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_zeros_take_the_place_of_a_non_finite_fast_result(bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(out: Tensor) -> Tensor:
        out[1, 2, 3] = bad
        return out

    x, watch = normal(3, 8, 40), FiniteWatch()
    sound = orthogonalize(x, KELLER, method="gram")
    _with_fast_backend(monkeypatch, spoil)
    found = orthogonalize(x, KELLER, method="gram", watch=watch)
    assert torch.equal(found[0], sound[0])
    assert torch.equal(found[2], sound[2])
    assert not found[1].any()
    watch.send()
    with pytest.warns(UserWarning, match="'gram' on 8x40 gave a non-finite result for 1 of 3 finite matrices in an"):
        watch.report()


def test_a_non_finite_input_is_not_made_to_look_sound() -> None:
    x = normal(3, 8, 40)
    x[1, 0, 0] = float("nan")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch = FiniteWatch()
        found = orthogonalize(x, KELLER, method="gram", watch=watch)
        watch.send()
        watch.report()
    assert not found[1].isfinite().any()
    assert found[0].isfinite().all()


@pytest.mark.parametrize(("name", "steps"), [("keller", 30), ("deepseek_v4", 10), ("polar_express", 12)])
def test_long_schedules_do_not_break_down_in_fp16(name: str, steps: int) -> None:
    """Restarts keep noise in the null space from overflowing, and no fallback is needed."""
    x = spectrum("rank 16", 128, 512)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = orthogonalize(x[None].float(), schedule(name, steps).triples, method="gram", dtype=torch.float16)[0]
    values = torch.linalg.svdvals(found.double())
    assert float(values[:16].min()) > 0.65
    assert float(values.max()) < 1.25


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


# --------------------------------------------------------------------------------- whatever torch's defaults are


@pytest.mark.parametrize("default", ["meta", "float64", "bfloat16"])
def test_a_measurement_looks_at_no_default(default: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    real = choice_module._time
    monkeypatch.setattr(choice_module, "_time", lambda x, *rest: seen.append(x) or real(x, *rest))
    task = Task(12, 48, KELLER, CPU)
    if default == "meta":
        with torch.device("meta"):
            text, times = measure(task, torch.float32)
    else:
        torch.set_default_dtype(getattr(torch, default))
        try:
            text, times = measure(task, torch.float32)
        finally:
            torch.set_default_dtype(torch.float32)
    assert [(x.device.type, x.dtype) for x in seen] == [("cpu", torch.float32)]
    assert text == "12x48, 5 steps"
    assert set(times) == {"standard float32", "gram float32"}


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps"])
def test_a_measurement_waits_for_any_accelerator(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the launches would be timed and not the work."""
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    choice_module._wait(torch.device(kind))
    choice_module._wait(CPU)
    assert waited == [torch.device(kind)]


# ---------------------------------------------------------------------------------------- the plan says the dtype


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"orthogonalizer": Orthogonalizer(method="standard")},
            "products in (bfloat16, for this CPU multiplies|float32, for this CPU has no)",
        ),
        (
            {"orthogonalizer": Orthogonalizer(method="gram")},
            "gram float32, products in float32, the default of 'gram' on CPUs",
        ),
        (
            {"orthogonalizer": Orthogonalizer(method="gram", dtype="float16")},
            "gram float16, products in float16, by Orthogonalizer.dtype",
        ),
        ({"orthogonalizer": Orthogonalizer(method="torch")}, "torch, products in bfloat16, as in torch.optim.Muon"),
        ({"orthogonalizer": Orthogonalizer(method="reference")}, "reference, products in float64, always"),
        ({}, "by rule: .*; products in (bfloat16|float32), (for this CPU|the default of 'gram')"),
    ],
    ids=str,
)
def test_the_plan_says_what_the_products_are_and_why(options: dict[str, Any], says: str) -> None:
    assert re.search(says, str(optimizer_of(**options).prepare()))
