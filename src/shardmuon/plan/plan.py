"""The plan: which rank orthogonalizes which matrix, and which matrices move together. Pure, and equal on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from shardmuon.comm.vote import digest_of
from shardmuon.errors import ranks_text
from shardmuon.layout.table import Ranks
from shardmuon.plan.buckets import Way, cheapest, in_order
from shardmuon.plan.items import Bucket, Item, Policy, Spec
from shardmuon.plan.owners import draft_of, each_for_itself, with_owners
from shardmuon.texts import table

_NO_GAIN = 102  # percent: replicas share work unless sharing takes at least this much of the time of working separately
_LATENCIES = 3  # working separately must save at least so many latencies between nodes


@dataclass(frozen=True)
class Plan:
    """Owners and buckets of all matrices.

    Attributes:
        specs: The parameters.
        items: The parameters' matrices, in order.
        buckets: Buckets in the order in which every rank begins them. The order depends only on the buckets' content,
            so that ranks in several sets never deadlock by waiting in different orders.
        notes: Lines printed below the plan: choices made by price, and remarks on the whole plan.
        policy: The policy that the plan was made with.
    """

    specs: tuple[Spec, ...]
    items: tuple[Item, ...]
    buckets: tuple[Bucket, ...]
    notes: tuple[str, ...] = field(default=(), compare=False)
    policy: Policy = field(default=Policy(), compare=False)

    @cached_property
    def digests(self) -> dict[Ranks, bytes]:
        """Set of ranks that share parameters -> 16-byte digest of the part of the plan that must be equal on them."""
        found = {}
        for ranks in dict.fromkeys(spec.layout.ranks for spec in self.specs):
            params = [n for n, spec in enumerate(self.specs) if spec.layout.ranks == ranks]
            specs = [
                (spec.layout.digest, *spec[2:7], [(kept.layout.digest, kept.travels) for kept in spec.kept])
                for spec in map(self.specs.__getitem__, params)
            ]
            place = {param: at for at, param in enumerate(params)}
            items = {n: (place[i.param], *i[1:-1]) for n, i in enumerate(self.items) if i.param in place}
            moving = [
                (*bucket[1:5], bucket.gathers, [items[n] for n in bucket.items])
                for bucket in self.buckets
                if bucket.exchange and bucket.ranks == ranks
            ]
            # without buckets: an owner's local buckets depend on its other sets, which these ranks do not know
            local = [item for n, item in items.items() if self.items[n].route == "local"]
            found[ranks] = digest_of([specs, moving, local])
        return found

    def loads(self) -> dict[int, int]:
        """Map each rank to the floating point operations of its products in one step."""
        loads = {rank: 0 for spec in self.specs for rank in spec.layout.ranks}
        for item in self.items:
            for owner in item.owners:
                loads[owner] += item.cost
        return loads

    def __str__(self) -> str:
        reasons = dict.fromkeys(f"{i.rows}x{i.cols}: {i.how}, {i.reason}" for i in self.items if i.reason)
        return "\n".join([_rows(self), *reasons, *_balance(self), *self.notes])


def _rows(plan: Plan) -> str:
    """Text table of a plan's matrices, bucket by bucket."""
    rows = [("matrix", "shape", "route", "owner", "bucket", "method", "held by")]
    for number, bucket in enumerate(plan.buckets):
        for item in (plan.items[n] for n in bucket.items):
            spec = plan.specs[item.param]
            name = spec.name if len(spec.layout.view.matrices) == 1 else f"{spec.name}[{item.matrix}]"
            owners, held = ",".join(map(str, item.owners)), f"ranks {ranks_text(tuple(spec.layout.tiles[item.matrix]))}"
            rows.append((name, f"{item.rows}x{item.cols}", item.route, owners, str(number), item.how, held))
    return table(rows)


def _balance(plan: Plan) -> list[str]:
    """Line for the printed plan on the most loaded rank; none for a plan without work."""
    loads = plan.loads().values()
    if not any(loads):
        return []
    mean = sum(loads) / len(loads)
    return [
        f"{len(plan.items)} matrices, {len(plan.buckets)} buckets; most loaded rank {max(loads) / mean:.2f}x of the "
        f"mean {mean / 1e9:.2f} GFLOP a step"
    ]


def make_plan(specs: Sequence[Spec], policy: Policy) -> Plan:
    """Make a plan: assign an owner and a bucket to every matrix."""
    sets: dict[Ranks, list[Item]] = {}
    for param, spec in enumerate(specs):
        matrices = range(len(spec.layout.view.matrices))
        sets.setdefault(spec.layout.ranks, []).extend(draft_of(spec, param, matrix) for matrix in matrices)
    ways = [_of_set(specs, drafts, ranks, policy) for ranks, drafts in sets.items()]
    items = sorted((item for way in ways for item in way.items), key=lambda item: item.key)
    notes = tuple(note for way in ways for note in way.notes)
    return Plan(tuple(specs), tuple(items), tuple(in_order(specs, items, ways, policy)), notes, policy)


def _of_set(specs: Sequence[Spec], drafts: Sequence[Item], ranks: Ranks, policy: Policy) -> Way:
    """Assign owners and buckets to the matrices of a set: work is shared among all ranks, or done by every replica for
    itself if that is cheaper."""
    shared = cheapest(specs, with_owners(specs, drafts, ranks, policy.machine), policy)
    each = each_for_itself(specs, drafts, policy.machine.per_node) if policy.each else {}
    if not each:
        return shared
    alone = cheapest(specs, [each.get(item.key, item) for item in shared.items], policy)
    way, what = shared, "they share the work"
    if _gains(shared.ns, alone.ns, policy):
        way, what = alone, "each works for itself"
    replicas = max(len(item.owners) for item in each.values())
    note = f"ranks {ranks_text(ranks)}: {replicas} replicas: {what}, by price ({policy.machine.name})"
    return way._replace(notes=(note, *way.notes))


def _gains(shared: int, alone: int, policy: Policy) -> bool:
    """True if replicas that each orthogonalize all matrices save enough time (nanoseconds). Sharing is preferred a
    little, since replicas that receive the same results are equal for certain."""
    return alone * _NO_GAIN <= shared * 100 and alone + _LATENCIES * policy.machine.across <= shared
