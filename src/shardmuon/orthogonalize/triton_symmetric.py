"""Symmetric products on accelerators: one Triton kernel that computes the lower triangle and writes it twice.

The result is cut into square tiles. Only the T (T + 1) / 2 tiles on and below the diagonal are computed, and every
element on and below the diagonal is stored at (i, j) and at (j, i): the same bits, so the result is exactly symmetric,
diagonal tiles included, whatever the order in which the hardware sums. `base` is read on and below the diagonal only.

Bits: tile sizes come from a fixed table of dtype and number of rows. Autotuning would choose them by timing, and
BLOCK_K sets the order of summation: two runs, or two ranks, could then differ. Neither the size of the batch nor the
place in it enters the table or the arithmetic, so a matrix has the same bits alone and in any batch.
"""

from __future__ import annotations

import functools
import os
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MAX_PROGRAMS = 2**23 - 1  # HIP counts threads, of which a launch has less than 2^32, at most 512 a program; CUDA 2^31


def _kernels() -> ModuleType | None:
    """The module of the kernel, imported now; None without Triton."""
    try:
        from shardmuon.orthogonalize import triton_kernel
    except ImportError:
        return None
    return triton_kernel


def _is_interpreted() -> bool:
    """True if TRITON_INTERPRET was set when Triton was imported."""
    module = _kernels()
    return module is not None and not isinstance(module.symmetric_addmm_kernel, module.triton.JITFunction)


def obstacle(device: torch.device) -> str | None:
    """Name what keeps the kernel from running on a device, as far as can be told without running it; None: nothing.

    NVIDIA GPUs below compute capability 8.0 are left out, as by Triton itself.
    """
    if device.type == "cpu" and not os.environ.get("TRITON_INTERPRET"):
        return "Triton has no CPU kernels (TRITON_INTERPRET=1 interprets them, for tests)"
    if device.type not in ("cpu", "cuda", "xpu"):
        return f"Triton has no kernels for {device.type}"
    if _kernels() is None:
        return "Triton cannot be imported: pip install 'shardmuon[triton]'"
    if device.type == "cpu" and not _is_interpreted():
        return "TRITON_INTERPRET=1 was set after the first use"
    if device.type == "cuda":  # HIP too, where every capability is 9 or more
        found = torch.cuda.get_device_capability(device)
        if found < (8, 0):
            return f"Triton needs compute capability 8.0, found {found[0]}.{found[1]}"
    return None


def _tile_sizes(num_rows: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """BLOCK, BLOCK_K and the number of warps. Never a function of the batch: see the module's note on bits."""
    if num_rows <= 32:
        return 32, 32, 4
    if dtype == torch.float32 or num_rows < 512:  # fp32 runs on plain FMA units, and its tiles take twice the room
        return 64, 32, 4
    return 128, 32, 8


def num_blocks(
    num_rows: int,
    dtype: torch.dtype,  # of the operands
) -> int:
    """Blocks a side, T: T (T + 1) / 2 tiles of T^2 are computed."""
    return -(-num_rows // _tile_sizes(num_rows, dtype)[0])


def _strides(t: Tensor) -> tuple[int, ...]:
    """Strides with that of a batch of one, which means nothing, set to 0: a variant of the kernel less."""
    return t.stride() if len(t) > 1 else (0, *t.stride()[1:])


def symmetric_addmm(
    base: Tensor | None,  # (B, m, m) symmetric, fp16, bf16 or fp32, or None for zeros; not read above the diagonal
    left: Tensor,  # (B, m, k) fp16, bf16 or fp32, any strides
    right: Tensor,  # (B, k, m) of left's dtype, any strides, such that left @ right is symmetric
    *,
    beta: float = 1.0,
    alpha: float = 1.0,
    out: Tensor,  # (B, m, m) fp16, bf16 or fp32, written, each matrix contiguous; not an operand
) -> Tensor:  # (B, m, m), exactly symmetric: `out`
    """beta * base + alpha * left @ right, for a result that is symmetric. All may be 2-D matrices.

    Products are summed in fp32 and the whole expression is rounded once, at the end. Not differentiable.

    Raises:
        ValueError: Other dtypes, too many tiles, or no Triton for this device: see `obstacle`.
        RuntimeError: Triton cannot compile or launch the kernel.
    """
    if left.dim() == 2:
        first = None if base is None else base.unsqueeze(0)
        symmetric_addmm(first, left.unsqueeze(0), right.unsqueeze(0), beta=beta, alpha=alpha, out=out.unsqueeze(0))
        return out
    # with other shapes the kernel would read outside the tensors, without a word
    square = len(left), left.shape[1], left.shape[1]
    assert right.shape == left.mT.shape and out.shape == square and (base is None or base.shape == square)
    if left.dtype not in _DTYPES or out.dtype not in _DTYPES:
        raise ValueError(f"left: found {left.dtype} for a result in {out.dtype}; both must be fp16, bf16 or fp32")
    hindrance = obstacle(left.device)
    if hindrance is not None:
        raise ValueError(f"left is on {left.device}: {hindrance}. Use torch.baddbmm there")
    block, block_k, num_warps = _tile_sizes(left.shape[1], left.dtype)
    side = num_blocks(left.shape[1], left.dtype)
    programs = len(left) * (side * (side + 1) // 2)
    if programs > _MAX_PROGRAMS:
        found = f"{len(left)} matrices of {left.shape[1]} rows are {programs} tiles"
        raise ValueError(f"left: {found}; a launch has {_MAX_PROGRAMS}: split")
    stored = out
    if _is_interpreted() and torch.bfloat16 in (left.dtype, out.dtype):
        # The interpreter multiplies the bit patterns of bf16 (https://github.com/triton-lang/triton/issues/11584), and
        # cuts bits off where it should round to bf16. fp32 holds bf16 and the products of two exactly.
        left, right, stored = left.float(), right.float(), torch.empty_like(out, dtype=torch.float32)
    if not programs:
        return out
    addend = left if base is None else base
    kernels: Any = _kernels()
    # Triton launches on the current device
    current = nullcontext() if left.device.type == "cpu" else torch.accelerator.device_index(left.device.index)
    try:
        with current:
            kernels.symmetric_addmm_kernel[(programs,)](
                *(addend, left, right, stored, *left.shape[1:]),
                *(*_strides(addend), *_strides(left), *_strides(right), _strides(stored)[0], float(beta), float(alpha)),
                HAS_BASE=base is not None,
                BLOCK=block,
                BLOCK_K=block_k,
                num_warps=num_warps,
                num_stages=3,
                enable_fp_fusion=True,  # fp32 products are fused multiply-adds; Triton's default may change
            )
    except Exception as error:  # Triton's own (compiler, shared memory) have no base class but this in common
        raise RuntimeError(
            f"the Triton kernel failed for {tuple(left.shape)} {left.dtype} on {left.device}: "
            f"{type(error).__name__}: {error}. Leave out Orthogonalizer.tuning, or tune here"
        ) from error
    return out if stored is out else out.copy_(stored)


def why_not(device: torch.device) -> str | None:
    """Name what keeps the Triton kernel from running there; None: nothing. Compiles a kernel at the first
    call: a Triton that is installed may lack a driver, or gcc."""
    return obstacle(device) or _trial(device)


@functools.cache
def _trial(device: torch.device) -> str | None:
    x = (torch.arange(2 * 33 * 20, device="cpu") % 5 - 2).view(2, 33, 20)  # small integers: every sum is exact
    half, out = x.to(device, torch.float16), torch.empty(2, 33, 33, dtype=torch.float16, device=device)
    try:
        found = symmetric_addmm(None, half, half.mT, out=out).cpu()
    except RuntimeError as error:
        return f"a trial failed: {error}"
    return None if torch.equal(found.long(), x @ x.mT) else "a trial gave wrong numbers"
