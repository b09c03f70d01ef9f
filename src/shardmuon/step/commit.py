"""Carry a step's buckets out: while one is orthogonalized, the next one travels. Only this file communicates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch.distributed as dist
from torch import Tensor

from shardmuon.comm.groups import Traffic, group_for, start, talking_device
from shardmuon.comm.vote import in_order
from shardmuon.errors import HALF_DONE, UNCHANGED, naming
from shardmuon.layout.table import Ranks
from shardmuon.plan.plan import Bucket
from shardmuon.step.bucket import Buckets, Kernel, run_owners
from shardmuon.step.gram import run_gram
from shardmuon.step.update import Work
from shardmuon.step.weights import WeightSet, ZeroWatch


def groups_of(buckets: Sequence[Bucket], sets: Sequence[WeightSet] = ()) -> list[Ranks]:
    """The ranks of each group, in the order in which every rank makes them."""
    moving = [bucket.ranks for bucket in buckets if bucket.exchange]
    return in_order([*moving, *(one.ranks for one in sets)])


def run_buckets(buckets: Buckets, work: Work, kernel: Kernel, traffic: Traffic) -> None:
    """Run all buckets of a step. Collective among the ranks of each.

    Args:
        buckets: This rank's.
        work: This step's tensors.
        kernel: What orthogonalizes.
        traffic: Counts exchanges and matrices.

    Raises:
        ExchangeError: Something failed in the middle; names the bucket and the operation.
    """
    runs: dict[int, Iterator[None]] = {}
    bounds = buckets.bounds
    with naming(lambda: f"{bounds[i]}, {turn}", HALF_DONE) if buckets.moves else nullcontext():
        for turn, i in buckets.order:
            if turn == "begin":
                bound, bucket = bounds[i], bounds[i].program.bucket
                exchange = partial(start, group_for(bucket.ranks) if bucket.exchange else None, traffic)
                run = run_gram if bucket.route == "gram" else run_owners
                runs[i] = run(bound, work, kernel, exchange)
                traffic.orthogonalized += bound.num_owned
                traffic.reductions += bucket.route == "gram"
            next(runs[i], None)  # its last turn ends it


def begin_weights(sets: Sequence[WeightSet], work: Work, traffic: Traffic, watch: ZeroWatch) -> None:
    """Run the stages on weights before the update, of parameters whose norms are fresh. Collective among each set.

    Raises:
        ExchangeError: A rank of a set died, hung or failed.
    """
    for one in sets:
        with _named(one, "before the update", UNCHANGED):
            one.begin(_summed(one.squares(work), one.ranks, traffic), work, watch)


def finish_weights(sets: Sequence[WeightSet], work: Work, traffic: Traffic) -> None:
    """Run the stages on weights after the update. Collective among each set.

    Raises:
        ExchangeError: A rank of a set died, hung or failed.
    """
    for one in sets:
        with _named(one, "after the update", HALF_DONE):
            one.finish(_summed(one.squares(work), one.ranks, traffic), work)


def _named(one: WeightSet, when: str, damage: str) -> AbstractContextManager[None]:
    """Name a set in what is raised inside. Alone it passes as it is: nobody else is left behind."""
    return nullcontext() if len(one.ranks) == 1 else naming(lambda: f"norms of weights {when} ({one})", damage)


def _summed(values: Tensor, ranks: Ranks, traffic: Traffic) -> Tensor:
    if len(ranks) == 1:
        return values
    group = group_for(ranks)
    sums = values.to(talking_device(values.device, group))
    dist.all_reduce(sums, group=group)
    traffic.norm_reductions += 1
    traffic.norms_sent += values.numel()
    return sums.to(values.device)
