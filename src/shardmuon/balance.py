"""Who orthogonalizes what: the cost of a matrix, and owners chosen so that no rank works much longer than another.

Pure: same input, same owners on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def newton_schulz_flops(rows: int, cols: int, steps: int) -> int:
    """Floating point operations of `steps` quintic Newton-Schulz steps on a rows x cols matrix.

    Three products a step on the short side m <= n: X X^T (2 m^2 n), A A (2 m^3), B X (2 m^2 n).
    """
    short, long = min(rows, cols), max(rows, cols)
    return steps * (4 * short * short * long + 2 * short**3)


def assign_owners(
    costs: Sequence[int],
    candidates: Sequence[tuple[int, ...]],
    num_ranks: int,
    loads: Sequence[int] | None = None,
) -> list[int]:
    """Longest processing time first: the dearest item goes to the least loaded of its candidates, then the next.

    Args:
        costs: Cost of each item, any unit.
        candidates: For each item the indices (0 .. num_ranks-1) of the ranks that may own it, ascending.
        num_ranks: Number of ranks.
        loads: What each rank has to do already, in the same unit. Default: nothing.

    Returns:
        The owner's index for each item. Ties go to the lowest index, so every rank computes the same list.
    """
    load = np.zeros(num_ranks, dtype=np.int64) if loads is None else np.array(loads, dtype=np.int64)
    everyone = tuple(range(num_ranks))
    as_array: dict[int, np.ndarray] = {}  # candidate tuples are shared between items: convert each one once
    owners = [0] * len(costs)
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        allowed = candidates[item]
        if allowed == everyone:
            owner = int(load.argmin())
        else:
            ids = as_array.setdefault(id(allowed), np.asarray(allowed))
            owner = int(ids[load[ids].argmin()])
        owners[item] = owner
        load[owner] += costs[item]
    return owners
