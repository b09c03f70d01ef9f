"""The order of a step's operations, which `step.bucket` carries out, and the same loop on a clock instead of a device.

Pure; knows no hardware. Times are in any unit, and whole numbers with `overlap` 0.5 stay exact: equal on all machines.

[Note: two clocks]
    A rank computes one thing after the other, and its exchanges follow each other on its links. An exchange begins when
    the last of its ranks has given it, and while it travels the rank computes on: bucket i+1 is gathered, and i-1
    scattered or relayed, while i is orthogonalized. What share of an exchange passes beside products is uncertain
    (`overlap`): the rest of it passes only when somebody waits for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Turn = Literal["begin", "compute", "apply", "finish"]
Phase = Literal["begin", "pack", "gather", "fill", "orthogonalize", "scatter", "apply", "relay", "finish", "adamw"]


_EXCHANGES: tuple[Phase, ...] = ("gather", "scatter", "relay")
_BESIDE = 4  # buckets that a relay has to pass by: it is the longest exchange, as a rule over the network


def turns(relays: Sequence[bool], sets: Sequence[Hashable] = ()) -> Iterator[tuple[Turn, int]]:
    """The order in which a rank carries its buckets out: pairs of an operation and a bucket's number.

    While bucket i is orthogonalized, i + 1 is gathered and i - 1 scattered, and what was computed before is relayed.
    No circle of waits: number the exchanges of all ranks' buckets, in the order that all plan alike: the gather
    of bucket b is b, its scatter b + 1/4, and its relay b + 1/2. A rank posts an exchange after waits for exchanges
    with smaller numbers only, so the one with the smallest number that anybody waits for has been posted by all. There
    is one exception: the relay of b is posted after the wait for the gather of b + 1, if that is of the same set, whose
    ranks have both and nothing in between. Before a bucket of another set relays are posted first.

    Args:
        relays: True for each bucket of this rank, in the plan's order, that has a relay.
        sets: The ranks of each. Empty: they are the same everywhere.
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
        key: Key of its exchanges: ranks that exchange with each other have the same; None if nothing moves.
        pack, orthogonalize, apply: Times of these phases on this rank.
        gather, scatter, relay: How long the exchanges are on the wire, of the slowest of their ranks; None: there is
            none.
        fill: Time of this rank while the gather travels.
        finish: Time of this rank after the relay.
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
    """A phase of a bucket on a rank or its links, with its start and end."""

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
    """A step of one rank, as far as it has come.

    Attributes:
        end: Seconds from its beginning.
        events: Events; at last in order of their beginning.
        waited: Seconds in which the rank did nothing but wait for exchanges.
        links: When its links have carried what it has given.
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
        """Wait for what all of its ranks have given."""
        self.links = max(self.links, exchange.end)
        late = max(exchange.start, self.end) + (exchange.end - exchange.start)
        end = max(self.end, overlap * exchange.end + (1.0 - overlap) * late)
        self.events.append(Event(bucket, phase, exchange.start, max(exchange.end, end)))
        self.waited += end - self.end
        self.end = end


_Exchanges = dict[tuple[Hashable, Phase], _Exchange]
# What each operation waits for, and what it then computes and gives, in this order.
_DOES: dict[Turn, tuple[Phase | None, tuple[Phase, ...]]] = {
    "begin": (None, ("pack", "gather", "fill")),
    "compute": ("gather", ("orthogonalize", "scatter")),
    "apply": ("scatter", ("apply", "relay")),
    "finish": ("relay", ("finish",)),
}


def run(ranks: Sequence[Sequence[BucketTimes]], first: float, last: Sequence[float], overlap: float) -> list[Course]:
    """Carry a step out.

    Args:
        ranks: The buckets of each rank, in their order.
        first: Seconds before the first bucket: host, vote.
        last: Seconds after each rank's last bucket: AdamW.
        overlap: See [Note: two clocks].

    Returns:
        What happened, rank by rank.
    """
    members = Counter(work.key for works in ranks for work in works)
    exchanges: _Exchanges = {(key, of): _Exchange(num) for key, num in members.items() for of in _EXCHANGES}
    courses = [Course(first, [Event(-1, "begin", 0.0, first)] if first else []) for _ in ranks]
    runs = [_turns(course, works, exchanges, overlap) for course, works in zip(courses, ranks, strict=True)]
    awaited = dict.fromkeys(runs, _Exchange(0))  # by each rank that has not come to its end
    while awaited:
        ready = [run for run, exchange in awaited.items() if exchange.given >= exchange.members]
        # ranks with one key that order their buckets differently are not of one group
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
    """One rank's way through the loop. Yields each exchange before it waits for it."""
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
