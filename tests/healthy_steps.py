"""Fault-free optimizer steps with random options, for the tests and the benchmark of `shardmuon.audit`."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from variant_cases import LATER

from shardmuon import Muon, audit

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SCHEDULES = ("keller", "quintic", "polar_express", "cans", "cubic", "deepseek_v4")
VARIANTS = ("normuon", "muon_eq", "hyperball", "muon_eq+normuon", "muon_eq+hyperball", "normuon+hyperball")
# The audit tests call `healthy` with consecutive seeds, which select the variants in IN_TURN one after another.
IN_TURN = (*VARIANTS, *[None] * len(VARIANTS), *LATER)
SPECTRA = ("gauss", "power", "six decades", "rank 1", "rank 2", "low rank and noise", "orthogonal", "spike", "ones")


def gradient(kind: str, rows: int, cols: int, generator: torch.Generator) -> Tensor:
    """Return a random fp64 matrix with the given kind of spectrum."""
    x = torch.randn(rows, cols, generator=generator, dtype=torch.float64)
    if kind == "gauss":
        return x
    if kind == "ones":
        return torch.ones_like(x)
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    index = torch.arange(len(s), dtype=torch.float64)
    if kind == "spike":
        return x + 30 * torch.outer(u[:, 0], vh[0])
    values = {
        "power": 1 / (1 + index),
        "six decades": 10 ** (-6 * index / len(s)),
        "rank 1": (index < 1).double(),
        "rank 2": (index < 2).double(),
        "low rank and noise": (index < 2).double() + 1e-3,
        "orthogonal": torch.ones_like(index),
    }[kind]
    return (u * values) @ vh


def healthy(
    dtype: str, seed: int, largest: int, device: str = "cpu", variant: str | None = None
) -> tuple[list[str], list[str], int, str]:
    """Take two steps with a randomly configured optimizer, and audit the second one. Return the audit's findings, the
    audit's status for each matrix, the number of matrices, and a description of the random choices.

    The audit tests rely on fixed seeds, so a seed must always result in the same choices. Do not add entries to the
    lists of choices, and use a second `Random` for new options.
    """
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    # bf16 excludes method="gram", because the Gram form of Newton-Schulz does not support bf16.
    method = draw.choice(["standard", "standard", "standard", "torch"] if dtype == "bf16" else ["standard", "gram"])
    options: dict[str, Any] = {
        "method": method,
        "ns_dtype": None if method == "torch" else DTYPES[dtype],
        "ns_coefficients": draw.choice(SCHEDULES),
        "ns_steps": None,
        "nesterov": draw.random() < 0.5,
        "momentum": draw.choice([0.0, 0.5, 0.95]),
    }
    decay = draw.choice([None, None, None, "cautious"])
    options |= {
        "weight_decay": draw.choice([0.0, 0.01, 0.3]),
        "lr": draw.choice([1e-3, 0.02, 0.3]),
        "adjust_lr_fn": draw.choice(["original", "match_rms_adamw"]),
        "momentum_dtype": draw.choice([None, None, None, torch.bfloat16, "int8"]),
    }
    weights = draw.choice([torch.float32, torch.bfloat16])
    options["stochastic_rounding"] = weights == torch.bfloat16 and draw.random() < 0.5
    if variant is not None and "hyperball" in variant:
        decay, options["weight_decay"] = None, 0.0
    options["variant"] = "+".join(name for name in (variant, decay) if name) or None
    shapes = [(draw.randint(1, largest), draw.randint(1, largest)) for _ in range(draw.randint(1, 3))]
    shapes = [shape for shape in shapes for _ in range(draw.randint(1, 4))]
    params = [nn.Parameter((0.05 * torch.randn(s, generator=generator)).to(device, weights)) for s in shapes]
    kinds = [draw.choice(SPECTRA) for _ in shapes]
    scale = draw.choice([1e-12, 1e-3, 1.0, 1e8])
    optimizer = Muon([(f"w{i}", p) for i, p in enumerate(params)], **options)
    for step in range(2):
        for p, shape, kind in zip(params, shapes, kinds, strict=True):
            grad = gradient(kind, *shape, generator)
            p.grad = (scale * (grad + 0.1 * step * grad.flip(0)) / grad.norm()).to(device, weights)
        check = audit(optimizer, 100) if step else None
        optimizer.step()
    assert check is not None
    report = check.report
    return (
        [str(f) for f in report.findings if f.name != "update_lost_to_rounding"],
        [m.status for m in report.matrices],
        len(report.matrices),
        f"{options} {shapes} {kinds} scale={scale} {weights}",
    )
