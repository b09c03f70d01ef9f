"""State of variants' stages, carried in the groups' options where a framework's checkpoints have no place for it.

FSDP1 and DeepSpeed save state as long as flat parameters, or as they know it of Adam. What a stage keeps is no such
thing. But it is small and the same on every rank, and options of groups are saved and loaded by all of them as they
are: so a saved group carries it, under `CARRIED`, and an optimizer's own group does between loading and its next step
at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor

from shardmuon.variants import KEPT_KEYS, keeping, stages_of

CARRIED = "kept_state"  # in a saved group: name, or position among its parameters -> key -> tensor


def kept_in(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Copies of what stages keep of a parameter."""
    return {key: state[key].detach().clone() for key in KEPT_KEYS if state.get(key) is not None}


def carry(group: MutableMapping[str, Any], kept: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Let a saved group carry what is kept of its parameters, if anything is."""
    found = {name: dict(of_param) for name, of_param in kept.items() if of_param}
    if found:
        group[CARRIED] = found


def carry_by_position(
    groups: Sequence[Mapping[str, Any]],  # the optimizer's
    saved: Mapping[str, Any],  # its state dict, changed
    carries: Callable[[Tensor], bool] = lambda param: True,
) -> None:
    """Move what stages keep of parameters from the state of a state dict into its groups, by position."""
    state = saved["state"]
    for group, packed in zip(groups, saved["param_groups"], strict=True):
        kept: dict[str, dict[str, Tensor]] = {}
        for position, (param, key) in enumerate(zip(group["params"], packed["params"], strict=True)):
            if carries(param) and key in state:
                kept[str(position)] = kept_in(state[key])
                state[key] = {k: v for k, v in state[key].items() if k not in KEPT_KEYS}
        carry(packed, kept)


def take_carried(groups: Iterable[MutableMapping[str, Any]]) -> dict[str, dict[str, Tensor]]:
    """Take off loaded groups what they carry."""
    found: dict[str, dict[str, Tensor]] = {}
    for group in groups:
        found.update(group.pop(CARRIED, None) or {})
    return found


def with_carried(
    entries: Mapping[Any, Any],  # parameter's key -> its state
    groups: Sequence[Mapping[str, Any]],  # saved ones
) -> Mapping[Any, Any]:
    """State by parameters' keys, completed by what the groups carry by position."""
    found = dict(entries)
    for group in groups:
        for position, kept in (group.get(CARRIED) or {}).items():
            key = group["params"][int(position)]
            found[key] = {**found.get(key, {}), **kept}
    return found


def loaded_over(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """A group's options with a saved group's over them. A variant that only ours has stays: if the state lacks what it
    keeps, that is an error, not the end of the variant in silence."""
    group = {**mine, **theirs}
    if mine.get("variant") is not None and group["variant"] is None:
        group["variant"] = mine["variant"]
    return group


def missing_fault(name: str, group: Mapping[str, Any], state: Mapping[str, Any]) -> str | None:
    """The fault of a parameter whose momentum was loaded, and not what its variant keeps; None: there is none."""
    lacking = [stage.key for stage in keeping(stages_of(group)) if state.get(stage.key) is None]
    if not lacking:
        return None
    return (
        f"{name}: its momentum was loaded, and not {lacking[0]}, which variant={group['variant']!r} keeps: the "
        "checkpoint was saved with another variant. To begin from zeros, set "
        "the group's variant to None for one step"
    )
