"""Orthogonalizers behind one function: (B, m, n) -> (B, m, n). One file a backend; this table names them.

To add a backend: one file with a function of `Iteration`'s or `Alone`'s signature, one row in `BACKENDS`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from shardmuon._torch import cpu_has_bf16_matmul, foreach_copy_, ieee_products
from shardmuon.orthogonalize.finite import FiniteWatch, repeat_non_finite
from shardmuon.orthogonalize.gram import check_gram_dtype, gram_newton_schulz
from shardmuon.orthogonalize.graphs import GraphCache
from shardmuon.orthogonalize.newton_schulz import newton_schulz, started
from shardmuon.orthogonalize.products import KernelName, Products
from shardmuon.orthogonalize.reference import polar_factor
from shardmuon.orthogonalize.schedules import Triples
from shardmuon.orthogonalize.slots import batch_size, empty_batch
from shardmuon.orthogonalize.torch_muon import torch_muon

MethodName = Literal["auto", "standard", "gram", "torch", "reference"]

# (B, m, n) operands in slots or one (m, n), of norm 1, of either orientation -> the same shape. Must not write into its
# input, must not mix matrices, maps zeros to zeros, and never waits for the device, so that a CUDA graph can hold it.
Iteration = Callable[[Tensor, Triples, Products], Tensor]
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
        eps: Of method "torch".
        dtype: Of the products. Default: `default_dtype`.
        kernel: Multiplies symmetric results.
        alone: Batches of one.
        watch: On an accelerator a non-finite "gram" result of a finite matrix becomes zeros, with a later warning and
            no wait; see finite.py. Default, and on CPUs: it is repeated with "standard" in fp32, with a warning.
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
    checked = chosen.fast
    with ExitStack() as stack:
        # A step inside autocast must not change the dtype of the products.
        if torch.is_autocast_enabled(x.device.type):
            stack.enter_context(torch.autocast(x.device.type, enabled=False))
        if not chosen.like_torch:
            stack.enter_context(ieee_products(x.device))
        if chosen.alone is not None:
            return chosen.alone(x, coefficients, eps)
        assert chosen.iteration is not None, "a backend is one of two kinds"
        iteration = chosen.iteration
        products = Products(x.device, dtype or default_dtype(method, x.device), kernel)
        size = 1 if alone else batch_size(x.shape[-2], x.shape[-1], x.device)
        key = method, coefficients, products

        def run(part: Tensor) -> Tensor:  # (k, m, n), k <= size -> (k, m, n)
            y = started(part, size, products, unit)
            if graphs is not None and y.is_cuda:
                y = graphs.run(lambda batch: iteration(batch, coefficients, products), y, key)
            else:
                y = iteration(y, coefficients, products)
            if y.dim() == 2:
                y = y.unsqueeze(0)
            return y if len(part) == size else y.narrow(0, 0, len(part))

        out = _by_batches(run, x, size, products.dtype, overwrite and not checked)
        if checked and watch is not None and x.device.type != "cpu":
            out = watch.keep_finite(out, x, f"method={method!r} on {x.shape[-2]}x{x.shape[-1]}")
        elif checked:

            def repeat(matrix: Tensor) -> Tensor:
                return orthogonalize(matrix, coefficients, dtype=torch.float32)

            out = repeat_non_finite(out, x, repeat, f"method={method!r}")
    return out


def _by_batches(
    run: Callable[[Tensor], Tensor],
    x: Tensor,  # (B, m, n)
    size: int,
    dtype: torch.dtype,
    overwrite: bool,  # results take the place of `x`, in its dtype
) -> Tensor:  # (B, m, n)
    """`run` on one batch after another; each result is copied once, to where it stays."""
    if len(x) <= size:
        return run(x).to(dtype)
    place = x if overwrite else empty_batch(x.shape, dtype, x.device)
    for part, target in zip(x.split(size), place.split(size), strict=True):
        found = run(part)
        # no `copy_`: it costs more on tensors without data, on which plans are priced
        foreach_copy_([target], [found])
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
