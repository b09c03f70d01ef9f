"""DistributedDataParallel around parameters whose optimizer was not told of it."""

from __future__ import annotations

import gc
from collections.abc import Iterable

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer

from shardmuon._torch import default_group
from shardmuon.comm.groups import group_ranks

WORTH_IT = 2**20


def find_ddp(optimizer: object, params: Iterable[Tensor]) -> DistributedDataParallel | None:
    """The DistributedDataParallel that keeps one of these parameters equal on several ranks, if there is one.

    Parameters do not know that they are wrapped, so this looks through the objects of the process: once, at the first
    step of an optimizer that has plain matrices and no process group (0.1 to 0.2 s for a million objects). Matrices of
    fewer elements than `WORTH_IT` together are not worth that.

    Args:
        optimizer: If another optimizer holds it as its `optim`, the answer is None: torch's ZeroRedundancyOptimizer
            shares out the work itself, and the ranks of its PostLocalSGDOptimizer are unequal.
        params: Of the optimizer.
    """
    params = list(params)
    if default_group() is None or sum(p.numel() for p in params) < WORTH_IT:
        return None
    mine = set(map(id, params))
    objects = gc.get_objects()
    wrappers = {kind for kind in set(map(type, objects)) if issubclass(kind, DistributedDataParallel)}
    wrapper: DistributedDataParallel | None = None
    for found in objects if wrappers else ():
        if type(found) in wrappers and not mine.isdisjoint(map(id, found.module.parameters())):
            wrapper = found
        elif issubclass(type(found), Optimizer) and getattr(found, "optim", None) is optimizer:
            return None
    return wrapper if wrapper is not None and len(group_ranks(wrapper.process_group)) > 1 else None


def repeated_text(ddp: DistributedDataParallel, made_alone: bool) -> str:
    """What to write so that the ranks of a DistributedDataParallel share the work.

    Args:
        ddp: The wrapper.
        made_alone: Whether the optimizer was made before init_process_group.
    """
    world = ddp.process_group is default_group()
    group = "torch.distributed.group.WORLD" if world else "the process group that DistributedDataParallel was given"
    text = (
        f"DistributedDataParallel keeps this optimizer's matrices equal on {len(group_ranks(ddp.process_group))} "
        f"ranks, and each of them orthogonalizes all. Share the work: Muon(..., process_group={group})"
    )
    if made_alone:
        text += ". Make the optimizer after init_process_group: before it, torch.distributed.group.WORLD is None"
    return text
