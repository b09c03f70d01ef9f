"""State of other Muons: their keys become ours, sums become averages, and then it is read as our own would be.

[Note: sums and averages]
    Momentum here (and in torch.optim.Muon) is an average, B <- mu B + (1 - mu) G. Others keep the sum B <- mu B + G,
    which is the same average divided by (1 - mu). Orthogonalization sees no difference, the next gradient's share does:
    taken over as it is, such a buffer would outweigh it 20 times at mu = 0.95. So sums are multiplied by (1 - mu).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from shardmuon._torch import is_dtensor
from shardmuon.checkpoint.state import (
    ADAMW_KEYS,
    clean_name,
    init_missing,
    kept_keys,
    parts_of,
    placed_like,
    read_param,
)
from shardmuon.layout.engines.base import name_of
from shardmuon.momentum.keeper import BUFFER, SCALE, Keeper
from shardmuon.options import per_step
from shardmuon.orthogonalize import TORCH_EPS
from shardmuon.step.options import view_of

Muon = Any  # `shardmuon.Muon`, which stands above
_StateDict = Mapping[str, Any]

_MOMENTS = {"moment1": "exp_avg", "moment2": "exp_avg_sq"}


class _Format(NamedTuple):
    """The form in which one library keeps its state.

    Attributes:
        about: Class and place, for messages.
        is_sum: True if momentum is a sum, see [Note: sums and averages].
        marks: Options of groups that no other library has together.
        mu: The group option that holds the momentum factor.
        momentum: State key of momentum.
        adamw: State keys of AdamW that have other names than torch's. Who has a second moment is AdamW's.
        ignored: State keys that are left out.
    """

    about: str
    is_sum: bool
    marks: tuple[set[str], ...]
    mu: str = "momentum"
    momentum: str = BUFFER
    adamw: Mapping[str, str] = _MOMENTS
    ignored: tuple[str, ...] = ("use_muon",)


FORMATS = {
    "torch": _Format(
        "torch.optim.Muon, torch.optim.AdamW and shardmuon", False, ({"ns_coefficients"}, {"betas", "amsgrad"})
    ),
    "keller": _Format("KellerJordan/Muon since 2025-02", False, ({"update_buffer"},)),
    "keller2024": _Format("KellerJordan/Muon before 2025-02", True, ({"adamw_lr_ratio"}, {"backup_adamw_lr"})),
    "moonlight": _Format("MoonshotAI/Moonlight", True, ({"wd", "adamw_betas"},)),
    "dion": _Format(
        "microsoft/dion Muon and NorMuon",
        is_sum=True,
        marks=({"mu"}, {"algorithm"}),
        mu="mu",
        momentum="momentum",
        adamw={"momentum": "exp_avg", "variance": "exp_avg_sq", "step_dev": "step"},
        ignored=("variance_neuron",),  # of rows, where ours is of rows or columns: a few steps make it anew
    ),
    "emerging": _Format("Emerging-Optimizers and Megatron-LM", False, ({"wd_mult"},)),
}
_KELLERS_OPTIONS = {"lr", "momentum", "weight_decay", "betas", "eps"}  # of later versions, which have no mark


class _LoadedRow(NamedTuple):
    """One parameter: where its state came from and what was done to it."""

    name: str
    source: str
    conversions: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name} <- {self.source}" + (f"  ({', '.join(self.conversions)})" if self.conversions else "")


class LoadReport(NamedTuple):
    """The outcome of `load_foreign`. `str()` prints it.

    Attributes:
        kinds: The format of each state dict.
        rows: One per parameter that was given state.
        fresh: Names of parameters that start afresh.
        skipped: Names of matrices whose state was left out, as `skip_matrices` asks.
    """

    kinds: tuple[str, ...]
    rows: tuple[_LoadedRow, ...]
    fresh: tuple[str, ...]
    skipped: tuple[str, ...]

    def __str__(self) -> str:
        left = "is a matrix: its state there was left out, its momentum starts from zero"
        lines = [*map(str, self.rows), *(f"{name} starts afresh" for name in self.fresh)]
        lines += [f"{name} {left}" for name in self.skipped]
        return "\n  ".join([f"state of {len(self.rows)} parameters from {', '.join(self.kinds)}", *lines])


class _Target(NamedTuple):
    """A parameter here."""

    name: str
    param: Tensor
    group: Mapping[str, Any]


class _Entry(NamedTuple):
    """State that another optimizer has of a parameter, by our names.

    Attributes:
        name: The parameter's name there, or its number.
        key: The key of its state.
        state, group: Its state and the options of its group.
        source: Their names of the state.
    """

    name: Any
    key: Any
    state: dict[str, Any]
    group: Mapping[str, Any]
    source: list[str]


def _entries(saved: _StateDict, form: _Format) -> list[_Entry]:
    """All parameters of a state dict, in its order."""
    found, (states, groups) = list[_Entry](), parts_of(saved)
    for group in groups:
        for key, name in zip(group["params"], group.get("param_names") or group["params"], strict=False):
            state = {k: value for k, value in states.get(key, {}).items() if k not in form.ignored}
            source = sorted(map(str, state))
            if any(form.adamw.get(k, k) == "exp_avg_sq" for k in state):
                counted = {"step": group["step"]} if "step" in group else {}
                state = counted | {form.adamw.get(k, k): value for k, value in state.items()}
            elif form.momentum in state:
                state[BUFFER] = state.pop(form.momentum)
            found.append(_Entry(name, key, state, group, source))
    unknown = list(states.keys() - {entry.key for entry in found})
    if unknown:
        raise ValueError(f"the state dict has state for {unknown[0]!r}, which none of its groups lists: it is damaged")
    return found


def load_foreign(
    optimizer: Optimizer,
    state_dict: _StateDict | Sequence[_StateDict],
    *,
    kind: str = "auto",
    params: Mapping[str, Tensor] | Sequence[Tensor] | Sequence[Sequence[Tensor]] | None = None,
    allow_missing: bool = False,
    skip_matrices: bool = False,
) -> LoadReport:
    """Give a `shardmuon.Muon` the momentum and AdamW state that another optimizer saved. Options stay as they are here.

    Talks to no other rank. State may be whole tensors, of which each rank takes its part, or DTensors placed as the
    parameters are.

    Args:
        optimizer: The optimizer whose parameters are given state; what they had is replaced.
        state_dict: What the other optimizer's `state_dict()` returned, or one per optimizer (Muon's, AdamW's). Also as
            torch.distributed.checkpoint flattens it, which torchtitan saves.
        kind: A key of `FORMATS`, or "auto": told by the groups' options.
        params: The parameters whose state it is. A dict of names, such as `dict(model.named_parameters())`, if the
            state dict is keyed by names. Parameters in the order the other optimizer had them (one list per state
            dict) if it is not. Default: names where both sides have them, else our own order; of our Muon (AdamW)
            groups only for a dict that is one of several.
        allow_missing: Parameters without state in it start afresh; otherwise they are an error.
        skip_matrices: Leave out all state of the parameters that are Muon's here, and take that of the rest: for a run
            that AdamW began. Matrices keep what they had, which is nothing in a new optimizer.

    Returns:
        What was mapped, converted and left out; `print` it.

    Raises:
        ValueError: Something cannot be mapped; says the parameter's name and what to do. Nothing has changed.
    """
    dicts = [_nested(d) for d in ([state_dict] if isinstance(state_dict, Mapping) else state_dict)]
    kinds = [_kind(parts_of(d)[1]) if kind == "auto" else kind for d in dicts]
    if not FORMATS.keys() >= {*kinds}:
        raise ValueError(f"kind={kind!r} is not one of auto, {', '.join(FORMATS)}")
    groups = enumerate(optimizer.param_groups)
    targets = [_Target(name_of(g, i, at), p, g) for i, g in groups for at, p in enumerate(g["params"])]
    keeper: Keeper = optimizer.keeper  # type: ignore[attr-defined]
    loaded: dict[Tensor, dict[str, Tensor]] = {}
    rows: list[_LoadedRow] = []
    skipped: list[str] = []
    orders = _orders(params, len(dicts))
    for saved, form, order in zip(dicts, (FORMATS[of_dict] for of_dict in kinds), orders, strict=True):
        for target, entry in _matched(_entries(saved, form), targets, order, len(dicts) > 1, skip_matrices):
            if skip_matrices and target.group["use_muon"]:
                left = entry.state.get("exp_avg")  # a wrong order shows in what is left out, too
                if isinstance(left, Tensor) and left.shape != target.param.shape:
                    raise ValueError(
                        f"{target.name}: the state to leave out has shape {tuple(left.shape)}, the parameter "
                        f"{tuple(target.param.shape)}. Give params= in the order the other optimizer had them"
                    )
                skipped.append(target.name)
            elif entry.state and target.param in loaded:
                raise ValueError(f"{target.name}: two of the state dicts have state for it. Give each parameter's once")
            elif entry.state:
                _check_routed_alike(target, entry)
                loaded[target.param], done = _read(target, entry, form, keeper)
                rows.append(_LoadedRow(target.name, f"{entry.key}: {', '.join(entry.source)}", done))
    if not rows and not skipped:
        raise ValueError("the state dict holds no state at all: it was saved before the first step. Nothing to load")
    lacking = [t for t in targets if t.param.requires_grad and t.param not in loaded]
    fresh = [t.name for t in lacking if not (skip_matrices and t.group["use_muon"])]
    if fresh and not allow_missing:
        raise ValueError(
            f"{fresh[0]}: no state for it ({len(fresh)} such parameters). Give the other optimizer's state dict too, "
            "all ranks' (merge_ranks), or allow_missing=True to let them start afresh"
        )
    optimizer.state.update(loaded)
    return LoadReport(tuple(kinds), tuple(rows), tuple(fresh), tuple(skipped))


def merge_ranks(state_dicts: Sequence[_StateDict]) -> dict[str, Any]:
    """One state dict from those that each rank saved, for optimizers that keep the momentum of a matrix on one rank.

    Raises:
        ValueError: The state dicts are not of one optimizer.
    """
    lists = [[g["params"] for g in d["param_groups"]] for d in state_dicts]
    if any(theirs != lists[0] for theirs in lists):
        raise ValueError("the state dicts list different parameters, so they are not of one optimizer's ranks")
    state: dict[Any, Any] = {}
    for saved in state_dicts:
        for key, value in saved["state"].items():
            state[key] = {**state.get(key, {}), **value}
    return {"state": state, "param_groups": state_dicts[0]["param_groups"]}


# ------------------------------------------------------------------------------------------------------ formats


def _kind(groups: Sequence[Mapping[str, Any]]) -> str:
    """The format of a state dict, told by its groups' options."""
    keys = set().union(*(g.keys() for g in groups)) - {"params", "param_names", "initial_lr", "use_muon"}
    for kind, form in FORMATS.items():
        if any(marks <= keys for marks in form.marks):
            return kind
    if keys <= _KELLERS_OPTIONS:
        return "keller"
    raise ValueError(
        f"cannot tell which optimizer saved this: its groups have {sorted(keys)}. If it has momentum, that may be a "
        "sum or an average. Give kind=, one of "
        + "; ".join(f"{kind!r} ({f.about}: {'sum' if f.is_sum else 'average'})" for kind, f in FORMATS.items())
    )


def _nested(saved: Any) -> Any:
    """{"state", "param_groups"}, also from the flat form of torch.distributed.checkpoint, which has no group: what a
    parameter's group has stands with the parameter."""
    if not isinstance(saved, Mapping) or not any(str(key).startswith("state.") for key in saved):
        return saved
    parts: dict[str, dict[str, dict[str, Any]]] = {"state": {}, "param_groups": {}}
    for key, value in saved.items():
        part, _, rest = str(key).partition(".")
        name, _, option = rest.rpartition(".")
        parts.setdefault(part, {}).setdefault(name, {})[option] = value
    groups = [{**options, "params": [name]} for name, options in parts["param_groups"].items()]
    return {"state": parts["state"], "param_groups": groups}


# ----------------------------------------------------------------------------------------------------- matching


def _orders(params: Any, count: int) -> list[Any]:
    """The names or the order that were given for each of the state dicts."""
    if params is None or isinstance(params, Mapping) or count == 1:
        return [params] * count
    listed = list(params)
    if len(listed) != count or not all(isinstance(of_dict, (list, tuple)) for of_dict in listed):
        raise ValueError(f"params must hold one list of parameters for each of the {count} state dicts")
    return listed


def _matched(
    entries: Sequence[_Entry], targets: Sequence[_Target], order: Any, several: bool, skips: bool
) -> list[tuple[_Target, _Entry]]:
    """Pairs of our parameter and theirs, by name if both have names, else by position."""
    by_param = {id(t.param): t for t in targets}
    named, given = bool(entries) and all(isinstance(e.name, str) for e in entries), isinstance(order, Mapping)
    if given:
        ours = {clean_name(name): by_param[id(p)] for name, p in order.items() if id(p) in by_param}
    else:
        ours = {clean_name(t.name): t for t in targets if t.group.get("param_names")}
    if given and not named:
        raise ValueError(
            "params gives names, but the state dict numbers its parameters. Give params as a list, in the order in "
            "which the other optimizer had them"
        )
    if named and (ours or given or isinstance(entries[0].key, str)):
        strange = next((e.name for e in entries if clean_name(e.name) not in ours and e.state), None)
        if not ours:
            raise ValueError(
                "the state dict names its parameters, the optimizer does not: give "
                "params=dict(model.named_parameters())"
            )
        if strange is not None:
            raise ValueError(
                f"{strange}: the state dict has state for it, but the optimizer has no such parameter (it has "
                f"{', '.join(list(ours)[:4])}, ...). Rename the keys of the state dict, or give params="
            )
        return [(ours[clean_name(e.name)], e) for e in entries if clean_name(e.name) in ours]
    if order is not None:
        strange = next((p for p in order if id(p) not in by_param), None)
        if strange is not None:
            raise ValueError(f"params lists a {tuple(strange.shape)} tensor that is none of the optimizer's parameters")
        chosen = [by_param[id(p)] for p in order]
    elif skips:
        raise ValueError(
            "skip_matrices: the state dict numbers its parameters, and one optimizer for all has them in another "
            "order than Muon's and AdamW's groups here. Give the order it had: params=list(model.parameters()) if "
            "it was made so"
        )
    else:
        is_adamw = all("betas" in e.group and "momentum" not in e.group for e in entries)
        chosen = [t for t in targets if not several or bool(t.group["use_muon"]) != is_adamw]
    if len(chosen) != len(entries):
        raise ValueError(
            f"the state dict lists {len(entries)} parameters, {len(chosen)} are to take them. Give params= in the "
            "order the other optimizer had them, and the state dicts of all its parts"
        )
    return list(zip(chosen, entries, strict=True))


# --------------------------------------------------------------------------------------------------- conversion


def _check_routed_alike(target: _Target, entry: _Entry) -> None:
    kind, said = "AdamW" if "exp_avg_sq" in entry.state else "Muon", entry.group.get("algorithm", "muon")  # dion's
    theirs = {"muon": kind, "adamw": kind, "normuon": "NorMuon" if kind == "Muon" else kind}.get(said, said)
    ours = "Muon" if target.group["use_muon"] else "AdamW"
    if theirs == ours or (theirs == "NorMuon" and "normuon" in str(target.group.get("variant"))):
        return
    remedy = {
        "AdamW": "Give skip_matrices=True to go on from AdamW: it leaves out the state of all matrices and takes the "
        "rest. Or route it alike",
        "NorMuon": "Give the optimizer variant='normuon'",
    }.get(theirs, "Route it alike, or leave its state out and give allow_missing=True")
    raise ValueError(f"{target.name}: its state is {theirs}'s ({entry.source}), but here it is {ours}'s. {remedy}")


def _read(target: _Target, entry: _Entry, form: _Format, keeper: Keeper) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """State as ours, and what was done to get there."""
    p, group, done = target.param, target.group, list[str]()
    start, state = dict[str, Any](), dict(entry.state)
    init_missing(p, group, start, keeper)
    for key, value in entry.state.items():
        if not isinstance(value, Tensor):
            continue
        like, state[key] = start.get(key), value.detach().clone()
        if is_dtensor(like) and not is_dtensor(value) and value.shape == like.shape:
            state[key] = placed_like(state[key], like)
            done.append("cut to this rank's part")
        if key == BUFFER and form.is_sum:
            if form.mu not in entry.group:
                raise ValueError(
                    f"{target.name}: its group has no {form.mu!r}, which is needed to turn a sum into an average"
                )
            mu = float(entry.group[form.mu])
            state[key] = state[key].to(torch.promote_types(value.dtype, torch.float32)) * (1 - mu)
            done.append(f"x (1 - {mu:g})")
    lacking = [key for key in kept_keys(group) if key not in state] if group["use_muon"] else []
    done += [f"{key} starts from zeros" for key in lacking]
    found = read_param(target.name, p, state | {key: start[key] for key in lacking}, group, group, keeper)
    for key, value in entry.state.items():
        if isinstance(value, Tensor) and key != "step" and value.dtype != found[key].dtype:
            done.append(f"{str(value.dtype)[6:]} to {str(found[key].dtype)[6:]}")
    return found, tuple(dict.fromkeys(done))


# ------------------------------------------------------------------------------------------------------ to torch


def to_torch_muon(optimizer: Muon) -> tuple[dict[str, Any], dict[str, Any]]:
    """State dicts for a torch.optim.Muon over the Muon groups and a torch.optim.AdamW over the others.

    Both list parameters in this optimizer's order. With the method "torch" training goes on there bit for bit.

    Returns:
        (Muon's, AdamW's); tensors are copies.

    Raises:
        ValueError: A parameter or option has no counterpart in torch.optim.Muon.
    """
    adamw = torch.optim.AdamW([torch.zeros(1, device="cpu")]).state_dict()["param_groups"][0]
    made: dict[bool, dict[str, Any]] = {is_muon: {"state": {}, "param_groups": []} for is_muon in (True, False)}
    for index, group in enumerate(optimizer.param_groups):
        _check_torch_can(index, group)
        out, is_muon = made[group["use_muon"]], group["use_muon"]
        options = {key: group[key] for key in (_MUON_OPTIONS if is_muon else _ADAMW_OPTIONS)}
        if is_muon:
            steps = per_step(group["ns_coefficients"], group["ns_steps"])
            options |= {"ns_coefficients": steps[0], "ns_steps": len(steps), "eps": TORCH_EPS}
        else:  # the arithmetic that this optimizer uses itself, see shardmuon.step.adamw
            options = {**adamw, "fused": True, **options}
        if "param_names" in group:
            options["param_names"] = list(group["param_names"])
        start = sum(len(g["params"]) for g in out["param_groups"])
        out["param_groups"].append({**options, "params": list(range(start, start + len(group["params"])))})
        wanted = (BUFFER,) if is_muon else ADAMW_KEYS
        for position, p in enumerate(group["params"]):
            state = optimizer.state.get(p, {})
            if SCALE in state:
                raise ValueError(
                    f"{name_of(group, index, position)}: its momentum is 8-bit codes, which torch.optim.Muon cannot "
                    "read. Load the state into one with Storage(momentum_dtype=torch.float32), step, and export that"
                )
            if state:
                out["state"][start + position] = {key: state[key].clone() for key in wanted if key in state}
    return made[True], made[False]


_MUON_OPTIONS = ("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn")
_ADAMW_OPTIONS = ("lr", "weight_decay", "betas", "eps")
# Options of ours -> the values that torch has; and how to do without the others.
_OF_TORCH: dict[str, tuple[Any, ...]] = {
    "adjust_lr_fn": (None, "original", "match_rms_adamw"),
    "weight_decay_mode": ("decoupled",),
    "variant": (None,),
}


def _check_torch_can(index: int, group: Mapping[str, Any]) -> None:
    if not group["use_muon"]:
        if group.get("adamw", "adamw") != "adamw":
            raise ValueError(
                f"group {index}: adamw={group['adamw']!r} is none that torch.optim.AdamW has. To export the state as "
                "AdamW's, set the group's adamw to \"adamw\"; save that of an optimizer of your own by itself"
            )
        return
    for key, choices in _OF_TORCH.items():
        if group.get(key) not in choices:
            raise ValueError(
                f"group {index}: {key}={group[key]!r} is none of those torch.optim.Muon has: {choices}. Set one of "
                "them; what another one keeps is not exported"
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
