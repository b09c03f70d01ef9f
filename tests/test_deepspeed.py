"""DeepSpeed ZeRO, the real package on CPUs: the update of whole matrices from flat partitions that cut them anywhere.

Gradients have closed forms (a weight times a constant, summed). Their elements are multiples of 1/8, on three ranks of
3/8, so that every mean over ranks and micro-batches is exact in fp32, fp16 and bf16, in whatever order it is summed:
what differs from the dense update then is shardmuon's doing, and nothing may, in any arithmetic. Where DeepSpeed rounds
gradients, the dense update is given those that it handed over, read back from the momentum (half of them, exactly).
Weights are compared as the model has them, not as DeepSpeed's functions show its own copies.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import itertools
import math
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deepspeed_start import import_deepspeed
from injection import PROMPT, plant_in_all
from torch import Tensor, nn

from shardmuon import (
    Audit,
    AuditWarning,
    Muon,
    Orthogonalizer,
    Storage,
    audit,
    clip_grad_norm_,
    param_groups,
)
from shardmuon.core import MuonConfig
from shardmuon.frameworks.deepspeed import REQUIRED, expert_groups, from_config
from shardmuon.frameworks.deepspeed import host as zero
from shardmuon.frameworks.deepspeed.partitions import check_version, slices_of
from shardmuon.step import update as pipeline
from shardmuon.testing import RankPool
from shardmuon.testing.frameworks import start_deepspeed, whole_momentum, whole_weight
from shardmuon.testing.tolerances import KELLER, assert_rounded, roundoff

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed: shardmuon[deepspeed]"),
]

SHAPES = {
    "a": (48, 40),
    "b": (37, 53),
    "e": (31, 18),
    "frozen": (10, 12),
    "f": (12, 44),
    "c": (64, 24),
    "d": (20, 60),
    "heads": (24, 16),
    "v": (37,),
    "row": (1, 33),
    "tiny": (1, 2),
}
MUON = ("a", "b", "e", "f", "c", "row", "d", "heads", "tiny")
TRAINED = (*MUON, "v")
NUMEL = sum(math.prod(SHAPES[n]) for n in TRAINED)
RUNS = 11  # eight matrices and three heads


@dataclass(frozen=True)
class Case:
    """One job.

    Attributes:
        zero: Added to `zero_optimization` of DeepSpeed's configuration.
        config: Added to the configuration.
        exact: Whether gradients can be averaged without rounding; else they are normal.
        read_back: Whether the dense update takes the gradient that DeepSpeed handed over (one step only).
        first: Which group comes first; those before it come last.
        apart: Whether a matrix of fewer elements than there are ranks is a group of its own: universal checkpoints are
            not for flats without any.
        named: Whether groups have the names of parameters.
    """

    stage: int
    method: str = "standard"
    dtype: str = "fp32"
    accumulate: int = 1
    clip: float = 0.0
    zero: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    exact: bool = True
    read_back: bool = False
    zero_init: bool = False
    first: int = 0
    apart: bool = True
    named: bool = True

    def __str__(self) -> str:
        extra = {**self.zero, **self.config}
        flags = [f"stage{self.stage}", self.method, self.dtype, f"gas{self.accumulate}", f"clip{self.clip:g}"]
        flags += (
            [f"{k}={v}" for k, v in extra.items()] + ["zero.Init"] * self.zero_init + ["rounded"] * (not self.exact)
        )
        return " ".join(flags)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator) * 0.05))
        self.frozen.requires_grad_(False)
        self.tied = self.e

    def forward(self, factors: dict[str, Tensor]) -> Tensor:
        half = (self.tied - self.tied.detach()) / 2  # in two uses of "e" half of the gradient each, which is exact
        uses = {n: getattr(self, n) for n in SHAPES} | {"e": self.e / 2 + half}
        return torch.stack([(p * factors[n]).sum().float() for n, p in uses.items()]).sum()


def factors(
    step: int, micro: int, rank: int, exact: bool = True, shapes: dict[str, tuple[int, ...]] = SHAPES
) -> dict[str, Tensor]:
    """A rank's factors of the weights: its gradient."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    if exact:
        unit = (3 if dist.is_initialized() and dist.get_world_size() == 3 else 1) / 8
        return {n: torch.randint(-8, 9, s, generator=generator) * unit for n, s in shapes.items()}
    return {n: torch.randn(s, generator=generator) for n, s in shapes.items()}


def groups_of(
    net: nn.Module, momentum: float | None = None, betas: Any = None, decay: float = 0.2, apart: bool = True
) -> list[dict[str, Any]]:
    """Six unequal matrices in one group, one of them a row, a frozen one and a tied one between them; other groups
    before and after AdamW's; at last a matrix of fewer elements than there may be ranks."""

    def named(*names: str) -> list[tuple[str, Tensor]]:
        return [(name, getattr(net, name)) for name in names if getattr(net, name).requires_grad]

    groups: list[dict[str, Any]] = [
        {"params": named("a", "b", "e", "frozen", "f", "c", "row"), "lr": 0.02},
        {"params": named("d"), "lr": 0.01, "weight_decay": decay},
        {"params": named("v"), "use_muon": False, "lr": 3e-3},
        {"params": named("heads"), "num_heads": 3, "lr": 0.03, "momentum": 0.9},
        {"params": named("tiny"), "lr": 0.05},
    ]
    if not apart:
        groups[1]["params"] += groups.pop()["params"]
    for group in groups if momentum is not None else ():
        group.update({"momentum": momentum} if group.get("use_muon", True) else {"betas": betas})
    return groups


@contextmanager
def _quiet() -> Iterator[Any]:
    """DeepSpeed as a module, without its log, compiled helpers and torch's notices about its calls."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        deepspeed = start_deepspeed("cpu")
        import_deepspeed()
        warnings.simplefilter("ignore")
        yield deepspeed


@contextmanager
def _quiet_import() -> Iterator[None]:
    with warnings.catch_warnings(), mock.patch.dict(os.environ, {"DS_ACCELERATOR": "cpu"}):
        warnings.simplefilter("ignore")
        yield


def config_of(case: Case) -> dict[str, Any]:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": case.accumulate,
        "gradient_clipping": case.clip,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": case.stage, **case.zero},
    }
    if case.dtype != "fp32":
        config[case.dtype] = {"enabled": True}
    for key, value in case.config.items():
        config[key] = {**config.get(key, {}), **value} if isinstance(value, dict) else value
    return config


class Job:
    """A model under DeepSpeed, and the same parameters dense in this process."""

    shapes: dict[str, tuple[int, ...]] = SHAPES
    make: Callable[[], Any] = Net
    groups: Callable[..., list[dict[str, Any]]] = staticmethod(groups_of)

    def __init__(self, deepspeed: Any, case: Case, **changed: Any) -> None:
        self.case = case
        if case.dtype == "fp16":  # torch computes it on any CPU
            deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[case.dtype]
        if case.zero_init:
            with deepspeed.zero.Init(config_dict_or_path=config_of(case)):
                self.net = self.make()
        else:
            self.net = self.make()
        self.dense = self.make()
        for p in self.dense.parameters():
            p.data = p.data.to(dtype).float()
        options: dict[str, Any] = {"orthogonalizer": Orthogonalizer(method=case.method)}
        halves = (0.5, (0.5, 0.95)) if case.read_back else (None, None)
        options |= {key: value for key, value in changed.items() if key != "audit" and value is not None}
        decay = 0.2
        if "variant" in options:  # Hyperball knows no decay
            options["weight_decay"] = decay = 0.0
        groups = self.groups(self.net, *halves, decay, case.apart)
        groups = [*groups[case.first :], *groups[: case.first]]
        for group in [] if case.named else groups:
            group["params"] = [p for _, p in group["params"]]
        self.optimizer = Muon(groups, lr=1e-3, audit=changed.get("audit", Audit()), **options)
        self.reference = Muon(self.groups(self.dense, *halves, decay, case.apart), lr=1e-3, **options)
        self.engine, *_ = deepspeed.initialize(model=self.net, optimizer=self.optimizer, config=config_of(case))
        self.begin()

    def begin(self) -> None:
        """Let errors be those of what changes from now on."""
        self.start = {n: p.detach().clone() for n, p in self.dense.named_parameters()}

    def said(self, number: int = 0) -> str:
        """Text of what DeepSpeed's part of a step raises; "": nothing."""
        return _said(lambda: self.train(number))

    def step(self, number: int) -> None:
        self.train(number)
        self.step_dense(number)

    def train(self, number: int) -> None:
        """DeepSpeed's part of a step."""
        for micro in range(self.case.accumulate):
            loss = self.engine(factors(number, micro, dist.get_rank(), self.case.exact, self.shapes))
            self.engine.backward(loss)
            self.engine.step()

    def step_dense(self, number: int) -> None:
        parts = self._parts(number)
        for name, p in self.dense.named_parameters():
            if p.requires_grad:
                p.grad = torch.stack([part[name] for part in parts]).double().mean(0).float()
        if self.case.read_back:
            self._read_back(number)
        self.reference.step()

    def _parts(self, number: int) -> list[dict[str, Tensor]]:
        """The gradient of each rank and micro-batch."""
        every = itertools.product(range(self.case.accumulate), range(dist.get_world_size()))
        return [factors(number, micro, rank, self.case.exact, self.shapes) for micro, rank in every]

    def _read_back(self, number: int) -> None:
        """Put what DeepSpeed handed over in the place of the dense gradients, which it must be but for rounding."""
        parts = self._parts(number)
        grads = {n: p.grad for n, p in self.dense.named_parameters() if p.grad is not None}
        norm = float(torch.cat([g.flatten() for g in grads.values()]).norm())
        factor = min(1.0, self.case.clip / (norm + 1e-6)) if self.case.clip else 1.0
        half = torch.finfo(torch.bfloat16 if self.case.dtype == "bf16" else torch.float32).eps / 2
        for name, grad in grads.items():
            found = 2 * self._handed_over(name)
            # A term is rounded when it is made, divided by the micro-batches and by the ranks, and a sum once for each
            # further term: each time by half an eps of at most the sum of all sizes. The norm that clips is a sum of
            # NUMEL squares, in fp32, each rounded when it is made and when it is added; its root halves that.
            sizes = torch.stack([part[name].abs() for part in parts]).mean(0)
            bound = (len(parts) + 2) * half * sizes + grad.abs() * (NUMEL + 4) * torch.finfo(torch.float32).eps / 2
            assert bool(((found - factor * grad).abs() <= bound).all()), name
            self.dense.get_parameter(name).grad = found

    def _handed_over(self, name: str) -> Tensor:
        """The first moment, after one step half of the gradient."""
        if self.case.stage > 0:
            return whole_momentum(getattr(self.net, name)).view(SHAPES[name])
        state = self.optimizer.state[self._copies()[name]]
        return state["exp_avg" if name == "v" else "momentum_buffer"]

    def _copies(self) -> dict[str, Tensor]:
        """The fp32 copies that DeepSpeed steps at stage 0."""
        stepped = [p for group in self.optimizer.param_groups for p in group["params"]]
        made = [n for group in self.reference.param_groups for n in group["param_names"]]
        return dict(zip(made, stepped, strict=True))

    def masters(self) -> dict[str, Tensor]:
        """DeepSpeed's fp32 copies as its own function shows them, which it does wrongly with round_robin_gradients."""
        if self.case.stage == 0:
            return {n: p.detach().clone() for n, p in self._copies().items()}
        return {n: whole_weight(getattr(self.net, n)).view(SHAPES[n]) for n in TRAINED}

    def weights(self) -> dict[str, Tensor]:
        """The model's own, and under another name the masters of half-precision ones. Collective at stage 3."""
        import deepspeed

        gathers = (
            deepspeed.zero.GatheredParameters(list(self.net.parameters())) if self.case.stage == 3 else nullcontext()
        )
        with gathers:
            own = {n: getattr(self.net, n).detach().clone() for n in TRAINED}
        if self.case.dtype == "fp32" or self.case.zero.get("round_robin_gradients"):
            return own
        return own | {f"{n} (master)": t for n, t in self.masters().items()}

    def check(self, names: Sequence[str] = TRAINED) -> None:
        """Weights have the dense ones' bits; else the relative Frobenius error of what the steps changed is named."""
        errors = {}
        for name, value in self.weights().items():
            plain = name.removesuffix(" (master)")
            expected = self.dense.get_parameter(plain).detach().to(value.dtype)
            errors[name] = _error(value, expected, self.start[plain].to(value.dtype)) if plain in names else 0.0
        assert {name: error for name, error in errors.items() if error} == {}


def _error(found: Tensor, expected: Tensor, start: Tensor) -> float:
    return 0.0 if torch.equal(found, expected) else float((found - expected).norm() / (expected - start).norm())


@contextmanager
def started(case: Case, **changed: Any) -> Iterator[Job]:
    """A job, ended afterwards."""
    with _quiet() as deepspeed:
        job = Job(deepspeed, case, **changed)
        yield job
        job.engine.destroy()


def _said(call: Callable[[], object]) -> str:
    """Text of what a call raises; "": nothing."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _momentum(optimizer: Muon, index: int) -> Tensor:
    return optimizer.state[optimizer.param_groups[index]["params"][0]]["exp_avg"]


def _held(p: Tensor) -> tuple[int, int] | None:
    """The elements of a parameter that DeepSpeed gave to this rank, by its own account."""
    part = getattr(p, "_hp_mapping", None)
    if part is not None:
        return part.lp_fragment_address.start, part.lp_fragment_address.start + part.lp_fragment_address.numel
    if hasattr(p, "ds_numel"):
        size = p.partition_numel()
        start = min(dist.get_rank() * size, p.ds_numel)
        return start, min(start + size, p.ds_numel)
    return None


Pools = dict[int, RankPool]


@pytest.fixture(scope="module")
def pools(deepspeed_pools: Pools) -> Pools:
    return deepspeed_pools


def _host(optimizer: Muon) -> zero.DeepSpeedHost:
    found = optimizer.hosts.find(zero.DeepSpeedHost)
    assert isinstance(found, zero.DeepSpeedHost)
    return found


@pytest.fixture(scope="module")
def two(pools: Pools) -> RankPool:
    return pools[2]


@pytest.fixture(scope="module")
def four(pools: Pools) -> RankPool:
    return pools[4]


# what an audit finds it finds in this arithmetic
FP32: dict[str, Any] = {"orthogonalizer": Orthogonalizer(dtype=torch.float32)}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
ROUND_ROBIN = {"round_robin_gradients": True}

# ------------------------------------------------------------------------------------------- the dense update

STRADDLING = [Case(1), Case(2, "gram", accumulate=2, zero=OFFLOAD), Case(3)]
# One start of DeepSpeed for several settings that do not hinder each other; each setting that docs/deepspeed.md names.
SETTINGS = [
    Case(0, accumulate=2),
    Case(0, dtype="bf16"),  # whose wrapper steps with zero gradients while it is made
    Case(1, zero=ROUND_ROBIN, accumulate=2),
    Case(1, zero={"reduce_scatter": False, "parameter_alignment": True}),
    Case(1, "gram", zero={**ROUND_ROBIN, **OFFLOAD, "parameter_alignment": True}),
    Case(1, dtype="bf16", config={"data_types": {"grad_accum_dtype": "fp32"}}, accumulate=2),  # BF16_Optimizer
    Case(2, "gram", zero={**ROUND_ROBIN, "contiguous_gradients": False}, accumulate=2),
    Case(2, zero={**ROUND_ROBIN, "overlap_comm": True, "reduce_bucket_size": 1000, "parameter_alignment": True}),
    Case(2, zero={"reduce_scatter": False, "contiguous_gradients": False}),
    Case(2, dtype="bf16", zero={**ROUND_ROBIN, **OFFLOAD}, accumulate=2),
    Case(1, dtype="fp16", config={"fp16": {"loss_scale": 1}}),
    Case(2, dtype="fp16", zero=ROUND_ROBIN, config={"fp16": {"loss_scale": 1024}}),
    Case(2, dtype="fp16", accumulate=2, config={"fp16": {"loss_scale": 0, "initial_scale_power": 8}}),
    Case(3, dtype="fp16", config={"fp16": {"loss_scale": 1024}}),
    Case(3, "gram", zero={"sub_group_size": 1000, "overlap_comm": False, "reduce_bucket_size": 1000}, accumulate=2),
    Case(3, zero={"reduce_scatter": False}, zero_init=True),
    Case(3, dtype="bf16", zero={**OFFLOAD, "offload_param": {"device": "cpu"}}),
]
# Gradients that DeepSpeed rounds or clips
ROUNDED = [
    (2, Case(1, dtype="bf16", exact=False, read_back=True)),
    (2, Case(2, clip=1.0, accumulate=2, read_back=True)),
    (2, Case(3, dtype="bf16", exact=False, read_back=True)),
    (3, Case(2, clip=1.0, exact=False, read_back=True)),
    (3, Case(3, exact=False, accumulate=2, read_back=True)),
    (4, Case(1, "gram", exact=False, accumulate=2, read_back=True)),
    (4, Case(2, clip=1.0, zero=OFFLOAD, read_back=True)),
    (4, Case(3, "gram", exact=False, clip=1.0, read_back=True)),
]
CASES = [
    *((2, case) for case in STRADDLING),
    *(((4, 3, 2, 3)[at % 4], case) for at, case in enumerate(SETTINGS)),
    (2, Case(0, dtype="fp16", config={"fp16": {"loss_scale": 1}})),
    *ROUNDED,
]


def _stepped(case: Case) -> float:
    steps = 1 if case.read_back else 2
    with started(case) as job:
        for number in range(steps):
            job.step(number)
        job.check()
        # The reference has moved: there is something to be wrong about. A step of lr 0.02 on a row, whose length
        # becomes 0.68 or more, moves it by 0.0136.
        assert min(float((job.dense.get_parameter(n) - job.start[n]).norm()) for n in MUON) > 0.013
        if case.clip:
            assert float(job.engine.get_global_grad_norm()) > 2 * case.clip
        if case in STRADDLING:
            _check_straddling(job)
        return job.optimizer.traffic.orthogonalized / steps


def _check_straddling(job: Job) -> None:
    """A matrix lies on both ranks, momentum is kept once, and DeepSpeed's own function shows the dense one's."""
    from deepspeed.utils import safe_get_full_optimizer_state

    parts: list[Any] = [None] * 2
    dist.all_gather_object(parts, _held(job.net.b))
    (first, edge), (same, last) = sorted(parts)
    assert (first, last) == (0, math.prod(SHAPES["b"])) and 0 < edge == same < last
    if job.case.stage < 3:
        padded = torch.tensor(sum(_momentum(job.optimizer, index).numel() for index in (0, 1, 3, 4)))
        dist.all_reduce(padded)
        assert padded - sum(math.prod(SHAPES[n]) for n in MUON) < 4 * 8  # padding of four groups
    for name in TRAINED:
        key = "exp_avg" if name == "v" else "momentum_buffer"
        found = safe_get_full_optimizer_state(getattr(job.net, name), "exp_avg").view(SHAPES[name])
        assert torch.equal(found, job.reference.state[job.dense.get_parameter(name)][key]), name


@pytest.mark.parametrize(("world", "case"), CASES, ids=str)
def test_flat_partitions_get_the_dense_update_at_every_setting(pools: Pools, world: int, case: Case) -> None:
    """Ranks do not know of each other at stage 0."""
    assert sum(pools[world].run(_stepped, case)) == (RUNS * world if case.stage == 0 else RUNS)  # each once in the job


def _overflow() -> None:
    with started(Case(2, dtype="fp16", config={"fp16": {"loss_scale": 0, "initial_scale_power": 17}})) as job:
        before, ran = job.weights(), job.optimizer.traffic.orthogonalized
        job.train(0)  # 2**17 does not fit in fp16
        assert all(torch.equal(before[n], w) for n, w in job.weights().items())
        assert job.optimizer.traffic.orthogonalized == ran
        assert not any(state["exp_avg"].any() for state in job.optimizer.state.values() if "exp_avg" in state)


def test_a_step_that_overflows_changes_nothing(two: RankPool) -> None:
    two.run(_overflow)


def _scheduled(stage: int) -> None:
    warmup = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.05, "warmup_num_steps": 4}}
    with started(Case(stage, config={"scheduler": warmup})) as job:
        for number in range(3):
            for mine, theirs in zip(job.reference.param_groups, job.optimizer.param_groups, strict=True):
                mine["lr"] = theirs["lr"]
            job.step(number)
        assert job.optimizer.param_groups[0]["lr"] not in (0.02, 0.0)
        job.check()


@pytest.mark.parametrize("stage", [2, 3])
def test_a_schedule_of_the_configuration_reaches_the_update(two: RankPool, stage: int) -> None:
    two.run(_scheduled, stage)


def _pieces(stage: int) -> tuple[str, int]:
    with started(Case(stage)) as job:
        job.step(0)
        held = sum(shard.numel() for inner in _host(job.optimizer)._cores for shard in inner.shards)
        return "\n".join(map(str, job.optimizer.plans)), held


@pytest.mark.parametrize("stage", [1, 3])
def test_the_plan_covers_every_matrix_with_what_deepspeed_says_each_rank_holds(two: RankPool, stage: int) -> None:
    (plan, mine), (other, theirs) = two.run(_pieces, stage)
    assert plan == other
    assert all(f"{name}[" in plan or f"\n{name} " in plan for name in MUON)
    assert mine + theirs == sum(math.prod(SHAPES[n]) for n in MUON)


# ------------------------------------------------------------------------------------------- what is refused


def _nothing(net: Net) -> None:
    pass


def _marked(net: Net) -> None:
    net.a.ds_is_replaced_module = True


def _marked_on_one_rank(net: Net) -> None:
    if dist.get_rank() == 1:
        _marked(net)


def _replaced(net: Net) -> None:
    """Replace a layer's weight as AutoTP does: another parameter, a part of the first, in its place."""
    net.a = nn.Parameter(net.a.detach()[:24].clone())


def _first_step(case: Case, change: Callable[[Net], object], options: dict[str, Any]) -> str:
    """Text of what initializing and a first step raise; "": nothing, and then there is momentum."""
    with _quiet() as deepspeed:
        net, engines = Net(), list[Any]()
        optimizer = Muon(groups_of(net), lr=1e-3, **{"orthogonalizer": Orthogonalizer(method="standard"), **options})
        first = net.a
        change(net)
        for group in optimizer.param_groups:  # as DeepSpeed's remapping of client optimizers does
            group["params"] = [net.a if p is first else p for p in group["params"]]

        def step() -> None:
            rows = len(net.a)
            engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config_of(case))
            engines.append(engine)
            inputs = factors(0, 0, dist.get_rank())
            engine.backward(engine({**inputs, "a": inputs["a"][:rows]}))
            before = [p.detach().clone() for p in net.parameters()]
            try:
                engine.step()
                assert _momentum(optimizer, 0).any()
            except ValueError:
                # at stage 3 they have been released
                assert case.stage == 3 or all(map(torch.equal, before, net.parameters()))
                raise

        said = _said(step)
        for engine in engines:
            engine.destroy()
        return said


BF16_MASTERS = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
MASTERS = Case(1, config={"bf16": BF16_MASTERS})
STORED = "DeepSpeed keeps and offloads state"
AT_ZERO_0 = "ValueError: at ZeRO 0 with fp16 DeepSpeed"  # divides by a scale that it has not multiplied the loss by
REFUSED: list[tuple[Case, Callable[[Net], object], dict[str, Any], str]] = [
    *(
        (case, change, {}, words)
        for case in (Case(0, dtype="bf16"), Case(1), Case(2, dtype="bf16"), Case(3))
        for change, words in ((_marked, "is a tensor-parallel shard"), (_replaced, "AutoTP, AutoEP"))
    ),
    (Case(1), _marked_on_one_rank, {}, "is a tensor-parallel shard"),
    (Case(1), _nothing, {"storage": Storage(momentum_dtype="int8")}, STORED),
    (MASTERS, _nothing, {"storage": Storage(momentum_dtype=torch.float32)}, "bf16_master_weights_and_grads"),
    (MASTERS, _nothing, {}, ""),
    *((Case(0, dtype="fp16", config={"fp16": {"loss_scale": scale}}), _nothing, {}, AT_ZERO_0) for scale in (0, 1000)),
]


@pytest.mark.parametrize(("case", "change", "options", "words"), REFUSED, ids=str)
def test_what_may_be_a_part_of_a_matrix_or_cannot_be_exact_is_refused_on_all(
    two: RankPool, case: Case, change: Any, options: dict[str, Any], words: str
) -> None:
    for said in two.run(_first_step, case, change, options):
        assert words in said
        assert bool(words) == bool(said)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"storage": Storage(momentum_dtype="int8")}, STORED),
        ({"storage": Storage(stochastic_rounding=True)}, "stochastic_rounding=True"),
        ({"tp_group": (0,)}, "ZeRO partitions of tensor-parallel shards"),
        ({"storage": Storage(momentum_device="cpu")}, "use offload_optimizer"),
    ],
    ids=["int8 momentum", "random rounding", "tp_group", "momentum on the CPU"],
)
def test_options_that_have_no_place_on_flats_are_refused(options: dict[str, Any], words: str) -> None:
    optimizer = Muon([nn.Parameter(torch.ones(4, 3))], lr=1e-3, **options)
    with pytest.raises(ValueError, match=words):
        zero.refuse_options(optimizer.keeper, optimizer.param_groups)


def test_a_parameter_that_is_marked_for_deepspeeds_own_muon_is_refused() -> None:
    """The configuration's "optimizer" marks it; DeepSpeed takes any optimizer with such a name for it."""
    marked: Any = nn.Parameter(torch.ones(4, 3))
    marked._hp_mapping, marked.use_muon = object(), True
    with pytest.raises(ValueError, match='Take "optimizer" out of the configuration'):
        slices_of(torch.ones(12), [marked])


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.19.7", pytest.raises(ValueError, match=r"before 0\.19\.8 .*Install deepspeed==0\.19\.8")),
        ("0.9.12", pytest.raises(ValueError, match="wrong gradients")),
        ("0.19.8+cpu", nullcontext()),
        *((version, pytest.warns(UserWarning, match=f"{version} is newer")) for version in ("0.19.9", "0.20.0", "1.0")),
    ],
    ids=str,
)
def test_an_older_deepspeed_is_refused_and_a_newer_one_warned_of(
    monkeypatch: pytest.MonkeyPatch, version: str, expected: AbstractContextManager[object]
) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(__version__=version))
    with expected:
        check_version()


# ------------------------------------------------------------------------------------------- DeepSpeed's JSON


def test_deepspeeds_own_json_makes_the_optimizer() -> None:
    params = {"lr": 1e-3, "muon_lr": 0.03, "weight_decay": 0.2, "betas": [0.8, 0.9]}
    config = {"zero_optimization": {"stage": 1}, "optimizer": {"type": "Muon", "params": params}}
    for tag in (False, True):
        model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 50))
        if tag:
            model[1].weight.use_muon = False
        optimizer, rest = from_config(model, config)
        assert rest == {"zero_optimization": {"stage": 1}, **REQUIRED}
        assert "optimizer" in config  # the caller's own is untouched
        assert not any(hasattr(p, "use_muon") for p in model.parameters())
        groups = optimizer.param_groups
        assert {(g["lr"], g["weight_decay"]) for g in groups if g["use_muon"]} == {(0.03, 0.2)}
        assert {g["lr"] for g in groups if not g["use_muon"]} == {1e-3}
        assert sum(len(g["params"]) for g in groups if g["use_muon"]) == (1 if tag else 2)


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {"muon_lr": 0.03},
        {"adam_lr": 1e-4},
        {"lr": 5e-3},
        {"lr": 5e-3, "adam_lr": 0, "eps": 1e-7},
        {"lr": 1e-3, "muon_lr": 0.03, "weight_decay": 0.01, "betas": [0.8, 0.9], "momentum": 0.9},
    ],
)
def test_a_json_says_and_leaves_out_what_it_does_with_deepspeeds_muon(params: dict[str, Any] | None) -> None:
    """Options of every parameter, biases and norms too: learning rate, decay and the rest of the half that it is in."""
    with _quiet_import():
        from deepspeed.runtime.engine import DeepSpeedEngine
        from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6, bias=False))
    mine, _ = from_config(model, {"optimizer": {"type": "Muon", "params": params}})
    for p in model.parameters():
        p.use_muon = p.ndim == 2
    theirs = MuonWithAuxAdam(DeepSpeedEngine._muon_param_groups(list(model.parameters()), params or {}))
    for p in model.parameters():
        found, expected = (
            next(group for group in optimizer.param_groups if any(p is q for q in group["params"]))
            for optimizer in (mine, theirs)
        )
        for key in ("use_muon", "lr", "weight_decay", *(["momentum"] if p.use_muon else ["betas", "eps"])):
            value = expected[key]
            assert found[key] == (tuple(value) if isinstance(value, list) else value), (tuple(p.shape), key)
        assert found.get("weight_decay_mode", "decoupled") == "decoupled"


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"ns_method": "auto"}, {}),
        ({"ns_method": "gram"}, {"orthogonalizer": Orthogonalizer(method="gram")}),
        (
            {"orthogonalizer": {"method": "gram", "dtype": "float32"}},
            {"orthogonalizer": Orthogonalizer("gram", "float32")},
        ),
        ({"orthogonalizer": {"dtype": "auto", "cuda_graphs": False}}, {"orthogonalizer": Orthogonalizer(dtype="auto")}),
        ({"exchange": {"route": "auto"}}, {}),
        ({"audit": {"every": 1000, "action": "warn"}}, {"audit": Audit(1000, action="warn")}),
        ({}, {}),
    ],
)
def test_a_json_says_options_of_the_whole_optimizer(params: dict[str, Any], expected: dict[str, Any]) -> None:
    optimizer, _ = from_config(nn.Linear(4, 8), {"optimizer": {"type": "Muon", "params": params}})
    assert optimizer.config == MuonConfig(**expected)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"optimizer": {"type": "Muon", "params": {"adam_lr": None}}}, "adam_lr is null"),
        ({"optimizer": {"type": "Muon", "params": {"betas": None}}}, "betas is null"),
        ({"optimizer": {"type": "AdamW", "params": {}}}, '"type": "Muon"'),
        ({"optimizer": {"type": "Muon", "params": {"lrate": 1}}}, "no keyword 'lrate'"),
        ({"optimizer": {"type": "Muon", "params": {"audit": {"evry": 9}}}}, "argument 'evry'"),
        ({"optimizer": {"type": "Muon", "params": {"exchange": "owner"}}}, "must be a shardmuon.Exchange"),
        ({"zero_allow_untested_optimizer": False}, "zero_allow_untested_optimizer: found False"),
        ({"optimizer": {"type": "Muon", "params": {"lr": "auto"}}}, "lr='auto' is text"),
        (
            {"optimizer": {"type": "Muon", "params": {"per_head_muon": True}}},
            "per_head_muon has no meaning .*num_heads",
        ),
        ({"optimizer": {"type": "Muon", "params": {"adam_w_mode": False}}}, "adam_w_mode is false"),
        ({"optimizer": {"type": "Muon", "params": {"storage": {"momentum_device": "cpu"}}}}, "offload_optimizer"),
        ({"tensor_parallel": {"autotp_size": 2}}, "autotp_size: found 2.* Write 0 or 1"),
        ({"expert_parallel": {"enabled": True}}, "expert_parallel.enabled: found true"),
        ({"zero_optimization": {"zero_hpz_partition_size": 2}}, "zero_hpz_partition_size: found 2"),
        ({"zero_optimization": {"mics_shard_size": 2}}, "mics_shard_size: found 2"),
        ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, "ZenFlow.* Leave it out"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}}, "ratio: found 0.5"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu", "super_offload": True}}}, "super_offload"),
    ],
)
def test_a_json_that_asks_for_something_else_is_refused(change: dict[str, Any], words: str) -> None:
    config: dict[str, Any] = {"optimizer": {"type": "Muon", "params": {"lr": 0.02}}, **change}
    with pytest.raises((ValueError, TypeError), match=words):
        from_config(nn.Linear(4, 4), config)


def _stepped_from_json(stage: int) -> tuple[bool, float]:
    with _quiet() as deepspeed:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 8))
        params = {"lr": 0.02, "adam_lr": 1e-3, "ns_method": "standard"}
        config = {**config_of(Case(stage)), "optimizer": {"type": "Muon", "params": params}}
        del config["gradient_clipping"]
        optimizer, config = from_config(model, config)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        before = [p.detach().clone() for p in model.parameters()]
        engine.backward(engine(torch.ones(2, 16)).square().sum())
        engine.step()
        moved = all(not torch.equal(a, p) for a, p in zip(before, model.parameters(), strict=True))
        ran = torch.tensor(float(optimizer.traffic.orthogonalized))
        dist.all_reduce(ran)
        clipped = engine.gradient_clipping()
        engine.destroy()
        return moved and ran.item() == 2, clipped


def test_the_optimizer_of_a_json_orthogonalizes_each_matrix_once(two: RankPool) -> None:
    """DeepSpeed clips where the configuration does not say so, as docs/deepspeed.md does."""
    assert two.run(_stepped_from_json, 2) == [(True, 1.0)] * 2


# ------------------------------------------------------------------------------------------- checkpoints


def _resumed(case: Case, folder: str) -> None:
    """Four steps with an audit each, a checkpoint and a new start between: those of one process."""
    audits = {"audit": Audit(every=1, samples=9), **FP32}
    with started(case, **audits) as job:
        for number in range(2):
            job.step(number)
        job.engine.save_checkpoint(folder, tag="here")
        for number in range(2, 4):
            job.step(number)
        job.check()
        expected = job.weights()
    with started(case, **audits) as again:
        again.engine.load_checkpoint(folder, tag="here")
        for number in range(2, 4):
            again.step(number)
        assert [n for n, w in again.weights().items() if not torch.equal(w, expected[n])] == []


SMALL = {"reduce_bucket_size": 500}
SUB_GROUPS = {"sub_group_size": 300, "stage3_param_persistence_threshold": 100, **SMALL}


@pytest.mark.parametrize(
    ("world", "case"),
    [
        (2, Case(1, dtype="bf16")),
        (2, Case(2, dtype="bf16")),
        (2, Case(3, dtype="bf16")),
        (3, Case(1, accumulate=2, zero={**ROUND_ROBIN, **OFFLOAD, **SMALL})),
        (4, Case(2, accumulate=2, zero={**ROUND_ROBIN, "contiguous_gradients": False, **SMALL})),
        (3, Case(3, accumulate=2, zero=SUB_GROUPS)),
    ],
    ids=str,
)
def test_a_checkpoint_resumes_bit_for_bit_with_every_step_audited(
    pools: Pools, world: int, case: Case, tmp_path: Path
) -> None:
    """Some with buckets smaller than a matrix."""
    pools[world].run(_resumed, case, str(tmp_path))


Saved = dict[str, tuple[Tensor, dict[str, Tensor]]]  # name -> weight and state


def _save(case: Case, folder: str, variant: str | None) -> Saved:
    """Two steps, then a checkpoint: the dense model's weights and state."""
    with started(case, variant=variant) as job:
        for number in range(2):
            job.step(number)
        job.engine.save_checkpoint(folder, tag="here")
        named = [(name, p) for name, p in job.dense.named_parameters() if p.requires_grad]
        return {name: (p.detach().clone(), dict(job.reference.state[p])) for name, p in named}


def _convert(folder: str, out: str) -> None:
    """DeepSpeed's tool, which is started as a program as a rule."""
    if dist.get_rank() == 0:
        with _quiet(), contextlib.redirect_stdout(io.StringIO()):
            tool = importlib.import_module("deepspeed.checkpoint.ds_to_universal")
            arguments = ["--input_folder", folder, "--output_folder", out, "--inject_missing_state"]
            arguments += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
            with mock.patch.object(sys, "argv", ["ds_to_universal", *arguments]):
                tool.main(tool.parse_arguments())
    dist.barrier()


def _load(case: Case, folder: str, saved: Saved, variant: str | None) -> None:
    """Load a universal checkpoint: two more steps are the dense ones, each group has its own options and counts."""
    with started(replace(case, config={"checkpoint": {"load_universal": True}}), variant=variant) as job:
        if variant:
            job.step(5)  # what this has kept is forgotten
        job.engine.load_checkpoint(folder, tag="here_universal", load_module_strict=False)
        job.step_dense(7)  # has state now, whose values are replaced
        for name, (weight, state) in saved.items():
            p = job.dense.get_parameter(name)
            p.data.copy_(weight)
            for key, value in state.items():
                job.reference.state[p][key].copy_(value)
        job.begin()
        for number in (7, 8):
            job.step(number)
        job.check()
        lrs = [0.02, 0.01, 3e-3, 0.03]
        assert [g["lr"] for g in job.optimizer.param_groups] == [*lrs[case.first :], *lrs[: case.first]]
        for states in (job.optimizer.state.values(), job.reference.state.values()):
            assert {float(state["step"]) for state in states if "step" in state} == {4.0}
        kept = [t for state in job.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
        assert len({t.untyped_storage().data_ptr() for t in kept}) == len(kept), "flats share state"


@pytest.mark.parametrize(
    ("world", "saved_first", "case", "variant"),
    [
        (4, 0, Case(1, apart=False), "normuon+hyperball"),
        (4, 0, Case(2, apart=False), None),
        (4, 0, Case(3, apart=False), None),
        (4, 0, Case(3, apart=False), "normuon+hyperball"),
        # DeepSpeed gives groups the options of the checkpoint's in their order, at stage 3 those of its first to all:
        # here AdamW's.
        (2, 2, Case(1, apart=False), None),
        (2, 2, Case(3, apart=False), None),
        (2, 2, Case(3, first=2, named=False, apart=False), None),
    ],
    ids=str,
)
def test_a_universal_checkpoint_goes_on_with_other_ranks_and_every_groups_own_options(
    pools: Pools, world: int, saved_first: int, case: Case, variant: str | None, tmp_path: Path
) -> None:
    saved = pools[2].run(_save, replace(case, first=saved_first), str(tmp_path), variant)[0]
    pools[2].run(_convert, str(tmp_path / "here"), str(tmp_path / "here_universal"))
    pools[world].run(_load, case, str(tmp_path), saved, variant)


def _load_fails(stage: int, folder: str) -> None:
    """A checkpoint that rank 1 alone cannot load, as a group of its optimizer's state is lost: what loading says, what
    the next steps say; and how it goes on from the same checkpoint, mended."""
    with started(Case(stage)) as job:
        job.step(0)
        job.engine.save_checkpoint(folder, tag="here")
        path = Path(job.engine._get_zero_ckpt_name(folder, "here"))
        whole = path.read_bytes()
        if dist.get_rank() == 1:
            saved = torch.load(path, weights_only=False)
            state = saved["optimizer_state_dict"]
            state = state["base_optimizer_state"] if stage < 3 else state["optimizer_state_dict"]
            state["param_groups"].pop()
            torch.save(saved, path)
        dist.barrier()
        began = time.monotonic()
        loading = _said(lambda: job.engine.load_checkpoint(folder, tag="here"))
        assert loading.startswith("ValueError") and "parameter group" in loading
        for number in (1, 2):
            assert job.said(number).startswith("ExchangeError: an earlier step was broken off")
        assert time.monotonic() - began < PROMPT
        path.write_bytes(whole)
        dist.barrier()
        job.engine.load_checkpoint(folder, tag="here")
        job.engine.optimizer.zero_grad()
        job.step(1)
        job.check(MUON)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_state_that_one_rank_cannot_load_is_refused_on_all(two: RankPool, stage: int, tmp_path: Path) -> None:
    """Others are in DeepSpeed's own collectives by then, or train on what they have loaded."""
    two.run(_load_fails, stage, str(tmp_path))


def _load_weights_only(stage: int, folder: str) -> None:
    """Hyperball keeps the norm that a weight has when it is loaded without optimizer states."""
    with started(Case(stage)) as job:
        job.step(0)
        job.engine.save_checkpoint(folder, tag="weights")
    with started(Case(stage), variant="hyperball") as job:
        job.train(0)
        job.engine.load_checkpoint(folder, tag="weights", load_optimizer_states=False)
        loaded = whole_weight(job.net.e).norm()
        job.train(1)
        assert_rounded(whole_weight(job.net.e).norm(), loaded, roundings=100, dtype=torch.float32)


@pytest.mark.xfail(strict=True, reason="DeepSpeed tells nobody of a load without optimizer states: for the new core")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_that_are_loaded_without_optimizer_states_keep_their_norm(
    two: RankPool, stage: int, tmp_path: Path
) -> None:
    two.run(_load_weights_only, stage, str(tmp_path))


# ------------------------------------------------------------------------------------------- audits and the model


@contextmanager
def _heard() -> Iterator[list[str]]:
    """Findings of audits that warn."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AuditWarning)
        yield found
    found += [str(w.message) for w in caught if w.category is AuditWarning]


def _half(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply_(params: Any, updates: Any, *rest: Any, **options: Any) -> Any:
        return original(params, [0.5 * u for u in updates], *rest, **options)

    return apply_


def _audited(stage: int) -> None:
    for broken in (False, True):
        with started(Case(stage), audit=Audit(every=1, samples=8, action="warn"), **FP32) as job:
            apply_ = _half(pipeline.apply_) if broken else pipeline.apply_
            with _heard() as found, mock.patch.object(pipeline, "apply_", apply_):
                for number in range(2):
                    job.step(number)
            # half of a matrix of two elements may look like another fault, too
            names = {text.split(": ")[2] for text in found if ": tiny: " not in text}
            assert bool(names) == broken
            assert names <= {"clipped_update", "scale_wrong", "update_differs"}
            calls: list[tuple[Callable[[], object], str]] = [
                (lambda: job.optimizer.prepare(), "optimizer.plans"),
                (lambda: audit(job.optimizer), r"Audit\(every=N\)"),
                (lambda: clip_grad_norm_(job.optimizer, 1.0), "gradient_clipping"),
                (lambda: clip_grad_norm_(job.net.parameters(), 1.0), "gradient_clipping"),
                (lambda: job.optimizer.plan, r"optimizer\.plans"),
            ]
            for refused, words in calls:
                with pytest.raises((ValueError, AttributeError), match=words):
                    refused()


@pytest.mark.parametrize("stage", [1, 3])
def test_audits_see_whole_matrices_through_partitions(two: RankPool, stage: int) -> None:
    two.run(_audited, stage)


def _turn(known: Any) -> None:
    """Plant a wrong map of a flat: each parameter lies where the next one does, as far as that reaches."""
    parts = [part for part in known.slices if part.numel]
    turned = dict(zip(map(id, parts), [*parts[1:], *parts[:1]], strict=True))
    for index, part in enumerate(known.slices):
        other = turned.get(id(part), part)
        room = known.flat.numel() - part.numel
        known.slices[index] = part._replace(offset=min(other.offset, room))


def _wrong_map(case: Case) -> str:
    """Return the error for a map that is wrong from the start; an audit meets one that becomes wrong."""
    original = zero.Flat.__init__

    def planted(self: Any, *args: Any) -> None:
        original(self, *args)
        _turn(self)

    with started(case) as job:
        before = job.weights()
        with mock.patch.object(zero.Flat, "__init__", planted):
            refused = job.said()
        assert "the fp32 weights that DeepSpeed steps are not the model's" in refused
        assert all(torch.equal(before[n], w) for n, w in job.weights().items())
    with started(case, audit=Audit(every=1, samples=1, action="warn"), **FP32) as job:
        with _heard() as healthy:
            job.step(0)
        for known in _host(job.optimizer)._flats.values():
            _turn(known)
            known.state.clear()
        with _heard() as named:
            job.step(1)
        assert healthy == []
        assert any("weights_elsewhere" in text for text in named)
    return refused


@pytest.mark.parametrize("case", [Case(1, zero=ROUND_ROBIN), Case(2, dtype="bf16"), Case(3)], ids=str)
def test_a_wrong_map_of_a_flat_is_refused_at_first_and_named_by_an_audit(two: RankPool, case: Case) -> None:
    assert len(set(two.run(_wrong_map, case))) == 1


def _unlike_model(stage: int, written: bool) -> None:
    """A weight that was written to the model alone, on one rank (`written`), or set by DeepSpeed's function alone; then
    what the error says has been done. Stage 3 has no `update_lp_params`."""
    with started(Case(stage)) as job:
        from deepspeed.utils import safe_set_full_fp32_param

        e, rank = job.net.e, dist.get_rank()
        wanted = job.dense.e.detach() * 2 if written else job.dense.e.detach().flip(0).clone()
        if not written:
            safe_set_full_fp32_param(e, wanted)
        elif rank == 1:
            (e if stage < 3 else e.ds_tensor).data.mul_(2)
        said = job.said()
        assert re.match(r"ValueError: ranks? [01,]+: e: the fp32 weights that DeepSpeed steps", said)
        assert ("update_lp_params()" in said) == (stage < 3)
        assert ("GatheredParameters([p], modifier_rank=0)" in said) == (stage == 3)
        assert "engine.optimizer.refresh_fp32_params()" in said
        if written:
            if rank == 0:
                (e if stage < 3 else e.ds_tensor).data.mul_(2)
            job.engine.optimizer.refresh_fp32_params()
        elif stage < 3:
            job.engine.optimizer.update_lp_params()
        else:
            import deepspeed

            with deepspeed.zero.GatheredParameters([e], modifier_rank=0):
                if rank == 0:
                    e.data.copy_(wanted)
            job.engine.optimizer.refresh_fp32_params()
        job.dense.e.data.copy_(wanted)
        job.begin()
        job.step(0)
        job.check()


@pytest.mark.parametrize(("stage", "written"), [(2, True), (3, True), (1, False), (2, False), (3, False)])
def test_weights_that_only_one_side_has_are_refused_with_a_way_that_there_is(
    two: RankPool, stage: int, written: bool
) -> None:
    two.run(_unlike_model, stage, written)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 13), nn.Linear(13, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Sparse(nn.Module):
    def __init__(self, ep_size: int) -> None:
        from deepspeed.moe.layer import MoE

        torch.manual_seed(0)
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.experts = MoE(8, Expert(), num_experts=4, ep_size=ep_size, k=1, use_residual=False)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x, balance, _ = self.experts(self.first(x))
        return self.last(x).square().mean() + 0.01 * balance


@contextmanager
def _sparse(stage: int, ep_size: int) -> Iterator[tuple[Any, Muon, Callable[[], None]]]:
    """Engine, optimizer and a step of a model with experts."""
    with _quiet() as deepspeed:
        net = Sparse(ep_size)
        groups = expert_groups(param_groups(net, lr=0.02))
        optimizer = Muon(groups, lr=0.02, orthogonalizer=Orthogonalizer(method="standard"))
        engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config_of(Case(stage)))

        def step() -> None:
            engine.backward(engine(torch.randn(40, 5, generator=torch.Generator().manual_seed(dist.get_rank()))))
            engine.step()

        yield net, optimizer, step
        engine.destroy()


def _experts(stage: int, ep_size: int) -> int:
    """Number of matrices done here. The first update is the dense one of DeepSpeed's gradient, of all experts."""
    with _sparse(stage, ep_size) as (net, optimizer, step):
        names = {name for group, _ in _host(optimizer).groups if group["use_muon"] for name in group["param_names"]}
        matrices = {name: p for name, p in net.named_parameters() if name in names}
        assert len(matrices) == 2 + 2 * 4 // ep_size  # first, last; up and down; no router
        before = {name: p.detach().clone() for name, p in matrices.items()}
        step()
        # The gradient is read back from the momentum, twice rounded; five steps enlarge that up to 485 times.
        bound = 2 * math.prod(a for a, _, _ in KELLER) * roundoff(torch.float32)
        for name, p in matrices.items():
            momentum = whole_momentum(p)
            dense = nn.Parameter(before[name].clone())
            dense.grad = momentum / (1 - 0.95)
            Muon([dense], lr=0.02, orthogonalizer=Orthogonalizer(method="standard")).step()
            assert float(momentum.norm()) > 0, name
            assert _error(whole_weight(p), dense.detach(), before[name]) <= bound, name
        return optimizer.traffic.orthogonalized


@pytest.mark.parametrize(("stage", "ep_size"), [(1, 1), (2, 1), (2, 2)])
def test_experts_are_stepped_over_the_ranks_that_share_them(two: RankPool, stage: int, ep_size: int) -> None:
    """Each rank has two experts of its own with ep_size=2, both have all four with ep_size=1."""
    assert sum(two.run(_experts, stage, ep_size)) == 2 + 2 * 4


# ------------------------------------------------------------------------------------------- all or nothing


def _fault_in_experts() -> None:
    """A step with a wrong option in the experts' group of rank 1, between two without."""
    with _sparse(2, 2) as (_, optimizer, step):
        for wrong in (False, True, False):
            experts = next(group for group, _ in _host(optimizer).groups if group.get("moe") and group["use_muon"])
            planted = mock.patch.dict(experts, {"momentum": 7.0}) if wrong and dist.get_rank() == 1 else nullcontext()
            with planted:
                said = _said(step)
            assert said.startswith("ValueError") and "momentum=7.0" in said if wrong else said == ""


def test_a_fault_in_one_ranks_own_experts_is_raised_on_all_before_any_group_is_stepped(two: RankPool) -> None:
    """The ranks that share the experts are not those that share the rest."""
    two.run(_fault_in_experts)


def _adamw_raises() -> AbstractContextManager[object]:
    original = zero.step_adamw

    def fails(groups: Any, *args: Any) -> None:
        if dist.get_rank() == 1 and any(not group["use_muon"] and group["params"] for group in groups):
            raise ValueError("planted in AdamW")
        original(groups, *args)

    return mock.patch.object(zero, "step_adamw", fails)


BROKEN: dict[str, tuple[dict[str, Any], Callable[[], AbstractContextManager[object]], tuple[str, str]]] = {
    # of all ranks, what they say
    "memory": (
        {},
        lambda: mock.patch.object(pipeline, "apply_", side_effect=RuntimeError("out of memory")),
        ("ExchangeError: .*out of memory",) * 2,
    ),
    # of rank 1 in a call for AdamW's group alone: others are at Muon's next group by then, and fail at once
    "adamw": ({}, _adamw_raises, ("ExchangeError: .*does not answer", "ValueError: planted in AdamW")),
    # between two groups
    "audit": (
        {"audit": Audit(every=1, samples=8), **FP32},
        lambda: mock.patch.object(pipeline, "apply_", _half(pipeline.apply_)),
        ("AuditError",) * 2,
    ),
}


def _broken(stage: int, how: str, folder: str) -> None:
    options, plant, words = BROKEN[how]
    with started(Case(stage), **options) as job:
        job.step(0)
        job.engine.save_checkpoint(folder)
        began = time.monotonic()
        with plant():
            assert re.match(words[dist.get_rank()], job.said(1), re.DOTALL)
            assert job.said(2).startswith("ExchangeError: an earlier step was broken off")
        assert time.monotonic() - began < PROMPT
        assert len(job.optimizer.param_groups) == 5
        job.engine.load_checkpoint(folder)
        job.engine.optimizer.zero_grad()
        job.step(1)
        job.check(MUON)


@pytest.mark.parametrize("how", BROKEN)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_training_step_that_broke_off_is_the_last_until_a_checkpoint_is_loaded(
    two: RankPool, stage: int, how: str, tmp_path: Path
) -> None:
    two.run(_broken, stage, how, str(tmp_path))


Plant = Callable[[Muon], AbstractContextManager[object]]


def _attempts(job: Job, plants: list[Plant], number: int) -> list[str]:
    """Errors of a step that is tried once with each fault on rank 1 alone, before it is made without any."""
    said: list[str] = []
    optimizer, original = job.optimizer, job.optimizer.step

    def step(*args: Any, **options: Any) -> Any:
        del optimizer.step  # type: ignore[method-assign]
        for plant in plants:
            groups = [(group, list(group["params"])) for group in optimizer.param_groups]
            with plant(optimizer) if dist.get_rank() == 1 else nullcontext():
                try:
                    original()
                    said.append("stepped")
                except ValueError as error:
                    said.append(str(error))
            optimizer.param_groups = [group for group, _ in groups]
            for group, params in groups:
                group["params"] = params
        return original(*args, **options)

    optimizer.step = step  # type: ignore[method-assign]
    job.step(number)
    return said


def _group_option(index: int, key: str, value: Any) -> Plant:
    return lambda optimizer: mock.patch.dict(_host(optimizer).groups[index][0], {key: value})


def _short_momentum(optimizer: Muon) -> AbstractContextManager[object]:
    flat = next(flat for flat, s in optimizer.state.items() if s["exp_avg_sq"].stride() == (0,))
    return mock.patch.dict(optimizer.state[flat], {"exp_avg": torch.zeros(3)})


def _raises(*names: str) -> Plant:
    """Functions that a step calls before the ranks agree."""
    where: Any = zero if len(names) == 1 else getattr(zero, names[0])
    return lambda optimizer: mock.patch.object(where, names[-1], side_effect=RuntimeError(f"planted in {names[-1]}"))


AT_FIRST = [
    *("swapper_of", "_options", "check_hyperparameters", "check_version", "refuse_options", "refuse_params"),
    *("refuse_swaps", "swapped_numel", "slices_of", "make_shard", "init_state", "differs_from_model"),
]


def _faults_on_one_rank(stage: int) -> None:
    with started(Case(stage)) as job:
        for name, said in zip(AT_FIRST, _attempts(job, [_raises(name) for name in AT_FIRST], 0), strict=True):
            assert f"planted in {name}" in said
        options = [_group_option(2, "lr", math.nan), _group_option(2, "betas", (0.9,)), _short_momentum]
        later = _attempts(job, [*options, _raises("Flat", "show")], 1)
        for word, said in zip(("lr", "betas", "momentum of a ZeRO partition", "planted in show"), later, strict=True):
            assert word in said
        _host(job.optimizer)._unchecked = True  # as if state had been loaded
        assert "planted in differs_from_model" in _attempts(job, [_raises("differs_from_model")], 2)[0]
        job.check()  # and nothing had changed


@pytest.mark.parametrize("stage", [1, 3])
def test_what_goes_wrong_on_one_rank_before_the_agreement_is_raised_on_all(two: RankPool, stage: int) -> None:
    two.run(_faults_on_one_rank, stage)


def _faults_in_every_function(stage: int) -> None:
    with started(Case(stage)) as job:
        numbers = itertools.count()
        job.step(next(numbers))
        known, passed = plant_in_all(job.optimizer, lambda: job.step(next(numbers)))
        assert {"instead_of_step", "_begin", "_restore_options", "_state", "swapper_of"} <= {*known}
        assert passed == []
        job.check()  # and nothing had changed


@pytest.mark.parametrize("stage", [1, 3])
def test_an_exception_in_any_function_before_the_agreement_is_raised_on_all(two: RankPool, stage: int) -> None:
    two.run(_faults_in_every_function, stage)
