"""Tests of dtypes and devices of stored momentum and weights: a single process and simulated ranks match a direct
computation on full tensors bitwise."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from cuda_shape import CudaShape
from dense_step import assert_like_the_formula
from jobs import Job, Spec
from simulated import CPU, LAYOUTS, OPTIONS, VIEWS, in_both, in_turn, sharded

from shardmuon.layout.pieces import Box, Held, Patch, _tiles_of
from shardmuon.layout.views import MatrixView, matrix_view
from shardmuon.momentum import stores
from shardmuon.momentum.stores import (
    Stream,
    encode,
    step_stored_,
)
from shardmuon.step import binding

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
Views = Mapping[str, Callable[[], MatrixView]]

# On 2 or 4 ranks, 511 columns are sharded at multiples of 128, so no shard splits a quantization block of int8
# momentum, and only the last block of a row is incomplete.
WIDE: dict[str, Callable[[], MatrixView]] = {
    "plain": lambda: matrix_view((12, 511)),
    "tall": lambda: matrix_view((24, 511), transposed=True),
    "fused": lambda: matrix_view((24, 512), split_sizes=(4, 1, 1), split_groups=4),
    "columns": lambda: matrix_view((8, 512), split_sizes=(128, 384), transposed=True),
    "experts": lambda: matrix_view((8, 4, 511), view="stack"),
    "kernel": lambda: matrix_view((8, 16, 4, 4)),
    "repeats": lambda: matrix_view((8, 512), split_sizes=(64,), split_groups=8, transposed=True),
}
WIDE_OPTIONS: dict[str, dict[str, Any]] = {
    **OPTIONS,
    "columns": {"split_sizes": (128, 384), "transposed": True},
    "repeats": {"split_sizes": (64,), "split_groups": 8, "transposed": True},
}


class Case(NamedTuple):
    """Dtypes and optimizer options of a test case.

    Attributes:
        storage: Options that set how momentum and weights are stored.
        dtypes: Pairs of (weight, gradient) dtypes, assigned to the parameters in turn.
        options: Other optimizer options.
        method: Orthogonalization method.
        lr: Function that converts the lr, for example to a tensor.
    """

    storage: Mapping[str, Any] = MappingProxyType({})
    dtypes: Sequence[tuple[torch.dtype, torch.dtype]] = ((FP32, FP32),)
    options: Mapping[str, Any] = MappingProxyType({})
    method: Any = "auto"
    lr: Callable[[float], Any] = float


HALF, MIXED = ((BF16, BF16),), ((BF16, FP32), (FP32, BF16), (FP16, FP16), (FP32, FP32), (BF16, BF16))
PLAIN: dict[str, Any] = {"nesterov": False}
CAUTIOUS: dict[str, Any] = {"variant": "cautious"}
CASES: dict[str, Case] = {
    "plain": Case(),
    "no nesterov": Case(options={**PLAIN, "adjust_lr_fn": "match_rms_adamw"}),
    "cautious": Case(dtypes=HALF, options={**CAUTIOUS, "ns_coefficients": "polar_express"}),
    "another momentum": Case(dtypes=HALF, options={"momentum": 0.8}),
    "bf16 momentum": Case({"momentum_dtype": BF16}),
    "bf16 momentum, no nesterov": Case({"momentum_dtype": BF16}, MIXED, PLAIN),
    "fp32 momentum of halves": Case({"momentum_dtype": FP32}, HALF, CAUTIOUS),
    "random weights": Case({"stochastic_rounding": True}, MIXED, CAUTIOUS),
    "random both": Case({"momentum_dtype": BF16, "momentum_device": "cpu", "stochastic_rounding": True}, MIXED),
    "mixed": Case(dtypes=MIXED),
    "mixed, no nesterov": Case(dtypes=MIXED, options=PLAIN),
    "mixed with fp64": Case(dtypes=((FP64, FP64), *MIXED), options=CAUTIOUS),
    "rounded with fp64": Case({"momentum_dtype": BF16, "stochastic_rounding": True}, ((FP64, FP64), *MIXED)),
    "lr is a tensor": Case(dtypes=MIXED, lr=torch.tensor),
    "torch": Case(dtypes=MIXED, method="torch"),
    "torch, lr is a tensor": Case(dtypes=HALF, method="torch", lr=lambda lr: torch.tensor([lr], dtype=BF16)),
    "torch, cautious": Case(dtypes=MIXED, method="torch", options=CAUTIOUS),
    "torch, random weights": Case({"stochastic_rounding": True}, MIXED, method="torch"),
}
CODED: dict[str, Case] = {
    "int8": Case({"momentum_dtype": "int8"}),
    "int8, mixed": Case(
        {"momentum_dtype": "int8", "momentum_device": "cpu", "stochastic_rounding": True}, MIXED, PLAIN
    ),
}


def compare(case: str, layout: str, **places: Any) -> None:
    """Assert that steps match a direct computation on full tensors. With int8 momentum, the matrices are wide enough
    that no shard splits a quantization block."""
    views, options = (WIDE, WIDE_OPTIONS) if case in CODED else (VIEWS, OPTIONS)
    # Steps on a simulated device are slow, so use fewer parameters and steps. Five parameters cover the five pairs of
    # dtypes in MIXED. Two steps cover state that is created on a device and used again.
    names = [name for name in views if not (case in CODED and layout == "last dim" and name == "kernel")]
    views, of = {name: views[name] for name in names[: 5 if places else None]}, (CASES | CODED | ON_DEVICE)[case]
    assert_like_the_formula(
        views,
        options,
        layout,
        [of.options],
        of.dtypes,
        lr=of.lr,
        steps=2 if places else 3,
        method=of.method,
        **of.storage,
        **places,
    )


@pytest.mark.parametrize(
    ("case", "layout"),
    in_both(
        in_turn(CASES, every=4) + in_turn(CODED, [name for name in LAYOUTS if name != "flat"], 2)
        # The layout "flat" is left out for int8 momentum, because flat shards that split quantization blocks raise an
        # error.
    ),
)
def test_whatever_is_stored_has_the_bits_of_one_process(case: str, layout: str) -> None:
    compare(case, layout)


ON_DEVICE: dict[str, Case] = {
    "momentum on the CPU": Case({"momentum_device": "cpu"}, MIXED, PLAIN),
    "bf16 momentum on the CPU": Case(
        {"momentum_dtype": BF16, "momentum_device": "cpu", "stochastic_rounding": True}, MIXED
    ),
    "cautious, lr is a tensor": Case(dtypes=MIXED, options=CAUTIOUS, lr=torch.tensor),
    "torch, lr is a float tensor": Case(dtypes=MIXED, method="torch", lr=torch.tensor),
    # NorMuon is left out of the tests with weights on the device, because simulated ranks keep NorMuon's state on the
    # CPU.
    "normuon": Case(options={"variant": "normuon"}),
}
WEIGHTS_THERE = in_turn([name for name in ON_DEVICE if name != "normuon"], ["hsdp crossed", "flat"], 2)


@pytest.mark.parametrize(
    ("case", "layout", "places"),
    [
        *((case, layout, {"device": "cuda:0"}) for case, layout in WEIGHTS_THERE),
        ("int8, mixed", "last dim", {"device": "cuda:0"}),
        *((case, "hsdp crossed", {"buffers": "cuda:0"}) for case in ("random both", "mixed, no nesterov", "normuon")),
    ],
    ids=str,
)
def test_momentum_weights_and_lr_may_lie_elsewhere(
    case: str, layout: str, places: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights or the step's buffers are on a simulated CUDA device. This device raises an error for operations that mix
    tensors on different devices, so the step must move every tensor explicitly."""
    # If a framework has offloaded the weights to the CPU, the step's buffers and the weights are on different devices.
    if "buffers" in places:
        monkeypatch.setattr(binding, "offloaded_from", lambda _: torch.device(places["buffers"]))
    with CudaShape():
        compare(case, layout, **places)


ODD = (
    *(make() for make in VIEWS.values()),
    matrix_view((6, 1)),
    matrix_view((1, 6), transposed=True),
    matrix_view((1, 6)),
    matrix_view((6, 5, 4, 2), transposed=True),
    matrix_view((6, 12), split_sizes=(2, 1), split_groups=4, transposed=True),
)


CUTS = {
    **{name: LAYOUTS[name] for name in ("fsdp", "last dim", "flat", "hsdp 2x2")},
    "inner": lambda view: sharded(view, [(0, 1)], len(view.shape) - 2),
}


@pytest.mark.parametrize("layout", CUTS)
def test_random_bits_belong_to_elements(layout: str) -> None:
    """For each stored block of a matrix, and for slices of the block along one dim, the random bits for stochastic
    rounding must equal those of the same elements in the full matrix."""
    for view in ODD:
        if math.prod(view.shape) < 38 and layout == "flat":
            continue
        stream = Stream.of("w", "weights", 1, view.longest_row)
        found = CUTS[layout](view)
        for tile in (tile for of_rank in found.held for held in of_rank for tile in _tiles_of(held, view)):
            matrix = view.matrices[tile.matrix]
            whole = stream.bits(Patch.rectangle(tile.matrix, 0, 0, matrix.rows, matrix.cols), CPU)
            first, strides = tile.in_matrix(view)
            expected = whole.contiguous().as_strided(tile.sizes, strides, first)
            patch = tile.patch(view)
            assert torch.equal(stream.bits(patch, CPU), expected)
            seen = torch.zeros(tile.sizes)
            for place, part in patch.slabs(5, len(tile.sizes)):
                assert torch.equal(stream.bits(part, CPU), expected.narrow(*place))
                seen.narrow(*place).add_(1)
            assert bool((seen == 1).all())


@pytest.mark.parametrize("split", [{"split_sizes": (64, 192)}, {"split_sizes": (1, 1), "split_groups": 128}])
def test_a_split_inside_a_block_of_codes_is_refused(split: dict[str, Any]) -> None:
    job = Job([{"params": [Spec("w", (4, 256))], "transposed": True, **split}], momentum_dtype="int8")
    with pytest.raises(ValueError, match=r"w: momentum_dtype='int8' .* begin elsewhere \(transposed=True\)"):
        job.step(1)


@pytest.mark.parametrize("turned", [False, True])
def test_slabs_change_no_bit(turned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(6)
    view = matrix_view((2, 30, 300), view="stack", transposed=turned)
    (tile, _), kept = _tiles_of(Held(Box((0, 0, 0), view.shape), (0, 0, 0)), view), torch.randn(1, 30, 300).to(BF16)
    grad, codes, scales = torch.randn(1, 30, 300), *encode(torch.randn(1, 30, 300), 2)
    stream, patch, found = Stream.of("w", "momentum", 1, view.longest_row), tile.patch(view), []
    settings: dict[str, Any] = {"patch": patch, "stream": stream, "momentum": 0.9, "nesterov": True}
    for elements in (1 << 20, 700, 1):
        monkeypatch.setattr(stores, "_slab", lambda device, elements=elements: elements)
        mine, out = [kept.clone(), codes.clone(), scales.clone()], [torch.empty_like(grad) for _ in range(2)]
        step_stored_(mine[:1], grad, out[0], **settings)
        step_stored_(mine[1:], grad, out[1], **settings)
        found.append([*mine, *out, stream.round(patch, grad)])
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))
