"""The orthogonalizer of each matrix: named by the user, by a rule, or by a file of measurements that the user names.

Ranks that share a matrix must choose alike, and so must ranks that hold replicas of it without ever talking. So the
rule looks at nothing but shape, schedule, dtype and kind of device; nothing is timed in a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch

from shardmuon._torch import cpu_has_bf16_matmul
from shardmuon.orthogonalize import default_dtype, why_dtype
from shardmuon.orthogonalize.gram import plan_restarts, restarts_locally
from shardmuon.orthogonalize.products import KernelName, refuse_triton
from shardmuon.orthogonalize.schedules import Triples
from shardmuon.orthogonalize.triton_symmetric import num_blocks
from shardmuon.orthogonalize.triton_trial import why_not

_NEAR = 0.95  # another method must beat "standard" by 5% to be taken: smaller gains are within the noise

# bf16 products over fp32 ones on a CPU that has them: 2.3 by AVX512-BF16 (measured), several times that by AMX (not
# measured). One number between, so that ranks on different models choose alike. By it five quintic steps are never
# "gram", whose share of the work is above 1/5; on AVX512-BF16 that gives up some speed beyond n/m = 10.
_CPU_BF16_RATE = 4.0
_WORTH_IT = 0.75  # of the time of "standard": "gram" is taken below it
_WORDS = ("triton", "alone")


@dataclass(frozen=True, slots=True)
class Choice:
    """How one matrix is orthogonalized.

    Attributes:
        method: A key of `BACKENDS`.
        dtype: Of the products; None: the method's own ("torch", "reference").
        kernel: Multiplies symmetric results.
        alone: Never in a batch, as slots of one were found to be unequal on this device.
        reason: Why, for the printed plan.
    """

    method: str = "standard"
    dtype: torch.dtype | None = None
    kernel: KernelName = "torch"
    alone: bool = False
    reason: str = field(default="", compare=False)

    @classmethod
    @lru_cache(maxsize=256)
    def of(cls, text: str) -> Choice:
        """The choice with this text (`str`), without its reason."""
        method, *rest = text.split()
        dtypes = [getattr(torch, word) for word in rest if word not in _WORDS]
        kernel: KernelName = "triton" if "triton" in rest else "torch"
        return cls(method, dtypes[0] if dtypes else None, kernel, "alone" in rest)

    def __str__(self) -> str:
        dtype = "" if self.dtype is None else str(self.dtype).removeprefix("torch.")
        words = self.method, dtype, "" if self.kernel == "torch" else self.kernel, "alone" if self.alone else ""
        return " ".join(filter(None, words))


class Task(NamedTuple):
    """A choice is made for it."""

    rows: int
    cols: int
    coefficients: Triples
    device: torch.device


class Measured(Protocol):
    """Measurements of this machine, see tuning.py."""

    @property
    def digest(self) -> str:
        """Of all of them; equal on ranks that read the same file."""
        ...

    def choice(self, task: Task, dtype: torch.dtype | None) -> Choice | None:
        """The fastest for a shape; None if it was not measured here."""
        ...

    def is_unequal(self, task: Task, choice: Choice) -> bool:
        """True if a search on this machine found that slots of a batch of this shape round differently."""
        ...

    def about_slots(self, device: torch.device) -> str:
        """One line on what a search on this machine has found, for the printed plan."""
        ...


@dataclass(frozen=True, slots=True)
class Chooser:
    """The method and dtype of `Orthogonalizer`, and the file of measurements that it names.

    Attributes:
        method: "auto" or a key of `BACKENDS`.
        dtype: Of the products, or None to choose.
        measured: What the file has; None without one.
        device: Where matrices are orthogonalized, if not where their parameters are.
    """

    method: str
    dtype: torch.dtype | None
    measured: Measured | None = None
    device: torch.device | None = None

    def choice(self, task: Task) -> Choice:
        """The choice for a matrix, with its reason.

        Raises:
            ValueError: It cannot run on this rank's device.
        """
        found = self._found(task)
        if self.measured is not None and self.measured.is_unequal(task, found):
            found = Choice(found.method, found.dtype, found.kernel, True, found.reason)
        if found.kernel == "triton":
            refuse_triton(task.device, why_not(task.device))
        why = why_dtype(found.method, task.device, self.dtype)
        return _because(found, f"{found.reason}; {why}" if found.reason else why)

    def _found(self, task: Task) -> Choice:
        if self.method != "auto":
            fixed = self.method in ("torch", "reference")  # their dtype is part of what they are
            return Choice(self.method, None if fixed else self.dtype or default_dtype(self.method, task.device))
        return (self.measured and self.measured.choice(task, self.dtype)) or rule(*task, self.dtype)


def candidates(
    device: torch.device, dtype: torch.dtype | None, kernels: tuple[KernelName, ...] = ("torch",)
) -> tuple[Choice, ...]:
    """The choices of "auto" on a device: "standard" first, then "gram" in dtypes in which it is safe."""
    found = []
    for method in ("standard", "gram"):
        products = dtype or default_dtype(method, device)
        if method == "gram" and products == torch.bfloat16:
            continue
        for kernel in kernels if products != torch.float64 else ("torch",):
            found.append(Choice(method, products, kernel))
    return tuple(found)


def rule(
    rows: int,
    cols: int,
    coefficients: Triples,
    device: torch.device,
    dtype: torch.dtype | None,
) -> Choice:
    """The choice without a measurement: "gram" where its arithmetic, at its dtype's rate, is less by a quarter."""
    options = candidates(device, dtype)
    aspect = max(rows, cols) / min(rows, cols)
    if len(options) == 1:
        return _because(options[0], f"by rule: the Gram form is not safe in {options[0].dtype}")
    gram, standard = options[1], options[0]
    share = work(gram, rows, cols, coefficients, device) / work(standard, rows, cols, coefficients, device)
    slower = _rate(standard.dtype, device) / _rate(gram.dtype, device)
    chosen = gram if share * slower < _WORTH_IT else standard
    reason = f"by rule: at n/m = {aspect:.2f} the Gram form has {share:.2f}x of the work"
    if slower != 1.0:
        reason += f", in {str(gram.dtype).removeprefix('torch.')} at 1/{slower:g} of the rate"
    return _because(chosen, f"{reason} (taken below {_WORTH_IT / slower:.3g}x)")


def _rate(dtype: torch.dtype | None, device: torch.device) -> float:
    """Relative speed of products in a dtype, as far as ranks that never talk know alike."""
    native = dtype == torch.bfloat16 and device.type == "cpu" and cpu_has_bf16_matmul()
    return _CPU_BF16_RATE if native else 1.0


def fastest(seconds: Mapping[str, float], options: tuple[Choice, ...]) -> Choice:
    """The fastest choice. `seconds`: str(choice) -> for one matrix."""
    standard = options[0]
    best = min(options, key=lambda option: seconds[str(option)])
    if seconds[str(best)] > _NEAR * seconds[str(standard)]:
        best = standard
    others = ", ".join(f"{option} {1e3 * seconds[str(option)]:.3g} ms" for option in options if option != best)
    return _because(best, f"measured {1e3 * seconds[str(best)]:.3g} ms" + (f"; {others}" if others else ""))


def _because(choice: Choice, reason: str) -> Choice:
    return Choice(choice.method, choice.dtype, choice.kernel, choice.alone, reason)


def is_narrow(choice: Choice) -> bool:
    """True for half-precision products. Those of "torch" are bf16."""
    return choice.method == "torch" or choice.dtype in (torch.bfloat16, torch.float16)


def work(choice: Choice, rows: int, cols: int, coefficients: Triples, device: torch.device) -> int:
    """Floating point operations that a choice takes on a kind of device."""
    dtype = choice.dtype or torch.float32
    # A CPU computes the block triangle of symmetric products, 10 of 16 tiles.
    share = 0.625 if device.type == "cpu" else 1.0
    if choice.kernel == "triton":
        side = num_blocks(min(rows, cols), dtype)
        share = (side + 1) / (2 * side)
    return flops(choice.method, rows, cols, coefficients, dtype, share)


def flops(
    method: str, rows: int, cols: int, coefficients: Triples, dtype: torch.dtype, symmetric_share: float = 1.0
) -> int:
    """Floating point operations of a method's matrix products on one rows x cols matrix.

    Args:
        method: "standard" or "gram"; others are counted as "standard".
        dtype: Of the products: "gram" restarts more often in low precision.
        symmetric_share: Part of a symmetric product that is computed: 1 for plain products, 0.5 for the lower half.

    Returns:
        The count, as in the tables of Gram Newton-Schulz: with m <= n, full products and k quintic steps 4 k m^2 n +
        2 k m^3 for "standard" and 4 m^2 n + (8 k - 6) m^3 for "gram" without restarts.
    """
    m, n = min(rows, cols), max(rows, cols)
    steps = len(coefficients)
    squares = sum(c != 0.0 for _, _, c in coefficients)  # products A A: a cubic step has none
    symmetric: float = 2 * m * m * n  # one X X^T
    small: float = 2 * m**3
    if method != "gram":
        return round(steps * (symmetric * symmetric_share + 2 * m * m * n) + squares * small * symmetric_share)
    restarts = len(plan_restarts(coefficients, dtype))
    # Per segment: Q costs a product a step but the first, R two a step but the last.
    shares = squares + 3 * (steps - restarts - 1)
    count = symmetric * symmetric_share + 2 * m * m * n + shares * small * symmetric_share
    if restarts_locally(m, n, coefficients, dtype):
        count += restarts * (2 * small + 2 * small * symmetric_share + small)  # split products, merging the Q's
    else:
        count += restarts * (2 * m * m * n + symmetric * symmetric_share)
    return round(count)
