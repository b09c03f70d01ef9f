"""Draw the loss curves of a run. The only file of the demo that needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from shardmuon.demo.config import TrainConfig
from shardmuon.demo.result import RunResult

__all__ = ["draw_losses", "smoothed"]

_COLORS = {"muon": "#0b6e4f", "adamw": "#c8553d"}
_NAMES = {"muon": "Muon", "adamw": "AdamW"}


def smoothed(values: Sequence[float], memory: float = 0.85) -> list[float]:
    """Exponential moving average, corrected for its start."""
    average, weight, out = 0.0, 0.0, []
    for value in values:
        average = memory * average + (1.0 - memory) * value
        weight = memory * weight + (1.0 - memory)
        out.append(average / weight)
    return out


def draw_losses(results: Sequence[RunResult], config: TrainConfig, path: Path) -> None:
    """Write a PNG: the smoothed training loss as lines, held-out losses as points."""
    figure = Figure(figsize=(8.0, 5.0), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for result in results:
        color, name = _COLORS[result.optimizer], _NAMES[result.optimizer]
        steps = range(1, len(result.train_loss) + 1)
        axes.plot(steps, result.train_loss, color=color, alpha=0.18, linewidth=0.8)
        axes.plot(steps, smoothed(result.train_loss), color=color, linewidth=2.0, label=f"{name}, train (smoothed)")
        axes.plot(
            *zip(*result.held_out, strict=True),
            "o",
            color=color,
            markersize=6,
            markeredgecolor="white",
            label=f"{name}, held out: {result.final_held_out_loss:.3f} at the end",
        )
    losses = [loss for result in results for loss in result.train_loss]
    axes.set_ylim(0.95 * min(losses), 1.02 * sorted(losses)[-1 - len(losses) // 20])
    axes.set_xlim(0, config.steps * 1.02)
    axes.set_xlabel(f"step ({config.tokens_per_step:,} bytes each)")
    axes.set_ylabel("cross entropy (nats per byte)")
    rates = ", ".join(f"{_NAMES[result.optimizer]} lr {result.lr:g}" for result in results)
    mesh = " x ".join(f"{axis} {size}" for axis, size in config.mesh.items()) or "one process"
    axes.set_title(f"Byte language model on the Python standard library\nlayout {config.layout} ({mesh}); {rates}")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)
