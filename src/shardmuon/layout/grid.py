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
    number, size = ties.parts.index(rank), len(ties.parts)
    if size == 1:
        rows: Grid = tuple((mate,) for mate in ties.mates)
    else:
        rows = tuple(_row(mate, ties, number, known) for mate in ties.mates)
    if len(union(rows)) < size * len(rows):
        raise Unlike(_no_grid(rank, ties, "a rank is in two of their tensor-parallel groups"))
    for at in range(size):
        column = tuple(sorted(row[at] for row in rows))
        for row in rows:
            if Ties(row, column) not in known.get(row[at], ()):
                if size == 1 and not any(ties.mates in other.sets for other in known.get(row[at], ())):
                    raise Unlike(
                        f"ranks {ties.mates} share parameters but rank {row[at]} lists none that it shares with them. "
                        "Every rank must give the optimizer the same parameters, order and options"
                    )
                near = (t for t in known.get(row[at], ()) if row == t.parts or column == t.mates)
                has = next((f"{parts} and {mates}" for parts, mates in near), "others")
                why = f"rank {row[at]} should have ranks {row} and {column}, and has {has}"
                raise Unlike(_no_grid(rank, ties, why))
    return tuple(sorted(rows))


def _row(mate: int, ties: Ties, number: int, known: Mapping[int, Collection[Ties]]) -> Ranks:
    """The parts of a mate's replica: those of its groups of this size whose ranks are mates of this replica's parts."""
    rank, size = ties.parts[number], len(ties.parts)
    if mate == rank:
        return ties.parts
    rows = [t.parts for t in known.get(mate, ()) if t.mates == ties.mates and len(t.parts) == size]
    columns = [{r for t in known.get(part, ()) if t.parts == ties.parts for r in t.mates} for part in ties.parts]
    for row in rows:
        if row[number] == mate and all(part in column for part, column in zip(row, columns, strict=True)):
            return row
    if not rows:
        raise Unlike(_no_grid(rank, ties, f"rank {mate} has no tp_group of {size} ranks with these replicas"))
    raise Unlike(
        _no_grid(
            rank, ties, f"rank {mate} has tp_group {rows[0]}, whose ranks are not the replicas of those of {rank}'s"
        )
    )


def _no_grid(rank: int, ties: Ties, why: str) -> str:
    return (
        f"rank {rank} has tp_group {ties.parts} and process_group {ties.mates}, which form no grid with those of the "
        f"other ranks: {why}. process_group must join the ranks that hold the same shard, one of each tensor-parallel "
        "group, and all of these the same way"
    )
