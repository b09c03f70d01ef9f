"""Tests of steps on the simulated CUDA device of `cuda_shape.py`: values, kernel launches, host synchronizations and
memory.

The table FAULTS lists bugs that are planted in the code, each of which the simulated device must detect.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cuda_shape import CUDA, CudaShape, OnDevice, Refused, launches_of
from jobs import Cut, Job, Spec, rows_on
from live_bytes import LiveBytes
from on_device import waits_are_errors
from tolerances import assert_bitwise, assert_rounded, assert_same_update
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, init_device_mesh
from variant_cases import CASES

from shardmuon import ExchangeError, Muon, audit
from shardmuon._torch import foreach, local_if_any
from shardmuon.comm.groups import Traffic
from shardmuon.foresight.job import Exact
from shardmuon.orthogonalize import ITERATIONS
from shardmuon.plan.plan import Plan
from shardmuon.testing import RankPool
from shardmuon.variants import KEPT_KEYS

FP32, BF16 = torch.float32, torch.bfloat16
SHAPES = [(24, 8), (10, 16), (8, 8), (16, 40), (24, 8), (3, 16, 8), (5,), (8,), (3,)]
MATRICES = [i for i, shape in enumerate(SHAPES) if len(shape) == 2]
STANDARD: dict[str, Any] = {"method": "standard", "ns_dtype": FP32}
GRAM: dict[str, Any] = {"method": "gram", "ns_dtype": FP32}


def _there(tensor: Tensor) -> Tensor:
    return tensor.to(CUDA)


def _values(tensor: Tensor) -> Tensor:
    local = local_if_any(tensor)
    return (local.inner if isinstance(local, OnDevice) else local).detach().clone()


def _made(
    cut: Cut = _there, which: Sequence[int] = range(len(SHAPES)), dtype: torch.dtype = FP32, **options: Any
) -> Job:
    """Return a job whose parameters have the shapes SHAPES[i] for all i in `which`. The function `cut` shards or moves
    each full parameter. By default, it moves the parameter to the simulated device."""
    specs = [Spec(f"{i}", SHAPES[i], cut, dtype=dtype) for i in which]
    kinds: dict[int, dict[str, Any]] = {2: {}, 3: {"view": "stack"}, 1: {"use_muon": False}}
    groups = [{"params": [spec for spec in specs if len(spec.shape) == n], **kind} for n, kind in kinds.items()]
    return Job([group for group in groups if group["params"]], **{"lr": 0.05, **options})


def _found(job: Job) -> dict[str, Tensor]:
    """Return a dict of a job's weights and of the state that post-processing stages (such as NorMuon) keep for them."""
    kept = [(spec.name, {"weight": p, **job.state.get(p, {})}) for p, spec in job.specs.items()]
    return {f"{name} {key}": _values(of[key]) for name, of in kept for key in ("weight", *KEPT_KEYS) if key in of}


# ------------------------------------------------------------------------------------------------------- values

TOGETHER = ("muon_eq+normuon", "hyperball+normuon", "normuon+hyperball")
OF_VARIANTS = [{**STANDARD, "weight_decay": 0.0, "variant": variant} for variant in TOGETHER]


@pytest.mark.stated
@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        (STANDARD, FP32),
        *(({**how, "momentum_dtype": stored}, BF16) for how in (STANDARD, GRAM) for stored in (None, FP32)),
        *((options, FP32) for options in OF_VARIANTS),
    ],
    ids=str,
)
def test_one_process_has_the_cpus_values(options: dict[str, Any], dtype: torch.dtype) -> None:
    """A step on the simulated device must give the same values as on the CPU, up to rounding. The shapes cover batches
    of one and of several matrices, and matrices whose rows are separated by gaps in memory."""
    here = _made(torch.clone, dtype=dtype, **options)
    before = _found(here)
    here.step(1)
    with CudaShape():
        there = _made(dtype=dtype, **options)
        there.step(1)
    found, expected = _found(there), _found(here)
    assert list(found) == list(expected)
    for name, one in found.items():
        if name not in before:
            # State that the step has created is rounded in fifteen matmuls that sum at most 40 terms, and in a sum of
            # at most 40 x 16 squares.
            assert_rounded(one, expected[name], roundings=15 * 40 + 40 * 16, dtype=FP32)
        elif one.ndim == 1:
            # AdamW rounds ten times on each of the two devices. The scale includes the change, which is about lr.
            assert_rounded(one, expected[name], roundings=20, scale=before[name].abs() + 2 * 0.05)
        else:
            for a, b, c in zip(*(t.view(-1, *t.shape[-2:]) for t in (one, expected[name], before[name])), strict=True):
                grown = max(1.0, float(c.norm())) if "hyperball" in options.get("variant", "") else 1.0
                scale, decay = grown * max(1.0, a.shape[0] / a.shape[1]) ** 0.5, options.get("weight_decay", 0.1)
                assert_same_update(a, b, before=c, lr=0.05, weight_decay=decay, scale=scale, dtype=FP32)


@pytest.mark.parametrize("options", OF_VARIANTS, ids=str)
def test_one_by_one_a_matrix_has_its_own_bits_among_others(options: dict[str, Any]) -> None:
    with CudaShape():
        jobs = [_made(which=which, **options) for which in (MATRICES, *([i] for i in MATRICES))]
        for job in jobs:
            job.step(1)
            job.step(2)
    alone = {name: t for job in jobs[1:] for name, t in _found(job).items()}
    assert_bitwise(_found(jobs[0]), alone)


def test_a_tensor_lr_on_the_device_follows_what_is_written_into_it_and_an_audit_reads_it() -> None:
    with CudaShape():
        numbers, written = _made(**STANDARD), _made(**STANDARD, lr=_there(torch.tensor(0.05)))
        for step, lr in enumerate((0.05, 0.02), 1):
            for group, other in zip(numbers.groups, written.groups, strict=True):
                group["lr"] = lr
                other["lr"].fill_(lr)
            check = audit(written.optimizer)
            numbers.step(step)
            written.step(step)
            assert not check.report.findings, check
    expected = _found(numbers)
    for name, one in _found(written).items():
        # An lr given as a tensor is rounded to fp32, so the weights may differ by a few roundings after two steps.
        assert_rounded(one, expected[name], roundings=2 * 12, scale=expected[name].abs() + 2 * 0.1)


def test_control_of_norms_waits_for_nothing_and_says_zeros_all_the_same() -> None:
    with CudaShape() as mode, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        job = _made(**STANDARD, weight_decay=0.0, variant="normuon+hyperball")
        job.first.detach().zero_()
        for number in (1, 2, 3):
            job.set_gradients(number)
            mode.clear()
            job.step()
            assert not mode.waits
    texts = [str(w.message) for w in said if "zero before the first step" in str(w.message)]
    assert [text.startswith("0: zero") for text in texts] == [True]


def test_a_result_that_is_not_finite_is_left_out_on_the_device_and_reported_by_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sound = ITERATIONS["gram"]

    def spoiled(y: Tensor, **named: Any) -> Tensor:
        out = sound(y, **named)
        out[1, 2].fill_(float("inf"))
        return out

    monkeypatch.setitem(ITERATIONS, "gram", spoiled)
    with CudaShape() as mode, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        job = Job([{"params": [Spec(f"w{i}", (8, 24), _there) for i in range(3)]}], lr=0.05, method="gram")
        decayed = [_values(p) * (1 - 0.05 * 0.1) for p in job.specs]
        job.step(1)
        after = [_values(p) for p in job.specs]
        assert not told
        mode.clear()
        job.step()
        assert not mode.waits
    assert [torch.equal(a, b) for a, b in zip(after, decayed, strict=True)] == [False, True, False]
    assert [str(w.message) for w in told] == [
        "method='gram' on 8x24 gave a non-finite result for 1 of 3 finite matrices in an earlier step; they took no "
        "update in it"
    ]


# --------------------------------------------------------------------------------------------- real ranks as NCCL's


def _on_ranks(options: dict[str, Any], placement: Placement) -> tuple[dict[str, Tensor], list[str], list[str]]:
    """Take two steps on the simulated device. Return this rank's shards, a list of the host synchronizations in the
    second step, and a list of the copies to the device in that step."""
    with CudaShape() as mode:
        mesh = init_device_mesh("cuda", (dist.get_world_size(),))
        job = _made(lambda full: rows_on(mesh, placement)(_there(full)), **options)
        job.step(1)
        job.set_gradients(2)
        mode.clear()
        job.step()
        return _found(job), mode.waits, mode.uploads


@pytest.mark.stated
@pytest.mark.parametrize(
    ("options", "placement"), [(STANDARD, Shard(0)), (GRAM, Shard(-1)), (STANDARD, Replicate())], ids=str
)
def test_ranks_that_pose_as_nccls_wait_for_no_device_and_have_the_bits_of_one(
    options: dict[str, Any], placement: Placement, world4: RankPool
) -> None:
    found = world4.run(_on_ranks, options, placement)
    assert [(waits, uploads) for _, waits, uploads in found] == [([], [])] * 4
    with CudaShape():
        alone = _made(**options)
        alone.step(1)
        alone.step(2)
    for name, whole in _found(alone).items():
        pieces = [values[name] for values, *_ in found]
        if isinstance(placement, Shard):
            assert_bitwise(torch.cat(pieces, placement.dim), whole, name)
        else:
            assert_bitwise(pieces, [whole] * 4, name)


# --------------------------------------------------------------------------------------------------------- budgets


@cache
def _count(ranks: int, layers: int = 12, **options: Any) -> tuple[CudaShape, int, Plan]:
    """Take one steady-state step on the simulated device, as one of `ranks` ranks. Return the simulated device with its
    record of the step, the peak of the step's temporary memory in bytes, and the step's plan."""
    d = 768
    shapes: list[tuple[int, ...]] = [(3 * d, d), (d, d), (4 * d, d), (d, 4 * d)] * layers
    with CudaShape(ranks=ranks, values=False) as mode:
        mesh = init_device_mesh("cuda", (ranks,)) if ranks > 1 else None

        def one(shape: tuple[int, ...]) -> Tensor:
            local = torch.empty(shape[0] // ranks, *shape[1:], device=CUDA)
            return local if mesh is None else DTensor.from_local(local, mesh, [Shard(0)], run_check=False)

        params = [nn.Parameter(one(shape)) for shape in [*shapes, *[(d,)] * 50]]
        for p in params:
            p.grad = torch.empty_like(p)
        groups = [{"params": params[: len(shapes)]}, {"params": params[len(shapes) :], "use_muon": False}]
        optimizer = Muon(groups, lr=1e-3, **options)
        for _ in range(2):
            optimizer.step()
        mode.clear()
        with LiveBytes() as live:
            optimizer.step()
    assert optimizer.plan is not None
    return mode, live.peak, optimizer.plan


# Upper limits on the kernel launches of a steady-state step, keyed by method and number of ranks, for 48 matrices and
# 50 vectors at d = 768.
# - With the method "standard", a batch takes 15 matmuls, 6 launches to normalize (5 for a single matrix), 1 to pad the
#   batch if it is not full, and 1 to write its result.
# - With the method "gram", a batch takes about 47 launches. Half of them are for fp16 matmuls with an fp32 operand,
#   which is split into two fp16 matrices.
# - Batches are padded to the size of 4 matrices. A single rank has 16 batches. The first of 8 ranks has 4 or 5, each
#   with one or two matrices.
# - Where torch cannot write an fp16 matmul into a given buffer, the result is copied there.
# - A bucket with an exchange updates momentum twice: for the matrices to send, and then for those that stay. It also
#   launches one copy for each shape received and one for the matrices to send.
BUDGETS = {
    ("standard", 8): 76,
    ("standard", 1): 399,
    ("gram", 8): 182,
    ("gram", 1): 791,
    ("auto", 8): 168,  # "auto" picks the Gram form if it takes less than 3/4 of the FLOPs of "standard"
    ("auto", 1): 747,
}


@pytest.mark.parametrize(("method", "ranks"), BUDGETS)
def test_a_steady_step_waits_for_nothing_and_takes_the_launches_and_memory_that_it_must(
    method: Any, ranks: int
) -> None:
    """In a steady-state step, the host must neither wait for the device nor copy data to it. Kernel launches and memory
    must stay within limits.

    The memory limit is the size of five buffers (six with the Gram form) and of one fp32 temporary with at most 2^24
    elements. A buffer takes 32 MiB, the largest size of one rank's matrices in a bucket. Two buffers are for exchanges,
    and the others for Newton-Schulz.
    """
    found, above, plan = _count(ranks, method=method)
    assert found.waits == found.uploads == []
    assert found.launches.total() <= BUDGETS[method, ranks], found.launches
    n = len(plan.buckets)
    assert found.launches["vote"] == found.launches["validate"] == 0
    assert found.launches["update_momentum"] == 3 * n * min(ranks, 2), "momentum, Nesterov's sum, the copy"
    assert found.launches["start"] == (2 * n if ranks > 1 else 0)
    # For each bucket, `apply_results` launches one kernel for the weight decay, one for each distinct learning-rate
    # scale (at most three), and one to cast bf16 results to fp32.
    assert found.launches["apply_results"] <= n * (1 + 3 + 1)
    assert found.launches["step_adamw"] <= 11
    bucket, portion = 32 * 2**20, 4 * 2**24
    assert above <= 2 * bucket + (3 if method == "standard" else 4) * bucket + portion
    assert above <= max(c.peak for c in Exact.of_plan(plan).classes), "what `shardmuon plan` says"


# Upper limits on the launches that a variant adds to a steady-state step of one rank. The first limit applies to 4
# matrices of 4 shapes, and the second to 16 matrices of the same shapes. The elements of each matrix are summed in a
# separate launch, so that the result for a matrix does not depend on other matrices. All other operations process whole
# batches or lists.
ADDED = {name: case.launches for name, case in CASES.items()} | {"muon_eq+normuon": (88, 136)}


@pytest.mark.parametrize("variant", ADDED)
def test_a_variant_adds_few_launches(variant: str) -> None:
    options: dict[str, Any] = {"weight_decay": 0.0, "method": "standard"}
    for layers, most in zip((1, 4), ADDED[variant], strict=True):
        plain, other = (_count(1, layers, variant=v, **options)[0] for v in (None, variant))
        assert other.waits == other.uploads == []
        assert other.launches.total() - plain.launches.total() <= most


def test_a_column_cut_costs_launches_only_for_what_is_cut() -> None:
    """If some of the weights are column shards, which are not contiguous in memory, one foreach call must still update
    all contiguous weights at once. Only the column shards may take additional launches."""
    with CudaShape(values=False) as mode:
        cut = torch.empty(16, 64, device=CUDA)[:, :32]
        params = [nn.Parameter(t) for t in (cut, *torch.empty(20, 16, 32, device=CUDA))]
        for p in params:
            p.grad = torch.empty(16, 32, device=CUDA)
        optimizer = Muon(params, lr=1e-3, method="standard")
        for _ in range(2):
            mode.clear()
            optimizer.step()
    assert mode.launches["apply_results"] <= 3 + 3 + 2


def test_lists_are_cut_into_as_few_launches_as_their_tensors_allow() -> None:
    draw = random.Random(0)

    def tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if len(shape) > 1 and draw.random() < 0.1:
            return torch.empty(*shape[:-2], shape[-1], shape[-2], dtype=dtype, device="meta").mT
        return torch.empty(shape, dtype=dtype, device="meta")

    for _ in range(300):
        shapes = draw.choices([*[(3, 4), (4, 3), (5,), (2, 3, 4)] * 3, (1, 5), (5, 1), (1,)], k=draw.randint(1, 4))
        columns = [
            [tensor(shape, draw.choice([FP32] * 9 + [BF16])) for shape in shapes] for _ in range(draw.randint(1, 3))
        ]
        operation, rows = mock.Mock(return_value=None), list(zip(*columns, strict=True))
        with mock.patch.object(torch, "_foreach_copy_", operation):
            foreach("copy_", *columns)
        calls = [call.args for call in operation.call_args_list]
        called = [tuple(map(id, row)) for call in calls for row in zip(*call, strict=True)]
        assert sorted(called) == sorted(tuple(map(id, row)) for row in rows)
        fast = [tuple(t.dtype for t in row) for row in rows if len({t.stride() for t in row}) == 1]
        wanted = len(set(fast)) + len(rows) - len(fast)
        assert sum(launches_of("_foreach_copy_", call) for call in calls) == wanted


# ----------------------------------------------------------------------------------------------- the stand-in itself


def test_the_stand_in_refuses_and_records_what_it_says() -> None:
    with CudaShape() as mode:
        x = _there(torch.ones(3))
        assert len(mode.uploads) == 1
        waits: list[Callable[[], object]] = [
            lambda: float(x[0]),
            x.cpu,
            x.nonzero,
            lambda: x[x > 0],
            lambda: torch.equal(x, x),
            torch.cuda.synchronize,
            lambda: x.copy_(torch.zeros(3)),
            # A copy from the device to unpinned host memory waits for the device, even with non_blocking=True.
            lambda: torch.empty(3).copy_(x, non_blocking=True),
        ]
        for wait in waits:
            mode.clear()
            wait()
            assert len(mode.waits) == 1
            for within in (waits_are_errors(CUDA), torch.cuda.graph(torch.cuda.CUDAGraph())):
                with pytest.raises(Refused, match="waits for the device"), within:
                    wait()
        mode.clear()
        torch.empty(3, pin_memory=True).copy_(x, non_blocking=True)
        assert torch.equal((x + torch.tensor(1.0)).inner, torch.ones(3)), "a number may lie anywhere"
        assert not mode.waits
        with pytest.raises(Refused, match=r"on cuda:0 and on the CPU"):
            x + torch.ones(3)
        with pytest.raises(Refused, match="a copy of"):
            torch.linalg.vector_norm(_there(torch.ones(2, 3)), dtype=torch.float64)
    alike = [torch.empty(2, 5, device="meta") for _ in range(2)]
    turned, half = [t.mT.contiguous().mT for t in alike], [t.bfloat16() for t in alike]
    gaps = [torch.empty(2, 10, device="meta")[:, :5] for _ in range(2)]
    assert [launches_of("_foreach_add_", (alike, others)) for others in (alike, turned, half)] == [1, 2, 2]
    assert [launches_of("_foreach_copy_", (alike, others)) for others in (half, turned)] == [1, 2], "copies may convert"
    assert launches_of("_foreach_mul_", (gaps, 2.0)) == 2, "not dense"


# Each case gives the function to replace, its replacement, options, the number of ranks, and what the simulated CUDA
# device must detect: the text of an error, or the counter that exceeds its limit.
REAL_START = Traffic.start
FAULTS: dict[str, tuple[str, Any, dict[str, Any], int, str]] = {
    "norms are summed on the CPU under NCCL": (
        "shardmuon.step.stages.wire_device",
        lambda *given: torch.device("cpu"),
        {"variant": "hyperball", "weight_decay": 0.0},
        8,
        "NCCL takes no CPU tensors",
    ),
    "scratch memory on the CPU": (
        "shardmuon.step.update.apply_",
        lambda params, updates, *rest: [u + torch.ones(u.shape) for u in updates],
        {},
        1,
        "on the CPU",
    ),
    "a number is uploaded for each piece": (
        "shardmuon.step.update.apply_",
        lambda params, updates, *rest: [u * torch.tensor(1.0).to(u.device, non_blocking=True) for u in updates],
        {},
        1,
        "uploads",
    ),
    "momentum tensor by tensor": (
        "shardmuon.step.update.momentum_",
        lambda *lists, **options: [t.copy_(b.lerp_(g, 0.1)) for t, g, b in zip(*lists, strict=True)],
        {},
        8,
        "launches",
    ),
    "a send buffer with gaps": (
        "shardmuon.comm.groups.Traffic.start",
        lambda traffic, group, send, *splits: REAL_START(traffic, group, torch.stack([send, send], 1)[:, 0], *splits),
        {},
        8,
        "NCCL takes contiguous",
    ),
    "the host looks at what is finite": (
        "shardmuon.orthogonalize.FiniteWatch.keep_finite",
        lambda self, out, x, text: out if out.isfinite().all() else x,
        {"method": "gram"},
        1,
        "waits",
    ),
    "the host waits for what was finite": (
        "shardmuon._torch.Coming.send",
        lambda self, about, value: self.append((about, value.cpu(), value.device, torch.cpu.Event())),
        {"method": "gram"},
        1,
        "waits",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_stand_in_sees_a_planted_fault(fault: str) -> None:
    target, planted, options, ranks, told = FAULTS[fault]
    options = {"method": "standard", **options}
    with mock.patch(target, planted):
        if told not in ("launches", "waits", "uploads"):
            with pytest.raises((Refused, ExchangeError, ValueError), match=told):
                _count.__wrapped__(ranks, layers=1, **options)
            return
        # The launch limits are those of a 12-layer model, so use such a model to test faults that add launches.
        found, *_ = _count.__wrapped__(ranks, layers=12 if told == "launches" else 1, **options)
    assert found.launches.total() > BUDGETS["standard", 8] if told == "launches" else getattr(found, told)
