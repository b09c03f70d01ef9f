"""The user's options about orthogonalizers, turned into a choice for each matrix."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from shardmuon.orthogonalize import why_dtype
from shardmuon.orthogonalize.choice import Choice, rule
from shardmuon.orthogonalize.products import KernelName, check_triton_dtype, refuse_triton
from shardmuon.orthogonalize.schedules import Triples
from shardmuon.orthogonalize.triton_trial import why_not
from shardmuon.orthogonalize.tuning import choose

KernelOption = Literal["auto", "torch", "triton"]


class Task(NamedTuple):
    """What a choice is made for."""

    rows: int
    cols: int
    coefficients: Triples
    device: torch.device


@dataclass(frozen=True, slots=True)
class Chooser:
    """The method, dtype and kernel of `Orthogonalizer`, and `deterministic`.

    Attributes:
        method: "auto" or a key of `BACKENDS`.
        dtype: Of the products, or None to choose.
        kernel: "auto": what was measured to be fastest with method "auto", else torch's products.
        deterministic: The choice must not depend on a measurement.
        settled: (rows, cols) -> choice of another optimizer's plan, taken over as it is.
        device: Where matrices are orthogonalized, if not where their parameters are.
    """

    method: str
    dtype: torch.dtype | None
    kernel: KernelOption
    deterministic: bool
    settled: tuple[tuple[int, int, str], ...] = ()
    device: torch.device | None = None

    @property
    def measures(self) -> bool:
        """Whether choices come from timings on the device."""
        return self.method == "auto" and not self.deterministic and not self.settled

    def measured(self, task: Task) -> Choice:
        """The fastest on this device, from the cache if it has been measured before."""
        try:
            return self._explained(choose(*task, self.dtype, kernel=self.kernel), task)
        except (RuntimeError, OSError) as error:  # out of memory, say: other ranks wait for an answer
            warnings.warn(
                f"measuring {task.rows}x{task.cols} failed, method='auto' goes by rule: {error}", stacklevel=2
            )
            return self.ruled(task)

    def ruled(self, task: Task) -> Choice:
        """The choice without a measurement."""
        for rows, cols, how in self.settled:
            if (rows, cols) == (task.rows, task.cols):
                return Choice.of(how)
        if self.method == "auto":
            return self._explained(rule(*task, self.dtype, self._kernel), task)
        fixed = self.method in ("torch", "reference")  # their dtype is part of what they are
        return self._explained(Choice(self.method, None if fixed else self.dtype, self._kernel), task)

    def _explained(self, choice: Choice, task: Task) -> Choice:
        why = why_dtype(choice.method, task.device, self.dtype)
        return replace(choice, reason=f"{choice.reason}; {why}" if choice.reason else why)

    def fault(self, devices: Iterable[torch.device]) -> str | None:
        """What keeps the kernel from being used on one of these devices, as far as this rank can tell."""
        try:
            for device in dict.fromkeys(devices):
                check_runs(Choice(kernel=self._kernel), self.device or device)
        except ValueError as wrong:
            return str(wrong)
        return None

    @property
    def _kernel(self) -> KernelName:
        return "torch" if self.kernel == "auto" else self.kernel


def check_kernel(kernel: KernelOption, method: str, dtype: torch.dtype | None) -> None:
    """Raise ValueError if the kernel has no meaning with these options, whatever the device."""
    if kernel != "triton":
        return
    if method not in ("auto", "standard", "gram"):
        raise ValueError(
            f"kernel='triton' is for method='auto', 'standard' and 'gram', found method={method!r}, which "
            "brings its own products. Leave kernel out"
        )
    check_triton_dtype(dtype)


def check_runs(choice: Choice, device: torch.device) -> None:
    """Raise ValueError if a choice cannot run on this rank's device."""
    if choice.kernel == "triton":
        refuse_triton(device, why_not(device))
