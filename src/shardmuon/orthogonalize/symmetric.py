"""Products whose result is symmetric: compute the lower half by blocks, mirror the rest."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from shardmuon.orthogonalize import triton_symmetric
from shardmuon.orthogonalize.triton_trial import why_not

_MIN_BLOCK = 96  # rows; below this the matrix library loses more than the skipped half saves (measured, AVX2, fp32)
_MAX_BLOCKS = 4  # 4 blocks compute 10 of 16 tiles, 8 would compute 36 of 64: little more, in smaller products


def triton_available(device: torch.device) -> bool:
    """Whether the Triton kernel can run there. Imports Triton and tries it, on accelerators."""
    return why_not(device) is None


def addmm(
    base: Tensor | None,  # (B, m, n), or None for zeros
    left: Tensor,  # (B, m, k)
    right: Tensor,  # (B, k, n)
    beta: float = 0.0,
    alpha: float = 1.0,
) -> Tensor:  # (B, m, n)
    """beta * base + alpha * left @ right. One matrix alone takes the 2-D kernel, which is the faster one."""
    if len(left) == 1:
        if base is None:
            return (left[0] @ right[0]).unsqueeze(0)
        return torch.addmm(base[0], left[0], right[0], beta=beta, alpha=alpha).unsqueeze(0)
    if base is None:
        return left @ right
    return torch.baddbmm(base, left, right, beta=beta, alpha=alpha)


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
    num_rows = left.shape[-2]
    num_blocks = min(_MAX_BLOCKS, num_rows // _MIN_BLOCK)
    if left.device.type != "cpu" or num_blocks < 2:
        return addmm(base, left, right, beta, alpha)
    edges = [num_rows * i // num_blocks for i in range(num_blocks + 1)]
    out = torch.empty(len(left), num_rows, num_rows, dtype=left.dtype, device=left.device)
    for i, matrix in enumerate(out):
        for start, stop in itertools.pairwise(edges):
            rows, columns = left[i, start:stop], right[i, :, :stop]
            if base is None:
                torch.mm(rows, columns, out=matrix[start:stop, :stop])
            else:
                torch.addmm(
                    base[i, start:stop, :stop], rows, columns, beta=beta, alpha=alpha, out=matrix[start:stop, :stop]
                )
            matrix[:start, start:stop] = matrix[start:stop, :start].T
    return out
