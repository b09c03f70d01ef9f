"""Method "auto" has the bits of the method that it takes, matrix by matrix, wire and all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shardmuon import Exchange, Muon, Orthogonalizer
from shardmuon.layout.engines import engine_of
from shardmuon.orthogonalize import choice as choice_module
from shardmuon.orthogonalize import default_dtype
from shardmuon.orthogonalize.stamp import machine_stamp
from shardmuon.orthogonalize.tuning import FORMAT
from shardmuon.step import bucket as bucket_module
from shardmuon.step.update import Side, Work
from shardmuon.testing import RankPool
from shardmuon.testing.layouts import LAYOUTS

CPU = torch.device("cpu")
SHAPES = {"a": (12, 48), "b": (48, 12), "c": (16, 16), "d": (12, 96), "e": (24, 24)}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# "standard" and "gram" in these dtypes by default: as on accelerators, on CPUs with bf16 and on CPUs without
DEFAULTS = {"accelerator": (BF16, FP16), "cpu with bf16": (BF16, FP32), "cpu": (FP32, FP32)}
TAKEN = {"all gram": "aaaaa", "all standard": "sssss", "mixed": "asasa"}


def _normal(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed))


def _measured(path: Path, taken: str, defaults: tuple[torch.dtype, torch.dtype]) -> dict[str, str]:
    """A file of measurements by which "auto" takes this; name -> method."""
    standard, gram = (f"{m} {str(d)[6:]}" for m, d in zip(("standard", "gram"), defaults, strict=True))
    times: dict[str, dict[str, float]] = {}
    methods = {}
    for (name, shape), letter in zip(SHAPES.items(), taken, strict=True):
        key = f"{min(shape)}x{max(shape)}, 5 steps"
        times.setdefault(key, {standard: 1.0, gram: 0.5 if letter == "a" else 2.0})
        methods[name] = "gram" if times[key][gram] < 1 else "standard"
    path.write_text(json.dumps({"format": FORMAT, "machines": {machine_stamp(CPU): {"times": times}}}))
    return methods


def _stepped(build: Any, methods: Mapping[str, str] | None, tuning: str, **options: Any) -> dict[str, Tensor]:
    """Local weights after three steps: by "auto", or each by an optimizer with its method forced."""
    full = {name: _normal(shape, seed) for seed, (name, shape) in enumerate(SHAPES.items())}
    params = {name: nn.Parameter(t) for name, t in build(full).items()}
    if methods is None:
        optimizers = [Muon(list(params.items()), lr=0.1, orthogonalizer=Orthogonalizer(tuning=tuning), **options)]
        assert all("measured" in item.reason for item in optimizers[0].prepare().items)
    else:
        optimizers = [
            Muon([(name, p)], lr=0.1, orthogonalizer=Orthogonalizer(method=methods[name]), **options)  # type: ignore[arg-type]
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
    methods = _measured(path, taken, defaults)
    real = default_dtype

    def patched(method: str, device: torch.device) -> torch.dtype:
        return dict(zip(("standard", "gram"), defaults, strict=True)).get(method) or real(method, device)

    import shardmuon.orthogonalize as package

    modules = (choice_module, bucket_module, package)
    try:
        for module in modules:
            module.default_dtype = patched  # type: ignore[attr-defined]
        if layout == "plain":
            found, wanted = (_stepped(dict, m, str(path), **options) for m in (None, methods))
        else:
            case = LAYOUTS[layout]
            found, wanted = (
                _stepped(lambda full: case.build(full, case.mesh(2)), m, str(path), **options) for m in (None, methods)
            )
    finally:
        for module in modules:
            module.default_dtype = real  # type: ignore[attr-defined]
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


# ---------------------------------------------------------------------------------------------------------- the wire

WIRES = [  # method, dtype of the products, Exchange.dtype, the wire
    ("standard", FP32, None, FP32),
    ("standard", BF16, None, BF16),
    ("standard", FP16, None, BF16),
    ("gram", FP16, None, BF16),
    ("gram", FP32, None, FP32),
    ("torch", None, None, BF16),
    ("reference", None, None, torch.float64),
    ("standard", torch.float64, None, torch.float64),
    ("standard", BF16, FP32, FP32),
    ("standard", FP16, FP32, FP32),
    ("standard", FP32, BF16, BF16),
]


def _travelled(method: Any, dtype: torch.dtype | None, asked: torch.dtype | None) -> tuple[set[torch.dtype], Tensor]:
    """Dtypes of wires and batches, and the whole weight after a step from zeros with lr 1."""
    seen: set[torch.dtype] = set()
    momentum = bucket_module.update_momentum

    def watched(side: Side, work: Work, targets: Sequence[Tensor] | None) -> None:
        momentum(side, work, targets)
        seen.update(target.dtype for target in targets or ())

    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if dist.is_initialized() else None

    def cut(x: Tensor) -> Tensor:
        return x if mesh is None else distribute_tensor(x, mesh, [Shard(0)])

    p = nn.Parameter(cut(torch.zeros(12, 48)))
    p.grad = cut(_normal((12, 48), 3))
    options = {"orthogonalizer": Orthogonalizer(method, dtype), "exchange": Exchange(dtype=asked)}
    with mock.patch.object(bucket_module, "update_momentum", watched):
        Muon([("w", p)], lr=1.0, weight_decay=0.0, adjust_lr_fn="none", **options).step()
    return seen, (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()


@pytest.mark.parametrize(("method", "dtype", "asked", "wire"), WIRES, ids=str)
def test_half_precision_products_travel_in_bf16_and_one_process_rounds_alike(
    method: str, dtype: Any, asked: Any, wire: torch.dtype, world2: RankPool
) -> None:
    seen, alone = _travelled(method, dtype, asked)
    assert seen == {wire}
    for theirs, whole in world2.run(_travelled, method, dtype, asked):
        assert theirs == {wire}
        assert torch.equal(whole, alone)
    rounded = alone.bfloat16().to(alone.dtype)
    assert torch.equal(rounded, alone) == (wire == BF16 or dtype == BF16), "an update of other bits than its wire has"
