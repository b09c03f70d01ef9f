"""Choice of the owner of each matrix, the rank that orthogonalizes it. Pure functions.

[Note: balance within a set]
    Work is balanced separately within each set of ranks that share tensors. A rank can belong to several sets, but the
    other ranks of one set do not know its work in the others. All ranks of a set must choose the same owners, so the
    choice uses only what all of them know.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from shardmuon.comm.groups import Ranks
from shardmuon.plan.items import Item, Key, Spec
from shardmuon.price.machines import Machine

_LATE = 1.03  # a rank with more than this multiple of the mean load gives matrices to other ranks


def draft_of(spec: Spec, param: int, matrix: int) -> Item:
    """Make the item of a matrix. Its `owners` are all candidates; one of them is chosen later."""
    layout = spec.layout
    rows, cols = layout.view.matrices[matrix][:2]
    able = layout.whole_on[matrix] or tuple(layout.tiles[matrix])
    # an owner needs the state values of its matrix; for a sharded stack of experts, only some ranks store them
    for kept in spec.kept:
        able = tuple(rank for rank in able if rank in kept.layout.tiles[matrix])
    why = spec.reasons[matrix] if spec.reasons else ""
    return Item(param, matrix, rows, cols, able, "owner", spec.hows[matrix], spec.costs[matrix], why)


def with_owners(specs: Sequence[Spec], drafts: Sequence[Item], ranks: Ranks, machine: Machine) -> list[Item]:
    """Choose one owner for each matrix that a set of ranks shares. `drafts`: items whose `owners` are candidates."""
    owners = _owners(specs, drafts, ranks, machine.per_node)
    _hand_on(specs, drafts, owners, ranks, machine)
    return [_placed(specs[item.param], item, (owners[item.key],)) for item in drafts]


def _placed(spec: Spec, item: Item, owners: Ranks) -> Item:
    """Give a matrix its owners. The route becomes "local" if no other rank stores any element of the matrix or of
    state tensors that owners would send."""
    having = (spec.layout, *(kept.layout for kept in spec.kept if kept.travels))
    stays = all(layout.tiles[item.matrix].keys() == set(owners) for layout in having)
    return item._replace(owners=owners, route="local" if stays else item.route)


def _owners(specs: Sequence[Spec], drafts: Sequence[Item], ranks: Ranks, per_node: int) -> dict[Key, int]:
    """Choose the owner of each matrix that a set of ranks shares. Matrices with a single candidate come first, then
    the costliest. Each goes to the candidate with the least work so far. Among candidates with equal work, the replica
    that has to relay the fewest elements to other replicas is preferred, then ranks alternate between nodes."""
    ranks = tuple(sorted(ranks, key=lambda rank: (rank % per_node, rank)))
    place = {rank: at for at, rank in enumerate(ranks)}
    able = {of: np.array(sorted(place[rank] for rank in of)) for of in {item.owners for item in drafts}}
    layouts = {specs[item.param].layout for item in drafts}
    replica = {layout: np.array([layout.replica_of[rank] for rank in ranks]) for layout in layouts}
    work, moved = np.zeros(len(ranks), np.int64), np.zeros(len(ranks), np.int64)  # FLOP per rank; elements per replica
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
    """Reassign matrices of overloaded ranks to other ranks of their node, by changing `owners`. Only matrices that are
    stored by a single rank are reassigned. This balances models in which all ranks store experts, but only a few also
    store a dense matrix."""
    # floating point operations of each rank; (cost, key) of each rank's movable matrices
    loads, alone = dict.fromkeys(ranks, 0), defaultdict[int, list[tuple[int, Key]]](list)
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
    """True if it pays to orthogonalize a matrix on a rank that does not store it. The matrix must be stored by a single
    rank, have no state tensor with values per matrix, and take longer to orthogonalize at the machine's peak rate than
    to send to another rank and back."""
    way = 2 * spec.itemsizes[item.matrix] * item.numel
    worth = item.cost * machine.link > way * machine.half * 1000
    return worth and not spec.kept and len(item.owners) == len(spec.layout.tiles[item.matrix]) == 1


def each_for_itself(specs: Sequence[Spec], drafts: Sequence[Item], per_node: int) -> dict[Key, Item]:
    """Choose an owner in every replica, so that each replica orthogonalizes its matrices by itself. Owners are chosen
    in the first replica; in the others, the rank that stores the same piece becomes the owner. If layouts differ in
    their replicas, only matrices on the replicas with the most work are returned, by their keys."""
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
