"""Tests of memory: upper bounds on the memory of the optimizer state and of a step, CPU offloading, and momentum stored
on the CPU."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from jobs import Job, Spec, as_in
from live_bytes import peak_of
from on_ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DeviceMesh, DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from shardmuon import Muon
from shardmuon.comm import groups
from shardmuon.foresight.job import Exact
from shardmuon.layout.engines import engine_of
from shardmuon.momentum.keeper import offloaded_from
from shardmuon.testing.layouts import LAYOUTS, mesh_of, meshes_on
from shardmuon.testing.pool import RankPool

BF16, FP32 = torch.bfloat16, torch.float32
MIB = 2**20


# ------------------------------------------------------------------------------------------- what a step allocates

SHAPES = [(128, 256)] * 16 + [(256, 128)] * 8 + [(128, 128)] * 12


def _step_peak(layout: str, bucket_bytes: int, options: dict[str, Any]) -> tuple[int, int]:
    """Return the peak memory of the second step, and the peak that `shardmuon plan` estimates for this step, both in
    bytes. Matmuls and exchanges are in fp32."""
    given: dict[str, Any] = {"bucket_bytes": bucket_bytes, "ns_steps": 1, "method": "standard", "ns_dtype": FP32}
    given |= options | LAYOUTS[layout].options(dist.get_world_size())
    job = Job([{"params": [Spec(f"w{i}", shape, as_in(layout)) for i, shape in enumerate(SHAPES)]}], **given)
    job.step(1)
    peak, plan = peak_of(job.optimizer.step), job.optimizer.plan
    assert plan is not None
    (said,) = (c.peak for c in Exact.of_plan(plan).classes if dist.get_rank() in c.ranks)
    return peak, said


@pytest.mark.parametrize(
    ("layout", "world", "options"),
    [
        ("fsdp2", 2, {}),
        ("fsdp2", 2, {"momentum_dtype": "int8"}),
        ("ddp", 2, {}),
        ("hsdp", 4, {}),
        ("fsdp2", 2, {"method": "gram"}),
    ],
    ids=str,
)
def test_a_step_takes_two_buckets_and_the_work_space(layout: str, world: int, options: Any) -> None:
    sizes = (MIB // 8, MIB // 2)
    small, large = (RankPool.cached(world).run(_step_peak, layout, size, options) for size in sizes)
    # The momentum update works on at most 2**17 elements at a time, regardless of the bucket size.
    portion = 2 * MIB if "momentum_dtype" in options else MIB // 2
    # `num` is an upper limit on the peak memory, in units of the bucket size. Two buckets and the workspace take three
    # units. Exchanged data takes another three, or up to twelve with two replicas.
    num = 3 * (1 + (1 if layout == "fsdp2" else 4))
    for size, found in zip(sizes, (small, large), strict=True):
        assert all(peak <= min(said, num * size + portion) for peak, said in found)
    # A smaller bucket limit must not increase the peak. The peaks may be equal, because the planner chooses bucket
    # sizes by estimated time and may stay below the limit.
    assert max(p for p, *_ in small) <= max(p for p, *_ in large)


# --------------------------------------------------------------------------------------------------- with FSDP2


def _net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(24, 33, bias=False), nn.ReLU(), nn.Linear(33, 8, bias=False))


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ({"offload_policy": CPUOffloadPolicy(pin_memory=False)}, {}),
        ({"offload_policy": CPUOffloadPolicy(pin_memory=False)}, {"momentum_device": "cpu"}),
        ({"mp_policy": MixedPrecisionPolicy(param_dtype=BF16)}, {}),
        ({"mp_policy": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)}, {}),
    ],
    ids=["offload", "offload, all on the CPU", "bf16 compute", "bf16 compute and reduction"],
)
@on_ranks(2)
def test_fsdp_policies_keep_fp32_masters_and_exact_updates(policy: dict[str, Any], options: dict[str, Any]) -> None:
    """Compare three steps of an FSDP2 model with a single-process run on the same gradients. All weights, gradients and
    momentum must be fp32 and on the CPU."""
    net, twin = _net(), _net()
    fully_shard(net, mesh=mesh_of((dist.get_world_size(),)), **policy)
    ours = Muon(list(net.named_parameters()), lr=0.02, **options)
    dense = Muon(list(twin.named_parameters()), lr=0.02)
    for number in range(3):
        x = torch.randn(16, 24, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
        net(x).square().mean().backward()
        for p, q in zip(net.parameters(), twin.parameters(), strict=True):
            q.grad = p.grad.full_tensor()  # type: ignore[union-attr]
        ours.step()
        dense.step()
        for p, q in zip(net.parameters(), twin.parameters(), strict=True):
            kept = p, p.grad, ours.state[p]["momentum_buffer"]
            assert all(isinstance(t, DTensor) and (t.dtype, t.device.type) == (FP32, "cpu") for t in kept)
            assert torch.equal(p.full_tensor(), q)  # type: ignore[attr-defined]
        net.zero_grad()


@on_ranks(2)
def test_state_of_offloaded_parameters_stays_on_the_cpu() -> None:
    """The state of offloaded parameters must be created on the CPU. The test needs no CUDA device: it builds the
    DTensor that CPUOffloadPolicy would create on a CUDA mesh, with its storage on the CPU."""
    mesh = DeviceMesh("cuda", torch.arange(dist.get_world_size()), _init_backend=False)
    spec = DTensorSpec(mesh, (Shard(0),), TensorMeta(torch.Size((4, 4)), (4, 1), torch.float32))
    w = nn.Parameter(DTensor(torch.ones(2, 4), spec, requires_grad=False))
    with mock.patch.object(torch.cuda, "current_device", return_value=0):
        home = offloaded_from(w)
    wrapped = engine_of(w).wrap(torch.zeros(2, 1), w, (4, 1))
    assert isinstance(wrapped, DTensor)
    assert (str(home), str(wrapped.to_local().device), tuple(wrapped.shape)) == ("cuda:0", "cpu", (4, 1))


@pytest.mark.parametrize(
    ("config", "preferred", "wire", "talk"),
    [
        # The gloo backend has no all-to-all for CUDA tensors, so exchanges use CPU buffers.
        ("cpu:gloo,cuda:gloo", "cuda", "cpu", "cpu"),
        ("cpu:gloo,cuda:nccl", "cuda", "cuda", "cpu"),
        ("cuda:nccl", "cuda", "cuda", "cuda:1"),
        ("cuda:nccl", None, "cuda:1", "cuda:1"),
        ("cpu:gloo,cuda:nccl", None, "cpu", "cpu"),
    ],
)
def test_buffers_live_where_the_group_can_move_them(
    config: str, preferred: str | None, wire: str, talk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "group_for", lambda ranks: None)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    cpu, there = torch.device("cpu"), None if preferred is None else torch.device(preferred)
    assert groups.wire_device(cpu, (0, 1), there) == torch.device(wire)
    assert groups.wire_device(cpu, (0, 1)) == torch.device(talk)
    assert groups.wire_device(cpu, (0,), there) == (there or cpu)


def _offloaded_over_nccl() -> bool:
    """Take one step with FSDP2's CPU offloading and NCCL as the only backend. Return whether every weight has changed
    and is still on the CPU."""
    net = _net().cuda()
    with meshes_on("cuda"):
        fully_shard(net, mesh=mesh_of((1,)), offload_policy=CPUOffloadPolicy())
    optimizer = Muon(list(net.named_parameters()), lr=0.02)
    net(torch.randn(4, 24, device="cuda")).square().mean().backward()
    before = [p.detach().clone() for p in net.parameters()]
    optimizer.step()
    return all(
        p.device.type == "cpu" and not torch.equal(a.to_local(), p.to_local())
        for a, p in zip(before, net.parameters(), strict=True)
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_offloaded_shards_are_stepped_over_nccl_alone() -> None:
    with RankPool(1, backend="nccl") as pool:
        assert pool.run(_offloaded_over_nccl) == [True]
