"""Megatron-core's own GPT model, gradient buffers and process groups on CPUs, for the tests of the adapter."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from functools import lru_cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from standin_cuda import cuda_on_cpu
from torch import Tensor, nn

from shardmuon import Muon

FOUND = bool(importlib.util.find_spec("megatron") and importlib.util.find_spec("megatron.core"))


def needs_megatron(test: Any) -> Any:
    missing = pytest.mark.skipif(not FOUND, reason="megatron-core is not installed (docs/megatron.md)")
    return pytest.mark.framework(missing(test))


def _not_compiled(function: Any = None, **options: Any) -> Any:
    return (lambda same: same) if function is None else function


@lru_cache
def import_megatron() -> None:
    """Nothing is compiled where it is imported (the compiler alone takes seconds to load), and what has been imported
    is left out when garbage is collected, as Megatron does for each part of a checkpoint."""
    kept = mock.patch.object(torch.storage, "_load_from_bytes", torch.storage._load_from_bytes)  # Megatron replaces it
    with _quiet_import(), kept:
        importlib.import_module("megatron.core.parallel_state")
        importlib.import_module("megatron.core.models.gpt")
        importlib.import_module("megatron.core.tensor_parallel")
    gc.collect()
    gc.freeze()


@lru_cache
def import_megatron_fsdp() -> None:
    """Import Megatron-FSDP, which collects garbage whenever it wraps a model."""
    with _quiet_import():
        if "megatron_fsdp" not in sys.modules and "megatron.core" not in sys.modules:
            sys.modules["megatron.core"] = None  # type: ignore[assignment] # not needed here, and slow to import
            importlib.import_module("megatron_fsdp")
            del sys.modules["megatron.core"]
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def _quiet_import() -> Iterator[None]:
    with cuda_on_cpu(), mock.patch.object(torch, "compile", _not_compiled), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        level = logging.root.manager.disable
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(level)


@contextlib.contextmanager
def megatron(**sizes: int) -> Iterator[None]:
    """Megatron's process groups, e.g. `expert_model_parallel_size=2`."""
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    import_megatron()
    with cuda_on_cpu(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        made: list[Any] = []
        new_group = dist.new_group
        with mock.patch.object(dist, "new_group", lambda *a, **k: made.append(new_group(*a, **k)) or made[-1]):
            parallel_state.initialize_model_parallel(**sizes)
        get_cuda_rng_tracker().fork = lambda *args: contextlib.nullcontext()  # its generators live on GPUs
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            for group in made:  # dozens, with open files each
                with contextlib.suppress(ValueError):  # Megatron has destroyed some
                    if isinstance(group, dist.ProcessGroup):
                        dist.destroy_process_group(group)
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


def shards_of(optimizer: Any) -> list[tuple[str, tuple[int, int], Tensor]]:
    """(name, elements, main weights) of what Megatron says that this rank holds."""
    found = []
    for part in optimizer.chained_optimizers:
        names = {p: clean(name) for chunk in part.model_chunks for name, p in chunk.named_parameters()}
        shards = zip(
            [p for group in (*part.model_fp32_groups, *part.model_float16_groups) for p in group],
            [p for group in (*part.shard_fp32_groups, *part.shard_fp32_from_float16_groups) for p in group],
            strict=True,
        )
        for p, shard in shards:
            held = part._get_model_param_range_map(p)["param"]
            found.append((names[p], (held.start, held.end), shard))
    return found


def main_tensors(optimizer: Any, what: str) -> dict[str, Tensor]:
    """The "weights" or "grads" that the optimizers step on, whole. Collective with the distributed optimizer."""
    found: dict[str, Any] = {}
    for part in optimizer.chained_optimizers:
        if hasattr(part, "shardmuon"):
            continue
        for group in part.optimizer.param_groups:
            for name, p in zip(group["param_names"], group["params"], strict=True):
                found[name] = p.detach().clone() if what == "weights" else p.grad.clone()
    for part in optimizer.chained_optimizers:
        if not hasattr(part, "shardmuon"):
            continue
        alone = SimpleNamespace(chained_optimizers=[part])
        mine = {n: (held[0], p.detach() if what == "weights" else p.grad) for n, held, p in shards_of(alone)}
        everyone: list[Any] = [None] * part.data_parallel_group.size()
        dist.all_gather_object(everyone, mine, group=part.data_parallel_group)
        for chunk in part.model_chunks:
            for full_name, p in chunk.named_parameters():
                pieces = [theirs[clean(full_name)] for theirs in everyone if clean(full_name) in theirs]
                found[clean(full_name)] = torch.cat(
                    [piece for _, piece in sorted(pieces, key=lambda item: item[0])]
                ).view(p.shape)
    return found


class Dense:
    """The whole parameters on this process, in the groups of Megatron's optimizers."""

    def __init__(self, optimizer: Any, whole: dict[str, Tensor]) -> None:
        self.params = {name: nn.Parameter(t.float()) for name, t in whole.items()}
        self.parts = []
        for part in optimizer.chained_optimizers:
            groups = [
                {key: value for key, value in group.items() if key not in ("process_group", "tp_group", "step")}
                for group in part.optimizer.param_groups
            ]
            for group in groups:
                group["params"] = [self.params[name] for name in group["param_names"]]
            self.parts.append(Muon(groups, lr=1e-3))

    def step(self, grads: dict[str, Tensor]) -> None:
        for name, p in self.params.items():
            p.grad = grads[name].clone()
        for optimizer in self.parts:
            optimizer.step()
