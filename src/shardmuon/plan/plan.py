"""The plan: which rank orthogonalizes which matrix, and which matrices are exchanged together. Pure functions; ranks
that share parameters get the same result for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from shardmuon.comm.groups import Ranks
from shardmuon.comm.vote import digest_of
from shardmuon.errors import ranks_text
from shardmuon.plan.buckets import Way, cheapest, in_order
from shardmuon.plan.items import Bucket, Item, Policy, Spec
from shardmuon.plan.owners import draft_of, each_for_itself, with_owners
from shardmuon.texts import table

# Replicas divide matrices among them, unless it saves enough time if each replica orthogonalizes all of its matrices.
_NO_GAIN = 102  # percent: minimum ratio of the time with division to the time without
_LATENCIES = 3  # minimum saving without division, in latencies of exchanges between nodes


@dataclass(frozen=True)
class Plan:
    """Assignment of all matrices to owners, the ranks that orthogonalize them, and to buckets, which are exchanged
    together.

    Attributes:
        specs: Descriptions of the parameters.
        items: The matrices of all parameters, in order.
        buckets: Buckets in the order in which every rank begins them. The order depends only on the buckets' content:
            if ranks that exchange buckets with several sets of ranks used different orders, they could deadlock.
        notes: Lines printed below the plan: choices made by estimated time, and remarks on the whole plan.
        policy: Bounds and machine rates from which the plan was made.
    """

    specs: tuple[Spec, ...]
    items: tuple[Item, ...]
    buckets: tuple[Bucket, ...]
    notes: tuple[str, ...] = field(default=(), compare=False)
    policy: Policy = field(default=Policy(), compare=False)

    @cached_property
    def digests(self) -> dict[Ranks, bytes]:
        """Set of ranks that share parameters -> 16-byte digest of the part of the plan that must be equal on all of
        these ranks."""
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
            # leave out local buckets: they depend on parameters that the owner shares with ranks outside this set
            local = [item for n, item in items.items() if self.items[n].route == "local"]
            found[ranks] = digest_of([specs, moving, local])
        return found

    def loads(self) -> dict[int, int]:
        """Map each rank to the floating point operations of the matrix products that it computes in one step."""
        loads = {rank: 0 for spec in self.specs for rank in spec.layout.ranks}
        for item in self.items:
            for owner in item.owners:
                loads[owner] += item.cost
        return loads

    def __str__(self) -> str:
        reasons = dict.fromkeys(f"{i.rows}x{i.cols}: {i.how}, {i.reason}" for i in self.items if i.reason)
        return "\n".join([_rows(self), *reasons, *_balance(self), *self.notes])


def _rows(plan: Plan) -> str:
    """Make a text table of a plan's matrices, bucket by bucket."""
    rows = [("matrix", "shape", "route", "owner", "bucket", "method", "held by")]
    for number, bucket in enumerate(plan.buckets):
        for item in (plan.items[n] for n in bucket.items):
            spec = plan.specs[item.param]
            name = spec.name if len(spec.layout.view.matrices) == 1 else f"{spec.name}[{item.matrix}]"
            owners, held = ",".join(map(str, item.owners)), f"ranks {ranks_text(tuple(spec.layout.tiles[item.matrix]))}"
            rows.append((name, f"{item.rows}x{item.cols}", item.route, owners, str(number), item.how, held))
    return table(rows)


def _balance(plan: Plan) -> list[str]:
    """Make the line of a printed plan that compares the most loaded rank with the mean. Empty if there is no work."""
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
    """Assign owners and buckets to the matrices that a set of ranks shares. All ranks divide the matrices among them,
    or every replica orthogonalizes all of its matrices itself if that is estimated to be faster."""
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
    """True if replicas save enough time when each orthogonalizes all matrices itself (`alone`), compared with dividing
    the matrices among replicas (`shared`), in nanoseconds. Dividing is slightly preferred: replicas that receive the
    same results are certain to stay equal."""
    return alone * _NO_GAIN <= shared * 100 and alone + _LATENCIES * policy.machine.across <= shared
