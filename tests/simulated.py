"""Simulated ranks: layouts and views for tests that carry out the programs of all ranks in one process."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardmuon.layout.pieces import Box, FlatRange, Held, Piece
from shardmuon.layout.table import ParamLayout, replicated
from shardmuon.layout.views import MatrixView, matrix_view
from shardmuon.plan.plan import Kept, Spec


def cut(layout: ParamLayout, whole: Tensor) -> dict[int, Tensor]:
    """What each rank stores of a tensor; a rank with several pieces has them one behind the other."""
    found = {}
    for rank, of_rank in zip(layout.ranks, layout.held, strict=True):
        parts = []
        for held in of_rank:
            if isinstance(held.piece, FlatRange):
                parts.append(whole.reshape(-1)[held.piece.start : held.piece.stop])
            else:
                place = zip(held.piece.offset, held.piece.size, strict=True)
                parts.append(whole[tuple(slice(o, o + n) for o, n in place)])
        found[rank] = torch.cat(parts).clone() if parts else torch.empty(0)
    return found


def sharded(view: MatrixView, grid: Sequence[Sequence[int]], dim: int) -> ParamLayout:
    """Each row of the grid is a replica, cut along a dim; the last ranks may be left with little or nothing."""
    shape, parts = view.shape, len(grid[0])
    step = -(-shape[dim] // parts)
    held = {}
    for replica in grid:
        for part, rank in enumerate(replica):
            first, last = min(part * step, shape[dim]), min((part + 1) * step, shape[dim])
            offset, size = [0] * len(shape), list(shape)
            offset[dim], size[dim] = first, last - first
            held[rank] = (Held(Box(tuple(offset), tuple(size)), (0,) * len(shape)),)
    ranks = tuple(sorted(held))
    return ParamLayout(view, ranks, tuple(held[rank] for rank in ranks))


def strided_shards(view: MatrixView, ranks: Sequence[int]) -> ParamLayout:
    """Rank i of n stores the i-th part of both halves of the rows: several pieces in one storage."""
    shape = view.shape
    part = shape[0] // (2 * len(ranks))
    held = []
    for place in range(len(ranks)):
        starts = (place * part, shape[0] // 2 + place * part)
        held.append(
            tuple(
                Held(Box((start, *(0,) * (len(shape) - 1)), (part, *shape[1:])), (at * part, *(0,) * (len(shape) - 1)))
                for at, start in enumerate(starts)
            )
        )
    return ParamLayout(view, tuple(ranks), tuple(held))


def flat(view: MatrixView, ranks: Sequence[int], cuts: Sequence[int]) -> ParamLayout:
    bounds = itertools.pairwise([0, *cuts, math.prod(view.shape)])
    pieces: list[Piece] = [FlatRange(a, b) for a, b in bounds]
    return ParamLayout(view, tuple(ranks), tuple((Held(piece, (0,)),) for piece in pieces))


def unlike_replicas(view: MatrixView) -> ParamLayout:
    """Three parts of the rows, each on two or three of four ranks, which store theirs in unlike orders."""
    height = view.shape[0]
    cuts = [0, height // 4, height // 2, height]
    parts = [(cuts[i], cuts[i + 1] - cuts[i]) for i in range(3)]
    held = []
    for mine in ((0, 1), (2, 1), (0, 2), (2, 0, 1)):
        at, of_rank = 0, []
        for part in mine:
            start, size = parts[part]
            rest = (0,) * (len(view.shape) - 1)
            of_rank.append(Held(Box((start, *rest), (size, *view.shape[1:])), (at, *rest)))
            at += size
        held.append(tuple(of_rank))
    return ParamLayout(view, (0, 1, 2, 3), tuple(held))


def spec(name: str, layout: ParamLayout, stages: int = 0, itemsize: int = 4, everywhere: bool = True) -> Spec:
    """A parameter with stages that keep as many numbers of a matrix as its longer side has."""
    matrices = layout.view.matrices
    sizes = [max(m.rows, m.cols) for m in matrices]
    kept_view = matrix_view((1, sum(sizes)), split_sizes=sizes, split_dim=1) if matrices else None
    keepers = layout.ranks if everywhere else tuple(sorted({r for of_matrix in layout.tiles for r in of_matrix}))
    kept = tuple(Kept(replicated(kept_view, keepers), True) for _ in range(stages)) if kept_view else ()
    costs = tuple(4 * min(m.rows, m.cols) ** 2 * max(m.rows, m.cols) for m in matrices)
    return Spec(
        name, layout, ("standard float32",) * len(matrices), costs, itemsizes=(itemsize,) * len(matrices), kept=kept
    )


VIEWS: dict[str, Callable[[], MatrixView]] = {
    "plain": lambda: matrix_view((12, 10)),
    "tall": lambda: matrix_view((24, 5), transposed=True),
    "fused": lambda: matrix_view((24, 6), split_sizes=(4, 1, 1), split_groups=4),
    "columns": lambda: matrix_view((8, 24), split_sizes=(4, 2), split_groups=4, split_dim=1),
    "experts": lambda: matrix_view((8, 4, 6), view="stack"),
    "kernel": lambda: matrix_view((8, 3, 2, 2)),
    "heads": lambda: matrix_view((24, 7), num_heads=3),
}
# what `matrix_view` is told of each of VIEWS, as options of a group
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tall": {"transposed": True},
    "fused": {"split_sizes": (4, 1, 1), "split_groups": 4},
    "columns": {"split_sizes": (4, 2), "split_groups": 4, "split_dim": 1},
    "experts": {"view": "stack"},
    "kernel": {},
    "heads": {"num_heads": 3},
}
LAYOUTS: dict[str, Callable[[MatrixView], ParamLayout]] = {
    "fsdp": lambda view: sharded(view, [range(4)], 0),
    "last dim": lambda view: sharded(view, [range(4)], 1),
    "hsdp 2x2": lambda view: sharded(view, [(0, 1), (2, 3)], 0),
    "hsdp 4x1": lambda view: sharded(view, [(0,), (1,), (2,), (3,)], 0),
    "hsdp crossed": lambda view: sharded(view, [(0, 3), (2, 1)], 1),
    "strided": lambda view: strided_shards(view, (0, 1)),
    "flat": lambda view: flat(view, range(4), (1, 37, 37)),
    "no grid": lambda view: unlike_replicas(view),
    "pair": lambda view: sharded(view, [(1, 3)], 0),
    "one": lambda view: replicated(view, (2,)),
}


def in_turn(cases: Iterable[str], layouts: Iterable[str] = LAYOUTS, every: int = 3) -> list[tuple[str, str]]:
    """Pairs of a case and a layout: each case on a third of the layouts, and each layout with a third of the cases."""
    pairs = itertools.product(enumerate(cases), enumerate(layouts))
    return [(case, layout) for (i, case), (j, layout) in pairs if (i + j) % every == 0]
