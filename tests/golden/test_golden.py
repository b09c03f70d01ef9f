"""Tests that every layout matches a single-process run bitwise, with options from the golden table."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from golden import rows
from golden.table import DTYPES, OPTIONS, PARAMS, Row, placed, rows_of
from simulated import quick_plans
from torch import Tensor

from shardmuon._torch import local_if_any
from shardmuon.testing import RankPool
from shardmuon.testing.layouts import LAYOUTS

WORLDS = (2, 3, 4)
# Each layout runs one row of the golden table, if possible with options that no earlier layout has used. All layouts
# run on 3 ranks, because 3 does not divide most tensor sizes. Fewer layouts run on 4 and 2 ranks, because
# test_equality.py covers these numbers. Int8 momentum is left to test_momentum.py, because some layouts split its
# blocks.
LEFT_OUT = "momentum int8"
NAMES = {3: list(LAYOUTS), 4: list(LAYOUTS)[::2], 2: list(LAYOUTS)[::6]}


def _dealt() -> list[tuple[int, Row]]:
    found, met = list[tuple[int, Row]](), {LEFT_OUT}
    for world, names in NAMES.items():
        for name in names:
            of_layout = [row for row in rows_of(world) if row.layout == name and row.options != LEFT_OUT]
            found.append((world, min(of_layout, key=lambda row: row.options in met)))
            met.add(found[-1][1].options)
    return found


ROWS = _dealt()


@quick_plans()
def _differing(row: Row, whole: Mapping[str, Tensor]) -> list[str]:
    """Return the names of weights, momentum and AdamW moments on this rank that differ from a single-process run."""
    numbers = {name: torch.arange(math.prod(p.shape), dtype=torch.float64).view(p.shape) for name, p in PARAMS.items()}
    elements = {name: local_if_any(t).long() for name, t in placed(row.layout, numbers).items()}
    wrong = []
    for name, found in rows.run(row).items():
        _, key, param = name.split("/")
        if key in ("weight", "momentum_buffer", "exp_avg", "exp_avg_sq"):
            wanted = whole[name].flatten()[elements[param].flatten()]
            if found.dtype != wanted.dtype or not torch.equal(found.flatten(), wanted):
                wrong.append(name)
    return wrong


@pytest.mark.parametrize(("world", "row"), ROWS, ids=str)
def test_every_layout_has_the_bits_of_one_process(world: int, row: Row) -> None:
    """Weights, momentum and AdamW moments must match a single-process run bitwise. The state of post-processing stages
    (such as NorMuon) is not compared, because it is sharded differently from the weights. test_variants_layouts.py
    compares this state."""
    whole = rows.run(row._replace(layout="single"))
    assert RankPool.cached(world).run(_differing, row, whole) == [[]] * world


def test_golden_rows_are_many_and_each_option_and_dtype_meets_every_number_of_ranks() -> None:
    tables = {world: list(rows_of(world)) for world in (1, *WORLDS)}
    assert sum(map(len, tables.values())) >= 480
    for world, table in tables.items():
        assert len({row.name for row in table}) == len(table)
        assert {row.options for row in table} == set(OPTIONS), world
        assert {row.dtype for row in table} == set(DTYPES), world
        assert world == 1 or set(LAYOUTS) <= {row.layout for row in table}
    assert {row.options for _, row in ROWS} == OPTIONS.keys() - {LEFT_OUT}
