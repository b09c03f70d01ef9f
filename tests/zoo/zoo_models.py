"""Tiny two-layer versions of well-known models, built on the CPU from configs alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

# The widths in a config differ, so that a wrong split of a fused weight cannot match by accident.
_LM: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MOE: dict[str, Any] = {"moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2}
_ENCODER: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
}
_IMAGE: dict[str, Any] = {**_ENCODER, "image_size": 32, "patch_size": 8, "num_labels": 10}


def _hf(name: str, config: str, **options: Any) -> Any:
    import transformers

    # The implementation "eager" runs attention and experts as plain torch code from the library's model file.
    made = getattr(transformers, config)(**options, attn_implementation="eager", experts_implementation="eager")
    return getattr(transformers, name)(made)


def _timm(name: str, **options: Any) -> Any:
    import timm

    return timm.create_model(name, **options)


def _torchvision(make: Callable[[Any], nn.Module]) -> nn.Module:
    import torchvision

    return make(torchvision.models)


def _peft(kind: str, **options: Any) -> Any:
    import peft

    return peft.get_peft_model(MODELS["Llama"](), getattr(peft, kind)(**options))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "Llama": partial(_hf, "LlamaForCausalLM", "LlamaConfig", **_LM),
    "Llama, tied": partial(_hf, "LlamaForCausalLM", "LlamaConfig", **_LM, tie_word_embeddings=True),
    "Qwen3": partial(_hf, "Qwen3ForCausalLM", "Qwen3Config", **_LM, head_dim=16),
    "Gemma3": partial(_hf, "Gemma3ForCausalLM", "Gemma3TextConfig", **_LM, head_dim=16),
    "Mistral": partial(_hf, "MistralForCausalLM", "MistralConfig", **_LM, head_dim=16),
    "GPT-2": partial(
        _hf,
        "GPT2LMHeadModel",
        "GPT2Config",
        vocab_size=320,
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_positions=128,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "GPT-NeoX": partial(
        _hf, "GPTNeoXForCausalLM", "GPTNeoXConfig", **{k: v for k, v in _LM.items() if k != "num_key_value_heads"}
    ),
    "Phi-3": partial(_hf, "Phi3ForCausalLM", "Phi3Config", **_LM),
    "BERT": partial(_hf, "BertForMaskedLM", "BertConfig", vocab_size=320, **_ENCODER),
    "T5": partial(
        _hf,
        "T5ForConditionalGeneration",
        "T5Config",
        vocab_size=320,
        d_model=64,
        d_kv=16,
        d_ff=96,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    ),
    "Whisper": partial(
        _hf,
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        vocab_size=320,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        num_mel_bins=80,
        max_source_positions=50,
        max_target_positions=40,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    ),
    "ViT": partial(_hf, "ViTForImageClassification", "ViTConfig", **_IMAGE),
    "ViT, timm": partial(_timm, "vit_tiny_patch16_224", depth=2, num_classes=10, img_size=32),
    "ViT, torchvision": partial(
        _torchvision,
        lambda models: models.VisionTransformer(
            image_size=32, patch_size=8, num_layers=2, num_heads=4, hidden_dim=64, mlp_dim=96, num_classes=10
        ),
    ),
    "Swin": partial(
        _hf,
        "SwinForImageClassification",
        "SwinConfig",
        image_size=32,
        patch_size=4,
        embed_dim=24,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        num_labels=10,
    ),
    "Swin, timm": partial(
        _timm,
        "swin_tiny_patch4_window7_224",
        depths=(2, 2),
        num_heads=(2, 4),
        embed_dim=24,
        num_classes=10,
        img_size=56,
    ),
    "Swin, torchvision": partial(
        _torchvision,
        lambda models: models.SwinTransformer(
            patch_size=[4, 4], embed_dim=24, depths=[2, 2], num_heads=[2, 4], window_size=[4, 4], num_classes=10
        ),
    ),
    "BEiT": partial(_hf, "BeitForImageClassification", "BeitConfig", **_IMAGE, use_relative_position_bias=True),
    "BEiT, timm": partial(_timm, "beit_base_patch16_224", depth=2, embed_dim=48, num_heads=4, num_classes=10),
    "CLIP": partial(
        _hf,
        "CLIPModel",
        "CLIPConfig",
        text_config={
            **_ENCODER,
            "vocab_size": 320,
            "max_position_embeddings": 32,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        vision_config={**_ENCODER, "image_size": 32, "patch_size": 8},
        projection_dim=32,
    ),
    "Qwen2-MoE": partial(
        _hf, "Qwen2MoeForCausalLM", "Qwen2MoeConfig", **_LM, **_MOE, shared_expert_intermediate_size=80
    ),
    "Qwen3-MoE": partial(_hf, "Qwen3MoeForCausalLM", "Qwen3MoeConfig", **_LM, **_MOE, head_dim=16),
    "Mixtral": partial(_hf, "MixtralForCausalLM", "MixtralConfig", **_LM, num_local_experts=4),
    "DeepSeek-V3": partial(
        _hf,
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        **{**_LM, "num_key_value_heads": 4},
        moe_intermediate_size=48,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=12,
        v_head_dim=20,
        first_k_dense_replace=1,
        n_group=2,
        topk_group=1,
    ),
    "gpt-oss": partial(
        _hf, "GptOssForCausalLM", "GptOssConfig", **_LM, head_dim=16, num_local_experts=4, num_experts_per_tok=2
    ),
    "Qwen3-Next": partial(
        _hf,
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        **_LM,
        **_MOE,
        head_dim=16,
        shared_expert_intermediate_size=40,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=12,
        layer_types=["linear_attention", "full_attention"],
    ),
    "Mamba": partial(
        _hf, "MambaForCausalLM", "MambaConfig", vocab_size=320, hidden_size=64, num_hidden_layers=2, state_size=8
    ),
    "Mamba-2": partial(
        _hf,
        "Mamba2ForCausalLM",
        "Mamba2Config",
        vocab_size=320,
        hidden_size=64,
        num_hidden_layers=2,
        state_size=24,
        num_heads=8,
        head_dim=16,
        n_groups=2,
    ),
    "ResNet": partial(_torchvision, lambda models: models.resnet18(num_classes=10)),
    "ResNet, timm": partial(_timm, "resnet18", num_classes=10),
    "ConvNeXt": partial(
        _torchvision,
        lambda models: models.ConvNeXt(
            [models.convnext.CNBlockConfig(16, 32, 2), models.convnext.CNBlockConfig(32, None, 2)], num_classes=10
        ),
    ),
    "ConvNeXt, timm": partial(_timm, "convnext_atto", depths=(2, 2, 1, 1), num_classes=10),
    "LoRA": partial(_peft, "LoraConfig", r=4, target_modules=["q_proj", "v_proj"]),
    "LoRA of an embedding": partial(_peft, "LoraConfig", r=4, target_modules=["embed_tokens", "q_proj"]),
    "DoRA": partial(_peft, "LoraConfig", r=4, target_modules=["q_proj"], use_dora=True),
    "OFT": partial(_peft, "OFTConfig", oft_block_size=8, target_modules=["q_proj"]),
}

CLASSIFIERS: dict[str, Callable[[int], nn.Module]] = {
    "BERT": lambda labels: _hf(
        "BertForSequenceClassification", "BertConfig", vocab_size=320, **_ENCODER, num_labels=labels
    ),
    "Llama": lambda labels: _hf("LlamaForSequenceClassification", "LlamaConfig", **_LM, num_labels=labels),
    "ViT": lambda labels: _hf("ViTForImageClassification", "ViTConfig", **{**_IMAGE, "num_labels": labels}),
    "ViT, timm": lambda labels: _timm("vit_tiny_patch16_224", depth=2, num_classes=labels, img_size=32),
    "ResNet": lambda labels: _torchvision(lambda models: models.resnet18(num_classes=labels)),
}
