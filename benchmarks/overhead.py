"""Overhead of optimizer steps in shardmuon and torch. It is measured with many matrices of size 8 x 16, which are so
small that their arithmetic takes little time.

- One process: a step of `Muon`, torch.optim.Muon and fused AdamW with 600 matrices, and a step of `Muon` with 4,000
  matrices. The time of a step should grow at most in proportion to the number of matrices.
- Two ranks: a step of `Muon` with 600 DTensors sharded by rows, and shardmuon's and torch's `clip_grad_norm_`.
- Fresh processes: the CPU time of `import shardmuon` after `import torch`.

Each rank uses one thread. Results are medians. Compare ratios, not absolute times. The script takes about a minute.

    python benchmarks/overhead.py --rounds 25
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import common
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from shardmuon import Muon, clip_grad_norm_
from shardmuon.testing import RankPool
from shardmuon.testing.layouts import mesh_of

SHAPE = (8, 16)
TORCHS = "torch's clip_grad_norm_"
IMPORT = "import time, torch; a = time.process_time(); import shardmuon; print(time.process_time() - a)"


def parameters(number: int, sharded: bool = False) -> list[nn.Parameter]:
    """Parameters with gradients. If `sharded` is True, they are DTensors sharded by rows over all ranks."""
    generator = torch.Generator().manual_seed(0)

    def draw() -> torch.Tensor:
        full = torch.randn(SHAPE, generator=generator)
        return distribute_tensor(full, mesh_of((dist.get_world_size(),)), [Shard(0)]) if sharded else full

    params = [nn.Parameter(draw()) for _ in range(number)]
    for p in params:
        p.grad = draw()
    return params


def time_in_turn(
    calls: dict[str, Callable[[], Any]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Time each call once per round; return a list of milliseconds for each call, without the first three rounds."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 3):
        for name, call in calls.items():
            if dist.is_initialized():
                dist.barrier()
            began = clock()
            call()
            if number >= 3:
                found[name].append(1e3 * (clock() - began))
    return found


def one_process(rounds: int) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    calls: dict[str, Callable[[], Any]] = {
        "Muon, 600": Muon(parameters(600), lr=1e-3).step,
        "torch.optim.Muon, 600": torch.optim.Muon(parameters(600)).step,
        "AdamW fused, 600": torch.optim.AdamW(parameters(600), fused=True).step,
        "Muon, 4000": Muon(parameters(4000), lr=1e-3).step,
    }
    return time_in_turn(calls, rounds)


def on_ranks(rounds: int) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    params, others = parameters(600, sharded=True), parameters(600, sharded=True)
    optimizer = Muon(list({f"w{i}": p for i, p in enumerate(params)}.items()), lr=1e-3)
    calls: dict[str, Callable[[], Any]] = {
        "Muon, 600": optimizer.step,
        "clip_grad_norm_(optimizer)": lambda: clip_grad_norm_(optimizer, 1.0),
        "clip_grad_norm_(parameters)": lambda: clip_grad_norm_(others, 1.0),
        TORCHS: lambda: torch.nn.utils.clip_grad_norm_(others, 1.0),
    }
    return time_in_turn(calls, rounds)


def imports(times: int) -> list[float]:
    """Return the CPU seconds of `import shardmuon` in each of `times` fresh processes that find compiled bytecode on
    disk."""
    run = [sys.executable, "-c", IMPORT]
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    found = [subprocess.run(run, capture_output=True, text=True, check=True, env=env) for _ in range(times + 1)]
    return [float(one.stdout) for one in found[1:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--name", default="overhead_cpu")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    tables = {"one process": one_process(args.rounds)}
    with RankPool(2) as pool:
        tables["two ranks"] = pool.run(on_ranks, args.rounds)[0]
    lines = ["| where | what | median ms (min .. max) |", "|---|---|---|"]
    for where, rows in tables.items():
        lines += [f"| {where} | {name} | {common.summary(ms)} |" for name, ms in rows.items()]
    alone, ranks = ({name: statistics.median(ms) for name, ms in rows.items()} for rows in tables.values())
    seconds = imports(7)
    lines += [
        "",
        f"Muon over torch.optim.Muon: {alone['Muon, 600'] / alone['torch.optim.Muon, 600']:.2f}; 4,000 matrices over "
        f"600: {alone['Muon, 4000'] / alone['Muon, 600']:.2f} (6.67 is in proportion); clip_grad_norm_ of an optimizer "
        f"over torch's: {ranks['clip_grad_norm_(optimizer)'] / ranks[TORCHS]:.2f}.",
        f"`import shardmuon` after `import torch`: {common.summary(seconds)} s of processor time.",
    ]
    common.write(args.name, "\n".join(lines), tables | {"import": seconds})


if __name__ == "__main__":
    main()
