"""Tests on a real accelerator. On a machine without an accelerator, single-process tests use the simulated device in
`cuda_shape.py`, the comparison of layouts runs on CPU ranks, and all other tests are skipped."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_shape import CUDA, CudaShape
from healthy_steps import DTYPES, healthy
from on_device import bytes_above, kernels_of, make_model, make_optimizer, waits_are_errors
from planted import FAULTS, PRODUCTS, caught_all, check_caught
from variant_cases import TOGETHER

from shardmuon.muon import Muon
from shardmuon.testing import RankPool
from shardmuon.testing.compare import Comparison
from shardmuon.testing.layouts import LAYOUTS
from shardmuon.variants import VARIANTS, stages_of

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
on_gpu = pytest.mark.skipif(NUM_GPUS == 0, reason="needs a CUDA device, and there is none")
on_gpus = pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs two CUDA devices for NCCL, and there are {NUM_GPUS}")
CONFIGS: dict[str, dict[str, Any]] = {
    "default": {},
    "standard": {"method": "standard"},
    "gram": {"method": "gram"},
}
# The smaller model saves time on the simulated device, where each batch is padded to 64 matrices.
SMALL = {"d": 64} if NUM_GPUS else {"d": 16, "layers": 1}


@pytest.fixture
def device() -> Iterator[torch.device]:
    """Yield the first GPU, or a simulated device."""
    with nullcontext() if NUM_GPUS else CudaShape():
        yield torch.device("cuda") if NUM_GPUS else CUDA


# ------------------------------------------------------------------------------------------------------ one process


@pytest.mark.parametrize("config", CONFIGS)
def test_a_steady_step_does_not_wait(config: str, device: torch.device) -> None:
    optimizer = make_optimizer(make_model(device, **SMALL), **CONFIGS[config])
    with waits_are_errors(device):
        optimizer.step()
        optimizer.step()


@pytest.mark.parametrize("config", ["standard", "gram"])
def test_a_whole_step_is_captured_and_replayed_with_its_bits(config: str, device: torch.device) -> None:
    """A captured step must give the same bits as an eager step. The simulated device can capture a graph but not replay
    it, so results are compared only on a GPU."""
    eager, captured = make_model(device, **SMALL), make_model(device, **SMALL)
    one, other = (make_optimizer(model, **CONFIGS[config]) for model in (eager, captured))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        other.step()
    for seed in range(10, 13 if NUM_GPUS else 10):
        for model in (eager, captured):
            model.set_gradients(seed)
        one.step()
        graph.replay()
        pairs = zip(eager.params, captured.params, strict=True)
        assert [i for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)] == []


@on_gpu
@pytest.mark.parametrize(("config", "kernels"), [("default", 1100), ("standard", 400), ("gram", 1100)])
def test_a_step_takes_a_few_buckets_of_memory_and_about_the_kernels_of_the_stand_in(config: str, kernels: int) -> None:
    """The memory and the number of kernels of a step must stay within limits. The kernel limits are up to 1.5 times
    those for the simulated device, because some operations that count as one launch on the simulated device run two
    kernels on a GPU. For example, a matmul with an addition first copies its addend."""
    optimizer = make_optimizer(make_model(CUDA, d=768, layers=12, num_vectors=50), **CONFIGS[config])
    # The memory limit is the one in test_cuda_shape.py, plus 10% for allocator blocks and 64 MiB for the workspace of
    # the matmul library.
    assert bytes_above(CUDA, optimizer.step) <= 1.1 * (6 * 32 * 2**20 + 4 * 2**24) + 2**26
    assert kernels_of(optimizer.step) <= kernels


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_sound_steps_on_a_device_give_no_finding(dtype: str) -> None:
    for seed in range(40):
        findings, statuses, _, drawn = healthy(dtype, seed, 64, "cuda")
        assert findings == [], drawn
        assert set(statuses) <= {"ok", "inconclusive"}, drawn


# ------------------------------------------------------------------------------------------------------------- ranks


def step_on_layout(layout: str, kind: str, steps: int = 2, variant: str | None = None) -> list[Comparison]:
    """Compare steps on a layout with steps on the full matrices. Return two comparisons, with fp32 and bf16 matmuls.

    Then take one more step, in which any host synchronization raises an error. The attribute `about` of each comparison
    is the text of that error, or "" if the step succeeds.
    """

    def once_more(optimizer: Muon) -> str:
        try:
            with waits_are_errors(torch.device(kind)):
                optimizer.step()
        except RuntimeError as error:
            return str(error).splitlines()[0]
        return ""

    decay = 0.1 if all(stage.decays for stage in stages_of({"variant": variant})) else 0.0
    given: dict[str, Any] = {"lr": 0.02, "variant": variant, "weight_decay": decay, "steps": steps, "about": once_more}
    return [
        Comparison.with_dense(layout, method="standard", ns_dtype=products, device=kind, **given)
        for products in (torch.float32, torch.bfloat16)
    ]


def compared(pool: RankPool, *given: Any, may_wait: bool = False) -> None:
    for found in itertools.chain(*pool.run(step_on_layout, *given)):
        assert found.bitwise, found
        assert may_wait or found.about == ""


@pytest.fixture(scope="module")
def nccl() -> Iterator[RankPool]:
    with RankPool(NUM_GPUS, backend="nccl", timeout=120.0) as pool:
        yield pool


@on_gpus
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_on_nccl(layout: str, nccl: RankPool) -> None:
    compared(nccl, layout, "cuda")


EVERY_VARIANT = (*VARIANTS, TOGETHER)
FEW_LAYOUTS = ("ddp", "fsdp2", "hsdp+tp", "ep+fsdp", "mcore buffers")


@on_gpu
@pytest.mark.parametrize(
    ("layout", "variant"),
    [*itertools.product(LAYOUTS, [None]), *itertools.product(FEW_LAYOUTS, EVERY_VARIANT)],
)
def test_every_layout_and_variant_on_ranks_that_share_a_device(layout: str, variant: str | None) -> None:
    """Each step on four ranks that share a GPU must match a step on a single rank bitwise. In this test, the host may
    wait for the device, because gloo moves CUDA tensors through host memory."""
    compared(RankPool.cached(4), layout, "cuda", 2, variant, may_wait=True)


@pytest.mark.stated
@pytest.mark.parametrize(("layout", "variant"), [("tp x dp", None), ("ep+fsdp", TOGETHER)])
def test_layouts_are_built_and_compared_where_they_are_told(layout: str, variant: str | None, world4: Any) -> None:
    compared(world4, layout, "cpu", 1, variant)


@on_gpu
@pytest.mark.parametrize("products", ["fp32", "bf16", "fp16"])
def test_planted_faults_are_named_on_a_device(products: str) -> None:
    found = RankPool.cached(2).run(caught_all, 256, PRODUCTS[products], tuple(FAULTS), "cuda")
    for name in FAULTS:
        check_caught(name, found)


# -------------------------------------------------------------------------------------------------------- the script


def test_the_script_times_every_contender_and_names_those_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    script = importlib.import_module("gpu")
    # Replace the profiler and the memory statistics, which need a real device.
    monkeypatch.setattr(script, "kernels_of", lambda step: 7)
    monkeypatch.setattr(script, "bytes_above", lambda device, step: 0)
    with CudaShape():
        lines, _ = script.timings(CUDA, d=16, layers=1, rounds=1)
    assert len(lines) == 2 + len(script.CONTENDERS)
    ours = [line for line in lines if line.startswith("| shardmuon")]
    assert len(ours) == 4
    assert all("| 7 |" in line for line in ours)
