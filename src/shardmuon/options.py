"""Options of the whole optimizer and of parameter groups, with checks of their values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import Any, Literal, get_args
from weakref import WeakSet

import torch
from torch import Tensor

from shardmuon.momentum.keeper import Keeper, MomentumDtype
from shardmuon.orthogonalize import MethodName, check_gram_dtype
from shardmuon.orthogonalize.choice import Chooser
from shardmuon.orthogonalize.schedules import per_step
from shardmuon.texts import did_you_mean, nearest
from shardmuon.variants import check_variant

# ------------------------------------------------------------------------------------------------ values

_FaultOf = Callable[[Any], str]  # option's value -> end of an error message ("must be a number"), or "" if valid


def _one_of(*allowed: object) -> _FaultOf:
    text = f"is not one of {', '.join(map(repr, allowed))}"
    return lambda value: "" if any(type(value) is type(one) and value == one for one in allowed) else text


def _whole_number(most: float = math.inf) -> _FaultOf:
    text = f"must be None or a whole number from 1 {'on' if most == math.inf else f'to {most}'}"
    return lambda value: "" if value is None or (type(value) is int and 1 <= value <= most) else text


def _number(most: float = math.inf) -> _FaultOf:
    """Make a check that accepts numbers from 0 to `most`, including one-element tensors."""
    text = "must be finite and at least 0" if most == math.inf else f"must be from 0 to {most:g}"

    def fault_of(value: Any) -> str:
        if isinstance(value, str):  # `float` would accept "0.1", but steps and schedulers do arithmetic on the value
            return "is text, not a number. Write it without quotes"
        if isinstance(value, Tensor) and value.numel() != 1:
            return f"must have one element, found shape {tuple(value.shape)}"
        try:
            number = float(value.detach() if isinstance(value, Tensor) else value)
        except (TypeError, ValueError):
            return "must be a number"
        return "" if math.isfinite(number) and 0.0 <= number <= most else text

    return fault_of


def _scale_fault(value: object) -> str:
    remedy = ": for a factor c, write c times the lr and weight_decay / c in the group" if callable(value) else ""
    return _one_of(None, *_LR_SCALES)(value) + remedy


def _betas_fault(value: Any) -> str:
    is_pair = isinstance(value, (tuple, list)) and len(value) == 2
    if is_pair and not any(map(_number(1.0), value)) and all(beta < 1.0 for beta in value):
        return ""
    return "must be two numbers in [0, 1)"


def _only(wanted: bool, why: str) -> _FaultOf:
    return lambda value: "" if value is wanted else f"cannot be taken over: {why}. Start it with fresh state"


_TRUTH = _one_of(True, False)

# The check of each option: first the options of the whole optimizer, then those of parameter groups.
_CHECKS: dict[str, _FaultOf] = {
    "method": _one_of(*get_args(MethodName)),
    "ns_dtype": _one_of(None, torch.bfloat16, torch.float16, torch.float32, torch.float64),
    "momentum_dtype": _one_of(None, torch.float32, torch.bfloat16, "int8"),
    "momentum_device": _one_of(None, "cpu"),
    "stochastic_rounding": _TRUTH,
    "bucket_bytes": _whole_number(),
    "audit_every": _whole_number(),
    "lr": _number(),
    "weight_decay": _number(),
    "momentum": _number(1.0),
    "eps": _number(),
    "betas": _betas_fault,
    "adjust_lr_fn": _scale_fault,
    "ns_steps": _whole_number(99),
    **dict.fromkeys(("use_muon", "nesterov", "transposed"), _TRUTH),
    # options that torch's optimizers store in their groups; a value that asks for another update rule is refused
    "maximize": _only(False, "this optimizer minimizes"),
    "amsgrad": _only(False, "AdamW here keeps no largest second moment"),
    "decoupled_weight_decay": _only(True, "AdamW here is no Adam whose decay goes through the moments"),
}


def _check_values(where: str, options: Mapping[str, Any]) -> None:
    """Raise ValueError for the first invalid option. The message starts with `where`."""
    for key, fault_of in _CHECKS.items():
        fault = fault_of(options[key]) if key in options else ""
        if fault:
            raise ValueError(f"{where}{key}={options[key]!r} {fault}")


# ------------------------------------------------------------------------------------------ the whole optimizer's


@dataclass(frozen=True)
class MuonConfig:
    """Options of the whole optimizer. Each is a keyword of `shardmuon.Muon`, whose docstring explains it.

    Raises:
        ValueError: An option is invalid.
    """

    method: MethodName = "auto"
    ns_dtype: torch.dtype | None = None
    momentum_dtype: MomentumDtype = None
    momentum_device: Literal["cpu"] | None = None
    stochastic_rounding: bool = False
    bucket_bytes: int | None = None
    audit_every: int | None = None

    def __post_init__(self) -> None:
        _check_values("", asdict(self))
        if self.method == "gram" and self.ns_dtype is not None:
            check_gram_dtype(self.ns_dtype)

    def changed(self) -> dict[str, Any]:
        """Return the options that differ from their defaults."""
        return {one.name: getattr(self, one.name) for one in fields(self) if getattr(self, one.name) != one.default}

    def stored(self) -> str:
        """Format the options in `STORED` that differ from their defaults. The text is empty if there are none, or if
        the only one is fp32 momentum."""
        found = {key: value for key, value in self.changed().items() if key in STORED}
        return "" if found == {"momentum_dtype": torch.float32} else ", ".join(f"{k}={v}" for k, v in found.items())

    def chooser(self) -> Chooser:
        """Create the object that chooses how to orthogonalize each matrix."""
        return Chooser(self.method, self.ns_dtype)

    def keeper(self) -> Keeper:
        """Create the object that stores momentum."""
        return Keeper(self.momentum_dtype, self.momentum_device, self.stochastic_rounding)

    def text(self) -> str:
        """Format the options that must be equal on all ranks (all except `momentum_device`), without defaults."""
        return " ".join(f"{key}={value}" for key, value in self.changed().items() if key != "momentum_device")


STORED = ("momentum_dtype", "momentum_device", "stochastic_rounding")
CONFIG_OPTIONS = tuple(one.name for one in fields(MuonConfig))


# ------------------------------------------------------------------------------------------- a parameter group's

# The factor on lr for a rows x cols matrix. docs/learning_rate.md explains the formulas, and which other libraries use
# the same names for different formulas.
_LR_SCALES: dict[str, Callable[[int, int], float]] = {
    # Keller Jordan's Muon; torch.optim.Muon "original"
    "original": lambda rows, cols: math.sqrt(max(1, rows / cols)),
    # Moonlight, arXiv 2502.16982; torch.optim.Muon "match_rms_adamw"
    "match_rms_adamw": lambda rows, cols: 0.2 * math.sqrt(max(rows, cols)),
    # Emerging-Optimizers, Megatron-LM and TransformerEngine "spectral"
    "spectral": lambda rows, cols: math.sqrt(max(rows, cols)),
    # Emerging-Optimizers "unit_rms_norm"
    "unit_rms_norm": lambda rows, cols: math.sqrt(rows / cols),
    "none": lambda rows, cols: 1.0,
}
VIEW_DEFAULTS: dict[str, Any] = {
    "view": "auto",
    "split_sizes": None,
    "split_groups": 1,
    "transposed": False,
}
# Process groups of plain tensors. Checkpoints do not contain them, because they may be loaded with another sharding.
PLACE_OPTIONS = ("tp_group", "process_group")
GROUP_DEFAULTS: dict[str, Any] = {
    "use_muon": True,
    **VIEW_DEFAULTS,
    **dict.fromkeys(PLACE_OPTIONS),
}
# Kept out of `optimizer.defaults`, because CyclicLR and OneCycleLR would cycle betas[0] instead of momentum if they
# found "betas" in it.
ADAMW_DEFAULTS: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8}
MUON_OPTIONS = (
    "momentum",
    "nesterov",
    "ns_coefficients",
    "ns_steps",
    "adjust_lr_fn",
    "variant",
)
ONLY_MUON = {*MUON_OPTIONS, *VIEW_DEFAULTS}
GROUP_OPTIONS = (*dict.fromkeys(("use_muon", "lr", "weight_decay", *MUON_OPTIONS, *ADAMW_DEFAULTS, *GROUP_DEFAULTS)),)
# Keys that users may mistake for group options. The value is the rest of the error message, which says what to write.
ELSEWHERE = {
    **{
        key: f"applies to the whole optimizer. Write Muon(..., {key}=...); where another class makes the optimizer, as "
        f"torch's ZeroRedundancyOptimizer, give it functools.partial(Muon, {key}=...)"
        for key in CONFIG_OPTIONS
    },
    "num_heads": "is written split_sizes=h in a group: a whole number means so many equal blocks",
    "rank_local": "is written process_group=(), tp_group=() in a group: no other rank has its tensors",
    "weight_decay_mode": 'is part of the variant: write variant="cautious", or "normuon+cautious"; for a decay that '
    "does not follow lr, let a scheduler set the group's weight_decay to wd / lr",
    "beta2": "of NorMuon is 0.95, see shardmuon.variants.NorMuon; AdamW's is in betas",
    "orthogonalizer": "is written Muon(..., method=..., ns_dtype=...)",
    "exchange": "is written Muon(..., bucket_bytes=...); what travels is as wide as ns_dtype says",
    "storage": "is written Muon(..., momentum_dtype=..., momentum_device=..., stochastic_rounding=...)",
    "audit": "is written Muon(..., audit_every=...)",
    **dict.fromkeys(
        ("partition_dim", "partition_stride"),
        "belongs to the tensor: write param.tensor_model_parallel = True and param.partition_dim = ...",
    ),
    "split_dim": "is told by transposed=True: splits are of outputs, which are columns then",
}
# Keys that other code stores in a group: torch's learning-rate schedulers, timm's layer-wise learning-rate decay.
_FOREIGN = ("params", "param_names", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "lr_scale")


@cache
def lr_scale(adjust_lr_fn: str | None, rows: int, cols: int) -> float:
    """Return the factor on the learning rate of a matrix with the global (never a shard's) shape rows x cols."""
    return _LR_SCALES[adjust_lr_fn or "original"](rows, cols)


def check_keys(where: str, given: Iterable[str]) -> None:
    """Raise ValueError for a misspelled or misplaced option among a group's keys. The message starts with `where`.
    Unknown keys that resemble no option, such as a scheduler's, are allowed."""
    for key in given:
        if key in GROUP_OPTIONS or key in _FOREIGN:
            continue
        if key in ELSEWHERE:
            raise ValueError(f"{where}{key} {ELSEWHERE[key]}")
        near = nearest(key, GROUP_OPTIONS, cutoff=0.8)
        if near is not None:
            raise ValueError(f"{where}there is no option {key!r}. Did you mean {near!r}?")


def unknown_keyword(key: str) -> TypeError:
    """Build the TypeError for a keyword that `Muon` does not have. Its message says what to write instead."""
    text = f"Muon.__init__() got an unexpected keyword argument {key!r}"
    if key in ELSEWHERE:
        return TypeError(f"{text}: {key} {ELSEWHERE[key]}")
    if key in GROUP_OPTIONS:
        return TypeError(f'{text}: it is an option of a group. Write {{"params": [...], "{key}": ...}}, or an override')
    return TypeError(text + did_you_mean(key, (*GROUP_OPTIONS, *CONFIG_OPTIONS)))


def options_text(config: MuonConfig, groups: Sequence[Mapping[str, Any]]) -> str:
    """Format the optimizer's non-default options and the options of each group."""
    lines = [f"    {key}: {value}" for key, value in config.changed().items()]
    for index, group in enumerate(groups):
        count = len(group["params"])
        lines.append(
            f"group {index}: {'Muon' if group['use_muon'] else 'AdamW'}, {count} parameter{'' if count == 1 else 's'}"
        )
        lines += [f"    {key}: {value}" for key, value in _shown(group).items()]
    return "\n".join(lines)


def _shown(group: Mapping[str, Any]) -> dict[str, Any]:
    """Select the entries of a group to print: the options of the algorithm that the group uses (Muon or AdamW), and
    keys that other code, such as a scheduler, has stored."""
    hidden = {"params", "param_names", "use_muon", *(ADAMW_DEFAULTS if group["use_muon"] else ONLY_MUON)}
    quiet = {**GROUP_DEFAULTS, "variant": None, "ns_steps": None}
    return {
        key: value for key, value in group.items() if key not in hidden and not (key in quiet and value == quiet[key])
    }


def view_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Select the options of a group that define which matrices each of its parameters holds."""
    return {key: group[key] for key in VIEW_DEFAULTS}


def given_lr(where: str, lr: float | Tensor | None) -> float | Tensor:
    """Return `lr`. It has no default, since no value suits every model. `where` names the function that takes `lr`.

    Raises:
        TypeError: `lr` is None.
    """
    if lr is None:
        raise TypeError(
            f"{where} needs lr: write lr=0.03 to train from scratch, AdamW's lr with "
            'adjust_lr_fn="match_rms_adamw" coming from AdamW, or the lr of your torch.optim.Muon'
        )
    return lr


SETS = (set, frozenset, WeakSet)  # each process may iterate over their elements in another order


def refuse_sets(where: str, given: object, write: str) -> None:
    """Raise TypeError if parameters are given in a set. The message starts with `where` and suggests `write` instead.

    Ranks match parameters by position, but the order of a set differs between processes, so that shards of different
    matrices would be combined.
    """
    if isinstance(given, SETS):
        raise TypeError(
            f"{where} must come in an order that all ranks share, and a {type(given).__name__} has another one in each "
            f"process: give {write}, not a set"
        )


def check_hyperparameters(where: str, group: Mapping[str, Any]) -> None:
    """Raise ValueError for the first invalid option of a group. The message starts with `where`. Values of both Muon's
    and AdamW's options are checked in every group, since `use_muon` may change later."""
    # a missing option must raise here; in the AdamW step it would raise after matrices have changed
    needed = {key: group[key] for key in ("lr", "weight_decay")}
    _check_values(where, {**needed, **group})
    if not group.get("use_muon", True):
        return
    try:
        check_variant(group)
    except ValueError as wrong:
        raise ValueError(f"{where}{wrong}") from None
    try:
        per_step(group["ns_coefficients"], group["ns_steps"])
    except (TypeError, ValueError) as wrong:
        raise ValueError(
            f"{where}ns_coefficients={group['ns_coefficients']!r} must be the name of a schedule, (a, b, c) or one "
            f"(a, b, c) per step: {wrong}"
        ) from None
