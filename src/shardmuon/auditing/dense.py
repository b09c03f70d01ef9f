"""Assemble a whole matrix from the shards on its ranks, independently of the plan and of the code that executes it.

The layout comes from a newly built table. A matrix consists of the elements of the logical tensor at given indices in
each dim, and each index adds a fixed amount to the element's row-major position in the matrix. So the positions of the
elements that a rank stores can be computed dim by dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from shardmuon.comm.groups import Traffic, group_for, my_rank, start
from shardmuon.errors import HALF_DONE, naming, ranks_text
from shardmuon.layout.pieces import Box, Held, ParamLayout
from shardmuon.layout.views import MatrixView, row_major

Block = tuple[slice, slice]


class _Part(NamedTuple):
    """The elements of one matrix that one rank stores.

    Attributes:
        sources: For each non-empty piece of the tensor that the rank stores, the indices of the elements in each dim of
            the rank's storage.
        places: (n,) int64 row-major positions of the elements in the matrix.
    """

    sources: list[list[Tensor]]
    places: Tensor

    def select(self, storage: Tensor) -> Tensor:  # (n,)
        """Read these elements from `storage`: the rank's weight, gradient or momentum."""
        indices = (torch.meshgrid(*source, indexing="ij") for source in self.sources)
        found = [storage[tuple(at.to(storage.device) for at in index)].reshape(-1) for index in indices]
        return torch.cat([storage.new_empty(0), *found])


def _part_of(view: MatrixView, number: int, held: Iterable[Held]) -> _Part:
    """Find the elements of matrix `number` in the given pieces of the tensor."""
    lines, sources, places = _lines(view, number), [], [torch.empty(0, dtype=torch.int64)]
    for piece, local in held:
        box = piece if isinstance(piece, Box) else piece.box or Box((0,) * len(view.shape), view.shape)
        kept = [(at >= a) & (at < a + n) for (at, _), a, n in zip(lines, *box, strict=True)]
        place = _outer(step[inside] for (_, step), inside in zip(lines, kept, strict=True))
        source = [at[inside] - a for (at, _), inside, a in zip(lines, kept, box.offset, strict=True)]
        if not isinstance(piece, Box):
            flat = _outer(at * stride for at, stride in zip(source, row_major(box.size), strict=True))
            inside = (flat >= piece.start) & (flat < piece.stop)
            source, place = [flat[inside] - piece.start], place[inside]
        if len(place):
            sources.append([at + first for at, first in zip(source, local, strict=True)])
            places.append(place)
    return _Part(sources, torch.cat(places))


def sent_by(layout: ParamLayout, number: int, rank: int) -> _Part:
    """Find the elements of matrix `number` that `rank` sends. Of several ranks with replicas, only the lowest sends."""
    held = [one for one in layout.of_rank(rank) if one.piece.numel and layout.keepers[one.piece][0] == rank]
    return _part_of(layout.view, number, held)


def _lines(view: MatrixView, number: int) -> list[tuple[Tensor, Tensor]]:
    """Return, for each dim of the tensor, the indices at which a matrix has elements, and the amount that each index
    adds to an element's row-major position in the matrix."""
    matrix, split = view.matrices[number], view.split_dim
    found = [
        (torch.arange(start, start + size), torch.arange(size) * stride)
        for start, size, stride in zip(matrix.start, matrix.sizes, matrix.strides, strict=True)
    ]
    if split >= 0:
        (repeat, far), (at, near) = found[split : split + 2]
        found[split : split + 2] = [(_outer((repeat * view.fine[split + 1], at)), _outer((far, near)))]
    return found


def _outer(lines: Iterable[Tensor]) -> Tensor:  # 1-D
    """Compute the outer sum of 1-D tensors (all sums of one value from each), flattened in row-major order."""
    return reduce(lambda sums, line: sums.unsqueeze(-1) + line, lines).reshape(-1)


def _block_of(places: Tensor, cols: int) -> Block | None:
    """Return the rectangle of a matrix that consists of exactly these positions, or None if they form no rectangle."""
    if not len(places):
        return None
    (top, bottom), (left, right) = ((int(at.min()), int(at.max()) + 1) for at in (places // cols, places % cols))
    whole = (bottom - top) * (right - left) == len(places)
    return (slice(top, bottom), slice(left, right)) if whole else None


def collect(
    number: int,
    parts: Mapping[str, tuple[ParamLayout, Tensor]],  # (2, n): values that this rank sends, before and after the step
    target: int,
) -> tuple[dict[str, Tensor], list[Block]]:
    """Gather all quantities of a whole matrix on rank `target`. Collective among the parameter's ranks.

    Returns each quantity as (2, elements), before and after the step, and the rectangles of the matrix that are each
    stored on one rank. Shards that are not rectangles, such as parts of conv kernels, are left out. Both results are
    empty on other ranks. A rank that cannot read its values sends NaN."""
    view, ranks, is_target = parts["weights"][0].view, parts["weights"][0].ranks, my_rank() == target
    places = [[sent_by(layout, number, rank).places for layout, _ in parts.values()] for rank in ranks if is_target]
    came = [torch.cat([part.reshape(-1) for _, part in parts.values()])]
    if len(ranks) > 1:
        expected = tuple(2 * sum(map(len, of_rank)) for of_rank in places) or (0,) * len(ranks)
        given = tuple(came[0].numel() if rank == target else 0 for rank in ranks)
        with naming(lambda: f"bringing an audited matrix to rank {target}, ranks {ranks_text(ranks)}", HALF_DONE):
            came = list(start(group_for(ranks), Traffic(), came[0], given, expected).wait().split(expected))
    if not is_target:
        return {}, []
    whole = {}
    for what, (layout, part) in parts.items():
        matrix = layout.view.matrices[number]
        whole[what] = part.new_full((2, matrix.rows * matrix.cols), torch.nan)
    for of_rank, values in zip(places, came, strict=True):
        for out, at, own in zip(whole.values(), of_rank, values.split([2 * len(at) for at in of_rank]), strict=True):
            out.index_copy_(1, at.to(out.device), own.view(2, -1))
    blocks = [_block_of(of_rank[0], view.matrices[number].cols) for of_rank in places]
    return whole, [block for block in blocks if block is not None]
