"""Bounds of the numeric tests, derived from what is rounded how often and what the steps make of it."""

from __future__ import annotations

import torch

from shardmuon.orthogonalize.gram_error import standard_amplification
from shardmuon.orthogonalize.schedules import Triples


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of one rounding to nearest."""
    return torch.finfo(dtype).eps / 2


def rounding_bound(coefficients: Triples, dtype: torch.dtype, excess: float = 1.0) -> float:
    """Largest relative error of an update in this dtype, to first order, on gradients of any rank and spectrum.

    `standard_amplification` sums what each rounding of the standard form can grow to at worst. `excess`: how many times
    that another form is allowed. Above 1 (half precision) it says nothing.
    """
    return excess * standard_amplification(coefficients) * unit_roundoff(dtype)
