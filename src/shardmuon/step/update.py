"""Tiles of a program as views of this step's tensors and of a buffer, and what is done to each element of them.

Momentum and weights are updated in this rank's storages, alike tiles in one call. Nothing is communicated or
orthogonalized here. Each of weights, gradients and momentum may have its own dtype and lie on another device than the
buffers.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from shardmuon._torch import foreach_copy_
from shardmuon.layout.pieces import Patch, Tile
from shardmuon.layout.views import Ints, MatrixView
from shardmuon.momentum.stores import BLOCK, Rounding, round_patch, step_coded_, step_rounded_
from shardmuon.momentum.update import (
    PORTION,
    PORTION_ELSEWHERE,
    apply_,
    apply_like_torch_,
    l2_gradient,
    momentum_,
    momentum_into_,
)
from shardmuon.plan.program import Load
from shardmuon.step.options import Settings

Stored = Sequence[Sequence[Tensor]]  # of each parameter and each of its `Spec.kept`, what this rank stores of it; fp32


class _Row(NamedTuple):
    """Neighbouring tiles of one form at equal distances in a buffer: one view with a dim more."""

    sizes: Ints
    strides: Ints
    start: int


class _Portion(NamedTuple):
    """Tiles that one call of a list operation takes.

    Attributes:
        places: Number of each among all tiles of a side.
        of: Function that takes theirs out of a list with an entry for each tile of the side.
    """

    places: list[int]
    of: Callable[[Sequence[Any]], Sequence[Any]]


class Portions:
    """A side's tiles in portions: those of the same settings that are alike, at most so many elements. Keeps its last
    answer.

    Args:
        params: Number of the parameter of each tile.
        sizes: Elements of each.
    """

    def __init__(self, params: Sequence[int], sizes: Sequence[int]) -> None:
        self._params, self._sizes = params, sizes
        self._last: tuple[object, list[_Portion]] = (None, [])

    def of(self, work: Work, *columns: Sequence[Tensor]) -> list[_Portion]:
        """The tiles that one call takes: of the same settings, and of one dtype and device in each column."""
        settings = map(id, map(work.settings.__getitem__, self._params))
        first: dict[int, int] = {}  # settings, made anew whenever one changes -> the first tile that has them
        kinds: list[Sequence[object]] = [list(map(first.setdefault, settings, itertools.count()))]
        for column in columns:
            kinds += list(map(_dtype_of, column)), list(map(_device_of, column))
        if work.rounding:
            roundings = [work.rounding.get(param, _NEAREST) for param in self._params]
            kinds.append([(one.momentum is None, one.weights is None) for one in roundings])
        limit = PORTION if columns[0][0].device.type == "cpu" else PORTION_ELSEWHERE
        if self._last[0] != (kinds, limit):
            self._last = (kinds, limit), [_Portion(at, _picker(at)) for at in dealt(self._sizes, kinds, limit)]
        return self._last[1]


_dtype_of, _device_of = operator.attrgetter("dtype"), operator.attrgetter("device")


def dealt(sizes: Sequence[int], kinds: Sequence[Sequence[object]], limit: int) -> list[list[int]]:
    """Tiles of these sizes in portions of at most so many elements (or one tile), alike in each of these columns."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for at, kind in enumerate(zip(*kinds, strict=True)):
        alike.setdefault(kind, []).append(at)
    found: list[list[int]] = []
    for places in alike.values():
        room = 0
        for at in places:
            if sizes[at] > room or at == places[0]:
                found.append([])
                room = limit
            found[-1].append(at)
            room -= sizes[at]
    return found


def _picker(places: list[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    first, last = places[0], places[-1]
    return operator.itemgetter(slice(first, last + 1)) if last - first < len(places) else operator.itemgetter(*places)


class Side:
    """The tiles that a rank has in one buffer: a wire, or its batches.

    A storage is asked for its strides whenever it is touched: a gradient may lie otherwise than the one before it, and
    otherwise than its parameter.

    Args:
        loads: Loads of a program.
        views: View of each parameter.
        shapes: Shape of this rank's storage of each parameter.

    Attributes:
        loads: The tiles and their places.
        params: Number of each tile's parameter.
        views: View of each tile's parameter.
        shapes: (rows, cols) of each tile's matrix.
        in_momentum, in_weights: How lists of them are dealt.
    """

    def __init__(self, loads: Sequence[Load], views: Sequence[MatrixView], shapes: Sequence[Ints]) -> None:
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
        self.in_momentum, self.in_weights = Portions(self.params, sizes), Portions(self.params, sizes)

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


_NEAREST = Rounding()


@dataclass
class Work:
    """Tensors of this step for each parameter of a plan; None for those without a gradient, here and on all ranks.

    Attributes:
        weights, grads, momenta: This rank's storage for each parameter.
        settings: Settings of each parameter's group.
        kept: For each parameter, this rank's storage for each of its `Spec.kept`.
        rounding: Number of a parameter -> its random bits, for those that are rounded at random.
    """

    weights: list[Tensor | None]
    grads: list[Tensor | None]
    momenta: list[Tensor | None]
    settings: list[Settings]
    kept: list[tuple[Tensor, ...]] = field(default_factory=list)
    rounding: dict[int, Rounding] = field(default_factory=dict)


class Results(NamedTuple):
    """Orthogonalized tiles of a side.

    Attributes:
        side: The tiles.
        buffer: The 1-D tensor that holds them.
        views: View of each tile in it; empty: not made yet.
    """

    side: Side
    buffer: Tensor
    views: Sequence[Tensor] = ()


def update_momentum(
    side: Side,
    work: Work,
    targets: Sequence[Tensor] | None,  # of each tile, take what is to be orthogonalized; None: another replica does it
) -> None:
    """Update the momentum of a side's tiles."""
    if not side.loads:
        return
    grads, momenta = side.of(work.grads), side.of(work.momenta)
    weights: list[Tensor] = []
    for places, of in side.in_momentum.of(work, grads, momenta):
        first = side.params[places[0]]
        s, given, kept, out = work.settings[first], of(grads), of(momenta), None if targets is None else of(targets)
        if s.weight_decay and s.weight_decay_mode == "l2":
            weights = weights or side.of(work.weights)
            given = [l2_gradient(g, w, s.weight_decay) for g, w in zip(given, of(weights), strict=True)]
        if work.rounding.get(first, _NEAREST).momentum is not None:
            for at, i in enumerate(places):
                _update_rounded(side, work, i, kept[at], given[at], None if out is None else out[at])
            continue
        device = given[0].device
        loaded = kept if kept[0].device == device else [m.to(device) for m in kept]
        if out is None:
            momentum_(given, loaded, momentum=s.momentum, nesterov=False)
        else:
            momentum_into_(out, given, loaded, momentum=s.momentum, nesterov=s.nesterov)
        if loaded is not kept:
            foreach_copy_(kept, loaded)


def _update_rounded(side: Side, work: Work, at: int, kept: Tensor, grad: Tensor, out: Tensor | None) -> None:
    settings, rounding = work.settings[side.loads[at].param], work.rounding[side.params[at]]
    assert rounding.momentum is not None
    step = partial(step_rounded_, kept)
    if rounding.scales is not None:
        codes = work.momenta[side.loads[at].param]
        assert codes is not None
        step = partial(step_coded_, kept, _scales_of(side.loads[at].tile, side.views[at], codes, rounding.scales))
    patch, stream = side.patches[at], rounding.momentum
    step(grad, out, patch=patch, stream=stream, momentum=settings.momentum, nesterov=settings.nesterov)


def _scales_of(tile: Tile, view: MatrixView, codes: Tensor, scales: Tensor) -> Tensor:  # dims of rows, then blocks
    """The scales of a tile, a view of those that its rank stores beside the codes. It begins where a block does."""
    rows = view.num_row_dims
    first, strides = tile.in_storage(view, (*scales.stride()[:rows], *(0 for _ in view.shape[rows:])))
    column, _ = tile.in_storage(view, (*(0 for _ in view.shape[:rows]), *codes.stride()[rows:]))
    num_cols = tile.sizes[len(tile.sizes) - len(view.shape) + rows :]
    kept = len(tile.sizes) - len(num_cols)
    return scales.as_strided(
        (*tile.sizes[:kept], -(-torch.Size(num_cols).numel() // BLOCK)),
        (*strides[:kept], scales.stride(-1)),
        scales.storage_offset() + first + column // BLOCK * scales.stride(-1),
    )


def apply_results(
    side: Side,
    work: Work,
    results: Sequence[Results],  # of the sides that it consists of
    *,
    like_torch: bool,  # by torch's own operations, where the options allow
) -> None:
    """Decay and update the weights of a side's tiles."""
    if not side.loads:
        return
    weights, updates = side.of(work.weights), list[Tensor]()
    for part, buffer, views in results:
        if part.loads:
            updates += views or part.on(buffer)
    for places, of in side.in_weights.of(work, weights):
        first = side.params[places[0]]
        s, chosen, added = work.settings[first], of(weights), of(updates)
        shapes: Sequence[tuple[int, int]] = of(side.shapes)
        device, dtype = chosen[0].device, chosen[0].dtype
        if any(one.buffer.device != device for one in results):
            added = [update.to(device) for update in added]
        rounds = work.rounding.get(first, _NEAREST).weights is not None
        if like_torch and not rounds and s.weight_decay_mode == "decoupled":
            given = s.lr if s.tensor_lr is None else s.tensor_lr
            for w, u, i, shape in zip(chosen, added, places, shapes, strict=True):
                apply_like_torch_(w, u, given, s.scales[shape], side.patches[i], shape, weight_decay=s.weight_decay)
            continue
        lr = s.lr if s.tensor_lr is None else _lr_on(device, s)
        factor = 1.0 if isinstance(lr, Tensor) else lr
        alphas = [factor * s.scales[shape] for shape in shapes]
        rounded = [_rounder(side, work, i, dtype) for i in places] if rounds else None
        apply_(chosen, added, alphas, lr, s.weight_decay, s.weight_decay_mode, rounded)


def _lr_on(device: torch.device, settings: Settings) -> float | Tensor:
    """The lr of weights on this device: a tensor that lies with them on an accelerator as it is."""
    lr = settings.tensor_lr
    if lr is None or lr.device.type == "cpu":  # the host has read it
        return settings.lr
    return lr.reshape(()) if lr.device == device else float(lr)


def _rounder(side: Side, work: Work, at: int, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Function that rounds a tile of weights at random."""
    stream = work.rounding[side.params[at]].weights
    assert stream is not None, "of one portion all are rounded, or none"
    return partial(round_patch, stream, side.patches[at], dtype)
