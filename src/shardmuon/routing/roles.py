"""What each parameter of a model is: an embedding, a norm, a convolution, a matrix, several fused ones, or unknown.

Reads the model only: the module that holds a parameter, those around it, the modules that share it, and its global
shape. Well-known types say more: presets.py. Knows nothing of users' overrides, learning rates or groups. Output heads
take a second look: heads.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, cast

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from shardmuon._torch import is_dtensor
from shardmuon.layout.engines import engine_for
from shardmuon.layout.engines.base import AUTOTP_GROUP
from shardmuon.layout.engines.fsdp1 import know, refuse_flat
from shardmuon.layout.engines.fsdp1 import shape_of as fsdp1_shape
from shardmuon.layout.views import Ints, matrix_view
from shardmuon.routing.presets import find_preset, fused_hint, num_heads

__all__ = ["Place", "Role", "by", "find_places", "is_table", "logical_shape", "role_of", "unwrapped_type"]

_NORMS = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.modules.batchnorm._NormBase,  # BatchNorm1d to 3d, SyncBatchNorm, InstanceNorm1d to 3d
)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)
_NUM_GATES: dict[type[nn.Module], int] = {nn.LSTM: 4, nn.LSTMCell: 4, nn.GRU: 3, nn.GRUCell: 3}
# What modules call the number of rows of a linear layer's weight: torch's and Transformer Engine's, Megatron's.
_NUM_OUTPUTS = ("out_features", "output_size", "output_size_per_partition")
# Names that wrappers put between a module and its parameters: torch.compile, FSDP1, activation checkpointing.
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
# Megatron's, which keep the model as `module`. By name, so that Megatron need not be there.
_MEGATRON_WRAPPERS = ("MegatronFSDP", "FullyShardedDataParallel", "DistributedDataParallel", "Float16Module")

Kind = Literal[
    "embedding",
    "linear",
    "fused",  # several matrices
    "turned",  # a matrix stored as its transpose
    "convolution",
    "bare",  # of a module that torch does not know
    "router",  # rows choose experts
    "entries",  # many dims, but no map: biases of experts, tables, rates
    "norm",
    "vector",
    "broadcast",  # (1, M, N): a table, or a stack of one expert
    "pairs",  # a last dim of 2: complex numbers
    "unclear",  # the shape is known, how it reads as matrices is not
    "unknown",  # not even the shape
]


class Place(NamedTuple):
    """A place where a parameter hangs in the model. A shared parameter has several."""

    order: int  # in the model
    name: str  # of the parameter, without wrappers
    leaf: str  # what the module calls it, looking through parametrizations
    path: str  # of the module, with wrappers
    module: nn.Module
    parent: nn.Module | None  # of the module
    owners: tuple[tuple[str, nn.Module], ...] = ()  # modules around it, innermost first, and its name below each


@dataclass(frozen=True, slots=True)
class Role:
    """What a parameter is.

    Attributes:
        kind: See `Kind`.
        reason: Why it goes where it goes; for "unclear" and "unknown" what is wrong and what to do.
        use_muon: Whether it is a matrix, or several.
        view: Options of `matrix_view` that read it as matrices. Also set where AdamW is the better default.
        reads: Numbers of features that it takes as inputs (of a matrix whose orientation is unknown, both dims).
        decays: Whether it decays with AdamW; norms and 1-D parameters never do.
        remark: For the table, where it stays one matrix.
    """

    kind: Kind
    reason: str
    use_muon: bool = False
    view: Mapping[str, Any] = field(default_factory=dict)
    reads: tuple[int, ...] = ()
    decays: bool = True
    remark: str = ""


# --------------------------------------------------------------------------------------------- where parameters are


def find_places(model: nn.Module) -> list[tuple[Tensor, tuple[Place, ...]]]:
    """Every parameter once, in model order, with all its places.

    Raises:
        ValueError: FSDP1 has put flat parameters in the places of the model's own.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[int, tuple[Tensor, list[Place]]] = {}
    order = 0
    know(modules.values())
    for path, module in modules.items():
        for leaf, param in module._parameters.items():
            if param is None:
                continue
            name = _without_wrappers(modules, f"{path}.{leaf}" if path else leaf)
            try:
                refuse_flat(param)
            except ValueError as wrong:
                raise ValueError(f"{name}: {wrong}") from None
            owner_path = path
            if isinstance(module, ParametrizationList):  # X.parametrizations.weight holds X's weight
                *above, _, leaf = path.split(".")
                owner_path = ".".join(above)
            parent = modules[owner_path.rpartition(".")[0]] if owner_path else None
            place = Place(
                order, name, leaf, owner_path, modules[owner_path], parent, _owners(modules, owner_path, name)
            )
            found.setdefault(id(param), (param, []))[1].append(place)
            order += 1
    return [(param, tuple(places)) for param, places in found.values()]


def _owners(modules: Mapping[str, nn.Module], path: str, name: str) -> tuple[tuple[str, nn.Module], ...]:
    """The modules at and above a path, and a parameter's name below each; wrappers are left out."""
    found: dict[str, nn.Module] = {}
    parts = path.split(".") if path else []
    for end in range(len(parts), -1, -1):
        at = ".".join(parts[:end])
        above = _without_wrappers(modules, at)
        # of a wrapper and what it wraps, which have one name, the innermost
        found.setdefault(name[len(above) + 1 :] if above else name, modules[at])
    return tuple(found.items())


def _without_wrappers(modules: Mapping[str, nn.Module], name: str) -> str:
    """A name that is the same however the model is wrapped, so that overrides and checkpoints fit either way."""
    parts = name.split(".")
    kept = []
    for at, part in enumerate(parts):
        holder = modules[".".join(parts[:at])]
        ddp = isinstance(holder, (nn.parallel.DistributedDataParallel, nn.DataParallel))
        inner = part == "module" and (ddp or type(holder).__name__ in _MEGATRON_WRAPPERS)
        if part not in _WRAPPERS and not inner:
            kept.append(part)
    return ".".join(kept)


def unwrapped_type(module: nn.Module) -> type[nn.Module]:
    """The type of a module below torch.compile, FSDP1 and activation checkpointing."""
    inner = next((module._modules[name] for name in _WRAPPERS if name in module._modules), None)
    return type(module) if inner is None else unwrapped_type(inner)


# ---------------------------------------------------------------------------------------------------- logical shape


def logical_shape(param: Tensor, module: nn.Module, place: Mapping[str, Any] | None = None) -> tuple[Ints, str]:
    """The global shape of a parameter, and what keeps it from being known ("" if nothing does).

    `place`: what group options say of plain shards, which are taken to be equal.
    """
    if is_lazy(param):
        return (), "is not initialized yet. Run one forward pass, then build the groups"
    try:
        flat = fsdp1_shape(param)
    except ValueError as wrong:
        return (), f"has an unknown shape: {wrong}"
    if flat is not None:
        return flat, ""
    ds_shape = getattr(param, "ds_shape", None)  # DeepSpeed ZeRO-3 (zero.Init) keeps a placeholder of shape (0,)
    shape = tuple(int(size) for size in (param.shape if ds_shape is None else ds_shape))
    if 0 in shape:
        return shape, (
            f"has shape {shape}, no elements: the placeholder of a parameter that was sharded away, so its logical "
            "shape is unknown. Build the groups before wrapping the model"
        )
    if place and _is_plain(param):
        try:
            if place.get("tp_group"):
                return engine_for(param, place).shape(param), ""
        except ValueError as wrong:
            return shape, f"has an unknown shape: {wrong}"
    if _is_tensor_parallel_shard(param, module):
        return shape, (
            f"has tensor_model_parallel=True, so {shape} is the shape of one rank's shard and the logical shape is "
            f"unknown. Give param_groups (or Muon) tp_group=, its tensor-parallel process group ({AUTOTP_GROUP})"
        )
    return shape, ""


def _is_plain(param: Tensor) -> bool:
    return not is_dtensor(param) and not hasattr(param, "ds_shape")


def _is_tensor_parallel_shard(param: Tensor, module: nn.Module) -> bool:
    """Whether a Megatron layer holds a part only. It keeps `output_size` beside `output_size_per_partition`."""
    if is_dtensor(param) or not getattr(param, "tensor_model_parallel", False):
        return False  # a DTensor's shape is the whole's (Megatron-FSDP keeps the attribute)
    suffix = "_per_partition"
    parts = {key.removesuffix(suffix): size for key, size in vars(module).items() if key.endswith(suffix)}
    return not parts or any(getattr(module, key, None) != size for key, size in parts.items())


# ------------------------------------------------------------------------------------------------ what they are


def role_of(
    places: Sequence[Place],
    shape: Ints,  # global
) -> Role:
    """What a parameter is, from all the modules that hold it. Does not depend on their order."""
    roles = [_role_at(place, shape) for place in places]
    tables = [place for place, role in zip(places, roles, strict=True) if role.kind == "embedding"]
    others = ", ".join(place.name for place in places[1:])
    if tables:
        reason = f"tied to embedding {tables[0].name}"
        if tables[0] is places[0]:
            reason = f"embedding, tied to {others}" if others else "embedding"
        return Role("embedding", reason, reads=shape[1:])
    # A module that torch knows says more than one that happens to keep a reference to the same parameter.
    known = [role for role in roles if role.kind not in ("bare", "broadcast", "unclear")] or roles
    first = known[0]
    if any((role.use_muon, role.view) != (first.use_muon, first.view) for role in known):
        found = ", ".join(f"{place.name} ({role.reason})" for place, role in zip(places, roles, strict=True))
        return Role("unclear", f"is shared by modules that read it differently: {found}")
    if not others or first.kind in ("unclear", "unknown"):
        return first
    return replace(first, reason=f"{first.reason}, shared with {others}")


def _role_at(place: Place, shape: Ints) -> Role:
    module = place.module
    if isinstance(module, _NORMS):
        return Role("norm", "norm", reads=shape[-1:])
    num_dims = _num_dims(module)
    if num_dims and place.name.rpartition(".")[2] == "weight" and len(shape) != num_dims:
        return Role(
            "unknown",
            f"has shape {shape}, but the weight of a {type(module).__name__} has {num_dims} dims: an engine keeps "
            "a piece of it here. Build the groups before wrapping the model",
        )
    if len(shape) < 2:
        return Role("vector", "bias" if place.leaf == "bias" else f"{len(shape)}-D")
    if is_table(module):
        return Role("embedding", "embedding", reads=shape[1:])
    if max(shape) == math.prod(shape):
        return Role("vector", f"1 vector ({by(shape)})")
    known = find_preset(place.owners, shape)
    if known is not None:
        kind: Kind = "fused" if known.is_split else "turned" if known.view.get("transposed") else "bare"
        if kind == "bare":
            kind = "linear" if known.reason == "linear" else "fused"
        if not known.use_muon:
            kind = "router" if known.reason.startswith("router") else "entries"
        inputs = shape[-2:-1] if known.view.get("transposed") else shape[-1:]
        return Role(kind, known.reason, known.use_muon, known.view, inputs, known.decays)
    if isinstance(module, _CONVOLUTIONS):
        return _convolution(place, shape)
    num_fused, what = _num_fused(module, place.leaf)
    if num_fused:
        return Role("fused", what, True, {"split_sizes": (shape[0] // num_fused,) * num_fused}, shape[1:])
    if _is_router(place, shape):
        return Role("router", f"router: its rows choose among {shape[0]} experts", reads=shape[1:])
    if isinstance(module, nn.Linear):
        return Role("linear", "linear", True, reads=shape[1:], remark=_hint(place, shape))
    return _bare(place, shape)


def _hint(place: Place, shape: Ints) -> str:
    """`fused_hint` of a weight: its module or one around it knows its heads."""
    heads = (num_heads(module) for _, module in place.owners[:3])
    return fused_hint(place.name, shape, next(filter(None, heads), 0))


def _num_dims(module: nn.Module) -> int:
    """How many dims the weight of a module has, if they are always as many; else 0."""
    if isinstance(module, (nn.Linear, nn.Embedding, nn.EmbeddingBag)):
        return 2
    if isinstance(module, _CONVOLUTIONS):
        return 2 + len(module.kernel_size)
    return 0


def is_table(module: nn.Module) -> bool:
    """Whether the rows of a module's weight are looked up: torch's embeddings, and what has both their sizes
    (vocabulary-parallel embeddings, codebooks)."""
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return True
    return all(isinstance(getattr(module, size, None), int) for size in ("num_embeddings", "embedding_dim"))


def _convolution(place: Place, shape: Ints) -> Role:
    """A kernel is one (out, in*k...) matrix per group of channels.

    A transposed one stores (in, out/groups, k...): flattened, the transpose of the map from the features of a position
    to the patch it writes. Orthogonalization commutes with transposition; only a scale that tells rows from columns
    sees a difference, and users may write `transposed=True`.
    """
    module = place.module
    groups = int(cast(Any, module.groups))
    num_inputs = shape[0] // groups if isinstance(module, _TRANSPOSED) else shape[1]  # of each group
    if groups > 1 and num_inputs == 1:
        return Role("convolution", "depthwise convolution", view={"view": "flatten"})
    # channels of two groups never meet: each group is a map of its own
    view: dict[str, Any] = {"view": "flatten", "num_heads": groups} if groups > 1 else {"view": "flatten"}
    matrix = matrix_view(shape, **view).matrices[0]
    if min(matrix.rows, matrix.cols) == 1:
        return Role("vector", f"{_num(groups, 'vector')} ({matrix.rows}x{matrix.cols})", view=view)
    pointwise = groups == 1 and math.prod(shape[2:]) == 1 and not isinstance(module, _TRANSPOSED)
    remark = _hint(place, shape[:2]) if pointwise else ""
    return Role("convolution", f"convolution, {_num(groups, 'group')}", True, view, remark=remark)


def _num_fused(module: nn.Module, leaf: str) -> tuple[int, str]:
    """How many equal row blocks a torch module fuses in a parameter (0 if none), and what they are."""
    if isinstance(module, nn.MultiheadAttention) and leaf == "in_proj_weight":
        return 3, "fused q, k, v"
    if leaf.startswith(("weight_ih", "weight_hh")):
        num_gates = next((num for kind, num in _NUM_GATES.items() if isinstance(module, kind)), 0)
        return num_gates, f"{num_gates} fused gates"
    return 0, ""


def _stacks(module: nn.Module) -> list[Ints]:
    """Shapes of the 3-D parameters that a module holds itself and that may be matrices of experts."""
    held = (p for p in module._parameters.values() if p is not None)
    if isinstance(module, _CONVOLUTIONS):
        return []
    return [shape for shape in map(_shape_of, held) if len(shape) == 3 and shape[0] > 1 and shape[-1] != 2]


def _shape_of(param: Tensor) -> Ints:
    return () if is_lazy(param) else tuple(int(size) for size in getattr(param, "ds_shape", param.shape))


def _is_router(place: Place, shape: Ints) -> bool:
    """Whether as many rows as there are experts beside it read what the experts read.

    Experts are a stack (E, M, N) in a module beside the weight or in the one that holds it, or a list of E modules of
    linear layers alone: a list of a model's blocks has norms, too.
    """
    if len(shape) != 2 or shape[0] < 2:
        return False
    for below, module in place.owners[1:4]:
        branch = below.split(".")[0]
        for name, child in (("", module), *module.named_children()):
            if name == branch:
                continue
            if any(stack[0] == shape[0] and shape[1] in stack[1:] for stack in _stacks(child)):
                return True
            if isinstance(child, nn.ModuleList) and len(child) == shape[0] and all(_reads(m, shape[1]) for m in child):
                return True
    return False


def _reads(expert: nn.Module, width: int) -> bool:
    """Whether a module is made of linear layers only and one of them takes so many inputs."""
    holders = [m for m in expert.modules() if m._parameters]
    inputs = {m.in_features for m in holders if isinstance(m, nn.Linear)}
    return all(isinstance(m, nn.Linear) for m in holders) and len(holders) > 1 and width in inputs


_PAIRS = "last dim of 2: pairs of numbers, as complex ones are kept"


def _bare(place: Place, shape: Ints) -> Role:
    """A parameter of a module we know nothing of, with two dims or more."""
    if len(shape) == 2:
        stacks = [stack for stack in _stacks(place.module) if stack[0] == shape[0] and shape[1] in stack[1:]]
        if stacks:
            return Role(
                "entries", f"a row for each of {shape[0]} experts: biases, or a router", reads=shape, decays=False
            )
        remark = _hint(place, shape)
        if isinstance(place.module, (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)):
            return Role("fused", "linear", True, reads=shape[1:])
        if shape[0] in (vars(place.module).get(name) for name in _NUM_OUTPUTS):
            return Role(
                "linear", f"linear ({unwrapped_type(place.module).__name__})", True, reads=shape[1:], remark=remark
            )
        if shape[-1] == 2:
            return Role("pairs", _PAIRS, reads=shape)
        return Role("bare", "2-D parameter", True, reads=shape, remark=remark)
    if len(shape) == 3:
        stack = {"view": "stack"}
        if shape[0] == 1:
            return Role("broadcast", "leading dim of 1: a table for all of a batch", view=stack, reads=shape[1:])
        if min(shape[1:]) == 1:
            return Role("vector", f"{_num(shape[0], 'vector')} ({by(shape[1:])})", view=stack)
        if isinstance(place.module, nn.Bilinear):
            return Role("fused", f"stack of {shape[0]} matrices", True, stack, reads=shape[1:])
        if shape[-1] == 2:
            return Role("pairs", _PAIRS, view=stack, reads=shape[1:])
        reason = f"stack of {shape[0]} matrices, by its shape alone"
        return Role("bare", reason, True, stack, reads=shape[1:], remark=_hint(place, shape))
    if shape[0] == 1:
        return Role("vector", "leading dim of 1: a table for all of a batch")
    return Role(
        "unclear",
        f"has shape {shape} and is not the kernel of a torch convolution: which dims form matrices is unknown",
    )


def _num(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


def by(shape: Sequence[int]) -> str:
    """A shape for people: "3072x768"."""
    return "x".join(map(str, shape)) or "scalar"
