"""Parameters on which layouts are compared (odd shapes, stacks, blocks, transposes), and a tensor's matrices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardmuon.layout.views import MatrixView, matrix_view


@dataclass(frozen=True, slots=True)
class ParamCase:
    """A parameter of the comparison: global shape, group options, and which case it covers."""

    shape: tuple[int, ...]
    why: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def view(self) -> MatrixView:
        """The matrices of the parameter."""
        return matrix_view(self.shape, **self.options)


PARAMS: dict[str, ParamCase] = {
    "square": ParamCase((16, 16), "divides on every mesh up to 8"),
    "tall": ParamCase((65, 33), "nothing divides; orthogonalized transposed"),
    "wide": ParamCase((33, 65), "nothing divides"),
    "few_rows": ParamCase((3, 40), "more ranks than rows: empty shards"),
    "few_cols": ParamCase((40, 3), "more ranks than columns"),
    "one_row": ParamCase((1, 24), "a matrix of one row"),
    "one_col": ParamCase((24, 1), "a matrix of one column"),
    "experts": ParamCase((8, 6, 10), "a stack that divides by expert", {"view": "stack"}),
    "odd_experts": ParamCase((5, 7, 4), "a stack that does not", {"view": "stack"}),
    "gate_up": ParamCase((26, 9), "two blocks that end inside shards", {"split_sizes": (13, 13)}),
    "qkv": ParamCase((24, 10), "2 query groups of (8, 2, 2) rows", {"split_sizes": (8, 2, 2), "split_groups": 2}),
    "heads": ParamCase((21, 8), "heads that end inside shards", {"num_heads": 7}),
    "expert_gate_up": ParamCase((4, 10, 6), "blocks inside experts", {"view": "stack", "split_sizes": (5, 5)}),
    "conv": ParamCase((10, 4, 3, 3), "a kernel, flattened"),
    "in_out": ParamCase((21, 34), "stored transposed; nothing divides", {"transposed": True}),
    "in_out_experts": ParamCase((5, 6, 9), "a stack of transposes", {"view": "stack", "transposed": True}),
    "columns": ParamCase(
        (13, 27), "blocks of columns that end inside shards", {"split_sizes": (8, 19), "split_dim": 1}
    ),
    "in_out_qkv": ParamCase(
        (10, 24),
        "2 query groups of (8, 2, 2) columns, transposed",
        {"split_sizes": (8, 2, 2), "split_groups": 2, "split_dim": 1, "transposed": True},
    ),
    "in_out_gate_up": ParamCase(
        (3, 7, 12),
        "single columns by turns inside transposed experts",
        {"view": "stack", "split_sizes": (1, 1), "split_groups": 6, "split_dim": 1, "transposed": True},
    ),
}


def groups_of(params: Mapping[str, Tensor], cases: Mapping[str, ParamCase], **options: Any) -> list[dict[str, Any]]:
    """Parameter groups that say how each parameter reads as matrices."""
    table: dict[str, dict[str, Any]] = {}
    for name, param in params.items():
        group = table.setdefault(repr(cases[name].options), {"params": [], **cases[name].options, **options})
        group["params"].append((name, param))
    return list(table.values())


def cut_matrices(view: MatrixView, full: Tensor) -> list[Tensor]:
    """The matrices of a logical tensor."""
    fine, out = full.reshape(view.fine), []
    for matrix in view.matrices:
        found = torch.empty(matrix.rows, matrix.cols, dtype=full.dtype, device=full.device)
        box = fine[tuple(slice(start, start + size) for start, size in zip(matrix.start, matrix.sizes, strict=True))]
        found.as_strided(matrix.sizes, matrix.strides).copy_(box)
        out.append(found)
    return out
