"""Components: the ranks that sets connect, found by flooding. Pure: nothing here communicates.

[Note: why a component votes together]
    Ranks come in sets: a mesh's axis, a process group, the ranks that share a parameter. A rank in two sets that asks
    them one after the other may learn of a fault in the second when the first has gone on: 12 of 16 faults on a 4 x 4
    mesh of rows and columns, 2 of 4 on a chain of pairs. So all ranks that sets connect, directly or over others, say
    in one vote what is wrong. Before they can, each must know all of them. It floods: every rank tells each of its
    sets all that it has heard, round by round. A rank knows that it has heard everything when it has the entry of
    every rank that any entry names. Then it can count, from the entries alone, the round after which the last rank
    knows as much, and everybody stops after that round.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from shardmuon.errors import told_by

Ranks = tuple[int, ...]  # global, ascending


class Entry(NamedTuple):
    """One rank's entry in the list of its component.

    Attributes:
        sets: The sets that it is in.
        fault: What is wrong on it, or None.
        facts: What everybody shall know of it; picklable.
    """

    sets: tuple[Ranks, ...]
    fault: str | None = None
    facts: Any = None


Known = dict[int, Entry]  # global rank -> what it says


class Talk(NamedTuple):
    """A wish to tell a set of ranks a value, and to hear what each of them says there."""

    ranks: Ranks
    value: Known


def in_order(sets: Iterable[Ranks]) -> list[Ranks]:
    """Sets in the order in which every rank talks: small ones first. A set of one rank has nobody to talk to."""
    return sorted({ranks for ranks in sets if len(ranks) > 1}, key=lambda ranks: (len(ranks), ranks))


def largest_of(sets: Sequence[Ranks]) -> list[Ranks]:
    """The sets that no other of these sets contains."""
    return [ranks for ranks in sets if not any(set(ranks) < set(other) for other in sets)]


def flood(rank: int, entry: Entry) -> Generator[Talk | Known, list[Known], None]:
    """Generator that finds a rank's component: yields talks and is sent what was heard; at last yields the entry of
    every rank of the component, in order.

    All ranks of a component end after the same round, if each set is known to all of its ranks.
    """
    known, done = {rank: entry}, 0
    own = in_order(entry.sets)
    while not _complete(known) or done < rounds_of(known):
        for ranks in own:
            for heard in (yield Talk(ranks, dict(known))):
                known.update(heard)
        done += 1
    yield dict(sorted(known.items()))


def _complete(known: Known) -> bool:
    return all(rank in known for entry in known.values() for ranks in entry.sets for rank in ranks)


def rounds_of(known: Mapping[int, Entry]) -> int:
    """Rounds until every rank of these has heard of every other one that it can hear of."""
    hears = {rank: {rank} for rank in known}
    order = in_order(ranks for entry in known.values() for ranks in entry.sets)
    number = last = 0
    growing = True
    while growing:
        growing, number = False, number + 1
        for ranks in order:
            union = set().union(*(hears[rank] for rank in ranks))
            for rank in ranks:
                if len(hears[rank]) < len(union):
                    hears[rank], growing, last = set(union), True, number
    return last


def faults_of(known: Mapping[int, Entry]) -> list[str]:
    """Texts of all that is wrong in a component: first what each rank reports, then sets that not all of their ranks
    list."""
    said = told_by(entry.fault for entry in known.values())
    for ranks in in_order(ranks for entry in known.values() for ranks in entry.sets):
        lists = [rank for rank in ranks if rank in known and ranks in known[rank].sets]
        lacks = [rank for rank in ranks if rank in known and ranks not in known[rank].sets]
        if lists and lacks:
            said.append(
                f"rank {lists[0]} shares parameters or a process group with ranks {ranks}, of which rank {lacks[0]} "
                "does not know. Give every one of these ranks the same groups and parameters"
            )
    return list(dict.fromkeys(said))
