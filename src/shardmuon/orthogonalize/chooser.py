"""The user's options about orthogonalizers, turned into a choice for each matrix."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from shardmuon.orthogonalize.choice import Choice, rule
from shardmuon.orthogonalize.products import KernelName
from shardmuon.orthogonalize.schedules import Triples
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
    """Options `ns_method`, `ns_dtype`, `ns_kernel` and `deterministic`.

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
            return self._with_kernel(choose(*task, self.dtype))
        except (RuntimeError, OSError) as error:  # out of memory, say: other ranks wait for an answer
            warnings.warn(
                f"measuring {task.rows}x{task.cols} failed, ns_method='auto' goes by rule: {error}", stacklevel=2
            )
            return self.ruled(task)

    def ruled(self, task: Task) -> Choice:
        """The choice without a measurement."""
        for rows, cols, how in self.settled:
            if (rows, cols) == (task.rows, task.cols):
                return Choice.of(how)
        if self.method == "auto":
            return self._with_kernel(rule(*task, self.dtype))
        fixed = self.method in ("torch", "reference")  # their dtype is part of what they are
        return self._with_kernel(Choice(self.method, None if fixed else self.dtype))

    def _with_kernel(self, choice: Choice) -> Choice:
        if self.kernel == "auto":
            return choice
        kernel: KernelName = self.kernel
        return Choice(choice.method, choice.dtype, kernel, choice.reason)
