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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
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
    ExchangeError,
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
from shardmuon.frameworks.deepspeed.partitions import check_version
from shardmuon.step import update as pipeline
from shardmuon.testing import RankError, RankPool
from shardmuon.testing.deepspeed import initialize, start_deepspeed, whole_momentum, whole_weight
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
}
MUON = ("a", "b", "e", "f", "c", "d", "heads")
TRAINED = (*MUON, "v")
NUMEL = sum(math.prod(SHAPES[n]) for n in TRAINED)
RUNS = 9  # six matrices and three heads


@dataclass(frozen=True)
class Case:
    """One job.

    Attributes:
        zero: Added to `zero_optimization` of DeepSpeed's configuration.
        config: Added to the configuration.
        exact: Whether gradients can be averaged without rounding; else they are normal.
        read_back: Whether the dense update takes the gradient that DeepSpeed handed over (one step only).
        adamw_last: Whether AdamW's group comes after all of Muon's.
        first: Which group comes first; those before it come last.
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
    adamw_last: bool = False
    first: int = 0
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

    def forward(self, factors: dict[str, Tensor]) -> Tensor:
        return torch.stack([(getattr(self, n) * factors[n]).sum().float() for n in SHAPES]).sum()


def factors(step: int, micro: int, rank: int, exact: bool = True) -> dict[str, Tensor]:
    """A rank's factors of the weights: its gradient."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    if exact:
        unit = (3 if dist.is_initialized() and dist.get_world_size() == 3 else 1) / 8
        return {n: torch.randint(-8, 9, s, generator=generator) * unit for n, s in SHAPES.items()}
    return {n: torch.randn(s, generator=generator) for n, s in SHAPES.items()}


def groups_of(
    net: nn.Module, momentum: float | None = None, betas: Any = None, adamw_last: bool = False, decay: float = 0.2
) -> list[dict[str, Any]]:
    """Five matrices of unequal sizes in one group, a frozen one between them; other groups before and after AdamW's."""

    def named(*names: str) -> list[tuple[str, Tensor]]:
        return [(name, getattr(net, name)) for name in names if getattr(net, name).requires_grad]

    groups: list[dict[str, Any]] = [
        {"params": named("a", "b", "e", "frozen", "f", "c"), "lr": 0.02},
        {"params": named("d"), "lr": 0.01, "weight_decay": decay},
        {"params": named("v"), "use_muon": False, "lr": 3e-3},
        {"params": named("heads"), "num_heads": 3, "lr": 0.03, "momentum": 0.9},
    ]
    for group in groups if momentum is not None else ():
        group.update({"momentum": momentum} if group.get("use_muon", True) else {"betas": betas})
    if adamw_last:
        groups.append(groups.pop(2))
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

    def __init__(self, deepspeed: Any, case: Case, **changed: Any) -> None:
        self.case = case
        if case.dtype == "fp16":  # torch computes it on any CPU
            deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[case.dtype]
        if case.zero_init:
            with deepspeed.zero.Init(config_dict_or_path=config_of(case)):
                self.net = Net()
        else:
            self.net = Net()
        self.dense = Net()
        for p in self.dense.parameters():
            p.data = p.data.to(dtype).float()
        options: dict[str, Any] = {"orthogonalizer": Orthogonalizer(method=case.method)}
        halves = (0.5, (0.5, 0.95)) if case.read_back else (None, None)
        variant = changed.get("variant")
        options |= {} if variant is None else {"variant": variant, "weight_decay": 0.0}  # Hyperball knows no decay
        decay = 0.2 if variant is None else 0.0
        groups = groups_of(self.net, *halves, case.adamw_last, decay)
        groups = [*groups[case.first :], *groups[: case.first]]
        for group in [] if case.named else groups:
            group["params"] = [p for _, p in group["params"]]
        self.optimizer = Muon(groups, lr=1e-3, **{**options, **changed})
        self.reference = Muon(groups_of(self.dense, *halves, case.adamw_last, decay), lr=1e-3, **options)
        self.engine, *_ = deepspeed.initialize(model=self.net, optimizer=self.optimizer, config=config_of(case))

    def step(self, number: int) -> None:
        for micro in range(self.case.accumulate):
            loss = self.engine(factors(number, micro, dist.get_rank(), self.case.exact))
            self.engine.backward(loss)
            self.engine.step()
        self._give_dense_gradients(number)
        if self.case.read_back:
            self._read_back(number)
        self.reference.step()

    def _parts(self, number: int) -> list[dict[str, Tensor]]:
        """The gradient of each rank and micro-batch."""
        every = itertools.product(range(self.case.accumulate), range(dist.get_world_size()))
        return [factors(number, micro, rank, self.case.exact) for micro, rank in every]

    def _give_dense_gradients(self, number: int) -> None:
        parts = self._parts(number)
        for name, p in self.dense.named_parameters():
            if p.requires_grad:
                p.grad = torch.stack([part[name] for part in parts]).double().mean(0).float()

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

    def errors(self, start: dict[str, Tensor]) -> dict[str, float]:
        """Relative Frobenius error of what the steps changed, by parameter; 0 only if all bits are equal."""
        out = {}
        for name, value in self.weights().items():
            plain = name.removesuffix(" (master)")
            expected = self.dense.get_parameter(plain).detach().to(value.dtype)
            out[name] = _error(value, expected, start[plain].to(value.dtype))
        return out


def _error(found: Tensor, expected: Tensor, start: Tensor) -> float:
    return 0.0 if torch.equal(found, expected) else float((found - expected).norm() / (expected - start).norm())


def run(case: Case, steps: int = 2) -> dict[str, Any]:
    with _quiet() as deepspeed:
        job = Job(deepspeed, case)
        start = {n: p.detach().clone() for n, p in job.dense.named_parameters()}
        for number in range(steps):
            job.step(number)
        out = {
            "errors": job.errors(start),
            "runs": job.optimizer.traffic.orthogonalized / steps,
            "held": {n: _held(getattr(job.net, n)) for n in MUON},
            "changed": {n: float((job.dense.get_parameter(n) - start[n]).norm()) for n in MUON},
            "buffers": sum(_momentum(job.optimizer, index).numel() for index in (0, 1, 3))
            if case.stage in (1, 2)
            else 0,
            "whole": _whole_momentum(job) if case in STRADDLING else 0.0,
            "norm": float(job.engine.get_global_grad_norm() or 0.0),
        }
        job.engine.destroy()
        return out


def _momentum(optimizer: Muon, index: int) -> Tensor:
    return optimizer.state[optimizer.param_groups[index]["params"][0]]["exp_avg"]


def _whole_momentum(job: Job) -> float:
    """Largest difference of what DeepSpeed's own function shows of any group's momentum to the dense one."""
    from deepspeed.utils import safe_get_full_optimizer_state

    worst = 0.0
    for name in (n for n in SHAPES if n != "frozen"):
        key = "exp_avg" if name == "v" else "momentum_buffer"
        found = safe_get_full_optimizer_state(getattr(job.net, name), "exp_avg").view(SHAPES[name])
        expected = job.reference.state[job.dense.get_parameter(name)][key]
        worst = max(worst, float((found - expected).abs().max()))
    return worst


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


ADAMW_EPS = 1e-8  # torch's default
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
ROUND_ROBIN = {"round_robin_gradients": True}
STRADDLING = [Case(1), Case(2, "gram", accumulate=2, zero=OFFLOAD), Case(3)]


def _check(found: list[dict[str, Any]], runs: int = RUNS) -> None:
    for mine in found:
        assert {n: e for n, e in mine["errors"].items() if e} == {}
        # The reference has moved: there is something to be wrong about. A step of lr 0.01 on 20 orthogonal rows, whose
        # singular values become 0.68 or more, moves it by 0.01 * sqrt(20) * 0.68 = 0.03.
        assert min(mine["changed"].values()) > 0.03
    assert sum(mine["runs"] for mine in found) == runs  # each once in the job


@pytest.mark.parametrize("case", STRADDLING, ids=str)
def test_a_weight_across_two_ranks_gets_the_update_of_the_whole_matrix(two: RankPool, case: Case) -> None:
    found = two.run(run, case)
    numel = math.prod(SHAPES["b"])
    parts = sorted(mine["held"]["b"] for mine in found)
    assert parts[0][0] == 0
    assert 0 < parts[0][1] == parts[1][0] < parts[1][1] == numel  # "b" lies on both ranks
    _check(found)
    assert found[0]["whole"] == 0.0
    if case.stage < 3:
        padded = sum(mine["buffers"] for mine in found)
        assert padded - sum(math.prod(SHAPES[n]) for n in MUON) < 16  # momentum is kept once, not on every rank


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


@pytest.mark.parametrize(
    ("world", "case"),
    [((4, 3, 2, 3)[at % 4], case) for at, case in enumerate(SETTINGS)],
    ids=str,
)
def test_settings_of_deepspeed_change_no_bit(pools: Pools, case: Case, world: int) -> None:
    """Five unequal matrices in a group; at stage 0 the ranks do not know of each other."""
    _check(pools[world].run(run, case), RUNS * world if case.stage == 0 else RUNS)


@pytest.mark.parametrize("scale", [0, 1000])
def test_fp16_at_stage_0_is_refused_unless_its_scale_is_1(two: RankPool, scale: int) -> None:
    """DeepSpeed 0.19.8 divides gradients there by a loss scale that it has not multiplied the loss by."""
    with pytest.raises(RankError, match=r"ValueError: at ZeRO 0 with fp16 DeepSpeed .* ZeRO stage 1"):
        two.run(run, Case(0, dtype="fp16", config={"fp16": {"loss_scale": scale}}))
    _check(two.run(run, Case(0, dtype="fp16", config={"fp16": {"loss_scale": 1}})), 2 * RUNS)


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


@pytest.mark.parametrize(
    ("world", "case"),
    ROUNDED,
    ids=str,
)
def test_the_gradient_that_deepspeed_rounds_and_clips_is_stepped_as_it_is(pools: Pools, world: int, case: Case) -> None:
    found = pools[world].run(run, case, 1)
    _check(found)
    if case.clip:
        assert found[0]["norm"] > 2 * case.clip


def _resumed(case: Case, folder: str) -> dict[str, float]:
    with _quiet() as deepspeed:
        job = Job(deepspeed, case)
        for number in range(2):
            job.step(number)
        job.engine.save_checkpoint(folder, tag="here")
        for number in range(2, 4):
            job.step(number)
        expected = job.weights()
        job.engine.destroy()
        again = Job(deepspeed, case)
        again.engine.load_checkpoint(folder, tag="here")
        for number in range(2, 4):
            again.step(number)
        found = again.weights()
        again.engine.destroy()
        return {n: float((found[n] - expected[n]).abs().max()) for n in found}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_checkpoint_resumes_bit_for_bit(two: RankPool, stage: int, tmp_path: Path) -> None:
    for differences in two.run(_resumed, Case(stage, dtype="bf16"), str(tmp_path)):
        assert set(differences.values()) == {0.0}


def _overflow() -> tuple[bool, int, list[float]]:
    with _quiet() as deepspeed:
        job = Job(deepspeed, Case(2, dtype="fp16", config={"fp16": {"loss_scale": 0, "initial_scale_power": 17}}))
        before, ran = job.weights(), job.optimizer.traffic.orthogonalized
        job.engine.backward(job.engine(factors(0, 0, dist.get_rank())))
        job.engine.step()  # 2**17 does not fit in fp16
        after = job.weights()
        out = all(torch.equal(before[n], after[n]) for n in before), job.optimizer.traffic.orthogonalized - ran
        job.engine.destroy()
        return *out, [float(s["exp_avg"].norm()) for s in job.optimizer.state.values() if "exp_avg" in s]


def test_a_step_that_overflows_changes_nothing(two: RankPool) -> None:
    for same, runs, momentum in two.run(_overflow):
        assert same
        assert runs == 0
        assert not any(momentum)


def _scheduled(stage: int) -> list[float]:
    case = Case(
        stage, config={"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.05, "warmup_num_steps": 4}}}
    )
    with _quiet() as deepspeed:
        job = Job(deepspeed, case)
        start = {n: p.detach().clone() for n, p in job.dense.named_parameters()}
        for number in range(3):
            for mine, theirs in zip(job.reference.param_groups, job.optimizer.param_groups, strict=True):
                mine["lr"] = theirs["lr"]
            job.step(number)
        lrs = [g["lr"] for g in job.optimizer.param_groups]
        errors = job.errors(start)
        job.engine.destroy()
        return [*lrs, *errors.values()]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_schedule_of_the_configuration_reaches_the_update(two: RankPool, stage: int) -> None:
    for lrs_and_errors in two.run(_scheduled, stage):
        assert lrs_and_errors[0] not in (0.02, 0.0)
        assert lrs_and_errors[4:] == [0.0] * len(TRAINED)


def _refused(change: Callable[[Net], object], options: dict[str, Any], case: Case) -> str:
    with _quiet() as deepspeed:
        net = Net()
        optimizer = Muon(groups_of(net), lr=1e-3, **options)
        change(net)
        engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config_of(case))
        engine.backward(engine(factors(0, 0, dist.get_rank())))
        before = [p.detach().clone() for p in net.parameters()]
        try:
            engine.step()
        except ValueError as error:
            assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
            return str(error)
        finally:
            engine.destroy()
        return "stepped"


def _nothing(net: Net) -> None:
    pass


def _tensor_parallel(net: Net) -> None:
    net.a.ds_is_replaced_module = True


def _tensor_parallel_on_one_rank(net: Net) -> None:
    if dist.get_rank() == 1:
        _tensor_parallel(net)


def test_a_shard_on_one_rank_and_an_option_that_cannot_be_exact_are_refused_on_all(two: RankPool) -> None:
    for message in two.run(_refused, _tensor_parallel_on_one_rank, {}, Case(1)):
        assert "is a tensor-parallel shard" in message
    for message in two.run(_refused, _nothing, {"storage": Storage(momentum_dtype="int8")}, Case(1)):
        assert "DeepSpeed keeps and offloads state" in message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"storage": Storage(momentum_dtype="int8")}, "DeepSpeed keeps and offloads state"),
        ({"storage": Storage(stochastic_rounding=True)}, "stochastic_rounding=True"),
        ({"tp_group": (0,)}, "ZeRO partitions of tensor-parallel shards"),
        ({"storage": Storage(momentum_device="cpu")}, "use offload_optimizer"),
    ],
    ids=["int8 momentum", "random rounding", "tp_group", "momentum on the CPU"],
)
def test_what_cannot_be_exact_is_refused(options: dict[str, Any], words: str) -> None:
    optimizer = Muon([nn.Parameter(torch.ones(4, 3))], lr=1e-3, **options)
    with pytest.raises(ValueError, match=words):
        zero.refuse_options(optimizer.keeper, optimizer.param_groups)


def _replaced(net: Net) -> None:
    """Replace a layer's weight as AutoTP does: another parameter, a part of the first, in its place."""
    net.a = nn.Parameter(net.a.detach()[:24].clone())


def _refused_with_another(change: Callable[[Net], object], case: Case) -> str:
    with _quiet() as deepspeed:
        net = Net()
        optimizer = Muon(groups_of(net), lr=1e-3, orthogonalizer=Orthogonalizer(method="standard"))
        first = net.a
        change(net)
        for group in optimizer.param_groups:  # as DeepSpeed's remapping of client optimizers does
            group["params"] = [net.a if p is first else p for p in group["params"]]
        engine, rows = None, len(net.a)
        try:
            engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config_of(case))
            inputs = factors(0, 0, dist.get_rank())
            engine.backward(engine({**inputs, "a": inputs["a"][:rows]}))
            engine.step()
        except ValueError as error:
            return str(error)
        finally:
            if engine is not None:
                engine.destroy()
        return "stepped"


@pytest.mark.parametrize("case", [Case(0, dtype="bf16"), Case(1), Case(2, dtype="bf16"), Case(3)], ids=str)
@pytest.mark.parametrize(
    ("change", "words"),
    [(_tensor_parallel, ("is a tensor-parallel shard",)), (_replaced, ("AutoTP, AutoEP",))],
    ids=["marked", "replaced"],
)
def test_a_part_of_a_matrix_is_never_taken_for_a_matrix(
    two: RankPool, change: Any, words: tuple[str, ...], case: Case
) -> None:
    for message in two.run(_refused_with_another, change, case):
        assert any(word in message for word in words)


def _pieces(case: Case) -> tuple[str, list[tuple[int, int]]]:
    with _quiet() as deepspeed:
        job = Job(deepspeed, case)
        job.step(0)
        plan = "\n".join(map(str, job.optimizer.plans))
        shards = [shard for inner in _host(job.optimizer)._cores for shard in inner.shards]
        held = [(s._shardmuon_flat.start, s.numel()) for s in shards]
        job.engine.destroy()
        return plan, held


@pytest.mark.parametrize("stage", [1, 3])
def test_the_plan_covers_every_matrix_with_what_deepspeed_says_each_rank_holds(two: RankPool, stage: int) -> None:
    plans, held = zip(*two.run(_pieces, replace(Case(1), stage=stage)), strict=True)
    assert plans[0] == plans[1]
    for name in MUON:
        assert f"{name}[" in plans[0] or f"\n{name} " in plans[0]
    total = sum(numel for _, numel in itertools.chain(*held))
    assert total == sum(math.prod(SHAPES[n]) for n in MUON)


@pytest.mark.parametrize(
    ("version", "words"),
    [("0.19.7", "before 0.19.8 .*Install deepspeed==0.19.8"), ("0.9.12", "wrong gradients"), ("0.19.8+cpu", None)],
)
def test_a_deepspeed_that_is_known_to_be_wrong_is_refused(
    monkeypatch: pytest.MonkeyPatch, version: str, words: str | None
) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(__version__=version))
    with pytest.raises(ValueError, match=words) if words else nullcontext():
        check_version()


@pytest.mark.parametrize("version", ["0.19.9", "0.20.0", "1.0"])
def test_a_newer_deepspeed_is_warned_of(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(__version__=version))
    with pytest.warns(UserWarning, match=f"{version} is newer than 0.19.8"):
        check_version()


def _from_config(
    config: dict[str, Any], tag: bool
) -> tuple[list[tuple[bool, float, float]], dict[str, Any], list[bool]]:
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 50))
    if tag:
        model[1].weight.use_muon = False
    optimizer, rest = from_config(model, config)
    return optimizer, rest, [hasattr(p, "use_muon") for p in model.parameters()]


def test_deepspeeds_own_json_makes_the_optimizer() -> None:
    config = {
        "zero_optimization": {"stage": 1},
        "optimizer": {
            "type": "Muon",
            "params": {"lr": 1e-3, "muon_lr": 0.03, "weight_decay": 0.2, "betas": [0.8, 0.9]},
        },
    }
    optimizer, rest, tags = _from_config(config, False)
    groups = [(g["use_muon"], g["lr"], g["weight_decay"]) for g in optimizer.param_groups]
    assert (True, 0.03, 0.2) in groups
    assert {lr for use_muon, lr, _ in groups if not use_muon} == {1e-3}
    assert rest == {"zero_optimization": {"stage": 1}, **REQUIRED}
    assert "optimizer" in config  # the caller's own is untouched
    optimizer, _, tags = _from_config(config, True)
    assert not any(tags)
    assert sum(len(g["params"]) for g in optimizer.param_groups if g["use_muon"]) == 1


@pytest.mark.parametrize(
    "params", [None, {}, {"muon_lr": 0.03}, {"adam_lr": 1e-4}, {"lr": 5e-3}, {"lr": 5e-3, "adam_lr": 0, "eps": 1e-7}]
)
def test_what_a_json_does_not_say_is_as_deepspeed_has_it(params: dict[str, Any] | None) -> None:
    with _quiet_import():
        from deepspeed.runtime.engine import DeepSpeedEngine
        from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam
    layer = nn.Linear(4, 8)
    layer.weight.use_muon, layer.bias.use_muon = True, False
    theirs = MuonWithAuxAdam(DeepSpeedEngine._muon_param_groups(list(layer.parameters()), params or {}))
    mine, _ = from_config(layer, {"optimizer": {"type": "Muon", "params": params}})
    for found, expected in zip(mine.param_groups, theirs.param_groups, strict=True):
        keys = ("lr", "weight_decay", *(["momentum"] if expected["use_muon"] else ["betas", "eps"]))
        assert [found[key] for key in keys] == [expected[key] for key in keys]


def test_a_json_decays_what_deepspeeds_muon_decays() -> None:
    """Every parameter, biases and norms too: learning rate, decay and the rest of the half that it is in."""
    with _quiet_import():
        from deepspeed.runtime.engine import DeepSpeedEngine
        from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6, bias=False))
    params = {"lr": 1e-3, "muon_lr": 0.03, "weight_decay": 0.01, "betas": [0.8, 0.9], "momentum": 0.9}
    mine, _ = from_config(model, {"optimizer": {"type": "Muon", "params": params}})
    for p in model.parameters():
        p.use_muon = p.ndim == 2
    theirs = MuonWithAuxAdam(DeepSpeedEngine._muon_param_groups(list(model.parameters()), params))
    for p in model.parameters():
        found, expected = (
            next(group for group in optimizer.param_groups if any(p is q for q in group["params"]))
            for optimizer in (mine, theirs)
        )
        assert found["use_muon"] == expected["use_muon"]
        for key in ("lr", "weight_decay", *(["momentum"] if p.use_muon else ["betas", "eps"])):
            value = expected[key]
            assert found[key] == (tuple(value) if isinstance(value, list) else value), (tuple(p.shape), key)
        assert found["weight_decay"] == 0.01
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


Saved = dict[str, tuple[Tensor, dict[str, Tensor]]]  # name -> weight and state


def _save(case: Case, folder: str, variant: str | None) -> Saved:
    """Two steps, then a checkpoint: the dense model's weights and state."""
    with _quiet() as deepspeed:
        job = Job(deepspeed, case, variant=variant)
        for number in range(2):
            job.step(number)
        job.engine.save_checkpoint(folder, tag="here")
        job.engine.destroy()
        out = {}
        for name, p in job.dense.named_parameters():
            if p.requires_grad:
                out[name] = p.detach().clone(), dict(job.reference.state[p])
        return out


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


def _load(
    case: Case, folder: str, saved: Saved, variant: str | None
) -> tuple[list[float], dict[str, float], list[set[float]], int]:
    """Load a universal checkpoint on another number of ranks: learning rates, errors after two more steps, what the
    flats and the dense parameters then count, and how many state tensors two flats have in common."""
    with _quiet() as deepspeed:
        universal = replace(case, config={**case.config, "checkpoint": {"load_universal": True}})
        job = Job(deepspeed, universal, variant=variant)
        if variant:
            job.step(5)  # what this has kept is forgotten
        job.engine.load_checkpoint(folder, tag="here_universal", load_module_strict=False)
        job._give_dense_gradients(7)
        job.reference.step()  # has state now, whose values are replaced
        for name, (weight, state) in saved.items():
            p = job.dense.get_parameter(name)
            p.data.copy_(weight)
            for key, value in state.items():
                job.reference.state[p][key].copy_(value)
        job.step(7)
        job.step(8)
        lrs = [g["lr"] for g in job.optimizer.param_groups]
        errors = job.errors({n: w for n, (w, _) in saved.items()})
        counts = [
            {float(state["step"]) for state in states if "step" in state}
            for states in (job.optimizer.state.values(), job.reference.state.values())
        ]
        kept = [t for state in job.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
        shared = len(kept) - len({t.untyped_storage().data_ptr() for t in kept})
        job.engine.destroy()
        return lrs, errors, counts, shared


@pytest.mark.parametrize(
    ("stage", "variant"), [(1, "normuon+hyperball"), (2, None), (3, None), (3, "normuon+hyperball")]
)
def test_a_universal_checkpoint_goes_on_with_other_ranks(
    two: RankPool, four: RankPool, stage: int, variant: str | None, tmp_path: Path
) -> None:
    saved = two.run(_save, Case(stage), str(tmp_path), variant)[0]
    two.run(_convert, str(tmp_path / "here"), str(tmp_path / "here_universal"))
    for lrs, errors, counts, shared in four.run(_load, Case(stage), str(tmp_path), saved, variant):
        assert errors == dict.fromkeys(TRAINED, 0.0)
        assert counts == [{4.0}, {4.0}]
        assert shared == 0
        assert lrs == [0.02, 0.01, 3e-3, 0.03]


@pytest.mark.parametrize(
    ("stage", "saved_first", "first", "named"),
    [(1, 2, 0, True), (3, 2, 0, True), (3, 2, 2, False)],
)
def test_a_universal_checkpoint_leaves_every_group_its_own_options(
    two: RankPool, stage: int, saved_first: int, first: int, named: bool, tmp_path: Path
) -> None:
    """DeepSpeed gives them those of the checkpoint's groups in their order, at stage 3 those of its first to all: here
    AdamW's."""
    saving = Case(stage, first=saved_first, named=named)
    saved = two.run(_save, saving, str(tmp_path), None)[0]
    two.run(_convert, str(tmp_path / "here"), str(tmp_path / "here_universal"))
    for lrs, errors, counts, shared in two.run(_load, replace(saving, first=first), str(tmp_path), saved, None):
        lrs_as_made = [0.02, 0.01, 3e-3, 0.03]
        assert lrs == [*lrs_as_made[first:], *lrs_as_made[:first]]
        assert errors == dict.fromkeys(TRAINED, 0.0)
        assert counts == [{4.0}, {4.0}]
        assert shared == 0


# what an audit finds it finds in this arithmetic
FP32: dict[str, Any] = {"orthogonalizer": Orthogonalizer(dtype=torch.float32)}


def _audited(stage: int, broken: bool) -> list[str]:
    with _quiet() as deepspeed, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AuditWarning)
        job = Job(deepspeed, Case(stage), audit=Audit(every=1, samples=8, action="warn"), **FP32)
        with mock.patch.object(pipeline, "apply_", _half(pipeline.apply_) if broken else pipeline.apply_):
            for number in range(2):
                job.step(number)
        for refused, words in (
            (lambda: job.optimizer.prepare(), "optimizer.plans"),
            (lambda: audit(job.optimizer), r"Audit\(every=N\)"),
            (lambda: clip_grad_norm_(job.optimizer, 1.0), "gradient_clipping"),
            (lambda: clip_grad_norm_(job.net.parameters(), 1.0), "gradient_clipping"),
        ):
            with pytest.raises(ValueError, match=words):
                refused()
        with pytest.raises(AttributeError, match=r"optimizer\.plans"):
            job.optimizer.plan  # noqa: B018
        job.engine.destroy()
        return sorted({str(w.message).split(": ")[2] for w in caught if w.category is AuditWarning})


def _half(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply_(params: Any, updates: Any, *rest: Any, **options: Any) -> Any:
        return original(params, [0.5 * u for u in updates], *rest, **options)

    return apply_


@pytest.mark.parametrize("stage", [1, 3])
def test_audits_see_whole_matrices_through_partitions(two: RankPool, stage: int) -> None:
    assert two.run(_audited, stage, False) == [[], []]
    for found in two.run(_audited, stage, True):
        assert found
        assert set(found) <= {"clipped_update", "scale_wrong", "update_differs"}


def _swapped(known: Any) -> None:
    """Plant a wrong map of a flat: each parameter lies where the next one does, as far as that reaches."""
    parts = [part for part in known.slices if part.numel]
    turned = dict(zip(map(id, parts), [*parts[1:], parts[0]], strict=True))
    for index, part in enumerate(known.slices):
        other = turned.get(id(part), part)
        room = known.flat.numel() - part.numel
        known.slices[index] = part._replace(offset=min(other.offset, room))


def _wrong_map(case: Case) -> tuple[str, bool, list[str], list[str]]:
    """Errors for a map that is wrong from the start, and of one that an audit meets."""
    with _quiet() as deepspeed, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AuditWarning)
        job = Job(deepspeed, case, audit=Audit(every=1, samples=1, action="warn"), **FP32)
        before = job.weights()
        original = zero.Flat.__init__

        def planted(self: Any, *args: Any) -> None:
            original(self, *args)
            _swapped(self)

        refused = ""
        with mock.patch.object(zero.Flat, "__init__", planted):
            job.engine.backward(job.engine(factors(0, 0, dist.get_rank())))
            try:
                job.engine.step()
            except ValueError as error:
                refused = str(error)
        unchanged = all(torch.equal(before[n], w) for n, w in job.weights().items())
        job.engine.destroy()
        job = Job(deepspeed, case, audit=Audit(every=1, samples=1, action="warn"), **FP32)
        job.step(0)
        healthy = [str(w.message) for w in caught if w.category is AuditWarning]
        for known in _host(job.optimizer)._flats.values():
            _swapped(known)
        for inner in _host(job.optimizer)._cores:
            inner.state.clear()
        job.step(1)
        named = [str(w.message) for w in caught if w.category is AuditWarning][len(healthy) :]
        job.engine.destroy()
        return refused, unchanged, healthy, named


@pytest.mark.parametrize("case", [Case(1, zero=ROUND_ROBIN), Case(2, dtype="bf16"), Case(3)], ids=str)
def test_a_wrong_map_of_a_flat_is_refused_at_first_and_named_by_an_audit(two: RankPool, case: Case) -> None:
    found = two.run(_wrong_map, case)
    for refused, unchanged, healthy, named in found:
        assert "the fp32 weights that DeepSpeed steps are not the model's" in refused
        assert unchanged
        assert healthy == []
        assert any("weights_elsewhere" in text for text in named)
    assert len({refused for refused, *_ in found}) == 1


def _written_after_the_start(stage: int) -> tuple[str, str, dict[str, float]]:
    """Weights that are written to the model alone, on one rank; and after DeepSpeed has been told of them."""
    with _quiet() as deepspeed:
        job = Job(deepspeed, Case(stage))
        targets = [job.net.e] if stage < 3 else [job.net.e.ds_tensor]
        if dist.get_rank() == 1:
            targets[0].data.mul_(2)
        message = _refusal(job, 0)
        for target in targets:
            if dist.get_rank() == 0:
                target.data.mul_(2)
        with torch.no_grad():
            job.dense.e.mul_(2)
        job.engine.optimizer.refresh_fp32_params()
        start = {n: p.detach().clone() for n, p in job.dense.named_parameters()}
        again = _refusal(job, 0)
        job._give_dense_gradients(0)
        job.reference.step()
        errors = job.errors(start)
        job.engine.destroy()
        return message, again, errors


def _refusal(job: Job, number: int) -> str:
    job.engine.backward(job.engine(factors(number, 0, dist.get_rank())))
    try:
        job.engine.step()
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stage", [2, 3])
def test_weights_that_only_the_model_has_are_named_before_the_first_update(two: RankPool, stage: int) -> None:
    for message, again, errors in two.run(_written_after_the_start, stage):
        assert re.match(r"ranks? [01,]+: e: the fp32 weights that DeepSpeed steps", message)
        assert "refresh_fp32_params" in message
        assert again == ""
        assert not any(errors.values())


def _set_before_the_first_step(stage: int) -> tuple[str, dict[str, float]]:
    """Errors for weights that DeepSpeed's function has set, and errors after what it says has been done."""
    with _quiet() as deepspeed:
        from deepspeed.utils import safe_set_full_fp32_param

        job = Job(deepspeed, Case(stage))
        wanted = job.dense.e.detach().flip(0).clone()
        safe_set_full_fp32_param(job.net.e, wanted)
        message = _refusal(job, 0)
        if stage == 3:
            with deepspeed.zero.GatheredParameters([job.net.e], modifier_rank=0):
                if dist.get_rank() == 0:
                    job.net.e.data.copy_(wanted)
            job.engine.optimizer.refresh_fp32_params()
        else:
            job.engine.optimizer.update_lp_params()
        job.dense.e.data.copy_(wanted)
        start = {n: p.detach().clone() for n, p in job.dense.named_parameters()}
        job.step(0)
        errors = job.errors(start)
        job.engine.destroy()
        return message, errors


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_set_before_the_first_step_are_refused_with_a_way_that_there_is(two: RankPool, stage: int) -> None:
    """Stage 3 has no `update_lp_params`."""
    for message, errors in two.run(_set_before_the_first_step, stage):
        assert re.match(r"ranks? [01,]+: e: the fp32 weights that DeepSpeed steps", message)
        assert ("update_lp_params()" in message) == (stage < 3)
        assert ("GatheredParameters([p], modifier_rank=0)" in message) == (stage == 3)
        assert "engine.optimizer.refresh_fp32_params()" in message
        assert not any(errors.values())


class Language(nn.Module):
    """A table under either name of embeddings, matrices and biases."""

    def __init__(self, table: str, bias: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        if table:
            setattr(self, table, nn.Embedding(32, 8))
        self.table, self.fc, self.out = table, nn.Linear(8, 16, bias), nn.Linear(16, 32, bias)

    def forward(self, tokens: Tensor) -> Tensor:
        x = getattr(self, self.table)(tokens) if self.table else torch.eye(8)[tokens]
        return nn.functional.cross_entropy(self.out(torch.tanh(self.fc(x))), tokens)


def _section_left(stage: int, table: str, section: bool, by_call: bool = False) -> str:
    """Error for a client optimizer beside DeepSpeed's Muon in the configuration.

    Args:
        by_call: Whether DeepSpeed is given a function that makes the optimizer.
    """
    with _quiet() as deepspeed:
        net, config = Language(table, bool(table)), config_of(Case(stage))
        if section:
            config["optimizer"] = {"type": "Muon", "params": {"lr": 0.02}}

        def make(params: object = None) -> Muon:
            return Muon(net, lr=0.02) if table else Muon([*net.named_parameters()], lr=0.02)

        engine = None
        try:
            engine, *_ = deepspeed.initialize(model=net, optimizer=make if by_call else make(), config=config)
            engine.backward(engine(torch.arange(8)))
            engine.step()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            if engine is not None:
                engine.destroy()
        return "stepped"


TAKE_OUT = 'Take "optimizer" out of the configuration'


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(
    ("table", "words"), [("wte", "KeyError: 'momentum'"), ("embed", "TypeError: narrow()"), ("", "ValueError: ")]
)
def test_deepspeeds_muon_beside_a_client_optimizer_is_told_by_us_or_the_docs(
    two: RankPool, stage: int, table: str, words: str
) -> None:
    """DeepSpeed marks parameters for its own Muon by the configuration, and takes any class of that name for it. It
    fails in its backward, before shardmuon is asked, unless there is but one group of matrices."""
    docs = (Path(__file__).parents[1] / "docs" / "deepspeed.md").read_text()
    found = two.run(_section_left, stage, table, True)
    assert any(said.startswith(words) for said in found)
    for said in found:  # a rank may hold none of the table
        assert said.startswith(("KeyError: 'momentum'", words))
        assert f"`{words}`" in docs if table else TAKE_OUT in said
    assert two.run(_section_left, stage, table, False) == ["stepped"] * 2


def test_deepspeeds_muon_beside_a_client_optimizer_does_nothing_at_stages_0_and_3(two: RankPool) -> None:
    for stage in (0, 3):
        assert two.run(_section_left, stage, "wte", True) == ["stepped"] * 2
        assert two.run(_section_left, stage, "wte", True, True) == ["stepped"] * 2


def _adamw_fails_on_one_rank(stage: int, folder: str) -> tuple[list[str], float, dict[str, float]]:
    """A call for AdamW's group alone, between two of Muon's: what that training step says, the next one, and errors of
    one after a checkpoint."""
    with _quiet() as deepspeed:
        job = Job(deepspeed, Case(stage))
        start = {n: p.detach().clone() for n, p in job.dense.named_parameters()}
        job.step(0)
        job.engine.save_checkpoint(folder)
        original = zero.step_adamw

        def fails(groups: Any, *args: Any) -> None:
            if any(not group["use_muon"] and group["params"] for group in groups):
                raise ValueError("planted in AdamW")
            original(groups, *args)

        began = time.monotonic()
        with mock.patch.object(zero, "step_adamw", fails) if dist.get_rank() == 1 else nullcontext():
            said = [_attempt(partial(_engine_step, job, number)) for number in (1, 2)]
        took = time.monotonic() - began
        job.engine.load_checkpoint(folder)
        job.engine.optimizer.zero_grad()
        job.step(1)
        errors = job.errors(start)
        job.engine.destroy()
        return said, took, errors


def _engine_step(job: Job, number: int) -> None:
    job.engine.backward(job.engine(factors(number, 0, dist.get_rank())))
    job.engine.step()


@pytest.mark.parametrize("stage", [1, 3])
def test_what_one_rank_raises_in_adamws_own_call_is_the_last_step_of_all(
    two: RankPool, stage: int, tmp_path: Path
) -> None:
    """Others are at Muon's next group by then: they fail at once, in place of waiting for the time-out."""
    (other, *_), (failed, *_) = found = two.run(_adamw_fails_on_one_rank, stage, str(tmp_path))
    assert other[0].startswith("ExchangeError") and "does not answer" in other[0]
    assert failed[0] == "ValueError: planted in AdamW"
    for (_, later), took, errors in found:
        assert later.startswith("ExchangeError: an earlier step was broken off")
        assert took < PROMPT
        assert {errors[n] for n in MUON} == {0.0}


ODD = {"wide": (5, 211), "tiny": (1, 2), "frozen": (9, 9), "square": (29, 29), "row": (1, 33), "tall": (97, 3)}


class Odd(nn.Module):
    """Tied weights, a frozen one among them, matrices of one row; more ranks than elements in a group."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.bias = nn.Parameter(torch.randn(3, generator=generator))
        for name, shape in ODD.items():
            module = nn.Module()
            module.weight = nn.Parameter(torch.randn(shape, generator=generator) * 0.05)
            setattr(self, name, module)
        self.again = self.square  # tied
        self.frozen.weight.requires_grad_(False)

    def forward(self, step: int, rank: int, unit: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        uses = [self.bias, *(getattr(self, name).weight for name in (*ODD, "again"))]
        drawn = [torch.randint(-8, 9, p.shape, generator=generator) * (unit / 8) for p in uses]
        return torch.stack([(p * d).sum().float() for p, d in zip(uses, drawn, strict=True)]).sum()

    def groups(self) -> list[dict[str, Any]]:
        """AdamW's first; four unequal ones and one whose only matrix has fewer elements than there are ranks."""
        named = {name: ("weights." + name, getattr(self, name).weight) for name in ODD}
        return [
            {"params": [("bias", self.bias)], "use_muon": False, "lr": 1e-3},
            {"params": [named[name] for name in ("wide", "frozen", "square", "row", "tall")], "lr": 0.02},
            {"params": [named["tiny"]], "lr": 0.05, "weight_decay": 0.3},
        ]


def _odd(stage: int, settings: dict[str, Any], folder: str) -> tuple[list[str], list[str]]:
    """Parameters that are not the dense ones after four steps with an audit each, a checkpoint and a new start between;
    and what audits say."""
    case = Case(stage, accumulate=3, zero=settings, config={"gradient_accumulation_steps": 3})
    unit, world = (3 if dist.get_world_size() == 3 else 1) * 3, dist.get_world_size()
    options: dict[str, Any] = {"orthogonalizer": Orthogonalizer("standard", torch.float32)}
    dense = Odd()
    reference = Muon(dense.groups(), lr=1e-3, **options)
    with _quiet() as deepspeed, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AuditWarning)
        for start in (0, 2):
            net = Odd()
            optimizer = Muon(net.groups(), lr=1e-3, audit=Audit(every=1, samples=9, action="warn"), **options)
            engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config_of(case))
            if start:
                engine.load_checkpoint(folder, tag="odd")
            for step in range(3 * start, 3 * start + 6):
                engine.backward(engine(step, dist.get_rank(), unit))
                engine.step()
                for rank in range(world):
                    (dense(step, rank, unit) / (3 * world)).backward()
                if step % 3 == 2:
                    reference.step()
                    reference.zero_grad()
            engine.save_checkpoint(folder, tag="odd")
            with deepspeed.zero.GatheredParameters(list(net.parameters())) if stage == 3 else nullcontext():
                found = {n: p.detach().clone() for n, p in net.named_parameters()}
            engine.destroy()
    wrong = [n for n, p in dense.named_parameters() if not torch.equal(p.detach(), found[n])]
    return wrong, [str(w.message) for w in caught if w.category is AuditWarning]


SMALL = {"reduce_bucket_size": 500}
SUB_GROUPS = {"sub_group_size": 300, "stage3_param_persistence_threshold": 100, **SMALL}


@pytest.mark.parametrize(
    ("world", "stage", "settings"),
    [
        (3, 1, {**ROUND_ROBIN, **OFFLOAD, **SMALL}),
        (4, 2, {**ROUND_ROBIN, "contiguous_gradients": False, **SMALL}),
        (3, 3, SUB_GROUPS),
    ],
)
def test_an_odd_model_is_stepped_as_one_process_would_across_a_restart(
    pools: Pools, world: int, stage: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Three micro-batches, buckets smaller than a matrix, every step audited."""
    for wrong, said in pools[world].run(_odd, stage, settings, str(tmp_path)):
        assert wrong == []
        assert said == []


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


def _experts(stage: int, ep_size: int) -> tuple[dict[str, float], int]:
    """Matrix -> error of the first update to the dense one of DeepSpeed's gradient; number of matrices done here."""
    with _quiet() as deepspeed:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        net = Sparse(ep_size)
        groups = expert_groups(param_groups(net, lr=0.02))
        options: dict[str, Any] = {"orthogonalizer": Orthogonalizer(method="standard")}
        optimizer = Muon(groups, lr=0.02, **options)
        matrices = {n: p for g in groups if g["use_muon"] for n, p in zip(g["param_names"], g["params"], strict=True)}
        engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config_of(Case(stage)))
        before = {name: p.detach().clone() for name, p in matrices.items()}
        generator = torch.Generator().manual_seed(dist.get_rank())
        engine.backward(engine(torch.randn(40, 5, generator=generator)))
        engine.step()
        errors = {}
        for name, p in matrices.items():
            momentum = safe_get_full_optimizer_state(p, "exp_avg").view(p.shape)
            dense = nn.Parameter(before[name].clone())
            dense.grad = momentum / (1 - 0.95)
            Muon([dense], lr=0.02, **options).step()
            assert float(momentum.norm()) > 0, name
            errors[name] = _error(safe_get_full_fp32_param(p).view(p.shape), dense.detach(), before[name])
        ran = optimizer.traffic.orthogonalized
        engine.destroy()
        return errors, ran


@pytest.mark.parametrize(("stage", "ep_size"), [(1, 1), (2, 1), (2, 2)])
def test_experts_are_stepped_over_the_ranks_that_share_them(two: RankPool, stage: int, ep_size: int) -> None:
    """Each rank has two experts of its own with ep_size=2, both have all four with ep_size=1."""
    found = two.run(_experts, stage, ep_size)
    assert all(len(errors) == 2 + 2 * 4 // ep_size for errors, _ in found)  # first, last; up and down; no router
    # The gradient is read back from the momentum, twice rounded; five steps enlarge that up to 485 times.
    slope = math.prod(a for a, _, _ in KELLER)
    assert max(max(errors.values()) for errors, _ in found) <= 2 * slope * roundoff(torch.float32)
    assert sum(count for _, count in found) == 2 + 2 * 4


def _fault_in_experts() -> list[str]:
    """Errors of two steps: with a wrong option in the experts' group of rank 1, and then without."""
    with _quiet() as deepspeed:
        net = Sparse(2)
        optimizer = Muon(
            expert_groups(param_groups(net, lr=0.02)),
            lr=1e-3,
            orthogonalizer=Orthogonalizer(method="standard"),
        )
        engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config_of(Case(2)))
        said = []
        for number in range(3):
            experts = next(group for group, _ in _host(optimizer).groups if group.get("moe") and group["use_muon"])
            wrong = number == 1 and dist.get_rank() == 1
            generator = torch.Generator().manual_seed(dist.get_rank())
            engine.backward(engine(torch.randn(40, 5, generator=generator)))
            with mock.patch.dict(experts, {"momentum": 7.0}) if wrong else nullcontext():
                try:
                    engine.step()
                    said.append("stepped")
                except ValueError as error:
                    said.append(str(error))
        engine.destroy()
        return said


def test_a_fault_in_one_ranks_own_experts_is_raised_on_all_before_any_group_is_stepped(two: RankPool) -> None:
    """The ranks that share the experts are not those that share the rest."""
    for first, wrong, after in two.run(_fault_in_experts):
        assert (first, after) == ("stepped", "stepped")
        assert "momentum=7.0" in wrong


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
ALWAYS = ["swapper_of", "_options", "init_state", "check_hyperparameters"]


def _faults_on_one_rank(stage: int) -> tuple[list[str], list[str], list[str], dict[str, float]]:
    with _quiet() as deepspeed:
        job = Job(deepspeed, Case(stage))
        start = {n: p.detach().clone() for n, p in job.dense.named_parameters()}
        first = _attempts(job, [_raises(name) for name in AT_FIRST], 0)
        options = [_group_option(2, "lr", math.nan), _group_option(2, "betas", (0.9,)), _short_momentum]
        later = _attempts(job, [*options, *map(_raises, ALWAYS), _raises("Flat", "show")], 1)
        _host(job.optimizer)._unchecked = True  # as if state had been loaded
        loaded = _attempts(job, [_raises("differs_from_model")], 2)
        errors = job.errors(start)
        job.engine.destroy()
        return first, later, loaded, errors


@pytest.mark.parametrize("stage", [1, 3])
def test_what_goes_wrong_on_one_rank_before_the_agreement_is_raised_on_all(two: RankPool, stage: int) -> None:
    for first, later, loaded, errors in two.run(_faults_on_one_rank, stage):
        for name, message in zip(AT_FIRST, first, strict=True):
            assert f"planted in {name}" in message
        assert "lr" in later[0]
        assert "betas" in later[1]
        assert "momentum of a ZeRO partition" in later[2]
        for name, message in zip([*ALWAYS, "show"], later[3:], strict=True):
            assert f"planted in {name}" in message
        assert ["planted in differs_from_model" in message for message in loaded] == [True]
        assert not any(errors.values())  # and nothing had changed


def _faults_in_every_function(stage: int) -> tuple[list[str], list[str], dict[str, float]]:
    with _quiet() as deepspeed:
        job = Job(deepspeed, Case(stage))
        start = {n: p.detach().clone() for n, p in job.dense.named_parameters()}
        numbers = itertools.count()
        job.step(next(numbers))
        known, passed = plant_in_all(job.optimizer, lambda: job.step(next(numbers)))
        errors = job.errors(start)
        job.engine.destroy()
        return known, passed, errors


@pytest.mark.parametrize("stage", [1, 3])
def test_an_exception_in_any_function_before_the_agreement_is_raised_on_all(two: RankPool, stage: int) -> None:
    for known, passed, errors in two.run(_faults_in_every_function, stage):
        assert {"instead_of_step", "_begin", "_restore_options", "_state", "swapper_of"} <= {*known}
        assert passed == []
        assert not any(errors.values())  # and nothing had changed


def _broken_then_loaded(stage: int, folder: str) -> tuple[str, int, dict[str, float]]:
    with _quiet() as deepspeed:
        job = Job(deepspeed, Case(stage))
        start = {n: p.detach().clone() for n, p in job.dense.named_parameters()}
        job.step(0)
        job.engine.save_checkpoint(folder)
        job.engine.backward(job.engine(factors(1, 0, dist.get_rank())))
        fails = mock.patch.object(pipeline, "apply_", side_effect=RuntimeError("out of memory"))
        with fails, pytest.raises(ExchangeError) as broken:
            job.engine.step()
        groups = len(job.optimizer.param_groups)
        job.engine.load_checkpoint(folder)
        job.step(1)
        errors = job.errors(start)
        job.engine.destroy()
        return str(broken.value), groups, errors


@pytest.mark.parametrize("stage", [1, 3])
def test_a_step_that_broke_off_goes_on_from_a_checkpoint(two: RankPool, stage: int, tmp_path: Path) -> None:
    for broken, groups, errors in two.run(_broken_then_loaded, stage, str(tmp_path)):
        assert "out of memory" in broken
        assert groups == 4
        assert {errors[n] for n in MUON} == {0.0}


def _attempt(call: Callable[[], object]) -> str:
    """Return what an attempt raises."""
    try:
        call()
    except (ValueError, ExchangeError) as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def _load_fails(stage: int, folder: str) -> tuple[list[str], float, dict[str, float]]:
    """A checkpoint that rank 1 alone cannot load, as a group of its optimizer's state is lost: what loading says, what
    the next steps say; and how it goes on from the same checkpoint, mended."""
    with _quiet() as deepspeed:
        job = Job(deepspeed, Case(stage))
        start = {n: p.detach().clone() for n, p in job.dense.named_parameters()}
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
        said = [_attempt(lambda: job.engine.load_checkpoint(folder, tag="here"))]
        said += [_attempt(partial(_engine_step, job, number)) for number in (1, 2)]
        took = time.monotonic() - began
        path.write_bytes(whole)
        dist.barrier()
        job.engine.load_checkpoint(folder, tag="here")
        job.engine.optimizer.zero_grad()
        job.step(1)
        errors = job.errors(start)
        job.engine.destroy()
        return said, took, errors


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_state_that_one_rank_cannot_load_is_refused_on_all(two: RankPool, stage: int, tmp_path: Path) -> None:
    """Others are in DeepSpeed's own collectives by then, or train on what they have loaded."""
    for (loading, *steps), took, errors in two.run(_load_fails, stage, str(tmp_path)):
        assert loading.startswith("ValueError") and "parameter group" in loading
        assert all(text.startswith("ExchangeError: an earlier step was broken off") for text in steps)
        assert took < PROMPT
        assert {errors[n] for n in MUON} == {0.0}


def _audit_raises(stage: int) -> tuple[list[str], int]:
    with _quiet() as deepspeed:
        job = Job(deepspeed, Case(stage), audit=Audit(every=1, samples=8), **FP32)
        said = []
        with mock.patch.object(pipeline, "apply_", _half(pipeline.apply_)):
            for _ in range(2):
                job.engine.backward(job.engine(factors(1, 0, dist.get_rank())))
                try:
                    job.engine.step()
                except Exception as error:
                    said.append(f"{type(error).__name__}: {error}")
        groups = len(job.optimizer.param_groups)
        job.engine.destroy()
        return said, groups


@pytest.mark.parametrize("stage", [1, 3])
def test_an_audit_that_raises_between_two_groups_asks_for_a_checkpoint(two: RankPool, stage: int) -> None:
    for said, groups in two.run(_audit_raises, stage):
        assert groups == 4
        assert said[0].startswith("AuditError")
        assert said[1].startswith("ExchangeError: an earlier step was broken off")


def _rounded_masters(stage: int, options: dict[str, Any]) -> tuple[str, float]:
    rounded = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    with _quiet() as deepspeed:
        net, said, kept = Net(), "", 0.0
        optimizer = Muon(groups_of(net), lr=1e-3, **options)
        config = config_of(Case(stage, config={"bf16": rounded}))
        engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
        engine.backward(engine(factors(0, 0, dist.get_rank())))
        try:
            engine.step()
            kept = float(_momentum(optimizer, 0).abs().sum())
        except ValueError as error:
            said = str(error)
        engine.destroy()
        return said, kept


def test_momentum_of_bf16_masters_is_kept_or_refused(two: RankPool) -> None:
    for said, kept in two.run(_rounded_masters, 1, {}):
        assert not said
        assert kept > 0
    for said, kept in two.run(_rounded_masters, 1, {"storage": Storage(momentum_dtype=torch.float32)}):
        assert "momentum_dtype=torch.float32" in said
        assert "bf16_master_weights_and_grads" in said
        assert kept == 0.0


def _load_weights_only(stage: int, folder: str) -> tuple[float, float]:
    """Norms of a weight that Hyperball keeps: as it was loaded without optimizer states, and a step later."""
    with _quiet():
        engines = []
        for number in range(2):
            torch.manual_seed(number)
            model = nn.Linear(12, 24, bias=False)
            model.weight.data.mul_(1 + 3 * number)
            optimizer = Muon([("w", model.weight)], lr=0.02, variant="hyperball", weight_decay=0.0)
            config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}}
            engine = initialize(model, optimizer, config, "cpu")
            engines.append((model, engine))
            engine.backward(engine(torch.ones(4, 12)).square().mean())
            engine.step()
        engines[0][1].save_checkpoint(folder, tag="weights")
        model, engine = engines[1]
        engine.load_checkpoint(folder, tag="weights", load_optimizer_states=False)
        loaded = float(whole_weight(model.weight).norm())
        engine.backward(engine(torch.ones(4, 12)).square().mean())
        engine.step()
        later = float(whole_weight(model.weight).norm())
        for _, engine in engines:
            engine.destroy()
        return loaded, later


@pytest.mark.xfail(strict=True, reason="DeepSpeed tells nobody of a load without optimizer states: for the new core")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_that_are_loaded_without_optimizer_states_keep_their_norm(
    two: RankPool, stage: int, tmp_path: Path
) -> None:
    for loaded, later in two.run(_load_weights_only, stage, str(tmp_path)):
        assert_rounded(torch.tensor(later), torch.tensor(loaded), roundings=100, dtype=torch.float32)
