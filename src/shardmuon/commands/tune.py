"""`shardmuon tune`: measure which orthogonalizer is fastest on this device and keep the answer."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

import torch

from shardmuon.orthogonalize.choice import Choice
from shardmuon.orthogonalize.schedules import SCHEDULES, schedule
from shardmuon.orthogonalize.tuning import cache_file, choose, device_key

SHAPES = ("512x512", "512x2048", "1024x1024", "1024x4096", "2048x2048", "2048x8192", "4096x4096", "4096x14336")


def shape(text: str) -> tuple[int, int]:
    """ "1024x4096" as (1024, 4096)."""
    try:
        rows, cols = (int(word) for word in text.lower().split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape: write rows and columns as 1024x4096") from None
    if min(rows, cols) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} has no elements")
    return rows, cols


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument("shapes", nargs="*", type=shape, help=f"shapes of matrices (default: {' '.join(SHAPES)})")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="device to measure")
    parser.add_argument("--coefficients", default="keller", choices=sorted(SCHEDULES), help="schedule of the steps")
    parser.add_argument("--steps", type=int, help="number of Newton-Schulz steps (default: the schedule's own)")
    dtypes = ("float16", "float32", "float64", "bfloat16")
    parser.add_argument("--dtype", choices=dtypes, help="of the products (default: each method's)")
    parser.add_argument(
        "--hardware",
        metavar="OUT.yaml",
        type=Path,
        help="measure this machine instead (products, memory, exchanges, latencies) and write the file that `shardmuon "
        "plan --gpu OUT.yaml` reads",
    )
    parser.add_argument(
        "--ranks", type=int, nargs="+", help="with --hardware: of how many ranks (default: 1 2 4, or the GPUs here)"
    )
    parser.add_argument(
        "--seconds", type=float, default=0.3, help="with --hardware: to spend on each product (%(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Measure every shape anew and print what was found."""
    device = torch.device(args.device)
    if args.hardware is not None:
        return _hardware(args, device)
    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    try:
        triples = schedule(args.coefficients, args.steps).triples
    except ValueError as wrong:
        print(f"shardmuon tune: {wrong}")
        return 2
    print(f"{device_key(device)}; {len(triples)} steps of {args.coefficients}")
    for rows, cols in args.shapes or [shape(text) for text in SHAPES]:
        choice: Choice = choose(rows, cols, triples, device, dtype, fresh=True)
        print(f"{rows}x{cols}: {choice}, {choice.reason}", flush=True)
    print(f"kept in {cache_file()}, where Orthogonalizer(method='auto') finds it")
    return 0


def _hardware(args: argparse.Namespace, device: torch.device) -> int:
    """Measure the machine and write its file; 0, or 2 if that cannot be."""
    fault = ""
    if args.hardware.suffix not in (".yaml", ".yml") or not args.hardware.absolute().parent.is_dir():
        fault = f"--hardware {args.hardware} must be a .yaml file in a folder that exists"
    elif args.ranks and (min(args.ranks) < 1 or max(args.ranks) > 64):
        fault = f"--ranks {args.ranks} must be numbers of ranks, 1 to 64, on this machine"
    elif args.seconds <= 0.0:
        fault = f"--seconds {args.seconds:g} must be above 0"
    if not fault:
        try:
            module = import_module("shardmuon.commands.tune_hardware")
            if device.type == "cpu":
                torch.set_num_threads(1)  # a rank has one, and ranks are what is planned for
            counts = args.ranks or _counts(device)
            module.measure(
                args.hardware, device, sorted(set(counts)), args.seconds, lambda text: print(text, flush=True)
            )
        except (ImportError, OSError, ValueError) as wrong:
            fault = str(wrong)
    if fault:
        print(f"shardmuon tune: {fault}", file=sys.stderr)
        return 2
    if args.hardware.exists():  # under torchrun rank 0 writes
        print(f"wrote {args.hardware}: shardmuon plan MODEL --mesh .. --gpu {args.hardware}")
    return 0


def _counts(device: torch.device) -> list[int]:
    most = torch.cuda.device_count() if device.type == "cuda" else 4
    return [count for count in (1, 2, 4, 8) if count <= most]
