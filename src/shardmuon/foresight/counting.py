"""Count what every rank does with a plan, without ranks: bytes, peers, matrices, operations.

The rules are those of planning/plan.py ([Note: exchanges]) and planning/routes.py ([Note: the Gram route]), applied to
all ranks at once: a table of fragments for each different matrix of each different layout, in arrays. A thousand ranks
cost little more than one, and ranks that do the same are found as equal rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from shardmuon.comm.component import largest_of
from shardmuon.foresight.types import BucketCount, Matrices, Sent
from shardmuon.planning.layout import ParamLayout
from shardmuon.planning.plan import Plan
from shardmuon.planning.routes import message_size
from shardmuon.planning.types import Bucket
from shardmuon.planning.views import Ranks
from shardmuon.stepping.program import PORTION, PORTION_ELSEWHERE

Ints = np.ndarray[Any, np.dtype[np.int64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]
NodeOf = Callable[[int], int]  # rank -> number of its node
_FIELDS = attrgetter(*(f.name for f in fields(BucketCount)))


class _Pairs(NamedTuple):
    """Fragments that one owner exchanges with others: their ranks' positions in the group, and elements."""

    at: Ints
    numel: Ints


class _Table:
    """The fragments of one matrix of one layout."""

    def __init__(self, layout: ParamLayout, matrix: int) -> None:
        self._layout = layout
        self._position = {rank: i for i, rank in enumerate(layout.ranks)}
        by_rank = layout.fragments[matrix]
        found = [(self._position[rank], f) for rank, fragments in by_rank.items() for f in fragments]
        self.at: Ints = np.array([at for at, _ in found], dtype=np.int64)
        self.numel: Ints = np.array([f.numel for _, f in found], dtype=np.int64)
        self._fragments = [f for _, f in found]
        self._gathered: dict[int, _Pairs] = {}
        self._used: dict[int, Bools] = {}
        self._scattered: dict[int, _Pairs] = {}

    @cached_property
    def _keepers(self) -> tuple[Ints, Ints, Ints]:
        """Of each fragment: its rectangle's number, which of the rectangle's keepers has it, and how many there are."""
        numbers: dict[tuple[int, int, int, int], int] = {}
        rects = np.array([numbers.setdefault(f.rect, len(numbers)) for f in self._fragments], dtype=np.int64)
        seen: Counter[int] = Counter()
        index = np.zeros(len(rects), dtype=np.int64)
        for i, number in enumerate(rects.tolist()):  # ranks ascend, so keepers do
            index[i] = seen[number]
            seen[number] += 1
        many = np.array([seen[number] for number in rects.tolist()], dtype=np.int64)
        return rects, index, many

    def gathered(self, owner: int) -> _Pairs:
        """What is sent to the owner at this position: each fragment by its one source."""
        if owner not in self._gathered:
            away = self.at != owner
            if self._layout.has_replicas:
                rects, index, many = self._keepers
                replica = self._layout.replica_index.get(self._layout.ranks[owner], 0)
                own = np.zeros(int(rects.max()) + 1, dtype=bool)
                own[rects[~away]] = True
                away = away & ~own[rects] & (index == replica % many)
            self._gathered[owner] = _Pairs(self.at[away], self.numel[away])
            self._used[owner] = away | (self.at == owner)
        return self._gathered[owner]

    def used(self, owner: int) -> Bools:
        """Which fragments are orthogonalized by the owner at this position: sent to it, or its own."""
        self.gathered(owner)
        return self._used[owner]

    @cached_property
    def waves(self) -> list[Ints]:
        """The fragments by number, such that no wave has two of one rank, and a rank's stay in order."""
        seen: Counter[int] = Counter()
        found: list[list[int]] = []
        for number, at in enumerate(self.at.tolist()):
            if seen[at] == len(found):
                found.append([])
            found[seen[at]].append(number)
            seen[at] += 1
        return [np.array(wave, dtype=np.int64) for wave in found]

    def scattered(self, owner: int) -> _Pairs:
        """What the owner sends: to every other holder all that it has."""
        if owner not in self._scattered:
            away = self.at != owner
            self._scattered[owner] = _Pairs(self.at[away], self.numel[away])
        return self._scattered[owner]

    @cached_property
    def per_rank(self) -> _Pairs:
        """Positions that hold any of it, each once, and their elements."""
        at, inverse = np.unique(self.at, return_inverse=True)
        return _Pairs(at, np.bincount(inverse, self.numel, len(at)).astype(np.int64))

    def adders(self, owner: int) -> _Pairs:
        """Positions that add a part of the Gram matrix, the owner among them, and the elements that they add."""
        mine = self.at == owner
        others = self.gathered(owner)
        at = np.concatenate([others.at, self.at[mine]])
        numel = np.concatenate([others.numel, self.numel[mine]])
        found, inverse = np.unique(at, return_inverse=True)
        return _Pairs(found, np.bincount(inverse, numel, len(found)).astype(np.int64))


class _Portions:
    """What each rank of a bucket steps together, see `Program._portions`: sizes of the largest of these."""

    def __init__(self, num: int, limit: int) -> None:
        self._limit = limit
        self._size: Ints = np.full(num, limit + 1, dtype=np.int64)
        self._used: Ints = np.zeros(num, dtype=np.int64)  # of the portion that is being filled
        self._before: Ints = np.zeros(num, dtype=np.int64)  # of the one before it
        self.stepped: Ints = np.zeros(num, dtype=np.int64)  # updates of two that follow each other, at most
        self.applied: Ints = np.zeros(num, dtype=np.int64)

    def add(self, at: Ints, numel: Ints, used: Bools) -> None:
        """One more fragment of each of these ranks."""
        full = self._size[at] + numel > self._limit
        new = at[full]
        self._before[new], self._used[new], self._size[new] = self._used[new], 0, 0
        self._size[at] += numel
        self._used[at] += numel * used
        self.applied[at] = np.maximum(self.applied[at], self._size[at])
        self.stepped[at] = np.maximum(self.stepped[at], self._used[at] + self._before[at])


class _Flow(NamedTuple):
    """Messages of one exchange: sender, receiver (positions), elements."""

    source: Ints
    target: Ints
    numel: Ints


# columns of the numbers that tell ranks apart
_GATHER, _GATHERED, _SCATTER, _SCATTERED, _HELD, _LOCAL = slice(0, 4), slice(4, 8), slice(8, 12), slice(12, 16), 16, 17
_OWN, _STEPPED, _APPLIED, _COLUMNS = 18, 19, 20, 21


class _Counted(NamedTuple):
    """One bucket on all its ranks."""

    bucket: Bucket
    wire: str
    numbers: Ints  # (ranks, _COLUMNS)
    matrices: list[tuple[Matrices, ...]]  # by kind
    kinds: Ints  # (ranks,): which of `matrices`


class PlanCounts:
    """A plan, counted.

    Attributes:
        ranks: All that take part in it.
        classes: The buckets of the ranks of each class.
        class_of: Position in `ranks` -> number of its class.
    """

    def __init__(
        self,
        plan: Plan,
        wire_of: Callable[[str], torch.dtype],  # text of a choice -> dtype on the wire
        node_of: NodeOf,
    ) -> None:
        self._plan, self._wire_of, self._node_of = plan, wire_of, node_of
        self._tables: dict[tuple[int, int], _Table] = {}
        self.ranks: Ranks = tuple(sorted({rank for spec in plan.specs for rank in spec.layout.ranks}))
        position = {rank: i for i, rank in enumerate(self.ranks)}
        kinds: list[BucketCount] = []  # of buckets as a rank carries them out, no two alike
        numbers: dict[tuple[Any, ...], int] = {}
        lists: list[list[int]] = [[] for _ in self.ranks]  # of each rank: which of `kinds` it carries out
        alone: dict[tuple[Any, ...], int] = {}  # a bucket of one rank, see `_alone` -> which of `kinds`
        for number, bucket in enumerate(plan.buckets):
            as_before = self._alone(bucket)
            if as_before in alone:
                lists[position[bucket.ranks[0]]].append(alone[as_before])
                continue
            one = self._count(bucket)
            first, which = _alike(np.column_stack((one.numbers, one.kinds)))
            own = []
            for row in first:
                made = self._bucket_of(number if bucket.exchange else -1, one, row)
                key = _FIELDS(made)
                if key not in numbers:
                    numbers[key] = len(kinds)
                    kinds.append(made)
                own.append(numbers[key])
            for rank, kind in zip(bucket.ranks, which.tolist(), strict=True):
                lists[position[rank]].append(own[kind])
            if as_before is not None:
                (alone[as_before],) = own
        known: dict[tuple[int, ...], int] = {}
        self.class_of: Ints = np.array([known.setdefault(tuple(line), len(known)) for line in lists], dtype=np.int64)
        self.classes = [tuple(kinds[kind] for kind in line) for line in known]

    def buckets_of(self, rank: int) -> tuple[BucketCount, ...]:
        """What one rank does."""
        return self.classes[int(self.class_of[self.ranks.index(rank)])]

    def _alone(self, bucket: Bucket) -> tuple[Any, ...] | None:
        """What its counts hang on if it is one rank's and nothing moves: experts are many, and most are alike."""
        if bucket.exchange or len(bucket.ranks) > 1:
            return None
        found: list[Any] = [bucket.route, bucket.itemsize]
        for index in bucket.items:
            item = self._plan.items[index]
            spec = self._plan.specs[item.param]
            held = spec.layout.fragments[item.matrix].values()
            sizes = tuple(f.numel for fragments in held for f in fragments)
            found.append((item.rows, item.cols, item.how, item.cost, spec.kind, sizes))
        return tuple(found)

    def _bucket_of(self, number: int, one: _Counted, row: int) -> BucketCount:
        n = one.numbers[row].tolist()
        sides = (_GATHER, _GATHERED, _SCATTER, _SCATTERED)
        gather, gathered, scatter, scattered = (Sent(*n[which]) for which in sides)
        return BucketCount(
            number,
            one.bucket.route,
            len(one.bucket.ranks) if one.bucket.exchange else 1,
            len({self._node_of(rank) for rank in one.bucket.ranks}) if one.bucket.exchange else 1,
            one.wire if one.bucket.exchange else "",
            one.matrices[int(one.kinds[row])],
            n[_HELD],
            gather,
            gathered,
            scatter,
            scattered,
            sum(side.bytes for side in (gather, gathered, scatter, scattered)),
            n[_OWN],
            n[_STEPPED],
            n[_APPLIED],
            n[_LOCAL],
        )

    def _table(self, layout: ParamLayout, matrix: int) -> _Table:
        key = id(layout), matrix
        if key not in self._tables:
            self._tables[key] = _Table(layout, matrix)
        return self._tables[key]

    def _count(self, bucket: Bucket) -> _Counted:
        plan, position = self._plan, {rank: i for i, rank in enumerate(bucket.ranks)}
        items = [plan.items[index] for index in bucket.items]
        num = len(bucket.ranks)
        numbers = np.zeros((num, _COLUMNS), dtype=np.int64)
        owned: dict[int, Counter[tuple[int, int, str, int]]] = {}
        gathers: list[tuple[int, _Pairs]] = []
        scatters: list[tuple[int, _Pairs]] = []
        held: list[_Pairs] = []
        limit = PORTION if plan.specs[items[0].param].kind == "cpu" else PORTION_ELSEWHERE
        portions = _Portions(num, limit)
        for item in items:
            layout = plan.specs[item.param].layout
            table = self._table(layout, item.matrix)
            for rank in item.owners:
                owned.setdefault(position[rank], Counter())[item.rows, item.cols, item.how, item.cost] += 1
            if not bucket.exchange:
                ours = np.array([position[layout.ranks[at]] for at in table.at.tolist()], dtype=np.int64)
                held.append(_Pairs(ours, table.numel))
                for wave in table.waves:
                    portions.add(ours[wave], table.numel[wave], np.ones(len(wave), dtype=bool))
                continue
            held.append(table.per_rank)
            used = table.used(position[item.owners[0]])
            for wave in table.waves:
                portions.add(table.at[wave], table.numel[wave], used[wave])
            owner = position[item.owners[0]]
            if bucket.route == "gram":
                self._count_gram(table, item.rows, item.cols, owner, bucket.itemsize, numbers, gathers, scatters)
            else:
                gathers.append((owner, table.gathered(owner)))
                scatters.append((owner, table.scattered(owner)))
        numbers[:, _HELD] += _added(held, num)
        wire = self._wire_of(items[0].how)
        if bucket.route == "gram":
            wire = torch.float64 if bucket.itemsize == 8 else torch.float32
        numbers[:, _STEPPED], numbers[:, _APPLIED] = portions.stepped, portions.applied
        for at, counter in owned.items():
            numbers[at, _OWN] = wire.itemsize * sum(rows * cols * n for (rows, cols, *_), n in counter.items())
        if bucket.exchange:
            nodes = np.array([self._node_of(rank) for rank in bucket.ranks], dtype=np.int64)
            gather, scatter = _flow(gathers, to_owner=True), _flow(scatters, to_owner=False)
            numbers[:, _GATHER], numbers[:, _GATHERED] = _sums(gather, nodes, wire.itemsize)
            numbers[:, _SCATTER], numbers[:, _SCATTERED] = _sums(scatter, nodes, wire.itemsize)
        return _Counted(bucket, str(wire).removeprefix("torch."), numbers, *_kinds(owned, num))

    def _count_gram(
        self,
        table: _Table,
        rows: int,
        cols: int,
        owner: int,
        itemsize: int,
        numbers: Ints,  # changed
        gathers: list[tuple[int, _Pairs]],  # changed
        scatters: list[tuple[int, _Pairs]],  # changed
    ) -> None:
        short = min(rows, cols)
        size = message_size(short, itemsize)
        adders, holders = table.adders(owner), table.per_rank
        for into, who in ((gathers, adders), (scatters, holders)):
            others = who.at[who.at != owner]
            into.append((owner, _Pairs(others, np.full(len(others), size, dtype=np.int64))))
        numbers[adders.at, _LOCAL] += 2 * short * adders.numel
        numbers[holders.at, _LOCAL] += 2 * short * holders.numel


def _flow(parts: Sequence[tuple[int, _Pairs]], to_owner: bool) -> _Flow:
    if not parts:
        empty: Ints = np.zeros(0, dtype=np.int64)
        return _Flow(empty, empty, empty)
    others = np.concatenate([pairs.at for _, pairs in parts])
    owners = np.repeat([owner for owner, _ in parts], [len(pairs.at) for _, pairs in parts])
    numel = np.concatenate([pairs.numel for _, pairs in parts])
    return _Flow(others, owners, numel) if to_owner else _Flow(owners, others, numel)


def _sums(flow: _Flow, nodes: Ints, itemsize: int) -> tuple[Ints, Ints]:
    """(sent, received) of every rank, as the fields of `Sent`."""
    num = len(nodes)
    across = nodes[flow.source] != nodes[flow.target]
    seen = np.zeros(num * num, dtype=bool)
    seen[flow.source * num + flow.target] = True
    pairs = np.flatnonzero(seen)
    first, second = pairs // num, pairs % num
    apart = nodes[first] != nodes[second]
    found = []
    for here, one in ((flow.source, first), (flow.target, second)):
        columns = [np.bincount(here, flow.numel * which, num) * itemsize for which in (~across, across)]
        columns += [np.bincount(one[which], minlength=num) for which in (~apart, apart)]
        found.append(np.stack(columns, 1).astype(np.int64))
    return found[0], found[1]


def _added(parts: Iterable[_Pairs], num: int) -> Ints:
    listed = list(parts)
    if not listed:
        return np.zeros(num, dtype=np.int64)
    at = np.concatenate([p.at for p in listed])
    return np.bincount(at, np.concatenate([p.numel for p in listed]), num).astype(np.int64)


def _kinds(
    owned: Mapping[int, Mapping[tuple[int, int, str, int], int]], num: int
) -> tuple[list[tuple[Matrices, ...]], Ints]:
    """The different sets of matrices that ranks own, and which each rank owns."""
    numbers: dict[tuple[Matrices, ...], int] = {(): 0}
    kinds = np.zeros(num, dtype=np.int64)
    for at, counter in owned.items():
        found = tuple(
            Matrices(rows, cols, how, count, cost) for (rows, cols, how, cost), count in sorted(counter.items())
        )
        kinds[at] = numbers.setdefault(found, len(numbers))
    return list(numbers), kinds


def _alike(rows: Ints) -> tuple[list[int], Ints]:
    """The first row of each kind, and each row's kind, in the order of first rows."""
    if len(rows) == 1:
        return [0], np.zeros(1, dtype=np.int64)
    rows = np.ascontiguousarray(rows)
    _, first, kinds = np.unique(
        rows.view(np.dtype((np.void, rows.dtype.itemsize * rows.shape[1]))).ravel(),
        return_index=True,
        return_inverse=True,
    )
    order = np.argsort(first)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return first[order].tolist(), place[kinds]


def agreements_of(groups: Mapping[int, Sequence[Ranks]], lacking: Mapping[Ranks, bool] | None = None) -> dict[int, int]:
    """Small all-reduces that each rank takes part in before a step.

    A group talks as often as any of its ranks is in groups that lie in no other ([Note: who may raise when] in
    stepping/binding.py), and once more where ranks may lack gradients of what they do not store.

    Args:
        groups: rank -> the sets of more than one rank with which it shares matrices.
        lacking: Sets where ranks may lack gradients.
    """
    largest: dict[tuple[Ranks, ...], int] = {}
    rounds: dict[Ranks, int] = {}
    for sets in groups.values():
        key = tuple(sets)
        if key not in largest:
            largest[key] = len(largest_of(key))
            for ranks in key:
                rounds[ranks] = max(rounds.get(ranks, 0), largest[key])
    extra = lacking or {}
    of_key = {key: sum(rounds[ranks] + bool(extra.get(ranks)) for ranks in key) for key in largest}
    return {rank: of_key[tuple(sets)] for rank, sets in groups.items()}


def groups_of_plan(plan: Plan) -> dict[int, tuple[Ranks, ...]]:
    """rank -> the sets of more than one rank with which it shares matrices, small ones first."""
    sets = sorted({spec.layout.ranks for spec in plan.specs if len(spec.layout.ranks) > 1}, key=lambda r: (len(r), r))
    everyone = {rank for spec in plan.specs for rank in spec.layout.ranks}
    if len(sets) == 1:
        return {rank: tuple(sets) if rank in set(sets[0]) else () for rank in everyone}
    inside = {ranks: set(ranks) for ranks in sets}
    return {rank: tuple(ranks for ranks in sets if rank in inside[ranks]) for rank in everyone}
