"""Name the fault of a matrix whose update is not the reference's, by trying what peers are known to have done wrong."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from shardmuon.auditing import norms, variants
from shardmuon.auditing.evidence import Compared, Evidence
from shardmuon.auditing.judge import Judged, along, sine
from shardmuon.auditing.norm_rules import norm_of, of_weights
from shardmuon.auditing.reference import relative_difference
from shardmuon.auditing.report import Finding, MatrixRow
from shardmuon.variants import AfterStage

Guess = tuple[str, str, str, float]  # name, what was found, remedy, and what it leaves unexplained: a sine
_EXPLAINED = 0.1  # of a difference may be left over by another length
_SHARD = 0.25  # of the difference between two scales: nearer to the shard's than to the whole's
_LENGTHS = 0.05  # of a length: nearer to what another norm leads to
_LENGTH = 0.5  # by which an update that went astray may be too long or too short


def name_fault(judged: Judged, others: Sequence[Judged]) -> Finding:
    """The explanation that leaves least.

    Args:
        judged: A matrix whose update differs.
        others: Judged matrices of the same shape.
    """
    c = judged.compared
    assert c is not None
    tries: Iterable[Callable[[], Guess | None]] = (
        lambda: _frozen(judged.evidence),
        lambda: _scaled(judged, c),
        lambda: _norms_of_parts(judged.evidence, c),
        lambda: _clipped(judged.evidence, c),
        lambda: _by_shard(judged.evidence, c),
        lambda: _swapped(judged, others, c),
        lambda: _misplaced(judged.evidence, c),
        lambda: _not_orthogonalized(judged.evidence, c),
        lambda: _other_input(judged.evidence, c),
        lambda: _other_matrix(judged.row, c),
    )
    none = ("update_differs", "it fits no known fault", "Compare this rank's plan and options with the others'", 2.0)
    guesses = [guess for guess in (attempt() for attempt in tries) if guess is not None]
    name, found, remedy, _ = min(guesses, key=lambda guess: guess[3], default=none)
    row = judged.row
    return Finding(
        name,
        row.name,
        f"the applied update differs from the same arithmetic run densely by {row.difference:.2g} of its norm: {found}",
        f"{row.allowed:.1e} ({row.arithmetic}, this matrix's spectrum)",
        remedy,
    )


def _frozen(e: Evidence) -> Guess | None:
    if not torch.equal(e.before, e.after):
        return None
    return (
        "frozen",
        "no weight changed, with a gradient and a learning rate",
        "The step writes to other storage than the parameter's, or something restores the weights",
        0.0,
    )


def _scaled(judged: Judged, c: Compared) -> Guess | None:
    """The right direction, another length."""
    e, row = judged.evidence, judged.row
    ratio = along(c.update, c.arrived)
    scaled = e.arrives(ratio * c.dense)
    left = sine(c.update, scaled)
    if ratio <= 0 or left > c.near:
        return None
    if c.distance(scaled) > max(2 * c.allowed, _EXPLAINED * c.distance(c.arrived)):
        return None
    for shape, scale in e.scales.items():
        if scale != e.scale and abs(row.scale - scale) <= max(0.02, _SHARD * abs(scale / e.scale - 1)) * abs(scale):
            return (
                "scale_from_shard_shape",
                f"its scale is {row.scale:.4g}, that of a {shape[0]}x{shape[1]} shard, not {e.scale:.4g} of the whole "
                f"{row.rows}x{row.cols} matrix",
                "Compute the learning-rate scale from the global shape",
                left,
            )
    for name, what, remedy, other in _other_norms(e, c):
        if abs(ratio / other - 1) <= min(_LENGTHS, _SHARD * abs(other - 1)):
            return name, f"it is {ratio:.4g} of its length, {what}", remedy, left
    if ratio < 1:
        return (
            "clipped_update",
            f"it is the right direction at {ratio:.3g} of its length",
            "Clip gradients before the step; an orthogonalized update must not be clipped, averaged or unscaled",
            left,
        )
    return (
        "scale_wrong",
        f"it is the right direction at {ratio:.3g} times its length",
        "Look for a scale, a sum over micro-batches or ranks, or a second step that is applied on top",
        left,
    )


def _other_norms(e: Evidence, c: Compared) -> Iterator[tuple[str, str, str, float]]:
    """Lengths that norms of something else would have led to: name, what, remedy, relative length."""
    stages = e.settings.stages
    right = variants.after_stages(c.dense, stages, e.kept)[0]
    for stage in (s for s in stages if isinstance(s, AfterStage) and s.key in {w.key for w in of_weights(stages)}):
        assert right is not None, "there is a stage"
        own = type(stage).__name__
        others = tuple(s for s in stages if s is not stage)
        without = variants.after_stages(c.dense, others, e.kept)[0]
        remedy = "The stage did not run on this matrix: look for what replaces it"
        yield (
            "variant_wrong",
            f"that of an update without {own}",
            remedy,
            float((c.dense if without is None else c.dense * without).norm() / (c.dense * right).norm()),
        )
        for part, blocks in norms.cuts_of(e).items():
            for block in blocks:
                kept = {**e.kept, stage.key: e.before.new_full((1,), norm_of(e.before[block]))}
                factor = variants.after_stages(c.dense, stages, kept)[0]
                assert factor is not None
                yield (
                    "norm_of_shard",
                    f"what {own} makes of the norm of {part} of the weights",
                    "Sum squares over all ranks that hold a piece before the root is taken",
                    float((c.dense * factor).norm() / (c.dense * right).norm()),
                )


def _norms_of_parts(e: Evidence, c: Compared) -> Guess | None:
    """Each part of the matrix multiplied with a factor of its own norms."""
    if not of_weights(e.settings.stages):
        return None
    whole = float((c.update - c.arrived).norm())
    for what, after in norms.by_parts(e, e.updated(e.staged(c.dense))):
        left = float((c.update - e.recovered(after, e.staged(c.dense))).norm()) / whole
        if left <= 0.5:
            return (
                "norm_of_shard",
                f"its weights were multiplied with factors of the norms of {what} each",
                "Sum squares over all ranks that hold a piece before the root is taken",
                left * c.near,
            )
    return None


def _clipped(e: Evidence, c: Compared) -> Guess | None:
    """Each element clamped."""
    limit = float(c.update.abs().amax())
    clamped = c.dense.clamp(-limit, limit)
    cut = float((c.dense.abs() > 1.05 * limit).double().mean())
    left = relative_difference(c.update, e.arrives(clamped))
    if cut < 0.01 or left > c.near:
        return None
    return (
        "clipped_update",
        f"elements are clamped at {limit:.3g}, {100 * cut:.0f}% of them",
        "Clip gradients before the step; an orthogonalized update must not be clipped",
        left,
    )


def _by_shard(e: Evidence, c: Compared) -> Guess | None:
    """Each shard, or each half, orthogonalized by itself."""
    rows, cols = c.fed.shape
    cuts = {"shards": e.pieces.blocks()}
    if rows > 1:
        cuts["halves of its rows"] = [(slice(0, rows // 2), slice(0, cols)), (slice(rows // 2, rows), slice(0, cols))]
    if cols > 1:
        cuts["halves of its columns"] = [
            (slice(0, rows), slice(0, cols // 2)),
            (slice(0, rows), slice(cols // 2, cols)),
        ]
    for what, blocks in cuts.items():
        if len(blocks) < 2:
            continue
        guess = torch.zeros_like(c.fed)
        for block in blocks:
            guess[block] = e.orthogonalized(c.fed[block])
        arrived = e.arrives(guess)
        # a scale by the shard's shape may come with it, so compare directions, block by block
        left = max(sine(c.update[block], arrived[block]) for block in blocks)
        if left <= c.near:
            return (
                "orthogonalized_by_shard",
                f"its {what} were orthogonalized by themselves",
                "Orthogonalize the whole matrix: the parameter's layout was not known when the plan was made",
                left,
            )
    return None


def _astray(c: Compared, guess: Tensor) -> float:
    """Sine of the angle to an update that would be right elsewhere; 1 if its length is not that."""
    return sine(c.update, guess) if abs(along(c.update, guess) - 1) <= _LENGTH else 1.0


def _swapped(judged: Judged, others: Sequence[Judged], c: Compared) -> Guess | None:
    for other in others:
        if other is judged or other.compared is None:
            continue
        left = _astray(c, judged.evidence.arrives(other.compared.dense))
        if left <= c.near:
            return (
                "results_swapped",
                f"it is the update of {other.row.name}",
                "Results went to the wrong matrix: ranks list parameters in different orders, or the plan is wrong",
                left,
            )
    return None


def _misplaced(e: Evidence, c: Compared) -> Guess | None:
    """The right numbers at wrong places of the matrix."""
    update, right = c.update, c.dense
    left = sine(update, e.arrives(right.T)) if update.shape[0] == update.shape[1] else 1.0
    if left <= c.near:
        return (
            "transposed",
            "it is the transpose of the right update",
            "Check dim order and placements of the parameter",
            left,
        )
    blocks = e.pieces.blocks()
    for (i, a), (j, b) in itertools.permutations(enumerate(blocks), 2):
        if right[a].shape != right[b].shape:
            continue
        moved = right.clone()
        moved[a] = right[b]
        left = sine(update[a], e.arrives(moved)[a])
        if left <= c.near and sine(update[a], c.arrived[a]) > c.near:
            return (
                "fragments_swapped",
                f"block {i} of its {len(blocks)} blocks received the update of block {j}",
                "Storage does not lie as the placements say, or a send and a receive are out of order",
                left,
            )
    return None


def _not_orthogonalized(e: Evidence, c: Compared) -> Guess | None:
    candidates = {
        "parallel to the momentum (plain SGD)": c.fed,
        "parallel to the gradient (plain SGD)": e.grad,
        "the sign of the momentum": c.fed.sign(),
        "the sign of the gradient": e.grad.sign(),
    }
    for what, guess in candidates.items():
        energy = float(guess.square().sum())
        length = float((c.update * guess).sum()) / energy if energy else 0.0
        left = sine(c.update, e.arrives(length * guess))
        if left <= min(c.near, 0.1):
            return (
                "not_orthogonalized",
                f"it is {what}; Newton-Schulz did not run on it",
                "The matrix is not stepped by Muon: look at its group and at what replaces the orthogonalizer",
                left,
            )
    return None


def _other_input(e: Evidence, c: Compared) -> Guess | None:
    """Orthogonalized, but not from momentum and gradient as the options say."""
    candidates = {
        "the gradient alone": e.grad,
        "the momentum before the step": e.buffer,
        "the momentum without Nesterov's term": e.buffer_after,
    }
    for what, value in candidates.items():
        left = _astray(c, e.arrives(e.orthogonalized(value))) if bool(value.any()) else 1.0
        if left <= c.near:
            remedy = "Check momentum and nesterov of its group"
            return "wrong_input", f"it is the orthogonalized form of {what}", remedy, left
    return None


def _other_matrix(row: MatrixRow, c: Compared) -> Guess | None:
    """Its singular values are in the band, but for the rounding of the result (which lifts the smallest most)."""
    slack = 0.1 + c.near
    if not (row.band[0] - slack <= row.sigma_min and row.sigma_max <= row.band[1] + slack):
        return None
    return (
        "wrong_matrix",
        "its singular values are those of an orthogonalized matrix, but not of this one",
        "Pieces or results of other matrices were mixed in: check that all ranks list the same parameters in one order",
        1.0,
    )
