"""Imports of the process that the ranks of pools are forked from.

[Note: what ranks are forked from]
    The first rank of a parent starts one process (multiprocessing's fork server), which imports what every rank needs,
    once: torch, and what the parent has of shardmuon by then, from the parent's `sys.path`. Python hands that over to
    it from 3.12.3 on; before, it goes as PYTHONPATH, which ranks set back. Ranks leave these objects out when they
    collect garbage: some libraries collect in every call, and torch alone has half a million of them.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator

_ALWAYS = (
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "numpy",
)
_IF_USED = ("pytest", "hypothesis")
_MORE: list[str] = []


def preload(module: str) -> None:
    """Have one more module imported, if no pool of this process has started yet; left out where it raises
    ImportError."""
    _MORE.append(module)


def preloaded() -> list[str]:
    """Names of all modules to import."""
    used = [name for name in sys.modules if name in _IF_USED or name.split(".")[0] == "shardmuon"]
    return [*_ALWAYS, *used, *_MORE]


def path_variable() -> str | None:
    """PYTHONPATH as it is."""
    return os.environ.get("PYTHONPATH")


@contextlib.contextmanager
def path_in_variable() -> Iterator[None]:
    """`sys.path` as PYTHONPATH, for a process that starts inside."""
    before = path_variable()
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    try:
        yield
    finally:
        _set_path_variable(before)


def begin(path: str | None) -> None:
    """Begin a rank's process, given its parent's `path_variable`."""
    gc.freeze()
    _set_path_variable(path)


def _set_path_variable(value: str | None) -> None:
    if value is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = value


__all__ = ["begin", "path_in_variable", "path_variable", "preload", "preloaded"]
