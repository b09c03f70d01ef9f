"""Muon in torchtitan's optimizer and scheduler containers, without torchtitan's Trainer, which needs an accelerator.

One process:  python examples/torchtitan_optimizer.py
Two ranks:    torchrun --nproc-per-node 2 examples/torchtitan_optimizer.py
"""

from __future__ import annotations

import argparse
import os

import torch
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

# [start:recipe]
from torchtitan.components.optimizer import LRSchedulersContainer

from shardmuon.frameworks.torchtitan import MuonOptimizers

OPTIMIZER = MuonOptimizers.Config(options={"lr": 0.03, "adamw_lr": 3e-3, "weight_decay": 0.1})


def train(folder: str, resume: str | None = None) -> nn.Module:
    # torchtitan's Trainer needs only `OPTIMIZER`, and does everything in this function itself.
    model = sharded(Net())
    optimizers = OPTIMIZER.build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizers, training_steps=6)
    first = 0
    if resume is not None:
        state = {"model": model.state_dict(), "optimizer": optimizers.state_dict(), "lr": schedulers.state_dict()}
        checkpoint.load(state, checkpoint_id=resume)
        model.load_state_dict(state["model"])
        optimizers.load_state_dict(state["optimizer"])
        schedulers.load_state_dict(state["lr"])
        first = 3
    for step in range(first, 6):
        tokens = batch(step)
        optimizers.zero_grad()
        cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizers.step()
        schedulers.step()
        if step == 2 and resume is None:
            state = {"model": model.state_dict(), "optimizer": optimizers.state_dict(), "lr": schedulers.state_dict()}
            checkpoint.save(state, checkpoint_id=f"{folder}/after-3")
    return model


# [end:recipe]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(32)
        self.up = nn.Linear(32, 64, bias=False)
        self.down = nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return result


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(32, 50, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(x)
        return result


def sharded(net: Net) -> Net:
    """Shard the net as torchtitan's parallelize functions do, if there are several ranks."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo")
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for block in (*net.blocks, net):
            fully_shard(block, mesh=mesh)
    return net


def batch(step: int) -> Tensor:
    seed = 1000 * int(os.environ.get("RANK", 0)) + step
    return torch.randint(0, 50, (4, 12), generator=torch.Generator().manual_seed(seed))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="out/torchtitan_optimizer")
    parser.add_argument("--resume")
    given = parser.parse_args()
    train(given.folder, given.resume)
