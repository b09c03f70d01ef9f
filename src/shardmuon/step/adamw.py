"""AdamW for parameters that are not matrices: torch's functional AdamW, applied to local shards, with torch's state
keys.

[Note: one form of AdamW]
    On CPUs, torch's fused kernel processes a tensor in vectors of 64 bytes. It rounds the remaining elements at the end
    of the tensor differently, so results would depend on where a tensor is sharded. Therefore these elements are copied
    to a buffer and padded with zeros, so that the kernel processes all elements in vectors. The kernel also goes
    through memory in order and ignores strides, so tensors whose memory order differs from that of their weight are
    copied, too. On other devices, the kernel computes each element independently. See docs/adr/0022-one-adamw-form.md.
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
)
from shardmuon.layout.engines import Engine, engine_of
from shardmuon.momentum.keeper import BUFFER, MOMENTS, SCALE, STEP
from shardmuon.options import ADAMW_DEFAULTS
from shardmuon.variants import KEPT_KEYS

_VECTOR = 64  # largest number of bytes that the CPU kernel processes at a time (AVX512; torch 2.11 .. 2.13)
_SMALL = 1 << 14  # elements; smaller tensors are copied as a whole, not only their end


class Row(NamedTuple):
    """This rank's local tensors of one parameter in an AdamW step."""

    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    state: MutableMapping[str, Any]


def step_adamw(
    groups: Sequence[Mapping[str, Any]],
    state: MutableMapping[Tensor, dict[str, Any]],  # missing entries are created
    engines: Callable[[], set[Engine]],  # returns the engines (layout adapters) of Muon parameters with gradients
    seen: Mapping[int, Sequence[Row | None]] = MappingProxyType({}),  # index of a group -> its rows, None if not known
) -> None:
    """Take an AdamW step on the groups with use_muon=False. AdamW is elementwise, so ranks exchange data only if a
    gradient must be redistributed to its parameter's layout. Does not synchronize with accelerators."""
    for number, group in enumerate(groups):
        if group["use_muon"]:
            continue
        rows = seen.get(number, [None] * len(group["params"]))
        if None in rows:
            rows = _completed(groups, group["params"], rows, state, engines)
        of_devices: dict[torch.device, list[Row]] = {}
        for row in rows:
            assert row is not None, "all are complete"
            param, step = row.param, row.state[STEP]
            if not param.numel():  # an empty shard still counts steps, so that checkpoints agree on all ranks
                step += 1
                continue
            device = param.device
            if step.device != device:  # the step count was just created or loaded
                row.state[STEP] = step.to(device, non_blocking=device.type != "cpu")
            of_devices.setdefault(device, []).append(row)
        for device, alike in of_devices.items():
            _update_(alike, {**ADAMW_DEFAULTS, **group}, device)  # fills in options that the group lacks


def _completed(
    groups: Sequence[Mapping[str, Any]],
    params: Sequence[Tensor],
    rows: Sequence[Row | None],
    state: MutableMapping[Tensor, dict[str, Any]],
    engines: Callable[[], set[Engine]],
) -> list[Row]:
    """Return a row for each parameter of a group that takes part in the step: parameters with a gradient, and
    parameters that lack one only because this rank stores none of their elements. Create missing state. Collective if a
    gradient must be redistributed to the parameter's layout."""
    others = (p for group in groups if not group["use_muon"] for p in group["params"] if p.grad is not None)
    stepped = engines() | set(map(engine_of, others))  # engines (layout adapters) with a parameter in this step
    found: list[Row] = []
    for p, row in zip(params, rows, strict=True):
        grad, engine = p.grad, engine_of(p)
        if grad is None and p.requires_grad and engine in stepped and engine.lacks_gradient(p):
            grad = engine.wrap(torch.zeros_like(engine.storage(p)), p)
        if grad is None:
            continue
        if row is None:
            kept, grad = state[p], grad if engine.is_aligned(grad, p) else engine.align(grad, p)
            init_state(p, grad, kept)
            weight, local, moment, square = map(engine.storage, (p, grad, *map(kept.__getitem__, MOMENTS)))
            row = Row(weight, local, moment, square, kept)
        found.append(row)
    return found


def init_state(param: Tensor, grad: Tensor, state: MutableMapping[str, Any]) -> None:
    """Create `step`, `exp_avg` and `exp_avg_sq` if any of them is missing, as in torch.optim.AdamW, in the parameter's
    layout.

    Deletes Muon's momentum and variant state, which would be stale if the parameter returned to Muon. A `step` left
    over from Muon is replaced, because it counts Muon's steps.
    """
    for key in (BUFFER, SCALE, *KEPT_KEYS):
        state.pop(key, None)
    if all(key in state for key in (STEP, *MOMENTS)):
        return
    engine = engine_of(param)
    local = engine.storage(param)
    state[STEP] = torch.zeros((), dtype=torch.float32, device="cpu")  # `step_adamw` moves it to the weight's device
    for key in MOMENTS:
        state[key] = engine.wrap(torch.zeros_like(local), param)


_Tensors = Sequence[Tensor]  # weight, gradient, exp_avg, exp_avg_sq
_Line = tuple[_Tensors, Tensor]  # one entry for each of the kernel's lists of tensors, and its step count


def _lines(rows: Sequence[Row], cuts: bool) -> tuple[list[_Line], list[Tensor], list[tuple[_Line, list[_Tensors]]]]:
    """Split the tensors on one device into those stepped in place and those stepped in padded copies: see
    [Note: one form of AdamW].

    Args:
        rows: Parameters on one device.
        cuts: True on CPUs, where the kernel rounds the end of a tensor differently.

    Returns:
        Tensors to step in place; step counts of parameters that are stepped only in copies; copies, each with the
        tensors to copy the results back to.
    """
    lines: list[_Line] = []
    uncounted: list[Tensor] = []
    copied: dict[tuple[object, ...], tuple[Tensor, list[_Tensors]]] = {}
    for *tensors, state in rows:
        step, param = state[STEP], tensors[0]
        numel, strides = param.numel(), param.stride()
        rest = numel % (_VECTOR // param.element_size()) if cuts else 0
        dense = all(map(Tensor.is_contiguous, tensors))
        if not dense and is_dense(param) and all(t.stride() == strides for t in tensors):
            # all have the same memory order, so flat views of their memory give the same result
            tensors, dense = [t.as_strided((numel,), (1,)) for t in tensors], True
        if dense and not rest:
            lines.append((tensors, step))
            continue
        end: _Tensors = tensors
        if dense and numel >= _SMALL:
            whole = numel - rest
            flats = [t.view(-1) for t in tensors]
            lines.append(([t[:whole] for t in flats], step))
            end = [t[whole:] for t in flats]
        else:
            uncounted.append(step)
        # on CPUs, copies with equal dtypes and step counts share a buffer; elsewhere, reading a count would block
        key = (*(t.dtype for t in end), float(step) if cuts else len(copied))
        copied.setdefault(key, (step, []))[1].append(end)
    return lines, uncounted, [(_side_by_side(several, step), several) for step, several in copied.values()]


def _side_by_side(several: Sequence[_Tensors], step: Tensor) -> _Line:
    """Concatenate the tensors of several parameters into copies that are padded with zeros to whole vectors."""
    first = several[0][0]
    missing = -sum(row[0].numel() for row in several) % (_VECTOR // first.element_size())
    columns = zip(*several, strict=True)
    return [flattened([*column, column[0].new_zeros(missing)]) for column in columns], step.clone()


def _copy_back(copied: _Line, targets: Sequence[_Tensors]) -> None:
    """Copy updated weights and moments from the concatenated copies back to the original tensors."""
    for number in (0, 2, 3):
        column = [row[number] for row in targets]
        line = copied[0][number]
        parts = line[: sum(map(Tensor.numel, column))].split([t.numel() for t in column])
        foreach_copy_(column, [p if t.dim() == 1 else p.view(t.shape) for p, t in zip(parts, column, strict=True)])


def _update_(rows: Sequence[Row], group: Mapping[str, Any], device: torch.device) -> None:
    """Take one AdamW step on parameters of one device, in place. `group` has lr, betas, eps and weight_decay."""
    lines, uncounted, copies = _lines(rows, device.type == "cpu")
    lines += [line for line, _ in copies]
    params, grads, exp_avgs, exp_avg_sqs = map(list, zip(*(tensors for tensors, _ in lines), strict=True))
    beta1, beta2 = map(float, group["betas"])
    functional_adamw(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        [step for _, step in lines],
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=float(group["lr"]),
        weight_decay=float(group["weight_decay"]),
        eps=float(group["eps"]),
        maximize=False,
    )
    for copied, targets in copies:
        _copy_back(copied, targets)
    if uncounted:
        torch._foreach_add_(uncounted, 1)
