"""Name the fault of a matrix whose update is not the reference's, by trying what peers are known to have done wrong.

Each guess is a whole step that went wrong in one way. A guess explains the update if it leaves no more than a part of
it, and of its difference from the dense one, direction by direction as in [Note: the shake] of judge.py. The first of
those that leave hardly anything is the name, else the one that leaves least.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shardmuon.auditing.judge import ALL, Evidence, Guess, along, norms_of, other_norms, parts_of
from shardmuon.auditing.reference import staged, weight_stages
from shardmuon.variants import AfterStage

_LEFT = 0.35  # of the difference may be left over by a guess
_HARDLY = 0.1  # of it is hardly anything
_SLACK = 0.2  # of singular values, for the rounding of the result, which lifts the smallest most


def name_fault(e: Evidence, others: Sequence[Evidence]) -> None:
    """Note the explanation of an update that differs.

    Args:
        e: A judged matrix.
        others: Judged matrices of the same shape.
    """
    measure, allowed = e.spread(ALL)
    whole = min(measure(e.seen(e.update - e.arrived)), measure(e.seen(e.update)))  # a short update is like any other
    row, best = e.row, Guess("update_differs", "it fits no known fault", e.after["weights"])
    if row.band[0] - _SLACK <= row.sigma_min and row.sigma_max <= row.band[1] + _SLACK:
        text = "its singular values are those of an orthogonalized matrix, but not of this one"
        best = best._replace(name="wrong_matrix", found=text)
    least = max(allowed, _LEFT * whole)
    frozen = Guess("frozen", "no weight changed, with a gradient and a learning rate", e.before["weights"])
    for guess in itertools.chain([frozen], other_norms(e), _lengths(e), _results(e, others)):
        left = max(measure(e.seen(e.update - e.recovered(guess.after))), _HARDLY * whole)
        if left < least:
            least, best = left, guess
    text = f"the applied update differs from the same arithmetic run densely by {row.difference:.2g}: {best.found}"
    e.say(best.name, text, f"{row.allowed:.1e} ({row.arithmetic}, this very matrix shaken)")


def _lengths(e: Evidence) -> Iterator[Guess]:
    """Guesses at a right direction with another length."""
    rows, cols = e.shape
    for m, n in {e.dense[block].shape for block in e.blocks} - {e.shape}:
        with contextlib.suppress(Exception):  # the caller's own scale need not know shapes of shards
            scale = e.scale_of(m, n)
            text = (
                f"its scale is {scale:.4g}, that of a {m}x{n} shard, not {e.scale:.4g} of the whole {rows}x{cols} one"
            )
            yield Guess("scale_from_shard_shape", text, _after(e, scale / e.scale * e.dense))
    stages = e.settings.stages
    keys = {stage.key for stage in weight_stages(stages)}
    for stage in (s for s in stages if isinstance(s, AfterStage) and s.key in keys):
        own, others = type(stage).__name__, tuple(s for s in stages if s is not stage)
        factor = staged(AfterStage, others, e.dense, e.before)[0]
        yield Guess("variant_wrong", f"it is an update without {own}", e.stepped(e.dense, factor).after)
        for what, block in ((what, block) for what, blocks in parts_of(e).items() for block in blocks):
            factor = staged(AfterStage, stages, e.dense, norms_of(e, block))[0]
            text = f"its length is what {own} makes of the norm of one of its {what}"
            yield Guess("norm_of_shard", text, e.stepped(e.dense, factor).after)
    ratio = along(e.update, e.arrived)
    if ratio > 0:
        name, times = ("clipped_update", "of") if ratio < 1 else ("scale_wrong", "times")
        text = f"it is the right direction at {ratio:.3g} {times} its length"
        yield Guess(name, text, _after(e, ratio * e.dense))
    limit = float(e.update.abs().amax())
    yield Guess("clipped_update", f"elements are clamped at {limit:.3g}", _after(e, e.dense.clamp(-limit, limit)))


def _results(e: Evidence, others: Sequence[Evidence]) -> Iterator[Guess]:
    """Guesses at another result of the orthogonalizer."""
    for what, blocks in parts_of(e).items():
        result = torch.zeros_like(e.dense)
        for block in blocks:
            own = e.orthogonalized(e.fed[block])
            result[block] = along(e.update[block], own) * own  # maybe with a scale by its own shape
        yield Guess("orthogonalized_by_shard", f"its {what} were orthogonalized by themselves", _after(e, result))
    for other in others:
        if other is not e and other.row.compared:
            yield Guess("results_swapped", f"it is the update of {other.row.name}", _after(e, other.dense))
    if e.shape[0] == e.shape[1]:
        yield Guess("transposed", "it is the transpose of the right update", _after(e, e.dense.T))
    result, text = e.dense.clone(), ""
    for i, at in enumerate(e.blocks):
        alike = [(j, block) for j, block in enumerate(e.blocks) if e.dense[block].shape == e.dense[at].shape]
        j, nearest = min(alike, key=lambda one: float((e.update[at] - e.dense[one[1]]).norm()))
        result[at] = e.dense[nearest]
        if i != j:
            text = text or f"block {i} of its {len(e.blocks)} blocks received the update of block {j}"
    if text:
        yield Guess("fragments_swapped", text, _after(e, result))
    inputs = {
        "the momentum": e.fed.double(),
        "the gradient alone": e.before["gradient"],
        "the momentum before the step": e.before["momentum"],
        "the momentum without Nesterov's term": e.after["momentum"],
    }
    for what, value in inputs.items():
        for how, plain in (("parallel to", value), ("the sign of", value.sign())):
            text = f"it is {how} {what}, as in plain SGD; Newton-Schulz did not run on it"
            yield Guess("not_orthogonalized", text, _after(e, along(e.update, plain) * plain))
        if bool(value.any()):
            text = f"it is the orthogonalized form of {what}"
            yield Guess("wrong_input", text, _after(e, e.orthogonalized(value)))


def _after(e: Evidence, result: Tensor) -> Tensor:
    """Weights stepped with another result of the orthogonalizer, and with the dense one's factors."""
    return e.stepped(result, e.step.factor).after
