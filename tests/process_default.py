"""A context manager for the process-wide default dtype and device of torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def process_default(name: str) -> Iterator[None]:
    """Set the default dtype of torch to the dtype `name`, or for "meta" the default device, and reset the default on
    exit."""
    if name == "meta":
        with torch.device("meta"):
            yield
        return
    torch.set_default_dtype(getattr(torch, name))
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
