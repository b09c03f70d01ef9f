"""Execution of a step's buckets on one rank, from the momentum update to the weight update. A bucket is a set of
matrices that ranks exchange together.

`Bound.run` runs one bucket. It gathers whole matrices on the ranks that orthogonalize them, orthogonalizes the
matrices, and scatters the results to the ranks that store the shards. If other ranks store replicas of the shards, it
also forwards the results to them. `Buckets.run` runs all buckets of a step and overlaps them: while one bucket is
orthogonalized, the next bucket is gathered.

The caller of `Bound.run` passes the function that starts an exchange, so that real ranks and simulated ranks execute
the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from shardmuon.comm.groups import Pending, Traffic, group_for, wire_device
from shardmuon.errors import ExchangeError, ranks_text
from shardmuon.layout.views import Ints
from shardmuon.orthogonalize import FiniteWatch, copied_batch, orthogonalize
from shardmuon.orthogonalize.choice import Choice
from shardmuon.plan.plan import Bucket, Plan
from shardmuon.plan.program import Copy, Load, Program, Wire
from shardmuon.price.clock import turns
from shardmuon.step.update import KeptSide, Side, Work
from shardmuon.texts import listed
from shardmuon.variants import AfterStage, BeforeStage, Stages, keeping, scaled_

_CPU = torch.device("cpu")
_WIRES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


class Bound:
    """Executor of one bucket on one rank. A bucket is a set of matrices that ranks exchange together. Objects are
    cached between steps and hold no tensors.

    A bucket has up to three exchanges. The gather collects whole matrices on the ranks that orthogonalize them. The
    scatter returns the results to the ranks that store the shards. The relay forwards the results to further ranks,
    which store replicas of the shards.

    A tile is a part of a matrix in this rank's local storage. Stage state is the state of the Muon variant's
    post-processing stages, such as NorMuon's second moments.

    Args:
        plan: Plan that contains the bucket.
        program: This rank's copies and exchanges for the bucket.
        shapes: Shape of this rank's local storage for each parameter.
        device: Device of the exchange buffers.
        ns_device: Device on which matrices are orthogonalized. Default: `device`.

    Attributes:
        dtype: Dtype of the exchange buffers and of the batches of matrices.
        num_owned: Number of matrices that this rank orthogonalizes.
        choices: Orthogonalization method of each batch of matrices.
        like_torch: Whether weights are updated by the same operations as in torch.optim.Muon (see `apply_results`).
        own: Tiles of the matrices that this rank orthogonalizes.
        gathered: Tiles that this rank sends in the gather.
        scattered: Tiles whose results this rank receives in the scatter.
        late: Tiles whose results this rank receives in the relay.
        held: Tiles that are updated after the scatter: `own` and `scattered`.
        kept: For each batch, the locations of its stage state, as a list with one entry per stage that has state.
        told, heard: Locations of the stage state that this rank sends (`told`) and receives (`heard`) in the scatter.
        told_on, heard_late: Locations of the stage state that this rank sends (`told_on`) and receives (`heard_late`)
            in the relay.
    """

    def __init__(
        self,
        plan: Plan,
        program: Program,
        shapes: Sequence[Ints],
        device: torch.device = _CPU,
        ns_device: torch.device | None = None,
    ) -> None:
        self.plan, self.program, self.device, self.ns_device = plan, program, device, ns_device
        self.dtype, self.num_owned = _WIRES[program.bucket.itemsize], sum(len(batch.items) for batch in program.batches)
        self.choices: list[Choice] = [plan.items[batch.items[0]].choice for batch in program.batches]
        self.like_torch = plan.items[program.bucket.items[0]].choice.method == "torch"
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
        self.kept = [list(_kept_of(plan, program.rank, batch.items)) for batch in program.batches]
        self.told, self.heard, self.told_on, self.heard_late = (
            KeptSide(plan, loads) for loads in (scatter.told, scatter.heard, relay.told, relay.heard)
        )

    def __str__(self) -> str:
        bucket, plan = self.program.bucket, self.plan
        items = [plan.items[number] for number in bucket.items]
        named = listed([f"{plan.specs[item.param].name} {item.rows}x{item.cols}" for item in items])
        return f"bucket {plan.buckets.index(bucket)} of {len(plan.buckets)} (ranks {ranks_text(bucket.ranks)}: {named})"

    def run(
        self,
        work: Work,
        watch: FiniteWatch | None,
        # `exchange` takes the send buffer, the number of elements to send to each rank, and the number to receive from
        # each rank. It starts the exchange and returns a handle.
        exchange: Callable[[Tensor, Ints, Ints], Pending],
    ) -> Iterator[None]:
        """Run one bucket (a set of matrices that ranks exchange together). The generator yields after it starts each
        exchange, so that the caller can run other buckets while the exchange is in progress (see
        `shardmuon.price.clock.turns`). If a bucket has no gather and no scatter, the generator still yields twice, so
        that the caller can treat all buckets alike.

        Send and receive buffers are freed as early as possible, because matrix products need the memory.
        """
        program, gathers = self.program, self.program.bucket.gathers
        gather, scatter, relay = program.gather, program.scatter, program.relay
        # Exchanges in progress. Before this rank waits for an exchange, it removes the exchange from the list, so that
        # the send buffer can be freed.
        pending: list[Pending] = []
        batches = torch.empty(program.batch_numel, dtype=self.dtype, device=self.ns_device or self.device)
        if gathers:
            send = batches.new_empty(sum(gather.sent), device=self.device)
            self.gathered.update_momentum(work, send)
            pending.append(exchange(send, gather.sent, gather.came))
            del send
        own = self.own.update_momentum(work, batches)
        self.late.update_momentum(work, None)
        yield
        if gathers:
            _copy(gather.copies, pending.pop().wait(), batches)
        _orthogonalize(self, work, watch, batches)
        if gathers:
            pending.append(exchange(_results(self, scatter, self.told, work, batches), scatter.sent, scatter.came))
        yield
        came = pending.pop().wait() if gathers else None
        if came is not None:
            if scatter.heard:
                self.heard.hear(came, work.kept)
            own += self.scattered.on(came)
        passed = None if relay is None else _results(self, relay, self.told_on, work, batches, came)
        self.held.apply_results(work, own, like_torch=self.like_torch)
        if passed is None or relay is None:
            return
        del batches, own, came
        pending.append(exchange(passed, relay.sent, relay.came))
        del passed
        yield
        came = pending.pop().wait()
        if relay.heard:
            self.heard_late.hear(came, work.kept)
        self.late.apply_results(work, self.late.on(came), like_torch=self.like_torch)


class Buckets:
    """This rank's buckets (sets of matrices that ranks exchange together), for steps in which the parameters in
    `missing` have no gradient. Objects are cached between steps.

    Args:
        plan: Plan of the step, which contains the buckets.
        rank: Global rank that runs the buckets.
        shapes: Shape of this rank's local storage for each parameter.
        buckets: This rank's buckets, each with the device of its parameters.
        ns_device: Device on which matrices are orthogonalized. Default: the device of each bucket's exchange buffers.
        missing: Indices of the parameters that have no gradient.

    Attributes:
        bounds: One `Bound` per bucket, in the plan's order.
        order: Order in which the operations of all buckets run (see `shardmuon.price.clock.turns`).
        moves: Whether any bucket needs an exchange with other ranks.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        shapes: Sequence[Ints],
        buckets: Sequence[tuple[Bucket, torch.device]],
        ns_device: torch.device | None,
        missing: frozenset[int],
    ) -> None:
        self.bounds: list[Bound] = []
        for bucket, home in buckets:
            device = wire_device(home, bucket.ranks if bucket.exchange else (rank,), ns_device)
            self.bounds.append(Bound(plan, Program.of(plan, bucket, rank, missing), shapes, device, ns_device))
        self.moves = any(bucket.exchange for bucket, _ in buckets)
        relays = [bound.program.relay is not None for bound in self.bounds]
        self.order = list(turns(relays, [bucket.ranks for bucket, _ in buckets]))

    def run(self, work: Work, watch: FiniteWatch, traffic: Traffic) -> None:
        """Run all buckets of a step, and overlap their exchanges with computation. Collective among the ranks of each
        bucket.

        Args:
            work: This step's tensors.
            watch: Guard that replaces non-finite results of the orthogonalization with zeros, and warns about them
                later.
            traffic: Counters of exchanges and orthogonalized matrices, updated in place.

        Raises:
            ExchangeError: This rank or another rank failed in the middle of the step. The message names the bucket and
                the operation.
        """
        runs: dict[int, Iterator[None]] = {}
        with ExchangeError.naming(lambda: f"{bound}, {turn}") if self.moves else nullcontext():
            for turn, i in self.order:
                bound = self.bounds[i]
                if turn == "begin":
                    group = group_for(bound.program.bucket.ranks) if bound.program.bucket.exchange else None
                    runs[i] = bound.run(work, watch, partial(traffic.start, group))
                    traffic.orthogonalized += bound.num_owned
                # When a bucket's generator has finished, `next` returns the default None instead of raising
                # StopIteration.
                next(runs[i], None)


def _kept_of(plan: Plan, rank: int, items: Sequence[int]) -> Iterator[KeptSide]:
    """Yield the locations of a batch's stage state, such as NorMuon's second moments: one `KeptSide` for each
    post-processing stage that has state."""
    batch = [plan.items[number] for number in items]
    for number in range(len(plan.specs[batch[0].param].kept)):
        tiles = [plan.specs[item.param].kept[number].layout.tiles[item.matrix][rank][0] for item in batch]
        yield KeptSide(plan, [Load(item.param, tile, number=number) for item, tile in zip(batch, tiles, strict=True)])


def _results(
    bound: Bound,
    wire: Wire,
    told: KeptSide,
    work: Work,
    batches: Tensor,
    # 1-D receive buffer of the scatter, with the results that the relay forwards; None for the scatter itself, and for
    # the relay of a bucket without a scatter
    came: Tensor | None = None,
) -> Tensor:
    """Make this rank's 1-D send buffer for the scatter or the relay. The scatter returns results to the ranks that
    store the shards, and the relay forwards results to ranks with replicas of the shards. The buffer contains
    orthogonalized matrices and the state of the Muon variant's post-processing stages (such as NorMuon's)."""
    send = batches.new_empty(sum(wire.sent), device=bound.device)
    _copy(wire.copies, send, batches, back=True)
    if came is not None:
        _copy(wire.passed, came, send)
    if wire.told:
        told.tell(work.kept, send)
    return send


def _copy(copies: Sequence[Copy], here: Tensor, there: Tensor, *, back: bool = False) -> None:
    """Copy the blocks of elements described by `copies` from the buffer `here` to the buffer `there`, or in the
    opposite direction if `back` is True."""
    for copy in copies:
        one = here.as_strided(copy.sizes, copy.here.strides, copy.here.start)
        other = there.as_strided(copy.sizes, copy.there.strides, copy.there.start)
        source, target = (other, one) if back else (one, other)
        target.copy_(source)


def _orthogonalize(bound: Bound, work: Work, watch: FiniteWatch | None, batches: Tensor) -> None:
    """Orthogonalize the matrices that the plan assigns to this rank, in place in the buffer `batches`. Also run the
    stages that a Muon variant (such as NorMuon) adds before and after the orthogonalization ([Note: stages] in
    variants.py)."""
    for batch, choice, sides in zip(bound.program.batches, bound.choices, bound.kept, strict=True):
        settings = work.settings[bound.plan.items[batch.items[0]].param]
        fed = x = batches.as_strided(batch.shape, (batch.stride, batch.shape[2], 1), batch.start)
        unit, overwrite, after = False, True, tuple[AfterStage, ...]()
        if settings.stages:
            fed, unit = _run_before(settings.stages, x, x.dtype if choice.method == "torch" else choice.dtype)
            after = tuple(stage for stage in settings.stages if isinstance(stage, AfterStage))
            # With `overwrite`, the result has the dtype of the matrix products if it is computed in a single batch, and
            # the dtype of `fed` otherwise. The number of batches depends on the layout, but the stages that follow must
            # get the same dtype with any layout. So if stages follow, `overwrite` requires equal dtypes.
            overwrite = fed.dtype == choice.dtype or not after
        out = orthogonalize(
            fed,
            settings.coefficients,
            method=choice.method,
            dtype=choice.dtype,
            watch=watch,
            overwrite=overwrite,
            unit=unit,
        )
        if after:
            out = out.to(torch.promote_types(out.dtype, x.dtype))
            pairs = zip(keeping(settings.stages), sides, strict=True)
            scaled_(after, out, {stage.key: side.of(work.kept) for stage, side in pairs})
        if out is not x:
            x.copy_(out)
        del fed, out  # free the memory of this batch's tensors before the next batch


def _run_before(
    stages: Stages,
    # Batch of matrices, (B, rows, cols), in the dtype in which matrices are exchanged; may be overwritten. Each matrix
    # starts at a multiple of 64 bytes.
    x: Tensor,
    products: torch.dtype,  # dtype of the matrix products in the orthogonalization
) -> tuple[Tensor, bool]:
    """Run the Muon variant's stages that transform a batch of matrices before the orthogonalization (such as MuonEq).
    On a CPU, the stages process one matrix at a time. A half-precision batch is first copied to fp32 if the matrix
    products use another dtype.

    Returns:
        A pair: the input of the orthogonalization, and True if its matrices already have norm 1.
    """
    before = [stage for stage in stages if isinstance(stage, BeforeStage)]
    if before and x.dtype in (torch.bfloat16, torch.float16) and products != x.dtype:
        x = copied_batch(x, torch.float32)
    for matrices in x.split(1) if x.device.type == "cpu" else (x,):
        for stage in before:
            stage.run_(matrices)
    return x, bool(before)
