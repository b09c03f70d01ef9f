"""Pieces of a tensor that tensor parallelism cuts: whole parts, and flat ranges of parts. Pure.

[Note: stride]
    A stride of s says that the dim is cut in s equal blocks first (gate and up, fused in one weight), and each part has
    its share of every block, one after the other. Megatron and TransformerEngine call it `partition_stride`.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from shardmuon.layout.pieces import Box, FlatRange, Held
from shardmuon.layout.views import Ints


class Cut(NamedTuple):
    """How a tensor is cut over its tensor-parallel group, see [Note: stride]."""

    dim: int
    stride: int


@lru_cache(maxsize=4096)  # layers are alike
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


@lru_cache(maxsize=4096)
def flat_part(shape: Ints, cut: Cut | None, part: int, num_parts: int, start: int, stop: int) -> tuple[Held, ...]:
    """The pieces that elements [start, stop) of one of the equal parts are, in their order.

    Args:
        cut: None: the tensor is not cut, and the elements are its own.

    Raises:
        ValueError: They cannot be told; the message lacks the name.
    """
    fault = flat_fault(shape, cut, num_parts)
    if fault is not None:
        raise ValueError(fault)
    if start >= stop:
        return ()
    if cut is None:
        return (Held(FlatRange(start, stop), (0,)),)
    if cut.dim > 0:
        width = shape[cut.dim] // num_parts
        offset = at_dim((0,) * len(shape), cut.dim, part * width)
        return (Held(FlatRange(start, stop, Box(offset, at_dim(shape, cut.dim, width))), (0,)),)
    block, found, at = math.prod(shape) // (num_parts * cut.stride), [], start
    while at < stop:
        number, inside = divmod(at, block)
        take = min(block - inside, stop - at)
        first = (number * num_parts + part) * block + inside
        found.append(Held(FlatRange(first, first + take), (at - start,)))
        at += take
    return tuple(found)


def flat_fault(shape: Ints, cut: Cut | None, num_parts: int) -> str | None:
    """Why it cannot be told which elements flat ranges of such parts are; None: it can."""
    if cut is None:
        return None
    if shape[cut.dim] % (num_parts * cut.stride):
        return (
            f"shape {shape} is cut along dim {cut.dim} with stride {cut.stride} over {num_parts} tensor-parallel "
            "ranks, which does not divide it in equal parts"
        )
    if cut.dim > 0 and cut.stride > 1:
        return f"shape {shape} is cut along dim {cut.dim} with stride {cut.stride}: only dim 0 may have a stride"
    return None
