"""Products whose result is symmetric: compute the lower half by blocks, mirror the rest.

[Note: number of blocks]
    b row blocks compute (b + 1) / 2b of a product, and each costs some 50 us in calls, mirroring and smaller
    products. With t for the whole product, t (b + 1) / 2b + b c is least at b = sqrt(t / 2c): the root of the
    product's arithmetic over what the CPU does in two such overheads. Those were fitted to times from 128x128 to
    512x2048 on one AVX512-BF16 CPU with other work on it, in fp32 and bf16. AMX was not measured: its number assumes
    four times AVX512's bf16 rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from shardmuon._torch import cpu_has_amx
from shardmuon.orthogonalize import triton_symmetric
from shardmuon.orthogonalize.slots import empty_batch
from shardmuon.orthogonalize.triton_trial import why_not

_MAX_BLOCKS = 4  # 4 blocks compute 10 of 16 tiles, 8 would compute 36 of 64: little more, in smaller products
# What one thread computes in the time that two blocks cost, see [Note: number of blocks].
_OVERHEAD = {torch.float64: 3e6, torch.float32: 6e6, torch.bfloat16: 30e6}
_OVERHEAD_AMX = 120e6  # bf16


@lru_cache(maxsize=1024)
def row_blocks(rows: int, inner: int, dtype: torch.dtype, num_threads: int) -> int:
    """Into how many row blocks a CPU cuts a symmetric product (rows x inner) @ (inner x rows).

    Depends on the shape, the dtype, the kind of CPU and the number of threads, as the bits of any product do.
    """
    amx = dtype == torch.bfloat16 and cpu_has_amx()
    overhead = (_OVERHEAD_AMX if amx else _OVERHEAD.get(dtype, 6e6)) * num_threads
    return max(1, min(_MAX_BLOCKS, math.isqrt(int(2 * rows * rows * inner / overhead))))


def triton_available(device: torch.device) -> bool:
    """Whether the Triton kernel can run there. Imports Triton and tries it, on accelerators."""
    return why_not(device) is None


def addmm(
    base: Tensor | None,  # (B, m, n), or None for zeros
    left: Tensor,  # (B, m, k)
    right: Tensor,  # (B, k, n)
    beta: float = 0.0,
    alpha: float = 1.0,
) -> Tensor:  # (B, m, n), in slots
    """beta * base + alpha * left @ right, of batches or of 2-D matrices. A batch of one takes the 2-D kernel."""
    if left.dim() == 2:
        return torch.mm(left, right) if base is None else torch.addmm(base, left, right, beta=beta, alpha=alpha)
    if len(left) == 1:
        # not [0]: foresight runs this on tensors without data, which torch indexes only on devices it was built for
        alone = None if base is None else base.squeeze(0)
        return addmm(alone, left.squeeze(0), right.squeeze(0), beta, alpha).unsqueeze(0)
    out = empty_batch((len(left), left.shape[-2], right.shape[-1]), left.dtype, left.device)
    if base is None:
        return torch.bmm(left, right, out=out)
    return torch.baddbmm(base, left, right, beta=beta, alpha=alpha, out=out)


def symmetric_addmm(
    base: Tensor | None,  # (B, m, m) symmetric, or None for zeros
    left: Tensor,  # (B, m, k)
    right: Tensor,  # (B, k, m), such that left @ right is symmetric
    beta: float = 0.0,
    alpha: float = 1.0,
    kernel: str = "torch",
) -> Tensor:  # (B, m, m), exactly symmetric where blocks were mirrored
    """`addmm` for a result that is symmetric: X X^T, or products of polynomials of one symmetric matrix.

    On CPUs the lower block triangle is computed, row block by row block, and mirrored: 62% of the arithmetic with four
    blocks. Accelerators take the whole product, where many small calls cost more than they save, or `kernel="triton"`.
    """
    if kernel == "triton":
        return triton_symmetric.symmetric_addmm(base, left, right, beta, alpha)
    rows, inner = left.shape[-2:]
    count = row_blocks(rows, inner, left.dtype, torch.get_num_threads()) if left.device.type == "cpu" else 1
    if count < 2:
        return addmm(base, left, right, beta, alpha)
    sizes = [rows * (i + 1) // count - rows * i // count for i in range(count)]
    if left.dim() == 2:
        out = torch.empty(rows, rows, dtype=left.dtype, device=left.device)
        _by_blocks(out, base, left.split(sizes), right, beta, alpha)
        return out
    out = empty_batch((len(left), rows, rows), left.dtype, left.device)
    for i, matrix in enumerate(out):
        _by_blocks(matrix, None if base is None else base[i], left[i].split(sizes), right[i], beta, alpha)
    return out


def _by_blocks(
    out: Tensor,  # (m, m), written
    base: Tensor | None,  # (m, m), or None for zeros
    blocks: Sequence[Tensor],  # (m_i, k) each: left, by row blocks
    right: Tensor,  # (k, m)
    beta: float,
    alpha: float,
) -> None:
    stop = 0
    for block, strip in zip(blocks, out.split([len(b) for b in blocks]), strict=True):
        start, stop = stop, stop + len(block)
        last = stop == len(out)
        target, columns = (strip, right) if last else (strip[:, :stop], right[:, :stop])
        if base is None:
            torch.mm(block, columns, out=target)
        else:
            torch.addmm(base[start:stop, :stop], block, columns, beta=beta, alpha=alpha, out=target)
        if start:
            out[:start, start:stop] = strip[:, :start].T
