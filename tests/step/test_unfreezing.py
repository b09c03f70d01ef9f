"""Parts of a model that join a run: they train as if new, and nothing that was there changes."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.distributed as dist
from tolerances import assert_bitwise
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from shardmuon import Muon, param_groups
from shardmuon.testing import RankPool


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 7), nn.LayerNorm(7), nn.Linear(7, 5)
    return nn.Sequential(*layers)


def _step(model: nn.Module, optimizer: Muon, seed: int) -> None:
    """One step on gradients that follow from names and the seed."""
    for at, p in enumerate(model.parameters()):
        grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * seed + at))
        placed = distribute_tensor(grad, p.device_mesh, p.placements) if isinstance(p, DTensor) else grad
        p.grad = placed if p.requires_grad else None
    optimizer.step()


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.full_tensor() if isinstance(p, DTensor) else p.clone() for n, p in model.state_dict().items()}


def _unfrozen_part(shard: bool) -> None:
    """The unfrozen part is as one that a new optimizer trains on one process, the rest as in a run that never unfroze
    anything."""
    whole = _model()
    alone, unchanged = copy.deepcopy(whole), copy.deepcopy(whole)
    if shard:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in whole:
            fully_shard(layer, mesh=mesh)
    for model in (whole, unchanged):
        model[:2].requires_grad_(False)
    jobs = [(model, Muon(model, lr=0.03)) for model in (whole, unchanged)]
    for seed in range(4):
        if seed == 2:
            whole[:2].requires_grad_(True)
            for group in param_groups(whole[:2], lr=0.03):
                jobs[0][1].add_param_group(group)
            jobs.append((alone, Muon(alone[:2], lr=0.03)))
        for model, optimizer in jobs:
            _step(model, optimizer, seed)
    wanted = {**_weights(unchanged), **{n: t for n, t in _weights(alone).items() if n.startswith(("0.", "1."))}}
    assert_bitwise(_weights(whole), wanted)


@pytest.mark.parametrize("shard", [False, True])
def test_an_unfrozen_part_trains_like_a_fresh_one(shard: bool, world2: RankPool) -> None:
    world2.run(_unfrozen_part, shard)


def test_a_part_that_is_added_as_it_stands_is_told_what_to_write() -> None:
    model = _model()
    model[:2].requires_grad_(False)
    optimizer = Muon(model, lr=0.03)
    part = model[:2].requires_grad_(True)
    says = "for g in shardmuon.param_groups(part, lr=...): optimizer.add_param_group(g)"
    with pytest.raises(ValueError, match=re.escape(says)):
        optimizer.add_param_group({"params": list(part.named_parameters())})
    with pytest.raises(ValueError, match=r"group 2: its parameters have no names, those of the .* have names\. Give"):
        optimizer.add_param_group({"params": [part[0].weight]})
    optimizer, (group, _) = Muon([model[4].weight], lr=0.03), param_groups(model[2:4], lr=0.03)
    with pytest.raises(ValueError, match=r"group 1: its parameters have names, those of .* none\. .*group\.pop"):
        optimizer.add_param_group(group)
    group.pop("param_names")  # what the message says
    optimizer.add_param_group(group)
    assert optimizer.param_groups[1]["params"] == [model[2].weight]
