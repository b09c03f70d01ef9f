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
from shardmuon.foresight.meshes import check_divides, stage_ranks
from shardmuon.foresight.models import AFTER, Param
from shardmuon.foresight.ranges import fsdp1_ranges, megatron_ranges, zero_ranges
from shardmuon.foresight.types import Mesh
from shardmuon.layout.grid import Grid, union
from shardmuon.layout.mesh import Cut, OnMesh, Shard, flat_part, parts_of, readings
from shardmuon.layout.pieces import Box
from shardmuon.layout.table import ParamLayout, Ranks, replicated
from shardmuon.layout.views import MatrixView
from shardmuon.momentum.stores import scale_shape
from shardmuon.plan.plan import Spec

ViewOf = Callable[[Param], MatrixView]
SpecOf = Callable[[Param, ParamLayout, OnMesh | None], Spec]

MEGATRON_BUCKET = (
    40_000_000  # elements; megatron.core.distributed.DistributedDataParallel's default, for up to 40 ranks
)
ZERO3_SUB_GROUP = 1_000_000_000  # elements of a rank; DeepSpeed's default "sub_group_size"


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
    muon: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    adamw: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    scales: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    stored: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def __post_init__(self) -> None:
        for name in ("muon", "adamw", "scales", "stored"):
            setattr(self, name, np.zeros(len(self.ranks), dtype=np.int64))


class _Made:
    """Layouts of one unit, each made once: tensors that lie alike share one, with what each rank holds of it."""

    def __init__(self) -> None:
        self._layouts: dict[object, ParamLayout] = {}
        self._held: dict[int, tuple[Ints, Ints]] = {}

    def layout(self, key: object, make: Callable[[], ParamLayout]) -> ParamLayout:
        """The layout of this key."""
        if key not in self._layouts:
            self._layouts[key] = make()
        return self._layouts[key]

    def flat(self, view: MatrixView, grid: Grid, cut: Cut | None, held: Sequence[tuple[int, int]]) -> ParamLayout:
        """See `flat`; the grid is that of all the unit."""
        return self.layout((view, cut, tuple(held)), lambda: flat(view, grid, cut, held))

    def held(self, layout: ParamLayout) -> tuple[Ints, Ints]:
        """Elements, and scales of 8-bit momentum, by position in `layout.ranks`."""
        if id(layout) not in self._held:
            found: Ints = np.zeros(len(layout.ranks), dtype=np.int64)
            scales: Ints = np.zeros(len(layout.ranks), dtype=np.int64)
            for at, of_rank in enumerate(layout.held):
                for piece in (held.piece for held in of_rank):
                    found[at] += piece.numel
                    if isinstance(piece, Box) and piece.numel:
                        scales[at] += math.prod(scale_shape(piece.size, layout.view.num_row_dims))
            self._held[id(layout)] = found, scales
        return self._held[id(layout)]


def make_units(params: Sequence[Param], mesh: Mesh, view_of: ViewOf, spec_of: SpecOf) -> list[Unit]:
    """The units of a job.

    Args:
        params: The trainable parameters, in the order of the optimizer's groups.
        mesh: The arrangement of ranks.
        view_of: A parameter's matrices, or a view without any for one that is AdamW's.
        spec_of: A matrix parameter's spec, given its layout.

    Raises:
        ValueError: The mesh does not fit the parameters; says what to write.
    """
    builders = {"megatron": _megatron, "zero1": _zero, "zero2": _zero, "zero3": _zero, "ddp": _plain, "fsdp1": _fsdp1}
    build = builders.get(mesh.engine, _dtensor)
    found: list[Unit] = []
    known: dict[object, tuple[int, list[tuple[Unit, tuple[Ranks, ...]]]]] = {}  # -> first stage, its units and copies
    for stage, members in enumerate(stages_of(params, mesh)):
        alike = tuple((p.shape, view_of(p), p.group, p.parallel, p.expert) for p in members)
        if alike in known:
            first, made = known[alike]
            shift = stage_ranks(mesh, stage)[0] - stage_ranks(mesh, first)[0]
            for unit, own in made:
                unit.copies += tuple(tuple(rank + shift for rank in copy) for copy in own)
            continue
        units = list(build(members, mesh, stage, view_of, spec_of))
        known[alike] = stage, [(unit, unit.copies) for unit in units]
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


def cut_dim(param: Param) -> int | None:
    """The dim that tensor parallelism cuts, None: it is replicated."""
    if param.parallel == "none":
        return None
    if len(param.shape) == 1:
        return 0
    outputs, inputs = (-1, -2) if param.turned else (-2, -1)
    return len(param.shape) + (outputs if param.parallel == "column" else inputs)


# ------------------------------------------------------------------------------------- FSDP2, HSDP, TP, EP (DTensor)


def dtensor_place(param: Param, mesh: Mesh, ranks: Ranks) -> OnMesh:
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
        dim = cut_dim(param) if mesh.tp > 1 else None
        axes.append((mesh.shard, Shard(0, mesh.tp) if dim == 0 else Shard(0)))
        axes.append((mesh.tp, None if dim is None else Shard(dim)))
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


def _dtensor(params: Sequence[Param], mesh: Mesh, stage: int, view_of: ViewOf, spec_of: SpecOf) -> Iterator[Unit]:
    ranks, made = stage_ranks(mesh, stage), _Made()
    unit = Unit(ranks, (ranks,), stage)
    for p in params:
        if p.expert:
            check_divides(mesh, "experts", p.shape[0], p.name, "ep")
        view, place = view_of(p), dtensor_place(p, mesh, ranks)
        layout = made.layout((view, place.mesh, place.placements), partial(placed, view, place))
        _add(unit, p, layout, made, spec_of, place)
    yield unit


def _add(
    unit: Unit, param: Param, layout: ParamLayout, made: _Made, spec_of: SpecOf, place: OnMesh | None = None
) -> None:
    numel, scales = made.held(layout)
    unit.stored += numel
    if param.use_muon:
        unit.specs.append(spec_of(param, layout, place))
        unit.muon += numel
        unit.scales += scales
    else:
        unit.adamw += numel


# ------------------------------------------------------------------------------------------------------ DDP, DDP x TP


def _plain(params: Sequence[Param], mesh: Mesh, stage: int, view_of: ViewOf, spec_of: SpecOf) -> Iterator[Unit]:
    """Plain tensors: replicas over dp that share the work (`process_group`), shards over tp (`tp_group`)."""
    ranks, made = stage_ranks(mesh, stage), _Made()
    grid = grid_of(ranks, mesh.tp)
    unit = Unit(ranks, (ranks,), stage)
    for p in params:
        view, dim = view_of(p), cut_dim(p) if mesh.tp > 1 else None
        if dim is None:
            layout = made.layout(view, partial(replicated, view, ranks))
        else:
            check_divides(mesh, f"indices along dim {dim}", p.shape[dim] // p.stride, p.name)
            cut = Cut(dim, p.stride)
            layout = made.layout((view, cut), partial(parts, view, grid, cut))
        _add(unit, p, layout, made, spec_of)
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


# --------------------------------------------------------------------------------------------------------------- ZeRO


def _zero(params: Sequence[Param], mesh: Mesh, stage: int, view_of: ViewOf, spec_of: SpecOf) -> Iterator[Unit]:
    ranks, number, made = stage_ranks(mesh, stage), int(mesh.engine[-1]), _Made()
    for _, of_group in itertools.groupby(params, key=lambda p: p.group):
        for members in _sub_groups(list(of_group), len(ranks), number):
            table, length = zero_ranges([p.numel for p in members], len(ranks), number)
            unit = Unit(ranks, (ranks,), stage)
            unit.stored[:] = length * len(ranks) if number < 3 else length  # with the padding of the flat buffer
            (unit.muon if members[0].use_muon else unit.adamw)[:] = length
            for p, held in zip(members, table, strict=True) if members[0].use_muon else ():
                unit.specs.append(spec_of(p, made.flat(view_of(p), grid_of(ranks, 1), None, held), None))
            yield unit


def _sub_groups(params: list[Param], num_ranks: int, stage: int) -> Iterator[list[Param]]:
    if stage < 3:
        yield params
        return
    members: list[Param] = []
    filled = 0
    for p in params:
        members.append(p)
        filled += -(-p.numel // num_ranks)
        if filled >= ZERO3_SUB_GROUP:
            yield members
            members, filled = [], 0
    if members:
        yield members


def flat(view: MatrixView, grid: Grid, cut: Cut | None, held: Sequence[tuple[int, int]]) -> ParamLayout:
    """A layout of flat ranges. `held`: elements [start, stop) on each rank of the grid, ascending."""
    ranks, num = union(grid), len(grid[0])
    part_of = {rank: part for row in grid for part, rank in enumerate(row)}
    pieces = (
        flat_part(view.shape, cut, part_of[rank], num, *of_rank) for rank, of_rank in zip(ranks, held, strict=True)
    )
    return ParamLayout(view, ranks, tuple(pieces))


# -------------------------------------------------------------------------------------------------------------- FSDP1


def _fsdp1(params: Sequence[Param], mesh: Mesh, stage: int, view_of: ViewOf, spec_of: SpecOf) -> Iterator[Unit]:
    """One flat parameter for each layer and one for the rest, each cut over `shard` and copied over `dp`."""
    ranks = stage_ranks(mesh, stage)
    unit, made = Unit(ranks, (ranks,), stage), _Made()
    grid = grid_of(ranks, 1)
    if mesh.dp > 1:
        grid = tuple(ranks[at :: mesh.shard] for at in range(mesh.shard))
    flats: dict[int, list[Param]] = {}
    for p in sorted(params, key=lambda p: p.order):
        flats.setdefault(p.layer if 0 <= p.layer < AFTER else -1, []).append(p)
    held: dict[int, list[tuple[int, int]]] = {}  # by order in the model
    for members in flats.values():
        table, part = fsdp1_ranges([p.numel for p in members], mesh.shard)
        unit.stored += part
        held.update((p.order, ranges * mesh.dp) for p, ranges in zip(members, table, strict=True))
    for p in params:
        numel = np.array([stop - start for start, stop in held[p.order]], dtype=np.int64)
        if p.use_muon:
            unit.muon += numel
            unit.specs.append(spec_of(p, made.flat(view_of(p), grid, None, held[p.order]), None))
        else:
            unit.adamw += numel
    yield unit


# ----------------------------------------------------------------------------------------------------------- Megatron


def _megatron(params: Sequence[Param], mesh: Mesh, stage: int, view_of: ViewOf, spec_of: SpecOf) -> Iterator[Unit]:
    """Dense weights over dp x tp; experts, whole ones on each expert-parallel rank, over dp / ep x tp."""
    ranks = stage_ranks(mesh, stage)
    experts = [p for p in params if p.expert and len(p.shape) == 3]
    dense = [p for p in params if not (p.expert and len(p.shape) == 3)]
    if dense:
        yield _buffers(dense, mesh, grid_of(ranks, mesh.tp), (ranks,), stage, view_of, spec_of)
    if not experts:
        return
    for p in experts:
        check_divides(mesh, "experts", p.shape[0], p.name, "ep")
    groups = grid_of(ranks, mesh.tp)
    copies = tuple(tuple(rank for group in groups[e :: mesh.ep] for rank in group) for e in range(mesh.ep))
    local = [  # each expert is a parameter of its own
        replace(p, shape=p.shape[1:], name=f"{p.name}.{number}")
        for p in experts
        for number in range(p.shape[0] // mesh.ep)
    ]
    yield _buffers(local, mesh, grid_of(copies[0], mesh.tp), copies, stage, view_of, spec_of)


def _buffers(
    params: Sequence[Param],
    mesh: Mesh,
    grid: Grid,
    copies: tuple[Ranks, ...],
    stage: int,
    view_of: ViewOf,
    spec_of: SpecOf,
) -> Unit:
    unit, made = Unit(copies[0], copies, stage), _Made()
    cuts = [None if mesh.tp == 1 or (dim := cut_dim(p)) is None else Cut(dim, p.stride) for p in params]
    for p, cut in zip(params, cuts, strict=True):
        if cut is not None:
            check_divides(mesh, f"indices along dim {cut.dim}", p.shape[cut.dim] // cut.stride, p.name)
    sizes = [p.numel // (1 if cut is None else mesh.tp) for p, cut in zip(params, cuts, strict=True)]
    num = len(grid)
    order = sorted(range(len(params)), key=lambda i: params[i].order)  # the model's, not the optimizer's groups'
    table, total = megatron_ranges([sizes[i] for i in order], num, max(MEGATRON_BUCKET, 1_000_000 * num))
    ranges = dict(zip(order, table, strict=True))
    unit.stored[:] = total  # parameters lie in the buffer, gaps and all
    for i, p in enumerate(params):
        held = [ranges[i][replica] for replica in range(num) for _ in range(mesh.tp)]
        numel = np.array([stop - start for start, stop in held], dtype=np.int64)
        if p.use_muon:
            unit.muon += numel
            unit.specs.append(spec_of(p, made.flat(view_of(p), grid, cuts[i], held), None))
        else:
            unit.adamw += numel
    return unit
