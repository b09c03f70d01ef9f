"""One norm over every parameter and every rank: the dense one's bits, the same on each rank, or an error on each."""

from __future__ import annotations

import gc
import itertools
import math
import random
import sys
import weakref
from collections import Counter
from functools import lru_cache
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardmuon import Muon, clip_grad_norm_, param_groups
from shardmuon.gradients.clip import _BOUND
from shardmuon.gradients.norms import combine
from shardmuon.testing import RankPool, get_pool
from shardmuon.testing.layouts import LAYOUTS, PARAMS, groups_of, mesh_of, parameters
from shardmuon.testing.tolerances import assert_rounded

ORDERS = (2.0, 1.0, 3.0, 0.5, math.inf)


def _normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _local(tensor: Tensor) -> Tensor:
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _bits(tensor: Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()


# --------------------------------------------------------------------------------------------------- every layout

VECTORS = {"bias": (33,), "short": (2,), "scalar": (1,)}  # AdamW's; shorter than the ranks, too


def _model(dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    shapes = {name: case.shape for name, case in PARAMS.items()} | VECTORS
    return {name: _normal(*shape, seed=seed + i).to(dtype) for i, (name, shape) in enumerate(shapes.items())}


def _build(layout: str, full: dict[str, Tensor]) -> dict[str, Tensor]:
    case, world = LAYOUTS[layout], dist.get_world_size()
    rest = LAYOUTS[layout if layout in ("single", "ddp", "replicate") else "fsdp2"]
    matrices = case.build({n: t for n, t in full.items() if n not in VECTORS}, case.mesh(world))
    return matrices | rest.build({n: t for n, t in full.items() if n in VECTORS}, (world,))


def _optimizer(params: dict[str, nn.Parameter], **options: Any) -> Muon:
    matrices = {n: p for n, p in params.items() if n in PARAMS}
    vectors = [(n, p) for n, p in params.items() if n in VECTORS]
    groups = [*groups_of(matrices, PARAMS), {"params": vectors, "use_muon": False}]
    return Muon(groups, lr=0.02, **options)


class _Clipped(NamedTuple):
    """Gradients, their norm, and what clipping makes of them."""

    full: dict[str, Tensor]
    norm: Tensor
    clipped: dict[str, Tensor]


@lru_cache
def _clipped_by_one(dtype: torch.dtype, orders: tuple[float, ...]) -> list[_Clipped]:
    """Norm and gradients that one process clips, the same for every layout."""
    whole = {n: nn.Parameter(t) for n, t in _model(dtype, 0).items()}
    dense, found = _optimizer(whole), []
    for seed, order in enumerate(orders):
        full = _model(dtype, 100 * seed)
        for name, grad in full.items():
            whole[name].grad = grad.clone()
        norm = clip_grad_norm_(dense, 1.0, order)
        clipped = {n: p.grad.clone() for n, p in whole.items() if p.grad is not None}
        assert any(not torch.equal(clipped[n], full[n]) for n in clipped)
        found.append(_Clipped(full, norm, clipped))
    return found


def _matches_dense(layout: str, runs: dict[torch.dtype, tuple[float, ...]]) -> list[str]:
    """True for each dtype and order where norm and clipped gradients have the bits that one process finds."""
    options = LAYOUTS[layout].options(dist.get_world_size())
    wrong = []
    for dtype, orders in runs.items():
        params = parameters(_build(layout, _model(dtype, 0)))
        sharded = _optimizer(params, **options)
        for order, wanted in zip(orders, _clipped_by_one(dtype, orders), strict=True):
            for name, grad in _build(layout, wanted.full).items():
                params[name].grad = grad
            found = clip_grad_norm_(sharded, 1.0, order)
            assert type(found) is Tensor and found.ndim == 0 and found.dtype == torch.float32
            clipped = _build(layout, wanted.clipped)
            equal = all(
                torch.equal(_local(p.grad), _local(clipped[n])) for n, p in params.items() if p.grad is not None
            )
            if _bits(found) != _bits(wanted.norm) or not equal:
                wrong.append(f"{dtype} order {order}: {float(found)} for {float(wanted.norm)}, equal={equal}")
    return wrong


@pytest.mark.parametrize(
    ("world", "layout"), [*((3, name) for name in list(LAYOUTS)[::4]), *((4, name) for name in LAYOUTS)]
)
def test_norm_and_clipped_gradients_are_bitwise_those_of_one_process(layout: str, world: int) -> None:
    """Bits are equal by the usual order on every layout, in turn by one of the others or in bf16, too."""
    at = list(LAYOUTS).index(layout)
    other = ORDERS[1 + at // 2 % (len(ORDERS) - 1)]
    runs: dict[torch.dtype, tuple[float, ...]] = {torch.float32: (2.0,)}
    if world == 4:
        runs |= {torch.bfloat16: (2.0,)} if at % 2 else {torch.float32: (2.0, other)}
    assert get_pool(world).run(_matches_dense, layout, runs) == [[]] * world


def _update_after_clipping(layout: str) -> bool:
    params = parameters(_build(layout, _model(torch.float32, 0)))
    whole = {n: nn.Parameter(t) for n, t in _model(torch.float32, 0).items()}
    options = LAYOUTS[layout].options(dist.get_world_size())
    sharded, dense = _optimizer(params, **options), _optimizer(whole)
    for seed in (1, 2, 3):
        full = {n: seed * t for n, t in _model(torch.float32, 100 * seed).items()}
        for name, grad in _build(layout, full).items():
            params[name].grad, whole[name].grad = grad, full[name].clone()
        for optimizer in (sharded, dense):
            clip_grad_norm_(optimizer, 1.0)
            optimizer.step()
    expected = _build(layout, {n: p.detach() for n, p in whole.items()})
    return all(torch.equal(_local(p), _local(expected[n])) for n, p in params.items())


@pytest.mark.parametrize("layout", ["ddp", "fsdp2+tp", "mixed meshes"])
def test_clipped_steps_are_bitwise_those_of_one_process(layout: str, world4: RankPool) -> None:
    assert world4.run(_update_after_clipping, layout) == [True] * 4


# ------------------------------------------------------------------------------------------------- one process


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_on_one_process_it_is_torchs_clip_within_its_rounding(order: float, dtype: torch.dtype) -> None:
    ours = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((7, 5), (3,))]
    theirs = [nn.Parameter(p.detach().double()) for p in ours]  # the oracle sums in fp64
    for a, b in zip(ours, theirs, strict=True):
        a.grad = _normal(*a.shape, seed=a.ndim).to(dtype)
        b.grad = a.grad.to(torch.float64, copy=True)
    before = [b.grad.clone() for b in theirs if b.grad is not None]
    exact = torch.nn.utils.clip_grad_norm_(theirs, 0.5, order)
    found = clip_grad_norm_(ours, 0.5, order)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    # each side: a power, a sum of 38 terms and a root, which for order 0.5 doubles what came before
    sums = 2 * 2 * (3 + math.sqrt(38 / 6)) if dtype == torch.float64 else 0.0
    assert_rounded(found, exact.to(found.dtype), roundings=sums)
    for a, b in zip(
        ours, theirs, strict=True
    ):  # ours: norm + 1e-6, the quotient, the product, its cast; theirs: a cast
        assert_rounded(a.grad, b.grad.to(dtype), roundings=sums + 6)
    factor = 0.5 / (found + 1e-6)  # rounded to the norm's dtype, never to the gradient's
    for a, grad in zip(ours, before, strict=True):
        assert torch.equal(a.grad, (grad.to(found.dtype) * factor).to(dtype))


def test_below_max_norm_nothing_changes_and_the_norm_is_returned() -> None:
    param = nn.Parameter(torch.zeros(2))
    param.grad = torch.tensor([3.0, 4.0])
    assert float(clip_grad_norm_(param, 5.1)) == 5.0
    assert param.grad.tolist() == [3.0, 4.0]
    assert float(clip_grad_norm_([param], 1.0)) == 5.0
    assert_rounded(param.grad.norm(), torch.tensor(5.0 / (5.0 + 1e-6)), roundings=7)  # sum, quotient, product; norm 4


def test_no_gradient_at_all_has_norm_zero() -> None:
    assert float(clip_grad_norm_(nn.Linear(3, 2), 1.0)) == 0.0
    assert float(clip_grad_norm_([], 1.0)) == 0.0


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_is_refused_or_spreads_as_in_torch(bad: float) -> None:
    ours, theirs = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    for p in (ours, theirs):
        p.grad = torch.tensor([bad, 1.0])
    with pytest.raises(RuntimeError, match=r"norm of order 2.0 is (inf|nan)"):
        clip_grad_norm_(ours, 1.0, error_if_nonfinite=True)
    assert torch.equal(ours.grad, torch.tensor([bad, 1.0])) or math.isnan(bad)
    assert ours.grad[1] == 1.0
    assert not math.isfinite(float(clip_grad_norm_(ours, 1.0)))
    torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    assert_rounded(ours.grad, theirs.grad, roundings=0)  # NaN beside NaN, zero beside zero


@pytest.mark.parametrize("options", [{"norm_type": 0}, {"norm_type": -1}, {"norm_type": math.nan}, {"max_norm": -1.0}])
def test_arguments_without_meaning_are_refused(options: dict[str, float]) -> None:
    param = nn.Parameter(torch.zeros(2))
    param.grad = torch.ones(2)
    with pytest.raises(ValueError, match="must be"):
        clip_grad_norm_(param, **{"max_norm": 1.0, **options})
    assert param.grad.tolist() == [1.0, 1.0]


def test_groups_with_clip_grad_false_are_neither_counted_nor_scaled() -> None:
    inside, outside = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))
    optimizer = Muon([{"params": [inside]}, {"params": [outside], "use_muon": False, "clip_grad": False}], lr=1e-3)
    inside.grad, outside.grad = torch.full((2, 2), 2.0), torch.full((2,), 1e6)
    assert float(clip_grad_norm_(optimizer, 1.0)) == 4.0
    assert_rounded(inside.grad.norm(), torch.tensor(4.0 / (4.0 + 1e-6)), roundings=9)  # as above, two more squares
    assert outside.grad.tolist() == [1e6, 1e6]


def test_large_strided_and_empty_gradients_count_every_element_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardmuon.gradients.norms._CHUNK", 16)
    grads = [_normal(9, 7, seed=1), _normal(9, 7, seed=2).T, _normal(1, 50, seed=3)[:, ::2], torch.zeros(0, 3)]
    params = [nn.Parameter(torch.zeros(g.shape)) for g in grads]
    for p, g in zip(params, grads, strict=True):
        p.grad = g
    exact = torch.cat([g.double().flatten() for g in grads]).norm()
    assert float(clip_grad_norm_(params, 1e9)) == float(exact.float())


def test_combining_norms_does_not_depend_on_order_and_does_not_overflow() -> None:
    values = [10.0 ** random.Random(i).uniform(-8, 8) for i in range(200)]
    for order in ORDERS:
        assert combine(values, order) == combine(values[::-1], order) == combine(sorted(values), order)
    # each value scaled and squared, a sum, a root, scaled back
    assert_rounded(combine([3e300, 4e300], 2.0), 5e300, roundings=6)
    assert_rounded(combine([3e-300, 4e-300], 2.0), 5e-300, roundings=6)
    assert combine([1.7e308, 1.7e308], 1.0) == math.inf
    assert_rounded(combine([1.0] * 2**10, 20.0), 2**0.5, roundings=3)  # the root of an exact sum, and sqrt(2) itself


# ------------------------------------------------------------------------------------------------ groups of ranks


def _sharded(full: Tensor, mesh: Any, *placements: Any) -> nn.Parameter:
    param = nn.Parameter(distribute_tensor(torch.zeros_like(full), mesh, list(placements), src_data_rank=None))
    param.grad = distribute_tensor(full, mesh, list(placements), src_data_rank=None)
    return param


def _norm_of(*grads: Tensor) -> float:
    return float(torch.cat([g.double().flatten() for g in grads]).norm().float())


def _rows_and_all() -> tuple[float, float]:
    """Each pair of ranks has its own parameter, all four share another."""
    mesh, rank = mesh_of((2, 2)), dist.get_rank()
    rows, shared = [_normal(5, 3, seed=s) for s in (1, 2)], _normal(7, 3, seed=3)
    params = [_sharded(rows[rank // 2], mesh["a1"], Shard(0)), _sharded(shared, mesh_of((4,)), Shard(0))]
    return float(clip_grad_norm_(params, 1.0)), _norm_of(*rows, shared)


def test_groups_inside_a_larger_one_are_summed_over_it(world4: RankPool) -> None:
    found = world4.run(_rows_and_all)
    assert all(norm == wanted for norm, wanted in found)


def _rows_and_columns(process_group: bool) -> tuple[float | str, float]:
    mesh, rank = mesh_of((2, 2)), dist.get_rank()
    rows, columns = ([_normal(5, 3, seed=s) for s in seeds] for seeds in ((1, 2), (3, 4)))
    params = [_sharded(rows[rank // 2], mesh["a1"], Shard(0)), _sharded(columns[rank % 2], mesh["a0"], Shard(1))]
    before = [p.grad.to_local().clone() for p in params]
    try:
        norm: float | str = float(
            clip_grad_norm_(params, 1.0, process_group=dist.group.WORLD if process_group else None)
        )
    except ValueError as error:
        assert all(torch.equal(b, p.grad.to_local()) for b, p in zip(before, params, strict=True))
        norm = str(error)
    return norm, _norm_of(*rows, *columns)


def test_crossing_groups_are_refused_on_every_rank_without_a_group_that_contains_them(world4: RankPool) -> None:
    for text, _ in world4.run(_rows_and_columns, False):
        assert "neither contains the other" in str(text) and "process_group=" in str(text)
    assert all(norm == wanted for norm, wanted in world4.run(_rows_and_columns, True))


def _chain() -> str:
    """Ranks 0 and 3 are each in one group only; 1 and 2 see that there is no common sum."""
    rank = dist.get_rank()
    pairs = [dist.new_group(pair) for pair in ([0, 1], [1, 2], [2, 3])]
    meshes = [dist.device_mesh.DeviceMesh.from_group(g, "cpu") for i, g in enumerate(pairs) if rank in (i, i + 1)]
    params = [_sharded(_normal(4, 3, seed=1), mesh, Shard(0)) for mesh in meshes]
    with pytest.raises(ValueError, match="neither contains the other") as caught:
        clip_grad_norm_(params, 1.0)
    return str(caught.value)


def test_ranks_that_see_one_group_only_hear_that_there_is_no_common_sum(world4: RankPool) -> None:
    assert all("process_group=" in text for text in world4.run(_chain))


def _pipeline(kind: str) -> tuple[float, float]:
    """Two stages of two ranks. Each stage has a sharded and a plain parameter."""
    mesh, rank = mesh_of((2, 2)), dist.get_rank()
    stage = rank // 2
    weights, biases = ([_normal(*shape, seed=10 * i + s) for s in (0, 1)] for i, shape in enumerate([(5, 3), (4,)]))
    weight = _sharded(weights[stage], mesh["a1"], Shard(0))
    bias = nn.Parameter(torch.zeros(4))
    bias.grad = biases[stage].clone()
    groups = [{"params": [weight]}, {"params": [bias], "use_muon": False}]
    inside = mesh["a1"].get_group()
    if kind == "across":  # ranks (0, 2) and (1, 3)
        return float(clip_grad_norm_(Muon(groups, lr=1e-3), 1.0, process_group=mesh["a0"].get_group())), _norm_of(
            *weights, *biases
        )
    return float(
        clip_grad_norm_(Muon(groups, lr=1e-3, process_group=inside), 1.0, process_group=dist.group.WORLD)
    ), _norm_of(*weights, *biases)


@pytest.mark.parametrize("kind", ["across", "contains"])
def test_pipeline_stages_are_summed_over_the_given_group(kind: str, world4: RankPool) -> None:
    assert all(norm == wanted for norm, wanted in world4.run(_pipeline, kind))


def _experts(how: str) -> float | str:
    """A shared sharded matrix and a plain expert on each rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    shared, experts = _normal(6, 4, seed=9), [_normal(3, 4, seed=s) for s in range(world)]
    expert = nn.Parameter(torch.zeros(3, 4))
    expert.grad = experts[rank].clone()
    weight = _sharded(shared, mesh_of((world,)), Shard(0))
    groups = [{"params": [("w", weight)]}, {"params": [("expert", expert)], "rank_local": how != "unsaid"}]
    try:
        norm = float(
            clip_grad_norm_(Muon(groups, lr=1e-3), 1.0, process_group=dist.group.WORLD if how == "summed" else None)
        )
    except ValueError as error:
        assert torch.equal(expert.grad, experts[rank])
        return str(error)
    assert norm == _norm_of(shared, *experts)
    return norm


def test_experts_of_each_rank_are_summed_over_the_given_group_and_refused_without(world3: RankPool) -> None:
    assert all(isinstance(norm, float) for norm in world3.run(_experts, "summed"))
    assert all("expert: rank_local=True" in text and "process_group=" in text for text in world3.run(_experts, "alone"))
    assert all("plain tensors (expert) differ between ranks" in text for text in world3.run(_experts, "unsaid"))


def _replicas(how: str) -> float | str:
    """Plain replicas beside a sharded matrix."""
    world = dist.get_world_size()
    shared, replica = _normal(6, 4, seed=9), _normal(5, seed=1)
    plain = nn.Parameter(torch.zeros(5))
    plain.grad = replica.clone()
    groups = [
        {"params": [("weight", _sharded(shared, mesh_of((world,)), Shard(0)))]},
        {"params": [("plain", plain)], "use_muon": False},
    ]
    optimizer = Muon(groups, lr=1e-3, process_group=dist.group.WORLD if how == "declared" else None)
    try:
        norm = float(clip_grad_norm_(optimizer, 1.0, process_group=None if how == "unsaid" else dist.group.WORLD))
    except ValueError as error:
        return str(error)
    assert norm == _norm_of(shared, replica)
    return norm


def test_plain_replicas_are_counted_once_and_never_several_times(world3: RankPool) -> None:
    assert all(isinstance(norm, float) for norm in world3.run(_replicas, "unsaid"))
    assert all(isinstance(norm, float) for norm in world3.run(_replicas, "declared"))
    assert all("plain tensors (plain) are equal on some" in str(text) for text in world3.run(_replicas, "summed"))


def _wrong_group() -> str:
    rank = dist.get_rank()
    pairs = [dist.new_group(pair) for pair in ([0, 1], [2, 3])]
    param = _sharded(_normal(6, 4, seed=9), mesh_of((4,)), Shard(0))
    with pytest.raises(ValueError, match="process_group has ranks") as caught:
        clip_grad_norm_([param], 1.0, process_group=pairs[rank // 2])
    return str(caught.value)


def test_a_group_that_counts_some_ranks_twice_is_refused(world4: RankPool) -> None:
    assert all("pass a group that contains all of these" in text for text in world4.run(_wrong_group))


# ---------------------------------------------------------------------------------------- gradients on some ranks


def _faulty(what: str) -> str:
    rank, world = dist.get_rank(), dist.get_world_size()
    params = [_sharded(_normal(6, 4, seed=s), mesh_of((world,)), Shard(0)) for s in (1, 2)]
    named = [("first", params[0]), ("second", params[1])]
    options: dict[str, Any] = {"max_norm": 1.0}
    if rank == 1:
        if what == "missing":
            params[1].grad = None
        elif what == "plain":
            params[1].grad = torch.zeros(6, 4)
        elif what == "elsewhere":
            params[1].grad = params[1].grad.redistribute(placements=[Replicate()])  # local: nobody else is needed
        elif what == "fewer":
            named = named[:1]
        elif what == "none listed but other options":
            options = {"max_norm": 2.0}
    elif what == "elsewhere":
        params[1].grad.redistribute(placements=[Replicate()])
    before = _local(params[0].grad).clone()
    with pytest.raises(ValueError, match=r"rank 1|second") as caught:
        clip_grad_norm_(named, **options)
    assert torch.equal(before, _local(params[0].grad))
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("missing", "rank 1 has 'second (6, 4) True no gradient'"),
        ("plain", "second: its gradient is a plain tensor"),
        ("elsewhere", "rank 1 has 'second (6, 4) True a gradient that is placed unlike the parameter'"),
        ("fewer", "rank 0 lists 2 parameters, rank 1 lists 1; one of them lacks"),
        ("none listed but other options", "rank 1 has 'norm_type=2.0 max_norm=2.0"),
    ],
)
def test_what_is_wrong_on_one_rank_is_refused_on_all_and_nothing_is_scaled(
    what: str, said: str, world3: RankPool
) -> None:
    texts = world3.run(_faulty, what)
    assert all(said in text for text in texts), texts


FAMILIES = ("sharded", "nested", "crossing", "stages")


def _family(name: str) -> tuple[list[tuple[str, nn.Parameter]], Any, float]:
    """Parameters with gradients, the process_group to pass, and the norm over all of them."""
    mesh, flat, rank = mesh_of((2, 2)), mesh_of((4,)), dist.get_rank()
    rows, columns = [_normal(5, 3, seed=s) for s in (1, 2)], [_normal(4, 3, seed=s) for s in (3, 4)]
    shared, lone = _normal(7, 2, seed=5), _normal(2, 6, seed=6)
    row = ("row", _sharded(rows[rank // 2], mesh["a1"], Shard(0)))
    if name == "sharded":
        both = [("shared", _sharded(shared, flat, Shard(0))), ("lone", _sharded(lone, mesh, Replicate(), Shard(1)))]
        return both, None, _norm_of(shared, lone)
    if name == "nested":
        return [row, ("shared", _sharded(shared, flat, Shard(0)))], None, _norm_of(*rows, shared)
    if name == "crossing":
        column = ("column", _sharded(columns[rank % 2], mesh["a0"], Shard(0)))
        return [row, column], dist.group.WORLD, _norm_of(*rows, *columns)
    return (
        [row, ("row 2", _sharded(rows[rank // 2], mesh["a1"], Replicate()))],
        mesh["a0"].get_group(),
        _norm_of(*rows, *rows),
    )


def _storm(name: str, seed: int) -> list[str | None]:
    """Random faults on random ranks, calls without fault between them: what each call raised here."""
    draw, raised = random.Random(seed), []
    kinds = ["missing", "plain", "sparse", "norm_type"]
    if name in ("sharded", "stages"):
        kinds.append("fewer")  # elsewhere that rank would know nothing of a group that waits for it
    for _ in range(12):
        named, group, norm = _family(name)
        faults = {rank: draw.choice(kinds) for rank in range(4)}
        one = draw.randrange(4)
        hit = draw.choice([(), (one,), (one, 3 - one)])  # never all ranks that share a parameter
        options: dict[str, Any] = {"norm_type": 2.0}
        param = named[draw.randrange(2)][1]
        if dist.get_rank() in hit:
            fault = faults[dist.get_rank()]
            if fault == "missing":
                param.grad = None
            elif fault == "plain":
                param.grad = torch.ones(param.shape)
            elif fault == "sparse":
                param.grad = torch.ones(param.shape).to_sparse()
            elif fault == "norm_type":
                options["norm_type"] = -1.0
            else:
                named = named[1:]
        try:
            assert float(clip_grad_norm_(named, 1.0, process_group=group, **options)) == norm
            raised.append(None)
        except ValueError as error:
            raised.append(str(error))
    return raised


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("seed", [0])
def test_no_storm_of_faults_puts_ranks_out_of_step(name: str, seed: int, world4: RankPool) -> None:
    calls = list(zip(*world4.run(_storm, name, seed), strict=True))
    assert {sum(text is not None for text in texts) for texts in calls} == {0, 4}


def _other_reach() -> str:
    named, _, _ = _family("sharded")
    group = None if dist.get_rank() == 1 else dist.group.WORLD
    with pytest.raises(ValueError, match=r"clip together but differ") as caught:
        clip_grad_norm_(named, 1.0, process_group=group)
    return str(caught.value)


def test_a_process_group_that_one_rank_does_not_pass_is_refused_on_all(world4: RankPool) -> None:
    assert all("rank 1 has 'one rank each=False'" in text for text in world4.run(_other_reach))


def _unclear() -> str:
    """Replicas of a shard that is not what its placements imply."""
    mesh, rank = mesh_of((2, 2)), dist.get_rank()
    rows = torch.zeros(5 if rank % 2 else 1, 3)
    made = DTensor.from_local(rows, mesh, [Replicate(), Shard(0)], run_check=False, shape=(6, 3), stride=(3, 1))
    fine = nn.Parameter(distribute_tensor(torch.zeros(6, 3), mesh, [Replicate(), Shard(0)], src_data_rank=None))
    with pytest.raises(ValueError, match=r"w: ranks \(0, 1, 2, 3\) store shapes") as caught:
        clip_grad_norm_([("w", nn.Parameter(made) if rank == 1 else fine)], 1.0)
    return str(caught.value)


def test_replicas_that_cannot_be_told_are_refused_on_all_ranks(world4: RankPool) -> None:
    assert all("(5, 3) is out of bounds of shape (6, 3)" in text for text in world4.run(_unclear))


def _uneven_replicas() -> bool:
    """Shards of a size of their own, twice; and a gradient that cannot be redistributed to them."""
    mesh, rank = mesh_of((2, 2)), dist.get_rank()
    whole = _normal(6, 3, seed=1)
    part = whole[5:] if rank % 2 else whole[:5]
    param, grad = (
        DTensor.from_local(t, mesh, [Replicate(), Shard(0)], run_check=False, shape=(6, 3), stride=(3, 1))
        for t in (torch.zeros_like(part), part.clone())
    )
    param = nn.Parameter(param)
    param.grad = grad
    found = float(clip_grad_norm_([("w", param)], 1e9)) == _norm_of(whole)
    param.grad = distribute_tensor(whole, mesh, [Replicate(), Shard(1)], src_data_rank=None)
    with pytest.raises(ValueError, match=r"w: its gradient is placed unlike the parameter, which stores shape"):
        clip_grad_norm_([("w", param)], 1e9)
    return found


def test_replicas_of_uneven_shards_are_counted_once(world4: RankPool) -> None:
    assert world4.run(_uneven_replicas) == [True] * 4


# ------------------------------------------------------------------------------------------ what is kept from before


def _changed(family: str, change: str) -> tuple[list[float | str], list[float]]:
    """Clipped once; then one rank passes something else; then all pass what they did."""
    named, group, norm = _family(family)
    optimizer = Muon([{"params": [entry]} for entry in named], lr=1e-3)
    found: list[float | str] = [
        float(clip_grad_norm_(source, 1e9, process_group=group)) for source in (optimizer, named)
    ]
    source: Any = named
    if dist.get_rank() == 1:
        if change == "fewer":
            source = named[:1]
        elif change == "none of the shared":
            source = [named[0], *named[2:]]
        elif change == "other tensors":
            source, _, _ = _family(family)
        elif change == "option":
            optimizer.param_groups[1]["clip_grad"] = False
    if change == "option":
        source = optimizer
    try:
        found.append(float(clip_grad_norm_(source, 1e9, process_group=group)))
    except ValueError as error:
        found.append(str(error))
    optimizer.param_groups[1]["clip_grad"] = True
    found.append(float(clip_grad_norm_(named, 1e9, process_group=group)))
    return found, [norm] * 2


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("sharded", "nothing"),
        ("sharded", "fewer"),
        ("sharded", "other tensors"),
        ("sharded", "option"),
        ("nested", "none of the shared"),
        ("nested", "other tensors"),
        ("nested", "option"),
        ("crossing", "fewer"),
        ("crossing", "other tensors"),
        ("stages", "nothing"),
        ("stages", "fewer"),
        ("stages", "option"),
    ],
)
def test_a_rank_that_passes_something_else_than_before_is_heard_by_those_that_do_not(
    family: str, change: str, world4: RankPool
) -> None:
    """Tables of the others are kept; the rank's own is made anew, which takes all of them."""
    for (first, second, then, last), (norm, again) in world4.run(_changed, family, change):
        assert (first, second, last) == (norm, norm, again)
        assert then == norm if change in ("nothing", "other tensors") else isinstance(then, str), then


def _gone() -> bool:
    """Neither tensors nor what was kept of them live on because they were clipped."""
    params = [_sharded(_normal(6, 4, seed=s), mesh_of((dist.get_world_size(),)), Shard(0)) for s in (1, 2)]
    clip_grad_norm_(params, 1.0)
    bound = _BOUND[params[0]]
    clip_grad_norm_(params, 1.0)
    there = _BOUND[params[0]] is bound
    refs = [*map(weakref.ref, params), weakref.ref(bound)]
    del params, bound
    gc.collect()
    return there and [ref() for ref in refs] == [None] * 3


def test_what_is_kept_of_parameters_ends_with_them(world3: RankPool) -> None:
    assert world3.run(_gone) == [True] * 3


def _unused() -> bool:
    """No gradient on any rank, for everything or for one parameter; and a rank that holds no element."""
    mesh = mesh_of((dist.get_world_size(),))
    first, second = (_sharded(_normal(2, 4, seed=s), mesh, Shard(0)) for s in (1, 2))
    second.grad = None
    one = float(clip_grad_norm_([first, second], 1e9)) == _norm_of(_normal(2, 4, seed=1))
    first.grad = None
    return one and float(clip_grad_norm_([first, second], 1.0)) == 0.0


def test_parameters_without_gradients_count_nothing_and_ranks_that_hold_nothing_hear_the_norm(world3: RankPool) -> None:
    assert world3.run(_unused) == [True] * 3


def _partial() -> bool:
    """Sums that are not finished, and other placements, are redistributed; and then clipped as the finished ones."""
    mesh, rank, world = mesh_of((2, 2)), dist.get_rank(), dist.get_world_size()
    grads = [_normal(6, 4, seed=s) for s in range(world)]
    param = _sharded(torch.zeros(6, 4), mesh, Replicate(), Shard(0))
    whole = sum(grads[1:], grads[0])
    param.grad = DTensor.from_local(grads[rank].clone(), mesh, [Partial(), Partial()], run_check=False)
    other = _sharded(torch.zeros(6, 4), mesh_of((4,)), Shard(0))
    other.grad = distribute_tensor(grads[0], mesh_of((4,)), [Shard(1)], src_data_rank=None)
    norm = clip_grad_norm_([param, other], 1.0)
    wanted = _norm_of(whole, grads[0])
    scaled, terms = (
        distribute_tensor(t, mesh, [Replicate(), Shard(0)], src_data_rank=None).to_local()
        for t in (whole / wanted, sum(g.abs() for g in grads) / wanted)
    )
    # three sums in any order on both sides; the norm and 1e-6, the quotient, the product; the quotient here
    assert_rounded(param.grad.to_local(), scaled, roundings=2 * 3 + 5, scale=terms + 1e-6 / wanted)
    assert param.grad.placements == (Replicate(), Shard(0)) and other.grad.placements == (Shard(0),)
    # the norm moves by no more than the sums do, and each side is rounded once
    cancelled = float(sum(g.abs() for g in grads).norm()) / wanted
    assert_rounded(norm, torch.tensor(wanted), roundings=2 * 3 * cancelled + 2)
    return True


def test_a_partial_gradient_is_reduced_first(world4: RankPool) -> None:
    assert world4.run(_partial) == [True] * 4


def _fp64() -> tuple[str, bytes]:
    params = [_sharded(_normal(6, 4, seed=1).double() * 1e150, mesh_of((3,)), Shard(0)) for _ in range(2)]
    plain = nn.Parameter(torch.zeros(3))
    plain.grad = torch.ones(3)
    norm = clip_grad_norm_([*params, plain], 1.0)
    wanted = (_normal(6, 4, seed=1).double() * 1e150).norm() * 2**0.5
    assert_rounded(norm, wanted, roundings=2 * (3 + math.sqrt(48 / 6)))  # squares, a sum of 48, a root; twice
    return str(norm.dtype), _bits(norm)


def test_an_fp64_gradient_makes_the_norm_fp64_with_equal_bits_on_all_ranks(world3: RankPool) -> None:
    found = world3.run(_fp64)
    assert len(set(found)) == 1 and found[0][0] == "torch.float64"


def _torch_clip(case: str) -> str:
    """Clip by torch's own function."""
    mesh, flat = mesh_of((2, 2)), mesh_of((4,))
    plain = nn.Parameter(torch.zeros(3))
    plain.grad = torch.ones(3)
    one = _sharded(_normal(6, 4, seed=1), flat, Shard(0))
    other: nn.Parameter = _sharded(_normal(6, 4, seed=1), mesh, Replicate(), Shard(0)) if case == "meshes" else plain
    try:
        torch.nn.utils.clip_grad_norm_([one, other], 1.0)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("case", "said"), [("meshes", "must have the same mesh"), ("plain", "mixed torch.Tensor and")])
def test_torchs_own_function_still_refuses_what_this_one_is_for(case: str, said: str, world4: RankPool) -> None:
    # If this fails, docs/clipping.md is out of date.
    assert all(said in text for text in world4.run(_torch_clip, case))


def test_overrides_may_keep_parameters_out_of_the_norm() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    overrides = {"0.weight": {"clip_grad": False}, "1.bias": {"clip_grad": False, "rank_local": True}}
    optimizer = Muon(param_groups(model, lr=0.1, adamw_lr=0.1, overrides=overrides), lr=1e-3)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    assert float(clip_grad_norm_(optimizer, 1e9)) == 3.0  # of 3 + 6 ones


# -------------------------------------------------------------------------------------------------------- what it costs


class Counting(TorchDispatchMode):
    """Counter of calls of each operator."""

    def __init__(self, seen: Counter[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


def _work_of(num_params: int) -> tuple[int, dict[str, int]]:
    """Python calls of the second clipping of so many DTensors, and how often it calls what computes."""
    mesh = mesh_of((dist.get_world_size(),))
    params = [nn.Parameter(distribute_tensor(torch.ones(8, 16), mesh, [Shard(0)])) for _ in range(num_params)]
    for p in params:
        p.grad = distribute_tensor(torch.ones(8, 16), mesh, [Shard(0)])
    optimizer = Muon([{"params": [(f"w{i}", p) for i, p in enumerate(params)]}], lr=1e-3)
    clip_grad_norm_(optimizer, 1e9)
    calls, computed = itertools.count(), Counter[str]()

    def watch(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            next(calls)

    with Counting(computed):
        clip_grad_norm_(optimizer, 1e-3)
    sys.setprofile(watch)
    try:
        clip_grad_norm_(optimizer, 1e-3)
    finally:
        sys.setprofile(None)
    return next(calls), computed


def _growth() -> tuple[float, dict[str, int], dict[str, int]]:
    (few, small), (many, large) = _work_of(50), _work_of(150)
    return (many - few) / 100, small, large


def test_a_call_reads_what_may_change_of_a_parameter_once_and_computes_in_lists(world3: RankPool) -> None:
    """29 Python calls for each DTensor (there were 48): is its share still right, does its gradient lie as it does. All
    gradients are copied side by side for one norm, and scaled by one call, however many there are."""
    for python, few, many in world3.run(_growth):
        assert python <= 30
        for name in ("aten.cat.default", "aten._foreach_norm.Scalar", "aten._foreach_mul_.Tensor"):
            assert (few[name], many[name]) == (1, 1), name
        grown = {name for name in many if many[name] > few[name]}
        assert grown <= {"aten.view.default", "aten.detach.default"}  # no copy, nothing computed one by one
