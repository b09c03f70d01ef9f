"""The grid of ranks on which the parts of a tensor and their replicas lie. Pure.

A rank knows two sets of ranks of a plain tensor: those that keep its other parts, and those that keep the same part.
The rest of the grid it learns from what the others say of themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from shardmuon.comm.groups import Ranks
from shardmuon.comm.vote import Unlike

Grid = tuple[Ranks, ...]  # of each replica the ranks of its parts, in the order of parts


class Ties(NamedTuple):
    """The ranks with which one rank shares a tensor, as far as that rank knows.

    Attributes:
        parts: Ranks that keep the parts of its replica, in the order of parts; itself alone if nothing is cut.
        mates: Ranks that belong to the same part, ascending: its replicas, or those that share the part out among them.
    """

    parts: Ranks
    mates: Ranks

    @property
    def sets(self) -> tuple[Ranks, ...]:
        """The sets of ranks, ascending, that talk because of it."""
        return tuple(dict.fromkeys((tuple(sorted(self.parts)), self.mates)))


def union(groups: Collection[Ranks]) -> Ranks:
    """All ranks of these groups, ascending."""
    return tuple(sorted({rank for group in groups for rank in group}))


def grids_of(known: Mapping[int, Collection[Ties]]) -> dict[Ties, Grid]:
    """The grid of each tie of any rank. Of one component, so that all of its ranks find the same.

    Args:
        known: Rank -> its ties.

    Raises:
        Unlike: The groups of some ranks form no grid.
    """
    found: dict[Ties, Grid] = {}
    for rank, of_rank in known.items():
        for ties in of_rank:
            if ties not in found:
                grid = found[ties] = _grid(rank, ties, known)
                for alike in _ties_of(grid):  # one by one they would take N^3 on N ranks
                    found.setdefault(alike, grid)
    return found


def _ties_of(grid: Grid) -> Iterator[Ties]:
    """The ties of each rank of a grid, in row-major order."""
    columns = [tuple(sorted(column)) for column in zip(*grid, strict=True)]
    for row in grid:
        for column in columns:
            yield Ties(row, column)


def _grid(rank: int, ties: Ties, known: Mapping[int, Collection[Ties]]) -> Grid:
    # of each rank of this replica the ranks of its part, and of each mate its replica: all of its parts are among them
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
