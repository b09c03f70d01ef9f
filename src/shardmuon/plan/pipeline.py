"""The order of a step's operations, which `step.bucket` carries out, and the same loop on a clock instead of a device.

Pure; knows no hardware. Times are in any unit, and whole numbers with `overlap` 0.5 stay exact: equal on all machines.

[Note: two clocks]
    A rank computes one thing after the other, and its exchanges follow each other on its links. An exchange begins when
    the last of its ranks has given it, and while it travels the rank computes on: bucket i+1 is gathered, and i-1
    scattered or relayed, while i is orthogonalized. What share of an exchange passes beside products is uncertain
    (`overlap`): the rest of it passes only when somebody waits for it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Turn = Literal["begin", "compute", "apply", "finish"]
Phase = Literal["begin", "pack", "gather", "fill", "orthogonalize", "scatter", "apply", "relay", "finish", "adamw"]


_BESIDE = 4  # buckets that a relay has to pass by: it is the longest exchange, as a rule over the network


def turns(relays: Sequence[bool], sets: Sequence[Hashable] = ()) -> Iterator[tuple[Turn, int]]:
    """The order in which a rank carries its buckets out: pairs of an operation and a bucket's number.

    While bucket i is orthogonalized, i + 1 is gathered and i - 1 scattered, and what was computed before is relayed.
    No circle of waits: number the exchanges of all ranks' buckets, in the order that all plan alike: the gather
    of bucket b is b, its sums follow in their order before its scatter, which is b + 1/4, and its relay is b + 1/2. A
    rank posts an exchange after waits for exchanges with smaller numbers only, so the one with the smallest number that
    anybody waits for has been posted by all. There is one exception: the relay of b is posted after the waits for the
    gather and the sums of b + 1, if that is of the same set, whose ranks have all of these and nothing in between.
    Before a bucket of another set relays are posted first.

    Args:
        relays: True for each bucket of this rank, in the plan's order, that has a relay.
        sets: The ranks of each. Empty: they are the same everywhere.
    """
    last = len(relays) - 1
    for i in range(len(relays)):
        if i == 0:
            yield "begin", i
        if i < last:
            yield "begin", i + 1
        early = i > 0 and relays[i - 1] and bool(sets) and sets[i] != sets[i - 1]
        if early:
            yield "apply", i - 1
        yield "compute", i
        if i > 0 and not early:
            yield "apply", i - 1
        if i >= _BESIDE and relays[i - _BESIDE]:
            yield "finish", i - _BESIDE
    if relays:
        yield "apply", last
    for i in range(max(0, last - _BESIDE + 1), last + 1):
        if relays[i]:
            yield "finish", i


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


@dataclass(frozen=True, slots=True)
class Course:
    """A step of one rank.

    Attributes:
        end: Seconds from its beginning.
        waited: Seconds in which the rank did nothing but wait for exchanges.
        events: Events in order of their beginning.
    """

    end: float
    waited: float
    events: tuple[Event, ...]


@dataclass(slots=True)
class _Exchange:
    members: int
    given: int = 0
    start: float = 0.0
    end: float = 0.0


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
    members: dict[Hashable, int] = {}
    for works in ranks:
        for work in works:
            if work.key is not None:
                members[work.key] = members.get(work.key, 0) + 1
    exchanges: dict[tuple[Hashable, Phase], _Exchange] = {}
    runners = [_Rank(works, first, exchanges, members, overlap) for works in ranks]
    moved = True
    while moved:
        moved = False
        for runner in runners:
            moved |= runner.advance(forced=False)
        if not moved and not all(runner.done for runner in runners):
            # Ranks with the same key that order their buckets differently are not of one group: go on without them.
            moved = next(runner for runner in runners if not runner.done).advance(forced=True)
    return [runner.finish(seconds) for runner, seconds in zip(runners, last, strict=True)]


class _Rank:
    """One rank on its way through the loop."""

    def __init__(
        self,
        works: Sequence[BucketTimes],
        first: float,
        exchanges: dict[tuple[Hashable, Phase], _Exchange],
        members: Mapping[Hashable, int],
        overlap: float,
    ) -> None:
        self._works, self._exchanges, self._members, self._overlap = works, exchanges, members, overlap
        self._clock, self._links, self._waited = first, 0.0, 0.0
        self._events = [Event(-1, "begin", 0.0, first)] if first else []
        self._todo = list(turns([work.relay is not None for work in works]))
        self._at = 0

    @property
    def done(self) -> bool:
        return self._at == len(self._todo)

    def advance(self, forced: bool) -> bool:
        """Do what can be done. Returns True if anything could."""
        moved = False
        while not self.done:
            turn, bucket = self._todo[self._at]
            work = self._works[bucket]
            awaited = _AWAITED[turn]
            if awaited is not None and not self._arrived(bucket, awaited, forced):
                return moved
            if turn == "begin":
                self._compute(bucket, "pack", work.pack)
                self._give(bucket, "gather", work.gather)
                self._compute(bucket, "fill", work.fill)
            elif turn == "compute":
                self._compute(bucket, "orthogonalize", work.orthogonalize)
                self._give(bucket, "scatter", work.scatter)
            elif turn == "apply":
                self._compute(bucket, "apply", work.apply)
                self._give(bucket, "relay", work.relay)
            else:
                self._compute(bucket, "finish", work.finish)
            self._at, moved, forced = self._at + 1, True, False
        return moved

    def _compute(self, bucket: int, phase: Phase, seconds: float) -> None:
        if seconds:
            self._events.append(Event(bucket, phase, self._clock, self._clock + seconds))
        self._clock += seconds

    def _give(self, bucket: int, phase: Phase, seconds: float | None) -> None:
        key = self._works[bucket].key
        if key is None or seconds is None:
            return
        exchange = self._exchanges.setdefault((key, phase), _Exchange(self._members[key]))
        exchange.given += 1
        exchange.start = max(exchange.start, self._clock, self._links)
        exchange.end = max(exchange.end, exchange.start + seconds)
        self._links = exchange.start + seconds

    def _arrived(self, bucket: int, phase: Phase, forced: bool) -> bool:
        """Wait for an exchange, if there is one, that all its ranks have given; False if some have not yet."""
        exchange = self._exchanges.get((self._works[bucket].key, phase))
        if exchange is None:
            return True
        if exchange.given < exchange.members and not forced:
            return False
        self._links = max(self._links, exchange.end)
        seconds = exchange.end - exchange.start
        late = max(exchange.start, self._clock) + seconds
        end = max(self._clock, self._overlap * exchange.end + (1.0 - self._overlap) * late)
        self._events.append(Event(bucket, phase, exchange.start, max(exchange.end, end)))
        self._waited += end - self._clock
        self._clock = end
        return True

    def finish(self, seconds: float) -> Course:
        if seconds:
            self._events.append(Event(-1, "adamw", self._clock, self._clock + seconds))
        return Course(self._clock + seconds, self._waited, tuple(sorted(self._events, key=lambda e: (e.start, e.end))))


# what each operation waits for
_AWAITED: dict[Turn, Phase | None] = {"begin": None, "compute": "gather", "apply": "scatter", "finish": "relay"}
