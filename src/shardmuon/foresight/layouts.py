"""Meshes as users write them, and the layouts that a live job's tensors would have for a model and a mesh.

[Note: units]
    A unit is a set of parameters that are planned together: those of one pipeline stage, or of one ZeRO group. Layouts
    come from the same functions of layout/ that read live tensors, so the plan has the live job's digests.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from shardmuon.foresight.counting import Ints
from shardmuon.foresight.models import AFTER, Param
from shardmuon.layout.mesh import OnMesh, Shard, flat_part, reading
from shardmuon.layout.pieces import Box
from shardmuon.layout.table import ParamLayout, Ranks
from shardmuon.layout.views import MatrixView
from shardmuon.momentum.stores import scale_shape

_Engine = Literal["torch", "zero"]
_AXES = ("dp", "shard", "tp", "ep", "pp")
_AXIS = re.compile(rf"({'|'.join(_AXES)})=[1-9][0-9]*")
_MOST_RANKS = 10_240
_Ranges = tuple[tuple[int, int], ...]  # elements [start, stop) of a flat parameter on each rank
_ViewOf = Callable[[Param], MatrixView]


# ----------------------------------------------------------------------------------------------------------- the mesh


@dataclass(frozen=True)
class Mesh:
    """Arrangement of a job's ranks, numbered in the order (pp, dp, shard, tp), last axis fastest.

    Attributes:
        dp: Replicas: DDP's ranks, HSDP's outer axis; with engine "zero" the ranks that flat buffers are sharded over.
        shard: Ranks that parameters are sharded over (FSDP).
        tp: Tensor-parallel ranks.
        ep: Expert-parallel ranks. They are taken from shard x tp, so they do not multiply `world`.
        pp: Pipeline stages.
        gpus_per_node: Ranks of one node.
        engine: Framework that shards parameters: "torch" (DDP, FSDP2, HSDP, TP, EP), or "zero" (DeepSpeed's ZeRO 1 and
            2, which store fp32 weights and momentum themselves).
    """

    dp: int = 1
    shard: int = 1
    tp: int = 1
    ep: int = 1
    pp: int = 1
    gpus_per_node: int = 8
    engine: _Engine = "torch"

    @property
    def world(self) -> int:
        """Ranks of the job."""
        return self.dp * self.shard * self.tp * self.pp

    def __str__(self) -> str:
        """The mesh as a user writes it."""
        sizes = ((name, getattr(self, name)) for name in _AXES)
        return " ".join(f"{name}={size}" for name, size in sizes if size > 1) or "dp=1"


def parse_mesh(text: str | Mesh, engine: str | None = None, gpus_per_node: int | None = None) -> Mesh:
    """Parse a mesh from text such as "dp=8 shard=64 tp=8".

    Args:
        text: ``axis=size`` pairs separated by spaces or commas; omitted axes have size 1. Or a `Mesh`; `engine` and
            `gpus_per_node` replace the mesh's own if given.
        engine: "torch" (default) or "zero", see `Mesh`.
        gpus_per_node: Ranks of a node. Default: 8.

    Raises:
        ValueError: The text is not a mesh, or the engine does not support it; the message says what to write.

    Examples:
        >>> parse_mesh("dp=2 shard=64 tp=8").world
        1024
    """
    mesh = text if isinstance(text, Mesh) else Mesh(**_sizes(text))
    given: dict[str, Any] = {"engine": engine, "gpus_per_node": gpus_per_node}
    mesh = replace(mesh, **{key: value for key, value in given.items() if value is not None})
    _check(mesh)
    return mesh


def _sizes(text: str) -> dict[str, Any]:
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
    """Raise ValueError for the first fault of a mesh."""
    engine, lent = mesh.engine, mesh.shard * mesh.tp
    faults = (
        (
            engine not in get_args(_Engine),
            f'engine={engine!r} must be "torch" or "zero" (ZeRO 1 and 2). For DDP write dp=N alone; for ZeRO 3, FSDP1 '
            "and Megatron shard=N with tp and ep, whose seconds are near (how near, and what Megatron keeps: "
            "docs/foresight.md); the plan of a live optimizer has a price of its own",
        ),
        (mesh.gpus_per_node < 1, f"gpus_per_node={mesh.gpus_per_node} must be at least 1"),
        (
            mesh.world > _MOST_RANKS,
            f"mesh {mesh} has {mesh.world:,} ranks, {_MOST_RANKS:,} are the most that are planned for",
        ),
        (
            engine == "zero" and (lent > 1 or mesh.ep > 1),
            f"mesh {mesh}: engine zero shares its state out over dp and has no other axis but pp. Write "
            f"dp={mesh.dp * lent} alone, or no engine",
        ),
        (
            bool(lent % mesh.ep),
            f"mesh {mesh}: ep={mesh.ep} does not divide shard x tp = {lent}, from which expert-parallel ranks are "
            f"taken. Write an ep that does, for example ep={math.gcd(lent, mesh.ep)}",
        ),
    )
    wrong = next((message for is_wrong, message in faults if is_wrong), None)
    if wrong:
        raise ValueError(wrong)


# ------------------------------------------------------------------------------------------------------------- units


class Placed(NamedTuple):
    """Parameter with its layout and, for a DTensor, its mesh and placements."""

    param: Param
    layout: ParamLayout
    place: OnMesh | None = None


class Unit(NamedTuple):
    """Parameters that share one plan, see [Note: units].

    Attributes:
        ranks: Ranks of the unit.
        placed: Parameters of the unit.
        stepped: For a flat buffer (ZeRO): elements that each rank updates, padding included; every rank stores the
            weights of the whole buffer. 0: no flat buffer, each rank updates and stores the elements it holds.
        stage: Pipeline stage; for stages with equal layers, the first of them.
    """

    ranks: Ranks
    placed: Sequence[Placed]
    stepped: int = 0
    stage: int = 0

    def elements(self) -> Ints:
        """Counts per rank, (4, ranks): elements that Muon updates, elements that AdamW updates, weights stored, and
        scales of 8-bit momentum."""
        muon, adamw, stored, scales = found = np.zeros((4, len(self.ranks)), dtype=np.int64)
        held = {layout: _held(layout) for layout in {one.layout for one in self.placed}}
        for param, layout, _ in self.placed:
            numel, num_scales = held[layout]
            of_kind = muon if param.use_muon else adamw
            of_kind += numel
            stored += numel
            scales += num_scales * param.use_muon
        if self.stepped:  # the parameters of one optimizer group: all Muon's or all AdamW's
            found[0 if self.placed[0].param.use_muon else 1] = self.stepped
            found[2] = self.stepped * len(self.ranks)
        return found


def _held(layout: ParamLayout) -> Ints:
    """Elements held and their scales of 8-bit momentum, by position in `layout.ranks`: (2, ranks)."""
    rows, known = layout.view.num_row_dims, dict[object, tuple[int, int]]()
    for of_rank in set(layout.held):
        pieces = [held.piece for held in of_rank]
        boxes = (piece for piece in pieces if isinstance(piece, Box) and piece.numel)
        scales = sum(math.prod(scale_shape(box.size, rows)) for box in boxes)
        known[of_rank] = sum(piece.numel for piece in pieces), scales
    return np.array([known[of_rank] for of_rank in layout.held], dtype=np.int64).T


def make_units(params: Sequence[Param], mesh: Mesh, view_of: _ViewOf) -> list[Unit]:
    """Split a job into units.

    Args:
        params: Trainable parameters, in the order of the optimizer's groups.
        mesh: Arrangement of ranks.
        view_of: Parameter -> view of its matrices; a view without matrices for AdamW's parameters.

    Raises:
        ValueError: The mesh does not fit the parameters; the message says what to write.
    """
    build = _flat_buffers if mesh.engine == "zero" else _on_meshes
    size, alike, found = mesh.world // mesh.pp, dict[object, int](), list[Unit]()
    for stage, members in enumerate(_stages_of(params, mesh)):
        first = alike.setdefault(tuple((p.shape, view_of(p), p.group, p.cut, p.expert) for p in members), stage)
        ranks = tuple(range(stage * size, (stage + 1) * size))
        found += [unit._replace(stage=first) for unit in build(members, mesh, ranks, view_of)]
    return found


def _stages_of(params: Sequence[Param], mesh: Mesh) -> list[list[Param]]:
    """Parameters of each pipeline stage. Layers are divided evenly, with one more for the first stages if there is a
    remainder. Parameters before the layers go to the first stage, those after the layers to the last."""
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


# ---------------------------------------------------------------------------------------- DDP, FSDP2, HSDP, TP, EP


def _on_meshes(params: Sequence[Param], mesh: Mesh, ranks: Ranks, view_of: _ViewOf) -> list[Unit]:
    lay, found = cache(_on_mesh), []
    for p in params:
        if p.expert and p.shape[0] % mesh.ep:
            raise ValueError(
                f"mesh {mesh}: ep={mesh.ep} does not divide the {p.shape[0]} experts of {p.name}. Write "
                f"ep={math.gcd(p.shape[0], mesh.ep)}"
            )
        place = _place(p, mesh, ranks)
        found.append(Placed(p, lay(view_of(p), place), place))
    return [Unit(ranks, found)]


def _place(param: Param, mesh: Mesh, ranks: Ranks) -> OnMesh:
    """Placements of a parameter after `parallelize_module` and then `fully_shard`; experts are placed as in torchtitan.

    With ep > 1 experts are on a mesh (dp, shard x tp / ep, ep): each expert-parallel rank has whole experts, which FSDP
    shards along their rows if there are more ranks than experts, else along the stack of experts. DDP's plain tensors
    are treated as replicated DTensors.
    """
    axes: list[tuple[int, Shard | None]] = [(mesh.dp, None)]
    if param.expert and mesh.ep > 1:
        share, num = mesh.shard * mesh.tp // mesh.ep, param.shape[0]
        axes.append((share, Shard(1) if share * mesh.ep > num else Shard(0, mesh.ep)))
        axes.append((mesh.ep, Shard(0)))
    else:
        dim = None if param.cut is None or mesh.tp == 1 else len(param.shape) + param.cut
        axes.append((mesh.shard, Shard(0, mesh.tp) if dim == 0 else Shard(0)))
        axes.append((mesh.tp, None if dim is None else Shard(dim)))
    axes = [(size, placement) for size, placement in axes if size > 1] or [(1, None)]
    return OnMesh(tuple(size for size, _ in axes), ranks, tuple(placement for _, placement in axes))


def _on_mesh(view: MatrixView, place: OnMesh) -> ParamLayout:
    held, _ = zip(*reading(view.shape, place.mesh, place.placements), strict=True)
    return ParamLayout(view, place.ranks, held)


# -------------------------------------------------------------------------------------------- flat buffers (ZeRO 1, 2)


def _flat_buffers(params: Sequence[Param], mesh: Mesh, ranks: Ranks, view_of: _ViewOf) -> list[Unit]:
    """One unit per optimizer group: a flat buffer of the group's parameters, padded at the end to a multiple of 2 x
    ranks and cut into equal parts (`nccl_start_alignment_factor` in DeepSpeed's stage_1_and_2.py, 0.19)."""
    lay, num, found = cache(_flat), len(ranks), []
    for _, of_group in itertools.groupby(params, key=lambda p: p.group):
        members = list(of_group)
        *starts, total = itertools.accumulate((p.numel for p in members), initial=0)
        part = 2 * -(-total // (2 * num))
        parts = [in_parts(start, p.numel, part, num) for start, p in zip(starts, members, strict=True)]
        placed = [Placed(p, lay(view_of(p), ranks, held)) for p, held in zip(members, parts, strict=True)]
        found.append(Unit(ranks, placed, part))
    return found


def _flat(view: MatrixView, ranks: Ranks, held: _Ranges) -> ParamLayout:
    return ParamLayout(view, ranks, tuple(flat_part(view.shape, None, 0, 1, *of_rank) for of_rank in held))


def in_parts(at: int, size: int, part: int, num_ranks: int) -> _Ranges:
    """Range of the elements [at, at + size) that falls into each of `num_ranks` equal parts of `part` elements. Ranges
    are relative to `at`; (0, 0) if empty."""
    cuts = [min(max(rank * part - at, 0), size) for rank in range(num_ranks + 1)]
    return tuple((start, stop) if start < stop else (0, 0) for start, stop in itertools.pairwise(cuts))
