"""Weights stored as the transpose of their map, and parts fused along columns: the same update as stored one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardmuon import Muon

LR, MU = 0.02, 0.95


def _step(stored: Tensor, grads: list[Tensor], **options: Any) -> Tensor:
    """A weight after a step."""
    whole = {key: options.pop(key) for key in ("method", "momentum_dtype") if key in options}
    p = nn.Parameter(stored.clone())
    optimizer = Muon([{"params": [("w", p)], **options}], lr=LR, **whole)
    for grad in grads:
        p.grad = grad.clone()
        optimizer.step()
    return p.detach()


def _draw(*shape: int, count: int = 3, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(count)]


# What is stored, its options, and how its parts (outputs, inputs) are taken from it by hand.
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any], Callable[[Tensor], list[Tensor]]]] = {
    "Conv1D": ((8, 24), {"transposed": True}, lambda w: [w.T]),
    "c_attn": (
        (8, 24),
        {"transposed": True, "split_sizes": (8, 8, 8)},
        lambda w: [w[:, :8].T, w[:, 8:16].T, w[:, 16:].T],
    ),
    "heads of the inputs": (
        (10, 12),
        {"split_sizes": 3, "transposed": True},
        lambda w: [w[:, :4].T, w[:, 4:8].T, w[:, 8:].T],
    ),
    "gate and up by turns": (
        (3, 6, 20),
        {"view": "stack", "transposed": True, "split_sizes": (1, 1), "split_groups": 10},
        lambda w: [part.T for expert in w for part in (expert[:, ::2], expert[:, 1::2])],
    ),
    "pairs by turns": (
        (6, 20),
        {"transposed": True, "split_sizes": (2, 3), "split_groups": 4},
        lambda w: [
            torch.cat([w[:, 5 * g : 5 * g + 2] for g in range(4)], 1).T,
            torch.cat([w[:, 5 * g + 2 : 5 * g + 5] for g in range(4)], 1).T,
        ],
    ),
}


@pytest.mark.numeric
@pytest.mark.parametrize(("dtype", "method"), [(torch.float32, "auto"), (torch.bfloat16, "torch")])
@pytest.mark.parametrize("case", CASES)
def test_the_bits_are_those_of_the_parts_stored_alone(case: str, dtype: torch.dtype, method: Any) -> None:
    """The bits of a transposed weight are those of a Linear's: whatever is gathered has the coordinates of the map."""
    shape, options, parts = CASES[case]
    start, *grads = _draw(*shape, count=4, dtype=dtype)
    whole = {"method": method}
    found = _step(start, grads, **whole, **options)
    for index, part in enumerate(parts(found)):
        alone = _step(parts(start)[index].contiguous(), [parts(g)[index].contiguous() for g in grads], **whole)
        assert torch.equal(part, alone)


@pytest.mark.parametrize(
    "options",
    [{"transposed": True, "split_sizes": (64, 192)}, {"transposed": True, "split_sizes": (1, 1), "split_groups": 128}],
)
def test_a_split_inside_a_block_of_codes_is_refused(options: dict[str, Any]) -> None:
    start, grad = _draw(4, 256, count=2, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"w: momentum_dtype='int8' .* begin elsewhere \(transposed=True\)"):
        _step(start, [grad], momentum_dtype="int8", **options)


def test_a_state_dict_brings_its_views_along() -> None:
    views = {"transposed": True, "split_sizes": (2, 4)}
    saved, fresh = (Muon([{"params": [nn.Parameter(torch.ones(4, 6))], **of}], lr=LR) for of in (views, {}))
    fresh.load_state_dict(saved.state_dict())
    assert [(m.rows, m.cols) for m in fresh.prepare().specs[0].layout.view.matrices] == [(2, 4), (4, 4)]
