"""What is kept between steps: the table of docs/memory_table.md is whole, and memory goes when the table says so."""

from __future__ import annotations

import ast
import copy
import os
import pickle
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_to_the_end
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from shardmuon import Muon
from shardmuon.testing import RankPool
from shardmuon.testing.layouts import mesh_of
from shardmuon.testing.tolerances import assert_bitwise

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "shardmuon"
TABLE = ROOT / "docs" / "kept.md"

# ------------------------------------------------------------------------------------------------------- the table is whole

_CONTAINERS = {"dict", "list", "set", "defaultdict", "OrderedDict", "Counter", "deque", "ContextVar", "local"}
_WEAK = {"WeakKeyDictionary", "WeakValueDictionary", "WeakSet", "WeakTensorKeyDictionary", "WeakIdKeyDictionary"}
_OF_OTHERS = ("testing", "commands", "demo", "foresight")  # no step runs in them


def _called(node: ast.AST | None) -> str:
    """The last name of what is called, or of a decorator."""
    if isinstance(node, ast.Call):
        return _called(node.func)
    if isinstance(node, ast.Subscript):
        return _called(node.value)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _kept_by(tree: ast.Module) -> Iterator[str]:
    """Names of a module that outlive a call: containers that are filled, caches, and what `global` rebinds."""
    for node in [*tree.body, *(inner for node in tree.body if isinstance(node, ast.ClassDef) for inner in node.body)]:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            empty = isinstance(node.value, ast.Dict | ast.List | ast.Set) and not list(ast.iter_child_nodes(node.value))
            empty = empty or (isinstance(node.value, ast.Dict | ast.List) and not _filled(node.value))
            if empty or _called(node.value) in _CONTAINERS | _WEAK and isinstance(node.value, ast.Call):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                yield _called(target)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any(_called(d) in {"cache", "lru_cache"} for d in node.decorator_list):
            yield node.name
        if isinstance(node, ast.Global):
            yield from node.names


def _filled(node: ast.Dict | ast.List) -> bool:
    return bool(node.keys if isinstance(node, ast.Dict) else node.elts)


def _in_source() -> set[str]:
    """ "file: name" of all that outlives a call."""
    found = set()
    for path in sorted(SOURCE.rglob("*.py")):
        where = path.relative_to(SOURCE)
        if where.parts[0] not in _OF_OTHERS:
            found |= {f"{where}: {name}" for name in _kept_by(ast.parse(path.read_text()))}
    return found


def _rows(heading: str) -> dict[str, list[str]]:
    """First cell of a table under a heading -> the other cells."""
    section = TABLE.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return {cells[0].strip("`"): cells[1:] for cells in rows[2:]}


def test_every_cache_of_the_package_stands_in_the_table_and_no_other() -> None:
    listed = {f"{cells[0].strip('`')}: {name}" for name, cells in _rows("Of a process").items()}
    assert listed == _in_source()


def test_the_search_finds_caches_of_every_kind() -> None:
    planted = textwrap.dedent(
        """
        _A = {}
        _B: dict[int, int] = {}
        _C = weakref.WeakKeyDictionary()
        _D = {"full": 1}
        _E: list[int] = []
        _F = defaultdict(list)
        class K:
            seen = {}
        @lru_cache(maxsize=2)
        def f(): ...
        @functools.cache
        def g(): ...
        def h():
            global _G
            _G = 1
        """
    )
    assert set(_kept_by(ast.parse(planted))) == {"_A", "_B", "_C", "_E", "_F", "seen", "f", "g", "_G"}
