"""Train the model of examples/train.py with plain Muon and with each variant; compare losses and step times.

    python benchmarks/variants.py                        # 3 seeds, 400 steps: an hour or two on two cores
    python benchmarks/variants.py --steps 40 --seeds 2   # a quick try
    python benchmarks/variants.py --only time            # only step times, without training

For each seed, all variants start from the same weights and see the same batches; one learning rate is used throughout.
A variant is named after its stages, the operations that it adds to a step. To combine stages, use `--variants a+b`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from common import RESULTS, write
from language import Config, Model, evaluate, fit, read_text
from torch import nn

from shardmuon import Muon

PLAIN = "plain"
FIGURE = RESULTS.parents[1] / "docs" / "img" / "variants.png"
VARIANTS = (
    PLAIN,
    "normuon",
    "muon_eq",
    "muon_eq+normuon",
    "hyperball",
)
WITHOUT_DECAY = ("hyperball",)  # Hyperball does not support weight decay


def train(variant: str, seed: int, text: list[Any], args: argparse.Namespace) -> dict[str, Any]:
    """Train one model; return its training losses and its final held-out loss, in nats per byte."""
    config = Config(
        dim=args.width, layers=args.layers, hidden=3 * args.width, seq_len=args.seq_len, batch=args.batch,
        steps=args.steps, warmup=args.steps // 5, seed=seed, eval_batches=args.eval_batches,
    )  # fmt: skip
    model = Model(config)
    chosen = None if variant == PLAIN else variant
    decay = 0.0 if variant in WITHOUT_DECAY else 0.1
    optimizer = Muon(model, lr=args.lr, weight_decay=decay, variant=chosen)
    losses = fit(model, optimizer, text[0], config)
    return {"train": losses, "held_out": evaluate(model, text[1], config)}


def smoothed(values: list[float]) -> list[float]:
    """The exponential moving average of the values, with a decay of 0.85 and Adam's bias correction."""
    average, weight, out = 0.0, 0.0, []
    for value in values:
        average, weight = 0.85 * average + 0.15 * value, 0.85 * weight + 0.15
        out.append(average / weight)
    return out


def step_times(args: argparse.Namespace) -> dict[str, float]:
    """Time steps on the matrices of a transformer layer. Return each variant's shortest step time in milliseconds."""
    d = args.time_width
    shapes = [(d, d)] * 4 + [(3 * d, d)] * 2 + [(d, 3 * d)]
    optimizers: dict[str, Muon] = {}
    for variant in args.variants:
        params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
        for p in params:
            p.grad = torch.randn_like(p)
        chosen = None if variant == PLAIN else variant
        decay = 0.0 if variant in WITHOUT_DECAY else 0.1
        how = {"method": "standard"}
        optimizers[variant] = Muon(params, lr=0.02, weight_decay=decay, variant=chosen, **how)
        optimizers[variant].step()
    found: dict[str, list[float]] = {variant: [] for variant in optimizers}
    for _ in range(args.rounds):
        for variant, optimizer in optimizers.items():
            began = time.perf_counter()
            optimizer.step()
            found[variant].append(1e3 * (time.perf_counter() - began))
    return {variant: min(times) for variant, times in found.items()}


def table(runs: dict[str, list[dict[str, Any]]], times: dict[str, float]) -> str:
    """Return a Markdown table of held-out losses, their differences from plain Muon at each seed, and step times."""
    lines = [
        "| variant | held-out loss: mean (min..max) | less than plain's, seed by seed | step, ms | of plain's |",
        "|---|---|---|---|---|",
    ]
    for variant in runs or times:
        loss, less = "-", "-"
        if variant in runs:
            losses = [run["held_out"] for run in runs[variant]]
            loss = f"{statistics.mean(losses):.4f} ({min(losses):.4f}..{max(losses):.4f})"
            pairs = zip(runs[PLAIN], runs[variant], strict=True) if PLAIN in runs and variant != PLAIN else ()
            less = ", ".join(f"{a['held_out'] - b['held_out']:+.4f}" for a, b in pairs) or "-"
        ms, ratio = "-", "-"
        if variant in times:
            ms = f"{times[variant]:.2f}"
            ratio = f"{times[variant] / times[PLAIN]:.3f}" if PLAIN in times else "-"
        lines.append(f"| {variant} | {loss} | {less} | {ms} | {ratio} |")
    return "\n".join(lines)


def draw(runs: dict[str, list[dict[str, Any]]]) -> None:
    """Draw the smoothed training losses: the mean over seeds as a line, and the range over seeds as a band."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 4.6))
    for number, (variant, of_variant) in enumerate(runs.items()):
        color = "#444444" if variant == PLAIN else mpl.colormaps["tab10"](number)
        columns = list(zip(*(smoothed(run["train"]) for run in of_variant), strict=True))
        steps = range(1, len(columns) + 1)
        ends = [run["held_out"] for run in of_variant]
        label = f"{variant}: held out {statistics.mean(ends):.3f} ({min(ends):.3f}..{max(ends):.3f})"
        axes.plot(steps, [statistics.mean(column) for column in columns], color=color, lw=1.6, label=label)
        axes.fill_between(steps, list(map(min, columns)), list(map(max, columns)), color=color, alpha=0.15, lw=0)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss, nats per byte (smoothed)")
    tails = [loss for of_variant in runs.values() for run in of_variant for loss in smoothed(run["train"])[-1:]]
    heads = [smoothed(run["train"])[len(run["train"]) // 10] for of_variant in runs.values() for run in of_variant]
    axes.set_ylim(0.97 * min(tails), 1.02 * max(heads))
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(FIGURE, dpi=140)
    plt.close(figure)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", default=",".join(VARIANTS), help="separated by commas (%(default)s)")
    parser.add_argument("--only", choices=("runs", "time"), help="one half alone; nothing is written then")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--eval-batches", type=int, default=24)
    parser.add_argument("--time-width", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    args.variants = args.variants.split(",")
    return args


def main() -> None:
    args = parse()
    times = step_times(args) if args.only != "runs" else {}
    runs: dict[str, list[dict[str, Any]]] = {}
    if args.only != "time":
        text = read_text()
        for variant in args.variants:
            for seed in range(args.seeds):
                runs.setdefault(variant, []).append(train(variant, seed, text, args))
                print(f"{variant}, seed {seed}: {runs[variant][-1]['held_out']:.4f}", flush=True)
    text = table(runs, times)
    print(text)
    if args.only is None:
        draw(runs)
        write("variants", f"{text}\n\n![losses](../../docs/img/variants.png)", {"runs": runs, "step_ms": times})


if __name__ == "__main__":
    main()
