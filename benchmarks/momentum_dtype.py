"""Compare momentum in bf16 and in 8-bit codes with fp32: the losses after training, and the error of a single update.

The script trains the model of examples/train.py with each dtype and several seeds, and compares the differences between
dtypes with those between seeds. On the gradients of one fp32 run, it also stores the momentum in other formats, to
compare codes and rounding modes.

    python benchmarks/momentum_dtype.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from common import write
from language import Config, Model, evaluate, fit, read_text
from torch import Tensor

from shardmuon import Muon
from shardmuon.layout.pieces import Patch
from shardmuon.momentum.stores import BLOCK, Stream, _round_by, decode, encode, scale_shape, step_stored_
from shardmuon.orthogonalize import orthogonalize
from shardmuon.step.update import momentum_

CPU = torch.device("cpu")
DTYPES: dict[str, Any] = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": "int8"}
COEFFICIENTS = ((3.4445, -4.7750, 2.0315),) * 5


def linear_nearest(x: Tensor) -> Tensor:
    """Round to equally spaced 8-bit codes, as a baseline for the package's codes."""
    cols = x.shape[1]
    blocks = torch.nn.functional.pad(x, (0, -cols % BLOCK)).view(len(x), -1, BLOCK)
    scale = blocks.abs().amax(-1, keepdim=True)
    k = (blocks / scale * 127).nan_to_num(0.0).round()
    return (k / 127 * scale).view(len(x), -1)[:, :cols]


def random_bits(x: Tensor) -> Tensor:
    return torch.randint(0, 1 << 16, x.shape, dtype=torch.int32)


ALTERNATIVES: dict[str, Callable[[Tensor], Tensor]] = {
    "bf16, to nearest": lambda x: x.bfloat16().float(),
    "bf16, at random": lambda x: _round_by(x, random_bits(x)).float(),
    "int8, equal steps, to nearest": linear_nearest,
    "int8, square code, to nearest": lambda x: decode(*encode(x, 1)),
    "int8, square code, at random": lambda x: decode(*encode(x, 1, x, random_bits(x))),
}


class Shadows:
    """Copies of every matrix's momentum during a run, one in each storage format, to compare the formats' errors."""

    def __init__(self) -> None:
        self._exact: dict[int, Tensor] = {}
        self._plain: dict[tuple[int, str], Tensor] = {}
        self._ours: dict[tuple[int, str], list[Tensor]] = {}
        self.errors: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def step(self, index: int, grad: Tensor, number: int, measure: bool) -> None:
        exact = self._exact.setdefault(index, torch.zeros_like(grad))
        exact.lerp_(grad, 0.05)
        wanted = torch.lerp(grad, exact, 0.95)
        updates = {}
        for name, keep in ALTERNATIVES.items():
            new = torch.lerp(self._plain.get((index, name), torch.zeros_like(grad)), grad, 0.05)
            self._plain[index, name] = keep(new)
            updates[name] = torch.lerp(grad, new, 0.95)
        rows, cols = grad.shape
        stream = Stream.of(str(index), "momentum", number, cols)
        whole = Patch.rectangle(0, 0, 0, rows, cols)
        for name, dtype in (("bf16, as kept", torch.bfloat16), ("int8, as kept", torch.int8)):
            shapes = [grad.shape] if dtype == torch.bfloat16 else [grad.shape, scale_shape(grad.shape, 1)]
            kept = self._ours.setdefault(
                (index, name), [torch.zeros(s, dtype=d) for s, d in zip(shapes, (dtype, torch.float32), strict=False)]
            )
            updates[name] = torch.empty_like(grad)
            step_stored_(kept, grad, updates[name], patch=whole, stream=stream, momentum=0.95, nesterov=True)
        if measure:
            expected = orthogonalize(wanted[None], COEFFICIENTS, dtype=torch.float32)[0]
            for name, update in updates.items():
                found = orthogonalize(update[None], COEFFICIENTS, dtype=torch.float32)[0]
                self.errors[name].append((relative(update, wanted), relative(found, expected)))
            low = orthogonalize(wanted[None], COEFFICIENTS, dtype=torch.bfloat16)[0].float()
            self.errors["fp32, bf16 products"].append((0.0, relative(low, expected)))


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def train(text: Any, seed: int, dtype: Any, args: argparse.Namespace, shadows: Shadows | None) -> tuple[float, float]:
    """Train one model; return the mean loss of the last 20 steps and the held-out loss."""
    config = Config(
        dim=args.dim, hidden=3 * args.dim, seq_len=64, batch=8, steps=args.steps, seed=seed, eval_batches=16
    )
    model = Model(config)
    optimizer = Muon(model, lr=config.lr, adjust_lr_fn="match_rms_adamw", momentum_dtype=dtype)
    matrices = [p for g in optimizer.param_groups if g["use_muon"] for p in g["params"]]

    def watch(step: int) -> None:
        if shadows is not None:
            for index, p in enumerate(matrices):
                shadows.step(index, p.grad, step + 1, measure=step % 40 == 39)

    losses = fit(model, optimizer, text[0], config, watch)
    return statistics.mean(losses[-20:]), evaluate(model, text[1], config)


def summarized(pairs: list[tuple[float, float]]) -> dict[str, list[float]]:
    """Summarize pairs of errors, measured before and after orthogonalization. Return a dict with the "mean" and the
    "largest" error, each as a list [before, after]."""
    columns = [[pair[i] for pair in pairs] for i in (0, 1)]
    return {"mean": [statistics.mean(c) for c in columns], "largest": [max(c) for c in columns]}


def times() -> dict[str, float]:
    """Time a momentum update in each dtype on one thread; return the shortest times in nanoseconds per element."""
    size, found = 1024, {}
    grad = torch.randn(size, size)
    whole = Patch.rectangle(0, 0, 0, size, size)
    out, rule = torch.empty_like(grad), {"momentum": 0.95, "nesterov": True}
    rounding = {"patch": whole, "stream": Stream.of("w", "momentum", 1, size), **rule}
    plain, half = torch.zeros(size, size), torch.zeros(size, size, dtype=torch.bfloat16)
    codes, scales = torch.zeros(size, size, dtype=torch.int8), torch.zeros(size, size // BLOCK)
    steps: dict[str, Callable[[], None]] = {
        "fp32": lambda: momentum_([out], [grad], [plain], **rule),
        "bf16": lambda: step_stored_([half], grad, out, **rounding),
        "int8": lambda: step_stored_([codes, scales], grad, out, **rounding),
    }
    for name, step in steps.items():
        samples = []
        for _ in range(7):
            start = time.perf_counter()
            step()
            samples.append((time.perf_counter() - start) / size**2 * 1e9)
        found[name] = min(samples)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--dim", type=int, default=96)
    args = parser.parse_args()
    torch.set_num_threads(1)
    text, shadows = read_text(), Shadows()
    found: dict[str, list[tuple[float, float]]] = {
        name: [
            train(text, seed, dtype, args, shadows if (name, seed) == ("fp32", 0) else None)
            for seed in range(args.seeds)
        ]
        for name, dtype in DTYPES.items()
    }
    lines = [f"Loss after {args.steps} steps (nats a byte): training (mean of the last 20 steps) / held out.", ""]
    lines += ["| momentum | " + " | ".join(f"seed {s}" for s in range(args.seeds)) + " | mean held out |"]
    lines += ["|---|" + "---|" * (args.seeds + 1)]
    for name, losses in found.items():
        cells = " | ".join(f"{a:.4f} / {b:.4f}" for a, b in losses)
        lines.append(f"| {name} | {cells} | {statistics.mean(b for _, b in losses):.4f} |")
    between_seeds = statistics.stdev(b for _, b in found["fp32"])
    worst = {n: max(abs(b - e) for (_, b), (_, e) in zip(v, found["fp32"], strict=True)) for n, v in found.items()}
    lines += [
        "",
        f"Standard deviation between seeds (fp32, held out): {between_seeds:.4f}. Largest difference to fp32 of",
    ]
    lines += [f"the same seed: bf16 {worst['bf16']:.4f}, int8 {worst['int8']:.4f}.", ""]
    lines += [
        "Relative error of what is orthogonalized, and of the orthogonalized update, against fp32 momentum on the"
    ]
    lines += ["gradients of one run (mean over matrices and steps 40, 80, ...; in brackets the largest):", ""]
    lines += ["| momentum | before | after |", "|---|---|---|"]
    errors = {name: summarized(pairs) for name, pairs in shadows.errors.items()}
    for name, error in errors.items():
        cells = (f"{error['mean'][i]:.4f} ({error['largest'][i]:.4f})" for i in (0, 1))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    cost = times()
    lines += ["", "Momentum update, ns an element on one thread: " + ", ".join(f"{n} {t:.1f}" for n, t in cost.items())]
    write("momentum_dtype", "\n".join(lines), {"losses": found, "errors": errors, "ns": cost})


if __name__ == "__main__":
    main()
