"""One bucket in one step on one rank, from momentum to weights: gather, orthogonalize, scatter, relay.

Exchanges are handed in, so real ranks and simulated ones run the same lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardmuon.comm.exchange import Pending
from shardmuon.errors import ranks_text
from shardmuon.layout.views import Ints
from shardmuon.orthogonalize import BACKENDS, default_dtype, orthogonalize
from shardmuon.orthogonalize.choice import Choice
from shardmuon.orthogonalize.gram import FiniteWatch
from shardmuon.orthogonalize.graphs import GraphCache
from shardmuon.plan.copies import Copy
from shardmuon.plan.pipeline import Turn, turns
from shardmuon.plan.plan import Plan
from shardmuon.plan.program import Program, Relay
from shardmuon.step.stages import BatchStages, KeptSide, Result, finish, sides_of_batches
from shardmuon.step.update import Results, Side, Work, apply_results, update_momentum

_CPU = torch.device("cpu")
_WIRES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}

Exchange = Callable[[Tensor, Ints, Ints], Pending]  # what goes to each rank, and how much to and from each


class Kernel(NamedTuple):
    """Means to orthogonalize the matrices of all buckets.

    Attributes:
        device: Device that orthogonalizes; None: that of a bucket's wires.
        graphs, watch: See `orthogonalize`.
    """

    device: torch.device | None = None
    graphs: GraphCache | None = None
    watch: FiniteWatch | None = None


class Bound:
    """A program with the sides that it has on this rank. Kept from step to step; holds no tensor.

    Args:
        plan: The plan.
        program: One of its programs.
        shapes: Shape of this rank's storage of each parameter.
        device: Device of its wires.

    Attributes:
        wire: Dtype of what travels, and of batches.
        gathers: See `Bucket`.
        num_owned: Matrices that are orthogonalized here.
        like_torch: See `apply_results`.
        choices: How each batch is orthogonalized.
    """

    def __init__(self, plan: Plan, program: Program, shapes: Sequence[Ints], device: torch.device = _CPU) -> None:
        views = [spec.layout.view for spec in plan.specs]
        self.plan, self.program, self.device = plan, program, device
        self.wire, self.gathers = _WIRES[program.bucket.itemsize], program.bucket.gathers
        self.num_owned = program.num_owned
        self.choices = [Choice.of(plan.items[batch.items[0]].how) for batch in program.batches]
        method = Choice.of(plan.items[program.bucket.items[0]].how).method
        self.like_torch = BACKENDS[method].like_torch
        self.own, self.foreign, self.returned, self.idle = (
            Side(loads, views, shapes) for loads in (program.own, program.foreign, program.returned, program.idle)
        )
        self.held = Side((*program.own, *program.returned), views, shapes)  # what the scatter changes at once
        self.kept = sides_of_batches(plan, program)
        scatter, relay = program.scatter, program.relay
        self.told, self.heard = KeptSide(plan, scatter.told), KeptSide(plan, scatter.heard)
        self.told_on = KeptSide(plan, () if relay is None else relay.told)
        self.heard_late = KeptSide(plan, () if relay is None else relay.heard)

    def __str__(self) -> str:
        bucket, plan = self.program.bucket, self.plan
        items = [plan.items[number] for number in bucket.items]
        named = [f"{plan.specs[item.param].name} {item.rows}x{item.cols}" for item in items[:3]]
        more = [f"{len(items) - 3} more"] if len(items) > 3 else []
        which = f"bucket {plan.buckets.index(bucket)} of {len(plan.buckets)}"
        return f"{which} (ranks {ranks_text(bucket.ranks)}: {', '.join(named + more)})"

    def buffer(self, splits: Sequence[int]) -> Tensor:  # 1-D
        """Memory for what goes to each rank."""
        return torch.empty(sum(splits), dtype=self.wire, device=self.device)


class Buckets(NamedTuple):
    """The buckets of this rank in a step in which certain parameters have a gradient. Kept from step to step.

    Attributes:
        bounds: The buckets, in the plan's order.
        order: Their turns, see `shardmuon.plan.pipeline.turns`.
        moves: True if anything travels, so that other ranks wait for this one.
    """

    bounds: list[Bound]
    order: list[tuple[Turn, int]]
    moves: bool

    @classmethod
    def of(cls, bounds: list[Bound]) -> Buckets:
        relays = [bound.program.relay is not None for bound in bounds]
        order = turns(relays, [bound.program.bucket.ranks for bound in bounds])
        return cls(bounds, list(order), any(bound.program.bucket.exchange for bound in bounds))


def run_owners(bound: Bound, work: Work, kernel: Kernel, exchange: Exchange) -> Iterator[None]:
    """Carry a bucket out, whose matrices each have an owner. Yields while something travels (and where it would, if
    nothing moves), so that another bucket's turn comes: see `shardmuon.plan.pipeline.turns`.

    What came and what was sent is let go of as soon as it has been read: products need room.
    """
    program, gathers = bound.program, bound.gathers
    gather, scatter, relay = program.gather, program.scatter, program.relay
    pending: list[Pending] = []  # taken out before it is waited for: then nothing here holds what was sent
    if gathers:
        pending.append(exchange(_momenta(bound, work), gather.holder_splits, gather.owner_splits))
    batches = torch.empty(program.batch_numel, dtype=bound.wire, device=kernel.device or bound.device)
    own = bound.own.on(batches)
    update_momentum(bound.own, work, own)
    if bound.idle.loads:  # of what another replica sends on
        update_momentum(bound.idle, work, None)
    yield
    if gathers:
        _copy(gather.copies, pending.pop().wait(), batches)
    _orthogonalize(bound, work, kernel, batches)
    if gathers:
        pending.append(exchange(_results(bound, work, batches), scatter.owner_splits, scatter.holder_splits))
    yield
    sources = [Results(bound.own, batches, own)]
    came: Tensor | None = None
    if gathers:
        came = pending.pop().wait()
        bound.heard.hear(came, work.kept)
        sources.append(Results(bound.returned, came))
    passed = None if relay is None else _passed_on(bound, relay, work, came, batches)
    apply_results(bound.held, work, sources, like_torch=bound.like_torch)
    if passed is None or relay is None:
        return
    del batches, own, sources, came
    pending.append(exchange(passed, relay.send_splits, relay.recv_splits))
    del passed
    yield
    came = pending.pop().wait()
    bound.heard_late.hear(came, work.kept)
    apply_results(bound.idle, work, [Results(bound.idle, came)], like_torch=bound.like_torch)


def _momenta(bound: Bound, work: Work) -> Tensor:  # 1-D: what the gather sends
    """Update the momentum of what other ranks orthogonalize."""
    send = bound.buffer(bound.program.gather.holder_splits)
    update_momentum(bound.foreign, work, bound.foreign.on(send))
    return send


def _orthogonalize(bound: Bound, work: Work, kernel: Kernel, batches: Tensor) -> None:
    """Put orthogonalized matrices in the place of those owned here."""
    waiting: list[Result] = []
    for batch, choice, sides in zip(bound.program.batches, bound.choices, bound.kept, strict=True):
        item = bound.plan.items[batch.items[0]]
        settings, x = (
            work.settings[item.param],
            batches.as_strided(batch.shape, (batch.stride, item.cols, 1), batch.start),
        )
        stages: BatchStages | None = None
        fed, unit, overwrite = x, False, True
        if settings.stages:
            stages = BatchStages(settings.stages, sides, work.kept, x.device)
            products = choice.dtype or default_dtype(choice.method, x.device)
            takes_unit = BACKENDS[choice.method].iteration is not None
            fed, unit = stages.before(x, products if takes_unit else None)
            overwrite = stages.may_take(fed.dtype, products)
        out = orthogonalize(
            fed,
            settings.coefficients,
            method=choice.method,
            eps=settings.eps,
            dtype=choice.dtype,
            kernel=choice.kernel,
            alone=choice.alone,
            watch=kernel.watch,
            graphs=kernel.graphs,
            overwrite=overwrite,
            unit=unit,
        )
        if stages is None:
            if out is not x:
                x.copy_(out)
        elif stages.after and x.device.type != "cpu":
            waiting.append(Result(stages, x, out))  # a launch for all costs less than one for each
        else:
            finish([Result(stages, x, out)])
        del fed, out  # may be wider than the wire, and the next batch needs room
    if waiting:
        finish(waiting)


def _results(bound: Bound, work: Work, batches: Tensor) -> Tensor:  # 1-D: what the scatter sends
    """Results for those who hold the matrices, and what stages keep."""
    send = bound.buffer(bound.program.scatter.owner_splits)
    _copy(bound.program.scatter.copies, send, batches, back=True)
    if bound.program.scatter.told:
        bound.told.tell(work.kept, send)
    return send


def _passed_on(
    bound: Bound,
    relay: Relay,
    work: Work,
    came: Tensor | None,  # 1-D: from the scatter, if there was one
    batches: Tensor,
) -> Tensor:  # 1-D: what the relay sends
    """Results for other replicas, and what stages keep."""
    send = bound.buffer(relay.send_splits)
    if came is not None:
        _copy(relay.from_wire, came, send)
    _copy(relay.from_batch, batches, send)
    bound.told_on.tell(work.kept, send)
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
