"""Tiles of a program as views of this step's tensors and of a buffer. Tensors come in every step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from shardmuon.layout.pieces import Patch
from shardmuon.layout.views import Ints, MatrixView
from shardmuon.plan.program import Load


class _Row(NamedTuple):
    """Neighbouring tiles of one form at equal distances in a buffer: one view with a dim more."""

    sizes: Ints
    strides: Ints
    start: int


class Side:
    """The tiles that a rank has in one buffer: a wire, or its batches.

    A storage is asked for its strides whenever it is touched: a gradient may lie otherwise than the one before it, and
    otherwise than its parameter.

    Attributes:
        loads: The tiles and their places.
        views: Of the parameter of each.
        shapes: (rows, cols) of the matrix of each.
    """

    def __init__(self, loads: Sequence[Load], views: Sequence[MatrixView], shapes: Sequence[Ints]) -> None:
        """
        Args:
            loads: Of a program.
            views: Of each parameter.
            shapes: Of what this rank stores of each parameter.
        """
        self.loads = tuple(loads)
        self.views = [views[load.param] for load in loads]
        matrices = [view.matrices[load.tile.matrix] for view, load in zip(self.views, loads, strict=True)]
        self.shapes = [(matrix.rows, matrix.cols) for matrix in matrices]
        # a tile that is all of a storage is that storage, whatever its strides
        self._whole = [load.tile.sizes == shapes[load.param] for load in loads]
        self._known: list[dict[Ints, tuple[int, Ints]]] = [{} for _ in loads]  # strides of a storage -> those of a tile
        self._rows = _rows(loads)

    @cached_property
    def patches(self) -> list[Patch]:
        """The rows and columns of each tile."""
        return [load.tile.patch(view) for load, view in zip(self.loads, self.views, strict=True)]

    def of(self, storages: Sequence[Tensor | None]) -> list[Tensor]:
        """Each tile as a view of its parameter's storage (of weights, gradients or momentum)."""
        found = []
        for at, (load, whole) in enumerate(zip(self.loads, self._whole, strict=True)):
            storage = storages[load.param]
            assert storage is not None, "parameters without a gradient are in no program"
            if not whole:
                strides = storage.stride()
                known = self._known[at].get(strides)
                if known is None:
                    known = self._known[at][strides] = load.tile.in_storage(self.views[at], strides)
                storage = storage.as_strided(load.tile.sizes, known[1], storage.storage_offset() + known[0])
            found.append(storage)
        return found

    def on(self, buffer: Tensor) -> list[Tensor]:
        """Each tile as a view of the buffer, in the shape that `of` gives it."""
        found: list[Tensor] = []
        for row in self._rows:
            found += buffer.as_strided(row.sizes, row.strides, row.start).unbind(0)
        return found


def _rows(loads: Sequence[Load]) -> list[_Row]:
    rows: list[_Row] = []
    for load in loads:
        sizes, strides, start = load.tile.sizes, load.place.strides, load.place.start
        if rows:
            last = rows[-1]
            count, step = last.sizes[0], start - last.start
            alike = (last.sizes[1:], last.strides[1:]) == (sizes, strides)
            if alike and step > 0 and (count == 1 or step == count * last.strides[0]):
                rows[-1] = _Row((count + 1, *sizes), (step // count, *strides), last.start)
                continue
        rows.append(_Row((1, *sizes), (0, *strides), start))
    return rows
