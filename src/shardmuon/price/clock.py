"""Simulate the operations of a step with given times, in the order in which `step.bucket` executes them.

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
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Turn = Literal["begin", "compute", "apply", "finish"]
Order = Callable[[Sequence[bool]], Iterator[tuple[Turn, int]]]  # such as `plan.turns.turns`
Phase = Literal["begin", "pack", "gather", "fill", "orthogonalize", "scatter", "apply", "relay", "finish", "adamw"]


_EXCHANGES: tuple[Phase, ...] = ("gather", "scatter", "relay")


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
    phase: Phase
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

    def spend(self, bucket: int, phase: Phase, seconds: float) -> None:
        if seconds:
            self.events.append(Event(bucket, phase, self.end, self.end + seconds))
        self.end += seconds

    def give(self, exchange: _Exchange, seconds: float) -> None:
        exchange.given += 1
        exchange.start = max(exchange.start, self.end, self.links)
        exchange.end = max(exchange.end, exchange.start + seconds)
        self.links = exchange.start + seconds

    def wait(self, exchange: _Exchange, overlap: float, bucket: int, phase: Phase) -> None:
        """Advance the clock to the end of an exchange that all of its ranks have posted."""
        self.links = max(self.links, exchange.end)
        late = max(exchange.start, self.end) + (exchange.end - exchange.start)
        end = max(self.end, overlap * exchange.end + (1.0 - overlap) * late)
        self.events.append(Event(bucket, phase, exchange.start, max(exchange.end, end)))
        self.waited += end - self.end
        self.end = end


_Exchanges = dict[tuple[Hashable, Phase], _Exchange]
# For each operation, the exchange for which a rank first waits, and the phases and exchanges that it then starts.
_DOES: dict[Turn, tuple[Phase | None, tuple[Phase, ...]]] = {
    "begin": (None, ("pack", "gather", "fill")),
    "compute": ("gather", ("orthogonalize", "scatter")),
    "apply": ("scatter", ("apply", "relay")),
    "finish": ("relay", ("finish",)),
}


def run(
    ranks: Sequence[Sequence[BucketTimes]], first: float, last: Sequence[float], overlap: float, order: Order
) -> list[Course]:
    """Simulate a step.

    Args:
        ranks: Times of each rank's buckets, in order.
        first: Seconds before the first bucket, for host work and the ranks' vote.
        last: For each rank, seconds after its last bucket, for AdamW.
        overlap: Share of an exchange that can overlap with computation, from 0 to 1.
        order: Generator function that yields a rank's operations in order. Its argument has a bool for each bucket:
            True if the bucket has a relay.

    Returns:
        The timeline of each rank.
    """
    members = Counter(work.key for works in ranks for work in works)
    exchanges: _Exchanges = {(key, of): _Exchange(num) for key, num in members.items() for of in _EXCHANGES}
    courses = [Course(first, [Event(-1, "begin", 0.0, first)] if first else []) for _ in ranks]
    runs = [_turns(course, works, exchanges, overlap, order) for course, works in zip(courses, ranks, strict=True)]
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


def _turns(
    course: Course, works: Sequence[BucketTimes], exchanges: _Exchanges, overlap: float, order: Order
) -> Iterator[_Exchange]:
    """Simulate the loop of one rank. Yields each exchange before the rank waits for it."""
    for turn, bucket in order([work.relay is not None for work in works]):
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
