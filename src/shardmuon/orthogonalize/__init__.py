"""Orthogonalizers behind one function, `orthogonalize`: (B, m, n) -> (B, m, n); what it is made of stands before it.

[Note: equal bits in batches]
    torch's batched products are not batch-invariant by themselves. BLAS sums in another order where memory is not
    aligned, `bmm` and `mm` differ below 400 multiplications, and a library may choose its kernel by the number of
    matrices. So a batch has a size fixed by shape and kind of device, the last one is filled up with zeros, and every
    operand, result and scratch of a batch begins at a multiple of 64 bytes in each slot. A shape whose size is 1 always
    takes the 2-D products. Measured on an AVX2 CPU: 0 of 54,912 products in aligned slots differ, over 26 shapes,
    batches of 1 to 32 and four dtypes; packed ones differ in fp32 and fp64. `shardmuon.testing.slots` searches for a
    difference, on any device.

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
    four times AVX512's bf16 rate. Accelerators take the whole product: many small calls cost more than they save.

[Note: the norm at any scale]
    Squares of entries near 1e-30 or 1e30 underflow or overflow fp32 (and casting to fp16 first, as one peer does,
    loses entries below 1e-7 altogether). On CPUs the plain fp32 norm tells whether that may have happened; only then
    are the matrices first divided by the power of two next to their largest entry, which changes no bit of a result
    that was right without it. CUDA sums in fp64, whose range holds every square of an fp32 number, so nothing waits for
    the device to say which way to take. Elsewhere the power of two is always divided out.

[Note: the order of a norm]
    Elements are summed in the row-major order of the whole matrix, in chunks of 2^14 whose norms are combined in fp64.
    So a norm has the same bits in any slot, beside any neighbours and with any number of threads; and it is exact to
    1e-7 where one fp32 sum over 2048 x 8192 elements is off by 6e-4. (CUDA's list operation sums fp32 and narrower
    numbers in fp64, in chunks of its own.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from shardmuon._torch import (
    cpu_has_amx,
    cpu_has_bf16_matmul,
    exact_products,
    foreach_copy_,
    foreach_norm,
    mm_to_fp32,
)
from shardmuon.orthogonalize.gram import FiniteWatch, restarts_locally, segments
from shardmuon.orthogonalize.schedules import Triples

MethodName = Literal["auto", "standard", "gram", "torch"]

# ----------------------------------------------------------------------------------------------------------- batches

_ALIGNMENT = 64  # bytes

# Multiplications in a Newton-Schulz step of a whole batch on a CPU. Measured in fp32, AVX2: 64 matrices of 16 x 32 take
# a ninth, of 32 x 64 a third, of 64 x 64 two thirds of the time that they take alone; a single one takes 2.6 to 3.5
# times as long in its padded batch (0.7 to 1 ms). Batches of two gain nothing.
_CPU_WORK = 1 << 22
_CPU_LEAST, _LARGEST = 4, 64
# Elements of Gram matrices that fill an accelerator once (130 processors with a tile of 128 x 128 each): a batch of
# them takes hardly longer than one matrix. Times 1.5, so that rounding down to a power of two gives the nearest one.
_ACCELERATOR_FULL = 3 << 20


def batch_size(rows: int, cols: int, device: torch.device) -> int:
    """Number of matrices of a shape that are orthogonalized together on a kind of device; a power of two."""
    short, long = min(rows, cols), max(rows, cols)
    wanted = _ACCELERATOR_FULL // (short * short)
    if device.type == "cpu":
        wanted = _CPU_WORK // (short * short * (2 * long + short))
        wanted = 1 if wanted < _CPU_LEAST else wanted
    return 1 << max(0, min(wanted, _LARGEST).bit_length() - 1)


def empty_batch(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for a batch of this shape (B, rows, cols), or for a matrix (rows, cols); not initialized.

    Each matrix is row-major and begins at a multiple of 64 bytes.
    """
    rows, cols = shape[-2:]
    slot = -(-rows * cols * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT // dtype.itemsize
    return torch.empty_strided(tuple(shape), (slot, cols, 1)[-len(shape) :], dtype=dtype, device=device)


def _lies_in_slots(x: Tensor) -> bool:
    """True if a batch (B, rows, cols) in any memory lies as in `empty_batch`."""
    row_major = x.stride()[1:] == (x.shape[2], 1)
    aligned = len(x) == 1 or x.stride(0) * x.element_size() % _ALIGNMENT == 0
    return row_major and aligned and x.data_ptr() % _ALIGNMENT == 0


def _copied(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of a matrix, or of a batch in slots, in a dtype."""
    out = empty_batch(x.shape, dtype, x.device)
    foreach_copy_([out], [x])  # `copy_` needs a device even for tensors without data, on which foresight runs this
    return out


# ---------------------------------------------------------------------------------------------------------- products

_HALVES = (torch.float16, torch.bfloat16)
_SPLIT = 2.0**11  # an fp16 significand has 11 bits: the rest of an fp32 number, times this, is an fp16 number again
_MAX_BLOCKS = 4  # 4 blocks compute 10 of 16 tiles, 8 would compute 36 of 64: little more, in smaller products
# What one thread computes in the time that two blocks cost, see [Note: number of blocks].
_OVERHEAD = {torch.float64: 3e6, torch.float32: 6e6, torch.bfloat16: 30e6}
_OVERHEAD_AMX = 120e6  # bf16


class Products:
    """Products of the matrices of one batch, rounded where the hardware would round, whatever this device's is.

    `mm(left, right, out=)` is left @ right and `addmm(base, left, right, beta=1, alpha=1, out=)` is beta * base + alpha
    * left @ right, of matrices or batches in slots. `symmetric_mm` and `symmetric_addmm` are the same for symmetric
    results (of a symmetric base): half is computed where that is faster, and mirrored. All write to `out`, memory in
    slots that is no operand, and return it. They are torch's own functions unless there is more to do.

    Attributes:
        dtype: The dtype to which every result is rounded: fp64, fp32, fp16 or bf16.
        operands: Dtype of the tensors that are multiplied, see [Note: emulated half precision].
    """

    def __init__(
        self,
        shape: Sequence[int],  # of the batch (B, m, n) or the matrix (m, n), whose short side symmetric results have
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        emulated = device.type == "cpu" and dtype in _HALVES
        emulated = emulated and not (dtype == torch.bfloat16 and cpu_has_bf16_matmul())
        self.dtype, self.operands = dtype, torch.float32 if emulated else dtype
        short, long = sorted(shape[-2:])  # symmetric results have the short side
        may_split = device.type == "cpu" and _row_blocks(short, long, self.operands) > 1
        plain: Sequence[Callable[..., Any]] = (torch.mm, torch.addmm) if len(shape) == 2 else (torch.bmm, torch.baddbmm)
        symmetric = plain
        if may_split or (len(shape) == 3 and shape[0] == 1):
            symmetric = partial(_by_blocks, None), _by_blocks
        if emulated:
            plain, symmetric = ([partial(_then_rounded, f, dtype) for f in pair] for pair in (plain, symmetric))
        self.mm, self.addmm = plain
        self.symmetric_mm, self.symmetric_addmm = symmetric

    def rounded_(self, x: Tensor) -> Tensor:
        """`x`, of the operands' dtype, after rounding to the dtype in place."""
        return x if self.operands == self.dtype else x.copy_(x.to(self.dtype))

    def operand(self, x: Tensor) -> Tensor:
        """`x`, of fp32 or fp64, rounded to the dtype as an operand for the other methods."""
        return x if x.dtype == self.dtype else self.rounded_(_copied(x, self.operands))

    def gram_fp32(
        self,
        x: Tensor,  # (B, m, n)
    ) -> Tensor:  # (B, k, k), k = min(m, n), fp32 (fp64 of fp64)
        """x @ x^T, or x^T @ x where x is tall, not rounded to half precision."""
        if self.operands in _HALVES:
            return mm_to_fp32(*_sides(x))
        found: Tensor = self._unrounded(x).symmetric_mm(*_sides(x), out=square_of(x))
        return found

    def sandwich(
        self,
        factor: Tensor,  # (B, m, m), rounded
        middle: Tensor,  # (B, m, m) symmetric, fp32
    ) -> Tensor:  # (B, m, m)
        """factor @ middle @ factor^T as if in fp32, rounded once at the end.

        Half-precision units get there with two products for one: an fp32 operand is the sum of two half-precision ones.
        """
        if self.operands in _HALVES:
            return self.operand(self._split_product(self._split_product(middle, factor.mT).mT, factor.mT))
        wide = self._unrounded(middle)
        half_way = wide.mm(factor, middle, out=square_of(middle))
        return self.operand(wide.symmetric_mm(half_way, factor.mT, out=square_of(middle)))

    def _unrounded(self, x: Tensor) -> Products:
        """Products of operands shaped like `x` whose results are not rounded any further."""
        return Products(x.shape, x.device, self.operands)

    def _split_product(self, wide: Tensor, factor: Tensor) -> Tensor:
        """wide (fp32) @ factor, in fp32."""
        high = _copied(wide, self.dtype)
        low = _copied((wide - high.float()).mul_(_SPLIT), self.dtype)
        return mm_to_fp32(high, factor).add_(mm_to_fp32(low, factor), alpha=1.0 / _SPLIT)


def _sides(x: Tensor) -> tuple[Tensor, Tensor]:
    """The operands of the Gram matrix of the short side."""
    return (x.mT, x) if x.shape[-2] > x.shape[-1] else (x, x.mT)


def square_of(x: Tensor) -> Tensor:  # (B, m, n) -> (B, k, k), k = min(m, n)
    """Memory in slots for what is square on the short side of `x`; not initialized."""
    side = min(x.shape[-2:])
    return empty_batch((*x.shape[:-2], side, side), x.dtype, x.device)


def _then_rounded(product: Callable[..., Tensor], dtype: torch.dtype, *operands: Tensor, **others: Any) -> Tensor:
    """A product in fp32, rounded in place to a narrower dtype."""
    out = product(*operands, **others)
    return out.copy_(out.to(dtype))


def _row_blocks(rows: int, inner: int, dtype: torch.dtype) -> int:
    """Number of row blocks in which a CPU computes a symmetric product (rows x inner) @ (inner x rows).

    Depends on the shape, the dtype, the kind of CPU and the number of threads, as the bits of any product do.
    """
    amx = dtype == torch.bfloat16 and cpu_has_amx()
    overhead = (_OVERHEAD_AMX if amx else _OVERHEAD.get(dtype, 6e6)) * torch.get_num_threads()
    return max(1, min(_MAX_BLOCKS, math.isqrt(int(2 * rows * rows * inner / overhead))))


def _by_blocks(
    base: Tensor | None,  # (m, m) symmetric, or None for zeros; all may be batches
    left: Tensor,  # (m, k)
    right: Tensor,  # (k, m)
    *,
    beta: float = 1.0,
    alpha: float = 1.0,
    out: Tensor,  # (m, m), written
) -> Tensor:  # `out`
    """`Products.symmetric_addmm`, on CPUs by row blocks. The matrices of a batch go one by one where that is faster, or
    where there is but one."""
    rows = left.shape[-2]
    count = _row_blocks(rows, left.shape[-1], left.dtype) if left.device.type == "cpu" else 1
    if left.dim() == 3 and (count > 1 or len(left) == 1):
        for i in range(len(left)):
            _by_blocks(None if base is None else base[i], left[i], right[i], beta=beta, alpha=alpha, out=out[i])
        return out
    mm, addmm = (torch.bmm, torch.baddbmm) if left.dim() == 3 else (torch.mm, torch.addmm)
    if count == 1:
        return mm(left, right, out=out) if base is None else addmm(base, left, right, beta=beta, alpha=alpha, out=out)
    for i in range(count):
        start, stop = rows * i // count, rows * (i + 1) // count
        block, columns, target = left[start:stop], right[:, :stop], out[start:stop, :stop]
        if base is None:
            mm(block, columns, out=target)
        else:
            addmm(base[start:stop, :stop], block, columns, beta=beta, alpha=alpha, out=target)
        if start:
            out[:start, start:stop] = target[:, :start].T
    return out


# ----------------------------------------------------------------------------------------------------- normalization

# A norm within these bounds was summed without loss: the squares that underflow in fp32 are below 2^-126 each, so 2^36
# of them are below 2^-30 of a squared norm above 2^-60, less than fp32 can tell. 2^80 is far from where sums overflow.
_LOW, _HIGH = 2.0**-30, 2.0**40
_LEAST = 2.0**-1000  # below the norm of any matrix of fp32 numbers but zeros
_CHUNK = 1 << 14  # elements; torch sums fewer than 2^15 on one thread, so no bit depends on the number of threads


def normalize(
    x: Tensor,  # (B, m, n), any float dtype and strides, not written to
    dtype: torch.dtype | None = None,  # of the result; default: fp32 (fp64 of fp64)
) -> Tensor:  # (B, m, n), in slots
    """Divide each matrix by its Frobenius norm. Exact at any scale that the dtype can hold; zeros stay zeros. An entry
    that is not finite makes its whole matrix NaN."""
    out = empty_batch(x.shape, dtype or torch.promote_types(x.dtype, torch.float32), x.device)
    normalize_into(out, x)
    return out


def normalize_into(
    out: Tensor,  # (B, m, n), in slots; overwritten
    x: Tensor,  # (B, m, n), not written to unless it is `out`
) -> None:
    """`normalize` into memory that there is. See [Note: the norm at any scale]."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    if x.is_cuda and wide == torch.float32:
        _normalize_in_fp64(out, x)
        return
    norm = _norms(x, wide)
    if x.device.type != "cpu" or not (float(norm.min()) > _LOW and float(norm.max()) < _HIGH):
        x = _near_one(x.to(wide))
        norm = _norms(x, wide)
        norm = torch.where(norm == 0, 1.0, norm + (norm - norm))  # inf - inf: NaN
    if len(x) == 1:  # a 0-dim divisor leaves bf16 as it is: divided in fp32, rounded once, without a copy in fp32
        torch.div(x if x.dtype == out.dtype else x.to(wide), norm.view(()), out=out)
    else:
        torch.div(x.to(wide), norm, out=out)


def _norms(x: Tensor, wide: torch.dtype) -> Tensor:  # (B, 1, 1)
    """Frobenius norms, see [Note: the order of a norm]."""
    if x.shape[-2] * x.shape[-1] > _CHUNK:
        return torch.stack([_norm_by_chunks(matrix.reshape(-1), wide) for matrix in x.unbind(0)]).view(-1, 1, 1)
    if x.stride(-1) != 1 or x.stride(-2) != x.shape[-1]:  # a matrix is not row-major, or has gaps
        x = x.contiguous()
    if x.device.type == "cpu":  # a CPU reduces row by row; others share rows out by their number
        norms: Tensor = torch.linalg.vector_norm(x.flatten(1), dim=1, dtype=wide)
        return norms.view(-1, 1, 1)
    return torch.stack(foreach_norm(x.unbind(0), 2, wide)).view(-1, 1, 1)


def _norm_by_chunks(flat: Tensor, wide: torch.dtype) -> Tensor:  # 0-dim
    whole = flat.numel() // _CHUNK * _CHUNK
    parts = torch.linalg.vector_norm(flat[:whole].view(-1, _CHUNK), dim=1, dtype=wide)
    if whole < flat.numel():
        parts = torch.cat([parts, torch.linalg.vector_norm(flat[whole:], dtype=wide).view(1)])
    norm: Tensor = torch.linalg.vector_norm(parts, dtype=torch.float64)
    return norm.to(wide)


def _near_one(x: Tensor) -> Tensor:
    """Each matrix times a power of two, such that its largest entry is in [1/2, 1)."""
    _, exponent = torch.frexp(x.abs().amax(dim=(-2, -1), keepdim=True))
    half = exponent // 2  # in two factors: one alone may be out of range
    return (x * torch.exp2((-half).to(x.dtype))).mul_(torch.exp2((half - exponent).to(x.dtype)))


def _normalize_in_fp64(out: Tensor, x: Tensor) -> None:
    """`normalize_into` in two passes without a look at the result: fp64 holds the square of every fp32 number."""
    # `vector_norm` would first make a copy in fp64: four times a bf16 matrix, and nine times the memory traffic.
    norms = foreach_norm(x.unbind(0), 2)
    norm = (torch.stack(norms) if len(x) > 1 else norms[0]).view(-1, 1, 1)
    torch.mul(x, _reciprocal(norm), out=out)  # in fp64, rounded once


def _reciprocal(norm: Tensor) -> Tensor:  # fp64, overwritten
    """1 / norm. Where it is 0 any finite factor will do; where it is infinite the whole matrix becomes NaN."""
    return norm.nan_to_num_(nan=torch.nan, posinf=torch.nan).clamp_(min=_LEAST).reciprocal_()


# -------------------------------------------------------------------------------------------------------- iterations

# A function of matrices of norm 1 (B, m, n) in slots, or (m, n), operands of `products`; zeros among them stay zeros.
# It must not write into its input nor mix matrices, and never waits for the device: a CUDA graph can hold it. Called as
# iteration(y, coefficients=.., products=..).
Iteration = Callable[..., Tensor]


def _newton_schulz(
    y: Tensor,  # (B, m, n) in slots, or (m, n): norm 1, operands of `products`
    coefficients: Triples,
    products: Products,
) -> Tensor:  # of its shape, operands
    """X <- a X + (b A + c A A) X with A = X X^T, once per (a, b, c); X <- a X + X (b A + c A A) with A = X^T X if tall.

    The iteration of torch.optim.Muon and of Keller Jordan's Muon (https://kellerjordan.github.io/posts/muon/). a X is
    added in the product: folded into the polynomial's diagonal, a is rounded with it, which costs 1.4 to 1.9 times the
    error in fp32 and up to 1.9 times in bf16, where torch's products round it twice (ADR 23).
    """
    tall = y.shape[-2] > y.shape[-1]
    poly = square_of(y)
    made: list[tuple[Tensor, Tensor]] = []
    for _ in range(2):
        out = torch.empty_strided(y.shape, y.stride(), dtype=y.dtype, device=y.device)
        # A lies where the result will, which is written when A is not needed any more
        made.append((out, out.as_strided(poly.shape, poly.stride())))
    for step, (a, b, c) in enumerate(coefficients):
        out, gram = made[step % 2]
        left, right = _sides(y)
        if c == 0.0:  # a cubic step needs no A A
            factor, alpha = products.symmetric_mm(left, right, out=poly), b
        else:
            products.symmetric_mm(left, right, out=gram)
            factor, alpha = products.symmetric_addmm(gram, gram, gram, beta=b, alpha=c, out=poly), 1.0
        left, right = (y, factor) if tall else (factor, y)
        y = products.addmm(y, left, right, beta=a, alpha=alpha, out=out)
    return y


def _gram_newton_schulz(
    y: Tensor,  # (B, m, n) in slots, or (m, n): norm 1, operands of `products`
    coefficients: Triples,
    products: Products,
) -> Tensor:  # of its shape, operands
    """The steps of `_newton_schulz`, iterated on the Gram matrix of the short side: see gram.py.

    Raises:
        ValueError: Products in bf16.
    """
    (short, long), tall = sorted(y.shape[-2:]), y.shape[-2] > y.shape[-1]
    first, *others = segments(coefficients, products.dtype)
    if restarts_locally(short, long, coefficients, products.dtype):
        factor = _restarted(products.gram_fp32(y), first, others[0], products)
        return _times(products, factor.mT if tall else factor, y, tall)
    for segment in (first, *others):
        gram = products.symmetric_mm(*_sides(y), out=square_of(y))
        y = _times(products, factor_of(gram, segment, products), y, tall)
    return y


def _restarted(wide: Tensor, first: Triples, second: Triples, products: Products) -> Tensor:  # (B, m, m)
    """Q after both segments, for X X^T = wide. A product of two Q is symmetric but for rounding: the tall form takes
    its transpose, as (Q X)^T = X^T Q^T."""
    before = factor_of(products.operand(wide), first, products)
    after = factor_of(products.sandwich(before, wide), second, products)
    found: Tensor = products.mm(after, before, out=square_of(before))
    return found


def _times(products: Products, factor: Tensor, y: Tensor, tall: bool) -> Tensor:
    """Q X; X Q where X is tall."""
    left, right = (y, factor) if tall else (factor, y)
    found: Tensor = products.mm(left, right, out=empty_batch(y.shape, y.dtype, y.device))
    return found


def factor_of(
    gram: Tensor,  # (B, m, m) symmetric, trace 1 or 0
    coefficients: Triples,
    products: Products,
) -> Tensor:  # (B, m, m)
    """Q such that Q X is X after all steps, for X X^T = gram."""
    factor: Tensor | None = None
    for step, (a, b, c) in enumerate(coefficients):
        # a is kept out of the polynomial: the sum would be rounded at the size of a, not of what is added to it.
        if c == 0.0:
            poly = products.operand(torch.mul(gram, b, out=square_of(gram)))
        else:
            poly = products.symmetric_addmm(gram, gram, gram, beta=b, alpha=c, out=square_of(gram))
        if step + 1 < len(coefficients):  # (a I + poly) gram (a I + poly)
            half = products.symmetric_addmm(gram, gram, poly, beta=a, out=square_of(gram))
            gram = products.symmetric_addmm(half, poly, half, beta=a, out=square_of(gram))
        if factor is None:
            factor = _copied(poly, poly.dtype)
            factor.diagonal(dim1=-2, dim2=-1).add_(a)
            factor = products.rounded_(factor)
        else:
            factor = products.symmetric_addmm(factor, factor, poly, beta=a, out=square_of(gram))
    assert factor is not None, "a schedule has at least one step"
    return factor


TORCH_EPS = 1e-7  # least norm that torch.optim.Muon divides by, by default


def _torch_muon(matrix: Tensor, coefficients: Triples) -> Tensor:  # bf16
    """The arithmetic of `torch.optim.Muon` (torch 2.9 .. 2.13), operation for operation: cast to bf16, then normalize.

    Differs in one point: torch normalizes the momentum buffer itself in place when parameters are bf16 and nesterov is
    False (`.bfloat16()` of a bf16 tensor is the same tensor). Here nothing is written into the matrix.
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

ITERATIONS: dict[str, Iteration] = {"standard": _newton_schulz, "gram": _gram_newton_schulz}


def default_dtype(method: str, device: torch.device) -> torch.dtype:
    """Dtype of the products when the user names none.

    "standard": bfloat16, as torch.optim.Muon, wherever the device multiplies it in hardware; float32 on CPUs that only
    emulate it (10 to 80 times slower there). "gram": float16 on accelerators (bf16 is not precise enough for it),
    float32 on CPUs.
    """
    if method == "torch":
        return torch.bfloat16
    if device.type == "cpu" and (method == "gram" or not cpu_has_bf16_matmul()):
        return torch.float32
    return torch.float16 if method == "gram" else torch.bfloat16


def orthogonalize(
    x: Tensor,  # (B, m, n), any float dtype, not written to unless `overwrite`
    coefficients: Triples,
    *,
    method: str = "standard",
    dtype: torch.dtype | None = None,
    watch: FiniteWatch | None = None,
    overwrite: bool = False,
    unit: bool = False,
) -> Tensor:  # (B, m, n)
    """Orthogonalize matrices of one shape. A matrix has the same bits beside any others: [Note: equal bits in batches].

    Args:
        x: The matrices, wide or tall.
        coefficients: One (a, b, c) per Newton-Schulz step.
        method: A key of `ITERATIONS`, or "torch".
        dtype: Dtype of the products. Default: `default_dtype`. Ignored by "torch".
        watch: Puts zeros in place of a non-finite "gram" result of a finite matrix. Default: it stays.
        overwrite: The caller does not need `x` any more: results may take its place.
        unit: The Frobenius norm of each matrix is 1 (or 0) already and is not divided by again.

    Returns:
        The result in the products' dtype (in that of `x` if it took its place). It depends on no global flag of torch
        (but "torch" does, as torch's).

    Raises:
        ValueError: "gram" with products in bf16.
    """
    device, (rows, cols) = x.device, x.shape[-2:]
    with exact_products(device, flags=method != "torch"):
        if method == "torch":
            return torch.stack([_torch_muon(matrix, coefficients) for matrix in x])
        dtype = dtype or default_dtype(method, device)
        watch = watch if method == "gram" else None
        size = batch_size(rows, cols, device)
        shape = (rows, cols) if size == 1 else (size, rows, cols)
        products = Products(shape, device, dtype)
        run: Callable[[Tensor], Tensor] = partial(ITERATIONS[method], coefficients=coefficients, products=products)
        many = len(x) > size
        out = empty_batch(x.shape, dtype, device) if many and (watch is not None or not overwrite) else x
        for part, place in zip(x.split(size), out.split(size), strict=True):
            found = run(_operands(part, shape, products, unit)).view(size, rows, cols).narrow(0, 0, len(part))
            if many:  # once, to where it stays; no `copy_`: it costs more on tensors without data, to price plans by
                foreach_copy_([place], [found])
            else:
                out = found.to(dtype)
            del found  # the next batch needs room
        return out if watch is None else watch.keep_finite(out, x, f"method={method!r} on {rows}x{cols}")


def _operands(
    x: Tensor,  # (k, m, n), k <= B
    shape: Sequence[int],  # of a batch
    products: Products,
    unit: bool,  # every norm is 1 (or 0) already
) -> Tensor:  # (B, m, n) in slots, or (m, n)
    """Operands of a batch: X / ||X||_F, rounded to the products' dtype, and zeros in the slots that are left.

    A whole batch that is all this already is not copied.
    """
    missing = 0 if len(shape) == 2 else shape[0] - len(x)
    if unit and not missing and x.dtype == products.dtype == products.operands and _lies_in_slots(x):
        return x.view(shape) if len(shape) == 2 else x
    y = empty_batch(shape, products.operands, x.device)
    filled = y.narrow(0, 0, len(x)) if len(shape) == 3 else y.unsqueeze(0)
    if unit:
        foreach_copy_([filled], [x])
    else:
        normalize_into(filled, x)
    if missing:
        y.narrow(0, len(x), missing).zero_()
    return y if products.operands == products.dtype else products.rounded_(y)
