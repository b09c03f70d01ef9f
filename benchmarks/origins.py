"""Load optimizers from checkouts of other projects, and run them with their bf16 replaced by another dtype.

If an optimizer is part of a training script, only the required functions and classes of the script are executed.

Import this module before any of those projects. It sets TORCHDYNAMO_DISABLE=1, so nothing in them is compiled.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import os
import sys
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import typing_extensions
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # torch.compile reads this variable when it decorates a function

DTYPE_OF = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]


class Arithmetic(TorchFunctionMode):
    """A mode in which torch code that asks for bf16 gets the dtype `products` instead.

    If `products` is fp64, code that asks for fp32 gets fp64, too. All fp64 tensors then report fp32 as their dtype,
    because the code of some projects requires fp32.
    """

    def __init__(self, products: torch.dtype) -> None:
        super().__init__()
        self._double = products == torch.float64
        self._instead = {torch.bfloat16: products} | ({torch.float32: products} if self._double else {})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.bfloat16, Tensor.float):
            named = torch.bfloat16 if func is Tensor.bfloat16 else torch.float32
            return args[0].to(self._instead.get(named, named))  # no recursion: the mode is off inside this method
        args = [self._instead.get(a, a) if isinstance(a, torch.dtype) else a for a in args]
        kwargs = {k: self._instead.get(v, v) if isinstance(v, torch.dtype) else v for k, v in (kwargs or {}).items()}
        found = func(*args, **kwargs)
        return torch.float32 if self._double and func == DTYPE_OF and found == torch.float64 else found


@contextlib.contextmanager
def arithmetic(products: torch.dtype) -> Iterator[None]:
    """Run a `with` block in the mode `Arithmetic`. In the block, torch's default dtype is fp64 if `products` is fp64,
    and fp32 otherwise."""
    wide = torch.float64 if products == torch.float64 else torch.float32
    torch.set_default_dtype(wide)
    try:
        with Arithmetic(products):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


# ---------------------------------------------------------------------------------------------------- where it is read


def taken(file: Path, names: Sequence[str], given: dict[str, Any]) -> dict[str, Any]:
    """Execute only the named functions, classes and constants of a file, with `given` as extra globals. Return
    their globals.

    A method is named as "Class.name".

    Raises:
        FileNotFoundError: There is no such file.
        ImportError: The file lacks one of the names.
    """
    space = {"torch": torch, "nn": nn, "Tensor": Tensor, "dist": dist, **given}
    found = {}
    for node in ast.parse(file.read_text()).body:
        for name, part in _named(node):
            if name in names:
                found[name] = part
    missing = [name for name in names if name not in found]
    if missing:
        raise ImportError(f"{file.name} has no {', '.join(missing)}")
    exec(compile(ast.Module([found[name] for name in names], []), str(file), "exec"), space)
    return space


def _named(node: ast.stmt) -> Iterator[tuple[str, ast.stmt]]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        yield node.name, node
    if isinstance(node, ast.ClassDef):
        yield from ((f"{node.name}.{name}", part) for inner in node.body for name, part in _named(inner))
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        yield node.targets[0].id, node


def blob(file: Path) -> str:
    """The file's name and shortened Git blob hash, which identify the version that was read."""
    data = file.read_bytes()
    found = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
    return f"{file.name} (blob {found[:8]})"


def folder(path: Path | None, option: str) -> Path:
    if path is None:
        raise FileNotFoundError(f"give its checkout: {option}")
    return path


def emerging(name: str) -> Any:
    """Import a module of Emerging-Optimizers. Before Python 3.12, replace its registry of optimizers with a stub."""
    if sys.version_info < (3, 12):
        typing.override = typing_extensions.override  # type: ignore[attr-defined]
        table = types.ModuleType("emerging_optimizers.registry")
        table.register_optimizer = lambda name: lambda found: found  # type: ignore[attr-defined]
        sys.modules.setdefault("emerging_optimizers.registry", table)
        importlib.import_module("emerging_optimizers").registry = table  # type: ignore[attr-defined]
        _alone("emerging_optimizers.orthogonalized_optimizers")  # the package's __init__ needs Python 3.12
    return importlib.import_module(f"emerging_optimizers.{name}")


def _alone(package: str) -> None:
    """Register an empty stand-in for a package, so that its modules can be imported without running its __init__."""
    if package not in sys.modules:
        top, _, last = package.partition(".")
        made = types.ModuleType(package)
        made.__path__ = [str(Path(place) / last) for place in importlib.import_module(top).__path__]
        sys.modules[package] = made
