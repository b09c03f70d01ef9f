"""Tables in texts: of routing, of a plan, which may have ten thousands of rows, of `shardmuon verify`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["table"]


def table(
    rows: Iterable[Sequence[str]],  # of one length, the header first
) -> str:
    """Lines of a table, its columns side by side and dashes under the header."""
    header, *body = rows
    widths = [max(map(len, column)) for column in zip(header, *body, strict=True)]
    lines = (header, ["-" * width for width in widths], *body)
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
