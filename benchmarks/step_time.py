"""Step time of one optimizer step, ours beside peers, interleaved in one run. `make bench`

Model: 12 layers of (3d x d, d x d, 4d x d, d x 4d) with d = 384: 48 matrices, 21.2 M Muon parameters. Gradients are
injected. One thread a rank. In every round each contender takes one step, so a machine whose speed drifts slows all of
them; ratios and medians are to be read, not single times.

`floor` is the arithmetic alone: the Newton-Schulz products of all matrices on one thread, divided by the cores at work.

Some peers cast to bf16. On a CPU without bf16 instructions torch multiplies bf16 matrices 10 to 80 times slower than
fp32 ones, which would decide everything; there `Tensor.bfloat16` is made to return fp32 for the peers ("fp32 cast" in
the table), so that they run at this CPU's best speed. `--native` leaves them as they are.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import common
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardmuon import Muon
from shardmuon._torch import cpu_has_bf16_matmul
from shardmuon.orthogonalize import MethodName, orthogonalize
from shardmuon.testing import RankPool
from shardmuon.testing.layouts import LAYOUTS, mesh_of

KELLER = (3.4445, -4.7750, 2.0315)


def shapes(d: int, layers: int) -> list[tuple[int, int]]:
    return [shape for _ in range(layers) for shape in ((3 * d, d), (d, d), (4 * d, d), (d, 4 * d))]


@contextlib.contextmanager
def fp32_casts(active: bool) -> Iterator[None]:
    """`x.bfloat16()` gives fp32. Only around peers' steps."""
    original = Tensor.bfloat16
    original_to = Tensor.to

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        args = tuple(torch.float32 if a is torch.bfloat16 else a for a in args)
        kwargs = {k: torch.float32 if v is torch.bfloat16 else v for k, v in kwargs.items()}
        return original_to(self, *args, **kwargs)

    if active:
        Tensor.bfloat16 = lambda self, *a, **k: original_to(self, torch.float32, copy=True)  # type: ignore[method-assign,assignment]
        Tensor.to = to  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        Tensor.bfloat16 = original  # type: ignore[method-assign]
        Tensor.to = original_to  # type: ignore[method-assign]


def ours(method: MethodName, dtype: torch.dtype) -> Callable[[list[nn.Parameter], Any], Any]:
    def make(params: list[nn.Parameter], group: Any) -> Any:
        return Muon(params, lr=0.02, weight_decay=0.0, ns_method=method, ns_dtype=dtype, process_group=group)

    return make


def muon_fsdp2(params: list[nn.Parameter], group: Any) -> Any:
    return importlib.import_module("muon_fsdp2").Muon(
        [{"params": params, "use_muon": True, "lr": 0.02, "weight_decay": 0.0}]
    )


def dtensor_muon(params: list[nn.Parameter], group: Any) -> Any:
    chosen = importlib.import_module("dtensor_muon.orthogonalize.orthogonalize")
    pick = chosen._get_orthogonalization_fn  # its default kernel is Triton for CUDA; take its torch one
    if not getattr(pick, "on_cpu", False):
        plain = lambda strategy, _: pick(strategy, False)  # noqa: E731
        plain.on_cpu = True  # type: ignore[attr-defined]
        chosen._get_orthogonalization_fn = plain
    module = importlib.import_module("dtensor_muon.optim.optim")
    return module.Muon(params, lr=0.02, wd=0.0, orthogonalization_strategy="newton_schulz")


def dion(params: list[nn.Parameter], group: Any) -> Any:
    mesh = mesh_of((dist.get_world_size(),))
    module = importlib.import_module("dion")
    return module.Muon(params, distributed_mesh=mesh, lr=0.02, nesterov=True, weight_decay=0.0, use_polar_express=False)


# name -> (layout, optimizer, whether it is a peer that casts to bf16)
CONTENDERS: dict[str, tuple[str, Callable[[list[nn.Parameter], Any], Any], bool]] = {
    "AdamW fused, fsdp2": ("fsdp2", lambda p, g: torch.optim.AdamW(p, lr=1e-3, fused=True), False),
    "AdamW foreach, fsdp2": ("fsdp2", lambda p, g: torch.optim.AdamW(p, lr=1e-3, foreach=True), False),
    **{
        f"shardmuon {method} {str(dtype)[6:]}, {layout}": (layout, ours(method, dtype), False)
        for method, dtype, layouts in (
            ("gram", torch.float32, ("fsdp2", "hsdp", "fsdp2+tp", "ddp")),
            ("standard", torch.float32, ("fsdp2", "hsdp", "fsdp2+tp")),
            ("standard", torch.bfloat16, ("fsdp2",)),
        )
        for layout in layouts
    },
    "torch.optim.Muon, fsdp2": ("fsdp2", lambda p, g: torch.optim.Muon(p, lr=0.02, weight_decay=0.0), True),
    "muon-fsdp2, fsdp2": ("fsdp2", muon_fsdp2, True),
    "dtensor-muon, fsdp2": ("fsdp2", dtensor_muon, True),
    "dion, fsdp2": ("fsdp2", dion, True),
}


def contend(d: int, layers: int, rounds: int, names: list[str], native: bool) -> dict[str, Any]:
    """Runs on every rank: name -> seconds per round, or the reason why it did not run."""
    warnings.simplefilter("ignore")
    torch._logging.set_logs(all=40)
    world = dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    full = {f"w{i}": torch.randn(shape, generator=generator) * 0.02 for i, shape in enumerate(shapes(d, layers))}
    built: dict[str, Any] = {}
    out: dict[str, Any] = {}
    for name in names:
        layout, make, peer = CONTENDERS[name]
        case = LAYOUTS[layout]
        tensors = case.build(full, case.mesh(world))
        params = [nn.Parameter(t) for t in tensors.values()]
        for p, g in zip(params, case.build(full, case.mesh(world)).values(), strict=True):
            p.grad = g
        try:
            optimizer = make(params, dist.group.WORLD if case.process_group else None)
            with fp32_casts(peer and not native):
                optimizer.step()  # also plans, compiles, opens connections
        except Exception as error:  # a peer that is not installed, or cannot run here, is reported and left out
            out[name] = f"{type(error).__name__}: {str(error)[:120]}"
            continue
        built[name] = (optimizer, peer)
        out[name] = []
    for _ in range(rounds):
        for name, (optimizer, peer) in built.items():
            with fp32_casts(peer and not native):
                dist.barrier()
                start = time.perf_counter()
                optimizer.step()
                dist.barrier()
                out[name].append(time.perf_counter() - start)
        dist.barrier()
        if dist.get_rank() == 0:
            out.setdefault("floor fp32", []).append(floor(d, layers, torch.float32) / min(world, os.cpu_count() or 1))
        dist.barrier()
    return out


def floor(d: int, layers: int, dtype: torch.dtype) -> float:
    """Seconds of all Newton-Schulz products of the model on one thread, the other cores idle."""
    total = 0.0
    for shape in ((3 * d, d), (d, d), (4 * d, d), (d, 4 * d)):
        x = torch.randn(1, min(shape), max(shape))
        start = time.perf_counter()
        orthogonalize(x, (KELLER,) * 5, dtype=dtype)
        total += (time.perf_counter() - start) * layers
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--d", type=int, default=384)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", help="contenders whose name contains one of these")
    parser.add_argument("--native", action="store_true", help="leave peers' bf16 casts as they are")
    parser.add_argument("--name", default="step_time_cpu", help="name of the result file")
    args = parser.parse_args()
    native = args.native or cpu_has_bf16_matmul()
    names = [n for n in CONTENDERS if not args.only or any(part in n for part in args.only)]
    table: dict[str, dict[int, Any]] = {}
    for ranks in args.ranks:
        with RankPool(ranks, timeout=3600) as pool:
            found = pool.run(contend, args.d, args.layers, args.rounds, names, native)
        for name, seconds in found[0].items():
            table.setdefault(name, {})[ranks] = seconds
    casts = "peers as they are" if native else "peers' bf16 casts replaced by fp32 (no bf16 instructions on this CPU)"
    lines = [
        f"{args.layers} layers, d={args.d}, {args.rounds} interleaved rounds, one thread a rank,",
        f"{os.cpu_count()} cores, {casts}.",
        "Seconds per step, median (min..max); x: median of the round-by-round ratio to `floor fp32`.",
        "",
        "| optimizer, layout | " + " | ".join(f"{r} rank{'s' if r > 1 else ''}" for r in args.ranks) + " |",
        "|---" * (len(args.ranks) + 1) + "|",
    ]
    for name, row in table.items():
        cells = []
        for ranks in args.ranks:
            seconds = row[ranks]
            if isinstance(seconds, str):
                cells.append(seconds)
            else:
                ratio = statistics.median(a / b for a, b in zip(seconds, table["floor fp32"][ranks], strict=True))
                cells.append(f"{common.summary(seconds)} {ratio:.2f}x")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    common.write(args.name, "\n".join(lines), table)


if __name__ == "__main__":
    main()
