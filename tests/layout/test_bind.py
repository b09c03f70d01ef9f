"""Tests of `bind`, which exchanges the ranks' descriptions of their parameters: the resulting layouts must list exactly
the elements that each rank stores."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from simulated import stored
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from shardmuon import Muon
from shardmuon._torch import local_if_any
from shardmuon.layout.bind import Listed, _grids_of, bind
from shardmuon.layout.engines import engine_of
from shardmuon.layout.engines.base import Ties
from shardmuon.layout.pieces import ParamLayout
from shardmuon.layout.views import matrix_view
from shardmuon.options import VIEW_DEFAULTS
from shardmuon.step.binding import fingerprint
from shardmuon.testing import RankPool
from shardmuon.testing.layouts import LAYOUTS, PARAMS, mesh_of, parameters

PARAMS_VIEWS = {name: matrix_view(case.shape, **case.options) for name, case in PARAMS.items()}


def _listed(params: Mapping[str, Tensor], options: Mapping[str, Any]) -> list[Listed]:
    groups = [{"params": [p], "param_names": [name], **PARAMS[name].options, **options} for name, p in params.items()]
    optimizer = Muon([{**g, "params": [(g["param_names"][0], g["params"][0])]} for g in groups], lr=0.1)
    return [
        Listed(name, name, p, group, {key: group[key] for key in VIEW_DEFAULTS})
        for (name, p), group in zip(params.items(), optimizer.param_groups, strict=True)
    ]


def _bound(name: str) -> tuple[list[str], list[bytes]]:
    """Return the names of the parameters whose layout does not describe what this rank stores, and the digests of all
    layouts that span every rank."""
    world, rank, case, wrong = dist.get_world_size(), dist.get_rank(), LAYOUTS[name], []
    full = {key: torch.arange(math.prod(c.shape), dtype=torch.float32).view(c.shape) for key, c in PARAMS.items()}
    listed = _listed(parameters(case.build(full, case.mesh(world))), case.options(world))
    table = bind(listed, fingerprint=fingerprint)
    for one, layout in zip(table.params, table.layouts, strict=True):
        storage, held = local_if_any(one.param).detach(), layout.of_rank(rank)
        fits = layout.view == PARAMS_VIEWS[one.name] and sum(h.piece.numel for h in held) == storage.numel()
        if not fits or not torch.equal(stored(held, full[one.name]).flatten(), storage.flatten()):
            wrong.append(one.name)
    return wrong, [layout.digest for layout in table.layouts if world == len(layout.ranks)]


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        *((3, name) for name in ("fsdp2", "hsdp", "tp stride 2", "mcore buffers", "megatron-fsdp")),
        *((4, name) for name in LAYOUTS),
    ],
)
def test_the_table_names_what_each_rank_stores(world: int, layout: str) -> None:
    everyone = RankPool.cached(world).run(_bound, layout)
    assert [wrong for wrong, _ in everyone] == [[]] * world
    assert all(digests == everyone[0][1] for _, digests in everyone)


STACKS = {name: case for name, case in PARAMS.items() if case.options.get("view") == "stack"}


def _kept(layout: str) -> list[tuple[list[int], list[int], list[int]]]:
    """For each stack of experts, return three lists of expert indices: all experts, the experts whose per-expert state
    this rank stores, and the experts whose weights it stores."""
    world, case, rank, found = dist.get_world_size(), LAYOUTS[layout], dist.get_rank(), []
    full = {n: torch.arange(c.shape[0]).view(-1, 1, 1).expand(c.shape).float().contiguous() for n, c in STACKS.items()}
    table = bind(_listed(parameters(case.build(full, case.mesh(world))), case.options(world)))
    for one, of_param in zip(table.params, table.layouts, strict=True):
        engine, sizes = engine_of(one.param), [3] * len(of_param.view.matrices)
        experts = torch.arange(len(full[one.name]))
        if engine.believes_placements:
            kept = engine.claim(one.param, one.group).form[1].kept(of_param, sizes)
        else:
            kept = ParamLayout.replicated(of_param.view.kept(sizes), of_param.ranks)
        numbers = stored(kept.of_rank(rank), experts[:, None].expand(kept.view.shape))
        storage = local_if_any(one.param).detach()
        here = [int(expert.flatten()[0]) for expert in storage] if storage.numel() else []
        found.append((experts.tolist(), numbers[..., :1].flatten().tolist(), here))
    return found


# In the layouts of OF_STORED, one mesh axis shards the experts and nothing else is sharded, so a rank has the
# per-expert state of exactly those experts whose weights it stores.
OF_STORED = ("ep", "ep+fsdp", "fsdp2", "lone strided")
ON_NO_MESH = ("ddp", "tp column", "mcore buffers", "megatron-fsdp")


@pytest.mark.parametrize("layout", [*OF_STORED, "hsdp", "two dims", "one dim twice", *ON_NO_MESH])
def test_a_rank_has_the_numbers_of_the_experts_that_it_stores(layout: str, world4: RankPool) -> None:
    """Per-expert state must be in the order of the experts. If no mesh axis shards the experts, each rank must have the
    state of all experts."""
    for found in world4.run(_kept, layout):
        for experts, told, stored_here in found:
            if layout in ON_NO_MESH:
                assert told == experts
            elif stored_here:
                assert told == stored_here or (told == experts and layout not in OF_STORED)


def _read(placement: Placement) -> int:
    """Return the number of tensors for which `bind` computes a fingerprint on this rank."""
    local = torch.empty(2, 6, device="meta")
    param = nn.Parameter(DTensor.from_local(local, mesh_of((4,)), [placement], run_check=False))
    seen: list[Tensor] = []
    pair = Listed("b", "b", torch.ones(4, 6), {"use_muon": True, "process_group": (0, 1)}, {})
    listed = [Listed("a", "a", param, {"use_muon": True}, {}), *[pair] * (dist.get_rank() < 2)]
    bind(listed, fingerprint=lambda storage: seen.append(storage) or 0)  # type: ignore[func-returns-value]
    return len(seen)


def test_only_what_has_replicas_is_read(world4: RankPool) -> None:
    """Only tensors with replicas need a fingerprint, a checksum that shows whether the replicas are equal. Other
    tensors must not be read, because reading them may be impossible (on the meta device) or take seconds (when
    offloaded)."""
    assert [world4.run(_read, how) for how in (Shard(0), Replicate())] == [[1, 1, 0, 0], [2, 2, 1, 1]]


def test_grids_are_found_from_what_each_rank_knows() -> None:
    """In each of 200 random cases, shuffled ranks form up to three grids. Each row of a grid is a tensor-parallel
    group, and each column is a data-parallel group. The grids must be reconstructed from reports in which each rank
    lists only its own row and column."""
    draw = random.Random(1)
    for _ in range(200):
        known: dict[int, list[Ties]] = {}
        wanted = {}
        for _ in range(draw.randint(1, 3)):
            parts, replicas = draw.randint(1, 4), draw.randint(1, 4)
            ranks = draw.sample(range(16), parts * replicas)
            rows = tuple(tuple(ranks[i * parts : (i + 1) * parts]) for i in range(replicas))
            columns = [tuple(sorted(row[at] for row in rows)) for at in range(parts)]
            for row in rows:
                for at, rank in enumerate(row):
                    ties = Ties(row, columns[at])
                    known.setdefault(rank, []).append(ties)
                    wanted[ties] = tuple(sorted(rows))
        assert _grids_of(known) == wanted
    start = time.process_time()
    _grids_of({rank: [Ties((rank,), (rank,))] for rank in range(1 << 14)})
    assert time.process_time() - start < 2.0


AB, CD, DC, A_C, B_D = (0, 1), (2, 3), (3, 2), (0, 2), (1, 3)


@pytest.mark.parametrize(
    ("known", "message"),  # `known` lists tp_group and process_group of each rank, starting with rank 0.
    [
        ([(AB, A_C), (AB, B_D), ((2,), A_C)], r"rank 2 has tp_group \(2,\)"),
        ([(AB, A_C), (AB, B_D), (CD, A_C), ((3,), (3,))], r"rank 3 has tp_group \(3,\) and process_group \(3,\)"),
        (
            [(AB, A_C), (AB, B_D), (DC, A_C), (DC, B_D)],
            r"rank 2 has tp_group \(3, 2\) and process_group \(0, 2\)",
        ),
        (
            [(AB, A_C), (AB, (1,)), (CD, A_C), (CD, B_D)],
            r"rank 2 has tp_group \(2, 3\) and process_group \(0, 2\)",
        ),
        (
            [(AB, A_C), (AB, (1, 3, 5)), (CD, A_C), (CD, B_D)],
            r"rank 1 has tp_group \(0, 1\) and process_group \(1, 3, 5\)",
        ),
        (
            [(AB, AB, (1, 0), AB), ((1, 0), AB, AB, AB)],
            r"form no grid .* rank 0 has tp_group \(0, 1\) and process_group \(0, 1\) or",
        ),
    ],
)
def test_groups_that_form_no_grid_are_refused(known: list[tuple[tuple[int, ...], ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _grids_of({rank: list(map(Ties, of[::2], of[1::2])) for rank, of in enumerate(known)})


def test_a_parameter_whose_sharers_cannot_be_told_is_named() -> None:
    optimizer = Muon([("up", torch.nn.Parameter(torch.ones(3, 4)))], lr=0.1)
    with (
        mock.patch.object(type(engine_of(torch.ones(1))), "ties", side_effect=ValueError("its group is gone")),
        pytest.raises(ValueError, match="up: its group is gone"),
    ):
        optimizer.prepare()
