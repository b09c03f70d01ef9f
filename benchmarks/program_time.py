"""Measure the time to make layouts, a plan and one rank's programs for matrices on a large mesh.

A program lists the copies and exchanges of one rank. The script also counts the copies from receive buffers. One
process simulates the mesh without storing tensors. Every round starts with fresh layouts. The script takes 45 seconds
on one core, most of them for counting copies.

    python benchmarks/program_time.py                              # 400 matrices on 1 x 1024 and 16 x 64 ranks
    python benchmarks/program_time.py --mesh 4x256 --matrices 1000
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections import Counter
from typing import Any

import common

from shardmuon.layout.pieces import Box, Held, ParamLayout
from shardmuon.layout.views import Ints, matrix_view
from shardmuon.plan.plan import Policy, Spec
from shardmuon.plan.planner import make_plan
from shardmuon.plan.program import Program

# matrices of 1,408 rows, cut into 1,024 shards, leave 320 ranks without any rows
SHAPES = ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336), (1408, 4096), (4096, 1408))
PHASES = ("layouts", "plan", "digests", "programs")


def sizes(text: str) -> Ints:
    """Parse a mesh: "4x256" stands for 4 replicas, each cut into 256 shards."""
    replicas, shards = map(int, text.split("x"))
    return replicas, shards


def hybrid_sharded(shape: Ints, mesh: Ints) -> ParamLayout:
    """A layout in which every replica cuts the rows into equal shards, except that the last may be smaller or empty."""
    rows, cols = shape
    replicas, shards = mesh
    step = -(-rows // shards)
    cuts = [min(place * step, rows) for place in range(shards + 1)]
    held = [(Held(Box((a, 0), (b - a, cols)), (0, 0)),) for a, b in itertools.pairwise(cuts)]
    return ParamLayout(matrix_view(shape), tuple(range(math.prod(mesh))), tuple(held * replicas))


def measure(mesh: Ints, num: int, policy: Policy, rounds: int) -> dict[str, Any]:
    """Time each phase in each round. Return a dict with the times, the number of buckets, and a histogram of how many
    copies a rank makes from one bucket's receive buffer."""
    seconds: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for _ in range(rounds):
        began = [time.perf_counter()]
        layouts = [hybrid_sharded(shape, mesh) for shape in SHAPES]
        began.append(time.perf_counter())
        costs = [4 * min(shape) ** 2 * max(shape) for shape in SHAPES]
        numbers = [i % len(SHAPES) for i in range(num)]
        specs = [Spec(f"p{i}", layouts[n], ("standard bfloat16",), (costs[n],), (4,)) for i, n in enumerate(numbers)]
        plan = make_plan(specs, policy)
        began.append(time.perf_counter())
        assert plan.digests
        began.append(time.perf_counter())
        for bucket in plan.buckets:
            Program.of(plan, bucket, 0)
        began.append(time.perf_counter())
        for phase, (first, last) in zip(PHASES, itertools.pairwise(began), strict=True):
            seconds[phase].append(last - first)
    copies = Counter(
        len(Program.of(plan, bucket, owner).gather.copies)
        for bucket in plan.buckets
        for owner in {plan.items[n].owners[0] for n in bucket.items}
    )
    return {"mesh": mesh, "seconds": seconds, "buckets": len(plan.buckets), "copies": dict(copies)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", type=sizes, nargs="+", default=[(1, 1024), (16, 64)], help="REPLICASxSHARDS")
    parser.add_argument("--matrices", type=int, default=400)
    parser.add_argument("--bucket-bytes", type=int, default=Policy().bucket_bytes)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--name", default="program_time", help="name of the result file")
    args = parser.parse_args()
    rows = [measure(mesh, args.matrices, Policy(bucket_bytes=args.bucket_bytes), args.rounds) for mesh in args.mesh]
    lines = [
        f"{args.matrices} matrices of {', '.join(f'{m}x{n}' for m, n in SHAPES)} by turns. Seconds in one process, "
        f"median (least..most) of {args.rounds} rounds; programs are rank 0's of all buckets. Copies from the wire "
        "into the batches, of each owner in each bucket: mean (most).",
        "",
        f"| replicas x shards | {' | '.join(PHASES)} | buckets | copies |",
        f"|---|{'---|' * len(PHASES)}---|---|",
    ]
    for row in rows:
        times = " | ".join(common.summary(row["seconds"][phase]) for phase in PHASES)
        copies = f"{statistics.mean(Counter(row['copies']).elements()):.2f} ({max(row['copies'])})"
        lines.append(f"| {row['mesh'][0]} x {row['mesh'][1]} | {times} | {row['buckets']} | {copies} |")
    common.write(args.name, "\n".join(lines), rows)


if __name__ == "__main__":
    main()
