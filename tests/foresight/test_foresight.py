"""Tests that plans computed without starting any ranks have exactly the same numbers of matrices, bytes and collectives
as real jobs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from every_layout import ROWS, assert_counted, compared, digests_of
from planned_jobs import DENSE, SPARSE, same_as_live
from published import decoder
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardmuon import Muon
from shardmuon.comm.groups import Traffic
from shardmuon.foresight.job import Exact
from shardmuon.foresight.models import build
from shardmuon.testing.pool import RankPool

# ---------------------------------------------------------------------------------------- plans of any layout, counted


@pytest.mark.parametrize(("world", "layout"), [(world, name) for world, names in ROWS.items() for name in names])
def test_bytes_and_messages_of_every_layout_are_those_that_its_ranks_count(world: int, layout: str) -> None:
    """The numbers of exchanges, bytes and messages in a rank's plan must equal the numbers counted on that rank while
    it takes optimizer steps."""
    found = [comparisons["dense"] for comparisons in compared(layout, world)]
    assert_counted([one.traffic for one in found], [one.about[0] for one in found])
    assert all(plan.messages == sent for plan, sent in (one.about for one in found))
    # With two replicas, each bucket takes three exchanges: gather, scatter, and relay (which sends results to the other
    # replica).
    if layout == "hsdp" and world == 4:
        assert all(one.traffic.exchanges % 3 == 0 < one.traffic.exchanges for one in found)


# ------------------------------------------------------------------------------------------ models on meshes, planned

FEW = SPARSE | {"num_experts": 2}
# In the model BLOCKS, each row of 8-bit momentum has one quantization block in some matrices and two in others.
BLOCKS = decoder(97, 150, 1, 5, 1, 30, 81)
# `bucket_bytes` counts bytes in the dtype in which ranks exchange data. With bf16 matmuls, this dtype is bf16.
AUTO: dict[str, Any] = {"bucket_bytes": 20_000}
OPTIONS: dict[str, Any] = {"method": "standard", "ns_dtype": torch.float32, **AUTO}


def _live_model(config: dict[str, Any], mesh: Any) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model, sharded by torch's own functions as in a user's script, and the `Muon` options needed for this
    sharding."""
    model: Any = build(config).to_empty(device="cpu")
    for p in model.parameters():
        nn.init.ones_(p)
    if mesh.shard == mesh.tp == 1:
        return model, {"process_group": dist.group.WORLD}
    names = [name for name in ("dp", "shard", "tp") if getattr(mesh, name) > 1]
    devices = init_device_mesh("cpu", tuple(getattr(mesh, name) for name in names), mesh_dim_names=tuple(names))
    if mesh.tp > 1:
        plan = {
            name: RowwiseParallel() if name.rpartition(".")[2] in ("o_proj", "down_proj") else ColwiseParallel()
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear)
        }
        parallelize_module(model, devices["tp"], {**plan, "model.embed_tokens": RowwiseParallel()})
    over = [name for name in names if name != "tp"]
    if mesh.ep > 1:
        share = mesh.shard // mesh.ep
        lent = init_device_mesh("cpu", (mesh.dp, share, mesh.ep), mesh_dim_names=("dp2", "efsdp", "ep"))
        for layer in model.model.layers.children():
            experts: Any = layer.mlp.experts
            for name, p in list(experts.named_parameters()):
                setattr(experts, name, nn.Parameter(distribute_tensor(p.detach(), lent["ep"], [Shard(0)])))
            axes = ("dp2", "efsdp") if mesh.dp > 1 else ("efsdp",)
            dim = 1 if share * mesh.ep > config["num_experts"] else 0
            fully_shard(experts, mesh=lent[axes], shard_placement_fn=lambda p, dim=dim: Shard(dim))
    if over:
        for layer in model.model.layers.children():
            fully_shard(layer, mesh=devices[tuple(over)])
        fully_shard(model, mesh=devices[tuple(over)])
    return model, {}


def _live(config: dict[str, Any], mesh: Any, options: dict[str, Any]) -> dict[str, Any]:
    model, given = _live_model(config, mesh)
    optimizer = Muon(model, lr=0.02, **options, **given)
    for p in model.parameters():
        p.grad = torch.ones_like(p.detach())
    plan, before = optimizer.prepare(), optimizer.traffic.since(Traffic())
    optimizer.step()
    numel = sum((p.to_local() if hasattr(p, "to_local") else p).numel() for p in model.parameters())
    state = [t for s in optimizer.state.values() for k, t in s.items() if k != "step"]
    moments = [t.to_local() if hasattr(t, "to_local") else t for t in state]
    return {
        "traffic": optimizer.traffic.since(before),
        "digests": list(digests_of(plan).values()),
        "bytes": {**dict.fromkeys(("weights", "gradients"), numel * 4), "state": sum(t.nbytes for t in moments)},
    }


@pytest.mark.parametrize(
    ("config", "mesh", "options"),
    [
        (DENSE, "dp=1", OPTIONS),
        (DENSE, "dp=3", OPTIONS),
        (DENSE, "shard=2", AUTO),
        (DENSE, "shard=3", OPTIONS),
        (DENSE, "dp=2 shard=2", OPTIONS),
        (DENSE, "tp=2", OPTIONS),
        (DENSE, "shard=2 tp=2", OPTIONS),
        (SPARSE, "shard=3", OPTIONS),
        (SPARSE, "dp=4", OPTIONS),
        (SPARSE, "shard=4 ep=2", OPTIONS),
        (FEW, "shard=4 ep=2", OPTIONS),
        (SPARSE, "dp=2 shard=2 ep=2", OPTIONS),
        (DENSE, "dp=2 shard=2 tp=2", OPTIONS),
        *((BLOCKS, "shard=3", OPTIONS | {"momentum_dtype": kept}) for kept in ("int8", torch.bfloat16)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_model_planned_without_ranks_has_the_digest_and_traffic_of_the_live_job(
    config: dict[str, Any], mesh: str, options: dict[str, Any]
) -> None:
    exact = Exact.of_job(build(config), mesh, gpus_per_node=2, device="cpu", **options)
    same_as_live(exact, RankPool.cached(exact.world).run(_live, config, exact.mesh, options))
