"""DTensor: FSDP2, HSDP, tensor parallel, expert parallel and any product of them. What its placements say is read by
layout/mesh.py; here are what is DTensor's own, and this planner's types."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from shardmuon._torch import dtensor_around, local_if_alike, local_tensor, placement_spec, strided_shard
from shardmuon.engines.base import Claim, Description
from shardmuon.layout.mesh import one_after_the_other, readings
from shardmuon.layout.readers.dtensor import cuts_of
from shardmuon.layout.readers.meshes import mesh_key, placed
from shardmuon.planning.layout import ParamLayout, layout_of
from shardmuon.planning.views import MatrixView, Shape

StridedShard = strided_shard()


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
    return tuple(
        (
            layout_of(view, mesh_ranks, [held for held, _ in reading]),
            {rank: stored for rank, (_, stored) in zip(mesh_ranks, reading, strict=True)},
        )
        for reading in readings(view.shape, mesh_shape, cuts_of(placements))
    )


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
            in_order = [by_rank[rank] for rank in mesh_ranks]
            return layout_of(
                view, mesh_ranks, one_after_the_other(view.shape, mesh_shape, cuts_of(placements), in_order)
            )

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
