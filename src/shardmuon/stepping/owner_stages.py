"""Stages of variants at owners: on batches of whole matrices, and what they keep on its way to all who keep it.

See [Note: stages] and [Note: what a stage keeps] in variants/base.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardmuon._torch import foreach_copy_
from shardmuon.orthogonalize.newton_schulz import normalize
from shardmuon.stepping.program import Lists, Program
from shardmuon.stepping.work import ParamWork
from shardmuon.variants import AfterStage, BeforeStage, Stages, WeightStage, keeping, scaled_

Kept = Mapping[str, Sequence[Tensor]]  # key -> of each matrix (num_kept,), fp32


class BatchStages:
    """The stages of one batch of matrices of one shape.

    Attributes:
        waits: Whether results are not scaled yet after `after`.
    """

    def __init__(
        self,
        stages: Stages,
        kept: Kept,  # of each matrix (num_kept,), fp32, where the batch is; updated in place
        wait: bool = False,
    ) -> None:
        """Args: `wait`: whether results wait for those of the bucket's other batches, see `OwnerStages.finish`."""
        self._before = [stage for stage in stages if isinstance(stage, BeforeStage)]
        self._after = tuple(stage for stage in stages if isinstance(stage, AfterStage))
        self._kept = kept
        self.waits = wait and bool(self._after)

    def before(
        self,
        batch: Tensor,  # (B, rows, cols) in slots; may be overwritten
        fed: torch.dtype | None,  # of the products, if the orthogonalizer takes matrices of norm 1 as they are; or None
    ) -> tuple[Tensor, bool]:  # (B, rows, cols), whether their norms are 1
        """What is to be orthogonalized; the batch itself in plain Muon.

        On a CPU one matrix after the other, into memory that there is.
        """
        stages = self._before
        if not stages:
            return batch, False
        narrow = batch.dtype in (torch.bfloat16, torch.float16)
        takes = len(stages) == 1 and fed is not None and (not narrow or fed == batch.dtype)
        if takes and batch.device.type != "cpu":
            if stages[0].unit(batch) is not None:
                return batch, True
        elif takes:
            for at, matrix in enumerate(batch.split(1)):
                if stages[0].unit(matrix) is None:
                    found = normalize(self._run(stages[0], matrix, at), fed)
                    matrix.copy_(found)
            return batch, True
        return self._prepared(batch), False

    def _prepared(self, x: Tensor) -> Tensor:  # (B, rows, cols)
        for stage in self._before:
            if len(x) > 1:  # a sum over a batch may be cut otherwise than over one matrix
                x = torch.cat([self._run(stage, matrix, at) for at, matrix in enumerate(x.split(1))])
            else:
                x = self._run(stage, x)
        return x

    def _run(self, stage: BeforeStage, x: Tensor, at: int = 0) -> Tensor:  # (B, rows, cols), from the `at`-th on
        if not stage.key:
            return stage.run(x, torch.empty(len(x), 0, dtype=torch.float32, device=x.device))
        rows = self._kept[stage.key][at : at + len(x)]
        kept = torch.stack(list(rows))
        x = stage.run(x, kept)
        foreach_copy_(rows, kept.unbind(0))
        return x

    def may_take(self, fed: torch.dtype, products: torch.dtype) -> bool:
        """Whether results may take the place of what was fed, and so its dtype, which a batch of one matrix does not
        do: what a stage computes in must not hang on the batch, which is another one on every layout."""
        return fed == products or not self._after

    def after(
        self,
        out: Tensor,  # (B, rows, cols); may be overwritten
        wire: torch.dtype,  # in which results travel
    ) -> Tensor:  # (B, rows, cols), in the wider of the two dtypes
        """The results, scaled where they are unless they wait; what was given in plain Muon."""
        if not self._after:
            return out
        out = out.to(torch.promote_types(out.dtype, wire))
        if not self.waits:
            scaled_(self._after, [out], self._kept, one_by_one=True)
        return out


_PLAIN = BatchStages((), {})


class OwnerStages:
    """The stages of a bucket in one step on one rank. It never communicates: it writes to a send buffer, and reads from
    the received one."""

    def __init__(self, program: Program, lists: Lists, work: Mapping[int, ParamWork]) -> None:
        """Args: see `BucketRun`."""
        self._program, self._lists, self._work = program, lists, work
        # (owned item, number) -> where what its stage keeps lies in storage, and where it is up to date
        self._found: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._waiting: dict[Stages, dict[int, Kept]] = {}  # the stages after -> number of a batch -> what it keeps

    def of_batch(self, number: int, items: Sequence[int], device: torch.device) -> BatchStages:
        """The stages of the batch of this number, of these owned items, with what they keep."""
        stages = self._work[self._program.plan.items[items[0]].param].settings.stages
        if not stages:
            return _PLAIN
        kept: dict[str, Sequence[Tensor]] = {}
        for place, stage in enumerate(keeping(stages)):
            if isinstance(stage, WeightStage):
                continue
            stored = [self._view(item, place) for item in items]
            rows: Sequence[Tensor] = stored
            if stored[0].device != device:
                rows = torch.stack(stored).to(device).unbind(0)
            kept[stage.key] = rows
            if stage.travels:
                places = ((item, place) for item in items)
                self._found.update(zip(places, zip(stored, rows, strict=True), strict=True))
        after = tuple(stage for stage in stages if isinstance(stage, AfterStage))
        wait = device.type != "cpu"
        if wait and after:
            self._waiting.setdefault(after, {})[number] = kept
        return BatchStages(stages, kept, wait)

    def finish(self, batches: Sequence[Tensor]) -> list[int]:  # (B, rows, cols) of each number; written to
        """Scale the results that wait, all with the same stages together. Returns the numbers of their batches."""
        for stages, waiting in self._waiting.items():
            by_dtype: dict[torch.dtype, list[int]] = {}
            for number in waiting:
                by_dtype.setdefault(batches[number].dtype, []).append(number)
            for numbers in by_dtype.values():
                kept = {key: [row for number in numbers for row in waiting[number][key]] for key in waiting[numbers[0]]}
                scaled_(stages, [batches[number] for number in numbers], kept, one_by_one=True)  # type: ignore[arg-type]
        return [number for waiting in self._waiting.values() for number in waiting]

    def _view(self, item: int, number: int) -> Tensor:
        storage = self._work[self._program.plan.items[item].param].kept[number]
        return self._program.kept_by(item, number, storage)

    def tell(self, send: Tensor) -> None:
        """Keep what stages have changed here, and write its bits behind the results for the other ranks."""
        if not self._found:
            return
        moved = [(stored, now) for stored, now in self._found.values() if stored is not now]
        _copy([stored for stored, _ in moved], [now for _, now in moved])
        targets = [send.narrow(0, slot.start, slot.size) for slot in self._lists.told]
        _copy(targets, [self._bits(self._found[slot.item, slot.number][1], send) for slot in self._lists.told])

    @staticmethod
    def _bits(kept: Tensor, wire: Tensor) -> Tensor:  # 1-D, the wire's dtype
        """fp32 numbers as elements of a wire buffer, which only moves them."""
        per_element = -(-wire.element_size() // kept.element_size())
        padding = -kept.numel() % per_element
        whole = torch.cat([kept, kept.new_zeros(padding)]) if padding else kept.contiguous()
        return whole.view(wire.dtype).to(wire.device)

    def hear(self, recv: Tensor) -> None:
        """Keep what owners' stages have changed."""
        heard = self._lists.heard
        if not heard:
            return
        # one copy into memory of its own, for a slot may begin where no fp32 number may
        numbers = torch.cat([recv.narrow(0, slot.start, slot.size) for slot in heard]).view(torch.float32)
        start = 0
        sources: list[Tensor] = []
        targets: list[Tensor] = []
        for slot in heard:
            target = self._view(slot.item, slot.number)
            sources.append(numbers.narrow(0, start, target.numel()))
            targets.append(target)
            start += slot.size * recv.element_size() // numbers.element_size()
        _copy(targets, sources)


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    if targets:
        foreach_copy_(targets, sources)


__all__ = ["BatchStages", "OwnerStages"]
