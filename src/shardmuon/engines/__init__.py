"""How each framework keeps its parameters. `ENGINES` is asked in order; the last one takes any plain tensor."""

from __future__ import annotations

from torch import Tensor

from shardmuon.engines.base import Claim, Description, Engine
from shardmuon.engines.deepspeed import DeepSpeedEngine
from shardmuon.engines.dtensor import DTensorEngine
from shardmuon.engines.local import LocalEngine
from shardmuon.engines.megatron_fsdp import MegatronFSDPEngine

__all__ = ["ENGINES", "Claim", "Description", "Engine", "engine_of"]

ENGINES: tuple[Engine, ...] = (MegatronFSDPEngine(), DTensorEngine(), DeepSpeedEngine(), LocalEngine())


def engine_of(param: Tensor) -> Engine:
    """The engine that describes this parameter."""
    return next(engine for engine in ENGINES if engine.recognizes(param))
