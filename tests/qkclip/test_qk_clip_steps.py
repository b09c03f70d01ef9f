"""Forward passes that a step clips by, and what happens to QK-clip when something goes wrong between or in steps."""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from test_qk_clip import Llama, _normal, assert_measured, largest
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as recomputed

from shardmuon import Muon, checkpoint
from shardmuon.errors import ExchangeError
from shardmuon.testing import RankPool
from shardmuon.testing.tolerances import assert_bitwise, assert_rounded
from shardmuon_qkclip import QKClip, scaling

TAU = 0.5


class Job:
    """Two layers, of which another optimizer trains a part of its own."""

    def __init__(self, folder: Path | None = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.model, self.file = (
            nn.Sequential(Llama(), nn.Linear(12, 12, bias=False), Llama(groups=6)),
            cast(Path, folder),
        )
        for at in (0, 2):
            self.model[at].q_proj.weight.data.mul_(6.0)
        named = [(f"{at}.{name}", p) for at in (0, 2) for name, p in self.model[at].named_parameters()]
        self.optimizer = Muon(named, lr=0.02)
        self.side = Muon(self.model[1], lr=0.02)
        self.clip = QKClip(self.model, self.optimizer, tau=TAU, **options)

    def loss(self, seed: int, scale: float = 1.0) -> Tensor:
        return self.model(_normal(2, 5, 12, seed=seed, scale=scale)).square().mean()

    def seen(self, *seeds: int) -> list[Tensor]:
        """The largest logits of both layers for batches, in fp64."""
        found = []
        for x in (_normal(2, 5, 12, seed=seed) for seed in seeds):
            with torch.no_grad():
                found.append((largest(self.model[0], x), largest(self.model[2], self.model[:2](x))))
        return [torch.stack(layer).amax(0) for layer in zip(*found, strict=True)]

    def step(self, *seeds: int) -> list[Tensor]:
        """Returns what the largest logits are, in fp64."""
        seen = self.seen(*seeds)
        for seed in seeds:
            self.loss(seed).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return seen

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def keep(self) -> None:
        self.good = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def load(self) -> None:
        self.model.load_state_dict(self.good[0])
        self.optimizer.load_state_dict(self.good[1])


# ------------------------------------------------------------------------------------------ what led to no step


def _evaluate(job: Job) -> None:
    with torch.no_grad():
        job.loss(50, 30.0)


def _backward(job: Job, scale: float = 30.0) -> None:
    job.loss(50, scale).backward()
    job.model.zero_grad()


def _step_the_side(job: Job) -> None:
    kept = job.model[1].weight.detach().clone()
    job.model[1].weight.grad = torch.ones_like(kept)
    job.side.step()
    job.model[1].weight.data.copy_(kept)
    job.model.zero_grad()


NO_STEP: dict[str, tuple[Callable[[Job], Any], ...]] = {
    "evaluation": (_evaluate,),
    "a batch that is not finite": (partial(_backward, scale=math.nan),),  # finite ones count
    "another optimizer's": (_step_the_side,),
    "rolled back": (Job.keep, _backward, Job.load),
    "loaded": (
        lambda job: checkpoint.save(job.file, job.model, job.optimizer),
        _backward,
        lambda job: checkpoint.load(job.file, job.model, job.optimizer),
    ),
    "reset": (_backward, lambda job: job.clip.reset()),
}


@pytest.mark.parametrize("name", NO_STEP)
def test_forwards_that_lead_to_no_step_clip_nothing(name: str, tmp_path: Path) -> None:
    """The weights have the bits of a job in which it did not happen."""
    job, plain = Job(tmp_path / "file"), Job()
    for one in (job, plain):
        one.step(1)
    for event in NO_STEP[name]:
        event(job)
    wanted = job.step(2, 3)
    plain.step(2, 3)
    assert job.clip.report.num_clipped > 0
    assert_measured(job.clip, wanted)
    assert_bitwise(job.weights(), plain.weights())


# ------------------------------------------------------------------------------------------------ what led to one


def _in_turn(job: Job, losses: list[Callable[[], Tensor]]) -> None:
    for loss in losses:
        loss().backward()


def _forwards_first(job: Job, losses: list[Callable[[], Tensor]]) -> None:
    torch.stack([loss() for loss in losses]).sum().backward()


def _in_a_closure(job: Job, losses: list[Callable[[], Tensor]]) -> Callable[[], None]:
    def closure() -> None:
        job.optimizer.zero_grad()
        _in_turn(job, losses)

    return closure


@pytest.mark.parametrize("how", [_in_turn, _forwards_first, _in_a_closure])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_all_forwards_of_a_step_count(how: Any, reentrant: bool | None) -> None:
    job, plain = Job(), Job()

    def loss(seed: int) -> Tensor:
        if reentrant is None:
            return job.loss(seed)
        x = _normal(2, 5, 12, seed=seed).requires_grad_()
        for layer in job.model:
            x = recomputed(layer, x, use_reentrant=reentrant)
        return x.square().mean()

    wanted = plain.step(1, 2, 3)
    job.optimizer.step(how(job, [lambda seed=seed: loss(seed) for seed in (1, 2, 3)]))
    assert_measured(job.clip, wanted)
    if how in (_in_turn, _in_a_closure):  # gradients of one order
        assert_bitwise(job.weights(), plain.weights())


def _accumulated(kind: str) -> tuple[list[Tensor], list[Tensor]]:
    """Measurements over three batches of each rank, of which two send no gradients; and each rank's own in fp64."""
    job = Job()
    job.clip.close()
    seeds = [10 * dist.get_rank() + number for number in range(3)]
    own = job.seen(*seeds)
    model: Any = DistributedDataParallel(job.model) if kind == "ddp" else fully_shard(job.model)
    optimizer = Muon(model, lr=0.02, **({"process_group": dist.group.WORLD} if kind == "ddp" else {}))
    clip = QKClip(model, optimizer, tau=TAU)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of outputs that are views
        for seed in seeds:
            if kind == "ddp":
                model.require_backward_grad_sync = seed == seeds[-1]  # what `no_sync` sets
            else:
                model.set_requires_gradient_sync(seed == seeds[-1])
            model(_normal(2, 5, 12, seed=seed)).square().mean().backward()
    optimizer.step()
    assert clip.report.num_clipped > 0
    return [layer.maxima for layer in clip.report.layers], own


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_accumulated_batches_of_all_ranks_count(kind: str, world2: RankPool) -> None:
    found = world2.run(_accumulated, kind)
    assert_bitwise(found[0][0], found[1][0])
    for at, here in enumerate(found[0][0]):
        wanted = torch.stack([own[at] for _, own in found]).amax(0)
        assert_rounded(here, wanted, roundings=80, dtype=torch.float32, scale=float(wanted.abs().max()))


# --------------------------------------------------------------------------------------------- mistakes, in time


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda job: QKClip(job.model, job.side),
            "0: 0.q_proj.weight is not among the weights of Muon.*leave the layer",
        ),
        (
            lambda job: QKClip(job.model, Muon(Job().model, lr=0.02)),
            "0.q_proj.weight is not among.*another tensor of that name is none",
        ),
        (
            lambda job: QKClip(job.model, Muon(Job().model, lr=0.02), layers=job.clip.layers),
            "0.q_proj.weight is not among.*another tensor of that name is none",
        ),
    ],
)
def test_weights_that_are_not_the_optimizers_are_found_when_it_is_made(make: Callable[[Job], None], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make(Job())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda: {"0": torch.zeros(5)}, r"logits of '0': found \(5,\)"),
        (lambda: {"x": torch.zeros(6)}, "logits of 'x': no such layer"),
        (lambda: {}["max_logit"], "QK-clip: the function logits= raised KeyError: 'max_logit'"),
        (lambda: [1.0], "logits= raised TypeError"),
    ],
)
def test_what_is_wrong_with_given_logits_is_raised_when_the_step_is_done(given: Any, said: str) -> None:
    job, plain = Job(logits=given), Job(logits=dict)
    for one in (job, plain):
        one.loss(1).backward()
    plain.optimizer.step()
    with pytest.raises(RuntimeError, match=f"{said}.*The step itself is done; QK-clip has scaled nothing after it"):
        job.optimizer.step()
    assert_bitwise(job.weights(), plain.weights())
    assert job.optimizer.broken is None
    job.clip._measure = dict
    job.optimizer.step()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("none left"), KeyboardInterrupt("none left")])
def test_an_exception_while_it_scales_is_the_last_step_until_state_is_loaded(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one process without ranks. Ranks: test_qk_clip_faults.py."""
    job, plain = Job(), Job()
    for one in (job, plain):
        one.step(1)
    job.keep()
    views, calls = scaling._views, itertools.count()
    with torch.no_grad():
        job.model[0].q_proj.weight.mul_(50.0)
    # q is scaled, k is not
    monkeypatch.setattr(scaling, "_views", lambda *args: raised(error) if next(calls) else views(*args))
    with pytest.raises(type(error), match="none left"):
        job.step(2)
    monkeypatch.undo()
    before = job.weights()
    with pytest.raises(ExchangeError, match=rf"QK-clip was broken off: {type(error).__name__}.*half scaled"):
        job.optimizer.step()
    assert_bitwise(job.weights(), before)
    job.optimizer.zero_grad()
    job.load()
    for one in (job, plain):
        one.step(2)
        one.step(3)
    assert_bitwise(job.weights(), plain.weights())


def raised(error: BaseException) -> Any:
    raise error


# -------------------------------------------------------------------------------------------- nothing is measured


class Own(Llama):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        weights = (q @ k.repeat_interleave(3, 1).mT).exp()
        return self.o_proj(
            (weights / weights.sum(-1, keepdim=True) @ v.repeat_interleave(3, 1)).transpose(1, 2).flatten(2)
        )


def test_layers_that_are_never_measured_are_named_once() -> None:
    model = nn.ModuleDict({"seen": Llama(), "own": Own()})
    optimizer = Muon(model, lr=0.02)
    clip = QKClip(model, optimizer)
    x = _normal(2, 5, 12)
    for number in range(3):
        (model["seen"](x).sum() + model["own"](x).sum()).backward()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            optimizer.step()
        texts = [str(one.message) for one in said if "QK-clip" in str(one.message)]
        assert len(texts) == (number == 0)
        assert number or ("'own'" in texts[0] and "'seen'" not in texts[0])
        optimizer.zero_grad()
    assert clip.report.layers[1].maxima.max() == -math.inf
