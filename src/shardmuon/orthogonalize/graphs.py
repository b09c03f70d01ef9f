"""CUDA graphs of the orthogonalization of one batch shape: one launch in place of some thirty."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

_Function = Callable[[Tensor], Tensor]
_AFTER = 2  # calls of a shape before it is captured: a shape that does not repeat is not worth its memory
_LIMIT = 32  # graphs kept; each holds a batch and the products' work space


class GraphCache:
    """Cache of CUDA graphs: replays what has been captured for a key and a batch of this shape; runs anything else as
    it is.

    A graph runs the same kernels on the same shapes as the function, so its result has the function's bits.
    """

    def __init__(self) -> None:
        self._calls: dict[Hashable, int] = {}
        self._graphs: dict[Hashable, _Function] = {}

    def run(
        self,
        function: _Function,
        x: Tensor,  # (B, m, n)
        key: Hashable,  # everything that the function depends on besides x
    ) -> Tensor:
        """function(x), from a graph if there is one; the result is the caller's own."""
        where = (key, tuple(x.shape), x.stride(), x.dtype, x.device)
        if where not in self._graphs:
            self._calls[where] = self._calls.get(where, 0) + 1
            if self._calls[where] <= _AFTER or len(self._graphs) >= _LIMIT:
                return function(x)
            self._graphs[where] = _captured(function, x)
        return self._graphs[where](x)


def _captured(function: _Function, x: Tensor) -> _Function:
    """Capture `function` on batches like `x`; the result replays it."""
    own_input = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)
    warm_up: Any = torch.cuda.Stream(x.device)
    current = torch.cuda.current_stream(x.device)
    warm_up.wait_stream(current)
    with torch.cuda.stream(warm_up):
        function(own_input)  # allocates work spaces of the matrix library, which must not happen while capturing
    current.wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    # Only this thread's calls may be refused: NCCL's watchdog asks for the state of its events at any time, which the
    # default mode ("global") takes for an error in the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        own_output = function(own_input)

    def replay(batch: Tensor) -> Tensor:
        own_input.copy_(batch)
        graph.replay()
        return own_output.clone()

    return replay
