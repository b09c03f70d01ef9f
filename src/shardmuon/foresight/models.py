"""Build models whose parameters have shapes but no values, from a preset, a Hugging Face configuration, a function or
the user's module.

[Note: active parameters]
    Training (forward and backward pass) takes 6 FLOPs per token and active parameter element. Two kinds of parameters
    are not active for a token: embedding tables, because they need no matrix product, and experts to which the token is
    not routed. For models with experts, the number of active parameter elements comes from the preset or from the user.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import pkgutil
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from shardmuon.layout.views import Ints
from shardmuon.routing.roles import Placed
from shardmuon.texts import did_you_mean

# ---------------------------------------------------------------------------------------------- which model is meant


def load_model(model: str | nn.Module, meta: bool = True) -> tuple[str, str, nn.Module, int]:
    """Load a model from a preset, a Hugging Face configuration, a function or a module.

    Args:
        model: Name of a preset, path to a Hugging Face config.json or its folder, MODULE:FUNCTION, or a module
            (preferably on the meta device).
        meta: True to call FUNCTION under the meta device. Presets and configurations are always built on the meta
            device.

    Returns:
        A tuple of four items: the model's name; where its shapes come from (a URL, a file or a function); the module;
        and the number of parameter elements used per token (see [Note: active parameters]). This number is 0 (unknown)
        if the model has experts and is not a preset.

    Raises:
        ValueError: `model` is none of the above, or its shapes cannot be determined.
    """
    if isinstance(model, nn.Module):
        return type(model).__name__, "the module given", model, _active_of(model)
    known = _presets()
    if model in known:
        data = known[model]
        made = build(data["config"])
        return data["title"], data["source"], made, data.get("active_parameters") or _active_of(made)
    if _is_config(model) or ":" in model:
        made = _from_config(model) if _is_config(model) else _from_function(model, meta)
        return model, model, made, _active_of(made)
    raise ValueError(
        f"{model!r} is no model that is known. Write one of {', '.join(known)}{did_you_mean(model, list(known))}"
        "; the path of a Hugging Face config.json, or of its folder; or MODULE:FUNCTION that builds the model"
    )


def _presets() -> dict[str, dict[str, Any]]:
    """Load the data of all presets, as a dict from preset name to data. The keys of a preset's data are title, source,
    published_parameters, active_parameters (only for models with experts), published_at, and config (the sizes that
    `build` takes)."""
    folder = Path(__file__).parent / "data" / "models"
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def _active_of(module: nn.Module) -> int:
    """Count the parameter elements that each token uses (see [Note: active parameters]). Return 0 for a model with
    experts, because the number of experts per token is unknown."""
    held = [one for one in Placed.all_in(module) if not all(place.is_table for place in one.places)]
    named = r"(^|\.)(routed_|local_|moe_)?experts(\.|$)"
    # A 3-D parameter is assumed to be a stack of experts.
    has_experts = any(one.param.ndim == 3 or re.search(named, one.name) for one in held)
    return 0 if has_experts else sum(one.param.numel() for one in held)


def _is_config(text: str) -> bool:
    """Return True if `text` is the path of a .json file or of a folder that contains a config.json."""
    return text.endswith(".json") or (Path(text) / "config.json").is_file()


def _from_config(text: str) -> nn.Module:
    """Build a model on the meta device from a Hugging Face config, using transformers."""
    if not Path(text).exists():
        raise FileNotFoundError(f"{text}: there is no such file")
    try:
        given: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise ImportError(f"{text}: it takes transformers ({error}): pip install transformers") from None
    config = given.AutoConfig.from_pretrained(text)
    names = getattr(config, "architectures", None) or ()
    kind = getattr(given, names[0], None) if names else None
    with torch.device("meta"):
        model = given.AutoModelForCausalLM.from_config(config) if kind is None else kind(config)
    # Tie weights explicitly, because transformers does not tie them on the meta device.
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    assert isinstance(model, nn.Module)
    return model


def _from_function(text: str, meta: bool) -> nn.Module:
    """Import MODULE:NAME or FILE.py:NAME and return the model. NAME is either the model or a function that returns the
    model. If `meta` is True, the function runs under the meta device."""
    module_name, _, name = text.partition(":")
    if not name:
        raise ValueError(f"{text!r} is no MODULE:FUNCTION and no config.json. Write e.g. my_project.models:build")
    path = Path(module_name)
    is_file = path.suffix == ".py"
    folder = str(path.parent.resolve() if is_file else Path.cwd())
    # Search for modules in the folder of FILE.py or in the current folder, as `python FILE.py` and `python -m` do.
    sys.path.insert(0, folder)
    try:
        found: Any = pkgutil.resolve_name(f"{path.stem if is_file else module_name}:{name}")
    finally:
        sys.path.remove(folder)
    with torch.device("meta") if meta else contextlib.nullcontext():
        model = found if isinstance(found, nn.Module) else found()
    if not isinstance(model, nn.Module):
        raise TypeError(f"{text} returned {type(model).__name__}, not a torch.nn.Module")
    return model


# ------------------------------------------------------------------------------------------------ modules from shapes

_Make = Callable[[Ints], nn.Module]  # takes the shape of a module's first parameter and creates the module


@cache
def _type(name: str) -> type[nn.Module]:
    """Create a module class with the given name. For some modules, the class name determines how Muon treats
    the parameters."""
    return type(name, (nn.Module,), {})


def _bare(kind: type[nn.Module], **numbers: Any) -> nn.Module:
    """Create a module of class `kind` without parameters, and set the attributes in `numbers`, which are read when
    parameters are routed to Muon or AdamW. The `__init__` of the class is not called, because it would create and
    initialize parameters."""
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    made.__dict__.update(numbers)
    return made


def _modules_of(shapes: Mapping[str, Ints], kinds: Mapping[str, _Make]) -> nn.Module:
    """Build a tree of modules on the meta device from the names and shapes of their parameters. The modules have no
    `forward` method.

    Args:
        shapes: Dict from parameter name to shape, in the model's order.
        kinds: Dict from module name to a function that creates the module from the shape of its first parameter.
            `_leaf` creates the other modules that have parameters.
    """
    root = _bare(_type("Model"))
    for name, shape in shapes.items():
        node: Any = root
        *path, leaf = name.split(".")
        for part in path:
            if part not in node._modules:
                make = kinds.get(part)
                made = make(shape) if make else _leaf(part, shape) if part == path[-1] else _bare(_type("Node"))
                node.add_module(part, made)
            node = node._modules[part]
        node.register_parameter(leaf, nn.Parameter(torch.empty(shape, device="meta")))
    return root


def _leaf(name: str, shape: Ints) -> nn.Module:
    if len(shape) == 2 and ("embed" in name or name in ("wte", "wpe")):
        return nn.Embedding(*shape, device="meta")
    if len(shape) == 2:
        return nn.Linear(shape[1], shape[0], bias=False, device="meta")
    return _bare(nn.RMSNorm if len(shape) == 1 and "norm" in name else _type("Node"))


# ----------------------------------------------------------------------------------------------------------- decoders


# Default sizes of a decoder-only model. Most names are the same as in Hugging Face's configurations.
_DECODER: Mapping[str, Any] = {
    "num_key_value_heads": 0,  # number of key and value heads; 0 selects num_attention_heads
    "head_dim": 0,  # size of an attention head; 0 selects hidden_size / num_attention_heads
    "intermediate_size": 0,  # inner size of dense feed-forward layers; 0 selects 4 * hidden_size
    "tie_word_embeddings": False,
    # True if the projections q, k and v have biases; "all" if the projection o has one, too
    "attention_bias": False,
    "qk_norm": False,  # True if queries and keys are normalized in each head
    # Type of the feed-forward layers: "gated" selects gate, up and down projections. "plain" selects two linear layers
    # as in GPT-2, and also GPT-2's biases, LayerNorm, learned positions and transposed weights.
    "mlp": "gated",
    "max_position_embeddings": 0,  # number of learned positions, used only if "mlp" is "plain"
    "num_experts": 0,
    "moe_intermediate_size": 0,
    "num_shared_experts": 0,  # number of experts that are always active; they are fused into one dense layer
    "first_k_dense": 0,  # number of layers without experts before the first layer with experts
    "router_bias": False,  # True if the router has a bias, with one entry per expert
    # True if experts are stored as in gpt-oss: with biases, transposed, and with gate and up projections fused in one
    # stack.
    "expert_bias": False,
    "attention_sinks": False,  # True if each head has a learned attention sink, as in gpt-oss
    # Sizes of DeepSeek's latent attention. With kv_lora_rank 0, the model has grouped-query attention instead. With
    # q_lora_rank 0, queries are not compressed.
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 0),
}


# Parameters of a decoder-only model as tuples (conditions, name, dims), in the model's order. A parameter exists if all
# its conditions are true. Conditions and dims are keys of the dict that `_words` returns. Names in `_LAYER` are
# relative to model.layers.N. The condition "plain" selects GPT-2's layer. Its weights are stored as (inputs, outputs),
# and q, k and v are fused along the columns.
_FIRST = (
    ("", "model.embed_tokens.weight", "vocab width"),
    ("plain", "model.embed_positions.weight", "positions width"),
)
_LAYER = (
    *(("plain", f"ln_1.{leaf}", "width") for leaf in ("weight", "bias")),
    ("plain", "attn.c_attn.weight", "width 3width"),
    ("plain", "attn.c_attn.bias", "3width"),
    ("plain", "attn.c_proj.weight", "width width"),
    ("plain", "attn.c_proj.bias", "width"),
    *(("plain", f"ln_2.{leaf}", "width") for leaf in ("weight", "bias")),
    ("plain", "mlp.c_fc.weight", "width inner"),
    ("plain", "mlp.c_fc.bias", "inner"),
    ("plain", "mlp.c_proj.weight", "inner width"),
    ("plain", "mlp.c_proj.bias", "width"),
    ("norms", "input_layernorm.weight", "width"),
    # Parameters of grouped-query attention
    ("grouped sinks", "self_attn.sinks", "heads"),
    ("grouped", "self_attn.q_proj.weight", "q width"),
    ("grouped bias", "self_attn.q_proj.bias", "q"),
    ("grouped", "self_attn.k_proj.weight", "kv width"),
    ("grouped bias", "self_attn.k_proj.bias", "kv"),
    ("grouped", "self_attn.v_proj.weight", "kv width"),
    ("grouped bias", "self_attn.v_proj.bias", "kv"),
    ("grouped", "self_attn.o_proj.weight", "width q"),
    ("grouped bias_of_o", "self_attn.o_proj.bias", "width"),
    ("grouped qk_norm", "self_attn.q_norm.weight", "head"),
    ("grouped qk_norm", "self_attn.k_norm.weight", "head"),
    # Parameters of DeepSeek's latent attention. Some weights are fused, and Muon splits them into matrices.
    ("latent whole_q", "self_attn.q_proj.weight", "latent_q width"),
    ("latent q_rank", "self_attn.q_a_proj.weight", "q_rank width"),
    ("latent q_rank", "self_attn.q_a_layernorm.weight", "q_rank"),
    ("latent q_rank", "self_attn.q_b_proj.weight", "latent_q q_rank"),
    ("latent", "self_attn.kv_a_proj_with_mqa.weight", "kv_a width"),
    ("latent", "self_attn.kv_a_layernorm.weight", "latent"),
    ("latent", "self_attn.kv_b_proj.weight", "kv_b latent"),
    ("latent", "self_attn.o_proj.weight", "width v"),
    ("norms", "post_attention_layernorm.weight", "width"),
    ("dense", "mlp.gate_proj.weight", "inner width"),
    ("dense", "mlp.up_proj.weight", "inner width"),
    ("dense", "mlp.down_proj.weight", "width inner"),
    # Parameters of the router, the experts and the shared experts. Experts are stored as 3-D stacks; gpt-oss
    # interleaves the columns of gate and up in one stack. Shared experts are stored as one dense layer.
    ("experts", "mlp.router.weight", "experts width"),
    ("experts router_bias", "mlp.router.bias", "experts"),
    ("experts biased", "mlp.experts.gate_up_proj", "experts width 2each"),
    ("experts biased", "mlp.experts.gate_up_proj_bias", "experts 2each"),
    ("experts biased", "mlp.experts.down_proj", "experts each width"),
    ("experts biased", "mlp.experts.down_proj_bias", "experts width"),
    ("experts unbiased", "mlp.experts.w1", "experts each width"),
    ("experts unbiased", "mlp.experts.w2", "experts width each"),
    ("experts unbiased", "mlp.experts.w3", "experts each width"),
    ("experts shared", "mlp.shared_experts.gate_proj.weight", "shared width"),
    ("experts shared", "mlp.shared_experts.up_proj.weight", "shared width"),
    ("experts shared", "mlp.shared_experts.down_proj.weight", "width shared"),
)
_LAST = (
    ("", "model.norm.weight", "width"),
    ("plain", "model.norm.bias", "width"),
    ("", "lm_head.weight", "vocab width"),
)


def _words(c: SimpleNamespace, layer: int = -1) -> dict[str, int]:
    """Return a dict that maps each dim and each condition in the tables `_FIRST`, `_LAYER` and `_LAST` to its value. A
    condition is true if its value is not 0.

    Args:
        c: Sizes of the model: a namespace with all keys that `build` accepts.
        layer: Index of the layer, which determines whether the layer has experts; -1 for parameters outside layers.
    """
    width, heads, nope, rope = c.hidden_size, c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim
    head, plain, each = c.head_dim or width // heads, c.mlp == "plain", c.moe_intermediate_size
    experts = 0 if layer < c.first_k_dense else c.num_experts
    return {
        "vocab": c.vocab_size,
        "width": width,
        "inner": c.intermediate_size or 4 * width,
        "positions": c.max_position_embeddings,
        "plain": plain,
        "norms": not plain,
        "dense": not plain and not experts,
        "3width": 3 * width,
        "grouped": not plain and not c.kv_lora_rank,
        "heads": heads,
        "q": heads * head,
        "kv": (c.num_key_value_heads or heads) * head,
        "head": head,
        "qk_norm": c.qk_norm,
        "sinks": c.attention_sinks,
        "bias": bool(c.attention_bias),
        "bias_of_o": c.attention_bias == "all",
        "latent": c.kv_lora_rank,
        "latent_q": heads * (nope + rope),
        "q_rank": c.q_lora_rank,
        "whole_q": not c.q_lora_rank,
        "kv_a": c.kv_lora_rank + rope,
        "kv_b": heads * (nope + c.v_head_dim),
        "v": heads * c.v_head_dim,
        "experts": experts,
        "router_bias": c.router_bias,
        "each": each,
        "2each": 2 * each,
        "biased": c.expert_bias,
        "unbiased": not c.expert_bias,
        "shared": c.num_shared_experts * each,
    }


def _shapes(rows: Sequence[tuple[str, str, str]], words: Mapping[str, int], above: str = "") -> dict[str, Ints]:
    """Return the names and shapes of the parameters in `rows` whose conditions are true.

    Args:
        rows: Parameters as (conditions, name, dims).
        words: Values of the conditions and dims.
        above: Prefix that is added to all names.
    """
    return {
        above + name: tuple(words[dim] for dim in dims.split())
        for conditions, name, dims in rows
        if all(words[condition] for condition in conditions.split())
    }


def build(sizes: Mapping[str, Any]) -> nn.Module:
    """Build the modules of a decoder-only model on the meta device, without `forward` methods. Parameters have the same
    names and shapes as in Hugging Face's models, except that experts are stacked as in torchtitan.

    For some modules, the class name determines whether Muon or AdamW updates the parameters, and how the parameters are
    split into matrices. These modules get the class names that Hugging Face or torchtitan uses.

    Args:
        sizes: Dict with the keys vocab_size, hidden_size, num_hidden_layers, num_attention_heads and, optionally, the
            keys of `_DECODER`.
    """
    c = SimpleNamespace(**{**_DECODER, **sizes})
    latent = {key: getattr(c, key) for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")}
    kinds: dict[str, _Make] = {
        "router": lambda shape: _bare(_type("MoeTopKRouter")),
        "experts": lambda shape: _bare(_type("GptOssExperts" if c.expert_bias else "GroupedExperts")),
        "attn": lambda shape: _bare(_type("GPT2Attention"), split_size=c.hidden_size, is_cross_attention=False),
        **dict.fromkeys(("c_attn", "c_proj", "c_fc"), lambda shape: _bare(_type("Conv1D"), nx=shape[0], nf=shape[1])),
    }
    if c.kv_lora_rank:
        attention = _type("DeepseekV3Attention")
        kinds["self_attn"] = lambda shape: _bare(attention, num_heads=c.num_attention_heads, **latent)
    shapes = _shapes(_FIRST, _words(c))
    for layer in range(c.num_hidden_layers):
        shapes |= _shapes(_LAYER, _words(c, layer), f"model.layers.{layer}.")
    made: Any = _modules_of(shapes | _shapes(_LAST, _words(c)), kinds)
    if c.tie_word_embeddings:
        made.lm_head.weight = made.model.embed_tokens.weight
    return cast(nn.Module, made)
