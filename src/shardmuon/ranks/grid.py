"""The grid of ranks on which plain tensor-parallel shards and their replicas lie."""

from __future__ import annotations

import weakref
from typing import Any

from shardmuon._torch import default_group
from shardmuon.comm.groups import GroupRef, my_rank
from shardmuon.errors import Refused
from shardmuon.ranks.council import Faults, merge_faults, share_with_faults
from shardmuon.ranks.exchange import share_objects

Grid = tuple[tuple[int, ...], ...]  # the tensor-parallel group of each replica

# default group -> (own tensor-parallel ranks, own replica ranks) -> what `replica_grid` found, or why there is none
_GRIDS: weakref.WeakKeyDictionary[Any, dict[Any, Grid | str]] = weakref.WeakKeyDictionary()


def replica_grid(shards: GroupRef, replicas: GroupRef | None) -> Grid:
    """The tensor-parallel groups of all replicas, each in group-rank order; its own group alone without `replicas`.

    Collective among both groups, and so among the whole grid, at the first call with the same two.

    Args:
        shards: The ranks that hold the shards of one replica.
        replicas: The ranks that hold the same shard as this one.

    Raises:
        ValueError: The groups of the replicas do not form a grid. Raised on every rank that heard of it.
    """
    others = replicas if replicas is not None and len(replicas.ranks) > 1 else None
    key = (shards.ranks, None if others is None else others.ranks)
    known = _GRIDS.setdefault(default_group(), {}) if default_group() is not None else {}
    if key not in known:
        known[key] = _gather_grid(shards, others)
    found = known[key]
    if isinstance(found, str):
        raise ValueError(found)
    return found


def _gather_grid(shards: GroupRef, others: GroupRef | None) -> Grid | str:
    """The grid, or why there is none.

    Raises:
        Refused: Something was raised on a rank; the next call gathers again.
    """
    grid: Grid = (shards.ranks,)
    wrong: str | None = None  # stays so
    raised = Faults()  # may be gone the next time
    column = () if others is None else tuple(sorted(others.ranks))
    if others is not None:
        grid = tuple(share_objects(shards.ranks, column, others))
        with raised.guard():
            wrong = _grid_fault(grid, shards.ranks.index(my_rank()), column)
        grid = tuple(sorted(grid))
    passing = raised.text
    if len(shards.ranks) > 1:
        wrong, everyone = share_with_faults(wrong, (grid, passing), tuple(sorted(shards.ranks)), shards)
        grids, passing = [theirs for theirs, _ in everyone], merge_faults(theirs for _, theirs in everyone)
        if (wrong or passing) is None and len(set(grids)) > 1:
            wrong = (
                f"the ranks of tp_group {shards.ranks} have replicas on different tensor-parallel groups: {grids}. "
                "Give all of them tp_group and process_group of one grid"
            )
    if others is not None:
        wrong, theirs = share_with_faults(wrong, passing, column, others)
        passing = merge_faults(theirs)
    if wrong is None and passing is not None:
        raise Refused(passing, raised.cause)
    return wrong or grid


def _grid_fault(grid: Grid, position: int, ranks: tuple[int, ...]) -> str | None:
    """What keeps the tensor-parallel groups of these ranks, replicas of each other, from forming a grid."""
    sizes = [len(group) for group in grid]
    if len(set(sizes)) > 1:
        return (
            f"ranks {ranks} of process_group should hold the same shards, but their tensor-parallel groups have "
            f"{sizes} ranks: {list(grid)}. Give them groups of one size"
        )
    positions = [group.index(rank) for group, rank in zip(grid, ranks, strict=True)]
    if set(positions) != {position} or len({r for group in grid for r in group}) < sum(sizes):
        return (
            f"process_group joins ranks {ranks}, which are numbers {positions} of their tensor-parallel groups "
            f"{list(grid)}. It must join the ranks that hold the same shard, one of each tensor-parallel group"
        )
    return None
