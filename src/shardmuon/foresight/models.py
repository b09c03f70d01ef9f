"""Models: the names, shapes and numbers of a preset; or somebody's module, or what a configuration makes.

[Note: what works on a token]
    Training takes 6 FLOPs of forward and backward for each token and each parameter that works on it: all but tables
    that are only looked up. Of experts only some do: how many, a preset says, or the user.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import pkgutil
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from shardmuon.layout.views import Ints
from shardmuon.routing.roles import find_places, is_table
from shardmuon.texts import did_you_mean

_PRESETS = Path(__file__).parent / "data" / "models"
_EXPERTS = re.compile(r"(^|\.)(routed_|local_|moe_)?experts(\.|$)")
_Shapes = Mapping[str, Ints]  # name of a parameter -> its shape


@dataclass(frozen=True)
class Model:
    """A module on the meta device and what is known of it.

    Attributes:
        name: Name, as the user gave it.
        source: Where its shapes come from (an address, a file, a function).
        module: The module, with every parameter on the meta device.
        active: Elements that work on one token, see [Note: what works on a token]; 0: there are experts, and nothing
            says how many a token takes.
    """

    name: str
    source: str
    module: nn.Module
    active: int


# ---------------------------------------------------------------------------------------------- which model is meant


def load_model(model: str | nn.Module) -> Model:
    """The model that a user means.

    Args:
        model: A preset's name; the path of a Hugging Face config.json or of the folder that holds it; MODULE:FUNCTION;
            or a module, best on the meta device.

    Raises:
        ValueError: `model` is none of these, or the shapes cannot be known from it.
    """
    if isinstance(model, nn.Module):
        return Model(type(model).__name__, "the module given", model, _active_of(model))
    known = _preset_names()
    if model in known:
        data = _preset(model)
        made = build(data["config"])
        return Model(data["title"], data["source"], made, data.get("active_parameters") or _active_of(made))
    if is_config(model):
        path = (Path(model) if model.endswith(".json") else Path(model) / "config.json").resolve()
        made = model_from_config(model)
        return Model(path.parent.name, str(path), made, _active_of(made))
    if ":" in model:
        made = model_from_function(model, meta=True)
        return Model(model, model, made, _active_of(made))
    raise ValueError(
        f"{model!r} is no model that is known. Write one of {', '.join(known)}{did_you_mean(model, known)}"
        "; the path of a Hugging Face config.json, or of its folder; or MODULE:FUNCTION that builds the model"
    )


def _preset_names() -> list[str]:
    """Names of the models that are shipped as data."""
    return sorted(path.stem for path in _PRESETS.glob("*.json"))


def _preset(name: str) -> dict[str, Any]:
    """A preset's data: title, source, published_parameters, active_parameters if it has experts, published_at, config
    (see `build`)."""
    found: dict[str, Any] = json.loads((_PRESETS / f"{name}.json").read_text())
    return found


def _active_of(module: nn.Module) -> int:
    """`Model.active` of a module."""
    held = [(p, places) for p, places in find_places(module) if not all(is_table(place.module) for place in places)]
    has_experts = any(p.ndim == 3 or _EXPERTS.search(places[0].name) for p, places in held)  # a stack, or so called
    return 0 if has_experts else sum(p.numel() for p, _ in held)


def is_config(text: str) -> bool:
    """True for the path of a config.json, or of a folder that holds one."""
    return text.endswith(".json") or (Path(text) / "config.json").is_file()


def model_from_config(text: str) -> nn.Module:
    """The model that transformers makes of a Hugging Face config, on the meta device."""
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
    if hasattr(model, "tie_weights"):  # weights on the meta device are tied only when asked to
        model.tie_weights()
    assert isinstance(model, nn.Module)
    return model


def model_from_function(text: str, meta: bool) -> nn.Module:
    """The model that a function of a module or file returns, or a model that stands there under this name."""
    module_name, _, name = text.partition(":")
    if not name:
        raise ValueError(f"{text!r} is no MODULE:FUNCTION and no config.json. Write e.g. my_project.models:build")
    path = Path(module_name)
    is_file = path.suffix == ".py"
    folder = str(path.parent.resolve() if is_file else Path.cwd())
    sys.path.insert(0, folder)  # as `python -m` would
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

_Make = Callable[[Ints], nn.Module]  # shape of a module's first parameter -> the module


@cache
def _type(name: str) -> type[nn.Module]:
    """A type of module of this name, by which routing knows it."""
    return type(name, (nn.Module,), {})


def _bare(kind: type[nn.Module], **numbers: Any) -> nn.Module:
    """A module of a type without parameters, with the numbers that routing reads off it. Its own `__init__` would draw
    values."""
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    made.__dict__.update(numbers)
    return made


def modules_of(shapes: _Shapes, kinds: Mapping[str, _Make], device: str = "meta") -> nn.Module:
    """Modules with parameters of these names and shapes, without values, that nobody can call.

    Args:
        shapes: Of all parameters, in the model's order.
        kinds: Name of a module, or that of its parent and "*" -> what makes it of its parameter's shape. Of others 2-D
            weights are linear layers, those called embed are embeddings, 1-D ones called norm are norms.
        device: Of the parameters.
    """
    root = _bare(_type("Model"))
    for name, shape in shapes.items():
        node, above = root, ""
        *path, leaf = name.split(".")
        for depth, part in enumerate(path, 1):
            if part not in node._modules:
                make = kinds.get(part) or kinds.get(f"{above}.*")
                is_leaf = depth == len(path)
                made = make(shape) if make else _leaf(part, shape) if is_leaf else _bare(_type("Node"))
                node.add_module(part, made)
            node, above = cast(nn.Module, node._modules[part]), part
        node.register_parameter(leaf, nn.Parameter(torch.empty(shape, device=device)))
    return root


def _leaf(name: str, shape: Ints) -> nn.Module:
    if len(shape) == 2 and ("embed" in name or name in ("wte", "wpe")):
        return nn.Embedding(*shape, device="meta")
    if len(shape) == 2:
        return nn.Linear(shape[1], shape[0], bias=False, device="meta")
    return _bare(nn.RMSNorm if len(shape) == 1 and "norm" in name else _type("Node"))


# ----------------------------------------------------------------------------------------------------------- decoders


# Sizes of a decoder in the words of Hugging Face's configurations, and what they are where nothing says it.
_DECODER: Mapping[str, Any] = {
    "num_key_value_heads": 0,  # 0: as many as num_attention_heads
    "head_dim": 0,  # 0: hidden_size over num_attention_heads
    "intermediate_size": 0,  # of dense feed-forward layers
    "tie_word_embeddings": False,
    "attention_bias": False,  # True: of q, k and v; "all": of o, too
    "qk_norm": False,  # of each head's q and k
    # "gated": gate, up and down. "plain": two layers with biases, and LayerNorm with biases (GPT-2, whose linear layers
    # are stored transposed and whose positions are learned).
    "mlp": "gated",
    "max_position_embeddings": 0,  # where positions are learned
    "num_experts": 0,
    "moe_intermediate_size": 0,
    "num_shared_experts": 0,  # always active ones, in one dense layer
    "first_k_dense": 0,  # layers before those with experts
    "router_bias": False,  # an entry for each expert
    "expert_bias": False,  # biases in experts, and gate and up in one stack, inputs first (gpt-oss)
    "attention_sinks": False,  # an entry for each head (gpt-oss)
    # of latent attention (DeepSeek); 0: grouped-query attention, and no compressed q
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 0),
}


# Parameters in a decoder's order: conditions, name, dims; all in words of `_words`. Those of a layer stand under
# model.layers.N. "plain" is GPT-2's layer: linear layers are stored inputs first, q, k and v are fused in columns.
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
    # grouped-query attention
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
    # DeepSeek's latent attention, with fused weights that routing splits
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
    # router, experts as stacks (gpt-oss's: gate and up by turns in the columns of one), shared experts as one layer
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
    """Dims and conditions (not 0) of a decoder's parameters, and of one of its layers."""
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
    """Names and shapes of the rows whose conditions hold."""
    return {
        above + name: tuple(words[dim] for dim in dims.split())
        for conditions, name, dims in rows
        if all(words[condition] for condition in conditions.split())
    }


def build(sizes: Mapping[str, Any], device: str = "meta") -> nn.Module:
    """A decoder's modules, without a forward: names and shapes as Hugging Face's, experts as torchtitan's stacks.

    Modules that routing knows by the names of their types bear these.

    Args:
        sizes: vocab_size, hidden_size, num_hidden_layers, num_attention_heads and those of `_DECODER`.
        device: Of the parameters, which are left as they are.
    """
    c = SimpleNamespace(**{**_DECODER, **sizes})
    latent = {key: getattr(c, key) for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")}
    kinds: dict[str, _Make] = {
        "layers.*": lambda shape: _bare(_type("Layer")),
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
    made: Any = modules_of(shapes | _shapes(_LAST, _words(c)), kinds, device)
    if c.tie_word_embeddings:
        made.lm_head.weight = made.model.embed_tokens.weight
    return cast(nn.Module, made)


# ----------------------------------------------------------------------------------------------------- parameters

# How tensor parallelism cuts a weight, by what its module is called: Hugging Face's, torchtitan's, GPT-2's and
# Megatron's names. Columns: the outputs are cut. Rows: the inputs.
_COLUMN = re.compile(
    r"q_proj|k_proj|v_proj|qkv_proj|q_b_proj|kv_b_proj|gate_proj|up_proj|gate_up_proj|wq|wk|wv|wq_b|wkv_b|w1|w3|c_attn"
    r"|c_fc|fc1|linear_qkv|linear_q|linear_fc1|query_key_value|embed_tokens|lm_head|tok_embeddings|word_embeddings"
    r"|output|output_layer|wte|embedding"
)
_ROW = re.compile(r"o_proj|down_proj|wo|w2|c_proj|fc2|out_proj|linear_proj|linear_fc2|dense_4h_to_h")
AFTER = 1 << 30  # the layer of what comes after all layers


@dataclass(frozen=True)
class Param:
    """One trainable parameter.

    Attributes:
        name: Name without wrappers.
        shape: Global shape.
        group: Index of its group in the optimizer.
        use_muon: Whether it is a matrix or several.
        cut: The dim that tensor parallelism cuts, from the end; None: the parameter is replicated.
        expert: Whether its first dim counts experts.
        layer: Its layer, -1 before all of them, `AFTER` after them.
    """

    name: str
    shape: Ints
    group: int
    use_muon: bool
    cut: int | None
    expert: bool
    layer: int

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


def parameters_of(groups: Sequence[Mapping[str, Any]], module: nn.Module) -> list[Param]:
    """Every trainable parameter in the order of the optimizer's groups, which have `param_names`."""
    layers, found = _layers(module), list[Param]()
    for index, group in enumerate(groups):
        for name, param in zip(group["param_names"], group["params"], strict=True):
            shape, muon = tuple(param.shape), bool(group["use_muon"])
            cut = _cut(name, len(shape), muon and bool(group.get("transposed", False)))
            expert = ".experts." in f".{name}." and len(shape) > 1
            found.append(Param(name, shape, index, muon, cut, expert, layers.get(id(param), AFTER)))
    return found


def _cut(name: str, num_dims: int, turned: bool) -> int | None:
    """The cut of a weight, see `Param.cut`. `turned`: it is stored inputs first."""
    words = name.split(".")
    word = words[-2] if words[-1] in ("weight", "bias") and len(words) > 1 else words[-1]
    outputs, inputs = (-1, -2) if turned else (-2, -1)
    if _COLUMN.fullmatch(word) and (num_dims > 1 or words[-1] == "bias"):
        return outputs if num_dims > 1 else -1
    return inputs if num_dims > 1 and _ROW.fullmatch(word) else None


def _layers(module: nn.Module) -> dict[int, int]:
    """id of a parameter -> its layer: by the prefix before the first number of a name that counts highest, before which
    and after which the others stand."""
    named = list(module.named_parameters())
    numbered = [found for name, _ in named if (found := re.match(r"(.+?)\.(\d+)\.", name))]
    body = max(numbered, key=lambda found: int(found[2]), default=None)
    inside = {found.string: int(found[2]) for found in numbered if body is not None and found[1] == body[1]}
    first = next((at for at, (name, _) in enumerate(named) if name in inside), 0)
    return {id(p): inside.get(name, -1 if at < first else AFTER) for at, (name, p) in enumerate(named)}
