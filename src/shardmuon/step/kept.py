"""Storage of stage state in saved parameter groups, for frameworks whose checkpoints cannot contain it as optimizer
state. Stage state is the state of a Muon variant's stages, such as NorMuon's second moments ([Note: state of stages] in
variants.py).

[Note: carried state]
    FSDP1 can save only state tensors that are as long as its flat parameters, and DeepSpeed's universal checkpoints can
    contain only Adam's state. Stage state fits neither format. But it is small and equal on every rank, and both
    frameworks save and load the options of parameter groups unchanged. So saved parameter groups contain the stage
    state under the key `CARRIED`. An optimizer's own parameter groups can contain this key only between loading and the
    next step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

from torch import Tensor

from shardmuon.variants import KEPT_KEYS, keeping, stages_of

# Key under which a saved parameter group contains stage state (such as NorMuon's second moments), as a nested dict:
# parameter name or position -> state key -> tensor.
CARRIED = "kept_state"


def carry(group: MutableMapping[str, Any], states: Mapping[str, Mapping[str, Any]]) -> None:
    """Copy stage state (the state of variants such as NorMuon) to a saved parameter group. `states` is a dict from the
    name or position of each parameter to the parameter's state. The copies are on the CPU, like tensors that are read
    from files."""
    found = {
        name: {key: state[key].detach().to("cpu", copy=True) for key in KEPT_KEYS if state.get(key) is not None}
        for name, state in states.items()
    }
    if any(found.values()):
        group[CARRIED] = {name: kept for name, kept in found.items() if kept}


def carry_by_position(saved: MutableMapping[str, Any]) -> None:
    """Move stage state (the state of variants such as NorMuon) from the entry "state" of a state dict to its parameter
    groups, in place. Each group stores its parameters' stage state by their position in the group."""
    state = saved["state"]
    for packed in saved["param_groups"]:
        carry(packed, {str(i): state[key] for i, key in enumerate(packed["params"]) if key in state})
    saved["state"] = {key: {k: v for k, v in of_one.items() if k not in KEPT_KEYS} for key, of_one in state.items()}


def take_carried(groups: Iterable[MutableMapping[str, Any]]) -> dict[str, dict[str, Tensor]]:
    """Remove stage state (the state of variants such as NorMuon) from loaded parameter groups. Return a dict from
    parameter name or position to the parameter's stage state."""
    found: dict[str, dict[str, Tensor]] = {}
    for group in groups:
        found.update(group.pop(CARRIED, None) or {})
    return found


def check_carried(name: str, group: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Raise ValueError if a parameter was loaded with momentum but without the state that the group's Muon variant
    (such as NorMuon) needs."""
    for stage in keeping(stages_of(group)):
        if state.get(stage.key) is None:
            raise ValueError(
                f"{name}: its momentum was loaded, and not {stage.key}, which variant={group['variant']!r} keeps: the "
                "checkpoint was saved with another variant. To begin from zeros, set the group's variant to None for "
                "one step"
            )
