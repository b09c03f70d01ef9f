"""The vote: how ranks find out who belongs together, and tell each other in one short message what is wrong.

[Note: why a component votes together]
    Ranks come in sets: a mesh's axis, a process group, the ranks that share a parameter. A rank in two sets that asks
    them one after the other may learn of a fault in the second when the first has gone on: 12 of 16 faults on a 4 x 4
    mesh of rows and columns, 2 of 4 on a chain of pairs. So all ranks that sets connect, directly or over others, say
    in one vote what is wrong. Before they can, each must know all of them. It floods: every rank tells each of its
    sets all that it has heard, round by round. A rank knows that it has heard everything when it has the entry of
    every rank that any entry names. Then it can count, from the entries alone, the round after which the last rank
    knows as much, and everybody stops after that round.

[Note: recursive doubling]
    How the messages of all ranks become one on every rank. After the hop of reach k a rank has merged the messages of
    its block of 2k ranks. Ranks beyond the largest power of two hand theirs to a partner first and get the result at
    the end. Each message is counted once, as a sum must. That is log2(n) hops of one small message, and two more where
    n is no power of two.

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
import math
import pickle
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from enum import IntFlag
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shardmuon._torch import default_group, timeout_of
from shardmuon.comm.groups import MADE, Made, Ranks, my_rank, num_ranks
from shardmuon.errors import REMEDY, UNCHANGED, ExchangeError, Refused, fault_text, ranks_text, told_by

_T = TypeVar("_T")
_VERSION = 1
_FORM = struct.Struct("<BHBI16s")  # version, phase, flags, number of presence bits, sum of digests
_MODULUS = 1 << 128
_LARGEST = 1 << 13  # bytes of a message of a vote: receivers need not know how long it is
_TAG = 7
_DEFAULT = timedelta(minutes=30)  # where no backend tells its time-out


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


def vote(ballot: Ballot, component: Ranks) -> Verdict:
    """Merge one ballot of each rank into a verdict. Collective over all ranks of the component.

    Raises:
        ExchangeError: A rank did not answer in time, or its process has ended.
    """
    if len(component) == 1:
        return Verdict(ballot.phase, ballot.flags, True, ballot.presence)
    lane, total = _lane_of(component), 0
    for ranks, digest in (ballot.digests or {}).items():
        total += _weight_of(ranks, component[lane.me]) * int.from_bytes(digest, "little")
    mine = _Message(_VERSION, ballot.phase, ballot.flags, ballot.num_bits, total, ballot.presence)
    said = lane.merge(mine, f"a vote ({ballot.phase.name})")
    return Verdict(Phase(said.phase), Flag(said.flags), said.total % _MODULUS == 0, said.presence)


def gather(value: _T, ranks: Ranks, fault: str | None = None, cause: BaseException | None = None) -> list[_T]:
    """Every rank's value, in order of ranks. Collective over `ranks`.

    Args:
        value: Picklable; of no matter where `fault` is given.
        fault: What keeps this rank from having a value.
        cause: The exception behind it.

    Raises:
        Refused: Some rank has a fault. On every rank, with the same text.
        ExchangeError: A rank did not answer in time, or its process has ended.
    """
    mine, everyone = Fault(), [(fault, value)]
    mine.add(fault, cause, own=False)
    if len(ranks) > 1:
        sent = b""
        with mine:
            sent = pickle.dumps((None, value))
        if mine.text is not None:
            sent = pickle.dumps((mine.text, None))
        everyone = _lane_of(ranks).share(sent, "gathering values")
    if said := told_by(theirs for theirs, _ in everyone):
        raise Refused("; ".join(said), mine.cause)
    return [theirs for _, theirs in everyone]


def run_together(run: Callable[[], _T], ranks: Ranks | None = None) -> _T:
    """Call `run` and return its result if it raises on none of these ranks (default: all). Collective over them.

    Raises:
        Refused: `run` raised an exception of any class on some rank. Raised on every rank, with the same text.
        ExchangeError: A rank did not answer in time, or its process has ended.
    """
    fault, found = Fault(), list[_T]()
    with fault:
        found.append(run())
    gather(None, tuple(range(num_ranks())) if ranks is None else ranks, fault.text, fault.cause)
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
        everyone = _lane_of(before).share(pickle.dumps(entry), "comparing groups")
        _refuse(dict(zip(before, everyone, strict=True)), cause)
    known = {rank: entry}
    for ranks in _talks(entry.sets, known):
        for heard in _lane_of(ranks).share(pickle.dumps(known), "finding out who belongs together"):
            known.update(heard)
    known = dict(sorted(known.items()))
    _refuse(known, cause)
    return known


def in_order(sets: Iterable[Ranks]) -> list[Ranks]:
    """Sets in the order in which every rank talks: small ones first. A set of one rank has nobody to talk to."""
    return sorted({ranks for ranks in sets if len(ranks) > 1}, key=lambda ranks: (len(ranks), ranks))


def largest_of(sets: Sequence[Ranks]) -> list[Ranks]:
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


# ------------------------------------------------------------------------------------------------------------ messages


class _Message(NamedTuple):
    version: int
    phase: int
    flags: int
    num_bits: int
    total: int
    presence: int


def digest_of(value: object) -> bytes:
    """16 bytes of the text of plain data, equal in every process."""
    return hashlib.blake2b(repr(value).encode(), digest_size=16).digest()


def _weight_of(ranks: Ranks, rank: int) -> int:
    """The factor of a rank's digest in the sum of a vote; those of all ranks of a set add up to 0."""
    at = ranks.index(rank)
    own, following = digest_of((ranks, at)), digest_of((ranks, (at + 1) % len(ranks)))
    return int.from_bytes(own, "little") - int.from_bytes(following, "little")


def _packed(message: _Message) -> Tensor:  # uint8
    head = _FORM.pack(*message[:4], (message.total % _MODULUS).to_bytes(16, "little"))
    bits = message.presence.to_bytes((message.num_bits + 7) // 8, "little")
    return torch.frombuffer(bytearray(head + bits), dtype=torch.uint8)


def _unpacked(found: Tensor) -> _Message:
    data = found.numpy().tobytes()
    version, phase, flags, num_bits, total = _FORM.unpack_from(data)
    presence = int.from_bytes(data[_FORM.size : _FORM.size + (num_bits + 7) // 8], "little")
    return _Message(version, phase, flags, num_bits, int.from_bytes(total, "little"), presence)


def _merged(a: _Message, b: _Message) -> _Message:
    unlike = Flag.UNLIKE if (a.version, a.num_bits) != (b.version, b.num_bits) else 0
    return _Message(
        a.version,
        a.phase | b.phase,
        a.flags | b.flags | unlike,
        max(a.num_bits, b.num_bits),
        a.total + b.total,
        a.presence | b.presence,
    )


# --------------------------------------------------------------------------------------------------------------- lanes


class _Hop(NamedTuple):
    """One move of a member in a vote: a send, a receive, or both. Members are places in the group, not ranks.

    Attributes:
        to: The member that gets this one's message; None: nobody.
        source: The member that sends this one a message; None: nobody.
        behind: Members that the received message waits for; any of them may be the one that is late.
        is_result: True if what is received is the message of all, not one to merge.
    """

    to: int | None
    source: int | None
    behind: tuple[int, ...] = ()
    is_result: bool = False


def _hops_of(me: int, num: int) -> list[_Hop]:
    """The hops of a member of a vote of so many, in order: see [Note: recursive doubling]."""
    power = 1 << (num.bit_length() - 1)
    if me >= power:
        others = tuple(member for member in range(num) if member != me)
        return [_Hop(me - power, None), _Hop(None, me - power, others, is_result=True)]
    partner = me + power if me + power < num else None
    hops = [] if partner is None else [_Hop(None, partner, (partner,))]
    reach = 1
    while reach < power:
        other = me ^ reach
        first = other // reach * reach
        block = *range(first, first + reach), *range(first + power, min(first + power + reach, num))
        hops.append(_Hop(other, other, block))
        reach *= 2
    return hops if partner is None else [*hops, _Hop(partner, None)]


class _Lane:
    """A gloo group over some ranks, beside whatever moves their tensors. It opens a connection when two of them first
    talk over it.

    A vote of 1,024 ranks needs 10 connections a rank in place of 1,023. torch keeps no record of the group, so it can
    be closed alone: then whoever waits for this rank fails at once.

    Attributes:
        ranks: Global, ascending.
        me: Place of this rank among them.
        number: Number of this lane among those of these ranks, the same on each, so that it finds its peers under a
            name of its own.
        is_open: False once it has been closed.
    """

    def __init__(self, ranks: Ranks, world: Any, number: int) -> None:
        if not dist.is_gloo_available():
            raise RuntimeError("ranks vote over gloo, which this build of torch does not have")
        self.ranks, self.me, self.number = ranks, ranks.index(dist.get_rank()), number
        self._hops = _hops_of(self.me, len(ranks))
        self._limit = timeout_of(world) or _DEFAULT
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_default_device(lazy_init=True)]
        options._timeout = self._limit
        name = f"shardmuon lane {digest_of(ranks).hex()} {number}"
        store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
        self._group: Any = gloo(store, self.me, len(ranks), options)
        self.is_open = True

    def merge(self, message: _Message, what: str) -> _Message:
        """Merge the messages of all ranks. One deadline holds for all hops.

        Raises:
            ExchangeError: A rank did not answer in time, or its process has ended. The lane is closed.
        """
        deadline = time.monotonic() + self._limit.total_seconds()
        for hop in self._hops:
            found, pending = torch.empty(_LARGEST, dtype=torch.uint8, device="cpu"), list[Any]()
            try:
                if hop.to is not None:
                    pending.append(self._group.send([_packed(message)], hop.to, _TAG))
                if hop.source is not None:
                    pending.append(self._group.recv([found], hop.source, _TAG))
                self._wait(pending, deadline)
            except RuntimeError as error:
                pending.clear()  # the traceback keeps this frame, and a handle would keep the connections open
                late = tuple(self.ranks[at] for at in hop.behind or (hop.to,) if at is not None)
                raise self._failed(what, late, error) from error
            if hop.source is not None:
                message = _unpacked(found) if hop.is_result else _merged(message, _unpacked(found))
        return message

    def share(self, value: bytes, what: str) -> list[Any]:
        """Give a pickled value to every rank; return those of all in order of ranks.

        Raises:
            ExchangeError: A rank did not answer in time, or its process has ended. The lane is closed.
        """
        num = len(self.ranks)
        deadline = time.monotonic() + self._limit.total_seconds()
        sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(num)]
        try:
            self._wait([self._group.allgather([sizes], [torch.tensor([len(value)], device="cpu")])], deadline)
            padded = bytearray(value.ljust(max(map(int, sizes)), b"\0"))
            mine = torch.frombuffer(padded, dtype=torch.uint8)
            rows = [torch.empty_like(mine) for _ in range(num)]
            self._wait([self._group.allgather([rows], [mine])], deadline)
        except RuntimeError as error:
            others = tuple(rank for rank in self.ranks if rank != self.ranks[self.me])
            raise self._failed(what, others, error) from error
        return [pickle.loads(row.numpy().tobytes()) for row in rows]  # up to its end, whatever follows

    def _wait(self, pending: list[Any], deadline: float) -> None:
        """Wait for messages on their way; gloo forgets one whose handle is dropped."""
        while pending:
            pending.pop(0).wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))

    def _failed(self, what: str, late: Ranks, error: RuntimeError) -> ExchangeError:
        self.close()
        which = f"rank {late[0]}" if len(late) == 1 else f"one of ranks {ranks_text(late)}"
        cause = str(error).rstrip(". \n")
        return ExchangeError(f"{what}: {which} does not answer: {cause}. {UNCHANGED}. {REMEDY}")

    def close(self) -> None:
        """End all connections: ranks that wait for this one fail at once. The next talk of all makes a new lane."""
        self._group, self.is_open = None, False


def _lane_of(ranks: Ranks) -> _Lane:
    """The lane of these ranks (ascending, this one among them), made when they first talk."""
    world = default_group()
    if world is None:
        raise RuntimeError(f"ranks {ranks} are to talk, but torch.distributed is not initialized")
    lanes = MADE.setdefault(world, Made()).lanes
    lane: _Lane | None = lanes.get(ranks)
    if lane is None or not lane.is_open:
        lane = lanes[ranks] = _Lane(ranks, world, 1 if lane is None else lane.number + 1)
    return lane


def close_lane(ranks: Ranks) -> None:
    """Close the lane of these ranks, if they have one: to make one only to close it would leave others with another
    number."""
    world = default_group()
    made = None if world is None else MADE.get(world)
    if made is not None and ranks in made.lanes:
        made.lanes[ranks].close()
