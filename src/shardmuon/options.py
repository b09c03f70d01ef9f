"""Options of parameter groups: defaults, checks, and their values as one step uses them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from shardmuon.engines import Engine, engine_for
from shardmuon.engines.tensor_parallel import TensorParallelEngine, check_expert
from shardmuon.errors import OUT_OF_MEMORY, fault_text
from shardmuon.momentum.update import LR_SCALES, WEIGHT_DECAY_MODES, LrScale, WeightDecayMode
from shardmuon.orthogonalize.schedules import Triples, hashable, triples
from shardmuon.planning.layout import MatrixView, Shape, ViewKind, matrix_view
from shardmuon.ranks.exchange import GroupRef

VIEW_OPTIONS = ("view", "split_sizes", "split_groups", "num_heads")
GROUP_DEFAULTS: dict[str, Any] = {
    "use_muon": True,
    "view": "auto",
    "split_sizes": None,
    "split_groups": 1,
    "num_heads": None,
    "rank_local": False,
    "clip_grad": True,
    "tp_group": None,
    "process_group": None,
    "partition_dim": None,
    "partition_stride": None,
}
# Where plain tensors lie in this job. A checkpoint keeps none of it: it may be loaded into another layout.
PLACE_OPTIONS = ("tp_group", "process_group", "partition_dim", "partition_stride")
# Not among the optimizer's defaults: CyclicLR and OneCycleLR cycle betas[0] if they find "betas" there, else momentum.
ADAMW_DEFAULTS: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8}
PRODUCTS_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
OPTIMIZER_ONLY = (
    "ns_method",
    "ns_dtype",
    "ns_kernel",
    "ns_finite_check",
    "ns_cuda_graphs",
    "deterministic",
    "wire_dtype",
    "bucket_bytes",
    "route",
    "route_rates",
    "check_replicas",
    "momentum_dtype",
    "momentum_device",
    "stochastic_rounding",
    "rounding_seed",
    "ns_device",
    "audit_every",
    "audit_samples",
    "audit_action",
)


@dataclass(frozen=True, slots=True)
class Settings:
    """Options of one parameter group, read afresh at every step."""

    lr: float
    weight_decay: float
    momentum: float
    nesterov: bool
    coefficients: tuple[tuple[float, float, float], ...]  # one per Newton-Schulz step
    eps: float
    adjust_lr_fn: LrScale
    extra_scale_factor: float
    weight_decay_mode: WeightDecayMode
    tensor_lr: Tensor | None = field(default=None, compare=False, repr=False)  # as the user gave it; lr is its value


def takes_part(param: Tensor) -> bool:
    """Frozen parameters are not planned for, unless someone gives them a gradient."""
    return param.requires_grad or param.grad is not None


def name_of(group: Mapping[str, Any], index: int, position: int) -> str:
    """The user's name of a parameter, or where it stands."""
    names = group.get("param_names")
    return str(names[position]) if names else f"parameter {position} of group {index}"


def replicas_of(group: Mapping[str, Any]) -> Any:
    """The process group over which a group's plain tensors are replicas, or None."""
    found = None if group.get("rank_local") else GroupRef.of(group.get("process_group"))
    return found if found is not None and found.ranks else None


def view_of(name: str, param: Tensor, group: Mapping[str, Any]) -> MatrixView:
    """The parameter's matrices by its group's options. Raises ValueError with its name if they do not fit."""
    engine: Engine | None = None
    shape: Shape = ()
    try:
        engine = engine_for(param, group)
        shape = engine.shape(param)
        return matrix_view(
            shape,
            view=cast(ViewKind, group["view"]),
            split_sizes=group["split_sizes"],
            split_groups=group["split_groups"],
            num_heads=group["num_heads"],
        )
    except ValueError as wrong:
        if len(shape) > 1 and isinstance(engine, TensorParallelEngine) and not engine.knows_shape(param):
            return MatrixView(shape, 2 if group["view"] == "stack" else 1, ())  # checked when the shards have met
        raise ValueError(f"{name}: {wrong}") from None


def settings_of(group: Mapping[str, Any]) -> Settings:
    """The group's options as this step uses them."""
    return Settings(
        float(group["lr"]),
        float(group["weight_decay"]),
        float(group["momentum"]),
        bool(group["nesterov"]),
        per_step(group["ns_coefficients"], group["ns_steps"]),
        float(group["eps"]),
        group["adjust_lr_fn"],
        float(group["extra_scale_factor"]),
        group["weight_decay_mode"],
        group["lr"] if isinstance(group["lr"], Tensor) else None,
    )


def all_settings(groups: Sequence[Mapping[str, Any]]) -> tuple[list[Settings | None], list[str], str | None]:
    """For each Muon parameter its group's settings and their text, and what is wrong with any group, if anything."""
    settings: list[Settings | None] = []
    texts: list[str] = []
    error = None
    for index, group in enumerate(groups):
        of_group: Settings | None = None
        try:
            check_hyperparameters(f"group {index}: ", group)
            of_group = settings_of(group)
        except OUT_OF_MEMORY:
            raise
        except Exception as wrong:  # whatever it is, the other ranks must hear of it
            error = error or fault_text(wrong, f"group {index}: ")
        if group["use_muon"]:
            count = sum(takes_part(p) for p in group["params"])
            settings.extend([of_group] * count)
            texts.extend(["" if of_group is None else settings_text(of_group)] * count)
    return settings, texts, error


def settings_text(settings: Settings) -> str:
    """Equal on two ranks that do the same; names a callable instead of printing its address."""
    scale = settings.adjust_lr_fn
    named = getattr(scale, "__qualname__", type(scale).__name__) if callable(scale) else scale
    lr = settings.tensor_lr
    lr_dtype = "" if lr is None or lr.dtype == torch.float64 else f" ({lr.dtype})"  # an fp64 tensor counts as a float
    return (
        f"lr={settings.lr!r}{lr_dtype} weight_decay={settings.weight_decay!r} momentum={settings.momentum!r} "
        f"nesterov={settings.nesterov} ns={settings.coefficients} eps={settings.eps!r} adjust_lr_fn={named} "
        f"extra_scale_factor={settings.extra_scale_factor!r} weight_decay_mode={settings.weight_decay_mode}"
    )


def batch_text(group: Mapping[str, Any]) -> str:
    """The options that the matrices of a batch must share."""
    try:
        return repr((per_step(group["ns_coefficients"], group["ns_steps"]), group["eps"]))
    except (TypeError, ValueError):
        return "invalid"  # reported by check_hyperparameters


def per_step(coefficients: Any, steps: int | None) -> Triples:
    """One (a, b, c) per Newton-Schulz step, from a group's `ns_coefficients` and `ns_steps`."""
    return triples(hashable(coefficients), steps)


def products_dtype(value: torch.dtype | str | None) -> torch.dtype | None:
    """`ns_dtype` as a dtype; None and "auto" mean the default of the method and the device."""
    if value is None or value == "auto":
        return None
    found = getattr(torch, value, value) if isinstance(value, str) else value
    if found not in PRODUCTS_DTYPES:
        allowed = ", ".join(repr(str(dtype).removeprefix("torch.")) for dtype in PRODUCTS_DTYPES)
        raise ValueError(f"ns_dtype={value!r} is not one of 'auto', {allowed} (or torch's own)")
    return found


def check_choice(name: str, value: object, allowed: Sequence[object]) -> None:
    """Raise ValueError unless the value is one of those allowed."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, allowed))}")


def check_hyperparameters(where: str, group: Mapping[str, Any]) -> None:
    """Raise ValueError, beginning with `where`, for the first option of a group that has no meaning."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"{where}a tensor lr must have one element, found shape {tuple(lr.shape)}")
    for key in ("lr", "weight_decay", "momentum", "eps", "extra_scale_factor"):
        try:
            value = float(group[key])
        except (TypeError, ValueError):
            raise ValueError(f"{where}{key}={group[key]!r} must be a number") from None
        if not (math.isfinite(value) and value >= 0.0):
            raise ValueError(f"{where}{key}={value} must be finite and at least 0")
    if float(group["eps"]) == 0.0 and group.get("use_muon", True):
        raise ValueError(f"{where}eps={group['eps']} must be above 0")
    if group["momentum"] > 1.0:
        raise ValueError(f"{where}momentum={group['momentum']} must be at most 1")
    check_choice(f"{where}weight_decay_mode", group["weight_decay_mode"], WEIGHT_DECAY_MODES)
    if not callable(group["adjust_lr_fn"]):
        check_choice(f"{where}adjust_lr_fn", group["adjust_lr_fn"], (None, *LR_SCALES))
    betas = group.get("betas", ADAMW_DEFAULTS["betas"])
    if not (isinstance(betas, (tuple, list)) and len(betas) == 2 and all(0.0 <= beta < 1.0 for beta in betas)):
        raise ValueError(f"{where}betas={betas!r} must be two numbers in [0, 1)")
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


def check_param_group(known: Sequence[Mapping[str, Any]], group: Mapping[str, Any], given: Iterable[str]) -> None:
    """Check a group that is about to be added to an optimizer.

    Args:
        known: The groups that the optimizer has.
        group: The new one, complete.
        given: The keys that the caller set.

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
    check_hyperparameters(f"group {index}: ", group)
    misplaced = [key for key in OPTIMIZER_ONLY if key in group]
    if misplaced:
        raise ValueError(f"group {index}: {misplaced} apply to the whole optimizer. Give them to Muon(...) itself")
    listed = {id(p): name_of(g, i, at) for i, g in enumerate(known) for at, p in enumerate(g["params"])}
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
            view_of(name, p, group)
        elif any(group[key] != GROUP_DEFAULTS[key] for key in VIEW_OPTIONS):
            found = {key: group[key] for key in VIEW_OPTIONS if group[key] != GROUP_DEFAULTS[key]}
            raise ValueError(f"{name}: {found} are options of matrices, but the group says use_muon=False")


def _check_tensor(name: str, p: object) -> None:
    if not isinstance(p, Tensor):
        raise TypeError(f"{name}: an optimizer takes tensors, found {type(p).__name__}")
    if p.is_complex():
        raise ValueError(f"{name}: complex parameters ({p.dtype}) are not supported. Leave it out")
    if not p.is_floating_point():
        raise TypeError(f"{name}: dtype {p.dtype} cannot be optimized; parameters must be floating point")
