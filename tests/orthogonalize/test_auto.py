"""Choice of the orthogonalizer: by rule or by measurement, the same on every rank, and the plan says why."""

from __future__ import annotations

import itertools
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
from process_default import process_default
from spectra import normal, spectrum
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import shardmuon.orthogonalize as package
from shardmuon import Exchange, Muon, Orthogonalizer, schedule
from shardmuon.commands.main import main
from shardmuon.orthogonalize import BACKENDS, NS_METHODS, Method, orthogonalize
from shardmuon.orthogonalize import choice as choice_module
from shardmuon.orthogonalize.choice import Choice, Task, candidates, fastest, flops, from_file, measure, rule
from shardmuon.orthogonalize.gram import FiniteWatch
from shardmuon.orthogonalize.graphs import GraphCache
from shardmuon.orthogonalize.stamp import machine_stamp
from shardmuon.orthogonalize.tuning import FORMAT, add, load
from shardmuon.step import binding as binding_module
from shardmuon.testing import RankPool
from shardmuon.testing.compare import compare_with_dense
from shardmuon.testing.layouts import ParamCase

CPU = torch.device("cpu")
KELLER = schedule("keller").triples


def add_times(path: Path, standard: float, gram: float, stamp: str | None = None, shape: str = "12x48, 5 steps") -> str:
    """A file in which this machine, or one of another stamp, has been measured."""
    times = {"standard float32": standard, "gram float32": gram}
    rows = {"times": {shape: times}}
    path.write_text(json.dumps({"format": FORMAT, "machines": {stamp or machine_stamp(CPU): rows}}))
    return str(path)


# ------------------------------------------------------------------------------------------------------------- FLOPs


FORMS = [("standard", torch.float32), ("gram", torch.float32), ("gram", torch.float16)]
SMALL = itertools.product(("keller", "polar_express", "cubic", "deepseek_v4"), FORMS, (96, 336, 384, 768))


@pytest.mark.parametrize(
    ("name", "form", "m", "n", "share"),
    [
        *((name, form, 96, n, 1.0) for name, form, n in SMALL),
        # symmetric products of large matrices take ten of sixteen tiles on a CPU
        *(("keller", form, m, n, 0.625) for form in FORMS[:2] for m, n in ((384, 1536), (512, 512))),
    ],
)
def test_flops_are_the_formulas(name: str, form: tuple[str, torch.dtype], m: int, n: int, share: float) -> None:
    method, dtype = form
    coefficients = schedule(name).triples
    with FlopCounterMode(display=False) as counter:
        orthogonalize(normal(1, m, n), coefficients, method=method, dtype=dtype)
    counted = flops(method, m, n, coefficients, dtype, share)
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


def test_candidates_never_hold_the_gram_form_in_bf16_and_each_is_its_text() -> None:
    for device, dtype in itertools.product((CPU, torch.device("cuda")), (None, BF16, FP16, FP32, FP64)):
        found = candidates(device, dtype, ("torch", "triton"))
        assert found[0].method == "standard"
        assert not {("gram", BF16, "torch"), ("gram", BF16, "triton")} & {(c.method, c.dtype, c.kernel) for c in found}
        assert not any(c.kernel == "triton" and c.dtype == FP64 for c in found)
        assert len(set(found)) == len(found)
        for choice in (*found, Choice("torch"), Choice("reference"), Choice("gram", FP32, "triton", True, 4)):
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


@pytest.mark.parametrize(
    ("times", "options", "wanted", "says"),
    [
        ({"standard": 1.0, "gram": 0.5}, {}, "gram float32", r"12x48: gram float32, measured 500 ms"),
        ({"standard": 0.5, "gram": 1.0}, {}, "standard float32", r"12x48: standard float32, measured 500 ms"),
        ({"standard": 0.1, "gram": 9.0, "stamp": "another machine"}, {}, "gram float32", "by rule"),
        ({"standard": 0.1, "gram": 9.0, "shape": "12x49, 5 steps"}, {}, "gram float32", "by rule"),
        ({"standard": 0.1, "gram": 9.0}, {"method": "gram"}, "gram float32", "has no search on this machine"),
    ],
    ids=str,
)
def test_auto_takes_what_was_measured_of_this_machine_and_shape_and_says_why(
    times: dict[str, Any], options: dict[str, Any], wanted: str, says: str, tmp_path: Path
) -> None:
    """Rows of another machine or shape leave the rule, and a named method is taken."""
    path = add_times(tmp_path / "t.json", **times)
    plan = optimizer_of(orthogonalizer=Orthogonalizer(dtype="float32", tuning=path, **options)).prepare()
    assert plan.items[0].how == wanted
    assert re.search(says, str(plan))


def test_slots_found_unequal_run_alone_and_the_plan_says_so(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    of_shapes = {"12x48": {"gram float32": 2}, "9x9": {"standard float32": 1}}
    for searched, unequal, how, says in (
        (7, of_shapes, "gram float32 alone", "shapes 12x48, 9x9 differ and run alone"),
        (9, {}, "gram float32", "none differ"),
    ):
        add(path, CPU, "slots", {"searched": searched, "unequal": unequal})
        plan = optimizer_of(orthogonalizer=Orthogonalizer(dtype="float32", tuning=str(path))).prepare()
        assert plan.items[0].how == how
        assert f"slots of batches: {searched} products compared on this machine ({path}): {says}" in str(plan)


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


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["8x8", "--coefficients", "nonsense", "--out", "t.json"], "invalid choice: 'nonsense'"),
        (["8x8", "--coefficients", "quintic", "--steps", "7", "--out", "t.json"], "exactly 5 steps"),
        (["8by8", "--out", "t.json"], "is not a shape: write rows and columns as 1024x4096"),
        (["8x8"], "--out"),
        (["8x8", "--out", "none/t.json"], "No such file or directory"),
    ],
    ids=str,
)
def test_the_command_says_what_is_wrong_with_its_arguments(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        code = main(["tune", *arguments, "--device", "cpu"])
    except SystemExit as stopped:  # argparse
        code = stopped.code
    assert code == 2
    assert says in capsys.readouterr().err


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


Step = tuple[str, bool]  # the plan or the error, and whether nothing has changed


def _stepped_apart(what: str, folder: str = "") -> Step:
    """A step of a matrix on two ranks of which the second is unlike the first: its file of measurements, its machine,
    or its flags of precision."""
    rank, real, flags = dist.get_rank(), binding_module.machine_stamp, torch.backends.mkldnn.matmul
    p, options, before_flags = nn.Parameter(normal(12, 48)), dict[str, Any](), flags.fp32_precision
    p.grad, before = normal(12, 48, seed=3), p.detach().clone()
    stamp = real
    if what == "file":
        path = add_times(Path(folder) / f"{rank}.json", *((1.0, 0.5) if rank else (0.5, 1.0)))
        options["orthogonalizer"] = Orthogonalizer(dtype="float32", tuning=path)
    elif what == "machine":
        stamp = lambda device: "other chip" if rank else real(device)  # noqa: E731
    else:
        options["orthogonalizer"] = Orthogonalizer(what)  # type: ignore[arg-type]
    optimizer = Muon([("w", p)], lr=0.1, process_group=dist.group.WORLD, **options)
    try:
        flags.fp32_precision = "bf16" if rank and what in ("torch", "standard") else before_flags
        with mock.patch.object(binding_module, "machine_stamp", stamp):
            optimizer.step()
    except ValueError as refused:
        return str(refused), torch.equal(p, before) and not optimizer.state
    finally:
        flags.fp32_precision = before_flags
    return str(optimizer.plan), torch.equal(p, before)


OTHER_CHIP = f"machines differ: ranks 0 have {machine_stamp(CPU)}; ranks 1 have other chip"


@pytest.mark.parametrize(
    ("what", "refused", "says"),
    [
        ("file", True, r"rank 0 lists tuning=\w+, rank 1 lists tuning=\w+"),
        ("machine", False, re.escape(OTHER_CHIP)),
        ("torch", False, r"(?s)machines differ.*fp32_precision"),  # it leaves flags as the process has them
        ("standard", False, r"^(?!.*machines differ)"),  # the others set their own
    ],
)
def test_ranks_that_are_unlike_are_told_or_refused_on_every_rank(
    what: str, refused: bool, says: str, world2: RankPool, tmp_path: Path
) -> None:
    """Files must be equal; of machines the plan, which is one, says what differs."""
    found = world2.run(_stepped_apart, what, str(tmp_path))
    assert [unchanged for _, unchanged in found] == [refused] * 2
    assert all(re.search(says, text, re.DOTALL) for text, _ in found)
    how = [re.findall(r"12x48: [^,]*", text) for text, _ in found]
    assert how[0] == how[1]


# ------------------------------------------------------------------------------------------------ never a bad number


def _with_fast_backend(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Tensor], Tensor]) -> None:
    real = BACKENDS["gram"].iteration
    assert real is not None
    monkeypatch.setitem(package.BACKENDS, "gram", Method(lambda y, **kw: spoil(real(y, **kw)), fast=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_zeros_take_the_place_of_a_non_finite_fast_result(bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix that came in so is not made to look sound, and nothing is said of it."""

    def spoil(out: Tensor) -> Tensor:
        out[1, 2, 3] = bad
        return out

    x, watch = normal(4, 8, 40), FiniteWatch()
    x[3, 0, 0] = bad
    sound = orthogonalize(x, KELLER, method="gram")
    _with_fast_backend(monkeypatch, spoil)
    found = orthogonalize(x, KELLER, method="gram", watch=watch)
    assert torch.equal(found[[0, 2]], sound[[0, 2]])
    assert not found[1].any()
    assert not found[3].isfinite().any()
    watch.send()
    with pytest.warns(UserWarning, match="'gram' on 8x40 gave a non-finite result for 1 of 4 finite matrices in an"):
        watch.report()


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
    capture = mock.Mock(side_effect=lambda function, x: function)
    cache, batches = GraphCache(capture), [normal(2, 4, 9, seed=s) for s in range(6)]
    calls = [(x, 2.0) for x in batches] + [(x, 3.0) for x in batches[:2]] + [(batches[0][:1], 2.0)]
    for x, factor in calls:  # those with another factor or shape do not repeat enough
        assert torch.equal(cache.run(lambda t, factor=factor: factor * t, x, factor), factor * x)
    assert [tuple(call.args[1].shape) for call in capture.mock_calls] == [(2, 4, 9)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_graphs_have_the_functions_bits() -> None:
    cache = GraphCache()
    for seed in range(5):
        x = normal(2, 256, 1024, seed=seed).cuda()
        for method, dtype in (("standard", torch.bfloat16), ("gram", torch.float16)):
            found = orthogonalize(x, KELLER, method=method, dtype=dtype, graphs=cache)
            assert torch.equal(found, orthogonalize(x, KELLER, method=method, dtype=dtype))
    assert len(cache._graphs) == 2


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
    with process_default(default):
        text, times = measure(Task(12, 48, KELLER, CPU), torch.float32)
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
            "products in (bfloat16, .* of standard on CPUs with|float32, .* on CPUs without) bfloat16 products",
        ),
        (
            {"orthogonalizer": Orthogonalizer(method="gram")},
            "gram float32, products in float32, the default of gram on CPUs",
        ),
        (
            {"orthogonalizer": Orthogonalizer(method="gram", dtype="float16")},
            "gram float16, products in float16, by Orthogonalizer.dtype",
        ),
        ({"orthogonalizer": Orthogonalizer(method="torch")}, "torch, products in bfloat16, as in torch.optim.Muon"),
        ({"orthogonalizer": Orthogonalizer(method="reference")}, "reference, products in float64, always"),
        ({}, "by rule: .*; products in (bfloat16|float32), the default of (standard|gram) on CPUs"),
    ],
    ids=str,
)
def test_the_plan_says_what_the_products_are_and_why(options: dict[str, Any], says: str) -> None:
    assert re.search(says, str(optimizer_of(**options).prepare()))


# --------------------------------------------------------------------------------------------- bits, and the wire

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SHAPES = {"a": (12, 48), "b": (48, 12), "c": (16, 16), "d": (12, 96), "e": (24, 24)}
# dtypes of "standard" and "gram" by default: as on accelerators, on CPUs with bf16 and on CPUs without
MACHINES = {"accelerator": (BF16, FP16), "cpu with bf16": (BF16, FP32), "cpu": (FP32, FP32)}
GRAM = {"all": "abcde", "none": "", "some": "abd"}  # the matrices for which it was measured to be faster


def _patched(machine: str) -> Any:
    dtypes = dict(zip(("standard", "gram"), MACHINES[machine], strict=True))
    return mock.patch.object(choice_module, "default_dtype", lambda method, device: dtypes[method])


def _measured(path: Path, machine: str, gram: str) -> tuple[Orthogonalizer, dict[str, Orthogonalizer]]:
    """By a file of measurements, and the method that it takes for each matrix."""
    dtypes = dict(zip(("standard", "gram"), MACHINES[machine], strict=True))
    taken = {name: "gram" if name in GRAM[gram] else "standard" for name in SHAPES}
    times = {
        f"{min(shape)}x{max(shape)}, 5 steps": {
            f"{method} {str(dtype)[6:]}": 1.0 if method == taken[name] else 2.0 for method, dtype in dtypes.items()
        }
        for name, shape in SHAPES.items()
    }
    path.write_text(json.dumps({"format": FORMAT, "machines": {machine_stamp(CPU): {"times": times}}}))
    return Orthogonalizer(tuning=str(path)), {name: Orthogonalizer(m, dtypes[m]) for name, m in taken.items()}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("machine", "gram", "wire"),
    [
        (machine, gram, (None, FP32, BF16)[(i + j) % 3])
        for i, machine in enumerate(MACHINES)
        for j, gram in enumerate(GRAM)
    ],
)
def test_auto_has_the_bits_of_what_it_takes(machine: str, gram: str, wire: Any, tmp_path: Path) -> None:
    """Matrix by matrix, wire and all: three steps by "auto", and each matrix by an optimizer of its own."""
    measured, taken = _measured(tmp_path / "t.json", machine, gram)
    with _patched(machine):
        autos, forced = ({name: nn.Parameter(normal(*shape)) for name, shape in SHAPES.items()} for _ in range(2))
        options: dict[str, Any] = {"lr": 0.1, "exchange": Exchange(dtype=wire)}
        auto = Muon(list(autos.items()), orthogonalizer=measured, **options)
        assert all("measured" in item.reason for item in auto.prepare().items)
        others = [Muon([(n, p)], orthogonalizer=taken[n], **options) for n, p in forced.items()]
        for step in range(3):
            for (name, p), other in itertools.product(autos.items(), (autos, forced)):
                other[name].grad = normal(*p.shape, seed=10 + step)
            for optimizer in (auto, *others):
                optimizer.step()
    assert [name for name in SHAPES if not torch.equal(autos[name], forced[name])] == []


WIRES = [  # method, dtype of the products, Exchange.dtype, the wire
    ("standard", FP32, None, FP32),
    ("standard", BF16, None, BF16),
    ("standard", FP16, None, BF16),
    ("gram", FP16, None, BF16),
    ("gram", FP32, None, FP32),
    ("torch", None, None, BF16),
    ("reference", None, None, FP64),
    ("standard", FP64, None, FP64),
    ("standard", BF16, FP32, FP32),
    ("standard", FP16, FP32, FP32),
    ("standard", FP32, BF16, BF16),
]


def _travelled(options: dict[str, Any]) -> tuple[bool, int]:
    found = compare_with_dense("fsdp2", table={"w": ParamCase((12, 48), "")}, steps=1, lr=0.1, **options)
    return found.bitwise, found.traffic.bytes_sent


@pytest.mark.parametrize(("method", "dtype", "asked", "wire"), WIRES, ids=str)
def test_half_precision_products_travel_in_bf16_and_one_process_rounds_alike(
    method: Any, dtype: Any, asked: Any, wire: torch.dtype, world2: RankPool
) -> None:
    options: dict[str, Any] = {"orthogonalizer": Orthogonalizer(method, dtype), "exchange": Exchange(dtype=asked)}
    found = world2.run(_travelled, options)
    assert [bitwise for bitwise, _ in found] == [True, True]
    assert sum(sent for _, sent in found) == 12 * 48 * wire.itemsize  # half of it each way
    p = nn.Parameter(torch.zeros(12, 48))
    p.grad = normal(12, 48, seed=3)
    Muon([p], lr=1.0, weight_decay=0.0, adjust_lr_fn="none", **options).step()
    rounded = p.bfloat16().to(p.dtype)
    assert torch.equal(rounded, p) == (wire == BF16 or dtype == BF16), "an update of other bits than its wire has"
