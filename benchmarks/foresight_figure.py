"""Draw docs/img/overhead.svg: the extra cost of Muon over AdamW by number of GPUs, for three models.

The number of tokens per step stays fixed as ranks are added. Solid lines show FSDP over all ranks, with 64-way expert
parallelism for DeepSeek-V3. The dashed line, for the 8B model, shows HSDP, which shards within a node and replicates
across nodes. The lines are the middle values that `shardmuon plan` predicts, and the bands are its intervals. Nothing
is measured. The script takes minutes on one core.

    python benchmarks/foresight_figure.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import common
import matplotlib
from matplotlib import pyplot

from shardmuon.foresight import plan

MODELS = (  # preset, name, tokens per step, numbers of ranks, mesh, colour
    ("llama3-8b", "Llama-3 8B, 4M tokens", 4e6, (8, 16, 32, 64, 128, 256, 512, 1024), "shard={n}", "#4c78c9"),
    ("llama3-8b", "the same, HSDP in nodes of 8", 4e6, (16, 32, 64, 128), "dp={r} shard=8", "#7da3e0"),
    ("llama3-70b", "Llama-3 70B, 8M tokens", 8e6, (32, 64, 128, 256, 512, 1024), "shard={n}", "#c9722c"),
    ("deepseek-v3", "DeepSeek-V3, 60M tokens", 60e6, (256, 512, 1024), "shard={n} ep=64", "#2f9e8f"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "docs" / "img" / "overhead.svg")
    args = parser.parse_args()
    rows = []
    for preset, name, tokens, counts, mesh, colour in MODELS:
        for ranks in counts:
            report = plan(preset, mesh.format(n=ranks, r=ranks // 8), gpu=args.gpu, tokens_per_step=tokens)
            rows.append((name, colour, ranks, *(100 * value for value in report.overhead), str(report.price.step)))
            print(*rows[-1], flush=True)
    draw(rows, args.gpu, args.out)
    table = [
        "| model | ranks | over AdamW, % of a training step | optimizer step |",
        "|---|---|---|---|",
        *(
            f"| {name} | {n} | {mid:.2f} ({low:.2f} .. {high:.2f}) | {step} |"
            for name, _, n, low, mid, high, step in rows
        ),
    ]
    common.write("foresight_overhead", "\n".join(table), rows)


def draw(rows: list[tuple[str, str, int, float, float, float, str]], gpu: str, out: Path) -> None:
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "shardmuon", "font.family": "sans-serif", "font.size": 10})
    figure, axes = pyplot.subplots(figsize=(7.2, 3.8))
    for name, colour in dict.fromkeys((row[0], row[1]) for row in rows):
        ranks, low, middle, high = zip(*(row[2:6] for row in rows if row[0] == name), strict=True)
        axes.fill_between(ranks, low, high, color=colour, alpha=0.18, linewidth=0)
        line = "--" if "HSDP" in name else "-"
        axes.plot(ranks, middle, line, color=colour, marker="o", markersize=4, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({row[2] for row in rows})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} %")
    axes.set_xlabel(f"ranks ({gpu.upper()}), the same tokens a step")
    axes.set_ylabel("training step over AdamW's")
    axes.grid(alpha=0.25, which="both")
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None}, facecolor="white")
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
