"""The order of a step's operations, which `step.bucket` executes, and a simulation of that loop with given times.

Pure; knows no hardware. Times may be in any unit. Integer times with `overlap` 0.5 are exact, so that all machines get
the same results.

[Note: two clocks]
    A rank computes one operation at a time, and its exchanges run one at a time on its links. An exchange starts when
    the last of its ranks has posted it, and the rank computes meanwhile: bucket i+1 is gathered, and bucket i-1
    scattered or relayed, while bucket i is orthogonalized. The share of an exchange that overlaps with computation is
    uncertain (`overlap`): the rest of the exchange progresses only while a rank waits for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Turn = Literal["begin", "compute", "apply", "finish"]
Phase = Literal["begin", "pack", "gather", "fill", "orthogonalize", "scatter", "apply", "relay", "finish", "adamw"]


_EXCHANGES: tuple[Phase, ...] = ("gather", "scatter", "relay")
_BESIDE = 4  # buckets during which a relay may run: it is the longest exchange, usually over the network


def turns(relays: Sequence[bool], sets: Sequence[Hashable] = ()) -> Iterator[tuple[Turn, int]]:
    """The order in which a rank executes its buckets, as pairs of an operation and a bucket's index.

    While bucket i is orthogonalized, i + 1 is gathered, i - 1 scattered, and earlier buckets are relayed.

    There is no deadlock. Number the exchanges of all ranks' buckets in the common order of the plan: the gather of
    bucket b is b, its scatter b + 1/4, and its relay b + 1/2. Before it posts an exchange, a rank waits only for
    exchanges with smaller numbers, so the smallest-numbered exchange that any rank waits for has been posted by all.
    There is one exception: the relay of b is posted after the wait for the gather of b + 1 if both buckets are of the
    same set, whose ranks have both of them and nothing in between. Before a bucket of another set, relays are posted
    first.

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


class BucketTimes(NamedTuple):
    """One bucket on one rank, in seconds.

    Attributes:
        key: Key of the bucket's exchanges, equal on the ranks that exchange with each other; None if nothing moves.
        pack, orthogonalize, apply: Times of these phases on this rank.
        gather, scatter, relay: Times of the exchanges on the wire, for their slowest rank; None: no such exchange.
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
    """A phase of a bucket on a rank or its links, with start and end times."""

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
        events: Events so far; sorted by start time when the step is complete.
        waited: Seconds in which the rank only waited for exchanges.
        links: Time at which the rank's links are free again.
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
# Operation -> the exchange that it waits for, and the phases and exchanges that it then starts, in order.
_DOES: dict[Turn, tuple[Phase | None, tuple[Phase, ...]]] = {
    "begin": (None, ("pack", "gather", "fill")),
    "compute": ("gather", ("orthogonalize", "scatter")),
    "apply": ("scatter", ("apply", "relay")),
    "finish": ("relay", ("finish",)),
}


def run(ranks: Sequence[Sequence[BucketTimes]], first: float, last: Sequence[float], overlap: float) -> list[Course]:
    """Simulate a step.

    Args:
        ranks: The buckets of each rank, in order.
        first: Seconds before the first bucket: host, vote.
        last: Seconds after each rank's last bucket: AdamW.
        overlap: Share of an exchange that overlaps with computation, see [Note: two clocks].

    Returns:
        The timeline of each rank.
    """
    members = Counter(work.key for works in ranks for work in works)
    exchanges: _Exchanges = {(key, of): _Exchange(num) for key, num in members.items() for of in _EXCHANGES}
    courses = [Course(first, [Event(-1, "begin", 0.0, first)] if first else []) for _ in ranks]
    runs = [_turns(course, works, exchanges, overlap) for course, works in zip(courses, ranks, strict=True)]
    awaited = dict.fromkeys(runs, _Exchange(0))  # the exchange that each unfinished rank waits for
    while awaited:
        ready = [run for run, exchange in awaited.items() if exchange.given >= exchange.members]
        # if none is ready, ranks with equal keys order their buckets differently and cannot be one group: go on anyway
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


def _turns(course: Course, works: Sequence[BucketTimes], exchanges: _Exchanges, overlap: float) -> Iterator[_Exchange]:
    """Simulate the loop of one rank. Yields each exchange before waiting for it."""
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
