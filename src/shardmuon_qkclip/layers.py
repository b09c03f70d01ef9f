"""Descriptions of attention layers: which rows of which weights produce queries and keys. `Attention.all_in` finds a
model's attention layers by the names of parameters and the attributes of modules, without importing any framework.

A *layer* is an attention layer. A *head* is a query head. A *group* is a set of query heads that share one key head.
The *role* of a weight's row says what the row produces:
    "q", "k"      queries and keys, both of which are scaled
    "q_pe"        the rotary part of queries in multi-head latent attention, where all heads share the rotary keys
    ""            anything else, such as values and gates

Supported forms:
    separate      q_proj and k_proj (Llama, Qwen, Mistral, ...), wq and wk, to_q and to_k (diffusers), query and key
                  (BERT, ViT), with the head size as an attribute of the module
    fused         Megatron's linear_qkv, and the module types in routing/presets.py that fuse q, k and v (GPT-2,
                  GPT-NeoX, Phi-3, timm)
    latent        DeepSeek's kv_b_proj with q_b_proj or q_proj, Megatron's linear_kv_up_proj with linear_q_up_proj or
                  linear_q_proj. The rotary keys are not scaled, so the queries' rotary part is multiplied by a head's
                  full factor g (see scaling.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from shardmuon.layout.views import Ints
from shardmuon.routing.presets import Role
from shardmuon.routing.roles import Place, Placed

_Role = Literal["q", "k", "q_pe", ""]
_Parts = tuple[tuple[_Role, int], ...]


@dataclass(frozen=True, slots=True)
class Rows:
    """Roles of the rows of one parameter. A role says what a row produces: "q" (queries), "k" (keys), "q_pe" (the
    rotary part of queries in latent attention), or "" (anything else).

    Attributes:
        weight: The parameter's name.
        parts: (role, number of rows) of each block of rows, in the order in which the blocks are stored.
        repeats: Number of times that the sequence of blocks occurs: 1 for [all q, all k, all v], and the number of
            heads for [q, k, v of head 0, q, k, v of head 1, ...].
        dim: Dim of the parameter that indexes the rows: 0, or 1 for a weight that is stored transposed (`x @ W`).

    Raises:
        ValueError: A role is unknown or occurs twice, a count is not positive, or dim is not 0 or 1.

    Examples:
        >>> Rows("q_proj.weight", (("q", 64),))
        >>> Rows("qkv.weight", (("q", 64), ("k", 16), ("", 16)))  # fused, values last
        >>> Rows("kv_b_proj.weight", (("k", 32), ("", 32)), repeats=8)  # 8 heads of (k, v)
    """

    weight: str
    parts: _Parts
    repeats: int = 1
    dim: int = 0

    def __post_init__(self) -> None:
        known = all(role in ("q", "k", "q_pe", "") and size > 0 for role, size in self.parts)
        roles = [role for role, _ in self.parts if role]
        if not known or not self.parts or len({*roles}) < len(roles) or self.repeats < 1 or self.dim not in (0, 1):
            raise ValueError(
                f"{self.weight}: parts={self.parts}, repeats={self.repeats}, dim={self.dim}: parts are pairs of a role "
                "('q', 'k', 'q_pe' at most once, or '', which is anything else) and 1 row or more, repeats 1 or more, "
                "dim 0 or 1"
            )

    def num(self, *roles: _Role) -> int:
        """Count the rows that have one of the given roles, such as "q" (queries), or all rows if no role is given."""
        return self.repeats * sum(size for role, size in self.parts if role in roles or not roles)

    def factors(self, of_heads: Mapping[_Role, Tensor]) -> Tensor:  # 1-D, one factor per row of the weight
        """Expand the scaling factors of heads to one factor per row of the weight.

        Args:
            of_heads: Dict from role to a tensor with the factors of all heads, in order. All heads of a role have the
                same number of rows.
        """
        parts = [(of_heads[role], self.repeats * size) for role, size in self.parts]
        columns = [heads.repeat_interleave(num // len(heads)).view(self.repeats, -1) for heads, num in parts]
        return torch.cat(columns, dim=1).flatten()


@dataclass(frozen=True, slots=True)
class Attention:
    """One attention layer.

    Attributes:
        name: Name of the layer's module. Measured logits are assigned to the layer by this name.
        num_heads: Number of query heads.
        num_groups: Number of key heads; equal to `num_heads` unless several query heads share a key head.
        rows: The parameters that produce queries and keys, including biases.
        normed: Names of modules that normalize queries or keys after their projection; "" if there are none. A layer
            with such modules cannot be clipped, because the normalization would undo any scaling of the weights.

    Raises:
        ValueError: The numbers of heads and rows do not fit together, no rows produce queries, or no rows produce keys.
    """

    name: str
    num_heads: int
    num_groups: int
    rows: tuple[Rows, ...]
    normed: str = ""

    def __post_init__(self) -> None:
        heads: dict[_Role, int] = {"q": self.num_heads, "q_pe": self.num_heads, "k": self.num_groups}
        found = {rows.weight: {role: rows.num(role) for role in heads if rows.num(role)} for rows in self.rows}
        is_even = min(heads.values()) > 0 and self.num_heads % self.num_groups == 0
        each = [(role, num) for of_weight in found.values() for role, num in of_weight.items()]
        if not is_even or any(num % heads[role] for role, num in each) or not {"q", "k"} <= {role for role, _ in each}:
            raise ValueError(
                f"{self.name}: {self.num_heads} heads, {self.num_groups} key heads and rows {found} do not fit. Name "
                "the parameters of queries and of keys; key heads must divide heads, heads each weight's rows of 'q' "
                "and 'q_pe', key heads those of 'k'"
            )

    @classmethod
    def all_in(cls, model: nn.Module) -> tuple[Attention, ...]:
        """Find the attention layers of a model, in the order of its modules. The result can be edited and passed to
        `QKClip(layers=)`.

        Args:
            model: The model. It can be wrapped or sharded.

        Raises:
            ValueError: A layer's sizes do not fit its weights, its logits cannot be measured, or the name of a weight
                suggests that queries and keys are fused in an unknown form.
        """
        return tuple(layer for layer in map(_layer_in, Holder.all_in(model).values()) if layer is not None)


# ------------------------------------------------------------------------------------------------------ finding them

_DEEPSEEK = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_MEGATRON = ("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
# Supported pairs of projections. Each entry gives the names of the modules that project queries and keys. For latent
# attention, it also gives the names of the attributes that hold the sizes of a head's non-rotary part, rotary part and
# value.
_PAIRS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("q_b_proj", "kv_b_proj", _DEEPSEEK),
    ("q_proj", "kv_b_proj", _DEEPSEEK),
    ("linear_q_up_proj", "linear_kv_up_proj", _MEGATRON),
    ("linear_q_proj", "linear_kv_up_proj", _MEGATRON),
    ("q_proj", "k_proj", ()),
    ("wq", "wk", ()),
    ("to_q", "to_k", ()),
    ("query", "key", ()),
    ("q_lin", "k_lin", ()),
    ("query_proj", "key_proj", ()),
    ("linear_q", "linear_k", ()),
)
_NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_norm", "key_norm", "norm_q", "norm_k", "qk_norm")
_SIZES = ("head_dim", "attention_head_size", "hidden_size_per_attention_head", "kv_channels", "head_size")
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")
_LIST_THEM = "List all attention layers: layers=[Attention(name, num_heads, num_groups, (Rows(weight, parts), ..)), ..]"


class Holder(NamedTuple):
    """A module and its parameters, including those of submodules.

    Attributes:
        name: Name of the module in the model, without the parts that wrappers add.
        module: The module itself, without wrappers.
        weights: Dict from the name of each parameter relative to the module to a pair (parameter, its `Place` in the
            model).
    """

    name: str
    module: nn.Module
    weights: dict[str, tuple[Tensor, Place]]

    def shape(self, below: str) -> Ints:
        """Return the global shape of a parameter, or (0,) if it is unknown, as it is for tensor-parallel shards that
        are plain tensors. `below` is the parameter's name relative to the module."""
        param, place = self.weights[below]
        shape, role = Placed(param, (place,)).shape_and_role({})
        return (0,) if role.kind == "unknown" else shape

    def number(self, *names: str) -> int:
        """Return the first positive integer among the attributes `names` of the module and of its config, or 0 if there
        is none."""
        owners = (self.module, getattr(self.module, "config", None))
        values = (getattr(owner, name, None) for name in names for owner in owners)
        return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0), 0)

    @classmethod
    def all_in(cls, model: nn.Module) -> dict[str, Holder]:
        """Return a dict from module name to `Holder`. It contains every module that has parameters, directly or in its
        submodules."""
        found: dict[str, Holder] = {}
        for placed in Placed.all_in(model):
            for place in placed.places:
                for below, module in place.owners:
                    name = place.name.removesuffix(below).rstrip(".")
                    found.setdefault(name, cls(name, module, {})).weights.setdefault(below, (placed.param, place))
        return found


def _layer_in(holder: Holder) -> Attention | None:
    """Describe the attention layer that a module implements, based on the parameters that produce its queries and keys.
    Return None if the module has no such parameters.

    Raises:
        ValueError: Logits of this type of module cannot be measured, the numbers of rows and heads are unknown or
            inconsistent, or the name of a weight suggests that queries and keys are fused in an unknown form.
    """
    number = holder.number
    if isinstance(holder.module, nn.MultiheadAttention):
        raise ValueError(
            f"{holder.name}: torch's MultiheadAttention makes queries and keys inside of one function, where no logit "
            "is seen. Make them by projections of your own, or leave the layer out with layers="
        )
    for query, key, sizes in _PAIRS:
        q, k = f"{query}.weight", f"{key}.weight"
        if {q, k} <= holder.weights.keys():
            if not sizes:
                return _layer(holder, {q: (("q", holder.shape(q)[0]),), k: (("k", holder.shape(k)[0]),)})
            nope, rope, value = map(number, sizes)
            parts: dict[str, _Parts] = {q: (("q", nope), ("q_pe", rope)), k: (("k", nope), ("", value))}
            return _layer(holder, parts, number(*_HEADS), size=nope)
    # Megatron stores the rows by group of heads: first the rows of q, k and v of the first group, then those of the
    # second, and so on.
    if "linear_qkv.weight" in holder.weights and number("kv_channels"):
        size, heads = number("kv_channels"), number("num_attention_heads")
        groups = number("num_query_groups") or heads or 1
        return _layer(holder, {"linear_qkv.weight": (("q", heads // groups * size), ("k", size), ("", size))}, groups)
    for below, (_, place) in holder.weights.items():
        is_of_child = below.count(".") == 1 and below.endswith(".weight")
        preset = Role.of_known_type(place.owners, holder.shape(below)) if is_of_child else None
        if preset is not None and preset.reason.startswith("fused q, k, v"):
            sizes = preset.view["split_sizes"]
            # A fused weight with 2 parts (k, v) belongs to cross-attention. Layers whose fused weight has 4 parts (q,
            # k, v, z) compute no softmax attention.
            if len(sizes) == 3:
                groups, dim = preset.view.get("split_groups", 1), int(preset.view.get("transposed", False))
                return _layer(holder, {below: tuple(zip(("q", "k", ""), sizes, strict=True))}, groups, dim)
        if is_of_child and preset is None and "q" in (place.fused_parts or ()):
            raise ValueError(
                f"{place.name}: by its name it holds queries and keys, but of a type that is not known, so which "
                f'rows are whose is not. {_LIST_THEM}, with parts such as (("q", rows), ("k", rows), ("", rows))'
            )
    return None


def _layer(
    holder: Holder, of_weights: Mapping[str, _Parts], repeats: int = 1, dim: int = 0, size: int = 0
) -> Attention:
    """Make the `Attention` that describes a module's attention layer.

    Args:
        of_weights: Blocks of rows (as in `Rows.parts`) of each weight that produces queries or keys. The keys of the
            dict are parameter names relative to the module. A block of unknown size has size 0.
        repeats, dim: Attributes of `Rows`, equal for all these weights.
        size: Number of rows with role "q" per head; 0 if the number must be derived from the module's attributes.

    Raises:
        ValueError: A size is unknown, or sizes do not fit together.
    """
    sizes = {role: num for parts in of_weights.values() for role, num in parts}
    num_q, num_k, heads = repeats * sizes["q"], repeats * sizes["k"], holder.number(*_HEADS)
    size = size or holder.number(*_SIZES) or (num_q // heads if heads else 0)
    if not (size and num_q and all(sizes.values())) or num_q % size or num_k % size:
        raise ValueError(
            f"{holder.name}: {' and '.join(of_weights)} make queries and keys, but of how many rows, or of what size a "
            f"head is it does not say (any of {', '.join((*_SIZES, *_HEADS))}), or heads do not divide them: found "
            f"{num_q} and {num_k} rows and {size} a head. {_LIST_THEM}"
        )
    rows = [
        Rows(holder.weights[below][1].name, parts, repeats, along)
        for leaf, parts in of_weights.items()
        for below, along in ((leaf, dim), (f"{leaf.removesuffix('.weight')}.bias", 0))
        if below in holder.weights
    ]
    norms = [leaf for leaf in _NORMS if isinstance(getattr(holder.module, leaf, None), nn.Module)]
    normed = [leaf for leaf in norms if "Identity" not in type(getattr(holder.module, leaf)).__name__]
    return Attention(holder.name, num_q // size, num_k // size, tuple(rows), ", ".join(normed))
