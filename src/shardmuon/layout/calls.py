"""Calls that ranks make again and again over one layout table: before each, all of them go on alike, or all raise.

A step, clipping of gradients and QK-clip are such calls. Each says what it depends on (`Call`); `agree` is the one way
in which ranks find out whether they go on.

[Note: who votes]
    All ranks that parameters and process groups connect, the component, vote before they do anything. A rank that
    knows no table of its parameters says so in a vote of the ranks that it voted with last. If it has never voted, it
    does not know the component either: it says so in a vote of its largest groups, mostly that very component, where
    those that have a table hear it. Then all make a new one.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from torch import Tensor

from shardmuon.comm.groups import Ranks, World, my_rank
from shardmuon.comm.vote import Ballot, Fault, Flag, Phase, Verdict, gather, in_order, largest_of, vote
from shardmuon.errors import Refused, ranks_text
from shardmuon.layout.bind import Listed, Sharers, Table, bind, sharers_of
from shardmuon.layout.engines.base import Group


class KeptTable:
    """The part of a table that outlives a call.

    Attributes:
        component: All ranks that vote together.
        token: Bytes that no other table of these ranks has.
        sets: Set of ranks that share parameters -> numbers of these, small sets first; without sets of one rank.
        world: The default process group under which it was made; under another one ranks have other numbers.
    """

    def __init__(self, table: Table) -> None:
        self.component, self.token = table.component, table.token
        self.sets = {ranks: numbers for ranks, numbers in table.sets.items() if len(ranks) > 1}
        self.world = World()


K = TypeVar("K", bound=KeptTable)


class Call(ABC, Generic[K]):
    """One rank's side of a call. All that it is asked runs in a guard, and may raise anything.

    Attributes:
        phase: For the vote.
        beyond: Ranks that vote with this one, whatever they share with it; None: there are no such.
        renews: True if ranks that have different tables make a new one; else they are refused.
        doing, rule: Words for messages: "clip", and what ranks that clip together must do alike.
        stamp, groups, fingerprint: For a new table, see `bind`.
    """

    phase: Phase
    beyond: Ranks | None = None
    renews = True
    doing: str
    rule: str
    stamp = ""
    groups: Mapping[Ranks, str] = MappingProxyType({})
    fingerprint: Callable[[Tensor], int] | None = None

    @abstractmethod
    def known(self) -> K | None:
        """The table of the last call, if the same ranks vote on it now."""

    @abstractmethod
    def is_current(self, kept: K) -> bool:
        """True if it was made for just these parameters, layouts and options."""

    def before(self) -> Ranks | None:
        """The ranks that this one voted with last, if it has no table; None: never, or their numbers are others now."""
        return None

    @abstractmethod
    def listed(self) -> list[Listed]:
        """The parameters for a new table."""

    @abstractmethod
    def waiting(self) -> list[tuple[Tensor, Group]]:
        """All parameters whose sharers may wait for this rank, also if some of them cannot be listed."""

    @abstractmethod
    def made(self, table: Table) -> tuple[K, Any]:
        """Make what is to be kept of a new table, and what all other ranks are told of it."""

    @abstractmethod
    def heard(self, kept: K, everyone: Sequence[Any]) -> None:
        """Complete a new table by what each rank of the component tells of it, and keep it."""

    @abstractmethod
    def read(self, kept: K) -> Ballot:
        """Read all that the call depends on, for the vote; with flags beside what is wrong. Changes nothing."""

    @abstractmethod
    def lines(self, kept: K, ranks: Ranks) -> list[Any]:
        """Lines of text for whatever went into the digest of a set: shown where digests differ."""

    def difference(self, ranks: Ranks, everyone: Sequence[list[Any] | None]) -> str:
        """Message on the first line in which the ranks of a set differ."""
        for rank, theirs in zip(ranks, everyone, strict=True):
            first, theirs = everyone[0] or ["nothing to say"], theirs or ["nothing to say"]
            for one, other in zip(first, theirs, strict=False):
                if one != other:
                    return (
                        f"ranks {ranks} {self.doing} together but differ: rank {ranks[0]} has {one.strip()!r}, rank "
                        f"{rank} has {other.strip()!r}. {self.rule}"
                    )
        raise AssertionError("digests differ, lines do not")


def agree(call: Call[K], fault: Fault, fresh: K | None = None) -> tuple[K, Verdict]:
    """The table of a call, once all ranks of its component have read what it depends on. Collective over them.

    Args:
        call: This rank's side.
        fault: What is wrong on this rank already.
        fresh: A table that all ranks know to be current.

    Returns:
        The table, and what all ranks have heard.

    Raises:
        Refused: On every rank; nothing has changed.
        ExchangeError: A rank did not answer in time, or its process has ended.
    """
    while True:
        kept, ballot, current = fresh, Ballot(call.phase), True
        with fault:  # between two talks nothing runs outside of a guard: the other ranks wait for this one
            if kept is None:
                kept = call.known()
                current = kept is not None and call.is_current(kept)
            if kept is not None and current:
                ballot = call.read(kept)
        if kept is None:
            fresh = renewed(call, fault)
            continue
        if not current:
            ballot = ballot._replace(flags=ballot.flags | Flag.STALE)
        if fault.text is not None:
            ballot = ballot._replace(flags=ballot.flags | Flag.FAULT)
        verdict = vote(ballot, kept.component)
        if verdict.flags in (Flag.NONE, Flag.AUDIT) and verdict.alike and verdict.phase == call.phase:
            return kept, verdict
        before: Ranks | None = kept.component
        if verdict.flags & Flag.BEYOND:
            before = None
        if not verdict.flags & Flag.STALE:
            _refuse_unless_stale(call, kept, ballot.digests or {}, fault, verdict)
        fresh = _bind(call, sharers_of(call.waiting, fault), before, fault)


# ----------------------------------------------------------------------------------------------------- finding a table


def renewed(call: Call[K], fault: Fault) -> K:
    """A new table, whatever this rank knows. Collective over the component: ranks that have one hear of it in their
    vote."""
    sharers = sharers_of(call.waiting, fault)
    return _bind(call, sharers, _open(call, sharers, fault), fault)


def _open(call: Call[K], sharers: Sharers, fault: Fault) -> Ranks | None:
    """Tell those who may have a table that this rank has none, see [Note: who votes]. Collective over each of its
    largest sets; returns the component, if all of it has heard."""
    sets: list[Ranks] = []
    beyond = () if call.beyond is None else (call.beyond,)
    for _ in range(2):  # as in `sharers_of`
        with fault:
            before = call.before()
            sets = in_order(itertools.chain(*sharers.values(), beyond)) if before is None else in_order([before])
            sets = largest_of(sets)
            break
    flags, component = Flag.STALE | (Flag.BEYOND if len(sets) > 1 else Flag.NONE), None
    for ranks in sets:
        verdict = vote(Ballot(Phase.DISCOVER, flags), ranks)
        component = None if verdict.flags & Flag.BEYOND else ranks
    return component


def _bind(call: Call[K], sharers: Sharers, before: Ranks | None, fault: Fault) -> K:
    """Make a table, and tell each other what else there is to know. Collective over the component."""
    listed: list[Listed] = []
    kept: K | None = None
    told: Any = None
    with fault:
        listed = call.listed()
    table = bind(
        my_rank(),
        listed,
        sharers,
        beyond=() if call.beyond is None else (call.beyond,),
        before=before,
        stamp=call.stamp,
        groups=call.groups,
        fingerprint=call.fingerprint,
        fault=fault,
    )
    with fault:
        kept, told = call.made(table)
    everyone = gather(told, table.component, fault.text, fault.cause)
    assert kept is not None, "all ranks have settled"
    with fault:
        call.heard(kept, everyone)
    return kept


# ------------------------------------------------------------------------------------------------------------- refusal


def _refuse_unless_stale(
    call: Call[K], kept: K, digests: Mapping[Ranks, bytes], fault: Fault, verdict: Verdict
) -> None:
    """Find out together what is wrong, and raise it on every rank; or return on every rank, if no more is wrong than
    that they have different tables: one of them made its own when the others made theirs with what it listed then."""
    component, token = kept.component, kept.token if call.renews else b""
    everyone = gather({(): token, **digests}, component, fault.text, fault.cause)
    if verdict.phase != call.phase:
        raise Refused(f"ranks {ranks_text(component)} do not make the same call: {verdict.phase!r}")
    if len({theirs[()] for theirs in everyone}) > 1:
        return
    unlike, lines = None, None
    with fault:
        unlike = _unlike(dict(zip(component, everyone, strict=True)))
        if unlike is not None and unlike in digests:
            lines = call.lines(kept, unlike)
    told = gather(lines, component, fault.text, fault.cause)
    if unlike is None:
        raise Refused(f"ranks {ranks_text(component)} do not make the same call: {verdict.flags!r}")
    raise Refused(call.difference(unlike, [told[component.index(rank)] for rank in unlike if rank in component]))


def _unlike(everyone: Mapping[int, Mapping[Ranks, bytes]]) -> Ranks | None:
    """The first set, small ones first, of which ranks have unlike digests, or only some have any."""
    for ranks in in_order(ranks for theirs in everyone.values() for ranks in theirs):
        if len({everyone[rank].get(ranks) for rank in ranks if rank in everyone}) > 1:
            return ranks
    return None
