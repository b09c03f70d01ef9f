"""Handling of a finite matrix whose fast result ("gram") is not finite.

Zeros take the place of such a result: the matrix's weights decay and take no update in this step. Nothing waits for a
device to say whether it came about, which has not been seen: how often travels to the host beside the work, and a later
step warns. A matrix that came in with NaN or Inf keeps NaN.
"""

from __future__ import annotations

import warnings
from collections import deque

import torch
from torch import Tensor

from shardmuon._torch import Later, is_capturing


class FiniteWatch:
    """Watch that keeps results finite, and warns a step or more later. One for each optimizer."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Tensor, Tensor]] = []  # of this step: what was run, and `_zero_or_nan` of both ends
        self.coming: deque[tuple[list[tuple[str, int]], Later]] = deque()

    def keep_finite(
        self,
        out: Tensor,  # (B, m, n), written to
        x: Tensor,  # (B, m, n), what it was made from
        text: str,
    ) -> Tensor:  # (B, m, n), `out`
        """Zeros for each result that is not finite though its matrix is. Waits for nothing."""
        spoiled = _zero_or_nan(out.sum(dim=(-2, -1), keepdim=True, dtype=torch.float32))
        if x.device.type == "cpu" and not bool(spoiled.isnan().any()):  # a look that costs no wait
            return out
        given = _zero_or_nan(torch.linalg.vector_norm(x, torch.inf, dim=(-2, -1), keepdim=True))
        self.seen.append((text, spoiled, given))
        return torch.where(spoiled == 0, out, given.to(out.dtype), out=out)

    def send(self) -> None:
        """Send what a step that has ended has seen on its way to the host."""
        seen, self.seen = self.seen, []
        if not seen or is_capturing(seen[0][1].device):  # a graph's replays do not come by here
            return
        spoiled = torch.cat([s.flatten() for _, s, _ in seen])
        given = torch.cat([g.flatten() for _, _, g in seen])
        replaced = spoiled.isnan().logical_and_(given == 0)
        self.coming.append(([(text, len(s)) for text, s, _ in seen], Later(replaced)))

    def report(self) -> None:
        """Warn of what has arrived by now."""
        while self.coming and self.coming[0][1].has_arrived():
            seen, replaced = self.coming.popleft()
            for (text, count), flags in zip(seen, replaced.value().split([n for _, n in seen]), strict=True):
                if flags.any():
                    warnings.warn(
                        f"{text} gave a non-finite result for {int(flags.sum())} of {count} finite matrices in an "
                        "earlier step; they took no update in it",
                        stacklevel=2,
                    )


def _zero_or_nan(x: Tensor) -> Tensor:
    """0 of what is finite, else NaN."""
    return x - x
