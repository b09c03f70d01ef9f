"""1-D shards in which a matrix is cut at any element: ZeRO's partitions and Megatron's distributed optimizer.

A shard says what it is a part of in one attribute, which whoever made it sets with `mark_flat`. The ranks exchange
what they hold when the plan is made, and it must cover the whole once. Ranks that hold nothing have an empty shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from shardmuon.comm.groups import GroupRef, group_ranks, my_rank, union
from shardmuon.engines.base import Claim, Description
from shardmuon.engines.local import LocalEngine, replicated_layout
from shardmuon.layout.extents import UNKNOWN
from shardmuon.layout.shards import Cut, flat_part
from shardmuon.planning.layout import ParamLayout, layout_of
from shardmuon.planning.views import MatrixView, Shape
from shardmuon.ranks.grid import Grid, replica_grid


@dataclass(frozen=True, slots=True)
class FlatShard:
    """What a 1-D tensor is a part of.

    Attributes:
        shape: The whole tensor's.
        start: First element of the part in the flattened tensor, or in its flattened tensor-parallel shard.
        group: The process group that shares the tensor (or the tensor-parallel shard). Norms of gradients count every
            rank's part; frameworks whose parts have replicas clip themselves.
        kind: What users call such parts.
        tp_group: The tensor-parallel group, if there is one. `group` then joins ranks of one number in it.
        cut: How the tensor is cut over `tp_group`, in equal parts. None: all of it is on each of its ranks.
        home: The device that it belongs to if it is kept on the CPU.
        copies: `tp_group` joins ranks that all keep this very part (FSDP1's HYBRID_SHARD); no tensor parallelism.

    Raises:
        ValueError: Which elements flat ranges of such a tensor-parallel shard are cannot be told.
    """

    shape: Shape
    start: int
    group: Any
    kind: str
    tp_group: GroupRef | None = None
    cut: Cut | None = None
    home: torch.device | None = None
    copies: bool = False

    def __post_init__(self) -> None:
        cut, num_parts = self.cut, 1 if self.tp_group is None else len(self.tp_group.ranks)
        if cut is None:
            return
        if self.shape[cut.dim] % (num_parts * cut.stride):
            raise ValueError(
                f"shape {self.shape} is cut along dim {cut.dim} with stride {cut.stride} over {num_parts} "
                "tensor-parallel ranks, which does not divide it in equal parts"
            )
        if cut.dim > 0 and (len(self.shape) != 2 or cut.stride > 1):
            raise ValueError(
                f"{self.kind}, of a tensor of shape {self.shape} that tensor parallelism cuts along dim {cut.dim} with "
                f"stride {cut.stride}, are not supported: 2-D tensors and stride 1 are, or dim 0. Put it in a group "
                "with use_muon=False"
            )


def home_of(param: Tensor) -> torch.device | None:
    """The device to which a flat shard belongs that is kept on the CPU, if it is one."""
    info: FlatShard | None = getattr(param, "_shardmuon_flat", None)
    home: torch.device | None = getattr(param, "_shardmuon_home", None) if info is None else info.home
    return home if param.device.type == "cpu" else None


def mark_flat(tensor: Tensor, info: FlatShard) -> Tensor:
    """Say of a 1-D tensor what it is a part of; returns it."""
    tensor._shardmuon_flat = info  # type: ignore[attr-defined]
    return tensor


class FlatEngine(LocalEngine):
    """Tensors that `mark_flat` has marked."""

    def recognizes(self, param: Tensor) -> bool:
        return hasattr(param, "_shardmuon_flat")

    def info(self, param: Tensor) -> FlatShard:
        """What it is a part of."""
        info: FlatShard = param._shardmuon_flat  # type: ignore[attr-defined]
        return info

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
            counted=info.cut is not None or info.tp_group is None or info.tp_group.ranks[0] == my_rank(),
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
