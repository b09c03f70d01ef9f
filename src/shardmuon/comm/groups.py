"""Process groups: weak references to them, creation by a subset of ranks, and packed all-to-all exchanges."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from functools import partial
from operator import sub
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardmuon._torch import default_group, is_alive, new_group_among

Ranks = tuple[int, ...]  # global ranks, ascending unless stated otherwise


@dataclass
class Made:
    """Process groups and lanes (channels for short messages) that were created under one default process group and are
    dropped together with it.

    Attributes:
        token: Random bytes that tell this default group from all others, also from those of other processes.
        groups: Ranks -> number of process groups created over them, and a weak reference to the one in use. Only torch
            has a strong reference: a communicator that outlives destroy_process_group() is torn down at interpreter
            exit, where its threads abort the process (seen with gloo).
        lanes: Ranks -> their latest lane (comm/lanes.py), which may be closed. A lane holds no reference to the
            default group.
    """

    token: bytes = field(default_factory=partial(os.urandom, 16))
    groups: dict[Ranks, tuple[int, weakref.ref[Any]]] = field(default_factory=dict)
    lanes: dict[Ranks, Any] = field(default_factory=dict)


MADE: weakref.WeakKeyDictionary[Any, Made] = weakref.WeakKeyDictionary()  # key: a default process group


def my_rank() -> int:
    """Global rank of this process; 0 without torch.distributed."""
    return dist.get_rank() if default_group() is not None else 0


def num_ranks() -> int:
    """Number of ranks in the job; 1 without torch.distributed."""
    return dist.get_world_size() if default_group() is not None else 1


@dataclass(frozen=True)
class GroupRef:
    """Weak reference to a process group, identified by its ranks. See `Made` for why it does not keep the group alive.

    Attributes:
        ranks: Global ranks in group-rank order.
        group_name: torch's name of the group; "" if only ranks were given.
        is_default: True if the group was the default group. If that group is gone, the reference resolves to the
            current default group, provided that it has the same ranks.
    """

    ranks: Ranks
    group_name: str = ""
    is_default: bool = field(default=False, compare=False)
    _live: Callable[[], Any] = field(default=lambda: None, compare=False, repr=False)

    @classmethod
    def of(cls, value: Any, what: str = "process_group") -> GroupRef | None:
        """Make a reference from a process group, a sequence of global ranks, or an existing reference. None stays None.

        Args:
            value: The process group, ranks, reference or None.
            what: Name of the option, for messages.

        Raises:
            ValueError: `value` is none of these, or this rank is not in the group.
        """
        if value is None or isinstance(value, GroupRef):
            return value
        if isinstance(value, (tuple, list)):
            ranks = tuple(value)
            if not all(isinstance(rank, int) for rank in ranks) or len(set(ranks)) < len(ranks):
                raise ValueError(f"{what}={value!r} must be a process group or different global ranks")
            found = cls(ranks)
        elif isinstance(value, int) or not hasattr(value, "group_name"):  # new_group() returns an int to excluded ranks
            if value == dist.GroupMember.NON_GROUP_MEMBER:
                raise ValueError(
                    f"{what}={value!r} is what new_group() gives a rank that it leaves out, here rank {my_rank()}. "
                    "Give each rank a group that it is in, or none"
                )
            raise ValueError(f"{what}={value!r} is no process group. Give one of torch.distributed, or global ranks")
        else:
            default = value is default_group()
            found = cls(group_ranks(value), str(value.group_name), default, weakref.ref(value))
        if found.ranks and my_rank() not in found.ranks:
            raise ValueError(f"{what} has ranks {found.ranks}, and rank {my_rank()} is not among them")
        return found

    def live(self) -> Any:
        """Return the process group, or None if only ranks are known.

        Raises:
            RuntimeError: The group has been destroyed, or the reference was unpickled from another process.
        """
        group = self._live()
        if self.group_name and (group is None or not is_alive(group)):
            world = default_group()
            if self.is_default and world is not None and group_ranks(world) == self.ranks:
                return world
            raise RuntimeError(_DESTROYED)
        return group

    def __deepcopy__(self, memo: Any) -> GroupRef:
        return self

    def __reduce__(self) -> Any:
        return GroupRef, (self.ranks, self.group_name, self.is_default)


_DESTROYED = (
    "the process group that parameters or the optimizer were made with has been destroyed. Make a new group, and "
    "parameters and optimizer with it"
)


def group_ranks(group: Any) -> Ranks:
    """Global ranks of a process group in group-rank order."""
    if isinstance(group, GroupRef):
        group.live()
        return group.ranks
    try:
        return tuple(dist.get_process_group_ranks(group))
    except KeyError:
        raise RuntimeError(_DESTROYED) from None


def group_for(ranks: Ranks, hint: Any = None) -> Any:
    """Return the process group over exactly these ranks (ascending). Collective over `ranks`, and over no other rank,
    at the first call; later calls return the cached group.

    A new group has the timeout of the group `hint`, or that of the default group if there is no hint. torch keeps all
    groups until `destroy_process_group()`.
    """
    hint = hint.live() if isinstance(hint, GroupRef) else hint
    world = default_group()
    if world is None:
        raise RuntimeError(f"parameters are spread over ranks {ranks}, but torch.distributed is not initialized")
    made = MADE.setdefault(world, Made()).groups
    number, ref = made.get(ranks, (0, None))
    kept = None if ref is None else ref()
    if kept is not None and is_alive(kept):  # a destroyed group may still be referenced
        return kept  # the hint is ignored, since hints may differ between ranks that rebuild a plan
    for group in (world, hint):
        if group is not None and group_ranks(group) == ranks:
            break
    else:
        number += 1  # the number is equal on all of these ranks, since creating a group is collective
        group = new_group_among(ranks, number, hint)
    made[ranks] = number, weakref.ref(group)
    return group


def _backends_of(group: Any) -> dict[str, str]:
    """Map each device type to the group's backend for tensors on it ("nccl", "gloo", ...)."""
    return dict(part.split(":", 1) for part in dist.get_backend_config(group).split(",") if ":" in part)


def talking_device(device: torch.device, group: Any) -> torch.device:
    """Return `device`, or the accelerator if `device` is the CPU and the group has no CPU backend, as in NCCL-only jobs
    that offload parameters to the CPU."""
    if device.type != "cpu" or "cpu" in _backends_of(group):
        return device
    found = torch.accelerator.current_accelerator()
    return device if found is None else torch.device(found.type, torch.accelerator.current_device_index())


def wire_device(device: torch.device, preferred: torch.device | None, ranks: Ranks) -> torch.device:
    """Choose the device of the exchange buffers for matrices on `device`: `preferred` if the process group of the ranks
    has a backend other than gloo for it, otherwise a device that the group supports."""
    if len(ranks) == 1:
        return preferred or device
    if preferred is None and device.type != "cpu":
        return device
    group = group_for(ranks)
    if preferred is not None and _backends_of(group).get(preferred.type, "gloo") != "gloo":
        return preferred
    return talking_device(device, group)


# ------------------------------------------------------------------------------------------------- all-to-all exchange


@dataclass
class Traffic:
    """Counters of this rank's communication and orthogonalized matrices.

    Attributes:
        exchanges: All-to-all calls: two for each bucket whose matrices are gathered, and one for each bucket whose
            results are relayed to other replicas.
        agreements: Votes before a step, including those that refused the step.
        bytes_sent: Bytes sent by this rank in exchanges.
        orthogonalized: Matrices orthogonalized on this rank.
        norm_reductions: Small all-reduces of weight norms, for variants that control these norms.
        norms_sent: Weight norms sent in these all-reduces, one of 8 bytes per matrix.
    """

    exchanges: int = 0
    agreements: int = 0
    bytes_sent: int = 0
    orthogonalized: int = 0
    norm_reductions: int = 0
    norms_sent: int = 0

    def since(self, earlier: Traffic) -> Traffic:
        """Return the differences between these counters and an earlier copy."""
        return Traffic(*map(sub, astuple(self), astuple(earlier)))


class Pending(NamedTuple):
    """An all-to-all in progress. It also keeps the send buffer alive, which must outlive the collective."""

    work: Any
    came: Tensor  # 1-D
    sent: Tensor  # 1-D

    def wait(self) -> Tensor:  # 1-D
        """Wait for the exchange (on an accelerator, the current stream waits) and return the receive buffer."""
        self.work.wait()
        return self.came


def start(
    group: Any, traffic: Traffic, send: Tensor, send_splits: tuple[int, ...], recv_splits: tuple[int, ...]
) -> Pending:
    """Start one packed all-to-all.

    Args:
        group: Process group of the ranks that exchange.
        traffic: Counters to update.
        send: 1-D send buffer: the elements for each rank, in group-rank order.
        send_splits, recv_splits: Number of elements to send to and receive from each rank.
    """
    came = torch.empty(sum(recv_splits), dtype=send.dtype, device=send.device)
    work = dist.all_to_all_single(came, send, list(recv_splits), list(send_splits), group=group, async_op=True)
    traffic.exchanges += 1
    traffic.bytes_sent += send.numel() * send.element_size()
    return Pending(work, came, send)
