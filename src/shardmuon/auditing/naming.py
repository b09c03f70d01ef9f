"""Name the fault of a matrix whose update is not the reference's, by trying what peers are known to have done wrong."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from shardmuon.auditing.judge import Evidence, Judged, sine
from shardmuon.auditing.reference import reference_of, relative_difference
from shardmuon.auditing.report import Finding

Guess = tuple[str, str, str]  # name, what was found, remedy


def name_fault(judged: Judged, others: Sequence[Judged]) -> Finding:
    """The first explanation that fits.

    Args:
        judged: A matrix whose update differs.
        others: Judged matrices of the same shape.
    """
    assert judged.update is not None and judged.reference is not None and judged.fed is not None
    near = max(0.1, min(0.4, judged.row.allowed))  # sine of the angle to what an explanation predicts
    tries: Iterable[Callable[[], Guess | None]] = (
        lambda: _frozen(judged.evidence),
        lambda: _scaled(judged, near),
        lambda: _clipped(judged, near),
        lambda: _by_shard(judged, near),
        lambda: _swapped(judged, others, near),
        lambda: _misplaced(judged, near),
        lambda: _not_orthogonalized(judged, near),
        lambda: _other_input(judged, near),
        lambda: _other_matrix(judged),
    )
    name, found, remedy = next(
        (guess for guess in (attempt() for attempt in tries) if guess is not None),
        ("update_differs", "it fits no known fault", "Compare this rank's plan and options with the others'"),
    )
    row = judged.row
    return Finding(
        name,
        row.name,
        f"the applied update differs from the reference by {row.difference:.2g} of its norm: {found}",
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
    )


def _scaled(judged: Judged, near: float) -> Guess | None:
    """The right direction, another length."""
    assert judged.update is not None and judged.reference is not None
    e, row = judged.evidence, judged.row
    if sine(judged.update, judged.reference.update) > near:
        return None
    ratio = row.scale / e.scale
    for shape, scale in e.scales.items():
        if scale != e.scale and abs(row.scale - scale) <= max(0.02, row.allowed) * abs(scale):
            return (
                "scale_from_shard_shape",
                f"its scale is {row.scale:.4g}, that of a {shape[0]}x{shape[1]} shard, not {e.scale:.4g} of the whole "
                f"{row.rows}x{row.cols} matrix",
                "Compute the learning-rate scale from the global shape",
            )
    if 0 < ratio < 1:
        return (
            "clipped_update",
            f"it is the right direction at {ratio:.3g} of its length",
            "Clip gradients before the step; an orthogonalized update must not be clipped, averaged or unscaled",
        )
    return (
        "scale_wrong",
        f"it is the right direction at {ratio:.3g} times its length",
        "Look for a scale, a sum over micro-batches or ranks, or a second step that is applied on top",
    )


def _clipped(judged: Judged, near: float) -> Guess | None:
    """Each element clamped."""
    assert judged.update is not None and judged.reference is not None
    limit = float(judged.update.abs().amax())
    clamped = judged.reference.update.clamp(-limit, limit)
    cut = float((judged.reference.update.abs() > 1.05 * limit).double().mean())
    if cut < 0.01 or relative_difference(judged.update, clamped) > near:
        return None
    return (
        "clipped_update",
        f"elements are clamped at {limit:.3g}, {100 * cut:.0f}% of them",
        "Clip gradients before the step; an orthogonalized update must not be clipped",
    )


def _by_shard(judged: Judged, near: float) -> Guess | None:
    """Each shard, or each half, orthogonalized by itself."""
    assert judged.update is not None and judged.fed is not None
    rows, cols = judged.fed.shape
    cuts = {"shards": judged.evidence.pieces.blocks()}
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
        guess = torch.zeros_like(judged.fed)
        for block in blocks:
            guess[block] = _steps(judged, judged.fed[block])
        # a scale by the shard's shape may come with it, so compare directions, block by block
        if all(sine(judged.update[block], guess[block]) <= near for block in blocks):
            return (
                "orthogonalized_by_shard",
                f"its {what} were orthogonalized by themselves",
                "Orthogonalize the whole matrix: the parameter's layout was not known when the plan was made",
            )
    return None


def _swapped(judged: Judged, others: Sequence[Judged], near: float) -> Guess | None:
    assert judged.update is not None
    for other in others:
        if other is judged or other.reference is None or other.update is None:
            continue
        if sine(judged.update, other.reference.update) <= near:
            return (
                "results_swapped",
                f"it is the update of {other.row.name}",
                "Results went to the wrong matrix: ranks list parameters in different orders, or the plan is wrong",
            )
    return None


def _misplaced(judged: Judged, near: float) -> Guess | None:
    """The right numbers at wrong places of the matrix."""
    assert judged.update is not None and judged.reference is not None
    update, right = judged.update, judged.reference.update
    if update.shape[0] == update.shape[1] and sine(update.T, right) <= near:
        return (
            "transposed",
            "it is the transpose of the right update",
            "Check dim order and placements of the parameter",
        )
    blocks = judged.evidence.pieces.blocks()
    for (i, a), (j, b) in itertools.permutations(enumerate(blocks), 2):
        if right[a].shape == right[b].shape and sine(update[a], right[b]) <= near and sine(update[a], right[a]) > near:
            return (
                "fragments_swapped",
                f"block {i} of its {len(blocks)} blocks received the update of block {j}",
                "Storage does not lie as the placements say, or a send and a receive are out of order",
            )
    return None


def _not_orthogonalized(judged: Judged, near: float) -> Guess | None:
    assert judged.update is not None and judged.fed is not None
    candidates = {
        "parallel to the momentum (plain SGD)": judged.fed,
        "parallel to the gradient (plain SGD)": judged.evidence.grad,
        "the sign of the momentum": judged.fed.sign(),
        "the sign of the gradient": judged.evidence.grad.sign(),
    }
    for what, guess in candidates.items():
        if sine(judged.update, guess) <= min(near, 0.1):
            return (
                "not_orthogonalized",
                f"it is {what}; Newton-Schulz did not run on it",
                "The matrix is not stepped by Muon: look at its group and at what replaces the orthogonalizer",
            )
    return None


def _other_input(judged: Judged, near: float) -> Guess | None:
    """Orthogonalized, but not from momentum and gradient as the options say."""
    assert judged.update is not None
    e = judged.evidence
    candidates = {
        "the gradient alone": e.grad,
        "the momentum before the step": e.buffer,
        "the momentum without Nesterov's term": e.buffer_after,
    }
    for what, value in candidates.items():
        if bool(value.any()) and sine(judged.update, _steps(judged, value)) <= near:
            return "wrong_input", f"it is the orthogonalized form of {what}", "Check momentum and nesterov of its group"
    return None


def _other_matrix(judged: Judged) -> Guess | None:
    row = judged.row
    slack = 0.1 + row.allowed
    if not (row.band[0] - slack <= row.sigma_min and row.sigma_max <= row.band[1] + slack):
        return None
    return (
        "wrong_matrix",
        "its singular values are those of an orthogonalized matrix, but not of this one",
        "Pieces or results of other matrices were mixed in: check that all ranks list the same parameters in one order",
    )


def _steps(judged: Judged, value: Tensor) -> Tensor:
    e = judged.evidence
    return reference_of(value, e.settings.coefficients, method=e.arithmetic.method, eps=e.settings.eps).update
