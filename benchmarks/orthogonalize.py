"""The Newton-Schulz iteration alone: errors, FLOPs, and speed compared with the functions of other projects.

Errors: the relative Frobenius distance to the exact polar factor and the range of the singular values, for every
schedule, method and dtype, on five spectra. FLOPs: the count of torch's FlopCounterMode compared with the package's
formulas. Speed: the time of each other project, divided by that of the method that `method="auto"` chooses. Every
contender runs once per round, and the table gives the median of the rounds' ratios. A ratio above 1 means that
shardmuon is faster. All contenders run five steps with the coefficients of torch.optim.Muon.

torch.optim.Muon casts matrices to bf16. In the fp32 rows of the table, this cast is replaced by one to fp32, which is
faster on CPUs that emulate bf16 products.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import sys
import time
import typing
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import torch
from step_time import fp32_casts
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz
from torch.utils.flop_counter import FlopCounterMode

from shardmuon import schedule
from shardmuon._torch import cpu_has_bf16_matmul
from shardmuon.orthogonalize import flops, orthogonalize
from shardmuon.orthogonalize.choice import Choice

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from schedule_cases import CASES
from spectra import SPECTRA, polar_factor, spectrum

KELLER = (3.4445, -4.7750, 2.0315)
SCHEDULES = [*CASES, ("polar_express", 4), ("polar_express", 7)]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CPU_SHAPES = [(1, 512, 512), (1, 512, 2048), (1, 1024, 4096), (48, 384, 384), (48, 384, 1536)]
GPU_SHAPES = [
    (b, m, n)
    for m, n in ((1024, 4096), (4096, 4096), (4096, 14336), (1024, 8192), (8192, 8192), (8192, 28672))
    for b in (1, 8)
]
Contender = Callable[[Tensor], Tensor]
Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}


# ------------------------------------------------------------------------------------------------------------ errors


def errors(device: torch.device) -> list[str]:
    """A table with a row for each schedule and method: singular-value range in fp32, and errors in three dtypes."""
    lines = ["| schedule, method | " + " | ".join(f"{kind} {m}x{n}" for kind, m, n in SPECTRA) + " |"]
    lines.append("|---" * (len(SPECTRA) + 1) + "|")
    for name, steps in SCHEDULES:
        for method in ("standard", "gram"):
            cells = [_cell(name, steps, method, at, device) for at in range(len(SPECTRA))]
            lines.append(f"| {name} {steps}, {method} | " + " | ".join(cells) + " |")
    return lines


def _cell(name: str, steps: int, method: str, at: int, device: torch.device) -> str:
    coefficients = schedule(name, steps).triples
    x = spectrum(*SPECTRA[at])
    polar = polar_factor(x)
    found, band = [], ""
    for dtype in DTYPES.values():
        if method == "gram" and dtype == torch.bfloat16:
            found.append("-")
            continue
        out = orthogonalize(x[None].float().to(device), coefficients, method=method, dtype=dtype)[0].double().cpu()
        found.append(f"{float((out - polar).norm() / polar.norm()):.2g}")
        if dtype == torch.float32:
            values = torch.linalg.svdvals(out)
            live = values[:16] if SPECTRA[at][0] == "rank 16" else values
            band = f"{float(live.min()):.2g}-{float(live.max()):.3g}"
    return f"{band}; {'/'.join(found)}"


# ------------------------------------------------------------------------------------------------------------- FLOPs


def counted() -> list[str]:
    """A table of the FLOPs that torch counts on a CPU, compared with the package's formula. Small symmetric
    products (96 x 96) are computed in full. Of large ones (384 x 384), only one triangle is computed."""
    lines = ["| schedule, method | m x n | counted GFLOP | formula | ratio |", "|---|---|---|---|---|"]
    for name, steps in (("keller", 5), ("polar_express", 5), ("cubic", 5)):
        for method in ("standard", "gram"):
            for m, n in ((96, 96), (96, 384), (384, 384), (384, 1344), (384, 1536)):
                triples = schedule(name, steps).triples
                with FlopCounterMode(display=False) as counter:
                    orthogonalize(torch.randn(1, m, n), triples, method=method, dtype=torch.float32)
                total = counter.get_total_flops()
                kind = "cpu" if m > 96 else "cuda"  # CPUs compute small symmetric products in full, as GPUs do
                formula = flops(method, m, n, triples, torch.float32, torch.device(kind))
                row = f"{m}x{n} | {total / 1e9:.4f} | {formula / 1e9:.4f} | {total / formula:.4f}"
                lines.append(f"| {name} {steps}, {method} | {row} |")
    return lines


# ------------------------------------------------------------------------------------------------------------- speed


def torchs(dtype: torch.dtype) -> Contender:
    def run(x: Tensor) -> Tensor:
        with fp32_casts(dtype == torch.float32):
            return torch.stack([_zeropower_via_newtonschulz(matrix, KELLER, 5, 1e-7) for matrix in x])

    return run


def emerging(dtype: torch.dtype) -> Contender:
    if not hasattr(typing, "override"):  # a decorator of Python 3.12 that Emerging-Optimizers uses
        typing.override = lambda function: function  # type: ignore[attr-defined]
    module = importlib.import_module("emerging_optimizers.orthogonalized_optimizers.muon_utils")

    def run(x: Tensor) -> Tensor:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest" if dtype == torch.float32 else "medium")
        try:
            return module.newton_schulz(x if len(x) > 1 else x[0], 5, coefficient_type="simple")
        finally:
            torch.set_float32_matmul_precision(before)

    return run


def dao(dtype: torch.dtype) -> Contender:
    module = importlib.import_module("gram_newton_schulz")
    runner = module.GramNewtonSchulz(
        ns_coefficients=[list(KELLER)] * 5, ns_use_kernels=torch.cuda.is_available(), compile_kwargs=None
    )
    return lambda x: runner(x.clone())  # GramNewtonSchulz normalizes its argument in place


def ours(choice: Choice) -> Contender:
    def run(x: Tensor) -> Tensor:
        return orthogonalize(x, (KELLER,) * 5, method=choice.method, dtype=choice.dtype)

    return run


PEERS: dict[str, Callable[[torch.dtype], Contender]] = {
    "torch.optim.Muon": torchs,
    "emerging-optimizers": emerging,
    "gram-newton-schulz": dao,
}


def speed(device: torch.device, rounds: int, names: list[str], clock: Clock) -> tuple[list[str], dict[str, Any]]:
    """Time all contenders for each dtype and shape. Return the lines of a table, and a dict from "DTYPE SHAPE" to the
    seconds of each contender and shardmuon's choice of method and dtype."""
    shapes = GPU_SHAPES if device.type == "cuda" else CPU_SHAPES
    lines = [
        "| dtype | batch x m x n | ours: choice | seconds | GFLOP/s | "
        + " | ".join(f"{n} / ours" for n in names)
        + " |"
    ]
    lines.append("|---" * (5 + len(names)) + "|")
    data: dict[str, Any] = {}
    for label in ("fp32", "bf16") if device.type == "cpu" else ("bf16", "fp16"):
        for batch, m, n in shapes:
            dtype = DTYPES[label]
            # without a dtype, "auto" uses bf16 for the method "standard", but may use fp16 for "gram"
            wanted = dtype if device.type == "cpu" or label == "fp16" else None
            choice = Choice.made("auto", wanted, (m, n), (KELLER,) * 5, device)
            contenders, missing = _contenders(choice, dtype, names)
            x = torch.randn(batch, m, n, device=device)
            seconds = _interleave(contenders, x, rounds, clock)
            mine = seconds.pop("ours")
            cells = [
                missing[name]
                if name in missing
                else f"{statistics.median(a / b for a, b in zip(seconds[name], mine, strict=True)):.2f}x"
                for name in names
            ]
            operations = batch * flops(choice.method, m, n, (KELLER,) * 5, choice.dtype, device)
            rate = operations / statistics.median(mine) / 1e9
            lines.append(
                f"| {label} | {batch}x{m}x{n} | {choice} | {common.summary(mine)} | {rate:.0f} | "
                + " | ".join(cells)
                + " |"
            )
            data[f"{label} {batch}x{m}x{n}"] = {"ours": mine, "choice": str(choice), **seconds}
            print(lines[-1], flush=True)
    return lines, data


def _contenders(choice: Choice, dtype: torch.dtype, names: list[str]) -> tuple[dict[str, Contender], dict[str, str]]:
    found: dict[str, Contender] = {"ours": ours(choice)}
    missing: dict[str, str] = {}
    for name in names:
        if name == "gram-newton-schulz" and not torch.cuda.is_available():
            missing[name] = "needs a GPU"  # gram-newton-schulz multiplies in fp16, which CPUs emulate
            continue
        try:
            found[name] = PEERS[name](dtype)
        except ImportError as error:
            missing[name] = f"not installed ({error})"
    return found, missing


def _interleave(
    contenders: dict[str, Contender], x: Tensor, rounds: int, clock: Clock = time.perf_counter
) -> dict[str, list[float]]:
    wait: Callable[[], None] = torch.cuda.synchronize if x.is_cuda else (lambda: None)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    slow: dict[str, float] = {}  # contenders that take more than 10 s run only once
    for number in range(rounds + 1):
        for name, run in contenders.items():
            if name not in slow:
                wait()
                start = clock()
                run(x)
                wait()
                spent = clock() - start
                if spent > 10.0:
                    slow[name] = spent
            if number:  # the first round is a warm-up
                seconds[name].append(slow.get(name, spent))
    return seconds


def matmul_rate(device: torch.device) -> str:
    """The GFLOP/s of plain matrix products on this device in each dtype, as text."""
    parts = []
    for label in ("fp32", "bf16") if device.type == "cpu" else ("bf16", "fp16"):
        size = 1024 if device.type == "cpu" else 8192
        a = torch.randn(size, size, device=device, dtype=DTYPES[label])
        seconds = min(_interleave({"matmul": lambda _, a=a: a @ a}, a, 3)["matmul"])
        parts.append(f"{label} {2 * size**3 / seconds / 1e9:.0f} GFLOP/s")
    return ", ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--clock", choices=list(CLOCKS), default="wall", help="cpu: processor time, for machines that others use too"
    )
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--only", nargs="+", choices=("errors", "flops", "speed"), default=("errors", "flops", "speed"))
    parser.add_argument("--name", help="name of the result file (default: orthogonalize_cpu or orthogonalize_gpu)")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    device = torch.device(args.device)
    lines = [
        f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, bf16 instructions: {cpu_has_bf16_matmul()}, "
        f"plain products {matmul_rate(device)}.",
        "",
    ]
    data: dict[str, Any] = {}
    if "speed" in args.only:
        table, data = speed(device, args.rounds, args.peers, CLOCKS[args.clock])
        lines += [
            "## Speed",
            "",
            f"{args.clock} time, median of {args.rounds} interleaved rounds (least..most); x: peer's time over ours.",
            "",
        ]
        lines += [*table, ""]
    if "flops" in args.only:
        lines += ["## FLOPs of the matrix products", "", *counted(), ""]
    if "errors" in args.only:
        head = (
            "Singular values in fp32 (rank 16: live directions); relative error to the polar factor in fp32/bf16/fp16."
        )
        lines += ["## Errors", "", head, "", *errors(device), ""]
    common.write(
        args.name or f"orthogonalize_{'gpu' if device.type == 'cuda' else 'cpu'}", "\n".join(lines).rstrip(), data
    )


if __name__ == "__main__":
    main()
