"""Models by name, configuration, checkpoint header or function: their parameters, routed as a live job routes them."""

from __future__ import annotations

import json
import math
import re
import struct
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from shardmuon.foresight.active import Active, active_of
from shardmuon.foresight.decoder import MODEL_TYPES, DecoderConfig, build, config_from_hf, flattened
from shardmuon.layout.views import Ints
from shardmuon.options import VIEW_DEFAULTS
from shardmuon.texts import did_you_mean

Parallel = Literal["column", "row", "none"]
Loader = Callable[[str], nn.Module]

# How tensor parallelism cuts a weight, by what its module is called: Hugging Face's, torchtitan's, GPT-2's and
# Megatron's names. Columns: the outputs are cut. Rows: the inputs.
_COLUMN = re.compile(
    r"q_proj|k_proj|v_proj|qkv_proj|q_b_proj|kv_b_proj|gate_proj|up_proj|gate_up_proj|wq|wk|wv|wq_b|wkv_b|w1|w3|c_attn"
    r"|c_fc|fc1|linear_qkv|linear_q|linear_fc1|query_key_value|embed_tokens|lm_head|tok_embeddings|word_embeddings"
    r"|output|output_layer|wte|embedding"
)
_ROW = re.compile(r"o_proj|down_proj|wo|w2|c_proj|fc2|out_proj|linear_proj|linear_fc2|dense_4h_to_h")


AFTER = 1 << 30  # the layer of what comes after all layers


@dataclass(frozen=True, slots=True)
class Param:
    """One trainable parameter.

    Attributes:
        name: Name without wrappers.
        shape: Global shape.
        group: Index of its group in the optimizer.
        use_muon: Whether it is a matrix or several.
        parallel: How tensor parallelism cuts it.
        turned: Whether it is stored inputs first.
        expert: Whether its first dim counts experts.
        layer: Its layer, -1 before all of them, `AFTER` after them.
        order: Its place in the model.
        stride: Blocks of rows that tensor parallelism cuts alike, as Megatron's `partition_stride`: 2 where gate and up
            are one weight.
    """

    name: str
    shape: Ints
    group: int
    use_muon: bool
    parallel: Parallel
    turned: bool
    expert: bool
    layer: int
    order: int
    stride: int = 1

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Model:
    """A module on the meta device and what is known of it.

    Attributes:
        name, source: As in `Exact`.
        module: The module, with every parameter on the meta device.
        active: The parameters that work on one token.
        num_heads, num_kv_heads: Heads of attention, 0 if unknown.
    """

    name: str
    source: str
    module: nn.Module
    active: Active
    num_heads: int
    num_kv_heads: int


def preset_names() -> list[str]:
    """Names of the models that are shipped as data."""
    return sorted(entry.name.removesuffix(".json") for entry in _presets().iterdir() if entry.name.endswith(".json"))


def preset(name: str) -> dict[str, Any]:
    """A preset's data: title, source, published_parameters, published_at, config (fields of `DecoderConfig`)."""
    found: dict[str, Any] = json.loads((_presets() / f"{name}.json").read_text())
    return found


def _presets() -> Any:
    return resources.files("shardmuon.foresight") / "data" / "models"


def load_model(model: str | nn.Module, from_function: Loader, from_config: Loader) -> Model:
    """The model that a user means.

    Args:
        model: A preset's name; the path of a Hugging Face config.json or of the folder that holds it; of a safetensors
            file or index; MODULE:FUNCTION; or a module, best on the meta device.
        from_function: Builds MODULE:FUNCTION.
        from_config: Builds a config.json with transformers; raises ImportError without it.

    Raises:
        ValueError: `model` is none of these, or the shapes cannot be known from it.
    """
    if isinstance(model, nn.Module):
        return of_module(type(model).__name__, "the module given", model)
    if model in preset_names():
        data = preset(model)
        return of_module(str(data["title"]), str(data["source"]), build(DecoderConfig(**data["config"])))
    path = Path(model)
    if model.endswith((".safetensors", ".safetensors.index.json")):
        return of_module(path.name, f"shapes of {model}", _from_safetensors(path), _config_beside(path))
    if model.endswith(".json") or (path / "config.json").is_file():
        return _of_config(model, from_config)
    if ":" in model:
        return of_module(model, model, from_function(model))
    known = preset_names()
    raise ValueError(
        f"{model!r} is no model that is known. Write one of {', '.join(known)}{did_you_mean(model, known)}"
        "; the path of a Hugging Face config.json, or of a .safetensors file; or MODULE:FUNCTION that builds the model"
    )


def of_module(name: str, source: str, module: nn.Module, configs: Sequence[Mapping[str, Any]] = ()) -> Model:
    """A model, with what its own configuration and others say of it."""
    config = getattr(module, "config", None)
    config = getattr(config, "text_config", config)
    heads, kv_heads = (int(getattr(config, f"num_{of}_heads", 0) or 0) for of in ("attention", "key_value"))
    return Model(name, source, module, active_of(module, configs), heads, kv_heads or heads)


def _of_config(text: str, from_config: Loader) -> Model:
    path = Path(text) if text.endswith(".json") else Path(text) / "config.json"
    if not path.exists():
        raise ValueError(f"{text}: there is no such file. Give the path of a config.json, or a preset's name")
    try:
        given = json.loads(path.read_text())
    except json.JSONDecodeError as wrong:
        raise ValueError(f"{path}: it is no JSON ({wrong})") from None
    if not isinstance(given, dict) or not ({"model_type", "architectures"} & set(given)):
        raise ValueError(f"{path}: it says neither model_type nor architectures, so its shapes are unknown")
    sizes = flattened(given)
    for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
        size = sizes.get(key, 1)
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise ValueError(f"{path}: {key} is {size!r}. Write a whole number of at least 1")
    try:
        module = from_config(text)
    except (ImportError, ValueError) as wrong:  # there is no transformers, or it does not know the type
        if isinstance(wrong, ValueError) and given.get("model_type") not in MODEL_TYPES:
            raise
        module = build(config_from_hf(given, text))
    return of_module(str(given.get("_name_or_path") or path.parent.name or path.name), str(path), module, [given])


# ------------------------------------------------------------------------------------------------- from safetensors


class _Node(nn.Module):
    """A module that only holds others."""


def _from_safetensors(path: Path) -> nn.Module:
    """Modules with the shapes of a checkpoint: 2-D weights are linear layers, those called embed are embeddings."""
    if not path.exists():
        raise ValueError(f"{path}: there is no such file")
    shapes: dict[str, Ints] = {}
    if path.name.endswith(".index.json"):
        index = json.loads(path.read_text())
        for name in sorted(set(index.get("weight_map", {}).values())):
            shapes |= _header(path.parent / name)
    else:
        shapes = _header(path)
    if not shapes:
        raise ValueError(f"{path}: it holds no tensors, so there are no shapes")
    root = _Node()
    with torch.device("meta"):
        for name, shape in shapes.items():
            _add(root, name, shape)
    return root


def _config_beside(path: Path) -> list[Mapping[str, Any]]:
    """The config.json in a checkpoint's folder, if there is one: it knows how many experts a token takes."""
    try:
        given = json.loads((path.parent / "config.json").read_text())
    except (OSError, ValueError):
        return []
    return [given] if isinstance(given, dict) else []


def _header(path: Path) -> dict[str, Ints]:
    """Names and shapes of a safetensors file: 8 bytes little endian, the length of the JSON that follows.

    https://github.com/huggingface/safetensors#format
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > 100_000_000:
                raise ValueError("its header is too long")
            header = json.loads(file.read(length))
    except FileNotFoundError:
        raise ValueError(f"{path}: the index names it, but there is no such file") from None
    except (struct.error, UnicodeDecodeError, json.JSONDecodeError, ValueError) as wrong:
        raise ValueError(f"{path}: it is no safetensors file ({wrong})") from None
    return {name: tuple(about["shape"]) for name, about in header.items() if name != "__metadata__"}


def _add(root: nn.Module, name: str, shape: Ints) -> None:
    *path, leaf = name.split(".")
    node = root
    for at, part in enumerate(path):
        child = node._modules.get(part)
        if child is None:
            child = _leaf_module(part, leaf, shape) if at == len(path) - 1 else _Node()
            node.add_module(part, child)
        node = child
    if node._parameters.get(leaf) is None:
        node.register_parameter(leaf, nn.Parameter(torch.empty(shape)))


def _leaf_module(part: str, leaf: str, shape: Ints) -> nn.Module:
    if leaf == "weight" and len(shape) == 2:
        if "embed" in part or part in ("wte", "wpe"):
            return nn.Embedding(*shape)
        return nn.Linear(shape[1], shape[0], bias=False)
    if leaf == "weight" and len(shape) == 1 and "norm" in part:
        return nn.RMSNorm(shape[0])
    return _Node()


# ----------------------------------------------------------------------------------------------------- parameters


def parameters_of(groups: Sequence[Mapping[str, Any]], module: nn.Module) -> list[Param]:
    """Every trainable parameter in the order of the optimizer's groups, which have `param_names`."""
    found: list[Param] = []
    layers, shapes = _layers(module), {name: tuple(p.shape) for name, p in module.named_parameters()}
    order = {id(param): i for i, param in enumerate(module.parameters())}
    for index, group in enumerate(groups):
        for name, param in zip(group["param_names"], group["params"], strict=True):
            shape = tuple(param.shape)
            expert = ".experts." in f".{name}." and len(shape) > 1
            turned = bool(group.get("transposed", False)) if group["use_muon"] else False
            muon, place = bool(group["use_muon"]), order.get(id(param), len(found))
            cut = _parallel(name, shape)
            stride = _stride(name, shapes)
            found.append(
                Param(name, shape, index, muon, cut, turned, expert, layers.get(id(param), AFTER), place, stride)
            )
    return found


# What Megatron's groups say beside what tells matrices apart; the others are the same in all of them.
_MEGATRONS = ("adjust_lr_fn", "extra_scale_factor", "lr", "momentum", "ns_coefficients", "ns_steps", "weight_decay")


def in_megatrons_order(params: Sequence[Param], groups: Sequence[Mapping[str, Any]]) -> list[Param]:
    """The parameters in the order of the groups that frameworks/megatron makes: Muon's first, then by their options as
    text."""

    def label(group: Mapping[str, Any]) -> tuple[bool, str]:
        told = {key: group[key] for key, default in VIEW_DEFAULTS.items() if group.get(key, default) != default}
        options = {**told, **{key: group[key] for key in _MEGATRONS if key in group}, "use_muon": group["use_muon"]}
        return not group["use_muon"], repr(sorted(options.items(), key=lambda item: item[0]))

    labels = [label(group) for group in groups]
    return sorted(params, key=lambda p: labels[p.group])


def _stride(name: str, shapes: Mapping[str, Ints]) -> int:
    """2 for Megatron's `linear_fc1` of a gated layer, which has two outputs for each input of `linear_fc2`."""
    head, _, leaf = name.rpartition("linear_fc1.")
    own, other = shapes.get(name), shapes.get(f"{head}linear_fc2.weight")
    return 2 if leaf and own and other and len(other) == 2 and own[0] == 2 * other[1] else 1


def _parallel(name: str, shape: Ints) -> Parallel:
    words = name.split(".")
    word = words[-2] if words[-1] in ("weight", "bias") and len(words) > 1 else words[-1]
    if len(shape) < 2:
        return "column" if words[-1] == "bias" and _COLUMN.fullmatch(word) else "none"
    if _COLUMN.fullmatch(word):
        return "column"
    return "row" if _ROW.fullmatch(word) else "none"


def _layers(module: nn.Module) -> dict[int, int]:
    """id of a parameter -> its layer: by the prefix before the first number of a name that counts highest, before which
    and after which the others stand."""
    named = list(module.named_parameters())
    numbered = [found for name, _ in named if (found := re.match(r"(.+?)\.(\d+)\.", name))]
    body = max(numbered, key=lambda found: int(found[2]), default=None)
    inside = {found.string: int(found[2]) for found in numbered if body is not None and found[1] == body[1]}
    first = next((at for at, (name, _) in enumerate(named) if name in inside), 0)
    return {id(p): inside.get(name, -1 if at < first else AFTER) for at, (name, p) in enumerate(named)}


def quiet(function: Callable[[], Any]) -> Any:
    """Call a function without warnings and return its result: routing repeats its doubts when the job is built."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function()
