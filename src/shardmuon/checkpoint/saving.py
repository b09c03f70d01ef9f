"""Save and load whole jobs on any layout, read other Muons' state, write torch's."""

from __future__ import annotations

import os
import warnings
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.utils._pytree import tree_map_only

from shardmuon._torch import names_in
from shardmuon.carried import CARRIED, carry
from shardmuon.checkpoint.plain_shards import as_global, describe_shards
from shardmuon.checkpoint.state import init_missing, merged_group, placed_like
from shardmuon.checkpoint.vetting import OptionsPlanner, VettedPlanner, VettedReader
from shardmuon.comm.vote import run_together
from shardmuon.errors import HALF_LOADED, ExchangeError, fault_text, made_public
from shardmuon.layout.engines.base import name_of
from shardmuon.layout.engines.fsdp1 import place_of
from shardmuon.momentum.keeper import BUFFER, MOMENTS, SCALE, STEP, Keeper
from shardmuon.options import per_step
from shardmuon.step.options import view_of
from shardmuon.variants import KEPT_KEYS

Muon = Any  # `shardmuon.Muon`, which stands above

_MUON_OPTIONS = ("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
_ADAMW_OPTIONS = ("lr", "weight_decay", "betas", "eps")


def save(path: str | os.PathLike[str], model: nn.Module, optimizer: Muon) -> None:
    """Write weights, state and options with torch.distributed.checkpoint. Collective among all ranks.

    Args:
        path: A folder.
        model: Its weights are saved.
        optimizer: Its state and options are.

    Raises:
        ValueError: What is to be saved cannot be read on some rank, or a step was broken off. On every rank; nothing is
            written.
        ExchangeError: A step is under way: a signal handler has called this. On this rank.
    """
    if optimizer.in_step:  # others may be in its exchanges: nobody can be told
        raise ExchangeError(optimizer.torn())

    with made_public():
        state = run_together(partial(_state_of, model, optimizer))
        table = describe_shards(optimizer)
        state = run_together(partial(as_global, state, model, optimizer, table))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        dcp.save(state, checkpoint_id=path)


def load(path: str | os.PathLike[str], model: nn.Module, optimizer: Muon) -> None:
    """Read what `save` wrote, on any layout and number of ranks. Collective among all ranks.

    `torch.distributed.checkpoint.load` writes into the tensors it is given, which are the optimizer's own: a damaged
    file leaves them half old, half new. This reads into copies and takes them over when all of it has been read and
    checked, at the price of that memory and, at the end, of the weights' once more. A file cannot run code: see
    `shardmuon.checkpoint.vetting`. The groups take all options that the file has, and frozen parameters their state.

    Raises:
        CheckpointException: A file is missing, damaged, or holds more than a checkpoint. On every rank; both are
            unchanged.
        ValueError: The checkpoint does not fit the optimizer on some rank, or the model itself refuses its weights
            there (a hook, too little memory). On every rank; both are unchanged. If a model refuses its own old weights
            as well, the optimizer makes no step before it has loaded a checkpoint.
    """
    before, frozen = (optimizer.state, optimizer.param_groups, optimizer.broken), list[Tensor]()
    saved: dict[str, Any] = {"optimizer": {}}
    with made_public():
        table = describe_shards(optimizer)
        reader, options, planner = run_together(lambda: (VettedReader(path), OptionsPlanner(), VettedPlanner()))
    _read(saved, reader, options)
    try:
        with made_public():
            groups = run_together(partial(_make_room, model, optimizer, saved["optimizer"], options.kept, frozen))
            state = run_together(partial(_places, model, optimizer, options.kept))
            targets = run_together(partial(as_global, state, model, optimizer, table))
        targets["optimizer"] = {"state": targets["optimizer"]["state"]}
        _read(targets, reader, planner)
        with made_public():
            state["optimizer"] = run_together(
                partial(_for_torch, model, optimizer, state["optimizer"]["state"], groups)
            )
        _take_over(state, model, optimizer)
    except BaseException:
        broken = optimizer.broken
        optimizer.state, optimizer.param_groups, optimizer.broken = before
        if broken is not None:
            optimizer.broken = broken
        raise
    finally:
        for p in frozen:
            p.requires_grad_(False)


def _read(targets: dict[str, Any], reader: VettedReader, planner: VettedPlanner) -> None:
    """Let DCP read into these. Collective."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        try:
            dcp.load(targets, storage_reader=reader, planner=planner)
        except CheckpointException as wrong:
            if reader.fault is None or reader.fault in str(wrong):
                raise
            # torch 2.11 says "metadata is None" of whatever was wrong with it
            fault: BaseException = ValueError(reader.fault)
            faults = {rank: (fault, trace) for rank, (_, trace) in wrong.failures.items()}
            raise CheckpointException(reader.fault, faults) from None


def _make_room(
    model: nn.Module,
    optimizer: Muon,
    saved: Mapping[str, Any],
    kept: Mapping[str, Collection[str]],
    thawed: list[Tensor],
) -> list[dict[str, Any]]:
    """Give the optimizer the groups that it will have and zeros of the keys that the file has, and frozen parameters
    that have state there `requires_grad`, as torch loads none of others. Returns the saved groups in its order."""
    names = names_in(model)
    theirs = _paired(optimizer.param_groups, saved.get("param_groups") or [], names)
    merged = [merged_group(i, *pair) for i, pair in enumerate(zip(optimizer.param_groups, theirs, strict=True))]
    state: defaultdict[Tensor, Any] = defaultdict(dict)
    for group in merged:
        for p in group["params"]:
            name = names[id(p)]
            found = kept.get(name)
            if not found and p.requires_grad:
                raise ValueError(
                    f"{name}: the checkpoint has no state for it: it was frozen when it was saved, or the checkpoint "
                    "is damaged or of another model. To let it start afresh, call requires_grad_(False) on it, load, "
                    "and train it again"
                )
            if not found:
                continue
            if not p.requires_grad:
                thawed.append(p)
                p.requires_grad_(True)
            keeper, coded = optimizer.keeper, SCALE in found
            if group["use_muon"] and coded != (keeper.dtype == "int8"):  # as it is in the file: a step converts it
                keeper = Keeper("int8" if coded else None, None, False)
            init_missing(p, group, state[p], keeper)
    optimizer.param_groups, optimizer.state, optimizer.broken = merged, state, None
    return theirs


def _paired(
    mine: Sequence[Mapping[str, Any]], saved: Sequence[dict[str, Any]], names: Mapping[int, str]
) -> list[dict[str, Any]]:
    """The saved group of each of the optimizer's, by the names of its parameters.

    Raises:
        ValueError: Groups have other members.
    """
    left, found = list(saved), []
    for index, group in enumerate(mine):
        lost = next((at for at, p in enumerate(group["params"]) if id(p) not in names), None)
        if lost is not None:
            raise ValueError(f"{name_of(group, index, lost)}: it is no parameter of the model. Give the whole model")
        members = [names[id(p)] for p in group["params"]]
        other = next((g for g in left if set(g["params"]) == set(members)), None)
        if other is None:
            raise ValueError(
                f"group {index} ({', '.join(members[:3])}, ..; {len(members)} parameters): no group of the checkpoint "
                f"has these parameters. It has groups of {', '.join(str(len(g['params'])) for g in saved)} parameters. "
                "Make the groups as they were when it was saved"
            )
        left.remove(other)
        found.append(other)
    if left:
        raise ValueError(
            f"the checkpoint has a group more ({', '.join(left[0]['params'][:3])}, ..) than the optimizer. Make the "
            "groups as they were when it was saved"
        )
    return found


def _state_of(model: nn.Module, optimizer: Muon) -> dict[str, Any]:
    """Weights, and state and groups by names, alike on every layout: without what FSDP1's form adds, and what stages
    keep at its parameter. Collective."""
    found: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
    for group in found["param_groups"]:
        for position, kept in (group.pop(CARRIED, None) or {}).items():
            found["state"].setdefault(group["params"][int(position)], {}).update(kept)
        unused: tuple[str, ...] = MOMENTS if group["use_muon"] else (BUFFER,)
        for name in group["params"]:
            entry = found["state"].get(name, {})
            if group["use_muon"] and any(key in entry for key in MOMENTS) and not optimizer.keeper.rounds:
                unused = (*MOMENTS, STEP)
            for key in unused:
                entry.pop(key, None)
    return {"model": get_model_state_dict(model), "optimizer": found}


def _places(model: nn.Module, optimizer: Muon, kept: Mapping[str, Collection[str]]) -> dict[str, Any]:
    """Copies of weights and zeros of state, of what the file has. Collective."""
    found = _state_of(model, optimizer)
    state = found["optimizer"]["state"]
    for name, entry in state.items():
        state[name] = {key: value for key, value in entry.items() if key in kept.get(name, ())}
    return _copied(found)


def _for_torch(
    model: nn.Module, optimizer: Muon, state: dict[str, dict[str, Any]], groups: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """What was read, in the form that torch's functions give on: FSDP1's parameters have what stages keep in groups."""
    own = names_in(model)
    for group, mine in zip(groups, optimizer.param_groups, strict=True):
        theirs = {group["params"][int(at)]: kept for at, kept in (group.pop(CARRIED, None) or {}).items()}
        carried: dict[str, dict[str, Tensor]] = {}
        for position, p in enumerate(mine["params"]):
            entry = state.get(own[id(p)], {})
            for key, whole in theirs.get(own[id(p)], {}).items():
                entry[key] = placed_like(whole, optimizer.state[p].get(key))
            place = place_of(p)
            if place is not None and place.is_sharded:
                carried[str(position)] = {key: entry.pop(key) for key in KEPT_KEYS if key in entry}
        carry(group, carried)
    return {"state": state, "param_groups": list(groups)}


def _take_over(state: dict[str, Any], model: nn.Module, optimizer: Muon) -> None:
    """Let model and optimizer take what was read, on all ranks or on none. Collective."""
    strict = StateDictOptions(strict=True)
    weights: dict[str, Any] = {}
    with made_public():
        try:  # the optimizer first: it may refuse
            run_together(lambda: set_optimizer_state_dict(model, optimizer, state["optimizer"]))
            run_together(lambda: weights.update(_copied(get_model_state_dict(model))))
            run_together(lambda: set_model_state_dict(model, state["model"], options=strict))
        except BaseException as wrong:
            try:
                run_together(lambda: set_model_state_dict(model, weights, options=strict) if weights else None)
            except BaseException:
                optimizer.broken = f"weights are half loaded: {fault_text(wrong)}. {HALF_LOADED}"
            raise


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    copies: dict[str, Any] = tree_map_only(Tensor, lambda t: t.detach().clone(), state)
    return copies


def to_torch_muon(optimizer: Muon) -> tuple[dict[str, Any], dict[str, Any]]:
    """State dicts for a torch.optim.Muon over the Muon groups and a torch.optim.AdamW over the others.

    Both list parameters in this optimizer's order. With the method "torch" training goes on there bit for bit.

    Returns:
        (Muon's, AdamW's); tensors are copies.

    Raises:
        ValueError: A parameter or option has no counterpart in torch.optim.Muon.
    """
    adamw_defaults = torch.optim.AdamW([torch.zeros(1, device="cpu")]).state_dict()["param_groups"][0]
    # the arithmetic that this optimizer uses itself, see shardmuon.step.adamw
    adamw_defaults |= {"fused": True}
    muon: dict[str, Any] = {"state": {}, "param_groups": []}
    adamw: dict[str, Any] = {"state": {}, "param_groups": []}
    for index, group in enumerate(optimizer.param_groups):
        out = muon if group["use_muon"] else adamw
        if group["use_muon"]:
            _check_torch_can(index, group)
        elif group.get("adamw", "adamw") != "adamw":
            raise ValueError(
                f"group {index}: adamw={group['adamw']!r} is none that torch.optim.AdamW has. To export the state as "
                "AdamW's, set the group's adamw to \"adamw\"; save that of an optimizer of your own by itself"
            )
        start = sum(len(g["params"]) for g in out["param_groups"])
        keys = _MUON_OPTIONS if group["use_muon"] else _ADAMW_OPTIONS
        base = {} if group["use_muon"] else adamw_defaults
        options = {**base, **{key: group[key] for key in keys}}
        if group["use_muon"]:
            steps = per_step(group["ns_coefficients"], group["ns_steps"])
            options |= {"ns_coefficients": steps[0], "ns_steps": len(steps)}
        if "param_names" in group:
            options["param_names"] = list(group["param_names"])
        out["param_groups"].append({**options, "params": list(range(start, start + len(group["params"])))})
        wanted = ("momentum_buffer",) if group["use_muon"] else ("step", "exp_avg", "exp_avg_sq")
        for position, p in enumerate(group["params"]):
            if SCALE in optimizer.state.get(p, {}):
                raise ValueError(
                    f"{name_of(group, index, position)}: its momentum is 8-bit codes, which torch.optim.Muon cannot "
                    "read. Load the state into one with Storage(momentum_dtype=torch.float32), step, and export that"
                )
            state = {key: value.clone() for key, value in optimizer.state.get(p, {}).items() if key in wanted}
            if state:
                out["state"][start + position] = state
    return muon, adamw


def _check_torch_can(index: int, group: Mapping[str, Any]) -> None:
    allowed: dict[str, tuple[Any, ...]] = {
        "adjust_lr_fn": (None, "original", "match_rms_adamw"),
        "extra_scale_factor": (1.0,),
        "weight_decay_mode": ("decoupled",),
    }
    for key, choices in allowed.items():
        if group[key] not in choices:
            raise ValueError(
                f"group {index}: {key}={group[key]!r} is none of those torch.optim.Muon has: {choices}. Set one of them"
            )
    if group.get("variant") is not None:
        raise ValueError(
            f"group {index}: torch.optim.Muon has no variant={group['variant']!r}, and what that keeps would be lost. "
            "Set the group's variant to None to export plain Muon"
        )
    if len(set(per_step(group["ns_coefficients"], group["ns_steps"]))) != 1:
        raise ValueError(f"group {index}: torch.optim.Muon has one ns_coefficients triple for all steps. Set one")
    for position, p in enumerate(group["params"]):
        name = name_of(group, index, position)
        if p.ndim != 2 or len(view_of(name, p, group).matrices) != 1:
            raise ValueError(
                f"{name}: torch.optim.Muon takes a {p.ndim}-D parameter of shape {tuple(p.shape)} as no or one matrix, "
                "here it is several or reshaped. Leave it out of the optimizer you export"
            )
