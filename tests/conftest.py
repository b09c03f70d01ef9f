"""Ranks for every test, the arithmetic they run in, and the settings that keep tests equal from run to run.

[Note: two arithmetics]
    Where the CPU multiplies bf16 matrices in hardware, products are bf16 by default, as on GPUs; elsewhere they are
    fp32. A test of numbers states its arithmetic or holds for both. `--arithmetic` chooses, through the switch that
    CONTRIBUTING.md describes; ranks inherit it. `--both-arithmetics` runs all tests in the machine's own, and those
    marked `numeric` in the other, too, and shares them out to processes, see `_Shared`.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import deepspeed_job
import hypothesis
import pytest
import torch

from shardmuon._torch import cpu_has_bf16_matmul
from shardmuon.testing import RankPool

torch.set_num_threads(1)  # as in the ranks: one process is compared with them bit for bit
hypothesis.settings.register_profile("shardmuon", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("shardmuon")

# Modules whose numbers depend on the default products. Single tests of others carry the mark themselves, and those of
# these that name the dtype of their products carry "stated". What only compares bits of two ways through the same
# products (every framework's partitions) is proven once.
NUMERIC = {
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
        os.environ["SHARDMUON_CPU_BF16"] = str(int({"other": not own, "bf16": True, "fp32": False}[wanted]))
    if config.getoption("--both-arithmetics"):
        config.pluginmanager.register(_Shared(config), "shared")


def pytest_report_header() -> str:
    told = f" (SHARDMUON_CPU_BF16={os.environ['SHARDMUON_CPU_BF16']})" if os.environ.get("SHARDMUON_CPU_BF16") else ""
    return f"arithmetic: {_name(cpu_has_bf16_matmul())} products by default{told}, torch {torch.__version__}"


def _name(bf16: bool) -> str:
    return "bf16" if bf16 else "fp32"


class _Shared:
    """The tests of one session in several processes, so that two cores are busy to the end.

    Files lie in a queue, those with ranks before the others. This process takes them one by one, and so does a fork of
    it, after the tests that start ranks of their own and mostly wait. Frameworks, whose ranks no other test uses, have
    a fork of their own; the other arithmetic is a new process. What they say stands before the closing line, and their
    failures count.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config, self._folder = config, Path(tempfile.mkdtemp(prefix="shardmuon-tests-"))
        self._beside: dict[str, int] = {}  # name -> process

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or session.config.option.collectonly:
            return None
        units: dict[object, list[pytest.Item]] = {"framework": [], "apart": []}
        for item in sorted(session.items, key=lambda i: not _has(i, "ranks")):
            units.setdefault(_unit(item), []).append(item)
        framework, apart = units.pop("framework"), units.pop("apart")
        taken, left = os.pipe()  # numbers of units, two bytes each: a read takes one whole
        os.write(left, b"".join(number.to_bytes(2, "big") for number in range(len(units))))
        os.close(left)
        queue = (list(units.values())[int.from_bytes(number, "big")] for number in iter(lambda: os.read(taken, 2), b""))
        numeric = [item for item in session.items if _has(item, "numeric")]
        other = _name(not cpu_has_bf16_matmul())
        if numeric and self._forked(f"numeric tests with {other} products"):
            self._become_other(other, numeric)
        if framework and self._forked("tests of frameworks"):
            _preload(framework)
            return _run(session, [framework])
        _preload([item for item in session.items if item not in set(framework)])
        if self._forked("tests that start their own ranks, and half of the others"):
            return _run(session, itertools.chain([apart], queue))
        return _run(session, queue)

    def _become_other(self, other: str, items: list[pytest.Item]) -> NoReturn:
        """Run the tests in the other arithmetic: a process that knows this one's cannot."""
        args = self._config.args
        if not any("::" in arg for arg in args):  # it imports no other files
            args = list(dict.fromkeys(str(item.path) for item in items))
        os.chdir(self._config.invocation_params.dir)
        command = [sys.executable, "-m", "pytest", "-m", "numeric", "--arithmetic", other, "-p", "no:cacheprovider"]
        os.execv(sys.executable, [*command, *args])

    def _forked(self, name: str) -> bool:
        """True in the new process, whose output goes to a log."""
        reporter: Any = self._config.pluginmanager.getplugin("terminalreporter")
        reporter.flush()
        process = os.fork()
        self._beside[name] = process
        if process:
            return False
        self._beside.clear()
        capture: Any = self._config.pluginmanager.getplugin("capturemanager")
        capture.stop_global_capturing()  # its file is the parent's
        with (self._folder / name).open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        capture.start_global_capturing()
        capture.suspend_global_capture()
        if self._config.pluginmanager.hasplugin("lfplugin"):
            self._config.pluginmanager.unregister(name="lfplugin")  # the parent remembers its own failures
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
                where = (f"{name}, see above", None, "")  # the closing line says so
                report = pytest.TestReport(where[0], where, {}, "failed", "failed", "call")
                reporter.stats.setdefault("error", []).append(report)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for name in self._beside:
            terminalreporter.section(f"{name}, run beside these")
            terminalreporter.write_line((self._folder / name).read_text(errors="replace").rstrip())


def _unit(item: pytest.Item) -> object:
    """A mark by which a test runs beside others; its file, or all files that share what is compared on all layouts."""
    for mark in ("framework", "apart"):
        if _has(item, mark):
            return mark
    return "every_layout" if hasattr(getattr(item, "module", None), "compared") else item.path


def _run(session: pytest.Session, units: Iterable[list[pytest.Item]]) -> bool:
    """Run the tests of units, and read a unit only when it is its turn: fixtures end when nobody needs them next."""
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
    """Have the modules of these tests imported before ranks are forked, which find their functions there."""
    for module in dict.fromkeys(item.path.stem for item in items if _has(item, "ranks")):
        RankPool.preload(module)
    if items and all(_has(item, "framework") for item in items):
        RankPool.preload("framework_imports")


def pytest_collection_finish(session: pytest.Session) -> None:
    if not session.config.pluginmanager.hasplugin("shared"):
        _preload(session.items)


def _on_ranks(item: pytest.Item) -> bool:
    """True if a fixture (`world2`, ..) or the test itself calls for ranks."""
    called = item.function.__code__.co_names if isinstance(item, pytest.Function) else ()
    pools = (name for name in _fixtures(item) if name.startswith(("world", "deepspeed_pool")))
    return any(pools) or not {"cached", "compared"}.isdisjoint(called)


def _fixtures(item: pytest.Item) -> Sequence[str]:
    return getattr(item, "fixturenames", ())


def _has(item: pytest.Item, mark: str) -> bool:
    return item.get_closest_marker(mark) is not None


class DeepSpeedPools(dict[int, RankPool]):
    """number of ranks -> ranks that only tests of DeepSpeed use: it sets environment variables and keeps the process
    group. They are started when they are first asked for, and shared, since each of them imports DeepSpeed."""

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


# Shared ranks. A module holds on to its own, and lets go of them for others.
world2, world3, world4, world8 = (
    pytest.fixture(scope="module", name=f"world{num}")(lambda num=num: RankPool.cached(num)) for num in (2, 3, 4, 8)
)
