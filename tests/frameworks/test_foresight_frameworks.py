"""Jobs of ZeRO and Megatron, planned without ranks: digests, traffic and stored bytes are the live job's."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from every_layout import digests_of
from megatron_gpt import gpt, half, megatron, needs_megatron, optimizer_config
from planned_jobs import DENSE, same_as_live
from published import decoder
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardmuon import Exchange, Muon, Orthogonalizer, Storage, param_groups
from shardmuon.comm.groups import Traffic
from shardmuon.foresight.job import count
from shardmuon.foresight.models import build, modules_of
from shardmuon.frameworks.megatron import get_megatron_optimizer
from shardmuon.testing.frameworks import initialize
from shardmuon.testing.pool import RankPool, get_pool

ODD = decoder(97, 50, 2, 5, 1, 10, 81)  # flat buffers are padded on any number of ranks
CONFIGS = {"dense": DENSE, "odd": ODD}
STANDARD = Orthogonalizer("standard", torch.float32)
OPTIONS: dict[str, Any] = {"orthogonalizer": STANDARD, "exchange": Exchange(bucket_bytes=20_000)}
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages that tensors lie in, each once."""
    storages = [t.untyped_storage() for t in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in storages if s.nbytes()}.values())


# --------------------------------------------------------------------------------------------------------------- ZeRO


class _Given(nn.Module):
    """A model's parameters, and a loss whose gradients are ones."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        for name, p in model.named_parameters():
            self.register_parameter(name.replace(".", "_"), p)

    def forward(self) -> Tensor:
        return torch.stack([p.float().sum() for p in self.parameters()]).sum()


def _live_zero(config: dict[str, Any], number: int, weights: torch.dtype) -> dict[str, Any]:
    model: Any = build(config, "cpu")
    for p in model.parameters():
        nn.init.normal_(p)
    optimizer = Muon(param_groups(model, lr=0.02), lr=0.02, **OPTIONS)
    settings: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": number}}
    if weights == torch.bfloat16:
        settings["bf16"] = {"enabled": True}
    given = _Given(model)
    engine = initialize(given, optimizer, settings)
    for _ in range(2):
        engine.backward(engine())
        before = optimizer.traffic.since(Traffic())
        engine.step()
    inner = engine.optimizer
    masters = inner.fp32_partitioned_groups_flat if number == 3 else inner.single_partition_of_fp32_groups
    second = nbytes(s["exp_avg_sq"] for s in optimizer.state.values() if not _is_zero(s["exp_avg_sq"]))
    zeros = sum(_is_zero(s["exp_avg_sq"]) for s in optimizer.state.values())
    found = {
        "traffic": optimizer.traffic.since(before),
        "digests": [digest for plan in optimizer.plans for digest in digests_of(plan).values()],
        "bytes": {
            "weights": nbytes(p.ds_tensor if number == 3 else p for p in given.parameters()),
            "masters": nbytes(masters),
            "moments": 2 * second,
            "momentum": nbytes(s["exp_avg"] for s in optimizer.state.values()) - second,
        },
        "zeros": zeros,
    }
    engine.destroy()
    return found


def _is_zero(second: Tensor) -> bool:
    """True for the one zero that stands for the second moment of matrices."""
    return second.untyped_storage().nbytes() == second.element_size()


ZERO = [
    (2, 4, "dense", torch.bfloat16),
    (3, 4, "dense", torch.float32),
    (1, 3, "odd", torch.bfloat16),
    (2, 3, "odd", torch.float32),
    (3, 2, "odd", torch.bfloat16),
]


@needs_deepspeed
@pytest.mark.parametrize(("stage", "world", "config", "weights"), ZERO, ids=str)
def test_zero_is_planned_as_deepspeed_cuts_and_keeps_it(
    stage: int, world: int, config: str, weights: torch.dtype, deepspeed_pools: dict[int, RankPool]
) -> None:
    options = {"engine": f"zero{stage}", "gpus_per_node": 2, "device": "cpu", "weights": weights, **OPTIONS}
    exact = count(build(CONFIGS[config]), f"dp={world}", **options)
    found = deepspeed_pools[world].run(_live_zero, CONFIGS[config], stage, weights)
    same_as_live(exact, found)
    assert all(live["zeros"] for live in found)


@pytest.mark.parametrize("engine", ["zero2", "megatron"])
def test_a_storage_that_the_engine_refuses_is_not_planned(engine: str) -> None:
    storage = Storage(momentum_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"keeps fp32 momentum and weights itself, and refuses .* Leave storage out"):
        count(build(DENSE), "dp=2", engine=engine, storage=storage)


# ---------------------------------------------------------------------------------------------------- 8-bit momentum


def _momentum_bytes(config: dict[str, Any], kept: Any) -> int:
    model: Any = build(config, "cpu")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = Muon(model, lr=0.02, orthogonalizer=STANDARD, storage=Storage(momentum_dtype=kept))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    kinds = ("momentum_buffer", "momentum_scale")
    return nbytes(s[key].to_local() for s in optimizer.state.values() for key in kinds if key in s)


@pytest.mark.parametrize("kept", ["int8", torch.bfloat16], ids=str)
def test_momentum_of_another_dtype_is_counted_with_its_scales(kept: Any, world3: RankPool) -> None:
    config = decoder(97, 150, 1, 5, 1, 30, 81)  # rows of one and of two blocks of 128
    exact = count(build(config), "shard=3", device="cpu", storage=Storage(momentum_dtype=kept))
    by_rank = {rank: c for c in exact.classes for rank in c.ranks}
    assert [by_rank[rank].stored.momentum for rank in range(3)] == world3.run(_momentum_bytes, config, kept)


# ----------------------------------------------------------------------------------------------------------- Megatron


def megatron_shapes(num_layers: int) -> nn.Module:
    """Whole shapes under Megatron's names, of the model that `gpt` makes: 4 heads of 6 in 2 query groups."""
    of_layer = {
        "input_layernorm": (24,),
        "self_attention.linear_proj": (24, 24),
        "self_attention.linear_qkv": (2 * (12 + 6 + 6), 24),
        "pre_mlp_layernorm": (24,),
        "mlp.linear_fc1": (2 * 44, 24),
        "mlp.linear_fc2": (24, 44),
    }
    layers = {f"decoder.layers.{i}.{name}": shape for i in range(num_layers) for name, shape in of_layer.items()}
    others = {"decoder.final_layernorm": (24,), "output_layer": (32, 24)}
    shapes = {"embedding.word_embeddings": (32, 24), **layers, **others}
    return modules_of({f"{name}.weight": shape for name, shape in shapes.items()}, {})


MEGATRONS: dict[str, Any] = {"ns_coefficients": "quintic"}  # `OptimizerConfig.muon_coefficient_type`


def _live_megatron(num_layers: int, weights: torch.dtype, exchange: Exchange) -> dict[str, Any]:
    with megatron(tensor_model_parallel_size=2):
        given = {"num_layers": num_layers, "tensor_model_parallel_size": 2, **half(weights)}
        model = gpt(0, ddp={"use_distributed_optimizer": True}, calculate_per_token_loss=True, **given)
        config = optimizer_config(clip_grad=0.0, use_distributed_optimizer=True, **half(weights))
        options: dict[str, Any] = {"orthogonalizer": STANDARD, "exchange": exchange}
        outer = get_megatron_optimizer(config, [model], adamw_lr=0.01, **options)
        (part,) = outer.chained_optimizers
        for _ in range(2):
            model.zero_grad_buffer()
            outer.zero_grad()
            for p in model.parameters():
                p.main_grad.fill_(1.0)
            model.finish_grad_sync()
            before = part.optimizer.traffic.since(Traffic())
            outer.step()
        muon = part.optimizer
        states = list(muon.state.values())
        of_weights = nbytes(model.parameters())
        shards = [p for g in (*part.shard_fp32_groups, *part.shard_fp32_from_float16_groups) for p in g]
        return {
            "traffic": muon.traffic.since(before),
            "digests": [digest for plan in muon.plans for digest in digests_of(plan).values()],
            "bytes": {
                "weights": of_weights,
                "gradients": nbytes(p.main_grad for p in model.parameters()),
                "masters": nbytes([*model.parameters(), *shards]) - of_weights,  # fp32 weights are their own
                "momentum": nbytes(s["momentum_buffer"] for s in states if "momentum_buffer" in s),
                "moments": nbytes(s[key] for s in states for key in ("exp_avg", "exp_avg_sq") if key in s),
            },
        }


@needs_megatron
@pytest.mark.parametrize(("weights", "num_layers"), [(torch.float32, 3), (torch.bfloat16, 4)], ids=str)
def test_a_whole_model_under_megatrons_distributed_optimizer_is_planned_as_it_runs(
    weights: torch.dtype, num_layers: int
) -> None:
    """Fused q, k, v and gated layers, tensor parallel 2 x data parallel 2."""
    fused = {"*linear_qkv.weight": {"split_sizes": (12, 6, 6), "split_groups": 2}}
    exchange = Exchange(bucket_bytes=6_000)
    given = {"device": "cpu", "weights": weights, "overrides": fused, **OPTIONS, **MEGATRONS, "exchange": exchange}
    exact = count(megatron_shapes(num_layers), "dp=2 tp=2", engine="megatron", **given)
    same_as_live(exact, get_pool(4).run(_live_megatron, num_layers, weights, exchange))
