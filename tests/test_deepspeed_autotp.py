"""DeepSpeed's AutoTP: in fp32 at ZeRO 0 its shards are stepped as the whole matrices, elsewhere they are refused.

The gradient that reached the optimizer is read back from the momentum, which is half of it: exact in binary.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardmuon import Muon, Orthogonalizer
from shardmuon.frameworks.deepspeed import REQUIRED
from shardmuon.testing import RankPool
from shardmuon.testing.frameworks import start_deepspeed

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed: shardmuon[deepspeed]"),
]

CUTS = {"column": 0, "row": 1}
PARTS = {"partition_config": {"use_default_specs": False, "layer_specs": []}, "autotp_size": 2}
PARTS["partition_config"]["layer_specs"] = [
    {"patterns": [rf".*{kind}\.weight$"], "partition_type": kind}  # the layers are called so
    for kind in CUTS
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.column = nn.Linear(13, 30, bias=False)
        self.row = nn.Linear(30, 11, bias=False)
        self.whole = nn.Linear(11, 7, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.whole(self.row(torch.tanh(self.column(x)))).square().mean()


@contextmanager
def _autotp() -> Iterator[Any]:
    """DeepSpeed, which is left without AutoTP's mode and groups: later engines of these ranks would have them."""
    deepspeed = start_deepspeed("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield deepspeed
        finally:
            importlib.import_module("deepspeed.module_inject.layers").set_autotp_mode(training=False)
            importlib.import_module("deepspeed.utils.groups")._release_process_group_references()


def _train(stage: int, bf16: bool, given: tuple[str, ...]) -> str | dict[str, bool]:
    """True for each matrix that has the bits of the dense update of its gradient, or what is said.

    Args:
        given: What the user gives of tp_group and partition_dim.
    """
    options: dict[str, Any] = {"orthogonalizer": Orthogonalizer(method="standard"), "momentum": 0.5}
    with _autotp() as deepspeed:
        from deepspeed.utils import groups

        net = Net()
        whole = {name: p.detach().clone() for name, p in net.named_parameters()}
        engine = None

        def make(params: object) -> Muon:
            tp_group = groups.get_tensor_model_parallel_group() if "tp_group" in given else None
            for kind, dim in CUTS.items() if "partition_dim" in given else ():
                getattr(net, kind).weight.partition_dim = dim
            return Muon(net, lr=0.02, tp_group=tp_group, **options)

        config = {"train_micro_batch_size_per_gpu": 4, "steps_per_print": 10**9, "gradient_clipping": 0.0, **REQUIRED}
        config |= {"zero_optimization": {"stage": stage}, "bf16": {"enabled": bf16}, "tensor_parallel": PARTS}
        try:
            engine, optimizer, *_ = deepspeed.initialize(model=net, optimizer=make, config=config)
            x = torch.randn(4, 13, generator=torch.Generator().manual_seed(3))
            engine.backward(engine(x.bfloat16() if bf16 else x))
            engine.step()
        except ValueError as error:
            return str(error)
        finally:
            if engine is not None:
                engine.destroy()
        group, equal = groups.get_tensor_model_parallel_group(), {}
        for name, p in net.named_parameters():
            dense, both = nn.Parameter(whole[name].clone()), []
            for tensor in (p.detach(), optimizer.state[p]["momentum_buffer"]):
                parts = [torch.empty_like(tensor) for _ in range(2)]
                dist.all_gather(parts, tensor.contiguous(), group=group)
                both.append(torch.cat(parts, CUTS[kind]) if (kind := name.split(".")[0]) in CUTS else tensor)
            dense.grad = 2 * both[1]
            assert float(dense.grad.norm()) > 0
            Muon([dense], lr=0.02, **options).step()
            equal[name] = torch.equal(both[0], dense.detach())
        return equal


@pytest.fixture(scope="module")
def two(deepspeed_pools: dict[int, RankPool]) -> RankPool:
    return deepspeed_pools[2]


BOTH = ("tp_group", "partition_dim")


def test_shards_are_stepped_as_the_whole_matrices_in_fp32_at_stage_0(two: RankPool) -> None:
    names = [name for name, _ in Net().named_parameters()]
    assert two.run(_train, 0, False, BOTH) == [dict.fromkeys(names, True)] * 2


def test_what_is_missing_is_named_with_where_to_find_it(two: RankPool) -> None:
    for said in two.run(_train, 0, False, ()):
        assert said.startswith("column.weight has tensor_model_parallel=True")
        assert "deepspeed.utils.groups.get_tensor_model_parallel_group()" in said
    for said in two.run(_train, 0, False, ("tp_group",)):
        assert said.startswith("column.weight has an unknown shape: its attribute tensor_model_parallel says")
        assert "AutoTP sets none: 0 for a layer of partition_type column, 1 for row" in said


@pytest.mark.parametrize(("stage", "bf16"), [(1, False), (2, False), (0, True)])
def test_shards_are_refused_where_deepspeed_steps_something_else(two: RankPool, stage: int, bf16: bool) -> None:
    for said in two.run(_train, stage, bf16, BOTH):
        assert "Train in fp32 at ZeRO stage 0, with tp_group and partition_dim, or set autotp_size=1" in said
        assert "as if it were whole" not in said
