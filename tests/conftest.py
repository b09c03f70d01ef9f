"""Pytest configuration: fixtures that start pools of ranks, options for the default dtype of matmuls, and settings that
make test runs reproducible.

[Note: matmul dtypes in tests]
    By default, shardmuon computes matmuls in bf16 on GPUs and on CPUs that support bf16 in hardware, and in fp32 on
    other CPUs. `--arithmetic` selects the default matmul dtype for a test run, including its ranks.
    `--both-arithmetics` runs the tests marked `numeric` with both dtypes (see `_Shared`).
"""

from __future__ import annotations

import gc
import itertools
import os
import signal
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import deepspeed_job
import hypothesis
import pytest
import torch

from shardmuon._torch import cpu_has_bf16_matmul
from shardmuon.testing import RankPool

# Some tests compare results of the pytest process bitwise with results of ranks. Ranks use one thread each, so the
# pytest process must also use one thread, because the number of threads can change the order of summation.
torch.set_num_threads(1)
hypothesis.settings.register_profile("shardmuon", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("shardmuon")

# Tests in the NUMERIC modules are marked `numeric`, because their results depend on the default matmul dtype. Tests
# marked `stated` are exempt, because they set the matmul dtype themselves or their results do not depend on it. Some
# tests in other modules are marked individually. A test that only checks that two runs with the same matmul dtype are
# bitwise identical needs no mark.
NUMERIC = {
    "test_auto",
    "test_docs",
    "test_one_arithmetic",
    "test_options",
    "test_schedules",
}

# Most tests that need a framework, such as DeepSpeed, on their ranks are in the FRAMEWORKS modules or use DeepSpeed
# pools. These tests run in a separate process, so that the other test processes need not preload the frameworks.
FRAMEWORKS = ("test_deepspeed", "test_foresight_frameworks", "test_megatron")


def pytest_addoption(parser: pytest.Parser) -> None:
    choice = parser.getgroup("arithmetic", "the default products on this CPU")
    choice.addoption("--arithmetic", choices=("own", "other", "bf16", "fp32"), default="own", help="default: the CPU's")
    choice.addoption("--both-arithmetics", action="store_true", help="also run the numeric tests in the other one")


def pytest_configure(config: pytest.Config) -> None:
    wanted = config.getoption("--arithmetic")
    # `__wrapped__` bypasses the cache of `cpu_has_bf16_matmul`. A cached result would be stale once the code below sets
    # SHARDMUON_CPU_BF16.
    own = cpu_has_bf16_matmul.__wrapped__()
    if wanted != "own":
        os.environ["SHARDMUON_CPU_BF16"] = str(int({"other": not own, "bf16": True, "fp32": False}[wanted]))
    if config.getoption("--both-arithmetics"):
        config.pluginmanager.register(_Shared(config), "shared")


def pytest_report_header() -> str:
    told = f" (SHARDMUON_CPU_BF16={os.environ['SHARDMUON_CPU_BF16']})" if os.environ.get("SHARDMUON_CPU_BF16") else ""
    return f"arithmetic: {_name(cpu_has_bf16_matmul())} products by default{told}, torch {torch.__version__}"


def _name(bf16: bool) -> str:
    return "bf16" if bf16 else "fp32"


class _Shared:
    """Pytest plugin that runs the tests of a session in several processes, to keep two cores busy until the end.

    This process and a forked process take test files from a shared queue, starting with files whose tests need ranks. A
    second forked process runs the tests of frameworks such as DeepSpeed, and a third one repeats the tests marked
    `numeric` with the other matmul dtype (bf16 or fp32). The logs of all processes are printed before pytest's summary
    line, and a failure in any process fails the session.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config, self._folder = config, Path(tempfile.mkdtemp(prefix="shardmuon-tests-"))
        self._beside: dict[str, int] = {}  # process IDs of the other test processes, keyed by process name

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or session.config.option.collectonly:
            return None
        units: dict[object, list[pytest.Item]] = {"framework": [], "apart": []}
        for item in sorted(session.items, key=lambda i: not _has(i, "ranks")):
            units.setdefault(_unit(item), []).append(item)
        framework, apart = units.pop("framework"), units.pop("apart")
        # The index of each group of tests is written to the pipe as two bytes, so a read of two bytes always returns
        # exactly one index.
        taken, left = os.pipe()
        os.write(left, b"".join(number.to_bytes(2, "big") for number in range(len(units))))
        os.close(left)
        queue = (list(units.values())[int.from_bytes(number, "big")] for number in iter(lambda: os.read(taken, 2), b""))
        numeric = [item for item in session.items if _has(item, "numeric")]
        other = _name(not cpu_has_bf16_matmul())
        if numeric and self._forked(f"numeric tests with {other} products"):
            os.environ["SHARDMUON_CPU_BF16"] = str(int(other == "bf16"))
            cpu_has_bf16_matmul.cache_clear()
            _preload(numeric)
            return _run(session, [numeric])
        if framework and self._forked("tests of frameworks"):
            _preload(framework)
            return _run(session, [framework])
        _preload([item for item in session.items if item not in set(framework)])
        if self._forked("tests that start their own ranks, and half of the others"):
            return _run(session, itertools.chain([apart], queue))
        return _run(session, queue)

    def _forked(self, name: str) -> bool:
        """Fork this process. Return True in the child process, whose output goes to a log file."""
        reporter: Any = self._config.pluginmanager.getplugin("terminalreporter")
        reporter.flush()
        process = os.fork()
        self._beside[name] = process
        if process:
            return False
        self._beside.clear()
        capture: Any = self._config.pluginmanager.getplugin("capturemanager")
        # pytest's capture file belongs to the parent process, so the child process starts a new capture.
        capture.stop_global_capturing()
        with (self._folder / name).open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        capture.start_global_capturing()
        capture.suspend_global_capture()
        if self._config.pluginmanager.hasplugin("lfplugin"):
            # Only the parent process may record which tests failed last, so the child process unregisters `lfplugin`,
            # the pytest plugin that records them.
            self._config.pluginmanager.unregister(name="lfplugin")
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        reporter: Any = self._config.pluginmanager.getplugin("terminalreporter")
        fine = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        for name, process in self._beside.items():
            if exitstatus == pytest.ExitCode.INTERRUPTED:
                os.kill(process, signal.SIGTERM)
            if os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) not in fine:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED if exitstatus in fine else exitstatus
                # List the failed test process by name among the errors in pytest's final summary.
                where = (f"{name}, see above", None, "")
                report = pytest.TestReport(where[0], where, {}, "failed", "failed", "call")
                reporter.stats.setdefault("error", []).append(report)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for name in self._beside:
            terminalreporter.section(f"{name}, run beside these")
            terminalreporter.write_line((self._folder / name).read_text(errors="replace").rstrip())


def _unit(item: pytest.Item) -> object:
    """Return the key of the group of tests with which a test shares a process.

    The key is the mark "framework" or "apart", the path of the test file, or "every_layout" for all files that use the
    comparisons in `every_layout.py`.
    """
    for mark in ("framework", "apart"):
        if _has(item, mark):
            return mark
    return "every_layout" if hasattr(getattr(item, "module", None), "compared") else item.path


def _run(session: pytest.Session, units: Iterable[list[pytest.Item]]) -> bool:
    """Run all tests from the iterator, one group at a time. Tell pytest which test comes next, so that it closes the
    fixtures that the next test does not use."""
    items = itertools.chain.from_iterable(units)
    for item, following in itertools.pairwise(itertools.chain(items, [None])):
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _on_ranks(item):
            item.add_marker("ranks")
        if (_has(item, "ranks") and item.path.stem.startswith(FRAMEWORKS)) or "deepspeed_pools" in _fixtures(item):
            item.add_marker("framework")
        if item.path.stem in NUMERIC and not _has(item, "stated"):
            item.add_marker("numeric")


def _preload(items: list[pytest.Item]) -> None:
    """Import the modules of the given tests before ranks are forked, so that the ranks inherit the imported modules."""
    for module in dict.fromkeys(item.path.stem for item in items if _has(item, "ranks")):
        RankPool.preload(module)
    if items and all(_has(item, "framework") for item in items):
        RankPool.preload("framework_imports")


def pytest_collection_finish(session: pytest.Session) -> None:
    # Each garbage collection would otherwise visit all imported objects, and some libraries run a collection in every
    # call.
    gc.freeze()
    if not session.config.pluginmanager.hasplugin("shared"):
        _preload(session.items)


def pytest_unconfigure() -> None:
    gc.unfreeze()  # otherwise libraries report objects exempt from garbage collection as leaks at exit


def _on_ranks(item: pytest.Item) -> bool:
    """Return True if the test starts ranks, either itself or through a fixture such as `world2`."""
    called = item.function.__code__.co_names if isinstance(item, pytest.Function) else ()
    pools = (name for name in _fixtures(item) if name.startswith(("world", "deepspeed_pool")))
    return any(pools) or not {"cached", "compared"}.isdisjoint(called)


def _fixtures(item: pytest.Item) -> Sequence[str]:
    return getattr(item, "fixturenames", ())


def _has(item: pytest.Item, mark: str) -> bool:
    return item.get_closest_marker(mark) is not None


class DeepSpeedPools(dict[int, RankPool]):
    """Pools of ranks for DeepSpeed tests, keyed by number of ranks.

    Other tests must not use these pools, because DeepSpeed sets environment variables and keeps a reference to the
    process group. A pool starts when it is first used, and its ranks import DeepSpeed only once.
    """

    def __missing__(self, num_ranks: int) -> RankPool:
        self[num_ranks] = RankPool(num_ranks, timeout=120.0)
        self[num_ranks].run(deepspeed_job.start)
        return self[num_ranks]


@pytest.fixture(scope="session")
def deepspeed_pools() -> Iterator[DeepSpeedPools]:
    pools = DeepSpeedPools()
    yield pools
    for pool in pools.values():
        pool.close()


# Pools of 2, 3, 4 and 8 ranks, which the test modules share through `RankPool.cached`. It caches the three most
# recently used pools. The fixtures have module scope, because fixtures with session scope would keep pools running
# after their removal from the cache.
world2, world3, world4, world8 = (
    pytest.fixture(scope="module", name=f"world{num}")(lambda num=num: RankPool.cached(num)) for num in (2, 3, 4, 8)
)
