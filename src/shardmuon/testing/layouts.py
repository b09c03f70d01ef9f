"""Sharding layouts and parameters for tests. Each entry of `LAYOUTS` describes one way in which PyTorch or a framework
shards parameters. `PARAMS` describes parameters that contain one matrix, several blocks or a stack of matrices. Many of
their sizes are not divisible by the number of ranks.

The builder of a layout only makes sharded parameters. It calls PyTorch's own functions (`fully_shard`,
`distribute_tensor`) where they exist, so that tests compare shardmuon's description of a layout with an independent
implementation.

[Note: cut once]
Building a layout is slow, because torch shards and traces each shape and dtype separately. Building the same layout
repeatedly would take most of a test's time. Therefore the builder of a layout runs only once per process and set of
shapes. Its input tensors contain the flat index of each element, so the result shows which elements this rank stores,
and in which order. Later tensors of the same shapes are sharded directly from this result, with the same mesh and
placements.

[Note: Megatron without Megatron]
Megatron-FSDP can place any number of a DTensor's rows on a rank, and Megatron-core can split its flat buffers at any
element. The layouts named after Megatron imitate such uneven splits without importing either package. Some ranks have
no elements. If the packages are installed, tests also run on parameters that the packages themselves build.
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
from shardmuon.layout.engines.flat import FlatShard
from shardmuon.layout.mesh import Cut
from shardmuon.layout.views import Ints, MatrixView, matrix_view

_Tensors = Mapping[str, Tensor]
_Builder = Callable[[_Tensors, Ints], dict[str, Tensor]]


_KIND = ["cpu"]  # stack of device types set by nested `meshes_on` contexts; new meshes use the last type


@contextlib.contextmanager
def meshes_on(kind: str) -> Iterator[None]:
    """Build layouts on the device type `kind`, such as "cuda", inside the `with` block."""
    _KIND.append(kind)
    try:
        yield
    finally:
        _KIND.pop()


@dataclass(frozen=True)
class _LayoutCase:
    """A sharding layout for tests.

    Attributes:
        name: Name that `shardmuon verify` prints.
        mesh: Function that takes the number of ranks and returns the shape of the mesh.
        builder: Function that takes full tensors and a mesh shape and returns this rank's shards. All ranks of the
            default group must call it. For tensors of the same shapes, it must always return the same placements.
        groups: Function that takes a mesh shape and returns the process groups to pass to Muon as options.
        exchanges: Number of all-to-all exchanges in a step. Usually two: the first sends shards to the ranks that
            orthogonalize the matrices, and the second sends the results back. Three if the results are then forwarded
            to replicas. One if no matrix is split between ranks.
        plain_shards: True if parameters are plain tensors that are shards of larger tensors, and shardmuon's
            checkpoints save the whole tensors. False for 1-D shards of flat buffers, which only the framework can save.
    """

    name: str
    mesh: Callable[[int], Ints]
    builder: _Builder
    groups: Callable[[Ints], dict[str, Any]] = lambda shape: {}
    exchanges: int = 2
    plain_shards: bool = False

    def options(self, world: int) -> dict[str, Any]:
        """Return the Muon options that this layout needs on `world` ranks."""
        return self.groups(self.mesh(world))

    def build(self, tensors: _Tensors, shape: Ints) -> dict[str, Tensor]:
        """Move full tensors to the device type of the layout's meshes, shard them, and return this rank's shards. All
        ranks of the default group must call this method."""
        tensors = {name: t.to(_KIND[-1]) for name, t in tensors.items()}
        # Reuse an earlier result of the layout's builder (see [Note: cut once]), except for tensors of mixed dtypes,
        # because a framework can shard each dtype in a separate buffer.
        kinds = {(type(t), t.dtype, t.device, t.requires_grad, t.is_contiguous()) for t in tensors.values()}
        if [(kind[0], *kind[3:]) for kind in kinds] != [(Tensor, False, True)]:
            return self.builder(tensors, shape)
        return {name: _elements_of(tensors[name], built) for name, built in self.numbers(tensors, shape).items()}

    def numbers(self, tensors: _Tensors, shape: Ints) -> dict[str, Tensor]:
        """Make fp64 tensors with the shapes of `tensors` in which the value of each element is the element's flat
        index. Shard these tensors, and return this rank's shards. All ranks of the default group must call this method.
        """
        key = (dist.group.WORLD, _KIND[-1], self.name, shape, tuple((name, t.shape) for name, t in tensors.items()))
        if key not in _CUT:
            places = {n: torch.arange(t.numel(), dtype=torch.float64, device=_KIND[-1]) for n, t in tensors.items()}
            _CUT[key] = self.builder({name: places[name].view(t.shape) for name, t in tensors.items()}, shape)
        return _CUT[key]


_CUT: dict[object, dict[str, Tensor]] = {}  # cached results of layout builders (see [Note: cut once])


def _elements_of(full: Tensor, built: Tensor) -> Tensor:
    """Make this rank's shard of `full`. The values in `built` are the indices of the shard's elements in the flattened
    `full`. The shard has the same shape, strides, placements and attributes as `built`."""
    numbers = built.to_local() if isinstance(built, DTensor) else built
    local = torch.empty_strided(numbers.shape, numbers.stride(), dtype=full.dtype, device=full.device)
    local.copy_(full.reshape(-1)[numbers.long()])
    made = _placed(local, built) if isinstance(built, DTensor) else local
    vars(made).update({key: value for key, value in vars(built).items() if key not in ("_local_tensor", "_spec")})
    return made


def parameters(tensors: _Tensors) -> dict[str, nn.Parameter]:
    """Make parameters from the sharded tensors of a layout, and copy the attributes that describe the sharding."""
    made: dict[str, Any] = {}
    for name, tensor in tensors.items():
        # Don't call nn.Parameter for a DTensor: torch would trace each shape again, and could replace the mesh with an
        # equal mesh from its cache that belongs to a different layout.
        if isinstance(tensor, DTensor):
            made[name] = _placed(tensor.to_local().detach(), tensor).requires_grad_()
            made[name]._is_param = True  # makes isinstance(made[name], nn.Parameter) True
        else:
            made[name] = nn.Parameter(tensor)
        vars(made[name]).update(vars(tensor))
    return made


def _placed(local: Tensor, like: DTensor) -> DTensor:
    """Make a DTensor from this rank's local tensor, with the mesh, placements, shape and strides of `like`."""
    mesh, placements, shape, stride = like.device_mesh, like.placements, like.shape, like.stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def mesh_of(shape: Ints, purpose: str = "") -> DeviceMesh:
    """Return a mesh with axes named "a0", "a1" and so on, on the CPU or on the device type that `meshes_on` selects.
    Meshes are cached. The first call for a mesh is collective over all ranks.

    Args:
        shape: Sizes of the axes.
        purpose: Part of the cache key. Layouts that imitate Megatron-FSDP need separate meshes, because they set an
            attribute on their meshes.
    """
    return _mesh_of(dist.group.WORLD, _KIND[-1], shape, purpose)


@cache
def _mesh_of(world: object, kind: str, shape: Ints, purpose: str) -> DeviceMesh:
    return init_device_mesh(kind, shape, mesh_dim_names=tuple(f"a{i}" for i in range(len(shape))))


def _fully_sharded(tensors: _Tensors, mesh: DeviceMesh) -> dict[str, Tensor]:
    """Shard tensors with `fully_shard`, which frees the memory of the given tensors. These can be plain tensors or
    tensor-parallel DTensors."""
    bag = nn.ParameterDict(parameters(tensors))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ignore torch's warning that nn.ParameterDict has no forward method
        fully_shard(bag, mesh=mesh)
    return {name: bag[name].detach() for name in tensors}


def _placed_by(
    # function that takes a tensor's index and the tensor itself, and returns the tensor's placements
    places: Callable[[int, Tensor], Sequence[Placement]],
) -> _Builder:
    """Return a builder that makes a DTensor of each tensor, with the placements that `places` returns. If `places`
    returns no placements, the tensor stays a plain tensor. If the number of placements differs from the number of mesh
    axes, the DTensor gets a mesh with a single axis over all ranks."""

    def build(tensors: _Tensors, shape: Ints) -> dict[str, Tensor]:
        out: dict[str, Tensor] = {}
        for i, (name, full) in enumerate(tensors.items()):
            placements, whole = places(i, full), full.clone()
            mesh = shape if len(placements) == len(shape) else (math.prod(shape),)
            out[name] = distribute_tensor(whole, mesh_of(mesh), placements, src_data_rank=None) if placements else whole
        return out

    return build


def _in_turn(index: int, tensor: Tensor) -> list[Placement]:
    """Return the placement of a tensor-parallel tensor. Tensors with even indices are sharded by rows, and tensors with
    odd indices are sharded by columns."""
    return [Shard(index % 2 + tensor.ndim - 2)]


def _fsdp2(tensors: _Tensors, shape: Ints) -> dict[str, Tensor]:
    return _fully_sharded({name: t.clone() for name, t in tensors.items()}, mesh_of(shape))


def _fsdp2_tp(tensors: _Tensors, shape: Ints) -> dict[str, Tensor]:
    """Shard tensors with tensor parallelism over the last mesh axis, then with FSDP2 over the other mesh axes."""
    mesh = mesh_of(shape)
    *outer, inner = mesh.mesh_dim_names or ()
    parallel = {
        name: distribute_tensor(t.clone(), mesh[inner], _in_turn(i, t), src_data_rank=None)
        for i, (name, t) in enumerate(tensors.items())
    }
    return _fully_sharded(parallel, mesh[tuple(outer)])


def _lone_strided(tensors: _Tensors, shape: Ints) -> dict[str, Tensor]:
    """Make DTensors whose only placement is a strided shard. This layout results if FSDP and tensor parallelism of size
    2 shard the same dim, and the tensors are then gathered over the tensor-parallel axis. Each rank stores a part of
    each tensor-parallel half."""
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
    """Split a tensor as `torch.chunk` does, but always return `parts` tensors. The last tensors can be empty."""
    size = tensor.shape[dim]
    ends = [min(size, i * -(-size // parts)) for i in range(parts + 1)]
    return [tensor.narrow(dim, start, stop - start) for start, stop in itertools.pairwise(ends)]


def _shard_like_megatron(
    tensors: _Tensors,
    mesh: DeviceMesh,
    *,
    # True if the rows are sharded over two mesh axes: axis 0 (outer) and axis 1 (inner)
    hybrid: bool = False,
    # True if the last mesh axis shards tensors with even indices by rows and all other tensors by columns
    tensor_parallel: bool = False,
) -> dict[str, Tensor]:
    """Shard full tensors by rows in the same way as Megatron-FSDP v1, but without communication. Return DTensors."""
    at = list(mesh.get_coordinate() or ())
    num_parts, part = (mesh.size(mesh.ndim - 1), at.pop()) if tensor_parallel else (1, 0)
    # Megatron-FSDP splits over the inner mesh axis first. So shard i * num_outer + o belongs to the rank at coordinate
    # o of the outer axis and coordinate i of the inner axis.
    num_outer, first = (mesh.size(0), at[0]) if hybrid else (1, 0)
    num_shards, shard = mesh.size(int(hybrid)) * num_outer, at[-1] * num_outer + first
    mesh._shard_order = list(reversed(range(mesh.ndim)))  # type: ignore[attr-defined]
    tp_dim = mesh.mesh_dim_names[-1] if tensor_parallel and mesh.mesh_dim_names else None
    out: dict[str, Tensor] = {}
    for number, (name, full) in enumerate(tensors.items()):
        dim = number % 2 + full.ndim - 2
        whole = _chunk(full, num_parts, dim)[part] if tensor_parallel else full
        start, stop = _in_buffer(3 * number % 7, len(whole) if whole.numel() else 0, num_shards, shard)
        placements: list[Placement] = [*[Shard(0)] * len(at), *[Shard(dim)] * tensor_parallel]
        local = whole[start:stop].contiguous().clone()
        out[name] = DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())
        row = math.prod(whole.shape[1:])
        out[name].megatron_fsdp_dist_index = SimpleNamespace(tp_dim=tp_dim)  # type: ignore[attr-defined]
        out[name].megatron_fsdp_slice = slice(start * row, stop * row)  # type: ignore[attr-defined]
    return out


def _in_buffer(before: int, size: int, num_parts: int, part: int) -> tuple[int, int]:
    """Return the range (start, stop) of a tensor's elements that lie in one part of a flat buffer; (0, 0) if there are
    none. The buffer contains, in this order, `before` + 1 other elements, the tensor's `size` elements, and 2 other
    elements. It is split into `num_parts` equal parts, and `part` is the index of the part."""
    each = -(-(3 + before + size) // num_parts)
    start, stop = (min(max(end * each - 1 - before, 0), size) for end in (part, part + 1))
    return (start, stop) if start < stop else (0, 0)


def _megatron(purpose: str, **how: Any) -> _Builder:
    """Return a builder that calls `_shard_like_megatron` with the options `how`. Builders with the same `purpose` share
    meshes."""
    return lambda tensors, shape: _shard_like_megatron(tensors, mesh_of(shape, purpose=purpose), **how)


def _marked(full: Tensor, dim: int, stride: int, parts: int, part: int) -> Tensor:
    """Split a tensor along `dim` into `parts` tensor-parallel shards, and return the shard with index `part`. The shard
    has the attributes that Megatron and TransformerEngine set on their shards. The tensor consists of `stride` blocks,
    and each shard contains a part of each block."""
    blocks = [_chunk(block, parts)[part] for block in full.transpose(0, dim).chunk(stride)]
    shard = torch.cat(blocks).transpose(0, dim).contiguous()
    vars(shard).update(tensor_model_parallel=True, partition_dim=dim, partition_stride=stride)
    return shard


def _tp_plain(tensors: _Tensors, shape: Ints, dims: Ints, stride: int = 1) -> dict[str, Tensor]:
    """Make tensor-parallel shards that are plain tensors. Each tensor uses the next entry of `dims`, in a cycle: 0
    splits the rows of each matrix, 1 splits the columns, and -1 leaves the tensor whole."""
    out = {}
    part = dist.get_rank() % shape[-1]
    for i, (name, full) in enumerate(tensors.items()):
        dim = dims[i % len(dims)]
        if dim == -1:
            out[name] = full.clone()
            out[name].partition_dim = -1  # type: ignore[attr-defined]
            continue
        # In a stack of experts, dim 0 indexes the experts, so rows and columns are dims 1 and 2.
        dim += full.ndim == 3
        fits = len(full.transpose(0, dim)) % stride == 0
        out[name] = _marked(full, dim, stride if fits else 1, shape[-1], part)
    return out


def _tp_groups(shape: Ints) -> dict[str, Any]:
    mesh = mesh_of(shape)
    names = mesh.mesh_dim_names or ()
    found: dict[str, Any] = {"tp_group": mesh.get_group(names[-1])}
    return found | ({"process_group": mesh.get_group(names[0])} if len(shape) == 2 else {})


def _flat_buffer(tensors: _Tensors, shape: Ints, parallel: bool) -> dict[str, Tensor]:
    """Make 1-D shards of flat buffers, as in Megatron-core's distributed optimizer. If `parallel` is True, the buffers
    contain tensor-parallel shards. Otherwise, they contain whole tensors."""
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
        start, stop = _in_buffer(37 * len(out) % 200, whole[name].numel(), shape[0], mesh.get_local_rank(0))
        shard = whole[name].detach().flatten()[start:stop].clone()
        out[name] = FlatShard(tuple(full.shape), start, data, "flat buffers", tp, cut).mark(shard)
    return out


def _cut_of(full: Tensor, index: int, num_parts: int) -> Cut | None:
    """Choose how tensor parallelism splits the tensor at position `index` in a list. Tensors are split in turn by rows,
    by columns, and by rows in two blocks, each of which is split separately. Return None if the tensor does not divide
    evenly, or if it would be split by columns but is not 2-D."""
    dim, stride = ((0, 1), (1, 1), (0, 2))[index % 3]
    fits = full.ndim == 2 or dim == 0
    return Cut(dim, stride) if fits and full.shape[dim] % (num_parts * stride) == 0 else None


def _flat(world: int) -> Ints:
    return (world,)


def _square(world: int) -> Ints:
    return (world // 2, 2) if world % 2 == 0 else (1, world)


_MIXED: list[list[Placement]] = [[Shard(0)], [Replicate(), Shard(1)], [Replicate()], [Shard(1), Shard(0)], []]
LAYOUTS: dict[str, _LayoutCase] = {
    case.name: case
    for case in (
        _LayoutCase("single", _flat, _placed_by(lambda i, t: [])),
        _LayoutCase(
            "ddp",
            _flat,
            _placed_by(lambda i, t: []),
            lambda shape: {"process_group": dist.group.WORLD},
            exchanges=1,
        ),
        _LayoutCase("replicate", _flat, _placed_by(lambda i, t: [Replicate()]), exchanges=1),
        _LayoutCase("fsdp2", _flat, _fsdp2),
        _LayoutCase("fsdp2 dim 1", _flat, _placed_by(lambda i, t: [Shard(1)])),
        _LayoutCase("hsdp", lambda n: (2, n // 2) if n % 2 == 0 else (n, 1), _fsdp2, exchanges=3),
        _LayoutCase("tp", _flat, _placed_by(_in_turn)),
        _LayoutCase("fsdp2+tp", _square, _fsdp2_tp),
        _LayoutCase("two dims", _square, _placed_by(lambda i, t: [Shard(t.ndim - 2), Shard(t.ndim - 1)])),
        _LayoutCase("one dim twice", _square, _placed_by(lambda i, t: [Shard(0), Shard(0)])),
        _LayoutCase("lone strided", _flat, _lone_strided),
        _LayoutCase("hsdp+tp", lambda n: (2, n // 4, 2) if n % 4 == 0 else (1, *_square(n)), _fsdp2_tp, exchanges=3),
        _LayoutCase("ep", _flat, _placed_by(lambda i, t: [Shard(0) if t.ndim == 3 else Replicate()]), exchanges=1),
        # Stacks of experts are sharded by rows over one mesh axis and by expert over the other. Other tensors are
        # sharded over all ranks.
        _LayoutCase("ep+fsdp", _square, _placed_by(lambda i, t: [Shard(1), Shard(0)] if t.ndim == 3 else [Shard(0)])),
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
    """A parameter for tests.

    Attributes:
        shape: Shape of the full tensor.
        why: Description of the special case that the parameter tests.
        options: Muon options that describe the matrices in the parameter.
    """

    shape: Ints
    why: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def view(self) -> MatrixView:
        """`MatrixView` that divides the parameter into one or more matrices."""
        return matrix_view(self.shape, **self.options)

    def matrices(self, full: Tensor) -> list[Tensor]:
        """Copy the matrices of the full tensor into separate 2-D tensors, in the order of `view.matrices`."""
        view, out = self.view, []
        fine = full.reshape(view.fine)
        for matrix in view.matrices:
            found = torch.empty(matrix.rows, matrix.cols, dtype=full.dtype, device=full.device)
            box = fine[
                tuple(slice(start, start + size) for start, size in zip(matrix.start, matrix.sizes, strict=True))
            ]
            found.as_strided(matrix.sizes, matrix.strides).copy_(box)
            out.append(found)
        return out

    @staticmethod
    def groups(params: Mapping[str, Tensor], cases: Mapping[str, ParamCase]) -> list[dict[str, Any]]:
        """Make parameter groups for Muon from the options in each parameter's `ParamCase`. Parameters with equal
        options share a group."""
        table: dict[str, dict[str, Any]] = {}
        for name, param in params.items():
            options = cases[name].options
            table.setdefault(repr(options), {"params": [], **options})["params"].append((name, param))
        return list(table.values())


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
