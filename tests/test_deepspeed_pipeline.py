"""DeepSpeed's pipeline engine: every stage steps its own matrices, each once over its data-parallel ranks.

The gradient that reached the optimizer is read back from the momentum, which is half of it: exact in binary.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardmuon import Muon, Orthogonalizer, param_groups
from shardmuon.frameworks.deepspeed import REQUIRED
from shardmuon.testing import RankPool
from shardmuon.testing.frameworks import start_deepspeed, whole_momentum, whole_weight

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed: shardmuon[deepspeed]"),
]

SIZES = ((16, 24), (24, 41), (41, 8))
STAGES = 2


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        fan_in, fan_out = SIZES[number]
        self.weight = nn.Parameter(0.1 * torch.randn(fan_out, fan_in, generator=generator))
        self.bias = nn.Parameter(torch.zeros(fan_out))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias).relu()


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output.float() - target).square().mean()


def _batches(seed: int, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """One batch for ever."""
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = torch.randn(4, SIZES[0][0], generator=generator), torch.rand(4, 8, generator=generator)
    return itertools.repeat((inputs.to(dtype), targets))


def _train(zero: int, dtype: torch.dtype) -> tuple[int, int, dict[str, bool], list[float]]:
    """Pipeline stage, matrices that this rank orthogonalized, parameter -> whether it has the dense update's bits, and
    losses."""
    deepspeed = start_deepspeed("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from deepspeed.pipe import PipelineModule

        net = PipelineModule([Layer(i) for i in range(3)], num_stages=STAGES, loss_fn=_loss, partition_method="uniform")
        options: dict[str, Any] = {"orthogonalizer": Orthogonalizer(method="standard")}
        optimizer = Muon(param_groups(net, lr=0.02, momentum=0.5), lr=0.02, **options)
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "steps_per_print": 10**9,
            "zero_optimization": {"stage": zero},
            "gradient_clipping": 0.0,
            "bf16": {"enabled": dtype == torch.bfloat16},
            **REQUIRED,
        }
        engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
        matrices = {name: p for name, p in net.named_parameters() if p.ndim == 2}
        before = {name: p.detach().float().clone() for name, p in matrices.items()}
        batches = _batches(engine.grid.get_data_parallel_rank(), dtype)
        losses = [float(engine.train_batch(batches))]
    ran, equal = optimizer.traffic.orthogonalized, {}
    partitioned = zero > 0 or dtype == torch.bfloat16
    for name, p in matrices.items():
        momentum = whole_momentum(p) if partitioned else optimizer.state[p]["momentum_buffer"]
        assert float(momentum.norm()) > 0, name
        dense = nn.Parameter(before[name])
        dense.grad = 2 * momentum
        Muon([dense], lr=0.02, momentum=0.5, **options).step()
        equal[name] = torch.equal(whole_weight(p) if partitioned else p.detach(), dense.detach())
    losses += [float(engine.train_batch(batches)) for _ in range(3)]
    stage = engine.grid.get_stage_id()
    engine.destroy()
    importlib.import_module("deepspeed.utils.groups").mpu = None  # else later engines of these ranks would have stages
    return stage, ran, equal, losses


@pytest.fixture(scope="module")
def four(deepspeed_pools: dict[int, RankPool]) -> RankPool:
    return deepspeed_pools[4]


@pytest.mark.parametrize(
    ("zero", "dtype", "runs"),
    [
        (0, torch.float32, 2),
        (1, torch.float32, 1),
        (1, torch.bfloat16, 1),
        (0, torch.bfloat16, 1),
    ],
    ids=["fp32", "ZeRO 1", "ZeRO 1 bf16", "BF16 optimizer"],
)
def test_every_stage_steps_its_matrices_as_one_process_would(
    four: RankPool, zero: int, dtype: torch.dtype, runs: int
) -> None:
    """Two stages, two data-parallel ranks each. Without partitions both of a stage's ranks do all its matrices."""
    found = four.run(_train, zero, dtype)
    by_stage = {stage: [mine for mine in found if mine[0] == stage] for stage in range(STAGES)}
    matrices = {stage: {name for mine in members for name in mine[2]} for stage, members in by_stage.items()}
    assert sorted(map(len, matrices.values())) == [1, 2]
    for stage, members in by_stage.items():
        assert len(members) == 2
        assert all(equal == dict.fromkeys(matrices[stage], True) for _, _, equal, _ in members)
        assert sum(ran for _, ran, *_ in members) == runs * len(matrices[stage])
    assert len({tuple(losses) for _, _, _, losses in found}) == 1
    assert found[0][3][-1] < found[0][3][0]
