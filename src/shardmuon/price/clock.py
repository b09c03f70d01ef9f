"""The order of a step's operations, which `step.bucket` follows, and a simulation of them with given times.

The functions are pure and independent of hardware. Times may be in any unit. With integer times and `overlap` 0.5,
results are exact, so that all ranks get the same results.

[Note: two clocks]
    A rank computes one operation at a time, and its links carry one exchange at a time. An exchange starts when the
    last of its ranks has posted it. Meanwhile, the ranks compute: while bucket i is orthogonalized, bucket i+1 is
    gathered, and bucket i-1 is scattered or relayed. The fraction of an exchange that can overlap with computation is
    not known, so it is a parameter (`overlap`). The rest of an exchange progresses only while a rank waits for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

_BESIDE = 4  # number of later buckets during which a relay, the longest exchange (usually between nodes), may run

_Turn = Literal["begin", "compute", "apply", "finish"]
_Phase = Literal["begin", "pack", "gather", "fill", "orthogonalize", "scatter", "apply", "relay", "finish", "adamw"]
_EXCHANGES: tuple[_Phase, ...] = ("gather", "scatter", "relay")


def turns(relays: Sequence[bool], sets: Sequence[Hashable] = ()) -> Iterator[tuple[_Turn, int]]:
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
        both: list[tuple[_Turn, int]] = [("compute", i), ("apply", i - 1)]
        for turn, at in both[::-1] if early else both:
            if 0 <= at < num:
                yield turn, at
        if 0 <= i - _BESIDE < num and relays[i - _BESIDE]:
            yield "finish", i - _BESIDE


class BucketTimes(NamedTuple):
    """Times of one bucket on one rank, in seconds.

    Attributes:
        key: Key of the bucket's exchanges, equal on the ranks that exchange with each other; None if nothing is sent.
        pack, orthogonalize, apply: Times of these phases on this rank.
        gather, scatter, relay: Transfer times of the exchanges, for their slowest rank. None: the bucket has no such
            exchange.
        fill: Time that this rank computes during the gather.
        finish: Time that this rank computes after the relay.
    """

    key: Hashable | None
    pack: float
    gather: float | None
    orthogonalize: float
    scatter: float | None
    apply: float
    fill: float = 0.0
    relay: float | None = None
    finish: float = 0.0


class Event(NamedTuple):
    """The time span of one phase of a bucket, either computed by a rank or transferred on its links."""

    bucket: int
    phase: _Phase
    start: float
    end: float


@dataclass
class _Exchange:
    members: int
    given: int = 0
    start: float = 0.0
    end: float = 0.0


@dataclass
class Course:
    """Timeline of one rank's step, up to the current time.

    Attributes:
        end: Current time, in seconds since the step began.
        events: Events so far. They are sorted by start time when the step is complete.
        waited: Seconds that the rank spent idle, waiting for exchanges.
        links: Time at which the rank's links become free.
    """

    end: float
    events: list[Event]
    waited: float = 0.0
    links: float = 0.0

    def spend(self, bucket: int, phase: _Phase, seconds: float) -> None:
        if seconds:
            self.events.append(Event(bucket, phase, self.end, self.end + seconds))
        self.end += seconds

    def give(self, exchange: _Exchange, seconds: float) -> None:
        exchange.given += 1
        exchange.start = max(exchange.start, self.end, self.links)
        exchange.end = max(exchange.end, exchange.start + seconds)
        self.links = exchange.start + seconds

    def wait(self, exchange: _Exchange, overlap: float, bucket: int, phase: _Phase) -> None:
        """Advance the clock to the end of an exchange that all of its ranks have posted."""
        self.links = max(self.links, exchange.end)
        late = max(exchange.start, self.end) + (exchange.end - exchange.start)
        end = max(self.end, overlap * exchange.end + (1.0 - overlap) * late)
        self.events.append(Event(bucket, phase, exchange.start, max(exchange.end, end)))
        self.waited += end - self.end
        self.end = end


_Exchanges = dict[tuple[Hashable, _Phase], _Exchange]
# For each operation, the exchange for which a rank first waits, and the phases and exchanges that it then starts.
_DOES: dict[_Turn, tuple[_Phase | None, tuple[_Phase, ...]]] = {
    "begin": (None, ("pack", "gather", "fill")),
    "compute": ("gather", ("orthogonalize", "scatter")),
    "apply": ("scatter", ("apply", "relay")),
    "finish": ("relay", ("finish",)),
}


def run(ranks: Sequence[Sequence[BucketTimes]], first: float, last: Sequence[float], overlap: float) -> list[Course]:
    """Simulate a step.

    Args:
        ranks: Times of each rank's buckets, in order.
        first: Seconds before the first bucket, for host work and the ranks' vote.
        last: For each rank, seconds after its last bucket, for AdamW.
        overlap: Share of an exchange that can overlap with computation, from 0 to 1.

    Returns:
        The timeline of each rank.
    """
    members = Counter(work.key for works in ranks for work in works)
    exchanges: _Exchanges = {(key, of): _Exchange(num) for key, num in members.items() for of in _EXCHANGES}
    courses = [Course(first, [Event(-1, "begin", 0.0, first)] if first else []) for _ in ranks]
    runs = [_simulated(course, works, exchanges, overlap) for course, works in zip(courses, ranks, strict=True)]
    awaited = dict.fromkeys(runs, _Exchange(0))  # the exchange that each unfinished rank waits for
    while awaited:
        ready = [run for run, exchange in awaited.items() if exchange.given >= exchange.members]
        # If no run can continue, some ranks with equal keys have their buckets in different orders. They cannot really
        # exchange with each other then, so let the first run continue.
        for run in ready or list(awaited)[:1]:
            exchange = next(run, None)
            if exchange is None:
                del awaited[run]
            else:
                awaited[run] = exchange
    for course, seconds in zip(courses, last, strict=True):
        course.spend(-1, "adamw", seconds)
        course.events.sort(key=lambda e: (e.start, e.end))
    return courses


def _simulated(
    course: Course, works: Sequence[BucketTimes], exchanges: _Exchanges, overlap: float
) -> Iterator[_Exchange]:
    """Simulate the loop of one rank. Yields each exchange before the rank waits for it."""
    for turn, bucket in turns([work.relay is not None for work in works]):
        work = works[bucket]
        awaited, does = _DOES[turn]
        if awaited is not None and work.key is not None and getattr(work, awaited) is not None:
            exchange = exchanges[work.key, awaited]
            yield exchange
            course.wait(exchange, overlap, bucket, awaited)
        for phase in does:
            seconds = getattr(work, phase)
            if phase not in _EXCHANGES:
                course.spend(bucket, phase, seconds)
            elif work.key is not None and seconds is not None:
                course.give(exchanges[work.key, phase], seconds)
