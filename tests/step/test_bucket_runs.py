"""Buckets on simulated and on real ranks: weights have the bits of one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dense_step import DenseMuon
from simulated import (
    EACH,
    LAYOUTS,
    OPTIONS,
    REPLICATED,
    VIEWS,
    SimulatedRanks,
    cut,
    group_of,
    in_both,
    in_turn,
    planned,
    sharded,
)
from torch import Tensor

from shardmuon import Muon
from shardmuon.comm.groups import Traffic, group_for
from shardmuon.layout.pieces import FlatRange
from shardmuon.layout.table import ParamLayout
from shardmuon.layout.views import MatrixView, matrix_view
from shardmuon.orthogonalize.choice import Chooser
from shardmuon.plan.plan import Policy, Spec, make_plan
from shardmuon.plan.program import Load, make_program
from shardmuon.step import update as update_module
from shardmuon.step.binding import groups_of
from shardmuon.step.bucket import Bound, Buckets, Kernel, Work, run_buckets
from shardmuon.step.options import settings_of
from shardmuon.step.update import Side
from shardmuon.testing import RankPool

CASES: dict[str, tuple[dict[str, Any], torch.dtype, int]] = {  # options, dtype, elements in one call
    "plain": ({}, torch.float32, 1 << 17),
    "l2": ({"nesterov": False, "weight_decay_mode": "l2", "adjust_lr_fn": "match_rms_adamw"}, torch.float32, 150),
    "cautious": ({"weight_decay_mode": "cautious", "ns_coefficients": "polar_express"}, torch.bfloat16, 1 << 17),
}
_SHARED = [(case, layout, Policy(bucket_bytes=1500)) for case, layout in in_turn(CASES, every=2)]
_APART = [(case, layout, EACH) for case, layout in in_turn(CASES, REPLICATED, every=1)]


@pytest.mark.parametrize(("case", "layout", "policy"), in_both([*_SHARED, *_APART]))
def test_simulated_ranks_give_the_bits_of_one_process(
    case: str, layout: str, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every view twice, small buckets, four steps with changing lr, gradients missing in one of them; tiles of several
    parameters are stepped in one call, or few of them in each."""
    options, dtype, portion = CASES[case]
    monkeypatch.setattr(update_module, "PORTION", portion)
    torch.manual_seed(3)
    views = [(name, make()) for name, make in VIEWS.items() for _ in (0, 1)]
    weights = [torch.randn(view.shape).to(dtype) for _, view in views]
    given = [{"params": [w], **OPTIONS[name]} for (name, _), w in zip(views, weights, strict=True)]
    groups = Muon(given, lr=0.05, **options).param_groups
    plan = planned([LAYOUTS[layout](view) for _, view in views], groups, policy=policy)
    ranks, dense = SimulatedRanks(plan, weights), DenseMuon(weights, groups, Chooser("auto", None))
    for step in range(4):
        grads = [None if step == 2 and i in (0, 5) else torch.randn_like(w) for i, w in enumerate(weights)]
        for group in groups:
            group["lr"] = 0.05 / (1 + step)
        dense.step(grads, groups)
        ranks.step(grads, groups)
        for number, (s, expected) in enumerate(zip(plan.specs, dense.params, strict=True)):
            for rank, storage in cut(s.layout, expected.weight).items():
                assert torch.equal(ranks.weights[number][rank], storage), (step, views[number][0], rank)
            for rank, storage in cut(s.layout, expected.state["momentum_buffer"]).items():
                assert torch.equal(ranks.momenta[number][rank], storage), (step, views[number][0], rank)


Family = Callable[[MatrixView, int], ParamLayout]  # of a view, and its number


def _one_for_all(name: str) -> Family:
    return lambda view, number: LAYOUTS[name](view)


def _crossed(view: MatrixView, number: int) -> ParamLayout:
    """Replicas on ranks 0, 2, 3, then shards on 1, 2 in several buckets, then on 2, 3: rank 2 has buckets between two
    that it shares with rank 3, and rank 3 has none."""
    grids: dict[str, list[tuple[int, ...]]] = {"experts": [(0,), (2,), (3,)], "plain": [(2, 3)], "kernel": [(2, 3)]}
    return sharded(view, grids.get(list(VIEWS)[number], [(1, 2)]), 0)


FAMILIES: dict[str, Family] = {
    **{name: _one_for_all(name) for name in LAYOUTS},
    **{f"{name}, each for itself": _one_for_all(name) for name in REPLICATED},
    "crossed": _crossed,
}


def _three_steps(names: Sequence[str]) -> dict[str, list[Tensor]]:
    """Return this rank's part of each weight after three steps on real ranks, by family; a gradient is missing once."""
    rank, found = dist.get_rank(), {}
    for name in names:
        torch.manual_seed(4)
        views = [make() for make in VIEWS.values()]
        layouts = [FAMILIES[name](view, number) for number, view in enumerate(views)]
        group = group_of()
        settings, policy = settings_of(group), Policy(bucket_bytes=1500 if name != "crossed" else 600)
        if name.endswith("each for itself"):
            policy = EACH
        plan = planned(layouts, [group] * len(views), policy=policy)
        mine = [bucket for bucket in plan.buckets if rank in bucket.ranks]
        for ranks in groups_of(mine):  # before the first exchange
            group_for(ranks)
        weights = [cut(layout, torch.randn(view.shape)).get(rank) for layout, view in zip(layouts, views, strict=True)]
        momenta = [None if w is None else torch.zeros_like(w) for w in weights]
        shapes = [() if w is None else tuple(w.shape) for w in weights]
        for step in range(3):
            missing = {1} if step == 1 else set()
            grads = [
                cut(layout, torch.randn(view.shape)).get(rank) for layout, view in zip(layouts, views, strict=True)
            ]
            grads = [None if i in missing else grad for i, grad in enumerate(grads)]
            bounds = [Bound(plan, make_program(plan, bucket, rank, missing), shapes) for bucket in mine]
            work = Work(weights, grads, momenta, [settings] * len(views))
            run_buckets(Buckets.of(bounds), work, Kernel(), Traffic())
        found[name] = [torch.empty(0) if w is None else w for w in weights]
    return found


def test_real_ranks_give_the_bits_of_one_process(world4: RankPool) -> None:
    """Every layout, all views in one plan, and sets that cross; over gloo, with two buckets in flight."""
    everyone = world4.run(_three_steps, list(FAMILIES))
    for name, layout_of in FAMILIES.items():
        torch.manual_seed(4)
        views = [make() for make in VIEWS.values()]
        whole = [torch.randn(view.shape).requires_grad_() for view in views]
        optimizer = Muon([{"params": [p], **OPTIONS[v]} for v, p in zip(VIEWS, whole, strict=True)], lr=0.05)
        for step in range(3):
            for number, p in enumerate(whole):
                grad = torch.randn(p.shape)
                p.grad = None if step == 1 and number == 1 else grad
            optimizer.step()
        for number, (view, p) in enumerate(zip(views, whole, strict=True)):
            for rank, storage in cut(layout_of(view, number), p.detach()).items():
                assert torch.equal(everyone[rank][name][number], storage), (name, view.shape, rank)


def test_a_side_reads_the_strides_of_every_tensor_that_it_is_given() -> None:
    """The same tiles in a row-major storage, a transposed one, one with gaps that begins in the middle of memory, and
    again in a row-major one; then in a buffer that has them in the opposite order."""
    view = matrix_view((6, 8), split_sizes=(2, 1), split_groups=2)
    (side, whole, loads) = _side(view)
    for storage in (whole.clone(), whole.T.contiguous().T, torch.stack([-whole, whole], -1)[..., 1], whole.clone()):
        assert storage.shape == whole.shape
        buffer = torch.zeros(64)
        for tile, target in zip(side.of([storage]), side.on(buffer), strict=True):
            target.copy_(tile)
        assert torch.equal(torch.cat([t.flatten() for t in side.of([whole.contiguous()])]), buffer[: whole.numel()])
    assert sum(load.tile.numel for load in loads) == whole.numel()
    size = loads[0].tile.numel
    backwards = [load._replace(place=load.place._replace(start=64 - size - load.place.start)) for load in loads[:2]]
    buffer = torch.arange(64.0)
    found = Side(backwards, [view], [view.shape]).on(buffer)
    assert (
        [float(tile.flatten()[0]) for tile in found]
        == [load.place.start for load in backwards]
        == [64 - size, 64 - 2 * size]
    )


def test_a_tile_that_is_all_of_its_storage_is_the_storage() -> None:
    side, whole, _ = _side(matrix_view((6, 8)))
    assert side.of([whole])[0] is whole


def _side(view: MatrixView) -> tuple[Side, Tensor, tuple[Load, ...]]:
    """The tiles of a whole tensor, packed in a buffer, as an owner elsewhere would get them."""
    layout = LAYOUTS["one"](view)
    flat = dataclasses.replace(layout, ranks=(0, 2), held=((), layout.held[0]))
    count = len(view.matrices)
    plan = make_plan([Spec("p", flat, ("standard float32",) * count, (1,) * count)], Policy())
    found = make_program(plan, plan.buckets[0], 2)
    loads = found.own or found.foreign
    packed, at = [], 0
    for load in loads:
        packed.append(Load(load.param, load.tile, load.place._replace(start=at, strides=_packed(load.tile.sizes))))
        at += load.tile.numel
    assert not any(isinstance(load.tile.held.piece, FlatRange) for load in loads)
    whole = torch.arange(float(48)).view(view.shape)
    return Side(packed, [view], [view.shape]), whole, tuple(packed)


def _packed(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(torch.empty(tuple(sizes)).stride())
