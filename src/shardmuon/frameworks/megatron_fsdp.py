"""Adapter (engine) for Megatron-FSDP's parameters. They are DTensors, but their placements do not show which elements a
rank stores.

Megatron-FSDP's experimental version 2 is not supported. All code that reads private attributes of Megatron-FSDP is in
this file. shardmuon never imports the package.

[Note: Megatron-FSDP's storage]
    Each unit (FSDP module) stores its parameters in one flat buffer, with padding between the parameters. The buffer is
    split into equal parts, one per data-parallel rank. So a rank can store any number of whole rows of a parameter with
    placement `Shard(0)`, and most ranks store none. For such a parameter, torch's chunking rule, its offset helper and
    `full_tensor()` silently give wrong results.

    Tensor parallelism shards a parameter before FSDP does, along any dim. The parameter's attribute
    `megatron_fsdp_slice` contains the range of elements that this rank stores, as indices into the flattened
    tensor-parallel shard. If no data-parallel axis of the mesh shards the parameter, a rank stores the whole
    tensor-parallel shard. The slices of all ranks together must cover the parameter.

[Note: empty shards]
    On a rank that stores no part of a parameter, `grad` stays None. If the parameter has gradients on other ranks, the
    rank takes part in the step with an empty gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from shardmuon._torch import is_dtensor, strided_shard
from shardmuon.comm.groups import my_rank
from shardmuon.host import Host
from shardmuon.layout.engines.base import Claim, Engine, Extent, Grid, Group, Stored, register
from shardmuon.layout.engines.dtensor import DTensorEngine
from shardmuon.layout.mesh import Cut

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_PACKAGES = ("megatron_fsdp", "megatron")


class _MegatronFSDPEngine(DTensorEngine):
    """Engine (storage adapter) for Megatron-FSDP's parameters. It reads the position of the local tensor from the
    parameter's attributes, not from its placements (see [Note: Megatron-FSDP's storage])."""

    believes_placements = False

    def recognizes(self, param: Tensor) -> bool:
        if not is_dtensor(param):
            return False
        # `recognizes` is called for every DTensor in every step, so its checks must be cheap.
        return "megatron_fsdp_dist_index" in param.__dict__ or hasattr(param.device_mesh, "_shard_order")

    def claim(self, param: Any, group: Group) -> Claim:
        mesh = param.device_mesh
        cut, num_parts, part, row = _place_of(param)
        shape, local = tuple(param.shape), tuple(self.storage(param).shape)
        rows = range(row, row + local[0])
        held, stored = cut.rows_of_part(shape, part, num_parts, rows)
        if local != stored:
            raise ValueError(f"rank {my_rank()} stores shape {local} of rows {rows} of it, which should be {stored}")
        form = shape, tuple(mesh.shape), tuple(mesh.mesh.flatten().tolist()), cut, num_parts
        text = f"Megatron-FSDP's {self.placed(param)}, along dim {cut.dim} with stride {cut.stride}"
        return Claim(form, text, Extent(local, held), True, _uncounted(param))

    def stored(self, form: tuple[Any, ...], extents: Mapping[int, Extent], grid: Grid) -> Stored:
        return Engine.stored(self, form, extents, grid)

    def signature(self, param: Any) -> object:
        return super().signature(param), getattr(param, "megatron_fsdp_slice", None)

    def is_aligned(self, grad: Tensor, param: Any) -> bool:
        if not super().is_aligned(grad, param):
            raise ValueError(
                f"its gradient is placed {self.placed(cast(Any, grad))}, the parameter {self.placed(param)}, and "
                "Megatron-FSDP's storage cannot be redistributed by placements. Finish the gradient reduction first "
                "(model.finish_grad_sync(), or microbatch(model, is_last=True) around the last backward)"
            )
        return True

    def lacks_gradient(self, param: Tensor) -> bool:
        """Return True if this rank stores no elements of the parameter. This is the only reason for a missing
        gradient, because Megatron-FSDP sets the gradients of all parameters of a model at once."""
        return self.storage(param).numel() == 0


_ENGINE = _MegatronFSDPEngine()
register(_ENGINE)


class _MegatronFSDPCopy(Engine):
    """Engine (storage adapter) that raises an error for parameters that are not supported: the unsharded copies that
    Megatron-FSDP uses in the forward and backward passes, and all parameters of Megatron-FSDP's version 2."""

    def recognizes(self, param: Tensor) -> bool:
        own = param.__dict__
        return "_mfsdp_parameter_group" in own or ("__fsdp_param__" in own and not is_dtensor(param))

    def claim(self, param: Tensor, group: Group) -> Claim:
        raise ValueError(
            "it is the copy that Megatron-FSDP computes with, or of its experimental version 2, which is not "
            "supported: make the optimizer from model.parameters() after megatron_fsdp.fully_shard_model(...), before "
            "the first forward pass or after model.finish_grad_sync()"
        )


# The engine that is registered last is tried first. `_MegatronFSDPCopy` must be tried before all engines for DTensors,
# because the parameters of Megatron-FSDP's version 2 are also DTensors.
register(_MegatronFSDPCopy())


# ---------------------------------------------------------------------------------------------- position of storage


def _place_of(param: Any) -> tuple[Cut, int, int, int]:
    """Find the rows of a parameter that this rank stores.

    Returns:
        A tuple (cut, num_parts, part, row). `cut` describes how tensor parallelism splits the parameter into
        `num_parts` parts. This rank's rows begin at index `row` of the part with index `part`.
    """
    from torch.distributed.tensor import Replicate, Shard

    mesh, parallel = param.device_mesh, _tensor_parallel_name(param)
    names = mesh.mesh_dim_names or ()
    cut, num_parts, part, row = Cut(0, 1), 1, 0, 0
    for axis, placement in enumerate(param.placements):
        if isinstance(placement, Replicate):
            continue
        is_parallel = parallel is not None and names[axis : axis + 1] == (parallel,)
        is_shard = isinstance(placement, Shard) and not isinstance(placement, strided_shard())
        if not is_shard or (placement.dim % param.ndim and not is_parallel):
            raise ValueError(
                f"it is placed {DTensorEngine.placed(param)}; Megatron-FSDP cuts parameters along dim 0, and tensor "
                "parallelism by Shard"
            )
        if is_parallel:
            cut = Cut(placement.dim % param.ndim, int(getattr(param, "partition_stride", 1) or 1))
            num_parts, part = mesh.size(axis), mesh.get_local_rank(axis)
        else:
            row = _first_row(param)
    return cut, num_parts, part, row


def _first_row(param: Any) -> int:
    """Compute the index of this rank's first row within the tensor-parallel shard, from the parameter's attribute
    `megatron_fsdp_slice`."""
    local = _ENGINE.storage(param)
    if not local.numel():
        return 0
    kept = getattr(param, "megatron_fsdp_slice", slice(0, 0))
    row, inside = divmod(kept.start, math.prod(local.shape[1:]))
    if inside or kept.stop - kept.start != local.numel():
        raise ValueError(
            f"its attribute megatron_fsdp_slice, {kept}, does not say where its {local.numel()} elements of this rank "
            "lie. Make the optimizer from the wrapped model's own parameters"
        )
    return row


def _tensor_parallel_name(param: DTensor) -> str | None:
    return getattr(getattr(param, "megatron_fsdp_dist_index", None), "tp_dim", None)


def _uncounted(param: Any) -> str | None:
    """Return an error message if ranks outside the parameter's mesh store replicas of the parameter, because a gradient
    norm over all ranks would then count the parameter several times. Otherwise, return None."""
    name = _tensor_parallel_name(param)
    if name is None or name in (param.device_mesh.mesh_dim_names or ()):
        return None
    expert = getattr(getattr(param, "orig_param", None), "allreduce", True) is False
    mesh: Any = getattr(param.megatron_fsdp_dist_index, "expt_device_mesh" if expert else "device_mesh", None)
    num_ranks = mesh[name].size() if mesh is not None and name in (mesh.mesh_dim_names or ()) else 1
    if num_ranks == 1:
        return None
    return (
        f"it is replicated over the {num_ranks} tensor-parallel ranks (mesh axis {name!r}), which its own mesh does "
        "not list, so it would count several times. Clip with Megatron's own function"
    )


# -------------------------------------------------------------------------------------------------- checkpoints


def _mark(storage: Tensor, offsets: list[int]) -> None:
    """Record, as attributes of a state tensor's local storage, that the storage begins at index `offsets` of the global
    tensor. torch.distributed.checkpoint then uses these attributes instead of the placements."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    chunk = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=storage.size())

    # `write_items` becomes an attribute of `storage`. A reference to `storage` in its body would therefore create a
    # reference cycle.
    def write_items(fqn: str, tensor: Any) -> list[WriteItem]:
        data = TensorWriteData(chunk, TensorProperties.create_from_tensor(tensor.to_local()), tensor.size())
        return [WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    storage.__create_chunk_list__ = lambda: [chunk]  # type: ignore[attr-defined]
    storage.__create_write_items__ = write_items if storage.numel() else _no_items  # type: ignore[attr-defined]


# `_no_items` is defined at module level, so that tensors with this function as an attribute can be pickled.
def _no_items(fqn: str, tensor: Any) -> list[Any]:
    return []


# ------------------------------------------------------------------------------------------------------ wrapping


class _MegatronFSDPHost(Host):
    """Integration with the Megatron-FSDP functions that wrap an optimizer. After wrapping, steps are the same as in a
    plain training loop."""

    packages = _PACKAGES

    def adding(self) -> None:
        if self.caller("fully_shard", *_PACKAGES) is not None:
            raise ValueError(
                "megatron_fsdp.fully_shard(module, optimizer) puts all parameters in one group, which loses what goes "
                "to Muon and what to AdamW. Write model = fully_shard_model(module, ...), then optimizer = "
                "Muon(model, lr=...), then fully_shard_optimizer(optimizer)"
            )

    def instead_of_step(self, core: Any, plain: bool) -> Callable[[], None] | None:
        """Replace the step that `fully_shard_optimizer` takes only to create state. `fully_shard_optimizer` sets all
        gradients to zero but does not change lr, so an ordinary step would decay weights and increase the step count.

        The step is recognized by its caller, which is the same on every rank. Zero gradients are not a reliable sign,
        because real gradients can be zero on some ranks.
        """
        return core.complete_state if plain and self.caller("fully_shard_optimizer", *_PACKAGES) is not None else None

    def saved(self, core: Any, saved: dict[str, Any]) -> None:
        """Record the position of each state tensor's local storage in the global tensor, as attributes of the storage.
        torch.distributed.checkpoint then uses these attributes instead of the placements. Only state tensors with the
        same placements as their Megatron-FSDP parameter get the attributes. A rank that stores no part of a parameter
        does not save the parameter's plain state tensors, such as step counts.

        In the saved tensor, tensor-parallel shards lie in rank order, even if the parameter is sharded with a stride.
        Megatron-FSDP saves weights in the same way.
        """
        for param, values in core.state.items():
            for value in values.values() if _ENGINE.recognizes(param) else ():
                if is_dtensor(value) and value.placements == param.placements:
                    (cut, num_parts, part, row), offsets = _place_of(param), [0] * value.ndim
                    offsets[0] = row
                    offsets[cut.dim] += part * -(-param.shape[cut.dim] // num_parts)
                    _mark(_ENGINE.storage(value), offsets)
                elif type(value) is Tensor:
                    # remove the attribute set by an earlier save, because this rank's rows may have changed since then
                    vars(value).pop("__create_write_items__", None)
                    if param.numel() and not _ENGINE.storage(param).numel():
                        value.__create_write_items__ = _no_items  # type: ignore[attr-defined]


_MegatronFSDPHost.register()
