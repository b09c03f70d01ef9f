"""Measure which orthogonalizer is fastest for a shape on this device, once, and remember it on disk."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from shardmuon._torch import cpu_has_amx, cpu_has_bf16_matmul
from shardmuon.orthogonalize import orthogonalize
from shardmuon.orthogonalize.choice import Choice, candidates, fastest, flops
from shardmuon.orthogonalize.products import KernelName, Products
from shardmuon.orthogonalize.schedules import Triples
from shardmuon.orthogonalize.symmetric import row_blocks, triton_available

Times = dict[str, dict[str, float]]  # shape -> str(Choice) -> seconds

_PRODUCTS = 2  # raise it when a method takes other products than before: what is on disk is then measured anew
_BUDGET = {"cpu": 6e9}  # FLOP of one run; a larger matrix is measured on one of the same aspect
_ACCELERATOR_BUDGET = 5e13
_MIN_SECONDS, _MIN_RUNS, _MAX_RUNS = 0.1, 5, 50


def cache_file() -> Path:
    """Where measurements are kept: $SHARDMUON_CACHE, or shardmuon/tuning.json in the user's cache directory."""
    given = os.environ.get("SHARDMUON_CACHE")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "shardmuon" / "tuning.json"


def device_key(device: torch.device) -> str:
    """What a measurement hangs on besides the shape."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    elif device.type == "cpu":
        extra = " amx" if cpu_has_amx() else " bf16" if cpu_has_bf16_matmul() else ""
        name = f"cpu {torch.backends.cpu.get_cpu_capability()}{extra}, {torch.get_num_threads()} threads"
    else:
        name = device.type
    return f"{name}, torch {torch.__version__}, products {_PRODUCTS}"


def kernels(device: torch.device) -> tuple[KernelName, ...]:
    """What is worth measuring for symmetric results there: not Triton interpreted on a CPU.

    A CPU also measures whole products against those by blocks; "torch" decides between them by rule.
    """
    if device.type == "cpu":
        return ("torch", "whole")
    return ("torch", "triton") if triton_available(device) else ("torch",)


def cuts(m: int, n: int, dtype: torch.dtype | None) -> bool:
    """Whether a CPU takes any symmetric product of an m x n matrix by blocks."""
    operands = Products(torch.device("cpu"), dtype or torch.float32).operands
    return row_blocks(m, n, operands, torch.get_num_threads()) > 1


def choose(
    rows: int,
    cols: int,
    coefficients: Triples,
    device: torch.device,
    dtype: torch.dtype | None,
    *,
    kernel: KernelName | Literal["auto"] = "auto",
    fresh: bool = False,
) -> Choice:
    """The fastest method for a shape on this device, measured at the first call.

    Args:
        rows, cols: Shape of the matrix.
        coefficients: The schedule; its number of steps and their kind matter.
        device: Where it will run. Its kind of device is measured; the current device does the work.
        dtype: Of the products, or None to choose.
        kernel: What multiplies symmetric results; "auto": all of `kernels` are measured.
        fresh: Measure even if the cache has the shape.
    """
    m, n = _measured_shape(rows, cols, coefficients, device)
    options = candidates(device, dtype, kernels(device) if kernel == "auto" else (kernel,))
    options = tuple(option for option in options if option.kernel != "whole" or cuts(m, n, option.dtype))
    if len(options) == 1:
        return fastest({str(options[0]): 0.0}, options)
    squares = sum(c != 0.0 for _, _, c in coefficients)
    shape = f"{m}x{n}, {len(coefficients)} steps" + (f", {squares} quintic" if squares < len(coefficients) else "")
    where = device_key(device)
    times = {} if fresh else _remembered(where, shape)
    if any(str(option) not in times for option in options):
        generator = torch.Generator("cpu").manual_seed(0)
        x = torch.randn(1, m, n, generator=generator, dtype=torch.float32, device="cpu").to(device)
        times = _remembered(where, shape) | _time(x, coefficients, options)  # other kernels' times stay
        _store(where, shape, times)
    chosen = fastest(times, options)
    if (m, n) != (min(rows, cols), max(rows, cols)):
        return Choice(chosen.method, chosen.dtype, chosen.kernel, f"{chosen.reason} (at {m}x{n})")
    return chosen


def _measured_shape(rows: int, cols: int, coefficients: Triples, device: torch.device) -> tuple[int, int]:
    m, n = min(rows, cols), max(rows, cols)
    budget = _BUDGET.get(device.type, _ACCELERATOR_BUDGET)
    while flops("standard", m, n, coefficients, torch.float32) > budget and m > 256:
        m, n = max(m // 2, 1), max(n // 2, 1)
    return m, n


def _time(x: torch.Tensor, coefficients: Triples, options: Sequence[Choice]) -> dict[str, float]:
    """Seconds for one matrix: the least of a few runs, taken in turns, since other work on the machine only adds.

    One CPU thread is timed by its own clock, which stops while others run on its core: ranks outnumber cores often.
    """
    clock = time.thread_time if x.device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    wait = _finished(x.device)
    seconds: dict[str, list[float]] = {str(option): [] for option in options}
    for number in range(_MAX_RUNS):
        for option in options:
            wait()
            start = clock()
            orthogonalize(x, coefficients, method=option.method, dtype=option.dtype, kernel=option.kernel)
            wait()
            seconds[str(option)].append(clock() - start)
        if number >= _MIN_RUNS and all(sum(row) > _MIN_SECONDS for row in seconds.values()):
            break
    return {name: min(row[1:]) for name, row in seconds.items()}  # the first run warms up


def _finished(device: torch.device) -> Callable[[], object]:
    """What waits for the work given to a device: every accelerator takes orders faster than it carries them out."""
    if device.type == "cpu":
        return lambda: None
    if device.type == "cuda":
        return partial(torch.cuda.synchronize, device)
    return partial(torch.accelerator.synchronize, device)


def _remembered(where: str, shape: str) -> dict[str, float]:
    times = _load().get(where, {}).get(shape)
    if not isinstance(times, dict):
        return {}
    return {name: float(t) for name, t in times.items() if isinstance(t, (int, float)) and 0 < t < float("inf")}


def _load() -> dict[str, Times]:
    try:
        found = json.loads(cache_file().read_text())
    except (OSError, ValueError):
        return {}  # no cache yet, or one that a crash cut short: measure again
    return (
        {where: times for where, times in found.items() if isinstance(times, dict)} if isinstance(found, dict) else {}
    )


def _store(where: str, shape: str, times: dict[str, float]) -> None:
    """Add to the file; a reader sees the old one or the new one. A directory that cannot be written is no error."""
    table = _load()
    table.setdefault(where, {})[shape] = times
    path = cache_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as out:
            json.dump(table, out, indent=1, sort_keys=True)
        os.replace(out.name, path)
    except OSError:
        return
