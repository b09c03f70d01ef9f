"""CPU stand-ins for the parts of torch.cuda that Megatron's Python code needs: one device, and streams that do nothing.

With them, tests can check that shardmuon works with the objects that Megatron builds. Tests cannot find races between
streams, because all work runs in order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# A single mock stands in for all streams and events. Creating a MagicMock is slow, because each one gets its own class.
_NOTHING = mock.MagicMock(device=torch.device("cpu"), cuda_stream=0)


def _on_cpu(device: object) -> object:
    if isinstance(device, bool) or not isinstance(device, (int, str, torch.device)):
        return device
    return "cpu" if isinstance(device, int) or str(device).startswith("cuda") else device


class _OnCpu(TorchFunctionMode):
    """A `TorchFunctionMode` that replaces CUDA devices with the CPU in calls to torch functions."""

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
    """Run Megatron's CUDA code on the CPU. The original functions are restored on exit, because the ranks run other
    tests, too."""
    functions: dict[str, Any] = {
        "current_device": lambda: 0,
        "empty_cache": lambda: None,
        "get_device_capability": lambda *args: (9, 0),
        "is_current_stream_capturing": lambda: False,
        "memory_allocated": lambda *args: 0,
        "memory_reserved": lambda *args: 0,
        "set_stream": lambda *args: None,
        "synchronize": lambda *args: None,
        "device": contextlib.nullcontext,
        "stream": contextlib.nullcontext,
        **dict.fromkeys(("current_stream", "default_stream", "Event", "Stream"), lambda *args, **kwargs: _NOTHING),
        "nvtx": mock.Mock(),
    }
    for name in ("FloatTensor", "IntTensor", "LongTensor", "BoolTensor"):
        functions[name] = getattr(torch, name)
    with mock.patch.multiple(torch.cuda, **functions), _OnCpu():
        yield
