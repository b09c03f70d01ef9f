"""What a step does with each parameter: its storages, and the arithmetic of momentum and weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from shardmuon.momentum.rounding import Stream, round_patch
from shardmuon.momentum.stores import Momentum
from shardmuon.momentum.update import apply_, apply_like_torch_, l2_gradient, lr_scale, momentum_
from shardmuon.orthogonalize import FiniteWatch
from shardmuon.orthogonalize.graphs import GraphCache
from shardmuon.planning.types import is_narrow
from shardmuon.stepping.program import Part
from shardmuon.stepping.rates import lr_on
from shardmuon.stepping.settings import Settings


@dataclass(frozen=True, slots=True)
class Kernel:
    """What all matrices of the optimizer have in common; how each is orthogonalized stands in the plan.

    Attributes:
        wire_dtype: In which matrices travel.
        narrows: Matrices with half-precision products travel in bf16 all the same.
        graphs, watch: See `orthogonalize`.
        device: Where to orthogonalize; None: where the wire buffers are.
    """

    wire_dtype: torch.dtype
    narrows: bool = False
    graphs: GraphCache | None = None
    device: torch.device | None = None
    watch: FiniteWatch | None = None

    def wire_of(self, how: str) -> torch.dtype:
        """The wire of matrices that are orthogonalized like this. A bucket's are all of one kind."""
        return torch.bfloat16 if self.narrows and is_narrow(how) else self.wire_dtype


class ParamWork(NamedTuple):
    """One parameter in one step: this rank's local storages, all of one shape."""

    weight: Tensor
    grad: Tensor
    momentum: Momentum
    settings: Settings
    rounding: Stream | None = None  # random bits for half-precision weights
    kept: tuple[Tensor, ...] = ()  # of each stage that keeps anything, what this rank stores of it
    fresh: tuple[str, ...] = ()  # keys of what has just been made or loaded of that, see kept.py


Pair = tuple[ParamWork, Part]  # a parameter's storages and those of its fragments that are meant


class _Stepped(NamedTuple):
    """What one call of `momentum_` takes."""

    momentum: float
    nesterov: bool
    grads: list[Tensor]
    buffers: list[Tensor]
    places: list[int]  # in the list of all updates


def update_momentum(
    pairs: Sequence[Pair],
    *,
    read: bool = True,  # False where nobody looks at the result, which then is not made
) -> list[Tensor]:  # of each fragment, what is to be orthogonalized, as it lies in storage
    """Update the momentum of these fragments. Parameters with the same rule and dtypes are stepped in one call."""
    found: list[Tensor] = []
    together: dict[tuple[object, ...], _Stepped] = {}
    for work, part in pairs:
        s, grad = work.settings, work.grad
        whole, device = part.only == grad.numel(), grad.device  # then so are momentum and weight, of one shape
        grads = [grad] if whole else part.views(grad)
        if s.weight_decay_mode == "l2" and s.weight_decay:
            grads = [l2_gradient(g, w, s.weight_decay) for g, w in zip(grads, part.views(work.weight), strict=True)]
        kept = work.momentum.direct(device)
        nesterov = s.nesterov and read
        if kept is None:
            found += work.momentum.update(part.fragments, grads, momentum=s.momentum, nesterov=nesterov)
            continue
        key = (s.momentum, nesterov, grad.dtype, kept.dtype, device)
        group = together.get(key)
        if group is None:
            group = together[key] = _Stepped(s.momentum, nesterov, [], [], [])
        group.grads.extend(grads)
        group.buffers.extend([kept] if whole else part.views(kept))
        group.places.extend(range(len(found), len(found) + len(grads)))
        found += grads  # until their updates are there
    for group in together.values():
        updates = momentum_(group.grads, group.buffers, momentum=group.momentum, nesterov=group.nesterov)
        if len(group.places) == len(found):
            return list(updates)
        for at, update in zip(group.places, updates, strict=True):
            found[at] = update
    return found


class _Applied(NamedTuple):
    """What one call of `apply_` takes."""

    settings: Settings
    lr: float | Tensor
    weights: list[Tensor]
    updates: list[Tensor]
    alphas: list[float]
    rounded: list[Callable[[Tensor], Tensor]]


class _Factors(dict[tuple[int, int], float]):
    """Shape of a matrix -> lr * scale; the scale alone where lr is a tensor."""

    def __init__(self, settings: Settings, lr: float | Tensor) -> None:
        self._settings, self._lr = settings, 1.0 if isinstance(lr, Tensor) else lr

    def __missing__(self, shape: tuple[int, int]) -> float:
        scale = lr_scale(self._settings.adjust_lr_fn, *shape, self._settings.extra_scale_factor)
        self[shape] = self._lr * scale
        return self[shape]


def apply_results(
    pairs: Sequence[Pair],
    updates: Sequence[Tensor],  # of each fragment, as it lies in its matrix
    *,
    like_torch: bool = False,  # apply by torch's own operations, where the options allow
) -> None:
    """Decay and update the weights of these fragments. Parameters with the same rule are changed in one call."""
    together: dict[tuple[object, ...], _Applied] = {}
    known: dict[tuple[object, ...], tuple[_Applied, _Factors]] = {}
    left = iter(updates)
    for work, part in pairs:
        s, weights = work.settings, part.views(work.weight)
        of_part = list(itertools.islice(left, len(weights)))
        device = work.weight.device
        if part.reshaped or of_part[0].device != device:
            of_part = [u.reshape(w.shape).to(device) for u, w in zip(of_part, weights, strict=True)]
        if like_torch and work.rounding is None and s.weight_decay_mode == "decoupled":
            _apply_like_torch(s, part, weights, of_part)
            continue
        key = (id(s), device, work.weight.dtype, work.rounding is None)
        if key not in known:
            rate = lr_on(device, s)
            alike = (id(s.tensor_lr) if isinstance(rate, Tensor) else rate, s.weight_decay, s.weight_decay_mode)
            rule = together.setdefault((*alike, *key[1:]), _Applied(s, rate, [], [], [], []))
            known[key] = rule, _Factors(s, rate)
        rule, factors = known[key]
        rule.weights.extend(weights)
        rule.updates.extend(of_part)
        rule.alphas.extend(map(factors.__getitem__, part.shapes))
        if work.rounding is not None:
            rule.rounded.extend(partial(round_patch, work.rounding, f.patch, work.weight.dtype) for f in part.fragments)
    for s, rate, weights, of_rule, alphas, rounded in together.values():
        apply_(weights, of_rule, alphas, rate, s.weight_decay, s.weight_decay_mode, rounded or None)


def _apply_like_torch(s: Settings, part: Part, weights: Sequence[Tensor], updates: Sequence[Tensor]) -> None:
    lr = s.lr if s.tensor_lr is None else s.tensor_lr
    for f, w, u, shape in zip(part.fragments, weights, updates, part.shapes, strict=True):
        scale = lr_scale(s.adjust_lr_fn, *shape, s.extra_scale_factor)
        apply_like_torch_(w, u, lr, scale, f.patch, shape, weight_decay=s.weight_decay)
