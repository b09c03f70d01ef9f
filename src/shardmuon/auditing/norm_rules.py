"""Rules of norm control once more, in fp64: what an audit holds the norms of a step's weights against.

Written from the papers and not from the stages (variants/norm_control.py); `norms` judges by them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from shardmuon.variants import Stage, Stages, WeightStage
from shardmuon.variants.norm_control import HyperballWeight


def _hyperball(stage: Stage, norm: float, radius: float) -> tuple[float, float]:
    if not radius:
        return 1.0, norm
    return (radius / norm if norm else 1.0), radius


# (the norm of the updated matrix, what is kept) -> (factor, what is kept then)
WEIGHTS: dict[type[Stage], Callable[[Stage, float, float], tuple[float, float]]] = {
    HyperballWeight: _hyperball,
}


class Held(NamedTuple):
    """What stages on weights make of a matrix.

    Attributes:
        factor: The product of all.
        kept: Key -> what is kept then.
        follows: By how much the norm after the step moves with that of the updated matrix, at most.
    """

    factor: float
    kept: dict[str, float]
    follows: float


def held(norm: float, stages: Stages, kept: Mapping[str, Tensor]) -> Held:
    """By the rules in fp64, for an updated matrix of this norm."""
    factor, follows, now = 1.0, 1.0, {}
    for stage in of_weights(stages):
        before = float(kept[stage.key])
        own, now[stage.key] = WEIGHTS[type(stage)](stage, norm * factor, before)
        factor *= own
        if isinstance(stage, HyperballWeight) and before:
            follows = 0.0
    return Held(factor, now, follows)


def of_weights(stages: Stages) -> list[WeightStage]:
    """Those on weights, in their order."""
    return [stage for stage in stages if isinstance(stage, WeightStage)]


def norm_of(matrix: Tensor) -> float:
    """Frobenius norm, rounded to fp32 as it travels."""
    return float(torch.linalg.vector_norm(matrix, dtype=torch.float64).float())


def scaled(weights: Tensor, factor: float) -> Tensor:  # the weights' dtype
    """Weights times a factor, rounded as the step does it."""
    if weights.dtype == torch.float64:
        return weights * factor
    return (weights.float() * torch.tensor(factor, dtype=torch.float32, device=weights.device)).to(weights.dtype)


def finished(
    weights: Tensor,  # (rows, cols) updated
    stages: Stages,
    kept: Mapping[str, Tensor],
) -> tuple[Tensor, Held]:
    """What stages on weights make of an updated matrix: the same arithmetic, densely."""
    found = held(norm_of(weights), stages, kept)
    return (scaled(weights, found.factor) if of_weights(stages) else weights), found
