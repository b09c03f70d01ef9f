"""Matrices whose slices have owners of their own: the bits of one process on every layout, and exchanges as planned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from every_layout import Planned, assert_counted, planned

from shardmuon import Muon, Orthogonalizer
from shardmuon.plan import plan as plan_module
from shardmuon.testing.compare import Comparison, compare_with_dense
from shardmuon.testing.layouts import LAYOUTS, ParamCase
from shardmuon.testing.pool import get_pool

TABLE = {
    "wide": ParamCase((64, 256), "slices of columns"),
    "tall": ParamCase((256, 64), "slices of rows, of which few ranks store any"),
    "square": ParamCase((112, 112), "as wide as tall"),
    "experts": ParamCase((2, 64, 160), "slices inside a stack", {"view": "stack"}),
    "kernel": ParamCase((64, 16, 3, 3), "columns along several dims"),
    "qkv": ParamCase(
        (192, 160), "slices inside repeats, and matrices too small", {"split_sizes": (32, 16, 16), "split_groups": 3}
    ),
    "in_out": ParamCase((70, 160), "stored transposed", {"transposed": True}),
    "odd": ParamCase((64, 150), "divides in two only"),
    "small": ParamCase((16, 24), "runs in batches"),
}


@contextmanager
def forced(split: bool) -> Iterator[None]:
    """All matrices that can be are split among owners, or none."""
    by_price = plan_module._by_price_of_slices

    def choose(*given: Any) -> plan_module.Splitting:
        return by_price(*given)._replace(taken=split)

    with (
        mock.patch.object(plan_module, "_ABOVE_MEAN", 0),
        mock.patch.object(plan_module, "_by_price_of_slices", choose),
    ):
        yield


def _about(optimizer: Muon) -> tuple[Planned, int]:
    """What is planned of a step, and how many matrices have several owners."""
    assert optimizer.plan is not None
    return planned(optimizer), sum(item.parts > 1 and not item.part for item in optimizer.plan.items)


Case = tuple[str, int, torch.dtype, bool]  # layout, slices, dtype of products, split or not


def _compared(cases: Sequence[Case]) -> list[Comparison]:
    found = []
    for layout, split_k, dtype, split in cases:
        how = Orthogonalizer("standard", dtype, split_k=split_k)
        with forced(split):
            found.append(
                compare_with_dense(
                    layout, orthogonalizer=how, table=TABLE, steps=2, lr=0.02, remember=True, about=_about
                )
            )
    return found


WHOLE = ("single",)


def _cases(world: int) -> list[Case]:
    """Every layout at 4 ranks and every third at fewer; dtypes and slices in turn; one in six with one owner each."""
    found = []
    for at, layout in enumerate(LAYOUTS):
        if world == 4 or at % 3 == world - 2:
            dtype = (torch.float32, torch.bfloat16)[at % 2]
            found.append((layout, 4 if world == 4 and at % 4 < 2 else 2, dtype, at % 6 != 5))
    return found


@pytest.mark.parametrize("world", [2, 3, 4])
def test_split_matrices_have_the_bits_of_one_process(world: int) -> None:
    """And as many bytes and exchanges as planned."""
    cases = _cases(world)
    by_rank = get_pool(world).run(_compared, cases)
    for case, found in zip(cases, zip(*by_rank, strict=True), strict=True):
        for rank, comparison in enumerate(found):
            assert comparison.bitwise, f"{case}, rank {rank}: {comparison.worst} by {comparison.max_difference}"
            assert comparison.max_difference == 0.0
        abouts = [comparison.about for comparison in found]
        assert_counted([comparison.traffic for comparison in found], [about for about, _ in abouts])
        print(case, [num for _, num in abouts], [c.traffic.exchanges for c in found])
