"""Plans in which large matrices are split among a few owners each: priced, and not offered (docs/adr/0031).

[Note: the split that is priced]
    Each of some owners is sent an equal share of a matrix's rows. They send each other their rows, and from then on
    each computes its share of the rows of every product and sends it to the others, who need all of it for the next
    one. Each sends its rows of the update back. So an owner has its share of the operations and of what is gathered
    and scattered, and all of the matrix in memory. Owners of a matrix are priced as ranks of one node, where whoever
    offers this would have to put them; here they are balanced as all owners are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from shardmuon.layout.table import ParamLayout, Ranks
from shardmuon.layout.views import Ints, Matrix
from shardmuon.plan.plan import Item, Plan, Policy, Spec, make_plan

_ENOUGH = 1.1  # times the bound on an owner's load: a matrix that takes no more is not split further


class Share(NamedTuple):
    """A matrix of which an item of a plan is one owner's share: its shape, and how many owners it has."""

    rows: int
    cols: int
    owners: int


Shares = Mapping[tuple[int, int], Share]  # (param, matrix) of the plan's items that are shares


def split(plan: Plan, policy: Policy, most: int) -> tuple[Plan, Shares]:
    """The plan with large matrices split, see [Note: the split that is priced].

    What takes more than the mean load of its set of ranks gets two owners, or the next power of two, until each has
    no more than that or there are `most`; fewer, if the largest matrix bounds the step all the same. A plan with
    matrices on the Gram route, which stay on their holders, is left alone.

    Args:
        plan: As it is.
        policy: That made it.
        most: Owners of one matrix, at most.

    Returns:
        The plan, in which an owner's share is an item of its own, and what those are shares of.
    """
    owners = _owners(plan, most)
    if not owners:
        return plan, {}
    layouts: dict[tuple[int, Ints], ParamLayout] = {}
    specs, shares = list[Spec](), dict[tuple[int, int], Share]()
    for param, spec in enumerate(plan.specs):
        matrices = spec.layout.view.matrices
        nums = tuple(owners.get((param, matrix), 1) for matrix in range(len(matrices)))
        if max(nums, default=1) == 1:
            specs.append(spec)
            continue
        key = id(spec.layout), nums
        if key not in layouts:
            parts = (part for matrix, num in zip(matrices, nums, strict=True) for part in _rows_of(matrix, num))
            view = replace(spec.layout.view, matrices=tuple(parts))
            layouts[key] = ParamLayout(view, spec.layout.ranks, spec.layout.held)
        of_part = [matrix for matrix, num in enumerate(nums) for _ in range(num)]
        shares.update(
            ((param, part), Share(*matrices[matrix][:2], nums[matrix]))
            for part, matrix in enumerate(of_part)
            if nums[matrix] > 1
        )
        specs.append(
            spec._replace(
                layout=layouts[key],
                hows=tuple(spec.hows[matrix] for matrix in of_part),
                costs=tuple(-(-spec.costs[matrix] // nums[matrix]) for matrix in of_part),
                itemsizes=tuple(spec.itemsizes[matrix] for matrix in of_part) if spec.itemsizes else (),
                kept=(),  # a few numbers, by whole matrices
                grams=(),
                reasons=(),
            )
        )
    return make_plan(specs, policy), shares


def _owners(plan: Plan, most: int) -> dict[tuple[int, int], int]:
    """(param, matrix) -> how many owners it gets, of what gets several."""
    sets: dict[Ranks, list[Item]] = {}
    routes = {item.route for item in plan.items}
    for item in plan.items if "gram" not in routes else ():
        if item.route == "owner":
            sets.setdefault(plan.specs[item.param].layout.ranks, []).append(item)
    found = {}
    for ranks, items in sets.items():
        mean = sum(item.cost * len(item.owners) for item in items) / len(ranks)
        largest = max(item.cost for item in items)
        bound = _ENOUGH * max(mean, largest / most)
        for item in items:
            num, matrix = 1, plan.specs[item.param].layout.view.matrices[item.matrix]
            while item.cost > num * bound and 2 * num <= min(most, len(ranks)) and _row_dim(matrix) is not None:
                num *= 2
            if 1 < num <= item.rows:
                found[item.param, item.matrix] = num
    return found


def _row_dim(matrix: Matrix) -> int | None:
    """The dim along which its rows lie; None if they lie along several."""
    dims = zip(matrix.sizes, matrix.strides, strict=True)
    return next((d for d, (size, stride) in enumerate(dims) if (size, stride) == (matrix.rows, matrix.cols)), None)


def _rows_of(matrix: Matrix, num: int) -> list[Matrix]:
    """Cut a matrix by its rows into `num` parts."""
    d = _row_dim(matrix)
    if num == 1 or d is None:
        return [matrix]
    found = []
    for part in range(num):
        first, end = (matrix.rows * at // num for at in (part, part + 1))
        start = (*matrix.start[:d], matrix.start[d] + first, *matrix.start[d + 1 :])
        sizes = (*matrix.sizes[:d], end - first, *matrix.sizes[d + 1 :])
        found.append(Matrix(end - first, matrix.cols, start, sizes, matrix.strides))
    return found
