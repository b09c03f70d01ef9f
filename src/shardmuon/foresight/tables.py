"""Measured values by size, and what lies between them. Beyond the last one a table says that it extrapolates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class Point(NamedTuple):
    """What was found at one size: the least, the middle and the largest value."""

    at: float
    lo: float
    mid: float
    hi: float


class Found(NamedTuple):
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

    @cached_property
    def _logs(self) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(math.log(value) for value in p) for p in self.points)

    def at(self, size: float) -> Found:
        """The value at a size > 0."""
        first, last = self.points[0], self.points[-1]
        if size < first.at or size > last.at:
            end = first if size < first.at else last
            # Towards nothing a time keeps its first value: it is all latency there.
            factor = (size / end.at) ** (self.slope if size > last.at else 0.0)
            return Found(end.lo * factor, end.mid * factor, end.hi * factor, size > last.at or not self.slope)
        exact = next((p for p in self.points if p.at == size), None)
        if exact is not None:
            return Found(exact.lo, exact.mid, exact.hi)
        where = math.log(size)
        for below, above in itertools.pairwise(self._logs):
            if where <= above[0]:
                share = (where - below[0]) / (above[0] - below[0])
                lo, mid, hi = (math.exp(a + share * (b - a)) for a, b in zip(below[1:], above[1:], strict=True))
                return Found(lo, mid, hi)
        raise AssertionError("sizes ascend, so one of them was reached")


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

    def at(self, size: float, aspect: float) -> Found:
        """The value there: along both neighbouring aspects, then between them."""
        curves = self.curves
        if len(curves) == 1:
            return curves[0][1].at(size)
        if aspect <= curves[0][0] or aspect >= curves[-1][0]:
            at, curve = curves[0] if aspect <= curves[0][0] else curves[-1]
            found = curve.at(size)
            return found._replace(outside=found.outside or aspect > at)
        for (low, below), (high, above) in itertools.pairwise(curves):
            if aspect <= high:
                share = math.log(aspect / low) / math.log(high / low)
                a, b = below.at(size), above.at(size)
                lo, mid, hi = (x ** (1 - share) * y**share for x, y in zip(a[:3], b[:3], strict=True))
                return Found(lo, mid, hi, a.outside or b.outside)
        raise AssertionError("aspects ascend, so one of them was reached")


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
