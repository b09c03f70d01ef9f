"""Compare shardmuon with DeepSpeed's own Muon and AdamW at ZeRO stages 1, 2 and 3, on one model and the same gradients.

DeepSpeed runs with its default configuration: only the stage, the batch size and the optimizer are set, so gradients
are clipped at 1.0 (the default since DeepSpeed 0.19.3). The loss is the sum of all weights, each multiplied elementwise
by a constant, so the gradients are known. The error of the first update is its relative Frobenius distance from the
result of the five Newton-Schulz steps on the full mean gradient in fp32. A step consists of forward, backward and
`engine.step()`. DeepSpeed compiles its Newton-Schulz with inductor, so the first steps are not timed.

The bytes moved are all bytes that cross the loopback interface (Linux only): gradients, updates and weights of all
ranks. If other programs use that interface too, run the script in a network namespace: `unshare -n sh -c 'ip link set
lo up; python zero.py'`. The peak of a step is the highest resident memory of a rank during the step, minus its resident
memory before the step.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import common
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardmuon import Muon
from shardmuon.orthogonalize import orthogonalize
from shardmuon.testing import RankPool
from shardmuon.testing.frameworks import ZeroRun
from shardmuon.testing.pool import RankException

SIZE, NUM, LR = 512, 6, 0.02
SHAPES = {**{f"w{i}": (SIZE, SIZE) for i in range(NUM)}, "embedding": (1000, 64)}
CONTENDERS = ("shardmuon", "shardmuon standard", "deepspeed gram", "deepspeed standard", "adamw")


def factors(step: int, rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {n: torch.randn(s, generator=generator) for n, s in SHAPES.items()}


def _loopback() -> int:
    """The number of bytes that the loopback interface has received since it came up."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[0])


class _Peak:
    """The peak of this process's resident memory, relative to the amount resident when the object was created."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # reset VmHWM, the peak resident memory
        self._start = self._read("VmRSS")

    def bytes(self) -> int:
        return self._read("VmHWM") - self._start

    def _read(self, key: str) -> int:
        line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key))
        return 1024 * int(line.split()[1])


class _Sum(nn.Module):
    """The sum of all weights, each multiplied elementwise by a given factor, so that the factor is the weight's
    gradient."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        for name, weight in weights.items():
            self.register_parameter(name, nn.Parameter(weight))

    def forward(self, factors: dict[str, Tensor]) -> Tensor:
        return torch.stack([(self.get_parameter(name) * factor).sum() for name, factor in factors.items()]).sum()


def run(contender: str, stage: int, reduce_scatter: bool | None, steps: int, warm: int) -> dict[str, Any]:
    """Run training steps on this rank. Return a dict with step times, the first update's error, memory use, bytes
    moved, and the number of Newton-Schulz runs per step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    warnings.simplefilter("ignore")
    deepspeed = ZeroRun.start_deepspeed()
    from deepspeed.runtime.zero.muon import original_muon
    from deepspeed.utils import safe_get_full_fp32_param

    generator = torch.Generator().manual_seed(0)
    net = _Sum({n: 0.05 * torch.randn(s, generator=generator) for n, s in SHAPES.items()})
    start = {n: p.detach().clone() for n, p in net.named_parameters()}
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "steps_per_print": 10**9}
    config["zero_optimization"] = {"stage": stage}
    if reduce_scatter is not None:
        config["zero_optimization"]["reduce_scatter"] = reduce_scatter
    optimizer = None
    if contender == "adamw":
        config["optimizer"] = {"type": "AdamW", "params": {"lr": LR, "torch_adam": True}}
    elif contender.startswith("deepspeed"):
        for name, p in net.named_parameters():
            p.use_muon = name != "embedding"
        params = {"lr": LR, "momentum": 0.95, "weight_decay": 0.0, "ns_method": contender.split()[1]}
        config["optimizer"] = {"type": "Muon", "params": {**params, "torch_adam": True}}
    else:
        config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
        groups = [
            {"params": [(n, p) for n, p in net.named_parameters() if n != "embedding"]},
            {"params": [("embedding", net.embedding)], "use_muon": False},
        ]
        method = "standard" if contender.endswith("standard") else "auto"
        optimizer = Muon(groups, lr=LR, weight_decay=0.0, method=method)
    engine, *_ = deepspeed.initialize(
        model=net, optimizer=optimizer, model_parameters=list(net.parameters()), config=config
    )
    runs, original, seconds, error = 0, original_muon.muon_update, [], None
    moved, peaks = [], []

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal runs
        runs += 1
        return original(*args, **kwargs)

    with mock.patch.object(original_muon, "muon_update", counted):
        for number in range(warm + steps):
            inputs = factors(number, rank)
            dist.barrier()
            peak, carried = _Peak(), _loopback()
            dist.barrier()
            begin = time.perf_counter()
            engine.backward(engine(inputs))  # timed too: at stages 1 and 2, DeepSpeed orthogonalizes in backward
            engine.step()
            dist.barrier()
            seconds.append(time.perf_counter() - begin)
            moved.append(_loopback() - carried)
            peaks.append(peak.bytes())
            if number == 0 and contender != "adamw":
                grad = torch.stack([factors(0, r)["w0"] for r in range(world)]).mean(0)
                steps_of = ((3.4445, -4.7750, 2.0315),) * 5
                expected = -LR * orthogonalize(grad[None], steps_of, dtype=torch.float32)[0]
                found = safe_get_full_fp32_param(net.w0).view(SIZE, SIZE) - start["w0"]
                error = float((found - expected).norm() / expected.norm())
    inner = engine.optimizer.optimizer
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for state in inner.state.values()
        for t in state.values()
        if isinstance(t, Tensor)
    }
    ours = isinstance(inner, Muon)
    out = {
        "seconds": seconds[warm:],
        "error": error,
        "runs": (inner.traffic.orthogonalized if ours else runs) / (warm + steps),
        "state": sum(storages.values()),
        "sent": inner.traffic.bytes_sent / (warm + steps) if ours else None,
        "moved": statistics.median(moved[warm:]),
        "peak": statistics.median(peaks[warm:]),
    }
    engine.destroy()
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    lines = [
        f"{NUM} matrices {SIZE}x{SIZE} and an embedding, fp32, gloo, one thread a rank, {args.steps} steps.",
        "",
        "| ranks, stage | optimizer | step, seconds | over ours | error of the update | Newton-Schulz runs a matrix | "
        "state, bytes an element (largest rank x ranks) | peak of a step, MB | moved, MB a step | "
        "of it by shardmuon, MB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    data: dict[str, Any] = {}
    numel = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    for ranks in args.ranks:
        with RankPool(ranks, timeout=300.0) as pool:
            for stage in (1, 2, 3):
                ours = None
                for contender in CONTENDERS:
                    variants: list[bool | None] = [None]
                    if stage == 3 and contender.startswith("deepspeed"):
                        variants = [None, False]
                    for scatter in variants:
                        note = "" if scatter is None else ", reduce_scatter false"
                        label = f"| {ranks}, {stage} | {contender}{note} |"
                        slow = contender == "deepspeed standard"  # bf16 products are slow on many CPUs
                        steps = min(args.steps, 3) if slow else args.steps
                        found = pool.run_catching(run, contender, stage, scatter, steps, 1 if slow else 3)
                        failed = [r for r in found if isinstance(r, RankException)]
                        if failed:
                            lines.append(f"{label} refused: {failed[0].message.splitlines()[0][:90]} | | | | | | | |")
                            print(lines[-1], flush=True)
                            continue
                        results: list[Any] = list(found)
                        seconds = results[0]["seconds"]
                        ours = ours or statistics.median(seconds)
                        sent = results[0]["sent"]
                        total = "" if sent is None else f"{sum(r['sent'] for r in results) / 1e6:.2f}"
                        runs = sum(r["runs"] for r in results) / NUM
                        error = results[0]["error"]
                        lines.append(
                            f"{label} {common.summary(seconds)} | {statistics.median(seconds) / ours:.2f}x | "
                            f"{'' if error is None else f'{error:.1e}'} | {'' if error is None else f'{runs:.1f}'} | "
                            f"{max(r['state'] for r in results) * ranks / numel:.2f} | "
                            f"{max(r['peak'] for r in results) / 1e6:.1f} | {results[0]['moved'] / 1e6:.2f} | {total} |"
                        )
                        print(lines[-1], flush=True)
                        data[label.strip("| ")] = results
    common.write("zero_cpu", "\n".join(lines), data)


if __name__ == "__main__":
    main()
