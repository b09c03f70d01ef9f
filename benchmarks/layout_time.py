"""Step time on layouts and numbers of ranks, to be compared between two trees of this project.

    PYTHONPATH=<tree>/src OMP_NUM_THREADS=1 python benchmarks/layout_time.py 4 fsdp2 hsdp ddp

24 matrices (512 x 512, 512 x 1024, 1024 x 512), fp32 products, injected gradients, one thread a rank. Prints the median
of seven steps in ms, of the slowest rank. Run two trees in turn, several times: a shared machine drifts.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist

from shardmuon import Muon
from shardmuon.testing import RankPool
from shardmuon.testing.layouts import LAYOUTS, parameters

SHAPES = [(512, 512), (512, 1024), (1024, 512)] * 8


def step_time(layout: str) -> float:
    """The median of this rank, in seconds."""
    torch.set_num_threads(1)
    case, world = LAYOUTS[layout], dist.get_world_size()
    full = {f"w{i}": torch.randn(shape) for i, shape in enumerate(SHAPES)}
    params = parameters(case.build(full, case.mesh(world)))
    how = {"ns_dtype": torch.float32}
    optimizer = Muon(list(params.items()), lr=0.01, **how, **case.options(world))
    grads = case.build({name: torch.randn_like(t) for name, t in full.items()}, case.mesh(world))
    for name, p in params.items():
        p.grad = grads[name]
    seconds = []
    for _ in range(9):
        dist.barrier()
        begun = time.perf_counter()
        optimizer.step()
        dist.barrier()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", type=int)
    parser.add_argument("layouts", nargs="+", choices=sorted(LAYOUTS))
    args = parser.parse_args()
    with RankPool(args.ranks) as pool:
        for layout in args.layouts:
            print(f"{args.ranks} ranks, {layout}: {1e3 * max(pool.run(step_time, layout)):.0f} ms", flush=True)


if __name__ == "__main__":
    main()
