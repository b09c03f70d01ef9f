"""Forward passes that a step clips by, and what happens to QK-clip when something goes wrong between or in steps."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_qk_clip import Llama, _normal, assert_maxima, assert_measured, largest
from tolerances import assert_bitwise
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as recomputed

from shardmuon import Muon, checkpoint
from shardmuon.testing import RankPool
from shardmuon_qkclip import QKClip

TAU = 0.5


class Job:
    """Two layers, of which another optimizer trains a part of its own."""

    def __init__(self, folder: Path | None = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.model, self.file = nn.Sequential(Llama(), nn.Linear(12, 12, bias=False), Llama(groups=6)), folder
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
        first = [_normal(2, 5, 12, seed=seed) for seed in seeds]
        with torch.no_grad():
            inputs = {0: first, 2: [self.model[:2](x) for x in first]}
        return [torch.stack([largest(self.model[at], x) for x in xs]).amax(0) for at, xs in inputs.items()]

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


def _backward(job: Job, scale: float = 30.0) -> None:
    job.loss(50, scale).backward()
    job.model.zero_grad()


def _step_the_side(job: Job) -> None:
    kept = copy.deepcopy(job.model[1].state_dict())
    job.model[1].weight.grad = torch.ones_like(job.model[1].weight)
    job.side.step()
    job.model[1].load_state_dict(kept)


NO_STEP: dict[str, tuple[Callable[[Job], Any], ...]] = {
    "evaluation": (torch.no_grad()(lambda job: job.loss(50, 30.0)),),
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


def _in_turn(losses: Iterator[Tensor]) -> None:
    for loss in losses:
        loss.backward()


def _forwards_first(losses: Iterator[Tensor]) -> None:
    torch.stack(list(losses)).sum().backward()


@pytest.mark.parametrize("in_a_closure", [False, True])
@pytest.mark.parametrize("how", [_in_turn, _forwards_first])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_all_forwards_of_a_step_count(how: Any, reentrant: bool | None, in_a_closure: bool) -> None:
    job, plain = Job(), Job()

    def loss(seed: int) -> Tensor:
        x = _normal(2, 5, 12, seed=seed).requires_grad_(reentrant is not None)
        for layer in job.model:
            x = layer(x) if reentrant is None else recomputed(layer, x, use_reentrant=reentrant)
        return x.square().mean()

    def run() -> None:
        how(loss(seed) for seed in (1, 2, 3))

    wanted = plain.step(1, 2, 3)
    job.optimizer.step(run if in_a_closure else run())
    assert_measured(job.clip, wanted)
    if how is _in_turn:  # gradients of one order
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
    warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)  # of outputs that are views
    for seed in seeds:
        if kind == "ddp":
            model.require_backward_grad_sync = seed == seeds[-1]  # what `no_sync` sets
        else:
            model.set_requires_gradient_sync(seed == seeds[-1])
        model(_normal(2, 5, 12, seed=seed)).square().mean().backward()
    optimizer.step()
    return [layer.maxima for layer in clip.report.layers], own


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_accumulated_batches_of_all_ranks_count(kind: str, world2: RankPool) -> None:
    found = world2.run(_accumulated, kind)
    assert_bitwise(found[0][0], found[1][0])
    assert_maxima(found[0][0], [torch.stack(own).amax(0) for own in zip(*(own for _, own in found), strict=True)])


# --------------------------------------------------------------------------------------------- mistakes, in time


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
    plain.step(1)
    with pytest.raises(RuntimeError, match=f"{said}.*The step itself is done; QK-clip has scaled nothing after it"):
        job.step(1)
    assert_bitwise(job.weights(), plain.weights())
    job.clip._measure = dict
    job.optimizer.step()


# -------------------------------------------------------------------------------------------- nothing is measured


def test_layers_that_are_never_measured_are_named_once() -> None:
    model = nn.ModuleDict({"seen": Llama(), "own": Llama()})
    optimizer = Muon(model, lr=0.02)
    clip = QKClip(model, optimizer)
    x = _normal(2, 5, 12)
    for number in range(3):
        (model["seen"](x).sum() + model["own"].forward(x).sum()).backward()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            optimizer.step()
        texts = [str(one.message) for one in said if "QK-clip" in str(one.message)]
        assert ["'own'" in text and "'seen'" not in text for text in texts] == [True] * (number == 0)
    assert clip.report.layers[1].maxima.max() == -math.inf
