"""Tests of stored momentum and stochastic rounding: memory, rounding errors, absence of bias, and bitwise identical
results on every layout and after resuming."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from simulated import CPU, quick_plans
from tolerances import assert_rounded, roundoff
from torch import Tensor, nn

from shardmuon import Muon
from shardmuon.errors import Refused
from shardmuon.layout.mesh import OnMesh, Shard
from shardmuon.layout.pieces import ParamLayout, Patch
from shardmuon.layout.views import matrix_view
from shardmuon.momentum.keeper import check_blocks
from shardmuon.momentum.stores import _NEAREST, BLOCK, Stream, _round_by, decode, encode, scale_shape
from shardmuon.testing.compare import Comparison
from shardmuon.testing.layouts import LAYOUTS, PARAMS, ParamCase, parameters
from shardmuon.testing.pool import RankPool

BF16, FP32 = torch.bfloat16, torch.float32

# On 2 or 4 ranks, layouts shard 511 columns at multiples of 128, so the last quantization block is incomplete.
BLOCKED: dict[str, ParamCase] = {
    "square": ParamCase((64, 512), "whole blocks"),
    "odd": ParamCase((33, 511), "nothing divides; the last block has 127 columns"),
    "few_rows": ParamCase((3, 511), "more ranks than rows"),
    "experts": ParamCase((4, 6, 512), "a stack", {"view": "stack"}),
    "qkv": ParamCase((24, 512), "blocks of rows that end inside shards", {"split_sizes": (8, 2, 2), "split_groups": 2}),
}
KERNEL = {"conv": ParamCase((10, 16, 4, 8), "512 columns in three dims")}


# ------------------------------------------------------------------------------------------------ codes and rounding


X = torch.randn(40, 300, generator=torch.Generator().manual_seed(0))
VALUES = {
    "normal": X,
    "heavy tailed": X**5,
    "subnormal": X * 1e-40,
    "large": X.clamp(-3, 3) / 3 * torch.finfo(FP32).max,
}


@pytest.mark.parametrize("kind", VALUES)
def test_codes_are_within_half_a_gap_of_every_value(kind: str) -> None:
    x = VALUES[kind]
    codes, scale = encode(x, 1)
    found = decode(codes, scale)
    per_value = scale.repeat_interleave(BLOCK, 1)[:, : x.shape[1]].double()
    gap = (2 * torch.floor(127 * (x.double().abs() / per_value).sqrt()) + 1) / 127**2 * per_value
    # Near zero, adjacent fp32 numbers differ by the smallest subnormal number. A decoded value may be off by this much.
    smallest = 2.0**-149
    assert bool(((found.double() - x.double()).abs() <= gap * 0.501 + smallest).all())
    assert codes.shape == x.shape and scale.shape == (40, 3)
    by_bits = [torch.full(x.shape, bits, dtype=torch.int32) for bits in (0, 0xFFFF)]
    # `encode` stochastically rounds values that hardly differ from the old momentum, so the random bits must affect the
    # result.
    assert not torch.equal(*(encode(x, 1, x, bits)[0] for bits in by_bits))
    assert all(torch.equal(encode(x, 1, x - per_value.float(), bits)[0], codes) for bits in by_bits)
    assert torch.equal(encode(found, 1)[0], codes) or kind == "subnormal"


def test_a_block_of_zeros_stays_zero_and_a_block_with_nan_or_infinity_reads_as_nan() -> None:
    x = torch.ones(4, 384)
    x[0, :128], x[1, 130], x[2, 5] = 0.0, float("nan"), float("inf")
    codes, scale = encode(x, 1, x.clone(), torch.zeros(x.shape, dtype=torch.int32))
    x[1, 128:256] = x[2, :128] = math.nan
    assert_rounded(decode(codes, scale), x, roundings=0)


def test_random_rounding_is_unbiased_and_keeps_what_fits() -> None:
    """Stochastic rounding must be unbiased and must not change values that bf16 represents exactly. The test values lie
    on and between adjacent bf16 numbers, have both signs, and include values near powers of two."""
    base = torch.tensor([1.0, 2.0, 0.5, 2.0**-10, 1024.0], dtype=torch.float64)
    steps = torch.tensor([-2.3, -1.0, -0.999, -0.5, -0.01, 0.0, 0.001, 0.25, 1.0, 1.7], dtype=torch.float64)
    x = (base[:, None] * (1 + steps * torch.finfo(BF16).eps / 2)).flatten().to(FP32)
    x, num = torch.cat([x, -x]), 40_000
    patch = Patch.rectangle(0, 0, 0, num, len(x))
    found = Stream.of("w", "weights", 1, len(x)).round(patch, x.expand(num, -1)).double()
    low, high = found.amin(0), found.amax(0)
    exact = x.to(BF16).double() == x.double()
    assert torch.equal(low[exact], x[exact].double()) and torch.equal(high[exact], x[exact].double())
    assert int(exact.sum()) >= 10 and int((~exact).sum()) >= 20
    gap = (high - low)[~exact]
    # Over many repetitions, stochastic rounding must round each value sometimes down and sometimes up.
    assert bool((gap > 0).all())
    # The two values to which a number is rounded must be adjacent bf16 numbers.
    assert torch.equal(torch.nextafter(low[~exact].to(BF16), high[~exact].to(BF16)).double(), high[~exact])
    p = (x[~exact].double() - low[~exact]) / gap
    sigma = gap * (p * (1 - p) / num).sqrt()
    assert bool(((found.mean(0)[~exact] - x[~exact].double()).abs() <= 4 * sigma + gap * 2.0**-17).all())


def test_fixed_bits_round_to_nearest_and_keep_what_is_not_finite() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    x = torch.cat([x, torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0])])
    found = _round_by(x, torch.full(x.shape, _NEAREST, dtype=torch.int32))
    assert found.dtype == BF16
    assert_rounded(found, x.to(BF16), roundings=0)


def test_random_bits_are_uniform_and_independent_of_neighbours_steps_and_names() -> None:
    cols, rows = 1000, 1000
    whole = Patch.rectangle(0, 0, 0, rows, cols)

    def draw(name: str = "w", step: int = 1, matrix: int = 0) -> Tensor:
        patch = Patch.rectangle(matrix, 0, 0, rows, cols)
        return (Stream.of(name, "weights", step, cols).bits(patch, CPU).double() + 0.5) / 2**16 - 0.5

    x = draw()
    counts = torch.histc(x, 64, -0.5, 0.5)
    expected = rows * cols / 64
    # The statistic follows a chi-squared distribution with 63 degrees of freedom. The limit is the mean of this
    # distribution plus 4 standard deviations.
    assert float(((counts - expected) ** 2 / expected).sum()) < 63 + 4 * math.sqrt(2 * 63)
    others = [draw(step=2), draw(name="v"), draw(matrix=1), x.roll(1, 0), x.roll(1, 1), x.roll(4, 1)]
    assert max(abs(float((x * other).mean()) * 12) for other in others) < 4 / math.sqrt(rows * cols)
    part = Patch.rectangle(0, 17, 333, 50, 61)
    stream = Stream.of("w", "weights", 1, cols)
    assert torch.equal(stream.bits(part, CPU), stream.bits(whole, CPU)[17:67, 333:394])


# -------------------------------------------------------------------------------------------- what it does to momentum


@pytest.mark.parametrize(("dtype", "low", "high"), [(BF16, 1e-5, 0.006), ("int8", 1e-3, 0.02)])
def test_a_constant_gradient_is_reached_without_bias(dtype: Any, low: float, high: float) -> None:
    # With rounding to nearest, bf16 momentum would stop changing 4% to 8% short of the gradient, because each change
    # would be smaller than half the spacing of bf16 numbers.
    w = nn.Parameter(torch.zeros(64, 256))
    optimizer = Muon([w], lr=0.0, ns_steps=1, momentum_dtype=dtype)
    w.grad = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 0, 256)
    for _ in range(200):
        optimizer.step()
    stored = optimizer.state[w]["momentum_buffer"]
    found = decode(stored, optimizer.state[w]["momentum_scale"]) if dtype == "int8" else stored.float()
    assert low <= float((found - w.grad).norm() / w.grad.norm()) <= high
    for columns in (slice(0, 64), slice(192, 256)):
        g = w.grad[:, columns]
        # After 200 steps, 0.95^200 of the initial momentum remains. Stochastic rounding is unbiased, and the standard
        # deviation of its error is at most half the gap between adjacent stored values. The gap is at most 2 u times
        # the largest value in bf16 (u is the unit roundoff), and 2/127 of the largest value in int8. So `spacing` is at
        # least the standard deviation. An error shrinks by a factor of 0.95 in every step, so the variance of an
        # element's total error is at most spacing^2 / (1 - 0.95^2).
        spacing = float(w.grad.abs().max()) / 127 if dtype == "int8" else 2 * roundoff(dtype) * float(g.abs().max())
        spread = spacing * math.sqrt(g.numel() / (1 - 0.95**2)) / float(g.abs().sum())
        total = float((found[:, columns] * g.sign()).sum() / g.abs().sum())
        # Each of the 200 steps updates the momentum with one lerp, which is rounded to fp32.
        summed = 2 * 200 * roundoff(FP32)
        assert abs(total - 1.0) <= 0.95**200 + 4 * spread + summed


@pytest.mark.parametrize(
    ("dtype", "param_dtype", "size"),
    [(None, FP32, 4), (None, BF16, 2), (FP32, BF16, 4), (BF16, FP32, 2), ("int8", FP32, 1)],
)
def test_bytes_an_element(dtype: Any, param_dtype: torch.dtype, size: int) -> None:
    params = [nn.Parameter(torch.zeros(shape, dtype=param_dtype)) for shape in ((256, 512), (300, 1000), (64, 384))]
    optimizer = Muon(params, lr=1e-3, momentum_dtype=dtype)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    found = sum(t.untyped_storage().nbytes() for p in params for t in optimizer.state[p].values())
    elements = sum(p.numel() for p in params)
    blocks = sum(p.shape[0] * -(-p.shape[1] // BLOCK) for p in params) if dtype == "int8" else 0
    # Stochastic rounding needs a step count (4 bytes) per parameter.
    counts = len(params) if dtype in (BF16, "int8") else 0
    assert found == size * elements + 4 * (blocks + counts)  # Each quantization block has one fp32 scale.


# ---------------------------------------------------------------------------------------------------- layouts


INT8, ROUNDED = ({"momentum_dtype": dtype, "stochastic_rounding": True} for dtype in ("int8", BF16))
# Megatron-core layouts would split quantization blocks, so int8 momentum raises an error with these layouts.
CUT_ANYWHERE = [name for name in LAYOUTS if name.startswith("mcore")]
STORED = [
    *((name, "blocked", INT8) for name in LAYOUTS if name not in CUT_ANYWHERE),
    *((name, "conv", INT8) for name in ("hsdp", "fsdp2 dim 1")),
    *((name, "plain", ROUNDED) for name in ("fsdp2 dim 1", *CUT_ANYWHERE)),
]


@quick_plans()
def _compared(layout: str, table: str, storage: dict[str, Any]) -> tuple[bool, float, str]:
    cases = {"blocked": BLOCKED, "conv": KERNEL, "plain": PARAMS}[table]
    found = Comparison.with_dense(layout, table=cases, dtype=BF16, lr=0.02, steps=2, **storage)
    return found.bitwise, found.max_difference, found.worst


@pytest.mark.parametrize(("layout", "table", "storage"), STORED, ids=str)
def test_codes_and_random_rounding_give_the_same_bits_on_every_layout(
    layout: str, table: str, storage: dict[str, Any], world4: RankPool
) -> None:
    assert world4.run(_compared, layout, table, storage) == [(True, 0.0, "")] * 4


def _refusal(layout: str, shape: tuple[int, ...]) -> str:
    mesh = LAYOUTS[layout].mesh(dist.get_world_size())
    params = parameters(LAYOUTS[layout].build({"a.w": torch.zeros(shape)}, mesh))
    optimizer = Muon([*params.items()], lr=1e-3, momentum_dtype="int8")
    with pytest.raises(ValueError, match=r"^a\.w: momentum_dtype='int8'") as caught:
        optimizer.prepare()
    return str(caught.value)


@pytest.mark.parametrize(
    ("layout", "shape", "found"),
    [
        ("fsdp2 dim 1", (8, 300), "indices 0 to 150 of 300 along dim 1"),
        ("two dims", (8, 4, 8, 16), "indices 0 to 4 of 4 along dim 1"),
        ("mcore buffers", (8, 300), "elements 0 to 1201, a run that may begin anywhere in a row"),
    ],
)
def test_a_cut_block_is_refused_when_the_plan_is_made(layout: str, shape: Any, found: str, world2: RankPool) -> None:
    for text in world2.run(_refusal, layout, shape):
        assert all(part in text for part in (found, "momentum_dtype=torch.bfloat16", "Shard(0)"))


@pytest.mark.parametrize(
    "split", [{"split_sizes": (100, 412)}, {"split_sizes": (128, 128), "split_groups": 2}], ids=str
)
def test_matrices_of_columns_are_refused(split: dict[str, Any]) -> None:
    group = {"params": [("w", nn.Parameter(torch.zeros(8, 512)))], "transposed": True, **split}
    with pytest.raises(ValueError, match=r"^w: momentum_dtype='int8'.*transposed=True"):
        Muon([group], lr=1e-3, momentum_dtype="int8").prepare()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_scales_are_cut_where_torch_would_cut_a_tensor_of_their_shape(num_ranks: int) -> None:
    # torch.distributed.checkpoint expects the scales of int8 momentum to be sharded like any other tensor of the same
    # shape.
    accepted, place = 0, OnMesh((num_ranks,), tuple(range(num_ranks)), (Shard(1),))
    for cols in (c for c in range(1, 2100) if c % BLOCK in (0, 1, 64, 120, 121, 124, 125, 126, 127)):
        shape = (4, cols)
        held, stored = zip(*place.reading(shape).values(), strict=True)
        with suppress(Refused):
            check_blocks("w", ParamLayout(matrix_view(shape), tuple(range(num_ranks)), held))
            accepted += 1
            expected = [of_rank for _, of_rank in place.reading(scale_shape(shape, 1)).values()]
            assert [scale_shape(of_rank, 1) for of_rank in stored] == expected
    assert accepted >= num_ranks


def test_codes_without_their_scale_are_an_error_that_changes_nothing() -> None:
    w = nn.Parameter(torch.ones(8, 128))
    optimizer = Muon([("w", w)], lr=1e-3, momentum_dtype="int8")
    w.grad = torch.ones_like(w)
    optimizer.step()
    before = w.detach().clone()
    for scales, said in (
        ({}, "w: its momentum_buffer is of dtype torch.int8 and its momentum_scale is mis"),
        (
            {"momentum_scale": torch.zeros(8, 2)},
            r"momentum_scale stores shape \(8, 2\) here, \(8, 1\) was expected",
        ),
    ):
        optimizer.state[w] = {"momentum_buffer": optimizer.state[w]["momentum_buffer"], **scales}
        with pytest.raises(ValueError, match=said):
            optimizer.step()
        assert torch.equal(w, before)


# ----------------------------------------------------------------------------------- weights in half precision


def _unnamed() -> str:
    """Check that every rank raises an error if rank 1 lists a replicated parameter at a different position than rank 0,
    and return the error message. Without the error, the replicas would be rounded with different random bits."""
    shared = LAYOUTS["replicate"].build({"w": torch.ones(6, 8, dtype=BF16)}, (dist.get_world_size(),))["w"]
    own = nn.Parameter(torch.ones(4, 4, dtype=BF16))
    groups = [{"params": [own], "process_group": (), "tp_group": ()}, {"params": [nn.Parameter(shared)]}]
    optimizer = Muon(groups[dist.get_rank() :], lr=1e-3, stochastic_rounding=True)
    with pytest.raises(
        ValueError, match=r"share parameters but (.*different names|.*describe them differently)"
    ) as said:
        optimizer.prepare()
    return str(said.value)


def _other_count() -> str:
    """Check that every rank raises an error if rank 1 has lost its optimizer state after two steps, and return the
    error message. Without the error, rank 1 would round its replica with the random bits of step 1, and the other ranks
    with those of step 3."""
    whole = {"w": torch.ones(6, 8, dtype=BF16)}
    w, grad = (LAYOUTS["replicate"].build(whole, (dist.get_world_size(),))["w"] for _ in range(2))
    w = nn.Parameter(w)
    optimizer = Muon([("w", w)], lr=1e-3, stochastic_rounding=True)
    w.grad = grad
    optimizer.step()
    optimizer.step()
    if dist.get_rank() == 1:
        optimizer.state.clear()
    before = w.to_local().detach().clone()  # type: ignore[operator]
    with pytest.raises(ValueError, match=r"about to step with different options.*step=") as said:
        optimizer.step()
    assert torch.equal(before, w.to_local())  # type: ignore[operator]
    return str(said.value)


def test_ranks_that_would_round_replicas_differently_are_told(world2: RankPool) -> None:
    world2.run(_unnamed)
    assert all("step=2" in text and "step=0" in text for text in world2.run(_other_count))


def test_what_moves_nowhere_on_a_cpu_is_in_buckets_of_4_mib_or_what_was_asked_for() -> None:
    params = [torch.nn.Parameter(torch.ones(512, 512)) for _ in range(9)] + [torch.nn.Parameter(torch.ones(1024, 2048))]
    products: dict[str, Any] = {"method": "standard", "ns_dtype": torch.float32}
    for bound, sizes in ((None, [1, 4, 4, 8]), (2**20, [1] * 9 + [8])):
        plan = Muon(params, lr=0.1, **products, bucket_bytes=bound).prepare()
        held = [sum(plan.items[n].rows * plan.items[n].cols * 4 for n in b.items) / 2**20 for b in plan.buckets]
        assert sorted(held) == sorted(sizes)
