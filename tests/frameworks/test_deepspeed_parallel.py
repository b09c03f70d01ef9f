"""Tests of DeepSpeed's model parallelism: pipeline parallelism and tensor parallelism with AutoTP.

With momentum 0.5, the momentum buffer after the first step is exactly half the gradient that reached the optimizer, so
tests read the gradient from it.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import re
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed_job import HALF, Case, dense_update, quiet
from torch import Tensor, nn

from shardmuon import Muon
from shardmuon.testing import RankPool
from shardmuon.testing.frameworks import ZeroRun

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed: shardmuon[deepspeed]"),
]


# ------------------------------------------------------------------------------------------------- pipeline stages

SIZES = ((16, 24), (24, 41), (41, 8))


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output.float() - target).square().mean()


def _in_stages(zero: int, dtype: str) -> tuple[int, int, int, list[float]]:
    """Check one step in a two-stage pipeline against the dense update. Return the index of this rank's pipeline stage,
    the number of matrices in the stage, the number of matrices orthogonalized on this rank, and the losses of four
    training batches."""
    with quiet() as deepspeed:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(*sizes), nn.ReLU()) for sizes in SIZES]
        net = deepspeed.pipe.PipelineModule(layers, num_stages=2, loss_fn=_loss, partition_method="uniform")
        optimizer = Muon(net, **HALF)
        config = Case(zero, dtype=dtype, accumulate=2).written() | {"train_micro_batch_size_per_gpu": 4}
        engine = ZeroRun.initialize(net, optimizer, config)
        before = {p: p.detach().float().clone() for p in net.parameters() if p.ndim == 2}
        generator = torch.Generator().manual_seed(engine.grid.get_data_parallel_rank())
        inputs, targets = torch.randn(4, SIZES[0][0], generator=generator), torch.rand(4, 8, generator=generator)
        batches = itertools.repeat((inputs.bfloat16() if dtype == "bf16" else inputs, targets))
        losses = [float(engine.train_batch(batches))]
        ran = optimizer.traffic.orthogonalized
        for p, weight in before.items():
            momentum = ZeroRun.whole_momentum(p) if zero else optimizer.state[p]["momentum_buffer"]
            assert torch.equal(ZeroRun.whole_weight(p) if zero else p.detach(), dense_update(weight, momentum)), tuple(
                p.shape
            )
        losses += [float(engine.train_batch(batches)) for _ in range(3)]
        stage = engine.grid.get_stage_id()
        engine.destroy()
    # DeepSpeed keeps the pipeline topology in the global variable `mpu` of its module `groups`. Reset the variable,
    # because later DeepSpeed engines in the same processes would use it.
    importlib.import_module("deepspeed.utils.groups").mpu = None
    return stage, len(before), ran, losses


@pytest.mark.parametrize(("zero", "dtype", "runs"), [(0, "fp32", 2), (1, "bf16", 1)])
def test_every_stage_steps_its_matrices_as_one_process_would(
    deepspeed_pools: dict[int, RankPool], zero: int, dtype: str, runs: int
) -> None:
    """The pipeline has two stages of two data-parallel ranks each. With ZeRO stage 0, both ranks of a pipeline stage
    must orthogonalize all of its matrices. With ZeRO stage 1, only one of them must orthogonalize each matrix."""
    found = deepspeed_pools[4].run(_in_stages, zero, dtype)
    ran = {(stage, num): sum(ran for at, _, ran, _ in found if at == stage) for stage, num, *_ in found}
    assert sorted((num, total) for (_, num), total in ran.items()) == [(1, runs), (2, 2 * runs)]
    (losses,) = {tuple(losses) for *_, losses in found}
    assert losses[-1] < losses[0]


# ------------------------------------------------------------------------------------------------- AutoTP

# Each key is the name of a layer and also its type of tensor parallelism. Each value is the partition_dim of the
# layer's weight.
CUTS = {"column": 0, "row": 1}
PARTS = {
    "autotp_size": 2,
    "partition_config": {
        "use_default_specs": False,
        "layer_specs": [{"patterns": [rf".*{kind}\.weight$"], "partition_type": kind} for kind in CUTS],
    },
}


@contextmanager
def _autotp() -> Iterator[None]:
    """Run the body of the `with` statement with DeepSpeed's log output disabled. On exit, reset DeepSpeed's AutoTP mode
    and process groups, because later DeepSpeed engines in the same processes would use them."""
    with quiet():
        try:
            yield
        finally:
            importlib.import_module("deepspeed.module_inject.layers").set_autotp_mode(training=False)
            importlib.import_module("deepspeed.utils.groups")._release_process_group_references()


def _in_shards(stage: int, dtype: str, given: tuple[str, ...]) -> None:
    """Take a step on a model that AutoTP has sharded, and check that the gathered weights are bitwise identical to
    those of a dense step with the same gradients.

    Args:
        given: Settings made by the user: "tp_group" (an option of Muon), "partition_dim" (an attribute of weights), or
            both.
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
        engine = ZeroRun.initialize(net, make, config | {"train_micro_batch_size_per_gpu": 4})  # type: ignore[arg-type]
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


def test_shards_are_stepped_as_the_whole_matrices_in_fp32_at_stage_0(deepspeed_pools: dict[int, RankPool]) -> None:
    deepspeed_pools[2].run(_in_shards, 0, "fp32", BOTH)


@pytest.mark.parametrize(
    ("stage", "dtype", "given", "words"),
    [
        (0, "fp32", (), "column.weight has tensor_model_parallel=True"),
        (
            0,
            "fp32",
            ("tp_group",),
            r"column.weight has an unknown shape: its attribute tensor_model_parallel says.*"
            "AutoTP sets none: 0 for a layer of partition_type column, 1 for row",
        ),
        (1, "fp32", BOTH, IN_FP32),
        (0, "bf16", BOTH, "at ZeRO 0 with bf16 or fp16 DeepSpeed"),
    ],
)
def test_shards_are_refused_where_something_is_missing_or_deepspeed_steps_something_else(
    deepspeed_pools: dict[int, RankPool], stage: int, dtype: str, given: tuple[str, ...], words: str
) -> None:
    for error in deepspeed_pools[2].run_catching(_in_shards, stage, dtype, given):
        assert error.type_name == "ValueError" and re.search(words, error.message)
        assert "as if it were whole" not in error.message
