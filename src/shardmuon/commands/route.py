"""`shardmuon route`: print which parameters of a model Muon treats as matrices, and why. No optimizer, data or training
step is needed."""

from __future__ import annotations

import argparse
import warnings

from shardmuon.foresight.models import make_model
from shardmuon.routing.groups import param_groups


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `shardmuon route` to a parser."""
    parser.add_argument(
        "model",
        help="MODULE:FUNCTION that returns the model (a dotted module, or a file that ends in .py), or the config.json "
        "of a Hugging Face model, or the folder that holds it (needs transformers; nothing is downloaded)",
    )
    parser.add_argument("--each", action="store_true", help="a line for each parameter, also where layers are alike")
    parser.add_argument("--meta", action="store_true", help="build it on the meta device (a config's model always is)")


def run(args: argparse.Namespace) -> int:
    """Print the routing table (which optimizer updates each parameter, and why) and its warnings. Returns exit status
    0."""
    model = make_model(args.model, args.meta)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        groups = param_groups(model, lr=1.0)  # any lr, because the table does not depend on it
    print(groups if args.each else groups.summary())
    for warning in caught:
        print(f"\nwarning: {warning.message}")
    return 0
