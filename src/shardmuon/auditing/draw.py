"""Draw a report. The only file of the audit that needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

AuditReport = Any  # of report.py, where reports draw themselves by this file
MatrixRow = Any

_COLORS = {"ok": "#0b6e4f", "inconclusive": "#8d8741", "fault": "#c8553d"}
_MAX_SPECTRA = 12


def draw(report: AuditReport, path: Path) -> None:
    """Write an image: singular values matrix by matrix, and the error of each beside what is allowed.

    Raises:
        ValueError: No matrix was compared.
    """
    rows = [m for m in report.matrices if m.compared]
    if not rows:
        raise ValueError("no matrix was compared in this audit: there is nothing to draw")
    shown = sorted(rows, key=lambda m: m.status != "fault")[:_MAX_SPECTRA]
    shown.sort(key=lambda m: (m.order, m.name))
    columns = min(4, len(shown))
    lines = -(-len(shown) // columns)
    height = 2.6 * lines + 1.2 + max(1.6, 0.28 * len(rows))
    figure = Figure(figsize=(11.0, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    verdict = "nothing found" if report.ok else f"{len(report.findings)} finding(s)"
    figure.suptitle(f"Audit of step {report.step}: {verdict}")
    grid = figure.add_gridspec(2, 1, height_ratios=[2.6 * lines, max(1.6, 0.28 * len(rows))])
    spectra = grid[0].subgridspec(lines, columns)
    for index, row in enumerate(shown):
        _draw_spectrum(figure.add_subplot(spectra[index // columns, index % columns]), row, index == 0)
    _draw_errors(figure.add_subplot(grid[1]), rows)
    figure.savefig(path)


def _draw_spectrum(ax: Axes, row: MatrixRow, legend: bool) -> None:
    expected, applied = sorted(row.results, reverse=True), sorted(row.applied, reverse=True)
    at = [i / max(1, len(applied) - 1) for i in range(len(applied))]
    size = 3.0 if len(at) > 4 else 6.0
    ax.axhspan(*row.band, color="#dfe7e3", zorder=0)
    ax.plot(at, expected, "o", color="#9aa5a0", label="reference", markersize=size)
    ax.plot(at, applied, "-", marker=".", color=_COLORS.get(row.status, "#c8553d"), label="applied", linewidth=1.2)
    ax.set_title(f"{row.name}\n{row.rows}x{row.cols}, rank {','.join(map(str, row.owners))}", fontsize=8)
    ax.set_ylim(0.0, 1.1 * max(1.2, *expected, *applied))
    ax.set_xticks([])
    ax.tick_params(labelsize=7)
    if legend:
        ax.set_ylabel("singular value", fontsize=8)
        ax.legend(frameon=False, fontsize=7, loc="lower left")


def _draw_errors(ax: Axes, rows: list[MatrixRow]) -> None:
    for y, row in enumerate(rows):
        ax.plot([row.allowed, row.allowed], [y - 0.35, y + 0.35], color="#333333", linewidth=1.5)
        found = max(row.difference, 1e-16)
        ax.plot(found, y, "o", color=_COLORS.get(row.status, "#c8553d"), markersize=6)
    ax.set_xscale("log")
    ax.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=8)
    ax.invert_yaxis()
    ax.set_xlabel("relative difference of the update to the reference (bar: allowed)", fontsize=8)
    ax.grid(alpha=0.25)
