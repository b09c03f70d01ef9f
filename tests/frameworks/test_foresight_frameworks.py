"""Tests of predictions for ZeRO jobs: the plan digests, traffic and stored bytes predicted without starting ranks must
equal those of real jobs."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from deepspeed_job import Case
from every_layout import digests_of
from planned_jobs import DENSE, same_as_live
from published import decoder
from torch import Tensor, nn

from shardmuon import Muon, param_groups
from shardmuon.comm.groups import Traffic
from shardmuon.foresight.job import Exact
from shardmuon.foresight.models import build
from shardmuon.testing.frameworks import ZeroRun
from shardmuon.testing.pool import RankPool

# The layer sizes of the model ODD require padding of the flat buffer on any number of ranks.
ODD = decoder(97, 50, 2, 5, 1, 10, 81)
CONFIGS = {"dense": DENSE, "odd": ODD}
STANDARD: dict[str, Any] = {"method": "standard", "ns_dtype": torch.float32}
OPTIONS: dict[str, Any] = {**STANDARD, "bucket_bytes": 20_000}
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Return the total bytes of the tensors' storages, counting a shared storage once."""
    storages = [t.untyped_storage() for t in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in storages if s.nbytes()}.values())


# --------------------------------------------------------------------------------------------------------------- ZeRO


def _live_zero(config: dict[str, Any], number: int, weights: torch.dtype) -> dict[str, Any]:
    model: Any = build(config).to_empty(device="cpu")
    for p in model.parameters():
        nn.init.normal_(p)
    optimizer = Muon(param_groups(model, lr=0.02), lr=0.02, **OPTIONS)
    model.forward = lambda: torch.stack([p.float().sum() for p in model.parameters()]).sum()
    case = Case(number, dtype="bf16" if weights == torch.bfloat16 else "fp32")
    engine = ZeroRun.initialize(model, optimizer, case.written())
    for _ in range(2):
        engine.backward(engine())
        before = optimizer.traffic.since(Traffic())
        engine.step()
    inner = engine.optimizer
    second = nbytes(s["exp_avg_sq"] for s in optimizer.state.values() if not _is_zero(s["exp_avg_sq"]))
    found = {
        "traffic": optimizer.traffic.since(before),
        "digests": [digest for plan in optimizer.plans for digest in digests_of(plan).values()],
        "bytes": {
            "weights": nbytes(model.parameters()),
            "masters": nbytes(inner.single_partition_of_fp32_groups),
            "moments": 2 * second,
            "momentum": nbytes(s["exp_avg"] for s in optimizer.state.values()) - second,
        },
        "zeros": sum(_is_zero(s["exp_avg_sq"]) for s in optimizer.state.values()),
    }
    engine.destroy()
    return found


def _is_zero(second: Tensor) -> bool:
    """Return whether the tensor is a single stored element, expanded to the tensor's shape. With DeepSpeed, shardmuon
    stores such a zero tensor as the second moment of Muon's matrices, which need no second moment."""
    return second.untyped_storage().nbytes() == second.element_size()


ZERO = [
    (2, 4, "dense", torch.bfloat16),
    (1, 3, "odd", torch.bfloat16),
    (2, 3, "odd", torch.float32),
]


@needs_deepspeed
@pytest.mark.parametrize(("stage", "world", "config", "weights"), ZERO, ids=str)
def test_zero_is_planned_as_deepspeed_cuts_and_keeps_it(
    stage: int, world: int, config: str, weights: torch.dtype, deepspeed_pools: dict[int, RankPool]
) -> None:
    options = {"engine": "zero", "gpus_per_node": 2, "device": "cpu", "weights": weights, **OPTIONS}
    exact = Exact.of_job(build(CONFIGS[config]), f"dp={world}", **options)
    found = deepspeed_pools[world].run(_live_zero, CONFIGS[config], stage, weights)
    same_as_live(exact, found)
    assert all(live["zeros"] for live in found)
