"""The choice of each matrix's orthogonalizer: by the user, or by a rule.

Ranks that share a matrix must choose alike, and so must ranks that hold replicas of it and never communicate. So the
rule depends only on shape, schedule, dtype and kind of device; nothing is timed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from shardmuon._torch import cpu_has_bf16_matmul
from shardmuon.orthogonalize import ITERATIONS, default_dtype
from shardmuon.orthogonalize.gram import plan_restarts, restarts_locally
from shardmuon.orthogonalize.schedules import Triples

# Speed of bf16 products relative to fp32 on CPUs with bf16 instructions: 2.3 with AVX512-BF16 (measured), several times
# that with AMX (not measured). One number in between, so that ranks on different CPU models choose alike. With it, five
# quintic steps never choose "gram", which has more than 1/5 of the work; AVX512-BF16 loses some speed beyond n/m = 10.
_CPU_BF16_RATE = 4.0
_WORTH_IT = 0.75  # "gram" is chosen if it takes less than this share of the time of "standard"


@dataclass(frozen=True)
class Choice:
    """The orthogonalizer of one matrix.

    Attributes:
        method: "standard", "gram" or "torch".
        dtype: Dtype of the products; None for "torch", which uses bf16.
        reason: Why it was chosen, for the printed plan.
    """

    method: str = "standard"
    dtype: torch.dtype | None = None
    reason: str = field(default="", compare=False)

    @classmethod
    def of(cls, text: str) -> Choice:
        """Parse `str(choice)`. The result has no reason."""
        method, _, dtype = text.partition(" ")
        return cls(method, getattr(torch, dtype) if dtype else None)

    def __str__(self) -> str:
        dtype = "" if self.dtype is None else f" {_name(self.dtype)}"
        return f"{self.method}{dtype}"


class Task(NamedTuple):
    """A matrix for which an orthogonalizer is chosen: its shape, the schedule and the device."""

    rows: int
    cols: int
    coefficients: Triples
    device: torch.device


@dataclass(frozen=True)
class Chooser:
    """The user's options for orthogonalizers, from which the choice for each matrix is made.

    Attributes:
        method: The method for all matrices, or "auto".
        dtype: Dtype of the products; None: chosen by method and device.
        device: Device on which matrices are orthogonalized; None: that of their parameters.
    """

    method: str
    dtype: torch.dtype | None
    device: torch.device | None = None

    def choice(self, task: Task) -> Choice:
        """The orthogonalizer for a matrix, with the reason."""
        if self.method == "torch":
            return Choice("torch", reason="products in bfloat16, as in torch.optim.Muon")
        if self.method == "auto":
            found = rule(*task, self.dtype)
        else:
            found = Choice(self.method, self.dtype or default_dtype(self.method, task.device))
        place = task.device.type
        if place == "cpu":
            place = f"CPUs {'with' if cpu_has_bf16_matmul() else 'without'} bfloat16 products"
        why = f"the default of {found.method} on {place}" if self.dtype is None else "by ns_dtype"
        reasons = filter(None, (found.reason, f"products in {_name(found.dtype)}, {why}"))
        return replace(found, reason="; ".join(reasons))


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def rule(
    rows: int,
    cols: int,
    coefficients: Triples,
    device: torch.device,
    dtype: torch.dtype | None,
) -> Choice:
    """The choice of "auto": "gram" if its estimated time (FLOPs over its dtype's rate) is below 3/4 of that of
    "standard", else "standard"."""
    standard, gram = (Choice(method, dtype or default_dtype(method, device)) for method in ITERATIONS)
    if gram.dtype == torch.bfloat16:
        return replace(standard, reason=f"by rule: the Gram form is not safe in {gram.dtype}")
    share = work(gram, rows, cols, coefficients, device) / work(standard, rows, cols, coefficients, device)
    slower = _CPU_BF16_RATE if device.type == "cpu" and standard.dtype != gram.dtype else 1.0
    aspect = max(rows, cols) / min(rows, cols)
    reason = f"by rule: at n/m = {aspect:.2f} the Gram form has {share:.2f}x of the work"
    if slower != 1.0:
        reason += f", in {_name(gram.dtype)} at 1/{slower:g} of the rate"
    chosen = gram if share * slower < _WORTH_IT else standard
    return replace(chosen, reason=f"{reason} (taken below {_WORTH_IT / slower:.3g}x)")


def is_narrow(choice: Choice) -> bool:
    """True if the products are in half precision, as those of "torch" always are (bf16)."""
    return choice.method == "torch" or choice.dtype in (torch.bfloat16, torch.float16)


def work(choice: Choice, rows: int, cols: int, coefficients: Triples, device: torch.device) -> int:
    """Number of floating point operations for a rows x cols matrix with this choice, on this kind of device."""
    # A CPU computes 10 of 16 tiles of a symmetric product.
    share = 0.625 if device.type == "cpu" else 1.0
    return round(sum(flops(choice.method, rows, cols, coefficients, choice.dtype or torch.float32, share)))


def flops(
    method: str, rows: int, cols: int, coefficients: Triples, dtype: torch.dtype, symmetric_share: float = 1.0
) -> tuple[float, float]:
    """Number of floating point operations in a method's matrix products, for one rows x cols matrix.

    Args:
        method: "standard" or "gram"; other methods are counted as "standard".
        dtype: Dtype of the products: "gram" restarts more often in low precision.
        symmetric_share: Part of a symmetric product that is computed: 1 for plain products, 0.5 for the lower half.

    Returns:
        FLOPs of the products that involve the long side, and FLOPs of the products of square matrices on the short
        side, counted as in the Gram Newton-Schulz tables. With m <= n, full products and k quintic steps: 4 k m^2 n and
        2 k m^3 for "standard", 4 m^2 n and (8 k - 6) m^3 for "gram" without restarts.
    """
    m, n = min(rows, cols), max(rows, cols)
    steps = len(coefficients)
    squares = sum(c != 0.0 for _, _, c in coefficients)  # number of products A A; cubic steps have none
    twice: float = 2 * m * m * n * (1.0 + symmetric_share)  # one X X^T, and one product with X
    small: float = 2 * m**3
    if method != "gram":
        return steps * twice, squares * small * symmetric_share
    restarts = len(plan_restarts(coefficients, dtype))
    # Per segment: one product for Q in each step but the first, two for R in each step but the last.
    of_small = (squares + 3 * (steps - restarts - 1)) * small * symmetric_share
    if restarts_locally(m, n, coefficients, dtype):
        return twice, of_small + restarts * (3 * small + 2 * small * symmetric_share)  # split products, merging the Q's
    return (1 + restarts) * twice, of_small
