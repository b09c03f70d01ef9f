"""Splitting matrices among several owners: the plan that is priced, and how its price comes about."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from simulated import VIEWS, sharded, spec

from shardmuon.foresight import count
from shardmuon.foresight.hardware import fact, load
from shardmuon.foresight.live import exact_of
from shardmuon.foresight.pricing import _brought_together, price
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
    items = iter(after.items)
    for whole in before.items:
        first = next(items)
        num = shares[first.param, first.matrix].owners if (first.param, first.matrix) in shares else 1
        parts = [first, *itertools.islice(items, num - 1)]
        assert {(part.param, part.cols) for part in parts} == {(whole.param, whole.cols)}
        assert sum(part.rows for part in parts) == whole.rows
        held = [after.specs[part.param].layout.tiles[part.matrix].values() for part in parts]
        assert sum(tile.numel for of_part in held for tiles in of_part for tile in tiles) == whole.rows * whole.cols
        assert sum(part.cost for part in parts) - whole.cost in range(num)
    assert next(items, None) is None


def test_owners_of_a_matrix_are_as_many_as_its_load_asks_for_and_different_ranks() -> None:
    """Whether that pays, the rates of the machine say; where ranks have equal loads nothing is split."""
    before, equal = _plan(FEW, 32), _plan([(1024, 4096)] * 32, 32)
    after, shares = split(before, Policy(), 4)
    several = {(4096, 4096): 2, (14336, 4096): 4, (4096, 14336): 4}
    assert {share[:2]: share.owners for share in shares.values()} == several
    for param, shape in enumerate(FEW):
        owners = [rank for item in after.items if item.param == param for rank in item.owners]
        assert len(set(owners)) == len(owners) == several.get(shape, 1)
    assert split(equal, Policy(), 4) == (equal, {})
    before = _plan(FEW, 256)
    after, shares = split(before, Policy(), 2)
    slow = replace(load("h100"), facts={**load("h100").facts, "link": fact(1e9, 1e9, "for tests", True)})
    for hardware, pays in ((load("h100"), True), (slow, False)):
        split_up, whole = price(exact_of(after, shares=shares), hardware), price(exact_of(before), hardware)
        assert (split_up.step.mid < whole.step.mid) == pays


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


def _said(made: Plan) -> list[str]:
    return [line for line in str(made).splitlines() if "split among" in line]


def test_a_printed_plan_says_what_splitting_would_take() -> None:
    """What replicas save that work for themselves is no gain of splitting: of 16 replicas of 8, shared by choice or
    not."""
    (line,) = _said(_plan(FEW, 64))
    assert line.startswith("3 matrices split among up to 4 owners each: 0.")
    assert line.endswith("x as long, within rounding (not offered)")
    assert not _said(_plan([(1024, 4096)] * 16, 16))
    for route in ("auto", "owner"):
        made = _plan([(512, 512)] * 4 + [(2048, 2048)], 128, 16, Policy(route))
        assert [one.each for one in made.sharing] == [True] * (route == "auto")
        (line,) = _said(made)
        assert float(line.split(": ")[1].split("x")[0]) > 1, line


def test_the_decision_has_the_prices_of_the_command() -> None:
    page = (Path(__file__).parents[2] / "docs" / "adr" / "0031-splitting-a-matrix.md").read_text()
    hardware = load("h100")
    steps = [
        price(count("llama3-8b", "shard=1024", machine=hardware.machine, owners=owners), hardware).step.mid
        for owners in (1, 2, 4)
    ]
    assert "| `shard=1024` | {:.1f} | {:.1f} | {:.1f} |".format(*(1e3 * step for step in steps)) in page
