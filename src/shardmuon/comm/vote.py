"""The vote: how ranks find out who belongs together, tell each other in one short message what is wrong, and agree to a
call that all of them make.

A step, clipping of gradients and QK-clip are such calls. Each says what it depends on (`Call`); `agree` is the one way
in which ranks find out whether they go on.

[Note: why a component votes together]
    Ranks come in sets: a mesh's axis, a process group, the ranks that share a parameter. A rank in two sets that asks
    them one after the other may learn of a fault in the second when the first has gone on: 12 of 16 faults on a 4 x 4
    mesh of rows and columns, 2 of 4 on a chain of pairs. So all ranks that sets connect, directly or over others, say
    in one vote what is wrong. Before they can, each must know all of them. It floods: every rank tells each of its
    sets all that it has heard, round by round. A rank knows that it has heard everything when it has the entry of
    every rank that any entry names. Then it can count, from the entries alone, the round after which the last rank
    knows as much, and everybody stops after that round.

[Note: the message]
    It says the version of its form, in which phase a rank is, flags, a sum of digests and presence bits. Phases, flags
    and bits are merged by "or". Digests must be equal within sets of ranks; that one message tells for all sets at
    once: for each of its sets S of n ranks, the first rank adds (n - 1) h(S, digest) modulo 2^128 and each other one
    subtracts h(S, digest), where h is a hash of both. So equal digests cancel. Unequal ones leave a sum of unlike
    hashes, each some -n to n times and none of them 0 times, which is 0 by an accident of n in 2^128 at most. Ranks in
    unlike phases, with unlike numbers of bits or of unlike versions understand each other's message: whoever merges
    them sets a flag.

[Note: who votes]
    All ranks that parameters and process groups connect, the component, vote before they do anything. A rank that keeps
    nothing of an earlier call says so in a vote of the ranks that it voted with last. If it has never voted, it does
    not know the component either: it says so in a vote of its largest sets, mostly that very component, where those
    that keep something hear it. Then all make it anew.
"""

from __future__ import annotations

import hashlib
import math
import pickle
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import IntFlag
from types import TracebackType
from typing import Any, Generic, NamedTuple, TypeVar

from shardmuon._torch import default_group
from shardmuon.comm.groups import Ranks, my_rank, num_ranks
from shardmuon.comm.lanes import lane_of
from shardmuon.errors import Refused, fault_text, ranks_text, told_by

_T = TypeVar("_T")
_VERSION = 1
_MODULUS = 1 << 128


class Unlike(ValueError):
    """A flaw that several ranks find alike in what all of them have said: it is no single rank's."""


class Fault:
    """The first thing that went wrong on this rank since the ranks last settled.

    As a context manager it takes whatever is raised inside, of any class: what follows has to go on to the next talk.

    Attributes:
        text: Text for the other ranks; None: nothing is wrong.
        cause: The exception behind it.
    """

    text: str | None = None
    cause: BaseException | None = None

    def add(self, text: str | None, cause: BaseException | None = None, *, own: bool = True) -> None:
        """Note something, if nothing is noted yet. `own`: it is of this rank, which the others are told."""
        if text is not None and self.text is None:
            self.text, self.cause = f"rank {my_rank()}: {text}" if own and num_ranks() > 1 else text, cause

    def note(self, error: BaseException) -> None:
        """Note an exception of any class."""
        if isinstance(error, Refused):  # other ranks have raised it, too
            self.add(str(error), error.cause, own=False)
        else:
            self.add(fault_text(error), error, own=not isinstance(error, Unlike))

    def __enter__(self) -> Fault:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is not None:
            self.note(error)
        return True


class Phase(IntFlag):
    """The operation that a rank votes on. A verdict holds the phases of all ranks, merged by "or"."""

    DISCOVER = 1
    PLAN = 2
    STEP = 4
    CLIP = 8
    QK_CLIP = 16
    UNSCALE = 256


class Flag(IntFlag):
    """Conditions that a rank reports in a vote, merged by "or" over ranks.

    Attributes:
        FAULT: The rank cannot go on; it has a text for the others.
        STALE: The rank's plan does not fit its parameters, or it has none.
        AUDIT: The rank wants this step audited.
        UNLIKE: Messages of another version, or with another number of presence bits, met on their way.
        BEYOND: The rank is in sets beyond those that vote.
    """

    NONE = 0
    FAULT = 1
    STALE = 2
    AUDIT = 8
    UNLIKE = 16
    BEYOND = 32


class Ballot(NamedTuple):
    """One rank's message in a vote.

    Attributes:
        phase: The operation that it votes on.
        flags: Conditions on this rank.
        digests: Set of ranks -> digest of what these ranks must have alike. A rank lists each such set that it is in.
        presence: One bit a fact that only some ranks know ("has this gradient"); merged by "or".
        num_bits: How many bits `presence` has: the same on all ranks.
    """

    phase: Phase
    flags: Flag = Flag.NONE
    digests: Mapping[Ranks, bytes] | None = None
    presence: int = 0
    num_bits: int = 0


class Verdict(NamedTuple):
    """The result of a vote, the same on all ranks of the component.

    Attributes:
        phase, flags: Merged over all ranks.
        alike: Whether all digests are equal within their sets.
        presence: Bits that are set on any rank.
    """

    phase: Phase
    flags: Flag
    alike: bool
    presence: int


_Message = tuple[int, int, int, int, int, int]  # version, phase, flags, number of presence bits, sum of digests, bits


def vote(ballot: Ballot, component: Ranks) -> Verdict:
    """Merge one ballot of each rank into a verdict. Collective over all ranks of the component.

    Raises:
        ExchangeError: A rank did not answer in time, or its process has ended.
    """
    if len(component) == 1:
        return Verdict(ballot.phase, ballot.flags, True, ballot.presence)
    lane, total = lane_of(component), 0
    for ranks, digest in (ballot.digests or {}).items():
        factor = len(ranks) - 1 if component[lane.me] == ranks[0] else -1
        total += factor * int.from_bytes(digest_of((ranks, digest)), "little")
    mine = _VERSION, int(ballot.phase), int(ballot.flags), ballot.num_bits, total % _MODULUS, ballot.presence
    _, phase, flags, _, total, presence = lane.merge(mine, _merged, f"a vote ({ballot.phase.name})")
    return Verdict(Phase(phase), Flag(flags), total == 0, presence)


def _merged(a: _Message, b: _Message) -> _Message:
    version, phase, flags, num_bits, total, presence = b
    unlike = Flag.UNLIKE.value if (a[0], a[3]) != (version, num_bits) else 0
    total = (a[4] + total) % _MODULUS
    return a[0], a[1] | phase, a[2] | flags | unlike, max(a[3], num_bits), total, a[5] | presence


def digest_of(value: object) -> bytes:
    """16 bytes of the text of plain data, equal in every process."""
    return hashlib.blake2b(repr(value).encode(), digest_size=16).digest()


def gather(value: _T, ranks: Ranks, fault: Fault | None = None) -> list[_T]:
    """Every rank's value, in order of ranks. Collective over `ranks`.

    Args:
        value: Picklable; of no matter where something is wrong.
        fault: What keeps this rank from having a value.

    Raises:
        Refused: Some rank has a fault. On every rank, with the same text.
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
    if said := told_by(theirs for theirs, _ in everyone):
        raise Refused("; ".join(said), fault.cause)
    return [theirs for _, theirs in everyone]


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
        gather({}, component, fault)  # what is said in each refusal, whatever call it is of
        raise _other_call(component, verdict.phase)
    return bool(verdict.presence)


def _other_call(component: Ranks, found: Phase | Flag) -> Refused:
    return Refused(f"ranks {ranks_text(component)} do not make the same call: {found!r}")


def run_together(run: Callable[[], _T], ranks: Ranks | None = None) -> _T:
    """Call `run` and return its result if it raises on none of these ranks (default: all). Collective over them.

    Raises:
        Refused: `run` raised an exception of any class on some rank. Raised on every rank, with the same text.
        ExchangeError: A rank did not answer in time, or its process has ended.
    """
    fault, found = Fault(), list[_T]()
    with fault:
        found.append(run())
    gather(None, tuple(range(num_ranks())) if ranks is None else ranks, fault)
    return found[0]


# ----------------------------------------------------------------------------------------------- who belongs together


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


def discover(rank: int, entry: Entry, before: Ranks | None = None, cause: BaseException | None = None) -> Known:
    """The entry of every rank of the component, the same on each. Collective over the component.

    Args:
        rank: This one.
        entry: What it says of itself.
        before: The component so far, if the ranks had one. They compare their sets within it first, so that a set
            which only some of its ranks know is a fault with a name. Without one the others wait for their time-out.
        cause: The exception behind `entry.fault`.

    Raises:
        Refused: Some rank has a fault, or a set is not known to all of its ranks. On every rank, with the same text.
        ExchangeError: A rank did not answer in time, or its process has ended.
    """
    if before is not None and len(before) > 1:
        everyone = lane_of(before).share(pickle.dumps(entry), "comparing groups")
        _refuse(dict(zip(before, everyone, strict=True)), cause)
    known = {rank: entry}
    for ranks in _talks(entry.sets, known):
        for heard in lane_of(ranks).share(pickle.dumps(known), "finding out who belongs together"):
            known.update(heard)
    known = dict(sorted(known.items()))
    _refuse(known, cause)
    return known


def in_order(sets: Iterable[Ranks]) -> list[Ranks]:
    """Sets in the order in which every rank talks: small ones first. A set of one rank has nobody to talk to."""
    return sorted({ranks for ranks in sets if len(ranks) > 1}, key=lambda ranks: (len(ranks), ranks))


def _largest(sets: Sequence[Ranks]) -> list[Ranks]:
    """The sets that no other of these sets contains."""
    return [ranks for ranks in sets if not any(set(ranks) < set(other) for other in sets)]


def _talks(sets: Sequence[Ranks], known: Known) -> Iterator[Ranks]:
    """The sets with which a rank of these sets talks, one after the other, until `known` has the whole component.
    Whoever iterates tells each set what is known then, and adds what its ranks tell.

    All ranks of a component end after the same round, if each set is known to all of its ranks.
    """
    num_done = 0
    while num_done < _num_rounds(known):
        yield from in_order(sets)
        num_done += 1


def _num_rounds(known: Known) -> float:
    """Rounds until every rank of these has heard of every other one that it can hear of; endless if some rank that they
    name has not been heard of."""
    order = in_order(ranks for entry in known.values() for ranks in entry.sets)
    if not known.keys() >= set().union(*order):
        return math.inf
    hears, before, number = {rank: frozenset({rank}) for rank in known}, dict[int, frozenset[int]](), -1
    while hears != before:
        before, number = dict(hears), number + 1
        for ranks in order:
            hears.update(dict.fromkeys(ranks, frozenset().union(*(hears[rank] for rank in ranks))))
    return number


def _refuse(known: Known, cause: BaseException | None) -> None:
    """Raise Refused if anything is wrong in a component: what each rank reports, or a set that not all of its ranks
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
    if said:
        raise Refused("; ".join(dict.fromkeys(said)), cause)


# ---------------------------------------------------------------------------------------------- before each call


def current_world() -> object:
    """The default process group, kept alive by nobody here: in another one ranks have other numbers."""
    group = default_group()
    return None if group is None else weakref.ref(group)


class Agreed:
    """What ranks have made together for their calls, and keep from one to the next.

    Attributes:
        component: All ranks that vote together.
        token: Bytes that nothing else that these ranks have made has.
        sets: Set of ranks that share parameters -> numbers of these, small sets first; without sets of one rank.
        world: That in which it was made; in another one it is of no use.
    """

    def __init__(self, component: Ranks, token: bytes, sets: Mapping[Ranks, tuple[int, ...]]) -> None:
        self.component, self.token = component, token
        self.sets = {ranks: numbers for ranks, numbers in sets.items() if len(ranks) > 1}
        self.world = current_world()


_K = TypeVar("_K", bound=Agreed)


class Call(ABC, Generic[_K]):
    """One rank's side of a call that ranks make together: a step, clipping of gradients, QK-clip. All that it is asked
    runs in a guard, and may raise anything.

    Attributes:
        phase: For the vote.
        renews: True if ranks that have made different things make them anew; else they are refused.
        doing, rule: Words for messages: "clip", and what ranks that clip together must do alike.
    """

    phase: Phase
    renews = True
    doing: str
    rule: str

    @abstractmethod
    def known(self) -> _K | None:
        """What the last call has kept, if this one is made by the same ranks."""

    @abstractmethod
    def is_current(self, kept: _K) -> bool:
        """True if it was made for just these parameters, layouts and options."""

    def before(self) -> Ranks | None:
        """The ranks that this one voted with last, if it keeps nothing; None: never, or their numbers are others
        now."""
        return None

    @abstractmethod
    def sets(self, fault: Fault) -> list[Ranks]:
        """The sets whose ranks may wait for this one; notes what cannot be told."""

    @abstractmethod
    def renew(self, before: Ranks | None, fault: Fault) -> _K:
        """Make anew what is kept. Collective over the component, of which `before` has voted together; in no guard."""

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
    """What is kept for a call, once all ranks of its component have read what it depends on. Collective over them.

    Args:
        call: This rank's side.
        fault: What is wrong on this rank already.
        fresh: Kept things that all ranks know to be current.

    Returns:
        What is kept, and what all ranks have heard.

    Raises:
        Refused: On every rank; nothing has changed.
        ExchangeError: A rank did not answer in time, or its process has ended.
    """
    while True:
        kept, ballot, flags = fresh, Ballot(call.phase), Flag.NONE
        with fault:  # between two talks nothing runs outside of a guard: the other ranks wait for this one
            if kept is None:
                last = call.known()
                kept = last if last is not None and last.world == current_world() else None
                flags = Flag.NONE if kept is None or call.is_current(kept) else Flag.STALE
            if kept is not None and not flags:
                ballot = call.read(kept)
        if kept is None:
            fresh = renewed(call, fault)
            continue
        if fault.text is not None:
            flags |= Flag.FAULT
        if flags:
            ballot = ballot._replace(flags=ballot.flags | flags)
        verdict = vote(ballot, kept.component)
        if verdict.flags in (Flag.NONE, Flag.AUDIT) and verdict.alike and verdict.phase == call.phase:
            return kept, verdict
        if not verdict.flags & Flag.STALE:
            _refuse_unless_stale(call, kept, ballot.digests or {}, fault, verdict)
        fresh = call.renew(None if verdict.flags & Flag.BEYOND else kept.component, fault)


def renewed(call: Call[_K], fault: Fault) -> _K:
    """What is kept, made anew whatever this rank knows. Collective over the component: ranks that keep something hear
    of it in their vote, see [Note: who votes]."""
    sets, component = list[Ranks](), None
    for _ in range(2):  # the other ranks wait, so what an interrupt has cut off is asked again
        with fault:
            before = call.before()
            sets = _largest(in_order(call.sets(fault) if before is None else [before]))
            break
    flags = Flag.STALE | (Flag.BEYOND if len(sets) > 1 else Flag.NONE)
    for ranks in sets:
        verdict = vote(Ballot(Phase.DISCOVER, flags), ranks)
        component = None if verdict.flags & Flag.BEYOND else ranks
    return call.renew(component, fault)


def _refuse_unless_stale(
    call: Call[_K], kept: _K, digests: Mapping[Ranks, bytes], fault: Fault, verdict: Verdict
) -> None:
    """Find out together what is wrong, and raise it on every rank; or return on every rank, if no more is wrong than
    that they keep different things: one of them made its own when the others made theirs with what it listed then."""
    component, token = kept.component, kept.token if call.renews else b""
    everyone = gather({(): token, **digests}, component, fault)
    if verdict.phase != call.phase:
        raise _other_call(component, verdict.phase)
    if len({theirs[()] for theirs in everyone}) > 1:
        return
    unlike, lines = None, None
    with fault:
        unlike = first_unlike(dict(zip(component, everyone, strict=True)))
        if unlike is not None and unlike in digests:
            lines = call.lines(kept, unlike)
    told = gather(lines, component, fault)
    if unlike is None:
        raise _other_call(component, verdict.flags)
    raise Refused(call.difference(unlike, [told[component.index(rank)] for rank in unlike if rank in component]))


def first_unlike(everyone: Mapping[int, Mapping[Ranks, bytes]]) -> Ranks | None:
    """The first set, small ones first, of which ranks have unlike digests, or only some have any."""
    for ranks in in_order(ranks for theirs in everyone.values() for ranks in theirs):
        if len({everyone[rank].get(ranks) for rank in ranks if rank in everyone}) > 1:
            return ranks
    return None
