"""Megatron-FSDP: DTensors whose placements do not say what they store. The experimental version 2 is refused.

Every private attribute of Megatron-FSDP that shardmuon reads is in this file. The package itself is never imported.

[Note: Megatron-FSDP's storage]
    A unit (an FSDP module) is one flat buffer of its parameters, with padding between them, cut in equal parts over the
    data-parallel ranks. So a parameter is `Shard(0)` with any number of whole rows on any rank and none on most;
    torch's chunk rule, its offset helper and `full_tensor()` are wrong about it without an error. Of the axes that cut
    a tensor the last one cuts first (tensor parallel, then inner data parallel, then outer), though placements list
    them the other way round and none is a `_StridedShard`; the mesh has that order, as `_shard_order`.
    What counts here are the shapes that all ranks really store, put one after the other in that order. Where
    Megatron-FSDP also keeps the offset of a rank's part, the two must agree.

[Note: empty shards]
    `grad` stays None where a rank stores nothing of a parameter. Such a rank neither holds nor owns any of it, so
    it takes part as if it had an empty gradient whenever those that do store some have theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from shardmuon._torch import is_dtensor, strided_shard
from shardmuon.comm.groups import my_rank
from shardmuon.host import Host, Stepped, caller
from shardmuon.layout.engines.base import Claim, Engine, Group, Stored
from shardmuon.layout.engines.dtensor import DTensorEngine, mesh_key, placed, refuse_to_save, tell_chunk
from shardmuon.layout.grid import Grid
from shardmuon.layout.mesh import UNKNOWN, AxisCut, Extent, pieces_of_extents
from shardmuon.layout.views import Ints

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_PACKAGES = ("megatron_fsdp", "megatron")


class MegatronFSDPCopy(Engine):
    """Refuses the copy that Megatron-FSDP computes with, and parameters of its version 2."""

    def recognizes(self, param: Tensor) -> bool:
        own = param.__dict__
        return "_mfsdp_parameter_group" in own or ("__fsdp_param__" in own and not is_dtensor(param))

    def claim(self, param: Tensor, group: Group) -> Claim:
        raise ValueError(
            "it is the copy that Megatron-FSDP computes with, or of its experimental version 2, which is not "
            "supported: make the optimizer from model.parameters() after megatron_fsdp.fully_shard_model(...), before "
            "the first forward pass or after model.finish_grad_sync()"
        )


class MegatronFSDPEngine(DTensorEngine):
    """A Megatron-FSDP parameter's local tensor, by the extents that all ranks claim: see
    [Note: Megatron-FSDP's storage]."""

    believes_placements = False

    def recognizes(self, param: Tensor) -> bool:
        if not is_dtensor(param):
            return False
        # asked of every DTensor in every step
        return "megatron_fsdp_dist_index" in param.__dict__ or hasattr(param.device_mesh, "_shard_order")

    def claim(self, param: Any, group: Group) -> Claim:
        mesh, ranks = mesh_key(param.device_mesh)
        if my_rank() not in ranks:
            raise ValueError(f"rank {my_rank()} is not in the parameter's mesh {param.device_mesh}")
        cuts, shape = _cuts_of(param), tuple(param.shape)
        text = f"Megatron-FSDP's {placed(param)}, cut by {[tuple(cut) for cut in cuts]}"
        extent = Extent(tuple(self.storage(param).shape), _known_start(param))
        return Claim((shape, mesh, ranks, cuts), text, extent, True, _uncounted(param))

    def stored(self, form: tuple[Any, ...], extents: Mapping[int, Extent], grid: Grid) -> Stored:
        shape, mesh, ranks, cuts = form
        held = pieces_of_extents(shape, mesh, ranks, cuts, tuple(extents[rank] for rank in ranks))
        return shape, dict(zip(ranks, held, strict=True))

    def wrap(self, storage: Tensor, param: Any, shape: Ints | None = None) -> Tensor:
        _mark(storage, param)
        return super().wrap(storage, param, shape)

    def is_aligned(self, grad: Tensor, param: Any) -> bool:
        if not super().is_aligned(grad, param):
            raise ValueError(
                f"its gradient is placed {placed(cast(Any, grad))}, the parameter {placed(param)}, and Megatron-FSDP's "
                "storage cannot be redistributed by placements. Finish the gradient reduction first "
                "(model.finish_grad_sync(), or microbatch(model, is_last=True) around the last backward)"
            )
        return True

    def lacks_gradient(self, param: Tensor) -> bool:
        """True if nothing of the parameter is stored here. Megatron-FSDP gives all of a model's parameters their
        gradients at once, see [Note: empty shards]."""
        return self.storage(param).numel() == 0


_ENGINE = MegatronFSDPEngine()


# ---------------------------------------------------------------------------------------------- which part is where


def _cuts_of(param: DTensor) -> tuple[AxisCut, ...]:
    """The mesh axes that cut the tensor, the one that cuts first first."""
    from torch.distributed.tensor import Replicate, Shard

    mesh, placements = param.device_mesh, tuple(param.placements)
    if all(isinstance(placement, Replicate) for placement in placements):
        return ()  # "no_shard" lists one placement, also on hybrid meshes
    order = getattr(mesh, "_shard_order", None)
    order = list(reversed(range(mesh.ndim))) if order is None else list(order)
    if sorted(order) != list(range(mesh.ndim)) or len(placements) != mesh.ndim:
        raise ValueError(f"its mesh says that its axes cut in the order {order}, but it is placed {placed(param)}")
    parallel = _tensor_parallel_axis(param)
    cuts = []
    for axis in order:
        placement = placements[axis]
        if isinstance(placement, Replicate):
            continue
        whole_rows = axis == parallel or getattr(placement, "dim", None) == 0
        if isinstance(placement, strided_shard()) or not isinstance(placement, Shard) or not whole_rows:
            raise ValueError(
                f"it is placed {placed(param)}; Megatron-FSDP cuts parameters along dim 0, and tensor parallelism "
                "by Shard"
            )
        stride = int(getattr(param, "partition_stride", 1) or 1) if axis == parallel else 1
        cuts.append(AxisCut(axis, placement.dim % param.ndim, axis == parallel, stride))
    return tuple(cuts)


def _tensor_parallel_axis(param: DTensor) -> int | None:
    """The mesh axis of tensor parallelism."""
    from torch.distributed.tensor import Shard

    name, names = _tensor_parallel_name(param), param.device_mesh.mesh_dim_names or ()
    if name in names:
        return names.index(name)
    # Without its attributes a parameter can still be told by its mesh: only a tensor-parallel axis cuts other dims.
    others = [a for a, p in enumerate(param.placements) if isinstance(p, Shard) and p.dim % param.ndim != 0]
    return others[0] if not hasattr(param, "megatron_fsdp_dist_index") and len(others) == 1 else None


def _tensor_parallel_name(param: DTensor) -> str | None:
    return getattr(getattr(param, "megatron_fsdp_dist_index", None), "tp_dim", None)


def _known_start(param: DTensor) -> int:
    """The element of the tensor-parallel part at which this rank's storage begins, if Megatron-FSDP says so."""
    numel = _ENGINE.storage(param).numel()
    kept = getattr(param, "megatron_fsdp_slice", None)  # of the buffer that the model computes from
    return int(kept.start) if isinstance(kept, slice) and numel and kept.stop - kept.start == numel else UNKNOWN


def _uncounted(param: Any) -> str | None:
    """The reason why a norm over all ranks counts the parameter several times; None: its mesh lists all who keep it."""
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


def _mark(storage: Tensor, param: DTensor) -> None:
    """Write on a state tensor's storage which part of the whole it is: torch.distributed.checkpoint asks for that
    before it believes placements."""
    cuts = _cuts_of(param)
    if not cuts:
        return
    start = _known_start(param)
    local = tuple(_ENGINE.storage(param).shape)
    widths = [(cut, param.shape[cut.dim], param.device_mesh.size(cut.axis)) for cut in cuts if cut.tensor_parallel]
    even = all(size % parts == 0 for _, size, parts in widths)
    if storage.numel() and (start == UNKNOWN or not even):
        refuse_to_save(
            storage,
            "this rank's part of Megatron-FSDP's buffer is not known here. Make the optimizer's state dict with "
            "fully_shard_optimizer(..., preproc_state_dict_for_dcp_ckpt=True), or pass it through "
            "megatron_fsdp.uneven_dtensor.preprocess_state_dict_for_uneven_dtensor",
        )
        return
    offsets = [0] * storage.ndim
    if storage.numel():
        offsets[0] = start // math.prod(local[1:])
        coordinate = list(param.device_mesh.get_coordinate() or ())
        for cut, size, parts in widths:  # one after the other, as Megatron-FSDP saves weights, whatever the stride
            width = size // parts if cut.dim == 0 else storage.shape[cut.dim]
            offsets[cut.dim] += coordinate[cut.axis] * width
    tell_chunk(storage, tuple(offsets))


# ------------------------------------------------------------------------------------------------------ wrapping


class MegatronFSDPHost(Host):
    """Host for Megatron-FSDP's functions that wrap an optimizer. Afterwards the training loop steps it."""

    packages = _PACKAGES

    def adding(self) -> None:
        if caller("fully_shard", *_PACKAGES) is not None:
            raise ValueError(
                "megatron_fsdp.fully_shard(module, optimizer) puts all parameters in one group, which loses what goes "
                "to Muon and what to AdamW. Write model = fully_shard_model(module, ...), then optimizer = "
                "Muon(model, lr=...), then fully_shard_optimizer(optimizer)"
            )

    def instead_of_step(self, core: Stepped, plain: bool) -> Callable[[], None] | None:
        """`fully_shard_optimizer` steps only to have state: it sets all gradients to zero, but leaves lr, so that an
        ordinary step would decay weights and count. The function itself is asked, as zeros may also be true gradients
        on some rank; every rank calls it."""
        return core.complete_state if plain and caller("fully_shard_optimizer", *_PACKAGES) is not None else None

    def saving(self, core: Stepped) -> None:
        """Mark all state tensors of Megatron-FSDP's parameters that have lost their mark (by a cast)."""
        for param, values in core.state.items():
            for value in values.values() if _ENGINE.recognizes(param) else ():
                local = _ENGINE.storage(value) if is_dtensor(value) else None
                if local is not None and not hasattr(local, "__create_write_items__"):
                    _mark(local, cast("DTensor", param))
