"""torch's process-wide defaults (dtype, device) change no bit of a step: every tensor made inside says what it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from process_default import process_default
from torch import Tensor, nn

from shardmuon import Muon, clip_grad_norm_
from shardmuon.layout.engines import engine_of
from shardmuon.momentum.keeper import BUFFER, SCALE
from shardmuon.testing import RankPool
from shardmuon.testing.layouts import LAYOUTS

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
DEFAULTS = ["bfloat16", "float16", "float64", "meta"]
STEPS = 3


def _normal(*shape: int, seed: int, dtype: torch.dtype = FP32) -> Tensor:
    made = torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed), dtype=FP64, device="cpu")
    return made.to(dtype)


def _parameters(dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        "wide": _normal(16, 256, seed=1, dtype=dtype),
        "tall": _normal(64, 20, seed=2, dtype=dtype),
        "bias": _normal(20, seed=3, dtype=dtype),
    }


def _groups(params: dict[str, Tensor]) -> list[dict[str, Any]]:
    matrices = [(name, p) for name, p in params.items() if name != "bias"]
    return [
        {"params": matrices[:1], "variant": "cautious"},
        {"params": matrices[1:]},
        {"params": [("bias", params["bias"])], "use_muon": False, "eps": 1e-4},  # fp16 has no 1e-8
    ]


def _steps(params: dict[str, Tensor], grads: list[dict[str, Tensor]], options: dict[str, Any]) -> list[Tensor]:
    """Every weight and every number of the state after a few steps, as stored."""
    optimizer = Muon(_groups(params), lr=0.02, **options)
    for number in range(STEPS):
        for name, p in params.items():
            p.grad = grads[number][name]
        clip_grad_norm_(optimizer, 10.0)
        optimizer.step()
    found = list(params.values())
    for p in params.values():
        found += [value for _, value in sorted(optimizer.state[p].items())]
    return [engine_of(t).storage(t.detach()).clone() for t in found]


def _same(first: list[Tensor], second: list[Tensor]) -> bool:
    return [t.dtype for t in first] == [t.dtype for t in second] and all(
        torch.equal(a, b) for a, b in zip(first, second, strict=True)
    )


def _alone(dtype: torch.dtype, scale: float, options: dict[str, Any]) -> list[Tensor]:
    params = {name: nn.Parameter(t) for name, t in _parameters(dtype).items()}
    grads = [
        {name: _normal(*p.shape, seed=10 * number + len(name), dtype=dtype) * scale for name, p in params.items()}
        for number in range(STEPS)
    ]
    return _steps(params, grads, options)


ALONE: list[dict[str, Any]] = [
    *(
        {"momentum_dtype": dtype, "momentum_device": place, "stochastic_rounding": True}
        for dtype, place in ((None, "cpu"), (FP32, None), (BF16, "cpu"), ("int8", None))
    ),
    *({"method": method} for method in ("standard", "gram", "torch")),
]


@pytest.mark.parametrize("options", ALONE, ids=str)
def test_a_default_changes_no_bit_of_a_step(options: dict[str, Any]) -> None:
    """However momentum is stored and whatever orthogonalizes."""
    for dtype, scale in (
        (FP32, 1.0),
        (FP32, 1e-6),
        (BF16, 1.0),
        (FP16, 1.0),
        (FP64, 1.0),
    ):  # fp16 scales near 1e-7 are zero
        expected = _alone(dtype, scale, options)
        for name in DEFAULTS:
            with process_default(name):
                assert _same(_alone(dtype, scale, options), expected), (name, dtype, scale)


def _routes(options: dict[str, Any]) -> list[str]:
    """The defaults with which steps on shards have other bits."""
    case, made = LAYOUTS["fsdp2"], {}

    def build(full: dict[str, Tensor]) -> dict[str, Tensor]:
        return case.build(full, case.mesh(2))

    for default in ("float32", *DEFAULTS):
        full = _parameters(FP32)
        params = {key: nn.Parameter(t) for key, t in build(full).items()}
        grads = [
            build({key: _normal(*t.shape, seed=10 * number + len(key)) for key, t in full.items()})
            for number in range(STEPS)
        ]
        with process_default(default):
            made[default] = _steps(params, grads, options)
    return [default for default in DEFAULTS if not _same(made[default], made["float32"])]


@pytest.mark.parametrize(
    "options",
    [
        {"momentum_dtype": "int8", "stochastic_rounding": True},
        {"momentum_dtype": BF16},
        {"variant": "muon_eq+normuon+cautious"},
        {"variant": "hyperball", "weight_decay": 0.0},
    ],
    ids=str,
)
def test_a_default_changes_no_bit_of_a_route(options: dict[str, Any], world2: RankPool) -> None:
    assert world2.run(_routes, options) == [[], []]


@pytest.mark.parametrize("wrong", [BF16, FP16, FP64])
@pytest.mark.parametrize("how", ["loaded", "found"])
def test_scales_of_another_dtype_become_fp32(wrong: torch.dtype, how: str) -> None:
    """Files written under another default have them: what the codes mean is kept, and the next scales are fp32."""

    def run(change: bool) -> tuple[Tensor, torch.dtype, Tensor]:
        w = nn.Parameter(_normal(8, 256, seed=1))
        optimizer = Muon([("w", w)], lr=1e-3, momentum_dtype="int8")
        w.grad = _normal(8, 256, seed=2)
        optimizer.step()
        state = optimizer.state[w]
        state[SCALE] = state[SCALE].to(wrong).float()  # a value that both dtypes have
        if change and how == "found":
            state[SCALE] = state[SCALE].to(wrong)
        if change and how == "loaded":
            saved = optimizer.state_dict()
            saved["state"][0][SCALE] = saved["state"][0][SCALE].to(wrong)
            optimizer.load_state_dict(saved)
            assert optimizer.state[w][SCALE].dtype == FP32
        optimizer.step()
        return w.detach(), optimizer.state[w][SCALE].dtype, optimizer.state[w][BUFFER]

    weights, dtype, codes = run(True)
    expected, _, expected_codes = run(False)
    assert dtype == FP32
    assert torch.equal(weights, expected)
    assert torch.equal(codes, expected_codes)
