"""The language model of examples/train.py and its training in one process, for benchmarks that compare optimizers."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from train import Config, Model, build_adamw, held_out_rows, loss_of, lr_factor, read_text, train_rows

__all__ = ["BETAS", "Config", "Model", "build_adamw", "evaluate", "fit", "loss_of", "read_text"]

BETAS = (0.9, 0.95)


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    text: np.ndarray,
    config: Config,
    before_step: Callable[[int], None] = lambda step: None,
) -> list[float]:
    """Train the model; return the loss of each step in nats per byte. Stop at the first loss that is not finite."""
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, config))
    losses: list[float] = []
    for step in range(config.steps):
        loss = loss_of(model, train_rows(text, config, step))
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            break
        loss.backward()
        before_step(step)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return losses


@torch.no_grad()
def evaluate(model: nn.Module, text: np.ndarray, config: Config) -> float:
    """The mean loss over the held-out batches."""
    return statistics.mean(float(loss_of(model, rows)) for rows in held_out_rows(text, config))
