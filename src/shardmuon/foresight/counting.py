"""Count the work of every rank in a plan, without running the ranks: the bytes that a rank exchanges, the ranks with
which it exchanges them, the matrices that it orthogonalizes, and the FLOPs for these matrices.

A bucket is a group of matrices that are processed together; a tile is a part of a matrix that is stored on one rank.
The counts follow the rules of plan/program.py (see [Note: results in two stages] there). However, plan/program.py
handles one rank at a time, whereas this module handles all ranks of a bucket at once, with arrays of tiles and
messages.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardmuon.comm.groups import Ranks
from shardmuon.layout.pieces import ParamLayout, Piece
from shardmuon.plan.plan import Bucket, Item, Plan
from shardmuon.plan.program import aligned

_Ints = NDArray[np.int64]


# ------------------------------------------------------------------------------------------------------------- counts


class _Matrices(NamedTuple):
    """Matrices of equal shape that one rank orthogonalizes by the same method in one bucket. A bucket is a group of
    matrices that are processed together.

    Attributes:
        rows, cols: Shape of each matrix.
        how: Orthogonalization method and dtype of its matrix products, for example "gram float16".
        num: Number of matrices.
        flops: FLOPs for orthogonalizing one matrix, as estimated by the planner.
    """

    rows: int
    cols: int
    how: str
    num: int
    flops: int


class _Sent(NamedTuple):
    """Number of bytes that one rank sends (or receives) in one exchange, and number of its peers. Data that stays on
    the rank is not counted.

    Attributes:
        inside: Bytes sent to (or received from) ranks on the same node.
        across: Bytes sent to (or received from) ranks on other nodes.
        peers: Number of ranks that this rank sends bytes to (or receives bytes from).
    """

    inside: int = 0
    across: int = 0
    peers: int = 0

    @property
    def bytes(self) -> int:
        """Total number of bytes, within the node and across nodes."""
        return self.inside + self.across


class _Sides(NamedTuple):
    """Bytes that one rank sends (or receives) in the three exchanges of one bucket. A bucket is a group of matrices
    that are processed together. The owner of a matrix is the rank that orthogonalizes it.

    Attributes:
        gather: Tiles (parts of matrices) that are sent to the owners.
        scatter: Results, and state of a Muon variant (such as NorMuon's second moments), that the owners send to the
            ranks that store the tiles.
        relay: Results, and state of a Muon variant, that one replica forwards to other replicas.
    """

    gather: _Sent = _Sent()
    scatter: _Sent = _Sent()
    relay: _Sent = _Sent()


@dataclass(frozen=True)
class BucketCount:
    """Work of one rank in one bucket. A bucket is a group of matrices that are processed together.

    A bucket has up to three exchanges. The gather sends tiles (parts of matrices) to the ranks that orthogonalize the
    matrices, the scatter sends the results back, and the relay forwards results to other replicas.

    Attributes:
        number: Index of the bucket in the plan; -1 if nothing is exchanged.
        exchange: True if ranks exchange the bucket's matrices (see `plan.plan.Bucket`).
        num_ranks: Number of ranks that take part in the bucket's exchanges; 1 if nothing is exchanged.
        num_nodes: Number of nodes to which these ranks belong.
        itemsize: Number of bytes per element in batches and in exchanged data.
        matrices: Matrices that this rank orthogonalizes; empty if it orthogonalizes none.
        held: Number of elements of the bucket's matrices that this rank stores. The rank updates their momentum and
            weights.
        sent: Bytes that this rank sends.
        received: Bytes that this rank receives.
        foreign: Number of elements in `held` that this rank sends to other ranks for orthogonalization.
        idle: Number of elements in `held` that this rank does not send, because another replica sends them. This rank
            receives the results in the relay.
        gathers: True if the bucket has a gather and a scatter, even if this rank sends nothing in them.
        relays: True if the bucket has a relay.
        batches: Total size in bytes of the batches (stacks of matrices of equal shape) that this rank orthogonalizes.
        largest: Number of elements in the largest tile that this rank stores.
    """

    number: int
    exchange: bool
    num_ranks: int
    num_nodes: int
    itemsize: int
    matrices: tuple[_Matrices, ...]
    held: int
    sent: _Sides
    received: _Sides
    foreign: int = 0
    idle: int = 0
    gathers: bool = False
    relays: bool = False
    batches: int = 0
    largest: int = 0

    @property
    def exchanges(self) -> int:
        """Number of all-to-all calls for the bucket (group of matrices): two if the bucket has a gather and a scatter,
        plus one if it has a relay, which forwards results to other replicas."""
        return 2 * self.gathers + self.relays

    @staticmethod
    def of_plan(plan: Plan, node_of: Callable[[int], int]) -> dict[int, tuple[BucketCount, ...]]:
        """Count the work of every rank in a plan.

        Args:
            plan: The plan.
            node_of: Function that maps a rank to the index of its node.

        Returns:
            Dict from each rank in the plan, in ascending order, to a tuple with one `BucketCount` for each of the
            rank's buckets, in the plan's order.
        """
        found: dict[int, list[BucketCount]] = {rank: [] for rank in sorted(plan.loads())}
        ways = _ways_in(plan)
        for number, bucket in enumerate(plan.buckets):
            for rank, one in zip(bucket.ranks, _counts(plan, number, bucket, ways, node_of), strict=True):
                found[rank].append(one)
        return {rank: tuple(buckets) for rank, buckets in found.items()}


# ----------------------------------------------------------------------------------------------------------- counting


class _Ways(NamedTuple):
    """Tiles (parts) of one matrix on all ranks, as arrays with one element per tile. The tiles are sorted by rank and,
    within a rank, by the order in which the rank processes them.

    Attributes:
        at: Rank that stores the tile.
        numel: Number of elements in the tile.
        owner: Rank that orthogonalizes the matrix for rank `at`.
        source: Rank that sends the tile to the owner and receives the result. If several ranks store copies of the
            tile, only one of them is the source. If the owner stores a copy, the owner is the source.
    """

    at: _Ints
    numel: _Ints
    owner: _Ints
    source: _Ints


def _ways_in(plan: Plan) -> Callable[[Item], _Ways]:
    """Return a function that maps a matrix of the plan to its tiles (parts of the matrix) and the ranks that exchange
    them. The function caches its results, because matrices with equal layouts that are orthogonalized by the same ranks
    have equal results."""

    @cache
    def stored(layout: ParamLayout, matrix: int) -> tuple[_Ints, _Ints, list[Piece]]:
        found = [(rank, tile) for rank, tiles in layout.tiles[matrix].items() for tile in tiles]
        ranks, numel = _ints(rank for rank, _ in found), _ints(tile.numel for _, tile in found)
        return ranks, numel, [tile.held.piece for _, tile in found]

    @cache
    def ways(layout: ParamLayout, matrix: int, owners: Ranks) -> _Ways:
        at, numel, pieces = stored(layout, matrix)
        owner, source = np.full_like(at, owners[0]), at
        if len(owners) > 1:
            owner = _ints(owners[layout.replica_of[rank]] for rank in at.tolist())
        elif layout.has_replicas:
            of_piece = {piece: layout.source(piece, owners[0]) for piece in dict.fromkeys(pieces)}
            source = _ints(map(of_piece.__getitem__, pieces))
        return _Ways(at, numel, owner, source)

    return lambda item: ways(plan.specs[item.param].layout, item.matrix, item.owners)


def _counts(
    plan: Plan, number: int, bucket: Bucket, ways: Callable[[Item], _Ways], node_of: Callable[[int], int]
) -> Iterator[BucketCount]:
    """Yield the `BucketCount` of each rank in `bucket.ranks`. `number` is the index of the bucket in the plan."""
    items, ranks = [plan.items[n] for n in bucket.items], _ints(bucket.ranks)
    owned, batches = defaultdict[int, Counter[tuple[Any, ...]]](Counter), Counter[int]()
    for item in items:
        for rank in item.owners:
            owned[rank][item.rows, item.cols, str(item.choice), item.cost] += 1
            batches[rank] += bucket.itemsize * aligned(item.numel, bucket.itemsize)
    at, numel, owner, source = map(np.concatenate, zip(*map(ways, items), strict=True))
    own = np.equal(at, owner) if bucket.exchange else np.ones(len(at), bool)
    foreign = ~own & np.equal(at, source)
    idle = ~own & ~foreign
    size, layouts = numel * bucket.itemsize, [plan.specs[item.param].layout for item in items]
    moved = {
        "gather": (at[foreign], owner[foreign], size[foreign]),
        "scatter": (owner[foreign], at[foreign], size[foreign]),
        "relay": (source[idle], at[idle], size[idle]),
    }
    told = list(_told(plan, bucket, ways)) if bucket.exchange else []
    exchanging, relays = bucket.ranks[:1], False
    # If each replica has a rank that orthogonalizes the matrix, ranks exchange data only within their replica.
    if bucket.exchange:
        exchanging = layouts[0].replicas[0] if len(items[0].owners) > 1 else bucket.ranks
        relays = any(of.has_replicas and len(item.owners) == 1 for of, item in zip(layouts, items, strict=True))
    num_nodes = len(set(map(node_of, exchanging)))
    nodes, place, num = _ints(map(node_of, bucket.ranks)), np.searchsorted(ranks, at), len(ranks)
    sides = [
        _sides(messages, [message for of, *message in told if of == phase], ranks, nodes)
        for phase, messages in moved.items()
    ]
    held, of_foreign, of_idle = (
        np.bincount(place[which], numel[which], num).astype(int).tolist() for which in (slice(None), foreign, idle)
    )
    largest = np.zeros(num, dtype=np.int64)
    np.maximum.at(largest, place, numel)
    for n, rank in enumerate(bucket.ranks):
        sent, received = (_Sides._make(side[way][n] for side in sides) for way in (0, 1))
        yield BucketCount(
            number=number if bucket.exchange else -1,
            exchange=bucket.exchange,
            num_ranks=len(exchanging),
            num_nodes=num_nodes,
            itemsize=bucket.itemsize,
            matrices=tuple(
                _Matrices(rows, cols, how, num_alike, flops)
                for (rows, cols, how, flops), num_alike in sorted(owned[rank].items())
            ),
            held=held[n],
            foreign=of_foreign[n],
            idle=of_idle[n],
            sent=sent,
            received=received,
            gathers=bucket.gathers,
            relays=relays,
            batches=batches[rank],
            largest=int(largest[n]),
        )


def _told(plan: Plan, bucket: Bucket, ways: Callable[[Item], _Ways]) -> Iterator[tuple[str, int, int, int]]:
    """Yield the messages that send a Muon variant's state, such as NorMuon's second moments, to the ranks that store
    it. A message is a tuple (exchange, sender, receiver, bytes).

    A rank receives the state from the rank that sends it the results for its first tile (part of the matrix). A rank
    without tiles receives the state from the owner, the rank that orthogonalizes the matrix. The exchange is "scatter"
    if the sender is the owner, and "relay" otherwise.
    """
    items = map(plan.items.__getitem__, bucket.items)
    travelling = ((item, kept) for item in items for kept in plan.specs[item.param].kept if kept.travels)
    for item, kept in travelling:
        tiles, layout = ways(item), plan.specs[item.param].layout
        at_home = np.equal(tiles.source, tiles.at)
        mates = dict(zip(tiles.at[::-1].tolist(), tiles.source[::-1].tolist(), strict=True))
        mates.update(zip(tiles.at[at_home].tolist(), tiles.owner[at_home].tolist(), strict=True))
        for keeper, (tile, *_) in kept.layout.tiles[item.matrix].items():
            owner = item.owner_for(layout, keeper)
            mate, words = mates.get(keeper, owner), -(-tile.numel * 4 // bucket.itemsize)
            if keeper != owner:
                yield "scatter" if mate == owner else "relay", mate, keeper, words * bucket.itemsize


def _ints(numbers: Iterable[Any]) -> _Ints:
    return np.array(list(numbers), dtype=np.int64)


def _sides(
    messages: tuple[_Ints, _Ints, _Ints], more: Sequence[Sequence[int]], ranks: _Ints, nodes: _Ints
) -> tuple[list[_Sent], list[_Sent]]:
    """Count the bytes that each rank sends and receives in one exchange, and the rank's peers.

    Args:
        messages: Three arrays with one element per message: the senders, the receivers, and the sizes in bytes.
        more: Additional messages, each as (sender, receiver, bytes).
        ranks: All ranks that take part, ascending.
        nodes: Index of the node of each rank in `ranks`.

    Returns:
        Two lists in the order of `ranks`: each rank's `_Sent` for sending, and each rank's `_Sent` for receiving.
    """
    num, columns = len(ranks), zip(*more, strict=True) if more else ((), (), ())
    source, target, size = (np.concatenate([one, _ints(new)]) for one, new in zip(messages, columns, strict=True))
    pairs, of_message = np.unique(
        np.searchsorted(ranks, source) * num + np.searchsorted(ranks, target), return_inverse=True
    )
    moved, ends = np.bincount(of_message, size, len(pairs)), np.divmod(pairs, num)
    across = nodes[ends[0]] != nodes[ends[1]]
    found = []
    for end in ends:
        each = (np.bincount(end[which], moved[which], num) for which in (~across, across))
        counts = [*each, np.bincount(end, minlength=num)]
        found.append([_Sent(*row) for row in np.stack(counts, 1).astype(np.int64).tolist()])
    return found[0], found[1]
