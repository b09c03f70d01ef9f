"""A decorator that runs a whole test on every rank."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from shardmuon.testing import RankPool

_Test = TypeVar("_Test", bound=Callable[..., None])


def on_ranks(num_ranks: int) -> Callable[[_Test], _Test]:
    """Run the decorated test on `num_ranks` ranks, each of which imports the test by its name. The test fails if it
    fails on any rank."""

    def decorate(test: _Test) -> _Test:
        @functools.wraps(test)
        def run(*args: Any, **given: Any) -> None:
            if dist.is_initialized():
                test(*args, **given)
            else:
                RankPool.cached(num_ranks).run(run, *args, **given)

        return run  # type: ignore[return-value]

    return decorate
