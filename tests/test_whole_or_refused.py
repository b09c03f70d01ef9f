"""A step is done whole, changes nothing, or is the last; process groups, fingerprints and plans that this rests on."""

from __future__ import annotations

import contextlib
import copy
import inspect
import pickle
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

import shardmuon.orthogonalize
import shardmuon.step.bucket
from shardmuon import Exchange, ExchangeError, Muon, Orthogonalizer, Storage
from shardmuon._torch import new_group_among, timeout_of
from shardmuon.comm.groups import group_for
from shardmuon.momentum.keeper import Keeper
from shardmuon.step.binding import fingerprint
from shardmuon.testing import RankPool
from shardmuon.testing.layouts import mesh_of


def _normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --------------------------------------------------------------------------------------------- one process


def _fail(*args: Any, **kwargs: Any) -> Any:
    raise torch.OutOfMemoryError("no more")


def test_a_step_that_failed_in_one_process_is_the_last_until_state_is_loaded() -> None:
    p, q = (nn.Parameter(_normal(6, 8, seed=1)) for _ in range(2))
    optimizer, reference = Muon([p], lr=0.1), Muon([q], lr=0.1)
    p.grad, q.grad = _normal(6, 8, seed=2), _normal(6, 8, seed=2)
    optimizer.step()
    reference.step()
    saved, weight = copy.deepcopy(optimizer.state_dict()), p.detach().clone()
    with mock.patch.object(shardmuon.step.bucket, "orthogonalize", _fail), pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    assert not torch.equal(optimizer.state[p]["momentum_buffer"], saved["state"][0]["momentum_buffer"])
    for _ in range(2):
        with pytest.raises(
            ExchangeError, match=r"OutOfMemoryError: no more\. Weights and momentum may be half updated"
        ):
            optimizer.step()
    optimizer.load_state_dict(saved)
    with torch.no_grad():
        p.copy_(weight)
    optimizer.step()
    reference.step()
    assert torch.equal(p, q)


def test_an_error_after_the_first_change_is_half_done_whatever_its_class() -> None:
    p, v = nn.Parameter(_normal(6, 8, seed=1)), nn.Parameter(_normal(4, seed=2))
    optimizer = Muon([{"params": [p]}, {"params": [v], "use_muon": False}], lr=0.1)
    p.grad, v.grad = _normal(6, 8, seed=2), _normal(4, seed=3)
    with (
        mock.patch("shardmuon.step.adamw.functional_adamw", side_effect=ValueError("late")),
        pytest.raises(ValueError, match="late"),
    ):
        optimizer.step()
    with pytest.raises(ExchangeError, match=r"ValueError: late\. Weights and momentum may be half updated"):
        optimizer.step()
    optimizer.broken = None  # things are accepted as they are
    optimizer.step()


@pytest.mark.parametrize(
    "options",
    [{}, {"storage": Storage(momentum_dtype="int8")}, {"storage": Storage(momentum_dtype=torch.bfloat16)}],
    ids=str,
)
def test_a_step_without_memory_for_momentum_changes_nothing(options: dict[str, Any]) -> None:
    params = [nn.Parameter(_normal(6, 128, seed=i)) for i in range(2)]
    optimizer = Muon(params, lr=0.1, **options)
    for p in params:
        p.grad = p.detach().clone()
    before = [p.detach().clone() for p in params]
    made = Keeper._zeros
    calls = []

    def second_fails(*args: Any) -> Any:
        calls.append(1)
        return made(*args) if len(calls) == 1 else _fail()

    with (
        mock.patch.object(Keeper, "_zeros", second_fails),
        pytest.raises(torch.OutOfMemoryError, match="no more"),
    ):
        optimizer.step()
    assert len(calls) == 2
    assert not optimizer.state
    assert all(torch.equal(a, b) for a, b in zip(before, params, strict=True))
    optimizer.step()
    assert all(p in optimizer.state for p in params)


def test_the_plan_is_what_is_known() -> None:
    p = nn.Parameter(_normal(6, 8, seed=1))
    optimizer = Muon([p], lr=0.1)
    with mock.patch.object(Muon, "make_plan", side_effect=AssertionError("planned")):
        assert dict(inspect.getmembers(optimizer))["plan"] is None
    assert optimizer.plans == ()
    assert optimizer.prepare() is optimizer.plan
    p.grad = p.detach().clone()
    optimizer.step()
    assert optimizer.plans == (optimizer.plan,)


def test_copies_and_pickles_take_every_attribute_of_the_constructor() -> None:
    optimizer = Muon(
        [nn.Parameter(_normal(6, 8, seed=1))],
        lr=0.1,
        orthogonalizer=Orthogonalizer(method="gram"),
        storage=Storage(momentum_dtype="int8"),
    )
    optimizer.prepare()
    optimizer.anything = lambda: None  # type: ignore[attr-defined]  # of a user or a scheduler: stays behind
    of_torch = vars(torch.optim.SGD([nn.Parameter(torch.zeros(2))])).keys()
    left = {"binding", "graphs", "process_group", "hosts"}
    for other in (copy.copy(optimizer), pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        assert vars(optimizer).keys() - {"anything"} - of_torch <= vars(other).keys()
        assert not any(vars(other)[key] is vars(optimizer)[key] for key in left if vars(optimizer)[key] is not None)
        assert other.plan is None
        assert not hasattr(other, "anything")
        assert other.config == copy.copy(other).config == optimizer.config


# -------------------------------------------------------------------------------------------- fingerprints


def _drifted(x: Tensor, where: Tensor, by: Tensor) -> Tensor:
    y = x.clone()
    y.view(torch.int32)[where] += by
    return y


def test_neighbours_that_drift_against_each_other_have_another_fingerprint() -> None:
    for size in (4, 5, 64, 1000):
        x = _normal(size, seed=1)
        for start in range(0, size - 3, max(1, size // 7)):
            y = _drifted(x, torch.arange(start, start + 4), torch.tensor([1, -1, -1, 1], dtype=torch.int32))
            assert fingerprint(x) != fingerprint(y)
            z = _drifted(x, torch.arange(start, start + 3), torch.tensor([1, -2, 1], dtype=torch.int32))
            assert fingerprint(x) != fingerprint(z)


@pytest.mark.parametrize(("size", "count"), [(4, 4), (64, 4), (64, 8), (768, 4), (40_000, 16)])
def test_no_random_drift_by_one_ulp_is_missed(size: int, count: int) -> None:
    """A sum of words times weights misses 4 of 1,000 of the second kind, so 12 of the 3,000 here."""
    draw = torch.Generator().manual_seed(size + count)
    x = torch.randn(size, generator=draw)
    known, seen = fingerprint(x), set()
    trials = {4: 1_000, 64: 3_000, 768: 1_000, 40_000: 300}[size]
    for _ in range(trials):
        where = torch.randperm(size, generator=draw)[:count]
        by = torch.randint(0, 2, (count,), generator=draw, dtype=torch.int32) * 2 - 1
        found = fingerprint(_drifted(x, where, by))
        assert found != known
        seen.add(found)
    assert len(seen) > min(trials // 2, 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int8])
def test_a_fingerprint_is_of_the_bits_in_their_order_wherever_they_lie(dtype: torch.dtype) -> None:
    for size in (1, 3, 8, 1001, 70_001):
        whole = _normal(size + 3, seed=size).mul(50).to(dtype)
        for start in range(4):
            part = whole[start : start + size]
            assert fingerprint(part) == fingerprint(part.clone()), (size, start)
        if size > 1:
            assert fingerprint(whole[:size]) != fingerprint(whole[:size].flip(0))
            assert fingerprint(whole[:size]) != fingerprint(whole[1 : size + 1])
        grid = _normal(size, 2, seed=size).to(dtype)
        assert fingerprint(grid.t()) == fingerprint(grid.t().contiguous())


# ------------------------------------------------------------------------------------------ process groups


def _own_group(store: str) -> list[timedelta | None]:
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timedelta(seconds=23)
    )
    own = [timeout_of(dist.group.WORLD)]
    if rank < 2:
        own.append(timeout_of(group_for((0, 1))))
    else:
        own.append(timedelta(seconds=23))
    parent = dist.new_group([0, 1, 2], timeout=timedelta(seconds=17))
    if rank:
        own.append(timeout_of(new_group_among((1, 2), 7, parent)))
    return own


def test_own_groups_have_the_time_out_of_the_users(tmp_path: Path) -> None:
    with RankPool(3, timeout=60.0) as pool:
        found = pool.run(_own_group, str(tmp_path / "store"))
    a, b = timedelta(seconds=23), timedelta(seconds=17)
    assert found == [[a, a], [a, a, b], [a, a, b]]


class _Group:
    """A default group as bound to a device by `init_process_group(device_id=...)`."""

    bound_device_id: Any = torch.device("cuda", 3)
    _device_types = ()


@pytest.mark.parametrize("fails", [False, True])
def test_a_group_of_some_ranks_is_not_split_off_a_bound_default_group(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ncclCommSplit` waits for all ranks of the default group; torch takes it while that is bound to a device."""
    world, seen = _Group(), []

    def new_group(ranks: list[int], **options: Any) -> str:
        seen.append((ranks, world.bound_device_id, options["use_local_synchronization"]))
        if fails:
            raise RuntimeError("no store")
        return "made"

    monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", lambda: world)
    monkeypatch.setattr(dist, "new_group", new_group)
    if fails:
        with pytest.raises(RuntimeError, match="no store"):
            new_group_among((0, 2), 1)
    else:
        assert new_group_among((0, 2), 1) == "made"
    assert seen == [([0, 2], None, True)]
    assert world.bound_device_id == torch.device("cuda", 3)


# ------------------------------------------------------------------------------------- CPUs that are unlike


def _unlike_cpus(options: dict[str, Any]) -> str | None:
    p = nn.Parameter(distribute_tensor(_normal(8, 6, seed=0), mesh_of((2,)), [Shard(0)], src_data_rank=None))
    optimizer = Muon([("p", p)], lr=0.1, exchange=Exchange(dtype=torch.float32), **options)
    p.grad = p.detach().clone()
    with mock.patch.object(shardmuon.orthogonalize, "cpu_has_bf16_matmul", return_value=dist.get_rank() == 1):
        try:
            optimizer.step()
        except ValueError as error:
            assert not optimizer.state
            return str(error)
    return None


@pytest.mark.parametrize("options", [{}, {"orthogonalizer": Orthogonalizer(method="standard")}], ids=str)
def test_ranks_whose_cpus_multiply_otherwise_are_told_before_the_first_step(
    options: dict[str, Any], world2: RankPool
) -> None:
    for text in world2.run(_unlike_cpus, options):
        assert text is not None
        assert "products=torch.float32" in text
        assert "products=torch.bfloat16" in text


@pytest.mark.parametrize(
    "options",
    [
        {"orthogonalizer": Orthogonalizer(dtype="float32")},
        {"orthogonalizer": Orthogonalizer(method="gram")},
        {"orthogonalizer": Orthogonalizer(method="torch")},
    ],
    ids=str,
)
def test_unlike_cpus_are_no_difference_where_the_dtype_is_given(options: dict[str, Any], world2: RankPool) -> None:
    assert world2.run(_unlike_cpus, options) == [None, None]


# ----------------------------------------------------------------------------------------- memory on one rank


def _no_memory(victim: int) -> tuple[str, float]:
    mesh = mesh_of((dist.get_world_size(),))
    params = [
        nn.Parameter(distribute_tensor(_normal(9, 6, seed=i), mesh, [Shard(0)], src_data_rank=None)) for i in range(2)
    ]
    optimizer = Muon([(f"w{i}", p) for i, p in enumerate(params)], lr=0.1)
    for p in params:
        p.grad = p.detach().clone()
    optimizer.prepare()
    before = [p.detach().to_local().clone() for p in params]
    began = time.monotonic()
    allocate = Keeper._zeros
    with mock.patch.object(Keeper, "_zeros", _fail if dist.get_rank() == victim else allocate):
        try:
            optimizer.step()
        except (ValueError, torch.OutOfMemoryError) as error:
            text = f"{type(error).__name__}: {error}"
    took = time.monotonic() - began
    assert not optimizer.state
    assert all(torch.equal(a, p.to_local()) for a, p in zip(before, params, strict=True))
    optimizer.step()
    return text, took


def test_a_rank_without_memory_for_momentum_stops_all(world3: RankPool) -> None:
    found = world3.run(_no_memory, 1)
    told = "ValueError: rank 1: w0: OutOfMemoryError: no more"
    assert [text for text, _ in found] == [told, "OutOfMemoryError: no more", told]
    assert max(took for _, took in found) < 10.0


def _out_of_memory_in_the_plan(victim: int) -> tuple[str, str]:
    param = nn.Parameter(_normal(6, 4, seed=1))
    optimizer = Muon([("w", param)], lr=0.1, process_group=dist.group.WORLD)
    param.grad = _normal(6, 4, seed=2)
    planted = mock.patch("shardmuon.core.fingerprint", side_effect=MemoryError("planted"))
    with (
        planted if dist.get_rank() == victim else contextlib.nullcontext(),
        pytest.raises((ValueError, MemoryError)) as caught,
    ):
        optimizer.step()
    return type(caught.value).__name__, str(caught.value)


def test_out_of_memory_while_a_plan_is_made_stays_itself_where_it_is(world3: RankPool) -> None:
    """A loop that frees memory finds its error; the others hear of it by text."""
    for rank, (kind, text) in enumerate(world3.run(_out_of_memory_in_the_plan, 1)):
        assert kind == ("MemoryError" if rank == 1 else "ValueError") and "planted" in text
