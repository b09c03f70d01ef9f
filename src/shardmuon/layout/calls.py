"""Calls that ranks make again and again over one layout table: before each, all of them go on alike, or all raise.

[Note: who votes]
    All ranks that parameters and process groups connect, the component, vote before they do anything. A rank that
    knows no table of its parameters does not know the component either. It says so in a vote of its largest groups
    instead, mostly that very component, where those that have a table hear it; then all make a new one.
"""

from __future__ import annotations

import hashlib
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor

from shardmuon._torch import default_group
from shardmuon.comm.component import Ranks, in_order, largest_of
from shardmuon.comm.faults import Fault
from shardmuon.comm.groups import my_rank
from shardmuon.comm.vote import Ballot, Flag, Phase, Verdict, gather, vote
from shardmuon.errors import Refused, ranks_text
from shardmuon.layout.bind import Listed, Table, bind, ties_of
from shardmuon.layout.engines.base import Group

_OTHERS = 1  # presence bit: this rank is in sets beyond those that vote


class Kept:
    """The part of a table that outlives a call.

    Attributes:
        component: All ranks that vote together.
        token: Of no other table of these ranks.
        sets: Set of ranks that share parameters -> numbers of these, small sets first; without sets of one rank.
    """

    def __init__(self, table: Table) -> None:
        self.component, self.token = table.component, table.token
        self.sets = {ranks: numbers for ranks, numbers in table.sets.items() if len(ranks) > 1}
        world = default_group()
        self._world = None if world is None else weakref.ref(world)  # weak: no group lives on because of a call

    @property
    def is_of_this_world(self) -> bool:
        """True if the default group is the one in which it was made: ranks have the same numbers."""
        world = default_group()
        return self._world is None if world is None else self._world is not None and self._world() is world


K = TypeVar("K", bound=Kept)


class Said(NamedTuple):
    """What a rank says in the vote.

    Attributes:
        digests: Set of ranks -> digest of what these ranks must have alike.
        presence: Bits, merged by "or".
    """

    digests: Mapping[Ranks, bytes] | None = None
    presence: int = 0


class Call(ABC, Generic[K]):
    """One rank's side of a call. All that it is asked runs in a guard, and may raise anything.

    Attributes:
        phase: For the vote.
        num_bits: How many presence bits it has.
        beyond: Ranks that vote with this one, whatever they share with it; None: there are no such.
        doing, rule: For messages: "clip", and what ranks that clip together must do alike.
    """

    phase: Phase
    num_bits = 0
    beyond: Ranks | None = None
    doing: str
    rule: str

    @abstractmethod
    def known(self) -> K | None:
        """The table of the last call, if the same ranks vote on it now."""

    @abstractmethod
    def is_current(self, kept: K) -> bool:
        """True if it was made for just these parameters, layouts and options."""

    @abstractmethod
    def listed(self) -> list[Listed]:
        """The parameters for a new table."""

    @abstractmethod
    def waiting(self) -> list[tuple[Tensor, Group]]:
        """All parameters whose sharers may wait for this rank, also if some of them cannot be listed."""

    @abstractmethod
    def made(self, table: Table) -> tuple[K, Any]:
        """What is to be kept of a new table, and what all other ranks are told of it."""

    @abstractmethod
    def heard(self, kept: K, everyone: Sequence[Any]) -> None:
        """Complete it by what each rank of the component tells of it, and keep it."""

    @abstractmethod
    def read(self, kept: K) -> Said:
        """Read all that the call depends on. Changes nothing."""

    @abstractmethod
    def lines(self, kept: K, ranks: Ranks) -> list[str]:
        """What was said to a set, in words."""


def digest_of(said: bytes) -> bytes:
    """16 bytes for a vote."""
    return hashlib.blake2b(said, digest_size=16).digest()


def agree(call: Call[K], fault: Fault, fresh: K | None = None) -> tuple[K, int]:
    """The table of a call, once all ranks of its component have read what it depends on. Collective over them.

    Args:
        call: This rank's side.
        fault: What is wrong on this rank already.
        fresh: A table that all ranks know to be current.

    Returns:
        The table, and the presence bits of all ranks.

    Raises:
        Refused: On every rank; nothing has changed.
        ExchangeError: A rank did not answer in time, or its process has ended.
    """
    while True:
        kept, said, current = fresh, Said(), fresh is not None
        if kept is None:
            with fault:
                kept = call.known()
                current = kept is not None and call.is_current(kept)
        if kept is None:
            waiting = _waiting(call, fault)
            fresh = _bind(call, waiting, _open(call, waiting, fault), fault)
            continue
        if current:
            with fault:
                said = call.read(kept)
        flags = (Flag.NONE if current else Flag.STALE) | (Flag.NONE if fault.text is None else Flag.FAULT)
        ballot = Ballot(call.phase, flags, said.digests, said.presence << 1, call.num_bits + 1)
        verdict = vote(ballot, kept.component)
        if verdict.flags & Flag.STALE:
            before = None if verdict.presence & _OTHERS else kept.component
            fresh = _bind(call, _waiting(call, fault), before, fault)
            continue
        if verdict.flags or not verdict.alike or verdict.phase != call.phase:
            _refuse_unless_stale(call, kept, said, fault, verdict)
            fresh = _bind(call, _waiting(call, fault), kept.component, fault)
            continue
        return kept, verdict.presence >> 1


# ----------------------------------------------------------------------------------------------------- finding a table


def _waiting(call: Call[K], fault: Fault) -> list[tuple[Tensor, Group]]:
    found: list[tuple[Tensor, Group]] = []
    for _ in range(2):  # the other ranks wait for this one: what interrupted it once may be gone
        with fault:
            found = call.waiting()
            break
    return found


def _open(call: Call[K], waiting: Sequence[tuple[Tensor, Group]], fault: Fault) -> Ranks | None:
    """Tell those who may have a table that this rank has none, see [Note: who votes]. Collective over each of its
    largest sets; returns the component, if all of it has heard."""
    sets: list[Ranks] = []
    for _ in range(2):  # as in `_waiting`
        with fault:
            sets = _largest_sets(call, waiting, fault)
        if fault.text is None:
            break
    presence, before = _OTHERS if len(sets) > 1 else 0, None
    for ranks in sets:
        verdict = vote(Ballot(Phase.DISCOVER, Flag.STALE, None, presence, call.num_bits + 1), ranks)
        before = None if verdict.presence & _OTHERS else ranks
    return before


def _largest_sets(call: Call[K], waiting: Sequence[tuple[Tensor, Group]], fault: Fault) -> list[Ranks]:
    beyond = () if call.beyond is None else (call.beyond,)
    return largest_of(in_order([*(ranks for tie in ties_of(waiting, fault) for ranks in tie.sets), *beyond]))


def _bind(call: Call[K], waiting: Sequence[tuple[Tensor, Group]], before: Ranks | None, fault: Fault) -> K:
    """Make a table, and tell each other what else there is to know. Collective over the component."""
    listed: list[Listed] = []
    kept: K | None = None
    told: Any = None
    with fault:
        listed = call.listed()
    beyond = () if call.beyond is None else (call.beyond,)
    table = bind(my_rank(), listed, waiting, beyond=beyond, before=before, fault=fault)
    with fault:
        kept, told = call.made(table)
    everyone = gather(told, table.component, fault.text, fault.cause)
    assert kept is not None, "all ranks have settled"
    with fault:
        call.heard(kept, everyone)
    return kept


# ------------------------------------------------------------------------------------------------------------- refusal


def _refuse_unless_stale(call: Call[K], kept: K, said: Said, fault: Fault, verdict: Verdict) -> None:
    """Find out together what is wrong, and raise it on every rank; or return on every rank, if no more is wrong than
    that they have different tables: one of them made its own when the others made theirs with what it listed then."""
    component, digests = kept.component, said.digests or {}
    everyone = gather({(): kept.token, **digests}, component, fault.text, fault.cause)
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
    raise Refused(_difference(call, unlike, [told[component.index(rank)] for rank in unlike if rank in component]))


def _unlike(everyone: Mapping[int, Mapping[Ranks, bytes]]) -> Ranks | None:
    """The first set, small ones first, of which ranks have unlike digests, or only some have any."""
    for ranks in in_order(ranks for theirs in everyone.values() for ranks in theirs):
        if len({everyone[rank].get(ranks) for rank in ranks if rank in everyone}) > 1:
            return ranks
    return None


def _difference(call: Call[K], ranks: Ranks, everyone: Sequence[Sequence[str] | None]) -> str:
    for rank, theirs in zip(ranks, everyone, strict=True):
        first, theirs = everyone[0] or ["nothing to say"], theirs or ["nothing to say"]
        for one, other in zip(first, theirs, strict=False):
            if one != other:
                return (
                    f"ranks {ranks} {call.doing} together but differ: rank {ranks[0]} has {one.strip()!r}, rank {rank} "
                    f"has {other.strip()!r}. {call.rule}"
                )
    raise AssertionError("digests differ, lines do not")
