"""The Triton kernel of triton_symmetric.py, which is imported at the first call that could use it: Triton is optional.

Triton's interpreter takes the place of its compiler, on CPU tensors too, where TRITON_INTERPRET=1 is set by then.
"""

from __future__ import annotations

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
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
@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def symmetric_addmm_kernel(  # type: ignore[no-untyped-def]
    base,   # (B, m, m), or any tensor where not HAS_BASE
    left,   # (B, m, k)
    right,  # (B, k, m)
    out,    # (B, m, m), each matrix contiguous
    m, k,
    base_batch, base_row, base_column,  # strides in elements
    left_batch, left_row, left_column,
    right_batch, right_row, right_column,
    out_batch,
    beta, alpha,
    HAS_BASE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):
    # fmt: on
    num_blocks = (m + BLOCK - 1) // BLOCK
    num_tiles = num_blocks * (num_blocks + 1) // 2
    program = tl.program_id(0)
    batch = (program // num_tiles).to(tl.int64)  # int64: offsets pass 2^31
    block_row, block_column = tile_position(program % num_tiles, num_blocks)
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
    value = total.to(out.dtype.element_ty)
    matrix = out + batch * out_batch
    tl.store(matrix + rows[:, None] * m + columns[None, :], value, mask=lower)
    tl.store(matrix + columns[None, :] * m + rows[:, None], value, mask=lower & (rows[:, None] > columns[None, :]))
