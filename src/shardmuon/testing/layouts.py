"""Tables of layouts and parameters for tests. Every row of `LAYOUTS` is a way in which a PyTorch engine shards
parameters, and every check runs on all rows; `PARAMS` has odd shapes, stacks, blocks and transposes.

A row only *builds* parameters, with the engines' own functions wherever they exist (`fully_shard`,
`distribute_tensor`), so a comparison never relies on shardmuon's own idea of the layout.

[Note: cut once]
    Building the same layout again would take most of a check's time on ranks, because torch shards, traces and caches
    separately for each shape and dtype. So a row's builder runs once per process and set of shapes, on tensors that
    hold the indices of their own elements. The result on this rank tells, for any tensors of these shapes, which
    elements lie here, in which order, on which mesh and with which placements. Later tensors are made from these
    elements alone.

[Note: Megatron without Megatron]
    Megatron-FSDP's DTensors may have any number of rows on any rank, and Megatron-core's flat buffers may be cut
    anywhere. Here the rows for both cut unevenly, and some ranks have nothing. Where the packages are installed, tests
    step what they build.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from shardmuon._torch import strided_shard
from shardmuon.comm.groups import GroupRef
from shardmuon.foresight.job import in_parts
from shardmuon.layout.engines.flat import FlatShard, mark_flat
from shardmuon.layout.mesh import Cut
from shardmuon.layout.views import Ints, MatrixView, matrix_view

_Tensors = Mapping[str, Tensor]
_Builder = Callable[[_Tensors, Ints], dict[str, Tensor]]


_KIND = ["cpu"]


def mesh_kind() -> str:
    """Device type that meshes are made for."""
    return _KIND[-1]


@contextlib.contextmanager
def meshes_on(kind: str) -> Iterator[None]:
    """Build layouts on another device type ("cuda"); tensors must already be there."""
    _KIND.append(kind)
    try:
        yield
    finally:
        _KIND.pop()


@dataclass(frozen=True)
class _LayoutCase:
    """One layout of the comparison.

    Attributes:
        name: Name that `shardmuon verify` prints.
        mesh: World size -> mesh shape.
        builder: (full tensors, mesh shape) -> this rank's parameters. Equal input gives equal placements. Called on all
            ranks of the default group.
        groups: Mesh shape -> the optimizer's options that give the process groups of plain tensors.
        exchanges: Number of exchanges in a step: two, to owners and back; three if ranks hold replicas of pieces, to
            which results are forwarded; one if every rank that stores any of a matrix stores all of it.
        plain_shards: True if tensors are plain and parts of larger ones, which shardmuon's own checkpoints join. False
            for flat shards, which only their frameworks save.
    """

    name: str
    mesh: Callable[[int], Ints]
    builder: _Builder
    groups: Callable[[Ints], dict[str, Any]] = lambda shape: {}
    exchanges: int = 2
    plain_shards: bool = False

    def options(self, world: int) -> dict[str, Any]:
        """Muon's arguments for this layout on `world` ranks."""
        return self.groups(self.mesh(world))

    def build(self, tensors: _Tensors, shape: Ints) -> dict[str, Tensor]:
        """Build this rank's parameters from full tensors by `builder`. All ranks of the default group call it."""
        # See [Note: cut once]. Shards of different dtypes may not share a buffer, so mixed dtypes are always built.
        kinds = {(type(t), t.dtype, t.device, t.requires_grad, t.is_contiguous()) for t in tensors.values()}
        if [(kind[0], *kind[3:]) for kind in kinds] != [(Tensor, False, True)]:
            return self.builder(tensors, shape)
        key = (dist.group.WORLD, mesh_kind(), self.name, shape, tuple((name, t.shape) for name, t in tensors.items()))
        if key not in _CUT:
            _CUT[key] = self.builder(numbers_in(tensors), shape)
        return {name: _elements_of(tensors[name], built) for name, built in _CUT[key].items()}


_CUT: dict[object, dict[str, Tensor]] = {}  # cached results of builders, for tensors of element indices


def numbers_in(tensors: _Tensors) -> dict[str, Tensor]:
    """Element indices of these tensors, as fp64 tensors of the same shapes."""
    return {
        name: torch.arange(t.numel(), dtype=torch.float64, device=t.device).view(t.shape) for name, t in tensors.items()
    }


def _elements_of(full: Tensor, built: Tensor) -> Tensor:
    """A rank's shard of `full`, with the elements, strides, placements and attributes of `built`, a shard that holds
    the indices of its elements."""
    numbers = built.to_local() if isinstance(built, DTensor) else built
    local = torch.empty_strided(numbers.shape, numbers.stride(), dtype=full.dtype, device=full.device)
    local.copy_(full.reshape(-1)[numbers.long()])
    made = _placed(local, built) if isinstance(built, DTensor) else local
    vars(made).update({key: value for key, value in vars(built).items() if key not in ("_local_tensor", "_spec")})
    return made


def parameters(tensors: _Tensors) -> dict[str, nn.Parameter]:
    """Make parameters of the tensors that a row built, with the attributes that describe their sharding."""
    made: dict[str, Any] = {}
    for name, tensor in tensors.items():
        # nn.Parameter would trace again for each shape, and could take an equal mesh of another row from torch's cache
        if isinstance(tensor, DTensor):
            made[name] = _placed(tensor.to_local().detach(), tensor).requires_grad_()
            made[name]._is_param = True  # all that nn.Parameter does for a tensor of such a class
        else:
            made[name] = nn.Parameter(tensor)
        vars(made[name]).update(vars(tensor))
    return made


def _placed(local: Tensor, like: DTensor) -> DTensor:
    """Make a DTensor of `local` with the mesh, placements and shape of `like`, without tracing."""
    mesh, placements, shape, stride = like.device_mesh, like.placements, like.shape, like.stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def mesh_of(shape: Ints, purpose: str = "") -> DeviceMesh:
    """A mesh of the device type of `meshes_on` with axes named a0, a1, ..., cached. Collective at the first call.

    Args:
        shape: Sizes of the axes.
        purpose: Name for a separate mesh, needed for Megatron-FSDP, which sets attributes of its meshes.
    """
    return _mesh_of(dist.group.WORLD, mesh_kind(), shape, purpose)


@cache
def _mesh_of(world: object, kind: str, shape: Ints, purpose: str) -> DeviceMesh:
    return init_device_mesh(kind, shape, mesh_dim_names=tuple(f"a{i}" for i in range(len(shape))))


def _fully_sharded(tensors: _Tensors, mesh: DeviceMesh) -> dict[str, Tensor]:
    """Shard the tensors with `fully_shard`. They may already be DTensors (tensor parallel)."""
    bag = nn.ParameterDict({name: nn.Parameter(t.clone()) for name, t in tensors.items()})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the container has no forward
        fully_shard(bag, mesh=mesh)
    return {name: bag[name].detach() for name in tensors}


_Places = Callable[[int, Tensor], Sequence[Placement]]  # (index of a tensor, tensor) -> one placement per mesh axis


def _placed_by(places: _Places) -> _Builder:
    """Builder of DTensors with these placements on a mesh: on one axis of all ranks if there is one placement only.
    Without placements a tensor stays plain."""

    def build(tensors: _Tensors, shape: Ints) -> dict[str, Tensor]:
        out: dict[str, Tensor] = {}
        for i, (name, full) in enumerate(tensors.items()):
            placements, whole = places(i, full), full.clone()
            mesh = shape if len(placements) == len(shape) else (math.prod(shape),)
            out[name] = distribute_tensor(whole, mesh_of(mesh), placements, src_data_rank=None) if placements else whole
        return out

    return build


def _in_turn(index: int, tensor: Tensor) -> list[Placement]:
    """Shard rows and columns in turn, as in tensor parallelism."""
    return [Shard(index % 2 + tensor.ndim - 2)]


def _fsdp2(tensors: _Tensors, shape: Ints) -> dict[str, Tensor]:
    return _fully_sharded(tensors, mesh_of(shape))


def _fsdp2_tp(tensors: _Tensors, shape: Ints) -> dict[str, Tensor]:
    """Tensor parallelism over the last axis, FSDP over the others."""
    mesh = mesh_of(shape)
    *outer, inner = mesh.mesh_dim_names or ()
    parallel = {
        name: distribute_tensor(t.clone(), mesh[inner], _in_turn(i, t), src_data_rank=None)
        for i, (name, t) in enumerate(tensors.items())
    }
    return _fully_sharded(parallel, mesh[tuple(outer)])


def _lone_strided(tensors: _Tensors, shape: Ints) -> dict[str, Tensor]:
    """The layout that remains of (FSDP, TP) on one dim after TP is gathered: a rank has its share of both halves."""
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


def _chunk(tensor: Tensor, parts: int, dim: int = 0) -> list[Tensor]:
    """torch.chunk, padded with empty tensors to the full number of parts."""
    size = tensor.shape[dim]
    ends = [min(size, i * -(-size // parts)) for i in range(parts + 1)]
    return [tensor.narrow(dim, start, stop - start) for start, stop in itertools.pairwise(ends)]


def shard_like_megatron(
    tensors: Mapping[str, Tensor],  # full tensors
    mesh: DeviceMesh,
    *,
    hybrid: bool = False,  # True: the first axis shards as well, outside the inner one
    tensor_parallel: bool = False,  # True: the last axis shards columns and rows in turn
) -> dict[str, Tensor]:
    """Make this rank's DTensors as Megatron-FSDP v1 makes them. Needs no communication."""
    at = list(mesh.get_coordinate() or ())
    num_parts, part = (mesh.size(mesh.ndim - 1), at.pop()) if tensor_parallel else (1, 0)
    # The inner axis cuts first: rank (outer o, inner i) has shard i * num_outer + o.
    num_outer, first = (mesh.size(0), at[0]) if hybrid else (1, 0)
    num_shards, shard = mesh.size(int(hybrid)) * num_outer, at[-1] * num_outer + first
    mesh._shard_order = list(reversed(range(mesh.ndim)))  # type: ignore[attr-defined]
    tp_dim = mesh.mesh_dim_names[-1] if tensor_parallel and mesh.mesh_dim_names else None
    out: dict[str, Tensor] = {}
    for number, (name, full) in enumerate(tensors.items()):
        dim = number % 2 + full.ndim - 2
        whole = _chunk(full, num_parts, dim)[part] if tensor_parallel else full
        start, stop = _in_buffer(3 * number % 7, len(whole) if whole.numel() else 0, num_shards)[shard]  # range of rows
        placements: list[Placement] = [*[Shard(0)] * len(at), *[Shard(dim)] * tensor_parallel]
        local = whole[start:stop].contiguous().clone()
        out[name] = DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())
        row = math.prod(whole.shape[1:])
        out[name].megatron_fsdp_dist_index = SimpleNamespace(tp_dim=tp_dim)  # type: ignore[attr-defined]
        out[name].megatron_fsdp_slice = slice(start * row, stop * row)  # type: ignore[attr-defined]
    return out


def _in_buffer(before: int, size: int, num_parts: int) -> Sequence[tuple[int, int]]:
    """Range of elements of a tensor in each equal part of a buffer, which has other tensors before and after it."""
    return in_parts(1 + before, size, -(-(3 + before + size) // num_parts), num_parts)


def _megatron(purpose: str, **how: Any) -> _Builder:
    """Builder of Megatron-FSDP's DTensors; see `shard_like_megatron`."""
    return lambda tensors, shape: shard_like_megatron(tensors, mesh_of(shape, purpose=purpose), **how)


def _marked(full: Tensor, dim: int, stride: int, parts: int, part: int) -> Tensor:
    """One rank's shard of a plain tensor, marked as Megatron and TransformerEngine mark theirs."""
    blocks = [_chunk(block, parts)[part] for block in full.transpose(0, dim).chunk(stride)]
    shard = torch.cat(blocks).transpose(0, dim).contiguous()
    vars(shard).update(tensor_model_parallel=True, partition_dim=dim, partition_stride=stride)
    return shard


def _tp_plain(tensors: _Tensors, shape: Ints, dims: Ints, stride: int = 1) -> dict[str, Tensor]:
    """Plain shards, cut along `dims` in turn: 0 or 1 is a dim of the matrix, -1 is not cut."""
    out = {}
    part = dist.get_rank() % shape[-1]
    for i, (name, full) in enumerate(tensors.items()):
        dim = dims[i % len(dims)]
        if dim == -1:
            out[name] = full.clone()
            out[name].partition_dim = -1  # type: ignore[attr-defined]
            continue
        dim += full.ndim == 3  # skip the dim of experts
        fits = len(full.transpose(0, dim)) % stride == 0
        out[name] = _marked(full, dim, stride if fits else 1, shape[-1], part)
    return out


def _tp_groups(shape: Ints) -> dict[str, Any]:
    mesh = mesh_of(shape)
    names = mesh.mesh_dim_names or ()
    found: dict[str, Any] = {"tp_group": mesh.get_group(names[-1])}
    return found | ({"process_group": mesh.get_group(names[0])} if len(shape) == 2 else {})


def _flat_buffer(tensors: _Tensors, shape: Ints, parallel: bool) -> dict[str, Tensor]:
    """1-D shards of flat buffers, as in Megatron's distributed optimizer, also of tensor-parallel shards."""
    mesh = mesh_of(shape)
    num_parts, part = (shape[1], mesh.get_coordinate()[1]) if parallel else (1, 0)  # type: ignore[index]
    data, tp = GroupRef.of(mesh.get_group(0)), GroupRef.of(mesh.get_group(1)) if parallel else None
    cuts = [_cut_of(full, i, num_parts) if parallel else None for i, full in enumerate(tensors.values())]
    whole = {
        name: full if cut is None else _marked(full, cut.dim, cut.stride, num_parts, part)
        for (name, full), cut in zip(tensors.items(), cuts, strict=True)
    }
    out: dict[str, Tensor] = {}
    for (name, full), cut in zip(tensors.items(), cuts, strict=True):
        start, stop = _in_buffer(37 * len(out) % 200, whole[name].numel(), shape[0])[mesh.get_local_rank(0)]
        shard = whole[name].detach().flatten()[start:stop].clone()
        out[name] = mark_flat(shard, FlatShard(tuple(full.shape), start, data, "flat buffers", tp, cut))
    return out


def _cut_of(full: Tensor, index: int, num_parts: int) -> Cut | None:
    """A cut of rows, of columns and of rows with stride 2 in turn; None if the tensor does not divide evenly."""
    dim, stride = ((0, 1), (1, 1), (0, 2))[index % 3]
    fits = full.ndim == 2 or dim == 0
    return Cut(dim, stride) if fits and full.shape[dim] % (num_parts * stride) == 0 else None


def _flat(world: int) -> Ints:
    return (world,)


def _square(world: int) -> Ints:
    return (world // 2, 2) if world % 2 == 0 else (1, world)


def _replicas_first(world: int) -> Ints:
    return (2, world // 2) if world % 2 == 0 else (world, 1)


def _cube(world: int) -> Ints:
    return (2, world // 4, 2) if world % 4 == 0 else (1, *_square(world))


def _default_group(shape: Ints) -> dict[str, Any]:
    return {"process_group": dist.group.WORLD}


_MIXED: list[list[Placement]] = [[Shard(0)], [Replicate(), Shard(1)], [Replicate()], [Shard(1), Shard(0)], []]
LAYOUTS: dict[str, _LayoutCase] = {
    case.name: case
    for case in (
        _LayoutCase("single", _flat, _placed_by(lambda i, t: [])),
        _LayoutCase("ddp", _flat, _placed_by(lambda i, t: []), _default_group, exchanges=1),
        _LayoutCase("replicate", _flat, _placed_by(lambda i, t: [Replicate()]), exchanges=1),
        _LayoutCase("fsdp2", _flat, _fsdp2),
        _LayoutCase("fsdp2 dim 1", _flat, _placed_by(lambda i, t: [Shard(1)])),
        _LayoutCase("hsdp", _replicas_first, _fsdp2, exchanges=3),
        _LayoutCase("tp", _flat, _placed_by(_in_turn)),
        _LayoutCase("fsdp2+tp", _square, _fsdp2_tp),
        _LayoutCase("two dims", _square, _placed_by(lambda i, t: [Shard(t.ndim - 2), Shard(t.ndim - 1)])),
        _LayoutCase("one dim twice", _square, _placed_by(lambda i, t: [Shard(0), Shard(0)])),
        _LayoutCase("lone strided", _flat, _lone_strided),
        _LayoutCase("hsdp+tp", _cube, _fsdp2_tp, exchanges=3),
        _LayoutCase("ep", _flat, _placed_by(lambda i, t: [Shard(0) if t.ndim == 3 else Replicate()]), exchanges=1),
        _LayoutCase(  # stacks by expert over one axis and by rows over the other, all else over all ranks
            "ep+fsdp", _square, _placed_by(lambda i, t: [Shard(1), Shard(0)] if t.ndim == 3 else [Shard(0)])
        ),
        _LayoutCase("mixed meshes", _square, _placed_by(lambda i, t: _MIXED[i % len(_MIXED)])),
        _LayoutCase("megatron-fsdp", _flat, _megatron("fsdp")),
        _LayoutCase("megatron-fsdp hfsdp", _square, _megatron("hfsdp", hybrid=True)),
        _LayoutCase("megatron-fsdp+tp", _square, _megatron("fsdp+tp", tensor_parallel=True)),
        _LayoutCase("tp column", _flat, partial(_tp_plain, dims=(0,)), _tp_groups, plain_shards=True),
        _LayoutCase("tp row", _flat, partial(_tp_plain, dims=(1,)), _tp_groups, plain_shards=True),
        _LayoutCase("tp stride 2", _flat, partial(_tp_plain, dims=(0,), stride=2), _tp_groups, plain_shards=True),
        _LayoutCase(
            "tp x dp", _square, partial(_tp_plain, dims=(0, 1, -1)), _tp_groups, exchanges=3, plain_shards=True
        ),
        _LayoutCase("mcore buffers", _flat, partial(_flat_buffer, parallel=False)),
        _LayoutCase("mcore buffers+tp", _square, partial(_flat_buffer, parallel=True), _tp_groups, exchanges=3),
    )
}


# ------------------------------------------------------------------------------------------------------- the parameters


@dataclass(frozen=True)
class ParamCase:
    """A parameter of the comparison: global shape, group options, and which case it covers."""

    shape: Ints
    why: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def view(self) -> MatrixView:
        """The matrices of the parameter."""
        return matrix_view(self.shape, **self.options)


PARAMS: dict[str, ParamCase] = {
    "square": ParamCase((16, 16), "divides on every mesh up to 8"),
    "tall": ParamCase((65, 33), "nothing divides; orthogonalized transposed"),
    "wide": ParamCase((33, 65), "nothing divides"),
    "few_rows": ParamCase((3, 40), "more ranks than rows: empty shards"),
    "few_cols": ParamCase((40, 3), "more ranks than columns"),
    "one_row": ParamCase((1, 24), "a matrix of one row"),
    "one_col": ParamCase((24, 1), "a matrix of one column"),
    "experts": ParamCase((8, 6, 10), "a stack that divides by expert", {"view": "stack"}),
    "odd_experts": ParamCase((5, 7, 4), "a stack that does not", {"view": "stack"}),
    "gate_up": ParamCase((26, 9), "two blocks that end inside shards", {"split_sizes": (13, 13)}),
    "qkv": ParamCase((24, 10), "2 query groups of (8, 2, 2) rows", {"split_sizes": (8, 2, 2), "split_groups": 2}),
    "heads": ParamCase((21, 8), "heads that end inside shards", {"split_sizes": 7}),
    "expert_gate_up": ParamCase((4, 10, 6), "blocks inside experts", {"view": "stack", "split_sizes": (5, 5)}),
    "conv": ParamCase((10, 4, 3, 3), "a kernel, flattened"),
    "in_out": ParamCase((21, 34), "stored transposed; nothing divides", {"transposed": True}),
    "in_out_experts": ParamCase((5, 6, 9), "a stack of transposes", {"view": "stack", "transposed": True}),
    "columns": ParamCase(
        (13, 27), "blocks of columns that end inside shards", {"split_sizes": (8, 19), "transposed": True}
    ),
    "in_out_qkv": ParamCase(
        (10, 24),
        "2 query groups of (8, 2, 2) columns, transposed",
        {"split_sizes": (8, 2, 2), "split_groups": 2, "transposed": True},
    ),
    "in_out_gate_up": ParamCase(
        (3, 7, 12),
        "single columns by turns inside transposed experts",
        {"view": "stack", "split_sizes": (1, 1), "split_groups": 6, "transposed": True},
    ),
}


def groups_of(params: Mapping[str, Tensor], cases: Mapping[str, ParamCase], **options: Any) -> list[dict[str, Any]]:
    """Parameter groups with the options that say which matrices each parameter holds."""
    table: dict[str, dict[str, Any]] = {}
    for name, param in params.items():
        group = table.setdefault(repr(cases[name].options), {"params": [], **cases[name].options, **options})
        group["params"].append((name, param))
    return list(table.values())


def cut_matrices(view: MatrixView, full: Tensor) -> list[Tensor]:
    """The matrices of a logical tensor."""
    fine, out = full.reshape(view.fine), []
    for matrix in view.matrices:
        found = torch.empty(matrix.rows, matrix.cols, dtype=full.dtype, device=full.device)
        box = fine[tuple(slice(start, start + size) for start, size in zip(matrix.start, matrix.sizes, strict=True))]
        found.as_strided(matrix.sizes, matrix.strides).copy_(box)
        out.append(found)
    return out
