"""The report of an audit as data, text and JSON. The same on every rank that shares parameters with the others."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

_UNJUDGED = (
    "It is not judged; fp32 weights, Orthogonalizer(dtype=torch.float32), or method='standard' for 'gram', judge it."
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be.

    Attributes:
        name: Name of the fault; docs/audit.md has the table.
        where: The parameter, with its matrix if it has several.
        found: What was found.
        allowed: What is allowed.
        remedy: What to do.
        severity: "warning" for what may be meant so: it never raises.
    """

    name: str
    where: str
    found: str
    allowed: str
    remedy: str
    severity: Literal["error", "warning"] = "error"

    def __str__(self) -> str:
        return f"{self.where}: {self.name}: {self.found}. Allowed: {self.allowed}. {self.remedy}"


@dataclass(frozen=True, slots=True)
class MatrixRow:
    """One matrix of the audited step against the dense reference.

    Attributes:
        order: Place in the optimizer.
        owners: Ranks that orthogonalize it by the plan.
        status: "ok", "fault", "no gradient", "zero", "lr is 0", "not checked: STAGE" for a stage of a variant of which
            the audit has no formula, or "inconclusive": rounding alone could explain half of this update.
        compared: Whether there was an update to compare; the numbers below are 0 otherwise.
        difference, allowed: Of the applied update to the same arithmetic run densely, in the direction where rounding
            hides least, relative to what the update has there at most ([Note: the shake] in auditing/evidence.py). Of
            equal bits 0, and what is allowed beside exact arithmetic.
        momentum_difference, momentum_allowed: Of the momentum after the step.
        scale, expected_scale: Factor on lr, recovered from the update and by the global shape.
        sigma_min, sigma_max: Singular values of the applied update.
        band: What the coefficients make of the matrix's own spectrum: smallest and largest.
        momentum_dtype: The dtype in which it is stored.
    """

    name: str
    order: tuple[int, int]
    rows: int
    cols: int
    owners: tuple[int, ...]
    route: str
    arithmetic: str
    status: str
    compared: bool = False
    difference: float = 0.0
    allowed: float = 0.0
    momentum_difference: float = 0.0
    momentum_allowed: float = 0.0
    scale: float = 0.0
    expected_scale: float = 0.0
    sigma_min: float = 0.0
    sigma_max: float = 0.0
    band: tuple[float, float] = (0.0, 0.0)
    momentum_dtype: str = ""


@dataclass(frozen=True)
class AuditReport:
    """One audited step.

    The same on every rank that shares parameters with this one, directly or through others; the plan is of this rank's
    parameters.

    Attributes:
        step: Its number since the optimizer was made.
        runs: rank -> (matrices that went through the orthogonalizer in the step, matrices that the plan gives it).
        num_compared: Parameters whose replicas were compared bit for bit.
        plan: As text.
    """

    step: int
    findings: tuple[Finding, ...]
    matrices: tuple[MatrixRow, ...]
    runs: dict[int, tuple[int, int]]
    num_compared: int
    plan: str = field(default="", compare=False)

    @property
    def errors(self) -> tuple[Finding, ...]:
        """Findings that are not warnings."""
        return tuple(f for f in self.findings if f.severity == "error")

    @property
    def ok(self) -> bool:
        """True if nothing at all was found."""
        return not self.findings

    def message(self) -> str:
        """The text of an AuditError."""
        lines = [f"- {finding}" for finding in self.findings]
        return (
            f"the audit of step {self.step} found that it was not Muon's update. The step is complete: weights and "
            "momentum have changed. Return to the last checkpoint before the fault\n" + "\n".join(lines)
        )

    def to_json(self, path: str | Path | None = None) -> str:
        """The report as JSON text (NaN as null); written to `path` if one is given."""
        text = json.dumps(_finite({**asdict(self), "ok": self.ok}), indent=1)
        if path is not None:
            Path(path).write_text(text + "\n")
        return text

    def __str__(self) -> str:
        parts = [f"audit of step {self.step}", _matrices(self.matrices), self._counts()]
        parts += [f"{f.severity}: {f}" for f in self.findings] or ["nothing found: this step was Muon's"]
        return "\n".join(part for part in parts if part)

    def _counts(self) -> str:
        found, planned = (sum(run[i] for run in self.runs.values()) for i in (0, 1))
        return (
            f"Newton-Schulz ran on {found} matrices on {len(self.runs)} rank(s), planned {planned}; "
            f"replicas of {self.num_compared} parameter(s) compared bit for bit"
        )


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, (list, tuple)) else value


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _matrices(matrices: Sequence[MatrixRow]) -> str:
    if not matrices:
        return ""
    head = "matrix|shape|owner|arithmetic|status|difference|allowed|scale|expected|singular values|band|momentum"
    rows = [head.split("|")]
    for m in matrices:
        row = [m.name, f"{m.rows}x{m.cols}", ",".join(map(str, m.owners)), m.arithmetic, m.status]
        if m.compared:
            row += [
                f"{m.difference:.1e}",
                f"{m.allowed:.1e}",
                f"{m.scale:.4g}",
                f"{m.expected_scale:.4g}",
                f"{m.sigma_min:.3f}..{m.sigma_max:.3f}",
                f"{m.band[0]:.3f}..{m.band[1]:.3f}",
                m.momentum_dtype,
            ]
        rows.append(row + ["-"] * (len(rows[0]) - len(row)))
    names = ", ".join(m.name for m in matrices if m.status == "inconclusive")
    note = f"inconclusive: rounding alone could explain half of the update of {names}. {_UNJUDGED}\n" if names else ""
    return _table(rows) + "\n" + note
