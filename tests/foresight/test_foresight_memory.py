"""The highest point of a step's memory, computed without ranks, against what is measured on them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from live_bytes import peak_of

from shardmuon import Exchange, Muon, Orthogonalizer
from shardmuon.foresight.counting import count_plan
from shardmuon.foresight.memory import LiveBytes, _work_space, peak_bytes
from shardmuon.options import per_step
from shardmuon.orthogonalize import batch_size, empty_batch, orthogonalize
from shardmuon.orthogonalize.gram import FiniteWatch
from shardmuon.testing.layouts import LAYOUTS, ParamCase, groups_of, parameters
from shardmuon.testing.pool import get_pool
from shardmuon.testing.tolerances import assert_counted_bytes

MIB = 2**20
FP32, BF16 = torch.float32, torch.bfloat16
SHAPES = [(128, 256)] * 4 + [(256, 128)] * 2 + [(128, 128)] * 3 + [(192, 640)]
QUINTIC = ((3.4445, -4.7750, 2.0315),) * 5


def _peaks(
    layout: str, bucket_bytes: int, method: str, dtype: torch.dtype, wire: torch.dtype | None, weights: torch.dtype
) -> Any:
    """(counted, measured) of the second step of this rank."""
    cases = {f"w{i}": ParamCase(shape, "") for i, shape in enumerate(SHAPES)}
    generator = torch.Generator().manual_seed(0)
    full = {name: torch.randn(case.shape, generator=generator).to(weights) for name, case in cases.items()}
    row, world = LAYOUTS[layout], dist.get_world_size()
    params = parameters(row.build(full, row.mesh(world)))
    asked: dict[str, Any] = {
        "exchange": Exchange(dtype=wire, bucket_bytes=bucket_bytes),
        "orthogonalizer": Orthogonalizer(method, dtype),  # type: ignore[arg-type]
    }
    optimizer = Muon(groups_of(params, cases), lr=1e-3, **row.options(world), **asked)
    for name, grad in row.build(full, row.mesh(world)).items():
        params[name].grad = grad
    del full
    optimizer.step()
    measured = peak_of(optimizer.step)
    assert optimizer.plan is not None
    group = optimizer.param_groups[0]
    counted = peak_bytes(
        count_plan(optimizer.plan, lambda rank: 0)[dist.get_rank()],
        weights=weights,
        device="cpu",
        coefficients=dict.fromkeys(SHAPES, per_step(group["ns_coefficients"], group["ns_steps"])),
    )
    return counted, measured


@pytest.mark.stated
@pytest.mark.parametrize(
    ("layout", "world", "method", "dtype", "wire", "weights", "bucket_bytes"),
    [
        ("single", 1, "standard", FP32, None, FP32, MIB // 8),
        ("fsdp2", 2, "standard", FP32, None, FP32, MIB // 8),
        ("fsdp2", 2, "standard", BF16, None, FP32, MIB // 8),
        ("fsdp2", 2, "standard", FP32, BF16, FP32, MIB),
        ("fsdp2", 2, "gram", FP32, None, FP32, MIB),
        ("fsdp2", 2, "standard", FP32, None, BF16, MIB),
        ("ddp", 2, "standard", FP32, None, FP32, MIB),
        ("fsdp2", 4, "standard", FP32, None, FP32, MIB // 8),
        ("hsdp", 4, "standard", BF16, None, FP32, MIB // 8),
        ("fsdp2+tp", 4, "standard", FP32, None, FP32, MIB),
        ("mcore buffers", 2, "standard", FP32, None, FP32, MIB // 8),
    ],
    ids=str,
)
def test_the_peak_of_a_step_is_within_2_percent_of_what_is_measured(
    layout: str,
    world: int,
    method: str,
    dtype: torch.dtype,
    wire: torch.dtype | None,
    weights: torch.dtype,
    bucket_bytes: int,
) -> None:
    for counted, measured in get_pool(world).run(_peaks, layout, bucket_bytes, method, dtype, wire, weights):
        assert_counted_bytes(counted, measured)


@pytest.mark.stated
@pytest.mark.parametrize(("method", "dtype"), [("standard", torch.float32), ("gram", torch.float32)])
@pytest.mark.parametrize("shape", [(1, 128, 300), (3, 300, 128), (5, 32, 48)])
def test_work_space_without_data_is_that_with_data(
    method: str, dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    batch = empty_batch(shape, torch.float32, torch.device("cpu")).normal_()
    with LiveBytes() as live:
        orthogonalize(batch, QUINTIC, method=method, dtype=dtype, watch=FiniteWatch(), overwrite=True)
    how = f"{method} {str(dtype).removeprefix('torch.')}"
    assert _work_space(shape, how, torch.float32, "cpu", QUINTIC) == live.peak


@pytest.mark.parametrize("how", ["standard bfloat16", "gram float16"])
@pytest.mark.parametrize("shape", [(64, 128), (128, 64)])
def test_a_batch_takes_the_work_space_of_its_size_however_few_are_in_it(how: str, shape: tuple[int, int]) -> None:
    size = batch_size(*shape, torch.device("cuda"))
    one, whole = (_work_space((count, *shape), how, BF16, "cuda", QUINTIC) for count in (1, size))
    assert size == 64
    assert 0.98 * whole < one <= whole, "they differ in what looks at results"
