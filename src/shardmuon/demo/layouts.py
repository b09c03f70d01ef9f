"""How the demo model is parallelized: the torch calls that cut it along the axes of a mesh (`demo.mesh`).

Every axis but `tp` takes its own part of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from shardmuon.demo.model import Block, Experts, Model, RoutedExperts, Split

__all__ = ["make_mesh", "parallelize", "reader"]


def make_mesh(device_type: str, shape: Mapping[str, int]) -> DeviceMesh | None:
    """The mesh of `shape` over all ranks, or None for one process. Collective."""
    if not shape:
        return None
    return init_device_mesh(device_type, tuple(shape.values()), mesh_dim_names=tuple(shape))


def reader(mesh: DeviceMesh | None) -> int:
    """Which part of the global batch this rank reads. Ranks that differ only in tp read the same one."""
    index = 0
    for axis in (mesh.mesh_dim_names or ()) if mesh is not None else ():
        if mesh is not None and axis != "tp":
            index = index * mesh[axis].size() + mesh.get_local_rank(axis)
    return index


def parallelize(model: Model, mesh: DeviceMesh | None) -> nn.Module:
    """Cut `model` (whole, on its device, equal on every rank) along the axes of `mesh`. Changes it in place.

    Tensor and expert parallel first, data parallel over the result, as torch composes them.
    """
    axes = (mesh.mesh_dim_names or ()) if mesh is not None else ()
    if mesh is None:
        return model
    if "tp" in axes:
        _tensor_parallel(model, mesh["tp"])
    if "ep" in axes:
        for experts in _expert_modules(model):
            _cut_experts(experts, mesh["ep"], dims=(0, 0, 0))
            fully_shard(experts, mesh=mesh["data"])
    data_axes = tuple(axis for axis in axes if axis != "tp")
    if data_axes == ("replicate",):
        return DistributedDataParallel(model, broadcast_buffers=False)
    if data_axes:
        data_mesh = mesh[data_axes] if len(data_axes) > 1 else mesh[data_axes[0]]
        for block in model.blocks:
            fully_shard(block, mesh=data_mesh)
        fully_shard(model, mesh=data_mesh)
    return model


def _expert_modules(model: Model) -> list[Experts]:
    return [module for module in model.modules() if isinstance(module, Experts)]


def _tensor_parallel(model: Model, mesh: DeviceMesh) -> None:
    """Heads and hidden units over the ranks of `mesh`; norms and routers stay whole. 2 all-reduces a block each way."""
    # the input is made a DTensor once, so that the gradients of q, k, v (gate, up) are summed before their all-reduce
    whole_input = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
    for module in model.blocks:
        block = cast(Block, module)
        plan: dict[str, ParallelStyle] = {
            "attention": PrepareModuleInput(
                input_layouts=(Replicate(), None, None), desired_input_layouts=(Replicate(), None, None)
            ),
            "attention.wq": ColwiseParallel(),
            "attention.wk": ColwiseParallel(),
            "attention.wv": ColwiseParallel(),
            "attention.wo": RowwiseParallel(),
        }
        if isinstance(block.mlp, RoutedExperts):
            _cut_experts(block.mlp.experts, mesh, dims=(1, 1, 2))
        else:
            plan |= {
                "mlp": whole_input,
                "mlp.gate": ColwiseParallel(),
                "mlp.up": ColwiseParallel(),
                "mlp.down": RowwiseParallel(),
            }
        parallelize_module(block, mesh, plan)
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)


def _cut_experts(experts: Experts, mesh: DeviceMesh, dims: tuple[int, int, int]) -> None:
    """Cut the gate, up and down stacks along `dims`: 0 deals out experts, any other cuts inside every expert."""
    stacks: dict[str, Tensor] = dict(experts.named_parameters())
    for (name, stack), dim in zip(stacks.items(), dims, strict=True):
        setattr(experts, name, nn.Parameter(distribute_tensor(stack.detach(), mesh, [Shard(dim)])))
    by_expert = dims[0] == 0
    num_local = experts.gate.shape[0] // mesh.size()
    first = mesh.get_local_rank() * num_local if by_expert else 0
    experts.split = Split(mesh, Shard(0) if by_expert else Replicate(), first)
