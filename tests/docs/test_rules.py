"""Tests of the rules in CONTRIBUTING.md that a script can check."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
SMALL = 0.1  # A literal below SMALL counts as a tolerance if it bounds a measured number from above.
CLOSE = {"assert_close", "allclose", "isclose", "approx"}
KEYWORDS = {"atol", "rtol"}


def loose(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the source text of every tolerance in a module. A tolerance is a call such as `isclose`, a
    call with a keyword argument such as atol, or a comparison that bounds a number from above by a small literal."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in CLOSE or KEYWORDS & {keyword.arg for keyword in node.keywords}:
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            for op, left, right in zip(node.ops, sides[:-1], sides[1:], strict=True):
                upper = (
                    right if isinstance(op, ast.Lt | ast.LtE) else left if isinstance(op, ast.Gt | ast.GtE) else None
                )
                if upper is not None and holds_small(upper):
                    yield node.lineno, ast.unparse(node)


def holds_small(side: ast.expr) -> bool:
    values = (part.value for part in ast.walk(side) if isinstance(part, ast.Constant))
    return any(isinstance(value, float) and 0.0 < value < SMALL for value in values)


def test_tolerances_live_in_the_named_helpers() -> None:
    # Tests in the folders site, stack and zoo run in separate environments, which may lack the helper modules of
    # tests/.
    apart = {"site", "stack", "zoo"}
    paths = [path for path in sorted(TESTS.rglob("*.py")) if path.parent.name not in apart]
    assert [f"{path}:{line}: {text}" for path in paths for line, text in loose(path.read_text())] == []


def test_the_scan_sees_every_form() -> None:
    seen = Counter(
        line
        for line, _ in loose(
            "torch.testing.assert_close(a, b)\n"
            "assert a == approx(b)\n"
            "assert torch.allclose(a, b)\n"
            "helper(a, b, atol=bound)\n"
            "assert difference < 1e-5\n"
            "assert 1e-5 > difference\n"
            "assert found <= 3 * 0.01\n"
            "assert 0.0 < share <= 1.0 and loss < 0.5\n"
            "assert moved > 0.03 and 0.01 <= moved\n"
        )
    )
    assert seen == dict.fromkeys(range(1, 8), 1)
