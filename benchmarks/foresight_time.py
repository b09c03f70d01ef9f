"""Step times predicted by `shardmuon plan` compared with measured ones, for ten layouts on 1, 2 and 4 ranks.

The hardware file should describe this machine. The matrices have sizes that its tables do not contain. Steps of the
default `Muon` are timed on the slowest rank, from one barrier to the next. The script compares the lower quartile of
these times with the middle of the predicted interval, and counts how often the quartile lies inside the interval. It
uses the lower quartile because other work on the machine can only add time, and because the middle values in `cpu-gloo`
are lower quartiles too. The script takes six minutes on 2 cores. Run nothing else on the machine meanwhile.

    python benchmarks/foresight_time.py --hardware cpu-gloo    # on 2 cores with AVX-512 and bf16
    python benchmarks/foresight_time.py --device cuda --ranks 1 --hardware h100
    python benchmarks/foresight_time.py --hardware mine.yaml
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import torch
import torch.distributed as dist
from torch import nn

from shardmuon import Muon
from shardmuon.foresight.hardware import Hardware
from shardmuon.foresight.job import Exact
from shardmuon.foresight.report import Price
from shardmuon.plan.plan import Plan
from shardmuon.testing import RankPool
from shardmuon.testing.layouts import LAYOUTS, meshes_on

ROWS = (
    "single",
    "ddp",
    "fsdp2",
    "fsdp2 dim 1",
    "hsdp",
    "tp",
    "fsdp2+tp",
    "two dims",
    "tp x dp",
    "mcore buffers",
)
# Sizes that were not measured for the hardware file cpu-gloo, whose tables contain powers of two from 32 to 512.
SIZES = (192, 320, 448)
LAYERS = {192: 12, 320: 6, 448: 4, 768: 12, 1536: 6, 3072: 3, 5120: 1}
GPU_SIZES = (768, 1536, 3072, 5120)  # sizes that were not measured for the hardware file h100


def shapes(d: int) -> list[tuple[int, int]]:
    return [shape for _ in range(LAYERS[d]) for shape in ((2 * d, d), (d, d), (d, 7 * d // 2), (7 * d // 2, d))]


def step(layout: str, d: int, rounds: int, kind: str) -> tuple[list[float], Plan]:
    """Time optimizer steps on one layout; return the seconds of each step, and the optimizer's plan."""
    with meshes_on(kind):
        return _step(layout, d, rounds, kind)


def _step(layout: str, d: int, rounds: int, kind: str) -> tuple[list[float], Plan]:
    case = LAYOUTS[layout]
    generator = torch.Generator().manual_seed(0)
    full = {f"w{i}": torch.randn(shape, generator=generator) for i, shape in enumerate(shapes(d))}
    full = {name: (0.02 * t).to(kind) for name, t in full.items()}
    mesh = case.mesh(dist.get_world_size())
    built = case.build(full, mesh)
    params = [nn.Parameter(t) for t in built.values()]
    for p, source in zip(params, built.values(), strict=True):
        for key, value in vars(source).items():
            setattr(p, key, value)
    for p, g in zip(params, case.build(full, mesh).values(), strict=True):
        p.grad = g
    optimizer = Muon(params, lr=0.02, weight_decay=0.1, **case.options(dist.get_world_size()))
    for _ in range(2):
        optimizer.step()
    seconds = []
    for _ in range(rounds):
        common.together()
        start = time.perf_counter()
        optimizer.step()
        common.together()
        seconds.append(time.perf_counter() - start)
    plan = optimizer.plan
    assert plan is not None, "it has stepped"
    return seconds, plan


def compare(run: Callable[..., list[Any]], ranks: int, rounds: int, hardware: Any, kind: str) -> list[dict[str, Any]]:
    rows = []
    for layout in ROWS:
        for d in SIZES if kind == "cpu" else GPU_SIZES:
            found = run(step, layout, d, rounds, kind)
            seconds = [max(values) for values in zip(*(values for values, _ in found), strict=True)]
            exact = Exact.of_plan(found[0][1], gpus_per_node=max(ranks, 4), world=ranks)
            predicted = Price.of(exact, hardware)
            ordered = sorted(seconds)
            least, quartile = ordered[0], ordered[len(ordered) // 4]
            rows.append(
                {
                    "layout": layout,
                    "ranks": ranks,
                    "d": d,
                    "least": least,
                    "measured": quartile,
                    "predicted": list(predicted.step),
                    "error": predicted.step.mid / quartile - 1.0,
                    "inside": predicted.step.lo <= quartile <= predicted.step.hi,
                    "reason": predicted.reason,
                    "how": sorted({str(item.choice) for item in found[0][1].items}),
                }
            )
            error = rows[-1]["error"]
            print(f"{layout:<14} {ranks} ranks d={d}: {quartile:.4f} s, {predicted.step}, {error:+.1%}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=15, help="steps measured of each row")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="cuda: with NCCL, a GPU for each rank")
    parser.add_argument("--hardware", required=True, help="a .yaml file of this machine, or the name of a shipped one")
    parser.add_argument("--name", default="foresight_time", help="name of the result file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    hardware = Hardware.load(args.hardware)
    rows = []
    for ranks in args.ranks:
        with RankPool(ranks, backend=common.BACKENDS[args.device], timeout=900) as pool:
            rows += compare(pool.run, ranks, args.rounds, hardware, args.device)
    path = Path(args.hardware)
    text = path.read_text() if path.exists() else f"shipped: {path}"
    errors = [abs(row["error"]) for row in rows]
    inside = sum(row["inside"] for row in rows)
    of_ranks = {ranks: [abs(row["error"]) for row in rows if row["ranks"] == ranks] for ranks in args.ranks}
    sides = ", ".join(str(d) for d in sorted({row["d"] for row in rows}))
    lines = [
        f"{len(rows)} rows: {len(ROWS)} layouts, sides {sides} (in no table), "
        f"{', '.join(map(str, args.ranks))} ranks of one thread on {os.cpu_count()} processors.",
        "",
        f"Mean absolute error of the middle: **{statistics.mean(errors):.1%}**, median "
        f"{statistics.median(errors):.1%}, largest {max(errors):.1%}. {inside} of {len(rows)} lie inside.",
        "",
        *(f"- {ranks} rank{'s' * (ranks > 1)}: mean {statistics.mean(found):.1%}" for ranks, found in of_ranks.items()),
        "",
        "| layout | ranks | d | measured ms (least) | predicted ms | error | inside |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, middle, high = (1e3 * value for value in row["predicted"])
        measured = f"{1e3 * row['measured']:.1f} ({1e3 * row['least']:.1f})"
        lines.append(
            f"| {row['layout']} | {row['ranks']} | {row['d']} | {measured} | "
            f"{middle:.1f} ({low:.1f} .. {high:.1f}) | {row['error']:+.1%} | {'yes' if row['inside'] else '**no**'} |"
        )
    common.write(args.name, "\n".join(lines), {"rows": rows, "hardware": text})


if __name__ == "__main__":
    main()
