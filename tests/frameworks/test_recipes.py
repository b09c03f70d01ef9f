"""Tests that the recipes in docs/recipes match the scripts in examples/, which tests/stack runs with the real
libraries."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPES = sorted(
    path for path in (ROOT / "docs" / "recipes").glob("*.md") if path.stem not in ("README", "megatron_core")
)
LIBRARIES = ("accelerate", "datasets", "lightning", "peft", "timm", "torchtitan", "transformers", "trl")


@pytest.mark.parametrize("page", RECIPES, ids=lambda page: page.stem)
def test_a_page_shows_its_example_and_no_more_than_40_lines(page: Path) -> None:
    (shown,) = re.findall(r"```py\n(.*?)\n```", page.read_text(), flags=re.DOTALL)
    script = (ROOT / "examples" / page.name.replace(".md", ".py")).read_text()
    (recipe,) = re.findall(r"# \[start:recipe\]\n(.*)\n# \[end:recipe\]\n", script, flags=re.DOTALL)
    assert shown == recipe.rstrip("\n") and len(shown.splitlines()) <= 40


def test_every_example_has_its_page_and_every_page_is_listed() -> None:
    scripts = {path.stem for path in (ROOT / "examples").glob("*.py") if "[start:recipe]" in path.read_text()}
    assert scripts == {page.stem for page in RECIPES}
    listed = (ROOT / "docs" / "recipes" / "README.md").read_text()
    assert all(f"({page.name})" in listed for page in (ROOT / "docs" / "recipes").glob("*.md") if page.stem != "README")
    cases = (ROOT / "tests" / "stack" / "test_examples.py").read_text()
    assert all(f'Case("{script}", {world}' in cases for script in scripts for world in (1, 2))


def test_shardmuon_imports_no_library_that_it_has_an_adapter_for() -> None:
    code = "import sys, shardmuon, shardmuon.frameworks.transformers; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert not set(LIBRARIES) & set(loaded)
