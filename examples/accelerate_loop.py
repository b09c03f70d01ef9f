"""Training with accelerate and Muon: gradient accumulation, clipping and checkpoints, in one process, DDP or FSDP2.

One process:  python examples/accelerate_loop.py
Two ranks:    torchrun --nproc-per-node 2 examples/accelerate_loop.py
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

if not torch.accelerator.is_available():
    os.environ["ACCELERATE_USE_CPU"] = "true"  # without this, accelerate does not initialize torch.distributed on CPUs

# [start:recipe]
from accelerate import Accelerator, FullyShardedDataParallelPlugin

from shardmuon import Muon


def train(folder: str, resume: str | None = None, fsdp: FullyShardedDataParallelPlugin | None = None) -> nn.Module:
    # Create the Accelerator first, because it initializes torch.distributed.
    accelerator = Accelerator(gradient_accumulation_steps=2, fsdp_plugin=fsdp)
    model = Net()
    optimizer = Muon(model, lr=0.03, adamw_lr=3e-3, process_group=torch.distributed.group.WORLD)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 40)
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, DataLoader(TEXT, batch_size=4), scheduler
    )
    done = 0
    if resume is not None:
        accelerator.load_state(resume)
        done = 6
        loader = accelerator.skip_first_batches(loader, done)
    for batch, tokens in enumerate(loader, start=done + 1):
        with accelerator.accumulate(model):
            loss = cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if batch == 6 and resume is None:
            accelerator.save_state(f"{folder}/after-6")
        if batch == 12:
            break
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


TEXT = [torch.randint(0, 50, (12,), generator=torch.Generator().manual_seed(i)) for i in range(128)]


def options(fsdp: bool) -> dict[str, Any]:
    """Additional arguments for `train`: FSDP2 settings if `fsdp` is True, otherwise none."""
    if not fsdp:
        return {}
    blocks = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
    return {"fsdp": FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", **blocks)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="out/accelerate_loop")
    parser.add_argument("--resume")
    parser.add_argument("--fsdp", action="store_true", help="for GPUs: on a CPU accelerate ignores it")
    given = parser.parse_args()
    train(given.folder, given.resume, **options(given.fsdp))
