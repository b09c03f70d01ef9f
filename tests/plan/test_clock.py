"""Tests of the simulated timeline of an optimizer step."""

from __future__ import annotations

import itertools
import random

import pytest

from shardmuon.price.clock import BucketTimes, Course

# The fields of BucketTimes are a key, which is equal on all ranks that exchange the bucket, and the times of the
# bucket's phases: pack, gather, orthogonalize, scatter, apply, fill, relay (pass results on to other replicas) and
# finish.
B = BucketTimes


@pytest.mark.parametrize(
    ("ranks", "first", "last", "overlap", "ends"),
    [
        # The step takes 10 time units before its only bucket, 15 for the phases of this bucket, and 20 for AdamW.
        ([[B("a", 1, 2, 3, 4, 5)]], 10, 20, 1.0, [45]),
        # In the next case, the links are busy from the end of the first pack to the start of the last apply. In the
        # case after it, `overlap` is 0, so all phases run one after another.
        ([[B(i, 1, 10, 10, 10, 1) for i in range(6)]], 0, 0, 1.0, [1 + 6 * 20 + 1]),
        ([[B(i, 1, 10, 10, 10, 1) for i in range(6)]], 0, 0, 0.0, [6 * 32]),
        # In the next case, orthogonalization takes longer than communication and hides it.
        ([[B(i, 0, 1, 10, 1, 0) for i in range(8)]], 0, 0, 1.0, [1 + 8 * 10 + 1]),
        # An exchange starts when the slowest rank is ready: the first rank waits until the second has packed, then the
        # second waits until the first has orthogonalized.
        ([[B("g", 1, 1, 100, 1, 1)], [B("g", 50, 1, 1, 1, 1)]], 0, 0, 1.0, [153, 153]),
        # A rank-local bucket (without an exchange) waits for no other rank.
        ([[B(None, 1, 0, 2, 0, 3)], [B("b", 9, 9, 9, 9, 9)]], 0, 0, 1.0, [6, 45]),
        # If two ranks run their buckets in different orders, they wait for each other and finish after 11 and 12
        # time units. In the same order, both finish after 9.
        ([[B(key, 1, 1, 1, 1, 1) for key in order] for order in ("abc", "cba")], 0, 0, 1.0, [11, 12]),
        ([[B(key, 1, 1, 1, 1, 1) for key in order] for order in ("abc", "abc")], 0, 0, 1.0, [9, 9]),
    ],
)
def test_a_step_ends_when_its_parts_say(
    ranks: list[list[BucketTimes]], first: float, last: float, overlap: float, ends: list[float]
) -> None:
    assert [course.end for course in Course.simulate(ranks, first, [last] * len(ranks), overlap)] == ends


def test_a_step_is_never_shorter_than_what_one_rank_must_do_nor_longer_than_all_in_a_row() -> None:
    generator = random.Random(0)
    for _ in range(200):
        works = [BucketTimes(i, *(generator.random() for _ in range(5))) for i in range(generator.randrange(1, 7))]
        slow, fast = (Course.simulate([works], 0.0, [0.0], share)[0] for share in (0.0, 1.0))
        computed = sum(w.pack + w.orthogonalize + w.apply for w in works)
        carried = sum(w.gather + w.scatter for w in works)
        rounding = 2.0**-40  # `rounding` bounds the error of adding a few dozen numbers below 1.
        assert max(computed, carried) - rounding <= fast.end <= slow.end + rounding
        assert slow.end <= computed + carried + rounding
        assert abs(slow.waited - carried) <= rounding


def test_a_relay_passes_while_the_next_bucket_is_orthogonalized() -> None:
    works = [BucketTimes(i, 0.0, 0.0, 10.0, 0.0, 0.0, 0.0, 8.0, 1.0) for i in range(3)]
    (course,) = Course.simulate([works], 0.0, [0.0], 1.0)
    relays = [e.start for e in course.events if e.phase == "relay"]
    assert relays == [20.0, 30.0, 38.0]
    assert (course.end, course.waited) == (38.0 + 8.0 + 1.0, 14.0)


def test_events_follow_each_other_and_fill_the_step() -> None:
    works = [BucketTimes(i, 1.0, 2.0, 3.0, 2.0, 1.0) for i in range(4)]
    (course,) = Course.simulate([works], 5.0, [7.0], 0.5)
    computing = [e for e in course.events if e.phase not in ("gather", "scatter")]
    assert all(a.end <= b.start for a, b in itertools.pairwise(computing))
    assert course.events[0].phase == "begin" and course.events[-1] == (-1, "adamw", course.end - 7.0, course.end)
    assert [e.phase for e in course.events].count("gather") == 4
