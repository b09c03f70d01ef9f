"""Options: those of the whole optimizer, in objects of their own, and options of a parameter group."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch import Tensor

from shardmuon.momentum.keeper import Keeper, MomentumDtype
from shardmuon.orthogonalize import NS_METHODS, MethodName
from shardmuon.orthogonalize import tuning as tuning_files
from shardmuon.orthogonalize.choice import Chooser
from shardmuon.orthogonalize.gram import check_gram_dtype
from shardmuon.orthogonalize.schedules import Triples, hashable, triples
from shardmuon.plan.machines import Machine
from shardmuon.texts import nearest
from shardmuon.variants import VARIANT_OPTIONS, check_variant

# ------------------------------------------------------------------------------------------ the whole optimizer's

_PRODUCTS_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_SPLITS = (1, 2, 4, 8)
_WIRE_DTYPES = (torch.bfloat16, torch.float32, torch.float64)
AuditAction = Literal["raise", "warn"]
AUDIT_ACTIONS: tuple[AuditAction, ...] = ("raise", "warn")


class _Options:
    """Base of option objects: its text shows what differs from defaults."""

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
            "reference": exact polar factor by SVD in fp64.
        dtype: Products' torch dtype or its name. None or "auto": "standard" takes bfloat16 where the device
            multiplies it in hardware, float32 on CPUs that do not; "gram" float16 on accelerators, float32 on CPUs.
            Ignored by "torch" (bfloat16) and "reference" (float64).
        tuning: A file that `shardmuon tune --out FILE` or `shardmuon verify --slots FILE` has written: "auto" takes the
            fastest method and kernel that it has for a shape on this machine, and shapes that it found unequal in
            batches run alone. None: no file is read. Ranks must name files of equal content.
        device: Where matrices are orthogonalized. None: where the parameters are; for DTensors that are kept on the
            CPU (FSDP2's CPUOffloadPolicy) on their mesh's device.
        split_k: Slices of the long side over which X X^T is summed (split-K): 1, 2, 4 or 8. Above 1, a matrix may have
            so many owners, each of one slice, where that is cheaper: ranks of one node, among many more ranks than
            matrices. It rounds otherwise than 1 does, and alike on every layout. For matrices whose slices fill a
            device, if their number divides the long side, of "standard" and "gram"; others stay whole.
        cuda_graphs: Capture the orthogonalization of batch shapes that repeat as CUDA graphs: fewer launches, some more
            memory (each shape keeps a batch and work space). Nothing on other devices.

    Raises:
        ValueError: A value that has no meaning here.
    """

    method: MethodName = "auto"
    dtype: torch.dtype | str | None = None
    tuning: str | None = None
    device: torch.device | str | None = None
    split_k: int = 1
    cuda_graphs: bool = False

    def __post_init__(self) -> None:
        _check_choice("Orthogonalizer.method", self.method, NS_METHODS)
        dtype = self.products_dtype
        if self.method == "gram" and dtype is not None:
            check_gram_dtype(dtype)
        if type(self.split_k) is not int or self.split_k not in _SPLITS:
            raise ValueError(
                f"Orthogonalizer.split_k={self.split_k!r} is not one of {', '.join(map(str, _SPLITS))}: write 1 for "
                "whole matrices, or the number of ranks of a node among which a large matrix may be split"
            )
        if self.tuning is not None:
            tuning_files.load(self.tuning)
        if self.device is not None:
            torch.device(self.device)

    @property
    def products_dtype(self) -> torch.dtype | None:
        """`dtype` as a dtype; None: the default of the method and the device."""
        if self.dtype is None or self.dtype == "auto":
            return None
        found = getattr(torch, self.dtype, self.dtype) if isinstance(self.dtype, str) else self.dtype
        if found not in _PRODUCTS_DTYPES:
            allowed = ", ".join(repr(str(dtype).removeprefix("torch.")) for dtype in _PRODUCTS_DTYPES)
            raise ValueError(f"Orthogonalizer.dtype={self.dtype!r} is not one of 'auto', {allowed} (or torch's own)")
        return found

    def chooser(self) -> Chooser:
        """The object that chooses how to orthogonalize each matrix."""
        found = None if self.tuning is None else tuning_files.load(self.tuning)
        return Chooser(self.method, self.products_dtype, found, split_k=self.split_k)


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

    def __post_init__(self) -> None:
        if self.dtype is not None:
            _check_choice("Exchange.dtype", self.dtype, _WIRE_DTYPES)
        if self.bucket_bytes is not None and self.bucket_bytes < 1:
            raise ValueError(f"Exchange.bucket_bytes={self.bucket_bytes} must be positive")


@dataclass(frozen=True, slots=True, repr=False)
class Storage(_Options):
    """Options of how momentum and half-precision weights are stored. See docs/memory.md.

    Attributes:
        momentum_dtype: None (the gradient's dtype, in which it is computed too), torch.float32, torch.bfloat16 or
            "int8" (both computed in fp32).
        momentum_device: None (with the parameter) or "cpu".
        stochastic_rounding: Round bf16 and fp16 weights at random, without bias, after each update.

    Raises:
        ValueError: A value that has no meaning here.
    """

    momentum_dtype: MomentumDtype = None
    momentum_device: Literal["cpu"] | None = None
    stochastic_rounding: bool = False

    def __post_init__(self) -> None:
        allowed = (None, torch.float32, torch.bfloat16, "int8")
        _check_choice("Storage.momentum_dtype", self.momentum_dtype, allowed)
        _check_choice("Storage.momentum_device", self.momentum_device, (None, "cpu"))


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

    def __post_init__(self) -> None:
        if self.every is not None and (not isinstance(self.every, int) or self.every < 1):
            raise ValueError(f"Audit.every={self.every!r} must be None or a whole number of steps, at least 1")
        if not isinstance(self.samples, int) or self.samples < 1:
            raise ValueError(f"Audit.samples={self.samples!r} must be a whole number of matrices, at least 1")
        _check_choice("Audit.action", self.action, AUDIT_ACTIONS)


OPTION_OBJECTS = {"orthogonalizer": Orthogonalizer, "exchange": Exchange, "storage": Storage, "audit": Audit}
OPTIMIZER_KEYWORDS = (*OPTION_OBJECTS, "process_group")
# A keyword of the optimizer, or a field of one -> how it is written: messages to who puts it elsewhere.
PLACES = {
    option.name: f"{keyword}=shardmuon.{kind.__name__}({option.name}=...)"
    for keyword, kind in OPTION_OBJECTS.items()
    for option in fields(kind)
    if option.name == "route" or "_" in option.name  # "dtype" and the like may be anybody's
} | {keyword: f"{keyword}=..." for keyword in OPTIMIZER_KEYWORDS}


def _check_objects(given: Mapping[str, object]) -> None:
    """Raise TypeError for an option object of another type. `given`: by the constructor's keyword."""
    for key, value in given.items():
        kind = OPTION_OBJECTS[key]
        if not isinstance(value, kind):
            names = ", ".join(f"{f.name}=.." for f in fields(kind)[:2])
            raise TypeError(f"{key} must be a shardmuon.{kind.__name__}({names}), found {value!r}")


@dataclass(frozen=True, slots=True)
class MuonConfig:
    """Options of a whole optimizer, as its constructor was given them."""

    orthogonalizer: Orthogonalizer = field(default_factory=Orthogonalizer)
    exchange: Exchange = field(default_factory=Exchange)
    storage: Storage = field(default_factory=Storage)
    audit: Audit = field(default_factory=Audit)

    def __post_init__(self) -> None:
        _check_objects({key: getattr(self, key) for key in OPTION_OBJECTS})

    @property
    def ns_device(self) -> torch.device | None:
        """Device on which matrices are orthogonalized; None: the user named none."""
        device = self.orthogonalizer.device
        return None if device is None else torch.device(device)

    def keeper(self) -> Keeper:
        """A keeper of momentum as `storage` says."""
        return Keeper(self.storage.momentum_dtype, self.storage.momentum_device, self.storage.stochastic_rounding)

    def text(self) -> str:
        """Text of the options, equal on ranks that do the same. Devices may differ from rank to rank."""
        here = replace(self.orthogonalizer, device=None, tuning=None), replace(self.storage, momentum_device=None)
        measured = self.orthogonalizer.chooser().measured
        text = " ".join(repr(one).replace(" ", "") for one in (*here, self.exchange, self.audit))
        return text if measured is None else f"{text} tuning={measured.digest}"


# ------------------------------------------------------------------------------------------- a parameter group's

WeightDecayMode = Literal["decoupled", "l2", "independent", "cautious"]
WEIGHT_DECAY_MODES: tuple[WeightDecayMode, ...] = ("decoupled", "l2", "independent", "cautious")
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
# What Emerging-Optimizers and dion call them.
_OTHER_SCALE_NAMES = {"shape_scaling": "original", "rms_norm": "match_rms_adamw", "spectral_norm": "unit_rms_norm"}
VIEW_DEFAULTS: dict[str, Any] = {
    "view": "auto",
    "split_sizes": None,
    "split_groups": 1,
    "num_heads": None,
    "split_dim": 0,
    "transposed": False,
}
VARIANT_DEFAULTS: dict[str, Any] = {"variant": None, **VARIANT_OPTIONS}
# Where plain tensors lie in this job. A checkpoint keeps none of it: it may be loaded into another layout.
PLACE_DEFAULTS: dict[str, Any] = {
    "tp_group": None,
    "process_group": None,
    "partition_dim": None,
    "partition_stride": None,
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
    *VARIANT_DEFAULTS,
)
ONLY_MUON = {*MUON_OPTIONS, *VIEW_OPTIONS}
ONLY_ADAMW = {*ADAMW_DEFAULTS, "adamw"}
_ADAMW_KINDS = ("adamw", "cautious")
GROUP_OPTIONS = (
    *dict.fromkeys(("use_muon", "lr", "weight_decay", *MUON_OPTIONS, *ADAMW_DEFAULTS, "adamw", *GROUP_DEFAULTS)),
)
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
        place = PLACES.get(key)
        if place is not None:
            raise ValueError(
                f"{where}{key} applies to the whole optimizer. Write Muon(..., {place}); where another class makes the "
                f"optimizer, as torch's ZeroRedundancyOptimizer, give it functools.partial(Muon, {place})"
            )
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
    hidden = {"params", "param_names", "use_muon", *(ONLY_ADAMW if group["use_muon"] else ONLY_MUON)}
    if group["use_muon"] and group["ns_steps"] is None:
        hidden.add("ns_steps")
    quiet = {**GROUP_DEFAULTS, **VARIANT_DEFAULTS, "adamw": "adamw"}
    return {
        key: value for key, value in group.items() if key not in hidden and not (key in quiet and value == quiet[key])
    }


def view_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's options of which rows form a matrix."""
    return {key: group[key] for key in VIEW_OPTIONS}


def per_step(coefficients: Any, steps: int | None) -> Triples:
    """One (a, b, c) per Newton-Schulz step, from a group's `ns_coefficients` and `ns_steps`."""
    return triples(hashable(coefficients), steps)


def _check_choice(name: str, value: object, allowed: Sequence[object]) -> None:
    """Raise ValueError unless the value is one of those allowed."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, allowed))}")


def given_lr(where: str, lr: float | Tensor | None) -> float | Tensor:
    """The learning rate that `where`, a function, was given.

    Raises:
        TypeError: None. No default suits.
        ValueError: It is text.
    """
    if lr is None:
        raise TypeError(
            f"{where} needs lr: write lr=0.03 to train from scratch, AdamW's lr with "
            'adjust_lr_fn="match_rms_adamw" coming from AdamW, or the lr of your torch.optim.Muon'
        )
    _refuse_text(f"{where}: ", "lr", lr)
    return lr


def _refuse_text(where: str, key: str, value: object) -> None:
    """Raise ValueError for text in place of a number, though `float` reads it: what is kept in a group is what steps
    and schedulers multiply."""
    if isinstance(value, str):
        raise ValueError(f"{where}{key}={value!r} is text, not a number. Write {key}={value} without quotes")


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
    """Raise ValueError, beginning with `where`, for the first option of a group that has no meaning."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"{where}a tensor lr must have one element, found shape {tuple(lr.shape)}")
    is_muon = group.get("use_muon", True)
    for key in ("lr", "weight_decay", "momentum" if is_muon else "eps"):
        _refuse_text(where, key, group[key])
        given = group[key].detach() if isinstance(group[key], Tensor) else group[key]
        try:
            value = float(given)
        except (TypeError, ValueError):
            raise ValueError(f"{where}{key}={group[key]!r} must be a number") from None
        if not (math.isfinite(value) and value >= 0.0):
            raise ValueError(f"{where}{key}={value} must be finite and at least 0")
    _check_adamw_kind(where, group.get("adamw", "adamw"))
    mode = group.get("weight_decay_mode", "decoupled")
    _check_choice(f"{where}weight_decay_mode", mode, WEIGHT_DECAY_MODES)  # of any group: AdamW's may be Muon's again
    if not is_muon:
        betas = group.get("betas", ADAMW_DEFAULTS["betas"])
        pair = isinstance(betas, (tuple, list)) and len(betas) == 2 and not any(isinstance(b, str) for b in betas)
        if not (pair and all(0.0 <= beta < 1.0 for beta in betas)):
            raise ValueError(f"{where}betas={betas!r} must be two numbers in [0, 1)")
        return
    _check_mathematics(where, group)


def _check_adamw_kind(where: str, kind: object) -> None:
    if callable(kind):
        raise ValueError(
            f"{where}adamw={getattr(kind, '__qualname__', type(kind).__name__)} is a function or a class, not one of "
            f"{', '.join(map(repr, _ADAMW_KINDS))}. Leave these parameters out of Muon, put them into an optimizer of "
            "your own, and step it beside Muon"
        )
    _check_choice(f"{where}adamw", kind, _ADAMW_KINDS)


def _check_mathematics(where: str, group: Mapping[str, Any]) -> None:
    try:
        check_variant(group)
    except ValueError as wrong:
        raise ValueError(f"{where}{wrong}") from None
    if group["momentum"] > 1.0:
        raise ValueError(f"{where}momentum={group['momentum']} must be at most 1")
    scale = group["adjust_lr_fn"]
    if not callable(scale):
        if scale in _OTHER_SCALE_NAMES:
            raise ValueError(
                f"{where}adjust_lr_fn={scale!r} is another library's name. Write {_OTHER_SCALE_NAMES[scale]!r}"
            )
        _check_choice(f"{where}adjust_lr_fn", scale, (None, *LR_SCALES))
    steps = group["ns_steps"]
    if steps is not None and not (isinstance(steps, int) and 1 <= steps < 100):
        raise ValueError(f"{where}ns_steps={steps!r} must be a whole number between 1 and 99, or None")
    try:
        per_step(group["ns_coefficients"], steps)
    except (TypeError, ValueError) as wrong:
        raise ValueError(
            f"{where}ns_coefficients={group['ns_coefficients']!r} must be the name of a schedule, (a, b, c) or one "
            f"(a, b, c) per step: {wrong}"
        ) from None
