"""Tests of `shardmuon plan`: its output, the files it writes, and the arguments it rejects."""

from __future__ import annotations

import inspect
import itertools
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from published import decoder
from torch import nn

from shardmuon import Muon
from shardmuon.commands import main as cli
from shardmuon.foresight import Hardware, Price, Report, plan
from shardmuon.foresight import hardware as hardware_module
from shardmuon.foresight.models import build
from shardmuon.foresight.report import Time
from shardmuon.price.clock import Event

DENSE = decoder(96, 48, 2, 4, 2, 12, 80)
MOE = decoder(96, 48, 2, 4, 2, 12, 80, num_experts=8, moe_intermediate_size=640)


@pytest.fixture(scope="module")
def report() -> Report:
    return plan("gpt2-xl", "shard=4", gpu="h100", tokens_per_step=5e5)


def row_of(report: Report, name: str) -> str | None:
    """Return the second column of the row `name` in the text of a plan's report, or None if there is no such row."""
    found = (line for line in report.text(width=1000).splitlines() if line.startswith(f"{name}  "))
    line = next(found, None)
    return None if line is None else line.removeprefix(name).strip()


def test_the_text_has_every_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    words = ["--gpus-per-node", "4", "--weights", "bfloat16", "--momentum", "bfloat16", "--html", str(page)]
    assert cli.main(["plan", "gpt2-xl", "--mesh", "dp=2 shard=4", "--tokens-per-step", "512e3", *words]) == 0
    out = capsys.readouterr().out
    for text in (
        *("^optimizer step ", "^why so wide ", "^memory of a rank ", "^over AdamW ", "straggler", "AdamW's step"),
        *("forward and backward of 512,000 tokens", "unverified", "8 ranks on 2 nodes", "weights bfloat16"),
        *("momentum_dtype torch.bfloat16", f"wrote {page}\n\\Z"),
    ):
        assert re.search(text, out, flags=re.MULTILINE), text
    assert page.read_text().endswith("</html>")


@pytest.mark.parametrize(
    ("config", "options", "told"),
    [(MOE, {}, None), (MOE, {"active_params": 3e9}, "3 B parameters"), (DENSE, {}, "41,712 parameters")],
)
def test_a_report_says_how_many_parameters_work_on_a_token(
    config: dict[str, Any], options: dict[str, Any], told: str | None
) -> None:
    planned = plan(build(config), "shard=2", gpu="cpu-gloo", **options)
    assert row_of(planned, "active") == (told and f"{told} work on a token")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("llama3-8 --mesh dp=2", r"'llama3-8' is no model that is known.*did you mean llama3-8b"),
        ("nowhere/config.json --mesh dp=2", "there is no such file"),
        ("gpt2-xl --mesh ,", "'' is no axis=size.*dp=1"),
        ("gpt2-xl --mesh shards=8", "'shards=8' is no axis=size. Axes are dp, shard, tp"),
        ("gpt2-xl --mesh shard=0", "sizes whole numbers of at least 1"),
        ("gpt2-xl --mesh shard=\u00b2", "axis=size"),
        ("gpt2-xl --mesh shard=8,shard=2", "an axis stands there twice"),
        ("gpt2-xl --mesh shard=20000", "10,240 are the most"),
        ("gpt2-xl --mesh dp=8 --engine ddp", r"engine='ddp' must be \"torch\" or \"zero\".*For DDP write dp=N alone"),
        ("gpt2-xl --mesh dp=8 --engine megatron", r"engine='megatron' must be .*and Megatron shard=N"),
        ("gpt2-xl --mesh dp=2,shard=4 --engine zero", r"zero .* has no other axis but pp. Write dp=8 alone"),
        ("gpt2-xl --mesh dp=2,tp=4 --engine zero", r"has no other axis but pp. Write dp=8 alone"),
        ("llama3-8b --mesh shard=4,pp=64", r"pp=64 stages for 32 layers. Write pp=32"),
        ("qwen3-30b-a3b --mesh shard=12,ep=8", r"ep=8 does not divide shard x tp = 12.*ep=4"),
        ("qwen3-30b-a3b --mesh shard=12,ep=3", r"ep=3 does not divide the 128 experts.*Write ep=1"),
        ("gpt2-xl --mesh shard=4 --gpu h9000", r"h9000.* is none of a100, b200.*copy .*h100.yaml"),
        ("gpt2-xl --mesh shard=4 --gpu no.yaml", "no such file"),
        (
            "gpt2-xl --mesh dp=2 --engine zero --momentum bfloat16",
            "keeps fp32 .*refuses momentum_dtype=.*Leave that out",
        ),
        ("gpt2-xl --mesh shard=4 --html gone/x.html", "there is no folder gone"),
        ("there.json --mesh shard=2", "it takes transformers .*pip install transformers"),
        ("gpt2-xl --mesh shard=2 --tokens-per-step 0", "tokens=0.0 must be a number above 0"),
        ("there.py:build --mesh shard=2 --tokens-per-step 9", "is not known .it has experts.*Give --active-params"),
        ("gpt2-xl --mesh shard=2 --active-params -1", "active_params=-1.0 must be a number of parameters"),
        ("gpt2-xl --mesh shard=2 --gpu gpu.yaml", "gpu.yaml: it is no YAML"),
    ],
)
def test_wrong_input_is_told_what_to_write(
    words: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)  # makes `import transformers` fail
    model = "import torch\nbuild = torch.nn.ModuleDict({'experts': torch.nn.Linear(4, 4)})"
    for name, text in {"there.json": "{}", "there.py": model, "gpu.yaml": "a: ["}.items():
        Path(name).write_text(text)
    model, *options = words.split()
    assert cli.main(["plan", model, *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("shardmuon plan: ") and "Traceback" not in err
    assert re.search(told, err), err


def test_a_file_of_ones_own_is_planned_on(tmp_path: Path, report: Report) -> None:
    """Halving all peak rates in a user's hardware file must double the predicted matmul time. docs/foresight.md must
    document every number in a hardware file."""
    text = (Path(hardware_module.__file__).parent / "data" / "hardware" / "h100.yaml").read_text()
    (tmp_path / "mine.yaml").write_text(re.sub(r"(?m)^(  peak \w+: \{value: )9.894e\+14", r"\g<1>4.947e+14", text))
    mine = plan("gpt2-xl", "shard=4", gpu=tmp_path / "mine.yaml").price
    assert mine.parts["products"] == Time(*(2 * end for end in report.price.parts["products"]))
    page = (Path(__file__).parents[2] / "docs" / "foresight.md").read_text()
    numbers = {number for name in Hardware.names() for number in Hardware.load(name).numbers}
    starts = {number: itertools.accumulate(number.split(), lambda start, word: f"{start} {word}") for number in numbers}
    assert [number for number, of in starts.items() if not any(f"`{start}`" in page for start in of)] == []


def test_units_are_those_that_people_read(report: Report) -> None:
    times = {0.0: "0 us", 3.21e-6: "3.21 us", 0.0785: "78.5 ms", 0.9996: "1,000 ms", 4.951: "4.95 s", 123.4: "123 s"}
    for seconds, text in times.items():
        price = replace(report.price, step=Time(seconds, seconds, seconds))
        assert str(row_of(replace(report, price=price), "optimizer step")).endswith(f"most likely {text}")
    for memory, text in {0: "0 B", 1023: "1,023 B", 2**20: "1 MiB", 3.5 * 2**40: "3.5 TiB"}.items():
        assert f" of {text}; " in str(row_of(_with_memory(report, memory), "memory of a rank"))
    for number, text in {12: "12", 7_000_000: "7 M", 1_040_000_000_000: "1.04 T"}.items():
        exact = replace(report.exact, muon_params=number, adamw_params=0)
        assert f" {text} parameters, {text} of them" in str(row_of(replace(report, exact=exact), "model"))
    assert [str(Time(lo, lo, hi)) for lo, hi in ((1e-3, 3e-3), (2e-6, 4e-6))] == ["1 .. 3 ms", "2 .. 4 us"]


def _with_memory(report: Report, size: float) -> Report:
    """Return a copy of the report in which each GPU has `size` bytes of memory."""
    number = replace(report.hardware["memory_bytes"], rows={1.0: [(1.0, size, size, size)]})  # type: ignore[type-var]
    hardware = replace(report.hardware, numbers={**report.hardware.numbers, "memory_bytes": number})
    return replace(report, hardware=hardware)


# For each option of `Muon`, OPTIONS gives a value and whether this value changes the plan or the counts computed from
# the plan. All values except those of the process groups differ from the defaults.
OPTIONS: dict[str, tuple[Any, bool]] = {
    "lr": (torch.tensor(0.1), False),
    "weight_decay": (0.0, False),
    "momentum": (0.9, False),
    "nesterov": (False, False),
    "ns_coefficients": ("quintic", True),
    "ns_steps": (3, True),
    "adjust_lr_fn": ("match_rms_adamw", False),
    "variant": ("normuon", True),
    # The function `plan` takes the ranks from the mesh and does not use process groups.
    "process_group": (None, False),
    "tp_group": (None, False),
    "method": ("gram", True),
    "ns_dtype": (torch.float32, True),
    "momentum_dtype": (torch.bfloat16, True),
    "momentum_device": ("cpu", True),
    "stochastic_rounding": (True, True),
    "bucket_bytes": (2**20, True),
    "audit_every": (3, True),
    "adamw_lr": (1e-3, False),
    "overrides": ({"*.q_proj.weight": {"split_sizes": 4}}, True),
}


def test_plan_takes_every_option_of_muon() -> None:
    signature = inspect.signature(Muon.__init__).parameters
    # The parameter `unknown` of `Muon` collects misspelled options.
    assert OPTIONS.keys() == signature.keys() - {"self", "params", "unknown"}
    model = build(decoder(96, 48, 2, 4, 2, 12, 80))
    usual = plan(model, "shard=2").exact
    for name, (value, other) in OPTIONS.items():
        assert (plan(model, "shard=2", **{name: value}).exact != usual) == other, name


# ------------------------------------------------------------------------------------------------------------ the page


def test_the_page_is_whole_and_fetches_nothing(report: Report, tmp_path: Path) -> None:
    """The HTML page that `shardmuon plan` writes must close all tags and load no other files. The model name in this
    test contains HTML, which must be escaped."""
    path = tmp_path / "out.html"
    replace(report, exact=replace(report.exact, model="<script>alert(1)</script>")).write_html(path)
    text = path.read_text()
    opened, closed = (Counter(re.findall(rf"<{slash}([a-z]\w*)", text)) for slash in ("", "/"))
    assert (opened - closed).keys() == {"meta", "link"} and not closed - opened
    assert all(address.startswith("data:") for address in re.findall(r'(?:src|href|data|srcset)="([^"]*)"', text))
    assert "script" not in opened and "url(" not in text and "@import" not in text
    assert all(text.count(f"--{phase}: #") == 2 for phase in get_args(get_type_hints(Event)["phase"])), "light and dark"
    assert opened["rect"] == len(report.price.timeline)
    titles = [section.partition("\n")[0] for section in str(report).split("\n\n")]
    assert [title.replace("&#39;", "'") for title in re.findall("<h2>(.*)</h2>", text)[1:]] == titles


def test_bars_of_one_lane_do_not_overlap(report: Report) -> None:
    events = report.price.timeline
    lanes = re.findall(r'<rect [^>]*y="([^"]+)"', report.html())
    for lane in set(lanes):
        drawn = sorted((e for e, at in zip(events, lanes, strict=True) if at == lane), key=lambda e: e.start)
        assert all(first.end <= second.start for first, second in itertools.pairwise(drawn))
    assert len(set(lanes)) > 1
    nothing = replace(report.price, timeline=(Event(-1, "begin", 0.0, 0.0),))
    assert 'width="0.6"' in replace(report, price=nothing).html()


# ------------------------------------------------------------------------------------------------------- a live plan


def test_a_live_plan_has_a_price_and_says_from_which_share_of_the_work_the_gram_form_is_taken() -> None:
    layers = (nn.Linear(64, 96, bias=False), nn.Linear(96, 640, bias=False))
    made = Muon(nn.Sequential(*layers).parameters(), lr=0.02, ns_dtype=torch.float32).prepare()
    found = Price.of_plan(made, "cpu-gloo")
    assert found.rank == 0 and 0.0 < found.step.lo < found.step.mid < found.step.hi
    assert {event.phase for event in found.timeline} == {"begin", "fill", "orthogonalize", "apply"}
    for item in made.items:
        reason = item.choice.reason
        said = re.search(r"has ([\d.]+)x of the work \(taken below ([\d.]+)x\)", reason)
        assert said is not None, reason
        assert (float(said[1]) < float(said[2])) == (item.choice.method == "gram"), item
    assert {item.choice.method for item in made.items} == {"gram", "standard"}


def test_memory_says_in_words_whether_it_fits(report: Report) -> None:
    kept, more = report.exact.largest.stored.total, report.exact.largest.peak
    need = kept + more
    for have, word in (
        (kept / 1.01, "does not fit"),
        # The plan gives an upper bound on a step's memory, so the step may still fit into slightly less memory.
        (kept + 0.9 * more, "may not fit"),
        (need / 0.95, "tight"),
        (need / 0.5, "fits"),
    ):
        row = str(row_of(_with_memory(report, have), "memory of a rank"))
        assert row.startswith(f"{word}: ") and "%" not in row
