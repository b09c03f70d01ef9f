"""DeepSpeed is imported once in each rank that uses it, for less than it takes by itself."""

from __future__ import annotations

import gc
import importlib
import os
import warnings
from functools import lru_cache
from typing import Any
from unittest import mock

import torch

from shardmuon.testing.frameworks import start_deepspeed


def start() -> None:
    """Start DeepSpeed on this rank."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        start_deepspeed("cpu")
        import_deepspeed()


def _as_it_is(function: Any = None, **options: Any) -> Any:
    """`torch.compile`, with and without parentheses as a decorator."""
    return (lambda decorated: decorated) if function is None else function


@lru_cache
def import_deepspeed() -> None:
    """DeepSpeed's own Muon, of which little is used here, is not compiled where it is imported (that loads torch's
    compilers, in 1.7 s of 2.4), and what has been imported is left out when garbage is collected, as stage 3 does each
    time."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    with mock.patch.object(torch, "compile", _as_it_is), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
        importlib.import_module("deepspeed.runtime.zero.stage3")
    gc.collect()
    gc.freeze()
