"""Exceptions as in test_any_exception.py, on layouts in which ranks share parameters with some ranks only:
tensor-parallel shards, Megatron-FSDP's DTensors, groups that overlap."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from injection import KINDS, Place, check_all_raise, join, known_places
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shardmuon import Muon, Orthogonalizer
from shardmuon.testing import RankPool
from shardmuon.testing.layouts import mesh_of, shard_like_megatron

pytestmark = pytest.mark.ranks

Build = Callable[[Tensor], Tensor]  # a whole tensor -> what this rank keeps of it


def _normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _seed(name: str) -> int:
    return sum(map(ord, name)) % 97


class Model:
    """Parameters that this rank holds any of, each with its whole shape and how it is cut."""

    def __init__(self, **options: Any) -> None:
        self.rank = dist.get_rank()
        self.builds: dict[str, tuple[tuple[int, ...], Build]] = {}
        self.params: dict[str, nn.Parameter] = {}
        groups = self.groups()
        self.optimizer = Muon(groups, lr=0.1, orthogonalizer=Orthogonalizer(method="standard"), **options)

    def groups(self) -> list[dict[str, Any]]:
        raise NotImplementedError

    def make(self, name: str, shape: tuple[int, ...], build: Build) -> tuple[str, nn.Parameter]:
        self.builds[name] = shape, build
        self.params[name] = nn.Parameter(build(_normal(*shape, seed=_seed(name))))
        return name, self.params[name]

    def set_gradients(self, seed: int) -> None:
        for name, p in self.params.items():
            shape, build = self.builds[name]
            p.grad = build(_normal(*shape, seed=100 * seed + _seed(name)))

    def snapshot(self) -> dict[str, Tensor]:
        found = {}
        for name, p in self.params.items():
            for key, value in {"weight": p, "gradient": p.grad, **self.optimizer.state.get(p, {})}.items():
                local = value.to_local() if isinstance(value, DTensor) else value
                found[f"{name}.{key}"] = local.detach().clone()
        return found


class TensorParallel(Model):
    """Shards over pairs of ranks, each pair a replica of the others; a tensor that every rank has; a vector."""

    def groups(self) -> list[dict[str, Any]]:
        world = dist.get_world_size()
        mesh = mesh_of((world // 2, 2))
        tp, dp = mesh.get_group(1), mesh.get_group(0)
        part = self.rank % 2
        named = [
            self.make("cols", (6, 8), lambda t: t.chunk(2, 1)[part].contiguous()),
            self.make("rows", (8, 6), lambda t: t.chunk(2, 0)[part].contiguous()),
            self.make("replica", (5, 6), torch.clone),
        ]
        for (_, p), dim in zip(named, (1, 0, -1), strict=True):
            p.tensor_model_parallel, p.partition_dim = dim >= 0, dim  # type: ignore[attr-defined]
        place = {"tp_group": tp, "process_group": dp}
        vector = self.make("vector", (5,), torch.clone)
        return [{"params": named, **place}, {"params": [vector], "use_muon": False}]


class MegatronFsdp(Model):
    """Rows anywhere, none on some ranks."""

    def groups(self) -> list[dict[str, Any]]:
        mesh = mesh_of((dist.get_world_size(),))
        shapes = {"a": (9, 6), "b": (2, 6), "c": (7, 6)}

        def build(name: str) -> Build:
            return lambda t: shard_like_megatron(
                {n: t if n == name else torch.zeros(s) for n, s in shapes.items()}, mesh
            )[name]

        named = [self.make(name, shape, build(name)) for name, shape in shapes.items()]
        return [{"params": named}]

    def set_gradients(self, seed: int) -> None:
        super().set_gradients(seed)
        for p in self.params.values():
            if not p.to_local().numel():  # type: ignore[attr-defined]
                p.grad = None

    def snapshot(self) -> dict[str, Tensor]:
        kept = {name: p.grad for name, p in self.params.items()}
        for p in self.params.values():
            if p.grad is None:
                p.grad = p.detach().clone()
        found = super().snapshot()
        for name, p in self.params.items():
            p.grad = kept[name]
        return found


class Overlapping(Model):
    """Replicas on ranks 0 and 1, others on 1, 2 and 3, DTensors on all and on pairs: no group contains all others but
    that of the DTensors, and that is left out on demand."""

    whole = True

    def groups(self) -> list[dict[str, Any]]:
        world = mesh_of((4,))
        pairs = mesh_of((2, 2))
        first, last = dist.new_group([0, 1]), dist.new_group([1, 2, 3])

        def cut(mesh: DeviceMesh) -> Build:
            return lambda t: distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None)

        out: list[dict[str, Any]] = []
        if self.whole:
            out.append({"params": [self.make("all", (9, 6), cut(world))]})
        if self.rank in (0, 1):
            out.append({"params": [self.make("left", (6, 5), torch.clone)], "process_group": first})
        if self.rank in (1, 2, 3):
            out.append({"params": [self.make("right", (5, 7), torch.clone)], "process_group": last})
        pair = self.rank // 2
        out.append({"params": [self.make(f"pair{pair}", (7, 6), cut(pairs["a1"]))]})  # type: ignore[list-item]
        out.append({"params": [self.make("vector", (5,), torch.clone)], "use_muon": False})
        return out


class Chain(Overlapping):
    whole = False


def _same(before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert torch.equal(value, after[key]), key


MODELS = {"tp": TensorParallel, "megatron-fsdp": MegatronFsdp, "overlapping": Overlapping, "chain": Chain}


STRIDE = int(os.environ.get("PLANT_STRIDE", "18"))  # 1 plants in every function, which takes minutes


def _some_of(known: list[Place], name: str) -> list[Place]:
    """One in `STRIDE` of them, others for each model."""
    return known[len(name) % STRIDE :: STRIDE]


def _every_step(store: str, name: str) -> tuple[int, list[str]]:
    join(store)
    model = MODELS[name]()
    for seed in (1, 2):
        model.set_gradients(seed)
        model.optimizer.step()
    model.set_gradients(3)
    known = known_places(model.optimizer.step, "step")
    passed = []
    for at, place in enumerate(_some_of(known, name)):
        for kind in {0, at % len(KINDS)}:
            error, victim = KINDS[kind], (at + kind) % dist.get_world_size()
            before = model.snapshot()
            found = check_all_raise(model.optimizer.step, place, error, victim, 1, "step")
            if found:
                _same(before, model.snapshot())
            elif found is False:
                passed.append(f"{place} {type(error).__name__}")
        model.set_gradients(10 + at)
        model.optimizer.step()  # a healthy one
    return len(known), passed


def _every_function_of_the_plan(store: str, name: str) -> tuple[list[str], int]:
    join(store)
    model = MODELS[name]()
    model.set_gradients(1)
    model.optimizer.prepare()  # what is cached runs no second time
    known = known_places(model.optimizer.prepare, "_bind")
    known += [place for place in known_places(model.optimizer.prepare, "_bind", "_none") if place not in known]
    raised, passed = 0, []
    for at, place in enumerate(_some_of(known, name)):
        for kind in (0, 3 if at % 2 else 7):
            number = 1 if (at + kind) % 3 else 2
            victim = (at + kind) % dist.get_world_size()
            found = check_all_raise(model.optimizer.prepare, place, KINDS[kind], victim, number, "_bind")
            raised += found is True
            if found is False and number == 1:
                passed.append(f"{place} {type(KINDS[kind]).__name__} on rank {victim}")
        if not at % 5:
            model.set_gradients(10 + at)
            model.optimizer.step()
    return passed, raised


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(4, timeout=300.0) as pool:
        yield pool


@pytest.mark.parametrize("name", list(MODELS))
def test_an_exception_in_any_function_before_the_agreement_is_raised_on_all_ranks(
    name: str, ranks: RankPool, tmp_path: Path
) -> None:
    for known, passed in ranks.run(_every_step, str(tmp_path / "store"), name):
        assert known > 20
        assert passed == []


@pytest.mark.parametrize("name", list(MODELS))
def test_an_exception_in_any_function_that_makes_the_plan_is_raised_on_all_ranks(
    name: str, ranks: RankPool, tmp_path: Path
) -> None:
    for passed, raised in ranks.run(_every_function_of_the_plan, str(tmp_path / "store"), name):
        assert passed == [], passed
        assert raised > 60 // STRIDE
