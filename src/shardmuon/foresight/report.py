"""A plan with its price: what `shardmuon plan` prints, writes and saves."""

from __future__ import annotations

from pathlib import Path

from shardmuon.foresight.advice import Findings, Replan, advise
from shardmuon.foresight.hardware import Hardware, Uses
from shardmuon.foresight.page import page
from shardmuon.foresight.pricing import adamw_step, price
from shardmuon.foresight.sections import sections
from shardmuon.foresight.text import plain
from shardmuon.foresight.types import Exact


class Report(Findings):
    """Findings to show: `print` them, or write their page."""

    def html(self) -> str:
        """One HTML page that needs nothing from elsewhere."""
        return page(self)

    def write_html(self, path: Path) -> None:
        """Write the page of `html` to a file."""
        path.write_text(self.html(), encoding="utf-8")

    def __str__(self) -> str:
        return plain(sections(self))


def make_report(
    exact: Exact,
    hardware: Hardware,
    *,
    tokens: float | None = None,
    dollars_per_hour: float | None = None,
    replan: Replan | None = None,
) -> Report:
    """Price a plan and AdamW's step on the same mesh, and look for what would help.

    Args:
        exact: The plan's counts.
        hardware: Machine of every rank.
        tokens: Tokens of a training step.
        dollars_per_hour: Price of one rank.
        replan: Makes plans with changes, for advice; None: no advice.

    Raises:
        ValueError: See `price`.
    """
    found = price(exact, hardware, tokens=tokens, dollars_per_hour=dollars_per_hour)
    return Report(
        exact,
        hardware,
        found,
        () if replan is None else advise(exact, hardware, replan),
        adamw_step(exact, hardware, Uses()),
    )
