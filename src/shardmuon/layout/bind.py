"""Agreement of ranks: on one layout table of their parameters, and before each call over it that all go on alike.

A step, clipping of gradients and QK-clip are such calls. Each says what it depends on (`Call`); `agree` is the one way
in which ranks find out whether they go on, and `bind` makes the table: every rank says what it has of each parameter,
and all make the same table of it.

[Note: describing together]
    Each rank first describes its parameters alone, and tells the whole component who shares them with it. From that
    every rank knows all sets of sharers. Then the ranks of each set, small sets first, tell each other their claims;
    the layout is a pure function of those. Whatever goes wrong on a rank is data: it travels in place of a claim, and
    the rank goes on to the next set. At the end all settle: everybody raises, or nobody.

[Note: who votes]
    All ranks that parameters and process groups connect, the component, vote before they do anything. A rank that
    knows no table of its parameters says so in a vote of the ranks that it voted with last. If it has never voted, it
    does not know the component either: it says so in a vote of its largest groups, mostly that very component, where
    those that have a table hear it. Then all make a new one.
"""

from __future__ import annotations

import itertools
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor

from shardmuon._torch import default_group, local_if_any
from shardmuon.comm.groups import Ranks, my_rank
from shardmuon.comm.vote import (
    Ballot,
    Entry,
    Fault,
    Flag,
    Phase,
    Unlike,
    Verdict,
    discover,
    gather,
    in_order,
    largest_of,
    vote,
)
from shardmuon.errors import OUT_OF_MEMORY, Refused, fault_text, ranks_text
from shardmuon.layout.engines import Engine, sharing
from shardmuon.layout.engines.base import Claim, Group
from shardmuon.layout.grid import Grid, Ties, grids_of, union
from shardmuon.layout.table import ParamLayout, digest_of
from shardmuon.layout.views import Ints, view_of


class Listed(NamedTuple):
    """A parameter as an optimizer lists it.

    Attributes:
        name: Name for messages.
        identity: The name that all ranks give it; "" if it has none.
        param, group: The tensor, and its parameter group.
        view: How its matrices are read: arguments of `matrix_view`. None: it holds none (AdamW's).
        options: Text of what ranks must have alike besides.
    """

    name: str
    identity: str
    param: Tensor
    group: Group
    view: Mapping[str, Any] | None
    options: str = ""


class _Described(NamedTuple):
    """A listed parameter with its engine, and what that says of it."""

    listed: Listed
    engine: Engine
    ties: Ties
    claim: Claim


class _Facts(NamedTuple):
    """Message of a rank to its whole component.

    Attributes:
        ties: Sharers of all of its parameters, also those that take no part in steps now.
        stamp: The rank's machine, see `orthogonalize.stamp`.
        nonce: Random bytes that no other plan has: ranks that step like optimizers in unlike order have unlike tokens.
    """

    ties: tuple[Ties, ...]
    stamp: str
    nonce: bytes


@dataclass(frozen=True, eq=False)
class Table:
    """The layouts of an optimizer's parameters and the ranks that share them. Equal on all ranks that share one.

    Attributes:
        component: All ranks that vote together.
        params: This rank's parameters.
        claims: This rank's claim for each parameter.
        layouts: Layout of each parameter.
        sets: Set of sharers -> its parameters' numbers; small sets first.
        groups: Those of the sets whose ranks all know one process group over them -> its name.
        stamps: Rank -> its machine, for all ranks of the component.
        token: 16 bytes that no other table of these ranks has.
    """

    component: Ranks
    params: tuple[Listed, ...]
    claims: tuple[Claim, ...]
    layouts: tuple[ParamLayout, ...]
    sets: dict[Ranks, tuple[int, ...]]
    groups: dict[Ranks, str]
    stamps: dict[int, str]
    token: bytes


def settle(fault: Fault, component: Ranks, phase: Phase, *, asked: bool = False) -> bool:
    """Make all ranks of a component raise, or none. Collective.

    Args:
        fault: What is wrong on this rank.
        component: All ranks that call it.
        phase: What they are about to do.
        asked: A question to all.

    Returns:
        True if any rank has asked.

    Raises:
        Refused: Some rank has a fault, or is about to do something else. On every rank, with the same text.
        ExchangeError: A rank did not answer in time, or its process has ended.
    """
    flags = Flag.NONE if fault.text is None else Flag.FAULT
    verdict = vote(Ballot(phase, flags, presence=int(asked), num_bits=1), component)
    if verdict.flags or verdict.phase != phase:
        gather({}, component, fault.text, fault.cause)  # what is said in each refusal, whatever call it is of
        raise Refused(f"ranks {ranks_text(component)} do not make the same call: {verdict.phase!r}")
    return bool(verdict.presence)


def describe(listed: Sequence[Listed]) -> list[_Described]:
    """Ask the engine of each parameter for its ties and its claim.

    Raises:
        ValueError: A parameter is unusable; the message says why, with its name.
    """
    found = []
    for one in listed:
        try:
            engine = sharing(one.param, one.group)
            found.append(_Described(one, engine, engine.ties(one.param, one.group), engine.claim(one.param, one.group)))
        except OUT_OF_MEMORY:
            raise
        except Exception as wrong:
            raise ValueError(f"{one.name}: {fault_text(wrong)}") from wrong
    return found


_Sharers = Mapping[Ties, tuple[Ranks, ...]]  # who shares parameters with this rank -> the sets in which they talk


def _sharers_of(params: Callable[[], Sequence[tuple[str, Tensor, Group]]], fault: Fault) -> _Sharers:
    """Sets of ranks that share these parameters, without parameters for which they cannot be told. Other ranks wait for
    this one in these sets, so whatever goes wrong is noted, and what an interrupt has cut off is asked again."""
    found: dict[Ties, tuple[Ranks, ...]] = {}
    for _ in range(2):
        with fault:
            for name, param, group in params():
                with fault:
                    try:
                        ties = sharing(param, group).ties(param, group)
                    except ValueError as wrong:
                        raise ValueError(f"{name}: {wrong}") from wrong
                    found[ties] = ties.sets
        if fault.text is None:
            break
    return found


def bind(
    rank: int,
    listed: Sequence[Listed],
    sharers: _Sharers | None = None,
    *,
    beyond: Sequence[Ranks] = (),
    before: Ranks | None = None,
    stamp: str = "",
    groups: Mapping[Ranks, str] = MappingProxyType({}),
    fingerprint: Callable[[Tensor], int] | None = None,
    fault: Fault | None = None,
) -> Table:
    """Find out who stores what, see [Note: describing together]. Collective over the component.

    Args:
        rank: This one.
        listed: Its parameters.
        sharers: Who may wait for this rank, also with parameters that take no part now. None: those of the listed ones.
        beyond: Further sets of ranks that this one belongs to, all of which vote together.
        before: The component so far, if there was one.
        stamp: This machine.
        groups: Sets of ranks -> name of a process group over them that this rank knows.
        fingerprint: Storage -> 64 bits, equal for equal bits: replicas are compared by it. None: they are not.
        fault: What is wrong on this rank already.

    Raises:
        Refused: Something is wrong on some rank, or what ranks say does not fit together. On every rank.
        ExchangeError: A rank did not answer in time, or its process has ended.
    """
    fault = fault or Fault()
    mine: list[_Described] = []
    table: Table | None = None
    if sharers is None:
        sharers = _sharers_of(lambda: [(one.name, one.param, one.group) for one in listed], fault)
    with fault:
        mine = describe(listed)
        sharers = {**sharers, **{one.ties: one.ties.sets for one in mine}}
    sets = tuple(dict.fromkeys([*itertools.chain.from_iterable(sharers.values()), *beyond]))
    entry = Entry(sets, fault.text, _Facts(tuple(sharers), stamp, os.urandom(8)))
    known = discover(rank, entry, before, fault.cause)
    sets_here: list[_Set] = []
    with fault:
        grids = grids_of({other: said.facts.ties for other, said in known.items()})
        sets_here = _sets(mine, {ties: grids[ties] for ties in sharers}, groups, fault)
    settle(fault, tuple(known), Phase.PLAN)
    layouts: dict[int, ParamLayout] = {}
    for one in sets_here:
        layouts.update(zip(one.numbers, one.layouts(fingerprint), strict=False))
    with fault:
        table = Table(
            tuple(known),
            tuple(one.listed for one in mine),
            tuple(one.claim for one in mine),
            tuple(layouts[number] for number in range(len(mine))),
            {one.ranks: tuple(one.numbers) for one in sets_here if one.numbers},
            {one.ranks: one.group for one in sets_here if one.group},
            {rank: said.facts.stamp for rank, said in known.items()},
            digest_of([said.facts.nonce for said in known.values()]),
        )
    settle(fault, tuple(known), Phase.PLAN)
    assert table is not None, "all ranks have settled"
    return table


def _sets(
    mine: Sequence[_Described], grids: Mapping[Ties, Grid], groups: Mapping[Ranks, str], fault: Fault
) -> list[_Set]:
    """The sets of sharers that this rank is in; small ones first, as all ranks talk."""
    numbers: dict[Ranks, list[int]] = {union(grid): [] for grid in grids.values()}
    for number, one in enumerate(mine):
        numbers[union(grids[one.ties])].append(number)
    ordered = sorted(numbers, key=lambda ranks: (len(ranks), ranks))
    return [_Set(ranks, numbers[ranks], mine, grids, groups.get(ranks, ""), fault) for ranks in ordered]


class _ListedLine(NamedTuple):
    """Text about one parameter that every sharing rank must list alike.

    Attributes:
        about: The parameter's name, shape and layout, in words.
        words: The rest: its form, and its options.
    """

    about: str
    words: tuple[str, ...]


class _Set:
    """The ranks that share some parameters, while they agree on their layouts.

    Attributes:
        ranks: The ranks, ascending.
        numbers: Numbers of the parameters, in the order of all.
        group: Name of a process group that this rank knows over them; of one that all of them know, once they agree.
    """

    def __init__(
        self,
        ranks: Ranks,
        numbers: Sequence[int],
        everything: Sequence[_Described],
        grids: Mapping[Ties, Grid],
        group: str,
        fault: Fault,
    ) -> None:
        self.ranks, self.numbers, self.group = ranks, numbers, group
        self._mine, self._grids, self._fault = [everything[number] for number in numbers], grids, fault

    def _say(self, make: Callable[[], Any]) -> list[Any] | None:
        """Exchange a value with the ranks of the set, and return all of their values; None if any rank has a fault
        instead."""
        value = None
        with self._fault:
            value = make()
        everyone = gather((self._fault.text, value), self.ranks)
        self._fault.add(next((text for text, _ in everyone if text is not None), None), own=False)
        return None if any(text is not None for text, _ in everyone) else [theirs for _, theirs in everyone]

    def layouts(self, fingerprint: Callable[[Tensor], int] | None) -> list[ParamLayout]:
        """The layouts; none if something is wrong, which is noted. Collective over the set."""
        check = fingerprint is not None
        said = self._say(
            lambda: (digest_of((check, self._lines())), [one.claim[2:4] for one in self._mine], self.group)
        )
        if said is None:
            return []
        digests, claims, groups = zip(*said, strict=True)
        self.group = self.group if len({*groups}) == 1 else ""
        if len({*digests}) > 1:
            lines = self._say(self._lines)
            with self._fault:
                raise Unlike(self._difference(lines or []))
            return []
        found: list[ParamLayout] = []
        with self._fault:
            found = self._layouts(claims)
        if fingerprint is not None:
            prints = self._say(lambda: self._prints(found, fingerprint))
            with self._fault:
                self._compare(found, prints or [])
        return found

    def _lines(self) -> list[_ListedLine]:
        """Text of each shared parameter that every rank of the set must list alike."""
        found = []
        for one in self._mine:
            shape, *form = one.claim.form
            view = (f"{key}={value!r}" for key, value in sorted((one.listed.view or {}).items()))
            sizes = f"{shape}".replace("-1", "any")  # along a dim that is cut in parts of any size
            about = f'"{one.listed.identity or "a parameter"}: {sizes}, {one.claim.text}"'
            found.append(_ListedLine(about, (f"{form}", *one.listed.options.split(" "), *view)))
        return found

    def _difference(self, everyone: Sequence[Sequence[_ListedLine]]) -> str:
        first, here = everyone[0] if everyone else [], self.ranks[0]
        for rank, theirs in zip(self.ranks, everyone, strict=False):
            unlike = [(a, b) for a, b in zip(first, theirs, strict=False) if a != b]
            if len(first) != len(theirs):
                longer, shorter = sorted((first, theirs), key=len, reverse=True)
                lacking = next((line for line in longer if line not in shorter), longer[-1])
                found = (
                    f"rank {here} lists {len(first)} parameters, rank {rank} lists {len(theirs)}; one of them lacks "
                    f"{lacking.about}"
                )
            elif not unlike:
                continue
            else:
                (about, mine), (other_about, others) = unlike[0]
                if about == other_about:
                    words = [word for word in mine if word not in others], [word for word in others if word not in mine]
                    found = f"{about}: rank {here} lists {' '.join(words[0])}, rank {rank} lists {' '.join(words[1])}"
                else:
                    found = f"rank {here} lists {about}, rank {rank} lists {other_about}"
            return (
                f"ranks {self.ranks} share parameters but describe them differently: {found}. Every rank must give "
                "the optimizer the same parameters, order and options"
            )
        return f"ranks {self.ranks} compare replicas on some of them only. Give all the same options"

    def _layouts(self, everyone: Sequence[Sequence[tuple[Ints, Ints]]]) -> list[ParamLayout]:
        """Layout of each parameter; those that lie alike share one object."""
        known: dict[object, ParamLayout] = {}
        found = []
        for one, *told in zip(self._mine, *everyone, strict=True):
            key = one.engine, one.claim.form, one.ties, tuple(told), repr(one.listed.view)
            if key not in known:
                claims = {
                    rank: one.claim._replace(stored=theirs[0], part=theirs[1])
                    for rank, theirs in zip(self.ranks, told, strict=True)
                }
                try:
                    shape, held = one.engine.stored(claims, self._grids[one.ties])
                    of_ranks = tuple(held[rank] for rank in self.ranks)
                    known[key] = ParamLayout(view_of(shape, one.listed.view), self.ranks, of_ranks)
                except ValueError as wrong:
                    stored = (
                        f"ranks {self.ranks} store shapes {[shape for shape, _ in told]} of it ({one.claim.text}): "
                    )
                    raise Unlike(f"{one.listed.name}: {stored if len(told) > 1 else ''}{wrong}") from wrong
            found.append(known[key])
        return found

    def _prints(self, layouts: Sequence[ParamLayout], fingerprint: Callable[[Tensor], int]) -> list[int]:
        """Fingerprints of this rank's storage of the parameters that have replicas."""
        return [
            fingerprint(local_if_any(one.listed.param))
            for one, layout in zip(self._mine, layouts, strict=True)
            if layout.has_replicas
        ]

    def _compare(self, layouts: Sequence[ParamLayout], prints: Sequence[Sequence[int]]) -> None:
        """Raise Unlike if replicas differ."""
        replicated = [(one, layout) for one, layout in zip(self._mine, layouts, strict=True) if layout.has_replicas]
        for number, (one, layout) in enumerate(replicated):
            seen: dict[object, tuple[int, int]] = {}
            for rank, of_rank, theirs in zip(layout.ranks, layout.held, prints, strict=True):
                pieces = tuple(held.piece for held in of_rank if held.piece.numel)
                first, wanted = seen.setdefault(pieces, (rank, theirs[number]))
                if pieces and theirs[number] != wanted:
                    raise Unlike(
                        f"{one.listed.name}: ranks {first} and {rank} should hold replicas ({one.claim.text}) but "
                        "their values differ. Broadcast the weights first; or, if each rank has its own (experts), put "
                        "it in a group with rank_local=True"
                    )


# ---------------------------------------------------------------------------------------------- before each call


class World:
    """The default process group of the time at which it is made; keeps none alive. In another one ranks have other
    numbers."""

    def __init__(self) -> None:
        group = default_group()
        self._group = None if group is None else weakref.ref(group)

    @property
    def is_current(self) -> bool:
        """True as long as that group is the default one."""
        group = default_group()
        return self._group is None if group is None else self._group is not None and self._group() is group


class KeptTable:
    """The part of a table that outlives a call.

    Attributes:
        component: All ranks that vote together.
        token: Bytes that no other table of these ranks has.
        sets: Set of ranks that share parameters -> numbers of these, small sets first; without sets of one rank.
        world: That in which it was made; in another one it is of no use.
    """

    def __init__(self, table: Table) -> None:
        self.component, self.token = table.component, table.token
        self.sets = {ranks: numbers for ranks, numbers in table.sets.items() if len(ranks) > 1}
        self.world = World()


_K = TypeVar("_K", bound=KeptTable)


class Call(ABC, Generic[_K]):
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
    def known(self) -> _K | None:
        """The table of the last call, if this one names the same ranks beyond."""

    @abstractmethod
    def is_current(self, kept: _K) -> bool:
        """True if it was made for just these parameters, layouts and options."""

    def before(self) -> Ranks | None:
        """The ranks that this one voted with last, if it has no table; None: never, or their numbers are others now."""
        return None

    @abstractmethod
    def listed(self) -> list[Listed]:
        """The parameters for a new table."""

    @abstractmethod
    def waiting(self) -> list[tuple[str, Tensor, Group]]:
        """Name, tensor and group of all parameters whose sharers may wait for this rank, also if some of them cannot be
        listed."""

    @abstractmethod
    def made(self, table: Table) -> tuple[_K, Any]:
        """Make what is to be kept of a new table, and what all other ranks are told of it."""

    @abstractmethod
    def heard(self, kept: _K, everyone: Sequence[Any]) -> None:
        """Complete a new table by what each rank of the component tells of it, and keep it."""

    @abstractmethod
    def read(self, kept: _K) -> Ballot:
        """Read all that the call depends on, for the vote; with flags beside what is wrong. Changes nothing."""

    @abstractmethod
    def lines(self, kept: _K, ranks: Ranks) -> list[Any]:
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


def agree(call: Call[_K], fault: Fault, fresh: _K | None = None) -> tuple[_K, Verdict]:
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
                last = call.known()
                kept = last if last is not None and last.world.is_current else None
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
        fresh = _bind(call, _sharers_of(call.waiting, fault), before, fault)


# ----------------------------------------------------------------------------------------------------- finding a table


def renewed(call: Call[_K], fault: Fault) -> _K:
    """A new table, whatever this rank knows. Collective over the component: ranks that have one hear of it in their
    vote."""
    sharers = _sharers_of(call.waiting, fault)
    return _bind(call, sharers, _open(call, sharers, fault), fault)


def _open(call: Call[_K], sharers: _Sharers, fault: Fault) -> Ranks | None:
    """Tell those who may have a table that this rank has none, see [Note: who votes]. Collective over each of its
    largest sets; returns the component, if all of it has heard."""
    sets: list[Ranks] = []
    beyond = () if call.beyond is None else (call.beyond,)
    for _ in range(2):  # as in `_sharers_of`
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


def _bind(call: Call[_K], sharers: _Sharers, before: Ranks | None, fault: Fault) -> _K:
    """Make a table, and tell each other what else there is to know. Collective over the component."""
    listed: list[Listed] = []
    kept: _K | None = None
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
    call: Call[_K], kept: _K, digests: Mapping[Ranks, bytes], fault: Fault, verdict: Verdict
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
