"""Frameworks that keep weights and state in flat tensors: AdamW, and what stages keep, for which
their files have no place, against one process. Both after a resume, too."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from shardmuon import Muon
from shardmuon.testing import RankPool
from shardmuon.testing.frameworks import Fsdp1Run, ZeroRun, quiet

# Of FSDP1's units each of two ranks holds a part of the matrix.
SHAPES: dict[str, tuple[int, ...]] = {"embedding": (3, 8), "matrix": (6, 8), "bias": (5,), "scale": (7,)}
# With this beta no sum of gradients that are eighths, of two or three steps, is zero: its sign would hang on rounding.
OPTIONS: dict[str, Any] = {"lr": 0.125, "betas": (0.83, 0.9), "eps": 1e-6, "weight_decay": 2.0}
STEPS = 3
pytestmark = pytest.mark.ranks


def full(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(*shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def make(params: Mapping[str, Tensor], options: Mapping[str, Any]) -> Muon:
    matrix = {"params": [("matrix", params["matrix"])], "variant": "normuon"}
    others = {"params": [(n, p) for n, p in params.items() if n != "matrix"], "use_muon": False, **OPTIONS}
    return Muon([matrix, others], lr=0.02, **options)


def compare(run: Any, start: Mapping[str, Tensor]) -> None:
    """Three steps beside one process."""
    dense = {n: nn.Parameter(t.clone()) for n, t in run.start(start).items()}
    optimizer = make(dense, {})
    for step in range(1, STEPS + 1):
        grads = run.gradients(full(step))
        run.step({name: g.to(start[name].dtype) for name, g in grads.items()})
        for name, g in grads.items():
            dense[name].grad = g.clone()
        optimizer.step()
    found = run.weights()
    assert [name for name in SHAPES if not torch.equal(found[name], dense[name])] == []


def step_on(run: Any, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Whole weights after two more steps."""
    for seed in (8, 9):
        run.step({name: g.to(dtype) for name, g in run.gradients(full(seed)).items()})
    return run.weights()  # type: ignore[no-any-return]


# As in test_fsdp1.py: on CPUs torch 2.13 gives all kinds of state one memory with offload_to_cpu=True.
_WHOLE = FullStateDictConfig(offload_to_cpu=False), FullOptimStateDictConfig(offload_to_cpu=False)


def _saved_by_fsdp1(file: str) -> dict[str, Tensor]:
    run = Fsdp1Run("fsdp1", full(0), make)
    compare(run, full(0))
    weights = run.weights()
    with quiet(), FSDP.state_dict_type(run._model, StateDictType.FULL_STATE_DICT, *_WHOLE):
        saved = FSDP.optim_state_dict(run._model, run.optimizer)
    if dist.get_rank() == 0:
        torch.save((weights, saved), file)
    return step_on(run)


def _resumed_by_fsdp1(file: str, lost: bool) -> dict[str, Tensor]:
    weights, saved = torch.load(file, weights_only=True)
    for group in saved["param_groups"] if lost else ():
        group.pop("kept_state", None)
    run = Fsdp1Run("fsdp1", {name: weights[name] for name in SHAPES}, make)
    with quiet(), FSDP.state_dict_type(run._model, StateDictType.FULL_STATE_DICT, *_WHOLE):
        run.optimizer.load_state_dict(FSDP.optim_state_dict_to_load(run._model, run.optimizer, saved))
    found = step_on(run)
    assert all("kept_state" not in group for group in run.optimizer.param_groups)
    return found


def test_fsdp1s_full_state_resumes_on_any_number_of_ranks_or_is_refused_where_it_lost_what_stages_keep(
    world2: RankPool, world4: RankPool, tmp_path: Path
) -> None:
    file = str(tmp_path / "full.pt")
    wanted = world2.run(_saved_by_fsdp1, file)[0]
    for pool in (world2, world4):
        for found in pool.run(_resumed_by_fsdp1, file, False):
            assert [name for name in SHAPES if not torch.equal(found[name], wanted[name])] == []
    for pool in (world2, world4):  # one of four ranks stores nothing of the matrix
        for error in pool.run_catching(_resumed_by_fsdp1, file, True):
            assert "second_moment" in str(error) and "variant='normuon' keeps" in str(error), error


def _under_zero(row: str, dtype: torch.dtype, folder: str, lost: bool) -> list[str]:
    start = full(0, dtype)
    run = ZeroRun(row, start, make)
    compare(run, start)
    run._engine.save_checkpoint(folder, tag="here")
    dist.barrier()
    other = ZeroRun(row, {name: torch.zeros_like(t) for name, t in start.items()}, make)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other._engine.load_checkpoint(folder, tag="here")
    if lost:
        for group in other.optimizer.param_groups:
            group.pop("kept_state", None)
    wanted, found = step_on(run, dtype), step_on(other, dtype)
    run.close()
    other.close()
    return [name for name in SHAPES if not torch.equal(found[name], wanted[name])]


@pytest.mark.parametrize(
    ("row", "dtype"),
    [("zero0", torch.float32), ("zero1", torch.float32), ("zero2", torch.float32), ("zero3", torch.bfloat16)],
)
def test_zero_has_the_bits_of_one_process_and_resumes(
    row: str, dtype: torch.dtype, deepspeed_pools: dict[int, RankPool], tmp_path: Path
) -> None:
    pytest.importorskip("deepspeed")
    assert deepspeed_pools[2].run(_under_zero, row, dtype, str(tmp_path), False) == [[]] * 2


def test_a_checkpoint_of_deepspeed_that_lost_what_stages_keep_is_an_error_at_the_first_step(
    deepspeed_pools: dict[int, RankPool], tmp_path: Path
) -> None:
    pytest.importorskip("deepspeed")
    for error in deepspeed_pools[2].run_catching(_under_zero, "zero2", torch.float32, str(tmp_path), True):
        assert "its momentum was loaded, and not second_moment" in str(error), error
