"""Matrix products in one dtype, rounded where the hardware would round, whatever this device's hardware is.

[Note: emulated half precision]
    A CPU without bf16 (fp16) instructions multiplies such matrices 10 to 80 times slower than fp32 ones. There,
    products run in fp32 on operands that are rounded to the dtype after every product. Tensor cores round at the same
    points (operands in half precision, sums in fp32, result rounded once), so errors measured here are theirs too.

[Note: number of blocks]
    On CPUs a symmetric product computes its lower half by row blocks and mirrors the rest: 62% of the arithmetic with
    four blocks. b of them compute (b + 1) / 2b of a product, and each costs some 50 us in calls, mirroring and smaller
    products. With t for the whole product, t (b + 1) / 2b + b c is least at b = sqrt(t / 2c): the root of the
    product's arithmetic over what the CPU does in two such overheads. Those were fitted to times from 128x128 to
    512x2048 on one AVX512-BF16 CPU with other work on it, in fp32 and bf16. AMX was not measured: its number assumes
    four times AVX512's bf16 rate. Accelerators take the whole product, where many small calls cost more than they
    save, or the Triton kernel.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from shardmuon._torch import cpu_has_amx, cpu_has_bf16_matmul, mm_to_fp32
from shardmuon.orthogonalize import triton_symmetric
from shardmuon.orthogonalize.slots import copied, empty_batch

KernelName = Literal["torch", "triton"]
_HALVES = (torch.float16, torch.bfloat16)
_SPLIT = 2.0**11  # an fp16 significand has 11 bits: the rest of an fp32 number, times this, is an fp16 number again
_MAX_BLOCKS = 4  # 4 blocks compute 10 of 16 tiles, 8 would compute 36 of 64: little more, in smaller products
# What one thread computes in the time that two blocks cost, see [Note: number of blocks].
_OVERHEAD = {torch.float64: 3e6, torch.float32: 6e6, torch.bfloat16: 30e6}
_OVERHEAD_AMX = 120e6  # bf16


@dataclass(frozen=True, slots=True)
class Products:
    """Products of matrices, (m, n), or batches of them in slots, (B, m, n), that lie on one device.

    Attributes:
        device: Device of all operands.
        dtype: The dtype to which every result is rounded: fp64, fp32, fp16 or bf16.
        kernel: How symmetric results are multiplied. "triton" takes batches only.
        operands: Dtype of the tensors that are multiplied, see [Note: emulated half precision].
    """

    device: torch.device
    dtype: torch.dtype
    kernel: KernelName = "torch"
    operands: torch.dtype = field(init=False, compare=False)

    def __post_init__(self) -> None:
        native = self.dtype == torch.bfloat16 and cpu_has_bf16_matmul()
        emulated = self.device.type == "cpu" and self.dtype in _HALVES and not native
        object.__setattr__(self, "operands", torch.float32 if emulated else self.dtype)

    def rounded_(self, x: Tensor) -> Tensor:
        """`x`, of the operands' dtype, after rounding to the dtype in place."""
        return x if self.operands == self.dtype else x.copy_(x.to(self.dtype))

    def operand(self, x: Tensor) -> Tensor:
        """`x`, of fp32 or fp64, rounded to the dtype as an operand for the other methods."""
        rounded = x if x.dtype == self.dtype else copied(x, self.dtype)
        return rounded if self.operands == self.dtype else copied(rounded, self.operands)

    def multiply(
        self,
        base: Tensor | None,  # (B, m, n), or None for zeros
        left: Tensor,  # (B, m, k)
        right: Tensor,  # (B, k, n)
        beta: float = 1.0,
        alpha: float = 1.0,
        *,
        symmetric: bool = False,
        out: Tensor | None = None,  # (B, m, n) in slots, overwritten; not an operand. Default: new memory
    ) -> Tensor:  # (B, m, n), `out`
        """beta * base + alpha * left @ right, rounded. All may be 2-D matrices; a batch of one takes their product.

        Where `symmetric`, left @ right and `base` are, and half is computed where that is faster, and mirrored.
        """
        blocks, matrix, triton = 1, left.ndim == 2, symmetric and self.kernel == "triton"
        if symmetric and self.device.type == "cpu":
            blocks = row_blocks(*left.shape[-2:], left.dtype, torch.get_num_threads())
        if out is None and matrix and blocks == 1:  # foresight runs this on tensors without data, which take no `out`
            made = torch.mm(left, right) if base is None else torch.addmm(base, left, right, beta=beta, alpha=alpha)
            return self.rounded_(made)
        if out is None and not matrix and left.shape[0] == 1 and not triton:
            alone = None if base is None else base.squeeze(0)
            return self.multiply(alone, left.squeeze(0), right.squeeze(0), beta, alpha, symmetric=symmetric).unsqueeze(
                0
            )
        if out is None:
            out = empty_batch((*left.shape[:-1], right.shape[-1]), left.dtype, left.device)
        if triton:
            triton_symmetric.symmetric_addmm(base, left, right, beta, alpha, out=out)
        elif not matrix and (blocks > 1 or left.shape[0] == 1):
            bases = itertools.repeat(None) if base is None else base.unbind(0)
            for summand, one, other, each in zip(bases, left.unbind(0), right.unbind(0), out.unbind(0), strict=False):
                self.multiply(summand, one, other, beta, alpha, symmetric=symmetric, out=each)
            return out
        elif blocks > 1:
            _by_blocks(out, base, left, right, beta, alpha, blocks)
        elif base is None:
            (torch.mm if matrix else torch.bmm)(left, right, out=out)
        else:
            (torch.addmm if matrix else torch.baddbmm)(base, left, right, beta=beta, alpha=alpha, out=out)
        return out if self.operands == self.dtype else self.rounded_(out)

    def gram(
        self,
        x: Tensor,  # (B, m, n)
    ) -> Tensor:  # (B, k, k), k = min(m, n)
        """x @ x^T, or x^T @ x where x is tall."""
        left, right = (x.mT, x) if x.shape[-2] > x.shape[-1] else (x, x.mT)
        return self.multiply(None, left, right, symmetric=True)

    def gram_fp32(
        self,
        x: Tensor,  # (B, m, n)
    ) -> Tensor:  # (B, k, k), k = min(m, n), fp32 (fp64 of fp64)
        """`gram`, not rounded to half precision."""
        if self.operands not in _HALVES:
            return self._wide().gram(x)
        left, right = (x.mT, x) if x.shape[-2] > x.shape[-1] else (x, x.mT)
        return self._symmetric_fp32(left, right) if self.kernel == "triton" else mm_to_fp32(left, right)

    def sandwich(
        self,
        factor: Tensor,  # (B, m, m), rounded
        middle: Tensor,  # (B, m, m) symmetric, fp32
    ) -> Tensor:  # (B, m, m)
        """factor @ middle @ factor^T as if in fp32, rounded once at the end.

        Half-precision units get there with two products for one: an fp32 operand is the sum of two half-precision ones.
        """
        if self.operands in _HALVES:
            half_way = self._split_product(middle, factor.mT)
            return self.operand(self._split_product(half_way.mT, factor.mT, symmetric=True))
        wide = self._wide()
        half_way = wide.multiply(None, factor, middle)
        return self.operand(wide.multiply(None, half_way, factor.mT, symmetric=True))

    def _wide(self) -> Products:
        """Products of the same operands whose results are not rounded any further."""
        return Products(self.device, self.operands, self.kernel)

    def _split_product(self, wide: Tensor, factor: Tensor, symmetric: bool = False) -> Tensor:
        """wide (fp32) @ factor, in fp32."""
        high = copied(wide, self.dtype)
        low = copied((wide - high.float()).mul_(_SPLIT), self.dtype)
        if symmetric and self.kernel == "triton":
            # Only the sum of the two is symmetric; their lower halves, mirrored, add up to it all the same.
            return self._symmetric_fp32(high, factor, self._symmetric_fp32(low, factor, alpha=1.0 / _SPLIT))
        return mm_to_fp32(high, factor).add_(mm_to_fp32(low, factor), alpha=1.0 / _SPLIT)

    def _symmetric_fp32(self, left: Tensor, right: Tensor, base: Tensor | None = None, alpha: float = 1.0) -> Tensor:
        """base + alpha * left @ right of half operands with the fp32 sums kept, by the Triton kernel."""
        return triton_symmetric.symmetric_addmm(base, left, right, 1.0, alpha, torch.float32)


@lru_cache(maxsize=1024)
def row_blocks(rows: int, inner: int, dtype: torch.dtype, num_threads: int) -> int:
    """Number of row blocks in which a CPU computes a symmetric product (rows x inner) @ (inner x rows).

    Depends on the shape, the dtype, the kind of CPU and the number of threads, as the bits of any product do.
    """
    amx = dtype == torch.bfloat16 and cpu_has_amx()
    overhead = (_OVERHEAD_AMX if amx else _OVERHEAD.get(dtype, 6e6)) * num_threads
    return max(1, min(_MAX_BLOCKS, math.isqrt(int(2 * rows * rows * inner / overhead))))


def _by_blocks(
    out: Tensor,  # (m, m), written
    base: Tensor | None,  # (m, m), or None for zeros
    left: Tensor,  # (m, k)
    right: Tensor,  # (k, m)
    beta: float,
    alpha: float,
    count: int,
) -> None:
    rows = len(left)
    for i in range(count):
        start, stop = rows * i // count, rows * (i + 1) // count
        strip, block = out[start:stop], left[start:stop]
        target, columns = (strip, right) if stop == rows else (strip[:, :stop], right[:, :stop])
        if base is None:
            torch.mm(block, columns, out=target)
        else:
            torch.addmm(base[start:stop, :stop], block, columns, beta=beta, alpha=alpha, out=target)
        if start:
            out[:start, start:stop] = strip[:, :start].T
