"""How parameters are stored: one file for each way. `ENGINES` is asked in order; the last one takes any plain tensor.

Engines of frameworks stand in their folders and are registered.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from torch import Tensor

from shardmuon._torch import is_bare, is_dtensor
from shardmuon.engines.base import Engine
from shardmuon.engines.flat import FlatEngine
from shardmuon.engines.fsdp1 import FSDP1Engine, FSDP1Reader, refuse_flat
from shardmuon.engines.local import LocalEngine
from shardmuon.engines.tensor_parallel import tensor_parallel_engine
from shardmuon.layout import readers

__all__ = ["ENGINES", "Engine", "engine_for", "engine_of", "register"]

_LOCAL = LocalEngine()
ENGINES: list[Engine] = [FSDP1Engine(), FlatEngine(), _LOCAL]
readers.register(ENGINES[0].recognizes, FSDP1Reader())


def register(engine: Engine) -> None:
    """Ask this engine before those that are known: it recognizes only what is its own."""
    ENGINES.insert(0, engine)


@lru_cache(maxsize=1)
def _know_dtensors() -> None:
    """Import the engine of DTensors when the first is met: torch.distributed.tensor takes longer than torch itself."""
    from shardmuon.engines.dtensor import DTensorEngine

    ENGINES.insert(-3, DTensorEngine())  # before those of plain tensors


def engine_of(param: Tensor) -> Engine:
    """The engine of this parameter."""
    if is_bare(param):
        return _LOCAL
    if is_dtensor(param):
        _know_dtensors()
    for engine in ENGINES:
        if engine.recognizes(param):
            return engine
    raise AssertionError("the last engine recognizes any tensor")


def engine_for(param: Tensor, group: Mapping[str, Any]) -> Engine:
    """The engine of this parameter, given what the options of its group say of plain tensors.

    Raises:
        ValueError: The options do not fit the parameter; the message lacks its name.
    """
    engine = engine_of(param)
    if param.__dict__:
        refuse_flat(param)
    if type(engine) is LocalEngine:
        return tensor_parallel_engine(param, group) or engine
    if group.get("partition_dim") is not None:
        raise ValueError(
            f"partition_dim={group['partition_dim']} is for plain tensors; it is a {type(param).__name__}, which says "
            "itself how it is cut. Put it in a group without partition_dim"
        )
    return engine
