"""The `shardmuon` command, with the subcommands `plan`, `route` and `verify`. Importing the module for `verify` takes
seconds, so it is imported only if the user runs `shardmuon verify`."""

from __future__ import annotations

import argparse
import shutil
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import cast

import torch

from shardmuon import __version__
from shardmuon.foresight import Hardware, plan
from shardmuon.foresight.models import load_model
from shardmuon.routing.groups import param_groups

__all__ = ["main"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand of `shardmuon`.

    Args:
        argv: The subcommand and its arguments. Default: the command-line arguments.

    Returns:
        Exit status of the subcommand. If the arguments or the user's model cause an error, the error message is printed
        and the status is 2.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="shardmuon", description="One Muon optimizer for PyTorch, the same update however the weights are sharded."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(metavar="command", required=True)
    asked = next((word for word in words if not word.startswith("-")), None)
    for name, summary, add_arguments in (
        ("plan", "say what Muon will take of a job on any mesh: memory, bytes, time", _add_plan),
        ("route", "print which parameters of a model are matrices, and why", _add_route),
        ("verify", "compare the updates of layouts with those of one process", _add_verify),
    ):
        subparser = subparsers.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        if name == asked:
            add_arguments(subparser)
    args = parser.parse_args(words)
    try:
        return cast(int, args.run(args))
    except (
        ImportError,
        OSError,
        AttributeError,
        TypeError,
        ValueError,
    ) as wrong:  # exceptions that the user's arguments or model can cause
        print(f"shardmuon {asked}: {wrong}", file=sys.stderr)
        return 2


def _add_plan(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `shardmuon plan` to a parser. They cover only some options of `Muon`; the function
    `shardmuon.foresight.plan` accepts the others, too."""
    parser.set_defaults(run=_plan)
    parser.add_argument(
        "model", help="a preset (llama3-8b, deepseek-v3, ..), a config.json (needs transformers), or MODULE:FUNCTION"
    )
    parser.add_argument("--mesh", required=True, help='sizes of the axes, e.g. "dp=8 shard=64 tp=8 ep=8 pp=4"')
    parser.add_argument("--gpu", default="h100", help=f"{', '.join(Hardware.names())}, or a .yaml file (%(default)s)")
    parser.add_argument(
        "--engine",
        default="torch",
        help="cuts parameters up: torch (default: DDP, FSDP2, HSDP, TP, EP), zero (ZeRO 1 and 2)",
    )
    parser.add_argument("--tokens-per-step", type=float, help="of a training step on all ranks: 4e6")
    parser.add_argument("--active-params", type=float, help="that work on a token, of a model with experts: 3e9")
    parser.add_argument("--gpus-per-node", type=int, help="ranks that the fast links join (default: the GPU's)")
    parser.add_argument("--weights", choices=sorted(_DTYPES), default="float32", help="of parameters (%(default)s)")
    parser.add_argument("--momentum", choices=("float32", "bfloat16", "int8"), help="stored as (default: as gradients)")
    parser.add_argument("--html", type=Path, help="write the report as one page, with the step's timeline")


def _plan(args: argparse.Namespace) -> int:
    """Print estimates of the time, memory and communication that Muon needs in a job. Return 0 as the exit status."""
    if args.html is not None and not args.html.parent.is_dir():
        raise ValueError(f"--html {args.html}: there is no folder {args.html.parent}. Make it first")
    report = plan(
        args.model,
        args.mesh,
        gpu=args.gpu,
        engine=args.engine,
        gpus_per_node=args.gpus_per_node,
        tokens_per_step=args.tokens_per_step,
        active_params=args.active_params,
        weights=_DTYPES[args.weights],
        momentum_dtype=_DTYPES.get(args.momentum, args.momentum),
    )
    print(report.text(shutil.get_terminal_size((150, 0)).columns))
    if args.html is not None:
        report.write_html(args.html)
        print(f"wrote {args.html}")
    return 0


def _add_verify(parser: argparse.ArgumentParser) -> None:
    import_module("shardmuon.commands.verify").add_arguments(parser)


def _add_route(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_route)
    parser.add_argument(
        "model",
        help="MODULE:FUNCTION that returns the model (a dotted module, or a file that ends in .py), a preset "
        "(llama3-8b, deepseek-v3, ..), or the config.json of a Hugging Face model or the folder that holds it (needs "
        "transformers; nothing is downloaded)",
    )
    parser.add_argument(
        "--meta", action="store_true", help="build it on the meta device (presets and config.json always are)"
    )


def _route(args: argparse.Namespace) -> int:
    """Print a model's routing table, which gives the optimizer of each parameter and the reason for this choice,
    followed by any warnings about the routing. No optimizer, data or training step is needed. Return 0 as the exit
    status."""
    _, _, model, _ = load_model(args.model, args.meta)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # `param_groups` requires an lr, but the lr does not affect the routing table.
        groups = param_groups(model, lr=1.0)
    print(groups)
    for warning in caught:
        print(f"\nwarning: {warning.message}")
    return 0
