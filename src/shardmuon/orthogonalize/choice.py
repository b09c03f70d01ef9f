"""The orthogonalizer of each matrix: named by the user, or by a rule.

Ranks that share a matrix must choose alike, and so must ranks that hold replicas of it without ever talking. So the
rule looks at nothing but shape, schedule, dtype and kind of device; nothing is timed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from shardmuon._torch import cpu_has_bf16_matmul
from shardmuon.orthogonalize import ITERATIONS, default_dtype
from shardmuon.orthogonalize.gram import plan_restarts, restarts_locally
from shardmuon.orthogonalize.schedules import Triples

# bf16 products over fp32 ones on a CPU that has them: 2.3 by AVX512-BF16 (measured), several times that by AMX (not
# measured). One number between, so that ranks on different models choose alike. By it five quintic steps are never
# "gram", whose share of the work is above 1/5; on AVX512-BF16 that gives up some speed beyond n/m = 10.
_CPU_BF16_RATE = 4.0
_WORTH_IT = 0.75  # of the time of "standard": "gram" is taken below it


@dataclass(frozen=True)
class Choice:
    """The orthogonalizer of one matrix.

    Attributes:
        method: "standard", "gram" or "torch".
        dtype: Dtype of the products; None: bf16, as "torch" has it.
        reason: Why, for the printed plan.
    """

    method: str = "standard"
    dtype: torch.dtype | None = None
    reason: str = field(default="", compare=False)

    @classmethod
    def of(cls, text: str) -> Choice:
        """The choice with this text (`str`), without its reason."""
        method, _, dtype = text.partition(" ")
        return cls(method, getattr(torch, dtype) if dtype else None)

    def __str__(self) -> str:
        dtype = "" if self.dtype is None else f" {_name(self.dtype)}"
        return f"{self.method}{dtype}"


class Task(NamedTuple):
    """The matrix that a choice is made for."""

    rows: int
    cols: int
    coefficients: Triples
    device: torch.device


@dataclass(frozen=True)
class Chooser:
    """The method and dtype of products that an optimizer asks for.

    Attributes:
        method: "auto", or that of all matrices.
        dtype: Dtype of the products, or None to choose.
        device: Where matrices are orthogonalized, if not where their parameters are.
    """

    method: str
    dtype: torch.dtype | None
    device: torch.device | None = None

    def choice(self, task: Task) -> Choice:
        """The choice for a matrix, with its reason."""
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
    """The choice of "auto": "gram" where its arithmetic, at its dtype's rate, is less by a quarter, else "standard"."""
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
    """True for half-precision products. Those of "torch" are bf16."""
    return choice.method == "torch" or choice.dtype in (torch.bfloat16, torch.float16)


def work(choice: Choice, rows: int, cols: int, coefficients: Triples, device: torch.device) -> int:
    """Floating point operations that a choice takes on a kind of device."""
    # A CPU computes the block triangle of symmetric products, 10 of 16 tiles.
    share = 0.625 if device.type == "cpu" else 1.0
    return round(sum(flops(choice.method, rows, cols, coefficients, choice.dtype or torch.float32, share)))


def flops(
    method: str, rows: int, cols: int, coefficients: Triples, dtype: torch.dtype, symmetric_share: float = 1.0
) -> tuple[float, float]:
    """Floating point operations of a method's matrix products on one rows x cols matrix.

    Args:
        method: "standard" or "gram"; others are counted as "standard".
        dtype: Dtype of the products: "gram" restarts more often in low precision.
        symmetric_share: Part of a symmetric product that is computed: 1 for plain products, 0.5 for the lower half.

    Returns:
        Those of products with the long side, and of small ones, as in the tables of Gram Newton-Schulz: with m <= n,
        full products and k quintic steps 4 k m^2 n and 2 k m^3 for "standard", and 4 m^2 n and (8 k - 6) m^3 for "gram"
        without restarts.
    """
    m, n = min(rows, cols), max(rows, cols)
    steps = len(coefficients)
    squares = sum(c != 0.0 for _, _, c in coefficients)  # products A A: a cubic step has none
    twice: float = 2 * m * m * n * (1.0 + symmetric_share)  # one X X^T, and one product with X
    small: float = 2 * m**3
    if method != "gram":
        return steps * twice, squares * small * symmetric_share
    restarts = len(plan_restarts(coefficients, dtype))
    # Per segment: Q costs a product a step but the first, R two a step but the last.
    of_small = (squares + 3 * (steps - restarts - 1)) * small * symmetric_share
    if restarts_locally(m, n, coefficients, dtype):
        return twice, of_small + restarts * (3 * small + 2 * small * symmetric_share)  # split products, merging the Q's
    return (1 + restarts) * twice, of_small
