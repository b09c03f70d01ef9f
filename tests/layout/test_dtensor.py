"""Tests of how shardmuon reads DTensor placements: the elements that it derives from them must be exactly those that
torch's FSDP2 and tensor parallelism store on each rank."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from simulated import stored
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shardmuon import Muon
from shardmuon.layout.engines import engine_of
from shardmuon.layout.engines.dtensor import DTensorEngine
from shardmuon.layout.mesh import same_storage
from shardmuon.testing.layouts import mesh_of, parameters
from shardmuon.testing.pool import RankPool

Case = tuple[tuple[int, int], tuple[int, ...], int]


def _fits(param: torch.Tensor, full: torch.Tensor) -> bool:
    """Return whether the elements derived from the DTensor's placements are exactly those that this rank stores."""
    assert isinstance(param, DTensor)
    storage, (shape, place) = engine_of(param).storage(param), DTensorEngine().claim(param, {}).form
    held, implied = place.reading(shape)[dist.get_rank()]
    return same_storage(implied, tuple(storage.shape)) and torch.equal(stored(held, full).flatten(), storage.flatten())


def _fsdp_over_tp(cases: list[Case]) -> list[bool]:
    """Shard one weight per case with tensor parallelism and then with FSDP2. Return, for each case, whether the
    weight's placements describe exactly the elements that this rank stores. Cases on the same mesh share one module and
    one call to `fully_shard`."""
    fulls = [torch.arange(float(rows * cols)).view(rows, cols) for (rows, cols), _, _ in cases]
    params: dict[str, torch.Tensor] = {}
    for mesh_shape in dict.fromkeys(mesh for _, mesh, _ in cases):
        mesh = mesh_of(mesh_shape)
        tensors = {
            f"w{i}": distribute_tensor(fulls[i].clone(), mesh["a1"], [Shard(tp_dim)], src_data_rank=None)
            for i, (_, its_mesh, tp_dim) in enumerate(cases)
            if its_mesh == mesh_shape
        }
        module = nn.ParameterDict(parameters(tensors))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Suppress torch's warning that nn.ParameterDict has no forward method.
            fully_shard(module, mesh=mesh["a0"])
        params |= {name: module[name].detach() for name in tensors}
    return [_fits(params[f"w{i}"], full) for i, full in enumerate(fulls)]


# The number of rows ranges from 1 to more than the number of ranks. FSDP shards rows, and TP shards rows or columns. A
# single loop varies the numbers of rows and columns together, because the two dims are sharded independently.
ROWS: list[Case] = [
    ((rows, 3 if tp_dim == 0 else 2 + rows % 8), mesh, tp_dim)
    for mesh in ((4, 2), (2, 4), (8, 1), (1, 8))
    for tp_dim in (0, 1)
    for rows in range(1, 14)
]


def test_placements_name_what_fully_shard_stores_for_every_number_of_rows(world8: RankPool) -> None:
    for case, *first in zip(ROWS, *world8.run(_fsdp_over_tp, ROWS), strict=True):
        assert all(first), f"{case}: wrong on ranks {[r for r, ok in enumerate(first) if not ok]}"


def _empty_gradient_of_another_shape() -> tuple[list[int], bool]:
    """Take a step on a matrix with a single row, sharded over two ranks. On the second rank, the shard and its gradient
    are empty but have different shapes, as in some frameworks. Return the shape of this rank's gradient, and whether
    the full weight equals that of a single-process step."""
    mesh, rank = mesh_of((2,)), dist.get_rank()
    param = nn.Parameter(distribute_tensor(torch.ones(1, 6), mesh, [Shard(0)], src_data_rank=None))
    full = torch.arange(6.0).view(1, 6)
    local = full if rank == 0 else torch.empty(0, 0)
    param.grad = DTensor.from_local(local, mesh, [Shard(0)], shape=full.shape, stride=(6, 1), run_check=False)
    Muon([("w", param)], lr=0.1, weight_decay=0.0).step()
    alone = nn.Parameter(torch.ones(1, 6))
    alone.grad = full
    Muon([("w", alone)], lr=0.1, weight_decay=0.0).step()
    return list(param.grad.to_local().shape), torch.equal(param.full_tensor(), alone)


def test_an_empty_gradient_may_have_another_shape_than_the_empty_shard(world2: RankPool) -> None:
    assert world2.run(_empty_gradient_of_another_shape) == [([1, 6], True), ([0, 0], True)]
