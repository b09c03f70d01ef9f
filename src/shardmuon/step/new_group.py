"""Checks of a parameter group before an optimizer takes it. Talks to no other rank."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, cast

from torch import Tensor

from shardmuon.carried import loaded_over
from shardmuon.comm.groups import GroupRef
from shardmuon.layout.engines import engine_for
from shardmuon.layout.engines.base import name_of
from shardmuon.layout.engines.tensor_parallel import check_expert
from shardmuon.options import (
    GROUP_DEFAULTS,
    ONLY_ADAMW,
    ONLY_MUON,
    check_hyperparameters,
    check_keys,
    complete,
    refuse_sets,
)
from shardmuon.step.options import view_of


def without_stale_names(params: Any) -> Any:
    """Groups without their names if they are named for more parameters than they have; anything else as it is.

    torch's ZeroRedundancyOptimizer gives each rank's optimizer a part of each group's parameters and the names of all.
    """
    if not isinstance(params, list) or not all(isinstance(g, dict) for g in params):
        return params
    groups = [g for g in cast("list[dict[str, Any]]", params) if isinstance(g.get("params"), list)]
    stale = [g for g in groups if len(g.get("param_names") or ()) > len(g["params"])]
    if not stale:
        return params
    names, held = len(stale[0]["param_names"]), len(stale[0]["params"])
    warnings.warn(
        f"a group has param_names of {names} parameters and holds {held}, as torch's ZeroRedundancyOptimizer divides "
        "groups. No parameter keeps its name: messages and audits say where one stands",
        stacklevel=3,
    )
    return [{key: value for key, value in g.items() if key != "param_names"} for g in params]


def as_group(param_group: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of what a caller adds, with a list of parameters and process groups by their ranks.

    Raises:
        TypeError: The group is no dict, or its parameters have no order.
        ValueError: A process group is none, or this rank is not in it.
    """
    if not isinstance(param_group, dict):
        raise TypeError(f"a param group must be a dict, found {type(param_group).__name__}")
    group = dict(param_group)
    params = group.get("params")
    refuse_sets("parameters", params, "a list")
    group["params"] = [params] if isinstance(params, Tensor) else list(cast("Iterable[Any]", params or ()))
    for key in ("tp_group", "process_group"):
        if key in group:
            group[key] = GroupRef.of(group[key], key)
    group.setdefault("use_muon", True)
    return group


def drop_what_means_nothing(group: MutableMapping[str, Any], given: Collection[str]) -> None:
    """Take from a new group, to which torch gives all defaults, those of the other kind that its caller did not set."""
    for key in ONLY_ADAMW if group["use_muon"] else ONLY_MUON:
        if key not in given:
            group.pop(key, None)


def fill_up(groups: Sequence[dict[str, Any]], mine: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]) -> None:
    """Give loaded groups the options that they lack (checkpoints of torch.optim.Muon): those that the optimizer's own
    have, then its defaults."""
    defaults = {key: value for key, value in {**GROUP_DEFAULTS, **defaults}.items() if key != "differentiable"}
    for index, group in enumerate(groups):
        group.update(loaded_over(mine[index] if index < len(mine) else {}, group))
        group.setdefault("use_muon", True)
        complete(group, defaults)


def check_param_group(
    known: Sequence[Mapping[str, Any]], group: Mapping[str, Any], given: Collection[str], defaults: Mapping[str, Any]
) -> None:
    """Check a group that is about to be added to an optimizer.

    Args:
        known: The groups that the optimizer has.
        group: The new one, complete.
        given: The keys that the caller set.
        defaults: The optimizer's.

    Raises:
        ValueError: An option or a parameter does not fit.
        TypeError: A parameter is not a tensor, or of an integer dtype.
    """
    index = len(known)
    params = [p[1] if isinstance(p, tuple) else p for p in group["params"]]
    names = [p[0] for p in group["params"] if isinstance(p, tuple)] or group.get("param_names") or []
    if names and len(names) != len(params):
        raise ValueError(
            f"group {index}: found {len(names)} param_names for {len(params)} parameters, so that messages would "
            "name wrong ones. Give one name for each, or leave param_names out"
        )
    check_keys(f"group {index}: ", given)
    check_hyperparameters(f"group {index}: ", group)
    listed = {id(p): name_of(g, i, at) for i, g in enumerate(known) for at, p in enumerate(g["params"])}
    meaningless = {key: group[key] for key in given if key in ONLY_MUON and group[key] != defaults[key]}
    unset = {key for key in ("tp_group", "process_group") if key not in given}
    for position, p in enumerate(params):
        name = names[position] if position < len(names) else f"parameter {position} of group {index}"
        _check_tensor(name, p)
        if id(p) in listed:
            raise ValueError(f"{name}: the same parameter is listed twice (first as {listed[id(p)]}). List it once")
        listed[id(p)] = name
        try:
            check_expert(p, group, unset)
            engine_for(p, group)
        except ValueError as wrong:
            raise ValueError(f"{name}: {wrong}") from None
        if group["use_muon"]:
            _check_matrix(name, p, group, given)
        elif meaningless:
            raise ValueError(
                f"{name}: {meaningless} are options of matrices, but the group says use_muon=False, which is AdamW. "
                "Leave them out"
            )
    named = bool(names) or "param_names" in group
    if known and named != ("param_names" in known[0]):
        raise ValueError(
            f"group {index}: its parameters have no names, those of the other groups have. Give (name, parameter) "
            "pairs, or the groups of a module: for g in shardmuon.param_groups(part, lr=...): "
            "optimizer.add_param_group(g)"
            if not named
            else f"group {index}: its parameters have names ({names[0] if names else 'none'}, ..), those of the other "
            "groups have none. Leave the names out (group.pop('param_names')), or give every group names"
        )


def _check_matrix(name: str, p: Tensor, group: Mapping[str, Any], given: Collection[str]) -> None:
    try:
        view_of(name, p, group)
    except ValueError as wrong:
        if "use_muon" in given:
            raise
        raise ValueError(
            f"{wrong}. If these are all parameters of a model, give Muon the model, which it routes by itself: "
            "Muon(model, ...); for transformers' Trainer, optimizer_cls_and_kwargs=(Muon, {'model': model, ...}). To "
            "add a part of it, as one that is unfrozen: for g in shardmuon.param_groups(part, lr=...): "
            "optimizer.add_param_group(g)"
        ) from None


def _check_tensor(name: str, p: object) -> None:
    if not isinstance(p, Tensor):
        raise TypeError(f"{name}: an optimizer takes tensors, found {type(p).__name__}")
    if p.is_complex():
        raise ValueError(f"{name}: complex parameters ({p.dtype}) are not supported. Leave it out")
    if not p.is_floating_point():
        raise TypeError(f"{name}: dtype {p.dtype} cannot be optimized; parameters must be floating point")
