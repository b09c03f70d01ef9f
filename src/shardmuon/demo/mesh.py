"""The mesh of each layout: its axes, how many ranks lie along each, and what must divide by them.

Plain arithmetic without torch, so that a command line that does not fit is refused before any rank starts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from shardmuon.demo.config import ModelConfig

__all__ = ["LAYOUTS", "ZERO", "Layout", "check", "mesh_shape", "num_readers"]


@dataclass(frozen=True, slots=True)
class Layout:
    """Mesh axes from the outermost in, the axis that takes whatever ranks the others leave, and its least size."""

    axes: tuple[str, ...]
    free: str
    least: int
    summary: str


LAYOUTS: Mapping[str, Layout] = {
    "single": Layout((), "", 1, "one process"),
    "ddp": Layout(("replicate",), "replicate", 2, "whole weights on every rank"),
    "fsdp2": Layout(("shard",), "shard", 2, "every weight cut along its rows (fully_shard)"),
    "hsdp": Layout(("replicate", "shard"), "shard", 2, "fully_shard inside each of the replicas"),
    "tp": Layout(("tp",), "tp", 2, "heads and hidden units cut (parallelize_module)"),
    "fsdp2+tp": Layout(("shard", "tp"), "shard", 2, "fully_shard on top of tensor parallel"),
    "hsdp+tp": Layout(("replicate", "shard", "tp"), "shard", 2, "replicas of fully_shard on top of tensor parallel"),
    "ep": Layout(("data", "ep"), "data", 1, "experts cut over ep, then fully_shard over data; the rest fully_shard"),
}
ZERO = Layout(("data",), "data", 2, "DeepSpeed's partitions: flat, matrices cut at any element")
DEFAULT_SIZE = 2  # of an axis that is neither free nor given


def mesh_shape(name: str, num_ranks: int | None, sizes: Mapping[str, int]) -> dict[str, int]:
    """Ranks along each axis, outermost first.

    Args:
        name: A layout, or ZeRO (`ZERO`) by any other name.
        num_ranks: All ranks; None takes the fewest the layout can use.
        sizes: Sizes asked for by axis name (`tp`, `replicate`, `ep`). The layout's free axis takes the ranks that the
            others leave.

    Raises:
        ValueError: the ranks do not factor, with the numbers and a command that does.
    """
    layout = LAYOUTS.get(name, ZERO)
    for axis, size in sizes.items():
        if axis not in layout.axes or size < 1:
            has = f"its axes are {', '.join(layout.axes) or 'none'}" if size > 0 else "an axis has at least 1 rank"
            raise ValueError(f"--{axis} {size} does not fit layout {name}: {has}.")
    fixed = {axis: sizes.get(axis, DEFAULT_SIZE) for axis in layout.axes if axis != layout.free}
    product = math.prod(fixed.values())
    smallest = product * sizes.get(layout.free, layout.least)
    ranks = smallest if num_ranks is None else num_ranks
    grows = layout.free and layout.free not in sizes
    if ranks < smallest or ranks % product or (ranks > smallest and not grows):
        need = f"a multiple of {product}, {smallest} or more" if grows else f"exactly {smallest}"
        factors = [f"{axis} {size}" for axis, size in fixed.items()]
        if layout.free:
            factors.append(f"{layout.free} {sizes.get(layout.free, f'at least {layout.least}')}")
        because = f" ({' x '.join(factors)})" if factors else ""
        raise ValueError(
            f"layout {name} cannot use --ranks {ranks}: it needs {need}{because}. "
            f"Write --ranks {smallest} or choose another --layout."
        )
    return {axis: fixed.get(axis, ranks // product) for axis in layout.axes}


def check(name: str, shape: Mapping[str, int], model: ModelConfig, batch: int) -> None:
    """Raise ValueError when the model or the batch does not divide over the mesh."""
    tp, ep = shape.get("tp", 1), shape.get("ep", 1)
    divisible = [
        (model.num_kv_heads, "key-value heads", tp, "tp"),
        (model.num_heads, "heads", tp, "tp"),
        (model.hidden if not model.num_experts else model.expert_hidden, "hidden units", tp, "tp"),
        (model.vocab, "vocabulary entries", tp, "tp"),
        (model.num_experts, "experts", ep, "ep"),
        (batch, "sequences in the batch", num_readers(shape), "data-parallel ranks"),
    ]
    for count, what, parts, axis in divisible:
        if count % parts:
            raise ValueError(f"layout {name}: {count} {what} do not divide over {parts} ({axis}).")
    if "ep" in shape and not model.num_experts:
        raise ValueError(f"layout {name} shards experts: write --experts {max(4, ep)}.")


def num_readers(shape: Mapping[str, int]) -> int:
    """How many parts the global batch is cut into: one for each rank of every axis but tp."""
    return math.prod(size for axis, size in shape.items() if axis != "tp")
