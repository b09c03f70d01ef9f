"""The buckets of a step on one rank, from momentum to weights: while one is orthogonalized, the next one travels.

`run_buckets` takes them in turns; `run_owners` is one bucket from its first line to its last: gather, orthogonalize,
scatter, relay. Exchanges are handed in, so real ranks and simulated ones run the same lines.
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
from shardmuon.orthogonalize import default_dtype, orthogonalize
from shardmuon.orthogonalize.choice import Choice
from shardmuon.orthogonalize.gram import FiniteWatch
from shardmuon.plan.pipeline import turns
from shardmuon.plan.plan import Plan
from shardmuon.plan.program import Copy, Program, Wire
from shardmuon.step.batch import BatchStages
from shardmuon.step.update import KeptSide, Side, Work, apply_results, sides_of_batches, update_momentum
from shardmuon.texts import listed

_CPU = torch.device("cpu")
_WIRES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}

Exchange = Callable[[Tensor, Ints, Ints], Pending]  # what goes to each rank, and how much to and from each


class Kernel(NamedTuple):
    """Means to orthogonalize the matrices of all buckets.

    Attributes:
        device: Device that orthogonalizes; None: that of a bucket's wires.
        watch: See `orthogonalize`.
    """

    device: torch.device | None = None
    watch: FiniteWatch | None = None


class Bound:
    """A program with the sides that it has on this rank. Kept from step to step; holds no tensor.

    Args:
        plan: The plan.
        program: One of its programs.
        shapes: Shape of this rank's storage of each parameter.
        device: Device of its wires.

    Attributes:
        dtype: Of what travels, and of batches.
        num_owned: Matrices that are orthogonalized here.
        moves: True if anything travels.
        choices: How each batch is orthogonalized.
        like_torch: See `apply_results`.
        own, gathered, scattered, late: Tiles of matrices owned here, that the gather sends, that the scatter brings,
            that the relay brings.
        held: What changes as soon as the scatter has come.
        kept: What stages keep of each batch.
        told, heard: What stages keep, as each exchange has it; of what comes behind the scatter `told_on`,
            `heard_late`.
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
        """Memory for what goes to each rank."""
        return torch.empty(sum(splits), dtype=self.dtype, device=self.device)


class Buckets:
    """The buckets of this rank in a step in which certain parameters have a gradient. Kept from step to step.

    Attributes:
        bounds: The buckets, in the plan's order.
        order: Their turns, see `shardmuon.plan.pipeline.turns`.
        moves: True if anything travels, so that other ranks wait for this one.
    """

    def __init__(self, bounds: list[Bound]) -> None:
        relays = [bound.program.relay is not None for bound in bounds]
        self.bounds, self.moves = bounds, any(bound.moves for bound in bounds)
        self.order = list(turns(relays, [bound.program.bucket.ranks for bound in bounds]))


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
    for turn, i in buckets.order:
        bound = bounds[i]
        try:
            if turn == "begin":
                group = group_for(bound.program.bucket.ranks) if bound.moves else None
                runs[i] = run_owners(bound, work, kernel, partial(start, group, traffic))
                traffic.orthogonalized += bound.num_owned
            next(runs[i], None)  # its last turn ends it
        except ExchangeError:
            raise
        except Exception as error:
            if not buckets.moves:
                raise
            raise named(error, f"{bound}, {turn}", HALF_DONE) from error


def run_owners(bound: Bound, work: Work, kernel: Kernel, exchange: Exchange) -> Iterator[None]:
    """Carry a bucket out. Yields while something travels (and where it would, if nothing moves), so that another
    bucket's turn comes: see `shardmuon.plan.pipeline.turns`.

    What came and what was sent is let go of as soon as it has been read: products need room.
    """
    program, gathers = bound.program, bound.program.bucket.gathers
    gather, scatter, relay = program.gather, program.scatter, program.relay
    pending: list[Pending] = []  # taken out before it is waited for: then nothing here holds what was sent
    if gathers:
        send = bound.buffer(gather.sent)
        update_momentum(bound.gathered, work, bound.gathered.on(send))
        pending.append(exchange(send, gather.sent, gather.came))
        del send
    batches = torch.empty(program.batch_numel, dtype=bound.dtype, device=kernel.device or bound.device)
    own = bound.own.on(batches)
    update_momentum(bound.own, work, own)
    update_momentum(bound.late, work, None)  # of what another replica sends on
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
    came: Tensor | None = None,  # 1-D: from the scatter, for the relay
) -> Tensor:  # 1-D: what the scatter or the relay sends
    """Results for others, and what stages keep."""
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
    """Put orthogonalized matrices in the place of those owned here."""
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
        del stages, fed, out  # may be wider than the wire, and the next batch needs room
