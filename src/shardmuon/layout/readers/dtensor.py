"""DTensor: FSDP2, HSDP, tensor parallel, expert parallel and any product of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from shardmuon._torch import local_tensor, strided_shard
from shardmuon.comm.groups import my_rank
from shardmuon.layout import mesh as meshes
from shardmuon.layout.pieces import Held
from shardmuon.layout.readers.base import Claim, Grid, Group, Ties, ViewOf, layout_on
from shardmuon.layout.readers.meshes import mesh_key, placed
from shardmuon.layout.table import ParamLayout
from shardmuon.layout.views import Ints

StridedShard = strided_shard()


def cuts_of(placements: Sequence[Placement]) -> meshes.Placements:
    """DTensor's placements as plain data.

    Raises:
        ValueError: A placement of another kind: partial sums are no storage of a weight.
    """
    found: list[meshes.Shard | None] = []
    for placement in placements:
        if isinstance(placement, StridedShard):  # before Shard: a subclass of it in older torch
            found.append(meshes.Shard(placement.dim, int(placement.split_factor)))
        elif isinstance(placement, Shard):
            found.append(meshes.Shard(placement.dim))
        elif isinstance(placement, Replicate):
            found.append(None)
        else:
            raise ValueError(
                f"placement {placement} of {placements} is not Shard or Replicate. Redistribute the parameter first"
            )
    return tuple(found)


def held_as_placed(param: DTensor) -> list[tuple[Held, ...]]:
    """What this rank stores, by each reading of the placements that its storage fits."""
    (mesh, ranks), stored = mesh_key(param.device_mesh), tuple(local_tensor(param).shape)
    place = ranks.index(my_rank())
    mine = [reading[place] for reading in meshes.readings(tuple(param.shape), mesh, cuts_of(param.placements))]
    return [held for held, implied in mine if meshes.same_storage(implied, stored)]


def lies_as_placed(param: DTensor) -> bool:
    """True if this rank stores what the placements imply, so that another tensor can be redistributed to them."""
    return bool(held_as_placed(param))


class DTensorReader:
    """Layouts from a DTensor's own mesh and placements, as far as what ranks store bears them out."""

    def ties(self, param: Tensor, group: Group) -> Ties:
        ranks, rank = mesh_key(cast("DTensor", param).device_mesh)[1], my_rank()
        return Ties((rank,), tuple(sorted(ranks)) if rank in ranks else (rank,))

    def claim(self, param: Tensor, group: Group) -> Claim:
        assert isinstance(param, DTensor)
        mesh, ranks = mesh_key(param.device_mesh)
        if my_rank() not in ranks:
            raise ValueError(
                f"rank {my_rank()} is not in the parameter's mesh {param.device_mesh}; leave it out of this rank's "
                "groups"
            )
        form = tuple(param.shape), mesh, ranks, cuts_of(param.placements)
        return Claim(form, placed(param), tuple(local_tensor(param).shape))

    def layout(self, claims: Mapping[int, Claim], grid: Grid, view_of: ViewOf) -> ParamLayout:
        form = next(iter(claims.values())).form
        shape, mesh, ranks, placements = cast("tuple[Ints, Ints, Ints, meshes.Placements]", form)
        pieces = meshes.believed(shape, mesh, placements, [claims[rank].stored for rank in ranks])
        return layout_on(view_of(shape), tuple(sorted(ranks)), dict(zip(ranks, pieces, strict=True)))
