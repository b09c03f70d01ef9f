"""Enough of torch.cuda on the CPU for Megatron's Python code to run: one device, streams that do nothing.

Only for tests that ask whether shardmuon reads what Megatron really builds. Work that streams would run side by side
runs in order here, so nothing is learned about races.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

_FACTORIES = ("arange", "empty", "empty_like", "full", "ones", "rand", "randn", "tensor", "zeros", "zeros_like")


class _Nothing:
    """A stream or an event: takes any call and waits for nothing."""

    device = torch.device("cpu")
    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return event or _Nothing()

    def wait(self, *args: Any) -> None:
        pass

    record = synchronize = wait_event = wait_stream = wait


@contextlib.contextmanager
def _context(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


class _Ranges:
    range_push = range_pop = staticmethod(lambda *args: None)


def _is_cuda(device: object) -> bool:
    if isinstance(device, bool) or not isinstance(device, (int, str, torch.device)):
        return False
    return isinstance(device, int) or str(device).startswith("cuda")


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)

    return call


@contextlib.contextmanager
def cuda_on_cpu() -> Iterator[None]:
    """Everything is put back at the end, for ranks serve other tests too."""
    to, kind = torch.Tensor.to, torch.Tensor.type

    def to_cpu(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return to(tensor, *("cpu" if _is_cuda(a) else a for a in args), **kwargs)

    def cuda_type(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = kind(tensor, *args, **kwargs)
        return found if args or kwargs else found.replace("torch.", "torch.cuda.", 1)

    functions = {
        "current_device": lambda: 0,
        "current_stream": lambda *args: _Nothing(),
        "default_stream": lambda *args: _Nothing(),
        "empty_cache": lambda: None,
        "get_device_capability": lambda *args: (9, 0),
        "is_current_stream_capturing": lambda: False,
        "memory_allocated": lambda *args: 0,
        "memory_reserved": lambda *args: 0,
        "set_stream": lambda *args: None,
        "synchronize": lambda *args: None,
        "device": _context,
        "stream": _context,
        "Event": _Nothing,
        "Stream": _Nothing,
        "nvtx": _Ranges,
    }
    with contextlib.ExitStack() as stack:
        for name, value in functions.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        for name in _FACTORIES:
            stack.enter_context(mock.patch.object(torch, name, _on_cpu(getattr(torch, name))))
        for name in ("FloatTensor", "IntTensor", "LongTensor", "BoolTensor"):
            stack.enter_context(mock.patch.object(torch.cuda, name, getattr(torch, name)))
        stack.enter_context(mock.patch.object(torch.Tensor, "to", to_cpu))
        stack.enter_context(mock.patch.object(torch.Tensor, "type", cuda_type))
        stack.enter_context(mock.patch.object(torch.Tensor, "cuda", lambda tensor, *a, **k: tensor))
        stack.enter_context(mock.patch.object(torch.Tensor, "record_stream", _context))
        stack.enter_context(mock.patch.object(torch.nn.Module, "cuda", lambda module, *a, **k: module))
        yield
