"""Symmetric products on accelerators: one Triton kernel that computes the lower triangle and writes it twice.

The result is cut into square tiles. Only the T (T + 1) / 2 tiles on and below the diagonal are computed, and every
element on and below the diagonal is stored at (i, j) and at (j, i): the same bits, so the result is exactly symmetric,
diagonal tiles included, whatever the order in which the hardware sums. `base` is read on and below the diagonal only.

Bits: tile sizes come from a fixed table of dtype and number of rows. Autotuning would choose them by timing, and
BLOCK_K sets the order of summation: two runs, or two ranks, could then differ. Neither the size of the batch nor the
place in it enters the table or the arithmetic, so a matrix has the same bits alone and in any batch.

Triton is optional: it is imported at the first call that could use it. Where TRITON_INTERPRET=1 is set by then, Triton
interprets the kernel, on CPU tensors too.
"""

from __future__ import annotations

import functools
import os
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MAX_PROGRAMS = 2**23 - 1  # HIP counts threads, of which a launch has less than 2^32, at most 512 a program; CUDA 2^31


# Triton compiles the next two functions: it resolves `tl` and `_position` in this module when it does, where `_load`
# has put them by then. It resolves annotations too, so only `tl`'s may stand in a signature.
_position: Any = None


def tile_position(index, num_blocks):  # type: ignore[no-untyped-def]
    """Row and column of the index-th tile of a lower triangle of `num_blocks` blocks a side, in integers alone.

    The triangle is folded into a rectangle: rows T - 1 and 0 side by side, T - 2 and 1, and so on (T odd: row T - 1
    alone, then T - 2 and 0, ...), so a division gives the place. Exact at any size, where a square root would round.
    """
    odd = num_blocks % 2
    width = num_blocks + 1 - odd  # tiles in a folded row
    fold = index // width
    step = index % width
    length = num_blocks - fold  # tiles of the long row, which comes first; at least half of `width`
    second = step // length  # 0 in the long row, 1 in the short one
    row = num_blocks - 1 - fold - second * (num_blocks - 1 - 2 * fold + odd)  # T - 1 - fold, or fold - odd
    return row, step % length


# fmt: off
def _symmetric_addmm_kernel(  # type: ignore[no-untyped-def]
    base,   # (B, m, m), or any tensor where not HAS_BASE
    left,   # (B, m, k)
    right,  # (B, k, m)
    out,    # (B, m, m), each matrix contiguous
    m, k,
    base_batch, base_row, base_column,  # strides in elements
    left_batch, left_row, left_column,
    right_batch, right_row, right_column,
    out_batch,
    beta, alpha, diagonal,
    HAS_BASE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):
    # fmt: on
    num_blocks = (m + BLOCK - 1) // BLOCK
    num_tiles = num_blocks * (num_blocks + 1) // 2
    program = tl.program_id(0)
    batch = (program // num_tiles).to(tl.int64)  # int64: offsets pass 2^31
    block_row, block_column = _position(program % num_tiles, num_blocks)
    rows = block_row * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    columns = block_column * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    inner = tl.arange(0, BLOCK_K).to(tl.int64)
    left_tile = left + batch * left_batch + rows[:, None] * left_row + inner[None, :] * left_column
    right_tile = right + batch * right_batch + inner[:, None] * right_row + columns[None, :] * right_column
    advance = tl.full((), BLOCK_K, tl.int64)
    total = tl.full((BLOCK, BLOCK), 0.0, tl.float32)
    for start in range(0, k, BLOCK_K):
        # Both sides are masked in k: what lies beyond one of them may be NaN, and 0 * NaN is NaN.
        inside = inner < k - start
        a = tl.load(left_tile, mask=(rows[:, None] < m) & inside[None, :], other=0.0)
        b = tl.load(right_tile, mask=inside[:, None] & (columns[None, :] < m), other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")  # fp32 stays fp32: tf32 is NVIDIA's alone
        left_tile += advance * left_column
        right_tile += advance * right_row
    total = total * alpha
    lower = (rows[:, None] >= columns[None, :]) & (rows[:, None] < m)
    if HAS_BASE:
        base_tile = base + batch * base_batch + rows[:, None] * base_row + columns[None, :] * base_column
        # Written as an fma: a compiler may contract a * b + c * d into either of two, which round differently.
        total = tl.fma(tl.load(base_tile, mask=lower, other=0.0).to(tl.float32), beta, total)
    total = tl.where(rows[:, None] == columns[None, :], total + diagonal, total)
    value = total.to(out.dtype.element_ty)
    matrix = out + batch * out_batch
    tl.store(matrix + rows[:, None] * m + columns[None, :], value, mask=lower)
    tl.store(matrix + columns[None, :] * m + rows[:, None], value, mask=lower & (rows[:, None] > columns[None, :]))


@functools.cache
def _load() -> tuple[Any, bool]:
    """The kernel, None without Triton, and whether it is interpreted: TRITON_INTERPRET decides that now, once."""
    global tl, _position
    try:
        import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
        import triton.language  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        return None, False
    tl = triton.language
    _position = triton.jit(tile_position)
    kernel = triton.jit(_symmetric_addmm_kernel)
    return kernel, not isinstance(kernel, triton.JITFunction)


def is_available() -> bool:
    """True if Triton can be imported. Imports it."""
    return _load()[0] is not None


def obstacle(device: torch.device) -> str | None:
    """Name what keeps the kernel from running on a device, as far as can be told without running it; None: nothing.

    NVIDIA GPUs below compute capability 8.0 are left out, as by Triton itself.
    """
    if device.type == "cpu" and not os.environ.get("TRITON_INTERPRET"):
        return "Triton has no CPU kernels (TRITON_INTERPRET=1 interprets them, for tests)"
    if device.type not in ("cpu", "cuda", "xpu"):
        return f"Triton has no kernels for {device.type}"
    if not is_available():
        return "Triton cannot be imported: pip install 'shardmuon[triton]'"
    if device.type == "cpu" and not _load()[1]:
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


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Make the tensors' device the current one, on which Triton launches."""
    return nullcontext() if device.type == "cpu" else torch.accelerator.device_index(device.index)


def symmetric_addmm(
    base: Tensor | None,  # (B, m, m) symmetric, fp16, bf16 or fp32, or None for zeros; not read above the diagonal
    left: Tensor,  # (B, m, k) fp16, bf16 or fp32, any strides
    right: Tensor,  # (B, k, m) of left's dtype, any strides, such that left @ right is symmetric
    beta: float = 0.0,
    alpha: float = 1.0,
    out_dtype: torch.dtype | None = None,
    diagonal: float = 0.0,
    out: Tensor | None = None,  # (B, m, m), written, each matrix contiguous; not an operand. Default: new memory
) -> Tensor:  # (B, m, m), exactly symmetric: `out`
    """beta * base + alpha * left @ right + diagonal * I, for a result that is symmetric.

    Products are summed in fp32 and the whole expression is rounded once, at the end. With beta = 0 base is not read, so
    its NaNs do not count (as in torch.baddbmm). Not differentiable.

    Args:
        out_dtype: Dtype of new memory: fp16, bf16 or fp32. Default: left's dtype.
        diagonal: Added to each diagonal element: aI + bR + cR^2 is `symmetric_addmm(r, r, r, b, c, diagonal=a)`.

    Raises:
        ValueError: Shapes, dtypes or devices that do not fit, or no Triton for them: see `obstacle`.
    """
    out_dtype = out.dtype if out is not None else out_dtype or left.dtype
    base = None if beta == 0.0 else base
    _check(base, left, right, out_dtype)
    num, m, _ = left.shape
    sizes = _tile_sizes(m, left.dtype)
    side = num_blocks(m, left.dtype)
    programs = num * (side * (side + 1) // 2)
    if programs > _MAX_PROGRAMS:
        raise ValueError(f"left: {num} matrices of {m} rows are {programs} tiles; a launch has {_MAX_PROGRAMS}: split")
    if out is None:
        out = torch.empty(num, m, m, dtype=out_dtype, device=left.device)
    stored = out
    if _load()[1] and torch.bfloat16 in (left.dtype, out_dtype):
        # The interpreter multiplies the bit patterns of bf16 (https://github.com/triton-lang/triton/issues/11584), and
        # cuts bits off where it should round to bf16. fp32 holds bf16 and the products of two exactly.
        left, right, stored = left.float(), right.float(), torch.empty_like(out, dtype=torch.float32)
    if programs:
        _launch(programs, sizes, base, left, right, stored, (float(beta), float(alpha), float(diagonal)))
    return out if stored is out else out.copy_(stored)


def _launch(
    programs: int,
    sizes: tuple[int, int, int],
    base: Tensor | None,
    left: Tensor,
    right: Tensor,
    out: Tensor,
    factors: tuple[float, float, float],
) -> None:
    """Run the kernel, which writes to `out`."""
    kernel, _ = _load()
    block, block_k, num_warps = sizes
    addend = left if base is None else base
    try:
        with _on(left.device):
            kernel[(programs,)](
                *(addend, left, right, out, *left.shape[1:]),
                *(*_strides(addend), *_strides(left), *_strides(right), _strides(out)[0], *factors),
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


def _check(base: Tensor | None, left: Tensor, right: Tensor, out_dtype: torch.dtype) -> None:
    """Raise ValueError for wrong shapes, with which the kernel would read outside the tensors, without a word."""
    if left.dim() != 3 or right.shape != (left.shape[0], left.shape[2], left.shape[1]):
        raise ValueError(
            f"right: found {tuple(right.shape)}; left {tuple(left.shape)} needs (B, k, m) to its (B, m, k)"
        )
    if base is not None and base.shape != (left.shape[0], left.shape[1], left.shape[1]):
        raise ValueError(f"base: found {tuple(base.shape)}; left {tuple(left.shape)} needs (B, m, m) or None")
    if right.dtype != left.dtype or (base is not None and base.dtype not in _DTYPES):
        found = f"left {left.dtype}, right {right.dtype}, base {None if base is None else base.dtype}"
        raise ValueError(f"dtypes: found {found}; left and right must be of one dtype, base fp16, bf16 or fp32")
    if any(t.device != left.device for t in (right, base) if t is not None):
        raise ValueError(f"left is on {left.device}, right or base is not; move them to one device")
    if left.dtype not in _DTYPES or out_dtype not in _DTYPES:
        raise ValueError(f"left: found {left.dtype} with out_dtype={out_dtype}; both must be fp16, bf16 or fp32")
    hindrance = obstacle(left.device)
    if hindrance is not None:
        raise ValueError(f"left is on {left.device}: {hindrance}. Use torch.baddbmm there")


def why_not(device: torch.device) -> str | None:
    """Name what keeps the Triton kernel from running there; None: nothing. Compiles a kernel at the first
    call: a Triton that is installed may lack a driver, or gcc."""
    return obstacle(device) or _trial(device)


@functools.cache
def _trial(device: torch.device) -> str | None:
    x = (torch.arange(2 * 33 * 20, device="cpu") % 5 - 2).view(2, 33, 20)  # small integers: every sum is exact
    try:
        found = symmetric_addmm(None, x.to(device, torch.float16), x.mT.to(device, torch.float16)).cpu()
    except RuntimeError as error:
        return f"a trial failed: {error}"
    return None if torch.equal(found.long(), x @ x.mT) else "a trial gave wrong numbers"
