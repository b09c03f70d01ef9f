"""Carry a step's buckets out: while one is orthogonalized, the next one travels. Only this file communicates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardmuon.comm.groups import group_for
from shardmuon.layout.table import Ranks
from shardmuon.layout.views import Ints
from shardmuon.plan.plan import Bucket
from shardmuon.step.bucket import Bound, BucketRun, Work
from shardmuon.step.gram import GramRun


class Flight(NamedTuple):
    """An exchange under way. Holds what is sent, too: it must outlive the collective."""

    work: Any
    came: Tensor  # 1-D
    sent: Tensor  # 1-D

    def land(self) -> Tensor:  # 1-D
        """Wait (on an accelerator: the current stream waits) until all has come."""
        if self.work is not None:
            self.work.wait()
        return self.came


def start(send: Tensor, send_splits: Ints, recv_splits: Ints, bucket: Bucket) -> Flight:
    """Start one packed all-to-all among a bucket's ranks; nothing where nothing moves."""
    came = torch.empty(sum(recv_splits), dtype=send.dtype, device=send.device)
    if not bucket.exchange:
        return Flight(None, came, send)
    group = group_for(bucket.ranks)
    work = dist.all_to_all_single(came, send, list(recv_splits), list(send_splits), group=group, async_op=True)
    return Flight(work, came, send)


def make_groups(buckets: Sequence[Bucket]) -> None:
    """Make the process groups of all buckets. Collective among the ranks of each; before the first exchange, as a rank
    that makes one while others wait for its buffers would keep them waiting."""
    for ranks in sorted({bucket.ranks for bucket in buckets if bucket.exchange}, key=_small_first):
        group_for(ranks)


def _small_first(ranks: Ranks) -> tuple[int, Ranks]:
    return len(ranks), ranks


class InFlight:
    """One bucket with its exchanges: `begin`, `compute`, `apply`, `finish`, in this order."""

    def __init__(self, bound: Bound, work: Work, device: torch.device) -> None:
        wire = _WIRES[bound.program.bucket.itemsize]
        kind = GramRun if bound.program.bucket.route == "gram" else BucketRun
        self._program, self._run = bound.program, kind(bound, work, wire, device)
        self._relay: Flight | None = None

    def begin(self) -> None:
        """Send what others orthogonalize; meanwhile fill the batches of what is orthogonalized here."""
        gather = self._program.gather
        self._gather = start(self._run.pack(), gather.holder_splits, gather.owner_splits, self._program.bucket)
        self._run.fill()

    def compute(self) -> None:
        """Wait for the gather, orthogonalize, and send results back."""
        scatter = self._program.scatter
        send = self._run.orthogonalize(self._gather.land())
        self._scatter = start(send, scatter.owner_splits, scatter.holder_splits, self._program.bucket)
        del self._gather

    def apply(self) -> None:
        """Wait for the scatter, update weights, and pass results on to other replicas."""
        send, relay = self._run.apply(self._scatter.land()), self._program.relay
        del self._scatter
        if send is not None and relay is not None:
            self._relay = start(send, relay.send_splits, relay.recv_splits, self._program.bucket)

    def finish(self) -> None:
        """Wait for what another replica passes on, and update weights. Nothing to do without a relay."""
        if self._relay is not None:
            self._run.finish(self._relay.land())
            self._relay = None


Turn = Callable[[InFlight], None]


def turns(relays: Sequence[bool]) -> Iterator[tuple[Turn, int]]:
    """The order in which a rank carries its buckets out: pairs of an operation and a bucket's number.

    While bucket i is orthogonalized, i + 1 is gathered and i - 1 scattered. [Note: no circle of waits] Number the
    exchanges of all ranks' buckets, in the order that all plan alike: the gather of bucket b is b, its scatter
    b + 1/4, its relay b + 1/2. A rank posts an exchange after waits for exchanges with smaller numbers only, so the one
    with the smallest number that anybody waits for has been posted by all. A relay is posted by whoever has waited for
    the scatter, and must not wait for the next bucket's gather too: some ranks have other buckets in between.

    Args:
        relays: Of each bucket of this rank, in the plan's order, True if it has a relay.
    """
    last = len(relays) - 1
    for i in range(len(relays)):
        if i == 0:
            yield InFlight.begin, i
        if i < last:
            yield InFlight.begin, i + 1
        before = i > 0 and relays[i - 1]
        if before:
            yield InFlight.apply, i - 1
        yield InFlight.compute, i
        if i > 0:
            yield (InFlight.finish if before else InFlight.apply), i - 1
    if relays:
        yield InFlight.apply, last
        yield InFlight.finish, last


def run_buckets(bounds: Sequence[Bound], work: Work, device: torch.device) -> None:
    """Run all buckets of a step.

    Args:
        bounds: This rank's, in the plan's order.
        work: This step's tensors.
        device: Of wires and batches.
    """
    flights = [InFlight(bound, work, device) for bound in bounds]
    for turn, i in turns([bound.program.relay is not None for bound in bounds]):
        turn(flights[i])


_WIRES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
