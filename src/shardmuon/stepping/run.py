"""The loop of a step over its buckets: while one is orthogonalized, the next one travels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from shardmuon.comm.exchange import Pending, Traffic
from shardmuon.errors import HALF_DONE, naming
from shardmuon.ranks.exchange import start_exchange
from shardmuon.stepping.buckets import BucketRun
from shardmuon.stepping.gram_buckets import GramRun
from shardmuon.stepping.program import Program
from shardmuon.stepping.work import Kernel, ParamWork


def make_run(
    program: Program, work: Mapping[int, ParamWork], kernel: Kernel, device: torch.device
) -> BucketRun | GramRun:
    """What carries this bucket out."""
    kind = GramRun if program.rank_bucket.bucket.route == "gram" else BucketRun
    return kind(program, work, kernel, device)


def run_buckets(
    programs: Sequence[Program],
    work: Mapping[int, ParamWork],
    kernel: Kernel,
    devices: Sequence[torch.device],  # one per program
    traffic: Traffic,
) -> None:
    """Run all buckets of a step. While bucket i is orthogonalized, i+1 is being gathered and i-1 scattered."""
    nothing = torch.empty(0, dtype=kernel.wire_dtype, device="cpu")
    runs = [make_run(p, work, kernel, d) for p, d in zip(programs, devices, strict=True)]
    gathers: dict[int, Pending] = {}
    scatters: dict[int, Pending] = {}

    exchanges = any(run.moves for run in runs)

    def at(i: int, phase: str) -> AbstractContextManager[None]:
        # Alone, an exception passes as it is: nobody else is left behind.
        return naming(lambda: f"{programs[i]}, {phase}", HALF_DONE) if exchanges else nullcontext()

    def begin(i: int) -> None:
        with at(i, "pack"):
            send = runs[i].pack()
        gather = programs[i].rank_bucket.gather
        if gather is not None:
            with at(i, "gather"):
                gathers[i] = start_exchange(send, gather, programs[i].rank_bucket.bucket.ranks, traffic)
            traffic.reductions += programs[i].rank_bucket.bucket.route == "gram"

    def received(pending: dict[int, Pending], i: int, phase: str) -> Tensor:  # no name may hold it: its reader frees it
        with at(i, phase):
            return pending.pop(i).wait() if i in pending else nothing

    def compute(i: int) -> None:
        with at(i, "orthogonalize"):
            send = runs[i].orthogonalize(received(gathers, i, "gather"))
        traffic.orthogonalized += runs[i].num_orthogonalized
        scatter = programs[i].rank_bucket.scatter
        if scatter is not None:
            with at(i, "scatter"):
                scatters[i] = start_exchange(send, scatter, programs[i].rank_bucket.bucket.ranks, traffic)

    def finish(i: int) -> None:
        with at(i, "apply"):
            runs[i].apply(received(scatters, i, "scatter"))
        runs[i] = None  # type: ignore[call-overload]  # frees its buffers

    for i in range(len(runs) + 1):
        if i == 0 and runs:
            begin(0)
        if i + 1 < len(runs):
            begin(i + 1)
        if i < len(runs):
            compute(i)
        if i > 0:
            finish(i - 1)
