"""The best learning rates for fine-tuning a pretrained model with AdamW or Muon, either fully or with LoRA.

    python benchmarks/fine_tuning.py                  # about twenty minutes on two cores
    python benchmarks/fine_tuning.py --seeds 1

For each seed, a base model is first trained with AdamW, as base models usually are, on the source code of Python's
standard library. It is then fine-tuned on the library's English documentation (`pydoc_data.topics`), which was left out
of the first training. For each way of fine-tuning, the script searches up and down a grid of learning rates that differ
by factors of two. Each finished run is saved in results/fine_tuning_runs.json, so an interrupted sweep can be resumed.
"""

from __future__ import annotations

import argparse
import copy
import math
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, write
from language import BETAS, Config, Model, build_adamw, evaluate, fit, read_text
from sweeps import Curve, Sweep, at_best
from torch import Tensor, nn

from shardmuon import Muon

TOPICS = "pydoc_data/topics.py"


class LoRA(nn.Module):
    """LoRA (https://arxiv.org/abs/2106.09685): y = W x + (alpha / r) B A x. W is frozen, A starts from normal random
    values, B starts at zero, and alpha = 2 r."""

    def __init__(self, base: nn.Linear, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        self.base = base
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        with torch.no_grad():
            self.lora_A.weight.normal_(0.0, base.in_features**-0.5, generator=generator)
            self.lora_B.weight.zero_()

    def forward(
        self,
        x: Tensor,  # (..., in_features)
    ) -> Tensor:  # (..., out_features)
        return self.base(x) + 2.0 * self.lora_B(self.lora_A(x))


def with_lora(model: nn.Module, rank: int, seed: int) -> nn.Module:
    """Add LoRA factors to every linear layer of the blocks, and freeze all other weights."""
    generator = torch.Generator().manual_seed(seed)
    model.requires_grad_(False)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and "." in name:  # the head, whose name has no dot, gets no LoRA
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, LoRA(layer, rank, generator))
    return model


@dataclass(frozen=True)
class Way:
    """One way to fine-tune.

    Attributes:
        code: The code that a user writes, with x for the learning rate.
        lora: True if only the LoRA factors are trained.
        start: The exponent of 2 at which the search for the learning rate starts.
        make: A function (model, lr) -> optimizer.
    """

    code: str
    lora: bool
    start: int
    make: Callable[[nn.Module, float], torch.optim.Optimizer]


def adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, betas=BETAS, weight_decay=0.0)


def muon(scale: str | None) -> Callable[[nn.Module, float], torch.optim.Optimizer]:
    return lambda model, lr: Muon(model, lr=lr, weight_decay=0.0, adjust_lr_fn=scale)


WAYS = {
    "all-adamw": Way("all weights: torch.optim.AdamW(lr=x)", False, -9, adamw),
    "all-rms": Way(
        'all weights: Muon(model, lr=x, adjust_lr_fn="match_rms_adamw")', False, -9, muon("match_rms_adamw")
    ),
    "all-muon": Way("all weights: Muon(model, lr=x)", False, -7, muon(None)),
    "lora-adamw": Way("LoRA: torch.optim.AdamW(lr=x)", True, -7, adamw),
    "lora-rms": Way('LoRA: Muon(model, lr=x, adjust_lr_fn="match_rms_adamw")', True, -7, muon("match_rms_adamw")),
    "lora-muon": Way("LoRA: Muon(model, lr=x)", True, -6, muon(None)),
}


class FineTuning:
    """Fine-tuning runs, and the base models that they start from: one per seed, trained on first use."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._bases: dict[int, nn.Module] = {}
        topics = Path(sysconfig.get_paths()["stdlib"], TOPICS).read_bytes()
        self._code = np.frombuffer(read_text()[0].tobytes().replace(topics, b""), np.uint8)
        end = len(topics) * 9 // 10
        self._topics, self._held_out = (np.frombuffer(part, np.uint8) for part in (topics[:end], topics[end:]))

    def _config(self, steps: int, seed: int) -> Config:
        args = self._args
        return Config(
            dim=args.width, layers=args.layers, hidden=3 * args.width, seq_len=args.seq_len, batch=args.batch,
            steps=steps, warmup=steps // 10, seed=seed, eval_batches=args.eval_batches,
        )  # fmt: skip

    def base(self, seed: int) -> nn.Module:
        """A copy of this seed's pretrained model."""
        if seed not in self._bases:
            config = self._config(self._args.base_steps, seed)
            model = Model(config)
            assert math.isfinite(fit(model, build_adamw(model, 2.0**-8, 0.1), self._code, config)[-1])
            self._bases[seed] = model
        return copy.deepcopy(self._bases[seed])

    def loss(self, model: nn.Module) -> float:
        """The held-out loss on the fine-tuning text, in nats per byte."""
        return evaluate(model, self._held_out, self._config(self._args.steps, 0))

    def run(self, name: str, lr: float, seed: int) -> float:
        """Fine-tune the base model; return its held-out loss, or infinity if training diverged."""
        way, config = WAYS[name], self._config(self._args.steps, seed + 1000)
        model = self.base(seed)
        if way.lora:
            model = with_lora(model, self._args.rank, seed)
        losses = fit(model, way.make(model, lr), self._topics, config)
        return self.loss(model) if math.isfinite(losses[-1]) else math.inf


def table(curves: dict[str, Curve]) -> str:
    """A table of the best learning rate for each way of fine-tuning, with the losses at half and at twice that rate."""
    lines = ["| written as | best lr: held-out loss | at half of it | at twice |", "|---" * 4 + "|"]
    for name, curve in curves.items():
        power = min(curve, key=lambda p: sum(curve[p]))
        sides = (f"{sum(curve[p]) / len(curve[p]):.3f}" for p in (power - 1, power + 1))
        lines.append(f"| `{WAYS[name].code}` | {at_best(curve)} | " + " | ".join(sides) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--base-steps", type=int, default=400)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--eval-batches", type=int, default=24)
    args = parser.parse_args()
    setting: dict[str, Any] = {key: value for key, value in vars(args).items() if key != "seeds"}
    tuning = FineTuning(args)
    sweep = Sweep(RESULTS / "fine_tuning_runs.json", setting, args.seeds, tuning.run)
    curves = {name: sweep.curve(name, way.start) for name, way in WAYS.items()}
    before = [tuning.loss(tuning.base(seed)) for seed in range(args.seeds)]
    text = (
        f"Held-out loss (nats per byte) of the demo's model ({args.layers} blocks, width {args.width}; "
        f"{args.base_steps} steps of AdamW on code) after {args.steps} steps of {args.batch} x {args.seq_len} bytes on "
        f"English text: mean of {args.seeds} seeds (lowest..highest) on a grid of factors of two. LoRA of rank "
        f"{args.rank}. Before: "
        f"{sum(before) / len(before):.3f}.\n\n{table(curves)}"
    )
    write("fine_tuning", text, {name: {f"2^{p}": v for p, v in curve.items()} for name, curve in curves.items()})


if __name__ == "__main__":
    main()
