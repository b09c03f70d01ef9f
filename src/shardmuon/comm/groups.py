"""Process groups: references that keep none alive, those made among some ranks, and the one exchange over them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from operator import sub
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardmuon._torch import default_group, is_alive, new_group_among

Ranks = tuple[int, ...]  # global, ascending where nothing else is said


@dataclass
class Made:
    """Process groups and lanes made under one default group, dropped together with it.

    Attributes:
        groups: Ranks -> how many process groups over them were made, and the one in use. A communicator that outlived
            destroy_process_group() would be torn down at interpreter exit, when its threads abort the process (seen
            with gloo), so it is kept by torch alone.
        lanes: Ranks -> their last lane (comm/vote.py), which may be closed. It keeps no default group alive.
    """

    groups: dict[Ranks, tuple[int, weakref.ref[Any]]] = field(default_factory=dict)
    lanes: dict[Ranks, Any] = field(default_factory=dict)


MADE: weakref.WeakKeyDictionary[Any, Made] = weakref.WeakKeyDictionary()  # by default group


def my_rank() -> int:
    """The global rank of this process; 0 without torch.distributed."""
    return dist.get_rank() if default_group() is not None else 0


def num_ranks() -> int:
    """Ranks in the job; 1 without torch.distributed."""
    return dist.get_world_size() if default_group() is not None else 1


@dataclass(frozen=True)
class GroupRef:
    """A process group by its ranks. It does not keep the group alive, for the reason at `Made`.

    Attributes:
        ranks: Global ranks in group-rank order.
        group_name: torch's name of the group, "" if only ranks were given.
        is_default: Whether it was the default group. Then it is that of today, if that has as many ranks.
    """

    ranks: Ranks
    group_name: str = ""
    is_default: bool = field(default=False, compare=False)
    _live: Callable[[], Any] = field(default=lambda: None, compare=False, repr=False)

    @classmethod
    def of(cls, value: Any, what: str = "process_group") -> GroupRef | None:
        """A reference to a process group, to the group of these global ranks, or None.

        Raises:
            ValueError: Neither, or this rank is not in it. `what`: the option's name.
        """
        if value is None or isinstance(value, GroupRef):
            return value
        if isinstance(value, (tuple, list)):
            ranks = tuple(value)
            if not all(isinstance(rank, int) for rank in ranks) or len(set(ranks)) < len(ranks):
                raise ValueError(f"{what}={value!r} must be a process group or different global ranks")
            found = cls(ranks)
        elif isinstance(value, int) or not hasattr(value, "group_name"):  # new_group() gives outsiders an int
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
        """The group, or None if only ranks are known.

        Raises:
            RuntimeError: The group has been destroyed, or it came with a pickle from another process.
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
    """A process group over exactly these ranks (ascending), made among them alone and kept as long as torch keeps it.

    Collective among `ranks` at its first call. Its time-out is that of `hint`, else of the default group. torch
    destroys the groups with `destroy_process_group()`.
    """
    hint = hint.live() if isinstance(hint, GroupRef) else hint
    world = default_group()
    if world is None:
        raise RuntimeError(f"parameters are spread over ranks {ranks}, but torch.distributed is not initialized")
    made = MADE.setdefault(world, Made()).groups
    number, ref = made.get(ranks, (0, None))
    kept = None if ref is None else ref()
    if kept is not None and is_alive(kept):  # else destroyed, but someone may hold it
        return kept  # whatever the hint: ranks that plan anew may hold different ones
    for group in (world, hint):
        if group is not None and group_ranks(group) == ranks:
            break
    else:
        number += 1  # the same on each of them, as making one is collective among them
        group = new_group_among(ranks, number, hint)
    made[ranks] = number, weakref.ref(group)
    return group


def _backends_of(group: Any) -> dict[str, str]:
    """Device type -> what moves its tensors in this group ("nccl", "gloo", ...)."""
    return dict(part.split(":", 1) for part in dist.get_backend_config(group).split(",") if ":" in part)


def talking_device(device: torch.device, group: Any) -> torch.device:
    """`device`, or the accelerator if the group cannot move CPU tensors (offloading in a job with NCCL alone)."""
    if device.type != "cpu" or "cpu" in _backends_of(group):
        return device
    found = torch.accelerator.current_accelerator()
    return device if found is None else torch.device(found.type, torch.accelerator.current_device_index())


def wire_device(device: torch.device, preferred: torch.device | None, ranks: Ranks) -> torch.device:
    """The device of exchange buffers for matrices on `device`: `preferred` if the ranks' group moves tensors there
    without gloo."""
    if len(ranks) == 1:
        return preferred or device
    if preferred is None and device.type != "cpu":
        return device
    group = group_for(ranks)
    if preferred is not None and _backends_of(group).get(preferred.type, "gloo") != "gloo":
        return preferred
    return talking_device(device, group)


# -------------------------------------------------------------------------------------------------------- the exchange


@dataclass
class Traffic:
    """Counts of this rank's communication and orthogonalized matrices, each counted where it happens.

    Attributes:
        exchanges: all-to-all calls (two for each bucket that gathers, one where replicas pass on).
        agreements: votes before a step that all ranks have gone on from, or refused.
        bytes_sent: Bytes that left this rank in exchanges.
        orthogonalized: Matrices that went through the orthogonalizer on this rank.
        norm_reductions: Small all-reduces of norms of weights, for variants that control them.
        norms_sent: Matrices whose norms were reduced, 8 bytes each.
    """

    exchanges: int = 0
    agreements: int = 0
    bytes_sent: int = 0
    orthogonalized: int = 0
    norm_reductions: int = 0
    norms_sent: int = 0

    def since(self, earlier: Traffic) -> Traffic:
        """The difference to an earlier copy."""
        return Traffic(*map(sub, astuple(self), astuple(earlier)))


class Pending(NamedTuple):
    """An exchange under way. Holds what is sent, too: it must outlive the collective."""

    work: Any
    came: Tensor  # 1-D
    sent: Tensor  # 1-D

    def wait(self) -> Tensor:  # 1-D
        """Wait (on an accelerator: the current stream waits) until all has come; return it."""
        self.work.wait()
        return self.came


def start(
    group: Any, traffic: Traffic, send: Tensor, send_splits: tuple[int, ...], recv_splits: tuple[int, ...]
) -> Pending:
    """Start one packed all-to-all.

    Args:
        group: The process group over the ranks.
        traffic: Counts it.
        send: 1-D, what goes to each rank side by side.
        send_splits, recv_splits: Elements to and from each rank.
    """
    came = torch.empty(sum(recv_splits), dtype=send.dtype, device=send.device)
    work = dist.all_to_all_single(came, send, list(recv_splits), list(send_splits), group=group, async_op=True)
    traffic.exchanges += 1
    traffic.bytes_sent += send.numel() * send.element_size()
    return Pending(work, came, send)
