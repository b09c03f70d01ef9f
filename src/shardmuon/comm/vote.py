"""The vote: one short message in which all ranks of a component hear whether anything is wrong on any of them.

[Note: the message]
    It says the version of its form, in which phase a rank is, flags, a sum of digests and presence bits. Phases, flags
    and bits are merged by "or". Digests must be equal within sets of ranks; that one message tells for all sets at
    once: rank r adds c(S, r) digest(S) modulo 2^128 for each of its sets S, where c is the difference of two hashes, of
    S with the place of r in it and with the next one's. The c of a set add up to 0, so equal digests cancel and unequal
    ones do not, but by an accident of one in 2^128. Ranks in unlike phases, with unlike numbers of bits or of unlike
    versions understand each other's message: whoever merges them sets a flag.
"""

from __future__ import annotations

import hashlib
import pickle
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntFlag
from types import TracebackType
from typing import NamedTuple, TypeVar

from shardmuon.comm.component import Entry, Known, Ranks, Talk, faults_of, flood
from shardmuon.comm.groups import my_rank, num_ranks
from shardmuon.comm.lane import doubling, driven, lane_of
from shardmuon.errors import Refused, fault_text, told_by

T = TypeVar("T")
VERSION = 1
_FORM = struct.Struct("<BHBI16s")  # version, phase, flags, number of presence bits, sum of digests
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

    def __init__(self) -> None:
        self.text: str | None = None
        self.cause: BaseException | None = None

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
    SAVE = 32
    LOAD = 64
    AUDIT = 128
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


@dataclass(frozen=True, slots=True)
class Ballot:
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


def vote(ballot: Ballot, component: Ranks) -> Verdict:
    """Merge one ballot of each rank into a verdict. Collective over all ranks of the component.

    Raises:
        ExchangeError: A rank did not answer in time, or its process has ended.
    """
    if len(component) == 1:
        return Verdict(ballot.phase, ballot.flags, True, ballot.presence)
    lane = lane_of(component)
    message = pack(ballot, component[lane.me])
    return verdict(lane.carry(doubling(lane.me, len(component), message, merge), f"a vote ({ballot.phase.name})"))


def gather(value: T, ranks: Ranks, fault: str | None = None, cause: BaseException | None = None) -> list[T]:
    """Every rank's value, in order of ranks. Collective over `ranks`.

    Args:
        value: Picklable; of no matter where `fault` is given.
        fault: What keeps this rank from having a value.
        cause: The exception behind it.

    Raises:
        Refused: Some rank has a fault. On every rank, with the same text.
        ExchangeError: A rank did not answer in time, or its process has ended.
    """
    everyone = [(fault, value)]
    if len(ranks) > 1:
        mine, sent = Fault(), b""
        mine.add(fault, cause, own=False)
        with mine:
            sent = pickle.dumps((None, value))
        if mine.text is not None:
            sent, cause = pickle.dumps((mine.text, None)), mine.cause
        everyone = [pickle.loads(theirs) for theirs in lane_of(ranks).share(sent, "gathering values")]
    if said := told_by(theirs for theirs, _ in everyone):
        raise Refused("; ".join(said), cause)
    return [theirs for _, theirs in everyone]


def run_together(run: Callable[[], T], ranks: Ranks | None = None) -> T:
    """Call `run` and return its result if it raises on none of these ranks (default: all). Collective over them.

    Raises:
        Refused: `run` raised an exception of any class on some rank. Raised on every rank, with the same text.
        ExchangeError: A rank did not answer in time, or its process has ended.
    """
    fault, found = Fault(), list[T]()
    with fault:
        found.append(run())
    gather(None, tuple(range(num_ranks())) if ranks is None else ranks, fault.text, fault.cause)
    return found[0]


def discover(rank: int, entry: Entry, before: Ranks | None = None, cause: BaseException | None = None) -> Known:
    """The entry of every rank of the component, the same on each. Collective over the component.

    Args:
        before: The component so far, if the ranks had one. They compare their sets within it first, so that a set
            which only some of its ranks know is a fault with a name. Without one the others wait for their time-out.
        cause: The exception behind `entry.fault`.

    Raises:
        Refused: Some rank has a fault, or a set is not known to all of its ranks. On every rank, with the same text.
        ExchangeError: A rank did not answer in time, or its process has ended.
    """
    if before is not None and len(before) > 1:
        everyone = [pickle.loads(said) for said in lane_of(before).share(pickle.dumps(entry), "comparing groups")]
        _refuse(dict(zip(before, everyone, strict=True)), cause)
    known = driven(flood(rank, entry), _told, Talk)
    _refuse(known, cause)
    return known


def _told(talk: Talk) -> list[Known]:
    said = lane_of(talk.ranks).share(pickle.dumps(talk.value), "finding out who belongs together")
    return [pickle.loads(theirs) for theirs in said]


def _refuse(known: Known, cause: BaseException | None) -> None:
    if faults := faults_of(known):
        raise Refused("; ".join(faults), cause)


# ------------------------------------------------------------------------------------------------------------- messages


def pack(ballot: Ballot, rank: int) -> bytes:
    """The message in which this rank sends a ballot."""
    total = 0
    for ranks, digest in (ballot.digests or {}).items():
        total += weight_of(ranks, rank) * int.from_bytes(digest, "little")
    return _packed(VERSION, ballot.phase, ballot.flags, ballot.num_bits, total, ballot.presence)


def _packed(version: int, phase: int, flags: int, num_bits: int, total: int, presence: int) -> bytes:
    head = _FORM.pack(version, phase, flags, num_bits, (total % _MODULUS).to_bytes(16, "little"))
    return head + presence.to_bytes((num_bits + 7) // 8, "little")


def _unpacked(message: bytes) -> tuple[int, int, int, int, int, int]:
    version, phase, flags, num_bits, total = _FORM.unpack_from(message)
    presence = int.from_bytes(message[_FORM.size : _FORM.size + (num_bits + 7) // 8], "little")
    return version, phase, flags, num_bits, int.from_bytes(total, "little"), presence


def merge(first: bytes, second: bytes) -> bytes:
    """Merge two messages into one."""
    a, b = _unpacked(first), _unpacked(second)
    unlike = Flag.UNLIKE if (a[0], a[3]) != (b[0], b[3]) else 0
    return _packed(a[0], a[1] | b[1], a[2] | b[2] | unlike, max(a[3], b[3]), a[4] + b[4], a[5] | b[5])


def verdict(message: bytes) -> Verdict:
    """The verdict of a message into which all ballots have been merged."""
    _, phase, flags, _, total, presence = _unpacked(message)
    return Verdict(Phase(phase), Flag(flags), total == 0, presence)


def weight_of(ranks: Ranks, rank: int) -> int:
    """The factor of a rank's digest in the sum of a vote; those of all ranks of a set add up to 0: see [Note: the
    message]."""
    of_set, at = hashlib.blake2b(repr(ranks).encode(), digest_size=16), ranks.index(rank)
    hashes = []
    for place in (at, (at + 1) % len(ranks)):
        of_place = of_set.copy()
        of_place.update(b" %d" % place)
        hashes.append(int.from_bytes(of_place.digest(), "little"))
    return hashes[0] - hashes[1]
