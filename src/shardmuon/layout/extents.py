"""Pieces from what ranks really store, where placements do not tell: parts of any size, one after the other. Pure.

An *extent* is what one rank stores of a tensor; ranks exchange theirs when a plan is made, and each derives the same
pieces from all of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from shardmuon.layout.pieces import Box, FlatRange, Held
from shardmuon.layout.views import Ints

EMPTY, ROWS, FLAT = 0, 1, 2  # what a rank stores: nothing, indices of dim 0 in storage like the tensor, a 1-D run
UNKNOWN = -1
At = Ints  # a rank's mesh coordinates
Runs = list[tuple[int, int, int]]  # (start in the tensor, length, start in storage) along one dim


class Extent(NamedTuple):
    """What one rank stores of a tensor.

    Attributes:
        kind: EMPTY, ROWS or FLAT.
        start: The element at which it begins in the tensor-parallel part, as the engine says, or UNKNOWN.
        shape: Of the storage.
    """

    kind: int
    start: int
    shape: Ints

    @classmethod
    def of(cls, storage: Ints, num_dims: int, start: int = UNKNOWN) -> Extent:
        """The extent of a storage of this shape of a tensor with `num_dims` dims."""
        if math.prod(storage) == 0:
            return cls(EMPTY, UNKNOWN, storage)
        return cls(ROWS if len(storage) == num_dims else FLAT, start, storage)

    @property
    def length(self) -> int:
        """Indices of dim 0, or elements of a run."""
        return 0 if self.kind == EMPTY else self.shape[0]

    def pack(self, num_dims: int) -> tuple[int, ...]:
        """`2 + num_dims` numbers, the form in which ranks exchange extents."""
        padded = (*self.shape, *(0,) * num_dims)[:num_dims]
        return (self.kind, self.start, *padded)

    @classmethod
    def unpack(cls, numbers: Sequence[int]) -> Extent:
        """The inverse of `pack`."""
        kind, start, *shape = (int(number) for number in numbers)
        return cls(kind, start, tuple(shape[:1] if kind == FLAT else shape))


class AxisCut(NamedTuple):
    """A mesh axis that cuts a tensor dim in parts of any size.

    Attributes:
        axis: Of the mesh.
        dim: Of the tensor.
        tensor_parallel: Whether its parts are tensor-parallel shards, within which the data-parallel axes cut.
        stride: Each tensor-parallel shard has a share of that many equal blocks of the dim (Megatron's
            `partition_stride`: 2 for fused gate and up).
    """

    axis: int
    dim: int
    tensor_parallel: bool = False
    stride: int = 1


@lru_cache(maxsize=4096)
def pieces_of_extents(
    shape: Ints, mesh: Ints, mesh_ranks: Ints, cuts: tuple[AxisCut, ...], extents: tuple[Extent, ...]
) -> tuple[tuple[Held, ...], ...]:
    """The pieces of each place of a mesh: the ranks' parts one after the other.

    Args:
        shape: Of the tensor.
        mesh: Size of each axis.
        mesh_ranks: Global ranks in row-major order.
        cuts: The axes that cut the tensor; the one that cuts first comes first.
        extents: What each of `mesh_ranks` stores.

    Raises:
        ValueError: The parts do not fit together, or a rank says that its part begins elsewhere. The message lacks the
            name.
    """
    coordinates = list(itertools.product(*(range(size) for size in mesh)))
    held = dict(zip(coordinates, extents, strict=True))
    rank_at = dict(zip(coordinates, mesh_ranks, strict=True))
    flat = _is_flat(held, rank_at, cuts)
    starts = _starts(held, [cut for cut in cuts if cut.dim == 0])
    _check_starts(held, rank_at, starts)
    widths = {cut: _widths(held, cut, mesh[cut.axis]) for cut in cuts if cut.dim > 0}
    found: list[tuple[Held, ...]] = []
    for at, extent in held.items():
        if extent.kind == EMPTY:
            found.append(())
        elif flat:
            first = starts[at].whole
            found.append((Held(FlatRange(first, first + extent.length), (0,)),))
        else:
            runs: list[Runs] = [[(0, size, 0)] for size in extent.shape]
            runs[0] = [(starts[at].whole, extent.length, 0)]
            for cut in cuts:
                part, num_parts, size = at[cut.axis], mesh[cut.axis], shape[cut.dim]
                if cut.dim > 0:
                    width = extent.shape[cut.dim]
                    runs[cut.dim] = [(sum(widths[cut][:part]), width, 0)]
                    if cut.stride > 1:
                        runs[cut.dim] = _strided_runs(0, width, width, part, num_parts, size, cut)
                elif cut.stride > 1:
                    first, length = starts[at].in_part, starts[at].part_length
                    runs[0] = _strided_runs(first, extent.length, length, part, num_parts, size, cut)
            found.append(tuple(_boxes(runs)))
    return tuple(found)


def _is_flat(held: Mapping[At, Extent], rank_at: Mapping[At, int], cuts: Sequence[AxisCut]) -> bool:
    rows = [rank_at[at] for at, extent in held.items() if extent.kind == ROWS]
    runs = [rank_at[at] for at, extent in held.items() if extent.kind == FLAT]
    if rows and runs:
        raise ValueError(f"ranks {rows} store whole rows of it, ranks {runs} 1-D runs of elements")
    if runs and any(cut.dim > 0 or cut.stride > 1 for cut in cuts):
        raise ValueError(
            f"ranks {runs} store 1-D runs of elements of a tensor that tensor parallelism cuts along another dim than "
            "0, or in strides: which elements these are cannot be told"
        )
    return bool(runs)


class _Start(NamedTuple):
    """Where a rank's part begins along dim 0 (in elements if flat)."""

    whole: int  # in the tensor
    in_part: int  # in its tensor-parallel part
    part_length: int


def _starts(held: Mapping[At, Extent], cuts: Sequence[AxisCut]) -> dict[At, _Start]:
    """Each rank's start: the ranks of a line of the mesh one after the other, in the order in which axes cut."""
    axes = [cut.axis for cut in cuts]
    outer = [cut.axis for cut in cuts if cut.tensor_parallel]
    if not axes:
        return {at: _Start(0, 0, extent.length) for at, extent in held.items()}
    lines: dict[At, dict[At, list[At]]] = {}  # replica -> tensor-parallel part -> ranks
    for at in sorted(held, key=lambda at: [at[axis] for axis in axes]):
        line = lines.setdefault(tuple(c for axis, c in enumerate(at) if axis not in axes), {})
        line.setdefault(tuple(at[axis] for axis in outer), []).append(at)
    starts: dict[At, _Start] = {}
    for line in lines.values():
        total = 0
        for part in line.values():
            before = list(itertools.accumulate((held[at].length for at in part), initial=0))
            starts |= {at: _Start(total + b, b, before[-1]) for at, b in zip(part, before, strict=False)}
            total += before[-1]
    return starts


def _check_starts(held: Mapping[At, Extent], rank_at: Mapping[At, int], starts: Mapping[At, _Start]) -> None:
    for at, extent in held.items():
        found = starts[at].in_part * (math.prod(extent.shape[1:]) if extent.kind == ROWS else 1)
        if extent.kind != EMPTY and extent.start not in (UNKNOWN, found):
            raise ValueError(
                f"rank {rank_at[at]} says that its part begins at element {extent.start}, but the ranks before it "
                f"store {found} elements"
            )


def _widths(held: Mapping[At, Extent], cut: AxisCut, num_parts: int) -> list[int]:
    """Size of each part along a dim other than 0. Ranks that store nothing do not know it."""
    return [
        max((e.shape[cut.dim] for at, e in held.items() if e.kind == ROWS and at[cut.axis] == part), default=0)
        for part in range(num_parts)
    ]


def _strided_runs(
    start: int, length: int, part_length: int, part: int, num_parts: int, size: int, cut: AxisCut
) -> Runs:
    """What [start, start + length) of one tensor-parallel part of `part_length` is in a dim of `size`."""
    if part_length * num_parts != size or part_length % cut.stride:
        raise ValueError(
            f"tensor-parallel parts of {part_length} along dim {cut.dim} with partition_stride={cut.stride} do not "
            f"make {size} on {num_parts} ranks"
        )
    block = part_length // cut.stride
    found: Runs = []
    at = start
    while at < start + length:
        number, inside = divmod(at, block)
        take = min(block - inside, start + length - at)
        found.append((number * (size // cut.stride) + part * block + inside, take, at - start))
        at += take
    return found


def _boxes(runs: Sequence[Runs]) -> list[Held]:
    return [
        Held(Box(tuple(r[0] for r in pick), tuple(r[1] for r in pick)), tuple(r[2] for r in pick))
        for pick in itertools.product(*runs)
    ]
