"""Control of the norm of weights: the formulas in fp64, zeros, state."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from tolerances import assert_bitwise, assert_rounded
from torch import Tensor, nn

from shardmuon import Muon, audit

SHAPES = [(12, 12), (17, 5), (6, 20)]
WIDE = {"method": "standard", "ns_dtype": torch.float64}


def _normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _weights(scale: float = 1.0) -> list[nn.Parameter]:
    return [nn.Parameter(scale * _normal(*shape, seed=7000 + i)) for i, shape in enumerate(SHAPES)]


def _muon(params: list[nn.Parameter], **options: Any) -> Muon:
    given = {"lr": 0.1, "weight_decay": 0.0, "adjust_lr_fn": "none", **WIDE}
    return Muon(params, **{**given, **options})


def _step(optimizer: Muon, params: list[nn.Parameter], number: int) -> None:
    for i, p in enumerate(params):
        p.grad = _normal(*p.shape, seed=100 * number + i)
    optimizer.step()


def _results(number_of_steps: int, momentum: float = 0.95) -> list[list[Tensor]]:
    """O of each matrix in each step: what plain Muon subtracts with lr 1. It hangs on gradients alone."""
    params = [nn.Parameter(torch.zeros_like(p)) for p in _weights()]
    optimizer, found = _muon(params, lr=1.0, momentum=momentum), []
    for number in range(number_of_steps):
        before = [p.detach().clone() for p in params]
        _step(optimizer, params, number)
        found.append([b - p.detach() for b, p in zip(before, params, strict=True)])
    return found


def _hyperball(w: Tensor, o: Tensor, lr: float, first: Tensor) -> Tensor:
    radius = first.norm()
    moved = w - lr * radius * o / o.norm()
    return radius * moved / moved.norm()


@pytest.mark.parametrize("scale", [0.05, 30.0])
def test_weights_are_those_of_the_formula_in_fp64(scale: float) -> None:
    params = _weights(scale)
    optimizer = _muon(params, variant="hyperball")
    expected = [p.detach().clone() for p in params]
    first = list(expected)
    for number, of_step in enumerate(_results(6)):
        audited = audit(optimizer)
        _step(optimizer, params, number)
        assert audited.report.findings == ()
        plain = [w - 0.1 * o for w, o in zip(expected, of_step, strict=True)]
        expected = [_hyperball(w, o, 0.1, f) for w, o, f in zip(expected, of_step, first, strict=True)]
        assert all(float((a - b).norm()) > 1e-5 * float(b.norm()) for a, b in zip(plain, expected, strict=True))
        for p, w in zip(params, expected, strict=True):
            # a norm is rounded to fp32 each step, as it is kept and as it is told; products of fp64 beside
            assert_rounded(p, w, roundings=6 * (number + 1), dtype=torch.float32, scale=float(w.abs().max()))


@pytest.mark.filterwarnings("ignore:.*zero before the first step")
def test_a_matrix_of_zeros_takes_one_plain_step_and_keeps_its_norm() -> None:
    params = [nn.Parameter(torch.zeros_like(p)) for p in _weights()]
    optimizer = _muon(params, variant="hyperball")
    plain = _results(2)
    _step(optimizer, params, 0)
    for p, o in zip(params, plain[0], strict=True):
        assert_rounded(p, -0.1 * o, roundings=2)
    before = [p.detach().clone() for p in params]
    _step(optimizer, params, 1)
    for p, w, o in zip(params, before, plain[1], strict=True):
        assert torch.isfinite(p).all()
        assert_rounded(p, _hyperball(w, o, 0.1, w), roundings=6, dtype=torch.float32, scale=float(w.abs().max()))


def test_matrices_of_zeros_are_said_once_by_name() -> None:
    params = _weights()
    with torch.no_grad():
        params[1].zero_()
        params[2].zero_()
    stack = nn.Parameter(torch.zeros(3, 4, 5, dtype=torch.float64))
    stack.data[1] = 1.0
    groups = [
        {"params": [(f"w{i}", p) for i, p in enumerate(params)]},
        {"params": [("experts", stack)], "view": "stack"},
    ]
    optimizer = _muon(groups, variant="hyperball")  # type: ignore[arg-type]
    stack.grad = _normal(3, 4, 5, seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _step(optimizer, params, 0)
    with pytest.warns(UserWarning, match=r"^w1, w2, experts\[0\], 1 more: zero before the first step") as said:
        _step(optimizer, params, 1)
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _step(optimizer, params, 2)
        _muon(_weights(), variant="hyperball")


def test_a_variant_that_is_added_takes_no_norm_anew() -> None:
    """State of a stage was overwritten once, when another key was made."""
    params = _weights()
    optimizer = _muon(params, variant="hyperball")
    _step(optimizer, params, 0)
    radii = [optimizer.state[p]["weight_radius"].clone() for p in params]
    for p in params:
        p.data.mul_(1.5)
    optimizer.param_groups[0]["variant"] = "normuon+hyperball"
    _step(optimizer, params, 1)
    assert_bitwise([optimizer.state[p]["weight_radius"] for p in params], radii)
