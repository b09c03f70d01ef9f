"""Tests that CLAIMS.md names only tests that exist, and covers every test file."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[1]
CLAIM = re.compile(r"^- .+ \(`(?P<file>[\w/]+\.py)::(?P<test>test_\w+)`\)$")


def claimed() -> list[tuple[str, str]]:
    """List a pair (file, test name) for every claim in CLAIMS.md. All list items in CLAIMS.md must be claims in the
    correct format."""
    lines = [line for line in (TESTS / "CLAIMS.md").read_text().splitlines() if line.startswith("- ")]
    found = [CLAIM.match(line) for line in lines]
    assert [line for line, match in zip(lines, found, strict=True) if match is None] == []
    return [(match["file"], match["test"]) for match in found if match is not None]


def existing() -> set[tuple[str, str]]:
    """Return a pair (file, test name) for every test function in tests/."""
    return {
        (str(path.relative_to(TESTS)), name)
        for path in TESTS.rglob("test_*.py")
        for name in re.findall(r"^ *def (test_\w+)\(", path.read_text(), re.MULTILINE)
    }


def test_every_claim_names_a_test_that_exists_and_none_is_named_twice() -> None:
    counts = Counter(claimed())
    assert sorted(counts.keys() - existing()) == [], "take these lines out, or name the tests that prove the claims now"
    assert [key for key, count in counts.items() if count > 1] == []


def test_every_test_file_has_a_claim() -> None:
    unclaimed = {file for file, _ in existing()} - {file for file, _ in claimed()}
    assert sorted(unclaimed) == [], "write a line for these files into CLAIMS.md"
