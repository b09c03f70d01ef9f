"""A model wrapped with FSDP1, and the same model trained in one process."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from shardmuon import Muon
from shardmuon.testing.frameworks import Fsdp1Run, quiet

OPTIONS: dict[str, Any] = {"lr": 0.02, "adamw_lr": 0.003}


class Block(nn.Module):
    """A block with matrices of different shapes, a LayerNorm and a bias. The shapes are chosen so that shards end in
    the middle of rows, and so that some ranks store no element of some matrices."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width, bias=False)
        self.narrow = nn.Linear(width, 3, bias=False)
        self.widen = nn.Linear(3, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return x + self.down(torch.tanh(self.up(x))) + self.widen(self.narrow(x))


class Frozen(nn.Linear):
    pass


class Tied(nn.Module):
    """A model with tied embedding and head weights, two blocks, a module without parameters, and a frozen layer."""

    def __init__(self, width: int = 9, words: int = 17) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.Sequential(Block(width), Block(width), nn.Identity())
        self.frozen = Frozen(width, width, bias=False).requires_grad_(False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.layers(self.embedding(tokens))
        return self.head(self.norm(x + self.frozen(x)))


def tied() -> Tied:
    torch.manual_seed(0)
    return Tied()


def wrapped(model: nn.Module, strategy: str = "FULL_SHARD", **options: Any) -> FSDP:
    return Fsdp1Run.wrap(model, strategy, auto_wrap_policy=ModuleWrapPolicy({Block, Frozen, nn.Identity}), **options)


def job(strategy: str = "FULL_SHARD", options: Mapping[str, Any] | None = None, **how: Any) -> tuple[FSDP, Muon]:
    """Return an FSDP1-wrapped model and its optimizer. `how` contains arguments for the FSDP wrapper."""
    model = wrapped(tied(), strategy, **how)
    return model, Muon(model, **OPTIONS, **(options or {}))


def loss(model: nn.Module, step: int) -> Tensor:
    """Return the loss on tokens that are the same on all ranks. The ranks' gradients are therefore equal, and their
    mean over 2 or 4 ranks is exact."""
    return model(torch.randint(0, 17, (3, 5), generator=torch.Generator().manual_seed(step))).square().mean()


def train(model: nn.Module, optimizer: Muon, steps: range) -> None:
    for step in steps:
        loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def plain_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@cache
def alone(steps: int, **options: Any) -> dict[str, Tensor]:
    """Train the model in one process, and return its weights. The result is cached, so that each rank trains the model
    only once."""
    model = tied()
    train(model, Muon(model, **OPTIONS, **options), range(steps))
    return plain_weights(model)


def unlike(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name, t in expected.items() if not torch.equal(found[name], t)]


# With offload_to_cpu=True (the default), FSDP1 in torch 2.13 returns full state dicts on CPUs without copying the
# gathered tensors. Tensors of different state keys then share memory and all end up with the values of the last key.
# This bug affects every optimizer. COPIED avoids it by disabling offloading.
COPIED = FullStateDictConfig(offload_to_cpu=False), FullOptimStateDictConfig(offload_to_cpu=False)


def full_state(model: FSDP, optimizer: Muon) -> dict[str, Any]:
    with quiet(), FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *COPIED):
        return {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)}
