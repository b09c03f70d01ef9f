"""Choice of the orthogonalization method and dtype for each matrix. The choice is made by the user or by a rule.

All ranks over which a matrix is sharded or replicated must independently make the same choice.
The rule therefore depends only on the matrix's shape, the Newton-Schulz coefficients, the dtype and the type of device,
never on measured times.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from shardmuon.orthogonalize import ITERATIONS, flops, products_dtype
from shardmuon.orthogonalize.schedules import Triples

# Assumed speed of bf16 matrix products relative to fp32 on CPUs with bf16 instructions. The true ratio is 2.3 with
# AVX512-BF16 (measured) and several times higher with AMX (not measured). A fixed value between the two makes ranks on
# different CPU models choose the same method. With this value, "gram" is never chosen for five quintic Newton-Schulz
# steps, although by its FLOPs, it would be faster with AVX512-BF16 if the long side is more than 26 times the short
# side.
_CPU_BF16_RATE = 4.0
_WORTH_IT = 0.75  # "gram" is chosen if it takes less than this fraction of the time of "standard"


@dataclass(frozen=True)
class Choice:
    """Method and dtype for orthogonalizing one matrix.

    Attributes:
        method: "standard", "gram" or "torch".
        dtype: Dtype of the matrix products.
        reason: Explanation of the choice for the printed plan. Ranks compare their plans by `repr`. The reason is left
            out of the `repr`, because it can mention features of one rank's machine.
    """

    method: str
    dtype: torch.dtype
    reason: str = field(default="", compare=False, repr=False)

    @classmethod
    def made(
        cls,
        method: str,
        dtype: torch.dtype | None,
        shape: tuple[int, int],
        coefficients: Triples,
        device: torch.device,
    ) -> Choice:
        """Choose the orthogonalization method and dtype for one matrix.

        Args:
            method: Method that the user chose for all matrices, or "auto".
            dtype: Dtype that the user chose for the matrix products. If None, use the default for the method and
                device.
            shape: (rows, cols) of the matrix.
            coefficients: (a, b, c) of each Newton-Schulz step.
            device: Device on which the matrix is orthogonalized.
        """
        rule = ""
        if method == "auto":
            method, rule = _by_rule(dtype, shape, coefficients, device)
        found = products_dtype(method, dtype, device)
        why = f"the default of {method} on {device.type}" if dtype is None else "by ns_dtype"
        return cls(method, found, f"{rule}{'as in torch.optim.Muon' if method == 'torch' else why}")

    def __str__(self) -> str:
        return f"{self.method} {self.dtype}".replace("torch.", "")


def _by_rule(
    dtype: torch.dtype | None, shape: tuple[int, int], coefficients: Triples, device: torch.device
) -> tuple[str, str]:
    """Choose "gram" if its estimated time (FLOPs divided by the speed of its dtype) is less than 3/4 of the estimated
    time of "standard". Otherwise, choose "standard". Return the method and the reason."""
    if dtype == torch.bfloat16:
        return "standard", f"by rule: the Gram form is not safe in {dtype}; "
    dtypes = {method: products_dtype(method, dtype, device) for method in ITERATIONS}
    work = {method: flops(method, *shape, coefficients, of, device) for method, of in dtypes.items()}
    share, aspect = work["gram"] / work["standard"], max(shape) / min(shape)
    reason = f"by rule: at n/m = {aspect:.2f} the Gram form has {share:.2f}x of the work"
    slower = 1.0
    if device.type == "cpu" and dtypes["standard"] != dtypes["gram"]:
        slower = _CPU_BF16_RATE
        reason += f", in {dtypes['gram']} at 1/{slower:g} of the rate"
    method = "gram" if share * slower < _WORTH_IT else "standard"
    return method, f"{reason} (taken below {_WORTH_IT / slower:.3g}x); "
