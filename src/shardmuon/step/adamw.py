"""AdamW step for the groups with use_muon=False. Torch's functional AdamW is applied to local shards. The state has the
keys of torch.optim.AdamW.

[Note: one form of AdamW]
    On CPUs, torch's fused kernel processes a tensor in vectors of 64 bytes. Elements at the end of the tensor that do
    not fill a vector are rounded differently, so results would depend on how a tensor is sharded. Therefore these
    elements are copied to a buffer and padded with zeros to whole vectors.

    The kernel also ignores strides and processes elements in the order of memory. Tensors whose memory order differs
    from the weight's are therefore copied in the same way.

    On other devices, the kernel computes each element independently. See docs/adr/0022-one-adamw-form.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw as functional_adamw

from shardmuon._torch import (
    flattened,
    foreach_copy_,
    is_dense,
    unflattened,
)
from shardmuon.layout.engines import Engine, engine_of
from shardmuon.momentum.keeper import BUFFER, MOMENTS, SCALE, STEP
from shardmuon.options import ADAMW_DEFAULTS
from shardmuon.variants import KEPT_KEYS

_VECTOR = 64  # largest size in bytes of the vectors in torch's fused AdamW kernel for CPUs (AVX512; torch 2.11 to 2.13)
# Threshold for tensors whose size is not a multiple of the CPU kernel's vector size. A tensor with fewer elements than
# the threshold is copied to a padded buffer as a whole. For a larger tensor, only the last elements, which do not fill
# a vector, are copied.
_SMALL = 1 << 14


class Row(NamedTuple):
    """One parameter's local shards (weight, gradient and moments) and optimizer state, for an AdamW step on this
    rank."""

    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    state: MutableMapping[str, Any]


def step_adamw(
    groups: Sequence[Mapping[str, Any]],
    state: MutableMapping[Tensor, dict[str, Any]],  # optimizer state of each parameter; missing state is created
    # Function that returns the engines (storage adapters) of all Muon parameters with gradients.
    engines: Callable[[], set[Engine]],
    # Dict from the index of an AdamW group to one row per parameter. None stands for a row that must still be built.
    seen: Mapping[int, Sequence[Row | None]] = MappingProxyType({}),
) -> None:
    """Take an AdamW step on the groups with use_muon=False. AdamW is elementwise, so ranks exchange data only if a
    gradient must be redistributed to its parameter's layout. The CPU waits for an accelerator only if a hyperparameter
    is a tensor on the accelerator."""
    for number, group in enumerate(groups):
        if group["use_muon"]:
            continue
        rows = seen.get(number, [None] * len(group["params"]))
        if None in rows:
            rows = _completed(groups, group["params"], rows, state, engines)
        of_devices: dict[torch.device, list[Row]] = {}
        for row in rows:
            assert row is not None, "all are complete"
            step, device = row.state[STEP], row.param.device
            # a step count that was just created or loaded may not be on the weight's device
            if step.device != device:
                row.state[STEP] = step.to(device, non_blocking=device.type != "cpu")
            of_devices.setdefault(device, []).append(row)
        for device, alike in of_devices.items():
            # parameter groups made by frameworks may lack AdamW's options
            _update_(alike, {**ADAMW_DEFAULTS, **group}, device)


def _completed(
    groups: Sequence[Mapping[str, Any]],
    params: Sequence[Tensor],
    rows: Sequence[Row | None],
    state: MutableMapping[Tensor, dict[str, Any]],
    engines: Callable[[], set[Engine]],
) -> list[Row]:
    """Create missing AdamW state, and return one `Row` for each parameter in `params` that takes part in the step. A
    parameter takes part if it has a gradient, or if it lacks one only because this rank stores none of its elements.
    Collective if a gradient must be redistributed to its parameter's layout."""
    others = (p for group in groups if not group["use_muon"] for p in group["params"] if p.grad is not None)
    stepped = engines() | set(map(engine_of, others))  # engines (storage adapters) of all parameters with a gradient
    found: list[Row] = []
    for p, row in zip(params, rows, strict=True):
        grad, engine = p.grad, engine_of(p)
        if grad is None and p.requires_grad and engine in stepped and engine.lacks_gradient(p):
            grad = engine.wrap(torch.zeros_like(engine.storage(p)), p)
        if grad is None:
            continue
        if row is None:
            kept, grad = state[p], grad if engine.is_aligned(grad, p) else engine.align(grad, p)
            init_state(p, kept)
            weight, local, moment, square = map(engine.storage, (p, grad, *map(kept.__getitem__, MOMENTS)))
            row = Row(weight, local, moment, square, kept)
        found.append(row)
    return found


def init_state(param: Tensor, state: MutableMapping[str, Any]) -> None:
    """Create `step`, `exp_avg` and `exp_avg_sq`, as torch.optim.AdamW does, unless all three exist. The moments have
    the parameter's layout. If the moments are missing, an existing `step` is replaced, because it counts Muon's steps.

    Delete Muon's momentum and the state of Muon variants (such as NorMuon). Such state would be out of date if the
    parameter returned to Muon later.
    """
    for key in (BUFFER, SCALE, *KEPT_KEYS):
        state.pop(key, None)
    if all(key in state for key in (STEP, *MOMENTS)):
        return
    engine = engine_of(param)
    local = engine.storage(param)
    # the step count is created on the CPU, and `step_adamw` moves it to the weight's device
    state[STEP] = torch.zeros((), dtype=torch.float32, device="cpu")
    for key in MOMENTS:
        state[key] = engine.wrap(torch.zeros_like(local), param)


# one parameter's tensors (weight, gradient, exp_avg, exp_avg_sq, step count) in the order in which torch's AdamW kernel
# takes them
_Line = Sequence[Tensor]


def _lines(rows: Sequence[Row], cuts: bool) -> tuple[list[_Line], list[list[_Line]]]:
    """Divide the tensors on one device into tensors that AdamW updates in place and tensors that it updates in padded
    copies (see [Note: one form of AdamW]).

    Args:
        rows: This rank's local tensors of each parameter on the device.
        cuts: True if elements at a tensor's end that do not fill a vector of the kernel are updated in a padded copy.
            This is required on CPUs, where the kernel rounds these elements differently.

    Returns:
        A pair of lists. The first contains the tensors to update in place. The second contains groups of tensors. Each
        group is updated in one padded copy.
    """
    lines: list[_Line] = []
    copied: dict[tuple[object, ...], list[_Line]] = {}
    for *tensors, state in rows:
        step, param = state[STEP], tensors[0]
        numel, strides = param.numel(), param.stride()
        rest = numel % (_VECTOR // param.element_size()) if cuts else 0
        dense = all(map(Tensor.is_contiguous, tensors))
        if not dense and is_dense(param) and all(t.stride() == strides for t in tensors):
            # Weight, gradient and moments have the same memory order, so updating flat views of their memory gives the
            # same result.
            tensors, dense = [t.as_strided((numel,), (1,)) for t in tensors], True
        if dense and not rest:
            lines.append((*tensors, step))
            continue
        if dense and numel >= _SMALL:
            whole = numel - rest
            flats = [t.view(-1) for t in tensors]
            lines.append((*(t[:whole] for t in flats), step))
            tensors = [t[whole:] for t in flats]
        # On CPUs, parameters with equal dtypes and step counts are copied to one buffer. On other devices, each
        # parameter is copied separately, because comparing step counts would wait for the device.
        key = (*(t.dtype for t in tensors), float(step) if cuts else len(copied))
        copied.setdefault(key, []).append((*tensors, step))
    return lines, list(copied.values())


def _side_by_side(several: Sequence[_Line]) -> _Line:
    """Concatenate the weights of several parameters into one tensor, and likewise their gradients and their moments.
    The tensors are padded with zeros to a multiple of the CPU kernel's vector size."""
    *columns, steps = zip(*several, strict=True)
    missing = -sum(map(Tensor.numel, columns[0])) % (_VECTOR // columns[0][0].element_size())
    return (*(flattened([*column, column[0].new_zeros(missing)]) for column in columns), steps[0].clone())


def _update_(rows: Sequence[Row], group: Mapping[str, Any], device: torch.device) -> None:
    """Apply AdamW in place to the local tensors of parameters on one device. `group` contains lr, betas, eps and
    weight_decay."""
    lines, originals = _lines(rows, device.type == "cpu")
    copies = list(map(_side_by_side, originals))
    params, grads, exp_avgs, exp_avg_sqs, steps = map(list, zip(*lines, *copies, strict=True))
    beta1, beta2 = map(float, group["betas"])
    functional_adamw(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        steps,
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=float(group["lr"]),
        weight_decay=float(group["weight_decay"]),
        eps=float(group["eps"]),
        maximize=False,
    )
    for copy, targets in zip(copies, originals, strict=True):
        columns = list(zip(*targets, strict=True))
        # copy back the weight (index 0) and the two moments (2, 3), but not the gradient (1), which the step leaves
        # unchanged
        for number in (0, 2, 3):
            foreach_copy_(columns[number], unflattened(copy[number], columns[number]))
        foreach_copy_(columns[4], list(map(copy[4].view_as, columns[4])))
