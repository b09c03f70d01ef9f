"""Engine for DTensors, as created by FSDP2, HSDP, tensor parallelism, expert parallelism and their combinations.

Only this file uses the private DTensor names that a step needs (`_local_tensor`, `_spec`, `DTensorSpec`), as defined in
torch 2.11 to 2.13. Public properties would be slow: they take five times as long to read as those of a plain tensor.

torch.distributed.tensor is imported only when the first DTensor appears, because importing it takes longer than
importing torch itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from shardmuon._torch import is_dtensor, strided_shard
from shardmuon.comm.groups import my_rank
from shardmuon.layout import mesh as meshes
from shardmuon.layout.engines.base import Claim, Engine, Extent, Grid, Group, Stored, Ties
from shardmuon.layout.views import Ints, row_major

if TYPE_CHECKING:
    from torch.distributed.tensor import DeviceMesh, DTensor
    from torch.distributed.tensor.placement_types import Placement


_LOCAL = attrgetter("_local_tensor")
_PLACED = attrgetter("shape", "_spec.mesh", "_spec.placements")


class DTensorEngine(Engine):
    """Engine (storage adapter) for DTensors, whose mesh and placements determine which part of a tensor each rank
    stores. The engine raises an error if a local tensor does not match the placements."""

    believes_placements = True

    def recognizes(self, param: Tensor) -> bool:
        return is_dtensor(param)

    @staticmethod
    def placed(tensor: DTensor) -> str:
        """Format a DTensor's placements and mesh for error messages."""
        mesh = tensor.device_mesh
        axes = f" named {mesh.mesh_dim_names}" if mesh.mesh_dim_names else ""
        return f"{tuple(tensor.placements)} on mesh {tuple(mesh.shape)}{axes}"

    def ties(self, param: Any, group: Group) -> Ties:
        ranks, rank = _ranks_of(param.device_mesh), my_rank()
        return Ties((rank,), tuple(sorted(ranks)) if rank in ranks else (rank,))

    def claim(self, param: Any, group: Group) -> Claim:
        mesh = param.device_mesh
        place = meshes.OnMesh(tuple(mesh.shape), _ranks_of(mesh), _cuts_of(param.placements))
        if my_rank() not in place.ranks:
            raise ValueError(
                f"rank {my_rank()} is not in the parameter's mesh {mesh}; leave it out of this rank's groups"
            )
        return Claim((tuple(param.shape), place), self.placed(param), Extent(tuple(param._local_tensor.shape)))

    def stored(self, form: tuple[Any, ...], extents: Mapping[int, Extent], grid: Grid) -> Stored:
        shape, place = form
        found = place.reading(shape)
        if not all(meshes.same_storage(implied, extents[rank].shape) for rank, (_, implied) in found.items()):
            raise ValueError(
                f"cannot tell which elements a rank holds when its storage differs from its placements, which say "
                f"{[implied for _, implied in found.values()]}. Place it by fully_shard, parallelize_module or "
                "distribute_tensor"
            )
        return shape, {rank: held for rank, (held, _) in found.items()}

    def groups(self, param: Any, group: Group) -> list[Any]:
        mesh = param.device_mesh
        return [*super().groups(param, group), mesh.get_group() if mesh.ndim == 1 else None]

    def signature(self, param: Any) -> object:
        spec, local = param._spec, param._local_tensor
        return spec.shape, spec.mesh, spec.placements, local.shape, local.dtype, local.device

    def storage(self, tensor: Any) -> Tensor:
        # `_local_tensor` is the local tensor itself, whereas `to_local` would create a view of it
        local: Tensor = tensor._local_tensor
        return local.detach() if local.requires_grad and torch.is_grad_enabled() else local

    def storages(
        self, params: Sequence[Any], grads: Sequence[Any], *states: Sequence[Any]
    ) -> Sequence[Sequence[Tensor]] | None:
        columns = params, grads, *states
        if set(map(type, itertools.chain(*columns))) != {type(params[0])}:
            return None
        placed, local = list(map(_PLACED, params)), []
        for column in columns:
            if list(map(_PLACED, column)) != placed:
                return None
            local.append(list(map(_LOCAL, column)))
        return super().storages(*local)

    def wrap(self, storage: Tensor, param: Any, shape: Ints | None = None) -> Tensor:
        stride = param.stride() if shape is None else row_major(shape)
        return _around(storage, param, param.placements, tuple(param.shape) if shape is None else shape, stride)

    def is_aligned(self, grad: Tensor, param: Any) -> bool:
        if not is_dtensor(grad):
            raise ValueError(f"its gradient is a plain tensor, the parameter a DTensor placed {self.placed(param)}")
        if grad.device_mesh != param.device_mesh or grad.shape != param.shape:
            raise ValueError(
                f"its gradient of shape {tuple(grad.shape)} is placed {self.placed(grad)}, the parameter of shape "
                f"{tuple(param.shape)} {self.placed(param)}. Redistribute the gradient to the parameter's mesh"
            )
        if grad.placements == param.placements:
            return True
        stored, is_member = tuple(param._local_tensor.shape), param.device_mesh.get_coordinate() is not None
        if (
            self.believes_placements
            and is_member
            and not meshes.same_storage(_implied(tuple(param.shape), param.device_mesh, param.placements), stored)
        ):
            raise ValueError(
                f"its gradient is placed unlike the parameter, which stores shape {stored} here and not what its "
                f"placements imply ({self.placed(param)}). Redistribute the gradient to the parameter's rows first"
            )
        return False

    def align(self, grad: Any, param: Any) -> Tensor:
        return cast(Tensor, grad.redistribute(placements=param.placements))

    def kept_zeros(self, param: Any, shape: Ints, dtype: torch.dtype, *, stacked: bool) -> Tensor:
        local, placements = self._of_kept(param, shape, stacked)
        zeros = super().kept_zeros(param, local, dtype, stacked=stacked)
        return _around(zeros, param, placements, shape, row_major(shape))

    def kept_storage(self, value: object, param: Any, shape: Ints, *, stacked: bool) -> Tensor | str:
        expected, placements = self._of_kept(param, shape, stacked)
        wanted = f"a DTensor of shape {shape} placed {placements} on the parameter's mesh"
        if not is_dtensor(value):
            return f"a {type(value).__name__}, not {wanted}"
        if (tuple(value.shape), tuple(value.placements), value.device_mesh) != (shape, placements, param.device_mesh):
            return f"a DTensor of shape {tuple(value.shape)} placed {tuple(value.placements)}, not {wanted}"
        return super().kept_storage(value._local_tensor, param, expected, stacked=stacked)

    def _of_kept(self, param: Any, shape: Ints, stacked: bool) -> tuple[Ints, tuple[Placement, ...]]:
        """Compute the local shape and the placements of a state tensor of a Muon variant. Mesh axes that shard dim 0 of
        a stack of matrices also shard the state tensor. Other axes replicate it."""
        from torch.distributed.tensor import Replicate

        cuts = [stacked and self.believes_placements and getattr(p, "dim", None) == 0 for p in param.placements]
        placements = tuple(p if cut else Replicate() for p, cut in zip(param.placements, cuts, strict=True))
        # The local shape is computed from the placements. It cannot be read from the local parameter, because FSDP2
        # stores every empty shard with shape (0, 0), even if its number of rows is not 0.
        return _implied(shape, param.device_mesh, placements) if any(cuts) else shape, placements


def _around(
    storage: Tensor, param: DTensor, placements: Sequence[Placement], shape: Ints, stride: Sequence[int]
) -> DTensor:
    """Build a DTensor on a parameter's mesh from local storage. The storage stays on its device, so offloaded state
    remains on the CPU."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(torch.Size(shape), tuple(stride), storage.dtype)
    return DTensor(storage, DTensorSpec(param.device_mesh, tuple(placements), meta), requires_grad=False)


@lru_cache(maxsize=16)  # cached, because reading `mesh.mesh` is the slowest part of describing a parameter
def _ranks_of(mesh: DeviceMesh) -> Ints:
    """Return the global ranks of a mesh in row-major order."""
    return tuple(mesh.mesh.flatten().tolist())


def _cuts_of(placements: Sequence[Placement]) -> tuple[meshes.Shard | None, ...]:
    """Convert torch's DTensor placements to this package's placements. The result has one entry per mesh axis: a
    `Shard`, or None if the axis replicates the tensor.

    Raises:
        ValueError: A placement is neither Shard nor Replicate, for example Partial.
    """
    from torch.distributed.tensor import Replicate, Shard

    for placement in placements:
        if not isinstance(placement, (Shard, strided_shard(), Replicate)):
            raise ValueError(
                f"placement {placement} of {placements} is not Shard or Replicate. Redistribute the parameter first"
            )
    return tuple(
        meshes.Shard(p.dim, int(getattr(p, "split_factor", 1))) if isinstance(p, (Shard, strided_shard())) else None
        for p in placements
    )


def _implied(shape: Ints, mesh: DeviceMesh, placements: Sequence[Placement]) -> Ints:
    """Compute the shape that this rank's local tensor must have according to the global shape and the placements."""
    place = meshes.OnMesh(tuple(mesh.shape), (), _cuts_of(placements))
    return place.read_at(shape, tuple(mesh.get_coordinate() or ()))[1]
