"""The headline without any option about arithmetic: a fresh process and every layout have the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import one_arithmetic
import pytest
import torch.distributed as dist
from one_arithmetic import CASES, digests, drawn, stepped_alone
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardmuon import Muon, Orthogonalizer
from shardmuon.testing.compare import compare_with_dense
from shardmuon.testing.frameworks import FSDP1_ROWS, ZERO_ROWS, Fsdp1Run, ZeroRun
from shardmuon.testing.layouts import groups_of, mesh_of
from shardmuon.testing.pool import RankPool


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Digests of a process that has nothing but its gradients: no home that it could write to, no cache, no file."""
    home = tmp_path_factory.mktemp("home")
    home.chmod(0o555)
    yield _in_a_fresh_process(home)
    assert list(home.iterdir()) == []


def _in_a_fresh_process(home: Path) -> dict[str, str]:
    dropped = ("XDG_CACHE_HOME", "SHARDMUON_CACHE")
    env = {key: value for key, value in os.environ.items() if key not in dropped}
    env |= {"HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, one_arithmetic.__file__]
    out = subprocess.run(command, env=env, capture_output=True, text=True, check=True, cwd=home).stdout
    found: dict[str, str] = json.loads(out)
    return found


def test_an_optimizer_over_one_matrix_each_equals_one_over_all(fresh: dict[str, str]) -> None:
    """Other neighbours in the batch, or none."""
    assert stepped_alone() == fresh
    assert stepped_alone(apart=True) == fresh


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _placed(full: dict[str, Tensor], layout: str) -> dict[str, Tensor]:
    """Parameters, or gradients for them, of a DTensor layout, or plain ones."""
    world = dist.get_world_size()
    half = (2, world // 2)
    placements: dict[str, Any] = {
        "hsdp": (half, [Replicate(), Shard(0)]),
        "tp rows": ((world,), [Shard(0)]),
        "tp columns": ((world,), [Shard(1)]),
        "fsdp x tp": (half, [Shard(0), Shard(1)]),
        "replicate": ((world,), [Replicate()]),
    }
    if layout not in placements:
        return {name: t.clone() for name, t in full.items()}
    mesh, placed = placements[layout]
    return {name: distribute_tensor(t, mesh_of(mesh), placed) for name, t in full.items()}


def _on_tensors(layout: str) -> dict[str, str]:
    """Layouts whose parameters are DTensors or plain replicas."""
    full, grads = drawn()
    options: dict[str, Any] = {"process_group": dist.group.WORLD} if layout == "ddp" else {}
    params = {name: nn.Parameter(t) for name, t in _placed(full, layout).items()}
    optimizer = Muon(list(params.items()), lr=0.02, **options)
    for of_step in grads:
        for name, grad in _placed(of_step, layout).items():
            params[name].grad = grad
        optimizer.step()
    return digests({name: _whole(p.detach()) for name, p in params.items()})


class _Model(nn.Module):
    def __init__(self, full: dict[str, Tensor]) -> None:
        super().__init__()
        for name, t in full.items():
            self.register_parameter(name, nn.Parameter(t.clone()))


def _on_fsdp2() -> dict[str, str]:
    full, grads = drawn()
    model = _Model(full)
    fully_shard(model, mesh=mesh_of((dist.get_world_size(),)))
    params = dict(model.named_parameters())
    optimizer = Muon(list(params.items()), lr=0.02)
    for of_step in grads:
        for name, grad in of_step.items():
            p = params[name]
            assert isinstance(p, DTensor)
            p.grad = distribute_tensor(grad, p.device_mesh, p.placements)
        optimizer.step()
    return digests({name: _whole(p.detach()) for name, p in params.items()})


def _on_framework(row: str) -> dict[str, str]:
    """DeepSpeed's ZeRO, and FSDP1."""
    full, grads = drawn()

    def make(params: Any, options: Any) -> Muon:
        return Muon(groups_of(params, CASES), lr=0.02, **options)

    run: Any = (
        ZeroRun(row, full, make, next(iter(full.values())).dtype) if row in ZERO_ROWS else Fsdp1Run(row, full, make)
    )
    for of_step in grads:
        run.step(of_step)
    found = digests(run.weights())
    run.close()
    return found


MEGATRON = ("megatron-fsdp", "megatron-fsdp+tp", "tp column", "tp row", "tp x dp", "mcore buffers", "mcore buffers+tp")
TENSORS = ("ddp", "replicas apart", "replicate", "tp rows", "tp columns")


def on_ranks(layouts: Sequence[str]) -> list[Any]:
    """Each layout on 4 ranks, and on 2 and 3 in turn; FSDP2 on all. 4 meet both arithmetics: who multiplies does not
    depend on how products round."""
    few = [(2, name) for name in layouts[::2]] + [(3, name) for name in layouts if name not in layouts[2::2]]
    return [*(pytest.param(*pair, marks=pytest.mark.stated) for pair in few), *((4, name) for name in layouts)]


@pytest.mark.parametrize(
    ("world", "layout"), on_ranks(["fsdp2", *TENSORS, *(name for name in FSDP1_ROWS if name != "fsdp1 hybrid")])
)
def test_every_layout_has_the_bits_of_a_fresh_process(
    world: int, layout: str, fresh: dict[str, str], request: pytest.FixtureRequest
) -> None:
    pool: RankPool = request.getfixturevalue(f"world{world}")
    if layout == "fsdp2":
        found = pool.run(_on_fsdp2)
    elif layout in FSDP1_ROWS:
        found = pool.run(_on_framework, layout)
    else:
        found = pool.run(_on_tensors, layout)
    assert found == [fresh] * world


@pytest.mark.parametrize("layout", ["hsdp", "fsdp x tp", "fsdp1 hybrid"])
def test_meshes_of_two_axes_too(layout: str, fresh: dict[str, str], world4: RankPool) -> None:
    found = world4.run(_on_framework if layout in FSDP1_ROWS else _on_tensors, layout)
    assert found == [fresh] * 4


@pytest.mark.parametrize(
    ("world", "row"),
    [
        *((3, f"zero{stage}") for stage in range(4)),
        *(pytest.param(2, r, marks=pytest.mark.stated) for r in ("zero1", "zero3")),
    ],
)
def test_deepspeeds_partitions_too(
    world: int, row: str, fresh: dict[str, str], deepspeed_pools: dict[int, RankPool]
) -> None:
    assert deepspeed_pools[world].run(_on_framework, row) == [fresh] * world


def _on_row(layout: str) -> bool:
    """A row of the table of layouts, beside one process in this rank, whose bits are a fresh process's."""
    return compare_with_dense(
        layout, orthogonalizer=Orthogonalizer(), lr=0.02, steps=2, table=CASES, remember=True
    ).bitwise


@pytest.mark.parametrize(("world", "layout"), on_ranks(MEGATRON))
def test_megatrons_shards_too(world: int, layout: str, request: pytest.FixtureRequest) -> None:
    pool: RankPool = request.getfixturevalue(f"world{world}")
    assert pool.run(_on_row, layout) == [True] * world
