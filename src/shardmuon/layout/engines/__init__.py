"""Engines: one file for each way to keep a parameter, which says how such a tensor lies and reaches its storage.

A tensor that none recognizes is a plain one. Engines of frameworks stand in their folders and are registered there.
"""

from __future__ import annotations

from torch import Tensor

from shardmuon.layout.engines.base import PLAIN, Engine, Group, engine_of, register
from shardmuon.layout.engines.dtensor import DTensorEngine
from shardmuon.layout.engines.flat import FlatEngine
from shardmuon.layout.engines.fsdp1 import FSDP1Engine, refuse_flat
from shardmuon.layout.engines.tensor_parallel import TensorParallelEngine, tensor_parallel_engine

__all__ = ["Engine", "engine_for", "engine_of", "register", "sharing"]

for builtin in (FlatEngine(), DTensorEngine(), FSDP1Engine()):
    register(builtin)


def sharing(param: Tensor, group: Group) -> Engine:
    """The engine of this parameter, given what the options of its group say of plain tensors. It knows who shares the
    parameter, whatever else is wrong with it.

    Raises:
        ValueError: The engine cannot be told; the message lacks its name.
    """
    engine = engine_of(param)
    if engine is PLAIN:
        return tensor_parallel_engine(param, group) or engine
    refuse_flat(param)
    return engine


def engine_for(param: Tensor, group: Group) -> Engine:
    """The engine of this parameter, once the options of its group are known to fit it.

    Raises:
        ValueError: They do not fit; the message lacks the parameter's name.
    """
    engine = sharing(param, group)
    if isinstance(engine, TensorParallelEngine):
        engine.cut(param)
    return engine
