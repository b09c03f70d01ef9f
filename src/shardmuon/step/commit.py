"""Carry a step's buckets out: while one is orthogonalized, the next one travels. Only this file communicates."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from shardmuon.comm.component import in_order
from shardmuon.comm.exchange import Pending, Traffic, start
from shardmuon.comm.groups import group_for, talking_device
from shardmuon.errors import HALF_DONE, UNCHANGED, naming
from shardmuon.layout.table import Ranks
from shardmuon.plan.pipeline import turns
from shardmuon.plan.plan import Bucket
from shardmuon.step.bucket import Bound, BucketRun, Kernel
from shardmuon.step.gram import GramRun
from shardmuon.step.update import Work
from shardmuon.step.weights import WeightSet, ZeroWatch


def groups_of(buckets: Sequence[Bucket], sets: Sequence[WeightSet] = ()) -> list[Ranks]:
    """The ranks of each group, in the order in which every rank makes them."""
    moving = [bucket.ranks for bucket in buckets if bucket.exchange]
    return in_order([*moving, *(one.ranks for one in sets)])


class InFlight:
    """One bucket with its exchanges: `begin`, `compute`, `apply`, `finish`, in this order. There are none where
    nothing moves, as in one process."""

    def __init__(self, bound: Bound, work: Work, kernel: Kernel, traffic: Traffic) -> None:
        wire = _WIRES[bound.program.bucket.itemsize]
        kind = GramRun if bound.program.bucket.route == "gram" else BucketRun
        self._bound, self._run = bound, kind(bound, work, wire, kernel)
        self._traffic = traffic
        # The exchange that travels. It is taken out before it is waited for: then nothing here holds what came, nor any
        # more what was sent.
        self._under_way: list[Pending] = []

    def begin(self) -> None:
        """Send what others orthogonalize; meanwhile fill the batches of what is orthogonalized here."""
        if self._bound.moves:
            self._group, gather = group_for(self._bound.program.bucket.ranks), self._bound.program.gather
            sent, came = gather.holder_splits, gather.owner_splits
            self._under_way.append(start(self._run.pack(), sent, came, self._group, self._traffic))
            self._traffic.reductions += self._bound.program.bucket.route == "gram"
        self._run.fill()

    def compute(self) -> None:
        """Wait for the gather, orthogonalize, and send results back."""
        scatter = self._bound.program.scatter
        send = self._run.orthogonalize(self._under_way.pop().wait() if self._bound.moves else None)
        self._traffic.orthogonalized += self._bound.num_owned
        if send is not None:
            sent, came = scatter.owner_splits, scatter.holder_splits
            self._under_way.append(start(send, sent, came, self._group, self._traffic))

    def apply(self) -> None:
        """Wait for the scatter, update weights, and pass results on to other replicas."""
        send = self._run.apply(self._under_way.pop().wait() if self._bound.moves else None)
        relay = self._bound.program.relay
        if send is not None and relay is not None:
            self._under_way.append(start(send, relay.send_splits, relay.recv_splits, self._group, self._traffic))

    def finish(self) -> None:
        """Wait for what another replica passes on, and update weights. Of a bucket with a relay."""
        self._run.finish(self._under_way.pop().wait())


def run_buckets(bounds: Sequence[Bound], work: Work, kernel: Kernel, traffic: Traffic) -> None:
    """Run all buckets of a step.

    Args:
        bounds: This rank's, in the plan's order.
        work: This step's tensors.
        kernel: What orthogonalizes.
        traffic: Counts exchanges and matrices.

    Raises:
        ExchangeError: Something failed in the middle; names the bucket and the operation.
    """
    flights = [InFlight(bound, work, kernel, traffic) for bound in bounds]
    moves = any(bound.moves for bound in bounds)  # else nobody waits for this rank
    with naming(lambda: f"{bounds[i]}, {turn}", HALF_DONE) if moves else nullcontext():
        relays = [bound.program.relay is not None for bound in bounds]
        for turn, i in turns(relays, [bound.program.bucket.ranks for bound in bounds]):
            getattr(flights[i], turn)()


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


_WIRES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
