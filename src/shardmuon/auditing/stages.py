"""Stages of variants for the audit: their formulas once more, in fp64, written from the papers and not from the stages.

A formula takes a dense matrix and the numbers that are kept of it, and returns a factor and what is kept then. Those
after the orthogonalizer multiply its result, elements or all of it; those on weights the updated weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from shardmuon.variants import AfterStage, BeforeStage, Stage, Stages, WeightStage
from shardmuon.variants.muon_eq import MuonEq
from shardmuon.variants.norm_control import HyperballUpdate, HyperballWeight
from shardmuon.variants.normuon import NorMuon

KeptNumbers = Mapping[str, Tensor]  # key -> 1-D fp64
Formula = Callable[[Stage, Tensor, Tensor], tuple[Tensor, Tensor]]


def _equal_rows(n: Tensor) -> Tensor:
    norms = n.norm(dim=1, keepdim=True)
    mean = norms.square().mean().sqrt()
    return torch.where(norms > 0, n * (mean / norms), n)


def _normuon(stage: Stage, o: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    assert isinstance(stage, NorMuon)
    along = 1 if o.shape[0] >= o.shape[1] else 0
    v = stage.beta2 * kept + (1 - stage.beta2) * o.pow(2).mean(along)
    factor = v.clamp(min=1e-10).pow(-0.5).unsqueeze(along)
    return factor * (o.norm() / (o * factor).norm()), v


def _on_sphere(stage: Stage, o: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(radius > 0, radius / o.norm(), 1.0), radius


def _norm_restored(stage: Stage, weights: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    norm = norm_of(weights).view(1)
    radius = torch.where(radius > 0, radius, norm)
    return torch.where(norm > 0, radius / norm, 1.0), radius


BEFORE: dict[type[Stage], Callable[[Tensor], Tensor]] = {MuonEq: _equal_rows}
AFTER: dict[type[Stage], Formula] = {NorMuon: _normuon, HyperballUpdate: _on_sphere}
WEIGHTS: dict[type[Stage], Formula] = {HyperballWeight: _norm_restored}


def unchecked(stages: Stages) -> str:
    """The first stage of which the audit has no formula, or ""."""
    known = {**BEFORE, **AFTER, **WEIGHTS}
    return next((type(stage).__name__ for stage in stages if type(stage) not in known), "")


def on_weights(stages: Stages) -> list[WeightStage]:
    """Stages on weights, in their order."""
    return [stage for stage in stages if isinstance(stage, WeightStage)]


def norm_of(matrix: Tensor) -> Tensor:
    """Frobenius norm, rounded to fp32 as it travels; fp64."""
    norm: Tensor = torch.linalg.vector_norm(matrix, dtype=torch.float64)
    return norm.float().double()


def prepared(fed: Tensor, stages: Stages) -> Tensor:  # (rows, cols)
    """The orthogonalizer's input after the stages before it, in the live arithmetic, from that of `same.fed`."""
    for stage in stages:
        if isinstance(stage, BeforeStage):
            fed = stage.run(fed.clone().unsqueeze(0), fed.new_empty(1, 0))[0]
    return fed


def by_formula(fed: Tensor, stages: Stages) -> Tensor:  # (rows, cols) fp64
    """The orthogonalizer's input after the stages before it, in exact arithmetic."""
    fed = fed.to(torch.float64)
    for stage in stages:
        if isinstance(stage, BeforeStage):
            fed = BEFORE[type(stage)](fed)
    return fed


@dataclass
class Applied:
    """Stages after the orthogonalizer, then those on weights, on one matrix.

    Attributes:
        factor: Factor on the result; broadcasts to the matrix. None: no such stage.
        on_weights: Factor on the updated weights.
        kept: What is kept then, by its key.
    """

    stages: Stages
    before: KeptNumbers
    factor: Tensor | None = None
    on_weights: Tensor | None = None
    kept: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.kept = dict(self.before)

    def to_result(self, o: Tensor) -> Tensor:
        """The result of the orthogonalizer (fp64) as these stages leave it."""
        for stage in self.stages:
            if isinstance(stage, AfterStage):
                own, self.kept[stage.key] = AFTER[type(stage)](stage, o, self.kept[stage.key])
                self.factor = own if self.factor is None else self.factor * own
                o = o * own
        return o

    def to_weights(self, weights: Tensor) -> Tensor:  # the weights' dtype
        """Updated weights as these stages leave them; rounded as the step does it."""
        for stage in on_weights(self.stages):
            own, self.kept[stage.key] = WEIGHTS[type(stage)](stage, weights, self.kept[stage.key])
            self.on_weights = own if self.on_weights is None else self.on_weights * own
            wide = torch.promote_types(weights.dtype, torch.float32)
            weights = (weights.to(wide) * own.to(wide)).to(weights.dtype)
        return weights

    @cached_property
    def _undone(self) -> float:
        return 1.0 if self.on_weights is None else float(self.on_weights)

    def undone(self, weights: Tensor) -> Tensor:
        """Weights without the stages on weights."""
        return weights / self._undone if self._undone != 1.0 else weights
