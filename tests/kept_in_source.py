"""A scan of the package's source for caches and other names whose values outlive a call. Tests compare its result with
the table in docs/kept.md."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src"  # the folder of the packages shardmuon and shardmuon_qkclip

_CONTAINERS = {"dict", "list", "set", "defaultdict", "OrderedDict", "Counter", "deque", "ContextVar", "local"}
_WEAK = {"WeakKeyDictionary", "WeakValueDictionary", "WeakSet", "WeakTensorKeyDictionary", "WeakIdKeyDictionary"}
# packages that are not scanned, because their code does not run in a step
_OF_OTHERS = ("testing", "commands", "foresight")


def _called(node: ast.AST | None) -> str:
    """Return the last part of the name of a call or decorator, such as "c" for a.b.c()."""
    if isinstance(node, ast.Call):
        return _called(node.func)
    if isinstance(node, ast.Subscript):
        return _called(node.value)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def kept_by(tree: ast.Module) -> Iterator[str]:
    """Yield the names in a module whose values outlive a call: containers at module or class level, cached functions,
    and names that a `global` statement rebinds."""
    for node in [
        *tree.body,
        *(inner for found in tree.body if isinstance(found, ast.ClassDef) for inner in found.body),
    ]:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            is_empty = node.value is not None and ast.unparse(node.value) in ("{}", "[]")
            if is_empty or (isinstance(node.value, ast.Call) and _called(node.value) in _CONTAINERS | _WEAK):
                yield _called(node.targets[0] if isinstance(node, ast.Assign) else node.target)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any(_called(d) in {"cache", "lru_cache"} for d in node.decorator_list):
            yield node.name
        if isinstance(node, ast.Global):
            yield from node.names


def kept_in_source() -> set[str]:
    """Return all names in the package whose values outlive a call, as "file: name"."""
    found = set()
    for path in sorted(SOURCE.rglob("*.py")):
        where = Path(str(path.relative_to(SOURCE)).removeprefix("shardmuon/"))
        if where.parts[0] not in _OF_OTHERS:
            found |= {f"{where}: {name}" for name in kept_by(ast.parse(path.read_text()))}
    return found
