"""How the demo model is parallelized in each layout: mesh axes, and the torch calls that cut the model along them.

`mesh_shape` and `check` are plain arithmetic and run before any rank starts; `parallelize` runs on every rank.
Every axis but `tp` takes its own part of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
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

from shardmuon.demo.model import Block, Experts, Model, ModelConfig, RoutedExperts, Split

__all__ = ["LAYOUTS", "Layout", "check", "make_mesh", "mesh_shape", "parallelize", "reader"]


@dataclass(frozen=True, slots=True)
class Layout:
    """Mesh axes from the outermost in, the axis that takes whatever ranks the others leave, and its least size."""

    axes: tuple[str, ...]
    free: str
    least: int
    summary: str


LAYOUTS: Mapping[str, Layout] = {
    "single": Layout((), "", 1, "one process"),
    "ddp": Layout(("replicate",), "replicate", 2, "whole weights on every rank"),
    "fsdp2": Layout(("shard",), "shard", 2, "every weight cut along its rows (fully_shard)"),
    "hsdp": Layout(("replicate", "shard"), "shard", 2, "fully_shard inside each of the replicas"),
    "tp": Layout(("tp",), "tp", 2, "heads and hidden units cut (parallelize_module)"),
    "fsdp2+tp": Layout(("shard", "tp"), "shard", 2, "fully_shard on top of tensor parallel"),
    "hsdp+tp": Layout(("replicate", "shard", "tp"), "shard", 2, "replicas of fully_shard on top of tensor parallel"),
    "ep": Layout(("data", "ep"), "data", 1, "experts cut over ep, then fully_shard over data; the rest fully_shard"),
}
DEFAULT_SIZE = 2  # of an axis that is neither free nor given


def mesh_shape(name: str, num_ranks: int | None, sizes: Mapping[str, int]) -> dict[str, int]:
    """Ranks along each axis, outermost first.

    Args:
        num_ranks: All ranks; None takes the fewest the layout can use.
        sizes: Sizes asked for by axis name (`tp`, `replicate`, `ep`). The layout's free axis takes the ranks that the
            others leave.

    Raises:
        ValueError: the ranks do not factor, with the numbers and a command that does.
    """
    layout = LAYOUTS[name]
    for axis, size in sizes.items():
        if axis not in layout.axes or size < 1:
            has = f"its axes are {', '.join(layout.axes) or 'none'}" if size > 0 else "an axis has at least 1 rank"
            raise ValueError(f"--{axis} {size} does not fit layout {name}: {has}.")
    fixed = {axis: sizes.get(axis, DEFAULT_SIZE) for axis in layout.axes if axis != layout.free}
    product = math.prod(fixed.values())
    smallest = product * sizes.get(layout.free, layout.least)
    ranks = smallest if num_ranks is None else num_ranks
    grows = layout.free and layout.free not in sizes
    if ranks < smallest or ranks % product or (ranks > smallest and not grows):
        need = f"a multiple of {product}, {smallest} or more" if grows else f"exactly {smallest}"
        factors = [f"{axis} {size}" for axis, size in fixed.items()]
        if layout.free:
            factors.append(f"{layout.free} {sizes.get(layout.free, f'at least {layout.least}')}")
        because = f" ({' x '.join(factors)})" if factors else ""
        raise ValueError(
            f"layout {name} cannot use --ranks {ranks}: it needs {need}{because}. "
            f"Write --ranks {smallest} or choose another --layout."
        )
    return {axis: fixed.get(axis, ranks // product) for axis in layout.axes}


def check(name: str, shape: Mapping[str, int], model: ModelConfig, batch: int) -> None:
    """Raise ValueError when the model or the batch does not divide over the mesh."""
    tp, ep = shape.get("tp", 1), shape.get("ep", 1)
    divisible = [
        (model.num_kv_heads, "key-value heads", tp, "tp"),
        (model.num_heads, "heads", tp, "tp"),
        (model.hidden if not model.num_experts else model.expert_hidden, "hidden units", tp, "tp"),
        (model.vocab, "vocabulary entries", tp, "tp"),
        (model.num_experts, "experts", ep, "ep"),
        (batch, "sequences in the batch", num_readers(shape), "data-parallel ranks"),
    ]
    for count, what, parts, axis in divisible:
        if count % parts:
            raise ValueError(f"layout {name}: {count} {what} do not divide over {parts} ({axis}).")
    if "ep" in shape and not model.num_experts:
        raise ValueError(f"layout {name} shards experts: write --experts {max(4, ep)}.")


def num_readers(shape: Mapping[str, int]) -> int:
    """How many parts the global batch is cut into: one for each rank of every axis but tp."""
    return math.prod(size for axis, size in shape.items() if axis != "tp")


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
