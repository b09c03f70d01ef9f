"""Learning rates that are tensors on an accelerator: used there, and not read by the host in every step.

[Note: an lr on the device]
    The host compares every option among the ranks before each step. To compare an lr that lies on the device it would
    wait for all work queued so far. So such an lr is read with the first step of a plan and with every hundredth from
    then on, on every rank in the same step; between those, ranks are trusted to set it alike. After a look that they
    did not agree to they look again, until they do. Weights are stepped with the tensor itself in every step. An lr
    that the host can read (a number, a tensor on the CPU) is compared each time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardmuon._torch import is_capturing
from shardmuon.step.settings import Group, Settings

_EVERY = 100  # steps


class DeviceRates:
    """What the host knows of them. One for each plan, and it counts what ranks do together, so all look alike."""

    def __init__(self) -> None:
        self._values: dict[int, float] = {}  # group -> what was read last
        self._steps = 0  # that all ranks have begun
        self._agreed = False  # whether a step has begun since the last look

    def on_host(self, groups: Sequence[Group], rates: Mapping[int, Tensor]) -> Sequence[Group]:
        """The groups with numbers in place of such tensors. `rates`: number of a group -> its tensor."""
        found = list(groups)
        looks = not self._agreed or (self._steps + 1) % _EVERY == 0
        for index, lr in rates.items():
            if lr.numel() == 1:  # else it is refused
                if looks and not is_capturing(lr.device):
                    self._agreed = False
                    self._values[index] = float(lr)
                found[index] = {**groups[index], "lr": self._values.get(index, 0.0)}
        return found

    def agreed(self) -> None:
        """All ranks begin the step."""
        self._steps, self._agreed = self._steps + 1, True


def lr_on(device: torch.device, settings: Settings) -> float | Tensor:
    """The lr of weights on this device: a tensor that lies with them on an accelerator as it is."""
    lr = settings.tensor_lr
    if lr is None or lr.device.type == "cpu":  # the host has read it
        return settings.lr
    return lr.reshape(()) if lr.device == device else float(lr)
