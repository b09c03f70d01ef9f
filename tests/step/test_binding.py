"""Tests of an optimizer's plan, of copied and pickled optimizers, and of tensor fingerprints."""

from __future__ import annotations

import copy
import inspect
import pickle
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from jobs import Job, Spec
from spectra import normal
from torch import Tensor, nn

from shardmuon import Muon
from shardmuon.comm.groups import GroupRef
from shardmuon.step.binding import Binding, fingerprint


def test_the_plan_is_what_is_known() -> None:
    job = Job([{"params": [Spec("a", (6, 8))]}])
    optimizer = job.optimizer
    with mock.patch.object(Muon, "make_plan", side_effect=AssertionError("planned")):
        assert dict(inspect.getmembers(optimizer))["plan"] is None
    assert not optimizer.plans
    assert optimizer.prepare() is optimizer.plan
    job.step(0)
    assert optimizer.plans == (optimizer.plan,)


@pytest.mark.parametrize("given", [(0,), (), None], ids=str)
def test_copies_and_pickles_take_every_attribute_of_the_constructor(given: tuple[int, ...] | None) -> None:
    """Copied and pickled optimizers must have every attribute that the constructor sets, and must keep the option
    `process_group` of a parameter group. Copies must have neither the plan nor any attribute that a user has added."""
    options = {"method": "gram", "momentum_dtype": "int8"}
    optimizer = Job([{"params": [Spec("a", (6, 8))]}], **options).optimizer
    optimizer.prepare()
    optimizer.param_groups[0]["process_group"] = given
    optimizer.anything = lambda: None  # type: ignore[attr-defined]  # of a user or a scheduler: stays behind
    of_torch = vars(torch.optim.SGD([nn.Parameter(torch.zeros(2))])).keys()
    left = {"binding", "process_group", "hosts"}
    for other in (copy.copy(optimizer), pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        assert vars(optimizer).keys() - {"anything"} - of_torch <= vars(other).keys()
        assert not any(vars(other)[key] is vars(optimizer)[key] for key in left if vars(optimizer)[key] is not None)
        assert other.plan is None
        assert not hasattr(other, "anything")
        assert other.config == copy.copy(other).config == optimizer.config
        assert other.param_groups[0]["process_group"] == GroupRef.of(given)


def test_gradients_that_ranks_may_lack_have_bits_of_their_own_and_the_same_on_every_rank() -> None:
    sets: tuple[tuple[int, ...], ...] = (0, 1), (0, 1, 2)
    of_two, of_three = sets

    def bits_of(sets: dict[tuple[int, ...], tuple[int, ...]]) -> tuple[dict[int, int], int]:
        binding: Any = SimpleNamespace(lacking=sets, bits={}, num_bits=0)
        Binding.number_bits(binding, [{of_two: 2, of_three: 1}, {of_two: 2, of_three: 1}, {of_three: 1}])
        return binding.bits, binding.num_bits

    assert bits_of({of_two: (0, 1), of_three: (2,)}) == ({0: 0, 1: 1, 2: 2}, 3)
    assert bits_of({of_three: (0,)}) == ({0: 2}, 3)


def _drifted(x: Tensor, where: Tensor, by: Tensor) -> Tensor:
    y = x.clone()
    y.view(torch.int32)[where] += by
    return y


@pytest.mark.parametrize(("size", "count", "trials"), [(4, 4, 500), (64, 8, 3_000), (768, 4, 500), (40_000, 16, 100)])
def test_no_drift_by_an_ulp_is_missed(size: int, count: int, trials: int) -> None:
    """A fingerprint must change when a few elements drift by one ulp.

    Weaker checksums miss some of these drifts. A weighted sum of a tensor's words misses about 12 of the 3,000 tested
    drifts of a 64-element tensor. A plain or index-weighted sum misses drifts of neighboring elements in opposite
    directions.
    """
    draw = torch.Generator().manual_seed(size + count)
    x = torch.randn(size, generator=draw)
    known, seen = fingerprint(x), set()
    for _ in range(trials):
        by = torch.randint(0, 2, (count,), generator=draw, dtype=torch.int32) * 2 - 1
        seen.add(fingerprint(_drifted(x, torch.randperm(size, generator=draw)[:count], by)))
    for start in range(0, size - 3, max(1, size // 7)):
        for drift in ([1, -1, -1, 1], [1, -2, 1]):
            where = torch.arange(start, start + len(drift))
            seen.add(fingerprint(_drifted(x, where, torch.tensor(drift, dtype=torch.int32))))
    assert known not in seen
    assert len(seen) > min(trials // 2, 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int8])
def test_a_fingerprint_is_of_the_bits_in_their_order_wherever_they_lie(dtype: torch.dtype) -> None:
    for size in (1, 3, 8, 1001, 70_001):
        whole = normal(size + 3, seed=size).mul(50).to(dtype)
        for start in range(4):
            part = whole[start : start + size]
            assert fingerprint(part) == fingerprint(part.clone()), (size, start)
        if size > 1:
            others = {fingerprint(whole[:size].flip(0)), fingerprint(whole[1 : size + 1])}
            assert fingerprint(whole[:size]) not in others
        grid = normal(size, 2, seed=size).to(dtype)
        assert fingerprint(grid.t()) == fingerprint(grid.t().contiguous())
