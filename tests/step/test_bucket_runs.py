"""Tests that execute whole plans on simulated ranks, and compare the results bitwise with steps on unsharded
tensors."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import torch
from dense_step import DenseMuon
from drawn import models
from hypothesis import given, settings
from simulated import EACH, SimulatedRanks, cut, planned

from shardmuon import Muon
from shardmuon.layout.pieces import ParamLayout
from shardmuon.layout.views import MatrixView, matrix_view, row_major
from shardmuon.plan.plan import Policy
from shardmuon.plan.program import BufferPlace, Load
from shardmuon.price.machines import MACHINES
from shardmuon.step import update as update_module
from shardmuon.step.update import Side

# Each case gives optimizer options, the dtype of the weights, and the maximum number of elements that are updated at a
# time.
CASES: dict[str, tuple[dict[str, Any], torch.dtype, int]] = {
    "plain": ({}, torch.float32, 1 << 17),
    "no nesterov": (
        {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"},
        torch.float32,
        150,
    ),
    "cautious": ({"variant": "normuon+cautious", "ns_coefficients": "polar_express"}, torch.bfloat16, 64),
}
POLICIES = [EACH, *(Policy(bucket_bytes=size) for size in (1, 200, 1500, 1 << 20))]
POLICIES += [Policy(9000, machine) for machine in MACHINES.values()]


@settings(max_examples=150)
@given(
    model=models(), case=st.sampled_from(list(CASES)), policy=st.sampled_from(POLICIES), seed=st.integers(0, 1 << 16)
)
def test_simulated_ranks_have_the_bits_of_the_formula(
    model: list[tuple[ParamLayout, dict[str, Any]]], case: str, policy: Policy, seed: int
) -> None:
    """Step a random model on simulated ranks, with random options and a random bucket size. The lr changes in each of
    three steps, and one gradient is missing in the second step. Weights and momentum must match a step on the full
    tensors bitwise."""
    options, dtype, portion = CASES[case]
    torch.manual_seed(seed)
    weights = [torch.randn(layout.view.shape).to(dtype) for layout, _ in model]
    given_groups = [{"params": [w], **view} for w, (_, view) in zip(weights, model, strict=True)]
    groups = Muon(given_groups, lr=0.05, **options).param_groups
    plan = planned([layout for layout, _ in model], groups, policy=policy)
    ranks, dense = SimulatedRanks(plan, weights), DenseMuon(weights, groups)
    with mock.patch.multiple(update_module, _PORTION=portion, _MANY=2):
        for step in range(3):
            grads = [None if step == 1 and i == 0 else torch.randn_like(w) for i, w in enumerate(weights)]
            for group in groups:
                group["lr"] = 0.05 / (1 + step)
            dense.step(grads, groups)
            ranks.step(grads, groups)
    for s, of, found, momenta in zip(plan.specs, dense.params, ranks.weights, ranks.momenta, strict=True):
        expected = of.weight, of.state.get("momentum_buffer", torch.zeros_like(of.weight))
        for storages, whole in zip((found, momenta), expected, strict=True):
            for rank, storage in cut(s.layout, whole).items():
                assert torch.equal(storages[rank], storage), (s.name, rank)
    assert len(plan.items) == sum(len(layout.view.matrices) for layout, _ in model)
    assert ranks.orthogonalized == sum(len(i.owners) * (2 if i.param == 0 else 3) for i in plan.items)


def _loads(view: MatrixView) -> list[Load]:
    """Return `Load` objects that copy all tiles (blocks that belong to one matrix) of an unsharded tensor into a
    contiguous buffer, one tile after another."""
    tiles = [tile for by_rank in ParamLayout.replicated(view, (0,)).tiles for tile in by_rank[0]]
    starts = itertools.accumulate((tile.numel for tile in tiles), initial=0)
    return [Load(0, t, BufferPlace(at, row_major(t.sizes))) for t, at in zip(tiles, starts, strict=False)]


def test_a_side_reads_the_strides_of_every_tensor_that_it_is_given() -> None:
    """A `Side` returns views of the blocks of a tensor. The test passes it storages with different strides in turn:
    row-major, transposed, strided with an offset, and row-major again. The `Side` must read the same values from each
    storage. A second `Side` must read blocks that are stored in reverse order in a buffer."""
    view = matrix_view((6, 8), split_sizes=(2, 1), split_groups=2)
    loads, whole = _loads(view), torch.arange(48.0).view(6, 8)
    side = Side(loads, [view], [view.shape])
    expected = torch.cat([t.flatten() for t in side.of([whole])])
    for storage in (whole.clone(), whole.T.contiguous().T, torch.stack([-whole, whole], -1)[..., 1], whole.clone()):
        buffer = torch.zeros(48)
        for tile, target in zip(side.of([storage]), side.on(buffer), strict=True):
            target.copy_(tile)
        assert torch.equal(expected, buffer)
    places = (load.place._replace(start=start) for load, start in zip(loads, (16, 0), strict=True))
    backwards = [load._replace(place=place) for load, place in zip(loads, places, strict=True)]
    found = Side(backwards, [view], [view.shape]).on(torch.arange(48.0))
    assert [float(tile.flatten()[0]) for tile in found] == [16, 0]


def test_a_tile_that_is_all_of_its_storage_is_the_storage() -> None:
    view, whole = matrix_view((6, 8)), torch.ones(6, 8)
    assert Side(_loads(view), [view], [view.shape]).of([whole])[0] is whole
