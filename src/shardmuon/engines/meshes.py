"""What a DTensor's mesh and placements say, in words and numbers. Imports no DTensor."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.tensor import DeviceMesh, DTensor

    from shardmuon.planning.views import Shape


@lru_cache(maxsize=256)
def mesh_key(mesh: DeviceMesh) -> tuple[Shape, tuple[int, ...]]:
    """Its shape, and its ranks in order."""
    return tuple(mesh.shape), tuple(mesh.mesh.flatten().tolist())


def placed(tensor: DTensor) -> str:
    """Its placements and mesh, for messages."""
    names = tensor.device_mesh.mesh_dim_names
    axes = f" named {names}" if names else ""
    return f"{tuple(tensor.placements)} on mesh {tuple(tensor.device_mesh.shape)}{axes}"
