"""`shardmuon plan`: print what Muon will take of a job, from its real plan, before the job runs."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from pathlib import Path

import torch

from shardmuon.foresight.hardware import names
from shardmuon.foresight.report import Report, plan
from shardmuon.options import Exchange, Orthogonalizer, Storage

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def amount(text: str) -> float:
    """Number in a text such as "4M": 4e6."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?(?:e\+?\d+)?)([kmbgt]?)", text.lower().replace(",", "").replace("_", ""))
    value = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0: write e.g. 4M, 512k or 4194304")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the subcommand."""
    parser.add_argument(
        "model",
        help="a preset (llama3-8b, deepseek-v3, ..), a config.json, or MODULE:FUNCTION",
    )
    parser.add_argument("--mesh", required=True, help='sizes of the axes, e.g. "dp=8 shard=64 tp=8 ep=8 pp=4"')
    parser.add_argument("--gpu", default="h100", help=f"{', '.join(names())}, or a .yaml file (%(default)s)")
    parser.add_argument("--engine", help="cuts parameters up: fsdp2, ddp, zero1 to zero3, megatron")
    parser.add_argument("--tokens-per-step", type=amount, help="of a training step on all ranks: 4M, 512k, ..")
    parser.add_argument(
        "--active-params", type=amount, help="that work on a token: 3B, .. (default: as config.json says)"
    )
    parser.add_argument("--gpus-per-node", type=int, help="ranks that the fast links join (default: the GPU's)")
    parser.add_argument("--weights", choices=sorted(_DTYPES), default="float32", help="of parameters (%(default)s)")
    parser.add_argument("--momentum", choices=("float32", "bfloat16", "int8"), help="stored as (default: as gradients)")
    parser.add_argument("--method", default="auto", help="Orthogonalizer.method (%(default)s)")
    parser.add_argument("--split-k", type=int, default=1, help="Orthogonalizer.split_k (%(default)s)")
    parser.add_argument("--bucket-mib", type=int, help="Exchange.bucket_bytes in MiB (default: by price)")
    parser.add_argument(
        "--advice",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="plan and price changes that might help (default: yes)",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--html", type=Path, help="write the report as one page, with the step's timeline")


def run(args: argparse.Namespace) -> int:
    """Print the report. Returns 0, or 2 after a message that says what to write."""
    try:
        if args.html is not None and not args.html.parent.is_dir():
            raise ValueError(f"--html {args.html}: there is no folder {args.html.parent}. Make it first")
        report = _report(args)
        if args.html is not None:
            report.write_html(args.html)
    except (ImportError, OSError, AttributeError, TypeError, ValueError) as wrong:
        print(f"shardmuon plan: {wrong}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(report.to_dict(), default=str))
        return 0
    report.show()
    if args.html is not None:
        print(f"wrote {args.html}")
    return 0


def _report(args: argparse.Namespace) -> Report:
    if args.bucket_mib is not None and args.bucket_mib < 1:
        raise ValueError(f"--bucket-mib {args.bucket_mib} must be at least 1")
    return plan(
        args.model,
        args.mesh,
        gpu=args.gpu,
        engine=args.engine,
        gpus_per_node=args.gpus_per_node,
        tokens_per_step=args.tokens_per_step,
        active_params=args.active_params,
        weights=_DTYPES[args.weights],
        advice=args.advice,
        orthogonalizer=Orthogonalizer(method=args.method, split_k=args.split_k),
        exchange=Exchange(bucket_bytes=args.bucket_mib and args.bucket_mib * 2**20),
        storage=Storage(momentum_dtype=_DTYPES.get(args.momentum, args.momentum)),
    )
