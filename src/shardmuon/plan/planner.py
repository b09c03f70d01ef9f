"""The planner, a set of pure functions that make plans. A plan assigns each matrix to an owner and to a bucket, so that
an optimizer step takes as little time as possible. An owner is a rank that orthogonalizes the matrix. A bucket is a
group of matrices that are exchanged together.

[Note: balance within a set]
    Each parameter is sharded or replicated over a set of ranks, and a rank can belong to several sets. Work is balanced
    separately within each set. All ranks of a set must choose the same owners, so the choice depends only on data that
    all of these ranks have. They do not know how much work a rank has in its other sets.

[Note: the price of buckets]
    The price of a choice of buckets is the estimated time of a step. `price.clock` computes it by simulating the loop
    that processes the buckets. Only ranks that have the most to compute in at least one bucket are simulated. The time
    of an exchange is determined by the rank that sends or receives the most data. For lack of a better estimate, half
    of each exchange is assumed to overlap with computation. Prices are integers (nanoseconds), so that all ranks
    compute the same prices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain, zip_longest
from math import isqrt
from typing import NamedTuple

import numpy as np

from shardmuon.comm.groups import Ranks
from shardmuon.errors import ranks_text
from shardmuon.layout.pieces import ParamLayout
from shardmuon.plan.plan import Bucket, Item, Plan, Policy, Spec
from shardmuon.price import clock
from shardmuon.price.machines import Machine

# By default, replicas divide the matrices among themselves. Each replica orthogonalizes all matrices itself only if a
# step is then faster by a factor of at least `_NO_GAIN` / 100, and by at least `_LATENCIES` inter-node latencies.
_NO_GAIN = 102
_LATENCIES = 3
# Values that `_cuts` tries for the minimum number of waves. A wave contains a fraction of the matrices that each rank
# orthogonalizes, and becomes one or more buckets (sets of matrices that are exchanged together).
_NUMS = (*range(1, 21), 24, 32)
_TAILS = (1, 2, 4)
# Memory traffic of three phases of a step (pack, apply, fill), in bytes per element. The values are those in
# `foresight.hardware` for elements that are sent as two bytes.
_PACKS, _APPLIES, _FILLS = 30, 26, 12

_Key = tuple[int, int]  # key of a matrix: (index of the parameter in the plan, index of the matrix in the parameter)
_Share = list[Item]  # list of matrices, for example those of one bucket or one owner


class _Way(NamedTuple):
    """A choice of owners and buckets for the matrices that are sharded or replicated over one set of ranks.

    Attributes:
        items: An `Item` for each matrix, with the matrix's owners (the ranks that orthogonalize it).
        moving: Dict from a `Bucket` without items to a list of buckets (sets of matrices that are exchanged together),
            each given as a list of matrices. The key describes the common properties of these buckets, such as their
            ranks and the type of device.
        ns: Estimated time of a step in nanoseconds, excluding matrices that a single rank stores and orthogonalizes.
        notes: Lines in the printed plan that explain the choice.
    """

    items: Sequence[Item]
    moving: Mapping[Bucket, list[_Share]]
    ns: int
    notes: tuple[str, ...]


def make_plan(specs: Sequence[Spec], policy: Policy) -> Plan:
    """Make a plan for the parameters in `specs`. It assigns each matrix to its owners (the ranks that orthogonalize it)
    and to a bucket (a group of matrices that are processed together)."""
    sets: dict[Ranks, list[Item]] = {}
    for param, spec in enumerate(specs):
        matrices = range(len(spec.layout.view.matrices))
        sets.setdefault(spec.layout.ranks, []).extend(_draft_of(spec, param, matrix) for matrix in matrices)
    ways = [_of_set(specs, drafts, ranks, policy) for ranks, drafts in sets.items()]
    items = sorted((item for way in ways for item in way.items), key=lambda item: item.key)
    notes = tuple(note for way in ways for note in way.notes)
    return Plan(tuple(specs), tuple(items), tuple(_in_order(specs, items, ways, policy)), notes, policy)


def _of_set(specs: Sequence[Spec], drafts: Sequence[Item], ranks: Ranks, policy: Policy) -> _Way:
    """Choose buckets and owners for the matrices that are sharded or replicated over one set of ranks. An owner is a
    rank that orthogonalizes a matrix. All ranks divide the matrices among themselves, unless `policy.each` is True and
    a step would be clearly faster if every replica orthogonalized all matrices itself."""
    owners = _owners(specs, drafts, ranks, policy.machine)
    shared = _cheapest(specs, [_placed(specs[item.param], item, (owners[item.key],)) for item in drafts], policy)
    each = _each_for_itself(specs, drafts, policy.machine) if policy.each else {}
    if not each:
        return shared
    alone = _cheapest(specs, [each.get(item.key, item) for item in shared.items], policy)
    way, what = shared, "they share the work"
    # Dividing the work among replicas is slightly preferred, because replicas that receive the same results are certain
    # to stay equal.
    if alone.ns * _NO_GAIN <= shared.ns * 100 and alone.ns + _LATENCIES * policy.machine.across <= shared.ns:
        way, what = alone, "each works for itself"
    replicas = max(len(item.owners) for item in each.values())
    note = f"ranks {ranks_text(ranks)}: {replicas} replicas: {what}, by price ({policy.machine.name})"
    return way._replace(notes=(note, *way.notes))


# --------------------------------------------------------------------------------------------------------------- owners


def _draft_of(spec: Spec, param: int, matrix: int) -> Item:
    """Make a provisional `Item` for a matrix, in which `owners` lists all ranks that can own (orthogonalize) the
    matrix. The final owners are chosen later."""
    layout = spec.layout
    rows, cols = layout.view.matrices[matrix][:2]
    able = layout.whole_on[matrix] or tuple(layout.tiles[matrix])
    # To orthogonalize a matrix, its owner needs the Muon variant's state (such as NorMuon's) for the matrix. If a stack
    # of experts is sharded, only some ranks store this state.
    for kept in spec.kept:
        able = tuple(rank for rank in able if rank in kept.layout.tiles[matrix])
    return Item(param, matrix, rows, cols, able, "owner", spec.choices[matrix], spec.costs[matrix])


def _placed(spec: Spec, item: Item, owners: Ranks) -> Item:
    """Assign a matrix to the given owners, the ranks that orthogonalize it. The route of the returned `Item` is "local"
    if no other rank stores any element of the matrix, or of a state tensor that the owners must send."""
    having = (spec.layout, *(kept.layout for kept in spec.kept if kept.travels))
    stays = all(layout.tiles[item.matrix].keys() == set(owners) for layout in having)
    return item._replace(owners=owners, route="local" if stays else item.route)


def _owners(specs: Sequence[Spec], drafts: Sequence[Item], ranks: Ranks, machine: Machine) -> dict[_Key, int]:
    """Choose an owner for each matrix that is sharded or replicated over one set of ranks. The owner is the rank that
    orthogonalizes the matrix.

    Matrices with a single candidate are assigned first. The others follow in order of decreasing cost. Each matrix goes
    to the candidate with the least work so far. Among candidates with equal work, the replica to which the fewest
    elements have been assigned is preferred, because a replica sends its results to the other replicas. If candidates
    are still tied, owners alternate between nodes.

    At the end, if a rank has over 3% more work than the mean, matrices that only this rank stores are moved to the rank
    with the least work on the same node, if this can save time. This helps if all ranks store experts, but only a few
    ranks also orthogonalize matrices of other layers.
    """
    ranks = tuple(sorted(ranks, key=lambda rank: (rank % machine.per_node, rank)))
    place, node = {rank: at for at, rank in enumerate(ranks)}, np.array(ranks) // machine.per_node
    able = {of: np.array(sorted(place[rank] for rank in of)) for of in {item.owners for item in drafts}}
    layouts = {specs[item.param].layout for item in drafts}
    replica = {layout: np.array([layout.replica_of[rank] for rank in ranks]) for layout in layouts}
    # `work` counts the floating point operations assigned to each rank so far, and `moved` counts the matrix elements
    # assigned to each replica so far. A rank is overloaded if its work exceeds `late`.
    work, moved = np.zeros(len(ranks), np.int64), np.zeros(len(ranks), np.int64)
    late, found = 1.03 * sum(item.cost for item in drafts) / len(ranks), dict[_Key, int]()
    order = sorted(drafts, key=lambda item: (len(item.owners) > 1, -item.cost, item.key))
    for item in (*order, *(item for item in order if _may_go(specs[item.param], item, machine))):
        at, of_rank = able[item.owners], replica[specs[item.param].layout]
        if item.key in found:
            mates = np.flatnonzero(node == node[at[0]])
            if work[at[0]] <= max(late, work[mates].min() + item.cost):  # moving it would save little or no time
                continue
            work[at[0]] -= item.cost
            at = mates
        at = at[work[at] == work[at].min()]
        owner = int(at[moved[of_rank[at]].argmin()])
        work[owner] += item.cost
        moved[of_rank[owner]] += item.numel
        found[item.key] = ranks[owner]
    return found


def _may_go(spec: Spec, item: Item, machine: Machine) -> bool:
    """True if a step may become faster when a matrix is orthogonalized on a rank that does not store it. Three
    conditions must be met: a single rank stores the matrix, the Muon variant has no state for it, and orthogonalizing
    it at the machine's peak rate takes longer than sending it to another rank and back."""
    way = 2 * spec.itemsizes[item.matrix] * item.numel
    worth = item.cost * machine.link > way * machine.half * 1000
    return worth and not spec.kept and len(item.owners) == len(spec.layout.tiles[item.matrix]) == 1


def _each_for_itself(specs: Sequence[Spec], drafts: Sequence[Item], machine: Machine) -> dict[_Key, Item]:
    """Choose owners so that each replica orthogonalizes all matrices itself. Return a dict from each matrix's key to an
    `Item` with one owner per replica. If parameters divide the ranks into replicas in different ways, only the matrices
    of the division with the most work are in the dict."""
    work = Counter[tuple[Ranks, ...]]()
    for item in drafts:
        work[specs[item.param].layout.replicas] += item.cost
    replicas = max(work, key=lambda of: (work[of], of), default=())
    if len(replicas) < 2:
        return {}
    first = set(replicas[0])
    able = {owners: tuple(rank for rank in owners if rank in first) for owners in {item.owners for item in drafts}}
    mine = [item for item in drafts if able[item.owners] and specs[item.param].layout.replicas == replicas]
    inside = _owners(specs, [item._replace(owners=able[item.owners]) for item in mine], replicas[0], machine)
    found = dict[_Key, Item]()
    for item in mine:
        layout = specs[item.param].layout
        owners = layout.keepers[layout.tiles[item.matrix][inside[item.key]][0].held.piece]
        if set(owners) <= set(item.owners):
            found[item.key] = _placed(specs[item.param], item, owners)
    return found


# -------------------------------------------------------------------------------------------------------------- buckets


def _cheapest(specs: Sequence[Spec], items: Sequence[Item], policy: Policy) -> _Way:
    """Divide matrices that are sharded or replicated over one set of ranks into buckets (sets of matrices that are
    exchanged together). Choose the division that needs the least memory among those whose estimated step time is at
    most 2% above the shortest. The ranks that orthogonalize the matrices have already been chosen."""
    total, moving, notes = 0, dict[Bucket, list[_Share]](), list[str]()
    prices = _prices(specs, items, policy.machine)
    for alike, share in _together(specs, items).items():
        if alike.exchange:
            moving[alike], ns, note = _by_price(alike, share, prices, policy)
            notes.append(note)
            total += ns
        elif len(alike.ranks) > 1:
            total += max(_timed([prices[item.key] for item in share], alike.itemsize, policy.machine).computed.values())
    return _Way(items, moving, total, tuple(notes))


def _in_order(specs: Sequence[Spec], items: Sequence[Item], ways: Sequence[_Way], policy: Policy) -> list[Bucket]:
    """List all buckets of a plan in the order of their execution.

    A local bucket contains matrices that are not exchanged. Half of a rank's local buckets run before all exchanged
    buckets and the other half after them, so that their computation overlaps with exchanges. No local bucket runs
    between exchanged buckets. Otherwise, ranks with local buckets would start their exchanges in a different order than
    ranks without local buckets.
    """
    alone = sorted(_together(specs, (item for item in items if item.route == "local")).items())
    local = [(alike, _local(alike, share, policy)) for alike, share in alone]
    before = [(alike, shares[: (len(shares) + 1) // 2]) for alike, shares in local]
    behind = [(alike, shares[(len(shares) + 1) // 2 :]) for alike, shares in local]
    between = sorted(chain.from_iterable(way.moving.items() for way in ways))
    number = {item.key: n for n, item in enumerate(items)}
    return [
        alike._replace(
            items=tuple(sorted(number[item.key] for item in share)),
            gathers=alike.exchange and any(_gathered(specs[item.param], item) for item in share),
        )
        for alike, shares in (*before, *between, *behind)
        for share in shares
    ]


def _together(specs: Sequence[Spec], items: Iterable[Item]) -> dict[Bucket, _Share]:
    """Group matrices that can be in the same bucket (a set of matrices that are processed together). Return a dict of
    the groups, in which each key is a `Bucket` without items that describes the common properties of the group."""
    found: dict[Bucket, _Share] = {}
    for item in items:
        spec = specs[item.param]
        exchange = item.route != "local"
        ranks = spec.layout.ranks if exchange else item.owners
        alike = Bucket(ranks, exchange, len(item.owners), spec.kind, spec.itemsizes[item.matrix])
        found.setdefault(alike, []).append(item)
    return found


def _local(alike: Bucket, share: _Share, policy: Policy) -> list[_Share]:
    """Divide matrices that are not exchanged into as few buckets as the maximum bucket size allows. The default maximum
    is 4 MiB on a CPU, so that temporaries stay in the cache. On other devices, it is 1/32 of the matrices' total size
    in fp32, but at least 32 MiB."""
    default = max(32 * 2**20, 4 * sum(item.numel for item in share) // 32)
    most = (policy.bucket_bytes or (4 * 2**20 if alike.kind == "cpu" else default)) // alike.itemsize
    return _shares_of(_lines(share), max(1, most), 1)[::-1]


def _by_price(
    alike: Bucket, items: _Share, prices: Mapping[_Key, _Priced], policy: Policy
) -> tuple[list[_Share], int, str]:
    """Divide exchanged matrices into buckets, each of which is exchanged as a whole. Choose the division that needs the
    least memory among those whose estimated time is at most 2% above the shortest. Return the buckets, their estimated
    time in nanoseconds, and a line for the printed plan."""
    # Dict from a tuple (largest number of buffered elements on any rank, number of buckets, estimated nanoseconds) to a
    # division of the matrices into buckets (sets of matrices that are exchanged together).
    found = dict[tuple[int, int, int], list[_Share]]()
    for shares in _cuts(alike, items, prices, policy):
        buckets = [_timed([prices[i.key] for i in share], alike.itemsize, policy.machine) for share in shares]
        taken = max(bucket.taken for bucket in buckets)
        # Estimate the step time for both orders in which the buckets can run: that of `shares`, and the reverse order.
        for step in (1, -1)[: len(shares)]:
            found.setdefault((taken, len(shares), _step_ns(buckets[::step])), shares[::step])
    shortest = min(ns for *_, ns in found)
    # Among the divisions into buckets that take at most 2% more time than the fastest, choose the one that needs the
    # least memory.
    best = min(option for option in found if option[2] * 100 <= shortest * 102)
    taken, num, ns = best
    return (
        found[best],
        ns,
        (
            f"ranks {ranks_text(alike.ranks)}: {num} buckets by price ({policy.machine.name}), "
            f"of {alike.itemsize * taken / 2**20:.3g} MiB a rank at most"
        ),
    )


def _cuts(alike: Bucket, items: _Share, prices: Mapping[_Key, _Priced], policy: Policy) -> Iterator[list[_Share]]:
    """Yield divisions of exchanged matrices into buckets, from which the caller chooses the best. The matrices are
    first divided into waves, each with some matrices of every owner (a rank that orthogonalizes matrices). A wave
    becomes a single bucket, or is divided into buckets by owner."""
    most = sum(item.numel for item in items)
    if policy.bucket_bytes:
        most = max(1, policy.bucket_bytes // alike.itemsize)
    tails = _TAILS if any(prices[item.key].spread.replicas > 1 for item in items) else (1,)
    lines = _lines(items)
    # If several values in `_NUMS` result in the same number of waves, only the smallest of these values is used.
    tried = (_shares_of(lines, most, least)[::-1] for least in reversed(_NUMS))
    for waves in {len(waves): waves for waves in tried}.values():
        yield from (_narrowed(waves, tail, prices) for tail in tails)


def _gathered(spec: Spec, item: Item) -> bool:
    """True if a matrix must be gathered before it is orthogonalized, and the result scattered afterwards. False if the
    rank that orthogonalizes the matrix stores the whole matrix and need not send state of the Muon variant (such as
    NorMuon's) to other ranks."""
    return item.owners[0] not in spec.layout.whole_on[item.matrix] or any(kept.travels for kept in spec.kept)


# ------------------------------------------------------------------------------------------------ splitting into shares


def _lines(items: Iterable[Item]) -> list[_Share]:
    """Group matrices by their owner (the rank that orthogonalizes them). Return one list per owner, each
    sorted by decreasing cost."""
    lines: dict[Ranks, _Share] = {}
    for item in sorted(items, key=lambda item: (-item.cost, item.rows, item.cols, item.key)):
        lines.setdefault(item.owners, []).append(item)
    return list(lines.values())


def _narrowed(waves: Sequence[_Share], tail: int, prices: Mapping[_Key, _Priced]) -> list[_Share]:
    """Split waves into buckets. A wave contains some matrices of every owner (a rank that orthogonalizes matrices), and
    each of its buckets contains those of some owners. The last wave is split into `tail` buckets, and the earlier waves
    into half as many. The owners in each replica are spread evenly over the buckets of a wave, to balance the exchanges
    that send results to other replicas."""
    found: list[_Share] = []
    for wave in waves:
        shares: list[_Share] = [[] for _ in range(tail if wave is waves[-1] else max(1, tail // 2))]
        # For each replica, the number of owners whose matrices are already in `shares`.
        dealt = Counter[int]()
        for line in sorted(_lines(wave), key=lambda line: (-sum(item.cost for item in line), line[0].owners)):
            replica = prices[line[0].key].replica
            shares[dealt[replica] % len(shares)] += line
            dealt[replica] += 1
        found += filter(None, shares)
    return found


def _shares_of(lines: Sequence[_Share], most: int, least: int) -> list[_Share]:
    """Split matrices into at least `least` shares, each of which becomes one bucket. If there are too few matrices,
    there are fewer shares. In each share, a rank orthogonalizes at most `most` elements, or a single larger matrix.
    Within these limits, the work of each rank is spread evenly over the shares."""
    cut = (_cut(line, most, least) for line in lines)
    return [list(chain.from_iterable(parts)) for parts in zip_longest(*cut, fillvalue=())]


def _cut(line: _Share, most: int, num: int) -> list[_Share]:
    """Split the matrices that one rank orthogonalizes into `num` parts of about equal work, one part per bucket. If a
    part would have more than `most` elements, make more parts. The order of the matrices is kept."""
    parts, total, work, filled = [list[Item]()], sum(item.cost for item in line), 0, 0
    for item in line:
        has_enough = len(parts) < num and work * num >= total * len(parts)
        if parts[-1] and (has_enough or filled + item.numel > most):
            parts.append([])
            filled = 0
        parts[-1].append(item)
        work += item.cost
        filled += item.numel
    return parts


# ------------------------------------------------------------------------------------------------------- estimated time


def _prices(specs: Sequence[Spec], items: Sequence[Item], machine: Machine) -> dict[_Key, _Priced]:
    layouts, found = {specs[item.param].layout for item in items}, dict[_Key, _Priced]()
    spreads = {layout: _spread_of(layout, machine.per_node) for layout in layouts}
    products_of = cache(_products_of)  # cached, because many matrices have equal shapes
    for item in items:
        layout, owner = specs[item.param].layout, item.owners[0]
        spread = spreads[layout]._replace(replicas=1, near=1) if len(item.owners) > 1 else spreads[layout]
        batch = products_of(item.rows, item.cols, item.choice.dtype.itemsize, item.cost, machine)
        found[item.key] = _Priced(owner, layout.replica_of[owner], item.numel, *batch, spread)
    return found


def _spread_of(layout: ParamLayout, per_node: int) -> _Spread:
    """Count the ranks of a layout in total and per node of `per_node` ranks. Only the first replica and the copies of
    the parameter's first piece are counted. The others are assumed to be alike."""
    first = next(iter(layout.keepers.values()), layout.ranks[:1])
    replica = [rank for rank in layout.ranks if layout.pieces[rank] and layout.replica_of[rank] == 0]
    on_nodes = (Counter(rank // per_node for rank in ranks).values() for ranks in (replica, first))
    inside, near = (max(counts, default=1) for counts in on_nodes)
    return _Spread(len(replica), inside, len(first), near)


class _Spread(NamedTuple):
    """Counts of the ranks that store the matrices of a layout.

    Attributes:
        holders: Number of ranks in one replica.
        inside: Largest number of ranks of one replica on the same node.
        replicas: Number of replicas.
        near: Largest number of replicas on the same node.
    """

    holders: int
    inside: int
    replicas: int
    near: int


class _Priced(NamedTuple):
    """Properties of a matrix from which the time to exchange and orthogonalize it is estimated.

    Attributes:
        owner: Rank that orthogonalizes the matrix. If one rank in each replica does so, the first of these ranks.
        replica: Index of the owner's replica.
        numel: Number of elements.
        batch: Number of matrices in a full batch.
        ns: Time in nanoseconds to orthogonalize a batch. A partly filled batch takes as long as a full one.
        spread: Counts of the ranks that store the matrix, in total and per node.
    """

    owner: int
    replica: int
    numel: int
    batch: int
    ns: int
    spread: _Spread


def _products_of(rows: int, cols: int, itemsize: int, cost: int, machine: Machine) -> tuple[int, int]:
    """Estimate the batch size for rows x cols matrices, and the time in nanoseconds to orthogonalize a batch. Matrix
    products use a dtype of `itemsize` bytes. Orthogonalizing one matrix takes `cost` floating point operations."""
    short = min(rows, cols)
    rate = {2: machine.half, 4: machine.single, 8: machine.double}[itemsize]
    # The batch size is limited so that the Gram matrices of a batch have at most 3 * 2**20 elements (see
    # `orthogonalize.batch_size`).
    size = 1 if not machine.launch else min(max((3 << 20) // short**2, 1), 64)
    size = 1 << (size.bit_length() - 1)
    # The FLOP rate of a batched matrix product is between the rate for one matrix of the batch and the rate for a
    # single product of the batch's total size. It is estimated as the geometric mean of these two rates. All rates are
    # shares of the peak rate.
    share = isqrt(machine.share(short**3) * machine.share(size * short**3))
    # a batch takes at least as long as its kernel launches, about 30 for five Newton-Schulz steps
    return size, max(size * cost * 1000 // (rate * share), 30 * machine.launch)


class _Timed(NamedTuple):
    """Estimated times (in nanoseconds) and memory use of a bucket.

    Attributes:
        work: Times of all phases of the bucket except orthogonalization, on the rank that orthogonalizes the fewest
            elements.
        computed: Dict from each rank that orthogonalizes matrices to the time of the rank's matrix products and of the
            copies before and after them.
        taken: Largest number of elements in the buffers of any rank. The buffers contain the matrices that the rank
            orthogonalizes and the results that it receives from other replicas.
    """

    work: clock.BucketTimes
    computed: Mapping[int, int]
    taken: int


def _timed(matrices: Sequence[_Priced], itemsize: int, machine: Machine) -> _Timed:
    """Estimate times and memory use of a bucket of matrices, whose elements are sent as `itemsize` bytes each."""
    # The first three counters have one value for each rank that orthogonalizes matrices: `computed` is the time of its
    # computation in nanoseconds, `came` the number of elements that it receives, and `kept` the number of elements that
    # it already stores. `passed_on` is the number of elements that each replica sends to other replicas.
    computed, came, kept, passed_on = (Counter[int]() for _ in range(4))
    for (owner, size, ns), count in Counter((one.owner, one.batch, one.ns) for one in matrices).items():
        computed[owner] += -(-count // size) * ns
    # `sent` is the number of elements that each rank sends in the gather, and `relayed` is the number of elements of
    # results that each rank receives from another replica.
    sent = relayed = 0
    for owner, replica, numel, _, _, (holders, _, replicas, _) in matrices:
        came[owner] += numel - numel // holders
        kept[owner] += numel // holders
        passed_on[replica] += numel * (replicas - 1) // holders
        sent += numel // (holders * replicas)
        relayed += (numel - numel // replicas) // holders
    for owner, elements in came.items():
        computed[owner] += 4 * itemsize * elements * 1000 // machine.memory
    most = max(one.spread for one in matrices)
    # If every rank owns (orthogonalizes) matrices, a rank keeps its parts of the matrices that it owns, and sends only
    # its parts of other matrices.
    if len(kept) >= most.holders * most.replicas:
        sent -= min(sent, min(kept.values()))
    size = itemsize * max(sent, *came.values())
    gather = _exchange_ns(size, most.holders, most.inside, machine) if most.holders > 1 else None
    relay: int | None = None
    # time, in nanoseconds, to copy results to the send buffer of the relay (the exchange with other replicas)
    copied = 0
    if most.replicas > 1:
        replicas, near = max(one.spread[2:] for one in matrices)
        size = itemsize * max(relayed, *passed_on.values())
        relay, copied = _exchange_ns(size, replicas, near, machine), 2 * size * 1000 // machine.memory
    held = 1 + kept.total()
    idle, own, half = relayed, max(0, held - sent - relayed), machine.bucket // 2

    # Estimate the time, in nanoseconds, of a phase that processes `elements` elements: the time of the memory traffic
    # (`each` bytes per element), plus the phase's share of the CPU overhead per matrix.
    def passed(each: int, elements: int) -> int:
        return each * elements * 1000 // machine.memory + machine.matrix * len(matrices) * elements // (2 * held)

    work = clock.BucketTimes(
        key=0,
        pack=half + passed(_PACKS, sent),
        gather=gather,
        orthogonalize=0,
        scatter=gather,
        apply=half + passed(_APPLIES, held - idle) + copied,
        fill=passed(_PACKS, own) + passed(_FILLS, idle),
        relay=relay,
        finish=0 if relay is None else half + passed(_APPLIES, idle),
    )
    return _Timed(work, computed, max(came[owner] + kept[owner] for owner in kept) + relayed)


def _exchange_ns(size: int, ranks: int, inside: int, machine: Machine) -> int:
    """Estimate the duration, in nanoseconds, of an exchange among `ranks` ranks, of which `inside` are on the same
    node. Each rank sends `size` bytes, divided evenly among the other ranks."""
    others = max(1, ranks - 1)
    near, far = size * (inside - 1) // others, size * (ranks - inside) // others
    latency = (machine.across if ranks > inside else machine.inside) + machine.peer * (ranks - 1)
    return latency + max(near * 1000 // machine.link, far * 1000 // machine.network)


def _step_ns(buckets: Sequence[_Timed]) -> int:
    """Estimate the duration of a step, in nanoseconds, if buckets (sets of matrices) are processed in the given order
    (see [Note: the price of buckets])."""
    slowest = [max(one.computed, key=lambda rank: (one.computed[rank], rank)) for one in buckets]
    ranks = [
        [one.work._replace(key=at, orthogonalize=one.computed.get(rank, 0)) for at, one in enumerate(buckets)]
        for rank in dict.fromkeys(slowest)
    ]
    return int(max(course.end for course in clock.Course.simulate(ranks, 0, [0] * len(ranks), 0.5)))
