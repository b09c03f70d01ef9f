"""Peak memory, measured as the bytes of all live tensor storages.

[Note: tensors that gloo still holds]
    gloo's thread reports the end of a collective before it frees the collective's tensors, so these tensors may be
    counted in the next step. This happened after one in seven waits for a collective, even on a machine with two idle
    cores. The measurement therefore passes uncounted copies to gloo and runs every exchange synchronously, so that the
    count does not depend on timing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """A dispatch mode that tracks the storages created while it is active. `now` is the total size in bytes of those
    that still exist, and `peak` is the largest value of `now` so far."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._live: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            storage = t.untyped_storage() if isinstance(t, Tensor) else None
            if storage is not None and storage._cdata not in given | self._live:
                self._live.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._gone, storage.nbytes(), storage._cdata)
        return out

    def _gone(self, nbytes: int, key: int) -> None:
        self.now -= nbytes
        self._live.discard(key)


def peak_of(function: Callable[[], object]) -> int:
    """Return the peak bytes of the storages that `function` creates. Meanwhile, exchanges run synchronously on copies
    that are not counted ([Note: tensors that gloo still holds])."""
    exchange = dist.all_to_all_single

    def all_to_all_single(recv: Tensor, send: Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        with _disable_current_modes():
            came = torch.empty_like(recv)
            exchange(came, send.clone(), *args, **kwargs)
            recv.copy_(came)
        return mock.Mock() if async_op else None

    with mock.patch.object(dist, "all_to_all_single", all_to_all_single), LiveBytes() as live:
        function()
    return live.peak
