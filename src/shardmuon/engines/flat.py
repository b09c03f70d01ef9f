"""1-D shards in which a matrix is cut at any element: ZeRO's partitions and Megatron's distributed optimizer.

A shard says what it is a part of in one attribute, which whoever made it sets with `mark_flat`. The ranks exchange
what they hold when the plan is made, and it must cover the whole once. Ranks that hold nothing have an empty shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from shardmuon.comm.groups import GroupRef, group_ranks, union
from shardmuon.engines.base import Claim, Description
from shardmuon.engines.local import LocalEngine, replicated_layout
from shardmuon.layout.extents import UNKNOWN
from shardmuon.layout.readers.flat import FlatShard, info_of
from shardmuon.layout.readers.flat import mark_flat as mark_flat
from shardmuon.layout.shards import Cut, flat_part
from shardmuon.planning.layout import ParamLayout, layout_of
from shardmuon.planning.views import MatrixView, Shape
from shardmuon.ranks.grid import Grid, replica_grid


def home_of(param: Tensor) -> torch.device | None:
    """The device to which a flat shard belongs that is kept on the CPU, if it is one."""
    info: FlatShard | None = getattr(param, "_shardmuon_flat", None)
    home: torch.device | None = getattr(param, "_shardmuon_home", None) if info is None else info.home
    return home if param.device.type == "cpu" else None


class FlatEngine(LocalEngine):
    """Tensors that `mark_flat` has marked."""

    def recognizes(self, param: Tensor) -> bool:
        return hasattr(param, "_shardmuon_flat")

    def info(self, param: Tensor) -> FlatShard:
        """What it is a part of."""
        return info_of(param)

    def shape(self, param: Tensor) -> Shape:
        return self.info(param).shape

    def describe(self, param: Tensor, view: MatrixView, group: Any) -> Description:
        info = self.info(param)
        grid, replicas = _grid(info)
        ranks = union(grid)

        def from_extents(numbers: Sequence[Sequence[int]]) -> ParamLayout:
            held = tuple((start, numel) for start, numel in numbers)
            return flat_layout(view, grid, info.cut, ranks, held)

        # Nothing implies what is stored: the claim only names the matrices, and no storage has its shape.
        claim = Claim(replicated_layout(view, ranks), (UNKNOWN,))
        parallel = f" of tensor-parallel shards on {len(grid[0])} ranks" if len(grid[0]) > 1 else ""
        if info.copies:
            parallel = f", {len(grid[0])} replicas,"
        cut = "" if info.cut is None else f", cut along dim {info.cut.dim} with stride {info.cut.stride}"
        return Description(
            ranks,
            (claim,),
            tuple(param.shape),
            f"{info.kind}{parallel}{cut} on {len(ranks)} ranks",  # the same on all
            replicas,
            extent=(info.start, param.numel()),
            from_extents=from_extents,
        )

    def signature(self, param: Tensor) -> object:
        return tuple(param.shape), self.info(param)

    def lacks_gradient(self, param: Tensor) -> bool:
        return False


def _grid(info: FlatShard) -> tuple[Grid, Any]:
    """The tensor-parallel groups, one rank each without tensor parallelism; a process group over all, if known."""
    if info.tp_group is None or len(info.tp_group.ranks) == 1:
        return tuple((rank,) for rank in sorted(group_ranks(info.group))), info.group
    grid = replica_grid(info.tp_group, GroupRef.of(info.group))
    return grid, info.tp_group if len(grid) == 1 else None


@lru_cache(maxsize=4096)
def flat_layout(
    view: MatrixView, grid: Grid, cut: Cut | None, ranks: tuple[int, ...], held: tuple[tuple[int, int], ...]
) -> ParamLayout:
    """Who holds what, from the (start, numel) of each of `ranks`."""
    part_of = {rank: part for group in grid for part, rank in enumerate(group)}
    pieces = [
        flat_part(view.shape, cut, part_of[rank], len(grid[0]), start, start + numel)
        for rank, (start, numel) in zip(ranks, held, strict=True)
    ]
    return layout_of(view, ranks, pieces)
