"""Tests of Muon's variants: their options, plans and state, and a comparison of each stage (such as NorMuon's scaling)
with its fp64 formula."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from simulated import sharded, spec
from tolerances import assert_bitwise, assert_rounded
from torch import Tensor
from variant_cases import CASES

from shardmuon.auditing.reference import Arithmetic
from shardmuon.layout.pieces import ParamLayout
from shardmuon.layout.views import matrix_view
from shardmuon.orthogonalize.choice import Choice
from shardmuon.plan.plan import Kept, Policy
from shardmuon.plan.planner import make_plan
from shardmuon.variants import VARIANTS, AfterStage, BeforeStage, Stage, WeightStage, scaled_, stages_of

SHAPES = [(6, 9), (9, 6), (7, 7), (1, 5), (5, 1), (40, 24)]
FP32 = {"method": "standard", "ns_dtype": torch.float32}
STAGES = [stage for row in VARIANTS.values() for stage in row]
AFTER = [name for name, row in VARIANTS.items() if any(isinstance(stage, AfterStage) for stage in row)]
AFTER.append("normuon+hyperball")


def run(stage: Stage, x: Tensor, kept: Tensor) -> Tensor:
    """Apply a pre- or post-processing stage (such as NorMuon) to a batch of matrices as an optimizer step does."""
    if isinstance(stage, WeightStage):
        return x * stage.factor(torch.linalg.vector_norm(x, dim=(1, 2), dtype=torch.float64), kept).view(-1, 1, 1)
    x = x.to(torch.promote_types(x.dtype, torch.float32), copy=True)
    if isinstance(stage, AfterStage):
        scaled_((stage,), x, {stage.key: kept.unbind(0)} if stage.key else {})
    else:
        stage.run_(x)
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("stage", STAGES, ids=repr)
def test_a_stage_is_its_formula(stage: Stage, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Each pre- or post-processing stage (such as NorMuon) must match its fp64 formula on three matrices in each of
    four steps. One of the matrices has rows of zeros and a nonzero initial state."""
    generator = torch.Generator().manual_seed(1)
    kept = torch.zeros(3, stage.num_kept(*shape))
    kept[1] = 1 + torch.rand(kept.shape[1], generator=generator)
    wanted = list(kept.double())
    arithmetic = Arithmetic(SimpleNamespace(stages=(stage,)), Choice("standard", torch.float64), *[torch.float64] * 6)  # type: ignore[arg-type]
    # The sums along a row and over the rows have one rounding per term. Each of the four steps rounds the state three
    # times, and there are six other roundings. The factor of 2 covers restoring the matrix norm, which takes as many
    # roundings again.
    how: dict[str, Any] = {"roundings": 2 * (sum(shape) + 3 * 4 + 6), "dtype": torch.float32 if stage.key else dtype}
    for _ in range(4):
        x = torch.randn(3, *shape, generator=generator, dtype=torch.float64).to(dtype)
        x[1, : shape[0] // 2] = 0.0
        found = run(stage, x, kept)
        for i, matrix in enumerate(x.double()):
            factor, _, numbers = arithmetic.staged(Stage, matrix, {stage.key: wanted[i]})
            wanted[i] = numbers[stage.key]
            expected = matrix * factor
            expected = expected / expected.norm() if isinstance(stage, BeforeStage) else expected
            assert_rounded(found[i], expected, **how)
            assert_rounded(kept[i], wanted[i], **how)


def test_every_variant_has_a_row_of_tests() -> None:
    assert [name for name, row in VARIANTS.items() if row and name not in CASES] == [], "tests/variant_cases.py"


@pytest.mark.parametrize("stage", [s for s in STAGES if not isinstance(s, WeightStage)], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_zeros_stay_zeros_and_nothing_is_lost_in_low_precision(stage: Stage, dtype: torch.dtype) -> None:
    found = run(stage, torch.zeros(2, 4, 3, dtype=dtype), torch.zeros(2, stage.num_kept(4, 3)))
    assert_bitwise(found, torch.zeros(2, 4, 3, dtype=torch.promote_types(dtype, torch.float32)))


# ----------------------------------------------------------------------------------------------------- whole steps


@pytest.mark.parametrize("names", [("normuon", "hyperball"), ("hyperball", "muon_eq", "normuon")], ids=str)
def test_stages_run_by_their_place_and_at_one_place_as_they_are_written(names: tuple[str, ...]) -> None:
    places = {"MuonEq": 0, "NorMuon": 1, "HyperballUpdate": 1, "HyperballWeight": 2}
    alone = [type(stage).__name__ for name in names for stage in stages_of({"variant": name})]
    found = [type(stage).__name__ for stage in stages_of({"variant": " + ".join(names)})]
    assert found == sorted(alone, key=lambda name: places[name])


def test_a_matrix_that_lies_on_one_rank_moves_where_others_keep_what_its_stages_keep() -> None:
    # The matrix has a single row, so sharding by rows leaves all of its elements on one of the two ranks.
    layout = sharded(matrix_view((1, 8)), [range(2)], 0)
    kept = (Kept(ParamLayout.replicated(layout.view.kept([8]), layout.ranks), True),)
    assert make_plan([spec("w", layout)._replace(kept=kept)], Policy()).items[0].route == "owner"
    assert make_plan([spec("w", layout)], Policy()).items[0].route == "local"


@pytest.mark.stated
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("variant", AFTER)
@pytest.mark.parametrize("shape", [(37, 19), (19, 37), (1, 130)], ids=str)
def test_a_matrix_has_the_same_bits_alone_and_among_others(
    shape: tuple[int, int], variant: str, dtype: torch.dtype
) -> None:
    """Each matrix must have the same bits whether it is processed alone or in a batch. The batch has more matrices than
    a SIMD register has elements, and includes zeros, NaN, Inf and very different norms."""
    generator, num = torch.Generator().manual_seed(0), 21
    stages = [s for s in stages_of({"variant": variant}) if isinstance(s, AfterStage)]
    scale = torch.logspace(-12, 6, num).view(-1, 1, 1)
    together = (torch.randn(num, *shape, generator=generator) * scale).to(dtype)
    together[3], together[9, 0, 0], together[17, 0, -1] = 0.0, math.nan, math.inf
    kept = {s.key: torch.rand(num, s.num_kept(*shape), generator=generator) * 1e3 for s in stages if s.key}
    for numbers in kept.values():
        numbers[5] = 0.0
    alone = [(x.clone().unsqueeze(0), {key: n[i].clone() for key, n in kept.items()}) for i, x in enumerate(together)]
    before = together.clone()
    scaled_(stages, together, {key: numbers.unbind(0) for key, numbers in kept.items()})
    for i, (x, of_one) in enumerate(alone):
        scaled_(stages, x, {key: [numbers] for key, numbers in of_one.items()})
        assert torch.equal(x[0].view(torch.uint8), together[i].view(torch.uint8)), i
        assert all(torch.equal(n.view(torch.uint8), kept[key][i].view(torch.uint8)) for key, n in of_one.items()), i
    assert not together[3].any() and together[9, 0, 0].isnan()
    # The matrices must differ from their values before post-processing. Single-row matrices are exempt, because some
    # variants leave them unchanged.
    assert shape[0] == 1 or not torch.equal(before[:3], together[:3])
