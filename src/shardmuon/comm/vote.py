"""Voting among ranks before a collective call. The ranks find out which ranks are connected, report errors to each
other in short messages, and agree to make the call.

The collective calls are the optimizer step, gradient clipping and QK-clip. Each has a subclass of `Call`, which reports
the inputs that must be equal on all ranks. `Call.agree` holds the vote. Afterwards, either all ranks proceed or all
ranks raise an error.

[Note: why a component votes together]
    A rank can belong to several sets of ranks: the ranks of a mesh axis, the ranks of a process group, or the ranks
    over which a parameter is sharded or replicated. If a rank voted in these sets one after the other, it could learn
    of an error in the second set after the other ranks of the first set had already proceeded. In experiments, this
    happened for 12 of 16 errors on a 4 x 4 mesh, and for 2 of 4 errors on a chain of pairs of ranks. Therefore all
    ranks that are connected by sets, directly or through other ranks, take part in one common vote. These ranks form a
    component.

    Before the first vote, each rank discovers its component by flooding. At first, a rank has only its own entry, which
    lists the sets to which the rank belongs. In each round, every rank sends all entries that it has to the ranks of
    its sets. A rank has found the whole component when it has an entry for every rank that its entries mention. From
    the entries, it then computes the number of rounds after which the last rank has found the whole component. All
    ranks compute the same number and stop after that many rounds.

[Note: the message]
    A message in a vote contains the rank's phase (the operation on which it votes), its flags, a checksum, and presence
    bits, which are set for the parameters that have a gradient on the rank. Phases, flags and presence bits are merged
    by bitwise OR. If ranks vote on different operations, the merged phase therefore has more than one bit.

    For each of its sets, a rank computes a digest: a hash of the inputs that must be equal on all ranks of the set. The
    checksums show whether the digests are equal. Let h(S, d) be a hash of the set S, the digest d and the version of
    the message format. For each set S of n ranks, the first rank adds (n - 1) h(S, d) to its checksum, and each of the
    other ranks subtracts h(S, d). Checksums are merged by addition modulo 2^128. If the digests in each set are equal,
    the sum is 0. If the digests in a set differ, the sum contains different hashes with nonzero coefficients between -n
    and n, and is 0 with a probability of at most n / 2^128.

[Note: who votes]
    All ranks of a component vote before each call. To make the call, they need a binding: the plan (for a step) or the
    layouts (for clipping and QK-clip) that these ranks build together and cache between calls. A rank without a cached
    binding votes with the same ranks as last time, and requests a rebuild in this vote. Ranks with a cached binding
    learn of the request in the same vote, because they also begin the call with a vote. All ranks then rebuild the
    binding.

    A rank that has never voted does not know its component, which is discovered only during the rebuild. It requests
    the rebuild by voting in each of its sets that is not contained in a larger one. Usually, there is only one such
    set, which is the whole component.
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
from shardmuon.comm.groups import Lane, Ranks, made_under, my_rank, num_ranks
from shardmuon.errors import Refused, fault_text, ranks_text

_T = TypeVar("_T")
_VERSION = 1
_MODULUS = 1 << 128
# Maximum number of presence bits in the message of a vote. Each bit says whether the rank has a gradient for one
# parameter. The limit leaves 256 bytes of the message for the other fields.
MOST_BITS = 8 * (Lane.LARGEST - 256)


class Fault:
    """Record of this rank's first error since the ranks last exchanged errors.

    A `Fault` is also a context manager. It catches and records any exception that is raised in the `with` block, so
    that this rank still reaches the next collective.

    Attributes:
        text: Error message to send to the other ranks; None if there is no error.
        cause: The exception that caused the error, or None.
    """

    text: str | None = None
    cause: BaseException | None = None

    def add(self, text: str | None, cause: BaseException | None = None, *, own: bool = True) -> None:
        """Record an error of this rank, unless an earlier error is already recorded.

        Args:
            text: Error message; None records nothing.
            cause: The exception that caused the error, or None.
            own: Whether to prefix the message with "rank R: ", where R is this rank. Ignored if the job has only one
                rank.
        """
        if text is not None and self.text is None:
            self.text, self.cause = f"rank {my_rank()}: {text}" if own and num_ranks() > 1 else text, cause

    def __enter__(self) -> Fault:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        # The message of a `Refused` error gets no "rank R: " prefix, because all ranks raise the same error.
        if isinstance(error, Refused):
            self.add(str(error), error.cause, own=False)
        elif error is not None:
            self.add(fault_text(error), error)
        return True

    def settle(self, component: Ranks, phase: Phase, *, asked: bool = False) -> bool:
        """Raise an error on all ranks in `component` if any of them has recorded an error. Collective over these ranks.

        Args:
            component: All ranks that are connected to this rank, directly or through other ranks.
            phase: The operation on which the caller votes. It must be the same on all ranks.
            asked: This rank's answer to a yes-or-no question, whose meaning is up to the caller.

        Returns:
            True if `asked` is True on any rank.

        Raises:
            Refused: Some rank has an error, or ranks vote on different operations. Raised on every rank, with the same
                message.
            ExchangeError: A rank did not answer in time, or its process has ended.
        """
        flags = Flag.NONE if self.text is None else Flag.FAULT
        verdict = vote(Ballot(phase, flags, presence=int(asked)), component)
        if verdict.flags or verdict.phase != phase:
            # After a failed vote, all ranks call `gather` to exchange errors, whatever operation they voted on.
            gather({}, component, self)
            raise _other_call(component, verdict)
        return bool(verdict.presence)


class Phase(IntFlag):
    """Collective operation on which a rank votes. The result of a vote (the verdict) contains the bitwise OR of the
    phases of all ranks."""

    DISCOVER = 1
    STEP = 4
    CLIP = 8
    QK_CLIP = 16
    UNSCALE = 256


class Flag(IntFlag):
    """Conditions that a rank reports in a vote. The result of the vote (the verdict) contains the bitwise OR of the
    flags of all ranks.

    Attributes:
        FAULT: The rank has an error and cannot proceed.
        STALE: The rank's cached binding (its plan or layouts) is missing or does not match the rank's parameters.
        AUDIT: The rank requests that this optimizer step be audited.
        UNLIKE: Digests (hashes) that must be equal on all ranks of a set differ. Only a verdict has this flag.
        BEYOND: The rank is connected to ranks that do not take part in this vote.
    """

    NONE = 0
    FAULT = 1
    STALE = 2
    AUDIT = 8
    UNLIKE = 16
    BEYOND = 32


class Ballot(NamedTuple):
    """Message of one rank in a vote, or a verdict: the merged message of all ranks.

    Attributes:
        phase: The operation on which the rank votes.
        flags: Conditions on this rank.
        digests: Dict with one digest (hash) for each set of ranks that contains this rank. The digest is computed from
            data that must be equal on all ranks of the set.
        presence: Bits that indicate, for example, the parameters that have a gradient on the rank. A verdict contains
            the bitwise OR of the bits of all ranks.
    """

    phase: Phase
    flags: Flag = Flag.NONE
    digests: Mapping[Ranks, bytes] | None = None
    presence: int = 0


_Message = tuple[int, int, int, int]  # message of a rank in a vote: (phase, flags, checksum, presence bits)


def vote(ballot: Ballot, component: Ranks) -> Ballot:
    """Merge the ballots (messages) of all ranks of a component (a set of connected ranks) into one ballot, the verdict.
    Collective over the component. All ranks return the same verdict.

    Raises:
        ExchangeError: A rank did not answer in time, or its process has ended.
    """
    if len(component) == 1:
        return ballot
    lane, total = Lane.over(component), 0
    for ranks, digest in (ballot.digests or {}).items():
        factor = len(ranks) - 1 if component[lane.me] == ranks[0] else -1
        total += factor * int.from_bytes(digest_of((_VERSION, ranks, digest)), "little")
    mine = int(ballot.phase), int(ballot.flags), total % _MODULUS, ballot.presence
    phase, flags, total, presence = lane.merge(mine, _merged, f"a vote ({ballot.phase.name})")
    return Ballot(Phase(phase), Flag(flags) | (Flag.UNLIKE if total else Flag.NONE), presence=presence)


def _merged(a: _Message, b: _Message) -> _Message:
    return a[0] | b[0], a[1] | b[1], (a[2] + b[2]) % _MODULUS, a[3] | b[3]


def digest_of(value: object) -> bytes:
    """Hash the `repr` of plain data to 16 bytes. Data with equal `repr` has the same hash in every process."""
    return hashlib.blake2b(repr(value).encode(), digest_size=16).digest()


def _told_by(everyone: Iterable[str | None]) -> list[str]:
    """Merge equal error messages of different ranks. Each returned message begins with the ranks that reported it, as
    in "ranks 0-7: out of memory"."""
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
        value: This rank's value. Ignored if `fault` contains an error.
        ranks: The ranks that take part.
        fault: Record of this rank's error, if this rank has one.

    Returns:
        The value of each rank, in the order of `ranks`.

    Raises:
        Refused: Some rank has an error. Raised on every rank, with the same message.
        ExchangeError: A rank did not answer in time, or its process has ended.
    """
    fault, sent = fault or Fault(), b""
    everyone = [(fault.text, value)]
    if len(ranks) > 1:
        with fault:
            sent = pickle.dumps((None, value))
        if fault.text is not None:
            sent = pickle.dumps((fault.text, None))
        everyone = Lane.over(ranks).share(sent, "gathering values")
    if said := _told_by(theirs for theirs, _ in everyone):
        raise Refused("; ".join(said), fault.cause)
    return [theirs for _, theirs in everyone]


def _other_call(component: Ranks, verdict: Ballot) -> Refused:
    return Refused(f"ranks {ranks_text(component)} do not make the same call: {verdict.phase!r}, {verdict.flags!r}")


def run_together(run: Callable[[], _T], ranks: Ranks | None = None) -> _T:
    """Call `run` on all ranks in `ranks` (by default, all ranks of the job) and return this rank's result. If `run`
    fails on any of them, raise an error on all of them. Collective over `ranks`.

    Raises:
        Refused: `run` raised an exception on some rank. Raised on every rank, with the same message.
        ExchangeError: A rank did not answer in time, or its process has ended.
    """
    fault, found = Fault(), list[_T]()
    with fault:
        found.append(run())
    gather(None, tuple(range(num_ranks())) if ranks is None else ranks, fault)
    return found[0]


# ------------------------------------------------------------------------------------------------ component discovery


class _Entry(NamedTuple):
    """Data of one rank. `discover` sends it to all ranks that are connected to this rank by sets of ranks.

    Attributes:
        sets: The sets of ranks to which the rank belongs.
        fault: The rank's error message, or None.
        facts: Picklable data for all other ranks.
    """

    sets: tuple[Ranks, ...]
    fault: str | None = None
    facts: Any = None


def discover(sets: tuple[Ranks, ...], facts: _T, fault: Fault, before: Ranks | None = None) -> dict[int, _T]:
    """Find all ranks that are connected to this rank by sets of ranks, directly or through other ranks. These ranks
    form a component. Collective over the component.

    Args:
        sets: The sets of ranks that this rank belongs to.
        facts: Picklable data for all other ranks.
        fault: Record of this rank's error, if this rank has one.
        before: All ranks of the previous component, or None if it is unknown. These ranks compare their sets first. If
            only some ranks of a set list it in `sets`, all ranks get an error at once instead of a timeout.

    Returns:
        Dict from every rank of the component to the rank's `facts`, equal on all of these ranks.

    Raises:
        Refused: Some rank has an error, or only some ranks of a set list the set in `sets`. Raised on every rank, with
            the same message.
        ExchangeError: A rank did not answer in time, or its process has ended.
    """
    known = {my_rank(): _Entry(sets, fault.text, facts)}
    if before is not None and len(before) > 1:
        everyone = Lane.over(before).share(pickle.dumps(known[my_rank()]), "comparing groups")
        _refuse(dict(zip(before, everyone, strict=True)), fault)
    num_done = 0
    while num_done < _num_rounds(known):  # the number of rounds is equal on all connected ranks
        for ranks in in_order(sets):
            for heard in Lane.over(ranks).share(pickle.dumps(known), "finding out who belongs together"):
                known.update(heard)
        num_done += 1
    _refuse(known, fault)
    return {rank: known[rank].facts for rank in sorted(known)}


def in_order(sets: Iterable[Ranks]) -> list[Ranks]:
    """Sort sets of ranks, small sets first, and omit sets of one rank and repeated sets. Every rank communicates with
    its sets in this order."""
    return sorted({ranks for ranks in sets if len(ranks) > 1}, key=lambda ranks: (len(ranks), ranks))


def _num_rounds(known: Mapping[int, _Entry]) -> float:
    """Compute the number of rounds of flooding after which every connected rank has the entries of all connected ranks
    (see [Note: why a component votes together]). `known` contains the entries that this rank has received. If they
    mention a rank whose entry is missing, return infinity."""
    order = in_order(ranks for entry in known.values() for ranks in entry.sets)
    if not known.keys() >= set().union(*order):
        return math.inf
    hears, before, number = {rank: frozenset({rank}) for rank in known}, dict[int, frozenset[int]](), -1
    while hears != before:
        before, number = dict(hears), number + 1
        for ranks in order:
            hears.update(dict.fromkeys(ranks, frozenset().union(*(hears[rank] for rank in ranks))))
    return number


def _refuse(known: Mapping[int, _Entry], fault: Fault) -> None:
    """Raise Refused if the entry of any rank contains an error, or if only some ranks of a set list the set in their
    entries."""
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
    """Return the token (random bytes) that identifies the current default process group, or None if there is none.
    Global ranks that were recorded under different tokens cannot be compared."""
    world = default_group()
    return None if world is None else made_under(world).token


class Agreed:
    """Binding: the plan or the layouts that all ranks connected by parameters or process groups have built together and
    cache between collective calls.

    Attributes:
        component: All connected ranks. They vote together.
        token: Bytes that identify the binding, equal on all ranks in `component`.
        sets: Dict from a set of ranks to the indices of the parameters that are sharded or replicated over exactly
            these ranks. Small sets come first. Sets of one rank are omitted.
        world: Token of the default process group under which the binding was made. The binding is invalid under any
            other default process group.
    """

    def __init__(self, component: Ranks, token: bytes, sets: Mapping[Ranks, tuple[int, ...]]) -> None:
        self.component, self.token = component, token
        self.sets = {ranks: numbers for ranks, numbers in sets.items() if len(ranks) > 1}
        self.world = current_world()


_K = TypeVar("_K", bound=Agreed)


class Call(ABC, Generic[_K]):
    """One rank's part in a collective call: a step, gradient clipping or QK-clip.

    The methods `known`, `is_current`, `before`, `sets`, `read` and `lines` may raise any exception, because they are
    called in the `with` block of a `Fault`, which records exceptions.

    Attributes:
        phase: The operation on which the ranks vote, such as a step.
        renews: Whether to rebuild the bindings (cached plans or layouts) if they differ between ranks. If False, an
            error is raised instead.
        doing: Verb for error messages, such as "clip".
        rule: Sentence for error messages that says which inputs must be equal on all ranks of a set.
    """

    phase: Phase
    renews = True
    doing: str
    rule: str

    @abstractmethod
    def known(self) -> _K | None:
        """Return the binding (the plan or the layouts) that the last call cached, or None if no cached binding applies
        to this call."""

    @abstractmethod
    def is_current(self, kept: _K) -> bool:
        """Return True if the cached binding `kept` (the plan or the layouts) matches this rank's current parameters,
        layouts and options."""

    def before(self) -> Ranks | None:
        """Return the ranks that took part in this rank's last vote, or None if this rank has not yet voted under the
        current default process group. This method is called only on ranks without a cached binding (plan or
        layouts)."""
        return None

    @abstractmethod
    def sets(self, fault: Fault) -> list[Ranks]:
        """Return all sets of ranks that contain this rank and share parameters or a process group. The other ranks of
        these sets may be waiting for this rank's vote. If this rank cannot determine a set, record the reason in
        `fault`."""

    @abstractmethod
    def renew(self, before: Ranks | None, fault: Fault) -> _K:
        """Rebuild the binding (the plan or the layouts). Collective over all ranks that share it.

        This method must record its errors in `fault`, because no caller catches its exceptions. `before` contains the
        ranks that last voted together, or is None if these ranks are unknown.
        """

    @abstractmethod
    def read(self, kept: _K) -> Ballot:
        """Read all inputs of the call, such as gradients, and return this rank's ballot (its message in the vote), with
        flags for conditions such as a due audit. This method must not change weights, gradients or momentum, because
        the vote can still reject the call."""

    @abstractmethod
    def lines(self, kept: _K, ranks: Ranks) -> list[Any]:
        """List the inputs of the call that must be equal on all ranks of a set. `read` computes their digest. If ranks
        have different digests, an error message shows the first input that differs."""

    def difference(self, ranks: Ranks, everyone: Sequence[list[Any] | None]) -> str:
        """Format an error message about the first input of the call that differs between the ranks of a set.

        Args:
            ranks: The set of ranks.
            everyone: For each rank of the set, the list that `lines` returned; None if the rank does not know the set.
        """
        told = [lines or ["nothing to say"] for lines in everyone]
        first, *others = next(line for line in zip(*told, strict=False) if len(set(line)) > 1)
        rank, other = next(pair for pair in zip(ranks[1:], others, strict=True) if pair[1] != first)
        return (
            f"ranks {ranks} {self.doing} together but differ: rank {ranks[0]} has {first!r}, rank {rank} has {other!r}"
            f". {self.rule}"
        )

    def agree(self, fault: Fault, fresh: _K | None = None) -> tuple[_K, Ballot]:
        """Vote with the other ranks on whether to go ahead with this call, for example `step()`. If the binding (the
        plan or the layouts) is out of date on any rank, all ranks rebuild it and vote again. Collective over the
        component: all ranks that are connected by parameters or process groups.

        Args:
            fault: Record of this rank's error, if this rank already has one.
            fresh: A binding that all ranks know to be current, or None to use the cached binding.

        Returns:
            The binding for the call, and the verdict, which is the merged ballot of all ranks.

        Raises:
            Refused: Some rank has an error, or inputs differ between ranks. Raised on every rank, before the call has
                changed anything.
            ExchangeError: A rank did not answer in time, or its process has ended.
        """
        while True:
            kept, ballot, flags = fresh, Ballot(self.phase), Flag.NONE
            with fault:  # errors are recorded in `fault`, because this rank must vote even after an error
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
        """Rebuild the binding (the plan or the layouts), because this rank has not cached one. Collective over all
        ranks that share it. Ranks with a cached binding learn of the rebuild in their next vote ([Note: who votes])."""
        sets, component = list[Ranks](), None
        # Try twice to find the ranks that wait for this rank's vote, because an interrupt can end the first attempt.
        for _ in range(2):
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
        """Find out why a vote failed, and raise Refused with the reason on every rank. Collective over all ranks that
        voted.

        If the cached bindings (plans or layouts) differ between these ranks, some of them are stale. If `renews` is
        True, return on every rank in this case, so that the caller rebuilds the bindings.
        """
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
    """Raise Refused on every rank if the ranks of any set disagree on data that must be equal on all of them.
    Collective over all ranks in `everyone`.

    Args:
        everyone: Dict from rank to a dict with the rank's digests (hashes). The inner dict has one digest for each set
            of ranks that contains the rank.
        lines: Function that takes a set of ranks and returns this rank's data for the set, as a list.
        text: Function that makes an error message from a set of ranks and the lists that `lines` returned on these
            ranks.
        fault: Record of this rank's error, if this rank has one.
    """
    component, unlike, mine = tuple(everyone), None, None
    with fault:
        for ranks in in_order(ranks for theirs in everyone.values() for ranks in theirs):
            # a missing digest (None) also counts as a difference
            if len({everyone[rank].get(ranks) for rank in ranks if rank in everyone}) > 1:
                unlike = ranks
                break
        if unlike is not None and unlike in everyone[my_rank()]:
            mine = lines(unlike)
    told = dict(zip(component, gather(mine, component, fault), strict=True))
    if unlike is not None:
        raise Refused(text(unlike, [told[rank] for rank in unlike if rank in told]))
