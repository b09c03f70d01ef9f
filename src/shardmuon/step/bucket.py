"""The buckets of a step on one rank, from momentum to weights: while one is orthogonalized, the next one travels.

`run_buckets` takes them in turns; `run_owners` is one bucket from its first line to its last: gather, orthogonalize
(with sums in between, where slices of a matrix have several owners), scatter, relay. Exchanges are handed in, so real
ranks and simulated ones run the same lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from shardmuon._torch import exact_products
from shardmuon.comm.groups import Pending, Traffic, group_for, start
from shardmuon.errors import HALF_DONE, naming, ranks_text
from shardmuon.layout.views import Ints
from shardmuon.orthogonalize import BACKENDS, Summing, default_dtype, orthogonalize, sliced
from shardmuon.orthogonalize.choice import Choice
from shardmuon.orthogonalize.gram import FiniteWatch
from shardmuon.orthogonalize.graphs import GraphCache
from shardmuon.plan.copies import Copy
from shardmuon.plan.pipeline import turns
from shardmuon.plan.plan import Plan
from shardmuon.plan.program import Program, Relay
from shardmuon.plan.types import Batch, aligned
from shardmuon.step.stages import BatchStages, KeptSide, Result, finish, sides_of_batches
from shardmuon.step.update import Side, Work, apply_results, update_momentum
from shardmuon.texts import listed

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
        moves: True if anything travels.
        num_owned: Matrices that are orthogonalized here.
        like_torch: See `apply_results`.
        choices: How each batch is orthogonalized.
    """

    def __init__(self, plan: Plan, program: Program, shapes: Sequence[Ints], device: torch.device = _CPU) -> None:
        views = [spec.layout.view for spec in plan.specs]
        self.plan, self.program, self.device = plan, program, device
        self.wire, self.moves = _WIRES[program.bucket.itemsize], program.bucket.exchange
        self.gathers, self.num_owned = program.bucket.gathers, program.num_owned
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
        items = [plan.items[number] for number in bucket.items if not plan.items[number].part]
        named = listed([f"{plan.specs[item.param].name} {item.rows}x{item.cols}" for item in items])
        return f"bucket {plan.buckets.index(bucket)} of {len(plan.buckets)} (ranks {ranks_text(bucket.ranks)}: {named})"

    def buffer(self, splits: Sequence[int]) -> Tensor:  # 1-D
        """Memory for what goes to each rank."""
        return torch.empty(sum(splits), dtype=self.wire, device=self.device)


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
    with naming(lambda: f"{bounds[i]}, {turn}", HALF_DONE) if buckets.moves else nullcontext():
        for turn, i in buckets.order:
            if turn == "begin":
                bound, bucket = bounds[i], bounds[i].program.bucket
                exchange = partial(start, group_for(bucket.ranks) if bound.moves else None, traffic)
                runs[i] = run_owners(bound, work, kernel, exchange)
                traffic.orthogonalized += bound.num_owned
            for _ in range(1 + bounds[i].program.sums if turn == "compute" else 1):
                next(runs[i], None)  # its last turn ends it


# ------------------------------------------------------------------------------------------- matrices with an owner


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
    update_momentum(bound.idle, work, None)  # of what another replica sends on
    yield
    if gathers:
        _copy(gather.copies, pending.pop().wait(), batches)
    if program.sums:
        yield from _orthogonalize_slices(bound, work, kernel, batches, exchange)
    _orthogonalize(bound, work, kernel, batches)
    if gathers:
        pending.append(exchange(_results(bound, work, batches), scatter.owner_splits, scatter.holder_splits))
    yield
    came: Tensor | None = None
    if gathers:
        came = pending.pop().wait()
        if scatter.heard:
            bound.heard.hear(came, work.kept)
        own += bound.returned.on(came)
    passed = None if relay is None else _passed_on(bound, relay, work, came, batches)
    apply_results(bound.held, work, own, like_torch=bound.like_torch)
    if passed is None or relay is None:
        return
    del batches, own, came
    pending.append(exchange(passed, relay.send_splits, relay.recv_splits))
    del passed
    yield
    came = pending.pop().wait()
    bound.heard_late.hear(came, work.kept)
    apply_results(bound.idle, work, bound.idle.on(came), like_torch=bound.like_torch)


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
        if item.parts > 1:
            continue
        settings, x = work.settings[item.param], _matrices(batch, batches)
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
            dtype=choice.dtype,
            kernel=choice.kernel,
            alone=choice.alone,
            split_k=choice.split_k,
            watch=kernel.watch,
            graphs=kernel.graphs,
            overwrite=overwrite,
            unit=unit,
        )
        if stages is None:
            if out is not x:
                x.copy_(out)
        else:
            waiting.append(Result(stages, x, out))
            if x.device.type == "cpu" or not stages.after:
                finish([waiting.pop()])
        del fed, out  # may be wider than the wire, and the next batch needs room
    if waiting:
        finish(waiting)  # elsewhere a launch for all costs less than one for each


def _matrices(batch: Batch, batches: Tensor) -> Tensor:  # (B, rows, cols)
    return batches.as_strided(batch.shape, (batch.stride, batch.shape[2], 1), batch.start)


def _orthogonalize_slices(
    bound: Bound, work: Work, kernel: Kernel, batches: Tensor, exchange: Exchange
) -> Iterator[None]:
    """Put results in the place of the slices owned here. All ranks of the bucket exchange as often, also those without
    a slice. See `orthogonalize`, [Note: slices of the long side]."""
    program, device = bound.program, batches.device
    slots = {
        number: (x, choice)
        for batch, choice in zip(program.batches, bound.choices, strict=True)
        for number, x in zip(batch.items, _matrices(batch, batches).unbind(0), strict=True)
    }
    runs: dict[int, Summing] = {}
    for mates in program.mates:
        item, (x, choice) = bound.plan.items[mates.item], slots[mates.item]
        run = sliced(
            [x],
            (item.rows, item.cols),
            work.settings[item.param].coefficients,
            method=choice.method,
            dtype=choice.dtype,
            kernel=choice.kernel,
            watch=kernel.watch,
        )
        with exact_products(device):
            runs[mates.item] = Summing(run)
    for _ in range(program.sums):
        places, splits = _on_wire(bound, {number: one.said[0] for number, one in runs.items() if one.said is not None})
        pending = [exchange(_to_mates(bound, places, sum(splits)), splits, splits)]
        yield
        with exact_products(device):
            _hear(bound, runs, places, pending.pop().wait())
    for number, one in runs.items():
        (found,) = one.results
        slots[number][0].copy_(found)


Places = Mapping[tuple[int, int], tuple[Tensor, int]]


def _to_mates(bound: Bound, places: Places, nbytes: int) -> Tensor:  # 1-D: bytes
    """Buffer of what the owners of other slices are sent."""
    send = torch.empty(nbytes, dtype=torch.uint8, device=bound.device)
    for value, first in places.values():
        _bytes(send, value, first).copy_(value)
    return send


def _hear(bound: Bound, runs: Mapping[int, Summing], places: Places, came: Tensor) -> None:
    """Go on with what came from the owners of other slices. Nothing holds it when this is left: the next needs room."""
    for mates in bound.program.mates:
        said = runs[mates.item].said
        if said is not None:
            others = {r: _bytes(came, *places[mates.item, r]) for r in mates.ranks if r != bound.program.rank}
            runs[mates.item].hear([others[r].to(said[0].device) if r in others else said[0] for r in mates.ranks])


def _on_wire(bound: Bound, said: Mapping[int, Tensor]) -> tuple[dict[tuple[int, int], tuple[Tensor, int]], Ints]:
    """Place of each tensor that goes to the owner of another slice, and of the one that comes: (item, rank) -> a tensor
    of this form, and its first byte on the wire; and the bytes for each rank."""
    places, splits, at = dict[tuple[int, int], tuple[Tensor, int]](), list[int](), 0
    for rank in bound.program.bucket.ranks:
        first = at
        for mates in bound.program.mates:
            if mates.item in said and rank in mates.ranks and rank != bound.program.rank:
                places[mates.item, rank] = said[mates.item], at
                at += aligned(said[mates.item].nbytes, 1)
        splits.append(at - first)
    return places, tuple(splits)


def _bytes(buffer: Tensor, like: Tensor, first: int) -> Tensor:
    """A tensor of this form in a buffer of bytes."""
    return buffer.narrow(0, first, like.nbytes).view(like.dtype).view(like.shape)


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
