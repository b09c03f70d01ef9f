"""Momentum and weights of a side's tiles: element by element in this rank's storages, alike tiles in one call.

Nothing is communicated or orthogonalized here. Each of weights, gradients and momentum may have its own dtype and lie
on another device than the buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from shardmuon._torch import foreach_copy_
from shardmuon.layout.pieces import Tile
from shardmuon.layout.views import MatrixView
from shardmuon.momentum.rounding import Stream, round_patch
from shardmuon.momentum.stores import BLOCK, step_coded_, step_rounded_
from shardmuon.momentum.update import apply_, apply_like_torch_, l2_gradient, lr_scale, momentum_
from shardmuon.step.sides import Side
from shardmuon.stepping.rates import lr_on
from shardmuon.stepping.settings import Settings

if TYPE_CHECKING:
    from shardmuon.step.bucket import Work

# Elements: what momentum makes on its way to a buffer, and an update on its way to half-precision weights, is at most
# this, or one tile. On a CPU what fits a cache; elsewhere so much that a list fills a launch.
PORTION, PORTION_ELSEWHERE = 1 << 17, 1 << 24
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
    grads, momenta = side.of(work.grads), side.of(work.momenta)
    targets, weights = None if buffer is None else side.on(buffer), list[Tensor]()
    for s, portion in _portions(side, work, grads, momenta):
        given, kept = [grads[i] for i in portion], [momenta[i] for i in portion]
        if s.weight_decay and s.weight_decay_mode == "l2":
            weights = weights or side.of(work.weights)
            given = [l2_gradient(grad, weights[i], s.weight_decay) for grad, i in zip(given, portion, strict=True)]
        out = None if targets is None else [targets[i] for i in portion]
        if _rounding(side, work, portion[0]).momentum is not None:
            for at, i in enumerate(portion):
                _update_rounded(side, work, i, kept[at], given[at], None if out is None else out[at])
            continue
        device = given[0].device
        loaded = kept if kept[0].device == device else [m.to(device) for m in kept]
        updates = momentum_(given, loaded, momentum=s.momentum, nesterov=s.nesterov and out is not None)
        if loaded is not kept:
            foreach_copy_(kept, loaded)
        if out is not None:
            foreach_copy_(out, updates)


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
    weights = side.of(work.weights)
    updates = side.on(buffer if like_torch else _widened(buffer, weights))
    for s, portion in _portions(side, work, weights):
        chosen, shapes = [weights[i] for i in portion], [side.shapes[i] for i in portion]
        device, dtype = chosen[0].device, chosen[0].dtype
        results = [updates[i] if buffer.device == device else updates[i].to(device) for i in portion]
        scales = {shape: lr_scale(s.adjust_lr_fn, *shape, s.extra_scale_factor) for shape in set(shapes)}
        bits = [_rounding(side, work, i).weights for i in portion]
        if like_torch and bits[0] is None and s.weight_decay_mode == "decoupled":
            given = s.lr if s.tensor_lr is None else s.tensor_lr
            for w, u, i, shape in zip(chosen, results, portion, shapes, strict=True):
                apply_like_torch_(w, u, given, scales[shape], side.patches[i], shape, weight_decay=s.weight_decay)
            continue
        lr = lr_on(device, s)
        factor = 1.0 if isinstance(lr, Tensor) else lr
        alphas = [factor * scales[shape] for shape in shapes]
        rounded = [partial(round_patch, b, side.patches[i], dtype) for b, i in zip(bits, portion, strict=True) if b]
        apply_(chosen, results, alphas, lr, s.weight_decay, s.weight_decay_mode, rounded or None)


def _widened(buffer: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Results in the dtype in which weights take them, where that is one: on CPUs better at once than tile by tile."""
    wanted = {torch.float32 if weight.dtype in _HALVES else weight.dtype for weight in weights}
    if buffer.dtype not in _HALVES or buffer.device.type != "cpu" or len(wanted) != 1:
        return buffer
    return buffer.to(wanted.pop())


def _rounding(side: Side, work: Work, at: int) -> Rounding:
    return work.rounding.get(side.loads[at].param, _NEAREST)


_NEAREST = Rounding()


def _portions(side: Side, work: Work, *columns: Sequence[Tensor]) -> Iterator[tuple[Settings, list[int]]]:
    """Places of tiles that one call takes: of the same settings, and alike in each column."""
    waiting: dict[tuple[object, ...], tuple[Settings, list[int], list[int]]] = {}
    known: dict[int, tuple[Settings, list[int], list[int]]] = {}  # parameter -> one of them
    for at, load in enumerate(side.loads):
        if load.param not in known:
            settings, rounding = work.settings[load.param], _rounding(side, work, at)
            kinds = ((column[at].dtype, column[at].device) for column in columns)
            key = (id(settings), rounding.momentum is None, rounding.weights is None, *kinds)
            known[load.param] = waiting.setdefault(key, (settings, [], [0]))
        settings, portion, size = known[load.param]
        limit = PORTION if columns[0][at].device.type == "cpu" else PORTION_ELSEWHERE
        if portion and size[0] + load.tile.numel > limit:
            yield settings, list(portion)
            portion.clear()
            size[0] = 0
        portion.append(at)
        size[0] += load.tile.numel
    for settings, portion, _ in waiting.values():
        yield settings, portion
