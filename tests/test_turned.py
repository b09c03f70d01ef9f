"""Weights stored as the transpose of their map, and parts fused along columns: the same update as stored one by one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardmuon import Audit, Exchange, Muon, Orthogonalizer, Storage
from shardmuon.layout.pieces import Box, Held
from shardmuon.layout.table import ParamLayout
from shardmuon.layout.views import matrix_view
from shardmuon.momentum.stores import decode
from shardmuon.testing.compare import compare_with_dense
from shardmuon.testing.layouts import ParamCase
from shardmuon.testing.pool import RankPool
from shardmuon.testing.tolerances import polar_bound, roundoff

LR, DECAY, MU = 0.02, 0.1, 0.95


def _step(stored: Tensor, grads: list[Tensor], **options: Any) -> Tensor:
    """A weight after a step."""
    whole = {key: options.pop(key) for key in ("orthogonalizer", "storage") if key in options}
    p = nn.Parameter(stored.clone())
    optimizer = Muon([{"params": [("w", p)], **options}], lr=LR, weight_decay=DECAY, **whole)
    for grad in grads:
        p.grad = grad.clone()
        optimizer.step()
    return p.detach()


def _by_hand(weight: Tensor, grads: list[Tensor]) -> tuple[Tensor, float]:
    """The formula, for one matrix of (outputs, inputs): momentum, polar factor, scale, decay; fp64. And by how much
    (Frobenius norm) another way to the same may differ."""
    momentum, allowed = torch.zeros_like(weight), 0.0
    for grad in grads:
        momentum = MU * momentum + (1 - MU) * grad
        fed = MU * momentum + (1 - MU) * grad
        u, _, v = torch.linalg.svd(fed, full_matrices=False)
        rows, cols = weight.shape
        step = LR * math.sqrt(max(1.0, rows / cols))
        weight = weight * (1 - LR * DECAY) - step * (u @ v)
        # an SVD on each side, and of what it is given four roundings a side, which it amplifies no more than its own;
        # the decay, the product and the sum of the weights are rounded once each on both sides
        allowed += step * 4 * polar_bound(fed) + 6 * roundoff(torch.float64) * float(weight.norm())
    return weight, allowed


def _draw(*shape: int, count: int = 3, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(count)]


# What is stored, its options, and how its parts (outputs, inputs) are taken from it by hand.
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any], Callable[[Tensor], list[Tensor]]]] = {
    "Conv1D": ((8, 24), {"transposed": True}, lambda w: [w.T]),
    "c_attn": (
        (8, 24),
        {"transposed": True, "split_dim": 1, "split_sizes": (8, 8, 8)},
        lambda w: [w[:, :8].T, w[:, 8:16].T, w[:, 16:].T],
    ),
    "heads of the inputs": (
        (10, 12),
        {"num_heads": 3, "split_dim": 1},
        lambda w: [w[:, :4], w[:, 4:8], w[:, 8:]],
    ),
    "gate and up by turns": (
        (3, 6, 20),
        {"view": "stack", "transposed": True, "split_dim": 1, "split_sizes": (1, 1), "split_groups": 10},
        lambda w: [part.T for expert in w for part in (expert[:, ::2], expert[:, 1::2])],
    ),
    "pairs by turns": (
        (6, 20),
        {"split_dim": 1, "split_sizes": (2, 3), "split_groups": 4},
        lambda w: [
            torch.cat([w[:, 5 * g : 5 * g + 2] for g in range(4)], 1),
            torch.cat([w[:, 5 * g + 2 : 5 * g + 5] for g in range(4)], 1),
        ],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_update_is_the_formulas_on_each_part(case: str) -> None:
    shape, options, parts = CASES[case]
    start, *grads = _draw(*shape, count=4)
    found = _step(start, grads, orthogonalizer=Orthogonalizer(method="reference"), **options)
    for index, part in enumerate(parts(found)):
        expected, allowed = _by_hand(parts(start)[index].contiguous(), [parts(g)[index].contiguous() for g in grads])
        assert float((part - expected).norm()) <= allowed
        assert 1000 * allowed < float((expected - parts(start)[index]).norm())  # it would see another update


@pytest.mark.numeric
@pytest.mark.parametrize("method", ["standard", "gram", "torch", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_the_bits_are_those_of_the_parts_stored_alone(case: str, dtype: torch.dtype, method: Any) -> None:
    """The bits of a transposed weight are those of a Linear's: whatever is gathered has the coordinates of the map."""
    shape, options, parts = CASES[case]
    start, *grads = _draw(*shape, count=4, dtype=dtype)
    whole = {"orthogonalizer": Orthogonalizer(method=method)}
    found = _step(start, grads, **whole, **options)
    for index, part in enumerate(parts(found)):
        alone = _step(parts(start)[index].contiguous(), [parts(g)[index].contiguous() for g in grads], **whole)
        assert torch.equal(part, alone)


def test_random_rounding_gives_a_transposed_weight_the_bits_of_a_linear() -> None:
    """The random bits belong to the entries of the map."""
    start, *grads = _draw(256, 128, count=4, dtype=torch.bfloat16)
    storage = Storage(momentum_dtype=torch.bfloat16, stochastic_rounding=True)
    whole = {"orthogonalizer": Orthogonalizer(method="standard"), "storage": storage}
    turned = _step(start.T.contiguous(), [g.T.contiguous() for g in grads], **whole, transposed=True)
    assert torch.equal(turned.T, _step(start, grads, **whole))


@pytest.mark.parametrize("shape", [(96, 256), (3, 40, 130)])
def test_codes_of_a_transposed_weight_lie_along_stored_rows(shape: tuple[int, ...]) -> None:
    """The momentum after a step from zero is (1 - mu) G. A code is off by less than the gap to the next, of which the
    widest, between 126 and 127, is 253 / 127**2 of the largest entry of its block of 128 columns."""
    start, grad = _draw(*shape, count=2, dtype=torch.float32)
    p = nn.Parameter(start)
    options = {"transposed": True, **({"view": "stack"} if len(shape) == 3 else {})}
    optimizer = Muon([{"params": [("w", p)], **options}], storage=Storage(momentum_dtype="int8"), lr=LR, momentum=MU)
    p.grad = grad
    optimizer.step()
    codes, scales = (optimizer.state[p][key] for key in ("momentum_buffer", "momentum_scale"))
    decoded = decode(codes.flatten(0, -2), scales.flatten(0, -2)).view(shape)
    largest = scales.repeat_interleave(128, -1)[..., : shape[-1]]
    assert ((decoded - (1 - MU) * grad).abs() <= largest * 253 / 127**2).all()
    assert (codes.abs() == 127).sum() >= scales.numel()  # each block's largest entry is its scale


def _compare(layout: str, momentum: Any) -> tuple[bool, str]:
    table = {
        "whole": ParamCase((128, 256), "", {"transposed": True}),
        "stack": ParamCase((4, 32, 128), "", {"view": "stack", "transposed": True}),
        "blocks": ParamCase((16, 512), "", {"split_dim": 1, "split_sizes": (128, 384), "transposed": True}),
        "plain blocks": ParamCase((16, 512), "", {"split_dim": 1, "split_sizes": (128, 384)}),
    }
    storage = Storage(momentum_dtype=momentum, stochastic_rounding=True)
    found = compare_with_dense(layout, dtype=torch.bfloat16, storage=storage, table=table, lr=0.02, remember=False)
    return found.bitwise, found.worst


@pytest.mark.parametrize(
    ("layout", "momentum"), [("fsdp2", torch.bfloat16), ("fsdp2+tp", torch.bfloat16), ("fsdp2", "int8")]
)
def test_rounded_momentum_has_the_same_bits_on_layouts(world4: RankPool, layout: str, momentum: Any) -> None:
    assert {bitwise for bitwise, _ in world4.run(_compare, layout, momentum)} == {True}


@pytest.mark.parametrize(
    "options",
    [{"split_dim": 1, "split_sizes": (64, 192)}, {"split_dim": 1, "split_sizes": (1, 1), "split_groups": 128}],
)
def test_a_split_inside_a_block_of_codes_is_refused(options: dict[str, Any]) -> None:
    start, grad = _draw(4, 256, count=2, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"w: momentum_dtype='int8' .* begin elsewhere \(split_dim=1\)"):
        _step(start, [grad], storage=Storage(momentum_dtype="int8"), **options)


def test_turns_of_single_columns_are_one_tile() -> None:
    """A gate and an up of 2,880 columns by turns are two strided views on a rank, not 5,760 slices."""
    view = matrix_view((2, 8, 5760), view="stack", split_dim=1, split_sizes=(1, 1), split_groups=2880, transposed=True)
    held = tuple((Held(Box((rank, 0, 0), (1, 8, 5760)), (0, 0, 0)),) for rank in range(2))
    layout = ParamLayout(view, (0, 1), held)
    assert [{rank: len(t) for rank, t in by_rank.items()} for by_rank in layout.tiles] == [{0: 1}] * 2 + [{1: 1}] * 2
    assert len(repr(view)) < 1000


def _optimizer(**options: Any) -> Muon:
    p = nn.Parameter(torch.ones(4, 6))
    p.grad = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    optimizer = Muon([{"params": [("w", p)], **options}], lr=1e-3)
    optimizer.step()
    return optimizer


def test_a_state_dict_brings_its_views_along() -> None:
    saved = _optimizer(transposed=True, split_dim=1, split_sizes=(2, 4)).state_dict()
    fresh = _optimizer()
    fresh.load_state_dict(saved)
    assert [(m.rows, m.cols) for m in fresh.prepare().specs[0].layout.view.matrices] == [(2, 4), (4, 4)]


TURNED = ("in_out", "in_out_experts", "columns", "in_out_qkv", "in_out_gate_up")


GRAM_BAND = 2e-4  # of the Gram route's update around the dense one in fp32: `factor_of`


def _audited(layout: str, route: Any, dtype: Any = None) -> tuple[bool, float]:
    """Steps whose every matrix is compared with the audit's own dense reference, which raises."""
    found = compare_with_dense(
        layout,
        lr=0.02,
        params=TURNED,
        audit=Audit(every=1, samples=100),
        exchange=Exchange(route=route),
        orthogonalizer=Orthogonalizer(dtype=dtype),
        remember=False,
    )
    return found.bitwise, found.max_difference


@pytest.mark.parametrize(
    ("layout", "route"),
    [pytest.param("fsdp2", "auto", marks=pytest.mark.numeric), ("fsdp2+tp", "auto")],
)
def test_audits_put_the_same_matrices_together(world4: RankPool, layout: str, route: Any) -> None:
    assert world4.run(_audited, layout, route) == [(True, 0.0)] * 4


@pytest.mark.parametrize("layout", ["fsdp2", "fsdp2 dim 1"])
def test_the_gram_route_takes_transposes(world2: RankPool, layout: str) -> None:
    """Sums over shards round differently: within 2e-4 of the dense update in fp32, whatever dtype products have on
    this machine; see `factor_of`."""
    assert max(difference for _, difference in world2.run(_audited, layout, "gram", "float32")) < GRAM_BAND
