"""One row for each schedule and number of steps, with all that its tests know of it. A new one: see [Note: to add one]
in orthogonalize/schedules.py; this file, run with the name of a schedule, prints the row."""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch
from spectra import SPECTRA, exact_steps, low_and_full_ranks, polar_factor, spectrum

from shardmuon.orthogonalize import orthogonalize
from shardmuon.orthogonalize.gram import plan_restarts
from shardmuon.orthogonalize.schedules import schedule


class ScheduleCase(NamedTuple):
    """What is known of some steps of a schedule.

    Attributes:
        band: Smallest and largest result of singular values from 0.01 on, to two digits.
        slope: The product of the a's.
        errors: For each of SPECTRA the relative Frobenius error to the polar factor in exact arithmetic, rounded up:
            what the polynomial leaves. Those of Gaussian, log-spaced and power-law values are known for the published
            schedules, but for the square Gaussian, which depends on the seed. Rounding adds what the bounds of the
            dtypes say.
        fp16, fp32: Restarts of the Gram form that these products need: how many.
    """

    band: tuple[float, float]
    slope: int
    errors: tuple[float, ...]
    fp16: int
    fp32: int


CASES = {}
