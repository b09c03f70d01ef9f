"""Hostile users: what ranks do differently is refused on all of them, and what is merely odd changes no bit.

Each test was written against a fault that once passed in silence, hung or aborted the process.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_faults import SHAPES, Job, _build, _error, _full, _keep, _local, _normal, _refused, _refused_first, _same
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import shardmuon.step.bucket
from shardmuon import ExchangeError, GradScaler, Muon
from shardmuon.testing import RankPool

# ------------------------------------------------------------------------------------ what one rank does otherwise


def _cast_weights() -> str:
    """fp64 on one rank: it would put 8 bytes an element on the wire, the others 4 (gloo then aborts the process)."""
    job = Job("ddp")
    job.step(1)
    before = job.snapshot()
    job.set_gradients(2)
    if dist.get_rank() == 1:
        p = job.params["first"]
        grad, p.grad, p.data = p.grad, None, p.data.double()
        p.grad = grad.double()
    text = _error(job.optimizer.step)
    if dist.get_rank() == 1:
        job.params["first"].grad, job.params["first"].data = None, job.params["first"].data.float()
    _same(before, job.snapshot())
    job.step(3)
    return text


def test_weights_cast_on_one_rank_are_refused_before_they_travel(world4: RankPool) -> None:
    for text in world4.run(_cast_weights):
        assert "rank 0 lists weights=torch.float32, rank 1 lists weights=torch.float64" in text


def _scale(value: float) -> Callable[[int, int], float]:
    return lambda rows, cols: value


def _closures() -> str:
    job = Job("fsdp2")
    job.step(1)
    job.set_gradients(2)
    repair = _keep(job)
    job.optimizer.param_groups[0]["adjust_lr_fn"] = _scale(0.2 if dist.get_rank() else 0.3)
    text = _refused(job)
    repair()
    for optimizer in (job.optimizer, job.dense):  # the same values from another object are the same
        optimizer.param_groups[0]["adjust_lr_fn"] = _scale(0.2)
    job.step(3)
    return text


def test_learning_rate_scales_are_compared_by_value(world2: RankPool) -> None:
    for text in world2.run(_closures):
        assert "rank 0: adjust_lr_fn(9,7)=0.3; rank 1: adjust_lr_fn(9,7)=0.2" in text


def _crossed(same_shape: bool) -> list[str]:
    """Two optimizers (GAN), stepped in another order on one rank."""
    one, two = Job("fsdp2"), Job("fsdp2")
    if not same_shape:
        one.optimizer = Muon([("first", one.params["first"])], lr=0.1)
        one.dense = Muon([one.whole["first"]], lr=0.1)
    for job in (one, two):
        job.set_gradients(1)
        job.optimizer.step()
        job.dense.step()
    for job in (one, two):
        job.set_gradients(2)
    texts = [_refused(job) for job in ((one, two) if dist.get_rank() == 1 else (two, one))]
    for job in (one, two):
        job.step(3)
    return texts


@pytest.mark.parametrize("same_shape", [False, True])
def test_optimizers_stepped_in_another_order_on_one_rank_are_refused(same_shape: bool, world4: RankPool) -> None:
    for texts in world4.run(_crossed, same_shape):
        assert all("hold different plans. If there are several optimizers, step them in one order" in t for t in texts)


def _swapped_groups(named: bool) -> str:
    """Two groups of options, listed the other way round on one rank; without names their options still tell."""
    full = {"one": _normal(8, 8, seed=1), "two": _normal(8, 8, seed=2)}
    params = {n: nn.Parameter(t) for n, t in _build("fsdp2", full).items()}
    groups = [{"params": [(n, p) if named else p], "lr": 0.1 * (i + 1)} for i, (n, p) in enumerate(params.items())]
    optimizer = Muon(groups[::-1] if dist.get_rank() == 1 else groups, lr=1e-3)
    for p in params.values():
        p.grad = p.detach().clone()
    return _refused_first(optimizer)


@pytest.mark.parametrize("named", [True, False])
def test_groups_in_another_order_on_one_rank_are_refused(named: bool, world2: RankPool) -> None:
    for text in world2.run(_swapped_groups, named):
        assert ('differently: rank 0 lists "one: (8, 8)' if named else "rank 0: lr=0.1; rank 1: lr=0.2") in text
        assert not named or 'rank 1 lists "two: (8, 8)' in text


def _two_groups_of_the_same_ranks() -> str:
    """Each of the parameters would talk in its own mesh's group: which one, must not depend on their order."""
    rank = dist.get_rank()
    inner = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]
    made = [dist.new_group(ranks, timeout=timedelta(seconds=10)) for ranks in ([0, 1], [2, 3])]
    other = DeviceMesh.from_group(made[rank // 2], "cpu")
    assert inner.get_group() is not other.get_group()
    full = [_normal(8, 6, seed=1), _normal(6, 6, seed=2)]
    params = [
        nn.Parameter(distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None))
        for t, mesh in zip(full, (inner, other), strict=True)
    ]
    for p in params:
        p.grad = p.detach().clone()
    text = _error(Muon(params if rank % 2 else params[::-1], lr=0.1).step)
    Muon(params, lr=0.1).step()
    return text


def test_another_order_on_two_groups_of_the_same_ranks_is_refused(world4: RankPool) -> None:
    for text in world4.run(_two_groups_of_the_same_ranks):
        assert "share parameters but describe them differently" in text


def _inference() -> str:
    """Momentum made under inference mode: the update would raise on all ranks but the last, which holds nothing."""
    full = {"p": _normal(3, 6, seed=1)}
    p = nn.Parameter(_build("fsdp2", full)["p"])
    optimizer = Muon([("p", p)], lr=0.1)
    p.grad = p.detach().clone()
    with torch.inference_mode():
        optimizer.step()
    before = _local(p).clone()
    text = _error(optimizer.step)
    assert torch.equal(before, _local(p))
    return text


def test_momentum_made_under_inference_mode_is_refused_on_all_ranks(world4: RankPool) -> None:
    for text in world4.run(_inference):
        assert text == (
            "ranks 0,1,2,3: p: its momentum_buffer was made under torch.inference_mode() and cannot be updated "
            "outside. Step under torch.no_grad()"
        )


def _cast_model(layout: str) -> str:
    job = Job(layout)
    job.step(1)
    for p in job.params.values():
        p.data = p.data.to(torch.bfloat16)
    for name, grad in _build(layout, _full(2)).items():
        job.params[name].grad = grad.to(torch.bfloat16)
    return _refused(job)


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_a_model_cast_midway_is_refused_before_anything_changes(layout: str, world4: RankPool) -> None:
    for text in world4.run(_cast_model, layout):
        assert "bias: its gradient is torch.bfloat16, its exp_avg torch.float32, which AdamW cannot mix" in text


# --------------------------------------------------------------------------------------------- odd, but harmless


def _expand(job: Job) -> None:
    """Gradients whose rows are one row in memory, as `weight.sum()` gives them."""
    for name in ("first", "second"):
        shape = SHAPES[name]
        row = _normal(1, shape[1], seed=4)
        p = job.params[name]
        rows = row.expand(_local(p).shape[0], -1)
        p.grad = DTensor.from_local(rows, p.device_mesh, [Shard(0)], run_check=False, shape=shape, stride=(shape[1], 1))
        job.whole[name].grad = row.repeat(shape[0], 1)


def _transpose(job: Job) -> None:
    for name in ("first", "second"):
        local = job.params[name].grad._local_tensor
        job.params[name].grad._local_tensor = local.T.contiguous().T


def _double_default(job: Job) -> None:
    torch.set_default_dtype(torch.float64)


def _deterministic_algorithms(job: Job) -> None:
    torch.use_deterministic_algorithms(True)


def _tensor_lr(job: Job) -> None:
    for optimizer in (job.optimizer, job.dense):
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(float(group["lr"]), requires_grad=True)


def _autocast(job: Job) -> None:
    step = job.optimizer.step

    def under_autocast() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            step()

    job.optimizer.step = under_autocast  # type: ignore[method-assign, assignment]


ODD = (_expand, _transpose, _double_default, _deterministic_algorithms, _tensor_lr, _autocast)


def _odd(change: Callable[[Job], None]) -> None:
    job = Job("fsdp2")
    try:
        for seed in (1, 2, 3):
            job.set_gradients(seed)
            if seed == 2:
                change(job)
            job.optimizer.step()
            job.dense.step()
            torch.set_default_dtype(torch.float32)
            job.check()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("change", ODD, ids=lambda change: change.__name__)
def test_odd_but_harmless_changes_no_bit(change: Callable[[Job], None], world4: RankPool) -> None:
    world4.run(_odd, change)


def _copied(how: str) -> None:
    job = Job("fsdp2")
    job.step(1)
    if how == "deepcopy":
        job.params, job.optimizer = copy.deepcopy((job.params, job.optimizer))
    else:
        job.params, job.optimizer = pickle.loads(pickle.dumps((job.params, job.optimizer)))
    job.step(2)
    job.step(3)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copied_optimizer_goes_on_with_the_same_bits(how: str, world4: RankPool) -> None:
    world4.run(_copied, how)


def test_gradients_that_are_one_tensor_are_not_written_to() -> None:
    a, b, gradient = (nn.Parameter(_normal(8, 8, seed=1)), nn.Parameter(_normal(8, 8, seed=2)), _normal(8, 8, seed=3))
    a.grad = b.grad = gradient
    before = gradient.clone()
    Muon([a, b], lr=0.1, weight_decay_mode="l2").step()
    assert torch.equal(gradient, before)


def _retries(optimizer: Muon) -> None:
    """A loop that tries again when memory is short."""
    with contextlib.suppress(torch.OutOfMemoryError):
        optimizer.step()


def _scaled(optimizer: Muon) -> None:
    scaler = GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    with contextlib.suppress(torch.OutOfMemoryError):
        scaler.step(optimizer)


def _interrupted(optimizer: Muon) -> None:
    """A cell of a notebook that is stopped."""
    with contextlib.suppress(KeyboardInterrupt):
        optimizer.step()


@pytest.mark.parametrize(
    ("loop", "error", "named"),
    [
        (_retries, torch.OutOfMemoryError("no memory left"), "OutOfMemoryError: no memory left. "),
        (_scaled, torch.OutOfMemoryError("no memory left"), "OutOfMemoryError: no memory left. "),
        (_interrupted, KeyboardInterrupt(), "KeyboardInterrupt. "),
    ],
)
def test_a_loop_that_goes_on_after_half_a_step_is_told_what_happened_and_what_to_do(
    loop: Callable[[Muon], None], error: BaseException, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The momentum has moved: another try would move it twice."""
    p = nn.Parameter(_normal(6, 4, seed=1))
    p.grad = _normal(6, 4, seed=2)
    optimizer = Muon([p], lr=0.1)
    before = p.detach().clone()

    def fail(*args: Any) -> Tensor:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(shardmuon.step.bucket, "_orthogonalize", fail)
        loop(optimizer)
    moved = optimizer.state[p]["momentum_buffer"].clone()
    for _ in range(2):
        with pytest.raises(ExchangeError) as refused:
            loop(optimizer)
        assert f"broken off: {named}Weights and momentum may be half updated" in str(refused.value)
        assert "accept them as they are: optimizer.broken = None" in str(refused.value)
    assert torch.equal(p, before)
    assert torch.equal(optimizer.state[p]["momentum_buffer"], moved)
    optimizer.broken = None
    optimizer.step()
    assert not torch.equal(p, before)
