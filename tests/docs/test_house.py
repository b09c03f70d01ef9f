"""Tests of the code statistics that scripts/house.py computes. The expected values for small sources and for a chain of
calls were counted by hand."""

from __future__ import annotations

import ast
import importlib.util
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="module")
def house() -> ModuleType:
    path = Path(__file__).parents[2] / "scripts" / "house.py"
    spec = importlib.util.spec_from_file_location("house", path)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def run(path: Path, source: str, **names: Any) -> dict[str, Any]:
    """Execute `source` as if it were the file `path`, which need not exist. Return the names that the source
    defines."""
    exec(compile(textwrap.dedent(source), str(path), "exec"), names)
    return names


LEAVES = """
    def leaf(text):
        return len(text)

    def numbers():
        yield 1
        yield 2
"""
TOP = """
    def top():
        leaf("a"), leaf("b")
        outside()
        squares = [n * n for n in (1, 2)]
        return sum(n for n in numbers())
"""


def test_calls_of_a_chain_are_those_counted_by_hand(house: ModuleType, tmp_path: Path) -> None:
    """The expected calls are one to `top`, two to `leaf`, one to the generator `numbers`, two to `len` and one to
    `sum`. Calls to Python functions in files outside the watched folder are not counted."""
    leaves = run(tmp_path / "deep" / "leaves.py", LEAVES)
    outside = run(tmp_path.parent / "outside.py", "def outside(): return len('')")["outside"]
    top = run(tmp_path / "top.py", TOP, leaf=leaves["leaf"], numbers=leaves["numbers"], outside=outside)["top"]
    calls = house.watch(top, tmp_path)
    assert calls.of_function == {
        ("top.py", 2, "top"): 1,
        ("deep/leaves.py", 2, "leaf"): 2,
        ("deep/leaves.py", 5, "numbers"): 1,
    }
    assert str(calls) == "4 / 3 / 2" and calls.num_c == 3
    # Before Python 3.12, a list comprehension has its own frame, like a generator expression, and therefore counts as a
    # call.
    frames = 1 + (sys.version_info < (3, 12))
    assert str(house.watch(top, tmp_path, comprehensions=True)) == f"{4 + frames} / {3 + frames} / 2"


def lengths_of_entered(house: ModuleType, tree: ast.Module) -> list[int]:
    entered = [("a.py", 2, "decorated"), ("a.py", 10, "method"), ("a.py", 10, "method"), ("a.py", 3, "<lambda>")]
    return house.lengths(entered, {"a.py": tree})  # type: ignore[no-any-return]


def badly_opened(house: ModuleType, tree: ast.Module) -> list[str]:
    return [text for text in house.docstrings(tree) if house.BAD_OPENING.match(text)]


LINES = '''
    @cached
    def decorated():
        """One.

        Two."""
        return 1

    class K:
        def method(
            self
        ): return 2
'''
STATEMENTS = '''
    """Of the module."""
    import os
    x = 1
    class K:
        """Of the class."""
        def f(self):
            """Of the function."""
            from a import b
            if x:
                return "a string"
            "no docstring"
'''
NAMES = '''
    """What it is for."""
    import os
    ONE, (_two, three) = 1, (2, 3)
    four: int = 4
    ONE_MORE["key"] = os.five = 5
    class K:
        """Those of it."""
        six = 6
        class L:
            """Kinds."""
    def _seven(): "Whether, or not."
    async def eight(): "Return to it."
'''
CATCHES = """
    try: pass
    except A: pass
    except B: raise
    except C as error:
        if error.args:
            raise D from error
    except E:
        def later(): raise F
    with suppress(G), contextlib.suppress(H), other.suppress(I): pass
    class K:
        def __exit__(self, *_): return False
    class L:
        def __exit__(self, kind, *_):
            self.close(lambda: True)
            return kind is M
    class N:
        async def __aexit__(self, *_):
            return
"""


@pytest.mark.parametrize(
    ("count", "source", "expected"),
    [
        (lengths_of_entered, LINES, [2, 3]),
        # Imports and docstrings do not count, so the source has six statements: the assignment to x, class, def, if,
        # return and the last string.
        (lambda house, tree: house.statements(tree), STATEMENTS, 6),
        (lambda house, tree: list(house.public_names(tree)), NAMES, ["ONE", "three", "four", "K", "eight"]),
        (lambda house, tree: house.classes(tree), NAMES, {"K", "L"}),
        (badly_opened, NAMES, ["What it is for.", "Those of it.", "Whether, or not."]),
        (lambda house, tree: sorted(house.catches(tree)), CATCHES, [3, 8, 10, 10, 14]),
    ],
)
def test_what_a_small_source_has_is_counted(
    house: ModuleType, count: Callable[..., object], source: str, expected: object
) -> None:
    assert count(house, ast.parse(textwrap.dedent(source))) == expected


FILES = {
    "__init__.py": "from pack.high import top",
    "high/__init__.py": "",
    "high/top.py": "import pack.low.one, torch.nn",
    "low/__init__.py": "from .one import f",
    "low/one.py": "if TYPE_CHECKING:\n    from pack.low.two import K",
    "low/two.py": "def g():\n    from . import one, three\n    from pack.beside.near import K as L",
    "low/three.py": "module = importlib.import_module('pack.high.top')",
    "beside/near.py": "from other import pack",
}


def test_imports_count_wherever_they_stand(house: ModuleType) -> None:
    graph = house.import_graph({file: ast.parse(source) for file, source in FILES.items()}, "pack")
    assert graph == {
        "pack": {"pack.high.top"},
        "pack.high": set(),
        "pack.high.top": {"pack.low.one"},
        "pack.low": {"pack.low.one"},
        "pack.low.one": {"pack.low.two"},
        "pack.low.two": {"pack.low.one", "pack.low.three", "pack.beside.near"},
        "pack.low.three": {"pack.high.top"},
        "pack.beside.near": set(),
    }
    assert house.circles(graph) == [["pack.high.top", "pack.low.one", "pack.low.three", "pack.low.two"]]
    assert house.circles({"a": ["b"], "b": ["a"], "c": ["d", "a"], "d": ["c"], "e": ["a"]}) == [["a", "b"], ["c", "d"]]
    assert house.climbing(graph, ["high", "beside | low"]) == ["pack.low.three", "pack.low.two"]
    assert house.climbing(graph, ["high", "low", "beside"]) == ["pack.low.three"]


MOST_LINES = 60  # largest allowed number of lines in a function, not counting its docstring


def test_functions_are_short(house: ModuleType) -> None:
    functions = (
        (f"{file}:{node.lineno}: {node.name}", house.num_lines(node))
        for file, tree in house.sources().items()
        for node in ast.walk(tree)
        if isinstance(node, house.FUNCTIONS)
    )
    assert [where for where, num_lines in functions if num_lines > MOST_LINES] == []


def test_layers_of_the_contract_name_every_folder(house: ModuleType) -> None:
    named = {name.strip() for line in house.layers_of_contract() for name in line.split("|")}
    assert named == {Path(file).parts[0].removesuffix(".py") for file in house.sources()} - {"__init__"}


def test_bytes_of_one_matrix_on_four_ranks_are_those_counted_by_hand(house: ModuleType) -> None:
    """`unevenness` is the number of bytes that the busiest rank sends, divided by the mean over all ranks.

    The owner of a matrix is the rank that orthogonalizes it. With four shards, the owner sends 3/4 of the result, and
    each other rank sends 1/4 of the input. The total is 3/2 of the matrix, so the owner sends twice the mean. With two
    replicas of two shards, only the two ranks of the owner's replica send. Each sends half of the matrix within the
    replica and half to the other replica, so both send twice the mean.
    """
    from shardmuon.layout.mesh import Shard

    assert house.unevenness((4,), [(Shard(0),)], 1) == 2.0
    assert house.unevenness((2, 2), [(None, Shard(0))], 1) == 2.0
