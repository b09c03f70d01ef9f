"""Checkpoints: whole jobs on any layout, state dicts and their vetting, other Muons' state.

May import `step` and what that may. Users import this package: `from shardmuon import checkpoint`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardmuon.checkpoint.foreign import FORMATS, LoadReport, load_foreign, merge_ranks
    from shardmuon.checkpoint.saving import load, save

__all__ = ["FORMATS", "LoadReport", "load", "load_foreign", "merge_ranks", "save"]


def __getattr__(name: str) -> Any:
    """Import on first use: torch.distributed.checkpoint takes longer than torch itself."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "saving" if name in ("load", "save") else "foreign"
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
