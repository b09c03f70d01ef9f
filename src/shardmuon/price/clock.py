"""The order of the operations in an optimizer step, and a simulation of a step in which every operation takes a given
time. `step.bucket` runs real steps in the same order.

The functions are pure and independent of hardware. All times are in one unit of the caller's choice. With integer times
and an `overlap` of 0.5, the arithmetic is exact, so all ranks get the same results.

[Note: computation and communication]
    A rank computes one operation at a time, and its links carry one exchange at a time. An exchange starts when all of
    its ranks have posted it. Ranks compute during exchanges: while bucket i is orthogonalized, bucket i+1 is gathered,
    and bucket i-1 is scattered or relayed (sent to other replicas). The fraction of an exchange that can overlap with
    computation is unknown, so it is a parameter (`overlap`). The rest of an exchange progresses only while a rank waits
    for the exchange.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

# Number of later buckets (sets of matrices) that a rank computes before it waits for a bucket's relay, the exchange
# that forwards results to other replicas. Relays are often slow.
_BESIDE = 4

_Turn = Literal["begin", "compute", "apply", "finish"]
_Phase = Literal["begin", "pack", "gather", "fill", "orthogonalize", "scatter", "apply", "relay", "finish", "adamw"]
_EXCHANGES: tuple[_Phase, ...] = ("gather", "scatter", "relay")


def turns(relays: Sequence[bool], sets: Sequence[Hashable] = ()) -> Iterator[tuple[_Turn, int]]:
    """Yield a rank's operations on its buckets in the order in which they run, as pairs (operation, index of the
    bucket).

    While bucket i is orthogonalized, bucket i + 1 is gathered, bucket i - 1 is scattered, and earlier buckets are
    relayed (forwarded to other replicas).

    This order cannot cause a deadlock. Number the buckets of all ranks in the plan's order, which is the same on all
    ranks. Give the gather of bucket b the number b, its scatter b + 1/4, and its relay b + 1/2. Before a rank posts an
    exchange, it waits only for exchanges with smaller numbers. So of all exchanges that any rank waits for, the one
    with the smallest number has been posted by all of its ranks and can complete.

    There is one exception. If a rank's next bucket c has the same ranks as b, the relay of b is posted after the wait
    for the gather of c. The exception is safe, because none of these ranks has a bucket between b and c. If c has other
    ranks, the relay of b is posted before that wait.

    Args:
        relays: One flag for each bucket of this rank, in the plan's order. True if the bucket has a relay.
        sets: The ranks of each bucket; empty if all buckets have the same ranks.
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
    """Times of one bucket on one rank, all in the same unit.

    Attributes:
        key: Key of the bucket's exchanges, equal on all ranks that exchange the bucket; None if nothing is exchanged.
        pack, orthogonalize, apply: Computation times of this rank in these phases.
        gather, scatter, relay: Durations of these exchanges on the slowest rank. None if the bucket has no such
            exchange.
        fill: Time of this rank's computation during the gather, on elements that it does not send.
        finish: Time that this rank takes to apply the relayed results.
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
    """Time span of one phase of a bucket (a set of matrices) on one rank. A phase is either a computation or an
    exchange."""

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


_Exchanges = dict[tuple[Hashable, _Phase], _Exchange]
# Dict from each operation of a rank to a pair (awaited, phases). `awaited` is the exchange that must end before the
# operation, or None. `phases` are the computations that the rank runs in the operation, and the exchanges that it
# posts.
_DOES: dict[_Turn, tuple[_Phase | None, tuple[_Phase, ...]]] = {
    "begin": (None, ("pack", "gather", "fill")),
    "compute": ("gather", ("orthogonalize", "scatter")),
    "apply": ("scatter", ("apply", "relay")),
    "finish": ("relay", ("finish",)),
}


@dataclass
class Course:
    """Simulated timeline of one rank's step.

    Attributes:
        end: Current time of the rank, measured from the start of the step.
        events: Events up to the current time. They are sorted by start time when the simulation ends.
        waited: Total time for which the rank has been idle, waiting for exchanges.
        links: Time at which the rank's links become free for the next exchange.
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
        """Advance the rank's current time to the end of an exchange, which must have been posted by all of its
        ranks."""
        self.links = max(self.links, exchange.end)
        late = max(exchange.start, self.end) + (exchange.end - exchange.start)
        end = max(self.end, overlap * exchange.end + (1.0 - overlap) * late)
        self.events.append(Event(bucket, phase, exchange.start, max(exchange.end, end)))
        self.waited += end - self.end
        self.end = end

    @classmethod
    def simulate(
        cls, ranks: Sequence[Sequence[BucketTimes]], first: float, last: Sequence[float], overlap: float
    ) -> list[Course]:
        """Simulate one optimizer step on all ranks.

        Args:
            ranks: For each rank, the times of its buckets in the plan's order. A bucket is a set of matrices that are
                processed together.
            first: Time that every rank spends before its first bucket. It includes CPU work and the votes by which the
                ranks agree to take the step.
            last: Time that each rank spends on AdamW after its last bucket.
            overlap: Fraction of an exchange that can overlap with computation, from 0 to 1.

        Returns:
            The timeline of each rank.
        """
        members = Counter(work.key for works in ranks for work in works)
        exchanges: _Exchanges = {(key, of): _Exchange(num) for key, num in members.items() for of in _EXCHANGES}
        courses = [cls(first, [Event(-1, "begin", 0.0, first)] if first else []) for _ in ranks]
        runs = [course.run(works, exchanges, overlap) for course, works in zip(courses, ranks, strict=True)]
        # dict from each rank's simulation to the exchange for which the rank is waiting
        awaited = dict.fromkeys(runs, _Exchange(0))
        while awaited:
            ready = [run for run, exchange in awaited.items() if exchange.given >= exchange.members]
            # If no rank can continue, some ranks have buckets (sets of matrices) with equal keys in different orders.
            # In a real step, these ranks would not exchange data with each other, so let the first rank continue
            # without waiting.
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

    def run(self, works: Sequence[BucketTimes], exchanges: _Exchanges, overlap: float) -> Iterator[_Exchange]:
        """Simulate this rank's work on its buckets (sets of matrices). Before each wait, yield the exchange for which
        the rank waits."""
        for turn, bucket in turns([work.relay is not None for work in works]):
            work = works[bucket]
            awaited, does = _DOES[turn]
            if awaited is not None and work.key is not None and getattr(work, awaited) is not None:
                exchange = exchanges[work.key, awaited]
                yield exchange
                self.wait(exchange, overlap, bucket, awaited)
            for phase in does:
                seconds = getattr(work, phase)
                if phase not in _EXCHANGES:
                    self.spend(bucket, phase, seconds)
                elif work.key is not None and seconds is not None:
                    self.give(exchanges[work.key, phase], seconds)
