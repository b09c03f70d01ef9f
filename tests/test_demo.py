"""The demo's claims: real text split by files, a causal model, the same training in every layout, a working command."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardmuon import Muon, Orthogonalizer
from shardmuon.demo import command, launch, loop
from shardmuon.demo.config import ModelConfig, Offload, TrainConfig
from shardmuon.demo.data import Batches, Corpus, is_held_out, read_corpus, source_files
from shardmuon.demo.engines import TorchEngine
from shardmuon.demo.layouts import make_mesh, parallelize, reader
from shardmuon.demo.mesh import LAYOUTS, check, mesh_shape, num_readers
from shardmuon.demo.model import Attention, Model
from shardmuon.demo.optimizers import build_muon, muon_options
from shardmuon.demo.proof import StepRecorder
from shardmuon.demo.report import Reporter
from shardmuon.demo.result import RunResult
from shardmuon.testing import RankPool
from shardmuon.testing.deepspeed import whole_weight
from shardmuon.testing.tolerances import assert_bitwise, assert_near, assert_rounded, roundoff, sum_roundoff

TINY = ModelConfig(vocab=256, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, hidden=48)
TINY_EXPERTS = replace(TINY, num_experts=4, top_k=2)
SRC = Path(command.__file__).parents[2]


def tiny_config(layout: str, num_ranks: int | None, model: ModelConfig) -> TrainConfig:
    return TrainConfig(
        layout, mesh_shape(layout, num_ranks, {}), model, steps=3, batch=8, seq_len=16, warmup=1, lr=1e-2
    )


def synthetic_corpus() -> Corpus:
    words = np.random.default_rng(0).integers(0, 256, 4096, dtype=np.uint8)
    return Corpus(words[:3072], words[3072:], 1, 1)


# ------------------------------------------------------------------------------------------------------------- data


def test_split_is_by_file_disjoint_and_covers_the_text(tmp_path: Path) -> None:
    (tmp_path / "package" / "test").mkdir(parents=True)
    texts = {f"package/module_{i}.py": f"# module {i}\n" for i in range(60)}
    for name, text in {**texts, "package/test/test_it.py": "left out", "package/notes.txt": "left out"}.items():
        (tmp_path / name).write_text(text)
    corpus = read_corpus(tmp_path)
    train, held_out = bytes(corpus.train).decode(), bytes(corpus.held_out).decode()
    for name, text in texts.items():
        assert (text in held_out, text in train) == (is_held_out(name), not is_held_out(name))
    assert "left out" not in train + held_out
    assert corpus.num_train_files + corpus.num_held_out_files == 60
    assert 0 < corpus.num_held_out_files < 15


def test_corpus_is_the_same_at_every_reading_whatever_the_file_system_order(tmp_path: Path) -> None:
    for name in ("b.py", "a.py", "c.py"):
        (tmp_path / name).write_text(name)
    assert source_files(tmp_path) == ["a.py", "b.py", "c.py"]
    first, second = read_corpus(tmp_path), read_corpus(tmp_path)
    assert bytes(first.train) == bytes(second.train)
    assert bytes(first.held_out) == bytes(second.held_out)


def test_readers_rows_put_together_are_the_global_batch() -> None:
    tokens = synthetic_corpus().train
    whole = Batches(tokens, 16, 8, 0, 1).train(seed=3, step=5)
    parts = [Batches(tokens, 16, 8, part, 4).train(seed=3, step=5) for part in range(4)]
    assert torch.equal(torch.cat([inputs for inputs, _ in parts]), whole[0])
    assert torch.equal(whole[0][:, 1:], whole[1][:, :-1]), "targets are the inputs' next bytes"
    assert not torch.equal(whole[0], Batches(tokens, 16, 8, 0, 1).train(seed=3, step=6)[0])


# ------------------------------------------------------------------------------------------------------------ model


@pytest.mark.parametrize("config", [TINY, TINY_EXPERTS], ids=["dense", "experts"])
def test_logits_have_the_vocabulary_and_do_not_see_the_future(config: ModelConfig) -> None:
    model = with_random_head(Model(config, seq_len=16), seed=0)
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 256
    before, after = model(tokens), model(changed)
    assert before.shape == (2, 16, 256)
    assert_bitwise(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).any(dim=-1).all()


def test_grouped_queries_equal_full_attention_with_repeated_key_value_heads() -> None:
    torch.manual_seed(0)
    grouped, full = Attention(TINY), Attention(replace(TINY, num_kv_heads=4))
    full.load_state_dict(grouped.state_dict() | {f"{w}.weight": repeat_heads(grouped, w) for w in ("wk", "wv")})
    x = torch.randn(2, 16, 32)
    model = Model(TINY, 16)
    assert_bitwise(grouped(x, model.cos, model.sin), full(x, model.cos, model.sin))


def repeat_heads(attention: Attention, name: str) -> Tensor:
    weight: Tensor = attention.get_parameter(f"{name}.weight").detach()
    return weight.view(2, 8, 32).repeat_interleave(2, dim=0).reshape(32, 32)


def test_a_token_passes_through_its_top_k_experts_only() -> None:
    model = with_random_head(Model(replace(TINY_EXPERTS, num_layers=1), seq_len=4), seed=0)
    experts = model.get_submodule("blocks.0.mlp.experts")
    router = model.get_parameter("blocks.0.mlp.router.weight")
    x = torch.randn(1, 4, 32)
    chosen = {int(i) for i in (x.flatten(0, 1) @ router.T).topk(2).indices.flatten()}
    model.get_submodule("blocks.0.mlp")(x).sum().backward()
    for name, stack in experts.named_parameters():
        assert stack.grad is not None, name
        used = {e for e in range(4) if stack.grad[e].abs().sum() > 0}
        assert used == chosen, name


# ---------------------------------------------------------------------------------------------------------- layouts


@pytest.mark.parametrize(
    ("layout", "num_ranks", "sizes", "message"),
    [
        ("single", 2, {}, "exactly 1. Write --ranks 1"),
        ("ddp", 1, {}, "2 or more (replicate at least 2)"),
        ("fsdp2+tp", 3, {}, "multiple of 2, 4 or more (tp 2 x shard at least 2). Write --ranks 4"),
        ("hsdp+tp", 4, {}, "multiple of 4, 8 or more (replicate 2 x tp 2 x shard at least 2). Write --ranks 8"),
        ("fsdp2", 2, {"tp": 2}, "--tp 2 does not fit layout fsdp2: its axes are shard"),
        ("tp", 4, {"tp": 2}, "exactly 2 (tp 2)"),
        ("fsdp2+tp", 4, {"tp": 0}, "--tp 0 does not fit"),
    ],
)
def test_ranks_that_do_not_factor_are_refused_with_what_to_write(
    layout: str, num_ranks: int, sizes: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        mesh_shape(layout, num_ranks, sizes)


@pytest.mark.parametrize(
    ("layout", "num_ranks", "model", "message"),
    [
        ("tp", 4, TINY, "2 key-value heads do not divide over 4 (tp)"),
        ("ep", 4, replace(TINY_EXPERTS, num_experts=3), "3 experts do not divide over 2 (ep)"),
        ("ep", 4, TINY, "--experts 4"),
        ("fsdp2", 3, TINY, "8 sequences in the batch do not divide over 3"),
    ],
)
def test_models_that_do_not_divide_are_refused(layout: str, num_ranks: int, model: ModelConfig, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        check(layout, mesh_shape(layout, num_ranks, {}), model, batch=8)


def test_fewest_ranks_of_each_layout() -> None:
    fewest = {name: math.prod(mesh_shape(name, None, {}).values()) for name in LAYOUTS}
    assert fewest == {
        "single": 1, "ddp": 2, "fsdp2": 2, "hsdp": 4, "tp": 2, "fsdp2+tp": 4, "hsdp+tp": 8, "ep": 2
    }  # fmt: skip


def with_random_head(model: Model, seed: int) -> Model:
    """Weights as the demo starts with, but a head that is not zero: through a zero head no gradient passes."""
    model.initialize_(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        model.head.weight.copy_(0.1 * torch.randn(model.head.weight.shape, generator=generator))
    return model


class LossCheck(NamedTuple):
    """A loss that a sharded run reports, and what one process makes of the same weights and the whole batch.

    `size`: of the terms of which a cross entropy is the difference, the logarithm of a sum and one logit.
    """

    found: float
    expected: float
    size: float


class Shadow:
    """Takes the whole weights before each loss of a training run, for one process to compute it anew. So every loss is
    compared at the same weights: nothing of an earlier step's rounding is in it."""

    def __init__(self, config: TrainConfig) -> None:
        self.config, self.weights = config, list[dict[str, Tensor]]()
        self._whole = whole_weight if config.engine == "deepspeed" and config.zero else whole
        self._original = loop.loss_of

    def loss_of(self, model: nn.Module, batch: tuple[Tensor, Tensor], device: torch.device) -> Tensor:
        if len(self.weights) <= self.config.steps:  # those of training and of the first look at held-out text
            named = ((n.removeprefix("module."), p) for n, p in model.named_parameters())
            with torch.no_grad():
                self.weights.append({n: self._whole(p).clone() for n, p in named})
        return self._original(model, batch, device)

    def checks(self, corpus: Corpus, result: RunResult) -> list[LossCheck]:
        config = self.config
        train, held_out = (Batches(s, config.seq_len, config.batch, 0, 1) for s in (corpus.train, corpus.held_out))
        batches = [[train.train(config.seed, step)] for step in range(config.steps)]
        batches.append(list(held_out.held_out(config.eval_batches)))
        found = [*result.train_loss, result.final_held_out_loss]
        return [
            LossCheck(loss, *self._dense(weights, several))
            for loss, weights, several in zip(found, self.weights, batches, strict=True)
        ]

    @torch.no_grad()
    def _dense(self, weights: dict[str, Tensor], batches: list[tuple[Tensor, Tensor]]) -> tuple[float, float]:
        model = Model(self.config.model, self.config.seq_len)
        model.load_state_dict(weights, strict=False)
        assert weights.keys() == dict(model.named_parameters()).keys()
        losses, sizes = [], []
        for inputs, targets in batches:
            logits = model(inputs).flatten(0, 1)
            losses.append(torch.nn.functional.cross_entropy(logits, targets.flatten()))
            sizes.append((logits.logsumexp(-1).abs() + logits.abs().amax(-1)).mean())
        return float(torch.stack(losses).mean()), float(torch.stack(sizes).mean())


# A loss passes some 25 operations one after the other, each a sum of up to 128 terms, on both sides.
LOSS = 2 * 25 * (1 + math.sqrt(128 / 6))


def assert_losses(losses: list[LossCheck]) -> None:
    assert len({loss.expected for loss in losses}) == len(losses), "the weights do not move"
    for number, loss in enumerate(losses):
        assert_rounded(
            loss.found, loss.expected, roundings=LOSS, dtype=torch.float32, scale=loss.size, what=f"loss {number}"
        )


def gradients_and_losses(config: TrainConfig) -> tuple[dict[str, Tensor], list[LossCheck]]:
    """Whole gradients of the first batch, and the losses of a few Muon steps, on this rank of `config.layout`."""
    loop.silence_known_warnings()
    torch.set_num_threads(1)
    mesh = make_mesh("cpu", config.mesh)
    device, corpus = torch.device("cpu"), synthetic_corpus()
    model = parallelize(with_random_head(Model(config.model, config.seq_len), seed=0), mesh)
    data = Batches(corpus.train, config.seq_len, config.batch, reader(mesh), num_readers(config.mesh))
    loop.loss_of(model, data.train(0, 0), device).backward()
    grads = {name.removeprefix("module."): whole(p.grad) for name, p in model.named_parameters()}
    shadow = Shadow(config)
    with mock.patch.object(loop, "loss_of", shadow.loss_of):
        result = loop.train(config, "muon", corpus, mesh, device, Reporter(config, is_chief=False))
    assert result.proof is not None
    assert result.proof.passed, str(result.proof)
    return grads, shadow.checks(corpus, result)


@cache
def on_one_rank(model: ModelConfig) -> dict[str, Tensor]:
    """The gradients for the layout of one rank, once a model."""
    return gradients_and_losses(tiny_config("single", 1, model))[0]


def whole(grad: Tensor | None) -> Tensor:
    assert grad is not None
    full: Tensor = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return full


CASES_2 = [
    ("ddp", TINY_EXPERTS),
    ("fsdp2", TINY),
    ("tp", TINY_EXPERTS),
    ("ep", TINY_EXPERTS),
]
CASES_4 = [("hsdp", TINY), ("fsdp2+tp", TINY_EXPERTS), ("ep", TINY_EXPERTS)]


def case_name(value: object) -> str:
    return ("experts" if value.num_experts else "dense") if isinstance(value, ModelConfig) else str(value)


@pytest.mark.parametrize(("layout", "model"), CASES_2, ids=case_name)
def test_training_on_2_ranks_is_training_on_one(world2: RankPool, layout: str, model: ModelConfig) -> None:
    assert_trains_like_one(world2, layout, model)


@pytest.mark.parametrize(
    ("layout", "model"),
    [pytest.param(*case, marks=[pytest.mark.numeric] if at == 1 else []) for at, case in enumerate(CASES_4)],
    ids=case_name,
)
def test_training_on_4_ranks_is_training_on_one(world4: RankPool, layout: str, model: ModelConfig) -> None:
    assert_trains_like_one(world4, layout, model)


# Forward and backward pass some 50 operations one after the other, each a sum of up to 128 terms (the tokens of the
# batch), on both sides.
GRADIENTS = 2 * 50 * (roundoff(torch.float32) + sum_roundoff(torch.float32, 128))


def assert_trains_like_one(pool: RankPool, layout: str, model: ModelConfig) -> None:
    expected_grads = on_one_rank(model)
    config = tiny_config(layout, pool.world_size, model)
    for grads, losses in pool.run(gradients_and_losses, config):
        assert_losses(losses)
        assert grads.keys() == expected_grads.keys()
        # gradients are compared as they are, since Muon's update would hide a wrong factor
        for name, grad in expected_grads.items():
            assert_near(grads[name], grad, GRADIENTS, name)


# ------------------------------------------------------------------------------------------------------------ proof


def proof_of_a_wrong_step(config: TrainConfig) -> tuple[bool, bool]:
    """True if the proof passes for the real step, and for one after which one weight was changed a little."""
    loop.silence_known_warnings()
    device, corpus = torch.device("cpu"), synthetic_corpus()
    mesh = make_mesh("cpu", config.mesh)
    passed = []
    for offset in (0.0, 1e-5):
        model = loop.build_model(config, mesh, device)
        options = muon_options()
        optimizer, _ = build_muon(model, 1e-2, 0.1, options)
        recorder = StepRecorder(model, optimizer, options)
        data = Batches(corpus.train, config.seq_len, config.batch, reader(mesh), num_readers(config.mesh))
        loop.loss_of(model, data.train(0, 0), device).backward()
        engine = TorchEngine(model, optimizer)
        recorder.before(engine)
        optimizer.step()
        weight = next(p for group in optimizer.param_groups if group["use_muon"] for p in group["params"])
        with torch.no_grad():
            local = weight.to_local() if isinstance(weight, DTensor) else weight
            if not dist.is_initialized() or dist.get_rank() == 0:
                local[0, 0] += offset
        passed.append(recorder.check(engine, config.layout).passed)
    return passed[0], passed[1]


@pytest.mark.numeric
def test_proof_passes_a_right_step_and_fails_a_wrong_one(world2: RankPool) -> None:
    assert world2.run(proof_of_a_wrong_step, tiny_config("fsdp2", 2, TINY)) == [(True, False)] * 2


def test_replicas_that_differ_fail_the_proof(world2: RankPool) -> None:
    assert world2.run(proof_of_a_wrong_step, tiny_config("ddp", 2, TINY)) == [(True, False)] * 2


@pytest.mark.numeric
@pytest.mark.parametrize("spoiled", [0, -1])
def test_a_weight_that_is_no_number_fails_the_proof(spoiled: int) -> None:
    """NaN in the first matrix fails the proof, too, with sound ones after it."""
    model = nn.Sequential(nn.Linear(8, 12, bias=False), nn.Linear(12, 10, bias=False), nn.Linear(10, 8, bias=False))
    options = {"orthogonalizer": Orthogonalizer(method="standard")}
    optimizer = Muon(list(model.named_parameters()), lr=0.02, **options)
    engine, recorder = TorchEngine(model, optimizer), StepRecorder(model, optimizer, options)
    model(torch.ones(4, 8)).square().sum().backward()
    recorder.before(engine)
    optimizer.step()
    assert recorder.check(engine, "single").passed
    with torch.no_grad():
        list(model.parameters())[spoiled].fill_(float("nan"))
    assert not recorder.check(engine, "single").passed


# ---------------------------------------------------------------------------------------------------------- command

TINY_RUN = "--steps 6 --dim 32 --layers 1 --heads 4 --kv-heads 2 --hidden 64 --batch 4 --seq-len 32 --eval-batches 1"


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "shardmuon.demo", *TINY_RUN.split(), *arguments],
        env=os.environ | {"PYTHONPATH": str(SRC)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # tests that a shell runs in the background ignore SIGINT, and what they start would inherit that
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def told(function: Callable[..., int], *args: Any) -> tuple[int, str]:
    """Exit status and output of a rank of the command."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(out):
        code = function(*args)
    return code, out.getvalue()


class Lent:
    """Ranks that are there already, in place of those that the command starts: the last test here starts real ones."""

    def __init__(self, pool: RankPool) -> None:
        self._pool, self.output = pool, ""

    def __call__(self, num_ranks: int, backend: str, timeout: float) -> AbstractContextManager[Lent]:
        assert (num_ranks, backend) == (self._pool.world_size, "gloo")
        return nullcontext(self)

    def run(self, function: Callable[..., int], *args: Any) -> list[int]:
        codes, texts = zip(*self._pool.run(told, function, *args), strict=True)
        self.output = "".join(texts)
        return list(codes)


def trained(pool: RankPool, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """Output of the demo."""
    lent = Lent(pool)
    monkeypatch.setattr(launch, "RankPool", lent)
    assert command.main([*TINY_RUN.split(), *arguments]) == 0
    return lent.output


def test_command_compares_proves_and_writes_its_files(
    tmp_path: Path, world2: RankPool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ["--layout", "fsdp2", "--ranks", "2", "--compare", "adamw", "--out", str(tmp_path)]
    output = trained(world2, monkeypatch, *options)
    assert capfd.readouterr() == ("", "")
    assert "the sharded update is the dense one: layout fsdp2" in output
    assert "bitwise equal yes" in output
    run = json.loads((tmp_path / "run.json").read_text())
    assert [r["optimizer"] for r in run["runs"]] == ["muon", "adamw"]
    assert all(len(r["train_loss"]) == 6 and r["held_out"][-1][0] == 6 for r in run["runs"])
    assert run["runs"][0]["proof"]["passed"]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_command_refuses_ranks_that_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--layout", "fsdp2+tp", "--ranks", "3"]) == 2
    assert "Write --ranks 4" in capsys.readouterr().err


needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed: shardmuon[deepspeed]"
)


@pytest.fixture(scope="module")
def deepspeed_pool(deepspeed_pools: dict[int, RankPool]) -> RankPool:
    return deepspeed_pools[2]


def losses_under_zero(config: TrainConfig) -> tuple[bool, list[LossCheck]]:
    loop.silence_known_warnings()
    warnings.filterwarnings("ignore", module="deepspeed")
    torch.set_num_threads(1)
    mesh, device = make_mesh("cpu", config.mesh), torch.device("cpu")
    shadow, corpus = Shadow(config), synthetic_corpus()
    with mock.patch.object(loop, "loss_of", shadow.loss_of):
        result = loop.train(config, "muon", corpus, mesh, device, Reporter(config, is_chief=False))
    assert result.proof is not None
    return result.proof.passed, shadow.checks(corpus, result)


@needs_deepspeed
@pytest.mark.ranks
@pytest.mark.parametrize(("stage", "offload"), [(0, "none"), (2, "cpu"), (3, "none")])
def test_training_under_deepspeed_is_training_on_one(deepspeed_pool: RankPool, stage: int, offload: Offload) -> None:
    zero = replace(tiny_config(f"zero{stage}", 2, TINY_EXPERTS), engine="deepspeed", zero=stage, offload=offload)
    for bitwise, losses in deepspeed_pool.run(losses_under_zero, replace(zero)):
        assert bitwise
        assert_losses(losses)


@needs_deepspeed
def test_command_trains_under_deepspeed(deepspeed_pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    output = trained(deepspeed_pool, monkeypatch, "--engine", "deepspeed", "--zero", "1", "--compare", "adamw")
    assert "the sharded update is the dense one: layout zero1, 7 matrices checked" in output
    assert "bitwise equal yes" in output
    assert re.search(r"^adamw +0.004 ", output, re.MULTILINE)


@needs_deepspeed
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--zero 2", "--zero 2 is for --engine deepspeed"),
        ("--offload cpu", "--offload is for --engine deepspeed"),
        ("--engine deepspeed --layout fsdp2", "write --zero 0, 1, 2 or 3"),
        ("--engine deepspeed --zero 0 --offload cpu", "Write --zero 1, 2 or 3"),
        ("--engine deepspeed --zero 2 --offload nvme", "Write --zero 3"),
        ("--engine deepspeed --nvme-path here", "--nvme-path is for --offload nvme"),
        ("--engine deepspeed --tp 2", "its axes are data"),
    ],
)
def test_command_refuses_settings_that_do_not_go_together(
    capsys: pytest.CaptureFixture[str], options: str, words: str
) -> None:
    assert command.main([*options.split()]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks ranks up in /proc")
def test_interrupt_ends_every_rank() -> None:
    process = start("--layout", "fsdp2", "--ranks", "2", "--steps", "100000")
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("run "):
                break
        time.sleep(0.5)
        ranks = descendants(process.pid)
        assert len(ranks) >= 2
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    assert errors == "\nshardmuon.demo: interrupted\n"
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in ranks) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]


def descendants(pid: int) -> list[int]:
    """Process ids below `pid`."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
        found = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return found + [grandchild for child in found for grandchild in descendants(child)]
