"""Put one whole matrix together from its holders' pieces, without the plan's fragments, routes or buckets.

The layout is read afresh off the parameters. An interval of the matrix's rows is a box (or flat range) of the logical
tensor, so a holder's part of it is the intersection of two boxes; nothing else is needed. Whole rows travel: a matrix
that takes only some of their columns, or is stored as its transpose, is cut out and turned at the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shardmuon.engines import Description
from shardmuon.planning.layout import Box, FlatBox, FlatRange, Holder, ParamLayout, same_storage
from shardmuon.planning.views import Matrix, MatrixView, Shape
from shardmuon.ranks.exchange import gather_to

Slices = tuple[slice, ...]


class Spot(NamedTuple):
    """A holder's part of one row interval of a matrix."""

    source: Slices  # of the rank's storage
    start: int  # first row of the interval in the matrix
    size: Shape  # of the interval, in the logical tensor's dims ((numel,) for flat pieces)
    target: Slices  # of the interval


def layout_of_storage(
    about: Description,
    shapes: Sequence[Shape],
    fits: Sequence[Sequence[bool]],
    extents: Sequence[tuple[int, ...] | None],
) -> ParamLayout:
    """The layout that every rank's storage bears out now.

    Args:
        about: The engine's description on this rank.
        shapes: Each rank's storage shape, in `about.ranks` order.
        fits: For each rank whether each claim has its storage shape.
        extents: For each rank what it says that it stores, where the engine goes by that.

    Raises:
        ValueError: No reading of the placements fits.
    """
    if about.from_extents is not None:
        return about.from_extents([extent or () for extent in extents])
    for index, claim in enumerate(about.claims):
        if all(theirs[index] for theirs in fits):
            return claim.layout
    if about.from_shapes is None:
        raise ValueError(f"ranks {about.ranks} store shapes {list(shapes)}, which {about.text} does not imply")
    return about.from_shapes(shapes)


def fits(about: Description) -> tuple[bool, ...]:
    """Whether each claim has this rank's storage shape."""
    return tuple(same_storage(claim.storage_shape, about.storage_shape) for claim in about.claims)


@dataclass(frozen=True)
class MatrixPieces:
    """Who sends what of one matrix.

    Attributes:
        matrix: Which rows and columns of the row view it takes.
        num_cols: Columns of the row view.
        spots: rank -> the parts that it sends; of replicas only the lowest rank sends.
        ranks: Of the parameter's mesh.
    """

    matrix: Matrix
    num_cols: int
    spots: dict[int, tuple[Spot, ...]]
    ranks: tuple[int, ...]

    @property
    def rows(self) -> int:
        return self.matrix.rows

    @property
    def cols(self) -> int:
        return self.matrix.cols

    def select(self, storage: Tensor, rank: int) -> Tensor:  # 1-D
        """What `rank` sends of a weight, gradient or momentum that is stored like `storage`."""
        parts = [storage[spot.source].reshape(-1) for spot in self.spots.get(rank, ())]
        return torch.cat(parts) if parts else storage.new_empty(0)

    def numel(self, rank: int) -> int:
        """Elements that `rank` sends."""
        return sum(_numel(spot.target) for spot in self.spots.get(rank, ()))

    def assemble(self, flat: Sequence[Tensor]) -> Tensor:  # (rows, cols)
        """The matrix from what each rank sent, in `ranks` order."""
        num_stored = sum(stop - start for start, stop in self.matrix.intervals)
        out = flat[0].new_full((num_stored, self.num_cols), math.nan)
        for rank, values in zip(self.ranks, flat, strict=True):
            at = 0
            for spot in self.spots.get(rank, ()):
                count = _numel(spot.target)
                num_rows = math.prod(spot.size) // self.num_cols
                target = out[spot.start : spot.start + num_rows].view(spot.size)[spot.target]
                target.copy_(values[at : at + count].view(target.shape))
                at += count
        runs = self.matrix.columns
        if runs is not None:
            chosen = [runs.start + at * runs.period + i for at in range(runs.num) for i in range(runs.size)]
            out = out[:, chosen]
        return out.T.contiguous() if self.matrix.transposed else out

    def blocks(self) -> list[tuple[slice, slice]]:
        """The rectangles of the matrix that lie on one rank; other shapes (kernels cut inside) are left out."""
        found = []
        plain = self.matrix.columns is None and not self.matrix.transposed
        for rank in self.ranks:
            spots = self.spots.get(rank, ())
            if (
                plain and len(spots) == 1 and spots[0].size[1:] == (self.num_cols,)
            ):  # as nearly always: a part of whole rows
                (spot,) = spots
                rows, cols = spot.target
                found.append((slice(spot.start + rows.start, spot.start + rows.stop), cols))
                continue
            values = [
                torch.full((self.numel(r),), float(r == rank), dtype=torch.float32, device="cpu") for r in self.ranks
            ]
            mask = self.assemble(values) == 1.0
            height, width = mask.any(1).nonzero().flatten(), mask.any(0).nonzero().flatten()
            if not len(height):
                continue
            block = (slice(int(height[0]), int(height[-1]) + 1), slice(int(width[0]), int(width[-1]) + 1))
            if bool(mask[block].all()):
                found.append(block)
        return found


def pieces_of(layout: ParamLayout, matrix: int) -> MatrixPieces:
    """Who sends what of one matrix of a parameter laid out so."""
    shape = layout.view.matrices[matrix]
    spots: dict[int, list[Spot]] = {}
    seen: set[object] = set()
    for holder in sorted(layout.holders, key=lambda h: h.rank):
        if holder.piece in seen or not holder.piece.numel:
            continue
        seen.add(holder.piece)
        start = 0
        for first, last in shape.intervals:
            if isinstance(holder.piece, FlatBox):
                spots.setdefault(holder.rank, []).extend(
                    _spots_in_box(holder.piece, holder.local[0], layout.view, first, last, start)
                )
            elif (spot := _spot(holder, layout.view, first, last, start)) is not None:
                spots.setdefault(holder.rank, []).append(spot)
            start += last - first
    return MatrixPieces(shape, layout.view.num_cols, {r: tuple(s) for r, s in spots.items()}, layout.ranks)


def _spot(holder: Holder, view: MatrixView, first: int, last: int, start: int) -> Spot | None:
    """The part of rows [first, last) of the row view that a holder stores."""
    piece = holder.piece
    if isinstance(piece, Box):
        if view.num_row_dims == 1:
            low, size = (first, *(0,) * (len(view.shape) - 1)), (last - first, *view.shape[1:])
        else:  # rows of one expert
            expert, row = divmod(first, view.shape[1])
            low, size = (expert, row, 0), (1, last - first, view.shape[2])
        begin = [max(o, a) for o, a in zip(piece.offset, low, strict=True)]
        end = [min(o + n, a + m) for o, n, a, m in zip(piece.offset, piece.size, low, size, strict=True)]
        local, offset = holder.local, piece.offset
    else:
        assert isinstance(piece, FlatRange)
        low, size = (first * view.num_cols,), ((last - first) * view.num_cols,)
        begin, end = [max(piece.start, low[0])], [min(piece.stop, low[0] + size[0])]
        local, offset = holder.local, (piece.start,)
    if any(b <= a for a, b in zip(begin, end, strict=True)):
        return None
    source = tuple(slice(at + a - o, at + b - o) for at, a, b, o in zip(local, begin, end, offset, strict=True))
    target = tuple(slice(a - lo, b - lo) for a, b, lo in zip(begin, end, low, strict=True))
    return Spot(source, start, size, target)


def _spots_in_box(piece: FlatBox, local: int, view: MatrixView, first: int, last: int, start: int) -> Iterator[Spot]:
    """`_spot` for a range of a rectangle, one row at a time."""
    (top, left), (height, width) = piece.box.offset, piece.box.size
    for row in range(max(first, top), min(last, top + height)):
        edge = (row - top) * width  # of the row in the rectangle
        begin, end = max(piece.start, edge), min(piece.stop, edge + width)
        if begin < end:
            source = slice(local + begin - piece.start, local + end - piece.start)
            target = slice(row - first, row - first + 1), slice(left + begin - edge, left + end - edge)
            yield Spot((source,), start, (last - first, view.num_cols), target)


def _numel(slices: Slices) -> int:
    return math.prod(s.stop - s.start for s in slices)


def collect(
    pieces: MatrixPieces,
    parts: Sequence[Tensor],  # 1-D each: what this rank sends of each quantity, equal lengths
    target: int,
) -> list[Tensor]:  # (rows, cols) each on `target`, nothing elsewhere
    """Whole matrices of several quantities on one rank. Collective among the parameter's ranks."""
    send = torch.cat(list(parts))
    sizes = [pieces.numel(rank) * len(parts) for rank in pieces.ranks]
    received = gather_to(send, sizes, pieces.ranks, target)
    if not received:
        return []
    by_rank = [flat.view(len(parts), -1) if flat.numel() else flat.new_empty(len(parts), 0) for flat in received]
    return [pieces.assemble([flat[i] for flat in by_rank]) for i in range(len(parts))]
