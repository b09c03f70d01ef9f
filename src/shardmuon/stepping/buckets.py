"""Carry buckets out: pack, exchange, orthogonalize, exchange, apply.

`BucketRun` is one bucket in one step on one rank. It never communicates: it fills a send buffer and is handed the
received one, so real ranks and simulated ranks run the same lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardmuon._torch import foreach_copy_
from shardmuon.orthogonalize import BACKENDS, Method, orthogonalize
from shardmuon.orthogonalize.choice import Choice
from shardmuon.stepping.work import (
    Held,
    Kernel,
    ParamWork,
    Part,
    Portion,
    Program,
    Results,
    apply_results,
    update_momentum,
)


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
        portions = self._portions()
        send = (torch.empty if portions is self._program.portions else torch.zeros)(
            size, dtype=self._wire, device=self._device
        )
        for portion in portions:
            update_momentum([Part(self._work[p.param], p.idle_fragments) for p in portion], read=False)
            updates = update_momentum([Part(self._work[p.param], p.used_fragments) for p in portion])
            targets: list[Tensor] = []
            sources: list[Tensor] = []
            for part, of_param in zip(portion, updates, strict=True):
                for h, update in zip(part.used, of_param, strict=True):
                    if h.send_start is not None:
                        targets.append(send.narrow(0, h.send_start, h.fragment.numel).view(update.shape))
                        sources.append(update)
                    if h.item in self._matrices:
                        target = h.fragment.select_matrix(self._matrices[h.item])
                        targets.append(target)
                        sources.append(update if update.shape == target.shape else update.reshape(target.shape))
            if targets:
                foreach_copy_(targets, sources)
        for portion in portions:
            for part in portion:
                self._work[part.param].momentum.release()
        return send

    def _portions(self) -> Sequence[Sequence[Portion]]:
        """Of the parameters that are stepped."""
        if self._program.params <= self._work.keys():
            return self._program.portions
        return [[part for part in portion if part.param in self._work] for portion in self._program.portions]

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
                watch=self._kernel.watch,
                graphs=self._kernel.graphs,
                overwrite=True,
            )
            out = _laid_out(out, self._wire)
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
        for portion in self._portions():
            apply_results([self._results(part, recv) for part in portion])

    def _results(self, part: Portion, recv: Tensor) -> Results:
        work = self._work[part.param]
        weights = [f.select_local(work.weight) for f in part.fragments]
        updates = [self._update(h, w, recv) for h, w in zip(part.held, weights, strict=True)]
        like_torch = self._method(part.held[0].item).like_torch
        return Results(work, part.fragments, weights, updates, part.shapes, like_torch)

    def _update(self, held: Held, weight: Tensor, recv: Tensor) -> Tensor:
        if held.recv_start is None:
            return held.fragment.select_matrix(self._matrices[held.item])
        return _view(recv, held.recv_start, weight)


def _laid_out(out: Tensor, dtype: torch.dtype) -> Tensor:  # (B, rows, cols)
    """Results in the wire dtype. On accelerators tall ones are turned back here, all at once: views of turned memory
    would each be copied, and added, by a launch of their own."""
    if out.device.type == "cpu":
        return out.to(dtype)
    return out.to(dtype, memory_format=torch.contiguous_format).contiguous()


def _view(buffer: Tensor, start: int, like: Tensor) -> Tensor:
    return buffer.narrow(0, start, like.numel()).view(like.shape)
