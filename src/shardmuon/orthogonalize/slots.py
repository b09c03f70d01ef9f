"""Batches in which a matrix has the same bits in every slot and beside any neighbours.

[Note: equal bits in batches]
    torch's batched products are not batch-invariant by themselves. BLAS sums in another order where memory is not
    aligned, `bmm` and `mm` differ below 400 multiplications, and a library may choose its kernel by the number of
    matrices. So a batch has a size fixed by shape and kind of device, the last one is filled up with zeros, and every
    operand, result and scratch of a batch begins at a multiple of 64 bytes in each slot. A shape whose size is 1 always
    takes the 2-D products. Measured on an AVX2 CPU: 0 of 54,912 products in aligned slots differ, over 26 shapes,
    batches of 1 to 32 and four dtypes; packed ones differ in fp32 and fp64. `shardmuon.testing.slots` searches for a
    difference, on any device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardmuon._torch import foreach_copy_

ALIGNMENT = 64  # bytes

# Multiplications in a Newton-Schulz step of a whole batch on a CPU. Measured in fp32, AVX2: 64 matrices of 16 x 32 take
# a ninth, of 32 x 64 a third, of 64 x 64 two thirds of the time that they take alone; a single one takes 2.6 to 3.5
# times as long in its padded batch (0.7 to 1 ms). Batches of two gain nothing.
_CPU_WORK = 1 << 22
_CPU_LARGEST, _CPU_LEAST = 64, 4
# Elements of Gram matrices that fill an accelerator once (130 processors with a tile of 128 x 128 each): a batch of
# them takes hardly longer than one matrix. Times 1.5, so that rounding down to a power of two gives the nearest one.
_ACCELERATOR_FULL = 3 << 20
_ACCELERATOR_LARGEST = 64


def batch_size(rows: int, cols: int, device: torch.device) -> int:
    """Number of matrices of a shape that are orthogonalized together on a kind of device; a power of two."""
    short, long = min(rows, cols), max(rows, cols)
    if device.type == "cpu":
        wanted, largest = _CPU_WORK // (short * short * (2 * long + short)), _CPU_LARGEST
        if wanted < _CPU_LEAST:
            return 1
    else:
        wanted, largest = _ACCELERATOR_FULL // (short * short), _ACCELERATOR_LARGEST
    return 1 << max(0, min(wanted, largest).bit_length() - 1)


def empty_batch(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for a batch of this shape (B, rows, cols), or for a matrix (rows, cols); not initialized.

    Each matrix is row-major and begins at a multiple of 64 bytes.
    """
    if len(shape) == 2:
        return torch.empty(shape, dtype=dtype, device=device)
    size, rows, cols = shape
    per_line = ALIGNMENT // dtype.itemsize
    stride = -(-rows * cols // per_line) * per_line
    return torch.empty(size * stride, dtype=dtype, device=device).as_strided((size, rows, cols), (stride, cols, 1))


def copied(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of a matrix, or of a batch in slots, in a dtype."""
    out = empty_batch(x.shape, dtype, x.device)
    foreach_copy_([out], [x])  # `copy_` needs a device even for tensors without data, on which foresight runs this
    return out


def lies_in_slots(x: Tensor) -> bool:
    """True if a batch (B, rows, cols) in any memory lies as in `empty_batch`."""
    row_major = x.stride()[1:] == (x.shape[2], 1)
    aligned = len(x) == 1 or x.stride(0) * x.element_size() % ALIGNMENT == 0
    return row_major and aligned and x.data_ptr() % ALIGNMENT == 0
