"""DTensor: FSDP2, HSDP, tensor parallel, expert parallel and any product of them.

[Note: order of cuts]
    Placements are listed by mesh axis, but a tensor dim that several axes cut is cut in an order of its own. Plain
    `Shard`s cut in axis order. `_StridedShard(dim, split_factor=s)` says that s shards existed before this axis cut:
    `fully_shard` on top of tensor parallelism gives mesh (dp, tp), placements (_StridedShard(0, 2), Shard(0)), where
    tp cuts first and dp cuts inside. On sizes that do not divide, reading such placements from left to right (as
    torch's own offset helper and `distribute_tensor` do) names other rows than `fully_shard` stores. So there are two
    readings, `_nested` (what `fully_shard` does) and `_left_to_right`, and the stored shapes decide.

[Note: lone strided shard]
    When the axis that had cut first is gathered away, `_StridedShard(0, 2)` stands alone: the dim is cut in 2, each
    part is cut by the axis, and a rank keeps its share of *both* parts: rows {0, 1, 4, 5} of 8, not rows 0 to 3. A
    rank's storage is then several pieces, one after the other.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from shardmuon._torch import dtensor_around, local_if_alike, local_tensor, placement_spec, strided_shard
from shardmuon.engines.base import Claim, Description
from shardmuon.engines.meshes import mesh_key, placed
from shardmuon.planning.layout import Box, Holder, ParamLayout
from shardmuon.planning.views import MatrixView, Shape

Ranges = tuple[tuple[int, int], ...]  # [start, stop) intervals of one tensor dim, in storage order

StridedShard = strided_shard()


class MeshCut(NamedTuple):
    """One mesh axis that cuts a tensor dim."""

    axis: int
    num_parts: int
    split_factor: int  # 1 for a plain Shard


def _chunk(ranges: Ranges, num_parts: int, part: int) -> Ranges:
    """Part `part` of `torch.chunk(num_parts)` over the elements of `ranges` put one after the other."""
    total = sum(stop - start for start, stop in ranges)
    step = -(-total // num_parts)
    first, last = min(total, part * step), min(total, (part + 1) * step)
    out, at = [], 0
    for start, stop in ranges:
        a, b = max(first, at), min(last, at + stop - start)
        if a < b:
            out.append((start + a - at, start + b - at))
        at += stop - start
    return tuple(out)


def _strided_chunk(ranges: Ranges, num_parts: int, part: int, split_factor: int) -> Ranges:
    """MeshCut in `split_factor`, then cut each of those in `num_parts`; keep part `part` of each."""
    blocks = (_chunk(ranges, split_factor, block) for block in range(split_factor))
    return tuple(itertools.chain.from_iterable(_chunk(block, num_parts, part) for block in blocks))


def _left_to_right(size: int, cuts: Sequence[MeshCut], coordinate: Sequence[int]) -> Ranges:
    ranges: Ranges = ((0, size),)
    for cut in cuts:
        ranges = _strided_chunk(ranges, cut.num_parts, coordinate[cut.axis], cut.split_factor)
    return ranges


def _nested(size: int, cuts: Sequence[MeshCut], coordinate: Sequence[int]) -> Ranges:
    ordered: list[tuple[MeshCut, int]] = []  # (cut, split factor that no listed axis accounts for), first cut first
    for cut in reversed(cuts):
        before, position = 1, 0
        while before < cut.split_factor and position < len(ordered):
            before *= ordered[position][0].num_parts
            position += 1
        if cut.split_factor % before:
            return _left_to_right(size, cuts, coordinate)
        ordered.insert(position, (cut, cut.split_factor // before))
    ranges: Ranges = ((0, size),)
    for cut, split_factor in ordered:
        ranges = _strided_chunk(ranges, cut.num_parts, coordinate[cut.axis], split_factor)
    return ranges


def _cuts(placements: Sequence[Placement], mesh_shape: Shape, dim: int) -> tuple[MeshCut, ...]:
    cuts = []
    for axis, placement in enumerate(placements):
        if isinstance(placement, StridedShard):  # before Shard: a subclass of it in older torch
            if placement.dim == dim:
                cuts.append(MeshCut(axis, mesh_shape[axis], int(placement.split_factor)))
        elif isinstance(placement, Shard) and placement.dim == dim:
            cuts.append(MeshCut(axis, mesh_shape[axis], 1))
    return tuple(cuts)


def _holders(rank: int, ranges: Sequence[Ranges]) -> tuple[list[Holder], Shape]:
    """The boxes that the product of these ranges (one entry per dim) makes, and the shape of storage."""
    shape = tuple(sum(stop - start for start, stop in dim) for dim in ranges)
    starts = [list(itertools.accumulate((b - a for a, b in dim), initial=0)) for dim in ranges]
    holders = [
        Holder(
            rank,
            Box(tuple(ranges[d][i][0] for d, i in enumerate(pick)), tuple(b - a for a, b in _pick(ranges, pick))),
            tuple(starts[d][i] for d, i in enumerate(pick)),
        )
        for pick in itertools.product(*(range(len(dim)) for dim in ranges))
    ]
    return holders, shape


def _pick(ranges: Sequence[Ranges], pick: Sequence[int]) -> list[tuple[int, int]]:
    return [ranges[d][i] for d, i in enumerate(pick)]


@lru_cache(maxsize=4096)
def mesh_layouts(
    view: MatrixView,
    mesh_shape: Shape,
    mesh_ranks: tuple[int, ...],
    placements: tuple[Placement, ...],
) -> tuple[tuple[ParamLayout, dict[int, Shape]], ...]:
    """The readings of DTensor placements, likeliest first, each with the storage shape it implies on every rank.

    Args:
        view: The tensor's matrices and global shape.
        mesh_shape: Size of each mesh axis.
        mesh_ranks: Global ranks of the mesh in row-major order.
        placements: One `Shard`, `_StridedShard` or `Replicate` per mesh axis.

    Raises:
        ValueError: A placement of another kind (partial sums are no storage of a weight).
    """
    for placement in placements:
        if not isinstance(placement, (Shard, StridedShard, Replicate)):
            raise ValueError(
                f"placement {placement} of {placements} is not Shard or Replicate. Redistribute the parameter first"
            )
    cuts = [_cuts(placements, mesh_shape, dim) for dim in range(len(view.shape))]
    readings = [_nested]
    if any(cut.split_factor > 1 for dim in cuts for cut in dim):
        readings.append(_left_to_right)
    found: list[tuple[ParamLayout, dict[int, Shape]]] = []
    coordinates = list(itertools.product(*(range(n) for n in mesh_shape)))
    for reading in readings:
        holders: list[Holder] = []
        shapes: dict[int, Shape] = {}
        for rank, coordinate in zip(mesh_ranks, coordinates, strict=True):
            ranges = [reading(size, cuts[dim], coordinate) for dim, size in enumerate(view.shape)]
            mine, shapes[rank] = _holders(rank, ranges)
            holders.extend(mine)
        layout = ParamLayout(view, tuple(sorted(mesh_ranks)), tuple(holders))
        if not found or layout.holders != found[0][0].holders:
            found.append((layout, shapes))
    return tuple(found)


def _layout_from_shapes(
    view: MatrixView,
    mesh_shape: Shape,
    mesh_ranks: tuple[int, ...],
    placements: tuple[Placement, ...],
    shapes: dict[int, Shape],
) -> ParamLayout:
    """One plain Shard with any number of rows a rank (Megatron-FSDP): rows follow each other along the mesh axis."""
    sharded = [
        (axis, p.dim) for axis, p in enumerate(placements) if isinstance(p, Shard) and not isinstance(p, StridedShard)
    ]
    if len(sharded) != 1 or any(isinstance(p, StridedShard) for p in placements):
        raise ValueError("cannot tell which elements a rank holds when its storage differs from its placements")
    axis, dim = sharded[0]
    holders: list[Holder] = []
    zeros = (0,) * len(view.shape)
    ends: dict[Shape, int] = {}  # coordinates but for the sharded axis -> rows seen so far
    for rank, coordinate in zip(mesh_ranks, itertools.product(*(range(n) for n in mesh_shape)), strict=True):
        line = coordinate[:axis] + coordinate[axis + 1 :]
        start = ends.get(line, 0)
        size = shapes[rank] if len(shapes[rank]) == len(view.shape) else zeros
        ends[line] = start + size[dim]
        offset = tuple(start if d == dim else 0 for d in range(len(view.shape)))
        holders.append(Holder(rank, Box(offset, size), zeros))
    return ParamLayout(view, tuple(sorted(mesh_ranks)), tuple(holders))


class DTensorEngine:
    """Layouts from a DTensor's own mesh and placements, checked against what it stores."""

    cuts_stacks_by_placements = True  # see engines/kept.py

    def recognizes(self, param: Tensor) -> bool:
        return isinstance(param, DTensor)

    def shape(self, param: Tensor) -> Shape:
        return tuple(param.shape)

    def describe(self, param: Tensor, view: MatrixView, group: Any) -> Description:
        assert isinstance(param, DTensor)
        mesh = param.device_mesh
        mesh_shape, mesh_ranks = mesh_key(mesh)
        rank = mesh.get_rank()
        if rank not in mesh_ranks:
            raise ValueError(f"rank {rank} is not in the parameter's mesh {mesh}; leave it out of this rank's groups")
        placements = tuple(param.placements)
        claims = tuple(
            Claim(layout, shapes[rank]) for layout, shapes in mesh_layouts(view, mesh_shape, mesh_ranks, placements)
        )
        ranks = claims[0].layout.ranks

        def from_shapes(shapes: Sequence[Shape]) -> ParamLayout:
            by_rank = dict(zip(ranks, shapes, strict=True))
            return _layout_from_shapes(view, mesh_shape, mesh_ranks, placements, by_rank)

        stored = tuple(self.storage(param).shape)
        hint = mesh.get_group() if mesh.ndim == 1 else None
        return Description(ranks, claims, stored, placed(param), hint, from_shapes)

    def storage(self, tensor: Tensor) -> Tensor:
        assert isinstance(tensor, DTensor)
        local = local_tensor(tensor)
        return local.detach() if local.requires_grad and torch.is_grad_enabled() else local

    def stored_alike(self, tensor: Tensor, param: Tensor) -> Tensor | None:
        if type(tensor) is not DTensor:
            return None
        assert isinstance(param, DTensor)
        local = local_if_alike(tensor, param)
        return local if local is not None and local.layout is torch.strided else None

    def wrap(self, storage: Tensor, param: Tensor, shape: Shape | None = None) -> Tensor:
        assert isinstance(param, DTensor)
        size = param.shape if shape is None else torch.Size(shape)
        stride = param.stride() if shape is None else tuple(itertools.accumulate((1, *size[:0:-1]), operator.mul))[::-1]
        return dtensor_around(storage, param.device_mesh, param.placements, size, stride)

    def is_aligned(self, grad: Tensor, param: Tensor) -> bool:
        assert isinstance(param, DTensor)
        if not isinstance(grad, DTensor):
            raise ValueError(f"its gradient is a plain tensor, the parameter a DTensor placed {placed(param)}")
        if grad.device_mesh != param.device_mesh or grad.shape != param.shape:
            raise ValueError(
                f"its gradient of shape {tuple(grad.shape)} is placed {placed(grad)}, the parameter of shape "
                f"{tuple(param.shape)} {placed(param)}. Redistribute the gradient to the parameter's mesh"
            )
        return grad.placements == param.placements

    def align(self, grad: Tensor, param: Tensor) -> Tensor:
        assert isinstance(grad, DTensor)
        assert isinstance(param, DTensor)
        return grad.redistribute(placements=param.placements)

    def signature(self, param: Tensor) -> object:
        assert isinstance(param, DTensor)
        spec = placement_spec(param)
        return spec.shape, spec.mesh, spec.placements, local_tensor(param).shape

    def lacks_gradient(self, param: Tensor) -> bool:
        return False
