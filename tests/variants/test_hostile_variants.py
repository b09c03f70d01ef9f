"""Variants where someone means them harm: torch's defaults, odd views, groups that change, one rank that differs."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from process_default import process_default
from tolerances import assert_bitwise
from torch import Tensor, nn
from variant_cases import CASES, LATER, TOGETHER

from shardmuon import Muon
from shardmuon.variants import VARIANTS, keeping
from shardmuon_qkclip import QKClip

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
OPTIONS = {"weight_decay": 0.0}
KEEPING = [*(name for name in CASES if keeping(VARIANTS[name].stages)), TOGETHER]


def _normal(*shape: int, seed: int, dtype: torch.dtype = FP32) -> Tensor:
    made = torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed), dtype=FP64, device="cpu")
    return made.to(dtype)


def _steps(optimizer: Muon, first: int, last: int) -> None:
    for number in range(first, last):
        for at, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            p.grad = _normal(*p.shape, seed=100 * number + at, dtype=p.dtype)
        optimizer.step()


def _run(variant: str, dtype: torch.dtype = FP32) -> dict[str, Tensor]:
    p = nn.Parameter(_normal(6, 9, seed=1, dtype=dtype))
    optimizer = Muon([("p", p)], lr=0.02, variant=variant, **OPTIONS)
    _steps(optimizer, 0, 3)
    return {"weight": p.detach(), **optimizer.state[p]}


@pytest.mark.parametrize("default", ["bfloat16", "float16", "float64", "meta"])
@pytest.mark.parametrize("variant", [*CASES, TOGETHER])
def test_torchs_default_dtype_and_device_change_no_bit(variant: str, default: str) -> None:
    for dtype in (FP32, BF16, FP64):
        expected = _run(variant, dtype)
        with process_default(default):
            found = _run(variant, dtype)
        assert found.keys() == expected.keys()
        for key, value in found.items():
            assert_bitwise(value, expected[key], what=f"{key}, {dtype}")


@pytest.mark.parametrize("variant", KEEPING)
def test_a_group_that_becomes_adamws_and_muons_again_keeps_nothing_stale(variant: str) -> None:
    params = [nn.Parameter(_normal(6, 4, seed=i)) for i in range(2)]
    groups: list[dict[str, Any]] = [{"params": [(f"p{i}", p)]} for i, p in enumerate(params)]
    optimizer = Muon(groups, lr=0.02, variant=variant, **OPTIONS)
    _steps(optimizer, 0, 2)
    optimizer.param_groups[1]["use_muon"] = False
    _steps(optimizer, 2, 4)
    assert set(optimizer.state[params[1]]) == {"step", "exp_avg", "exp_avg_sq"}
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # its own state is no stranger's
    optimizer.param_groups[1]["use_muon"] = True
    weight = params[1].detach().clone()
    _steps(optimizer, 4, 6)

    fresh = nn.Parameter(weight)  # what it kept two steps ago is of other weights
    other = Muon([("p1", fresh)], lr=0.02, variant=variant, **OPTIONS)
    for number in (4, 5):
        fresh.grad = _normal(6, 4, seed=100 * number + 1)
        other.step()
    assert_bitwise(params[1], fresh)


@pytest.mark.stated
@pytest.mark.parametrize("products", [BF16, FP32, FP64])
@pytest.mark.parametrize("variant", ["normuon", "muon_eq+normuon", "hyperball", *LATER])
def test_stages_see_results_of_one_dtype_however_many_matrices_a_batch_has(variant: str, products: torch.dtype) -> None:
    """Owners have other batches on every layout: what stages compute in must not hang on them."""

    def run(count: int) -> dict[str, Tensor]:
        params = [nn.Parameter(_normal(12, 20, seed=i)) for i in range(count)]
        options: dict[str, Any] = {"method": "standard", "ns_dtype": products, **OPTIONS}
        optimizer = Muon(params, lr=0.02, variant=variant, **options)
        _steps(optimizer, 0, 3)
        return {"weight": params[0].detach(), **optimizer.state[params[0]]}

    assert_bitwise(run(3), run(1))


class Attention(nn.Module):
    """Two query heads on one key head; `eager` writes attention out."""

    def __init__(self, eager: bool) -> None:
        super().__init__()
        self.head_dim, self.eager = 4, eager
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(8, n, bias=False) for n in (8, 4, 4, 8))

    def forward(self, x: Tensor) -> Tensor:  # (B, T, 8)
        q, k, v = (t(x).unflatten(-1, (t.out_features // 4, 4)).mT for t in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (t.permute(0, 3, 1, 2) for t in (q, k, v))
        if self.eager:
            mixed = torch.softmax(q @ k.mT / 2, dim=-1) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k.expand(q.shape), v.expand(q.shape))
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


def _clipped(eager: bool = False) -> tuple[nn.Module, Muon, QKClip]:
    model = Attention(eager)
    for i, p in enumerate(model.parameters()):
        p.data.copy_(_normal(*p.shape, seed=i))
    optimizer = Muon(model, lr=0.02)
    return model, optimizer, QKClip(model, optimizer, tau=0.5)


@pytest.mark.parametrize("shape", [(0, 3, 8), (2, 0, 8)])
@pytest.mark.parametrize("eager", [False, True])
def test_a_batch_of_nothing_is_measured_as_nothing(eager: bool, shape: tuple[int, ...]) -> None:
    """The last batch of one rank, or an expert's: an error there would leave the other ranks waiting."""
    model, optimizer, clip = _clipped(eager)
    model(torch.zeros(shape)).sum().backward()
    optimizer.step()
    assert clip.report.layers[0].maxima.tolist() == [-math.inf, -math.inf]
    assert clip.report.num_clipped == 0


def test_a_models_copy_is_not_measured_in_its_place() -> None:
    """Averages and reference models are made by deepcopy, which copies hooks as they are."""
    model, _, clip = _clipped()
    other = copy.deepcopy(model)
    for p in other.parameters():
        p.data.mul_(5.0)
    x = _normal(2, 3, 8, seed=9)
    model(x).sum().backward()
    expected = {name: t.clone() for name, t in clip._pending.items()}
    assert list(expected) == [""]
    other(x).sum().backward()
    assert_bitwise(clip._pending, expected)


@pytest.mark.parametrize("default", ["bfloat16", "meta"])
def test_qk_clip_follows_no_default_of_torch(default: str) -> None:
    def run(name: str) -> list[Tensor]:
        model, optimizer, _ = _clipped()
        x = _normal(2, 3, 8, seed=9)
        with process_default(name):
            model(x).square().mean().backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    assert_bitwise(run(default), run("float32"))
