"""One bucket in one step on one rank: momentum, batches, weights. It never communicates.

It fills buffers and is handed what came, so real ranks and simulated ones run the same lines: `pack`, and `fill` while
the gather travels, `orthogonalize`, `apply` what the scatter brought, `finish` what the relay brought.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardmuon.errors import ranks_text
from shardmuon.layout.views import Ints
from shardmuon.orthogonalize import BACKENDS, FiniteWatch, default_dtype, orthogonalize
from shardmuon.orthogonalize.choice import Choice
from shardmuon.orthogonalize.graphs import GraphCache
from shardmuon.plan.copies import Copy
from shardmuon.plan.plan import Plan
from shardmuon.plan.program import Batch, Program
from shardmuon.step.sides import Side
from shardmuon.step.stages import NO_STAGES, BatchStages, KeptSide, Result, finish, sides_of_batches
from shardmuon.step.update import Results, Work, apply_results, update_momentum

_CPU = torch.device("cpu")


class Kernel(NamedTuple):
    """What orthogonalizes the matrices of all buckets.

    Attributes:
        device: Where; None: where a bucket's wires are.
        graphs, watch: See `orthogonalize`.
    """

    device: torch.device | None = None
    graphs: GraphCache | None = None
    watch: FiniteWatch | None = None


class Bound:
    """A program with the sides that it has on this rank. Kept from step to step; holds no tensor.

    Args:
        plan: The plan.
        program: One of its.
        shapes: Of what this rank stores of each parameter.
        device: Of its wires.

    Attributes:
        gathers: See `Bucket`.
        num_owned: Matrices that are orthogonalized here.
        like_torch: See `apply_results`.
    """

    def __init__(self, plan: Plan, program: Program, shapes: Sequence[Ints], device: torch.device = _CPU) -> None:
        views = [spec.layout.view for spec in plan.specs]
        self.plan, self.program, self.device = plan, program, device
        self.gathers, self.num_owned = program.bucket.gathers, program.num_owned
        method = Choice.of(plan.items[program.bucket.items[0]].how).method
        self.like_torch = BACKENDS[method].like_torch
        self.own, self.foreign, self.returned, self.idle = (
            Side(loads, views, shapes) for loads in (program.own, program.foreign, program.returned, program.idle)
        )
        self.held = Side((*program.own, *program.returned), views, shapes)  # what `BucketRun.apply` changes at once
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


class BucketRun:
    """Carries a bucket out.

    Args:
        bound: What to do.
        work: With which tensors.
        wire: Dtype of what travels, and of batches.
        kernel: How.
    """

    def __init__(self, bound: Bound, work: Work, wire: torch.dtype, kernel: Kernel) -> None:
        self._bound, self._program, self._work = bound, bound.program, work
        self._wire, self._kernel = wire, kernel
        self._device = kernel.device or bound.device  # of batches

    def _buffer(self, splits: Sequence[int]) -> Tensor:
        return torch.empty(sum(splits), dtype=self._wire, device=self._bound.device)

    def pack(self) -> Tensor:  # 1-D: the gather's send buffer
        """Update the momentum of what other ranks orthogonalize."""
        send = self._buffer(self._program.gather.holder_splits)
        update_momentum(self._bound.foreign, self._work, self._bound.foreign.on(send))
        return send

    def fill(self) -> None:
        """Update the momentum of what this rank orthogonalizes, in its batches, and of what another replica does."""
        self._batches = torch.empty(self._program.batch_numel, dtype=self._wire, device=self._device)
        self._own = self._bound.own.on(self._batches)
        update_momentum(self._bound.own, self._work, self._own)
        if self._bound.idle.loads:
            update_momentum(self._bound.idle, self._work, None)

    def orthogonalize(self, came: Tensor | None) -> Tensor | None:  # 1-D: from the gather, the scatter's send buffer
        """Complete the matrices owned here, orthogonalize them, pack the results for those who hold them. None: nothing
        was gathered, and nothing goes back."""
        gathered = came is not None
        if came is not None:
            _copy(self._program.gather.copies, came, self._batches)
        del came  # frees it: nobody else holds it, and products need room
        waiting: list[Result] = []
        for batch, sides in zip(self._program.batches, self._bound.kept, strict=True):
            result = self._orthogonalize(batch, sides)
            if result.stages.after and self._device.type != "cpu":
                waiting.append(result)  # a launch for all costs less than one for each
            else:
                finish([result])
            del result  # it may be wider than the wire, and the next batch needs room
        if waiting:
            finish(waiting)
        if not gathered:
            return None
        scatter = self._program.scatter
        send = self._buffer(scatter.owner_splits)
        for copy in scatter.copies:
            here, there = _sides(copy, send, self._batches)
            here.copy_(there)
        if scatter.told:
            self._bound.told.tell(self._work.kept, send)
        return send

    def _orthogonalize(self, batch: Batch, sides: Sequence[KeptSide]) -> Result:
        item = self._bound.plan.items[batch.items[0]]
        settings, choice = self._work.settings[item.param], Choice.of(item.how)
        x = self._batches.as_strided(batch.shape, (batch.stride, item.cols, 1), batch.start)
        stages, fed, unit, overwrite = NO_STAGES, x, False, True
        if settings.stages:
            stages = BatchStages(settings.stages, sides, self._work.kept, x.device)
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
            watch=self._kernel.watch,
            graphs=self._kernel.graphs,
            overwrite=overwrite,
            unit=unit,
        )
        return Result(stages, x, out)

    def apply(self, came: Tensor | None) -> Tensor | None:  # 1-D: from the scatter; 1-D: the relay's send buffer
        """Update the weights whose results are here. None: the bucket has no relay."""
        bound, relay, send = self._bound, self._program.relay, None
        results = [Results(bound.own, self._batches, self._own)]
        if came is not None:
            if self._program.scatter.heard:
                bound.heard.hear(came, self._work.kept)
            results.append(Results(bound.returned, came))
        if relay is not None:
            send = self._buffer(relay.send_splits)
            if came is not None:
                _copy(relay.from_wire, came, send)
            _copy(relay.from_batch, self._batches, send)
            bound.told_on.tell(self._work.kept, send)
        apply_results(bound.held, self._work, results, like_torch=bound.like_torch)
        del self._batches, self._own
        return send

    def finish(self, came: Tensor) -> None:  # 1-D: from the relay
        """Update the weights whose results another replica has passed on."""
        bound = self._bound
        bound.heard_late.hear(came, self._work.kept)
        apply_results(bound.idle, self._work, [Results(bound.idle, came)], like_torch=bound.like_torch)


def _copy(copies: Sequence[Copy], here: Tensor, there: Tensor) -> None:
    for copy in copies:
        source, target = _sides(copy, here, there)
        target.copy_(source)


def _sides(copy: Copy, here: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
    return (
        here.as_strided(copy.sizes, copy.here.strides, copy.here.start),
        there.as_strided(copy.sizes, copy.there.strides, copy.there.start),
    )
