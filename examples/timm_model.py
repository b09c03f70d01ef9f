"""Training of a timm model with Muon and one of timm's learning-rate schedulers.

One process:  python examples/timm_model.py
Two ranks:    torchrun --nproc-per-node 2 examples/timm_model.py
"""

from __future__ import annotations

import argparse
import os

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

# [start:recipe]
import timm
from timm.scheduler import create_scheduler_v2

from shardmuon import Muon


def train(folder: str, resume: str | None = None) -> nn.Module:
    if "RANK" in os.environ:  # set by torchrun
        torch.distributed.init_process_group("gloo")
    model = timm.create_model("vit_tiny_patch16_224", **TINY)
    spared = model.no_weight_decay() & {name for name, _ in model.named_parameters()}
    optimizer = Muon(
        model,
        lr=3e-3,
        weight_decay=0.05,
        adjust_lr_fn="match_rms_adamw",
        overrides=[(name, {"weight_decay": 0.0}) for name in sorted(spared)],
        process_group=torch.distributed.group.WORLD,
    )
    scheduler, _ = create_scheduler_v2(optimizer, sched="cosine", num_epochs=6)
    first = 0
    if resume is not None:
        saved = torch.load(resume)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    wrapped = DistributedDataParallel(model) if torch.distributed.is_initialized() else model
    for step in range(first, 6):
        images, labels = batch(step)
        cross_entropy(wrapped(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(step + 1)
        if step == 2 and resume is None:
            save(f"{folder}/after-3.pt", {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3})
    return model


# [end:recipe]


TINY = {
    "img_size": 16,
    "patch_size": 8,
    "embed_dim": 32,
    "depth": 2,
    "num_heads": 4,
    "num_classes": 10,
}


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * int(os.environ.get("RANK", 0)) + step)
    return torch.randn(4, 3, 16, 16, generator=generator), torch.randint(0, 10, (4,), generator=generator)


def save(path: str, what: dict[str, object]) -> None:
    if int(os.environ.get("RANK", 0)) == 0:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        torch.save(what, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="out/timm_model")
    parser.add_argument("--resume")
    given = parser.parse_args()
    torch.manual_seed(0)
    train(given.folder, given.resume)
