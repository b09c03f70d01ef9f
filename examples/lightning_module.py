"""Lightning with Muon: DDP, or FSDP2 through ModelParallelStrategy.

One process:  python examples/lightning_module.py
Two ranks:    torchrun --nproc-per-node 2 examples/lightning_module.py --devices 2 --strategy ddp
              torchrun --nproc-per-node 2 examples/lightning_module.py --devices 2 --strategy modelparallel
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

# [start:recipe]
import lightning

from shardmuon import Muon


class LitModel(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def configure_model(self) -> None:
        if self.device_mesh is not None:  # set by ModelParallelStrategy
            for block in (*self.net.blocks, self.net):
                fully_shard(block, mesh=self.device_mesh["data_parallel"])

    def training_step(self, tokens: Tensor) -> Tensor:
        return cross_entropy(self.net(tokens).flatten(0, 1), tokens.flatten())

    def configure_optimizers(self) -> Any:
        optimizer = Muon(self, lr=0.03, adamw_lr=3e-3, process_group=torch.distributed.group.WORLD)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def train(folder: str, resume: str | None = None, **options: Any) -> nn.Module:
    keep = lightning.pytorch.callbacks.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    trainer = lightning.Trainer(max_steps=6, gradient_clip_val=1.0, callbacks=[keep], **options)
    model = LitModel()
    trainer.fit(model, DataLoader(TEXT, batch_size=4), ckpt_path=resume)
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


# Lightning restarts the epoch when it resumes from a checkpoint in the middle of one. All samples are equal, so that a
# resumed run sees the same data as an uninterrupted run.
TEXT = [torch.randint(0, 50, (12,), generator=torch.Generator().manual_seed(0))] * 128
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


def options(devices: int, strategy: str) -> dict[str, Any]:
    """Options of a Trainer for `devices` CPU ranks."""
    chosen: Any = strategy
    if strategy == "modelparallel":
        chosen = lightning.pytorch.strategies.ModelParallelStrategy(
            data_parallel_size=devices, tensor_parallel_size=1, process_group_backend="gloo"
        )
    return {"accelerator": "cpu", "devices": devices, "strategy": chosen, **QUIET}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="out/lightning_module")
    parser.add_argument("--resume")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--strategy", default="auto", help="auto, ddp or modelparallel")
    given = parser.parse_args()
    train(given.folder, given.resume, **options(given.devices, given.strategy))
