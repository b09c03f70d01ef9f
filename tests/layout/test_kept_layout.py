"""Layouts of variant state: beside the experts whose they are, or everywhere."""

from __future__ import annotations

from typing import cast

import pytest
import torch
import torch.distributed as dist

from shardmuon import Muon
from shardmuon._torch import local_if_any
from shardmuon.layout.bind import Listed, bind
from shardmuon.layout.engines import engine_of
from shardmuon.layout.mesh import OnMesh, Placements
from shardmuon.layout.pieces import Box
from shardmuon.layout.table import kept_layout
from shardmuon.layout.views import Ints, kept_view
from shardmuon.options import view_options
from shardmuon.testing import RankPool
from shardmuon.testing.layouts import LAYOUTS, PARAMS, parameters

STACKS = {name: case for name, case in PARAMS.items() if case.options.get("view") == "stack"}


def _rows(layout: str) -> dict[str, tuple[list[int], list[int], int]]:
    """Experts of each stack of which this rank has numbers, by its table and by what it stores, and how many it
    has numbers of. Experts hold their own number."""
    world, case, rank, found = dist.get_world_size(), LAYOUTS[layout], dist.get_rank(), {}
    full = {name: torch.empty(c.shape) for name, c in STACKS.items()}
    for one in full.values():
        one.copy_(torch.arange(len(one)).view(-1, 1, 1).expand_as(one))
    built = parameters(case.build(full, case.mesh(world)))
    groups_of = [{"params": [p], **STACKS[name].options} for name, p in built.items()]
    optimizer = Muon(groups_of, lr=0.1, **case.options(world))
    groups = dict(zip(built, optimizer.param_groups, strict=True))
    listed = [Listed(name, name, p, groups[name], view_options(groups[name])) for name, p in built.items()]
    table = bind(rank, listed)
    for one, of_param in zip(table.params, table.layouts, strict=True):
        engine, place = engine_of(one.param), None
        if engine.believes_placements:
            form = engine.claim(one.param, one.group).form
            _, mesh, ranks, placements = cast("tuple[Ints, Ints, Ints, Placements]", form)
            place = OnMesh(mesh, ranks, placements)
        view = kept_view(of_param.view, [3] * len(of_param.view.matrices))
        mine = kept_layout(of_param, view, place).of_rank(rank)
        told: dict[int, int] = {}  # row of what is kept here -> expert
        for held in mine:
            assert isinstance(held.piece, Box)
            told |= {held.local[0] + i: held.piece.offset[0] + i for i in range(held.piece.size[0])}
        storage = local_if_any(one.param).detach()
        stored = [int(expert.flatten()[0]) for expert in storage] if storage.numel() else []
        found[one.name] = [told[row] for row in sorted(told)], stored, len(view.matrices)
    return found


@pytest.mark.parametrize("layout", ["ep", "ep+fsdp", "fsdp2", "hsdp", "two dims", "one dim twice", "lone strided"])
def test_a_rank_has_the_numbers_of_the_experts_that_it_stores(layout: str, world4: RankPool) -> None:
    """Numbers lie in the order of the experts; where no axis cuts the experts, a rank has those of all."""
    for found in world4.run(_rows, layout):
        for name, (told, stored, _) in found.items():
            num_experts = STACKS[name].shape[0]
            assert told == stored or not stored or told == list(range(num_experts)), (name, told, stored)
            if layout in ("ep", "ep+fsdp", "fsdp2", "lone strided") and stored:
                assert told == stored, name


@pytest.mark.parametrize("layout", ["ddp", "tp column", "mcore buffers", "megatron-fsdp"])
def test_on_no_mesh_that_cuts_experts_every_rank_has_all_numbers(layout: str, world4: RankPool) -> None:
    for found in world4.run(_rows, layout):
        assert all(told == list(range(STACKS[name].shape[0])) for name, (told, _, _) in found.items())
