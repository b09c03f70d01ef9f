"""Carry buckets out: pack, exchange, orthogonalize, exchange, apply.

`BucketRun` is one bucket in one step on one rank. It never communicates: it fills a send buffer and is handed the
received one, so real ranks and simulated ranks run the same lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardmuon.orthogonalize import BACKENDS, default_dtype, orthogonalize
from shardmuon.orthogonalize.choice import Choice
from shardmuon.orthogonalize.slots import empty_batch
from shardmuon.planning.types import Transfer
from shardmuon.stepping.owner_stages import OwnerStages
from shardmuon.stepping.program import Part, Program
from shardmuon.stepping.work import Kernel, Pair, ParamWork, apply_results, update_momentum


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
        self._bucket = program.rank_bucket
        self._items = program.plan.items
        self._lists = program.lists(work)
        self._work = work
        self._kernel = kernel
        self._how = Choice.of(self._items[self._bucket.bucket.items[0]].how)  # of the wire; batches have their own
        self._wire = kernel.wire_of(self._items[self._bucket.bucket.items[0]].how)
        self._device = device
        self._batches: list[Tensor] = []  # (B, rows, cols) each, before or after
        self._stages = OwnerStages(program, self._lists, work)
        self.num_orthogonalized = 0

    @property
    def moves(self) -> bool:
        """Whether the bucket has exchanges."""
        return self._bucket.gather is not None

    def pack(self) -> Tensor:  # 1-D, wire dtype: the gather's send buffer (empty if nothing moves)
        """Update the momentum of every fragment held here; copy it to the wire and to the matrices owned here."""
        for batch in self._lists.batches:
            rows, cols = self._items[batch[0]].rows, self._items[batch[0]].cols
            self._batches.append(empty_batch((len(batch), rows, cols), self._wire, self._kernel.device or self._device))
        send = self._send_buffer(self._bucket.gather)
        for portion in self._lists.portions:
            update_momentum(self._pairs(portion.idle), read=False)
            updates = update_momentum(self._pairs(portion.used))
            portion.targets.fill(updates, self._batches, send, portion.reshaped)
        return send

    def _pairs(self, parts: Sequence[Part]) -> list[Pair]:
        return [(self._work[part.param], part) for part in parts]

    def _send_buffer(self, transfer: Transfer | None) -> Tensor:
        size = 0 if transfer is None else sum(transfer.send_splits)
        return (torch.zeros if self._lists.gaps else torch.empty)(size, dtype=self._wire, device=self._device)

    def orthogonalize(
        self,
        recv: Tensor,  # 1-D, wire dtype: what the gather brought
    ) -> Tensor:  # 1-D, wire dtype: the scatter's send buffer
        """Complete the matrices owned here, orthogonalize them in batches of one shape, pack the results."""
        self._lists.gathered.run(self._batches, recv)
        del recv  # frees it: nobody else holds it
        for number, items in enumerate(self._lists.batches):
            settings = self._work[self._items[items[0]].param].settings
            choice = Choice.of(self._items[items[0]].how)
            batch = self._batches[number]
            stages = self._stages.of_batch(number, items, batch.device)
            products = choice.dtype or default_dtype(choice.method, batch.device)
            takes_unit = BACKENDS[choice.method].iteration is not None
            fed, unit = stages.before(batch, products if takes_unit else None)
            del batch
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
                overwrite=stages.may_take(fed.dtype, products),
                unit=unit,
            )
            del fed
            out = stages.after(out, self._wire)
            self._batches[number] = out if stages.waits else out.to(self._wire)
            del out  # it may be wider than the wire, and the next batch needs room
            self.num_orthogonalized += len(items)
        for number in self._stages.finish(self._batches):
            self._batches[number] = self._batches[number].to(self._wire)
        return self._pack_results()

    def _pack_results(self) -> Tensor:
        send = self._send_buffer(self._bucket.scatter)
        self._lists.returned.run(self._batches, send)
        self._stages.tell(send)
        return send

    def apply(
        self,
        recv: Tensor,  # 1-D, wire dtype: what the scatter brought
    ) -> None:
        """Decay and update the weights of every fragment held here."""
        self._stages.hear(recv)
        like_torch = BACKENDS[self._how.method].like_torch
        for portion in self._lists.portions:
            pairs = self._pairs(portion.held)
            dtype = None if like_torch else _widened(self._wire, pairs)
            apply_results(pairs, portion.results.of(self._batches, recv, dtype), like_torch=like_torch)


def _widened(wire: torch.dtype, pairs: Sequence[Pair]) -> torch.dtype | None:
    """The dtype in which these weights take updates, where all of a portion are better widened at once than one by one:
    on CPUs. None: the wire's, or they differ."""
    weights = {work.weight.dtype for work, _ in pairs} if wire in _HALVES else {wire}
    dtype = weights.pop()
    if weights or pairs[0][0].weight.device.type != "cpu":
        return None
    return torch.float32 if dtype in _HALVES else dtype


_HALVES = (torch.bfloat16, torch.float16)
