"""Tests that training loops with micro-batches, unused layers and loss scaling give the same update as a single
process.

The gradients of these models are small integers, so that sums are exact in any order.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import Job, Spec, as_in, unlike, whole
from on_ranks import on_ranks
from tolerances import assert_bitwise
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from shardmuon import GradScaler, Muon, clip_grad_norm_
from shardmuon._torch import local_if_any
from shardmuon.testing.layouts import LAYOUTS, mesh_of

# ------------------------------------------------------------------------------------------- a model with a loop


class _Net(nn.Module):
    """A model with integer weights. Some batches skip the layer `side`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.side = nn.Linear(8, 8)
        self.last = nn.Linear(8, 4, bias=False)
        with torch.no_grad():
            for i, p in enumerate(self.parameters()):
                p.copy_(_whole(*p.shape, seed=i))

    def forward(self, x: Tensor, side: bool = True) -> Tensor:
        x = self.first(x)
        return self.last(x + self.side(x) if side else x)


def _whole(*shape: int, seed: int) -> Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def _batch(step: int, micro: int, rank: int) -> Tensor:
    return _whole(2, 6, seed=1000 * step + 100 * micro + rank)


# In step UNUSED (counted from 0), no batch uses the layer `side`.
UNUSED = 1
MICROS = 3


def _trained(engine: str, set_to_none: bool, sync_every: bool) -> list[Tensor]:
    """Take three steps and return the weights. Gradients are summed over micro-batches and averaged over ranks.

    `engine` is "ddp", "fsdp2" or "hsdp" on several ranks, or "alone" for a single process.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    net = _Net()
    model: Any = DistributedDataParallel(net, find_unused_parameters=True) if engine == "ddp" else net
    if engine in ("fsdp2", "hsdp"):
        mesh = mesh_of((world,)) if engine == "fsdp2" else mesh_of((2, world // 2))
        fully_shard(net.side, mesh=mesh)
        fully_shard(net, mesh=mesh)
    kinds = ([(n, p) for n, p in net.named_parameters() if (p.ndim > 1) == use] for use in (True, False))
    groups = [{"params": kind, "use_muon": use} for kind, use in zip(kinds, (True, False), strict=True)]
    group = dist.group.WORLD if engine == "ddp" else None
    optimizer = Muon(groups, lr=0.25, weight_decay=0.0, process_group=group)
    for step in range(3):
        for micro in range(MICROS):
            syncs = sync_every or micro == MICROS - 1
            if isinstance(net, FSDPModule):
                net.set_requires_gradient_sync(syncs)
            with model.no_sync() if engine == "ddp" and not syncs else contextlib.nullcontext():
                for of in range(world) if engine == "alone" else [rank]:
                    model(_batch(step, micro, of), step != UNUSED).sum().div(
                        world if engine == "alone" else 1
                    ).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        with torch.no_grad():
            # Rounding the weights to multiples of 1/4 keeps the gradients of the next step exact.
            for local in map(local_if_any, net.parameters()):
                local.copy_((local * 4).round().clamp(-8, 8) / 4)
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach() for p in net.parameters()]


@pytest.mark.parametrize(
    ("engine", "set_to_none", "sync_every"),
    [("ddp", True, False), ("ddp", False, True), ("fsdp2", True, True), ("fsdp2", False, False), ("hsdp", True, False)],
)
@on_ranks(4)
def test_micro_batches_and_a_layer_that_a_batch_does_not_use_give_the_update_of_one_process(
    engine: str, set_to_none: bool, sync_every: bool
) -> None:
    assert_bitwise(*(_trained(how, set_to_none, sync_every) for how in (engine, "alone")))


# ------------------------------------------------------------------------------------------------ loss scaling


def _scaled(layouts: Sequence[str], vectors_only: bool) -> list[dict[str, Any]]:
    """Return parameter groups for a test of loss scaling. The three matrix parameters use the given layouts in
    rotation."""
    rest = as_in({"ddp": "ddp", "tp": "replicate"}.get(layouts[0], "fsdp2"))
    vectors = {"params": [Spec("bias", (9,), rest), Spec("gain", (3,), rest)], "lr": 0.01, "use_muon": False}
    first, second, third = itertools.islice(itertools.cycle(map(as_in, layouts)), 3)
    matrices = [Spec("first", (9, 7), first), Spec("second", (6, 10), second)]
    stacks = {"params": [Spec("stack", (4, 3, 5), third)], "view": "stack"}
    return [vectors] if vectors_only else [vectors, {"params": matrices}, stacks]


def _scaler(kind: type = GradScaler, **options: Any) -> Any:
    scaler = kind("cpu", init_scale=1024.0, growth_interval=2, **options)
    # The first call to `scale` creates the scale tensor. In a real training loop, this happens when the loss is scaled.
    scaler.scale(torch.ones(()))
    return scaler


@pytest.mark.parametrize(
    ("layouts", "clip", "vectors_only"),
    [
        *((["ddp"], False, False), (["fsdp2"], True, False), (["hsdp"], False, False), (["tp"], True, False)),
        *((["hsdp+tp"], False, False), (["fsdp2", "hsdp", "tp"], True, False), (["ep+fsdp"], False, False)),
        (["fsdp2"], False, True),
    ],
)
@on_ranks(4)
def test_scaled_steps_are_bitwise_unscaled_ones_and_infinite_ones_are_skipped_by_all_ranks(
    layouts: list[str], clip: bool, vectors_only: bool
) -> None:
    bad, value = ("bias", float("nan")) if clip else ("bias" if vectors_only else "first", float("inf"))
    groups, scales = _scaled(layouts, vectors_only), []
    job, dense, scaler = Job(groups, **LAYOUTS[layouts[0]].options(dist.get_world_size())), whole(groups), _scaler()
    for seed in range(1, 6):
        # Infinite or NaN gradients make the scaler skip the steps with seeds 1 and 4. In the step with seed 1, the
        # optimizer has no state yet.
        infinite = seed in (1, 4)
        job.set_gradients(seed)
        dense.set_gradients(seed)
        for p, spec in job.specs.items():
            grad = local_if_any(p.grad).mul_(scaler.get_scale())
            if infinite and spec.name == bad and dist.get_rank() == 1:
                grad.view(-1)[-1] = value
        before = job.held(gradients=False)
        if clip:
            scaler.unscale_(job.optimizer)
            clip_grad_norm_(job.optimizer, 1.0)
        scaler.step(job.optimizer)
        scaler.update()
        if infinite:
            assert not unlike(before, job.held(gradients=False))
        else:
            if clip:
                clip_grad_norm_(dense.optimizer, 1.0)
            dense.step()
        assert not job.unlike_whole(dense.named())
        scales.append(scaler.get_scale())
    assert scales == [512.0, 512.0, 1024.0, 512.0, 512.0]


@on_ranks(4)
def test_ranks_that_share_nothing_with_the_bad_gradient_skip_and_lower_their_scale() -> None:
    """Ranks 2 and 3 have no gradients and share no parameter with rank 0, whose gradient is infinite. They must still
    skip the step and lower their scale."""
    rank, mesh = dist.get_rank(), mesh_of((2, 2))
    param = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh["a1"], [Shard(0)], src_data_rank=None))
    optimizer, scaler = Muon([param], lr=0.1), _scaler()
    if rank < 2:
        param.grad = distribute_tensor(torch.ones(4, 4), mesh["a1"], [Shard(0)], src_data_rank=None)
    if rank == 0:
        local_if_any(param.grad)[0, 0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(local_if_any(param), torch.ones(2, 4)) and not optimizer.state
    assert scaler.get_scale() == 512.0


@pytest.mark.parametrize(("kind", "said"), [("fp16", "reduce_dtype=torch.float32"), ("sparse", "Use sparse=False")])
@on_ranks(3)
def test_gradients_that_cannot_be_unscaled_on_one_rank_are_refused_on_all(kind: str, said: str) -> None:
    param = nn.Parameter(torch.zeros(4, 4, dtype=torch.float16 if kind == "fp16" and dist.get_rank() == 1 else None))
    param.grad = torch.ones_like(param)
    if kind == "sparse" and dist.get_rank() == 1:
        param.grad = torch.ones(4, 4).to_sparse()
    with pytest.raises(ValueError, match=f"(?s)w: its gradient is.*{said}"):
        _scaler().step(Muon([("w", param)], lr=1e-3))


def test_torchs_question_for_infinities_alone_takes_fp16_gradients() -> None:
    """`GradScaler` calls `_check_inf_per_device` for optimizers that unscale gradients themselves. This check must
    accept fp16 gradients, because it does not modify them."""
    params = [nn.Parameter(torch.zeros(4, 4, dtype=torch.float16)) for _ in range(2)]
    params[0].grad = torch.full((4, 4), 2.0, dtype=torch.float16)
    scaler, optimizer = _scaler(), Muon([("a", params[0]), ("b", params[1])], lr=1e-3)
    assert [float(found) for found in scaler._check_inf_per_device(optimizer).values()] == [0.0]
    params[1].grad = torch.full((4, 4), torch.inf, dtype=torch.float16)
    assert [float(found) for found in scaler._check_inf_per_device(optimizer).values()] == [1.0]
    assert torch.equal(params[0].grad, torch.full((4, 4), 2.0, dtype=torch.float16))


def test_a_disabled_scaler_only_steps_and_others_are_saved_and_loaded_as_torchs() -> None:
    param = nn.Parameter(torch.zeros(2, 2))
    param.grad = torch.eye(2)
    optimizer, scaler = Muon([param], lr=1.0, weight_decay=0.0), GradScaler("cpu", enabled=False)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(param.grad, torch.eye(2)) and param.detach().abs().max() > 0.5
    ours, torchs = _scaler(), _scaler(torch.amp.GradScaler)
    ours.update(64.0)
    torchs.load_state_dict(ours.state_dict())
    assert torchs.get_scale() == 64.0
