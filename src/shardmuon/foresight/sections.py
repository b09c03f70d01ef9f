"""A report as tables of text: the terminal and the page show the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardmuon.foresight.advice import Findings
from shardmuon.foresight.times import Time, seconds
from shardmuon.foresight.types import Exact, RankClass

WRAPPING = (
    "taken to be one flat parameter for each layer and one for the rest, ModuleWrapPolicy({the layer's class}); any "
    "other wrapping has another plan"
)
_TIGHT = 0.9  # of a rank's memory, without activations
_KEY = (
    "collectives of a step: exchanges (all-to-all) + votes (messages between hosts), as in 14 + 1. kept: weights, "
    "gradients, state."
)
MANY = 12  # rows of a table; the rest is counted


@dataclass(frozen=True, slots=True)
class Section:
    """A table with a title and remarks.

    Attributes:
        title: Title of the table.
        header: Names of columns; empty: a list of pairs.
        rows: Text.
        notes: Below it.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


def size(value: float) -> str:
    """Text of a number of bytes, in binary units and three digits."""
    return _scaled(value, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def number(value: float) -> str:
    """A count in words that people read: 70.6 B."""
    return f"{value:,.0f}" if value < 1e6 else _scaled(value / 1e6, 1000, ("M", "B", "T", "P"))


def operations(value: float) -> str:
    """Text of a number of floating point operations."""
    return _scaled(value / 1e6, 1000, ("MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"))


def _scaled(value: float, step: int, units: Sequence[str]) -> str:
    """A number in the largest of these units in which it is 1 or more; each is so many of the one before."""
    at = 0
    while abs(value) >= step and at + 1 < len(units):
        value, at = value / step, at + 1
    return f"{_digits(value)} {units[at]}"


def money(value: Time) -> str:
    """Text of an amount in dollars."""
    return f"${_digits(value.lo)} .. {_digits(value.hi)}"


def percent(value: float) -> str:
    """Text of a fraction in percent, with as many digits as it needs."""
    return f"{100 * value:.3g} %"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 or value == 0 else f"{value:.3g}"


def sections(report: Findings) -> list[Section]:
    """Make all tables of a report, in the order in which they are read."""
    found = [_summary(report), _answers(report), _ranks(report.exact), _matrices(report.exact), _parts(report)]
    if report.advice:
        found.append(_advice(report))
    return [*found, _grounds(report)]


def _summary(report: Findings) -> Section:
    exact = report.exact
    options = ", ".join(f"{key} {value}" for key, value in exact.options.items())
    where = f"{exact.world:,} ranks on {exact.mesh.num_nodes:,} nodes of {exact.mesh.gpus_per_node}"
    rows = [
        (
            "model",
            f"{exact.model}: {number(exact.num_params)} parameters, {number(exact.muon_params)} of them in matrices",
        ),
        *([("active", f"{number(exact.tokens_flops / 6)} parameters: {exact.active}")] if exact.active else []),
        ("source", exact.source),
        ("mesh", f"{exact.mesh} ({exact.mesh.engine}), {where}"),
        ("hardware", report.hardware.title),
    ]
    if exact.mesh.engine == "fsdp1":
        rows.append(("wrapping", WRAPPING))
    if options:
        rows.append(("options", options))
    if exact.digests:
        digests = [f"{digest} (ranks {ranks})" for ranks, digest in list(exact.digests.items())[:3]]
        more = len(exact.digests) - len(digests)
        rows.append(("digest", "; ".join(digests) + (f"; {more:,} more" if more > 0 else "")))
    return Section("Plan", (), tuple(rows))


def _answers(report: Findings) -> Section:
    exact, price = report.exact, report.price
    largest, heaviest = exact.largest, exact.heaviest
    need, have = largest.stored.total + largest.peak, report.hardware.memory_bytes
    peak = f"{size(largest.peak)} more at the peak of a step" if largest.peak else "the peak of a step is not counted"
    rows = [
        ("optimizer step", _step(price.step)),
        ("why so wide", price.reason),
        (
            "memory of a rank",
            f"{_fits(need, have)}: {size(need)} of {size(have)}; {size(largest.stored.total)} between steps, {peak}. "
            "Activations are not in it",
        ),
    ]
    if price.training is not None:
        low, middle, high = price.training.share
        rows.append(
            (
                "share of a training step",
                f"{percent(low)} .. {percent(high)}, most likely {percent(middle)}; forward and backward of "
                f"{number(price.training.tokens)} tokens take {price.training.forward_backward}",
            )
        )
    if report.adamw is not None:
        rows.append(("over AdamW", _over_adamw(report)))
    if price.dollars is not None:
        text = f"{money(price.dollars)} for 1,000 optimizer steps"
        if price.training_dollars is not None:
            text += f", {money(price.training_dollars)} for 1,000 training steps"
        rows.append(("money", text))
    late = sorted(price.ends.items(), key=lambda pair: (-pair[1], pair[0]))
    rows.append(
        (
            "straggler",
            f"rank {price.rank}; the last rank is done after {seconds(late[0][1])}, the first after "
            f"{seconds(late[-1][1])}. Most matmul FLOPs: rank {heaviest.example}, {exact.balance:.2f} of the mean"
            + (f"; {exact.idle:,} of {exact.world:,} ranks orthogonalize nothing" if exact.idle else "")
            + (f". {exact.uneven}" if exact.uneven else ""),
        )
    )
    return Section("Answers", (), tuple(rows))


def _fits(need: float, have: float) -> str:
    return "does not fit" if need > have else "tight" if need > _TIGHT * have else "fits"


def _step(step: Time) -> str:
    scale, unit = (1.0, "s") if step.hi >= 1 else (1e3, "ms") if step.hi >= 1e-3 else (1e6, "us")
    return f"{step}, most likely {_digits(step.mid * scale)} {unit}"


def _over_adamw(report: Findings) -> str:
    assert report.adamw is not None, "asked for"
    low, middle, high = report.overhead
    text = f"AdamW's step: {report.adamw}"
    if report.price.training is None:
        return text
    return f"a training step is {percent(middle)} longer than with AdamW ({percent(low)} .. {percent(high)}); {text}"


def _ranks(exact: Exact) -> Section:
    classes = sorted(exact.classes, key=lambda c: (-c.flops, c.example))
    rows = tuple(
        (
            f"{c.example:,}" + (f" and {c.count - 1:,} like it" if c.count > 1 else ""),
            str(c.stage),
            str(c.orthogonalized),
            operations(c.flops) if c.flops else "none",
            size(c.stored.total),
            size(c.peak),
            size(_inside(c)),
            size(c.sent - _inside(c)),
            f"{c.exchanges} + {c.votes}",
        )
        for c in classes[:MANY]
    )
    rest = sum(c.count for c in classes[MANY:])
    notes = (f"{rest:,} ranks of {len(classes) - MANY:,} other kinds are left out.",) if rest else ()
    header = (
        "rank",
        "stage",
        "matrices",
        "matmul FLOPs",
        "kept",
        "peak",
        "sent in node",
        "sent between",
        "collectives",
    )
    return Section(
        "Ranks",
        header,
        rows,
        (*notes, _KEY),
    )


def _inside(rank: RankClass) -> int:
    return sum(side.inside for bucket in rank.buckets for side in bucket.sides[:3])


def _matrices(exact: Exact) -> Section:
    rows = tuple(
        (m.example, f"{m.rows}x{m.cols}", f"{m.count:,}", m.route, m.how, operations(m.flops), m.reason)
        for m in exact.matrices[:MANY]
    )
    rest = len(exact.matrices) - MANY
    notes = (f"{rest} other kinds are left out.",) if rest > 0 else ()
    return Section("Matrices", ("first of them", "shape", "how many", "route", "method", "each", "why"), rows, notes)


def _parts(report: Findings) -> Section:
    rows = tuple((name, str(time)) for name, time in report.price.parts.items() if time.hi > 0.0)
    return Section(f"Where rank {report.price.rank}'s time goes", ("part", "seconds"), rows)


def _advice(report: Findings) -> Section:
    rows = tuple(
        (a.change, a.write, "cannot be: " + a.refused)
        if a.refused or a.step is None
        else (a.change, a.write, f"{a.step}: {_gain(a.gain)}, memory {'+' if a.memory >= 0 else ''}{size(a.memory)}")
        for a in report.advice
    )
    best = next((a for a in report.advice if a.helps), None)  # of what can be had
    note = "None of these makes the step shorter." if best is None else f"Smallest change that helps: {best.write}"
    return Section("What would help", ("change", "write", "step"), rows, (note,))


def _gain(gain: float) -> str:
    if gain == 0.0:
        return "no difference that a plan can tell"
    return f"{seconds(abs(gain))} {'shorter' if gain > 0 else 'longer'}"


def _grounds(report: Findings) -> Section:
    rows = [("computed", "by the planner that the job itself uses: bytes, collectives, matrices, operations, memory")]
    rows += [("extrapolated", text) for text in report.price.extrapolated[:MANY]]
    rows += [("unverified", f"{name}: {source}") for name, source in report.price.unverified.items()]
    if report.hardware.notes:
        rows.append(("note", report.hardware.notes))
    return Section("Assumptions", (), tuple(rows))
