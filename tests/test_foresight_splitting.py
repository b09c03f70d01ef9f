"""Splitting matrices among several owners: the plan that is priced, and how its price comes about."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from simulated import VIEWS, sharded, spec

from shardmuon.foresight import plan
from shardmuon.foresight.hardware import Fact, load
from shardmuon.foresight.live import exact_of, summary
from shardmuon.foresight.pricing import _brought_together, price
from shardmuon.foresight.report import SPLIT
from shardmuon.foresight.splitting import split
from shardmuon.foresight.types import Matrices
from shardmuon.layout.views import Ints, matrix_view
from shardmuon.orthogonalize.choice import flops
from shardmuon.orthogonalize.schedules import triples
from shardmuon.plan.plan import Plan, Policy, Spec, make_plan

FEW = [(4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)]
STEPS = triples("keller", None)


def _plan(shapes: list[Ints], ranks: int, replicas: int = 1, policy: Policy | None = None) -> Plan:
    found: list[Spec] = []
    grid = [range(first, first + ranks // replicas) for first in range(0, ranks, ranks // replicas)]
    for shape in shapes:
        cost = flops("standard", *shape, STEPS, torch.bfloat16)
        one = spec(str(shape), sharded(matrix_view(shape), grid, 0), itemsize=2)
        found.append(one._replace(hows=("standard bfloat16",), costs=(cost,)))
    return make_plan(found, policy or Policy())


@pytest.mark.parametrize("view", VIEWS)
def test_shares_are_rows_of_whole_matrices(view: str) -> None:
    layout = sharded(VIEWS[view](), [range(16)], 0)
    before = make_plan([spec(view, layout), spec("more", layout)], Policy())
    after, shares = split(before, Policy(), 4)
    whole = [(item.param, item.rows, item.cols) for item in before.items]
    items = iter(after.items)
    for param, rows, cols in whole:
        first = next(items)
        share = shares.get((first.param, first.matrix))
        parts = [first, *(next(items) for _ in range(share.owners - 1 if share else 0))]
        assert {(part.param, part.cols) for part in parts} == {(param, cols)}
        assert sum(part.rows for part in parts) == rows
        assert share is None or share[:2] == (rows, cols)
        held = [after.specs[part.param].layout.tiles[part.matrix] for part in parts]
        assert sum(tile.numel for of_part in held for tiles in of_part.values() for tile in tiles) == rows * cols
    assert next(items, None) is None
    assert sum(item.cost for item in after.items) - sum(item.cost for item in before.items) in range(len(after.items))


def test_owners_of_a_matrix_are_as_many_as_its_load_asks_for_and_different_ranks() -> None:
    after, shares = split(_plan(FEW, 32), Policy(), 4)
    assert {(share.rows, share.cols): share.owners for share in shares.values()} == {
        (4096, 4096): 2,
        (14336, 4096): 4,
        (4096, 14336): 4,
    }
    owners: dict[int, list[int]] = {}
    for item in after.items:
        owners.setdefault(item.param, []).extend(item.owners)
    assert all(len(set(of_param)) == len(of_param) for of_param in owners.values())


def test_a_plan_whose_ranks_have_equal_loads_is_not_split() -> None:
    before = _plan([(1024, 4096)] * 32, 32)
    after, shares = split(before, Policy(), 4)
    assert not shares
    assert after is before


@pytest.mark.parametrize("owners", [2, 4])
def test_owners_send_each_other_every_result_that_all_of_them_need(owners: int) -> None:
    """The standard form has X, A and b A + c A^2 in each of five steps, the Gram form X, R and 17 small products."""
    short, long = 1024, 4096
    for how, method, dtype, results in (
        ("standard bfloat16", "standard", torch.bfloat16, (15, 5 * short * long + 10 * short**2)),
        ("gram float64", "gram", torch.float64, (19, short * long + 18 * short**2)),
    ):
        cost = flops(method, short, long, STEPS, dtype) // owners
        assert _brought_together(Matrices(short, long, how, 1, cost), owners) == results


def test_splitting_pays_or_not_by_the_rates_of_the_machine() -> None:
    before = _plan(FEW, 256)
    after, shares = split(before, Policy(), 2)
    h100 = load("h100")
    slow = replace(h100, facts={**h100.facts, "link": Fact(1e9, 1e9, "for tests", True)})
    for hardware, pays in ((h100, True), (slow, False)):
        times = [
            price(exact_of(made, shares=found), hardware).step.mid for made, found in ((before, {}), (after, shares))
        ]
        assert (times[1] < times[0]) == pays


def test_a_printed_plan_says_what_splitting_would_take() -> None:
    (line,) = (line for line in str(_plan(FEW, 64)).splitlines() if "split among" in line)
    assert line.startswith("3 matrices split among up to 4 owners each: 0.")
    assert line.endswith("x as long, within rounding (not offered)")
    assert "split among" not in str(_plan([(1024, 4096)] * 16, 16))


def test_what_replicas_save_that_work_for_themselves_is_no_gain_of_splitting() -> None:
    """Shared by choice, 16 replicas of 8 would take less time if each worked for itself; split or not."""
    shapes = [(512, 512)] * 4 + [(2048, 2048)]
    each, shared = (_plan(shapes, 128, 16, Policy(route)) for route in ("auto", "owner"))
    assert [one.each for one in each.sharing] == [True] and not shared.sharing
    for made in (each, shared):
        (line,) = (line for line in summary(made) if "split among" in line)
        assert float(line.split(": ")[1].split("x")[0]) > 1, line
    alike = _plan([(1024, 1024)] * 8, 32, 4)  # one for each rank of a replica
    assert alike.sharing[0].each and not split(alike, Policy(), 4)[1]


def test_the_decision_has_the_prices_of_the_command() -> None:
    page = (Path(__file__).parent.parent / "docs" / "adr" / "0031-splitting-a-matrix.md").read_text()
    report = plan("llama3-8b", "shard=1024", tokens_per_step=4e6)
    steps = {a.change: a.step for a in report.advice if a.step is not None and not a.write}
    two, four = (1e3 * steps[SPLIT.format(num)].mid for num in (2, 4))
    assert f"| `shard=1024` | {1e3 * report.price.step.mid:.1f} | {two:.1f} | {four:.1f} |" in page
