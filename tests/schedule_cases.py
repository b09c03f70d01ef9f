"""Expected values for each coefficient schedule and number of steps.

When run as a script with the name of a new schedule, this file prints a row for CASES and two rows for
docs/orthogonalization.md.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class ScheduleCase(NamedTuple):
    """Expected properties of a Newton-Schulz schedule.

    Attributes:
        band: Smallest and largest singular value after the steps, to two decimal places. Before the steps, singular
            values are between 0.01 and 1.
        slope: Slope of the iteration at zero: the product of the linear coefficients of all steps.
        errors: For each matrix of `spectra.SPECTRA`, an upper bound on the relative distance (in the Frobenius norm)
            between the result of exact steps and the polar factor. Tests add a bound for rounding errors.
        restarts: Number of restarts of the Gram form in fp16 and in fp32. For fp16, a tuple can instead list the
            indices of the steps before which the Gram form restarts.
    """

    band: tuple[float, float]
    slope: int
    errors: tuple[float, ...]
    restarts: tuple[int | tuple[int, ...], int]


CASES = {
    ("keller", 5): ScheduleCase((0.68, 1.13), 485, (0.155, 0.204, 0.401, 0.184, 0.247), (1, 1)),
    ("quintic", 5): ScheduleCase((0.98, 1.03), 493, (0.0168, 0.08, 0.371, 0.085, 0.0154), (1, 1)),
    # With 5 steps of "polar_express", the Gram form restarts at the step that Dao-AILab's autotuner chooses.
    ("polar_express", 5): ScheduleCase((0.87, 1.12), 976, (0.086, 0.098, 0.268, 0.087, 0.095), ((2,), 1)),
    ("polar_express", 6): ScheduleCase((1.0, 1.0), 1828, (0.00099, 0.0218, 0.155, 0.0011, 0.0013), (2, 2)),
    # After 8 steps of "polar_express", three of the five test matrices equal their polar factors up to fp64 rounding,
    # so their `errors` are 0.0.
    ("polar_express", 8): ScheduleCase((1.0, 1.0), 6363, (0.0, 5.6e-5, 0.0089, 0.0, 0.0), (2, 2)),
    ("cans", 5): ScheduleCase((0.86, 1.11), 998, (0.079, 0.093, 0.263, 0.081, 0.081), (1, 1)),
    ("cubic", 5): ScheduleCase((0.81, 1.30), 114, (0.185, 0.243, 0.582, 0.410, 0.172), (1, 1)),
    ("deepseek_v4", 10): ScheduleCase((1.0, 1.0), 79263, (2.9e-4, 2.6e-4, 2.3e-4, 2.4e-4, 2.1e-4), (3, 3)),
}


def band(schedule: Callable[[Any], Any], s_min: float) -> tuple[float, float]:
    """Return the smallest and the largest value to which a schedule maps singular values between `s_min` and 1."""
    ends = ((s_min, 1.0), (math.log(s_min), 0.0))
    even, of_logs = (torch.linspace(*of, 200_001, dtype=torch.float64) for of in ends)
    out = schedule(torch.cat([even, of_logs.exp()]))
    return float(out.min()), float(out.max())


def slope(schedule: Any) -> float:
    """Return the factor by which a schedule multiplies the smallest singular values: the product of the linear
    coefficients (a) of all steps."""
    return math.prod(a for a, _, _ in schedule.triples)


def _print(name: str) -> None:
    """Print the rows of a schedule for the tables in the tests and the documentation."""
    from orthogonalize.test_gram import worst_error
    from spectra import SPECTRA, polar_factor, spectrum
    from tolerances import steps_written_out

    from shardmuon.orthogonalize import _plan_restarts
    from shardmuon.orthogonalize.schedules import schedule

    new = schedule(name)
    low, high = band(new, 0.01)
    pairs = [(steps_written_out(x := spectrum(*of), new.triples), polar_factor(x)) for of in SPECTRA]
    errors = tuple(float(f"{1.005 * float((y - polar).norm() / polar.norm()):.3g}") for y, polar in pairs)
    restarts = tuple(len(_plan_restarts(new.triples, d)) for d in (torch.float16, torch.float32))
    case = ScheduleCase((round(low, 2), round(high, 2)), round(slope(new)), errors, restarts)  # type: ignore[arg-type]
    forms = [f"{worst_error(new.triples, torch.float32, form):.0e}" for form in ("standard", "gram")]
    rows = (
        f'    ("{name}", {len(new.triples)}): ScheduleCase{tuple(case)!r},',
        f"| `{name}` | {len(new.triples)} | {low:.3f} .. {high:.3f} | {round(slope(new)):,} | {new.source} |",
        f"| `{name}` | {forms[0]} | {forms[1]} |",
    )
    for row in rows:
        # Exponents are printed without a leading zero (2e-5 instead of 2e-05), as in the tables.
        print(re.sub(r"(\de-)0", r"\1", row))


if __name__ == "__main__":
    _print(sys.argv[1])
