"""Steps of `Muon` on real ranks: the process groups of exchanges, copies, and wires.

Every layout with plain options: test_equality.py; with gradients that are missing and AdamW's vectors: test_golden.py.
Variants and stores on all layouts: test_variants_layouts.py, test_momentum.py.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from shardmuon import Muon
from shardmuon.comm import groups
from shardmuon.testing import RankPool

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
    made = groups._MADE.setdefault(dist.group.WORLD, groups._Made()).groups
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
