"""The kind of device on which the layouts of `layouts.py` are built."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_KIND = ["cpu"]


def mesh_kind() -> str:
    """The kind of device that meshes are made for."""
    return _KIND[-1]


@contextlib.contextmanager
def meshes_on(kind: str) -> Iterator[None]:
    """Build layouts on another kind of device ("cuda"); tensors must lie there already."""
    _KIND.append(kind)
    try:
        yield
    finally:
        _KIND.pop()
