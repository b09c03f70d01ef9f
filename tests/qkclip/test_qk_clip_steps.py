"""Tests that check which forward passes affect QK-clip in an optimizer step, and which errors are raised between and
during steps."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from spectra import normal
from test_qk_clip import Llama, assert_measured, largest
from tolerances import assert_bitwise
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recomputed

from shardmuon import Muon, checkpoint
from shardmuon_qkclip import QKClip

TAU = 0.5


class Job:
    """A job that trains two attention layers with QK-clip. The linear layer between them is not trained."""

    def __init__(self, folder: Path | None = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.model, self.file = nn.Sequential(Llama(), nn.Linear(12, 12, bias=False), Llama(groups=6)), folder
        for at in (0, 2):
            self.model[at].q_proj.weight.data.mul_(6.0)
        named = [(f"{at}.{name}", p) for at in (0, 2) for name, p in self.model[at].named_parameters()]
        self.optimizer = Muon(named, lr=0.02)
        self.clip = QKClip(self.model, self.optimizer, tau=TAU, **options)

    def loss(self, seed: int, scale: float = 1.0) -> Tensor:
        return self.model(scale * normal(2, 5, 12, seed=seed)).square().mean()

    def step(self, *seeds: int) -> list[Tensor]:
        """Take an optimizer step on the batches drawn from the given seeds. Return the largest logit of each head in
        both attention layers, computed in fp64."""
        first = [normal(2, 5, 12, seed=seed) for seed in seeds]
        with torch.no_grad():
            inputs = {0: first, 2: [self.model[:2](x) for x in first]}
        seen = [torch.stack([largest(self.model[at], x) for x in xs]).amax(0) for at, xs in inputs.items()]
        for seed in seeds:
            self.loss(seed).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return seen

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


# ------------------------------------------------------------------------------------------ what led to no step


def _backward(job: Job, scale: float = 30.0) -> None:
    job.loss(50, scale).backward()
    job.model.zero_grad()


NO_STEP: dict[str, tuple[Callable[[Job], Any], ...]] = {
    "evaluation": (torch.no_grad()(lambda job: job.loss(50, 30.0)),),
    "a batch that is not finite": (partial(_backward, scale=math.nan),),
    "state loaded": (_backward, lambda job: job.optimizer.load_state_dict(job.optimizer.state_dict())),
    "a checkpoint loaded": (
        lambda job: checkpoint.save(job.file, job.model, job.optimizer),
        _backward,
        lambda job: checkpoint.load(job.file, job.model, job.optimizer),
    ),
    "reset": (_backward, lambda job: job.clip.reset()),
}


@pytest.mark.parametrize("name", NO_STEP)
def test_forwards_that_lead_to_no_step_clip_nothing(name: str, tmp_path: Path) -> None:
    """Forward passes that are not followed by an optimizer step, as in an evaluation, must not affect QK-clip. The
    weights must be bitwise identical to those of a job without these forward passes."""
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
        x = normal(2, 5, 12, seed=seed).requires_grad_(reentrant is not None)
        for layer in job.model:
            x = layer(x) if reentrant is None else recomputed(layer, x, use_reentrant=reentrant)
        return x.square().mean()

    def run() -> None:
        how(loss(seed) for seed in (1, 2, 3))

    wanted = plain.step(1, 2, 3)
    job.optimizer.step(run if in_a_closure else run())
    assert_measured(job.clip, wanted)
    # Weights are compared only for `_in_turn`, which runs one backward pass per loss and therefore sums the gradients
    # in the same order as the reference job `plain`.
    if how is _in_turn:
        assert_bitwise(job.weights(), plain.weights())


# --------------------------------------------------------------------------------------------- mistakes, in time


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda: {"0": torch.zeros(5)}, r"logits of '0': found torch.Size\(\[5\]\), expected"),
        (lambda: {"x": torch.zeros(6)}, r"logits of 'x': found .*numbers of heads are \{'0': 6, '2': 6\}"),
        (lambda: {}["max_logit"], "QK-clip: the function logits=: .*'max_logit'"),
        (lambda: [1.0], "logits=: TypeError"),
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
    x = normal(2, 5, 12)
    for number in range(3):
        (model["seen"](x).sum() + model["own"].forward(x).sum()).backward()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            optimizer.step()
        texts = [str(one.message) for one in said if "QK-clip" in str(one.message)]
        assert ["'own'" in text and "'seen'" not in text for text in texts] == [True] * (number == 0)
    assert clip.report.layers[1].maxima.max() == -math.inf
