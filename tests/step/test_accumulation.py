"""Gradients of several micro-batches: one step on their sum, on one process, DDP and FSDP2."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardmuon import Muon
from shardmuon.testing import RankPool

MICRO_BATCHES, RANKS = 3, 2


def _whole_numbers(*shape: int, seed: int) -> Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


def _model() -> nn.Sequential:
    """Weights and inputs are whole numbers, so that sums of gradients are exact in whatever order."""
    model = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 5, bias=False), nn.Linear(5, 4))
    for seed, p in enumerate(model.parameters()):
        p.data = _whole_numbers(*p.shape, seed=seed)
    return model


def _batch(rank: int, number: int) -> Tensor:
    return _whole_numbers(4, 6, seed=100 * rank + number + 10)


def _step_on_the_sum() -> dict[str, Tensor]:
    model = _model()
    model(torch.cat([_batch(r, i) for r in range(RANKS) for i in range(MICRO_BATCHES)])).sum().backward()
    for p in model.parameters():
        assert p.grad is not None
        p.grad /= RANKS  # engines average over ranks
    Muon(model, lr=0.03).step()
    return {name: p.detach() for name, p in model.named_parameters()}


def _accumulated(engine: str, micro_sync: bool) -> list[str]:
    """Weights that differ from the step on the summed gradient."""
    rank, model = dist.get_rank(), _model()
    before = copy.deepcopy(model)
    wrapped: nn.Module = model
    group = None
    if engine == "ddp":
        wrapped, group = DistributedDataParallel(model), dist.group.WORLD
    else:
        mesh = init_device_mesh("cpu", (RANKS,))
        for layer in (*model, model):
            fully_shard(layer, mesh=mesh)
    optimizer = Muon(model, lr=0.03, process_group=group)
    for number in range(MICRO_BATCHES):
        last = number == MICRO_BATCHES - 1
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(last or micro_sync)
        quiet = isinstance(wrapped, DistributedDataParallel) and not (last or micro_sync)
        with wrapped.no_sync() if quiet else contextlib.nullcontext():  # type: ignore[operator]
            wrapped(_batch(rank, number)).sum().backward()
    optimizer.step()
    wanted = _step_on_the_sum()
    assert all(not torch.equal(p, wanted[name]) for name, p in before.named_parameters())
    found = {n: p.full_tensor() if isinstance(p, DTensor) else p.detach() for n, p in model.named_parameters()}
    return [name for name in wanted if not torch.equal(found[name], wanted[name])]


@pytest.mark.parametrize("micro_sync", [False, True])
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_accumulated_micro_batches_are_one_step_on_their_sum(engine: str, micro_sync: bool, world2: RankPool) -> None:
    assert world2.run(_accumulated, engine, micro_sync) == [[]] * RANKS


def _without_sync() -> bool:
    """True if a step on FSDP2 whose gradients were never reduced leaves all weights alone. It warns."""
    model = _model()
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    optimizer = Muon(model, lr=0.03)
    before = [p.full_tensor().clone() for p in model.parameters()]  # type: ignore[attr-defined]
    model.set_requires_gradient_sync(False)  # type: ignore[operator]
    model(_batch(dist.get_rank(), 0)).sum().backward()
    with pytest.warns(UserWarning, match="no parameter of this optimizer has a gradient, so this step trained nothing"):
        optimizer.step()
    after = [p.full_tensor() for p in model.parameters()]  # type: ignore[attr-defined]
    return all(map(torch.equal, before, after))


def test_a_step_on_fsdp2_that_was_never_reduced_finds_no_gradients(world2: RankPool) -> None:
    assert world2.run(_without_sync) == [True] * RANKS
