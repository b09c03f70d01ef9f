"""Step time, number of kernels and peak memory on one device, compared with torch.optim.Muon and, if installed, dion.

make gpu                                                       # runs tests/test_gpu.py first: correctness before speed
make gpu GPU="--sizes 768x4"
python benchmarks/gpu.py --device cpu --sizes 64x1 --rounds 1  # checks only that the script works
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import common
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from on_device import SyntheticModel, bytes_above, kernels_of, make_model, make_optimizer


class Contender(NamedTuple):
    """An optimizer to time: its name, and a function that builds it for a model."""

    name: str
    make: Callable[[SyntheticModel], Any]


def _ours(**options: Any) -> Callable[[SyntheticModel], Any]:
    return lambda model: make_optimizer(model, **options)


def _with_adamw(make: Callable[[list[nn.Parameter]], Any]) -> Callable[[SyntheticModel], Any]:
    """Return an optimizer class that updates matrices with the optimizer from `make`, and vectors with torch's fused
    AdamW."""

    class Both:
        def __init__(self, model: SyntheticModel) -> None:
            self.matrices = make(model.matrices)
            self.vectors = torch.optim.AdamW(model.vectors, lr=1e-3, fused=True)

        def step(self) -> None:
            self.matrices.step()
            self.vectors.step()

    return Both


def _adamw(model: SyntheticModel) -> Any:
    return torch.optim.AdamW(model.params, lr=1e-3, fused=True)


def _torch(params: list[nn.Parameter]) -> Any:
    return torch.optim.Muon(params, lr=0.02, weight_decay=0.0)


def _dion(params: list[nn.Parameter]) -> Any:
    return importlib.import_module("dion").Muon(params, lr=0.02, nesterov=True, weight_decay=0.0)


CONTENDERS = (
    Contender("shardmuon default", _ours()),
    Contender('shardmuon "standard"', _ours(method="standard")),
    Contender('shardmuon "gram"', _ours(method="gram")),
    Contender("shardmuon, buckets of 128 MiB", _ours(bucket_bytes=2**27)),
    Contender("dion", _with_adamw(_dion)),
    Contender("torch.optim.Muon", _with_adamw(_torch)),
    Contender("torch.optim.AdamW, fused, of everything", _adamw),
)


def timings(device: torch.device, d: int, layers: int, rounds: int) -> tuple[list[str], dict[str, Any]]:
    """Time steps of the contenders in turn, each on its own model. On a GPU, also measure the peak memory and the
    number of kernels of a step. Return the lines of a table, and a dict of the results."""
    rows: dict[str, dict[str, Any]] = {contender.name: {"seconds": []} for contender in CONTENDERS}
    steps: dict[str, Callable[[], Any]] = {}
    for contender in CONTENDERS:
        row = rows[contender.name]
        try:
            step = contender.make(make_model(device, d=d, layers=layers, num_vectors=50)).step
            for _ in range(3):
                step()
            if device.type == "cuda":
                row |= {"MiB": round(bytes_above(device, step) / 2**20, 1), "kernels": kernels_of(step)}
            steps[contender.name] = step
        except Exception as error:
            row["missing"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    for _ in range(rounds):
        for name, step in steps.items():
            rows[name]["seconds"].append(_timed(step, device))
    lines = ["| optimizer | seconds a step | kernels | MiB above what stands |", "|---|---|---|---|"]
    for name, row in rows.items():
        times = row["seconds"]
        text = f"{statistics.median(times):.5f} ({min(times):.5f}..{max(times):.5f})" if times else row["missing"]
        lines.append(f"| {name} | {text} | {row.get('kernels', '')} | {row.get('MiB', '')} |")
    return lines, rows


def _timed(step: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--sizes", nargs="+", default=["768x12", "2048x6", "4096x2"], help="width x layers")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--name", default="gpu", help="name of the result file")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("make gpu needs a CUDA device, and torch finds none here. Nothing was timed, nothing was written.")
        return 2
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    text, data = [], {}
    for size in args.sizes:
        d, layers = map(int, size.split("x"))
        lines, data[size] = timings(device, d, layers, args.rounds)
        text += [f"{layers} layers, d={d}: {4 * layers} matrices, 50 vectors.", "", *lines, ""]
    head = (
        f"Steps with fp32 weights, one process, {os.cpu_count()} cores; a turn for each in every round, median of "
        f"{args.rounds} (min..max). Kernels, copies and fills of a step; memory beside weights, gradients and state."
    )
    common.write(args.name, "\n".join([head, "", *text]).rstrip(), data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
