"""Options: those of the whole optimizer, in objects of their own, and options of a parameter group."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args
from weakref import WeakSet

import torch
from torch import Tensor

from shardmuon.momentum.keeper import Keeper, MomentumDtype
from shardmuon.orthogonalize import MethodName
from shardmuon.orthogonalize.choice import Chooser
from shardmuon.orthogonalize.gram import check_gram_dtype
from shardmuon.orthogonalize.schedules import Triples, hashable, triples
from shardmuon.plan.machines import Machine
from shardmuon.texts import nearest
from shardmuon.variants import VARIANT_OPTIONS, check_variant

# ------------------------------------------------------------------------------------------ the whole optimizer's

AuditAction = Literal["raise", "warn"]
WeightDecayMode = Literal["decoupled", "independent", "cautious"]
_FaultOf = Callable[[Any], str]  # what a value must be, after its name; "" if it is


def _one_of(*allowed: object) -> _FaultOf:
    text = f"is not one of {', '.join(map(repr, allowed))}"
    return lambda value: "" if any(type(value) is type(one) and value == one for one in allowed) else text


def _whole_number(most: float = math.inf, *, optional: bool = True) -> _FaultOf:
    text = f"must be {'None or ' if optional else ''}a whole number from 1 {'on' if most == math.inf else f'to {most}'}"
    return lambda value: "" if (optional and value is None) or (type(value) is int and 1 <= value <= most) else text


def _number(most: float = math.inf) -> _FaultOf:
    """A number from 0 on, or a tensor of one."""
    text = "must be finite and at least 0" if most == math.inf else f"must be from 0 to {most:g}"

    def fault_of(value: Any) -> str:
        if isinstance(value, str):  # which `float` would read: but steps and schedulers multiply what a group has
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
    return "" if callable(value) else _one_of(None, *LR_SCALES)(value)


def _beta_fault(value: Any) -> str:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return "" if is_number and 0.0 <= value < 1.0 else "must be a number in [0, 1)"


def _betas_fault(value: Any) -> str:
    is_pair = isinstance(value, (tuple, list)) and len(value) == 2
    if is_pair and not any(map(_number(1.0), value)) and all(beta < 1.0 for beta in value):
        return ""
    return "must be two numbers in [0, 1)"


def _machine_fault(value: object) -> str:
    fits = value is None or isinstance(value, Machine)
    return "" if fits else "must be None or a Machine, as shardmuon.plan.machines.MACHINES['h100']"


def _only(wanted: bool, why: str) -> _FaultOf:
    return lambda value: "" if value is wanted else f"cannot be taken over: {why}. Start it with fresh state"


# Options of the whole optimizer, and those of a group.
_CHECKS: dict[str, _FaultOf] = {
    "Orthogonalizer.method": _one_of(*get_args(MethodName)),
    "Orthogonalizer.dtype": _one_of(None, torch.bfloat16, torch.float16, torch.float32, torch.float64),
    "Exchange.dtype": _one_of(None, torch.bfloat16, torch.float32, torch.float64),
    "Exchange.bucket_bytes": _whole_number(),
    "Exchange.machine": _machine_fault,
    "Storage.momentum_dtype": _one_of(None, torch.float32, torch.bfloat16, "int8"),
    "Storage.momentum_device": _one_of(None, "cpu"),
    "Storage.stochastic_rounding": _one_of(True, False),
    "Audit.every": _whole_number(),
    "Audit.samples": _whole_number(optional=False),
    "Audit.action": _one_of(*get_args(AuditAction)),
}
_GROUP_CHECKS: dict[str, _FaultOf] = {
    "lr": _number(),
    "weight_decay": _number(),
    "momentum": _number(1.0),
    "eps": _number(),
    "betas": _betas_fault,
    "beta2": _beta_fault,
    "weight_decay_mode": _one_of(*get_args(WeightDecayMode)),
    "adjust_lr_fn": _scale_fault,
    "ns_steps": _whole_number(99),
    **dict.fromkeys(("use_muon", "nesterov", "rank_local", "transposed"), _one_of(True, False)),
    # of a torch optimizer's group, added or loaded: what its name does not say
    "maximize": _only(False, "this optimizer minimizes"),
    "amsgrad": _only(False, "AdamW here keeps no largest second moment"),
    "decoupled_weight_decay": _only(True, "AdamW here is no Adam whose decay goes through the moments"),
}
_NEEDED = ("lr", "weight_decay")  # of either kind: AdamW would miss them when matrices have changed


class _Options:
    """Base of option objects: checks each field when it is made. Its text shows what differs from defaults."""

    def __post_init__(self) -> None:
        for one in fields(self):  # type: ignore[arg-type]
            name, value = f"{type(self).__name__}.{one.name}", getattr(self, one.name)
            fault = _CHECKS[name](value) if name in _CHECKS else ""
            if fault:
                raise ValueError(f"{name}={value!r} {fault}")

    def __repr__(self) -> str:
        changed = ((f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default)  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in changed)})"


@dataclass(frozen=True, slots=True, repr=False)
class Orthogonalizer(_Options):
    """Options of the orthogonalization. The schedule (`ns_coefficients`, `ns_steps`) is the parameter group's.

    Attributes:
        method: "standard": fp32 norm, then Newton-Schulz in batches. "gram": the same steps iterated on the m x m Gram
            matrix, up to twice as fast for long matrices. "auto": "gram" where its arithmetic, at its dtype's rate, is
            less by a quarter, else "standard": a rule of shape, schedule, dtype and kind of device. The plan prints
            what was taken and why. "torch": torch.optim.Muon's arithmetic bit for bit (bf16 cast before the norm).
        dtype: Products' torch dtype. None: "standard" takes bfloat16 where the device multiplies it in hardware,
            float32 on CPUs that do not; "gram" float16 on accelerators, float32 on CPUs. Ignored by "torch" (bfloat16).

    Raises:
        ValueError: A value that has no meaning here.
    """

    method: MethodName = "auto"
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        _Options.__post_init__(self)
        if self.method == "gram" and self.dtype is not None:
            check_gram_dtype(self.dtype)

    def chooser(self) -> Chooser:
        """The object that chooses how to orthogonalize each matrix."""
        return Chooser(self.method, self.dtype)


@dataclass(frozen=True, slots=True, repr=False)
class Exchange(_Options):
    """Options of the exchange between ranks: dtype, bucket size, rates.

    Attributes:
        dtype: Of momentum and updates on the wire, to which they are rounded on every layout, so also on one process.
            None: bfloat16 where a matrix's products are bfloat16 or float16, float64 where parameters or products are,
            else float32.
        bucket_bytes: Most bytes of whole matrices that one owner holds per bucket. None: as many as are cheapest,
            within the bound that `shardmuon.plan.items.Policy` states.
        machine: By whose rates plans are chosen, equal on all ranks. None: the row of the slowest device among them
            in `shardmuon.plan.machines`. No bit of an update depends on it.

    Raises:
        ValueError: A value that has no meaning here.
    """

    dtype: torch.dtype | None = None
    bucket_bytes: int | None = None
    machine: Machine | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Storage(_Options):
    """Options of how momentum and bf16 weights are stored. See docs/memory.md.

    Attributes:
        momentum_dtype: None (the gradient's dtype, in which it is computed too), torch.float32, torch.bfloat16 or
            "int8" (both computed in fp32).
        momentum_device: None (with the parameter) or "cpu".
        stochastic_rounding: Round bf16 weights at random, without bias, after each update.

    Raises:
        ValueError: A value that has no meaning here.
    """

    momentum_dtype: MomentumDtype = None
    momentum_device: Literal["cpu"] | None = None
    stochastic_rounding: bool = False


@dataclass(frozen=True, slots=True, repr=False)
class Audit(_Options):
    """Options of audits: which steps are compared with a dense reference. See docs/audit.md.

    Attributes:
        every: The first step and every so many. None: only when `shardmuon.audit` asks for it.
        samples: Matrices compared each time in each group of ranks, others every time.
        action: "raise" an `AuditError` on every rank, after the step; or "warn".

    Raises:
        ValueError: A value that has no meaning here.
    """

    every: int | None = None
    samples: int = 2
    action: AuditAction = "raise"


OPTION_OBJECTS = {"orthogonalizer": Orthogonalizer, "exchange": Exchange, "storage": Storage, "audit": Audit}
# A keyword of the optimizer, or a field of one -> how it is written: messages to who puts it elsewhere.
_PLACES = {
    option.name: f"{keyword}=shardmuon.{kind.__name__}({option.name}=...)"
    for keyword, kind in OPTION_OBJECTS.items()
    for option in fields(kind)
    if "_" in option.name  # "dtype" and the like may be anybody's
} | {keyword: f"{keyword}=..." for keyword in OPTION_OBJECTS}


@dataclass(frozen=True, slots=True)
class MuonConfig:
    """Options of a whole optimizer, as its constructor was given them."""

    orthogonalizer: Orthogonalizer = field(default_factory=Orthogonalizer)
    exchange: Exchange = field(default_factory=Exchange)
    storage: Storage = field(default_factory=Storage)
    audit: Audit = field(default_factory=Audit)

    def __post_init__(self) -> None:
        for key, kind in OPTION_OBJECTS.items():
            value = getattr(self, key)
            if not isinstance(value, kind):
                names = ", ".join(f"{f.name}=.." for f in fields(kind)[:2])
                raise TypeError(f"{key} must be a shardmuon.{kind.__name__}({names}), found {value!r}")

    def keeper(self) -> Keeper:
        """A keeper of momentum as `storage` says."""
        return Keeper(self.storage.momentum_dtype, self.storage.momentum_device, self.storage.stochastic_rounding)

    def text(self) -> str:
        """Text of the options, equal on ranks that do the same. Devices may differ from rank to rank."""
        here = self.orthogonalizer, replace(self.storage, momentum_device=None)
        return " ".join(repr(one).replace(" ", "") for one in (*here, self.exchange, self.audit))


# ------------------------------------------------------------------------------------------- a parameter group's

LrScale = str | Callable[[int, int], float] | None

# rows x cols -> factor on lr. Formulas and the field's clashing names: docs/learning_rate.md
LR_SCALES: dict[str, Callable[[int, int], float]] = {
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
    "num_heads": None,
    "transposed": False,
}
# Where plain tensors lie in this job. A checkpoint keeps none of it: it may be loaded into another layout.
PLACE_DEFAULTS: dict[str, Any] = {
    "tp_group": None,
    "process_group": None,
}
GROUP_DEFAULTS: dict[str, Any] = {
    "use_muon": True,
    **VIEW_DEFAULTS,
    "rank_local": False,
    **PLACE_DEFAULTS,
}
VIEW_OPTIONS, PLACE_OPTIONS = tuple(VIEW_DEFAULTS), tuple(PLACE_DEFAULTS)
# Not among the optimizer's defaults: CyclicLR and OneCycleLR cycle betas[0] if they find "betas" there, else momentum.
ADAMW_DEFAULTS: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8}
MUON_OPTIONS = (
    "momentum",
    "nesterov",
    "ns_coefficients",
    "ns_steps",
    "adjust_lr_fn",
    "weight_decay_mode",
    "variant",
    *VARIANT_OPTIONS,
)
ONLY_MUON = {*MUON_OPTIONS, *VIEW_OPTIONS}
GROUP_OPTIONS = (*dict.fromkeys(("use_muon", "lr", "weight_decay", *MUON_OPTIONS, *ADAMW_DEFAULTS, *GROUP_DEFAULTS)),)
# What belongs elsewhere, though it reads like an option of a group -> where.
_ELSEWHERE = {
    **dict.fromkeys(
        ("partition_dim", "partition_stride"),
        "belongs to the tensor: write param.tensor_model_parallel = True and param.partition_dim = ...",
    ),
    "split_dim": "is told by transposed=True: splits are of outputs, which are columns then",
}
# What other programs keep in a group: torch's schedulers and averaging, timm's layer-wise decay.
_FOREIGN = ("params", "param_names", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "lr_scale")


def lr_scale(adjust_lr_fn: LrScale, rows: int, cols: int) -> float:
    """The factor on the learning rate of a rows x cols matrix. The shape is the global matrix's, never a shard's."""
    function = adjust_lr_fn if callable(adjust_lr_fn) else LR_SCALES[adjust_lr_fn or "original"]
    return function(rows, cols)


def check_keys(where: str, given: Iterable[str]) -> None:
    """Raise ValueError, beginning with `where`, for a key of a group that is an option misspelled or misplaced. Other
    keys are somebody else's (a scheduler's) and stay."""
    for key in given:
        if key in GROUP_OPTIONS or key in _FOREIGN:
            continue
        place = _PLACES.get(key)
        if place is not None:
            raise ValueError(
                f"{where}{key} applies to the whole optimizer. Write Muon(..., {place}); where another class makes the "
                f"optimizer, as torch's ZeroRedundancyOptimizer, give it functools.partial(Muon, {place})"
            )
        if key in _ELSEWHERE:
            raise ValueError(f"{where}{key} {_ELSEWHERE[key]}")
        near = nearest(key, GROUP_OPTIONS, cutoff=0.8)
        if near is not None:
            raise ValueError(f"{where}there is no option {key!r}. Did you mean {near!r}?")


def options_text(config: MuonConfig, groups: Sequence[Mapping[str, Any]]) -> str:
    """Text of the optimizer's options that differ from their defaults, and of each group's that apply."""
    default: dict[str, Any] = {key: kind() for key, kind in OPTION_OBJECTS.items()}
    whole = {key: getattr(config, key) for key in default}
    lines = [f"    {key}={value!r}" for key, value in whole.items() if value != default[key]]
    for index, group in enumerate(groups):
        count = len(group["params"])
        lines.append(
            f"group {index}: {'Muon' if group['use_muon'] else 'AdamW'}, {count} parameter{'' if count == 1 else 's'}"
        )
        lines += [f"    {key}: {value}" for key, value in _shown(group).items()]
    return "\n".join(lines)


def _shown(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's options that apply to it, and what others keep in it."""
    hidden = {"params", "param_names", "use_muon", *(ADAMW_DEFAULTS if group["use_muon"] else ONLY_MUON)}
    quiet = {**GROUP_DEFAULTS, **VARIANT_OPTIONS, "variant": None, "ns_steps": None}
    return {
        key: value for key, value in group.items() if key not in hidden and not (key in quiet and value == quiet[key])
    }


def view_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's options of which rows form a matrix."""
    return {key: group[key] for key in VIEW_OPTIONS}


def per_step(coefficients: Any, steps: int | None) -> Triples:
    """One (a, b, c) per Newton-Schulz step, from a group's `ns_coefficients` and `ns_steps`."""
    return triples(hashable(coefficients), steps)


def given_lr(where: str, lr: float | Tensor | None) -> float | Tensor:
    """The learning rate that `where`, a function, was given.

    Raises:
        TypeError: None. No default suits.
    """
    if lr is None:
        raise TypeError(
            f"{where} needs lr: write lr=0.03 to train from scratch, AdamW's lr with "
            'adjust_lr_fn="match_rms_adamw" coming from AdamW, or the lr of your torch.optim.Muon'
        )
    return lr


SETS = (set, frozenset, WeakSet)  # of no order, or one of its own in every process


def refuse_sets(where: str, given: object, write: str) -> None:
    """Raise TypeError, beginning with `where`, for what has no order, or one of its own in every process.

    Ranks pair what they list by position, so sets would pair pieces of different matrices.
    """
    if isinstance(given, SETS):
        raise TypeError(
            f"{where} must come in an order that all ranks share, and a {type(given).__name__} has another one in each "
            f"process: give {write}, not a set"
        )


def check_hyperparameters(where: str, group: Mapping[str, Any]) -> None:
    """Raise ValueError, beginning with `where`, for the first option of a group that has no meaning. Options of either
    kind are checked in any group: its `use_muon` may change."""
    for key, fault_of in _GROUP_CHECKS.items():
        fault = fault_of(group[key]) if key in group or key in _NEEDED else ""
        if fault:
            raise ValueError(f"{where}{key}={group[key]!r} {fault}")
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
