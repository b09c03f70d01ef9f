"""A model with awkward shapes and a function that trains it for two steps with default options. When run as a script,
this file prints a digest of each trained weight."""

from __future__ import annotations

import hashlib
import json

import torch
from torch import Tensor, nn

from shardmuon import Muon
from shardmuon._torch import cpu_has_bf16_matmul
from shardmuon.testing.layouts import ParamCase

STEPS = 2
SHAPES = [(5, 257), (257, 5), (3, 1000), (1, 1025), (17, 33), (17, 33), (33, 17), (16, 16), (8, 16), (8, 16), (8, 16)]


def cases() -> dict[str, ParamCase]:
    """Return the model's parameters. The largest one is left out if matmuls are in bf16 and torch emulates bf16,
    because it would take minutes."""
    emulated = cpu_has_bf16_matmul() and torch.backends.cpu.get_cpu_capability() == "AVX2"
    return {f"w{i}": ParamCase(shape, "hurts") for i, shape in enumerate([*SHAPES, *[(384, 1024)] * (not emulated)])}


def drawn() -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Return the weights, and the gradients of each step. All values are multiples of 1/8, so that means over ranks are
    exact."""
    generator = torch.Generator().manual_seed(7)

    def draw() -> dict[str, Tensor]:
        made = {name: torch.randn(case.shape, generator=generator) for name, case in cases().items()}
        # Adding 0.0 turns -0.0 into 0.0, as a sum over ranks that begins with zero would.
        return {name: (2 * t).round().clamp(-8, 8) / 8 + 0.0 for name, t in made.items()}

    return draw(), [draw() for _ in range(STEPS)]


def stepped_alone(apart: bool = False) -> dict[str, str]:
    """Return digests of the weights after two steps in one process. If `apart` is True, each matrix has its own
    optimizer."""
    full, grads = drawn()
    params = {name: nn.Parameter(t.clone()) for name, t in full.items()}
    together = [[pair] for pair in params.items()] if apart else [list(params.items())]
    optimizers = [Muon(named, lr=0.02) for named in together]
    for of_step in grads:
        for name, grad in of_step.items():
            params[name].grad = grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    return {name: hashlib.sha256(p.detach().numpy().tobytes()).hexdigest()[:16] for name, p in params.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(stepped_alone()))
