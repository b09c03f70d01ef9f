"""Steps in exact arithmetic: momentum, decay, rounding, state and all that moves, with the same bits on any CPU.

In place of the orthogonalization stands `stand_in`, a polynomial of small whole numbers. Weights, gradients, learning
rates, decay and momentum are dyadic with few bits, so every sum and product is exact in fp32 in any order, with or
without fused multiply-add. `reference` computes the same in fp64 on whole tensors, without any of this project's code.
Roundings to bf16 (to the nearest, or by the bits of a hash) start from exact values.

What has sums of roundings cannot be here: norms (so all variants), schedules, int8 momentum (its `lerp` of decoded
values is rounded once or twice, with fused multiply-add or without). Nor can AdamW's square root: torch takes it from a
library for vectors, which does not round correctly (2 in 10 fp32 numbers differ from IEEE 754's on one CPU). So "bias"
shows AdamW's moments only, and "embedding" has gradients and a beta2 with which roots and quotients are exact. For the
rest there is `make golden`.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from golden.table import Param, placed
from torch import Tensor

from shardmuon import Muon
from shardmuon._torch import local_if_any
from shardmuon.step import bucket
from shardmuon.testing.layouts import LAYOUTS, parameters

Elements = tuple[Tensor, Tensor]  # numbers in the full tensor, and values

ROOTED = "bias"  # its weights depend on square roots that are not exact, so they are left out
MOMENTS = {"use_muon": False, "betas": (0.5, 0.75), "eps": 2.0**-10}
ADAMW = {"use_muon": False, "betas": (0.5, 0.0), "eps": 2.0**-60}
# Scales of the learning rate are powers of two: every matrix is wide or square, or 4 or 16 times as tall.
PARAMS: dict[str, Param] = {
    "square": Param((16, 16)),
    "tall": Param((36, 9)),
    "wide": Param((9, 30)),
    "few_rows": Param((3, 20)),
    "one_row": Param((1, 24)),
    "one_col": Param((16, 1)),
    "experts": Param((5, 4, 10), {"view": "stack"}),
    "gate_up": Param((26, 16), {"split_sizes": (13, 13)}),
    "qkv": Param((24, 16), {"split_sizes": (8, 2, 2), "split_groups": 2}),
    "heads": Param((21, 8), {"split_sizes": 7}),
    "conv": Param((10, 4, 3, 3)),
    "in_out": Param((26, 19), {"transposed": True}),
    "in_out_experts": Param((3, 9, 6), {"view": "stack", "transposed": True}),
    "in_out_qkv": Param((16, 24), {"split_sizes": (8, 2, 2), "split_groups": 2, "transposed": True}),
    "bias": Param((17,), MOMENTS),
    "embedding": Param((13, 6), ADAMW),
}
LRS = (0.25, 0.5, 0.125)
ADAMW_LRS = (0.125, 0.375, 0.21875)  # of the first, second, .. gradient: quotients with 1 - 0.5**count are dyadic
LACKING = {1: ("tall", "heads", "in_out_experts", "embedding"), 0: ("wide",)}  # step -> have no gradient


@dataclass(frozen=True)
class Options:
    """Options of an optimizer.

    Attributes:
        muon: Of the constructor, beside `BASE`.
        dtype: Of the weights.
        by_hash: Something is rounded by the bits of a hash, which the reference has not.
    """

    muon: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    by_hash: bool = False


def _original(rows: int, cols: int) -> float:
    return math.sqrt(max(1, rows / cols))


_SCALES = {None: _original, "none": lambda rows, cols: 1.0}
BASE = {
    "lr": LRS[0],
    "weight_decay": 0.5,
    "momentum": 0.5,
    "method": "standard",
    "ns_dtype": torch.float32,
}
OPTIONS: dict[str, Options] = {
    "decay": Options(),
    "no nesterov": Options({"nesterov": False}),
    "cautious decay": Options({"variant": "cautious"}),
    "no decay, momentum 3/4, no scale": Options({"weight_decay": 0.0, "momentum": 0.75, "adjust_lr_fn": "none"}),
    "many buckets": Options({"bucket_bytes": 3000}),
    "bf16 weights": Options(dtype=torch.bfloat16),
    "bf16 weights, rounded by hash": Options({"stochastic_rounding": True}, torch.bfloat16, by_hash=True),
    "bf16 momentum, by hash": Options({"momentum_dtype": torch.bfloat16}, by_hash=True),
    "bf16 momentum and weights, by hash": Options(
        {"momentum_dtype": torch.bfloat16, "stochastic_rounding": True}, torch.bfloat16, by_hash=True
    ),
}


def stand_in(x: Tensor) -> Tensor:  # (B, m, n), multiples of a power of two -> the same shape, fp32
    """f(Y) / 4 with Y = 2 X cut to whole numbers from -3 to 3, f(Y) = Y + Y Y^T Y without its multiples of 16.

    As in an orthogonalization, each element depends on the whole matrix, f(X^T) = f(X)^T, and zeros stay zeros.
    """
    y = (2 * x.float()).trunc().clamp(-3, 3)
    whole = (y + y @ y.mT @ y).to(torch.int64)
    return (whole - 16 * torch.div(whole, 16, rounding_mode="trunc")).float() / 4


def drawn(name: str, purpose: int) -> Tensor:
    """A full tensor: weights (purpose -1) in quarters, gradients of a step in halves; AdamW's are powers of two."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {purpose}".encode()))
    if purpose >= 0 and PARAMS[name].options.get("use_muon") is False:
        signs, powers = (torch.randint(0, most, PARAMS[name].shape, generator=generator) for most in (2, 3))
        return (2.0 * signs - 1) * 2.0 ** (powers - 1)
    unit, most = (4, 16) if purpose < 0 else (2, 61 if purpose == 2 else 7)
    return torch.randint(-most, most + 1, PARAMS[name].shape, generator=generator).float() / unit


def rate(name: str, step: int) -> float:
    """The learning rate of a parameter in a step."""
    if PARAMS[name].options.get("use_muon") is not False:
        return LRS[step]
    return ADAMW_LRS[sum(name not in LACKING.get(before, ()) for before in range(step))]


def run(layout: str, options: str) -> dict[str, Elements]:
    """Return this rank's tensors after each step, by "step 0/weight/NAME" and "step 0/KEY/NAME" of state."""
    of, case = OPTIONS[options], LAYOUTS[layout]
    numbers = {name: torch.arange(math.prod(p.shape), dtype=torch.float64).view(p.shape) for name, p in PARAMS.items()}
    elements = {name: local_if_any(t).long() for name, t in placed(layout, numbers).items()}
    params = parameters(placed(layout, {name: drawn(name, -1).to(of.dtype) for name in PARAMS}))
    given = case.options(dist.get_world_size()) if dist.is_initialized() else {}
    groups = [{"params": [(name, param)], **PARAMS[name].options} for name, param in params.items()]
    found: dict[str, Elements] = {}
    with mock.patch.object(bucket, "orthogonalize", lambda x, *_, **given: torch.stack([stand_in(m) for m in x])):
        optimizer = Muon(groups, **{**BASE, **given, **of.muon})
        for step in range(len(LRS)):
            grads = placed(layout, {name: drawn(name, step).to(of.dtype) for name in PARAMS})
            for (name, param), group in zip(params.items(), optimizer.param_groups, strict=True):
                group["lr"] = rate(name, step)
                # Megatron-FSDP gives empty shards no gradient
                nothing = layout.startswith("megatron-fsdp") and not elements[name].numel()
                param.grad = None if nothing or name in LACKING.get(step, ()) else grads[name]
            optimizer.step()
            for name, param in params.items():
                kept = {k: v for k, v in optimizer.state.get(param, {}).items() if isinstance(v, Tensor) and v.dim()}
                shown = kept if name == ROOTED else {"weight": param, **kept}
                for key, value in shown.items():
                    found[f"step {step}/{key}/{name}"] = (elements[name], local_if_any(value).detach().clone())
    return found


def assembled(parts: list[Mapping[str, Elements]]) -> dict[str, Tensor]:
    """Full tensors of what all ranks hold.

    Raises:
        AssertionError: Replicas differ, or nobody holds an element.
    """
    full: dict[str, Tensor] = {}
    for key in sorted({key for part in parts for key in part}):
        shape = PARAMS[key.rpartition("/")[2]].shape
        held = [part[key] for part in parts if key in part]
        values = torch.zeros(math.prod(shape), dtype=held[0][1].dtype)
        seen = torch.zeros(math.prod(shape), dtype=torch.bool)
        for elements, mine in held:
            at = elements.flatten()
            values[at], seen[at] = mine.flatten(), True
        for elements, mine in held:
            assert torch.equal(values[elements.flatten()], mine.flatten()), f"{key}: replicas differ"
        assert seen.all(), f"{key}: elements without a holder"
        full[key] = values.view(shape)
    return full


# ------------------------------------------------------------------------------------------- the same without shardmuon


def matrices(param: Param) -> list[np.ndarray]:
    """The numbers of the elements of each matrix, in its shape."""
    numbers = np.arange(math.prod(param.shape)).reshape(param.shape)
    options = param.options
    stacked = list(numbers) if options.get("view") == "stack" else [numbers.reshape(param.shape[0], -1)]
    found = []
    for whole in stacked:
        turned = whole.T if options.get("transposed") else whole
        groups = np.split(turned, options.get("split_groups", 1))
        if isinstance(options.get("split_sizes"), int):
            blocks = np.split(turned, options["split_sizes"])
        elif options.get("split_sizes"):
            edges = np.cumsum(options["split_sizes"])[:-1]
            blocks = [np.concatenate(same) for same in zip(*(np.split(g, edges) for g in groups), strict=True)]
        else:
            blocks = [turned]
        found += blocks
    return found


def reference(options: str) -> dict[str, Tensor]:
    """Return what `run` should find on one process."""
    found: dict[str, Tensor] = {}
    for name, param in PARAMS.items():
        step = _adamw if param.options.get("use_muon") is False else _muon
        found |= step(name, OPTIONS[options])
    return dict(sorted(found.items()))


def _muon(name: str, of: Options) -> dict[str, Tensor]:
    options, found = {**BASE, **of.muon}, {}
    mu, decay, cautious = options["momentum"], options["weight_decay"], options.get("variant") == "cautious"
    weight, momentum = drawn(name, -1).to(of.dtype).double().numpy().ravel(), None
    for step, lr in enumerate(LRS):
        if name not in LACKING.get(step, ()):
            grad = drawn(name, step).to(of.dtype).double().numpy().ravel()
            momentum = _stored((1 - mu) * grad + (0 if momentum is None else mu * momentum), of.dtype)
            update = _stored(mu * momentum + (1 - mu) * grad, of.dtype) if options.get("nesterov", True) else momentum
            moved = np.zeros_like(weight)
            for at in matrices(PARAMS[name]):
                rows, cols = at.shape
                scale = _SCALES[options.get("adjust_lr_fn")](rows, cols)
                y = np.clip(np.trunc(2 * update[at]), -3, 3)
                moved[at] = lr * scale * np.fmod(y + y @ y.T @ y, 16) / 4
            decayed = (1 - lr * decay) * weight
            decayed = np.where(moved * weight > 0, decayed, weight) if cautious else decayed
            weight = _stored(decayed - moved, of.dtype)
        found |= _named(step, name, of.dtype, {"weight": weight, "momentum_buffer": momentum})
    return found


def _adamw(name: str, of: Options) -> dict[str, Tensor]:
    decay, found, count = {**BASE, **of.muon}["weight_decay"], {}, 0
    options = PARAMS[name].options
    weight = drawn(name, -1).to(of.dtype).double().numpy().ravel()
    first, second = np.zeros_like(weight), np.zeros_like(weight)
    for step in range(len(LRS)):
        if name not in LACKING.get(step, ()):
            lr, grad, (beta1, beta2) = rate(name, step), drawn(name, step).double().numpy().ravel(), options["betas"]
            count += 1
            first, second = beta1 * first + (1 - beta1) * grad, beta2 * second + (1 - beta2) * grad * grad
            if name != ROOTED:  # the kernel takes moments before they are rounded, and rounds the weight once
                moved = lr / (1 - beta1**count) * first / np.sqrt(second)
                weight = _stored(weight * (1 - lr * decay) - moved, of.dtype)
            first, second = _stored(first, of.dtype), _stored(second, of.dtype)
        weights = {} if name == ROOTED else {"weight": weight}
        moments = {"exp_avg": first, "exp_avg_sq": second} if count else {}
        found |= _named(step, name, of.dtype, weights | moments)
    return found


def _stored(value: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Rounded to a dtype, from values that fp32 holds exactly."""
    single = torch.from_numpy(value).float()
    assert torch.equal(single.double(), torch.from_numpy(value)), "not exact in fp32: choose fewer bits"
    return single.to(dtype).double().numpy()


def _named(step: int, name: str, dtype: torch.dtype, values: Mapping[str, np.ndarray | None]) -> dict[str, Tensor]:
    shape = PARAMS[name].shape
    return {
        f"step {step}/{key}/{name}": torch.from_numpy(value).to(dtype).view(shape)
        for key, value in values.items()
        if value is not None
    }
