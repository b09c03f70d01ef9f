"""Steps in exact arithmetic (golden/exact.py) on one process and on all layouts; rows of `make golden`."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import pytest
import torch
from golden import exact
from golden.table import DTYPES, OPTIONS, PARAMS, rows_of
from tolerances import assert_bitwise
from torch import Tensor

from shardmuon.testing import get_pool
from shardmuon.testing.layouts import LAYOUTS

WORLDS = (2, 3, 4)


@functools.cache
def expected(options: str) -> Mapping[str, Tensor]:
    """Tensors after each step, of one process where something is rounded by a hash, which the reference has not."""
    if exact.OPTIONS[options].by_hash:
        return exact.assembled([exact.run("single", options)])
    return exact.reference(options)


def dealt(layout: str, world: int) -> str:
    """The options that a layout is held to on this number of ranks; others on the next."""
    names = list(exact.OPTIONS)
    return names[(list(LAYOUTS).index(layout) + (world - 1) * 4) % len(names)]


@pytest.mark.parametrize("options", [name for name, of in exact.OPTIONS.items() if not of.by_hash])
def test_one_process_has_the_bits_of_fp64_without_shardmuon(options: str) -> None:
    assert_bitwise(exact.assembled([exact.run("single", options)]), expected(options))


# On 3 ranks, whose sizes do not divide, all; test_equality.py has all on 4 and every second on 2.
ROWS = [(name, world) for world, names in ((2, [*LAYOUTS][::6]), (3, LAYOUTS), (4, [*LAYOUTS][::2])) for name in names]


@pytest.mark.parametrize(("layout", "world"), ROWS)
def test_every_layout_has_these_bits(layout: str, world: int) -> None:
    options = dealt(layout, world)
    assert_bitwise(exact.assembled(get_pool(world).run(exact.run, layout, options)), expected(options), options)


def test_every_option_meets_sharded_layouts() -> None:
    met = {dealt(layout, world) for layout, world in ROWS}
    assert met == set(exact.OPTIONS)


def test_the_stand_in_turns_with_its_matrix_and_sees_all_of_it() -> None:
    x = torch.randint(-3, 4, (2, 5, 8), generator=torch.Generator().manual_seed(0)).float() / 2
    assert torch.equal(exact.stand_in(x.mT), exact.stand_in(x).mT)
    assert not exact.stand_in(torch.zeros(1, 3, 4)).any()
    other = x.clone()
    other[:, 0, 0] += 1
    assert (exact.stand_in(other) != exact.stand_in(x))[:, 1:, 1:].any()


def test_golden_rows_are_many_and_each_option_and_dtype_meets_every_number_of_ranks() -> None:
    rows = {world: list(rows_of(world)) for world in (1, *WORLDS)}
    assert sum(map(len, rows.values())) >= 480
    for world, table in rows.items():
        assert len({row.name for row in table}) == len(table)
        assert {row.options for row in table} == set(OPTIONS), world
        assert {row.dtype for row in table} == set(DTYPES), world
        assert world == 1 or set(LAYOUTS) <= {row.layout for row in table}
    assert any(param.options.get("use_muon") is False for param in PARAMS.values())
