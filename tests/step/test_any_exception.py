"""Whatever is raised on one rank before the ranks have agreed is raised on all of them at once, with its cause.

No list of guarded places: the functions are found by watching a healthy call (`injection`), and an exception is raised
in each of them on one rank, of every kind in turn. A rank that hears of it late would wait for the time-out, which
is longer than the promise (`PROMPT`). Ranks share all, or parameters with some ranks only; which, is drawn, too.
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
from injection import KINDS, MARK, PROMPT, STAYS, Place, join, known_places, plant, raising
from jobs import Job, Spec, as_in, rows_on, unlike
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.tensor import DTensor, Replicate

from shardmuon import ExchangeError, GradScaler, checkpoint
from shardmuon import clip_grad_norm_ as clip_gradients
from shardmuon.testing import RankPool
from shardmuon.testing.layouts import mesh_of

pytestmark = pytest.mark.ranks

Groups = list[dict[str, Any]]


# ------------------------------------------------------------------------------------------------------------- jobs


def _mixed() -> Groups:
    """Shards, replicas, a rank's own matrices and AdamW's vectors in one optimizer."""
    cut, places = as_in("fsdp2"), {"process_group": dist.group.WORLD}
    shared = [Spec("shard", (7, 128), cut), Spec("replica", (6, 128))]
    return [
        {"params": shared, "adjust_lr_fn": "spectral", "lr": torch.tensor(0.1), **places},
        {"params": [Spec(f"own{dist.get_rank()}", (5, 128))], "process_group": (), "tp_group": ()},
        {"params": [Spec("bias", (9,), cut), Spec("scale", (4,))], "use_muon": False, "lr": 0.01, **places},
    ]


def _saved() -> Groups:
    """A DTensor, a tensor-parallel shard, a replica and AdamW's vector."""
    return [
        {"params": [Spec("shard", (7, 5), as_in("fsdp2")), Spec("replica", (4, 6))]},
        {"params": [Spec("cut", (6, 256), as_in("tp row"))], "tp_group": dist.group.WORLD, "process_group": ()},
        {"params": [Spec("bias", (9,))], "use_muon": False, "lr": 0.01},
    ]


def _everything() -> Groups:
    """Shards over pairs of ranks, rows anywhere and none on some ranks, groups of which none contains all others."""
    mesh, rank = mesh_of((2, 2)), dist.get_rank()
    parallel = {"tp_group": mesh.get_group(1), "process_group": mesh.get_group(0)}
    out: Groups = [
        {"params": [Spec(f"tp{n}", shape, as_in("tp x dp")) for n, shape in enumerate(((6, 8), (8, 6)))], **parallel},
        {"params": [Spec(f"rows{n}", (n, 6), as_in("megatron-fsdp"), lacks=True) for n in (9, 2, 7)]},
    ]
    made = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 1), (1, 2, 3))}
    for ranks, group in made.items():
        if rank in ranks:
            out.append({"params": [Spec(f"of{len(ranks)}", (6, 5))], "process_group": group})
    out.append({"params": [Spec(f"pair{rank // 2}", (7, 6), rows_on(mesh["a1"]))]})
    return [*out, {"params": [Spec("vector", (5,))], "use_muon": False}]


def _made(groups: Callable[[], Groups], **options: Any) -> Job:
    return Job(groups(), **{"lr": 0.1, "method": "standard", **options})


# ------------------------------------------------------------------------------------------------------------- cases


PLAIN = partial(_made, _mixed)
INT8 = partial(
    PLAIN,
    method="gram",
    momentum_dtype="int8",
    stochastic_rounding=True,
)
CPU = partial(
    PLAIN,
    momentum_dtype=torch.bfloat16,
    momentum_device="cpu",
)
AUDITED = partial(INT8, audit_every=1)  # not in first steps: it would find that the state goes away
SAVED = partial(_made, _saved, momentum_dtype="int8")
STRIDE = int(os.environ.get("PLANT_STRIDE", "12"))  # 1 plants in every function of the large jobs, which takes minutes
HEALTHY = 8  # after so many functions a call that must succeed: what a refusal left behind would break it, or the next


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


CASES = {
    "step": Case(2, (PLAIN, AUDITED), "step", 80),
    "first step": Case(2, (INT8, CPU), "first step", 80),
    "plan": Case(2, (PLAIN, AUDITED), "plan", 75),
    "clip": Case(2, (PLAIN,), "clip", 35),
    "clip twice": Case(2, (PLAIN,), "clip twice", 15),
    "unscale": Case(2, (PLAIN,), "unscale", 6),
    "save": Case(2, (SAVED,), "save", 10, 3),
    "load": Case(2, (SAVED,), "load", 10, 3),
    "step, everything": Case(4, (partial(_made, _everything),), "step", 20 // STRIDE, STRIDE),
    "plan, everything": Case(4, (partial(_made, _everything),), "plan", 60 // STRIDE, STRIDE),
}


class Calls(NamedTuple):
    """A job's call.

    Attributes:
        job: The job.
        call: The call, in which exceptions are planted.
        begin, last: See `known_places`.
        between: What comes before each call, given a seed.
    """

    job: Job
    call: Callable[[], object]
    begin: str
    last: str | None
    between: Callable[[int], object]

    def before(self, at: int) -> None:
        """Bring the job to its call, now and then after a healthy one and a step."""
        if not at % HEALTHY:
            self.between(at)
            self.call()
            self.job.step(10 + at)
        self.between(at)


def _calls(job: Job, what: str, folder: str) -> Calls:
    """Bring a job to where the call may come, and return it."""
    optimizer, numbers = job.optimizer, itertools.count()
    if what == "step":
        for seed in (1, 2):
            job.set_gradients(seed)
            job.step()
        job.set_gradients(3)
        return Calls(job, optimizer.step, "step", None, lambda seed: None)
    job.set_gradients(1)
    if what == "first step":
        optimizer.prepare()
        return Calls(
            job, optimizer.step, "step", None, lambda seed: optimizer.state.clear()
        )  # momentum is made in each
    if what == "plan":
        optimizer.prepare()  # what is cached runs no second time
        return Calls(job, optimizer.prepare, "renew", "_none", lambda seed: None)
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

        return Calls(job, saved_or_loaded, what, "_none", lambda seed: None)
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
    begin = {"unscale": "_unscale_grads_", "clip": "clip_grad_norm_", "clip twice": "_align"}[what]
    return Calls(job, clip_or_unscale, begin, "_none", anew)  # until the last talk


def _planted(store: str, name: str, folder: str) -> tuple[list[str], list[str], int]:
    """Functions that were found, where an exception passed unnoticed, and how often all ranks raised."""
    join(store)
    done, passed, raised = list[Place](), list[str](), 0
    _, jobs, what, _, stride = CASES[name]
    for make in jobs:
        calls = _calls(make(), what, folder)
        calls.between(0)
        known = known_places(calls.call, calls.begin) if what == "plan" else []
        calls.between(0)
        known += known_places(calls.call, calls.begin, calls.last)
        known = [place for place in dict.fromkeys(known) if place not in done]
        # unscaling says that the step must start anew, a second talk redistributes before
        held = dict if what in ("unscale", "clip twice") else calls.job.held
        # DCP makes its own of any, also of interrupts
        kinds = [kind for kind in KINDS if what not in ("save", "load") or not isinstance(kind, STAYS)]
        planted = known[len(name) % stride :: stride]
        found = plant(calls.call, planted, calls.begin, held, calls.before, kinds=kinds, again=what == "plan")
        calls.before(0)
        done, passed, raised = done + known, passed + found[0], raised + found[1]
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
            assert {"is_current", "signature", "validate", "gradient_storage"} <= {*known}
            assert {"_make", "fit", "count_of", "schedule", "digests", "_adamw_rows"} <= {*known}


# ------------------------------------------------------------------------------------------------- after the last talk


def _after_the_norm_is_known(store: str) -> list[tuple[str, str, str]]:
    """Errors of clipping and of the step after it, with an exception on rank 1 after the last talk about the norm."""
    join(store)
    job = PLAIN()
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
        kept = job.held()
        try:
            with raising(place if dist.get_rank() == 1 else None, KINDS[at % len(KINDS)], 1, "clip_grad_norm_"):
                clip()
            clipped = "clipped"
        except BaseException as wrong:
            clipped = type(wrong).__name__
        with pytest.raises(ValueError, match="no gradient") as refused:
            job.optimizer.step()
        job.set_gradients(10 + at)
        assert unlike(kept, job.held()) == []
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


def _model_refuses(store: str, folder: str) -> tuple[list[str], list[str]]:
    """A model whose own hook raises on rank 1 when weights are loaded into it: what loading and stepping say."""
    join(store)
    job = SAVED()
    job.step(1)
    checkpoint.save(folder, job.model, job.optimizer)
    saved = job.held(gradients=False)
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
    changed = unlike(saved, job.held(gradients=False))
    job.step(4)
    return said, changed


def test_weights_that_one_ranks_model_refuses_are_refused_on_all_and_no_step_follows(
    pools: dict[int, RankPool], tmp_path: Path
) -> None:
    """Refused last, when the other ranks have loaded everything and would train on without that one."""
    for (loading, stepping), changed in pools[2].run(_model_refuses, str(tmp_path / "store"), str(tmp_path / "job")):
        assert loading.startswith("ValueError: rank 1: ") and MARK in loading
        assert stepping.startswith("ExchangeError") and MARK in stepping
        assert changed == []
