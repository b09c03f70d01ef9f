"""Matrices of zeros under control of norms: found with the norms before the first step, and said once, by name.

No host waits for its device: what is found travels to it beside the work, and the next step says it, in its guard.
"""

from __future__ import annotations

import warnings
from collections import deque

from torch import Tensor

from shardmuon._torch import Later
from shardmuon.errors import level_of_the_caller
from shardmuon.variants import WeightStage

_SHOWN = 3  # names in a message


class ZeroWatch:
    """Which matrices had no norm when their stages first asked for it. One for each optimizer."""

    def __init__(self) -> None:
        self._coming: deque[tuple[str, str, Tensor | Later]] = deque()  # parameter, its stage, which are zero

    def add(
        self,
        name: str,
        stage: WeightStage,
        zero: Tensor,  # (matrices of the parameter,), bool
    ) -> None:
        """Of one parameter. Waits for nothing."""
        self._coming.append((name, type(stage).__name__, zero if zero.device.type == "cpu" else Later(zero)))

    def report(self) -> None:
        """Warn of what has arrived by now: once for each kind of stage."""
        found: dict[str, list[str]] = {}
        while self._coming:
            name, stage, zero = self._coming[0]
            if isinstance(zero, Later):
                if not zero.has_arrived():
                    break
                zero = zero.value()
            self._coming.popleft()
            which = zero.nonzero().flatten().tolist()
            if which:
                found.setdefault(stage, []).append(name if len(which) == len(zero) else f"{name}{which}")
        if not found:
            return
        texts = [f"{_listed(names)} ({stage})" for stage, names in found.items()]
        warnings.warn(
            f"{'; '.join(texts)}: zero before the first step, so there was no norm to keep. That step was one of plain "
            "Muon, and the norm that it gave counts from now on. If it is not to be held so small, write "
            '{"params": [...], "variant": None} for these, or initialize them',
            stacklevel=level_of_the_caller(),
        )


def _listed(names: list[str]) -> str:
    more = [f"{len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
    return ", ".join(names[:_SHOWN] + more)


__all__ = ["ZeroWatch"]
