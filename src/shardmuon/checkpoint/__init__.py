"""Checkpoints: saving and loading whole jobs on any layout, and validation of state dicts.

May import `step`, and all that `step` may import. Users import this package: `from shardmuon import checkpoint`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardmuon.checkpoint.saving import load, save

__all__ = ["load", "save"]


def __getattr__(name: str) -> Any:
    """Import on first use: torch.distributed.checkpoint takes longer than torch itself."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.saving"), name)
