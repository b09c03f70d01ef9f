"""Tests of QK-clip on the attention layers of the transformers library: layers are found, measured logits equal those
of the eager forward pass, and clipping bounds the logits. `make zoo` runs these tests, which need transformers."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import pytest
import torch
from tolerances import assert_rounded
from torch import Tensor, nn

from shardmuon_qkclip import QKClip
from shardmuon_qkclip.layers import Attention

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers not installed: make zoo installs it"
)

_LM: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", _LM),
    "Qwen2": ("Qwen2", _LM),
    "Qwen3": ("Qwen3", {**_LM, "head_dim": 8}),
    "Mistral": ("Mistral", _LM),
    "Phi3": ("Phi3", {**_LM, "pad_token_id": 0}),
    "GPTNeoX": ("GPTNeoX", {key: value for key, value in _LM.items() if key != "num_key_value_heads"}),
    "GPT2": (
        "GPT2",
        {
            "vocab_size": 64,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 32,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
    "DeepseekV3": (
        "DeepseekV3",
        {
            **_LM,
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 6,
            "first_k_dense_replace": 2,
        },
    ),
    "DeepseekV3 without q_lora": (
        "DeepseekV3",
        {
            **_LM,
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 6,
            "first_k_dense_replace": 2,
        },
    ),
}
_HEADS = {"GPT2": (4, 4), "GPTNeoX": (4, 4), "DeepseekV3": (4, 4), "DeepseekV3 without q_lora": (4, 4)}
_IDS = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(3))


def _make(name: str, implementation: str) -> nn.Module:
    import transformers

    kind, options = _MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**options, attn_implementation=implementation)
    config.use_cache = False
    torch.manual_seed(0)
    suffix = {"GPT2": "LMHeadModel"}.get(kind, "ForCausalLM")
    made: nn.Module = getattr(transformers, kind + suffix)(config)
    with torch.no_grad():
        for layer in Attention.all_in(made):
            for rows in layer.rows:
                made.get_parameter(rows.weight).mul_(12.0)
    return made


def _logits(model: nn.Module) -> list[Tensor]:
    """Return the largest logit of each head in each layer, as passed to the softmax of an eager forward pass."""
    found: list[Tensor] = []
    softmax = nn.functional.softmax

    def reading(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if x.ndim == 4:
            found.append(x.detach().double())
        return softmax(x, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.functional, "softmax", reading)
        model(_IDS)
    return [x.transpose(0, 1).flatten(1).amax(1) for x in found]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", _MODELS)
def test_logits_of_transformers_attention_are_measured_and_clipped_to_tau(name: str, implementation: str) -> None:
    """QK-clip must measure the same largest logits as an eager forward pass. After clipping, only the logits of the
    first layer are checked. The input of this layer does not depend on any attention, so clipping multiplies its logits
    by exactly QK-clip's gains."""
    wanted, model = _logits(_make(name, "eager")), _make(name, implementation)
    tau = math.inf if name == "Qwen3" else float(wanted[0].max()) / 3
    num_groups = _HEADS.get(name, (4, 2))[1]
    gains = (tau / wanted[0].view(num_groups, -1).amax(1)).clamp(max=1.0)
    assert len(wanted) == 2
    for layers in (wanted, [wanted[0] * gains.repeat_interleave(len(wanted[0]) // num_groups)]):
        clip = QKClip(model, torch.optim.SGD(model.named_parameters(), lr=0.0), tau=tau)
        # QK-clip measures layers that normalize queries or keys, but does not scale them.
        normed = "q_norm, k_norm" if name == "Qwen3" else ""
        assert {(x.num_heads, x.num_groups, x.normed) for x in clip.layers} == {(*_HEADS.get(name, (4, 2)), normed)}
        model(_IDS).logits.sum().backward()
        clip._optimizer.step()
        for found, exact in zip(clip.report.layers, layers, strict=False):
            # The bound covers the rounding errors of the measured and the expected logits. Both pass through at most
            # two transformer layers. Each layer adds at most 48 terms in a linear projection and 12 terms in a product
            # of q and k, and applies norms and rotations.
            scale = float(max(exact.abs().max(), layers[0].abs().max()))
            assert_rounded(found.maxima, exact, roundings=2 * 2 * (48 + 48 + 12), dtype=torch.float32, scale=scale)
        clip.close()
