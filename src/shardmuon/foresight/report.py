"""Estimate the cost of Muon in a training job, and report it as text tables or as an HTML page.

The estimated time of an optimizer step is an interval of seconds. The report also contains a timeline of the step and
the reasons why the interval is wide. The estimate is computed from the counts of a plan (`job.Exact`) and the
performance data of the hardware. Nothing is measured or run.

[Note: the width of an interval]
    Each uncertain factor (`_FACTORS`) has a best, a middle and a worst value. At one end of the interval, all factors
    have their best values; at the other end, all have their worst values. To find a factor's share of the width, the
    step is simulated twice, with the factor's best and worst values. All other factors keep their middle values. The
    share is the difference between the two times, divided by the width. The report names the factors with the largest
    shares.
"""

from __future__ import annotations

import io
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from shardmuon.foresight.counting import BucketCount
from shardmuon.foresight.hardware import Hardware, Rates
from shardmuon.foresight.job import Exact
from shardmuon.plan.plan import Plan
from shardmuon.price.clock import BucketTimes, Course, Event
from shardmuon.price.machines import MACHINES

_FACTORS = {
    "products": "how much of the peak the matrix products reach",
    "memory": "how fast momentum, copies and weights pass through memory",
    "wire": "how fast exchanges are",
    "latency": "what an exchange of nothing takes",
    "overlap": "whether exchanges pass while products run",
    "host": "what Python and launches take",
}
_EXCHANGES = ("gather", "scatter", "relay")
# maps each uncertain factor to the value that a simulation uses: 0 for the best value, 1 for the middle, 2 for the
# worst
_Pick = Mapping[str, int]
_Ends = NDArray[np.float64]  # array of shape (3,) with the best, middle and worst value of an estimate
# maps each uncertain factor to the part of an estimated time, in seconds, that depends on this factor
_Seconds = dict[str, _Ends]
_Key = tuple[object, ...]  # identifier of a bucket (group of matrices), equal on all ranks that exchange the bucket


class Time(NamedTuple):
    """An uncertain number (usually a time in seconds), given as an interval with a middle value.

    Attributes:
        lo: Smallest value.
        mid: Most likely value, or the median if times were measured.
        hi: Largest value.
    """

    lo: float
    mid: float
    hi: float

    def __str__(self) -> str:
        """Format the ends of the interval, for example as "1.2 .. 3.4 ms"."""
        return _seconds(self.lo, self.hi)


def _seconds(*values: float) -> str:
    """Format one or two numbers of seconds in a suitable unit, such as "3.4 ms" or "1.2 .. 3.4 ms"."""
    return _scaled([1e6 * value for value in values], 1000, ("us", "ms", "s"))


def _scaled(values: Sequence[float], step: int, units: Sequence[str]) -> str:
    """Format numbers with a common unit, such as "1.2 .. 3.4 ms".

    The unit is the largest one in which the last number is at least 1. Numbers of at least 100 are rounded to integers,
    and smaller numbers to three significant digits.

    Args:
        values: Numbers in the smallest unit.
        step: Ratio of each unit to the next smaller unit.
        units: Names of the units, from the smallest to the largest.
    """
    at = 0
    while abs(values[-1]) >= step ** (at + 1) and at + 1 < len(units):
        at += 1
    parts = (value / step**at for value in values)
    texts = (f"{part:,.0f}" if abs(part) >= 100 or part == 0 else f"{part:.3g}" for part in parts)
    return f"{' .. '.join(texts)} {units[at]}"


def plan(
    model: str | nn.Module,
    mesh: str,
    *,
    gpu: str | Path | Hardware = "h100",
    engine: str = "torch",
    gpus_per_node: int | None = None,
    tokens_per_step: float | None = None,
    active_params: float | None = None,
    weights: torch.dtype = torch.float32,
    **options: Any,
) -> Report:
    """Estimate the time, memory and communication that Muon needs in a job on any mesh. The job's ranks are not
    started, and no GPU is used.

    Args:
        model: Name of a preset, path to a config.json, MODULE:FUNCTION, or a module (preferably on the meta device).
        mesh: Sizes of the mesh axes, such as "dp=8 shard=64 tp=8 ep=8 pp=4".
        gpu: Name of a hardware file in the package, such as "h100", path to a hardware file, or a `Hardware`.
        engine: Framework that distributes the training: "torch" (DDP, FSDP2, HSDP, TP, EP) or "zero" (ZeRO 1 and 2).
        gpus_per_node: Number of ranks per node, which are assumed to be connected by fast links. Default: the number in
            the hardware file.
        tokens_per_step: Number of tokens in a training step, over all ranks. If given, the report compares the time of
            a training step with Muon to the time with AdamW.
        active_params: Number of parameter elements used per token. Required with `tokens_per_step` if the model has
            experts and is not a preset.
        weights: dtype of the model's parameters and, except under ZeRO, of their gradients.
        **options: Options of `Muon`, such as ``method``, ``momentum_dtype`` or ``ns_steps``.

    Returns:
        The report, which can be printed or written to a file with `report.write_html(path)`. `report.price.step` is the
        estimated time of an optimizer step, and `report.exact` contains all counts.

    Raises:
        ValueError: The model or GPU does not exist, or the mesh does not fit the model. The message suggests a
            correction.

    Examples:
        >>> report = plan("llama3-8b", "shard=64", gpu="h100", tokens_per_step=4e6)
        >>> report.exact.world, report.price.step.lo < report.price.step.hi
        (64, True)
    """
    hardware = gpu if isinstance(gpu, Hardware) else Hardware.load(gpu)
    per_node = hardware.gpus_per_node if gpus_per_node is None else gpus_per_node
    exact = Exact.of_job(
        model,
        mesh,
        engine=engine,
        gpus_per_node=per_node,
        active_params=active_params,
        device=hardware.device,
        weights=weights,
        machine=MACHINES.get(hardware.name),
        **options,
    )
    return Report(exact, hardware, Price.of(exact, hardware, tokens=tokens_per_step))


# ------------------------------------------------------------------------------------------------------------ the price


@dataclass(frozen=True)
class Price:
    """Estimated time of one optimizer step on one kind of machine.

    Attributes:
        step: Seconds that `optimizer.step()` takes on the slowest rank, as an interval.
        rank: The slowest rank. If several ranks are equally slow, the lowest of them.
        parts: Seconds that the slowest rank spends on each activity: matrix products, memory passes, AdamW, work on the
            CPU, the vote before the step, and waiting for exchanges.
        timeline: Events on the slowest rank, with every uncertain factor at its middle value.
        reasons: Causes of the width of the interval `step`, largest first, as (factor, description, share of the
            width). A factor's share is the part of the width that this factor alone causes.
        ends: Dict from rank to the time in seconds at which the rank finishes the step, with every uncertain factor at
            its middle value. The dict contains one rank of each class of ranks that do equal work.
        tokens: Number of tokens in a training step, over all ranks; None if unknown.
        adamw: Seconds that a step would take on the rank with the most elements if AdamW updated all parameters.
        training: Seconds for the forward and backward pass of a training step, estimated from the model's FLOPs per
            token and the fraction of peak FLOP/s that training reaches; None if the number of tokens is unknown.
        unverified: Unchecked hardware numbers that the estimate used, as a dict from name to source.
        extrapolated: Lookups beyond the ends of tables in the hardware file, each as "table: size".
    """

    step: Time
    rank: int
    parts: Mapping[str, Time]
    timeline: tuple[Event, ...]
    reasons: tuple[tuple[str, str, float], ...]
    ends: Mapping[int, float] = field(repr=False)
    adamw: Time
    tokens: float | None = None
    training: Time | None = None
    unverified: Mapping[str, str] = field(default_factory=dict)
    extrapolated: tuple[str, ...] = ()

    @classmethod
    def of(cls, exact: Exact, hardware: Hardware, *, tokens: float | None = None) -> Price:
        """Estimate the time of an optimizer step from the counts of a plan.

        Args:
            exact: Counts of the plan.
            hardware: Machine on which every rank runs.
            tokens: Number of tokens in a training step, over all ranks. If given, `training` is estimated, too.

        Raises:
            ValueError: The hardware file lacks a number that the plan needs; `tokens` is not a positive finite number;
                or `tokens` is given but the number of active parameters is unknown.
        """
        if tokens is not None and not 0 < tokens < math.inf:
            raise ValueError(f"tokens={tokens} must be a number above 0. Write the tokens of one step, e.g. 4e6")
        rates, alone = Rates(hardware), Rates(hardware)
        pricer = _Pricer(exact, rates)
        best, middle, worst = (pricer.run(dict.fromkeys(_FACTORS, which)) for which in range(3))
        slowest = max(range(len(middle)), key=lambda i: (middle[i].end, -i))
        step = Time(*sorted(max(course.end for course in courses) for courses in (best, middle, worst)))
        training = None if tokens is None else _training_seconds(exact, rates, tokens)
        found, most = exact.classes[slowest], max(c.muon_elements + c.adamw_elements for c in exact.classes)
        return cls(
            step=step,
            rank=found.ranks[0],
            parts=pricer.parts(slowest, [courses[slowest].waited for courses in (best, middle, worst)]),
            timeline=tuple(middle[slowest].events),
            reasons=pricer.reasons(step, found.stage),
            ends={c.ranks[0]: course.end for c, course in zip(exact.classes, middle, strict=True)},
            adamw=Time(*(alone.of("host_step") + alone.passed("adamw", most, max(1, most / 64), 4))),
            tokens=tokens,
            training=training,
            unverified=dict(sorted(rates.unverified.items())),
            extrapolated=tuple(rates.extrapolated),
        )

    @classmethod
    def of_plan(cls, plan: Plan, gpu: str | Path | Hardware, *, gpus_per_node: int | None = None) -> Price:
        """Estimate the time of an optimizer step from an existing plan. AdamW's time is not included, because a plan
        does not contain AdamW's parameters.

        Args:
            plan: Plan of an existing optimizer, or a plan constructed by hand.
            gpu: Name of a hardware file in the package, such as "h100", path to a hardware file, or a `Hardware`.
            gpus_per_node: Number of ranks per node, which are assumed to be connected by fast links. Default: the
                number in the hardware file.

        Raises:
            ValueError: No file describes the hardware `gpu`, or its file lacks a number that the plan needs.
        """
        hardware = gpu if isinstance(gpu, Hardware) else Hardware.load(gpu)
        per_node = hardware.gpus_per_node if gpus_per_node is None else gpus_per_node
        return cls.of(Exact.of_plan(plan, per_node), hardware)

    @property
    def reason(self) -> str:
        """Description of the one or two main reasons why the estimated time is uncertain."""
        if not self.reasons or self.step.hi == self.step.lo:
            return "nothing in it is uncertain"
        return "; ".join(f"{text} ({share:.0%})" for _, text, share in self.reasons[:2] if share >= 0.05)


def _training_seconds(exact: Exact, rates: Rates, tokens: float) -> Time:
    """Estimate the seconds that the forward and backward pass take: 6 x active parameters x tokens / (ranks x peak
    FLOP/s x MFU), where MFU (model FLOPs utilization) is the fraction of the peak that training reaches."""
    if not exact.tokens_flops:
        raise ValueError(
            f"{exact.model}: how many parameters work on a token is not known (it has experts), so a training "
            "step cannot be priced. Give --active-params (active_params=), or leave --tokens-per-step out"
        )
    work = exact.tokens_flops * tokens / exact.world
    return Time(*(work / (rates.of("peak bfloat16") * rates.of("mfu"))))


class _Pricer:
    """Simulator of optimizer steps, based on estimated times for all buckets (groups of matrices) on all classes of
    ranks. A class is a set of ranks that do equal work.

    Attributes:
        _held: For each class, the indices of its buckets in `_phases`. Equal buckets of different classes have the same
            index.
        _overlap: Fraction of an exchange that can run at the same time as matrix products.
        _first: Time before the first bucket, as a dict from uncertain factor to the seconds that depend on this factor.
        _phases: For each bucket, a tuple of its key (None if the bucket is not exchanged) and a nested dict from phase
            to uncertain factor to seconds. The dict omits exchanges that the bucket does not need.
        _adamw: Seconds that AdamW takes on a rank of each class.
    """

    def __init__(self, exact: Exact, rates: Rates) -> None:
        self._exact, self._rates = exact, rates
        fragments, held = _fragments_of(exact), dict[tuple[_Key, BucketCount], int]()
        self._held = [[held.setdefault((_group(c.stage, b), b), len(held)) for b in c.buckets] for c in exact.classes]
        self._slower = rates.slowdown(min(exact.world, rates.hardware.gpus_per_node, exact.mesh.gpus_per_node))
        self._overlap = rates.of("overlap")
        votes = max((c.votes for c in exact.classes), default=0)
        hops = math.log2(max(2, exact.world)) * votes if exact.world > 1 else 0.0
        self._first = {"host": rates.of("host_step"), "latency": rates.of("agreement") * hops}
        self._phases = [
            (group if bucket.exchange else None, self._phases_of(bucket, fragments[group])) for group, bucket in held
        ]
        slowest: dict[tuple[_Key | None, str], _Seconds] = {}  # The slowest rank determines how long an exchange takes.
        for key, phases in self._phases:
            for phase in [phase for phase in _EXCHANGES if phase in phases]:
                known = slowest.setdefault((key, phase), dict(phases[phase]))
                for factor, seconds in phases[phase].items():
                    known[factor] = np.maximum(known[factor], seconds)
                phases[phase] = known
        self._adamw = [self._pass("adamw", c.adamw_elements, c.adamw_elements / 2, 4) for c in exact.classes]

    def run(self, pick: _Pick, stage: int | None = None) -> list[Course]:
        """Simulate an optimizer step and return one timeline per class of ranks (ranks that do equal work). `pick`
        selects the best, middle or worst value of each uncertain factor. If `stage` is given, simulate only this
        pipeline stage, which is possible because the optimizer does not exchange data between pipeline stages."""
        which = [i for i, c in enumerate(self._exact.classes) if stage in (None, c.stage)]
        times = {number: self._times(number, pick) for number in {n for i in which for n in self._held[i]}}
        return Course.simulate(
            [[times[number] for number in self._held[i]] for i in which],
            sum(float(seconds[pick[factor]]) for factor, seconds in self._first.items()),
            [float(self._adamw[i][pick["memory"]]) for i in which],
            float(self._overlap[pick["overlap"]]),
        )

    def _times(self, number: int, pick: _Pick) -> BucketTimes:
        key, phases = self._phases[number]
        found: dict[str, Any] = {
            phase: sum(float(seconds[pick[factor]]) for factor, seconds in by_factor.items())
            for phase, by_factor in phases.items()
        }
        return BucketTimes(key, **{**dict.fromkeys(_EXCHANGES), **found})

    def reasons(self, step: Time, stage: int) -> tuple[tuple[str, str, float], ...]:
        """Compute how much each uncertain factor contributes to the width of an interval (see [Note: the width of an
        interval]).

        Args:
            step: Time of the step, as an interval of seconds.
            stage: Index of the slowest pipeline stage. Only this stage is simulated.

        Returns:
            Tuples (factor, description, share of the width), largest share first.
        """
        found = []
        for factor, text in _FACTORS.items():
            low, high = (
                max(course.end for course in self.run({**dict.fromkeys(_FACTORS, 1), factor: which}, stage))
                for which in (0, 2)
            )
            found.append((factor, text, max(0.0, high - low) / (step.hi - step.lo) if step.hi > step.lo else 0.0))
        return tuple(sorted(found, key=lambda row: -row[2]))

    def parts(self, number: int, waited: Sequence[float]) -> dict[str, Time]:
        """Return a dict from activity to the time that each rank of a class (ranks that do equal work) spends on it.

        Args:
            number: Index of the class.
            waited: Seconds spent waiting for exchanges if all uncertain factors have their best, middle or worst
                values, in this order.
        """
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
        # bytes copied between exchange buffers and batches of matrices
        copied = bucket.received.gather.bytes + bucket.sent.scatter.bytes
        products = sum((rates.product(*m) for m in bucket.matrices), np.zeros(3))
        phases: dict[str, _Seconds] = {
            "pack": passed("pack", foreign, 0.5),
            "fill": {"memory": fill["memory"] + momentum["memory"], "host": fill["host"] + momentum["host"]},
            "orthogonalize": {"products": self._slower * products, "memory": rates.memory(2 * copied)},
            "apply": passed("apply", bucket.held - idle, 0.5, bucket.sent.relay.bytes),
            "finish": passed("apply", idle, 0.5 * bucket.relays),
        }
        there_are = (bucket.gathers, bucket.gathers, bucket.relays)
        for phase, there_is, *sides in zip(_EXCHANGES, there_are, bucket.sent, bucket.received, strict=True):
            if there_is:
                inside, across, peers = map(max, *sides)
                phases[phase] = rates.exchange(bucket.num_ranks, inside, across, peers, bucket.num_nodes > 1)
        return phases

    def _pass(self, what: str, elements: int, fragment: float, wire: int) -> _Ends:
        return self._slower * self._rates.passed(what, elements, fragment, wire)


def _group(stage: int, bucket: BucketCount) -> _Key:
    return (stage, bucket.exchange, bucket.num_ranks, bucket.num_nodes, bucket.number, bucket.itemsize)


def _fragments_of(exact: Exact) -> dict[_Key, int]:
    """Estimate how many fragments (parts of matrices) a rank holds in each bucket (group of matrices), and return a
    dict from bucket key to this number. A rank is assumed to hold one fragment of each matrix that is sharded over its
    group of ranks."""
    owned, members = defaultdict[_Key, int](int), defaultdict[_Key, float](float)
    for rank in exact.classes:
        for bucket in rank.buckets:
            key = _group(rank.stage, bucket)
            owned[key] += rank.count * sum(m.num for m in bucket.matrices)
            # Each rank counts as 1 / num_ranks, so `members` is the number of groups that exchange the bucket.
            members[key] += rank.count / bucket.num_ranks
    return {key: max(1, round(owned[key] / max(1.0, members[key]))) for key in owned}


# ----------------------------------------------------------------------------------------------------------- the report


@dataclass(frozen=True)
class Report:
    """Report on the estimated cost of Muon in a training job, as text or as an HTML page.

    Attributes:
        exact: Counts of what each rank stores, sends and computes. They are exact, except that the memory needed during
            a step is an upper bound.
        hardware: Machine for which the time was estimated.
        price: Estimated time of an optimizer step, and of the forward and backward pass before it.
    """

    exact: Exact
    hardware: Hardware
    price: Price

    @property
    def overhead(self) -> tuple[float, float, float]:
        """Extra time of a training step with Muon instead of AdamW, as fractions (smallest, middle, largest) of the
        time of a training step with AdamW. All three are zero if the number of tokens is unknown.

        The same uncertain factors affect both optimizers. So Muon's fastest step is compared with AdamW's fastest step,
        and Muon's slowest step with AdamW's slowest step.
        """
        if self.price.training is None:
            return 0.0, 0.0, 0.0
        whole, ours, theirs = self.price.training, self.price.step, self.price.adamw
        return (
            (ours.lo - theirs.lo) / (whole.hi + theirs.lo),
            (ours.mid - theirs.mid) / (whole.mid + theirs.mid),
            (ours.hi - theirs.hi) / (whole.lo + theirs.hi),
        )

    def html(self) -> str:
        """Render the report as a self-contained HTML page that adapts to the browser's light or dark mode."""
        from jinja2 import Environment  # jinja2 is always installed, because torch depends on it.

        page = Path(__file__).parent / "data" / "report.html"
        environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
        events = self.price.timeline
        return environment.from_string(page.read_text(encoding="utf-8")).render(
            report=self,
            price=self.price,
            sections=_sections(self),
            events=list(zip(events, _lanes(events), strict=True)),
            phases=_PHASES,
        )

    def write_html(self, path: Path) -> None:
        """Write the report to a file, as an HTML page."""
        path.write_text(self.html(), encoding="utf-8")

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int = 150) -> str:
        """Render the report as text tables with lines of at most `width` characters."""
        try:
            from rich.console import Console
            from rich.table import Table
        except ImportError as error:
            raise ImportError(f"tables need rich ({error}): pip install 'shardmuon[plan]'") from None
        file = io.StringIO()
        out = Console(file=file, width=width, color_system=None, highlight=False, markup=False, emoji=False)
        for section in _sections(self):
            table = Table(*section.header or ("", ""), box=None, pad_edge=False, padding=(0, 2, 0, 0))
            table.show_header = bool(section.header)
            for row in section.rows:
                table.add_row(*row)
            out.print(section.title, table, *section.notes, "", sep="\n")
        return "\n".join(line.rstrip() for line in file.getvalue().splitlines()).rstrip()


_KEY = (
    "NS runs: matrices orthogonalized. calls + votes: exchanges (all-to-all) and votes (messages between hosts), as in "
    "14 + 1. kept: weights, gradients, state. in a step: at most, beside what is kept."
)
_MANY = 12  # maximum length of the table of ranks and of the list of extrapolations


class _Section(NamedTuple):
    """Table in the report, with a title and remarks.

    Attributes:
        title: Line above the table.
        rows: Contents of the cells, row by row.
        header: Names of the columns; empty for a table of (name, description) pairs.
        notes: Remarks below the table, one per line.
    """

    title: str
    rows: Sequence[tuple[str, ...]]
    header: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def _size(value: float) -> str:
    """Format a number of bytes with a binary unit, such as "1.5 GiB"."""
    return _scaled((value,), 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def _number(value: float) -> str:
    """Format a count, for example 70.6 billion as "70.6 B"."""
    return f"{value:,.0f}" if value < 1e6 else _scaled((value / 1e6,), 1000, ("M", "B", "T", "P"))


def _sections(report: Report) -> list[_Section]:
    """Make all tables of a report, in the order in which they are printed."""
    parts = [(name, str(time)) for name, time in report.price.parts.items() if time.hi > 0.0]
    of_time = _Section(f"Where rank {report.price.rank}'s time goes", parts, ("part", "seconds"))
    return [_summary(report), _answers(report), _ranks(report.exact), of_time, _grounds(report)]


def _summary(report: Report) -> _Section:
    exact, mesh = report.exact, report.exact.mesh
    params, in_matrices = _number(exact.muon_params + exact.adamw_params), _number(exact.muon_params)
    # The number of nodes is rounded up, because the last node may be only partly filled.
    num_nodes = -(-exact.world // mesh.gpus_per_node)
    rows = {
        "model": f"{exact.model}: {params} parameters, {in_matrices} of them in matrices",
        "active": f"{_number(exact.tokens_flops / 6)} parameters work on a token" if exact.tokens_flops else "",
        "source": exact.source,
        "mesh": f"{mesh} ({mesh.engine}), {exact.world:,} ranks on {num_nodes:,} nodes of {mesh.gpus_per_node}",
        "hardware": report.hardware.title,
        "options": ", ".join(f"{key} {value}" for key, value in exact.options.items()),
    }
    return _Section("Plan", [row for row in rows.items() if row[1]])


def _answers(report: Report) -> _Section:
    price = report.price
    rows = {
        "optimizer step": f"{price.step}, most likely {_seconds(price.step.mid)}",
        "why so wide": price.reason,
        "memory of a rank": _memory(report),
        "over AdamW": f"AdamW's step: {price.adamw}",
        "straggler": _straggler(report),
    }
    if price.training is not None:
        low, middle, high = (f"{100 * share:.3g} %" for share in report.overhead)
        rows["over AdamW"] = (
            f"a training step is {middle} longer than with AdamW ({low} .. {high}); forward and backward of "
            f"{_number(price.tokens or 0)} tokens take {price.training}; {rows['over AdamW']}"
        )
    return _Section("Answers", [*rows.items()])


def _memory(report: Report) -> str:
    largest, have = report.exact.largest, report.hardware.middle("memory_bytes")
    # The job may need less memory than `need`, because `largest.peak` is an upper bound.
    need = largest.stored.total + largest.peak
    never = "does not fit" if largest.stored.total > have else "may not fit"
    fits = never if need > have else "tight" if need > 0.9 * have else "fits"
    kept, more = _size(largest.stored.total), _size(largest.peak)
    without = "activations" + (" and ZeRO 1's whole gradients" if report.exact.mesh.engine == "zero" else "")
    return (
        f"{fits}: {_size(need)} of {_size(have)}; {kept} between steps, at most {more} more in one, without {without}"
    )


def _straggler(report: Report) -> str:
    exact, price = report.exact, report.price
    late = sorted(price.ends.items(), key=lambda pair: (-pair[1], pair[0]))
    busiest, mean = (
        max(exact.classes, key=lambda c: c.flops),
        sum(c.count * c.flops for c in exact.classes) / exact.world,
    )
    idle = sum(c.count for c in exact.classes if not c.flops)
    return (
        f"rank {price.rank}; the last rank is done after {_seconds(late[0][1])}, the first after "
        f"{_seconds(late[-1][1])}. Most matmul FLOPs: rank {busiest.ranks[0]}, "
        f"{busiest.flops / mean if mean else 1:.2f} of the mean"
        + (f"; {idle:,} of {exact.world:,} ranks orthogonalize nothing" if idle else "")
    )


def _ranks(exact: Exact) -> _Section:
    classes = sorted(exact.classes, key=lambda c: (-c.flops, c.ranks[0]))
    rows = [
        (
            f"{c.ranks[0]:,}" + (f" and {c.count - 1:,} like it" if c.count > 1 else ""),
            str(c.stage),
            str(c.orthogonalized),
            _scaled((c.flops / 1e6,), 1000, ("MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP")) if c.flops else "none",
            _size(c.stored.total),
            _size(c.peak),
            *map(_size, c.sent),
            f"{c.exchanges} + {c.votes}",
        )
        for c in classes[:_MANY]
    ]
    rest = sum(c.count for c in classes[_MANY:])
    notes = (f"{rest:,} ranks of {len(classes) - _MANY:,} other kinds are left out.", _KEY) if rest else (_KEY,)
    first = ("rank", "stage", "NS runs", "matmul FLOPs", "kept", "in a step")
    return _Section("Ranks", rows, (*first, "sent in node", "sent between", "calls + votes"), notes)


def _grounds(report: Report) -> _Section:
    rows = [("computed", "by the planner that the job itself uses: bytes, collectives, matrices, operations, memory")]
    rows += [("a bound", "what a step takes of memory beside what is kept, less as a rule")]
    rows += [("extrapolated", text) for text in report.price.extrapolated[:_MANY]]
    rows += [("unverified", f"{name}: {source}") for name, source in report.price.unverified.items()]
    rows += [("note", report.hardware.notes)] if report.hardware.notes else []
    return _Section("Assumptions", rows)


# -------------------------------------------------------------------------------------------------- -- page's timeline

_PHASES = {
    "begin": "vote and host",
    "pack": "pack: momentum, and copies to the wire",
    "gather": "gather to owners",
    "fill": "fill: momentum of what stays here",
    "orthogonalize": "orthogonalize",
    "scatter": "scatter results",
    "apply": "apply to the weights",
    "relay": "relay results to other replicas",
    "finish": "apply what was relayed",
    "adamw": "AdamW",
}


def _lanes(events: Sequence[Event]) -> list[int]:
    """Assign each event to a lane, that is, a horizontal row of the timeline. Lane 0 is for computation, and all other
    lanes are for exchanges. Exchanges that overlap in time are assigned to different lanes."""
    free: list[float] = []  # end time of the last event in each exchange lane of the timeline
    found = []
    for event in events:
        lane = 0
        if event.phase in ("gather", "scatter", "relay"):
            at = next((i for i, end in enumerate(free) if end <= event.start), len(free))
            free[at : at + 1] = [event.end]
            lane = at + 1
        found.append(lane)
    return found
