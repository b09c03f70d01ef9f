"""The plan: who orthogonalizes which matrix, and which matrices move together. Pure, and equal on every rank.

[Note: balance within a set]
    Ranks that share one set of tensors may share others with other ranks, of which the first know nothing. So owners
    are balanced among the tensors of one set, by what all of its ranks know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from shardmuon.layout.table import ParamLayout, Ranks, digest_of
from shardmuon.plan.cuts import cut_faults

Route = Literal["local", "owner", "gram"]
_LEAST = 4  # buckets: one travels to its owners, one is orthogonalized, one travels back, and one is left
RouteOption = Literal["auto", "owner", "local", "gram"]


class Kept(NamedTuple):
    """Numbers that a stage keeps of each matrix from step to step, fp32.

    Attributes:
        layout: Of the state tensor. Its matrices are 1 x so many numbers, one for each matrix of the parameter, and a
            rank has all of one or nothing.
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
        name: For messages and tables.
        layout: Who stores what.
        hows: How each matrix is orthogonalized, as text. Matrices of one batch share it.
        costs: Floating point operations of each.
        batch: Matrices of different batch texts (coefficients, stages) never share a batch.
        kind: Device type. Parameters of different kinds never share a bucket.
        itemsizes: Bytes per element of each matrix's wire. Empty: 4 each.
        kept: Of each stage that keeps anything.
        grams: The Gram route for each matrix. Empty: excluded.
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


class Policy(NamedTuple):
    """The choices that a user may make about a plan.

    Attributes:
        route: "auto" and "owner": one rank orthogonalizes a matrix, where it lies if one rank alone stores it. "local":
            every rank that stores it whole does, replicas redundantly, and nothing moves. "gram": the Gram route (see
            cuts.py) for matrices that are cut along their long side only, "auto" for the others.
        bucket_bytes: Most bytes (of the wire) of whole matrices that one owner has in a bucket. A larger matrix makes
            a bucket of its own.
    """

    route: RouteOption = "auto"
    bucket_bytes: int = 32 * 2**20


class Item(NamedTuple):
    """One matrix, and who orthogonalizes it.

    Attributes:
        param, matrix: Number of its `Spec`, and of the matrix in the view.
        rows, cols: Its shape.
        owners: The rank that orthogonalizes it; several on the redundant local route.
        route: "local": nothing of it moves. "gram": see cuts.py.
        how, cost: See `Spec`.
        reason: Why it does not take the Gram route that was asked for, or "".
    """

    param: int
    matrix: int
    rows: int
    cols: int
    owners: Ranks
    route: Route
    how: str
    cost: int
    reason: str = ""

    @property
    def short(self) -> int:
        return min(self.rows, self.cols)


class Bucket(NamedTuple):
    """Matrices that move in one exchange, or are orthogonalized where they are.

    Attributes:
        ranks: Of the exchange. On the local route, those that own any of them.
        items: Numbers of the plan's items.
        kind: See `Spec`.
        itemsize: Of the wire, in bytes; Gram matrices are never narrower than fp32.
        route: Of all its items.
    """

    ranks: Ranks
    items: tuple[int, ...]
    kind: str
    itemsize: int
    route: Route

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
        buckets: In the order in which every rank begins them. It depends on nothing but their content, so that ranks
            of several sets never wait for each other in unlike orders.
        notes: Lines on what holds for the plan as a whole, for its printed form.
    """

    specs: tuple[Spec, ...]
    items: tuple[Item, ...]
    buckets: tuple[Bucket, ...]
    notes: tuple[str, ...] = ()

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
                items = [(place[item.param], item[1:]) for item in (self.items[number] for number in bucket.items)]
                said[bucket.ranks].append((bucket[2:], items))
        # in no bucket: how an owner cuts what is local depends on its other sets, of which the others know nothing
        for item in self.items:
            if item.route == "local":
                said[self.specs[item.param].layout.ranks].append((place[item.param], item[1:]))
        return {ranks: digest_of(of_set) for ranks, of_set in said.items()}


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
    balances = {spec.layout.ranks: _Balance() for spec in specs}
    of_param = [balances[spec.layout.ranks] for spec in specs]  # hashing the ranks of a large mesh takes long
    # where there is no choice first, then the costliest
    for number in sorted(range(len(items)), key=lambda n: (len(items[n].owners) > 1, -items[n].cost, n)):
        item = items[number]
        if item.route != "local":
            items[number] = _placed(specs[item.param], item, of_param[item.param])
    return Plan(tuple(specs), tuple(items), tuple(_buckets(specs, items, policy.bucket_bytes)))


def _draft(spec: Spec, param: int, matrix: int, route: RouteOption, cuts: Sequence[str]) -> Item:
    """A matrix with its route and, as owners, all of which one is to orthogonalize it, or all do on the local route."""
    layout, whole = spec.layout, spec.layout.whole_on[matrix]
    rows, cols = layout.view.matrices[matrix][:2]
    draft = Item(param, matrix, rows, cols, whole, "local", spec.hows[matrix], spec.costs[matrix])
    keepers = [set(kept.layout.tiles[matrix]) for kept in spec.kept if kept.travels]
    if route == "local":
        parts = set(layout.tiles[matrix]) - set(whole)
        others = set().union(*keepers) - set(whole)
        if parts or others:
            why = (
                f"rank {min(parts)} stores a part of it" if parts else f"rank {min(others)} keeps what its stages keep"
            )
            raise ValueError(
                f"{spec.name}: route='local' orthogonalizes a matrix where it is stored whole and moves nothing, but "
                f"{why}: {rows}x{cols}, stored whole on ranks {whole}. Write route='auto'"
            )
        return draft
    reason = cuts[matrix] if route == "gram" and not whole else ""
    if route == "gram" and not whole and not reason:
        gram = spec.grams[matrix] if spec.grams else Gram()
        if gram.fault:
            raise ValueError(
                f"{spec.name}: route='gram' is impossible for this {rows}x{cols} matrix: {gram.fault}. "
                "Use Exchange(route='owner')"
            )
        return draft._replace(route="gram", owners=tuple(layout.tiles[matrix]), cost=gram.cost)
    # an owner needs what stages keep, which of a stack of experts only those ranks have that store some of the matrix
    kept = [one.layout.tiles[matrix] for one in spec.kept]
    able = tuple(rank for rank in whole or layout.ranks if all(rank in of_stage for of_stage in kept))
    return draft._replace(route="owner", owners=able, reason=reason)


def _placed(spec: Spec, item: Item, balance: _Balance) -> Item:
    """A matrix with one owner; nothing of it moves if that one alone has anything of it."""
    owners = (balance.least(spec.layout, item.owners, item.cost, item.matrix),)
    keepers = [tuple(kept.layout.tiles[item.matrix]) for kept in spec.kept if kept.travels]
    stays = all(ranks == owners for ranks in (tuple(spec.layout.tiles[item.matrix]), *keepers))
    return item._replace(owners=owners, route="local" if stays else item.route)


class _Balance:
    """What the owners of one set of sharers have to do so far."""

    def __init__(self) -> None:
        self._work: dict[int, int] = {}  # rank -> operations
        self._moved: dict[int, int] = {}  # replica -> elements that it has to pass on

    def least(self, layout: ParamLayout, candidates: Ranks, cost: int, matrix: int) -> int:
        """The candidate with least work; of equal ones that in the replica that passes on least."""
        work, moved, replica = self._work, self._moved, layout.replica_of
        owner = min(candidates, key=lambda rank: (work.get(rank, 0), moved.get(replica[rank], 0), rank))
        rows, cols = layout.view.matrices[matrix][:2]
        work[owner] = work.get(owner, 0) + cost
        moved[replica[owner]] = moved.get(replica[owner], 0) + rows * cols
        return owner


def _buckets(specs: Sequence[Spec], items: Sequence[Item], bucket_bytes: int) -> list[Bucket]:
    together: dict[tuple[bool, Ranks, Route, str, int], list[int]] = {}
    for number, item in enumerate(items):
        spec = specs[item.param]
        itemsize = spec.itemsizes[item.matrix] if spec.itemsizes else 4
        itemsize = max(itemsize, 4) if item.route == "gram" else itemsize
        ranks = item.owners if item.route == "local" else spec.layout.ranks
        together.setdefault((item.route != "local", ranks, item.route, spec.kind, itemsize), []).append(number)
    found = []
    for (moves, ranks, route, kind, itemsize), numbers in sorted(together.items()):
        lines: dict[Ranks, list[int]] = {}
        for number in sorted(numbers, key=lambda n: (-items[n].cost, items[n].rows, items[n].cols, n)):
            lines.setdefault(items[number].owners, []).append(number)
        sizes, most = {n: _size(items[n], len(ranks)) for n in numbers}, bucket_bytes // itemsize
        if moves:
            shares = _shares(list(lines.values()), {n: items[n].cost for n in numbers}, sizes, most)
        else:
            shares = _filled(lines[ranks], sizes, most)
        for share in shares:
            found.append(Bucket(ranks, tuple(sorted(share)), kind, itemsize, route))
    return found


def _size(item: Item, num_ranks: int) -> int:
    """Elements of a whole matrix; of the triangles that its owner is sent, where they are more."""
    triangles = num_ranks * item.short**2 // 2 if item.route == "gram" else 0
    return max(item.rows * item.cols, triangles)


def _filled(line: Sequence[int], sizes: Mapping[int, int], most: int) -> list[list[int]]:
    """Cut a line whose matrices do not move into shares, each as full as can be: few batches stay half empty."""
    shares: list[list[int]] = []
    size = most
    for number in line:
        if not shares or size + sizes[number] > most:
            shares.append([])
            size = 0
        shares[-1].append(number)
        size += sizes[number]
    return shares


def _shares(
    lines: Sequence[Sequence[int]], costs: Mapping[int, int], sizes: Mapping[int, int], most: int
) -> list[list[int]]:
    """Cut the lines of all owners into so few shares that no owner has more than `most` elements in one, unless that is
    a single matrix. Every owner has equal work in each share, as far as its matrices allow.

    Where many ranks own little each, one share would hold all of a model: nothing would travel while something is
    orthogonalized, and a rank would send all of its momentum at once. So there are four, if all of them together have
    four times `most`; if no owner has matrices for four, other owners work in other shares.
    """
    num = max(_least_shares([sizes[n] for n in line], most) for line in lines)
    wanted, longest = min(_LEAST, sum(sizes[n] for line in lines for n in line) // max(most, 1)), max(map(len, lines))
    if num == 1 and longest < wanted:
        everything = sorted((n for line in lines for n in line), key=lambda n: (-costs[n], n))
        return _cut(everything, sizes, wanted)
    num = max(num, min(wanted, longest))
    while any(_exceeds(part, sizes, most) for line in lines for part in _cut(line, costs, num)):
        num += 1
    cut = [_cut(line, costs, num) for line in lines]
    shares = [[n for part in parts for n in part] for parts in zip(*cut, strict=True)]
    return [share for share in shares if share]


def _least_shares(sizes: Sequence[int], most: int) -> int:
    """A number of shares that no way of cutting these sizes stays below."""
    alone = sum(size > most for size in sizes)
    fitting = [size for size in sizes if 0 < size <= most]
    if not fitting:
        return max(alone, 1)
    at_once = most // min(fitting)
    return alone + max(-(-sum(fitting) // most), -(-len(fitting) // at_once))


def _exceeds(part: Sequence[int], sizes: Mapping[int, int], most: int) -> bool:
    return len(part) > 1 and sum(sizes[n] for n in part) > most


def _cut(line: Sequence[int], weights: Mapping[int, int], num: int) -> list[list[int]]:
    """Matrices, in order, in `num` shares of equal weight; none is empty that need not be."""
    parts: list[list[int]] = [[] for _ in range(num)]
    total, done = sum(weights[n] for n in line) or 1, 0
    for place, number in enumerate(line):
        share = done * num // total
        behind = len(line) - place  # matrices left, this one included: each share that follows gets one
        parts[min(max(share, num - behind), place, num - 1)].append(number)
        done += weights[number]
    return parts


def by_rank(values: Mapping[int, int], ranks: Ranks) -> tuple[int, ...]:
    """The values of all these ranks, 0 where there is none."""
    return tuple(values.get(rank, 0) for rank in ranks)
