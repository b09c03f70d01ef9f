"""Ways in which parameters are cut up, made with torch alone: what is compared must not lean on the code it judges.

A builder runs once per process on tensors that hold the numbers of their elements. What it leaves on this rank says
which elements of any tensors of these shapes are here, and with which mesh, placements and marks; parameters, gradients
and what is assembled again are then made of these numbers.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from golden.trees import flat_shard

Tensors = Mapping[str, Tensor]
Builder = Callable[[Tensors, tuple[int, ...]], dict[str, Tensor]]


@dataclass(frozen=True)
class Layout:
    """A way of cutting.

    Attributes:
        meshes: World size -> mesh shape; only these world sizes have it.
        builder: (full tensors, mesh shape) -> this rank's tensors. All ranks call it.
        groups: Mesh shape -> the process groups that the optimizer is given.
        keeps_rows: Rows of matrices are whole on one rank.
    """

    meshes: Mapping[int, tuple[int, ...]]
    builder: Builder
    groups: Callable[[tuple[int, ...]], dict[str, Any]] = lambda shape: {}
    keeps_rows: bool = True

    def pieces(self, name: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Piece]:
        """Return this rank's pieces of tensors of these shapes. Collective at the first call for them."""
        key = (name, tuple(shapes.items()))
        if key not in _PIECES:
            full = {n: torch.arange(math.prod(s), dtype=torch.float64).view(s) for n, s in shapes.items()}
            built = self.builder(full, self.meshes[dist.get_world_size()])
            _PIECES[key] = {n: Piece.of(t) for n, t in built.items()}
        return _PIECES[key]


@dataclass(frozen=True)
class Piece:
    """A rank's part of a tensor.

    Attributes:
        elements: Their numbers in the full tensor, in the shape of the local storage.
        built: What it was read from.
        marks: What the builder has set on it.
    """

    elements: Tensor
    built: Tensor
    marks: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, built: Tensor) -> Piece:
        """Return the piece of a tensor that holds the numbers of its elements."""
        marks = {key: value for key, value in vars(built).items() if key not in ("_local_tensor", "_spec")}
        return cls(local(built).detach().long(), built, marks)

    def cut(self, full: Tensor) -> Tensor:
        """Cut this rank's part out of another full tensor, as a tensor of the layout's class."""
        made = full.reshape(-1)[self.elements]
        if not isinstance(self.built, DTensor):
            return made
        mesh, placements = self.built.device_mesh, self.built.placements
        return DTensor.from_local(
            made, mesh, placements, run_check=False, shape=self.built.shape, stride=self.built.stride()
        )

    def parameter(self, full: Tensor) -> nn.Parameter:
        """The same as a parameter, with the marks."""
        made: Any = self.cut(full)
        if isinstance(made, DTensor):
            made.requires_grad_()._is_param = True  # nn.Parameter would trace a detach for each shape and placement
        else:
            made = nn.Parameter(made)
        for key, value in self.marks.items():
            setattr(made, key, value)
        return made


_PIECES: dict[object, dict[str, Piece]] = {}
_MESHES: dict[object, DeviceMesh] = {}


def local(tensor: Tensor) -> Tensor:
    """The local storage."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def mesh_of(shape: tuple[int, ...], purpose: str = "a") -> DeviceMesh:
    """A mesh with axes a0, a1, ..; made once per purpose. Collective at the first call."""
    if (shape, purpose) not in _MESHES:
        names = tuple(f"{purpose}{i}" for i in range(len(shape)))
        _MESHES[shape, purpose] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return _MESHES[shape, purpose]


def _plain(tensors: Tensors, shape: tuple[int, ...]) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in tensors.items()}


def _fully_sharded(tensors: Tensors, mesh: DeviceMesh) -> dict[str, Tensor]:
    bag = nn.Module()
    for name, t in tensors.items():
        bag.register_parameter(name, nn.Parameter(t.clone()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of a container without forward
        fully_shard(bag, mesh=mesh)
    return {name: p.detach() for name, p in bag.named_parameters()}


def _placed(tensors: Tensors, mesh: DeviceMesh, places: Callable[[int, Tensor], list[Placement]]) -> dict[str, Tensor]:
    """DTensors; a dim that a tensor has not is replicated."""
    out: dict[str, Tensor] = {}
    for i, (name, t) in enumerate(tensors.items()):
        fitting = [p if not isinstance(p, Shard) or p.dim < t.ndim else Replicate() for p in places(i, t)]
        out[name] = distribute_tensor(t.clone(), mesh, fitting, src_data_rank=None)
    return out


def _last_two(t: Tensor, which: int) -> Placement:
    """Cut along one of a matrix's two dims, with the first two of a kernel; a vector is replicated."""
    return Replicate() if t.ndim == 1 else Shard(which + (t.ndim == 3))


def _tp(tensors: Tensors, mesh: DeviceMesh) -> dict[str, Tensor]:
    return _placed(tensors, mesh, lambda i, t: [_last_two(t, i % 2)])


def _tp_then_fsdp(tensors: Tensors, shape: tuple[int, ...]) -> dict[str, Tensor]:
    mesh = mesh_of(shape)
    return _fully_sharded(_tp(tensors, mesh["a1"]), mesh["a0"])


def _chunks(tensor: Tensor, parts: int) -> list[Tensor]:
    """Cut like torch.chunk along dim 0, padded with empty tensors."""
    step = max(1, -(-len(tensor) // parts))
    return [tensor[i * step : (i + 1) * step] for i in range(parts)]


def _lone_strided(tensors: Tensors, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """A rank keeps its share of both halves: what is left of FSDP x TP on one dim when TP is gathered."""
    mesh, out = mesh_of(shape), {}
    for name, t in tensors.items():
        mine = torch.cat([_chunks(half, shape[0])[dist.get_rank()] for half in _chunks(t, 2)]).clone()
        places = [_StridedShard(0, split_factor=2)]
        out[name] = DTensor.from_local(mine, mesh, places, run_check=False, shape=t.shape, stride=t.stride())
    return out


def _experts(tensors: Tensors, shape: tuple[int, ...]) -> dict[str, Tensor]:
    return _placed(tensors, mesh_of(shape), lambda i, t: [Shard(0) if t.ndim == 3 else Replicate()])


def _experts_fsdp(tensors: Tensors, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Stacks cut by expert over one axis and by rows over the other; the rest sharded over all ranks."""
    stacks = {n: t for n, t in tensors.items() if t.ndim == 3}
    dense = {n: t for n, t in tensors.items() if t.ndim != 3}
    made = _placed(stacks, mesh_of(shape), lambda i, t: [Shard(1), Shard(0)])
    made |= _fully_sharded(dense, mesh_of((math.prod(shape),)))
    return {name: made[name] for name in tensors}


def _mixed(tensors: Tensors, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Neighbours on different meshes."""
    flat, square = mesh_of((math.prod(shape),)), mesh_of(shape)
    places = (
        (flat, [Shard(0)]),
        (square, [Replicate(), Shard(1)]),
        (flat, [Replicate()]),
        (square, [Shard(1), Shard(0)]),
    )
    out = {}
    for i, (name, t) in enumerate(tensors.items()):
        if i % 5 == 4:
            out[name] = t.clone()
        else:
            mesh, where = places[i % 5]
            out |= _placed({name: t}, mesh, lambda _i, _t, where=where: list(where))
    return out


def _uneven_rows(tensors: Tensors, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Any number of rows on any rank, as in Megatron-FSDP's buffers; with two axes the first one replicates."""
    mesh = mesh_of(shape, "m")
    mesh._shard_order = list(reversed(range(mesh.ndim)))  # type: ignore[attr-defined]
    parts, part = shape[-1], mesh.get_local_rank(len(shape) - 1)
    places = [*([Replicate()] if len(shape) > 1 else []), Shard(0)]
    out: dict[str, Tensor] = {}
    for i, (name, t) in enumerate(tensors.items()):
        bounds = [round(len(t) * (r / parts) ** (0.4, 1.0, 3.0)[i % 3]) for r in range(parts + 1)]
        start, stop, row = bounds[part], bounds[part + 1], math.prod(t.shape[1:])
        mine = t[start:stop].clone()
        out[name] = DTensor.from_local(mine, mesh, places, run_check=False, shape=t.shape, stride=t.stride())
        out[name].megatron_fsdp_dist_index = SimpleNamespace(tp_dim=None)  # type: ignore[attr-defined]
        out[name].megatron_fsdp_slice = slice(start * row, stop * row)  # type: ignore[attr-defined]
    return out


def _marked(full: Tensor, dim: int, stride: int, parts: int, part: int) -> Tensor:
    """A plain shard, marked as Megatron and TransformerEngine mark theirs."""
    blocks = [_chunks(block, parts)[part] for block in full.transpose(0, dim).chunk(stride)]
    made = torch.cat(blocks).transpose(0, dim).contiguous()
    made.tensor_model_parallel, made.partition_dim, made.partition_stride = True, dim, stride  # type: ignore[attr-defined]
    return made


def _tp_marked(dims: tuple[int, ...], stride: int = 1) -> Builder:
    """Plain shards, cut along `dims` in turn (-1: not cut)."""

    def build(tensors: Tensors, shape: tuple[int, ...]) -> dict[str, Tensor]:
        out: dict[str, Tensor] = {}
        for i, (name, t) in enumerate(tensors.items()):
            dim = -1 if t.ndim == 1 else dims[i % len(dims)]
            if dim == -1:
                out[name] = t.clone()
                out[name].partition_dim = -1  # type: ignore[attr-defined]
                continue
            dim += t.ndim == 3
            times = stride if t.shape[dim] % stride == 0 else 1
            out[name] = _marked(t, dim, times, shape[-1], dist.get_rank() % shape[-1])
        return out

    return build


def _tp_groups(shape: tuple[int, ...]) -> dict[str, Any]:
    mesh = mesh_of(shape)
    found = {"tp_group": mesh.get_group(len(shape) - 1)}
    return found | ({"process_group": mesh.get_group(0)} if len(shape) == 2 else {})


def _flat(tensors: Tensors, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """1-D parts of one buffer, cut anywhere; with a second axis of tensor-parallel shards."""
    mesh = mesh_of(shape)
    parts, part = (shape[1], mesh.get_local_rank(1)) if len(shape) == 2 else (1, 0)
    whole, cuts = {}, {}
    for i, (name, t) in enumerate(tensors.items()):
        dim, stride = ((0, 1), (1, 1), (0, 2))[i % 3]
        fits = parts > 1 and (t.ndim == 2 or (dim == 0 and t.ndim > 1)) and t.shape[dim] % (parts * stride) == 0
        cuts[name] = (dim, stride) if fits else None
        whole[name] = _marked(t, dim, stride, parts, part) if fits else t
    total = sum(t.numel() for t in whole.values())
    size = -(-total // shape[0])
    first, at = mesh.get_local_rank(0) * size, 0
    out = {}
    for name, t in whole.items():
        start, stop = (min(max(edge - at, 0), t.numel()) for edge in (first, first + size))
        held = t.detach().flatten()[start:stop].clone()
        groups = [mesh.get_group(i) for i in range(len(shape))]
        out[name] = flat_shard(held, tuple(tensors[name].shape), start if held.numel() else 0, groups, cuts[name])
        at += t.numel()
    return out


def _line(*worlds: int) -> dict[int, tuple[int, ...]]:
    return {world: (world,) for world in worlds}


_SQUARE = {4: (2, 2)}


def _shard(dim: int) -> Builder:
    return lambda tensors, shape: _placed(tensors, mesh_of(shape), lambda i, t: [Shard(dim)])


def _on_axes(*places: Placement) -> Builder:
    return lambda tensors, shape: _placed(tensors, mesh_of(shape), lambda i, t: list(places))


def _fsdp2(tensors: Tensors, shape: tuple[int, ...]) -> dict[str, Tensor]:
    return _fully_sharded(tensors, mesh_of(shape))


def _default_group(shape: tuple[int, ...]) -> dict[str, Any]:
    return {"process_group": dist.group.WORLD}


LAYOUTS: dict[str, Layout] = {
    "plain": Layout(_line(1, 2, 3, 4), _plain),
    "ddp": Layout(_line(1, 2, 3, 4), _plain, _default_group),
    "replicate": Layout(_line(2, 3, 4), _on_axes(Replicate())),
    "fsdp2": Layout(_line(1, 2, 3, 4), _fsdp2),
    "fsdp2 dim 1": Layout(_line(2, 3, 4), _shard(1), keeps_rows=False),
    "hsdp": Layout({2: (2, 1), **_SQUARE}, _fsdp2),
    "tp": Layout(_line(2, 3, 4), lambda t, s: _tp(t, mesh_of(s)), keeps_rows=False),
    "fsdp2+tp": Layout(_SQUARE, _tp_then_fsdp, keeps_rows=False),
    "two dims": Layout(
        _SQUARE,
        lambda t, s: _placed(t, mesh_of(s), lambda i, x: [_last_two(x, 0), _last_two(x, 1)]),
        keeps_rows=False,
    ),
    "one dim twice": Layout(_SQUARE, _on_axes(Shard(0), Shard(0))),
    "replicate x shard": Layout(_SQUARE, _on_axes(Replicate(), Shard(0))),
    "shard x replicate": Layout(_SQUARE, _on_axes(Shard(0), Replicate())),
    "lone strided": Layout(_line(2, 3, 4), _lone_strided),
    "experts": Layout(_line(2, 3, 4), _experts),
    "experts+fsdp": Layout(_SQUARE, _experts_fsdp),
    "mixed meshes": Layout(_SQUARE, _mixed, keeps_rows=False),
    "uneven rows": Layout(_line(2, 3, 4), _uneven_rows),
    "uneven rows, replicas": Layout(_SQUARE, _uneven_rows),
    "tp marked, rows": Layout(_line(2, 3, 4), _tp_marked((0,)), _tp_groups),
    "tp marked, columns": Layout(_line(2, 3, 4), _tp_marked((1,)), _tp_groups, keeps_rows=False),
    "tp marked, strides": Layout(_line(2, 3, 4), _tp_marked((0,), 2), _tp_groups),
    "tp marked x ddp": Layout(_SQUARE, _tp_marked((0, 1, -1)), _tp_groups, keeps_rows=False),
    "flat buffer": Layout(_line(2, 3, 4), _flat, keeps_rows=False),
    "flat buffer+tp": Layout(_SQUARE, _flat, _tp_groups, keeps_rows=False),
}
