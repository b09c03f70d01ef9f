"""Engines: one file per kind of parameter storage. An engine describes a tensor's placement and accesses its storage.

A tensor that no engine recognizes is treated as a plain tensor. An engine that belongs to a single framework is defined
and registered in the folder of that framework.
"""

from __future__ import annotations

from torch import Tensor

from shardmuon.comm.groups import GroupRef
from shardmuon.layout.engines.base import Engine, Group, engine_of, register
from shardmuon.layout.engines.dtensor import DTensorEngine
from shardmuon.layout.engines.flat import FlatEngine
from shardmuon.layout.engines.fsdp1 import FSDP1Engine, refuse_flat
from shardmuon.layout.engines.tensor_parallel import TensorParallelEngine

__all__ = ["Engine", "engine_for", "engine_of", "register", "sharing"]

for builtin in (FlatEngine(), DTensorEngine(), FSDP1Engine()):
    register(builtin)


def sharing(param: Tensor, group: Group) -> Engine:
    """Return the engine that handles a parameter's kind of storage. For a plain tensor, the engine depends on the
    options of the parameter group. The function does not look for further errors in the parameter, so that the engine
    of a faulty parameter can still report which ranks share the parameter.

    Raises:
        ValueError: The engine cannot be determined. The message does not contain the parameter's name.
    """
    engine = engine_of(param)
    if type(engine) is Engine:
        shards = GroupRef.of(group.get("tp_group"), "tp_group")
        return TensorParallelEngine(shards) if shards is not None and shards.ranks else engine
    refuse_flat(param)
    return engine


def engine_for(param: Tensor, group: Group) -> Engine:
    """Return the engine that handles a parameter's kind of storage, after checking the attributes that describe a
    tensor-parallel shard.

    Raises:
        ValueError: The engine cannot be determined, or the attributes are invalid. The message does not contain the
            parameter's name.
    """
    engine = sharing(param, group)
    if isinstance(engine, TensorParallelEngine):
        engine.cut(param)
    return engine
