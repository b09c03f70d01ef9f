"""Execution of a step's buckets on one rank, from momentum to weights. A bucket is a set of matrices that are exchanged
together. While one bucket is orthogonalized, the next one is gathered.

`run_buckets` interleaves all buckets. `run_owners` runs one bucket: it gathers whole matrices on the ranks that
orthogonalize them (their owners), orthogonalizes, scatters the results, and relays them to further replicas. Exchanges
are passed in as functions, so that real and simulated ranks run the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from shardmuon.comm.groups import Pending, Traffic, group_for, start
from shardmuon.errors import HALF_DONE, ExchangeError, named, ranks_text
from shardmuon.layout.views import Ints
from shardmuon.orthogonalize import FiniteWatch, default_dtype, orthogonalize
from shardmuon.orthogonalize.choice import Choice
from shardmuon.plan.plan import Plan
from shardmuon.plan.program import Copy, Program, Wire
from shardmuon.price.clock import turns
from shardmuon.step.batch import BatchStages
from shardmuon.step.update import KeptSide, Side, Work, apply_results, sides_of_batches, update_momentum
from shardmuon.texts import listed

_CPU = torch.device("cpu")
_WIRES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}

Exchange = Callable[[Tensor, Ints, Ints], Pending]  # (send buffer, number of elements to each rank, from each rank)


class Kernel(NamedTuple):
    """Device and watch for the orthogonalization of all buckets.

    Attributes:
        device: Device on which matrices are orthogonalized; None: the device of a bucket's exchange buffers.
        watch: Object that reports results that are not finite, see `orthogonalize`.
    """

    device: torch.device | None = None
    watch: FiniteWatch | None = None


class Bound:
    """The program of one bucket (this rank's copies and exchanges) with the tiles that it reads and writes. A tile is a
    part of a matrix in this rank's local storage. Cached between steps; holds no tensor.

    Args:
        plan: The plan.
        program: This rank's program for a bucket of the plan.
        shapes: Shape of this rank's local storage of each parameter.
        device: Device of the exchange buffers.

    Attributes:
        dtype: Dtype of exchange buffers and batches.
        num_owned: Number of matrices that this rank orthogonalizes.
        moves: True if anything is exchanged with other ranks.
        choices: How each batch is orthogonalized.
        like_torch: True if weights are updated by torch.optim.Muon's own operations, see `apply_results`.
        own: Tiles of the matrices that this rank orthogonalizes.
        gathered: Tiles that this rank sends to other ranks in the gather.
        scattered: Tiles whose results this rank receives in the scatter.
        late: Tiles whose results this rank receives in the relay.
        held: Tiles that are updated after the scatter: `own` and `scattered`.
        kept: State of the variant's stages for each batch.
        told, heard: State of the variant's stages that this rank sends and receives in the scatter.
        told_on, heard_late: State of the variant's stages that this rank sends and receives in the relay.
    """

    def __init__(self, plan: Plan, program: Program, shapes: Sequence[Ints], device: torch.device = _CPU) -> None:
        self.plan, self.program, self.device = plan, program, device
        self.dtype, self.num_owned = _WIRES[program.bucket.itemsize], program.num_owned
        self.moves = program.bucket.exchange
        self.choices = [Choice.of(plan.items[batch.items[0]].how) for batch in program.batches]
        self.like_torch = Choice.of(plan.items[program.bucket.items[0]].how).method == "torch"
        scatter, relay = program.scatter, program.relay or Wire((), (), (), ())
        views = [spec.layout.view for spec in plan.specs]
        self.own, self.gathered, self.scattered, self.late, self.held = (
            Side(loads, views, shapes)
            for loads in (
                program.own,
                program.gather.tiles,
                scatter.tiles,
                relay.tiles,
                (*program.own, *scatter.tiles),
            )
        )
        self.kept = sides_of_batches(plan, program)
        self.told, self.heard, self.told_on, self.heard_late = (
            KeptSide(plan, loads) for loads in (scatter.told, scatter.heard, relay.told, relay.heard)
        )

    def __str__(self) -> str:
        bucket, plan = self.program.bucket, self.plan
        items = [plan.items[number] for number in bucket.items]
        named = listed([f"{plan.specs[item.param].name} {item.rows}x{item.cols}" for item in items])
        return f"bucket {plan.buckets.index(bucket)} of {len(plan.buckets)} (ranks {ranks_text(bucket.ranks)}: {named})"

    def buffer(self, splits: Sequence[int]) -> Tensor:  # 1-D
        """Allocate an uninitialized send buffer. `splits` has the number of elements for each rank."""
        return torch.empty(sum(splits), dtype=self.dtype, device=self.device)


class Buckets:
    """This rank's buckets for a step in which certain parameters have gradients. Cached between steps.

    Attributes:
        bounds: The buckets, in the plan's order.
        order: The order of the buckets' operations, see `shardmuon.price.clock.turns`.
        moves: True if anything is exchanged, so that other ranks may wait for this rank.
    """

    def __init__(self, bounds: list[Bound]) -> None:
        relays = [bound.program.relay is not None for bound in bounds]
        self.bounds, self.moves = bounds, any(bound.moves for bound in bounds)
        self.order = list(turns(relays, [bound.program.bucket.ranks for bound in bounds]))


def run_buckets(buckets: Buckets, work: Work, kernel: Kernel, traffic: Traffic) -> None:
    """Run all buckets of a step. Collective among the ranks of each bucket.

    Args:
        buckets: This rank's buckets.
        work: This step's tensors.
        kernel: Device and watch for the orthogonalization.
        traffic: Counters of exchanges and matrices, updated in place.

    Raises:
        ExchangeError: This rank or another one failed in the middle of the step. The message has the bucket and the
            operation.
    """
    runs: dict[int, Iterator[None]] = {}
    bounds = buckets.bounds
    for turn, i in buckets.order:
        bound = bounds[i]
        try:
            if turn == "begin":
                group = group_for(bound.program.bucket.ranks) if bound.moves else None
                runs[i] = run_owners(bound, work, kernel, partial(start, group, traffic))
                traffic.orthogonalized += bound.num_owned
            next(runs[i], None)  # None: a generator ends without yielding in its last turn
        except ExchangeError:
            raise
        except Exception as error:
            if not buckets.moves:
                raise
            raise named(error, f"{bound}, {turn}", HALF_DONE) from error


def run_owners(bound: Bound, work: Work, kernel: Kernel, exchange: Exchange) -> Iterator[None]:
    """Run one bucket. Yields during each exchange (and at the same points if nothing is exchanged), so that other
    buckets can proceed: see `shardmuon.price.clock.turns`.

    Send and receive buffers are freed as soon as they have been read, because matrix products need memory.
    """
    program, gathers = bound.program, bound.program.bucket.gathers
    gather, scatter, relay = program.gather, program.scatter, program.relay
    pending: list[Pending] = []  # popped before the wait, so that no reference keeps the send buffer alive
    if gathers:
        send = bound.buffer(gather.sent)
        update_momentum(bound.gathered, work, bound.gathered.on(send))
        pending.append(exchange(send, gather.sent, gather.came))
        del send
    batches = torch.empty(program.batch_numel, dtype=bound.dtype, device=kernel.device or bound.device)
    own = bound.own.on(batches)
    update_momentum(bound.own, work, own)
    update_momentum(bound.late, work, None)  # tiles whose results another replica relays
    yield
    if gathers:
        _copy(gather.copies, pending.pop().wait(), batches)
    _orthogonalize(bound, work, kernel, batches)
    if gathers:
        pending.append(exchange(_results(bound, scatter, bound.told, work, batches), scatter.sent, scatter.came))
    yield
    came = pending.pop().wait() if gathers else None
    if came is not None:
        if scatter.heard:
            bound.heard.hear(came, work.kept)
        own += bound.scattered.on(came)
    passed = None if relay is None else _results(bound, relay, bound.told_on, work, batches, came)
    apply_results(bound.held, work, own, like_torch=bound.like_torch)
    if passed is None or relay is None:
        return
    del batches, own, came
    pending.append(exchange(passed, relay.sent, relay.came))
    del passed
    yield
    came = pending.pop().wait()
    if relay.heard:
        bound.heard_late.hear(came, work.kept)
    apply_results(bound.late, work, bound.late.on(came), like_torch=bound.like_torch)


def _results(
    bound: Bound,
    wire: Wire,
    told: KeptSide,
    work: Work,
    batches: Tensor,
    came: Tensor | None = None,  # 1-D: receive buffer of the scatter, needed for the relay
) -> Tensor:  # 1-D: send buffer of the scatter or the relay
    """Pack the results and the state of the variant's stages that are sent to other ranks."""
    send = bound.buffer(wire.sent)
    _copy(wire.copies, send, batches, back=True)
    if came is not None:
        _copy(wire.passed, came, send)
    if wire.told:
        told.tell(work.kept, send)
    return send


def _copy(copies: Sequence[Copy], here: Tensor, there: Tensor, *, back: bool = False) -> None:
    """Copy blocks from `here` to `there`, or with `back` from `there` to `here`."""
    for copy in copies:
        one = here.as_strided(copy.sizes, copy.here.strides, copy.here.start)
        other = there.as_strided(copy.sizes, copy.there.strides, copy.there.start)
        if back:
            one.copy_(other)
        else:
            other.copy_(one)


def _orthogonalize(bound: Bound, work: Work, kernel: Kernel, batches: Tensor) -> None:
    """Orthogonalize the matrices that this rank owns, in place in the buffer of batches."""
    for batch, choice, of_batch in zip(bound.program.batches, bound.choices, bound.kept, strict=True):
        settings = work.settings[bound.plan.items[batch.items[0]].param]
        x = batches.as_strided(batch.shape, (batch.stride, batch.shape[2], 1), batch.start)
        stages, fed, unit, overwrite = None, x, False, True
        if settings.stages:
            stages = BatchStages(settings.stages, [side.of(work.kept) for side in of_batch], x)
            products = choice.dtype or default_dtype(choice.method, x.device)
            fed, unit = stages.before(None if choice.method == "torch" else products)
            overwrite = stages.may_take(fed.dtype, products)
        out = orthogonalize(
            fed,
            settings.coefficients,
            method=choice.method,
            dtype=choice.dtype,
            watch=kernel.watch,
            overwrite=overwrite,
            unit=unit,
        )
        if stages is not None:
            stages.finish(out)
        elif out is not x:
            x.copy_(out)
        del stages, fed, out  # frees memory for the next batch, since these may have a wide dtype
