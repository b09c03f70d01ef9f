"""What a step costs beside its arithmetic, as counts, which no busy machine changes: operations and Python calls."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardmuon import Muon, Orthogonalizer

# Operations that make a view or allocate, and launch nothing on any device.
VIEWS = {
    *("alias", "as_strided", "detach", "diagonal", "expand", "narrow", "select", "slice", "split", "squeeze", "t"),
    *("transpose", "unbind", "unsqueeze", "view", "_unsafe_view", "empty", "empty_like", "new_empty", "empty_strided"),
}


class Operations(TorchDispatchMode):
    """Counts what would be launched on an accelerator."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in VIEWS:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


def _optimizer(shapes: list[tuple[int, ...]], method: Any = "auto", **options: Any) -> Muon:
    """Ready to step, with its plan made."""
    generator = torch.Generator().manual_seed(0)

    def parameter(shape: tuple[int, ...]) -> nn.Parameter:
        p = nn.Parameter(torch.randn(shape, generator=generator))
        p.grad = torch.randn(shape, generator=generator)
        return p

    params = [parameter(shape) for shape in shapes]
    groups: list[dict[str, Any]] = [{"params": [p for p in params if p.ndim == 2]}]
    vectors: list[Tensor] = [p for p in params if p.ndim == 1]
    if vectors:
        groups.append({"params": vectors, "use_muon": False})
    optimizer = Muon(groups, lr=0.02, orthogonalizer=Orthogonalizer(method, torch.float32), **options)
    for _ in range(2):
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("mode", ["decoupled", "independent", "l2"])
def test_operations_grow_with_shapes_not_with_matrices(method: str, mode: str) -> None:
    def count(copies: int) -> int:
        shapes = [(24, 8), (8, 8), (32, 8), (8, 32)] * copies
        optimizer = _optimizer([*shapes, *[(8,)] * copies], method=method, weight_decay_mode=mode)
        with Operations() as operations:
            optimizer.step()
        return sum(operations.found.values())

    few, many = count(3), count(12)
    assert many - few == (2 * 4 * (12 - 3) if mode == "l2" else 0)  # "l2" adds the decay to each gradient in two
    assert few <= 190


def test_python_per_matrix_is_bounded_and_linear() -> None:
    def count(number: int) -> int:
        optimizer = _optimizer([(8, 16)] * number, method="standard")
        calls = 0

        def watch(frame: Any, event: str, arg: Any) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(watch)
        try:
            optimizer.step()
        finally:
            sys.setprofile(None)
        return calls

    first, second, third = (count(number) for number in (100, 300, 500))
    assert (second - first) / 200 <= 140  # 226 before parameters were read once and stepped in lists
    assert abs((third - second) - (second - first)) <= 200 * 2
