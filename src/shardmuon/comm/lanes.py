"""Lanes: channels for short messages between the CPUs of some ranks, independent of the backend that exchanges tensors.
A lane does not interpret the messages.

[Note: recursive doubling]
    This is the algorithm for an all-reduce of messages. In hops over distances k = 1, 2, 4, .., a rank swaps messages
    with the rank at distance k and merges the two; it has then merged the messages of its block of 2k ranks. Ranks
    beyond the largest power of two first send their message to a partner, and receive the result at the end. Each
    message is merged exactly once, as a sum requires. This takes log2(n) hops of one small message, and two more if n
    is not a power of two.
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
LARGEST = 1 << 16  # bytes of a receive buffer, so that receivers need not know the size of a message
_TAG = 7
_DEFAULT = timedelta(minutes=30)  # used if the backend does not expose its timeout

_Hop = tuple[Literal["send", "swap", "hear", "take"], int]  # kind, index of the peer; "take" receives the result


def _hops_of(me: int, num: int) -> list[_Hop]:
    """List the hops of an all-reduce for the rank with index `me` in a lane of `num` ranks.

    See [Note: recursive doubling].
    """
    power = 1 << (num.bit_length() - 1)
    if me >= power:
        return [("send", me - power), ("take", me - power)]
    hops: list[_Hop] = [("swap", me ^ 1 << doubled) for doubled in range(num.bit_length() - 1)]
    return hops if me + power >= num else [("hear", me + power), *hops, ("send", me + power)]


class Lane:
    """A gloo group over some ranks. It opens the connection between two ranks when they first need it.

    Merging the messages of 1,024 ranks opens 10 connections per rank instead of 1,023. The group is not registered with
    torch, so it can be closed on its own. Ranks that are waiting for this rank then fail at once.

    Attributes:
        ranks: Global ranks, ascending.
        me: Index of this rank in `ranks`.
        number: Sequence number among the lanes of these ranks, equal on all of them. It makes the lane's key prefix in
            torch's store unique.
        is_open: False once the lane has been closed.
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
        """All-reduce a message of plain data. `merged` is a function that merges two messages. It is applied in no
        fixed order. All hops share one deadline.

        Raises:
            ExchangeError: A rank did not answer in time, or its process has ended. The lane is closed.
        """
        deadline = time.monotonic() + self._limit.total_seconds()
        for kind, member in self._hops:
            found, pending = torch.empty(LARGEST, dtype=torch.uint8, device="cpu"), list[Any]()
            try:
                if kind in ("send", "swap"):
                    pending.append(self._group.send([_bytes_of(pickle.dumps(message))], member, _TAG))
                if kind != "send":
                    pending.append(self._group.recv([found], member, _TAG))
                self._wait(pending, deadline)
            except RuntimeError as error:
                pending.clear()  # the traceback keeps this frame alive, and handles would keep connections open
                late = f"rank {self.ranks[member]}" + (", or one that it waits for," if len(self.ranks) > 2 else "")
                raise self._failed(what, late, error) from error
            if kind != "send":
                heard = pickle.loads(found.numpy().data)  # pickle ignores the rest of the buffer
                message = heard if kind == "take" else merged(message, heard)
        return message

    def share(self, value: bytes, what: str) -> list[Any]:
        """All-gather pickled values. Return the unpickled value of each rank, in the order of `ranks`.

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
        """Wait for pending sends and receives. gloo abandons a message if its handle is dropped before the wait."""
        while pending:
            pending.pop(0).wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))

    def _failed(self, what: str, late: str, error: RuntimeError) -> ExchangeError:
        self.close()
        cause = str(error).rstrip(". \n")
        return ExchangeError(f"{what}: {late} does not answer: {cause}. {UNCHANGED}. {REMEDY}")

    def close(self) -> None:
        """Close all connections, so that ranks that are waiting for this rank fail at once. `lane_of` makes a new lane
        when it is next called."""
        self._group, self.is_open = None, False


def _name_of(ranks: Ranks, number: int) -> str:
    """Return the key prefix of a lane in torch's store. It has a hash of the ranks, because keys are limited to 8 KiB,
    too short for a list of 2,000 ranks."""
    return f"shardmuon lane {hashlib.blake2b(repr(ranks).encode(), digest_size=16).hexdigest()} {number}"


def _bytes_of(data: bytes) -> Tensor:  # uint8
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def lane_of(ranks: Ranks) -> Lane:
    """Return the open lane of these ranks (ascending, including this rank). It is created on first use."""
    world = default_group()
    if world is None:
        raise RuntimeError(f"ranks {ranks} are to talk, but torch.distributed is not initialized")
    lanes = MADE.setdefault(world, Made()).lanes
    lane: Lane | None = lanes.get(ranks)
    if lane is None or not lane.is_open:
        lane = lanes[ranks] = Lane(ranks, world, 1 if lane is None else lane.number + 1)
    return lane


def close_lane(ranks: Ranks) -> None:
    """Close the lane of these ranks if this rank has created it. Creating it just to close it would make the sequence
    number of the next lane differ between ranks."""
    made = MADE.get(default_group()) if default_group() is not None else None
    if made is not None and ranks in made.lanes:
        made.lanes[ranks].close()
