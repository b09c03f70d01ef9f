"""Layout of the numbers that a stage keeps of each matrix: see [Note: what a stage keeps] in variants/base.py. Pure.

[Note: where it lies]
    They are a tensor (stacked matrices or 1, numbers of one). Every rank that shares the parameter has all of it, also
    one that stores nothing of the parameter: torch's checkpoints take what is replicated from any rank. Only of a stack
    that a mesh cuts by its matrices (experts) each rank has those of its own matrices, placed as the parameter is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from shardmuon.layout.mesh import Placements, readings
from shardmuon.layout.pieces import Box, Held
from shardmuon.layout.table import ParamLayout, replicated
from shardmuon.layout.views import Ints, MatrixView


class OnMesh(NamedTuple):
    """Placement of a tensor on a mesh of ranks.

    Attributes:
        mesh: Size of each mesh axis.
        ranks: Global ranks, in row-major order.
        placements: One for each mesh axis.
    """

    mesh: Ints
    ranks: Ints
    placements: Placements

    @property
    def of_stack(self) -> Placements:
        """Placements of what is kept of each matrix of a stack: those that cut its matrices, replicated elsewhere."""
        return tuple(p if p is not None and p.dim == 0 else None for p in self.placements)


def kept_layout(layout: ParamLayout, view: MatrixView, place: OnMesh | None) -> ParamLayout:
    """Layout of the numbers that a stage keeps of a parameter's matrices.

    Args:
        layout: Layout of the parameter.
        view: View of the numbers, from `kept_view`.
        place: Mesh and placements of the parameter; None: it lies on no mesh.
    """
    if layout.view.num_row_dims == 1 or place is None or not any(place.of_stack):
        return replicated(view, layout.ranks)
    rows = {rank: _rows(held) for rank, held in zip(layout.ranks, layout.held, strict=True)}
    for reading in readings(view.shape, place.mesh, place.of_stack):
        found = dict(zip(place.ranks, (held for held, _ in reading), strict=True))
        if all(_rows(found[rank]) == mine for rank, mine in rows.items() if mine):
            return ParamLayout(view, layout.ranks, tuple(found[rank] for rank in layout.ranks))
    # no reading of placements is what ranks store: they have the matrices of which they store anything
    width = view.shape[1]
    held = (
        tuple(Held(Box((first, 0), (last - first, width)), (local, 0)) for first, last, local in sorted(rows[rank]))
        for rank in layout.ranks
    )
    return ParamLayout(view, layout.ranks, tuple(held))


def _rows(held: Iterable[Held]) -> set[tuple[int, int, int]]:
    """First and last index of the first dim, and where the first is stored, of each box that is not empty."""
    boxes = ((one.piece, one.local) for one in held if isinstance(one.piece, Box) and one.piece.numel)
    return {(box.offset[0], box.offset[0] + box.size[0], local[0]) for box, local in boxes}
