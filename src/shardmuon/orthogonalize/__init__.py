"""Orthogonalization methods behind one function, `orthogonalize`: (B, m, n) -> (B, m, n).

[Note: equal bits in batches]
    torch's batched products are not batch-invariant by themselves: the bits of one matrix's product can change with the
    rest of the batch. There are several causes. BLAS sums unaligned memory in a different order than aligned memory.
    `bmm` and `mm` give different bits in products of fewer than 400 multiplications. A library can choose its kernel by
    the number of matrices.

    So the batch size depends only on the shape of the matrices and the kind of device, and the last batch is padded
    with zero matrices. In every operand, result and scratch tensor, each matrix has a slot, a separate memory range
    that starts at a multiple of 64 bytes. If the batch size for a shape is 1, products are always 2-D.

    This was tested on an AVX2 CPU, with 26 shapes, batches of 1 to 32 matrices and four dtypes. None of 54,912 products
    in slots changed its bits, whereas products of packed matrices did change in fp32 and fp64.
    `shardmuon.testing.slots` searches for such changes on any device.

[Note: emulated half precision]
    A CPU without bf16 (or fp16) instructions multiplies bf16 (fp16) matrices 10 to 80 times slower than fp32 matrices.
    On such a CPU, operands are rounded to the half-precision dtype, products run in fp32, and every result is rounded
    to the half-precision dtype. Tensor cores round at the same points: operands are in half precision, sums are in
    fp32, and the result is rounded once. So errors measured with emulation hold for tensor cores too.

[Note: number of blocks]
    On CPUs, the lower half of a symmetric product is computed in row blocks, and the upper half is copied from it. With
    b blocks, this takes (b + 1) / 2b of the arithmetic of the whole product, which is 62% for four blocks. Each block
    has an overhead c of about 50 us, which consists of the function calls, the copy to the upper half, and the lower
    efficiency of smaller products.

    If the whole product takes time t, the total time t (b + 1) / 2b + b c is shortest at b = sqrt(t / 2c). To compute
    b, the ratio t / 2c is expressed in FLOPs: the FLOPs of the product, divided by the FLOPs that the CPU executes in
    time 2c.

    The overheads were fitted to measured times of products from 128x128 to 512x2048 in fp32 and bf16. The measurements
    ran on one AVX512-BF16 CPU, at the same time as other programs. AMX was not measured: its overhead assumes four
    times AVX512's bf16 rate. Accelerators compute the whole product, since many small calls would take more time than
    they save.

[Note: the norm at any scale]
    In fp32, the squares of entries near 1e-30 underflow, and the squares of entries near 1e30 overflow.

    On CPUs, the norm is first computed in fp32. The size of this norm shows whether a square may have underflowed or
    overflowed. Only then is each matrix divided by its largest absolute entry, rounded down to a power of two, and the
    norm is computed again. If the first norm was right, this division does not change the bits of the result.

    On CUDA, squares are summed in fp64, which can represent the square of every fp32 number. The CPU therefore need not
    wait for the norm. On other devices, matrices are always divided by the power of two.

[Note: the order of a norm]
    On CPUs, the elements of a matrix are summed in row-major order, in chunks of 2^14, and the norms of the chunks are
    combined in fp64. So the bits of a norm do not depend on the matrix's place in a batch, on the other matrices or on
    the number of threads. The relative error of the norm is 1e-7, whereas that of a single fp32 sum over 2048 x 8192
    elements is 6e-4.

    On accelerators, torch's foreach norm sums each matrix separately. On CUDA, it sums fp32 and narrower dtypes in
    fp64.

[Note: the Gram form]
    One Newton-Schulz step replaces the m x n matrix X with (a I + b R + c R^2) X, where R = X X^T is an m x m matrix.
    So the result of all steps is Q X_0, where X_0 is the initial X, and Q is a polynomial in R_0 = X_0 X_0^T. The Gram
    form therefore iterates the m x m matrices Q and R, and multiplies Q by X_0 once at the end (Dao-AILab, Gram
    Newton-Schulz, 2026).

    For k steps, the Gram form needs one m x m x n product for R_0, one for Q X_0, and 4 k - 3 symmetric m x m x m
    products. The standard form needs 2 k m x m x n products and k symmetric m x m x m products.

[Note: restarts]
    The exact R has no negative eigenvalues, but rounding errors give it small ones. Each step multiplies these
    eigenvalues by at least a^2. A whole schedule multiplies them by the square of its slope, which is the product of
    the coefficients a of all steps: 485^2 for torch's five steps, 6363^2 for eight steps of Polar Express.

    A restart recomputes R, so that only the slope since the restart counts. The iteration restarts before a step that
    would raise this slope above `_MOST_SLOPE`. This keeps errors close to those of the standard form
    (docs/adr/0043-restarts-by-slope.md). There are two kinds of restart:

    - A restart from X computes X <- Q X and R <- X X^T. It takes 4 m^2 n FLOPs.
    - A local restart computes R <- Q R_0 Q, where R_0 was stored in fp32. This takes 8 m^3 FLOPs, with each fp32
      matrix split into two half-precision matrices. Multiplying the matrices Q from before and after the restart takes
      2 m^3. The total is less than for a restart from X if n > 5/2 m. A local restart does not need X, so it needs
      no communication if the columns of X are spread over ranks. It is used only in fp16, and only for schedules with a
      single restart, because each local restart rounds the product of the matrices Q. In fp32, a local restart would be
      useless, because it would bring back the rounding errors of R_0.

    After eight steps of Polar Express on log-spaced singular values, the error is 0.018 with restarts from X and 0.023
    with local restarts.

    The Gram form does not allow products in bf16. With bf16's 8-bit significand, the errors are 0.2 to 2 even with
    restarts. Without restarts, they are 1e5 if singular values follow a power law. The standard form in bf16 has errors
    of 0.02 to 0.1.

[Note: results that are not finite]
    If the result for a finite matrix is not finite, it is replaced with zeros, so the weights only decay in this step.
    This has never been observed. If it happens, a later step emits a warning. The flags that mark replaced results are
    copied to the CPU asynchronously, so that no step waits for the device. The result for a matrix with NaN or Inf
    becomes NaN.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from shardmuon._torch import (
    Coming,
    cpu_has_amx,
    cpu_has_bf16_matmul,
    exact_products,
    foreach_copy_,
    foreach_norm,
    is_capturing,
    power_of_two,
)
from shardmuon.orthogonalize.schedules import Triples

MethodName = Literal["auto", "standard", "gram", "torch"]

# ----------------------------------------------------------------------------------------------------------- batches

_ALIGNMENT = 64  # alignment in bytes: every matrix in a batch starts at a multiple of this number

# On CPUs, the batch size is chosen so that one Newton-Schulz step on a whole batch takes about this number of
# multiplications. In fp32 on an AVX2 CPU, a batch of 64 matrices took 1/9 (16 x 32 matrices), 1/3 (32 x 64) or 2/3 (64
# x 64) of the time of 64 separate matrices. A single matrix took about three times as long in a padded batch as alone.
# Batches of two matrices saved no time.
_CPU_WORK = 1 << 22
_CPU_LEAST, _LARGEST = 4, 64
# 1.5 times the total number of elements in the Gram matrices of a batch that just keeps a whole accelerator busy. An
# accelerator is assumed to have 130 SMs, each of which computes 128 x 128 elements. A batch up to this size takes
# hardly longer than a single matrix. The factor 1.5 makes up for rounding the batch size down to a power of two.
_ACCELERATOR_FULL = 3 << 20


def batch_size(rows: int, cols: int, device: torch.device) -> int:
    """Return the batch size, a power of two, for orthogonalizing rows x cols matrices on this type of device."""
    short, long = min(rows, cols), max(rows, cols)
    wanted = _ACCELERATOR_FULL // (short * short)
    if device.type == "cpu":
        wanted = _CPU_WORK // (short * short * (2 * long + short))
        wanted = 1 if wanted < _CPU_LEAST else wanted
    return 1 << max(0, min(wanted, _LARGEST).bit_length() - 1)


def empty_batch(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate uninitialized memory for a batch (B, rows, cols) or a single matrix (rows, cols). Each matrix is
    row-major and starts at a multiple of 64 bytes."""
    rows, cols = shape[-2:]
    slot = -(-rows * cols * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT // dtype.itemsize
    return torch.empty_strided(tuple(shape), (slot, cols, 1)[-len(shape) :], dtype=dtype, device=device)


def _lies_in_slots(x: Tensor) -> bool:
    """True if each matrix of a batch (B, rows, cols) is row-major and starts at a multiple of 64 bytes."""
    row_major = x.stride()[1:] == (x.shape[2], 1)
    aligned = len(x) == 1 or x.stride(0) * x.element_size() % _ALIGNMENT == 0
    return row_major and aligned and x.data_ptr() % _ALIGNMENT == 0


def copied_batch(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy a matrix or a batch of matrices to new memory, and convert it to `dtype`. Each matrix in the copy starts at
    a multiple of 64 bytes."""
    out = empty_batch(x.shape, dtype, x.device)
    foreach_copy_([out], [x])
    return out


# ---------------------------------------------------------------------------------------------------------- products

_HALVES = (torch.float16, torch.bfloat16)
# Scale of the low part when an fp32 matrix is split into the sum of two half-precision matrices. fp16 has 11-bit
# significands, so multiplying fp16's rounding errors by 2^11 brings them into fp16's range.
_SPLIT = 2.0**11
# Maximum number of row blocks into which a symmetric product is split. With 4 blocks, 10/16 of the product is computed;
# with 8, it would still be 36/64.
_MAX_BLOCKS = 4
# FLOPs that one CPU thread executes in time 2c, for each dtype, where c is the overhead of one row block (see [Note:
# number of blocks]).
_OVERHEAD = {torch.float64: 3e6, torch.float32: 6e6, torch.bfloat16: 30e6}
_OVERHEAD_AMX = 120e6  # value of `_OVERHEAD` for bf16 on a CPU with AMX


class Products:
    """Matrix products of one batch. In half precision, they are rounded on every device as on tensor cores: sums are in
    fp32, and each result is rounded once.

    An instance has four functions that multiply single matrices or batches from `empty_batch`. `mm(left, right, out=)`
    computes left @ right. `addmm(base, left, right, beta=1, alpha=1, out=)` computes beta * base + alpha * left @
    right. `symmetric_mm` and `symmetric_addmm` do the same if the result (and the base) is symmetric. For large
    products on CPUs, they compute one half of the result and mirror it.

    All four functions write to `out` and return it. `out` must also come from `empty_batch`, and must not be an
    operand. Where no special handling is needed, the functions are torch's own.

    Attributes:
        dtype: Dtype to which every result is rounded: fp64, fp32, fp16 or bf16.
        operands: Dtype of the tensors that are multiplied. It is fp32 if `dtype` is a half-precision dtype for which
            the CPU has no fast products ([Note: emulated half precision]).
    """

    def __init__(
        self,
        shape: Sequence[int],  # (B, m, n), or (m, n) for single matrices
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        emulated = device.type == "cpu" and dtype in _HALVES
        emulated = emulated and not (dtype == torch.bfloat16 and cpu_has_bf16_matmul())
        self.dtype, self.operands = dtype, torch.float32 if emulated else dtype
        short, long = sorted(shape[-2:])  # the result of a symmetric product, such as a Gram matrix, is short x short
        is_single = len(shape) == 2  # the products of batched matrices are too small to be split
        may_split = is_single and device.type == "cpu" and _row_blocks(short, long, self.operands) > 1
        plain: Sequence[Callable[..., Tensor]] = (torch.mm, torch.addmm) if is_single else (torch.bmm, torch.baddbmm)
        symmetric = [partial(_by_blocks, product) for product in plain] if may_split else plain
        if emulated:
            plain, symmetric = ([partial(_then_rounded, f, dtype) for f in pair] for pair in (plain, symmetric))
        self.mm, self.addmm = plain
        self.symmetric_mm, self.symmetric_addmm = symmetric

    def rounded_(self, x: Tensor) -> Tensor:
        """Round the values of `x` to `self.dtype`, in place, and return `x`. The tensor keeps its dtype,
        `self.operands`."""
        return x if self.operands == self.dtype else x.copy_(x.to(self.dtype))

    def operand(self, x: Tensor) -> Tensor:
        """Round `x` (fp32 or fp64) to `self.dtype`, for use as an operand of the other methods. The result is a copy
        unless `x` already has this dtype."""
        return x if x.dtype == self.dtype else self.rounded_(copied_batch(x, self.operands))

    def sandwich(
        self,
        factor: Tensor,  # square matrices (B, m, m), rounded to `self.dtype`
        middle: Tensor,  # symmetric fp32 matrices (B, m, m)
    ) -> Tensor:  # same shape as `middle`
        """Compute factor @ middle @ factor^T with fp32 accuracy, and round it once at the end. `self.dtype` must be a
        half-precision dtype. Each fp32 operand is split into a sum of two half-precision matrices, so a product with it
        becomes two half-precision products."""
        return self.operand(self._split_product(self._split_product(middle, factor.mT).mT, factor.mT))

    def _split_product(self, wide: Tensor, factor: Tensor) -> Tensor:
        """Compute wide (fp32) @ factor (half precision), with an fp32 result."""
        high = self.operand(wide)
        low = self.operand((wide - high).mul_(_SPLIT))
        return _mm_to_fp32(high, factor).add_(_mm_to_fp32(low, factor), alpha=1.0 / _SPLIT)


def _mm_to_fp32(left: Tensor, right: Tensor) -> Tensor:
    """Multiply half-precision matrices, or batches of matrices, with an fp32 result. torch (2.8 to 2.13) supports
    `out_dtype` only on CUDA, so fp32 copies are multiplied on other devices. Emulated half-precision operands are fp32
    already ([Note: emulated half precision])."""
    mm = torch.mm if left.dim() == 2 else torch.bmm
    if left.is_cuda:
        return mm(left, right, out_dtype=torch.float32)
    left, right = (x if x.dtype == torch.float32 else copied_batch(x, torch.float32) for x in (left, right))
    return mm(left, right, out=empty_batch((*left.shape[:-1], right.shape[-1]), torch.float32, left.device))


def _sides(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two operands whose product is the smaller Gram matrix: (x, x^T), or (x^T, x) if x is tall."""
    return (x.mT, x) if x.shape[-2] > x.shape[-1] else (x, x.mT)


def _square_of(x: Tensor) -> Tensor:  # maps (B, m, n) to (B, k, k), k = min(m, n)
    """Allocate uninitialized memory for one square matrix per matrix of `x`, with as many rows as the short side of
    `x`. Each matrix starts at a multiple of 64 bytes, as in `empty_batch`."""
    side = min(x.shape[-2:])
    return empty_batch((*x.shape[:-2], side, side), x.dtype, x.device)


def _then_rounded(product: Callable[..., Tensor], dtype: torch.dtype, *operands: Tensor, **others: Any) -> Tensor:
    """Call `product` on fp32 operands, and round its result to values that `dtype` can represent. The result stays
    fp32."""
    out = product(*operands, **others)
    return out.copy_(out.to(dtype))


def _row_blocks(rows: int, inner: int, dtype: torch.dtype) -> int:
    """Choose the number of row blocks into which a CPU splits a symmetric product (rows x inner) @ (inner x rows). The
    number of blocks changes the bits of the product, so it depends only on properties that change them anyway: the
    shape, the dtype, the kind of CPU and the number of threads."""
    amx = dtype == torch.bfloat16 and cpu_has_amx()
    overhead = (_OVERHEAD_AMX if amx else _OVERHEAD.get(dtype, 6e6)) * torch.get_num_threads()
    return max(1, min(_MAX_BLOCKS, math.isqrt(int(2 * rows * rows * inner / overhead))))


def _by_blocks(
    product: Callable[..., Tensor],  # `torch.mm` or `torch.addmm`
    *operands: Tensor,  # left (m, k), right (k, m); `addmm` takes a symmetric base (m, m) before them
    out: Tensor,  # (m, m), overwritten
    **scales: float,  # beta and alpha of `addmm`
) -> Tensor:  # returns `out`
    """Compute a symmetric product on a CPU. The lower half of a large product is computed in row blocks, and the upper
    half is copied from it."""
    *base, left, right = operands
    rows = len(left)
    count = _row_blocks(rows, left.shape[1], left.dtype)
    if count == 1:
        return product(*operands, out=out, **scales)
    for i in range(count):
        start, stop = rows * i // count, rows * (i + 1) // count
        target = out[start:stop, :stop]
        summands = [x[start:stop, :stop] for x in base]
        product(*summands, left[start:stop], right[:, :stop], out=target, **scales)
        if start:
            out[:start, start:stop] = target[:, :start].T
    return out


# ----------------------------------------------------------------------------------------------------- normalization

# Bounds between which an fp32 norm is right despite underflow and overflow of squares. A square that underflows in fp32
# is below 2^-126, so even 2^36 such squares add up to less than 2^-90. At the lower bound, the squared norm is 2^-60,
# and 2^-90 is too small to change it in fp32. At the upper bound, the squared norm is 2^80, which is far from overflow.
_LOW, _HIGH = 2.0**-30, 2.0**40
_LEAST = 2.0**-1000  # lower bound for norms, smaller than the norm of any nonzero fp32 matrix
# Chunk size in elements. torch sums fewer than 2^15 elements on one thread, so the bits of a chunk's norm do not depend
# on the number of threads.
_CHUNK = 1 << 14


def _normalize(
    x: Tensor,  # (B, m, n), any float dtype and strides; not changed unless it is `out`
    out: Tensor,  # (B, m, n), from `empty_batch`; overwritten
) -> Tensor:  # returns `out`
    """Divide each matrix by its Frobenius norm, accurately at any scale that the dtype can represent (see [Note: the
    norm at any scale]). Zero matrices stay zero. A NaN or Inf makes its whole matrix NaN.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    if x.is_cuda and wide == torch.float32:
        return _normalize_in_fp64(x, out)
    norm = _norms(x, wide)
    if x.device.type != "cpu" or not (float(norm.min()) > _LOW and float(norm.max()) < _HIGH):
        x = x.to(wide)
        # `power_of_two` maps NaN and Inf to Inf, so the norm of a matrix with such an entry becomes NaN.
        x = x / power_of_two(x.abs().amax(dim=(-2, -1), keepdim=True))
        norm = _norms(x, wide).clamp_(min=torch.finfo(wide).tiny)
    # With a 0-dim divisor, torch keeps a bf16 matrix in bf16 instead of making an fp32 copy: it divides in fp32 and
    # rounds each quotient once.
    if len(x) == 1:
        return torch.div(x if x.dtype == out.dtype else x.to(wide), norm.view(()), out=out)
    return torch.div(x.to(wide), norm, out=out)


def _norms(x: Tensor, wide: torch.dtype) -> Tensor:  # returns shape (B, 1, 1)
    """Compute the Frobenius norm of each matrix. The elements are summed in row-major order, in chunks (see [Note: the
    order of a norm])."""
    flat = x.reshape(len(x), -1)
    norms: Tensor
    if x.device.type != "cpu":
        # use `foreach_norm`, because the order in which `vector_norm` sums depends on the number of matrices
        norms = torch.stack(foreach_norm(flat.unbind(0), 2, wide))
    elif flat.shape[1] <= _CHUNK:
        norms = torch.linalg.vector_norm(flat, dim=1, dtype=wide)
    else:
        whole = flat.shape[1] // _CHUNK * _CHUNK
        parts = torch.linalg.vector_norm(flat[:, :whole].unflatten(1, (-1, _CHUNK)), dim=2, dtype=wide)
        if whole < flat.shape[1]:
            rest = torch.linalg.vector_norm(flat[:, whole:], dim=1, keepdim=True, dtype=wide)
            parts = torch.cat([parts, rest], 1)
        norms = torch.linalg.vector_norm(parts, dim=1, dtype=torch.float64)
    return norms.to(wide).view(-1, 1, 1)


def _normalize_in_fp64(x: Tensor, out: Tensor) -> Tensor:  # returns `out`
    """Divide each matrix by its norm, which is summed in fp64. Since fp64 can represent the square of every fp32
    number, two passes over the matrix suffice, and the host need not wait for the device.
    """
    # Use `foreach_norm`, because `vector_norm` would first copy each matrix to fp64. The fp64 copy of a bf16 matrix is
    # four times as large as the matrix, and making it causes nine times the memory traffic of `foreach_norm`.
    norms = foreach_norm(x.unbind(0), 2)
    norm = (torch.stack(norms) if len(x) > 1 else norms[0]).view(-1, 1, 1)
    # If a norm is 0, its reciprocal becomes a finite number, so that a zero matrix stays zero. If a norm is infinite or
    # NaN, its reciprocal becomes NaN.
    norm = norm.nan_to_num_(nan=torch.nan, posinf=torch.nan).clamp_(min=_LEAST)
    return torch.mul(x, norm.reciprocal_(), out=out)  # `torch.mul` computes the product in fp64 and rounds it once


# -------------------------------------------------------------------------------------------------------- iterations

# An iteration is a function that orthogonalizes matrices of Frobenius norm 1 and dtype `products.operands`. Its input
# is a batch (B, m, n) from `empty_batch` or one matrix (m, n). Zero matrices stay zero. An iteration must not write to
# its input, and must not let one matrix influence the result of another. It must not wait for the device, so that a
# CUDA graph can capture it.


def _newton_schulz(
    # (B, m, n) or (m, n); each matrix starts at a multiple of 64 bytes and has norm 1 and dtype `products.operands`
    y: Tensor,
    coefficients: Triples,
    products: Products,
) -> Tensor:  # same shape and dtype as `y`
    """For each triple (a, b, c), replace X with a X + (b A + c A A) X, where A = X X^T. If X is tall, replace X with a
    X + X (b A + c A A), where A = X^T X. This is the iteration of torch.optim.Muon and of Keller Jordan's Muon
    (https://kellerjordan.github.io/posts/muon/).

    In each step, the `addmm` that computes the last product also adds a X. Adding a to the diagonal of the polynomial b
    A + c A A instead would round the sum, and errors would be 1.4 to 1.9 times as large in fp32. In bf16, they would be
    up to 1.9 times as large, because torch's products would round the sum twice (ADR 23).
    """
    tall = y.shape[-2] > y.shape[-1]
    poly = _square_of(y)
    made: list[tuple[Tensor, Tensor]] = []
    for _ in range(2):
        out = torch.empty_strided(y.shape, y.stride(), dtype=y.dtype, device=y.device)
        # The Gram matrix and the result can share memory, since the result is written when the Gram matrix is no longer
        # needed.
        made.append((out, out.as_strided(poly.shape, poly.stride())))
    for step, (a, b, c) in enumerate(coefficients):
        out, gram = made[step % 2]
        left, right = _sides(y)
        if c == 0.0:  # a cubic step (c = 0) does not need A A, the square of the Gram matrix
            factor, alpha = products.symmetric_mm(left, right, out=poly), b
        else:
            products.symmetric_mm(left, right, out=gram)
            factor, alpha = products.symmetric_addmm(gram, gram, gram, beta=b, alpha=c, out=poly), 1.0
        left, right = (y, factor) if tall else (factor, y)
        y = products.addmm(y, left, right, beta=a, alpha=alpha, out=out)
    return y


# For each dtype, the largest allowed product of the coefficients a between two restarts, which recompute the Gram
# matrix (see [Note: restarts]). The limit of 42 allows three of Jordan's steps or two steps of Polar Express.
_MOST_SLOPE = {torch.float16: 42.0, torch.float32: 42.0, torch.float64: 1e6}
# Aspect ratio n/m above which recomputing the Gram matrix R from its initial value R_0 (a local restart) takes less
# work than recomputing it from X (see [Note: restarts]).
_LOCAL_ASPECT = 5 / 2


def _restarts_locally(m: int, n: int, coefficients: Triples, dtype: torch.dtype) -> bool:
    """True if the Gram form of an m x n matrix (m <= n) restarts locally, that is, recomputes the Gram matrix without X
    (see [Note: restarts])."""
    return dtype == torch.float16 and n > _LOCAL_ASPECT * m and len(_plan_restarts(coefficients, dtype)) == 1


def _plan_restarts(coefficients: Triples, dtype: torch.dtype) -> tuple[int, ...]:
    """Choose the steps before which the Gram form recomputes the Gram matrix to limit rounding errors (see [Note:
    restarts]). The result contains indices from 1 to k - 1, where k is the number of steps.
    """
    found, slope = list[int](), 1.0
    for step, (a, _, _) in enumerate(coefficients):
        # The slope is the product of the coefficients a since the last restart, which recomputed the Gram matrix. If
        # the slope is below 1, count it as 1, because earlier steps do not shrink the rounding errors that later steps
        # make.
        slope = max(slope, 1.0) * abs(a)
        if step and slope > _MOST_SLOPE[dtype]:
            found.append(step)
            slope = abs(a)
    return tuple(found)


def _gram_newton_schulz(
    # (B, m, n) or (m, n); each matrix starts at a multiple of 64 bytes and has norm 1 and dtype `products.operands`
    y: Tensor,
    coefficients: Triples,
    products: Products,
) -> Tensor:  # same shape and dtype as `y`
    """Run the steps of `_newton_schulz` on the smaller Gram matrix of `y` (see [Note: the Gram form])."""
    (short, long), tall = sorted(y.shape[-2:]), y.shape[-2] > y.shape[-1]
    ends = itertools.pairwise((0, *_plan_restarts(coefficients, products.dtype), len(coefficients)))
    # each segment consists of the steps between two restarts, which recompute the Gram matrix
    first, *others = (coefficients[start:stop] for start, stop in ends)
    if _restarts_locally(short, long, coefficients, products.dtype):
        wide = _mm_to_fp32(*_sides(y))  # Gram matrix in fp32, not rounded to half precision
        before = _factor_of(products.operand(wide), first, products)
        after = _factor_of(products.sandwich(before, wide), others[0], products)
        factor = products.mm(after, before, out=_square_of(before))
        # free memory before the multiplication in `_times` allocates its result
        del wide, before, after
        # If X is tall, transpose the matrix Q, since (Q X)^T = X^T Q^T. Q is a product of two symmetric matrices and is
        # symmetric only up to rounding.
        return _times(products, factor.mT if tall else factor, y, tall)
    for segment in (first, *others):
        gram = products.symmetric_mm(*_sides(y), out=_square_of(y))
        y = _times(products, _factor_of(gram, segment, products), y, tall)
    return y


def _times(products: Products, factor: Tensor, y: Tensor, tall: bool) -> Tensor:
    """Multiply `y` by the square matrix `factor`, from the left, or from the right if `y` is tall."""
    left, right = (y, factor) if tall else (factor, y)
    return products.mm(left, right, out=empty_batch(y.shape, y.dtype, y.device))


def _factor_of(
    gram: Tensor,  # symmetric matrices (B, m, m) with trace 1, or 0 for zero matrices
    coefficients: Triples,
    products: Products,
) -> Tensor:  # same shape and dtype as `gram`
    """Compute the matrix Q such that Q X is the result of all Newton-Schulz steps on a matrix X with X X^T = gram."""
    factor: Tensor | None = None
    for step, (a, b, c) in enumerate(coefficients):
        # Do not add the coefficient `a` to the polynomial. It is larger than the other terms, which would lose digits
        # when the sum is rounded.
        if c == 0.0:
            poly = products.operand(torch.mul(gram, b, out=_square_of(gram)))
        else:
            poly = products.symmetric_addmm(gram, gram, gram, beta=b, alpha=c, out=_square_of(gram))
        if step + 1 < len(coefficients):  # gram <- (a I + poly) gram (a I + poly)
            half = products.symmetric_addmm(gram, gram, poly, beta=a, out=_square_of(gram))
            gram = products.symmetric_addmm(half, poly, half, beta=a, out=_square_of(gram))
        if factor is None:
            factor = copied_batch(poly, poly.dtype)
            factor.diagonal(dim1=-2, dim2=-1).add_(a)
            factor = products.rounded_(factor)
        else:
            factor = products.symmetric_addmm(factor, factor, poly, beta=a, out=_square_of(gram))
    assert factor is not None, "a schedule has at least one step"
    return factor


TORCH_EPS = 1e-7  # default eps of torch.optim.Muon, which divides by the norm or eps, whichever is larger


def _torch_muon(matrix: Tensor, coefficients: Triples) -> Tensor:  # returns bf16, with the shape of `matrix`
    """Orthogonalize a matrix with the same operations as `torch.optim.Muon` (torch 2.9 to 2.13): cast to bf16,
    normalize, iterate.

    Unlike torch, this function does not write to `matrix`. If parameters are bf16 and nesterov is False, torch
    normalizes the momentum buffer itself in place, because `.bfloat16()` does not copy a bf16 tensor.
    """
    y = matrix.to(torch.bfloat16, copy=True, memory_format=torch.contiguous_format)
    tall = y.size(0) > y.size(1)
    y = y.T if tall else y
    y.div_(y.norm().clamp(min=TORCH_EPS))
    for a, b, c in coefficients:
        gram = y @ y.T
        poly = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        y = torch.addmm(y, poly, y, beta=a)
    return y.T if tall else y


# ----------------------------------------------------------------------------------------------------------- methods

ITERATIONS: dict[str, Callable[..., Tensor]] = {"standard": _newton_schulz, "gram": _gram_newton_schulz}


def products_dtype(method: str, given: torch.dtype | None, device: torch.device) -> torch.dtype:
    """Return the dtype in which an orthogonalization method multiplies matrices: `given`, or the method's default if
    `given` is None.

    The default of "standard" is bfloat16, as in torch.optim.Muon. On CPUs without bf16 instructions, it is float32,
    because bf16 products would be 10 to 80 times slower. The default of "gram" is float32 on CPUs and float16 on
    accelerators, because bf16 is not precise enough. "torch" always uses bfloat16.

    Raises:
        ValueError: The method is "gram", and the rounding errors of products in the given dtype would be too large.
    """
    if method == "torch":
        return torch.bfloat16
    if method == "gram" and given is not None and given not in _MOST_SLOPE:
        raise ValueError(
            f"method='gram' needs products in torch.float16, torch.float32 or torch.float64, found {given}: "
            "rounding errors grow too large there. Use method='standard'"
        )
    if given is not None:
        return given
    if device.type == "cpu" and (method == "gram" or not cpu_has_bf16_matmul()):
        return torch.float32
    return torch.float16 if method == "gram" else torch.bfloat16


def flops(method: str, rows: int, cols: int, coefficients: Triples, dtype: torch.dtype, device: torch.device) -> int:
    """Count the floating point operations that an orthogonalization method needs for one rows x cols matrix. Only
    matrix products are counted, as in the tables published with Gram Newton-Schulz.

    For an m x n matrix with m <= n and k quintic steps on an accelerator, the count is 4 k m^2 n + 2 k m^3 for
    "standard". For "gram" without restarts (recomputations of the Gram matrix), it is 4 m^2 n + (8 k - 6) m^3.

    Args:
        method: "standard" or "gram"; other methods are counted as "standard".
        dtype: Dtype of the products, which determines how often "gram" restarts.
        device: Device of the products. CPUs compute symmetric products in row blocks, so only 10/16 of each symmetric
            product is counted.
    """
    m, n = min(rows, cols), max(rows, cols)
    steps, symmetric_share = len(coefficients), 0.625 if device.type == "cpu" else 1.0
    # number of steps that compute A A, the square of the Gram matrix; cubic steps do not
    squares = sum(c != 0.0 for _, _, c in coefficients)
    # FLOPs of X X^T plus those of a square matrix times X
    twice: float = 2 * m * m * n * (1.0 + symmetric_share)
    small: float = 2 * m**3
    if method != "gram":
        return round(steps * twice + squares * small * symmetric_share)
    restarts = len(_plan_restarts(coefficients, dtype))
    # In the Gram form, each segment between restarts (recomputations of the Gram matrix R) computes one product for the
    # matrix Q in every step except the first, and two products for the matrix R in every step except the last.
    of_small = (squares + 3 * (steps - restarts - 1)) * small * symmetric_share
    if _restarts_locally(m, n, coefficients, dtype):
        # Each local restart (which recomputes the Gram matrix R without X) takes five more products: four in
        # `Products.sandwich`, and one that combines the matrices Q before and after the restart.
        return round(twice + of_small + restarts * 5 * small)
    return round((1 + restarts) * twice + of_small)


def orthogonalize(
    x: Tensor,  # (B, m, n), any float dtype; not changed unless `overwrite` is True
    coefficients: Triples,
    *,
    method: str = "standard",
    dtype: torch.dtype | None = None,
    watch: FiniteWatch | None = None,
    overwrite: bool = False,
    unit: bool = False,
) -> Tensor:  # same shape as `x`
    """Orthogonalize matrices of one shape. The bits of a result do not depend on the other matrices ([Note: equal bits
    in batches]).

    Args:
        x: The matrices, wide or tall.
        coefficients: One (a, b, c) per Newton-Schulz step.
        method: A key of `ITERATIONS`, or "torch".
        dtype: Dtype of the products. Default: see `products_dtype`. Method "torch" ignores this argument.
        watch: Object that replaces non-finite results of finite matrices with zeros and reports them. Used only by
            method "gram". Default: non-finite results are returned unchanged.
        overwrite: True if results may be written to the memory of `x`, because the caller no longer needs it.
        unit: True if each matrix already has Frobenius norm 1 (or 0). The matrices are then not normalized.

    Returns:
        The orthogonalized matrices, in the dtype of the products, or in the dtype of `x` if they were written to its
        memory. Except for method "torch", results do not depend on torch's global precision flags.

    Raises:
        ValueError: The method is "gram" and the products are in bf16.
    """
    device, (rows, cols) = x.device, x.shape[-2:]
    with exact_products(device, flags=method != "torch"):
        if method == "torch":
            return torch.stack([_torch_muon(matrix, coefficients) for matrix in x])
        # `products_dtype` raises ValueError if "gram" does not support `dtype`
        if dtype is None or (method == "gram" and dtype not in _MOST_SLOPE):
            dtype = products_dtype(method, dtype, device)
        size = batch_size(rows, cols, device)
        shape = (rows, cols) if size == 1 else (size, rows, cols)
        products = Products(shape, device, dtype)
        many, watch = len(x) > size, watch if method == "gram" else None
        out = empty_batch(x.shape, dtype, device) if many and (watch is not None or not overwrite) else x
        for part, place in zip(x.split(size), out.split(size), strict=True):
            found = ITERATIONS[method](
                _operands(part, shape, products, unit), coefficients=coefficients, products=products
            )
            found = found.view(size, rows, cols).narrow(0, 0, len(part))
            if many:
                foreach_copy_([place], [found])
            else:
                out = found.to(dtype)
            del found  # free the result's memory before the next batch
        return out if watch is None else watch.keep_finite(out, x, f"method={method!r} on {rows}x{cols}")


def _operands(
    x: Tensor,  # (k, m, n), where k is at most the batch size
    shape: Sequence[int],  # (B, m, n), or (m, n) for single matrices
    products: Products,
    unit: bool,  # True if every matrix already has norm 1 (or 0)
) -> Tensor:  # (B, m, n) or (m, n); each matrix starts at a multiple of 64 bytes
    """Prepare the matrices of a batch for multiplication: divide each by its Frobenius norm, and round it to the dtype
    of the products. If there are fewer matrices than the batch size, add zero matrices. If nothing needs to be changed,
    return the matrices without a copy."""
    missing = 0 if len(shape) == 2 else shape[0] - len(x)
    if unit and not missing and x.dtype == products.dtype == products.operands and _lies_in_slots(x):
        return x.view(shape) if len(shape) == 2 else x
    y = empty_batch(shape, products.operands, x.device)
    filled = y.narrow(0, 0, len(x)) if len(shape) == 3 else y.unsqueeze(0)
    if unit:
        foreach_copy_([filled], [x])
    else:
        _normalize(x, filled)
    if missing:
        y.narrow(0, len(x), missing).zero_()
    return y if products.operands == products.dtype else products.rounded_(y)


# ------------------------------------------------------------------------------------------ results that are not finite


class FiniteWatch:
    """Guard against non-finite results of the orthogonalization. It replaces them with zeros, and warns about them one
    or more steps later. Each optimizer has one instance."""

    def __init__(self) -> None:
        # Flags that show which matrices are finite. Each call of `keep_finite` in the current step adds a tuple:
        # (method and shape, flags of the orthogonalization's results, flags of its inputs). Each matrix has one flag,
        # which is 0 if the matrix is finite and NaN otherwise.
        self.seen: list[tuple[str, Tensor, Tensor]] = []
        self.coming = Coming[list[tuple[str, int]]]()

    def keep_finite(
        self,
        out: Tensor,  # (B, m, n), the results of the orthogonalization; changed in place
        x: Tensor,  # (B, m, n), the inputs of the orthogonalization
        text: str,  # method and shape, for use in a warning about replaced results
    ) -> Tensor:  # returns `out`
        """Overwrite each non-finite result of the orthogonalization with zeros if the corresponding input matrix is
        finite, without waiting for an accelerator."""
        spoiled = _zero_or_nan(out.sum(dim=(-2, -1), keepdim=True, dtype=torch.float32))
        # On a CPU, return early if all results are finite. On other devices, this check would make the host wait.
        if x.device.type == "cpu" and not bool(spoiled.isnan().any()):
            return out
        given = _zero_or_nan(torch.linalg.vector_norm(x, torch.inf, dim=(-2, -1), keepdim=True))
        self.seen.append((text, spoiled, given))
        return torch.where(spoiled == 0, out, given.to(out.dtype), out=out)

    def send(self) -> None:
        """Start an asynchronous copy of this step's flags to the host. Each flag says whether the result for one matrix
        was replaced with zeros. This method must be called at the end of each step."""
        seen, self.seen = self.seen, []
        # replays of a CUDA graph do not run this code, so they cannot report flags
        if not seen or is_capturing(seen[0][1].device):
            return
        spoiled = torch.cat([s.flatten() for _, s, _ in seen])
        given = torch.cat([g.flatten() for _, _, g in seen])
        replaced = spoiled.isnan().logical_and_(given == 0)
        self.coming.send([(text, len(s)) for text, s, _ in seen], replaced)

    def report(self) -> None:
        """Warn about non-finite results that were replaced with zeros in earlier steps, if the flags of these steps
        have reached the host."""
        for seen, replaced in self.coming.arrived():
            for (text, count), flags in zip(seen, replaced.split([n for _, n in seen]), strict=True):
                if flags.any():
                    warnings.warn(
                        f"{text} gave a non-finite result for {int(flags.sum())} of {count} finite matrices in an "
                        "earlier step; they took no update in it",
                        stacklevel=2,
                    )


def _zero_or_nan(x: Tensor) -> Tensor:
    """Return 0 for each finite element, otherwise NaN."""
    return x - x
