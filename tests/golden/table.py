"""The table of golden rows: layouts x options x dtypes x missing gradients, dealt by a seed.

Not all of the product: each pair of world size and layout is dealt options from a pack that holds each of them once and
is shuffled anew when it is empty, and dtypes and missing gradients from packs of their own. So each option meets most
layouts, each dtype and each way of missing gradients. One process has all options in every dtype.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from golden.layouts import LAYOUTS

T = TypeVar("T")


@dataclass(frozen=True)
class Param:
    """A parameter of the rows: global shape and options of its group."""

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
    "heads": Param((21, 8), {"num_heads": 7}),
    "conv": Param((10, 4, 3, 3)),
    "in_out": Param((19, 26), {"transposed": True}),
    "in_out_experts": Param((3, 6, 9), {"view": "stack", "transposed": True}),
    "in_out_qkv": Param((10, 24), {"split_sizes": (8, 2, 2), "split_groups": 2, "split_dim": 1, "transposed": True}),
    "bias": Param((17,), ADAMW),
    "embedding": Param((13, 6), ADAMW),
    "norm": Param((9,), {**ADAMW, "betas": (0.8, 0.99), "eps": 1e-6, "adamw": "cautious"}),
}


@dataclass(frozen=True)
class Options:
    """Options of an optimizer.

    Attributes:
        muon: Of the constructor; option objects as dicts of fields.
        dtypes: Names of `DTYPES` that it has a meaning for; empty: all.
        needs_rows: Only where rows of matrices are whole on one rank.
        lr_tensor: The learning rate is a tensor.
        without: Parameters that it refuses.
    """

    muon: Mapping[str, Any] = field(default_factory=dict)
    dtypes: tuple[str, ...] = ()
    needs_rows: bool = False
    lr_tensor: bool = False
    without: tuple[str, ...] = ()


@dataclass(frozen=True)
class Dtypes:
    """Dtypes of weights, and of products (None: as the method has them)."""

    weights: torch.dtype
    products: torch.dtype | None


def _half_plus_ratio(rows: int, cols: int) -> float:
    return 0.5 + rows / cols


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
    "decay l2": Options({"weight_decay_mode": "l2"}),
    "decay independent": Options({"weight_decay_mode": "independent", "weight_decay": 0.01}),
    "decay cautious": Options({"weight_decay_mode": "cautious"}),
    "no decay": Options(WITHOUT_DECAY),
    "match_rms_adamw": Options({"adjust_lr_fn": "match_rms_adamw"}),
    "spectral": Options({"adjust_lr_fn": "spectral", "nesterov": False}),
    "unit_rms_norm": Options({"adjust_lr_fn": "unit_rms_norm", "weight_decay_mode": "cautious"}),
    "no scale": Options({"adjust_lr_fn": "none", "extra_scale_factor": 1.7}),
    "scale by a function": Options({"adjust_lr_fn": _half_plus_ratio}),
    "polar_express": Options({"ns_coefficients": "polar_express"}),
    "keller, 3 steps": Options({"ns_coefficients": "keller", "ns_steps": 3}),
    "gram": Options({"orthogonalizer": {"method": "gram", "dtype": torch.float32}}, (FP32, HALF_WEIGHTS)),
    "gram, l2": Options(
        {"orthogonalizer": {"method": "gram", "dtype": torch.float32}, "weight_decay_mode": "l2"}, (FP32,)
    ),
    "torch": Options({"orthogonalizer": {"method": "torch"}}, (FP32, HALF_WEIGHTS)),
    "torch, match_rms_adamw": Options(
        {"orthogonalizer": {"method": "torch"}, "adjust_lr_fn": "match_rms_adamw", "nesterov": False},
        (FP32, HALF_WEIGHTS),
    ),
    "normuon": Options({"variant": "normuon"}),
    "normuon, beta2, cautious": Options({"variant": "normuon", "beta2": 0.9, "weight_decay_mode": "cautious"}),
    "muon_eq": Options({"variant": "muon_eq"}),
    "muon_eq+normuon": Options({"variant": "muon_eq+normuon", "nesterov": False}),
    "hyperball": Options({"variant": "hyperball", **WITHOUT_DECAY}),
    "normuon+hyperball": Options({"variant": "normuon+hyperball", **WITHOUT_DECAY, "adjust_lr_fn": "match_rms_adamw"}),
    "gram, normuon": Options(
        {"orthogonalizer": {"method": "gram", "dtype": torch.float32}, "variant": "normuon"}, (FP32, HALF_WEIGHTS)
    ),
    "momentum bf16": Options({"storage": {"momentum_dtype": torch.bfloat16}}),
    "momentum fp32": Options({"storage": {"momentum_dtype": torch.float32}}, (HALF_WEIGHTS,)),
    "momentum int8": Options({"storage": {"momentum_dtype": "int8"}}, needs_rows=True, without=("in_out_qkv",)),
    "momentum on the cpu": Options({"storage": {"momentum_device": "cpu"}, "weight_decay_mode": "l2"}),
    "stochastic rounding": Options({"storage": {"stochastic_rounding": True}}, (HALF_WEIGHTS,)),
    "stochastic rounding, momentum bf16, cautious": Options(
        {
            "storage": {"stochastic_rounding": True, "momentum_dtype": torch.bfloat16},
            "weight_decay_mode": "cautious",
        },
        (HALF_WEIGHTS,),
    ),
    "cautious AdamW": Options({"adamw": "cautious"}),
    "many buckets": Options({"exchange": {"bucket_bytes": 3000}}),
    "many buckets, normuon": Options({"exchange": {"bucket_bytes": 3000}, "variant": "normuon"}),
    "fp32 wire": Options({"exchange": {"dtype": torch.float32}}, (BF16, HALF_WEIGHTS)),
    "bf16 wire": Options({"exchange": {"dtype": torch.bfloat16}}, (FP32,)),
    "lr in a tensor": Options({}, lr_tensor=True),
    "lr in a tensor, cautious": Options({"weight_decay_mode": "cautious"}, lr_tensor=True),
}
# step -> every how many-th parameter lacks its gradient then, counted from where
MISSING: dict[str, Mapping[int, tuple[int, int]]] = {
    "all gradients": {},
    "some missing": {1: (2, 1), 2: (3, 0)},
    "late": {0: (3, 1), 3: (2, 0)},
}
LRS = (0.02, 0.013, 0.05, 0.0307)  # of the steps
FSDP1 = "fsdp1"  # gets its gradients from a backward pass of its own, so none is missing
PER_LAYOUT = {1: 14, 2: 9, 3: 9, 4: 9}  # rows of each layout by world size


@dataclass(frozen=True)
class Row:
    """One comparison: names of the tables above."""

    layout: str
    options: str
    dtype: str
    missing: str

    @property
    def name(self) -> str:
        """Name in print."""
        return f"{self.layout} | {self.options} | {self.dtype} | {self.missing}"


class _Pack(Generic[T]):
    """Each item once, then shuffled anew."""

    def __init__(self, items: Sequence[T], draw: random.Random) -> None:
        self._items, self._draw, self._left = list(items), draw, list[T]()

    def deal(self, fits: Callable[[T], bool] = lambda item: True) -> T:
        while True:
            for item in self._left:
                if fits(item):
                    self._left.remove(item)
                    return item
            fresh = list(self._items)
            self._draw.shuffle(fresh)
            self._left += fresh


def rows_of(world: int) -> Iterator[Row]:
    """The rows on so many ranks, each once."""
    draw = random.Random(world)
    options, dtypes, missing = (_Pack(list(table), draw) for table in (OPTIONS, DTYPES, MISSING))
    names = [name for name, layout in LAYOUTS.items() if world in layout.meshes]
    if world == 1:
        for option, row in OPTIONS.items():
            for dtype in row.dtypes or DTYPES:
                yield Row("plain", option, dtype, missing.deal())
        names.remove("plain")
    for layout in [*names, FSDP1]:
        keeps_rows = layout in LAYOUTS and LAYOUTS[layout].keeps_rows

        def fits(name: str, keeps_rows: bool = keeps_rows) -> bool:
            return keeps_rows or not OPTIONS[name].needs_rows

        seen = set[Row]()
        while len(seen) < PER_LAYOUT[world]:
            option = options.deal(fits)
            allowed = OPTIONS[option].dtypes or tuple(DTYPES)
            dtype = dtypes.deal(lambda name, allowed=allowed: name in allowed)
            row = Row(layout, option, dtype, "all gradients" if layout == FSDP1 else missing.deal())
            if row not in seen:
                seen.add(row)
                yield row
