"""Estimate the time of an optimizer step on a machine, as an interval of seconds with the causes of the interval's
width and a timeline.

The inputs are the counts of a plan (`job.Exact`) and the data of the hardware. Nothing is measured or run.

[Note: the width of an interval]
    Each uncertain factor (`_FACTORS`) has a best, a middle and a worst value. At one end of the interval, all factors
    have their best values; at the other end, all have their worst values. To find a factor's share of the width, only
    that factor is moved from its best to its worst value, while the others keep their middle values. The factors with
    the largest shares are reported as the reason.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardmuon.foresight.counting import BucketCount, RankClass, Sent
from shardmuon.foresight.hardware import Hardware, Rates, Time, load
from shardmuon.foresight.job import Exact, exact_of
from shardmuon.plan.plan import Plan
from shardmuon.price import clock
from shardmuon.price.clock import BucketTimes, Course, Event

_FACTORS = {
    "products": "how much of the peak the matrix products reach",
    "memory": "how fast momentum, copies and weights pass through memory",
    "wire": "how fast exchanges are",
    "latency": "what an exchange of nothing takes",
    "overlap": "whether exchanges pass while products run",
    "host": "what Python and launches take",
}
_EXCHANGES = ("gather", "scatter", "relay")
_Pick = Mapping[str, int]  # factor -> which of its values to use: 0 best, 1 middle, 2 worst
_Ends = NDArray[np.float64]  # (3,): best, middle and worst value
_Seconds = dict[str, _Ends]  # uncertain factor -> seconds that depend on it
_MIDDLE = dict.fromkeys(_FACTORS, 1)
_Key = tuple[object, ...]  # identifies a bucket and the ranks that exchange its matrices; equal on all these ranks
_Held = tuple[_Key, BucketCount]  # a bucket, with the work of one class of ranks in it


@dataclass(frozen=True)
class Price:
    """Estimated time of one step on one machine.

    Attributes:
        step: Seconds that `optimizer.step()` takes on the slowest rank.
        rank: The slowest rank. If several ranks do equal work, the lowest of them.
        parts: Seconds that the slowest rank spends on each activity: products, memory passes, AdamW, host, vote, and
            waiting for exchanges.
        timeline: Events on the slowest rank, with every uncertain factor at its middle value.
        reasons: Causes of the interval's width, largest first: (factor, text, share of the width from this factor
            alone).
        ends: Seconds until a rank is done, with every uncertain factor at its middle value. The keys are ranks, one for
            each class of ranks that do equal work.
        tokens: Number of tokens in a training step, over all ranks; None if unknown.
        training: Seconds of the forward and backward pass of a training step, from the model's FLOPs per token and the
            fraction of the peak that training reaches; None if the number of tokens is unknown.
        unverified: Hardware numbers that were used but never checked, with their sources.
        extrapolated: Tables that were read beyond their ends.
    """

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
        """Describe the main causes of the interval's width, at most two."""
        if not self.reasons or self.step.hi == self.step.lo:
            return "nothing in it is uncertain"
        return "; ".join(f"{text} ({share:.0%})" for _, text, share in self.reasons[:2] if share >= 0.05)


def price(exact: Exact, hardware: Hardware, *, tokens: float | None = None) -> Price:
    """Estimate the time of a step from the counts of a plan.

    Args:
        exact: Counts of the plan.
        hardware: Machine that every rank runs on.
        tokens: Number of tokens in a training step, over all ranks. If given, the time of the forward and backward pass
            is estimated, too.

    Raises:
        ValueError: The hardware file lacks a number that the plan needs, or `tokens` is not a number above 0.
    """
    if tokens is not None and not 0 < tokens < math.inf:
        raise ValueError(f"tokens={tokens} must be a number above 0. Write the tokens of one step, e.g. 4e6")
    rates = Rates(hardware)
    pricer = _Pricer(exact, rates)
    best, middle, worst = (pricer.run(dict.fromkeys(_FACTORS, which)) for which in range(3))
    slowest = max(range(len(middle)), key=lambda i: (middle[i].end, -i))
    step = Time(*sorted(max(course.end for course in courses) for courses in (best, middle, worst)))
    training = None if tokens is None else _training_seconds(exact, rates, tokens)
    found = exact.classes[slowest]
    return Price(
        step=step,
        rank=found.ranks[0],
        parts=pricer.parts(slowest, [courses[slowest].waited for courses in (best, middle, worst)]),
        timeline=tuple(middle[slowest].events),
        reasons=pricer.reasons(step, found.stage),
        ends={c.ranks[0]: course.end for c, course in zip(exact.classes, middle, strict=True)},
        tokens=tokens,
        training=training,
        unverified=dict(sorted(rates.unverified.items())),
        extrapolated=tuple(rates.extrapolated),
    )


def _training_seconds(exact: Exact, rates: Rates, tokens: float) -> Time:
    """Estimate the seconds of the forward and backward pass: 6 x active parameters x tokens / (ranks x peak FLOP/s x
    MFU), where MFU is the fraction of the peak that training reaches."""
    if not exact.tokens_flops:
        raise ValueError(
            f"{exact.model}: how many parameters work on a token is not known (it has experts), so a training "
            "step cannot be priced. Give --active-params (active_params=), or leave --tokens-per-step out"
        )
    work = exact.tokens_flops * tokens / exact.world
    return Time(*(work / (rates.of("peak bfloat16") * rates.of("mfu"))))


def adamw_step(exact: Exact, hardware: Hardware) -> Time:
    """Estimate the seconds of a step in which AdamW updates all parameters, on the rank with the most elements."""
    most = max(c.muon_elements + c.adamw_elements for c in exact.classes)
    rates = Rates(hardware)
    return Time(*(rates.of("host_step") + rates.passed("adamw", most, max(1, most / 64), 4)))


class _Pricer:
    """Estimate the times of all buckets on all classes of ranks, and simulate steps with these times.

    Attributes:
        _held: For each class of ranks, the indices of its buckets in `_phases`. Classes with equal buckets share
            entries.
        _overlap: Fraction of an exchange that can run at the same time as matrix products.
        _first: Uncertain factor -> seconds before the first bucket that depend on the factor.
        _phases: For each bucket, the key of its exchanges (None if nothing is exchanged), and phase -> uncertain factor
            -> seconds. Exchanges that the bucket does not have are left out.
        _adamw: Seconds of AdamW on each class of ranks.
    """

    def __init__(self, exact: Exact, rates: Rates) -> None:
        self._exact, self._rates = exact, rates
        fragments, held = _fragments_of(exact), dict[_Held, int]()
        self._held = [[held.setdefault((_group(c, b), b), len(held)) for b in c.buckets] for c in exact.classes]
        self._slower = rates.slowdown(min(exact.world, rates.hardware.gpus_per_node, exact.mesh.gpus_per_node))
        self._overlap = rates.of("overlap")
        votes = max((c.votes for c in exact.classes), default=0)
        hops = math.log2(max(2, exact.world)) * votes if exact.world > 1 else 0.0
        self._first = {"host": rates.of("host_step"), "latency": rates.of("agreement") * hops}
        self._phases = [
            (None if bucket.route == "local" else group, self._phases_of(bucket, fragments[group]))
            for group, bucket in held
        ]
        self._slowest_of_each_exchange()
        self._adamw = [self._pass("adamw", c.adamw_elements, c.adamw_elements / 2, 4) for c in exact.classes]

    def run(self, pick: _Pick, stage: int | None = None) -> list[Course]:
        """Simulate a step with each uncertain factor at its value in `pick`. Returns one timeline per class of ranks.
        If `stage` is given, only the ranks of that pipeline stage are simulated, since they exchange nothing with other
        stages."""
        which = [i for i, c in enumerate(self._exact.classes) if stage in (None, c.stage)]
        times = {number: self._times(number, pick) for number in {n for i in which for n in self._held[i]}}
        return clock.run(
            [[times[number] for number in self._held[i]] for i in which],
            sum(float(seconds[pick[factor]]) for factor, seconds in self._first.items()),
            [float(self._adamw[i][pick["memory"]]) for i in which],
            float(self._overlap[pick["overlap"]]),
        )

    def _times(self, number: int, pick: _Pick) -> BucketTimes:
        key, phases = self._phases[number]
        found: dict[str, Any] = dict.fromkeys(_EXCHANGES)
        for phase, by_factor in phases.items():
            found[phase] = sum(float(seconds[pick[factor]]) for factor, seconds in by_factor.items())
        return BucketTimes(key, **found)

    def reasons(self, step: Time, stage: int) -> tuple[tuple[str, str, float], ...]:
        """Compute how much each uncertain factor contributes to the width of the interval `step`, on the given
        (slowest) pipeline stage. Returns (factor, text, share of the width), largest share first."""
        found = []
        for factor, text in _FACTORS.items():
            low, high = (max(course.end for course in self.run({**_MIDDLE, factor: which}, stage)) for which in (0, 2))
            found.append((factor, text, max(0.0, high - low) / (step.hi - step.lo) if step.hi > step.lo else 0.0))
        return tuple(sorted(found, key=lambda row: -row[2]))

    def parts(self, number: int, waited: Sequence[float]) -> dict[str, Time]:
        """Sum the seconds that a class of ranks spends on each activity. `number` is the index of the class, and
        `waited` the seconds of waiting at best, in the middle and at worst."""
        phases = [item for n in self._held[number] for item in self._phases[n][1].items() if item[0] not in _EXCHANGES]

        def spent(factor: str) -> _Ends:
            return sum((seconds[factor] for _, seconds in phases if factor in seconds), np.zeros(3))

        return {
            "products": Time(*spent("products")),
            "momentum, copies, weights": Time(*spent("memory")),
            "AdamW": Time(*self._adamw[number]),
            "host": Time(*(spent("host") + self._first["host"])),
            "vote": Time(*self._first["latency"]),
            "waiting for exchanges": Time(min(waited[0], waited[2]), waited[1], max(waited[0], waited[2])),
        }

    def _phases_of(self, bucket: BucketCount, fragments: int) -> dict[str, _Seconds]:
        rates, foreign, idle = self._rates, bucket.foreign, bucket.idle
        each, calls, held = rates.of("host_matrix"), rates.of("host_bucket"), max(1, bucket.held)

        def passed(what: str, elements: int, num_calls: float = 0.0, copied: int = 0) -> _Seconds:
            memory = self._pass(what, elements, bucket.held / max(1, fragments), bucket.itemsize)
            return {
                "memory": memory + rates.memory(2 * copied),
                "host": each * (fragments / 2 * elements / held) + calls * num_calls,
            }

        fill, momentum = passed("pack", bucket.held - foreign - idle), passed("momentum", idle)
        copied = bucket.received.gather.bytes + bucket.sent.scatter.bytes  # between exchange buffers and batches
        products = sum((rates.product(*m) for m in bucket.matrices), np.zeros(3))
        phases: dict[str, _Seconds] = {
            "pack": passed("pack", foreign, 0.5),
            "fill": {"memory": fill["memory"] + momentum["memory"], "host": fill["host"] + momentum["host"]},
            "orthogonalize": {"products": self._slower * products, "memory": rates.memory(2 * copied)},
            "apply": passed("apply", bucket.held - idle, 0.5, bucket.sent.relay.bytes),
            "finish": passed("apply", idle, 0.5 * bucket.relays),
        }
        there_are = (bucket.gathers, bucket.gathers, bucket.relays)
        exchanges = zip(_EXCHANGES, there_are, bucket.sent, bucket.received, strict=False)
        return phases | {phase: self._exchange(bucket, *sides) for phase, there_is, *sides in exchanges if there_is}

    def _exchange(self, bucket: BucketCount, sent: Sent, received: Sent) -> _Seconds:
        peers = max(side.peers_inside + side.peers_across for side in (sent, received))
        inside, across = (max(sent[way], received[way]) for way in (0, 1))
        return self._rates.exchange(bucket.num_ranks, inside, across, peers, bucket.num_nodes > 1)

    def _pass(self, what: str, elements: int, fragment: float, wire: int) -> _Ends:
        return self._slower * self._rates.passed(what, elements, fragment, wire)

    def _slowest_of_each_exchange(self) -> None:
        """Set the time of each exchange to that of its slowest rank, on all its ranks and for each uncertain factor."""
        most: dict[tuple[_Key | None, str], _Seconds] = {}
        exchanges = [(key, phase, phases) for key, phases in self._phases for phase in _EXCHANGES if phase in phases]
        for key, phase, phases in exchanges:
            known = most.setdefault((key, phase), {"latency": np.zeros(3), "wire": np.zeros(3)})
            for factor, seconds in phases[phase].items():
                known[factor] = np.maximum(known[factor], seconds)
            phases[phase] = known


def _group(rank: RankClass, bucket: BucketCount) -> _Key:
    return (rank.stage, bucket.route, bucket.num_ranks, bucket.num_nodes, bucket.number, bucket.itemsize)


def _fragments_of(exact: Exact) -> dict[_Key, int]:
    """Estimate the number of fragments (parts of matrices) that a rank holds in each bucket, by the bucket's key. A
    rank is assumed to hold one fragment of each matrix that its group of ranks shares."""
    owned, members = defaultdict[_Key, int](int), defaultdict[_Key, float](float)
    for rank in exact.classes:
        for bucket in rank.buckets:
            key = _group(rank, bucket)
            owned[key] += rank.count * sum(m.num for m in bucket.matrices)
            members[key] += rank.count / bucket.num_ranks  # adds up to the number of groups with this key
    return {key: max(1, round(owned[key] / max(1.0, members[key]))) for key in owned}


# --------------------------------------------------------------------------------------------------------- a live plan


def price_plan(plan: Plan, gpu: str | Path | Hardware, *, gpus_per_node: int | None = None) -> Price:
    """Estimate the time of one step of a plan on a machine, as an interval of seconds with a timeline. AdamW's time is
    not included.

    Args:
        plan: Plan of a live optimizer, or one made by hand.
        gpu: Name of a hardware file in the package ("h100"), path of a hardware file, or a `Hardware`.
        gpus_per_node: Number of ranks that are connected by fast links. Default: as given in the hardware file.

    Raises:
        ValueError: The hardware does not exist, or its file lacks a number that the plan needs.
    """
    hardware = gpu if isinstance(gpu, Hardware) else load(gpu)
    return price(exact_of(plan, hardware.gpus_per_node if gpus_per_node is None else gpus_per_node), hardware)
