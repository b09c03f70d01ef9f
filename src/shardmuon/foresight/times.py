"""Seconds as an interval: what is known of a time is where it lies, and a value in between. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Time(NamedTuple):
    """Seconds that something takes.

    Attributes:
        lo: If all that is uncertain turns out well.
        mid: What to expect; of measured times the median.
        hi: If it turns out badly.
    """

    lo: float
    mid: float
    hi: float

    def plus(self, other: Time) -> Time:
        """Time of two things, one after the other."""
        return Time(self.lo + other.lo, self.mid + other.mid, self.hi + other.hi)

    def times(self, factor: float) -> Time:
        """Time of `factor` such things, one after the other."""
        return Time(self.lo * factor, self.mid * factor, self.hi * factor)

    def at_least(self, other: Time) -> Time:
        """The longer of two times, end by end."""
        return Time(max(self.lo, other.lo), max(self.mid, other.mid), max(self.hi, other.hi))

    def holds(self, seconds: float) -> bool:
        """True if a measured time lies inside the interval."""
        return self.lo <= seconds <= self.hi

    def __str__(self) -> str:
        """Text like "1.2 .. 3.4 ms"."""
        scale, unit = _unit(self.hi)
        return f"{_short(self.lo * scale)} .. {_short(self.hi * scale)} {unit}"


_UNITS = ((1.0, "s"), (1e3, "ms"), (1e6, "us"))
NOTHING = Time(0.0, 0.0, 0.0)


def seconds(value: float) -> str:
    """Text like "3.4 ms"."""
    scale, unit = _unit(value)
    return f"{_short(value * scale)} {unit}"


def _unit(value: float) -> tuple[float, str]:
    return next(((s, u) for s, u in _UNITS if value >= 1 / s), _UNITS[-1])


def _short(value: float) -> str:
    """Text of a number, with three digits and no exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def total(times: Iterable[Time]) -> Time:
    """Time of several things, one after the other."""
    found = NOTHING
    for time in times:
        found = found.plus(time)
    return found
