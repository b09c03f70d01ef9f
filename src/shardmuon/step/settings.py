"""What a parameter group says, as one step uses it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardmuon.layout.engines import Engine, engine_for
from shardmuon.layout.engines.base import name_of as name_of  # for all that read groups
from shardmuon.layout.engines.base import names_of as names_of
from shardmuon.layout.engines.tensor_parallel import TensorParallelEngine
from shardmuon.layout.views import Ints, MatrixView, matrix_view
from shardmuon.momentum.update import LrScale, WeightDecayMode
from shardmuon.options import per_step, view_options
from shardmuon.variants import Stages, stages_of, stages_text

Group = Mapping[str, Any]  # one of the optimizer's parameter groups


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
    stages: Stages = ()  # of its variant
    tensor_lr: Tensor | None = field(default=None, compare=False, repr=False)  # as the user gave it; lr is its value


def takes_part(param: Tensor) -> bool:
    """Frozen parameters are not planned for, unless someone gives them a gradient."""
    return param.requires_grad or param.grad is not None


def view_of(name: str, param: Tensor, group: Mapping[str, Any]) -> MatrixView:
    """The parameter's matrices by its group's options. Raises ValueError with its name if they do not fit."""
    engine: Engine | None = None
    shape: Ints = ()
    try:
        engine = engine_for(param, group)
        shape = engine.shape(param)
        return matrix_view(shape, **view_options(group))
    except ValueError as wrong:
        if len(shape) > 1 and isinstance(engine, TensorParallelEngine) and not engine.knows_shape(param):
            return MatrixView(shape, shape, -1, (), 2 if group["view"] == "stack" else 1)  # checked when a plan is made
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
        stages_of(group),
        group["lr"] if isinstance(group["lr"], Tensor) else None,
    )


def settings_text(settings: Settings) -> str:
    """Equal on two ranks that do the same; names a callable instead of printing its address."""
    scale = settings.adjust_lr_fn
    named = getattr(scale, "__qualname__", type(scale).__name__) if callable(scale) else scale
    lr = settings.tensor_lr
    lr_dtype = "" if lr is None or lr.dtype == torch.float64 else f" ({lr.dtype})"  # an fp64 tensor counts as a float
    if lr is not None and lr.device.type != "cpu":
        lr_dtype += f" on {lr.device.type}"
    variant = f" variant={stages_text(settings.stages)}" if settings.stages else ""
    return (
        f"lr={settings.lr!r}{lr_dtype} weight_decay={settings.weight_decay!r} momentum={settings.momentum!r} "
        f"nesterov={settings.nesterov} ns={settings.coefficients} eps={settings.eps!r} adjust_lr_fn={named} "
        f"extra_scale_factor={settings.extra_scale_factor!r} weight_decay_mode={settings.weight_decay_mode}{variant}"
    )


def batch_text(group: Mapping[str, Any]) -> str:
    """The options that the matrices of a batch must share."""
    try:
        alike = (per_step(group["ns_coefficients"], group["ns_steps"]), group["eps"])
        stages = stages_of(group)
        return f"{alike!r} {stages_text(stages)}" if stages else repr(alike)
    except (TypeError, ValueError):
        return "invalid"  # reported by check_hyperparameters
