"""Engines: one file per kind of parameter storage. An engine describes a tensor's placement and accesses its storage.

A tensor that no engine recognizes is treated as a plain tensor. Engines for frameworks are defined and registered in
the frameworks' folders.
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
    """Return the engine of a parameter. For a plain tensor, the options of its parameter group decide. Other errors in
    the parameter are not checked, so that the engine can still report which ranks share the parameter.

    Raises:
        ValueError: The engine cannot be determined; the message lacks the parameter's name.
    """
    engine = engine_of(param)
    if type(engine) is Engine:
        shards = GroupRef.of(group.get("tp_group"), "tp_group")
        return TensorParallelEngine(shards) if shards is not None and shards.ranks else engine
    refuse_flat(param)
    return engine


def engine_for(param: Tensor, group: Group) -> Engine:
    """Return the engine of a parameter after checking that the options of its parameter group fit the parameter.

    Raises:
        ValueError: The options do not fit; the message lacks the parameter's name.
    """
    engine = sharing(param, group)
    if isinstance(engine, TensorParallelEngine):
        engine.cut(param)
    return engine
