"""`examples/train.py` as a module of tests: its folder is on no path, where its neighbours would hide libraries."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_PATH = Path(__file__).resolve().parents[1] / "examples" / "train.py"
_spec = importlib.util.spec_from_file_location("train", _PATH)
assert _spec is not None
assert _spec.loader is not None
train = importlib.util.module_from_spec(_spec)
sys.modules["train"] = train  # functions and dataclasses of it travel to ranks by this name
_spec.loader.exec_module(train)
