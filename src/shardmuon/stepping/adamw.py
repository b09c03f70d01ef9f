"""AdamW for parameters that are not matrices: torch's own functional AdamW on local shards, torch's own state keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardmuon._torch import functional_adamw
from shardmuon.engines import Engine, engine_of
from shardmuon.momentum.keeper import BUFFER, MOMENTS, SCALE, STEP
from shardmuon.momentum.update import decay_agreeing_
from shardmuon.options import ADAMW_DEFAULTS
from shardmuon.variants import KEPT_KEYS


class _Row(NamedTuple):
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
    *,
    fused: bool,
) -> None:
    """Step the groups with use_muon=False."""
    groups = [group for group in groups if not group["use_muon"]]
    listed = [[(p, p.grad, engine_of(p)) for p in group["params"]] for group in groups]
    stepped: set[Engine] | None = None  # engines of which some parameter is stepped, once anybody asks
    for group, params in zip(groups, listed, strict=True):
        rows = []
        for p, grad, engine in params:
            if grad is None:
                if stepped is None:
                    stepped = engines() | {e for of_group in listed for _, g, e in of_group if g is not None}
                if not (engine in stepped and p.requires_grad and engine.lacks_gradient(p)):
                    continue
                grad = engine.wrap(torch.zeros_like(engine.storage(p)), p)
            rows.append(_row(p, grad, engine, state[p]))
        if rows:
            adamw_(rows, {**ADAMW_DEFAULTS, **group}, fused=fused)  # a group may have been Muon's before


def _row(param: Tensor, grad: Tensor, engine: Engine, state: MutableMapping[str, Any]) -> _Row:
    """What is stepped of a parameter; makes its state if it is missing. Collective if its gradient is to be aligned."""
    local = engine.stored_alike(grad, param)
    if local is None:
        grad = grad if engine.is_aligned(grad, param) else engine.align(grad, param)
        local = engine.storage(grad)
    init_state(param, grad, state)
    return _Row(
        engine.storage(param), local, engine.storage(state[MOMENTS[0]]), engine.storage(state[MOMENTS[1]]), state
    )


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
    rows: Sequence[_Row],  # updated in place
    group: Mapping[str, Any],  # lr, betas, eps, weight_decay, adamw
    *,
    fused: bool,
) -> None:
    """One AdamW step on local shards. Element-wise, so no rank needs another. Waits for no accelerator."""
    plain: list[_Row] = []
    strided: list[_Row] = []
    for row in rows:
        if not row.param.numel():  # a rank may hold nothing; it still counts, so that checkpoints see all ranks alike
            row.state[STEP] += 1
        # torch's fused kernel walks memory and takes no notice of strides: on CPUs it pairs the wrong elements.
        elif fused and all(map(Tensor.is_contiguous, row[:4])):
            plain.append(row)
        else:
            strided.append(row)
    beta1, beta2 = group["betas"]
    for alike, use_fused in ((plain, True), (strided, False)):
        if not alike:
            continue
        params, grads, exp_avgs, exp_avg_sqs, states = map(list, zip(*alike, strict=True))
        lr = _rate(group["lr"], {p.device for p in params})
        # torch's foreach form reads a count of steps, or an lr, on the host, unless it is "capturable".
        capturable = isinstance(lr, Tensor) and not use_fused
        for state, param in zip(states, params, strict=True):
            there = param.device if use_fused or capturable else _CPU
            if state[STEP].device != there:  # made, loaded, or stepped by the other form
                state[STEP] = state[STEP].to(there, non_blocking=there.type != "cpu")
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
            [state[STEP] for state in states],
            foreach=not use_fused,
            fused=use_fused,
            capturable=capturable,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=lr,
            weight_decay=decay,
            eps=group["eps"],
            maximize=False,
        )


_CPU = torch.device("cpu")


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


def _rate(lr: float | Tensor, devices: set[torch.device]) -> float | Tensor:
    """An lr that lies with the parameters on an accelerator stays there: reading it would wait for the device."""
    if isinstance(lr, Tensor) and lr.device.type != "cpu" and devices == {lr.device}:
        return lr.reshape(()).float()  # the fused kernel reads fp32
    return float(lr)
