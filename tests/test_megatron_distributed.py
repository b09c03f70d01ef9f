"""shardmuon inside Megatron-core's distributed optimizer, whose fp32 shards cut matrices anywhere, and on its
tensor-parallel layers. The reference is shardmuon on one process with the whole matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_gpt import clean, gpt, half, megatron, needs_megatron, optimizer_config
from torch import Tensor, nn

from shardmuon import Muon
from shardmuon.integrations.megatron import get_megatron_optimizer
from shardmuon.testing import get_pool

DISTRIBUTED = {"use_distributed_optimizer": True}


def _everywhere(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _sums(shape: torch.Size, step: int, index: int, ranks: list[int]) -> list[Tensor]:
    """What ranks add up, and its sum: eighths, so that no order of adding rounds."""
    made = []
    for rank in ranks:
        generator = torch.Generator().manual_seed(1000 * step + 100 * rank + index)
        made.append(torch.randint(-16, 17, shape, generator=generator) / 8)
    return made


def _ranges(optimizer: Any) -> dict[str, tuple[int, int]]:
    """What Megatron says that this rank's shards are, by parameter."""
    found = {}
    for part in optimizer.chained_optimizers:
        for chunk in part.model_chunks:
            for name, param in chunk.named_parameters():
                if param in part.model_param_gbuf_map:
                    held = part._get_model_param_range_map(param)["param"]
                    found[clean(name)] = (held.start, held.end)
    return found


class Dense:
    """The whole parameters on this process, in the groups of Megatron's optimizers."""

    def __init__(self, made: list[list[dict[str, Any]]]) -> None:
        self.params = {
            name: p for groups in made for g in groups for name, p in zip(g["param_names"], g["params"], strict=True)
        }
        self.parts = [Muon(groups, deterministic=True) for groups in made]

    def step(self, grads: dict[str, Tensor]) -> None:
        for name, p in self.params.items():
            p.grad = grads[name].clone()
        for optimizer in self.parts:
            optimizer.step()


def _dense(optimizer: Any, whole: dict[str, Tensor]) -> Dense:
    copies = {name: nn.Parameter(t.detach().float().clone()) for name, t in whole.items()}
    made = []
    for part in optimizer.chained_optimizers:
        own = {"process_group", "tp_group", "step"}
        groups = [{k: v for k, v in group.items() if k not in own} for group in part.optimizer.param_groups]
        made.append([{**group, "params": [copies[name] for name in group["param_names"]]} for group in groups])
    return Dense(made)


def _cut_anywhere(dtype: torch.dtype) -> dict[str, Any]:
    with megatron():
        model = gpt(ddp=DISTRIBUTED, calculate_per_token_loss=True, **half(dtype))
        config = optimizer_config(clip_grad=0.0, **DISTRIBUTED, **half(dtype))
        optimizer = get_megatron_optimizer(config, [model], adamw_lr=0.01, deterministic=True)
        whole = {clean(name): p for name, p in model.named_parameters()}
        dense = _dense(optimizer, whole)
        ranks = list(range(dist.get_world_size()))
        wrong: list[str] = []
        for step in range(3):
            model.zero_grad_buffer()
            optimizer.zero_grad()
            grads = {}
            for index, (name, p) in enumerate(whole.items()):
                parts = _sums(p.shape, step, index, ranks)
                p.main_grad.copy_(parts[dist.get_rank()])
                grads[name] = sum(parts, torch.zeros(p.shape))
            model.finish_grad_sync()
            optimizer.step()
            dense.step(grads)
            part = optimizer.chained_optimizers[0]
            for name, p in whole.items():
                if not torch.equal(p, dense.params[name].to(dtype)):
                    wrong.append(f"{name} after step {step}")
                if p in part.model_param_gbuf_map:
                    held = part._get_model_param_range_map(p)["param"]
                    shard = part.shardmuon_shards[p]
                    if not torch.equal(shard, dense.params[name].view(-1)[held.start : held.end]):
                        wrong.append(f"main weights of {name} after step {step}")
        muon = optimizer.chained_optimizers[0].optimizer
        return {
            "wrong": wrong,
            "ranges": _ranges(optimizer),
            "runs": muon.traffic.orthogonalized,
            "cols": {name: p.shape[-1] for name, p in whole.items() if p.ndim == 2},
            "muon": [n for g in muon.param_groups if g["use_muon"] for n in g["param_names"]],
        }


@needs_megatron
@pytest.mark.parametrize(("world", "dtype"), [(2, torch.bfloat16), (3, torch.float32), (4, torch.float32)])
def test_flat_main_shards_get_the_dense_update(world: int, dtype: torch.dtype) -> None:
    ranks = get_pool(world).run(_cut_anywhere, dtype)
    assert [found["wrong"] for found in ranks] == [[]] * world
    assert sum(found["runs"] for found in ranks) == 3 * 6  # q, k, v, proj, fc1, fc2: once in the job
    shared = [n for n in ranks[0]["muon"] if sum(n in found["ranges"] for found in ranks) > 1]
    assert shared, "no matrix straddles a boundary between ranks"
    assert any(
        found["ranges"][n][0] % found["cols"][n] for n in shared for found in ranks if n in found["ranges"]
    ), "no matrix is cut inside a row"
    assert any(n not in found["ranges"] for n in ranks[0]["muon"] for found in ranks), "every rank holds some of all"
