"""The `shardmuon` command. Each subcommand has its own module, which is imported only when the subcommand is used."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import cast

from shardmuon import __version__

__all__ = ["main"]

# Subcommand -> (module that defines add_arguments(parser) and run(args) -> exit status, help text)
_COMMANDS = {
    "plan": ("shardmuon.commands.plan", "say what Muon will take of a job on any mesh: memory, bytes, time"),
    "route": ("shardmuon.commands.route", "print which parameters of a model are matrices, and why"),
    "verify": ("shardmuon.commands.verify", "compare the updates of layouts with those of one process"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand. `argv` defaults to the arguments of the command line.

    Returns:
        Exit status of the subcommand. It is 2, after an error message, if the arguments or the model that they name are
        invalid.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="shardmuon", description="One Muon optimizer for PyTorch, the same update however the weights are sharded."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(metavar="command", required=True)
    asked = next((word for word in words if not word.startswith("-")), None)
    for name, (module_name, summary) in _COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        if name == asked:
            module = import_module(module_name)
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    args = parser.parse_args(words)
    try:
        return cast(int, args.run(args))
    except (ImportError, OSError, AttributeError, TypeError, ValueError) as wrong:  # from user arguments or the model
        print(f"shardmuon {asked}: {wrong}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
