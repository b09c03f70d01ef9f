"""`shardmuon plan`: what it prints, writes and refuses."""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from published import decoder
from torch import nn

from shardmuon import Audit, Exchange, Muon, Orthogonalizer, Storage
from shardmuon.commands import main as cli
from shardmuon.commands import plan as command
from shardmuon.foresight import Report, plan, price_plan
from shardmuon.foresight.hardware import FOLDER, PASSES, SCALARS
from shardmuon.foresight.models import build
from shardmuon.foresight.report import ALONE, advise, lanes, money, number, operations, percent, sections, size
from shardmuon.foresight.types import Time, seconds
from shardmuon.plan.machines import MACHINES
from shardmuon.plan.pipeline import Event, Phase
from shardmuon.routing.groups import ForModule


@pytest.fixture(scope="module")
def report() -> Report:
    return plan("gpt2-xl", "shard=4", gpu="h100", tokens_per_step=5e5, price_per_gpu_hour=2.0, advice=True)


def test_it_prints_every_answer(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["gpt2-xl", "--mesh", "dp=2 shard=4", "--advice", "--tokens-per-step", "512k", "--price-per-gpu-hour", "2"]
    assert cli.main(["plan", *words]) == 0
    out = capsys.readouterr().out
    for text in (
        "optimizer step",
        "why so wide",
        "memory of a rank",
        "share of a training step",
        "over AdamW",
        "money",
    ):
        assert re.search(rf"^{text} ", out, flags=re.MULTILINE), text
    for text in ("straggler", "AdamW's step", "What would help", "unverified", "8 ranks on 1 nodes"):
        assert text in out
    assert "DeepSpeed" not in out


def _active_row(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The row of the text that says what is active, or "" without one."""
    assert cli.main(["plan", *words, "--mesh", "shard=2 ep=2", "--gpu", "cpu-gloo", "--no-advice"]) == 0
    found = re.search(r"^active +((?:.+\n)(?: +.+\n)*)", capsys.readouterr().out, flags=re.MULTILINE)
    return " ".join(found[1].split()) if found else ""


def test_it_says_which_parameters_are_counted_as_active(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sizes = decoder(96, 48, 2, 4, 2, 12, 80, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=640)
    said = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], **sizes}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(said))
    few = _active_row(capsys, str(path))
    assert few == "388,080 parameters: 2 of 8 experts (num_experts_per_tok)"
    assert _active_row(capsys, str(path), "--active-params", "3B") == "3 B parameters: as given"
    path.write_text(json.dumps(said | {"num_experts_per_tok": None}))
    every = "1.49 M parameters: all 8 experts are counted as active, as no configuration says how many of them a token "
    assert _active_row(capsys, str(path)) == every + "takes. Give --active-params (active_params=)"
    path.write_text(json.dumps({**said, "model_type": "llama", "num_experts": 0}))
    assert _active_row(capsys, str(path)) == ""


def test_json_has_what_the_text_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "gpt2-xl", "--mesh", "shard=4", "--json", "--no-advice"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["exact"]["mesh"]["shard"] == 4
    step = found["price"]["step"]
    assert 0 < step["lo"] <= step["mid"] <= step["hi"]
    assert found["advice"] == []
    assert found["overhead_over_adamw"] is None
    assert 0 < found["adamw"]["lo"] <= found["adamw"]["hi"] < step["lo"]
    assert found["price"]["timeline"][-1]["phase"] == "adamw"


@pytest.mark.parametrize(
    ("words", "told"),
    (
        (["gpt2-xl", "--mesh", "shard=4", "--gpu", "h9000"], "none of a100, b200"),
        (["gpt2-xl", "--mesh", "shard=4", "--gpu", "no.yaml"], "no such file"),
        (["gpt2-xl", "--mesh", "shards=4"], "axis=size"),
        (["gpt2-xl", "--mesh", "tp=7"], "does not divide"),
        (["gpt2-xll", "--mesh", "shard=4"], "did you mean gpt2-xl"),
        (["gpt2-xl", "--mesh", "shard=4", "--engine", "fsdp9"], "engine"),
        (["gpt2-xl", "--mesh", "shard=4", "--bucket-mib", "0"], "--bucket-mib 0"),
        (["gpt2-xl", "--mesh", "shard=4", "--price-per-gpu-hour", "-1"], "dollars_per_hour"),
        (["gpt2-xl", "--mesh", "shard=4", "--method", "quick"], "Orthogonalizer.method"),
        (["gpt2-xl", "--mesh", "shard=\u00b2"], "axis=size"),
        (["gpt2-xl", "--mesh", "shard=4", "--price-per-gpu-hour", "nan"], "a number of at least 0"),
        (["gpt2-xl", "--mesh", "shard=4", "--html", "gone/x.html"], "there is no folder gone"),
    ),
)
def test_wrong_input_is_told_what_to_write(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("shardmuon plan: ")
    assert told in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize("read", [command.tokens, command.parameters])
def test_amounts_are_read_as_people_write_them_and_others_are_refused(read: Callable[[str], float]) -> None:
    written = {
        "4M": 4e6,
        "512k": 5.12e5,
        "1.5e6": 1.5e6,
        "4_194_304": 4194304.0,
        "2B": 2e9,
        "4e+6": 4e6,
        "1.2T": 1.2e12,
    }
    assert {text: read(text) for text in written} == written
    for wrong in ("", "many", "-4M", "0", "4MM", "3X", "B", "1.2.3", "1e400", "inf"):
        with pytest.raises(argparse.ArgumentTypeError, match=rf"is no number of {read.__name__}: write e\.g\."):
            read(wrong)


@pytest.mark.parametrize(
    ("name", "text", "options", "told"),
    [
        (
            "config.json",
            '{"model_type": "llama", "hidden_size": "big"}',
            [],
            "hidden_size is 'big'. Write a whole number",
        ),
        ("config.json", '{"model_type": "llama", "vocab_size": 0}', [], "vocab_size is 0. Write a whole number"),
        ("gpu.yaml", "a: [", ["--gpu", "gpu.yaml"], "it is no YAML"),
    ],
)
def test_broken_files_are_refused_by_name(
    name: str,
    text: str,
    options: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(text)
    assert cli.main(["plan", "gpt2-xl" if options else name, "--mesh", "shard=2", *options]) == 2
    said = capsys.readouterr().err
    assert told in said
    assert name in said


def test_a_file_of_ones_own_is_planned_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Products take twice as long with half of everything's peak."""
    text = (FOLDER / "h100.yaml").read_text()
    halved = re.sub(r"(?m)^(  \w+: \{value: )9.894e\+14", r"\g<1>4.947e+14", text)
    path = tmp_path / "mine.yaml"
    path.write_text(halved.replace("title: NVIDIA H100 SXM 80 GB", "title: half an H100"))
    assert cli.main(["plan", "gpt2-xl", "--mesh", "shard=4", "--gpu", str(path), "--no-advice"]) == 0
    assert re.search(r"^hardware +half an H100$", capsys.readouterr().out, flags=re.MULTILINE)
    alike = Exchange(machine=MACHINES["h100"])  # else each has the buckets that are cheapest on it
    mine, shipped = (plan("gpt2-xl", "shard=4", gpu=gpu, advice=False, exchange=alike).price for gpu in (path, "h100"))
    assert mine.parts["products"] == shipped.parts["products"].times(2)


def test_the_page_names_every_number_of_a_file() -> None:
    page = (Path(__file__).parent.parent / "docs" / "foresight.md").read_text()
    for name in (*SCALARS, *PASSES, "flops", "products", "exchanges", "passes", "together"):
        assert f"`{name}`" in page, name


def test_replicas_that_work_for_themselves_are_priced_but_not_advised() -> None:
    config = decoder(96, 48, 3, 4, 2, 12, 80)
    report = plan(build(config), "dp=2 shard=8", gpu="h100", advice=True)
    (alone,) = (a for a in report.advice if a.change == ALONE)
    assert alone.step is not None
    assert alone.step == plan(build(config), "shard=8", gpu="h100", advice=False).price.step
    assert not alone.helps
    assert not alone.write


def test_units_are_those_that_people_read() -> None:
    assert [seconds(v) for v in (0.0, 3.21e-6, 0.0785, 0.9996, 4.951, 123.4)] == [
        "0 us",
        "3.21 us",
        "78.5 ms",
        "1000 ms",
        "4.95 s",
        "123 s",
    ]
    assert [size(v) for v in (0, 1023, 2**20, 3.5 * 2**40, -(2**31))] == [
        "0 B",
        "1,023 B",
        "1 MiB",
        "3.5 TiB",
        "-2 GiB",
    ]
    assert [number(v) for v in (12, 7_000_000, 1.04e12)] == ["12", "7 M", "1.04 T"]
    assert [operations(v) for v in (3e6, 2e9, 5e18)] == ["3 MFLOP", "2 GFLOP", "5 EFLOP"]
    assert percent(0.0123) == "1.23 %"
    assert money(Time(1.0, 2.0, 300.0)) == "$1 .. 300"
    assert str(Time(0.001, 0.002, 0.003)) == "1 .. 3 ms"
    assert str(Time(2e-6, 3e-6, 4e-6)) == "2 .. 4 us"


# Every option of `Muon` with a value that is not its default, and whether that plans or counts something else.
OPTIONS: dict[str, tuple[Any, bool]] = {
    "lr": (torch.tensor(0.1), False),
    "weight_decay": (0.0, False),
    "momentum": (0.9, False),
    "nesterov": (False, False),
    "ns_coefficients": ("quintic", True),
    "eps": (1e-8, True),
    "ns_steps": (3, True),
    "adjust_lr_fn": ("match_rms_adamw", False),
    "extra_scale_factor": (0.2, False),
    "weight_decay_mode": ("cautious", False),
    "variant": ("normuon", True),
    "beta2": (0.9, False),
    "adamw": ("cautious", False),
    "process_group": (None, False),  # groups of real ranks: the mesh says what they would
    "tp_group": (None, False),
    "orthogonalizer": (Orthogonalizer("gram"), True),
    "exchange": (Exchange(route="gram"), True),
    "storage": (Storage(momentum_dtype=torch.bfloat16), True),
    "audit": (Audit(every=3), False),
    "adamw_lr": (1e-3, False),
    "adamw_betas": ((0.9, 0.9), False),
    "adamw_eps": (1e-9, False),
    "overrides": ({"*.q_proj.weight": {"num_heads": 4}}, True),
}


def test_plan_takes_every_option_of_muon() -> None:
    signature = inspect.signature(Muon.__init__).parameters
    named = {name for name, p in signature.items() if p.kind is not p.VAR_KEYWORD} | set(ForModule.__annotations__)
    assert OPTIONS.keys() == named - {"self", "params"}
    model = build(decoder(96, 48, 2, 4, 2, 12, 80))
    usual = plan(model, "shard=2", advice=False).exact
    for name, (value, other) in OPTIONS.items():
        assert (plan(model, "shard=2", advice=False, **{name: value}).exact != usual) == other, name


# ------------------------------------------------------------------------------------------------------------ the page


def test_the_page_is_whole_and_fetches_nothing(report: Report, tmp_path: Path) -> None:
    path = tmp_path / "out.html"
    report.write_html(path)
    text = path.read_text()
    opened, closed = (Counter(re.findall(rf"<{slash}([a-z]\w*)", text)) for slash in ("", "/"))
    assert (opened - closed).keys() == {"meta", "link"} and not closed - opened
    assert "script" not in opened
    assert all(address.startswith("data:") for address in re.findall(r'(?:src|href|data|srcset)="([^"]*)"', text))
    assert "url(" not in text and "@import" not in text
    assert all(text.count(f"--{phase}: #") == 2 for phase in get_args(Phase)), "light and dark"
    assert opened["rect"] == len(report.price.timeline)
    for section in sections(report):
        assert f"<h2>{section.title.replace(chr(39), '&#39;')}</h2>" in text


def test_what_a_user_named_cannot_become_markup(report: Report) -> None:
    named = replace(report, exact=replace(report.exact, model="<script>alert(1)</script>"))
    assert "<script>" not in named.html()


def test_bars_of_one_lane_do_not_overlap(report: Report) -> None:
    events = report.price.timeline
    of_lane: dict[int, list[Event]] = {}
    for event, lane in zip(events, lanes(events), strict=True):
        of_lane.setdefault(lane, []).append(event)
    assert set(of_lane) == set(range(len(of_lane)))
    for drawn in of_lane.values():
        drawn.sort(key=lambda event: event.start)
        assert all(first.end <= second.start for first, second in itertools.pairwise(drawn))
    nothing = replace(report.price, timeline=(Event(-1, "begin", 0.0, 0.0),))
    assert 'width="0.6"' in replace(report, price=nothing).html()


# ------------------------------------------------------------------------------------------------------- live, advice


def test_a_live_plan_has_a_price() -> None:
    model = nn.Sequential(nn.Linear(64, 96, bias=False), nn.Linear(96, 64, bias=False))
    optimizer = Muon(model.parameters(), lr=0.02, process_group=None)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    assert optimizer.plan is not None
    found = price_plan(optimizer.plan, "cpu-gloo", adamw_elements=1000, dollars_per_hour=1.0)
    assert 0.0 < found.step.lo < found.step.mid < found.step.hi
    assert found.rank == 0
    assert {event.phase for event in found.timeline} == {"begin", "fill", "orthogonalize", "apply", "adamw"}
    assert found.dollars is not None
    with pytest.raises(ValueError, match="none of a100"):
        price_plan(optimizer.plan, "none")


def test_advice_is_planned_not_guessed(report: Report) -> None:
    by_text = {advice.write: advice for advice in report.advice}
    assert 'Exchange(route="gram")' in by_text
    better = next((advice for advice in report.advice if advice.helps), None)
    if better is not None and "bucket_bytes" in better.write:
        mib = re.search(r"bucket_bytes=(\d+) \*", better.write)
        assert mib is not None
        again = plan(
            "gpt2-xl", "shard=4", gpu="h100", advice=False, exchange=Exchange(bucket_bytes=int(mib[1]) * 2**20)
        )
        assert again.price.step == better.step
    assert [a.gain for a in report.advice] == sorted((a.gain for a in report.advice), reverse=True)


def test_a_change_that_cannot_be_planned_says_why(report: Report) -> None:
    def refuse(changes: object) -> Any:
        raise ValueError("it does not divide")

    found = advise(report.exact, report.hardware, refuse)
    assert found and all(advice.refused == "it does not divide" and not advice.helps for advice in found)
    assert "cannot be: it does not divide" in str(replace(report, advice=found))


def test_memory_says_in_words_whether_it_fits(report: Report) -> None:
    need = report.exact.largest.stored.total + report.exact.largest.peak
    rows = []
    for share in (1.01, 0.95, 0.5):
        fact = replace(report.hardware.facts["memory_bytes"], lo=need / share, hi=need / share)
        hardware = replace(report.hardware, facts={**report.hardware.facts, "memory_bytes": fact})
        answers = sections(replace(report, hardware=hardware))[1]
        rows.append(dict(answers.rows)["memory of a rank"])
    assert [row.partition(size(need))[0] for row in rows] == ["does not fit: ", "tight: ", "fits: "]
    assert not any("%" in row for row in rows)


def test_why_says_from_which_share_of_the_work_the_gram_form_is_taken(report: Report) -> None:
    for kind in report.exact.matrices:
        found = re.search(r"has ([\d.]+)x of the work \(taken below ([\d.]+)x\)", kind.reason)
        assert found is not None, kind.reason
        assert (float(found[1]) < float(found[2])) == kind.how.startswith("gram"), kind
    assert {kind.how.split()[0] for kind in report.exact.matrices} == {"gram", "standard"}
