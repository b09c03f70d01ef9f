"""Tests that torch's process-wide default dtype and device do not change the bits of a step, because every tensor is
created with an explicit dtype and device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from process_default import process_default
from spectra import normal
from tolerances import assert_bitwise
from torch import Tensor, nn

from shardmuon import Muon, clip_grad_norm_
from shardmuon.layout.engines import engine_of
from shardmuon.momentum.keeper import SCALE
from shardmuon.testing.layouts import LAYOUTS

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
DEFAULTS = ["bfloat16", "float16", "float64", "meta"]


SHAPES = {"wide": (16, 256), "tall": (64, 20), "bias": (20,)}


def _steps(
    default: str,
    options: dict[str, Any],
    dtype: torch.dtype = FP32,
    scale: float = 1.0,
    place: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict,
) -> list[Tensor]:
    """Take two steps with `default` as torch's default dtype or device, and return the storage of every weight and
    state tensor."""
    full = {name: normal(*shape, seed=len(shape) + shape[0], dtype=dtype) for name, shape in SHAPES.items()}
    params = {name: nn.Parameter(t) for name, t in place(full).items()}
    grads = [
        place({name: normal(*t.shape, seed=10 * number + len(name), dtype=dtype) * scale for name, t in full.items()})
        for number in range(2)
    ]
    groups: list[dict[str, Any]] = [
        {"params": [("wide", params["wide"])], "variant": "cautious"},
        {"params": [("tall", params["tall"])]},
        # Set a larger eps for AdamW, because the default of 1e-8 would underflow to zero for fp16 parameters.
        {"params": [("bias", params["bias"])], "use_muon": False, "eps": 1e-4},
    ]
    with process_default(default):
        optimizer = Muon(groups, lr=0.02, **options)
        for of_step in grads:
            for name, p in params.items():
                p.grad = of_step[name]
            clip_grad_norm_(optimizer, 10.0)
            optimizer.step()
        states = [value for p in params.values() for _, value in sorted(optimizer.state[p].items())]
        return [engine_of(t).storage(t.detach()).clone() for t in (*params.values(), *states)]


ALONE: list[dict[str, Any]] = [
    *(
        {"momentum_dtype": dtype, "momentum_device": place, "stochastic_rounding": True}
        for dtype, place in ((None, "cpu"), (FP32, None), (BF16, "cpu"), ("int8", None))
    ),
    *({"method": method} for method in ("standard", "gram", "torch")),
]


@pytest.mark.parametrize("options", ALONE, ids=str)
def test_a_default_changes_no_bit_of_a_step(options: dict[str, Any]) -> None:
    # Gradients near 1e-6 have int8 quantization scales below 1e-7. fp16 cannot represent such scales accurately, so the
    # test detects scales that are created in a default dtype of fp16.
    for dtype, scale in ((FP32, 1.0), (FP32, 1e-6), (BF16, 1.0), (FP16, 1.0), (FP64, 1.0)):
        expected = _steps("float32", options, dtype, scale)
        for name in DEFAULTS:
            assert_bitwise(_steps(name, options, dtype, scale), expected, f"{name} {dtype} {scale}")


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
@on_ranks(2)
def test_a_default_changes_no_bit_of_a_route(options: dict[str, Any]) -> None:
    case = LAYOUTS["fsdp2"]
    expected, *found = (
        _steps(name, options, place=lambda full: case.build(full, case.mesh(2))) for name in ("float32", *DEFAULTS)
    )
    assert_bitwise(found, [expected] * len(DEFAULTS))


@pytest.mark.parametrize("wrong", [BF16, FP16, FP64])
@pytest.mark.parametrize("how", ["loaded", "found"])
def test_scales_of_another_dtype_become_fp32(wrong: torch.dtype, how: str) -> None:
    """A checkpoint written under a different default dtype may contain int8 quantization scales of that dtype. The
    optimizer must convert the scales to fp32 and take the same step as if they had always been fp32."""
    found = []
    for change in (how, ""):
        w = nn.Parameter(normal(8, 256, seed=1))
        optimizer = Muon([("w", w)], lr=1e-3, momentum_dtype="int8")
        w.grad = normal(8, 256, seed=2)
        optimizer.step()
        state = optimizer.state[w]
        # Round the quantization scale to a value that fp32 and the dtype `wrong` both represent exactly, so that
        # converting the scale loses nothing.
        state[SCALE] = state[SCALE].to(wrong).float()
        if change:
            state[SCALE] = state[SCALE].to(wrong)
        if change == "loaded":
            optimizer.load_state_dict(optimizer.state_dict())
            assert optimizer.state[w][SCALE].dtype == FP32
        optimizer.step()
        found.append(dict(sorted({"weights": w, **optimizer.state[w]}.items())))
    assert_bitwise(*found)
