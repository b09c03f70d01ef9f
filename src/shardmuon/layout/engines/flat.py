"""Engine for 1-D shards that are cut from a flattened tensor at arbitrary elements, such as ZeRO's partitions and the
shards of Megatron's distributed optimizer.

The code that creates a shard attaches a description to it (`FlatShard.mark`), which states to which tensor the shard
belongs and at which element it begins. When a plan is made, ranks send each other the element ranges of their shards.
These ranges must cover the tensor exactly once. A rank that stores no element of the tensor has an empty shard.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardmuon.comm.groups import GroupRef, group_ranks, my_rank
from shardmuon.layout.engines.base import Claim, Engine, Extent, Group, Ties
from shardmuon.layout.mesh import Cut
from shardmuon.layout.pieces import Box, FlatRange, Held
from shardmuon.layout.views import Ints


@dataclass(frozen=True)
class FlatShard:
    """Description of a 1-D shard: the tensor that it belongs to, and its position in the flattened tensor.

    Attributes:
        shape: Shape of the whole tensor.
        start: Index of the shard's first element in the flattened tensor or, under tensor parallelism, in the flattened
            tensor-parallel shard.
        group: Process group whose ranks together store the tensor (or the tensor-parallel shard). A gradient norm sums
            the contributions of all ranks in this group. Parts that are replicated within the group would be counted
            more than once, so a framework that replicates parts within the group must clip gradients itself.
        kind: Name of this kind of shard in error messages.
        tp_group: The tensor-parallel group or, under FSDP1's HYBRID_SHARD, the group of ranks that store replicas of
            this shard. None: there is no such group. All ranks of `group` must have the same index in their own
            `tp_group`.
        cut: How the tensor is cut into equal parts over `tp_group`. None: the tensor is not cut over `tp_group`.
        home: Accelerator from which the shard was offloaded to the CPU. None: the shard is not offloaded.

    Raises:
        ValueError: `cut` does not divide the tensor into equal parts, or is not supported for 1-D shards.
    """

    shape: Ints
    start: int
    group: Any
    kind: str
    tp_group: GroupRef | None = None
    cut: Cut | None = None
    home: torch.device | None = None

    def __post_init__(self) -> None:
        cut, num_parts = self.cut, 1 if self.tp_group is None else len(self.tp_group.ranks)
        if cut is None:
            return
        if self.shape[cut.dim] % (num_parts * cut.stride):
            raise ValueError(
                f"shape {self.shape} is cut along dim {cut.dim} with stride {cut.stride} over {num_parts} "
                "tensor-parallel ranks, which does not divide it in equal parts"
            )
        if cut.dim > 0 and (len(self.shape) != 2 or cut.stride > 1):
            raise ValueError(
                f"{self.kind}, of a tensor of shape {self.shape} that tensor parallelism cuts along dim {cut.dim} with "
                f"stride {cut.stride}, are not supported: 2-D tensors and stride 1 are, or dim 0. Put it in a group "
                "with use_muon=False"
            )

    def held(self, numel: int, part: int = 0) -> tuple[Held, ...]:
        """Return the pieces of the tensor that make up a shard of `numel` elements, in storage order. `part` is this
        rank's index in `tp_group`."""
        stop = self.start + numel
        if self.cut is None:
            return (Held(FlatRange(self.start, stop), (0,)),) if numel else ()
        num_parts = 1 if self.tp_group is None else len(self.tp_group.ranks)
        sizes = (self.shape[self.cut.dim] // num_parts,) * num_parts
        found, at = [], 0
        for box, _ in self.cut.parts(self.shape, sizes)[part]:
            low, high = max(self.start, at), min(stop, at + box.numel)
            if low < high:
                assert isinstance(box, Box), "parts are boxes"
                found.append(Held(FlatRange(low - at, high - at, box), (low - self.start,)))
            at += box.numel
        return tuple(found)

    def mark(self, tensor: Tensor) -> Tensor:
        """Attach this description of a shard to a 1-D tensor, and return the tensor."""
        tensor._shardmuon_flat = self  # type: ignore[attr-defined]
        tensor._shardmuon_home = self.home  # type: ignore[attr-defined]
        return tensor


class FlatEngine(Engine):
    """Engine (storage adapter) for 1-D shards to which `FlatShard.mark` has attached a description."""

    plain_shards = True

    def recognizes(self, param: Tensor) -> bool:
        return hasattr(param, "_shardmuon_flat")

    def info(self, param: Tensor) -> FlatShard:
        """Return the description that `FlatShard.mark` has attached to the shard."""
        info: FlatShard = param._shardmuon_flat  # type: ignore[attr-defined]
        return info

    def ties(self, param: Tensor, group: Group) -> Ties:
        info = self.info(param)
        parts = (my_rank(),) if info.tp_group is None else info.tp_group.ranks
        return Ties(parts, tuple(sorted(group_ranks(info.group))))

    def claim(self, param: Tensor, group: Group) -> Claim:
        info, parts = self.info(param), self.ties(param, group).parts
        cut = f", {len(parts)} replicas" if len(parts) > 1 else ""
        if info.cut is not None:
            dim, stride = info.cut
            cut = f" of tensor-parallel shards on {len(parts)} ranks, cut along dim {dim} with stride {stride}"
        extent = Extent(tuple(param.shape), info.held(param.numel(), parts.index(my_rank())))
        return Claim((info.shape, info.cut), f"{info.kind}{cut}", extent, empty_lacks_gradient=True)

    def groups(self, param: Tensor, group: Group) -> list[Any]:
        info = self.info(param)
        return [*super().groups(param, group), info.group, info.tp_group]

    def shape(self, param: Tensor) -> Ints:
        return self.info(param).shape

    def signature(self, param: Tensor) -> object:
        return super().signature(param), self.info(param)
