"""Lanes: short messages between the hosts of some ranks, beside whatever moves their tensors.

[Note: recursive doubling]
    How the messages of all ranks become one on every rank. After the hop of reach k a rank has merged the messages of
    its block of 2k ranks. Ranks beyond the largest power of two hand theirs to a partner first and get the result at
    the end. Each message is counted once, as a sum must. That is log2(n) hops of one small message, and two more where
    n is no power of two. `doubling` is pure: whoever drives it communicates.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Generator
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from shardmuon._torch import default_group, timeout_of
from shardmuon.comm.groups import MADE, Made
from shardmuon.errors import REMEDY, UNCHANGED, ExchangeError, ranks_text

_LARGEST = 1 << 13  # bytes of a message in hops: receivers need not know how long it is
_TAG = 7
_DEFAULT = timedelta(minutes=30)  # where no backend tells its time-out


class Hop(NamedTuple):
    """One move of a member in an exchange of messages: a send, a receive, or both. Members are places in the group, not
    ranks.

    Attributes:
        to: The member that gets `message`; None: nobody.
        source: The member that sends this one a message; None: nobody.
        behind: Members that the received message waits for; any of them may be the one that is late.
    """

    to: int | None
    message: bytes
    source: int | None
    behind: tuple[int, ...] = ()


Merge = Callable[[bytes, bytes], bytes]
Q = TypeVar("Q")
A = TypeVar("A")
R = TypeVar("R")


def driven(asking: Generator[Q | R, A, None], answer: Callable[[Q], A], kind: type[Q]) -> R:
    """Answer all questions of this kind that a generator asks; return the first other thing that it yields."""
    asked = next(asking)
    while isinstance(asked, kind):
        asked = asking.send(answer(asked))
    return cast("R", asked)


def doubling(me: int, num: int, message: bytes, merge: Merge) -> Generator[Hop | bytes, bytes, None]:
    """Generator that merges the messages of all members: yields hops and is sent what was received (b"" if nothing was
    to be); at last yields the merged message."""
    power = 1 << (num.bit_length() - 1)
    if me >= power:
        yield Hop(me - power, message, None)
        yield (yield Hop(None, b"", me - power, tuple(m for m in range(num) if m != me)))
        return
    if me + power < num:
        message = merge(message, (yield Hop(None, b"", me + power, (me + power,))))
    reach = 1
    while reach < power:
        other = me ^ reach
        first = other // reach * reach
        block = [*range(first, first + reach), *range(first + power, min(first + power + reach, num))]
        message = merge(message, (yield Hop(other, message, other, tuple(block))))
        reach *= 2
    if me + power < num:
        yield Hop(me + power, message, None)
    yield message


class Lane:
    """A gloo group over some ranks that opens a connection when two of them first talk over it.

    A vote of 1,024 ranks needs 10 connections a rank in place of 1,023. torch keeps no record of the group, so it can
    be closed alone: then whoever waits for this rank fails at once.

    Attributes:
        ranks: Global, ascending.
        me: Place of this rank among them.
        number: Number of this lane among those of these ranks, the same on each, so that it finds its peers under a
            name of its own.
        is_open: False once it has been closed.
    """

    def __init__(self, ranks: tuple[int, ...], world: Any, number: int) -> None:
        if not dist.is_gloo_available():
            raise RuntimeError("ranks vote over gloo, which this build of torch does not have")
        self.ranks, self.me, self.number = ranks, ranks.index(dist.get_rank()), number
        self._limit = timeout_of(world) or _DEFAULT
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_default_device(lazy_init=True)]
        options._timeout = self._limit
        name = f"shardmuon lane {hash_of(ranks)} {number}"
        store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
        self._group: Any = gloo(store, self.me, len(ranks), options)
        self.is_open = True

    def carry(self, hops: Generator[Hop | bytes, bytes, None], what: str) -> bytes:
        """Carry hops out and return what they come to. One deadline holds for all of them.

        Raises:
            ExchangeError: A rank did not answer in time, or its process has ended. The lane is closed.
        """
        deadline = time.monotonic() + self._limit.total_seconds()
        return driven(hops, partial(self._hop, deadline=deadline, what=what), Hop)

    def _hop(self, hop: Hop, deadline: float, what: str) -> bytes:
        found, sending = torch.empty(_LARGEST, dtype=torch.uint8, device="cpu"), None
        try:
            if hop.to is not None:
                sending = self._group.send([_tensor(hop.message)], hop.to, _TAG)
            if hop.source is not None:
                self._group.recv([found], hop.source, _TAG).wait(_left(deadline))
            if sending is not None:  # gloo forgets a message whose handle is dropped
                sending.wait(_left(deadline))
        except RuntimeError as error:
            sending = None  # the traceback keeps this frame, and a handle would keep the connections open
            late = hop.behind or (hop.to,)
            raise self._failed(what, tuple(self.ranks[place] for place in late if place is not None), error) from error
        return found.numpy().tobytes() if hop.source is not None else b""

    def share(self, value: bytes, what: str) -> list[bytes]:
        """Give `value`, of any length, to every rank; return all of them in order of ranks.

        Raises:
            ExchangeError: A rank did not answer in time, or its process has ended. The lane is closed.
        """
        num = len(self.ranks)
        deadline = time.monotonic() + self._limit.total_seconds()
        sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(num)]
        try:
            self._group.allgather([sizes], [torch.tensor([len(value)], device="cpu")]).wait(_left(deadline))
            longest = max(int(size) for size in sizes)
            mine = _tensor(value.ljust(longest, b"\0"))
            rows = [torch.empty_like(mine) for _ in range(num)]
            self._group.allgather([rows], [mine]).wait(_left(deadline))
        except RuntimeError as error:
            others = tuple(rank for rank in self.ranks if rank != self.ranks[self.me])
            raise self._failed(what, others, error) from error
        return [row.numpy().tobytes()[: int(size)] for row, size in zip(rows, sizes, strict=True)]

    def _failed(self, what: str, late: tuple[int, ...], error: RuntimeError) -> ExchangeError:
        self.close()
        which = f"rank {late[0]}" if len(late) == 1 else f"one of ranks {ranks_text(late)}"
        cause = str(error).rstrip(". \n")
        return ExchangeError(f"{what}: {which} does not answer: {cause}. {UNCHANGED}. {REMEDY}")

    def close(self) -> None:
        """End all connections: ranks that wait for this one fail at once. The next talk of all makes a new lane."""
        self._group, self.is_open = None, False


def lane_of(ranks: tuple[int, ...]) -> Lane:
    """The lane of these ranks (ascending, this one among them), made when they first talk."""
    world = default_group()
    if world is None:
        raise RuntimeError(f"ranks {ranks} are to talk, but torch.distributed is not initialized")
    lanes = MADE.setdefault(world, Made()).lanes
    lane: Lane | None = lanes.get(ranks)
    if lane is None or not lane.is_open:
        lane = lanes[ranks] = Lane(ranks, world, 1 if lane is None else lane.number + 1)
    return lane


def close_lane(ranks: tuple[int, ...]) -> None:
    """Close the lane of these ranks, if they have one: to make one only to close it would leave others with another
    number."""
    world = default_group()
    lane: Lane | None = None if world is None else MADE.setdefault(world, Made()).lanes.get(ranks)
    if lane is not None:
        lane.close()


def hash_of(ranks: tuple[int, ...]) -> str:
    """A short name of these ranks, the same in every process."""
    return hashlib.blake2b(repr(ranks).encode(), digest_size=16).hexdigest()


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)


def _left(deadline: float) -> timedelta:
    return timedelta(seconds=max(0.001, deadline - time.monotonic()))
