"""Tests of Newton-Schulz schedules: names, sources, computed bands of singular values, and errors for schedules that
flip signs or diverge."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from schedule_cases import CASES, band, slope
from spectra import normal, run
from tolerances import assert_near, assert_rounded, roundoff

from shardmuon import Muon, schedule
from shardmuon.orthogonalize import orthogonalize
from shardmuon.orthogonalize.schedules import _MARGIN

KELLER = (3.4445, -4.7750, 2.0315)
RAW_CANS = (
    (8.4703, -25.1081, 18.6293),
    (4.1828, -3.1087, 0.5806),
    (3.9619, -2.9541, 0.5630),
    (3.2866, -2.4647, 0.5074),
    (2.2737, -1.6447, 0.4162),
)


def outputs(triples: Any, low: float, high: float, count: int = 100_001) -> torch.Tensor:
    s = torch.linspace(low, high, count, dtype=torch.float64)
    for a, b, c in triples:
        s = a * s + b * s**3 + c * s**5
    return s


@pytest.mark.parametrize(("name", "steps"), CASES)
def test_schedules_are_the_published_ones_with_the_bands_and_slopes_of_their_polynomials(name: str, steps: int) -> None:
    found, case = schedule(name, steps), CASES[name, steps]
    ends = tuple(round(end, 2) for end in band(found, 0.01))
    assert (len(found.triples), ends, round(slope(found))) == (steps, case.band, case.slope)
    for start in (0.5, 0.01, 0.001):
        out = outputs(found.triples, start, 1.0)
        # The band of a schedule consists of its smallest and largest output. The function `band` and this test compute
        # the band on different grids, which both contain the end points of the interval. A grid with spacing h misses
        # an extremum of the output f by at most |f''| h^2 / 8, where f'' h^2 is estimated by second differences of the
        # outputs.
        missed = float(out.diff(n=2).abs().max()) / 8
        rounding = 8 * len(found.triples) * slope(found) * roundoff(torch.float64)
        pairs = zip(band(found, start), (float(out.min()), float(out.max())), strict=True)
        assert all(abs(a - b) <= missed + rounding for a, b in pairs)
    # Let f be the composition of all steps. For a small s, f(s) / s differs from the slope of f at 0 by less than
    # s^2 slope^3, because of the cubic terms of the steps.
    tiny = 1e-9
    share = float(outputs(found.triples, tiny, 2 * tiny, 2)[0]) / tiny
    assert_near(torch.tensor(share), torch.tensor(slope(found)), tiny**2 * slope(found) ** 3 + roundoff(torch.float32))
    assert found.source and name == found.name


def test_names_of_other_libraries_are_known() -> None:
    names = {"simple": "keller", "you5": "quintic", "Quintic": "quintic", "deepseekv4": "deepseek_v4"}
    assert {name: schedule(name).triples for name in names} == {n: schedule(of).triples for n, of in names.items()}
    assert schedule(KELLER).name == "keller"
    given = [schedule(KELLER), schedule(KELLER, 3), schedule([list(KELLER)] * 2, 9)]
    # A list of coefficient triples has one triple per step, so requesting 9 steps has no effect.
    assert [found.triples for found in given] == [(KELLER,) * count for count in (5, 3, 2)]


def test_polar_express_has_its_safety_factor_and_a_tail() -> None:
    raw = (8.28721201814563, -23.595886519098837, 17.300387312530933)
    first = schedule("polar_express", 4).triples[0]
    # Both the computed and the expected coefficients are rounded twice, once for a power and once for a quotient.
    assert_rounded(first, (raw[0] / 1.01, raw[1] / 1.01**3, raw[2] / 1.01**5), roundings=2 * (5 + 1))
    assert schedule("polar_express", 10).triples[7:] == ((1.875, -1.25, 0.375),) * 3
    assert [len(schedule("polar_express", steps).triples) for steps in range(4, 9)] == [4, 5, 6, 7, 8]


AOL = (  # T. Boissin (2025) designed the following schedule for row-scaled input.
    (4.0098, -7.0585, 2.4635),
    (3.4585, -5.5479, 2.5959),
    (2.7573, -3.2939, 1.4254),
    (2.7215, -3.0494, 1.3169),
)
REFUSED: list[tuple[Any, Any, str]] = [
    (AOL, None, r"'custom' flips signs: it maps 0\.88"),
    (RAW_CANS, None, r"'custom' diverges: it maps 1(\.00\d+)? to"),
    (((3.3657, -3.3421, 0.0), (2.5744, -1.4957, 0.0), (2.5369, -1.4313, 0.0)), None, "diverges|flips signs"),
    ((1.0, 2.0, 3.0), None, "'custom' diverges: it maps"),
    ((-1.0, 0.0, 0.0), None, "'custom' flips signs"),
    ((math.nan, 0.0, 0.0), None, "'custom' diverges"),
    ("polar_expres", None, "'polar_expres' is not a known schedule: write one of 'keller', 'quintic', 'polar_express'"),
    ("quintic", 7, "schedule 'quintic' has exactly 5 steps, found 7. Leave ns_steps out"),
    ("deepseek_v4", 5, "schedule 'deepseek_v4' has exactly 10 steps, found 5"),
    ("polar_express", 0, "has at least one steps, found 0"),
]


@pytest.mark.parametrize(("coefficients", "steps", "message"), REFUSED, ids=str)
def test_bad_schedules_are_refused_with_the_reason(coefficients: Any, steps: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedule(coefficients, steps)
    with pytest.raises(ValueError, match="ns_coefficients=" if steps != 0 else "ns_steps=0"):
        Muon([torch.nn.Parameter(torch.ones(2, 3))], lr=1e-3, ns_coefficients=coefficients, ns_steps=steps)


def test_dividing_as_the_message_says_mends_a_diverging_set() -> None:
    with pytest.raises(ValueError, match=r"Divide them by f = 1.02: write \(a / f, b / f\*\*3, c / f\*\*5\)"):
        schedule(RAW_CANS)
    assert schedule([(a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in RAW_CANS]).triples == schedule("cans").triples


def test_every_schedule_has_a_row_of_tests() -> None:
    with pytest.raises(ValueError, match="write one of") as error:
        schedule("none")
    known = re.findall(r"'(\w+)'", str(error.value))[1:]
    assert {schedule(name).name for name in known} == {name for name, _ in CASES}, "tests/schedule_cases.py"


SOUND = [(name, len(schedule(name).triples)) for name in dict.fromkeys(name for name, _ in CASES)]


@st.composite
def near_known_ones(draw: st.DrawFn) -> list[tuple[float, float, float]]:
    """Draw a random schedule that is close to a published one. It has the first steps of the published schedule, with
    each step's input rescaled and each coefficient changed by up to 2%."""
    name, steps = draw(st.sampled_from(SOUND))
    kept = draw(st.integers(1, steps))
    moved = []
    for a, b, c in schedule(name, steps).triples[:kept]:
        f = draw(st.floats(1.0, 1.15))
        da, db, dc = (draw(st.floats(0.98, 1.02)) for _ in range(3))
        moved.append((da * a / f, db * b / f**3, dc * c / f**5))
    return moved


@given(near_known_ones())
@settings(max_examples=80, deadline=None)
def test_an_accepted_schedule_keeps_signs_and_stays_bounded(triples: list[tuple[float, float, float]]) -> None:
    try:
        found = schedule(triples)
    except ValueError:
        reject()
    out = outputs(found.triples, 1e-5, _MARGIN, 77_777)
    assert float(out.min()) > 0.0 and float(out.max()) < 2.01
    x = normal(6, 10, dtype=torch.float64)
    y = orthogonalize(x[None], found.triples, dtype=torch.float64)[0]
    assert float(torch.linalg.svdvals(y).max()) < 2.01
    assert float((x * y).sum()) > 0.0


def test_each_group_steps_by_its_own_schedule_and_a_name_is_its_triples() -> None:
    names, how = ("polar_express", "quintic"), {"lr": 0.1, "ns_dtype": torch.float32}
    together, alone = ([torch.nn.Parameter(normal(12, 30, seed=at)) for at in range(2)] for _ in range(2))
    groups = [{"params": [p], "ns_coefficients": name} for p, name in zip(together, names, strict=True)]
    run(Muon(groups, **how), together, [9])  # type: ignore[arg-type]
    for p, q, name in zip(together, alone, names, strict=True):
        q.grad = p.grad
        Muon([q], ns_coefficients=schedule(name).triples, **how).step()  # type: ignore[arg-type]
        assert torch.equal(p, q)
