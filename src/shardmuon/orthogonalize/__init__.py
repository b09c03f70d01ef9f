"""Orthogonalizers behind one function: (B, m, n) -> (B, m, n). One file a backend; this table names them.

To add a backend: one file with a function of `Backend`'s signature, one row in `BACKENDS`.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from shardmuon._torch import cpu_has_bf16_matmul
from shardmuon.orthogonalize.gram import gram_newton_schulz
from shardmuon.orthogonalize.newton_schulz import newton_schulz
from shardmuon.orthogonalize.reference import polar_factor
from shardmuon.orthogonalize.torch_muon import torch_muon

MethodName = Literal["standard", "gram", "torch", "reference"]
Coefficients = tuple[tuple[float, float, float], ...]


class Backend(Protocol):
    """An orthogonalizer. Must not write into `x`, must not mix matrices of a batch, and maps zeros to zeros."""

    def __call__(
        self,
        x: Tensor,  # (B, m, n), any float dtype
        coefficients: Coefficients,  # one (a, b, c) per step
        *,
        eps: float,
        dtype: torch.dtype,  # of the products
    ) -> Tensor:  # (B, m, n), any float dtype
        """Return the (approximate) polar factor of each matrix."""
        ...


@dataclass(frozen=True, slots=True)
class Method:
    """A backend and how its input must lie.

    Attributes:
        wide: Hand it m <= n, tall matrices transposed (once, while they are unpacked).
        like_torch: Reproduces torch.optim.Muon bit for bit; weights are then updated by torch's own operations too.
    """

    backend: Backend
    wide: bool
    like_torch: bool = False


BACKENDS: dict[str, Method] = {
    "standard": Method(newton_schulz, wide=True),
    "gram": Method(gram_newton_schulz, wide=True),
    "torch": Method(torch_muon, wide=False, like_torch=True),
    "reference": Method(polar_factor, wide=True),
}


def default_dtype(method: str, device: torch.device) -> torch.dtype:
    """Dtype of the products when the user names none.

    bfloat16, as torch.optim.Muon, wherever the device multiplies it in hardware; float32 on CPUs that only emulate it
    (10 to 80 times slower there); float32 for "gram"; float64 for "reference".
    """
    if method == "reference":
        return torch.float64
    if method == "gram":
        return torch.float32
    if method == "standard" and device.type == "cpu" and not cpu_has_bf16_matmul():
        return torch.float32
    return torch.bfloat16


def orthogonalize(
    x: Tensor,  # (B, m, n), any float dtype, not written to
    coefficients: Coefficients,
    *,
    method: str = "standard",
    eps: float = 1e-7,
    dtype: torch.dtype | None = None,
    one_by_one: bool = False,
) -> Tensor:  # (B, m, n)
    """Orthogonalize a batch of matrices of one shape.

    Args:
        x: The batch. Tall matrices are allowed with any method.
        coefficients: One (a, b, c) per Newton-Schulz step.
        method: A key of `BACKENDS`.
        eps: See the backend.
        dtype: Of the products. Default: `default_dtype`.
        one_by_one: Run each matrix by itself, so that its bits do not depend on its neighbours.

    Returns:
        The result in the backend's own dtype.

    Raises:
        ValueError: Unknown method.
    """
    if method not in BACKENDS:
        raise ValueError(f"ns_method={method!r} is not one of {', '.join(map(repr, BACKENDS))}")
    chosen = BACKENDS[method]
    dtype = dtype or default_dtype(method, x.device)
    if chosen.wide and x.shape[-2] > x.shape[-1]:
        turned = x.mT.contiguous()
        return orthogonalize(turned, coefficients, method=method, eps=eps, dtype=dtype, one_by_one=one_by_one).mT
    # A CPU gains nothing from a batch of matrices that fill it one at a time (measured: 5% slower from 128 rows on).
    fills_cpu = x.device.type == "cpu" and min(x.shape[-2:]) >= 128
    # A step inside autocast must not change the dtype of the products.
    with torch.autocast(x.device.type, enabled=False) if torch.is_autocast_enabled(x.device.type) else nullcontext():
        if (one_by_one or fills_cpu) and len(x) > 1:
            return torch.cat([chosen.backend(m, coefficients, eps=eps, dtype=dtype) for m in x.split(1)])
        return chosen.backend(x, coefficients, eps=eps, dtype=dtype)
