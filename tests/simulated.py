"""Simulated ranks: a plan carried out by all ranks in one process, and layouts and views for it."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardmuon import Muon
from shardmuon.layout.pieces import Box, FlatRange, Held, Piece
from shardmuon.layout.table import ParamLayout, replicated
from shardmuon.layout.views import Ints, MatrixView, matrix_view
from shardmuon.plan.plan import Kept, Plan, Spec
from shardmuon.plan.program import Program, make_program
from shardmuon.step.bucket import Bound, BucketRun, Kernel, Work
from shardmuon.step.gram import GramRun
from shardmuon.step.options import OptionsReader
from shardmuon.stepping.settings import Settings

WIRES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}  # by itemsize


def cut(layout: ParamLayout, whole: Tensor) -> dict[int, Tensor]:
    """What each rank stores of a tensor."""
    found = {}
    for rank, of_rank in zip(layout.ranks, layout.held, strict=True):
        found[rank] = whole.new_zeros(_storage_shape(of_rank))
        for held in of_rank:
            there, here = _places(held, whole, found[rank])
            here.copy_(there)
    return found


def glued(layout: ParamLayout, storages: Mapping[int, Tensor]) -> Tensor:
    """The tensor that ranks store; replicas must be equal."""
    whole = torch.zeros(layout.view.shape, dtype=next(iter(storages.values())).dtype)
    seen: set[Piece] = set()
    for rank, of_rank in zip(layout.ranks, layout.held, strict=True):
        for held in of_rank:
            there, here = _places(held, whole, storages[rank])
            if held.piece in seen:
                assert torch.equal(there, here), f"replicas of {held.piece} differ on rank {rank}"
            there.copy_(here)
            seen.add(held.piece)
    return whole


def _storage_shape(of_rank: Sequence[Held]) -> Ints:
    ends = [
        tuple(
            a + n for a, n in zip(h.local, h.piece.size if isinstance(h.piece, Box) else (h.piece.numel,), strict=True)
        )
        for h in of_rank
    ]
    return tuple(map(max, zip(*ends, strict=True))) if ends else (0,)


def _places(held: Held, whole: Tensor, storage: Tensor) -> tuple[Tensor, Tensor]:
    """A piece in the tensor and in a storage."""
    piece, local = held
    if isinstance(piece, FlatRange):
        return whole.view(-1)[piece.start : piece.stop], storage[local[0] : local[0] + piece.numel]
    there = tuple(slice(a, a + n) for a, n in zip(piece.offset, piece.size, strict=True))
    return whole[there], storage[tuple(slice(a, a + n) for a, n in zip(local, piece.size, strict=True))]


def matrices_of(view: MatrixView, whole: Tensor) -> list[Tensor]:
    """A tensor's matrices."""
    found = []
    for m in view.matrices:
        box = whole.view(view.fine)[tuple(slice(a, a + n) for a, n in zip(m.start, m.sizes, strict=True))]
        found.append(torch.empty(m.rows, m.cols, dtype=whole.dtype))
        found[-1].as_strided(m.sizes, m.strides).copy_(box)
    return found


def settings_for(**options: Any) -> Settings:
    """What a group with these options says of its matrices."""
    defaults = {"lr": 0.02, **options}
    settings = OptionsReader().read(Muon([torch.ones(2, 2).requires_grad_()], **defaults).param_groups)[0].settings
    assert settings is not None, "a group of matrices"
    return settings


class SimulatedRanks:
    """All ranks of a plan in one process: the step's own lines, the exchanges being slices.

    Attributes:
        weights, momenta: Of each parameter: rank -> what it stores.
        kept: Of each parameter, of each of its `Spec.kept`: rank -> what it stores; zeros at first.
        sent: Rank -> elements sent so far.
        orthogonalized, exchanges: So far; a bucket has two exchanges or three, or none.
    """

    def __init__(self, plan: Plan, weights: Sequence[Tensor]) -> None:
        self.plan = plan
        self.weights = [cut(s.layout, w) for s, w in zip(plan.specs, weights, strict=True)]
        self.momenta = [{rank: torch.zeros_like(w) for rank, w in of_param.items()} for of_param in self.weights]
        self.kept = [[cut(k.layout, torch.zeros(k.layout.view.shape)) for k in s.kept] for s in plan.specs]
        self.sent: Counter[int] = Counter()
        self.orthogonalized = self.exchanges = 0

    def full_weights(self) -> list[Tensor]:
        """The weights; replicas must be equal."""
        return [glued(s.layout, of_param) for s, of_param in zip(self.plan.specs, self.weights, strict=True)]

    def step(self, grads: Sequence[Tensor], settings: Settings) -> None:
        """One step of all ranks on these gradients."""
        columns = self.weights, [cut(s.layout, g) for s, g in zip(self.plan.specs, grads, strict=True)], self.momenta
        for bucket in self.plan.buckets:
            runs, programs = dict[int, BucketRun](), dict[int, Program]()
            for rank in bucket.ranks:
                program = programs[rank] = make_program(self.plan, bucket, rank)
                mine = [[of_param.get(rank) for of_param in column] for column in columns]
                kept = [tuple(k[rank] for k in of_param if rank in k) for of_param in self.kept]
                shapes = [() if w is None else tuple(w.shape) for w in mine[0]]
                kind = GramRun if bucket.route == "gram" else BucketRun
                work = Work(*mine, [settings] * len(grads), kept)
                runs[rank] = kind(Bound(self.plan, program, shapes), work, WIRES[bucket.itemsize], Kernel())
                self.orthogonalized += sum(rank in self.plan.items[n].owners for n in bucket.items)
            self._run(runs, programs, bucket.exchange)

    def _run(self, runs: Mapping[int, BucketRun], programs: Mapping[int, Program], moves: bool) -> None:
        sends = {rank: run.pack() for rank, run in runs.items()}
        for run in runs.values():
            run.fill()
        if not moves:
            for rank, run in runs.items():
                run.apply(run.orthogonalize(sends[rank]))
            return
        came = self._exchange(sends, {r: (p.gather.holder_splits, p.gather.owner_splits) for r, p in programs.items()})
        sends = {rank: run.orthogonalize(came[rank]) for rank, run in runs.items()}
        splits = {r: (p.scatter.owner_splits, p.scatter.holder_splits) for r, p in programs.items()}
        came = self._exchange(sends, splits)
        relayed = {rank: run.apply(came[rank]) for rank, run in runs.items()}
        relays = {r: (p.relay.send_splits, p.relay.recv_splits) for r, p in programs.items() if p.relay}
        if relays:
            came = self._exchange({rank: send for rank, send in relayed.items() if send is not None}, relays)
            for rank, run in runs.items():
                run.finish(came[rank])

    def _exchange(self, sends: Mapping[int, Tensor], splits: Mapping[int, tuple[Ints, Ints]]) -> dict[int, Tensor]:
        """An all-to-all, whose ranks must agree about every size."""
        parts = {rank: send.split(list(splits[rank][0])) for rank, send in sends.items()}
        found = {rank: [parts[other][place] for other in sends] for place, rank in enumerate(sends)}
        assert all(tuple(map(len, found[rank])) == splits[rank][1] for rank in sends), "both ends expect one size"
        self.exchanges += 1
        self.sent.update({rank: len(send) for rank, send in sends.items()})
        return {rank: torch.cat(of_rank) for rank, of_rank in found.items()}


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
