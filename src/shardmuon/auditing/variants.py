"""Stages of variants for the audit: their formulas once more, in fp64, written from the papers and not from the stages.

[Note: an update with its stages undone]
    A stage after the orthogonalization multiplies rows or columns by factors that hang on the result O and on what it
    keeps. The audit computes these from the dense O and the numbers kept before the step, and divides the applied
    update by them: what is left is compared with O as in plain Muon. A factor is off by what lengths of rows of O are
    off by. If O differs by D through rounding, the length of a row o of n elements differs by d o / ||o||, which for
    errors without direction is ||d|| / sqrt(n) on average; so all rows together are off by ||D|| / sqrt(n). Four times
    that (`along_rows`) is allowed more, in any direction. What the stage keeps, means of squares of rows, differs by
    twice that relative to ||O||.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from shardmuon.auditing.norm_rules import WEIGHTS
from shardmuon.auditing.report import Finding
from shardmuon.variants import AfterStage, BeforeStage, Stage, Stages
from shardmuon.variants.muon_eq import MuonEq
from shardmuon.variants.norm_control import HyperballUpdate
from shardmuon.variants.normuon import NorMuon


class After(NamedTuple):
    """What a stage after the orthogonalization does.

    Attributes:
        factor: By what each element is multiplied; broadcasts to the matrix.
        kept: What it keeps then.
        fresh: Share of `kept` that this step's result makes, of the sum of all.
    """

    factor: Tensor
    kept: Tensor
    fresh: float


def _equal_rows(n: Tensor) -> Tensor:
    norms = n.norm(dim=1, keepdim=True)
    mean = norms.square().mean().sqrt()
    return torch.where(norms > 0, n * (mean / norms), n)


def _normuon(stage: Stage, o: Tensor, kept: Tensor) -> After:
    assert isinstance(stage, NorMuon)
    along = 1 if o.shape[0] >= o.shape[1] else 0
    fresh = (1 - stage.beta2) * o.pow(2).mean(along)
    v = stage.beta2 * kept + fresh
    factor = v.clamp(min=1e-10).pow(-0.5).unsqueeze(along)
    return After(factor * (o.norm() / (o * factor).norm()), v, float(fresh.sum() / v.sum().clamp(min=1e-300)))


def _on_sphere(stage: Stage, o: Tensor, kept: Tensor) -> After:
    radius, norm = float(kept), float(o.norm())
    return After(o.new_full((1, 1), radius / norm if radius else 1.0), kept, 0.0)


BEFORE: dict[type[Stage], Callable[[Tensor], Tensor]] = {MuonEq: _equal_rows}
AFTER: dict[type[Stage], Callable[[Stage, Tensor, Tensor], After]] = {
    NorMuon: _normuon,
    HyperballUpdate: _on_sphere,
}


def along_rows(error: float, shape: tuple[int, ...]) -> float:
    """By how much lengths of rows may be off, all together: see above. `error`: of the matrix, Frobenius norm."""
    return 4 * error / math.sqrt(min(shape))


def unchecked(stages: Stages) -> str:
    """The first stage of which the audit has no formula, or ""."""
    known = {**BEFORE, **AFTER, **WEIGHTS}
    return next((type(stage).__name__ for stage in stages if type(stage) not in known), "")


def prepared(fed: Tensor, stages: Stages) -> Tensor:  # (rows, cols)
    """What is orthogonalized, of what momentum makes: in the live arithmetic, as `same.fed`."""
    for stage in stages:
        if isinstance(stage, BeforeStage):
            fed = stage.run(fed.clone().unsqueeze(0), fed.new_empty(1, 0))[0]
    return fed


def judge_before(name: str, fed: Tensor, live: Tensor, stages: Stages) -> list[Finding]:
    """The live stages' input of the orthogonalizer beside the formulas'."""
    expected = fed.to(torch.float64)
    for stage in stages:
        if isinstance(stage, BeforeStage):
            expected = BEFORE[type(stage)](expected)
    # each element: the factor and the product, rounded once for each stage
    allowed = 2 * torch.finfo(live.dtype).eps * len(stages) + 2.0**-45
    difference = float((live.double() - expected).norm() / expected.norm().clamp(min=1e-300))
    if difference <= allowed:
        return []
    return [_finding(name, f"what its variant feeds to the orthogonalizer differs by {difference:.2g}", allowed)]


def after_stages(o: Tensor, stages: Stages, kept: Mapping[str, Tensor]) -> tuple[Tensor | None, dict[str, After]]:
    """Of a dense result (fp64): the factor of all stages after it together, None in plain Muon; and each that changes
    what it keeps, by its key."""
    factor: Tensor | None = None
    found: dict[str, After] = {}
    for stage in stages:
        if isinstance(stage, AfterStage):
            own = AFTER[type(stage)](stage, o if factor is None else o * factor, kept.get(stage.key, o.new_empty(0)))
            factor = own.factor if factor is None else factor * own.factor
            if stage.travels and stage.key:
                found[stage.key] = own
    return factor, found


def judge_kept(name: str, expected: Mapping[str, After], found: Mapping[str, Tensor], moved: float) -> list[Finding]:
    """What stages keep after the step beside the formulas'.

    Args:
        moved: From `along_rows`, relative to the norm of the result.
    """
    findings: list[Finding] = []
    for key, after in expected.items():
        size = float(after.kept.abs().sum())
        difference = float((found[key] - after.kept).abs().sum()) / max(size, 1e-300)
        # the mean of squares, as noted; its sum (of at most as many terms as are kept) and the average, in fp32
        terms = math.sqrt(after.kept.numel() / 6) + 6
        allowed = after.fresh * 2 * moved + terms * torch.finfo(torch.float32).eps
        if difference > allowed:
            findings.append(
                _finding(name, f"its {key} after the step differs by {difference:.2g}", allowed, "kept_wrong")
            )
    return findings


def _finding(name: str, text: str, allowed: float, what: str = "variant_wrong") -> Finding:
    return Finding(
        what,
        name,
        f"{text} from the formula in fp64",
        f"{allowed:.1e}",
        "Look for what replaces the stage or writes to optimizer.state; load a checkpoint from before",
    )
