"""Steps of `Muon` on real ranks: who may lack a gradient, and the process groups of exchanges.

Every layout with plain options: test_equality.py; with gradients that are missing and AdamW's vectors: test_golden.py.
Variants and stores on all layouts: test_variants_layouts.py, test_momentum.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from shardmuon import Muon
from shardmuon._torch import local_if_any
from shardmuon.comm import groups
from shardmuon.testing import RankPool
from shardmuon.testing.compare import rows_stored
from shardmuon.testing.layouts import LAYOUTS, PARAMS, groups_of, parameters
from shardmuon.variants import KEPT_KEYS

LACKING = {0: ("square",), 1: ("wide", "experts"), 2: ()}  # step -> have no gradient on any rank
NORMS = {"variant": "normuon+hyperball", "weight_decay": 0.0}
ROUNDED = {"stochastic_rounding": True, "momentum_dtype": torch.float32}


def _beside_one_process(layout: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    """Empty shards have no gradient in any step. After each, weights and all state have the bits of one process."""
    row, world = LAYOUTS[layout], dist.get_world_size()
    mesh, empty = row.mesh(world), 0
    torch.manual_seed(3)
    start, *steps = [{name: torch.randn(case.shape).to(dtype) for name, case in PARAMS.items()} for _ in range(4)]
    mine, whole = parameters(row.build(start, mesh)), {name: torch.nn.Parameter(t.clone()) for name, t in start.items()}
    pair = [
        Muon(groups_of(params, PARAMS), lr=0.02, bucket_bytes=3000, **given)
        for params, given in ((mine, {**row.options(world), **options}), (whole, options))
    ]
    numbers = {name: torch.arange(t.numel(), dtype=torch.float64).view(t.shape) for name, t in start.items()}
    stored = {name: local_if_any(t).long().flatten() for name, t in row.build(numbers, mesh).items()}
    for step, full in enumerate(steps):
        for name, grad in row.build(full, mesh).items():
            nothing = not local_if_any(grad).numel()
            empty += nothing
            mine[name].grad = None if nothing or name in LACKING[step] else grad
            whole[name].grad = None if name in LACKING[step] else full[name]
        for optimizer in pair:
            optimizer.step()
        for name, p in mine.items():
            found, wanted = ({"weight": x, **o.state[x]} for o, x in zip(pair, (p, whole[name]), strict=True))
            assert found.keys() == wanted.keys(), (name, step)
            for key, here in found.items():
                there = wanted[key].detach()
                there = rows_stored(there, here) if key in (*KEPT_KEYS, "step") else there.flatten()[stored[name]]
                here = local_if_any(here).detach()
                assert torch.equal(here, there.view(here.shape)), f"step {step}, {key} of {name}"
    assert empty or dist.get_rank() == 0
    storing: list[Any] = [None] * world
    dist.all_gather_object(storing, local_if_any(mine["square"]).numel() > 0)
    if dist.get_rank() == max(rank for rank, some in enumerate(storing) if some):
        mine["square"].grad = None
    before = {name: local_if_any(p).detach().clone() for name, p in mine.items()}
    with pytest.raises(ValueError, match=r"square: .*(have no gradient.* have a gradient|a gradient.*no grad)"):
        pair[0].step()
    assert all(torch.equal(before[name], local_if_any(p)) for name, p in mine.items())


@pytest.mark.parametrize(
    ("layout", "options", "dtype"),
    [
        ("megatron-fsdp", NORMS, torch.float32),
        ("megatron-fsdp hfsdp", ROUNDED, torch.bfloat16),
        ("megatron-fsdp+tp", {"variant": "muon_eq+normuon"}, torch.bfloat16),
        ("megatron-fsdp+tp", NORMS, torch.float32),
    ],
    ids=str,
)
def test_ranks_that_store_nothing_need_no_gradient(
    layout: str, options: dict[str, Any], dtype: torch.dtype, world4: RankPool
) -> None:
    """Megatron-FSDP gives empty shards none; what the others have, they hear in the vote. A rank that stores some of a
    matrix and lacks its gradient is named on all."""
    world4.run(_beside_one_process, layout, options, dtype)


# ------------------------------------------------------------------------------------------------------ process groups


def _takes_the_group(kind: str) -> bool:
    """True if exchanges use the process group of a mesh of one axis, or that the optimizer was given: on all ranks of
    it, or on one alone."""
    if kind == "mesh":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pairs", "within"))["within"]
        own = mesh.get_group()
    else:
        own = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][dist.get_rank() // 2]
    ranks = tuple(dist.get_process_group_ranks(own))
    made = groups.MADE.setdefault(dist.group.WORLD, groups.Made()).groups
    if ranks in made:  # let go of the one that another test has made; the number stays: names differ
        made[ranks] = made[ranks][0], lambda: None
    whole = [torch.ones(6, 8), torch.eye(6, 8)]
    param, grad = (DTensor.from_local(t[:3], mesh, [Shard(0)]) for t in whole) if kind == "mesh" else whole
    params = [torch.nn.Parameter(param.clone()) for _ in range(3)]
    given = None if kind == "mesh" else ranks if kind == "one alone" and dist.get_rank() % 2 == 0 else own
    optimizer = Muon([(f"w{i}", p) for i, p in enumerate(params)], lr=0.1, process_group=given)
    for p in params:
        p.grad = grad.clone()
    optimizer.step()
    assert optimizer.traffic.exchanges > 0
    return groups.group_for(ranks) is own


@pytest.mark.parametrize(("kind", "used"), [("mesh", True), ("all", True), ("one alone", False)])
def test_exchanges_use_the_group_of_their_mesh_or_one_that_all_were_given(
    kind: str, used: bool, world4: RankPool
) -> None:
    """Exchanges use its communicators and time-out; where one rank was given ranks alone, all of them make another
    group."""
    assert world4.run(_takes_the_group, kind) == [used] * 4


def _copied_and_unlike() -> str:
    """Error of a deep copy for a replica whose gradient is missing on one rank."""
    param = torch.nn.Parameter(torch.ones(6, 8))
    made = copy.deepcopy(Muon([("w", param)], lr=0.1, process_group=dist.group.WORLD))
    (copied,) = made.param_groups[0]["params"]
    copied.grad = torch.eye(6, 8)
    made.step()
    copied.grad = None if dist.get_rank() == 1 else copied.grad
    with pytest.raises(ValueError, match=r"w: ranks \[1\] have no gradient, ranks \[0\] have a gradient") as caught:
        made.step()
    return str(caught.value)


def test_a_deep_copy_shares_work_with_the_ranks_of_its_original(world2: RankPool) -> None:
    first, second = world2.run(_copied_and_unlike)
    assert first == second


def _doubles_on_two_of_three() -> tuple[bool, tuple[int, ...]]:
    torch.manual_seed(0)
    a, b = (torch.nn.Parameter(torch.randn(6, 4, dtype=dtype)) for dtype in (torch.float32, torch.float64))
    alone = torch.nn.Parameter(a.detach().clone())
    a.grad, b.grad = torch.randn_like(a), torch.randn_like(b)
    alone.grad = a.grad.clone()
    groups = [{"params": [("a", a)], "process_group": (0, 1, 2)}, {"params": [("b", b)], "process_group": (0, 1)}]
    together = Muon(groups[: 2 if dist.get_rank() < 2 else 1], lr=0.1)
    together.step()
    Muon([("a", alone)], lr=0.1).step()
    return torch.equal(a, alone), tuple(bucket.itemsize for bucket in together.plan.buckets)


def test_fp64_parameters_of_some_ranks_leave_the_wires_of_others_alone(world3: RankPool) -> None:
    """A wire is as wide as its parameters ask for."""
    found = world3.run(_doubles_on_two_of_three)
    assert [equal for equal, _ in found] == [True] * 3
    assert found[0][1] == found[1][1]
    assert sorted(found[0][1]) == sorted((*found[2][1], 8))
