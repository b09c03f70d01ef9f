"""Ranks for every test, and the settings that keep tests equal from run to run."""

from __future__ import annotations

import os
import tempfile

import hypothesis
import pytest
import torch

from shardmuon.testing import RankPool, get_pool

# What ns_method="auto" measures must neither come from nor go to the user's own cache. Ranks inherit the variable.
os.environ["SHARDMUON_CACHE"] = os.path.join(tempfile.mkdtemp(prefix="shardmuon-tests-"), "tuning.json")

torch.set_num_threads(1)  # as in the ranks: one process is compared with them bit for bit
hypothesis.settings.register_profile("shardmuon", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("shardmuon")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(name.startswith("world") for name in getattr(item, "fixturenames", ())):
            item.add_marker("ranks")


@pytest.fixture(scope="session")
def world2() -> RankPool:
    return get_pool(2)


@pytest.fixture(scope="session")
def world3() -> RankPool:
    return get_pool(3)


@pytest.fixture(scope="session")
def world4() -> RankPool:
    return get_pool(4)


@pytest.fixture(scope="session")
def world8() -> RankPool:
    return get_pool(8)
