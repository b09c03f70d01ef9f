"""AdamW's learning rate that makes its updates as large as the matrices'."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from shardmuon.momentum.update import lr_scale

_ADAMW_RMS = 0.2  # of AdamW's updates in units of its lr, see docs/learning_rate.md


def matched_lr(updates: Iterable[tuple[int, int, float]]) -> float:
    """AdamW's lr, as a multiple of Muon's, at which updates of both have the same root mean square.

    Args:
        updates: (rows, cols, s(rows, cols)) of each matrix: an orthogonalized matrix has singular values near 1, so the
            squares of its entries add up to min(rows, cols).

    Returns:
        The multiple; 1 for `adjust_lr_fn="match_rms_adamw"`, and where there is no matrix.
    """
    found = list(updates)
    total = sum(rows * cols for rows, cols, _ in found)
    if not total:
        return 1.0
    squares = sum(min(rows, cols) * scale**2 for rows, cols, scale in found)
    return float(f"{math.sqrt(squares / total) / _ADAMW_RMS:.6g}")  # 1 exactly where it is 1


def scale_of(options: Mapping[str, Any], rows: int, cols: int) -> float:
    """The factor of Muon's lr for a matrix of this size, or 0 if the user's function fails: the optimizer says so."""
    try:
        return float(lr_scale(options.get("adjust_lr_fn"), rows, cols, float(options.get("extra_scale_factor", 1.0))))
    except Exception:
        return 0.0
