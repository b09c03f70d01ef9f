"""The golden table. Each row is a combination of layout, options, dtype and missing gradients. The combinations are
chosen at random with a fixed seed, so that each option is combined with many layouts.

The layouts come from the source tree under test (`shardmuon.testing`), so two source trees can be compared only if they
build the layouts in the same way.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from variant_cases import LATER

from shardmuon.testing.layouts import LAYOUTS


@dataclass(frozen=True)
class Param:
    """A parameter of the model that rows of the golden table train: its global shape and its parameter group's
    options."""

    shape: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=dict)


ADAMW = {"use_muon": False}
PARAMS: dict[str, Param] = {
    "square": Param((16, 16)),
    "tall": Param((37, 21)),
    "wide": Param((21, 37)),
    "again": Param((21, 37)),
    "few_rows": Param((3, 20)),
    "one_col": Param((24, 1)),
    "experts": Param((5, 6, 10), {"view": "stack"}),
    "gate_up": Param((26, 9), {"split_sizes": (13, 13)}),
    "qkv": Param((24, 10), {"split_sizes": (8, 2, 2), "split_groups": 2}),
    "heads": Param((21, 8), {"split_sizes": 7}),
    "conv": Param((10, 4, 3, 3)),
    "in_out": Param((19, 26), {"transposed": True}),
    "in_out_experts": Param((3, 6, 9), {"view": "stack", "transposed": True}),
    "in_out_qkv": Param((10, 24), {"split_sizes": (8, 2, 2), "split_groups": 2, "transposed": True}),
    "bias": Param((17,), ADAMW),
    "embedding": Param((13, 6), ADAMW),
    "norm": Param((9,), {**ADAMW, "betas": (0.8, 0.99), "eps": 1e-6}),
}


@dataclass(frozen=True)
class Options:
    """A named set of optimizer options.

    Attributes:
        muon: Keyword arguments of the constructor of `Muon`.
        dtypes: Names of the entries of `DTYPES` with which the options are tested. If empty, all entries are used.
        lr_tensor: Whether the learning rate is a tensor.
        without: Names of parameters that are left out because they do not support these options.
    """

    muon: Mapping[str, Any] = field(default_factory=dict)
    dtypes: tuple[str, ...] = ()
    lr_tensor: bool = False
    without: tuple[str, ...] = ()


@dataclass(frozen=True)
class Dtypes:
    """A combination of the dtype of the weights and the dtype of matmuls (None for the orthogonalization method's
    default)."""

    weights: torch.dtype
    products: torch.dtype | None


FP32, BF16, HALF_WEIGHTS = "fp32", "bf16 products", "bf16 weights"
DTYPES: dict[str, Dtypes] = {
    FP32: Dtypes(torch.float32, torch.float32),
    BF16: Dtypes(torch.float32, torch.bfloat16),
    HALF_WEIGHTS: Dtypes(torch.bfloat16, torch.bfloat16),
}
WITHOUT_DECAY = {"weight_decay": 0.0}
OPTIONS: dict[str, Options] = {
    "defaults": Options(),
    "no nesterov": Options({"nesterov": False}),
    "momentum 0": Options({"momentum": 0.0}),
    "decay cautious": Options({"variant": "cautious"}),
    "no decay": Options(WITHOUT_DECAY),
    "match_rms_adamw": Options({"adjust_lr_fn": "match_rms_adamw"}),
    "spectral": Options({"adjust_lr_fn": "spectral", "nesterov": False}),
    "unit_rms_norm": Options({"adjust_lr_fn": "unit_rms_norm", "variant": "cautious"}),
    "no scale": Options({"adjust_lr_fn": "none"}),
    "polar_express": Options({"ns_coefficients": "polar_express"}),
    "keller, 3 steps": Options({"ns_coefficients": "keller", "ns_steps": 3}),
    "gram": Options({"method": "gram", "ns_dtype": torch.float32}, (FP32, HALF_WEIGHTS)),
    "torch": Options({"method": "torch"}, (FP32, HALF_WEIGHTS)),
    "torch, match_rms_adamw": Options(
        {"method": "torch", "adjust_lr_fn": "match_rms_adamw", "nesterov": False},
        (FP32, HALF_WEIGHTS),
    ),
    "normuon": Options({"variant": "normuon"}),
    "normuon, cautious": Options({"variant": "normuon+cautious"}),
    "muon_eq": Options({"variant": "muon_eq"}),
    "muon_eq+normuon": Options({"variant": "muon_eq+normuon", "nesterov": False}),
    "hyperball": Options({"variant": "hyperball", **WITHOUT_DECAY}),
    "normuon+hyperball": Options({"variant": "normuon+hyperball", **WITHOUT_DECAY, "adjust_lr_fn": "match_rms_adamw"}),
    "gram, normuon": Options({"method": "gram", "ns_dtype": torch.float32, "variant": "normuon"}, (FP32, HALF_WEIGHTS)),
    "momentum bf16": Options({"momentum_dtype": torch.bfloat16}),
    "momentum fp32": Options({"momentum_dtype": torch.float32}, (HALF_WEIGHTS,)),
    "momentum int8": Options({"momentum_dtype": "int8"}, without=("in_out_qkv",)),
    "momentum on the cpu": Options({"momentum_device": "cpu"}),
    "stochastic rounding": Options({"stochastic_rounding": True}, (HALF_WEIGHTS,)),
    "stochastic rounding, momentum bf16, cautious": Options(
        {
            "stochastic_rounding": True,
            "momentum_dtype": torch.bfloat16,
            "variant": "cautious",
        },
        (HALF_WEIGHTS,),
    ),
    "many buckets": Options({"bucket_bytes": 3000}),
    "many buckets, normuon": Options({"bucket_bytes": 3000, "variant": "normuon"}),
    "lr in a tensor": Options({}, lr_tensor=True),
    "lr in a tensor, cautious": Options({"variant": "cautious"}, lr_tensor=True),
    **{name: Options({"variant": name, **WITHOUT_DECAY}) for name in LATER},
}
# MISSING names patterns of missing gradients. Each pattern maps a step number to the slice of parameters that have no
# gradient in that step. In all other steps, every parameter has a gradient.
MISSING: dict[str, Mapping[int, slice]] = {
    "all gradients": {},
    "some missing": {1: slice(1, None, 2), 2: slice(0, None, 3)},
    "late": {0: slice(1, None, 3), 3: slice(0, None, 2)},
}
LRS = (0.02, 0.013, 0.05, 0.0307)
# FSDP1's backward pass computes every gradient, so rows of the golden table with FSDP1 have no missing gradients.
FSDP1 = "fsdp1"
# Even on a single rank, the layouts in ALONE differ from the layout "single", so rows of the golden table with these
# layouts also run on one rank.
ALONE = ("ddp", "fsdp2")
# Maps a number of ranks to the number of rows that each layout has in the golden table.
PER_LAYOUT = {1: 10, 2: 6, 3: 6, 4: 6}


class Row(NamedTuple):
    """One row of the golden table. The fields are names from LAYOUTS, OPTIONS, DTYPES and MISSING."""

    layout: str
    options: str
    dtype: str
    missing: str

    @property
    def name(self) -> str:
        return f"{self.layout} | {self.options} | {self.dtype} | {self.missing}"


def dealt(names: Iterable[str], draw: random.Random) -> Iterator[str]:
    """Yield the given names in an endless series of rounds. Each round yields every name once, in a new random
    order."""
    pack = list(names)
    while True:
        yield from draw.sample(pack, len(pack))


def rows_of(world: int) -> Iterator[Row]:
    """Yield the rows of the golden table for a number of ranks, without duplicates."""
    draw = random.Random(world)
    options, missing = dealt(OPTIONS, draw), dealt(MISSING, draw)
    if world == 1:
        for option, row in OPTIONS.items():
            for dtype in row.dtypes or DTYPES:
                yield Row("single", option, dtype, next(missing))
    for layout in [*(LAYOUTS if world > 1 else ALONE), FSDP1]:
        for option in itertools.islice(options, PER_LAYOUT[world]):
            dtype = draw.choice(OPTIONS[option].dtypes or tuple(DTYPES))
            yield Row(layout, option, dtype, "all gradients" if layout == FSDP1 else next(missing))


def placed(layout: str, full: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return this rank's shards of full tensors. The first call for a given set of shapes is collective.

    Layouts define no placement for vectors. If the matrices are DTensors, vectors are sharded as in FSDP2. Otherwise,
    vectors are not sharded.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    case, vectors = LAYOUTS[layout], {name: t for name, t in full.items() if t.ndim == 1}
    made = case.build({name: t for name, t in full.items() if t.ndim > 1}, case.mesh(world))
    beside = LAYOUTS["fsdp2" if any(isinstance(t, DTensor) for t in made.values()) else "single"]
    made |= beside.build(vectors, beside.mesh(world))
    return {name: made[name] for name in full}
