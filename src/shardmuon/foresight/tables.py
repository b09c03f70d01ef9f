"""Measured values by size, and what lies between them. Beyond the last one a table says that it extrapolates."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Point(NamedTuple):
    """Measured values at one size: the least, the middle and the largest."""

    at: float
    lo: float
    mid: float
    hi: float


class TableValue(NamedTuple):
    """A value read off a table.

    Attributes:
        lo, mid, hi: The interval and what to expect.
        outside: Whether the size lies beyond the table.
    """

    lo: float
    mid: float
    hi: float
    outside: bool = False


@dataclass(frozen=True)
class Curve:
    """Values over sizes, straight between neighbours in logarithms of both.

    Attributes:
        points: At least one, sizes ascending, all numbers positive.
        slope: Beyond the ends: 0 keeps the last value (a rate), 1 grows in proportion (a time).
    """

    points: tuple[Point, ...]
    slope: float = 0.0

    def __post_init__(self) -> None:
        sizes = [p.at for p in self.points]
        if not sizes or sizes != sorted(set(sizes)) or min(min(p) for p in self.points) <= 0.0:
            raise ValueError(f"a table needs ascending sizes and positive values, found {self.points}")

    def at(self, size: float) -> TableValue:
        """The value at a size > 0."""
        last = self.points[-1].at
        beyond = max(1.0, size / last) ** self.slope  # below the first size a time keeps its value: it is all latency
        sizes = [p.at for p in self.points]
        lo, mid, hi = (beyond * _between(size, sizes, [p[i] for p in self.points]) for i in (1, 2, 3))
        return TableValue(lo, mid, hi, size > last or (size < self.points[0].at and not self.slope))


def _between(at: float, places: Sequence[float], values: Sequence[float]) -> float:
    """Interpolate straight in logarithms. A place that was measured, and all beyond the ends, have a measured value."""
    above = bisect_left(places, at)
    if above == len(places) or above == 0 or places[above] == at:
        return values[min(above, len(places) - 1)]
    share = math.log(at / places[above - 1]) / math.log(places[above] / places[above - 1])
    return values[above - 1] * math.pow(values[above] / values[above - 1], share)


@dataclass(frozen=True)
class Surface:
    """Values over size and aspect: one curve for each aspect that was measured.

    Attributes:
        curves: (aspect = long side over short side, its curve over short sides), aspects ascending.
    """

    curves: tuple[tuple[float, Curve], ...]

    def __post_init__(self) -> None:
        aspects = [aspect for aspect, _ in self.curves]
        if not aspects or aspects != sorted(set(aspects)):
            raise ValueError(f"a table needs ascending aspects, found {aspects}")

    def at(self, size: float, aspect: float) -> TableValue:
        """The value at a size and an aspect: along both neighbouring aspects, then between them."""
        aspects = [one for one, _ in self.curves]
        above = min(bisect_left(aspects, aspect), len(aspects) - 1)
        below = above if aspect <= aspects[0] or aspect >= aspects[above] else above - 1
        found = [self.curves[i][1].at(size) for i in range(below, above + 1)]
        lo, mid, hi = (_between(aspect, aspects[below : above + 1], [one[i] for one in found]) for i in range(3))
        beyond = len(aspects) > 1 and aspect > aspects[-1]
        return TableValue(lo, mid, hi, beyond or any(one.outside for one in found))


def of_triples(rows: Sequence[Sequence[float]], slope: float = 0.0) -> Curve:
    """A curve from rows of (size, lo, mid, hi), or (size, lo, hi) with the geometric mean as the middle."""
    points = []
    for row in sorted(rows, key=lambda row: row[0]):
        if len(row) not in (3, 4):
            raise ValueError(f"a row is [size, lo, mid, hi] or [size, lo, hi], found {list(row)}")
        at, lo, hi = float(row[0]), float(row[1]), float(row[-1])
        if min(lo, hi) <= 0.0:
            raise ValueError(f"a table needs positive values, found {list(row)}")
        points.append(Point(at, lo, float(row[2]) if len(row) == 4 else math.sqrt(lo * hi), hi))
    return Curve(tuple(points), slope)
