"""Tests of variants under unusual conditions: changed groups, empty batches, copied models, and torch's global
defaults."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from process_default import process_default
from qkclip.test_qk_clip import Eager, Llama
from spectra import normal
from tolerances import assert_bitwise
from torch import Tensor, nn
from variant_cases import CASES, TOGETHER

from shardmuon import Muon
from shardmuon.variants import VARIANTS, keeping
from shardmuon_qkclip import QKClip

KEEPING = [*(name for name in CASES if keeping(VARIANTS[name])), TOGETHER]


def _steps(optimizer: Muon, numbers: range) -> None:
    for number in numbers:
        for group in optimizer.param_groups:
            for name, p in zip(group["param_names"], group["params"], strict=True):
                p.grad = normal(*p.shape, seed=100 * number + ord(name))
        optimizer.step()


@pytest.mark.parametrize("variant", KEEPING)
def test_a_group_that_becomes_adamws_and_muons_again_keeps_nothing_stale(variant: str) -> None:
    params = {name: nn.Parameter(normal(6, 4, seed=ord(name))) for name in "ab"}
    groups = [{"params": [(name, p)]} for name, p in params.items()]
    optimizer = Muon(groups, lr=0.02, variant=variant, weight_decay=0.0)
    _steps(optimizer, range(2))
    optimizer.param_groups[1]["use_muon"] = False
    _steps(optimizer, range(2, 4))
    assert set(optimizer.state[params["b"]]) == {"step", "exp_avg", "exp_avg_sq"}
    # The optimizer must accept its own state dict after a group has changed from Muon to AdamW.
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.param_groups[1]["use_muon"] = True
    # When the group of parameter "b" changes back from AdamW to Muon, "b" must start with fresh state, because its old
    # Muon state belongs to the weights from two steps earlier.
    fresh = nn.Parameter(params["b"].detach().clone())
    for one in (optimizer, Muon([("b", fresh)], lr=0.02, variant=variant, weight_decay=0.0)):
        _steps(one, range(4, 6))
    assert_bitwise(params["b"], fresh)


def _clipped(kind: type[Llama]) -> tuple[Llama, Muon, QKClip]:
    model = kind()
    for seed, p in enumerate(model.parameters()):
        p.data.copy_(normal(*p.shape, seed=seed))
    optimizer = Muon(model, lr=0.02)
    return model, optimizer, QKClip(model, optimizer, tau=0.5)


@pytest.mark.parametrize("shape", [(0, 3, 12), (2, 0, 12)])
@pytest.mark.parametrize("kind", [Llama, Eager])
def test_a_batch_of_nothing_is_measured_as_nothing(kind: type[Llama], shape: tuple[int, ...]) -> None:
    """A rank's last batch, or the batch of one expert, may be empty. QK-clip must accept empty batches, because an
    error on one rank would leave the other ranks waiting."""
    model, optimizer, clip = _clipped(kind)
    model(torch.zeros(shape)).sum().backward()
    optimizer.step()
    assert (clip.report.layers[0].maxima.tolist(), clip.report.num_clipped) == ([-math.inf] * 6, 0)


def test_a_models_copy_is_not_measured_in_its_place() -> None:
    """deepcopy, which is used to create averaged and reference models, also copies QK-clip's hooks. The forward passes
    of the copy must not be measured."""
    model, _, clip = _clipped(Llama)
    other = copy.deepcopy(model)
    for p in other.parameters():
        p.data.mul_(5.0)
    x = normal(2, 3, 12, seed=9)
    model(x).sum().backward()
    expected = {name: t.clone() for name, t in clip._pending.items()}
    assert list(expected) == [""]
    other(x).sum().backward()
    assert_bitwise(clip._pending, expected)


@pytest.mark.parametrize("default", ["bfloat16", "meta"])
def test_qk_clip_follows_no_default_of_torch(default: str) -> None:
    def run(name: str) -> list[Tensor]:
        model, optimizer, _ = _clipped(Llama)
        x = normal(2, 3, 12, seed=9)
        with process_default(name):
            model(x).square().mean().backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    assert_bitwise(run(default), run("float32"))
