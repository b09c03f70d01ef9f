"""Tests of which every rank runs the whole."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from shardmuon.testing import RankPool

_Test = TypeVar("_Test", bound=Callable[..., None])


def on_ranks(num_ranks: int) -> Callable[[_Test], _Test]:
    """Run a test on each of so many ranks, which find it by its name; one that fails on any of them fails."""

    def decorate(test: _Test) -> _Test:
        @functools.wraps(test)
        def run(*args: Any, **given: Any) -> None:
            if dist.is_initialized():
                test(*args, **given)
            else:
                RankPool.cached(num_ranks).run(run, *args, **given)

        return run  # type: ignore[return-value]

    return decorate
