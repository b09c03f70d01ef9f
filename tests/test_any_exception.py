"""Whatever is raised on one rank before the ranks have agreed is raised on all of them at once, with its cause.

No list of guarded places: the functions are found by watching a healthy call (`injection`), and exceptions of two kinds
are raised in each of them on one rank. A rank that hears of it late would wait for the time-out, which is longer than
the promise (`PROMPT`). Jobs are those in which all ranks share all, and those in which ranks share parameters with some
ranks only.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from injection import KINDS, MARK, PROMPT, STAYS, Place, check_all_raise, join, known_places, raising
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardmuon import Audit, Exchange, ExchangeError, GradScaler, Muon, Orthogonalizer, Storage, checkpoint
from shardmuon import clip_grad_norm_ as clip_gradients
from shardmuon.testing import RankPool
from shardmuon.testing.layouts import mesh_of, shard_like_megatron

pytestmark = pytest.mark.ranks

Build = Callable[[Tensor], Tensor]  # a whole tensor -> what this rank keeps of it


def _normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _cut(mesh: DeviceMesh) -> Build:
    return lambda t: distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None)


# ------------------------------------------------------------------------------------------------------------- jobs


class Job:
    """Parameters that this rank holds any of, each with its whole shape and how it is cut."""

    def __init__(self, **options: Any) -> None:
        self.rank, self.world, self.model = dist.get_rank(), dist.get_world_size(), nn.Module()
        self.builds: dict[str, tuple[tuple[int, ...], Build]] = {}
        options = {"orthogonalizer": Orthogonalizer(method="standard"), **options}
        self.optimizer = Muon(self.groups(), lr=0.1, **options)

    def groups(self) -> list[dict[str, Any]]:
        raise NotImplementedError

    def make(self, name: str, shape: tuple[int, ...], build: Build) -> tuple[str, nn.Parameter]:
        self.builds[name] = shape, build
        param = nn.Parameter(build(_normal(*shape, seed=sum(map(ord, name)))))
        self.model.register_parameter(name, param)
        return name, param

    def set_gradients(self, seed: int) -> None:
        for name, p in self.model.named_parameters():
            shape, build = self.builds[name]
            p.grad = build(_normal(*shape, seed=1000 * seed + sum(map(ord, name))))

    def step(self, seed: int) -> None:
        self.set_gradients(seed)
        self.optimizer.step()

    def snapshot(self) -> dict[str, Tensor]:
        found = {}
        for name, p in self.model.named_parameters():
            for key, value in {"weight": p, "gradient": p.grad, **self.optimizer.state.get(p, {})}.items():
                local = value.to_local() if isinstance(value, DTensor) else value
                found[f"{name}.{key}"] = torch.empty(0) if local is None else local.detach().clone()
        return found


class Mixed(Job):
    """Shards, replicas, a rank's own matrices and AdamW's vectors in one optimizer."""

    def groups(self) -> list[dict[str, Any]]:
        cut, rank = _cut(mesh_of((self.world,))), self.rank
        shared = [self.make("shard", (7, 128), cut), self.make("replica", (6, 128), torch.clone)]
        own = self.make("own", (5, 128), lambda t: t + rank)
        vectors = [self.make("bias", (9,), cut), self.make("scale", (4,), torch.clone)]
        places = {"process_group": dist.group.WORLD}
        return [
            {"params": shared, "adjust_lr_fn": lambda rows, cols: 0.5, "lr": torch.tensor(0.1), **places},
            {"params": [own], "rank_local": True},
            {"params": vectors, "use_muon": False, "lr": 0.01, **places},
        ]


class Saved(Job):
    """A DTensor, a tensor-parallel shard, a replica and AdamW's vector, with momentum of 8 bits."""

    def __init__(self) -> None:
        super().__init__(storage=Storage(momentum_dtype="int8"))

    def groups(self) -> list[dict[str, Any]]:
        rank, world = self.rank, self.world
        shared = [self.make("shard", (7, 5), _cut(mesh_of((world,)))), self.make("replica", (4, 6), torch.clone)]
        name, cut = self.make("cut", (6, 128 * world), lambda t: t.chunk(world, 1)[rank].contiguous())
        cut.tensor_model_parallel, cut.partition_dim = True, 1  # type: ignore[attr-defined]
        return [
            {"params": shared},
            {"params": [(name, cut)], "tp_group": dist.group.WORLD, "process_group": ()},
            {"params": [self.make("bias", (9,), torch.clone)], "use_muon": False, "lr": 0.01},
        ]


class TensorParallel(Job):
    """Shards over pairs of ranks, each pair a replica of the others; a tensor that every rank has; a vector."""

    def groups(self) -> list[dict[str, Any]]:
        mesh, part = mesh_of((self.world // 2, 2)), self.rank % 2
        named = [
            self.make("cols", (6, 8), lambda t: t.chunk(2, 1)[part].contiguous()),
            self.make("rows", (8, 6), lambda t: t.chunk(2, 0)[part].contiguous()),
            self.make("replica", (5, 6), torch.clone),
        ]
        for (_, p), dim in zip(named, (1, 0, -1), strict=True):
            p.tensor_model_parallel, p.partition_dim = dim >= 0, dim  # type: ignore[attr-defined]
        vector = self.make("vector", (5,), torch.clone)
        place = {"tp_group": mesh.get_group(1), "process_group": mesh.get_group(0)}
        return [{"params": named, **place}, {"params": [vector], "use_muon": False}]


class MegatronFsdp(Job):
    """Rows anywhere, none on some ranks."""

    def groups(self) -> list[dict[str, Any]]:
        mesh, shapes = mesh_of((self.world,)), {"a": (9, 6), "b": (2, 6), "c": (7, 6)}

        def build(name: str, whole: Tensor) -> Tensor:
            full = {n: torch.zeros(s) for n, s in shapes.items()} | {name: whole}
            return shard_like_megatron(full, mesh)[name]

        return [{"params": [self.make(name, shape, partial(build, name)) for name, shape in shapes.items()]}]

    def set_gradients(self, seed: int) -> None:
        super().set_gradients(seed)
        for p in self.model.parameters():
            if not p.to_local().numel():  # type: ignore[attr-defined]
                p.grad = None


class Overlapping(Job):
    """Replicas on ranks 0 and 1, others on 1, 2 and 3, DTensors on all and on pairs: no group contains all others but
    that of the DTensors, and that is left out on demand."""

    whole = True

    def groups(self) -> list[dict[str, Any]]:
        pairs, pair = mesh_of((2, 2)), self.rank // 2
        sides = {"left": (0, 1), "right": (1, 2, 3)}
        made = {name: dist.new_group(list(ranks)) for name, ranks in sides.items()}
        out: list[dict[str, Any]] = [
            {"params": [self.make(name, (6, 5), torch.clone)], "process_group": made[name]}
            for name, ranks in sides.items()
            if self.rank in ranks
        ]
        if self.whole:
            out.append({"params": [self.make("all", (9, 6), _cut(mesh_of((4,))))]})
        out.append({"params": [self.make(f"pair{pair}", (7, 6), _cut(pairs["a1"]))]})  # type: ignore[arg-type]
        out.append({"params": [self.make("vector", (5,), torch.clone)], "use_muon": False})
        return out


class Chain(Overlapping):
    whole = False


# ------------------------------------------------------------------------------------------------------------- cases


PLAIN = partial(Mixed)
INT8 = partial(
    Mixed,
    orthogonalizer=Orthogonalizer(method="gram"),
    storage=Storage(momentum_dtype="int8", stochastic_rounding=True),
)
CPU = partial(
    Mixed,
    storage=Storage(momentum_dtype=torch.bfloat16, momentum_device="cpu"),
    exchange=Exchange(dtype=torch.float32),
)
AUDITED = partial(INT8, audit=Audit(every=1))  # not in first steps: it would find that the state goes away
STRIDE = int(os.environ.get("PLANT_STRIDE", "18"))  # 1 plants in every function of the large jobs, which takes minutes
HEALTHY = 5  # after so many functions a call that must succeed: what a refusal left behind would break it, or the next


class Case(NamedTuple):
    """One call in which exceptions are planted.

    Attributes:
        world: Number of ranks.
        jobs: Makers of jobs, of which each is planted in those functions that none before has called.
        what: The call.
        least: So many times all ranks raise.
        stride: In every how-manieth function.
    """

    world: int
    jobs: Sequence[Callable[[], Job]]
    what: str
    least: int
    stride: int = 1


LAYOUTS = {"tp": TensorParallel, "megatron-fsdp": MegatronFsdp, "overlapping": Overlapping, "chain": Chain}
CASES = {
    "step": Case(2, (PLAIN, AUDITED), "step", 120),
    "first step": Case(2, (INT8, CPU), "first step", 120),
    "plan": Case(2, (PLAIN, AUDITED), "plan", 75),
    "clip": Case(2, (PLAIN,), "clip", 40),
    "clip twice": Case(2, (PLAIN,), "clip twice", 20),
    "unscale": Case(2, (PLAIN,), "unscale", 6),
    "save": Case(2, (Saved,), "save", 10, 2),
    "load": Case(2, (Saved,), "load", 10, 2),
    **{
        f"{what}, {name}": Case(4, (job,), what, 60 // STRIDE if what == "plan" else 20 // STRIDE, STRIDE)
        for what in ("step", "plan")
        for name, job in LAYOUTS.items()
    },
}


class Calls(NamedTuple):
    """A job's call.

    Attributes:
        call: The call, in which exceptions are planted.
        begin, last: See `known_places`.
        between: What comes before each call, given a seed.
    """

    call: Callable[[], object]
    begin: str
    last: str | None
    between: Callable[[int], object]


def _calls(job: Job, what: str, folder: str) -> Calls:
    """Bring a job to where the call may come, and return it."""
    optimizer, numbers = job.optimizer, itertools.count()
    if what == "step":
        job.step(1)
        job.step(2)
        job.set_gradients(3)
        return Calls(optimizer.step, "step", None, lambda seed: None)
    job.set_gradients(1)
    if what == "first step":
        optimizer.prepare()
        return Calls(optimizer.step, "step", None, lambda seed: optimizer.state.clear())  # momentum is made in each
    if what == "plan":
        optimizer.prepare()  # what is cached runs no second time
        return Calls(optimizer.prepare, "_bind", "_none", lambda seed: None)
    if what in ("save", "load"):
        optimizer.step()
        checkpoint.save(folder, job.model, optimizer)
        job.step(2)

        def saved_or_loaded() -> None:
            try:
                if what == "load":
                    checkpoint.load(folder, job.model, optimizer)
                else:
                    checkpoint.save(f"{folder}.{next(numbers)}", job.model, optimizer)
            except CheckpointException as wrong:
                raise ValueError(f"{MARK} or AssertionError, in words of DCP's own: {wrong}") from wrong

        return Calls(saved_or_loaded, what, "_none", lambda seed: None)
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))  # makes the scale

    def clip_or_unscale() -> None:
        if what == "unscale":
            scaler._per_optimizer_states.clear()
            scaler.unscale_(optimizer)
        else:
            clip_gradients(optimizer, 1e9, process_group=dist.group.WORLD)

    def anew(seed: int) -> None:
        job.set_gradients(10 + seed)
        if what == "clip twice":  # one is placed otherwise, so that the ranks talk, redistribute it, and talk again
            grad = job.model.shard.grad
            assert isinstance(grad, DTensor)
            job.model.shard.grad = grad.redistribute(placements=[Replicate()])

    clip_or_unscale()
    begin = {"unscale": "_unscale_grads_", "clip": "clip_grad_norm_", "clip twice": "align_"}[what]
    return Calls(clip_or_unscale, begin, "_none", anew)  # until the last talk


def _planted(store: str, name: str, folder: str) -> tuple[list[str], list[str], int]:
    """Functions that were found, where an exception passed unnoticed, and how often all ranks raised."""
    join(store)
    done, passed, raised = list[Place](), list[str](), 0
    world, jobs, what, _, stride = CASES[name]
    for job in (make() for make in jobs):
        call, begin, last, between = _calls(job, what, folder)
        between(0)
        known = known_places(call, begin) if what == "plan" else []
        between(0)
        known = [place for place in dict.fromkeys((*known, *known_places(call, begin, last))) if place not in done]
        done += known
        for at, place in enumerate(known[len(name) % stride :: stride]):
            kinds = list(dict.fromkeys((at % len(KINDS), (at + 3) % len(KINDS))))
            if what in ("save", "load"):  # DCP makes its own of any, also of interrupts
                kinds = [kind for kind in kinds if not isinstance(KINDS[kind], STAYS)][:1]
            for turn, kind in enumerate(kinds):
                number, victim = 3 if what == "plan" and turn else 1, (at + kind) % world
                between(at)
                before = job.snapshot()
                found = check_all_raise(call, place, KINDS[kind], victim, number, begin)
                raised += found is True
                if found and what not in ("unscale", "clip twice"):
                    # unscaling says that the step must start anew, a second talk redistributes before
                    after = job.snapshot()
                    assert before.keys() == after.keys(), f"{place}"
                    assert not [key for key in before if not torch.equal(before[key], after[key])], f"{place}"
                elif found is False and number == 1:
                    passed.append(f"{place} {type(KINDS[kind]).__name__} on rank {victim}")
            if not at % HEALTHY:
                between(at)
                call()
                job.step(10 + at)
    return [place.name for place in done], passed, raised


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    with RankPool(2, timeout=300.0) as two, RankPool(4, timeout=300.0) as four:
        yield {2: two, 4: four}


@pytest.mark.parametrize("name", CASES)
def test_an_exception_in_any_function_before_the_agreement_is_raised_on_all_ranks(
    name: str, pools: dict[int, RankPool], tmp_path: Path
) -> None:
    case = CASES[name]
    for known, passed, raised in pools[case.world].run(_planted, str(tmp_path / "store"), name, str(tmp_path / "job")):
        assert passed == [], passed
        assert raised > case.least, raised
        if name in ("step", "first step"):
            assert {"complete_changed", "is_current", "signature", "validate", "gradient_storage"} <= {*known}
            assert {"_make", "fit", "count_of", "settings_of", "__missing__", "digests_of", "_adamw_rows"} <= {*known}


# ------------------------------------------------------------------------------------------------- after the last talk


def _after_the_norm_is_known(store: str) -> list[tuple[str, str, str]]:
    """Errors of clipping and of the step after it, with an exception on rank 1 after the last talk about the norm."""
    join(store)
    job = Mixed()
    job.step(1)

    def clip() -> None:
        clip_gradients(job.optimizer, 1e-3, process_group=dist.group.WORLD)

    clip()
    job.set_gradients(2)
    before = known_places(clip, "clip_grad_norm_", "_none")
    job.set_gradients(3)
    after = [place for place in known_places(clip, "clip_grad_norm_", "<end>") if place not in before]
    said = []
    for at, place in enumerate(after):
        job.set_gradients(10 + at)
        kept = job.snapshot()
        try:
            with raising(place if dist.get_rank() == 1 else None, KINDS[at % len(KINDS)], 1, "clip_grad_norm_"):
                clip()
            clipped = "clipped"
        except BaseException as wrong:
            clipped = type(wrong).__name__
        with pytest.raises(ValueError, match="no gradient") as refused:
            job.optimizer.step()
        job.set_gradients(10 + at)
        now = job.snapshot()
        assert kept.keys() == now.keys() and all(torch.equal(kept[key], now[key]) for key in kept)
        said.append((place.name, clipped, str(refused.value)))
    job.optimizer.step()
    return said


def test_an_exception_after_the_last_talk_of_clipping_lets_no_rank_step(
    pools: dict[int, RankPool], tmp_path: Path
) -> None:
    """Nobody hears of it any more; the gradients of that rank are gone, and the next step is refused everywhere."""
    first, second = pools[2].run(_after_the_norm_is_known, str(tmp_path / "store"))
    assert "foreach_mul_" in {name for name, *_ in second}
    raised = {"ExchangeError", *(kind.__name__ for kind in STAYS)}
    for (_, clipped, refused), (_, there, refused_there) in zip(first, second, strict=True):
        assert clipped == "clipped" and there in raised
        assert "no gradient" in refused and refused == refused_there


def _model_refuses(store: str, folder: str) -> tuple[list[str], bool]:
    """A model whose own hook raises on rank 1 when weights are loaded into it: what loading and stepping say."""
    join(store)
    job = Saved()
    job.step(1)
    checkpoint.save(folder, job.model, job.optimizer)
    saved = job.snapshot()
    job.step(2)
    armed = [dist.get_rank() == 1]

    def hook(module: nn.Module, incompatible: Any) -> None:
        if armed[0]:
            raise KeyError(MARK)

    job.model.register_load_state_dict_post_hook(hook)
    said, began = [], time.monotonic()
    for call in (lambda: checkpoint.load(folder, job.model, job.optimizer), lambda: job.step(3)):
        try:
            call()
            said.append("done")
        except (ValueError, ExchangeError) as wrong:
            said.append(f"{type(wrong).__name__}: {wrong}")
    assert time.monotonic() - began < PROMPT, said
    armed[0] = False
    checkpoint.load(folder, job.model, job.optimizer)
    loaded = job.snapshot()
    same = all(torch.equal(value, loaded[key]) for key, value in saved.items() if "gradient" not in key)
    job.step(4)
    return said, same


def test_weights_that_one_ranks_model_refuses_are_refused_on_all_and_no_step_follows(
    pools: dict[int, RankPool], tmp_path: Path
) -> None:
    """Refused last, when the other ranks have loaded everything and would train on without that one."""
    for (loading, stepping), same in pools[2].run(_model_refuses, str(tmp_path / "store"), str(tmp_path / "job")):
        assert loading.startswith("ValueError: rank 1: ") and MARK in loading
        assert stepping.startswith("ExchangeError") and MARK in stepping
        assert same
