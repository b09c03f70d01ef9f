"""What a rank does with a bucket in every step, looked up once: which fragments, from where and to where."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from shardmuon.errors import ranks_text
from shardmuon.planning.layout import Fragment
from shardmuon.planning.plan import Plan
from shardmuon.planning.routes import Messages, gram_messages, sources
from shardmuon.planning.types import RankBucket, Slot, Transfer
from shardmuon.stepping.blocks import WIRE, Block, Blocks, Moves

# Elements: what momentum makes on its way to the wire, and an update on its way to half-precision weights, is at most
# this, or one fragment. On a CPU what fits a cache; elsewhere so much that a list fills a launch.
PORTION, PORTION_ELSEWHERE = 1 << 17, 1 << 24


class Held(NamedTuple):
    """A fragment that this rank stores, and where it goes and comes from."""

    item: int
    fragment: Fragment
    send_start: int | None  # offset in the gather's send buffer, if this rank is the fragment's source
    recv_start: int | None  # offset in the scatter's receive buffer; None if this rank owns the item


class Part(NamedTuple):
    """Fragments of one parameter.

    Attributes:
        shapes: (rows, cols) of the matrix of each.
        only: Elements, if there is one fragment alone, as it is stored: it may be all that is. Else -1.
        reshaped: Whether any lies in storage in another shape than in its matrix.
    """

    param: int
    fragments: tuple[Fragment, ...]
    shapes: tuple[tuple[int, int], ...]
    only: int
    reshaped: bool

    @classmethod
    def of(cls, plan: Plan, param: int, fragments: Sequence[Fragment]) -> Part:
        """Parts of a plan know their matrices."""
        matrices = plan.specs[param].layout.view.matrices
        boxes = [f for f in fragments if f.part is None]
        shaped = [f for f in boxes if tuple(b - a for a, b in f.local) == (f.num_rows, f.num_cols)]
        shapes = tuple((matrices[f.matrix].rows, matrices[f.matrix].cols) for f in fragments)
        return cls(
            param,
            tuple(fragments),
            shapes,
            fragments[0].numel if len(fragments) == 1 and boxes else -1,
            len(shaped) < len(fragments),
        )

    def views(self, storage: Tensor) -> list[Tensor]:
        """Each fragment as a view of local storage."""
        if self.only == storage.numel():
            return [storage]
        return [f.select_local(storage) for f in self.fragments]


class Portion(NamedTuple):
    """Fragments of several parameters that are stepped together.

    Attributes:
        used: Those that this rank sends or orthogonalizes.
        idle: Of a replica that others do: only the momentum moves on.
        targets: Where they go: on the wire, or in the batches.
        held: All of them.
        results: Where their results come from.
        reshaped: Whether any of `used` is, see `Part`.
    """

    used: tuple[Part, ...]
    idle: tuple[Part, ...]
    targets: Blocks
    held: tuple[Part, ...]
    results: Blocks
    reshaped: bool


class Lists(NamedTuple):
    """A bucket on one rank in a step in which some of its parameters have gradients.

    Attributes:
        batches: Owned items that run as one batch.
        portions: What is held, in the order in which it is stepped.
        gathered: Fragments that the gather brings, from the wire into the batches.
        returned: Results, from the batches to the wire of the scatter.
        gaps: Whether places on the wire stay empty.
    """

    batches: tuple[tuple[int, ...], ...]
    portions: tuple[Portion, ...]
    gathered: Moves
    returned: Moves
    gaps: bool


@dataclass(frozen=True)
class Program:
    """A rank's bucket with everything looked up that does not change between steps."""

    plan: Plan
    rank_bucket: RankBucket
    rank: int
    _partial: dict[frozenset[int], Lists] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def held(self) -> tuple[Held, ...]:
        bucket = self.rank_bucket
        sends = {(s.item, s.fragment): s.start for s in bucket.gather.send} if bucket.gather else {}
        recvs = {(s.item, s.fragment): s.start for s in bucket.scatter.recv} if bucket.scatter else {}
        return tuple(Held(i, f, sends.get((i, f)), recvs.get((i, f))) for i, f in bucket.held)

    @cached_property
    def params(self) -> frozenset[int]:
        """The parameters of the bucket's matrices."""
        return frozenset(self.plan.items[index].param for index in self.rank_bucket.bucket.items)

    def lists(self, active: Collection[int]) -> Lists:
        """What is done where these parameters have gradients."""
        missing = self.params.difference(active)
        if missing not in self._partial:
            whole = self._partial.get(frozenset())
            self._partial.clear()  # two at most: that of all, and the last one of some
            if whole is not None:
                self._partial[frozenset()] = whole
            self._partial[missing] = self._make_lists(missing)
        return self._partial[missing]

    def _make_lists(self, missing: Collection[int]) -> Lists:
        def active(item: int) -> bool:
            return self.plan.items[item].param not in missing

        def slots(transfer: Transfer | None, which: str) -> list[Slot]:
            return [] if transfer is None else [slot for slot in getattr(transfer, which) if active(slot.item)]

        bucket = self.rank_bucket
        batches = self._batches([index for index in bucket.owned if active(index)])
        places = {item: (number, at) for number, batch in enumerate(batches) for at, item in enumerate(batch)}
        arriving, leaving = slots(bucket.gather, "recv"), slots(bucket.scatter, "send")

        received = [(_on_wire(s.fragment, s.start), _in_batch(s.fragment, *places[s.item])) for s in arriving]
        returned = [(_in_batch(s.fragment, *places[s.item]), _on_wire(s.fragment, s.start)) for s in leaving]
        return Lists(
            batches,
            tuple(self._portion(held, places) for held in self._portions([h for h in self.held if active(h.item)])),
            Moves(received),
            Moves(returned),
            bool(missing),
        )

    def _batches(self, owned: Iterable[int]) -> tuple[tuple[int, ...], ...]:
        """Owned items by shape and orthogonalizer settings: each tuple runs as one batch."""
        table: dict[tuple[int, int, str, str], list[int]] = {}
        for index in owned:
            item = self.plan.items[index]
            key = (item.rows, item.cols, item.how, self.plan.specs[item.param].batch)
            table.setdefault(key, []).append(index)
        return tuple(tuple(batch) for batch in table.values())

    def _portions(self, held: Iterable[Held]) -> list[list[Held]]:
        """What this rank holds, parameter by parameter, dealt into portions that are stepped together."""
        cpu = self.plan.specs[self.plan.items[self.rank_bucket.bucket.items[0]].param].kind == "cpu"
        limit = PORTION if cpu else PORTION_ELSEWHERE
        by_param: dict[int, list[Held]] = {}
        for one in held:
            by_param.setdefault(self.plan.items[one.item].param, []).append(one)
        portions: list[list[Held]] = []
        size = limit + 1
        for one in itertools.chain.from_iterable(by_param.values()):
            if size + one.fragment.numel > limit:
                portions.append([])
                size = 0
            portions[-1].append(one)
            size += one.fragment.numel
        return portions

    def _portion(self, held: Sequence[Held], places: Mapping[int, tuple[int, int]]) -> Portion:
        def place(h: Held, start: int | None) -> Block:
            return _in_batch(h.fragment, *places[h.item]) if start is None else _on_wire(h.fragment, start)

        reads = [h.send_start is not None or h.item in places for h in held]
        used = list(itertools.compress(held, reads))
        parts = self._parts(used)
        return Portion(
            parts,
            self._parts(h for h, read in zip(held, reads, strict=True) if not read),
            Blocks([place(h, h.send_start) for h in used]),
            self._parts(held),
            Blocks([place(h, h.recv_start) for h in held]),
            any(part.reshaped for part in parts),
        )

    def _parts(self, held: Iterable[Held]) -> tuple[Part, ...]:
        grouped = itertools.groupby(held, key=lambda h: self.plan.items[h.item].param)
        return tuple(Part.of(self.plan, param, [h.fragment for h in of_param]) for param, of_param in grouped)

    @cached_property
    def messages(self) -> tuple[Messages, Messages]:
        """The two exchanges of a Gram bucket."""
        return gram_messages(self.plan, self.rank_bucket.bucket, self.rank)

    @cached_property
    def added(self) -> dict[int, tuple[Fragment, ...]]:
        """Of a Gram bucket: item -> the fragments whose part of the Gram matrix this rank sends."""
        found = {}
        for index in self.rank_bucket.bucket.items:
            item = self.plan.items[index]
            layout = self.plan.specs[item.param].layout
            found[index] = sources(layout, item.matrix, item.owners[0]).get(self.rank, ())
        return found

    def __str__(self) -> str:
        bucket = self.rank_bucket.bucket
        items = [self.plan.items[index] for index in bucket.items]
        matrices = [f"{self.plan.specs[item.param].name} {item.rows}x{item.cols}" for item in items[:3]]
        number = f"bucket {self.plan.buckets.index(bucket)} of {len(self.plan.buckets)}"
        more = [f"{len(items) - 3} more"] if len(items) > 3 else []
        return f"{number} (ranks {ranks_text(bucket.ranks)}: {', '.join(matrices + more)})"


def _on_wire(fragment: Fragment, start: int) -> Block:
    return Block(WIRE, 0, 0, fragment.num_rows, fragment.num_cols, start)


def _in_batch(fragment: Fragment, batch: int, at: int) -> Block:
    return Block(batch, fragment.row, fragment.col, fragment.num_rows, fragment.num_cols, at)
