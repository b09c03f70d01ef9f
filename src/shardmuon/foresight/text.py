"""Tables of a report as text, drawn by rich."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import Any

from shardmuon.foresight.sections import Section

_WIDTH = 150  # characters of a line where nobody looks


def plain(found: Sequence[Section]) -> str:
    """Make aligned text of all sections."""
    file = io.StringIO()
    _draw(found, file=file, width=_WIDTH, color_system=None)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()).rstrip()


def show(found: Sequence[Section]) -> None:
    """Print all sections, on a terminal as wide as that is."""
    if sys.stdout.isatty():
        _draw(found)
    else:
        print(plain(found))


def _draw(found: Sequence[Section], **console: Any) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError as error:
        raise ImportError(f"tables need rich ({error}): pip install 'shardmuon[plan]'") from None
    out = Console(highlight=False, **console)
    for section in found:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=bool(section.header))
        for name in section.header or ("", ""):
            table.add_column(name)
        for row in section.rows:
            table.add_row(*map(Text, row))
        notes = (Text(note, style="dim") for note in section.notes)
        out.print(Text(section.title, style="bold underline"), table, *notes, "", sep="\n")
