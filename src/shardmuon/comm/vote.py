"""The vote: ranks discover which ranks are connected, report errors to each other in one short message, and agree to
make a collective call.

A step, gradient clipping and QK-clip are such calls. Each implements `Call`, which reports the inputs that ranks must
agree on; `Call.agree` decides whether all ranks proceed or all raise.

[Note: why a component votes together]
    A rank belongs to sets of ranks: those of a mesh axis, of a process group, or that share a parameter. If a rank in
    two sets voted first in one and then in the other, it might learn of an error in the second set after the ranks of
    the first have proceeded. This happened for 12 of 16 errors on a 4 x 4 mesh of rows and columns, and for 2 of 4 on a
    chain of pairs. Therefore all ranks that are connected through sets, directly or indirectly (a connected component),
    take part in one vote. Before the first vote, each rank must discover its component, by flooding: in each round,
    every rank sends all entries that it knows to each of its sets, where the entry of a rank lists the sets to which
    the rank belongs. A rank knows the whole component once it has the entry of every rank that any entry names. From
    these entries it computes the round after which the last rank has them all, and all ranks stop after that round.

[Note: the message]
    A message has the rank's phase (the operation on which it votes), flags, a sum of digests, and presence bits (for
    gradients that only some ranks have). Phases, flags and bits are merged by "or".
    Digests must be equal within each set of ranks, and one sum checks all sets at once: for each of its sets S of n
    ranks, the first rank adds (n - 1) h(S, digest) modulo 2^128, and each other rank subtracts h(S, digest), where h is
    a hash of both, of the version of the format and of the number of presence bits. Equal digests cancel. Unequal
    digests leave a sum of different hashes with nonzero coefficients from -n to n, which is 0 with a probability of at
    most n / 2^128. Messages with different phases can be merged: they show in the merged phases.

[Note: who votes]
    Before each call, all ranks that are connected through parameters and process groups (the component) vote. They need
    a binding: data that they have built together, such as a plan, and cache from one call to the next. A rank without a
    cached binding reports this in a vote with the ranks with which it last voted. If it has never voted, it does not
    know its component either. Then it reports this in votes of its largest sets (usually one set, the component
    itself), so that ranks with a cached binding learn of it. After that, all ranks rebuild the binding.
"""

from __future__ import annotations

import hashlib
import math
import pickle
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntFlag
from functools import partial
from types import TracebackType
from typing import Any, Generic, NamedTuple, TypeVar

from shardmuon._torch import default_group
from shardmuon.comm.groups import LARGEST, Ranks, lane_of, made_under, my_rank, num_ranks
from shardmuon.errors import Refused, fault_text, ranks_text

_T = TypeVar("_T")
_VERSION = 1
_MODULUS = 1 << 128
MOST_BITS = 8 * (LARGEST - 256)  # presence bits that fit in a message besides its other fields


class Unlike(ValueError):
    """Error that several ranks find in the same gathered data, such as a mismatch. Its message names no rank as the one
    at fault."""


class Fault:
    """The first error on this rank since the ranks last exchanged errors.

    As a context manager, it catches and records any exception, so that the rank still reaches the next collective.

    Attributes:
        text: Error text to send to the other ranks; None: no error.
        cause: The exception behind `text`, if there is one.
    """

    text: str | None = None
    cause: BaseException | None = None

    def add(self, text: str | None, cause: BaseException | None = None, *, own: bool = True) -> None:
        """Record an error text unless one is recorded already. If `own`, the text gets the prefix "rank R: " with this
        rank."""
        if text is not None and self.text is None:
            self.text, self.cause = f"rank {my_rank()}: {text}" if own and num_ranks() > 1 else text, cause

    def __enter__(self) -> Fault:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, Refused):  # raised on all ranks, so its text already names the rank at fault
            self.add(str(error), error.cause, own=False)
        elif error is not None:
            self.add(fault_text(error), error, own=not isinstance(error, Unlike))
        return True

    def settle(self, component: Ranks, phase: Phase, *, asked: bool = False) -> bool:
        """Raise on all ranks of a component if any of them has an error. Collective.

        Args:
            component: All ranks that make this call.
            phase: The operation that follows.
            asked: This rank's contribution to the result.

        Returns:
            `asked`, merged by "or" over all ranks.

        Raises:
            Refused: Some rank has an error, or votes on another operation. Raised on every rank, with the same text.
            ExchangeError: A rank did not answer in time, or its process has ended.
        """
        flags = Flag.NONE if self.text is None else Flag.FAULT
        verdict = vote(Ballot(phase, flags, presence=int(asked)), component)
        if verdict.flags or verdict.phase != phase:
            gather({}, component, self)  # after a failed vote, ranks that voted on other operations gather, too
            raise _other_call(component, verdict)
        return bool(verdict.presence)


class Phase(IntFlag):
    """The operation that a rank votes on. A verdict holds the phases of all ranks, merged by "or"."""

    DISCOVER = 1
    STEP = 4
    CLIP = 8
    QK_CLIP = 16
    UNSCALE = 256


class Flag(IntFlag):
    """Conditions that a rank reports in a vote, merged by "or" over ranks.

    Attributes:
        FAULT: The rank has an error and cannot proceed.
        STALE: The rank's cached binding is missing or does not match its parameters.
        AUDIT: The rank requests an audit of this step.
        UNLIKE: The digests of some set differ. Only a verdict has this flag.
        BEYOND: The rank also belongs to sets of ranks that do not take part in this vote.
    """

    NONE = 0
    FAULT = 1
    STALE = 2
    AUDIT = 8
    UNLIKE = 16
    BEYOND = 32


class Ballot(NamedTuple):
    """One rank's message in a vote; or a verdict, the merged message of all ranks.

    Attributes:
        phase: The operation on which the rank votes.
        flags: Conditions on this rank.
        digests: Set of ranks -> digest of the data that must be equal on these ranks, for each set of this rank.
        presence: One bit per fact that only some ranks know ("has this gradient"); merged by "or".
        num_bits: Number of bits in `presence`, equal on all ranks.
    """

    phase: Phase
    flags: Flag = Flag.NONE
    digests: Mapping[Ranks, bytes] | None = None
    presence: int = 0
    num_bits: int = 0


_Message = tuple[int, int, int, int]  # phase, flags, sum of digests, presence bits


def vote(ballot: Ballot, component: Ranks) -> Ballot:
    """Merge the ballots of all ranks into a verdict, which all of them return. Collective over the component.

    Raises:
        ExchangeError: A rank did not answer in time, or its process has ended.
    """
    if len(component) == 1:
        return ballot
    lane, total = lane_of(component), 0
    for ranks, digest in (ballot.digests or {}).items():
        factor = len(ranks) - 1 if component[lane.me] == ranks[0] else -1
        total += factor * int.from_bytes(digest_of((_VERSION, ballot.num_bits, ranks, digest)), "little")
    mine = int(ballot.phase), int(ballot.flags), total % _MODULUS, ballot.presence
    phase, flags, total, presence = lane.merge(mine, _merged, f"a vote ({ballot.phase.name})")
    return Ballot(Phase(phase), Flag(flags) | (Flag.UNLIKE if total else Flag.NONE), presence=presence)


def _merged(a: _Message, b: _Message) -> _Message:
    return a[0] | b[0], a[1] | b[1], (a[2] + b[2]) % _MODULUS, a[3] | b[3]


def digest_of(value: object) -> bytes:
    """Hash the `repr` of plain data to 16 bytes. Equal data has the same hash in every process."""
    return hashlib.blake2b(repr(value).encode(), digest_size=16).digest()


def _told_by(everyone: Iterable[str | None]) -> list[str]:
    """Merge the error texts of all ranks: each different text once, with the ranks that reported it, as in "ranks 0-7:
    out of memory"."""
    found: dict[str, set[int]] = {}
    for said in everyone:
        if said is not None:
            signed = re.match(r"rank (\d+): (.*)", said, re.DOTALL)
            found.setdefault(signed[2] if signed else said, set()).update({int(signed[1])} if signed else ())
    return [
        f"rank{'s' * (len(of) > 1)} {ranks_text(tuple(sorted(of)))}: {text}" if of else text
        for text, of in found.items()
    ]


def gather(value: _T, ranks: Ranks, fault: Fault | None = None) -> list[_T]:
    """All-gather a picklable value. Collective over `ranks`.

    Args:
        value: This rank's value; ignored if `fault` holds an error.
        ranks: The ranks that take part.
        fault: This rank's error, if it has one.

    Returns:
        The value of each rank, in order of `ranks`.

    Raises:
        Refused: Some rank has an error. Raised on every rank, with the same text.
        ExchangeError: A rank did not answer in time, or its process has ended.
    """
    fault, sent = fault or Fault(), b""
    everyone = [(fault.text, value)]
    if len(ranks) > 1:
        with fault:
            sent = pickle.dumps((None, value))
        if fault.text is not None:
            sent = pickle.dumps((fault.text, None))
        everyone = lane_of(ranks).share(sent, "gathering values")
    if said := _told_by(theirs for theirs, _ in everyone):
        raise Refused("; ".join(said), fault.cause)
    return [theirs for _, theirs in everyone]


def _other_call(component: Ranks, verdict: Ballot) -> Refused:
    return Refused(f"ranks {ranks_text(component)} do not make the same call: {verdict.phase!r}, {verdict.flags!r}")


def run_together(run: Callable[[], _T], ranks: Ranks | None = None) -> _T:
    """Call `run` and return its result, unless it raises on any of these ranks (default: all). Collective over them.

    Raises:
        Refused: `run` raised an exception of any class on some rank. Raised on every rank, with the same text.
        ExchangeError: A rank did not answer in time, or its process has ended.
    """
    fault, found = Fault(), list[_T]()
    with fault:
        found.append(run())
    gather(None, tuple(range(num_ranks())) if ranks is None else ranks, fault)
    return found[0]


# ------------------------------------------------------------------------------------------------ component discovery


class _Entry(NamedTuple):
    """One rank's data, sent to all connected ranks (its component) during discovery.

    Attributes:
        sets: The sets of ranks that the rank belongs to.
        fault: The rank's error text, or None.
        facts: Picklable data for all other ranks.
    """

    sets: tuple[Ranks, ...]
    fault: str | None = None
    facts: Any = None


_Known = dict[int, _Entry]  # global rank -> its entry


def discover(sets: tuple[Ranks, ...], facts: _T, fault: Fault, before: Ranks | None = None) -> dict[int, _T]:
    """Discover the component of this rank: all ranks connected to it. Collective over the component.

    Args:
        sets: The sets of ranks that this rank belongs to.
        facts: Picklable data for all other ranks.
        fault: This rank's error, if it has one.
        before: The previous component, if there was one. Its ranks compare their sets first, so that a set which only
            some of its ranks list raises an error that names the set. Without `before`, ranks that list such a set wait
            until the timeout.

    Returns:
        The facts of every rank of the component, equal on all of them.

    Raises:
        Refused: Some rank has an error, or a set is not listed by all of its ranks. Raised on every rank, with the same
            text.
        ExchangeError: A rank did not answer in time, or its process has ended.
    """
    known = {my_rank(): _Entry(sets, fault.text, facts)}
    if before is not None and len(before) > 1:
        everyone = lane_of(before).share(pickle.dumps(known[my_rank()]), "comparing groups")
        _refuse(dict(zip(before, everyone, strict=True)), fault)
    num_done = 0
    while num_done < _num_rounds(known):  # all ranks of a component stop after the same round
        for ranks in in_order(sets):
            for heard in lane_of(ranks).share(pickle.dumps(known), "finding out who belongs together"):
                known.update(heard)
        num_done += 1
    _refuse(known, fault)
    return {rank: known[rank].facts for rank in sorted(known)}


def in_order(sets: Iterable[Ranks]) -> list[Ranks]:
    """Sort sets into the order in which every rank communicates: small sets first. Drops sets of one rank."""
    return sorted({ranks for ranks in sets if len(ranks) > 1}, key=lambda ranks: (len(ranks), ranks))


def _num_rounds(known: _Known) -> float:
    """Compute the number of rounds until every rank in `known` has the entry of every rank it can reach; infinite while
    `known` lacks the entry of a rank that it names."""
    order = in_order(ranks for entry in known.values() for ranks in entry.sets)
    if not known.keys() >= set().union(*order):
        return math.inf
    hears, before, number = {rank: frozenset({rank}) for rank in known}, dict[int, frozenset[int]](), -1
    while hears != before:
        before, number = dict(hears), number + 1
        for ranks in order:
            hears.update(dict.fromkeys(ranks, frozenset().union(*(hears[rank] for rank in ranks))))
    return number


def _refuse(known: _Known, fault: Fault) -> None:
    """Raise Refused if any rank reports an error, or if a set is not listed by all of its ranks."""
    said = _told_by(known[rank].fault for rank in sorted(known))
    for ranks in in_order(ranks for entry in known.values() for ranks in entry.sets):
        lists = [rank for rank in ranks if rank in known and ranks in known[rank].sets]
        lacks = [rank for rank in ranks if rank in known and ranks not in known[rank].sets]
        if lists and lacks:
            said.append(
                f"rank {lists[0]} shares parameters or a process group with ranks {ranks}, of which rank {lacks[0]} "
                "does not know. Give every one of these ranks the same groups and parameters"
            )
    if said:
        raise Refused("; ".join(dict.fromkeys(said)), fault.cause)


# ------------------------------------------------------------------------------------ agreement before each call


def current_world() -> bytes | None:
    """Token of the default process group; None without one. Ranks of two default groups cannot be compared."""
    world = default_group()
    return None if world is None else made_under(world).token


class Agreed:
    """A binding: data that ranks have built together and cache from one call to the next.

    Attributes:
        component: All ranks that vote together.
        token: Bytes that identify the binding, equal on all of its ranks.
        sets: Set of ranks that share parameters -> indices of these parameters, small sets first; without sets of one
            rank.
        world: Token of the default process group when the binding was made. Under any other one, the binding is
            invalid.
    """

    def __init__(self, component: Ranks, token: bytes, sets: Mapping[Ranks, tuple[int, ...]]) -> None:
        self.component, self.token = component, token
        self.sets = {ranks: numbers for ranks, numbers in sets.items() if len(ranks) > 1}
        self.world = current_world()


_K = TypeVar("_K", bound=Agreed)


class Call(ABC, Generic[_K]):
    """One rank's side of a collective call: a step, gradient clipping, QK-clip. Except for `renew`, its methods run
    inside a guard (`Fault`) that records exceptions, so they may raise any exception.

    Attributes:
        phase: The operation to vote on.
        renews: What to do if ranks have different cached bindings. True: rebuild them. False: raise an error.
        doing: Verb for error messages ("clip").
        rule: Sentence for error messages that says what must be the same on all of these ranks.
    """

    phase: Phase
    renews = True
    doing: str
    rule: str

    @abstractmethod
    def known(self) -> _K | None:
        """Return the cached binding of the last call; None if there is none, or if it does not apply to this call."""

    @abstractmethod
    def is_current(self, kept: _K) -> bool:
        """True if the cached binding `kept` matches the current parameters, layouts and options."""

    def before(self) -> Ranks | None:
        """Return the ranks of the last vote, for a rank without a cached binding. None if it has not voted yet under
        the current default process group."""
        return None

    @abstractmethod
    def sets(self, fault: Fault) -> list[Ranks]:
        """Return the sets whose ranks may wait for this rank. Records in `fault` why a set cannot be determined."""

    @abstractmethod
    def renew(self, before: Ranks | None, fault: Fault) -> _K:
        """Rebuild the cached binding. Collective over the component. Runs outside any guard, so it records exceptions
        in `fault` itself. `before` has the ranks that last voted together, if known."""

    @abstractmethod
    def read(self, kept: _K) -> Ballot:
        """Read all inputs of the call and return the ballot, with flags for conditions such as a due audit. Changes
        nothing."""

    @abstractmethod
    def lines(self, kept: _K, ranks: Ranks) -> list[Any]:
        """Return text lines for the inputs of a set's digest, to show where ranks differ."""

    def difference(self, ranks: Ranks, everyone: Sequence[list[Any] | None]) -> str:
        """Format an error message about the first difference between the ranks of a set. `everyone` has the lines of
        each rank, or None for a rank that does not list the set."""
        told = [lines or ["nothing to say"] for lines in everyone]
        each = zip(ranks, told, strict=True)
        pairs = ((rank, *pair) for rank, theirs in each for pair in zip(told[0], theirs, strict=False))
        rank, one, other = next(pair for pair in pairs if pair[1] != pair[2])
        return (
            f"ranks {ranks} {self.doing} together but differ: rank {ranks[0]} has {one!r}, rank {rank} has {other!r}. "
            f"{self.rule}"
        )

    def agree(self, fault: Fault, fresh: _K | None = None) -> tuple[_K, Ballot]:
        """Vote until all ranks of the component can proceed, rebuilding stale bindings. Collective over the component.

        Args:
            fault: This rank's error so far, if it has one.
            fresh: A binding that all ranks know to be current; None: use the cached one.

        Returns:
            The binding for the call, and the verdict of the vote.

        Raises:
            Refused: Some rank has an error, or ranks differ. Raised on every rank; nothing has changed.
            ExchangeError: A rank did not answer in time, or its process has ended.
        """
        while True:
            kept, ballot, flags = fresh, Ballot(self.phase), Flag.NONE
            with fault:  # errors must not keep this rank from voting, since the other ranks wait for it
                if kept is None:
                    last = self.known()
                    kept = last if last is not None and last.world == current_world() else None
                    flags = Flag.NONE if kept is None or self.is_current(kept) else Flag.STALE
                if kept is not None and not flags:
                    ballot = self.read(kept)
            if kept is None:
                fresh = self.renewed(fault)
                continue
            if fault.text is not None:
                flags |= Flag.FAULT
            if flags:
                ballot = ballot._replace(flags=ballot.flags | flags)
            verdict = vote(ballot, kept.component)
            if verdict.flags in (Flag.NONE, Flag.AUDIT) and verdict.phase == self.phase:
                return kept, verdict
            if not verdict.flags & Flag.STALE:
                self._refuse_unless_stale(kept, ballot.digests or {}, fault, verdict)
            fresh = self.renew(None if verdict.flags & Flag.BEYOND else kept.component, fault)

    def renewed(self, fault: Fault) -> _K:
        """Rebuild the binding on a rank that has none. Collective over the component: ranks with a cached binding learn
        of the rebuild in their vote, see [Note: who votes]."""
        sets, component = list[Ranks](), None
        for _ in range(2):  # a second try after an interrupt, since the other ranks wait for this rank
            with fault:
                before = self.before()
                sets = in_order(self.sets(fault) if before is None else [before])
                sets = [ranks for ranks in sets if not any(set(ranks) < set(other) for other in sets)]
                break
        flags = Flag.STALE | (Flag.BEYOND if len(sets) > 1 else Flag.NONE)
        for ranks in sets:
            verdict = vote(Ballot(Phase.DISCOVER, flags), ranks)
            component = None if verdict.flags & Flag.BEYOND else ranks
        return self.renew(component, fault)

    def _refuse_unless_stale(self, kept: _K, digests: Mapping[Ranks, bytes], fault: Fault, verdict: Ballot) -> None:
        """Find out collectively why the vote failed, and raise Refused on every rank. If ranks have different cached
        bindings and `renews` is True, return on every rank instead, so that they are rebuilt."""
        component, token = kept.component, kept.token if self.renews else b""
        everyone = gather({(): token, **digests}, component, fault)
        if verdict.phase != self.phase:
            raise _other_call(component, verdict)
        if len({theirs[()] for theirs in everyone}) > 1:
            return
        refuse_unlike(dict(zip(component, everyone, strict=True)), partial(self.lines, kept), self.difference, fault)
        raise _other_call(component, verdict)


def refuse_unlike(
    everyone: Mapping[int, Mapping[Ranks, bytes]],
    lines: Callable[[Ranks], list[Any]],
    text: Callable[[Ranks, list[Any]], str],
    fault: Fault,
) -> None:
    """Raise Refused on every rank if the digests of a set differ. Collective over the component.

    Args:
        everyone: Rank -> set -> digest, for all ranks of the component.
        lines: Function that returns this rank's lines for a set, from which its digest was made.
        text: Function that describes the difference between the lines of the ranks of a set.
        fault: This rank's error, if it has one.
    """
    component, unlike, mine = tuple(everyone), None, None
    with fault:
        for ranks in in_order(ranks for theirs in everyone.values() for ranks in theirs):
            # unlike digests, or a digest on only some of the ranks
            if len({everyone[rank].get(ranks) for rank in ranks if rank in everyone}) > 1:
                unlike = ranks
                break
        if unlike is not None and unlike in everyone[my_rank()]:
            mine = lines(unlike)
    told = dict(zip(component, gather(mine, component, fault), strict=True))
    if unlike is not None:
        raise Refused(text(unlike, [told[rank] for rank in unlike if rank in told]))
