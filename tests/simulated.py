"""Simulated ranks in one process, which slice full tensors instead of communicating, and helpers that create layouts
and matrix views for them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from shardmuon import Muon
from shardmuon.layout.pieces import Box, FlatRange, Held, ParamLayout, Piece
from shardmuon.layout.views import Ints, MatrixView, matrix_view
from shardmuon.options import MuonConfig, Settings
from shardmuon.orthogonalize.choice import Choice
from shardmuon.plan import planner
from shardmuon.plan.plan import Kept, Plan, Policy, Spec
from shardmuon.plan.planner import make_plan
from shardmuon.plan.program import Program
from shardmuon.price.machines import MACHINES, Machine
from shardmuon.step.binding import make_spec
from shardmuon.step.bucket import Bound
from shardmuon.step.stages import WeightSet, ZeroWatch
from shardmuon.step.update import Rounding, Work
from shardmuon.variants import Stage, Stages

CPU = torch.device("cpu")
WIRES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
_AUTO, SMALL = MuonConfig(), Policy(bucket_bytes=1500)
# The machine PAIRS has two ranks per node, and APART has one. The network between nodes is extremely slow, so each
# replica orthogonalizes all matrices itself instead of exchanging results with other replicas.
PAIRS, APART = (MACHINES["h100"]._replace(per_node=num, network=1) for num in (2, 1))
# A replica orthogonalizes all matrices itself only if this saves at least three times the inter-node latency. The
# latency of the machine SHARING is so high that this is never the case, so replicas always share the work.
SHARING = MACHINES["cpu-gloo"]._replace(across=1 << 50)
EACH = Policy(bucket_bytes=1500, machine=PAIRS)


def by_rates(machine: Machine | None) -> AbstractContextManager[object]:
    """Return a context manager that makes the planner use the compute and network rates of `machine`, or the real rates
    if `machine` is None."""
    return nullcontext() if machine is None else mock.patch.object(Machine, "slowest", return_value=machine)


def quick_plans() -> Any:
    """Return a context manager, also usable as a decorator, that makes the planner try only two numbers of buckets.
    Trying all of them would take longer than the rest of a small job's first step."""
    return mock.patch.object(planner, "_NUMS", (1, 4))


# Layouts whose replicas each orthogonalize all matrices if the planner assumes the machine PAIRS.
REPLICATED = ("hsdp 2x2", "hsdp 4x1", "hsdp crossed")


def cut(layout: ParamLayout, whole: Tensor) -> dict[int, Tensor]:
    """Return a dict that maps each rank to the part of a full tensor that it stores."""
    return {rank: stored(of_rank, whole) for rank, of_rank in zip(layout.ranks, layout.held, strict=True)}


def stored(of_rank: Sequence[Held], whole: Tensor) -> Tensor:
    """Return the local tensor of a rank, which contains the rank's part of a full tensor."""
    places = []
    for piece, local in of_rank:
        if isinstance(piece, FlatRange):
            box = piece.box or Box((0,) * whole.ndim, tuple(whole.shape))
            places.append((local, _part(whole, *box).reshape(-1)[piece.start : piece.stop]))
        else:
            places.append((local, _part(whole, *piece)))
    if not places:
        return whole.new_empty(0)
    ends = [[first + n for first, n in zip(local, part.shape, strict=True)] for local, part in places]
    storage = whole.new_zeros([max(of_dim) for of_dim in zip(*ends, strict=True)])
    for local, part in places:
        _part(storage, local, part.shape).copy_(part)
    return storage


def _part(tensor: Tensor, offset: Sequence[int], size: Sequence[int]) -> Tensor:
    return tensor[tuple(slice(first, first + n) for first, n in zip(offset, size, strict=True))]


def layout_of(view: MatrixView, pieces: Mapping[int, Sequence[Piece]]) -> ParamLayout:
    """Return a layout in which each rank stores the given pieces of the parameter, one after another along dim 0."""
    found = []
    for mine in pieces.values():
        at, held = 0, []
        for piece in mine:
            held.append(Held(piece, (at,) + (0,) * (len(view.shape) - 1) if isinstance(piece, Box) else (at,)))
            at += piece.size[0] if isinstance(piece, Box) else piece.numel
        found.append(tuple(held))
    return ParamLayout(view, tuple(pieces), tuple(found))


def along(view: MatrixView, dim: int, by_rank: Mapping[int, Sequence[tuple[int, int]]]) -> ParamLayout:
    """Return a layout in which each rank stores the given intervals [start, stop) of dim `dim`, one after another. A
    rank may have several intervals only along dim 0."""
    zeros = (0,) * len(view.shape)

    def box(start: int, stop: int) -> Box:
        rest = zeros[dim + 1 :], view.shape[dim + 1 :]
        return Box((*zeros[:dim], start, *rest[0]), (*view.shape[:dim], stop - start, *rest[1]))

    return layout_of(view, {rank: [box(*ends) for ends in ranges] for rank, ranges in by_rank.items()})


def sharded(view: MatrixView, grid: Sequence[Sequence[int]], dim: int) -> ParamLayout:
    """Return a layout for a grid of ranks. Each row of `grid` stores one replica, sharded along `dim`. The last ranks
    of a row may have small or empty shards."""
    num = view.shape[dim]
    step = -(-num // len(grid[0]))
    cuts = {rank: [min((part + n) * step, num) for n in (0, 1)] for row in grid for part, rank in enumerate(row)}
    return along(view, dim, {rank: [(start, stop)] for rank, (start, stop) in sorted(cuts.items())})


def strided_shards(view: MatrixView, ranks: Sequence[int]) -> ParamLayout:
    """Return a layout in which rank i of n stores the i-th part of each half of the rows."""
    half = view.shape[0] // 2
    part = half // len(ranks)
    starts = {rank: (at * part, half + at * part) for at, rank in enumerate(ranks)}
    return along(view, 0, {rank: [(start, start + part) for start in of] for rank, of in starts.items()})


def flat(view: MatrixView, ranks: Sequence[int], cuts: Sequence[int]) -> ParamLayout:
    bounds = itertools.pairwise([0, *cuts, math.prod(view.shape)])
    return layout_of(view, {rank: [FlatRange(*ends)] for rank, ends in zip(ranks, bounds, strict=True)})


def unlike_replicas(view: MatrixView) -> ParamLayout:
    """Return a layout of three row blocks on four ranks. Each block is stored on three ranks, and ranks store their
    blocks in different orders."""
    cuts = [0, view.shape[0] // 4, view.shape[0] // 2, view.shape[0]]
    orders = (0, 1), (2, 1), (0, 2), (2, 0, 1)
    return along(view, 0, {rank: [(cuts[i], cuts[i + 1]) for i in of] for rank, of in enumerate(orders)})


def spec(
    name: str,
    layout: ParamLayout,
    stages: int = 0,
    itemsize: int = 4,
    everywhere: bool = True,
) -> Spec:
    """Return the `Spec` of a parameter with `stages` post-processing stages (such as NorMuon), each of which keeps
    max(rows, cols) numbers per matrix."""
    matrices = layout.view.matrices
    sizes = [max(m.rows, m.cols) for m in matrices]
    kept_view = matrix_view((1, sum(sizes)), split_sizes=sizes, transposed=True) if matrices else None
    keepers = layout.ranks if everywhere else tuple(sorted({r for of_matrix in layout.tiles for r in of_matrix}))
    return Spec(
        name,
        layout,
        (Choice("standard", torch.float32),) * len(matrices),
        tuple(4 * min(m.rows, m.cols) ** 2 * max(m.rows, m.cols) for m in matrices),
        itemsizes=(itemsize,) * len(matrices),
        kept=tuple(Kept(ParamLayout.replicated(kept_view, keepers), True) for _ in range(stages)) if kept_view else (),
    )


VIEWS: dict[str, Callable[[], MatrixView]] = {
    "plain": lambda: matrix_view((12, 10)),
    "tall": lambda: matrix_view((24, 5), transposed=True),
    "fused": lambda: matrix_view((24, 6), split_sizes=(4, 1, 1), split_groups=4),
    "columns": lambda: matrix_view((8, 24), split_sizes=(4, 2), split_groups=4, transposed=True),
    "experts": lambda: matrix_view((8, 4, 6), view="stack"),
    "kernel": lambda: matrix_view((8, 3, 2, 2)),
    "heads": lambda: matrix_view((24, 7), split_sizes=3),
}
# OPTIONS maps the name of each matrix view in VIEWS to the parameter-group options that result in this view.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tall": {"transposed": True},
    "fused": {"split_sizes": (4, 1, 1), "split_groups": 4},
    "columns": {"split_sizes": (4, 2), "split_groups": 4, "transposed": True},
    "experts": {"view": "stack"},
    "kernel": {},
    "heads": {"split_sizes": 3},
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
    "one": lambda view: ParamLayout.replicated(view, (2,)),
}


def in_turn(cases: Iterable[str], layouts: Iterable[str] = LAYOUTS, every: int = 3) -> list[tuple[str, str]]:
    """Return a subset of all (case, layout) pairs. Each case is paired with one in `every` layouts, and each layout
    with one in `every` cases."""
    pairs = itertools.product(enumerate(cases), enumerate(layouts))
    return [(case, layout) for (i, case), (j, layout) in pairs if (i + j) % every == 0]


def in_both(rows: Sequence[Any], every: int = 4) -> list[Any]:
    """Return a `pytest.param` for each row of test arguments. One in `every` rows is marked `numeric`, so that it runs
    with both bf16 and fp32 matmuls. A subset is enough, because the matmul dtype does not change which rank
    orthogonalizes a matrix."""
    cells = (row if isinstance(row, tuple) else (row,) for row in rows)
    return [pytest.param(*of, marks=[] if at % every else [pytest.mark.numeric]) for at, of in enumerate(cells)]


# ------------------------------------------------------------------------------------------------------------ the step


def planned(
    layouts: Sequence[ParamLayout],
    groups: Sequence[Mapping[str, Any]],  # the options of each parameter's parameter group
    config: MuonConfig = _AUTO,
    policy: Policy = SMALL,
    *,
    device: torch.device = CPU,
    # indices of parameters to plan as if they were fp64
    wide: Collection[int] = (),
) -> Plan:
    """Return the plan of a step on parameters with the given layouts and options."""

    def spec_of(number: int, layout: ParamLayout, group: Mapping[str, Any]) -> Spec:
        sizes = [(m.rows, m.cols) for m in layout.view.matrices]

        def kept_of(stage: Stage) -> ParamLayout:
            return kept_layout(layout, [stage.num_kept(*size) for size in sizes])

        return make_spec(f"p{number}", layout, Settings.of(group), config, CPU, device, number in wide, kept_of)

    pairs = zip(layouts, groups, strict=True)
    return make_plan([spec_of(number, *pair) for number, pair in enumerate(pairs)], policy)


def kept_layout(layout: ParamLayout, sizes: Sequence[int]) -> ParamLayout:
    """Return the layout of the state that a post-processing stage keeps. If the shards of a stack consist of whole
    matrices, each rank stores the state of its own matrices. In all other layouts, every rank stores the full state."""
    view = layout.view.kept(sizes)
    boxes = [held for of_rank in layout.held for held in of_rank]
    rest = layout.view.shape[1:]
    if view.shape[0] == 1 or any(not isinstance(held.piece, Box) or held.piece.size[1:] != rest for held in boxes):
        return ParamLayout.replicated(view, layout.ranks)
    rows = {rank: [one.piece for one in of] for rank, of in zip(layout.ranks, layout.held, strict=True)}
    return along(view, 0, {rank: [(o[0], o[0] + n[0]) for o, n, *_ in of] for rank, of in rows.items()})


def group_of(**options: Any) -> dict[str, Any]:
    (group,) = Muon([torch.ones(2, 2).requires_grad_()], **{"lr": 0.05, **options}).param_groups
    return group


def kinds_of(work: Work) -> list[tuple[object, ...]]:
    """Return the value of `Work.kinds`, which a real step sets during validation. It contains, for each parameter, the
    settings of its parameter group, the dtypes and devices of its tensors, and whether its rounding uses random
    bits."""
    tensors = zip(work.weights, work.grads, work.momenta, strict=True)
    return [
        (id(settings), *((t.dtype, t.device) for t in of if t is not None), at in work.rounding)
        for at, (of, settings) in enumerate(zip(tensors, work.settings, strict=True))
    ]


class SimulatedRanks:
    """Simulated ranks that execute a plan's steps in one process.

    Attributes:
        plan: The executed plan.
        weights, momenta: For each parameter, the storage of each rank.
        kept: State of post-processing stages (such as NorMuon). For each parameter and each entry of its `Spec.kept`,
            the storage of each rank.
        watches: For each rank, the `ZeroWatch` that detects all-zero weights.
        orthogonalized: Number of matrices orthogonalized so far.
    """

    def __init__(self, plan: Plan, weights: Sequence[Tensor], device: torch.device = CPU) -> None:
        self.plan, self._device = plan, device
        self.weights = [cut(s.layout, w) for s, w in zip(plan.specs, weights, strict=True)]
        self.momenta = [{rank: torch.zeros_like(w) for rank, w in of_param.items()} for of_param in self.weights]
        self.kept = [[cut(k.layout, torch.zeros(k.layout.view.shape)) for k in spec.kept] for spec in plan.specs]
        self.watches = {rank: ZeroWatch() for spec in plan.specs for rank in spec.layout.ranks}
        self.orthogonalized = 0
        self._settled: set[int] = set()

    def step(
        self,
        grads: Sequence[Tensor | None],
        groups: Sequence[Mapping[str, Any]],
        rounding: Callable[[int], Mapping[int, Rounding]] = lambda rank: {},
    ) -> None:
        missing = frozenset(i for i, grad in enumerate(grads) if grad is None)
        cuts = [None if g is None else cut(s.layout, g) for s, g in zip(self.plan.specs, grads, strict=True)]
        said = [Settings.of(group) for group in groups]
        # Groups with equal options share one `Settings` object, because a foreach operation can process tensors of
        # several groups only if the groups share that object.
        settings = [said[said.index(one)] for one in said]
        stages = {i: s.stages for i, s in enumerate(settings) if i not in missing}
        fresh = {i: of_param for i, of_param in stages.items() if i not in self._settled}
        self._settled |= set(stages)
        columns = self.weights, cuts, self.momenta
        self._work = {
            rank: Work(
                *[[None if c is None else c.get(rank) for c in column] for column in columns],
                settings,
                [[storages.get(rank, torch.empty(0)) for storages in of_param] for of_param in self.kept],
                rounding(rank),
            )
            for rank in self.watches
        }
        for work in self._work.values():
            work.kinds = kinds_of(work)
        for of_set in self._sets(fresh):
            sums = self._summed(of_set)
            for rank, one in of_set.items():
                one.begin(sums.clone(), self._work[rank], self.watches[rank])
        for bucket in self.plan.buckets:
            programs = {rank: Program.of(self.plan, bucket, rank, missing) for rank in bucket.ranks}
            exchange = SimulatedExchange(bucket.ranks)
            runs = [
                Bound(self.plan, program, self._shapes(rank), ns_device=self._device).run(
                    self._work[rank], None, partial(exchange.start, rank)
                )
                for rank, program in programs.items()
            ]
            # `runs` has one iterator per rank. Each iteration of the loop runs one phase of the bucket on every
            # simulated rank.
            while runs:
                runs = [run for run in runs if next(run, run) is not run]
            self.orthogonalized += sum(len(b.items) for program in programs.values() for b in program.batches)
        for of_set in self._sets(stages):
            sums = self._summed(of_set)
            for rank, one in of_set.items():
                one.finish(sums.clone(), self._work[rank])

    def _shapes(self, rank: int) -> list[tuple[int, ...]]:
        return [tuple(w[rank].shape) if rank in w else () for w in self.weights]

    def _sets(self, stages: Mapping[int, Stages]) -> list[dict[int, WeightSet]]:
        """Return one dict, from rank to `WeightSet`, for each set of ranks that together sum squared norms of
        weights."""
        found: dict[tuple[int, ...], dict[int, WeightSet]] = {}
        for rank in self.watches:
            mine = {i: s for i, s in stages.items() if rank in self.plan.specs[i].layout.ranks}
            for one in WeightSet.of_rank(self.plan, mine, rank, self._shapes(rank)):
                found.setdefault(one.ranks, {})[rank] = one
        assert all(tuple(sorted(of_set)) == ranks for ranks, of_set in found.items())
        return list(found.values())

    def _summed(self, of_set: Mapping[int, WeightSet]) -> Tensor:
        return torch.stack([one.squares(self._work[rank]) for rank, one in of_set.items()]).sum(0)


class SimulatedExchange:
    """The all-to-alls of one bucket among simulated ranks. The sizes that a sender and a receiver expect must be equal.
    All ranks send before any rank waits."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self._ranks = ranks
        self._sent: dict[int, list[tuple[Tensor, ...]]] = {rank: [] for rank in ranks}

    def start(self, rank: int, send: Tensor, send_splits: Ints, recv_splits: Ints) -> SimpleNamespace:
        self._sent[rank].append(send.split(list(send_splits)))
        number = len(self._sent[rank]) - 1

        def wait() -> Tensor:
            parts = [self._sent[other][number][self._ranks.index(rank)] for other in self._ranks]
            assert tuple(map(len, parts)) == recv_splits, "both ends expect one size"
            return torch.cat(parts)

        return SimpleNamespace(wait=wait)
