"""Stored momentum and random rounding: bytes, errors, no bias, and the same bits on every layout and after a resume."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from demo_script import train
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from shardmuon import Exchange, Muon, Orthogonalizer, Storage
from shardmuon.layout.mesh import Shard, readings
from shardmuon.layout.pieces import Patch
from shardmuon.layout.table import ParamLayout
from shardmuon.layout.views import matrix_view
from shardmuon.momentum.keeper import tiles_cut
from shardmuon.momentum.stores import BLOCK, NEAREST, Stream, decode, encode, round_by, round_patch, scale_shape
from shardmuon.step import update as update_module
from shardmuon.step.update import apply_, momentum_into_
from shardmuon.testing.compare import Comparison, compare_with_dense
from shardmuon.testing.layouts import LAYOUTS, ParamCase, groups_of, mesh_of, parameters
from shardmuon.testing.pool import RankPool
from shardmuon.testing.tolerances import KELLER, relative_bound, roundoff

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CPU = torch.device("cpu")

# 511 columns: cut over 2 or 4 ranks they end at multiples of 128, and the last block is not full.
BLOCKED: dict[str, ParamCase] = {
    "square": ParamCase((64, 512), "whole blocks"),
    "odd": ParamCase((33, 511), "nothing divides; the last block has 127 columns"),
    "few_rows": ParamCase((3, 511), "more ranks than rows"),
    "experts": ParamCase((4, 6, 512), "a stack", {"view": "stack"}),
    "qkv": ParamCase((24, 512), "blocks of rows that end inside shards", {"split_sizes": (8, 2, 2), "split_groups": 2}),
}
KERNEL = {
    "conv": ParamCase((10, 16, 4, 8), "512 columns in three dims"),
    "small": ParamCase((6, 4, 3, 3), "36 columns"),
}


def _stored(p: Tensor, optimizer: Muon, key: str = "momentum_buffer") -> Tensor:
    value = optimizer.state[p][key]
    return value.to_local() if isinstance(value, DTensor) else value


# ------------------------------------------------------------------------------------------------ codes and rounding


def _values(kind: str) -> Tensor:
    x = torch.randn(40, 300, generator=torch.Generator().manual_seed(0))
    return {
        "normal": x,
        "heavy tailed": x**5,
        "subnormal": x * 1e-40,
        "large": x.clamp(-3, 3) / 3 * torch.finfo(FP32).max,
    }[kind]


@pytest.mark.parametrize("kind", ["normal", "heavy tailed", "subnormal", "large"])
def test_codes_are_within_half_a_gap_of_every_value(kind: str) -> None:
    x = _values(kind)
    codes, scale = encode(x, None, None)
    found = decode(codes, scale)
    per_value = scale.repeat_interleave(BLOCK, 1)[:, : x.shape[1]].double()
    gap = (2 * torch.floor(127 * (x.double().abs() / per_value).sqrt()) + 1) / 127**2 * per_value
    smallest = 2.0**-149  # fp32 has nothing between its subnormal numbers
    assert bool(((found.double() - x.double()).abs() <= gap * 0.501 + smallest).all())
    assert codes.shape == x.shape and scale.shape == (40, 3)
    assert torch.equal(encode(found, None, None)[0], codes) or kind == "subnormal"


def test_a_block_of_zeros_stays_zero_and_a_block_with_nan_or_infinity_reads_as_nan() -> None:
    x = torch.ones(4, 384)
    x[0, :128], x[1, 130], x[2, 5] = 0.0, float("nan"), float("inf")
    codes, scale = encode(x, x.clone(), torch.zeros(x.shape, dtype=torch.int32))
    found = decode(codes, scale)
    assert torch.equal(found[0, :128], torch.zeros(128))
    assert bool(found[1, 128:256].isnan().all()) and bool(found[2, :128].isnan().all())
    rest = torch.ones(4, 384, dtype=torch.bool)
    rest[0, :128] = rest[1, 128:256] = rest[2, :128] = False
    assert torch.equal(found[rest], x[rest])


def _draws(dtype: torch.dtype) -> Tensor:
    """Values between and on those of `dtype`, both signs, around powers of two and below the normal range."""
    tiny, eps = torch.finfo(dtype).tiny, torch.finfo(dtype).eps
    base = torch.tensor([1.0, 2.0, 0.5, 2.0**-10, 1024.0, tiny, tiny / 8], dtype=torch.float64)
    steps = torch.tensor([-2.3, -1.0, -0.999, -0.5, -0.01, 0.0, 0.001, 0.25, 1.0, 1.7], dtype=torch.float64)
    x = (base[:, None] + steps * (base[:, None] * eps / 2).clamp(min=tiny * eps)).flatten().to(FP32)
    return torch.cat([x, -x])


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_random_rounding_is_unbiased_and_keeps_what_fits(dtype: torch.dtype) -> None:
    x = _draws(dtype)
    if dtype == BF16:  # subnormal bf16 share fp32's exponent; nothing else to see there
        x = x[x.abs() > 2 * torch.finfo(dtype).tiny]
    num = 40_000
    patch = Patch.rectangle(0, 0, 0, num, len(x))
    found = round_patch(Stream.of("w", "weights", 1, len(x)), patch, dtype, x.expand(num, -1)).double()
    low, high = found.amin(0), found.amax(0)
    exact = x.to(dtype).double() == x.double()
    assert torch.equal(low[exact], x[exact].double()) and torch.equal(high[exact], x[exact].double())
    assert int(exact.sum()) >= 10 and int((~exact).sum()) >= 20
    gap = (high - low)[~exact]
    assert bool((gap > 0).all())  # each falls both ways
    # neighbours: nothing of the dtype lies between
    assert torch.equal(torch.nextafter(low[~exact].to(dtype), high[~exact].to(dtype)).double(), high[~exact])
    p = (x[~exact].double() - low[~exact]) / gap
    sigma = gap * (p * (1 - p) / num).sqrt()
    assert bool(((found.mean(0)[~exact] - x[~exact].double()).abs() <= 4 * sigma + gap * 2.0**-17).all())


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_fixed_bits_round_to_nearest_and_keep_what_is_not_finite(dtype: torch.dtype) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    x = torch.cat([x, torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0])])
    found = round_by(x, torch.full(x.shape, NEAREST, dtype=torch.int32), dtype)
    kept = x.to(dtype)
    assert torch.equal(found.isnan(), kept.isnan())
    assert found.dtype == dtype
    assert torch.equal(found[~found.isnan()], kept[~kept.isnan()])


def test_random_bits_are_uniform_and_independent_of_neighbours_steps_and_names() -> None:
    cols, rows = 1000, 1000
    whole = Patch.rectangle(0, 0, 0, rows, cols)

    def draw(name: str = "w", step: int = 1, matrix: int = 0) -> Tensor:
        patch = Patch.rectangle(matrix, 0, 0, rows, cols)
        bits = Stream.of(name, "weights", step, cols).bits(patch, CPU)
        return (bits.double() + 0.5) / 2**16 - 0.5

    x = draw()
    counts = torch.histc(x, 64, -0.5, 0.5)
    expected = rows * cols / 64
    assert float(((counts - expected) ** 2 / expected).sum()) < 63 + 4 * math.sqrt(2 * 63)  # chi squared, 4 sigma
    others = [draw(step=2), draw(name="v"), draw(matrix=1), x.roll(1, 0), x.roll(1, 1), x.roll(4, 1)]
    for other in others:
        assert abs(float((x * other).mean()) * 12) < 4 / math.sqrt(rows * cols)
    part = Patch.rectangle(0, 17, 333, 50, 61)
    stream = Stream.of("w", "weights", 1, cols)
    assert torch.equal(stream.bits(part, CPU), stream.bits(whole, CPU)[17:67, 333:394])


# -------------------------------------------------------------------------------------------- what it does to momentum


@pytest.mark.parametrize(("dtype", "low", "high"), [(FP32, 0, 1e-4), (BF16, 1e-5, 0.006), ("int8", 1e-3, 0.02)])
def test_a_constant_gradient_is_reached_without_bias(dtype: Any, low: float, high: float) -> None:
    # Rounding to nearest stops 4% to 8% short in bf16: every step is then smaller than half the spacing.
    w = nn.Parameter(torch.zeros(64, 256))
    optimizer = Muon([w], lr=0.0, ns_steps=1, storage=Storage(momentum_dtype=dtype))
    w.grad = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 0, 256)
    for _ in range(200):
        optimizer.step()
    found = _stored(w, optimizer).float()
    if dtype == "int8":
        found = decode(_stored(w, optimizer), _stored(w, optimizer, "momentum_scale"))
    assert low <= float((found - w.grad).norm() / w.grad.norm()) <= high
    for columns in (slice(0, 64), slice(192, 256)):  # the smallest and the largest entries of a block
        g = w.grad[:, columns]
        # 200 steps leave 0.95^200 of the start. Random rounding of each of n elements is off by a spacing at most (2 u
        # of the largest, in int8 of the block's) and without bias; 1 / (1 - 0.95^2) steps of it stand in the sum.
        spacing = float(w.grad.abs().max()) / 127 if dtype == "int8" else 2 * roundoff(dtype) * float(g.abs().max())
        spread = spacing * math.sqrt(g.numel() / (1 - 0.95**2)) / float(g.abs().sum())
        total = float((found[:, columns] * g.sign()).sum() / g.abs().sum())
        summed = 2 * 200 * roundoff(FP32)  # a lerp of each step in fp32
        assert abs(total - 1.0) <= 0.95**200 + 4 * spread + summed  # four standard deviations


@pytest.mark.parametrize(
    ("dtype", "param_dtype", "size"),
    [(None, FP32, 4), (None, BF16, 2), (FP32, BF16, 4), (BF16, FP32, 2), ("int8", FP32, 1)],
)
def test_bytes_an_element(dtype: Any, param_dtype: torch.dtype, size: int) -> None:
    params = [nn.Parameter(torch.zeros(shape, dtype=param_dtype)) for shape in ((256, 512), (300, 1000), (64, 384))]
    optimizer = Muon(params, lr=1e-3, storage=Storage(momentum_dtype=dtype))
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    found = sum(t.untyped_storage().nbytes() for p in params for t in optimizer.state[p].values())
    elements = sum(p.numel() for p in params)
    blocks = sum(p.shape[0] * -(-p.shape[1] // BLOCK) for p in params) if dtype == "int8" else 0
    counts = len(params) if dtype in (BF16, "int8") else 0  # of steps, which random rounding needs
    assert found == size * elements + 4 * (blocks + counts)  # a scale in fp32 for each block


@pytest.mark.parametrize("dtype", [BF16, "int8"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_is_computed_in_fp32_whatever_it_is_stored_as(dtype: Any, nesterov: bool) -> None:
    grad = torch.randn(32, 256, generator=torch.Generator().manual_seed(0))
    first = []
    for stored in (FP32, dtype):
        w = nn.Parameter(torch.zeros(32, 256))
        w.grad = grad.clone()
        Muon([w], lr=1.0, storage=Storage(momentum_dtype=stored), nesterov=nesterov).step()
        first.append(w.detach())
    assert torch.equal(*first)  # the first step starts from zero, which every dtype holds exactly


# ---------------------------------------------------------------------------------------------------- layouts


def _int8(layout: str, table: dict[str, ParamCase]) -> Comparison:
    return compare_with_dense(
        layout, table=table, lr=0.02, steps=2, storage=Storage(momentum_dtype="int8"), remember=True
    )


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if not name.startswith("mcore")])  # refused, see below
def test_int8_gives_the_same_bits_on_every_layout(layout: str, world4: RankPool) -> None:
    for found in world4.run(_int8, layout, BLOCKED):
        assert found.bitwise, found.worst
        assert found.max_difference == 0.0


@pytest.mark.parametrize("dtype", [BF16, "int8"])
def test_experts_of_one_stack_may_be_in_different_buckets(dtype: Any) -> None:
    start = torch.randn(4, 6, 200, generator=torch.Generator().manual_seed(0))
    stacks, states = [], []
    for bucket_bytes, count in ((32 * 2**20, 1), (5000, 4)):
        w = nn.Parameter(start.clone())
        # 6 x 200 elements of 4 bytes on the wire: 4,800 in a bucket of 5,000
        options: dict[str, Any] = {
            "lr": 0.02,
            "storage": Storage(momentum_dtype=dtype),
            "exchange": Exchange(bucket_bytes=bucket_bytes),
            "orthogonalizer": Orthogonalizer(dtype=FP32),
        }
        optimizer = Muon([{"params": [("w", w)], "view": "stack"}], **options)
        _run(optimizer, [w], range(3))
        assert len(optimizer.plan.buckets) == count
        stacks.append(w.detach())
        states.append(optimizer.state[w])
    assert torch.equal(*stacks)
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())


@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "fsdp2 dim 1", "hsdp"])
def test_int8_takes_convolution_kernels(layout: str, world4: RankPool) -> None:
    table = KERNEL if layout != "fsdp2 dim 1" else {"conv": KERNEL["conv"]}
    assert all(found.bitwise for found in world4.run(_int8, layout, table))


def _rounded(layout: str) -> Comparison:
    options: dict[str, Any] = {"storage": Storage(momentum_dtype=BF16, stochastic_rounding=True)}
    return compare_with_dense(layout, dtype=BF16, lr=0.02, steps=2, remember=True, **options)


@pytest.mark.parametrize("layout", list(LAYOUTS)[1::3])  # in exact arithmetic on the others, too: test_golden.py
def test_random_rounding_gives_the_same_bits_on_layouts_of_every_kind(layout: str, world4: RankPool) -> None:
    assert all(found.bitwise for found in world4.run(_rounded, layout))


def _refusal(layout: str, shape: tuple[int, ...]) -> str:
    mesh = LAYOUTS[layout].mesh(dist.get_world_size())
    params = parameters(LAYOUTS[layout].build({"a.w": torch.zeros(shape)}, mesh))
    optimizer = Muon(groups_of(params, {"a.w": ParamCase(shape, "")}), lr=1e-3, storage=Storage(momentum_dtype="int8"))
    with pytest.raises(ValueError, match=r"a\.w: momentum_dtype='int8'") as caught:
        optimizer.prepare()
    return str(caught.value)


@pytest.mark.parametrize(
    ("layout", "shape", "found"),
    [
        ("fsdp2 dim 1", (8, 300), "indices 0 to 150 of 300 along dim 1"),
        ("two dims", (8, 4, 8, 16), "indices 0 to 4 of 4 along dim 1"),
        ("mcore buffers", (8, 300), "elements 0 to 1216, a run that may begin anywhere in a row"),
    ],
)
def test_a_cut_block_is_refused_when_the_plan_is_made(layout: str, shape: Any, found: str, world2: RankPool) -> None:
    for text in world2.run(_refusal, layout, shape):
        assert text.startswith("a.w: momentum_dtype='int8'")
        assert found in text
        assert "momentum_dtype=torch.bfloat16" in text and "Shard(0)" in text


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_scales_are_cut_where_torch_would_cut_a_tensor_of_their_shape(num_ranks: int) -> None:
    # so that torch.distributed.checkpoint finds them where it expects them
    accepted = 0
    for cols in (c for c in range(1, 2100) if c % BLOCK in (0, 1, 64, 120, 121, 124, 125, 126, 127)):
        shape = (4, cols)
        held, stored = zip(*readings(shape, (num_ranks,), (Shard(1),))[0], strict=True)
        if not list(tiles_cut(ParamLayout(matrix_view(shape), tuple(range(num_ranks)), held))):
            accepted += 1
            expected = [of_rank for _, of_rank in readings(scale_shape(shape, 1), (num_ranks,), (Shard(1),))[0]]
            assert [scale_shape(of_rank, 1) for of_rank in stored] == expected
    assert accepted >= num_ranks


# ------------------------------------------------------------------------------------------------- checkpoints


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.a = nn.Parameter(torch.randn(33, 300, generator=generator).to(BF16))
        self.b = nn.Parameter(torch.randn(128, 64, generator=generator).to(BF16))


def _resume(folder: str, dtype: Any, saves: bool) -> tuple[dict[str, Tensor], list[str]]:
    """Three steps, a checkpoint, two steps; or the checkpoint and the two steps. Returns whole weights and momentum."""
    module = _Two()
    mesh = mesh_of((dist.get_world_size(),))
    fully_shard(module, mesh=mesh)
    storage = Storage(momentum_dtype=dtype, stochastic_rounding=True)
    optimizer = Muon(list(module.named_parameters()), lr=0.02, storage=storage)

    def step(number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for p in module.parameters():
            assert isinstance(p, DTensor)
            grad = torch.randn(p.shape, generator=generator).to(BF16)
            p.grad = distribute_tensor(grad, mesh, p.placements, src_data_rank=None)
        optimizer.step()

    if saves:
        for number in range(3):
            step(number)
    model = dict(module.named_parameters())
    state = {"optimizer": get_optimizer_state_dict(module, optimizer), "model": model}
    if saves:
        dcp.save(state, checkpoint_id=folder)
    else:
        dcp.load(state, checkpoint_id=folder)
        set_optimizer_state_dict(module, optimizer, state["optimizer"])
    for number in (3, 4):
        step(number)
    whole = {}
    for name, p in module.named_parameters():
        assert isinstance(p, DTensor)
        whole[name] = p.full_tensor().detach()
        for key, value in optimizer.state[p].items():
            whole[f"{name} {key}"] = value.full_tensor() if isinstance(value, DTensor) else value
    kinds = sorted({str(value.dtype) for key, value in whole.items() if "momentum_buffer" in key})
    return whole, kinds


@pytest.mark.parametrize("dtype", [FP32, BF16, "int8"])
def test_a_run_goes_on_with_the_same_bits_on_another_world_size(
    dtype: Any, world4: RankPool, world2: RankPool, tmp_path: Path
) -> None:
    expected, kinds = world4.run(_resume, str(tmp_path), dtype, True)[0]
    assert kinds == ["torch.int8" if dtype == "int8" else str(dtype)]
    found, _ = world2.run(_resume, str(tmp_path), dtype, False)[0]
    assert set(found) == set(expected) and ("a momentum_scale" in expected) == (dtype == "int8")
    for key in expected:
        assert torch.equal(found[key], expected[key]), key


def _run(optimizer: Muon, params: list[nn.Parameter], numbers: range) -> None:
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


@pytest.mark.parametrize("dtype", [FP32, BF16, "int8"])
def test_load_state_dict_keeps_every_bit_of_a_low_precision_parameters_momentum(dtype: Any) -> None:
    # torch casts loaded state to the parameter's dtype: fp32 momentum, or a scale, would lose 16 bits
    start = torch.randn(20, 300, generator=torch.Generator().manual_seed(9)).to(BF16)
    first, second = [nn.Parameter(start.clone())], [nn.Parameter(start.clone())]
    options: dict[str, Any] = {"storage": Storage(momentum_dtype=dtype, stochastic_rounding=True), "lr": 0.02}
    one, two = Muon(first, **options), Muon(second, **options)
    _run(one, first, range(3))
    saved = {"state": {0: {k: v.clone() for k, v in one.state[first[0]].items()}}}
    saved["param_groups"] = one.state_dict()["param_groups"]
    second[0].data.copy_(first[0].data)
    two.load_state_dict(saved)
    _run(one, first, range(3, 5))
    _run(two, second, range(3, 5))
    assert torch.equal(first[0], second[0])
    for key, value in one.state[first[0]].items():
        assert torch.equal(value, two.state[second[0]][key]), key


@pytest.mark.parametrize("saved", [FP32, BF16, "int8"])
@pytest.mark.parametrize("wanted", [None, FP32, BF16, "int8"])
def test_momentum_saved_in_one_dtype_is_taken_over_in_another(saved: Any, wanted: Any) -> None:
    params = [nn.Parameter(torch.zeros(20, 300))]
    one = Muon(params, lr=0.0, storage=Storage(momentum_dtype=saved))
    _run(one, params, range(4))
    state = one.state[params[0]]
    before = state["momentum_buffer"].float()
    if saved == "int8":
        before = decode(state["momentum_buffer"], state["momentum_scale"])
    before = before.clone()
    other = [nn.Parameter(torch.zeros(20, 300))]
    two = Muon(
        other, lr=0.0, momentum=1.0, storage=Storage(momentum_dtype=wanted)
    )  # momentum=1: a step leaves it as it is
    two.load_state_dict(one.state_dict())
    two.param_groups[0]["momentum"] = 1.0
    _run(two, other, range(1))
    state = two.state[other[0]]
    dtype = FP32 if wanted is None else wanted  # None: torch's rule, the parameter's dtype
    assert state["momentum_buffer"].dtype == (torch.int8 if dtype == "int8" else dtype)
    found = state["momentum_buffer"].float()
    if wanted == "int8":
        found = decode(state["momentum_buffer"], state["momentum_scale"])
    allowed = {None: 0.0, FP32: 0.0, BF16: 2.0**-8, "int8": 0.03}[wanted]
    assert float((found - before).norm() / before.norm()) <= allowed
    assert ("momentum_scale" in state) == (dtype == "int8")


def test_codes_without_their_scale_are_an_error_that_changes_nothing() -> None:
    params = [nn.Parameter(torch.ones(8, 128))]
    optimizer = Muon([("w", params[0])], lr=1e-3, storage=Storage(momentum_dtype="int8"))
    _run(optimizer, params, range(1))
    del optimizer.state[params[0]]["momentum_scale"]
    before = params[0].detach().clone()
    with pytest.raises(
        ValueError, match=r"w: its momentum_buffer is of dtype torch.int8 and its momentum_scale is mis"
    ):
        _run(optimizer, params, range(1))
    assert torch.equal(params[0], before)
    optimizer.state[params[0]]["momentum_scale"] = torch.zeros(8, 2)
    with pytest.raises(ValueError, match=r"w: its momentum_scale stores shape \(8, 2\) here, \(8, 1\) was expected"):
        _run(optimizer, params, range(1))


# ----------------------------------------------------------------------------------- weights in half precision


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_small_updates_of_half_precision_weights_are_kept_on_average(dtype: torch.dtype) -> None:
    moved = {}
    for rounding in (True, False):
        w = nn.Parameter(torch.ones(64, 96, dtype=dtype))
        optimizer = Muon(
            [w], lr=0.01, weight_decay=0.0, storage=Storage(stochastic_rounding=rounding, momentum_dtype=FP32)
        )
        exact = nn.Parameter(torch.ones(64, 96))
        twin = Muon([exact], lr=0.01, weight_decay=0.0)
        for _ in range(100):
            w.grad = torch.ones_like(w)
            exact.grad = torch.ones_like(exact)
            optimizer.step()
            twin.step()
        moved[rounding] = float((w.detach().double() - 1).mean()), float((exact.detach().double() - 1).mean())
    assert moved[False][0] == 0.0  # each update is below half the spacing: all are lost
    # 100 steps of 6144 elements, each off by up to a spacing at 1 without bias: four standard deviations of the mean.
    # The elements of this update are equal, so products in half precision are off by their bound relative to it.
    spread = torch.finfo(dtype).eps * math.sqrt(100 / (64 * 96))
    products = max(roundoff(dtype), relative_bound(KELLER, BF16, torch.ones(64, 96)))
    assert abs(moved[True][0] - moved[True][1]) <= 4 * spread + 2 * products * abs(moved[True][1])


def _unnamed() -> str:
    """Replicas that one rank lists at another place would be rounded by other bits."""
    shared = LAYOUTS["replicate"].build({"w": torch.ones(6, 8, dtype=BF16)}, (dist.get_world_size(),))["w"]
    own = nn.Parameter(torch.ones(4, 4, dtype=BF16))
    groups = [{"params": [own], "rank_local": True}, {"params": [nn.Parameter(shared)]}]
    optimizer = Muon(groups[dist.get_rank() :], lr=1e-3, storage=Storage(stochastic_rounding=True))
    with pytest.raises(ValueError, match="share parameters but") as caught:
        optimizer.prepare()
    return str(caught.value)


def test_ranks_that_would_round_replicas_differently_are_told(world2: RankPool) -> None:
    for text in world2.run(_unnamed):
        assert "different names" in text or "describe them differently" in text


def _other_count() -> tuple[str, bool]:
    """One rank has lost its state: it would round its replicas by the bits of step 1, the others by those of step 3."""
    world = (dist.get_world_size(),)
    start = torch.ones(6, 8, dtype=BF16)
    w = nn.Parameter(LAYOUTS["replicate"].build({"w": start}, world)["w"])
    optimizer = Muon([("w", w)], lr=1e-3, storage=Storage(stochastic_rounding=True))
    for _ in range(2):
        w.grad = LAYOUTS["replicate"].build({"w": start}, world)["w"]
        optimizer.step()
    if dist.get_rank() == 1:
        optimizer.state.clear()
    assert isinstance(w, DTensor)
    before = w.to_local().detach().clone()
    with pytest.raises(ValueError, match="about to step with different options") as caught:
        optimizer.step()
    return str(caught.value), torch.equal(before, w.to_local())


def test_replicas_that_have_counted_different_steps_are_refused(world2: RankPool) -> None:
    for text, unchanged in world2.run(_other_count):
        assert "step=2" in text and "step=0" in text and unchanged


# ------------------------------------------------------------------------------------------------- training


@pytest.fixture(scope="module")
def text() -> Any:
    return train.read_text()[0]


def _train(text: Any, seed: int, dtype: Any, steps: int) -> float:
    """Mean loss of the last ten steps of a tiny language model."""
    config = train.Config(dim=64, layers=1, hidden=128, seq_len=64, batch=4, steps=steps, warmup=10, seed=seed)
    model = train.Model(config)
    optimizer = Muon(model, lr=config.lr, adjust_lr_fn="match_rms_adamw", storage=Storage(momentum_dtype=dtype))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: train.lr_factor(step, config))
    losses = []
    for step in range(steps):
        loss = train.loss_of(model, train.train_rows(text, config, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(float(loss.detach()))
    return sum(losses[-10:]) / 10


def test_momentum_dtypes_train_alike(text: Any) -> None:
    loss, other_seed = (_train(text, seed, FP32, 60) for seed in (0, 1))
    assert max(loss, other_seed) < 3.2  # from 5.5: it does learn
    for other in (BF16, "int8"):  # as near as another seed, or as a hundredth of what was learned
        assert abs(_train(text, 0, other, 60) - loss) < max(abs(loss - other_seed), (5.5 - loss) / 100)


# -------------------------------------------------------------------------------------------------------- slabs

SLABBED = [(17, 40, 3), (1, 23, 31), (700,)]  # the first dim divides nothing, is 1, is all there is


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("mode", ["decoupled", "l2", "independent", "cautious"])
def test_a_large_tile_has_the_same_bits_in_slabs(
    mode: Any, dtype: torch.dtype, wire: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Momentum and weights of a tile that is cut into slabs of 64 elements, and of one that is not; gradients and
    weights also lie otherwise than row by row."""
    generator = torch.Generator().manual_seed(0)
    for shape in SLABBED:
        order = tuple(reversed(range(len(shape))))
        found: list[list[torch.Tensor]] = []
        made = [torch.randn(shape, generator=generator).to(kind) for kind in (dtype, dtype, dtype, wire)]
        for portion in (1 << 17, 64):
            monkeypatch.setattr(update_module, "PORTION", portion)
            weight, grad, momentum, result = (x.permute(order).contiguous().permute(order).clone() for x in made)
            out = torch.empty(shape, dtype=wire)
            momentum_into_([out], [grad], [momentum], momentum=0.9, nesterov=True)
            apply_([weight], [result], [0.3], 0.1, 0.01, mode)
            found.append([out, momentum, weight])
        for whole, cut in zip(*found, strict=True):
            assert torch.equal(whole, cut)
        assert len(list(update_module.in_cache([made[0]], [made[3]]))) > 1, "it was cut"


def test_what_moves_nowhere_on_a_cpu_is_in_buckets_of_4_mib_or_what_was_asked_for() -> None:
    params = [torch.nn.Parameter(torch.ones(512, 512)) for _ in range(9)] + [torch.nn.Parameter(torch.ones(1024, 2048))]
    products = Orthogonalizer(method="standard", dtype=torch.float32)
    for bound, sizes in ((None, [3, 3, 3, 8]), (2**20, [1] * 9 + [8])):
        plan = Muon(params, lr=0.1, orthogonalizer=products, exchange=Exchange(bucket_bytes=bound)).prepare()
        held = [sum(plan.items[n].rows * plan.items[n].cols * 4 for n in b.items) / 2**20 for b in plan.buckets]
        assert sorted(held) == sorted(sizes)
