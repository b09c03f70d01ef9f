"""Variants on every layout: the update, and what stages keep, bit for bit those of one process."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from shardmuon.testing.compare import compare_with_dense
from shardmuon.testing.frameworks import FSDP1_ROWS
from shardmuon.testing.layouts import LAYOUTS
from shardmuon.testing.pool import RankPool

ALL = "muon_eq+normuon"


def _compared(layout: str, **options: object) -> tuple[bool, float, str]:
    """Compare two steps; in the second one stages find what the first one kept."""
    given: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "steps": 2, "remember": True, **options}
    found = compare_with_dense(layout, **given)
    return found.bitwise, found.max_difference, found.worst


@pytest.mark.parametrize("layout", LAYOUTS)  # on 3 ranks among others: test_norm_control.py
def test_normuon_has_the_bits_of_one_process_on_every_layout(layout: str, world4: RankPool) -> None:
    for rank, found in enumerate(world4.run(_compared, layout, variant="normuon")):
        assert found == (True, 0.0, ""), f"rank {rank}: {found}"


@pytest.mark.parametrize("layout", ["ddp", "hsdp+tp", "ep+fsdp", "mcore buffers+tp"])  # others: test_norm_control.py
def test_composed_stages_have_the_bits_of_one_process(layout: str, world4: RankPool) -> None:
    for found in world4.run(_compared, layout, variant=ALL, beta2=0.9):
        assert found == (True, 0.0, "")


@pytest.mark.parametrize("layout", FSDP1_ROWS)
def test_normuon_has_the_bits_of_one_process_under_fsdp1(layout: str, world4: RankPool) -> None:
    for found in world4.run(_compared, layout, variant="normuon"):
        assert found == (True, 0.0, "")


@pytest.fixture(scope="module")
def deepspeed_pool(deepspeed_pools: dict[int, RankPool]) -> RankPool:
    return deepspeed_pools[3]


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed: shardmuon[deepspeed]")
@pytest.mark.parametrize("layout", ["zero0", "zero2", "zero3+offload"])  # others: test_norm_control.py
def test_normuon_has_the_bits_of_one_process_under_deepspeed(layout: str, deepspeed_pool: RankPool) -> None:
    for found in deepspeed_pool.run(_compared, layout, variant="normuon"):
        assert found == (True, 0.0, "")
