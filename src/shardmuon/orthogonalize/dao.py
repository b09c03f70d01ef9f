"""The `gram-newton-schulz` package (Dao-AILab): CuTeDSL symmetric kernels for Hopper and Blackwell. Optional."""

from __future__ import annotations

import importlib
import importlib.util
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from shardmuon.orthogonalize.gram import plan_restarts
from shardmuon.orthogonalize.newton_schulz import normalize
from shardmuon.orthogonalize.products import Products
from shardmuon.orthogonalize.schedules import Triples

_PACKAGE = "gram_newton_schulz"


def check_installed(dtype: torch.dtype | None) -> None:
    """Raise ValueError where `dao_gram` could not run at all."""
    if importlib.util.find_spec(_PACKAGE) is None:
        raise ValueError(
            "method='gram-newton-schulz' needs that package: pip install gram-newton-schulz, or use 'gram'"
        )
    if dtype not in (None, torch.float16):
        raise ValueError(
            f"method='gram-newton-schulz' computes in torch.float16, found dtype={dtype}. Leave dtype out, or "
            "use method='gram'"
        )


def dao_gram(
    x: Tensor,  # (B, m, n), m <= n
    coefficients: Triples,
    products: Products,
    *,
    eps: float,
) -> Tensor:  # (B, m, n), fp16
    """Their Gram iteration with our coefficients, restarts and normalization (theirs adds eps to the norm).

    The package normalizes the caller's batch in place (0.1.6) and again, so it is handed a copy with norm 1.

    Raises:
        ValueError: The package is not installed, or products are not in fp16, which is all that it does.
    """
    check_installed(products.dtype)
    runner = _runner(coefficients, x.is_cuda)
    unit = normalize(x).to(torch.float32)
    live = unit.abs().amax(dim=(-2, -1), keepdim=True) > 0
    out: Tensor = runner(unit)
    return torch.where(live, out, 0.0).to(products.dtype)


@lru_cache(maxsize=64)
def _runner(coefficients: Triples, on_gpu: bool) -> Any:
    package = importlib.import_module(_PACKAGE)
    return package.GramNewtonSchulz(
        ns_epsilon=0.0,
        ns_use_kernels=on_gpu,
        ns_coefficients=[list(triple) for triple in coefficients],
        gram_newton_schulz_reset_iterations=list(plan_restarts(coefficients, torch.float16)),
        compile_kwargs=None,  # torch.compile would recompile for every new shape
    )
