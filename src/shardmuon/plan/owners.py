"""Owners: which rank may orthogonalize a matrix, and which one does. Pure.

[Note: balance within a set]
    Ranks that share one set of tensors may share others with other ranks, of which the first know nothing. So owners
    are balanced among the tensors of one set, by what all of its ranks know.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from shardmuon.layout.table import Ranks
from shardmuon.plan.items import Item, Key, Spec
from shardmuon.plan.machines import Machine

_LATE = 1.03  # load of a rank over the mean of its set from which on it hands matrices on


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
    return Item(param, matrix, rows, cols, able, "owner", spec.hows[matrix], spec.costs[matrix], why)


def with_owners(specs: Sequence[Spec], drafts: Sequence[Item], ranks: Ranks, machine: Machine) -> list[Item]:
    """The matrices of a set, each with one owner."""
    owners = _owners(specs, drafts, ranks, machine.per_node)
    _hand_on(specs, drafts, owners, ranks, machine)
    return [_placed(specs[item.param], item, (owners[item.key],)) for item in drafts]


def _placed(spec: Spec, item: Item, owners: Ranks) -> Item:
    """A matrix with its owners; nothing of it moves if they have all that anybody has of it."""
    having = (spec.layout, *(kept.layout for kept in spec.kept if kept.travels))
    stays = all(layout.tiles[item.matrix].keys() == set(owners) for layout in having)
    return item._replace(owners=owners, route="local" if stays else item.route)


def _owners(specs: Sequence[Spec], drafts: Sequence[Item], ranks: Ranks, per_node: int) -> dict[Key, int]:
    """The owner of each matrix of a set: those without a choice first, then the costliest to the rank with least work;
    of equal ones to that in the replica that passes on least, then on another node than the one before."""
    ranks = tuple(sorted(ranks, key=lambda rank: (rank % per_node, rank)))
    place = {rank: at for at, rank in enumerate(ranks)}
    able = {of: np.array(sorted(place[rank] for rank in of)) for of in {item.owners for item in drafts}}
    layouts = {specs[item.param].layout for item in drafts}
    replica = {layout: np.array([layout.replica_of[rank] for rank in ranks]) for layout in layouts}
    work, moved = np.zeros(len(ranks), np.int64), np.zeros(len(ranks), np.int64)  # of ranks; of replicas
    found = dict[Key, int]()
    for item in sorted(drafts, key=lambda item: (len(item.owners) > 1, -item.cost, item.key)):
        at, of_rank = able[item.owners], replica[specs[item.param].layout]
        at = at[work[at] == work[at].min()]
        owner = int(at[moved[of_rank[at]].argmin()])
        work[owner] += item.cost
        moved[of_rank[owner]] += item.numel
        found[item.key] = ranks[owner]
    return found


def _hand_on(
    specs: Sequence[Spec], drafts: Sequence[Item], owners: dict[Key, int], ranks: Ranks, machine: Machine
) -> None:
    """Change the owners of matrices that late ranks alone store for others of the node: all have experts, and few a
    dense matrix."""
    loads, alone = dict.fromkeys(ranks, 0), defaultdict[int, list[tuple[int, Key]]](list)  # costs of what may go
    for item in drafts:
        owner = owners[item.key]
        loads[owner] += item.cost
        if _may_go(specs[item.param], item, machine):
            alone[owner].append((item.cost, item.key))
    late = _LATE * sum(loads.values()) / len(loads)
    for node in {rank // machine.per_node for rank in alone if loads[rank] > late}:
        mates = [rank for rank in ranks if rank // machine.per_node == node]
        while True:
            mate, rank = (of(mates, key=lambda rank: (loads[rank], rank)) for of in (min, max))
            cost, key = max(alone[rank], default=(0, (0, 0)))
            if loads[rank] <= late or not cost or loads[mate] + cost >= loads[rank]:
                break
            alone[rank].remove((cost, key))
            owners[key] = mate
            loads[mate] += cost
            loads[rank] -= cost


def _may_go(spec: Spec, item: Item, machine: Machine) -> bool:
    """True for a matrix that one rank alone stores, of which stages keep nothing, and which takes longer at the
    machine's peak than its way to another rank and back."""
    way = 2 * spec.itemsizes[item.matrix] * item.numel
    worth = item.cost * machine.link > way * machine.half * 1000
    return worth and not spec.kept and len(item.owners) == len(spec.layout.tiles[item.matrix]) == 1


def each_for_itself(specs: Sequence[Spec], drafts: Sequence[Item], per_node: int) -> dict[Key, Item]:
    """Key -> matrix with an owner in each replica: those that lie on the replicas on which most of the work lies. The
    owners in the others are those that store what the owner in the first one does."""
    work = Counter[tuple[Ranks, ...]]()
    for item in drafts:
        work[specs[item.param].layout.replicas] += item.cost
    replicas = max(work, key=lambda of: (work[of], of), default=())
    if len(replicas) < 2:
        return {}
    first = set(replicas[0])
    able = {owners: tuple(rank for rank in owners if rank in first) for owners in {item.owners for item in drafts}}
    mine = [item for item in drafts if able[item.owners] and specs[item.param].layout.replicas == replicas]
    inside = _owners(specs, [item._replace(owners=able[item.owners]) for item in mine], replicas[0], per_node)
    found = dict[Key, Item]()
    for item in mine:
        layout = specs[item.param].layout
        owners = layout.keepers[layout.tiles[item.matrix][inside[item.key]][0].held.piece]
        if set(owners) <= set(item.owners):
            found[item.key] = _placed(specs[item.param], item, owners)
    return found
