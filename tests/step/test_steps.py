"""Tests of `Muon` steps on real ranks: process groups used for exchanges, deep copies of optimizers, and dtypes of
exchanged data."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from shardmuon import Muon
from shardmuon.comm import groups
from shardmuon.testing import RankPool

# ------------------------------------------------------------------------------------------------------ process groups


@pytest.mark.parametrize(("kind", "used"), [("mesh", True), ("all", True), ("one alone", False)])
@on_ranks(4)
def test_exchanges_use_the_group_of_their_mesh_or_one_that_all_were_given(kind: str, used: bool) -> None:
    """Exchanges must use the communicator and timeout of an existing process group. If some ranks pass only a tuple of
    ranks as `process_group`, all ranks of the tuple must create a new group instead."""
    if kind == "mesh":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pairs", "within"))["within"]
        own = mesh.get_group()
    else:
        own = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][dist.get_rank() // 2]
    ranks = tuple(dist.get_process_group_ranks(own))
    made = groups._MADE.setdefault(dist.group.WORLD, groups._Made()).groups
    # Forget the process group that another test has created for these ranks, but keep the number of groups created so
    # far, which makes the names of new process groups unique.
    if ranks in made:
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
    assert (groups.group_for(ranks) is own) == used


@on_ranks(2)
def test_a_deep_copy_shares_work_with_the_ranks_of_its_original() -> None:
    """The step of a copied optimizer must raise an error if one rank lacks the gradient of a replicated parameter."""
    param = torch.nn.Parameter(torch.ones(6, 8))
    given = Muon([("w", param)], lr=0.1, process_group=dist.group.WORLD)
    given.process_group = given.param_groups[0]["process_group"] = dist.group.WORLD
    made = copy.deepcopy(given)
    (copied,) = made.param_groups[0]["params"]
    copied.grad = torch.eye(6, 8)
    made.step()
    copied.grad = None if dist.get_rank() == 1 else copied.grad
    with pytest.raises(ValueError, match=r"w: ranks \[1\] have no gradient, ranks \[0\] have a gradient"):
        made.step()


@on_ranks(2)
def test_an_unpickled_group_without_this_rank_is_named() -> None:
    unpickled = groups.GroupRef((5, 6), "3")
    with pytest.raises(ValueError, match=r"process_group has ranks \(5, 6\), and rank \d is not among them"):
        Muon([("w", torch.nn.Parameter(torch.ones(6, 8)))], lr=0.1, process_group=unpickled)


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
    """The exchange of a bucket must not use fp64 if only parameters in other buckets require it."""
    found = world3.run(_doubles_on_two_of_three)
    assert [equal for equal, _ in found] == [True] * 3
    assert found[0][1] == found[1][1]
    assert sorted(found[0][1]) == sorted((*found[2][1], 8))
