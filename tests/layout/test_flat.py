"""Tests of flat shards: which part of a matrix each range of a flat buffer covers, and which inconsistent ranges raise
errors."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from megatron_gpt import tensor_parallel_part
from simulated import stored
from torch import nn

from shardmuon import Muon
from shardmuon.comm.groups import GroupRef
from shardmuon.frameworks.deepspeed import _make_shard, _Slice
from shardmuon.layout.engines.flat import FlatShard
from shardmuon.layout.mesh import Cut
from shardmuon.layout.pieces import ParamLayout
from shardmuon.layout.views import matrix_view
from shardmuon.momentum.keeper import offloaded_from
from shardmuon.step.binding import Offer


@pytest.mark.parametrize(
    ("shape", "cut", "options"),
    [
        ((7, 5), None, {}),
        ((12, 5), Cut(0, 1), {}),
        ((12, 5), Cut(0, 2), {"split_sizes": (6, 6)}),
        ((7, 12), Cut(1, 1), {}),
        ((12, 6), Cut(1, 1), {"split_sizes": (4, 1, 1), "split_groups": 2}),
        ((6, 4, 3), Cut(0, 1), {"view": "stack"}),
        ((6, 4, 3, 2), Cut(0, 1), {}),
    ],
)
@pytest.mark.parametrize("num_parts", [2, 3])
def test_flat_ranges_of_a_shard_hold_what_slicing_it_gives(
    shape: tuple[int, ...], cut: Cut | None, options: dict[str, object], num_parts: int
) -> None:
    draw = random.Random(0)
    full = torch.arange(math.prod(shape)).view(shape)
    view = matrix_view(shape, **options)  # type: ignore[arg-type]
    parallel = None if cut is None else GroupRef(tuple(range(num_parts)))
    for _ in range(10):
        held, wanted = [], []
        for part in range(num_parts if cut is not None else 1):
            of_part = full if cut is None else tensor_parallel_part(full, part, num_parts, cut.dim, cut.stride)
            shard = of_part.flatten()
            edges = sorted(draw.randint(0, len(shard)) for _ in range(3))
            for start, stop in itertools.pairwise([0, *edges, len(shard)]):
                described = FlatShard(shape, start, None, "flat buffers", parallel, cut)
                held.append(described.held(stop - start, part))
                wanted.append(shard[start:stop])
        layout = ParamLayout(view, tuple(range(len(wanted))), tuple(held))
        assert all(torch.equal(stored(of, full), one) for of, one in zip(layout.held, wanted, strict=True))


@pytest.mark.parametrize(
    ("shape", "cut", "message"),
    [
        ((6, 4, 3), Cut(1, 1), "2-D tensors and stride 1"),
        ((6, 8), Cut(1, 2), "2-D tensors and stride 1"),
        ((6, 5), Cut(1, 1), "does not divide it in equal parts"),
        ((6, 4), Cut(0, 2), "does not divide it in equal parts"),
    ],
)
def test_tensor_parallel_shards_whose_ranges_cannot_be_told_are_refused(
    shape: tuple[int, ...], cut: Cut, message: str
) -> None:
    shards = GroupRef((0, 1))
    with pytest.raises(ValueError, match=message):
        FlatShard(shape, 0, GroupRef((0,)), "flat buffers", shards, cut)


def test_partitions_that_are_offloaded_say_where_they_belong() -> None:
    """With offloading, DeepSpeed's flat buffers are on the CPU, but the model's parameters are on the accelerator (here
    replaced with the "meta" device). Orthogonalization methods must be chosen for the accelerator."""
    model, flat = nn.Parameter(torch.empty(4, 6, device="meta")), nn.Parameter(torch.zeros(30))
    shard = _make_shard(flat, _Slice(model, 5, 12, 8), None)
    on_one = _make_shard(flat, _Slice(nn.Parameter(torch.zeros(4, 6)), 5, 12, 8), None)
    assert [offloaded_from(p) for p in (shard, on_one, nn.Parameter(torch.zeros(3)))] == [
        torch.device("meta"),
        None,
        None,
    ]
    optimizers = [Muon([p], lr=1e-3) for p in (shard, on_one)]
    places = [
        Offer(one.param_groups, one.options.read(one.param_groups), one.config, one.keeper).ns_device
        for one in optimizers
    ]
    assert places == [torch.device("meta"), None]
