"""The quintic Newton-Schulz iteration on batches, normalized in fp32 before any rounding to a lower precision."""

from __future__ import annotations

import torch
from torch import Tensor

from shardmuon._torch import foreach_norm
from shardmuon.orthogonalize.products import Products
from shardmuon.orthogonalize.schedules import Triples

# A norm within these bounds was summed without loss: the squares that underflow in fp32 are below 2^-126 each, so 2^36
# of them are below 2^-30 of a squared norm above 2^-60, less than fp32 can tell. 2^80 is far from where sums overflow.
_LOW, _HIGH = 2.0**-30, 2.0**40
_LEAST = 2.0**-1000  # below the norm of any matrix of fp32 numbers but zeros


def normalize(
    x: Tensor,  # (B, m, n), any float dtype and strides, not written to
    dtype: torch.dtype | None = None,  # of the result; default: fp32 (fp64 of fp64)
) -> Tensor:  # (B, m, n), contiguous; a new tensor
    """Divide each matrix by its Frobenius norm. Exact at any scale that the dtype can hold; zeros stay zeros.

    [Note: the norm at any scale]
        Squares of entries near 1e-30 or 1e30 underflow or overflow fp32 (and casting to fp16 first, as one peer does,
        loses entries below 1e-7 altogether). On CPUs the plain fp32 norm tells whether that may have happened; only
        then are the matrices first divided by the power of two next to their largest entry, which changes no bit of
        a result that was right without it. CUDA sums in fp64, whose range holds every square of an fp32 number, so
        nothing waits for the device to say which way to take. Elsewhere the power of two is always divided out.

    An entry that is not finite makes its whole matrix NaN.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    dtype = dtype or wide
    if x.is_cuda and wide == torch.float32:
        return normalize_in_fp64(x, dtype)
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=wide)
    if x.device.type != "cpu" or not _all_within(norm):
        x = _near_one(x.to(wide))
        norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
        norm = torch.where(norm == 0, 1.0, norm + (norm - norm))  # inf - inf: NaN
    if len(x) == 1:
        # A 0-dim divisor leaves bf16 as it is: computed in fp32, rounded once.
        x, norm = x if x.dtype == dtype else x.to(wide), norm.view(())
    unit: Tensor = x / norm
    return unit.to(dtype).contiguous()


def _all_within(norm: Tensor) -> bool:
    if norm.numel() == 1:
        return _LOW < float(norm) < _HIGH
    return bool(((norm > _LOW) & (norm < _HIGH)).all())


def _near_one(x: Tensor) -> Tensor:
    """Each matrix times a power of two, such that its largest entry is in [1/2, 1)."""
    _, exponent = torch.frexp(x.abs().amax(dim=(-2, -1), keepdim=True))
    half = exponent // 2  # in two factors: one alone may be out of range
    return (x * torch.exp2((-half).to(x.dtype))).mul_(torch.exp2((half - exponent).to(x.dtype)))


def normalize_in_fp64(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`normalize` in two passes without a look at the result: fp64 holds the square of every fp32 number."""
    # `vector_norm` would first make a copy in fp64: four times a bf16 matrix, and nine times the memory traffic.
    norms = foreach_norm(x.unbind(0), 2)
    norm = (torch.stack(norms) if len(x) > 1 else norms[0]).view(-1, 1, 1)
    # Where the norm is 0 any finite factor will do; where it is infinite the whole matrix becomes NaN.
    factor = norm.nan_to_num_(nan=torch.nan, posinf=torch.nan).clamp_(min=_LEAST).reciprocal_()
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    torch.mul(x, factor, out=out)  # in fp64, rounded once
    return out


def started(x: Tensor, products: Products) -> Tensor:  # (B, m, n) -> (B, m, n), contiguous operands
    """X / ||X||_F, rounded to the products' dtype; X itself, rounded, where that norm is 1 already."""
    if products.unit:
        y = products.round(x.to(products.operands).contiguous())
        # A CPU's products may sum in another order where memory is not aligned as new memory is: in a batch.
        return y.clone() if y.data_ptr() % 64 else y
    return products.round(normalize(x, products.operands))


def newton_schulz(
    x: Tensor,  # (B, m, n), m <= n
    coefficients: Triples,
    products: Products,
    *,
    eps: float,
) -> Tensor:  # (B, m, n), the products' dtype
    """X <- a X + (b A + c A A) X with A = X X^T, once per (a, b, c), from X / ||X||_F.

    The iteration of torch.optim.Muon and of Keller Jordan's Muon (https://kellerjordan.github.io/posts/muon/), except
    that the norm is exact (fp32, any scale) where they cast to bf16 first and clamp the norm at eps. `eps` is unused.
    """
    del eps
    y = started(x, products)
    alone = len(y) == 1 and y.device.type == "cpu" and products.kernel != "triton"
    if alone:
        y = y[0]  # once, not in every product
    for a, b, c in coefficients:
        gram = products.symmetric(None, y, y.mT)
        if c == 0.0:  # a cubic step: A A is not needed
            y = products.general(y, gram, y, a, b)
        else:
            poly = products.symmetric(gram, gram, gram, b, c)
            y = products.general(y, poly, y, a)
    y = y.to(products.dtype)
    return y.unsqueeze(0) if alone else y
