"""Engines: one file per kind of parameter storage. An engine describes a tensor's placement and accesses its storage.

A tensor that no engine recognizes is treated as a plain tensor. An engine that belongs to a single framework is defined
and registered in the folder of that framework.
"""

from __future__ import annotations

from types import MappingProxyType

from torch import Tensor, nn

from shardmuon.comm.groups import GroupRef
from shardmuon.layout.engines.base import Engine, Group
from shardmuon.layout.engines.dtensor import DTensorEngine
from shardmuon.layout.engines.flat import FlatEngine
from shardmuon.layout.engines.fsdp1 import FSDP1Engine
from shardmuon.layout.engines.tensor_parallel import TensorParallelEngine

__all__ = ["Engine", "engine_of", "register"]

_PLAIN = Engine()
_ENGINES = [FSDP1Engine(), DTensorEngine(), FlatEngine(), _PLAIN]  # in search order; the last recognizes every tensor


def register(engine: Engine) -> None:
    """Register an engine, which is then tried before all engines registered earlier. The engine must recognize only
    tensors of its own kind."""
    _ENGINES.insert(0, engine)


def engine_of(param: Tensor, group: Group = MappingProxyType({})) -> Engine:
    """Return the engine that handles a parameter's kind of storage.

    Args:
        param: The parameter.
        group: Options of the parameter's group, which can name the ranks that share a plain tensor. Without the
            options, the engine can access the storage, but does not find the placement of a plain tensor.

    Raises:
        ValueError: The option `tp_group` is invalid. The message does not contain the parameter's name.
    """
    # Skip the search for a plain tensor without attributes: engines recognize plain tensors by attributes that
    # frameworks set.
    found = _PLAIN
    if type(param) not in (Tensor, nn.Parameter) or param.__dict__:
        found = next(engine for engine in _ENGINES if engine.recognizes(param))
    shards = GroupRef.of(group.get("tp_group"), "tp_group") if found is _PLAIN else None
    return TensorParallelEngine(shards) if shards is not None and shards.ranks else found
