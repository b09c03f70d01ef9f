"""Whatever is raised on one rank before the ranks have agreed is raised on all of them at once, with its cause.

No list of guarded places: the functions are found by watching a healthy step (`injection`), and an exception of each
kind is raised in each of them on one rank. A rank that hears of it late would wait for the time-out, which is longer
than the promise (`PROMPT`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from injection import KINDS, Place, check_all_raise, join, known_places, raising
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardmuon import Audit, Exchange, GradScaler, Muon, Orthogonalizer, Storage, clip_grad_norm_
from shardmuon.testing import RankPool
from shardmuon.testing.layouts import mesh_of

pytestmark = pytest.mark.ranks


def _normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _scale(rows: int, cols: int) -> float:
    return 0.5


class Model:
    """Shards, replicas, a rank's own matrices and AdamW's vectors in one optimizer."""

    def __init__(self, **options: Any) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        self.mesh = mesh_of((world,))
        self.params = {
            "shard": nn.Parameter(self._cut(_normal(7, 128, seed=1))),
            "replica": nn.Parameter(_normal(6, 128, seed=2)),
            "own": nn.Parameter(_normal(5, 128, seed=3 + rank)),
            "bias": nn.Parameter(self._cut(_normal(9, seed=30))),
            "scale": nn.Parameter(_normal(4, seed=31)),
        }
        named = list(self.params.items())
        groups: list[dict[str, Any]] = [
            {"params": named[:2], "adjust_lr_fn": _scale, "lr": torch.tensor(0.1)},
            {"params": named[2:3], "rank_local": True},
            {"params": named[3:], "use_muon": False, "lr": 0.01},
        ]
        self.optimizer = Muon(groups, lr=0.1, process_group=dist.group.WORLD, **options)

    def _cut(self, full: Tensor) -> Tensor:
        return distribute_tensor(full, self.mesh, [Shard(0)], src_data_rank=None)

    def set_gradients(self, seed: int) -> None:
        for at, p in enumerate(self.params.values()):
            full = _normal(*p.shape, seed=100 * seed + at)
            p.grad = self._cut(full) if isinstance(p, DTensor) else full

    def snapshot(self) -> dict[str, Tensor]:
        found = {}
        for name, p in self.params.items():
            values = {"weight": p, "gradient": p.grad, **self.optimizer.state.get(p, {})}
            for key, value in values.items():
                local = value.to_local() if isinstance(value, DTensor) else value
                found[f"{name}.{key}"] = local.detach().clone()
        return found


def _same(before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert torch.equal(value, after[key]), key


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"orthogonalizer": Orthogonalizer(method="standard")},
    "int8": {
        "orthogonalizer": Orthogonalizer(method="gram"),
        "storage": Storage(momentum_dtype="int8", stochastic_rounding=True),
        "audit": Audit(every=1),
    },
    "cpu": {
        "storage": Storage(momentum_dtype=torch.bfloat16, momentum_device="cpu"),
        "exchange": Exchange(dtype=torch.float32),
    },
}
HEALTHY = 5  # after so many functions a step that must succeed: what a refusal left behind would break it, or the next


def _every_step(store: str, names: list[str], first: bool) -> tuple[list[str], list[str]]:
    """Functions that a step calls with each set of options, and none before has called."""
    join(store)
    done: list[Place] = []
    passed: list[str] = []
    for name in names:
        _step_with(OPTIONS[name], first, done, passed)
    return [place.name for place in done], passed


def _step_with(options: dict[str, Any], first: bool, done: list[Place], passed: list[str]) -> None:
    if first:
        options = {**options, "audit": Audit(every=None)}  # it would find that the state goes away
    model = Model(**options)
    if not first:
        for seed in (1, 2):
            model.set_gradients(seed)
            model.optimizer.step()
    else:
        model.optimizer.prepare()
    model.set_gradients(3)
    known = [place for place in known_places(model.optimizer.step, "step") if place not in done]
    done += known
    if first:  # momentum is made in every step
        model.optimizer.state.clear()
    for at, place in enumerate(known):
        for kind in {at % len(KINDS), (at + 3) % len(KINDS)}:
            error, victim = KINDS[kind], (at + kind) % dist.get_world_size()
            before = model.snapshot()
            found = check_all_raise(model.optimizer.step, place, error, victim, 1, "step")
            if found:
                _same(before, model.snapshot())
            elif found is False:
                passed.append(f"{place} {type(error).__name__}")
            if first:
                model.optimizer.state.clear()
        if not at % HEALTHY:
            model.set_gradients(10 + at)
            model.optimizer.step()
            if first:
                model.optimizer.state.clear()


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(2, timeout=300.0) as pool:
        yield pool


@pytest.mark.parametrize(("names", "first"), [(["plain", "int8"], False), (["int8", "cpu"], True)], ids=str)
def test_an_exception_in_any_function_before_the_agreement_is_raised_on_all_ranks(
    names: list[str], first: bool, ranks: RankPool, tmp_path: Path
) -> None:
    for known, passed in ranks.run(_every_step, str(tmp_path / "store"), names, first):
        assert {"complete_changed", "is_current", "signature", "validate", "gradient_storage"} <= {*known}
        assert {"_make", "fit", "count_of", "settings_of", "__missing__", "digests_of", "_adamw_rows"} <= {*known}
        assert passed == []


# ------------------------------------------------------------------------------------------- while a plan is made


def _every_function_of_the_plan(store: str) -> tuple[list[str], int]:
    """Each in its first call and in its third, of those that run before the last collective. With each set of options
    those that none before has called."""
    join(store)
    done: list[Place] = []
    passed: list[str] = []
    return passed, sum(_plan_with(OPTIONS[name], done, passed) for name in ("plain", "int8"))


def _plan_with(options: dict[str, Any], done: list[Place], passed: list[str]) -> int:
    model = Model(**options)
    model.set_gradients(1)
    model.optimizer.prepare()  # what is cached runs no second time
    known = known_places(model.optimizer.prepare, "_bind")
    known += [place for place in known_places(model.optimizer.prepare, "_bind", "_none") if place not in known]
    known = [place for place in known if place not in done]
    done += known
    raised = 0
    for at, place in enumerate(known):
        other = 3 if at % 2 else 7
        for number, kind in ((1, 0), (3, other)) if at % 4 < 2 else ((1, other), (3, 0)):
            victim = (at + kind + number) % dist.get_world_size()
            if check_all_raise(model.optimizer.prepare, place, KINDS[kind], victim, number, "_bind"):
                raised += 1
            elif number == 1:
                passed.append(f"{place} {type(KINDS[kind]).__name__}")
        if not at % HEALTHY:
            model.set_gradients(10 + at)
            model.optimizer.step()
    return raised


def test_an_exception_in_any_function_that_makes_the_plan_is_raised_on_all_ranks(
    ranks: RankPool, tmp_path: Path
) -> None:
    for passed, raised in ranks.run(_every_function_of_the_plan, str(tmp_path / "store")):
        assert passed == [], passed
        assert raised > 75


# ------------------------------------------------------------------------------------------ clipping, loss scaling


def _every_function_of(store: str, what: str) -> tuple[list[str], int]:
    join(store)
    model = Model(orthogonalizer=Orthogonalizer(method="standard"))
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))  # makes the scale

    def clip() -> None:
        clip_grad_norm_(model.optimizer, 1e9, process_group=dist.group.WORLD)

    def unscale() -> None:
        scaler._per_optimizer_states.clear()
        scaler.unscale_(model.optimizer)

    def misplace() -> None:
        """One gradient is placed otherwise, so that the ranks talk, redistribute it, and talk again."""
        if what == "clip twice":
            grad = model.params["shard"].grad
            assert isinstance(grad, DTensor)
            model.params["shard"].grad = grad.redistribute(placements=[Replicate()])

    begin = {"unscale": "_unscale_grads_", "clip": "clip_grad_norm_", "clip twice": "align_"}[what]
    call = unscale if what == "unscale" else clip
    model.set_gradients(1)
    call()
    misplace()
    known = known_places(call, begin, "_none")  # until the last talk
    passed, raised = [], 0
    for at, place in enumerate(known):
        for kind in {at % len(KINDS), (at + 3) % len(KINDS)}:
            misplace()
            before = model.snapshot()
            if check_all_raise(call, place, KINDS[kind], (at + kind) % dist.get_world_size(), 1, begin):
                raised += 1
                if what == "clip":  # unscaling says that the step must start anew, a second talk redistributes before
                    _same(before, model.snapshot())
            else:
                passed.append(f"{place} {type(KINDS[kind]).__name__}")
            model.set_gradients(10 + at)
        call()
    return passed, raised


@pytest.mark.parametrize(("what", "least"), [("clip", 40), ("clip twice", 20), ("unscale", 6)])
def test_an_exception_in_any_function_before_clipping_or_unscaling_is_raised_on_all_ranks(
    what: str, least: int, ranks: RankPool, tmp_path: Path
) -> None:
    for passed, raised in ranks.run(_every_function_of, str(tmp_path / "store"), what):
        assert passed == [], passed
        assert raised > least


def _after_the_norm_is_known(store: str) -> list[tuple[str, str, str]]:
    """Errors of clipping and of the step after it, with an exception on rank 1 after the last talk about the norm."""
    join(store)
    model = Model(orthogonalizer=Orthogonalizer(method="standard"))
    model.set_gradients(1)
    model.optimizer.step()

    def clip() -> None:
        clip_grad_norm_(model.optimizer, 1e-3, process_group=dist.group.WORLD)

    clip()
    model.set_gradients(2)
    before = known_places(clip, "clip_grad_norm_", "_none")
    model.set_gradients(3)
    after = [place for place in known_places(clip, "clip_grad_norm_", "<end>") if place not in before]
    said = []
    for at, place in enumerate(after):
        model.set_gradients(10 + at)
        kept = model.snapshot()
        try:
            with raising(place if dist.get_rank() == 1 else None, KINDS[at % len(KINDS)], 1, "clip_grad_norm_"):
                clip()
            clipped = "clipped"
        except BaseException as wrong:
            clipped = type(wrong).__name__
        with pytest.raises(ValueError, match="no gradient") as refused:
            model.optimizer.step()
        model.set_gradients(10 + at)
        _same(kept, model.snapshot())
        said.append((place.name, clipped, str(refused.value)))
    model.optimizer.step()
    return said


def test_an_exception_after_the_last_talk_of_clipping_lets_no_rank_step(ranks: RankPool, tmp_path: Path) -> None:
    """Nobody hears of it any more; the gradients of that rank are gone, and the next step is refused everywhere."""
    first, second = ranks.run(_after_the_norm_is_known, str(tmp_path / "store"))
    assert "foreach_mul_" in {name for name, *_ in second}
    for (_, clipped, refused), (_, raised, there) in zip(first, second, strict=True):
        assert clipped == "clipped" and raised in (
            "ExchangeError",
            "MemoryError",
            "OutOfMemoryError",
            "KeyboardInterrupt",
        )
        assert "no gradient" in refused and refused == there
