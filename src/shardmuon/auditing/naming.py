"""Name the fault behind a wrong update of a matrix by simulating known faults.

A guess is the name of a fault, a description, and the (rows, cols) fp64 weights that a step with this fault would
produce. A guess explains the wrong update if only a small fraction remains unexplained, both of the update and of its
difference from the dense reference, measured by direction as in [Note: the shake] of judge.py. The first guess that
leaves almost nothing unexplained names the fault. If there is none, the guess that leaves the least does.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shardmuon.auditing.dense import Block
from shardmuon.auditing.judge import ALL, Evidence, along
from shardmuon.auditing.reference import KeptNumbers, norm_of, orthogonalized, staged, weight_stages
from shardmuon.auditing.report import Finding
from shardmuon.options import lr_scale
from shardmuon.variants import AfterStage, WeightStage

_Guess = tuple[str, str, Tensor]
_LEFT = 0.35  # fraction of the difference that a guess may leave unexplained
_HARDLY = 0.03  # fraction of the difference below which a guess explains almost everything
_OF_THE_NORM = 0.5  # if the weights' norm is wrong: fraction of the norm's error that a guess may leave unexplained


def name_fault(e: Evidence, others: Sequence[Evidence]) -> None:
    """Find out why an update, or the norm of the weights, differs from the dense reference step, and record the fault.

    Args:
        e: The judged matrix whose update or norm differs.
        others: Other judged matrices of the same shape, with which it may have been swapped.
    """
    measure, allowed = e.spread(ALL)
    # An update that is far too short differs from the dense update by about the whole dense update. It is compared with
    # its own size instead, or else any guess would explain it.
    whole = min(measure(e.seen(e.update - e.arrived)), measure(e.seen(e.update)))
    wrong, least = e.wrong[0], max(allowed, _LEFT * whole)
    name, found, norm = wrong.name, "it fits no known fault", e.after["weights"].norm()
    most = _OF_THE_NORM * (e.step.after.norm() - norm).abs() if name == "norm_wrong" else torch.inf
    frozen = "frozen", "no weight changed, with a gradient and a learning rate", e.before["weights"]
    of_results = itertools.chain(_lengths(e), _blocks(e), _whole(e, others))
    stepped = ((guess, text, e.stepped(result, e.step.factor).after) for guess, text, result in of_results)
    for guess, text, after in itertools.chain([frozen], _of_stages(e), stepped):
        left = max(measure(e.seen(e.update - e.recovered(after))), _HARDLY * whole)
        if left < least and (after.norm() - norm).abs() <= most:
            least, name, found = left, guess, text
    e.findings.append(Finding.of(name, wrong.where, f"{wrong.found}: {found}", wrong.allowed))


def _parts(e: Evidence) -> dict[str, list[Block]]:
    """List parts of the matrix that a faulty step may have mistaken for the whole: its shards and its halves. A kind of
    part is listed only if there are at least two."""
    rows, cols = e.shape
    cuts = {
        "shards": e.blocks,
        "halves of its rows": [(slice(0, rows // 2), slice(0, cols)), (slice(rows // 2, rows), slice(0, cols))],
        "halves of its columns": [(slice(0, rows), slice(0, cols // 2)), (slice(0, rows), slice(cols // 2, cols))],
    }
    held = {what: [block for block in blocks if e.before["weights"][block].numel()] for what, blocks in cuts.items()}
    return {what: blocks for what, blocks in held.items() if len(blocks) > 1}


def _of_stages(e: Evidence) -> Iterator[_Guess]:
    """Yield guesses about stages that preserve the norm of the weights: the norm of a shard or half was used, and
    perhaps stored, instead of the norm of the whole matrix; or a stage did not run."""
    stages = e.settings.stages
    keys = {stage.key for stage in weight_stages(stages)}
    parts = [(what, blocks) for what, blocks in _parts(e).items() if keys]
    for what, blocks in parts:
        for kept_too in (True, False):
            after = e.step.updated.clone()
            for block in blocks:
                kept = _norms_of(e, block) if kept_too else e.before
                after[block] = staged(WeightStage, stages, after[block], kept)[1]
            yield "norm_of_shard", f"norms of its {what} on its weights lead to that", after.double()
    if keys:
        yield "norm_wrong", "its stages on weights did not run", e.step.updated.double()
    for stage in (s for s in stages if isinstance(s, AfterStage) and s.key in keys):
        own, others = type(stage).__name__, tuple(s for s in stages if s is not stage)
        factor = staged(AfterStage, others, e.dense, e.before)[0]
        yield "variant_wrong", f"it is an update without {own}", e.stepped(e.dense, factor).after
        for what, block in ((what, block) for what, blocks in parts for block in blocks):
            factor = staged(AfterStage, stages, e.dense, _norms_of(e, block))[0]
            text = f"its length is what {own} makes of the norm of one of its {what}"
            yield "norm_of_shard", text, e.stepped(e.dense, factor).after


def _norms_of(e: Evidence, block: Block) -> KeptNumbers:
    """Return the values that stages store, but with norms computed as if this block were the whole matrix."""
    own = norm_of(e.before["weights"][block])
    return {**e.before, **{stage.key: own for stage in weight_stages(e.settings.stages)}}


def _lengths(e: Evidence) -> Iterator[_Guess]:
    """Yield guesses in which the update has the right direction but a wrong length."""
    rows, cols = e.shape
    for m, n in {e.dense[block].shape for block in e.blocks} - {e.shape}:
        scale = lr_scale(e.settings.adjust_lr_fn, m, n)
        text = f"its scale is {scale:.4g}, that of a {m}x{n} shard, not {e.scale:.4g} of the whole {rows}x{cols} one"
        yield "scale_from_shard_shape", text, scale / e.scale * e.dense
    ratio = along(e.update, e.arrived)
    if ratio > 0:
        name, times = ("clipped_update", "of") if ratio < 1 else ("scale_wrong", "times")
        yield name, f"it is the right direction at {ratio:.3g} {times} its length", ratio * e.dense
    limit = float(e.update.abs().amax())
    yield "clipped_update", f"elements are clamped at {limit:.3g}", e.dense.clamp(-limit, limit)


def _blocks(e: Evidence) -> Iterator[_Guess]:
    """Yield guesses in which parts of the matrix were orthogonalized separately, or swapped."""
    for what, blocks in _parts(e).items():
        result = torch.zeros_like(e.dense)
        for block in blocks:
            own = orthogonalized(e.fed[block], e.arithmetic)
            result[block] = along(e.update[block], own) * own  # the scale may come from the block's own shape
        yield "orthogonalized_by_shard", f"its {what} were orthogonalized by themselves", result
    result, text = e.dense.clone(), ""
    for i, at in enumerate(e.blocks):
        alike = [(j, block) for j, block in enumerate(e.blocks) if e.dense[block].shape == e.dense[at].shape]
        j, nearest = min(alike, key=lambda one: float((e.update[at] - e.dense[one[1]]).norm()))
        result[at] = e.dense[nearest]
        if i != j:
            text = text or f"block {i} of its {len(e.blocks)} blocks received the update of block {j}"
    if text:
        yield "fragments_swapped", text, result


def _whole(e: Evidence, others: Sequence[Evidence]) -> Iterator[_Guess]:
    """Yield guesses in which the matrix got another matrix's result, was transposed, had a wrong input, or was not
    orthogonalized."""
    for other in others:
        if other is not e and other.row.compared:
            yield "results_swapped", f"it is the update of {other.row.name}", other.dense
    if e.shape[0] == e.shape[1]:
        yield "transposed", "it is the transpose of the right update", e.dense.T
    inputs = {
        "the momentum": e.fed.double(),
        "the gradient alone": e.before["gradient"],
        "the momentum before the step": e.before["momentum"],
        "the momentum without Nesterov's term": e.after["momentum"],
    }
    for what, value in inputs.items():
        for how, plain in (("parallel to", value), ("the sign of", value.sign())):
            text = f"it is {how} {what}, as in plain SGD; Newton-Schulz did not run on it"
            yield "not_orthogonalized", text, along(e.update, plain) * plain
        if bool(value.any()):
            yield "wrong_input", f"it is the orthogonalized form of {what}", orthogonalized(value, e.arithmetic)
