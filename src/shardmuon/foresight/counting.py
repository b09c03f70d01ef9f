"""Count the work of every rank in a plan, without running ranks: bytes, peers, matrices, operations.

The rules are those of plan/program.py ([Note: results in two stages]), applied to all ranks at once: the tiles of a
bucket are arrays, and its traffic is a list of messages.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from shardmuon.layout.pieces import Piece
from shardmuon.plan.items import Bucket, Item, Kept, Route
from shardmuon.plan.plan import Plan
from shardmuon.plan.program import aligned
from shardmuon.step.update import PORTION_ELSEWHERE

Ints = np.ndarray[Any, np.dtype[np.int64]]
_Bools = np.ndarray[Any, np.dtype[np.bool_]]
_Messages = tuple[Ints, Ints, Ints]  # sender, receiver and bytes of each message
_WIRES = {2: "bfloat16", 4: "float32", 8: "float64"}  # itemsize -> dtype


# ------------------------------------------------------------------------------------------------------------- counts


class Matrices(NamedTuple):
    """Equal matrices that one rank orthogonalizes in one bucket.

    Attributes:
        rows, cols: Shape of each matrix.
        how: Text of a `Choice`: method, dtype of products.
        num: Number of matrices.
        flops: Floating point operations of one matrix, as the planner counts them.
    """

    rows: int
    cols: int
    how: str
    num: int
    flops: int


class Sent(NamedTuple):
    """Bytes that one rank sends or receives in one exchange, without the part that stays on the rank.

    Attributes:
        inside: Bytes between ranks of one node.
        across: Bytes between nodes.
        peers_inside: Number of peers on the same node, to or from which the bytes go.
        peers_across: Number of peers on other nodes.
    """

    inside: int = 0
    across: int = 0
    peers_inside: int = 0
    peers_across: int = 0

    @property
    def bytes(self) -> int:
        """All bytes: inside the node and between nodes."""
        return self.inside + self.across


class Sides(NamedTuple):
    """Bytes that one rank sends (or receives) in the three exchanges of one bucket.

    Attributes:
        gather: Tiles for owners.
        scatter: Results for holders, and state of variants' stages.
        relay: Results, and state of stages, for other replicas.
    """

    gather: Sent = Sent()
    scatter: Sent = Sent()
    relay: Sent = Sent()


_NO_SIDES = Sides()


@dataclass(frozen=True)
class BucketCount:
    """Work of one rank in one bucket; the same for all ranks of a class.

    Attributes:
        number: Index of the bucket in the plan, equal on all ranks that exchange it; -1: nothing is exchanged.
        route: See plan/items.py.
        num_ranks: Ranks that take part in the bucket's exchanges; 1 if nothing is exchanged.
        num_nodes: Nodes of these ranks.
        wire: dtype of the batches and of the exchanged data.
        matrices: Matrices that this rank orthogonalizes; empty if it orthogonalizes none.
        held: Elements of the bucket whose momentum and weights this rank updates.
        foreign: Part of `held`: elements that are sent to owners.
        idle: Part of `held`: elements whose results arrive by the relay.
        sent: Bytes that this rank sends.
        received: Bytes that this rank receives.
        gathers: True if the bucket has a gather and a scatter, whether or not this rank sends anything in them.
        relays: True if the bucket has a relay.
        batches: Bytes of the batches in which `matrices` are orthogonalized.
        largest: Elements of the largest tile that this rank holds.
    """

    number: int
    route: Route
    num_ranks: int
    num_nodes: int
    wire: str
    matrices: tuple[Matrices, ...]
    held: int
    foreign: int = 0
    idle: int = 0
    sent: Sides = _NO_SIDES
    received: Sides = _NO_SIDES
    gathers: bool = False
    relays: bool = False
    batches: int = 0
    largest: int = 0

    @property
    def exchanges(self) -> int:
        """Number of all-to-all calls."""
        return 2 * self.gathers + self.relays

    @property
    def flops(self) -> int:
        """Floating point operations of orthogonalization on this rank."""
        return sum(m.num * m.flops for m in self.matrices)


@dataclass(frozen=True)
class Stored:
    """Bytes that one rank stores between steps. Flat buffers count with the engine's padding; the allocator's rounding
    is not counted.

    Attributes:
        weights: Parameters.
        gradients: Gradients as they are when `step()` is called.
        momentum: Muon's momentum.
        moments: AdamW's two moments.
        masters: fp32 copies of the weights (ZeRO).
    """

    weights: int = 0
    gradients: int = 0
    momentum: int = 0
    moments: int = 0
    masters: int = 0

    def __add__(self, other: Stored) -> Stored:
        """Sum of both, kind by kind."""
        return Stored(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(astuple(self))


@dataclass(frozen=True)
class RankClass:
    """Ranks that store the same and do the same work. All counts are per rank.

    Attributes:
        ranks: Ranks of the class, ascending.
        stage: Pipeline stage of the ranks.
        stored: Bytes stored between steps.
        buckets: Buckets in the order in which they run.
        muon_elements: Elements that Muon updates on a rank (a replicated element counts on each rank).
        adamw_elements: Elements that AdamW updates on a rank.
        votes: Votes before a step.
    """

    ranks: tuple[int, ...]
    stage: int
    stored: Stored
    buckets: tuple[BucketCount, ...]
    muon_elements: int
    adamw_elements: int
    votes: int

    @property
    def count(self) -> int:
        """Number of ranks in the class."""
        return len(self.ranks)

    @property
    def example(self) -> int:
        """Lowest rank of the class."""
        return self.ranks[0]

    @property
    def flops(self) -> int:
        """Floating point operations of orthogonalization per rank."""
        return sum(bucket.flops for bucket in self.buckets)

    @property
    def sent(self) -> Sent:
        """Total that a rank sends in the exchanges of a step; `bytes` of it equals `Traffic.bytes_sent` of one step."""
        return _total(side for bucket in self.buckets for side in bucket.sent)

    @property
    def peak(self) -> int:
        """Upper bound on the bytes of a step beyond `stored`: batches and exchange buffers of two buckets, workspace of
        four times the batches of one bucket, and 8 bytes per element of a portion of momentum (docs/memory.md)."""
        moved = (b.batches + sum(side.bytes for side in (*b.sent, *b.received)) for b in self.buckets)
        work = max((b.batches for b in self.buckets), default=0)
        portion = max((min(b.held, max(b.largest, PORTION_ELSEWHERE)) for b in self.buckets), default=0)
        return 2 * max(moved, default=0) + 4 * work + 8 * portion

    @property
    def exchanges(self) -> int:
        """Number of all-to-all calls in a step."""
        return sum(bucket.exchanges for bucket in self.buckets)

    @property
    def orthogonalized(self) -> int:
        """Matrices that a rank orthogonalizes per step; equals `Traffic.orthogonalized`."""
        return sum(m.num for bucket in self.buckets for m in bucket.matrices)


# ----------------------------------------------------------------------------------------------------------- counting


def count_plan(plan: Plan, node_of: Callable[[int], int]) -> dict[int, tuple[BucketCount, ...]]:
    """Count the work of every rank in a plan.

    Args:
        plan: The plan.
        node_of: Rank -> index of its node.

    Returns:
        Rank (ascending, every rank that takes part) -> its buckets, in the plan's order.
    """
    found: dict[int, list[BucketCount]] = {rank: [] for rank in sorted(plan.loads())}
    tiles = _Tiles(plan)
    for number, bucket in enumerate(plan.buckets):
        for rank, one in _Tally(plan, bucket, tiles).counts(number, node_of):
            found[rank].append(one)
    return {rank: tuple(buckets) for rank, buckets in found.items()}


class _Ways(NamedTuple):
    """Tiles of one matrix as arrays: rank by rank, and within a rank in the order of its program.

    Attributes:
        at: Rank that stores the tile.
        numel: Elements of the tile.
        owner: Rank that orthogonalizes the matrix for rank `at`.
        source: Rank that exchanges the tile with the owner, one of those that store a copy of it; the owner itself if
            the owner stores the tile.
    """

    at: Ints
    numel: Ints
    owner: Ints
    source: Ints

    @property
    def at_home(self) -> _Bools:
        """Mask of the tiles that the storing rank itself exchanges with the owner."""
        return np.equal(self.source, self.at)


class _Tiles:
    """Tiles of all matrices of a plan, cached: matrices with the same layout and owners share them."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._stored: dict[tuple[int, ...], tuple[Ints, Ints, list[Piece]]] = {}
        self._ways: dict[tuple[Any, ...], _Ways] = {}

    def ways(self, item: Item) -> _Ways:
        """Tiles of a matrix, with the ranks that exchange them."""
        layout = self._plan.specs[item.param].layout
        key = id(layout), item.matrix
        owned = *key, item.owners
        if owned not in self._ways:
            if key not in self._stored:
                self._stored[key] = self._tiles_of(item)
            at, numel, pieces = self._stored[key]
            owner, source = np.full_like(at, item.owners[0]), at
            if len(item.owners) > 1:
                owner = _ints(item.owner_for(layout, rank) for rank in at.tolist())
            elif layout.has_replicas:
                of_piece = {piece: layout.source(piece, item.owners[0]) for piece in dict.fromkeys(pieces)}
                source = _ints(map(of_piece.__getitem__, pieces))
            self._ways[owned] = _Ways(at, numel, owner, source)
        return self._ways[owned]

    def _tiles_of(self, item: Item) -> tuple[Ints, Ints, list[Piece]]:
        of_ranks = self._plan.specs[item.param].layout.tiles[item.matrix].items()
        found = [(rank, tile) for rank, tiles in of_ranks for tile in tiles]
        numel = _ints(tile.numel for _, tile in found)
        return _ints(rank for rank, _ in found), numel, [tile.held.piece for _, tile in found]


@dataclass
class _Tally:
    """Work of all ranks in one bucket, added up matrix by matrix.

    Attributes:
        messages: "gather", "scatter" or "relay" -> messages.
        stored: "own" (tiles that the owner stores), "foreign" (tiles whose rank sends them to the owner) or "idle"
            (tiles that another replica sends to the owner) -> (ranks, elements) of the tiles.
        owned: Rank -> its matrices, counted by (rows, cols, how, cost).
        batches: Rank -> bytes of its matrices, aligned.
        relays: True if there is a relay.
    """

    plan: Plan
    bucket: Bucket
    tiles: _Tiles
    messages: dict[str, list[_Messages]] = field(default_factory=lambda: defaultdict(list))
    stored: dict[str, list[tuple[Ints, Ints]]] = field(default_factory=lambda: defaultdict(list))
    owned: dict[int, Counter[tuple[Any, ...]]] = field(default_factory=lambda: defaultdict(Counter))
    batches: Counter[int] = field(default_factory=Counter)
    relays: bool = False

    def __post_init__(self) -> None:
        for number in self.bucket.items:
            item = self.plan.items[number]
            for rank in item.owners:
                self.owned[rank][item.rows, item.cols, item.how, item.cost] += 1
                self.batches[rank] += self.bucket.itemsize * aligned(item.numel, self.bucket.itemsize)
            ways = self.tiles.ways(item)
            if self.bucket.exchange:
                self._move(item, ways)
            else:
                self.stored["own"].append(ways[:2])

    def _move(self, item: Item, ways: _Ways) -> None:
        """Add a matrix that is exchanged with its owners."""
        own, size = ways.at == ways.owner, ways.numel * self.bucket.itemsize
        foreign = ~own & ways.at_home
        idle = ~own & ~foreign
        for side, which in (("own", own), ("foreign", foreign), ("idle", idle)):
            self.stored[side].append((ways.at[which], ways.numel[which]))
        self.messages["gather"].append((ways.at[foreign], ways.owner[foreign], size[foreign]))
        self.messages["scatter"].append((ways.owner[foreign], ways.at[foreign], size[foreign]))
        self.messages["relay"].append((ways.source[idle], ways.at[idle], size[idle]))
        spec = self.plan.specs[item.param]
        self.relays |= spec.layout.has_replicas and len(item.owners) == 1
        for kept in spec.kept:
            if kept.travels:
                self._tell(item, ways, kept)

    def _tell(self, item: Item, ways: _Ways, kept: Kept) -> None:
        """Add the messages that bring a stage's state of a matrix to the ranks that store this state. The sender is the
        owner if the rank exchanges tiles with the owner or stores no tile of the matrix; otherwise it is the source of
        the rank's first tile."""
        mates = dict(zip(ways.at[::-1].tolist(), ways.source[::-1].tolist(), strict=True))
        mates.update(zip(ways.at[ways.at_home].tolist(), ways.owner[ways.at_home].tolist(), strict=True))
        for keeper, (tile, *_) in kept.layout.tiles[item.matrix].items():
            owner = item.owner_for(self.plan.specs[item.param].layout, keeper)
            mate, words = mates.get(keeper, owner), -(-tile.numel * 4 // self.bucket.itemsize)
            if keeper != owner:
                told = _ints((mate,)), _ints((keeper,)), _ints((words * self.bucket.itemsize,))
                self.messages["scatter" if mate == owner else "relay"].append(told)

    def counts(self, number: int, node_of: Callable[[int], int]) -> Iterator[tuple[int, BucketCount]]:
        """Yield each rank of the bucket with its counts. `number`: index of the bucket in the plan."""
        ranks, bucket = np.array(self.bucket.ranks, dtype=np.int64), self.bucket
        nodes, exchanging = _ints(map(node_of, bucket.ranks)), bucket.ranks[:1]
        if bucket.exchange:  # if each replica has its own owners, each exchanges separately
            first = self.plan.items[bucket.items[0]]
            replicas = self.plan.specs[first.param].layout.replicas
            exchanging = replicas[0] if len(first.owners) > 1 else bucket.ranks
        num_nodes = len(set(map(node_of, exchanging)))
        sides = [_sides(self.messages[side], ranks, nodes) for side in ("gather", "scatter", "relay")]
        own, foreign, idle = (_held(np.add, self.stored[side], ranks) for side in ("own", "foreign", "idle"))
        largest = _held(np.maximum, itertools.chain(*self.stored.values()), ranks)
        for at, rank in enumerate(bucket.ranks):
            sent, received = (Sides._make(side[way][at] for side in sides) for way in (0, 1))
            yield (
                rank,
                BucketCount(
                    number=number if bucket.exchange else -1,
                    route=bucket.route,
                    num_ranks=len(exchanging),
                    num_nodes=num_nodes,
                    wire=_WIRES[bucket.itemsize],
                    matrices=tuple(
                        Matrices(rows, cols, how, num, cost)
                        for (rows, cols, how, cost), num in sorted(self.owned[rank].items())
                    ),
                    held=own[at] + foreign[at] + idle[at],
                    foreign=foreign[at],
                    idle=idle[at],
                    sent=sent,
                    received=received,
                    gathers=bucket.gathers,
                    relays=self.relays,
                    batches=self.batches[rank],
                    largest=largest[at],
                ),
            )


def _total(sides: Iterable[Sent]) -> Sent:
    return Sent(*map(sum, zip(Sent(), *sides, strict=True)))


def _ints(numbers: Iterable[Any]) -> Ints:
    return np.array(list(numbers), dtype=np.int64)


def _sides(messages: Sequence[_Messages], ranks: Ints, nodes: Ints) -> tuple[list[Sent], list[Sent]]:
    """Bytes and peers of each of `ranks` in one exchange: two lists, of sending and of receiving."""
    num = len(ranks)
    if not messages:
        return [Sent()] * num, [Sent()] * num
    source, target, size = (np.concatenate(column) for column in zip(*messages, strict=True))
    pairs, of_message = np.unique(
        np.searchsorted(ranks, source) * num + np.searchsorted(ranks, target), return_inverse=True
    )
    moved, ends = np.bincount(of_message, size, len(pairs)), np.divmod(pairs, num)
    across = nodes[ends[0]] != nodes[ends[1]]
    found = []
    for end in ends:
        columns = [np.bincount(end[which], moved[which], num) for which in (~across, across)]
        columns += [np.bincount(end[which], minlength=num) for which in (~across, across)]
        found.append([Sent(*row) for row in np.stack(columns, 1).astype(np.int64).tolist()])
    return found[0], found[1]


def _held(together: np.ufunc, tiles: Iterable[tuple[Ints, Ints]], ranks: Ints) -> list[int]:
    """Elements of the tiles on each rank, combined by `together`: `np.add` for sums, `np.maximum` for the largest."""
    found = np.zeros(len(ranks), dtype=np.int64)
    for rank, numel in tiles:
        together.at(found, np.searchsorted(ranks, rank), numel)
    return list(map(int, found))
