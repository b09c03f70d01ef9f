"""The command line of the demo: its options, and from them the configuration of a run."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from shardmuon.demo.config import ModelConfig, TrainConfig
from shardmuon.demo.mesh import DEFAULT_SIZE, LAYOUTS, check, mesh_shape

__all__ = ["main"]

_RUN = TrainConfig()
_DEFAULT_EXPERTS = 4  # of --layout ep, which needs some
_DEFAULT_STAGE = 2


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("where")
    where.add_argument(
        "--layout", choices=tuple(LAYOUTS), default=_RUN.layout, help="how weights are cut (%(default)s)"
    )
    _zero_arguments(parser)
    where.add_argument("--ranks", type=int, help="processes to start (the fewest that the layout can use)")
    for axis, what in (("tp", "tensor parallel"), ("replicate", "hsdp's replicas"), ("ep", "expert parallel")):
        where.add_argument(f"--{axis}", type=int, metavar="RANKS", help=f"along the axis of {what} ({DEFAULT_SIZE})")
    devices = ("auto", "cpu", "cuda")
    where.add_argument("--device", choices=devices, default=_RUN.device, help="auto: GPUs if there is one a rank")
    model = parser.add_argument_group("model")
    _number(model, "--dim", _RUN.model.dim, "channels")
    _number(model, "--layers", _RUN.model.num_layers, "blocks")
    _number(model, "--heads", _RUN.model.num_heads, "query heads")
    _number(model, "--kv-heads", _RUN.model.num_kv_heads, "key-value heads, each shared by several query heads")
    _number(model, "--hidden", _RUN.model.hidden, "hidden units of SwiGLU")
    model.add_argument("--experts", type=int, help=f"experts in place of one SwiGLU (0; layout ep: {_DEFAULT_EXPERTS})")
    _number(model, "--top-k", _RUN.model.top_k, "experts that answer a token")
    training = parser.add_argument_group("training")
    _number(training, "--steps", _RUN.steps, "steps")
    _number(training, "--batch", _RUN.batch, "sequences in the global batch")
    _number(training, "--seq-len", _RUN.seq_len, "bytes in a sequence")
    _number(training, "--lr", _RUN.lr, "learning rate of Muon and of the AdamW inside it")
    training.add_argument("--compare", choices=("adamw",), help="repeat the training with torch.optim.AdamW")
    _number(training, "--adamw-lr", _RUN.adamw_lr, "learning rate of the AdamW compared with")
    _number(training, "--weight-decay", _RUN.weight_decay, "of both")
    _number(training, "--warmup", _RUN.warmup, "steps of linear warm-up; a cosine to a tenth follows")
    _number(training, "--eval-every", _RUN.eval_every, "steps between held-out losses")
    _number(training, "--eval-batches", _RUN.eval_batches, "batches in each of them")
    _number(training, "--seed", _RUN.seed, "of the weights and the order of the data")
    proof = parser.add_argument_group("proof and output")
    proof.add_argument("--show-routing", action="store_true", help="print where each parameter goes, and why")
    proof.add_argument("--out", metavar="DIR", help="write run.json and loss.png there")


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the arguments say.

    Returns:
        Exit status: 0, 1 when the last step's proof or a rank failed, 2 for options that do not fit, 130 after Ctrl-C.
    """
    from shardmuon.demo.launch import check_device, inside_launcher, launch

    parser = argparse.ArgumentParser(
        prog="python -m shardmuon.demo",
        description="Train a small language model in a layout, and prove the last step's update.",
    )
    _add_arguments(parser)
    args = parser.parse_args(argv)

    try:
        if inside_launcher() and args.offload == "nvme" and args.nvme_path is None:
            raise ValueError("--offload nvme under a launcher: write --nvme-path FOLDER, the same on every rank.")
        config = _config(args, int(os.environ["WORLD_SIZE"]) if inside_launcher() else args.ranks)
        check_device(config)
    except ValueError as wrong:
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"shardmuon.demo: error: {wrong}", file=sys.stderr)
        return 2
    return launch(config)


def _zero_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--engine", choices=("torch", "deepspeed"), default=_RUN.engine, help="what trains (%(default)s)"
    )
    stage = f"of DeepSpeed's ZeRO ({_DEFAULT_STAGE})"
    group.add_argument("--zero", type=int, choices=(0, 1, 2, 3), help=f"stage {stage}")
    group.add_argument(
        "--offload", choices=("none", "cpu", "nvme"), default=_RUN.offload, help="where ZeRO keeps state (%(default)s)"
    )
    group.add_argument("--nvme-path", metavar="DIR", help="for --offload nvme (a temporary folder)")


def _number(group: argparse._ArgumentGroup, name: str, default: float, what: str) -> None:
    group.add_argument(name, type=type(default), default=default, metavar="N", help=f"{what} (%(default)s)")


def _layout(args: argparse.Namespace) -> tuple[str, int]:
    """The layout's name and the stage of ZeRO."""
    if args.engine == "torch":
        if args.zero is not None:
            raise ValueError(f"--zero {args.zero} is for --engine deepspeed.")
        return args.layout, 0
    if args.layout != _RUN.layout:
        raise ValueError(f"--layout {args.layout} is torch's; with --engine deepspeed write --zero 0, 1, 2 or 3.")
    stage = _DEFAULT_STAGE if args.zero is None else args.zero
    return f"zero{stage}", stage


def _config(args: argparse.Namespace, num_ranks: int | None) -> TrainConfig:
    """Check everything that can be checked before a rank starts."""
    if args.ranks is not None and num_ranks != args.ranks:
        raise ValueError(f"--ranks {args.ranks}, but the launcher started {num_ranks}: leave --ranks out.")
    sizes = {axis: getattr(args, axis) for axis in ("tp", "replicate", "ep") if getattr(args, axis) is not None}
    from shardmuon.demo.engines import check_engine

    layout, stage = _layout(args)
    check_engine(args.engine, stage, args.offload, args.nvme_path)
    mesh = mesh_shape(layout, num_ranks, sizes)
    default_experts = max(_DEFAULT_EXPERTS, mesh["ep"]) if "ep" in mesh else 0
    model = ModelConfig(
        dim=args.dim,
        num_layers=args.layers,
        num_heads=args.heads,
        num_kv_heads=args.kv_heads,
        hidden=args.hidden,
        num_experts=default_experts if args.experts is None else args.experts,
        top_k=args.top_k,
    )
    check(layout, mesh, model, args.batch)
    same_name = ("seq_len", "batch", "steps", "lr", "adamw_lr", "weight_decay", "warmup", "eval_every", "eval_batches")
    output = ("seed", "device", "show_routing", "out")
    engine = ("engine", "offload", "nvme_path")
    return TrainConfig(
        layout=layout,
        zero=stage,
        mesh=mesh,
        model=model,
        optimizers=("muon", "adamw") if args.compare else ("muon",),
        **{name: getattr(args, name) for name in same_name + output + engine},
    )
