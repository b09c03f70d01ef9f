"""Tests of exceptions that one rank raises during a collective call, such as an optimizer step, before the ranks have
agreed to go ahead with it. Such an exception must promptly cause an error on all ranks, and every error must name the
cause.

The tests trace a successful call to find the functions that it enters, and then raise exceptions in these functions
(see `injection.py`).
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
    cut, places = as_in("fsdp2"), {"process_group": dist.group.WORLD}
    shared = [Spec("shard", (7, 128), cut), Spec("replica", (6, 128))]
    return [
        {"params": shared, "adjust_lr_fn": "spectral", "lr": torch.tensor(0.1), **places},
        {"params": [Spec(f"own{dist.get_rank()}", (5, 128))], "process_group": (), "tp_group": ()},
        {"params": [Spec("bias", (9,), cut), Spec("scale", (4,))], "use_muon": False, "lr": 0.01, **places},
    ]


def _saved() -> Groups:
    return [
        {"params": [Spec("shard", (7, 5), as_in("fsdp2")), Spec("replica", (4, 6))]},
        {"params": [Spec("cut", (6, 256), as_in("tp row"))], "tp_group": dist.group.WORLD, "process_group": ()},
        {"params": [Spec("bias", (9,))], "use_muon": False, "lr": 0.01},
    ]


def _everything() -> Groups:
    """Return parameter groups that combine tensor-parallel shards on pairs of ranks, uneven row shards (some ranks
    store no rows), and overlapping process groups, none of which contains all the others."""
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
# The case "first step" is not audited, because it clears the optimizer state, which an audit would report. The case
# "plan" is not audited, because an audit runs no code while a plan is made.
AUDITED = partial(INT8, audit_every=1)
SAVED = partial(_made, _saved, momentum_dtype="int8")
# By default, exceptions are raised in every 12th function that a large job calls. PLANT_STRIDE=1 raises them in every
# function, which takes minutes.
STRIDE = int(os.environ.get("PLANT_STRIDE", "12"))
# Number of failing calls between two undisturbed calls. Each undisturbed call, and a step after it, must succeed, which
# shows that the failing calls have left no changes behind.
HEALTHY = 16


class Case(NamedTuple):
    """A call in which exceptions are raised on purpose.

    Attributes:
        world: Number of ranks.
        jobs: Functions that create jobs. Every job makes the call. In later jobs, exceptions are raised only in
            functions that no earlier job has entered.
        what: The kind of call, such as "step" or "clip" (see `_calls`).
        least: Minimum number of injected exceptions that must cause an error on all ranks.
        stride: Exceptions are raised in every `stride`-th function that the call enters.
    """

    world: int
    jobs: Sequence[Callable[[], Job]]
    what: str
    least: int
    stride: int = 1


CASES = {
    "step": Case(2, (PLAIN, AUDITED), "step", 80),
    "first step": Case(2, (INT8, CPU), "first step", 80),
    "plan": Case(2, (PLAIN, INT8), "plan", 75),
    "clip": Case(2, (PLAIN,), "clip", 35),
    "clip twice": Case(2, (PLAIN,), "clip twice", 15),
    "unscale": Case(2, (PLAIN,), "unscale", 6),
    "save": Case(2, (SAVED,), "save", 10, 3),
    "load": Case(2, (SAVED,), "load", 10, 3),
    "step, everything": Case(4, (partial(_made, _everything),), "step", 20 // STRIDE, STRIDE),
    "plan, everything": Case(4, (partial(_made, _everything),), "plan", 60 // STRIDE, STRIDE),
}


class Calls(NamedTuple):
    """A call that one job makes, and the part of the call in which exceptions are raised.

    Attributes:
        job: The job whose optimizer or model `call` uses.
        call: A function without arguments, such as the optimizer's `step`.
        begin, last: Names of the functions between which exceptions are raised (see `known_places`).
        between: A function that takes a seed and prepares the job before each call.
    """

    job: Job
    call: Callable[[], object]
    begin: str
    last: str | None
    between: Callable[[int], object]

    def before(self, at: int) -> None:
        """Prepare the job for call number `at`. Before every `HEALTHY`-th call, also make an undisturbed call and take
        a step, both of which must succeed."""
        if not at % HEALTHY:
            self.between(at)
            self.call()
            self.job.step(10 + at)
        self.between(at)


def _calls(job: Job, what: str, folder: str) -> Calls:
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
        return Calls(job, optimizer.step, "step", None, lambda seed: optimizer.state.clear())
    if what == "plan":
        # Call `prepare` once to fill the caches, because functions whose results are cached do not run again in later
        # calls.
        optimizer.prepare()
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
    # The first call to `scale` creates GradScaler's scale tensor, which `unscale_` needs.
    scaler.scale(torch.ones(()))

    def clip_or_unscale() -> None:
        if what == "unscale":
            scaler._per_optimizer_states.clear()
            scaler.unscale_(optimizer)
        else:
            clip_gradients(optimizer, 1e9, process_group=dist.group.WORLD)

    def anew(seed: int) -> None:
        job.set_gradients(10 + seed)
        # If a gradient is placed differently from its parameter, the ranks redistribute the gradient between two
        # message exchanges.
        if what == "clip twice":
            grad = job.model.shard.grad
            assert isinstance(grad, DTensor)
            job.model.shard.grad = grad.redistribute(placements=[Replicate()])

    clip_or_unscale()
    begin = {"unscale": "_unscale_grads_", "clip": "clip_grad_norm_", "clip twice": "_align"}[what]
    # No function is named "_none", so `known_places` returns all functions up to the last collective of the call.
    return Calls(job, clip_or_unscale, begin, "_none", anew)


def _planted(store: str, name: str, folder: str) -> tuple[list[str], list[str], int]:
    """Repeat a call, and raise an exception in another one of its functions each time. Return the names of all
    functions that the call enters, descriptions of the exceptions that went unnoticed, and the number of exceptions
    that made all ranks raise an error."""
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
        # The calls "unscale" and "clip twice" may change gradients even if they raise an error, so values before and
        # after these calls are not compared. After a failed unscaling, gradients must be recomputed anyway. Clipping
        # may redistribute a gradient before its second message exchange.
        held = dict if what in ("unscale", "clip twice") else calls.job.held
        # A step passes exceptions of the types in STAYS on to the caller as they are. Saving and loading are tested
        # without these types, because torch.distributed.checkpoint (DCP) wraps every exception, even KeyboardInterrupt,
        # in its own class.
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
    """Raise an exception on rank 1 in each function that runs after the ranks have agreed on the gradient norm. For
    each function, return its name and the errors raised by clipping and by the next step."""
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
    first, second = pools[2].run(_after_the_norm_is_known, str(tmp_path / "store"))
    assert "foreach" in {name for name, *_ in second}
    raised = {"ExchangeError", *(kind.__name__ for kind in STAYS)}
    for (_, clipped, refused), (_, there, refused_there) in zip(first, second, strict=True):
        assert clipped == "clipped" and there in raised
        assert "no gradient" in refused and refused == refused_there


def _model_refuses(store: str, folder: str) -> tuple[list[str], list[str]]:
    """Load a checkpoint into a model whose load hook raises an exception on rank 1. Return the errors of loading and of
    the next step, and the names of all values that differ from the checkpoint after a second, successful load."""
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
    """Rank 1's load hook raises an exception after the other ranks have loaded all weights. Every rank must raise an
    error that names rank 1, and another error in the next step."""
    for (loading, stepping), changed in pools[2].run(_model_refuses, str(tmp_path / "store"), str(tmp_path / "job")):
        assert loading.startswith("ValueError: rank 1: ") and MARK in loading
        assert stepping.startswith("ExchangeError") and MARK in stepping
        assert changed == []
