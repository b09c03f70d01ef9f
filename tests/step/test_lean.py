"""Tests of the overhead of a step, measured in kernel launches and Python calls, which do not depend on the load of the
machine."""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda_shape import CudaShape
from jobs import Cut, Job, Spec, as_in
from on_ranks import on_ranks
from simulated import kinds_of, planned, sharded, stored
from torch import Tensor, nn

from shardmuon import Muon
from shardmuon.comm.groups import Pending
from shardmuon.layout.views import matrix_view
from shardmuon.options import MuonConfig, Settings
from shardmuon.plan.plan import Policy
from shardmuon.plan.program import Program
from shardmuon.step.bucket import Bound
from shardmuon.step.update import Work


def _optimizer(shapes: list[tuple[int, ...]], method: Any = "standard", cut: Cut = torch.clone, **options: Any) -> Muon:
    """Return an optimizer that has made its plan and taken two steps."""
    specs = [Spec(f"w{i}", shape, cut) for i, shape in enumerate(shapes)]
    groups = [{"params": [s for s in specs if len(s.shape) == n], "use_muon": n == 2} for n in (2, 1)]
    job = Job([group for group in groups if group["params"]], method=method, ns_dtype=torch.float32, **options)
    job.step(0)
    job.step()
    return job.optimizer


@pytest.mark.parametrize("method", ["standard", "gram"])
def test_launches_grow_with_shapes_not_with_matrices(method: str) -> None:
    def count(copies: int) -> int:
        with CudaShape() as mode:
            optimizer = _optimizer(
                [(24, 8), (8, 8), (32, 8), (8, 32), (16,)] * copies, method, lambda t: t.to("cuda:0")
            )
            mode.clear()
            optimizer.step()
        return mode.launches.total()

    assert count(3) == count(12) <= 200


def _calls(step: Callable[[], Any]) -> int:
    """Return the number of Python and C function calls made by `step`."""
    calls = 0

    def watch(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    gc.collect()
    # Disable garbage collection, so that finalizers of objects from other tests are not counted.
    gc.disable()
    sys.setprofile(watch)
    try:
        step()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


def test_python_per_matrix_and_vector_is_bounded_and_linear() -> None:
    def count(number: int, vectors: int = 0, size: int = 16, **options: Any) -> int:
        return _calls(_optimizer([(8, 16)] * number + [(size,)] * vectors, **options).step)

    first, second, third = (count(number) for number in (64, 192, 320))
    # Each matrix may add at most 28 function calls to a step. The expected number is about 24: 16 for overhead, and 8
    # for matmuls (500 calls for each batch of 64 matrices).
    assert (second - first) / 128 <= 28
    assert abs((third - second) - (second - first)) <= 128 * 2
    assert (count(64, 192) - count(64, 64)) / 128 <= 42
    # 8 elements do not fill a 64-byte vector of torch's AdamW kernel, so the optimizer first copies these tensors into
    # one padded buffer, which takes extra calls.
    assert (count(64, 192, size=8) - count(64, 64, size=8)) / 128 <= 55
    wide: Any = {"cut": Tensor.bfloat16, "momentum_dtype": torch.float32}
    assert (count(192, **wide) - count(64, **wide)) / 128 <= 32


@on_ranks(2)
def test_python_per_dtensor_is_bounded() -> None:
    few, many = (_calls(_optimizer([(8, 16)] * number, cut=as_in("fsdp2")).step) for number in (50, 150))
    assert (many - few) / 100 <= 38


@pytest.mark.parametrize(("replicas", "shards", "passed"), [(1, 64, 0), (1, 1024, 0), (2, 32, 16), (16, 64, 30)])
def test_an_owner_makes_no_more_calls_on_1024_ranks_than_on_64(replicas: int, shards: int, passed: int) -> None:
    """The number of function calls in a step must stay within the same limit for any number of shards per matrix.

    The test counts the calls of the busiest rank, which orthogonalizes one or two of 72 matrices. With replicas, the
    limit is higher, because the rank also passes copies of results on to other replicas. `passed` is the expected
    number of these copies, after adjacent copies are merged.
    """
    grid = [range(r * shards, (r + 1) * shards) for r in range(replicas)]
    views = [matrix_view(shape) for shape in ((1024, 8), (2048, 4), (1024, 16), (1030, 8))]
    layouts = [sharded(view, grid, 0) for view in views] * 18
    group = Muon([nn.Parameter(torch.empty(2, 2))], lr=0.02).param_groups[0]
    plan = planned(layouts, [group] * 72, MuonConfig("standard", torch.float32), Policy())
    loads = plan.loads()
    rank = max(loads, key=lambda rank: loads[rank])
    parts = [stored(lay.held[rank], torch.zeros(lay.view.shape)) for lay in layouts]
    work = Work(parts, parts, [p.clone() for p in parts], [Settings.of(group)] * 72, [[] for _ in parts], {})
    work.kinds = kinds_of(work)
    (bucket,) = plan.buckets
    program = Program.of(plan, bucket, rank)
    assert sum(len(batch.items) for batch in program.batches) <= 2
    assert len(program.relay.passed if program.relay is not None else ()) == passed
    bound = Bound(plan, program, [tuple(p.shape) for p in parts])

    def exchange(send: Tensor, sent: Sequence[int], came: Sequence[int]) -> Pending:
        return Pending(SimpleNamespace(wait=lambda: None), torch.zeros(sum(came)), send)

    def step() -> None:
        deque(bound.run(work, None, exchange))

    step()
    others = replicas - 1
    assert _calls(step) <= 640 + 40 * min(1, others) + 12 * others


def test_swapped_storage_momentum_and_dtypes_are_followed() -> None:
    """Each step must use the current storages of weights, gradients and momentum, even if they have been replaced since
    the previous step."""
    optimizer = _optimizer([(8, 16)] * 3)
    p, plan = optimizer.param_groups[0]["params"][1], optimizer.plan
    for shape, dtype in (((8, 16), torch.float32), ((8, 16), torch.bfloat16), ((4, 16), torch.bfloat16)):
        given, buffer = torch.full(shape, 0.03, dtype=dtype), torch.ones(shape, dtype=dtype)
        p.grad = None
        p.data, p.grad_dtype = given.clone(), None
        p.grad, optimizer.state[p]["momentum_buffer"] = 2 * given, buffer
        kept = p.data_ptr()
        optimizer.step()
        assert not torch.equal(p, given) and p.data_ptr() == kept
        assert optimizer.state[p]["momentum_buffer"] is buffer and not torch.equal(buffer, torch.ones_like(buffer))
    assert optimizer.plan is not plan, "another shape has another plan"
    last = optimizer.param_groups[0]["params"][2]
    last.grad = last.requires_grad_(False).grad = None
    optimizer.step()
    assert optimizer.plan is not None and len(optimizer.plan.specs) == 2, "nor is what was frozen planned on"
