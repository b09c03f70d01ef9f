"""Tables of a report on a terminal: by rich where it is installed and somebody looks, else plain."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence

from shardmuon.foresight.sections import Section

_WIDEST = 46  # characters of a column in plain text


def plain(found: Sequence[Section]) -> str:
    """All sections as aligned text."""
    return "\n\n".join(_plain(section) for section in found)


def show(found: Sequence[Section]) -> None:
    """Print all sections."""
    if not sys.stdout.isatty():
        print(plain(found))
        return
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(plain(found))
        return
    console = Console(highlight=False)
    for section in found:
        table = Table(title=section.title, title_justify="left", show_header=bool(section.header), title_style="bold")
        for name in section.header or ("", ""):
            table.add_column(name, overflow="fold")
        for row in section.rows:
            table.add_row(*(cell.replace("[", r"\[") for cell in row))
        console.print(table)
        for note in section.notes:
            console.print(note.replace("[", r"\["), style="dim")
        console.print()


def _plain(section: Section) -> str:
    rows = [section.header, *section.rows] if section.header else list(section.rows)
    lines = [section.title, "-" * len(section.title)]
    if not rows:
        return "\n".join([*lines, "nothing", *section.notes])
    columns = len(rows[0])
    widths = [min(_WIDEST, max(len(row[i]) for row in rows if i < len(row))) for i in range(columns)]
    for row in rows:
        cells = [
            textwrap.wrap(cell, _last(widths, i) if i == columns - 1 else widths[i]) or [""]
            for i, cell in enumerate(row)
        ]
        for at in range(max(map(len, cells))):
            parts = [(cell[at] if at < len(cell) else "").ljust(widths[i]) for i, cell in enumerate(cells)]
            lines.append("  ".join(parts).rstrip())
    return "\n".join([*lines, *section.notes])


def _last(widths: Sequence[int], at: int) -> int:
    """The last column takes what is left of a line."""
    return max(_WIDEST, 150 - sum(widths[:at]) - 2 * at)
