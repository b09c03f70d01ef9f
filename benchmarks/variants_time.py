"""Time that each variant and QK-clip add to a step, in one interleaved run: ratios to plain Muon.

    python benchmarks/variants_time.py                    # both widths, 1 and 2 ranks, and QK-clip: about six minutes
    python benchmarks/variants_time.py --seconds 20       # a quick run

Optimizer steps: the model has layers of (3d x d, d x d, 4d x d, d x 4d) under FSDP2, and an embedding of 4096 x d that
AdamW steps with weight decay. There are 4 layers with d = 384, or one with d = 1024, where matrix products take a
larger share of a step. Gradients are injected, and each rank uses one thread. Matrices have no weight decay, because
Hyperball does not allow it.

In every round, each contender takes one step, and its time is divided by that of plain Muon in the same round. Each
round starts with a different contender. The result is the median of these ratios, for the wall time and the processor
time of the slowest rank. Processor time excludes the wait at the barrier, so other work on the machine affects it less.
Plain Muon runs twice, and the ratios of the second run show the noise of the machine. The table also gives the number
of torch calls in a step on one rank, and the bytes that they read and write, except in matrix products. A call on a
list of tensors counts as one.

QK-clip is timed in whole training steps (forward, backward, optimizer step) of the model in examples/train.py, in one
process. Steps in which QK-clip does not measure logits are timed separately; with `every=10`, these are nine of ten
steps. tau is infinite, so that no weights are scaled and the models do not drift apart.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import common
import torch
import torch.distributed as dist
from language import Config, Model, loss_of
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardmuon import Muon
from shardmuon.testing import RankPool
from shardmuon.testing.layouts import LAYOUTS, meshes_on
from shardmuon_qkclip import QKClip

PLAIN, AGAIN = "plain", "plain, again"
OWNERS = "muon_eq+normuon"


class Contender(NamedTuple):
    """An optimizer to time: its name, and the Muon variant that it uses for matrices (None for plain Muon)."""

    name: str
    variant: str | None = None


CONTENDERS = (
    Contender(PLAIN),
    Contender("normuon", "normuon"),
    Contender("muon_eq", "muon_eq"),
    Contender("hyperball", "hyperball"),
    Contender(OWNERS, OWNERS),
    Contender(AGAIN),
)


def shapes(d: int, layers: int) -> list[tuple[int, int]]:
    return [shape for _ in range(layers) for shape in ((3 * d, d), (d, d), (4 * d, d), (d, 4 * d))]


def build(contender: Contender, d: int, layers: int, layout: str) -> Muon:
    """Build weights in the given layout, on the kind of device given to `meshes_on`. Set gradients, and return the
    contender's optimizer for the weights."""
    case, world = LAYOUTS[layout], dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(s, generator=generator) * 0.02 for s in [*shapes(d, layers), (4096, d)]]
    full = {f"w{i}": t for i, t in enumerate(drawn)}
    params = [nn.Parameter(t) for t in case.build(full, case.mesh(world)).values()]
    for p, g in zip(params, case.build(full, case.mesh(world)).values(), strict=True):
        p.grad = g
    *matrices, embedding = params
    groups: list[dict[str, Any]] = [
        {"params": matrices, "lr": 0.02, "weight_decay": 0.0, "variant": contender.variant},
        {"params": [embedding], "use_muon": False, "lr": 3e-4, "weight_decay": 0.1},
    ]
    how = {"method": "standard"}
    return Muon(groups, lr=0.02, **how, **case.options(world))


def contend(d: int, layers: int, rounds: int, seconds: float, kind: str) -> dict[str, list[tuple[float, float]]]:
    """Time interleaved steps of all contenders; return the wall and processor seconds of each step on this rank.
    Collective."""
    with meshes_on(kind):
        built = {contender.name: build(contender, d, layers, "fsdp2") for contender in CONTENDERS}
    for optimizer in built.values():
        optimizer.step()  # the first step plans and opens connections
    return in_turn({name: optimizer.step for name, optimizer in built.items()}, rounds, seconds)


def in_turn(steps: dict[str, Callable[[], Any]], rounds: int, seconds: float) -> dict[str, list[tuple[float, float]]]:
    """Call each function in `steps` once per round, each round starting with a different one. Return, for each call,
    the wall-clock time between the barriers around it and the CPU time of this process, both in seconds."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    names, start = list(steps), time.perf_counter()
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            common.together()
            began, busy = time.perf_counter(), time.process_time()
            steps[name]()
            busy = time.process_time() - busy
            common.together()
            found[name].append((time.perf_counter() - began, busy))
        enough = torch.tensor(number >= 2 and time.perf_counter() - start > seconds)
        if dist.is_initialized():
            dist.broadcast(enough, 0)
        if enough:
            break
    return found


# ------------------------------------------------------------------------------------------------------------- counted


class Counted(TorchDispatchMode):
    """A dispatch mode that counts torch calls that compute or copy, and the bytes of their arguments and results. The
    bytes of matrix products are left out, because products read memory more than once."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.bytes = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.is_view or name in ("detach", "_unsafe_view", "empty", "empty_like", "empty_strided"):
            return out
        self.calls += 1
        if "mm" not in name:
            seen = {id(t): t for value in (*args, *(kwargs or {}).values(), out) for t in _tensors(value)}
            self.bytes += sum(t.numel() * t.element_size() for t in seen.values())
            self.bytes += sum(t.numel() * t.element_size() for t in _written_twice(func, args))
        return out


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for item in value for t in _tensors(item)] if isinstance(value, (list, tuple)) else []


def _written_twice(func: Any, args: Any) -> list[Tensor]:
    """The arguments that a call both reads and writes, whose bytes therefore count twice."""
    name = func.overloadpacket.__name__
    return (
        _tensors(args[0])
        if name.endswith("_") and not name.startswith(("copy", "_foreach_copy", "fill", "zero"))
        else []
    )


def counts(d: int, layers: int, kind: str) -> dict[str, tuple[int, int]]:
    """Count the torch calls and bytes of one step of each contender on one rank, with plain tensors."""
    found = {}
    for contender in CONTENDERS:
        with meshes_on(kind):
            optimizer = build(contender, d, layers, "ddp")
        optimizer.step()
        with Counted() as counted:
            optimizer.step()
        found[contender.name] = counted.calls, counted.bytes
    return found


# ------------------------------------------------------------------------------------------------------------- QK-clip

CLIPS: dict[str, dict[str, Any] | None] = {
    "without QK-clip": None,
    "exact": {},
    "exact, steps that are not measured": {"every": 10**6},
    "without, again": None,
}


def clip_times(rounds: int, seconds: float, device: torch.device) -> dict[str, list[tuple[float, float]]]:
    """Time interleaved training steps with and without QK-clip; return the wall and processor seconds of each step."""
    torch.set_num_threads(1)
    steps = {name: trainer(options, device) for name, options in CLIPS.items()}
    for step in steps.values():
        step()  # the first step always measures the logits, so it is not timed
    return in_turn(steps, rounds, seconds)


def trainer(options: dict[str, Any] | None, device: torch.device) -> Callable[[], None]:
    config = Config(dim=256, layers=4, heads=4, kv_heads=4, hidden=768, seq_len=256)
    model = Model(config).to(device)
    optimizer = Muon(model, lr=0.02, method="standard")
    clip = None if options is None else QKClip(model, optimizer, tau=math.inf, **options)
    rows = torch.randint(0, 256, (4, config.seq_len + 1), generator=torch.Generator().manual_seed(0)).to(device)

    def step() -> None:
        loss_of(model, rows).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert clip is None or clip.layers

    return step


# -------------------------------------------------------------------------------------------------------------- tables


Times = dict[str, list[tuple[float, float]]]  # name of a contender -> wall and processor seconds of each round
WALL, BUSY = 0, 1


def ratios(times: Times, base: str, which: int) -> dict[str, list[float]]:
    return {name: [a[which] / b[which] for a, b in zip(of, times[base], strict=True)] for name, of in times.items()}


def quartiles(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.3f} ({low:.3f}..{high:.3f})"


def step_times(d: int, layers: int, ranks: int, args: argparse.Namespace) -> Times:
    """The step times of each contender, taken from the slowest rank in each round."""
    with RankPool(ranks, backend=common.BACKENDS[args.device], timeout=3600) as pool:
        everyone = pool.run(contend, d, layers, args.rounds, args.seconds, args.device)
    return {
        name: [
            (max(wall for wall, _ in of), max(busy for _, busy in of))
            for of in zip(*(rank[name] for rank in everyone), strict=True)
        ]
        for name in everyone[0]
    }


def steps_head(d: int, layers: int, steps: dict[int, Times]) -> list[str]:
    rounds = " and ".join(str(len(times[PLAIN])) for times in steps.values())
    plain = " and ".join(f"{statistics.median(wall for wall, _ in times[PLAIN]):.3f}" for times in steps.values())
    return [
        f"Steps of {layers} layer{'s' * (layers > 1)}, d={d}, a thread a rank, {os.cpu_count()} cores; {rounds} "
        "interleaved rounds.",
        f"Time over plain Muon's of the same round ({plain} s of wall time): median (quartiles).",
    ]


def steps_table(steps: dict[int, Times]) -> list[str]:
    heads = [f"{what}, {ranks} rank{'s' * (ranks > 1)}" for ranks in steps for what in ("wall", "processor")]
    columns = [ratios(times, PLAIN, which) for times in steps.values() for which in (WALL, BUSY)]
    lines = [f"| | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    lines += [f"| {name} | {' | '.join(quartiles(of[name]) for of in columns)} |" for name in columns[0]]
    return lines


def counts_table(counted: dict[str, tuple[int, int]]) -> list[str]:
    _, base = counted[PLAIN]
    lines = ["| | torch calls | MiB read and written | of plain's |", "|---|---|---|---|"]
    lines += [f"| {name} | {n} | {size / 2**20:.0f} | {size / base:.2f} |" for name, (n, size) in counted.items()]
    return lines


def clip_table(times: Times) -> list[str]:
    wall, busy = (ratios(times, "without QK-clip", which) for which in (WALL, BUSY))
    lines = ["| | step, ms | wall time of the step without | processor time |", "|---|---|---|---|"]
    for name, rounds in times.items():
        middle = 1e3 * statistics.median(seconds for seconds, _ in rounds)
        lines.append(f"| {name} | {middle:.1f} | {quartiles(wall[name])} | {quartiles(busy[name])} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="cuda: with NCCL, a GPU for each rank")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--sizes", nargs="+", default=["384x4", "1024x1"], help="width x layers")
    parser.add_argument("--rounds", type=int, default=44, help="at most so many rounds")
    parser.add_argument("--seconds", type=float, default=60.0, help="and no new round after so long (3 at least)")
    parser.add_argument("--only", choices=("steps", "counts", "clip"), help="one part alone; nothing is written then")
    parser.add_argument("--name", default="variants_time", help="name of the result file")
    args = parser.parse_args()
    text: list[str] = []
    data: dict[str, Any] = {}
    for size in args.sizes:
        d, layers = map(int, size.split("x"))
        if args.only in (None, "steps"):
            steps = data.setdefault("steps", {})[size] = {n: step_times(d, layers, n, args) for n in args.ranks}
            text += [*steps_head(d, layers, steps), "", *steps_table(steps), ""]
        if args.only in (None, "counts"):
            with RankPool(1, backend=common.BACKENDS[args.device], timeout=3600) as pool:
                counted = data.setdefault("counted", {})[size] = pool.run(counts, d, layers, args.device)[0]
            text += [f"One step at d={d} on one rank, products not in bytes:", "", *counts_table(counted), ""]
    if args.only in (None, "clip"):
        data["qk_clip"] = clip_times(args.rounds, args.seconds / 2, torch.device(args.device))
        sizes = "4 layers of width 256, 4 x 256 tokens"
        rounds = len(next(iter(data["qk_clip"].values())))
        text += [f"QK-clip: a training step of the demo's model ({sizes}), one process, {rounds} rounds.", ""]
        text += clip_table(data["qk_clip"])
    if args.only is None:
        common.write(args.name, "\n".join(text), data)
    else:
        print("\n".join(text))


if __name__ == "__main__":
    main()
