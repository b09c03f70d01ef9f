"""DeepSpeed's parallel models: stages of its pipeline engine, AutoTP's shards, experts of its MoE layers.

The gradient that reached the optimizer is read back from the momentum, which is half of it: exact in binary.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deepspeed_job import HALF, Case, dense_update, quiet, said_by
from torch import Tensor, nn

from shardmuon import Muon, param_groups
from shardmuon.frameworks.deepspeed import expert_groups
from shardmuon.frameworks.deepspeed.host import DeepSpeedHost
from shardmuon.testing import RankPool
from shardmuon.testing.frameworks import initialize, whole_momentum, whole_weight

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed: shardmuon[deepspeed]"),
]


@pytest.fixture(scope="module")
def two(deepspeed_pools: dict[int, RankPool]) -> RankPool:
    return deepspeed_pools[2]


# ------------------------------------------------------------------------------------------------- pipeline stages

SIZES = ((16, 24), (24, 41), (41, 8))
STAGES = 2


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output.float() - target).square().mean()


def _in_stages(zero: int, dtype: str) -> tuple[int, int, dict[str, bool], list[float]]:
    """Pipeline stage, matrices that this rank orthogonalized, parameter -> whether it has the dense update's bits, and
    losses."""
    with quiet() as deepspeed:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(*sizes), nn.ReLU()) for sizes in SIZES]
        net = deepspeed.pipe.PipelineModule(layers, num_stages=STAGES, loss_fn=_loss, partition_method="uniform")
        optimizer = Muon(net, **HALF)
        config = Case(zero, dtype=dtype, accumulate=2).written() | {"train_micro_batch_size_per_gpu": 4}
        engine = initialize(net, optimizer, config)
        matrices = {name: p for name, p in net.named_parameters() if p.ndim == 2}
        before = {name: p.detach().float().clone() for name, p in matrices.items()}
        generator = torch.Generator().manual_seed(engine.grid.get_data_parallel_rank())
        inputs, targets = torch.randn(4, SIZES[0][0], generator=generator), torch.rand(4, 8, generator=generator)
        batches = itertools.repeat((inputs.bfloat16() if dtype == "bf16" else inputs, targets))
        losses = [float(engine.train_batch(batches))]
        ran, equal = optimizer.traffic.orthogonalized, {}
        partitioned = zero > 0 or dtype == "bf16"
        for name, p in matrices.items():
            momentum = whole_momentum(p) if partitioned else optimizer.state[p]["momentum_buffer"]
            found = whole_weight(p) if partitioned else p.detach()
            equal[name] = torch.equal(found, dense_update(before[name], momentum))
        losses += [float(engine.train_batch(batches)) for _ in range(3)]
        stage = engine.grid.get_stage_id()
        engine.destroy()
    importlib.import_module("deepspeed.utils.groups").mpu = None  # else later engines of these ranks would have stages
    return stage, ran, equal, losses


@pytest.mark.parametrize(("zero", "dtype", "runs"), [(0, "fp32", 2), (1, "fp32", 1), (1, "bf16", 1), (0, "bf16", 1)])
def test_every_stage_steps_its_matrices_as_one_process_would(
    deepspeed_pools: dict[int, RankPool], zero: int, dtype: str, runs: int
) -> None:
    """Two stages, two data-parallel ranks each. Without partitions both of a stage's ranks do all its matrices."""
    found = deepspeed_pools[4].run(_in_stages, zero, dtype)
    names = []
    for stage in range(STAGES):
        first, second = [mine for mine in found if mine[0] == stage]
        assert first[2] == second[2] == dict.fromkeys(first[2], True)
        assert first[1] + second[1] == runs * len(first[2])
        names.append(len(first[2]))
    assert sorted(names) == [1, 2]
    assert len({tuple(losses) for _, _, _, losses in found}) == 1
    assert found[0][3][-1] < found[0][3][0]


# ------------------------------------------------------------------------------------------------- AutoTP

CUTS = {"column": 0, "row": 1}  # layers are called as their partition types
PARTS = {
    "autotp_size": 2,
    "partition_config": {
        "use_default_specs": False,
        "layer_specs": [{"patterns": [rf".*{kind}\.weight$"], "partition_type": kind} for kind in CUTS],
    },
}


@contextmanager
def _autotp() -> Iterator[None]:
    """DeepSpeed is left without AutoTP's mode and groups: later engines of these ranks would have them."""
    with quiet():
        try:
            yield
        finally:
            importlib.import_module("deepspeed.module_inject.layers").set_autotp_mode(training=False)
            importlib.import_module("deepspeed.utils.groups")._release_process_group_references()


def _in_shards(stage: int, dtype: str, given: tuple[str, ...]) -> None:
    """A step of which each matrix has the bits of the dense update of its gradient.

    Args:
        given: What the user gives of tp_group and partition_dim.
    """
    with _autotp():
        from deepspeed.utils import groups

        torch.manual_seed(0)
        cut = OrderedDict(column=nn.Linear(13, 30, bias=False), tanh=nn.Tanh(), row=nn.Linear(30, 11, bias=False))
        net: Any = nn.Sequential(OrderedDict(**cut, whole=nn.Linear(11, 7, bias=False)))
        whole = {name: p.detach().clone() for name, p in net.named_parameters()}

        def make(params: object) -> Muon:
            for kind, dim in CUTS.items() if "partition_dim" in given else ():
                getattr(net, kind).weight.partition_dim = dim
            return Muon(net, tp_group=groups.get_tensor_model_parallel_group() if "tp_group" in given else None, **HALF)

        config = Case(stage, dtype=dtype, config={"tensor_parallel": PARTS}).written()
        engine = initialize(net, make, config | {"train_micro_batch_size_per_gpu": 4})  # type: ignore[arg-type]
        try:
            x = torch.randn(4, 13, generator=torch.Generator().manual_seed(3))
            engine.backward(engine(x.bfloat16() if dtype == "bf16" else x).square().mean())
            engine.step()
            for name, p in net.named_parameters():
                found = []
                for tensor in (p.detach(), engine.optimizer.state[p]["momentum_buffer"]):
                    parts = [torch.empty_like(tensor) for _ in range(2)]
                    dist.all_gather(parts, tensor.contiguous(), group=groups.get_tensor_model_parallel_group())
                    dim = CUTS.get(name.split(".")[0])
                    found.append(tensor if dim is None else torch.cat(parts, dim))
                assert torch.equal(found[0], dense_update(whole[name], found[1])), name
        finally:
            engine.destroy()


BOTH = ("tp_group", "partition_dim")
IN_FP32 = "Train in fp32 at ZeRO stage 0, with tp_group and partition_dim, or set autotp_size=1"


def test_shards_are_stepped_as_the_whole_matrices_in_fp32_at_stage_0(two: RankPool) -> None:
    two.run(_in_shards, 0, "fp32", BOTH)


@pytest.mark.parametrize(
    ("stage", "dtype", "given", "words"),
    [
        (0, "fp32", (), "column.weight has tensor_model_parallel=True"),
        (0, "fp32", (), "deepspeed.utils.groups.get_tensor_model_parallel_group()"),
        (0, "fp32", ("tp_group",), "column.weight has an unknown shape: its attribute tensor_model_parallel says"),
        (0, "fp32", ("tp_group",), "AutoTP sets none: 0 for a layer of partition_type column, 1 for row"),
        (1, "fp32", BOTH, IN_FP32),
        (2, "fp32", BOTH, IN_FP32),
        (0, "bf16", BOTH, IN_FP32),
    ],
)
def test_shards_are_refused_where_something_is_missing_or_deepspeed_steps_something_else(
    two: RankPool, stage: int, dtype: str, given: tuple[str, ...], words: str
) -> None:
    for error in two.run_catching(_in_shards, stage, dtype, given):
        assert error.type_name == "ValueError" and words in error.message
        assert "as if it were whole" not in error.message


# ------------------------------------------------------------------------------------------------- experts


class Sparse(nn.Module):
    def __init__(self, ep_size: int) -> None:
        from deepspeed.moe.layer import MoE

        torch.manual_seed(0)
        super().__init__()
        self.first = nn.Linear(5, 8)
        expert = nn.Sequential(nn.Linear(8, 13), nn.ReLU(), nn.Linear(13, 8))
        self.experts = MoE(8, expert, num_experts=4, ep_size=ep_size, k=1, use_residual=False)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x, balance, _ = self.experts(self.first(x))
        return self.last(x).square().mean() + 0.01 * balance


@contextmanager
def _sparse(stage: int, ep_size: int) -> Iterator[tuple[Any, Muon, Any, Callable[[], None]]]:
    """A model with experts, its optimizer, the host's groups, and a step."""
    with quiet():
        net = Sparse(ep_size)
        optimizer = Muon(expert_groups(param_groups(net, lr=0.02)), **HALF)
        engine = initialize(net, optimizer, Case(stage).written())

        def step() -> None:
            engine.backward(engine(torch.randn(40, 5, generator=torch.Generator().manual_seed(dist.get_rank()))))
            engine.step()

        host: Any = optimizer.hosts.find(DeepSpeedHost)
        yield net, optimizer, [group for group, _ in host.groups if group["use_muon"]], step
        engine.destroy()


def _experts(stage: int, ep_size: int) -> int:
    """Number of matrices done here. The first update is the dense one of DeepSpeed's gradient, of all experts."""
    with _sparse(stage, ep_size) as (net, optimizer, groups, step):
        names = {name for group in groups for name in group["param_names"]}
        before = {name: p.detach().clone() for name, p in net.named_parameters() if name in names}
        assert len(before) == 2 + 2 * 4 // ep_size  # first, last; up and down; no router
        step()
        for name, weight in before.items():
            p = net.get_parameter(name)
            assert torch.equal(whole_weight(p), dense_update(weight, whole_momentum(p))), name
        return optimizer.traffic.orthogonalized


@pytest.mark.parametrize(("stage", "ep_size"), [(1, 1), (2, 2)])
def test_experts_are_stepped_over_the_ranks_that_share_them(two: RankPool, stage: int, ep_size: int) -> None:
    """Each rank has two experts of its own with ep_size=2, both have all four with ep_size=1."""
    assert sum(two.run(_experts, stage, ep_size)) == 2 + 2 * 4


def _fault_in_experts() -> None:
    """A step with a wrong option in the experts' group of rank 1, between two without."""
    with _sparse(2, 2) as (_, _, groups, step):
        experts = next(group for group in groups if group.get("moe"))
        for wrong in (False, True, False):
            with mock.patch.dict(experts, {"momentum": 7.0}) if wrong and dist.get_rank() == 1 else nullcontext():
                said = said_by(step)
            assert said.startswith("ValueError") and "momentum=7.0" in said if wrong else said == ""


def test_a_fault_in_one_ranks_own_experts_is_raised_on_all_before_any_group_is_stepped(two: RankPool) -> None:
    """The ranks that share the experts are not those that share the rest."""
    two.run(_fault_in_experts)
