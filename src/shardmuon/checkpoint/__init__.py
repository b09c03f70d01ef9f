"""Save and load the model and the optimizer of a job, and validate state dicts. The job that loads a checkpoint can
have a different sharding or number of ranks than the job that saved it.

This package may import the package `step` and all packages that `step` may import. Users import this package
with `from shardmuon import checkpoint`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardmuon.checkpoint.saving import load, save

__all__ = ["load", "save"]


def __getattr__(name: str) -> Any:
    """Import `save` and `load` on first use. They need torch.distributed.checkpoint, which takes longer to import than
    torch itself."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.saving"), name)
