"""Stages of a variant on a batch of whole matrices, at its owner. See [Note: stages] and [Note: what a stage keeps] in
variants/base.py."""

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
        stages: Stages of its matrices.
        stored: Storage of what they keep of each matrix, for each of `keeping(stages)`.
        place: The batch, and where results go: (B, rows, cols) in slots, of the wire's dtype.
    """

    def __init__(self, stages: Stages, stored: Sequence[Sequence[Tensor]], place: Tensor) -> None:
        self.place = place
        self._before = [stage for stage in stages if isinstance(stage, BeforeStage)]
        self._after = tuple(stage for stage in stages if isinstance(stage, AfterStage))
        self._kept: dict[str, Sequence[Tensor]] = {}  # key -> of each matrix, fp32, where the batch is
        self._moved: list[tuple[Sequence[Tensor], Sequence[Tensor]]] = []  # storage elsewhere, and what is here
        for stage, rows in zip(keeping(stages), stored, strict=True):
            here = rows
            if rows[0].device != place.device:
                here = torch.stack(list(rows)).to(place.device).unbind(0)
                self._moved.append((rows, here))
            self._kept[stage.key] = here

    def before(
        self,
        products: torch.dtype | None,  # None: torch.optim.Muon's
    ) -> tuple[Tensor, bool]:  # (B, rows, cols) in slots, and True if their norms are 1
        """Run the stages that come before the orthogonalization, on a CPU one matrix after the other. They overwrite
        the batch, unless products have another dtype than its half precision."""
        x = self.place
        if self._before and x.dtype in (torch.bfloat16, torch.float16) and products not in (None, x.dtype):
            x = empty_batch(x.shape, torch.float32, x.device)
            foreach_copy_([x], [self.place])
        for matrices in x.split(1) if x.device.type == "cpu" else (x,):
            for stage in self._before:
                stage.run_(matrices)
        return x, bool(self._before)

    def may_take(self, fed: torch.dtype, products: torch.dtype) -> bool:
        """True if results may take the place of what was fed, and so its dtype. A batch of one matrix has that of the
        products, and what a stage computes in must not depend on the batch, which is another one on every layout."""
        return fed == products or not self._after

    def finish(self, out: Tensor) -> None:  # (B, rows, cols), written to
        """Run the stages after on the results, and put results where they go and what stages have changed where it is
        stored."""
        if self._after:
            out = out.to(torch.promote_types(out.dtype, self.place.dtype))
            scaled_(self._after, out, self._kept)
        if out is not self.place:
            self.place.copy_(out)
        for stored, here in self._moved:
            foreach_copy_(stored, here)
