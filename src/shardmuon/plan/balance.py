"""Owners by a search, where giving each matrix to the least loaded rank leaves some far above the others. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

_BISECTIONS = 12
UNEVEN = 1.03  # load of the most loaded rank over the mean from which on better owners are searched for
_GOOD_ENOUGH = 1.01  # of the lower bound; not worth a search below


def fitted(costs: Sequence[int], candidates: Sequence[Sequence[int]], start: Sequence[int], most: int) -> list[int]:
    """The owner of each item so that the most loaded rank has less than `most`; empty if none is found.

    MULTIFIT: a bisection on the load for which first-fit decreasing succeeds (Coffman, Garey and Johnson 1978). With
    three or four matrices a rank it often reaches the lower bound where the least loaded rank is 10 % over it.

    Args:
        costs: Cost of each item.
        candidates: For each item, the numbers of the ranks that may own it.
        start: What each rank has to do already.
        most: The load to stay below.
    """
    loads = np.array(start, dtype=np.int64)
    low = max(-(-(int(loads.sum()) + sum(costs)) // len(loads)), max(costs, default=0), int(loads.max()))
    as_array = {id(c): np.asarray(c) for c in candidates}  # items share candidates: convert each one once
    ids = [as_array[id(c)] for c in candidates]
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    best, high = list[int](), most
    for _ in range(_BISECTIONS):
        if high <= low * _GOOD_ENOUGH:
            break
        limit = (low + high) // 2
        found = _first_fit(costs, ids, order, loads.copy(), limit)
        if found:
            best, high = found, limit
        else:
            low = limit + 1
    return best


def _first_fit(
    costs: Sequence[int], ids: Sequence[np.ndarray], order: Sequence[int], load: np.ndarray, limit: int
) -> list[int]:
    """Each item to the first rank that stays within `limit`; empty if some item fits nowhere."""
    owners = [0] * len(costs)
    for item in order:
        fits = load[ids[item]] + costs[item] <= limit
        if not fits.any():
            return []
        owners[item] = int(ids[item][fits.argmax()])
        load[owners[item]] += costs[item]
    return owners


def handed_on(
    loads: Mapping[int, int], alone: Mapping[int, Sequence[tuple[int, int]]], per_node: int
) -> dict[int, int]:
    """Pairs of an item and a rank of the same node that takes it from one with more to do.

    Args:
        loads: Rank -> what it has to do.
        alone: Rank -> cost and number of each item that it may hand on.
        per_node: Ranks of a node.
    """
    found, left = dict[int, int](), dict(loads)
    late = UNEVEN * sum(left.values()) / len(left)
    for node in {rank // per_node for rank in alone if left[rank] > late}:
        mates = [rank for rank in left if rank // per_node == node]
        items = {rank: sorted(alone.get(rank, ())) for rank in mates}
        while True:
            mate, rank = (of(mates, key=lambda rank: (left[rank], rank)) for of in (min, max))
            if left[rank] <= late or not items[rank] or left[mate] + items[rank][-1][0] >= left[rank]:
                break
            cost, number = items[rank].pop()
            found[number], left[mate], left[rank] = mate, left[mate] + cost, left[rank] - cost
    return found
