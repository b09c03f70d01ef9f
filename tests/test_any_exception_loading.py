"""Exceptions as in test_any_exception.py, while a job is saved and loaded: no rank waits for one that has raised, none
has loaded."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from injection import KINDS, MARK, PROMPT, STAYS, check_all_raise, join, known_places
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shardmuon import ExchangeError, Muon, Orthogonalizer, Storage, checkpoint
from shardmuon.testing import RankPool
from shardmuon.testing.layouts import mesh_of

pytestmark = pytest.mark.ranks
EXCEPTIONS = [error for error in KINDS if not isinstance(error, STAYS)]  # DCP makes its own of any, also of interrupts


def _normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Job:
    """A DTensor, a tensor-parallel shard, a replica and AdamW's vector."""

    def __init__(self) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        mesh = mesh_of((world,))
        self.model = nn.Module()
        cut = nn.Parameter(_normal(6, 128 * world, seed=2).chunk(world, 1)[rank].contiguous())
        cut.tensor_model_parallel, cut.partition_dim = True, 1  # type: ignore[attr-defined]
        self.model.shard = nn.Parameter(distribute_tensor(_normal(7, 5, seed=1), mesh, [Shard(0)]))
        self.model.cut = cut
        self.model.replica = nn.Parameter(_normal(4, 6, seed=3))
        self.model.bias = nn.Parameter(_normal(9, seed=4))
        named = dict(self.model.named_parameters())
        groups: list[dict[str, Any]] = [
            {"params": [("shard", named["shard"]), ("replica", named["replica"])]},
            {"params": [("cut", cut)], "tp_group": dist.group.WORLD, "process_group": ()},
            {"params": [("bias", named["bias"])], "use_muon": False, "lr": 0.01},
        ]
        self.optimizer = Muon(
            groups,
            lr=0.1,
            orthogonalizer=Orthogonalizer(method="standard"),
            storage=Storage(momentum_dtype="int8"),
        )

    def step(self) -> None:
        for p in self.model.parameters():
            p.grad = p.detach().clone()
        self.optimizer.step()

    def snapshot(self) -> dict[str, Tensor]:
        found = {}
        for name, p in self.model.named_parameters():
            for key, value in {"weight": p, **self.optimizer.state[p]}.items():
                local = value.to_local() if isinstance(value, DTensor) else value
                found[f"{name}.{key}"] = local.detach().clone()
        return found


def _every_function_of(store: str, folder: str, what: str) -> tuple[list[str], int]:
    join(store)
    job = Job()
    job.step()
    checkpoint.save(folder, job.model, job.optimizer)
    saved, numbers = job.snapshot(), itertools.count()
    job.step()

    def call() -> None:
        try:
            if what == "load":
                checkpoint.load(folder, job.model, job.optimizer)
            else:
                checkpoint.save(f"{folder}.{next(numbers)}", job.model, job.optimizer)
        except CheckpointException as wrong:
            raise ValueError(f"{MARK} or AssertionError, in words of DCP's own: {wrong}") from wrong

    known = known_places(call, what, "_none")[::2]
    if what == "load":
        assert all(torch.equal(saved[key], value) for key, value in job.snapshot().items())
    job.step()
    passed, raised = [], 0
    before = job.snapshot()
    for at, place in enumerate(known):
        error = EXCEPTIONS[at % len(EXCEPTIONS)]
        if check_all_raise(call, place, error, at % dist.get_world_size(), 1, what):
            raised += 1
            after = job.snapshot()
            assert before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before), f"{place}"
        else:
            passed.append(f"{place} {type(error).__name__}")
    call()
    job.step()
    return passed, raised


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(2, timeout=300.0) as pool:
        yield pool


@pytest.mark.parametrize("what", ["save", "load"])
def test_an_exception_on_one_rank_while_a_job_is_saved_or_loaded_is_raised_on_all(
    what: str, ranks: RankPool, tmp_path: Path
) -> None:
    for passed, raised in ranks.run(_every_function_of, str(tmp_path / "store"), str(tmp_path / "job"), what):
        assert passed == [], passed
        assert raised > 10


def _model_refuses(store: str, folder: str) -> tuple[list[str], bool]:
    """A model whose own hook raises on rank 1 when weights are loaded into it: what loading and stepping say."""
    join(store)
    job = Job()
    job.step()
    checkpoint.save(folder, job.model, job.optimizer)
    saved = job.snapshot()
    job.step()
    armed = [dist.get_rank() == 1]

    def hook(module: nn.Module, incompatible: Any) -> None:
        if armed[0]:
            raise KeyError(MARK)

    job.model.register_load_state_dict_post_hook(hook)
    said, began = [], time.monotonic()
    for call in (lambda: checkpoint.load(folder, job.model, job.optimizer), job.step):
        try:
            call()
            said.append("done")
        except (ValueError, ExchangeError) as wrong:
            said.append(f"{type(wrong).__name__}: {wrong}")
    assert time.monotonic() - began < PROMPT, said
    armed[0] = False
    checkpoint.load(folder, job.model, job.optimizer)
    same = all(torch.equal(saved[key], value) for key, value in job.snapshot().items())
    job.step()
    return said, same


def test_weights_that_one_ranks_model_refuses_are_refused_on_all_and_no_step_follows(
    ranks: RankPool, tmp_path: Path
) -> None:
    """Refused last, when the other ranks have loaded everything and would train on without that one."""
    for (loading, stepping), same in ranks.run(_model_refuses, str(tmp_path / "store"), str(tmp_path / "job")):
        assert loading.startswith("ValueError: rank 1: ") and MARK in loading
        assert stepping.startswith("ExchangeError") and MARK in stepping
        assert same
