"""Engines are adapters for different kinds of parameter storage. An engine describes how a tensor is distributed over
the ranks, and accesses the part that this rank stores. The base engine handles plain tensors, and all tensors that no
other engine recognizes.

Each kind of storage has its own file. Engines for a single framework are defined in the framework's file in
`shardmuon.frameworks`.
"""

from __future__ import annotations

from torch import Tensor

from shardmuon.comm.groups import GroupRef
from shardmuon.layout.engines.base import Engine, Group, engine_of, register
from shardmuon.layout.engines.dtensor import DTensorEngine
from shardmuon.layout.engines.flat import FlatEngine
from shardmuon.layout.engines.fsdp1 import FSDP1Engine
from shardmuon.layout.engines.tensor_parallel import TensorParallelEngine

__all__ = ["Engine", "engine_for", "engine_of", "register"]

for _builtin in (FlatEngine(), DTensorEngine(), FSDP1Engine()):
    register(_builtin)


def engine_for(param: Tensor, group: Group) -> Engine:
    """Return the engine (storage adapter) for a parameter. For a plain tensor, the choice depends on the options of the
    parameter group.

    Raises:
        ValueError: The option `tp_group` is invalid. The message does not contain the parameter's name.
    """
    engine = engine_of(param)
    shards = GroupRef.of(group.get("tp_group"), "tp_group") if type(engine) is Engine else None
    return TensorParallelEngine(shards) if shards is not None and shards.ranks else engine
