"""What QK-clip has seen and done, as data and as text."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["LayerLogits", "LogitReport"]


@dataclass(frozen=True, slots=True)
class LayerLogits:
    """A layer in the last measured step.

    Attributes:
        maxima: The largest logit of each head over all ranks; -inf where none was measured.
        num_clipped: Key heads whose weights were scaled.
        smallest_gain: The smallest factor of a head's logits, 1 if none was scaled.
    """

    name: str
    maxima: tuple[float, ...]
    num_clipped: int
    smallest_gain: float

    @property
    def largest(self) -> float:
        """Of all heads."""
        return max(self.maxima)


@dataclass(frozen=True, slots=True)
class LogitReport:
    """What QK-clip has seen and done.

    Attributes:
        step: The last measured step, counted from 1; 0 before it.
        tau: Largest logit that is allowed.
        layers: Each layer in it.
        history: (step, the largest logit of all layers) of every measured step.
    """

    step: int
    tau: float
    layers: tuple[LayerLogits, ...]
    history: tuple[tuple[int, float], ...]

    @property
    def max_logit(self) -> float:
        """The largest of the last measured step; -inf before it."""
        return max((layer.largest for layer in self.layers), default=-math.inf)

    @property
    def num_clipped(self) -> int:
        """Key heads whose weights were scaled."""
        return sum(layer.num_clipped for layer in self.layers)

    def __str__(self) -> str:
        width = max((len(layer.name) for layer in self.layers), default=0)
        lines = [f"attention logits of step {self.step}, tau={self.tau:g}"]
        for x in self.layers:
            lines.append(
                f"{x.name.ljust(width)}  max {x.largest:.4g}  clipped {x.num_clipped}  gain {x.smallest_gain:.4g}"
            )
        return "\n".join(lines)
