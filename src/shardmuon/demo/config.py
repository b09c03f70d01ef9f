"""Everything a training run is told. Plain data: it pickles to the ranks and is written beside the results."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from shardmuon.demo.model import ModelConfig
from shardmuon.demo.optimizers import OptimizerName

__all__ = ["DeviceChoice", "TrainConfig"]

DeviceChoice = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """One training setup, and the optimizers to run it with, one after the other.

    Attributes:
        mesh: Ranks along each mesh axis, outermost first; empty for one process.
        batch: Sequences in the global batch, of `seq_len` bytes each.
        eval_every: Steps between two looks at the held-out loss; there is always one at the end.
        eval_batches: Batches of `batch` sequences in one such look.
        tolerance: The largest relative difference that the last step's proof allows; None: the default of the
            precision that Newton-Schulz ran in, 0 with `deterministic`.
        out: Folder for the results, or None.
    """

    layout: str
    mesh: dict[str, int]
    model: ModelConfig
    optimizers: tuple[OptimizerName, ...] = ("muon",)
    seq_len: int = 128
    batch: int = 16
    steps: int = 200
    lr: float = 3e-3
    adamw_lr: float = 3e-3
    weight_decay: float = 0.1
    warmup: int = 20
    final_lr_fraction: float = 0.1
    eval_every: int = 50
    eval_batches: int = 4
    seed: int = 0
    device: DeviceChoice = "auto"
    deterministic: bool = False
    tolerance: float | None = None
    show_routing: bool = False
    out: str | None = None

    def __post_init__(self) -> None:
        positive = ("seq_len", "batch", "steps", "eval_every", "eval_batches", "lr", "adamw_lr")
        for name in positive:
            if getattr(self, name) <= 0:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be positive.")

    @property
    def num_ranks(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.seq_len

    def learning_rate(self, name: OptimizerName) -> float:
        return self.lr if name == "muon" else self.adamw_lr
