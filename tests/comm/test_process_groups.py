"""Tests of the process groups that the optimizer creates: their ranks, their timeouts, and the optimizer's behavior
after process groups are destroyed and created again."""

from __future__ import annotations

import textwrap
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_to_the_end
from torch import nn

from shardmuon import Muon
from shardmuon._torch import new_group_among, timeout_of
from shardmuon.comm.groups import group_for
from shardmuon.testing import RankPool

OWN, PARENTS = timedelta(seconds=23), timedelta(seconds=17)


def _join(store: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=OWN)


def _own_and_destroyed(store: str) -> tuple[list[timedelta | None], str]:
    """Return a list of timeouts (of the default process group and of the groups that shardmuon creates), and the text
    of the error that `Muon.prepare` raises after the process groups have been destroyed."""
    _join(store)
    made = [timeout_of(dist.group.WORLD)]
    parent = dist.new_group([0, 1], timeout=PARENTS)
    halves = [dist.new_group([0, 1]), dist.new_group([2])]
    if dist.get_rank() < 2:
        made += [timeout_of(group_for((0, 1))), timeout_of(new_group_among((0, 1), 7, parent))]
    p = nn.Parameter(torch.ones(8, 6))
    optimizer = Muon([p], lr=0.1, process_group=halves[dist.get_rank() // 2])
    p.grad = torch.ones(8, 6)
    optimizer.step()
    _join(store + " again")
    # torch gives these groups of all ranks the names of the destroyed groups.
    assert optimizer.param_groups[0]["process_group"].group_name in [dist.new_group().group_name for _ in range(3)]
    with pytest.raises(ValueError, match="has been destroyed") as dead:
        optimizer.prepare()
    return made, str(dead.value)


@pytest.mark.ranks
@pytest.mark.apart
def test_own_groups_have_the_users_time_out_and_those_that_are_destroyed_are_named(tmp_path: Path) -> None:
    with RankPool(3, timeout=60.0) as pool:
        found = pool.run(_own_and_destroyed, str(tmp_path / "store"))
    assert [made for made, _ in found] == [[OWN, OWN, PARENTS], [OWN, OWN, PARENTS], [OWN]]
    assert [text for _, text in found] == [
        f"{ranks}: RuntimeError: the process group that parameters or the optimizer were made with has been destroyed. "
        "Make a new group, and parameters and optimizer with it"
        for ranks in ("ranks 0,1", "ranks 0,1", "rank 2")
    ]


@pytest.mark.parametrize("fails", [False, True])
def test_a_group_of_some_ranks_is_not_split_off_a_bound_default_group(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the default process group is bound to a device, torch creates each new group with `ncclCommSplit`, which waits
    for all ranks of the default group. The binding must therefore be removed while shardmuon creates a group that
    leaves out some of the ranks."""
    # `init_process_group(device_id=...)` sets `bound_device_id` of the default group.
    bound = torch.device("cuda", 3)
    world, seen = SimpleNamespace(bound_device_id=bound, _device_types=()), []

    def new_group(ranks: list[int], **options: Any) -> str:
        seen.append((ranks, world.bound_device_id, options["use_local_synchronization"]))
        if fails:
            raise RuntimeError("no store")
        return "made"

    monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", lambda: world)
    monkeypatch.setattr(dist, "new_group", new_group)
    with pytest.raises(RuntimeError, match="no store") if fails else nullcontext():
        assert new_group_among((0, 2), 1) == "made"
    assert (seen, world.bound_device_id) == ([([0, 2], None, True)], bound)


_LIVES = textwrap.dedent(
    """
    import os, sys
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from shardmuon import Muon

    rank, folder = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    kept, alive, sums = [], [], []
    for life in range(2):
        store = dist.FileStore(f"{folder}/store{life}", 4)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
        mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c"))
        torch.manual_seed(0)

        def cut(mesh, *placements):
            return nn.Parameter(distribute_tensor(torch.randn(9, 6), mesh, placements, src_data_rank=None))

        both = cut(mesh["a", "b"], Shard(0), Shard(1))
        row = cut(mesh["b", "c"], Shard(0), Replicate())  # two axes: no group of the mesh covers both
        plain = nn.Parameter(torch.randn(5, 5))
        pair = dist.new_group([0, 1] if rank < 2 else [2, 3], use_local_synchronization=True)
        optimizer = Muon([both, row, plain], lr=0.1, process_group=pair)
        for p in (both, row, plain):
            p.grad = p.detach().clone()
        optimizer.step()
        part = nn.Parameter(torch.ones(4, 6))
        part.tensor_model_parallel, part.partition_dim, part.partition_stride = True, 0, 1
        column = dist.new_group([0, 2] if rank % 2 == 0 else [1, 3], use_local_synchronization=True)
        parallel = Muon([("w", part)], lr=1e-3, tp_group=pair, process_group=column)
        part.grad = torch.ones(4, 6)
        parallel.step()
        sums.append([float(t.sum()) for t in (both.to_local(), row.to_local(), plain, part)])
        if life == 0:
            kept.append(optimizer)  # one optimizer outlives its groups, the other goes before them
        alive.append(parallel)  # all of these outlive theirs
        dist.destroy_process_group()
    assert all(s == sums[0] for s in sums), sums
    try:
        alive[0].prepare()
    except RuntimeError as error:
        assert "torch.distributed is not initialized" in str(error), error
        print("done")
    """
)


@pytest.mark.ranks
@pytest.mark.apart
def test_process_groups_may_end_and_begin_again_and_ranks_exit_cleanly(tmp_path: Path) -> None:
    """All ranks must exit with code 0. If a gloo thread outlived its process group, it would abort the process at exit,
    with the message `terminate called` and exit code -6."""
    for code, out, err in run_to_the_end(_LIVES, 4, tmp_path, str(tmp_path)):
        assert (code, out.strip()) == (0, "done") and "terminate called" not in err, err
