"""Random shapes, meshes, placements and flat ranges on simulated ranks: always the dense update, bit for bit."""

from __future__ import annotations

import itertools
import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from shardmuon import Muon, Orthogonalizer
from shardmuon._torch import strided_shard
from shardmuon.engines.dtensor import mesh_layouts
from shardmuon.planning.layout import Box, FlatRange, Holder, ParamLayout
from shardmuon.planning.plan import make_plan
from shardmuon.planning.types import ParamSpec, Policy
from shardmuon.planning.views import MatrixView, matrix_view
from shardmuon.testing.cases import cut_matrices
from shardmuon.testing.simulate import SimulatedRanks, shard, unshard

StridedShard = strided_shard()


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
    placements: list[Placement] = [Replicate() if draw(st.booleans()) else Shard(draw(dims)) for _ in mesh]
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard) and draw(st.booleans()):
            later = [mesh[a] for a in range(axis + 1, len(mesh)) if placements[a] == placement]
            factor = math.prod(later) if later else draw(st.sampled_from([1, 2, 3]))
            if factor > 1:
                placements[axis] = StridedShard(placement.dim, split_factor=factor)
    readings = mesh_layouts(view, mesh, tuple(range(math.prod(mesh))), tuple(placements))
    return draw(st.sampled_from(readings))[0]


@st.composite
def flat_layout(draw: st.DrawFn, view: MatrixView, ranks: int) -> ParamLayout:
    """Flat partitions with random borders, some empty, some ranks holding two runs (sub-groups of a partition)."""
    numel = math.prod(view.shape)
    num_cuts = draw(st.integers(0, 2 * ranks - 1))
    cuts = sorted(draw(st.lists(st.integers(0, numel), min_size=num_cuts, max_size=num_cuts)))
    edges = [0, *cuts, numel]
    at = [0] * ranks
    holders = []
    for i, (start, stop) in enumerate(itertools.pairwise(edges)):
        rank = i % ranks
        holders.append(Holder(rank, FlatRange(start, stop), (at[rank],)))
        at[rank] += stop - start
    return ParamLayout(view, tuple(range(ranks)), tuple(holders))


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


@settings(max_examples=150)
@given(model=models(), seed=st.integers(0, 2**16), bucket_bytes=st.sampled_from([1, 200, 1 << 20]))
def test_simulated_ranks_equal_one_process_bitwise(
    model: list[tuple[ParamLayout, dict[str, object]]], seed: int, bucket_bytes: int
) -> None:
    specs = [ParamSpec(str(i), layout) for i, (layout, _) in enumerate(model)]
    plan = make_plan(specs, Policy(bucket_bytes=bucket_bytes, wire_bytes=4))
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(layout.shape, generator=generator) for layout, _ in model]
    simulated = SimulatedRanks.of(plan, weights)
    dense = [torch.nn.Parameter(w.clone()) for w in weights]
    groups = [{"params": [p], **options} for p, (_, options) in zip(dense, model, strict=True)]
    optimizer = Muon(groups, lr=0.02, orthogonalizer=Orthogonalizer(method="standard", dtype=torch.float32))
    for _ in range(2):
        grads = [torch.randn(w.shape, generator=generator) for w in weights]
        for p, g in zip(dense, grads, strict=True):
            p.grad = g
        optimizer.step()
        simulated.step(grads)
    for found, expected in zip(simulated.full_weights(), dense, strict=True):
        assert torch.equal(found, expected)
    num_matrices = sum(len(layout.view.matrices) for layout, _ in model)
    assert simulated.orthogonalized == 2 * num_matrices
    assert simulated.exchanges == 4 * sum(b.exchange for b in plan.buckets)


@given(data=st.data())
def test_fragments_partition_every_matrix(data: st.DataObject) -> None:
    ((layout, _), *_) = data.draw(models())
    full = torch.arange(math.prod(layout.shape), dtype=torch.float64).view(layout.shape)
    storages = {rank: shard(full, layout.holders_of(rank)) for rank in layout.ranks}
    wholes = cut_matrices(layout.view, full)
    for matrix, by_rank, whole in zip(layout.view.matrices, layout.fragments, wholes, strict=True):
        assert (matrix.rows, matrix.cols) == whole.shape
        painted = torch.zeros(matrix.rows, matrix.cols)
        for rect in {f.rect for fragments in by_rank.values() for f in fragments}:
            row, col, num_rows, num_cols = rect
            painted[row : row + num_rows, col : col + num_cols] += 1
        assert (painted == 1).all()
        for rank, fragments in by_rank.items():
            for f in fragments:
                stored = f.select_local(storages[rank])
                assert torch.equal(stored.reshape(f.num_rows, f.num_cols), f.select_matrix(whole))
                assert stored.untyped_storage().data_ptr() == storages[rank].untyped_storage().data_ptr()
                assert torch.equal(
                    f.as_stored().select_local(storages[rank]).flatten().sort()[0], stored.flatten().sort()[0]
                )


@given(data=st.data())
def test_sharding_and_unsharding_is_the_identity(data: st.DataObject) -> None:
    ((layout, _), *_) = data.draw(models())
    full = torch.arange(math.prod(layout.shape), dtype=torch.float32).view(layout.shape)
    storages = {rank: shard(full, layout.holders_of(rank)) for rank in layout.ranks}
    assert torch.equal(unshard(storages, layout), full)


@given(data=st.data(), amount=st.integers(1, 3))
def test_a_moved_border_is_a_gap_or_an_overlap(data: st.DataObject, amount: int) -> None:
    ((layout, _), *_) = data.draw(models().filter(lambda model: not model[0][0].has_replicas))
    victims = [i for i, h in enumerate(layout.holders) if isinstance(h.piece, FlatRange) and h.piece.numel]
    boxes = [i for i, h in enumerate(layout.holders) if isinstance(h.piece, Box) and h.piece.numel]
    index = data.draw(st.sampled_from(victims or boxes))
    holder = layout.holders[index]
    if isinstance(holder.piece, FlatRange):
        moved: FlatRange | Box = FlatRange(holder.piece.start + amount, holder.piece.stop + amount)
    else:
        moved = Box((holder.piece.offset[0] + amount, *holder.piece.offset[1:]), holder.piece.size)
    holders = (*layout.holders[:index], Holder(holder.rank, moved, holder.local), *layout.holders[index + 1 :])
    with pytest.raises(ValueError, match=r"gap|overlap|bounds|reach"):
        ParamLayout(layout.view, layout.ranks, holders)
