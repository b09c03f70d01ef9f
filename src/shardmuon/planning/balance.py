"""Who orthogonalizes what: owners chosen so that no rank works much longer than another.

Pure: same input, same owners on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def assign_owners(
    costs: Sequence[int],
    candidates: Sequence[tuple[int, ...]],
    num_ranks: int,
    loads: Sequence[int] | None = None,
) -> list[int]:
    """Choose an owner for each item so that the most loaded rank is loaded as little as possible.

    Longest processing time first (the dearest item to the least loaded rank), and where that leaves more than
    `_GOOD_ENOUGH` over the lower bound, MULTIFIT: a bisection on the load for which first-fit decreasing succeeds
    (Coffman, Garey and Johnson 1978). With three or four matrices a rank MULTIFIT often reaches the bound where the
    first rule is 10% over it.

    Args:
        costs: Cost of each item, any unit.
        candidates: For each item the indices (0 .. num_ranks-1) of the ranks that may own it, ascending.
        num_ranks: Number of ranks.
        loads: What each rank has to do already, in the same unit. Default: nothing.

    Returns:
        The owner's index for each item. Ties go to the lowest index, so every rank computes the same list.
    """
    start = np.zeros(num_ranks, dtype=np.int64) if loads is None else np.array(loads, dtype=np.int64)
    as_array = {c: np.asarray(c) for c in set(candidates)}  # items share candidate tuples: convert each one once
    ids = [as_array[c] for c in candidates]
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    best, high = _least_loaded_first(costs, ids, order, start)
    low = max(-(-(int(start.sum()) + sum(costs)) // num_ranks), max(costs, default=0), int(start.max()))
    for _ in range(_BISECTIONS):
        if high <= low * _GOOD_ENOUGH:
            break
        limit = (low + high) // 2
        found = _first_fit(costs, ids, order, start, limit)
        if found is None:
            low = limit + 1
        else:
            best, high = found
    return best


_GOOD_ENOUGH = 1.01  # of the lower bound; not worth a search below
_BISECTIONS = 12


def _least_loaded_first(
    costs: Sequence[int], ids: Sequence[np.ndarray], order: Sequence[int], start: np.ndarray
) -> tuple[list[int], int]:
    load, owners = start.copy(), [0] * len(costs)
    for item in order:
        owners[item] = int(ids[item][load[ids[item]].argmin()])
        load[owners[item]] += costs[item]
    return owners, int(load.max())


def _first_fit(
    costs: Sequence[int], ids: Sequence[np.ndarray], order: Sequence[int], start: np.ndarray, limit: int
) -> tuple[list[int], int] | None:
    """Each item to the first rank that stays within `limit`; None if some item fits nowhere."""
    load, owners = start.copy(), [0] * len(costs)
    for item in order:
        fits = load[ids[item]] + costs[item] <= limit
        if not fits.any():
            return None
        owners[item] = int(ids[item][fits.argmax()])
        load[owners[item]] += costs[item]
    return owners, int(load.max())
