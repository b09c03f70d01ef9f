"""Stages of variants at owners: on batches of whole matrices, and what they keep on its way to all who keep it.

See [Note: stages] and [Note: what a stage keeps] in variants/base.py. Stages read and write what this rank stores of
what they keep; owners tell others from there, and others write there what they hear.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardmuon._torch import foreach_copy_
from shardmuon.layout.views import row_major
from shardmuon.orthogonalize import empty_batch, normalize
from shardmuon.plan.copies import BufferPlace
from shardmuon.plan.plan import Plan
from shardmuon.plan.program import KeptLoad, Load, Program
from shardmuon.step.update import Side, Stored
from shardmuon.variants import AfterStage, BeforeStage, Stages, WeightStage, keeping, scaled_


class KeptSide:
    """Numbers that stages keep of some matrices, in this rank's storage of them, and on a wire if they travel. Kept
    from step to step; holds no tensor."""

    def __init__(self, plan: Plan, loads: Sequence[KeptLoad]) -> None:
        self._loads = tuple(loads)
        views = [plan.specs[load.param].kept[load.number].layout.view for load in loads]
        tiles = [Load(at, load.tile, BufferPlace(0, row_major(load.tile.sizes))) for at, load in enumerate(loads)]
        self._side = Side(tiles, views, [()] * len(tiles))

    def of(self, stored: Stored) -> list[Tensor]:  # 1-D each, fp32
        """Kept numbers of each matrix, as views of this rank's storage."""
        tiles = self._side.of([stored[load.param][load.number] for load in self._loads])
        return [tile.view(-1) for tile in tiles]

    def tell(self, stored: Stored, wire: Tensor) -> None:
        """Write the kept numbers to the wire, bit for bit."""
        if self._loads:
            targets = [wire.narrow(0, load.start, load.size) for load in self._loads]
            foreach_copy_(targets, [_as_elements(numbers, wire) for numbers in self.of(stored)])

    def hear(self, wire: Tensor, stored: Stored) -> None:
        """Store the numbers that came on the wire."""
        if self._loads:
            # one copy into memory of its own, for a slot may begin where no fp32 number may
            came = torch.cat([wire.narrow(0, load.start, load.size) for load in self._loads]).view(torch.float32)
            sizes = [load.size * wire.element_size() // came.element_size() for load in self._loads]
            targets = self.of(stored)
            numbers = zip(came.split(sizes), targets, strict=True)
            foreach_copy_(targets, [one.narrow(0, 0, len(target)) for one, target in numbers])


def _as_elements(numbers: Tensor, wire: Tensor) -> Tensor:  # 1-D fp32 -> 1-D of the wire's dtype
    """The same bits as elements of a wire, which only moves them."""
    padding = -len(numbers) % -(-wire.element_size() // numbers.element_size())
    whole = torch.cat([numbers, numbers.new_zeros(padding)]) if padding else numbers.contiguous()
    return whole.view(wire.dtype).to(wire.device)


def sides_of_batches(plan: Plan, program: Program) -> list[list[KeptSide]]:
    """Local storage of the numbers kept of matrices: one side for each batch and each `Spec.kept` of its matrices."""
    found = []
    for batch in program.batches:
        items = [plan.items[number] for number in batch.items]
        of_batch = []
        for number in range(len(plan.specs[items[0].param].kept)):
            layouts = [plan.specs[item.param].kept[number].layout for item in items]
            tiles = [layout.tiles[item.matrix][program.rank][0] for layout, item in zip(layouts, items, strict=True)]
            loads = [KeptLoad(item.param, number, tile, 0, 0) for item, tile in zip(items, tiles, strict=True)]
            of_batch.append(KeptSide(plan, loads))
        found.append(of_batch)
    return found


class BatchStages:
    """The stages of a batch in one step.

    Attributes:
        after: Stages after the orthogonalization.
        kept: Key -> of each matrix what its stages keep, fp32, where the batch is; changed in place.
    """

    def __init__(self, stages: Stages, sides: Sequence[KeptSide], stored: Stored, device: torch.device) -> None:
        """
        Args:
            stages: Stages of its matrices.
            sides: Storage of what they keep, one for each of `keeping(stages)`.
            stored: This step's storages.
            device: Device of the batch.
        """
        self._before = [stage for stage in stages if isinstance(stage, BeforeStage)]
        self.after = tuple(stage for stage in stages if isinstance(stage, AfterStage))
        self.kept: dict[str, Sequence[Tensor]] = {}
        self._moved: list[tuple[Sequence[Tensor], Sequence[Tensor]]] = []  # storage elsewhere, and what is here
        for stage, side in zip(keeping(stages), sides, strict=True):
            if isinstance(stage, WeightStage):
                continue
            rows: Sequence[Tensor] = side.of(stored)
            if rows[0].device != device:
                here = torch.stack(list(rows)).to(device).unbind(0)
                self._moved.append((rows, here))
                rows = here
            self.kept[stage.key] = rows

    def before(
        self,
        x: Tensor,  # (B, rows, cols) in slots; may be overwritten
        products: torch.dtype | None,  # if the orthogonalizer takes matrices of norm 1 as they are
    ) -> tuple[Tensor, bool]:  # (B, rows, cols) in slots, and True if their norms are 1
        """Run the stages that come before the orthogonalization; the batch itself if there are none. On a CPU one
        matrix after the other, into memory that there is."""
        if not self._before:
            return x, False
        narrow = x.dtype in (torch.bfloat16, torch.float16)
        if len(self._before) > 1 or products is None or (narrow and products != x.dtype):
            return self._run(x), False
        stage = self._before[0]
        if x.device.type != "cpu":
            return (x, True) if stage.unit(x) is not None else (self._run(x), False)
        for at, matrix in enumerate(x.split(1)):
            if stage.unit(matrix) is None:
                matrix.copy_(normalize(self._run_one(matrix, at), products))
        return x, True

    def _run(self, x: Tensor) -> Tensor:  # (B, rows, cols) -> (B, rows, cols) in slots
        """Run all stages that come before the orthogonalization, at least in fp32. Each matrix alone: a sum over a
        batch may be cut otherwise."""
        found = [self._run_one(matrix, at) for at, matrix in enumerate(x.split(1))]
        out = empty_batch(x.shape, found[0].dtype, x.device)
        foreach_copy_(out.split(1), found)
        return out

    def _run_one(self, matrix: Tensor, at: int) -> Tensor:  # (1, rows, cols), the `at`-th
        for stage in self._before:
            kept = self.kept[stage.key][at] if stage.key else matrix.new_empty(0, dtype=torch.float32)
            matrix = stage.run(matrix, kept.unsqueeze(0))
        return matrix

    def may_take(self, fed: torch.dtype, products: torch.dtype) -> bool:
        """True if results may take the place of what was fed, and so its dtype. A batch of one matrix has that of the
        products, and what a stage computes in must not depend on the batch, which is another one on every layout."""
        return fed == products or not self.after

    def keep(self) -> None:
        """Store what stages have changed, where storage is elsewhere."""
        for stored, here in self._moved:
            foreach_copy_(stored, here)


class Result(NamedTuple):
    """An orthogonalized batch whose stages after have not run.

    Attributes:
        stages: Stages of the batch.
        place: Where results go; of the wire's dtype.
        out: The results; may be `place`.
    """

    stages: BatchStages
    place: Tensor  # (B, rows, cols)
    out: Tensor  # (B, rows, cols)


def finish(results: Sequence[Result]) -> None:
    """Run the stages after, on all batches that have the same ones together, and put results where they go. See [Note:
    matrices together] in variants/norms.py."""
    together: dict[tuple[tuple[AfterStage, ...], torch.dtype], list[Result]] = {}
    for one in results:
        dtype = torch.promote_types(one.out.dtype, one.place.dtype)
        wide = one._replace(out=one.out.to(dtype)) if one.stages.after else one
        together.setdefault((one.stages.after, dtype), []).append(wide)
    for (after, _), alike in together.items():
        if after:
            kept: Mapping[str, Sequence[Tensor]] = {
                stage.key: [row for one in alike for row in one.stages.kept[stage.key]] for stage in after if stage.key
            }
            scaled_(after, [one.out for one in alike], kept)
        for one in alike:
            if one.out is not one.place:
                one.place.copy_(one.out)
            one.stages.keep()


__all__ = ["BatchStages", "KeptSide", "Result", "finish", "sides_of_batches"]
