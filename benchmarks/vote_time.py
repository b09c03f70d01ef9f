"""Time a vote (the exchange in which ranks agree to start a step), compared with a gloo all-reduce of 64 bytes.

for n in 2 3 4 8; do torchrun --nproc-per-node $n benchmarks/vote_time.py; done
"""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist

from shardmuon.comm.vote import Ballot, Phase, vote

ROUNDS, CALLS = 15, 20


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = tuple(range(dist.get_world_size()))
    ballot = Ballot(Phase.STEP, digests={ranks: b"12345678"}, presence=1)
    message = torch.zeros(64, dtype=torch.uint8)
    contenders = {
        "vote": lambda: vote(ballot, ranks),
        "all-reduce": lambda: dist.all_reduce(message, dist.ReduceOp.MAX),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(ROUNDS + 1):
        for name, call in contenders.items():  # alternate, so that a drift in the machine's speed affects both
            dist.barrier()
            began = time.perf_counter()
            for _ in range(CALLS):
                call()
            if number:
                times[name].append((time.perf_counter() - began) / CALLS)
    if dist.get_rank() == 0:
        vote_us, reduce_us = (statistics.median(times[name]) * 1e6 for name in contenders)
        ratio = statistics.median(a / b for a, b in zip(*times.values(), strict=True))
        print(f"{len(ranks)} ranks: vote {vote_us:.0f} us, all-reduce {reduce_us:.0f} us, median of ratios {ratio:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
