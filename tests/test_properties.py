"""Random shapes, meshes, placements and flat ranges on simulated ranks: always the dense update, bit for bit."""

from __future__ import annotations

import itertools
import math

import hypothesis.strategies as st
import torch
from hypothesis import given, settings
from simulated import SimulatedRanks, spec

from shardmuon import Muon, Orthogonalizer
from shardmuon.layout.mesh import Shard, readings
from shardmuon.layout.pieces import FlatRange, Held
from shardmuon.layout.table import ParamLayout
from shardmuon.layout.views import MatrixView, matrix_view
from shardmuon.plan.plan import Policy, make_plan


@st.composite
def views(draw: st.DrawFn) -> tuple[MatrixView, dict[str, object]]:
    kind = draw(st.sampled_from(["whole", "stack", "conv", "split", "interleaved", "heads", "columns", "turns"]))
    size = st.integers(1, 9)
    shape: tuple[int, ...]
    options: dict[str, object]
    if kind == "whole":
        shape, options = (draw(size), draw(size)), {}
    elif kind == "stack":
        shape, options = (draw(st.integers(1, 5)), draw(size), draw(size)), {"view": "stack"}
    elif kind == "conv":
        shape, options = (draw(size), draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 3))), {}
    elif kind == "heads":
        heads = draw(st.integers(1, 4))
        shape, options = (heads * draw(st.integers(1, 4)), draw(size)), {"num_heads": heads}
    elif kind in ("columns", "turns"):  # blocks of columns, or single columns by turns; in experts, too
        sizes = tuple(draw(st.lists(st.integers(1, 4 if kind == "columns" else 1), min_size=1, max_size=3)))
        groups = draw(st.integers(1, 4))
        experts = draw(st.integers(0, 3))
        shape = ((experts,) if experts else ()) + (draw(size), sum(sizes) * groups)
        options = {"split_sizes": sizes, "split_groups": groups, "split_dim": 1}
        options |= {"view": "stack"} if experts else {}
    else:
        sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
        groups = draw(st.integers(1, 3)) if kind == "interleaved" else 1
        shape = (sum(sizes) * groups, draw(size))
        options = {"split_sizes": sizes, "split_groups": groups}
    if draw(st.booleans()):
        options["transposed"] = True
    return matrix_view(shape, **options), options  # type: ignore[arg-type]


@st.composite
def mesh_layout(draw: st.DrawFn, view: MatrixView, mesh: tuple[int, ...]) -> ParamLayout:
    """Random placements, with strided shards wherever two axes may cut one dim in the other order."""
    dims = st.integers(0, len(view.shape) - 1)
    placements: list[Shard | None] = [None if draw(st.booleans()) else Shard(draw(dims)) for _ in mesh]
    for axis, placement in enumerate(placements):
        if placement is not None and draw(st.booleans()):
            later = [mesh[a] for a in range(axis + 1, len(mesh)) if placements[a] == placement]
            placements[axis] = Shard(placement.dim, math.prod(later) if later else draw(st.sampled_from([1, 2, 3])))
    reading = draw(st.sampled_from(readings(view.shape, mesh, tuple(placements))))
    return ParamLayout(view, tuple(range(math.prod(mesh))), tuple(held for held, _ in reading))


@st.composite
def flat_layout(draw: st.DrawFn, view: MatrixView, ranks: int) -> ParamLayout:
    """Flat partitions with random borders, some empty, some ranks holding two runs (sub-groups of a partition)."""
    numel = math.prod(view.shape)
    num_cuts = draw(st.integers(0, 2 * ranks - 1))
    cuts = sorted(draw(st.lists(st.integers(0, numel), min_size=num_cuts, max_size=num_cuts)))
    edges = [0, *cuts, numel]
    at = [0] * ranks
    held: list[list[Held]] = [[] for _ in range(ranks)]
    for i, (start, stop) in enumerate(itertools.pairwise(edges)):
        held[i % ranks].append(Held(FlatRange(start, stop), (at[i % ranks],)))
        at[i % ranks] += stop - start
    return ParamLayout(view, tuple(range(ranks)), tuple(map(tuple, held)))


@st.composite
def models(draw: st.DrawFn) -> list[tuple[ParamLayout, dict[str, object]]]:
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(lambda m: math.prod(m) <= 12)))
    model = []
    for _ in range(draw(st.integers(1, 4))):
        view, options = draw(views())
        flat = draw(st.integers(0, 2)) == 0
        layout = draw(flat_layout(view, math.prod(mesh)) if flat else mesh_layout(view, mesh))
        model.append((layout, options))
    return model


@settings(max_examples=100)
@given(model=models(), seed=st.integers(0, 2**16), bucket_bytes=st.sampled_from([1, 200, 1 << 20]))
def test_simulated_ranks_equal_one_process_bitwise(
    model: list[tuple[ParamLayout, dict[str, object]]], seed: int, bucket_bytes: int
) -> None:
    specs = [spec(str(i), layout) for i, (layout, _) in enumerate(model)]
    plan = make_plan(specs, Policy(bucket_bytes=bucket_bytes))
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(layout.view.shape, generator=generator) for layout, _ in model]
    simulated = SimulatedRanks(plan, weights)
    dense = [torch.nn.Parameter(w.clone()) for w in weights]
    groups = [{"params": [p], **options} for p, (_, options) in zip(dense, model, strict=True)]
    optimizer = Muon(groups, lr=0.02, orthogonalizer=Orthogonalizer(method="standard", dtype=torch.float32))
    for _ in range(2):
        grads = [torch.randn(w.shape, generator=generator) for w in weights]
        for p, g in zip(dense, grads, strict=True):
            p.grad = g
        optimizer.step()
        simulated.step(grads, optimizer.param_groups)
    for found, expected in zip(simulated.full_weights(), dense, strict=True):
        assert torch.equal(found, expected)
    assert len(plan.items) == sum(len(layout.view.matrices) for layout, _ in model)
    assert simulated.orthogonalized == 2 * sum(len(item.owners) for item in plan.items)
    moving = [bucket for bucket in plan.buckets if bucket.exchange]
    items = [[plan.items[n] for n in bucket.items] for bucket in moving]
    relays = [any(specs[i.param].layout.has_replicas and len(i.owners) == 1 for i in of) for of in items]
    assert simulated.exchanges == 2 * (2 * sum(bucket.gathers for bucket in moving) + sum(relays))
