"""Best learning rate of the model in examples/train.py at several widths, for AdamW and for two update scales of Muon.

    python benchmarks/learning_rate.py                       # everything: about an hour on two cores
    python benchmarks/learning_rate.py --widths 64,128 --seeds 1

For each optimizer, the search starts at the expected optimum and moves up and down a grid of learning rates that differ
by factors of two, until the mean held-out loss over all seeds rises on both sides. Each finished run is saved in
results/learning_rate_runs.json, so an interrupted sweep can be resumed.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from common import RESULTS, write
from language import Config, Model, build_adamw, evaluate, fit, read_text
from sweeps import Curve, Sweep, at_best, best
from torch import nn

from shardmuon import Muon

RUNS = RESULTS / "learning_rate_runs.json"
FIGURE = RESULTS.parents[1] / "docs" / "img" / "learning_rate.png"


@dataclass(frozen=True)
class Way:
    """An optimizer whose best learning rate is to be found.

    Attributes:
        code: The code that a user writes, with x for the learning rate.
        start: The exponent of 2 at which the search for the learning rate starts.
        make: A function (model, lr) -> optimizer.
    """

    code: str
    start: int
    make: Callable[[nn.Module, float], torch.optim.Optimizer]


WAYS = {
    "original": Way("Muon(model, lr=x)", -6, lambda model, lr: Muon(model, lr=lr)),
    "match_rms_adamw": Way(
        'Muon(model, lr=x, adjust_lr_fn="match_rms_adamw")',
        -6,
        lambda model, lr: Muon(model, lr=lr, adjust_lr_fn="match_rms_adamw"),
    ),
    "adamw": Way("torch.optim.AdamW(..., lr=x)", -8, lambda model, lr: build_adamw(model, lr, 0.1)),
}


def held_out_loss(way: Way, width: int, lr: float, seed: int, text: list[Any], args: argparse.Namespace) -> float:
    """Train one model of this width; return its held-out loss in nats per byte, or infinity if training diverged.
    Attention heads have width / 4 channels, and hidden layers are three times as wide as the model."""
    config = Config(
        dim=width, layers=args.layers, hidden=3 * width, seq_len=args.seq_len, batch=args.batch, steps=args.steps,
        warmup=args.steps // 5, seed=seed, eval_batches=args.eval_batches,
    )  # fmt: skip
    model = Model(config)
    losses = fit(model, way.make(model, lr), text[0], config)
    return evaluate(model, text[1], config) if math.isfinite(losses[-1]) else math.inf


def table(curves: dict[str, dict[int, Curve]]) -> str:
    """A table with the best learning rate and its loss at each width, and the ratio of the largest to the smallest of
    these rates."""
    widths = sorted({width for curve in curves.values() for width in curve})
    lines = [
        "| written as | " + " | ".join(f"width {width}" for width in widths) + " | optimum moves by |",
        "|---" * (len(widths) + 2) + "|",
    ]
    for name, by_width in curves.items():
        cells = []
        for width in widths:
            cells.append(at_best(by_width[width]))
        powers = [best(by_width[width]) for width in widths]
        lines.append(f"| `{WAYS[name].code}` | " + " | ".join(cells) + f" | x{2 ** (max(powers) - min(powers))} |")
    return "\n".join(lines)


def draw(curves: dict[str, dict[int, Curve]]) -> None:
    """Plot held-out loss against learning rate: a panel per optimizer, a line per width, and a dot at each minimum."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(curves), figsize=(4.6 * len(curves), 4.2), sharey=True, squeeze=False)
    for panel, (name, by_width) in zip(panels[0], curves.items(), strict=True):
        colors = mpl.colormaps["viridis"]
        for number, (width, curve) in enumerate(sorted(by_width.items())):
            color = colors(number / max(1, len(by_width) - 1) * 0.85)
            lrs = [2.0**power for power in curve]
            means = [statistics.mean(losses) for losses in curve.values()]
            panel.plot(lrs, means, color=color, label=f"width {width}")
            panel.fill_between(
                lrs, [min(v) for v in curve.values()], [max(v) for v in curve.values()], color=color, alpha=0.15, lw=0
            )
            panel.plot([2.0 ** best(curve)], [min(means)], "o", color=color)
        panel.set_xscale("log", base=2)
        panel.set_title(WAYS[name].code, fontsize=9)
        panel.set_xlabel("learning rate")
        panel.grid(alpha=0.25)
    panels[0][0].set_ylabel("held-out loss, nats per byte")
    panels[0][-1].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(FIGURE, dpi=140)
    plt.close(figure)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", default="64,128,256,512")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--eval-batches", type=int, default=24)
    return parser.parse_args()


def main() -> None:
    args = parse()
    text = read_text()
    setting = {key: getattr(args, key) for key in ("steps", "batch", "seq_len", "layers", "eval_batches")}

    def run(key: str, lr: float, seed: int) -> float:
        name, width = key.split()
        return held_out_loss(WAYS[name], int(width), lr, seed, text, args)

    sweep = Sweep(RUNS, setting, args.seeds, run)
    widths, names = [int(width) for width in args.widths.split(",")], args.ways.split(",")
    curves: dict[str, dict[int, Curve]] = {name: {} for name in names}
    for width in widths:  # small widths first: they are cheap and show whether the grid is right
        for name in names:
            curves[name][width] = sweep.curve(f"{name} {width}", WAYS[name].start)
    draw(curves)
    data: dict[str, Any] = {
        name: {width: {f"2^{power}": losses for power, losses in curve.items()} for width, curve in by_width.items()}
        for name, by_width in curves.items()
    }
    text = (
        f"Held-out loss of the demo's model ({args.layers} blocks) after {args.steps} steps of {args.batch} x "
        f"{args.seq_len} bytes, mean of {args.seeds} seeds (lowest..highest), at the best learning rate of a grid of "
        f"factors of two. ![curves](../../docs/img/learning_rate.png)\n\n{table(curves)}"
    )
    write("learning_rate", text, data)


if __name__ == "__main__":
    main()
