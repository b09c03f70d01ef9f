"""Ranks for every test, the arithmetic they run in, and the settings that keep tests equal from run to run.

[Note: two arithmetics]
    Where the CPU multiplies bf16 matrices in hardware, products are bf16 by default, as on GPUs; elsewhere they are
    fp32. A test of numbers states its arithmetic or holds for both. `--arithmetic` chooses, through the switch that
    CONTRIBUTING.md describes; ranks inherit it. `--both-arithmetics` runs all tests in the machine's own, and those
    marked `numeric` in the other, too. Tests of one process leave a core idle, and those that start ranks of their own
    mostly wait: they, the other arithmetic and the frameworks run in processes of their own beside the other tests on
    ranks. What those say stands before the closing line, and their failures count.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import deepspeed_start
import hypothesis
import pytest
import torch

from shardmuon._torch import CPU_BF16, cpu_has_bf16_matmul
from shardmuon.testing import RankPool, get_pool
from shardmuon.testing.pool import preload

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
    "test_one_arithmetic",
    "test_options",
    "test_schedules",
}

# Modules whose ranks import a package that no other test does. With all that use DeepSpeed's pools they run apart.
FRAMEWORKS = ("test_deepspeed", "test_foresight_frameworks", "test_megatron")


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
        config.pluginmanager.register(_Beside(config), "beside")


def pytest_report_header() -> str:
    told = f" ({CPU_BF16}={os.environ[CPU_BF16]})" if os.environ.get(CPU_BF16) else ""
    return f"arithmetic: {_name(cpu_has_bf16_matmul())} products by default{told}, torch {torch.__version__}"


def _name(bf16: bool) -> str:
    return "bf16" if bf16 else "fp32"


class _Beside:
    """See [Note: two arithmetics]. Each run is a process of its own, while this one runs the other tests on ranks.

    One after the other run the tests of one process and the other arithmetic; and beside them those that start their
    own ranks, which mostly wait, and the frameworks, whose ranks no other test uses. So both cores are busy to the end.
    A run is given the files that hold its tests, so that it imports no others.
    """

    def __init__(self, config: pytest.Config) -> None:
        other = _name(not cpu_has_bf16_matmul())
        chain = {
            "tests of one process": ["-m", "not ranks"],
            f"numeric tests with {other} products": ["-m", "numeric", "--arithmetic", other],
        }
        waiting = {"tests that start their own ranks": ["-m", "apart"], "tests of frameworks": ["-m", "framework"]}
        self._runs = chain | waiting
        self._logs = {name: Path(tempfile.mkdtemp(prefix="shardmuon-tests-"), "log") for name in self._runs}
        self._args: dict[str, list[str]] = {"tests of one process": config.args}
        self._folder = config.invocation_params.dir
        self._failed: list[str] = []
        self._current: dict[str, subprocess.Popen[bytes]] = {}
        self._stopped, self._collected = False, threading.Event()
        self._threads = [threading.Thread(target=self._work, args=tuple(c), daemon=True) for c in (chain, waiting)]
        for thread in self._threads:
            thread.start()

    def _work(self, *names: str) -> None:
        for name in names:
            if name not in self._args:
                self._collected.wait()
            if self._stopped:
                return
            if not self._args[name]:
                self._logs[name].write_text("none")
                continue
            command = [sys.executable, "-m", "pytest", *self._runs[name], "-p", "no:cacheprovider", *self._args[name]]
            with self._logs[name].open("w") as log:
                self._current[name] = subprocess.Popen(command, cwd=self._folder, stdout=log, stderr=subprocess.STDOUT)
                if self._current[name].wait() not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
                    self._failed.append(name)

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Take out what is run beside, and tell those runs their files."""
        whole_files = not any("::" in arg for arg in config.args)
        for name, (_, mark, *_rest) in self._runs.items():
            files = dict.fromkeys(str(item.path) for item in items if item.get_closest_marker(mark))
            self._args.setdefault(name, list(files) if whole_files else config.args)
        self._collected.set()
        here = [i for i in items if _has(i, "ranks") and not (_has(i, "apart") or _has(i, "framework"))]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(here)])
        items[:] = here

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.INTERRUPTED or not self._collected.is_set():
            self._stopped = True
            self._collected.set()
            for process in self._current.values():
                process.terminate()
        for thread in self._threads:
            thread.join()
        if self._failed and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for name, log in self._logs.items():
            terminalreporter.section(f"{name}, run beside those on ranks")
            terminalreporter.write_line(log.read_text(errors="replace").rstrip() if log.exists() else "not run")
        for name in self._failed:  # so that the closing line says so
            where = (f"{name}, see above", None, "")
            terminalreporter.stats.setdefault("error", []).append(
                pytest.TestReport(where[0], where, {}, "failed", "failed", "call")
            )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _on_ranks(item):
            item.add_marker("ranks")
        if (_has(item, "ranks") and item.path.stem.startswith(FRAMEWORKS)) or "deepspeed_pools" in _fixtures(item):
            item.add_marker("framework")
        if item.path.stem in NUMERIC and not _has(item, "stated"):
            item.add_marker("numeric")


def pytest_collection_finish(session: pytest.Session) -> None:
    for module in dict.fromkeys(item.path.stem for item in session.items if _has(item, "ranks")):
        preload(module)  # ranks find their functions there
    if session.items and all(_has(item, "framework") for item in session.items):
        preload("framework_imports")


def _on_ranks(item: pytest.Item) -> bool:
    """True if a fixture (`world2`, ..) or the test itself calls for ranks."""
    called = item.function.__code__.co_names if isinstance(item, pytest.Function) else ()
    pools = (name for name in _fixtures(item) if name.startswith(("world", "deepspeed_pool")))
    return any(pools) or not {"get_pool", "compared"}.isdisjoint(called)


def _fixtures(item: pytest.Item) -> Sequence[str]:
    return getattr(item, "fixturenames", ())


def _has(item: pytest.Item, mark: str) -> bool:
    return item.get_closest_marker(mark) is not None


class DeepSpeedPools(dict[int, RankPool]):
    """number of ranks -> ranks that only tests of DeepSpeed use: it sets environment variables and keeps the process
    group. They are started when they are first asked for, and shared, since each of them imports DeepSpeed."""

    def __missing__(self, num_ranks: int) -> RankPool:
        self[num_ranks] = RankPool(num_ranks, timeout=120.0)
        self[num_ranks].run(deepspeed_start.start)
        return self[num_ranks]


@pytest.fixture(scope="session")
def deepspeed_pools() -> Iterator[DeepSpeedPools]:
    pools = DeepSpeedPools()
    yield pools
    for pool in pools.values():
        pool.close()


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
