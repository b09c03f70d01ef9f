"""The high-water mark of memory while something runs, as the program holds it: not as a backend's thread lets go of it.

[Note: tensors that gloo still holds]
    gloo's thread tells whoever waits for a collective that it is done, and lets go of its tensors after that. On a busy
    machine that is late enough to be counted as memory of the next step: one wait in seven of 300 on two idle cores.
    Here a wait returns when the tensors are held by their callers alone, so that what is counted hangs on no clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from shardmuon.foresight.memory import LiveBytes

PATIENCE_S = 60.0


class _LetGo:
    """An exchange under way, whose wait ends when only its callers hold its tensors."""

    def __init__(self, work: Any, held: list[tuple[Tensor, int]]) -> None:
        self.work = work
        self.held = held  # each with the references there were before

    def wait(self) -> None:
        work, self.work = self.work, None
        work.wait()
        del work  # it holds them, too
        until = time.monotonic() + PATIENCE_S
        while any(tensor._use_count() > before for tensor, before in self.held):
            if time.monotonic() > until:
                raise AssertionError(f"an exchange's tensors are still held {PATIENCE_S:.0f} s after its end")
            time.sleep(1e-5)
        self.held.clear()


def peak_of(function: Callable[[], object]) -> int:
    """Bytes of the storages that `function` makes, at most at once; see [Note: tensors that gloo still holds].

    Raises:
        AssertionError: What an asynchronous exchange moved is held after its end by something else than its caller.
    """
    exchange = dist.all_to_all_single

    def all_to_all_single(recv: Tensor, send: Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        held = [(t, t._use_count()) for t in (recv, send)]
        work = exchange(recv, send, *args, async_op=async_op, **kwargs)
        return _LetGo(work, held) if async_op else work

    with mock.patch.object(dist, "all_to_all_single", all_to_all_single), LiveBytes() as live:
        function()
    return live.peak
