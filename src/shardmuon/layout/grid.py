"""The grid of ranks that share a tensor: one row per replica, one column per shard ("part"). Pure functions.

For a plain tensor, a rank knows only its own row and column of the grid: the ranks that store the other parts of its
replica, and the ranks that store the same part. The rest of the grid follows from what the other ranks report.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from typing import NamedTuple

from shardmuon.comm.groups import Ranks
from shardmuon.comm.vote import Unlike

Grid = tuple[Ranks, ...]  # for each replica: the ranks that store its parts, in part order


class Ties(NamedTuple):
    """The ranks with which one rank shares a tensor, as far as that rank knows.

    Attributes:
        parts: Ranks that store the parts of this rank's replica, in part order; only this rank if the tensor is
            not cut.
        mates: Ranks that store the same part as this rank, ascending. They replicate the part or shard it further.
    """

    parts: Ranks
    mates: Ranks

    @property
    def sets(self) -> tuple[Ranks, ...]:
        """The two sets of ranks, each ascending; a single set if they are equal."""
        return tuple(dict.fromkeys((tuple(sorted(self.parts)), self.mates)))


def union(groups: Collection[Ranks]) -> Ranks:
    """Return all ranks of these groups, ascending."""
    return tuple(sorted({rank for group in groups for rank in group}))


def grids_of(known: Mapping[int, Collection[Ties]]) -> dict[Ties, Grid]:
    """Find, for each rank's ties (the ranks with which it shares a tensor), the grid of all ranks that share the
    tensor. The result is equal on all ranks.

    Args:
        known: Rank -> the ties of its tensors, for all ranks that are connected by shared tensors.

    Raises:
        Unlike: The ties of some ranks do not fit together into a grid.
    """
    found: dict[Ties, Grid] = {}
    for rank, of_rank in known.items():
        for ties in of_rank:
            if ties not in found:
                grid = found[ties] = _grid(rank, ties, known)
                columns = [tuple(sorted(column)) for column in zip(*grid, strict=True)]
                # reuse the grid for all of its ranks: computing it once per rank would take O(N^3) on N ranks
                for row, column in itertools.product(grid, columns):
                    found.setdefault(Ties(row, column), grid)
    return found


def _grid(rank: int, ties: Ties, known: Mapping[int, Collection[Ties]]) -> Grid:
    # columns: for each part, the ranks that store it. rows: for each mate, the ranks of its replica, if each of them
    # is in the column of its part
    columns = [{mate for t in known.get(part, ()) if t.parts == ties.parts for mate in t.mates} for part in ties.parts]
    rows: dict[int, Ranks] = {}
    for mate in ties.mates:
        for t in known.get(mate, ()):
            alike = t.mates == ties.mates and len(t.parts) == len(columns)
            if alike and all(part in column for part, column in zip(t.parts, columns, strict=True)):
                rows.setdefault(mate, t.parts)
        if mate not in rows:
            raise Unlike(_no_grid(rank, ties, mate, known))
    rows[rank] = ties.parts
    for at in range(len(columns)):
        column = union([row[at : at + 1] for row in rows.values()])
        for row in rows.values():
            if Ties(row, column) not in known.get(row[at], ()) or len(union(rows.values())) < len(columns) * len(rows):
                raise Unlike(_no_grid(rank, ties, row[at], known))
    return tuple(sorted(rows.values()))


def _no_grid(rank: int, ties: Ties, other: int, known: Mapping[int, Collection[Ties]]) -> str:
    if len(ties.parts) == 1 and not any(ties.mates in t.sets for t in known.get(other, ())):
        return (
            f"ranks {ties.mates} share parameters but rank {other} lists none that it shares with them. Every rank "
            "must give the optimizer the same parameters, order and options"
        )
    has = " or ".join(f"tp_group {t.parts} and process_group {t.mates}" for t in known.get(other, ())) or "none"
    return (
        f"rank {rank} has tp_group {ties.parts} and process_group {ties.mates}, which form no grid with those of the "
        f"other ranks: rank {other} has {has}. process_group must join the ranks that hold the same shard, one of each "
        "tensor-parallel group, and all of these the same way"
    )
