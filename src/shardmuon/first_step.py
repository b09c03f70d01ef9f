"""Warnings at the first step: no parameter has a gradient, or each rank under DistributedDataParallel orthogonalizes
all matrices because the optimizer was given no process group.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer

from shardmuon._torch import default_group, is_dtensor
from shardmuon.comm.groups import group_ranks, my_rank
from shardmuon.errors import level_of_the_caller
from shardmuon.layout.engines.fsdp1 import is_flattened


def warned_first(optimizer: object, groups: Sequence[Mapping[str, Any]]) -> bool:
    """Check an optimizer's groups after a step, and issue warnings. Return True if some parameter had a gradient; later
    steps then need no check."""
    if any(p.grad is not None for group in groups for p in group["params"]):
        # in groups without a process group, the optimizer treats plain tensors as this rank's own, not as replicas
        alone = (g for g in groups if g["use_muon"] and g["process_group"] is None and g["tp_group"] is None)
        ddp = _find_ddp(optimizer, [p for group in alone for p in group["params"] if not is_dtensor(p)])
        if ddp is not None and my_rank() == group_ranks(ddp.process_group)[0]:
            world = ddp.process_group is default_group()
            group = "torch.distributed.group.WORLD" if world else "the process group that it was given"
            warnings.warn(
                "DistributedDataParallel keeps this optimizer's matrices equal on "
                f"{len(group_ranks(ddp.process_group))} ranks, and each of them orthogonalizes all. Share the work: "
                f"Muon(..., process_group={group}). Make the optimizer after init_process_group: before it, "
                "torch.distributed.group.WORLD is None",
                stacklevel=level_of_the_caller(),
            )
        return True
    # a flattened FSDP1 parameter may have no elements on this rank
    if any(p.numel() > 0 or not is_flattened(p) for group in groups for p in group["params"]):
        warnings.warn(
            "no parameter of this optimizer has a gradient, so this step trained nothing. Call backward() before it. "
            "If you did, the model's parameters are other tensors by now: make the optimizer after fully_shard(), "
            "FSDP() or whatever else replaced them",
            stacklevel=level_of_the_caller(),
        )
    return False


WORTH_IT = 2**20


def _find_ddp(optimizer: object, params: Sequence[Tensor]) -> DistributedDataParallel | None:
    """Find the DistributedDataParallel wrapper that keeps one of these parameters equal on several ranks; None if there
    is none.

    A parameter has no reference to its wrapper, so this scans all objects of the process (0.1 to 0.2 s for a million
    objects). The scan runs once, at the first step of an optimizer that has plain matrices and no process group. It is
    skipped if the matrices have fewer than `WORTH_IT` elements in total.

    Args:
        optimizer: The optimizer. If another optimizer wraps it as its attribute `optim`, the result is None: torch's
            ZeroRedundancyOptimizer distributes the work itself, and under PostLocalSGDOptimizer ranks may differ.
        params: Plain parameters of the optimizer's groups without a process group.
    """
    if default_group() is None or sum(p.numel() for p in params) < WORTH_IT:
        return None
    mine, objects = set(map(id, params)), gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, (DistributedDataParallel, Optimizer))}
    found = [one for one in objects if type(one) in kinds]
    if any(getattr(one, "optim", None) is optimizer for one in found):
        return None
    ddps = (one for one in found if isinstance(one, DistributedDataParallel))
    around = (ddp for ddp in ddps if not mine.isdisjoint(map(id, ddp.module.parameters())))
    return next((ddp for ddp in around if len(group_ranks(ddp.process_group)) > 1), None)
