"""The order of a step's operations. `step.bucket` executes them in this order, and `price.clock` simulates them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from shardmuon.price.clock import Turn

_BESIDE = 4  # number of later buckets during which a relay, the longest exchange (usually between nodes), may run


def turns(relays: Sequence[bool], sets: Sequence[Hashable] = ()) -> Iterator[tuple[Turn, int]]:
    """Yield a rank's operations on its buckets in order, as pairs of an operation and a bucket's index.

    While bucket i is orthogonalized, i + 1 is gathered, i - 1 is scattered, and earlier buckets are relayed.

    This order cannot deadlock. Number the exchanges of all ranks' buckets in the common order of the plan: for bucket
    b, the gather is b, the scatter b + 1/4, and the relay b + 1/2. Before a rank posts an exchange, it waits only for
    exchanges with smaller numbers. So all ranks have posted the exchange with the smallest number that any rank waits
    for. One exception is allowed: if buckets b and b + 1 have the same ranks, the relay of b is posted after the wait
    for the gather of b + 1. This is safe because these ranks have both buckets and none between them. Before a bucket
    with other ranks, the relay is posted first.

    Args:
        relays: For each bucket of this rank, in the plan's order: True if it has a relay.
        sets: The ranks of each bucket. Empty: all buckets have the same ranks.
    """
    num = len(relays)
    for i in range(-1, num + _BESIDE):
        if i + 1 < num:
            yield "begin", i + 1
        early = 0 < i < num and relays[i - 1] and bool(sets) and sets[i] != sets[i - 1]
        both: list[tuple[Turn, int]] = [("compute", i), ("apply", i - 1)]
        for turn, at in both[::-1] if early else both:
            if 0 <= at < num:
                yield turn, at
        if 0 <= i - _BESIDE < num and relays[i - _BESIDE]:
            yield "finish", i - _BESIDE
