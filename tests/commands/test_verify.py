"""`shardmuon verify`: its rows are measured, and a layout that falls short makes it fail."""

from __future__ import annotations

import importlib.util
import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shardmuon.commands import verify
from shardmuon.commands.main import main
from shardmuon.commands.verify import LayoutRow, verify_layout
from shardmuon.step import update as pipeline
from shardmuon.testing.compare import Comparison, compare_with_dense
from shardmuon.testing.frameworks import FSDP1_ROWS
from shardmuon.testing.layouts import LAYOUTS
from shardmuon.testing.pool import RankPool
from shardmuon.testing.slots import Compared


@pytest.fixture(scope="module")
def row(world2: RankPool) -> LayoutRow:
    return verify_layout(world2, "fsdp2", 2)


@pytest.mark.numeric
def test_a_row_is_measured(row: LayoutRow) -> None:
    assert row.ok
    assert row.orthogonalized == row.matrices == 58
    assert row.collectives == 3  # an agreement and two exchanges
    assert row.bytes_per_rank > 1000
    shown = row.cells
    assert (shown["layout"], shown["max rel diff"], shown["bitwise"], shown["= torch"]) == (
        "fsdp2",
        "0.00e+00",
        "yes",
        "yes",
    )


def test_a_row_counts_the_reduction_of_norms(world2: RankPool, row: LayoutRow) -> None:
    normed = verify_layout(world2, "fsdp2", 2, "hyperball")
    assert normed.ok
    assert normed.collectives == row.collectives + 1
    assert normed.bytes_per_rank == row.bytes_per_rank + 8 * row.matrices
    alone = verify_layout(world2, "single", 2, "hyperball")  # each rank has its own matrices
    assert (alone.collectives, alone.bytes_per_rank) == (0, 0)


def _not_a_number(layout: str, rank: int, **options: Any) -> Comparison:
    """`compare_with_dense`; on one rank the first matrix is lost."""
    apply_, calls = pipeline.apply_, []

    def spoiled(params: Any, *rest: Any, **named: Any) -> Any:
        found = apply_(params, *rest, **named)
        if dist.get_rank() == rank and not calls:
            calls.append(params[0].fill_(float("nan")))
        return found

    compare_with_dense(layout, **options)
    with mock.patch.object(pipeline, "apply_", spoiled):
        return compare_with_dense(layout, **options)


def _wrong_momentum(layout: str, rank: int, **options: Any) -> Comparison:
    """`compare_with_dense` of one step; on one rank the momentum is off when it has been used."""
    into = pipeline.momentum_into_

    def spoiled(out: Any, grads: Any, buffers: Any, **named: Any) -> None:
        into(out, grads, buffers, **named)
        buffers[0].add_(dist.get_rank() == rank)

    compare_with_dense(layout, steps=1, **options)
    with mock.patch.object(pipeline, "momentum_into_", spoiled):
        return compare_with_dense(layout, steps=1, **options)


def test_momentum_is_compared_too(world2: RankPool) -> None:
    found = world2.run(_wrong_momentum, "fsdp2", 1, lr=0.02)
    assert [(one.bitwise, one.max_difference) for one in found] == [(True, 0.0), (False, 0.0)]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_update_that_is_no_number_is_the_largest_difference(world2: RankPool, row: LayoutRow, rank: int) -> None:
    found = world2.run(_not_a_number, "fsdp2", rank, lr=0.02)
    assert math.isnan(found[rank].max_difference)
    assert not found[rank].bitwise
    assert math.isnan(verify._worst(c.max_difference for c in found))
    assert not replace(row, max_difference=verify._worst(c.max_difference for c in found)).ok


@pytest.fixture(scope="module")
def deepspeed_pool(deepspeed_pools: dict[int, RankPool]) -> RankPool:
    return deepspeed_pools[3]


@pytest.mark.ranks
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed: shardmuon[deepspeed]")
@pytest.mark.parametrize("layout", ["zero3"])
def test_rows_of_deepspeed_keep_the_contract(deepspeed_pool: RankPool, layout: str) -> None:
    row = verify_layout(deepspeed_pool, layout, 3)
    assert row.ok, row
    assert row.orthogonalized == row.matrices == 58
    assert row.collectives >= 3  # by each set of partitions that DeepSpeed steps together
    assert row.bytes_per_rank > 1000


TWO = ("--layout", "fsdp2", "--layout", "hsdp")


@pytest.mark.parametrize(
    ("words", "fault", "code", "says"),
    [
        (TWO, {}, 0, "2 of 2 layouts keep the contract"),
        ((), {}, 0, f" of {len(LAYOUTS) + len(FSDP1_ROWS)} layouts keep the contract"),  # all that torch makes
        (TWO, {"bitwise": False}, 1, "1 of 2 layouts keep the contract"),
        (TWO, {"torch_bitwise": False}, 1, "1 of 2 layouts keep the contract"),
        (TWO, {"max_difference": torch.finfo(torch.float64).tiny}, 1, "1 of 2 layouts keep the contract"),
        (TWO, {"max_difference": math.nan}, 1, "1 of 2 layouts keep the contract"),
        (("--ranks", "0"), {}, 2, "must be at least 1"),
        (("--layout", "deepspeed"), {}, 2, "pip install 'shardmuon[deepspeed]'"),
    ],
)
def test_the_command_fails_by_a_row_that_falls_short_and_says_what_it_needs(
    row: LayoutRow,
    words: tuple[str, ...],
    fault: dict[str, Any],
    code: int,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = {"fsdp2": replace(row, **fault), "hsdp": row}
    monkeypatch.setattr(verify, "RankPool", nullcontext)
    monkeypatch.setattr(verify, "verify_layout", lambda pool, name, *given: rows.get(name, row))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["verify", *words]) == code
    shown = capsys.readouterr()
    assert says in shown.out + shown.err


@pytest.mark.parametrize("unequal", [0, 2])
def test_a_search_of_slots_prints_what_it_compared_and_fails_by_what_differs(
    unequal: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [Compared("3x7, gram", 5, unequal), Compared("5x9, gram", 6, 0)]
    monkeypatch.setattr(verify, "search", lambda device: found)
    assert main(["verify", "--slots"]) == bool(unequal)
    shown = capsys.readouterr().out
    assert f"3x7, gram: {unequal} of 5 differ\n5x9, gram: 0 of 6 differ\n{unequal} of 11 differ" in shown
    assert ("report it" in shown) == bool(unequal)
