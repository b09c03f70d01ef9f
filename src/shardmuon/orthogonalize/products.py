"""Matrix products in one dtype, rounded where the hardware would round, whatever this device's hardware is.

[Note: emulated half precision]
    A CPU without bf16 (fp16) instructions multiplies such matrices 10 to 80 times slower than fp32 ones. There,
    products run in fp32 on operands that are rounded to the dtype after every product. Tensor cores round at the same
    points (operands in half precision, sums in fp32, result rounded once), so errors measured here are theirs too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from shardmuon._torch import cpu_has_bf16_matmul, mm_to_fp32
from shardmuon.orthogonalize import triton_symmetric
from shardmuon.orthogonalize.slots import converted, copied, in_slots
from shardmuon.orthogonalize.symmetric import addmm, symmetric_addmm

KernelName = Literal["torch", "triton"]
_SPLIT = 2.0**11  # an fp16 significand has 11 bits: the rest of an fp32 number, times this, is an fp16 number again


@dataclass(frozen=True, slots=True)
class Products:
    """Products of matrices, (m, n), or batches of them in slots, (B, m, n), that lie on one device.

    Attributes:
        device: Of all operands.
        dtype: To which every result is rounded: fp64, fp32, fp16 or bf16.
        kernel: How symmetric results are multiplied.

    Raises:
        ValueError: The kernel does not multiply this dtype, or not on this device.
    """

    device: torch.device
    dtype: torch.dtype
    kernel: KernelName = "torch"

    def __post_init__(self) -> None:
        if self.kernel == "triton":
            check_triton_dtype(self.dtype)
            refuse_triton(self.device, triton_symmetric.obstacle(self.device))

    @property
    def half(self) -> bool:
        """Whether results are rounded to 16 bits."""
        return self.dtype in (torch.float16, torch.bfloat16)

    @property
    def emulated(self) -> bool:
        """See [Note: emulated half precision]."""
        if self.device.type != "cpu" or not self.half:
            return False
        return self.dtype != torch.bfloat16 or not cpu_has_bf16_matmul()

    @property
    def operands(self) -> torch.dtype:
        """Dtype of the tensors that are multiplied."""
        return torch.float32 if self.emulated else self.dtype

    @property
    def takes_matrices(self) -> bool:
        """True where a single matrix may come without a batch dim, which saves views."""
        return self.kernel == "torch"

    def rounded_(self, x: Tensor) -> Tensor:
        """`x`, of the operands' dtype, after rounding to the dtype in place."""
        return x.copy_(x.to(self.dtype)) if self.emulated else x

    def operand(self, x: Tensor) -> Tensor:
        """`x`, of fp32 or fp64, rounded to the dtype as an operand for the other methods."""
        return converted(x, self.dtype) if not self.emulated else copied(x.to(self.dtype), self.operands)

    def general(
        self,
        base: Tensor | None,  # (B, m, n), or None for zeros
        left: Tensor,  # (B, m, k)
        right: Tensor,  # (B, k, n)
        beta: float = 1.0,
        alpha: float = 1.0,
    ) -> Tensor:  # (B, m, n)
        """beta * base + alpha * left @ right."""
        return self.rounded_(addmm(base, left, right, beta, alpha))

    def gram(
        self,
        x: Tensor,  # (B, m, n)
    ) -> Tensor:  # (B, k, k), k = min(m, n)
        """x @ x^T, or x^T @ x where x is tall."""
        left, right = (x.mT, x) if x.shape[-2] > x.shape[-1] else (x, x.mT)
        return self.symmetric(None, left, right)

    def symmetric(
        self,
        base: Tensor | None,  # (B, m, m) symmetric, or None for zeros
        left: Tensor,  # (B, m, k)
        right: Tensor,  # (B, k, m), such that left @ right is symmetric
        beta: float = 1.0,
        alpha: float = 1.0,
    ) -> Tensor:  # (B, m, m)
        """`general` for a symmetric result, of which half is computed where that is faster."""
        return self.rounded_(in_slots(symmetric_addmm(base, left, right, beta, alpha, self.kernel)))

    def gram_fp32(
        self,
        x: Tensor,  # (B, m, n)
    ) -> Tensor:  # (B, k, k), k = min(m, n), fp32 (fp64 of fp64)
        """`gram`, not rounded to half precision."""
        left, right = (x.mT, x) if x.shape[-2] > x.shape[-1] else (x, x.mT)
        if self.half and not self.emulated:
            return self._symmetric_fp32(left, right) if self.kernel == "triton" else mm_to_fp32(left, right)
        return symmetric_addmm(None, left, right, kernel=self.kernel)

    def sandwich(
        self,
        factor: Tensor,  # (B, m, m), rounded
        middle: Tensor,  # (B, m, m) symmetric, fp32
    ) -> Tensor:  # (B, m, m)
        """factor @ middle @ factor^T as if in fp32, rounded once at the end.

        Half-precision units get there with two products for one: an fp32 operand is the sum of two half-precision ones.
        """
        if self.half and not self.emulated:
            half_way = self._split_product(middle, factor.mT)
            return self.operand(self._split_product(half_way.mT, factor.mT, symmetric=True))
        return self.operand(symmetric_addmm(None, addmm(None, factor, middle), factor.mT, kernel=self.kernel))

    def _split_product(self, wide: Tensor, factor: Tensor, symmetric: bool = False) -> Tensor:
        """wide (fp32) @ factor, in fp32."""
        high = converted(wide, self.dtype)
        low = converted((wide - high.float()).mul_(_SPLIT), self.dtype)
        if symmetric and self.kernel == "triton":
            # Only the sum of the two is symmetric; their lower halves, mirrored, add up to it all the same.
            return self._symmetric_fp32(high, factor, self._symmetric_fp32(low, factor, alpha=1.0 / _SPLIT))
        return mm_to_fp32(high, factor).add_(mm_to_fp32(low, factor), alpha=1.0 / _SPLIT)

    def _symmetric_fp32(self, left: Tensor, right: Tensor, base: Tensor | None = None, alpha: float = 1.0) -> Tensor:
        """base + alpha * left @ right of half operands with the fp32 sums kept, by the Triton kernel."""
        return triton_symmetric.symmetric_addmm(base, left, right, 1.0, alpha, torch.float32)


def check_triton_dtype(dtype: torch.dtype | None) -> None:
    """Raise ValueError for products that the Triton kernel does not compute."""
    if dtype == torch.float64:
        raise ValueError(
            "the Triton kernel multiplies torch.float16, torch.bfloat16 and torch.float32, found dtype=torch.float64"
        )


def refuse_triton(device: torch.device, hindrance: str | None) -> None:
    """Raise ValueError where something keeps the Triton kernel from running."""
    if hindrance is not None:
        raise ValueError(
            f"the Triton kernel cannot run on {device}: {hindrance}. Leave out Orthogonalizer.tuning, or tune here"
        )
