"""`shardmuon plan`: print the time, memory and communication that Muon will need in a job, before the job runs."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch

from shardmuon.foresight.hardware import names
from shardmuon.foresight.report import plan

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `shardmuon plan` to a parser. Only some options of `Muon` have an argument; the function
    `shardmuon.foresight.plan` takes all of them."""
    parser.add_argument(
        "model", help="a preset (llama3-8b, deepseek-v3, ..), a config.json (needs transformers), or MODULE:FUNCTION"
    )
    parser.add_argument("--mesh", required=True, help='sizes of the axes, e.g. "dp=8 shard=64 tp=8 ep=8 pp=4"')
    parser.add_argument("--gpu", default="h100", help=f"{', '.join(names())}, or a .yaml file (%(default)s)")
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


def run(args: argparse.Namespace) -> int:
    """Print the report on the planned job. Returns exit status 0."""
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
