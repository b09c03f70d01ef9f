"""Gram route beside owner route.

Each case is a set of equal matrices that are cut along their long dim over all ranks. Both routes take steps in turn,
so a machine whose speed drifts slows both; the median of each is compared.
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

from shardmuon import Exchange, Muon, Orthogonalizer
from shardmuon.testing import RankPool
from shardmuon.testing.tolerances import recovered_update, relative_error

# rows, cols, matrices
CASES = ((64, 4096, 8), (256, 2048, 4), (512, 512, 4), (256, 256, 8), (384, 1536, 1))


def measure(rows: int, cols: int, count: int, rounds: int) -> dict[str, Any]:
    """One case on one rank."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    world = dist.get_world_size()
    optimizers: dict[str, Muon] = {}
    params: dict[str, list[nn.Parameter]] = {}
    start = [torch.randn(rows, cols // world, generator=generator) for _ in range(count)]
    for route in ("owner", "gram"):
        params[route] = [nn.Parameter(t.clone()) for t in start]
        options: dict[str, Any] = {"lr": 1.0, "weight_decay": 0.0}
        options["exchange"] = Exchange(route=route)
        options["orthogonalizer"] = Orthogonalizer("standard", torch.float32)
        group = {"params": params[route], "partition_dim": 1}
        optimizers[route] = Muon([group], tp_group=dist.group.WORLD, **options)
        optimizers[route].prepare()
    seconds: dict[str, list[float]] = {"owner": [], "gram": []}
    updates = {}
    for turn in range(rounds + 1):
        grads = [torch.randn(t.shape, generator=generator) for t in start]
        for route in ("owner", "gram") if turn % 2 else ("gram", "owner"):
            before = [p.detach().clone() for p in params[route]]
            for p, grad in zip(params[route], grads, strict=True):
                p.grad = grad.clone()
            dist.barrier()
            began = time.perf_counter()
            optimizers[route].step()
            dist.barrier()
            seconds[route].append(time.perf_counter() - began)
            updates[route] = [
                recovered_update(b, p.detach(), 1.0, 1.0) for b, p in zip(before, params[route], strict=True)
            ]
    traffic = optimizers["gram"].traffic
    return {
        "owner": statistics.median(seconds["owner"][1:]),
        "gram": statistics.median(seconds["gram"][1:]),
        "difference": max(map(relative_error, updates["gram"], updates["owner"])),
        "reductions": traffic.reductions // (rounds + 1),
        "bytes_gram": traffic.bytes_sent // (rounds + 1),
        "bytes_owner": optimizers["owner"].traffic.bytes_sent // (rounds + 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    lines = [
        "| matrices | ranks | owner ms | gram ms | faster | update differs | reductions | bytes/rank owner | gram |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    data = []
    for ranks in args.ranks:
        with RankPool(ranks) as pool:
            for rows, cols, count in CASES:
                found = pool.run(measure, rows, cols, count, args.rounds)
                mine = found[0]
                owner, gram = mine["owner"], mine["gram"]
                faster = "gram" if gram < owner else "owner"
                difference = max(f["difference"] for f in found)
                sent = [max(f[key] for f in found) for key in ("bytes_owner", "bytes_gram")]
                lines.append(
                    f"| {count} x {rows}x{cols} | {ranks} | {1e3 * owner:.1f} | {1e3 * gram:.1f} | {faster} "
                    f"| {difference:.1e} | {mine['reductions']} "
                    f"| {sent[0]} | {sent[1]} |"
                )
                print(lines[-1], flush=True)
                data.append({"rows": rows, "cols": cols, "count": count, "ranks": ranks, **mine})
    common.write("routes", "\n".join(lines), data)


if __name__ == "__main__":
    main()
