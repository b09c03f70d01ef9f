"""Tests of layouts on meshes: each rank must store the elements that `torch.chunk` selects."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from shardmuon.layout.engines.base import Extent, Stored
from shardmuon.layout.engines.dtensor import DTensorEngine
from shardmuon.layout.mesh import OnMesh, Shard
from shardmuon.layout.views import Ints


def share(indices: torch.Tensor, num_parts: int, part: int, before: int = 1) -> torch.Tensor:
    """Chunk `indices` into `before` shards and each shard into `num_parts` parts. Return the indices in part number
    `part` of every shard. A shard has no such part if `torch.chunk` returns fewer parts than requested."""
    cut = [shard.chunk(num_parts) for shard in indices.chunk(before)]
    return torch.cat([indices[:0], *(parts[part] for parts in cut if part < len(parts))])


@given(st.data())
@settings(max_examples=300)
def test_factors_say_the_order_in_which_axes_cut(data: st.DataObject) -> None:
    """Split factors must determine the order in which mesh axes shard a dim. For example, `fully_shard` shards
    tensor-parallel shards, so the second mesh axis shards first. The split factor of an axis is the product of the
    sizes of all later axes that shard before it, including axes that have been gathered since."""
    mesh = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    # `order` lists the mesh axes in the order in which they shard the dim.
    order = data.draw(st.permutations(range(len(mesh))))
    gathered = data.draw(st.integers(1, 3))
    size = data.draw(st.integers(1, 40))
    placements = []
    for axis in range(len(mesh)):
        before = [mesh[other] for other in order[: order.index(axis)] if other > axis]
        placements.append(Shard(0, math.prod(before) * (gathered if axis == order[-1] else 1)))
    expected = []
    for place in itertools.product(*map(range, mesh)):
        rows = torch.arange(size)
        for axis in order:
            rows = share(rows, mesh[axis], place[axis], gathered if axis == order[-1] else 1)
        expected.append(rows.tolist())
    found = OnMesh(mesh, tuple(range(math.prod(mesh))), tuple(placements)).reading((size, 3))
    for (of_rank, _), rows in zip(found.values(), expected, strict=True):
        boxes = [held.piece for held in sorted(of_rank, key=lambda held: held.local)]
        assert [row for box in boxes for row in range(box[0][0], box[0][0] + box[1][0])] == rows


def stored_by(shape: Ints, mesh: Ints, placements: tuple[Shard | None, ...], found: Sequence[Ints]) -> Stored:
    """Return the layout that DTensorEngine derives if the ranks' local shards have the shapes `found`."""
    extents = dict(enumerate(map(Extent, found)))
    return DTensorEngine().stored((shape, OnMesh(mesh, tuple(extents), placements)), extents, ())


def test_storages_of_nothing_correspond_whatever_their_shape() -> None:
    first, second = (stored_by((2, 3), (3,), (Shard(0),), [(1, 3), (1, 3), (0, n)]) for n in (0, 3))
    assert first == second


def test_storages_that_placements_do_not_explain_are_refused() -> None:
    """Local shards whose shapes contradict the placements must cause an error. In the first case, the mesh axes shard
    13 rows from left to right, as in torch's `distribute_tensor`, but the split factor in the placements says that they
    shard from right to left."""
    halves = [part.chunk(3) for part in torch.arange(13).chunk(2)]
    shares = [torch.cat([half[dp] for half in halves]).chunk(2) for dp in range(3)]
    left_to_right = [(len(shares[dp][tp]), 3) for dp in range(3) for tp in range(2)]
    for shape, mesh, placements, found in (
        ((13, 3), (3, 2), (Shard(0, 2), Shard(0)), left_to_right),
        ((8, 8), (2, 2), (Shard(0), Shard(1)), [(8, 8)] * 4),
        ((8, 8), (2,), (Shard(0, 2),), [(5, 8), (3, 8)]),
        ((9, 2), (2,), (Shard(0),), [(4, 2), (5, 2)]),
    ):
        with pytest.raises(ValueError, match=r"cannot tell which elements a rank holds.* Place it by fully_shard"):
            stored_by(shape, mesh, placements, found)
