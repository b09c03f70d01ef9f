"""Read the state of other Muons: which key means what, whose momentum is a sum, and whose parameter it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from shardmuon._torch import is_dtensor
from shardmuon.checkpoint.foreign_kept import taken_over
from shardmuon.checkpoint.formats import FORMATS, Format
from shardmuon.checkpoint.state import clean_name, kept_keys, read_step
from shardmuon.layout.engines import engine_of
from shardmuon.layout.engines.base import name_of
from shardmuon.layout.engines.dtensor import held_as_placed
from shardmuon.layout.pieces import Box, Held
from shardmuon.momentum.keeper import gradient_dtype
from shardmuon.options import per_step
from shardmuon.step.checks import check_buffer
from shardmuon.variants.normuon import NorMuon

StateDict = Mapping[str, Any]
_ALGORITHMS = ("muon", "normuon", "adamw")  # dion's that there are here

# Their names of our options, for the report.
_OPTION_NAMES = {"mu": "momentum", "wd": "weight_decay", "adamw_betas": "betas", "epsilon": "eps"}
_COMPARED = ("lr", "weight_decay", "momentum", "nesterov", "ns_steps", "betas", "eps", "adjust_lr_fn")


@dataclass(frozen=True, slots=True)
class LoadedRow:
    """One parameter: where its state came from and what was done to it."""

    name: str
    source: str
    conversions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What `load_foreign` did. `str()` prints it.

    Attributes:
        kinds: The format of each state dict.
        rows: One per parameter that was given state.
        fresh: Names of parameters that start afresh.
        skipped: Names of matrices whose state was left out, as `skip_matrices` asks.
        options: Options that differ from theirs. Ours stay.
    """

    kinds: tuple[str, ...]
    rows: tuple[LoadedRow, ...]
    fresh: tuple[str, ...]
    skipped: tuple[str, ...]
    options: tuple[str, ...]

    def __str__(self) -> str:
        width = max((len(row.name) for row in self.rows), default=0)
        lines = [f"state of {len(self.rows)} parameters from {', '.join(self.kinds)}"]
        lines += [
            f"  {r.name:<{width}} <- {r.source}" + (f"  ({', '.join(r.conversions)})" if r.conversions else "")
            for r in self.rows
        ]
        lines += [f"  {name} starts afresh" for name in self.fresh]
        lines += [
            f"  {name} is a matrix: its state there was left out, its momentum starts from zero"
            for name in self.skipped
        ]
        return "\n".join([*lines, *(f"  option left as it is here: {text}" for text in self.options)])


@dataclass(frozen=True, slots=True)
class _Target:
    name: str
    param: Tensor
    group: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Entry:
    key: Any
    state: Mapping[str, Any]
    group: Mapping[str, Any]
    format: Format

    @property
    def is_adamw(self) -> bool:
        return any(key in self.state for key in self.format.exp_avg_sq)


def load_foreign(
    optimizer: Optimizer,
    state_dict: StateDict | Sequence[StateDict],
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
        optimizer: Whose parameters are given state; what they had is replaced.
        state_dict: What the other optimizer's `state_dict()` returned, or one per optimizer (Muon's, AdamW's).
        kind: A key of `FORMATS`, or "auto": told by the groups' options.
        params: Whose state it is. A dict of names, such as `dict(model.named_parameters())`, if the state dict is keyed
            by names. Parameters in the order the other optimizer had them (one list per state dict) if it is not.
            Default: names where both sides have them, else our own order; of our Muon (AdamW) groups only for a dict
            that is one of several.
        allow_missing: Parameters without state in it start afresh; otherwise they are an error.
        skip_matrices: Leave out all state of the parameters that are Muon's here, and take that of the rest: for a run
            that AdamW began. Matrices keep what they had, which is nothing in a new optimizer.

    Returns:
        What was mapped, converted and left out; `print` it.

    Raises:
        ValueError: Something cannot be mapped; says the parameter's name and what to do. Nothing has changed.
    """
    dicts = [_nested(d, params) for d in ([state_dict] if isinstance(state_dict, Mapping) else state_dict)]
    formats = [_format(d, kind) for d in dicts]
    targets = [
        _Target(name_of(g, i, at), p, g)
        for i, g in enumerate(optimizer.param_groups)
        for at, p in enumerate(g["params"])
    ]
    loaded: dict[Tensor, dict[str, Tensor]] = {}
    rows: list[LoadedRow] = []
    options: dict[str, None] = {}
    skipped: dict[str, None] = {}
    left_out = {id(t.param) for t in targets if skip_matrices and t.group["use_muon"]}
    fresh = {id(t.param): t.name for t in targets if t.param.requires_grad and id(t.param) not in left_out}
    for number, (saved, form) in enumerate(zip(dicts, formats, strict=True)):
        order = _order_for(saved, number, len(dicts), params)
        if skip_matrices and order is None and not _names_both(saved, targets):
            raise ValueError(
                "skip_matrices: the state dict numbers its parameters, and one optimizer for all has them in another "
                "order than Muon's and AdamW's groups here. Give the order it had: params=list(model.parameters()) if "
                "it was made so"
            )
        for target, entry in _matched(saved, form, targets, order, several=len(dicts) > 1):
            if id(target.param) in left_out:
                _check_same_shape(target, entry)
                skipped[target.name] = None
                continue
            options |= dict.fromkeys(_differing_options(target, entry))
            if not set(entry.state) - set(form.ignored):
                continue
            if target.param in loaded:
                raise ValueError(f"{target.name}: two of the state dicts have state for it. Give each parameter's once")
            loaded[target.param], row = _converted(target, entry)
            rows.append(row)
            fresh.pop(id(target.param), None)
    if not rows and not skipped:
        raise ValueError("the state dict holds no state at all: it was saved before the first step. Nothing to load")
    if fresh and not allow_missing:
        raise ValueError(
            f"{next(iter(fresh.values()))}: no state for it ({len(fresh)} such parameters). Give the other optimizer's "
            "state dict too, all ranks' (merge_ranks), or allow_missing=True to let them start afresh"
        )
    for p, state in loaded.items():
        optimizer.state[p] = state
    return LoadReport(
        tuple(f.name for f in formats), tuple(rows), tuple(fresh.values()), tuple(skipped), tuple(options)
    )


def merge_ranks(state_dicts: Sequence[StateDict]) -> dict[str, Any]:
    """One state dict from those that each rank saved, for optimizers that keep the momentum of a matrix on one rank.

    Raises:
        ValueError: They are not of one optimizer.
    """
    groups = [[{k: v for k, v in g.items() if k != "update_buffer"} for g in d["param_groups"]] for d in state_dicts]
    lists = [[g["params"] for g in theirs] for theirs in groups]
    if any(theirs != lists[0] for theirs in lists):
        raise ValueError("the state dicts list different parameters, so they are not of one optimizer's ranks")
    state: dict[Any, Any] = {}
    for saved in state_dicts:
        for key, value in saved["state"].items():
            state[key] = {**state.get(key, {}), **value}
    return {"state": state, "param_groups": state_dicts[0]["param_groups"]}


# ------------------------------------------------------------------------------------------------------ formats


def _format(saved: StateDict, kind: str) -> Format:
    if kind != "auto":
        if kind not in FORMATS:
            raise ValueError(f"kind={kind!r} is not one of auto, {', '.join(FORMATS)}")
        return FORMATS[kind]
    keys = set().union(*(g.keys() for g in saved["param_groups"]))
    has_buffers = any(key in s for s in saved["state"].values() for key in ("momentum_buffer", "moment1"))
    bare = keys - {"params", "param_names", "initial_lr", "use_muon"}
    if "mu" in keys or "algorithm" in keys:
        return FORMATS["dion"]
    if {"wd", "adamw_betas"} <= keys:
        return FORMATS["moonlight"]
    if "update_buffer" in keys:
        return FORMATS["keller"]
    if {"adamw_lr_ratio", "backup_adamw_lr"} & keys:
        return FORMATS["keller2024"]
    if "ns_coefficients" in keys or {"betas", "amsgrad"} <= keys:
        return FORMATS["torch"]
    if "wd_mult" in keys:
        return FORMATS["emerging"]
    if bare <= {"lr", "momentum", "weight_decay", "betas", "eps"}:
        return FORMATS["keller"]
    hint = " Its momentum may be a sum or an average." if has_buffers else ""
    raise ValueError(
        f"cannot tell which optimizer saved this: its groups have {sorted(bare)}.{hint} Give kind=, one of "
        + "; ".join(f"{f.name!r} ({f.about}: {'sum' if f.is_sum else 'average'})" for f in FORMATS.values())
    )


def _nested(saved: Any, params: Any) -> dict[str, Any]:
    """{"state", "param_groups"}, also from the flat form of torch.distributed.checkpoint."""
    if isinstance(saved, Mapping) and {"state", "param_groups"} <= saved.keys():
        return dict(saved)
    if not isinstance(saved, Mapping) or not any(str(key).startswith("state.") for key in saved):
        found = sorted(map(str, saved))[:6] if isinstance(saved, Mapping) else type(saved).__name__
        raise ValueError(
            f"an optimizer's state dict has the keys 'state' and 'param_groups', found {found}. Give that part of the "
            "checkpoint (Megatron-LM keeps it under 'optimizer')"
        )
    state: dict[str, dict[str, Any]] = {}
    groups: dict[str, dict[str, Any]] = {}
    for key, value in saved.items():
        part, _, rest = str(key).partition(".")
        name, _, option = rest.rpartition(".")
        (state if part == "state" else groups).setdefault(name, {})[option] = value
    return {"state": state, "param_groups": [{**options, "params": [name]} for name, options in groups.items()]}


# ----------------------------------------------------------------------------------------------------- matching


def _order_for(saved: StateDict, number: int, count: int, params: Any) -> Any:
    if params is None or isinstance(params, Mapping):
        return params
    params = list(params)
    if count == 1 or not all(isinstance(p, (list, tuple)) for p in params):
        if count > 1:
            raise ValueError(f"params must hold one list of parameters for each of the {count} state dicts")
        return params
    if len(params) != count:
        raise ValueError(f"params holds {len(params)} lists, there are {count} state dicts")
    return params[number]


def _matched(
    saved: StateDict, form: Format, targets: Sequence[_Target], order: Any, *, several: bool
) -> Iterable[tuple[_Target, _Entry]]:
    """Pairs of our parameter and theirs, by name if they have names, else by position."""
    members = [
        (key, names[at] if (names := g.get("param_names")) else key, g)
        for g in saved["param_groups"]
        for at, key in enumerate(g["params"])
    ]
    listed = {key for key, _, _ in members}
    unknown = [key for key in saved["state"] if key not in listed]
    if unknown:
        raise ValueError(f"the state dict has state for {unknown[0]!r}, which none of its groups lists: it is damaged")
    entries = [(name, _Entry(key, saved["state"].get(key, {}), g, form)) for key, name, g in members]
    by_param = {id(t.param): t for t in targets}
    if entries and all(isinstance(name, str) for name, _ in entries):
        if isinstance(order, Mapping):
            ours = {clean_name(n): by_param[id(p)] for n, p in order.items() if id(p) in by_param}
        else:
            ours = {clean_name(t.name): t for t in targets if t.group.get("param_names")}
        if ours or isinstance(entries[0][1].key, str):
            return _by_name(entries, ours)
    if isinstance(order, Mapping):
        raise ValueError(
            "params gives names, but the state dict numbers its parameters. Give params as a list, in the order in "
            "which the other optimizer had them"
        )
    if order is not None:
        strange = next((p for p in order if id(p) not in by_param), None)
        if strange is not None:
            raise ValueError(f"params lists a {tuple(strange.shape)} tensor that is none of the optimizer's parameters")
        chosen = [by_param[id(p)] for p in order]
    else:
        is_adamw = all("betas" in e.group and "momentum" not in e.group for _, e in entries)
        chosen = [t for t in targets if not several or bool(t.group["use_muon"]) != is_adamw]
    if len(chosen) != len(entries):
        raise ValueError(
            f"the state dict lists {len(entries)} parameters, {len(chosen)} are to take them. Give params= in the "
            "order the other optimizer had them, and the state dicts of all its parts"
        )
    return [(target, entry) for target, (_, entry) in zip(chosen, entries, strict=True)]


def _by_name(entries: Sequence[tuple[Any, _Entry]], ours: Mapping[str, _Target]) -> list[tuple[_Target, _Entry]]:
    if not ours:
        raise ValueError(
            "the state dict names its parameters, the optimizer does not: give params=dict(model.named_parameters())"
        )
    strange = [name for name, entry in entries if clean_name(name) not in ours and entry.state]
    if strange:
        raise ValueError(
            f"{strange[0]}: the state dict has state for it, but the optimizer has no such parameter (it has "
            f"{', '.join(list(ours)[:4])}, ...). Rename the keys of the state dict, or give params="
        )
    return [(ours[clean_name(name)], entry) for name, entry in entries if clean_name(name) in ours]


def _names_both(saved: StateDict, targets: Sequence[_Target]) -> bool:
    """Whether parameters can be matched by name."""
    named = all(g.get("param_names") or all(isinstance(key, str) for key in g["params"]) for g in saved["param_groups"])
    return named and all(t.group.get("param_names") for t in targets)


def _check_same_shape(target: _Target, entry: _Entry) -> None:
    """Raise ValueError for AdamW's state of another parameter: what is left out shows a wrong order all the same."""
    value = next((entry.state[k] for k in entry.format.exp_avg if k in entry.state), None)
    if isinstance(value, Tensor) and entry.is_adamw and value.shape != target.param.shape:
        raise ValueError(
            f"{target.name}: the state to leave out has shape {tuple(value.shape)}, the parameter "
            f"{tuple(target.param.shape)}. Give params= in the order the other optimizer had them"
        )


# --------------------------------------------------------------------------------------------------- conversion


def _converted(target: _Target, entry: _Entry) -> tuple[dict[str, Tensor], LoadedRow]:
    form, state, is_muon = entry.format, entry.state, bool(target.group["use_muon"])
    algorithm = entry.group.get("algorithm", "muon")  # dion's
    if algorithm == "normuon" and is_muon and not kept_keys(target.group):
        raise ValueError(
            f"{target.name}: its state is NorMuon's, but here it is plain Muon's. Give the optimizer variant='normuon'"
        )
    if is_muon and entry.is_adamw and algorithm in _ALGORITHMS:
        raise ValueError(
            f"{target.name}: its state is AdamW's ({sorted(map(str, state))}), but here it is Muon's. Give "
            "skip_matrices=True to go on from AdamW: it leaves out the state of all matrices and takes the rest. Or "
            "route it alike"
        )
    if algorithm not in _ALGORITHMS or entry.is_adamw == is_muon:
        theirs = algorithm if algorithm not in _ALGORITHMS else "AdamW" if entry.is_adamw else "Muon"
        raise ValueError(
            f"{target.name}: its state is {theirs}'s ({sorted(map(str, state))}), but here it is "
            f"{'Muon' if is_muon else 'AdamW'}'s. Route it alike, or leave its state out and give allow_missing=True"
        )
    wanted = {"momentum_buffer": form.momentum}
    if not is_muon:
        wanted = {"exp_avg": form.exp_avg, "exp_avg_sq": form.exp_avg_sq, "step": form.step}
    picked = {key: next((k for k in names if k in state), None) for key, names in wanted.items()}
    known = {*form.ignored, *(name for names in wanted.values() for name in names)}
    kept = kept_keys(target.group) if is_muon else ()
    theirs_kept = {key: (key, *form.second_moment) if key == NorMuon.key else (key,) for key in kept}
    known.update(*theirs_kept.values())
    extra = sorted(str(key) for key in state if key not in known)
    if extra:
        raise ValueError(
            f"{target.name}: its state has {extra[0]!r}, which {'Muon' if is_muon else 'AdamW'} here has no use for, "
            "so the run could not go on as it was. Remove it from the state dict to go on without"
        )
    out: dict[str, Tensor] = {}
    conversions: list[str] = []
    for key, theirs_key in picked.items():
        if key == "step":
            number = next((entry.group[k] for k in form.step if k in entry.group), None)
            value = state[theirs_key] if theirs_key is not None else number
            out["step"] = read_step(target.name, value, target.param)
            continue
        if theirs_key is None:
            raise ValueError(
                f"{target.name}: its state has {sorted(map(str, state))} but none of {wanted[key]}, as {form.about} "
                f"has. Give kind=, one of {', '.join(FORMATS)}"
            )
        out[key] = _tensor(target, entry, key, state[theirs_key], conversions)
    for key, names in theirs_kept.items():
        theirs_key = next((k for k in names if k in state), None)
        value = None if theirs_key is None else state[theirs_key]
        out[key] = taken_over(
            target.name, target.param, target.group, key, value, form.name == "dion", conversions, _own_part
        )
    source = ", ".join(sorted({str(k) for k in picked.values() if k is not None}))
    return out, LoadedRow(target.name, f"{entry.key}: {source}", tuple(dict.fromkeys(conversions)))


def _tensor(target: _Target, entry: _Entry, key: str, value: Any, conversions: list[str]) -> Tensor:
    p = target.param
    if not isinstance(value, Tensor) or not value.is_floating_point():
        raise ValueError(f"{target.name}: its {key} is a {type(value).__name__}, not a floating-point tensor")
    if is_dtensor(p) and not is_dtensor(value) and value.shape == p.shape:
        value = _own_part(target.name, p, value)
        conversions.append("cut to this rank's part")
    try:
        check_buffer(p, value, key)
    except ValueError as wrong:
        raise ValueError(f"{target.name}: {wrong}") from None
    engine = engine_of(p)
    storage = engine.storage(value).detach()
    dtype = (gradient_dtype(p) if key == "momentum_buffer" else p.dtype) or storage.dtype
    if key == "momentum_buffer" and entry.format.is_sum:
        mu = entry.group.get(entry.format.mu)
        if mu is None:
            raise ValueError(
                f"{target.name}: its group has no {entry.format.mu!r}, which is needed to turn a sum into an average"
            )
        wide = storage if storage.dtype == torch.float64 else storage.float()
        storage = wide * (1 - float(mu))
        conversions.append(f"x (1 - {float(mu):g})")
    if engine_of(p).storage(value).dtype != dtype:
        conversions.append(f"{str(value.dtype)[6:]} to {str(dtype)[6:]}")
    return engine.wrap(storage.to(device=p.device, dtype=dtype, copy=True), p)


def _own_part(name: str, p: Tensor, full: Tensor) -> Tensor:
    """This rank's part of a whole tensor, in the form of the DTensor that the parameter is. Communicates nothing."""
    assert is_dtensor(p), "others have all of a whole tensor"
    engine = engine_of(p)
    text = engine.claim(p, {}).text
    told = held_as_placed(p) if engine.believes_placements else []
    if len(set(told)) != 1:
        raise ValueError(
            f"{name}: which rows a rank keeps cannot be told from its placements alone ({text}). Give its state "
            "as a DTensor placed like the parameter"
        )
    return engine.wrap(_cut(full.to(p.device), told[0], engine.storage(p).shape), p)


def _cut(full: Tensor, held: Iterable[Held], shape: Sequence[int]) -> Tensor:
    storage = full.new_zeros(tuple(shape))
    for box, local in held:
        if box.numel:
            assert isinstance(box, Box), "a DTensor holds boxes"
            here = tuple(slice(a, a + n) for a, n in zip(local, box.size, strict=True))
            there = tuple(slice(a, a + n) for a, n in zip(box.offset, box.size, strict=True))
            storage[here] = full[there]
    return storage


def _differing_options(target: _Target, entry: _Entry) -> list[str]:
    theirs = {_OPTION_NAMES.get(key, key): value for key, value in entry.group.items()}
    found = []
    for key in _COMPARED:
        skip = key not in theirs or (key in ("momentum", "nesterov", "ns_steps") and not target.group["use_muon"])
        if skip or key not in target.group or (key == "betas" and target.group["use_muon"]):
            continue
        ours, other = target.group[key], theirs[key]
        if key == "ns_steps" and ours is None:  # the schedule's own number
            ours = len(per_step(target.group["ns_coefficients"], None))
        same = tuple(ours) == tuple(other) if isinstance(ours, (tuple, list)) else ours == other
        if not same:
            found.append(f"{key}={ours!r} (theirs: {other!r})")
    return found
