"""The plan: who orthogonalizes which matrix, and which matrices move together. Pure, and equal on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

from shardmuon.comm.vote import digest_of
from shardmuon.errors import ranks_text
from shardmuon.layout.table import Ranks
from shardmuon.plan.buckets import Chosen, Cutter, Way
from shardmuon.plan.items import Bucket, Item, Policy, Spec
from shardmuon.plan.owners import draft_of, each_for_itself, with_owners
from shardmuon.texts import table

_NO_GAIN = 102  # percent of another way that the simpler one may cost
_LATENCIES = 3  # between nodes, for less than which replicas do not each work for themselves


@dataclass(frozen=True)
class Plan:
    """Owners and buckets of all matrices.

    Attributes:
        specs: The parameters.
        items: Their matrices, in order.
        buckets: Buckets in the order in which every rank begins them. It depends on nothing but their content, so that
            ranks of several sets never wait for each other in unlike orders.
        notes: Lines on what holds for the plan as a whole, printed below it.
        choices: What was chosen by price.
        policy: What the user chose.
    """

    specs: tuple[Spec, ...]
    items: tuple[Item, ...]
    buckets: tuple[Bucket, ...]
    notes: tuple[str, ...] = field(default=(), compare=False)
    choices: tuple[Chosen, ...] = field(default=(), compare=False)
    policy: Policy = field(default=Policy(), compare=False)
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
                said[bucket.ranks].append(((bucket.kind, bucket.itemsize, bucket.route, bucket.gathers), items))
        # in no bucket: how an owner cuts what is local depends on its other sets, of which the others know nothing
        for item in self.items:
            if item.route == "local":
                said[self.specs[item.param].layout.ranks].append((place[item.param], item[1:-1]))
        return {ranks: digest_of(of_set) for ranks, of_set in said.items()}

    def loads(self) -> dict[int, int]:
        """rank -> floating point operations of its products in one step."""
        loads = {rank: 0 for spec in self.specs for rank in spec.layout.ranks}
        for item in self.items:
            for owner in item.owners:
                loads[owner] += item.cost
        return loads

    def __str__(self) -> str:
        return self.text(self.summary())

    def text(self, summary: Sequence[str] = ()) -> str:
        """The printed plan. `summary`: what is counted and priced for it, which takes time where ranks are many."""
        reasons = dict.fromkeys(f"{i.rows}x{i.cols}: {i.how}, {i.reason}" for i in self.items if i.reason)
        return "\n".join([_rows(self), *reasons, *summary, *_balance(self), *self.notes])


def _rows(plan: Plan) -> str:
    """The table of matrices, bucket by bucket."""
    rows = [("matrix", "shape", "route", "owner", "bucket", "method", "held by")]
    for number, bucket in enumerate(plan.buckets):
        for item in (plan.items[n] for n in bucket.items):
            spec = plan.specs[item.param]
            name = spec.name if len(spec.layout.view.matrices) == 1 else f"{spec.name}[{item.matrix}]"
            owners, held = ",".join(map(str, item.owners)), f"ranks {ranks_text(tuple(spec.layout.tiles[item.matrix]))}"
            rows.append((name, f"{item.rows}x{item.cols}", item.route, owners, str(number), item.how, held))
    return table(rows)


def _balance(plan: Plan) -> list[str]:
    """Lines on the most loaded rank and on idle ranks."""
    lines, loads = [], plan.loads()
    if any(loads.values()):
        mean = sum(loads.values()) / len(loads)
        lines.append(
            f"{len(plan.items)} matrices, {len(plan.buckets)} buckets; most loaded rank "
            f"{max(loads.values()) / mean:.2f}x of the mean {mean / 1e9:.2f} GFLOP a step"
        )
    idle = tuple(rank for rank, flops in loads.items() if not flops)
    if len(idle) < len(loads) and idle:
        lines.append(f"{len(idle)} of {len(loads)} ranks orthogonalize nothing: ranks {ranks_text(idle)}")
    return lines


def make_plan(specs: Sequence[Spec], policy: Policy) -> Plan:
    """Give every matrix its owner and its bucket."""
    sets: dict[Ranks, list[Item]] = {}
    for param, spec in enumerate(specs):
        matrices = range(len(spec.layout.view.matrices))
        sets.setdefault(spec.layout.ranks, []).extend(draft_of(spec, param, matrix) for matrix in matrices)
    cutter = Cutter(specs, policy)
    ways = [_settled(specs, cutter, drafts, ranks, policy) for ranks, drafts in sets.items()]
    items = sorted((item for way in ways for item in way.items), key=lambda item: item.key)
    choices = tuple(choice for way in ways for choice in way.choices)
    return Plan(tuple(specs), tuple(items), tuple(cutter.in_order(items, ways)), (), choices, policy)


def _settled(specs: Sequence[Spec], cutter: Cutter, drafts: Sequence[Item], ranks: Ranks, policy: Policy) -> Way:
    """The matrices of a set, shared out among all ranks or by each replica for itself, by price.

    Replicas that share the work are equal because they get the same results, which is worth a little.
    """
    shared = cutter.way(with_owners(specs, drafts, ranks, policy.machine))
    each = each_for_itself(specs, drafts, policy.machine.per_node) if policy.each else {}
    if not each:
        return shared
    alone = cutter.way([each.get(item.key, item) for item in shared.items])
    num = max(len(item.owners) for item in each.values())
    texts = f"{num} replicas: they share the work", f"{num} replicas: each works for itself"
    return _by_price((shared, alone), texts, ("shared", "each for itself"), _LATENCIES, ranks, policy)


def _by_price(
    ways: tuple[Way, Way], texts: tuple[str, str], names: tuple[str, str], latencies: int, ranks: Ranks, policy: Policy
) -> Way:
    """The second of two ways if it gains enough, with a line about the choice; else the first."""
    taken = _gains(ways[0].ns, ways[1].ns, latencies, policy)
    way, other = ways[taken], ways[not taken]
    beside = f", it would take {other.ns / way.ns:.3g}x as long" if other.ns > way.ns else " is not cheaper"
    text = f"{texts[taken]}, by price ({policy.machine.name}); {names[not taken]}{beside}"
    return way._replace(choices=(Chosen(ranks, way.ns, text), *way.choices))


def _gains(before: int, after: int, latencies: int, policy: Policy) -> bool:
    """True if nanoseconds become fewer by as much as a choice should gain."""
    return after * _NO_GAIN <= before * 100 and after + latencies * policy.machine.across <= before
