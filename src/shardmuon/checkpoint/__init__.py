"""Checkpoints: whole jobs on any layout, state dicts and their vetting, other Muons' state.

May import `step` and what that may. Users import this package: `from shardmuon import checkpoint`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardmuon.checkpoint.foreign import FORMATS as FORMATS
    from shardmuon.checkpoint.foreign import LoadReport as LoadReport
    from shardmuon.checkpoint.foreign import load_foreign as load_foreign
    from shardmuon.checkpoint.foreign import merge_ranks as merge_ranks
    from shardmuon.checkpoint.saving import load as load
    from shardmuon.checkpoint.saving import save as save
    from shardmuon.checkpoint.saving import to_torch_muon as to_torch_muon

_MODULES = dict.fromkeys(("FORMATS", "LoadReport", "load_foreign", "merge_ranks"), "foreign")
_MODULES |= dict.fromkeys(("load", "save", "to_torch_muon"), "saving")
__all__ = ["FORMATS", "LoadReport", "load", "load_foreign", "merge_ranks", "save", "to_torch_muon"]


def __getattr__(name: str) -> Any:
    """Import on first use: torch.distributed.checkpoint takes longer than torch itself."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
