"""Enough of torch.cuda on the CPU for Megatron's Python code to run: one device, streams that do nothing.

Only for tests that ask whether shardmuon reads what Megatron really builds. Work that streams would run side by side
runs in order here, so nothing is learned about races.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


def _nothing(*args: Any, **kwargs: Any) -> mock.MagicMock:
    """Make a stream or an event: takes any call and waits for nothing."""
    return mock.MagicMock(device=torch.device("cpu"), cuda_stream=0)


def _on_cpu(device: object) -> object:
    """Return the CPU for a CUDA device or its number; anything else as it is."""
    if isinstance(device, bool) or not isinstance(device, (int, str, torch.device)):
        return device
    return "cpu" if isinstance(device, int) or str(device).startswith("cuda") else device


class _OnCpu(TorchFunctionMode):
    """Everything that asks for CUDA gets the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.record_stream:
            return None
        if func is Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if func is Tensor.to:
            args = (args[0], *map(_on_cpu, args[1:]))
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        return func(*args, **kwargs)


@contextlib.contextmanager
def cuda_on_cpu() -> Iterator[None]:
    """Everything is put back at the end, for ranks serve other tests too."""
    functions: dict[str, Any] = {
        "current_device": lambda: 0,
        "current_stream": _nothing,
        "default_stream": _nothing,
        "empty_cache": lambda: None,
        "get_device_capability": lambda *args: (9, 0),
        "is_current_stream_capturing": lambda: False,
        "memory_allocated": lambda *args: 0,
        "memory_reserved": lambda *args: 0,
        "set_stream": lambda *args: None,
        "synchronize": lambda *args: None,
        "device": contextlib.nullcontext,
        "stream": contextlib.nullcontext,
        "Event": _nothing,
        "Stream": _nothing,
        "nvtx": mock.Mock(),
    }
    for name in ("FloatTensor", "IntTensor", "LongTensor", "BoolTensor"):
        functions[name] = getattr(torch, name)
    with mock.patch.multiple(torch.cuda, **functions), _OnCpu():
        yield
