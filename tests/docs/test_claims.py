"""CLAIMS.md, the table of what the tests claim, is whole."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[1]
CLAIM = re.compile(r"^- (?P<words>.+) \(`(?P<file>[\w/]+\.py)::(?P<test>test_\w+)`\)$")


def table() -> list[tuple[str, str, str]]:
    """Words, file and test of every line of the table; each line that begins like one has to be one."""
    lines = [line for line in (TESTS / "CLAIMS.md").read_text().splitlines() if line.startswith("- ")]
    found = [CLAIM.match(line) for line in lines]
    assert [line for line, match in zip(lines, found, strict=True) if match is None] == []
    return [(match["words"], match["file"], match["test"]) for match in found if match is not None]


def functions_of(path: Path) -> set[str]:
    """Names of the test functions of a file; none of a file that is not there."""
    if not path.exists():
        return set()
    functions = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))
    return {function.name for function in functions if function.name.startswith("test_")}


def test_every_test_that_a_claim_names_exists() -> None:
    named: dict[str, set[str]] = {}
    for _, file, test in table():
        named.setdefault(file, set()).add(test)
    gone = [f"{file}::{test}" for file, tests in named.items() for test in sorted(tests - functions_of(TESTS / file))]
    assert gone == [], "take these lines out of CLAIMS.md, or name the tests that prove the claims now"


def test_every_test_file_has_a_claim() -> None:
    files = {str(path.relative_to(TESTS)) for path in TESTS.rglob("test_*.py")}
    assert sorted(files - {file for _, file, _ in table()}) == [], "write a line for these files into CLAIMS.md"


def test_no_test_is_named_twice() -> None:
    counts = Counter((file, test) for _, file, test in table())
    assert [key for key, count in counts.items() if count > 1] == []
