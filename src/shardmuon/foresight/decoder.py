"""A decoder of any published size as modules on the meta device, so that the real routing runs on it.

Parameters have the names and shapes of Hugging Face's (experts as stacks, as torchtitan keeps them). There is no
forward. Types that shardmuon.routing knows by name bear that name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes of a decoder, in the words of Hugging Face's configurations.

    Attributes:
        vocab_size, hidden_size, num_hidden_layers: Sizes of the model.
        num_attention_heads, num_key_value_heads, head_dim: Of grouped-query attention.
        intermediate_size: Width of dense feed-forward layers.
        tie_word_embeddings: Whether the head is the embedding.
        attention_bias: Biases of q, k, v; "all": of o, too.
        qk_norm: Norms of each head's q and k; "all": of all heads together.
        mlp: "gated": gate, up and down. "plain": two layers with biases, and LayerNorm with biases (GPT-2, whose linear
            layers are stored transposed and whose positions are learned).
        num_experts, num_experts_per_tok, moe_intermediate_size: 0 experts: none.
        num_shared_experts: Always active ones, in one dense layer.
        shared_intermediate_size: Of that layer; 0: of so many experts.
        first_k_dense: Layers before those with experts.
        sparse_step: Of the layers after them every so many-th has experts, counted from the model's first.
        dense_layers: Others that have none.
        router_bias: An entry for each expert beside the router's weights.
        expert_bias: Biases in experts, and gate and up in one stack, inputs first (gpt-oss).
        attention_sinks: An entry for each head (gpt-oss).
        kv_lora_rank, q_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim: Of latent attention (DeepSeek); 0:
            grouped-query attention, and no compressed q.
        max_position_embeddings: Only where positions are learned.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = 0
    head_dim: int = 0
    intermediate_size: int = 0
    tie_word_embeddings: bool = False
    attention_bias: bool | Literal["all"] = False
    qk_norm: bool | Literal["all"] = False
    mlp: Literal["gated", "plain"] = "gated"
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    num_shared_experts: int = 0
    shared_intermediate_size: int = 0
    first_k_dense: int = 0
    sparse_step: int = 1
    dense_layers: tuple[int, ...] = ()
    router_bias: bool = False
    expert_bias: bool = False
    attention_sinks: bool = False
    kv_lora_rank: int = 0
    q_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    max_position_embeddings: int = 0

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head(self) -> int:
        """Width of a head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads


class GroupedQueryAttention(nn.Module):
    """Grouped-query attention."""

    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        bias, q, kv = bool(c.attention_bias), c.num_attention_heads * c.head, c.kv_heads * c.head
        self.q_proj = nn.Linear(c.hidden_size, q, bias=bias)
        self.k_proj = nn.Linear(c.hidden_size, kv, bias=bias)
        self.v_proj = nn.Linear(c.hidden_size, kv, bias=bias)
        self.o_proj = nn.Linear(q, c.hidden_size, bias=c.attention_bias == "all")
        if c.qk_norm:
            self.q_norm, self.k_norm = (nn.RMSNorm(n if c.qk_norm == "all" else c.head) for n in (q, kv))
        if c.attention_sinks:
            self.sinks = nn.Parameter(torch.empty(c.num_attention_heads))


class DeepseekV3Attention(nn.Module):
    """Latent attention, with the sizes by which routing splits its fused weights."""

    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        self.num_heads, self.kv_lora_rank = c.num_attention_heads, c.kv_lora_rank
        self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim = (
            c.qk_nope_head_dim,
            c.qk_rope_head_dim,
            c.v_head_dim,
        )
        q = c.num_attention_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim)
        if c.q_lora_rank:
            self.q_a_proj = nn.Linear(c.hidden_size, c.q_lora_rank, bias=False)
            self.q_a_layernorm = nn.RMSNorm(c.q_lora_rank)
            self.q_b_proj = nn.Linear(c.q_lora_rank, q, bias=False)
        else:
            self.q_proj = nn.Linear(c.hidden_size, q, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(c.hidden_size, c.kv_lora_rank + c.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(c.kv_lora_rank)
        heads = c.num_attention_heads
        self.kv_b_proj = nn.Linear(c.kv_lora_rank, heads * (c.qk_nope_head_dim + c.v_head_dim), bias=False)
        self.o_proj = nn.Linear(heads * c.v_head_dim, c.hidden_size, bias=False)


class GatedMlp(nn.Module):
    """A gated feed-forward block: gate, up, down."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)


class GroupedExperts(nn.Module):
    """Experts as three stacks, outputs first: gate, down, up, by torchtitan's names."""

    def __init__(self, num: int, width: int, inner: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(num, inner, width))
        self.w2 = nn.Parameter(torch.empty(num, width, inner))
        self.w3 = nn.Parameter(torch.empty(num, inner, width))


class GptOssExperts(nn.Module):
    """gpt-oss's: gate and up by turns in the columns of one stack, inputs first, with biases."""

    def __init__(self, num: int, width: int, inner: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(num, width, 2 * inner))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(num, 2 * inner))
        self.down_proj = nn.Parameter(torch.empty(num, inner, width))
        self.down_proj_bias = nn.Parameter(torch.empty(num, width))


class MoeTopKRouter(nn.Module):
    """Rows that choose experts."""

    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(c.num_experts, c.hidden_size))
        if c.router_bias:
            self.bias = nn.Parameter(torch.empty(c.num_experts))


class MoeMlp(nn.Module):
    """A mixture of experts: router, experts, shared experts."""

    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        kind = GptOssExperts if c.expert_bias else GroupedExperts
        self.router = MoeTopKRouter(c)
        self.experts = kind(c.num_experts, c.hidden_size, c.moe_intermediate_size)
        shared = c.shared_intermediate_size or c.num_shared_experts * c.moe_intermediate_size
        if shared:
            self.shared_experts = GatedMlp(c.hidden_size, shared)


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, c: DecoderConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(c.hidden_size)
        self.self_attn = DeepseekV3Attention(c) if c.kv_lora_rank else GroupedQueryAttention(c)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden_size)
        sparse = c.num_experts and index >= c.first_k_dense and index not in c.dense_layers
        sparse = sparse and (index + 1) % c.sparse_step == 0
        self.mlp = MoeMlp(c) if sparse else GatedMlp(c.hidden_size, c.intermediate_size)


class Conv1D(nn.Module):
    """GPT-2's linear layer, inputs first."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.empty(nx, nf))
        self.bias = nn.Parameter(torch.empty(nf))


class GPT2Attention(nn.Module):
    """q, k and v fused in columns."""

    is_cross_attention = False

    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        self.split_size = c.hidden_size
        self.c_attn = Conv1D(3 * c.hidden_size, c.hidden_size)
        self.c_proj = Conv1D(c.hidden_size, c.hidden_size)


class PlainMlp(nn.Module):
    """GPT-2's feed-forward block."""

    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        inner = c.intermediate_size or 4 * c.hidden_size
        self.c_fc, self.c_proj = Conv1D(inner, c.hidden_size), Conv1D(c.hidden_size, inner)


class PlainLayer(nn.Module):
    """GPT-2's layer."""

    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(c.hidden_size), GPT2Attention(c)
        self.ln_2, self.mlp = nn.LayerNorm(c.hidden_size), PlainMlp(c)


class _Body(nn.Module):
    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        plain = c.mlp == "plain"
        if plain:
            self.embed_positions = nn.Embedding(c.max_position_embeddings, c.hidden_size)
        self.layers = nn.ModuleList(PlainLayer(c) if plain else Layer(c, i) for i in range(c.num_hidden_layers))
        self.norm = nn.LayerNorm(c.hidden_size) if plain else nn.RMSNorm(c.hidden_size)


class Decoder(nn.Module):
    """A decoder: embedding, layers, norm, head."""

    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        self.config = c
        self.model = _Body(c)
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        if c.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight


class _Unwritten(TorchFunctionMode):
    """Leaves parameters as they are: what is drawn for tensors without data is lost, and takes imports of 2 s."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("normal_", "uniform_", "fill_", "zero_"):
            return args[0] if args else next(iter(kwargs.values()))
        return func(*args, **(kwargs or {}))


def build(config: DecoderConfig) -> Decoder:
    """The model on the meta device."""
    with torch.device("meta"), _Unwritten():
        return Decoder(config)


# What Hugging Face's configurations call these fields. An alias comes before the field itself, as Llama 4 has both
# `intermediate_size`, which is that of its experts, and `intermediate_size_mlp`.
_ALIASES = {
    **dict.fromkeys(("n_embd", "d_model"), "hidden_size"),
    **dict.fromkeys(("n_layer", "n_layers"), "num_hidden_layers"),
    **dict.fromkeys(("n_head", "n_heads"), "num_attention_heads"),
    "kv_n_heads": "num_key_value_heads",
    "n_positions": "max_position_embeddings",
    **dict.fromkeys(("n_inner", "ffn_hidden_size", "intermediate_size_mlp"), "intermediate_size"),
    **dict.fromkeys(("num_local_experts", "n_routed_experts", "moe_num_experts"), "num_experts"),
    **dict.fromkeys(("n_shared_experts", "num_shared_expert", "moe_num_shared_experts"), "num_shared_experts"),
    "shared_expert_intermediate_size": "shared_intermediate_size",
    **dict.fromkeys(("first_k_dense_replace", "moe_layer_start_index"), "first_k_dense"),
    **dict.fromkeys(
        ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval", "moe_layer_freq"), "sparse_step"
    ),
    "mlp_only_layers": "dense_layers",
    "use_qk_norm": "qk_norm",
    "use_bias": "attention_bias",
}
_INNER = ("text_config", "attn_config", "ffn_config")
MODEL_TYPES: dict[str, dict[str, Any]] = {  # model_type -> what its configuration does not say
    "llama": {},
    "mistral": {},
    "qwen2": {"attention_bias": True},
    "qwen3": {"qk_norm": True},
    "qwen2_moe": {"attention_bias": True},
    "qwen3_moe": {"qk_norm": True},
    "mixtral": {},
    "deepseek_v2": {},
    "deepseek_v3": {"router_bias": True},
    "kimi_k2": {"router_bias": True},
    "dbrx": {},
    "dots1": {"qk_norm": True},
    "ernie4_5_moe": {},
    "glm4_moe": {"attention_bias": True},
    "gpt_oss": {"attention_bias": "all", "attention_sinks": True, "router_bias": True, "expert_bias": True},
    "granitemoe": {},
    "granitemoeshared": {},
    "hunyuan_v1_moe": {},
    "llama4": {"num_shared_experts": 1},  # its text model
    "minimax_m2": {"qk_norm": "all"},
    "olmoe": {"qk_norm": "all"},
    "phimoe": {"attention_bias": "all"},
    "gpt2": {"mlp": "plain", "tie_word_embeddings": True},
}


def flattened(given: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration together with the entries of configurations inside it."""
    inner = (given.get(key) for key in _INNER)
    return dict(given) | {key: value for one in inner if isinstance(one, Mapping) for key, value in one.items()}


def config_from_hf(given: Mapping[str, Any], where: str) -> DecoderConfig:
    """The sizes of a Hugging Face configuration of a known `model_type`.

    Args:
        given: The contents of config.json.
        where: For messages.

    Raises:
        ValueError: The type is unknown, or a size is missing or differs from layer to layer.
    """
    kind = given.get("model_type")
    if kind not in MODEL_TYPES:
        raise ValueError(
            f"{where}: model_type {kind!r} is not one that is known without transformers ({', '.join(MODEL_TYPES)}). "
            "Install it (pip install transformers), or give MODULE:FUNCTION that builds the model"
        )
    said = {key: value for key, value in flattened(given).items() if value is not None}
    known = {f.name for f in fields(DecoderConfig)}
    found = {key: value for key, value in said.items() if key in known}
    found |= {_ALIASES[key]: value for key, value in said.items() if key in _ALIASES}
    found["dense_layers"] = tuple(found.get("dense_layers", ()))
    found.setdefault("moe_intermediate_size", said.get("intermediate_size", found.get("intermediate_size", 0)))
    for key, value in found.items():
        if isinstance(value, list):  # a value for each layer
            if len(set(value)) != 1:
                raise ValueError(
                    f"{where}: {key}={value} differs from layer to layer. Install transformers to plan that"
                )
            found[key] = value[0]
    if found.get("attention_bias"):
        found["attention_bias"] = "all"
    found |= MODEL_TYPES[kind]
    needed = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    missing = [key for key in needed if key not in found]
    if missing:
        raise ValueError(
            f"{where}: {', '.join(missing)} is missing, so the shapes are unknown. Write it into config.json"
        )
    return DecoderConfig(**found)
