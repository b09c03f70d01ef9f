"""Everything a training run is told. Plain data without torch: it pickles to the ranks and lies beside the results."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["DeviceChoice", "EngineName", "ModelConfig", "Offload", "OptimizerName", "TrainConfig"]

OptimizerName = Literal["muon", "adamw"]
DeviceChoice = Literal["auto", "cpu", "cuda"]
EngineName = Literal["torch", "deepspeed"]
Offload = Literal["none", "cpu", "nvme"]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of the model. `num_experts` 0 is a dense SwiGLU; otherwise `top_k` experts answer for each token, each
    with `hidden / top_k` hidden units, so that a token costs the same with experts and without."""

    vocab: int = 256
    dim: int = 224
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    hidden: int = 640
    num_experts: int = 0
    top_k: int = 2
    rope_base: float = 10_000.0

    def __post_init__(self) -> None:
        if self.dim % self.num_heads or (self.dim // self.num_heads) % 2:
            raise ValueError(
                f"dim {self.dim} over {self.num_heads} heads: each head needs an even number of channels "
                f"(rotary pairs them). Choose dim as a multiple of {2 * self.num_heads}."
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads do not share {self.num_kv_heads} key-value heads evenly.")
        if self.num_experts and not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"top-k {self.top_k} of {self.num_experts} experts: choose 1 to {self.num_experts}.")
        if self.num_experts and self.hidden % self.top_k:
            raise ValueError(f"hidden {self.hidden} must be a multiple of top-k {self.top_k}.")

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    @property
    def expert_hidden(self) -> int:
        return self.hidden // self.top_k


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """One training setup, and the optimizers to run it with, one after the other.

    Attributes:
        mesh: Ranks along each mesh axis, outermost first; empty for one process.
        batch: Sequences in the global batch, of `seq_len` bytes each.
        eval_every: Steps between two looks at the held-out loss; there is always one at the end.
        eval_batches: Batches of `batch` sequences in one such look.
        out: Folder for the results, or None.
        zero: Stage of DeepSpeed's ZeRO. This and the next two are for engine "deepspeed".
        offload: Where ZeRO keeps the optimizer's state.
        nvme_path: Folder of a fast disk, for offload "nvme".
    """

    layout: str = "single"
    mesh: dict[str, int] = field(default_factory=dict)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizers: tuple[OptimizerName, ...] = ("muon",)
    seq_len: int = 128
    batch: int = 16
    steps: int = 130
    lr: float = 2e-2
    adamw_lr: float = 4e-3
    weight_decay: float = 0.1
    warmup: int = 30
    final_lr_fraction: float = 0.1
    eval_every: int = 26
    eval_batches: int = 4
    seed: int = 0
    device: DeviceChoice = "auto"
    show_routing: bool = False
    out: str | None = None
    engine: EngineName = "torch"
    zero: int = 0
    offload: Offload = "none"
    nvme_path: str | None = None

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
