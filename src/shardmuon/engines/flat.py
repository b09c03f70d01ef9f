"""1-D shards in which a matrix is cut at any element: ZeRO's partitions and Megatron's distributed optimizer.

A shard says what it is a part of in one attribute, which whoever made it sets with `mark_flat`. The ranks exchange
what they hold when the plan is made, and it must cover the whole once. Ranks that hold nothing have an empty shard.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardmuon.engines.local import LocalEngine
from shardmuon.layout.readers.flat import FlatShard, info_of
from shardmuon.layout.readers.flat import mark_flat as mark_flat
from shardmuon.layout.views import Ints


def home_of(param: Tensor) -> torch.device | None:
    """The device to which a flat shard belongs that is kept on the CPU, if it is one."""
    info: FlatShard | None = getattr(param, "_shardmuon_flat", None)
    home: torch.device | None = getattr(param, "_shardmuon_home", None) if info is None else info.home
    return home if param.device.type == "cpu" else None


class FlatEngine(LocalEngine):
    """Tensors that `mark_flat` has marked."""

    def recognizes(self, param: Tensor) -> bool:
        return hasattr(param, "_shardmuon_flat")

    def info(self, param: Tensor) -> FlatShard:
        """What it is a part of."""
        return info_of(param)

    def shape(self, param: Tensor) -> Ints:
        return self.info(param).shape

    def signature(self, param: Tensor) -> object:
        return tuple(param.shape), self.info(param)

    def lacks_gradient(self, param: Tensor) -> bool:
        return False
