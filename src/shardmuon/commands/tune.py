"""`shardmuon tune`: measure which orthogonalizer is fastest on this device, into a file for `Orthogonalizer.tuning`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from shardmuon.orthogonalize.choice import Chooser, Task, measure
from shardmuon.orthogonalize.schedules import SCHEDULES, schedule
from shardmuon.orthogonalize.stamp import machine_stamp
from shardmuon.orthogonalize.tuning import add, load

SHAPES = ("512x512", "512x2048", "1024x1024", "1024x4096", "2048x2048", "2048x8192", "4096x4096", "4096x14336")


def shape(text: str) -> tuple[int, int]:
    """Shape in a text such as "1024x4096": (1024, 4096)."""
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
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FILE.json",
        help="file to write, or to add to; Muon reads it by Orthogonalizer(tuning=FILE.json) and not otherwise",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="device to measure")
    parser.add_argument("--coefficients", default="keller", choices=sorted(SCHEDULES), help="schedule of the steps")
    parser.add_argument("--steps", type=int, help="number of Newton-Schulz steps (default: the schedule's own)")
    dtypes = ("float16", "float32", "float64", "bfloat16")
    parser.add_argument("--dtype", choices=dtypes, help="of the products (default: each method's)")


def run(args: argparse.Namespace) -> int:
    """Measure every shape, print what was found and write the file."""
    device = torch.device(args.device)
    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    try:
        triples = schedule(args.coefficients, args.steps).triples
        add(args.out, device, "times", {})  # a file that cannot be written is better known now
        print(f"{machine_stamp(device)}; {len(triples)} steps of {args.coefficients}")
        for rows, cols in args.shapes or [shape(text) for text in SHAPES]:
            task = Task(rows, cols, triples, device)
            measured, times = measure(task, dtype)
            add(args.out, device, "times", {measured: times})
            choice = Chooser("auto", dtype, load(str(args.out))).choice(task)
            print(f"{rows}x{cols}: {choice}, {choice.reason}", flush=True)
    except (OSError, ValueError) as wrong:
        print(f"shardmuon tune: {wrong}", file=sys.stderr)
        return 2
    print(f"Muon takes these with orthogonalizer=Orthogonalizer(tuning={str(args.out)!r})")
    return 0
