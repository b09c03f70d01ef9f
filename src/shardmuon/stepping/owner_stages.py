"""Stages of variants at owners: on batches of whole matrices, and what they keep on its way to all who keep it.

See [Note: stages] and [Note: what a stage keeps] in variants/base.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from shardmuon._torch import foreach_copy_
from shardmuon.orthogonalize.newton_schulz import normalize
from shardmuon.stepping.program import Lists, Program
from shardmuon.stepping.work import ParamWork
from shardmuon.variants import AfterStage, BeforeStage, Stages, keeping, scaled_


class BatchStages:
    """The stages of one batch of matrices of one shape."""

    def __init__(
        self,
        stages: Stages,
        kept: Mapping[str, Tensor],  # key -> (B, num_kept), fp32, where the batch is; updated in place
        one_by_one: bool,
    ) -> None:
        self._stages, self._kept, self._one_by_one = stages, kept, one_by_one

    def before(
        self,
        batch: Tensor,  # (B, rows, cols); may be overwritten
        fed: torch.dtype | None,  # of the products, if the orthogonalizer takes matrices of norm 1 as they are; or None
    ) -> tuple[Tensor, bool]:  # (B, rows, cols), whether their norms are 1
        """What is to be orthogonalized; the batch itself in plain Muon.

        On a CPU one matrix after the other, into memory that there is.
        """
        stages = [stage for stage in self._stages if isinstance(stage, BeforeStage)]
        if not stages:
            return batch, False
        narrow = batch.dtype in (torch.bfloat16, torch.float16)
        takes = len(stages) == 1 and fed is not None and (not narrow or fed == batch.dtype)
        if takes and batch.device.type != "cpu":
            parts = batch.split(1) if self._one_by_one else (batch,)
            if all(_on_aligned(stages[0].unit, part) for part in parts):  # the first says it for all
                return batch, True
        elif takes:
            for matrix in batch.split(1):
                if stages[0].unit(matrix) is None:
                    found = normalize(stages[0].run(matrix, self._kept[stages[0].key][:1]), fed)
                    matrix.copy_(found)
            return batch, True
        return self._prepared(stages, batch), False

    def _prepared(self, stages: Sequence[BeforeStage], x: Tensor) -> Tensor:  # (B, rows, cols)
        for stage in stages:
            kept = self._kept[stage.key]
            if self._one_by_one and len(x) > 1:  # a sum over a batch may be cut otherwise than over one matrix
                parts = zip(x.split(1), kept.split(1), strict=True)
                x = torch.cat([stage.run(matrix, of_matrix) for matrix, of_matrix in parts])
            else:
                x = stage.run(x, kept)
        return x

    def may_take(self, fed: torch.dtype, products: torch.dtype) -> bool:
        """Whether results may take the place of what was fed, and so its dtype, which a batch of one matrix does not
        do: what a stage computes in must not hang on the batch, which is another one on every layout."""
        return fed == products or not any(isinstance(stage, AfterStage) for stage in self._stages)

    def after(
        self,
        out: Tensor,  # (B, rows, cols); may be overwritten
        wire: torch.dtype,  # in which results travel
    ) -> Tensor:  # (B, rows, cols), in the wider of the two dtypes
        """The results, scaled where they are; what was given in plain Muon."""
        stages = [stage for stage in self._stages if isinstance(stage, AfterStage)]
        if not stages:
            return out
        out = out.to(torch.promote_types(out.dtype, wire))
        if not self._one_by_one:
            return scaled_(stages, out, self._kept)
        for at, matrix in enumerate(out.split(1)):  # a sum over a batch may be cut otherwise than over one matrix
            kept = {key: numbers[at : at + 1] for key, numbers in self._kept.items()}
            _on_aligned(partial(scaled_, stages, kept=kept), matrix)
        return out


def _on_aligned(change: Callable[[Tensor], Tensor | None], x: Tensor) -> bool:
    """Change a matrix in place; False if it cannot be. Kernels on accelerators sum in another order where memory is not
    aligned, as matrices of a batch may be: such a one is changed in memory of its own."""
    if x.device.type == "cpu" or x.data_ptr() % 64 == 0:
        return change(x) is not None
    found = change(x.clone())
    if found is not None:
        x.copy_(found)
    return found is not None


_PLAIN = BatchStages((), {}, False)


class OwnerStages:
    """The stages of a bucket in one step on one rank. It never communicates: it writes to a send buffer, and reads from
    the received one."""

    def __init__(self, program: Program, lists: Lists, work: Mapping[int, ParamWork], one_by_one: bool) -> None:
        """Args: see `BucketRun`; `one_by_one`: each matrix by itself, so that its bits hang on no other."""
        self._program, self._lists, self._work, self._one_by_one = program, lists, work, one_by_one
        self._found: dict[tuple[int, int], Tensor] = {}  # (owned item, number) -> what its stage keeps of it now

    def of_batch(self, items: Sequence[int], device: torch.device) -> BatchStages:
        """The stages of a batch of owned items, with what they keep."""
        stages = self._work[self._program.plan.items[items[0]].param].settings.stages
        if not stages:
            return _PLAIN
        kept = {"": torch.empty(len(items), 0, dtype=torch.float32, device=device)}
        for number, stage in enumerate(keeping(stages)):
            kept[stage.key] = torch.stack([self._view(item, number) for item in items]).to(device)
            rows = kept[stage.key].unbind(0)
            self._found.update({(item, number): row for item, row in zip(items, rows, strict=True)})
        return BatchStages(stages, kept, self._one_by_one)

    def _view(self, item: int, number: int) -> Tensor:
        storage = self._work[self._program.plan.items[item].param].kept[number]
        return self._program.kept_by(item, number, storage)

    def tell(self, send: Tensor) -> None:
        """Keep what stages have changed here, and write its bits behind the results for the other ranks."""
        if not self._found:
            return
        travels = [key for key in self._found if self._travels(*key)]
        _copy([self._view(*key) for key in travels], [self._found[key] for key in travels])
        targets = [send.narrow(0, slot.start, slot.size) for slot in self._lists.told]
        bits = {key: self._bits(self._found[key], send) for key in travels}
        _copy(targets, [bits[slot.item, slot.number] for slot in self._lists.told])

    def _travels(self, item: int, number: int) -> bool:
        plan = self._program.plan
        return plan.specs[plan.items[item].param].kept[number].travels

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
