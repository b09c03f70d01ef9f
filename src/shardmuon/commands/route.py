"""`shardmuon route`: print which parameters of a model are matrices, and why. No optimizer, no data, no step."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import pkgutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardmuon.routing.groups import param_groups


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the subcommand."""
    parser.add_argument(
        "model",
        help="MODULE:FUNCTION that returns the model (a dotted module, or a file that ends in .py), or the config.json "
        "of a Hugging Face model, or the folder that holds it (needs transformers; nothing is downloaded)",
    )
    parser.add_argument("--each", action="store_true", help="a line for each parameter, also where layers are alike")
    parser.add_argument("--meta", action="store_true", help="build it on the meta device (a config's model always is)")


def run(args: argparse.Namespace) -> int:
    """Print the table and what may be wrong. Returns 0, or 2 if there is no model to be had."""
    try:
        model = model_from_config(args.model) if _is_config(args.model) else model_from_function(args.model, args.meta)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            groups = param_groups(model, lr=1.0)  # the table is the same at any
    except (ImportError, OSError, AttributeError, TypeError, ValueError) as wrong:
        print(f"shardmuon route: {wrong}{_root(wrong)}", file=sys.stderr)
        return 2
    print(groups if args.each else groups.summary())
    for warning in caught:
        print(f"\nwarning: {warning.message}")
    return 0


def _root(error: BaseException) -> str:
    """The first cause of an error: libraries that import lazily say only that they could not."""
    cause = error.__cause__
    while cause is not None and cause.__cause__ is not None:
        cause = cause.__cause__
    return "" if cause is None else f" ({type(cause).__name__}: {cause})"


def _is_config(text: str) -> bool:
    return text.endswith(".json") or (Path(text) / "config.json").is_file()


def model_from_function(text: str, meta: bool) -> nn.Module:
    """The model that a function of a module or file returns, or a model that stands there under this name."""
    module_name, _, name = text.partition(":")
    if not name:
        raise ValueError(f"{text!r} is no MODULE:FUNCTION and no config.json. Write e.g. my_project.models:build")
    with _importable(module_name) as importable:
        found: Any = pkgutil.resolve_name(f"{importable}:{name}")
    with torch.device("meta") if meta else contextlib.nullcontext():
        model = found if isinstance(found, nn.Module) else found()
    if not isinstance(model, nn.Module):
        raise TypeError(f"{text} returned {type(model).__name__}, not a torch.nn.Module")
    return model


@contextlib.contextmanager
def _importable(name: str) -> Iterator[str]:
    """Put the folder of a module or file on the import path, as `python -m` would, and give the name to import."""
    path = Path(name)
    folder = str(path.parent.resolve()) if path.suffix == ".py" else str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        yield path.stem if path.suffix == ".py" else name
    finally:
        sys.path.remove(folder)


def model_from_config(text: str) -> nn.Module:
    """The model of a Hugging Face config, on the meta device."""
    if not Path(text).exists():
        raise FileNotFoundError(f"{text}: there is no such file")
    try:
        given: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise ImportError(f"{text}: it takes transformers ({error}): pip install transformers") from None
    config = given.AutoConfig.from_pretrained(text)
    names = getattr(config, "architectures", None) or ()
    kind = getattr(given, names[0], None) if names else None
    with torch.device("meta"):
        model = given.AutoModelForCausalLM.from_config(config) if kind is None else kind(config)
    if hasattr(model, "tie_weights"):  # weights on the meta device are tied only when asked to
        model.tie_weights()
    assert isinstance(model, nn.Module)
    return model
