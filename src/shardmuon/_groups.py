"""Process groups among some ranks: torch's private names for them, with the versions they change in."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist


def new_group_among(ranks: Sequence[int], number: int, parent: Any = None) -> Any:
    """`new_group(ranks, use_local_synchronization=True)`, called by these ranks only, whatever groups each made before.

    torch names such a group after the number of groups that the calling rank has, so ranks that have made different
    numbers of groups wait for each other for ever (2.11 .. 2.13). `number`: of this group among those of these ranks.

    The group has the time-out of `parent`, by default of the default group: torch would take its own (2.11 .. 2.13).

    While a default group is bound to a device (`init_process_group(device_id=...)`), torch makes every NCCL subgroup
    by splitting the default group's communicator, for which *all* its ranks must call (2.11 .. 2.13, `_new_process_
    group_helper`). Only members call here, so the binding is taken off meanwhile: the group then connects by itself.
    """
    c10d: Any = dist.distributed_c10d
    world: Any = c10d._get_default_group()
    named_by_torch = c10d._hash_ranks_to_str
    bound = getattr(world, "bound_device_id", None)
    c10d._hash_ranks_to_str = lambda ranks: f"shardmuon {'_'.join(map(str, ranks))} {number}"
    if bound is not None:
        world.bound_device_id = None
    try:
        timeout = timeout_of(world if parent is None else parent)
        return dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
    finally:
        c10d._hash_ranks_to_str = named_by_torch
        if bound is not None:
            world.bound_device_id = bound


def timeout_of(group: Any) -> timedelta | None:
    """The time-out of a process group, the longest one if its backends differ; None if no backend tells (MPI, fake).

    torch has no public question for it; the options of gloo's and NCCL's backends know (2.11 .. 2.13).
    """
    found = []
    for device in group._device_types:
        try:
            backend = group._get_backend(device)
        except RuntimeError:  # none for this kind of device
            continue
        timeout = getattr(getattr(backend, "options", None), "_timeout", None)
        if isinstance(timeout, timedelta):
            found.append(timeout)
    return max(found, default=None)
