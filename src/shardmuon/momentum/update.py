"""Element-wise rules on shards: momentum, weight decay, learning-rate scale, apply.

Each function takes lists of views of local storage and changes those whose names end in an underscore. The operations
give each element the same bits wherever it stands in a shard (checked by tests): fp32 `lerp`, `mul` and `add` do, half
precision `add` with `alpha` does not on CPUs, so half-precision weights are updated in fp32 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from shardmuon._torch import (
    foreach_add_,
    foreach_copy_,
    foreach_lerp,
    foreach_lerp_,
    foreach_scale_,
    foreach_times,
    foreach_to,
)
from shardmuon.layout.pieces import Patch

# Elements of a list of tiles, or one tile: of what momentum makes on its way to a buffer, and an update on its way to
# half-precision weights. A CPU's cache holds it; elsewhere it fills a launch.
PORTION, PORTION_ELSEWHERE = 1 << 17, 1 << 24

WeightDecayMode = Literal["decoupled", "l2", "independent", "cautious"]
WEIGHT_DECAY_MODES: tuple[WeightDecayMode, ...] = ("decoupled", "l2", "independent", "cautious")
LrScale = str | Callable[[int, int], float] | None

# rows x cols -> factor on lr. Formulas and the field's clashing names: docs/learning_rate.md
LR_SCALES: dict[str, Callable[[int, int], float]] = {
    # Keller Jordan's Muon; torch.optim.Muon "original"
    "original": lambda rows, cols: math.sqrt(max(1, rows / cols)),
    # Moonlight, arXiv 2502.16982; torch.optim.Muon "match_rms_adamw"
    "match_rms_adamw": lambda rows, cols: 0.2 * math.sqrt(max(rows, cols)),
    # Emerging-Optimizers, Megatron-LM and TransformerEngine "spectral"
    "spectral": lambda rows, cols: math.sqrt(max(rows, cols)),
    # Emerging-Optimizers "unit_rms_norm"
    "unit_rms_norm": lambda rows, cols: math.sqrt(rows / cols),
    "none": lambda rows, cols: 1.0,
}
# What Emerging-Optimizers and dion call them.
OTHER_SCALE_NAMES = {"shape_scaling": "original", "rms_norm": "match_rms_adamw", "spectral_norm": "unit_rms_norm"}


def lr_scale(adjust_lr_fn: LrScale, rows: int, cols: int, extra_scale_factor: float = 1.0) -> float:
    """The factor on the learning rate of a rows x cols matrix. The shape is the global matrix's, never a shard's."""
    function = adjust_lr_fn if callable(adjust_lr_fn) else LR_SCALES[adjust_lr_fn or "original"]
    return function(rows, cols) * extra_scale_factor


def momentum_(
    grads: Sequence[Tensor],  # local views of one dtype, not written to
    buffers: Sequence[Tensor],  # local views of the momentum, of one dtype, updated in place
    *,
    momentum: float,
    nesterov: bool,
) -> Sequence[Tensor]:  # what to orthogonalize; with nesterov=False the buffers themselves
    """B <- B + (1 - momentum) (G - B); return G + momentum (B - G) (Nesterov) or B. As torch.optim.Muon."""
    if not grads:
        return ()
    if grads[0].dtype != buffers[0].dtype:
        grads = foreach_to(grads, buffers)
    foreach_lerp_(buffers, grads, weight=1 - momentum)
    return foreach_lerp(grads, buffers, momentum) if nesterov else buffers


def momentum_into_(
    out: Sequence[Tensor],  # takes what to orthogonalize; of one dtype, not the gradients' memory
    grads: Sequence[Tensor],
    buffers: Sequence[Tensor],
    *,
    momentum: float,
    nesterov: bool,
) -> None:
    """`momentum_` with its result in memory that there is: on a CPU without more, where its dtype is the momentum's.

    Accelerators take lists in one launch only where all tensors are dense, and a tile of a batch may have gaps.
    """
    first, last = out[0], buffers[0]
    in_place = nesterov and first.dtype == last.dtype and first.device.type == last.device.type == "cpu"
    for to, given, stored in in_cache(out, grads, buffers):
        if in_place:
            results, kept = list(to), list(stored)
            torch._foreach_copy_(results, list(given))
            torch._foreach_lerp_(kept, results, weight=1 - momentum)
            torch._foreach_lerp_(results, kept, weight=momentum)
        else:
            foreach_copy_(to, momentum_(given, stored, momentum=momentum, nesterov=nesterov))


def in_cache(*columns: Sequence[Tensor]) -> Iterator[Sequence[Sequence[Tensor]]]:
    """Lists of tensors, alike place by place, in slabs that a CPU's cache holds; elsewhere as they are.

    Only a list of one tensor is cut: longer ones were dealt in portions (step/update.py).
    """
    first = columns[0][0]
    if len(columns[0]) > 1 or first.device.type != "cpu" or first.numel() <= PORTION:
        yield columns
        return
    dim = next(dim for dim, size in enumerate(first.shape) if size > 1)
    step = max(1, PORTION * first.shape[dim] // first.numel())
    yield from zip(*(((slab,) for slab in column[0].split(step, dim)) for column in columns), strict=True)


def l2_gradient(grad: Tensor, param: Tensor, weight_decay: float) -> Tensor:
    """G + weight_decay * W, computed in at least fp32, in the gradient's dtype."""
    wide = torch.float64 if torch.float64 in (grad.dtype, param.dtype) else torch.float32
    return (grad.to(wide) + param.to(wide) * weight_decay).to(grad.dtype)


def apply_(
    params: Sequence[Tensor],  # local views of one device and dtype, updated in place
    updates: Sequence[Tensor],  # same shapes, orthogonalized; wire dtype
    alphas: Sequence[float],  # lr * scale of each view's matrix; the scale alone where lr is a tensor
    lr: float | Tensor,  # a 0-dim tensor on the device of the views is used there
    weight_decay: float,
    mode: WeightDecayMode,
    rounded: Sequence[Callable[[Tensor], Tensor]] | None = None,  # fp32 -> half precision; default: to nearest
) -> None:
    """W <- decayed W - alpha * O for each view.

    decoupled   W (1 - lr * wd)                      AdamW's; torch.optim.Muon's
    independent W (1 - wd)                           not scaled by lr
    cautious    W (1 - lr * wd) where O * W > 0      elsewhere W: decay never works against the update
    l2          W                                    the decay went into the gradient, before momentum
    """
    if not params:
        return
    half = params[0].dtype in _HALVES
    for stored, given in [(params, updates)] if rounded else in_cache(params, updates):
        weights = foreach_to(stored, stored, torch.float32) if half else stored
        if weight_decay and mode == "decoupled":
            foreach_scale_(weights, 1 - lr * weight_decay)
        elif weight_decay and mode == "independent":
            foreach_scale_(weights, 1 - weight_decay)
        elif weight_decay and mode == "cautious":
            for w, update in zip(weights, given, strict=True):
                decay_agreeing_(w, update * w, 1 - lr * weight_decay)
        summands = given
        # a CPU's `add` widens as it goes; other devices have no list operation for that
        widens = given[0].dtype in _HALVES and weights[0].device.type == "cpu" and not isinstance(lr, Tensor)
        if not widens and given[0].dtype != weights[0].dtype:
            summands = foreach_to(given, weights)
        alike = len(set(alphas)) == 1
        together: Mapping[float, tuple[Sequence[Tensor], Sequence[Tensor]]] = (
            {alphas[0]: (weights, summands)} if alike else _by_alpha(alphas, weights, summands)
        )
        for alpha, (added, of_alpha) in together.items():
            if isinstance(lr, Tensor):
                foreach_add_(added, foreach_times(of_alpha, lr * -alpha), alpha=1.0)
            else:
                foreach_add_(added, of_alpha, alpha=-alpha)
        if half:
            foreach_copy_(stored, weights if rounded is None else [r(w) for r, w in zip(rounded, weights, strict=True)])


def _by_alpha(
    alphas: Sequence[float], weights: Sequence[Tensor], updates: Sequence[Tensor]
) -> dict[float, tuple[list[Tensor], list[Tensor]]]:
    """Factor -> the weights that it applies to, and their updates."""
    found: dict[float, tuple[list[Tensor], list[Tensor]]] = {}
    for alpha, weight, update in zip(alphas, weights, updates, strict=True):
        of_alpha = found.setdefault(alpha, ([], []))
        of_alpha[0].append(weight)
        of_alpha[1].append(update)
    return found


def decay_agreeing_(
    weight: Tensor,  # updated in place
    agreement: Tensor,  # same shape: positive where weight and update agree; overwritten
    factor: float | Tensor,
) -> None:
    """W <- factor W where `agreement` is positive; elsewhere, and where it is NaN, W stays.

    The bits are those of `torch.where`, which makes a step of d=384 on a CPU 6% longer: from 1/2
    to 1 neither factor - 1 nor 1 + (factor - 1) is rounded, so a product with 0 or 1 selects exactly.
    """
    alike = agreement.dtype == weight.dtype and weight.dtype not in _HALVES
    if isinstance(factor, Tensor) or not alike or not 0.5 <= factor <= 1.0:
        # not where(.., factor, 1.0): that is fp32 whatever the weights are
        weight.copy_(torch.where(agreement > 0, weight * factor, weight))
        return
    rounded = float(torch.tensor(factor, dtype=weight.dtype, device="cpu"))  # as a product with a number rounds it
    weight.mul_(agreement.gt_(0.0).mul_(rounded - 1.0).add_(1.0))


def apply_like_torch_(
    param: Tensor,  # local view, any shape in the order of the patch; updated in place
    update: Tensor,  # same elements, bf16
    lr: float | Tensor,  # a tensor of any number of dims, with one element
    scale: float,  # of the whole matrix
    patch: Patch,
    shape: tuple[int, int],  # of the whole matrix
    *,
    weight_decay: float,
) -> None:
    """Exactly torch.optim.Muon's `param.mul_(1 - lr * decay); param.add_(update, alpha=-lr * scale)`, also on a shard.

    A tensor lr takes part as it is: torch rounds both factors to its dtype.

    torch's half-precision `add` rounds an element differently in the vector body and in the tail of a tensor, and
    differently again if the update is a transposed view, as it is for tall matrices. So on half-precision weights the
    view is put at its own place in a matrix of the full size, and torch's own operation runs on that. It costs one
    matrix of scratch memory and is meant for proofs, not for speed.
    """
    if isinstance(lr, Tensor):
        lr = lr.squeeze() if lr.device.type == "cpu" else lr.squeeze().to(param.device)
    param.mul_(1 - lr * weight_decay)
    alpha = float(lr * scale)
    if param.dtype not in _HALVES:
        param.add_(update, alpha=-alpha)
        return
    rows, cols = shape
    whole = torch.zeros(rows, cols, dtype=param.dtype, device=param.device)
    moved = torch.zeros(min(shape), max(shape), dtype=update.dtype, device=param.device)
    moved = moved.T if rows > cols else moved
    target, source = (
        matrix.as_strided(patch.sizes, strides, first)
        for matrix in (whole, moved)
        for first, strides in (patch.address(*matrix.stride()),)
    )
    target.copy_(param.reshape(patch.sizes))
    source.copy_(update.reshape(patch.sizes))
    whole.add_(moved, alpha=-alpha)
    param.copy_(target.reshape(param.shape))


_HALVES = (torch.bfloat16, torch.float16)
