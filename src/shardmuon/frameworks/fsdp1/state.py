"""State of FSDP1's parameters in the form that `FSDP.optim_state_dict` gathers.

[Note: alike in a unit]
    FSDP1 gathers each kind of state (`momentum_buffer`, `exp_avg`, ..) as one tensor as long as a unit's flat
    parameter, so it needs every kind for every tensor of the unit, of one dtype. Muon keeps other kinds for matrices
    than for the rest. What a tensor lacks is therefore saved as zeros, and dropped when it is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardmuon._fsdp1 import Unit
from shardmuon.engines.fsdp1 import place_of
from shardmuon.momentum.keeper import BUFFER, MOMENTS, SCALE

KINDS = (BUFFER, *MOMENTS)


def made_alike(groups: Sequence[Mapping[str, Any]], saved: dict[str, Any]) -> None:
    """Complete what `Optimizer.state_dict` made of original parameters, see [Note: alike in a unit]."""
    state = saved["state"]
    units: dict[int, list[tuple[int, Tensor]]] = {}
    for group, packed in zip(groups, saved["param_groups"], strict=True):
        for param, key in zip(group["params"], packed["params"], strict=True):
            place = place_of(param)
            if place is not None and place.piece is not None and place.unit.is_sharded and key in state:
                units.setdefault(id(place.unit), []).append((key, param))
    for members in units.values():
        if any(SCALE in state[key] for key, _ in members):
            continue  # 8-bit momentum: FSDP1 refuses it
        kinds = [kind for kind in KINDS if any(kind in state[key] for key, _ in members)]
        dtype = common_dtype(state[key] for key, _ in members)
        for key, param in members:
            state[key] = dict(state[key]) | {
                kind: state[key][kind].to(dtype) if kind in state[key] else _zeros(param, dtype) for kind in kinds
            }


def common_dtype(states: Iterable[Mapping[str, Any]]) -> torch.dtype:
    """One in which all kinds of state can be written without rounding."""
    found: torch.dtype | None = None
    for state in states:
        for kind in KINDS:
            if kind in state:
                dtype = state[kind].dtype
                found = dtype if found is None else torch.promote_types(found, dtype)
    return found or torch.float32


def flat_state(unit: Unit, parts: Sequence[tuple[Tensor, Mapping[str, Any]]]) -> dict[str, Any]:
    """One state as long as a flat parameter, of the states of its tensors (a leaf each, in any order)."""
    kinds = [kind for kind in KINDS if any(kind in state for _, state in parts)]
    dtype = common_dtype(state for _, state in parts)
    flat = unit.flat
    made: dict[str, Any] = {kind: torch.zeros(flat.shape, dtype=dtype, device=flat.device) for kind in kinds}
    steps = [state["step"] for _, state in parts if "step" in state]
    if steps:
        made["step"] = max(steps, key=float).detach().clone()
    for part, state in parts:
        piece = part._shardmuon_part.piece  # type: ignore[attr-defined]
        for kind in kinds:
            if kind in state:
                made[kind].narrow(0, piece.offset, piece.numel).copy_(state[kind].reshape(-1))
    return made


def part_state(part: Tensor, flat: Mapping[str, Any], *, use_muon: bool, counts: bool) -> dict[str, Any]:
    """What a flat parameter's state has of one of its tensors, in memory of its own.

    Args:
        part: The leaf of the tensor.
        flat: The state.
        use_muon: Whose it is.
        counts: Whether Muon counts steps here.
    """
    piece = part._shardmuon_part.piece  # type: ignore[attr-defined]
    kinds = (BUFFER,) if use_muon else MOMENTS
    made = {kind: flat[kind].narrow(0, piece.offset, piece.numel).clone().view(part.shape) for kind in kinds}
    if "step" in flat and (counts or not use_muon):
        step = flat["step"]
        made["step"] = torch.tensor(float(step), dtype=torch.float32, device="cpu")
    return made


def _zeros(param: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros((), dtype=dtype, device=param.device).expand(param.shape)
