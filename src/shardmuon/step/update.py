"""Momentum and weights of a side's tiles: element by element in this rank's storages, alike tiles in one call.

Nothing is communicated or orthogonalized here. Each of weights, gradients and momentum may have its own dtype and lie
on another device than the buffers.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from shardmuon._torch import foreach_copy_
from shardmuon.layout.pieces import Tile
from shardmuon.layout.views import MatrixView
from shardmuon.momentum.rounding import Stream, round_patch
from shardmuon.momentum.stores import BLOCK, step_coded_, step_rounded_
from shardmuon.momentum.update import (
    PORTION,
    apply_,
    apply_like_torch_,
    l2_gradient,
    lr_scale,
    momentum_,
    momentum_into_,
)
from shardmuon.step.options import Settings
from shardmuon.step.sides import Portion, Portions, Side
from shardmuon.step.stages import Stored

# Elements: what momentum makes on its way to a buffer, and an update on its way to half-precision weights, is at most
# this, or one tile: so much that a list fills a launch. On a CPU what fits a cache.
PORTION_ELSEWHERE = 1 << 24


class Rounding(NamedTuple):
    """How one parameter's storages are rounded at random in one step.

    Attributes:
        momentum: Random bits for a momentum of bf16 or 8-bit codes. None: it is stored as it is computed.
        scales: Of 8-bit codes.
        weights: Random bits for half-precision weights. None: they are rounded to nearest.
    """

    momentum: Stream | None = None
    scales: Tensor | None = None
    weights: Stream | None = None


class Work(NamedTuple):
    """This step's tensors of each parameter of a plan; None for those without a gradient, here and on all ranks.

    Attributes:
        weights, grads, momenta: What this rank stores of each.
        settings: Of its group.
        kept: Of each of its `Spec.kept`.
        rounding: Of those parameters that are rounded at random.
    """

    weights: Sequence[Tensor | None]
    grads: Sequence[Tensor | None]
    momenta: Sequence[Tensor | None]
    settings: Sequence[Settings]
    kept: Stored = ()
    rounding: Mapping[int, Rounding] = MappingProxyType({})


class Results(NamedTuple):
    """What was orthogonalized of the tiles of a side.

    Attributes:
        side: They.
        buffer: Where it is, 1-D.
        views: Of each tile in it, if they are there already.
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
    for places, of in _portions(side.in_momentum, side, work, grads, momenta):
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
        step = partial(step_coded_, kept, scales_of(side.loads[at].tile, side.views[at], codes, rounding.scales))
    patch, stream = side.patches[at], rounding.momentum
    step(grad, out, patch=patch, stream=stream, momentum=settings.momentum, nesterov=settings.nesterov)


def scales_of(tile: Tile, view: MatrixView, codes: Tensor, scales: Tensor) -> Tensor:  # dims of rows, then blocks
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
    for places, of in _portions(side.in_weights, side, work, weights):
        first = side.params[places[0]]
        s, chosen, added = work.settings[first], of(weights), of(updates)
        shapes: Sequence[tuple[int, int]] = of(side.shapes)
        device, dtype = chosen[0].device, chosen[0].dtype
        if any(one.buffer.device != device for one in results):
            added = [update.to(device) for update in added]
        scales = {shape: lr_scale(s.adjust_lr_fn, *shape, s.extra_scale_factor) for shape in set(shapes)}
        rounds = work.rounding.get(first, _NEAREST).weights is not None
        if like_torch and not rounds and s.weight_decay_mode == "decoupled":
            given = s.lr if s.tensor_lr is None else s.tensor_lr
            for w, u, i, shape in zip(chosen, added, places, shapes, strict=True):
                apply_like_torch_(w, u, given, scales[shape], side.patches[i], shape, weight_decay=s.weight_decay)
            continue
        lr = s.lr if s.tensor_lr is None else _lr_on(device, s)
        factor = 1.0 if isinstance(lr, Tensor) else lr
        alphas = [factor * scales[shape] for shape in shapes]
        rounded = [_rounder(side, work, i, dtype) for i in places] if rounds else None
        apply_(chosen, added, alphas, lr, s.weight_decay, s.weight_decay_mode, rounded)


def _lr_on(device: torch.device, settings: Settings) -> float | Tensor:
    """The lr of weights on this device: a tensor that lies with them on an accelerator as it is."""
    lr = settings.tensor_lr
    if lr is None or lr.device.type == "cpu":  # the host has read it
        return settings.lr
    return lr.reshape(()) if lr.device == device else float(lr)


def _rounder(side: Side, work: Work, at: int, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """What rounds a tile of weights at random."""
    stream = work.rounding[side.params[at]].weights
    assert stream is not None, "of one portion all are rounded, or none"
    return partial(round_patch, stream, side.patches[at], dtype)


_NEAREST = Rounding()


def _portions(portions: Portions, side: Side, work: Work, *columns: Sequence[Tensor]) -> list[Portion]:
    """The tiles that one call takes: of the same settings, and alike in each column."""
    settings = map(id, map(work.settings.__getitem__, side.params))
    first: dict[int, int] = {}  # settings, made anew whenever one changes -> the first tile that has them
    kinds: list[Sequence[object]] = [list(map(first.setdefault, settings, itertools.count()))]
    for column in columns:
        kinds += list(map(_dtype_of, column)), list(map(_device_of, column))
    if work.rounding:
        roundings = [work.rounding.get(param, _NEAREST) for param in side.params]
        kinds.append([(one.momentum is None, one.weights is None) for one in roundings])
    return portions.of(kinds, PORTION if columns[0][0].device.type == "cpu" else PORTION_ELSEWHERE)


_dtype_of, _device_of = operator.attrgetter("dtype"), operator.attrgetter("device")
