"""Tests of variants on every layout: the update and the state of post-processing stages (such as NorMuon) match a
single-process run bitwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from simulated import quick_plans
from variant_cases import LATER, TOGETHER

from shardmuon import Muon
from shardmuon.testing.compare import Comparison
from shardmuon.testing.frameworks import Fsdp1Run
from shardmuon.testing.layouts import LAYOUTS, ParamCase
from shardmuon.testing.pool import RankPool

# One parameter for each way of storing matrices. The others in PARAMS would test nothing new, because stages see only
# matrices and their rows or columns.
SEVERAL = ("few_rows", "tall", "odd_experts", "qkv", "one_col", "columns", "in_out_gate_up", "one_row")


@quick_plans()
def _compared(layout: str, variant: str, **of_params: Any) -> tuple[bool, float, str]:
    """Compare two optimizer steps with a single-process run. The first step creates the variant's state, and the second
    step uses this state. Return whether the results are bitwise equal, the largest difference, and the parameter in
    which it occurs."""
    given: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.0 if "hyperball" in variant else 0.1}
    found = Comparison.with_dense(layout, variant=variant, steps=2, **given, **(of_params or {"params": SEVERAL}))
    return found.bitwise, found.max_difference, found.worst


@pytest.mark.parametrize(
    ("world", "variant", "layout"),
    [
        *((3, "hyperball", name) for name in list(LAYOUTS)[::6]),
        *((4, TOGETHER, name) for name in LAYOUTS),
        *((4, variant, name) for variant in ("normuon", *LATER) for name in ("hsdp+tp", "ep+fsdp")),
        *((4, variant, name) for variant, name in zip((TOGETHER, "normuon") * 2, Fsdp1Run.ROWS, strict=True)),
    ],
)
def test_stages_have_the_bits_of_one_process_on_every_layout(world: int, variant: str, layout: str) -> None:
    assert RankPool.cached(world).run(_compared, layout, variant) == [(True, 0.0, "")] * world


@pytest.mark.parametrize("layout", ["fsdp2+tp", "hsdp+tp"])
def test_what_is_kept_of_a_stack_of_which_a_rank_has_no_columns(layout: str, world3: RankPool) -> None:
    """Tensor parallelism over 3 ranks leaves no columns of a (5, 7, 4) stack on the last rank. FSDP2 then stores an
    empty shard of shape (0, 7, 0) there. NorMuon's result must still match a single-process run."""
    # Tensor parallelism shards every second parameter by columns. In this list, the second parameter is "odd_experts".
    assert world3.run(_compared, layout, "normuon", params=["one_row", "odd_experts"]) == [(True, 0.0, "")] * 3


def test_what_is_kept_of_a_block_lies_at_any_place_beside_fp64_weights(world2: RankPool) -> None:
    """On one rank, NorMuon's second moment has 3 fp32 elements for the first block of a fused weight, followed by 8 for
    the second block. The second block starts at byte 12, which is not aligned for fp64, the dtype of the weights. The
    result must still match a single-process run."""
    table = {"w": ParamCase((10, 3), "blocks of which one is wide", {"split_sizes": (2, 8)})}
    assert world2.run(_compared, "fsdp2", "normuon", table=table, dtype=torch.float64) == [(True, 0.0, "")] * 2


@pytest.mark.parametrize(
    ("layout", "variant"),
    [("zero0", "normuon"), ("zero2+offload", TOGETHER), ("zero3", TOGETHER)],
)
def test_stages_have_the_bits_of_one_process_under_deepspeed(
    layout: str, variant: str, deepspeed_pools: dict[int, RankPool]
) -> None:
    pytest.importorskip("deepspeed")
    assert deepspeed_pools[3].run(_compared, layout, variant) == [(True, 0.0, "")] * 3


def _lost_on_one_rank(key: str, left: Any) -> None:
    case = LAYOUTS["fsdp2"]
    full = {f"w{i}": torch.randn(6 + i, 4, generator=torch.Generator().manual_seed(i)) for i in range(3)}
    params, grads = (list(case.build(full, case.mesh(2)).values()) for _ in range(2))
    for p, g in zip(params, grads, strict=True):
        p.requires_grad_().grad = g
    optimizer = Muon(params, lr=0.02, weight_decay=0.0, variant="normuon+hyperball")
    optimizer.step()
    kept = optimizer.state[params[1]][key]
    if dist.get_rank() == 1:
        optimizer.state[params[1]][key] = left
    before = [p.detach().to_local().clone() for p in params]  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=f"parameter 1 of group 0.*{key}"):
        optimizer.step()
    assert all(torch.equal(p.detach().to_local(), b) for p, b in zip(params, before, strict=True))  # type: ignore[attr-defined]
    optimizer.state[params[1]][key] = kept
    optimizer.step()


@pytest.mark.parametrize(
    ("key", "left"), [("second_moment", None), ("weight_radius", None), ("second_moment", torch.zeros(1, 3))]
)
def test_what_one_rank_alone_has_lost_or_changed_is_an_error_on_all(key: str, left: Any, world2: RankPool) -> None:
    """If one rank has lost or changed a variant's state, such as NorMuon's second moment, all ranks must raise an
    error. In an earlier version, a rank that had lost its weight norms started a reduction in which the other ranks did
    not take part."""
    world2.run(_lost_on_one_rank, key, left)
