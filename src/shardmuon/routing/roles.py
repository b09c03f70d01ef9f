"""Roles of the parameters in a model, such as embedding, norm or linear.

A parameter's role depends on its global shape, the module that contains it, the enclosing modules, and other modules
that share it. The role does not depend on overrides, learning rates or groups. For well-known module types, presets.py
determines the role. After the roles are known, groups.py finds output heads and experts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from shardmuon.errors import about
from shardmuon.layout.engines import Engine, engine_for
from shardmuon.layout.engines.fsdp1 import UnitPlace
from shardmuon.layout.views import Ints, matrix_view
from shardmuon.routing.presets import Role, numbers_out

_Convolution = nn.modules.conv._ConvNd  # base class of torch's convolutions and transposed convolutions
# `_KEEP` lists the attributes in which torch.compile, FSDP1 and activation checkpointing store the wrapped module.
# `_KEEP_AS_MODULE` lists the wrapper classes of torch and Megatron that store the wrapped module in the attribute
# `module`. The classes are listed by name, because Megatron may not be installed.
_KEEP = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_KEEP_AS_MODULE = {
    *("DistributedDataParallel", "DataParallel"),
    *("MegatronFSDP", "FullyShardedDataParallel", "Float16Module"),
}

# Name patterns of weights that are often fused, each with the names of the fused parts in order. A match only adds a
# remark to the routing table.
_HINTS = (
    (re.compile(r"(w|to_)?qkv(_proj)?|query_key_value|c_attn|w_pack|in_proj_qkv\w*", re.IGNORECASE), "q k v"),
    (re.compile(r"gate_up(_proj)?|up_gate(_proj)?|w13|w12", re.IGNORECASE), "gate up"),
    # `Wi` is fused in ModernBERT. The pattern is case-sensitive, since T5's `wi` is a single matrix.
    (re.compile(r"Wi"), "gate up"),
    (re.compile(r"(w|to_)?kv(_proj)?", re.IGNORECASE), "k v"),
    (re.compile(r"kv_[ab]_proj\w*|in_proj(_\w+)?|x_proj", re.IGNORECASE), ""),
)


class Place(NamedTuple):
    """A place where a parameter occurs in a model. A shared parameter occurs in several places.

    Attributes:
        order: Position of this place in model order.
        name: Full name of the parameter, without the parts that wrappers add, so that overrides match with or without
            wrappers.
        leaf: Name of the module's attribute that stores the parameter. For a parametrized weight, the name of the
            weight.
        owners: Pairs (name of the parameter relative to the module, module), one for each enclosing module, innermost
            first.
    """

    order: int
    name: str
    leaf: str
    owners: tuple[tuple[str, nn.Module], ...]

    @property
    def module(self) -> nn.Module:
        """The innermost module that contains the parameter."""
        return self.owners[0][1]

    @property
    def is_table(self) -> bool:
        """True if the module looks up rows of its weight, like an embedding or a codebook. Such modules have integer
        attributes `num_embeddings` and `embedding_dim`."""
        sizes = ("num_embeddings", "embedding_dim")
        return all(isinstance(getattr(self.module, size, None), int) for size in sizes)

    @property
    def fused_parts(self) -> tuple[str, ...] | None:
        """Names of the fused parts that the weight's name suggests, in order. Empty if the name suggests a fused weight
        but not its parts; None if the name does not suggest a fused weight."""
        word = self.name.removesuffix(".weight").rpartition(".")[2]
        return next((tuple(parts.split()) for pattern, parts in _HINTS if pattern.fullmatch(word)), None)

    @property
    def paths(self) -> list[tuple[str, nn.Module]]:
        """Pairs (name, module), one for each enclosing module except the model itself, outermost first."""
        return [(self.name.removesuffix(f".{below}"), module) for below, module in self.owners[-2::-1]]


@dataclass(eq=False)
class Placed:
    """A parameter, and all places where the parameter occurs in a model, in model order."""

    param: Tensor
    places: tuple[Place, ...]

    @property
    def name(self) -> str:
        """Name of the parameter at its first place in the model."""
        return self.places[0].name

    @classmethod
    def all_in(cls, model: nn.Module) -> list[Placed]:
        """List every parameter of a model once, in model order.

        Raises:
            ValueError: FSDP1 has replaced the model's parameters with flat parameters.
        """
        walked = list(_walk(model, ""))
        modules, found = dict(walked), dict[int, tuple[Tensor, list[Place]]]()
        UnitPlace.learn(module for _, module in walked)
        members = [(*one, leaf, p) for one in walked for leaf, p in one[1]._parameters.items() if p is not None]
        for order, (prefix, module, leaf, param) in enumerate(members):
            name = prefix + leaf
            with about(name):
                UnitPlace.refuse_flat(param)
            parts = prefix.split(".")[:-1]
            # A parametrized weight of a module X is stored under X.parametrizations.weight, so restore its name
            # X.weight.
            if isinstance(module, ParametrizationList):
                *parts, _, leaf = parts
            above = ("".join(f"{part}." for part in parts[:end]) for end in range(len(parts), -1, -1))
            owners = tuple((name.removeprefix(at), modules[at]) for at in above)
            found.setdefault(id(param), (param, []))[1].append(Place(order, name, leaf, owners))
        return [cls(param, tuple(places)) for param, places in found.values()]

    def shape_and_role(self, options: Mapping[str, Any]) -> tuple[Ints, Role]:
        """Return the parameter's global shape and role. If the global shape is unknown, the role has the kind
        "unknown". `options` are the parameter group options that describe how plain tensors are sharded, such as
        `tp_group`. All shards of a plain tensor are assumed to have the same size."""
        param, module = self.param, self.places[0].module
        if is_lazy(param):
            return (), Role("unknown", "is not initialized yet. Run one forward pass, then build the groups")
        try:
            engine = engine_for(param, options)
            shape = engine.shape(param)
        except ValueError as wrong:
            return tuple(param.shape), Role("unknown", f"has an unknown shape: {wrong}")
        if 0 in shape:
            return shape, Role(
                "unknown",
                f"has shape {shape}, no elements: the placeholder of a parameter that was sharded away, so its logical "
                "shape is unknown. Build the groups before wrapping the model",
            )
        # A Megatron layer is not sharded if each attribute such as `output_size_per_partition` equals the one without
        # the suffix.
        parts = [(key, size) for key, size in vars(module).items() if key.endswith("_per_partition")]
        is_whole = bool(parts) and all(
            getattr(module, key.removesuffix("_per_partition"), None) == size for key, size in parts
        )
        if type(engine) is Engine and getattr(param, "tensor_model_parallel", False) and not is_whole:
            return shape, Role(
                "unknown",
                f"has tensor_model_parallel=True, so {shape} is the shape of one rank's shard and the logical shape is "
                "unknown. Give param_groups (or Muon) tp_group=, its tensor-parallel process group (of DeepSpeed's "
                "AutoTP: deepspeed.utils.groups.get_tensor_model_parallel_group())",
            )
        # Megatron sets the attribute `is_embedding_or_output_parameter` on the weights of embeddings and output layers.
        if getattr(param, "is_embedding_or_output_parameter", False):
            return shape, Role("embedding", "p.is_embedding_or_output_parameter", reads=shape[1:])
        return shape, self._role(shape)

    def _role(self, shape: Ints) -> Role:
        """Determine the role of a parameter from all modules that contain it. `shape` is the parameter's global shape.
        The order of the modules does not affect which optimizer updates the parameter."""
        places, roles = self.places, [_role_at(place, shape) for place in self.places]
        tables = [place for place, role in zip(places, roles, strict=True) if role.kind == "embedding"]
        others = ", ".join(place.name for place in places[1:])
        if tables:
            reason = f"tied to embedding {tables[0].name}"
            if tables[0] is places[0]:
                reason = f"embedding, tied to {others}" if others else "embedding"
            return Role("embedding", reason, reads=shape[1:])
        # A role that follows from a module's known type takes precedence over roles that follow only from the
        # parameter's shape.
        known = [role for role in roles if role.kind not in ("bare", "stack", "broadcast", "unclear")] or roles
        first = known[0]
        if any((role.use_muon, role.view) != (first.use_muon, first.view) for role in known):
            found = ", ".join(f"{place.name} ({role.reason})" for place, role in zip(places, roles, strict=True))
            return Role("unclear", f"is shared by modules that read it differently: {found}")
        if not others or first.kind in ("unclear", "unknown"):
            return first
        return replace(first, reason=f"{first.reason}, shared with {others}")


def _walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield a pair (prefix, module) for every module in model order. The prefix is the start of the names of the
    module's parameters. A wrapper and the wrapped module have the same prefix."""
    yield prefix, module
    keeps = any(t.__name__ in _KEEP_AS_MODULE for t in type(module).__mro__)
    for key, child in module._modules.items():
        if child is not None:
            wraps = key in _KEEP or (keeps and key == "module")
            yield from _walk(child, prefix if wraps else f"{prefix}{key}.")


# ------------------------------------------------------------------------------------------------- role at one place


def _role_at(place: Place, shape: Ints) -> Role:
    module = place.module
    # `_NormBase` is the base class of BatchNorm1d to BatchNorm3d, SyncBatchNorm, and InstanceNorm1d to InstanceNorm3d.
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)):
        return Role("norm", "norm", reads=shape[-1:], decays=False)
    num_dims = 2 + len(module.kernel_size) if isinstance(module, _Convolution) else 2
    always = place.is_table or isinstance(module, (nn.Linear, _Convolution))
    if always and place.name.rpartition(".")[2] == "weight" and len(shape) != num_dims:
        return Role(
            "unknown",
            f"has shape {shape}, but the weight of a {type(module).__name__} has {num_dims} dims: an engine keeps "
            "a piece of it here. Build the groups before wrapping the model",
        )
    if len(shape) < 2:
        return Role("entries", "bias" if place.leaf == "bias" else f"{len(shape)}-D")
    if place.is_table:
        return Role("embedding", "embedding", reads=shape[1:])
    if max(shape) == math.prod(shape):
        return Role("entries", f"1 vector ({by(shape)})")
    known = Role.of_known_type(place.owners, shape)
    if known is not None:
        return known
    return _convolution(place, shape) if isinstance(module, _Convolution) else _by_shape(place, shape)


def _convolution(place: Place, shape: Ints) -> Role:
    """Determine the role of a convolution's weight, which usually has one (out, in*k...) matrix per group of channels.

    The weight of a transposed convolution has the shape (in, out/groups, k...). Flattened, it is the transpose of the
    matrix that maps the features at one position to the output patch. Orthogonalizing a transpose gives the transposed
    result, so this matters only for learning-rate scales that distinguish rows from columns. To get the scales of
    that matrix itself, set `transposed=True`.
    """
    module: Any = place.module
    groups: int = module.groups
    # number of input channels per group
    num_inputs = shape[0] // groups if module.transposed else shape[1]
    if groups > 1 and num_inputs == 1:
        return Role("entries", "depthwise convolution", {"view": "flatten"})
    # The groups of a convolution never mix their channels, so each group is a separate linear map.
    view: dict[str, Any] = {"view": "flatten", "split_sizes": groups} if groups > 1 else {"view": "flatten"}
    matrix = matrix_view(shape, **view).matrices[0]
    if min(matrix.rows, matrix.cols) == 1:
        return Role("entries", f"{num_text(groups, 'vector')} ({matrix.rows}x{matrix.cols})", view)
    pointwise = groups == 1 and math.prod(shape[2:]) == 1 and not module.transposed
    remark = _fused_hint(place, shape[:2]) if pointwise else ""
    return Role("matrices", f"convolution, {num_text(groups, 'group')}", view, remark=remark)


def _by_shape(place: Place, shape: Ints) -> Role:
    """Determine the role of a parameter from its shape. The parameter must have two or more dims, and be in a linear
    layer or in a module of unknown type."""
    module, stack, hint = place.module, {"view": "stack"}, _fused_hint(place, shape)
    if len(shape) == 2:
        is_linear = isinstance(module, nn.Linear)
        # The number of outputs is `out_features` in torch and TransformerEngine, and `output_size` or
        # `output_size_per_partition` in Megatron.
        outputs = map(vars(module).get, ("out_features", "output_size", "output_size_per_partition"))
        if is_linear or shape[0] in outputs:
            reason = "linear" if is_linear else f"linear ({type(module).__name__})"
            return Role("linear", reason, reads=shape[1:], remark=hint)
        if shape[1] != 2:
            return Role("bare", "2-D parameter", remark=hint)
    elif shape[0] == 1:
        reason = "leading dim of 1: a table for all of a batch"
        return Role("broadcast", reason, stack) if len(shape) == 3 else Role("entries", reason)
    elif len(shape) > 3:
        return Role(
            "unclear",
            f"has shape {shape} and is not the kernel of a torch convolution: which dims form matrices is unknown",
        )
    elif min(shape[1:]) == 1:
        return Role("entries", f"{num_text(shape[0], 'vector')} ({by(shape[1:])})", stack)
    elif shape[2] != 2:
        return Role("stack", f"stack of {shape[0]} matrices, by its shape alone", stack, remark=hint)
    reason = "last dim of 2: pairs of numbers, as complex ones are kept"
    return Role("pairs", reason, stack if len(shape) == 3 else {})


def _fused_hint(place: Place, shape: Ints) -> str:
    """Return a remark for the routing table if a weight's name suggests fused parts, and "" otherwise. The remark
    contains the override that splits the weight into these parts.

    The remark states the order of rows that the override assumes, because the name does not show it: a weight can store
    all of q, then all of k, then all of v, or q, k and v of each attention head together.

    Args:
        place: Place of the weight in the model.
        shape: Shape of the weight; only the last two dims are used.
    """
    parts = place.fused_parts
    if parts is None:
        return ""
    (rows, cols), num = shape[-2:], len(parts)
    sizes, order = "..", f"if {', then '.join(parts)}: " if parts else ""
    if parts:
        known = rows % num == 0 and (num == 2 or rows == num * cols)
        sizes = ", ".join([str(rows // num)] * num if known else [f"{part} rows" for part in parts])
    return f'fused? {order}"{numbers_out(place.name)}": {{"split_sizes": ({sizes})}}'


def num_text(count: int, what: str) -> str:
    """Format a count with its noun in the singular or plural: "1 matrix", "2,048 elements"."""
    many = "matrices" if what == "matrix" else f"{what}s"
    return f"{count:,} {what if count == 1 else many}"


def by(shape: Sequence[int]) -> str:
    """Format a shape as text, such as "3072x768"."""
    return "x".join(map(str, shape)) or "scalar"
