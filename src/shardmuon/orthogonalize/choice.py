"""Choice of the method and dtype that orthogonalize each matrix, by the user or by a rule.

Ranks that share a matrix must make the same choice, even if they hold replicas and never communicate. So the rule
depends only on shape, schedule, dtype and kind of device, and never on measured times.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from shardmuon._torch import cpu_has_bf16_matmul
from shardmuon.orthogonalize import ITERATIONS, default_dtype
from shardmuon.orthogonalize.gram import plan_restarts, restarts_locally
from shardmuon.orthogonalize.schedules import Triples

# Speed of bf16 products relative to fp32 on CPUs with bf16 instructions. It is 2.3 with AVX512-BF16 (measured) and
# several times higher with AMX (not measured). One number in between makes ranks on different CPU models choose alike.
# With this number, "gram" is never chosen for five quintic steps, as it has more than 1/5 of the work of "standard".
# This costs AVX512-BF16 some speed for matrices with n/m above 10.
_CPU_BF16_RATE = 4.0
_WORTH_IT = 0.75  # "gram" is chosen if it takes less than this share of the time of "standard"


@dataclass(frozen=True)
class Choice:
    """The method and dtype that orthogonalize one matrix.

    Attributes:
        method: "standard", "gram" or "torch".
        dtype: Dtype of the matrix products; None for "torch", which uses bf16.
        reason: Reason for the choice, for the printed plan.
    """

    method: str = "standard"
    dtype: torch.dtype | None = None
    reason: str = field(default="", compare=False)

    @classmethod
    def of(cls, text: str) -> Choice:
        """Parse the text that `str(choice)` returns. The result has no reason."""
        method, _, dtype = text.partition(" ")
        return cls(method, getattr(torch, dtype) if dtype else None)

    def __str__(self) -> str:
        dtype = "" if self.dtype is None else f" {_name(self.dtype)}"
        return f"{self.method}{dtype}"


class Task(NamedTuple):
    """Properties of a matrix on which the choice of its method and dtype depends: its shape, the coefficients of the
    steps, and the device."""

    rows: int
    cols: int
    coefficients: Triples
    device: torch.device


@dataclass(frozen=True)
class Chooser:
    """The user's options for orthogonalization, from which the choice for each matrix is made.

    Attributes:
        method: Method for all matrices, or "auto".
        dtype: Dtype of the products; None: chosen by method and device.
        device: Device on which matrices are orthogonalized; None: the device of their parameters.
    """

    method: str
    dtype: torch.dtype | None
    device: torch.device | None = None

    def choice(self, task: Task) -> Choice:
        """Choose the method and dtype for a matrix, and give the reason."""
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
    """Choose the method for option "auto": "gram" if its estimated time (FLOPs over the rate of its dtype) is below 3/4
    of the time of "standard", otherwise "standard"."""
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
    """True if the matrix products are in half precision. Method "torch" always uses bf16."""
    return choice.method == "torch" or choice.dtype in (torch.bfloat16, torch.float16)


def work(choice: Choice, rows: int, cols: int, coefficients: Triples, device: torch.device) -> int:
    """Count the floating point operations to orthogonalize a rows x cols matrix with this method and dtype, on this
    kind of device."""
    # CPUs compute symmetric products in four row blocks, which are 10/16 of the product
    share = 0.625 if device.type == "cpu" else 1.0
    return round(sum(flops(choice.method, rows, cols, coefficients, choice.dtype or torch.float32, share)))


def flops(
    method: str, rows: int, cols: int, coefficients: Triples, dtype: torch.dtype, symmetric_share: float = 1.0
) -> tuple[float, float]:
    """Count the floating point operations in a method's matrix products, for one rows x cols matrix.

    Args:
        method: "standard" or "gram"; other methods are counted as "standard".
        dtype: Dtype of the products: "gram" restarts more often in low precision.
        symmetric_share: Fraction of a symmetric product that is computed: 1 for the full product, 0.5 for the lower
            half.

    Returns:
        FLOPs of the products that involve the long side, and FLOPs of the products of square matrices of the short
        side, counted as in the Gram Newton-Schulz tables. For m <= n, full products and k quintic steps, they are
        4 k m^2 n and 2 k m^3 for "standard", and 4 m^2 n and (8 k - 6) m^3 for "gram" without restarts.
    """
    m, n = min(rows, cols), max(rows, cols)
    steps = len(coefficients)
    squares = sum(c != 0.0 for _, _, c in coefficients)  # number of products A A; cubic steps have none
    twice: float = 2 * m * m * n * (1.0 + symmetric_share)  # one X X^T, and one product with X
    small: float = 2 * m**3
    if method != "gram":
        return steps * twice, squares * small * symmetric_share
    restarts = len(plan_restarts(coefficients, dtype))
    # in each segment between restarts: one product for Q in all steps but the first, two for R in all but the last
    of_small = (squares + 3 * (steps - restarts - 1)) * small * symmetric_share
    if restarts_locally(m, n, coefficients, dtype):
        # a local restart adds split products, and a product that merges the Q's
        return twice, of_small + restarts * (3 * small + 2 * small * symmetric_share)
    return (1 + restarts) * twice, of_small
