"""Carry buckets out: pack, exchange, orthogonalize, exchange, apply.

`BucketRun` is one bucket in one step on one rank. It never communicates: it fills a send buffer and is handed the
received one, so real ranks and simulated ranks run the same lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from shardmuon._torch import foreach_copy_
from shardmuon.errors import HALF_DONE, naming, ranks_text
from shardmuon.momentum.rounding import Stream, round_fragment
from shardmuon.momentum.stores import Momentum
from shardmuon.momentum.update import apply_, apply_like_torch_, l2_gradient, lr_scale
from shardmuon.options import Settings
from shardmuon.orthogonalize import BACKENDS, Method, orthogonalize
from shardmuon.orthogonalize.choice import Choice
from shardmuon.orthogonalize.graphs import GraphCache
from shardmuon.planning.layout import Fragment
from shardmuon.planning.plan import Plan, RankBucket
from shardmuon.planning.routes import Messages, gram_messages, sources
from shardmuon.ranks.exchange import Pending, Traffic, start_exchange

if TYPE_CHECKING:
    from shardmuon.stepping.gram_buckets import StayRun


@dataclass(frozen=True, slots=True)
class Kernel:
    """What all matrices of the optimizer have in common; how each is orthogonalized stands in the plan.

    Attributes:
        wire_dtype: In which matrices travel.
        follows_products: Whether bf16 products take a bf16 wire all the same. Then every matrix is rounded as if its
            own method had been forced, whatever "auto" took for others.
        deterministic: One matrix at a time.
        finite_check: See `orthogonalize`.
        graphs: See `orthogonalize`.
        device: Where to orthogonalize; None: where the wire buffers are.
    """

    wire_dtype: torch.dtype
    deterministic: bool
    finite_check: bool = True
    graphs: GraphCache | None = None
    device: torch.device | None = None
    follows_products: bool = False

    def wire_of(self, how: str) -> torch.dtype:
        """The wire of matrices that are orthogonalized like this. A bucket's are all of one kind."""
        narrow = self.follows_products and Choice.of(how).dtype == torch.bfloat16
        return torch.bfloat16 if narrow else self.wire_dtype


class ParamWork(NamedTuple):
    """One parameter in one step: this rank's local storages, all of one shape."""

    weight: Tensor
    grad: Tensor
    momentum: Momentum
    settings: Settings
    rounding: Stream | None = None  # random bits for half-precision weights


class _Held(NamedTuple):
    """A fragment that this rank stores, and where it goes and comes from."""

    item: int
    fragment: Fragment
    send_start: int | None  # offset in the gather's send buffer, if this rank is the fragment's source
    recv_start: int | None  # offset in the scatter's receive buffer; None if this rank owns the item


@dataclass(frozen=True)
class Program:
    """A rank's bucket with everything looked up that does not change between steps."""

    plan: Plan
    rank_bucket: RankBucket
    rank: int

    @cached_property
    def held(self) -> tuple[_Held, ...]:
        bucket = self.rank_bucket
        sends = {(s.item, s.fragment): s.start for s in bucket.gather.send} if bucket.gather else {}
        recvs = {(s.item, s.fragment): s.start for s in bucket.scatter.recv} if bucket.scatter else {}
        return tuple(_Held(i, f, sends.get((i, f)), recvs.get((i, f))) for i, f in bucket.held)

    @cached_property
    def batches(self) -> tuple[tuple[int, ...], ...]:
        """Owned items by shape and orthogonalizer settings: each tuple runs as one batch."""
        table: dict[tuple[int, int, str, str], list[int]] = {}
        for index in self.rank_bucket.owned:
            item = self.plan.items[index]
            key = (item.rows, item.cols, item.how, self.plan.specs[item.param].batch)
            table.setdefault(key, []).append(index)
        return tuple(tuple(batch) for batch in table.values())

    @cached_property
    def messages(self) -> tuple[Messages, Messages]:
        """The two exchanges of a Gram bucket."""
        return gram_messages(self.plan, self.rank_bucket.bucket, self.rank)

    @cached_property
    def added(self) -> dict[int, tuple[Fragment, ...]]:
        """Of a Gram bucket: item -> the fragments whose part of the Gram matrix this rank sends."""
        found = {}
        for index in self.rank_bucket.bucket.items:
            item = self.plan.items[index]
            layout = self.plan.specs[item.param].layout
            found[index] = sources(layout, item.matrix, item.owners[0]).get(self.rank, ())
        return found

    def __str__(self) -> str:
        bucket = self.rank_bucket.bucket
        items = [self.plan.items[index] for index in bucket.items]
        matrices = [f"{self.plan.specs[item.param].name} {item.rows}x{item.cols}" for item in items[:3]]
        number = f"bucket {self.plan.buckets.index(bucket)} of {len(self.plan.buckets)}"
        more = [f"{len(items) - 3} more"] if len(items) > 3 else []
        return f"{number} (ranks {ranks_text(bucket.ranks)}: {', '.join(matrices + more)})"


class BucketRun:
    """One bucket in one step on one rank: `pack`, `orthogonalize`, `apply`, in this order."""

    def __init__(self, program: Program, work: Mapping[int, ParamWork], kernel: Kernel, device: torch.device) -> None:
        """
        Args:
            program: What to do.
            work: param index -> this step's local storages. Parameters without a gradient are absent and skipped.
            kernel: How to orthogonalize.
            device: Where the wire buffers live.
        """
        self._program = program
        self._bucket = program.rank_bucket
        self._items = program.plan.items
        self._work = work
        self._kernel = kernel
        self._wire = kernel.wire_of(self._items[self._bucket.bucket.items[0]].how)
        self._device = device
        self._inputs: list[tuple[tuple[int, ...], Tensor]] = []  # (items, (B, m, n) batch)
        self._matrices: dict[int, Tensor] = {}  # item -> (rows, cols) view of its batch, before or after
        self.num_orthogonalized = 0

    @property
    def moves(self) -> bool:
        """Whether the bucket has exchanges."""
        return self._bucket.gather is not None

    def _method(self, index: int) -> Method:
        return BACKENDS[Choice.of(self._items[index].how).method]

    def _active(self, index: int) -> bool:
        return self._items[index].param in self._work

    def pack(self) -> Tensor:  # 1-D, wire dtype: the gather's send buffer (empty if nothing moves)
        """Update the momentum of every fragment held here; copy it to the wire and to the matrices owned here."""
        for batch in self._program.batches:
            self._allocate(tuple(index for index in batch if self._active(index)))
        size = sum(self._bucket.gather.send_splits) if self._bucket.gather else 0
        held = [h for h in self._program.held if self._active(h.item)]
        make = torch.empty if len(held) == len(self._program.held) else torch.zeros
        send = make(size, dtype=self._wire, device=self._device)
        by_param: dict[int, list[_Held]] = {}
        for h in held:
            by_param.setdefault(self._items[h.item].param, []).append(h)
        for portion in _portions(by_param):
            targets: list[Tensor] = []
            sources: list[Tensor] = []
            for param, held_of in portion:
                idle = [h.fragment for h in held_of if not self._is_read(h)]
                momentum_of(self._work[param], idle, read=False)
                fragments = [h for h in held_of if self._is_read(h)]
                for h, update in zip(
                    fragments, momentum_of(self._work[param], [h.fragment for h in fragments]), strict=True
                ):
                    if h.send_start is not None:
                        targets.append(send.narrow(0, h.send_start, h.fragment.numel).view(update.shape))
                        sources.append(update)
                    if h.item in self._matrices:
                        target = h.fragment.select_matrix(self._matrices[h.item])
                        targets.append(target)
                        sources.append(update.reshape(target.shape))
            if targets:
                foreach_copy_(targets, sources)
        for param in by_param:
            self._work[param].momentum.release()
        return send

    def _is_read(self, held: _Held) -> bool:
        """Whether this rank sends or orthogonalizes a fragment. Of a replica others do, only the momentum moves on."""
        return held.send_start is not None or held.item in self._matrices

    def _allocate(self, items: tuple[int, ...]) -> None:
        if not items:
            return
        shape = (len(items), self._items[items[0]].rows, self._items[items[0]].cols)
        batch = torch.empty(shape, dtype=self._wire, device=self._kernel.device or self._device)
        self._inputs.append((items, batch))
        self._matrices.update(zip(items, batch, strict=True))

    def orthogonalize(
        self,
        recv: Tensor,  # 1-D, wire dtype: what the gather brought
    ) -> Tensor:  # 1-D, wire dtype: the scatter's send buffer
        """Complete the matrices owned here, orthogonalize them in batches of one shape, pack the results."""
        if self._bucket.gather is not None:
            slots = [slot for slot in self._bucket.gather.recv if self._active(slot.item)]
            if slots:
                targets = [slot.fragment.select_matrix(self._matrices[slot.item]) for slot in slots]
                foreach_copy_(targets, [_view(recv, s.start, t) for s, t in zip(slots, targets, strict=True)])
        del recv  # frees it: nobody else holds it
        while self._inputs:
            items, batch = self._inputs.pop()
            settings = self._work[self._items[items[0]].param].settings
            choice = Choice.of(self._items[items[0]].how)
            out = orthogonalize(
                batch,
                settings.coefficients,
                method=choice.method,
                eps=settings.eps,
                dtype=choice.dtype,
                one_by_one=self._kernel.deterministic,
                kernel=choice.kernel,
                finite_check=self._kernel.finite_check,
                graphs=self._kernel.graphs,
                overwrite=True,
            ).to(self._wire)
            self.num_orthogonalized += len(items)
            self._matrices.update(zip(items, out, strict=True))
        return self._pack_results()

    def _pack_results(self) -> Tensor:
        if self._bucket.scatter is None:
            return torch.empty(0, dtype=self._wire, device=self._device)
        slots = [slot for slot in self._bucket.scatter.send if self._active(slot.item)]
        make = torch.empty if len(slots) == len(self._bucket.scatter.send) else torch.zeros
        send = make(sum(self._bucket.scatter.send_splits), dtype=self._wire, device=self._device)
        if slots:
            sources = [slot.fragment.select_matrix(self._matrices[slot.item]) for slot in slots]
            foreach_copy_([_view(send, s.start, t) for s, t in zip(slots, sources, strict=True)], sources)
        return send

    def apply(
        self,
        recv: Tensor,  # 1-D, wire dtype: what the scatter brought
    ) -> None:
        """Decay and update the weights of every fragment held here."""
        by_param: dict[int, list[_Held]] = {}
        for h in self._program.held:
            if self._active(h.item):
                by_param.setdefault(self._items[h.item].param, []).append(h)
        for param, fragments in by_param.items():
            weights = [h.fragment.select_local(self._work[param].weight) for h in fragments]
            updates = [self._update(h, w, recv) for h, w in zip(fragments, weights, strict=True)]
            shapes = [(self._items[h.item].rows, self._items[h.item].cols) for h in fragments]
            like_torch = self._method(fragments[0].item).like_torch
            apply_fragments(self._work[param], [h.fragment for h in fragments], updates, shapes, like_torch=like_torch)

    def _update(self, held: _Held, weight: Tensor, recv: Tensor) -> Tensor:
        if held.recv_start is None:
            update = held.fragment.select_matrix(self._matrices[held.item]).reshape(weight.shape)
        else:
            update = _view(recv, held.recv_start, weight)
        return update.to(weight.device)


def momentum_of(work: ParamWork, fragments: Sequence[Fragment], *, read: bool = True) -> Sequence[Tensor]:
    """Update the momentum of these fragments of one parameter; return what is to be orthogonalized of each.

    read: False where nobody looks at the result, which then is not made.
    """
    if not fragments:
        return ()
    s = work.settings
    grads = [f.select_local(work.grad) for f in fragments]
    if s.weight_decay_mode == "l2" and s.weight_decay:
        weights = [f.select_local(work.weight) for f in fragments]
        grads = [l2_gradient(g, w, s.weight_decay) for g, w in zip(grads, weights, strict=True)]
    return work.momentum.update(fragments, grads, momentum=s.momentum, nesterov=s.nesterov and read)


def apply_fragments(
    work: ParamWork,
    fragments: Sequence[Fragment],
    updates: Sequence[Tensor],  # orthogonalized, each of its fragment's elements
    shapes: Sequence[tuple[int, int]],  # of each fragment's whole matrix
    *,
    like_torch: bool,  # by torch's own operations, where the options allow
) -> None:
    """Decay and update the weights of these fragments of one parameter."""
    s = work.settings
    weights = [f.select_local(work.weight) for f in fragments]
    updates = [u.reshape(w.shape).to(w.device) for u, w in zip(updates, weights, strict=True)]
    scales = [lr_scale(s.adjust_lr_fn, *shape, s.extra_scale_factor) for shape in shapes]
    if like_torch and work.rounding is None and s.weight_decay_mode == "decoupled":
        lr = s.lr if s.tensor_lr is None else s.tensor_lr
        for f, w, u, scale, shape in zip(fragments, weights, updates, scales, shapes, strict=True):
            apply_like_torch_(w, u, lr, scale, f, shape, weight_decay=s.weight_decay)
        return
    alphas = [s.lr * scale for scale in scales]
    rounded = None
    if work.rounding is not None:
        rounded = [partial(round_fragment, work.rounding, f, work.weight.dtype) for f in fragments]
    apply_(weights, updates, alphas, s.lr, s.weight_decay, s.weight_decay_mode, rounded)


_PORTION = 1 << 17  # elements: what momentum makes on its way to the wire is at most this, or one fragment


def _portions(by_param: Mapping[int, Sequence[_Held]]) -> Iterator[list[tuple[int, list[_Held]]]]:
    """The same fragments in the same order, dealt into portions of limited size."""
    portion: list[tuple[int, list[_Held]]] = []
    size = 0
    for param, fragments in by_param.items():
        for held in fragments:
            if size and size + held.fragment.numel > _PORTION:
                yield portion
                portion, size = [], 0
            if not portion or portion[-1][0] != param:
                portion.append((param, []))
            portion[-1][1].append(held)
            size += held.fragment.numel
    yield portion


def _view(buffer: Tensor, start: int, like: Tensor) -> Tensor:
    return buffer.narrow(0, start, like.numel()).view(like.shape)


def make_run(
    program: Program, work: Mapping[int, ParamWork], kernel: Kernel, device: torch.device
) -> BucketRun | StayRun:
    """What carries this bucket out."""
    from shardmuon.stepping.gram_buckets import StayRun  # which imports this module

    stays = program.rank_bucket.bucket.route in ("gram", "blockwise")
    return StayRun(program, work, kernel, device) if stays else BucketRun(program, work, kernel, device)


def run_buckets(
    programs: Sequence[Program],
    work: Mapping[int, ParamWork],
    kernel: Kernel,
    devices: Sequence[torch.device],  # one per program
    traffic: Traffic,
) -> None:
    """Run all buckets of a step. While bucket i is orthogonalized, i+1 is being gathered and i-1 scattered."""
    nothing = torch.empty(0, dtype=kernel.wire_dtype, device="cpu")
    runs = [make_run(p, work, kernel, d) for p, d in zip(programs, devices, strict=True)]
    gathers: dict[int, Pending] = {}
    scatters: dict[int, Pending] = {}

    exchanges = any(run.moves for run in runs)

    def at(i: int, phase: str) -> AbstractContextManager[None]:
        # Alone, an exception passes as it is: nobody else is left behind.
        return naming(lambda: f"{programs[i]}, {phase}", HALF_DONE) if exchanges else nullcontext()

    def begin(i: int) -> None:
        with at(i, "pack"):
            send = runs[i].pack()
        gather = programs[i].rank_bucket.gather
        if gather is not None:
            with at(i, "gather"):
                gathers[i] = start_exchange(send, gather, programs[i].rank_bucket.bucket.ranks, traffic)
            traffic.reductions += programs[i].rank_bucket.bucket.route == "gram"

    def received(pending: dict[int, Pending], i: int, phase: str) -> Tensor:  # no name may hold it: its reader frees it
        with at(i, phase):
            return pending.pop(i).wait() if i in pending else nothing

    def compute(i: int) -> None:
        with at(i, "orthogonalize"):
            send = runs[i].orthogonalize(received(gathers, i, "gather"))
        traffic.orthogonalized += runs[i].num_orthogonalized
        scatter = programs[i].rank_bucket.scatter
        if scatter is not None:
            with at(i, "scatter"):
                scatters[i] = start_exchange(send, scatter, programs[i].rank_bucket.bucket.ranks, traffic)

    def finish(i: int) -> None:
        with at(i, "apply"):
            runs[i].apply(received(scatters, i, "scatter"))
        runs[i] = None  # type: ignore[call-overload]  # frees its buffers

    for i in range(len(runs) + 1):
        if i == 0 and runs:
            begin(0)
        if i + 1 < len(runs):
            begin(i + 1)
        if i < len(runs):
            compute(i)
        if i > 0:
            finish(i - 1)
