"""Options of each parameter group, as one frozen object that is made anew only when the group says something else.

[Note: an lr on the device]
    The host compares every option among the ranks before each step. To compare an lr that lies on the device it would
    wait for all work queued so far. So such an lr is read with the first step of a plan and with every hundredth from
    then on, on every rank in the same step; between those, ranks are trusted to set it alike. After a look that they
    did not agree to they look again, until they do. Weights are stepped with the tensor itself in every step. An lr
    that the host can read (a number, a tensor on the CPU) is compared each time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardmuon._torch import is_capturing
from shardmuon.errors import OUT_OF_MEMORY, fault_text
from shardmuon.layout.engines import Engine, engine_for
from shardmuon.layout.engines.tensor_parallel import TensorParallelEngine
from shardmuon.layout.views import Ints, MatrixView, matrix_view
from shardmuon.momentum.update import LrScale, WeightDecayMode, lr_scale
from shardmuon.options import (
    MUON_OPTIONS,
    PLACE_OPTIONS,
    VIEW_OPTIONS,
    check_hyperparameters,
    per_step,
    view_options,
)
from shardmuon.plan.plan import Plan
from shardmuon.variants import Stages, stages_of, stages_text

Group = Mapping[str, Any]  # one of an optimizer's parameter groups

_ALIKE = ("use_muon", "rank_local", "partition_dim", "partition_stride")
_READ = (
    *dict.fromkeys((*_ALIKE, *VIEW_OPTIONS, *PLACE_OPTIONS)),
    "lr",
    "weight_decay",
    *MUON_OPTIONS,
    "adamw",
    "betas",
)


class Scales(dict[tuple[int, int], float]):
    """Factor on the learning rate of matrices of each shape (rows, cols), asked of the options when first needed.

    Of a function of the user's the values count, not the name: two ranks may hold different closures, and one may
    return something else each time. So each step has new ones, and asks before anything has changed.
    """

    def __init__(self, adjust_lr_fn: LrScale, extra_scale_factor: float) -> None:
        super().__init__()
        self._options = adjust_lr_fn, extra_scale_factor

    def __missing__(self, shape: tuple[int, int]) -> float:
        function, extra = self._options
        try:
            value = float(lr_scale(function, *shape, extra))
        except OUT_OF_MEMORY:
            raise
        except Exception as error:
            raise ValueError(f"adjust_lr_fn{shape} raised {type(error).__name__}: {error}") from error
        if not math.isfinite(value):
            raise ValueError(f"adjust_lr_fn{shape} returned {value}, which is not finite")
        self[shape] = value
        return value


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
    scales: Scales = field(default_factory=lambda: Scales(None, 1.0), compare=False, repr=False)


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
        Scales(group["adjust_lr_fn"], float(group["extra_scale_factor"])),
    )


def settings_text(settings: Settings) -> str:
    """Text of settings, equal on two ranks that do the same; names a callable instead of printing its address."""
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


def batch_text(settings: Settings) -> str:
    """The options that the matrices of a batch must share."""
    return f"{(settings.coefficients, settings.eps)!r} {stages_text(settings.stages)}".rstrip()


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


class GroupOptions(NamedTuple):
    """A group's options.

    Attributes:
        settings: Settings of its matrices in a step; None if the group is AdamW's.
        text: The settings as text, equal on ranks that do the same.
        alike: Text of what ranks must have alike when a plan is made, besides `view`.
        planned: Text of what a plan is made for: that, `view`, and this rank's process groups.
        batch: Text of what the matrices of a batch share.
        view: How its parameters are read as matrices.
    """

    settings: Settings | None
    text: str = ""
    alike: str = ""
    planned: str = ""
    batch: str = ""
    view: Mapping[str, Any] | None = None

    def with_rate(self, lr: Tensor) -> GroupOptions:
        """The same options with an lr that lies on an accelerator; its value was read before."""
        if self.settings is None:
            return self
        settings = replace(self.settings, tensor_lr=lr)
        return self._replace(settings=settings, text=settings_text(settings))


_EVERY = 100  # steps


class OptionsReader:
    """Reads the groups of an optimizer. Keeps what each has said last, and what the host knows of rates on devices.

    Attributes:
        rates: Number of a group -> what was read last of its lr that lies on a device, under one plan.
        num_steps: That all ranks have begun under this plan. They count together, so all look in the same one.
        has_agreed: One was begun since the last look.
    """

    def __init__(self) -> None:
        self._said: list[tuple[object, ...]] = []
        self._options: list[GroupOptions] = []
        self.rates: dict[int, float] = {}
        self.num_steps, self.has_agreed = 0, False

    def read(self, groups: Sequence[Group], due: str = "") -> list[GroupOptions]:
        """The options of each group as they are now.

        Args:
            groups: The optimizer's.
            due: More that ranks must have alike in this step.

        Raises:
            ValueError: One has no meaning; with the group's number.
        """
        del self._said[len(groups) :], self._options[len(groups) :]
        looks = not self.has_agreed or (self.num_steps + 1) % _EVERY == 0
        rates: dict[int, Tensor] = {}
        for index, group in enumerate(groups):
            lr = group.get("lr")
            if isinstance(lr, Tensor) and lr.device.type != "cpu" and lr.numel() == 1:  # else it is refused
                rates[index] = lr
                group = {**group, "lr": self._on_host(index, lr, looks)}
            said = tuple(map(group.get, _READ))
            if list in map(type, said):
                said = _copied(said)
            if isinstance(said[_LR], Tensor) or self._said[index : index + 1] != [said]:
                self._options[index : index + 1] = [_options_of(index, group)]
                self._said[index : index + 1] = [said]
        found = list(self._options)
        for index, lr in rates.items():
            found[index] = found[index].with_rate(lr)
        return [options._replace(text=f"{options.text}{due}") for options in found] if due else found

    def _on_host(self, index: int, lr: Tensor, looks: bool) -> float:
        if looks and not is_capturing(lr.device):
            self.has_agreed = False
            self.rates[index] = float(lr)
        return self.rates.get(index, 0.0)

    def forget_rates(self) -> None:
        """Forget rates that were read: with a new plan other ranks may have looked in another step."""
        self.rates, self.num_steps, self.has_agreed = {}, 0, False


def _copied(values: Sequence[Any]) -> tuple[object, ...]:
    """Lists as tuples: they may be changed in place."""
    return tuple(_copied(v) if type(v) is list else v for v in values)


_LR = _READ.index("lr")


def _options_of(index: int, group: Group) -> GroupOptions:
    try:
        return _read(index, group)
    except OUT_OF_MEMORY:
        raise
    except Exception as wrong:
        raise ValueError(fault_text(wrong, f"group {index}: ")) from wrong


def _read(index: int, group: Group) -> GroupOptions:
    check_hyperparameters(f"group {index}: ", group)
    if not group["use_muon"]:
        return GroupOptions(None)
    settings, view = settings_of(group), view_options(group)
    batch = batch_text(settings)
    alike = " ".join([*(f"{key}={group.get(key)!r}" for key in _ALIKE), batch.replace(" ", "")])
    planned = f"{alike} {view} {[group.get(key) for key in PLACE_OPTIONS]}"
    return GroupOptions(settings, settings_text(settings), alike, planned, batch, view)


def rates_text(plan: Plan, settings: Sequence[Settings | None]) -> list[str]:
    """Lines for the printed plan: the lr of matrices times its scale. A function of the user's is left to the step.

    Args:
        plan: The plan.
        settings: Settings of each of its parameters.
    """
    shapes: dict[tuple[float, float], dict[str, None]] = {}
    for item in plan.items:
        s = settings[item.param]
        assert s is not None, "a group of matrices"
        if callable(s.adjust_lr_fn):
            continue
        scale = s.scales[item.rows, item.cols]
        shapes.setdefault((s.lr, scale), {})[f"{item.rows}x{item.cols}"] = None
    return [
        f"lr {lr:.4g} when planned, x {scale:.4g} = {lr * scale:.4g}: {', '.join(those)}"
        for (lr, scale), those in shapes.items()
    ]
