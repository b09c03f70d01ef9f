"""AdamW for parameters that are not matrices: torch's own functional AdamW on local shards, torch's own state keys.

[Note: one form of AdamW]
    Every element is stepped by torch's fused kernel, in a whole vector. On CPUs that kernel takes 64 bytes of a tensor
    at a time, and rounds what is left at the end, which fills no vector, in another way: bits would hang on where a
    tensor is cut. So the end of a tensor is copied to where it has zeros behind it. The kernel walks memory and takes
    no notice of strides: tensors that lie in another order than their weight are copied, too. Elsewhere it computes
    each element by itself. See docs/adr/0022-one-adamw-form.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardmuon._torch import flattened, foreach_copy_, functional_adamw, is_dense
from shardmuon.layout.engines import Engine, engine_of
from shardmuon.momentum.keeper import BUFFER, MOMENTS, SCALE, STEP
from shardmuon.momentum.update import decay_agreeing_
from shardmuon.options import ADAMW_DEFAULTS
from shardmuon.variants import KEPT_KEYS

_VECTOR = 64  # bytes that a CPU's kernel takes at a time, at most (AVX512; torch 2.11 .. 2.13)
_SMALL = 1 << 14  # elements: fewer are copied whole where their end must be


class Row(NamedTuple):
    """One parameter in one step, on this rank's storages."""

    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    state: MutableMapping[str, Any]


def step_adamw(
    groups: Sequence[Mapping[str, Any]],
    state: MutableMapping[Tensor, dict[str, Any]],  # makes what is missing
    engines: Callable[[], set[Engine]],  # of the Muon parameters that have gradients in this step
    seen: Mapping[int, Sequence[Row | None]] = MappingProxyType({}),  # number of a group -> its rows, as far as known
) -> None:
    """Step the groups with use_muon=False."""
    others = {number: group for number, group in enumerate(groups) if not group["use_muon"]}
    stepped: set[Engine] | None = None  # engines of which some parameter is stepped, once anybody asks
    for number, group in others.items():
        params, rows = group["params"], list[Row]()
        for p, row in zip(params, seen.get(number) or [None] * len(params), strict=True):
            if row is None:
                grad, engine = p.grad, engine_of(p)
                if grad is None:
                    if not (p.requires_grad and engine.lacks_gradient(p)):
                        continue
                    if stepped is None:
                        all_others = itertools.chain.from_iterable(other["params"] for other in others.values())
                        stepped = engines() | {engine_of(one) for one in all_others if one.grad is not None}
                    if engine not in stepped:
                        continue
                    grad = engine.wrap(torch.zeros_like(engine.storage(p)), p)
                row = _row(p, grad, engine, state[p])
            rows.append(row)
        if rows:
            adamw_(rows, {**ADAMW_DEFAULTS, **group})  # a group may have been Muon's before


def _row(param: Tensor, grad: Tensor, engine: Engine, state: MutableMapping[str, Any]) -> Row:
    """What is stepped of a parameter; makes its state if it is missing. Collective if its gradient is to be aligned."""
    if engine.storages(param, grad) is None and not engine.is_aligned(grad, param):
        grad = engine.align(grad, param)
    init_state(param, grad, state)
    weight, local, moment, square = map(engine.storage, (param, grad, *map(state.__getitem__, MOMENTS)))
    return Row(weight, local, moment, square, state)


def init_state(param: Tensor, grad: Tensor, state: MutableMapping[str, Any]) -> None:
    """Create `step`, `exp_avg` and `exp_avg_sq` as torch.optim.AdamW has them, in the parameter's own form.

    What a parameter kept as Muon's goes: its `step` counts other things, and its momentum and what stages kept would
    come back stale.
    """
    if len(state) == 3 and STEP in state and MOMENTS[0] in state and MOMENTS[1] in state:
        return
    for key in (BUFFER, SCALE, *KEPT_KEYS):
        state.pop(key, None)
    if all(key in state for key in (STEP, *MOMENTS)):
        return
    engine = engine_of(param)
    local = engine.storage(param)
    state[STEP] = torch.zeros((), dtype=torch.float32, device="cpu")  # `adamw_` puts it where its kernel reads it
    for key in MOMENTS:
        state[key] = engine.wrap(torch.zeros_like(local), param)


def adamw_(
    rows: Sequence[Row],  # updated in place
    group: Mapping[str, Any],  # lr, betas, eps, weight_decay, adamw
) -> None:
    """One AdamW step on local shards. Element-wise, so no rank needs another. Waits for no accelerator."""
    of_devices: dict[torch.device, _Lines] = {}
    for row in rows:
        param, step = row.param, row.state[STEP]
        if not param.numel():  # a rank may hold nothing; it still counts, so that checkpoints see all ranks alike
            step += 1
            continue
        device = param.device
        if step.device != device:  # made, or loaded
            step = row.state[STEP] = step.to(device, non_blocking=device.type != "cpu")
        lines = of_devices.get(device)
        if lines is None:
            lines = of_devices[device] = _Lines(device.type == "cpu")
        lines.add(row[:4], step)
    for device, lines in of_devices.items():
        copies = lines.copies()
        _update_([*lines.rows, *(copied for copied, _ in copies)], group, _rate(group["lr"], device))
        for copied, targets in copies:
            _copy_back(copied, targets)
        if lines.uncounted:
            torch._foreach_add_(lines.uncounted, 1)


_Tensors = Sequence[Tensor]  # weight, gradient, moments


class _Lines:
    """What the kernel walks on one device. See [Note: one form of AdamW].

    Attributes:
        rows: What is stepped where it lies, and its count of steps.
        uncounted: Counts of what is stepped in copies alone.
    """

    def __init__(self, cuts: bool) -> None:
        self._cuts = cuts  # whether the end of a tensor is rounded in another way
        self.rows: list[tuple[_Tensors, Tensor]] = []
        self.uncounted: list[Tensor] = []
        self._copied: dict[tuple[object, ...], tuple[Tensor, list[_Tensors]]] = {}

    def add(self, tensors: _Tensors, step: Tensor) -> None:
        """One parameter."""
        param = tensors[0]
        if not all(map(Tensor.is_contiguous, tensors)):
            strides = param.stride()
            if not (is_dense(param) and all(t.stride() == strides for t in tensors)):
                self.uncounted.append(step)
                self._copy(tensors, step)
                return
            tensors = [t.as_strided((t.numel(),), (1,)) for t in tensors]  # the kernel looks at no strides
        numel = param.numel()
        rest = numel % (_VECTOR // param.element_size()) if self._cuts else 0
        if not rest:
            self.rows.append((tensors, step))
            return
        if numel < _SMALL:
            self.uncounted.append(step)
            self._copy(tensors, step)
            return
        flats, whole = [t.view(-1) for t in tensors], numel - rest
        self._copy([t[whole:] for t in flats], step)
        self.rows.append(([t[:whole] for t in flats], step))

    def _copy(self, tensors: _Tensors, step: Tensor) -> None:
        """Side by side with others of their dtypes and number of steps, where that can be read without a wait."""
        key = (*(t.dtype for t in tensors), float(step) if self._cuts else len(self._copied))
        self._copied.setdefault(key, (step, []))[1].append(tensors)

    def copies(self) -> list[tuple[tuple[_Tensors, Tensor], list[_Tensors]]]:
        """What to step besides, and of which tensors it is a copy; zeros behind fill the last vector."""
        made: list[tuple[tuple[_Tensors, Tensor], list[_Tensors]]] = []
        for step, several in self._copied.values():
            first = several[0][0]
            missing = -sum(row[0].numel() for row in several) % (_VECTOR // first.element_size())
            columns = zip(*several, strict=True)
            line = [flattened([*column, column[0].new_zeros(missing)]) for column in columns]
            made.append(((line, step.clone()), several))
        return made


def _copy_back(copied: tuple[_Tensors, Tensor], targets: Sequence[_Tensors]) -> None:
    """Weights and moments."""
    for number in (0, 2, 3):
        column = [row[number] for row in targets]
        line = copied[0][number]
        parts = line[: sum(map(Tensor.numel, column))].split([t.numel() for t in column])
        foreach_copy_(column, [p if t.dim() == 1 else p.view(t.shape) for p, t in zip(parts, column, strict=True)])


def _update_(rows: Sequence[tuple[_Tensors, Tensor]], group: Mapping[str, Any], lr: float | Tensor) -> None:
    """Whole vectors, in place."""
    columns = zip(*(tensors for tensors, _ in rows), strict=True)
    params, grads, exp_avgs, exp_avg_sqs = (list(column) for column in columns)
    beta1, beta2 = group["betas"]
    decay = group["weight_decay"]
    if decay and group.get("adamw") == "cautious":
        _decay_cautiously_(params, grads, exp_avgs, beta1, lr * decay)
        decay = 0.0
    functional_adamw(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        [step for _, step in rows],
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=lr,
        weight_decay=decay,
        eps=group["eps"],
        maximize=False,
    )


def _decay_cautiously_(
    params: Sequence[Tensor],  # decayed in place
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],  # before this step
    beta1: float,
    rate: float | Tensor,  # lr * weight_decay
) -> None:
    """W <- W (1 - rate) where W and the coming update have the same sign (arXiv 2510.12402).

    The update is lr * m / (sqrt(v) + eps) with a positive divisor, so its sign is that of m after this step.
    """
    for param, grad, exp_avg in zip(params, grads, exp_avgs, strict=True):
        ahead = torch.lerp(exp_avg, grad, 1 - beta1)
        decay_agreeing_(param, ahead.sign_().mul_(param), 1 - rate)  # the sign, for a product could underflow


def _rate(lr: float | Tensor, device: torch.device) -> float | Tensor:
    """An lr that lies with the parameters on an accelerator stays there: reading it would wait for the device."""
    if isinstance(lr, Tensor) and lr.device.type != "cpu" and lr.device == device:
        return lr.reshape(()).float()  # the kernel reads fp32
    return float(lr)
