"""Choice of the method and dtype for the orthogonalization of each matrix, by the user or by a rule.

Ranks that share a matrix must make the same choice, even if each rank has a replica of the matrix and the ranks never
communicate. So the rule depends only on shape, schedule, dtype and kind of device, never on measured times.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from shardmuon._torch import cpu_has_bf16_matmul
from shardmuon.orthogonalize import ITERATIONS, default_dtype, flops
from shardmuon.orthogonalize.schedules import Triples

# Speed of bf16 products relative to fp32 on CPUs with bf16 instructions. It is 2.3 with AVX512-BF16 (measured) and
# several times higher with AMX (not measured). A single number between the two makes ranks on different CPU models
# choose the same method. With this number, "gram" is never chosen for five quintic steps, because it takes more than
# 1/5 of the work of "standard". On CPUs with AVX512-BF16, this choice is slower than "gram" for matrices with n/m above
# 10.
_CPU_BF16_RATE = 4.0
_WORTH_IT = 0.75  # "gram" is chosen if it takes less than this share of the time of "standard"


@dataclass(frozen=True)
class Choice:
    """The method and dtype for the orthogonalization of one matrix.

    Attributes:
        method: "standard", "gram" or "torch".
        dtype: Dtype of the matrix products; None for "torch", which uses bf16.
        reason: Reason for the choice, which the printed plan shows.
    """

    method: str = "standard"
    dtype: torch.dtype | None = None
    reason: str = field(default="", compare=False)

    @classmethod
    def of(cls, text: str) -> Choice:
        """Parse the output of `str(choice)`. The reason of the result is empty."""
        method, _, dtype = text.partition(" ")
        return cls(method, getattr(torch, dtype) if dtype else None)

    @property
    def is_narrow(self) -> bool:
        """True if the matrix products are in half precision. Method "torch" always uses bf16."""
        return self.method == "torch" or self.dtype in (torch.bfloat16, torch.float16)

    def work(self, rows: int, cols: int, coefficients: Triples, device: torch.device) -> int:
        """Count the floating point operations that this choice takes to orthogonalize a rows x cols matrix on a
        device."""
        # CPUs compute large symmetric products in four row blocks, which together are 10/16 of a product.
        share = 0.625 if device.type == "cpu" else 1.0
        return round(sum(flops(self.method, rows, cols, coefficients, self.dtype or torch.float32, share)))

    def __str__(self) -> str:
        dtype = "" if self.dtype is None else f" {_name(self.dtype)}"
        return f"{self.method}{dtype}"


@dataclass(frozen=True)
class Chooser:
    """The user's options for orthogonalization, from which the choice for each matrix is made.

    Attributes:
        method: Method for all matrices, or "auto".
        dtype: Dtype of the products; None: the default for the method and the device.
        device: Device on which matrices are orthogonalized; None: the device of their parameters.
    """

    method: str
    dtype: torch.dtype | None
    device: torch.device | None = None

    def choice(self, rows: int, cols: int, coefficients: Triples, device: torch.device) -> Choice:
        """Choose the method and dtype for a rows x cols matrix, from its coefficients and its device. The result states
        the reason for the choice."""
        if self.method == "torch":
            return Choice("torch", reason="products in bfloat16, as in torch.optim.Muon")
        if self.method == "auto":
            found = self._by_rule(rows, cols, coefficients, device)
        else:
            found = Choice(self.method, self.dtype or default_dtype(self.method, device))
        place = device.type
        if place == "cpu":
            place = f"CPUs {'with' if cpu_has_bf16_matmul() else 'without'} bfloat16 products"
        why = f"the default of {found.method} on {place}" if self.dtype is None else "by ns_dtype"
        reasons = filter(None, (found.reason, f"products in {_name(found.dtype)}, {why}"))
        return replace(found, reason="; ".join(reasons))

    def _by_rule(self, rows: int, cols: int, coefficients: Triples, device: torch.device) -> Choice:
        """Choose "gram" if its estimated time (FLOPs divided by the speed of its dtype) is below 3/4 of the time of
        "standard", otherwise "standard"."""
        of_matrix = rows, cols, coefficients, device
        standard, gram = (Choice(method, self.dtype or default_dtype(method, device)) for method in ITERATIONS)
        if gram.dtype == torch.bfloat16:
            return replace(standard, reason=f"by rule: the Gram form is not safe in {gram.dtype}")
        share = gram.work(*of_matrix) / standard.work(*of_matrix)
        slower = _CPU_BF16_RATE if device.type == "cpu" and standard.dtype != gram.dtype else 1.0
        aspect = max(rows, cols) / min(rows, cols)
        reason = f"by rule: at n/m = {aspect:.2f} the Gram form has {share:.2f}x of the work"
        if slower != 1.0:
            reason += f", in {_name(gram.dtype)} at 1/{slower:g} of the rate"
        chosen = gram if share * slower < _WORTH_IT else standard
        return replace(chosen, reason=f"{reason} (taken below {_WORTH_IT / slower:.3g}x)")


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
