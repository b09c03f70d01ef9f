"""Layouts of parameters: which rank stores which pieces of a parameter, and which tiles of its matrices. Pure
functions.

[Note: where kept numbers lie]
    Some stages of an update, such as NorMuon's, store values per matrix between steps ([Note: what a stage keeps] in
    variants.py). For each parameter, these values form a state tensor of shape (stacked matrices or 1, values per
    row). It is replicated on every rank that shares the parameter, including ranks that store nothing of the parameter,
    because torch's checkpoints read replicated tensors from any rank. The exception is a stack of matrices (experts)
    that a mesh shards along dim 0: each rank then stores the values of its own matrices, and the state tensor is placed
    like the parameter.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

from shardmuon.comm.vote import digest_of
from shardmuon.layout.mesh import OnMesh, reading
from shardmuon.layout.pieces import Held, Piece, Tile, partition_fault, tiles_of, whole
from shardmuon.layout.views import MatrixView

Ranks = tuple[int, ...]  # global ranks, ascending


@dataclass(frozen=True, eq=False)
class ParamLayout:
    """The pieces of one tensor that each rank stores. All ranks that share the tensor compute the same layout. Tensors
    with equal layouts share one object.

    Attributes:
        view: The tensor's matrices and its global shape.
        ranks: All ranks that share the tensor, including ranks that store nothing of it.
        held: Pieces that each of `ranks` stores.

    Raises:
        ValueError: The distinct pieces are out of bounds, overlap or leave a gap.
    """

    view: MatrixView
    ranks: Ranks
    held: tuple[tuple[Held, ...], ...]

    def __post_init__(self) -> None:
        fault = partition_fault(self.view.shape, (one.piece for of_rank in self.held for one in of_rank))
        if fault is not None:
            raise ValueError(fault)

    @cached_property
    def digest(self) -> bytes:
        """16-byte hash of the layout, equal for equal layouts on any rank."""
        return digest_of((self.view, self.ranks, self.held))

    @cached_property
    def tiles(self) -> tuple[dict[int, tuple[Tile, ...]], ...]:
        """Tiles of each matrix: a dict from each rank that stores part of the matrix (in ascending order) to the rank's
        tiles, in storage order."""
        distinct = set(itertools.chain.from_iterable(self.held))  # equal on replicas, so their tiles are computed once
        of_held = {held: tiles_of(held, self.view) for held in distinct}
        found: list[dict[int, list[Tile]]] = [{} for _ in self.view.matrices]
        for rank, of_rank in zip(self.ranks, self.held, strict=True):
            for tile in itertools.chain.from_iterable(map(of_held.__getitem__, of_rank)):
                found[tile.matrix].setdefault(rank, []).append(tile)
        return tuple({rank: tuple(tiles) for rank, tiles in of_matrix.items()} for of_matrix in found)

    def of_rank(self, rank: int) -> tuple[Held, ...]:
        """Return the pieces that a rank stores."""
        return self.held[self.ranks.index(rank)]

    @cached_property
    def pieces(self) -> dict[int, tuple[Piece, ...]]:
        """Rank -> the nonempty pieces that it stores."""
        held = zip(self.ranks, self.held, strict=True)
        return {rank: tuple(one.piece for one in of_rank if one.piece.numel) for rank, of_rank in held}

    @cached_property
    def keepers(self) -> dict[Piece, Ranks]:
        """Piece -> the ranks that store it, ascending. If there are several, they store replicas."""
        found: dict[Piece, Ranks] = {}
        for rank, pieces in self.pieces.items():
            for piece in pieces:
                found[piece] = (*found.get(piece, ()), rank)
        return found

    @cached_property
    def replica_of(self) -> dict[int, int]:
        """Rank -> index of its replica: the rank's index among the ranks that store its first piece. 0 if it stores
        nothing. On a hybrid-sharded mesh, this is the rank's coordinate on the replica axis.
        """
        return {rank: self.keepers[pieces[0]].index(rank) if pieces else 0 for rank, pieces in self.pieces.items()}

    @cached_property
    def replicas(self) -> tuple[Ranks, ...]:
        """The ranks of each replica, ordered by replica index (`replica_of`). Empty if the ranks do not form complete
        replicas, because some pieces have more copies than others, or because a rank's pieces disagree on its replica
        index."""
        places = {rank: {self.keepers[one].index(rank) for one in pieces} for rank, pieces in self.pieces.items()}
        num = {len(ranks) for ranks in self.keepers.values()}
        if len(num) != 1 or any(len(of_rank) > 1 for of_rank in places.values()):
            return ()
        return tuple(tuple(rank for rank in self.ranks if places[rank] == {number}) for number in range(*num))

    @cached_property
    def has_replicas(self) -> bool:
        """True if any piece is stored more than once."""
        return any(len(ranks) > 1 for ranks in self.keepers.values())

    def source(self, piece: Piece, owner: int) -> int:
        """Choose the rank that sends a piece to `owner`, the rank that orthogonalizes the matrix, and gets back the
        result: the owner itself if it stores the piece, otherwise the rank in the owner's replica that stores it."""
        ranks = self.keepers[piece]
        return owner if owner in ranks else ranks[self.replica_of.get(owner, 0) % len(ranks)]

    @cached_property
    def whole_on(self) -> tuple[Ranks, ...]:
        """For each matrix, the ranks that store all of its elements."""
        return tuple(
            tuple(rank for rank, tiles in of_matrix.items() if sum(t.numel for t in tiles) == m.rows * m.cols)
            for m, of_matrix in zip(self.view.matrices, self.tiles, strict=True)
        )


def replicated(view: MatrixView, ranks: Ranks) -> ParamLayout:
    """Make the layout of a tensor that is replicated on all of `ranks`."""
    return ParamLayout(view, ranks, (whole(view.shape),) * len(ranks))


def kept_layout(layout: ParamLayout, view: MatrixView, place: OnMesh | None) -> ParamLayout:
    """Make the layout of a state tensor with values per matrix of a parameter: see [Note: where kept numbers lie].

    Args:
        layout: Layout of the parameter.
        view: View of the state tensor, from `kept_view`.
        place: Mesh and placements of the parameter; None: the parameter has no mesh.
    """
    # dim 0 of the state tensor is sharded like dim 0 of the stack; all other mesh axes replicate the state tensor
    cuts = () if place is None else tuple(p if p is not None and p.dim == 0 else None for p in place.placements)
    if layout.view.num_row_dims == 1 or place is None or not any(cuts):
        return replicated(view, layout.ranks)
    found = dict(zip(place.ranks, reading(view.shape, place.mesh, cuts), strict=True))
    return ParamLayout(view, layout.ranks, tuple(found[rank][0] for rank in layout.ranks))
