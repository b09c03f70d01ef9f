"""Plan who computes what and what moves where. Pure: same input, same Plan on every rank. No torch.distributed.

A plan has two halves. `Plan` (items, owners, buckets) is global: every rank of a group computes the same one, and its
digest is compared. `RankBucket` (who sends which fragment to whom, split sizes) is what one rank needs to carry a
bucket out; it is derived from the plan for one rank at a time, so a plan for a thousand ranks stays small.

[Note: exchanges]
    A bucket whose matrices are whole on their owners moves nothing. Any other bucket has two exchanges:
    gather   each fragment goes from one holder (the source) to the matrix's owner, in the wire dtype;
    scatter  each fragment of the result goes from the owner to every holder.
    What stages of a variant keep of a matrix (`Kept`) goes with the scatter, from its owner to all ranks that keep it.
    A fragment that its owner holds itself never enters the wire. Messages to a rank hold the bucket's items in plan
    order and each item's fragments in storage order; both ends derive the same order, so nothing is negotiated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

from shardmuon.errors import ranks_text
from shardmuon.planning.balance import assign_owners
from shardmuon.planning.buckets import deal_buckets
from shardmuon.planning.layout import Fragment, ParamLayout
from shardmuon.planning.routes import Route, cut_fault, gram_messages
from shardmuon.planning.types import (
    Bucket,
    KeptSlot,
    ParamSpec,
    Policy,
    RankBucket,
    Recipe,
    Slot,
    Transfer,
    WorkItem,
    default_recipe,
)


@dataclass(frozen=True, slots=True)
class Plan:
    """Items, owners and buckets; the same on every rank that takes part in them.

    `notes` are lines on what holds for the plan as a whole, printed below it.
    """

    specs: tuple[ParamSpec, ...]
    items: tuple[WorkItem, ...]
    buckets: tuple[Bucket, ...]
    policy: Policy
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Rank sets that exchange something, small ones first: the order in which their collectives run."""
        return tuple(sorted({b.ranks for b in self.buckets if b.exchange}, key=lambda ranks: (len(ranks), ranks)))

    def digest(self, ranks: tuple[int, ...]) -> bytes:
        """8 bytes over everything the ranks of one group must agree on to exchange with each other."""
        state = hashlib.blake2b(repr(self.policy).encode(), digest_size=8)
        for bucket in self.buckets:
            if bucket.ranks == ranks and bucket.exchange:
                for index in bucket.items:
                    item = self.items[index]
                    spec = self.specs[item.param]
                    state.update(spec.layout.digest)
                    state.update(
                        repr((spec.identity, item.matrix, item.owners, item.how, spec.batch, spec.kind)).encode()
                    )
                    state.update(item.route.encode())
                    for kept in spec.kept:
                        state.update(kept.layout.digest + bytes([kept.travels]))
                state.update(b"|")
        return state.digest()

    def loads(self) -> dict[int, int]:
        """rank -> floating point operations it does in one step."""
        loads = {rank: 0 for spec in self.specs for rank in spec.layout.ranks}
        for item in self.items:
            for owner in item.owners:
                loads[owner] += item.cost
        return loads

    def for_rank(self, rank: int) -> tuple[RankBucket, ...]:
        """The buckets that `rank` takes part in, in the order that all ranks follow."""
        return tuple(self.rank_bucket(b, rank) for b in self.buckets if rank in b.ranks)

    def rank_bucket(self, bucket: Bucket, rank: int) -> RankBucket:
        """One bucket as `rank` carries it out."""
        held = tuple(
            (index, fragment)
            for index in bucket.items
            for fragment in self._layout(index).fragments[self.items[index].matrix].get(rank, ())
        )
        owned = tuple(index for index in bucket.items if rank in self.items[index].owners)
        kept = tuple(pair for pair in held if rank in self.items[pair[0]].owners)
        if not bucket.exchange:
            return RankBucket(bucket, held, owned, kept, None, None)
        if bucket.route == "gram":
            gather, scatter = gram_messages(self, bucket, rank)
            splits = (Transfer((), m.send_splits, (), m.recv_splits) for m in (gather, scatter))
            return RankBucket(bucket, held, owned, kept, *splits)
        return RankBucket(bucket, held, owned, kept, *self._transfers(bucket, rank, held, owned))

    def _layout(self, index: int) -> ParamLayout:
        return self.specs[self.items[index].param].layout

    def _transfers(
        self,
        bucket: Bucket,
        rank: int,
        held: tuple[tuple[int, Fragment], ...],
        owned: tuple[int, ...],
    ) -> tuple[Transfer, Transfer]:
        outgoing: list[
            tuple[int, int, Fragment]
        ] = []  # (peer, item, fragment) for the gather, from this rank's storage
        incoming: list[tuple[int, int, Fragment]] = []  # results that come back to this rank's storage
        for index, fragment in held:
            owner = self.items[index].owners[0]
            if owner != rank:
                incoming.append((owner, index, fragment))
                if self._layout(index).source(fragment, owner) == rank:
                    outgoing.append((owner, index, fragment))
        arriving: list[tuple[int, int, Fragment]] = []  # fragments of the matrices this rank owns
        results: list[tuple[int, int, Fragment]] = []  # their results, to every other holder
        for index in owned:
            layout = self._layout(index)
            for peer, fragments in layout.fragments[self.items[index].matrix].items():
                if peer != rank:
                    results.extend((peer, index, fragment) for fragment in fragments)
                    arriving.extend((peer, index, f) for f in fragments if layout.source(f, rank) == peer)
        told, heard = self._kept_messages(bucket, rank)
        send, send_splits, kept_send = _slots(results, bucket.ranks, told)
        recv, recv_splits, kept_recv = _slots(incoming, bucket.ranks, heard)
        gather = Transfer(*_slots(outgoing, bucket.ranks)[:2], *_slots(arriving, bucket.ranks)[:2])
        return gather, Transfer(send, send_splits, recv, recv_splits, kept_send, kept_recv)

    def _kept_messages(self, bucket: Bucket, rank: int) -> tuple[list[_KeptMessage], list[_KeptMessage]]:
        """What owners' stages changed: (peer, item, number, elements) that this rank sends, and that it is sent."""
        told: list[_KeptMessage] = []
        heard: list[_KeptMessage] = []
        for index in bucket.items:
            item = self.items[index]
            for number, kept in enumerate(self.specs[item.param].kept):
                if not kept.travels:
                    continue
                owner, keepers = item.owners[0], kept.keepers(item.matrix)
                words = -(-kept.size(item.matrix) * KEPT_BYTES // bucket.itemsize)
                if rank == owner:
                    told.extend((peer, index, number, words) for peer in keepers if peer != rank)
                elif rank in keepers:
                    heard.append((owner, index, number, words))
        return told, heard

    def price(self, gpu: Any, **options: Any) -> Any:
        """What a step of this plan takes on a machine: an interval of seconds, with a timeline.

        Args:
            gpu: A hardware file's name ("h100") or path, or a `shardmuon.foresight.hardware.Hardware`.
            **options: ``gpus_per_node``, ``dollars_per_hour``, ``adamw_elements``: see `foresight.live.price_plan`.

        Returns:
            A `shardmuon.foresight.pricing.Price`.
        """
        # Prices stand far above plans, which know nothing of them: they are looked up when they are asked for.
        return import_module("shardmuon.foresight.live").price_plan(self, gpu, **options)

    def __str__(self) -> str:
        width = max((len(item.how) for item in self.items), default=0)
        head = f"{'matrix':<40} {'shape':>13}  {'route':<9} {'owner':>5}  {'bucket':>6}  {'method':<{width}}  held by"
        lines = [head]
        for number, bucket in enumerate(self.buckets):
            for index in bucket.items:
                item = self.items[index]
                spec = self.specs[item.param]
                count = len(spec.layout.view.matrices)
                name = spec.name if count == 1 else f"{spec.name}[{item.matrix}]"
                holders = tuple(spec.layout.fragments[item.matrix])
                owner = ",".join(map(str, item.owners))
                lines.append(
                    f"{name:<40} {f'{item.rows}x{item.cols}':>13}  {item.route:<9} {owner:>5}  {number:>6}  "
                    f"{item.how:<{width}}  ranks {ranks_text(holders)}"
                )
        whys = {(f"{i.rows}x{i.cols}", i.how, i.reason): None for i in self.items if i.reason}
        lines.extend(f"{shape}: {how}, {reason}" for shape, how, reason in whys)
        loads = self.loads()
        work = {rank: flops for rank, flops in loads.items() if flops}
        if work:
            mean = sum(work.values()) / len(loads)
            lines.append(
                f"{len(self.items)} matrices, {len(self.buckets)} buckets; most loaded rank "
                f"{max(loads.values()) / mean:.2f}x of the mean {mean / 1e9:.2f} GFLOP a step"
            )
            idle = tuple(rank for rank, flops in loads.items() if not flops)
            if idle:
                lines.append(
                    f"{len(idle)} of {len(loads)} ranks orthogonalize nothing, as each matrix has one owner: ranks "
                    f"{ranks_text(idle)}"
                )
        on_shards = sum(item.route == "gram" for item in self.items)
        if on_shards:
            lines.append(
                f"not bitwise: {on_shards} matrices take the Gram route, whose sums over shards round otherwise"
            )
        return "\n".join([*lines, *self.notes])


_KeptMessage = tuple[int, int, int, int]  # peer, item, number among what is kept, elements on the wire
KEPT_BYTES = 4  # what stages keep is fp32


def _slots(
    messages: Iterable[tuple[int, int, Fragment]], ranks: tuple[int, ...], kept: Iterable[_KeptMessage] = ()
) -> tuple[tuple[Slot, ...], tuple[int, ...], tuple[KeptSlot, ...]]:
    """Lay messages out in a wire buffer by peer, then item, then storage order, and what is kept behind each peer's;
    count elements per group rank."""
    counts = dict.fromkeys(ranks, 0)
    by_peer: dict[int, list[_KeptMessage]] = {}
    for message in sorted(kept):
        by_peer.setdefault(message[0], []).append(message)
    slots: list[Slot] = []
    kept_slots: list[KeptSlot] = []
    at = 0
    ordered = sorted(messages, key=lambda m: (m[0], m[1]))
    for peer, of_peer in _by_peer(ordered, by_peer):
        start = at
        for _, index, fragment in of_peer:
            slots.append(Slot(index, fragment, at))
            at += fragment.numel
        for _, index, number, words in by_peer.get(peer, ()):
            kept_slots.append(KeptSlot(index, number, at, words))
            at += words
        counts[peer] += at - start
    return tuple(slots), tuple(counts.values()), tuple(kept_slots)


def _by_peer(
    ordered: Sequence[tuple[int, int, Fragment]], also: Iterable[int]
) -> list[tuple[int, list[tuple[int, int, Fragment]]]]:
    """Messages by peer, ascending; and those peers that have none, with none."""
    found: dict[int, list[tuple[int, int, Fragment]]] = {peer: [] for peer in also}
    for message in ordered:
        found.setdefault(message[0], []).append(message)
    return sorted(found.items())


def make_plan(specs: Sequence[ParamSpec], policy: Policy) -> Plan:
    """Choose routes, owners and buckets for these parameters.

    Args:
        specs: The parameters, in the optimizer's order. Ranks of one group must list their common parameters alike.
        policy: The user's choices.

    Returns:
        The plan. Owners are balanced within each group of ranks by cost, matrices that cannot move counted first.

    Raises:
        ValueError: route="local" for a matrix that no rank holds whole; "gram" for a method or schedule that cannot
            take it.
    """
    items: list[WorkItem] = []
    shared: dict[tuple[int, ...], list[int]] = {}  # group -> items that need an owner
    loads: dict[tuple[int, ...], dict[int, int]] = {}  # group -> work that is already placed there
    for param, spec in enumerate(specs):
        # looked up once a parameter: hashing the ranks of a large mesh takes longer than all else
        ranks = spec.layout.ranks
        without_owner = shared.setdefault(ranks, [])
        group = loads.setdefault(ranks, {})
        for matrix, shape in enumerate(spec.layout.view.matrices):
            recipe = spec.recipes[matrix] if spec.recipes else default_recipe(shape.rows, shape.cols)
            whole = spec.layout.whole_on(matrix)
            keepers = {rank for kept in spec.kept if kept.travels for rank in kept.keepers(matrix)}
            if policy.route == "local" and not whole:
                raise ValueError(
                    f"{spec.name}: route='local' needs a rank that holds the whole {shape.rows}x{shape.cols} matrix, "
                    f"but it is cut up over ranks {tuple(spec.layout.fragments[matrix])}. Use Exchange(route='auto')"
                )
            if policy.route == "local" and not keepers <= set(whole):
                raise ValueError(
                    f"{spec.name}: route='local' moves nothing, but ranks {tuple(sorted(keepers - set(whole)))} keep a "
                    f"copy of what its variant keeps of this {shape.rows}x{shape.cols} matrix, and do not hold it. Use "
                    "Exchange(route='auto')"
                )
            alone = len(whole) == len(spec.layout.fragments[matrix]) == 1 and keepers <= set(whole)
            local = alone or policy.route == "local"
            route: Route = "local" if local else "owner"
            why = recipe.reason
            if not whole:
                route, why = _cut_route(spec, matrix, recipe, policy)
            owners = whole if local else ()
            cost = recipe.gram_cost if route == "gram" else recipe.cost
            items.append(WorkItem(param, matrix, shape.rows, shape.cols, owners, route, cost, recipe.how, why))
            for rank in owners:
                group[rank] = group.get(rank, 0) + recipe.cost
            if not owners:
                without_owner.append(len(items) - 1)
    for ranks, members in shared.items():
        if members:
            _place(items, members, specs, ranks, loads[ranks])
    return Plan(tuple(specs), tuple(items), deal_buckets(items, specs, policy), policy)


def _cut_route(spec: ParamSpec, matrix: int, recipe: Recipe, policy: Policy) -> tuple[Route, str]:
    """The route of a matrix that no rank holds whole, and why."""
    if policy.route != "gram":
        return "owner", recipe.reason
    fault = cut_fault(spec.layout, matrix)
    if fault:
        return "owner", f"{fault}; {recipe.reason}".rstrip("; ")
    excluded = spec.gram_fault or recipe.gram_fault
    if excluded:
        shape = spec.layout.view.matrices[matrix]
        raise ValueError(
            f"{spec.name}: route='gram' is impossible for this {shape.rows}x{shape.cols} matrix: {excluded}. "
            "Use Exchange(route='owner')"
        )
    return "gram", "on request"


def _place(
    items: list[WorkItem], members: list[int], specs: Sequence[ParamSpec], ranks: tuple[int, ...], loads: dict[int, int]
) -> None:
    """Give each of these items an owner among its holders, whole holders first if there are any."""
    position = {rank: i for i, rank in enumerate(ranks)}
    cache: dict[tuple[int, int], tuple[int, ...]] = {}
    candidates = []
    for index in members:
        item = items[index]
        layout = specs[item.param].layout
        key = (id(layout), item.matrix)
        if key not in cache:
            holders = layout.whole_on(item.matrix) or tuple(layout.fragments[item.matrix])
            cache[key] = tuple(position[r] for r in holders)
        candidates.append(cache[key])
    start = [loads.get(rank, 0) for rank in ranks]
    for index, owner in zip(
        members, assign_owners([items[i].cost for i in members], candidates, len(ranks), start), strict=True
    ):
        items[index] = replace(items[index], owners=(ranks[owner],))
