"""Accuracy of the audit: false alarms in correct ("healthy") steps, and planted faults that it identifies.

A healthy step is random in most respects: the number and shapes of the matrices, the spectrum and scale of the
gradients, the momentum options, the weight decay, the Newton-Schulz method, its coefficients and the dtype of the
weights. At least half of the steps use a Muon variant. Matrices of the same shape run as one batch in the step and one
by one in the audit. The planted faults are defined in tests/planted.py.

`--steps 1567 --rows` audits 4,701 healthy steps and plants no faults. It takes about five minutes on one core.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import common

from shardmuon.testing.pool import RankPool

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from healthy_steps import DTYPES, IN_TURN, healthy
from planted import FAULTS, PRODUCTS, caught_all, check_caught


def count_healthy(first: int, steps: int, largest: int, device: str) -> tuple[list[str], dict[str, Any]]:
    """Audit `steps` random fault-free steps per dtype. Return the lines of a table with one row per dtype, and a dict
    from each dtype to a dict with the same results: the findings as strings, the number of matrices, and the number of
    matrices with the status "inconclusive"."""
    lines = ["| products | healthy steps | matrices | findings | rows `inconclusive` |", "|---|---|---|---|---|"]
    data: dict[str, Any] = {}
    for dtype in DTYPES:
        findings: list[str] = []
        blind = matrices = 0
        for seed in range(first, first + steps):
            found, statuses, count, drawn = healthy(dtype, seed, largest, device, IN_TURN[seed % len(IN_TURN)])
            findings += [f"seed {seed}, {drawn}: {text}" for text in found]
            blind += statuses.count("inconclusive")
            matrices += count
        lines.append(f"| {dtype} | {steps} | {matrices} | {len(findings)} | {blind} |")
        data[dtype] = {"findings": findings, "inconclusive": blind, "matrices": matrices}
        print(lines[-1], *findings[:5], sep="\n", flush=True)
    return lines, data


def count_named(rows: list[int], device: str) -> tuple[list[str], dict[str, Any]]:
    """Plant every fault in matrices of every size. Return the lines of a table that shows which faults the audit
    identifies, and its cells as nested dicts, keyed by fault and then by column."""
    products = {name: PRODUCTS[name] for name in DTYPES}
    heads = [f"{name} {size}" for name in products for size in rows]
    data: dict[str, dict[str, str]] = {name: {} for name in FAULTS}
    with RankPool(2, timeout=1800) as pool:
        for product, options in products.items():
            for size in rows:
                found = pool.run(caught_all, size, options, tuple(FAULTS), device)
                for name in FAULTS:
                    try:
                        check_caught(name, found)
                        data[name][f"{product} {size}"] = "named"
                    except AssertionError as error:
                        data[name][f"{product} {size}"] = "NOT"
                        print(name, product, size, error, flush=True)
    lines = ["| fault | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    lines += [f"| {name} | " + " | ".join(found[head] for head in heads) + " |" for name, found in data.items()]
    return lines, data


def main() -> None:
    """Audit healthy and faulty steps, and write tables of the findings to results/audit_sharpness.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--largest", type=int, default=64, help="rows and columns of healthy matrices, at most")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="where the matrices are")
    parser.add_argument("--name", default="audit_sharpness", help="name of the result file")
    parser.add_argument("--rows", type=int, nargs="*", default=[32, 256, 1024])
    args = parser.parse_args()
    lines, healthy_data = count_healthy(args.first, args.steps, args.largest, args.device)
    named, data = count_named(args.rows, args.device) if args.rows else ([], {})
    drawn = f"Seeds {args.first} to {args.first + args.steps - 1}, at most {args.largest} rows and columns."
    lines += ["", drawn]
    if named:
        about = f"Planted faults on 2 ranks; matrices of so many rows and 24 columns: {len(data)}."
        lines += ["", about, "", *named]
    common.write(args.name, "\n".join(lines), {"healthy": healthy_data, "named": data})


if __name__ == "__main__":
    main()
