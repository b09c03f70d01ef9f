"""Checkpoints: saving and loading whole jobs, whatever their sharding and number of ranks, and validation of state
dicts.

May import `step`, and all that `step` may import. Users import this package: `from shardmuon import checkpoint`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardmuon.checkpoint.saving import load, save

__all__ = ["load", "save"]


def __getattr__(name: str) -> Any:
    """Import `save` and `load` on first use, because importing torch.distributed.checkpoint takes longer than importing
    torch itself."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.saving"), name)
