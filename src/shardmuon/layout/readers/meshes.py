"""What a DTensor's mesh and placements say, in words and numbers. Imports no DTensor."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.tensor import DeviceMesh, DTensor

    from shardmuon.layout.views import Ints


@lru_cache(maxsize=256)
def mesh_key(mesh: DeviceMesh) -> tuple[Ints, Ints]:
    """Its shape, and its ranks in order."""
    return tuple(mesh.shape), tuple(mesh.mesh.flatten().tolist())


def placed(tensor: DTensor) -> str:
    """Its placements and mesh, for messages."""
    mesh = tensor.device_mesh
    axes = f" named {mesh.mesh_dim_names}" if mesh.mesh_dim_names else ""
    return f"{tuple(tensor.placements)} on mesh {tuple(mesh.shape)}{axes}"
