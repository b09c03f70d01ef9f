"""Tests that the order in which ranks process their buckets never causes a deadlock, even if buckets have overlapping
sets of ranks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import pytest

from shardmuon.price.clock import turns

# A bucket is described by a pair: the tuple of its ranks, and whether one replica passes the bucket's results on to
# other replicas.
Bucket = tuple[tuple[int, ...], bool]
Exchange = tuple[str, int]  # a pair: the type of an exchange (such as "gather") and the index of its bucket
CROSSED: list[Bucket] = [((0, 2, 3), True), *[((1, 2), False)] * 3, ((2, 3), False)]


def _operations(turn: str, relay: bool) -> list[tuple[str, str]]:
    """Return what a rank does in one phase of a bucket, in the order of `Bound.run`, as pairs of an operation ("post"
    or "wait") and an exchange."""
    return {
        "begin": [("post", "gather")],
        "compute": [("wait", "gather"), ("post", "scatter")],
        "apply": [("wait", "scatter"), *[("post", "relay")] * relay],
        "finish": [("wait", "relay")] * relay,
    }[turn]


def _late(relays: Sequence[bool], sets: Sequence[object]) -> Iterator[tuple[str, int]]:
    """Yield the phases of all buckets in an order that leads to a deadlock: a relay, which passes results on to other
    replicas, is posted only after the next bucket has been orthogonalized."""
    for at in range(len(relays)):
        yield from [("begin", at)] * (at == 0) + [("begin", at + 1)] * (at + 1 < len(relays)) + [("compute", at)]
        yield from [("apply", at - 1), ("finish", at - 1)] * (at > 0)
    yield from [("apply", len(relays) - 1), ("finish", len(relays) - 1)]


def _run(buckets: Sequence[Bucket], order: object = turns) -> tuple[bool, dict[int, list[Exchange]]]:
    """Simulate the exchanges of a step on all ranks. Return whether all ranks finish without a deadlock, and a dict of
    the exchanges that each rank has posted, in order."""
    left: dict[int, list[tuple[str, str, int]]] = {}
    for rank in sorted({rank for of_bucket, _ in buckets for rank in of_bucket}):
        mine = [number for number, (of_bucket, _) in enumerate(buckets) if rank in of_bucket]
        took = order([buckets[n][1] for n in mine], [buckets[n][0] for n in mine])  # type: ignore[operator]
        left[rank] = [(*one, mine[at]) for turn, at in took for one in _operations(turn, buckets[mine[at]][1])]
    posted: dict[int, list[Exchange]] = {rank: [] for rank in left}
    moved = True
    while moved:
        moved = False
        for rank, todo in left.items():
            while todo:
                kind, what, number = todo[0]
                if kind == "wait" and any((what, number) not in posted[other] for other in buckets[number][0]):
                    break
                posted[rank] += [(what, number)] if kind == "post" else []
                todo.pop(0)
                moved = True
    return not any(left.values()), posted


def _family(draw: random.Random) -> list[Bucket]:
    """Return random buckets, ordered as in a plan: first the rank-local buckets, then the buckets of overlapping rank
    sets, grouped by rank set."""
    num = draw.randint(2, 6)
    sets = {tuple(sorted(draw.sample(range(num), draw.randint(2, num)))) for _ in range(draw.randint(1, 6))}
    relays = {ranks: draw.random() < 0.5 for ranks in sets}
    # Rank-local buckets exchange nothing, so they have no results to pass on to other replicas.
    local = [((rank,), False) for rank in range(num) for _ in range(draw.randint(0, 3))]
    return local + [(ranks, relays[ranks]) for ranks in sorted(sets) for _ in range(draw.randint(1, 4))]


def _in_one_order(buckets: Sequence[Bucket], posted: dict[int, list[Exchange]]) -> bool:
    """Return whether all ranks of each rank set post its exchanges in the same order, as process groups require."""
    return all(
        len({tuple(e for e in posted[rank] if buckets[e[1]][0] == ranks) for rank in ranks}) == 1
        for ranks in {of_bucket for of_bucket, _ in buckets}
    )


def test_no_family_of_sets_waits_in_a_circle() -> None:
    draw = random.Random(5)
    for _ in range(2000):
        buckets = _family(draw)
        ended, posted = _run(buckets)
        assert ended and _in_one_order(buckets, posted), buckets


def test_rank_local_buckets_between_those_of_a_set_would_post_its_exchanges_in_unlike_orders() -> None:
    """A rank-local bucket between the buckets of a rank set makes the ranks post exchanges in different orders, so a
    plan places all rank-local buckets first."""
    pair: list[Bucket] = [((0, 1), False)] * 3
    for at, in_order in ((0, True), (1, False), (2, False)):
        buckets: list[Bucket] = [*pair[:at], ((0,), False), *pair[at:]]
        ended, posted = _run(buckets)
        assert ended and _in_one_order(buckets, posted) == in_order


def test_a_relay_that_is_posted_after_the_next_bucket_would_wait_in_a_circle() -> None:
    """The simulated ranks must deadlock, as four real ranks once did, if a relay (the exchange that passes results on
    to other replicas) is posted only after the next bucket has been orthogonalized."""
    assert not _run(CROSSED, _late)[0]
    assert _run(CROSSED)[0]


@pytest.mark.parametrize("relays", [[], [False], [True], [False, True, False], [True, True, True, False]])
def test_every_bucket_goes_through_all_operations_once_with_two_in_flight(relays: list[bool]) -> None:
    found = list(turns(relays))
    for number, relay in enumerate(relays):
        assert [turn for turn, at in found if at == number] == ["begin", "compute", "apply", "finish"][: 3 + relay]
    flying = itertools.accumulate((turn == "begin") - (turn == "apply") for turn, _ in found)
    assert max(flying, default=0) <= 3
