"""State of variants' stages: makes it, checks it, and carries it in groups' options where a framework's files have
no place for it. See [Note: what a stage keeps] in variants/base.py; where it lies engines say.

[Note: carried state]
    FSDP1 and DeepSpeed save state as long as flat parameters, or as they know it of Adam. What a stage keeps is no such
    thing. But it is small and the same on every rank, and options of groups are saved and loaded by all of them as they
    are: so a saved group carries it, under `CARRIED`, and an optimizer's own group does between loading and its next
    step at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardmuon.layout.engines import Engine
from shardmuon.layout.views import Ints, MatrixView, kept_view
from shardmuon.variants import KEPT_KEYS, Stages, WeightStage, keeping, stages_of

Settled = MutableMapping[Tensor, bool]  # state tensors of stages on weights, once a step has looked at them

KEPT_DTYPE = torch.float32  # whatever weights and products are


def state_shapes(stages: Stages, view: MatrixView) -> dict[str, Ints]:
    """Key -> the global shape of each state tensor of a parameter with these matrices."""
    numbers = {stage.key: [stage.num_kept(m.rows, m.cols) for m in view.matrices] for stage in keeping(stages)}
    return {key: kept_view(view, of_stage).shape for key, of_stage in numbers.items()}


def start_kept(
    shapes: Mapping[str, Ints], engine: Engine, param: Tensor, state: Mapping[str, Any], *, stacked: bool
) -> dict[str, Tensor]:
    """Zeros for each state tensor that is missing, on the parameter's device. `stacked`: the parameter is a stack."""
    made: dict[str, Tensor] = {}
    for key, shape in shapes.items():
        if state.get(key) is None:
            local = engine.kept_shape(param, shape, stacked=stacked)
            zeros = torch.zeros(local, dtype=KEPT_DTYPE, device=engine.storage(param).device)
            made[key] = engine.wrap_kept(zeros, param, shape, stacked=stacked)
    return made


def unsettled(stages: Stages, state: Mapping[str, Any], settled: Settled) -> tuple[str, ...]:
    """Keys of state tensors that are missing, and of norms that no step has looked at since they were made or loaded.

    Checkpoints make state before there was a step, where a norm of 0 says that it is not known. Ranks must agree on
    these: stages on weights begin with a reduction for them, and a copy that only one rank lost would begin from zeros.
    """
    on_weights = {stage.key for stage in stages if isinstance(stage, WeightStage)}
    keys = [stage.key for stage in keeping(stages)]
    return tuple(k for k in keys if state.get(k) is None or (k in on_weights and state[k] not in settled))


def stored_kept(
    shapes: Mapping[str, Ints], engine: Engine, param: Tensor, state: Mapping[str, Any], *, stacked: bool
) -> tuple[Tensor, ...]:
    """Local storage of each state tensor of a parameter's stages, in the order of `shapes`.

    Raises:
        ValueError: A tensor is missing or has another layout or dtype; the message lacks the parameter's name.
    """
    found: list[Tensor] = []
    for key, shape in shapes.items():
        local = engine.kept_storage(state.get(key), param, shape, stacked=stacked)
        if isinstance(local, Tensor) and local.dtype != KEPT_DTYPE:
            local = f"of dtype {local.dtype}, not {KEPT_DTYPE}"
        if isinstance(local, str):
            raise ValueError(
                f"its {key} is {local}: the state was made for another layout or variant. Load it through "
                f"torch.distributed.checkpoint, which reshards it, or delete it: del optimizer.state[param][{key!r}]"
            )
        found.append(local)
    return tuple(found)


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
