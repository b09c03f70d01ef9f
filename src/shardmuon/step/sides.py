"""Tiles of a program as views of this step's tensors and of a buffer. Tensors come in every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple, cast

from torch import Tensor

from shardmuon.layout.pieces import Patch
from shardmuon.layout.views import Ints, MatrixView
from shardmuon.plan.program import Load


class _Row(NamedTuple):
    """Neighbouring tiles of one form at equal distances in a buffer: one view with a dim more."""

    sizes: Ints
    strides: Ints
    start: int


class Portion(NamedTuple):
    """Tiles that one call of a list operation takes.

    Attributes:
        places: Of each among all tiles of a side.
        of: Takes them out of a list of something of all tiles.
    """

    places: list[int]
    of: Callable[[Sequence[Any]], Sequence[Any]]


class Portions:
    """A side's tiles in portions: those that are alike, and at most so many elements. Keeps its last answer."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """
        Args:
            sizes: Elements of each tile.
        """
        self._sizes = sizes
        self._last: tuple[object, list[Portion]] = (None, [])

    def of(self, kinds: Sequence[Sequence[object]], limit: int) -> list[Portion]:
        """Those of tiles that are alike in each of these columns."""
        if self._last[0] != (kinds, limit):
            self._last = (kinds, limit), [Portion(places, _picker(places)) for places in self._dealt(kinds, limit)]
        return self._last[1]

    def _dealt(self, kinds: Sequence[Sequence[object]], limit: int) -> list[list[int]]:
        alike: dict[tuple[object, ...], list[int]] = {}
        for at, kind in enumerate(zip(*kinds, strict=True)):
            alike.setdefault(kind, []).append(at)
        found: list[list[int]] = []
        for places in alike.values():
            room = 0
            for at in places:
                if self._sizes[at] > room or at == places[0]:
                    found.append([])
                    room = limit
                found[-1].append(at)
                room -= self._sizes[at]
        return found


def _picker(places: list[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    first, last = places[0], places[-1]
    return itemgetter(slice(first, last + 1)) if last - first < len(places) else itemgetter(*places)


class Side:
    """The tiles that a rank has in one buffer: a wire, or its batches.

    A storage is asked for its strides whenever it is touched: a gradient may lie otherwise than the one before it, and
    otherwise than its parameter.

    Attributes:
        loads: The tiles and their places.
        params: Number of the parameter of each.
        views: Of the parameter of each.
        shapes: (rows, cols) of the matrix of each.
        in_momentum, in_weights: How lists of them are dealt.
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
        self.params = [load.param for load in loads]
        # a tile that is all of a storage is that storage, whatever its strides
        self._parts = [at for at, load in enumerate(loads) if load.tile.sizes != shapes[load.param]]
        self._known: list[dict[Ints, tuple[int, Ints]]] = [{} for _ in loads]  # strides of a storage -> those of a tile
        self._rows = _rows(loads)
        sizes = [load.tile.numel for load in loads]
        self.in_momentum, self.in_weights = Portions(sizes), Portions(sizes)

    @cached_property
    def patches(self) -> list[Patch]:
        """The rows and columns of each tile."""
        return [load.tile.patch(view) for load, view in zip(self.loads, self.views, strict=True)]

    def of(self, storages: Sequence[Tensor | None]) -> list[Tensor]:
        """Each tile as a view of its parameter's storage (of weights, gradients or momentum)."""
        found = list(map(storages.__getitem__, self.params))
        for at in self._parts:
            storage = found[at]
            assert storage is not None, "parameters without a gradient are in no program"
            strides, tile = storage.stride(), self.loads[at].tile
            known = self._known[at].get(strides)
            if known is None:
                known = self._known[at][strides] = tile.in_storage(self.views[at], strides)
            found[at] = storage.as_strided(tile.sizes, known[1], storage.storage_offset() + known[0])
        return cast("list[Tensor]", found)

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
