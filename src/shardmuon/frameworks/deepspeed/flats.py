"""A flat partition of ZeRO with what shardmuon knows of it: shards, names, momentum.

[Note: names of state]
    DeepSpeed's universal checkpoints know Adam's state only: `exp_avg`, `exp_avg_sq` and `step`. So the momentum of a
    flat is called `exp_avg`. `exp_avg_sq` is one zero, shown at every element: it takes no memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardmuon.comm.groups import group_ranks
from shardmuon.frameworks.deepspeed.nvme import keeps_momentum_in_memory, swapped_numel, zero3_of
from shardmuon.frameworks.deepspeed.partitions import (
    Slice,
    differs_from_model,
    make_shard,
    point_to,
    shape_of,
    slices_of,
)
from shardmuon.momentum.keeper import BUFFER

if TYPE_CHECKING:
    from shardmuon.core import Core


class Flat:
    """One flat with its shards. Lives as long as the flat does.

    Attributes:
        slices, names: What this rank has of each parameter, and what that is called.
        group, ranks: Those that share the flat.
    """

    def __init__(self, flat: Tensor, names: Mapping[int, str], params: Sequence[Tensor]) -> None:
        zero3 = zero3_of(params)
        self.flat = flat
        self.swapped = swapped_numel(flat, zero3) > 0
        self.keeps_momentum = keeps_momentum_in_memory(zero3)
        self.slices, self.group = slices_of(flat, params)
        strangers = [shape_of(part.param) for part in self.slices if id(part.param) not in names]
        if strangers:
            raise ValueError(
                f"a ZeRO partition holds parameters of shapes {strangers} that the optimizer was not made with: "
                "DeepSpeed has put them in the place of others (AutoTP, AutoEP). Set autotp_size=1 and leave "
                "expert_parallel out"
            )
        self.names = [names[id(part.param)] for part in self.slices]
        self.ranks = frozenset(group_ranks(self.group))

    def unlike_model(self) -> list[str]:
        """Names of the parameters whose part in the flat is not what the model has there."""
        pairs = zip(self.names, self.slices, strict=True)
        return [name for name, part in pairs if part.numel and differs_from_model(self.flat, part)]

    @cached_property
    def shards(self) -> list[Tensor]:
        """One for each slice. Made while the flat is stepped: with NVMe offload it is empty at other times."""
        return [make_shard(self.flat, part, self.group) for part in self.slices]

    def named_shards(self) -> list[tuple[str, Tensor]]:
        """The name of each slice's parameter, and its shard."""
        return list(zip(self.names, self.shards, strict=True))

    def refresh(self, momentum: Tensor, state: Mapping[Tensor, dict[str, Any]]) -> None:
        """Let shards, gradients and momentum share memory with the flat's as they are now."""
        part: Slice
        for shard, part in zip(self.shards, self.slices, strict=True):
            point_to(shard, self.flat, part)
            state[shard][BUFFER] = momentum.narrow(0, part.offset, part.numel)


def momentum_of(core: Core, known: Flat) -> Tensor:
    """A flat's momentum, zeros at first."""
    flat, state = known.flat, core.state[known.flat]
    if "exp_avg" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
        state["exp_avg"] = torch.zeros_like(flat)
        if not known.swapped:  # the swapper would make a file of it
            state["exp_avg_sq"] = flat.new_zeros(()).expand(flat.shape)
        elif known.keeps_momentum:
            state["exp_avg"].swappable = False
    kept: Tensor = state["exp_avg"]
    if kept.shape != flat.shape:
        raise ValueError(
            f"the momentum of a ZeRO partition has shape {tuple(kept.shape)}, the partition {tuple(flat.shape)}: load "
            "a checkpoint of this number of ranks and these groups, or a universal one"
        )
    return kept
