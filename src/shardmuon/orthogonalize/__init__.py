"""Orthogonalizers behind one function: (B, m, n) -> (B, m, n). One file a backend; this table names them.

To add a backend: one file with a function of `Iteration`'s or `Alone`'s signature, one row in `BACKENDS`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor

from shardmuon._torch import cpu_has_bf16_matmul, foreach_copy_, ieee_products
from shardmuon.orthogonalize.finite import FiniteWatch
from shardmuon.orthogonalize.gram import check_gram_dtype, gram_newton_schulz
from shardmuon.orthogonalize.graphs import GraphCache
from shardmuon.orthogonalize.newton_schulz import newton_schulz, started
from shardmuon.orthogonalize.products import KernelName, Products
from shardmuon.orthogonalize.reference import polar_factor
from shardmuon.orthogonalize.schedules import Triples
from shardmuon.orthogonalize.slots import batch_size, empty_batch
from shardmuon.orthogonalize.torch_muon import torch_muon

MethodName = Literal["auto", "standard", "gram", "torch", "reference"]


class Iteration(Protocol):
    """A function of matrices of norm 1, zeros among them, which stay zeros.

    It must not write into its input nor mix matrices, and never waits for the device: a CUDA graph can hold it.
    """

    def __call__(
        self,
        y: Tensor,  # (B, m, n) in slots, or (m, n), of either orientation: operands of `products`
        coefficients: Triples,
        products: Products,
    ) -> Tensor:  # of its shape
        """Orthogonalize each matrix."""


Run = Callable[[Tensor], Tensor]  # an iteration with its schedule and its products
# (B, m, n) of any float dtype -> the same shape, one matrix after the other, with its own normalization.
Alone = Callable[[Tensor, Triples, float], Tensor]


@dataclass(frozen=True, slots=True)
class Method:
    """A backend and how it is called; one of `iteration` and `alone`.

    Attributes:
        like_torch: Reproduces torch.optim.Muon bit for bit, global flags and all; weights are then updated by torch's
            own operations too.
        fast: May in theory give a non-finite result for a finite matrix, which is then looked for.
    """

    iteration: Iteration | None = None
    alone: Alone | None = None
    like_torch: bool = False
    fast: bool = False


BACKENDS: dict[str, Method] = {
    "standard": Method(newton_schulz),
    "gram": Method(gram_newton_schulz, fast=True),
    "torch": Method(alone=torch_muon, like_torch=True),
    "reference": Method(alone=lambda x, coefficients, eps: polar_factor(x)),
}
NS_METHODS = ("auto", *BACKENDS)


def default_dtype(method: str, device: torch.device) -> torch.dtype:
    """Dtype of the products when the user names none.

    "standard": bfloat16, as torch.optim.Muon, wherever the device multiplies it in hardware; float32 on CPUs that only
    emulate it (10 to 80 times slower there). "gram": float16 on accelerators (bf16 is not precise enough for it),
    float32 on CPUs. "reference": float64.
    """
    if method == "reference":
        return torch.float64
    if method == "torch":
        return torch.bfloat16
    if device.type == "cpu" and (method == "gram" or not cpu_has_bf16_matmul()):
        return torch.float32
    return torch.float16 if method == "gram" else torch.bfloat16


def why_dtype(method: str, device: torch.device, wanted: torch.dtype | None) -> str:
    """The dtype that a matrix's products have on a device, and why, for the printed plan."""
    fixed = {"torch": "as in torch.optim.Muon", "reference": "always"}
    found = str((None if method in fixed else wanted) or default_dtype(method, device)).removeprefix("torch.")
    if method in fixed:
        return f"products in {found}, {fixed[method]}"
    if wanted is not None:
        return f"products in {found}, by Orthogonalizer.dtype"
    if device.type != "cpu":
        return f"products in {found}, the default on {device.type}"
    if method == "gram":
        return f"products in {found}, the default of 'gram' on CPUs"
    has = "multiplies bfloat16 in hardware" if cpu_has_bf16_matmul() else "has no bfloat16 products"
    return f"products in {found}, for this CPU {has}"


def orthogonalize(
    x: Tensor,  # (B, m, n), any float dtype, not written to unless `overwrite`
    coefficients: Triples,
    *,
    method: str = "standard",
    eps: float = 1e-7,
    dtype: torch.dtype | None = None,
    kernel: KernelName = "torch",
    alone: bool = False,
    watch: FiniteWatch | None = None,
    graphs: GraphCache | None = None,
    overwrite: bool = False,
    unit: bool = False,
) -> Tensor:  # (B, m, n)
    """Orthogonalize matrices of one shape. A matrix has the same bits beside any others: see slots.py.

    Args:
        x: The matrices, wide or tall.
        coefficients: One (a, b, c) per Newton-Schulz step.
        method: A key of `BACKENDS`.
        eps: Least norm to divide by, of method "torch".
        dtype: Dtype of the products. Default: `default_dtype`.
        kernel: Multiplies symmetric results.
        alone: Batches of one.
        watch: Puts zeros in place of a non-finite "gram" result of a finite matrix; see finite.py. Default: it stays.
        graphs: Replays shapes that repeat. Default: none.
        overwrite: The caller does not need `x` any more: results may take its place.
        unit: The Frobenius norm of each matrix is 1 (or 0) already and is not divided by again.

    Returns:
        The result in the backend's own dtype (in that of `x` if it took its place). It depends on no global flag of
        torch (but "torch" does, as torch's).

    Raises:
        ValueError: Unknown method, or one that cannot run in this dtype or here.
    """
    if method not in BACKENDS:
        raise ValueError(f"method={method!r} is not one of {', '.join(map(repr, BACKENDS))}")
    chosen = BACKENDS[method]
    with ExitStack() as stack:
        # A step inside autocast must not change the dtype of the products.
        if torch.is_autocast_enabled(x.device.type):
            stack.enter_context(torch.autocast(x.device.type, enabled=False))
        if not chosen.like_torch:
            stack.enter_context(ieee_products(x.device))
        if chosen.alone is not None:
            return chosen.alone(x, coefficients, eps)
        assert chosen.iteration is not None, "a backend is one of two kinds"
        products = Products(x.device, dtype or default_dtype(method, x.device), kernel)
        size = 1 if alone else batch_size(x.shape[-2], x.shape[-1], x.device)
        iterate: Run = partial(chosen.iteration, coefficients=coefficients, products=products)
        if graphs is not None and x.is_cuda:
            iterate = partial(graphs.run, iterate, key=(method, coefficients, products))
        out = _by_batches(iterate, x, size, products, unit, overwrite and not (chosen.fast and watch))
        if chosen.fast and watch is not None:
            out = watch.keep_finite(out, x, f"method={method!r} on {x.shape[-2]}x{x.shape[-1]}")
    return out


def _by_batches(
    iterate: Run,
    x: Tensor,  # (B, m, n)
    size: int,
    products: Products,
    unit: bool,
    overwrite: bool,  # results take the place of `x`, in its dtype
) -> Tensor:  # (B, m, n)
    """Iterate on one batch after another; each result is copied once, to where it stays."""
    many = len(x) > size
    place = empty_batch(x.shape, products.dtype, x.device) if many and not overwrite else x
    for start in range(0, len(x), size):
        count = min(size, len(x) - start)
        y = iterate(started(x.narrow(0, start, count), size, products, unit))
        found = (y.unsqueeze(0) if y.dim() == 2 else y).narrow(0, 0, count)
        if not many:
            return found.to(products.dtype)
        # no `copy_`: it costs more on tensors without data, on which plans are priced
        foreach_copy_([place.narrow(0, start, count)], [found])
    return place


__all__ = [
    "BACKENDS",
    "NS_METHODS",
    "FiniteWatch",
    "KernelName",
    "Method",
    "MethodName",
    "Products",
    "Triples",
    "check_gram_dtype",
    "default_dtype",
    "orthogonalize",
    "why_dtype",
]
