"""Megatron-core's GPT model, gradient buffers and process groups on CPUs, for the tests of the Megatron adapter."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import itertools
import logging
import os
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deepspeed_job import as_it_is
from standin_cuda import cuda_on_cpu
from torch import Tensor, nn

from shardmuon import Muon
from shardmuon.frameworks.megatron import get_megatron_optimizer

FOUND = bool(importlib.util.find_spec("megatron") and importlib.util.find_spec("megatron.core"))


def needs_megatron(test: Any) -> Any:
    missing = pytest.mark.skipif(not FOUND, reason="megatron-core is not installed (docs/megatron.md)")
    return pytest.mark.framework(missing(test))


@lru_cache
def import_megatron() -> None:
    """Import Megatron-core without compiling anything, because loading the compiler takes seconds. `gc.freeze` exempts
    the imported objects from the garbage collection that Megatron runs for each part of a checkpoint."""
    # Importing Megatron replaces torch's `_load_from_bytes`, so the original function is restored afterwards.
    kept = mock.patch.object(torch.storage, "_load_from_bytes", torch.storage._load_from_bytes)
    with _quiet_import(), kept:
        for name in ("parallel_state", "models.gpt", "tensor_parallel"):
            importlib.import_module(f"megatron.core.{name}")


@lru_cache
def import_megatron_fsdp() -> None:
    """Import Megatron-FSDP without Megatron-core. `gc.freeze` exempts the imported objects from the garbage collection
    that Megatron-FSDP runs whenever it wraps a model."""
    with _quiet_import():
        if "megatron_fsdp" not in sys.modules and "megatron.core" not in sys.modules:
            sys.modules["megatron.core"] = None  # type: ignore[assignment] # not needed here, and slow to import
            importlib.import_module("megatron_fsdp")
            del sys.modules["megatron.core"]


@contextlib.contextmanager
def _quiet_import() -> Iterator[None]:
    with cuda_on_cpu(), mock.patch.object(torch, "compile", as_it_is), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        level = logging.root.manager.disable
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(level)
    gc.collect()
    gc.freeze()


@lru_cache
def _group_of(world: dist.ProcessGroup, number: int, ranks: tuple[int, ...], make: Any = dist.new_group) -> Any:
    """Create process group number `number` of the given ranks, and cache it for later tests. Megatron asks for dozens
    of groups, and a group is slow to connect and keeps files open."""
    return make(list(ranks))


@contextlib.contextmanager
def megatron(**sizes: int) -> Iterator[None]:
    """Initialize Megatron's process groups with the given parallel sizes, such as `expert_model_parallel_size=2`, and
    reset them on exit."""
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    import_megatron()
    with cuda_on_cpu(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        numbers: Any = defaultdict(itertools.count)

        def group(ranks: Iterable[int], **_: Any) -> Any:
            # Megatron may create several groups of the same ranks. Number them, so that they remain separate groups.
            return _group_of(dist.group.WORLD, next(numbers[tuple(ranks)]), tuple(ranks))

        with mock.patch.object(dist, "new_group", group):
            parallel_state.initialize_model_parallel(**sizes)
        # Megatron's `fork` switches random number generators on GPUs, so it is replaced by a method that does nothing.
        get_cuda_rng_tracker().fork = lambda *args: contextlib.nullcontext()
        try:
            yield
        finally:
            with mock.patch.object(dist, "destroy_process_group"):
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
    """Return a GPT model wrapped in Megatron's `DistributedDataParallel`. `options` go to `TransformerConfig`, and
    `ddp` contains options of the wrapper."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    values: dict[str, Any] = {
        "num_layers": 1,
        # With the sizes of this config, shards of flat buffers end in the middle of rows on 2, 3 and 4 ranks.
        "hidden_size": 24,
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
    from megatron.core.optimizer import OptimizerConfig

    values = {"optimizer": "muon", "lr": 0.05, "min_lr": 0.005, "weight_decay": 0.1, "clip_grad": 1.0}
    return OptimizerConfig(**{**values, **options})


def half(dtype: torch.dtype) -> dict[str, Any]:
    """Return the options for training in `dtype`. They have the same names in the model config and in the optimizer
    config."""
    name = {torch.float32: "", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    return {name: True, "params_dtype": dtype} if name else {}


def clean(name: str) -> str:
    return name.removeprefix("module.")


def named(models: Sequence[nn.Module]) -> dict[str, Any]:
    """Return the parameters of model chunks by name. If a second chunk has a parameter of the same name, that parameter
    is called name#1, as in shardmuon's Megatron adapter."""
    found: dict[str, Any] = {}
    for model in models:
        for full, p in model.named_parameters():
            copies = sum(key.partition("#")[0] == clean(full) for key in found)
            found[f"{clean(full)}#{copies}" if copies else clean(full)] = p
    return found


def shards_of(optimizer: Any) -> list[tuple[str, tuple[int, int], Tensor]]:
    """Return a triple for every shard that Megatron assigns to this rank: the parameter's name, the range of elements,
    and the main weights."""
    found = []
    for part in (part for part in optimizer.chained_optimizers if hasattr(part, "shardmuon")):
        names = {p: name for name, p in named(part.model_chunks).items()}
        shards = zip(
            [p for group in (*part.model_fp32_groups, *part.model_float16_groups) for p in group],
            [p for group in (*part.shard_fp32_groups, *part.shard_fp32_from_float16_groups) for p in group],
            strict=True,
        )
        for p, shard in shards:
            held = part._get_model_param_range_map(p)["param"]
            found.append((names[p], (held.start, held.end), shard))
    return found


class Cut:
    """The tensor-parallel sharding of a parameter, read from the attributes that Megatron's layers set. `replicas` is
    the process group over which the parameter is replicated."""

    def __init__(self, param: Any) -> None:
        from megatron.core import parallel_state as state

        self.is_expert = not getattr(param, "allreduce", True)
        if self.is_expert:
            self.group, self.replicas = state.get_expert_tensor_parallel_group(), state.get_expert_data_parallel_group()
        else:
            self.group = state.get_tensor_model_parallel_group()
            self.replicas = state.get_data_parallel_group(with_context_parallel=True)
        self.dim = param.partition_dim if getattr(param, "tensor_model_parallel", False) else -1
        self.stride = getattr(param, "partition_stride", 1)
        self.num_parts = self.group.size() if self.dim >= 0 else 1

    def join(self, param: Tensor) -> Tensor:
        """Gather the full parameter from the parts that the tensor-parallel ranks store. Collective."""
        if self.num_parts == 1:
            return param.detach().clone()
        parts: list[Any] = [None] * self.num_parts
        dist.all_gather_object(parts, param.detach(), group=self.group)
        blocks = [part.chunk(self.stride, self.dim) for part in parts]
        return torch.cat([part[i] for i in range(self.stride) for part in blocks], self.dim)

    def take(self, whole: Tensor) -> Tensor:
        if self.num_parts == 1:
            return whole
        return tensor_parallel_part(whole, self.group.rank(), self.num_parts, self.dim, self.stride)


def tensor_parallel_part(full: Tensor, part: int, parts: int, dim: int, stride: int) -> Tensor:
    """Return one rank's part of a parameter, as Megatron's layers shard it. The parameter is cut into `stride` equal
    blocks, and the part is the concatenation of the rank's share of each block."""
    return torch.cat([block.chunk(parts, dim)[part] for block in full.chunk(stride, dim)], dim)


def drawn(shape: Sequence[int], seed: int) -> Tensor:
    """Return random multiples of 1/8, whose sums are exact in any order."""
    return torch.randint(-16, 17, tuple(shape), generator=torch.Generator().manual_seed(seed)) / 8


class Job:
    """Megatron model chunks and their optimizer, with a dense copy of the parameters for comparison.

    Args:
        models: Model chunks in Megatron's DDP wrapper. Default: one chunk made with `options`.
        ddp: Options of the DDP wrapper.
        config: Options of `OptimizerConfig`.
        muon: Options of `get_megatron_optimizer`.
        options: Options of `TransformerConfig`.
    """

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        distributed: bool = True,
        models: list[nn.Module] | None = None,
        seed: int = 0,
        ddp: dict[str, Any] | None = None,
        config: dict[str, Any] | None = None,
        muon: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        from megatron.core import parallel_state as state

        sharded = {"use_distributed_optimizer": distributed}
        self.dtype, self.expert_rank = dtype, state.get_expert_model_parallel_rank()
        if models is None:
            if state.get_pipeline_model_parallel_world_size() > 1:
                options = {"num_layers": 2, "pipeline_dtype": dtype, **options}
            ends = state.is_pipeline_first_stage(), state.is_pipeline_last_stage()
            options = {"calculate_per_token_loss": True, **half(dtype), **options}
            models = [gpt(seed, *ends, ddp={**sharded, **(ddp or {})}, **options)]
        self.models = models
        self.params = named(models)
        for name, p in self.params.items():
            # Expert-parallel ranks store different experts, so draw different weights on each of these ranks.
            if not getattr(p, "allreduce", True):
                p.data.copy_(drawn(p.shape, seed + self.expert_rank + len(name)))
        self.cuts = {name: Cut(p) for name, p in self.params.items()}
        values = {"clip_grad": 0.0, **sharded, **half(dtype), **(config or {})}
        self.optimizer = get_megatron_optimizer(
            optimizer_config(**values), models, **{"adamw_lr": 0.01, **(muon or {})}
        )
        self.muons = [part.optimizer for part in self.optimizer.chained_optimizers]
        self.dense = Dense(self.optimizer, self.whole())

    def whole(self) -> dict[str, Tensor]:
        """Return the full parameters by name. Collective."""
        return {name: self.cuts[name].join(p) for name, p in self.params.items()}

    def train(self, step: int, scale: float = 1.0, spoil: bool = False) -> bool:
        """Run a training step with gradients whose sums do not depend on the number of ranks. Return False if Megatron
        skips the step.

        Args:
            scale: The loss scale.
            spoil: Whether to make one element of a gradient on rank 1 infinite.
        """
        self.optimizer.zero_grad()
        for model in self.models:
            model.zero_grad_buffer()
        for index, (name, p) in enumerate(self.params.items()):
            cut, total = self.cuts[name], self.gradient(name, step)
            first, last = cut.replicas.rank() == 0, cut.replicas.rank() == cut.replicas.size() - 1
            part = total * first + drawn(total.shape, index) * (int(first) - int(last))
            p.main_grad.copy_(scale * cut.take(part))
        if spoil and dist.get_rank() == 1:
            next(iter(self.params.values())).main_grad.view(-1)[0] = torch.inf
        for model in self.models:
            if model.ddp_config.overlap_grad_reduce:
                model.start_grad_sync()
            model.finish_grad_sync()
        return bool(self.optimizer.step()[0])

    def gradient(self, name: str, step: int) -> Tensor:
        cut, shape = self.cuts[name], list(self.params[name].shape)
        shape[cut.dim] *= cut.num_parts
        of_rank = 1 + self.expert_rank if cut.is_expert else 0
        return drawn(shape, 1000 * step + 10 * list(self.params).index(name) + of_rank)

    def step(self, step: int, **options: Any) -> None:
        """Run a training step, and assert that all weights and main weights equal those of the dense optimizer."""
        assert self.train(step, **options)
        self.dense.step({name: self.gradient(name, step) for name in self.params})
        now = {name: self.cuts[name].take(p.detach()) for name, p in self.dense.params.items()}
        assert [name for name, p in self.params.items() if not torch.equal(p, now[name].to(self.dtype))] == []
        for name, (start, stop), shard in shards_of(self.optimizer):
            assert torch.equal(shard, now[name].flatten()[start:stop]), f"main weights of {name}"


class Dense:
    """A dense copy of the parameters, with optimizers that have the same parameter groups as Megatron's."""

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
