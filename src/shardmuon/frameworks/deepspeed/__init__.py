"""DeepSpeed: what an optimizer needs to be given to `deepspeed.initialize`.

ZeRO's partitions and swap files are in partitions.py, the step on them and checkpoints in host.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from shardmuon.frameworks.deepspeed.host import load_checkpoint as load_checkpoint

# Settings that DeepSpeed asks for where an optimizer is not its own.
REQUIRED = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}


def expert_groups(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Groups in which DeepSpeed finds the experts of its MoE layers, whose gradients it reduces over other ranks.

    DeepSpeed's `split_params_into_different_moe_groups_for_optimizer` wants a name for each group and leaves the names
    of all parameters to both halves; this puts both right. Stages 1 and 2 (native MoE is not for stage 3).

    Args:
        groups: Of `shardmuon.param_groups(model)`.
    """
    from deepspeed.moe.utils import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
        split_params_into_different_moe_groups_for_optimizer,
    )

    found: list[dict[str, Any]] = []
    for index, group in enumerate(groups):
        names = {id(p): name for p, name in zip(group["params"], group["param_names"], strict=True)}
        halves = split_params_into_different_moe_groups_for_optimizer([{**group, "name": f"group {index}"}])
        found += [{**half, "param_names": [names[id(p)] for p in half["params"]]} for half in halves if half["params"]]
    return found
