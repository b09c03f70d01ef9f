"""AdamW for parameters that are not matrices: torch's own functional AdamW on local shards, torch's own state keys."""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardmuon._torch import functional_adamw
from shardmuon.engines import Engine, engine_of
from shardmuon.momentum.keeper import BUFFER, MOMENTS, SCALE, STEP
from shardmuon.options import ADAMW_DEFAULTS


def step_adamw(
    groups: Sequence[Mapping[str, Any]],
    state: MutableMapping[Tensor, dict[str, Any]],  # makes what is missing
    engines: set[Engine],  # of the Muon parameters that have gradients in this step
    *,
    fused: bool,
) -> None:
    """Step the groups with use_muon=False."""
    adamw = [group for group in groups if not group["use_muon"]]
    engines = engines | {engine_of(p) for group in adamw for p in group["params"] if p.grad is not None}
    for group in adamw:
        params = [p for p in group["params"] if p.grad is not None or _lacks_gradient(p, engines)]
        grads = []
        for p in params:
            engine = engine_of(p)
            given = engine.wrap(torch.zeros_like(engine.storage(p)), p) if p.grad is None else p.grad
            grads.append(given if engine.is_aligned(given, p) else engine.align(given, p))
            init_state(p, given, state[p])
        if params:
            settings = {**ADAMW_DEFAULTS, **group}  # a group may have been Muon's before
            adamw_(params, grads, [state[p] for p in params], settings, fused=fused)


def _lacks_gradient(param: Tensor, engines: Collection[Engine]) -> bool:
    """Whether it is stepped as if it had an empty gradient, see `Engine.lacks_gradient`."""
    engine = engine_of(param)
    return engine in engines and param.requires_grad and engine.lacks_gradient(param)


def init_state(param: Tensor, grad: Tensor, state: MutableMapping[str, Any]) -> None:
    """Create `step`, `exp_avg` and `exp_avg_sq` as torch.optim.AdamW has them, in the parameter's own form.

    What a parameter kept as Muon's goes: its `step` counts other things, and its momentum would come back stale.
    """
    for key in (BUFFER, SCALE):
        state.pop(key, None)
    if all(key in state for key in (STEP, *MOMENTS)):
        return
    engine = engine_of(param)
    local = engine.storage(param)
    state[STEP] = torch.zeros((), dtype=torch.float32, device="cpu")  # `adamw_` puts it where its kernel reads it
    for key in MOMENTS:
        state[key] = engine.wrap(torch.zeros_like(local), param)


def adamw_(
    params: Sequence[Tensor],  # in their own form (DTensor or plain), updated in place
    grads: Sequence[Tensor],  # aligned with the parameters
    states: Sequence[MutableMapping[str, Any]],  # of `init_state`, updated in place
    group: Mapping[str, Any],  # lr, betas, eps, weight_decay
    *,
    fused: bool,
) -> None:
    """One AdamW step on local shards. Element-wise, so no rank needs another. Waits for no accelerator."""
    local = [
        [engine_of(p).storage(t) for p, t in zip(params, ts, strict=True)] for ts in _columns(params, grads, states)
    ]
    # A rank may hold nothing of a parameter; it still keeps the state (empty), so that checkpoints see all ranks alike.
    kept = [i for i, p in enumerate(local[0]) if p.numel()]
    for i in set(range(len(states))) - set(kept):
        states[i][STEP] += 1
    # torch's fused kernel walks memory and takes no notice of strides: on CPUs it pairs the wrong elements in silence.
    plain = [i for i in kept if fused and all(column[i].is_contiguous() for column in local)]
    strided = sorted(set(kept) - set(plain))
    beta1, beta2 = group["betas"]
    for indices, use_fused in ((plain, True), (strided, False)):
        if not indices:
            continue
        columns = [[column[i] for i in indices] for column in local]
        lr = _rate(group["lr"], {p.device for p in columns[0]})
        # torch's foreach form reads a count of steps, or an lr, on the host, unless it is "capturable".
        capturable = isinstance(lr, Tensor) and not use_fused
        for i in indices:
            there = local[0][i].device if use_fused or capturable else torch.device("cpu")
            if states[i][STEP].device != there:  # made, loaded, or stepped by the other form
                states[i][STEP] = states[i][STEP].to(there, non_blocking=there.type != "cpu")
        functional_adamw(
            columns[0],
            columns[1],
            columns[2],
            columns[3],
            [],
            [states[i][STEP] for i in indices],
            foreach=not use_fused,
            fused=use_fused,
            capturable=capturable,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=lr,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def _rate(lr: float | Tensor, devices: set[torch.device]) -> float | Tensor:
    """An lr that lies with the parameters on an accelerator stays there: reading it would wait for the device."""
    if isinstance(lr, Tensor) and lr.device.type != "cpu" and devices == {lr.device}:
        return lr.reshape(()).float()  # the fused kernel reads fp32
    return float(lr)


def _columns(
    params: Sequence[Tensor], grads: Sequence[Tensor], states: Sequence[Mapping[str, Any]]
) -> list[Sequence[Tensor]]:
    return [params, grads, [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states]]
