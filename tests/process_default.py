"""A context manager that sets torch's process-wide default dtype or device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def process_default(name: str) -> Iterator[None]:
    """Set torch's default dtype to the dtype with the given name, and reset it to float32 on exit. If `name` is "meta",
    set the default device to the meta device instead."""
    if name == "meta":
        with torch.device("meta"):
            yield
        return
    torch.set_default_dtype(getattr(torch, name))
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
