"""Options of the whole optimizer and of parameter groups, and checks of their values. `Settings` is a frozen copy of a
group's options and is rebuilt only when the options change. No function in this module communicates with other ranks.

A learning rate can be a tensor. Every step reads the tensor's value, because ranks compare their learning rates. If the
tensor is on an accelerator, this read waits for the accelerator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache, cached_property
from operator import itemgetter
from typing import Any, ClassVar, Literal, get_args
from weakref import WeakSet

import torch
from torch import Tensor

from shardmuon.comm.groups import GroupRef
from shardmuon.errors import about
from shardmuon.layout.engines import engine_for
from shardmuon.layout.engines.base import Group, named_params
from shardmuon.layout.engines.fsdp1 import UnitPlace
from shardmuon.layout.engines.tensor_parallel import TensorParallelEngine, check_expert
from shardmuon.layout.views import MatrixView, matrix_view
from shardmuon.momentum.keeper import MomentumDtype
from shardmuon.orthogonalize import MethodName, products_dtype
from shardmuon.orthogonalize.schedules import Triples, schedule
from shardmuon.texts import did_you_mean
from shardmuon.variants import Stages, check_variant, names_in, stages_of

# ------------------------------------------------------------------------------------------------ values

# Function that checks an option's value. It returns "" if the value is valid, and otherwise the end of an error
# message.
_FaultOf = Callable[[Any], str]


def _one_of(*allowed: object) -> _FaultOf:
    text = f"is not one of {', '.join(map(repr, allowed))}"
    return lambda value: "" if any(type(value) is type(one) and value == one for one in allowed) else text


def _whole_number(most: float = math.inf) -> _FaultOf:
    text = f"must be None or a whole number from 1 {'on' if most == math.inf else f'to {most}'}"
    return lambda value: "" if value is None or (type(value) is int and 1 <= value <= most) else text


def _number(most: float = math.inf) -> _FaultOf:
    """Make a check that accepts finite numbers from 0 to `most`, including one-element tensors."""
    text = "must be finite and at least 0" if most == math.inf else f"must be from 0 to {most:g}"

    def fault_of(value: Any) -> str:
        # reject strings: `float` accepts "0.1", but learning-rate schedulers cannot compute with a string
        if isinstance(value, str):
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

# Functions that check the values of the optimizer's and the groups' options, keyed by option name.
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
    # options that torch's optimizers store in their groups; values that would change the update rule are rejected
    "maximize": _only(False, "this optimizer minimizes"),
    "amsgrad": _only(False, "AdamW here keeps no largest second moment"),
    "decoupled_weight_decay": _only(True, "AdamW here is no Adam whose decay goes through the moments"),
}


def _check_values(where: str, options: Mapping[str, Any]) -> None:
    """Raise ValueError if an option of the optimizer or of a parameter group has an invalid value. The message starts
    with `where` and names the first such option."""
    for key, fault_of in _CHECKS.items():
        fault = fault_of(options[key]) if key in options else ""
        if fault:
            raise ValueError(f"{where}{key}={options[key]!r} {fault}")


# ------------------------------------------------------------------------------------------ the whole optimizer's


@dataclass(frozen=True)
class MuonConfig:
    """Options of the whole optimizer. Each field is a keyword argument of `shardmuon.Muon` and is documented there.

    Raises:
        ValueError: An option is invalid.
    """

    STORED: ClassVar = ("momentum_dtype", "momentum_device", "stochastic_rounding")
    method: MethodName = "auto"
    ns_dtype: torch.dtype | None = None
    momentum_dtype: MomentumDtype = None
    momentum_device: Literal["cpu"] | None = None
    stochastic_rounding: bool = False
    bucket_bytes: int | None = None
    audit_every: int | None = None

    def __post_init__(self) -> None:
        _check_values("", asdict(self))
        # raises ValueError if `method` does not allow `ns_dtype`
        products_dtype(self.method, self.ns_dtype, torch.device("cpu"))

    def changed(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, as a dict from name to value."""
        return {one.name: getattr(self, one.name) for one in fields(self) if getattr(self, one.name) != one.default}

    def stored(self) -> str:
        """Format the non-default options that determine how momentum is stored (`STORED`). Return an empty string if
        there are none, or only `momentum_dtype=torch.float32`."""
        found = {key: value for key, value in self.changed().items() if key in self.STORED}
        return "" if found == {"momentum_dtype": torch.float32} else ", ".join(f"{k}={v}" for k, v in found.items())

    def text(self) -> str:
        """Format the options that differ from their defaults, as text that ranks compare. Leave out `momentum_device`,
        the only option that can differ between ranks."""
        return " ".join(f"{key}={value}" for key, value in self.changed().items() if key != "momentum_device")


_CONFIG_OPTIONS = tuple(one.name for one in fields(MuonConfig))


# ------------------------------------------------------------------------------------------- a parameter group's

# Dict from each value of `adjust_lr_fn` to a function that takes the shape (rows, cols) of a matrix and returns the
# factor by which lr is multiplied. docs/learning_rate.md explains the formulas, and lists libraries that use the same
# names for other formulas.
_LR_SCALES: dict[str, Callable[[int, int], float]] = {
    # the learning-rate scale of Keller Jordan's Muon, and of torch.optim.Muon with adjust_lr_fn="original"
    "original": lambda rows, cols: math.sqrt(max(1, rows / cols)),
    # the learning-rate scale of Moonlight (arXiv 2502.16982), and of torch.optim.Muon with
    # adjust_lr_fn="match_rms_adamw"
    "match_rms_adamw": lambda rows, cols: 0.2 * math.sqrt(max(rows, cols)),
    # the learning-rate scale that Emerging-Optimizers, Megatron-LM and TransformerEngine call "spectral"
    "spectral": lambda rows, cols: math.sqrt(max(rows, cols)),
    # the learning-rate scale that Emerging-Optimizers calls "unit_rms_norm"
    "unit_rms_norm": lambda rows, cols: math.sqrt(rows / cols),
    "none": lambda rows, cols: 1.0,
}
VIEW_DEFAULTS: dict[str, Any] = {
    "view": "auto",
    "split_sizes": None,
    "split_groups": 1,
    "transposed": False,
}
# Group options whose values are process groups. They apply to plain tensors, not to DTensors. Checkpoints do not
# contain these options, because a checkpoint can be loaded with a different sharding.
PLACE_OPTIONS = ("tp_group", "process_group")
# AdamW's defaults must not be in `optimizer.defaults`: if CyclicLR and OneCycleLR find "betas" there, they change
# betas[0] instead of momentum.
ADAMW_DEFAULTS: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8}
ONLY_MUON = (
    "momentum",
    "nesterov",
    "ns_coefficients",
    "ns_steps",
    "adjust_lr_fn",
    "variant",
    *VIEW_DEFAULTS,
)
GROUP_OPTIONS = ("use_muon", "lr", "weight_decay", *ONLY_MUON, *ADAMW_DEFAULTS, *PLACE_OPTIONS)
# Keys that users are likely to write in a parameter group by mistake. Each value is the text that follows the key in
# the error message.
ELSEWHERE = {
    **{
        key: f"applies to the whole optimizer. Write Muon(..., {key}=...); where another class makes the optimizer, as "
        f"torch's ZeroRedundancyOptimizer, give it functools.partial(Muon, {key}=...)"
        for key in _CONFIG_OPTIONS
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
# Keys that torch itself, torch's learning-rate schedulers and timm's layer-wise learning-rate decay store in a group.
_FOREIGN = ("params", "param_names", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "lr_scale")


@cache
def lr_scale(adjust_lr_fn: str | None, rows: int, cols: int) -> float:
    """Return the factor by which the learning rate of a matrix is multiplied. rows x cols is the global shape of the
    matrix, never the shape of a shard."""
    return _LR_SCALES[adjust_lr_fn or "original"](rows, cols)


def check_keys(where: str, given: Iterable[str], *, strict: bool) -> None:
    """Raise ValueError if a key is a misspelled group option, or an option that does not belong in a group. If `strict`
    is True, any key that is not a group option is an error. Otherwise, other keys (such as a scheduler's) are allowed
    if they do not resemble a group option. The error message starts with `where`."""
    for key in given:
        if key in GROUP_OPTIONS or (key in _FOREIGN and not strict):
            continue
        if key in ELSEWHERE:
            raise ValueError(f"{where}{key} {ELSEWHERE[key]}")
        near = did_you_mean(key, GROUP_OPTIONS, cutoff=0.6 if strict else 0.8)
        if near or strict:
            raise ValueError(f"{where}there is no group option {key!r}{near}. Allowed: {', '.join(GROUP_OPTIONS)}")


def unknown_keyword(key: str) -> TypeError:
    """Build the TypeError for a keyword that `Muon` does not have. If possible, the message suggests the right keyword
    or option."""
    text = f"Muon.__init__() got an unexpected keyword argument {key!r}"
    if key in ELSEWHERE:
        return TypeError(f"{text}: {key} {ELSEWHERE[key]}")
    if key in GROUP_OPTIONS:
        return TypeError(f'{text}: it is an option of a group. Write {{"params": [...], "{key}": ...}}, or an override')
    return TypeError(text + did_you_mean(key, (*GROUP_OPTIONS, *_CONFIG_OPTIONS)))


def given_lr(where: str, lr: float | Tensor | None) -> float | Tensor:
    """Return `lr`, or raise TypeError if it is None: no default would suit every model. The error message starts with
    `where`, the name of the function that takes `lr`."""
    if lr is None:
        raise TypeError(
            f"{where} needs lr: write lr=0.03 to train from scratch, AdamW's lr with "
            'adjust_lr_fn="match_rms_adamw" coming from AdamW, or the lr of your torch.optim.Muon'
        )
    return lr


SETS = (set, frozenset, WeakSet)  # the iteration order of sets can differ between processes


def refuse_sets(where: str, given: object, write: str) -> None:
    """Raise TypeError if `given` is a set. The message starts with `where` and suggests `write`, such as "a list",
    instead.

    Ranks match parameters by position. Since the order of a set differs between processes, ranks would combine shards
    of different matrices.
    """
    if isinstance(given, SETS):
        raise TypeError(
            f"{where} must come in an order that all ranks share, and a {type(given).__name__} has another one in each "
            f"process: give {write}, not a set"
        )


def check_hyperparameters(where: str, group: Mapping[str, Any]) -> None:
    """Raise ValueError for the first invalid option of a group. The message starts with `where`. The options of both
    Muon and AdamW are checked in every group, since users can change `use_muon` later."""
    # Read lr and weight_decay here, so that a missing key raises KeyError before anything changes. Otherwise, the error
    # would occur only in the AdamW step, after Muon has changed matrices.
    _check_values(where, {"lr": group["lr"], "weight_decay": group["weight_decay"], **group})
    if not group.get("use_muon", True):
        return
    try:
        check_variant(group)
    except ValueError as wrong:
        raise ValueError(f"{where}{wrong}") from None
    try:
        schedule(group["ns_coefficients"], group["ns_steps"])
    except (TypeError, ValueError) as wrong:
        raise ValueError(
            f"{where}ns_coefficients={group['ns_coefficients']!r} must be the name of a schedule, (a, b, c) or one "
            f"(a, b, c) per step: {wrong}"
        ) from None


# ------------------------------------------------------------------------------------------ a group in one step

# Immutable types of option values. Settings are not cached if a group has an option of another type, such as a tensor
# or a list, because its value can change in place.
_LASTING = {type(None), bool, int, float, str, tuple, GroupRef}


@dataclass(frozen=True)
class Settings:
    """Frozen copy of the options of one parameter group that Muon updates.

    Attributes:
        lr: Learning rate as a float.
        given_lr: The group's learning rate as the user set it: a float or a tensor.
        coefficients: One triple (a, b, c) for each Newton-Schulz step.
        cautious: True if weight decay applies only to elements that the decay and the update change in the same
            direction.
        stages: Operations that the group's variant of Muon adds to a step.
        view: Options that define which matrices a parameter contains (the keys of `VIEW_DEFAULTS`).
        batch: The options that must be equal for all matrices of a batch, and on all ranks that share a plan, as text.
        planned: The options on which a plan depends (`batch`, `view`, and the group's process groups), as text.
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

    @classmethod
    def of(cls, group: Group) -> Settings:
        """Make the settings from a group's current options."""
        view, stages = {key: group[key] for key in VIEW_DEFAULTS}, stages_of(group)
        coefficients = schedule(group["ns_coefficients"], group["ns_steps"]).triples
        batch = f"{coefficients} {''.join(map(repr, stages))}".replace(" ", "")
        return cls(
            lr=float(group["lr"]),
            given_lr=group["lr"],
            weight_decay=float(group["weight_decay"]),
            momentum=float(group["momentum"]),
            nesterov=bool(group["nesterov"]),
            coefficients=coefficients,
            adjust_lr_fn=group["adjust_lr_fn"],
            cautious="cautious" in names_in(group["variant"]),
            stages=stages,
            view=view,
            batch=batch,
            planned=f"{batch} {view} {[group.get(key) for key in PLACE_OPTIONS]}",
        )

    @cached_property
    def text(self) -> str:
        """Format the settings as text. Ranks compare their texts to detect different settings."""
        # an fp64 tensor is formatted like a Python float, since both have the same precision
        kind = self.given_lr.dtype if isinstance(self.given_lr, Tensor) else torch.float64
        return (
            f"lr={self.lr}{'' if kind == torch.float64 else f' ({kind})'} weight_decay={self.weight_decay} "
            f"momentum={self.momentum} nesterov={self.nesterov} coefficients={self.coefficients} "
            f"adjust_lr_fn={self.adjust_lr_fn} cautious={self.cautious} stages={self.stages}"
        )


def view_of(name: str, param: Tensor, group: Group) -> MatrixView:
    """Divide a parameter into matrices, based on its shape and its group's options. Raise ValueError, with the
    parameter's name, if the options do not match the shape."""
    with about(name):
        engine = engine_for(param, group)
        shape = engine.shape(param)
        try:
            return matrix_view(shape, **{key: group[key] for key in VIEW_DEFAULTS})
        except ValueError:
            if isinstance(engine, TensorParallelEngine) and not engine.knows_shape(param) and len(shape) > 1:
                # The global shape is unknown until a plan is made, so return a view without matrices. The options are
                # checked when the plan is made.
                return MatrixView(shape, shape, -1, (), 2 if group["view"] == "stack" else 1)
            raise


class OptionsReader:
    """Cache of the settings of an optimizer's parameter groups. The settings of a group are rebuilt when its options
    change."""

    def __init__(self) -> None:
        self._kept: list[tuple[tuple[object, ...], Settings | None]] = []

    def read(self, groups: Sequence[Group]) -> list[Settings | None]:
        """Return the current settings of each group, with None for groups that AdamW updates.

        Raises:
            ValueError: An option is invalid. The message contains the group's index.
        """
        for index, group in enumerate(groups):
            said = tuple(map(group.get, GROUP_OPTIONS))
            lasts = index < len(self._kept) and _LASTING.issuperset(map(type, said))
            if not lasts or self._kept[index][0] != said:
                with about(f"group {index}"):
                    check_hyperparameters("", group)
                    settings = Settings.of(group) if group["use_muon"] else None
                self._kept[index : index + 1] = [(said, settings)]
        return list(map(itemgetter(1), self._kept[: len(groups)]))


def loaded_over(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the options of a saved group (`theirs`) into those of the optimizer's group (`mine`). The saved options
    take precedence, with two exceptions:

    - Process groups and parameter names are not replaced. Saved groups have no process groups, and saved names can
      contain prefixes of wrappers such as torch.compile.
    - `variant` is not replaced if the saved group has no variant. So loading raises an error for the variant's missing
      state, instead of silently dropping the variant.
    """
    group = {**mine, **theirs, **{key: mine[key] for key in (*PLACE_OPTIONS, "param_names") if key in mine}}
    if mine.get("variant") is not None and group["variant"] is None:
        group["variant"] = mine["variant"]
    return group


def new_group(known: Sequence[Group], param_group: Group, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Copy and check a parameter group that the user has passed. In the copy, parameters are in a list, process groups
    are `GroupRef`s, and options that the user has not set have default values. `known` contains the groups that the
    optimizer already has.

    Raises:
        TypeError: The group is not a dict, its parameters are in a set, or a parameter is not a tensor or has an
            integer or complex dtype.
        ValueError: An option or a parameter is invalid, or this rank does not belong to one of the group's process
            groups.
    """
    if not isinstance(param_group, dict):
        raise TypeError(f"a param group must be a dict, found {type(param_group).__name__}")
    params = param_group.get("params")
    refuse_sets("parameters", params, "a list")
    # Megatron-FSDP expects "params" to be the first key. The group gets the options of both Muon and AdamW, because
    # users can change `use_muon` later.
    group = {"params": (), **defaults, **ADAMW_DEFAULTS, **param_group}
    group["params"] = [params] if isinstance(params, Tensor) else list(params or ())
    group |= {key: GroupRef.of(group[key], key) for key in PLACE_OPTIONS}
    _check_group(known, group, [key for key in param_group if key != "params"], defaults)
    return group


def _check_group(known: Sequence[Group], group: Group, given: Collection[str], defaults: Mapping[str, Any]) -> None:
    """Check a parameter group whose missing options have been filled in with defaults. Raise TypeError or ValueError if
    the group is invalid. `given` contains the keys that the user has set."""
    index = len(known)
    params = [p[1] if isinstance(p, tuple) else p for p in group["params"]]
    names = [p[0] for p in group["params"] if isinstance(p, tuple)] or group.get("param_names") or []
    if names and len(names) != len(params):
        raise ValueError(
            f"group {index}: found {len(names)} param_names for {len(params)} parameters, so that messages would "
            "name wrong ones. Give one name for each, or leave param_names out"
        )
    check_keys(f"group {index}: ", given, strict=False)
    check_hyperparameters(f"group {index}: ", group)
    listed = {id(p): name for i, g in enumerate(known) for name, p in named_params(g, i)}
    meaningless = {key: group[key] for key in given if key in ONLY_MUON and group[key] != defaults[key]}
    unset = {*PLACE_OPTIONS}.difference(given)
    for position, p in enumerate(params):
        name = names[position] if position < len(names) else f"parameter {position} of group {index}"
        _check_tensor(name, p)
        if id(p) in listed:
            raise ValueError(f"{name}: the same parameter is listed twice (first as {listed[id(p)]}). List it once")
        listed[id(p)] = name
        with about(name):
            check_expert(p, group, unset)
            UnitPlace.refuse_flat(p)
            if isinstance(engine := engine_for(p, group), TensorParallelEngine):
                engine.cut(p)  # raises ValueError if the parameter's attributes describe an invalid sharding
        if group["use_muon"]:
            _check_matrix(name, p, group, given)
        # If a group has all of Muon's options, it was probably copied from another optimizer's `param_groups`. The user
        # did not choose these options, so allow them although they have no effect under AdamW.
        elif meaningless and not set(ONLY_MUON).issubset(given):
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
    if not p.is_floating_point():
        raise TypeError(f"{name}: dtype {p.dtype} cannot be optimized; parameters must be real and floating point")
