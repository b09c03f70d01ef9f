"""Options of parameter groups: checks of a new group, and `Settings`, a frozen object per group that is rebuilt only
when the group's options change. Nothing is communicated.

A learning rate may be a tensor. Every step reads its value to compare it between ranks, which waits for the accelerator
if the tensor is on one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from shardmuon.comm.groups import GroupRef
from shardmuon.errors import about
from shardmuon.layout.engines import Engine, engine_for
from shardmuon.layout.engines.base import name_of
from shardmuon.layout.engines.tensor_parallel import TensorParallelEngine, check_expert
from shardmuon.layout.views import Ints, MatrixView, matrix_view
from shardmuon.options import (
    ADAMW_DEFAULTS,
    GROUP_DEFAULTS,
    GROUP_OPTIONS,
    ONLY_MUON,
    PLACE_OPTIONS,
    check_hyperparameters,
    check_keys,
    refuse_sets,
    view_options,
)
from shardmuon.orthogonalize.schedules import Triples, per_step
from shardmuon.step.kept import loaded_over
from shardmuon.variants import CAUTIOUS, Stages, names_in, stages_of

Group = Mapping[str, Any]  # one of an optimizer's parameter groups

# Types of option values that cannot be changed in place. A group with values of other types, such as tensors or lists,
# is read again in every step.
_LASTING = {type(None), bool, int, float, str, tuple, GroupRef}


@dataclass(frozen=True)
class Settings:
    """Options of one group of matrices in the current step.

    Attributes:
        lr: Learning rate as a float.
        given_lr: Learning rate as it is in the group: a float or a tensor.
        coefficients: (a, b, c) of each Newton-Schulz step.
        cautious: True if weights decay only where decay does not work against the update.
        stages: Stages of the group's variant.
        view: Options that define which matrices a parameter holds.
        batch: Text of the options that must be equal for all matrices of a batch, and on all ranks that share a plan.
        planned: Text of the options that a plan depends on: `batch`, `view`, and this rank's process groups.
    """

    lr: float
    given_lr: float | Tensor
    weight_decay: float
    momentum: float
    nesterov: bool
    coefficients: Triples
    adjust_lr_fn: str | None
    cautious: bool
    stages: Stages
    view: Mapping[str, Any]
    batch: str
    planned: str

    @cached_property
    def text(self) -> str:
        """Format the settings for comparison between ranks."""
        # fp64 is the precision of a Python float, so an fp64 tensor has the same text as a float
        kind = self.given_lr.dtype if isinstance(self.given_lr, Tensor) else torch.float64
        return (
            f"lr={self.lr}{'' if kind == torch.float64 else f' ({kind})'} weight_decay={self.weight_decay} "
            f"momentum={self.momentum} nesterov={self.nesterov} coefficients={self.coefficients} "
            f"adjust_lr_fn={self.adjust_lr_fn} cautious={self.cautious} stages={self.stages}"
        )


def settings_of(group: Group) -> Settings:
    """Read the settings of a group for one step."""
    view, stages = view_options(group), stages_of(group)
    coefficients = per_step(group["ns_coefficients"], group["ns_steps"])
    batch = f"{coefficients} {''.join(map(repr, stages))}".replace(" ", "")
    return Settings(
        lr=float(group["lr"]),
        given_lr=group["lr"],
        weight_decay=float(group["weight_decay"]),
        momentum=float(group["momentum"]),
        nesterov=bool(group["nesterov"]),
        coefficients=coefficients,
        adjust_lr_fn=group["adjust_lr_fn"],
        cautious=CAUTIOUS in names_in(group["variant"]),
        stages=stages,
        view=view,
        batch=batch,
        planned=f"{batch} {view} {[group.get(key) for key in PLACE_OPTIONS]}",
    )


def view_of(name: str, param: Tensor, group: Group) -> MatrixView:
    """Determine the matrices of a parameter from its group's options. Raises ValueError with the parameter's name if
    the options do not fit its shape."""
    engine: Engine | None = None
    shape: Ints = ()
    try:
        engine = engine_for(param, group)
        shape = engine.shape(param)
        return matrix_view(shape, **view_options(group))
    except ValueError as wrong:
        if len(shape) > 1 and isinstance(engine, TensorParallelEngine) and not engine.knows_shape(param):
            # the global shape is not known yet, so the options are checked when a plan is made
            return MatrixView(shape, shape, -1, (), 2 if group["view"] == "stack" else 1)
        raise ValueError(f"{name}: {wrong}") from None


class OptionsReader:
    """Reader of an optimizer's groups. Caches each group's settings until its options change."""

    def __init__(self) -> None:
        self._kept: list[tuple[tuple[object, ...], Settings | None]] = []

    def read(self, groups: Sequence[Group]) -> list[Settings | None]:
        """Return the current settings of each group; None for a group that AdamW updates.

        Raises:
            ValueError: An option is invalid. The message has the group's index.
        """
        found: list[Settings | None] = []
        for index, group in enumerate(groups):
            said = tuple(map(group.get, GROUP_OPTIONS))
            lasts = index < len(self._kept) and _LASTING.issuperset(map(type, said))
            if not lasts or self._kept[index][0] != said:
                with about(f"group {index}"):
                    check_hyperparameters("", group)
                    settings = settings_of(group) if group["use_muon"] else None
                self._kept[index : index + 1] = [(said, settings)]
            found.append(self._kept[index][1])
        return found


def as_group(param_group: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a param group given by the caller, with its parameters in a list and its process groups as `GroupRef`s.

    Raises:
        TypeError: The group is not a dict, or its parameters are in a set.
        ValueError: A value is not a process group, or this rank is not in it.
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


def complete(group: dict[str, Any], defaults: Mapping[str, Any]) -> None:
    """Add missing options to a group, in place: both Muon's and AdamW's, since `use_muon` may change later."""
    for key, value in [*defaults.items(), *GROUP_DEFAULTS.items(), *ADAMW_DEFAULTS.items()]:
        if key != "differentiable":  # torch.optim.Optimizer sets this option itself
            group.setdefault(key, value)


def fill_up(groups: Sequence[dict[str, Any]], mine: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]) -> None:
    """Add options that loaded groups lack, as in checkpoints of torch.optim.Muon, in place. They are taken from the
    optimizer's group at the same index (`mine`), then from its defaults."""
    for index, group in enumerate(groups):
        group.update(loaded_over(mine[index] if index < len(mine) else {}, group))
        complete(group, defaults)


def check_param_group(
    known: Sequence[Mapping[str, Any]], group: Mapping[str, Any], given: Collection[str], defaults: Mapping[str, Any]
) -> None:
    """Check a group that is about to be added to an optimizer.

    Args:
        known: The groups that the optimizer already has.
        group: The new group, completed with defaults.
        given: The keys that the caller set.
        defaults: The optimizer's defaults.

    Raises:
        ValueError: An option or a parameter does not fit.
        TypeError: A parameter is not a tensor, or has an integer dtype.
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
    # a group with all of Muon's options comes from another optimizer's `param_groups`, so they were not set by hand
    own = () if ONLY_MUON.issubset(given) else ONLY_MUON.intersection(given)
    meaningless = {key: group[key] for key in given if key in own and group[key] != defaults[key]}
    unset = {key for key in ("tp_group", "process_group") if key not in given}
    for position, p in enumerate(params):
        name = names[position] if position < len(names) else f"parameter {position} of group {index}"
        _check_tensor(name, p)
        if id(p) in listed:
            raise ValueError(f"{name}: the same parameter is listed twice (first as {listed[id(p)]}). List it once")
        listed[id(p)] = name
        with about(name):
            check_expert(p, group, unset)
            engine_for(p, group)
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
            f"group {index}: its parameters have {'names' if named else 'no names'}, those of the other groups have "
            f"{'none' if named else 'names'}. Give every group names, as (name, parameter) pairs or by "
            "shardmuon.param_groups(part, lr=...), or none (group.pop('param_names'))"
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
