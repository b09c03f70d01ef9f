"""The orthogonalizer of each matrix: named by the user, by a rule, or by a file of measurements that the user names.

Ranks that share a matrix must choose alike, and so must ranks that hold replicas of it without ever talking. So the
rule looks at nothing but shape, schedule, dtype and kind of device; nothing is timed in a step.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from shardmuon._torch import cpu_has_bf16_matmul
from shardmuon.orthogonalize import BACKENDS, KernelName, batch_size, default_dtype, orthogonalize, slice_sums
from shardmuon.orthogonalize.gram import plan_restarts, restarts_locally
from shardmuon.orthogonalize.schedules import Triples
from shardmuon.orthogonalize.triton_symmetric import num_blocks, why_not
from shardmuon.orthogonalize.tuning import Tuning

_NEAR = 0.95  # another method must beat "standard" by 5% to be taken: smaller gains are within the noise

# bf16 products over fp32 ones on a CPU that has them: 2.3 by AVX512-BF16 (measured), several times that by AMX (not
# measured). One number between, so that ranks on different models choose alike. By it five quintic steps are never
# "gram", whose share of the work is above 1/5; on AVX512-BF16 that gives up some speed beyond n/m = 10.
_CPU_BF16_RATE = 4.0
_WORTH_IT = 0.75  # of the time of "standard": "gram" is taken below it
_FIXED = {"torch": "as in torch.optim.Muon", "reference": "always"}  # methods whose dtype is part of what they are
_WORDS, _SLICED = ("triton", "alone"), "split_k="
_BUDGET = {"cpu": 6e9}  # FLOP of one run; a larger matrix is measured on one of the same aspect
_ACCELERATOR_BUDGET = 5e13
_MIN_SECONDS, _MIN_RUNS, _MAX_RUNS = 0.1, 5, 50


@dataclass(frozen=True, slots=True)
class Choice:
    """The orthogonalizer of one matrix.

    Attributes:
        method: A key of `BACKENDS`.
        dtype: Dtype of the products; None: the method's own ("torch", "reference").
        kernel: Multiplies symmetric results.
        alone: Never in a batch: it is sliced, or slots of one were found to be unequal on this device.
        split_k: Number of slices of its long side, see `orthogonalize`.
        reason: Why, for the printed plan.
    """

    method: str = "standard"
    dtype: torch.dtype | None = None
    kernel: KernelName = "torch"
    alone: bool = False
    split_k: int = 1
    reason: str = field(default="", compare=False)

    @classmethod
    def of(cls, text: str) -> Choice:
        """The choice with this text (`str`), without its reason."""
        method, *rest = text.split()
        slices = next((int(word.removeprefix(_SLICED)) for word in rest if word.startswith(_SLICED)), 1)
        dtypes = [getattr(torch, word) for word in rest if word not in _WORDS and not word.startswith(_SLICED)]
        kernel: KernelName = "triton" if "triton" in rest else "torch"
        return cls(method, dtypes[0] if dtypes else None, kernel, "alone" in rest, slices)

    def __str__(self) -> str:
        dtype = "" if self.dtype is None else str(self.dtype).removeprefix("torch.")
        words = self.method, dtype, "" if self.kernel == "torch" else self.kernel, "alone" if self.alone else ""
        return " ".join(filter(None, (*words, f"{_SLICED}{self.split_k}" if self.split_k > 1 else "")))


class Task(NamedTuple):
    """The matrix that a choice is made for."""

    rows: int
    cols: int
    coefficients: Triples
    device: torch.device


@dataclass(frozen=True, slots=True)
class Chooser:
    """The method and dtype of `Orthogonalizer`, and the file of measurements that it names.

    Attributes:
        method: "auto" or a key of `BACKENDS`.
        dtype: Dtype of the products, or None to choose.
        measured: What the file has; None without one.
        device: Where matrices are orthogonalized, if not where their parameters are.
        split_k: Slices of a matrix that can be sliced.
    """

    method: str
    dtype: torch.dtype | None
    measured: Tuning | None = None
    device: torch.device | None = None
    split_k: int = 1

    def choice(self, task: Task) -> Choice:
        """The choice for a matrix, with its reason.

        Raises:
            ValueError: It cannot run on this rank's device.
        """
        found = self._found(task)
        if self.measured is not None and self.measured.is_unequal(task.rows, task.cols, task.device, str(found)):
            found = replace(found, alone=True)
        if self.split_k > 1 and can_slice(found, task) and max(task.rows, task.cols) % self.split_k == 0:
            found = replace(found, alone=True, split_k=self.split_k)
        hindrance = why_not(task.device) if found.kernel == "triton" else None
        if hindrance is not None:
            raise ValueError(
                f"the Triton kernel cannot run on {task.device}: {hindrance}. Leave out Orthogonalizer.tuning, or tune "
                "here"
            )
        why = _why_dtype(found.method, task.device, self.dtype)
        return replace(found, reason=f"{found.reason}; {why}" if found.reason else why)

    def _found(self, task: Task) -> Choice:
        if self.method != "auto":
            products = self.dtype or default_dtype(self.method, task.device)
            return Choice(self.method, None if self.method in _FIXED else products)
        return (self.measured and from_file(self.measured, task, self.dtype)) or rule(*task, self.dtype)


def _why_dtype(method: str, device: torch.device, wanted: torch.dtype | None) -> str:
    """The dtype that a matrix's products have on a device, and why, for the printed plan."""
    found = str((None if method in _FIXED else wanted) or default_dtype(method, device)).removeprefix("torch.")
    place = device.type
    if place == "cpu":
        place = f"CPUs {'with' if cpu_has_bf16_matmul() else 'without'} bfloat16 products"
    why = _FIXED.get(method) or ("by Orthogonalizer.dtype" if wanted else f"the default of {method} on {place}")
    return f"products in {found}, {why}"


def from_file(tuning: Tuning, task: Task, dtype: torch.dtype | None) -> Choice | None:
    """The fastest that a file has for a shape on this machine; None if it lacks the shape."""
    m, n = _measured_shape(task)
    times = tuning.times(_shape_text(m, n, task.coefficients), task.device)
    options = candidates(task.device, dtype, kernels(task.device))
    if str(options[0]) not in times:
        return None
    found = fastest(times, tuple(option for option in options if str(option) in times))
    at = "" if (m, n) == (min(task.rows, task.cols), max(task.rows, task.cols)) else f" at {m}x{n}"
    return replace(found, reason=f"{found.reason}{at} ({tuning.path})")


def candidates(
    device: torch.device, dtype: torch.dtype | None, kernels: tuple[KernelName, ...] = ("torch",)
) -> tuple[Choice, ...]:
    """The choices of "auto" on a device: "standard" first, then "gram" in dtypes in which it is safe."""
    found = []
    for method in ("standard", "gram"):
        products = dtype or default_dtype(method, device)
        if method == "gram" and products == torch.bfloat16:
            continue
        for kernel in kernels if products != torch.float64 else ("torch",):
            found.append(Choice(method, products, kernel))
    return tuple(found)


def rule(
    rows: int,
    cols: int,
    coefficients: Triples,
    device: torch.device,
    dtype: torch.dtype | None,
) -> Choice:
    """The choice without a measurement: "gram" where its arithmetic, at its dtype's rate, is less by a quarter."""
    options = candidates(device, dtype)
    aspect = max(rows, cols) / min(rows, cols)
    if len(options) == 1:
        return replace(options[0], reason=f"by rule: the Gram form is not safe in {options[0].dtype}")
    gram, standard = options[1], options[0]
    share = work(gram, rows, cols, coefficients, device) / work(standard, rows, cols, coefficients, device)
    slower = _rate(standard.dtype, device) / _rate(gram.dtype, device)
    chosen = gram if share * slower < _WORTH_IT else standard
    reason = f"by rule: at n/m = {aspect:.2f} the Gram form has {share:.2f}x of the work"
    if slower != 1.0:
        reason += f", in {str(gram.dtype).removeprefix('torch.')} at 1/{slower:g} of the rate"
    return replace(chosen, reason=f"{reason} (taken below {_WORTH_IT / slower:.3g}x)")


def _rate(dtype: torch.dtype | None, device: torch.device) -> float:
    """Relative speed of products in a dtype, as far as ranks that never talk know alike."""
    native = dtype == torch.bfloat16 and device.type == "cpu" and cpu_has_bf16_matmul()
    return _CPU_BF16_RATE if native else 1.0


def fastest(seconds: Mapping[str, float], options: tuple[Choice, ...]) -> Choice:
    """The fastest choice. `seconds`: str(choice) -> for one matrix."""
    standard = options[0]
    best = min(options, key=lambda option: seconds[str(option)])
    if seconds[str(best)] > _NEAR * seconds[str(standard)]:
        best = standard
    others = ", ".join(f"{option} {1e3 * seconds[str(option)]:.3g} ms" for option in options if option != best)
    return replace(best, reason=f"measured {1e3 * seconds[str(best)]:.3g} ms" + (f"; {others}" if others else ""))


def can_slice(choice: Choice, task: Task) -> bool:
    """True for a matrix that is so large that it runs alone, of a method that has slices."""
    return BACKENDS[choice.method].of_slices is not None and batch_size(task.rows, task.cols, task.device) == 1


def is_narrow(choice: Choice) -> bool:
    """True for half-precision products. Those of "torch" are bf16."""
    return choice.method == "torch" or choice.dtype in (torch.bfloat16, torch.float16)


def slice_costs(choice: Choice, task: Task) -> tuple[int, int, int]:
    """The attributes of `plan.items.Slicing`, of a matrix that can be sliced."""
    rows, cols, coefficients, device = task
    dtype = choice.dtype or default_dtype(choice.method, device)
    sums = slice_sums(choice.method, min(rows, cols), max(rows, cols), coefficients, dtype)
    return (*sums, round(_parts(choice, *task)[1]))


def work(choice: Choice, rows: int, cols: int, coefficients: Triples, device: torch.device) -> int:
    """Floating point operations that a choice takes on a kind of device."""
    return round(sum(_parts(choice, rows, cols, coefficients, device)))


def _parts(choice: Choice, rows: int, cols: int, coefficients: Triples, device: torch.device) -> tuple[float, float]:
    """Operations of products with the long side, and of small ones."""
    dtype = choice.dtype or torch.float32
    # A CPU computes the block triangle of symmetric products, 10 of 16 tiles.
    share = 0.625 if device.type == "cpu" else 1.0
    if choice.kernel == "triton":
        side = num_blocks(min(rows, cols), dtype)
        share = (side + 1) / (2 * side)
    return _flops_by_side(choice.method, rows, cols, coefficients, dtype, share)


def flops(
    method: str, rows: int, cols: int, coefficients: Triples, dtype: torch.dtype, symmetric_share: float = 1.0
) -> int:
    """Floating point operations of a method's matrix products on one rows x cols matrix.

    Args:
        method: "standard" or "gram"; others are counted as "standard".
        dtype: Dtype of the products: "gram" restarts more often in low precision.
        symmetric_share: Part of a symmetric product that is computed: 1 for plain products, 0.5 for the lower half.

    Returns:
        The count, as in the tables of Gram Newton-Schulz: with m <= n, full products and k quintic steps 4 k m^2 n +
        2 k m^3 for "standard" and 4 m^2 n + (8 k - 6) m^3 for "gram" without restarts.
    """
    return round(sum(_flops_by_side(method, rows, cols, coefficients, dtype, symmetric_share)))


def _flops_by_side(
    method: str, rows: int, cols: int, coefficients: Triples, dtype: torch.dtype, symmetric_share: float
) -> tuple[float, float]:
    """`flops` of products with the long side, and of small ones."""
    m, n = min(rows, cols), max(rows, cols)
    steps = len(coefficients)
    squares = sum(c != 0.0 for _, _, c in coefficients)  # products A A: a cubic step has none
    twice: float = 2 * m * m * n * (1.0 + symmetric_share)  # one X X^T, and one product with X
    small: float = 2 * m**3
    if method != "gram":
        return steps * twice, squares * small * symmetric_share
    restarts = len(plan_restarts(coefficients, dtype))
    # Per segment: Q costs a product a step but the first, R two a step but the last.
    of_small = (squares + 3 * (steps - restarts - 1)) * small * symmetric_share
    if restarts_locally(m, n, coefficients, dtype):
        return twice, of_small + restarts * (3 * small + 2 * small * symmetric_share)  # split products, merging the Q's
    return (1 + restarts) * twice, of_small


# ---------------------------------------------------------------------------------------------------- measurements


def kernels(device: torch.device) -> tuple[KernelName, ...]:
    """The kernels for symmetric results that are worth measuring there: not Triton interpreted on a CPU."""
    return ("torch", "triton") if device.type != "cpu" and why_not(device) is None else ("torch",)


def measure(task: Task, dtype: torch.dtype | None) -> tuple[str, dict[str, float]]:
    """Time every choice for a shape on this device.

    Args:
        task: Its current device does the work.
        dtype: Dtype of the products, or None for each method's own.

    Returns:
        The shape that was measured and its schedule as text, and text of a choice -> seconds for one matrix.
    """
    m, n = _measured_shape(task)
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(1, m, n, generator=generator, dtype=torch.float32, device="cpu").to(task.device)
    times = _time(x, task.coefficients, candidates(task.device, dtype, kernels(task.device)))
    return _shape_text(m, n, task.coefficients), times


def _measured_shape(task: Task) -> tuple[int, int]:
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
    seconds: dict[str, list[float]] = {str(option): [] for option in options}
    for number in range(_MAX_RUNS):
        for option in options:
            _wait(x.device)
            start = clock()
            orthogonalize(x, coefficients, method=option.method, dtype=option.dtype, kernel=option.kernel)
            _wait(x.device)
            seconds[str(option)].append(clock() - start)
        if number >= _MIN_RUNS and all(sum(row) > _MIN_SECONDS for row in seconds.values()):
            break
    return {name: min(row[1:]) for name, row in seconds.items()}  # the first run warms up


def _wait(device: torch.device) -> None:
    """Wait for the work given to a device: every accelerator takes orders faster than it carries them out."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
