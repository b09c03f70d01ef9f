"""The high-water mark of memory while something runs, as the program holds it: not as a backend's thread lets go of it.

[Note: tensors that gloo still holds]
    gloo's thread tells whoever waits for a collective that it is done, and lets go of its tensors after that. On a busy
    machine that is late enough to be counted as memory of the next step: one wait in seven of 300 on two idle cores.
    Here it gets copies, which are not counted, and an exchange is over where it begins, so that what is counted hangs
    on no clock.
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
    """Bytes of the storages made inside, now and at most."""

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
    """Bytes of the storages that `function` makes, at most at once; see [Note: tensors that gloo still holds]."""
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
