"""Agreement of ranks: on one layout table of their parameters, and before each call over it that all go on alike.

A step, clipping of gradients and QK-clip are such calls. Each says what it depends on (`Call`); `agree` is the one way
in which ranks find out whether they go on, and `bind` makes the table: every rank says what it has of each parameter,
and all make the same table of it.

[Note: describing together]
    Each rank first describes its parameters alone, and tells the whole component who shares them with it. From that
    every rank knows all sets of sharers. Then all tell each other their claims, and a digest of what the ranks of each
    set must have alike; the layout is a pure function of the claims of its set. Last they compare replicas. Whatever
    goes wrong on a rank is data: it travels in the next message in place of what that would have been, and everybody
    raises it.

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
    digest_of,
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
from shardmuon.layout.mesh import Extent
from shardmuon.layout.table import ParamLayout
from shardmuon.layout.views import view_of


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


class _Said(NamedTuple):
    """Message of a rank about the parameters that it shares with a set of ranks.

    Attributes:
        digest: Of the lines that all of these ranks must have alike.
        extents: What may differ: the extent of each claim.
        group: Name of a process group that it knows over these ranks; "" if there is none.
    """

    digest: bytes
    extents: list[Extent]
    group: str


_Sharers = Mapping[Ties, tuple[Ranks, ...]]  # who shares parameters with this rank -> the sets in which they talk
_Numbers = Mapping[Ranks, Sequence[int]]  # set of ranks -> numbers of the parameters that they share


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


def sharers_of(params: Callable[[], Sequence[tuple[str, Tensor, Group]]], fault: Fault) -> _Sharers:
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
    mine, table = list[_Described](), list[Table]()
    if sharers is None:
        sharers = sharers_of(lambda: [(one.name, one.param, one.group) for one in listed], fault)
    with fault:
        mine = describe(listed)
        sharers = {**sharers, **{one.ties: one.ties.sets for one in mine}}
    sets = tuple(dict.fromkeys([*itertools.chain(*sharers.values()), *beyond]))
    known = discover(rank, Entry(sets, fault.text, _Facts(tuple(sharers), stamp, os.urandom(8))), before, fault.cause)
    component, grids, numbers = tuple(known), dict[Ties, Grid](), dict[Ranks, list[int]]()
    lines, said = dict[Ranks, list[str]](), dict[Ranks, _Said]()
    with fault:
        grids = grids_of({other: theirs.facts.ties for other, theirs in known.items()})
        numbers = _numbers(mine, {ties: grids[ties] for ties in sharers})
        lines = {ranks: [_line(mine[n], fingerprint is not None) for n in of_set] for ranks, of_set in numbers.items()}
        for ranks, of_set in numbers.items():
            said[ranks] = _Said(digest_of(lines[ranks]), [mine[n].claim.extent for n in of_set], groups.get(ranks, ""))
    everyone = dict(zip(component, gather(said, component, fault.text, fault.cause), strict=True))
    unlike: Ranks | None = None
    with fault:
        unlike = _unlike({of: {ranks: one.digest for ranks, one in theirs.items()} for of, theirs in everyone.items()})
    if unlike is not None:
        told = gather(lines.get(unlike, []), component, fault.text, fault.cause)
        raise Refused(_unlike_lists(unlike, [told[component.index(other)] for other in unlike]))
    layouts, replicated, prints = list[ParamLayout](), dict[Ranks, list[int]](), dict[Ranks, list[int]]()
    with fault:
        layouts = _layouts(mine, numbers, everyone, grids)
        if fingerprint is not None:
            replicated = {ranks: [n for n in of_set if layouts[n].has_replicas] for ranks, of_set in numbers.items()}
            for ranks, of_set in replicated.items():
                prints[ranks] = [fingerprint(local_if_any(mine[number].listed.param)) for number in of_set]
    found = dict(zip(component, gather(prints, component, fault.text, fault.cause), strict=True))
    with fault:
        for ranks, of_set in replicated.items():
            _compare([(mine[n], layouts[n]) for n in of_set], [found[other][ranks] for other in ranks])
        made = Table(
            component,
            tuple(one.listed for one in mine),
            tuple(one.claim for one in mine),
            tuple(layouts),
            {ranks: tuple(of_set) for ranks, of_set in numbers.items() if of_set},
            _groups(said, everyone),
            {other: theirs.facts.stamp for other, theirs in known.items()},
            digest_of([theirs.facts.nonce for theirs in known.values()]),
        )
        table.append(made)
    gather(None, component, fault.text, fault.cause)
    return table[0]


def _numbers(mine: Sequence[_Described], grids: Mapping[Ties, Grid]) -> dict[Ranks, list[int]]:
    """The sets of sharers that this rank is in, small ones first, as all ranks go through them; with the numbers of
    their parameters."""
    numbers: dict[Ranks, list[int]] = {union(grid): [] for grid in grids.values()}
    for number, one in enumerate(mine):
        numbers[union(grids[one.ties])].append(number)
    return {ranks: numbers[ranks] for ranks in sorted(numbers, key=lambda ranks: (len(ranks), ranks))}


def _line(one: _Described, compared: bool) -> str:
    """Text about a parameter that every sharing rank must list alike. `compared`: its replicas are."""
    shape, *form = one.claim.form
    view = (f"{key}={value!r}" for key, value in sorted((one.listed.view or {}).items()))
    sizes = f"{shape}".replace("-1", "any")  # along a dim that is cut in parts of any size
    about = f'"{one.listed.identity or "a parameter"}: {sizes}, {one.claim.text}"'
    return "; ".join((about, f"{form}", f"replicas_compared={compared}", *one.listed.options.split(" "), *view))


def _unlike_lists(ranks: Ranks, everyone: Sequence[Sequence[str]]) -> str:
    """Message on the first parameter that some rank of a set lists in another way than the first one; of its text what
    is alike is left out."""
    first = everyone[0]
    rank, theirs = next((rank, lines) for rank, lines in zip(ranks, everyone, strict=True) if lines != first)
    if len(first) != len(theirs):
        longer, shorter = sorted((first, theirs), key=len, reverse=True)
        lacking = next((line for line in longer if line not in shorter), longer[-1]).split("; ")[0]
        about, texts = "", [f"{len(first)} parameters", f"{len(theirs)}; one of them lacks {lacking}"]
    else:
        one, other = next((a.split("; "), b.split("; ")) for a, b in zip(first, theirs, strict=True) if a != b)
        pairs = (one, other), (other, one)
        texts = [" ".join(part for part in mine if part not in others) for mine, others in pairs]
        about = f"{one[0]}: " if one[0] == other[0] else ""
    return (
        f"ranks {ranks} share parameters but describe them differently: {about}rank {ranks[0]} lists {texts[0]}, rank "
        f"{rank} lists {texts[1]}. Every rank must give the optimizer the same parameters, order and options"
    )


def _groups(said: Mapping[Ranks, _Said], everyone: Mapping[int, Mapping[Ranks, _Said]]) -> dict[Ranks, str]:
    """Sets whose ranks all know one process group over them -> its name."""
    names = {ranks: {everyone[rank][ranks].group for rank in ranks} for ranks in said}
    return {ranks: own.group for ranks, own in said.items() if own.group and names[ranks] == {own.group}}


def _layouts(
    mine: Sequence[_Described],
    numbers: _Numbers,
    everyone: Mapping[int, Mapping[Ranks, _Said]],
    grids: Mapping[Ties, Grid],
) -> list[ParamLayout]:
    """Layout of each parameter; those that lie alike share one object."""
    known: dict[object, ParamLayout] = {}
    found: dict[int, ParamLayout] = {}
    for ranks, of_set in numbers.items():
        for number, *told in zip(of_set, *(everyone[rank][ranks].extents for rank in ranks), strict=True):
            one = mine[number]
            key = one.engine, one.claim.form, one.ties, tuple(told), repr(one.listed.view)
            if key not in known:
                known[key] = _layout(one, dict(zip(ranks, told, strict=True)), grids[one.ties])
            found[number] = known[key]
    return [found[number] for number in range(len(mine))]


def _layout(one: _Described, told: Mapping[int, Extent], grid: Grid) -> ParamLayout:
    try:
        shape, held = one.engine.stored(one.claim.form, told, grid)
        return ParamLayout(view_of(shape, one.listed.view), tuple(told), tuple(held[rank] for rank in told))
    except ValueError as wrong:
        stored = (
            f"ranks {(*told,)} store shapes {[extent.shape for extent in told.values()]} of it ({one.claim.text}): "
        )
        raise Unlike(f"{one.listed.name}: {stored if len(told) > 1 else ''}{wrong}") from wrong


def _compare(replicated: Sequence[tuple[_Described, ParamLayout]], prints: Sequence[Sequence[int]]) -> None:
    """Raise Unlike if replicas of some parameters differ. `prints`: of each rank that shares them."""
    for (one, layout), *of_each in zip(replicated, *prints, strict=True):
        seen: dict[object, tuple[int, int]] = {}
        for (rank, pieces), value in zip(layout.pieces.items(), of_each, strict=True):
            first, wanted = seen.setdefault(pieces, (rank, value))
            if pieces and value != wanted:
                raise Unlike(
                    f"{one.listed.name}: ranks {first} and {rank} should hold replicas ({one.claim.text}) but their "
                    "values differ. Broadcast the weights first; if each rank has its own (experts), put it in a group "
                    "with process_group=(), tp_group=(); if they are shards over a tp_group, write "
                    "param.tensor_model_parallel, param.partition_dim = True, <the dim that is cut>"
                )


# ---------------------------------------------------------------------------------------------- before each call


def current_world() -> object:
    """The default process group, kept alive by nobody here: in another one ranks have other numbers."""
    group = default_group()
    return None if group is None else weakref.ref(group)


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
        self.world = current_world()


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

    def waiting(self) -> list[tuple[str, Tensor, Group]]:
        """Name, tensor and group of all parameters whose sharers may wait for this rank, also if some of them cannot be
        listed."""
        return [(one.name, one.param, one.group) for one in self.listed()]

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
        """Message on the lines of the ranks of a set; None for a rank that has no such set."""
        told = [lines or ["nothing to say"] for lines in everyone]
        each = zip(ranks, told, strict=True)
        pairs = ((rank, *pair) for rank, theirs in each for pair in zip(told[0], theirs, strict=False))
        rank, one, other = next(pair for pair in pairs if pair[1] != pair[2])
        return (
            f"ranks {ranks} {self.doing} together but differ: rank {ranks[0]} has {one!r}, rank {rank} has {other!r}. "
            f"{self.rule}"
        )


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
                kept = last if last is not None and last.world == current_world() else None
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
        if not verdict.flags & Flag.STALE:
            _refuse_unless_stale(call, kept, ballot.digests or {}, fault, verdict)
        before = None if verdict.flags & Flag.BEYOND else kept.component
        fresh = _bind(call, sharers_of(call.waiting, fault), before, fault)


# ----------------------------------------------------------------------------------------------------- finding a table


def renewed(call: Call[_K], fault: Fault) -> _K:
    """A new table, whatever this rank knows. Collective over the component: ranks that have one hear of it in their
    vote."""
    sharers = sharers_of(call.waiting, fault)
    return _bind(call, sharers, _open(call, sharers, fault), fault)


def _open(call: Call[_K], sharers: _Sharers, fault: Fault) -> Ranks | None:
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
