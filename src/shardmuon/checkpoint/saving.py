"""Save and load whole jobs on any layout, read other Muons' state, write torch's."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

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

from shardmuon.checkpoint.plain_shards import as_global
from shardmuon.checkpoint.vetting import VettedPlanner, VettedReader
from shardmuon.errors import HALF_LOADED, fault_text, made_public
from shardmuon.momentum.keeper import SCALE
from shardmuon.options import per_step
from shardmuon.ranks.council import run_together
from shardmuon.stepping.settings import name_of, view_of

if TYPE_CHECKING:
    from shardmuon.muon import Muon

_MUON_OPTIONS = ("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
_ADAMW_OPTIONS = ("lr", "weight_decay", "betas", "eps")


def save(path: str | os.PathLike[str], model: nn.Module, optimizer: Muon) -> None:
    """Write weights, state and options with torch.distributed.checkpoint. Collective among all ranks.

    Raises:
        ValueError: What is to be saved cannot be read on some rank. On every rank; nothing is written.
    """
    _, state = _read_here(model, optimizer, copied=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        dcp.save(state, checkpoint_id=path)


def load(path: str | os.PathLike[str], model: nn.Module, optimizer: Muon) -> None:
    """Read what `save` wrote, on any layout and number of ranks. Collective among all ranks.

    `torch.distributed.checkpoint.load` writes into the tensors it is given, which are the optimizer's own: a damaged
    file leaves them half old, half new. This reads into copies and takes them over when all of it has been read and
    checked, at the price of that memory and, at the end, of the weights' once more. A file cannot run code: see
    `shardmuon.checkpoint.vetting`.

    Raises:
        CheckpointException: A file is missing, damaged, or holds more than a checkpoint. On every rank; both are
            unchanged.
        ValueError: The checkpoint does not fit the optimizer on some rank, or the model itself refuses its weights
            there (a hook, too little memory). On every rank; both are unchanged. If a model refuses its own old weights
            as well, the optimizer makes no step before it has loaded a checkpoint.
    """
    with made_public():
        reader, planner = run_together(lambda: (VettedReader(path), VettedPlanner()))
    state, targets = _read_here(model, optimizer, copied=True)
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
    _take_over(state, model, optimizer)


def _take_over(state: dict[str, Any], model: nn.Module, optimizer: Muon) -> None:
    """Let model and optimizer take what was read, on all ranks or on none. Collective."""
    strict = StateDictOptions(strict=True)
    before = optimizer.state, optimizer.param_groups, optimizer.broken
    weights: dict[str, Any] = {}
    with made_public():
        try:  # the optimizer first: it may refuse
            run_together(lambda: set_optimizer_state_dict(model, optimizer, state["optimizer"]))
            run_together(lambda: weights.update(_copied(get_model_state_dict(model))))
            run_together(lambda: set_model_state_dict(model, state["model"], options=strict))
        except BaseException as wrong:
            optimizer.state, optimizer.param_groups, optimizer.broken = before
            try:
                run_together(lambda: set_model_state_dict(model, weights, options=strict) if weights else None)
            except BaseException:
                optimizer.broken = f"weights are half loaded: {fault_text(wrong)}. {HALF_LOADED}"
            raise


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    copies: dict[str, Any] = tree_map_only(Tensor, lambda t: t.detach().clone(), state)
    return copies


def _read_here(model: nn.Module, optimizer: Muon, *, copied: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Weights and state by names, their own tensors or copies, and the same as DCP must see them. Collective: what is
    raised on one rank is raised on all, before DCP talks."""

    def read() -> dict[str, Any]:
        with _may_make_state(optimizer) if copied else nullcontext():
            state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        return _copied(state) if copied else state

    with made_public():
        state = run_together(read)
        return state, run_together(partial(as_global, state, model, optimizer))


@contextmanager
def _may_make_state(optimizer: Muon) -> Iterator[None]:
    """torch makes state to load into by a step, and none, without a word, where there are gradients. What loads is not
    kept from it by gradients that wait for a step, nor by a step that was broken off before there was any state."""
    grads = [(p, p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    broken, optimizer.broken = optimizer.broken, None
    try:
        for p, _ in grads:
            p.grad = None
        yield
    finally:
        optimizer.broken = broken
        for p, grad in grads:
            p.grad = grad


def to_torch_muon(optimizer: Muon) -> tuple[dict[str, Any], dict[str, Any]]:
    """State dicts for a torch.optim.Muon over the Muon groups and a torch.optim.AdamW over the others.

    Both list parameters in this optimizer's order. With the method "torch" training goes on there bit for bit.

    Returns:
        (Muon's, AdamW's); tensors are copies.

    Raises:
        ValueError: A parameter or option has no counterpart in torch.optim.Muon.
    """
    adamw_defaults = torch.optim.AdamW([torch.zeros(1, device="cpu")]).state_dict()["param_groups"][0]
    # the arithmetic that this optimizer uses itself, see shardmuon.stepping.adamw
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
