"""Control of norms of weights: which norm a step went wrong by. What is right is in stages.py."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from shardmuon.auditing.evidence import ALL, TIMES, Compared, Evidence
from shardmuon.auditing.report import Finding
from shardmuon.auditing.stages import Applied, norm_of, on_weights

EPS = torch.finfo(torch.float32).eps
ROUNDINGS = 4  # of a norm: of the norm, of what is kept, of the factor, and of its product with an element
OF_SHARD = "Sum squares over all ranks that hold a piece before the root is taken"
STAGE = "Look for what replaces the stage, or writes to optimizer.state; load a checkpoint from before"


def started(e: Evidence) -> dict[str, Tensor]:
    """Norms of the weights before the step, for stages on weights that had not kept one yet."""
    return {
        stage.key: norm_of(e.before).view(1)
        for stage in on_weights(e.sample.settings.stages)
        if stage.key in e.fresh and not bool(e.kept[stage.key])
    }


def judge_before(e: Evidence) -> list[Finding]:
    """Kept norms beside those of the weights before the step. Half-precision weights can undo a factor near 1
    altogether, so up to half a spacing of each element, all the same way, and half a spacing more for the update."""
    norm, findings = float(e.before.norm()), []
    share = torch.finfo(e.sample.arithmetic.weight_dtype).eps + ROUNDINGS * EPS
    for stage in on_weights(e.sample.settings.stages):
        kept = float(e.kept[stage.key])
        if not kept or abs(kept - norm) <= share * norm:  # 0: not known, of a matrix of zeros
            continue
        name, text = "norm_stale", f"its {stage.key} is {kept:.7g}, the norm of its weights before the step {norm:.7g}"
        remedy = (
            "What changes weights between steps leaves a norm behind that is no longer theirs: delete it on every "
            f"rank, del optimizer.state[param][{stage.key!r}], and the next step takes the norm anew"
        )
        for part, blocks in e.parts.items():
            if any(abs(float(e.before[block].norm()) - kept) <= share * kept for block in blocks):
                name, text, remedy = "norm_of_shard", f"{text}: that of one of its {part}", OF_SHARD
        findings.append(Finding(name, e.sample.name, text, f"{share:.1e} of it", remedy))
    return findings


def judge_after(c: Compared) -> list[Finding]:
    """The norm after the step beside that of the dense one."""
    e, size, target = c.evidence, float(c.evidence.after.norm()), float(c.step.after.norm())
    allowed = ROUNDINGS * EPS * target
    if not on_weights(e.sample.settings.stages) or abs(size - target) <= allowed:
        return []
    allowed += TIMES * max(abs(run.norm - target) for run in c.in_other_orders(ALL))
    if abs(size - target) <= allowed:
        return []
    name, remedy = "norm_wrong", STAGE
    text = (
        f"the norm of its weights after the step is {size:.7g}, {size / max(target, 1e-300):.4g} times that of the rule"
    )
    if abs(float(c.step.updated.double().norm()) - size) <= allowed:
        name, text = "norm_not_restored", f"{text}: the norm that the update alone leads to"
        remedy = "The stage on weights did not run on this matrix, or on other storage than the parameter's"
    for what, after in by_parts(c):
        if abs(float(after.double().norm()) - size) <= allowed:
            name, text, remedy = "norm_of_shard", f"{text}: what norms of its {what} lead to", OF_SHARD
    return [Finding(name, e.sample.name, text, f"{allowed:.1e}", remedy)]


def by_parts(c: Compared) -> Iterator[tuple[str, Tensor]]:
    """The weights after a step that took the norms of parts of the matrix for each part, and maybe kept them, too."""
    e = c.evidence
    for what, blocks in e.parts.items():
        for of_part in (True, False):
            after = c.step.updated.clone()
            for block in blocks:
                after[block] = Applied(e.sample.settings.stages, kept_of(e, block) if of_part else e.kept).to_weights(
                    after[block]
                )
            yield what, after


def kept_of(e: Evidence, block: tuple[slice, slice]) -> dict[str, Tensor]:
    """Kept numbers as if this block were the matrix."""
    return {**e.kept, **{stage.key: norm_of(e.before[block]).view(1) for stage in on_weights(e.sample.settings.stages)}}
