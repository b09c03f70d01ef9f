"""One process steps as the formula reads, bit for bit: what simulated and real ranks are compared with elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from dense_step import DenseMuon
from simulated import OPTIONS, VIEWS
from test_stages import JOINED, given
from test_stores import CASES, CODED, WIDE, WIDE_OPTIONS, Views

from shardmuon import Muon
from shardmuon.options import MuonConfig
from shardmuon.orthogonalize.choice import Chooser

FP32, BF16, FP64 = torch.float32, torch.bfloat16, torch.float64
UPDATES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no nesterov": {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"},
    "cautious": {"variant": "cautious", "ns_coefficients": "polar_express"},
    "another momentum": {"momentum": 0.8},
}


def compare(
    views: Views,
    view_options: Mapping[str, Mapping[str, Any]],
    options: Sequence[Mapping[str, Any]],  # of each parameter in turn
    dtypes: Sequence[tuple[torch.dtype, torch.dtype]] = ((FP32, FP32), (BF16, BF16)),  # the same
    lr: Callable[[float], Any] = float,
    **whole_options: Any,
) -> None:
    """Three steps with changing lr, gradients missing in two of them. Of two dense matrices a row is zeros."""
    torch.manual_seed(8)
    config = MuonConfig(**whole_options)
    made = [(name, make()) for name, make in views.items() for _ in dtypes]
    kinds = [dtypes[i % len(dtypes)] for i in range(len(made))]
    whole = [
        torch.nn.Parameter(torch.randn(view.shape).to(kind[0])) for (_, view), kind in zip(made, kinds, strict=True)
    ]
    for p, (_, of_grad) in zip(whole, kinds, strict=True):
        p.grad_dtype = of_grad
    groups = [
        {"params": [(f"w{i}", p)], **view_options[name], **options[i % len(options)]}
        for i, ((name, _), p) in enumerate(zip(made, whole, strict=True))
    ]
    optimizer = Muon(groups, lr=0.05, **whole_options)
    wide = config.ns_dtype == FP64
    chooser = Chooser(config.method, config.ns_dtype)
    dense = DenseMuon([p.detach() for p in whole], optimizer.param_groups, chooser, config, wire=FP64 if wide else FP32)
    gone = {0: (3, 8), 1: (0, 5)}
    for step in range(3):
        grads = [
            None if i in gone.get(step, ()) else torch.randn(p.shape).to(kind[1])
            for i, (p, kind) in enumerate(zip(whole, kinds, strict=True))
        ]
        for grad in grads[:2]:
            if grad is not None:
                grad[1] = 0
        for p, grad, group in zip(whole, grads, optimizer.param_groups, strict=True):
            p.grad, group["lr"] = grad, lr(0.05 / (1 + step))
        dense.step(grads, optimizer.param_groups)
        optimizer.step()
        for (name, _), p, expected in zip(made, whole, dense.params, strict=True):
            assert torch.equal(p, expected.weight), (step, name)
            tensors = {key: t for key, t in optimizer.state[p].items() if key != "step"}
            assert tensors.keys() == expected.state.keys()
            for key, found in tensors.items():
                assert found.dtype == expected.state[key].dtype
                assert torch.equal(found, expected.state[key]), (step, name, key)


@pytest.mark.parametrize("update", UPDATES)
def test_updates_are_those_of_the_formula(update: str) -> None:
    compare(VIEWS, OPTIONS, [UPDATES[update]])


@pytest.mark.parametrize("variant", JOINED.values())
def test_stages_stand_where_the_formula_has_them(variant: str) -> None:
    compare(VIEWS, OPTIONS, [given(variant)])


@pytest.mark.parametrize(
    ("method", "dtype"), [("standard", torch.float16), ("standard", torch.float64), ("gram", None)]
)
def test_methods_feed_and_round_as_the_formula_does(method: Any, dtype: torch.dtype | None) -> None:
    """Methods feed and round as the formula does, with stages and without."""
    variants = [{}, given("normuon"), given("muon_eq+normuon+hyperball")]
    compare(VIEWS, OPTIONS, variants, method=method, ns_dtype=dtype)


@pytest.mark.parametrize("case", CASES)
def test_whatever_is_stored_is_rounded_as_the_formula_says(case: str) -> None:
    of = CASES[case]
    compare(VIEWS, OPTIONS, [of.options], of.dtypes, of.lr, method=of.method, **of.storage)


@pytest.mark.parametrize("case", CODED)
def test_codes_are_those_of_whole_tensors(case: str) -> None:
    of = CODED[case]
    compare(WIDE, WIDE_OPTIONS, [of.options], of.dtypes, **of.storage)
