"""Deal matrices into buckets: what moves together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardmuon.planning.routes import Route
from shardmuon.planning.types import (
    Bucket,
    ParamSpec,
    Policy,
    WorkItem,
    is_narrow,
)

_BucketKey = tuple[bool, int, str, Route, bool, int]  # exchange, ranks' number, kind, route, wire, number
_LEAST = 4  # buckets: one travels to its owners, one is orthogonalized, one travels back, and one is left


def deal_buckets(items: Sequence[WorkItem], specs: Sequence[ParamSpec], policy: Policy) -> tuple[Bucket, ...]:
    """Deal each owner's items, sorted so that equal shapes stand together, into buckets of at most `bucket_bytes`.

    Owners have nearly equal work, so bucket i holds nearly the same share of every owner's list: all work in it. Where
    that makes too few buckets for exchanges to hide behind products, each is cut up, see `_cut_up`.
    """
    lines: dict[tuple[bool, int, str, Route, bool, tuple[int, ...]], list[int]] = {}
    groups: list[tuple[int, ...]] = []  # the groups of ranks, which keys name by number: they are slow to hash
    numbers: dict[tuple[int, ...], int] = {}
    of_layout: dict[int, int] = {}

    def number_of(ranks: tuple[int, ...]) -> int:
        if ranks not in numbers:
            numbers[ranks] = len(groups)
            groups.append(ranks)
        return numbers[ranks]

    for index, item in enumerate(items):
        spec = specs[item.param]
        exchange = item.route in ("owner", "gram")
        if exchange and id(spec.layout) not in of_layout:
            of_layout[id(spec.layout)] = number_of(spec.layout.ranks)
        ranks = of_layout[id(spec.layout)] if exchange else number_of(item.owners)
        narrow = is_narrow(item.how)  # a bucket has one wire dtype, see `Kernel.wire_of`
        lines.setdefault((exchange, ranks, spec.kind, item.route, narrow, item.owners), []).append(index)
    dealt: dict[_BucketKey, list[int]] = {}
    sizes: dict[int, int] = {}
    for (exchange, ranks, kind, route, narrow, _), line in lines.items():
        line.sort(
            key=lambda i: (-items[i].cost, items[i].rows, items[i].cols, items[i].how, specs[items[i].param].batch, i)
        )
        number, filled = 0, 0
        for index in line:
            size = items[index].rows * items[index].cols * policy.wire_bytes_of(items[index].how)
            if route == "gram":
                # What a rank keeps of all owners' items, and the triangles that an owner is sent.
                triangles = len(groups[ranks]) * min(items[index].rows, items[index].cols) ** 2 // 2
                size = max(items[index].rows * items[index].cols, triangles) * policy.gram_bytes
            if filled and filled + size > policy.bucket_bytes:
                number, filled = number + 1, 0
            filled += size
            sizes[index] = size
            dealt.setdefault((exchange, ranks, kind, route, narrow, number), []).append(index)
    dealt = _cut_up(dealt, sizes, [(-item.cost, item.rows, item.cols) for item in items], policy.bucket_bytes)
    # Exchanges come first and in an order that depends on nothing but their own content: two ranks that share two
    # groups run them alike even if each also knows items that the other does not.
    order = sorted(dealt, key=lambda key: (not key[0], len(groups[key[1]]), groups[key[1]], *key[2:]))
    return tuple(
        Bucket(
            groups[key[1]],
            tuple(sorted(dealt[key])),
            key[2],
            key[0],
            key[3],
            policy.gram_bytes if key[3] == "gram" else policy.wire_bytes_of(items[dealt[key][0]].how),
        )
        for key in order
    )


def _cut_up(
    dealt: Mapping[_BucketKey, list[int]],
    sizes: Mapping[int, int],  # item -> bytes
    order: Sequence[tuple[int, int, int]],  # item -> what comes first, and what runs as one batch
    bucket_bytes: int,
) -> dict[_BucketKey, list[int]]:
    """Four buckets for ranks that exchange four times `bucket_bytes` in all, as far as there are matrices for them.

    `bucket_bytes` bounds an owner's part. Where many ranks own few matrices each, one such bucket holds all of a model:
    nothing would travel while something is orthogonalized, and a rank would send its whole momentum at once. So items
    are dealt by their bytes in the whole group then, the largest first: other owners work in other buckets.
    """
    families: dict[tuple[Any, ...], list[_BucketKey]] = {}
    for key in dealt:
        families.setdefault(key[:-1], []).append(key)
    found: dict[_BucketKey, list[int]] = {}
    for family, keys in families.items():
        total = sum(sizes[index] for key in keys for index in dealt[key])
        parts = -(-min(_LEAST, total // bucket_bytes) // len(keys)) if family[0] else 1
        for key in keys:
            line = sorted(dealt[key], key=lambda index: (order[index], index)) if parts > 1 else dealt[key]
            left, part, filled = sum(sizes[index] for index in line), 0, 0
            for index in line:
                if part + 1 < parts and filled * (parts - part) >= left:  # it has its share of what was left for it
                    left, part, filled = left - filled, part + 1, 0
                filled += sizes[index]
                found.setdefault((*key[:-1], key[-1] * max(parts, 1) + part), []).append(index)
    return found
