"""Find the attention layers of a model by what their modules hold and say of themselves. Imports no framework.

What is known:
    separate      q_proj and k_proj (Llama, Qwen, Mistral, ..), wq and wk, to_q and to_k (diffusers), query and key
                  (BERT, ViT), with the head's size as an attribute
    fused         torch's MultiheadAttention, Megatron's linear_qkv, and the types of routing/presets.py that fuse q, k
                  and v (GPT-2, GPT-NeoX, Phi-3, timm)
    latent        DeepSeek's kv_b_proj with q_b_proj or q_proj, Megatron's linear_kv_up_proj with linear_q_up_proj or
                  linear_q_proj: of the queries the rotary part is scaled by g, the rotary keys not at all
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shardmuon.attention.heads import Attention, Role, Rows
from shardmuon.layout.views import Ints
from shardmuon.routing.presets import find_preset, fused_parts
from shardmuon.routing.roles import find_places, logical_shape

__all__ = ["Found", "attention_layers", "find_layers"]

_SEPARATE = (
    ("q_proj", "k_proj"),
    ("wq", "wk"),
    ("to_q", "to_k"),
    ("query", "key"),
    ("q_lin", "k_lin"),
    ("query_proj", "key_proj"),
    ("linear_q", "linear_k"),
)
_LATENT = (
    (("q_b_proj", "q_proj"), "kv_b_proj", ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")),
    (("linear_q_up_proj", "linear_q_proj"), "linear_kv_up_proj", ("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")),
)
_NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_norm", "key_norm", "norm_q", "norm_k", "qk_norm")
_SIZES = ("head_dim", "attention_head_size", "hidden_size_per_attention_head", "kv_channels", "head_size")
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")


@dataclass(frozen=True, slots=True)
class Found:
    """A layer and its module.

    Attributes:
        layer: What is scaled.
        module: Whose forward makes the logits.
        params: Parameter name -> the parameter, and what the module calls it.
    """

    layer: Attention
    module: nn.Module
    params: Mapping[str, tuple[Tensor, str]]


@dataclass(frozen=True, slots=True)
class _Weight:
    """A parameter below a module."""

    name: str
    below: str
    param: Tensor
    owners: tuple[tuple[str, nn.Module], ...]

    @property
    def shape(self) -> Ints:
        """The global one; () where nothing here tells it (plain tensor-parallel shards)."""
        shape, unknown = logical_shape(self.param, self.owners[0][1])
        return () if unknown else shape

    @property
    def looks_fused(self) -> bool:
        """Whether its name says that it holds queries and keys, and no table says which rows are whose."""
        hint = self.below == "weight" and "q" in (fused_parts(self.name) or ())
        return hint and len(self.shape) == 2 and find_preset(self.owners, self.shape) is None


def attention_layers(model: nn.Module) -> tuple[Attention, ...]:
    """The attention layers of a model, in its order, to be changed or given to `QKClip(layers=)` as they are.

    Args:
        model: Also wrapped or sharded.

    Raises:
        ValueError: A layer's sizes do not fit its weights, or a weight looks like fused queries and keys of a type that
            is not known.
    """
    return tuple(found.layer for found in find_layers(model))


def find_layers(model: nn.Module) -> list[Found]:
    """See `attention_layers`."""
    modules: dict[int, tuple[nn.Module, str, dict[str, _Weight]]] = {}
    for param, places in find_places(model):
        for place in places:
            for below, module in place.owners:
                if below.count(".") > 1:  # deeper than a layer of the module
                    break
                prefix = place.name[: len(place.name) - len(below)].rstrip(".")
                entry = modules.setdefault(id(module), (module, prefix, {}))
                entry[2].setdefault(below, _Weight(place.name, below, param, place.owners))
    found = []
    for module, name, weights in modules.values():
        layer = _read(module, name, weights)
        if layer is not None:
            used = {rows.weight for rows in layer.rows}
            params = {w.name: (w.param, w.below) for w in weights.values() if w.name in used}
            found.append(Found(layer, module, params))
    taken = {name for one in found for name in one.params}
    inside = {id(m) for one in found for m in one.module.modules()}
    for module, _, weights in modules.values():
        for w in weights.values() if id(module) not in inside else ():
            if w.name not in taken and w.looks_fused:
                raise ValueError(
                    f"{w.name}: by its name it holds queries and keys, but of a type that is not known, so which rows "
                    "are whose is not. List all attention layers: QKClip(model, layers=[Attention(name, num_heads, "
                    'num_groups, (Rows(weight, (("q", rows), ("k", rows), ("", rows))),)), ..]), both from '
                    "shardmuon.attention.heads"
                )
    return found


def _read(module: nn.Module, name: str, weights: Mapping[str, _Weight]) -> Attention | None:
    """What a module is as an attention layer."""
    if isinstance(module, nn.MultiheadAttention):
        return _torch(module, name, weights)
    return _latent(module, name, weights) or _separate(module, name, weights) or _fused(module, name, weights)


def _torch(module: nn.MultiheadAttention, name: str, weights: Mapping[str, _Weight]) -> Attention:
    size, heads = module.embed_dim, module.num_heads
    if module.bias_k is not None:
        raise ValueError(
            f"{name}: add_bias_kv=True adds a key that no projection makes, so scaling weights does not bound its "
            "logits. Make it with add_bias_kv=False, or leave the layer out with layers="
        )
    rows = []
    for below, parts in (
        ("in_proj_weight", ("q", "k", "")),
        ("in_proj_bias", ("q", "k", "")),
        ("q_proj_weight", ("q",)),
        ("k_proj_weight", ("k",)),
    ):
        if below in weights:
            rows.append(Rows(weights[below].name, tuple((role, size) for role in parts)))  # type: ignore[misc]
    return Attention(name, heads, heads, tuple(rows))


def _separate(module: nn.Module, name: str, weights: Mapping[str, _Weight]) -> Attention | None:
    for query, key in _SEPARATE:
        pair = [weights.get(f"{leaf}.weight") for leaf in (query, key)]
        if any(w is None or (w.shape and len(w.shape) != 2) for w in pair):
            continue
        if any(w is not None and not w.shape for w in pair):
            raise ValueError(
                f"{name}: {query} and {key} are plain tensor-parallel shards, whose global number of rows is not known "
                "here. List all attention layers with theirs: layers=[Attention(..)]"
            )
        q_rows, k_rows = (w.shape[0] for w in pair if w is not None)
        head = _head_size(module, q_rows)
        if head is None:
            raise ValueError(
                f"{name}: its weights {query} and {key} make queries and keys, but of what size a head is it does not "
                f"say (any of {', '.join((*_SIZES, *_HEADS))}). List all attention layers in layers="
            )
        if q_rows % head or k_rows % head:
            raise ValueError(f"{name}: heads of {head} rows do not divide {query}'s {q_rows} and {key}'s {k_rows} rows")
        rows = []
        for leaf, role, size in ((query, "q", q_rows), (key, "k", k_rows)):
            for kind in ("weight", "bias"):
                if f"{leaf}.{kind}" in weights:
                    rows.append(Rows(weights[f"{leaf}.{kind}"].name, ((role, size),)))  # type: ignore[arg-type]
        return Attention(name, q_rows // head, k_rows // head, tuple(rows), _norms(module))
    return None


def _latent(module: nn.Module, name: str, weights: Mapping[str, _Weight]) -> Attention | None:
    for queries, latent, sizes in _LATENT:
        query = next((leaf for leaf in queries if f"{leaf}.weight" in weights), None)
        if query is None or f"{latent}.weight" not in weights:
            continue
        numbers = [_number(module, size) for size in sizes]
        heads = next((n for n in (_number(module, what) for what in _HEADS) if n), None)
        if heads is None or None in numbers:
            raise ValueError(
                f"{name}: {latent} makes keys and values of latent attention, but the module lacks one of "
                f"{', '.join(sizes)} and its number of heads. List all attention layers in layers="
            )
        nope, rope, value = (int(n or 0) for n in numbers)
        of_query: tuple[tuple[Role, int], ...] = (("q", nope), ("q_pe", rope))
        of_key: tuple[tuple[Role, int], ...] = (("k", nope), ("", value))
        rows = []
        for leaf, parts in ((query, of_query), (latent, of_key)):
            for kind in ("weight", "bias"):
                if f"{leaf}.{kind}" in weights:
                    rows.append(Rows(weights[f"{leaf}.{kind}"].name, parts, repeats=heads))
        return Attention(name, heads, heads, tuple(rows), _norms(module))
    return None


def _fused(module: nn.Module, name: str, weights: Mapping[str, _Weight]) -> Attention | None:
    for leaf, w in ((below.removesuffix(".weight"), w) for below, w in weights.items() if below.count(".") == 1):
        if not w.below.endswith(".weight") or (w.shape and len(w.shape) != 2):
            continue
        parts, repeats, dim = _fused_parts(module, leaf, w)
        if not parts:
            continue
        rows = Rows(w.name, parts, repeats, dim)
        head = _head_size(module, rows.num("q"))
        if head is None:
            raise ValueError(f"{name}: of what size a head of {w.name} is it does not say. List all layers in layers=")
        if rows.num("q") % head or rows.num("k") % head:
            raise ValueError(f"{name}: heads of {head} rows do not divide {w.name}'s {rows.num('q')} rows of queries")
        listed = [rows]
        if f"{leaf}.bias" in weights:
            listed.append(Rows(weights[f"{leaf}.bias"].name, parts, repeats))
        return Attention(name, rows.num("q") // head, rows.num("k") // head, tuple(listed), _norms(module))
    return None


def _fused_parts(module: nn.Module, leaf: str, w: _Weight) -> tuple[tuple[tuple[Role, int], ...], int, int]:
    """Parts, repeats and dim of a weight that holds q, k and v; no parts if it is no such weight."""
    if leaf == "linear_qkv":  # Megatron: of each group its queries, its key, its value; the number of rows is a shard's
        heads, groups, size = (
            _number(module, what) for what in ("num_attention_heads", "num_query_groups", "kv_channels")
        )
        if heads and size:
            groups = groups or heads
            return (("q", heads // groups * size), ("k", size), ("", size)), groups, 0
        return (), 1, 0
    preset = find_preset(w.owners, w.shape) if w.shape else None
    if preset is None or not preset.is_split or not preset.reason.startswith("fused q, k, v"):
        return (), 1, 0
    sizes = preset.view["split_sizes"]
    if len(sizes) != 3:  # q, k, v, z of something else; k, v of cross-attention
        return (), 1, 0
    parts: tuple[tuple[Role, int], ...] = (("q", sizes[0]), ("k", sizes[1]), ("", sizes[2]))
    return parts, preset.view.get("split_groups", 1), preset.view.get("split_dim", 0)


def _norms(module: nn.Module) -> str:
    """What normalizes queries or keys."""
    found = [leaf for leaf in _NORMS if isinstance(getattr(module, leaf, None), nn.Module)]
    return ", ".join(leaf for leaf in found if "Identity" not in type(getattr(module, leaf)).__name__)


def _head_size(module: nn.Module, rows: int) -> int | None:
    """Rows of a head, by the module's own size or, where it has none, by its number of heads."""
    for what in _SIZES:
        size = _number(module, what)
        if size:
            return size
    for what in _HEADS:
        heads = _number(module, what)
        if heads and rows % heads == 0:
            return rows // heads
    return None


def _number(module: Any, what: str) -> int | None:
    """A positive number that the module or its config has by this name."""
    for holder in (module, getattr(module, "config", None)):
        value = getattr(holder, what, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None
