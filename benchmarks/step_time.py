"""Time of one optimizer step, for shardmuon and its peers (`make bench`).

Model: 12 layers of (3d x d, d x d, 4d x d, d x 4d) with d = 384, which makes 48 matrices and 21.2 M Muon parameters.
Gradients are injected, and each rank uses one thread. Each contender takes one step in every round, so a drift in the
machine's speed affects all of them; compare ratios and medians, not single times. By default, the benchmark runs on
1, 2 and 4 ranks, which takes less than eight minutes in total.

    make bench                                             # this CPU
    make bench BENCH="--only fsdp2 --name fsdp2"           # only some contenders
    SHARDMUON_CPU_BF16=0 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 make bench BENCH="--name step_time_avx2"

A peer runs if it can be imported. torch.optim.Muon is always present, `muon-fsdp2` and `dtensor-muon` are on PyPI, and
dion must be on PYTHONPATH as a checkout of microsoft/dion. The table names peers that were absent. In the first two
steps, which are not timed, shardmuon plans and some peers compile.

Some peers cast to bf16. On a CPU without bf16 instructions, torch multiplies bf16 matrices 10 to 80 times slower than
fp32 ones, which would outweigh everything else. On such a CPU, `Tensor.bfloat16` returns fp32 for the peers, so that
they run at the CPU's best speed. This has no effect on dion, which casts in compiled functions. Its source is therefore
changed when it is loaded, so that Newton-Schulz functions cast their input to fp32. Messages stay in bf16. `--native`
leaves all peers unchanged.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.machinery
import importlib.util
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, ModuleType
from typing import Any, NamedTuple

import common
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardmuon import Muon
from shardmuon._torch import cpu_has_bf16_matmul
from shardmuon.testing import RankPool
from shardmuon.testing.layouts import LAYOUTS, mesh_of

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # compile in one thread: the ranks already use all cores

KELLER = (3.4445, -4.7750, 2.0315)


def shapes(d: int, layers: int) -> list[tuple[int, int]]:
    return [shape for _ in range(layers) for shape in ((3 * d, d), (d, d), (4 * d, d), (d, 4 * d))]


@contextlib.contextmanager
def fp32_casts(active: bool) -> Iterator[None]:
    """Make bf16 casts return fp32 inside the block if `active` is True. Use it for other projects' optimizers only."""
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


class Fp32Source(importlib.machinery.SourceFileLoader):
    """A module loader that changes Newton-Schulz functions to cast their input to fp32 instead of bf16."""

    CASTS = ("X = G.to(dtype=torch.bfloat16)", "X = G.bfloat16()")
    replaced = 0

    def get_code(self, fullname: str) -> CodeType:  # skips cached bytecode, which has the original casts
        source = self.get_data(self.path).decode()
        for cast in self.CASTS:
            Fp32Source.replaced += source.count(cast)
            source = source.replace(cast, "X = G.to(dtype=torch.float32, copy=True)")
        return compile(source, self.path, "exec")


class Fp32Package:
    """An import finder that loads all modules of one package with `Fp32Source`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] != self.name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.origin is None:
            return spec
        loader = Fp32Source(name, spec.origin)
        places = spec.submodule_search_locations
        return importlib.util.spec_from_file_location(
            name, spec.origin, loader=loader, submodule_search_locations=places
        )


def ours(**options: Any) -> Callable[[list[nn.Parameter], Any], Any]:
    def make(params: list[nn.Parameter], group: Any) -> Any:
        return Muon(params, lr=0.02, weight_decay=0.0, process_group=group, **options)

    return make


def muon_fsdp2(params: list[nn.Parameter], group: Any) -> Any:
    return importlib.import_module("muon_fsdp2").Muon(
        [{"params": params, "use_muon": True, "lr": 0.02, "weight_decay": 0.0}]
    )


def dtensor_muon(params: list[nn.Parameter], group: Any) -> Any:
    chosen = importlib.import_module("dtensor_muon.orthogonalize.orthogonalize")
    pick = chosen._get_orthogonalization_fn  # wrapped to avoid dtensor-muon's default kernel, which needs CUDA
    if not getattr(pick, "on_cpu", False):
        plain = lambda strategy, _: pick(strategy, False)  # noqa: E731
        plain.on_cpu = True  # type: ignore[attr-defined]
        chosen._get_orthogonalization_fn = plain
    module = importlib.import_module("dtensor_muon.optim.optim")
    return module.Muon(params, lr=0.02, wd=0.0, orthogonalization_strategy="newton_schulz")


def dion(params: list[nn.Parameter], group: Any) -> Any:
    module = importlib.import_module("dion")
    if any(isinstance(finder, Fp32Package) for finder in sys.meta_path) and not Fp32Source.replaced:
        raise RuntimeError("none of its casts to bf16 was found: it would run emulated products")
    place = group or mesh_of((dist.get_world_size(),))
    return module.Muon(
        params, distributed_mesh=place, lr=0.02, nesterov=True, weight_decay=0.0, use_polar_express=False
    )


def torch_muon(params: list[nn.Parameter], group: Any) -> Any:
    return torch.optim.Muon(params, lr=0.02, weight_decay=0.0)


def adamw(params: list[nn.Parameter], group: Any) -> Any:
    return torch.optim.AdamW(params, lr=1e-3, fused=True)


class Contender(NamedTuple):
    """An optimizer to time on one layout. A `peer` is from another project, and may cast to bf16."""

    name: str
    layout: str
    make: Callable[[list[nn.Parameter], Any], Any]
    peer: bool = False

    def __str__(self) -> str:
        return f"{self.name}, {self.layout}"


CONTENDERS = (
    Contender("shardmuon default", "fsdp2", ours()),
    Contender('shardmuon "torch"', "fsdp2", ours(method="torch")),
    Contender("torch.optim.Muon", "fsdp2", torch_muon, peer=True),
    Contender("muon-fsdp2", "fsdp2", muon_fsdp2, peer=True),
    Contender("dtensor-muon", "fsdp2", dtensor_muon, peer=True),
    Contender("dion", "fsdp2", dion, peer=True),
    Contender("shardmuon default", "hsdp", ours()),
    Contender("shardmuon default", "fsdp2+tp", ours()),
    Contender("shardmuon default", "ddp", ours()),
    Contender("dion", "ddp", dion, peer=True),
    Contender('shardmuon "standard"', "fsdp2", ours(method="standard")),
    Contender('shardmuon "gram"', "fsdp2", ours(method="gram")),
    Contender("AdamW fused", "fsdp2", adamw),
)


def contend(d: int, layers: int, rounds: int, seconds: float, names: list[str], native: bool) -> dict[str, Any]:
    """Time all contenders on this rank. Return a dict with an entry for each contender: a dict of its times in seconds
    ("wall", "cpu") and its methods ("how"), or the reason why it did not run."""
    warnings.simplefilter("ignore")
    torch._logging.set_logs(all=40)
    if not native:
        sys.meta_path.insert(0, Fp32Package("dion"))  # type: ignore[arg-type]
    built: dict[str, tuple[Any, bool]] = {}
    out: dict[str, Any] = {}
    for contender in CONTENDERS:
        name = str(contender)
        if name not in names:
            continue
        try:
            optimizer = build(contender, d, layers)
            with fp32_casts(contender.peer and not native):
                optimizer.step()  # the first step plans, compiles and opens connections
                optimizer.step()
        except Exception as error:  # a peer that is not installed or cannot run here is skipped
            out[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
            continue
        built[name] = (optimizer, contender.peer)
        out[name] = {"wall": [], "cpu": [], "how": how(optimizer)}
    out["floor"] = {"wall": [], "cpu": [], "how": ""}
    out[BARE] = {"wall": [], "cpu": [], "how": ""}
    moved = Moved(d, layers)
    start = time.perf_counter()
    for number in range(rounds):
        for name, (optimizer, peer) in built.items():
            with fp32_casts(peer and not native):
                wall, cpu = timed(optimizer.step)
            out[name]["wall"].append(wall)
            out[name]["cpu"].append(cpu)
        shared = floor(d, layers) / dist.get_world_size()
        out["floor"]["wall"].append(shared * dist.get_world_size() / min(dist.get_world_size(), os.cpu_count() or 1))
        out["floor"]["cpu"].append(shared)
        wall, cpu = timed(moved)
        out[BARE]["wall"].append(out["floor"]["wall"][-1] + wall)
        out[BARE]["cpu"].append(shared + cpu)
        enough = torch.tensor(number >= 2 and time.perf_counter() - start > seconds)
        dist.broadcast(enough, 0)
        if enough:
            break
    return out


def build(contender: Contender, d: int, layers: int) -> Any:
    """Build a model's matrices in the contender's layout, set gradients, and return an optimizer for them."""
    case = LAYOUTS[contender.layout]
    generator = torch.Generator().manual_seed(0)
    full = {f"w{i}": torch.randn(shape, generator=generator) * 0.02 for i, shape in enumerate(shapes(d, layers))}
    mesh = case.mesh(dist.get_world_size())
    params = [nn.Parameter(t) for t in case.build(full, mesh).values()]
    for p, g in zip(params, case.build(full, mesh).values(), strict=True):
        p.grad = g
    return contender.make(params, case.options(dist.get_world_size()).get("process_group"))


def how(optimizer: Any) -> str:
    """The methods and dtypes in shardmuon's plan, separated by commas; an empty string for other optimizers."""
    plan = getattr(optimizer, "plan", None)
    return "" if plan is None else ", ".join(sorted({str(item.choice) for item in plan.items}))


def timed(step: Callable[[], Any]) -> tuple[float, float]:
    """Time one step; return the wall seconds from one barrier to the next, and the CPU seconds of this rank."""
    dist.barrier()
    start, cpu = time.perf_counter(), time.process_time()
    step()
    spent = time.process_time() - cpu
    dist.barrier()
    return time.perf_counter() - start, spent


def floor(d: int, layers: int) -> float:
    """Measure the CPU seconds of a step's Newton-Schulz products alone, for the whole model. The dtype is bf16 on CPUs
    with bf16 instructions, and fp32 on others."""
    dtype = torch.bfloat16 if cpu_has_bf16_matmul() else torch.float32
    total = 0.0
    for shape in shapes(d, 1):
        y = torch.randn(min(shape), max(shape)).to(dtype) / math.sqrt(shape[0] * shape[1])
        start = time.process_time()
        for a, b, c in (KELLER,) * 5:
            gram = y @ y.mT
            y = torch.addmm(y, torch.addmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
        total += (time.process_time() - start) * layers
    return total


BARE = "floor, with one pass and two messages"
_PART = 1 << 16  # elements per part, few enough to stay in a core's cache


class Moved:
    """A callable that does the minimum work of a Muon step besides matrix products, on this rank's share of the model.
    It updates the momentum, casts the result to bf16, sends it to the other ranks and back, and updates the weights.
    The tensors are processed in parts that fit in the cache."""

    def __init__(self, d: int, layers: int) -> None:
        world = dist.get_world_size()
        count = sum(rows * cols for rows, cols in shapes(d, layers)) // world // world * world
        self._grad, self._momentum, self._weight = (torch.randn(count) for _ in range(3))
        self._send, self._recv = (torch.zeros(count, dtype=torch.bfloat16) for _ in range(2))

    def __call__(self) -> None:
        parts = zip(self._grad.split(_PART), self._momentum.split(_PART), self._send.split(_PART), strict=True)
        for grad, momentum, send in parts:
            momentum.lerp_(grad, 0.05)
            send.copy_(grad.lerp(momentum, 0.95))
        if dist.get_world_size() > 1:
            dist.all_to_all_single(self._recv, self._send)
            dist.all_to_all_single(self._send, self._recv)
        for weight, update in zip(self._weight.split(_PART), self._send.split(_PART), strict=True):
            weight.add_(update.float(), alpha=-0.02)


# ------------------------------------------------------------------------------------------------------- the tables


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--d", type=int, default=384)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=30, help="at most so many rounds for each number of ranks")
    parser.add_argument("--seconds", type=float, default=90.0, help="and no new round after so long (3 at least)")
    parser.add_argument("--only", nargs="+", help="contenders whose name contains one of these")
    parser.add_argument("--native", action="store_true", help="leave peers' bf16 casts as they are")
    parser.add_argument("--name", default="step_time_cpu", help="name of the result file")
    args = parser.parse_args()
    native = args.native or cpu_has_bf16_matmul()
    names = [str(c) for c in CONTENDERS if not args.only or any(part in str(c) for part in args.only)]
    found: dict[int, list[dict[str, Any]]] = {}
    for ranks in args.ranks:
        with RankPool(ranks, timeout=3600) as pool:
            found[ranks] = pool.run(contend, args.d, args.layers, args.rounds, args.seconds, names, native)
    casts = "peers as they are" if native else "peers' bf16 casts replaced by fp32 (no bf16 instructions on this CPU)"
    lines = [
        f"{args.layers} layers, d={args.d}, {' / '.join(str(len(r[0]['floor']['wall'])) for r in found.values())}",
        f"interleaved rounds at {' / '.join(map(str, found))} ranks, one thread a rank, {os.cpu_count()} cores,",
        f"{casts}.",
        *imitation(),
        "`floor`: the products of Newton-Schulz alone, shared out evenly over ranks (CPU) and cores (wall).",
        f"`{BARE}`: and each rank's part once through momentum, bf16 and weights, and to the others and back.",
        "",
        *table(found, names, "wall", "Wall seconds a step"),
        "",
        *table(found, names, "cpu", "CPU seconds a step, of the busiest rank (robust where other work runs here)"),
    ]
    common.write(args.name, "\n".join(lines), {str(ranks): rows[0] for ranks, rows in found.items()})


def imitation() -> list[str]:
    """Lines for the report if environment variables make torch imitate an older CPU; otherwise, an empty list."""
    names = ("SHARDMUON_CPU_BF16", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")
    given = [f"{name}={os.environ[name]}" for name in names if name in os.environ]
    if not given:
        return []
    return [
        "",
        f"An imitation: {' '.join(given)}.",
        "The CPU has wider vectors, which oneDNN, ATen and ours then leave alone; MKL and what peers compile need not.",
        "Clock, caches and memory are this CPU's, not those of one that has AVX2 only.",
    ]


def table(found: dict[int, list[dict[str, Any]]], names: list[str], which: str, title: str) -> list[str]:
    """A table of each contender's median time and range, and its median round-by-round ratio to the fastest peer."""
    head = [f"{r} rank{'s' if r > 1 else ''}" for r in found]
    lines = [
        f"{title}: median (min..max); x: median of the round-by-round ratio to the fastest peer on fsdp2.",
        "",
        f"| optimizer, layout | {' | '.join(head)} |",
        "|---" * (len(head) + 1) + "|",
    ]
    best = {ranks: fastest_peer(rows, which) for ranks, rows in found.items()}
    for name in [*names, "floor", BARE]:
        cells = []
        for ranks, rows in found.items():
            seconds = of(rows, name, which)
            if seconds is None:
                cells.append(str(rows[0][name]))
                continue
            ratio = "" if best[ranks] is None else f" {ratio_of(seconds, of(rows, best[ranks], which)):.2f}x"
            taken = rows[0][name]["how"]
            cells.append(common.summary(seconds) + ratio + (f" [{taken}]" if taken else ""))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    fastest = ", ".join(f"{name or 'none'} at {ranks}" for ranks, name in best.items())
    return [*lines, "", f"Fastest peer: {fastest}."]


def of(rows: list[dict[str, Any]], name: str | None, which: str) -> list[float] | None:
    """The seconds of the slowest rank in each round, or None if the contender did not run."""
    if name is None or not all(isinstance(row[name], dict) for row in rows):
        return None
    return [max(values) for values in zip(*(row[name][which] for row in rows), strict=True)]


def fastest_peer(rows: list[dict[str, Any]], which: str) -> str | None:
    """The name of the peer on the layout fsdp2 with the lowest median, or None if no peer ran."""
    peers = [str(c) for c in CONTENDERS if c.peer and c.layout == "fsdp2" and str(c) in rows[0]]
    ran = {name: statistics.median(seconds) for name in peers if (seconds := of(rows, name, which))}
    return min(ran, key=lambda name: ran[name], default=None)


def ratio_of(seconds: list[float], base: list[float] | None) -> float:
    return statistics.median(a / b for a, b in zip(seconds, base or seconds, strict=True))


if __name__ == "__main__":
    main()
