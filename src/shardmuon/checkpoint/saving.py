"""Save and load whole jobs on any layout, read other Muons' state, write torch's."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.utils._pytree import tree_map_only

from shardmuon._torch import names_in
from shardmuon.checkpoint.shards import as_global, describe_shards
from shardmuon.checkpoint.state import init_missing, keys_of, merged_group, placed_like, read_param
from shardmuon.checkpoint.vetting import OptionsPlanner, VettedPlanner, VettedReader
from shardmuon.comm.vote import run_together
from shardmuon.errors import HALF_LOADED, ExchangeError, fault_text, made_public
from shardmuon.layout.engines.base import name_of
from shardmuon.momentum.keeper import SCALE, STEP, Keeper
from shardmuon.options import per_step
from shardmuon.step.kept import CARRIED, with_carried
from shardmuon.step.options import view_of

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
        weights, state, groups = run_together(partial(_state_of, model, optimizer))
        table = describe_shards(model, optimizer)
        saved = run_together(partial(as_global, weights, state, model, optimizer.param_groups, table))
    saved["optimizer"]["param_groups"] = groups
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        dcp.save(saved, checkpoint_id=path)


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
    saved: dict[str, Any] = {"optimizer": {}}
    with made_public():
        table = describe_shards(model, optimizer)
        reader, options, planner = run_together(lambda: (VettedReader(path), OptionsPlanner(), VettedPlanner()))
    _read(saved, reader, options)
    with made_public():
        room = run_together(partial(_Room, model, optimizer, saved["optimizer"], options.kept))
        weights = run_together(lambda: _copied(get_model_state_dict(model)))
        targets = run_together(partial(as_global, weights, room.state, model, room.groups, table))
    _read(targets, reader, planner)
    with made_public():
        state = run_together(partial(room.read, optimizer.keeper))
        _take_over(weights, state, room.groups, model, optimizer)


def _read(targets: dict[str, Any], reader: VettedReader, planner: VettedPlanner) -> None:
    """Let DCP read a checkpoint into these tensors. Collective."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        dcp.load(targets, storage_reader=reader, planner=planner)


class _Room:
    """Room for what a file has: state as it starts, and the groups as they will be.

    Attributes:
        state: Parameter's name -> key -> tensor.
        groups: The optimizer's with the saved options.

    Raises:
        ValueError: The file does not fit the optimizer.
    """

    def __init__(
        self, model: nn.Module, optimizer: Muon, saved: Mapping[str, Any], kept: Mapping[str, Collection[str]]
    ) -> None:
        self._names, self._like, self.state = names_in(model), dict[str, Any](), dict[str, dict[str, Any]]()
        self._saved = _paired(optimizer.param_groups, saved.get("param_groups") or [], self._names)
        pairs = enumerate(zip(optimizer.param_groups, self._saved, strict=True))
        self.groups = [merged_group(index, *pair) for index, pair in pairs]
        for group in self.groups:
            for p in group["params"]:
                name, start = self._names[id(p)], dict[str, Any]()
                found = kept.get(name, ())
                if not found and p.requires_grad:
                    raise ValueError(
                        f"{name}: the checkpoint has no state for it: it was frozen when it was saved, or the "
                        "checkpoint is damaged or of another model. To let it start afresh, call requires_grad_(False) "
                        "on it, load, and train it again"
                    )
                if not found:
                    continue
                keeper, coded = optimizer.keeper, SCALE in found
                if group["use_muon"] and coded != (keeper.dtype == "int8"):  # as in the file: a step converts it
                    keeper = Keeper("int8" if coded else None, None, False)
                init_missing(p, group, start, keeper)
                self._like[name], self.state[name] = start, {key: start[key] for key in start if key in found}

    def read(self, keeper: Keeper) -> dict[Tensor, dict[str, Any]]:
        """Return what has been read, by parameter, checked and in the dtypes that the optimizer works with."""
        found: dict[Tensor, dict[str, Any]] = {}
        for group, theirs in zip(self.groups, self._saved, strict=True):
            carried = with_carried({}, [theirs])  # in files that FSDP1's own functions have made
            for p in group["params"]:
                name = self._names[id(p)]
                if name in self.state:
                    like, kept = self._like[name], carried.get(name, {})
                    entry = self.state[name] | {key: placed_like(kept[key], like.get(key)) for key in kept}
                    found[p] = read_param(name, p, entry, group, theirs, keeper)
        return found


def _paired(
    mine: Sequence[Mapping[str, Any]], saved: Sequence[dict[str, Any]], names: Mapping[int, str]
) -> list[dict[str, Any]]:
    """The saved group of each of the optimizer's, by the names of its parameters.

    Raises:
        ValueError: Groups have other members.
    """
    left, found = list(saved), []
    for index, group in enumerate(mine):
        members = _names_of(group, index, names)
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


def _state_of(model: nn.Module, optimizer: Muon) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
    """Weights, state and groups by names, alike on every layout: without what FSDP1's form adds. Collective."""
    names = names_in(model)
    members = [_names_of(group, index, names) for index, group in enumerate(optimizer.param_groups)]
    with torch.no_grad():
        optimizer.complete_state()
    saved = optimizer.state_dict()
    entries, state = with_carried(saved["state"], saved["param_groups"]), dict[str, Any]()
    for group, packed, own in zip(optimizer.param_groups, saved["param_groups"], members, strict=True):
        wanted = {*keys_of(group), *((SCALE, STEP) if group["use_muon"] and optimizer.keeper.rounds else (SCALE,))}
        packed.pop(CARRIED, None)
        for name, key in zip(own, packed["params"], strict=True):
            if key in entries:
                state[name] = {kind: value for kind, value in entries[key].items() if kind in wanted}
        packed["params"] = own
    return get_model_state_dict(model), state, saved["param_groups"]


def _names_of(group: Mapping[str, Any], index: int, names: Mapping[int, str]) -> list[str]:
    """The model's names of a group's parameters."""
    lost = next((at for at, p in enumerate(group["params"]) if id(p) not in names), None)
    if lost is not None:
        raise ValueError(f"{name_of(group, index, lost)}: it is no parameter of the model. Give the whole model")
    return [names[id(p)] for p in group["params"]]


def _take_over(
    weights: dict[str, Any],
    state: dict[Tensor, dict[str, Any]],
    groups: list[dict[str, Any]],
    model: nn.Module,
    optimizer: Muon,
) -> None:
    """Let model and optimizer take what was read, on all ranks or on none. Collective."""
    strict, old = StateDictOptions(strict=True), dict[str, Any]()
    before = optimizer.state, optimizer.param_groups, optimizer.broken
    try:
        run_together(lambda: optimizer.take_loaded(state, groups))
        run_together(lambda: old.update(_copied(get_model_state_dict(model))))
        run_together(lambda: set_model_state_dict(model, weights, options=strict))
    except BaseException as wrong:
        optimizer.state, optimizer.param_groups, optimizer.broken = before
        try:
            run_together(lambda: set_model_state_dict(model, old, options=strict) if old else None)
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
