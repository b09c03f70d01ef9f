"""Put one whole matrix together from its holders' pieces, without the plan's tiles, routes, buckets or copies.

The layout is described afresh. Rows of the matrix as it is stored lie in few slabs of the logical tensor (an interval
of rows, or a repeat of one), so a holder's part of a slab is the intersection of two boxes; nothing else is needed.
Whole rows travel: a matrix that takes only some of their columns, or is stored as its transpose, is cut out and turned
at the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shardmuon.comm.exchange import Traffic, start
from shardmuon.comm.groups import group_for, my_rank
from shardmuon.errors import HALF_DONE, naming, ranks_text
from shardmuon.layout.pieces import Box, FlatRange, Held
from shardmuon.layout.table import ParamLayout, Ranks
from shardmuon.layout.views import Ints, MatrixView

Slices = tuple[slice, ...]


class Spot(NamedTuple):
    """A holder's part of one slab of a matrix.

    Attributes:
        source: Of the rank's storage.
        start: First row of the slab in the matrix as it is stored.
        size: Of the slab, in the logical tensor's dims; of one dim where the piece is a range of the tensor.
        target: Of the slab.
    """

    source: Slices
    start: int
    size: Ints
    target: Slices


class Columns(NamedTuple):
    """Which columns of whole rows a matrix takes: `size` of each `period`, from `first` on."""

    period: int
    first: int
    size: int


@dataclass(frozen=True)
class MatrixPieces:
    """Who sends what of one matrix.

    Attributes:
        rows, cols: Its shape.
        stored: Rows, and columns of whole rows, as they are stored.
        columns: Those that it takes; None: all.
        turned: It is stored as its transpose.
        spots: rank -> the parts that it sends; of replicas only the lowest rank sends.
        ranks: All that share the parameter.
    """

    rows: int
    cols: int
    stored: tuple[int, int]
    columns: Columns | None
    turned: bool
    spots: dict[int, tuple[Spot, ...]]
    ranks: Ranks

    def select(self, storage: Tensor, rank: int) -> Tensor:  # 1-D
        """What `rank` sends of a weight, gradient or momentum that is stored like `storage`."""
        parts = [storage[spot.source].reshape(-1) for spot in self.spots.get(rank, ())]
        return torch.cat(parts) if parts else storage.new_empty(0)

    def numel(self, rank: int) -> int:
        """Elements that `rank` sends."""
        return sum(_numel(spot.target) for spot in self.spots.get(rank, ()))

    def assemble(self, flat: Sequence[Tensor]) -> Tensor:  # (rows, cols)
        """The matrix from what each rank sent, in `ranks` order."""
        height, width = self.stored
        out = flat[0].new_full((height, width), math.nan)
        for rank, values in zip(self.ranks, flat, strict=True):
            at = 0
            for spot in self.spots.get(rank, ()):
                count = _numel(spot.target)
                num_rows = math.prod(spot.size) // width
                target = out[spot.start : spot.start + num_rows].view(spot.size)[spot.target]
                target.copy_(values[at : at + count].view(target.shape))
                at += count
        if self.columns is not None:
            period, first, size = self.columns
            out = out.view(height, width // period, period)[:, :, first : first + size].reshape(height, -1)
        return out.T.contiguous() if self.turned else out

    def blocks(self) -> list[tuple[slice, slice]]:
        """The rectangles of the matrix that lie on one rank; other shapes (kernels cut inside) are left out."""
        found = []
        plain = self.columns is None and not self.turned
        for rank in self.ranks:
            spots = self.spots.get(rank, ())
            if not spots:  # a replica, or nothing of this matrix
                continue
            if plain and len(spots) == 1 and spots[0].size[1:] == self.stored[1:]:  # as nearly always: whole rows
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


def pieces_of(layout: ParamLayout, number: int, only: int | None = None) -> MatrixPieces:
    """Who sends what of one matrix of a parameter laid out so.

    Args:
        layout: Of the parameter.
        number: Of the matrix.
        only: The one rank that sends, all that it has. None: all do, of replicas the lowest.
    """
    view, matrix = layout.view, layout.view.matrices[number]
    of_rows = view.num_row_dims - 1
    before = matrix.start[:of_rows]  # which matrix of a stack
    intervals, columns = _intervals(view, number), _columns(view, number)
    spots: dict[int, list[Spot]] = {}
    seen: set[object] = set()
    for rank, of_rank in zip(layout.ranks, layout.held, strict=True):
        for held in of_rank if only in (None, rank) else ():
            if held.piece in seen or not held.piece.numel:
                continue
            seen.add(held.piece)
            at = 0
            for first, size in intervals:
                trailing = view.shape[of_rows + 1 :]
                slab = Box((*before, first, *(0 for _ in trailing)), (*(1 for _ in before), size, *trailing))
                spots.setdefault(rank, []).extend(_spots(held, slab, view.shape, at))
                at += size
    stored = sum(size for _, size in intervals), math.prod(view.shape[of_rows + 1 :])
    turned = matrix.strides[-1] != 1 or matrix.rows != stored[0]
    sending = {rank: tuple(of_rank) for rank, of_rank in spots.items() if of_rank}
    return MatrixPieces(matrix.rows, matrix.cols, stored, columns, turned, sending, layout.ranks)


def _intervals(view: MatrixView, number: int) -> list[tuple[int, int]]:
    """First row and size of each interval of rows, as they are stored, that a matrix takes."""
    at, matrix = view.num_row_dims - 1, view.matrices[number]
    if view.split_dim != at:
        return [(matrix.start[at], matrix.sizes[at])]
    period, first, size = view.fine[at + 1], matrix.start[at + 1], matrix.sizes[at + 1]
    return [(repeat * period + first, size) for repeat in range(matrix.start[at], matrix.start[at] + matrix.sizes[at])]


def _columns(view: MatrixView, number: int) -> Columns | None:
    if len(view.shape) > view.num_row_dims + 1:
        return None  # a kernel: its trailing dims are whole
    found = Columns(view.fine[-1], view.matrices[number].start[-1], view.matrices[number].sizes[-1])
    return None if found.size == found.period else found


def _spots(held: Held, slab: Box, shape: Ints, start: int) -> Iterator[Spot]:
    """The parts of a slab that a piece has; `start`: the slab's first row in the matrix."""
    piece, local = held
    if isinstance(piece, Box):
        begin, end = _common(piece, slab)
        if all(a < b for a, b in zip(begin, end, strict=True)):
            yield Spot(_slices(begin, end, piece.offset, local), start, slab.size, _slices(begin, end, slab.offset))
    elif piece.box is None:  # whole rows of a row-major tensor follow each other
        low = sum(at * math.prod(shape[dim + 1 :]) for dim, at in enumerate(slab.offset))
        first, last = max(piece.start, low), min(piece.stop, low + slab.numel)
        if first < last:
            source = slice(local[0] + first - piece.start, local[0] + last - piece.start)
            yield Spot((source,), start, (slab.numel,), (slice(first - low, last - low),))
    else:
        yield from _spots_in_box(piece, piece.box, local[0], slab, start)


def _spots_in_box(piece: FlatRange, box: Box, local: int, slab: Box, start: int) -> Iterator[Spot]:
    """The same of a range of a box, one line of its last dim at a time."""
    *lines, width = box.size
    for number in range(piece.start // width, -(-piece.stop // width)):
        first, last = max(piece.start, number * width), min(piece.stop, (number + 1) * width)
        place: list[int] = []
        rest = number
        for size in reversed(lines):
            rest, index = divmod(rest, size)
            place.insert(0, index)
        begin = (*place, first - number * width)
        line = Box(tuple(a + b for a, b in zip(begin, box.offset, strict=True)), (*(1 for _ in lines), last - first))
        low, high = _common(line, slab)
        if all(a < b for a, b in zip(low, high, strict=True)):
            at = local + first - piece.start + low[-1] - line.offset[-1]
            yield Spot((slice(at, at + high[-1] - low[-1]),), start, slab.size, _slices(low, high, slab.offset))


def _common(a: Box, b: Box) -> tuple[Ints, Ints]:
    """First and last index (excluded) in both, for each dim."""
    ends = ((i + n, j + m) for i, n, j, m in zip(*a, *b, strict=True))
    return tuple(map(max, a.offset, b.offset)), tuple(map(min, ends))


def _slices(begin: Ints, end: Ints, origin: Ints, at: Ints | None = None) -> Slices:
    """Of a tensor in whose index `at` (by default 0) the index `origin` lies."""
    at = at or (0,) * len(origin)
    return tuple(slice(a - o + i, b - o + i) for a, b, o, i in zip(begin, end, origin, at, strict=True))


def _numel(slices: Slices) -> int:
    return math.prod(s.stop - s.start for s in slices)


def collect(
    pieces: MatrixPieces,
    parts: Sequence[Tensor],  # 1-D each: what this rank sends of each quantity, equal lengths
    target: int,
) -> list[Tensor]:  # (rows, cols) each on `target`, nothing elsewhere
    """Whole matrices of several quantities on one rank. Collective among the parameter's ranks."""
    send, ranks, mine = torch.cat(list(parts)), pieces.ranks, my_rank() == target
    sizes = tuple(pieces.numel(rank) * len(parts) for rank in ranks)
    came = send
    if len(ranks) > 1:
        given = tuple(send.numel() if rank == target else 0 for rank in ranks)
        with naming(lambda: f"bringing an audited matrix to rank {target}, ranks {ranks_text(ranks)}", HALF_DONE):
            came = start(group_for(ranks), Traffic(), send, given, sizes if mine else (0,) * len(ranks)).wait()
    if not mine:
        return []
    by_rank = [
        flat.view(len(parts), -1) if flat.numel() else flat.new_empty(len(parts), 0) for flat in came.split(sizes)
    ]
    return [pieces.assemble([flat[i] for flat in by_rank]) for i in range(len(parts))]
