"""Variants of Muon: stages against formulas written here in fp64, options, plans, state."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from simulated import sharded, spec
from torch import Tensor, nn

from shardmuon import Muon
from shardmuon.layout.table import replicated
from shardmuon.layout.views import kept_view, matrix_view
from shardmuon.plan.items import Kept, Policy
from shardmuon.plan.plan import make_plan
from shardmuon.testing.tolerances import assert_bitwise, assert_rounded
from shardmuon.variants import AfterStage, BeforeStage, scaled_, stages_of

SHAPES = [(6, 9), (9, 6), (7, 7), (1, 5), (5, 1), (40, 24)]
FP32 = {"method": "standard", "ns_dtype": torch.float32}


def normuon_formula(o: Tensor, v: Tensor, beta2: float) -> tuple[Tensor, Tensor]:
    """NorMuon by the paper's algorithm with nanochat's choice of the dim, fp64, line by line."""
    rows, cols = o.shape
    mean = (o * o).sum(1) / cols if rows >= cols else (o * o).sum(0) / rows
    v = beta2 * v + (1 - beta2) * mean
    root = v.clamp(min=1e-10).sqrt()
    scaled = o / (root[:, None] if rows >= cols else root[None, :])
    return scaled * (o.norm() / scaled.norm()), v


def run(name: str, x: Tensor, kept: Tensor | None = None) -> Tensor:
    (stage,) = stages_of({"variant": name})
    if isinstance(stage, BeforeStage):
        x = x.clone()
        stage.run_(x)
        return x
    kept = torch.zeros(len(x), stage.num_kept(*x.shape[1:])) if kept is None else kept
    return stage.run(x.clone(), kept)  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize("shape", SHAPES)
def test_normuon_is_its_formula(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    kept, v = torch.zeros(2, max(shape)), torch.zeros(2, max(shape), dtype=torch.float64)
    for _ in range(4):
        o = torch.randn(2, *shape, generator=generator)
        found = run("normuon", o, kept)
        for i in range(2):
            expected, v[i] = normuon_formula(o[i].double(), v[i], 0.95)
            # Positive numbers: each mean is a sum of min(shape) squares, a root, a square, a division; then the
            # average's difference, product and sum in each of four steps.
            means = min(shape) + 3 + 3 * 4
            assert_rounded(kept[i], v[i], roundings=means, dtype=torch.float32, what="v")
            # Half of v's error (a root) and as much in the restored norm; the means again, and their sums of
            # max(shape) terms, under a root; six operations.
            assert_rounded(found[i], expected, roundings=2 * means + max(shape) + 6, dtype=torch.float32)


@pytest.mark.parametrize("name", ["normuon", "muon_eq"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_zeros_stay_zeros_and_nothing_is_lost_in_low_precision(name: str, dtype: torch.dtype) -> None:
    found = run(name, torch.zeros(2, 4, 3, dtype=dtype))
    wide = dtype if name == "muon_eq" else torch.promote_types(dtype, torch.float32)
    assert_bitwise(found, torch.zeros(2, 4, 3, dtype=wide))


@pytest.mark.parametrize("variant", ["normuon+hyperball", "hyperball+normuon"])
def test_stages_after_in_one_pass_are_those_one_after_the_other(variant: str) -> None:
    stages = [stage for stage in stages_of({"variant": variant}) if isinstance(stage, AfterStage)]
    found = expected = torch.randn(2, 9, 6, generator=torch.Generator().manual_seed(3))
    kept = {stage.key: torch.full((2, stage.num_kept(9, 6)), 0.5) for stage in stages}
    for stage in stages:
        expected = stage.run(expected, kept[stage.key].clone())
    found = found.clone()
    scaled_(stages, found, {key: numbers.unbind(0) for key, numbers in kept.items()})
    # sums of six squares and of nine means in each norm, halved by the root, and six operations of each stage
    assert_rounded(found, expected, roundings=2 * (6 + 9 + 6), dtype=torch.float32)


# ----------------------------------------------------------------------------------------------------- whole steps


def steps(variants: list[str | None], grads: Tensor, **options: Any) -> tuple[list[Tensor], Muon]:
    """Two matrices of one shape, each with its variant; gradients that are NaN are none."""
    start = torch.randn(2, 12, 7, generator=torch.Generator().manual_seed(0))
    params = [nn.Parameter(w.clone()) for w in start[: len(variants)]]
    groups = [{"params": [p], "variant": variant} for p, variant in zip(params, variants, strict=True)]
    optimizer = Muon(groups, lr=0.02, **FP32, **options)
    for grad in grads:
        for p, g in zip(params, grad, strict=False):
            p.grad = None if g.isnan().any() else g.clone()
        optimizer.step()
    return [p.detach() for p in params], optimizer


def test_variants_side_by_side_share_no_batch_and_each_keeps_what_it_needs() -> None:
    """Of two matrices of one shape each steps as it would alone; without a gradient it keeps what it has."""
    grads = torch.randn(3, 2, 12, 7, generator=torch.Generator().manual_seed(1))
    found, alone = list[Tensor](), dict[str | None, Tensor]()
    for variant in (None, "normuon", "muon_eq", "muon_eq+normuon"):
        (alone[variant], _), optimizer = steps([variant, None], grads)
        kept = {"second_moment"} if variant and "normuon" in variant else set()
        state = [optimizer.state[p] for g in optimizer.param_groups for p in g["params"]]
        assert [set(of_one) for of_one in state] == [{"momentum_buffer", *kept}, {"momentum_buffer"}]
        (single,), _ = steps([variant], grads)
        assert_bitwise(alone[variant], single)
        assert all(not torch.equal(alone[variant], other) for other in found)
        found.append(alone[variant])
    assert "variant: muon_eq+normuon" in repr(optimizer)
    missing = grads.clone()
    missing[2, 0] = math.nan
    before, after = (steps(["normuon", "normuon"], g)[1] for g in (grads[:2], missing))
    kept = [[o.state[p]["second_moment"] for g in o.param_groups for p in g["params"]] for o in (before, after)]
    assert torch.equal(kept[0][0], kept[1][0]) and not torch.equal(kept[0][1], kept[1][1])


@pytest.mark.parametrize("names", [("normuon", "hyperball"), ("hyperball", "muon_eq", "normuon")], ids=str)
def test_stages_run_by_their_place_and_at_one_place_as_they_are_written(names: tuple[str, ...]) -> None:
    places = {"MuonEq": 0, "NorMuon": 1, "HyperballUpdate": 1, "HyperballWeight": 2}
    alone = [type(stage).__name__ for name in names for stage in stages_of({"variant": name})]
    found = [type(stage).__name__ for stage in stages_of({"variant": " + ".join(names)})]
    assert found == sorted(alone, key=lambda name: places[name])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variant": "adamuon"}, r"variant='adamuon': 'adamuon' is not one of 'muon_eq', 'normuon', 'hyperball'"),
        ({"variant": "normuon+normuon"}, "names 'normuon' twice"),
        ({"variant": ("muon_eq", "normuon")}, r"must be None or text: .* joined by '\+'"),
        ({"variant": "hyperball+cautious", "weight_decay": 0.0}, "'hyperball' keeps .* Leave 'cautious' out"),
        ({"variant": "hyperball", "weight_decay": 0.1}, r"'hyperball' keeps the norm .* Write weight_decay=0.0"),
    ],
)
def test_what_has_no_meaning_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Muon([nn.Parameter(torch.ones(3, 3))], lr=0.02, **options)


def test_a_matrix_that_lies_on_one_rank_moves_where_others_keep_what_its_stages_keep() -> None:
    layout = sharded(matrix_view((1, 8)), [range(2)], 0)  # all of it on one rank
    kept = (Kept(replicated(kept_view(layout.view, [8]), layout.ranks), True),)
    keeping = spec("w", layout)._replace(kept=kept)
    assert make_plan([keeping], Policy()).items[0].route == "owner"
    assert make_plan([spec("w", layout)], Policy()).items[0].route == "local"


@pytest.mark.stated
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("variant", ["hyperball", "normuon", "normuon+hyperball"])
@pytest.mark.parametrize("shape", [(37, 19), (19, 37), (1, 130)], ids=str)
def test_a_matrix_has_the_same_bits_alone_and_among_others(
    shape: tuple[int, int], variant: str, dtype: torch.dtype
) -> None:
    """More of them than a vector of the CPU holds, of zeros, of what is not a number and of very unequal norms, too."""
    generator, num = torch.Generator().manual_seed(0), 21
    stages = [s for s in stages_of({"variant": variant}) if isinstance(s, AfterStage)]
    scale = torch.logspace(-12, 6, num).view(-1, 1, 1)
    together = (torch.randn(num, *shape, generator=generator) * scale).to(dtype)
    together[3], together[9, 0, 0], together[17, 0, -1] = 0.0, math.nan, math.inf
    kept = {s.key: torch.rand(num, s.num_kept(*shape), generator=generator) * 1e3 for s in stages if s.key}
    for numbers in kept.values():
        numbers[5] = 0.0  # not known yet
    alone = [(x.clone().unsqueeze(0), {key: n[i].clone() for key, n in kept.items()}) for i, x in enumerate(together)]
    before = together.clone()
    scaled_(stages, together, {key: numbers.unbind(0) for key, numbers in kept.items()})
    for i, (x, of_one) in enumerate(alone):
        scaled_(stages, x, {key: [numbers] for key, numbers in of_one.items()})
        assert torch.equal(x[0].view(torch.uint8), together[i].view(torch.uint8)), i
        assert all(torch.equal(n.view(torch.uint8), kept[key][i].view(torch.uint8)) for key, n in of_one.items()), i
    assert not together[3].any()
    assert together[9, 0, 0].isnan()
    assert not torch.equal(before[:3], together[:3])
