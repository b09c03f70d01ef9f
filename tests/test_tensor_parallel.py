"""Plain shards over a tensor-parallel group: the update of the whole matrix, each matrix once, and what is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardmuon import Muon, Orthogonalizer, clip_grad_norm_, param_groups
from shardmuon.comm.groups import GroupRef
from shardmuon.layout.engines import engine_for
from shardmuon.options import LR_SCALES
from shardmuon.testing import RankPool, get_pool
from shardmuon.testing.layouts import LAYOUTS, mesh_of
from shardmuon.testing.tolerances import assert_rounded

MARKS = ("tensor_model_parallel", "partition_dim", "partition_stride")


def _normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _mark(shard: Tensor, dim: int, stride: int = 1, **more: Any) -> nn.Parameter:
    return _marked(shard, {**dict(zip(MARKS, (True, dim, stride), strict=True)), **more})


def _marked(value: Tensor, marks: dict[str, Any]) -> nn.Parameter:
    param = nn.Parameter(value.clone())
    for key, mark in marks.items():
        setattr(param, key, mark)
    return param


def _megatron_part(full: Tensor, dim: int, stride: int, parts: int, part: int) -> Tensor:
    """A rank's part in Megatron's own words: every `parts`-th of the pieces of an even split."""
    pieces = torch.split(full, full.shape[dim] // parts // stride, dim)
    return torch.cat(pieces[part::parts], dim)


# ------------------------------------------------------------------------------ the matrix of TransformerEngine's tests


SCALES = ("original", "match_rms_adamw", "spectral", "unit_rms_norm", "none")  # the others are names for these


def _against_the_full_matrix(rows: int, cols: int, scales: tuple[str, ...]) -> list[str]:
    """Every option with which TransformerEngine tests its Muon, on shards and on the full matrix of one process."""
    rank, world = dist.get_rank(), dist.get_world_size()
    wrong = []
    for number, (dim, dtype, nesterov, mode, scale) in enumerate(
        (dim, dtype, nesterov, mode, scale)
        for dim in (0, 1)
        for dtype in (torch.float32, torch.bfloat16)
        for nesterov in (True, False)
        for mode in ("decoupled", "l2")
        for scale in scales
    ):
        options: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1, "nesterov": nesterov, "weight_decay_mode": mode}
        options |= {"adjust_lr_fn": scale, "orthogonalizer": Orthogonalizer(method="standard")}
        full = nn.Parameter(_normal(rows, cols, seed=number, dtype=dtype))
        shard = _mark(_megatron_part(full.detach(), dim, 1, world, rank), dim)
        ours = Muon([("w", shard)], tp_group=dist.group.WORLD, **options)
        dense = Muon([("w", full)], **options)
        for step in range(2):
            full.grad = _normal(rows, cols, seed=1000 + number + step, dtype=dtype)
            shard.grad = _megatron_part(full.grad, dim, 1, world, rank)
            ours.step()
            dense.step()
        same = torch.equal(shard, _megatron_part(full.detach(), dim, 1, world, rank))
        buffer = dense.state[full]["momentum_buffer"]
        same &= torch.equal(ours.state[shard]["momentum_buffer"], _megatron_part(buffer, dim, 1, world, rank))
        if not same or torch.equal(full, _normal(rows, cols, seed=number, dtype=dtype)):
            wrong.append(f"dim {dim} {dtype} nesterov={nesterov} {mode} {scale}")
    return wrong


def test_every_scale_is_tried() -> None:
    assert {LR_SCALES[name](3, 7) for name in SCALES} == {scale(3, 7) for scale in LR_SCALES.values()}


@pytest.mark.parametrize(
    ("world", "shape", "scales"),  # two ranks say that a scale is that of the full matrix
    [(2, (96, 128), SCALES), (4, (256, 192), SCALES[1:2])],
)
def test_every_option_gives_the_full_matrixs_bits(world: int, shape: tuple[int, int], scales: tuple[str, ...]) -> None:
    assert get_pool(world).run(_against_the_full_matrix, *shape, scales) == [[]] * world


def _same_as_whole(
    full: Tensor, shard: Callable[[Tensor], nn.Parameter], given: dict[str, Any], options: dict[str, Any]
) -> bool:
    """A step of this rank's shard and one of the whole tensor give the shard the same bits.

    Args:
        full: The whole tensor.
        shard: Cuts this rank's part, as it is marked.
        given: What the shard's group says besides.
        options: Of both groups.
    """
    whole, mine = nn.Parameter(full.clone()), shard(full)
    whole.grad = _normal(*full.shape, seed=2)
    mine.grad = shard(whole.grad).detach()
    Muon([{"params": [("w", mine)], **given, **options}], lr=0.1, tp_group=dist.group.WORLD).step()
    Muon([{"params": [("w", whole)], **options}], lr=0.1).step()
    return torch.equal(mine, shard(whole.detach()))


STRIDES_AND_HEADS: dict[str, tuple[tuple[int, ...], int, int, dict[str, Any]]] = {
    "fused gate and up": ((32, 10), 0, 2, {"split_sizes": (16, 16)}),
    "three blocks along columns": ((5, 48), 1, 3, {}),
    "heads": ((16, 6), 0, 1, {"num_heads": 8}),
    "two query groups over four ranks": ((24, 6), 0, 1, {"split_sizes": (8, 2, 2), "split_groups": 2}),
    "one query group over four ranks": ((12, 6), 0, 1, {"split_sizes": (8, 2, 2)}),
    "experts, columns": ((3, 4, 8), 2, 1, {"view": "stack"}),
}


def _strides_and_heads() -> list[str]:
    """Names of the cases that differ."""
    rank, world = dist.get_rank(), dist.get_world_size()

    def same(shape: tuple[int, ...], dim: int, stride: int, options: dict[str, Any]) -> bool:
        def shard(t: Tensor) -> nn.Parameter:
            return _mark(_megatron_part(t, dim, stride, world, rank), dim, stride)

        return _same_as_whole(_normal(*shape, seed=1), shard, {}, options)

    return [name for name, case in STRIDES_AND_HEADS.items() if not same(*case)]


def test_strides_heads_and_fewer_query_groups_than_ranks(world4: RankPool) -> None:
    assert world4.run(_strides_and_heads) == [[]] * 4


def _uneven(sizes: tuple[int, ...], dim: int) -> bool:
    """Shards of any sizes, named by the options of the group instead of attributes."""
    full = _normal(sum(sizes), sum(sizes), seed=3)

    def shard(t: Tensor) -> nn.Parameter:
        return nn.Parameter(t.split(sizes, dim)[dist.get_rank()].clone())

    options = {"num_heads": 3 if sum(sizes) % 3 == 0 else None}
    return _same_as_whole(full, shard, {"partition_dim": dim}, options)


@pytest.mark.parametrize("sizes", [(7, 0, 5), (1, 2, 3), (4, 3, 3)])
@pytest.mark.parametrize("dim", [0, 1])
def test_shards_of_any_sizes_need_no_more_than_their_dim(sizes: tuple[int, ...], dim: int, world3: RankPool) -> None:
    assert world3.run(_uneven, sizes, dim) == [True] * 3


# ------------------------------------------------------------------------------------------ with data parallel replicas


def _groups_of_a_mesh(order: tuple[int, ...]) -> dict[str, Any]:
    """tp 2 x dp 2, ranks laid out in this order. torch's groups sort their ranks: any other order is given as ranks."""
    rank = dist.get_rank()
    tp = next(pair for pair in (order[:2], order[2:]) if rank in pair)
    dp = next(pair for pair in (order[::2], order[1::2]) if rank in pair)
    if order != (0, 1, 2, 3):
        return {"tp_group": tp, "process_group": dp}
    mesh = mesh_of((2, 2))
    return {"tp_group": mesh.get_group("a1"), "process_group": mesh.get_group("a0")}


def _tp_and_dp(order: tuple[int, ...]) -> tuple[bool, int, int, set[tuple[int, ...]]]:
    groups = _groups_of_a_mesh(order)
    position = order.index(dist.get_rank()) % 2
    shapes = {"a": (8, 6), "b": (6, 8), "c": (12, 5), "d": (8, 6)}
    full = {name: nn.Parameter(_normal(*shape, seed=5)) for name, shape in shapes.items()}
    params = {
        name: nn.Parameter(p.detach().clone()) if name == "d" else _mark(p.detach().chunk(2, 0)[position], 0)
        for name, p in full.items()
    }
    ours = Muon(list(params.items()), lr=0.1, **groups)
    dense = Muon(list(full.items()), lr=0.1)
    for name, p in full.items():
        p.grad = _normal(*p.shape, seed=6)
        params[name].grad = p.grad.clone() if name == "d" else p.grad.chunk(2, 0)[position].clone()
    ours.step()
    dense.step()
    equal = all(
        torch.equal(params[name], p.detach() if name == "d" else p.detach().chunk(2, 0)[position])
        for name, p in full.items()
    )
    return equal, ours.traffic.orthogonalized, ours.traffic.exchanges, {spec.layout.ranks for spec in ours.plan.specs}


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (3, 1, 0, 2)])
def test_replicas_of_shards_share_the_work_and_each_matrix_is_done_once(
    order: tuple[int, ...], world4: RankPool
) -> None:
    found = world4.run(_tp_and_dp, order)
    assert all(equal for equal, *_ in found)
    assert [runs for _, runs, _, _ in found] == [1, 1, 1, 1]
    # one gather, one scatter, one relay to the other replica
    assert all((exchanges, sharers) == (3, {(0, 1, 2, 3)}) for _, _, exchanges, sharers in found)


def _norm(order: tuple[int, ...]) -> tuple[float, float]:
    groups = _groups_of_a_mesh(order)
    position = order.index(dist.get_rank()) % 2
    shapes = {"w": (8, 6), "bias": (8,), "norm": (6,)}
    grads = {name: _normal(*shape, seed=7) for name, shape in shapes.items()}
    cut = {name: g if name == "norm" else g.chunk(2, 0)[position].clone() for name, g in grads.items()}
    params = {n: nn.Parameter(torch.zeros_like(g)) if n == "norm" else _mark(g * 0, 0) for n, g in cut.items()}
    vectors = [(name, params[name]) for name in ("bias", "norm")]
    optimizer = Muon([{"params": [("w", params["w"])]}, {"params": vectors, "use_muon": False}], lr=1e-3, **groups)
    for name, p in params.items():
        p.grad = cut[name]
    exact = sum(float(g.double().square().sum()) for g in grads.values()) ** 0.5
    return float(clip_grad_norm_(optimizer, 1e9)), exact


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)])
def test_the_gradient_norm_counts_each_element_once(order: tuple[int, ...], world4: RankPool) -> None:
    for found, exact in world4.run(_norm, order):
        assert_rounded(found, exact, roundings=1, dtype=torch.float32)  # summed in fp64, stored in fp32


def _experts() -> tuple[bool, list[int]]:
    """Dense weights on tp 4; experts on expert-tp 2 x expert-dp 2, by the groups of their own param group."""
    rank = dist.get_rank()
    inner = _groups_of_a_mesh((0, 1, 2, 3))
    dense, expert = nn.Parameter(_normal(8, 6, seed=1)), nn.Parameter(_normal(8, 6, seed=2))
    mine = [
        _mark(dense.detach().chunk(4, 0)[rank], 0),
        _mark(expert.detach().chunk(2, 1)[rank % 2], 1, allreduce=False),
    ]
    groups = [{"params": [("dense", mine[0])]}, {"params": [("expert", mine[1])], **inner}]
    ours = Muon(groups, lr=0.1, tp_group=dist.group.WORLD)
    whole = Muon([dense, expert], lr=0.1)
    dense.grad, expert.grad = _normal(8, 6, seed=3), _normal(8, 6, seed=4)
    mine[0].grad, mine[1].grad = dense.grad.chunk(4, 0)[rank].clone(), expert.grad.chunk(2, 1)[rank % 2].clone()
    ours.step()
    whole.step()
    same = torch.equal(mine[0], dense.chunk(4, 0)[rank]) and torch.equal(mine[1], expert.chunk(2, 1)[rank % 2])
    return same, [len(spec.layout.ranks) for spec in ours.plan.specs]


def test_experts_have_groups_of_their_own(world4: RankPool) -> None:
    assert world4.run(_experts) == [(True, [4, 4])] * 4


# --------------------------------------------------------------------------------------------------------- one process


def test_one_process_without_torch_distributed_needs_a_group_of_its_own_rank() -> None:
    full, shard = nn.Parameter(_normal(8, 6, seed=1)), _mark(_normal(8, 6, seed=1), 0, stride=2)
    full.grad, shard.grad = _normal(8, 6, seed=2), _normal(8, 6, seed=2)
    Muon([full], lr=0.1).step()
    Muon([shard], lr=0.1, tp_group=(0,)).step()
    assert torch.equal(full, shard)


@pytest.mark.parametrize(
    "marks",
    [{"tensor_model_parallel": True}, {"tensor_model_parallel": True, "partition_dim": 0}, {"partition_dim": 1}],
)
def test_a_marked_shard_without_a_group_is_refused_by_name(marks: dict[str, Any]) -> None:
    param = _marked(_normal(4, 6, seed=0), marks)
    before, param.grad = param.detach().clone(), torch.ones(4, 6)
    with pytest.raises(ValueError, match=r"layer\.w: its attribute tensor_model_parallel.*\n?.*tp_group="):
        Muon([("layer.w", param)], lr=1e-3).step()
    assert torch.equal(param, before)


@pytest.mark.parametrize("marks", [{"tensor_model_parallel": False, "partition_dim": 0}, {"partition_dim": -1}])
def test_a_tensor_that_is_marked_as_whole_is_whole(marks: dict[str, Any]) -> None:
    param = _marked(_normal(4, 6, seed=0), marks)
    for group in (None, (0,)):
        assert [(i.rows, i.cols, i.route) for i in Muon([param], lr=1e-3, tp_group=group).prepare().items] == [
            (4, 6, "local")
        ]


@pytest.mark.parametrize(
    ("options", "marks", "text"),
    [
        ({"partition_dim": 0}, {}, "w: partition_dim=0 says that it is cut, but no tp_group says over which ranks"),
        ({"tp_group": (0,), "partition_dim": 2}, {}, r"w: the option partition_dim=2 is no dim of shape \(4, 6\)"),
        ({"tp_group": (0,)}, {"partition_dim": 5}, r"w: its attribute partition_dim=5 is no dim of shape \(4, 6\)"),
        ({"tp_group": (0,)}, {"tensor_model_parallel": True}, "w: .* it has no attribute partition_dim"),
        ({"tp_group": (0,), "partition_dim": 0, "partition_stride": 0}, {}, "w: partition_stride=0 must be a whole"),
        ({"tp_group": (1, 2)}, {}, r"tp_group has ranks \(1, 2\), and rank 0 is not among them"),
        ({"tp_group": "tp"}, {}, "tp_group='tp' is no process group"),
        ({"tp_group": -100}, {}, r"tp_group=-100 is what new_group\(\) gives a rank that it leaves out, here rank 0"),
        ({"tp_group": (0, 0)}, {}, r"tp_group=\(0, 0\) must be a process group or different global ranks"),
        ({"eps": 0.0}, {}, r"group 0: eps=0.0 must be above 0"),
        ({"eps": -1e-7}, {}, r"group 0: eps=-1e-07 must be finite and at least 0"),
    ],
)
def test_options_that_mean_nothing_are_refused_when_they_are_given(
    options: dict[str, Any], marks: dict[str, Any], text: str
) -> None:
    param = _marked(_normal(4, 6, seed=0), marks)
    with pytest.raises(ValueError, match=text):
        Muon([{"params": [("w", param)], **options}], lr=1e-3)


def _dtensor_with_partition_dim() -> str:
    param = nn.Parameter(LAYOUTS["fsdp2"].build({"w": torch.ones(4, 4)}, (2,))["w"])
    with pytest.raises(ValueError, match="w: partition_dim=0 is for plain tensors") as caught:
        Muon([{"params": [("w", param)], "partition_dim": 0}], lr=1e-3, tp_group=dist.group.WORLD)
    return str(caught.value)


def test_a_dtensor_takes_no_partition_dim(world2: RankPool) -> None:
    assert all("which says itself how it is cut" in text for text in world2.run(_dtensor_with_partition_dim))


def test_an_expert_takes_no_group_from_the_optimizer_unsaid() -> None:
    expert = nn.Parameter(_normal(4, 6, seed=0))
    expert.allreduce = False  # type: ignore[attr-defined]
    with pytest.raises(
        ValueError, match=r"e: its attribute allreduce=False marks an expert's parameter.*tp_group would"
    ):
        Muon([("e", expert)], lr=1e-3, tp_group=(0,))
    Muon([{"params": [("e", expert)], "tp_group": ()}], lr=1e-3, tp_group=(0,)).prepare()
    Muon([{"params": [("e", expert)], "rank_local": True}], lr=1e-3, tp_group=(0,)).prepare()


def test_groups_are_neither_saved_nor_lost_by_loading() -> None:
    param = _mark(_normal(4, 6, seed=0), 0)
    optimizer = Muon([{"params": [("w", param)], "partition_stride": 2}], lr=1e-3, tp_group=(0,))
    param.grad = torch.ones(4, 6)
    optimizer.step()
    saved = optimizer.state_dict()
    assert all(saved["param_groups"][0][key] is None for key in ("tp_group", "process_group", "partition_stride"))
    optimizer.load_state_dict(copy.deepcopy(saved))
    assert optimizer.param_groups[0]["tp_group"] == GroupRef((0,))
    assert optimizer.param_groups[0]["partition_stride"] == 2
    for again in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert again.param_groups[0]["tp_group"] == GroupRef((0,))


# ---------------------------------------------------------------------------------------------- refused on every rank


Refusal = Callable[[int], tuple[list[Tensor], dict[str, Any], dict[str, Any]]]
# case -> of a rank: its parameters, what else their group says, and the optimizer's groups of ranks
REFUSED: dict[str, Refusal] = {
    "other dims": lambda rank: ([_mark(torch.ones(4, 6 + rank // 3), 0)], {}, {}),
    "other dim cut": lambda rank: ([_mark(torch.ones(4, 6), rank // 3)], {}, {}),
    "one more": lambda rank: ([_mark(torch.ones(4, 6), 0), _mark(torch.ones(2, 6), 0)][: 1 + rank // 3], {}, {}),
    "empty": lambda rank: ([_mark(torch.ones(0, 6), 0)], {}, {}),
    "stride": lambda rank: ([_mark(torch.ones(3 + rank % 2, 6), 0, stride=2)], {}, {}),
    "splits": lambda rank: ([_mark(torch.ones(4, 6), 0)], {"split_sizes": (4, 4)}, {}),
    "unequal groups": lambda rank: (
        [_mark(torch.ones(4, 6), 0)],
        {},
        {"tp_group": (1, 2, 3) if rank else (0,), "process_group": (0, 1) if rank < 2 else None},
    ),
    "dp over tp": lambda rank: (
        [_mark(torch.ones(4, 6), 0)],
        {},
        {"tp_group": (0, 1) if rank < 2 else (2, 3), "process_group": dist.group.WORLD},
    ),
    "replicas differ": lambda rank: ([nn.Parameter(torch.full((4, 6), float(rank)))], {}, {}),
}


def _refused(case: str) -> str:
    """Errors of each rank; nobody may hang and nothing may have changed."""
    params, group, groups = REFUSED[case](dist.get_rank())
    for p in params:
        p.grad = torch.ones_like(p)
    before = [p.detach().clone() for p in params]
    named = list(zip("wv", params, strict=False))
    optimizer = Muon([{"params": named, **group}], lr=1e-3, **{"tp_group": dist.group.WORLD, **groups})
    with pytest.raises(ValueError, match=r"ranks|rows|shape|stride") as caught:
        optimizer.step()
    assert all(torch.equal(a, p) for a, p in zip(before, params, strict=True))
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "texts"),
    [
        ("other dims", ["ranks (0, 1, 2, 3) share", 'rank 0 lists "w: (any, 6)', 'rank 3 lists "w: (any, 7)']),
        ("other dim cut", ['rank 0 lists "w: (any, 6)', 'rank 3 lists "w: (4, any), a plain tensor cut along dim 1']),
        ("one more", ["rank 0 lists 1 parameters, rank 3 lists 2", 'one of them lacks "v: (any, 6)']),
        ("empty", ["w: ranks (0, 1, 2, 3) store shapes [(0, 6)", "shape (0, 6) has no elements"]),
        ("stride", ["w: ranks (0, 1, 2, 3)", "partition_stride=2 says", "(3, 4, 3, 4) indices along dim 0"]),
        ("splits", ["w: ranks (0, 1, 2, 3) store", "split_sizes=(4, 4) sum to 8, but there are 16 rows"]),
        ("unequal groups", ["process_group (0, 1), which form no grid", "and has (1, 2, 3) and (0, 1)"]),
        ("dp over tp", ["process_group (0, 1, 2, 3), which form no grid", "one of each tensor-parallel group"]),
        ("replicas differ", ["w: ranks 0 and 1 should hold replicas"]),
    ],
)
def test_what_does_not_fit_is_refused_with_its_numbers_on_every_rank(
    case: str, texts: list[str], world4: RankPool
) -> None:
    for found in world4.run(_refused, case):
        assert all(text in found for text in texts), found


# ------------------------------------------------------------------------------------------------ models and lifetime


def _model_of_shards() -> tuple[list[tuple[str, tuple[int, ...], str]], tuple[int, ...], bool]:
    """A Megatron-like model: the module alone, no list of parameters."""
    model = nn.Sequential(nn.Linear(6, 4, bias=False), nn.LayerNorm(4), nn.Linear(4, 6, bias=False))
    for layer, dim in ((model[0], 0), (model[2], 1)):
        for key, value in zip(MARKS, (True, dim, 1), strict=True):
            setattr(layer.weight, key, value)
    optimizer = Muon(model, lr=0.1, tp_group=dist.group.WORLD)
    model(_normal(3, 6, seed=0)).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match=r"0\.weight has tensor_model_parallel=True.*tp_group="):
        param_groups(model, lr=1e-3)
    rows = param_groups(model, lr=1e-3, tp_group=dist.group.WORLD).rows
    shape = engine_for(model[2].weight, optimizer.param_groups[0]).shape(model[2].weight)
    return [(r.name, r.shape, r.optimizer) for r in rows], shape, bool(optimizer.plan.items)


def test_a_model_of_shards_is_routed_by_its_global_shapes(world2: RankPool) -> None:
    for rows, shape, planned in world2.run(_model_of_shards):
        assert rows[0] == ("0.weight", (8, 6), "Muon")
        assert rows[3] == ("2.weight", (6, 8), "Muon")
        assert rows[1][2] == "AdamW"
        assert shape == (6, 8)
        assert planned


def test_experts_of_a_model_get_their_groups_by_an_override() -> None:
    model = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(4, 6, bias=False))
    model[1].weight.allreduce = False  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"1\.weight: its attribute allreduce=False marks an expert's parameter"):
        param_groups(model, lr=1e-3, tp_group=(0,))
    groups = param_groups(model, lr=1e-3, tp_group=(0,), overrides={"1.*": {"tp_group": (), "process_group": ()}})
    assert [g["tp_group"] for g in groups] == [GroupRef((0,)), ()]
    optimizer = Muon(groups, lr=1e-3)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert [item.route for item in optimizer.plan.items] == ["local", "local"]
