"""Layouts that a live job's tensors would have, from a model's parameters and a mesh alone.

[Note: units]
    What is planned together is a unit: the parameters of one pipeline stage, of one ZeRO group, of Megatron's dense or
    expert weights. Units that are copies of each other (stages of equal layers, expert groups) are planned once, for
    the ranks of the first copy. Layouts come from the functions of layout/ that its readers use, so the plan has the
    digests of the live job's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from shardmuon.foresight.counting import Ints
from shardmuon.foresight.models import AFTER, Param
from shardmuon.foresight.types import Mesh, check_divides
from shardmuon.layout.grid import Grid, union
from shardmuon.layout.mesh import Cut, OnMesh, Shard, flat_part, parts_of, readings
from shardmuon.layout.pieces import Box
from shardmuon.layout.table import ParamLayout, Ranks, replicated
from shardmuon.layout.views import MatrixView
from shardmuon.momentum.stores import scale_shape
from shardmuon.plan.plan import Spec

_Ranges = list[tuple[int, int]]  # elements [start, stop) of a flat parameter on each rank
_ViewOf = Callable[[Param], MatrixView]
_SpecOf = Callable[[Param, ParamLayout, OnMesh | None], Spec]

# elements; megatron.core.distributed.DistributedDataParallel's default, for up to 40 ranks
_MEGATRON_BUCKET = 40_000_000
_ZERO3_SUB_GROUP = 1_000_000_000  # elements of a rank; DeepSpeed's default "sub_group_size"


@dataclass(slots=True)
class Unit:
    """Parameters that one plan is made for, see [Note: units].

    Attributes:
        ranks: Ranks of the first copy.
        copies: The ranks of every copy, in the order of `ranks`.
        stage: Pipeline stage of the first copy.
        specs: Its matrices.
        muon, adamw: Elements that each of `ranks` steps.
        scales: Number of scales of 8-bit momentum on each of `ranks`, if it is kept as such.
        stored: Elements of weights that each of `ranks` keeps in the model, whoever steps them.
    """

    ranks: Ranks
    copies: tuple[Ranks, ...]
    stage: int
    specs: list[Spec] = field(default_factory=list)
    muon: Ints = field(init=False)
    adamw: Ints = field(init=False)
    scales: Ints = field(init=False)
    stored: Ints = field(init=False)

    def __post_init__(self) -> None:
        self.muon, self.adamw, self.scales, self.stored = np.zeros((4, len(self.ranks)), dtype=np.int64)


class _Builder:
    """Makes the units of one pipeline stage. Tensors that lie alike share a layout, which is made once."""

    def __init__(self, mesh: Mesh, stage: int, view_of: _ViewOf, spec_of: _SpecOf) -> None:
        size = mesh.world // mesh.pp
        self.mesh, self.stage = mesh, stage
        self.ranks: Ranks = tuple(range(stage * size, (stage + 1) * size))
        self._view_of, self._spec_of = view_of, spec_of
        self._layouts: dict[object, tuple[ParamLayout, Ints, Ints]] = {}

    def unit(self, *copies: Ranks) -> Unit:
        """An empty unit of these ranks and their copies; default: all of the stage."""
        copies = copies or (self.ranks,)
        return Unit(copies[0], copies, self.stage)

    def add(
        self,
        unit: Unit,
        param: Param,
        key: object,
        make: Callable[[MatrixView], ParamLayout],
        place: OnMesh | None = None,
    ) -> None:
        """Add a parameter to a unit. `make` gives its layout, which is that of all with equal views and keys."""
        key = unit.ranks, self._view_of(param), key
        if key not in self._layouts:
            layout = make(self._view_of(param))
            self._layouts[key] = layout, *_held(layout)
        layout, numel, scales = self._layouts[key]
        unit.stored += numel
        if param.use_muon:
            unit.specs.append(self._spec_of(param, layout, place))
            unit.muon += numel
            unit.scales += scales
        else:
            unit.adamw += numel


def _held(layout: ParamLayout) -> tuple[Ints, Ints]:
    """Elements, and scales of 8-bit momentum, by position in `layout.ranks`."""
    pieces = [[held.piece for held in of_rank] for of_rank in layout.held]
    boxes = ([piece for piece in of_rank if isinstance(piece, Box) and piece.numel] for of_rank in pieces)
    rows = layout.view.num_row_dims
    return (
        np.array([sum(piece.numel for piece in of_rank) for of_rank in pieces], dtype=np.int64),
        np.array([sum(math.prod(scale_shape(box.size, rows)) for box in of_rank) for of_rank in boxes], dtype=np.int64),
    )


def make_units(params: Sequence[Param], mesh: Mesh, view_of: _ViewOf, spec_of: _SpecOf) -> list[Unit]:
    """The units of a job.

    Args:
        params: The trainable parameters, in the order of the optimizer's groups.
        mesh: The arrangement of ranks.
        view_of: A parameter's matrices, or a view without any for one that is AdamW's.
        spec_of: A matrix parameter's spec, given its layout.

    Raises:
        ValueError: The mesh does not fit the parameters; says what to write.
    """
    zero = dict.fromkeys(("zero1", "zero2", "zero3"), _zero)
    build = {"megatron": _megatron, **zero, "ddp": _plain}.get(mesh.engine, _dtensor)
    found: list[Unit] = []
    known: dict[object, tuple[int, list[tuple[Unit, tuple[Ranks, ...]]]]] = {}  # -> first rank, units and first copies
    for stage, members in enumerate(stages_of(params, mesh)):
        of_stage = _Builder(mesh, stage, view_of, spec_of)
        alike = tuple((p.shape, view_of(p), p.group, p.cut, p.expert) for p in members)
        if alike in known:
            first, made = known[alike]
            shift = of_stage.ranks[0] - first
            for unit, own in made:
                unit.copies += tuple(tuple(rank + shift for rank in copy) for copy in own)
        else:
            units = list(build(members, of_stage))
            known[alike] = of_stage.ranks[0], [(unit, unit.copies) for unit in units]
            found += units
    return found


def stages_of(params: Sequence[Param], mesh: Mesh) -> list[list[Param]]:
    """The parameters of each pipeline stage: equal numbers of layers, the first stages one more if they do not divide;
    what comes before the layers goes to the first, what comes after to the last."""
    if mesh.pp == 1:
        return [list(params)]
    num_layers = 1 + max((p.layer for p in params if p.layer < AFTER), default=-1)
    if num_layers < mesh.pp:
        raise ValueError(
            f"mesh {mesh}: pp={mesh.pp} stages for {num_layers} layers. Write pp={max(1, num_layers)} or less"
        )
    least, more = divmod(num_layers, mesh.pp)
    stage_of = [stage for stage in range(mesh.pp) for _ in range(least + (stage < more))]
    found: list[list[Param]] = [[] for _ in range(mesh.pp)]
    for p in params:
        found[0 if p.layer < 0 else mesh.pp - 1 if p.layer == AFTER else stage_of[p.layer]].append(p)
    return found


def _cut_of(param: Param, mesh: Mesh) -> Cut | None:
    """The cut of tensor parallelism; None: the parameter is replicated."""
    return None if param.cut is None or mesh.tp == 1 else Cut(len(param.shape) + param.cut[0], param.cut[1])


def _plain_cut_of(param: Param, mesh: Mesh) -> Cut | None:
    """The same of tensors that must be cut into equal parts."""
    cut = _cut_of(param, mesh)
    if cut is not None:
        check_divides(mesh, f"indices along dim {cut.dim}", param.shape[cut.dim] // cut.stride, param.name)
    return cut


# ------------------------------------------------------------------------------------- FSDP2, HSDP, TP, EP (DTensor)


def _dtensor(params: Sequence[Param], of_stage: _Builder) -> Iterator[Unit]:
    unit = of_stage.unit()
    for p in params:
        if p.expert:
            check_divides(of_stage.mesh, "experts", p.shape[0], p.name, "ep")
        place = _dtensor_place(p, of_stage.mesh, of_stage.ranks)
        of_stage.add(unit, p, (place.mesh, place.placements), partial(placed, place=place), place)
    yield unit


def _dtensor_place(param: Param, mesh: Mesh, ranks: Ranks) -> OnMesh:
    """The placements that `fully_shard` on top of `parallelize_module` gives a parameter, experts as torchtitan's.

    Experts with ep > 1 lie on a mesh (dp, shard x tp / ep, ep): each expert-parallel rank has whole experts, which FSDP
    cuts along their rows if there are more ranks than experts, else along the stack.
    """
    axes: list[tuple[int, Shard | None]] = [(mesh.dp, None)]
    if param.expert and mesh.ep > 1:
        share, num = mesh.shard * mesh.tp // mesh.ep, param.shape[0]
        axes.append((share, Shard(1) if share * mesh.ep > num else Shard(0, mesh.ep)))
        axes.append((mesh.ep, Shard(0)))
    else:
        cut = _cut_of(param, mesh)
        axes.append((mesh.shard, Shard(0, mesh.tp) if cut and cut.dim == 0 else Shard(0)))
        axes.append((mesh.tp, None if cut is None else Shard(cut.dim)))
    axes = [(size, placement) for size, placement in axes if size > 1] or [(1, None)]
    return OnMesh(tuple(size for size, _ in axes), ranks, tuple(placement for _, placement in axes))


def placed(view: MatrixView, place: OnMesh) -> ParamLayout:
    """The layout of a DTensor."""
    reading = readings(view.shape, place.mesh, place.placements)[0]
    return ParamLayout(view, place.ranks, tuple(held for held, _ in reading))


def uneven_experts(params: Sequence[Param], mesh: Mesh) -> str:
    """A sentence on ranks with unequal numbers of experts under FSDP2, and a mesh on which they are equal; else ""."""
    most = max((p.shape[0] for p in params if p.expert and len(p.shape) == 3), default=0)
    ranks = _expert_ranks(mesh)
    if mesh.engine != "fsdp2" or most % ranks == 0 or (mesh.ep > 1 and ranks > most):  # then rows are cut
        return ""
    share, own = ranks // mesh.ep, most // mesh.ep
    chunk = -(-own // share)
    least = max(0, own - chunk * (share - 1))  # torch.chunk's last
    text = f"{most} experts do not divide over {ranks} ranks, which hold {least} to {chunk} of a layer"
    for shard in range(mesh.shard - 1, 1, -1):
        other = replace(mesh, dp=mesh.dp * mesh.shard // shard, shard=shard)
        if mesh.shard % shard == 0 and most % _expert_ranks(other) == 0 and shard * mesh.tp % mesh.ep == 0:
            return f'{text}. They do with --mesh "{other}"'
    return text


def _expert_ranks(mesh: Mesh) -> int:
    """Ranks over which stacks of experts are cut along their first dim."""
    return mesh.shard * mesh.tp if mesh.ep > 1 else mesh.shard


# ------------------------------------------------------------------------------------------------------ DDP, DDP x TP


def _plain(params: Sequence[Param], of_stage: _Builder) -> Iterator[Unit]:
    """Plain tensors: replicas over dp that share the work (`process_group`), shards over tp (`tp_group`)."""
    unit, mesh = of_stage.unit(), of_stage.mesh
    grid = grid_of(of_stage.ranks, mesh.tp)
    for p in params:
        cut = _plain_cut_of(p, mesh)
        make = partial(parts, grid=grid, cut=cut) if cut else partial(replicated, ranks=unit.ranks)
        of_stage.add(unit, p, cut, make)
    yield unit


def parts(view: MatrixView, grid: Grid, cut: Cut) -> ParamLayout:
    """A layout of equal tensor-parallel parts, one replica a row of the grid."""
    num = len(grid[0])
    of_row = parts_of(view.shape, cut, (view.shape[cut.dim] // num,) * num)
    held = {rank: pieces for row in grid for rank, pieces in zip(row, of_row, strict=True)}
    return ParamLayout(view, union(grid), tuple(held[rank] for rank in union(grid)))


def grid_of(ranks: Ranks, tp: int) -> Grid:
    """The tensor-parallel groups of all replicas."""
    return tuple(ranks[i : i + tp] for i in range(0, len(ranks), tp))


# ------------------------------------------------------------------------------- flat buffers: ZeRO, Megatron


def flat(view: MatrixView, grid: Grid, cut: Cut | None, held: Sequence[tuple[int, int]]) -> ParamLayout:
    """A layout of flat ranges. `held`: elements [start, stop) on each rank of the grid, ascending."""
    ranks, num = union(grid), len(grid[0])
    part_of = {rank: part for row in grid for part, rank in enumerate(row)}
    pieces = (
        flat_part(view.shape, cut, part_of[rank], num, *of_rank) for rank, of_rank in zip(ranks, held, strict=True)
    )
    return ParamLayout(view, ranks, tuple(pieces))


def _zero(params: Sequence[Param], of_stage: _Builder) -> Iterator[Unit]:
    """One unit for each of the optimizer's groups, of ZeRO 3 for each of its sub-groups."""
    number, num = int(of_stage.mesh.engine[-1]), len(of_stage.ranks)
    for members in _sub_groups(params, num, number):
        table, length = zero_ranges([p.numel for p in members], num, number)
        unit, muon = of_stage.unit(), members[0].use_muon
        for p, held in zip(members, table, strict=True):
            of_stage.add(unit, p, tuple(held), partial(flat, grid=grid_of(unit.ranks, 1), cut=None, held=held))
        (unit.muon if muon else unit.adamw)[:] = length  # with the padding of the flat buffer
        unit.stored[:] = length * num if number < 3 else length
        yield unit


def _sub_groups(params: Sequence[Param], num_ranks: int, stage: int) -> Iterator[list[Param]]:
    for _, of_group in itertools.groupby(params, key=lambda p: p.group):
        members: list[Param] = []
        for p in of_group:
            members.append(p)
            if stage == 3 and sum(-(-one.numel // num_ranks) for one in members) >= _ZERO3_SUB_GROUP:
                yield members
                members = []
        if members:
            yield members


def _megatron(params: Sequence[Param], of_stage: _Builder) -> Iterator[Unit]:
    """Dense weights over dp x tp; experts, whole ones on each expert-parallel rank, over dp / ep x tp."""
    mesh = of_stage.mesh
    experts = [p for p in params if p.expert and len(p.shape) == 3]
    dense = [p for p in params if not (p.expert and len(p.shape) == 3)]
    if dense:
        yield _buffers(dense, of_stage, of_stage.ranks)
    for p in experts:
        check_divides(mesh, "experts", p.shape[0], p.name, "ep")
    groups = grid_of(of_stage.ranks, mesh.tp)
    copies = [tuple(rank for group in groups[e :: mesh.ep] for rank in group) for e in range(mesh.ep)]
    local = [  # each expert is a parameter of its own
        replace(p, shape=p.shape[1:], name=f"{p.name}.{number}")
        for p in experts
        for number in range(p.shape[0] // mesh.ep)
    ]
    if local:
        yield _buffers(local, of_stage, *copies)


def _buffers(params: Sequence[Param], of_stage: _Builder, *copies: Ranks) -> Unit:
    unit, tp = of_stage.unit(*copies), of_stage.mesh.tp
    grid = grid_of(unit.ranks, tp)
    cuts = [_plain_cut_of(p, of_stage.mesh) for p in params]
    num, order = len(grid), sorted(range(len(params)), key=lambda i: params[i].order)  # the model's
    sizes = [params[i].numel // (1 if cuts[i] is None else tp) for i in order]
    table, total = megatron_ranges(sizes, num, max(_MEGATRON_BUCKET, 1_000_000 * num))
    ranges = dict(zip(order, table, strict=True))
    for i, p in enumerate(params):
        held = [of_replica for of_replica in ranges[i] for _ in range(tp)]
        of_stage.add(unit, p, (cuts[i], tuple(held)), partial(flat, grid=grid, cut=cuts[i], held=held))
    unit.stored[:] = total  # parameters lie in the buffer, gaps and all
    return unit


def zero_ranges(sizes: Sequence[int], num_ranks: int, stage: int) -> tuple[list[_Ranges], int]:
    """_Ranges that DeepSpeed gives each rank of the parameters of one group, and the length of a flat.

    Stages 1 and 2: the parameters one after the other, padded at the end to a multiple of 2 x ranks, in equal parts
    (`nccl_start_alignment_factor` of stage_1_and_2.py, 0.19). Stage 3: an equal part of each, padded at its end.

    Returns:
        For each parameter its elements [start, stop) on each rank, and the elements of a flat, padding and all.
    """
    if stage == 3:
        each = [-(-size // num_ranks) for size in sizes]
        table = [
            [(min(r * part, size), min((r + 1) * part, size)) for r in range(num_ranks)]
            for size, part in zip(sizes, each, strict=True)
        ]
        return table, sum(each)
    unit = 2 * num_ranks
    part = -(-sum(sizes) // unit) * unit // num_ranks
    starts = [0, *itertools.accumulate(sizes)]
    return [_in_parts(start, size, part, num_ranks) for start, size in zip(starts, sizes, strict=False)], part


def _in_parts(at: int, size: int, part: int, num_ranks: int) -> _Ranges:
    """The elements of [at, at + size) in each of equal parts, counted from `at`; (0, 0) where there are none."""
    found = [(0, 0)] * num_ranks
    for rank in range(at // part, min(num_ranks - 1, (at + size - 1) // part) + 1):
        start, stop = max(at, rank * part), min(at + size, (rank + 1) * part)
        if start < stop:
            found[rank] = start - at, stop - at
    return found


def megatron_ranges(sizes: Sequence[int], num_ranks: int, bucket_size: int | None = None) -> tuple[list[_Ranges], int]:
    """_Ranges that Megatron-core's distributed optimizer gives each data-parallel rank of a gradient buffer.

    They lie in reverse order, each at a multiple of 64 elements; a bucket ends after the first one that fills it,
    padded to a multiple of lcm(ranks, 128), and each rank has an equal part of every bucket
    (param_and_grad_buffer.py, 0.19).

    Args:
        sizes: Elements of each parameter, in the model's order.
        num_ranks: Data-parallel ranks.
        bucket_size: Elements that fill a bucket; None: there is one.

    Returns:
        For each parameter its elements [start, stop) on each rank, and the elements of the whole buffer.
    """
    unit = math.lcm(num_ranks, 128)
    table: list[_Ranges] = [[] for _ in sizes]
    inside: list[tuple[int, int]] = []
    end = total = 0
    for index in reversed(range(len(sizes))):
        start = -(-end // 64) * 64
        inside.append((index, start))
        end = start + sizes[index]
        if index and (bucket_size is None or end < bucket_size):
            continue
        padded = -(-end // unit) * unit
        total += padded
        for number, first in inside:
            table[number] = _in_parts(first, sizes[number], padded // num_ranks, num_ranks)
        inside, end = [], 0
    return table, total
