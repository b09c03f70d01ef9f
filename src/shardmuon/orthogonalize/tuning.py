"""Measurements of machines in a file that the user names: the fastest method for a shape, and unequal slots of batches.

Nothing is measured or written unless `shardmuon tune` or `shardmuon verify --slots` is told a file, and nothing is read
unless `Orthogonalizer.tuning` names one. Ranks compare its digest; rows count only on a machine with their stamp.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shardmuon.orthogonalize import orthogonalize
from shardmuon.orthogonalize.choice import Choice, Task, candidates, fastest, flops
from shardmuon.orthogonalize.products import KernelName
from shardmuon.orthogonalize.schedules import Triples
from shardmuon.orthogonalize.stamp import machine_stamp
from shardmuon.orthogonalize.triton_trial import why_not

FORMAT = 1
_BUDGET = {"cpu": 6e9}  # FLOP of one run; a larger matrix is measured on one of the same aspect
_ACCELERATOR_BUDGET = 5e13
_MIN_SECONDS, _MIN_RUNS, _MAX_RUNS = 0.1, 5, 50


@dataclass(frozen=True, slots=True)
class Tuning:
    """A file of measurements.

    Attributes:
        path: For messages.
        digest: Of its content, equal on ranks that read the same.
        machines: Stamp -> "times" (shape -> text of a choice -> seconds for one matrix) and "slots" ("searched":
            number of products compared, "unequal": shape -> text of a choice -> number found unequal).
    """

    path: str
    digest: str
    machines: dict[str, dict[str, Any]] = field(hash=False, repr=False)

    def choice(self, task: Task, dtype: torch.dtype | None) -> Choice | None:
        """The fastest for a shape; None if this machine's rows lack the shape."""
        m, n = measured_shape(task)
        times = self._here(task.device).get("times", {}).get(_shape_text(m, n, task.coefficients), {})
        options = candidates(task.device, dtype, kernels(task.device))
        known = tuple(option for option in options if str(option) in times)
        if options[0] not in known:
            return None
        found = fastest(times, known)
        at = "" if (m, n) == (min(task.rows, task.cols), max(task.rows, task.cols)) else f" at {m}x{n}"
        return Choice(found.method, found.dtype, found.kernel, found.alone, f"{found.reason}{at} ({self.path})")

    def is_unequal(self, task: Task, choice: Choice) -> bool:
        """True if a search on this machine found that slots of a batch of this shape round differently."""
        unequal = self._here(task.device).get("slots", {}).get("unequal", {})
        return str(choice) in unequal.get(f"{task.rows}x{task.cols}", {})

    def about_slots(self, device: torch.device) -> str:
        """One line on what a search on this machine has found, for the printed plan."""
        found = self._here(device).get("slots")
        if found is None:
            return f"slots of batches: {self.path} has no search on this machine"
        unequal = found["unequal"]
        what = f"shapes {', '.join(unequal)} differ and run alone" if unequal else "none differ"
        return f"slots of batches: {found['searched']} products compared on this machine ({self.path}): {what}"

    def _here(self, device: torch.device) -> dict[str, Any]:
        return self.machines.get(machine_stamp(device), {})


def load(path: str) -> Tuning:
    """Read a file of measurements.

    Raises:
        ValueError: There is no such file, or it is not one of these.
    """
    try:
        content = Path(path).read_bytes()
        found = json.loads(content)
        machines = found["machines"]
        if found["format"] != FORMAT or not all(isinstance(rows, dict) for rows in machines.values()):
            raise ValueError(f"format {found['format']!r}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as wrong:
        raise ValueError(
            f"Orthogonalizer.tuning={path!r} must be a file that `shardmuon tune --out FILE` has written: "
            f"{type(wrong).__name__}: {wrong}"
        ) from None
    return Tuning(path, hashlib.blake2b(content, digest_size=8).hexdigest(), machines)


def add(path: Path, device: torch.device, key: str, rows: dict[str, Any]) -> None:
    """Add rows of this machine to a file, replacing those of the same names. A reader sees the old file or the new one.

    Args:
        path: The file, new or one of these.
        device: Where the rows were measured.
        key: "times" or "slots".
        rows: See `Tuning.machines`.

    Raises:
        OSError: It cannot be written.
        ValueError: It exists and is another kind of file.
    """
    machines = load(str(path)).machines if path.exists() else {}
    machines.setdefault(machine_stamp(device), {}).setdefault(key, {}).update(rows)
    with tempfile.NamedTemporaryFile("w", dir=path.absolute().parent, delete=False) as out:
        json.dump({"format": FORMAT, "machines": machines}, out, indent=1, sort_keys=True)
    os.replace(out.name, path)


def kernels(device: torch.device) -> tuple[KernelName, ...]:
    """The kernels for symmetric results that are worth measuring there: not Triton interpreted on a CPU."""
    return ("torch", "triton") if device.type != "cpu" and why_not(device) is None else ("torch",)


def measure(task: Task, dtype: torch.dtype | None) -> tuple[str, dict[str, float]]:
    """Time every choice for a shape on this device.

    Args:
        task: Its current device does the work.
        dtype: Of the products, or None for each method's own.

    Returns:
        The shape that was measured and its schedule as text, and text of a choice -> seconds for one matrix.
    """
    m, n = measured_shape(task)
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(1, m, n, generator=generator, dtype=torch.float32, device="cpu").to(task.device)
    times = _time(x, task.coefficients, candidates(task.device, dtype, kernels(task.device)))
    return _shape_text(m, n, task.coefficients), times


def measured_shape(task: Task) -> tuple[int, int]:
    """(short, long) of the matrix that is timed in place of one of this shape."""
    m, n = min(task.rows, task.cols), max(task.rows, task.cols)
    budget = _BUDGET.get(task.device.type, _ACCELERATOR_BUDGET)
    while flops("standard", m, n, task.coefficients, torch.float32) > budget and m > 256:
        m, n = max(m // 2, 1), max(n // 2, 1)
    return m, n


def _shape_text(m: int, n: int, coefficients: Triples) -> str:
    squares = sum(c != 0.0 for _, _, c in coefficients)
    return f"{m}x{n}, {len(coefficients)} steps" + (f", {squares} quintic" if squares < len(coefficients) else "")


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
    """A wait for the work given to a device: every accelerator takes orders faster than it carries them out."""
    if device.type == "cpu":
        return lambda: None
    if device.type == "cuda":
        return partial(torch.cuda.synchronize, device)
    return partial(torch.accelerator.synchronize, device)
