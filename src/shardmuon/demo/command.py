"""The command line of `shardmuon train`: its options, and from them the configuration of a run."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardmuon.demo.config import TrainConfig

__all__ = ["add_arguments", "run"]

_LAYOUTS = ("single", "ddp", "fsdp2", "hsdp", "tp", "fsdp2+tp", "hsdp+tp", "ep")  # the keys of demo.layouts.LAYOUTS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options. Imports nothing heavy, so that --help is quick."""
    where = parser.add_argument_group("where")
    where.add_argument("--layout", choices=_LAYOUTS, default="single", help="how the weights are sharded (%(default)s)")
    where.add_argument("--ranks", type=int, help="processes to start (default: the fewest the layout can use)")
    for axis, what in (("tp", "tensor parallel"), ("replicate", "replicas of hsdp"), ("ep", "expert parallel")):
        where.add_argument(f"--{axis}", type=int, help=f"ranks along the {what} axis (2; tp and ddp alone take all)")
    where.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="%(default)s: one GPU a rank, else CPU"
    )
    model = parser.add_argument_group("model")
    model.add_argument("--dim", type=int, default=192, help="channels (%(default)s)")
    model.add_argument("--layers", type=int, default=4, help="blocks (%(default)s)")
    model.add_argument("--heads", type=int, default=8, help="query heads (%(default)s)")
    model.add_argument("--kv-heads", type=int, default=4, help="key-value heads, shared by query heads (%(default)s)")
    model.add_argument("--hidden", type=int, default=512, help="hidden units of SwiGLU (%(default)s)")
    model.add_argument("--experts", type=int, help="routed experts in place of one SwiGLU (0; 4 with --layout ep)")
    model.add_argument("--top-k", type=int, default=2, help="experts that answer a token (%(default)s)")
    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=int, default=200, help="(%(default)s)")
    training.add_argument("--batch", type=int, default=16, help="sequences in the global batch (%(default)s)")
    training.add_argument("--seq-len", type=int, default=128, help="bytes in a sequence (%(default)s)")
    training.add_argument("--lr", type=float, default=3e-3, help="of Muon, and of the AdamW inside it (%(default)s)")
    training.add_argument("--compare", choices=("adamw",), help="run the same training with torch.optim.AdamW as well")
    training.add_argument("--adamw-lr", type=float, default=3e-3, help="of the AdamW compared with (%(default)s)")
    training.add_argument("--weight-decay", type=float, default=0.1, help="of both (%(default)s)")
    training.add_argument("--warmup", type=int, default=20, help="steps of linear warm-up (%(default)s)")
    training.add_argument("--eval-every", type=int, default=50, help="steps between held-out losses (%(default)s)")
    training.add_argument("--eval-batches", type=int, default=4, help="batches in each of them (%(default)s)")
    training.add_argument("--seed", type=int, default=0, help="of the weights and the data order (%(default)s)")
    proof = parser.add_argument_group("proof and output")
    proof.add_argument(
        "--deterministic", action="store_true", help="orthogonalize one matrix at a time: the same bits on any layout"
    )
    proof.add_argument(
        "--tolerance",
        type=float,
        help="largest relative difference of the last update from the dense one (1e-4; bf16: 2e-2; --deterministic: 0)",
    )
    proof.add_argument(
        "--show-routing", action="store_true", help="print which parameter goes to Muon or AdamW, and why"
    )
    proof.add_argument("--out", metavar="DIR", help="write run.json and loss.png there")


def run(args: argparse.Namespace) -> int:
    """Train as `args` says.

    Returns:
        Exit status: 0, 1 when the last step's proof or a rank failed, 2 for options that do not fit, 130 after Ctrl-C.
    """
    from shardmuon.demo.launch import check_device, inside_launcher, launch

    try:
        config = _config(args, int(os.environ["WORLD_SIZE"]) if inside_launcher() else args.ranks)
        check_device(config)
    except ValueError as wrong:
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"shardmuon train: error: {wrong}", file=sys.stderr)
        return 2
    return launch(config)


def _config(args: argparse.Namespace, num_ranks: int | None) -> TrainConfig:
    """Check everything that can be checked before a rank starts."""
    from shardmuon.demo.config import TrainConfig
    from shardmuon.demo.layouts import check, mesh_shape
    from shardmuon.demo.model import ModelConfig

    if args.ranks is not None and num_ranks != args.ranks:
        raise ValueError(f"--ranks {args.ranks}, but the launcher started {num_ranks}: leave --ranks out.")
    sizes = {axis: getattr(args, axis) for axis in ("tp", "replicate", "ep") if getattr(args, axis) is not None}
    mesh = mesh_shape(args.layout, num_ranks, sizes)
    experts = args.experts if args.experts is not None else max(4, mesh["ep"]) if "ep" in mesh else 0
    model = ModelConfig(
        dim=args.dim,
        num_layers=args.layers,
        num_heads=args.heads,
        num_kv_heads=args.kv_heads,
        hidden=args.hidden,
        num_experts=experts,
        top_k=args.top_k,
    )
    check(args.layout, mesh, model, args.batch)
    return TrainConfig(
        layout=args.layout,
        mesh=mesh,
        model=model,
        optimizers=("muon", "adamw") if args.compare else ("muon",),
        **{
            name: getattr(args, name)
            for name in (
                *("seq_len", "batch", "steps", "lr", "adamw_lr", "weight_decay", "warmup", "eval_every"),
                *("eval_batches", "seed", "device", "deterministic", "tolerance", "show_routing", "out"),
            )
        },
    )
