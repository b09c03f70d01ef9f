"""Momentum and weights of a side's tiles: element by element in this rank's storages, alike tiles in one call.

Nothing is communicated or orthogonalized here. Each of weights, gradients and momentum may have its own dtype and lie
on another device than the buffers.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor

from shardmuon._torch import foreach_copy_
from shardmuon.layout.pieces import Tile
from shardmuon.layout.views import MatrixView
from shardmuon.momentum.rounding import Stream, round_patch
from shardmuon.momentum.stores import BLOCK, step_coded_, step_rounded_
from shardmuon.momentum.update import apply_, apply_like_torch_, l2_gradient, lr_scale, momentum_, momentum_into_
from shardmuon.step.sides import Portions, Side
from shardmuon.stepping.program import PORTION, PORTION_ELSEWHERE
from shardmuon.stepping.rates import lr_on

if TYPE_CHECKING:
    from shardmuon.step.bucket import Work

_T = TypeVar("_T")
_HALVES = (torch.bfloat16, torch.float16)


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


def update_momentum(
    side: Side,
    work: Work,
    buffer: Tensor | None,  # 1-D: takes what is to be orthogonalized; None: another replica does it
) -> None:
    """Update the momentum of a side's tiles."""
    if not side.loads:
        return
    grads, momenta = side.of(work.grads), side.of(work.momenta)
    targets, weights = None if buffer is None else side.on(buffer), list[Tensor]()
    for portion in _portions(side.in_momentum, side, work, grads, momenta):
        s, given, kept = work.settings[side.params[portion[0]]], _of(grads, portion), _of(momenta, portion)
        if s.weight_decay and s.weight_decay_mode == "l2":
            weights = weights or side.of(work.weights)
            given = [l2_gradient(grad, weights[i], s.weight_decay) for grad, i in zip(given, portion, strict=True)]
        out = None if targets is None else _of(targets, portion)
        if _rounding(side, work, portion[0]).momentum is not None:
            for at, i in enumerate(portion):
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
    settings, rounding = work.settings[side.loads[at].param], _rounding(side, work, at)
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
    buffer: Tensor,  # 1-D: the results
    *,
    like_torch: bool,  # by torch's own operations, where the options allow
) -> None:
    """Decay and update the weights of a side's tiles."""
    if not side.loads:
        return
    weights = side.of(work.weights)
    updates = side.on(buffer if like_torch else _widened(buffer, weights))
    for portion in _portions(side.in_weights, side, work, weights):
        s, chosen = work.settings[side.params[portion[0]]], _of(weights, portion)
        shapes = _of(side.shapes, portion)
        device, dtype = chosen[0].device, chosen[0].dtype
        results = _of(updates, portion)
        if buffer.device != device:
            results = [update.to(device) for update in results]
        scales = {shape: lr_scale(s.adjust_lr_fn, *shape, s.extra_scale_factor) for shape in set(shapes)}
        rounds = _rounding(side, work, portion[0]).weights is not None
        if like_torch and not rounds and s.weight_decay_mode == "decoupled":
            given = s.lr if s.tensor_lr is None else s.tensor_lr
            for w, u, i, shape in zip(chosen, results, portion, shapes, strict=True):
                apply_like_torch_(w, u, given, scales[shape], side.patches[i], shape, weight_decay=s.weight_decay)
            continue
        lr = lr_on(device, s)
        factor = 1.0 if isinstance(lr, Tensor) else lr
        alphas = [factor * scales[shape] for shape in shapes]
        rounded = [_rounder(side, work, i, dtype) for i in portion] if rounds else None
        apply_(chosen, results, alphas, lr, s.weight_decay, s.weight_decay_mode, rounded)


def _rounder(side: Side, work: Work, at: int, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """What rounds a tile of weights at random."""
    stream = _rounding(side, work, at).weights
    assert stream is not None, "of one portion all are rounded, or none"
    return partial(round_patch, stream, side.patches[at], dtype)


def _widened(buffer: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Results in the dtype in which weights take them, where that is one: on CPUs better at once than tile by tile."""
    if buffer.dtype not in _HALVES or buffer.device.type != "cpu":
        return buffer
    wanted = {torch.float32 if weight.dtype in _HALVES else weight.dtype for weight in weights}
    return buffer.to(wanted.pop()) if len(wanted) == 1 else buffer


def _rounding(side: Side, work: Work, at: int) -> Rounding:
    return work.rounding.get(side.params[at], _NEAREST)


_NEAREST = Rounding()


def _of(column: Sequence[_T], places: Sequence[int]) -> Sequence[_T]:
    return column if len(places) == len(column) else [column[at] for at in places]


def _portions(portions: Portions, side: Side, work: Work, *columns: Sequence[Tensor]) -> list[list[int]]:
    """Places of tiles that one call takes: of the same settings, and alike in each column."""
    settings = map(id, map(work.settings.__getitem__, side.params))
    first: dict[int, int] = {}  # settings, made anew whenever one changes -> the first tile that has them
    kinds: list[Sequence[object]] = [list(map(first.setdefault, settings, itertools.count()))]
    for column in columns:
        kinds += list(map(_dtype_of, column)), list(map(_device_of, column))
    if work.rounding:
        roundings = [_rounding(side, work, at) for at in range(len(side.params))]
        kinds.append([(one.momentum is None, one.weights is None) for one in roundings])
    on_cpu = any(device.type == "cpu" for device in set(map(_device_of, columns[0])))
    return portions.of(kinds, PORTION if on_cpu else PORTION_ELSEWHERE)


_dtype_of, _device_of = operator.attrgetter("dtype"), operator.attrgetter("device")
