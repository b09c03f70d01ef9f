"""A helper for tests that imports scripts from examples/ as modules. It does not add examples/ to sys.path, because
other files in that folder could shadow libraries."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def load_example(name: str) -> Any:
    """Import a script from examples/ as a module of the same name, so that pickle can find its functions and
    dataclasses on the ranks."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


train = load_example("train")
