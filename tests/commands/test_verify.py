"""`shardmuon verify`: its rows are measured, and a layout that falls short makes it fail."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardmuon.commands import verify
from shardmuon.commands.main import main
from shardmuon.commands.verify import LayoutRow, verify_layout
from shardmuon.step import update
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
    expected = {"layout": "fsdp2", "max rel diff": "0.00e+00", "bitwise": "yes", "= torch": "yes"}
    assert row.cells | expected == row.cells


def test_a_row_counts_the_reduction_of_norms(world2: RankPool, row: LayoutRow) -> None:
    normed = verify_layout(world2, "fsdp2", 2, "hyperball")
    assert normed.ok
    assert normed.collectives == row.collectives + 1
    assert normed.bytes_per_rank == row.bytes_per_rank + 8 * row.matrices
    alone = verify_layout(world2, "single", 2, "hyperball")  # each rank has its own matrices
    assert (alone.collectives, alone.bytes_per_rank) == (0, 0)


def _damaged(layout: str, name: str, damage: Callable[..., object], rank: int) -> Comparison:
    """`compare_with_dense` of one step; on one rank what a function of the step has written is damaged once."""
    given: dict[str, Any] = {"steps": 1, "lr": 0.02}
    original, left = getattr(update, name), [damage] if dist.get_rank() == rank else []

    def spoiled(*args: Any, **named: Any) -> Any:
        found = original(*args, **named)
        while left:
            left.pop()(*args)
        return found

    compare_with_dense(layout, **given)  # the reference is made with nothing damaged
    with mock.patch.object(update, name, spoiled):
        return compare_with_dense(layout, **given)


def _lost(params: Sequence[Tensor], *rest: object) -> None:
    params[0].fill_(math.nan)


def _moved(out: object, grads: object, momenta: Sequence[Tensor], *rest: object) -> None:
    momenta[0].add_(1)


def test_momentum_is_compared_too(world2: RankPool) -> None:
    found = world2.run(_damaged, "fsdp2", "momentum_into_", _moved, 1)
    assert [(one.bitwise, one.max_difference) for one in found] == [(True, 0.0), (False, 0.0)]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_update_that_is_no_number_is_the_largest_difference(world2: RankPool, row: LayoutRow, rank: int) -> None:
    found = world2.run(_damaged, "fsdp2", "apply_", _lost, rank)
    worst = verify._worst(one.max_difference for one in found)
    assert math.isnan(found[rank].max_difference) and not found[rank].bitwise and math.isnan(worst)
    assert not replace(row, max_difference=worst).ok


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
