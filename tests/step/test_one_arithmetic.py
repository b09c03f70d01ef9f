"""Tests that updates with default options are bitwise identical in a fresh process and on every kind of layout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import one_arithmetic
import pytest
from one_arithmetic import cases, stepped_alone
from simulated import quick_plans

from shardmuon.testing.compare import Comparison
from shardmuon.testing.pool import RankPool


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Yield digests of the weights after two steps in a new process. The process starts without caches, and its home
    directory is read-only and must stay empty."""
    home = tmp_path_factory.mktemp("home")
    home.chmod(0o555)
    env = {key: value for key, value in os.environ.items() if key != "XDG_CACHE_HOME"}
    env |= {"HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, one_arithmetic.__file__]
    yield json.loads(subprocess.run(command, env=env, capture_output=True, text=True, check=True, cwd=home).stdout)
    assert list(home.iterdir()) == []


def test_an_optimizer_over_one_matrix_each_equals_one_over_all(fresh: dict[str, str], world2: RankPool) -> None:
    """The update of a matrix must be bitwise identical in every case: with its own optimizer, with one optimizer for
    all matrices, on each of two ranks, and in a fresh process."""
    assert stepped_alone() == fresh
    assert stepped_alone(apart=True) == fresh
    assert world2.run(stepped_alone) == [fresh, fresh]


# The layouts in KINDS run on 4 ranks, with bf16 and with fp32 matmuls. The pairs (number of ranks, layout) in FEW run
# with only one matmul dtype, because the assignment of matrices to ranks does not depend on the dtype.
KINDS = (
    "fsdp2",
    "ddp",
    "tp",
    "tp row",
    "fsdp1",
    "megatron-fsdp+tp",
    "mcore buffers+tp",
    "hsdp",
    "fsdp2+tp",
    "fsdp1 hybrid",
)
FEW = ((2, "fsdp2"), (2, "tp x dp"), (3, "fsdp2"), (3, "tp column"), (3, "megatron-fsdp"))


@quick_plans()
def _compared(layout: str) -> Comparison:
    return Comparison.with_dense(layout, lr=0.02, steps=2, table=cases())


def _assert_bitwise(pool: RankPool, layout: str) -> None:
    """Assert that two steps on a layout match a single-process run bitwise on every rank."""
    assert all(one.bitwise for one in pool.run(_compared, layout))


@pytest.mark.parametrize(
    ("world", "layout"), [*(pytest.param(*of, marks=pytest.mark.stated) for of in FEW), *((4, name) for name in KINDS)]
)
def test_layouts_of_each_kind_have_the_bits_of_one_process(world: int, layout: str) -> None:
    """Steps on each layout must match a single-process reference bitwise."""
    _assert_bitwise(RankPool.cached(world), layout)


@pytest.mark.parametrize(
    ("world", "row"), [*((3, f"zero{stage}") for stage in range(4)), pytest.param(2, "zero3", marks=pytest.mark.stated)]
)
def test_deepspeeds_partitions_too(world: int, row: str, deepspeed_pools: dict[int, RankPool]) -> None:
    _assert_bitwise(deepspeed_pools[world], row)
