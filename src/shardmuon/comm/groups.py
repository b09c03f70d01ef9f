"""Communication between ranks. This module keeps weak references to process groups, creates process groups on subsets
of ranks, and exchanges tensors in packed all-to-alls. It also provides lanes. A lane is a channel for short messages
among the CPUs of a set of ranks. It uses gloo, whatever backend exchanges the tensors.

[Note: recursive doubling]
    A lane all-reduces messages by recursive doubling. For k = 1, 2, 4, .., each rank swaps messages with the rank at
    distance k and merges the two messages. After each of these hops, a rank has the merged messages of its block of 2k
    ranks. No message is merged twice, so messages can contain sums. If the number of ranks n is a power of two, each
    rank takes log2(n) hops.

    Otherwise, let p be the largest power of two below n. Only the first p ranks swap messages. Each of the other ranks
    sends its message to one of the first p ranks before the swaps, and receives the result from it after the swaps.
    Each rank then takes at most log2(p) + 2 hops.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import time
import weakref
from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from datetime import timedelta
from functools import partial
from operator import sub
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shardmuon._torch import default_group, group_named, is_alive, new_group_among, timeout_of
from shardmuon.errors import ExchangeError, ranks_text

_T = TypeVar("_T")

Ranks = tuple[int, ...]  # global ranks, in ascending order unless stated otherwise


@dataclass
class _Made:
    """Process groups and lanes (channels for short messages) that belong to one default process group and are dropped
    together with it.

    Attributes:
        token: Random bytes that identify the default group. They differ for each process and each default group.
        groups: Dict from a set of ranks to a tuple with the number of process groups that were created over these
            ranks, and a weak reference to the group in use. A strong reference would keep the group's communicator
            alive after destroy_process_group(), until the interpreter exits. The communicator's threads could then
            abort the process (observed with gloo).
        lanes: Dict from a set of ranks to the latest lane of these ranks, which may be closed.
    """

    token: bytes = field(default_factory=partial(os.urandom, 16))
    groups: dict[Ranks, tuple[int, Callable[[], Any]]] = field(default_factory=dict)
    lanes: dict[Ranks, Lane] = field(default_factory=dict)


# maps each default process group to the process groups and lanes (channels for short messages) created under it
_MADE: weakref.WeakKeyDictionary[Any, _Made] = weakref.WeakKeyDictionary()


def made_under(world: Any) -> _Made:
    """Return the token, process groups and lanes (channels for short messages) of a default process group."""
    return _MADE.setdefault(world, _Made())


def my_rank() -> int:
    """Return the global rank of this process, or 0 if torch.distributed is not initialized."""
    return dist.get_rank() if default_group() is not None else 0


def num_ranks() -> int:
    """Return the number of ranks in the job, or 1 if torch.distributed is not initialized."""
    return dist.get_world_size() if default_group() is not None else 1


@dataclass(frozen=True)
class GroupRef:
    """Reference to a process group by its name, or by its ranks alone. The reference does not keep the group alive (see
    `_Made`). If the job destroys its process groups and creates them again, the reference resolves to the new group
    with the same name and the same ranks.

    Attributes:
        ranks: Global ranks in group-rank order.
        group_name: torch's name of the group; "" if only ranks were given.
    """

    ranks: Ranks
    group_name: str = ""

    @classmethod
    def of(cls, value: Any, what: str = "process_group") -> GroupRef | None:
        """Make a `GroupRef` from a process group or a sequence of global ranks. If `value` is None or already a
        `GroupRef`, return it.

        Args:
            value: A process group, a tuple or list of global ranks, a `GroupRef`, or None.
            what: Name of the option that has this value, for error messages.

        Raises:
            ValueError: `value` has another type or contains a rank twice, or this rank is not in the group.
        """
        if value is None or (isinstance(value, GroupRef) and default_group() is None):
            return value
        if isinstance(value, GroupRef):
            # A `GroupRef` may have been pickled in a job with a different number of ranks, so check below that it
            # contains this rank.
            found = value
        elif isinstance(value, (tuple, list)):
            found = cls(tuple(value))
            if not all(isinstance(rank, int) for rank in value) or len(set(value)) < len(value):
                raise ValueError(f"{what}={value!r} must be a process group or different global ranks")
        elif hasattr(value, "group_name"):
            found = cls(group_ranks(value), str(value.group_name))
        else:
            raise ValueError(
                f"{what}={value!r} is no process group of rank {my_rank()}. Give each rank a group of torch.distributed"
                f" that it is in ({dist.GroupMember.NON_GROUP_MEMBER} is what new_group() gives a rank that it leaves "
                "out), global ranks, or none"
            )
        if found.ranks and my_rank() not in found.ranks:
            raise ValueError(f"{what} has ranks {found.ranks}, and rank {my_rank()} is not among them")
        return found

    def live(self) -> Any:
        """Return the referenced process group, or None if the reference was made from ranks only.

        Raises:
            RuntimeError: The group has been destroyed.
        """
        group = group_named(self.group_name)
        if self.group_name and (group is None or group_ranks(group) != self.ranks):
            raise RuntimeError(_DESTROYED)
        return group


_DESTROYED = (
    "the process group that parameters or the optimizer were made with has been destroyed. Make a new group, and "
    "parameters and optimizer with it"
)


def group_ranks(group: Any) -> Ranks:
    """Return the global ranks of a process group in group-rank order."""
    if isinstance(group, GroupRef):
        group.live()
        return group.ranks
    try:
        return tuple(dist.get_process_group_ranks(group))
    except KeyError:
        raise RuntimeError(_DESTROYED) from None


def group_for(ranks: Ranks, hint: Any = None) -> Any:
    """Return the process group that consists of exactly the given ranks (in ascending order). The first call for a set
    of ranks is collective over these ranks. Later calls return the cached group.

    If the default group or the group `hint` has exactly these ranks, that group is returned. Otherwise, a new group is
    created. Its timeout is that of `hint`, or of the default group if `hint` is None. torch keeps the new group until
    `destroy_process_group()`.
    """
    world = default_group()
    if world is None:
        raise RuntimeError(f"parameters are spread over ranks {ranks}, but torch.distributed is not initialized")
    made = made_under(world)
    number, ref = made.groups.get(ranks, (0, lambda: None))
    kept = ref()
    if kept is not None and is_alive(kept):  # `kept` can be a destroyed group that other code still holds
        # The cached process group takes precedence over `hint`, because ranks that rebuild a plan can pass different
        # hints.
        return kept
    group = next((one for one in (world, hint) if one is not None and group_ranks(one) == ranks), None)
    if group is None:
        number += 1  # number of groups created over these ranks so far, equal on all of them
        group = new_group_among(ranks, number, hint)
    made.groups[ranks] = number, weakref.ref(group)
    return group


def wire_device(device: torch.device, ranks: Ranks, preferred: torch.device | None = None) -> torch.device:
    """Choose the device on which ranks exchange tensors that are stored on `device`.

    If `preferred` is given, return it if there is only one rank, or if the ranks' process group has a backend other
    than gloo for it. Otherwise, return `device`, with one exception: if `device` is the CPU and the group has no CPU
    backend, return the accelerator. This happens in NCCL-only jobs that offload parameters to the CPU.
    """
    if len(ranks) == 1 or (preferred is None and device.type != "cpu"):
        return preferred or device
    config = dist.get_backend_config(group_for(ranks))
    # maps each device type to the group's backend for it, for example {"cuda": "nccl"}
    backends = dict(part.split(":", 1) for part in config.split(",") if ":" in part)
    if preferred is not None and backends.get(preferred.type, "gloo") != "gloo":
        return preferred
    found = torch.accelerator.current_accelerator()
    if device.type != "cpu" or "cpu" in backends or found is None:
        return device
    return torch.device(found.type, torch.accelerator.current_device_index())


# ------------------------------------------------------------------------------------------------- all-to-all exchange


@dataclass
class Traffic:
    """Counters of this rank's communication and of the matrices that this rank orthogonalized.

    Attributes:
        exchanges: Number of all-to-all calls. A bucket (a set of matrices that are exchanged together) has up to three:
            one gathers the matrices from their shards, one returns the results, and one forwards results to other
            replicas.
        agreements: Number of votes before steps, including votes that rejected the step.
        bytes_sent: Number of bytes that this rank sent in all-to-all calls.
        orthogonalized: Number of matrices orthogonalized on this rank.
        norm_reductions: Number of all-reduces of weight norms. Only Muon variants that control weight norms (such as
            Hyperball) need them.
        norms_sent: Number of 8-byte values sent in these all-reduces: one per matrix.
    """

    exchanges: int = 0
    agreements: int = 0
    bytes_sent: int = 0
    orthogonalized: int = 0
    norm_reductions: int = 0
    norms_sent: int = 0

    def start(self, group: Any, send: Tensor, send_splits: tuple[int, ...], recv_splits: tuple[int, ...]) -> Pending:
        """Start an asynchronous all-to-all, and count it in `exchanges` and `bytes_sent`.

        Args:
            group: Process group that runs the all-to-all.
            send: 1-D buffer with the elements to send to each rank, in group-rank order.
            send_splits: Number of elements to send to each rank, in group-rank order.
            recv_splits: Number of elements to receive from each rank, in group-rank order.
        """
        came = torch.empty(sum(recv_splits), dtype=send.dtype, device=send.device)
        work = dist.all_to_all_single(came, send, list(recv_splits), list(send_splits), group=group, async_op=True)
        self.exchanges += 1
        self.bytes_sent += send.numel() * send.element_size()
        return Pending(work, came, send)

    def since(self, earlier: Traffic) -> Traffic:
        """Return how much each counter has increased since the copy `earlier` was made."""
        return Traffic(*map(sub, astuple(self), astuple(earlier)))


class Pending(NamedTuple):
    """An all-to-all in progress.

    Attributes:
        work: Handle that torch returned for the collective.
        came: 1-D receive buffer, filled once `wait` has returned.
        sent: 1-D send buffer. This reference keeps the buffer alive, because it must outlive the collective.
    """

    work: Any
    came: Tensor
    sent: Tensor

    def wait(self) -> Tensor:
        """Wait for the all-to-all and return the 1-D receive buffer. On an accelerator, the current stream waits
        instead of the CPU."""
        self.work.wait()
        return self.came


# ---------------------------------------------------------------------------------------------------------------- lanes


def _hops_of(me: int, num: int) -> list[tuple[str, int]]:
    """List the hops that the rank with index `me` takes in an all-reduce over `num` ranks ([Note: recursive doubling]).
    A hop is a pair (operation, index of the other rank). "send" sends the rank's current message. "hear" receives a
    message and merges it with the rank's current message. "swap" does both. "take" receives the final result."""
    power = 1 << (num.bit_length() - 1)
    if me >= power:
        return [("send", me - power), ("take", me - power)]
    hops = [("swap", me ^ 1 << doubled) for doubled in range(num.bit_length() - 1)]
    return hops if me + power >= num else [("hear", me + power), *hops, ("send", me + power)]


class Lane:
    """Channel for short messages among a set of ranks, based on a gloo group.

    The group connects two ranks only when one of them first sends to the other. Merging the messages of 1,024 ranks
    therefore opens 10 connections per rank instead of 1,023. The group is not registered with torch, so the lane can
    close it at any time. Ranks that are waiting for a message from this rank then raise an error at once.

    Attributes:
        ranks: Global ranks, ascending.
        me: Position of this rank in `ranks`.
        number: Sequence number of this lane among the lanes of the same ranks. It is equal on all of these ranks, and
            makes the lane's keys in torch's store unique.
        LARGEST: Size of the receive buffer in bytes. The size is fixed, because receivers do not know the size of a
            message.
    """

    LARGEST = 1 << 16

    def __init__(self, ranks: Ranks, world: Any, number: int) -> None:
        if not dist.is_gloo_available():
            raise RuntimeError("ranks vote over gloo, which this build of torch does not have")
        self.ranks, self.me, self.number = ranks, ranks.index(dist.get_rank()), number
        self._hops = _hops_of(self.me, len(ranks))
        # The timeout for messages is that of the default process group, or 30 minutes if the group's backends do not
        # expose a timeout.
        self._limit = timeout_of(world) or timedelta(minutes=30)
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_default_device(lazy_init=True)]
        options._timeout = self._limit
        store = dist.PrefixStore(_name_of(ranks, number), dist.distributed_c10d._get_default_store())
        self._group: Any = gloo(store, self.me, len(ranks), options)

    @classmethod
    def over(cls, ranks: Ranks) -> Lane:
        """Return the open lane (message channel) of the given ranks, or create one if none is open. `ranks` is in
        ascending order and contains this rank."""
        world = default_group()
        if world is None:
            raise RuntimeError(
                f"ranks {ranks} are to talk, but torch.distributed is not initialized. Call init_process_group(), or "
                "set process_group to None on the optimizer and in each of its groups"
            )
        lanes = made_under(world).lanes
        lane = lanes.get(ranks)
        if lane is None or lane._group is None:
            lane = lanes[ranks] = cls(ranks, world, 1 if lane is None else lane.number + 1)
        return lane

    @staticmethod
    def close_over(ranks: Ranks) -> None:
        """Close this rank's lane (message channel) for the given ranks, if there is one. Do not create a lane just to
        close it, because the sequence number of the next lane would then differ between ranks."""
        world = default_group()
        if world is not None and ranks in made_under(world).lanes:
            made_under(world).lanes[ranks].close()

    def merge(self, message: _T, merged: Callable[[_T, _T], _T], what: str) -> _T:
        """All-reduce a message over the ranks of the lane by recursive doubling (see [Note: recursive doubling]). The
        timeout applies to the whole all-reduce, not to each hop.

        Args:
            message: This rank's message, which must fit into `LARGEST` bytes when pickled.
            merged: Function that merges two messages. The function must be associative and commutative.
            what: Name of the operation, for error messages.

        Returns:
            The merged message, equal on all ranks.

        Raises:
            ExchangeError: A rank did not answer in time, or its process has ended. The lane is closed.
        """
        deadline = time.monotonic() + self._limit.total_seconds()
        for kind, member in self._hops:
            found, pending = torch.empty(self.LARGEST, dtype=torch.uint8, device="cpu"), list[Any]()
            try:
                if kind in ("send", "swap"):
                    pending.append(self._group.send([_bytes_of(pickle.dumps(message))], member, 7))
                if kind != "send":
                    pending.append(self._group.recv([found], member, 7))
                self._wait(pending, deadline)
            except RuntimeError as error:
                # The error's traceback keeps `pending` alive, and the handles in it would keep connections open.
                pending.clear()
                late = f"rank {self.ranks[member]}" + (", or one that it waits for," if len(self.ranks) > 2 else "")
                raise self._failed(what, late, error) from error
            if kind != "send":
                # `pickle.loads` ignores the unused bytes of the receive buffer after the message
                heard = pickle.loads(found.numpy().data)
                message = heard if kind == "take" else merged(message, heard)
        return message

    def share(self, value: bytes, what: str) -> list[Any]:
        """All-gather pickled values of any size over the ranks of the lane.

        Args:
            value: This rank's pickled value.
            what: Name of the operation, for error messages.

        Returns:
            The unpickled value of each rank, in the order of `ranks`.

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
        """Wait for the operations in `pending`, and remove them from the list. Each operation's handle is dropped only
        after the wait, because gloo abandons an operation if its handle is dropped earlier."""
        while pending:
            pending.pop(0).wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))

    def _failed(self, what: str, late: str, error: RuntimeError) -> ExchangeError:
        self.close()
        cause = str(error).rstrip(". \n")
        return ExchangeError(
            f"{what}: {late} does not answer: {cause}. {ExchangeError.UNCHANGED}. {ExchangeError.REMEDY}"
        )

    def close(self) -> None:
        """Close all connections of the lane (message channel), so that ranks that are waiting for this rank fail at
        once. The next call of `Lane.over` for the same ranks makes a new lane."""
        self._group = None


def _name_of(ranks: Ranks, number: int) -> str:
    """Return the prefix of the keys that a lane (message channel) uses in torch's store. The prefix contains a hash of
    the lane's ranks instead of their numbers, because the store limits keys to 8 KiB, which is too short for a list of
    2,000 ranks."""
    return f"shardmuon lane {hashlib.blake2b(repr(ranks).encode(), digest_size=16).hexdigest()} {number}"


def _bytes_of(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
