"""Price of a plan's counts on a machine: seconds as an interval, what makes it wide, and a timeline of the buckets.

Exact counts come in (`types.Exact`), hardware comes in as data; both are given, so everything here is arithmetic.

[Note: the width of an interval]
    Each uncertain thing (`FACTORS`) has a least, a middle and a worst value. The interval's ends take all of them at
    their ends. How much of its width each one makes is found by moving that one alone; the largest is its reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shardmuon.foresight.hardware import (
    Hardware,
    Uses,
    exchange_seconds,
    memory_seconds,
    pass_seconds,
    product_seconds,
    slowdown,
)
from shardmuon.foresight.types import NOTHING, BucketCount, Exact, Matrices, RankClass, Sent, Time, total
from shardmuon.plan import pipeline
from shardmuon.plan.pipeline import BucketTimes, Course, Event

FACTORS = {
    "products": "how much of the peak the matrix products reach",
    "memory": "how fast momentum, copies and weights pass through memory",
    "wire": "how fast exchanges are",
    "latency": "what an exchange of nothing takes",
    "overlap": "whether exchanges pass while products run",
    "host": "what Python and launches take",
}
_WIRE_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}
_Pick = Mapping[str, int]  # factor -> 0, 1 or 2: at its best, in the middle, at its worst
_BEST, _MIDDLE, _WORST = (dict.fromkeys(FACTORS, which) for which in range(3))


@dataclass(frozen=True)
class Price:
    """Price of one step on one machine.

    Attributes:
        hardware: Name of the machine.
        step: Seconds of `optimizer.step()`, of the slowest rank.
        rank: The slowest one (the lowest of its class).
        parts: Where that rank's seconds go: products, passes, AdamW, host, and waiting for exchanges.
        timeline: Events of that rank, with every uncertain thing at its middle value.
        reasons: Causes of the interval's width, largest first: (factor, text, share of the width it makes alone).
        ends: Rank (example of its class) -> seconds in the middle case, to see who is late.
        tokens: Tokens of a training step, on all ranks together; None if they are not known.
        training: Seconds of its forward and backward, from the model's FLOPs a token and the share of the peak that
            training reaches; None without tokens.
        unverified: Numbers that were used and not checked, with their source.
        extrapolated: Tables that were read beyond their end.
    """

    hardware: str
    step: Time
    rank: int
    parts: Mapping[str, Time]
    timeline: tuple[Event, ...]
    reasons: tuple[tuple[str, str, float], ...]
    ends: Mapping[int, float] = field(repr=False)
    tokens: float | None = None
    training: Time | None = None
    unverified: Mapping[str, str] = field(default_factory=dict)
    extrapolated: tuple[str, ...] = ()

    @property
    def reason(self) -> str:
        """The main causes of the interval's width, in words: at most two."""
        if not self.reasons or self.step.hi == self.step.lo:
            return "nothing in it is uncertain"
        return "; ".join(f"{text} ({share:.0%})" for _, text, share in self.reasons[:2] if share >= 0.05)

    @property
    def share(self) -> Time:
        """Share of the optimizer in a training step, as fractions; zeros without tokens."""
        if self.training is None:
            return NOTHING
        whole = (self.training.hi, self.training.mid, self.training.lo)
        return Time(*(ours / (ours + other) for ours, other in zip(self.step, whole, strict=True)))


class _Durations(NamedTuple):
    """One bucket on one rank: phase -> factor -> seconds; None for an exchange that there is not."""

    key: tuple[object, ...] | None
    phases: Mapping[str, dict[str, Time] | None]

    def work(self, pick: _Pick) -> BucketTimes:
        found: dict[str, Any] = {name: None if of is None else _sum(of, pick) for name, of in self.phases.items()}
        return BucketTimes(self.key, **found)


def _sum(of_factors: Mapping[str, Time], pick: _Pick) -> float:
    return sum(time[pick[factor]] for factor, time in of_factors.items())


def price(exact: Exact, hardware: Hardware, *, tokens: float | None = None) -> Price:
    """Price a plan.

    Args:
        exact: What the planner counted.
        hardware: Machine of every rank.
        tokens: Tokens of a training step, to say what share of it the optimizer is.

    Raises:
        ValueError: The hardware file lacks what the plan needs, or `tokens` is no number above 0.
    """
    if tokens is not None and not 0 < tokens < math.inf:
        raise ValueError(f"tokens={tokens} must be a number above 0. Write the tokens of one step, e.g. 4e6")
    pricer = _Pricer(exact, hardware)
    best, middle, worst = (pricer.run(pick) for pick in (_BEST, _MIDDLE, _WORST))
    ends = [course.end for course in middle]
    slowest = max(range(len(ends)), key=lambda i: (ends[i], -i))
    step = Time(*(max(course.end for course in courses) for courses in (best, middle, worst)))
    step = Time(min(step), sorted(step)[1], max(step))
    training = None if tokens is None else training_seconds(exact, hardware, tokens, pricer.uses)
    found = exact.classes[slowest]
    return Price(
        hardware=hardware.name,
        step=step,
        rank=found.example,
        parts=pricer.parts(slowest, (best[slowest], middle[slowest], worst[slowest])),
        timeline=middle[slowest].events,
        reasons=pricer.reasons(step, found.stage),
        ends={c.example: end for c, end in zip(exact.classes, ends, strict=True)},
        tokens=tokens,
        training=training,
        unverified=dict(pricer.uses.unverified),
        extrapolated=tuple(pricer.uses.extrapolated),
    )


def training_seconds(exact: Exact, hardware: Hardware, tokens: float, uses: Uses) -> Time:
    """Seconds of forward and backward: 6 x active parameters x tokens over ranks, peak and the share of it reached."""
    if not exact.tokens_flops:
        raise ValueError(
            f"{exact.model}: how many FLOPs a token takes is not known, so no share of a training step can be told. "
            "Leave --tokens-per-step out"
        )
    peak = uses.fact("peak bfloat16", hardware.peak("bfloat16"))
    reached = uses.fact("mfu", hardware.facts["mfu"])
    work = exact.tokens_flops * tokens / exact.world
    return Time(work / (peak.hi * reached.hi), work / (peak.mid * reached.mid), work / (peak.lo * reached.lo))


def adamw_step(exact: Exact, hardware: Hardware, uses: Uses) -> Time:
    """Seconds of a step of AdamW on all parameters, of the rank that holds most."""
    elements = max(c.muon_elements + c.adamw_elements for c in exact.classes)
    passes = pass_seconds(hardware, "adamw", elements, max(1, elements / 64), 4, uses)
    return hardware.facts["host_step"].value.plus(passes)


class _Pricer:
    """Durations of all classes of ranks, and steps of them."""

    def __init__(self, exact: Exact, hardware: Hardware) -> None:
        self._exact, self._hardware, self.uses = exact, hardware, Uses()
        self._known: dict[tuple[object, ...], Time] = {}
        per_node = min(exact.world, hardware.gpus_per_node, exact.mesh.gpus_per_node)
        self._slower = slowdown(hardware, per_node, self.uses)
        self._fragments = _fragments_of(exact)
        facts = hardware.facts
        self._each = {name: self.uses.fact(name, facts[name]) for name in ("host_matrix", "host_bucket")}
        self._overlap = self.uses.fact("overlap", facts["overlap"])
        votes = max((c.votes for c in exact.classes), default=0)
        doublings = math.log2(max(2, exact.world)) if votes and exact.world > 1 else 0.0
        self._first = {
            "host": self.uses.fact("host_step", facts["host_step"]),
            "latency": self.uses.fact("agreement", facts["agreement"]).times(doublings * votes),
        }
        known: dict[tuple[int, int], _Durations] = {}  # stage, bucket: classes share what they do alike
        for c in exact.classes:
            known.update({(c.stage, id(b)): self._bucket(c, b) for b in c.buckets if (c.stage, id(b)) not in known})
        self.durations = [[known[c.stage, id(b)] for b in c.buckets] for c in exact.classes]
        self._slowest_of_each_exchange()
        self._last = [{"memory": self._adamw(c)} for c in exact.classes]

    def run(self, pick: _Pick, stage: int | None = None) -> list[Course]:
        """A step with each factor where it is picked; of one pipeline stage alone, which no other one waits for."""
        overlap = (self._overlap.hi, self._overlap.mid, self._overlap.lo)[pick["overlap"]]
        which = [i for i, c in enumerate(self._exact.classes) if stage is None or c.stage == stage]
        works = {id(found): found.work(pick) for found in {id(f): f for i in which for f in self.durations[i]}.values()}
        return pipeline.run(
            [[works[id(found)] for found in self.durations[i]] for i in which],
            _sum(self._first, pick),
            [_sum(self._last[i], pick) for i in which],
            overlap,
        )

    def reasons(self, step: Time, stage: int) -> tuple[tuple[str, str, float], ...]:
        """Each uncertain factor with a text and its share of the interval's width, found in the stage that takes
        longest."""
        found = []
        for factor, text in FACTORS.items():
            low, high = (max(course.end for course in self.run({**_MIDDLE, factor: which}, stage)) for which in (0, 2))
            found.append((factor, text, max(0.0, high - low) / (step.hi - step.lo) if step.hi > step.lo else 0.0))
        return tuple(sorted(found, key=lambda row: -row[2]))

    def parts(self, number: int, courses: tuple[Course, Course, Course]) -> dict[str, Time]:
        """Seconds of one class of ranks, by what they are spent on."""

        def of(phases: Iterable[str], factor: str) -> Time:
            spent = (d.phases[phase] or {} for d in self.durations[number] for phase in phases)
            return total(of_phase.get(factor, NOTHING) for of_phase in spent)

        working = ("pack", "fill", "orthogonalize", "apply", "finish")
        waited = sorted(course.waited for course in courses)
        return {
            "products": of(working, "products"),
            "momentum, copies, weights": of(working, "memory"),
            "AdamW": self._last[number]["memory"],
            "host": of(working, "host").plus(self._first["host"]),
            "vote": self._first["latency"],
            "waiting for exchanges": Time(waited[0], courses[1].waited, waited[2]),
        }

    def _bucket(self, rank: RankClass, bucket: BucketCount) -> _Durations:
        fragments = self._fragments[_identity(rank, bucket)] if bucket.held else 0
        size = bucket.held / max(1, fragments)
        wire = _WIRE_BYTES[bucket.wire]

        def passed(what: str, elements: int, calls: float = 0.0, copied: int = 0) -> dict[str, Time]:
            host = self._each["host_matrix"].times(fragments / 2 * elements / max(1, bucket.held))
            memory = self._pass(what, elements, size, wire).plus(memory_seconds(self._hardware, 2 * copied, self.uses))
            return {"memory": memory, "host": host.plus(self._each["host_bucket"].times(calls))}

        copied = bucket.gather_received.bytes + bucket.scatter.bytes  # from the wire to the batches, and back
        gram = bucket.route == "gram"
        side = self._product(*_square(bucket), "", 1, bucket.local_flops // 2, "float32") if gram else NOTHING
        products = total(
            self._product(m.rows, m.cols, "float64" if gram else m.how, m.num, m.flops, "float64" if gram else "")
            for m in bucket.matrices
        )
        phases: dict[str, dict[str, Time] | None] = {
            "pack": passed("pack", bucket.foreign, 0.5) | {"products": side if bucket.foreign else NOTHING},
            "gather": self._exchange(bucket, bucket.gather, bucket.gather_received) if bucket.gathers else None,
            "fill": _both(passed("pack", bucket.held - bucket.foreign - bucket.idle), passed("momentum", bucket.idle))
            | {"products": NOTHING if bucket.foreign else side},
            "orthogonalize": {
                "products": products,
                "memory": memory_seconds(self._hardware, 2 * copied, self.uses),
                **self._summed(bucket),
            },
            "scatter": self._exchange(bucket, bucket.scatter, bucket.scatter_received) if bucket.gathers else None,
            "apply": passed("apply", bucket.held - bucket.idle, 0.5, bucket.relay.bytes) | {"products": side},
            "relay": self._exchange(bucket, bucket.relay, bucket.relay_received) if bucket.relays else None,
            "finish": passed("apply", bucket.idle, 0.5 * bucket.relays),
        }
        return _Durations((*_identity(rank, bucket), rank.stage) if bucket.exchange else None, phases)

    def _summed(self, bucket: BucketCount) -> dict[str, Time]:
        """Time of the exchanges in which owners of slices add up, one like the other; none for who has no slice."""
        inside, across, *peers = (value // max(1, bucket.sums) for value in bucket.summed)
        if not bucket.summed.bytes:
            return {"latency": NOTHING, "wire": NOTHING}
        near = exchange_seconds(self._hardware, 1 + sum(peers), inside, across, sum(peers), bool(across), self.uses)
        return dict(zip(("latency", "wire"), (time.times(bucket.sums) for time in near), strict=True))

    def _product(self, rows: int, cols: int, how: str, num: int, flops: int, dtype: str) -> Time:
        key = (rows, cols, how, num, flops, dtype)
        if key not in self._known:
            found = product_seconds(self._hardware, rows, cols, how or dtype, num, flops, self.uses, dtype)
            self._known[key] = _by(found, self._slower)
        return self._known[key]

    def _pass(self, what: str, elements: int, fragment: float, wire: int) -> Time:
        return _by(pass_seconds(self._hardware, what, elements, fragment, wire, self.uses), self._slower)

    def _adamw(self, rank: RankClass) -> Time:
        return self._pass("adamw", rank.adamw_elements, rank.adamw_elements / 2, 4)

    def _exchange(self, bucket: BucketCount, sent: Sent, received: Sent) -> dict[str, Time]:
        latency, wire = exchange_seconds(
            self._hardware,
            bucket.num_ranks,
            max(sent.inside, received.inside),
            max(sent.across, received.across),
            max(sent.peers_inside + sent.peers_across, received.peers_inside + received.peers_across),
            bucket.num_nodes > 1,
            self.uses,
        )
        return {"latency": latency, "wire": wire}

    def _slowest_of_each_exchange(self) -> None:
        """Set each exchange's time to that of the rank that sends or receives most, on all of its ranks."""
        exchanging = [(d.key, d) for of_class in self.durations for d in of_class if d.key is not None]
        for phase in ("gather", "scatter", "relay"):
            most: dict[tuple[object, ...], dict[str, Time]] = {}
            for key, found in exchanging:
                known, mine = most.setdefault(key, {}), found.phases[phase] or {}
                for factor, time in mine.items():
                    known[factor] = known.get(factor, NOTHING).at_least(time)
            for key, found in exchanging:
                (found.phases[phase] or {}).update(most[key])


def _by(time: Time, factor: Time) -> Time:
    return Time(time.lo * factor.lo, time.mid * factor.mid, time.hi * factor.hi)


def _both(one: Mapping[str, Time], other: Mapping[str, Time]) -> dict[str, Time]:
    return {factor: one[factor].plus(other[factor]) for factor in one}


def _owned(bucket: BucketCount) -> Iterable[tuple[Matrices, int]]:
    return zip(bucket.matrices, bucket.owners or (1,) * len(bucket.matrices), strict=True)


def _square(bucket: BucketCount) -> tuple[int, int]:
    """A shape for the products of shards on the Gram route: the short side of what the bucket holds."""
    short = max((min(m.rows, m.cols) for m in bucket.matrices), default=1024)
    return short, short


def _identity(rank: RankClass, bucket: BucketCount) -> tuple[object, ...]:
    """Key that tells buckets of different groups apart, equal on all ranks of a group."""
    return (rank.stage, bucket.route, bucket.num_ranks, bucket.num_nodes, bucket.number, bucket.wire)


def _fragments_of(exact: Exact) -> dict[tuple[object, ...], int]:
    """Fragments that a rank holds in a bucket, by `_identity`: as a rule one of each of its group's matrices."""
    owned: dict[tuple[object, ...], float] = {}
    members: dict[tuple[object, ...], int] = {}
    for rank in exact.classes:
        for bucket in rank.buckets:
            key = _identity(rank, bucket)
            owned[key] = owned.get(key, 0.0) + rank.count * sum(m.num / several for m, several in _owned(bucket))
            members[key] = members.get(key, 0) + rank.count
    ranks = {_identity(r, b): b.num_ranks for r in exact.classes for b in r.buckets}
    return {key: max(1, round(owned[key] / max(1.0, members[key] / ranks[key]))) for key in owned}
