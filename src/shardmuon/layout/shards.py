"""Pieces of a tensor that tensor parallelism cuts: whole parts, and flat ranges of parts. Pure.

[Note: stride]
    A stride of s says that the dim is cut in s equal blocks first (gate and up, fused in one weight), and each part has
    its share of every block, one after the other. Megatron and TransformerEngine call it `partition_stride`.
"""

from __future__ import annotations

from typing import NamedTuple

from shardmuon.layout.pieces import Box, FlatRange, Held
from shardmuon.layout.views import Ints


class Cut(NamedTuple):
    """Dim and stride by which a tensor is cut over its tensor-parallel group: see [Note: stride]."""

    dim: int
    stride: int


def parts_of(shape: Ints, cut: Cut, sizes: Ints) -> tuple[tuple[Held, ...], ...]:
    """The pieces of each part, whose sizes along the cut dim may differ.

    Raises:
        ValueError: A part does not divide in `cut.stride` blocks; the message lacks the name.
    """
    if any(size % cut.stride for size in sizes):
        raise ValueError(
            f"partition_stride={cut.stride} says that each shard holds {cut.stride} parts of one size, but the shards "
            f"have {sizes} indices along dim {cut.dim}. Set partition_stride=1 if they are cut in one piece each"
        )
    block, start, found = sum(sizes) // cut.stride, 0, []
    zeros = (0,) * len(shape)
    for size in sizes:
        share = size // cut.stride
        found.append(
            tuple(
                Held(
                    Box(at_dim(zeros, cut.dim, number * block + start), at_dim(shape, cut.dim, share)),
                    at_dim(zeros, cut.dim, number * share),
                )
                for number in range(cut.stride)
            )
        )
        start += share
    return tuple(found)


def at_dim(numbers: Ints, dim: int, value: int) -> Ints:
    """The same numbers with another one at this dim."""
    return (*numbers[:dim], value, *numbers[dim + 1 :])


def flat_part(shape: Ints, cut: Cut | None, part: int, num_parts: int, start: int, stop: int) -> tuple[Held, ...]:
    """The pieces that elements [start, stop) of one of the equal parts are, in their order.

    Args:
        cut: Along dim 0, or with stride 1: else parts are no boxes one after the other. None: the tensor is not cut,
            and the elements are its own.
    """
    if start >= stop:
        return ()
    if cut is None:
        return (Held(FlatRange(start, stop), (0,)),)
    found, at = [], 0
    for box, _ in parts_of(shape, cut, (shape[cut.dim] // num_parts,) * num_parts)[part]:
        low, high = max(start, at), min(stop, at + box.numel)
        if low < high:
            assert isinstance(box, Box), "parts are boxes"
            found.append(Held(FlatRange(low - at, high - at, box), (low - start,)))
        at += box.numel
    return tuple(found)
