"""Execution of a variant's stages on a batch of whole matrices, on the rank that orthogonalizes them.

See [Note: stages] and [Note: what a stage keeps] in variants.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardmuon._torch import foreach_copy_
from shardmuon.orthogonalize import empty_batch
from shardmuon.variants import AfterStage, BeforeStage, Stages, keeping, scaled_


class BatchStages:
    """The stages of a variant, to be run on one batch of matrices in one step.

    Args:
        stages: Stages of the batch's matrices.
        stored: State tensors of each matrix, for each stage of `keeping(stages)`.
        place: The batch, which the results overwrite: (B, rows, cols) with aligned matrices, in the dtype of exchanges.
    """

    def __init__(self, stages: Stages, stored: Sequence[Sequence[Tensor]], place: Tensor) -> None:
        self.place = place
        self._before = [stage for stage in stages if isinstance(stage, BeforeStage)]
        self._after = tuple(stage for stage in stages if isinstance(stage, AfterStage))
        self._kept: dict[str, Sequence[Tensor]] = {}  # key -> state of each matrix, fp32, on the batch's device
        # pairs of state that is stored on another device and its copy on the batch's device
        self._moved: list[tuple[Sequence[Tensor], Sequence[Tensor]]] = []
        for stage, rows in zip(keeping(stages), stored, strict=True):
            here = rows
            if rows[0].device != place.device:
                here = torch.stack(list(rows)).to(place.device).unbind(0)
                self._moved.append((rows, here))
            self._kept[stage.key] = here

    def before(
        self,
        products: torch.dtype | None,  # dtype of the matrix products; None: orthogonalize exactly as torch.optim.Muon
    ) -> tuple[Tensor, bool]:  # the input of the orthogonalization, (B, rows, cols); True if its norms are 1
        """Run the stages that precede the orthogonalization, on a CPU one matrix at a time. They work in place, or on
        an fp32 copy if the batch has half precision and the matrix products have another dtype."""
        x = self.place
        if self._before and x.dtype in (torch.bfloat16, torch.float16) and products not in (None, x.dtype):
            x = empty_batch(x.shape, torch.float32, x.device)
            foreach_copy_([x], [self.place])
        for matrices in x.split(1) if x.device.type == "cpu" else (x,):
            for stage in self._before:
                stage.run_(matrices)
        return x, bool(self._before)

    def may_take(self, fed: torch.dtype, products: torch.dtype) -> bool:
        """True if the orthogonalization may overwrite its input, which makes the result's dtype that of the input,
        `fed`. Otherwise the result has the dtype of the matrix products, at least for a batch of one matrix. The stages
        that follow need a dtype that does not depend on the size of the batch, since other layouts have other batches.
        """
        return fed == products or not self._after

    def finish(self, out: Tensor) -> None:  # (B, rows, cols), may be overwritten
        """Run the stages that follow the orthogonalization, write the results to the batch, and copy changed state back
        to the device on which it is stored."""
        if self._after:
            out = out.to(torch.promote_types(out.dtype, self.place.dtype))
            scaled_(self._after, out, self._kept)
        if out is not self.place:
            self.place.copy_(out)
        for stored, here in self._moved:
            foreach_copy_(stored, here)
