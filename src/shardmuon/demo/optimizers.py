"""The two optimizers the demo compares, over the same parameters."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardmuon import Muon, param_groups

__all__ = ["build_adamw", "build_muon", "local_state_bytes", "muon_options"]

BETAS = (0.9, 0.95)


def muon_options() -> dict[str, Any]:
    """Options of the demo's Muon. Its updates are scaled to the root mean square that AdamW's have, so that one
    learning rate serves the matrices and the rest."""
    return {"adjust_lr_fn": "match_rms_adamw"}


def build_muon(
    model: nn.Module, lr: float, weight_decay: float, options: dict[str, Any], *, replicated: bool = False
) -> tuple[Muon, str]:
    """Muon for the matrices with AdamW for the rest, and the table of which parameter is which and why. `replicated`:
    all ranks hold the whole model."""
    groups = param_groups(model, lr=lr, adamw_lr=lr, weight_decay=weight_decay)
    # DTensors know their ranks; plain replicas share the work only over a group they are given
    replicas = dist.group.WORLD if replicated or isinstance(model, DistributedDataParallel) else None
    return Muon(groups, lr=lr, process_group=replicas, **options), str(groups)


def build_adamw(model: nn.Module, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """torch.optim.AdamW for every parameter, no decay on those with one dim."""
    # torch's fused AdamW takes one mesh at a time and no mix of plain tensors and DTensors
    groups: dict[tuple[object, bool], list[Tensor]] = {}
    for p in model.parameters():
        groups.setdefault((p.device_mesh if isinstance(p, DTensor) else None, p.ndim > 1), []).append(p)
    return torch.optim.AdamW(
        [{"params": params, "weight_decay": weight_decay * decays} for (_, decays), params in groups.items()],
        lr=lr,
        betas=BETAS,
        fused=True,
    )


def local_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of optimizer state that this rank stores."""
    stored = [
        (value.to_local() if isinstance(value, DTensor) else value).untyped_storage()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    return sum({storage.data_ptr(): storage.nbytes() for storage in stored}.values())  # views count once
