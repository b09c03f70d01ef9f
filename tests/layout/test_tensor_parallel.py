"""Tests of plain tensor-parallel shards: the update equals that of the full matrix, each matrix is orthogonalized once,
and inconsistent shards raise errors."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_gpt import tensor_parallel_part
from spectra import normal
from torch import Tensor, nn

from shardmuon import Muon, param_groups
from shardmuon.comm.groups import GroupRef
from shardmuon.layout.engines import engine_for
from shardmuon.layout.engines.flat import FlatShard
from shardmuon.layout.engines.tensor_parallel import TensorParallelEngine
from shardmuon.testing import RankPool


def _mark(shard: Tensor, dim: int, stride: int = 1, **more: Any) -> nn.Parameter:
    return _marked(shard, {"tensor_model_parallel": True, "partition_dim": dim, "partition_stride": stride} | more)


def _marked(value: Tensor, marks: dict[str, Any]) -> nn.Parameter:
    param = nn.Parameter(value.clone())
    vars(param).update(marks)
    return param


# A Shard is a function that takes a full tensor and returns this rank's shard with its tensor-parallel attributes.
Shard = Callable[[Tensor], nn.Parameter]


def _beside_whole(shards: Mapping[str, tuple[tuple[int, ...], Shard, dict[str, Any]]], **given: Any) -> Muon:
    """Take a step on this rank's shards and, with a second optimizer, on the full tensors. Assert that the results are
    bitwise identical.

    Args:
        shards: Dict from parameter name to (full shape, function that shards the full tensor, options of the parameter
            group).
        given: Options of the optimizer that updates the shards.

    Returns:
        The optimizer that updates the shards.
    """
    ours, theirs, pairs = list[Any](), list[Any](), []
    for seed, (name, (shape, cut, options)) in enumerate(shards.items()):
        full, grad = (normal(*shape, seed=seed + of) for of in (0, 100))
        whole, mine = nn.Parameter(full), cut(full)
        whole.grad, mine.grad = grad, cut(grad).detach()
        pairs.append((mine, whole, cut))
        ours.append({"params": [(name, mine)], **options})
        theirs.append({"params": [(name, whole)], **{k: v for k, v in options.items() if k not in OF_SHARDS}})
    optimizer = Muon(ours, lr=0.1, **given)
    for each in (optimizer, Muon(theirs, lr=0.1)):
        each.step()
    assert all(torch.equal(mine, cut(whole.detach())) for mine, whole, cut in pairs)
    return optimizer


OF_SHARDS = ("tp_group", "process_group")


STRIDES_AND_HEADS: dict[str, tuple[tuple[int, ...], int, int, dict[str, Any]]] = {
    "fused gate and up": ((32, 10), 0, 2, {"split_sizes": (16, 16)}),
    "three blocks along columns": ((5, 48), 1, 3, {}),
    "heads": ((16, 6), 0, 1, {"split_sizes": 8}),
    "two query groups over four ranks": ((24, 6), 0, 1, {"split_sizes": (8, 2, 2), "split_groups": 2}),
    "one query group over four ranks": ((12, 6), 0, 1, {"split_sizes": (8, 2, 2)}),
    "experts, columns": ((3, 4, 8), 2, 1, {"view": "stack"}),
}


UNEVEN = [(dim, sizes) for dim in (0, 1) for sizes in ((7, 0, 5, 0), (1, 2, 3, 1), (4, 3, 2, 3))]


def _cut_in_every_way() -> None:
    """Assert that a step on shards gives the same results as a step on the full matrices. The shards are Megatron's
    strided shards, and shards of arbitrary sizes that are marked only with partition_dim."""
    rank, world = dist.get_rank(), dist.get_world_size()

    def strided(dim: int, stride: int) -> Shard:
        return lambda full: _mark(tensor_parallel_part(full, rank, world, dim, stride), dim, stride)

    def uneven(dim: int, sizes: tuple[int, ...]) -> Shard:
        return lambda full: _marked(full.split(sizes, dim)[rank], {"partition_dim": dim})

    cases = {name: (shape, strided(*cut), options) for name, (shape, *cut, options) in STRIDES_AND_HEADS.items()}
    for dim, sizes in UNEVEN:
        num, heads = sum(sizes), 3 if sum(sizes) % 3 == 0 else None
        cases[f"{dim} {sizes}"] = (num, num), uneven(dim, sizes), {"split_sizes": heads}
    _beside_whole(cases, tp_group=dist.group.WORLD)


def test_strides_heads_fewer_query_groups_than_ranks_and_shards_of_any_sizes(world4: RankPool) -> None:
    world4.run(_cut_in_every_way)


# ------------------------------------------------------------------------------------------ with data parallel replicas


def _experts() -> list[int]:
    """Take a step on a dense weight with tensor-parallel size 4, and on an expert with expert-tensor-parallel size 2
    and two replicas. The expert's groups are tuples of ranks, because the order of the ranks matters, and a torch
    process group would sort them. Return the number of ranks in each parameter's layout."""
    rank, order = dist.get_rank(), (3, 1, 0, 2)
    tp = next(pair for pair in (order[:2], order[2:]) if rank in pair)
    dp = next(pair for pair in (order[::2], order[1::2]) if rank in pair)

    def dense(full: Tensor) -> nn.Parameter:
        return _mark(full.chunk(4, 0)[rank], 0)

    def expert(full: Tensor) -> nn.Parameter:
        return _mark(full.chunk(2, 1)[order.index(rank) % 2], 1, allreduce=False)

    cases = {"dense": ((8, 6), dense, {}), "expert": ((8, 6), expert, {"tp_group": tp, "process_group": dp})}
    return [len(spec.layout.ranks) for spec in _beside_whole(cases, tp_group=dist.group.WORLD).plan.specs]


def test_experts_have_groups_of_their_own_in_any_order_of_ranks(world4: RankPool) -> None:
    assert world4.run(_experts) == [[4, 4]] * 4


# --------------------------------------------------------------------------------------------------------- one process


def test_one_process_without_torch_distributed_needs_a_group_of_its_own_rank() -> None:
    _beside_whole({"w": ((8, 6), lambda full: _mark(full, 0, stride=2), {})}, tp_group=(0,))


@pytest.mark.parametrize(
    "marks",
    [{"tensor_model_parallel": True}, {"tensor_model_parallel": True, "partition_dim": 0}, {"partition_dim": 1}],
)
def test_a_marked_shard_without_a_group_is_refused_by_name(marks: dict[str, Any]) -> None:
    param = _marked(normal(4, 6, seed=0), marks)
    before, param.grad = param.detach().clone(), torch.ones(4, 6)
    with pytest.raises(ValueError, match=r"layer\.w: its attribute tensor_model_parallel.*\n?.*tp_group="):
        Muon([("layer.w", param)], lr=1e-3).step()
    assert torch.equal(param, before)


@pytest.mark.parametrize(
    ("marks", "options"),
    [
        ({"tensor_model_parallel": False, "partition_dim": 0}, {}),
        ({"partition_dim": -1}, {}),
        ({"allreduce": False}, {"tp_group": ()}),
        ({"allreduce": False}, {"process_group": (), "tp_group": ()}),
    ],
)
def test_a_tensor_that_is_marked_or_said_to_be_whole_is_whole(marks: dict[str, Any], options: dict[str, Any]) -> None:
    param = _marked(normal(4, 6, seed=0), marks)
    assert TensorParallelEngine(GroupRef((0, 1))).cut(param) is None
    for group in (None, (0,)):
        plan = Muon([{"params": [param], **options}], lr=1e-3, tp_group=group).prepare()
        assert [(i.rows, i.cols, i.route) for i in plan.items] == [(4, 6, "local")]


@pytest.mark.parametrize(
    ("options", "marks", "text"),
    [
        ({}, {"allreduce": False}, r"w: its attribute allreduce=False marks an expert's parameter.*tp_group would"),
        ({"tp_group": (0,)}, {"partition_dim": 5}, r"w: .* \(4, 6\) tensor .* partition_dim=5 is no dim .* 0 to 1, or"),
        (
            {"tp_group": (0,)},
            {"tensor_model_parallel": True},
            r"partition_dim=None is no dim .* param\.partition_dim = d",
        ),
        ({"tp_group": (0,)}, {"partition_dim": 0, "partition_stride": 0}, "w: partition_stride=0 must be a whole"),
        (
            {"use_muon": False},
            {"partition_dim": 5},
            r"w: .* \(4, 6\) tensor .* partition_dim=5 is no dim .* 0 to 1, or",
        ),
        ({"tp_group": (1, 2)}, {}, r"tp_group has ranks \(1, 2\), and rank 0 is not among them"),
        ({"tp_group": "tp"}, {}, "tp_group='tp' is no process group"),
        ({"tp_group": -100}, {}, r"tp_group=-100 is no process group of rank 0.* \(-100 is what new_group\(\) gives"),
        ({"process_group": -100}, {}, r"process_group=-100 is no process group of rank \d"),
        (
            {"process_group": "world"},
            {},
            r"process_group='world' is no process group of rank \d\. Give each rank a group",
        ),
        ({"tp_group": (0, 0)}, {}, r"tp_group=\(0, 0\) must be a process group or different global ranks"),
    ],
)
def test_options_that_mean_nothing_are_refused_when_they_are_given(
    options: dict[str, Any], marks: dict[str, Any], text: str
) -> None:
    param = _marked(normal(4, 6, seed=0), marks)
    with pytest.raises(ValueError, match=text):
        Muon([{"params": [("w", param)], **options}], lr=1e-3, tp_group=(0,))


def test_groups_are_neither_saved_nor_lost_by_loading() -> None:
    param = _mark(normal(4, 6, seed=0), 0)
    optimizer = Muon([("w", param)], lr=1e-3, tp_group=(0,))
    param.grad = torch.ones(4, 6)
    optimizer.step()
    saved = optimizer.state_dict()
    assert all(saved["param_groups"][0][key] is None for key in ("tp_group", "process_group"))
    optimizer.load_state_dict(copy.deepcopy(saved))
    copied = copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))
    assert [again.param_groups[0]["tp_group"] for again in (optimizer, *copied)] == [GroupRef((0,))] * 3


# ---------------------------------------------------------------------------------------------- refused on every rank


def _flat(start: int, size: int) -> nn.Parameter:
    shard = FlatShard((4, 6), start, dist.group.WORLD, "flat buffers")
    return shard.mark(nn.Parameter(torch.ones(size)))  # type: ignore[return-value]


# Each key is the text of an expected error. Its value lists a pair for every rank: the offset and the number of
# elements of the rank's range in the flattened tensor.
FLAT = {
    "leave a gap at ([10, 12)) of 24 elements of shape (4, 6)": [(0, 10), (12, 10), (22, 2), (24, 0)],
    "overlap at ([10, 12)) of 24 elements of shape (4, 6)": [(0, 12), (10, 12), (22, 2), (24, 0)],
    "offset (12,) and size (14,) is out of bounds of 24 elements": [(0, 12), (12, 14), (24, 0), (24, 0)],
    "leave a gap at ([12, 24))": [(0, 0), (0, 12), (12, 0), (12, 0)],
}
Refusal = Callable[[int], tuple[list[Tensor], dict[str, Any], dict[str, Any]]]
# Each case gives a function and the expected error texts. Given a rank, the function returns the rank's parameters,
# options of their parameter group, and the process groups of the optimizer.
REFUSED: dict[str, tuple[Refusal, list[str]]] = {
    "other dims": (
        lambda rank: ([_mark(torch.ones(4, 6 + rank // 3), 0)], {}, {}),
        ["ranks (0, 1, 2, 3) share", 'rank 0 lists "w: (any, 6)', 'rank 3 lists "w: (any, 7)'],
    ),
    "other dim cut": (
        lambda rank: ([_mark(torch.ones(4, 6), rank // 3)], {}, {}),
        ['rank 0 lists "w: (any, 6)', 'rank 3 lists "w: (4, any), a plain tensor cut along dim 1'],
    ),
    "one more": (
        lambda rank: ([_mark(torch.ones(4, 6), 0), _mark(torch.ones(2, 6), 0)][: 1 + rank // 3], {}, {}),
        ["rank 0 lists 1 parameters, rank 3 lists 2", 'one of them lacks "v: (any, 6)'],
    ),
    "empty": (
        lambda rank: ([_mark(torch.ones(0, 6), 0)], {}, {}),
        ["w: ranks (0, 1, 2, 3) store shapes [(0, 6)", "shape (0, 6) has no elements"],
    ),
    "stride": (
        lambda rank: ([_mark(torch.ones(3 + rank % 2, 6), 0, stride=2)], {}, {}),
        ["w: ranks (0, 1, 2, 3)", "partition_stride=2 says", "(3, 4, 3, 4) indices along dim 0"],
    ),
    "splits": (
        lambda rank: ([_mark(torch.ones(4, 6), 0)], {"split_sizes": (4, 4)}, {}),
        ["w: ranks (0, 1, 2, 3) store", "split_sizes=(4, 4) sum to 8, but there are 16 rows"],
    ),
    "unequal groups": (
        lambda rank: (
            [_mark(torch.ones(4, 6), 0)],
            {},
            {"tp_group": (1, 2, 3) if rank else (0,), "process_group": (0, 1) if rank < 2 else None},
        ),
        ["process_group (0, 1), which form no grid", "has tp_group (1, 2, 3) and process_group (0, 1)"],
    ),
    "dp over tp": (
        lambda rank: (
            [_mark(torch.ones(4, 6), 0)],
            {},
            {"tp_group": (0, 1) if rank < 2 else (2, 3), "process_group": dist.group.WORLD},
        ),
        ["process_group (0, 1, 2, 3), which form no grid", "one of each tensor-parallel group"],
    ),
    **{
        said: (lambda rank, parts=parts: ([_flat(*parts[rank])], {}, {}), ["(flat buffers)", said])
        for said, parts in FLAT.items()
    },
    "replicas differ": (
        lambda rank: ([nn.Parameter(torch.full((4, 6), float(rank)))], {}, {}),
        ["w: ranks 0 and 1 should hold replicas", "if they are shards over a tp_group, write param.tensor_model"],
    ),
}


def _refused(case: str) -> str:
    """Take a step with the inputs of the test case `case`. The step must raise an error without hanging and without
    changing any weight. Return this rank's error message."""
    params, group, groups = REFUSED[case][0](dist.get_rank())
    for p in params:
        p.grad = torch.ones_like(p)
    before = [p.detach().clone() for p in params]
    named = list(zip("wv", params, strict=False))
    with pytest.raises(ValueError, match=r"ranks|rows|shape|stride") as caught:
        Muon([{"params": named, **group}], lr=1e-3, **{"tp_group": dist.group.WORLD, **groups}).step()
    assert all(torch.equal(a, p) for a, p in zip(before, params, strict=True))
    return str(caught.value)


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_with_its_numbers_on_every_rank(case: str, world4: RankPool) -> None:
    for found in world4.run(_refused, case):
        assert all(text in found for text in REFUSED[case][1]), found


# ------------------------------------------------------------------------------------------------ models and lifetime


def _model_of_shards() -> tuple[dict[str, tuple[tuple[int, ...], str]], tuple[int, ...], bool]:
    """Take a step on Megatron-like tensor-parallel layers with an optimizer that is created from the module.

    Returns:
        A tuple of three: a dict from parameter name to the shape and optimizer ("Muon" or "AdamW") found by
        `param_groups`, the global shape of the last weight, and True if the plan contains any matrices.
    """
    model = nn.Sequential(nn.Linear(6, 4, bias=False), nn.LayerNorm(4), nn.Linear(4, 6, bias=False))
    for layer, dim in ((model[0], 0), (model[2], 1)):
        layer.weight = _mark(layer.weight.detach(), dim)
    optimizer = Muon(model, lr=0.1, tp_group=dist.group.WORLD)
    model(normal(3, 6, seed=0)).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match=r"0\.weight has tensor_model_parallel=True.*tp_group="):
        param_groups(model, lr=1e-3)
    rows = param_groups(model, lr=1e-3, tp_group=dist.group.WORLD).rows
    shape = engine_for(model[2].weight, optimizer.param_groups[0]).shape(model[2].weight)
    return {r.name: (r.shape, r.optimizer) for r in rows}, shape, bool(optimizer.plan.items)


def test_a_model_of_shards_is_routed_by_its_global_shapes(world2: RankPool) -> None:
    rows = {"0.weight": ((8, 6), "Muon"), **dict.fromkeys(("1.weight", "1.bias"), ((4,), "AdamW"))}
    assert world2.run(_model_of_shards) == [(rows | {"2.weight": ((6, 8), "Muon")}, (6, 8), True)] * 2


def test_experts_of_a_model_get_their_groups_by_an_override() -> None:
    model = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(4, 6, bias=False))
    model[1].weight.allreduce = False  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"1\.weight: its attribute allreduce=False marks an expert's parameter"):
        param_groups(model, lr=1e-3, tp_group=(0,))
    groups = param_groups(model, lr=1e-3, tp_group=(0,), overrides={"1.*": {"tp_group": (), "process_group": ()}})
    assert [g["tp_group"] for g in groups] == [GroupRef((0,)), ()]
