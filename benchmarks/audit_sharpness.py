"""How sharp the audit is: findings in healthy random steps, and planted faults that are named, by arithmetic and size.

Healthy steps draw everything at random: shapes and how many matrices of each, spectrum and scale of the gradients,
momentum's options, weight decay, method, schedule, dtype of the weights. Several matrices of one shape run as a batch
in the live step and alone in the audit. The faults are those of tests/test_audit.py.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

import common
import torch
from torch import Tensor, nn

from shardmuon import Muon, audit
from shardmuon.testing.pool import RankPool

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SCHEDULES = ("keller", "quintic", "polar_express", "cans", "cubic", "deepseek_v4")
SPECTRA = ("gauss", "power", "six decades", "rank 1", "rank 2", "low rank and noise", "orthogonal", "spike", "ones")


def gradient(kind: str, rows: int, cols: int, generator: torch.Generator) -> Tensor:
    """A matrix with this kind of spectrum, fp64."""
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


def healthy(dtype: str, seed: int, largest: int) -> tuple[list[str], list[str], int, str]:
    """Two steps of a random optimizer, the second audited: findings, statuses, matrices, and what was drawn."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    method = draw.choice(["standard", "standard", "gram", "torch"] if dtype == "bf16" else ["standard", "gram"])
    if dtype == "bf16" and method == "gram":
        method = "standard"
    options: dict[str, Any] = {"ns_method": method, "ns_coefficients": draw.choice(SCHEDULES)}
    options |= {} if method == "torch" else {"ns_dtype": DTYPES[dtype]}
    options["ns_steps"] = None
    options["nesterov"] = draw.random() < 0.5
    options["momentum"] = draw.choice([0.0, 0.5, 0.95])
    options["weight_decay_mode"] = draw.choice(["decoupled", "l2", "independent", "cautious"])
    options["weight_decay"] = draw.choice([0.0, 0.01, 0.3])
    options["lr"] = draw.choice([1e-3, 0.02, 0.3])
    options["adjust_lr_fn"] = draw.choice(["original", "match_rms_adamw"])
    options["momentum_dtype"] = draw.choice([None, None, None, torch.bfloat16, "int8"])
    weights = draw.choice([torch.float32, torch.bfloat16])
    options["stochastic_rounding"] = weights == torch.bfloat16 and draw.random() < 0.5
    shapes = [(draw.randint(1, largest), draw.randint(1, largest)) for _ in range(draw.randint(1, 3))]
    shapes = [shape for shape in shapes for _ in range(draw.randint(1, 4))]
    names = [f"w{i}" for i in range(len(shapes))]
    params = {n: nn.Parameter((0.05 * torch.randn(s, generator=generator)).to(weights)) for n, s in zip(names, shapes)}
    kinds = [draw.choice(SPECTRA) for _ in shapes]
    scale = draw.choice([1e-12, 1e-3, 1.0, 1e8])
    optimizer = Muon(params.items(), **options)
    for step in range(2):
        for (name, p), shape, kind in zip(params.items(), shapes, kinds):
            grad = gradient(kind, *shape, generator)
            p.grad = (scale * (grad + 0.1 * step * grad.flip(0)) / grad.norm()).to(weights)
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


def count_healthy(steps: int, largest: int) -> tuple[list[str], dict[str, Any]]:
    """The table of healthy steps."""
    lines = ["| products | healthy steps | matrices | findings | rows `blind` |", "|---|---|---|---|---|"]
    data: dict[str, Any] = {}
    for dtype in DTYPES:
        findings: list[str] = []
        blind = matrices = 0
        for seed in range(steps):
            found, statuses, count, drawn = healthy(dtype, seed, largest)
            findings += [f"{drawn}: {text}" for text in found]
            blind += statuses.count("blind")
            matrices += count
        lines.append(f"| {dtype} | {steps} | {matrices} | {len(findings)} | {blind} |")
        data[dtype] = {"findings": findings, "blind": blind, "matrices": matrices}
        print(lines[-1], *findings[:5], sep="\n", flush=True)
    return lines, data


def count_named(rows: list[int]) -> tuple[list[str], dict[str, Any]]:
    """The table of planted faults."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    import test_audit

    products = {name: test_audit.PRODUCTS[name] for name in DTYPES}
    heads = [f"{name} {size}" for name in products for size in rows]
    data: dict[str, dict[str, str]] = {name: {} for name in test_audit.FAULTS}
    with RankPool(2, timeout=1800) as pool:
        for product, options in products.items():
            for size in rows:
                first, second = pool.run(test_audit.caught_all, size, options)
                for name in test_audit.FAULTS:
                    try:
                        test_audit.check_caught(name, [first[name], second[name]])
                        data[name][f"{product} {size}"] = "named"
                    except AssertionError as error:
                        data[name][f"{product} {size}"] = "NOT"
                        print(name, product, size, error, flush=True)
    lines = ["| fault | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    lines += [f"| {name} | " + " | ".join(found[head] for head in heads) + " |" for name, found in data.items()]
    return lines, data


def main() -> None:
    """Measure and write results/audit_sharpness.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--largest", type=int, default=64, help="rows and columns of healthy matrices, at most")
    parser.add_argument("--rows", type=int, nargs="*", default=[32, 256, 1024])
    args = parser.parse_args()
    lines, healthy_data = count_healthy(args.steps, args.largest)
    named, data = count_named(args.rows)
    lines += ["", f"Planted faults on 2 ranks; matrices of so many rows and 24 columns: {len(named) - 2}.", "", *named]
    common.write("audit_sharpness", "\n".join(lines), {"healthy": healthy_data, "named": data})


if __name__ == "__main__":
    main()
