"""The quintic Newton-Schulz iteration, and the normalization before any rounding to a lower precision."""

from __future__ import annotations

import torch
from torch import Tensor

from shardmuon._torch import foreach_copy_, foreach_norm
from shardmuon.orthogonalize.products import Products
from shardmuon.orthogonalize.schedules import Triples
from shardmuon.orthogonalize.slots import empty_batch, lies_in_slots

# A norm within these bounds was summed without loss: the squares that underflow in fp32 are below 2^-126 each, so 2^36
# of them are below 2^-30 of a squared norm above 2^-60, less than fp32 can tell. 2^80 is far from where sums overflow.
_LOW, _HIGH = 2.0**-30, 2.0**40
_LEAST = 2.0**-1000  # below the norm of any matrix of fp32 numbers but zeros
_CHUNK = 1 << 14  # elements; torch sums fewer than 2^15 on one thread, so no bit depends on the number of threads


def normalize(
    x: Tensor,  # (B, m, n), any float dtype and strides, not written to
    dtype: torch.dtype | None = None,  # of the result; default: fp32 (fp64 of fp64)
) -> Tensor:  # (B, m, n), each matrix row-major and aligned, see slots.py
    """Divide each matrix by its Frobenius norm. Exact at any scale that the dtype can hold; zeros stay zeros.

    [Note: the norm at any scale]
        Squares of entries near 1e-30 or 1e30 underflow or overflow fp32 (and casting to fp16 first, as one peer does,
        loses entries below 1e-7 altogether). On CPUs the plain fp32 norm tells whether that may have happened; only
        then are the matrices first divided by the power of two next to their largest entry, which changes no bit of
        a result that was right without it. CUDA sums in fp64, whose range holds every square of an fp32 number, so
        nothing waits for the device to say which way to take. Elsewhere the power of two is always divided out.

    [Note: the order of a norm]
        Elements are summed in the row-major order of the whole matrix, in chunks of 2^14 whose norms are combined in
        fp64. So a norm has the same bits in any slot, beside any neighbours and with any number of threads; and it is
        exact to 1e-7 where one fp32 sum over 2048 x 8192 elements is off by 6e-4. (CUDA's list operation sums fp32 and
        narrower numbers in fp64, in chunks of its own.)

    An entry that is not finite makes its whole matrix NaN.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    out = empty_batch(x.shape, dtype or wide, x.device)
    normalize_into(out, x)
    return out


def normalize_into(
    out: Tensor,  # (B, m, n), in slots; overwritten
    x: Tensor,  # (B, m, n), not written to
) -> None:
    """`normalize` into memory that there is."""
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
    if x.shape[-2] * x.shape[-1] <= _CHUNK:
        if x.stride(-1) != 1 or x.stride(-2) != x.shape[-1]:  # a matrix is not row-major, or has gaps
            x = x.contiguous()
        if x.device.type == "cpu":  # a CPU reduces row by row; others share rows out by their number
            norms: Tensor = torch.linalg.vector_norm(x.flatten(1), dim=1, dtype=wide)
            return norms.view(-1, 1, 1)
        found = foreach_norm(x.unbind(0), 2, wide)
        return (torch.stack(found) if len(found) > 1 else found[0]).view(-1, 1, 1)
    return torch.stack([_norm_by_chunks(matrix.reshape(-1), wide) for matrix in x.unbind(0)]).view(-1, 1, 1)


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
    # Where the norm is 0 any finite factor will do; where it is infinite the whole matrix becomes NaN.
    factor = norm.nan_to_num_(nan=torch.nan, posinf=torch.nan).clamp_(min=_LEAST).reciprocal_()
    torch.mul(x, factor, out=out)  # in fp64, rounded once


def started(
    x: Tensor,  # (k, m, n), k <= size
    size: int,
    products: Products,
    unit: bool,  # every norm is 1 (or 0) already
) -> Tensor:  # (size, m, n) in slots; (m, n) if size is 1 and the kernel takes matrices
    """Operands of a batch: X / ||X||_F, rounded to the products' dtype, and zeros in the slots that are left.

    A whole batch that is all this already is not copied.
    """
    y = x
    as_it_is = unit and len(x) == size and x.dtype == products.dtype == products.operands and lies_in_slots(x)
    if not as_it_is:
        y = empty_batch((size, *x.shape[-2:]), products.operands, x.device)
        filled = y if len(x) == size else y.narrow(0, 0, len(x))
        if unit:
            foreach_copy_([filled], [x])
        else:
            normalize_into(filled, x)
        if len(x) < size:
            y.narrow(0, len(x), size - len(x)).zero_()
        if products.operands != products.dtype:
            y = products.rounded_(y)
    return y.squeeze(0) if size == 1 and products.kernel == "torch" else y


def newton_schulz(
    y: Tensor,  # (B, m, n) in slots, or (m, n): norm 1, operands of `products`
    coefficients: Triples,
    products: Products,
) -> Tensor:  # of its shape, operands
    """X <- a X + (b A + c A A) X with A = X X^T, once per (a, b, c); X <- a X + X (b A + c A A) with A = X^T X if tall.

    The iteration of torch.optim.Muon and of Keller Jordan's Muon (https://kellerjordan.github.io/posts/muon/). a X is
    added in the product: folded into the polynomial's diagonal, a is rounded with it, which costs 1.4 to 1.9 times the
    error in fp32 and up to 1.9 times in bf16, where torch's products round it twice (ADR 23).
    """
    rows, cols = y.shape[-2:]
    tall, short = rows > cols, min(rows, cols)
    # accelerators' allocators hand memory on by themselves
    made = [empty_batch(y.shape, y.dtype, y.device) for _ in range(2)] if y.device.type == "cpu" else []
    poly = empty_batch((*y.shape[:-2], short, short), y.dtype, y.device) if made else None
    for step, (a, b, c) in enumerate(coefficients):
        result = made[step % 2] if made else None
        room = None if result is None or poly is None else result.as_strided(poly.shape, poly.stride())
        left, right = (y.mT, y) if tall else (y, y.mT)
        if c == 0.0:  # a cubic step needs no A A
            factor, alpha = products.multiply(None, left, right, symmetric=True, out=poly), b
        else:  # A lies where the result will, which is written when A is not needed any more
            gram = products.multiply(None, left, right, symmetric=True, out=room)
            factor, alpha = products.multiply(gram, gram, gram, b, c, symmetric=True, out=poly), 1.0
        left, right = (y, factor) if tall else (factor, y)
        y = products.multiply(y, left, right, a, alpha, out=result)
    return y
