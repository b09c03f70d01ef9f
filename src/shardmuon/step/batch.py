"""Stages of a variant, run by the owner on a batch of whole matrices. See [Note: stages] and [Note: what a stage keeps]
in variants/base.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardmuon._torch import foreach_copy_
from shardmuon.orthogonalize import empty_batch
from shardmuon.variants import AfterStage, BeforeStage, Stages, keeping, scaled_


class BatchStages:
    """The stages of a batch in one step.

    Args:
        stages: Stages of the batch's matrices.
        stored: State tensors of each matrix, for each stage of `keeping(stages)`.
        place: The batch, and the memory for its results: (B, rows, cols) in slots, in the wire's dtype.
    """

    def __init__(self, stages: Stages, stored: Sequence[Sequence[Tensor]], place: Tensor) -> None:
        self.place = place
        self._before = [stage for stage in stages if isinstance(stage, BeforeStage)]
        self._after = tuple(stage for stage in stages if isinstance(stage, AfterStage))
        self._kept: dict[str, Sequence[Tensor]] = {}  # key -> state of each matrix, fp32, on the batch's device
        self._moved: list[tuple[Sequence[Tensor], Sequence[Tensor]]] = []  # state on another device, its copies here
        for stage, rows in zip(keeping(stages), stored, strict=True):
            here = rows
            if rows[0].device != place.device:
                here = torch.stack(list(rows)).to(place.device).unbind(0)
                self._moved.append((rows, here))
            self._kept[stage.key] = here

    def before(
        self,
        products: torch.dtype | None,  # dtype of the products; None: as torch.optim.Muon
    ) -> tuple[Tensor, bool]:  # (B, rows, cols) in slots, and True if their norms are 1
        """Run the stages before the orthogonalization, on a CPU one matrix at a time. They overwrite the batch, unless
        it is half precision and the products have another dtype: then they run on an fp32 copy."""
        x = self.place
        if self._before and x.dtype in (torch.bfloat16, torch.float16) and products not in (None, x.dtype):
            x = empty_batch(x.shape, torch.float32, x.device)
            foreach_copy_([x], [self.place])
        for matrices in x.split(1) if x.device.type == "cpu" else (x,):
            for stage in self._before:
                stage.run_(matrices)
        return x, bool(self._before)

    def may_take(self, fed: torch.dtype, products: torch.dtype) -> bool:
        """True if results may overwrite the input, and so take its dtype `fed`. Without overwriting, results have the
        products' dtype, at least for a batch of one matrix. Later stages must compute in a dtype that does not depend
        on the batch, since layouts batch differently."""
        return fed == products or not self._after

    def finish(self, out: Tensor) -> None:  # (B, rows, cols), may be overwritten
        """Run the stages after the orthogonalization, then write results to the batch and changed state back to its
        storage."""
        if self._after:
            out = out.to(torch.promote_types(out.dtype, self.place.dtype))
            scaled_(self._after, out, self._kept)
        if out is not self.place:
            self.place.copy_(out)
        for stored, here in self._moved:
            foreach_copy_(stored, here)
