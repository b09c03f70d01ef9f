"""Tests that run the code blocks and docstring examples in the documentation and check its links."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
SOURCES = [
    file for folder in ("src", "tests", "examples", "benchmarks", "scripts") for file in ROOT.glob(f"{folder}/**/*.py")
]
MODULES = [
    "shardmuon.layout.views",
    "shardmuon.muon",
    "shardmuon_qkclip.clip",
    "shardmuon.routing.groups",
    "shardmuon.gradients.scaler",
    "shardmuon.auditing",
    "shardmuon.foresight.report",
]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_python_blocks_run_one_after_the_other(path: Path) -> None:
    """All Python blocks of a document run one after the other. If a block is followed by a text block, the output up to
    that point must end with the content of the text block."""
    namespace: dict[str, object] = {}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        for block, shown in re.findall(r"(?s)```python\n(.*?)```(?:\s*```text\n(.*?)```)?", path.read_text()):
            exec(compile(block, str(path), "exec"), namespace)
            assert out.getvalue().strip().endswith(shown.strip())
    if path == ROOT / "README.md":
        assert "AdamW" in out.getvalue() and "most loaded rank" in out.getvalue()


@pytest.mark.parametrize("module", MODULES)
def test_docstring_examples_run(module: str) -> None:
    found = doctest.testmod(importlib.import_module(module), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert found.attempted > 0 == found.failed


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_relative_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_documents_name_only_files_that_are_there(path: Path) -> None:
    """Every Python file that a document names must exist. The path may be relative to any folder of the repository. The
    changelog is exempt, because it also names deleted files."""
    named = set(re.findall(r"(?<![\w/.-])[\w/]+\.py\b", path.read_text()))
    if path.name != "CHANGELOG.md":
        assert [name for name in named if not any(str(file).endswith(f"/{name}") for file in SOURCES)] == []


def test_the_readme_names_only_targets_that_the_makefile_has() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"^make (\w+)", (ROOT / "README.md").read_text(), flags=re.MULTILINE))
    assert named and named <= targets
