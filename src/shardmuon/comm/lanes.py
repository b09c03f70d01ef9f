"""Lanes: how the hosts of some ranks tell each other short messages, beside whatever moves their tensors. They know
nothing of what is told.

[Note: recursive doubling]
    How the messages of all ranks become one on every rank. After the hop of reach k a rank has merged the messages of
    its block of 2k ranks. Ranks beyond the largest power of two hand theirs to a partner first and get the result at
    the end. Each message is counted once, as a sum must. That is log2(n) hops of one small message, and two more where
    n is no power of two.
"""

from __future__ import annotations

import hashlib
import pickle
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shardmuon._torch import default_group, timeout_of
from shardmuon.comm.groups import MADE, Made, Ranks
from shardmuon.errors import REMEDY, UNCHANGED, ExchangeError, ranks_text

_T = TypeVar("_T")
_LARGEST = 1 << 16  # bytes of a message that is merged: receivers need not know how long it is
_TAG = 7
_DEFAULT = timedelta(minutes=30)  # where no backend tells its time-out

_Hop = tuple[Literal["send", "swap", "hear", "take"], int]  # "take": what is heard is the message of all; a member


def _hops_of(me: int, num: int) -> list[_Hop]:
    """The hops of a member of so many, in order: see [Note: recursive doubling]. Members are places in the lane."""
    power = 1 << (num.bit_length() - 1)
    if me >= power:
        return [("send", me - power), ("take", me - power)]
    hops: list[_Hop] = [("swap", me ^ 1 << doubled) for doubled in range(num.bit_length() - 1)]
    return hops if me + power >= num else [("hear", me + power), *hops, ("send", me + power)]


class Lane:
    """A gloo group over some ranks. It opens a connection when two of them first talk over it.

    To merge the messages of 1,024 ranks needs 10 connections a rank in place of 1,023. torch keeps no record of the
    group, so it can be closed alone: then whoever waits for this rank fails at once.

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
        store = dist.PrefixStore(_name_of(ranks, number), dist.distributed_c10d._get_default_store())
        self._group: Any = gloo(store, self.me, len(ranks), options)
        self.is_open = True

    def merge(self, message: _T, merged: Callable[[_T, _T], _T], what: str) -> _T:
        """Merge the messages of all ranks, of plain data, in any order. One deadline holds for all hops.

        Raises:
            ExchangeError: A rank did not answer in time, or its process has ended. The lane is closed.
        """
        deadline = time.monotonic() + self._limit.total_seconds()
        for kind, member in self._hops:
            found, pending = torch.empty(_LARGEST, dtype=torch.uint8, device="cpu"), list[Any]()
            try:
                if kind in ("send", "swap"):
                    pending.append(self._group.send([_bytes_of(pickle.dumps(message))], member, _TAG))
                if kind != "send":
                    pending.append(self._group.recv([found], member, _TAG))
                self._wait(pending, deadline)
            except RuntimeError as error:
                pending.clear()  # the traceback keeps this frame, and a handle would keep the connections open
                late = f"rank {self.ranks[member]}" + (", or one that it waits for," if len(self.ranks) > 2 else "")
                raise self._failed(what, late, error) from error
            if kind != "send":
                heard = pickle.loads(found.numpy().data)  # up to its end, whatever follows
                message = heard if kind == "take" else merged(message, heard)
        return message

    def share(self, value: bytes, what: str) -> list[Any]:
        """Give a pickled value to every rank; return those of all in order of ranks.

        Raises:
            ExchangeError: A rank did not answer in time, or its process has ended. The lane is closed.
        """
        deadline = time.monotonic() + self._limit.total_seconds()
        sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in self.ranks]
        try:
            self._wait([self._group.allgather([sizes], [torch.tensor([len(value)], device="cpu")])], deadline)
            mine = _bytes_of(value.ljust(max(map(int, sizes)), b"\0"))
            rows = [torch.empty_like(mine) for _ in self.ranks]
            self._wait([self._group.allgather([rows], [mine])], deadline)
        except RuntimeError as error:
            others = tuple(rank for rank in self.ranks if rank != self.ranks[self.me])
            raise self._failed(what, f"one of ranks {ranks_text(others)}", error) from error
        return [pickle.loads(row.numpy().data) for row in rows]

    def _wait(self, pending: list[Any], deadline: float) -> None:
        """Wait for messages on their way; gloo forgets one whose handle is dropped."""
        while pending:
            pending.pop(0).wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))

    def _failed(self, what: str, late: str, error: RuntimeError) -> ExchangeError:
        self.close()
        cause = str(error).rstrip(". \n")
        return ExchangeError(f"{what}: {late} does not answer: {cause}. {UNCHANGED}. {REMEDY}")

    def close(self) -> None:
        """End all connections: ranks that wait for this one fail at once. The next talk of all makes a new lane."""
        self._group, self.is_open = None, False


def _name_of(ranks: Ranks, number: int) -> str:
    """Name of a lane, the prefix of its keys: torch's store takes keys of 8 KiB, less than 2,000 ranks need in text."""
    return f"shardmuon lane {hashlib.blake2b(repr(ranks).encode(), digest_size=16).hexdigest()} {number}"


def _bytes_of(data: bytes) -> Tensor:  # uint8
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def lane_of(ranks: Ranks) -> Lane:
    """The lane of these ranks (ascending, this one among them), made when they first talk."""
    world = default_group()
    if world is None:
        raise RuntimeError(f"ranks {ranks} are to talk, but torch.distributed is not initialized")
    lanes = MADE.setdefault(world, Made()).lanes
    lane: Lane | None = lanes.get(ranks)
    if lane is None or not lane.is_open:
        lane = lanes[ranks] = Lane(ranks, world, 1 if lane is None else lane.number + 1)
    return lane


def close_lane(ranks: Ranks) -> None:
    """Close the lane of these ranks, if they have one: to make one only to close it would leave others with another
    number."""
    made = MADE.get(default_group()) if default_group() is not None else None
    if made is not None and ranks in made.lanes:
        made.lanes[ranks].close()
