"""Engines: one file per kind of parameter storage. An engine describes a tensor's placement and accesses its storage.

A tensor that no engine recognizes is treated as a plain tensor. Engines for frameworks are defined and registered in
the frameworks' folders.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import Parameter

from shardmuon.comm.groups import GroupRef
from shardmuon.layout.engines.base import Engine, Group
from shardmuon.layout.engines.dtensor import DTensorEngine
from shardmuon.layout.engines.flat import FlatEngine
from shardmuon.layout.engines.fsdp1 import FSDP1Engine, refuse_flat
from shardmuon.layout.engines.tensor_parallel import TensorParallelEngine

__all__ = ["Engine", "engine_for", "engine_of", "register", "sharing"]

_PLAIN = Engine()
_ENGINES = [FSDP1Engine(), DTensorEngine(), FlatEngine(), _PLAIN]  # tried in order; the last recognizes every tensor


def register(engine: Engine) -> None:
    """Register an engine, to be tried before all others. It must recognize only its own tensors."""
    _ENGINES.insert(0, engine)


def engine_of(param: Tensor) -> Engine:
    """Return the engine that can access a parameter's storage. To find the placement of a plain tensor, use
    `engine_for` instead, which also reads the options of the parameter group."""
    # a plain tensor without attributes, which frameworks set on tensors that they own, is no engine's
    if type(param) not in (Tensor, Parameter) or param.__dict__:
        for engine in _ENGINES:
            if engine.recognizes(param):
                return engine
    return _PLAIN


def sharing(param: Tensor, group: Group) -> Engine:
    """Return the engine of a parameter. For a plain tensor, the options of its parameter group decide. Other errors in
    the parameter are not checked, so that the engine can still report which ranks share the parameter.

    Raises:
        ValueError: The engine cannot be determined; the message lacks the parameter's name.
    """
    engine = engine_of(param)
    if engine is _PLAIN:
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
