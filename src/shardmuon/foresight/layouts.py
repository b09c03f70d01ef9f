"""Meshes as users write them, and layouts that a live job's tensors would have, from a model's parameters and a mesh.

[Note: units]
    What is planned together is a unit: the parameters of one pipeline stage, of one ZeRO group, of Megatron's dense
    weights, or of its experts on one expert-parallel rank. Layouts come from the functions of layout/ that its readers
    use, so the plan has the digests of the live job's.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from shardmuon.foresight.counting import Ints
from shardmuon.foresight.models import AFTER, Param
from shardmuon.layout.grid import Grid, union
from shardmuon.layout.mesh import Cut, OnMesh, Shard, flat_part, parts_of, reading
from shardmuon.layout.pieces import Box
from shardmuon.layout.table import ParamLayout, Ranks, replicated
from shardmuon.layout.views import MatrixView
from shardmuon.momentum.stores import scale_shape
from shardmuon.texts import did_you_mean

_Engine = Literal["fsdp2", "ddp", "zero1", "zero2", "zero3", "megatron"]
_AXES = ("dp", "shard", "tp", "ep", "pp")
_AXIS = re.compile(rf"({'|'.join(_AXES)})=[1-9][0-9]*")
_MOST_RANKS = 10_240
_Ranges = tuple[tuple[int, int], ...]  # elements [start, stop) of a flat parameter on each rank
# parameter, what makes its layout of its view, and with what else; tensors that lie alike get one object
_Lay = Callable[..., ParamLayout]

# elements; megatron.core.distributed.DistributedDataParallel's default, for up to 40 ranks
_MEGATRON_BUCKET = 40_000_000
_ZERO3_SUB_GROUP = 1_000_000_000  # elements of a rank; DeepSpeed's default "sub_group_size"


# ----------------------------------------------------------------------------------------------------------- the mesh


@dataclass(frozen=True, slots=True)
class Mesh:
    """The arrangement of a job's ranks. They count as (pp, dp, shard, tp), the last axis fastest.

    Attributes:
        dp: Replicas: DDP's ranks, HSDP's outer axis, the data-parallel ranks of ZeRO and Megatron.
        shard: Ranks that parameters are cut over (FSDP).
        tp: Tensor-parallel ranks.
        ep: Expert-parallel ranks. They are taken from dp x shard, so they do not count in `world`.
        pp: Pipeline stages.
        gpus_per_node: Ranks of one node.
        engine: What cuts parameters up.
    """

    dp: int = 1
    shard: int = 1
    tp: int = 1
    ep: int = 1
    pp: int = 1
    gpus_per_node: int = 8
    engine: _Engine = "fsdp2"

    @property
    def world(self) -> int:
        """Ranks of the job."""
        return self.dp * self.shard * self.tp * self.pp

    @property
    def num_nodes(self) -> int:
        """Nodes, the last perhaps not full."""
        return -(-self.world // self.gpus_per_node)

    @property
    def masters(self) -> bool:
        """True if the engine keeps fp32 weights and momentum itself."""
        return self.engine == "megatron" or self.engine.startswith("zero")

    def __str__(self) -> str:
        """The mesh as a user writes it."""
        sizes = ((name, getattr(self, name)) for name in _AXES)
        return " ".join(f"{name}={size}" for name, size in sizes if size > 1) or "dp=1"


def parse_mesh(text: str | Mesh, engine: str | None = None, gpus_per_node: int | None = None) -> Mesh:
    """A mesh from text such as "dp=8 shard=64 tp=8".

    Args:
        text: ``axis=size`` pairs with spaces or commas between them; axes left out have size 1. Or a mesh as it is,
            with the other arguments put in where they are given.
        engine: What cuts parameters up. Default: "ddp" if there is `dp` and neither `shard`, `tp` nor `ep`; else
            "fsdp2".
        gpus_per_node: Ranks of a node. Default: 8.

    Raises:
        ValueError: The text is no mesh, or one that the engine does not make; says what to write.

    Examples:
        >>> parse_mesh("dp=2 shard=64 tp=8").world
        1024
    """
    if isinstance(text, Mesh):
        mesh = text
    else:
        sizes: dict[str, Any] = _sizes(text)
        mesh = Mesh(**sizes, engine="ddp" if set(sizes) == {"dp"} and sizes["dp"] > 1 else "fsdp2")
    given: dict[str, Any] = {"engine": engine, "gpus_per_node": gpus_per_node}
    mesh = replace(mesh, **{key: value for key, value in given.items() if value is not None})
    _check(mesh)
    return mesh


def _sizes(text: str) -> dict[str, int]:
    words = text.replace(",", " ").split()
    wrong = next((word for word in words if not _AXIS.fullmatch(word)), None if words else "")
    if wrong is not None:
        raise ValueError(
            f"mesh {text!r}: {wrong!r} is no axis=size. Axes are {', '.join(_AXES)}, sizes whole numbers of at least "
            '1: write for example "dp=2 shard=64 tp=8", or "dp=1" for one rank'
        )
    found = {axis: int(size) for axis, size in (word.split("=") for word in words)}
    if len(found) < len(words):
        raise ValueError(f"mesh {text!r}: an axis stands there twice. Write it once")
    return found


def _check(mesh: Mesh) -> None:
    """Raise ValueError for the first thing that is wrong with a mesh."""
    engine, engines = mesh.engine, get_args(_Engine)
    zero, lent = engine.startswith("zero"), mesh.dp if engine == "megatron" else mesh.shard * mesh.tp
    what = f"dp={mesh.dp}" if engine == "megatron" else f"shard x tp = {lent}"
    faults = (
        (
            engine not in engines,
            f"engine={engine!r} is not one of {', '.join(engines)}{did_you_mean(engine, engines)}. HSDP is fsdp2 with "
            "dp > 1, tensor parallelism alone is fsdp2 with tp > 1",
        ),
        (mesh.gpus_per_node < 1, f"gpus_per_node={mesh.gpus_per_node} must be at least 1"),
        (
            mesh.world > _MOST_RANKS,
            f"mesh {mesh} has {mesh.world:,} ranks, {_MOST_RANKS:,} are the most that are planned for",
        ),
        (
            (zero or engine in ("ddp", "megatron")) and mesh.shard > 1,
            f"mesh {mesh}: engine {engine} has no axis shard (it shares its state out over dp). Write "
            f"dp={mesh.dp * mesh.shard} instead of dp={mesh.dp} shard={mesh.shard}, or engine fsdp2",
        ),
        (
            zero and (mesh.tp > 1 or mesh.ep > 1),
            f"mesh {mesh}: {engine} with tp or ep is not supported by shardmuon. Write tp=1 ep=1",
        ),
        (
            engine == "ddp" and mesh.ep > 1,
            f"mesh {mesh}: engine ddp has no experts of its own. Write engine fsdp2 or megatron",
        ),
        (
            bool(lent % mesh.ep),
            f"mesh {mesh}: ep={mesh.ep} does not divide {what}, from which expert-parallel ranks are taken. Write an "
            f"ep that does, for example ep={_largest_divisor(lent, mesh.ep)}",
        ),
    )
    wrong = next((message for is_wrong, message in faults if is_wrong), None)
    if wrong:
        raise ValueError(wrong)


def _largest_divisor(number: int, limit: int) -> int:
    return max(n for n in range(1, min(number, limit) + 1) if number % n == 0)


def check_divides(mesh: Mesh, what: str, size: int, name: str, axis: Literal["tp", "ep"] = "tp") -> None:
    """Raise ValueError if an axis does not divide something; it says which size would."""
    given = mesh.tp if axis == "tp" else mesh.ep
    if size % given:
        good = _largest_divisor(size, given) if axis == "tp" else math.gcd(size, given)  # that still divides its ranks
        raise ValueError(
            f"mesh {mesh}: {axis}={given} does not divide the {size} {what} of {name}. Write {axis}={good}"
        )


# ------------------------------------------------------------------------------------------------------------- units


class Placed(NamedTuple):
    """A parameter with its layout, and its place on a mesh if it is a DTensor."""

    param: Param
    layout: ParamLayout
    place: OnMesh | None = None


class Unit(NamedTuple):
    """Parameters that one plan is made for, see [Note: units].

    Attributes:
        ranks: Its ranks.
        placed: Its parameters.
        stepped: Elements that each rank steps of a flat buffer with its padding; 0: those that it holds.
        stored: Elements of weights that each rank keeps in the model, whoever steps them; 0: those that it holds.
        stage: Its pipeline stage; of stages of equal layers the first.
    """

    ranks: Ranks
    placed: Sequence[Placed]
    stepped: int = 0
    stored: int = 0
    stage: int = 0

    def elements(self) -> Ints:
        """Elements that each rank steps with Muon and with AdamW, that it stores of weights, and scales of momentum
        that is kept in 8 bits: (4, ranks)."""
        muon, adamw, stored, scales = found = np.zeros((4, len(self.ranks)), dtype=np.int64)
        held = {layout: _held(layout) for layout in {one.layout for one in self.placed}}
        for param, layout, _ in self.placed:
            numel, num_scales = held[layout]
            of_kind = muon if param.use_muon else adamw
            of_kind += numel
            stored += numel
            scales += num_scales * param.use_muon
        if self.stepped:  # by one optimizer's group: all of one kind
            found[0 if self.placed[0].param.use_muon else 1] = self.stepped
        found[2] = self.stored or stored
        return found


def _held(layout: ParamLayout) -> Ints:
    """Elements, and scales of 8-bit momentum, by position in `layout.ranks`: (2, ranks)."""
    rows, known = layout.view.num_row_dims, dict[object, tuple[int, int]]()
    for of_rank in set(layout.held):
        pieces = [held.piece for held in of_rank]
        boxes = (piece for piece in pieces if isinstance(piece, Box) and piece.numel)
        scales = sum(math.prod(scale_shape(box.size, rows)) for box in boxes)
        known[of_rank] = sum(piece.numel for piece in pieces), scales
    return np.array([known[of_rank] for of_rank in layout.held], dtype=np.int64).T


def make_units(params: Sequence[Param], mesh: Mesh, view_of: Callable[[Param], MatrixView]) -> list[Unit]:
    """The units of a job.

    Args:
        params: The trainable parameters, in the order of the optimizer's groups.
        mesh: The arrangement of ranks.
        view_of: A parameter's matrices, or a view without any for one that is AdamW's.

    Raises:
        ValueError: The mesh does not fit the parameters; says what to write.
    """
    build = {"megatron": _megatron, "ddp": _plain, "fsdp2": _dtensor}.get(mesh.engine, _zero)
    made = cache(lambda make, *given: make(*given))
    size, alike, found = mesh.world // mesh.pp, dict[object, int](), list[Unit]()
    for stage, members in enumerate(_stages_of(params, mesh)):
        first = alike.setdefault(tuple((p.shape, view_of(p), p.group, p.cut, p.expert) for p in members), stage)
        ranks = tuple(range(stage * size, (stage + 1) * size))
        units = build(members, mesh, ranks, lambda param, make, *given: made(make, view_of(param), *given))
        found += [unit._replace(stage=first) for unit in units]
    return found


def _stages_of(params: Sequence[Param], mesh: Mesh) -> list[list[Param]]:
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


def _equal_cut_of(param: Param, mesh: Mesh) -> Cut | None:
    """The same of tensors that must be cut into equal parts."""
    cut = _cut_of(param, mesh)
    if cut is not None:
        check_divides(mesh, f"indices along dim {cut.dim}", param.shape[cut.dim] // cut.stride, param.name)
    return cut


# ------------------------------------------------------------------------------------- FSDP2, HSDP, TP, EP (DTensor)


def _dtensor(params: Sequence[Param], mesh: Mesh, ranks: Ranks, lay: _Lay) -> Iterator[Unit]:
    found = []
    for p in params:
        if p.expert:
            check_divides(mesh, "experts", p.shape[0], p.name, "ep")
        place = _dtensor_place(p, mesh, ranks)
        found.append(Placed(p, lay(p, _on_mesh, place), place))
    yield Unit(ranks, found)


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


def _on_mesh(view: MatrixView, place: OnMesh) -> ParamLayout:
    """The layout of a DTensor."""
    held, _ = zip(*reading(view.shape, place.mesh, place.placements), strict=True)
    return ParamLayout(view, place.ranks, held)


# ------------------------------------------------------------------------------------------------------ DDP, DDP x TP


def _plain(params: Sequence[Param], mesh: Mesh, ranks: Ranks, lay: _Lay) -> Iterator[Unit]:
    """Plain tensors: replicas over dp that share the work (`process_group`), shards over tp (`tp_group`)."""
    grid, found = _grid_of(ranks, mesh.tp), []
    for p in params:
        cut = _equal_cut_of(p, mesh)
        found.append(Placed(p, lay(p, _parts, grid, cut) if cut else lay(p, replicated, ranks)))
    yield Unit(ranks, found)


def _parts(view: MatrixView, grid: Grid, cut: Cut) -> ParamLayout:
    """A layout of equal tensor-parallel parts, one replica a row of the grid."""
    num = len(grid[0])
    of_row = parts_of(view.shape, cut, (view.shape[cut.dim] // num,) * num)
    held = {rank: pieces for row in grid for rank, pieces in zip(row, of_row, strict=True)}
    return ParamLayout(view, union(grid), tuple(held[rank] for rank in union(grid)))


def _grid_of(ranks: Ranks, tp: int) -> Grid:
    """The tensor-parallel groups of all replicas."""
    return tuple(ranks[i : i + tp] for i in range(0, len(ranks), tp))


# ------------------------------------------------------------------------------- flat buffers: ZeRO, Megatron


def _flat(view: MatrixView, grid: Grid, cut: Cut | None, held: _Ranges) -> ParamLayout:
    """A layout of flat ranges. `held`: elements [start, stop) on each rank of the grid, ascending."""
    ranks, num = union(grid), len(grid[0])
    part_of = {rank: part for row in grid for part, rank in enumerate(row)}
    pieces = (
        flat_part(view.shape, cut, part_of[rank], num, *of_rank) for rank, of_rank in zip(ranks, held, strict=True)
    )
    return ParamLayout(view, ranks, tuple(pieces))


def _zero(params: Sequence[Param], mesh: Mesh, ranks: Ranks, lay: _Lay) -> Iterator[Unit]:
    """One unit for each of the optimizer's groups, of ZeRO 3 for each of its sub-groups."""
    number, num, grid = int(mesh.engine[-1]), len(ranks), _grid_of(ranks, 1)
    for _, of_group in itertools.groupby(params, key=lambda p: p.group):
        groups: list[list[Param]] = [[]]
        for p in of_group:
            groups[-1].append(p)
            if number == 3 and sum(-(-one.numel // num) for one in groups[-1]) >= _ZERO3_SUB_GROUP:
                groups.append([])
        for members in filter(None, groups):
            table, length = _zero_ranges([p.numel for p in members], num, number)
            placed = [Placed(p, lay(p, _flat, grid, None, held)) for p, held in zip(members, table, strict=True)]
            yield Unit(ranks, placed, length, length if number == 3 else length * num)


def _megatron(params: Sequence[Param], mesh: Mesh, ranks: Ranks, lay: _Lay) -> Iterator[Unit]:
    """Dense weights over dp x tp; experts, whole ones on each expert-parallel rank, over dp / ep x tp."""
    experts = [p for p in params if p.expert and len(p.shape) == 3]
    dense = [p for p in params if not (p.expert and len(p.shape) == 3)]
    groups = _grid_of(ranks, mesh.tp)
    if dense:
        yield _buffers(dense, mesh, groups, lay)
    for p in experts:
        check_divides(mesh, "experts", p.shape[0], p.name, "ep")
    local = [  # each expert is a parameter of its own
        replace(p, shape=p.shape[1:], name=f"{p.name}.{number}")
        for p in experts
        for number in range(p.shape[0] // mesh.ep)
    ]
    for first in range(mesh.ep if local else 0):
        yield _buffers(local, mesh, groups[first :: mesh.ep], lay)


def _buffers(params: Sequence[Param], mesh: Mesh, grid: Grid, lay: _Lay) -> Unit:
    cuts, num = [_equal_cut_of(p, mesh) for p in params], len(grid)
    order = sorted(range(len(params)), key=lambda i: params[i].order)  # the model's
    sizes = [params[i].numel // (1 if cuts[i] is None else mesh.tp) for i in order]
    table, total = megatron_ranges(sizes, num, max(_MEGATRON_BUCKET, 1_000_000 * num))
    held = {
        i: tuple(of_replica for of_replica in ranges for _ in range(mesh.tp))
        for i, ranges in zip(order, table, strict=True)
    }
    placed = [Placed(p, lay(p, _flat, grid, cuts[i], held[i])) for i, p in enumerate(params)]
    return Unit(union(grid), placed, stored=total)  # parameters lie in the buffer, gaps and all


def _zero_ranges(sizes: Sequence[int], num_ranks: int, stage: int) -> tuple[list[_Ranges], int]:
    """_Ranges that DeepSpeed gives each rank of the parameters of one group, and the length of a flat.

    Stages 1 and 2: the parameters one after the other, padded at the end to a multiple of 2 x ranks, in equal parts
    (`nccl_start_alignment_factor` of stage_1_and_2.py, 0.19). Stage 3: an equal part of each, padded at its end.

    Returns:
        For each parameter its elements [start, stop) on each rank, and the elements of a flat, padding and all.
    """
    if stage == 3:
        each = [-(-size // num_ranks) for size in sizes]
        table = [
            tuple((min(r * part, size), min((r + 1) * part, size)) for r in range(num_ranks))
            for size, part in zip(sizes, each, strict=True)
        ]
        return table, sum(each)
    unit = 2 * num_ranks
    part = -(-sum(sizes) // unit) * unit // num_ranks
    starts = [0, *itertools.accumulate(sizes)]
    return [in_parts(start, size, part, num_ranks) for start, size in zip(starts, sizes, strict=False)], part


def in_parts(at: int, size: int, part: int, num_ranks: int) -> _Ranges:
    """The elements of [at, at + size) in each of equal parts, counted from `at`; (0, 0) where there are none."""
    found = [(0, 0)] * num_ranks
    for rank in range(at // part, min(num_ranks - 1, (at + size - 1) // part) + 1):
        start, stop = max(at, rank * part), min(at + size, (rank + 1) * part)
        if start < stop:
            found[rank] = start - at, stop - at
    return tuple(found)


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
    table: list[_Ranges] = [()] * len(sizes)
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
            table[number] = in_parts(first, sizes[number], padded // num_ranks, num_ranks)
        inside, end = [], 0
    return table, total
