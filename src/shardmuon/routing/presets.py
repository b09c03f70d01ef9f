"""Table of the weights of well-known module types. This module imports no framework except torch.

[Note: facts that follow from a type]
    The type and size attributes of a framework's module reveal facts that the model's structure does not. For example,
    they reveal that the rows of a weight are q, k and v, that a weight is stored transposed, or that a parameter
    contains decay rates.

    A type is matched by the class names in the module's MRO, because wrappers and `fully_shard` create subclasses. If
    unrelated classes have the same name, the name of the Python module is matched as well.

    A fused weight is split by default if its parts are certain: the type of its module is in this table, and the sizes
    of the parts add up to the size of the weight. The weight then gets the same update as if its parts were stored
    separately. Any other fused weight is not split. If its name suggests fused parts, the routing table shows "fused?"
    and the override that splits the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, Literal, cast

from torch import nn

from shardmuon.layout.views import Ints, matrix_view

_View = Mapping[str, Any]  # keyword arguments of `matrix_view`
_Kind = Literal[
    "linear",  # parameter that is one matrix, with one row per output feature
    "matrices",  # parameter with one or more matrices, known from the module's type
    "bare",  # parameter that is one matrix, recognized only by its shape, because the module's type is unknown
    "stack",  # parameter with several matrices, recognized only by its shape
    "embedding",
    "router",  # weight of a router, which assigns tokens to experts: one matrix, with one row per expert
    "norm",
    "entries",  # parameter that is not a linear map: a vector, a lookup table, decay rates or the biases of experts
    "broadcast",  # parameter of shape (1, M, N): a table that is broadcast over the batch, or a stack with one expert
    "pairs",  # parameter whose last dim has size 2, as in complex numbers stored as pairs of real numbers
    "unclear",  # parameter of known shape whose division into matrices is unclear
    "unknown",  # parameter whose unsharded shape cannot be determined
]


@dataclass(frozen=True)
class Role:
    """The role of a parameter in its model, and how the parameter is divided into matrices.

    Attributes:
        kind: "linear", "embedding", "norm" etc. (see `_Kind`).
        reason: Reason for the assignment to Muon or AdamW, as shown in the routing table. For the kinds "unclear" and
            "unknown", an error message that states the problem and how to fix it.
        view: Options with which `matrix_view` divides the parameter into matrices. They can also be set for a parameter
            that goes to AdamW by default, because the user can assign the parameter to Muon.
        reads: Sizes of a layer's input dims, or the width of a norm or an embedding; empty if unknown.
        decays: True if AdamW applies weight decay to the parameter. Ignored for 1-D parameters, which are never
            decayed.
        remark: Text appended to the reason, such as a "fused?" hint. Only for parameters that go to Muon by default.
    """

    kind: _Kind
    reason: str
    view: _View = field(default_factory=dict)
    reads: tuple[int, ...] = ()
    decays: bool = True
    remark: str = ""

    @property
    def use_muon(self) -> bool:
        """True if Muon updates the parameter by default. Such a parameter consists of one or more matrices that map
        inputs to outputs."""
        return self.kind in ("linear", "matrices", "bare", "stack")

    @classmethod
    def of_known_type(cls, owners: Sequence[tuple[str, nn.Module]], shape: Ints) -> Role | None:
        """Look up a parameter's role in the preset table. If entries for several enclosing modules match, the entry for
        the outermost module is used.

        Args:
            owners: Pairs (name of the parameter relative to the module, module), one for each enclosing module,
                innermost first.
            shape: The parameter's global shape.

        Returns:
            The parameter's role; None if the table has no matching entry.
        """
        for below, module in reversed(owners):
            for preset in _of_type(cast(Hashable, type(module))):
                if not fnmatchcase(below, preset.weight) or not all(hasattr(module, name) for name in preset.has):
                    continue
                try:
                    view = preset.view(module, shape)
                    if preset.kind in ("matrices", "linear"):
                        matrix_view(shape, **view)
                except (AttributeError, LookupError, TypeError, ValueError):
                    # The module's class comes from another version of the library, or only has the same name, so skip
                    # the preset.
                    continue
                inputs = shape[-2:-1] if view.get("transposed") else shape[-1:]
                return cls(preset.kind, preset.what, view, inputs, preset.decays)
        return None


@dataclass(frozen=True)
class _Preset:
    """Entry of the preset table. It describes one weight of one or more module types.

    Attributes:
        types: Globs for class names, or for names of a Python module and class. At least one glob must match a class in
            the MRO of the weight's module.
        weight: Glob for the weight's name relative to the module.
        what: Reason shown in the routing table.
        view: Function that takes the module and the weight's global shape, and returns the options of `matrix_view`.
            The shape is an argument because the weight itself may be a placeholder. If the function raises an error or
            the sizes do not fit the weight, the entry is skipped.
        kind: "matrices", "entries" etc. (see `_Kind`).
        decays: True if AdamW applies weight decay to the weight. Ignored for 1-D weights, which are never decayed.
        has: Names of attributes that the module must also have for the entry to match.
    """

    types: tuple[str, ...]
    weight: str
    what: str
    view: Callable[[Any, Ints], _View] = lambda _module, _shape: {}
    kind: _Kind = "matrices"
    decays: bool = True
    has: tuple[str, ...] = ()


def _split(sizes: Sequence[Any], repeats: Any = 1, **view: Any) -> _View:
    """Make the `matrix_view` options for a weight that consists of parts with the given sizes, in this order. The whole
    sequence of parts occurs `repeats` times."""
    groups = {"split_groups": int(repeats)} if repeats > 1 else {}
    return {**view, "split_sizes": tuple(map(int, sizes)), **groups}


def _rows(num: int) -> Callable[[Any, Ints], _View]:
    """Return the `view` function of a preset whose weight consists of `num` equal blocks of rows."""
    return lambda _, shape: _split((shape[0] // num,) * num)


def _conv1d(layer: Any, shape: Ints) -> _View:
    if shape != (layer.nx, layer.nf):
        raise ValueError("a Conv1D of somebody else's, outputs first")
    return {"transposed": True}


def _stack(experts: Any, _: Ints) -> _View:
    named = any(t.__name__ in ("GptOssExperts", "Llama4TextExperts") for t in type(experts).__mro__)
    # True if the experts' weights are stored with shape (experts, inputs, outputs)
    is_inputs_first = getattr(experts, "is_transposed", named)
    return {"view": "stack", **({"transposed": True} if is_inputs_first else {})}


def _gate_up(experts: Any, shape: Ints) -> _View:
    """Make the `matrix_view` options for the fused gate and up projections of experts. The two projections are stored
    either one after the other or interleaved."""
    view = _stack(experts, shape)
    size = shape[2 if "transposed" in view else 1] // 2
    by_turns = not getattr(experts, "is_concatenated", True) or type(experts).__name__ == "GptOssExperts"
    return {**view, **(_split((1, 1), size) if by_turns else _split((size, size)))}


# timm has a dozen classes named Attention. The classes in this list store all rows of q, then all of k, then all of v.
_TIMM = (
    "timm.layers.attention.Attention",
    "timm.models.vision_transformer.Attention",
    "timm.models.beit.Attention",
    "timm.models.swin_transformer.WindowAttention",
    "timm.models.swin_transformer_v2.WindowAttention",
    "torchvision.models.swin_transformer.ShiftedWindowAttention",
)
_DEEPSEEK = ("DeepseekV2Attention", "DeepseekV3Attention", "DeepseekV32Attention")
_MAMBA = ("MambaMixer", "FalconMambaMixer", "JambaMambaMixer")
_MAMBA_SSM = ("mamba_ssm.modules.mamba_simple.Mamba",)
_KNOWN_EXPERTS = (
    *("Qwen2MoeExperts", "Qwen3MoeExperts", "Qwen3NextExperts", "MixtralExperts", "DeepseekV3Experts"),
    *("GptOssExperts", "Llama4TextExperts"),
)
_ROUTERS = ("*TopKRouter", "*TopkRouter", "*Top1Router")

_PRESETS: tuple[_Preset, ...] = (
    # presets for torch modules
    _Preset(("torch.nn.modules.activation.MultiheadAttention",), "*in_proj_weight*", "fused q, k, v", _rows(3)),
    _Preset(("torch.nn.modules.activation.MultiheadAttention",), "*weight*", "linear"),
    _Preset(("torch.nn.modules.rnn.LSTM*",), "*weight_[ih]h*", "4 fused gates", _rows(4)),
    _Preset(("torch.nn.modules.rnn.GRU*",), "*weight_[ih]h*", "3 fused gates", _rows(3)),
    _Preset(("torch.nn.modules.rnn.RNN*",), "*weight_*", "linear"),
    _Preset(("torch.nn.modules.linear.Bilinear",), "weight", "a matrix for each output", lambda *_: {"view": "stack"}),
    # presets for attention and feed-forward layers in the transformers library
    _Preset(
        ("GPT2Attention", "DecisionTransformerGPT2Attention", "ImageGPTAttention"),
        "c_attn.weight",
        "fused q, k, v in columns",
        lambda m, _: _split((m.split_size,) * (2 if m.is_cross_attention else 3), transposed=True),
    ),
    _Preset(("Conv1D",), "weight", "linear, stored transposed", _conv1d),
    _Preset(
        ("GPTNeoXAttention",),
        "query_key_value.weight",
        "fused q, k, v of each head",
        lambda m, _: _split((m.head_size,) * 3, m.config.num_attention_heads),
    ),
    _Preset(
        ("BloomAttention", "PersimmonAttention"),
        "query_key_value.weight",
        "fused q, k, v of each head",
        lambda m, _: _split((m.head_dim,) * 3, m.num_heads),
    ),
    _Preset(
        ("Phi3Attention", "Phi4MultimodalAttention"),
        "qkv_proj.weight",
        "fused q, k, v",
        lambda m, _: _split(
            (m.config.num_attention_heads * m.head_dim, *(m.num_key_value_heads * m.head_dim,) * 2),
        ),
    ),
    _Preset(
        ("Phi3MLP", "Phi4MultimodalMLP", "GlmMLP", "Glm4MLP"),
        "gate_up_proj.weight",
        "fused gate, up",
        lambda m, _: _split((m.config.intermediate_size,) * 2),
    ),
    _Preset(
        _DEEPSEEK,
        "kv_b_proj.weight",
        "fused k, v of each head",
        lambda m, _: _split((m.qk_nope_head_dim, m.v_head_dim), m.num_heads),
    ),
    _Preset(
        _DEEPSEEK,
        "kv_a_proj_with_mqa.weight",
        "fused latent, rotary key",
        lambda m, _: _split((m.kv_lora_rank, m.qk_rope_head_dim)),
    ),
    _Preset(
        ("Qwen3NextAttention",),
        "q_proj.weight",
        "fused q, gate of each head",
        lambda m, _: _split((m.head_dim,) * 2, m.config.num_attention_heads),
    ),
    _Preset(
        ("Qwen3NextGatedDeltaNet",),
        "in_proj_qkvz.weight",
        "fused q, k, v, z of each group",
        lambda m, _: _split(
            (*(m.head_k_dim,) * 2, *(m.num_v_heads // m.num_k_heads * m.head_v_dim,) * 2), m.num_k_heads
        ),
    ),
    _Preset(
        ("Qwen3NextGatedDeltaNet",),
        "in_proj_ba.weight",
        "fused b, a of each group",
        lambda m, _: _split((m.num_v_heads // m.num_k_heads,) * 2, m.num_k_heads),
    ),
    # presets for state-space models
    _Preset(_MAMBA, "in_proj.weight", "fused x, z", lambda m, _: _split((m.intermediate_size,) * 2)),
    _Preset(
        _MAMBA,
        "x_proj.weight",
        "fused dt, B, C",
        lambda m, _: _split((m.time_step_rank, *(m.ssm_state_size,) * 2)),
    ),
    _Preset(_MAMBA_SSM, "in_proj.weight", "fused x, z", lambda m, _: _split((m.d_inner,) * 2)),
    _Preset(_MAMBA_SSM, "x_proj.weight", "fused dt, B, C", lambda m, _: _split((m.dt_rank, *(m.d_state,) * 2))),
    _Preset((*_MAMBA, *_MAMBA_SSM), "A_log", "decay rates of the states, entry by entry", kind="entries", decays=False),
    _Preset(
        ("Mamba2Mixer", "BambaMixer"),
        "in_proj.weight",
        "fused z, x, B, C, dt",
        lambda m, _: _split((*(m.intermediate_size,) * 2, *(m.n_groups * m.ssm_state_size,) * 2, m.num_heads)),
    ),
    # Presets for experts. They match the classes in `_KNOWN_EXPERTS`. They also match any class whose name ends in
    # "Experts" and whose instances have the attributes `is_transposed` and `is_concatenated`. These attributes describe
    # the layout of expert weights in the transformers library.
    *(
        preset
        for types, has in ((_KNOWN_EXPERTS, ()), (("*Experts",), ("is_transposed", "is_concatenated")))
        for preset in (
            _Preset(types, "gate_up_proj", "stack of experts, fused gate, up", _gate_up, has=has),
            _Preset(types, "up_proj", "stack of experts", _stack, has=has),
            _Preset(types, "down_proj", "stack of experts", _stack, has=has),
            _Preset(types, "*_bias", "biases of experts", kind="entries", decays=False, has=has),
        )
    ),
    _Preset(_ROUTERS, "weight", "router: its rows choose experts", kind="router"),
    _Preset(_ROUTERS, "classifier.weight", "router: its rows choose experts", kind="router"),
    # presets for vision models
    _Preset(_TIMM, "qkv.weight", "fused q, k, v", _rows(3)),
    _Preset(
        (
            *(*_TIMM, "timm.layers.pos_embed_rel.RelPosBias"),
            # classes of the transformers library that have a table of relative position biases
            *("*RelativePositionBias", "*SwinSelfAttention", "ClapAudioSelfAttention"),
        ),
        "relative_position_bias_table",
        "table of position biases, looked up row by row",
        kind="entries",
        decays=False,
    ),
    # presets for peft modules
    _Preset(("LoraLayer",), "lora_embedding_A.*", "its columns are looked up, like an embedding's", kind="entries"),
    _Preset(("LoraLayer",), "lora_embedding_B.*", "linear", kind="linear"),
    _Preset(("OFTRotationModule",), "weight", "packed entries of skew-symmetric matrices", kind="entries"),
    # presets for torch_geometric modules
    _Preset(("torch_geometric.nn.dense.linear.Linear",), "weight", "linear", kind="linear"),
)


@lru_cache(maxsize=4096)
def _of_type(kind: Hashable) -> tuple[_Preset, ...]:
    mro = cast(type, kind).__mro__
    names = {name for t in mro for name in (t.__name__, f"{t.__module__}.{t.__qualname__}")}
    return tuple(p for p in _PRESETS if any(fnmatchcase(name, glob) for glob in p.types for name in names))


def numbers_out(name: str) -> str:
    """Replace the numeric parts of a parameter's name with "*". The result is a glob for the same weight in all
    layers."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
