"""Megatron-core's own GPT model, gradient buffers and process groups on CPUs, for the tests of the adapter."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from standin_cuda import cuda_on_cpu
from torch import nn

_FOUND = importlib.util.find_spec("megatron") and importlib.util.find_spec("megatron.core")
needs_megatron = pytest.mark.skipif(not _FOUND, reason="megatron-core is not installed (docs/megatron.md)")


def _not_compiled(function: Any = None, **options: Any) -> Any:
    return (lambda same: same) if function is None else function


@contextlib.contextmanager
def megatron(**sizes: int) -> Iterator[None]:
    """Megatron's process groups, e.g. `expert_model_parallel_size=2`."""
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    kept = mock.patch.object(torch.storage, "_load_from_bytes", torch.storage._load_from_bytes)  # Megatron replaces it
    with cuda_on_cpu(), kept, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        with mock.patch.object(torch, "compile", _not_compiled):  # at import; the compiler alone takes seconds to load
            from megatron.core import parallel_state
            from megatron.core.models import gpt as _  # noqa: F401
            from megatron.core.tensor_parallel import get_cuda_rng_tracker

        parallel_state.initialize_model_parallel(**sizes)
        get_cuda_rng_tracker().fork = lambda *args: contextlib.nullcontext()  # its generators live on GPUs
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            logging.disable(logging.NOTSET)


def gpt(
    seed: int = 0,
    first: bool = True,
    last: bool = True,
    tied: bool = False,
    ddp: dict[str, Any] | None = None,
    **options: Any,
) -> nn.Module:
    """A GPT model in Megatron's `DistributedDataParallel`. `options`: of `TransformerConfig`; `ddp`: of the wrapper."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    values: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": 24,  # with these sizes flat buffers are cut inside rows at 2, 3 and 4 ranks
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 44,
        "gated_linear_unit": True,
        "activation_func": nn.functional.silu,
        "add_bias_linear": False,
        "use_cpu_initialization": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "normalization": "RMSNorm",
        "bias_dropout_fusion": False,
        "gradient_accumulation_fusion": False,
    }
    config = TransformerConfig(**{**values, **options})
    torch.manual_seed(seed)
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(options.get("num_moe_experts"), normalization="RMSNorm"),
        vocab_size=32,
        max_sequence_length=8,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=tied,
        position_embedding_type="rope",
    )
    if config.bf16 or config.fp16:
        model = model.to(config.params_dtype)
    wrapper = DistributedDataParallelConfig(**{"grad_reduce_in_fp32": True, **(ddp or {})})
    return DistributedDataParallel(config, wrapper, model)


def optimizer_config(**options: Any) -> Any:
    """`OptimizerConfig` with Muon's defaults of these tests."""
    from megatron.core.optimizer import OptimizerConfig

    values = {"optimizer": "muon", "lr": 0.05, "min_lr": 0.005, "weight_decay": 0.1, "clip_grad": 1.0}
    return OptimizerConfig(**{**values, **options})


def half(dtype: torch.dtype) -> dict[str, Any]:
    """The options of both configs for training in this dtype."""
    name = {torch.float32: "", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    return {name: True, "params_dtype": dtype} if name else {}


def clean(name: str) -> str:
    """A parameter's name without the wrapper's prefix."""
    return name.removeprefix("module.")
