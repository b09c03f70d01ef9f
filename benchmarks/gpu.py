"""Everything that only a machine with GPUs can tell, in one run of less than eight minutes. `make gpu`

Checks (a failed one makes the exit code 1): a steady step does not wait for the device; a whole step is captured as a
CUDA graph and replayed with its bits; Triton's products are as near as torch's; every layout has the bits of one
process, over NCCL on as many GPUs as there are, and on four ranks that share the first one over gloo. Numbers: kernels
a step, peak memory, and seconds a step beside torch.optim.Muon and dion where they can be imported.

    make gpu
    make gpu GPU="--seconds 200 --sizes 768x4"
    python benchmarks/gpu.py --device cpu --sizes 64x1 --seconds 60      # that the script itself runs

What does not fit into the time is named and left out. The functions behind it also run on CPUs, in tests/test_gpu.py.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import common
import torch
from torch import nn

from shardmuon import Exchange, Orthogonalizer
from shardmuon.testing import RankPool
from shardmuon.testing.accelerator import (
    CONFIGS,
    SyntheticModel,
    bytes_above,
    graph_differs,
    kernel_errors,
    kernels_of,
    make_model,
    make_optimizer,
    step_on_layout,
    step_without_a_wait,
)
from shardmuon.testing.layouts import LAYOUTS

PARTS = ("checks", "layouts", "timings")  # in this order: what is right before what is fast


class Run:
    """The time that is left, and what has been found."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self.data: dict[str, Any] = {}
        self.failed: list[str] = []

    @property
    def left(self) -> float:
        return self._end - time.monotonic()

    def do(self, name: str, action: Callable[[], Any], *, needs: float, check: bool = False) -> Any:
        """Run a part, if there is time for it. What it raises is its result; a check that returns a text has failed."""
        if self.left < needs:
            found: Any = f"left out: {needs:.0f} s needed, {self.left:.0f} s left"
        else:
            start = time.monotonic()
            try:
                found = action()
                if check:
                    failed = isinstance(found, str) and not found.startswith("not run")
                    found = found or "yes"
                    self.failed += [name] if failed else []
            except Exception as error:
                found = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
                self.failed += [name] if check else []
            print(f"{name}: {found} ({time.monotonic() - start:.1f} s)", flush=True)
        self.data[name] = found
        return found


# --------------------------------------------------------------------------------------------------------- checks


def checks(run: Run, device: torch.device) -> None:
    """One process."""
    for name, options in CONFIGS.items():
        run.do(f"no wait, {name}", lambda o=options: step_without_a_wait(device, **o), needs=10, check=True)
    for name in ("standard", "gram"):
        run.do(f"CUDA graph, {name}", lambda name=name: _captured(device, name), needs=10, check=True)
    run.do("Triton's products", lambda: _kernels(device), needs=30, check=True)


def _captured(device: torch.device, name: str) -> str | None:
    if device.type != "cuda":
        return "not run: needs a CUDA device"
    differ = graph_differs(device, **CONFIGS[name])
    return f"parameters {differ} differ" if differ else None


def _kernels(device: torch.device) -> str | None:
    found = kernel_errors(device, [(128, 512), (384, 384), (1000, 1500), (4096, 4096)])
    if isinstance(found, str):
        return f"not run: {found}"
    worse = [error for error in found if error.triton > 2 * error.torch]
    return str(worse) if worse else None


def layouts(run: Run, device: torch.device, names: list[str]) -> None:
    """Real ranks: NCCL on all GPUs, and four ranks on one device over gloo."""
    pools = [("gloo, one device", 4, "gloo")]
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    if count > 1:
        pools.insert(0, (f"NCCL, {count} GPUs", count, "nccl"))
    for title, ranks, backend in pools:
        with RankPool(ranks, backend=backend, timeout=40.0) as pool:
            for name in names:
                run.do(
                    f"{name}, {title}",
                    lambda pool=pool, name=name, nccl=backend == "nccl": _layout(pool, name, device.type, nccl),
                    needs=45,
                    check=True,
                )


def _layout(pool: RankPool, name: str, kind: str, nccl: bool) -> str | None:
    found = [one for of_rank in pool.run(step_on_layout, name, kind) for one in of_rank]
    worst = max(found, key=lambda one: one.max_difference)
    if not all(one.bitwise for one in found):
        return f"bits differ from one process; default mode {worst.max_difference:.1e} ({worst.worst})"
    waits = next((one.about for one in found if one.about), "")
    return f"a step waits: {waits}" if nccl and waits else None  # gloo moves what lies on a device by way of the host


# -------------------------------------------------------------------------------------------------------- numbers


class Contender(NamedTuple):
    """Whom to time on the matrices of a model."""

    name: str
    make: Callable[[SyntheticModel], Any]


def _ours(**options: Any) -> Callable[[SyntheticModel], Any]:
    return lambda model: make_optimizer(model, **options)


def _with_adamw(make: Callable[[list[nn.Parameter]], Any]) -> Callable[[SyntheticModel], Any]:
    """A peer for the matrices, torch's fused AdamW for the rest, as one step."""

    class Both:
        def __init__(self, model: SyntheticModel) -> None:
            self.matrices = make(model.matrices)
            self.vectors = torch.optim.AdamW(model.vectors, lr=1e-3, fused=True)

        def step(self) -> None:
            self.matrices.step()
            self.vectors.step()

    return Both


def _adamw(model: SyntheticModel) -> Any:
    return torch.optim.AdamW(model.params, lr=1e-3, fused=True)


def _torch(params: list[nn.Parameter]) -> Any:
    return torch.optim.Muon(params, lr=0.02, weight_decay=0.0)


def _dion(params: list[nn.Parameter]) -> Any:
    return importlib.import_module("dion").Muon(params, lr=0.02, nesterov=True, weight_decay=0.0)


CONTENDERS = (
    Contender("shardmuon default", _ours()),
    Contender('shardmuon "standard"', _ours(orthogonalizer=Orthogonalizer(method="standard"))),
    Contender('shardmuon "gram"', _ours(orthogonalizer=Orthogonalizer(method="gram"))),
    Contender("shardmuon cuda_graphs=True", _ours(orthogonalizer=Orthogonalizer(cuda_graphs=True))),
    Contender("shardmuon, buckets of 128 MiB", _ours(exchange=Exchange(bucket_bytes=2**27))),
    Contender("dion", _with_adamw(_dion)),
    Contender("torch.optim.Muon", _with_adamw(_torch)),
    Contender("torch.optim.AdamW, fused, of everything", _adamw),
)


def timings(run: Run, device: torch.device, d: int, layers: int, rounds: int) -> list[str]:
    """Interleaved, one process. Each contender has a model of its own; kernels and peak memory of one step."""
    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, Callable[[], Any]] = {}
    for contender in CONTENDERS:

        def first(contender: Contender = contender) -> None:
            model = make_model(device, d=d, layers=layers, num_vectors=50)
            optimizer = contender.make(model)
            for _ in range(3):
                optimizer.step()
            rows[contender.name] = {"seconds": []}
            steps[contender.name] = optimizer.step
            if device.type == "cuda":
                rows[contender.name]["MiB"] = round(bytes_above(device, optimizer.step) / 2**20, 1)
                rows[contender.name]["kernels"] = kernels_of(optimizer.step)

        missing = run.do(f"{contender.name}: three steps", first, needs=20)
        if missing is None:
            del run.data[f"{contender.name}: three steps"]
    for _ in range(rounds):
        if run.left < 10:
            break
        for name, step in steps.items():
            rows[name]["seconds"].append(_timed(step, device))
    run.data.setdefault("timings", {})[f"{d}x{layers}"] = rows
    lines = ["| optimizer | seconds a step | kernels | MiB above what stands |", "|---|---|---|---|"]
    for contender in CONTENDERS:
        row = rows.get(contender.name)
        if row is None:
            lines.append(f"| {contender.name} | {run.data[f'{contender.name}: three steps']} | | |")
        elif row["seconds"]:
            middle = statistics.median(row["seconds"])
            times = f"{middle:.5f} ({min(row['seconds']):.5f}..{max(row['seconds']):.5f})"
            lines.append(f"| {contender.name} | {times} | {row.get('kernels', '')} | {row.get('MiB', '')} |")
    return lines


def _timed(step: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--seconds", type=float, default=450.0, help="nothing is begun that does not fit into these")
    parser.add_argument("--sizes", nargs="+", default=["768x12", "2048x6", "4096x2"], help="width x layers")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--name", default="gpu", help="name of the result file")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("make gpu needs a CUDA device, and torch finds none here. Nothing was run, nothing was written.")
        return 2
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    run = Run(args.seconds)
    text: list[str] = []
    if "checks" in args.parts:
        checks(run, device)
    if "layouts" in args.parts:
        layouts(run, device, args.layouts)
    for size in args.sizes if "timings" in args.parts else ():
        d, layers = map(int, size.split("x"))
        table = timings(run, device, d, layers, args.rounds)
        text += [f"{layers} layers, d={d}: {4 * layers} matrices, 50 vectors.", "", *table, ""]
    found = [f"| {name} | {value} |" for name, value in run.data.items() if isinstance(value, str)]
    lines = [
        f"{len(run.failed)} of the checks failed" + (f": {', '.join(run.failed)}" if run.failed else "") + ".",
        "",
        f"Steps with fp32 weights, one process, {os.cpu_count()} cores; a turn for each in every round, median of "
        f"{args.rounds} (min..max). Kernels, copies and fills of a step; memory beside weights, gradients and state.",
        "",
        *text,
        "| part | found |",
        "|---|---|",
        *found,
    ]
    common.write(args.name, "\n".join(lines), run.data | {"failed": run.failed})
    return 1 if run.failed else 0


if __name__ == "__main__":
    sys.exit(main())
