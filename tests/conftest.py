"""Ranks for every test, the arithmetic they run in, and the settings that keep tests equal from run to run.

[Note: two arithmetics]
    Where the CPU multiplies bf16 matrices in hardware, products are bf16 by default, as on GPUs; elsewhere they are
    fp32. A test of numbers states its arithmetic or holds for both. `--arithmetic` chooses, through the switch that
    CONTRIBUTING.md describes; ranks inherit it. `--both-arithmetics` runs all tests in the machine's own and beside
    them, in another process, those marked `numeric` in the other; what that run says stands before the closing line,
    and its failures count.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import hypothesis
import pytest
import torch

from shardmuon._torch import CPU_BF16, cpu_has_bf16_matmul
from shardmuon.testing import RankPool, get_pool

# What method "auto" measures must neither come from nor go to the user's own cache. Ranks inherit the variable.
os.environ["SHARDMUON_CACHE"] = os.path.join(tempfile.mkdtemp(prefix="shardmuon-tests-"), "tuning.json")

torch.set_num_threads(1)  # as in the ranks: one process is compared with them bit for bit
hypothesis.settings.register_profile("shardmuon", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("shardmuon")

# Modules whose numbers depend on the default products. Single tests of others carry the mark themselves, and those of
# these that name the dtype of their products carry "stated". What only compares bits of two ways through the same
# products (every framework's partitions) is proven once.
NUMERIC = {
    "test_audit",
    "test_auto",
    "test_docs",
    "test_errors",
    "test_gram_route",
    "test_memory",
    "test_momentum",
    "test_options",
    "test_orthogonalize",
    "test_schedules",
    "test_tolerances",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    choice = parser.getgroup("arithmetic", "the default products on this CPU")
    choice.addoption("--arithmetic", choices=("own", "other", "bf16", "fp32"), default="own", help="default: the CPU's")
    choice.addoption("--both-arithmetics", action="store_true", help="also run the numeric tests in the other one")


def pytest_configure(config: pytest.Config) -> None:
    wanted = config.getoption("--arithmetic")
    own = cpu_has_bf16_matmul.__wrapped__()  # not remembered yet
    if wanted != "own":
        os.environ[CPU_BF16] = str(int({"other": not own, "bf16": True, "fp32": False}[wanted]))
    if config.getoption("--both-arithmetics"):
        config.pluginmanager.register(_OtherArithmetic(config), "other-arithmetic")


def pytest_report_header() -> str:
    told = f" ({CPU_BF16}={os.environ[CPU_BF16]})" if os.environ.get(CPU_BF16) else ""
    return f"arithmetic: {_name(cpu_has_bf16_matmul())} products by default{told}, torch {torch.__version__}"


def _name(bf16: bool) -> str:
    return "bf16" if bf16 else "fp32"


class _OtherArithmetic:
    """See [Note: two arithmetics]."""

    def __init__(self, config: pytest.Config) -> None:
        self._name = _name(not cpu_has_bf16_matmul())
        self._log = Path(tempfile.mkdtemp(prefix="shardmuon-tests-"), "log")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-m",
            "numeric",
            "--arithmetic",
            self._name,
            "-p",
            "no:cacheprovider",
        ]
        with self._log.open("w") as log:
            self._run = subprocess.Popen(
                [*command, *config.args], cwd=config.invocation_params.dir, stdout=log, stderr=subprocess.STDOUT
            )

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.INTERRUPTED:
            self._run.terminate()
        if self._run.wait() and not exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section(f"numeric tests with {self._name} products, beside all with the CPU's own")
        terminalreporter.write_line(self._log.read_text(errors="replace").rstrip())
        if self._run.returncode:  # so that the closing line says so
            where = (f"numeric tests with {self._name} products, see above", None, "")
            terminalreporter.stats.setdefault("error", []).append(
                pytest.TestReport(where[0], where, {}, "failed", "failed", "call")
            )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(name.startswith("world") for name in getattr(item, "fixturenames", ())):
            item.add_marker("ranks")
        if item.path.stem in NUMERIC and item.get_closest_marker("stated") is None:
            item.add_marker("numeric")


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
