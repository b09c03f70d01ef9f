"""Name the fault of a matrix whose update is not the reference's, by trying what peers are known to have done wrong."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardmuon.auditing import norms
from shardmuon.auditing.dense import Block
from shardmuon.auditing.evidence import ALL, Compared
from shardmuon.auditing.judge import Judged, along, sine
from shardmuon.auditing.report import Finding
from shardmuon.auditing.stages import Applied, on_weights
from shardmuon.variants import AfterStage

_EXPLAINED = 0.1  # of a difference may be left over by another length
_NEARER = 0.25  # of the difference between two lengths: nearer to the other's
_LENGTH = 0.5  # by which an update that went astray may be too long or too short


class Guess(NamedTuple):
    """An explanation of the finding.

    Attributes:
        name, found, remedy: Those of the finding.
        result: (rows, cols) fp64: another result of the orthogonalizer, which has to explain the update. None: it does.
        left: Sine of the angle to the applied update that it leaves.
        limit: What may be left at most.
        blocks: Where it must explain the update, each by itself and at any length. None: as a whole, its length, too.
    """

    name: str
    found: str
    remedy: str
    result: Tensor | None = None
    left: float = 0.0
    limit: float = 1.0
    blocks: Sequence[Block] | None = None


def name_fault(judged: Judged, others: Sequence[Judged]) -> Finding:
    """The explanation that leaves least of the update unexplained.

    Args:
        judged: A matrix whose update differs.
        others: Judged matrices of the same shape.
    """
    c, row = judged.compared, judged.row
    assert c is not None
    spread = max(float(lengths.norm()) for lengths in c.nudged(ALL))
    near = max(0.1, min(0.3, 2 * spread / max(float(c.dense.norm()), 1e-300)))
    guesses = [*_frozen(c), *_other_length(judged, c, near), *_norms_of_parts(c, near)]
    for guess in (*_clamped(c), *_by_parts(c), *_misplaced(judged, others, c, near), *_not_muon(c)):
        assert guess.result is not None
        arrived = c.arrives(guess.result)
        left = max(sine(c.update[block], arrived[block]) for block in guess.blocks or [(slice(None), slice(None))])
        long = guess.blocks is None and abs(along(c.update, arrived) - 1) > _LENGTH
        if left <= min(near, guess.limit) and not long:
            guesses.append(guess._replace(left=left))
    slack = 0.1 + near  # for the rounding of the result, which lifts the smallest most
    if row.band[0] - slack <= row.sigma_min and row.sigma_max <= row.band[1] + slack:
        text = "its singular values are those of an orthogonalized matrix, but not of this one"
        remedy = "Pieces or results of others were mixed in: check that all ranks list the same parameters in one order"
        guesses.append(Guess("wrong_matrix", text, remedy, left=1.0))
    unknown = Guess(
        "update_differs", "it fits no known fault", "Compare this rank's plan and options with the others'", left=2.0
    )
    best = min((*guesses, unknown), key=lambda guess: guess.left)
    return Finding(
        best.name,
        row.name,
        f"the applied update differs from the same arithmetic run densely by {row.difference:.2g}: {best.found}",
        f"{row.allowed:.1e} ({row.arithmetic}, this very matrix shaken)",
        best.remedy,
    )


def _frozen(c: Compared) -> Iterator[Guess]:
    if torch.equal(c.evidence.before, c.evidence.after):
        remedy = "The step writes to other storage than the parameter's, or something restores the weights"
        yield Guess("frozen", "no weight changed, with a gradient and a learning rate", remedy)


def _other_length(judged: Judged, c: Compared, near: float) -> Iterator[Guess]:
    """Guesses at a right direction with another length."""
    e, row, ratio = judged.evidence, judged.row, along(c.update, c.arrived)
    scaled = c.arrives(ratio * c.dense)
    left = sine(c.update, scaled)
    measure, allowed = c.spread(ALL)
    explained = max(2 * allowed, _EXPLAINED * measure(c.seen(c.update - c.arrived)))
    if ratio <= 0 or left > near or measure(c.seen(c.update - scaled)) > explained:
        return
    clipping = "an orthogonalized update must not be clipped, averaged or unscaled"
    for shape, scale in e.scales.items():
        length = scale / e.scale
        if length != 1 and abs(ratio / length - 1) <= max(0.02, _NEARER * abs(length - 1)):
            text = (
                f"its scale is {row.scale:.4g}, that of a {shape[0]}x{shape[1]} shard, not {e.scale:.4g} of the whole "
                f"{row.rows}x{row.cols} matrix"
            )
            yield Guess(
                "scale_from_shard_shape", text, "Compute the learning-rate scale from the global shape", left=left
            )
            return
    for length, guess in _other_norms(c, left):
        if abs(ratio / length - 1) <= _NEARER * abs(length - 1):
            yield guess
            return
    if ratio < 1:
        text = f"it is the right direction at {ratio:.3g} of its length"
        yield Guess("clipped_update", text, f"Clip gradients before the step; {clipping}", left=left)
    else:
        text = f"it is the right direction at {ratio:.3g} times its length"
        remedy = "Look for a scale, a sum over micro-batches or ranks, or a second step that is applied on top"
        yield Guess("scale_wrong", text, remedy, left=left)


def _other_norms(c: Compared, left: float) -> Iterator[tuple[float, Guess]]:
    """Guesses at lengths that norms of something else would have led to."""
    e = c.evidence
    right, keys = float(c.step.staged.norm()), {stage.key for stage in on_weights(e.sample.settings.stages)}
    for stage in (s for s in e.sample.settings.stages if isinstance(s, AfterStage) and s.key in keys):
        own, others = type(stage).__name__, tuple(s for s in e.sample.settings.stages if s is not stage)
        length = float(Applied(others, e.kept).to_result(c.dense).norm()) / right
        remedy = "The stage did not run on this matrix: look for what replaces it"
        yield length, Guess("variant_wrong", f"its length is that of an update without {own}", remedy, left=left)
        for what, blocks in e.parts.items():
            for block in blocks:
                applied = Applied(e.sample.settings.stages, norms.kept_of(e, block))
                text = f"its length is what {own} makes of the norm of one of its {what}"
                length = float(applied.to_result(c.dense).norm()) / right
                yield length, Guess("norm_of_shard", text, norms.OF_SHARD, left=left)


def _norms_of_parts(c: Compared, near: float) -> Iterator[Guess]:
    """Guesses that each part of the weights was multiplied with a factor of its own norms."""
    if not on_weights(c.evidence.sample.settings.stages):
        return
    whole = float((c.update - c.arrived).norm())
    for what, after in norms.by_parts(c):
        left = float((c.update - c.recovered(after.to(torch.float64))).norm()) / whole
        if left <= 0.5:
            text = f"its weights were multiplied with factors of the norms of its {what}"
            yield Guess("norm_of_shard", text, norms.OF_SHARD, left=left * near)


def _clamped(c: Compared) -> Iterator[Guess]:
    """Guesses that each element was clamped."""
    limit = float(c.update.abs().amax())
    cut = float((c.dense.abs() > 1.05 * limit).double().mean())
    if cut >= 0.01:
        text = f"elements are clamped at {limit:.3g}, {100 * cut:.0f}% of them"
        remedy = "Clip gradients before the step; an orthogonalized update must not be clipped"
        yield Guess("clipped_update", text, remedy, c.dense.clamp(-limit, limit))


def _by_parts(c: Compared) -> Iterator[Guess]:
    """Guesses that each shard, or each half, was orthogonalized by itself; maybe with a scale by its own shape."""
    for what, blocks in c.evidence.parts.items():
        guess = torch.zeros_like(c.dense)
        for block in blocks:
            guess[block] = c.evidence.orthogonalized(c.fed[block])
        text = f"its {what} were orthogonalized by themselves"
        remedy = "Orthogonalize the whole matrix: the parameter's layout was not known when the plan was made"
        yield Guess("orthogonalized_by_shard", text, remedy, guess, blocks=blocks)


def _misplaced(judged: Judged, others: Sequence[Judged], c: Compared, near: float) -> Iterator[Guess]:
    """Guesses at right numbers in wrong places, of this matrix or of another."""
    for other in others:
        if other is not judged and other.compared is not None:
            text = f"it is the update of {other.row.name}"
            remedy = "Results went to the wrong matrix: ranks list parameters in different orders, or the plan is wrong"
            yield Guess("results_swapped", text, remedy, other.compared.dense)
    if c.dense.shape[0] == c.dense.shape[1]:
        remedy = "Check dim order and placements of the parameter"
        yield Guess("transposed", "it is the transpose of the right update", remedy, c.dense.T)
    blocks = c.evidence.blocks
    for (i, a), (j, b) in itertools.permutations(enumerate(blocks), 2):
        if c.dense[a].shape == c.dense[b].shape and sine(c.update[a], c.arrived[a]) > near:
            moved = c.dense.clone()
            moved[a] = c.dense[b]
            text = f"block {i} of its {len(blocks)} blocks received the update of block {j}"
            remedy = "Storage does not lie as the placements say, or a send and a receive are out of order"
            yield Guess("fragments_swapped", text, remedy, moved, blocks=[a])


def _not_muon(c: Compared) -> Iterator[Guess]:
    """Guesses that the update is not orthogonalized, or is made from another input than the options ask for."""
    e = c.evidence
    plain = {
        "parallel to the momentum (plain SGD)": c.fed.to(torch.float64),
        "parallel to the gradient (plain SGD)": e.grad,
        "the sign of the momentum": c.fed.to(torch.float64).sign(),
        "the sign of the gradient": e.grad.sign(),
    }
    for what, guess in plain.items():
        text = f"it is {what}; Newton-Schulz did not run on it"
        remedy = "The matrix is not stepped by Muon: look at its group and at what replaces the orthogonalizer"
        yield Guess("not_orthogonalized", text, remedy, along(c.update, guess) * guess, limit=0.1)
    inputs = {
        "the gradient alone": e.grad,
        "the momentum before the step": e.buffer,
        "the momentum without Nesterov's term": e.buffer_after,
    }
    for what, value in inputs.items():
        if bool(value.any()):
            text = f"it is the orthogonalized form of {what}"
            result = e.orthogonalized(value)
            yield Guess("wrong_input", text, "Check momentum and nesterov of its group", result)
