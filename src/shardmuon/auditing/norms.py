"""Control of norms of weights for the audit: what a step made of them beside the rules (norm_rules.py).

[Note: a step with its norm control undone]
    A stage on weights multiplies the updated matrix W' by a factor f that hangs on its norm and on what is kept. The
    audit takes W' from the dense step, f and what is kept from the rules, and divides the weights after the live step
    by f: what is left is judged as in plain Muon. Norms and factors are rounded to fp32 where the step does.

    The live W' differs from the dense one by rounding of the result O alone. That moves its norm by a d(O) along W',
    for a = lr times its scale; as lengths of O in variants.py ([Note: an update with its stages undone]), d(O) is taken
    to be at most `along_rows`. Besides, the norm, what is kept and f are rounded to fp32 (three times eps_32 at most,
    of the norm), and the weights as `judge` derives it. Hyperball's norm after the step is R whatever W' is.

[Note: a norm that is kept]
    What is kept before a step is the norm of the weights but for their rounding after the last step: in fp32 the few
    eps_32 above. Half-precision weights can undo a factor near 1 altogether, so up to half a spacing of each element,
    all the same way, and half a spacing more for the update itself: one eps of their dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shardmuon.auditing.evidence import Evidence
from shardmuon.auditing.norm_rules import WEIGHTS, finished, held, norm_of, of_weights, scaled
from shardmuon.auditing.report import Finding
from shardmuon.variants import WeightStage

_EPS = torch.finfo(torch.float32).eps
_ROUNDINGS = 4  # of a norm: of the norm, of what is kept, of the factor, and of its product with an element
_REMEDY = "Look for what replaces the stage, or writes to weights or optimizer.state between the norms and their use"


def started(e: Evidence) -> Evidence:
    """With what stages on weights keep before the step: where that was not known, it is the norm of the weights."""
    new = {
        stage.key: e.before.new_full((1,), norm_of(e.before))
        for stage in of_weights(e.settings.stages)
        if stage.key in e.fresh and not bool(e.kept[stage.key])
    }
    return replace(e, kept={**e.kept, **new}) if new else e


def judge_norms(
    e: Evidence,
    updated: Tensor,  # (rows, cols) the dense step without stages on weights, the weights' dtype
    moved: float,  # by how much the norm of `updated` may be off
    rounded: float,  # norm of what rounding the weights may add
) -> tuple[list[Finding], float]:
    """What the live step made of norms beside the rules; and the factor by which its weights are to be divided."""
    stages = of_weights(e.settings.stages)
    if not stages:
        return [], 1.0
    after, expected = finished(updated, e.settings.stages, e.kept)
    findings = [*_judge_code(e, updated), *_judge_before(e, stages)]
    size, target = float(e.after.norm()), float(after.double().norm())
    off = expected.follows * moved + rounded + _ROUNDINGS * _EPS * target
    factor = expected.factor
    if abs(size - target) > off:
        findings.append(_wrong_norm(e, updated, size, target, off))
        factor = size / max(float(updated.double().norm()), 1e-300)
    for key, value in expected.kept.items():
        found = float(e.kept_after[key])
        change = 0.0 if value == float(e.kept[key]) else moved + rounded
        allowed = change + _ROUNDINGS * _EPS * value
        if abs(found - value) > allowed:
            findings.append(_wrong_kept(e, key, found, value, allowed, updated))
    return findings, factor


def _judge_code(e: Evidence, updated: Tensor) -> list[Finding]:
    """The stage's own code on this very norm, beside the rule."""
    norm, factor = torch.tensor([norm_of(updated)], dtype=torch.float64, device="cpu"), 1.0
    for stage in of_weights(e.settings.stages):
        before = e.kept[stage.key].float().cpu().view(1, -1)
        here = norm * factor
        expected, kept = WEIGHTS[type(stage)](stage, float(here), float(before))
        live = before.clone()
        own = float(stage.factor(here, live))
        allowed = 2 * _EPS
        for what, found, rule in (("factor", own, expected), (f"new {stage.key}", float(live), kept)):
            if not abs(found - rule) <= allowed * abs(rule):
                return [
                    _finding(
                        "variant_wrong",
                        e.name,
                        f"{type(stage).__name__} by itself gives the {what} {found:.7g} where its rule in fp64 gives "
                        f"{rule:.7g}",
                        f"a relative difference of {allowed:.1e}",
                        "The stage itself is wrong, or what replaces it",
                    )
                ]
        factor *= expected
    return []


def _judge_before(e: Evidence, stages: Sequence[WeightStage]) -> list[Finding]:
    norm = float(e.before.norm())
    share = torch.finfo(e.arithmetic.weight_dtype).eps + _ROUNDINGS * _EPS
    findings = []
    for key in dict.fromkeys(stage.key for stage in stages):
        kept = float(e.kept[key])
        if not kept or abs(kept - norm) <= share * norm:  # 0: not known, of a matrix of zeros
            continue
        part = _part_with(kept, e.before, e)
        text = f"its {key} is {kept:.7g}, the norm of its weights before the step {norm:.7g}"
        if part:
            name, text = "norm_of_shard", f"{text}: that of {part}"
            remedy = "Sum squares over all ranks that hold a piece before the root is taken"
        else:
            name = "norm_stale"
            remedy = (
                "What changes weights between steps leaves a norm behind that is no longer theirs: delete it on every "
                f"rank, del optimizer.state[param][{key!r}], and the next step takes the norm anew"
            )
        findings.append(_finding(name, e.name, text, f"{share:.1e} of it", remedy))
    return findings


def cuts_of(e: Evidence) -> dict[str, list[tuple[slice, slice]]]:
    """Shards and halves of a matrix, of which somebody may have taken the statistics. At least two of each."""
    rows, cols = e.before.shape
    whole = slice(0, rows), slice(0, cols)
    cuts = {
        "a shard": e.pieces.blocks(),
        "half of its rows": [(slice(0, rows // 2), whole[1]), (slice(rows // 2, rows), whole[1])],
        "half of its columns": [(whole[0], slice(0, cols // 2)), (whole[0], slice(cols // 2, cols))],
    }
    return {
        what: blocks
        for what, blocks in cuts.items()
        if len(blocks) > 1 and all(b.stop > b.start for block in blocks for b in block)
    }


def _part_with(norm: float, matrix: Tensor, e: Evidence) -> str:
    """The part of a matrix that has this norm, or ""."""
    share = torch.finfo(e.arithmetic.weight_dtype).eps + _ROUNDINGS * _EPS
    for what, blocks in cuts_of(e).items():
        if any(abs(float(matrix[block].double().norm()) - norm) <= share * norm for block in blocks):
            return what
    return ""


def _by_part(e: Evidence, updated: Tensor, size: float, off: float) -> str:
    """What of the matrix the factors were taken of, if the norm after the step says so; or ""."""
    for what, blocks in cuts_of(e).items():
        for of_part in (True, False):  # what is kept, too, or the whole's
            energy = sum(
                float(scaled(updated[block], _factor(e, updated, block, of_part)).double().norm()) ** 2
                for block in blocks
            )
            if abs(math.sqrt(energy) - size) <= off:
                return what
        for block in blocks:  # one for all
            if abs(float(scaled(updated, _factor(e, updated, block, False)).double().norm()) - size) <= off:
                return what
    return ""


def _factor(e: Evidence, updated: Tensor, block: tuple[slice, slice], of_part: bool) -> float:
    kept = dict(e.kept)
    if of_part:
        kept |= {
            stage.key: e.before.new_full((1,), norm_of(e.before[block])) for stage in of_weights(e.settings.stages)
        }
    return held(norm_of(updated[block]), e.settings.stages, kept).factor


def by_parts(e: Evidence, updated: Tensor) -> Iterable[tuple[str, Tensor]]:
    """The weights after a step that took the norms of parts of the matrix for each part."""
    for what, blocks in cuts_of(e).items():
        for of_part in (True, False):
            guess = updated.clone()
            for block in blocks:
                guess[block] = scaled(updated[block], _factor(e, updated, block, of_part))
            yield what, guess


def _wrong_norm(e: Evidence, updated: Tensor, size: float, target: float, off: float) -> Finding:
    plain = float(updated.double().norm())
    names = "+".join(type(stage).__name__ for stage in of_weights(e.settings.stages))
    text = f"the norm of its weights after the step is {size:.7g}, by {names} it is {target:.7g}"
    name, remedy = "norm_wrong", _REMEDY
    if abs(plain - size) <= off:
        name, text = "norm_not_restored", f"{text}: the norm that the update alone leads to"
        remedy = "The stage on weights did not run on this matrix, or on other storage than the parameter's"
    elif part := _by_part(e, updated, size, off):
        name, text = "norm_of_shard", f"{text}: what norms of {part} lead to"
        remedy = "Sum squares over all ranks that hold a piece before the root is taken"
    elif target:
        text += f", {size / target:.4g} times that"
    return _finding(name, e.name, text, f"{off:.1e}", remedy)


def _wrong_kept(e: Evidence, key: str, found: float, value: float, allowed: float, updated: Tensor) -> Finding:
    text = f"its {key} after the step is {found:.7g}, by the rule {value:.7g}"
    name = "kept_wrong"
    if part := _part_with(found, updated, e) or _part_with(found, e.before, e) if found else "":
        name, text = "norm_of_shard", f"{text}: that of {part}"
    elif found == float(e.kept[key]):
        text += ": it is that of before the step"
    return _finding(name, e.name, text, f"{allowed:.1e}", _REMEDY)


def _finding(name: str, where: str, text: str, allowed: str, remedy: str) -> Finding:
    return Finding(name, where, text, allowed, remedy)
