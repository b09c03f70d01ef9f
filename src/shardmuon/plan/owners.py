"""Owners: which rank may orthogonalize a matrix, and which one does. Pure.

[Note: balance within a set]
    Ranks that share one set of tensors may share others with other ranks, of which the first know nothing. So owners
    are balanced among the tensors of one set, by what all of its ranks know.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from shardmuon.layout.table import Ranks
from shardmuon.plan.items import Item, Key, Spec
from shardmuon.plan.machines import Machine

_UNEVEN = 1.03  # load of the most loaded rank over the mean from which on better owners are searched for
_BISECTIONS = 12
_GOOD_ENOUGH = 1.01  # of the lower bound; not worth a search below


def draft_of(spec: Spec, param: int, matrix: int) -> Item:
    """A matrix with, as owners, all of which one is to orthogonalize it."""
    layout = spec.layout
    rows, cols = layout.view.matrices[matrix][:2]
    able = layout.whole_on[matrix] or tuple(layout.tiles[matrix])
    # an owner needs what stages keep, which of a stack of experts only those ranks have that store some of the matrix
    kept = [one.layout.tiles[matrix] for one in spec.kept]
    if kept:
        able = tuple(rank for rank in able if all(rank in of_stage for of_stage in kept))
    why = spec.reasons[matrix] if spec.reasons else ""
    return Item(param, matrix, rows, cols, able, "owner", spec.hows[matrix], spec.costs[matrix], reason=why)


def with_owners(specs: Sequence[Spec], drafts: Sequence[Item], ranks: Ranks, machine: Machine) -> list[Item]:
    """The matrices of a set, each with one owner."""
    owners = _owners(specs, drafts, ranks, machine.per_node)
    _hand_on(specs, drafts, owners, ranks, machine)
    return [_placed(specs[item.param], item, (owner,)) for item, owner in zip(drafts, owners, strict=True)]


def _placed(spec: Spec, item: Item, owners: Ranks) -> Item:
    """A matrix with its owners; nothing of it moves if they have all that anybody has of it."""
    having = (spec.layout, *(kept.layout for kept in spec.kept if kept.travels))
    stays = all(layout.tiles[item.matrix].keys() == set(owners) for layout in having)
    return item._replace(owners=owners, route="local" if stays else item.route)


def _owners(specs: Sequence[Spec], drafts: Sequence[Item], ranks: Ranks, per_node: int) -> list[int]:
    """The owner of each matrix of a set: those without a choice first, then the costliest to the rank with least work;
    of equal ones to that in the replica that passes on least, then on another node than the one before."""
    place = {rank: at for at, rank in enumerate(ranks)}
    owners = [item.owners for item in drafts]
    able = {of: np.array([place[rank] for rank in of]) for of in dict.fromkeys(owners)}
    spread = {of: np.array([place[r] for r in sorted(of, key=lambda r: (r % per_node, r))]) for of in able}
    layouts = dict.fromkeys(specs[item.param].layout for item in drafts)
    replica = {layout: np.array([layout.replica_of[rank] for rank in ranks]) for layout in layouts}
    work, moved = np.zeros(len(ranks), np.int64), np.zeros(len(ranks), np.int64)  # of ranks; of replicas
    order = sorted(range(len(drafts)), key=lambda n: (len(owners[n]) > 1, -drafts[n].cost, n))
    found = [0] * len(drafts)
    for n in order:
        at, of_rank = spread[owners[n]], replica[specs[drafts[n].param].layout]
        at = at[work[at] == work[at].min()]
        passes_on = moved[of_rank[at]]
        found[n] = int(at[passes_on.argmin()])
        work[found[n]] += drafts[n].cost
        moved[of_rank[found[n]]] += drafts[n].numel
    if int(work.max()) * len(ranks) > _UNEVEN * int(work.sum()):
        free = [n for n in order if len(owners[n]) > 1]
        start = [0] * len(ranks)
        for n in order[: len(order) - len(free)]:
            start[found[n]] += drafts[n].cost
        costs = [drafts[n].cost for n in free]
        better = fitted(costs, [able[owners[n]] for n in free], start, int(work.max()))
        for n, owner in zip(free, better, strict=False):  # there may be none
            found[n] = owner
    return [ranks[at] for at in found]


def fitted(
    costs: Sequence[int], candidates: Sequence[Sequence[int] | np.ndarray], start: Sequence[int], most: int
) -> list[int]:
    """The owner of each item so that the most loaded rank has less than `most`; empty if none is found.

    MULTIFIT: a bisection on the load for which first-fit decreasing succeeds (Coffman, Garey and Johnson 1978). With
    three or four matrices a rank it often reaches the lower bound where the least loaded rank is 10 % over it.

    Args:
        costs: Cost of each item.
        candidates: For each item, the numbers of the ranks that may own it.
        start: What each rank has to do already.
        most: The load to stay below.
    """
    loads, able = np.array(start, dtype=np.int64), list(map(np.asarray, candidates))
    low = max(-(-(int(loads.sum()) + sum(costs)) // len(loads)), max(costs, default=0), int(loads.max()))
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    best, high = list[int](), most
    for _ in range(_BISECTIONS):
        if high <= low * _GOOD_ENOUGH:
            break
        limit = (low + high) // 2
        found = _first_fit(costs, able, order, loads.copy(), limit)
        if found:
            best, high = found, limit
        else:
            low = limit + 1
    return best


def _first_fit(
    costs: Sequence[int], able: Sequence[np.ndarray], order: Sequence[int], load: np.ndarray, limit: int
) -> list[int]:
    """Each item to the first rank that stays within `limit`; empty if some item fits nowhere."""
    owners = [0] * len(costs)
    for item in order:
        fits = load[able[item]] + costs[item] <= limit
        if not fits.any():
            return []
        owners[item] = int(able[item][fits.argmax()])
        load[owners[item]] += costs[item]
    return owners


def _hand_on(specs: Sequence[Spec], drafts: Sequence[Item], owners: list[int], ranks: Ranks, machine: Machine) -> None:
    """Change the owners of matrices that late ranks alone store for others of the node: all have experts, and few a
    dense matrix.

    Only of what takes longer at the machine's peak than its way there and back, and of which stages keep nothing.
    """
    loads = dict.fromkeys(ranks, 0)
    alone: dict[int, list[tuple[int, int]]] = {rank: [] for rank in ranks}  # cost and number of what each may hand on
    for n, (item, owner) in enumerate(zip(drafts, owners, strict=True)):
        spec = specs[item.param]
        loads[owner] += item.cost
        itemsize = spec.itemsizes[item.matrix] if spec.itemsizes else 4
        worth = item.cost * machine.link > 2 * itemsize * item.numel * machine.half * 1000
        if worth and not spec.kept and len(item.owners) == 1 and len(spec.layout.tiles[item.matrix]) == 1:
            alone[owner].append((item.cost, n))
    late = _UNEVEN * sum(loads.values()) / len(loads)
    for node in {rank // machine.per_node for rank in ranks if alone[rank] and loads[rank] > late}:
        mates = [rank for rank in ranks if rank // machine.per_node == node]
        for rank in mates:
            alone[rank].sort()
        while True:
            mate, rank = (of(mates, key=lambda rank: (loads[rank], rank)) for of in (min, max))
            if loads[rank] <= late or not alone[rank] or loads[mate] + alone[rank][-1][0] >= loads[rank]:
                break
            cost, n = alone[rank].pop()
            owners[n] = mate
            loads[mate] += cost
            loads[rank] -= cost


def each_for_itself(specs: Sequence[Spec], drafts: Sequence[Item], per_node: int) -> dict[Key, Item]:
    """Key -> matrix with an owner in each replica: those that lie on the replicas on which most of the work lies. The
    owners in the others are those that store what the owner in the first one does."""
    work = Counter[tuple[Ranks, ...]]()
    for item in drafts:
        work[specs[item.param].layout.replicas] += item.cost
    replicas = max(work, key=lambda of: (work[of], of), default=())
    if len(replicas) < 2:
        return {}
    first, inside = set(replicas[0]), list[Item]()
    able = {owners: tuple(filter(first.__contains__, owners)) for owners in {item.owners for item in drafts}}
    for item in drafts:
        ranks = able[item.owners]
        if ranks and specs[item.param].layout.replicas == replicas:
            inside.append(item._replace(owners=ranks))
    candidates, found = {item.key: item.owners for item in drafts}, dict[Key, Item]()
    for item, owner in zip(inside, _owners(specs, inside, replicas[0], per_node), strict=True):
        layout = specs[item.param].layout
        owners = layout.keepers[layout.tiles[item.matrix][owner][0].held.piece]
        if set(owners) <= set(candidates[item.key]):
            found[item.key] = _placed(specs[item.param], item, owners)
    return found
