"""Compare learning rates of AdamW and Muon on convolutional nets trained from scratch, in short and longer runs.

    OMP_NUM_THREADS=1 python benchmarks/convnet_lr.py     # about five minutes on two idle cores
    OMP_NUM_THREADS=1 python benchmarks/convnet_lr.py --seeds 1

Two small nets in plain torch, a ResNet (BatchNorm) and a ConvNeXt (depthwise convolutions, LayerNorm), classify noisy
synthetic gratings by their angle, in ten classes. Every batch is new. The learning rate warms up over a tenth of the
steps and then falls linearly to zero. Each finished run is appended to results/convnet_lr_runs.jsonl, so an interrupted
sweep can be resumed.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context

import torch
from common import RESULTS, write
from torch import Tensor, nn
from torch.nn import functional

from shardmuon import Muon

CLASSES = 10
PIXELS = 16
BATCH = 16
DECAY = 0.05
HELD_OUT = 24  # number of held-out batches


def gratings(seed: int) -> tuple[Tensor, Tensor]:  # (B, 3, P, P) fp32, (B,) int64
    """A batch of images of sine waves. The angle encodes the class; phase, colour and noise are random."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (BATCH,), generator=generator)
    rows, columns = torch.meshgrid(torch.arange(PIXELS) / PIXELS, torch.arange(PIXELS) / PIXELS, indexing="ij")
    angles = (labels / CLASSES * math.pi)[:, None, None] + 0.06 * torch.randn(BATCH, 1, 1, generator=generator)
    phases = 2 * math.pi * torch.rand(BATCH, 1, 1, generator=generator)
    waves = torch.sin(20 * (columns * angles.cos() + rows * angles.sin()) + phases)
    colours = torch.rand(BATCH, 3, 1, 1, generator=generator)
    noise = torch.randn(BATCH, 3, PIXELS, PIXELS, generator=generator)
    return waves[:, None] * colours + 0.7 * noise, labels


class Residual(nn.Module):
    """The basic block of ResNet."""

    def __init__(self, inside: int, out: int) -> None:
        super().__init__()
        stride = out // inside
        self.conv1 = nn.Conv2d(inside, out, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.skip = nn.Identity() if stride == 1 else nn.Conv2d(inside, out, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm2(self.conv2(functional.relu(self.norm1(self.conv1(x)))))
        return functional.relu(inner + self.skip(x))


class Depthwise(nn.Module):
    """A ConvNeXt block."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm(self.conv(x).movedim(1, -1))
        return x + self.down(functional.gelu(self.up(inner))).movedim(-1, 1)


class Pooled(nn.Module):
    """A net made of a stem, a sequence of blocks, the mean over all pixels, and a linear head."""

    def __init__(self, stem: nn.Module, blocks: list[nn.Module], dim: int) -> None:
        super().__init__()
        self.stem = stem
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(dim, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((-2, -1)))


def resnet() -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    return Pooled(stem, [Residual(16, 16), Residual(16, 32), Residual(32, 64)], 64)


def convnext() -> nn.Module:
    return Pooled(nn.Conv2d(3, 32, 2, stride=2), [Depthwise(32) for _ in range(3)], 32)


@dataclass(frozen=True)
class Way:
    """An optimizer to compare: its code for the table, learning rates, and a function (model, lr) -> optimizer."""

    code: str
    rates: tuple[float, ...]
    make: Callable[[nn.Module, float], torch.optim.Optimizer]


WAYS = (
    Way(
        "torch.optim.AdamW(lr=x)",
        (3e-3, 1e-2),
        lambda model, lr: torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=DECAY),
    ),
    Way(
        'Muon(model, lr=x, adjust_lr_fn="match_rms_adamw")',
        (3e-3, 1e-2, 3e-2),
        lambda model, lr: Muon(model, lr=lr, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw"),
    ),
    Way(
        "Muon(model, lr=x)",
        (0.03, 0.1, 0.3),
        lambda model, lr: Muon(model, lr=lr, weight_decay=DECAY),
    ),
)
NETS: dict[str, Callable[[], nn.Module]] = {"ResNet": resnet, "ConvNeXt": convnext}


Job = tuple[str, int, float, int, int]  # net, index of the optimizer in WAYS, learning rate, number of steps, seed


def run(job: Job) -> tuple[Job, float]:
    """Train one net with the settings in `job`; return the job and the held-out loss in nats."""
    net, way, lr, steps, seed = job
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = NETS[net]()
    optimizer = WAYS[way].make(model, lr)
    warmup = steps // 10
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min(1.0, (k + 1) / warmup) * (1 - k / steps))
    for step in range(steps):
        images, labels = gratings(1_000_000 * (seed + 1) + step)
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.eval()
    with torch.no_grad():
        losses = [functional.cross_entropy(model(images), labels) for images, labels in map(gratings, range(HELD_OUT))]
    return job, torch.stack(losses).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, nargs="+", default=[60, 150])
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--kept", action="store_true", help="run nothing: the table of the runs that are kept")
    args = parser.parse_args()
    cases = [(net, way, lr) for net in NETS for way in range(len(WAYS)) for lr in WAYS[way].rates]
    jobs = [(*case, steps, seed) for steps in args.steps for case in cases for seed in range(args.seeds)]
    kept = RESULTS / "convnet_lr_runs.jsonl"
    lines = kept.read_text().splitlines() if kept.exists() else []
    found: dict[Job, float] = {tuple(job): loss for job, loss in map(json.loads, lines)}
    with get_context("spawn").Pool(args.jobs) as pool, kept.open("a") as file:
        for job, loss in pool.imap_unordered(run, [job for job in jobs if job not in found and not args.kept]):
            found[job] = loss
            print(json.dumps([job, loss]), file=file, flush=True)
    lines = ["| net | written as | lr | " + " | ".join(f"{steps} steps" for steps in args.steps) + " |"]
    lines.append("|---" * (3 + len(args.steps)) + "|")
    for net, way, lr in cases:
        cells = []
        for steps in args.steps:
            losses = [found[job] for seed in range(args.seeds) if (job := (net, way, lr, steps, seed)) in found]
            if len(losses) < args.seeds:  # with --kept, only saved runs are available
                cells.append("not run")
                continue
            cells.append(f"{sum(losses) / len(losses):.3f} ({min(losses):.3f}..{max(losses):.3f})")
        lines.append(f"| {net} | `{WAYS[way].code}` | {lr:g} | " + " | ".join(cells) + " |")
    text = (
        f"Held-out loss (nats; chance {math.log(CLASSES):.3f}) of two small ConvNets on synthetic gratings ({CLASSES} "
        f"classes, {PIXELS} x {PIXELS} pixels, batch {BATCH}, decay {DECAY}): mean of {args.seeds} seeds "
        "(lowest..highest), warm-up over a tenth of the steps, then linear to zero.\n\n" + "\n".join(lines)
    )
    keys = ("net", "way", "lr", "steps", "seed")
    write(
        "convnet_lr", text, [dict(zip(keys, job, strict=True)) | {"loss": found[job]} for job in jobs if job in found]
    )


if __name__ == "__main__":
    main()
