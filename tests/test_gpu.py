"""Claims about a real accelerator; `make gpu` measures what they claim and more. Skipped where there is none, and
then the same functions run on the stand-in of `cuda_shape.py` and on CPU ranks, so that they are known to run."""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from cuda_shape import CUDA, CudaShape, Refused
from healthy_steps import DTYPES, healthy
from planted import FAULTS, PRODUCTS, caught_all, check_caught

from shardmuon import Orthogonalizer
from shardmuon.orthogonalize import batch_size
from shardmuon.testing import RankPool, get_pool
from shardmuon.testing.accelerator import (
    CONFIGS,
    bytes_above,
    graph_differs,
    kernel_errors,
    kernels_of,
    make_model,
    make_optimizer,
    step_on_layout,
    step_without_a_wait,
    waits_are_errors,
)
from shardmuon.testing.layouts import LAYOUTS
from shardmuon.testing.tolerances import roundoff
from shardmuon.variants import VARIANTS

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
on_gpu = pytest.mark.skipif(NUM_GPUS == 0, reason="needs a CUDA device, and there is none")
on_gpus = pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs two CUDA devices for NCCL, and there are {NUM_GPUS}")


# ------------------------------------------------------------------------------------------------------ on a device


@on_gpu
@pytest.mark.parametrize("config", CONFIGS)
def test_a_steady_step_does_not_wait(config: str) -> None:
    step_without_a_wait(torch.device("cuda"), **CONFIGS[config])


@on_gpu
@pytest.mark.parametrize("config", ["standard", "gram"])
def test_a_whole_step_is_captured_and_replayed_with_its_bits(config: str) -> None:
    assert graph_differs(torch.device("cuda"), **CONFIGS[config]) == []


@on_gpu
def test_tritons_products_are_as_near_as_torchs() -> None:
    found = kernel_errors(torch.device("cuda"), [(128, 512), (384, 384), (1000, 1500)])
    if isinstance(found, str):
        pytest.skip(found)
    for error in found:
        dtype = getattr(torch, error.dtype)
        # sums of `inner` products in fp32 (tf32 is off), and one rounding of the result
        bound = roundoff(dtype) + error.inner * roundoff(torch.float32)
        assert error.triton <= bound, error
        assert error.torch <= bound, error


@on_gpu
@pytest.mark.parametrize("config", CONFIGS)
def test_a_step_takes_a_few_buckets_of_memory(config: str) -> None:
    device = torch.device("cuda")
    model = make_model(device, d=768, layers=12, num_vectors=50)
    optimizer = make_optimizer(model, **CONFIGS[config])
    for _ in range(3):
        optimizer.step()
    # as in test_cuda_shape.py, with 10% for the allocator's blocks and the matrix library's work space
    assert bytes_above(device, optimizer.step) <= 1.1 * (6 * 32 * 2**20 + 4 * 2**24) + 2**26


@on_gpu
@pytest.mark.parametrize(("config", "most"), [("standard", 400), ("gram", 1100)])
def test_kernels_are_about_those_that_the_stand_in_counts(config: str, most: int) -> None:
    """Some operations are two kernels (a product that adds copies its summand first), so up to half more."""
    model = make_model(torch.device("cuda"), d=768, layers=12, num_vectors=50)
    optimizer = make_optimizer(model, **CONFIGS[config])
    for _ in range(3):
        optimizer.step()
    assert kernels_of(optimizer.step) <= most


@pytest.fixture(scope="module")
def nccl() -> Iterator[RankPool]:
    with RankPool(NUM_GPUS, backend="nccl", timeout=120.0) as pool:
        yield pool


@on_gpus
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_on_nccl(layout: str, nccl: RankPool) -> None:
    for found in itertools.chain(*nccl.run(step_on_layout, layout, "cuda")):
        assert found.bitwise, found
        assert found.about == ""


@on_gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_on_ranks_that_share_a_device(layout: str) -> None:
    assert all(found.bitwise for found in itertools.chain(*get_pool(4).run(step_on_layout, layout, "cuda")))


@on_gpu
@pytest.mark.parametrize("variant", [*VARIANTS, "muon_eq+normuon+hyperball"])
@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "hsdp+tp", "ep+fsdp", "mcore buffers"])
def test_every_variant_on_ranks_that_share_a_device(layout: str, variant: str) -> None:
    of_ranks = get_pool(4).run(step_on_layout, layout, "cuda", 2, variant)
    assert all(found.bitwise for found in itertools.chain(*of_ranks))


@on_gpu
@pytest.mark.parametrize("products", ["fp32", "bf16", "fp16"])
def test_planted_faults_are_named_on_a_device(products: str) -> None:
    found = get_pool(2).run(caught_all, 256, PRODUCTS[products], tuple(FAULTS), "cuda")
    for name in FAULTS:
        check_caught(name, [of_rank[name] for of_rank in found])


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_sound_steps_on_a_device_give_no_finding(dtype: str) -> None:
    """benchmarks/audit_sharpness.py --device cuda takes 1,000 of them."""
    for seed in range(40):
        findings, statuses, _, drawn = healthy(dtype, seed, 64, "cuda")
        assert findings == [], drawn
        assert set(statuses) <= {"ok", "inconclusive"}, drawn


# ------------------------------------------------------------------------------------------- the same, without one


def test_a_wait_is_found() -> None:
    with CudaShape():
        x = torch.ones(3).to(CUDA)
        with pytest.raises(Refused, match="waits for the device"), waits_are_errors(CUDA):
            x.cpu()
        x.cpu()


@pytest.mark.parametrize("what", ["wait", "upload"])
def test_what_cannot_be_captured_is_refused(what: str) -> None:
    with CudaShape():
        x = torch.ones(3).to(CUDA)
        with pytest.raises(Refused, match="waits for the device"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            float(x[0]) if what == "wait" else x.copy_(torch.zeros(3))


def test_memory_is_asked_for() -> None:
    with CudaShape():
        model = make_model(CUDA)
        optimizer = make_optimizer(model, orthogonalizer=Orthogonalizer(method="standard"))
        optimizer.step()
        full = sum(p.numel() * batch_size(*p.shape, CUDA) for p in model.matrices)  # batches of a fixed size
        assert 0 < bytes_above(CUDA, optimizer.step) < 4 * full * 8


def test_kernels_say_why_they_cannot_be_compared() -> None:
    assert "Triton" in str(kernel_errors(torch.device("cpu"), [(8, 8)]))


@pytest.mark.stated
@pytest.mark.parametrize(("layout", "variant"), [("tp x dp", None), ("ep+fsdp", "muon_eq+normuon+hyperball")])
def test_layouts_are_built_and_compared_where_they_are_told(layout: str, variant: str | None, world4: Any) -> None:
    for found in itertools.chain(*world4.run(step_on_layout, layout, "cpu", 1, variant)):
        assert found.bitwise, found
        assert found.about == ""


# ------------------------------------------------------------------------------------------- the script of `make gpu`


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    small = functools.partial(make_model, d=16, layers=1)  # a batch has 64 slots
    monkeypatch.setattr("shardmuon.testing.accelerator.make_model", small)
    return importlib.import_module("gpu")


def test_the_scripts_checks_pass_on_the_stand_in(script: ModuleType) -> None:
    run = script.Run(300.0)
    with CudaShape():
        script.checks(run, CUDA)
    assert run.failed == []
    assert {name: run.data[name] for name in run.data if name.startswith(("no wait", "CUDA graph"))} == dict.fromkeys(
        [n for n in run.data if n.startswith(("no wait", "CUDA graph"))], "yes"
    )
    assert sum(name.startswith("no wait") for name in run.data) == len(CONFIGS)


def test_the_script_sees_a_wait_and_a_wrong_replay(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "CONFIGS", {name: CONFIGS[name] for name in ("standard", "gram")})
    watch = importlib.import_module("shardmuon.orthogonalize.gram").FiniteWatch
    real = watch.keep_finite
    monkeypatch.setattr(watch, "keep_finite", lambda self, out, *rest: bool(out.sum()) and real(self, out, *rest))
    monkeypatch.setattr(script, "graph_differs", lambda device, **options: [3])
    run = script.Run(300.0)
    with CudaShape():
        script.checks(run, CUDA)
    assert run.failed == ["no wait, gram", "CUDA graph, standard", "CUDA graph, gram"]
    assert "waits for the device" in run.data["no wait, gram"]
    assert run.data["CUDA graph, gram"] == "parameters [3] differ"


def test_the_script_times_every_contender_and_names_those_that_are_not_there(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "kernels_of", lambda step: 7)  # the profiler knows a real device only
    run = script.Run(300.0)
    with CudaShape():
        lines = script.timings(run, CUDA, d=16, layers=1, rounds=1)
    assert len(lines) == 2 + len(script.CONTENDERS)
    ours = [line for line in lines if line.startswith("| shardmuon") and "graphs" not in line]
    assert len(ours) == 4
    assert all("| 7 |" in line for line in ours)


def test_what_does_not_fit_into_the_time_is_left_out(script: ModuleType) -> None:
    run = script.Run(1.0)
    assert "left out" in run.do("long", lambda: 1 / 0, needs=5, check=True)
    assert run.failed == []
