"""The weights of well-known modules: one table by type, of data. No framework is imported.

[Note: what a type says]
    A framework's module type and its own sizes say what torch's structure cannot: that rows are q, k and v, that a
    weight is stored as its transpose, that a parameter holds decay rates. A type is matched by its class name along the
    MRO (wrappers and `fully_shard` make subclasses); where other classes bear the name too, by module and name.
    A fused weight is split by default where type and sizes make the parts certain: the sizes are read off the module
    itself and must add up to the weight. Then it gets the update that its parts would get, were they stored one by one,
    as other models store them. Where they do not add up, and for names that often mean fused parts in types that nobody
    listed, nothing is split: the table says "fused?" with the line to write.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from operator import attrgetter
from typing import Any, Literal, cast

from torch import nn

from shardmuon.layout.views import Ints, matrix_view

__all__ = ["Preset", "Role", "find_preset", "fused_hint", "fused_parts", "numbers_out"]

_Parts = tuple[Sequence[int], int]  # as `split_sizes` and `split_groups`

Kind = Literal[
    "linear",  # one matrix, of which rows are outputs
    "matrices",  # one or more, read as the module's type says
    "bare",  # matrices by their shape alone, of a module that nothing knows
    "embedding",
    "router",  # rows choose experts
    "norm",
    "entries",  # no map: vectors, tables, rates, biases of experts
    "broadcast",  # (1, M, N): a table, or a stack of one expert
    "pairs",  # a last dim of 2: complex numbers
    "unclear",  # the shape is known, how it reads as matrices is not
    "unknown",  # not even the shape
]


@dataclass(frozen=True, slots=True)
class Role:
    """The role of a parameter: how it reads as matrices, or why it is none.

    Attributes:
        kind: See `Kind`.
        reason: Why it goes where it goes; for "unclear" and "unknown" what is wrong and what to do.
        view: Options of `matrix_view` that read it as matrices. Also set where AdamW is the better default.
        reads: Numbers of features that it takes as inputs (of a matrix whose orientation is unknown, both dims).
        decays: Whether it decays with AdamW; 1-D parameters never do.
        remark: For the table, where it stays one matrix.
    """

    kind: Kind
    reason: str
    view: Mapping[str, Any] = field(default_factory=dict)
    reads: tuple[int, ...] = ()
    decays: bool = True
    remark: str = ""

    @property
    def use_muon(self) -> bool:
        """True for a matrix, or several."""
        return self.kind in ("linear", "matrices", "bare")


@dataclass(frozen=True)
class Preset:
    """One weight of a type of module.

    Attributes:
        types: Class names, or module and name, as globs; any in the module's MRO.
        weight: Name of the parameter below the module, as a glob.
        what: For the table.
        parts: The sizes of its parts, each a product of the module's numbers from left to right, as in "num_v_heads //
            num_k_heads * head_v_dim"; or what gives sizes and repeats, from the module and the weight's global shape
            (the parameter itself may be a placeholder). (): one matrix.
        repeats: How often the parts repeat, likewise; "": once.
        view: Further options of `matrix_view`, or what gives them.
        kind: See `Kind`.
        decays: Whether it decays with AdamW.
        has: Attributes that the module must have, too.
    """

    types: tuple[str, ...]
    weight: str
    what: str
    parts: tuple[str, ...] | Callable[[Any, Ints], _Parts] = ()
    repeats: str = ""
    view: Mapping[str, Any] | Callable[[Any, Ints], Mapping[str, Any]] = field(default_factory=dict)
    kind: Kind = "matrices"
    decays: bool = True
    has: tuple[str, ...] = ()


def _number(module: nn.Module, product: str) -> int:
    """A product of the module's numbers, see `Preset.parts`."""
    first, *rest = product.split()
    value = int(attrgetter(first)(module))
    for sign, name in zip(rest[::2], rest[1::2], strict=True):
        number = int(attrgetter(name)(module))
        value = value * number if sign == "*" else value // number
    return value


def _gate_up(experts: Any, shape: Ints) -> _Parts:
    """Sizes and repeats of gate and up in experts: one after the other, or by turns."""
    size = shape[2 if _in_out(experts) else 1] // 2
    by_turns = not getattr(experts, "is_concatenated", True) or type(experts).__name__ == "GptOssExperts"
    return ((1, 1), size) if by_turns else ((size, size), 1)


def _in_out(experts: Any) -> bool:
    """True if experts are stored (E, inputs, outputs)."""
    named = any(t.__name__ in ("GptOssExperts", "Llama4TextExperts") for t in type(experts).__mro__)
    return bool(getattr(experts, "is_transposed", named))


def _stack(experts: Any, _: Ints) -> Mapping[str, Any]:
    return {"view": "stack", **({"transposed": True} if _in_out(experts) else {})}


def _stack_of_pairs(experts: Any, shape: Ints) -> Mapping[str, Any]:
    return {**_stack(experts, shape), **({"split_dim": 1} if _in_out(experts) else {})}


def _equal(num: int) -> Callable[[Any, Ints], _Parts]:
    """Sizes of this many equal parts."""
    return lambda _, shape: ((shape[0] // num,) * num, 1)


def _conv1d(layer: Any, shape: Ints) -> Mapping[str, Any]:
    if shape != (layer.nx, layer.nf):
        raise ValueError("a Conv1D of somebody else's, outputs first")
    return {"transposed": True}


_TIMM = (  # timm has a dozen classes called Attention; of these the rows are all of q, all of k, all of v
    "timm.layers.attention.Attention",
    "timm.models.vision_transformer.Attention",
    "timm.models.beit.Attention",
    "timm.models.swin_transformer.WindowAttention",
    "timm.models.swin_transformer_v2.WindowAttention",
    "torchvision.models.swin_transformer.ShiftedWindowAttention",
)
_WITH_POSITION_BIASES = (
    *_TIMM,
    "timm.layers.pos_embed_rel.RelPosBias",
    "*RelativePositionBias",  # transformers' BEiT, Data2Vec, Swin
    "*SwinSelfAttention",
    "ClapAudioSelfAttention",
)
_DEEPSEEK = ("DeepseekV2Attention", "DeepseekV3Attention", "DeepseekV32Attention")
_MAMBA = ("MambaMixer", "FalconMambaMixer", "JambaMambaMixer")
_MAMBA_SSM = ("mamba_ssm.modules.mamba_simple.Mamba",)
_EXPERTS = ("*Experts",)
_WORDS = ("is_transposed", "is_concatenated")  # how transformers' experts say how they are stored
_KNOWN_EXPERTS = (
    *("Qwen2MoeExperts", "Qwen3MoeExperts", "Qwen3NextExperts", "MixtralExperts", "DeepseekV3Experts"),
    *("GptOssExperts", "Llama4TextExperts"),
)
_ROUTERS = ("*TopKRouter", "*TopkRouter", "*Top1Router")
_TURNED_COLUMNS: Mapping[str, Any] = {"transposed": True, "split_dim": 1}

PRESETS: tuple[Preset, ...] = (
    # torch
    Preset(("torch.nn.modules.activation.MultiheadAttention",), "*in_proj_weight*", "fused q, k, v", _equal(3)),
    Preset(("torch.nn.modules.activation.MultiheadAttention",), "*weight*", "linear"),
    Preset(("torch.nn.modules.rnn.LSTM*",), "*weight_[ih]h*", "4 fused gates", _equal(4)),
    Preset(("torch.nn.modules.rnn.GRU*",), "*weight_[ih]h*", "3 fused gates", _equal(3)),
    Preset(("torch.nn.modules.rnn.RNN*",), "*weight_*", "linear"),
    # transformers: attention and feed-forward layers
    Preset(
        ("GPT2Attention", "DecisionTransformerGPT2Attention", "ImageGPTAttention"),
        "c_attn.weight",
        "fused q, k, v in columns",
        lambda m, _: ((m.split_size,) * (2 if m.is_cross_attention else 3), 1),
        view=_TURNED_COLUMNS,
    ),
    Preset(("Conv1D",), "weight", "linear, stored transposed", view=_conv1d, has=("nx", "nf")),
    Preset(
        ("GPTNeoXAttention",),
        "query_key_value.weight",
        "fused q, k, v of each head",
        ("head_size",) * 3,
        "config.num_attention_heads",
    ),
    Preset(
        ("BloomAttention", "PersimmonAttention"),
        "query_key_value.weight",
        "fused q, k, v of each head",
        ("head_dim",) * 3,
        "num_heads",
    ),
    Preset(
        ("Phi3Attention", "Phi4MultimodalAttention"),
        "qkv_proj.weight",
        "fused q, k, v",
        ("config.num_attention_heads * head_dim", *("num_key_value_heads * head_dim",) * 2),
    ),
    Preset(
        ("Phi3MLP", "Phi4MultimodalMLP", "GlmMLP", "Glm4MLP"),
        "gate_up_proj.weight",
        "fused gate, up",
        ("config.intermediate_size",) * 2,
    ),
    Preset(_DEEPSEEK, "kv_b_proj.weight", "fused k, v of each head", ("qk_nope_head_dim", "v_head_dim"), "num_heads"),
    Preset(_DEEPSEEK, "kv_a_proj_with_mqa.weight", "fused latent, rotary key", ("kv_lora_rank", "qk_rope_head_dim")),
    Preset(
        ("Qwen3NextAttention",),
        "q_proj.weight",
        "fused q, gate of each head",
        ("head_dim",) * 2,
        "config.num_attention_heads",
    ),
    Preset(
        ("Qwen3NextGatedDeltaNet",),
        "in_proj_qkvz.weight",
        "fused q, k, v, z of each group",
        (*("head_k_dim",) * 2, *("num_v_heads // num_k_heads * head_v_dim",) * 2),
        "num_k_heads",
    ),
    Preset(
        ("Qwen3NextGatedDeltaNet",),
        "in_proj_ba.weight",
        "fused b, a of each group",
        ("num_v_heads // num_k_heads",) * 2,
        "num_k_heads",
    ),
    # state spaces
    Preset(_MAMBA, "in_proj.weight", "fused x, z", ("intermediate_size",) * 2),
    Preset(_MAMBA, "x_proj.weight", "fused dt, B, C", ("time_step_rank", *("ssm_state_size",) * 2)),
    Preset(_MAMBA_SSM, "in_proj.weight", "fused x, z", ("d_inner",) * 2),
    Preset(_MAMBA_SSM, "x_proj.weight", "fused dt, B, C", ("dt_rank", *("d_state",) * 2)),
    Preset((*_MAMBA, *_MAMBA_SSM), "A_log", "decay rates of the states, entry by entry", kind="entries", decays=False),
    Preset(
        ("Mamba2Mixer", "BambaMixer"),
        "in_proj.weight",
        "fused z, x, B, C, dt",
        (*("intermediate_size",) * 2, *("n_groups * ssm_state_size",) * 2, "num_heads"),
    ),
    # experts, whose layout transformers' say themselves
    *(
        preset
        for types, has in ((_KNOWN_EXPERTS, ()), (_EXPERTS, _WORDS))
        for preset in (
            Preset(types, "gate_up_proj", "stack of experts, fused gate, up", _gate_up, view=_stack_of_pairs, has=has),
            Preset(types, "up_proj", "stack of experts", view=_stack, has=has),
            Preset(types, "down_proj", "stack of experts", view=_stack, has=has),
            Preset(types, "*_bias", "biases of experts", kind="entries", decays=False, has=has),
        )
    ),
    Preset(_ROUTERS, "weight", "router: its rows choose experts", kind="router"),
    Preset(_ROUTERS, "classifier.weight", "router: its rows choose experts", kind="router"),
    # vision
    Preset(_TIMM, "qkv.weight", "fused q, k, v", _equal(3)),
    Preset(
        _WITH_POSITION_BIASES,
        "relative_position_bias_table",
        "table of position biases, looked up row by row",
        kind="entries",
        decays=False,
    ),
    # peft
    Preset(("LoraLayer",), "lora_embedding_A.*", "its columns are looked up, like an embedding's", kind="entries"),
    Preset(("LoraLayer",), "lora_embedding_B.*", "linear", kind="linear"),
    Preset(("OFTRotationModule",), "weight", "packed entries of skew-symmetric matrices", kind="entries"),
    # torch_geometric
    Preset(("torch_geometric.nn.dense.linear.Linear",), "weight", "linear", kind="linear"),
)


def find_preset(owners: Iterable[tuple[str, nn.Module]], shape: Ints) -> Role | None:
    """The role that the table gives a parameter of this global shape, by the outermost module that speaks of it first.

    Args:
        owners: (its name below the module, the module) for each module around it, innermost first.
        shape: Its global shape.
    """
    for below, module in reversed(list(owners)):
        for preset in _of_type(cast(Hashable, type(module))):
            if fnmatchcase(below, preset.weight) and all(hasattr(module, name) for name in preset.has):
                found = _read(preset, module, shape)
                if found is not None:
                    return found
    return None


@lru_cache(maxsize=4096)
def _of_type(kind: Hashable) -> tuple[Preset, ...]:
    mro = cast(type, kind).__mro__
    names = {name for t in mro for name in (t.__name__, f"{t.__module__}.{t.__qualname__}")}
    return tuple(p for p in PRESETS if any(fnmatchcase(name, glob) for glob in p.types for name in names))


def _read(preset: Preset, module: nn.Module, shape: Ints) -> Role | None:
    try:
        view = dict(preset.view(module, shape) if callable(preset.view) else preset.view)
        if callable(preset.parts):
            sizes, groups = preset.parts(module, shape)
        else:
            sizes = [_number(module, part) for part in preset.parts]
            groups = _number(module, preset.repeats) if preset.repeats else 1
        if sizes:
            view |= {"split_sizes": tuple(map(int, sizes))} | ({"split_groups": groups} if groups > 1 else {})
        if preset.kind in ("matrices", "linear"):
            matrix_view(shape, **view)
    except (AttributeError, LookupError, TypeError, ValueError):
        return None  # another version of the module, or another thing of its name
    inputs = shape[-2:-1] if view.get("transposed") else shape[-1:]
    return Role(preset.kind, preset.what, view, inputs, preset.decays)


# Names that often mean fused parts, and which. They only ever add a remark to the table.
_HINTS = (
    (re.compile(r"(w|to_)?qkv(_proj)?|query_key_value|c_attn|w_pack|in_proj_qkv\w*", re.IGNORECASE), "q k v"),
    (re.compile(r"gate_up(_proj)?|up_gate(_proj)?|w13|w12", re.IGNORECASE), "gate up"),
    (re.compile(r"Wi"), "gate up"),  # ModernBERT's; T5's wi is one matrix
    (re.compile(r"(w|to_)?kv(_proj)?", re.IGNORECASE), "k v"),
    (re.compile(r"kv_[ab]_proj\w*|in_proj(_\w+)?|x_proj", re.IGNORECASE), ""),
)
_HEADS = ("num_heads", "heads", "n_heads", "n_head", "num_attention_heads")  # what modules call their number


def numbers_out(name: str) -> str:
    """A pattern for the names that differ from this one in the numbers of layers."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def fused_parts(name: str) -> tuple[str, ...] | None:
    """The parts that a weight of this name often holds, in order; (): several unknown ones; None: one matrix."""
    word = name.removesuffix(".weight").rpartition(".")[2]
    return next((tuple(parts.split()) for pattern, parts in _HINTS if pattern.fullmatch(word)), None)


def fused_hint(name: str, shape: Ints, owners: Iterable[tuple[str, nn.Module]] = ()) -> str:
    """A remark for the table if a matrix's name often means fused parts, with the lines that split them; or "".

    A name does not say how rows lie: all of q, then all of k, or q, k and v of one head after the other. A line for the
    one would put rows of different heads together in the other, so each says for which order it is.

    Args:
        name: Name of the weight.
        shape: Shape of the weight; the last two dims count.
        owners: The modules around it, see `find_preset`. One of the first three may know the number of heads.
    """
    parts = fused_parts(name)
    if parts is None:
        return ""
    rows, cols = shape[-2:]
    where = f'"{numbers_out(name)}": '
    if not parts:
        return f'fused? {where}{{"split_sizes": (..)}}'
    num = len(parts)
    known = rows % num == 0 and (num == 2 or rows == num * cols)
    sizes = ", ".join([str(rows // num)] * num if known else [f"{part} rows" for part in parts])
    hint = f'fused? if {", then ".join(parts)}: {where}{{"split_sizes": ({sizes})}}'
    said = (vars(module).get(key) for _, module in list(owners)[:3] for key in _HEADS)
    heads = next((n for n in said if isinstance(n, int) and n > 1), 1)
    if "v" in parts and known and heads > 1 and rows % (num * heads) == 0:
        of_head = ", ".join([str(rows // (num * heads))] * num)
        hint += f'; if head by head: {{"split_sizes": ({of_head}), "split_groups": {heads}}}'
    return hint
