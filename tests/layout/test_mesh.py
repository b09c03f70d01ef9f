"""Pieces on meshes: what each rank stores by its placements, beside the present engine and torch's own sharding."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import _StridedShard

from shardmuon.engines.dtensor import mesh_layouts
from shardmuon.layout.mesh import Placements, Shard, believed, readings
from shardmuon.layout.pieces import Box, Held, partition_fault
from shardmuon.planning.views import matrix_view

MESHES = [(4,), (2, 3), (3, 2), (2, 2, 2)]
KINDS = [None, Shard(0), Shard(1), Shard(0, 2), Shard(0, 3), Shard(1, 2)]
SHAPES = [(8, 12), (7, 5), (1, 3), (12, 4)]


def cases() -> list[tuple[tuple[int, int], tuple[int, ...], Placements]]:
    """Every pair of placements on meshes of one and two axes, and some on three."""
    found = [
        (shape, mesh, kinds)
        for mesh in MESHES[:3]
        for kinds in itertools.product(KINDS, repeat=len(mesh))
        for shape in SHAPES
    ]
    return found + [((9, 10), (2, 2, 2), kinds) for kinds in itertools.product(KINDS[:4], repeat=3)]


def test_both_readings_are_those_of_the_present_engine() -> None:
    """376 meshes and placements: the same boxes at the same places of the same storage, likeliest reading first."""
    for shape, mesh, kinds in cases():
        ranks = tuple(range(math.prod(mesh)))
        theirs = mesh_layouts(matrix_view(shape), mesh, ranks, tuple(map(_torchs, kinds)))
        found = readings(shape, mesh, kinds)
        assert len(found) == len(theirs)
        for reading, (layout, shapes) in zip(found, theirs, strict=True):
            for rank, (held, stored) in zip(ranks, reading, strict=True):
                expected = [(h.piece.offset, h.piece.size, h.local) for h in layout.holders_of(rank)]
                assert [(*h.piece, h.local) for h in held] == expected and stored == shapes[rank]


def _torchs(kind: Shard | None) -> object:
    if kind is None:
        return Replicate()
    return TorchShard(kind.dim) if kind.factor == 1 else _StridedShard(kind.dim, split_factor=kind.factor)


def test_what_ranks_store_decides_between_readings() -> None:
    """13 rows on 3 x 2 ranks: tensor parallelism in 2 (7 and 6 rows), then each part in 3. Read from left to right
    the same placements name other rows, and say that other ranks store most."""
    shape, mesh, placements = (13, 3), (3, 2), (Shard(0, 2), Shard(0))
    by_tp = [part.chunk(3) for part in torch.arange(13).chunk(2)]
    nested = [by_tp[tp][dp].tolist() for dp in range(3) for tp in range(2)]
    assert _rows(believed(shape, mesh, placements, [(len(rows), 3) for rows in nested])) == nested
    # what torch's own distribute_tensor makes of these placements: each rank's share of both halves, cut again by tp
    halves = [part.chunk(3) for part in torch.arange(13).chunk(2)]
    shares = [torch.cat([half[dp] for half in halves]).chunk(2) for dp in range(3)]
    other = [shares[dp][tp].tolist() for dp in range(3) for tp in range(2)]
    assert _rows(believed(shape, mesh, placements, [(len(rows), 3) for rows in other])) == other
    assert other != nested


def _rows(pieces: Sequence[Sequence[Held]]) -> list[list[int]]:
    """The rows that each rank stores, in the order in which it does."""
    boxes = [[held.piece for held in sorted(of_rank, key=lambda held: held.local)] for of_rank in pieces]
    return [[row for box in of_rank for row in range(box[0][0], box[0][0] + box[1][0])] for of_rank in boxes]


def test_rows_in_shares_of_any_size_follow_each_other() -> None:
    """Two replicas of a tensor of 9 rows, of which ranks store 5, 0 and 4."""
    stored = [(5, 2), (0, 2), (4, 2)] * 2
    found = believed((9, 2), (2, 3), (None, Shard(0)), stored)
    expected = [(Held(Box((first, 0), size), (0, 0)),) for first, size in zip((0, 5, 5), stored[:3], strict=True)]
    assert list(found) == expected * 2
    assert partition_fault((9, 2), [held.piece for of_rank in found for held in of_rank]) is None


def test_storages_of_nothing_correspond_whatever_their_shape() -> None:
    """Two rows on three ranks: the last one stores nothing, in a shape that no placement says."""
    found = believed((2, 3), (3,), (Shard(0),), [(1, 3), (1, 3), (0, 0)])
    assert found == believed((2, 3), (3,), (Shard(0),), [(1, 3), (1, 3), (0, 3)])


def test_storages_that_no_placement_explains_are_refused() -> None:
    with pytest.raises(ValueError, match=r"cannot tell which elements a rank holds"):
        believed((8, 8), (2, 2), (Shard(0), Shard(1)), [(8, 8)] * 4)
    with pytest.raises(ValueError, match=r"cannot tell which elements a rank holds"):
        believed((8, 8), (2,), (Shard(0, 2),), [(5, 8), (3, 8)])
    too_many = believed((8, 8), (2,), (Shard(0),), [(5, 8), (4, 8)])
    assert "out of bounds" in str(partition_fault((8, 8), [held.piece for of_rank in too_many for held in of_rank]))
