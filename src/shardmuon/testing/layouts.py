"""The table of layouts. Every row is a way in which PyTorch engines cut parameters up; every check runs on all rows.

A row only *builds* parameters, with the engines' own functions wherever they exist (`fully_shard`,
`distribute_tensor`), so comparing with a row never leans on shardmuon's own idea of the layout.

[Note: cut once]
    Most of the time that a check takes on ranks would go into building the same layout again: torch shards, traces and
    caches anew for each shape and dtype. So a row's builder runs once per process and shapes, on tensors that hold
    the numbers of their elements. What it leaves on this rank says which elements of any tensors of these shapes are
    here, in which order, mesh and placements; others are then made of these elements alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardmuon._torch import strided_shard
from shardmuon.comm.groups import GroupRef
from shardmuon.layout.engines.flat import FlatShard, mark_flat
from shardmuon.layout.mesh import Cut
from shardmuon.testing.device import mesh_kind
from shardmuon.testing.megatron import flat_ranges, megatron_mesh, shard_like_megatron

Tensors = Mapping[str, Tensor]
Builder = Callable[[Tensors, tuple[int, ...]], dict[str, Tensor]]


@dataclass(frozen=True, slots=True)
class LayoutCase:
    """One layout of the comparison.

    Attributes:
        name: As `shardmuon verify` prints it.
        mesh: World size -> mesh shape.
        builder: (full tensors, mesh shape) -> this rank's parameters. Equal input gives equal placements. Called on all
            ranks of the default group.
        process_group: Whether the optimizer is given the default group for its plain tensors.
        groups: Mesh shape -> the process groups of plain tensors that the optimizer is given, by option.
    """

    name: str
    mesh: Callable[[int], tuple[int, ...]]
    builder: Builder
    process_group: bool = False
    groups: Callable[[tuple[int, ...]], dict[str, Any]] = lambda shape: {}

    def options(self, world: int) -> dict[str, Any]:
        """Muon's arguments for this layout on `world` ranks."""
        default = {"process_group": dist.group.WORLD} if self.process_group else {}
        return default | self.groups(self.mesh(world))

    def build(self, tensors: Tensors, shape: tuple[int, ...]) -> dict[str, Tensor]:
        """Build this rank's parameters from full tensors by `builder`. All ranks of the default group call it."""
        # See [Note: cut once]. Shards of several dtypes may share no buffer, so what is mixed is always built.
        first = next(iter(tensors.values()), None)
        kinds = {(type(t), t.dtype, t.device, t.requires_grad, t.is_contiguous()) for t in tensors.values()}
        if first is None or kinds != {(Tensor, first.dtype, first.device, False, True)}:
            return self.builder(tensors, shape)
        key = (dist.group.WORLD, mesh_kind(), self.name, shape, tuple((name, t.shape) for name, t in tensors.items()))
        if key not in _CUT:
            numbers = {
                name: torch.arange(t.numel(), dtype=torch.float64, device=first.device).view(t.shape)
                for name, t in tensors.items()
            }
            _CUT[key] = {name: _Piece.of(t) for name, t in self.builder(numbers, shape).items()}
        return {name: piece.cut_from(tensors[name]) for name, piece in _CUT[key].items()}


@dataclass(frozen=True, slots=True)
class _Piece:
    """A tensor's part that a builder left on this rank.

    Attributes:
        elements: Their numbers in the full tensor, in the shape of the local storage.
        built: What it was read from.
        attributes: What the builder has set on it.
    """

    elements: Tensor
    built: Tensor
    attributes: Mapping[str, Any]

    @classmethod
    def of(cls, built: Tensor) -> _Piece:
        local = built.to_local() if isinstance(built, DTensor) else built
        attributes = {key: value for key, value in vars(built).items() if key not in ("_local_tensor", "_spec")}
        elements = torch.empty_strided(local.shape, local.stride(), dtype=torch.long, device=local.device)
        return cls(elements.copy_(local.detach()), built, attributes)

    def cut_from(self, full: Tensor) -> Tensor:
        local = full.reshape(-1)[self.elements]
        if local.stride() != self.elements.stride():  # sizes of 1 may have any
            local = torch.empty_strided(
                local.shape, self.elements.stride(), dtype=local.dtype, device=local.device
            ).copy_(local)
        made = _placed(local, self.built) if isinstance(self.built, DTensor) else local
        for key, value in self.attributes.items():
            setattr(made, key, value)
        return made


_CUT: dict[object, dict[str, _Piece]] = {}


def parameters(tensors: Tensors) -> dict[str, nn.Parameter]:
    """Parameters around what a row built, with the attributes that say how a plain tensor is cut."""
    made = {name: _parameter(t) for name, t in tensors.items()}
    for name, param in made.items():
        for key in (*_MARKS, "_shardmuon_flat"):
            if key in vars(tensors[name]):
                setattr(param, key, getattr(tensors[name], key))
    return made


def _parameter(tensor: Tensor) -> nn.Parameter:
    """nn.Parameter(tensor), which detaches a DTensor: torch traces that anew for each shape, dtype and placement."""
    if not isinstance(tensor, DTensor):
        return nn.Parameter(tensor)
    made: Any = _placed(tensor.to_local().detach(), tensor)
    made.requires_grad_()._is_param = True  # all that nn.Parameter does of a tensor of such a class
    return made  # type: ignore[no-any-return]


def _placed(local: Tensor, like: DTensor) -> DTensor:
    """Another DTensor with the mesh, placements and shape of one, without a trace."""
    mesh, placements, shape, stride = like.device_mesh, like.placements, like.shape, like.stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


_MARKS = ("tensor_model_parallel", "partition_dim", "partition_stride")
_MESHES: dict[tuple[object, str, tuple[int, ...]], DeviceMesh] = {}


def mesh_of(shape: tuple[int, ...], device: str | None = None) -> DeviceMesh:
    """A mesh with axes named a0, a1, ...; made once per process and default group. Collective at the first call.

    `device`: default: as `meshes_on` says, on the CPU otherwise.
    """
    kind = device or mesh_kind()
    key = (dist.group.WORLD, kind, shape)
    if key not in _MESHES:
        names = tuple(f"a{i}" for i in range(len(shape)))
        _MESHES[key] = init_device_mesh(kind, shape, mesh_dim_names=names)
    return _MESHES[key]


class _Bag(nn.Module):
    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor))


def _fully_sharded(tensors: Tensors, mesh: DeviceMesh) -> dict[str, Tensor]:
    """The tensors as `fully_shard` keeps them. They may be DTensors already (tensor parallel)."""
    bag = _Bag({name: t.clone() for name, t in tensors.items()})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of a container without forward
        fully_shard(bag, mesh=mesh)
    return {name: p.detach() for name, p in bag.named_parameters()}


def _distributed(tensors: Tensors, mesh: DeviceMesh, placements: Callable[[int, Tensor], list]) -> dict[str, Tensor]:  # type: ignore[type-arg]
    return {
        name: distribute_tensor(t.clone(), mesh, placements(i, t), src_data_rank=None)
        for i, (name, t) in enumerate(tensors.items())
    }


def _plain(tensors: Tensors, shape: tuple[int, ...]) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in tensors.items()}


def _replicate(tensors: Tensors, shape: tuple[int, ...]) -> dict[str, Tensor]:
    return _distributed(tensors, mesh_of(shape), lambda i, t: [Replicate()])


def _shard(dim: int) -> Builder:
    return lambda tensors, shape: _distributed(tensors, mesh_of(shape), lambda i, t: [Shard(dim)])


def _fsdp2(tensors: Tensors, shape: tuple[int, ...]) -> dict[str, Tensor]:
    return _fully_sharded(tensors, mesh_of(shape))


def _tp(tensors: Tensors, mesh: DeviceMesh) -> dict[str, Tensor]:
    """DTensors cut by columns and rows in turn, as in tensor parallelism."""
    return _distributed(tensors, mesh, lambda i, t: [Shard(i % 2 + t.ndim - 2)])


def _fsdp2_tp(tensors: Tensors, shape: tuple[int, ...]) -> dict[str, Tensor]:
    mesh = mesh_of(shape)
    return _fully_sharded(_tp(tensors, mesh["a1"]), mesh["a0"])


def _hsdp_tp(tensors: Tensors, shape: tuple[int, ...]) -> dict[str, Tensor]:
    mesh = mesh_of(shape)
    return _fully_sharded(_tp(tensors, mesh["a2"]), mesh["a0", "a1"])


def _two_dims(tensors: Tensors, shape: tuple[int, ...]) -> dict[str, Tensor]:
    return _distributed(tensors, mesh_of(shape), lambda i, t: [Shard(t.ndim - 2), Shard(t.ndim - 1)])


def _same_dim(tensors: Tensors, shape: tuple[int, ...]) -> dict[str, Tensor]:
    return _distributed(tensors, mesh_of(shape), lambda i, t: [Shard(0), Shard(0)])


def _lone_strided(tensors: Tensors, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """The rest of (FSDP, TP) on one dim when TP is gathered: a rank keeps its share of both halves."""
    mesh = mesh_of(shape)
    out: dict[str, Tensor] = {}
    for name, full in tensors.items():
        halves = [_chunk(half, shape[0])[dist.get_rank()] for half in _chunk(full, 2)]
        out[name] = DTensor.from_local(
            torch.cat(halves).clone(),
            mesh,
            [strided_shard()(0, split_factor=2)],
            run_check=False,
            shape=full.shape,
            stride=full.stride(),
        )
    return out


def _chunk(tensor: Tensor, parts: int) -> list[Tensor]:
    """torch.chunk along dim 0, padded with empty tensors to the full number of parts."""
    step = max(1, -(-len(tensor) // parts))
    return [tensor[i * step : (i + 1) * step] for i in range(parts)]


def _experts(tensors: Tensors, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Stacks are cut by expert; everything else is replicated."""
    return _distributed(tensors, mesh_of(shape), lambda i, t: [Shard(0) if t.ndim == 3 else Replicate()])


def _experts_fsdp(tensors: Tensors, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Stacks are cut by expert over one axis and by rows over the other; the rest is sharded over all ranks."""
    mesh = mesh_of(shape)
    dense = {name: t for name, t in tensors.items() if t.ndim != 3}
    flat = mesh_of((shape[0] * shape[1],))
    made = _distributed({n: t for n, t in tensors.items() if t.ndim == 3}, mesh, lambda i, t: [Shard(1), Shard(0)]) | (
        _fully_sharded(dense, flat) if dense else {}
    )
    return {name: made[name] for name in tensors}


def _mixed(tensors: Tensors, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Neighbours on different meshes: sharded, replicated x sharded on two axes, replicated, plain."""
    flat, square = mesh_of((shape[0] * shape[1],)), mesh_of(shape)
    places = (
        (flat, [Shard(0)]),
        (square, [Replicate(), Shard(1)]),
        (flat, [Replicate()]),
        (square, [Shard(1), Shard(0)]),
    )
    out: dict[str, Tensor] = {}
    for i, (name, t) in enumerate(tensors.items()):
        mesh, placements = places[i % 5] if i % 5 < 4 else (None, [])
        out[name] = t.clone() if mesh is None else distribute_tensor(t.clone(), mesh, placements, src_data_rank=None)
    return out


def _megatron_fsdp(tensors: Tensors, shape: tuple[int, ...]) -> dict[str, Tensor]:
    return shard_like_megatron(tensors, megatron_mesh(shape, "fsdp"), one_unit=False)


def _megatron_hfsdp(tensors: Tensors, shape: tuple[int, ...]) -> dict[str, Tensor]:
    return shard_like_megatron(tensors, megatron_mesh(shape, "hfsdp"), one_unit=False, outer="shard")


def _megatron_fsdp_tp(tensors: Tensors, shape: tuple[int, ...]) -> dict[str, Tensor]:
    return shard_like_megatron(tensors, megatron_mesh(shape, "fsdp+tp"), one_unit=False, tensor_parallel=True)


def _marked(full: Tensor, dim: int, stride: int, parts: int, part: int) -> Tensor:
    """One rank's shard of a plain tensor, marked as Megatron and TransformerEngine mark theirs."""
    blocks = [_chunk(block, parts)[part] for block in full.transpose(0, dim).chunk(stride)]
    shard = torch.cat(blocks).transpose(0, dim).contiguous()
    for key, value in zip(_MARKS, (True, dim, stride), strict=True):
        setattr(shard, key, value)
    return shard


def _tp_plain(tensors: Tensors, shape: tuple[int, ...], dims: tuple[int, ...], stride: int = 1) -> dict[str, Tensor]:
    """Plain shards, cut along `dims` in turn (counted among the matrix's two; -1: not cut)."""
    out = {}
    part = dist.get_rank() % shape[-1]
    for i, (name, full) in enumerate(tensors.items()):
        dim = dims[i % len(dims)]
        if dim == -1:
            out[name] = full.clone()
            out[name].partition_dim = -1  # type: ignore[attr-defined]
            continue
        dim += full.ndim == 3  # not over experts
        fits = len(full.transpose(0, dim)) % stride == 0
        out[name] = _marked(full, dim, stride if fits else 1, shape[-1], part)
    return out


def _tp_groups(shape: tuple[int, ...]) -> dict[str, Any]:
    mesh = mesh_of(shape)
    names = mesh.mesh_dim_names or ()
    found: dict[str, Any] = {"tp_group": mesh.get_group(names[-1])}
    return found | ({"process_group": mesh.get_group(names[0])} if len(shape) == 2 else {})


def _flat_buffer(tensors: Tensors, shape: tuple[int, ...], parallel: bool) -> dict[str, Tensor]:
    """1-D shards of flat buffers as Megatron's distributed optimizer keeps them, of tensor-parallel shards too."""
    mesh = mesh_of(shape)
    num_parts, part = (shape[1], mesh.get_coordinate()[1]) if parallel else (1, 0)  # type: ignore[index]
    data, tp = GroupRef.of(mesh.get_group(0)), GroupRef.of(mesh.get_group(1)) if parallel else None
    cuts = [_cut_of(full, i, num_parts) if parallel else None for i, full in enumerate(tensors.values())]
    whole = {
        name: full if cut is None else _marked(full, cut.dim, cut.stride, num_parts, part)
        for (name, full), cut in zip(tensors.items(), cuts, strict=True)
    }
    ranges = flat_ranges([t.numel() for t in whole.values()], shape[0], bucket_size=4000)
    out = {}
    for (name, full), cut, held in zip(tensors.items(), cuts, ranges, strict=True):
        start, stop = held[mesh.get_local_rank(0)]
        shard = whole[name].detach().flatten()[start:stop].clone()
        out[name] = mark_flat(shard, FlatShard(tuple(full.shape), start, data, "flat buffers", tp, cut))
    return out


def _cut_of(full: Tensor, index: int, num_parts: int) -> Cut | None:
    """Rows, columns and rows in strides in turn, where they divide."""
    dim, stride = ((0, 1), (1, 1), (0, 2))[index % 3]
    fits = full.ndim == 2 or dim == 0
    return Cut(dim, stride) if fits and full.shape[dim] % (num_parts * stride) == 0 else None


def _flat(world: int) -> tuple[int, ...]:
    return (world,)


def _square(world: int) -> tuple[int, ...]:
    return (world // 2, 2) if world % 2 == 0 else (1, world)


def _replicas_first(world: int) -> tuple[int, ...]:
    return (2, world // 2) if world % 2 == 0 else (world, 1)


def _cube(world: int) -> tuple[int, ...]:
    return (2, world // 4, 2) if world % 4 == 0 else (1, *_square(world))


LAYOUTS: dict[str, LayoutCase] = {
    case.name: case
    for case in (
        LayoutCase("single", _flat, _plain),
        LayoutCase("ddp", _flat, _plain, process_group=True),
        LayoutCase("replicate", _flat, _replicate),
        LayoutCase("fsdp2", _flat, _fsdp2),
        LayoutCase("fsdp2 dim 1", _flat, _shard(1)),
        LayoutCase("hsdp", _replicas_first, lambda t, s: _fully_sharded(t, mesh_of(s))),
        LayoutCase("tp", _flat, lambda t, s: _tp(t, mesh_of(s))),
        LayoutCase("fsdp2+tp", _square, _fsdp2_tp),
        LayoutCase("two dims", _square, _two_dims),
        LayoutCase("one dim twice", _square, _same_dim),
        LayoutCase("lone strided", _flat, _lone_strided),
        LayoutCase("hsdp+tp", _cube, _hsdp_tp),
        LayoutCase("ep", _flat, _experts),
        LayoutCase("ep+fsdp", _square, _experts_fsdp),
        LayoutCase("mixed meshes", _square, _mixed),
        LayoutCase("megatron-fsdp", _flat, _megatron_fsdp),
        LayoutCase("megatron-fsdp hfsdp", _square, _megatron_hfsdp),
        LayoutCase("megatron-fsdp+tp", _square, _megatron_fsdp_tp),
        LayoutCase("tp column", _flat, lambda t, s: _tp_plain(t, s, (0,)), groups=_tp_groups),
        LayoutCase("tp row", _flat, lambda t, s: _tp_plain(t, s, (1,)), groups=_tp_groups),
        LayoutCase("tp stride 2", _flat, lambda t, s: _tp_plain(t, s, (0,), 2), groups=_tp_groups),
        LayoutCase("tp x dp", _square, lambda t, s: _tp_plain(t, s, (0, 1, -1)), groups=_tp_groups),
        LayoutCase("mcore buffers", _flat, lambda t, s: _flat_buffer(t, s, parallel=False)),
        LayoutCase("mcore buffers+tp", _square, lambda t, s: _flat_buffer(t, s, parallel=True), groups=_tp_groups),
    )
}
