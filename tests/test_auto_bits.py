"""Method "auto" has the bits of the method that it takes, matrix by matrix, wire and all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardmuon import Exchange, Muon, Orthogonalizer
from shardmuon.engines import engine_of
from shardmuon.orthogonalize import choice as choice_module
from shardmuon.orthogonalize import default_dtype
from shardmuon.orthogonalize.tuning import device_key
from shardmuon.testing import RankPool
from shardmuon.testing.layouts import LAYOUTS

SHAPES = {"a": (12, 48), "b": (48, 12), "c": (16, 16), "d": (12, 96), "e": (24, 24)}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# "standard" and "gram" in these dtypes by default: as on accelerators, on CPUs with bf16 and on CPUs without
DEFAULTS = {"accelerator": (BF16, FP16), "cpu with bf16": (BF16, FP32), "cpu": (FP32, FP32)}
TAKEN = {"all gram": "aaaaa", "all standard": "sssss", "mixed": "asasa"}


def _normal(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed))


def _pretend(path: Path, taken: str, defaults: tuple[torch.dtype, torch.dtype]) -> dict[str, str]:
    """A cache of measurements after which "auto" takes this; name -> method."""
    standard, gram = (f"{m} {str(d)[6:]}" for m, d in zip(("standard", "gram"), defaults, strict=True))
    times = {}
    methods = {}
    for (name, shape), letter in zip(SHAPES.items(), taken, strict=True):
        key = f"{min(shape)}x{max(shape)}, 5 steps"
        methods[name] = "gram" if letter == "a" and times.get(key, {gram: 0})[gram] < 1 else "standard"
        times.setdefault(key, {standard: 1.0, gram: 0.5 if methods[name] == "gram" else 2.0})
        methods[name] = "gram" if times[key][gram] < 1 else "standard"
    path.write_text(json.dumps({device_key(torch.device("cpu")): times}))
    return methods


def _stepped(build: Any, methods: Mapping[str, str] | None, deterministic: bool, **options: Any) -> dict[str, Tensor]:
    """Local weights after three steps: by "auto", or each by an optimizer with its method forced."""
    full = {name: _normal(shape, seed) for seed, (name, shape) in enumerate(SHAPES.items())}
    params = {name: nn.Parameter(t) for name, t in build(full).items()}
    if methods is None:
        optimizers = [Muon(list(params.items()), lr=0.1, deterministic=deterministic, **options)]
    else:
        optimizers = [
            Muon(
                [(name, p)],
                lr=0.1,
                orthogonalizer=Orthogonalizer(method=methods[name]),
                deterministic=deterministic,
                **options,
            )  # type: ignore[arg-type]
            for name, p in params.items()
        ]
    for number in range(3):
        grads = build({name: _normal(shape, 10 * number + len(full)) for name, shape in SHAPES.items()})
        for name, p in params.items():
            p.grad = grads[name]
        for optimizer in optimizers:
            optimizer.step()
    return {name: engine_of(p).storage(p.detach()).clone() for name, p in params.items()}


def _bits(folder: str, layout: str, taken: str, machine: str, options: dict[str, Any]) -> list[str]:
    """Names of the parameters of which "auto" has other bits than the method that it took."""
    defaults = DEFAULTS[machine]
    path = Path(folder) / f"{os.getpid()}.json"
    methods = _pretend(path, taken, defaults)
    real, before = default_dtype, os.environ["SHARDMUON_CACHE"]

    def patched(method: str, device: torch.device) -> torch.dtype:
        return dict(zip(("standard", "gram"), defaults, strict=True)).get(method) or real(method, device)

    import shardmuon.core as core_module
    import shardmuon.orthogonalize as package

    modules = (choice_module, core_module, package)
    os.environ["SHARDMUON_CACHE"] = str(path)
    try:
        for module in modules:
            module.default_dtype = patched  # type: ignore[attr-defined]
        if layout == "plain":
            found, wanted = (_stepped(dict, m, False, **options) for m in (None, methods))
        else:
            case = LAYOUTS[layout]
            found, wanted = (
                _stepped(lambda full: case.build(full, case.mesh(2)), m, False, **options) for m in (None, methods)
            )
    finally:
        for module in modules:
            module.default_dtype = real  # type: ignore[attr-defined]
        os.environ["SHARDMUON_CACHE"] = before
    return [name for name in found if not torch.equal(found[name], wanted[name])]


@pytest.mark.parametrize(
    "options", [{}, {"exchange": Exchange(dtype=FP32)}, {"exchange": Exchange(dtype=BF16)}], ids=str
)
@pytest.mark.parametrize("machine", DEFAULTS)
@pytest.mark.parametrize("taken", TAKEN)
def test_auto_has_the_bits_of_what_it_takes(taken: str, machine: str, options: Any, tmp_path: Path) -> None:
    assert _bits(str(tmp_path), "plain", TAKEN[taken], machine, options) == []


@pytest.mark.parametrize("machine", DEFAULTS)
@pytest.mark.parametrize("taken", TAKEN)
def test_auto_has_the_bits_of_what_it_takes_on_ranks(
    taken: str, machine: str, world2: RankPool, tmp_path: Path
) -> None:
    assert world2.run(_bits, str(tmp_path), "fsdp2", TAKEN[taken], machine, {}) == [[], []]
