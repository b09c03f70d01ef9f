"""Time of an audited optimizer step compared with a plain step, on a medium-sized model.

Each round times one plain and one audited step of the same optimizer, so that other load on the machine affects both
alike. For an audit every N steps, the overhead is the median of the per-round differences, divided by N times the
median time of a plain step. CPU time is less noisy than wall time, because it excludes the work of other processes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import common
import torch
import torch.distributed as dist
from torch import nn

from shardmuon import Muon, audit
from shardmuon.testing.layouts import LAYOUTS
from shardmuon.testing.pool import RankPool


def measure(layout: str, d: int, layers: int, samples: int, rounds: int) -> dict[str, Any]:
    """Time plain and audited steps on this rank. In the returned dict, "plain" and "audited" are lists with the (CPU,
    wall) seconds of each step, and "matrices" and "findings" are counts."""
    case = LAYOUTS[layout]
    mesh = case.mesh(dist.get_world_size())
    shapes = [shape for _ in range(layers) for shape in ((3 * d, d), (d, d), (4 * d, d), (d, 4 * d))]
    generator = torch.Generator().manual_seed(0)
    full = {f"w{i}": torch.randn(shape, generator=generator) * 0.02 for i, shape in enumerate(shapes)}
    params = {name: nn.Parameter(t) for name, t in case.build(full, mesh).items()}
    for name, grad in case.build(full, mesh).items():
        params[name].grad = grad.sin()
    optimizer = Muon(params.items(), lr=1e-3, **case.options(dist.get_world_size()))
    optimizer.step()

    def timed() -> tuple[float, float]:
        dist.barrier()
        cpu, wall = time.process_time(), time.perf_counter()
        optimizer.step()
        own = time.process_time() - cpu
        dist.barrier()
        return own, time.perf_counter() - wall

    found: dict[str, Any] = {"plain": [], "audited": [], "matrices": len(shapes), "findings": 0}
    for number in range(rounds + 1):
        plain = timed()
        check = audit(optimizer, samples)
        audited = timed()
        found["findings"] += len(check.report.findings)
        if number:  # the first round is not counted, because it also imports modules and opens connections
            found["plain"].append(plain)
            found["audited"].append(audited)
    return found


def main() -> None:
    """Measure the overhead of an audit, and write it to results/audit_overhead.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layout", default="fsdp2", choices=tuple(LAYOUTS))
    parser.add_argument("--d", type=int, default=384)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--every", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    with RankPool(args.ranks, timeout=1800) as pool:
        ranks = pool.run(measure, args.layout, args.d, args.layers, args.samples, args.rounds)
    lines = [
        f"{args.layers} layers, d={args.d}: {ranks[0]['matrices']} matrices, {args.layout} on {args.ranks} ranks, one "
        f"thread each, fp32, {args.samples} matrices compared per audit, {args.rounds} rounds.",
        f"Seconds, median (min..max). Overhead: (audited - plain) / ({args.every} plain), for an audit every "
        f"{args.every} steps. The optimizer's step alone is counted: forward and backward make it smaller.",
        "",
        "| clock | plain step | audited step | audited / plain | overhead |",
        "|---|---|---|---|---|",
    ]
    overheads = {}
    for at, clock in enumerate(("CPU time, all ranks", "wall time, rank 0")):
        counted = ranks if at == 0 else ranks[:1]
        plain = [sum(r["plain"][i][at] for r in counted) for i in range(args.rounds)]
        audited = [sum(r["audited"][i][at] for r in counted) for i in range(args.rounds)]
        extra = statistics.median(a - p for a, p in zip(audited, plain, strict=True))
        overheads[clock] = extra / (args.every * statistics.median(plain))
        ratio = statistics.median(a / p for a, p in zip(audited, plain, strict=True))
        lines.append(
            f"| {clock} | {common.summary(plain)} | {common.summary(audited)} | {ratio:.2f} | {overheads[clock]:.4%} |"
        )
    lines += ["", f"Findings in all audits: {sum(r['findings'] for r in ranks)}."]
    common.write("audit_overhead", "\n".join(lines), {"ranks": ranks, "overhead": overheads})


if __name__ == "__main__":
    main()
