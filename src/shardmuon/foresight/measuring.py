"""Measure this machine for a hardware file: what `hardware` reads, by the calls that a step makes.

Every function runs on one rank; those of exchanges run on all ranks of the default group together. Samples are given
back as (least, lower quartile, nine tenths of the way up), since other work on a machine only adds.

[Note: clocks]
    Products and passes on one CPU thread are timed by the thread's own clock, which stops while others run on its core.
    What ranks do together, and all on accelerators, is timed by the wall's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from shardmuon.momentum.stores import PlainMomentum
from shardmuon.muon import Muon
from shardmuon.options import Orthogonalizer
from shardmuon.orthogonalize import orthogonalize
from shardmuon.orthogonalize.choice import Choice, work
from shardmuon.orthogonalize.schedules import Triples
from shardmuon.planning.layout import Box, Holder, ParamLayout
from shardmuon.planning.plan import make_plan
from shardmuon.planning.types import ParamSpec, Policy, Recipe
from shardmuon.planning.views import matrix_view
from shardmuon.ranks.exchange import Traffic, agree_max
from shardmuon.stepping.program import Program
from shardmuon.stepping.run import make_run
from shardmuon.stepping.settings import Settings
from shardmuon.stepping.work import Kernel, ParamWork

_TAIL = 0.9
_SHORT = 2e-4  # seconds that a clock tells well: some count in steps of 10 us and more
_ELEMENTS = 1 << 22  # of a pass that is timed: more than caches hold, as a step's parameters are


class Sample(NamedTuple):
    """Seconds: the least, the lower quartile, and what one in ten exceeds."""

    lo: float
    mid: float
    hi: float

    def per(self, count: float) -> Sample:
        """Of one of so many."""
        return Sample(*(value / count for value in self))


def sample(seconds: Sequence[float]) -> Sample:
    """What was measured, in three numbers."""
    ordered = sorted(seconds)
    return Sample(ordered[0], ordered[len(ordered) // 4], ordered[min(len(ordered) - 1, int(_TAIL * len(ordered)))])


def timed(run: Callable[[], object], device: torch.device, *, budget: float, wall: bool = False) -> Sample:
    """Time a call again and again for so many seconds, at least 5 times after one that is not counted.

    Calls too short for a clock are timed several at once.
    """
    alone = device.type == "cpu" and torch.get_num_threads() == 1 and not wall
    clock = time.thread_time if alone else time.perf_counter
    found: list[float] = []
    began, calls = time.perf_counter(), 1
    while len(found) < 6 or time.perf_counter() - began < budget:
        _finish(device)
        start = clock()
        for _ in range(calls):
            run()
        _finish(device)
        seconds = clock() - start
        if seconds < _SHORT:
            calls, found = 4 * calls, []
            continue
        found.append(seconds / calls)
    return sample(found[1:])


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def products(
    how: str, m: int, n: int, coefficients: Triples, device: torch.device, budget: float
) -> tuple[int, Sample]:
    """(FLOPs as the planner counts them, seconds) of orthogonalizing one m x n matrix as this choice does."""
    choice = Choice.of(how)
    x = torch.randn(1, m, n, generator=torch.Generator().manual_seed(0)).to(device)
    run = partial(orthogonalize, x, coefficients, method=choice.method, dtype=choice.dtype, kernel=choice.kernel)
    return work(choice, m, n, coefficients, device), timed(run, device, budget=budget)


def bare_products(m: int, dtype: torch.dtype, device: torch.device, budget: float) -> tuple[int, Sample]:
    """(FLOPs, seconds) of a product of two m x m matrices: what the Gram route iterates on its owners in fp64."""
    x = torch.randn(m, m, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    return 2 * m**3, timed(lambda: torch.mm(x, x), device, budget=budget)


def passes(fragment: int, device: torch.device, budget: float) -> tuple[Sample, Sample]:
    """Seconds of packing and of applying one element, in matrices of so many: the library's own bucket on one rank."""
    rows = max(1, min(fragment, 1 << (int(math.log2(fragment)) // 2)))
    count = max(1, _ELEMENTS // fragment) if fragment >= 1 << 12 else (1 << 10)
    program, work_of = _bucket(rows, fragment // rows, count, device)
    kernel = Kernel(torch.float32)
    pack: list[float] = []
    apply: list[float] = []
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.thread_time if alone else time.perf_counter
    began = time.perf_counter()
    nothing = torch.empty(0, device=device)
    while len(pack) < 6 or time.perf_counter() - began < budget:
        run = make_run(program, work_of, kernel, device)
        _finish(device)
        a = clock()
        run.pack()
        _finish(device)
        b = clock()
        run.apply(nothing)
        _finish(device)
        pack.append(b - a)
        apply.append(clock() - b)
    elements = rows * (fragment // rows) * count
    return sample(pack[1:]).per(elements), sample(apply[1:]).per(elements)


def _bucket(rows: int, cols: int, count: int, device: torch.device) -> tuple[Program, dict[int, ParamWork]]:
    """One bucket of so many matrices that this rank holds whole, and their storages."""
    box = Box((0, 0), (rows, cols))
    layout = ParamLayout(matrix_view((rows, cols)), (0,), (Holder(0, box, (0, 0)),))
    recipe = Recipe("standard float32", 1)
    specs = [ParamSpec(f"matrix{i}", layout, (recipe,), kind=device.type) for i in range(count)]
    plan = make_plan(specs, Policy(bucket_bytes=1 << 40))
    settings = Settings(0.02, 0.1, 0.95, True, ((3.4445, -4.7750, 2.0315),) * 5, 1e-7, None, 1.0, "decoupled")
    storages = {
        i: ParamWork(
            torch.randn(rows, cols, device=device),
            torch.randn(rows, cols, device=device),
            PlainMomentum(torch.zeros(rows, cols, device=device)),
            settings,
        )
        for i in range(count)
    }
    return Program(plan, plan.rank_bucket(plan.buckets[0], 0), 0), storages


def adamw(fragment: int, device: torch.device, budget: float) -> Sample:
    """Seconds of one element of AdamW, in parameters of so many."""
    count = max(1, _ELEMENTS // fragment) if fragment >= 1 << 12 else (1 << 10)
    params = [torch.nn.Parameter(torch.randn(fragment, device=device)) for _ in range(count)]
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer = torch.optim.AdamW(params, fused=True)
    return timed(optimizer.step, device, budget=budget).per(fragment * count)


def copies(device: torch.device, budget: float) -> Sample:
    """Seconds of reading and writing one byte, in large copies."""
    source = torch.randn(_ELEMENTS * 4, device=device)
    target = torch.empty_like(source)
    return timed(lambda: target.copy_(source), device, budget=budget).per(2 * source.numel() * 4)


def whole_steps(counts: Sequence[int], device: torch.device, budget: float) -> list[Sample]:
    """Seconds of a step of `Muon` on so many matrices of 8 x 16 each: what is not arithmetic."""
    found = []
    for count in counts:
        params = [torch.nn.Parameter(torch.randn(8, 16, device=device)) for _ in range(count)]
        for p in params:
            p.grad = torch.randn_like(p)
        found.append(timed(Muon(params, lr=0.02).step, device, budget=budget))
    return found


# ---------------------------------------------------------------------------------------- all ranks of a group together


def exchanges(sizes: Sequence[int], device: torch.device, rounds: int) -> list[Sample]:
    """Seconds of an all-to-all in which each rank sends so many bytes to the others; of the slowest rank."""
    ranks = dist.get_world_size()
    found = []
    for size in sizes:
        each = max(1, size // max(1, ranks - 1) // 4)
        send = torch.zeros(each * ranks, device=device)
        recv = torch.empty_like(send)
        found.append(_together(partial(_exchange, recv, send), device, rounds))
    return found


def _exchange(recv: torch.Tensor, send: torch.Tensor) -> None:
    work = dist.all_to_all_single(recv, send, async_op=True)
    assert work is not None, "an asynchronous call returns its work"
    work.wait()


def agreements(device: torch.device, rounds: int) -> Sample:
    """Seconds of the all-reduce before each step, of the slowest rank."""
    flags = torch.zeros(64, dtype=torch.uint8)
    ranks = tuple(range(dist.get_world_size()))
    return _together(lambda: agree_max(flags, ranks, device, Traffic()), device, rounds)


def at_once(short: int, count: int, device: torch.device, rounds: int) -> Sample:
    """Seconds of a step of `Muon` on matrices of this rank alone, while every rank takes one; of the slowest rank."""
    shapes = [shape for _ in range(count) for shape in ((3 * short, short), (short, short), (short, 4 * short))]
    params = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer = Muon(params, lr=0.02, orthogonalizer=Orthogonalizer("standard"))
    return _together(optimizer.step, device, rounds)


def overlap(
    how: str, m: int, n: int, coefficients: Triples, size: int, device: torch.device, rounds: int
) -> list[float]:
    """Share of an exchange that goes on while a matrix is orthogonalized, one value for each round."""
    choice = Choice.of(how)
    x = torch.randn(1, m, n).to(device)
    run = partial(orthogonalize, x, coefficients, method=choice.method, dtype=choice.dtype, kernel=choice.kernel)
    ranks = dist.get_world_size()
    send = torch.zeros(max(1, size // max(1, ranks - 1) // 4) * ranks, device=device)
    recv = torch.empty_like(send)

    def both() -> None:
        work = dist.all_to_all_single(recv, send, async_op=True)
        run()
        assert work is not None, "an asynchronous call returns its work"
        work.wait()

    found = []
    for _ in range(rounds):
        moved = _together(partial(_exchange, recv, send), device, 3).lo
        multiplied = _together(run, device, 3).lo
        together = _together(both, device, 3).lo
        found.append(min(1.0, max(0.0, (moved + multiplied - together) / min(moved, multiplied))))
    return found


def _together(run: Callable[[], object], device: torch.device, rounds: int) -> Sample:
    """Wall seconds of a call that all ranks make at once, of the slowest rank in each round."""
    found = []
    for _ in range(rounds + 1):
        dist.barrier()
        start = time.perf_counter()
        run()
        _finish(device)
        seconds = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        seconds = seconds if device.type == "cpu" else seconds.to(device)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        found.append(float(seconds))
    return sample(found[1:])
