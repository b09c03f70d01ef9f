"""Tests of `shardmuon verify`: the table must contain measured values, and the command must fail if a layout gives
different results than a single process."""

from __future__ import annotations

import importlib.util
import io
import math
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardmuon.comm.groups import Traffic
from shardmuon.commands import verify
from shardmuon.commands.main import main
from shardmuon.step import update
from shardmuon.testing.compare import Comparison
from shardmuon.testing.frameworks import Fsdp1Run
from shardmuon.testing.layouts import LAYOUTS
from shardmuon.testing.pool import RankPool


def rows_of(pool: RankPool, *words: str) -> list[dict[str, str]]:
    """Run `shardmuon verify` on a pool of ranks, and return the rows of the printed table. Results must be bitwise
    equal to the reference on all layouts."""
    out = io.StringIO()
    with mock.patch.object(verify, "RankPool", return_value=nullcontext(pool)), redirect_stdout(out):
        assert main(["verify", "--ranks", str(pool.world_size), *words]) == 0, out.getvalue()
    header, _, *lines = (re.split("  +", line) for line in out.getvalue().partition("\n\n")[0].splitlines())
    return [dict(zip(header, line, strict=True)) for line in lines]


@pytest.fixture(scope="module")
def shown(world2: RankPool) -> dict[str, str]:
    (row,) = rows_of(world2, "--layout", "fsdp2")
    return row


@pytest.mark.numeric
def test_a_row_is_measured(shown: dict[str, str]) -> None:
    assert int(shown["bytes/rank"]) > 1000
    assert shown == {
        "bytes/rank": shown["bytes/rank"],
        "layout": "fsdp2",
        "matrices": "58",
        "NS runs": "58",
        "max rel diff": "0.00e+00",
        "bitwise": "yes",
        "= torch": "yes",
        "collectives": "3",  # With FSDP2, a step has one vote, in which ranks agree on the step, and two exchanges.
    }


def test_a_row_counts_the_reduction_of_norms(world2: RankPool, shown: dict[str, str]) -> None:
    _, normed, _, alone = rows_of(world2, "--layout", "fsdp2", "--layout", "single", "--variant", "hyperball")
    assert normed["layout"] == "fsdp2 hyperball" and normed["= torch"] == "-"
    assert int(normed["collectives"]) == int(shown["collectives"]) + 1
    assert int(normed["bytes/rank"]) == int(shown["bytes/rank"]) + 8 * int(shown["matrices"])
    # In the layout "single", each rank has its own matrices, so the ranks do not communicate.
    assert (alone["collectives"], alone["bytes/rank"]) == ("0", "0")


def _damaged(layout: str, name: str, damage: Callable[..., object], rank: int) -> Comparison:
    """Return a comparison of one optimizer step on a layout with the dense reference. On rank `rank`, `damage` corrupts
    the tensors that the first call of the function `name` has written."""
    given: dict[str, Any] = {"steps": 1, "lr": 0.02}
    original, left = getattr(update, name), [damage] if dist.get_rank() == rank else []

    def spoiled(*args: Any, **named: Any) -> Any:
        found = original(*args, **named)
        while left:
            left.pop()(*args)
        return found

    # This first run, without corruption, caches the dense reference for the second run.
    Comparison.with_dense(layout, **given)
    with mock.patch.object(update, name, spoiled):
        return Comparison.with_dense(layout, **given)


def _lost(params: Sequence[Tensor], *rest: object) -> None:
    params[0].fill_(math.nan)


def _moved(out: object, grads: object, momenta: Sequence[Tensor], *rest: object) -> None:
    momenta[0].add_(1)


def test_momentum_is_compared_too(world2: RankPool) -> None:
    found = world2.run(_damaged, "fsdp2", "momentum_", _moved, 1)
    assert [(one.bitwise, one.max_difference) for one in found] == [(True, 0.0), (False, 0.0)]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_update_that_is_no_number_is_the_largest_difference(world2: RankPool, rank: int) -> None:
    found = world2.run(_damaged, "fsdp2", "apply_", _lost, rank)
    worst = verify._worst(one.max_difference for one in found)
    assert math.isnan(found[rank].max_difference) and not found[rank].bitwise and math.isnan(worst)


@pytest.mark.ranks
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed: shardmuon[deepspeed]")
def test_rows_of_deepspeed_keep_the_contract(deepspeed_pools: dict[int, RankPool]) -> None:
    (cells,) = rows_of(deepspeed_pools[3], "--layout", "zero3")
    assert cells["NS runs"] == cells["matrices"] == "58", cells
    # A step on one flat buffer runs three collectives: a vote, in which ranks agree on the step, and two exchanges. The
    # table of `shardmuon verify` gives the sum over all flat buffers.
    assert int(cells["collectives"]) >= 3
    assert int(cells["bytes/rank"]) > 1000


TWO = ("--layout", "fsdp2", "--layout", "hsdp")
SOUND = Comparison(0.0, True, Traffic(), 58, "")


@pytest.mark.parametrize(
    ("words", "fault", "code", "says"),
    [
        (TWO, {}, 0, "2 of 2 layouts keep the contract"),
        # By default, `shardmuon verify` runs all layouts that need only torch.
        ((), {}, 0, f" of {len(LAYOUTS) + len(Fsdp1Run.ROWS)} layouts keep the contract"),
        (TWO, {Comparison.with_dense: {"bitwise": False}}, 1, "1 of 2 layouts keep the contract"),
        (TWO, {Comparison.with_torch: {"bitwise": False}}, 1, "1 of 2 layouts keep the contract"),
        (TWO, {Comparison.with_dense: {"max_difference": 5e-324}}, 1, "1 of 2 layouts keep the contract"),
        (TWO, {Comparison.with_dense: {"max_difference": math.nan}}, 1, "1 of 2 layouts keep the contract"),
        (("--ranks", "0"), {}, 2, "must be at least 1"),
        (("--layout", "deepspeed"), {}, 2, "pip install 'shardmuon[deepspeed]'"),
    ],
)
def test_the_command_fails_by_a_row_that_falls_short_and_says_what_it_needs(
    words: tuple[str, ...],
    fault: dict[Any, dict[str, Any]],
    code: int,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(fn: Any, layout: str, **given: Any) -> list[Comparison]:
        is_hit = layout == "fsdp2" and torch.bfloat16 in given.values()
        return [SOUND, replace(SOUND, **fault.get(fn, {}))] if is_hit else [SOUND, SOUND]

    monkeypatch.setattr(verify, "RankPool", lambda ranks: nullcontext(SimpleNamespace(world_size=ranks, run=run)))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["verify", *words]) == code
    shown = capsys.readouterr()
    assert says in shown.out + shown.err


@pytest.mark.parametrize("unequal", [0, 2])
def test_a_search_of_slots_prints_what_it_compared_and_fails_by_what_differs(
    unequal: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [("3x7, gram", [True] * (5 - unequal) + [False] * unequal), ("5x9, gram", [True] * 6)]
    monkeypatch.setattr(verify, "search", lambda device: found)
    assert main(["verify", "--slots"]) == bool(unequal)
    shown = capsys.readouterr().out
    assert f"3x7, gram: {unequal} of 5 differ\n5x9, gram: 0 of 6 differ\n{unequal} of 11 differ" in shown
    assert ("report it" in shown) == bool(unequal)
