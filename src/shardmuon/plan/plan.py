"""The plan: who orthogonalizes which matrix, and which matrices move together. Pure, and equal on every rank.

[Note: balance within a set]
    Ranks that share one set of tensors may share others with other ranks, of which the first know nothing. So owners
    are balanced among the tensors of one set, by what all of its ranks know.
"""

from __future__ import annotations

import heapq
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple, get_args

from shardmuon.errors import ranks_text
from shardmuon.layout.pieces import Tile
from shardmuon.layout.table import ParamLayout, Ranks, digest_of
from shardmuon.layout.views import Matrix
from shardmuon.plan.balance import UNEVEN, fitted, handed_on
from shardmuon.plan.cuts import cut_faults
from shardmuon.plan.machines import DEFAULT, MACHINES, Machine
from shardmuon.plan.price import (
    BatchPrice,
    Priced,
    Spread,
    bucket_times,
    least_ns,
    products_of,
    spread_of,
    step_ns,
    sums_ns,
    taken_by,
)
from shardmuon.plan.slices import Slicing, clipped, slice_of
from shardmuon.texts import table

Route = Literal["local", "owner", "gram"]
RouteOption = Literal["auto", "owner", "local", "gram"]
ROUTES: tuple[RouteOption, ...] = get_args(RouteOption)


class Kept(NamedTuple):
    """Numbers that a stage keeps of each matrix from step to step, fp32.

    Attributes:
        layout: Layout of the state tensor. Its matrices are 1 x so many numbers, one for each matrix of the parameter,
            and a rank has all of one or nothing.
        travels: True if owners change them and send them to all who keep them.
    """

    layout: ParamLayout
    travels: bool


class Gram(NamedTuple):
    """The Gram route for a matrix.

    Attributes:
        cost: Floating point operations of its iteration.
        fault: Why its method, schedule or stages exclude the route, or "".
    """

    cost: int = 0
    fault: str = "no schedule was named"


class Spec(NamedTuple):
    """One parameter as the planner sees it.

    Attributes:
        name: Name for messages and tables.
        layout: Who stores what.
        hows: How each matrix is orthogonalized, as text. Matrices of one batch share it.
        costs: Floating point operations of each matrix.
        batch: Matrices of different batch texts (coefficients, stages) never share a batch.
        kind: Device type. Parameters of different kinds never share a bucket.
        itemsizes: Bytes per element of each matrix's wire. Empty: 4 each.
        kept: Kept numbers of each stage that keeps any.
        grams: The Gram route for each matrix. Empty: excluded.
        reasons: Why each is orthogonalized like this. Empty: nothing is said.
        slicings: The cost of slices of each matrix; None: it stays whole. Empty: all do.
    """

    name: str
    layout: ParamLayout
    hows: tuple[str, ...]
    costs: tuple[int, ...]
    batch: str = ""
    kind: str = "cpu"
    itemsizes: tuple[int, ...] = ()
    kept: tuple[Kept, ...] = ()
    grams: tuple[Gram, ...] = ()
    reasons: tuple[str, ...] = ()
    slicings: tuple[Slicing | None, ...] = ()


class Policy(NamedTuple):
    """The choices that a user may make about a plan.

    Attributes:
        route: "owner": one rank orthogonalizes a matrix, where it lies if one rank alone stores it. "auto": so, or one
            rank of each replica, where that is cheaper. "local": every rank that stores it whole does, and nothing
            moves. "gram": the Gram route (see cuts.py) for matrices that are cut along their long side only, "owner"
            for the others.
        bucket_bytes: Most bytes (of the wire) of whole matrices that one owner has in a bucket. A larger matrix makes
            a bucket of its own. None: what is hardly dearer than the cheapest; of what moves nowhere 32 MiB, or a
            thirty-second part of what its momentum takes on a rank in fp32, if that is more.
        machine: The machine by whose rates buckets are chosen.
        split_k: Owners of a matrix that takes more than the mean load of its ranks, each of one slice, where that is
            cheaper and a node has so many.
    """

    route: RouteOption = "auto"
    bucket_bytes: int | None = None
    machine: Machine = MACHINES[DEFAULT]
    split_k: int = 1


class Option(NamedTuple):
    """Buckets for the matrices of one set that move together.

    Attributes:
        most: Bytes that a rank has in one of them at most, see `price.taken_by`.
        num: Buckets.
        ns: Nanoseconds of a step of these alone, see price.py.
    """

    most: int
    num: int
    ns: int


class Chosen(NamedTuple):
    """A choice by price.

    Attributes:
        ranks: Ranks of the set.
        option: What was chosen.
        other: The cheapest of the others; None: there is none.
    """

    ranks: Ranks
    option: Option
    other: Option | None


class Sharing(NamedTuple):
    """A choice by price between replicas that share the work, and each replica for itself.

    Attributes:
        ranks: Ranks of the set.
        replicas: Number of replicas.
        shared, alone: Nanoseconds of a step by which it was chosen, see price.py.
        each: True for each replica for itself.
    """

    ranks: Ranks
    replicas: int
    shared: int
    alone: int
    each: bool


class Splitting(NamedTuple):
    """A choice by price between an owner for each matrix, and owners of slices.

    Attributes:
        ranks: Ranks of the set.
        matrices, owners: Number of matrices that slices are for, and owners of each.
        whole, split: Nanoseconds of a step by which it was chosen, see price.py.
        taken: True for owners of slices.
    """

    ranks: Ranks
    matrices: int
    owners: int
    whole: int
    split: int
    taken: bool


class Item(NamedTuple):
    """One matrix, or a slice of one, and who orthogonalizes it.

    Attributes:
        param, matrix: Number of its `Spec`, and of the matrix in the view.
        rows, cols: Shape of the matrix.
        owners: The rank that orthogonalizes it, or one of each replica, in their order (see `ParamLayout.replicas`). On
            the local route all that do.
        route: "local": nothing of it moves. "gram": see cuts.py.
        how: See `Spec`.
        cost: Floating point operations of an owner.
        part, parts: Which of how many slices it is; 0 of 1: the matrix.
        reason: Why it is orthogonalized like this, and why not by the Gram route if that was asked for. Not compared
            between ranks: it may name measurements of a machine.
    """

    param: int
    matrix: int
    rows: int
    cols: int
    owners: Ranks
    route: Route
    how: str
    cost: int
    part: int = 0
    parts: int = 1
    reason: str = ""

    @property
    def short(self) -> int:
        return min(self.rows, self.cols)

    @property
    def numel(self) -> int:
        """Elements of the matrix, or of the slice."""
        return self.rows * self.cols // self.parts

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the matrix, or of the slice."""
        tall = self.rows > self.cols
        return (self.rows // self.parts, self.cols) if tall else (self.rows, self.cols // self.parts)

    def box(self, spec: Spec) -> Matrix:
        """The matrix, or the slice."""
        matrix = spec.layout.view.matrices[self.matrix]
        found = slice_of(matrix, self.part, self.parts) if self.parts > 1 else matrix
        assert found is not None, "only boxes are planned"
        return found

    def owner_for(self, layout: ParamLayout, rank: int) -> int:
        """The owner that sends a rank its results."""
        return self.owners[layout.replica_of[rank]] if len(self.owners) > 1 else self.owners[0]


Items = Sequence[Item] | Mapping[int, Item]  # by number
Tiles = Mapping[int, tuple[Tile, ...]]  # by rank


class Bucket(NamedTuple):
    """Matrices that move in one exchange, or are orthogonalized where they are.

    Attributes:
        ranks: Ranks of the exchange. On the local route, those that own any of them.
        items: Numbers of the plan's items.
        kind: See `Spec`.
        itemsize: Bytes per element of the wire; Gram matrices are never narrower than fp32.
        route: Route of all its items.
        gathers: False if every owner stores its matrices whole, as plain replicas do, and no stage keeps anything:
            nothing travels before products, and afterwards only to other replicas.
    """

    ranks: Ranks
    items: tuple[int, ...]
    kind: str
    itemsize: int
    route: Route
    gathers: bool

    @property
    def exchange(self) -> bool:
        """False if nothing moves."""
        return self.route != "local"


@dataclass(frozen=True)
class Plan:
    """Owners and buckets of all matrices.

    Attributes:
        specs: The parameters.
        items: Their matrices, in order.
        buckets: Buckets in the order in which every rank begins them. It depends on nothing but their content, so that
            ranks of several sets never wait for each other in unlike orders.
        notes: Lines on what holds for the plan as a whole, printed below it.
        chosen, sharing, splitting: What was chosen by price.
        machine: The machine by whose rates it was chosen.
    """

    specs: tuple[Spec, ...]
    items: tuple[Item, ...]
    buckets: tuple[Bucket, ...]
    notes: tuple[str, ...] = field(default=(), compare=False)
    chosen: tuple[Chosen, ...] = field(default=(), compare=False)
    sharing: tuple[Sharing, ...] = field(default=(), compare=False)
    splitting: tuple[Splitting, ...] = field(default=(), compare=False)
    machine: Machine = field(default=MACHINES[DEFAULT], compare=False)
    _tiles: dict[tuple[int, int, int, int], Tiles] = field(default_factory=dict, init=False, compare=False, repr=False)
    # Lines on what is counted and priced. That stands far above this module, so `shardmuon/__init__.py` puts it here.
    summary: ClassVar[Callable[[Plan], list[str]]]

    @cached_property
    def digests(self) -> dict[Ranks, bytes]:
        """Set of sharers -> 16 bytes of what its ranks must plan alike."""
        said: dict[Ranks, list[object]] = {}
        place: list[int] = []  # of each parameter among those of its set
        for spec in self.specs:
            of_set = said.setdefault(spec.layout.ranks, [])
            place.append(len(of_set))
            of_set.append((spec.layout.digest, *spec[2:7], [(kept.layout.digest, kept.travels) for kept in spec.kept]))
        for bucket in self.buckets:
            if bucket.exchange:
                items = [(place[item.param], item[1:-1]) for item in (self.items[number] for number in bucket.items)]
                said[bucket.ranks].append((bucket[2:], items))
        # in no bucket: how an owner cuts what is local depends on its other sets, of which the others know nothing
        for item in self.items:
            if item.route == "local":
                said[self.specs[item.param].layout.ranks].append((place[item.param], item[1:-1]))
        return {ranks: digest_of(of_set) for ranks, of_set in said.items()}

    @cached_property
    def _first_alike(self) -> list[int]:
        """For each parameter the first one whose layout is the same object."""
        first: dict[int, int] = {}
        return [first.setdefault(id(spec.layout), number) for number, spec in enumerate(self.specs)]

    def tiles_of(self, item: Item) -> Tiles:
        """Tiles of a matrix or a slice: rank -> its tiles in storage order."""
        spec = self.specs[item.param]
        of_matrix = spec.layout.tiles[item.matrix]
        if item.parts == 1:
            return of_matrix
        key = self._first_alike[item.param], item.matrix, item.part, item.parts
        if key not in self._tiles:
            box = item.box(spec)
            inside = ((rank, clipped(tiles, box)) for rank, tiles in of_matrix.items())
            self._tiles[key] = {rank: tiles for rank, tiles in inside if tiles}
        return self._tiles[key]

    def loads(self) -> dict[int, int]:
        """rank -> floating point operations of its products in one step."""
        loads = {rank: 0 for spec in self.specs for rank in spec.layout.ranks}
        for item in self.items:
            for owner in item.owners:
                loads[owner] += item.cost
        return loads

    def __str__(self) -> str:
        return "\n".join([*self._head, *self.summary(), *self._foot])

    @property
    def unpriced(self) -> str:
        """The printed plan without what is counted and priced for it, which takes time where ranks are many."""
        return "\n".join([*self._head, *self._foot])

    @property
    def _head(self) -> list[str]:
        return [*_rows(self), *_reasons(self)]

    @property
    def _foot(self) -> list[str]:
        return [*_balance(self), *self.notes]


def _rows(plan: Plan) -> list[str]:
    """The table of matrices, bucket by bucket."""
    rows = [("matrix", "shape", "route", "owner", "bucket", "method", "held by")]
    for number, bucket in enumerate(plan.buckets):
        for item in (plan.items[n] for n in bucket.items):
            spec = plan.specs[item.param]
            name = spec.name if len(spec.layout.view.matrices) == 1 else f"{spec.name}[{item.matrix}]"
            holders, owners = tuple(spec.layout.tiles[item.matrix]), ",".join(map(str, item.owners))
            held = f"ranks {ranks_text(holders)}"
            part = f" {item.part + 1}/{item.parts}" if item.parts > 1 else ""
            rows.append((name, f"{item.rows}x{item.cols}{part}", item.route, owners, str(number), item.how, held))
    return table(rows).splitlines()


def _reasons(plan: Plan) -> list[str]:
    return list(dict.fromkeys(f"{i.rows}x{i.cols}: {i.how}, {i.reason}" for i in plan.items if i.reason))


def _balance(plan: Plan) -> list[str]:
    """Lines on the most loaded rank, on idle ranks, and on matrices whose bits depend on how they are sharded."""
    lines, loads = [], plan.loads()
    if any(loads.values()):
        mean = sum(loads.values()) / len(loads)
        lines.append(
            f"{sum(not item.part for item in plan.items)} matrices, {len(plan.buckets)} buckets; most loaded rank "
            f"{max(loads.values()) / mean:.2f}x of the mean {mean / 1e9:.2f} GFLOP a step"
        )
    idle = tuple(rank for rank, flops in loads.items() if not flops)
    if len(idle) < len(loads) and idle:
        lines.append(f"{len(idle)} of {len(loads)} ranks orthogonalize nothing: ranks {ranks_text(idle)}")
    on_shards = sum(item.route == "gram" for item in plan.items)
    if on_shards:
        lines.append(f"not bitwise: {on_shards} matrices take the Gram route, whose sums over shards round otherwise")
    return lines


def make_plan(specs: Sequence[Spec], policy: Policy) -> Plan:
    """Give every matrix its owner and its bucket.

    Raises:
        ValueError: The local or the Gram route is asked for, and a matrix cannot take it; with the parameter's name.
    """
    cuts = {}
    if policy.route == "gram":
        cuts = {layout: cut_faults(layout) for layout in {spec.layout for spec in specs}}
    items = [
        _draft(spec, param, matrix, policy.route, cuts.get(spec.layout, ()))
        for param, spec in enumerate(specs)
        for matrix in range(len(spec.layout.view.matrices))
    ]
    sets: dict[Ranks, list[int]] = {spec.layout.ranks: [] for spec in specs}
    of_param = [sets[spec.layout.ranks] for spec in specs]  # hashing the ranks of a large mesh takes long
    for number, item in enumerate(items):
        if item.route != "local":
            of_param[item.param].append(number)
    # slices of a matrix are numbered from its own number on
    every = {number * policy.split_k: item for number, item in enumerate(items)}
    sharing, splitting = list[Sharing](), list[Splitting]()
    for ranks, numbers in sets.items():
        drafts = {number * policy.split_k: items[number] for number in numbers}
        settled = _settled(specs, drafts, ranks, policy)
        others = [_settled(specs, parted, ranks, policy) for parted in _parted(specs, drafts, ranks, policy)]
        if others:
            whole = _ns(specs, settled, policy, sys.maxsize)
            priced = [_by_price_of_slices(specs, whole, other, ranks, policy) for other in others]
            splitting.append(min(priced, key=lambda one: one.split))
            if splitting[-1].taken:
                settled = others[priced.index(splitting[-1])]
        every |= settled.items
        sharing += settled.sharing
    items = [every[number] for number in sorted(every)]
    buckets, chosen = _buckets(specs, items, policy)
    by_price = tuple(chosen), tuple(sharing), tuple(splitting)
    return Plan(tuple(specs), tuple(items), tuple(buckets), (), *by_price, policy.machine)


class _Settled(NamedTuple):
    """The matrices of a set with their owners, by number, and what was chosen for it."""

    items: dict[int, Item]
    sharing: tuple[Sharing, ...]


def _settled(specs: Sequence[Spec], drafts: Mapping[int, Item], ranks: Ranks, policy: Policy) -> _Settled:
    """Give the matrices of a set their owners."""
    numbers, items = list(drafts), dict(drafts)
    owners = dict(_owners(specs, drafts, ranks, numbers, policy.machine.per_node))
    for number, owner in (owners | _handed_on(specs, items, ranks, owners, policy.machine)).items():
        items[number] = _placed(specs[items[number].param], items[number], (owner,))
    each = _each_for_itself(specs, drafts, policy.machine.per_node) if policy.route == "auto" else {}
    if not each:
        return _Settled(items, ())
    sharing = _by_price(specs, items, policy, ranks, numbers, each)
    return _Settled(items | each if sharing.each else items, (sharing,))


_ABOVE_MEAN = 110  # percent of the mean load of its ranks that a matrix must take for several owners


def _parted(specs: Sequence[Spec], drafts: Mapping[int, Item], ranks: Ranks, policy: Policy) -> list[dict[int, Item]]:
    """Drafts with slices in place of the matrices that may bound the step: of all of these, and of the costliest alone.
    Empty if there are none."""
    parts, per_node = policy.split_k, policy.machine.per_node
    total = sum(draft.cost for draft in drafts.values())
    slices, fits = dict[int, dict[int, Item]](), dict[Ranks, bool]()
    for number, draft in drafts.items() if parts > 1 else ():
        spec = specs[draft.param]
        slicing = spec.slicings[draft.matrix] if spec.slicings and draft.route == "owner" else None
        large = draft.cost * len(ranks) * 100 > total * _ABOVE_MEAN
        box = slice_of(spec.layout.view.matrices[draft.matrix], 0, parts) if slicing and large else None
        if slicing is None or box is None:
            continue
        if draft.owners not in fits:
            fits[draft.owners] = bool(_nodes(draft.owners, per_node, parts))
        if fits[draft.owners]:
            cost = slicing.each + -(-(draft.cost - slicing.each) // parts)
            slices[number] = {number + p: draft._replace(cost=cost, part=p, parts=parts) for p in range(parts)}
    costs = [drafts[number].cost for number in slices]
    found = list[dict[int, Item]]()
    for least in dict.fromkeys((min(costs), max(costs))) if costs else ():
        found.append(dict(drafts))
        for number, of_matrix in slices.items():
            found[-1] |= of_matrix if drafts[number].cost >= least else {}
    return found


def _nodes(ranks: Ranks, per_node: int, least: int) -> dict[int, list[int]]:
    """Number of a node -> those of these ranks in it, if they are at least so many."""
    found: dict[int, list[int]] = {}
    for rank in ranks:
        found.setdefault(rank // per_node, []).append(rank)
    return {node: mates for node, mates in found.items() if len(mates) >= least}


def _by_price_of_slices(specs: Sequence[Spec], whole: int, other: _Settled, ranks: Ranks, policy: Policy) -> Splitting:
    """The cheaper of an owner for each matrix, which takes `whole` ns, and owners of slices."""
    split = _ns(specs, other, policy, whole)
    num = sum(item.parts > 1 and not item.part for item in other.items.values())
    return Splitting(ranks, num, policy.split_k, whole, split, split * _GAIN[0] <= whole * 100)


def _ns(specs: Sequence[Spec], settled: _Settled, policy: Policy, limit: int) -> int:
    for sharing in settled.sharing:  # it is known
        return sharing.alone if sharing.each else sharing.shared
    return _Cutter(specs, settled.items, policy).ns(list(settled.items), limit)


def _draft(spec: Spec, param: int, matrix: int, route: RouteOption, cuts: Sequence[str]) -> Item:
    """A matrix with its route and, as owners, all of which one is to orthogonalize it, or all do on the local route."""
    layout, whole = spec.layout, spec.layout.whole_on[matrix]
    rows, cols = layout.view.matrices[matrix][:2]
    why = spec.reasons[matrix] if spec.reasons else ""
    draft = Item(param, matrix, rows, cols, whole, "local", spec.hows[matrix], spec.costs[matrix], reason=why)
    keepers = [set(kept.layout.tiles[matrix]) for kept in spec.kept if kept.travels]
    if route == "local":
        parts = set(layout.tiles[matrix]) - set(whole)
        others = set().union(*keepers) - set(whole)
        if parts or others:
            found = (
                f"rank {min(parts)} stores a part of it" if parts else f"rank {min(others)} keeps what its stages keep"
            )
            raise ValueError(
                f"{spec.name}: route='local' orthogonalizes a matrix where it is stored whole and moves nothing, but "
                f"{found}: {rows}x{cols}, stored whole on ranks {whole}. Write route='auto'"
            )
        return draft
    fault = cuts[matrix] if route == "gram" and not whole else ""
    if route == "gram" and not whole and not fault:
        gram = spec.grams[matrix] if spec.grams else Gram()
        if gram.fault:
            raise ValueError(
                f"{spec.name}: route='gram' is impossible for this {rows}x{cols} matrix: {gram.fault}. "
                "Use Exchange(route='owner')"
            )
        return draft._replace(route="gram", owners=tuple(layout.tiles[matrix]), cost=gram.cost, reason="on request")
    # an owner needs what stages keep, which of a stack of experts only those ranks have that store some of the matrix
    able, kept = whole or tuple(layout.tiles[matrix]), [one.layout.tiles[matrix] for one in spec.kept]
    if kept:
        able = tuple(rank for rank in able if all(rank in of_stage for of_stage in kept))
    return draft._replace(route="owner", owners=able, reason="; ".join(filter(None, (fault, why))))


def _owners(
    specs: Sequence[Spec], items: Mapping[int, Item], ranks: Ranks, numbers: Sequence[int], per_node: int
) -> list[tuple[int, int]]:
    """Pairs of an item of a set and its owner: those without a choice first, then the costliest to the least loaded.
    Slices go first, those of a matrix to ranks of one node."""
    balance, mates = _Balance(per_node), _mates(items, per_node)
    items = {number: items[number]._replace(owners=mates.get(number, items[number].owners)) for number in numbers}
    ordered = sorted(numbers, key=lambda n: (len(items[n].owners) > 1, -items[n].cost, n))
    found = [(n, balance.least(specs[items[n].param].layout, items[n])) for n in ordered]
    loads = balance.loads(ranks)
    if max(loads) * len(loads) <= UNEVEN * sum(loads):
        return found
    fixed = [(n, owner) for n, owner in found if len(items[n].owners) == 1]
    place = {rank: at for at, rank in enumerate(ranks)}
    start = [0] * len(ranks)
    for n, owner in fixed:
        start[place[owner]] += items[n].cost
    free = ordered[len(fixed) :]
    known = {owners: tuple(place[rank] for rank in owners) for owners in {items[n].owners for n in free}}
    better = fitted([items[n].cost for n in free], [known[items[n].owners] for n in free], start, max(loads))
    return [*fixed, *zip(free, (ranks[at] for at in better), strict=True)] if better else found


def _mates(items: Mapping[int, Item], per_node: int) -> dict[int, Ranks]:
    """The owner of each slice: the least loaded ranks of the node to which fewest operations were given so far."""
    whole: dict[tuple[int, int], list[int]] = {}
    for number, item in items.items():
        if item.parts > 1:
            whole.setdefault((item.param, item.matrix), []).append(number)
    found, known = dict[int, Ranks](), dict[Ranks, dict[int, list[int]]]()
    busy, loads = Counter[int](), Counter[int]()  # of nodes, of ranks
    for numbers in sorted(whole.values(), key=lambda numbers: (-items[numbers[0]].cost, numbers)):
        first = items[numbers[0]]
        if first.owners not in known:
            known[first.owners] = _nodes(first.owners, per_node, first.parts)
        nodes = known[first.owners]
        node = min(nodes, key=lambda node: (busy[node], node))
        busy[node] += first.cost * first.parts
        for number, rank in zip(numbers, sorted(nodes[node], key=lambda rank: (loads[rank], rank)), strict=False):
            found[number] = (rank,)
            loads[rank] += first.cost
    return found


def _handed_on(
    specs: Sequence[Spec], items: Items, ranks: Ranks, owners: Mapping[int, int], machine: Machine
) -> dict[int, int]:
    """Other owners in the node for matrices that late ranks alone store: all have experts, and few a dense matrix.

    Only what takes longer at the machine's peak than its way there and back, and of which stages keep nothing.
    """
    loads = dict.fromkeys(ranks, 0)
    alone: dict[int, list[tuple[int, int]]] = {}
    for number, owner in owners.items():
        item, spec = items[number], specs[items[number].param]
        loads[owner] += item.cost
        itemsize = spec.itemsizes[item.matrix] if spec.itemsizes else 4
        worth = item.cost * machine.link > 2 * itemsize * item.numel * machine.half * 1000
        if worth and not spec.kept and len(item.owners) == 1 and len(spec.layout.tiles[item.matrix]) == 1:
            alone.setdefault(owner, []).append((item.cost, number))
    return handed_on(loads, alone, machine.per_node)


def _each_for_itself(specs: Sequence[Spec], drafts: Mapping[int, Item], per_node: int) -> dict[int, Item]:
    """Matrices with an owner in each replica: those that lie on the replicas on which most of the work lies. The owners
    in the others are those that store what the owner in the first one does."""
    work = Counter[tuple[Ranks, ...]]()
    for item in drafts.values():
        work[specs[item.param].layout.replicas] += item.cost
    replicas = max(work, key=lambda of: (work[of], of), default=())
    if len(replicas) < 2:
        return {}
    first, able, known = set(replicas[0]), dict[int, Item](), dict[tuple[Ranks, int], Ranks]()
    for number, item in drafts.items():
        key = item.owners, item.parts
        if key not in known:
            mine = tuple(rank for rank in item.owners if rank in first)
            known[key] = mine if item.parts == 1 or _nodes(mine, per_node, item.parts) else ()
        inside = known[key]
        if inside and specs[item.param].layout.replicas == replicas:
            able[number] = item._replace(owners=inside)
    found = dict[int, Item]()
    for number, owner in _owners(specs, able, replicas[0], list(able), per_node):
        item = drafts[number]
        layout = specs[item.param].layout
        owners = layout.keepers[layout.tiles[item.matrix][owner][0].held.piece]
        if set(owners) <= set(item.owners):
            found[number] = _placed(specs[item.param], item, owners)
    return found


def _by_price(
    specs: Sequence[Spec],
    items: Items,
    policy: Policy,
    ranks: Ranks,
    numbers: Sequence[int],
    each: Mapping[int, Item],
) -> Sharing:
    """The cheaper of the owners that matrices of a set have, and of owners in each replica.

    Replicas that share the work are equal because they get the same results, which is worth a little.
    """
    shared = _Cutter(specs, items, policy).ns(numbers)
    alone = _Cutter(specs, {n: each.get(n, items[n]) for n in numbers}, policy).ns(numbers, shared)
    percent, latencies = _GAIN
    gains = alone * percent <= shared * 100 and alone + latencies * policy.machine.across <= shared
    return Sharing(ranks, max(len(item.owners) for item in each.values()), shared, alone, gains)


def _placed(spec: Spec, item: Item, owners: Ranks) -> Item:
    """A matrix with its owners; nothing of it moves if they have all that anybody has of it."""
    having = (spec.layout, *(kept.layout for kept in spec.kept if kept.travels))
    stays = all(layout.tiles[item.matrix].keys() == set(owners) for layout in having)
    return item._replace(owners=owners, route="local" if stays else item.route)


class _Balance:
    """The work given so far to the owners in one set of sharers."""

    def __init__(self, per_node: int) -> None:
        self._per_node = per_node
        self._work: dict[int, int] = {}  # rank -> operations
        self._moved: dict[int, int] = {}  # replica -> elements that it has to pass on
        self._queues: dict[tuple[ParamLayout, int], list[tuple[int, int, int, int]]] = {}  # of a matrix: loads and rank

    def loads(self, ranks: Ranks) -> list[int]:
        """Operations of each of these ranks."""
        return [self._work.get(rank, 0) for rank in ranks]

    def least(self, layout: ParamLayout, item: Item) -> int:
        """The candidate with least work; of equal ones that in the replica that passes on least, then of another node
        than the one before."""
        replica = layout.replica_of
        queue = self._queues.setdefault((layout, item.matrix), []) if item.parts == 1 else []
        if not queue:
            queue += sorted((0, 0, rank % self._per_node, rank) for rank in item.owners)
        while True:  # what stands there may be of an earlier day: loads only grow
            *_, place, owner = queue[0]
            found = self._work.get(owner, 0), self._moved.get(replica[owner], 0), place, owner
            if found == queue[0]:
                break
            heapq.heapreplace(queue, found)
        self._work[owner] = self._work.get(owner, 0) + item.cost
        self._moved[replica[owner]] = self._moved.get(replica[owner], 0) + item.numel
        return owner


_BUCKETS = (*range(1, 21), 24, 32)  # that are tried
_TAILS = (1, 2, 4)
_LEAST_BYTES = 32 * 2**20
_IN_CACHE = 4 * 2**20  # bytes of a bucket on a CPU that moves nowhere: what is made for it stays in a cache
_OF_MOMENTUM = 32  # a bucket of what moves nowhere may have one part of so many
_NO_DEARER = 102  # percent of the cheapest that a plan which takes less memory may cost
_GAIN = 102, 3  # percent, and latencies between nodes, for less than which replicas do not each work for themselves


def _buckets(specs: Sequence[Spec], items: Sequence[Item], policy: Policy) -> tuple[list[Bucket], list[Chosen]]:
    """All buckets, and what was chosen.

    Half of what a rank orthogonalizes where it lies comes before all that moves, and half behind it, for gathers and
    scatters to pass by. Nothing of it comes in between: ranks that have nothing there would post the exchanges of a set
    in another order.
    """
    moving, before, behind, chosen = list[Bucket](), list[Bucket](), list[Bucket](), list[Chosen]()
    cutter = _Cutter(specs, items, policy)
    for (moves, ranks, route, _, kind, itemsize), numbers in sorted(cutter.together(range(len(items))).items()):
        if moves:
            shares, why = cutter.cheapest(ranks, numbers, itemsize)
            chosen.append(why)
        else:
            shares = cutter.local(numbers, itemsize, kind)
        made = []
        for share in shares:
            gathers = moves and any(_gathered(specs[items[n].param], items[n]) for n in share)
            made.append(Bucket(ranks, tuple(sorted(share)), kind, itemsize, route, gathers))
        half = len(made) if moves else (len(made) + 1) // 2
        (moving if moves else before).extend(made[:half])
        behind += made[half:]
    return [*before, *moving, *behind], chosen


def _gathered(spec: Spec, item: Item) -> bool:
    """False if the owner has all that it needs, and nobody else in its replica awaits a result."""
    whole = item.route == "owner" and item.owners[0] in spec.layout.whole_on[item.matrix]
    if item.parts > 1:
        tiles = spec.layout.tiles[item.matrix].get(item.owners[0], ())
        whole = sum(tile.numel for tile in clipped(tiles, item.box(spec))) == item.numel
    return not whole or any(kept.travels for kept in spec.kept)


class _Alike(NamedTuple):
    """All that matrices of one bucket share, see `Bucket`."""

    moves: bool
    ranks: Ranks
    route: Route
    num_owners: int
    kind: str
    itemsize: int


class _Cutter:
    """Cuts matrices that move, or stay, together into buckets."""

    def __init__(self, specs: Sequence[Spec], items: Items, policy: Policy) -> None:
        self._specs, self._items, self._policy = specs, items, policy
        self._spreads: dict[int, Spread] = {}  # by id of the layout
        self._known: dict[tuple[int, str, int], BatchPrice] = {}

    def together(self, numbers: Iterable[int]) -> dict[_Alike, list[int]]:
        """Matrices that may be in one bucket."""
        found: dict[_Alike, list[int]] = {}
        for number in numbers:
            item = self._items[number]
            spec, moves = self._specs[item.param], item.route != "local"
            itemsize = spec.itemsizes[item.matrix] if spec.itemsizes else 4
            itemsize = max(itemsize, 4) if item.route == "gram" else itemsize
            ranks = spec.layout.ranks if moves else item.owners
            alike = _Alike(moves, ranks, item.route, len(item.owners), spec.kind, itemsize)
            found.setdefault(alike, []).append(number)
        return found

    def ns(self, numbers: Sequence[int], limit: int = sys.maxsize) -> int:
        """Nanoseconds of a step of these, without what lies on one rank alone; `limit` if they are no less."""
        total = 0
        for (moves, ranks, *_, itemsize), alike in self.together(numbers).items():
            if len(ranks) > 1:
                priced = [self._priced(n) for n in alike]
                _, computed = bucket_times(priced, itemsize, self._policy.machine)
                at_least = total + max(computed.values())
                if at_least >= limit:  # the products alone
                    return limit
                total = total + self.cheapest(ranks, alike, itemsize)[1].option.ns if moves else at_least
        return total

    def local(self, numbers: Sequence[int], itemsize: int, kind: str) -> list[list[int]]:
        """The shares of what moves nowhere: as few as memory allows, and small ones on a CPU."""
        sizes = {n: self._items[n].numel for n in numbers}
        least = _IN_CACHE if kind == "cpu" else max(_LEAST_BYTES, 4 * sum(sizes.values()) // _OF_MOMENTUM)
        return self._shares(sizes, max(1, (self._policy.bucket_bytes or least) // itemsize), 1)

    def cheapest(self, ranks: Ranks, numbers: Sequence[int], itemsize: int) -> tuple[list[list[int]], Chosen]:
        """The shares of what moves: of those that are hardly dearer than the cheapest, what takes least memory."""
        items, machine = self._items, self._policy.machine
        sizes = {n: _size(items[n], len(ranks)) for n in numbers}
        priced = {n: self._priced(n) for n in numbers}
        bound = self._policy.bucket_bytes or itemsize * sum(sizes.values())
        tails = _TAILS if any(one.spread.replicas > 1 for one in priced.values()) else (1,)
        found: dict[Option, list[list[int]]] = {}
        busiest = list[int]()  # slices that stay together are not dealt out evenly
        if any(items[n].parts > 1 for n in numbers):
            work = Counter[int]()
            for one in priced.values():
                work[one.owner] += one.products.ns
            busiest.append(max(work, key=lambda rank: (work[rank], rank)))
        known, longest = 0, max(Counter(items[n].owners for n in numbers).values())  # matrices of one owner
        for least in _BUCKETS:
            if known == longest:
                break
            waves = self._shares(sizes, max(1, bound // itemsize), least)
            for tail in tails if len(waves) > known else ():
                shares = self._with_slices(self._narrowed(waves, tail))
                buckets = [bucket_times([priced[n] for n in share], itemsize, machine) for share in shares]
                two = heapq.nsmallest(2, (option.ns for option in found))
                if len(two) == 2 and least_ns(buckets) * 100 > max(two[0] * _NO_DEARER, two[1] * 100):
                    continue  # it is neither chosen nor the next
                taken = itemsize * max(taken_by([priced[n] for n in share]) for share in shares)
                for step in (1, -1)[: len(shares)]:  # those with least first, or last
                    found.setdefault(Option(taken, len(shares), step_ns(buckets[::step], busiest)), shares[::step])
            known = len(waves)
        limit = min(option.ns for option in found) * _NO_DEARER
        best = min(option for option in found if option.ns * 100 <= limit)
        other = min((option for option in found if option != best), key=lambda option: option.ns, default=None)
        return found[best], Chosen(ranks, best, other)

    def _narrowed(self, waves: Sequence[Sequence[int]], tail: int) -> list[list[int]]:
        """The waves cut by owners, the last one in `tail` parts, others in half as many, so that relays begin early and
        the last of them is short. Owners of each replica are dealt out alike, since it relays what they own."""
        found: list[list[int]] = []
        for wave in waves:
            lines: dict[tuple[int, int], list[int]] = {}  # of replica and owner
            for n in wave:
                owner, layout = self._items[n].owners[0], self._specs[self._items[n].param].layout
                lines.setdefault((layout.replica_of[owner], owner), []).append(n)
            shares: list[list[int]] = [[] for _ in range(tail if wave is waves[-1] else max(1, tail // 2))]
            dealt = Counter[int]()  # of each replica
            for replica, owner in sorted(lines, key=lambda at: (-sum(self._items[n].cost for n in lines[at]), at)):
                shares[dealt[replica] % len(shares)] += lines[replica, owner]
                dealt[replica] += 1
            found += [share for share in shares if share]
        return found

    def _with_slices(self, shares: list[list[int]]) -> list[list[int]]:
        """The shares, with all slices of a matrix in the first that has one of them."""
        slices = {n: self._items[n][:2] for share in shares for n in share if self._items[n].parts > 1}
        if len(shares) == 1 or not slices:
            return shares
        first, found = dict[tuple[int, int], int](), [list[int]() for _ in shares]
        for at, share in enumerate(shares):
            for n in share:
                found[first.setdefault(slices[n], at) if n in slices else at].append(n)
        return [share for share in found if share]

    def _shares(self, sizes: Mapping[int, int], most: int, least: int) -> list[list[int]]:
        items = self._items
        lines: dict[Ranks, list[int]] = {}
        for number in sorted(sizes, key=lambda n: (-items[n].cost, items[n].rows, items[n].cols, n)):
            lines.setdefault(items[number].owners, []).append(number)
        return _shares(list(lines.values()), items, sizes, most, least)[::-1]

    def _priced(self, number: int) -> Priced:
        item = self._items[number]
        layout = self._specs[item.param].layout
        spread = self._spreads.get(id(layout))
        if spread is None:
            spread = self._spreads[id(layout)] = spread_of(layout, self._policy.machine.per_node)
        if len(item.owners) > 1:
            spread = spread._replace(replicas=1, near=1)
        owner = item.owners[0]
        return Priced(owner, layout.replica_of[owner], item.numel, self._products(item), spread)

    def _products(self, item: Item) -> BatchPrice:
        key, machine = (item.short, "float64" if item.route == "gram" else item.how, item.cost), self._policy.machine
        slicing = self._specs[item.param].slicings[item.matrix] if item.parts > 1 else None
        if slicing is not None:
            sums = sums_ns(item.short, item.parts, slicing, machine)
            return BatchPrice(1, products_of(*key, machine).ns + sums)
        if key not in self._known:
            self._known[key] = products_of(*key, machine)
        return self._known[key]


def _size(item: Item, num_ranks: int) -> int:
    """Elements of a whole matrix; of the triangles that its owner is sent, where they are more."""
    triangles = num_ranks * item.short**2 // 2 if item.route == "gram" else 0
    return max(item.numel, triangles)


def _shares(
    lines: Sequence[Sequence[int]], items: Items, sizes: Mapping[int, int], most: int, least: int
) -> list[list[int]]:
    """Cut the lines of all owners into so few shares, `least` if there are matrices for them, that no owner has more
    than `most` elements in one, unless that is a single matrix. Every owner has equal work in each, as far as that and
    its matrices allow."""
    needed = [_needed([sizes[n] for n in line], most) for line in lines]
    num = max(least, *(of_line[0] for of_line in needed))
    cut = [_cut(line, items, sizes, of_line, most, num) for line, of_line in zip(lines, needed, strict=True)]
    shares = [[n for part in parts for n in part] for parts in zip(*cut, strict=True)]
    return [share for share in shares if share]


def _needed(sizes: Sequence[int], most: int) -> list[int]:
    """The fewest shares of at most `most` elements each that cover a line of sizes to its end, from each position in
    it; 0 at the end."""
    found = [0] * (len(sizes) + 1)
    end, filled = len(sizes), 0
    for start in range(len(sizes) - 1, -1, -1):
        filled += sizes[start]
        while filled > most and end > start + 1:
            end -= 1
            filled -= sizes[end]
        found[start] = 1 + found[end]
    return found


def _cut(
    line: Sequence[int], items: Items, sizes: Mapping[int, int], needed: Sequence[int], most: int, num: int
) -> list[list[int]]:
    """One owner's matrices, in order, in `num` shares of equal work; none is empty that need not be."""
    parts: list[list[int]] = [[] for _ in range(num)]
    left, share, work, filled = sum(items[n].cost for n in line), 0, 0, 0
    for place, number in enumerate(line):
        behind = num - share - 1  # shares that follow this one
        if parts[share] and behind and needed[place] <= behind:
            enough = work * (behind + 1) >= left
            if enough or filled + sizes[number] > most or len(line) - place <= behind:
                left, share, work, filled = left - work, share + 1, 0, 0
        parts[share].append(number)
        work += items[number].cost
        filled += sizes[number]
    return parts


def by_rank(values: Mapping[int, int], ranks: Ranks) -> tuple[int, ...]:
    """The values of all these ranks, 0 where there is none."""
    return tuple(values.get(rank, 0) for rank in ranks)
