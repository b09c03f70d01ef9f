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
from one_arithmetic import CASES, stepped_alone

from shardmuon.testing.compare import compare_with_dense
from shardmuon.testing.pool import RankPool, get_pool


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Digests of a process that has nothing but its gradients: no home that it could write to, no cache, no file."""
    home = tmp_path_factory.mktemp("home")
    home.chmod(0o555)
    yield _in_a_fresh_process(home)
    assert list(home.iterdir()) == []


def _in_a_fresh_process(home: Path) -> dict[str, str]:
    dropped = ("XDG_CACHE_HOME",)
    env = {key: value for key, value in os.environ.items() if key not in dropped}
    env |= {"HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, one_arithmetic.__file__]
    out = subprocess.run(command, env=env, capture_output=True, text=True, check=True, cwd=home).stdout
    found: dict[str, str] = json.loads(out)
    return found


def test_an_optimizer_over_one_matrix_each_equals_one_over_all(fresh: dict[str, str], world2: RankPool) -> None:
    """Other neighbours in the batch, or none; in this process, in ranks, and in a fresh one."""
    assert stepped_alone() == fresh
    assert stepped_alone(apart=True) == fresh
    assert world2.run(stepped_alone) == [fresh, fresh]


ROWS = (
    *("fsdp2", "ddp", "replicate", "tp", "fsdp1", "fsdp1 zero2", "fsdp1 no shard", "megatron-fsdp", "megatron-fsdp+tp"),
    *("tp column", "tp row", "tp x dp", "mcore buffers", "mcore buffers+tp"),
)
MESHES = ("hsdp", "fsdp2+tp", "fsdp1 hybrid")


def _on_row(layout: str) -> bool:
    """A row of the comparison, beside one process in this rank, whose bits are a fresh process's."""
    return compare_with_dense(layout, lr=0.02, steps=2, table=CASES).bitwise


def on_ranks(layouts: Sequence[str]) -> list[Any]:
    """Each layout on 4 ranks, every second on 2 or 3 in turn; FSDP2 on all. 4 meet both arithmetics: who multiplies
    does not depend on how products round."""
    few = [(2, name) for name in layouts[::4]] + [(3, name) for name in (layouts[0], *layouts[2::4])]
    return [*(pytest.param(*pair, marks=pytest.mark.stated) for pair in few), *((4, name) for name in layouts)]


@pytest.mark.parametrize(("world", "layout"), [*on_ranks(ROWS), *((4, name) for name in MESHES)])
def test_every_layout_has_the_bits_of_one_process(world: int, layout: str) -> None:
    """FSDP, tensor parallelism, Megatron's shards; a fresh process has a rank's bits."""
    assert get_pool(world).run(_on_row, layout) == [True] * world


@pytest.mark.parametrize(
    ("world", "row"),
    [
        *((3, f"zero{stage}") for stage in range(4)),
        pytest.param(2, "zero3", marks=pytest.mark.stated),
    ],
)
def test_deepspeeds_partitions_too(world: int, row: str, deepspeed_pools: dict[int, RankPool]) -> None:
    assert deepspeed_pools[world].run(_on_row, row) == [True] * world
