"""State of the stages of variants (stage state): its creation, and its storage in group options if a
framework's checkpoint format has no place for it. See [Note: what a stage keeps] in variants.py.

[Note: carried state]
    FSDP1 and DeepSpeed can save only state tensors of the length of their flat parameters, and state that Adam has too.
    Stage state is neither. But it is small and equal on every rank, and both frameworks save and load group options
    unchanged. Therefore a saved group carries the stage state under the key `CARRIED`. A live optimizer's group has
    this key at most from loading to the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardmuon.layout.engines import Engine
from shardmuon.layout.views import Ints, MatrixView
from shardmuon.variants import KEPT_KEYS, Stages, keeping, stages_of

KEPT_DTYPE = torch.float32  # whatever the dtypes of weights and matrix products


def state_shapes(stages: Stages, view: MatrixView) -> dict[str, Ints]:
    """Map the key of each state tensor to its global shape, for a parameter with these matrices."""
    numbers = {stage.key: [stage.num_kept(m.rows, m.cols) for m in view.matrices] for stage in keeping(stages)}
    return {key: view.kept(of_stage).shape for key, of_stage in numbers.items()}


def start_kept(
    shapes: Mapping[str, Ints], engine: Engine, param: Tensor, state: Mapping[str, Any], *, stacked: bool
) -> dict[str, Tensor]:
    """Create zeros for each missing state tensor, on the parameter's device. `stacked` is True if the parameter is a
    stack of matrices."""
    missing = {key: shape for key, shape in shapes.items() if state.get(key) is None}
    return {key: engine.kept_zeros(param, shape, KEPT_DTYPE, stacked=stacked) for key, shape in missing.items()}


CARRIED = "kept_state"  # key in a saved group; its value maps parameter names or positions to dicts key -> tensor


def carry(group: MutableMapping[str, Any], states: Mapping[str, Mapping[str, Any]]) -> None:
    """Copy the stage state of some parameters, if there is any, to a saved group. The copies are on the CPU, like
    tensors that are read from files."""
    found = {
        name: {key: state[key].detach().to("cpu", copy=True) for key in KEPT_KEYS if state.get(key) is not None}
        for name, state in states.items()
    }
    if any(found.values()):
        group[CARRIED] = {name: kept for name, kept in found.items() if kept}


def carry_by_position(
    groups: Sequence[Mapping[str, Any]],  # the optimizer's groups
    saved: Mapping[str, Any],  # the optimizer's state dict, changed in place
    carries: Callable[[Tensor], bool] = lambda param: True,
) -> None:
    """Move stage state from the state of a state dict to its groups, keyed by the parameter's position in the group."""
    state = saved["state"]
    for group, packed in zip(groups, saved["param_groups"], strict=True):
        states: dict[str, Mapping[str, Any]] = {}
        for position, (param, key) in enumerate(zip(group["params"], packed["params"], strict=True)):
            if carries(param) and key in state:
                states[str(position)] = state[key]
                state[key] = {k: v for k, v in state[key].items() if k not in KEPT_KEYS}
        carry(packed, states)


def take_carried(groups: Iterable[MutableMapping[str, Any]]) -> dict[str, dict[str, Tensor]]:
    """Remove carried stage state from loaded groups and return it, by parameter name or position."""
    found: dict[str, dict[str, Tensor]] = {}
    for group in groups:
        found.update(group.pop(CARRIED, None) or {})
    return found


def with_carried(
    entries: Mapping[Any, Any],  # saved state: a parameter's key -> its state
    groups: Sequence[Mapping[str, Any]],  # saved groups
) -> Mapping[Any, Any]:
    """Copy a saved state, and add the stage state that its groups carry."""
    found = dict(entries)
    for group in groups:
        for position, kept in (group.get(CARRIED) or {}).items():
            key = group["params"][int(position)]
            found[key] = {**found.get(key, {}), **kept}
    return found


def check_carried(name: str, group: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Raise ValueError if a parameter's momentum was loaded without the state of its group's variant."""
    for stage in keeping(stages_of(group)):
        if state.get(stage.key) is None:
            raise ValueError(
                f"{name}: its momentum was loaded, and not {stage.key}, which variant={group['variant']!r} keeps: the "
                "checkpoint was saved with another variant. To begin from zeros, set the group's variant to None for "
                "one step"
            )
