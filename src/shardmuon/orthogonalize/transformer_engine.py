"""TransformerEngine's distributed Newton-Schulz (cuSolverMp) on matrices whose columns are spread over ranks. Optional.

It works in place, does not normalize, takes equal column shards in fp32 or bf16 on CUDA, and wants a context that is
costly to make. Here: a class that keeps the context, normalizes over the group and leaves its input alone.
"""

from __future__ import annotations

import importlib
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from shardmuon.orthogonalize.schedules import Triples
from shardmuon.ranks.exchange import group_ranks, reduce_


class ColumnShards:
    """Newton-Schulz on (m, n) matrices of which each rank of a group holds n / p columns, m <= n.

    A context manager: the cuSolverMp context must be gone before the group is destroyed.

    Raises:
        ValueError: TransformerEngine is not installed, or a shard does not fit.
    """

    def __init__(self, group: Any) -> None:
        """Make the context. Collective among the ranks of `group` (NCCL)."""
        try:
            self._library: Any = importlib.import_module("transformer_engine.pytorch.newton_schulz")
        except ImportError as missing:
            raise ValueError(
                "column shards need TransformerEngine: pip install transformer-engine[pytorch] "
                "(a version with newton_schulz)"
            ) from missing
        self._group = group
        self._ranks = group_ranks(group)
        self._context: Any = self._library.cusolvermp_ctx_create(group)

    def __enter__(self) -> ColumnShards:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.destroy()

    def __call__(
        self,
        x: Tensor,  # (m, n / p), any float dtype, not written to
        coefficients: Triples,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Tensor:  # (m, n / p), `dtype`
        """This rank's columns of the orthogonalized matrix. Collective among the ranks of the group."""
        self._check(x, dtype)
        y = x.to(torch.float32)
        peak = reduce_(y.abs().amax(), "max", self._group)
        y = y / torch.where(peak > 0, peak, 1.0)
        norm = reduce_(y.square().sum(), "sum", self._group).sqrt_()
        y = y.div_(norm.clamp_(min=1.0)).to(dtype).contiguous()
        flat = [value for triple in coefficients for value in triple]
        self._library.newton_schulz(y, self._context, len(coefficients), flat)
        return y

    def _check(self, x: Tensor, dtype: torch.dtype) -> None:
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"TransformerEngine multiplies in torch.float32 or torch.bfloat16, found {dtype}")
        if x.ndim != 2 or x.shape[0] > x.shape[1] * len(self._ranks):
            raise ValueError(
                f"a column shard of a wide matrix has shape (m, n / {len(self._ranks)}) with m <= n, found "
                f"{tuple(x.shape)}. Hand in the transpose of a tall matrix's row shard"
            )
