"""A report as one page: no script, no font, no picture from elsewhere; light or dark as the reader's system is."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from shardmuon.foresight.advice import Findings
from shardmuon.foresight.sections import sections
from shardmuon.plan.pipeline import Event

_TEMPLATE = Path(__file__).parent / "data" / "report.html"
_WIDTH, _LEFT, _LANE, _GAP = 1000.0, 84.0, 34.0, 10.0  # of the drawing, in its own units
_LINKS = ("gather", "scatter", "relay")
_LEAST = 0.6  # width at which something is still seen
_NAMES = {
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


class Bar(NamedTuple):
    """A rectangle of the timeline."""

    x: float
    y: float
    width: float
    height: float
    phase: str
    title: str


class Tick(NamedTuple):
    """A mark on the axis."""

    x: float
    text: str


class Timeline(NamedTuple):
    """A drawing for the template."""

    width: float
    height: float
    left: float
    bars: tuple[Bar, ...]
    ticks: tuple[Tick, ...]
    lanes: tuple[tuple[float, str], ...]  # middle of each lane, and its name


def timeline(events: tuple[Event, ...]) -> Timeline:
    """Rectangles of a step: what the rank computes above, what its links carry below."""
    end = max((e.end for e in events), default=0.0) or 1.0
    scale = (_WIDTH - _LEFT - 10) / end
    rows: list[float] = []  # when each lane of exchanges is free: two are in flight at a time
    bars = []
    for event in events:
        lane = 0
        if event.phase in _LINKS:
            lane = next((i for i, free in enumerate(rows) if free <= event.start), len(rows))
            rows[lane : lane + 1] = [event.end]
            lane += 1
        where = "" if event.bucket < 0 else f", bucket {event.bucket}"
        bars.append(
            Bar(
                round(_LEFT + event.start * scale, 2),
                lane * (_LANE + _GAP) + _GAP,
                round(max(_LEAST, (event.end - event.start) * scale), 2),
                _LANE,
                event.phase,
                f"{_NAMES[event.phase]}{where}: {1e3 * event.start:.3g} to {1e3 * event.end:.3g} ms",
            )
        )
    height = (len(rows) + 1) * (_LANE + _GAP) + _GAP
    lanes = [(_GAP + _LANE / 2, "computes")]
    lanes += [(_GAP + _LANE / 2 + i * (_LANE + _GAP), "links") for i in range(1, len(rows) + 1)]
    ticks = tuple(
        Tick(round(_LEFT + share * end * scale, 1), f"{share * end * 1e3:.3g} ms") for share in (0, 0.25, 0.5, 0.75, 1)
    )
    return Timeline(_WIDTH, height + 22, _LEFT, tuple(bars), ticks, tuple(lanes))


def page(report: Findings) -> str:
    """The whole HTML page."""
    try:
        from jinja2 import Environment
    except ImportError as error:  # torch brings it, as long as it asks for it
        raise ImportError(f"the page needs jinja2 ({error}): pip install jinja2") from None
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    price = report.price
    phases = [(name, text) for name, text in _NAMES.items() if any(e.phase == name for e in price.timeline)]
    return template.render(
        title=f"{report.exact.model} on {report.exact.world:,} {report.hardware.title}",
        mesh=str(report.exact.mesh),
        step=str(price.step),
        reason=price.reason,
        rank=price.rank,
        sections=sections(report),
        timeline=timeline(price.timeline),
        phases=phases,
    )
