"""Validation of state dicts. A state dict is checked completely against an optimizer before anything changes. This
module does not communicate.

[Note: state of other optimizers]
    In this package and in torch.optim.Muon, momentum is an average, B <- mu B + (1 - mu) G. Other optimizers store the
    sum B <- mu B + G under the same key. If this sum were loaded as an average, it would be 20 times too large at mu =
    0.95. A state dict does not show whether its momentum is an average or a sum. So this module accepts only groups
    with Muon's options, and does not convert momentum of other optimizers.

[Note: state that is not there]
    Before a trainable parameter has had its first gradient, its state consists of zeros. These zeros are saved, too, so
    that every rank has the same keys. If a checkpoint has state for some trainable parameters but not for others, it is
    therefore damaged, and loading it raises an error. A parameter whose entry exists but is empty starts without state.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, MutableMapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from shardmuon.errors import about
from shardmuon.layout.engines import engine_for, engine_of
from shardmuon.layout.engines.base import named_params
from shardmuon.layout.engines.fsdp1 import UnitPlace
from shardmuon.layout.views import Ints, MatrixView
from shardmuon.momentum.keeper import BUFFER, MOMENTS, SCALE, STEP, Keeper
from shardmuon.options import ELSEWHERE, PLACE_OPTIONS, check_hyperparameters, loaded_over, view_of
from shardmuon.step.adamw import init_state
from shardmuon.step.kept import CARRIED
from shardmuon.step.validate import state_storage
from shardmuon.variants import KEPT_KEYS, Stages, keeping, stages_of

_ADAMW_KEYS = (STEP, *MOMENTS)
_NOT_CONVERTED = (
    "State of other optimizers is not converted: begin with fresh state and warm lr up over about 50 steps, or copy "
    "what means the same, such as momentum_buffer of torch.optim.Muon, by hand (docs/migration.md)"
)


def _kept_keys(group: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys of the state tensors that a parameter group's Muon variant (such as NorMuon) stores for each
    parameter."""
    return tuple(stage.key for stage in keeping(stages_of(group))) if group["use_muon"] else ()


def _state_shapes(stages: Stages, view: MatrixView) -> dict[str, Ints]:
    """Return the global shapes of the state tensors that a Muon variant (such as NorMuon) stores for a parameter, keyed
    by state key. `view` defines the matrices of the parameter."""
    numbers = {stage.key: [stage.num_kept(m.rows, m.cols) for m in view.matrices] for stage in keeping(stages)}
    return {key: view.kept(of_stage).shape for key, of_stage in numbers.items()}


def init_missing(param: Tensor, group: Mapping[str, Any], state: MutableMapping[str, Any], keeper: Keeper) -> None:
    """Add missing entries (tensors of zeros) to a parameter's optimizer state. If the parameter has moved from AdamW to
    Muon or from Muon to AdamW, also remove the state of the previous optimizer. Modify `state` in place."""
    if not group["use_muon"]:
        init_state(param, state)
    elif not {BUFFER, *_kept_keys(group)} <= state.keys():
        view = view_of("", param, group)
        if BUFFER not in state:
            keeper.start(param, view.num_row_dims, state)
        # If the layout of a shard is still unknown, so are its matrices. The first step then creates the state that the
        # Muon variant stores for the shard.
        if view.matrices:
            engine, stacked = engine_for(param, group), view.num_row_dims == 2
            for key, shape in _state_shapes(stages_of(group), view).items():
                if state.get(key) is None:
                    state[key] = engine.kept_zeros(param, shape, torch.float32, stacked=stacked)


def read_state(
    groups: Sequence[Mapping[str, Any]],  # parameter groups of the optimizer that loads the state dict; not modified
    saved: Mapping[str, Any],  # result of `Optimizer.state_dict`, which identifies parameters by number or by name
    keeper: Keeper,
) -> tuple[dict[Any, dict[str, Any]], list[dict[str, Any]]]:
    """Check a state dict, and convert it to the state and parameter groups of an optimizer.

    Returns:
        A tuple (state, groups). `state` is a dict from parameter to the parameter's state, in the optimizer's dtypes
        and on its devices. `groups` are the new parameter groups. As in torch, tensors whose dtype and device do not
        change are shared with `saved`, not copied.

    Raises:
        ValueError: The parameters, options or state in the state dict do not fit the optimizer.
    """
    entries, theirs = _parts_of(saved)
    if len(theirs) != len(groups):
        raise ValueError(
            f"the state dict has {len(theirs)} parameter groups, the optimizer {len(groups)}. Make the groups as they "
            "were when it was saved"
        )
    merged = [merged_group(i, *pair) for i, pair in enumerate(zip(groups, theirs, strict=True))]
    counts = Counter(key for group in theirs for key in group["params"])
    wrong = [f"{key!r} is listed {count} times" for key, count in counts.items() if count > 1]
    wrong += [f"{key!r} has state and is listed nowhere" for key in entries if key not in counts]
    if wrong:
        raise ValueError(f"in the state dict {wrong[0]} ({len(wrong)} such faults). The checkpoint is damaged")
    state, lacking = dict[Any, dict[str, Any]](), list[str]()
    for index, (group, their_group) in enumerate(zip(merged, theirs, strict=True)):
        for (name, p), key in zip(named_params(group, index), their_group["params"], strict=True):
            found = entries.get(key)
            unsaved = found is None and bool(entries) and p.requires_grad
            if unsaved and not UnitPlace.is_elsewhere(p):
                lacking.append(f"{name}: the state dict has no state for it (key {key!r})")
            # For an empty FSDP1 shard, no momentum is saved, but the rank still needs the state of the Muon variant.
            elif found or (unsaved and _kept_keys(group)):
                with about(name):
                    state[p] = _read_param(p, found or {}, group, their_group, keeper)
    if lacking:
        raise ValueError(
            f"{lacking[0]}, although it has for {len(state)} other parameters ({len(lacking)} of them lack it). The "
            "checkpoint is incomplete or of another model. If the parameter is to start afresh, set its entry to {}; "
            "for checkpoint.load, freeze it until it is loaded (requires_grad_(False))"
        )
    return state, merged


def _parts_of(saved: Any) -> tuple[Mapping[Any, Any], Sequence[Mapping[str, Any]]]:
    """Return the two entries of an optimizer's state dict: a dict from parameter key to the parameter's state, and the
    parameter groups. If the groups contain state of a Muon variant (such as NorMuon's second moments), it is added to
    the dict.

    Raises:
        ValueError: `saved` is not an optimizer's state dict.
    """
    given: Mapping[str, Any] = saved if isinstance(saved, Mapping) else {}
    entries: Any = given.get("state")
    groups: Any = given.get("param_groups")
    dicts = isinstance(entries, Mapping) and isinstance(groups, (list, tuple))
    if not dicts or not all(isinstance(g, Mapping) and isinstance(g.get("params"), (list, tuple)) for g in groups):
        raise ValueError(
            "an optimizer's state dict has a dict 'state' and 'param_groups', dicts that list 'params'; found "
            f"{sorted(map(str, given))[:6] or type(saved).__name__}. Give what optimizer.state_dict() or "
            "torch.distributed.checkpoint returned (Megatron-LM keeps it under 'optimizer'). If it is that, the "
            "checkpoint is damaged"
        )
    found = dict(entries)
    for group in groups:
        for position, kept in (group.get(CARRIED) or {}).items():
            key = group["params"][int(position)]
            found[key] = {**found.get(key, {}), **kept}
    return found, groups


def merged_group(index: int, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Merge an optimizer's group with a saved group. The result has the saved options, and the optimizer's own value
    for each option that the saved group lacks.

    Raises:
        ValueError: The saved group does not fit the optimizer's group `index`.
    """
    where = f"group {index}: "
    if len(mine["params"]) != len(theirs["params"]):
        raise ValueError(
            f"{where}the state dict lists {len(theirs['params'])} parameters, the optimizer {len(mine['params'])}, "
            f"beginning with {named_params(mine, index)[0][0] if mine['params'] else 'none'}. Give the optimizer the "
            "parameters it was saved with"
        )
    _check_names(where, mine, theirs)
    if "use_muon" in theirs and bool(theirs["use_muon"]) != bool(mine["use_muon"]):
        kinds = {True: "Muon's (use_muon=True)", False: "AdamW's (use_muon=False)"}
        raise ValueError(
            f"{where}the checkpoint's group is {kinds[bool(theirs['use_muon'])]}, the optimizer's "
            f"{kinds[bool(mine['use_muon'])]}. Route the parameters as they were, or start this group afresh"
        )
    if mine.get("variant") is not None and "variant" in theirs and theirs["variant"] is None:
        raise ValueError(
            f"{where}the checkpoint was saved with variant=None, the optimizer has {mine['variant']!r}. Load it with "
            "variant=None, and set the groups' variant afterwards to begin with it from here"
        )
    for key in ELSEWHERE.keys() & theirs.keys():
        raise ValueError(f"{where}the state dict has {key}={theirs[key]!r}, but {key} {ELSEWHERE[key]}")
    # keys of a saved group that are not copied to the optimizer's group, for example options that hold process groups
    kept = {"params", CARRIED, *PLACE_OPTIONS}
    if "use_muon" not in theirs and "ns_coefficients" in theirs:
        kept.add("eps")  # an AdamW group keeps its own eps, because torch.optim.Muon's eps has a different meaning
    group = loaded_over(mine, {k: deepcopy(v) for k, v in theirs.items() if k not in kept})
    check_hyperparameters(where, group)
    if group["use_muon"]:
        for name, p in named_params(group, index):
            view_of(name, p, group)
    return group


def _check_names(where: str, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Raise ValueError if the optimizer's group and the saved group have different parameter names, or the same names
    in a different order. If only one of the groups has names, nothing is compared.

    State is assigned to parameters by position. Without this check, two parameters of equal shape could get each
    other's state.
    """
    # Parameter names are compared without the parts that torch.compile, FSDP1, activation checkpointing and DDP add.
    added = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module"}
    pairs = zip(mine.get("param_names") or (), theirs.get("param_names") or (), strict=False)
    for position, names in enumerate(pairs):
        own, other = ([part for part in str(name).split(".") if part not in added] for name in names)
        if own != other:
            raise ValueError(
                f"{names[0]}: parameter {position} of {where[:-2]} is called {names[1]!r} in the state dict. Give the "
                "optimizer its parameters in the saved order"
            )


def _read_param(
    p: Tensor, found: Any, group: Mapping[str, Any], theirs: Mapping[str, Any], keeper: Keeper
) -> dict[str, Any]:
    """Check and convert one parameter's saved state.

    State that only a framework needs is dropped. For example, Megatron saves a step count for every parameter, and
    FSDP1 saves zeros for state that a parameter does not have, such as AdamW's second moment for a parameter that Muon
    updates (see frameworks/fsdp1.py).

    Args:
        p: The parameter.
        found: The parameter's saved state.
        group: The parameter's group in the optimizer, with the options of the saved group.
        theirs: The saved group that contains the parameter.
        keeper: Object that determines the dtype and device of the momentum.

    Raises:
        ValueError: The state does not fit the parameter. The caller adds the parameter's name to the message.
    """
    _check_keys(p, found, group, theirs)
    engine, own, state = engine_for(p, group), _ADAMW_KEYS, dict[str, Any]()
    device = engine.storage(p).device
    if group["use_muon"]:
        own, view = (BUFFER, SCALE, *((STEP,) if keeper.rounds else ())), view_of("", p, group)
        stacked, shapes = view.num_row_dims == 2, _state_shapes(stages_of(group), view)
        keeper.check_coded(engine_of(p), p, view.num_row_dims, found)
        for key, shape in shapes.items():
            kept = engine.kept_storage(found[key], p, shape, stacked=stacked)
            if isinstance(kept, str):
                raise ValueError(f"its {key} in the checkpoint is {kept}")
            state[key] = found[key].to(device=device, dtype=torch.float32)
    return state | {key: _read_value(p, key, found[key], keeper, device) for key in own if key in found}


def _check_keys(p: Tensor, found: Any, group: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Raise ValueError if the keys of a parameter's saved state do not match the optimizer (Muon or AdamW) and variant
    of the parameter's group. The caller adds the parameter's name to the error message."""
    kind, needed = ("Muon", {BUFFER, *_kept_keys(group)}) if group["use_muon"] else ("AdamW", {*_ADAMW_KEYS})
    there = {*found} if isinstance(found, Mapping) else set()
    keys = sorted(map(str, there)) if isinstance(found, Mapping) else type(found).__name__
    if kind == "Muon" and BUFFER not in there and UnitPlace.is_elsewhere(p):
        needed.discard(BUFFER)  # for an empty FSDP1 shard, a rank has no momentum, only the state of the Muon variant
    lacking = sorted(needed - there)
    if kind == "Muon" and lacking and BUFFER not in lacking:
        raise ValueError(
            f"its state in the checkpoint is {keys} and lacks {lacking}, which variant={group['variant']!r} keeps: it "
            "was saved without that. Load it with variant=None, and set the groups' variant afterwards to begin with "
            "it from here"
        )
    known = {BUFFER, SCALE, *_ADAMW_KEYS, *(KEPT_KEYS if kind == "Muon" else ())}
    if lacking or not there <= known:
        raise ValueError(
            f"its state in the checkpoint is {keys}, {kind}'s is {sorted(needed)}. It was saved by another optimizer, "
            f"or the parameter was routed otherwise. {_NOT_CONVERTED}"
        )
    marks = ("lr", "momentum", "ns_coefficients") if kind == "Muon" else ("lr", "betas")
    lacks = next((mark for mark in marks if mark not in theirs), None)
    if lacks is not None:
        raise ValueError(
            f"the checkpoint's group has no {lacks!r} (it has {sorted(map(str, theirs))}), so it was not saved by "
            f"{kind}: its buffers may mean something else. {_NOT_CONVERTED}"
        )


def _read_value(p: Tensor, key: str, value: Any, keeper: Keeper, device: torch.device) -> Tensor:
    """Check one value of a parameter's state, and convert it to the optimizer's dtype and device."""
    if key == STEP:  # like torch's AdamW, the optimizer stores the step count as an fp32 tensor
        count = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        if type(count) not in (int, float) or not 0 <= count < math.inf or count != int(count):
            raise ValueError(f"its step in the checkpoint is {value!r}, not a whole number of at least 0")
        return torch.tensor(float(count), dtype=torch.float32, device=device)
    if key == SCALE:  # `Keeper.check_coded` has already checked the scales of 8-bit momentum
        return keeper.take(p, key, value)
    is_coded = key == BUFFER and isinstance(value, Tensor) and value.dtype == torch.int8
    if not is_coded and (not isinstance(value, Tensor) or not value.is_floating_point()):
        found = f"of dtype {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise ValueError(f"its {key} in the checkpoint is {found}, not a floating-point tensor")
    # `state_storage` raises ValueError if the saved tensor and the parameter differ in shape or placement
    state_storage(p, value, key, engine_of(p), engine_of(p).storage(p))
    return keeper.take(p, key, value) if key == BUFFER else value.to(device=p.device, dtype=p.dtype)
