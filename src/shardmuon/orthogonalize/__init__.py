"""Orthogonalizers behind one function: (B, m, n) -> (B, m, n). One file a backend; this table names them.

To add a backend: one file with a function of `Backend`'s signature, one row in `BACKENDS`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from shardmuon._torch import cpu_has_bf16_matmul, foreach_copy_, ieee_products
from shardmuon.orthogonalize.dao import dao_gram
from shardmuon.orthogonalize.finite import FiniteWatch, repeat_non_finite
from shardmuon.orthogonalize.gram import check_gram_dtype, gram_newton_schulz
from shardmuon.orthogonalize.graphs import GraphCache
from shardmuon.orthogonalize.newton_schulz import newton_schulz
from shardmuon.orthogonalize.products import KernelName, Products
from shardmuon.orthogonalize.reference import polar_factor
from shardmuon.orthogonalize.schedules import Triples
from shardmuon.orthogonalize.torch_muon import torch_muon

MethodName = Literal["auto", "standard", "gram", "torch", "reference", "gram-newton-schulz"]


class Backend(Protocol):
    """An orthogonalizer. Must not write into `x`, must not mix matrices of a batch, and maps zeros to zeros."""

    def __call__(
        self,
        x: Tensor,  # (B, m, n), any float dtype
        coefficients: Triples,
        products: Products,
        *,
        eps: float,
    ) -> Tensor:  # (B, m, n), any float dtype
        """Return the (approximate) polar factor of each matrix."""
        ...


@dataclass(frozen=True, slots=True)
class Method:
    """A backend and how it is called.

    Attributes:
        wide: Hand it m <= n, tall matrices as transposed views.
        like_torch: Reproduces torch.optim.Muon bit for bit, global flags and all; weights are then updated by torch's
            own operations too.
        fast: May in theory give a non-finite result for a finite matrix; finite.py sees to that one.
        capturable: Never waits for the device, so a CUDA graph can hold it.
        takes_unit: Leaves out its own normalization of matrices that have norm 1 (`Products.unit`).
    """

    backend: Backend
    wide: bool
    like_torch: bool = False
    fast: bool = False
    capturable: bool = False
    takes_unit: bool = False


BACKENDS: dict[str, Method] = {
    "standard": Method(newton_schulz, wide=True, capturable=True, takes_unit=True),
    "gram": Method(gram_newton_schulz, wide=True, fast=True, capturable=True, takes_unit=True),
    "torch": Method(torch_muon, wide=False, like_torch=True),
    "reference": Method(polar_factor, wide=True),
    "gram-newton-schulz": Method(dao_gram, wide=True, fast=True),
}
NS_METHODS = ("auto", *BACKENDS)


def default_dtype(method: str, device: torch.device) -> torch.dtype:
    """Dtype of the products when the user names none.

    "standard": bfloat16, as torch.optim.Muon, wherever the device multiplies it in hardware; float32 on CPUs that only
    emulate it (10 to 80 times slower there). "gram": float16 on accelerators (bf16 is not precise enough for it),
    float32 on CPUs. "gram-newton-schulz": float16, always. "reference": float64.
    """
    if method == "reference":
        return torch.float64
    if method == "torch":
        return torch.bfloat16
    if method == "gram-newton-schulz":
        return torch.float16
    if device.type == "cpu" and (method == "gram" or not cpu_has_bf16_matmul()):
        return torch.float32
    return torch.float16 if method == "gram" else torch.bfloat16


def why_dtype(method: str, device: torch.device, wanted: torch.dtype | None) -> str:
    """The dtype that a matrix's products have on a device, and why, for the printed plan."""
    fixed = {"torch": "as in torch.optim.Muon", "reference": "always", "gram-newton-schulz": "always"}
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
    x: Tensor,  # (B, m, n), any float dtype, not written to
    coefficients: Triples,
    *,
    method: str = "standard",
    eps: float = 1e-7,
    dtype: torch.dtype | None = None,
    one_by_one: bool = False,
    kernel: KernelName = "torch",
    watch: FiniteWatch | None = None,
    graphs: GraphCache | None = None,
    overwrite: bool = False,
    unit: bool = False,
) -> Tensor:  # (B, m, n)
    """Orthogonalize a batch of matrices of one shape.

    Args:
        x: The batch. Tall matrices are allowed with any method.
        coefficients: One (a, b, c) per Newton-Schulz step.
        method: A key of `BACKENDS`.
        eps: See the backend.
        dtype: Of the products. Default: `default_dtype`.
        one_by_one: Run each matrix by itself, so that its bits do not depend on its neighbours.
        kernel: How symmetric results are multiplied.
        watch: Of finite matrices whose fast result ("gram") is not finite. On accelerators such results become zeros,
            with a later warning and no wait. On CPUs, and without it, these matrices are repeated with "standard" in
            fp32, with a warning; that costs one pass over each result, and on an accelerator one wait. See finite.py.
        graphs: Replays shapes that repeat. Default: none.
        overwrite: The caller does not need `x` any more: results may take its place.
        unit: The Frobenius norm of each matrix is 1 (or 0) already: backends that can do not divide by it again.

    Returns:
        The result in the backend's own dtype (in that of `x` if it took its place). It depends on no global flag of
        torch (but "torch" does, as torch's).

    Raises:
        ValueError: Unknown method, or one that cannot run in this dtype or here.
    """
    if method not in BACKENDS:
        raise ValueError(f"method={method!r} is not one of {', '.join(map(repr, BACKENDS))}")
    chosen = BACKENDS[method]
    products = Products(x.device, dtype or default_dtype(method, x.device), kernel, unit)
    turned = chosen.wide and x.shape[-2] > x.shape[-1]
    batch = x.mT if turned else x  # (B, m, n), m <= n if the backend wants it so
    m, n = batch.shape[-2:]

    def run(part: Tensor) -> Tensor:
        return chosen.backend(part, coefficients, products, eps=eps)

    # A CPU gains nothing from a batch of matrices that fill it one at a time (measured: 5% slower from 128 rows on).
    fills_cpu = x.device.type == "cpu" and min(x.shape[-2:]) >= 128
    with ExitStack() as stack:
        # A step inside autocast must not change the dtype of the products.
        if torch.is_autocast_enabled(x.device.type):
            stack.enter_context(torch.autocast(x.device.type, enabled=False))
        if not chosen.like_torch:
            stack.enter_context(ieee_products(x.device))
        if one_by_one or fills_cpu:
            out = _each_alone(run, batch, x if overwrite and not chosen.fast else None, turned)
        elif graphs is not None and chosen.capturable and x.is_cuda:
            out = graphs.run(run, batch, (method, coefficients, products, eps))
        else:
            out = run(batch)
        if chosen.fast and watch is not None and x.device.type != "cpu":
            out = watch.keep_finite(out, batch, f"method={method!r} on {m}x{n}")
        elif chosen.fast:
            out = repeat_non_finite(out, batch, coefficients, f"method={method!r}")
    return out.mT if turned else out


def _each_alone(
    run: Callable[[Tensor], Tensor],
    batch: Tensor,  # (B, m, n)
    place: Tensor | None,  # memory for the results: `batch` itself, or what it is a transposed view of
    turned: bool,  # results lie in memory as they go back to the weights: transposed
) -> Tensor:  # (B, m, n)
    """`run` on one matrix after another; each result is copied once, to where it stays."""
    if len(batch) == 1 and not turned:
        return run(batch)
    shape = batch.mT.shape if turned else batch.shape
    for i, matrix in enumerate(batch.split(1)):
        found = run(matrix)
        if place is None:
            place = torch.empty(shape, dtype=found.dtype, device=found.device)
        # no [i] and no `copy_`: see `addmm` of symmetric.py
        foreach_copy_([place.select(0, i)], [found.squeeze(0).mT if turned else found.squeeze(0)])
    assert place is not None, "a batch has at least one matrix"
    return place.mT if turned else place


__all__ = [
    "BACKENDS",
    "NS_METHODS",
    "Backend",
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
