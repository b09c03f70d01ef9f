"""Every row of `shardmuon verify` on eight ranks: what is planned and counted without ranks is what eight ranks do.

One world for all rows. A row's layouts are made again here, from shapes and placements alone, by the functions that
foresight plans with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from every_layout import MANY_BUCKETS, Planned, assert_counted, compared, digests_of
from test_foresight import GRAM as BY_GRAM
from test_foresight import STANDARD, step_by_gram
from torch import Tensor

from shardmuon import Muon, Orthogonalizer
from shardmuon.comm.groups import Traffic
from shardmuon.foresight.layouts import flat, grid_of, megatron_ranges, placed
from shardmuon.layout.grid import union
from shardmuon.layout.mesh import Cut, OnMesh, Shard, parts_of
from shardmuon.layout.table import ParamLayout, Ranks, replicated
from shardmuon.layout.views import MatrixView, matrix_view
from shardmuon.plan.machines import MACHINES
from shardmuon.plan.plan import Policy, make_plan
from shardmuon.testing.layouts import LAYOUTS, PARAMS, ParamCase, groups_of, parameters
from shardmuon.testing.pool import RankPool

EXCHANGES = {"owner": MANY_BUCKETS, "gram": BY_GRAM}
RANKS = tuple(range(8))


def _full() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(case.shape, generator=generator) for name, case in PARAMS.items()}


# ------------------------------------------------------------------------------------------------------ without ranks

Placed = tuple[tuple[int, ...], Sequence[Shard | None]]  # sizes of the mesh's axes, what each does


def _placed(row: str, number: int, num_dims: int) -> Placed | None:
    """Placements of a parameter as a DTensor on eight ranks; None: it is none."""
    rows, cols = num_dims - 2, num_dims - 1
    by_turns = number % 2 + rows  # column and row parallel
    stack = num_dims == 3
    over_tp = Shard(0, 2) if by_turns == 0 else Shard(0)
    mixed: list[Placed | None] = [
        ((8,), [Shard(0)]),
        ((4, 2), [None, Shard(1)]),
        ((8,), [None]),
        ((4, 2), [Shard(1), Shard(0)]),
        None,
    ]
    table: dict[str, Placed | None] = {
        "replicate": ((8,), [None]),
        "fsdp2": ((8,), [Shard(0)]),
        "fsdp2 dim 1": ((8,), [Shard(1)]),
        "hsdp": ((2, 4), [None, Shard(0)]),
        "tp": ((8,), [Shard(by_turns)]),
        "fsdp2+tp": ((4, 2), [over_tp, Shard(by_turns)]),
        "two dims": ((4, 2), [Shard(rows), Shard(cols)]),
        "one dim twice": ((4, 2), [Shard(0), Shard(0)]),
        "lone strided": ((8,), [Shard(0, 2)]),
        "hsdp+tp": ((2, 2, 2), [None, over_tp, Shard(by_turns)]),
        "ep": ((8,), [Shard(0) if stack else None]),
        "ep+fsdp": ((4, 2), [Shard(1), Shard(0)]) if stack else ((8,), [Shard(0)]),
        "mixed meshes": mixed[number % 5],
    }
    return table.get(row)


def _plain_cut(row: str, case: ParamCase, number: int) -> ParamLayout | None:
    """Cut of tensor-parallel shards that are plain tensors. None: this parameter is no such shard."""
    dims, stride, tp = {
        "tp column": ((0,), 1, 8),
        "tp row": ((1,), 1, 8),
        "tp stride 2": ((0,), 2, 8),
        "tp x dp": ((0, 1, -1), 1, 2),
    }[row]
    dim = dims[number % len(dims)]
    if dim == -1:
        return None
    dim += len(case.shape) == 3
    size = case.shape[dim]
    stride = stride if size % stride == 0 else 1
    part = max(1, -(-(size // stride) // tp))
    sizes = tuple(stride * max(0, min(part, size // stride - i * part)) for i in range(tp))
    grid = grid_of(RANKS, tp)
    pieces = parts_of(case.shape, Cut(dim, stride), sizes)
    held = {rank: of_rank for of_row in grid for rank, of_rank in zip(of_row, pieces, strict=True)}
    return ParamLayout(_view(case), union(grid), tuple(held[rank] for rank in union(grid)))


def _view(case: ParamCase) -> MatrixView:
    return matrix_view(case.shape, **case.options)


def _buffers(row: str) -> list[ParamLayout]:
    """Layouts of Megatron's gradient buffers: rows cut rows, columns and rows in strides in turn, where they divide."""
    tp = 2 if row.endswith("tp") else 1
    cuts: list[Cut | None] = []
    for i, case in enumerate(PARAMS.values()):
        cut = Cut(*((0, 1), (1, 1), (0, 2))[i % 3])
        fits = (len(case.shape) == 2 or cut.dim == 0) and case.shape[cut.dim] % (tp * cut.stride) == 0
        cuts.append(cut if tp > 1 and fits else None)
    sizes = [math.prod(c.shape) // (tp if cut else 1) for c, cut in zip(PARAMS.values(), cuts, strict=True)]
    table, _ = megatron_ranges(sizes, 8 // tp, 4000)
    return [
        flat(_view(case), grid_of(RANKS, tp), cut, [held[rank // tp] for rank in RANKS])
        for case, cut, held in zip(PARAMS.values(), cuts, table, strict=True)
    ]


def _layouts(row: str) -> dict[str, ParamLayout]:
    if row.startswith("mcore"):
        return dict(zip(PARAMS, _buffers(row), strict=True))
    found = {}
    for number, (name, case) in enumerate(PARAMS.items()):
        alone = row in ("single", "mixed meshes")
        layout = replicated(_view(case), (0,) if alone else RANKS)
        on_mesh = _placed(row, number, len(case.shape))
        if on_mesh is not None:
            layout = placed(_view(case), OnMesh(on_mesh[0], RANKS, tuple(on_mesh[1])))
        elif row.startswith("tp"):
            layout = _plain_cut(row, case, number) or layout
        elif row not in ("single", "ddp", "mixed meshes"):
            raise KeyError(f"the row {row!r} has no layout here: write it into _placed or _plain_cut")
        found[name] = layout
    return found


def _digests(row: str, exchange: str) -> dict[Ranks, str]:
    layouts, gram = _layouts(row), exchange == "gram"
    how: dict[str, Any] = {"orthogonalizer": STANDARD} if gram else {"orthogonalizer": Orthogonalizer("standard")}
    alone = Muon(groups_of(parameters(_full()), PARAMS), lr=1e-3, exchange=EXCHANGES[exchange], **how)
    policy = Policy(EXCHANGES[exchange].route, EXCHANGES[exchange].bucket_bytes, MACHINES["cpu-gloo"])
    specs = alone.prepare().specs
    return digests_of(make_plan([spec._replace(layout=layouts[spec.name]) for spec in specs], policy))


# All rows meet the Gram route on 3 ranks (test_foresight.py), here kinds of meshes of two or three axes, which 3 ranks
# cannot cut, and one whose matrices may have fewer rows than there are ranks.
GRAM = ("fsdp2", "hsdp", "two dims", "hsdp+tp", "ep+fsdp", "tp x dp", "mcore buffers+tp")
RUNS = [(row, exchange) for exchange in EXCHANGES for row in LAYOUTS if exchange != "gram" or row in GRAM]


@pytest.fixture(scope="module")
def rows_by_gram(world8: RankPool) -> list[dict[str, tuple[Traffic, Planned]]]:
    return [dict(zip(GRAM, of_rank, strict=True)) for of_rank in world8.run(step_by_gram, GRAM)]


@pytest.mark.parametrize("row", GRAM)
def test_bytes_and_collectives_of_the_gram_route_are_those_that_eight_ranks_count(
    row: str, rows_by_gram: list[dict[str, tuple[Traffic, Planned]]]
) -> None:  # of owners: test_foresight.py
    assert_counted(*zip(*(of_rank[row] for of_rank in rows_by_gram), strict=True))


@pytest.mark.parametrize(
    ("row", "exchange"), [run for run in RUNS if not run[0].startswith("megatron-fsdp")]
)  # which foresight has no engine for
def test_every_row_that_is_planned_without_ranks_has_the_digests_of_eight_ranks(
    row: str, exchange: str, request: pytest.FixtureRequest
) -> None:
    if exchange == "gram":
        plans = [of_rank[row][1] for of_rank in request.getfixturevalue("rows_by_gram")]
    else:
        plans = [of_rank["dense"].about[0] for of_rank in compared(row, 8)]
    live: dict[Ranks, str] = {}
    for rank, plan in enumerate(plans):
        for ranks, digest in plan.digests.items():
            assert live.setdefault(ranks, digest) == digest, f"rank {rank} has another digest of {ranks}"
    assert _digests(row, exchange) == live
    assert (row == "single") == (not live)
