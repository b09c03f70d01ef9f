"""What becomes of a finite matrix whose fast result ("gram") is not finite.

[Note: two ways]
    A CPU looks at the result and repeats such a matrix in the standard form, in fp32. On an accelerator a look is a
    wait for all work queued so far, in every step, for something that has not been seen. So there the device itself
    puts zeros in place of such a result: the matrix's weights decay and take no update in this step. How often that
    came about travels to the host beside the work, and a later step warns. A matrix that came in with NaN or Inf keeps
    NaN.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from shardmuon._torch import Later, is_capturing


class FiniteWatch:
    """Keeps results on accelerators finite, and warns a step or more later. One for each optimizer."""

    def __init__(self) -> None:
        self._seen: list[tuple[str, Tensor, Tensor]] = []  # of this step: what was run, and `_zero_or_nan` of both ends
        self._coming: deque[tuple[list[tuple[str, int]], Later]] = deque()

    def keep_finite(
        self,
        out: Tensor,  # (B, m, n), written to
        x: Tensor,  # (B, m, n), what it was made from
        text: str,
    ) -> Tensor:  # (B, m, n), `out`
        """Zeros for each result that is not finite though its matrix is. Waits for nothing."""
        spoiled = _zero_or_nan(out.sum(dim=(-2, -1), keepdim=True, dtype=torch.float32))
        given = _zero_or_nan(torch.linalg.vector_norm(x, torch.inf, dim=(-2, -1), keepdim=True))
        self._seen.append((text, spoiled, given))
        return torch.where(spoiled == 0, out, given.to(out.dtype), out=out)

    def send(self) -> None:
        """A step has ended: what it has seen goes on its way to the host."""
        seen, self._seen = self._seen, []
        if not seen or is_capturing(seen[0][1].device):  # a graph's replays do not come by here
            return
        spoiled = torch.cat([s.flatten() for _, s, _ in seen])
        given = torch.cat([g.flatten() for _, _, g in seen])
        replaced = spoiled.isnan().logical_and_(given == 0)
        self._coming.append(([(text, len(s)) for text, s, _ in seen], Later(replaced)))

    def report(self) -> None:
        """Warn of what has arrived by now."""
        while self._coming and self._coming[0][1].has_arrived():
            seen, replaced = self._coming.popleft()
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


def repeat_non_finite(
    out: Tensor,  # (B, m, n), written to
    x: Tensor,  # (B, m, n), what it was made from
    repeat: Callable[[Tensor], Tensor],  # (1, m, n) -> (1, m, n): the standard form in fp32
    text: str,
) -> Tensor:  # (B, m, n), `out`
    """Repeat each finite matrix whose result is not finite, with a warning. Waits."""
    bad = ~out.sum(dim=(-2, -1), dtype=torch.float32).isfinite()
    if not bool(bad.any()):
        return out
    bad &= x.isfinite().all(dim=-1).all(dim=-1)  # a matrix that came in with NaN or Inf keeps them
    indices = bad.nonzero().flatten().tolist()
    if indices:
        warnings.warn(
            f"{text} gave a non-finite result for {len(indices)} of {len(x)} finite matrices of "
            f"{x.shape[-2]}x{x.shape[-1]}; repeated with 'standard' in fp32",
            stacklevel=3,
        )
    for i in indices:
        out[i] = repeat(x[i : i + 1])[0].to(out.dtype)
    return out
