"""Learning rates that are tensors on an accelerator: used there, and not read by the host in every step.

[Note: an lr on the device]
    The host compares every option among the ranks before each step. To compare an lr that lies on the device it would
    wait for all work queued so far. So such an lr is read with the first step of a plan and with every hundredth from
    then on, on every rank in the same step; between those, ranks are trusted to set it alike. After a look that they
    did not agree to they look again, until they do. Weights are stepped with the tensor itself in every step. An lr
    that the host can read (a number, a tensor on the CPU) is compared each time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardmuon._torch import is_capturing
from shardmuon.momentum.update import lr_scale
from shardmuon.plan.plan import Plan
from shardmuon.step.settings import Group, Settings

_EVERY = 100  # steps


def rates_text(plan: Plan, settings: Sequence[Settings | None]) -> list[str]:
    """Lines for the printed plan: what the lr of matrices is with its scale. `settings`: of each of its parameters."""
    shapes: dict[tuple[float, float], dict[str, None]] = {}
    for item in plan.items:
        s = settings[item.param]
        assert s is not None, "a group of matrices"
        scale = lr_scale(s.adjust_lr_fn, item.rows, item.cols, s.extra_scale_factor)
        shapes.setdefault((s.lr, scale), {})[f"{item.rows}x{item.cols}"] = None
    return [
        f"lr {lr:.4g} when planned, x {scale:.4g} = {lr * scale:.4g}: {', '.join(those)}"
        for (lr, scale), those in shapes.items()
    ]


class DeviceRates:
    """What the host knows of them. One for each plan, and it counts what ranks do together, so all look alike."""

    def __init__(self) -> None:
        self._values: dict[int, float] = {}  # group -> what was read last
        self._steps = 0  # that all ranks have begun
        self._agreed = False  # whether a step has begun since the last look

    def on_host(self, groups: Sequence[Group]) -> Sequence[Group]:
        """The groups with numbers in place of such tensors."""
        found = [on_device(group.get("lr")) for group in groups]
        if not any(lr is not None for lr in found):
            return groups
        looks = not self._agreed or (self._steps + 1) % _EVERY == 0
        for index, lr in enumerate(found):
            if lr is not None and lr.numel() == 1 and looks and not is_capturing(lr.device):
                self._agreed = False
                self._values[index] = float(lr)
        return [
            group if lr is None else {**group, "lr": self._values.get(index, 0.0) if lr.numel() == 1 else lr}
            for index, (group, lr) in enumerate(zip(groups, found, strict=True))
        ]

    def agreed(self) -> None:
        """All ranks begin the step."""
        self._steps, self._agreed = self._steps + 1, True


def on_device(lr: object) -> Tensor | None:
    """An lr that the host cannot read without a wait."""
    return lr if isinstance(lr, Tensor) and lr.device.type != "cpu" else None


def lr_on(device: torch.device, settings: Settings) -> float | Tensor:
    """The lr of weights on this device: a tensor that lies with them on an accelerator as it is."""
    lr = on_device(settings.tensor_lr)
    if lr is None:
        return settings.lr
    return lr.reshape(()) if lr.device == device else float(lr)
