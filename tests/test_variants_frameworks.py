"""Variant state, through the checkpoints of FSDP1 and DeepSpeed, which have no place for it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType

from shardmuon import Muon
from shardmuon.frameworks.deepspeed.host import DeepSpeedHost
from shardmuon.testing.frameworks import quiet, whole_weights
from shardmuon.testing.pool import RankPool

OPTIONS: dict[str, Any] = {"lr": 0.02, "adamw_lr": 0.003, "variant": "normuon"}


def _saved_by_fsdp1(file: str) -> list[str]:
    from fsdp1_model import alone, full_state, tied, train, unlike, wrapped

    model = wrapped(tied(), "FULL_SHARD")
    optimizer = Muon(model, **OPTIONS)
    train(model, optimizer, range(2))
    saved = full_state(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(saved, file)
    train(model, optimizer, range(2, 4))
    return unlike(whole_weights(model), alone(4, variant="normuon"))


def _resumed_by_fsdp1(file: str, lost: bool) -> list[str]:
    from fsdp1_model import alone, tied, train, unlike, wrapped

    saved = torch.load(file, weights_only=True)
    if lost:
        for group in saved["optimizer"]["param_groups"]:
            group.pop("kept_state", None)
    model = wrapped(tied(), "FULL_SHARD")
    optimizer = Muon(model, **OPTIONS)
    with quiet(), FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, saved["optimizer"]))
    train(model, optimizer, range(2, 4))
    assert all("kept_state" not in group for group in optimizer.param_groups)
    return unlike(whole_weights(model), alone(4, variant="normuon"))


@pytest.mark.ranks
def test_fsdp1s_full_state_resumes_on_any_number_of_ranks(world2: RankPool, world4: RankPool, tmp_path: Path) -> None:
    file = str(tmp_path / "full.pt")
    assert world2.run(_saved_by_fsdp1, file) == [[], []]
    assert world2.run(_resumed_by_fsdp1, file, False) == [[], []]
    assert world4.run(_resumed_by_fsdp1, file, False) == [[]] * 4


@pytest.mark.ranks
def test_fsdp1s_state_that_lost_it_is_refused_on_every_rank(world2: RankPool, tmp_path: Path) -> None:
    file = str(tmp_path / "full.pt")
    world2.run(_saved_by_fsdp1, file)
    for error in world2.run_catching(_resumed_by_fsdp1, file, True):
        assert "second_moment" in str(error) and "variant='normuon' keeps" in str(error), error


def _resumed_by_deepspeed(stage: int, folder: str, lost: bool) -> list[str]:
    from deepspeed_job import Case, Job, quiet

    with quiet() as deepspeed:
        job = Job(deepspeed, Case(stage), variant="normuon")
        for number in range(2):
            job.step(number)
        job.engine.save_checkpoint(folder, tag="here")
        for number in range(2, 4):
            job.step(number)
        expected = job.weights()
        job.engine.destroy()
        again = Job(deepspeed, Case(stage), variant="normuon")
        again.engine.load_checkpoint(folder, tag="here")
        if lost:
            again.optimizer.hosts.find(DeepSpeedHost)._carried = {}  # type: ignore[union-attr]
        for number in range(2, 4):
            again.step(number)
        found = again.weights()
        again.engine.destroy()
        return [n for n in found if not torch.equal(found[n], expected[n])]


@pytest.fixture(scope="module")
def deepspeed_pool(deepspeed_pools: dict[int, RankPool]) -> RankPool:
    return deepspeed_pools[2]


needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed: shardmuon[deepspeed]"
)


@pytest.mark.ranks
@needs_deepspeed
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_deepspeeds_checkpoints_resume_with_the_same_bits(stage: int, deepspeed_pool: RankPool, tmp_path: Path) -> None:
    assert deepspeed_pool.run(_resumed_by_deepspeed, stage, str(tmp_path), False) == [[], []]


@pytest.mark.ranks
@needs_deepspeed
def test_a_checkpoint_of_deepspeed_that_lost_it_is_an_error_at_the_first_step(
    deepspeed_pool: RankPool, tmp_path: Path
) -> None:
    for error in deepspeed_pool.run_catching(_resumed_by_deepspeed, 2, str(tmp_path), True):
        assert "its momentum was loaded, and not second_moment" in str(error), error
