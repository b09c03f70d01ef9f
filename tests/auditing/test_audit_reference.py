"""Tests of the audit's arithmetic: its fp64 reference matches the plain Newton-Schulz iteration, and the pieces that
ranks send are reassembled into full matrices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from drawn import models
from healthy_steps import SPECTRA, gradient
from hypothesis import given, settings
from simulated import cut
from tolerances import (
    KELLER,
    Coefficients,
    assert_rounded,
    orthogonalization_bound,
    roundoff,
    steps_written_out,
)
from torch import Tensor

from shardmuon.auditing.live import _block_of, _part_of, _sent_by
from shardmuon.auditing.reference import Arithmetic, Reference
from shardmuon.layout.pieces import Box, FlatRange, Held, ParamLayout
from shardmuon.layout.views import matrix_view
from shardmuon.options import VIEW_DEFAULTS, Settings
from shardmuon.orthogonalize.choice import Choice
from shardmuon.orthogonalize.schedules import schedule as named
from shardmuon.step.update import apply_
from shardmuon.testing.layouts import ParamCase

SCHEDULES = {"keller": KELLER, "polar express": named("polar_express").triples}
SHAPES = ((3, 40), (40, 3), (1, 24), (16, 16), (33, 65), (65, 33), (7, 4), (64, 64), (96, 384))


def result_of(reference: Reference, longer: float = 1.0) -> Tensor:
    """Return the result of the Newton-Schulz steps on the matrix of `reference`. The matrix is first divided by
    `longer` times its norm."""
    out = reference.vectors @ (reference.ratios(longer).unsqueeze(1) * reference.coords)
    return out.T if reference.tall else out


def eigen_bound(shape: Sequence[int], coefficients: Coefficients) -> float:
    """Return an error bound for fp64 Newton-Schulz steps computed from the eigenvalues of the Gram matrix, for a matrix
    of norm 1.

    Singular values are square roots of eigenvalues. Near zero, their error is therefore the square root of the
    eigenvalue's error (see `polar_bound`). Each step multiplies it by at most the slope of its polynomial at zero.
    """
    return math.prod(a for a, _, _ in coefficients) * (max(shape) * roundoff(torch.float64)) ** 0.5


def _drawn(kind: str, rows: int, cols: int) -> Tensor:
    return gradient(kind, rows, cols, torch.Generator().manual_seed(rows * cols))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_reference_is_the_plain_iteration_at_any_scale(shape: tuple[int, int], schedule: str) -> None:
    coefficients = SCHEDULES[schedule]
    for kind, scale in zip(SPECTRA, itertools.cycle((1.0, 1e-40, 1e-300, 1e150))):
        x = _drawn(kind, *shape)
        plain = steps_written_out(x, coefficients)
        reference = Reference(scale * x, coefficients)
        bound = orthogonalization_bound(coefficients, torch.float64, x) + eigen_bound(shape, coefficients)
        assert float((result_of(reference) - plain).norm()) <= bound
        found = torch.linalg.svdvals(plain)
        results = (reference.sigmas * reference.ratios()).abs().sort(descending=True).values
        assert float((found - results).abs().max()) <= eigen_bound(shape, coefficients)
    assert not result_of(Reference(torch.zeros(shape), coefficients)).any()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_larger_norm_is_that_of_one_more_row_and_column(schedule: str) -> None:
    """Dividing a matrix by a norm larger than its own must give the same result as adding a row and a column that raise
    its norm to that value."""
    x = _drawn("gauss", 12, 20)
    bordered = torch.nn.functional.pad(x, (0, 1, 0, 1))
    bordered[-1, -1] = 0.35 * x.norm()
    found = result_of(Reference(x, SCHEDULES[schedule]), float(bordered.norm() / x.norm()))
    expected = result_of(Reference(bordered, SCHEDULES[schedule]))[:-1, :-1]
    bound = orthogonalization_bound(SCHEDULES[schedule], torch.float64, x) + eigen_bound(x.shape, SCHEDULES[schedule])
    assert float((found - expected).norm()) <= 2 * bound


def _settings(variant: str | None) -> Settings:
    given = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "nesterov": True, "ns_coefficients": "keller"}
    return Settings.of({**VIEW_DEFAULTS, **given, "ns_steps": None, "adjust_lr_fn": None, "variant": variant})


@pytest.mark.parametrize("variant", [None, "cautious"])
@pytest.mark.parametrize("scale", [1.0, 0.3, 5.0])
def test_the_update_is_recovered_from_the_weights(variant: str | None, scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    before, update = (torch.randn(20, 30, generator=generator, dtype=torch.float64) for _ in range(2))
    after = before.clone()
    s = _settings(variant)
    apply_([after], [update], [s.lr * scale], lr=s.lr, weight_decay=s.weight_decay, cautious=s.cautious)
    # `apply_` and `recovered_update` each round the weights twice, once for the decay and once for the update. Allow
    # four more roundings for the update itself.
    sizes = 4 * before.abs() / (s.lr * scale) + 4 * update.abs()
    arithmetic = Arithmetic(s, Choice("standard", torch.float64), *[torch.float64] * 6)
    assert_rounded(arithmetic.recovered_update(before, after, scale, update), update, roundings=1, scale=sizes)


@settings(max_examples=20)
@given(models())
def test_pieces_of_every_kind_come_together_to_the_matrix(model: list[tuple[ParamLayout, dict[str, Any]]]) -> None:
    """The parts of a matrix that the ranks send must together contain every element exactly once, in the right place.
    The expected parts are computed without the layout's tiles (the strided blocks into which a step splits each shard).
    """
    for layout, options in model:
        full = torch.arange(1.0, math.prod(layout.view.shape) + 1).view(layout.view.shape)
        storage = cut(layout, full)
        for index, expected in enumerate(ParamCase(layout.view.shape, "", options).matrices(full)):
            sent = torch.full((expected.numel(),), math.nan)
            for rank, held in zip(layout.ranks, layout.held, strict=True):
                alone, part = _part_of(layout.view, index, held), _sent_by(layout, index, rank)
                there = torch.isin(expected.reshape(-1), storage[rank]).nonzero().flatten()
                assert torch.equal(alone.select(storage[rank]), expected.reshape(-1)[alone.places])
                assert torch.equal(alone.places.sort().values, there)
                assert sent[part.places].isnan().all(), "each element is sent once"
                sent[part.places] = part.select(storage[rank])
            assert torch.equal(sent.view(expected.shape), expected)


BLOCKS = {
    "whole rows, and parts of others": (
        # The rows of two matrices alternate: rows 0-2 and 4-6 form the first matrix, and rows 3 and 7 form the second
        # matrix.
        matrix_view((8, 6), split_sizes=[3, 1], split_groups=2),
        (Box((0, 0), (2, 6)), Box((2, 0), (6, 2)), Box((2, 2), (6, 4))),
        [
            [(slice(0, 2), slice(0, 6)), (slice(2, 6), slice(0, 2)), (slice(2, 6), slice(2, 6))],
            [None, (slice(0, 2), slice(0, 2)), (slice(0, 2), slice(2, 6))],
        ],
    ),
    "the second interval only": (
        matrix_view((8, 6), split_sizes=[3, 1], split_groups=2),
        # The first matrix has rows 0-2 and 4-6 of the tensor. The tensor is divided into two boxes: the first contains
        # the first four rows of the matrix, and the second contains the last two.
        (Box((0, 0), (5, 6)), Box((5, 0), (3, 6))),
        [[(slice(0, 4), slice(0, 6)), (slice(4, 6), slice(0, 6))]],
    ),
    "ranges that end inside a row": (
        matrix_view((6, 4)),
        (FlatRange(0, 8), FlatRange(8, 14), FlatRange(14, 24)),
        [[(slice(0, 2), slice(0, 4)), None, None]],
    ),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_the_rectangles_that_lie_on_one_rank(name: str) -> None:
    view, pieces, expected = BLOCKS[name]
    for matrix, blocks in enumerate(expected):
        for piece, block in zip(pieces, blocks, strict=True):
            local = (0, 0) if isinstance(piece, Box) else (0,)
            assert _block_of(_part_of(view, matrix, [Held(piece, local)]).places, view.matrices[matrix].cols) == block
