"""The dtype that stages compute in, and norms of the lines of a matrix."""

from __future__ import annotations

import torch
from torch import Tensor


def wide_of(dtype: torch.dtype) -> torch.dtype:
    """The dtype that stages compute in: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def line_norms(
    x: Tensor,  # (B, m, n), not written to
    dim: int,  # -1: of each row; -2: of each column
    out: Tensor | None = None,
) -> Tensor:  # (B, m) or (B, n), in what stages compute in
    """Euclidean norms, accumulated in at least fp32.

    Along a dim that is not the last one in memory `vector_norm` takes CPUs five to ten times as long as a sum, so there
    it is a sum of squares.
    """
    wide = wide_of(x.dtype)
    last_in_memory = -1 if x.is_contiguous() else -2
    if dim == last_in_memory or x.device.type != "cpu":
        norms: Tensor = torch.linalg.vector_norm(x, dim=dim, dtype=wide, out=out)
        return norms
    return torch.sum(x.to(wide).square(), dim, out=out).sqrt_()
